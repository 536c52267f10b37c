/* SPDX-License-Identifier: Apache-2.0 */
/* Identities of files, from statx(2). */
#include "io/file_id.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include "base/err.h"

bool ckpt_file_id_eq(const struct ckpt_file_id *a, const struct ckpt_file_id *b)
{
    return a->inode == b->inode && a->size == b->size && a->mtime_ns == b->mtime_ns &&
           a->ctime_ns == b->ctime_ns;
}

struct ckpt_file_id ckpt_file_id_of_statx(const struct statx *st)
{
    const uint64_t dev = makedev(st->stx_dev_major, st->stx_dev_minor);

    return (struct ckpt_file_id){
        .inode = st->stx_ino ^ dev << 44 ^ dev >> 20,
        .size = st->stx_size,
        .mtime_ns = st->stx_mtime.tv_sec * 1000000000 + st->stx_mtime.tv_nsec,
        .ctime_ns = st->stx_ctime.tv_sec * 1000000000 + st->stx_ctime.tv_nsec,
    };
}

int ckpt_file_id_of(int fd, struct ckpt_file_id *ret, bool *ret_unlinked, struct ckpt_err *err)
{
    struct statx st;

    if (statx(fd, "", AT_EMPTY_PATH, STATX_BASIC_STATS, &st) < 0)
        return ckpt_fail_errno(err, errno, "statx");
    *ret = ckpt_file_id_of_statx(&st);
    *ret_unlinked = st.stx_nlink == 0;
    return 0;
}
