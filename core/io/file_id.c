/* SPDX-License-Identifier: Apache-2.0 */
/* Identities of files, from stat(2). */
#include "io/file_id.h"

#include <errno.h>
#include <sys/stat.h>

#include "base/err.h"

bool ckpt_file_id_eq(const struct ckpt_file_id *a, const struct ckpt_file_id *b)
{
    return a->inode == b->inode && a->size == b->size && a->mtime_ns == b->mtime_ns &&
           a->ctime_ns == b->ctime_ns;
}

struct ckpt_file_id ckpt_file_id_of_stat(const struct stat *st)
{
    return (struct ckpt_file_id){
        .inode = st->st_ino ^ (uint64_t)st->st_dev << 44 ^ (uint64_t)st->st_dev >> 20,
        .size = (uint64_t)st->st_size,
        .mtime_ns = (int64_t)st->st_mtim.tv_sec * 1000000000 + st->st_mtim.tv_nsec,
        .ctime_ns = (int64_t)st->st_ctim.tv_sec * 1000000000 + st->st_ctim.tv_nsec,
    };
}

int ckpt_file_id_of(int fd, struct ckpt_file_id *ret, bool *ret_unlinked, struct ckpt_err *err)
{
    struct stat st;

    if (fstat(fd, &st) < 0)
        return ckpt_fail_errno(err, errno, "fstat");
    *ret = ckpt_file_id_of_stat(&st);
    if (ret_unlinked)
        *ret_unlinked = st.st_nlink == 0;
    return 0;
}
