/* SPDX-License-Identifier: Apache-2.0 */
/* Reading objects and lists of buckets, by a helper process that makes all HTTP and has all
 * credentials. A process has one helper for each choice of settings. What was read is kept in
 * blocks, within one budget, so that no byte is fetched twice while it is held. Safe from many
 * threads. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "base/err.h"
#include "io/dir.h"

/* Zeroed: the defaults. */
struct ckpt_bucket_settings {
    uint32_t connections, timeout_ms;
    bool anonymous; /* requests are not signed */
    bool no_cache;
    char *cache; /* the folder of headers; NULL: the default one. A client has a copy */
};

struct ckpt_bucket_stats {
    uint64_t requests, bytes, retries, connections;
    char endpoint[256], region[64], credentials[128]; /* of the last request */
};

struct ckpt_client;

/* Start a helper, or take the one that has these settings. Counted. */
int ckpt_client_get(const struct ckpt_bucket_settings *s, struct ckpt_client **ret,
                    struct ckpt_err *err);
void ckpt_client_unref(struct ckpt_client *c); /* NULL is allowed */

/* The sums over all helpers of this process; texts are of one of them. False: there was none. */
bool ckpt_bucket_stats(struct ckpt_bucket_stats *ret);

/* An object; all texts are borrowed. */
struct ckpt_object {
    const char *bucket, *key, *tag; /* tag: its ETag */
    uint64_t size;
};

/* Fill iov[0..n) from `off` on. 0 or -1; 1: as ckpt_dir_read_object. */
int ckpt_client_read(struct ckpt_client *c, const struct ckpt_object *o, const struct iovec *iov,
                     int n, uint64_t off, enum ckpt_read_how how, struct ckpt_err *err);

/* An entry of a list. A folder has the key up to the delimiter, and no ETag. */
struct ckpt_listed {
    const char *key, *tag;
    uint64_t size;
    int64_t mtime_ns;
};

/* Call fn for all keys that begin with the prefix, on at most most_pages pages; *ret_all: there
 * were no more. `delimiter` is "" or "/". */
int ckpt_client_list(struct ckpt_client *c, const char *bucket, const char *prefix,
                     const char *delimiter, unsigned most_pages, bool *ret_all,
                     int (*fn)(void *ctx, const struct ckpt_listed *e, struct ckpt_err *err),
                     void *ctx, struct ckpt_err *err);
