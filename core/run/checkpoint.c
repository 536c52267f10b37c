/* SPDX-License-Identifier: Apache-2.0 */
/* Opening a view of one checkpoint. */
#include "run/checkpoint.h"

#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/mem.h"
#include "base/str.h"
#include "format/writers.h"
#include "model/files.h"
#include "model/model.h"
#include "model/naming.h"
#include "run/save.h"

enum { SLAB_BUDGET = 256 * 1024 * 1024 };

/* ---- shared ---- */

int ckpt_shared_new(const struct ckpt_options *opt, struct ckpt_shared **ret, struct ckpt_err *err)
{
    struct ckpt_shared *s;

    if (ckpt_options_check(opt, err) < 0)
        return -1;
    if (!(s = calloc(1, sizeof *s)))
        return ckpt_nomem(err);
    atomic_init(&s->refs, 1);
    (void)pthread_mutex_init(&s->eval, NULL);
    if (ckpt_remarks_init(&s->remarks, err) < 0 || ckpt_options_copy(opt, &s->opt, err) < 0 ||
        ckpt_fdpool_new(0, &s->pool, err) < 0 || ckpt_slabs_new(SLAB_BUDGET, &s->slabs, err) < 0 ||
        ckpt_recipes_load(s->opt->recipe, &s->recipes, err) < 0 ||
        (s->opt->key_mapping && ckpt_renames_load(s->opt->key_mapping, &s->renames, err) < 0) ||
        (s->opt->base &&
         ckpt_base_open(s->opt->base, s->opt->follow_symlinks ? CKPT_LINKS_ANY : CKPT_LINKS_BENEATH,
                        s->pool, opt->recording, &s->base, err) < 0)) {
        ckpt_shared_unref(s);
        return -1;
    }
    *ret = s;
    return 0;
}

void ckpt_shared_unref(struct ckpt_shared *s)
{
    if (!s || atomic_fetch_sub(&s->refs, 1) != 1)
        return;
    ckpt_base_free(s->base);
    ckpt_recipes_free(s->recipes);
    ckpt_renames_free(s->renames);
    ckpt_slabs_free(s->slabs);
    ckpt_fdpool_unref(s->pool);
    ckpt_options_free(s->opt);
    ckpt_remarks_release(&s->remarks);
    (void)pthread_mutex_destroy(&s->eval);
    free(s);
}

struct ckpt_view *ckpt_view_hold(struct ckpt_view *view)
{
    atomic_fetch_add(&view->refs, 1);
    return view;
}

void ckpt_view_release(struct ckpt_view *view)
{
    if (!view || atomic_fetch_sub(&view->refs, 1) != 1)
        return;
    ckpt_slabs_forget(view->shared->slabs, &view->reading);
    ckpt_vtree_free(view->tree);
    ckpt_catalog_free(view->cat);
    ckpt_catalog_free(view->adapter);
    ckpt_save_unref(view->save);
    ckpt_dir_unref(view->dir);
    ckpt_facts_release(&view->facts);
    json_decref(view->about);
    json_decref(view->config);
    json_decref(view->framework);
    json_decref(view->warnings);
    json_decref(view->base_names);
    free(view->recipe);
    free(view->source);
    free(view->name);
    ckpt_shared_unref(view->shared);
    free(view);
}

/* ---- identity ---- */

/* The generation: the same checkpoint with the same options has the same number in every mount. */
static uint64_t generation_of(const struct ckpt_view *v, const char *step)
{
    uint64_t h = XXH3_64bits_withSeed(step, strlen(step), ckpt_options_hash(v->shared->opt));

    for (size_t i = 0; i < v->cat->sources.len; i++) {
        struct ckpt_file_id id;
        if (ckpt_source_file_id(v->cat->sources.ptr[i], &id)) {
            uint64_t part[3] = {id.size, (uint64_t)id.mtime_ns, (uint64_t)id.ctime_ns};
            h = XXH3_64bits_withSeed(part, sizeof part, h);
        }
    }
    return h;
}

static char *source_text(const struct ckpt_view *v, const char *step)
{
    const char *format = ckpt_json_str(v->about, "format"),
               *version = ckpt_json_str(v->about, "version");
    uint64_t number;
    char digits[32] = "";

    if (ckpt_json_u64(v->about, "step", &number))
        (void)snprintf(digits, sizeof digits, "%llu", (unsigned long long)number);
    ckpt_cleanup(ckpt_freep) char *printable = ckpt_printable(step);
    const char *name = *digits ? digits : printable;
    if (!name)
        return NULL;
    return ckpt_asprintf("%s%s%s%s%s", format ? format : "?", version ? " " : "",
                         version ? version : "", *name ? ", step " : "", name);
}

/* ---- open ---- */

/* Return memory to the system: opening reads many headers in several threads, and what remains in
 * malloc's pools is not needed again. */
static void give_back_memory(void)
{
#ifdef __GLIBC__
    (void)malloc_trim(0);
#endif
}

/* Read the catalogue, and check that it is of one save. */
static int read_save(struct ckpt_view *v, const struct ckpt_reader *reader,
                     const struct ckpt_reader_options *opt, const struct ckpt_save *before,
                     struct ckpt_catalog **ret, struct ckpt_err *err)
{
    const struct ckpt_save_marker marker = ckpt_save_marker_of(reader, v->dir);
    ckpt_cleanup(ckpt_catalog_freep) struct ckpt_catalog *cat = NULL;
    struct ckpt_err mixed = {0};
    bool touched;

    if (ckpt_catalog_new(&cat, err) < 0 || reader->load(v->dir, opt, &v->facts, cat, err) < 0 ||
        ckpt_save_new(cat, v->dir, reader, &marker, atomic_load(&v->shared->watched), &v->save,
                      err) < 0)
        return -1;
    if (ckpt_save_marker_of(reader, v->dir).hash != marker.hash)
        return ckpt_fail(err, CKPT_STALE, "'%s' was saved again while it was opened: try again",
                         ckpt_dir_path(v->dir));
    if (ckpt_save_accept(v->save, before, cat, &touched, &mixed) == 0) {
        if (touched && ckpt_save_settle(v->save, v->shared->pool, err) < 0)
            return -1;
    } else {
        if (!v->shared->opt->allow_mixed || mixed.code != CKPT_CONFLICT)
            return ckpt_err_move(err, &mixed);
        ckpt_catalog_warn(cat, "%s", mixed.text);
    }
    if (!v->facts.files_at) {
        v->facts.files_at = reader->side_files;
        v->facts.files = CKPT_FILES_TOKENIZER;
    }
    *ret = ckpt_steal(&cat);
    return 0;
}

static bool wants_masters(const struct ckpt_options *opt)
{
    return opt->dtype_rule == CKPT_DTYPE_CAST && opt->dtype == CKPT_F32;
}

/* Free the facts, which may be large, once they have been used. */
static void forget_facts(struct ckpt_view *v)
{
    ckpt_facts_release(&v->facts);
    json_decref(v->base_names);
    v->base_names = NULL;
}

static int open_into(struct ckpt_view *v, const char *step, const struct ckpt_save *before,
                     struct ckpt_err *err)
{
    const struct ckpt_options *opt = v->shared->opt;
    const struct ckpt_naming naming = ckpt_naming_of(ckpt_recipes_types(v->shared->recipes));
    struct ckpt_reader_options ropt = {
        .pool = v->shared->pool,
        .log = &opt->log,
        .naming = &naming,
        .allow_partial = opt->allow_partial,
        .allow_mixed = opt->allow_mixed,
        .states = opt->raw,
        .masters = wants_masters(opt),
    };
    ckpt_cleanup(ckpt_catalog_freep) struct ckpt_catalog *src = NULL;
    const struct ckpt_reader *reader = ckpt_reader_probe(v->dir, err);

    if (!(v->name = strdup(*step ? step : ckpt_dir_real_name(v->dir))))
        return ckpt_nomem(err);
    if (!reader || read_save(v, reader, &ropt, before, &src, err) < 0 ||
        ckpt_view_make_model(v, &src, err) < 0 || ckpt_view_lay_out(v, err) < 0)
        return -1;
    forget_facts(v);
    v->generation = generation_of(v, step);
    v->source = source_text(v, step);
    return v->source ? 0 : ckpt_nomem(err);
}

int ckpt_checkpoint_explain(struct ckpt_view *v, const char *tensor, json_t **ret,
                            struct ckpt_err *err)
{
    const struct ckpt_shared *s = v->shared;
    const struct ckpt_naming naming = ckpt_naming_of(ckpt_recipes_types(v->shared->recipes));
    const struct ckpt_reader_options ropt = {.pool = s->pool,
                                             .log = &s->opt->log,
                                             .naming = &naming,
                                             .allow_partial = s->opt->allow_partial,
                                             .allow_mixed = s->opt->allow_mixed,
                                             .masters = wants_masters(s->opt)};
    ckpt_cleanup(ckpt_catalog_freep) struct ckpt_catalog *src = NULL;
    ckpt_cleanup(ckpt_facts_release) struct ckpt_facts facts = {0};
    const struct ckpt_reader *reader = ckpt_reader_probe(v->dir, err);

    *ret = NULL;
    if (!v->recipe || (s->opt->output.writer && s->opt->output.writer->recipes))
        return 0; /* its rules know the hub's names only */
    if (!reader || ckpt_catalog_new(&src, err) < 0 ||
        reader->load(v->dir, &ropt, &facts, src, err) < 0 || ckpt_view_find_names(v, src, err) < 0)
        return -1;
    const struct ckpt_recipe_options opt = ckpt_view_recipe_options(v, src);
    return ckpt_recipe_explain(s->recipes, src, &opt, tensor, ret, err);
}

int ckpt_checkpoint_check(const struct ckpt_view *view, struct ckpt_err *err)
{
    if (!atomic_load(&view->mixed))
        return 0;
    return ckpt_fail(err, CKPT_STALE,
                     "'%s' was opened while it was being saved again, so that its shards may be of "
                     "two saves: open it again",
                     ckpt_dir_path(view->dir));
}

int ckpt_checkpoint_annotations(const struct ckpt_view *v, struct ckpt_annotations **ret,
                                struct ckpt_err *err)
{
    struct ckpt_shared *s = v->shared;
    int rc;

    (void)pthread_mutex_lock(&s->eval);
    rc = ckpt_annotations_new(s->recipes, v->cat, s->opt->raw ? NULL : v->config, ret, err);
    (void)pthread_mutex_unlock(&s->eval);
    return rc;
}

int ckpt_checkpoint_open(struct ckpt_shared *shared, struct ckpt_dir *dir, const char *step,
                         const struct ckpt_save *before, struct ckpt_view **ret,
                         struct ckpt_err *err)
{
    struct ckpt_view *v = calloc(1, sizeof *v);

    if (!v)
        return ckpt_nomem(err);
    atomic_init(&v->refs, 1);
    atomic_fetch_add(&shared->refs, 1);
    v->shared = shared;
    v->dir = ckpt_dir_ref(dir);
    v->reading = (struct ckpt_reading){.slabs = shared->slabs, .stats = &shared->stats};
    if (open_into(v, step, before, err) < 0) {
        ckpt_view_release(v);
        return -1;
    }
    give_back_memory();
    ckpt_remarks_add(&shared->remarks, &shared->opt->log, step, v->warnings);
    *ret = v;
    return 0;
}
