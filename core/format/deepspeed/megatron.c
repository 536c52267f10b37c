/* SPDX-License-Identifier: Apache-2.0 */
/* Making a legacy Megatron checkpoint's catalogue from DeepSpeed's files. */
#include "format/deepspeed/megatron.h"

#include <inttypes.h>
#include <string.h>

#include "base/ckd.h"
#include "base/str.h"
#include "format/deepspeed/stack.h"
#include "format/megatron/name.h"

#define INFO "universal_checkpoint_info"

/* ---- the run ---- */

/* Has the module a name of Megatron's language model, nested or flat? */
static bool has_language_model(const struct ckpt_ds_file *f)
{
    const ckpt_pv module = ckpt_pv_get(&f->p, f->p.root, "module");

    for (size_t i = 0; i < ckpt_pv_npair(&f->p, module); i++) {
        const char *key = ckpt_pv_str(&f->p, ckpt_pv_key(&f->p, module, i));
        if (key && (strcmp(key, "language_model") == 0 || ckpt_has_prefix(key, "language_model.") ||
                    ckpt_has_prefix(key, "module.language_model.")))
            return true;
    }
    return false;
}

bool ckpt_ds_megatron_is(const struct ckpt_ds_zero *z, bool pipeline)
{
    const struct ckpt_pickle *p = &z->model->p;

    return ckpt_pv_kind(ckpt_pv_get(p, p->root, "args")) == CKPT_PV_OBJ &&
           ckpt_pv_kind(ckpt_pv_get(p, p->root, "checkpoint_version")) != CKPT_PV_ABSENT &&
           (pipeline || has_language_model(z->model));
}

void ckpt_ds_megatron_release(struct ckpt_ds_megatron *m) { ckpt_megatron_state_release(&m->st); }

static int about(const struct ckpt_ds_job *job, const char *key, json_t *value,
                 struct ckpt_err *err)
{
    return !value || json_object_set_new(job->cat->about, key, value) < 0 ? ckpt_nomem(err) : 0;
}

/* Add the facts that recipes and people read, with the words of a legacy Megatron checkpoint. */
static int describe(const struct ckpt_ds_zero *z, const struct ckpt_ds_megatron *m,
                    struct ckpt_err *err)
{
    static const char from[] = "args of the model files";
    const struct ckpt_ds_job *job = z->job;
    const struct ckpt_ds_file *f = z->model;
    uint64_t vocabulary;

    job->cat->config = json_incref(m->st.args);
    (void)json_object_del(job->cat->about, "version"); /* DeepSpeed's, not Megatron's */
    if (about(job, "format", json_string("megatron"), err) < 0 ||
        about(job, "container", json_string("deepspeed"), err) < 0 ||
        about(job, "config_from", json_string(from), err) < 0 ||
        about(job, "config_looked_for", json_pack("[s]", from), err) < 0 ||
        about(job, "tp", json_integer((json_int_t)m->tp), err) < 0 ||
        about(job, "pp", json_integer((json_int_t)m->pp), err) < 0)
        return -1;
    if (m->st.has_version && about(job, "checkpoint_version", json_real(m->st.version), err) < 0)
        return -1;
    return ckpt_ds_file_u64(f, ckpt_pv_get(&f->p, f->p.root, INFO), "original_vocab_size",
                            &vocabulary)
               ? about(job, "tokenizer_size", json_integer((json_int_t)vocabulary), err)
               : 0;
}

/* ---- the ranks ---- */

/* Count the model files, which must be those of ranks 0 to n - 1. */
static int count_models(const struct ckpt_ds_job *job, uint64_t want, struct ckpt_err *err)
{
    uint64_t n = 0;

    while (ckpt_ds_tag_find(job->tag, CKPT_DS_MODEL, n, 0) ||
           ckpt_ds_tag_find(job->tag, CKPT_DS_ZERO3_MODEL, n, 0))
        n++;
    return n == want ? 0
                     : ckpt_fail(err, n < want ? CKPT_MISSING : CKPT_CONFLICT,
                                 "'%s' has the model files of %" PRIu64 " ranks (mp_rank_*), its "
                                 "args say %" PRIu64 " (tensor_model_parallel_size times "
                                 "pipeline_model_parallel_size)",
                                 ckpt_dir_path(job->dir), n, want);
}

static bool has_layer(const struct ckpt_ds_tag *tag, uint64_t layer, uint64_t tp)
{
    for (size_t i = 0; i < tag->files.len; i++) {
        const struct ckpt_ds_file_name *is = &tag->files.ptr[i].is;
        if (is->role == CKPT_DS_LAYER && is->layer == layer && is->mp == tp)
            return true;
    }
    return false;
}

/* Check that each layer has a file of every tensor-parallel rank. */
static int check_layers(const struct ckpt_ds_job *job, uint64_t ntp, struct ckpt_err *err)
{
    for (size_t i = 0; i < job->tag->files.len; i++) {
        const struct ckpt_ds_entry *e = &job->tag->files.ptr[i];
        if (e->is.role != CKPT_DS_LAYER)
            continue;
        if (e->is.mp >= ntp)
            return ckpt_fail(err, CKPT_CONFLICT,
                             "'%s/%s' is of a tensor-parallel rank that the run did not have (its "
                             "args say %" PRIu64 "): remove what is left of another save",
                             ckpt_dir_path(job->dir), e->name, ntp);
        for (uint64_t t = 0; t < ntp; t++)
            if (!has_layer(job->tag, e->is.layer, t))
                return ckpt_fail(err, CKPT_MISSING,
                                 "'%s': layer_%02" PRIu64 "-model_%02" PRIu64
                                 "-model_states.pt is missing: its args say %" PRIu64
                                 " tensor-parallel ranks",
                                 ckpt_dir_path(job->dir), e->is.layer, t, ntp);
    }
    return 0;
}

static int check_ranks(const struct ckpt_ds_zero *z, bool pipeline,
                       const struct ckpt_ds_megatron *m, struct ckpt_err *err)
{
    uint64_t n;

    if (!m->tp || !m->pp || ckd_mul(&n, m->tp, m->pp) || m->tp > UINT16_MAX)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "'%s/%s': its args have no tensor_model_parallel_size and "
                         "pipeline_model_parallel_size that a run can have",
                         ckpt_dir_path(z->job->dir), z->model_name);
    if (!pipeline && m->pp > 1)
        return ckpt_fail(err, CKPT_MISSING,
                         "'%s' has no files of layers, but its args say %" PRIu64
                         " pipeline stages",
                         ckpt_dir_path(z->job->dir), m->pp);
    if (count_models(z->job, n, err) < 0)
        return -1;
    return pipeline ? check_layers(z->job, m->tp, err) : 0;
}

int ckpt_ds_megatron_read(const struct ckpt_ds_zero *z, bool pipeline, struct ckpt_ds_megatron *ret,
                          struct ckpt_err *err)
{
    const struct ckpt_pickle *p = &z->model->p;

    if (ckpt_megatron_state_take(&ret->st, p, p->root, err) < 0)
        return ckpt_err_in(err, "'%s/%s'", ckpt_dir_path(z->job->dir), z->model_name);
    if (!ret->st.args)
        return ckpt_fail(err, CKPT_FORMAT, "'%s/%s': its args are not a namespace",
                         ckpt_dir_path(z->job->dir), z->model_name);
    ret->tp = ckpt_megatron_state_size(&ret->st, "tensor_model_parallel_size");
    ret->pp = ckpt_megatron_state_size(&ret->st, "pipeline_model_parallel_size");
    return check_ranks(z, pipeline, ret, err) < 0 ? -1 : describe(z, ret, err);
}

int ckpt_ds_megatron_read_joined(const struct ckpt_ds_zero *z, bool pipeline,
                                 struct ckpt_ds_megatron *ret, struct ckpt_err *err)
{
    static const char rule[] = "parameter_with_2_sub_params_cat_dim_0";
    const struct ckpt_pickle *p = &z->model->p;
    const ckpt_pv info = ckpt_pv_get(p, p->root, INFO);

    if (ckpt_ds_megatron_read(z, pipeline, ret, err) < 0)
        return -1;
    if (ret->tp > 1 && json_is_true(json_object_get(ret->st.args, "swiglu")) &&
        ckpt_pv_len(p, ckpt_pv_get(p, info, rule)) == 0)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "'%s': the universal checkpoint was made without a rule for gated MLPs "
                         "(" INFO ": %s), so that gate and up of %" PRIu64
                         " tensor-parallel ranks alternate: open the tag that it was made of",
                         ckpt_dir_path(z->job->dir), rule, ret->tp);
    ret->tp = 1;
    return 0;
}

/* ---- tensors ---- */

struct add {
    const struct ckpt_ds_job *job;
    const struct ckpt_ds_parts *parts;
    uint64_t ntp;
    ckpt_ds_drafts drafts;
    struct ckpt_str path, name;
};

static void add_release(struct add *a)
{
    ckpt_vec_release(&a->drafts);
    ckpt_str_release(&a->path);
    ckpt_str_release(&a->name);
}

/* Find rank t's part of a tensor, which must be like that of the first rank. */
static int find_part(const struct add *a, const struct ckpt_ds_part *first, uint64_t t, size_t *ret,
                     struct ckpt_err *err)
{
    char x[CKPT_SHAPE_TEXT], y[CKPT_SHAPE_TEXT];

    if (!ckpt_ds_parts_find(&a->parts[t], first->name, ret))
        return ckpt_fail(err, CKPT_MISSING,
                         "'%s' is not in the files of tensor-parallel rank %" PRIu64 " (of %" PRIu64
                         ")",
                         first->name, t, a->ntp);
    const struct ckpt_ds_part *part = &a->parts[t].part.ptr[*ret];
    if (part->dtype == first->dtype && part->rank == first->rank &&
        memcmp(part->dim, first->dim, part->rank * sizeof *part->dim) == 0)
        return 0;
    return ckpt_fail(
        err, CKPT_CONFLICT,
        "'%s' is %s%s on the first tensor-parallel rank, and %s%s on rank %" PRIu64, first->name,
        ckpt_dtype_name(first->dtype), ckpt_shape_text(first->dim, first->rank, x, sizeof x),
        ckpt_dtype_name(part->dtype), ckpt_shape_text(part->dim, part->rank, y, sizeof y), t);
}

/* Place the ranks' parts one after the other, along a new first dimension. */
static int place_ranks(struct add *a, const struct ckpt_ds_part *first, struct ckpt_err *err)
{
    struct ckpt_ds_map m = {.naxis = first->rank + 1, .n = {1}, .local = {first->numel}};
    size_t at;

    memcpy(m.n + 1, first->dim, first->rank * sizeof *m.n);
    ckpt_shape_strides(first->dim, first->rank, m.local + 1);
    memcpy(m.global, m.local, sizeof m.global);
    for (uint64_t t = 0; t < a->ntp; t++) {
        m.global_off = t * first->numel;
        if (find_part(a, first, t, &at, err) < 0 ||
            ckpt_ds_parts_place(&a->parts[t], at, &m, &a->drafts, err) < 0)
            return -1;
    }
    return 0;
}

static int add_ranked(struct add *a, size_t i, const char *name, struct ckpt_err *err)
{
    const struct ckpt_ds_part *first = &a->parts[0].part.ptr[i];
    struct ckpt_catalog *cat = a->job->cat;
    uint64_t dim[CKPT_MAX_RANK + 1] = {a->ntp}, numel;
    const uint32_t rank = first->rank + 1;
    size_t index;

    memcpy(dim + 1, first->dim, first->rank * sizeof *dim);
    if (rank > CKPT_MAX_RANK || !ckpt_shape_numel(dim, rank, &numel))
        return ckpt_fail(err, CKPT_LIMIT, "'%s' has too many dimensions or elements", first->name);
    a->drafts.len = 0;
    if (place_ranks(a, first, err) < 0 ||
        ckpt_catalog_add(cat, name, first->dtype, dim, rank, &index, err) < 0)
        return -1;
    cat->tensors.ptr[index].wanted = first->wanted;
    cat->tensors.ptr[index].ranks = (uint16_t)a->ntp;
    return ckpt_catalog_set_pieces(cat, index, a->drafts.ptr, a->drafts.len, err);
}

/* Add a tensor of one rank, which is the whole tensor. */
static int add_whole(struct add *a, size_t i, const char *name, struct ckpt_err *err)
{
    const struct ckpt_ds_part *part = &a->parts[0].part.ptr[i];
    struct ckpt_catalog *cat = a->job->cat;
    size_t index;

    a->drafts.len = 0;
    if (ckpt_ds_parts_place(&a->parts[0], i, NULL, &a->drafts, err) < 0 ||
        ckpt_catalog_add(cat, name, part->dtype, part->dim, part->rank, &index, err) < 0)
        return -1;
    cat->tensors.ptr[index].wanted = part->wanted;
    return ckpt_catalog_set_pieces(cat, index, a->drafts.ptr, a->drafts.len, err);
}

static int add_tensor(struct add *a, size_t i, const struct ckpt_ds_stack *stack,
                      struct ckpt_err *err)
{
    static const struct ckpt_megatron_place whole = {0};
    const char *name = a->parts[0].part.ptr[i].name;

    if (stack && !ckpt_ds_stack_name(stack, name, &a->path))
        return 0;
    const bool weight = ckpt_megatron_name(stack ? ckpt_str_get(&a->path) : name, &whole, &a->name);
    if (a->path.failed || a->name.failed)
        return ckpt_nomem(err);
    if (!weight)
        return 0;
    return a->ntp > 1 ? add_ranked(a, i, ckpt_str_get(&a->name), err)
                      : add_whole(a, i, ckpt_str_get(&a->name), err);
}

/* Check that no other rank has a tensor that the first one lacks. */
static int check_lists(const struct add *a, struct ckpt_err *err)
{
    size_t at;

    for (uint64_t t = 1; t < a->ntp; t++)
        for (size_t i = 0; i < a->parts[t].part.len; i++) {
            const char *name = a->parts[t].part.ptr[i].name;
            if (!ckpt_ds_parts_find(&a->parts[0], name, &at))
                return ckpt_fail(err, CKPT_CONFLICT,
                                 "'%s' is in the files of tensor-parallel rank %" PRIu64
                                 ", but not in those of the first",
                                 name, t);
        }
    return 0;
}

static int add_all(struct add *a, const struct ckpt_ds_stack *stack, struct ckpt_err *err)
{
    if (check_lists(a, err) < 0)
        return -1;
    for (size_t i = 0; i < a->parts[0].part.len; i++)
        if (add_tensor(a, i, stack, err) < 0)
            return -1;
    return 0;
}

int ckpt_ds_megatron_add(const struct ckpt_ds_job *job, const struct ckpt_ds_megatron *m,
                         bool pipeline, const struct ckpt_ds_parts *parts, struct ckpt_err *err)
{
    ckpt_cleanup(add_release) struct add a = {.job = job, .parts = parts, .ntp = m->tp};
    struct ckpt_ds_stack stack;

    if ((pipeline && ckpt_ds_stack_read(&parts[0], ckpt_megatron_state_size(&m->st, "num_layers"),
                                        &stack, err) < 0) ||
        add_all(&a, pipeline ? &stack : NULL, err) < 0)
        return ckpt_err_in(err, "'%s'", ckpt_dir_path(job->dir));
    return 0;
}
