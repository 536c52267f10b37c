/* SPDX-License-Identifier: Apache-2.0 */
/* Error codes, attributes and timeouts. */
#include "mount/reply.h"

#include <errno.h>

/* Sizes for stat(2). A large st_blksize makes cp and cat read in units of 1 MiB. */
enum { BLKSIZE = 1 << 20, DIR_BYTES = 4096, STAT_BLOCK = 512 };

static const double LASTING_S = 365.0 * 86400, PASSING_S = 1;

int ckptfs_errno(const struct ckpt_err *err)
{
    switch (err->code) {
    case CKPT_OK:
        return 0;
    case CKPT_MISSING:
        return ENOENT;
    case CKPT_STALE:
        return ESTALE;
    case CKPT_NOMEM:
        return ENOMEM;
    case CKPT_USAGE:
        return EINVAL;
    case CKPT_UNSUPPORTED:
        return EOPNOTSUPP;
    case CKPT_TIMEOUT:
        return ETIMEDOUT;
    case CKPT_CANCELLED:
        return EINTR;
    case CKPT_IO:
    case CKPT_FORMAT:
    case CKPT_CONFLICT:
    case CKPT_LIMIT:
    case CKPT_PEER:
        break;
    }
    return EIO;
}

int ckptfs_read_errno(const struct ckpt_err *err)
{
    const int rc = ckptfs_errno(err);

    return rc == ENOENT || rc == EINVAL ? EIO : rc;
}

mode_t ckptfs_type_of(enum ckptfs_kind kind)
{
    switch (kind) {
    case CKPTFS_ROOT:
    case CKPTFS_STEP:
    case CKPTFS_DIR:
    case CKPTFS_CONTROL:
        return S_IFDIR;
    case CKPTFS_LATEST:
        return S_IFLNK;
    case CKPTFS_FILE:
    case CKPTFS_ERROR:
    case CKPTFS_STATS:
        break;
    }
    return S_IFREG;
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
        .st_nlink = type == S_IFDIR ? 2 : 1,
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
