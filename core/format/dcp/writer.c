/* SPDX-License-Identifier: Apache-2.0 */
/* A state dict of a catalogue's tensors, cut by rows: flat, or of a model and its optimizer. */
#include <inttypes.h>
#include <string.h>

#include "base/ckd.h"
#include "base/str.h"
#include "container/torch_out.h"
#include "format/dcp/out.h"

/* ---- rows ---- */

enum { MOST_PARTS = 1 << 25 };

static uint64_t rows_in(const struct ckpt_tensor *t) { return t->rank ? t->dim[0] : 1; }

/* The first row of a rank. */
static uint64_t first_row(uint64_t rows, uint32_t rank, uint32_t ranks)
{
    const uint64_t each = rows / ranks + (rows % ranks > 0);

    return each && rank > rows / each ? rows : ckpt_min_u64(each * rank, rows);
}

bool ckpt_rows_of(const struct ckpt_tensor *t, uint32_t rank, uint32_t ranks, struct ckpt_rows *ret)
{
    const uint64_t rows = rows_in(t), lo = first_row(rows, rank, t->rank ? ranks : 1),
                   hi = first_row(rows, rank + 1, t->rank ? ranks : 1);
    const uint64_t size = rows ? ckpt_tensor_nbytes(t) / rows : 0;

    if (rank > 0 && (t->rank == 0 || (lo == rows && first_row(rows, rank - 1, ranks) == rows)))
        return false;
    *ret = (struct ckpt_rows){
        .tensor = t, .lo = lo, .n = hi - lo, .from = lo * size, .len = (hi - lo) * size};
    return true;
}

void ckpt_rows_dim(const struct ckpt_rows *r, uint64_t dim[CKPT_MAX_RANK],
                   uint64_t off[CKPT_MAX_RANK])
{
    for (uint32_t d = 0; d < r->tensor->rank; d++) {
        dim[d] = d ? r->tensor->dim[d] : r->n;
        off[d] = d ? 0 : r->lo;
    }
}

int ckpt_rows_count(const struct ckpt_catalog *cat, uint32_t ranks, size_t *ret,
                    struct ckpt_err *err)
{
    const uint64_t n = (uint64_t)cat->tensors.len * ranks; /* both fit 32 bits */

    if (n > MOST_PARTS)
        return ckpt_fail(err, CKPT_LIMIT,
                         "option ranks: %zu tensors cut for %" PRIu32
                         " ranks are more than %d parts",
                         cat->tensors.len, ranks, MOST_PARTS);
    *ret = (size_t)n;
    return 0;
}

/* A value of a group of the optimizer. */
struct member {
    const char *name; /* "optim.param_groups.0.lr" */
    const char *key;  /* "lr" */
    uint64_t group;
    struct ckpt_dcp_archive value;
};

/* The keys are the tensors; then the members of all groups. */
struct state {
    struct ckpt_dcp_state out;
    const struct ckpt_catalog *cat;
    uint32_t ranks;
    enum ckpt_dcp_optimizer form;
    struct member *member;
    size_t nmember;
};

/* ---- an optimizer ---- */

static void state_name(struct ckpt_str *out, const char *parameter, const char *kind)
{
    if (strcmp(kind, "weight") == 0)
        ckpt_str_printf(out, "model.%s", parameter);
    else
        ckpt_str_printf(out, "optim.state.%s.%s", parameter, kind);
}

#define FLATTENED "optimizer."

void ckpt_dcp_flattened_name(struct ckpt_str *out, const char *parameter, const char *kind)
{
    if (strcmp(kind, "weight") == 0)
        ckpt_str_puts(out, parameter);
    else
        ckpt_str_printf(out, FLATTENED "state.%s.%s", parameter, kind);
}

/* Give a tensor its path in the state dict. */
static void set_path(struct ckpt_dcp_key *key, const struct state *s, const struct ckpt_tensor *t)
{
    const bool nested = s->form == CKPT_DCP_NESTED;

    if (t->state && nested) {
        const char *const path[] = {"optim", "state", t->state->parameter, t->state->kind};
        memcpy(key->path, path, sizeof path);
        key->npath = 4;
    } else if (t->state || nested) {
        key->path[0] = t->state ? "optimizer" : "model";
        key->path[1] = t->name + (t->state ? strlen(FLATTENED) : strlen("model."));
        key->npath = 2;
    }
}

static void get_member(const struct state *s, const struct member *m, struct ckpt_dcp_key *ret)
{
    *ret = (struct ckpt_dcp_key){.name = m->name, .is_object = true, .object = m->value};
    if (s->form == CKPT_DCP_NESTED) {
        const char *const path[] = {"optim", "param_groups", NULL, m->key};
        memcpy(ret->path, path, sizeof path);
        ret->npath = 4;
        ret->number = m->group;
    } else {
        ret->path[0] = "optimizer";
        ret->path[1] = m->name + strlen(FLATTENED);
        ret->npath = 2;
    }
}

/* Make the archive of a value; its text is the arena's, since the view outlives the groups. */
static int make_archive(const json_t *value, struct ckpt_arena *arena, struct ckpt_dcp_archive *ret)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str text = {0};

    ckpt_torch_out_json(value, &text);
    char *own = ckpt_arena_alloc(arena, text.len + 1);
    if (!own || text.failed)
        return -1;
    memcpy(own, ckpt_str_get(&text), text.len);
    *ret = (struct ckpt_dcp_archive){own, text.len};
    return 0;
}

/* Add a value; `of`, the parameter whose it is, is NULL in the nested form. */
static int add_member(struct state *s, const struct member *of_group, const char *of,
                      struct ckpt_arena *arena)
{
    struct member *m = &s->member[s->nmember++];
    ckpt_cleanup(ckpt_freep) char *name =
        of ? ckpt_asprintf(FLATTENED "param_groups.%s.%s", of, of_group->key)
           : ckpt_asprintf("optim.param_groups.%" PRIu64 ".%s", of_group->group, of_group->key);

    *m = *of_group;
    m->name = name ? ckpt_arena_strdup(arena, name) : NULL;
    return m->name ? 0 : -1;
}

/* Add the values of one key of a group. In the flattened form each parameter has all of them. */
static int add_members(struct state *s, uint64_t group, const char *key, const json_t *value,
                       const json_t *params, struct ckpt_arena *arena)
{
    struct member m = {.group = group};
    json_t *name;
    size_t i;

    if (s->form == CKPT_DCP_FLATTENED && value == params)
        return 0;
    if (!(m.key = ckpt_arena_strdup(arena, key)) || make_archive(value, arena, &m.value) < 0)
        return -1;
    if (s->form == CKPT_DCP_NESTED)
        return add_member(s, &m, NULL, arena);
    json_array_foreach((json_t *)params, i, name)
        if (add_member(s, &m, json_string_value(name), arena) < 0)
            return -1;
    return 0;
}

static int list_members(struct state *s, const struct ckpt_writing *w, struct ckpt_err *err)
{
    struct ckpt_arena *arena = &w->files->arena;
    size_t i, n = 0;
    const char *key;
    json_t *group, *value;

    json_array_foreach((json_t *)w->groups, i, group)
        n += json_object_size(group) *
             (s->form == CKPT_DCP_NESTED ? 1 : json_array_size(json_object_get(group, "params")));
    if (!(s->member = ckpt_arena_alloc(arena, (n + 1) * sizeof *s->member)))
        return ckpt_nomem(err);
    json_array_foreach((json_t *)w->groups, i, group) {
        json_object_foreach(group, key, value)
            if (add_members(s, i, key, value, json_object_get(group, "params"), arena) < 0)
                return ckpt_nomem(err);
    }
    return 0;
}

/* ---- keys and parts ---- */

static void get_key(const void *ctx, size_t i, struct ckpt_dcp_key *ret)
{
    const struct state *s = ctx;
    const size_t n = s->cat->tensors.len;
    const struct ckpt_tensor *t = &s->cat->tensors.ptr[i];

    if (i >= n) {
        get_member(s, &s->member[i - n], ret);
        return;
    }
    *ret =
        (struct ckpt_dcp_key){.name = t->name, .dtype = (enum ckpt_dtype)t->dtype, .rank = t->rank};
    memcpy(ret->dim, t->dim, t->rank * sizeof *t->dim);
    if (s->nmember)
        set_path(ret, s, t);
}

/* A tensor's part has the number of its rank; the first rank has the objects. */
static bool get_chunk(const void *ctx, size_t key, size_t rank, struct ckpt_dcp_data *ret)
{
    const struct state *s = ctx;
    struct ckpt_rows rows;

    if (key >= s->cat->tensors.len) {
        *ret = (struct ckpt_dcp_data){0};
        return rank == 0;
    }
    if (rank >= s->ranks ||
        !ckpt_rows_of(&s->cat->tensors.ptr[key], (uint32_t)rank, s->ranks, &rows))
        return false;
    *ret = (struct ckpt_dcp_data){.tensor = rows.tensor, .from = rows.from, .len = rows.len};
    ckpt_rows_dim(&rows, ret->dim, ret->off);
    return true;
}

static void list_parts(struct state *s)
{
    struct ckpt_rows rows;
    size_t n = 0;

    for (uint32_t r = 0; r < s->ranks; r++) {
        for (size_t i = 0; i < s->cat->tensors.len; i++)
            if (ckpt_rows_of(&s->cat->tensors.ptr[i], r, s->ranks, &rows))
                s->out.part[n++] =
                    (struct ckpt_dcp_part){.rank = r, .key = (uint32_t)i, .index = r};
        for (size_t i = 0; r == 0 && i < s->nmember; i++)
            s->out.part[n++] = (struct ckpt_dcp_part){.key = (uint32_t)(s->cat->tensors.len + i)};
    }
    s->out.npart = n;
}

int ckpt_dcp_files(const struct ckpt_writing *w, const char *folder, enum ckpt_dcp_optimizer form,
                   struct ckpt_err *err)
{
    struct state *s = ckpt_arena_alloc(&w->files->arena, sizeof *s);
    const uint32_t ranks = ckpt_output_parts(w->output, CKPT_CUT_RANKS);
    size_t most = 0;

    if (!s)
        return ckpt_nomem(err);
    if (ckpt_rows_count(w->cat, ranks, &most, err) < 0)
        return -1;
    *s = (struct state){.out = {.ctx = s,
                                .nkey = w->cat->tensors.len,
                                .key = get_key,
                                .chunk = get_chunk,
                                .indexed = true},
                        .cat = w->cat,
                        .ranks = ranks,
                        .form = form};
    if (list_members(s, w, err) < 0)
        return -1;
    s->out.nkey += s->nmember;
    s->out.part = ckpt_arena_alloc(&w->files->arena, (most + s->nmember + 1) * sizeof *s->out.part);
    if (!s->out.part)
        return ckpt_nomem(err);
    list_parts(s);
    return ckpt_dcp_out(w, folder, &s->out, ranks, true, err);
}

static int write_dcp(const struct ckpt_writing *w, struct ckpt_err *err)
{
    return ckpt_dcp_files(w, "", CKPT_DCP_NESTED, err);
}

const struct ckpt_writer ckpt_writer_dcp = {
    .name = "dcp",
    .also = "to_dcp",
    .keys = 1u << CKPT_CUT_RANKS | CKPT_WRITES_NAMES,
    .layout = "each tensor is cut along its first dimension, for ranks=N",
    .bare = true,
    .state_name = state_name,
    .write = write_dcp,
};
