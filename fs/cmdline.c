/* SPDX-License-Identifier: Apache-2.0 */
/* Parsing of ckptfs's own options, the library's options, and the few of FUSE that a user may set.
 */
#include "cmdline.h"

#include <errno.h>
#include <getopt.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/err.h"
#include "base/mem.h"

enum { DEFAULT_THREADS = 10, MOST_THREADS = 1024, DEFAULT_READAHEAD_KIB = 2048 };

const char ckptfs_usage[] =
    "usage: ckptfs RUN MOUNTPOINT [-f] [-d] [-o option[=value],...]\n"
    "Mount the checkpoints of a training run as Hugging Face model directories.\n"
    "\n"
    "  -f  stay in the foreground      -d  likewise, and say what was negotiated\n"
    "  -h  this help                   -V  the versions of ckptfs and libfuse\n"
    "\n"
    "what is shown:\n"
    "  base=DIR|ORG/NAME  dtype=auto|stored|bfloat16|float16|float32  max_shard_size=SIZE\n"
    "  recipe=FILE|DIR  model_type=TYPE  rope=WORD  key_mapping=FILE  dequantize\n"
    "  lora=adapter|merge|base  allow_partial  allow_mixed  allow_leftover  follow_symlinks\n"
    "  KEY=NUMBER (of the model, in config.json's spelling)\n"
    "  view=hf|raw|memory, or a training framework's checkpoint: dcp|dcp_hf|torchtitan with\n"
    "    ranks=N (dcp: names=hub|memory), nanotron with tp=N pp=N, megatron|megatron_legacy with\n"
    "    tp=N pp=N vpp=N ep=N etp=N make_vocab_size_divisible_by=N\n"
    "the mount:\n"
    "  wait               mount even if there is no readable step yet\n"
    "  io=buffered|direct direct: bypass the page cache (for exports)\n"
    "  readahead=KIB      the mount's read-ahead (2048; needs root; 0 leaves the kernel's)\n"
    "  threads=N          workers (10)\n"
    "  allow_other        for all users    uid=N gid=N umask=OCTAL  owner and modes shown\n"
    "  sandbox=yes|no     no: let the daemon open, run and connect to whatever its user may\n"
    "  auto_unmount, noexec, noatime, allow_root, context=... and the like go to FUSE\n"
    "\n"
    "Every word may be written as --word=value as well. A comma in a value is written '\\,'. "
    "fusermount3 -u MOUNTPOINT ends the mount.\n";

void ckptfs_config_release(struct ckptfs_config *c)
{
    free(c->run);
    free(c->mountpoint);
    free(c->fuse_words);
    ckpt_options_free(c->opt);
    *c = (struct ckptfs_config){0};
}

static int parse_number(const char *word, const char *value, int base, unsigned long most,
                        unsigned long *ret, struct ckpt_err *err)
{
    char *end = NULL;

    errno = 0;
    unsigned long n = value && *value >= '0' && *value <= '9' ? strtoul(value, &end, base) : 0;
    if (!end || *end || errno || n > most)
        return ckpt_fail(err, CKPT_USAGE, "-o %s=%s: expected a%s number up to %lu", word,
                         value ? value : "", base == 8 ? "n octal" : "", most);
    *ret = n;
    return 0;
}

static int set_numbered(struct ckptfs_config *c, const char *word, const char *value,
                        bool *ret_ours, struct ckpt_err *err)
{
    unsigned long n;

    *ret_ours = true;
    if (strcmp(word, "uid") == 0) {
        if (parse_number(word, value, 10, (uid_t)-2, &n, err) < 0)
            return -1;
        c->uid = (uid_t)n;
    } else if (strcmp(word, "gid") == 0) {
        if (parse_number(word, value, 10, (gid_t)-2, &n, err) < 0)
            return -1;
        c->gid = (gid_t)n;
    } else if (strcmp(word, "umask") == 0) {
        if (parse_number(word, value, 8, 0777, &n, err) < 0)
            return -1;
        c->umask = (mode_t)n;
    } else if (strcmp(word, "threads") == 0) {
        if (parse_number(word, value, 10, MOST_THREADS, &n, err) < 0)
            return -1;
        c->threads = n ? (unsigned)n : 1;
    } else if (strcmp(word, "readahead") == 0) {
        if (parse_number(word, value, 10, 1UL << 20, &n, err) < 0)
            return -1;
        c->readahead_kib = (unsigned)n;
    } else {
        *ret_ours = false;
    }
    return 0;
}

static int set_io(struct ckptfs_config *c, const char *value, struct ckpt_err *err)
{
    c->direct = value && strcmp(value, "direct") == 0;
    if (c->direct || (value && strcmp(value, "buffered") == 0))
        return 0;
    return ckpt_fail(err, CKPT_USAGE, "-o io=%s: expected buffered or direct", value ? value : "");
}

static int set_sandbox(struct ckptfs_config *c, const char *value, struct ckpt_err *err)
{
    c->sandbox = value && strcmp(value, "yes") == 0;
    if (c->sandbox || (value && strcmp(value, "no") == 0))
        return 0;
    return ckpt_fail(err, CKPT_USAGE, "-o sandbox=%s: expected yes or no", value ? value : "");
}

static bool *flag_of(struct ckptfs_config *c, const char *word)
{
    const struct {
        const char *word;
        bool *flag;
    } table[] = {
        {"wait", &c->wait},
        {"null", &c->null_reads},
        {"allow_other", &c->allow_other},
    };

    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (strcmp(word, table[i].word) == 0)
            return table[i].flag;
    return NULL;
}

/* Is `word` in a NULL-terminated list? An entry that ends in '*' matches every word with that
 * prefix. */
static bool among(const char *word, const char *const *list)
{
    for (; *list; list++) {
        size_t n = strlen(*list);
        if ((*list)[n - 1] == '*' ? strncmp(word, *list, n - 1) == 0 : strcmp(word, *list) == 0)
            return true;
    }
    return false;
}

/* Words of mount(8) and fstab(5) that have no meaning for this filesystem, or are always true of
 * it. */
static const char *const ignored_words[] = {
    "ro",       "rw",         "nosuid",   "nodev",      "defaults",    "auto",
    "noauto",   "user",       "nouser",   "users",      "owner",       "group",
    "_netdev",  "nofail",     "x-*",      "X-*",        "comment",     "default_permissions",
    "relatime", "norelatime", "diratime", "nodiratime", "strictatime", "nostrictatime",
    "lazytime", "nolazytime", NULL};

static const char *const fuse_takes[] = {"auto_unmount", "allow_root", "noexec",    "exec",
                                         "async",        "sync",       "dirsync",   "atime",
                                         "noatime",      "context",    "fscontext", "defcontext",
                                         "rootcontext",  "debug",      NULL};

static int add_fuse_word(struct ckptfs_config *c, const char *word, const char *value,
                         struct ckpt_err *err)
{
    /* FUSE removes backslashes from its options, as we did, so they are added again. */
    size_t n = 2 * (strlen(word) + (value ? strlen(value) : 0)) + 3;
    size_t have = c->fuse_words ? strlen(c->fuse_words) : 0;
    char *text = realloc(c->fuse_words, have + n);

    if (!text)
        return ckpt_nomem(err);
    c->fuse_words = text;
    text += have;
    *text++ = ',';
    for (const char *p = word; *p; p++)
        *text++ = *p;
    if (value)
        *text++ = '=';
    for (const char *p = value; p && *p; p++) {
        if (*p == ',' || *p == '\\')
            *text++ = '\\';
        *text++ = *p;
    }
    *text = '\0';
    return 0;
}

static int set_word(struct ckptfs_config *c, const char *word, const char *value,
                    struct ckpt_err *err)
{
    bool ours, *flag = flag_of(c, word);

    if (flag) {
        if (value)
            return ckpt_fail(err, CKPT_USAGE, "-o %s takes no value", word);
        *flag = true;
        /* "wait" is an option of the library, too */
        return ckpt_options_knows(word) ? ckpt_options_set(c->opt, word, NULL, err) : 0;
    }
    if (strcmp(word, "io") == 0)
        return set_io(c, value, err);
    if (strcmp(word, "sandbox") == 0)
        return set_sandbox(c, value, err);
    if (set_numbered(c, word, value, &ours, err) < 0 || ours)
        return err->code ? -1 : 0;
    if (ckpt_options_knows(word))
        return ckpt_options_set(c->opt, word, value, err);
    if (strcmp(word, "suid") == 0 || strcmp(word, "dev") == 0)
        return ckpt_fail(err, CKPT_USAGE, "-o %s: a ckptfs mount is always ro,nosuid,nodev", word);
    if (among(word, ignored_words))
        return 0;
    if (among(word, fuse_takes))
        return add_fuse_word(c, word, value, err);
    return ckpt_fail(err, CKPT_USAGE, "-o %s: no such option (ckptfs -h lists them)", word);
}

static int set_words(struct ckptfs_config *c, const char *list, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *copy = strdup(list);
    char *rest = copy, *word, *value;

    if (!copy)
        return ckpt_nomem(err);
    while (ckptfs_next_option(&rest, &word, &value))
        if (set_word(c, word, value, err) < 0)
            return -1;
    return 0;
}

static int take_operands(struct ckptfs_config *c, int n, char **arg, struct ckpt_err *err)
{
    if (n != 2)
        return ckpt_fail(err, CKPT_USAGE, "%s",
                         n < 1   ? "RUN and MOUNTPOINT are missing"
                         : n < 2 ? "MOUNTPOINT is missing"
                                 : "too many arguments");
    if (!(c->run = strdup(arg[0])) || !(c->mountpoint = strdup(arg[1])))
        return ckpt_nomem(err);
    return 0;
}

static int set_long(void *ctx, const char *word, const char *value, struct ckpt_err *err)
{
    return set_word(ctx, word, value, err);
}

int ckptfs_cmdline_parse(int argc, char **argv, struct ckptfs_config *ret, struct ckpt_err *err)
{
    static const struct option longs[] = {
        {"help", no_argument, NULL, 'h'},          {"version", no_argument, NULL, 'V'},
        {"foreground", no_argument, NULL, 'f'},    {"debug", no_argument, NULL, 'd'},
        {"options", required_argument, NULL, 'o'}, {0}};
    int opt;

    *ret = (struct ckptfs_config){.lock = -1,
                                  .uid = getuid(),
                                  .gid = getgid(),
                                  .threads = DEFAULT_THREADS,
                                  .sandbox = true,
                                  .readahead_kib = DEFAULT_READAHEAD_KIB};
    if (ckpt_options_new(&ret->opt, err) < 0)
        return -1;
    opterr = 0;
    while ((opt = getopt_long(argc, argv, ":hVfdo:", longs, NULL)) != -1) {
        switch (opt) {
        case 'h':
            ret->help = true;
            return 0;
        case 'V':
            ret->version = true;
            return 0;
        case 'd':
            ret->debug = true;
            ret->foreground = true;
            break;
        case 'f':
            ret->foreground = true;
            break;
        case 'o':
            if (set_words(ret, optarg, err) < 0)
                return -1;
            break;
        case ':':
            return ckpt_fail(err, CKPT_USAGE, "%s needs a value", argv[optind - 1]);
        default:
            if (ckptfs_long_option(argc, argv, set_long, ret, err) < 0)
                return -1;
        }
    }
    return take_operands(ret, argc - optind, argv + optind, err);
}
