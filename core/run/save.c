/* SPDX-License-Identifier: Apache-2.0 */
/* Telling one save of a step from another, and finding out that files are of two saves. */
#include "run/save.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <xxhash.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/par.h"
#include "base/sort.h"
#include "base/str.h"
#include "run/save_times.h"

/* Samples of contents: the number of places in one file, and in all files together. */
enum { HEADER_BYTES = 4096, PLACE_BYTES = 256, MOST_PLACES = 16, ALL_PLACES = 4096 };

/* The bytes that follow a change of a file's times come within this time. */
#define SETTLING (2 * CKPT_SECOND_NS)

/* ---- markers ---- */

struct ckpt_save_marker ckpt_save_marker_of(const struct ckpt_reader *reader,
                                            const struct ckpt_dir *dir)
{
    struct ckpt_save_marker m = {0};
    struct ckpt_file_id id;

    for (size_t i = 0; !m.name && reader->markers && reader->markers[i]; i++) {
        if (!ckpt_dir_stat(dir, reader->markers[i], &id))
            continue;
        const uint64_t part[] = {i, id.inode, id.size, (uint64_t)id.mtime_ns,
                                 (uint64_t)id.ctime_ns};
        m = (struct ckpt_save_marker){reader->markers[i], id.mtime_ns,
                                      XXH3_64bits(part, sizeof part)};
    }
    return m;
}

/* ---- taking identities ---- */

/* The sample of an object is its ETag, by which its identity has a time of change: nothing of it is
 * read. */
static bool sample_source(struct ckpt_source *s, size_t places, uint64_t *ret)
{
    struct ckpt_file_id id;

    if (ckpt_source_is_object(s) && !ckpt_source_is_elsewhere(s) && ckpt_source_file_id(s, &id)) {
        *ret = (uint64_t)id.ctime_ns;
        return true;
    }
    unsigned char buf[HEADER_BYTES + MOST_PLACES * PLACE_BYTES];
    size_t len = s->size < HEADER_BYTES ? (size_t)s->size : HEADER_BYTES;

    if (ckpt_source_pread(s, buf, len, 0, NULL) < 0)
        return false;
    for (size_t i = 0; s->size > HEADER_BYTES && i < places; i++, len += PLACE_BYTES) {
        const uint64_t step = places > 1 ? (s->size - PLACE_BYTES) / (places - 1) : 0;
        const uint64_t at = i + 1 == places ? s->size - PLACE_BYTES : step * i;
        if (ckpt_source_pread(s, buf + len, PLACE_BYTES, at, NULL) < 0)
            return false;
    }
    *ret = XXH3_64bits(buf, len);
    return ckpt_source_check(s, NULL) == 0;
}

static size_t places_of(size_t nfile)
{
    size_t n = nfile ? ALL_PLACES / nfile : 0;

    return n < MOST_PLACES ? n : MOST_PLACES;
}

/* Does the file at this path have the samples that were recorded? */
static bool same_samples(const struct ckpt_save *s, const struct ckpt_save_file *f,
                         struct ckpt_fdpool *pool)
{
    ckpt_cleanup(ckpt_source_unrefp) struct ckpt_source *source = NULL;
    uint64_t sample;

    return f->sampled && ckpt_source_file_new(f->dir, f->name, pool, &source, NULL) == 0 &&
           sample_source(source, places_of(s->files.len), &sample) && sample == f->sample;
}

static int path_cmp(const void *a, const void *b)
{
    const struct ckpt_save_file *x = a, *y = b;
    int c = strcmp(ckpt_dir_path(x->dir), ckpt_dir_path(y->dir));

    return c ? c : strcmp(x->name, y->name);
}

/* The path of a file in the step, such as "model/model/norm/model_weight.safetensors"; new. */
static char *path_of(const struct ckpt_save *s, const struct ckpt_save_file *f)
{
    const char *below = ckpt_dir_path(f->dir) + strlen(ckpt_dir_path(s->step));

    below += *below == '/';
    return ckpt_asprintf("%s%s%s", below, *below ? "/" : "", f->name);
}

static bool is_after_marker(const struct ckpt_save *s, const struct ckpt_save_file *f)
{
    ckpt_cleanup(ckpt_freep) char *path = s->reader->after_marker ? path_of(s, f) : NULL;

    return path && ckpt_has_prefix(path, s->reader->after_marker);
}

struct ordered {
    struct ckpt_save_file file; /* first; borrows */
    struct ckpt_source *source;
};

typedef CKPT_VEC(struct ordered) ordered_list;

/* List the step's own files (not the base's), each once. */
static int list_files(const struct ckpt_catalog *cat, const struct ckpt_dir *step,
                      ordered_list *ret, struct ckpt_err *err)
{
    for (size_t i = 0; i < cat->sources.len; i++) {
        struct ckpt_source *s = ckpt_source_file_behind(cat->sources.ptr[i]);
        struct ordered o = {.source = s};
        if (!s || !ckpt_source_file_id(s, &o.file.id))
            continue;
        o.file.dir = ckpt_source_file_dir(s);
        o.file.name = ckpt_source_file_name(s);
        if (ckpt_is_below(ckpt_dir_path(o.file.dir), ckpt_dir_path(step)) &&
            ckpt_vec_push(ret, o) < 0)
            return ckpt_nomem(err);
    }
    ckpt_sort(ret->ptr, ret->len, path_cmp);
    size_t n = 0;
    for (size_t i = 0; i < ret->len; i++)
        if (n == 0 || path_cmp(&ret->ptr[n - 1].file, &ret->ptr[i].file) != 0)
            ret->ptr[n++] = ret->ptr[i];
    ret->len = n;
    return 0;
}

static int sample_one(void *ctx, size_t i, struct ckpt_err *err)
{
    ordered_list *list = ctx;
    struct ordered *o = &list->ptr[i];

    (void)err;
    o->file.sampled = sample_source(o->source, places_of(list->len), &o->file.sample);
    return 0;
}

static int fill(struct ckpt_save *s, const ordered_list *list, struct ckpt_err *err)
{
    if (ckpt_vec_reserve(&s->files, list->len) < 0)
        return ckpt_nomem(err);
    for (size_t i = 0; i < list->len; i++) {
        struct ckpt_save_file f = list->ptr[i].file;
        f.dir = ckpt_dir_ref(f.dir);
        s->files.ptr[s->files.len++] = f;
        if (!is_after_marker(s, &f))
            s->late |= !s->marker.name || f.id.mtime_ns > s->marker.mtime_ns;
    }
    s->ended = !s->late;
    s->late &= s->files.len > 1; /* a single file cannot be of two saves */
    return 0;
}

int ckpt_save_new(const struct ckpt_catalog *cat, struct ckpt_dir *step,
                  const struct ckpt_reader *reader, const struct ckpt_save_marker *marker,
                  bool sample, struct ckpt_save **ret, struct ckpt_err *err)
{
    struct ckpt_save *s = calloc(1, sizeof *s);
    ordered_list list = {0};

    if (!s)
        return ckpt_nomem(err);
    atomic_init(&s->refs, 1);
    s->step = ckpt_dir_ref(step);
    s->reader = reader;
    s->marker = *marker;
    s->seen_ms = ckpt_now_ms();
    int result = list_files(cat, step, &list, err);
    if (result == 0 && sample && places_of(list.len))
        result = ckpt_parallel(list.len, 0, sample_one, &list, err);
    if (result == 0)
        result = fill(s, &list, err);
    ckpt_vec_release(&list);
    if (result < 0)
        ckpt_save_unref(s);
    else
        *ret = s;
    return result;
}

struct ckpt_save *ckpt_save_ref(struct ckpt_save *s)
{
    atomic_fetch_add(&s->refs, 1);
    return s;
}

void ckpt_save_unref(struct ckpt_save *s)
{
    if (!s || atomic_fetch_sub(&s->refs, 1) != 1)
        return;
    for (size_t i = 0; i < s->files.len; i++)
        ckpt_dir_unref(s->files.ptr[i].dir);
    ckpt_vec_release(&s->files);
    ckpt_dir_unref(s->step);
    free(s);
}

/* ---- at first sight: times ---- */

/* Judge by the files' times. Creation times cost a system call per file, so they are read only if
 * the other times are suspicious. */
static int check_times(const struct ckpt_save *s, struct ckpt_catalog *cat, struct ckpt_err *err)
{
    const int64_t *marker = s->marker.name ? &s->marker.mtime_ns : NULL;
    ckpt_cleanup(ckpt_freep) struct ckpt_written *w = calloc(s->files.len + 1, sizeof *w);
    enum ckpt_save_times say;
    size_t n = 0;

    if (!w)
        return ckpt_nomem(err);
    if (s->reader->is_published || ckpt_dir_hub_blobs(s->step))
        return 0;
    for (size_t i = 0; i < s->files.len; i++) {
        const struct ckpt_save_file *f = &s->files.ptr[i];
        if (!is_after_marker(s, f))
            w[n++] = (struct ckpt_written){0, f->id.mtime_ns, f->id.size, f};
    }
    if (ckpt_save_times(w, n, marker) == CKPT_TIMES_ONE)
        return 0;
    for (size_t i = 0; i < n; i++)
        w[i].begin_ns = ckpt_dir_birth_ns(w[i].file->dir, w[i].file->name);
    if ((say = ckpt_save_times(w, n, marker)) == CKPT_TIMES_ONE)
        return 0;
    ckpt_cleanup(ckpt_freep) char *oldest = path_of(s, w[0].file);
    ckpt_cleanup(ckpt_freep) char *newest = path_of(s, w[n - 1].file);
    if (!oldest || !newest)
        return ckpt_nomem(err);
    return ckpt_save_times_report(&(struct ckpt_save_span){.step = ckpt_dir_path(s->step),
                                                           .oldest = oldest,
                                                           .newest = newest,
                                                           .oldest_ns = w[0].end_ns,
                                                           .newest_ns = w[n - 1].end_ns,
                                                           .marker = s->marker.name,
                                                           .marker_ns = s->marker.mtime_ns},
                                  say, cat, err);
}

/* ---- the second time: identities ---- */

/* Is it the same file, or one with other times but equal samples? */
static bool same_content(const struct ckpt_save_file *a, const struct ckpt_save_file *b)
{
    return a->id.inode == b->id.inode && a->id.size == b->id.size && a->sampled && b->sampled &&
           a->sample == b->sample;
}

/* How many files of a save are as they were before, times included; and how many are the same
 * files with other times, or written over in place. */
struct kept {
    size_t untouched, written;
};

/* The first file that was changed; NULL: none was, except in its times. */
static const struct ckpt_save_file *first_other(const struct ckpt_save *now,
                                                const struct ckpt_save *before, struct kept *ret)
{
    const struct ckpt_save_file *other = NULL;
    size_t i = 0, k = 0;

    *ret = (struct kept){0};
    while (i < now->files.len || k < before->files.len) {
        const struct ckpt_save_file *a = i < now->files.len ? &now->files.ptr[i] : NULL;
        const struct ckpt_save_file *b = k < before->files.len ? &before->files.ptr[k] : NULL;
        const int c = !a ? 1 : !b ? -1 : path_cmp(a, b);
        const bool same = c == 0 && ckpt_file_id_eq(&a->id, &b->id);
        ret->untouched += same;
        ret->written += c == 0 && !same && a->id.inode == b->id.inode;
        if (!other && !same && (c != 0 || !same_content(a, b)))
            other = c <= 0 ? a : b;
        i += c <= 0;
        k += c >= 0;
    }
    return other;
}

static int fail_again(const struct ckpt_save *s, const struct ckpt_save_file *f,
                      struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *path = path_of(s, f);

    if (!path)
        return ckpt_nomem(err);
    if (!s->marker.name)
        return ckpt_fail(err, CKPT_CONFLICT,
                         "'%s' is being saved again: '%s' has changed, other shards have not: "
                         "wait until the save has ended, or open it anyway with -o "
                         "allow_mixed",
                         ckpt_dir_path(s->step), path);
    return ckpt_fail(err, CKPT_CONFLICT,
                     "'%s' is being saved again: '%s' has changed, but '%s', which ends a save, "
                     "has not: wait until the save has ended (if it was interrupted: save again, "
                     "or open it anyway with -o allow_mixed)",
                     ckpt_dir_path(s->step), path, s->marker.name);
}

int ckpt_save_accept(const struct ckpt_save *now, const struct ckpt_save *before,
                     struct ckpt_catalog *cat, bool *ret_written, struct ckpt_err *err)
{
    const struct ckpt_save_file *other;
    struct kept kept;

    *ret_written = false;
    if (before && before->marker.name && !now->marker.name)
        return ckpt_fail(err, CKPT_CONFLICT,
                         "'%s' is being saved again, or removed: '%s', which ends a save, is gone: "
                         "wait until the save has ended, or open it anyway with -o "
                         "allow_mixed",
                         ckpt_dir_path(now->step), before->marker.name);
    if (!before || before->marker.hash != now->marker.hash)
        return check_times(now, cat, err);
    other = first_other(now, before, &kept);
    *ret_written = kept.written > 0;
    if (!other)
        return 0;
    /* without a marker, the only certain evidence for a finished save is that no file of the old
     * one is left */
    if (!now->marker.name && kept.untouched == 0)
        return check_times(now, cat, err);
    return fail_again(now, other, err);
}

/* ---- after a write: has the one that changed the times come to the bytes? ---- */

struct settle {
    const struct ckpt_save *save;
    struct ckpt_fdpool *pool;
    int64_t now_ns; /* before the wait */
};

static bool is_settling(const struct ckpt_save_file *f, int64_t now_ns)
{
    return f->id.ctime_ns > now_ns - SETTLING;
}

static int settle_one(void *ctx, size_t i, struct ckpt_err *err)
{
    const struct settle *c = ctx;
    const struct ckpt_save_file *f = &c->save->files.ptr[i];
    struct ckpt_file_id id;

    if (!is_settling(f, c->now_ns))
        return 0;
    if (ckpt_dir_identify(f->dir, f->name, &id, err) < 0)
        return -1;
    if (ckpt_file_id_eq(&id, &f->id) && (!f->sampled || same_samples(c->save, f, c->pool)))
        return 0;
    return ckpt_fail(err, CKPT_STALE, "'%s/%s' is being written: try again", ckpt_dir_path(f->dir),
                     f->name);
}

int ckpt_save_settle(const struct ckpt_save *s, struct ckpt_fdpool *pool, struct ckpt_err *err)
{
    struct settle c = {s, pool, ckpt_wall_ns()};
    size_t n = 0;

    for (size_t i = 0; i < s->files.len; i++)
        n += is_settling(&s->files.ptr[i], c.now_ns);
    if (n == 0)
        return 0;
    (void)nanosleep(&(struct timespec){.tv_sec = SETTLING / CKPT_SECOND_NS}, NULL);
    return ckpt_parallel(s->files.len, 0, settle_one, &c, err);
}

int ckpt_save_at_rest(const struct ckpt_save *s, uint32_t quiet_ms, bool *ret, struct ckpt_err *err)
{
    int64_t newest = INT64_MIN;
    struct ckpt_file_id id;

    *ret = s->ended;
    for (size_t i = 0; !s->ended && i < s->files.len; i++) {
        const struct ckpt_save_file *f = &s->files.ptr[i];
        if (ckpt_dir_identify(f->dir, f->name, &id, err) < 0)
            return -1;
        if (!ckpt_file_id_eq(&id, &f->id))
            return ckpt_fail(err, CKPT_STALE, "'%s/%s' is being written", ckpt_dir_path(f->dir),
                             f->name);
        newest = newest > id.ctime_ns ? newest : id.ctime_ns;
    }
    /* the clock of a file server may go ahead of ours */
    *ret = *ret || newest < ckpt_wall_ns() - quiet_ms * (CKPT_SECOND_NS / 1000) ||
           ckpt_now_ms() >= s->seen_ms + quiet_ms;
    return 0;
}

/* ---- afterwards ---- */

enum ckpt_save_state ckpt_save_state_of(const struct ckpt_save_counts *c)
{
    if (c->other == 0)
        return CKPT_SAVE_SAME;
    return c->equal == 0 && !c->late ? CKPT_SAVE_OLD : CKPT_SAVE_MIXED;
}

struct compare {
    const struct ckpt_save *save;
    struct ckpt_fdpool *pool;
    atomic_size_t equal, other, gone;
    atomic_size_t example; /* index of the first changed file */
};

static bool is_equal_now(struct compare *c, const struct ckpt_save_file *f,
                         const struct ckpt_file_id *now)
{
    return ckpt_file_id_eq(now, &f->id) || (now->inode == f->id.inode && now->size == f->id.size &&
                                            same_samples(c->save, f, c->pool));
}

static int compare_one(void *ctx, size_t i, struct ckpt_err *err)
{
    struct compare *c = ctx;
    const struct ckpt_save_file *f = &c->save->files.ptr[i];
    struct ckpt_err own = {0};
    struct ckpt_file_id now;

    if (ckpt_dir_identify(f->dir, f->name, &now, &own) < 0) {
        if (own.code != CKPT_MISSING)
            return ckpt_err_move(err, &own);
        atomic_fetch_add(&c->gone, 1);
    } else if (is_equal_now(c, f, &now)) {
        atomic_fetch_add(&c->equal, 1);
    } else {
        atomic_fetch_add(&c->other, 1);
        size_t known = atomic_load(&c->example);
        while (i < known && !atomic_compare_exchange_weak(&c->example, &known, i))
            continue;
    }
    return 0;
}

int ckpt_save_check_moment(const struct ckpt_save *s, struct ckpt_fdpool *pool,
                           struct ckpt_err *err)
{
    struct compare c = {.save = s, .pool = pool, .example = SIZE_MAX};

    if (s->marker.name || s->files.len < 2)
        return 0;
    if (ckpt_parallel(s->files.len, 0, compare_one, &c, err) < 0)
        return -1;
    if (atomic_load(&c.equal) == s->files.len)
        return 0;
    return ckpt_fail(err, CKPT_STALE, "'%s' was saved again while it was opened: try again",
                     ckpt_dir_path(s->step));
}

int ckpt_save_compare(const struct ckpt_save *s, struct ckpt_fdpool *pool,
                      enum ckpt_save_state *ret, struct ckpt_err *err)
{
    struct compare c = {.save = s, .pool = pool, .example = SIZE_MAX};

    if (ckpt_parallel(s->files.len, 0, compare_one, &c, err) < 0)
        return -1;
    const struct ckpt_save_counts counts = {atomic_load(&c.equal), atomic_load(&c.other),
                                            atomic_load(&c.gone), s->late};
    *ret = ckpt_save_state_of(&counts);
    if (*ret != CKPT_SAVE_MIXED)
        return 0;
    ckpt_cleanup(ckpt_freep) char *path = path_of(s, &s->files.ptr[atomic_load(&c.example)]);
    (void)ckpt_fail(err, CKPT_STALE,
                    "'%s' was saved again: '%s' and %zu more of its %zu shards have changed since "
                    "it was opened, so the data that was read may be of two saves",
                    ckpt_dir_path(s->step), path ? path : "?", counts.other - 1, s->files.len);
    return 0;
}
