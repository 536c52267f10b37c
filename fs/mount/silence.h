/* SPDX-License-Identifier: Apache-2.0 */
/* Files (or steps, while they are opened) whose storage gives no answer, so that the log says so
 * once of each, however many requests wait for it, and once that it answers again. Safe from many
 * threads. */
#pragma once

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { CKPTFS_SILENT_MOST = 256 }; /* beyond it the one is forgotten that was silent first */

struct ckptfs_silences {
    pthread_mutex_t lock; /* no other lock is taken while it is held */
    atomic_size_t n;
    struct ckptfs_silent {
        uint64_t file;     /* any number that identifies it */
        uint64_t since_ms; /* ckpt_now_ms */
    } of[CKPTFS_SILENT_MOST];
};

/* Begin with none that is silent; end. */
void ckptfs_silences_init(struct ckptfs_silences *s);
void ckptfs_silences_release(struct ckptfs_silences *s);

/* Note that the file's storage has given no answer since then. False: this was known. */
bool ckptfs_silence_begins(struct ckptfs_silences *s, uint64_t file, uint64_t since_ms);

/* Note that it has given one. False: it was not silent. Else *ret_ms is how long it was. */
bool ckptfs_silence_ends(struct ckptfs_silences *s, uint64_t file, uint64_t *ret_ms);
