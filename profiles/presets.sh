# Sourced: the presets that are measured (profiles/bench.sh), and of which the kernel's layout knows (profiles/layout.sh), a bit each of layout.txt in this order.
PRESETS=${PRESETS:-kimi-linear-48b moonlight-16b glm-4.7-flash qwen3-coder-next-80b qwen3.6-35b-a3b llama-3.2-1b glm52-mla}
