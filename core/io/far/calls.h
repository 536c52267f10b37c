/* SPDX-License-Identifier: Apache-2.0 */
/* Calls of the kernel about files of another machine, which threads of this process make, so that
 * who waits for one can give it up: a call that hangs cannot be interrupted. All that it uses and
 * writes to is its own, and stays so until the kernel has returned. Safe from many threads. */
#pragma once

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>

#include "base/err.h"
#include "io/storage.h"

struct ckpt_call;

struct ckpt_call_ops {
    /* Make the call, in a thread of its own: with what the struct has, and nothing else. */
    void (*make)(struct ckpt_call *c);
    /* Free the struct, and all that it has and got. */
    void (*free)(struct ckpt_call *c);
};

/* Who calls embeds this first, with the two first members set and the others zeroed. */
struct ckpt_call {
    const struct ckpt_call_ops *ops;
    struct ckpt_storage *storage; /* that is asked; or NULL: it is not known */

    TAILQ_ENTRY(ckpt_call) link;
    enum { CKPT_CALL_QUEUED, CKPT_CALL_BEGUN, CKPT_CALL_ENDED } state;
    bool given_up;
    pthread_cond_t ended;
};

/* Make a call and wait for it. 0: it was made, and is the caller's to free. -1 and *err: it is not
 * the caller's any more. TIMEOUT: it hangs (ckpt_storage_hangs) by the options' timeout, or by an
 * eighth of it, at most a second, where an earlier call to the same storage does. At most as many
 * calls as the options say (64) are made at once, those that hang among them. */
int ckpt_call_make(struct ckpt_call *c, const struct ckpt_far_options *opt, struct ckpt_err *err);

/* The error of storage that hangs. */
int ckpt_call_hangs(uint32_t timeout_ms, struct ckpt_err *err);
