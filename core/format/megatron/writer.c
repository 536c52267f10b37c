/* SPDX-License-Identifier: Apache-2.0 */
/* Megatron-Core's torch_dist (megatron/core/dist_checkpointing, version 1):
 *
 *     latest_checkpointed_iteration.txt
 *     iter_0000010/.metadata, __R_0.distcp, common.pt, metadata.json         or release/...
 *
 * Equal layers are one tensor, [layers, ...]; the experts of a layer too, [layers, experts, ...];
 * each layer, expert and tensor-parallel part is stored by itself. If layers differ, their numbers
 * stand in the names. The optimizer's tensors are cut and stacked as their parameters are, as a
 * distributed optimizer saves them that is fully reshardable:
 *
 *     optimizer.state.param.NAME, optimizer.state.exp_avg.NAME, optimizer.state.exp_avg_sq.NAME */
#include <inttypes.h>
#include <string.h>

#include "base/map.h"
#include "base/sort.h"
#include "base/str.h"
#include "format/dcp/out.h"
#include "format/megatron/writer_plan.h"
#include "format/writer.h"
#include "tensor/slice.h"

enum {
    LEADING = 2, /* axes for layer and expert */
    MOST_PARTS = 1 << 25,
};

struct key {
    const char *name;
    const struct ckpt_tensor *like; /* its first tensor */
    uint32_t nlead;
    uint64_t lead[LEADING]; /* sizes of the leading axes */
    uint32_t of;            /* of an optimizer's: the parameter's key; else CKPT_NONE */
    bool is_object;
    size_t first, n; /* parts, in `part` */
};

struct part {
    const struct ckpt_tensor *tensor; /* NULL: an object */
    uint64_t from, len;
    uint64_t at[LEADING];
    const struct ckpt_cut *cut; /* NULL: the whole tensor */
    uint32_t index, of;         /* the part of the cut */
    uint32_t key, rank;
};

/* A list of modules, by the text before their numbers. */
struct stack {
    const char *stem;
    size_t len;
    uint64_t n; /* 0: they differ */
};

struct state {
    struct ckpt_dcp_state out;
    const struct ckpt_writing *w;
    struct ckpt_mg_grid grid;
    struct ckpt_arena *arena;
    struct ckpt_map by_name; /* keys */
    CKPT_VEC(struct stack) stack;
    CKPT_VEC(struct key) key;
    CKPT_VEC(struct part) part; /* by key, once they are sorted */
};

static void state_release(struct state *s)
{
    ckpt_map_release(&s->by_name);
    ckpt_vec_release(&s->stack);
    ckpt_vec_release(&s->key);
    ckpt_vec_release(&s->part);
}

/* ---- what .metadata states ---- */

static void get_key(const void *ctx, size_t i, struct ckpt_dcp_key *ret)
{
    const struct key *k = &((const struct state *)ctx)->key.ptr[i];

    *ret = (struct ckpt_dcp_key){.name = k->name, .is_object = k->is_object};
    if (k->is_object)
        return;
    ret->dtype = (enum ckpt_dtype)k->like->dtype;
    ret->rank = k->nlead + k->like->rank;
    memcpy(ret->dim, k->lead, k->nlead * sizeof *k->lead);
    memcpy(ret->dim + k->nlead, k->like->dim, k->like->rank * sizeof *k->like->dim);
}

static void describe(const struct state *s, const struct part *p, struct ckpt_dcp_data *ret)
{
    const struct key *k = &s->key.ptr[p->key];

    *ret = (struct ckpt_dcp_data){.tensor = p->tensor, .from = p->from, .len = p->len};
    if (k->is_object)
        return;
    for (uint32_t d = 0; d < k->nlead; d++) {
        ret->off[d] = p->at[d];
        ret->dim[d] = 1;
    }
    memcpy(ret->dim + k->nlead, k->like->dim, k->like->rank * sizeof *k->like->dim);
    if (p->cut) {
        const struct ckpt_interval part = ckpt_cut_part(p->cut, p->index, p->of);
        ret->off[k->nlead + p->cut->dim] = part.lo;
        ret->dim[k->nlead + p->cut->dim] = part.n;
    }
}

static bool get_chunk(const void *ctx, size_t key, size_t k, struct ckpt_dcp_data *ret)
{
    const struct state *s = ctx;

    if (k == s->key.ptr[key].n)
        return false;
    describe(s, &s->part.ptr[s->key.ptr[key].first + k], ret);
    return true;
}

/* ---- keys ---- */

/* Look at the modules of the list that the name begins with. All the same: they are stacked. */
static bool are_equal(const struct ckpt_catalog *cat, struct stack *k)
{
    size_t first = 0, all = 0;

    for (size_t i = 0; i < cat->tensors.len; i++) {
        const struct ckpt_tensor *t = &cat->tensors.ptr[i], *other;
        const struct ckpt_mg_name n = ckpt_mg_name_parse(t->name);
        if (t->state || n.stem != k->len || memcmp(t->name, k->stem, k->len) != 0)
            continue;
        ckpt_cleanup(ckpt_freep) char *name =
            ckpt_asprintf("%.*s0.%s", (int)k->len, k->stem, n.rest);
        if (!name || !(other = ckpt_catalog_find(cat, name)) || other->rank != t->rank ||
            other->dtype != t->dtype || memcmp(other->dim, t->dim, t->rank * sizeof *t->dim) != 0)
            return false;
        k->n = n.layer >= k->n ? n.layer + 1 : k->n;
        first += n.layer == 0;
        all++;
    }
    return all == first * k->n;
}

/* How many modules are stacked with that of a parameter; 0: none. Megatron never stacks layers of
 * the hybrid model, nor where the arguments list which layers have experts. */
static int stacked_with(struct state *s, const char *parameter, const struct ckpt_mg_name *n,
                        uint64_t *ret, struct ckpt_err *err)
{
    struct stack k = {.stem = parameter, .len = n->stem};

    *ret = 0;
    if (!n->stem)
        return 0;
    for (size_t i = 0; i < s->stack.len; i++)
        if (s->stack.ptr[i].len == k.len && memcmp(s->stack.ptr[i].stem, k.stem, k.len) == 0) {
            *ret = s->stack.ptr[i].n;
            return 0;
        }
    if (!are_equal(s->w->cat, &k) ||
        (n->in_layer && (json_is_true(json_object_get(s->w->config, "is_hybrid_model")) ||
                         json_is_array(json_object_get(s->w->config, "moe_layer_freq")))))
        k.n = 0;
    *ret = k.n;
    return ckpt_vec_push(&s->stack, k) < 0 ? ckpt_nomem(err) : 0;
}

/* "decoder.layers.mlp.experts.experts.linear_fc1.weight": without the numbers that are axes. */
static char *key_name(const char *parameter, const struct ckpt_mg_name *n, bool stacked)
{
    const char *from = stacked ? n->rest : parameter;
    const int len = n->leaf ? (int)(parameter + n->before - from) : (int)strlen(from);

    return ckpt_asprintf("%.*s%.*s%s", stacked ? (int)n->stem : 0, parameter, len, from,
                         n->leaf ? n->leaf : "");
}

static void state_name(struct ckpt_str *out, const char *parameter, const char *kind)
{
    const bool is_master = strcmp(kind, "master") == 0;

    if (strcmp(kind, "weight") == 0)
        ckpt_str_puts(out, parameter);
    else
        ckpt_str_printf(out, "optimizer.state.%s.%s", is_master ? "param" : kind, parameter);
}

/* The key of that name, which may be new. */
static int add_key(struct state *s, const struct key *like, const char *name, uint32_t *ret,
                   struct ckpt_err *err)
{
    struct key k = *like;

    if (!(k.name = ckpt_arena_strdup(s->arena, name)) ||
        (*ret = ckpt_map_add(&s->by_name, k.name, (uint32_t)s->key.len)) == CKPT_NONE ||
        (*ret == s->key.len && ckpt_vec_push(&s->key, k) < 0))
        return ckpt_nomem(err);
    return 0;
}

/* ---- parts ---- */

static int add_part(struct state *s, const struct ckpt_tensor *t, const struct ckpt_mg_name *name,
                    struct part *p, struct ckpt_err *err)
{
    const uint64_t size = ckpt_tensor_nbytes(t);

    if (s->part.len == MOST_PARTS)
        return ckpt_fail(err, CKPT_LIMIT, "the layout has more than %d parts of tensors",
                         MOST_PARTS);
    p->tensor = t;
    p->len = size;
    p->rank = ckpt_mg_rank(&s->grid, name, p->cut && p->cut->way != CKPT_CUT_NOT ? p->index : 0);
    if (p->cut) {
        const struct ckpt_interval part = ckpt_cut_part(p->cut, p->index, p->of);
        p->len = t->dim[p->cut->dim] ? size / t->dim[p->cut->dim] * part.n : 0;
        if (p->cut->dim == 0) {
            p->from = t->dim[0] ? size / t->dim[0] * part.lo : 0;
        } else {
            struct ckpt_tensor *slice = ckpt_arena_alloc(s->arena, sizeof *slice);
            if (!slice)
                return ckpt_nomem(err);
            if (ckpt_tensor_slice(s->w->cat, t, p->cut->dim, &part, 1, slice, err) < 0)
                return -1;
            p->tensor = slice;
        }
    }
    return ckpt_vec_push(&s->part, *p) < 0 ? ckpt_nomem(err) : 0;
}

static int add_parts(struct state *s, const struct ckpt_tensor *t, const struct ckpt_mg_name *name,
                     const struct part *like, struct ckpt_err *err)
{
    uint32_t ranks;
    const enum ckpt_cut_way way = ckpt_mg_way(&s->grid, name, &ranks);
    struct part p = *like;

    if (ckpt_mg_check(&s->grid, t, err) < 0)
        return -1;
    if (ckpt_cut_dim(t, way) == t->rank)
        return add_part(s, t, name, &p, err);
    for (uint32_t i = 0; i < t->cuts->n; i++) {
        p.cut = &t->cuts->cut[i];
        p.of = p.cut->way == way ? ranks : 1;
        for (p.index = 0; p.index < p.of; p.index++)
            if (add_part(s, t, name, &p, err) < 0)
                return -1;
    }
    return 0;
}

/* Is it a norm of TransformerEngine, which has an extra state since its version 2? A plain `norm`
 * is one right in a layer; inside a mixer it is another library's. */
static bool is_norm(const char *name, size_t len)
{
    static const char end[] = "norm";
    const size_t n = sizeof end - 1;

    return len > n + 1 && memcmp(name + len - n, end, n) == 0 &&
           (name[len - n - 1] != '.' || name[len - n - 2] <= '9');
}

/* The length of the module's name if the module has an extra state, else 0. Of a weight that is
 * stored in parts, the first part stands for the module. Of output layers, only the hybrid model's
 * has an extra state. */
static size_t module_with_extra(const struct state *s, const char *key, const struct ckpt_tensor *t)
{
    static const char *const ends[] = {".softmax_offset", ".weight.z", ".weight"};

    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        const size_t len = ckpt_has_suffix(key, ends[i]) ? strlen(key) - strlen(ends[i]) : 0;
        if (len && (i == 0 || ckpt_mg_is_projection(t, key, len) || is_norm(key, len)))
            return len;
    }
    return strcmp(key, "output_layer.weight") == 0 &&
                   json_is_true(json_object_get(s->w->config, "is_hybrid_model"))
               ? strlen("output_layer")
               : 0;
}

/* Add the extra state of a module of TransformerEngine (a projection, a norm, attention with
 * parameters), in which it keeps what FP8 needs: an empty one. Megatron ignores the extra state of
 * a module that has none, as the norms of older versions, but refuses a checkpoint that lacks one.
 */
static int add_extra(struct state *s, const char *key, const struct ckpt_mg_name *name,
                     const struct key *of, const struct part *part, struct ckpt_err *err)
{
    const size_t module = module_with_extra(s, key, of->like);
    struct part p = {.rank = ckpt_mg_rank(&s->grid, name, 0)};
    ckpt_cleanup(ckpt_str_release) struct ckpt_str text = {0};

    if (!module)
        return 0;
    ckpt_str_printf(&text, "%.*s._extra_state/shard_", (int)module, key);
    for (uint32_t d = 0; d < of->nlead; d++)
        ckpt_str_printf(&text, "%s%" PRIu64, d ? "." : "", part->at[d]);
    ckpt_str_puts(&text, of->nlead ? "_" : "0_1");
    for (uint32_t d = 0; d < of->nlead; d++)
        ckpt_str_printf(&text, "%s%" PRIu64, d ? "." : "", of->lead[d]);
    if (text.failed)
        return ckpt_nomem(err);
    if (add_key(s, &(struct key){.is_object = true, .of = CKPT_NONE}, text.ptr, &p.key, err) < 0)
        return -1;
    return ckpt_vec_push(&s->part, p) < 0 ? ckpt_nomem(err) : 0;
}

/* Add the key of an optimizer's tensor, whose parameter has the key `name`. */
static int add_state_key(struct state *s, const char *name, struct key *key, uint32_t *ret,
                         struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str own = {0};

    key->of = ckpt_map_find(&s->by_name, name);
    state_name(&own, name, key->like->state->kind);
    return own.failed ? ckpt_nomem(err) : add_key(s, key, ckpt_str_get(&own), ret, err);
}

static int add_tensor(struct state *s, const struct ckpt_tensor *t, struct ckpt_err *err)
{
    const char *parameter = t->state ? t->state->parameter : t->name;
    const struct ckpt_mg_name n = ckpt_mg_name_parse(parameter);
    struct key key = {.like = t, .of = CKPT_NONE};
    struct part part = {0};
    uint64_t layers;

    if (stacked_with(s, parameter, &n, &layers, err) < 0)
        return -1;
    ckpt_cleanup(ckpt_freep) char *name = key_name(parameter, &n, layers > 0);
    if (!name)
        return ckpt_nomem(err);
    if (layers) {
        part.at[key.nlead] = n.layer;
        key.lead[key.nlead++] = layers;
    }
    if (n.leaf) {
        part.at[key.nlead] = n.expert;
        key.lead[key.nlead++] = s->grid.experts;
    }
    if (t->rank + key.nlead > CKPT_MAX_RANK)
        return ckpt_fail(err, CKPT_LIMIT, "'%s' has too many dimensions", t->name);
    if ((t->state ? add_state_key(s, name, &key, &part.key, err)
                  : add_key(s, &key, name, &part.key, err)) < 0 ||
        add_parts(s, t, &n, &part, err) < 0)
        return -1;
    return t->state ? 0 : add_extra(s, name, &n, &key, &part, err);
}

/* ---- order ---- */

static int by_key(const void *a, const void *b)
{
    const struct part *x = a, *y = b;
    int c = ckpt_u64_cmp(x->key, y->key);

    c = c ? c : ckpt_u64_cmp(x->rank, y->rank);
    for (int d = 0; d < LEADING; d++)
        c = c ? c : ckpt_u64_cmp(x->at[d], y->at[d]);
    return c ? c : (x->cut > y->cut) - (x->cut < y->cut);
}

static int by_rank(const void *a, const void *b)
{
    const struct ckpt_dcp_part *x = a, *y = b;
    int c = ckpt_u64_cmp(x->rank, y->rank);

    c = c ? c : ckpt_u64_cmp(x->key, y->key);
    return c ? c : ckpt_u64_cmp(x->index, y->index);
}

static int put_in_order(struct state *s, struct ckpt_err *err)
{
    struct ckpt_dcp_part *out = ckpt_arena_alloc(s->arena, (s->part.len + 1) * sizeof *out);

    if (!out)
        return ckpt_nomem(err);
    ckpt_sort(s->part.ptr, s->part.len, by_key);
    for (size_t i = 0; i < s->part.len; i++) {
        const struct part *p = &s->part.ptr[i];
        struct key *k = &s->key.ptr[p->key];
        if (k->n == 0)
            k->first = i;
        out[i] = (struct ckpt_dcp_part){.rank = p->rank, .key = p->key, .index = (uint32_t)k->n++};
    }
    qsort(out, s->part.len, sizeof *out, by_rank);
    s->out.nkey = s->key.len;
    s->out.npart = s->part.len;
    s->out.part = out;
    return 0;
}

/* Megatron has a state of all layers and experts that are stacked, or of none: look whether one is
 * incomplete, since some of them are frozen. */
static int check_states(const struct state *s, struct ckpt_err *err)
{
    for (size_t i = 0; i < s->key.len; i++) {
        const struct key *k = &s->key.ptr[i];
        if (k->of != CKPT_NONE && k->n != s->key.ptr[k->of].n)
            return ckpt_fail(err, CKPT_UNSUPPORTED,
                             "option optimizer: %zu parts of '%s' have a state, and %zu have none, "
                             "as if they were frozen: Megatron, which stacks them, has no place "
                             "for that",
                             k->n, s->key.ptr[k->of].name, s->key.ptr[k->of].n - k->n);
    }
    return 0;
}

/* ---- all of it ---- */

/* The tables go to the files' arena, which outlives the state. */
static int keep_tables(struct state *s, struct ckpt_err *err)
{
    struct key *key = ckpt_arena_dup(s->arena, s->key.ptr, s->key.len * sizeof *key);
    struct part *part = ckpt_arena_dup(s->arena, s->part.ptr, s->part.len * sizeof *part);

    if (!key || !part)
        return ckpt_nomem(err);
    state_release(s);
    s->key.ptr = key;
    s->part.ptr = part;
    return 0;
}

static int write_megatron(const struct ckpt_writing *w, struct ckpt_err *err)
{
    const struct ckpt_catalog *cat = w->cat;
    struct state *s = ckpt_arena_alloc(&w->files->arena, sizeof *s);
    ckpt_cleanup(ckpt_freep) char *folder = ckpt_mg_folder(w);

    if (!s || !folder)
        return ckpt_nomem(err);
    *s = (struct state){
        .out = {.ctx = s, .key = get_key, .chunk = get_chunk}, .w = w, .arena = &w->files->arena};
    int rc = ckpt_mg_grid_init(&s->grid, w, err);
    for (size_t i = 0; i < cat->tensors.len && rc == 0; i++)
        rc = add_tensor(s, &cat->tensors.ptr[i], err);
    if (rc < 0 || put_in_order(s, err) < 0 || check_states(s, err) < 0 || keep_tables(s, err) < 0) {
        state_release(s);
        return -1;
    }
    return ckpt_dcp_out(w, folder, &s->out, s->grid.size * s->grid.pp, false, err) < 0
               ? -1
               : ckpt_mg_common(w, folder, &s->grid, "torch_dist", err);
}

const struct ckpt_writer ckpt_writer_megatron = {
    .name = "megatron",
    .keys = CKPT_MG_KEYS | 1 << CKPT_CUT_BATCH,
    .layout = "its chunks are those of tp, pp, ep, etp and vpp",
    .recipes = "megatron",
    .also = "to_megatron to_mcore",
    .vocab_multiple = CKPT_MG_VOCAB_MULTIPLE,
    .state_name = state_name,
    .has_scheduler = true,
    .has_min_lr = true,
    .has_masters = true,
    .steps_in_groups = true,
    .write = write_megatron,
};
