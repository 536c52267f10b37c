/* SPDX-License-Identifier: Apache-2.0 */
/* Storage that gives no answer. The library gives up what it can after -o timeout=; a thread that
 * hangs in the kernel all the same is left to it, and the request that it serves is answered in its
 * place. The log says of each file once that its storage is silent, and once that it answers. */
#pragma once

#include "mount/mount.h"

struct ckptfs_watchdog {
    uint64_t read;     /* what the run has read so far; only compared */
    uint64_t moved_ms; /* when that has changed last (ckpt_now_ms) */
};

/* Look for requests that hang, about once a second, from one thread. */
void ckptfs_watchdog_look(struct ckptfs_watchdog *w, struct ckptfs *fs);

/* Answer all requests that run with EIO, at the end of the mount. */
void ckptfs_watchdog_end(struct ckptfs *fs);

/* Log that the storage of a file has given no answer to a read, unless that is known, and that it
 * has given one, unless nothing else was known. `text` begins with the file's name. */
void ckptfs_storage_is_silent(struct ckptfs *fs, const struct ckptfs_lanes *of, const char *text);
void ckptfs_storage_answers(struct ckptfs *fs, const struct ckptfs_lanes *of);
