/* SPDX-License-Identifier: Apache-2.0 */
/* The command line of ckptfs, and the words of mount(8) and FUSE that a user may set. */
#include "mount/config.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <fuse_lowlevel.h>

#include "base/err.h"
#include "base/mem.h"
#include "base/str.h"
#include "cmdline.h"

enum { DEFAULT_THREADS = 10, DEFAULT_READAHEAD_KIB = 2048 };

void ckptfs_config_release(struct ckptfs_config *c)
{
    free(c->run);
    free(c->mountpoint);
    free(c->fuse_words);
    ckpt_options_free(c->opt);
    *c = (struct ckptfs_config){0};
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

static const char *const fuse_takes[] = {
    "auto_unmount", "allow_root", "noexec",  "exec",      "async",      "sync",        "dirsync",
    "atime",        "noatime",    "context", "fscontext", "defcontext", "rootcontext", NULL};

char *ckptfs_fuse_escape(const char *value)
{
    char *text = malloc(2 * strlen(value) + 1), *out = text;

    for (; text && *value; value++) {
        if (*value == ',' || *value == '\\')
            *out++ = '\\';
        *out++ = *value;
    }
    if (text)
        *out = '\0';
    return text;
}

static int add_fuse_word(struct ckptfs_config *c, const char *word, const char *value,
                         struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *escaped = ckptfs_fuse_escape(value ? value : "");
    const char *before = c->fuse_words ? c->fuse_words : "";
    char *all =
        escaped ? ckpt_asprintf("%s,%s%s%s", before, word, value ? "=" : "", escaped) : NULL;

    if (!all)
        return ckpt_nomem(err);
    free(c->fuse_words);
    c->fuse_words = all;
    return 0;
}

/* Take a word that is no option of ours. 0: it is not known. */
static int take_other(void *into, const char *word, const char *value, struct ckpt_err *err)
{
    if (strcmp(word, "suid") == 0 || strcmp(word, "dev") == 0)
        return ckpt_fail(err, CKPT_USAGE, "-o %s: a ckptfs mount is always ro,nosuid,nodev", word);
    if (among(word, ignored_words))
        return 1;
    if (!among(word, fuse_takes))
        return 0;
    return add_fuse_word(into, word, value, err) < 0 ? -1 : 1;
}

int ckptfs_config_parse(char **argv, struct ckptfs_config *ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckptfs_cmdline_release) struct ckptfs_cmdline line = {
        .into = ret, .of = CKPTFS_MOUNT, .other = take_other};

    *ret = (struct ckptfs_config){.argv = argv,
                                  .lock = -1,
                                  .uid = getuid(),
                                  .file_mode = 0644,
                                  .dir_mode = 0755,
                                  .gid = getgid(),
                                  .threads = DEFAULT_THREADS,
                                  .sandbox = true,
                                  .readahead_kib = DEFAULT_READAHEAD_KIB};
    if (ckpt_options_new(&ret->opt, err) < 0)
        return -1;
    line.opt = ret->opt;
    if (ckptfs_cmdline_parse(&line, argv, err) < 0)
        return -1;
    if (line.version)
        (void)printf("ckptfs %s\nlibfuse %s\n", ckpt_version(), fuse_pkgversion());
    if (!line.command)
        return 0;
    ret->foreground |= ret->debug;
    ret->threads += ret->threads == 0;
    /* the library has an option "wait", too */
    if (ret->wait && ckpt_options_knows("wait") &&
        ckpt_options_set(ret->opt, "wait", NULL, err) < 0)
        return -1;
    ret->mountpoint = strdup(line.operand[1]);
    ret->run = strdup(line.operand[0]);
    return ret->run && ret->mountpoint ? 0 : ckpt_nomem(err);
}
