/* SPDX-License-Identifier: Apache-2.0 */
/* Folding changes into bytes, and making them. */
#include "format/delta/fold.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include <ckptfs/ckptfs.h>

#include "base/ckd.h"
#include "base/mem.h"
#include "base/str.h"
#include "container/zstd.h"
#include "tensor/read.h"
#include "tensor/slab.h"

enum {
    BUDGET = 512 << 20, /* bytes of folded tensors that are kept */
    PART = 16 << 20,    /* of a tensor that is folded in parts */
    STEP = 256 * 1024,  /* bytes that are combined at once: they stay in the CPU's cache */
    POSITIONS = 1024,   /* of a change that are held */
    MOST_OPEN = 16,     /* tensors of which it is kept where the last read ended */
    ADLER_MOD = 65521,  /* RFC 1950 */
    ADLER_ROUND = 5552, /* bytes without a division */
};

/* ---- checksums ---- */

enum ckpt_delta_sum ckpt_delta_sum_find(const char *name)
{
    return name && strcmp(name, "xxh3-128") == 0  ? CKPT_DELTA_XXH3
           : name && strcmp(name, "adler32") == 0 ? CKPT_DELTA_ADLER32
                                                  : CKPT_DELTA_UNCHECKED;
}

/* A checksum that is being computed; all zero but `kind` before the first bytes. */
struct summing {
    enum ckpt_delta_sum kind;
    void *xxh3; /* malloc'ed; freed by sum_end */
    uint32_t a, b;
};

/* Add the next bytes; -1: no memory. */
static int sum_add(struct summing *s, const void *data, size_t len)
{
    const unsigned char *p = data;

    if (s->kind == CKPT_DELTA_XXH3) {
        if (!s->xxh3 && (!(s->xxh3 = XXH3_createState()) || XXH3_128bits_reset(s->xxh3) != XXH_OK))
            return -1;
        (void)XXH3_128bits_update(s->xxh3, data, len);
    }
    while (s->kind == CKPT_DELTA_ADLER32 && len) {
        const size_t n = len < ADLER_ROUND ? len : ADLER_ROUND;
        for (size_t i = 0; i < n; i++) /* a counts from 0 here: Adler's begins with 1 */
            s->b += s->a += p[i];
        s->a %= ADLER_MOD;
        s->b = (uint32_t)((s->b + n) % ADLER_MOD);
        p += n;
        len -= n;
    }
    return 0;
}

/* The digits; frees what the checksum has allocated. */
static void sum_end(struct summing *s, char ret_digits[33])
{
    *ret_digits = '\0';
    if (s->kind == CKPT_DELTA_ADLER32)
        (void)snprintf(ret_digits, 33, "%04x%04x", s->b, (s->a + 1) % ADLER_MOD);
    if (s->kind == CKPT_DELTA_XXH3) {
        const XXH128_hash_t h = s->xxh3 ? XXH3_128bits_digest(s->xxh3) : XXH3_128bits(NULL, 0);
        (void)snprintf(ret_digits, 33, "%016" PRIx64 "%016" PRIx64, (uint64_t)h.high64,
                       (uint64_t)h.low64);
    }
    (void)XXH3_freeState(s->xxh3);
    *s = (struct summing){.kind = s->kind};
}

/* ---- the store ---- */

struct ckpt_delta_store {
    struct ckpt_slabs *slabs;
    atomic_uint refs;
    pthread_mutex_t lock; /* protects what follows */
    struct source_delta *open[MOST_OPEN];
    unsigned next;
};

/* A change that is being applied. */
struct level {
    struct ckpt_zstd_stream *bytes, *values; /* values: the bytes behind the positions */
    uint64_t left;                           /* of an overwrite: positions that were not decoded */
    uint64_t last;                           /* one more than the last position */
    uint32_t position[POSITIONS];
    unsigned char value[POSITIONS];
    size_t n, at; /* how many are held, and the next of them */
    struct summing sum;
};

struct source_delta {
    struct ckpt_source source;
    struct ckpt_delta_store *store;
    struct ckpt_source *base;
    uint64_t off;
    uint64_t part;             /* bytes that are folded together: all, unless the tensor is long */
    struct source_delta *next; /* ckpt_source_delta_next */
    size_t n;
    pthread_mutex_t lock; /* protects the next three */
    bool good;            /* of a tensor in parts: its checksum has been compared */
    struct level *level;  /* NULL: closed */
    uint64_t done;        /* bytes to which the levels have been applied */
    struct ckpt_delta delta[];
};

int ckpt_delta_store_new(struct ckpt_delta_store **ret, struct ckpt_err *err)
{
    struct ckpt_delta_store *store = calloc(1, sizeof *store);

    if (!store)
        return ckpt_nomem(err);
    if (ckpt_slabs_new(BUDGET, &store->slabs, err) < 0) {
        free(store);
        return -1;
    }
    atomic_init(&store->refs, 1);
    (void)pthread_mutex_init(&store->lock, NULL);
    *ret = store;
    return 0;
}

void ckpt_delta_store_unref(struct ckpt_delta_store *store)
{
    if (!store || atomic_fetch_sub(&store->refs, 1) != 1)
        return;
    ckpt_slabs_unref(store->slabs);
    (void)pthread_mutex_destroy(&store->lock);
    free(store);
}

/* ---- one change ---- */

static int damaged(const struct ckpt_delta *d, const char *why, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *name = ckpt_source_name(d->of);

    return ckpt_fail(err, CKPT_FORMAT, "the change of '%s' in version '%s' ('%s'): %s", d->tensor,
                     d->version, name, why);
}

/* Read exactly len bytes. */
static int take(const struct ckpt_delta *d, struct ckpt_zstd_stream *s, void *buf, size_t len,
                struct ckpt_err *err)
{
    size_t n;

    if (ckpt_zstd_stream_read(s, buf, len, &n, err) < 0)
        return ckpt_err_in(err, "the change of '%s' in version '%s'", d->tensor, d->version);
    return n == len ? 0
                    : damaged(d, "it is shorter than the tensor's size, or its own count, asks for",
                              err);
}

static void level_close(struct level *l)
{
    char digits[33];

    ckpt_zstd_stream_free(l->bytes);
    ckpt_zstd_stream_free(l->values);
    sum_end(&l->sum, digits);
}

static uint32_t u32_at(const unsigned char *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

/* Find the positions and the values of an overwrite. */
static int open_overwrite(const struct ckpt_delta *d, struct level *l, uint64_t size,
                          struct ckpt_err *err)
{
    unsigned char count[4], skipped[4096];

    if (take(d, l->bytes, count, sizeof count, err) < 0 ||
        ckpt_zstd_stream_new(d->of, d->off, d->len, &l->values, err) < 0)
        return -1;
    l->left = u32_at(count);
    if (l->left > size)
        return damaged(d, "it has more positions than the tensor has bytes", err);
    for (uint64_t skip = 4 + 4 * l->left, n; skip; skip -= n) {
        n = ckpt_min_u64(skip, sizeof skipped);
        if (take(d, l->values, skipped, (size_t)n, err) < 0)
            return -1;
    }
    return 0;
}

static int level_open(const struct ckpt_delta *d, struct level *l, uint64_t size,
                      struct ckpt_err *err)
{
    l->sum.kind = d->sum;
    if (ckpt_zstd_stream_new(d->of, d->off, d->len, &l->bytes, err) < 0)
        return -1;
    return d->overwrite ? open_overwrite(d, l, size, err) : 0;
}

/* Combine n bytes, eight at a time. */
static void combine(unsigned char *to, const unsigned char *from, size_t n)
{
    size_t i = 0;

    for (uint64_t a, b; i + sizeof a <= n; i += sizeof a) {
        memcpy(&a, to + i, sizeof a);
        memcpy(&b, from + i, sizeof b);
        a ^= b;
        memcpy(to + i, &a, sizeof a);
    }
    for (; i < n; i++)
        to[i] ^= from[i];
}

/* Decode the next positions and their values. */
static int next_positions(const struct ckpt_delta *d, struct level *l, uint64_t size,
                          struct ckpt_err *err)
{
    unsigned char raw[4 * POSITIONS];

    l->at = 0;
    l->n = (size_t)ckpt_min_u64(l->left, POSITIONS);
    if (take(d, l->bytes, raw, 4 * l->n, err) < 0 || take(d, l->values, l->value, l->n, err) < 0)
        return -1;
    for (size_t i = 0; i < l->n; i++) {
        l->position[i] = u32_at(raw + 4 * i);
        if (l->position[i] < l->last || l->position[i] >= size)
            return damaged(d, "its positions do not ascend, or are outside of the tensor", err);
        l->last = (uint64_t)l->position[i] + 1;
    }
    l->left -= l->n;
    return 0;
}

/* Apply a change to bytes [lo, lo + len) of a tensor of `size` bytes; there is room for as many at
 * `change`. */
static int apply(const struct ckpt_delta *d, struct level *l, unsigned char *buf, uint64_t lo,
                 size_t len, uint64_t size, unsigned char *change, struct ckpt_err *err)
{
    unsigned char more;
    size_t n = 0;

    if (!d->overwrite && take(d, l->bytes, change, len, err) < 0)
        return -1;
    if (!d->overwrite)
        combine(buf, change, len);
    while (d->overwrite && (l->at < l->n || l->left)) {
        if (l->at == l->n && next_positions(d, l, size, err) < 0)
            return -1;
        if (l->position[l->at] >= lo + len)
            break;
        buf[l->position[l->at] - lo] = l->value[l->at];
        l->at++;
    }
    if (sum_add(&l->sum, buf, len) < 0)
        return ckpt_nomem(err);
    if (lo + len < size)
        return 0;
    if (ckpt_zstd_stream_read(d->overwrite ? l->values : l->bytes, &more, 1, &n, err) < 0)
        return ckpt_err_in(err, "the change of '%s' in version '%s'", d->tensor, d->version);
    if (n)
        return damaged(d, "it is longer than the tensor's size asks for", err);
    char digits[33];
    sum_end(&l->sum, digits);
    if (d->sum == CKPT_DELTA_UNCHECKED || strcmp(digits, d->digits) == 0)
        return 0;
    ckpt_cleanup(ckpt_freep) char *why = ckpt_asprintf(
        "the bytes that it leads to have the checksum %s, expected %s: it is damaged, or of "
        "another base",
        digits, d->digits);
    return damaged(d, why ? why : "another checksum", err);
}

/* ---- all changes ---- */

static void close_levels(struct source_delta *s)
{
    for (size_t i = 0; s->level && i < s->n; i++)
        level_close(&s->level[i]);
    free(ckpt_steal(&s->level));
    s->done = 0;
}

static int open_levels(struct source_delta *s, struct ckpt_err *err)
{
    s->done = 0;
    if (!(s->level = calloc(s->n, sizeof *s->level)))
        return ckpt_nomem(err);
    for (size_t i = 0; i < s->n; i++)
        if (level_open(&s->delta[i], &s->level[i], s->source.size, err) < 0) {
            close_levels(s);
            return -1;
        }
    return 0;
}

/* The next len bytes of the tensor, in steps that stay in the CPU's cache. */
static int fold(struct source_delta *s, unsigned char *buf, size_t len, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) unsigned char *change = malloc(STEP);
    int rc = !change ? ckpt_nomem(err) : s->level ? 0 : open_levels(s, err);

    for (size_t n; len && rc == 0; buf += n, len -= n, s->done += n) {
        n = len < STEP ? len : STEP;
        rc = ckpt_source_pread(s->base, buf, n, s->off + s->done, err);
        for (size_t i = 0; i < s->n && rc == 0; i++)
            rc = apply(&s->delta[i], &s->level[i], buf, s->done, n, s->source.size, change, err);
    }
    if (rc < 0 || s->done == s->source.size)
        close_levels(s);
    return rc;
}

static size_t part_len(const struct source_delta *s, uint64_t part)
{
    return (size_t)ckpt_min_u64(s->part, s->source.size - part * s->part);
}

/* It is remembered of a few tensors where the last read ended. */
static void remember(struct source_delta *s)
{
    struct ckpt_delta_store *store = s->store;
    struct source_delta *old = NULL;

    (void)pthread_mutex_lock(&store->lock);
    bool known = false;
    for (unsigned i = 0; i < MOST_OPEN; i++)
        known |= store->open[i] == s;
    if (!known) {
        old = store->open[store->next % MOST_OPEN];
        store->open[store->next++ % MOST_OPEN] = s;
        if (old && pthread_mutex_trylock(&old->lock) == 0) {
            close_levels(old);
            (void)pthread_mutex_unlock(&old->lock);
        }
    }
    (void)pthread_mutex_unlock(&store->lock);
}

/* Fold all parts once, to compare the checksums. */
static int check_whole(struct source_delta *s, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) unsigned char *buf = malloc((size_t)s->part);

    if (!buf)
        return ckpt_nomem(err);
    close_levels(s);
    for (uint64_t part = 0; part * s->part < s->source.size; part++)
        if (fold(s, buf, part_len(s, part), err) < 0)
            return -1;
    s->good = true;
    return 0;
}

static struct ckpt_slab slab_of(struct source_delta *s, uint64_t part);

/* Find the part that is folded next, which is not behind `part`; the tensor is locked. */
static int lock_at(struct source_delta *s, uint64_t part, uint64_t *ret, struct ckpt_err *err)
{
    int rc = 0;

    (void)pthread_mutex_lock(&s->lock);
    if (s->part < s->source.size && !s->good)
        rc = check_whole(s, err);
    if (s->done > part * s->part)
        close_levels(s);
    *ret = s->done / s->part;
    return rc;
}

static int fill(const void *ctx, void *buf, size_t len, uint64_t part, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) unsigned char *again = NULL;
    struct source_delta *s = (struct source_delta *)ctx;
    uint64_t next, read = UINT64_MAX;
    char byte;
    int rc;

    while ((rc = lock_at(s, part, &next, err)) == 0 && next < part) { /* parts before this one */
        if (next == read) { /* it was kept, so nobody has folded it again */
            if (!again && !(again = malloc((size_t)s->part)))
                rc = ckpt_nomem(err);
            if (rc == 0)
                rc = fold(s, again, (size_t)s->part, err);
        }
        (void)pthread_mutex_unlock(&s->lock);
        const struct ckpt_slab slab = slab_of(s, next);
        if (rc < 0 ||
            (next != read && ckpt_slabs_read(s->store->slabs, &slab, &byte, 1, 0, err) < 0))
            return -1;
        read = next;
    }
    if (rc == 0)
        rc = fold(s, buf, len, err);
    (void)pthread_mutex_unlock(&s->lock);
    if (rc == 0 && len < s->source.size)
        remember(s);
    return rc;
}

/* ---- the source ---- */

static struct source_delta *self(const struct ckpt_source *s) { return (struct source_delta *)s; }

static bool next_whole(const void *ctx, struct ckpt_slab *ret)
{
    const struct source_delta *s = ctx;

    if (!s->next || s->next->part < s->next->source.size)
        return false;
    *ret = slab_of(s->next, 0);
    return true;
}

static struct ckpt_slab slab_of(struct source_delta *s, uint64_t part)
{
    return (struct ckpt_slab){.scope = s->store,
                              .owner = s,
                              .number = part,
                              .len = part_len(s, part),
                              .fill = fill,
                              .ctx = s,
                              .next = next_whole};
}

static int read_part(struct source_delta *s, unsigned char *buf, size_t len, uint64_t off,
                     struct ckpt_err *err)
{
    for (size_t n; len; buf += n, off += n, len -= n) {
        const uint64_t part = off / s->part, begin = part * s->part;
        const struct ckpt_slab slab = slab_of(s, part);
        n = (size_t)ckpt_min_u64(len, begin + slab.len - off);
        if (ckpt_slabs_read(s->store->slabs, &slab, buf, n, (size_t)(off - begin), err) < 0)
            return -1;
    }
    return 0;
}

static int delta_preadv(struct ckpt_source *s, struct iovec *iov, int n, uint64_t off,
                        struct ckpt_err *err)
{
    for (int i = 0; i < n; off += iov[i++].iov_len)
        if (read_part(self(s), iov[i].iov_base, iov[i].iov_len, off, err) < 0)
            return -1;
    return 0;
}

static int delta_check(struct ckpt_source *s, struct ckpt_err *err)
{
    int rc = ckpt_source_check(self(s)->base, err);

    for (size_t i = 0; i < self(s)->n && rc == 0; i++)
        rc = ckpt_source_check(self(s)->delta[i].of, err);
    return rc;
}

static char *delta_name(const struct ckpt_source *s)
{
    struct ckpt_str name = {0};
    char *text = ckpt_source_name(self(s)->base);

    ckpt_str_printf(&name, "%s, changed by", text);
    free(text);
    for (size_t i = 0; i < self(s)->n; i++)
        ckpt_str_printf(&name, "%s %s", i ? "," : "", self(s)->delta[i].version);
    (void)ckpt_str_steal(&name, &text, &(struct ckpt_err){0});
    return text;
}

static void delta_free(struct ckpt_source *source)
{
    struct source_delta *s = self(source);

    (void)pthread_mutex_lock(&s->store->lock);
    for (unsigned i = 0; i < MOST_OPEN; i++)
        if (s->store->open[i] == s)
            s->store->open[i] = NULL;
    (void)pthread_mutex_unlock(&s->store->lock);
    close_levels(s);
    ckpt_delta_store_unref(s->store);
    ckpt_source_unref(s->base);
    for (size_t i = 0; i < s->n; i++)
        ckpt_source_unref(s->delta[i].of);
    (void)pthread_mutex_destroy(&s->lock);
    free(s);
}

static bool delta_same(const struct ckpt_source *x, const struct ckpt_source *y)
{
    const struct source_delta *a = self(x), *b = self(y);
    bool same = a->off == b->off && a->n == b->n && ckpt_source_same(a->base, b->base);

    for (size_t i = 0; same && i < a->n; i++) {
        const struct ckpt_delta *p = &a->delta[i], *q = &b->delta[i];
        same = p->off == q->off && p->len == q->len && p->overwrite == q->overwrite &&
               ckpt_source_same(p->of, q->of);
    }
    return same;
}

static struct ckpt_source *delta_stored(const struct ckpt_source *s, uint64_t *ret_off)
{
    const struct ckpt_delta *newest = &self(s)->delta[self(s)->n - 1];

    *ret_off = newest->off;
    return newest->of;
}

static const struct ckpt_source_ops delta_ops = {.preadv = delta_preadv,
                                                 .check = delta_check,
                                                 .name = delta_name,
                                                 .free = delta_free,
                                                 .same = delta_same,
                                                 .stored = delta_stored};

int ckpt_source_delta_new(struct ckpt_delta_store *store, struct ckpt_source *base, uint64_t off,
                          uint64_t size, const struct ckpt_delta *delta, size_t n,
                          struct ckpt_source **ret, struct ckpt_err *err)
{
    struct source_delta *s = calloc(1, sizeof *s + n * sizeof *delta);

    if (!s)
        return ckpt_nomem(err);
    atomic_fetch_add(&store->refs, 1);
    atomic_init(&s->source.refs, 1);
    s->source.ops = &delta_ops;
    s->source.size = size;
    s->store = store;
    s->base = ckpt_source_ref(base);
    s->off = off;
    s->part = size > CKPT_DELTA_WHOLE ? PART : size;
    s->n = n;
    memcpy(s->delta, delta, n * sizeof *delta);
    for (size_t i = 0; i < n; i++)
        (void)ckpt_source_ref(s->delta[i].of);
    (void)pthread_mutex_init(&s->lock, NULL);
    *ret = &s->source;
    return 0;
}

void ckpt_source_delta_next(struct ckpt_source *s, struct ckpt_source *next)
{
    self(s)->next = self(next);
}

/* ---- making changes: two tensors are read side by side, and only compressed bytes are kept ----
 */

enum { AT_ONCE = 512 * 1024, HELD = 4096 };

struct making {
    const struct ckpt_tensor *a, *b;
    struct ckpt_reading *of_a, *of_b;
    struct ckpt_zstd_frame *frame;
    struct summing *sum; /* of the pass that computes it; else NULL */
    uint64_t changed;
    unsigned char *old, *new;
    unsigned char held[4 * HELD]; /* positions or values that are not compressed yet */
    size_t nheld;
};

/* The work that a pass does with bytes [lo, lo + n). */
typedef int pass_fn(struct making *m, uint64_t lo, size_t n, struct ckpt_err *err);

static int pass(struct making *m, pass_fn *fn, struct ckpt_err *err)
{
    const uint64_t size = ckpt_tensor_nbytes(m->b);

    m->changed = 0;
    for (uint64_t lo = 0; lo < size; lo += AT_ONCE) {
        const size_t n = (size_t)ckpt_min_u64(AT_ONCE, size - lo);
        if (ckpt_tensor_pread(m->a, m->of_a, m->old, n, lo, err) < 0 ||
            ckpt_tensor_pread(m->b, m->of_b, m->new, n, lo, err) < 0)
            return -1;
        if (m->sum && sum_add(m->sum, m->new, n) < 0)
            return ckpt_nomem(err);
        if (fn(m, lo, n, err) < 0)
            return -1;
    }
    return 0;
}

static int exclusive_or(struct making *m, uint64_t lo, size_t n, struct ckpt_err *err)
{
    const uint64_t low = 0x7f7f7f7f7f7f7f7f;
    size_t i = 0;

    (void)lo;
    for (uint64_t x, y; i + sizeof x <= n; i += sizeof x) {
        memcpy(&x, m->old + i, sizeof x);
        memcpy(&y, m->new + i, sizeof y);
        x ^= y;
        memcpy(m->old + i, &x, sizeof x);
        /* the highest bit of each byte that is not 0; then their sum */
        x = (((x & low) + low) | x) & ~low;
        m->changed += ((x >> 7) * 0x0101010101010101) >> 56;
    }
    for (; i < n; i++)
        m->changed += (m->old[i] ^= m->new[i]) != 0;
    return ckpt_zstd_frame_add(m->frame, m->old, n, err);
}

static int count(struct making *m, uint64_t lo, size_t n, struct ckpt_err *err)
{
    size_t changed = 0;

    (void)lo, (void)err;
    for (size_t i = 0; i < n; i++)
        changed += m->old[i] != m->new[i];
    m->changed += changed;
    return 0;
}

static int flush(struct making *m, struct ckpt_err *err)
{
    const size_t n = m->nheld;

    m->nheld = 0;
    return n ? ckpt_zstd_frame_add(m->frame, m->held, n, err) : 0;
}

static int put_u32(struct making *m, uint64_t value, struct ckpt_err *err)
{
    if (m->nheld == sizeof m->held && flush(m, err) < 0)
        return -1;
    for (int k = 0; k < 4; k++)
        m->held[m->nheld++] = (unsigned char)(value >> 8 * k);
    return 0;
}

static int positions(struct making *m, uint64_t lo, size_t n, struct ckpt_err *err)
{
    for (size_t i = 0; i < n; i++)
        if (m->old[i] != m->new[i] && put_u32(m, lo + i, err) < 0)
            return -1;
    return 0;
}

static int values(struct making *m, uint64_t lo, size_t n, struct ckpt_err *err)
{
    (void)lo;
    for (size_t i = 0; i < n; i++) {
        if (m->old[i] == m->new[i])
            continue;
        if (m->nheld == sizeof m->held && flush(m, err) < 0)
            return -1;
        m->held[m->nheld++] = m->new[i];
    }
    return 0;
}

static int make_xor(struct making *m, struct ckpt_err *err)
{
    return ckpt_zstd_frame_new(ckpt_tensor_nbytes(m->b), &m->frame, err) < 0
               ? -1
               : pass(m, exclusive_or, err);
}

static int make_overwrite(struct making *m, struct ckpt_err *err)
{
    if (ckpt_tensor_nbytes(m->b) > (uint64_t)UINT32_MAX + 1)
        return ckpt_fail(err, CKPT_LIMIT,
                         "tensor '%s' has more than 2^32 bytes, whose positions overwrite cannot "
                         "hold: use xor",
                         m->b->name);
    if (pass(m, count, err) < 0)
        return -1;
    const uint64_t n = m->changed;
    m->sum = NULL;
    if (n == 0)
        return 0;
    if (ckpt_zstd_frame_new(4 + 5 * n, &m->frame, err) < 0 || put_u32(m, n, err) < 0 ||
        pass(m, positions, err) < 0 || pass(m, values, err) < 0)
        return -1;
    m->changed = n;
    return flush(m, err);
}

int ckpt_delta_make(const struct ckpt_tensor *a, struct ckpt_reading *of_a,
                    const struct ckpt_tensor *b, struct ckpt_reading *of_b, bool overwrite,
                    struct ckpt_change *ret, struct ckpt_err *err)
{
    struct summing sum = {.kind = CKPT_DELTA_XXH3};
    ckpt_cleanup(ckpt_freep) struct making *m = calloc(1, sizeof *m);
    ckpt_cleanup(ckpt_freep) unsigned char *memory = malloc((size_t)2 * AT_ONCE);

    *ret = (struct ckpt_change){.size = ret->size};
    if (!m || !memory)
        return ckpt_nomem(err);
    *m = (struct making){.a = a, .b = b, .of_a = of_a, .of_b = of_b, .sum = &sum};
    m->old = memory;
    m->new = memory + AT_ONCE;
    int rc = overwrite ? make_overwrite(m, err) : make_xor(m, err);
    const bool keep = rc == 0 && m->changed;
    if (ckpt_zstd_frame_end(m->frame, keep ? &ret->data : NULL, &ret->len, err) < 0)
        rc = -1;
    ret->changed = m->changed;
    sum_end(&sum, ret->checksum);
    return rc;
}
