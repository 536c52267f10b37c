/* SPDX-License-Identifier: Apache-2.0 */
/* Error codes, attributes and timeouts; a stack of buffers. */
#include "mount/reply.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* Sizes for stat(2). A large st_blksize makes cp and cat read in units of 1 MiB. */
enum { BLKSIZE = 1 << 20, DIR_BYTES = 4096, STAT_BLOCK = 512, PAGE = 4096 };

static const double LASTING_S = 365.0 * 86400, PASSING_S = 1;

int ckptfs_errno(const struct ckpt_err *err)
{
    static const int number[] = {
        [CKPT_OK] = 0,
        [CKPT_IO] = EIO,
        [CKPT_FORMAT] = EIO,
        [CKPT_UNSUPPORTED] = EOPNOTSUPP,
        [CKPT_MISSING] = ENOENT,
        [CKPT_CONFLICT] = EIO,
        [CKPT_STALE] = ESTALE,
        [CKPT_LIMIT] = EIO,
        [CKPT_NOMEM] = ENOMEM,
        [CKPT_USAGE] = EINVAL,
        [CKPT_TIMEOUT] = ETIMEDOUT,
        [CKPT_PEER] = EIO,
        [CKPT_CANCELLED] = EINTR,
    };

    return number[err->code];
}

int ckptfs_read_errno(const struct ckpt_err *err)
{
    const int rc = ckptfs_errno(err);

    return rc == ENOENT || rc == EINVAL ? EIO : rc;
}

mode_t ckptfs_type_of(enum ckptfs_kind kind)
{
    const bool is_file = kind == CKPTFS_FILE || kind == CKPTFS_ERROR || kind == CKPTFS_STATS;

    return kind == CKPTFS_LINK ? S_IFLNK : is_file ? S_IFREG : S_IFDIR;
}

void ckptfs_stat_of(const struct ckptfs *fs, const struct ckptfs_id *id, uint64_t ino,
                    struct stat *ret)
{
    mode_t type = ckptfs_type_of(id->kind);
    struct timespec t = {.tv_sec = id->mtime_ns / 1000000000, .tv_nsec = id->mtime_ns % 1000000000};

    if (t.tv_nsec < 0) {
        t.tv_sec--;
        t.tv_nsec += 1000000000;
    }
    *ret = (struct stat){
        .st_ino = ino,
        .st_mode = type | (type == S_IFLNK
                               ? 0777
                               : (type == S_IFDIR ? fs->config->dir_mode : fs->config->file_mode) &
                                     ~fs->config->umask),
        .st_nlink = 1, /* of a folder: its number of folders is not known, as steps come and go */
        .st_uid = fs->config->uid,
        .st_gid = fs->config->gid,
        .st_size = (off_t)(type == S_IFDIR ? DIR_BYTES : id->size),
        .st_blksize = BLKSIZE,
        .st_blocks = (blkcnt_t)(type == S_IFREG ? (id->size + STAT_BLOCK - 1) / STAT_BLOCK : 0),
        .st_atim = t,
        .st_mtim = t,
        .st_ctim = t,
    };
}

double ckptfs_attr_timeout(enum ckptfs_kind kind)
{
    return kind == CKPTFS_DIR || kind == CKPTFS_FILE ? LASTING_S : PASSING_S;
}

double ckptfs_name_timeout(bool lasting) { return lasting ? LASTING_S : PASSING_S; }

/* ---- buffers ---- */

static struct ckptfs_buffer *buffer_new(const struct ckptfs_buffers *b)
{
    ckpt_cleanup(ckpt_freep) struct ckptfs_buffer *n = calloc(1, sizeof *n);

    if (!n || posix_memalign(&n->mem, PAGE, CKPTFS_MAX_READ) != 0)
        return NULL;
    if (b->constant)
        memset(n->mem, 0x5a, CKPTFS_MAX_READ);
    return ckpt_steal(&n);
}

struct ckptfs_buffer *ckptfs_buffer_get(struct ckptfs_buffers *b)
{
    struct ckptfs_buffer *n;

    (void)pthread_mutex_lock(&b->lock);
    if ((n = b->free))
        b->free = n->next;
    (void)pthread_mutex_unlock(&b->lock);
    return n ? n : buffer_new(b);
}

void ckptfs_buffer_put(struct ckptfs_buffers *b, struct ckptfs_buffer *buffer)
{
    (void)pthread_mutex_lock(&b->lock);
    buffer->next = b->free;
    b->free = buffer;
    (void)pthread_mutex_unlock(&b->lock);
}

void ckptfs_buffers_release(struct ckptfs_buffers *b)
{
    while (b->free) {
        struct ckptfs_buffer *n = b->free;
        b->free = n->next;
        free(n->mem);
        free(n);
    }
}
