/* SPDX-License-Identifier: Apache-2.0 */
/* Devices: memory that the host does not reach, and work in it. The members live in libraries of
 * their own (cuda.c), a transport owns one (struct ckpt_xport.device).
 *
 * There are three queues of work, each in the order of issue: uploads; exchanges; and the rest,
 * which places what has arrived while the next exchange goes on. Nothing here waits for them but
 * drain. One thread at a time calls in, but for unpin and unref. */
#ifndef CKPT_LOAD_DEVICE_H
#define CKPT_LOAD_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <ckptfs/err.h>

struct ckpt_comm;
struct ckpt_device;
struct ckpt_device_copy; /* copy_kernel.h */

/* One part of a window's exchange, in device memory. The members of a communicator say the same
 * broadcasts in the same order, and each pair of ranks what goes between them. */
struct ckpt_exchange {
    enum { CKPT_SEND, CKPT_RECEIVE, CKPT_BROADCAST } kind;
    uint32_t family; /* of a broadcast: 0: all ranks; else 1 + the family of this rank's group */
    uint32_t peer;   /* a rank; of a broadcast, its root's place in the group */
    uint32_t n;      /* of a broadcast: members */
    void *buf;
    size_t len;
};

/* A family of groups (families.h), as one rank sees it. */
struct ckpt_device_family {
    uint64_t id;     /* equal ones have the same groups: 0: there is none */
    uint32_t colour; /* of this rank's group; CKPT_NONE: it is in none */
    uint32_t place;  /* of this rank in it */
};

enum { CKPT_DEVICE_MARKS = 64 };

struct ckpt_device_ops {
    /* The thread is the loader's own, and this its device from now on. */
    void (*adopt)(struct ckpt_device *d);

    /* Memory of the device; of the host, pinned. */
    int (*alloc)(struct ckpt_device *d, size_t len, void **ret, struct ckpt_err *err);
    void (*dealloc)(struct ckpt_device *d, void *ptr);
    int (*pin)(struct ckpt_device *d, size_t len, void **ret, struct ckpt_err *err);
    void (*unpin)(struct ckpt_device *d, void *ptr);
    /* Can the device write there? */
    bool (*reaches)(struct ckpt_device *d, const void *ptr);
    /* Copy to the host, now. */
    int (*fetch)(struct ckpt_device *d, void *dst, const void *src, size_t len,
                 struct ckpt_err *err);

    /* COLLECTIVE. Make what exchanges need, or keep what the last load had; comm carries messages.
     * family: CKPT_FAMILIES of them. NULL: nothing is needed. */
    int (*connect)(struct ckpt_device *d, struct ckpt_comm *comm,
                   const struct ckpt_device_family *family, struct ckpt_err *err);
    /* A load begins and has its memory, or goes on after a pause: what is queued from now on comes
     * after what the caller has queued so far. The only one that is called from another thread than
     * the pump's. */
    int (*begin)(struct ckpt_device *d, struct ckpt_err *err);
    /* Queue an upload from pinned memory. */
    int (*upload)(struct ckpt_device *d, void *dst, const void *src, size_t len,
                  struct ckpt_err *err);
    /* What is queued from now on, exchanges too, comes after the uploads so far. */
    int (*fence)(struct ckpt_device *d, struct ckpt_err *err);
    /* Copies, downloads and marks from now on come after the exchanges so far. */
    int (*follow)(struct ckpt_device *d, struct ckpt_err *err);
    /* Queue copies; the list is in the device's memory, and nblock blocks long. */
    int (*copy)(struct ckpt_device *d, const struct ckpt_device_copy *list, uint32_t n,
                uint32_t nblock, struct ckpt_err *err);
    int (*download)(struct ckpt_device *d, void *dst, const void *src, size_t len,
                    struct ckpt_err *err);
    /* Queue an exchange. 1: it is under way, and nothing may be queued before exchanged says 0. */
    int (*exchange)(struct ckpt_device *d, const struct ckpt_exchange *list, size_t n,
                    struct ckpt_err *err);
    int (*exchanged)(struct ckpt_device *d, struct ckpt_err *err);
    /* Has the work come to where mark i was set? 0: yes; 1: not yet; -1: it failed. */
    int (*mark)(struct ckpt_device *d, uint32_t i, struct ckpt_err *err);
    int (*reached)(struct ckpt_device *d, uint32_t i, struct ckpt_err *err);
    /* Give up exchanges, and wait for the rest to end. False: it does not end, and memory must be
     * kept for ever. */
    bool (*drain)(struct ckpt_device *d);

    void (*unref)(struct ckpt_device *d);
    void (*ref)(struct ckpt_device *d);
};

/* Members embed this first. */
struct ckpt_device {
    const struct ckpt_device_ops *ops;
};

#endif
