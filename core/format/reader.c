/* SPDX-License-Identifier: Apache-2.0 */
/* The list of readers, and functions that they share: facts, pointer files, leaving out tensors. */
#include "format/reader.h"

#include <fnmatch.h>
#include <stddef.h>
#include <string.h>

#include "base/ckd.h"
#include "base/mem.h"

enum { MAX_POINTER = 4096 };

int ckpt_facts_copy(const struct ckpt_facts *facts, struct ckpt_facts *ret)
{
    const json_t *const of[] = {facts->dtypes, facts->metadata, facts->adapter_config};
    json_t **const to[] = {&ret->dtypes, &ret->metadata, &ret->adapter_config};
    bool good = true;

    *ret = *facts;
    ret->weight_map = ckpt_weight_map_ref(facts->weight_map);
    ret->home = ckpt_dir_ref(facts->home);
    for (size_t i = 0; i < sizeof of / sizeof *of; i++) {
        *to[i] = of[i] ? json_deep_copy(of[i]) : NULL;
        good &= !of[i] || *to[i];
    }
    return good ? 0 : -1;
}

void ckpt_facts_release(struct ckpt_facts *facts)
{
    ckpt_weight_map_unref(facts->weight_map);
    ckpt_dir_unref(facts->home);
    json_decref(facts->dtypes);
    json_decref(facts->metadata);
    json_decref(facts->adapter_config);
    *facts = (struct ckpt_facts){0};
}

int ckpt_facts_map_all(struct ckpt_facts *facts, const struct ckpt_catalog *cat, const char *file,
                       struct ckpt_err *err)
{
    ckpt_weight_map_unref(ckpt_steal(&facts->weight_map));
    if (ckpt_weight_map_new(&facts->weight_map, err) < 0)
        return -1;
    for (size_t i = 0; i < cat->tensors.len; i++)
        if (ckpt_weight_map_put(facts->weight_map, cat->tensors.ptr[i].name, file, err) < 0)
            return -1;
    return 0;
}

int ckpt_reader_check_map(const struct ckpt_weight_map *map, const char *name,
                          const struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                          struct ckpt_catalog *cat, struct ckpt_err *err)
{
    for (size_t i = 0; i < map->files.len; i++)
        if (!ckpt_dir_has_file(dir, map->files.ptr[i]))
            return ckpt_fail(err, CKPT_MISSING, "'%s/%s' names the file '%s', which is not there",
                             ckpt_dir_path(dir), name, map->files.ptr[i]);
    for (size_t i = 0; i < map->tensors.len; i++) {
        const char *tensor = map->tensors.ptr[i].tensor;
        const char *file = map->files.ptr[map->tensors.ptr[i].file];
        if (ckpt_catalog_find(cat, tensor))
            continue;
        if (!opt->allow_partial)
            return ckpt_fail(err, CKPT_MISSING,
                             "'%s/%s' lacks tensor '%s', which the index maps to it",
                             ckpt_dir_path(dir), file, tensor);
        ckpt_catalog_warn(cat, "left out: '%s' is not in '%s'", tensor, file);
    }
    return 0;
}

struct ckpt_dir *ckpt_reader_folder(struct ckpt_dir *dir, const char *name)
{
    struct ckpt_dir *below = NULL;

    if (!*name)
        return ckpt_dir_ref(dir);
    return ckpt_dir_has_dir(dir, name) && ckpt_dir_open_below(dir, name, &below, NULL) == 0 ? below
                                                                                            : NULL;
}

static int keep_entry(void *ctx, const struct ckpt_entry *e, struct ckpt_err *err)
{
    struct ckpt_str *list = ctx;

    ckpt_listed_add(list, e);
    return list->failed ? ckpt_nomem(err) : 0;
}

int ckpt_entries_read(const struct ckpt_dir *dir, struct ckpt_entries *ret, struct ckpt_err *err)
{
    return ckpt_dir_list(dir, keep_entry, &ret->list, err);
}

void ckpt_entries_release(struct ckpt_entries *e) { ckpt_str_release(&e->list); }

bool ckpt_entries_next(struct ckpt_entries *e, struct ckpt_entry *ret)
{
    const char *begin = ckpt_str_get(&e->list), *at = begin + e->at;
    const bool more = ckpt_listed_next(&at, begin + e->list.len, ret);

    e->at = (size_t)(at - begin);
    return more;
}

int ckpt_reader_first(const struct ckpt_dir *dir, bool folders, const char *begin, const char *end,
                      char **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_entries_release) struct ckpt_entries entries = {0};
    struct ckpt_entry e;

    *ret = NULL;
    if (ckpt_entries_read(dir, &entries, err) < 0)
        return -1;
    while (ckpt_entries_next(&entries, &e))
        if ((e.kind == CKPT_ENTRY_DIR) == folders && ckpt_has_prefix(e.name, begin) &&
            ckpt_has_suffix(e.name, end))
            return (*ret = strdup(e.name)) ? 0 : ckpt_nomem(err);
    return 0;
}

char *ckpt_reader_pointer(const struct ckpt_dir *run, const char *name)
{
    static const char blanks[] = " \t\r\n";
    ckpt_cleanup(ckpt_freep) char *text = NULL;
    size_t len;

    if (!ckpt_dir_has_file(run, name) ||
        ckpt_dir_read_file(run, name, MAX_POINTER, &text, &len, NULL) < 0)
        return NULL;
    while (len && strchr(blanks, text[len - 1]))
        len--;
    const size_t before = ckpt_min_u64(strspn(text, blanks), len);
    return strndup(text + before, len - before);
}

bool ckpt_reader_is_staging(const char *name)
{
    static const char partial[] = "partial"; /* it begins names of partial trainings, too */
    static const char *const words[] = {"tmp",        "incomplete", partial,
                                        "unfinished", "inprogress", NULL};
    static const char between[] = "-_.";
    const size_t first = strcspn(name, between);

    for (size_t i = 0; words[i]; i++) {
        const size_t len = strlen(words[i]);
        const char *at = name + strlen(name);
        if (words[i] != partial && first == len && name[len] && strncmp(name, words[i], len) == 0)
            return true;
        /* at the end, also before numbers: of a process, or a time */
        while (at > name && strchr("0123456789-_.", at[-1]))
            at--;
        const size_t before = (size_t)(at - name);
        if (before > len && strncmp(at - len, words[i], len) == 0 &&
            strchr(between, at[-(ptrdiff_t)len - 1]))
            return true;
    }
    return false;
}

static bool matches(const char *name, const char *const *patterns)
{
    for (; patterns && *patterns; patterns++)
        if (fnmatch(*patterns, name, 0) == 0)
            return true;
    return false;
}

bool ckpt_reader_is_step_name(const char *name)
{
    for (const struct ckpt_reader *const *r = ckpt_reader_list; *r; r++)
        if (matches(name, (*r)->step_names))
            return true;
    return false;
}

bool ckpt_reader_is_state_file(const char *name)
{
    for (const struct ckpt_reader *const *r = ckpt_reader_list; *r; r++)
        if (matches(name, (*r)->state_files))
            return true;
    return false;
}

bool ckpt_reader_is_state(const char *name)
{
    for (const struct ckpt_reader *const *r = ckpt_reader_list; *r; r++)
        for (const char *const *begin = (*r)->states; begin && *begin; begin++)
            if (ckpt_has_prefix(name, *begin))
                return true;
    return false;
}

const char *ckpt_reader_refuse_index(const char *key)
{
    for (const struct ckpt_reader *const *r = ckpt_reader_list; *r; r++)
        if ((*r)->index_key && strcmp((*r)->index_key, key) == 0)
            return (*r)->index_why;
    return NULL;
}

int ckpt_reader_add_each(const struct ckpt_reader_options *opt, struct ckpt_catalog *cat, size_t n,
                         int (*add)(void *ctx, size_t i, struct ckpt_err *err), void *ctx,
                         struct ckpt_err *err)
{
    for (size_t i = 0; i < n; i++) {
        struct ckpt_err why = {0};
        if (add(ctx, i, &why) == 0)
            continue;
        if (!opt->allow_partial || why.code != CKPT_MISSING)
            return ckpt_err_move(err, &why);
        ckpt_catalog_warn(cat, "left out: %s", why.text);
    }
    return 0;
}

/* ---- trackers ---- */

#define TRACKER "latest_checkpointed_iteration.txt"

static const char *const prefixes[] = {
    [CKPT_TRACKER_ITER] = "iter_", [CKPT_TRACKER_GLOBAL_STEP] = "global_step_"};

char *ckpt_tracker_latest(struct ckpt_dir *run, enum ckpt_tracker_scheme scheme)
{
    ckpt_cleanup(ckpt_freep) char *word = ckpt_reader_pointer(run, TRACKER);
    ckpt_cleanup(ckpt_freep) char *verl = NULL; /* a step with verl's name */
    unsigned long long step;

    (void)ckpt_reader_first(run, true, prefixes[CKPT_TRACKER_GLOBAL_STEP], "", &verl, NULL);
    if (!word || !verl != (scheme != CKPT_TRACKER_GLOBAL_STEP))
        return NULL;
    word[strcspn(word, " \t\r\n")] = '\0';
    if (scheme == CKPT_TRACKER_ITER && strcmp(word, "release") == 0)
        return strdup(word);
    if (!ckpt_parse_u64(word, strlen(word), &step))
        return NULL;
    return scheme == CKPT_TRACKER_GLOBAL_STEP ? ckpt_asprintf("global_step_%llu", step)
                                              : ckpt_asprintf("iter_%07llu", step);
}

static bool step_of(const char *name, enum ckpt_tracker_scheme scheme, unsigned long long *ret)
{
    const size_t n = strlen(prefixes[scheme]);

    return ckpt_has_prefix(name, prefixes[scheme]) &&
           ckpt_parse_u64(name + n, strlen(name + n), ret);
}

bool ckpt_tracker_is_newer(const char *name, const char *latest, enum ckpt_tracker_scheme scheme)
{
    unsigned long long step, last;

    return latest && step_of(name, scheme, &step) && step_of(latest, scheme, &last) && step > last;
}

/* ---- the list ---- */

const struct ckpt_reader *const ckpt_reader_list[] = {
#define CKPT_READER(NAME, ...) &ckpt_reader_##NAME,
#include "format/readers.def"
#undef CKPT_READER
    NULL,
};

/* Does another reader, whose format is stored in this one's container, recognise the directory? */
static bool is_refined(const struct ckpt_reader *container, struct ckpt_dir *dir)
{
    for (const struct ckpt_reader *const *r = ckpt_reader_list; *r; r++)
        if ((*r)->container == container && (*r)->probe(dir) != CKPT_NOT_MINE)
            return true;
    return false;
}

/* Ask all readers, by their probes or (guess) by their guesses. Returns the one with most evidence;
 * *ret_tie is another with as much, or NULL. */
static const struct ckpt_reader *ask(struct ckpt_dir *dir, bool guess,
                                     const struct ckpt_reader **ret_tie)
{
    const struct ckpt_reader *best = NULL;
    enum ckpt_evidence most = CKPT_NOT_MINE;

    *ret_tie = NULL;
    for (const struct ckpt_reader *const *r = ckpt_reader_list; *r; r++) {
        ckpt_reader_probe_fn *fn = guess ? (*r)->guess : (*r)->probe;
        enum ckpt_evidence e = fn ? fn(dir) : CKPT_NOT_MINE;
        if (e == CKPT_NOT_MINE || e < most || is_refined(*r, dir))
            continue;
        *ret_tie = e == most ? best : NULL;
        best = *r;
        most = e;
    }
    return best;
}

const struct ckpt_reader *ckpt_reader_probe(struct ckpt_dir *dir, struct ckpt_err *err)
{
    const struct ckpt_reader *tie, *best = ask(dir, false, &tie);

    if (!best)
        best = ask(dir, true, &tie);
    if (!best && ckpt_dir_trouble(dir, err) < 0)
        return NULL;
    if (!best)
        (void)ckpt_fail(err, CKPT_MISSING, "'%s' is not a checkpoint of a known format",
                        ckpt_dir_path(dir));
    else if (tie)
        (void)ckpt_fail(err, CKPT_CONFLICT, "'%s' looks like a checkpoint of %s and of %s",
                        ckpt_dir_path(dir), tie->name, best->name);
    return tie ? NULL : best;
}

/* ---- what no reader reads ---- */

#define MAKERS_WAY                                                                                 \
    "take the files with transformers' names, if there are any, or convert these by "              \
    "transformers' script for the family (convert_*_weights_to_hf.py)"

/* An entry whose name has this beginning and this end. */
static const struct foreign {
    const char *begin, *end;
    const char *what, *way;
} foreigners[] = {
    {"", ".nemo", "an archive", "give the archive itself"},
    {"model_weights.ckpt", "", "a model that one rank of NeMo 1 saved",
     "convert it with NeMo's script (scripts/checkpoint_converters/convert_*_nemo_to_hf.py)"},
    {"", ".ckpt", "several models in one file each", "give the file itself"},
    {"", ".gguf", "a model in GGUF",
     "it is one file already; transformers reads it by from_pretrained(DIR, gguf_file=NAME)"},
    {"", ".msgpack", "a Flax model (JAX)",
     "load it with transformers 4 (from_flax=True) and save it with save_pretrained"},
    {"tf_model", ".h5", "a TensorFlow model",
     "load it with transformers 4 (from_tf=True) and save it with save_pretrained"},
    {"", ".data-00000-of-00001", "a TensorFlow checkpoint",
     "load it with transformers 4 (from_tf=True) and save it with save_pretrained"},
    {"consolidated", ".pth", "a model in its maker's own format", MAKERS_WAY},
    {"consolidated", ".safetensors", "a model in its maker's own format", MAKERS_WAY},
};

/* The file in which diffusers lists the models of a pipeline. */
#define PIPELINE "model_index.json"

bool ckpt_foreign_is_pipeline(const struct ckpt_dir *dir)
{
    return ckpt_dir_has_file(dir, PIPELINE);
}

/* UNSUPPORTED: which folders of the pipeline hold models. */
static int fail_pipeline(struct ckpt_dir *dir, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_entries_release) struct ckpt_entries entries = {0};
    ckpt_cleanup(ckpt_str_release) struct ckpt_str models = {0};
    struct ckpt_entry e;

    (void)ckpt_entries_read(dir, &entries, NULL);
    while (ckpt_entries_next(&entries, &e)) {
        ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *below = NULL;
        if (e.kind == CKPT_ENTRY_DIR && ckpt_dir_open_below(dir, e.name, &below, NULL) == 0 &&
            ckpt_reader_probe(below, NULL))
            ckpt_str_printf(&models, "%s'%s/%s'", models.len ? ", " : "", ckpt_dir_path(dir),
                            e.name);
    }
    return ckpt_fail(err, CKPT_UNSUPPORTED,
                     "'%s' is a diffusers pipeline (" PIPELINE "), whose folders are models and no "
                     "steps of a run: give one of them%s%s",
                     ckpt_dir_path(dir), models.len ? ", " : "", ckpt_str_get(&models));
}

int ckpt_foreign_check(struct ckpt_dir *dir, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_entries_release) struct ckpt_entries entries = {0};
    struct ckpt_entry e;

    if (ckpt_foreign_is_pipeline(dir))
        return fail_pipeline(dir, err);
    (void)ckpt_entries_read(dir, &entries, NULL);
    while (ckpt_entries_next(&entries, &e))
        for (size_t i = 0; i < sizeof foreigners / sizeof *foreigners; i++) {
            const struct foreign *f = &foreigners[i];
            if (e.kind == CKPT_ENTRY_FILE && ckpt_has_prefix(e.name, f->begin) &&
                ckpt_has_suffix(e.name, f->end))
                return ckpt_fail(err, CKPT_UNSUPPORTED,
                                 "'%s' holds %s ('%s'), and no checkpoint of a known format: %s",
                                 ckpt_dir_path(dir), f->what, e.name, f->way);
        }
    return 0;
}

int ckpt_foreign_tensor(const char *name, struct ckpt_err *err)
{
    const char *dot = strrchr(name, '.');

    if (strcmp(dot ? dot + 1 : name, "_flat_param") != 0)
        return 0;
    return ckpt_fail(
        err, CKPT_UNSUPPORTED,
        "'%s' is a flat parameter of FSDP1 (LOCAL_STATE_DICT), and the checkpoint does "
        "not say how to split it: save with SHARDED_STATE_DICT or FULL_STATE_DICT",
        name);
}
