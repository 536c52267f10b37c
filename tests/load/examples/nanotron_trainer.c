/* SPDX-License-Identifier: Apache-2.0 */
/* A trainer with nanotron's own names: nanotron_trainer RUN OUT
 *
 * Every rank of a tensor parallel group loads its part of each layer's query, key and value matrix,
 * and of what the optimizer has for it: the copy in F32, and Adam's two averages once a step was
 * taken. That part is several slices of the whole (nanotron's local_global_slices_pairs): its query
 * heads, then its key heads, then its value heads, whatever the ranks and the ZeRO stage that the
 * run was saved with. Run by mpirun or torchrun; writes what it got to OUT.RANK. */
#include <stdio.h>
#include <stdlib.h>

#include <ckptfs/load.h>

#include "example.h"

enum { HEADS = 4, KV_HEADS = 2, TENSORS = 4 };

/* What is loaded of a layer. */
static const char *const names[TENSORS] = {
    "model.decoder.%d.pp_block.attn.qkv_proj.weight",
    "optimizer.gradient_accumulator.model.decoder.%d.pp_block.attn.qkv_proj.weight",
    "optimizer.state.model.decoder.%d.pp_block.attn.qkv_proj.weight.exp_avg",
    "optimizer.state.model.decoder.%d.pp_block.attn.qkv_proj.weight.exp_avg_sq",
};

/* This rank's rows of one matrix, one want for each slice pair. */
static int want_qkv(struct ckpt_load *load, const struct ckpt_tensor_info *t, uint32_t rank,
                    uint32_t size, unsigned char *local, struct ckpt_err *err)
{
    const uint64_t head_dim = t->shape[0] / (HEADS + 2 * KV_HEADS), hidden = t->shape[1];
    const uint64_t q = HEADS * head_dim / size, kv = KV_HEADS * head_dim / size;
    const struct {
        uint64_t global, n;
    } slice[] = {{rank * q, q},
                 {HEADS * head_dim + rank * kv, kv},
                 {(HEADS + KV_HEADS) * head_dim + rank * kv, kv}};
    const size_t row = t->nbytes / t->shape[0];
    uint64_t at = 0;

    for (int i = 0; i < 3; i++) {
        const uint64_t lo[2] = {slice[i].global, 0}, n[2] = {slice[i].n, hidden};
        const struct ckpt_dest dest = {.size = sizeof dest, .ptr = local + at * row};
        if (ckpt_load_want(load, t->name, lo, n, &dest, NULL, err) < 0)
            return -1;
        at += slice[i].n;
    }
    return 0;
}

/* Tensor k of a layer; false: there is none (no more layers, no step taken). */
static bool find(const struct ckpt_view *view, int layer, int k, struct ckpt_tensor_info *ret)
{
    char name[256];
    size_t i;

    (void)snprintf(name, sizeof name, names[k], layer);
    if (!ckpt_view_find_tensor(view, name, &i))
        return false;
    (void)ckpt_view_tensor(view, i, ret, NULL);
    return true;
}

/* This rank's bytes of all of them. */
static size_t local_bytes(const struct ckpt_view *view, uint32_t size)
{
    struct ckpt_tensor_info t = {.size = sizeof t};
    size_t sum = 0;

    for (int layer = 0; find(view, layer, 0, &t); layer++)
        for (int k = 0; k < TENSORS; k++)
            sum += find(view, layer, k, &t) ? t.nbytes / size : 0;
    return sum;
}

static int write_out(const char *path, uint32_t rank, const void *data, size_t len)
{
    char name[4096];
    FILE *f;

    (void)snprintf(name, sizeof name, "%s.%u", path, rank);
    if (!(f = fopen(name, "wb")))
        return -1;
    size_t n = fwrite(data, 1, len, f);
    return fclose(f) == 0 && n == len ? 0 : -1;
}

int main(int argc, char **argv)
{
    struct ckpt_load_options opt = {.size = sizeof opt, .readers = CKPT_READERS_ONCE};
    struct ckpt_err err = {0};
    struct ckpt_comm *comm;
    struct ckpt_load *load;

    if (argc != 3)
        return 2;
    if (ckpt_comm_from_env(&comm, &err) < 0)
        return die(&err);
    const uint32_t rank = ckpt_comm_rank(comm), size = ckpt_comm_size(comm);
    struct ckpt_view *view = open_raw(comm, argv[1], &err);
    if (!view || ckpt_load_new(view, comm, &opt, &load, &err) < 0)
        return die(&err);
    const size_t len = local_bytes(view, size);
    unsigned char *memory = malloc(len), *at = memory;
    struct ckpt_tensor_info t = {.size = sizeof t};
    for (int layer = 0; find(view, layer, 0, &t); layer++)
        for (int k = 0; k < TENSORS; k++) {
            if (!find(view, layer, k, &t))
                continue;
            if (want_qkv(load, &t, rank, size, at, &err) < 0)
                return die(&err);
            at += t.nbytes / size;
        }
    if (ckpt_load_plan(load, &err) < 0 || ckpt_load_start(load, &err) < 0 ||
        ckpt_load_wait(load, UINT32_MAX, &err) < 0)
        return die(&err);
    ckpt_load_free(load);
    int rc = write_out(argv[2], rank, memory, len);
    free(memory);
    ckpt_view_release(view);
    ckpt_comm_free(comm);
    return rc < 0;
}
