/* SPDX-License-Identifier: Apache-2.0 */
/* A source is a run of bytes that lives somewhere: a file, memory, a window of another source.
 *
 * Reads are positional and whole: every byte asked for arrives, or it is an error (a short read is
 * one). Safe from many threads. Counted, since a catalogue mapped from another shares its sources.
 */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "base/err.h"
#include "base/mem.h"
#include "io/dir.h"
#include "io/direct.h"

/* A bounded number of open shard files.
 *
 * A checkpoint may have 10^5 files; descriptors are opened on first use and one not used lately is
 * closed when the budget is spent (by the clock algorithm). A reopened file must still be the one
 * that was registered (device, inode, size, mtime, ctime), or it is STALE. `max_open` descriptors
 * (0: what RLIMIT_NOFILE allows, less a reserve, at most 1024). Safe from many threads. Counted. */
struct ckpt_fdpool;
int ckpt_fdpool_new(size_t max_open, struct ckpt_fdpool **ret, struct ckpt_err *err);
void ckpt_fdpool_unref(struct ckpt_fdpool *pool);
/* The number of descriptors that are open now. */
size_t ckpt_fdpool_open_count(struct ckpt_fdpool *pool);

struct ckpt_source;

/* Neighbouring bytes of a source, from `off` on, and the memory for them. */
struct ckpt_source_run {
    uint64_t off;
    struct iovec *iov; /* n of them, at most IOV_MAX; reading may modify them */
    int n;
};

/* How runs are read, and by which route. */
struct ckpt_source_way {
    enum ckpt_read_how how;
    const struct ckpt_route *route; /* past the page cache, where it says so and the file allows it;
                                       NULL: through the page cache */
};

/* Some bytes take long to make: a source that decodes, a transposed part of a tensor. They can be
 * prepared before somebody reads them, and the call that does so returns what it has found. */
enum ckpt_prepared {
    CKPT_PREPARED_NOT = -1, /* it can't be made: who reads it is told why */
    CKPT_PREPARED_NOW,      /* this call has made it or, of several, one */
    CKPT_PREPARED_FULL,     /* there is no room to make it ahead */
    CKPT_PREPARED_BUSY,     /* another thread makes it now */
    CKPT_PREPARED_BEFORE,   /* there is nothing left to make */
};

/* Joins what two calls have found. As long as that is BUSY or BEFORE, what follows may be prepared.
 */
static inline enum ckpt_prepared ckpt_prepared_both(enum ckpt_prepared a, enum ckpt_prepared b)
{
    return a < b ? a : b;
}

/* A source has one of the first two members. */
struct ckpt_source_ops {
    /* Fill iov[0..n) (which the call may modify) from `off` on. The range was checked against size.
     * For sources that are read in one way only: CKPT_READ_CACHED finds nothing, and there is
     * nothing to prefetch. */
    int (*preadv)(struct ckpt_source *s, struct iovec *iov, int n, uint64_t off,
                  struct ckpt_err *err);
    /* ckpt_source_read, of runs that were checked against size. */
    int (*read)(struct ckpt_source *s, const struct ckpt_source_way *way,
                const struct ckpt_source_run *run, size_t n, struct ckpt_err *err);
    /* Check that the source is unchanged since it was opened. NULL: it cannot change. */
    int (*check)(struct ckpt_source *s, struct ckpt_err *err);
    /* A malloc'ed name for messages. */
    char *(*name)(const struct ckpt_source *s);
    void (*free)(struct ckpt_source *s);
    /* Are the bytes known to be those of another source with the same ops, by the files' recorded
     * identities? NULL: that is never known. */
    bool (*same)(const struct ckpt_source *a, const struct ckpt_source *b);
    /* Return, of a source that decodes, another source and at *ret_off some of its bytes from which
     * this one is made. NULL: its bytes are stored as they are. */
    struct ckpt_source *(*stored)(const struct ckpt_source *s, uint64_t *ret_off);
    /* Decode all of it, unless that is done. NULL: there is nothing to decode. */
    enum ckpt_prepared (*prepare)(struct ckpt_source *s);
};

/* Looks at bytes when they are read for the first time. A reader that puts off checking what stands
 * around them until then has one for each file. Safe from many threads. */
struct ckpt_source_guard {
    /* Begin to fetch what `look` will read for these bytes, without waiting. */
    void (*begin)(struct ckpt_source_guard *g, struct ckpt_source *s, uint64_t off, uint64_t end);
    /* Are bytes [off, end) of s, which are inside of it, what the reader took them for? Reads s by
     * a struct ckpt_source_bare. 1: `waits` is false, and that can't be told without waiting. */
    int (*look)(struct ckpt_source_guard *g, struct ckpt_source *s, bool waits, uint64_t off,
                uint64_t end, struct ckpt_err *err);
    /* Bytes [*off, *end) of s will be prefetched: widen the range to what `look` will read beside
     * them, or begin to fetch that. */
    void (*widen)(struct ckpt_source_guard *g, struct ckpt_source *s, uint64_t *off, uint64_t *end);
    void (*free)(struct ckpt_source_guard *g);
};

/* Members embed this first. */
struct ckpt_source {
    const struct ckpt_source_ops *ops;
    uint64_t size;
    atomic_uint refs;
    struct ckpt_source_guard *guard; /* owned; or NULL */
};

/* Count a reference (NULL is allowed); give one back; the same for ckpt_cleanup. The last one frees
 * the source. */
struct ckpt_source *ckpt_source_ref(struct ckpt_source *s);
void ckpt_source_unref(struct ckpt_source *s);
CKPT_CLEANUP_BY(ckpt_source_unref, struct ckpt_source)

/* Reads bytes [off, off+len), and waits for them. A range outside the source is FORMAT ("needs
 * bytes a to b, the file has n"). */
int ckpt_source_pread(struct ckpt_source *s, void *buf, size_t len, uint64_t off,
                      struct ckpt_err *err);

/* Reads likewise, scattered over n <= IOV_MAX buffers, in one system call where possible. Modifies
 * iov. */
int ckpt_source_preadv(struct ckpt_source *s, struct iovec *iov, int n, uint64_t off,
                       struct ckpt_err *err);

/* Reads n runs, anywhere in the source, in this way. 1, and the memory is undefined: not all bytes
 * can be had without waiting, or this can't be determined (CKPT_READ_CACHED); or there is no room
 * to prefetch them now. Runs that are not neighbours take a system call each: that is only faster
 * than reading everything between them where the holes are large. */
int ckpt_source_read(struct ckpt_source *s, const struct ckpt_source_way *way,
                     const struct ckpt_source_run *run, size_t n, struct ckpt_err *err);

/* Are the bytes behind a network, where each request takes long? Then say what will be read. */
bool ckpt_source_is_far(struct ckpt_source *s);

/* Describe the filesystem of a file that is far or could be: "NFS: far, by its type", malloc'ed.
 * NULL: it is an ordinary local one, or no file, or there is no memory. */
char *ckpt_source_storage(struct ckpt_source *s);

/* Are they an object's of a bucket? Small pieces of it are not read through a page cache. */
bool ckpt_source_is_object(struct ckpt_source *s);

/* Smaller reads of far files are left to the page cache, unless all of their bytes are on their
 * way: headers, small tensors here and there, and rows with holes between them. */
enum { CKPT_FAR_LEAST = 128 * 1024 };

/* Begin to fetch bytes [off, off+len), without waiting, if the source is far. A hint: a range
 * outside of the source is cut. False: there is no room for them now. */
bool ckpt_source_prefetch(struct ckpt_source *s, uint64_t off, uint64_t len);

/* Widen a range that will be prefetched to what a guard will read beside it (or begin to fetch
 * that).
 */
void ckpt_source_widen(struct ckpt_source *s, uint64_t *off, uint64_t *end);

/* Makes what the first read would wait for, if the source has to decode its bytes. */
enum ckpt_prepared ckpt_source_prepare(struct ckpt_source *s);

/* STALE if the file's identity changed since it was opened. Call after the last read of a request.
 */
int ckpt_source_check(struct ckpt_source *s, struct ckpt_err *err);

/* True: both are known to have the same bytes, without reading them. */
bool ckpt_source_same(const struct ckpt_source *a, const struct ckpt_source *b);

/* Is it a part of a file that this machine has not, so that another rank reads it? */
bool ckpt_source_is_elsewhere(struct ckpt_source *s);

/* The rank that reads a file which this machine has not (ckpt_dir_elsewhere), for messages; NULL:
 * it is read here. */
const char *ckpt_source_reader(struct ckpt_source *s);

/* Set ret[r] for each of the n ranks of the job: has rank r the file, of which s is a part? False:
 * all have it, or s is in memory. */
bool ckpt_source_holders(struct ckpt_source *s, bool *ret, uint32_t n);

/* The file's name for messages; never NULL; the caller frees it with ckpt_freep or free. */
char *ckpt_source_name(const struct ckpt_source *s);

/* A regular file below dir, opened through pool when it is read. Its identity is recorded now.
 * `name` is copied; dir and pool are referenced. */
int ckpt_source_file_new(struct ckpt_dir *dir, const char *name, struct ckpt_fdpool *pool,
                         struct ckpt_source **ret, struct ckpt_err *err);

/* These two do what ckpt_source_file_new does in two steps: make the source without accessing the
 * file, then open it, before anything else is done with it. (For 10^5 files the first step is done
 * by one thread, and the second, with reading the headers, by several.) */
int ckpt_source_file_prepare(struct ckpt_dir *dir, const char *name, struct ckpt_fdpool *pool,
                             struct ckpt_source **ret, struct ckpt_err *err);
int ckpt_source_file_open(struct ckpt_source *s, struct ckpt_err *err);

/* STALE if the file's name leads to another file now, or the file has changed. This is stricter
 * than ckpt_source_check, which goes on with the open descriptor when another file was renamed over
 * the name. With `unread` the file is opened to find out, because network file systems ask their
 * server only then. Without it only a file is looked at that a request has read
 * (ckpt_source_check), to find out whether all that was read is of one save, and a file that was
 * removed is no error. 0 for NULL and for sources that are not files. */
int ckpt_source_file_verify(const struct ckpt_source *s, bool unread, struct ckpt_err *err);

/* The file that s is, or is a part of; NULL: s is in memory. */
struct ckpt_source *ckpt_source_file_behind(struct ckpt_source *s);
struct ckpt_source *ckpt_source_window_of(struct ckpt_source *s); /* NULL: s is no window */

/* The directory and the name of a file; both are borrowed from the source. */
struct ckpt_dir *ckpt_source_file_dir(const struct ckpt_source *s);
const char *ckpt_source_file_name(const struct ckpt_source *s);

/* The recorded identity; false if s is not a file. */
bool ckpt_source_file_id(const struct ckpt_source *s, struct ckpt_file_id *ret);

/* Is s the file that a directory has found (ckpt_dir_look)? Files of one archive have one identity,
 * and differ in their extents. */
bool ckpt_source_is_file(const struct ckpt_source *s, const struct ckpt_dir_found *found);

/* The fraction of a file that is in the page cache (sampled), from 0 to 1, and whether it is on
 * storage that several machines share. False: s is not a file, or this cannot be determined. */
bool ckpt_source_file_storage(struct ckpt_source *s, double *ret_resident, bool *ret_shared);

/* The fraction of bytes [off, off+len) of a file that is in the page cache, from 0 to 1; also 1 if
 * that cannot be determined, or if s is not a file. */
double ckpt_source_resident(struct ckpt_source *s, uint64_t off, uint64_t len);

/* len bytes of memory, copied. `name` (copied) stands in messages. */
int ckpt_source_mem_new(const char *name, const void *data, size_t len, struct ckpt_source **ret,
                        struct ckpt_err *err);

/* A place for bytes that do not exist, as large as any: reading fails, with MISSING and `why`
 * (copied). Tensors that are only named lie in it. */
int ckpt_source_nowhere_new(const char *why, struct ckpt_source **ret, struct ckpt_err *err);
bool ckpt_source_is_nowhere(const struct ckpt_source *s);

/* A source as its guard reads it: without being asked. Lives on the stack of a call of the guard.
 */
struct ckpt_source_bare {
    struct ckpt_source source;
    struct ckpt_source *of; /* borrowed */
};

/* The bytes of `of`. */
void ckpt_source_bare_init(struct ckpt_source_bare *b, struct ckpt_source *of);

/* Give s, which has none, a guard, before other threads know s. */
void ckpt_source_set_guard(struct ckpt_source *s, struct ckpt_source_guard *guard);

/* Bytes [off, off+len) of another source, which is referenced. */
int ckpt_source_window_new(struct ckpt_source *of, uint64_t off, uint64_t len,
                           struct ckpt_source **ret, struct ckpt_err *err);
