/* SPDX-License-Identifier: Apache-2.0 */
/* The engine from inside: engine_life.c (start, wait, end), pump.c (its turns, deadlines, the end),
 * pump_device.c (the same for a device), window.c (what is posted), worker.c (reading and placing),
 * assist.c (messages between loads), pause.c. */
#ifndef CKPT_LOAD_ENGINE_INNER_H
#define CKPT_LOAD_ENGINE_INNER_H

#include <pthread.h>

#include "load/copies.h"
#include "load/device.h"
#include "load/engine.h"

enum { CKPT_MESSAGE_HASH = 8, CKPT_ASSIST_HEAD = 64 };

/* Descriptors of copies on a device, and where they lie there. */
struct ckpt_copy_list {
    struct ckpt_copies copies;     /* pinned */
    struct ckpt_device_copy *list; /* their copy in the device */
};

enum { CKPT_DEVICE_PAGE = 4096 }; /* what pinned memory is cut by */

/* Units that have been read and wait for their upload. */
struct ckpt_units {
    uint32_t lo, hi;
};

/* A piece that this rank reads. On a device, all of `dev` but `ready` is the pump's. */
struct ckpt_read_slot {
    bool open;
    uint32_t own;    /* which of plan->own */
    uint32_t lo, hi; /* units */
    uint32_t next;   /* unit to be read next */
    uint32_t unread; /* units that are not there */
    uint32_t unsent; /* ranks that do not have it yet */
    bool alone;      /* nobody else wants it */
    bool hashed;
    uint32_t *unit_off; /* in buf: of units lo .. hi */
    unsigned char *buf;
    struct {
        CKPT_VEC(struct ckpt_units) ready; /* under the engine's lock */
        unsigned char *pinned; /* where the slot's part of the slab begins; a piece begins as far
                                * behind it as in its file behind a page: so O_DIRECT can fill it */
        unsigned char *buf;
        struct ckpt_copy_list list;
        ckpt_parts own; /* that land when it is placed */
        bool queued;    /* alone: its copies are under way; the pump thread's own */
    } dev;
};

/* A piece that comes from another rank. With verify, 8 bytes of XXH3 follow it. */
struct ckpt_message {
    struct ckpt_xfer xfer;
    struct ckpt_window_slot *slot;
    struct ckpt_message *next; /* in the workers' queue */
    uint32_t piece;
    bool passed_on; /* to other ranks */
    bool handled;   /* the pump has seen that it is done */
    bool arrived;   /* it lies in xfer.buf: may be passed on */
};

/* A piece on its way to another rank. */
struct ckpt_outgoing {
    struct ckpt_xfer xfer;
    uint32_t piece;
    struct ckpt_message *in; /* that brings it; NULL: this rank reads it */
    bool posted, handled;
};

/* A window in flight. */
struct ckpt_window_slot {
    bool open;
    uint32_t window, left; /* messages that are not placed, or not sent */
    struct ckpt_message *in;
    struct ckpt_outgoing *out;
    size_t nin, nout;
    unsigned char *receive;
    struct {
        enum {
            CKPT_DEVICE_WAITING,  /* for its turn */
            CKPT_DEVICE_EXCHANGE, /* is under way */
            CKPT_DEVICE_FETCHING, /* what arrived is copied to the host, to be verified */
            CKPT_DEVICE_PLACING,
        } phase;
        unsigned char *receive;
        struct ckpt_copy_list list;
        uint32_t early, early_blocks; /* descriptors before the exchange; the rest come after it */
        CKPT_VEC(struct ckpt_exchange) exchange;
        ckpt_parts own; /* that land when it is done */
    } dev;
};

/* A unit that could not be read here. */
struct ckpt_retry {
    struct ckpt_retry *next;
    uint64_t id, asked_ms;
    uint32_t unit;
    struct ckpt_read_slot *slot;
    struct ckpt_err err;
};

/* A box that another rank could not read. */
struct ckpt_assist {
    struct ckpt_assist *next;
    uint32_t peer;
    uint64_t id;
    uint32_t tensor, source; /* and where its first byte lies, as the other rank's plan has it */
    uint64_t off;
    struct ckpt_box box;
    unsigned char *data; /* with room for the reply's head */
    size_t len;
    bool good;
};

/* A pause: all ranks stop exchanging between the same two windows. Each says how far it is, the
 * furthest decides, and nobody opens a window beyond that. Windows are counted here by the number
 * that they have in their groups, plus one; 0: none. */
struct ckpt_pause {
    uint32_t asked; /* how often this rank was to pause (these three are under the lock) */
    bool wanted;    /* it is to pause, or is paused */
    bool reached;   /* it is paused */
    /* the pump's own */
    uint32_t said;   /* of which pauses this rank has told the rank above */
    uint32_t nheard; /* ranks right below that have told theirs, of the next one */
    uint32_t most;   /* of what they told */
    uint32_t agreed; /* how many pauses all ranks have agreed on */
    uint32_t last;   /* all go on until there, in the last of them */
};

struct ckpt_worker {
    struct ckpt_engine *e;
    atomic_ullong since_ms; /* it reads since then; 0: it does not */
    /* What it reads: the number of a tensor, of the source of the first byte, and that byte. */
    atomic_uint tensor, source;
    atomic_ullong off;
    struct ckpt_bounce bounce;
};

struct ckpt_engine {
    atomic_uint refs;
    struct ckpt_view *view;
    const struct ckpt_catalog *cat;
    struct ckpt_reading reading;
    struct ckpt_comm *comm;
    uint32_t self, size;
    struct ckpt_plan *plan;
    struct ckpt_job_wants *job_wants;
    struct ckpt_target *target;
    size_t ntarget;
    atomic_ullong *left; /* bytes that a want lacks */
    struct ckpt_engine_options opt;
    struct ckpt_engine_sizes sizes;
    uint64_t needed_bytes, unique_bytes;
    struct ckpt_device *device; /* NULL: destinations are in host memory */
    void *slab;                 /* on a device: the pinned memory of all slots */

    pthread_mutex_t lock; /* of all below */
    pthread_cond_t work;  /* for workers */
    pthread_cond_t news;  /* for those who wait for the load */
    struct ckpt_read_slot *read;
    struct ckpt_window_slot *slot;
    struct ckpt_worker *worker;
    uint32_t nworker;        /* that have not ended */
    uint32_t next_own;       /* of plan->own, to be begun */
    uint32_t nread, nclosed; /* pieces that are read, sent and placed; windows that are over */
    struct ckpt_message *place, **place_tail;
    struct ckpt_retry *retry, *refill; /* to be asked for; answered, to be placed */
    struct ckpt_assist *assist, *assisted;
    uint32_t placing;
    struct ckpt_pause pause;
    bool driving; /* without a thread for the pump: somebody who waits is in a turn */
    bool stopped, cancelled, finished, leak;
    struct ckpt_err err; /* the first; code OK: none */
    bool own;            /* it began here */
    size_t *landed;      /* wants in the order of arrival */
    size_t nlanded, ntaken;

    /* the pump's own */
    pthread_t pump;
    bool has_pump, final, told;
    uint32_t next_window; /* to be opened */
    uint32_t next_issue;  /* on a device: to be exchanged */
    uint64_t moved_ms, looked_ms, alive_ms, retry_id;
    uint32_t *stamp, stamped; /* per rank, and the last number used */
    uint32_t *peers; /* room for a piece's receivers; and the same for workers (the lock) */
    uint32_t *peers_worker;
    struct ckpt_round round;
    struct ckpt_load_stats job;
    int result;
    struct ckpt_engine_stats stats;
};

/* ---- window.c ---- */

/* Begin the next piece of this rank (under the lock). False: no slot is free, or there is none. */
bool ckpt_read_open(struct ckpt_engine *e);

/* Give slots back if all is done (under the lock). */
void ckpt_read_settle(struct ckpt_engine *e, struct ckpt_read_slot *s);
void ckpt_window_settle(struct ckpt_engine *e, struct ckpt_window_slot *s);

/* The slot that has a piece of this rank; NULL: it is not begun, or over (under the lock). */
struct ckpt_read_slot *ckpt_read_find(struct ckpt_engine *e, uint32_t piece);

/* Pump only. Open windows as slots become free; on a host their receives are posted. */
int ckpt_windows_open(struct ckpt_engine *e, struct ckpt_err *err);

/* Pump only. Post what has been read or has arrived, to each rank in the order of windows; and see
 * which messages are done. */
int ckpt_windows_send(struct ckpt_engine *e, struct ckpt_err *err);
void ckpt_windows_harvest(struct ckpt_engine *e);

/* The hash that follows a piece of len bytes: write it; compare it. */
void ckpt_piece_sign(unsigned char *data, size_t len);
int ckpt_message_check(const struct ckpt_engine *e, const struct ckpt_message *m, const void *data,
                       struct ckpt_err *err);

/* ---- pump_device.c; pump only ---- */

int ckpt_device_slots_init(struct ckpt_engine *e, struct ckpt_err *err);
void ckpt_device_slots_release(struct ckpt_engine *e);

/* Queue what can be queued, and see what is done. *ret_moved: something was. */
int ckpt_device_turn(struct ckpt_engine *e, bool *ret_moved, struct ckpt_err *err);

/* Is something queued whose end is to be waited for? */
bool ckpt_device_busy(const struct ckpt_engine *e);

/* ---- worker.c ---- */

void *ckpt_worker_run(void *worker);

/* ---- pump.c ---- */

void *ckpt_pump_run(void *engine);

/* One turn, asleep for max_ms at most. True: it is over. */
bool ckpt_pump_turn(struct ckpt_engine *e, uint32_t max_ms);

void ckpt_tell_abort(struct ckpt_comm *comm, const struct ckpt_err *why);

/* ---- assist.c ---- */

/* Control messages of a load, for ckpt_comm_begin. */
void ckpt_engine_hear(void *engine, uint32_t peer, const unsigned char *data, size_t len);

/* Pump only. Ask another rank for what we can't read; answer those that asked us. */
int ckpt_assists_ask(struct ckpt_engine *e, uint64_t now, struct ckpt_err *err);
void ckpt_assists_answer(struct ckpt_engine *e);

/* ---- pause.c ---- */

/* A message of type CKPT_CTL_PAUSE or CKPT_CTL_PAUSE_AT. */
void ckpt_pause_hear(struct ckpt_engine *e, uint32_t type, const unsigned char *data, size_t len);

/* Pump only. Say how far this rank is, if it is to pause, and notice when it has come to the end.
 * True: nothing is to be exchanged now, and nobody is late for that. */
bool ckpt_pause_turn(struct ckpt_engine *e);

/* Pump only. May this window be opened? */
bool ckpt_pause_allows(struct ckpt_engine *e, const struct ckpt_window *w);

/* ---- engine_life.c ---- */

void ckpt_engine_unref(struct ckpt_engine *e);
void ckpt_engine_leave(struct ckpt_engine *e);

/* The load fails. own: it began here, and the others must be told. */
void ckpt_engine_fail(struct ckpt_engine *e, const struct ckpt_err *err, bool own);

/* Wake the pump (under the lock). */
void ckpt_engine_kick(struct ckpt_engine *e);

/* Wait until the load is over, or enough (called under the lock) says so. 0, 1: not yet, or -1: it
 * has failed. */
int ckpt_engine_wait_for(struct ckpt_engine *e, uint32_t timeout_ms,
                         bool (*enough)(const struct ckpt_engine *e), struct ckpt_err *err);

/* A want has got bytes. */
void ckpt_engine_land(struct ckpt_engine *e, uint32_t want, uint64_t bytes);

#endif
