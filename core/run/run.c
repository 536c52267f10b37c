/* SPDX-License-Identifier: Apache-2.0 */
/* Runs: which steps there are, which is the latest, and the views that are open. */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <xxhash.h>

#include <ckptfs/ckptfs.h>

#include "base/mem.h"
#include "base/str.h"
#include "ckpt/reader.h"
#include "run/checkpoint.h"

enum { KEPT_VIEWS = 2 }; /* open views that nobody but the run holds */

struct step {
    char *name;
    uint64_t generation;
    int64_t mtime_ns;
};

typedef CKPT_VEC(struct step) step_list;

/* A view that is open, or being opened. */
struct opened {
    char *step;
    uint64_t generation;
    struct ckpt_view *view; /* NULL: being opened */
    uint64_t used;          /* tick of the last use */
};

struct ckpt_run {
    struct ckpt_dir *dir;
    struct ckpt_shared *shared;
    bool is_folder;
    char *unfinished;     /* the last step that a scan found unfinished, for an error, or NULL */
    pthread_mutex_t lock; /* everything below */
    pthread_cond_t opened_one;
    step_list steps; /* oldest first; of a single checkpoint: one, named "" */
    char *latest;    /* NULL: there is no step */
    CKPT_VEC(struct opened) opened;
    uint64_t tick;
};

/* ---- scanning ---- */

static void steps_release(step_list *s)
{
    for (size_t i = 0; i < s->len; i++)
        free(s->ptr[i].name);
    ckpt_vec_release(s);
}

/* What a save, of any format, writes anew: if one of these changed, so did the checkpoint. */
static const char *const markers[] = {
    ".",
    "model_config.json",
    "checkpoint_metadata.json",
    "config.yaml",
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    ".metadata",
    "model",
    ".incomplete",
    "metadata.json",
    "common.pt",
    "run_config.yaml",
    "mp_rank_00/model_optim_rng.pt",
    "mp_rank_00_000/model_optim_rng.pt",
    "mp_rank_00_000_000/model_optim_rng.pt",
    "weights/metadata.json",
    "model_weights/metadata.json",
};

static uint64_t generation_of(const struct ckpt_dir *dir, int64_t *ret_mtime_ns)
{
    uint64_t h = 0;

    *ret_mtime_ns = 0;
    for (size_t i = 0; i < sizeof markers / sizeof markers[0]; i++) {
        struct ckpt_file_id id;
        if (!ckpt_dir_stat(dir, markers[i], &id))
            continue;
        uint64_t part[4] = {i, id.size, (uint64_t)id.mtime_ns, (uint64_t)id.ctime_ns};
        h = XXH3_64bits_withSeed(part, sizeof part, h);
        if (id.mtime_ns > *ret_mtime_ns)
            *ret_mtime_ns = id.mtime_ns;
    }
    return h;
}

struct scan {
    struct ckpt_dir *dir;
    char **latest; /* per reader: what its pointer file says, or NULL */
    step_list steps;
    char *unfinished; /* a step of which the save is not, or NULL */
};

static const char *latest_of(const struct scan *s, const struct ckpt_reader *reader)
{
    for (size_t i = 0; ckpt_readers[i]; i++)
        if (ckpt_readers[i] == reader)
            return s->latest[i];
    return NULL;
}

/* Links that point at one of the steps. */
static bool is_pointer(const char *name)
{
    static const char *const pointers[] = {"latest", "LATEST", "LOWEST_VAL"};

    for (size_t i = 0; i < sizeof pointers / sizeof pointers[0]; i++)
        if (strcmp(name, pointers[i]) == 0)
            return true;
    return false;
}

/* What a directory holds may lie one further down. */
static const char *const inner_models[] = {"actor", NULL}; /* verl's global_step_N */
static const char *const inner_runs[] = {"checkpoint", "checkpoints", NULL}; /* torchtitan's dump
                                                                                folder, accelerate's
                                                                                project */

/* The reader of *dir, or of the model in it, which becomes *dir then. As ckpt_reader_probe. */
static const struct ckpt_reader *probe_inside(struct ckpt_dir **dir, struct ckpt_err *err)
{
    const struct ckpt_reader *reader = ckpt_reader_probe(*dir, err);

    for (size_t i = 0; !reader && err->code != CKPT_CONFLICT && inner_models[i]; i++) {
        ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *inner = NULL;
        struct ckpt_err ignored = {0};
        if (ckpt_dir_open_below(*dir, inner_models[i], &inner, &ignored) < 0 ||
            !(reader = ckpt_reader_probe(inner, &ignored)))
            continue;
        ckpt_dir_unref(*dir);
        *dir = ckpt_steal(&inner);
    }
    return reader;
}

/* A directory that cannot be opened or recognised now is no step; it may become one. */
static int scan_entry(void *ctx, const struct ckpt_entry *e, struct ckpt_err *err)
{
    struct scan *s = ctx;
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *dir = NULL;
    struct ckpt_err ignored = {0};
    struct step step = {0};

    if (e->kind != CKPT_ENTRY_DIR || e->name[0] == '.' || is_pointer(e->name))
        return 0;
    if (ckpt_dir_open_below(s->dir, e->name, &dir, &ignored) < 0)
        return 0;
    const struct ckpt_reader *r = probe_inside(&dir, &ignored);
    if (!r && ignored.code != CKPT_CONFLICT)
        return 0;
    if (r && r->finished && !r->finished(dir, e->name, latest_of(s, r))) {
        free(s->unfinished);
        s->unfinished = ckpt_asprintf("%s (%s)", e->name, r->name);
        return s->unfinished ? 0 : ckpt_nomem(err);
    }
    step.generation = generation_of(dir, &step.mtime_ns);
    step.generation ^= XXH3_64bits(e->name, strlen(e->name));
    if (!(step.name = strdup(e->name)) || ckpt_vec_push(&s->steps, step) < 0) {
        free(step.name);
        return ckpt_nomem(err);
    }
    return 0;
}

static bool has_step(const step_list *s, const char *name)
{
    for (size_t i = 0; i < s->len; i++)
        if (strcmp(s->ptr[i].name, name) == 0)
            return true;
    return false;
}

/* What a pointer file names, if that step is there; else the last one by number. */
static const char *find_latest(const struct scan *s)
{
    for (size_t i = 0; ckpt_readers[i]; i++)
        if (s->latest[i] && has_step(&s->steps, s->latest[i]))
            return s->latest[i];
    return s->steps.len ? s->steps.ptr[s->steps.len - 1].name : NULL;
}

static bool same_steps(const step_list *a, const step_list *b)
{
    if (a->len != b->len)
        return false;
    for (size_t i = 0; i < a->len; i++)
        if (a->ptr[i].generation != b->ptr[i].generation ||
            strcmp(a->ptr[i].name, b->ptr[i].name) != 0)
            return false;
    return true;
}

/* Takes over the scan's steps. */
static int adopt(struct ckpt_run *run, struct scan *s, bool *ret_changed, struct ckpt_err *err)
{
    const char *latest = find_latest(s);
    ckpt_cleanup(ckpt_freep) char *own = latest ? strdup(latest) : NULL;

    if (latest && !own)
        return ckpt_nomem(err);
    (void)pthread_mutex_lock(&run->lock);
    bool changed = !same_steps(&run->steps, &s->steps) || !run->latest != !own ||
                   (own && strcmp(run->latest, own) != 0);
    step_list old = run->steps;
    run->steps = s->steps;
    s->steps = old;
    char *old_latest = run->latest;
    run->latest = own;
    own = old_latest;
    (void)pthread_mutex_unlock(&run->lock);
    if (ret_changed)
        *ret_changed = changed;
    return 0;
}

static int scan_folder(struct ckpt_run *run, bool *ret_changed, struct ckpt_err *err)
{
    char *latest[16] = {0};
    struct scan s = {.dir = run->dir, .latest = latest};
    int result;

    for (size_t i = 0; ckpt_readers[i]; i++)
        latest[i] = ckpt_readers[i]->latest ? ckpt_readers[i]->latest(run->dir) : NULL;
    result = ckpt_dir_list(run->dir, scan_entry, &s, err);
    if (result == 0)
        result = adopt(run, &s, ret_changed, err);
    steps_release(&s.steps);
    free(run->unfinished);
    run->unfinished = s.unfinished;
    for (size_t i = 0; ckpt_readers[i]; i++)
        free(latest[i]);
    return result;
}

static int scan_single(struct ckpt_run *run, bool *ret_changed, struct ckpt_err *err)
{
    struct scan s = {.dir = run->dir};
    struct step step = {.name = strdup("")};
    char *none[16] = {0};
    int result;

    s.latest = none;
    step.generation = generation_of(run->dir, &step.mtime_ns);
    if (!step.name || ckpt_vec_push(&s.steps, step) < 0) {
        free(step.name);
        return ckpt_nomem(err);
    }
    result = adopt(run, &s, ret_changed, err);
    steps_release(&s.steps);
    return result;
}

int ckpt_run_scan(struct ckpt_run *run, bool *ret_changed, struct ckpt_err *err)
{
    return run->is_folder ? scan_folder(run, ret_changed, err) : scan_single(run, ret_changed, err);
}

/* A folder without steps: the first of the known places below it that has some. */
static int scan_inside(struct ckpt_run *run, struct ckpt_err *err)
{
    struct ckpt_dir *outer = run->dir;

    for (size_t i = 0; inner_runs[i]; i++) {
        struct ckpt_err ignored = {0};
        if (ckpt_dir_open_below(outer, inner_runs[i], &run->dir, &ignored) < 0)
            continue;
        int result = scan_folder(run, NULL, err);
        if (result < 0 || run->steps.len) {
            ckpt_dir_unref(outer);
            return result;
        }
        ckpt_dir_unref(run->dir);
    }
    run->dir = outer;
    return 0;
}

/* ---- life cycle ---- */

static bool is_directory(const char *path)
{
    struct stat st;

    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

static int run_init(struct ckpt_run *run, const char *path, const struct ckpt_options *opt,
                    struct ckpt_err *err)
{
    enum ckpt_links links = opt->follow_symlinks ? CKPT_LINKS_ANY : CKPT_LINKS_BENEATH;
    struct ckpt_err probe_err = {0};

    if (ckpt_has_suffix(path, ".nemo") && !is_directory(path))
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "'%s' is a tar archive: unpack it (tar -xf FILE -C DIR) and give the "
                         "directory",
                         path);
    if (ckpt_dir_open(path, links, &run->dir, err) < 0)
        return -1;
    if (!probe_inside(&run->dir, &probe_err)) {
        if (probe_err.code == CKPT_CONFLICT)
            return ckpt_fail(err, probe_err.code, "%s", probe_err.text);
        run->is_folder = true;
    }
    if (ckpt_run_scan(run, NULL, err) < 0 || (run->steps.len == 0 && scan_inside(run, err) < 0))
        return -1;
    if (run->steps.len == 0 && !opt->wait && run->unfinished)
        return ckpt_fail(err, CKPT_MISSING,
                         "'%s' holds no finished checkpoint: the save of %s was interrupted, or "
                         "goes on",
                         path, run->unfinished);
    if (run->steps.len == 0 && !opt->wait)
        return ckpt_fail(
            err, CKPT_MISSING,
            "'%s' is neither a checkpoint of a known format nor a folder with finished ones", path);
    return ckpt_shared_new(opt, &run->shared, err);
}

int ckpt_run_open(const char *path, const struct ckpt_options *opt, struct ckpt_run **ret,
                  struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_options_freep) struct ckpt_options *defaults = NULL;
    struct ckpt_run *run;

    if (!opt && ckpt_options_new(&defaults, err) < 0)
        return -1;
    if (!(run = calloc(1, sizeof *run)))
        return ckpt_nomem(err);
    (void)pthread_mutex_init(&run->lock, NULL);
    (void)pthread_cond_init(&run->opened_one, NULL);
    if (run_init(run, path, opt ? opt : defaults, err) < 0) {
        ckpt_run_close(run);
        return -1;
    }
    *ret = run;
    return 0;
}

void ckpt_run_close(struct ckpt_run *run)
{
    if (!run)
        return;
    for (size_t i = 0; i < run->opened.len; i++) {
        free(run->opened.ptr[i].step);
        ckpt_view_release(run->opened.ptr[i].view);
    }
    ckpt_vec_release(&run->opened);
    steps_release(&run->steps);
    free(run->latest);
    free(run->unfinished);
    ckpt_shared_unref(run->shared);
    ckpt_dir_unref(run->dir);
    (void)pthread_cond_destroy(&run->opened_one);
    (void)pthread_mutex_destroy(&run->lock);
    free(run);
}

bool ckpt_run_is_folder(const struct ckpt_run *run) { return run->is_folder; }

/* ---- steps ---- */

int ckpt_run_steps(struct ckpt_run *run, struct ckpt_step **ret_steps, size_t *ret_n,
                   struct ckpt_err *err)
{
    struct ckpt_step *out;
    size_t n = 0;

    (void)pthread_mutex_lock(&run->lock);
    out = calloc(run->steps.len + 1, sizeof *out);
    for (size_t i = 0; out && i < run->steps.len; i++) {
        const struct step *s = &run->steps.ptr[i];
        out[i] = (struct ckpt_step){strdup(s->name), s->generation, s->mtime_ns,
                                    strcmp(s->name, run->latest) == 0};
        if (!out[i].name) {
            ckpt_steps_free(out, i);
            out = NULL;
        }
    }
    n = run->steps.len;
    (void)pthread_mutex_unlock(&run->lock);
    if (!out)
        return ckpt_nomem(err);
    *ret_steps = out;
    *ret_n = n;
    return 0;
}

void ckpt_steps_free(struct ckpt_step *steps, size_t n)
{
    for (size_t i = 0; i < n; i++)
        free(steps[i].name);
    free(steps);
}

/* ---- views ---- */

/* All of these with the lock held. */

static const struct step *find_step(const struct ckpt_run *run, const char *name)
{
    for (size_t i = 0; i < run->steps.len; i++)
        if (strcmp(run->steps.ptr[i].name, name) == 0)
            return &run->steps.ptr[i];
    return NULL;
}

static struct opened *find_opened(struct ckpt_run *run, const char *step, uint64_t generation)
{
    for (size_t i = 0; i < run->opened.len; i++)
        if (run->opened.ptr[i].generation == generation &&
            strcmp(run->opened.ptr[i].step, step) == 0)
            return &run->opened.ptr[i];
    return NULL;
}

static void remove_opened(struct ckpt_run *run, struct opened *o)
{
    free(o->step);
    *o = run->opened.ptr[--run->opened.len];
}

/* The least recently used view that only the run holds, if there are more than KEPT_VIEWS of them;
 * out of the list. */
static struct ckpt_view *take_surplus(struct ckpt_run *run)
{
    struct opened *oldest = NULL;
    struct ckpt_view *view;
    size_t idle = 0;

    for (size_t i = 0; i < run->opened.len; i++) {
        struct opened *o = &run->opened.ptr[i];
        if (!o->view || atomic_load(&o->view->refs) > 1)
            continue;
        idle++;
        if (!oldest || o->used < oldest->used)
            oldest = o;
    }
    if (idle <= KEPT_VIEWS)
        return NULL;
    view = oldest->view;
    remove_opened(run, oldest);
    return view;
}

static int begin_opening(struct ckpt_run *run, const struct step *step, struct ckpt_err *err)
{
    struct opened o = {.step = strdup(step->name), .generation = step->generation};

    if (!o.step || ckpt_vec_push(&run->opened, o) < 0) {
        free(o.step);
        return ckpt_nomem(err);
    }
    return 0;
}

static int open_step(struct ckpt_run *run, const char *name, struct ckpt_view **ret,
                     struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *dir = NULL;

    if (*name) {
        struct ckpt_err ignored = {0};
        if (ckpt_dir_open_below(run->dir, name, &dir, err) < 0)
            return -1;
        (void)probe_inside(&dir, &ignored); /* opening says what is wrong */
    }
    return ckpt_checkpoint_open(run->shared, dir ? dir : run->dir, name, ret, err);
}

/* Enters and leaves with the lock held; opens without it. */
static int open_unlocked(struct ckpt_run *run, const struct step *step, struct ckpt_view **ret,
                         struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *name = strdup(step->name);
    uint64_t generation = step->generation;
    int result;

    if (!name)
        return ckpt_nomem(err);
    if (begin_opening(run, step, err) < 0)
        return -1;
    (void)pthread_mutex_unlock(&run->lock);
    result = open_step(run, name, ret, err);
    (void)pthread_mutex_lock(&run->lock);
    struct opened *o = find_opened(run, name, generation);
    if (result < 0) {
        remove_opened(run, o);
    } else {
        o->view = ckpt_view_hold(*ret);
        o->used = ++run->tick;
    }
    (void)pthread_cond_broadcast(&run->opened_one);
    return result;
}

static int view_locked(struct ckpt_run *run, const char *name, struct ckpt_view **ret,
                       struct ckpt_err *err)
{
    for (;;) {
        const struct step *step = name ? find_step(run, name) : NULL;
        if (!step)
            return ckpt_fail(err, CKPT_MISSING, "'%s' has no step '%s'", ckpt_dir_path(run->dir),
                             name ? name : "latest");
        struct opened *o = find_opened(run, step->name, step->generation);
        if (!o)
            return open_unlocked(run, step, ret, err);
        if (o->view) {
            o->used = ++run->tick;
            *ret = ckpt_view_hold(o->view);
            return 0;
        }
        (void)pthread_cond_wait(&run->opened_one, &run->lock);
    }
}

/* Several at a time, after many that were held together have been let go. */
static void drop_surplus(struct ckpt_run *run)
{
    struct ckpt_view *surplus;

    do {
        (void)pthread_mutex_lock(&run->lock);
        surplus = take_surplus(run);
        (void)pthread_mutex_unlock(&run->lock);
        ckpt_view_release(surplus);
    } while (surplus);
}

int ckpt_run_view(struct ckpt_run *run, const char *step, struct ckpt_view **ret,
                  struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *name = NULL;
    int result;

    (void)pthread_mutex_lock(&run->lock);
    if (!step)
        step = run->latest;
    if (step && !(name = strdup(step)))
        result = ckpt_nomem(err);
    else
        result = view_locked(run, name, ret, err);
    (void)pthread_mutex_unlock(&run->lock);
    drop_surplus(run);
    return result;
}

struct ckpt_view *ckpt_run_view_if_open(struct ckpt_run *run, const char *name)
{
    struct ckpt_view *view = NULL;

    (void)pthread_mutex_lock(&run->lock);
    if (!name)
        name = run->latest;
    const struct step *step = name ? find_step(run, name) : NULL;
    struct opened *o = step ? find_opened(run, step->name, step->generation) : NULL;
    if (o && o->view) {
        o->used = ++run->tick;
        view = ckpt_view_hold(o->view);
    }
    (void)pthread_mutex_unlock(&run->lock);
    return view;
}

int ckpt_run_newest_view(struct ckpt_run *run, struct ckpt_view **ret, struct ckpt_err *err)
{
    struct ckpt_step *steps;
    struct ckpt_err first = {0};
    size_t n;

    if (ckpt_run_view(run, NULL, ret, &first) == 0)
        return 0;
    if (ckpt_run_steps(run, &steps, &n, err) < 0)
        return -1;
    int result = -1;
    for (size_t i = n; i-- > 0 && result < 0;) {
        struct ckpt_err e = {0};
        if (!steps[i].is_latest)
            result = ckpt_run_view(run, steps[i].name, ret, &e);
    }
    ckpt_steps_free(steps, n);
    return result < 0 ? ckpt_fail(err, first.code, "%s", first.text) : 0;
}

int ckpt_run_warnings(struct ckpt_run *run, char **ret_json, struct ckpt_err *err)
{
    return ckpt_remarks_text(&run->shared->remarks, ret_json, err);
}

void ckpt_run_stats(struct ckpt_run *run, struct ckpt_stats *ret)
{
    struct ckpt_shared *s = run->shared;

    *ret = (struct ckpt_stats){
        .requests = atomic_load(&s->stats.requests),
        .bytes = atomic_load(&s->stats.bytes),
        .source_reads = atomic_load(&s->stats.source_reads),
        .source_bytes = atomic_load(&s->stats.source_bytes),
        .slab_bytes = ckpt_slabs_bytes(s->slabs),
        .open_files = ckpt_fdpool_open_count(s->pool),
        .errors = atomic_load(&s->errors),
    };
}
