/* SPDX-License-Identifier: Apache-2.0 */
/* A trainer with nanotron's own names: nanotron_trainer RUN OUT
 *
 * Every rank of a tensor parallel group loads its part of each layer's query, key and value matrix,
 * and of the optimizer's copy of it in F32. That part is several slices of the whole (nanotron's
 * local_global_slices_pairs): its query heads, then its key heads, then its value heads. Run by
 * mpirun or torchrun; writes what it got to OUT.RANK. */
#include <stdio.h>
#include <stdlib.h>

#include <ckptfs/load.h>

#include "example.h"

enum { LAYERS = 4, HIDDEN = 32, HEADS = 4, KV_HEADS = 2, HEAD_DIM = 8 };

/* This rank's rows of one matrix, one want for each slice pair. */
static int want_qkv(struct ckpt_load *load, const char *name, uint32_t rank, uint32_t size,
                    unsigned char *local, size_t row, struct ckpt_err *err)
{
    const uint64_t q = HEADS * HEAD_DIM / size, kv = KV_HEADS * HEAD_DIM / size;
    const struct {
        uint64_t global, n;
    } slice[] = {{rank * q, q},
                 {HEADS * HEAD_DIM + rank * kv, kv},
                 {(HEADS + KV_HEADS) * HEAD_DIM + rank * kv, kv}};
    uint64_t at = 0;

    for (int i = 0; i < 3; i++) {
        const uint64_t lo[2] = {slice[i].global, 0}, n[2] = {slice[i].n, HIDDEN};
        const struct ckpt_dest dest = {.ptr = local + at * row};
        if (ckpt_load_want(load, name, lo, n, &dest, NULL, err) < 0)
            return -1;
        at += slice[i].n;
    }
    return 0;
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
    struct ckpt_view *view = open_raw(argv[1], &err);
    if (ckpt_comm_agree(comm, view ? 0 : -1, 60000, &err) < 0 ||
        ckpt_load_new(view, comm, &opt, &load, &err) < 0)
        return die(&err);
    const size_t numel = (size_t)(HEADS + 2 * KV_HEADS) * HEAD_DIM / size * HIDDEN;
    const size_t each = numel * (2 + 4); /* BF16, and F32 behind it */
    unsigned char *memory = malloc(LAYERS * each);
    for (int layer = 0; layer < LAYERS; layer++) {
        unsigned char *weight = memory + (size_t)layer * each, *master = weight + numel * 2;
        char name[128], state[256];
        (void)snprintf(name, sizeof name, "model.decoder.%d.pp_block.attn.qkv_proj.weight", layer);
        (void)snprintf(state, sizeof state, "optimizer.gradient_accumulator.%s", name);
        if (want_qkv(load, name, rank, size, weight, HIDDEN * 2, &err) < 0 ||
            want_qkv(load, state, rank, size, master, HIDDEN * 4, &err) < 0)
            return die(&err);
    }
    if (ckpt_load_plan(load, &err) < 0 || ckpt_load_start(load, &err) < 0 ||
        ckpt_load_wait(load, UINT32_MAX, &err) < 0)
        return die(&err);
    ckpt_load_free(load);
    int rc = write_out(argv[2], rank, memory, LAYERS * each);
    free(memory);
    ckpt_view_release(view);
    ckpt_comm_free(comm);
    return rc < 0;
}
