/* SPDX-License-Identifier: Apache-2.0 */
/* Control messages of a load outside of rounds: a rank tells all others that it has failed, and
 * ranks agree on a pause (pause.c). */
#include <string.h>

#include "base/err.h"
#include "load/engine/engine_inner.h"

struct abort_message {
    uint32_t code;
    char text[CKPT_ERR_TEXT];
};

/* Another rank has failed: pass the message on along the tree, and fail with the same error. A rank
 * that has failed before has told its neighbours. */
static void receive_abort(struct ckpt_engine *e, uint32_t from, const unsigned char *data,
                          size_t len)
{
    struct abort_message m;
    struct ckpt_err err = {0};

    (void)pthread_mutex_lock(&e->lock);
    const bool failed = e->err.code != CKPT_OK;
    (void)pthread_mutex_unlock(&e->lock);
    if (len != sizeof m || failed)
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

void ckpt_engine_receive(void *engine, uint32_t peer, const unsigned char *data, size_t len)
{
    struct ckpt_engine *e = engine;
    struct ckpt_ctl_head head;

    memcpy(&head, data, sizeof head);
    if (head.type == CKPT_CTL_ABORT)
        receive_abort(e, peer, data + sizeof head, len - sizeof head);
    else if (head.type == CKPT_CTL_PAUSE || head.type == CKPT_CTL_PAUSE_AT)
        ckpt_pause_receive(e, head.type, data + sizeof head, len - sizeof head);
}

void ckpt_abort_send(struct ckpt_comm *comm, const struct ckpt_err *why)
{
    struct abort_message m = {.code = (uint32_t)why->code};

    memcpy(m.text, why->text, sizeof m.text);
    for (uint32_t i = 0, peer; ckpt_tree_neighbour(comm->x->rank, comm->x->size, i, &peer); i++)
        (void)ckpt_comm_send(comm, peer, CKPT_CTL_ABORT, &m, sizeof m, NULL);
}
