/* SPDX-License-Identifier: Apache-2.0 */
/* ckpt: the command-line tool, which inspects, exports and compares what ckptfs would mount. */
#include <errno.h>
#include <getopt.h>
#include <libgen.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <jansson.h>

#include "base/err.h"
#include "base/mem.h"
#include "base/str.h"
#include "cmdline.h"
#include "tool.h"

enum { MOST_JOBS = 256 };

static const struct command {
    const char *name;
    int (*run)(const struct ckpt_tool *t, struct ckpt_err *err);
    int noperand; /* number of operands after RUN */
    const char *operands, *help;
} commands[] = {
    {"info", ckpt_cmd_info, 0, "RUN", "what the run is, its steps, what the model is"},
    {"ls", ckpt_cmd_ls, 0, "RUN", "the tensors; --files: the files"},
    {"explain", ckpt_cmd_explain, 1, "RUN TENSOR", "where a tensor's bytes come from"},
    {"export", ckpt_cmd_export, 1, "RUN DEST",
     "write the model directory DEST; --weights-only, --no-weights: a part of it"},
    {"verify", ckpt_cmd_verify, 1, "RUN DIR", "compare with a model directory"},
    {"digest", ckpt_cmd_digest, 0, "RUN", "XXH3-128 of every file; --tensors: of every tensor"},
};

static void print_help(void)
{
    (void)printf("usage: ckpt COMMAND RUN [...] [--step N] [--json] [-o option[=value],...]\n\n");
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
        (void)printf("  %-8s %-11s %s\n", commands[i].name, commands[i].operands, commands[i].help);
    (void)printf("  load, plan           run ckpt-load, which loads weights into many ranks\n"
                 "\n"
                 "  --step N    a step by name or number (default: the latest)\n"
                 "  --json      for programs           -v      all details of info and explain\n"
                 "  --jobs N    threads of export, verify and digest\n"
                 "  -q          no progress bar        -o ...  as for ckptfs: base=, dtype=, "
                 "max_shard_size= ...\n"
                 "  -h, -V      this help, the version\n"
                 "\n"
                 "Exit status: 0 good, 1 failed or different, 2 usage.\n");
}

static int parse_jobs(const char *text, unsigned *ret, struct ckpt_err *err)
{
    char *end;
    unsigned long n = strtoul(text, &end, 10);

    if (*text < '0' || *text > '9' || *end || n < 1 || n > MOST_JOBS)
        return ckpt_fail(err, CKPT_USAGE, "--jobs %s: expected a number from 1 to %d", text,
                         MOST_JOBS);
    *ret = (unsigned)n;
    return 0;
}

/* Options may come before, between and after the operands. If help or the version was asked for, it
 * is printed here and *ret_command is NULL. */
static int parse(int argc, char **argv, struct ckpt_tool *t, const struct command **ret_command,
                 struct ckpt_err *err)
{
    static const struct option longs[] = {{"step", required_argument, NULL, 's'},
                                          {"json", no_argument, NULL, 'j'},
                                          {"jobs", required_argument, NULL, 'J'},
                                          {"files", no_argument, NULL, 'f'},
                                          {"tensors", no_argument, NULL, 't'},
                                          {"weights-only", no_argument, NULL, 'w'},
                                          {"no-weights", no_argument, NULL, 'n'},
                                          {"quiet", no_argument, NULL, 'q'},
                                          {"verbose", no_argument, NULL, 'v'},
                                          {"options", required_argument, NULL, 'o'},
                                          {"help", no_argument, NULL, 'h'},
                                          {"version", no_argument, NULL, 'V'},
                                          {0}};
    int opt;

    *ret_command = NULL;
    opterr = 0;
    while ((opt = getopt_long(argc, argv, ":o:hVqv", longs, NULL)) != -1) {
        switch (opt) {
        case 's':
            t->step = optarg;
            break;
        case 'j':
            t->json = true;
            break;
        case 'J':
            if (parse_jobs(optarg, &t->jobs, err) < 0)
                return -1;
            break;
        case 'f':
            t->files = true;
            break;
        case 't':
            t->tensors = true;
            break;
        case 'q':
            t->quiet = true;
            break;
        case 'w':
            t->weights_only = true;
            break;
        case 'n':
            t->no_weights = true;
            break;
        case 'v':
            t->verbose = true;
            break;
        case 'o':
            if (ckpt_tool_set_options(t->opt, optarg, err) < 0)
                return -1;
            break;
        case 'h':
            print_help();
            return 0;
        case 'V':
            (void)printf("ckpt %s\n", ckpt_version());
            return 0;
        case ':':
            return ckpt_fail(err, CKPT_USAGE, "%s needs a value", argv[optind - 1]);
        default:
            if (ckptfs_long_option(argc, argv, ckpt_tool_set_option, t->opt, err) < 0)
                return -1;
        }
    }
    argc -= optind;
    argv += optind;
    if (argc < 1)
        return ckpt_fail(err, CKPT_USAGE, "no command (ckpt -h lists them)");
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
        if (strcmp(argv[0], commands[i].name) == 0)
            *ret_command = &commands[i];
    if (!*ret_command)
        return ckpt_fail(err, CKPT_USAGE, "%s: no such command (ckpt -h lists them)", argv[0]);
    if (argc != (*ret_command)->noperand + 2)
        return ckpt_fail(err, CKPT_USAGE, "usage: ckpt %s %s", argv[0], (*ret_command)->operands);
    t->run = argv[1];
    t->operand = argv + 2;
    t->noperand = argc - 2;
    return 0;
}

/* The loader is a separate program, so that this one need not link MPI or CUDA. */
static int run_loader(char **argv, struct ckpt_err *err)
{
    char path[PATH_MAX] = "";

    if (readlink("/proc/self/exe", path, sizeof path - 1) < 0)
        return ckpt_fail_errno(err, errno, "/proc/self/exe");
    ckpt_cleanup(ckpt_freep) char *loader = ckpt_asprintf("%s/ckpt-load", dirname(path));
    if (!loader)
        return ckpt_nomem(err);
    (void)execv(loader, argv);
    return ckpt_fail_errno(err, errno, "ckpt %s needs the loader, which is not installed: %s",
                           argv[1], loader);
}

static void print_line(void *ctx, enum ckpt_log_severity severity, const char *text)
{
    (void)ctx;
    if (severity <= CKPT_WARNING)
        (void)fprintf(stderr, "ckpt: %s%s\n", severity == CKPT_WARNING ? "warning: " : "", text);
}

/* After an allocation has failed while it parses a text, jansson 2.14 continues, and then fails an
 * assertion or writes out of bounds. Therefore this program ends when it is out of memory. */
static void *json_memory(size_t n)
{
    void *p = malloc(n ? n : 1);

    if (!p) {
        static const char text[] = "ckpt: out of memory\n";
        (void)!write(STDERR_FILENO, text, sizeof text - 1);
        _exit(1);
    }
    return p;
}

static int finish(struct ckpt_err *err, int rc)
{
    if (rc >= 0 && (fflush(stdout) != 0 || ferror(stdout)))
        rc = ckpt_fail(err, CKPT_IO, "the output could not be written");
    if (rc >= 0)
        return rc;
    (void)fprintf(stderr, "ckpt: %s\n", err->text);
    return err->code == CKPT_USAGE ? 2 : 1;
}

int main(int argc, char **argv)
{
    struct ckpt_tool tool = {0};
    const struct command *command = NULL;
    struct ckpt_err err = {0};

    json_set_alloc_funcs(json_memory, free);
    int rc = ckpt_options_new(&tool.opt, &err);
    if (rc == 0 && argc > 1 && (strcmp(argv[1], "load") == 0 || strcmp(argv[1], "plan") == 0))
        rc = run_loader(argv, &err);
    else if (rc == 0)
        rc = parse(argc, argv, &tool, &command, &err);
    if (rc == 0 && command) {
        ckpt_tool_limits();
        ckpt_options_set_log(tool.opt, print_line, NULL);
        rc = command->run(&tool, &err);
    }
    rc = finish(&err, rc);
    ckpt_options_free(tool.opt);
    return rc;
}
