/* SPDX-License-Identifier: Apache-2.0 */
/* A device: a GPU's memory, and the work that is queued on it. This is the contract between the
 * loader's pump thread (load/engine/pump_device.c) and a member (cuda.c with comm/nccl/xport.c),
 * which lives in a library of its own. A transport owns the device (struct ckpt_xport.device).
 *
 * A member keeps three queues of work, each of which runs in the order of issue: uploads from
 * pinned host memory; exchanges between ranks; and placing, which is everything else, so that
 * window w is placed while window w + 1 is exchanged. Only drain waits for queued work. Except
 * where a member says otherwise, one thread at a time calls it. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <ckptfs/err.h>

struct ckpt_device;
struct ckpt_device_copy; /* copy_kernel.h */

/* One operation of a window's exchange, in device memory. The members of a communicator issue the
 * same all-gathers in the same order; the two ranks of a pair issue matching sends and receives. */
struct ckpt_exchange {
    enum { CKPT_SEND, CKPT_RECEIVE, CKPT_GATHER } kind;
    uint32_t step; /* operations of a step run after those of the steps before */
    uint32_t
        division; /* the communicator: CKPT_DIVISION_ALL (plan.h); 1 + f: the group in division f */
    uint32_t peer; /* the other rank; of an all-gather, the index of this one in the group */
    uint32_t n;    /* of an all-gather: members of the group */
    void *buf;     /* of an all-gather: the bytes of all members, where this one's are already */
    size_t len;    /* of an all-gather: the bytes of one member */
};

/* The most divisions that have communicators of their own beside the one of all ranks. */
enum { CKPT_DIVISIONS = 4 };

/* One division of ranks into groups without common members (load/plan/divisions.h), as one rank
 * sees it.
 */
struct ckpt_device_division {
    uint64_t id;     /* divisions with equal ids have equal groups; 0: there is no such division */
    uint32_t colour; /* the number of this rank's group; CKPT_NONE: the rank is in no group */
    uint32_t place;  /* the index of this rank in its group */
};

enum { CKPT_DEVICE_MARKS = 64 };

struct ckpt_device_ops {
    /* Make the device current for the calling thread, which belongs to the loader and uses no
     * other device afterwards. */
    void (*adopt)(struct ckpt_device *d);

    /* Allocate device memory; pin: pinned host memory, which starts a page. From any thread.
     * Pinning is slow, so the member keeps what unpin returns for the next load. unpin of NULL
     * frees what is kept, and returns its size; otherwise unpin returns 0. */
    int (*alloc)(struct ckpt_device *d, size_t len, void **ret, struct ckpt_err *err);
    void (*dealloc)(struct ckpt_device *d, void *ptr);
    int (*pin)(struct ckpt_device *d, size_t len, void **ret, struct ckpt_err *err);
    uint64_t (*unpin)(struct ckpt_device *d, void *ptr);
    /* Can kernels of this device write to ptr? True for its own memory, and for host memory that
     * is registered with it. */
    bool (*reaches)(struct ckpt_device *d, const void *ptr);
    /* Copy from the device to the host and wait for the copy. */
    int (*fetch)(struct ckpt_device *d, void *dst, const void *src, size_t len,
                 struct ckpt_err *err);

    /* A load begins and has allocated its memory, or continues after a pause: work that is queued
     * from now on runs after what the caller's stream has queued so far. The caller's thread calls
     * this one, not the pump's. */
    int (*begin)(struct ckpt_device *d, struct ckpt_err *err);
    /* Queue an upload from pinned memory. */
    int (*upload)(struct ckpt_device *d, void *dst, const void *src, size_t len,
                  struct ckpt_err *err);
    /* Exchanges and placing that are queued from now on wait for the uploads so far. */
    int (*fence)(struct ckpt_device *d, struct ckpt_err *err);
    /* Placing that is queued from now on waits for the exchanges so far. */
    int (*follow)(struct ckpt_device *d, struct ckpt_err *err);
    /* Queue (placing) one launch of the copy kernel; the list of n descriptors is in device memory,
     * and needs nblock blocks of threads. */
    int (*copy)(struct ckpt_device *d, const struct ckpt_device_copy *list, uint32_t n,
                uint32_t nblock, struct ckpt_err *err);
    /* Queue (placing) a copy to pinned memory. */
    int (*download)(struct ckpt_device *d, void *dst, const void *src, size_t len,
                    struct ckpt_err *err);
    /* Queue an exchange. 0: it is queued. 1: the communicator is still working on the call, and
     * nothing may be queued before exchanged returns 0. */
    int (*exchange)(struct ckpt_device *d, const struct ckpt_exchange *list, size_t n,
                    struct ckpt_err *err);
    int (*exchanged)(struct ckpt_device *d, struct ckpt_err *err);
    /* Set mark i (below CKPT_DEVICE_MARKS) behind the placing that is queued so far. reached: 0:
     * all of that work is done; 1: not yet; -1: it failed. */
    int (*mark)(struct ckpt_device *d, uint32_t i, struct ckpt_err *err);
    int (*reached)(struct ckpt_device *d, uint32_t i, struct ckpt_err *err);
    /* Abort the exchanges and communicators, and wait some seconds for the remaining work. False:
     * the work did not end, and the memory that it uses must never be freed. */
    bool (*drain)(struct ckpt_device *d);

    /* References keep the member alive; the last unref frees it. From any thread. */
    void (*unref)(struct ckpt_device *d);
    void (*ref)(struct ckpt_device *d);
};

/* Members embed this first. */
struct ckpt_device {
    const struct ckpt_device_ops *ops;
    bool logarithmic;  /* all-gathers of one rank a node take log2(n) steps */
    bool connected;    /* it has the communicators of an earlier load */
    uint64_t setup_ns; /* spent in connect so far */
};
