/* SPDX-License-Identifier: Apache-2.0 */
/* ckpt-load: load a view's weights into the ranks of a job, or estimate the cost of that. */
#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "cmdline.h"
#include "load/load_tool.h"

static void print_help(void)
{
    (void)printf(
        "usage: ckpt load RUN --layout tp=N,pp=N,ep=N,dp=N,fsdp=N [...]   (in each rank: mpirun, "
        "torchrun, or alone)\n"
        "       ckpt plan RUN --layout ... --ranks N [...]\n"
        "\n"
        "  --layout L           who needs what; the product of its numbers is the number of ranks\n"
        "  --readers WHO        once: every byte by one rank of the job; node: of each node;\n"
        "                       each: every rank for itself; auto (default): what the rates say\n"
        "  --share N            only each N consecutive ranks share what they read (all)\n"
        "  --verify             compare what every rank got with an independent read of the view\n"
        "  --check              and XXH3 of what is sent with what arrives\n"
        "  --transport T        self, tcp, mpi: not what the launcher suggests; nccl: into the "
        "memory\n"
        "                       of a CUDA device in each rank\n"
        "  --host-bytes N       memory for windows, per rank (256M)\n"
        "  --device-bytes N     the same of the device (256M)\n"
        "  --window-bytes N     of a window, all ranks together\n"
        "  --threads N          that read, per rank\n"
        "  --direct WHEN        past the page cache (O_DIRECT): auto (what is not in it), never, "
        "always\n"
        "  --read-timeout S     seconds that one read may take (120)\n"
        "  --exchange-timeout S seconds without a heartbeat of another rank, or without a byte\n"
        "                       from its storage (300)\n"
        "  --rates K=N,...      bytes a second: node_storage, shared_storage, page_cache, copy,\n"
        "                       local_link, network\n"
        "  --ranks N            plan: of the job      --ranks-per-node N   plan: on each node (8)\n"
        "  --step N, --json, -o ..., -h, -V          as for ckpt\n"
        "\n"
        "Exit status: 0 good, 1 failed or different, 2 usage.\n");
}

/* Parse one of n words; *ret is its number. */
static int parse_word(const char *what, const char *text, const char *const *word, int n,
                      const char *expected, int *ret, struct ckpt_err *err)
{
    for (int i = 0; i < n; i++)
        if (strcmp(text, word[i]) == 0) {
            *ret = i;
            return 0;
        }
    return ckpt_fail(err, CKPT_USAGE, "%s %s: expected %s", what, text, expected);
}

static int parse_direct(const char *text, enum ckpt_load_direct *ret, struct ckpt_err *err)
{
    static const char *const word[] = {"auto", "never", "always"};
    int i = 0, rc = parse_word("--direct", text, word, 3, "auto, never or always", &i, err);

    *ret = (enum ckpt_load_direct)i;
    return rc;
}

static int parse_readers(const char *text, enum ckpt_readers *ret, struct ckpt_err *err)
{
    static const char *const word[] = {"auto", "once", "node", "each"};
    int i = 0, rc = parse_word("--readers", text, word, 4, "once, node, each or auto", &i, err);

    *ret = (enum ckpt_readers)i;
    return rc;
}

/* Parse a size such as "256M"; K, M, G and T are powers of 1024. */
static int parse_bytes(const char *what, const char *text, uint64_t *ret, struct ckpt_err *err)
{
    static const char unit[] = "KMGT";
    char *end;
    errno = 0;
    unsigned long long n = strtoull(text, &end, 10);
    const char *u = *end ? strchr(unit, *end) : NULL;
    int shift = u ? 10 * (int)(u - unit + 1) : 0;

    if (*text < '0' || *text > '9' || (*end && (!u || end[1])) || errno == ERANGE ||
        n > UINT64_MAX >> shift)
        return ckpt_fail(err, CKPT_USAGE, "%s %s: expected a number of bytes (256M)", what, text);
    *ret = (uint64_t)n << shift;
    return 0;
}

static int parse_number(const char *what, const char *text, uint32_t most, uint32_t *ret,
                        struct ckpt_err *err)
{
    char *end;
    unsigned long n = strtoul(text, &end, 10);

    if (*text < '0' || *text > '9' || *end || n < 1 || n > most)
        return ckpt_fail(err, CKPT_USAGE, "%s %s: expected a number from 1 to %u", what, text,
                         most);
    *ret = (uint32_t)n;
    return 0;
}

static int parse_seconds(const char *what, const char *text, uint32_t *ret_ms, struct ckpt_err *err)
{
    char *end;
    double s = strtod(text, &end);

    if (end == text || *end || !(s >= 0.001 && s <= 1e6))
        return ckpt_fail(err, CKPT_USAGE, "%s %s: expected a number of seconds", what, text);
    *ret_ms = (uint32_t)(s * 1000);
    return 0;
}

static int parse_rates(char *text, struct ckpt_rates *r, struct ckpt_err *err)
{
    static const char *const key[] = {"node_storage", "shared_storage", "page_cache",
                                      "copy",         "local_link",     "network"};
    double *const rate[] = {&r->node_storage, &r->shared_storage, &r->page_cache,
                            &r->copy,         &r->local_link,     &r->network};
    char *word, *value;

    while (ckptfs_next_option(&text, &word, &value)) {
        char *end = NULL;
        size_t k = 0;
        while (k < 6 && strcmp(word, key[k]) != 0)
            k++;
        double n = k < 6 && value ? strtod(value, &end) : 0;
        if (!end || *end || !(n >= 1 && isfinite(n)))
            return ckpt_fail(err, CKPT_USAGE,
                             "--rates: expected node_storage=N, shared_storage=N, page_cache=N, "
                             "copy=N, local_link=N, network=N in bytes a second, 1 or more");
        *rate[k] = n;
    }
    return 0;
}

enum {
    LAYOUT = 256,
    READERS,
    SHARE,
    VERIFY,
    CHECK,
    TRANSPORT,
    HOST,
    DEVICE,
    WINDOW,
    THREADS,
    DIRECT,
    READ_TIMEOUT,
    EXCHANGE_TIMEOUT,
    RATES,
    RANKS,
    PER_NODE,
    STEP,
    JSON
};

static uint32_t bit_of(int opt) { return opt < LAYOUT ? 0 : (uint32_t)1 << (opt - LAYOUT); }

/* Options without effect on one of the commands, or with --readers each, are refused. */
static const struct {
    int opt;
    const char *name;
    const char *of;  /* the command, or NULL: any with --readers each */
    const char *why; /* and what to do */
} useless[] = {
    {TRANSPORT, "--transport", "plan",
     "it plans loads into host memory, whatever carries the bytes; leave it out"},
    {DEVICE, "--device-bytes", "plan", "it plans loads into host memory; use --host-bytes"},
    {VERIFY, "--verify", "plan", "no data is read; use ckpt load"},
    {CHECK, "--check", "plan", "no data is sent; use ckpt load"},
    {READ_TIMEOUT, "--read-timeout", "plan", "no data is read; leave it out"},
    {EXCHANGE_TIMEOUT, "--exchange-timeout", "plan", "no rank waits for another; leave it out"},
    {RANKS, "--ranks", "load", "its launcher decides how many ranks there are; use ckpt plan"},
    {PER_NODE, "--ranks-per-node", "load", "its launcher decides where ranks are; use ckpt plan"},
    {SHARE, "--share", NULL, "ranks that read for themselves share nothing; use once or node"},
    {WINDOW, "--window-bytes", NULL, "nothing is exchanged; use --host-bytes, or once or node"},
    {CHECK, "--check", NULL, "nothing is sent; use --verify, or once or node"},
};

static int check_useful(const struct ckpt_load_tool *t, const char *command, struct ckpt_err *err)
{
    const bool each = t->opt.readers == CKPT_READERS_EACH;
    const char *transport = getenv("CKPTFS_TRANSPORT");

    for (size_t i = 0; i < sizeof useless / sizeof *useless; i++) {
        const char *of = useless[i].of;
        if ((t->given & bit_of(useless[i].opt)) && (of ? strcmp(of, command) == 0 : each))
            return ckpt_fail(err, CKPT_USAGE, "%s does not apply to %s: %s", useless[i].name,
                             !of                       ? "--readers each"
                             : strcmp(of, "plan") == 0 ? "ckpt plan"
                                                       : "ckpt load",
                             useless[i].why);
    }
    if ((t->given & bit_of(DEVICE)) && (!transport || strcmp(transport, "nccl") != 0))
        return ckpt_fail(err, CKPT_USAGE,
                         "--device-bytes does not apply to loads into host memory: use "
                         "--host-bytes, or give --transport nccl");
    return 0;
}

static int parse_one(struct ckpt_load_tool *t, int opt, char *arg, struct ckpt_err *err)
{
    t->given |= bit_of(opt);
    switch (opt) {
    case LAYOUT:
        t->layout = arg;
        return 0;
    case READERS:
        return parse_readers(arg, &t->opt.readers, err);
    case SHARE:
        return parse_number("--share", arg, 1 << 20, &t->opt.share_ranks, err);
    case VERIFY:
        t->verify = true;
        return 0;
    case CHECK:
        t->opt.verify = true;
        return 0;
    case TRANSPORT:
        return setenv("CKPTFS_TRANSPORT", arg, 1) < 0 ? ckpt_nomem(err) : 0;
    case HOST:
        return parse_bytes("--host-bytes", arg, &t->opt.host_bytes, err);
    case DEVICE:
        return parse_bytes("--device-bytes", arg, &t->opt.device_bytes, err);
    case WINDOW:
        return parse_bytes("--window-bytes", arg, &t->opt.window_bytes, err);
    case THREADS:
        return parse_number("--threads", arg, 256, &t->opt.threads, err);
    case DIRECT:
        return parse_direct(arg, &t->opt.direct, err);
    case READ_TIMEOUT:
        return parse_seconds("--read-timeout", arg, &t->opt.read_timeout_ms, err);
    case EXCHANGE_TIMEOUT:
        return parse_seconds("--exchange-timeout", arg, &t->opt.exchange_timeout_ms, err);
    case RATES:
        return parse_rates(arg, &t->opt.rates, err);
    case RANKS:
        return parse_number("--ranks", arg, 1 << 20, &t->ranks, err);
    case PER_NODE:
        return parse_number("--ranks-per-node", arg, 1 << 20, &t->ranks_per_node, err);
    case STEP:
        t->tool.step = arg;
        return 0;
    case JSON:
        t->tool.json = true;
        return 0;
    default:
        return ckpt_tool_set_options(t->tool.opt, arg, err);
    }
}

static int parse(int argc, char **argv, struct ckpt_load_tool *t, bool *ret_go,
                 struct ckpt_err *err)
{
    static const struct option longs[] = {
        {"layout", required_argument, NULL, LAYOUT},
        {"readers", required_argument, NULL, READERS},
        {"share", required_argument, NULL, SHARE},
        {"verify", no_argument, NULL, VERIFY},
        {"check", no_argument, NULL, CHECK},
        {"transport", required_argument, NULL, TRANSPORT},
        {"host-bytes", required_argument, NULL, HOST},
        {"device-bytes", required_argument, NULL, DEVICE},
        {"window-bytes", required_argument, NULL, WINDOW},
        {"threads", required_argument, NULL, THREADS},
        {"direct", required_argument, NULL, DIRECT},
        {"read-timeout", required_argument, NULL, READ_TIMEOUT},
        {"exchange-timeout", required_argument, NULL, EXCHANGE_TIMEOUT},
        {"rates", required_argument, NULL, RATES},
        {"ranks", required_argument, NULL, RANKS},
        {"ranks-per-node", required_argument, NULL, PER_NODE},
        {"step", required_argument, NULL, STEP},
        {"json", no_argument, NULL, JSON},
        {"options", required_argument, NULL, 'o'},
        {"help", no_argument, NULL, 'h'},
        {"version", no_argument, NULL, 'V'},
        {0}};
    int opt;

    *ret_go = false;
    opterr = 0;
    while ((opt = getopt_long(argc, argv, ":o:hV", longs, NULL)) != -1) {
        if (opt == 'h') {
            print_help();
            return 0;
        }
        if (opt == 'V') {
            (void)printf("ckpt-load %s\n", ckpt_version());
            return 0;
        }
        if (opt == ':')
            return ckpt_fail(err, CKPT_USAGE, "%s needs a value", argv[optind - 1]);
        if (opt == '?' ? ckptfs_long_option(argc, argv, ckpt_tool_set_option, t->tool.opt, err) < 0
                       : parse_one(t, opt, optarg, err) < 0)
            return -1;
    }
    if (argc - optind != 2)
        return ckpt_fail(err, CKPT_USAGE, "usage: ckpt load|plan RUN --layout ... (ckpt load -h)");
    t->tool.run = argv[optind + 1];
    if (!t->layout)
        return ckpt_fail(err, CKPT_USAGE, "--layout is missing (tp=2,pp=2 or fsdp=4)");
    *ret_go = true;
    return 0;
}

static int report(const struct ckpt_comm *comm, const struct ckpt_err *err)
{
    if (comm && ckpt_comm_size(comm) > 1)
        (void)fprintf(stderr, "ckpt-load[%u]: %s\n", ckpt_comm_rank(comm), err->text);
    else
        (void)fprintf(stderr, "ckpt-load: %s\n", err->text);
    return err->code == CKPT_USAGE ? 2 : 1;
}

static void print_line(void *ctx, enum ckpt_log_severity severity, const char *text)
{
    (void)ctx;
    if (severity <= CKPT_WARNING)
        (void)fprintf(stderr, "ckpt-load: %s%s\n", severity == CKPT_WARNING ? "warning: " : "",
                      text);
}

static void print_wait(void *ctx, const char *text)
{
    (void)ctx;
    (void)fprintf(stderr, "ckpt-load: %s\n", text);
}

int main(int argc, char **argv)
{
    struct ckpt_load_tool t = {.opt = {.size = sizeof t.opt}};
    struct ckpt_comm *comm = NULL;
    struct ckpt_err err = {0};
    bool go = false, plan;
    int rc = ckpt_options_new(&t.tool.opt, &err);

    if (rc == 0)
        rc = parse(argc, argv, &t, &go, &err);
    plan = go && strcmp(argv[optind], "plan") == 0;
    if (rc == 0 && go && !plan && strcmp(argv[optind], "load") != 0)
        rc = ckpt_fail(&err, CKPT_USAGE, "%s: expected load or plan", argv[optind]);
    if (rc == 0 && go)
        rc = check_useful(&t, argv[optind], &err);
    if (rc == 0 && go) {
        ckpt_tool_limits();
        if (plan) {
            ckpt_options_set_log(t.tool.opt, print_line, NULL);
            rc = ckpt_load_print_plan(&t, &err);
        } else if ((rc = ckpt_comm_from_env_log(print_wait, NULL, &comm, &err)) == 0) {
            if (ckpt_comm_rank(comm) == 0)
                ckpt_options_set_log(t.tool.opt, print_line, NULL);
            rc = ckpt_load_run(&t, comm, &err);
        }
    }
    if (rc == 0 && (fflush(stdout) != 0 || ferror(stdout)))
        rc = ckpt_fail(&err, CKPT_IO, "the output could not be written");
    int status = rc < 0 ? report(comm, &err) : 0;
    ckpt_comm_free(comm);
    ckpt_options_free(t.tool.opt);
    return status;
}
