/* mkctl: talks to a running mkd, and says what can be said about a model without one. Exit codes: host/err.h. */
#include "ipc/mkctl.h"

#include <stdio.h>
#include <string.h>

static const struct mk_command commands[] = {
    {"generate", "", "stream a generation", mkctl_generate},
    {"bench", "", "measure decoding; JSON to stdout or --out", mkctl_bench},
    {"synth", " NAME", "what a token of a full-size model costs, with synthetic weights", mkctl_synth},
    {"score", " FILE", "bits per byte of a text under a byte-level model", mkctl_score},
    {"stats", "", "the daemon's statistics as JSON", mkctl_stats},
    {"ping", "", "round trip to the daemon", mkctl_ping},
    {"trace", "", "what every worker did with its time in the next steps; a file for Perfetto", mkctl_trace},
    {"inject", " hang|idle|error", "break a daemon of a debug build, to see it recover", mkctl_inject},
    {"plan", " DIR|config.json|PRESET", "what a model costs on N workers; needs no weights", mkctl_plan},
    {"validate", " FILE", "prove or refuse a program file", mkctl_validate},
    {"diff", " [DIR]", "run two machines over one program and compare what they publish", mkctl_diff},
};
#define COUNT (sizeof commands / sizeof commands[0])

static void help(FILE *f)
{
    fputs("mkctl COMMAND [FLAGS]; mkctl COMMAND --help lists a command's flags\n", f);
    for (size_t i = 0; i < COUNT; i++) fprintf(f, "  %-10s %s\n", commands[i].name, commands[i].help);
    fputs("exit codes: 0 done, 2 usage, 3 model, 4 program, 5 capacity, 6 system, 7 already running, 8 refused by the daemon,\n"
          "            9 device, 10 timeout, 11 no daemon, 70 bug\n",
          f);
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        help(stderr);
        return MK_E_USAGE;
    }
    if (!strcmp(argv[1], "help") || !strcmp(argv[1], "--help") || !strcmp(argv[1], "-h")) {
        help(stdout);
        return MK_OK;
    }
    for (size_t i = 0; i < COUNT; i++)
        if (!strcmp(argv[1], commands[i].name)) {
            mkctl_running = &commands[i];
            int rc = commands[i].fn(argc - 1, argv + 1);
            if ((fflush(stdout) || ferror(stdout)) && !rc) {
                perror("mkctl: stdout");
                rc = MK_E_SYSTEM;
            }
            return rc;
        }
    return mkctl_usage("unknown command \"%s\" (mkctl help lists them)", argv[1]);
}
