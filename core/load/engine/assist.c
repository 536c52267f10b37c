/* SPDX-License-Identifier: Apache-2.0 */
/* Control messages of a load outside of rounds: a rank tells all others that it has failed; a rank
 * asks another one, its helper, to read a unit that it cannot read itself. */
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "load/engine/engine_inner.h"

struct abort_message {
    uint32_t code;
    char text[CKPT_ERR_TEXT];
};

/* A request for help: the box of a unit, and where its first byte is by the plan of the rank that
 * asks. */
struct assist_message {
    uint64_t id, off;
    uint32_t tensor, rank, source, unused;
    uint64_t lo[CKPT_MAX_RANK], n[CKPT_MAX_RANK];
};

/* The reply. The bytes begin CKPT_ASSIST_HEAD bytes after its beginning. */
struct assisted_message {
    struct ckpt_ctl_head head;
    uint64_t id;
    uint32_t good;
};
_Static_assert(sizeof(struct assisted_message) <= CKPT_ASSIST_HEAD,
               "the reply's head fits into CKPT_ASSIST_HEAD");

/* Another rank has failed: pass the message on along the tree, and fail with the same error. */
static void on_abort(struct ckpt_engine *e, uint32_t from, const unsigned char *data, size_t len)
{
    struct abort_message m;
    struct ckpt_err err = {0};

    if (len != sizeof m)
        return;
    for (uint32_t i = 0, peer; ckpt_tree_neighbour(e->self, e->size, i, &peer); i++)
        if (peer != from)
            (void)ckpt_comm_send(e->comm, peer, CKPT_CTL_ABORT, data, len, NULL);
    memcpy(&m, data, sizeof m);
    m.text[CKPT_ERR_TEXT - 1] = '\0';
    if (m.code == CKPT_OK || m.code > CKPT_CANCELLED || !m.text[0])
        (void)ckpt_fail(&err, CKPT_PEER, "another rank failed, but its error message is damaged");
    else
        (void)ckpt_fail(&err, (enum ckpt_code)m.code, "%s", m.text);
    ckpt_engine_fail(e, &err, false);
}

/* Another rank asks for help: queue its request for the workers. A message that makes no sense is
 * ignored; the other rank gives up after a while. */
static void on_assist(struct ckpt_engine *e, uint32_t peer, const unsigned char *data, size_t len)
{
    struct assist_message m;
    struct ckpt_assist *a;

    if (len != sizeof m)
        return;
    memcpy(&m, data, sizeof m);
    if (m.tensor >= e->cat->tensors.len || !(a = calloc(1, sizeof *a)))
        return;
    const struct ckpt_tensor *t = &e->cat->tensors.ptr[m.tensor];
    a->peer = peer;
    a->id = m.id;
    a->tensor = m.tensor;
    a->source = m.source;
    a->off = m.off;
    a->box.rank = m.rank;
    memcpy(a->box.lo, m.lo, sizeof m.lo);
    memcpy(a->box.n, m.n, sizeof m.n);
    if (!ckpt_box_within(&a->box, t->dim, t->rank)) {
        free(a);
        return;
    }
    (void)pthread_mutex_lock(&e->lock);
    a->next = e->assist;
    e->assist = a;
    (void)pthread_cond_signal(&e->work);
    (void)pthread_mutex_unlock(&e->lock);
}

/* The helper's reply: copy the bytes into the read slot and let a worker place them. If the helper
 * could not read them either, fail with this rank's own error. */
static void on_assisted(struct ckpt_engine *e, const unsigned char *data, size_t len)
{
    struct assisted_message m;
    struct ckpt_retry **at, *r;
    struct ckpt_err err = {0};

    if (len < CKPT_ASSIST_HEAD)
        return;
    memcpy(&m, data, sizeof m);
    (void)pthread_mutex_lock(&e->lock);
    for (at = &e->retry; *at && (*at)->id != m.id;)
        at = &(*at)->next;
    r = *at;
    struct ckpt_box box;
    if (r) {
        ckpt_plan_unit_box(e->plan, r->unit, &box);
        uint64_t need =
            ckpt_box_numel(&box) * ckpt_dtype_size(ckpt_plan_unit_tensor(e->plan, r->unit)->dtype);
        *at = r->next;
        if (m.good && len - CKPT_ASSIST_HEAD == need) {
            memcpy(r->slot->buf + r->slot->unit_off[r->unit - r->slot->lo], data + CKPT_ASSIST_HEAD,
                   need);
            r->next = e->refill;
            e->refill = r;
            (void)pthread_cond_signal(&e->work);
            atomic_fetch_add(&e->stats.retries, 1);
            r = NULL;
        } else {
            err = r->err;
        }
    }
    (void)pthread_mutex_unlock(&e->lock);
    if (r)
        ckpt_engine_fail(e, &err, true);
    free(r);
}

void ckpt_engine_hear(void *engine, uint32_t peer, const unsigned char *data, size_t len)
{
    struct ckpt_engine *e = engine;
    struct ckpt_ctl_head head;

    memcpy(&head, data, sizeof head);
    if (head.type == CKPT_CTL_ABORT)
        on_abort(e, peer, data + sizeof head, len - sizeof head);
    else if (head.type == CKPT_CTL_ASSIST)
        on_assist(e, peer, data + sizeof head, len - sizeof head);
    else if (head.type == CKPT_CTL_ASSISTED)
        on_assisted(e, data, len);
    else if (head.type == CKPT_CTL_PAUSE || head.type == CKPT_CTL_PAUSE_AT)
        ckpt_pause_hear(e, head.type, data + sizeof head, len - sizeof head);
}

/* ---- sending ---- */

void ckpt_tell_abort(struct ckpt_comm *comm, const struct ckpt_err *why)
{
    struct abort_message m = {.code = (uint32_t)why->code};

    memcpy(m.text, why->text, sizeof m.text);
    for (uint32_t i = 0, peer; ckpt_tree_neighbour(comm->x->rank, comm->x->size, i, &peer); i++)
        (void)ckpt_comm_send(comm, peer, CKPT_CTL_ABORT, &m, sizeof m, NULL);
}

int ckpt_assists_ask(struct ckpt_engine *e, uint64_t now, struct ckpt_err *err)
{
    int rc = 0;

    (void)pthread_mutex_lock(&e->lock);
    for (struct ckpt_retry *r = e->retry; r && rc == 0; r = r->next) {
        const struct ckpt_unit *unit = &e->plan->units.ptr[r->unit];
        struct assist_message m = {.id = r->id, .source = unit->source, .off = unit->off};
        struct ckpt_box box;
        /* the helper has the same timeout and reports its slow read: wait longer than that */
        if (r->asked_ms && now - r->asked_ms > (uint64_t)e->opt.read_timeout_ms * 3 / 2 + 1000)
            rc = ckpt_fail(err, r->err.code, "%s", r->err.text);
        if (r->asked_ms)
            continue;
        r->asked_ms = now;
        ckpt_plan_unit_box(e->plan, r->unit, &box);
        m.tensor = (uint32_t)(ckpt_plan_unit_tensor(e->plan, r->unit) - e->cat->tensors.ptr);
        m.rank = box.rank;
        memcpy(m.lo, box.lo, box.rank * sizeof *m.lo);
        memcpy(m.n, box.n, box.rank * sizeof *m.n);
        if (ckpt_comm_send(e->comm, e->opt.helper, CKPT_CTL_ASSIST, &m, sizeof m, NULL) < 0)
            rc = ckpt_fail(err, r->err.code, "%s", r->err.text);
    }
    (void)pthread_mutex_unlock(&e->lock);
    return rc;
}

void ckpt_assists_answer(struct ckpt_engine *e)
{
    (void)pthread_mutex_lock(&e->lock);
    struct ckpt_assist *a = e->assisted;
    e->assisted = NULL;
    (void)pthread_mutex_unlock(&e->lock);
    while (a) {
        struct ckpt_assist *next = a->next;
        struct assisted_message m = {{CKPT_CTL_ASSISTED, e->comm->epoch}, a->id, a->good};
        unsigned char refusal[CKPT_ASSIST_HEAD] = {0}, *msg = a->good ? a->data : refusal;
        memcpy(msg, &m, sizeof m);
        (void)e->comm->x->ops->ctl_send(e->comm->x, a->peer, msg,
                                        CKPT_ASSIST_HEAD + (a->good ? a->len : 0), NULL);
        free(a->data);
        free(a);
        a = next;
    }
}
