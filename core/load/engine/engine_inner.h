/* SPDX-License-Identifier: Apache-2.0 */
/* The inside of the engine (engine.h): its state, and what its modules call of each other.
 * engine_life.c starts, waits and ends. Workers run worker.c: they read units and place bytes into
 * destinations. The pump is one thread that runs pump.c: it opens windows and posts transfers
 * (window.c) or queues work on a device (pump_device.c), exchanges messages with other ranks
 * (messages.c), watches timeouts, and agrees with all ranks on the end. */
#pragma once

#include <pthread.h>

#include "device/copies.h"
#include "device/device.h"
#include "load/engine/engine.h"

enum {
    CKPT_MESSAGE_HASH = 8,   /* bytes of the XXH3 hash that follows a slice, with verify */
    CKPT_DEVICE_PAGE = 4096, /* alignment of what slots have of pinned memory */
};

/* A slot's memory is whole pages. */
static inline uint64_t ckpt_whole_pages(uint64_t len)
{
    return (len + CKPT_DEVICE_PAGE - 1) / CKPT_DEVICE_PAGE * CKPT_DEVICE_PAGE;
}

/* A read slot: a chunk that this rank reads. The lock protects it. */
struct ckpt_read_slot {
    bool open;       /* it has a chunk */
    uint32_t chunk;  /* index in plan->chunks */
    uint32_t lo, hi; /* units [lo, hi), of which the first and the last may be cut */
    uint32_t next;   /* the next unit that a worker takes */
    uint32_t unread; /* number of units that are not in buf yet */
    uint32_t unsent; /* number of windows that need the chunk and are not done */
    unsigned char *buf;
    unsigned char *pinned; /* on a device: the slot's, in e->memory. buf is as many bytes behind
                              it as the chunk's first byte is behind a page in its file, so that
                              O_DIRECT can read into buf */
};

/* A slice that workers place in host memory: that this rank receives there, or of a window on a
 * device. With verify, its XXH3 hash follows it. */
struct ckpt_message {
    struct ckpt_xfer xfer;
    struct ckpt_window_slot *slot;
    struct ckpt_message *next; /* in the queue of the workers */
    uint32_t member;           /* whose slice it is: index in the group */
    bool passed_on;            /* this rank sends it on to other ranks */
    bool handled; /* the transfer has ended and workers have the message in their queue */
    bool arrived; /* the bytes are in xfer.buf (not only in the sender's memory) */
};

/* A slice that this rank sends to one other rank. */
struct ckpt_outgoing {
    struct ckpt_xfer xfer;
    struct ckpt_message *in; /* the message with which it arrives; NULL: this rank reads it */
    bool posted;             /* the transfer has begun */
    bool handled;            /* the transfer has ended and has been counted */
};

/* A window slot: a window in flight. */
struct ckpt_window_slot {
    bool open;
    bool hashed;       /* the hash stands behind this rank's slice */
    uint32_t window;   /* index in plan->windows */
    uint64_t since_ns; /* clock time at which this rank's slice was there */
    uint32_t left;     /* number of messages not placed and sends and all-gathers not ended; device:
                          1 until done */
    bool gathers;      /* the slices come by all-gathers, which have not ended */
    uint32_t step;     /* number of them that have been started */
    struct ckpt_xfer gather; /* the one that was started last */
    struct ckpt_message *in;
    struct ckpt_outgoing *out;
    size_t nin, nout;
    unsigned char *receive; /* buffer of all slices; on a device: pinned, for those downloaded */
    struct {
        enum {
            CKPT_DEVICE_WAITING,  /* nothing is queued yet, or all is done */
            CKPT_DEVICE_EXCHANGE, /* the exchange is being queued, which takes several turns */
            CKPT_DEVICE_FETCHING, /* slices are copied to the host, to be verified or placed there
                                   */
            CKPT_DEVICE_PLACING,  /* the last copies are queued */
        } phase;
        unsigned char *receive;        /* buffer of all slices in device memory */
        struct ckpt_copies copies;     /* the descriptors, in pinned memory of the host */
        struct ckpt_device_copy *list; /* room for them in device memory */
        CKPT_VEC(struct ckpt_exchange) exchange;
        ckpt_overlaps own; /* with wants, which have arrived when all is done */
    } dev;
};

/* A pause: all ranks stop exchanging after the same window number. Each rank reports along the tree
 * of ranks (comm.h) how far it and the ranks below it have opened windows; rank 0 announces the
 * maximum; no rank opens a window beyond it. Windows are counted by their number in their group
 * plus one; 0 means none. */
struct ckpt_pause {
    /* Under the lock: */
    uint32_t asked;    /* how many pauses this rank has been asked for */
    bool wanted;       /* a pause has been asked for and not yet been resumed */
    bool reached;      /* this rank is paused */
    uint64_t since_ms; /* when the last of them was asked for */
    /* Only the pump uses these members: */
    uint32_t reported; /* how many pauses this rank has reported to the rank above */
    uint32_t nheard;   /* for the next pause: number of ranks right below that have reported */
    uint32_t furthest; /* for the next pause: the maximum of what they have reported */
    uint32_t agreed;   /* how many pauses rank 0 has announced */
    uint32_t stop_at;  /* the maximum that was announced last */
};

struct ckpt_worker {
    struct ckpt_engine *e;
    atomic_ullong since_ms; /* clock time at which the current read began; 0: none is under way */
    /* The current read: number of the tensor, number of the file and offset of the first byte. */
    atomic_uint tensor, source;
    atomic_ullong off;
    struct ckpt_bounce bounce;
};

struct ckpt_engine {
    struct ckpt_view *view;
    const struct ckpt_catalog *cat;
    struct ckpt_reading reading;
    struct ckpt_comm *comm; /* not used after `finished` */
    uint32_t self, size;    /* this rank, and the number of ranks */
    struct ckpt_plan *plan;
    struct ckpt_job_wants *job_wants;
    struct ckpt_target *target; /* per want */
    size_t ntarget;
    atomic_ullong *left; /* per want: bytes that have not arrived */
    struct ckpt_engine_options opt;
    struct ckpt_engine_sizes sizes;
    uint64_t needed_bytes, unique_bytes;
    struct ckpt_device *device; /* NULL: destinations are in host memory */
    void *memory;               /* of the host, for all slots; on a device it is pinned */

    pthread_mutex_t lock;        /* protects the members up to ntaken */
    uint32_t refs;               /* one of the caller, one of each worker, one of the pump thread */
    pthread_cond_t work;         /* signalled to workers */
    pthread_cond_t news;         /* signalled to callers that wait for the load */
    struct ckpt_read_slot *read; /* opt.ahead of them */
    struct ckpt_window_slot *slot; /* opt.slots of them */
    struct ckpt_worker *worker;    /* opt.threads of them */
    uint32_t nworker;              /* number of workers that have not ended */
    uint32_t next_chunk;           /* index in plan->chunks of the next one to get a read slot */
    uint32_t nread;                /* number of chunks that have been read, sent and placed */
    uint32_t nclosed;              /* number of windows that are done */
    struct ckpt_message *place, **place_tail; /* queue of messages for the workers */
    uint32_t placing; /* number of workers that are writing to destinations */
    struct ckpt_pause pause;
    bool stopped;        /* workers begin nothing any more */
    bool finished;       /* all ranks have agreed on the end, and `result` stands */
    bool leak;           /* transfers could not be cancelled: buffers are kept for ever */
    struct ckpt_err err; /* the first error; code OK: none */
    bool err_is_own;     /* the error arose on this rank, so the others must be told */
    size_t *landed;      /* wants in the order of arrival */
    size_t nlanded;      /* number of wants that have arrived */
    size_t ntaken;       /* of these, number that ckpt_engine_next has reported */

    /* The rest is used by the pump only, unless noted. */
    pthread_t pump;
    bool joined;          /* the pump's thread has ended; under the lock */
    bool final;           /* the round in which all ranks agree on the end has begun */
    uint32_t next_window; /* the next window to be opened */
    uint32_t next_issue;  /* the next window whose work is to be queued on a device, or whose
                           * all-gathers are to be started */
    uint64_t read_ms;     /* clock time at which bytes were last read from storage */
    uint64_t arrived;     /* stats.arrived then */
    uint64_t looked_ms;   /* clock time at which lost ranks were last looked for */
    uint64_t done;        /* bytes that this rank had read and transferred then */
    bool paused;          /* the last turn found the load paused */
    uint32_t *stamp;      /* per rank: equal to `stamped` if the rank was met in the current scan */
    uint32_t stamped;     /* number of the current scan */
    uint32_t *peers;      /* room for the receivers of a slice */
    struct ckpt_round round; /* about the end */
    struct ckpt_load_stats job;
    int result; /* of the load; written under the lock */
    struct ckpt_engine_stats stats;
};

/* ---- window.c ---- */

/* Give the next chunk of this rank a read slot (under the lock). False: no slot is free, or there
 * is no further chunk. */
bool ckpt_read_open(struct ckpt_engine *e);

/* Close a read slot if its chunk has been read, sent and placed (under the lock). */
void ckpt_read_settle(struct ckpt_engine *e, struct ckpt_read_slot *s);

/* Pump only. A window has arrived, of which this rank has received so many bytes: note the rate. */
void ckpt_window_rate(struct ckpt_engine *e, const struct ckpt_window_slot *s, uint64_t bytes);

/* Close a window slot if its window is done, and let go of this rank's chunk (under the lock). */
void ckpt_window_settle(struct ckpt_engine *e, struct ckpt_window_slot *s);

/* Pump only. Open windows while slots are free; in host memory, also post their receives. */
int ckpt_windows_open(struct ckpt_engine *e, struct ckpt_err *err);

/* Pump only. Post the sends of slices that have been read or have arrived, to each rank in the
 * order of windows; and start the all-gathers, in the order of windows and steps. */
int ckpt_windows_send(struct ckpt_engine *e, struct ckpt_err *err);

/* Pump only. Notice which transfers have ended, and hand received slices to the workers. */
void ckpt_windows_harvest(struct ckpt_engine *e);

/* Let a worker place a message (under the lock). */
void ckpt_message_hand(struct ckpt_engine *e, struct ckpt_message *m);

/* This rank's slice of a window: *ret_len bytes, to which, with verify, the hash is added. NULL: it
 * has not been read yet, or is empty (*ret_len is 0). */
unsigned char *ckpt_window_own(struct ckpt_engine *e, struct ckpt_window_slot *s, size_t *ret_len);

/* Compare the hash that follows the slice of a member, which lies at `data`. IO: they differ. */
int ckpt_slice_check(const struct ckpt_engine *e, const struct ckpt_window_slot *s, uint32_t member,
                     const unsigned char *data, struct ckpt_err *err);

/* The window of a slot. */
static inline const struct ckpt_window *ckpt_window_of(const struct ckpt_engine *e,
                                                       const struct ckpt_window_slot *s)
{
    return &e->plan->windows.ptr[s->window];
}

/* Where a member's slice lies in the buffer of a window. */
static inline uint64_t ckpt_window_offset(const struct ckpt_engine *e, const struct ckpt_window *w,
                                          uint32_t member)
{
    return ckpt_plan_place(e->plan, w->group, member) *
           ckpt_slice_stride(&e->plan->stream[w->group], &e->opt.mode);
}

/* ---- pump_device.c: for destinations in device memory ---- */

/* Allocate the slots' memory on the device, and pinned memory. After a failure,
 * ckpt_device_slots_release frees what there is. */
int ckpt_device_slots_init(struct ckpt_engine *e, struct ckpt_err *err);

/* Free what ckpt_device_slots_init has allocated. */
void ckpt_device_slots_release(struct ckpt_engine *e);

/* Pump only. Queue all work that can be queued, and notice what the device has finished. Never
 * waits. *ret_moved becomes true if anything was queued or finished. */
int ckpt_device_turn(struct ckpt_engine *e, bool *ret_moved, struct ckpt_err *err);

/* Pump only. True if work is queued that has not been seen to end. */
bool ckpt_device_busy(const struct ckpt_engine *e);

/* ---- worker.c ---- */

/* The main function of a worker thread; `worker` is a struct ckpt_worker. */
void *ckpt_worker_run(void *worker);

/* ---- pump.c ---- */

/* The main function of the pump thread; `engine` is a struct ckpt_engine. */
void *ckpt_pump_run(void *engine);

/* ---- messages.c ---- */

/* Tell the neighbours in the tree of ranks that the load has failed; they pass it on. */
void ckpt_abort_send(struct ckpt_comm *comm, const struct ckpt_err *why);

/* Handle a control message of the load; the callback for ckpt_comm_begin. data is borrowed. */
void ckpt_engine_receive(void *engine, uint32_t peer, const unsigned char *data, size_t len);

/* Pump only. Report this rank's progress if a pause was asked for, and notice when the pause is
 * reached. True: no window may be opened now, so no rank is late with anything. */
bool ckpt_pause_turn(struct ckpt_engine *e);

/* Pump only. TIMEOUT if a pause was asked for on this rank, and exchange_timeout_ms later not yet
 * on all ranks: it would stop this rank for ever, and with it those that wait for its slices. */
int ckpt_pause_check(struct ckpt_engine *e, uint64_t now, struct ckpt_err *err);

/* Pump only. True if a pause does not forbid to open this window. */
bool ckpt_pause_allows(struct ckpt_engine *e, const struct ckpt_window *w);

/* ---- engine_life.c ---- */

/* Drop a reference; the last one frees the engine. Not under the lock. */
void ckpt_engine_unref(struct ckpt_engine *e);

/* End a worker: called with the lock held, which it releases. Drops the worker's reference. */
void ckpt_engine_leave(struct ckpt_engine *e);

/* Make the load fail with *err, unless it has failed already. own: the error arose on this rank.
 * Not under the lock. */
void ckpt_engine_fail(struct ckpt_engine *e, const struct ckpt_err *err, bool own);

/* Has the load failed, or ended? Not under the lock. */
bool ckpt_engine_has_stopped(struct ckpt_engine *e);

/* Wake the pump (under the lock). Does nothing once the load is finished, when the comm may be
 * gone. */
void ckpt_engine_kick(struct ckpt_engine *e);

/* Wait until the load is over, or `enough` (called under the lock; may be NULL) returns true. 0: it
 * is. 1: not after timeout_ms. -1: the load has failed. */
int ckpt_engine_wait_for(struct ckpt_engine *e, uint32_t timeout_ms,
                         bool (*enough)(const struct ckpt_engine *e), struct ckpt_err *err);

/* `bytes` more bytes of a want have arrived; after the last of them the want has landed. Not under
 * the lock. */
void ckpt_engine_land(struct ckpt_engine *e, uint32_t want, uint64_t bytes);
