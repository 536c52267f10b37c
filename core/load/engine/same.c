/* SPDX-License-Identifier: Apache-2.0 */
/* Compares what ranks see of a checkpoint: catalogues, identities of files and, if some files are
 * copies, samples of their bytes. */
#include "load/engine/same.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/ckd.h"
#include "base/mem.h"
#include "base/par.h"
#include "base/vec.h"
#include "comm/comm.h"
#include "comm/detached.h"
#include "load/load_inner.h"
#include "tensor/value.h"

/* Copies of a checkpoint are compared at so many places, of so many bytes each: spread over the
 * tensors, so that another step's copy is noticed, and few, as each place may be a seek. */
enum { SAMPLES = 16, SAMPLE_BYTES = 64 };

/* ---- the digest of a catalogue ---- */

/* A hash of a file's size and its name without directories, which differ between copies. */
static uint64_t name_digest(const struct ckpt_source *s)
{
    ckpt_cleanup(ckpt_freep) char *name = ckpt_source_name(s);
    const char *last = name ? strrchr(name, '/') : NULL;

    last = last ? last + 1 : name ? name : "";
    return XXH3_64bits_withSeed(last, strlen(last), s->size);
}

struct digest {
    XXH3_state_t *h;
    const struct ckpt_catalog *cat; /* the catalogue of `file` */
    uint64_t *file;                 /* name_digest of each file; NULL: none are kept */
};

static void add_tensor(const struct digest *d, const struct ckpt_catalog *cat,
                       const struct ckpt_tensor *t)
{
    (void)XXH3_128bits_update(d->h, t->name, strlen(t->name) + 1);
    (void)XXH3_128bits_update(d->h, t->dim, t->rank * sizeof *t->dim);
    (void)XXH3_128bits_update(d->h, &t->dtype, sizeof t->dtype);
    for (size_t i = 0; i < t->npiece; i++) {
        const struct ckpt_piece *p = &t->piece[i];
        const uint64_t file = cat == d->cat && d->file ? d->file[p->source]
                                                       : name_digest(cat->sources.ptr[p->source]);
        const uint64_t head[4] = {p->dst, p->src, p->naxis, file};
        (void)XXH3_128bits_update(d->h, head, sizeof head);
        (void)XXH3_128bits_update(d->h, p->axis, p->naxis * sizeof *p->axis);
    }
    if (!t->value)
        return;
    (void)XXH3_128bits_update(d->h, t->value->ops->name, strlen(t->value->ops->name) + 1);
    (void)XXH3_128bits_update(d->h, t->value->param, sizeof t->value->param);
    for (uint32_t i = 0; i < t->value->narg; i++)
        add_tensor(d, t->value->arg[i]->cat, t->value->arg[i]);
}

int ckpt_catalog_digest(const struct ckpt_catalog *cat, unsigned char ret[16], struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) uint64_t *file = malloc((cat->sources.len + 1) * sizeof *file);
    struct digest d = {XXH3_createState(), cat, file};
    XXH128_canonical_t c;

    if (!d.h)
        return ckpt_nomem(err);
    for (size_t i = 0; file && i < cat->sources.len; i++)
        file[i] = name_digest(cat->sources.ptr[i]);
    (void)XXH3_128bits_reset(d.h);
    for (size_t i = 0; i < cat->tensors.len; i++)
        add_tensor(&d, cat, &cat->tensors.ptr[i]);
    XXH128_canonicalFromHash(&c, XXH3_128bits_digest(d.h));
    (void)XXH3_freeState(d.h);
    memcpy(ret, c.digest, 16);
    return 0;
}

/* ---- the identities of files ---- */

/* Machines that share a storage may see different device and inode numbers, but the same times. */
uint64_t ckpt_catalog_files(const struct ckpt_catalog *cat)
{
    XXH64_hash_t h = 0;

    for (size_t i = 0; i < cat->sources.len; i++) {
        struct ckpt_file_id id;
        if (!ckpt_source_file_id(cat->sources.ptr[i], &id))
            continue;
        const uint64_t word[3] = {id.size, (uint64_t)id.mtime_ns, (uint64_t)id.ctime_ns};
        h = XXH3_64bits_withSeed(word, sizeof word, h);
    }
    return h;
}

/* ---- samples of the bytes ---- */

struct sample {    /* of one tensor */
    bool is_done;  /* it was read, or could not be */
    uint64_t hash; /* 0: none */
    uint64_t off;
    struct ckpt_source *source;
    const char *tensor;
};

/* The task of a thread that checks all files and reads all samples, many at once; a read may never
 * return. The task's lock protects is_checked, rc, err, and is_done and the hash of each sample. */
struct sampling {
    struct ckpt_detached task;
    struct ckpt_view *view;
    bool *is_checked; /* of each file */
    int rc;           /* the result of checking files, with err */
    struct ckpt_err err;
    uint32_t n; /* samples */
    struct sample sample[SAMPLES];
};

static void sampling_free(struct ckpt_detached *e)
{
    struct sampling *l = (struct sampling *)e;

    ckpt_view_release(l->view);
    free(l->is_checked);
    free(l);
}

static uint64_t read_sample(const struct sample *s)
{
    unsigned char data[SAMPLE_BYTES];
    const size_t n = (size_t)ckpt_min_u64(sizeof data, s->source->size - s->off);

    if (ckpt_source_pread(s->source, data, n, s->off, NULL) < 0)
        return 0;
    uint64_t hash = XXH3_64bits(data, n);
    return hash ? hash : 1;
}

/* Check that a file is still the one that was opened. All ranks have opened theirs by now, so a
 * rank that has opened an older save than the others finds out here. */
static int check_file(void *ctx, size_t i, struct ckpt_err *err)
{
    struct sampling *l = ctx;
    const int rc = ckpt_source_file_verify(l->view->cat->sources.ptr[i], true, err);

    (void)pthread_mutex_lock(&l->task.lock);
    l->is_checked[i] = true;
    (void)pthread_mutex_unlock(&l->task.lock);
    return rc;
}

static int take_sample(void *ctx, size_t i, struct ckpt_err *err)
{
    struct sampling *l = ctx;
    const uint64_t hash = read_sample(&l->sample[i]);

    (void)err;
    (void)pthread_mutex_lock(&l->task.lock);
    l->sample[i].hash = hash;
    l->sample[i].is_done = true;
    (void)pthread_mutex_unlock(&l->task.lock);
    return 0;
}

static void sampling_run(struct ckpt_detached *e)
{
    struct sampling *l = (struct sampling *)e;
    struct ckpt_err err = {0};
    const int rc = ckpt_parallel(l->view->cat->sources.len, 0, check_file, l, &err);

    (void)pthread_mutex_lock(&e->lock);
    l->rc = rc;
    l->err = err;
    (void)pthread_mutex_unlock(&e->lock);
    if (rc == 0)
        (void)ckpt_parallel(l->n, 0, take_sample, l, NULL);
}

typedef CKPT_VEC(struct sample) samples;

/* Add a sample of each stored tensor from which a tensor is computed. Vectors are used only if
 * there is nothing else, because those of norms are often all ones. */
static int find_samples(const struct ckpt_catalog *cat, const struct ckpt_tensor *t, bool vectors,
                        samples *out)
{
    for (uint32_t i = 0; t->value && i < t->value->narg; i++)
        if (find_samples(t->value->arg[i]->cat, t->value->arg[i], vectors, out) < 0)
            return -1;
    if (t->npiece == 0 || (t->rank > 1) == vectors)
        return 0;
    const struct ckpt_piece *p = &t->piece[t->npiece / 2];
    struct sample s = {.off = p->src, .source = cat->sources.ptr[p->source], .tensor = t->name};
    while (s.source->ops->stored) /* a sample is not worth decoding a tensor */
        s.source = s.source->ops->stored(s.source, &s.off);
    return s.off < s.source->size ? ckpt_vec_push(out, s) : 0;
}

/* Choose at most SAMPLES samples, evenly over the catalogue; *ret_n is their number. */
static int choose_samples(const struct ckpt_catalog *cat, struct sample *ret, uint32_t *ret_n)
{
    ckpt_cleanup(ckpt_vec_cleanup) samples all = {0};
    int rc = 0;

    for (int vectors = 0; vectors < 2 && all.len == 0; vectors++)
        for (size_t i = 0; i < cat->tensors.len && rc == 0; i++)
            rc = find_samples(cat, &cat->tensors.ptr[i], vectors != 0, &all);
    *ret_n = (uint32_t)ckpt_min_u64(SAMPLES, all.len);
    for (uint32_t i = 0; i < *ret_n; i++)
        ret[i] = all.ptr[i * all.len / *ret_n];
    return rc;
}

static int read_one(void *ctx, size_t i, struct ckpt_err *err)
{
    const struct sample *sample = ctx;

    (void)err;
    (void)read_sample(&sample[i]);
    return 0;
}

void ckpt_catalog_read_samples(const struct ckpt_catalog *cat)
{
    struct sample sample[SAMPLES];
    uint32_t n = 0;

    if (choose_samples(cat, sample, &n) == 0)
        (void)ckpt_parallel(n, 0, read_one, sample, NULL);
}

static int sampling_new(struct ckpt_view *view, struct sampling **ret, struct ckpt_err *err)
{
    struct sampling *l = calloc(1, sizeof *l);

    if (!l)
        return ckpt_nomem(err);
    ckpt_detached_init(&l->task, sampling_run, sampling_free);
    l->view = ckpt_view_hold(view);
    l->is_checked = calloc(view->cat->sources.len + 1, sizeof *l->is_checked);
    if (!l->is_checked || choose_samples(view->cat, l->sample, &l->n) < 0) {
        ckpt_detached_unref(&l->task);
        return ckpt_nomem(err);
    }
    *ret = l;
    return 0;
}

/* TIMEOUT, naming the first that is not done. */
static int fail_slow(const struct sampling *l, uint32_t timeout_ms, struct ckpt_err *err)
{
    const struct ckpt_catalog *cat = l->view->cat;
    size_t file = 0, at = 0;

    while (file < cat->sources.len && l->is_checked[file])
        file++;
    if (file < cat->sources.len) {
        ckpt_cleanup(ckpt_freep) char *name = ckpt_source_name(cat->sources.ptr[file]);
        return ckpt_fail(err, CKPT_TIMEOUT, "opening '%s' again takes longer than %.1f s",
                         name ? name : "a file", timeout_ms / 1000.0);
    }
    while (at + 1 < l->n && l->sample[at].is_done)
        at++;
    const struct sample *s = &l->sample[at];
    ckpt_cleanup(ckpt_freep) char *name = ckpt_source_name(s->source);

    return ckpt_fail(err, CKPT_TIMEOUT,
                     "tensor '%s': reading '%s' at byte %" PRIu64 " takes longer than %.1f s",
                     s->tensor, name ? name : "its file", s->off, timeout_ms / 1000.0);
}

static int read_samples(struct ckpt_view *view, uint32_t timeout_ms, uint64_t hash[SAMPLES],
                        struct ckpt_err *err)
{
    struct sampling *l = NULL;

    if (sampling_new(view, &l, err) < 0)
        return -1;
    int rc = ckpt_detached_start(&l->task, err);
    const bool done = ckpt_detached_wait(&l->task, timeout_ms);
    (void)pthread_mutex_lock(&l->task.lock);
    for (uint32_t i = 0; i < l->n; i++)
        hash[i] = l->sample[i].hash;
    if (!done)
        rc = fail_slow(l, timeout_ms, err);
    else if (l->rc < 0 && rc == 0)
        rc = ckpt_fail(err, l->err.code,
                       "%s: it was saved anew while the ranks opened it: load it again",
                       l->err.text);
    (void)pthread_mutex_unlock(&l->task.lock);
    ckpt_detached_unref(&l->task);
    return rc;
}

/* Fail because sample i of rank r differs. Rank 0 names its own file; both have the same name. */
static int fail_bytes(struct ckpt_view *view, uint32_t r, uint32_t i, struct ckpt_err *err)
{
    struct sampling *l = NULL;

    if (sampling_new(view, &l, err) < 0)
        return -1;
    ckpt_cleanup(ckpt_freep) char *name = ckpt_source_name(l->sample[i].source);
    (void)ckpt_fail(err, CKPT_CONFLICT,
                    "rank %" PRIu32 " sees another checkpoint than rank 0: tensor '%s' has other "
                    "bytes there than '%s' has here, at byte %" PRIu64,
                    r, l->sample[i].tensor, name ? name : "its file", l->sample[i].off);
    ckpt_detached_unref(&l->task);
    return -1;
}

static int reduce_samples(void *ctx, const unsigned char *const *data, const size_t *len,
                          struct ckpt_str *answer, struct ckpt_err *err)
{
    const struct ckpt_load *load = ctx;
    uint64_t first[SAMPLES] = {0}, hash[SAMPLES];

    (void)answer;
    for (uint32_t r = 0; r < load->comm->x->size; r++) {
        if (len[r] != sizeof hash)
            return ckpt_fail(err, CKPT_CONFLICT, "rank %" PRIu32 " runs another version of ckptfs",
                             r);
        memcpy(hash, data[r], sizeof hash);
        for (uint32_t i = 0; i < SAMPLES; i++) {
            if (hash[i] && first[i] && hash[i] != first[i])
                return fail_bytes(load->view, r, i, err);
            if (r == 0) /* rank 0 compares all ranks with itself */
                first[i] = hash[i];
        }
    }
    return 0;
}

int ckpt_load_compare(struct ckpt_load *load, struct ckpt_err *err)
{
    uint64_t hash[SAMPLES] = {0};
    struct ckpt_round round = {.comm = load->comm,
                               .timeout_ms = load->opt.exchange_timeout_ms,
                               .own = hash,
                               .own_len = sizeof hash,
                               .reduce = reduce_samples,
                               .ctx = load};
    int rc = read_samples(load->view, load->opt.read_timeout_ms, hash, err);

    if (rc < 0)
        (void)ckpt_err_in(err, "rank %" PRIu32, load->comm->x->rank);
    return ckpt_round_run(&round, rc, NULL, NULL, err);
}

/* ---- at the end of a load ---- */

static int verify_file(void *ctx, size_t i, struct ckpt_err *err)
{
    const struct ckpt_catalog *cat = ctx;

    return ckpt_source_file_verify(ckpt_source_file_behind(cat->sources.ptr[i]), false, err);
}

int ckpt_load_files_unchanged(const struct ckpt_view *view, struct ckpt_err *err)
{
    if (view->shared->opt->allow_mixed ||
        ckpt_parallel(view->cat->sources.len, 0, verify_file, view->cat, err) == 0)
        return 0;
    return ckpt_err_in(err, "the step was saved again while it was loaded: load it again");
}
