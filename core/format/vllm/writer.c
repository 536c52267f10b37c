/* SPDX-License-Identifier: Apache-2.0 */
/* vLLM's sharded state: what each rank's model has in memory once its weights are loaded, before
 * a back end rearranges them (ShardedStateLoader.save_model of vLLM 0.32):
 *
 *     model-rank-T-part-N.safetensors                         of tensor-parallel rank T
 *     model-pp-P-tp-T-part-N.safetensors                      where there are several stages
 *
 * A part takes tensors in the order of the state dict until the next one would make it larger than
 * max_size, so that the first part is empty if the first tensor alone is larger. The config that a
 * recipe makes says what vLLM's modules are like:
 *
 *     order        words of the names of modules and parameters, in the order of registration
 *     attention    the end of a tensor's name that stands for an attention, where four scales are
 *     tied         the name of a tensor that shares memory with another: {"COPY": "ORIGINAL"}
 *     everywhere   each stage has the tensors of no layer; else the first and the last one have */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/sort.h"
#include "base/str.h"
#include "base/vec.h"
#include "container/safetensors.h"
#include "format/writer.h"
#include "tensor/fqn.h"

enum { NO_LAYER = -1 };

/* A parameter of the model. */
struct item {
    const struct ckpt_tensor *tensor; /* whole */
    const char *at;                   /* the name that gives its place in the state dict */
    int64_t layer;
    uint32_t first, last; /* stages that have it */
};

struct part {
    const struct ckpt_tensor *tensor; /* what the rank has */
    uint64_t nbytes;
};

struct state {
    const struct ckpt_writing *w;
    struct ckpt_arena *arena;
    CKPT_VEC(struct item) items;
    CKPT_VEC(struct part) parts; /* of the file that is being made */
    const char **words;
    size_t nwords;
    uint32_t tp, pp;
};

/* ---- the model ---- */

/* A number of a name, between dots. */
static int64_t layer_of(const char *name)
{
    for (const char *p = name; (p = strchr(p, '.'));) {
        const size_t n = strspn(++p, "0123456789");
        unsigned long long layer;
        if (n && p[n] == '.' && ckpt_parse_u64(p, n, &layer) && layer < CKPT_CUT_MOST)
            return (int64_t)layer;
    }
    return NO_LAYER;
}

static int add_item(struct state *s, const struct ckpt_tensor *t, struct ckpt_err *err)
{
    const json_t *tied = json_object_get(s->w->config, "tied");
    const struct item it = {
        .tensor = t, .at = ckpt_json_str_or(tied, t->name, t->name), .layer = layer_of(t->name)};

    return ckpt_vec_push(&s->items, it) < 0 ? ckpt_nomem(err) : 0;
}

/* The scales of an attention's queries, keys, values and probabilities, which are 1 unless a
 * checkpoint says something else. */
static int add_scales(struct state *s, const struct ckpt_tensor *t, struct ckpt_err *err)
{
    static const char *const scales[] = {"_k_scale", "_v_scale", "_q_scale", "_prob_scale"};
    const char *end = ckpt_json_str(s->w->config, "attention");

    if (!end || !ckpt_has_suffix(t->name, end))
        return 0;
    for (size_t i = 0; i < sizeof scales / sizeof *scales; i++) {
        struct ckpt_tensor *scale = ckpt_arena_alloc(s->arena, sizeof *scale);
        ckpt_cleanup(ckpt_freep) char *name =
            ckpt_asprintf("%.*sattn.%s", (int)(strlen(t->name) - strlen(end)), t->name, scales[i]);
        if (!scale || !name)
            return ckpt_nomem(err);
        *scale = (struct ckpt_tensor){
            .name = ckpt_arena_strdup(s->arena, name), .numel = 1, .dtype = CKPT_F32};
        if (!scale->name)
            return ckpt_nomem(err);
        if (add_item(s, scale, err) < 0)
            return -1;
    }
    return 0;
}

static int split_words(struct state *s, struct ckpt_err *err)
{
    const char *order = ckpt_json_str(s->w->config, "order");
    char *text = ckpt_arena_strdup(s->arena, order ? order : ""), *save = NULL;

    if (!text || !(s->words = ckpt_arena_alloc(s->arena, (strlen(text) + 1) * sizeof *s->words)))
        return ckpt_nomem(err);
    for (char *w = strtok_r(text, " ", &save); w; w = strtok_r(NULL, " ", &save))
        s->words[s->nwords++] = w;
    return 0;
}

static int item_cmp(const void *a, const void *b, void *arg)
{
    const struct state *s = arg;
    const struct item *x = a, *y = b;
    const int c = ckpt_order_cmp(s->words, s->nwords, x->at, y->at);

    return c ? c : strcmp(x->tensor->name, y->tensor->name);
}

/* The stage of a layer: what is left over goes to the stages before the last one (get_pp_indices of
 * vllm/distributed/utils.py). */
static uint32_t stage_of(const struct state *s, uint64_t layers, uint64_t layer)
{
    const uint64_t each = layers / s->pp, left = layers % s->pp;
    uint32_t stage = 0;

    for (uint64_t end = 0; stage + 1 < s->pp; stage++) {
        end += each + (stage + 1 + left >= s->pp);
        if (layer < end)
            break;
    }
    return stage;
}

static int place_items(struct state *s, struct ckpt_err *err)
{
    const bool everywhere = ckpt_json_bool(s->w->config, "everywhere", false);
    uint64_t layers = 0;
    bool before = true;

    for (size_t i = 0; i < s->items.len; i++)
        if (s->items.ptr[i].layer >= (int64_t)layers)
            layers = (uint64_t)s->items.ptr[i].layer + 1;
    if (s->pp > 1 && s->pp > layers)
        return ckpt_fail(err, CKPT_USAGE,
                         "option pp: the model has %" PRIu64 " layer%s, which cannot be divided "
                         "among %" PRIu32 " stages",
                         layers, layers == 1 ? "" : "s", s->pp);
    for (size_t i = 0; i < s->items.len; i++) {
        struct item *it = &s->items.ptr[i];
        const bool is_copy = strcmp(it->at, it->tensor->name) != 0;
        before = before && it->layer == NO_LAYER;
        it->first = it->last = before && !is_copy ? 0 : s->pp - 1;
        if (it->layer != NO_LAYER)
            it->first = it->last = stage_of(s, layers, (uint64_t)it->layer);
        else if (everywhere)
            it->first = 0, it->last = s->pp - 1;
    }
    return 0;
}

static int list_items(struct state *s, struct ckpt_err *err)
{
    for (size_t i = 0; i < s->w->cat->tensors.len; i++) {
        const struct ckpt_tensor *t = &s->w->cat->tensors.ptr[i];
        if (ckpt_st_check_name(t->name, err) < 0 ||
            ckpt_cut_check(t, CKPT_CUT_OVER_TP, s->tp, "tp", err) < 0)
            return -1;
        if (t->numel && (add_item(s, t, err) < 0 || add_scales(s, t, err) < 0))
            return -1;
    }
    if (split_words(s, err) < 0)
        return -1;
    qsort_r(s->items.ptr, s->items.len, sizeof *s->items.ptr, item_cmp, s);
    return place_items(s, err);
}

static bool has(const struct item *it, uint32_t stage)
{
    return it->first <= stage && stage <= it->last;
}

/* Does the stage store item i? Of tensors that share memory it stores the one with the smaller
 * name, which stands before the others. */
static bool is_on(const struct state *s, size_t i, uint32_t stage)
{
    const struct item *it = &s->items.ptr[i];

    return has(it, stage) && !(i && strcmp(it[-1].at, it->at) == 0 && has(&it[-1], stage));
}

/* ---- a file ---- */

static int part_cmp(const void *a, const void *b)
{
    return ckpt_st_cmp(((const struct part *)a)->tensor, ((const struct part *)b)->tensor);
}

static int put_file(struct state *s, uint32_t stage, uint32_t rank, size_t number,
                    struct ckpt_err *err)
{
    static const float one = 1;
    const size_t n = s->parts.len;
    struct ckpt_segment *seg = ckpt_arena_alloc(s->arena, (n + 1) * sizeof *seg);
    ckpt_cleanup(ckpt_str_release) struct ckpt_str head = {0};
    ckpt_cleanup(ckpt_freep) char *path =
        s->pp > 1 ? ckpt_asprintf("model-pp-%" PRIu32 "-tp-%" PRIu32 "-part-%zu.safetensors", stage,
                                  rank, number)
                  : ckpt_asprintf("model-rank-%" PRIu32 "-part-%zu.safetensors", rank, number);
    uint64_t off = 0;

    if (!seg || !path)
        return ckpt_nomem(err);
    ckpt_sort(s->parts.ptr, n, part_cmp);
    ckpt_st_header_begin(&head, true);
    for (size_t i = 0; i < n; off += s->parts.ptr[i++].nbytes)
        ckpt_st_header_tensor(&head, s->parts.ptr[i].tensor, off, i == 0);
    ckpt_st_header_end(&head);
    if (head.len > CKPT_ST_MAX_HEADER)
        return ckpt_fail(err, CKPT_LIMIT,
                         "%s: the header would have more than the %d bytes that the safetensors "
                         "library reads; a smaller max_size makes it shorter",
                         path, CKPT_ST_MAX_HEADER);
    seg[0] = ckpt_segment_mem(NULL, 0);
    if (!(seg[0].mem = ckpt_st_header_mem(&head, s->arena, &seg[0].len)))
        return ckpt_nomem(err);
    for (size_t i = 0; i < n; i++) {
        const struct part *p = &s->parts.ptr[i];
        const bool is_scale = !p->tensor->cat;
        seg[i + 1] = is_scale ? ckpt_segment_mem(&one, p->nbytes)
                              : ckpt_segment_tensor(p->tensor, 0, p->nbytes);
    }
    s->parts.len = 0;
    return ckpt_writing_add(s->w, path, seg, n + 1, err);
}

/* ---- a rank ---- */

static int take(struct state *s, const struct item *it, uint32_t rank, struct part *ret,
                struct ckpt_err *err)
{
    struct ckpt_tensor *own = ckpt_arena_alloc(s->arena, sizeof *own);
    const struct ckpt_tensor *t = it->tensor;

    if (!own)
        return ckpt_nomem(err);
    if (ckpt_cut_tensor(s->w->cat, t, CKPT_CUT_OVER_TP, rank, s->tp, own, err) < 0)
        return -1;
    const bool whole = t->cat && own->numel == t->numel;
    *ret = (struct part){.tensor = whole ? t : own, .nbytes = ckpt_tensor_nbytes(own)};
    return 0;
}

static int write_rank(struct state *s, uint32_t stage, uint32_t rank, struct ckpt_err *err)
{
    const uint64_t most = s->w->model->max_shard_size;
    uint64_t bytes = 0;
    size_t number = 0;
    struct part p;

    for (size_t i = 0; i < s->items.len; i++) {
        if (!is_on(s, i, stage))
            continue;
        if (take(s, &s->items.ptr[i], rank, &p, err) < 0)
            return -1;
        if (most && (p.nbytes > most || bytes > most - p.nbytes)) {
            if (put_file(s, stage, rank, number++, err) < 0)
                return -1;
            bytes = 0;
        }
        bytes += p.nbytes;
        if (ckpt_vec_push(&s->parts, p) < 0)
            return ckpt_nomem(err);
    }
    return s->parts.len ? put_file(s, stage, rank, number, err) : 0;
}

/* ---- all of it ---- */

static int write_sharded_state(const struct ckpt_writing *w, struct ckpt_err *err)
{
    struct state s = {.w = w,
                      .arena = &w->files->arena,
                      .tp = ckpt_output_parts(w->output, CKPT_CUT_TP),
                      .pp = ckpt_output_parts(w->output, CKPT_CUT_PP)};
    int result = list_items(&s, err);

    for (uint32_t p = 0; p < s.pp && result == 0; p++)
        for (uint32_t t = 0; t < s.tp && result == 0; t++)
            result = write_rank(&s, p, t, err);
    ckpt_vec_release(&s.items);
    ckpt_vec_release(&s.parts);
    return result < 0 ? -1 : ckpt_vfiles_add_model(w->files, w->model, err);
}

static const struct ckpt_writer_word words[] = {
    {"max_size", "max_shard_size",
     "of view=sharded_state (vLLM 0.32; experts for its back ends Triton and CPU, which leave them "
     "as they are loaded): max_shard_size, by vLLM's word for it"},
    {0}};

const struct ckpt_writer ckpt_writer_sharded_state = {
    .name = "sharded_state",
    .keys = 1u << CKPT_CUT_TP | 1u << CKPT_CUT_PP | CKPT_WRITES_SIZE,
    .layout = "its files are those of tp and pp; every rank has a part of each expert",
    .vocab_multiple = 64,
    .vocab_whole = true,
    .hub_files = true,
    .recipes = "vllm",
    .words = words,
    .write = write_sharded_state,
};
