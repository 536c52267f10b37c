/* SPDX-License-Identifier: Apache-2.0 */
/* Recording answers of directories and files, and replaying them. */
#include "io/recording.h"

#include <errno.h>
#include <limits.h>
#include <string.h>
#include <time.h>
#include <xxhash.h>

#include "base/ckd.h"
#include "base/sort.h"
#include "io/recording_table.h"

bool ckpt_errno_is_answer(int errnum)
{
    static const int answers[] = {ENOENT, ENOTDIR, EXDEV, ELOOP, ENAMETOOLONG, ENXIO};

    for (size_t i = 0; i < sizeof answers / sizeof answers[0]; i++)
        if (errnum == answers[i])
            return true;
    return false;
}

/* ---- life ---- */

int ckpt_recording_alloc(enum ckpt_recording_state state, struct ckpt_recording **ret,
                         struct ckpt_err *err)
{
    struct ckpt_recording *r = calloc(1, sizeof *r);

    if (!r)
        return ckpt_nomem(err);
    atomic_init(&r->refs, 1);
    atomic_init(&r->state, state);
    (void)pthread_mutex_init(&r->lock, NULL);
    *ret = r;
    return 0;
}

int ckpt_recording_new(uint64_t machine, uint64_t most_bytes, struct ckpt_recording **ret,
                       struct ckpt_err *err)
{
    struct timespec now;

    if (ckpt_recording_alloc(CKPT_RECORDING, ret, err) < 0)
        return -1;
    (void)clock_gettime(CLOCK_REALTIME, &now);
    (*ret)->begin_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    (*ret)->machine = machine;
    (*ret)->most_bytes = most_bytes;
    return 0;
}

struct ckpt_recording *ckpt_recording_ref(struct ckpt_recording *r)
{
    if (r)
        atomic_fetch_add(&r->refs, 1);
    return r;
}

void ckpt_recording_unref(struct ckpt_recording *r)
{
    if (!r || atomic_fetch_sub(&r->refs, 1) != 1)
        return;
    for (size_t i = 0; i < r->file.len; i++)
        ckpt_vec_release(&r->file.ptr[i].chunk);
    ckpt_vec_release(&r->file);
    ckpt_map_release(&r->by_key);
    ckpt_arena_release(&r->arena);
    (void)pthread_mutex_destroy(&r->lock);
    free(r);
}

void ckpt_recording_unrefp(struct ckpt_recording **r)
{
    ckpt_recording_unref(*r);
    *r = NULL;
}

bool ckpt_recording_records(const struct ckpt_recording *r)
{
    return r && atomic_load(&r->state) == CKPT_RECORDING;
}

bool ckpt_recording_replays(const struct ckpt_recording *r)
{
    return r && atomic_load(&r->state) == CKPT_REPLAYING;
}

void ckpt_recording_witness(struct ckpt_recording *r)
{
    (void)pthread_mutex_lock(&r->lock);
    r->witness = true;
    (void)pthread_mutex_unlock(&r->lock);
}

uint32_t ckpt_recording_add_root(struct ckpt_recording *r, const struct ckpt_file_id *id)
{
    (void)pthread_mutex_lock(&r->lock);
    const uint32_t root = r->nroot++;
    if (root < CKPT_RECORDING_ROOTS && ckpt_recording_replays(r))
        r->same_root[root] = r->same_machine && r->root_inode[root] == id->inode;
    else if (root < CKPT_RECORDING_ROOTS)
        r->root_inode[root] = id->inode;
    (void)pthread_mutex_unlock(&r->lock);
    return root;
}

uint64_t ckpt_recording_progress(const struct ckpt_recording *r)
{
    return r ? atomic_load_explicit(&r->progress, memory_order_relaxed) : 0;
}

/* ---- the table ---- */

struct key {
    size_t len;
    char text[PATH_MAX + 2];
};

/* False: the path is too long for a key, or its root is not recorded. */
static bool key_of(const struct ckpt_place *at, struct key *ret)
{
    const size_t len = strlen(at->path);

    if (at->root >= CKPT_RECORDING_ROOTS || len > PATH_MAX)
        return false;
    ret->text[0] = (char)('0' + at->root);
    memcpy(ret->text + 1, at->path, len + 1);
    ret->len = len + 1;
    return true;
}

struct ckpt_recorded *ckpt_recording_put(struct ckpt_recording *r, const char *key, size_t len,
                                         bool *ret_new)
{
    uint32_t at;

    if (r->file.len >= UINT32_MAX || ckpt_vec_reserve(&r->file, 1) < 0 ||
        ckpt_map_put(&r->by_key, key, len, (uint32_t)r->file.len, &at, ret_new) < 0)
        return NULL;
    if (*ret_new)
        r->file.ptr[r->file.len++] = (struct ckpt_recorded){.key = key};
    return &r->file.ptr[at];
}

/* With the lock held. NULL: no memory, or the place cannot be recorded. */
static struct ckpt_recorded *to_record(const struct ckpt_place *at)
{
    struct ckpt_recording *r = at->rec;
    struct key key;
    uint32_t i;
    bool is_new;

    (void)atomic_fetch_add_explicit(&r->progress, 1, memory_order_relaxed);
    if (!key_of(at, &key))
        return NULL;
    if (ckpt_map_get(&r->by_key, key.text, key.len, &i))
        return &r->file.ptr[i];
    const char *own = ckpt_arena_strndup(&r->arena, key.text, key.len);
    return own ? ckpt_recording_put(r, own, key.len, &is_new) : NULL;
}

static const struct ckpt_recorded *find(const struct ckpt_place *at)
{
    struct key key;
    uint32_t i;

    (void)atomic_fetch_add_explicit(&at->rec->progress, 1, memory_order_relaxed);
    return key_of(at, &key) && ckpt_map_get(&at->rec->by_key, key.text, key.len, &i)
               ? &at->rec->file.ptr[i]
               : NULL;
}

/* ---- recording ---- */

void ckpt_record_look(const struct ckpt_place *at, const struct ckpt_look *look)
{
    if (!ckpt_recording_records(at->rec) || (look->errnum && !ckpt_errno_is_answer(look->errnum)))
        return;
    (void)pthread_mutex_lock(&at->rec->lock);
    struct ckpt_recorded *f = to_record(at);
    if (f && f->has_look) {
        const bool same = f->look.errnum == look->errnum && f->look.kind == look->kind &&
                          (look->kind == CKPT_ENTRY_DIR || look->errnum ||
                           ckpt_file_id_eq(&f->look.id, &look->id));
        f->changed |= !same;
    } else if (f) {
        f->has_look = true;
        f->look = *look;
    }
    (void)pthread_mutex_unlock(&at->rec->lock);
}

void ckpt_record_birth(const struct ckpt_place *at, int64_t birth_ns)
{
    if (!ckpt_recording_records(at->rec))
        return;
    (void)pthread_mutex_lock(&at->rec->lock);
    struct ckpt_recorded *f = to_record(at);
    if (f) {
        f->has_birth = true;
        f->birth_ns = birth_ns;
    }
    (void)pthread_mutex_unlock(&at->rec->lock);
}

static bool copy_list(struct ckpt_recording *r, struct ckpt_recorded *f,
                      const struct ckpt_listed *list, size_t n)
{
    struct ckpt_listed *own = ckpt_arena_alloc(&r->arena, (n + 1) * sizeof *own);

    for (size_t i = 0; own && i < n; i++) {
        own[i] = list[i];
        if (!(own[i].name = ckpt_arena_strdup(&r->arena, list[i].name)))
            return false;
    }
    f->list = own;
    f->nlist = n;
    return own != NULL;
}

void ckpt_record_list(const struct ckpt_place *at, const struct ckpt_listed *list, size_t n)
{
    if (!ckpt_recording_records(at->rec))
        return;
    (void)pthread_mutex_lock(&at->rec->lock);
    struct ckpt_recorded *f = to_record(at);
    if (f && !f->has_list)
        f->has_list = copy_list(at->rec, f, list, n);
    (void)pthread_mutex_unlock(&at->rec->lock);
}

static void gather(unsigned char *to, const struct iovec *iov, int n)
{
    for (int i = 0; i < n; to += iov[i++].iov_len)
        memcpy(to, iov[i].iov_base, iov[i].iov_len);
}

static size_t iov_bytes(const struct iovec *iov, int n)
{
    size_t len = 0;

    for (int i = 0; i < n; i++)
        len += iov[i].iov_len;
    return len;
}

/* Was the last read the same? Parsers often look at a place twice. */
static bool is_repeated(const struct ckpt_recorded *f, uint64_t off, size_t len)
{
    const struct ckpt_chunk *last = f->chunk.len ? &f->chunk.ptr[f->chunk.len - 1] : NULL;

    return last && last->off == off && last->len == len;
}

void ckpt_record_read(const struct ckpt_place *at, const struct iovec *iov, int n, uint64_t off)
{
    struct ckpt_recording *r = at->rec;
    const size_t len = iov_bytes(iov, n);
    unsigned char *data;

    if (!ckpt_recording_records(r))
        return;
    (void)pthread_mutex_lock(&r->lock);
    struct ckpt_recorded *f = to_record(at);
    if (f)
        f->witness |= r->witness;
    if (f && len && r->most_bytes - r->nbyte >= len && !is_repeated(f, off, len) &&
        (data = ckpt_arena_alloc(&r->arena, len))) {
        const struct ckpt_chunk chunk = {off, len, data};
        gather(data, iov, n);
        if (ckpt_vec_push(&f->chunk, chunk) == 0)
            r->nbyte += len;
    }
    (void)pthread_mutex_unlock(&r->lock);
}

static int chunk_cmp(const void *pa, const void *pb)
{
    const struct ckpt_chunk *a = pa, *b = pb;

    return ckpt_u64_cmp(a->off, b->off);
}

/* The chunks [i, ret) touch: together they are *ret_len bytes. */
static size_t run_of(const struct ckpt_recorded *f, size_t i, size_t *ret_len)
{
    const uint64_t off = f->chunk.ptr[i].off;
    uint64_t end = off;

    for (; i < f->chunk.len && f->chunk.ptr[i].off <= end; i++)
        end = ckpt_max_u64(end, f->chunk.ptr[i].off + f->chunk.ptr[i].len);
    *ret_len = (size_t)(end - off);
    return i;
}

int ckpt_recorded_join(struct ckpt_recording *r, struct ckpt_recorded *f)
{
    size_t n = 0, next, len;

    if (f->chunk.len)
        qsort(f->chunk.ptr, f->chunk.len, sizeof *f->chunk.ptr, chunk_cmp);
    for (size_t i = 0; i < f->chunk.len; i = next) {
        next = run_of(f, i, &len);
        struct ckpt_chunk joined = {f->chunk.ptr[i].off, len, f->chunk.ptr[i].data};
        if (next > i + 1) {
            unsigned char *data = ckpt_arena_alloc(&r->arena, len);
            if (!data)
                return -1;
            for (size_t k = i; k < next; k++)
                memcpy(data + (f->chunk.ptr[k].off - joined.off), f->chunk.ptr[k].data,
                       f->chunk.ptr[k].len);
            joined.data = data;
        }
        f->chunk.ptr[n++] = joined;
    }
    f->chunk.len = n;
    return 0;
}

/* ---- replaying ---- */

bool ckpt_replay_look(const struct ckpt_place *at, struct ckpt_look *ret)
{
    const struct ckpt_recorded *f = ckpt_recording_replays(at->rec) ? find(at) : NULL;

    if (!f || !f->has_look)
        return false;
    *ret = f->look;
    return true;
}

bool ckpt_replay_birth(const struct ckpt_place *at, int64_t *ret)
{
    const struct ckpt_recorded *f = ckpt_recording_replays(at->rec) ? find(at) : NULL;

    if (!f || !f->has_birth)
        return false;
    *ret = f->birth_ns;
    return true;
}

bool ckpt_replay_list(const struct ckpt_place *at, const struct ckpt_listed **ret, size_t *ret_n)
{
    const struct ckpt_recorded *f = ckpt_recording_replays(at->rec) ? find(at) : NULL;

    if (!f || !f->has_list)
        return false;
    *ret = f->list;
    *ret_n = f->nlist;
    return true;
}

/* The chunk that begins last, but not after off. */
static const struct ckpt_chunk *chunk_at(const struct ckpt_recorded *f, uint64_t off)
{
    size_t lo = 0, hi = f->chunk.len;

    while (lo < hi) {
        const size_t mid = lo + (hi - lo) / 2;
        if (f->chunk.ptr[mid].off <= off)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo ? &f->chunk.ptr[lo - 1] : NULL;
}

bool ckpt_replay_read(const struct ckpt_place *at, const struct iovec *iov, int n, uint64_t off)
{
    const struct ckpt_recorded *f = ckpt_recording_replays(at->rec) ? find(at) : NULL;
    const struct ckpt_chunk *c = f ? chunk_at(f, off) : NULL;
    const size_t len = iov_bytes(iov, n);

    if (f && len == 0)
        return true;
    if (!c || !ckpt_range_ok(off - c->off, len, c->len))
        return false;
    const unsigned char *from = c->data + (off - c->off);
    for (int i = 0; i < n; from += iov[i++].iov_len)
        memcpy(iov[i].iov_base, from, iov[i].iov_len);
    return true;
}

/* ---- afterwards ---- */

static int read_chunk(void *ctx, void *buf, size_t len, uint64_t off, struct ckpt_err *err)
{
    const struct ckpt_recorded *f = ctx;
    const struct ckpt_chunk *c = chunk_at(f, off);

    (void)err;
    memcpy(buf, c->data + (off - c->off), len);
    return 0;
}

int ckpt_chunks_digest(const struct ckpt_chunk *chunk, size_t n,
                       int (*read)(void *ctx, void *buf, size_t len, uint64_t off,
                                   struct ckpt_err *err),
                       void *ctx, unsigned char ret[16], struct ckpt_err *err)
{
    unsigned char buf[16384];
    XXH3_state_t *h = XXH3_createState();
    XXH128_canonical_t c;
    int rc = h ? 0 : ckpt_nomem(err);

    if (h)
        (void)XXH3_128bits_reset(h);
    for (size_t i = 0; i < n && rc == 0; i++)
        for (size_t at = 0; at < chunk[i].len && rc == 0; at += sizeof buf) {
            const size_t len = (size_t)ckpt_min_u64(sizeof buf, chunk[i].len - at);
            rc = read(ctx, buf, len, chunk[i].off + at, err);
            if (rc == 0)
                (void)XXH3_128bits_update(h, buf, len);
        }
    if (rc == 0) {
        XXH128_canonicalFromHash(&c, XXH3_128bits_digest(h));
        memcpy(ret, c.digest, sizeof c.digest);
    }
    (void)XXH3_freeState(h);
    return rc;
}

int ckpt_recorded_digest(struct ckpt_recorded *f, struct ckpt_err *err)
{
    return ckpt_chunks_digest(f->chunk.ptr, f->chunk.len, read_chunk, f, f->digest, err);
}

/* Keep what is needed to recognise copies: the key, the ranges and the digest. */
static bool reduce(struct ckpt_recorded *f, struct ckpt_arena *arena)
{
    f->key = ckpt_arena_strdup(arena, f->key);
    if (!f->key || f->chunk.len == 0)
        return false;
    for (size_t i = 0; i < f->chunk.len; i++)
        f->chunk.ptr[i].data = NULL;
    f->list = NULL;
    f->has_list = f->has_look = f->has_birth = false;
    return true;
}

static void forget_all(struct ckpt_recording *r)
{
    for (size_t i = 0; i < r->file.len; i++)
        ckpt_vec_release(&r->file.ptr[i].chunk);
    ckpt_vec_release(&r->file);
    ckpt_map_release(&r->by_key);
    ckpt_arena_release(&r->arena);
}

void ckpt_recording_end(struct ckpt_recording *r)
{
    struct ckpt_arena arena = {0};
    size_t n = 0;

    if (!ckpt_recording_replays(r)) {
        (void)pthread_mutex_lock(&r->lock);
        atomic_store(&r->state, CKPT_REPLAYED);
        forget_all(r);
        (void)pthread_mutex_unlock(&r->lock);
        return;
    }
    ckpt_map_release(&r->by_key);
    for (size_t i = 0; i < r->file.len; i++) {
        uint32_t at;
        bool is_new;
        struct ckpt_recorded f = r->file.ptr[i];
        if (reduce(&f, &arena) &&
            ckpt_map_put(&r->by_key, f.key, strlen(f.key), (uint32_t)n, &at, &is_new) == 0)
            r->file.ptr[n++] = f;
        else
            ckpt_vec_release(&f.chunk);
    }
    r->file.len = n;
    ckpt_vec_shrink(&r->file);
    ckpt_arena_release(&r->arena);
    r->arena = arena;
    atomic_store(&r->state, CKPT_REPLAYED);
}

static void describe(const struct ckpt_recorded *f, struct ckpt_replayed *ret)
{
    *ret = (struct ckpt_replayed){.root = (uint32_t)(f->key[0] - '0'),
                                  .path = f->key + 1,
                                  .witness = f->witness,
                                  .n = f->chunk.len,
                                  .chunk = f->chunk.ptr};
    memcpy(ret->digest, f->digest, sizeof ret->digest);
}

bool ckpt_replayed_find(const struct ckpt_place *at, struct ckpt_replayed *ret)
{
    const struct ckpt_recorded *f = find(at);

    if (f)
        describe(f, ret);
    return f != NULL;
}

void ckpt_replayed_set_copy(const struct ckpt_place *at, const struct ckpt_file_id *id)
{
    struct ckpt_recorded *f = (struct ckpt_recorded *)find(at);

    if (!f)
        return;
    (void)pthread_mutex_lock(&at->rec->lock);
    f->has_copy = true;
    f->copy = *id;
    (void)pthread_mutex_unlock(&at->rec->lock);
}

bool ckpt_replayed_is_copy(const struct ckpt_place *at, const struct ckpt_file_id *id)
{
    const struct ckpt_recorded *f = find(at);

    if (!f)
        return false;
    (void)pthread_mutex_lock(&at->rec->lock);
    const bool is = f->has_copy && ckpt_file_id_eq(&f->copy, id);
    (void)pthread_mutex_unlock(&at->rec->lock);
    return is;
}

bool ckpt_replayed_at(const struct ckpt_recording *r, size_t i, struct ckpt_replayed *ret)
{
    if (i < r->file.len)
        describe(&r->file.ptr[i], ret);
    return i < r->file.len;
}

bool ckpt_replayed_same_root(const struct ckpt_recording *r, uint32_t root)
{
    return root < CKPT_RECORDING_ROOTS && r->same_root[root];
}

int64_t ckpt_replayed_begin_ns(const struct ckpt_recording *r) { return r->begin_ns; }

bool ckpt_replayed_take_witnesses(struct ckpt_recording *r)
{
    return !atomic_exchange(&r->witnesses_taken, true);
}

void ckpt_replayed_refuse(struct ckpt_recording *r) { atomic_store(&r->refused, true); }

bool ckpt_replayed_refused(const struct ckpt_recording *r) { return atomic_load(&r->refused); }
