/* SPDX-License-Identifier: Apache-2.0 */
/* One torch.save file per rank, without a manifest: accelerate without DCP, verl, people's own
 * scripts; and the whole model in one file: FULL_STATE_DICT, dcp_to_torch_save, and what Hugging
 * Face had before safetensors.
 *
 *     pytorch_model_fsdp_0_rank{R}.bin   pytorch_model_fsdp.bin
 *     model_world_size_{W}_rank_{R}.pt   pytorch_model.bin   pytorch_model-{I}-of-{N}.bin
 *     ...rank{R}.pt                      model.pt, checkpoint.pt ...
 *     hf_model_{I}_{EPOCH}.pt
 *
 * Each holds a dict of DTensors, ShardedTensors or plain tensors; a piece knows its box by itself.
 * Nothing but a name says how many files there are, so coverage decides. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/mem.h"
#include "base/par.h"
#include "base/sort.h"
#include "base/str.h"
#include "base/take.h"
#include "container/config.h"
#include "container/torch_file.h"
#include "format/pieces.h"
#include "format/reader.h"
#include "format/torch/piece.h"

/* The information in a file's name. */
struct rank_name {
    uint64_t rank, world; /* world 0: the name does not say it */
    bool full;            /* one file for all ranks */
    bool part;            /* I of N parts of one model, which have no tensor in common */
    uint64_t epoch;       /* of a part, where several epochs may be in one folder; else 0 */
    bool common;          /* a common name, which users may have given to other files */
};

static bool is_extension(const char *s)
{
    return strcmp(s, ".pt") == 0 || strcmp(s, ".pth") == 0 || strcmp(s, ".bin") == 0;
}

/* Parse pytorch_model-00001-of-00002.bin; its parts are treated like files of ranks. torchtune
 * calls them model- and ft-model-. */
static bool parse_part(const char *s, struct rank_name *ret)
{
    uint64_t part;

    if ((!ckpt_take_text(&s, "pytorch_model-") && !ckpt_take_text(&s, "model-") &&
         !ckpt_take_text(&s, "ft-model-")) ||
        !ckpt_take_u64(&s, &part) || !ckpt_take_text(&s, "-of-") ||
        !ckpt_take_u64(&s, &ret->world) || strcmp(s, ".bin") != 0 || part == 0 || part > ret->world)
        return false;
    ret->rank = part - 1;
    return ret->part = ret->common = true;
}

/* Parse hf_model_0001_0.pt, the first part that torchtune wrote in epoch 0. The name does not say
 * how many parts there are. */
static bool parse_epoch(const char *s, struct rank_name *ret)
{
    uint64_t part;

    if (!ckpt_take_text(&s, "hf_model_") || !ckpt_take_u64(&s, &part) || !ckpt_take_text(&s, "_") ||
        !ckpt_take_u64(&s, &ret->epoch) || strcmp(s, ".pt") != 0 || part == 0)
        return false;
    ret->rank = part - 1;
    return ret->part = ret->common = true;
}

/* Parse common names: the whole model in one file, or the part of one rank. */
static bool parse_common(const char *name, struct rank_name *ret)
{
    static const char *const wholes[] = {"pytorch_model", "model", "checkpoint", "state_dict"};
    static const char *const others[] = {"optim", "rng", "random", "sched", "extra", "data"};
    const char *s = name;

    ret->common = true;
    for (size_t i = 0; i < sizeof wholes / sizeof wholes[0]; i++)
        if (ckpt_has_prefix(name, wholes[i]) && is_extension(name + strlen(wholes[i])))
            return ret->full = true;
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++)
        if (strstr(name, others[i]))
            return false;
    if (!(s = strstr(name, "rank")))
        return false;
    s += strlen("rank");
    s += *s == '_' || *s == '-';
    return ckpt_take_u64(&s, &ret->rank) && is_extension(s);
}

/* Parse a name. False: it is not the name of such a file, or it belongs to another model than the
 * first file. */
static bool parse_name(const char *name, struct rank_name *ret)
{
    const char *s = name;
    uint64_t model;

    *ret = (struct rank_name){0};
    if (parse_part(s, ret))
        return true;
    *ret = (struct rank_name){0};
    if (parse_epoch(s, ret))
        return true;
    *ret = (struct rank_name){0};
    if (ckpt_take_text(&s, "model_world_size_"))
        return ckpt_take_u64(&s, &ret->world) && ckpt_take_text(&s, "_rank_") &&
               ckpt_take_u64(&s, &ret->rank) && strcmp(s, ".pt") == 0 && ret->rank < ret->world;
    if (!ckpt_take_text(&s, "pytorch_model_fsdp"))
        return parse_common(name, ret);
    if (strcmp(s, ".bin") == 0)
        return ret->full = true;
    if (!ckpt_has_prefix(s, "_rank") &&
        !(ckpt_take_text(&s, "_") && ckpt_take_u64(&s, &model) && model == 0))
        return false;
    return ckpt_take_text(&s, "_rank") && ckpt_take_u64(&s, &ret->rank) && strcmp(s, ".bin") == 0;
}

/* Is it a file of torch.save under a name of its own ("best.pt", "last.ckpt"), and not one of a
 * trainer's state? */
static bool is_any_model(const char *name)
{
    static const char *const ends[] = {".pt", ".pth", ".ckpt"};
    static const char *const others[] = {"optim",         "rng",         "random",      "sched",
                                         "scaler",        "trainer",     "args",        "data",
                                         "model_weights", "train_state", "consolidated"};
    bool is = false;

    for (size_t i = 0; i < sizeof ends / sizeof ends[0]; i++)
        is |= ckpt_has_suffix(name, ends[i]);
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++)
        is &= strstr(name, others[i]) == NULL;
    return is && name[0] != '.';
}

struct file {
    const char *name;
    struct rank_name is;
    struct ckpt_source *source;
    struct ckpt_rank_pieces pieces;
    uint32_t index; /* in the catalogue */
};

/* A tensor and its pieces in the files. */
struct whole {
    struct ckpt_rank_holder first; /* its piece says name, shape and dtype */
    struct ckpt_pieces pieces;
    CKPT_VEC(struct ckpt_rank_holder) holder; /* of each box, the first */
};

struct load {
    struct ckpt_dir *dir;
    const struct ckpt_reader_options *opt;
    CKPT_VEC(struct file) files;
    CKPT_VEC(struct whole) wholes;
    struct ckpt_map by_name;
    CKPT_VEC(struct ckpt_rank_copy) copies;
    struct ckpt_catalog *cat;
    bool only;             /* the file has a name of its own, and is the only one */
    const char *optimizer; /* the name of a file of an optimizer's states; NULL: there is none */
};

static void load_release(struct load *l)
{
    for (size_t i = 0; i < l->files.len; i++) {
        ckpt_source_unref(l->files.ptr[i].source);
        ckpt_rank_pieces_release(&l->files.ptr[i].pieces);
    }
    for (size_t i = 0; i < l->wholes.len; i++) {
        ckpt_pieces_release(&l->wholes.ptr[i].pieces);
        ckpt_vec_release(&l->wholes.ptr[i].holder);
    }
    ckpt_vec_release(&l->files);
    ckpt_vec_release(&l->wholes);
    ckpt_vec_release(&l->copies);
    ckpt_map_release(&l->by_name);
}

/* ---- which files ---- */

static int file_cmp(const void *a, const void *b)
{
    const struct file *p = a, *q = b;
    return ckpt_u64_cmp(p->is.rank, q->is.rank);
}

static bool ends_in_digit(const char *name)
{
    const char last = name[strlen(name) - 1];

    return last >= '0' && last <= '9';
}

/* Take the only file that is_any_model, if there is exactly one. Beside folders with numbers, which
 * may be steps, it may be anything. */
static int take_only(struct load *l, struct ckpt_entries *entries, struct ckpt_err *err)
{
    struct file *f = NULL;
    struct ckpt_entry e;
    size_t n = 0;

    for (entries->at = 0; ckpt_entries_next(entries, &e);) {
        if (e.kind == CKPT_ENTRY_DIR && ends_in_digit(e.name))
            n = 2;
        if (e.kind != CKPT_ENTRY_FILE || !is_any_model(e.name))
            continue;
        if (n++ == 0 &&
            (ckpt_vec_add(&l->files, &f) < 0 || !(f->name = ckpt_dir_intern(l->dir, e.name))))
            return ckpt_nomem(err);
    }
    if (n > 1)
        l->files.len = 0;
    else if (n == 1)
        f->is = (struct rank_name){.full = true, .common = true};
    l->only = n == 1;
    return 0;
}

/* Keep the files of the last epoch, if there are several in the folder. */
static void keep_last_epoch(struct load *l)
{
    uint64_t last = 0;
    size_t kept = 0;

    for (size_t i = 0; i < l->files.len; i++)
        last = ckpt_max_u64(last, l->files.ptr[i].is.epoch);
    for (size_t i = 0; i < l->files.len; i++)
        if (l->files.ptr[i].is.epoch == last)
            l->files.ptr[kept++] = l->files.ptr[i];
    if (l->cat && kept < l->files.len)
        ckpt_catalog_warn(l->cat,
                          "left out: %zu files of earlier epochs than %" PRIu64
                          ", which is shown: to see another epoch, put its files into a folder "
                          "of their own",
                          l->files.len - kept, last);
    l->files.len = kept;
}

/* List the files by rank. If there are names of a framework, files with common names are ignored.
 * Without either, a file that is alone is the model. */
static int list_files(struct load *l, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_entries_release) struct ckpt_entries entries = {0};
    struct ckpt_entry e;
    struct rank_name is;
    struct file *f;
    size_t kept = 0;

    if (ckpt_entries_read(l->dir, &entries, err) < 0)
        return -1;
    while (ckpt_entries_next(&entries, &e)) {
        if (e.kind == CKPT_ENTRY_DIR)
            continue;
        if (!l->optimizer && ckpt_has_prefix(e.name, "optim") &&
            !(l->optimizer = ckpt_dir_intern(l->dir, e.name)))
            return ckpt_nomem(err);
        if (!parse_name(e.name, &is))
            continue;
        if (ckpt_vec_add(&l->files, &f) < 0 || !(f->name = ckpt_dir_intern(l->dir, e.name)))
            return ckpt_nomem(err);
        f->is = is;
    }
    if (!l->files.len && take_only(l, &entries, err) < 0)
        return -1;
    for (size_t i = 0; i < l->files.len; i++)
        if (!l->files.ptr[i].is.common)
            l->files.ptr[kept++] = l->files.ptr[i];
    if (kept)
        l->files.len = kept;
    keep_last_epoch(l);
    ckpt_sort(l->files.ptr, l->files.len, file_cmp);
    return 0;
}

/* Check that there is one file for each of the ranks 0 to W-1 of one world. */
static int check_files(struct load *l, struct ckpt_err *err)
{
    const struct file *f = l->files.ptr;

    for (size_t i = 0; i < l->files.len; i++) {
        if (f[i].is.world != f[0].is.world || f[i].is.full != f[0].is.full ||
            (i && f[i].is.rank == f[i - 1].is.rank))
            return ckpt_fail(err, CKPT_CONFLICT,
                             "'%s' holds files of several saves ('%s', '%s'): remove the stale "
                             "ones",
                             ckpt_dir_path(l->dir), f[0].name, f[i].name);
        if (f[i].is.rank != i)
            return ckpt_fail(err, CKPT_MISSING,
                             "'%s': the file of rank %zu, before '%s', is missing",
                             ckpt_dir_path(l->dir), i, f[i].name);
    }
    if (f[0].is.world && l->files.len != f[0].is.world)
        return ckpt_fail(err, CKPT_MISSING,
                         "'%s': %" PRIu64 " ranks wrote, the file of rank %zu is missing",
                         ckpt_dir_path(l->dir), f[0].is.world, l->files.len);
    return 0;
}

static int read_one(void *ctx, size_t i, struct ckpt_err *err)
{
    struct load *l = ctx;
    struct file *f = &l->files.ptr[i];

    if (ckpt_source_file_new(l->dir, f->name, l->opt->pool, &f->source, err) < 0)
        return -1;
    return ckpt_rank_pieces_read(f->source, f->is.rank, &f->pieces, err) < 0
               ? ckpt_err_in(err, "'%s/%s'", ckpt_dir_path(l->dir), f->name)
               : 0;
}

/* ---- tensors ---- */

static int fail_shape(const struct load *l, const struct ckpt_rank_holder *a,
                      const struct ckpt_rank_holder *b, struct ckpt_err *err)
{
    const struct ckpt_rank_piece *p = a->piece, *q = b->piece;

    return ckpt_fail(err, CKPT_CONFLICT, "'%s': tensor '%s' is %s %s in '%s', but %s %s in '%s'",
                     ckpt_dir_path(l->dir), p->name, ckpt_dtype_name(p->dtype),
                     ckpt_shape_text(p->dim, p->rank).text, a->name, ckpt_dtype_name(q->dtype),
                     ckpt_shape_text(q->dim, q->rank).text, b->name);
}

/* Find the tensor, or add it. */
static int find_whole(struct load *l, const struct ckpt_rank_holder *h, struct whole **ret,
                      struct ckpt_err *err)
{
    const struct ckpt_rank_piece *p = h->piece;
    const uint32_t at = ckpt_map_add(&l->by_name, p->name, (uint32_t)l->wholes.len);

    if (at == CKPT_NONE || (at == l->wholes.len && ckpt_vec_add(&l->wholes, ret) < 0))
        return ckpt_nomem(err);
    *ret = &l->wholes.ptr[at];
    if (!(*ret)->first.piece)
        (*ret)->first = *h;
    const struct ckpt_rank_piece *first = (*ret)->first.piece;
    return p->dtype == first->dtype && p->rank == first->rank &&
                   memcmp(p->dim, first->dim, p->rank * sizeof *p->dim) == 0
               ? 0
               : fail_shape(l, &(*ret)->first, h, err);
}

static int add_piece(struct load *l, const struct file *f, const struct ckpt_rank_piece *p,
                     struct ckpt_err *err)
{
    const struct ckpt_rank_holder h = {f->name, f->source, p};
    struct whole *w = NULL;

    if (find_whole(l, &h, &w, err) < 0)
        return -1;
    if (ckpt_box_numel(&p->box) == 0)
        return 0;
    for (size_t i = 0; i < w->holder.len; i++) {
        const struct ckpt_rank_copy copy = {w->holder.ptr[i], h, .part = f->is.part};
        if (ckpt_box_eq(&w->pieces.box.ptr[i], &p->box))
            return ckpt_vec_push(&l->copies, copy) < 0 ? ckpt_nomem(err) : 0;
    }
    if (ckpt_vec_push(&w->holder, h) < 0)
        return ckpt_nomem(err);
    return ckpt_pieces_add(&w->pieces, p->dim, &p->box, f->index, p->off, p->stride, err);
}

static int add_pieces(struct load *l, struct ckpt_err *err)
{
    for (size_t i = 0; i < l->files.len; i++) {
        struct file *f = &l->files.ptr[i];
        if ((f->index = ckpt_catalog_add_source(l->cat, f->source, err)) == UINT32_MAX)
            return -1;
        for (size_t k = 0; k < f->pieces.piece.len; k++)
            if (add_piece(l, f, &f->pieces.piece.ptr[k], err) < 0)
                return -1;
    }
    return 0;
}

static int add_tensor(void *ctx, size_t i, struct ckpt_err *err)
{
    struct load *l = ctx;
    const struct whole *w = &l->wholes.ptr[i];
    const struct ckpt_rank_piece *p = w->first.piece;
    bool gap;

    if (ckpt_pieces_cover(&w->pieces, l->cat, p->dim, p->rank, &gap, err) < 0)
        return ckpt_err_in(err, "'%s': tensor '%s' in the files of %zu ranks",
                           ckpt_dir_path(l->dir), p->name, l->files.len);
    return ckpt_pieces_catalog(&w->pieces, l->cat, p->name, p->dtype, p->dim, p->rank, err);
}

/* ---- verl's adapters ---- */

#define META "lora_train_meta.json"

/* lora_train_meta.json of verl has the numbers of the LoRA adapter in a checkpoint of a PEFT model:
 * make the adapter_config.json that verl's model_merger makes, less target_modules and the keys
 * that have PEFT's defaults: r, lora_alpha and task_type. *ret is NULL if there is no such file, or
 * the file has no numbers. */
static int verl_lora_config(const struct ckpt_dir *dir, json_t **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *meta = NULL;

    if (ckpt_config_read_if(dir, META, CKPT_CONFIG_MAX_BYTES, &meta, err) < 0)
        return -1;
    json_t *r = json_object_get(meta, "r"), *alpha = json_object_get(meta, "lora_alpha");
    const char *task = ckpt_json_str(meta, "task_type");
    if (!json_is_integer(r) || !json_is_number(alpha))
        return 0;
    *ret = json_pack("{s:s, s:s?, s:O, s:O}", "peft_type", "LORA", "task_type", task, "r", r,
                     "lora_alpha", alpha);
    return *ret ? 0 : ckpt_nomem(err);
}

/* ---- the reader ---- */

/* Parts that have an index: compare them with it, as transformers does. */
static int check_index(struct load *l, struct ckpt_err *err)
{
    static const char name[] = "pytorch_model.bin.index.json";
    ckpt_cleanup(ckpt_weight_map_unrefp) struct ckpt_weight_map *index = NULL;

    if (!l->files.ptr[0].is.part || !ckpt_dir_has_file(l->dir, name))
        return 0;
    return ckpt_weight_map_read(l->dir, name, ckpt_reader_refuse_index, &index, err) < 0
               ? -1
               : ckpt_reader_check_map(index, name, l->dir, l->opt, l->cat, err);
}

/* Refuse files that have no tensors, such as those of modules that were saved as objects. */
static int check_any(const struct load *l, struct ckpt_err *err)
{
    const struct file *f = &l->files.ptr[0];
    const char *what = f->pieces.other ? f->pieces.other : f->pieces.states;

    return l->wholes.len ? 0
                         : ckpt_fail(err, CKPT_UNSUPPORTED,
                                     "'%s/%s' has no tensors under names%s%s%s: save a model's "
                                     "state_dict()",
                                     ckpt_dir_path(l->dir), f->name, what ? ", only '" : "",
                                     what ? what : "", what ? "'" : "");
}

/* Tell what the raw view leaves out. Nothing in these files says which parameters an optimizer's
 * states belong to. */
static void tell_left_out(const struct load *l)
{
    const struct file *f = &l->files.ptr[0];

    if (l->opt->states && f->pieces.other)
        ckpt_catalog_warn(l->cat,
                          "left out: '%s' in '%s' (objects and lists, in which no tensor has "
                          "a name)",
                          f->pieces.other, f->name);
    if (l->opt->states && f->pieces.states)
        ckpt_catalog_warn(l->cat,
                          "left out: the optimizer's states ('%s' in '%s'): of such files, only "
                          "weights are shown",
                          f->pieces.states, f->name);
    else if (l->opt->states && l->optimizer)
        ckpt_catalog_warn(l->cat,
                          "left out: the optimizer's states ('%s'): of such files, only weights "
                          "are shown",
                          l->optimizer);
}

static int rank_files_load(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                           struct ckpt_facts *facts, struct ckpt_catalog *cat, struct ckpt_err *err)
{
    ckpt_cleanup(load_release) struct load l = {.dir = dir, .opt = opt, .cat = cat};

    if (list_files(&l, err) < 0)
        return -1;
    if (l.files.len == 0)
        return ckpt_fail(err, CKPT_MISSING, "'%s' has no file of any rank", ckpt_dir_path(dir));
    if (check_files(&l, err) < 0 || ckpt_parallel(l.files.len, 0, read_one, &l, err) < 0 ||
        add_pieces(&l, err) < 0 || check_any(&l, err) < 0 ||
        ckpt_rank_copies_check(l.copies.ptr, l.copies.len, opt, ckpt_dir_path(dir), cat, err) < 0 ||
        ckpt_reader_add_each(opt, cat, l.wholes.len, add_tensor, &l, err) < 0 ||
        check_index(&l, err) < 0 || verl_lora_config(dir, &facts->adapter_config, err) < 0)
        return -1;
    tell_left_out(&l);
    ckpt_json_set(&cat->about, "format", json_string("rank_files"));
    ckpt_json_set(&cat->about, "optimizer", json_boolean(l.optimizer != NULL));
    return 0;
}

/* The values besides tensors in the first file. */
static int rank_files_objects(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                              json_t *out, struct ckpt_err *err)
{
    ckpt_cleanup(load_release) struct load l = {.dir = dir, .opt = opt};

    if (list_files(&l, err) < 0)
        return -1;
    return l.files.len ? ckpt_torch_objects_of(dir, l.files.ptr[0].name, opt->pool, "", out, err)
                       : 0;
}

static enum ckpt_evidence rank_files_probe(struct ckpt_dir *dir)
{
    ckpt_cleanup(load_release) struct load l = {.dir = dir};

    if (list_files(&l, NULL) < 0 || l.files.len == 0 || l.only)
        return CKPT_NOT_MINE;
    return l.files.ptr[0].is.common ? CKPT_BY_COMMON_NAMES : CKPT_BY_NAMES;
}

/* Is there one file that may be a model, under any name? */
static enum ckpt_evidence rank_files_guess(struct ckpt_dir *dir)
{
    ckpt_cleanup(load_release) struct load l = {.dir = dir};

    return list_files(&l, NULL) == 0 && l.only ? CKPT_BY_COMMON_NAMES : CKPT_NOT_MINE;
}

/* ---- verl's run: global_step_N/actor, global_step_N/critic, and a tracker ---- */

static char *rank_files_latest(struct ckpt_dir *run)
{
    return ckpt_tracker_latest(run, CKPT_TRACKER_GLOBAL_STEP);
}

/* The tracker is written when the files of all ranks and of all models are there. */
static bool rank_files_finished(struct ckpt_dir *dir, const char *name, const char *latest)
{
    (void)dir;
    return !ckpt_tracker_is_newer(name, latest, CKPT_TRACKER_GLOBAL_STEP);
}

/* Where verl's Megatron runs put the model alone, if it is saved as Hugging Face's. */
static const char *const inner_models[] = {
    "actor", "huggingface", "model/huggingface", "actor/huggingface", "actor/model/huggingface",
    NULL};
static const char *const rewrites[] = {"fsdp_config.json", NULL};
static const char *const step_names[] = {"global_step*", NULL}; /* verl's */

const struct ckpt_reader ckpt_reader_rank_files = {
    .name = "rank_files",
    .inner_models = inner_models,
    .step_names = step_names,
    .rewrites = rewrites,
    .latest = rank_files_latest,
    .finished = rank_files_finished,
    .probe = rank_files_probe,
    .guess = rank_files_guess,
    .load = rank_files_load,
    .objects = rank_files_objects,
    .side_files = "huggingface",
};
