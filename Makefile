# mkd: one resident kernel, one token at a time. `make help` says what there is.
SHELL   := /bin/bash
CC      ?= gcc
PREFIX  ?= /usr/local
BUILD   ?= build
NVCC    ?= $(firstword $(wildcard $(shell command -v nvcc 2>/dev/null) /usr/local/cuda/bin/nvcc))
NVFLAGS ?= -O3 -gencode arch=compute_90a,code=sm_90a
# Compiles a CUDA source, with further flags. LINEINFO=1: with source lines, which make the kernel four times as large, and are wrong once it is laid (below).
define nvcc
@mkdir -p $(@D)
@echo '  nvcc $< $(1)'
@$(NVCC) -std=c++17 -I. $(if $(LINEINFO),-lineinfo) $(NVFLAGS) -Xcompiler -fno-exceptions,-fno-rtti,-fno-threadsafe-statics $(1) -MMD -MP -c -o $@ $<
endef
SAN     ?=
JOBS    ?= $(shell nproc)
COMMIT  := $(shell git describe --always --dirty --abbrev=12 2>/dev/null || echo unknown)

WARN    := -Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion -Wstrict-prototypes -Wmissing-prototypes -Wno-psabi
CFLAGS  ?= -O3 -g
# -ffp-contract=off: a multiply-add is two roundings on every machine, so the twin's bits do not depend on the compiler's mood.
override CFLAGS += $(if $(DEBUG),-DMK_DEBUG) -std=c11 -D_GNU_SOURCE -I. $(WARN) -ffp-contract=off -fno-math-errno -pthread -MMD -MP $(SAN)
LDLIBS  := -lzmq -ljansson -lnuma -lm -pthread

MAINS   := host/mkd.c ipc/mkctl.c
LIBSRC  := $(filter-out $(MAINS),$(wildcard instructions/*.c megakernel/*.c host/*.c ipc/*.c))
LIBOBJ  := $(LIBSRC:%.c=$(BUILD)/%.o)
TESTS   := $(patsubst tests/%.c,$(BUILD)/tests/%,$(wildcard tests/test_*.c))
# Device code on the CPU (tests/lanes): coroutines, which the address sanitizer does not follow.
TESTS   += $(if $(SAN),,$(patsubst tests/%.cc,$(BUILD)/tests/%,$(wildcard tests/test_*.cc)))
TESTLIB := $(patsubst %.c,$(BUILD)/%.o,$(wildcard tests/support/*.c))

CUDA    := $(wildcard instructions/*.cu megakernel/*.cu host/*.cu tests/*.cu profiles/*.cu)
DEPS    := build-essential libzmq3-dev libjansson-dev libcmocka-dev libnuma-dev python3 python3-zmq

.PHONY: help all tests tested tested-asan deps test asan demo check-gpu bench gpu-package trace-picture install clean FORCE
.SECONDARY:
help:
	@echo 'make deps         install what a fresh Debian 12 needs (apt; root or sudo)'
	@echo 'make all          build mkd, mkctl and the client library into $(BUILD)/ (DEBUG=1: with fault injection, mkctl inject; LINEINFO=1: the kernels with'
	@echo '                  source lines, for ncu and compute-sanitizer on profiles/onestep and race_gpu; use another BUILD for either)'
	@echo 'make test         build and run every test (no GPU needed), plain and with sanitizers'
	@echo 'make asan         the same with the address and undefined-behaviour sanitizers only'
	@echo 'make demo         start the daemon on the small checkpoint, stream a generation, stop (PROMPT=, SEED=)'
	@echo 'make check-gpu    GPU tests; run on the machine with the GPU'
	@echo 'make bench        benchmarks; JSON under profiles/results/'
	@echo 'make gpu-package  what check-gpu and bench run, as $(BUILD)/gpu-package.tar.xz: for a machine with a GPU and no compiler (needs nvcc)'
	@echo 'make trace-picture TRACE=t.json OUT=step.svg [STEP=0]   one step of what mkctl trace -o t.json wrote'
	@echo 'make install PREFIX=/usr/local DESTDIR='

all: $(BUILD)/mkd $(BUILD)/mkctl $(BUILD)/libmkd-client.a
# What `make test` runs, and all CUDA sources; tests: and the resident kernel once more as racecheck wants it, which takes another two minutes and a half.
tested: all $(TESTS) $(BUILD)/tests/gpu/hang_client $(BUILD)/tests/gpu/soak $(BUILD)/tests/mkd-debug
tests: tested
ifeq ($(NVCC),)
all:
	@echo 'nvcc not found: built for the CPU twin only'
else
# CUDA objects link with plain gcc and the static runtime; the program still runs where there is no driver.
LDLIBS  += -L$(dir $(realpath $(NVCC)))../lib64 -lcudart_static -ldl -lrt
$(BUILD)/host/machine_gpu.o $(BUILD)/debug/host/machine_gpu.o $(BUILD)/host/synth.o $(BUILD)/ipc/mkctl_diff.o $(BUILD)/tests/support/opcase.o: override CFLAGS += -DMK_CUDA
tests: $(BUILD)/tests/gpu/race_gpu $(BUILD)/tests/gpu/race_opcodes
tested: $(patsubst %.c,$(BUILD)/%,$(wildcard tests/gpu/test_*.c)) $(BUILD)/tests/gpu/libcount_api.so $(BUILD)/tests/gpu/tear $(BUILD)/tests/gpu/bus $(BUILD)/tests/gpu/race_model $(BUILD)/tests/gpu/latency $(BUILD)/profiles/baseline $(BUILD)/profiles/onestep $(BUILD)/profiles/mkd-plain
$(BUILD)/tests/gpu/%.o: override CFLAGS += -isystem $(dir $(realpath $(NVCC)))../include
$(BUILD)/%.cu.o: %.cu
	$(call nvcc)
# Kernels that call functions: their code in the order of megakernel/layout.txt (megakernel/layout.py says why), in nvcc's order (plain/; megakernel/trim.py says in what it is another), and
# as nvcc made it.
LAID := $(addprefix $(BUILD)/megakernel/,kernel.cu.o baseline.cu.o)
$(LAID): $(BUILD)/%.cu.o: $(BUILD)/plain/%.cu.o megakernel/layout.py megakernel/sass.py megakernel/layout.txt
	@mkdir -p $(@D)
	@cp $< $@.new && python3 megakernel/layout.py apply $@.new megakernel/layout.txt && mv $@.new $@
# And the resident kernel once more for each of layout.txt's models (megakernel/laid.h), whose entry is all that others see of it.
MODELS  := $(shell sed -n 's/^. Models, from bit 0 on: //p' megakernel/layout.txt)
ALONE   := $(MODELS:%=$(BUILD)/megakernel/kernel-%.o)
LIBOBJ  := $(ALONE) $(CUDA:%.cu=$(BUILD)/%.cu.o) $(LIBOBJ) # what takes longest first
$(ALONE): $(BUILD)/megakernel/kernel-%.o: $(BUILD)/plain/megakernel/kernel.cu.o megakernel/layout.py megakernel/sass.py megakernel/layout.txt
	@mkdir -p $(@D)
	@entry=mk_kernel_$(subst .,_,$(subst -,_,$*)); objcopy --redefine-sym mk_kernel_all=$$entry --keep-global-symbol $$entry $< $@.new
	@python3 megakernel/layout.py apply $@.new megakernel/layout.txt $* && mv $@.new $@
$(BUILD)/plain/%.cu.o: $(BUILD)/nvcc/%.cu.o megakernel/trim.py megakernel/layout.py megakernel/sass.py
	@mkdir -p $(@D)
	@cp $< $@.new && python3 megakernel/trim.py $@.new && mv $@.new $@
$(BUILD)/nvcc/%.cu.o: %.cu
	$(call nvcc)
endif

$(BUILD)/host/preset.o: $(wildcard tests/fixtures/configs/*/config.json)
$(BUILD)/%.o: %.c
	@mkdir -p $(@D)
	@echo '  cc $<'
	@$(CC) $(CFLAGS) -c -o $@ $<
$(BUILD)/%.o: %.cc
	@mkdir -p $(@D)
	@echo '  c++ $<'
	@$(CXX) -O1 -g -std=c++17 -fno-exceptions -fno-rtti -Itests/lanes -I. -Wall -Wextra -Wno-unknown-pragmas -Wno-parentheses -ffp-contract=off -fno-strict-aliasing -MMD -MP -c -o $@ $<
$(BUILD)/commit: FORCE
	@mkdir -p $(@D)
	@echo '$(COMMIT)' | cmp -s - $@ || echo '$(COMMIT)' > $@
$(BUILD)/host/version.o: $(BUILD)/commit
$(BUILD)/host/version.o: override CFLAGS += -DMK_COMMIT='"$(COMMIT)"'

$(BUILD)/libmk.a: $(LIBOBJ)
	@rm -f $@ && ar rcs $@ $^
$(BUILD)/libmkd-client.a: $(BUILD)/ipc/client.o $(BUILD)/ipc/wire.o $(BUILD)/host/err.o
	@rm -f $@ && ar rcs $@ $^
$(BUILD)/mkd: $(BUILD)/host/mkd.o $(BUILD)/libmk.a
	@echo '  link $@'
	@$(CC) $(CFLAGS) -o $@ $^ $(LDLIBS)
$(BUILD)/mkctl: $(BUILD)/ipc/mkctl.o $(BUILD)/libmk.a
	@echo '  link $@'
	@$(CC) $(CFLAGS) -o $@ $^ $(LDLIBS)
# The daemon with fault injection: what DEBUG=1 changes, in front of everything else. (DEBUG=1 makes build/mkd itself one.)
$(BUILD)/debug/%.o: %.c
	@mkdir -p $(@D)
	@echo '  cc $< (debug)'
	@$(CC) $(CFLAGS) -DMK_DEBUG -c -o $@ $<
$(BUILD)/tests/mkd-debug: $(BUILD)/host/mkd.o $(BUILD)/debug/ipc/server_requests.o $(BUILD)/debug/host/machine_gpu.o $(BUILD)/libmk.a
	@echo '  link $@'
	@$(CC) $(CFLAGS) -o $@ $^ $(LDLIBS)
$(BUILD)/tests/gpu/hang_client: $(BUILD)/tests/gpu/hang_client.o $(BUILD)/libmkd-client.a
	@echo '  link $@'
	@$(CC) $(CFLAGS) -o $@ $^ $(LDLIBS)
$(BUILD)/tests/gpu/soak: $(BUILD)/tests/gpu/soak.o $(BUILD)/libmk.a
	@echo '  link $@'
	@$(CC) $(CFLAGS) -o $@ $^ $(LDLIBS)
$(BUILD)/tests/gpu/latency: $(BUILD)/tests/gpu/latency.o $(BUILD)/tests/gpu/clock.cu.o $(BUILD)/libmk.a
	@echo '  link $@'
	@$(CC) $(CFLAGS) -o $@ $^ $(LDLIBS)
$(BUILD)/tests/gpu/tear $(BUILD)/tests/gpu/bus $(BUILD)/tests/gpu/race_model: %: %.cu.o
	@echo '  link $@'
	@$(CC) $(CFLAGS) -o $@ $^ $(LDLIBS)
# In front of everything else, for programs with one kernel, which has to be in front as well: nothing of the library's is taken.
$(BUILD)/one/%.o: %.c
	@mkdir -p $(@D)
	@echo '  cc $< (one kernel)'
	@$(CC) $(CFLAGS) -DMK_ONE_KERNEL -c -o $@ $<
# The kernel as racecheck can follow it (device.cuh, mk_arrives).
$(BUILD)/race/%.cu.o: %.cu
	$(call nvcc,-DMK_RACECHECK)
$(BUILD)/race/%.ptx: %.cu
	$(call nvcc,-DMK_RACECHECK -ptx)
$(BUILD)/tests/gpu/libcount_api.so: tests/gpu/count_api.c
	@mkdir -p $(@D)
	@echo '  link $@'
	@$(CC) $(filter-out -MMD -MP,$(CFLAGS)) -shared -fPIC -o $@ $< -ldl
$(BUILD)/tests/gpu/test_%: $(BUILD)/tests/gpu/test_%.o $(TESTLIB) $(BUILD)/libmk.a
	@echo '  link $@'
	@$(CC) $(CFLAGS) -o $@ $^ -lcmocka $(LDLIBS)
OPCASES := $(patsubst %.c,$(BUILD)/%.o,$(wildcard tests/gpu/opcodes_*.c))
$(BUILD)/tests/test_compare $(BUILD)/tests/test_delta $(BUILD)/tests/gpu/test_opcodes: %: %.o $(OPCASES) $(TESTLIB) $(BUILD)/libmk.a
	@echo '  link $@'
	@$(CC) $(CFLAGS) -o $@ $^ -lcmocka $(LDLIBS)
RACE    := $(BUILD)/one/megakernel/kernel.o $(BUILD)/race/megakernel/kernel.cu.o
$(BUILD)/tests/gpu/race_gpu: $(RACE) $(BUILD)/tests/gpu/test_gpu.o $(TESTLIB) $(BUILD)/libmk.a
$(BUILD)/tests/gpu/race_opcodes: $(RACE) $(BUILD)/tests/gpu/test_opcodes.o $(OPCASES) $(TESTLIB) $(BUILD)/libmk.a
$(BUILD)/tests/gpu/race_gpu $(BUILD)/tests/gpu/race_opcodes:
	@echo '  link $@'
	@$(CC) $(CFLAGS) -o $@ $^ -lcmocka $(LDLIBS)
$(BUILD)/tests/test_%: $(BUILD)/tests/test_%.o $(TESTLIB) $(BUILD)/libmk.a
	@echo '  link $@'
	@$(CC) $(CFLAGS) -o $@ $^ -lcmocka $(LDLIBS)

$(BUILD)/profiles/baseline: $(BUILD)/profiles/baseline.o $(BUILD)/profiles/synthetic.o $(BUILD)/libmk.a
	@echo '  link $@'
	@$(CC) $(CFLAGS) -o $@ $^ $(LDLIBS)
# The daemon with the kernel in nvcc's order, for profiles/orders.py to move.
$(BUILD)/profiles/mkd-plain: $(BUILD)/host/mkd.o $(BUILD)/one/megakernel/kernel.o $(BUILD)/plain/megakernel/kernel.cu.o $(BUILD)/libmk.a
	@mkdir -p $(@D)
	@echo '  link $@'
	@$(CC) $(CFLAGS) -o $@ $^ $(LDLIBS)
$(BUILD)/profiles/onestep: $(BUILD)/profiles/onestep.o $(BUILD)/profiles/synthetic.o $(BUILD)/one/megakernel/kernel.o $(BUILD)/plain/megakernel/kernel.cu.o $(BUILD)/libmk.a
	@echo '  link $@'
	@$(CC) $(CFLAGS) -o $@ $^ $(LDLIBS)

deps:
	@missing=$$(for p in $(DEPS); do dpkg-query -W -f '$${db:Status-Status}' $$p 2>/dev/null | grep -qx installed || echo $$p; done); \
	if [ -z "$$missing" ]; then echo 'everything is installed'; exit 0; fi; \
	root=; if [ $$(id -u) != 0 ]; then root=sudo; fi; \
	$$root apt-get update -q && $$root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $$missing

# The sanitizers' build lives in $(BUILD)/asan, and runs where it is made: there are no clones for several machines (instructions/vec8.h). What object-size looks for the address sanitizer finds.
ASAN    := BUILD=$(BUILD)/asan CFLAGS='-O2 -g -march=native' SAN='-fsanitize=address,undefined -fno-sanitize=object-size -fno-sanitize-recover=all' NVCC=
tested-asan:
	+@$(MAKE) --no-print-directory $(ASAN) tested
# Racecheck's kernel as far as PTX, behind the longest compilation, so that it is not alone behind all others.
KERNELS := $(if $(NVCC),$(addprefix $(BUILD)/nvcc/megakernel/,kernel.cu.o baseline.cu.o) $(BUILD)/race/megakernel/kernel.ptx)
test:
	+@$(MAKE) --no-print-directory -j$(JOBS) tested-asan $(KERNELS) tested
	@tests/run.sh $(BUILD)/asan $(BUILD)
asan:
	+@$(MAKE) --no-print-directory -j$(JOBS) tested-asan
	@tests/run.sh $(BUILD)/asan
demo:
	+@$(MAKE) --no-print-directory -j$(JOBS) all
	@BUILD=$(BUILD) tests/demo.sh

# Both build nothing: the machine with the GPU may have no compiler.
check-gpu:
	@BUILD=$(BUILD) tests/gpu/run.sh
bench:
	@BUILD=$(BUILD) profiles/bench.sh
# What they run, without symbols, to be unpacked beside a copy of this tree. The dictionary reaches from one program to the next: all have the same kernels.
gpu-package: tests
	@[ -n '$(NVCC)' ] || { echo 'gpu-package: needs nvcc' >&2; exit 2; }
	@set -e; d=$$(mktemp -d); trap "rm -rf $$d" EXIT; \
	for f in $$(tests/gpu/run.sh --programs) profiles/baseline; do install -D -s -m 755 $(BUILD)/$$f $$d/build/$$f; done; \
	XZ_OPT='--lzma2=preset=3,dict=192MiB' tar -C $$d -cJf $(BUILD)/gpu-package.tar.xz build; ls -s --block-size=M $(BUILD)/gpu-package.tar.xz

TRACE ?= t.json
OUT   ?= step.svg
STEP  ?= 0
trace-picture:
	@python3 profiles/trace_picture.py '$(TRACE)' '$(OUT)' --step $(STEP)

# Headers keep their paths: compile clients with -I$(PREFIX)/include/mkd and link -lmkd-client -lzmq.
install: all
	install -d $(addprefix $(DESTDIR)$(PREFIX)/,bin lib include/mkd/ipc include/mkd/host share/mkd share/doc/mkd lib/systemd/system)
	install -m 755 $(BUILD)/mkd $(BUILD)/mkctl $(DESTDIR)$(PREFIX)/bin
	install -m 644 $(BUILD)/libmkd-client.a $(DESTDIR)$(PREFIX)/lib
	install -m 644 ipc/client.h ipc/wire.h $(DESTDIR)$(PREFIX)/include/mkd/ipc
	install -m 644 host/err.h $(DESTDIR)$(PREFIX)/include/mkd/host
	install -m 644 ipc/mkd_client.py $(DESTDIR)$(PREFIX)/share/mkd
	install -m 644 README.md LICENSE ipc/PROTOCOL.md $(DESTDIR)$(PREFIX)/share/doc/mkd
	sed 's|@PREFIX@|$(PREFIX)|g' host/mkd.service > $(DESTDIR)$(PREFIX)/lib/systemd/system/mkd.service

clean:
	rm -rf $(BUILD)
-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)
