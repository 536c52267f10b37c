/* SPDX-License-Identifier: Apache-2.0 */
/* The engine from inside: engine.c (life and pump), window.c (messages), worker.c (reading and
 * placing). */
#ifndef CKPT_LOAD_INNER_H
#define CKPT_LOAD_INNER_H

#include <pthread.h>

#include "load/copies.h"
#include "load/device.h"
#include "load/engine.h"

enum {
    CKPT_MESSAGE_HASH = 8,
    CKPT_UNIT_ALIGN = 64,
};

/* One transfer: a large part of its own, or the small ones of a peer together. With verify, 8 bytes
 * of XXH3 follow. */
struct ckpt_message {
    struct ckpt_xfer xfer;
    struct ckpt_slot *slot;
    struct ckpt_message *next; /* in the workers' queue */
    uint32_t first, n;         /* parts of the window; a pack has those that are small */
    bool is_pack, handled;
};

/* Units that have been read and wait for their upload. */
struct ckpt_units {
    uint32_t lo, hi;
};

/* A slot's part in a device; the pump's, but for `ready`. */
struct ckpt_slot_device {
    enum {
        CKPT_DEVICE_READING,  /* and uploading; or nothing at all */
        CKPT_DEVICE_EXCHANGE, /* is under way */
        CKPT_DEVICE_FETCHING, /* what arrived is copied to the host, to be verified */
        CKPT_DEVICE_PLACING,
    } phase;
    CKPT_VEC(struct ckpt_units) ready; /* under the engine's lock */
    unsigned char *read, *stage, *receive;
    struct ckpt_copies copies;     /* pinned: */
    struct ckpt_device_copy *list; /* their copy in the device */
    uint32_t early, early_blocks;  /* descriptors before the exchange; the rest come after it */
    CKPT_VEC(struct ckpt_exchange) exchange;
    ckpt_parts own; /* that land when the window is done, beside those received */
};

struct ckpt_slot {
    bool open;
    uint32_t window, lo, hi; /* units that this rank reads */
    uint32_t next;           /* unit to be read next */
    uint32_t unread;         /* units that are not there */
    bool received_posted, sends_posted;
    uint32_t unsent, unplaced; /* messages */
    uint64_t *unit_off;        /* in read: of units lo .. hi */
    unsigned char *read, *stage, *receive;
    ckpt_parts sends;
    const struct ckpt_part *parts; /* that are received */
    size_t nparts;
    struct ckpt_message *out, *in;
    size_t nout, nin;
    uint64_t staged, expected; /* bytes of stage and receive in use */
    struct ckpt_slot_device dev;
};

/* A unit that could not be read here. */
struct ckpt_retry {
    struct ckpt_retry *next;
    uint64_t id, asked_ms;
    uint32_t unit;
    struct ckpt_slot *slot;
    struct ckpt_err err;
    bool answered;
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
    struct ckpt_roster *roster;
    uint32_t owner; /* this rank's place in plan->owner */
    ckpt_parts receives;
    size_t *receive_first; /* of each window */
    struct ckpt_target *target;
    size_t ntarget;
    atomic_ullong *left; /* bytes that a want lacks */
    struct ckpt_engine_options opt;
    struct ckpt_engine_sizes sizes;
    uint64_t needed_bytes, unique_bytes;
    struct ckpt_device *device; /* NULL: destinations are in host memory */

    pthread_mutex_t lock; /* of all below */
    pthread_cond_t work;  /* for workers */
    pthread_cond_t news;  /* for those who wait for the load */
    struct ckpt_slot *slot;
    struct ckpt_worker *worker;
    uint32_t nworker;            /* that have not ended */
    uint32_t next_open, nclosed; /* windows */
    struct ckpt_message *place, **place_tail;
    struct ckpt_retry *retry, *refill; /* to be asked for; answered, to be placed */
    struct ckpt_assist *assist, *assisted;
    uint32_t placing;
    bool stopped, cancelled, finished, leak;
    struct ckpt_err err; /* the first; code OK: none */
    bool own;            /* it began here */
    size_t *landed;      /* wants in the order of arrival */
    size_t nlanded, ntaken;

    /* the pump's own */
    pthread_t pump;
    bool has_pump, final;
    uint32_t next_receive, next_send; /* windows; on a device, next_send is the next to be issued */
    uint64_t moved_ms, retry_id;
    struct ckpt_round round;
    struct ckpt_load_stats job;
    int result;
    struct ckpt_engine_stats stats;
};

/* ---- window.c; pump only, but for measure and open ---- */

/* Does a part travel alone? Small ones of a peer go together; on a device, where gathering costs
 * little and a message much, also larger ones. */
static inline bool ckpt_part_alone(const struct ckpt_engine_mode *mode, const struct ckpt_part *p)
{
    return p->bytes >= (mode->device ? 1024 * 1024 : 64 * 1024);
}

/* Where the next part of a pack begins: on a device where any element may. */
static inline uint64_t ckpt_part_room(const struct ckpt_engine_mode *mode, uint64_t bytes)
{
    return mode->device ? (bytes + 15) / 16 * 16 : bytes;
}

/* Open the slot's window (under the lock). */
void ckpt_slot_open(struct ckpt_engine *e, struct ckpt_slot *s, uint32_t window);
void ckpt_slot_release(struct ckpt_slot *s);

/* Bytes that units [lo, hi) take one behind the other; off (may be NULL): where each begins, and
 * the end. */
uint64_t ckpt_units_bytes(const struct ckpt_plan *plan, uint32_t lo, uint32_t hi, uint64_t *off);

/* The messages of the slot's window: s->in, s->out, with their places in its buffers. What is sent
 * is gathered now; on a device, listed in s->dev.copies. */
int ckpt_slot_receives(struct ckpt_engine *e, struct ckpt_slot *s, struct ckpt_err *err);
int ckpt_slot_sends(struct ckpt_engine *e, struct ckpt_slot *s, struct ckpt_err *err);

/* Hand them to the transport. */
int ckpt_slot_post(struct ckpt_engine *e, struct ckpt_message *m, size_t n, struct ckpt_err *err);

/* Did it arrive as it was sent? data: its bytes, with the hash. */
int ckpt_message_check(const struct ckpt_message *m, const void *data, struct ckpt_err *err);

/* ---- device.c; pump only ---- */

int ckpt_device_slot_init(struct ckpt_engine *e, struct ckpt_slot *s, struct ckpt_err *err);
void ckpt_device_slot_release(struct ckpt_engine *e, struct ckpt_slot *s);

/* Queue what can be queued, and see what is done. *ret_moved: something was. */
int ckpt_device_turn(struct ckpt_engine *e, bool *ret_moved, struct ckpt_err *err);

/* Is something queued whose end is to be waited for? */
bool ckpt_device_busy(const struct ckpt_engine *e);

/* ---- worker.c ---- */

void *ckpt_worker_run(void *worker);

/* ---- engine.c ---- */

void ckpt_engine_unref(struct ckpt_engine *e);
void ckpt_engine_leave(struct ckpt_engine *e);

/* The load fails. own: it began here, and the others must be told. */
void ckpt_engine_fail(struct ckpt_engine *e, const struct ckpt_err *err, bool own);

/* Wake the pump (under the lock). */
void ckpt_engine_kick(struct ckpt_engine *e);

/* Close the slot if all is done (under the lock). */
void ckpt_slot_settle(struct ckpt_engine *e, struct ckpt_slot *s);

/* A want has got bytes. */
void ckpt_engine_land(struct ckpt_engine *e, uint32_t want, uint64_t bytes);

#endif
