/* SPDX-License-Identifier: Apache-2.0 */
/* A temporary directory and small checkpoints in it. Data of a made-up file: byte i is
 * tree_byte(i). */
#ifndef CKPT_TESTS_UNIT_TREE_H
#define CKPT_TESTS_UNIT_TREE_H

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct tree {
    char path[4096];
    int fd;
};

#define TREE_MUST(cond)                                                                            \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            (void)fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #cond, strerror(errno));  \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

static inline unsigned char tree_byte(uint64_t i) { return (unsigned char)(i * 13 + (i >> 8) + 5); }

static inline void tree_open(struct tree *t)
{
    const char *tmp = getenv("TMPDIR");

    (void)snprintf(t->path, sizeof t->path, "%s/ckptfs-test-XXXXXX", tmp ? tmp : "/tmp");
    TREE_MUST(mkdtemp(t->path));
    t->fd = open(t->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    TREE_MUST(t->fd >= 0);
}

static inline int tree_remove_one(const char *path, const struct stat *st, int kind,
                                  struct FTW *ftw)
{
    (void)st;
    (void)kind;
    (void)ftw;
    return remove(path);
}

static inline void tree_close(struct tree *t)
{
    (void)close(t->fd);
    (void)nftw(t->path, tree_remove_one, 64, FTW_DEPTH | FTW_PHYS);
}

/* Make the directories before the last component of name; ending in '/', all of it. */
static inline void tree_dirs(const struct tree *t, const char *name)
{
    char *own = strdup(name);

    TREE_MUST(own);
    for (char *slash = strchr(own, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        TREE_MUST(mkdirat(t->fd, own, 0755) == 0 || errno == EEXIST);
        *slash = '/';
    }
    free(own);
}

/* (Re)write a file in place. */
static inline void tree_put(const struct tree *t, const char *name, const void *data, size_t len)
{
    tree_dirs(t, name);
    int fd = openat(t->fd, name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    TREE_MUST(fd >= 0);
    for (size_t done = 0; done < len;) {
        ssize_t n = write(fd, (const char *)data + done, len - done);
        TREE_MUST(n > 0);
        done += (size_t)n;
    }
    (void)close(fd);
}

static inline void tree_text(const struct tree *t, const char *name, const char *text)
{
    tree_put(t, name, text, strlen(text));
}

static inline void tree_link(const struct tree *t, const char *target, const char *name)
{
    tree_dirs(t, name);
    TREE_MUST(symlinkat(target, t->fd, name) == 0);
}

static inline void tree_fifo(const struct tree *t, const char *name)
{
    tree_dirs(t, name);
    TREE_MUST(mkfifoat(t->fd, name, 0644) == 0);
}

static inline void tree_delete(const struct tree *t, const char *name)
{
    TREE_MUST(unlinkat(t->fd, name, 0) == 0 || unlinkat(t->fd, name, AT_REMOVEDIR) == 0);
}

static inline void tree_truncate(const struct tree *t, const char *name, long by)
{
    int fd = openat(t->fd, name, O_WRONLY | O_CLOEXEC);
    struct stat st;
    TREE_MUST(fd >= 0 && fstat(fd, &st) == 0 && ftruncate(fd, st.st_size - by) == 0);
    (void)close(fd);
}

/* ---- safetensors ---- */

/* A file of this header (padded to 8) and ndata bytes; malloc'ed. */
static inline unsigned char *tree_st_bytes(const char *header, size_t ndata, size_t *ret_len)
{
    size_t n = strlen(header), padded = (n + 7) / 8 * 8;
    unsigned char *file = malloc(8 + padded + ndata);

    TREE_MUST(file);
    for (int i = 0; i < 8; i++)
        file[i] = (unsigned char)((uint64_t)padded >> 8 * i);
    memset(file + 8, ' ', padded);
    memcpy(file + 8, header, n);
    for (size_t i = 0; i < ndata; i++)
        file[8 + padded + i] = tree_byte(i);
    *ret_len = 8 + padded + ndata;
    return file;
}

static inline void tree_st(const struct tree *t, const char *name, const char *header, size_t ndata)
{
    size_t len;
    unsigned char *file = tree_st_bytes(header, ndata, &len);

    tree_put(t, name, file, len);
    free(file);
}

/* ---- nanotron: BF16, two dimensions ---- */

static inline void nt_plain(const struct tree *t, const char *param, unsigned rows, unsigned cols)
{
    char header[512], name[512];

    (void)snprintf(header, sizeof header,
                   "{\"__metadata__\":{},\"data\":{\"dtype\":\"BF16\",\"shape\":[%u,%u],"
                   "\"data_offsets\":[0,%u]}}",
                   rows, cols, rows * cols * 2);
    (void)snprintf(name, sizeof name, "%s/model_weight.safetensors", param);
    tree_st(t, name, header, (size_t)rows * cols * 2);
}

static inline void nt_name(char *name, size_t cap, const char *param, unsigned pp, unsigned npp,
                           unsigned tp, unsigned ntp)
{
    (void)snprintf(name, cap, "%s/model_weight_pp-rank-%u-of-%u_tp-rank-%u-of-%u.safetensors",
                   param, pp, npp, tp, ntp);
}

/* A shard of rows x cols with this metadata; version may be NULL. */
static inline void nt_shard_at(const struct tree *t, const char *name, const char *dtype,
                               unsigned rows, unsigned cols, const char *version, const char *shape,
                               const char *pairs)
{
    char header[4096];
    unsigned size = strcmp(dtype, "F32") == 0 ? 4 : 2;

    (void)snprintf(header, sizeof header,
                   "{\"__metadata__\":{%s%s%s\"local_global_slices_pairs\":\"%s\","
                   "\"unsharded_shape\":\"%s\"},\"data\":{\"dtype\":\"%s\",\"shape\":[%u,%u],"
                   "\"data_offsets\":[0,%u]}}",
                   version ? "\"version\":\"" : "", version ? version : "", version ? "\"," : "",
                   pairs, shape, dtype, rows, cols, rows * cols * size);
    tree_st(t, name, header, (size_t)rows * cols * size);
}

/* Rank tp of ntp of a tensor of rows x cols that is cut along its first dimension. */
static inline void nt_row_shard(const struct tree *t, const char *param, unsigned npp, unsigned tp,
                                unsigned ntp, unsigned rows, unsigned cols)
{
    char name[512], shape[64], pairs[128];
    unsigned n = rows / ntp;

    nt_name(name, sizeof name, param, 0, npp, tp, ntp);
    (void)snprintf(shape, sizeof shape, "(%u, %u)", rows, cols);
    (void)snprintf(pairs, sizeof pairs, "None,None,None|None,None,None#%u,%u,None|None,None,None",
                   tp * n, tp * n + n);
    nt_shard_at(t, name, "BF16", n, cols, "1.4", shape, pairs);
}

/* The same, cut along its second dimension. */
static inline void nt_col_shard(const struct tree *t, const char *param, unsigned npp, unsigned tp,
                                unsigned ntp, unsigned rows, unsigned cols)
{
    char name[512], shape[64], pairs[128];
    unsigned n = cols / ntp;

    nt_name(name, sizeof name, param, 0, npp, tp, ntp);
    (void)snprintf(shape, sizeof shape, "(%u, %u)", rows, cols);
    (void)snprintf(pairs, sizeof pairs, "None,None,None|None,None,None#None,None,None|%u,%u,None",
                   tp * n, tp * n + n);
    nt_shard_at(t, name, "BF16", rows, n, "1.4", shape, pairs);
}

/* A small sound checkpoint of TP 2 below `at` ("" or "10/"): model.norm [4, 2] plain, model.rows
 * [8, 6] and model.cols [4, 6] in two shards each. */
static inline void nt_checkpoint(const struct tree *t, const char *at)
{
    char name[256];

    (void)snprintf(name, sizeof name, "%.64smodel_config.json", at);
    tree_text(t, name, "{\"is_llama_config\": true, \"hidden_size\": 8}");
    (void)snprintf(name, sizeof name, "%.64scheckpoint_metadata.json", at);
    tree_text(t, name, "{\"tp\": 2, \"version\": \"1.4\", \"metas\": {\"last_train_step\": 10}}");
    (void)snprintf(name, sizeof name, "%.64smodel/model/norm", at);
    nt_plain(t, name, 4, 2);
    for (unsigned r = 0; r < 2; r++) {
        (void)snprintf(name, sizeof name, "%.64smodel/model/rows", at);
        nt_row_shard(t, name, 1, r, 2, 8, 6);
        (void)snprintf(name, sizeof name, "%.64smodel/model/cols", at);
        nt_col_shard(t, name, 1, r, 2, 4, 6);
    }
}

#endif
