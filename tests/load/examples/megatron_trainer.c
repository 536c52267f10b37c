/* SPDX-License-Identifier: Apache-2.0 */
/* A trainer with Megatron's own names: megatron_trainer RUN OUT
 *
 * Every rank of a tensor parallel group loads its ShardedTensors, which are a key, a global offset
 * and a local shape: of each layer's projections (the layer is the first dimension) the weight, and
 * the optimizer's F32 parameter and moments. Run by mpirun or torchrun; writes what it got to
 * OUT.RANK: for each tensor its bytes, in the order of `keys`, layer by layer. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <ckptfs/load.h>

#include "example.h"

enum { RANK = 3, KEYS = 2, STATES = 4 };

static const struct {
    const char *name;
    uint32_t dim; /* that is divided over the ranks */
} keys[KEYS] = {{"decoder.layers.mlp.linear_fc1.weight", 1},
                {"decoder.layers.self_attention.linear_proj.weight", 2}};
static const char *const states[STATES] = {
    "", "optimizer.state.fp32_param.", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq."};

struct sharded {
    char key[256];
    uint64_t offset[RANK], shape[RANK];
    unsigned char *data;
    size_t len;
};

/* One layer of a tensor, this rank's part. */
static int make_sharded(struct ckpt_view *view, struct sharded *s, uint64_t layer, uint32_t dim,
                        uint32_t rank, uint32_t size)
{
    struct ckpt_tensor_info t = {.size = sizeof t};
    size_t i;

    if (!ckpt_view_find_tensor(view, s->key, &i))
        return -1;
    (void)ckpt_view_tensor(view, i, &t, NULL);
    if (t.rank != RANK || t.shape[dim] % size != 0)
        return -1;
    memcpy(s->shape, t.shape, sizeof s->shape);
    s->shape[0] = 1;
    s->shape[dim] /= size;
    s->offset[0] = layer;
    s->offset[dim] = rank * s->shape[dim];
    s->len = s->shape[1] * s->shape[2] * (strcmp(t.dtype, "F32") == 0 ? 4 : 2);
    s->data = malloc(s->len);
    return s->data ? 0 : -1;
}

int main(int argc, char **argv)
{
    struct ckpt_load_options opt = {.size = sizeof opt, .readers = CKPT_READERS_ONCE};
    struct ckpt_err err = {0};
    struct ckpt_comm *comm;
    struct ckpt_load *load;
    struct sharded shards[64] = {{{0}}};
    struct ckpt_tensor_info t = {.size = sizeof t};
    char name[4096];
    size_t n = 0, first;

    if (argc != 3)
        return 2;
    if (ckpt_comm_from_env(&comm, &err) < 0)
        return die(&err);
    const uint32_t rank = ckpt_comm_rank(comm), size = ckpt_comm_size(comm);
    struct ckpt_view *view = open_raw(comm, argv[1], &err);
    if (!view || ckpt_load_new(view, comm, &opt, &load, &err) < 0)
        return die(&err);
    if (!ckpt_view_find_tensor(view, keys[0].name, &first))
        return 1;
    (void)ckpt_view_tensor(view, first, &t, NULL);
    for (uint64_t layer = 0; layer < t.shape[0]; layer++)
        for (int k = 0; k < KEYS * STATES && n < 64; k++, n++) {
            struct sharded *s = &shards[n];
            (void)snprintf(s->key, sizeof s->key, "%s%s", states[k % STATES],
                           keys[k / STATES].name);
            if (make_sharded(view, s, layer, keys[k / STATES].dim, rank, size) < 0)
                return 1;
            const struct ckpt_dest dest = {.size = sizeof dest, .ptr = s->data};
            if (ckpt_load_want(load, s->key, s->offset, s->shape, &dest, NULL, &err) < 0)
                return die(&err);
        }
    if (ckpt_load_plan(load, &err) < 0 || ckpt_load_start(load, &err) < 0 ||
        ckpt_load_wait(load, UINT32_MAX, &err) < 0)
        return die(&err);
    ckpt_load_free(load);
    (void)snprintf(name, sizeof name, "%s.%u", argv[2], rank);
    FILE *out = fopen(name, "wb");
    for (size_t i = 0; i < n; i++) {
        if (out && fwrite(shards[i].data, 1, shards[i].len, out) != shards[i].len)
            return 1;
        free(shards[i].data);
    }
    ckpt_view_release(view);
    ckpt_comm_free(comm);
    return !out || fclose(out) != 0;
}
