/* SPDX-License-Identifier: Apache-2.0 */
/* A universal checkpoint, as deepspeed/checkpoint/ds_to_universal.py of DeepSpeed 0.19 makes them:
 *
 *     latest_universal
 *     global_stepN_universal/zero/PARAMETER/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt
 *     global_stepN_universal/zero/optimizer_state.pt
 *     global_stepN_universal/mp_rank_00_model_states.pt                      for ZeRO 1 and 2
 *     global_stepN_universal/zero_pp_rank_0_mp_rank_00_model_states.pt       for ZeRO 3
 *
 * A conversion has one of the last two, the source's. Here both are there, so that any stage
 * resumes. DeepSpeed takes no parameter from them: those that are trained have placeholders. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/map.h"
#include "base/str.h"
#include "format/torch_records.h"
#include "format/writer.h"
#include "tensor/read.h"
#include "view/text.h"

#define VERSION "0.19.8" /* ZeRO 1 asks for the version that wrote the file, and for 0.3.17 */
#define FOLDER_OF_RECORDS "archive/"

/* The tensors of the view that have a file of their own, and what all files share. */
struct files {
    const struct ckpt_writing *w;
    struct ckpt_arena *arena;
    char *folder;                      /* "global_step20_universal/" */
    const struct ckpt_tensor **tensor; /* parameters with states, and their moments */
    size_t n;
    bool *trained;                    /* by the number of a tensor: it has states */
    const struct ckpt_tensor **owner; /* by the number of a tensor: where names are tied, the
                                         parameter that has the states; else NULL */
    const struct ckpt_tensor *step;   /* of the first parameter; all have the same number */
    unsigned char number[sizeof(float)];
    struct ckpt_text text; /* what lies around these tensors in their files */
};

/* ---- names ---- */

static void state_name(struct ckpt_str *out, const char *parameter, const char *kind)
{
    if (strcmp(kind, "weight") == 0)
        ckpt_str_puts(out, parameter);
    else
        ckpt_str_printf(out, "optim.state.%s.%s", parameter, kind);
}

static bool is_step(const struct ckpt_tensor *t)
{
    return t->state && strcmp(t->state->kind, "step") == 0;
}

/* ---- what there is ---- */

static int note_step(struct files *f, const struct ckpt_tensor *t, struct ckpt_err *err)
{
    unsigned char number[sizeof f->number];
    struct ckpt_reading rd = {0};

    if (ckpt_tensor_pread(t, &rd, number, sizeof number, 0, err) < 0)
        return -1;
    if (!f->step)
        memcpy(f->number, number, sizeof number);
    else if (memcmp(f->number, number, sizeof number) != 0)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "'%s' and '%s' took different numbers of steps, and DeepSpeed has one "
                         "for all: give it with optimizer_step=N",
                         f->step->state->parameter, t->state->parameter);
    f->step = f->step ? f->step : t;
    return 0;
}

/* Note the parameter of a moment, which then has a file, too. */
static int note_moment(struct files *f, const struct ckpt_tensor *t, struct ckpt_err *err)
{
    const struct ckpt_catalog *cat = f->w->cat;
    const struct ckpt_tensor *weight = ckpt_catalog_find(cat, t->state->weight);

    if (!weight)
        return ckpt_fail(err, CKPT_CONFLICT, "'%s' belongs to '%s', which is not there", t->name,
                         t->state->weight);
    if (strchr(weight->name, '/'))
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "'%s' has a '/' in its name, and a parameter's name is a folder's here",
                         weight->name);
    if (!f->trained[weight - cat->tensors.ptr])
        f->tensor[f->n++] = weight;
    f->trained[weight - cat->tensors.ptr] = true;
    f->tensor[f->n++] = t;
    return 0;
}

/* Find the trained parameters whose elements tensors without states have under other names. */
static int find_owners(struct files *f, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_map_release) struct ckpt_map by_pieces = {0};
    uint32_t at;
    bool is_new;

    for (size_t i = 0; i < f->n; i++) {
        const struct ckpt_tensor *t = f->tensor[i];
        if (!t->state && t->npiece &&
            ckpt_map_put(&by_pieces, (const char *)&t->piece, sizeof t->piece, (uint32_t)i, &at,
                         &is_new) < 0)
            return ckpt_nomem(err);
    }
    for (size_t i = 0; i < f->w->cat->tensors.len; i++) {
        const struct ckpt_tensor *t = &f->w->cat->tensors.ptr[i];
        f->owner[i] =
            !t->state && !f->trained[i] && t->npiece &&
                    ckpt_map_get(&by_pieces, (const char *)&t->piece, sizeof t->piece, &at)
                ? f->tensor[at]
                : NULL;
    }
    return 0;
}

static int list_tensors(struct files *f, struct ckpt_err *err)
{
    const struct ckpt_catalog *cat = f->w->cat;
    const size_t n = cat->tensors.len;

    f->tensor = ckpt_arena_alloc(f->arena, (2 * n + 1) * sizeof(const struct ckpt_tensor *));
    f->trained = ckpt_arena_alloc(f->arena, (n + 1) * sizeof *f->trained);
    f->owner = ckpt_arena_alloc(f->arena, (n + 1) * sizeof(const struct ckpt_tensor *));
    if (!f->tensor || !f->trained || !f->owner)
        return ckpt_nomem(err);
    memset(f->trained, 0, (n + 1) * sizeof *f->trained);
    for (size_t i = 0; i < n; i++) {
        const struct ckpt_tensor *t = &cat->tensors.ptr[i];
        if (t->state && (is_step(t) ? note_step(f, t, err) : note_moment(f, t, err)) < 0)
            return -1;
    }
    if (find_owners(f, err) < 0)
        return -1;
    return f->step ? 0 : ckpt_fail(err, CKPT_MISSING, "no parameter has a state of the optimizer");
}

/* Say what DeepSpeed does not restore. */
static void tell(const struct files *f)
{
    const size_t groups = json_array_size(f->w->groups);
    const char *first = NULL;
    size_t n = 0;

    for (size_t i = 0; i < f->w->cat->tensors.len; i++) {
        const struct ckpt_tensor *t = &f->w->cat->tensors.ptr[i];
        if (t->state || f->trained[i] || f->owner[i])
            continue;
        first = first ? first : t->name;
        n++;
    }
    if (n)
        ckpt_catalog_warn(f->w->cat,
                          "optimizer: %zu tensors have no state of the optimizer ('%s' first): "
                          "DeepSpeed loads no such tensor from a universal checkpoint. They are "
                          "in 'module' of mp_rank_00_model_states.pt, to be loaded before",
                          n, first);
    ckpt_catalog_note(f->w->cat,
                      "optimizer: DeepSpeed finds groups of parameters by their number: the "
                      "optimizer that resumes must have %zu of them, in this order, and ZeRO 1 "
                      "and 2 leave further ones as they are, without a word",
                      groups);
    if (groups > 1)
        ckpt_catalog_warn(f->w->cat,
                          "optimizer: DeepSpeed's ZeRO 3 gives all groups of parameters the "
                          "hyper-parameters of the first: set the others' after the load");
}

/* ---- files of one tensor ---- */

/* Append the file of a dict with the tensor, {"cat_dim": 0, "param": tensor}, all but the tensor's
 * bytes. Returns how many of the file's bytes go before these. */
static size_t put_file(const struct ckpt_tensor *t, struct ckpt_str *out)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str pickle = {0};
    struct ckpt_pickle_out p = {.out = &pickle};
    const struct ckpt_torch_out shape = ckpt_torch_records_shape(t);
    size_t at = 0;

    ckpt_pickle_out_begin(&p);
    ckpt_pickle_out_ops(&p, CKPT_PICKLE_OUT_EMPTY_DICT CKPT_PICKLE_OUT_MARK);
    ckpt_pickle_out_text(&p, "cat_dim");
    ckpt_pickle_out_u64(&p, 0);
    ckpt_pickle_out_text(&p, "param");
    ckpt_torch_out_tensor(&p, &shape, "0");
    ckpt_pickle_out_ops(&p, CKPT_PICKLE_OUT_SETITEMS CKPT_PICKLE_OUT_STOP);
    const struct ckpt_torch_archive archive = {.folder = FOLDER_OF_RECORDS,
                                               .pickle = ckpt_str_get(&pickle),
                                               .len = pickle.len,
                                               .nbytes = &shape.nbytes,
                                               .n = 1};
    if (pickle.failed || ckpt_torch_out_file(&archive, out, &at, NULL) < 0)
        out->failed = true;
    return at;
}

static void put_entry(const void *ctx, size_t i, struct ckpt_str *out)
{
    (void)put_file(((const struct files *)ctx)->tensor[i], out);
}

/* Add the file of tensor i, whose text begins at *off. */
static int add_tensor(struct files *f, size_t i, uint64_t *off, struct ckpt_err *err)
{
    enum { BEFORE, BYTES, BEHIND, PARTS };
    const struct ckpt_tensor *t = f->tensor[i];
    struct ckpt_segment *seg = ckpt_arena_alloc(f->arena, PARTS * sizeof *seg);
    ckpt_cleanup(ckpt_str_release) struct ckpt_str around = {0};
    const size_t at = put_file(t, &around);
    ckpt_cleanup(ckpt_freep) char *path =
        ckpt_asprintf("%szero/%s/%s.pt", f->folder, t->state ? t->state->parameter : t->name,
                      t->state ? t->state->kind : "fp32");

    if (!seg || !path || around.failed)
        return ckpt_nomem(err);
    seg[BEFORE] = ckpt_segment_text(&f->text, *off, at);
    seg[BYTES] = ckpt_segment_tensor(t, 0, ckpt_tensor_nbytes(t));
    seg[BEHIND] = ckpt_segment_text(&f->text, *off + at, around.len - at);
    *off += around.len;
    return ckpt_writing_add(f->w, path, seg, PARTS, err);
}

static int add_tensors(struct files *f, struct ckpt_err *err)
{
    uint64_t off = 0;

    if (ckpt_text_init(&f->text, put_entry, f, f->n, CKPT_TEXT_ARCHIVES, f->arena, err) < 0)
        return -1;
    for (size_t i = 0; i < f->n; i++)
        if (add_tensor(f, i, &off, err) < 0)
            return -1;
    return 0;
}

/* ---- files with the step ---- */

static void push_step(struct ckpt_pickle_out *p)
{
    const struct ckpt_torch_out scalar = {.dtype = CKPT_F32, .nbytes = sizeof(float)};

    ckpt_torch_out_tensor(p, &scalar, "0");
}

/* Make the file of an object with the step as its only tensor; *ret is the arena's. */
static int finish_step(struct files *f, const struct ckpt_str *pickle, struct ckpt_segment *ret,
                       struct ckpt_err *err)
{
    const uint64_t nbytes = sizeof f->number;
    ckpt_cleanup(ckpt_str_release) struct ckpt_str text = {0};
    const struct ckpt_torch_archive archive = {.folder = FOLDER_OF_RECORDS,
                                               .pickle = pickle->ptr,
                                               .len = pickle->len,
                                               .nbytes = &nbytes,
                                               .n = 1};
    size_t at;
    char *own;

    if (pickle->failed)
        return ckpt_nomem(err);
    if (ckpt_torch_out_file(&archive, &text, &at, err) < 0)
        return -1;
    if (!(own = ckpt_arena_alloc(f->arena, text.len + sizeof f->number)))
        return ckpt_nomem(err);
    memcpy(own, text.ptr, at);
    memcpy(own + at, f->number, sizeof f->number);
    memcpy(own + at + sizeof f->number, text.ptr + at, text.len - at);
    *ret = ckpt_segment_mem(own, text.len + sizeof f->number);
    return 0;
}

/* Add step.pt of each parameter, the same bytes for all. */
static int add_steps(struct files *f, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str pickle = {0};
    struct ckpt_pickle_out p = {.out = &pickle};
    struct ckpt_segment step;

    ckpt_pickle_out_begin(&p);
    push_step(&p);
    ckpt_pickle_out_ops(&p, CKPT_PICKLE_OUT_STOP);
    if (finish_step(f, &pickle, &step, err) < 0)
        return -1;
    for (size_t i = 0; i < f->n; i++) {
        if (f->tensor[i]->state)
            continue;
        struct ckpt_segment *seg = ckpt_arena_alloc(f->arena, sizeof *seg);
        ckpt_cleanup(ckpt_freep) char *path =
            ckpt_asprintf("%szero/%s/step.pt", f->folder, f->tensor[i]->name);
        if (!seg || !path)
            return ckpt_nomem(err);
        *seg = step;
        if (ckpt_writing_add(f->w, path, seg, 1, err) < 0)
            return -1;
    }
    return 0;
}

/* The groups with the numbers of the flat tensors that DeepSpeed makes of them; NULL: no memory. */
static json_t *number_groups(const json_t *groups)
{
    json_t *list = json_array(), *group;
    size_t i;

    json_array_foreach((json_t *)groups, i, group) {
        json_t *own = json_copy(group);
        ckpt_json_set(&own, "params", json_pack("[I]", (json_int_t)i));
        ckpt_json_append(&list, own);
    }
    return list;
}

static void push_groups(struct ckpt_pickle_out *p, const json_t *groups)
{
    ckpt_pickle_out_text(p, "param_groups");
    ckpt_pickle_out_json(p, groups);
}

/* Add zero/optimizer_state.pt: ZeRO 1 and 2 take the groups from it, ZeRO 3 the groups and the step
 * from a dict inside. */
static int add_optimizer(struct files *f, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str pickle = {0};
    ckpt_cleanup(ckpt_freep) char *path = ckpt_asprintf("%szero/optimizer_state.pt", f->folder);
    ckpt_cleanup(ckpt_json_decrefp) json_t *groups = number_groups(f->w->groups);
    struct ckpt_segment *seg = ckpt_arena_alloc(f->arena, sizeof *seg);
    struct ckpt_pickle_out p = {.out = &pickle};

    if (!path || !groups || !seg)
        return ckpt_nomem(err);
    ckpt_pickle_out_begin(&p);
    ckpt_pickle_out_ops(&p, CKPT_PICKLE_OUT_EMPTY_DICT CKPT_PICKLE_OUT_MARK);
    ckpt_pickle_out_text(&p, "ds_version");
    ckpt_pickle_out_text(&p, VERSION);
    push_groups(&p, groups);
    ckpt_pickle_out_text(&p, "optimizer_state_dict");
    ckpt_pickle_out_ops(&p, CKPT_PICKLE_OUT_EMPTY_DICT CKPT_PICKLE_OUT_MARK);
    ckpt_pickle_out_text(&p, "state");
    ckpt_pickle_out_ops(&p, CKPT_PICKLE_OUT_EMPTY_DICT CKPT_PICKLE_OUT_MARK);
    ckpt_pickle_out_u64(&p, 0);
    ckpt_pickle_out_ops(&p, CKPT_PICKLE_OUT_EMPTY_DICT CKPT_PICKLE_OUT_MARK);
    ckpt_pickle_out_text(&p, "step");
    push_step(&p);
    ckpt_pickle_out_ops(&p, CKPT_PICKLE_OUT_SETITEMS CKPT_PICKLE_OUT_SETITEMS);
    push_groups(&p, groups);
    ckpt_pickle_out_ops(&p, CKPT_PICKLE_OUT_SETITEMS CKPT_PICKLE_OUT_SETITEMS CKPT_PICKLE_OUT_STOP);
    return finish_step(f, &pickle, seg, err) < 0 ? -1 : ckpt_writing_add(f->w, path, seg, 1, err);
}

/* ---- the model's file ---- */

/* Push the module's state dict: placeholders of what lies in zero/, and the tensors that have no
 * state; with ZeRO 3, placeholders for all. */
static int push_module(const struct files *f, struct ckpt_torch_records *m, bool zero3,
                       struct ckpt_err *err)
{
    static const uint64_t no_rows[] = {0};
    char key[32];

    ckpt_pickle_out_text(&m->p, "module");
    ckpt_pickle_out_ordered(&m->p);
    for (size_t i = 0; i < f->w->cat->tensors.len; i++) {
        const struct ckpt_tensor *t = &f->w->cat->tensors.ptr[i];
        struct ckpt_torch_out shape = ckpt_torch_records_shape(t);
        if (t->state)
            continue;
        (void)snprintf(key, sizeof key, "%zu", m->tensor.len);
        if (zero3 || f->trained[i] || f->owner[i]) {
            shape = (struct ckpt_torch_out){.dtype = shape.dtype, .dim = no_rows, .rank = 1};
            (void)snprintf(key, sizeof key, "0");
        } else if (ckpt_torch_records_add(m, t, err) < 0) {
            return -1;
        }
        ckpt_pickle_out_text(&m->p, t->name);
        ckpt_torch_out_tensor(&m->p, &shape, key);
    }
    ckpt_pickle_out_ops(&m->p, CKPT_PICKLE_OUT_SETITEMS);
    return 0;
}

/* Push the shapes of the parameters, group by group: [{name: torch.Size}]. */
static int push_shapes(const struct files *f, struct ckpt_torch_records *m, struct ckpt_err *err)
{
    json_t *group, *name;
    size_t i, k;

    ckpt_pickle_out_text(&m->p, "param_shapes");
    ckpt_pickle_out_ops(&m->p, CKPT_PICKLE_OUT_EMPTY_LIST CKPT_PICKLE_OUT_MARK);
    json_array_foreach((json_t *)f->w->groups, i, group) {
        ckpt_pickle_out_ordered(&m->p);
        json_array_foreach(json_object_get(group, "params"), k, name) {
            const struct ckpt_tensor *t = ckpt_catalog_find(f->w->cat, json_string_value(name));
            if (!t)
                return ckpt_fail(err, CKPT_CONFLICT, "group %zu has '%s', which is not there", i,
                                 json_string_value(name));
            ckpt_pickle_out_text(&m->p, t->name);
            ckpt_pickle_out_global(&m->p, "torch", "Size");
            ckpt_pickle_out_tuple(&m->p, t->dim, t->rank, false);
            ckpt_pickle_out_ops(&m->p, CKPT_PICKLE_OUT_TUPLE1 CKPT_PICKLE_OUT_REDUCE);
        }
        ckpt_pickle_out_ops(&m->p, CKPT_PICKLE_OUT_SETITEMS);
    }
    ckpt_pickle_out_ops(&m->p, CKPT_PICKLE_OUT_APPENDS);
    return 0;
}

/* Push {other name: the parameter's own}. */
static void push_shared(const struct files *f, struct ckpt_torch_records *m)
{
    ckpt_pickle_out_text(&m->p, "shared_params");
    ckpt_pickle_out_ops(&m->p, CKPT_PICKLE_OUT_EMPTY_DICT CKPT_PICKLE_OUT_MARK);
    for (size_t i = 0; i < f->w->cat->tensors.len; i++) {
        if (!f->owner[i])
            continue;
        ckpt_pickle_out_text(&m->p, f->w->cat->tensors.ptr[i].name);
        ckpt_pickle_out_text(&m->p, f->owner[i]->name);
    }
    ckpt_pickle_out_ops(&m->p, CKPT_PICKLE_OUT_SETITEMS);
}

static void push_number(struct ckpt_torch_records *m, const char *key, uint64_t n)
{
    ckpt_pickle_out_text(&m->p, key);
    ckpt_pickle_out_u64(&m->p, n);
}

/* Push what DeepSpeed's load_checkpoint asks for, and what says whose the tensors are. */
static int push_all(const struct files *f, struct ckpt_torch_records *m, bool zero3,
                    struct ckpt_err *err)
{
    ckpt_pickle_out_begin(&m->p);
    ckpt_pickle_out_ops(&m->p, CKPT_PICKLE_OUT_EMPTY_DICT CKPT_PICKLE_OUT_MARK);
    if (push_module(f, m, zero3, err) < 0 || push_shapes(f, m, err) < 0)
        return -1;
    push_shared(f, m);
    ckpt_pickle_out_text(&m->p, "buffer_names");
    ckpt_pickle_out_ops(&m->p, CKPT_PICKLE_OUT_EMPTY_LIST);
    push_number(m, "skipped_steps", 0);
    push_number(m, "global_steps", f->w->step);
    push_number(m, "dp_world_size", 1);
    push_number(m, "mp_world_size", 1);
    ckpt_pickle_out_text(&m->p, "ds_version");
    ckpt_pickle_out_text(&m->p, VERSION);
    ckpt_pickle_out_ops(&m->p, CKPT_PICKLE_OUT_SETITEMS CKPT_PICKLE_OUT_STOP);
    return m->pickle.failed ? ckpt_nomem(err) : 0;
}

/* The first record is empty, and all placeholders are of it. */
static int add_model(const struct files *f, bool zero3, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_torch_records_release) struct ckpt_torch_records m;
    ckpt_cleanup(ckpt_freep) char *path =
        ckpt_asprintf("%s%smp_rank_00_model_states.pt", f->folder, zero3 ? "zero_pp_rank_0_" : "");

    ckpt_torch_records_init(&m);
    if (!path)
        return ckpt_nomem(err);
    return ckpt_torch_records_add(&m, NULL, err) < 0 || push_all(f, &m, zero3, err) < 0
               ? -1
               : ckpt_torch_records_write(&m, f->w, path, FOLDER_OF_RECORDS, err);
}

/* ---- all of it ---- */

static int write_universal(const struct ckpt_writing *w, struct ckpt_err *err)
{
    struct files *f = ckpt_arena_alloc(&w->files->arena, sizeof *f);
    ckpt_cleanup(ckpt_freep) char *tag = ckpt_asprintf("global_step%" PRIu64 "_universal", w->step);
    ckpt_cleanup(ckpt_freep) char *folder = tag ? ckpt_asprintf("%s/", tag) : NULL;

    if (!f || !folder)
        return ckpt_nomem(err);
    if (!w->groups)
        return ckpt_fail(err, CKPT_USAGE,
                         "DeepSpeed loads a universal checkpoint with the optimizer's states only: "
                         "add the option optimizer, or load the model alone from view=hf");
    *f = (struct files){.w = w, .arena = &w->files->arena, .folder = folder};
    if (list_tensors(f, err) < 0)
        return -1;
    tell(f);
    if (add_tensors(f, err) < 0 || add_steps(f, err) < 0 || add_optimizer(f, err) < 0 ||
        add_model(f, false, err) < 0 || add_model(f, true, err) < 0 ||
        ckpt_writing_text(w, "", "latest_universal", tag, strlen(tag), err) < 0)
        return -1;
    f->folder = NULL; /* the tensors remain, for the text around them */
    f->w = NULL;
    return 0;
}

const struct ckpt_writer ckpt_writer_deepspeed_universal = {
    .name = "deepspeed_universal",
    .also = "deepspeed universal universal_checkpoint ds_to_universal load_universal_checkpoint",
    .keys = CKPT_WRITES_NAMES,
    .layout = "each parameter has a folder with whole tensors, which any number of ranks loads",
    .bare = true,
    .state_name = state_name,
    .write = write_universal,
};
