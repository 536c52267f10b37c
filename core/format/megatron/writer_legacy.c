/* SPDX-License-Identifier: Apache-2.0 */
/* Megatron's format "torch": one file for each rank, with the state dicts of its modules.
 *
 *     latest_checkpointed_iteration.txt
 *     iter_0000010/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt                  or release/...
 *
 * Layers are numbered within a stage, experts within a rank. The last stage has a copy of a tied
 * embedding. */
#include <inttypes.h>
#include <string.h>

#include "base/str.h"
#include "format/megatron/writer_plan.h"
#include "format/torch_records.h"
#include "format/writer.h"

/* These numbers identify a rank, which has one file: its pipeline stage, and its numbers in the
 * tensor-parallel, expert-parallel and expert-tensor-parallel groups. */
struct rank {
    uint32_t stage, tp, ep, etp;
};

struct state {
    const struct ckpt_writing *w;
    struct ckpt_mg_grid grid;
    struct ckpt_arena *arena;
    const char *folder;
    bool tied;
};

/* ---- names ---- */

/* The name of a rank's module: "decoder.layers.LOCAL.", "experts.linear_fc1.weightLOCAL". */
static char *local_name(const struct state *s, const char *name, const struct ckpt_mg_name *n)
{
    static const char twice[] = "experts.";
    const struct ckpt_mg_grid *g = &s->grid;
    const uint64_t each = g->layers / g->pp / g->vpp;
    ckpt_cleanup(ckpt_freep) char *at =
        n->in_layer ? ckpt_asprintf("decoder.layers.%" PRIu64 ".", n->layer % each) : strdup("");

    if (!at)
        return NULL;
    if (!n->leaf)
        return ckpt_asprintf("%s%s", at, n->rest);
    const int len = (int)(name + n->before - n->rest) - (int)(sizeof twice - 1);
    return ckpt_asprintf("%s%.*s%s%" PRIu64, at, len, n->rest, n->leaf,
                         n->expert % (g->experts / g->ep));
}

/* "mp_rank_00_001_003": numbers of stages and experts only where there are several. */
static char *rank_folder(const struct state *s, const struct rank *r)
{
    char pp[16] = "", ep[16] = "";

    if (s->grid.pp > 1)
        (void)snprintf(pp, sizeof pp, "_%03" PRIu32, r->stage);
    if (s->grid.ep > 1)
        (void)snprintf(ep, sizeof ep, "_%03" PRIu32, r->ep);
    return ckpt_asprintf("%smp_rank_%02" PRIu32 "%s%s/model_optim_rng.pt", s->folder, r->tp, pp,
                         ep);
}

/* ---- a state dict ---- */

/* Add the extra state of a projection, in which TransformerEngine keeps what FP8 needs: None. */
static void put_extra(struct ckpt_torch_records *f, const struct ckpt_tensor *t, const char *name)
{
    static const char weight[] = ".weight";
    const char *end = strstr(name, weight);
    const char *number = end ? end + sizeof weight - 1 : "";
    char *key;

    if (!end || !ckpt_mg_is_projection(t, name, (size_t)(end - name)) ||
        (*number && strcmp(number, "0") != 0))
        return;
    if (!(key = ckpt_asprintf("%.*s._extra_state", (int)(end - name), name))) {
        f->pickle.failed = true;
        return;
    }
    ckpt_pickle_out_text(&f->p, key);
    ckpt_pickle_out_ops(&f->p, CKPT_PICKLE_OUT_NONE);
    free(key);
}

/* Add the rank's part of a tensor, under the name `as`, or the one that it has in a file. */
static int put_tensor(struct state *s, struct ckpt_torch_records *f, const struct rank *r,
                      const struct ckpt_tensor *t, const char *as, struct ckpt_err *err)
{
    const struct ckpt_mg_name n = ckpt_mg_name_parse(t->name);
    ckpt_cleanup(ckpt_freep) char *name = as ? strdup(as) : local_name(s, t->name, &n);
    struct ckpt_tensor *own = ckpt_arena_alloc(s->arena, sizeof *own);
    uint32_t ranks;
    const enum ckpt_cut_way way = ckpt_mg_way(&s->grid, &n, &ranks);
    const uint32_t part = way == CKPT_CUT_OVER_ETP ? r->etp : r->tp;
    char key[32];

    if (!name || !own)
        return ckpt_nomem(err);
    if (ckpt_cut_tensor(s->w->cat, t, way, part, ranks, own, err) < 0)
        return -1;
    const struct ckpt_torch_out out = ckpt_torch_records_shape(own);
    (void)snprintf(key, sizeof key, "%zu", f->tensor.len);
    ckpt_pickle_out_text(&f->p, name);
    ckpt_torch_out_tensor(&f->p, &out, key);
    put_extra(f, t, name);
    return ckpt_torch_records_add(f, own, err);
}

/* Does the rank have the tensor, in that virtual stage? */
static bool is_on(const struct state *s, const struct rank *r, uint32_t virtual,
                  const struct ckpt_mg_name *n)
{
    uint32_t at;
    const uint32_t stage = ckpt_mg_stage(&s->grid, n, &at);

    return stage == r->stage && at == virtual &&
           (!n->leaf || ckpt_mg_expert_rank(&s->grid, n->expert) == r->ep);
}

/* The embedding that is the output matrix, too: the one of tokens is divided. NULL: it is not tied.
 */
static const struct ckpt_tensor *tied_embedding(const struct state *s)
{
    for (size_t i = 0; s->tied && i < s->w->cat->tensors.len; i++) {
        const struct ckpt_tensor *t = &s->w->cat->tensors.ptr[i];
        if (ckpt_has_prefix(t->name, "embedding.") && ckpt_cut_dim(t, CKPT_CUT_OVER_TP) < t->rank)
            return t;
    }
    return NULL;
}

static int put_module(struct state *s, struct ckpt_torch_records *f, const struct rank *r,
                      uint32_t virtual, struct ckpt_err *err)
{
    const bool last = r->stage + 1 == s->grid.pp && virtual + 1 == s->grid.vpp;
    const struct ckpt_tensor *tied = tied_embedding(s);

    ckpt_pickle_out_ordered(&f->p);
    for (size_t i = 0; i < s->w->cat->tensors.len; i++) {
        const struct ckpt_tensor *t = &s->w->cat->tensors.ptr[i];
        const struct ckpt_mg_name n = ckpt_mg_name_parse(t->name);
        if (is_on(s, r, virtual, &n) && put_tensor(s, f, r, t, NULL, err) < 0)
            return -1;
    }
    if (last && tied && s->grid.pp > 1 && put_tensor(s, f, r, tied, "output_layer.weight", err) < 0)
        return -1;
    ckpt_pickle_out_ops(&f->p, CKPT_PICKLE_OUT_SETITEMS);
    return 0;
}

static int put_state(struct state *s, struct ckpt_torch_records *f, const struct rank *r,
                     struct ckpt_err *err)
{
    char key[32] = "model";

    ckpt_pickle_out_begin(&f->p);
    ckpt_pickle_out_ops(&f->p, CKPT_PICKLE_OUT_EMPTY_DICT CKPT_PICKLE_OUT_MARK);
    if (ckpt_mg_put_common(s->w, &s->grid, "torch", &f->p, err) < 0)
        return -1;
    for (uint32_t v = 0; v < s->grid.vpp; v++) {
        if (s->grid.vpp > 1)
            (void)snprintf(key, sizeof key, "model%" PRIu32, v);
        ckpt_pickle_out_text(&f->p, key);
        if (put_module(s, f, r, v, err) < 0)
            return -1;
    }
    ckpt_pickle_out_ops(&f->p, CKPT_PICKLE_OUT_SETITEMS CKPT_PICKLE_OUT_STOP);
    return f->pickle.failed ? ckpt_nomem(err) : 0;
}

static int add_rank(struct state *s, const struct rank *r, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_torch_records_release) struct ckpt_torch_records f;
    ckpt_cleanup(ckpt_freep) char *path = rank_folder(s, r);

    ckpt_torch_records_init(&f);
    if (!path)
        return ckpt_nomem(err);
    return put_state(s, &f, r, err) < 0
               ? -1
               : ckpt_torch_records_write(&f, s->w, path, "model_optim_rng/", err);
}

/* ---- all of it ---- */

static int write_legacy(const struct ckpt_writing *w, struct ckpt_err *err)
{
    struct state s = {.w = w, .arena = &w->files->arena};
    ckpt_cleanup(ckpt_freep) char *folder = ckpt_mg_folder(w);

    if (!folder)
        return ckpt_nomem(err);
    s.folder = folder;
    s.tied = !ckpt_json_bool(w->config, "untie_embeddings_and_output_weights", true);
    if (ckpt_mg_grid_init(&s.grid, w, err) < 0)
        return -1;
    if (s.grid.tp % s.grid.etp) /* files are known by their ranks of tp and ep only */
        return ckpt_fail(err, CKPT_USAGE,
                         "option etp: names of files have the ranks of tp and ep only, so that "
                         "etp=%" PRIu32 " must divide tp=%" PRIu32,
                         s.grid.etp, s.grid.tp);
    for (size_t i = 0; i < w->cat->tensors.len; i++)
        if (ckpt_mg_check(&s.grid, &w->cat->tensors.ptr[i], err) < 0)
            return -1;
    for (uint32_t p = 0; p < s.grid.pp; p++)
        for (uint32_t i = 0; i < s.grid.size; i++) {
            const struct ckpt_mg_grid *g = &s.grid;
            const struct rank r = {
                .stage = p, .tp = i % g->tp, .ep = i / g->etp % g->ep, .etp = i % g->etp};
            if (add_rank(&s, &r, err) < 0)
                return -1;
        }
    return ckpt_mg_common(w, folder, &s.grid, "torch", err);
}

const struct ckpt_writer ckpt_writer_megatron_legacy = {
    .name = "megatron_legacy",
    .keys = CKPT_MG_KEYS,
    .layout = "its files are those of tp, pp, ep, etp and vpp",
    .recipes = "megatron",
    .vocab_multiple = CKPT_MG_VOCAB_MULTIPLE,
    .write = write_legacy,
};
