/* SPDX-License-Identifier: Apache-2.0 */
/* The table of a recording, and its bytes, which come from another process and are checked like a
 * file's: a struct head, then for each answer, sorted by their questions, a struct entry, the path
 * with a NUL, and the data. */
#include "io/recording.h"

#include <limits.h>
#include <pthread.h>
#include <string.h>
#include <time.h>
#include <xxhash.h>

#include "base/mem.h"
#include "base/sort.h"
#include "base/vec.h"
#include "io/below.h"
#include "io/cursor.h"
#include "io/iov.h"

enum {
    VERSION = 3,
    MOST_ROOTS = 256, /* what is in further directories is not recorded */
};

/* Numbers are as this machine has them: all ranks of a job run the same library. */
struct head {
    char magic[8];
    uint64_t version, sum; /* sum: XXH3 of all that follows */
    uint64_t machine;
    int64_t begin_ns;
};

struct entry {
    uint64_t off;
    uint32_t len;
    uint16_t path_len; /* with the NUL */
    uint8_t kind, root;
};

static const char MAGIC[8] = "ckptfsRC";
enum { HASHED_AT = offsetof(struct head, machine) };

struct ckpt_recording {
    atomic_uint refs, nroot;
    atomic_int memory; /* enum ckpt_dir_memory */
    atomic_ullong progress;
    uint64_t machine, most_bytes;
    int64_t begin_ns;
    bool of_here;
    /* While recording, the lock protects everything below. Later it protects the arena: the answers
     * are sorted then, and do not change but for their `here`. */
    pthread_mutex_t lock;
    bool sampling;
    uint64_t nbyte; /* of files */
    struct ckpt_arena arena;
    CKPT_VEC(struct ckpt_answer) answer;
};

/* ---- life ---- */

static int recording_alloc(enum ckpt_dir_memory memory, struct ckpt_recording **ret,
                           struct ckpt_err *err)
{
    struct ckpt_recording *r = calloc(1, sizeof *r);

    if (!r)
        return ckpt_nomem(err);
    atomic_init(&r->refs, 1);
    atomic_init(&r->memory, memory);
    (void)pthread_mutex_init(&r->lock, NULL);
    *ret = r;
    return 0;
}

int ckpt_recording_new(uint64_t machine, uint64_t most_bytes, struct ckpt_recording **ret,
                       struct ckpt_err *err)
{
    struct timespec now;

    if (recording_alloc(CKPT_DIR_KEEPS, ret, err) < 0)
        return -1;
    (void)clock_gettime(CLOCK_REALTIME, &now);
    (*ret)->begin_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    (*ret)->machine = machine;
    (*ret)->most_bytes = most_bytes;
    return 0;
}

struct ckpt_recording *ckpt_recording_ref(struct ckpt_recording *r)
{
    atomic_fetch_add(&r->refs, 1);
    return r;
}

void ckpt_recording_unref(struct ckpt_recording *r)
{
    if (!r || atomic_fetch_sub(&r->refs, 1) != 1)
        return;
    ckpt_vec_release(&r->answer);
    ckpt_arena_release(&r->arena);
    (void)pthread_mutex_destroy(&r->lock);
    free(r);
}

void ckpt_recording_unrefp(struct ckpt_recording **r)
{
    ckpt_recording_unref(*r);
    *r = NULL;
}

enum ckpt_dir_memory ckpt_recording_memory(const struct ckpt_recording *r)
{
    return (enum ckpt_dir_memory)atomic_load(&r->memory);
}

uint64_t ckpt_recording_progress(const struct ckpt_recording *r)
{
    return r ? atomic_load_explicit(&r->progress, memory_order_relaxed) : 0;
}

bool ckpt_recording_is_of_here(const struct ckpt_recording *r) { return r->of_here; }

int64_t ckpt_recording_begin_ns(const struct ckpt_recording *r) { return r->begin_ns; }

uint32_t ckpt_recording_add_root(struct ckpt_recording *r)
{
    return atomic_fetch_add(&r->nroot, 1);
}

void ckpt_recording_sample(struct ckpt_recording *r)
{
    (void)pthread_mutex_lock(&r->lock);
    r->sampling = true;
    (void)pthread_mutex_unlock(&r->lock);
}

/* ---- the table ---- */

static int question_cmp(const struct ckpt_question *a, const struct ckpt_question *b)
{
    const int by_root = ckpt_u64_cmp(a->root, b->root);
    const int by_path = by_root ? by_root : strcmp(a->path, b->path);
    const int by_kind = by_path ? by_path : ckpt_u64_cmp(a->kind, b->kind);

    return by_kind ? by_kind : ckpt_u64_cmp(a->off, b->off);
}

static bool is_same_path(const struct ckpt_answer *a, const struct ckpt_answer *b)
{
    return a->to.root == b->to.root && strcmp(a->to.path, b->to.path) == 0;
}

/* Of several answers to a question, the longest is first. */
static int answer_cmp(const void *pa, const void *pb)
{
    const struct ckpt_answer *a = pa, *b = pb;
    const int by_question = question_cmp(&a->to, &b->to);

    return by_question ? by_question : ckpt_u64_cmp(b->len, a->len);
}

/* With the lock held. */
static void keep(struct ckpt_recording *r, struct ckpt_answer *a, const struct iovec *iov, int n)
{
    unsigned char *data = ckpt_arena_alloc(&r->arena, a->len + 1);

    a->to.path = ckpt_arena_strdup(&r->arena, a->to.path);
    a->data = data;
    for (int i = 0; data && i < n; data += iov[i++].iov_len)
        memcpy(data, iov[i].iov_base, iov[i].iov_len);
    if (a->to.path && data && ckpt_vec_push(&r->answer, *a) == 0 && a->to.kind >= CKPT_ASK_BYTES)
        r->nbyte += a->len;
}

void ckpt_recording_put(struct ckpt_recording *r, const struct ckpt_question *q,
                        const struct iovec *iov, int n)
{
    struct ckpt_answer a = {.to = *q, .len = ckpt_iov_len(iov, n)};

    (void)atomic_fetch_add_explicit(&r->progress, 1, memory_order_relaxed);
    if (ckpt_recording_memory(r) != CKPT_DIR_KEEPS || q->root >= MOST_ROOTS ||
        strlen(q->path) > PATH_MAX)
        return;
    (void)pthread_mutex_lock(&r->lock);
    if (r->sampling && q->kind == CKPT_ASK_BYTES)
        a.to.kind = CKPT_ASK_SAMPLE;
    if (q->kind == CKPT_ASK_BYTES ? a.len <= r->most_bytes - r->nbyte : a.len <= UINT32_MAX)
        keep(r, &a, iov, n);
    (void)pthread_mutex_unlock(&r->lock);
}

size_t ckpt_recording_lower(const struct ckpt_recording *r, const struct ckpt_question *q)
{
    size_t lo = 0, hi = r->answer.len;

    while (lo < hi) {
        const size_t mid = lo + (hi - lo) / 2;
        if (question_cmp(&r->answer.ptr[mid].to, q) < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

struct ckpt_answer *ckpt_recording_at(struct ckpt_recording *r, size_t i)
{
    return i < r->answer.len ? &r->answer.ptr[i] : NULL;
}

struct ckpt_answer *ckpt_recording_find(struct ckpt_recording *r, const struct ckpt_question *q)
{
    struct ckpt_answer *a = NULL;

    (void)atomic_fetch_add_explicit(&r->progress, 1, memory_order_relaxed);
    if (ckpt_recording_memory(r) != CKPT_DIR_KEEPS)
        a = ckpt_recording_at(r, ckpt_recording_lower(r, q));
    return a && question_cmp(&a->to, q) == 0 ? a : NULL;
}

int ckpt_recording_recognise(struct ckpt_recording *r, struct ckpt_answer *look,
                             const struct ckpt_file_id *here, struct ckpt_err *err)
{
    (void)pthread_mutex_lock(&r->lock);
    struct ckpt_file_id *own = ckpt_arena_alloc(&r->arena, sizeof *own);
    if (own) {
        *own = *here;
        atomic_store(&look->here, own);
    }
    (void)pthread_mutex_unlock(&r->lock);
    return own ? 0 : ckpt_nomem(err);
}

void ckpt_recording_end(struct ckpt_recording *r)
{
    (void)pthread_mutex_lock(&r->lock);
    if (ckpt_recording_memory(r) == CKPT_DIR_KEEPS) {
        ckpt_vec_release(&r->answer);
        ckpt_arena_release(&r->arena);
    }
    for (size_t i = 0; i < r->answer.len; i++)
        if (r->answer.ptr[i].to.kind != CKPT_ASK_LOOK)
            r->answer.ptr[i].data = NULL; /* it was borrowed */
    atomic_store(&r->memory, CKPT_DIR_FORGETS);
    (void)pthread_mutex_unlock(&r->lock);
}

bool ckpt_looked_get(const struct ckpt_answer *a, struct ckpt_looked *ret)
{
    const size_t least = offsetof(struct ckpt_looked, tag) + 1;

    if (a->len < least || a->len > sizeof *ret || a->data[a->len - 1])
        return false;
    memset(ret, 0, sizeof *ret);
    memcpy(ret, a->data, a->len);
    return ret->kind <= CKPT_ENTRY_OTHER && ret->id.size <= INT64_MAX &&
           (ret->errnum == 0 || (ret->errnum <= INT_MAX && ckpt_errno_is_answer((int)ret->errnum)));
}

/* ---- encoding ---- */

static void put_answer(struct ckpt_str *out, const struct ckpt_answer *a)
{
    const size_t path_len = strlen(a->to.path) + 1;
    const struct entry e = {a->to.off, (uint32_t)a->len, (uint16_t)path_len, (uint8_t)a->to.kind,
                            (uint8_t)a->to.root};

    ckpt_str_append(out, (const char *)&e, sizeof e);
    ckpt_str_append(out, a->to.path, path_len);
    ckpt_str_append(out, (const char *)a->data, a->len);
}

/* Are two looks at one entry of different files? Folders may get new entries. */
static bool has_changed(const struct ckpt_answer *pa, const struct ckpt_answer *pb)
{
    struct ckpt_looked a, b;

    return !ckpt_looked_get(pa, &a) || !ckpt_looked_get(pb, &b) ||
           ((a.kind != CKPT_ENTRY_DIR || b.kind != CKPT_ENTRY_DIR) &&
            memcmp(&a, &b, sizeof a) != 0);
}

/* Encode the n answers about one path, of which looks come first: each question once, and nothing
 * about what has changed. Bytes are only good for a file whose identity is known. */
static void put_path(struct ckpt_str *out, const struct ckpt_answer *a, size_t n)
{
    struct ckpt_looked look = {0};
    const bool is_file = a->to.kind == CKPT_ASK_LOOK && ckpt_looked_get(a, &look) && !look.errnum &&
                         look.kind == CKPT_ENTRY_FILE;

    for (size_t i = 1; i < n && a[i].to.kind == CKPT_ASK_LOOK; i++)
        if (has_changed(a, &a[i]))
            return;
    for (size_t i = 0; i < n; i++)
        if ((i == 0 || question_cmp(&a[i - 1].to, &a[i].to) != 0) &&
            (a[i].to.kind < CKPT_ASK_BYTES || is_file))
            put_answer(out, &a[i]);
}

int ckpt_recording_encode(struct ckpt_recording *r, struct ckpt_str *out, struct ckpt_err *err)
{
    struct head head = {.version = VERSION, .machine = r->machine, .begin_ns = r->begin_ns};
    const size_t start = out->len;
    size_t next;

    memcpy(head.magic, MAGIC, sizeof MAGIC);
    ckpt_str_append(out, (const char *)&head, sizeof head);
    (void)pthread_mutex_lock(&r->lock);
    if (r->answer.len)
        qsort(r->answer.ptr, r->answer.len, sizeof *r->answer.ptr, answer_cmp);
    for (size_t i = 0; i < r->answer.len; i = next) {
        for (next = i + 1; next < r->answer.len; next++)
            if (!is_same_path(&r->answer.ptr[i], &r->answer.ptr[next]))
                break;
        put_path(out, &r->answer.ptr[i], next - i);
    }
    (void)pthread_mutex_unlock(&r->lock);
    if (out->failed)
        return ckpt_nomem(err);
    head.sum = XXH3_64bits(out->ptr + start + HASHED_AT, out->len - start - HASHED_AT);
    memcpy(out->ptr + start, &head, sizeof head);
    return 0;
}

/* ---- decoding ---- */

static int bad(const struct ckpt_cursor *c, const char *what, struct ckpt_err *err)
{
    if (c->failed)
        return ckpt_cursor_report(c, err);
    return ckpt_fail(err, CKPT_FORMAT, "the recording of the checkpoint has %s at byte %llu", what,
                     (unsigned long long)ckpt_cursor_off(c));
}

static bool is_list(const struct ckpt_answer *a)
{
    const char *at = (const char *)a->data, *end = at + a->len;
    struct ckpt_entry e;

    while (at < end)
        if (!ckpt_listed_next(&at, end, &e))
            return false;
    return true;
}

static int check_answer(const struct ckpt_cursor *c, const struct ckpt_answer *a,
                        const struct ckpt_answer *before, struct ckpt_err *err)
{
    struct ckpt_looked look;

    if (a->to.kind > CKPT_ASK_SAMPLE)
        return bad(c, "an answer of an unknown kind", err);
    if (before && question_cmp(&before->to, &a->to) >= 0)
        return bad(c, "an answer twice, or out of order", err);
    if (a->to.kind == CKPT_ASK_LOOK && !ckpt_looked_get(a, &look))
        return bad(c, "an impossible entry", err);
    if (a->to.kind == CKPT_ASK_LIST && !is_list(a))
        return bad(c, "a malformed name", err);
    return 0;
}

/* Own what is needed after the end: the path, and the data of a look. */
static bool own_answer(struct ckpt_recording *r, struct ckpt_answer *a,
                       const struct ckpt_answer *before)
{
    a->to.path = before && is_same_path(before, a) ? before->to.path
                                                   : ckpt_arena_strdup(&r->arena, a->to.path);
    if (a->to.kind == CKPT_ASK_LOOK) {
        unsigned char *data = ckpt_arena_alloc(&r->arena, a->len);
        a->data = data ? memcpy(data, a->data, a->len) : NULL;
    }
    a->sum = a->data ? XXH3_64bits(a->data, a->len) : 0;
    return a->to.path && a->data && ckpt_vec_push(&r->answer, *a) == 0;
}

static int take_answer(struct ckpt_cursor *c, struct ckpt_recording *r, struct ckpt_err *err)
{
    const struct ckpt_answer *before = r->answer.len ? &r->answer.ptr[r->answer.len - 1] : NULL;
    const void *start = ckpt_cursor_take(c, sizeof(struct entry));
    struct entry e = {0};

    if (start)
        memcpy(&e, start, sizeof e);
    const char *path = ckpt_cursor_take(c, e.path_len);
    struct ckpt_answer a = {{e.root, path, (enum ckpt_question_kind)e.kind, e.off}, e.len};
    a.data = ckpt_cursor_take(c, e.len);
    if (c->failed)
        return ckpt_cursor_report(c, err);
    if (e.path_len == 0 || e.path_len > PATH_MAX + 1 ||
        strnlen(path, e.path_len) != e.path_len - 1u || !ckpt_below_ok(path))
        return bad(c, "a malformed path", err);
    if (check_answer(c, &a, before, err) < 0)
        return -1;
    return own_answer(r, &a, before) ? 0 : ckpt_nomem(err);
}

int ckpt_recording_decode(const void *data, size_t len, uint64_t machine,
                          struct ckpt_recording **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_recording_unrefp) struct ckpt_recording *r = NULL;
    struct ckpt_cursor c;
    struct head head;

    ckpt_cursor_init(&c, data, len, 0, "the recording of the checkpoint");
    const void *start = ckpt_cursor_take(&c, sizeof head);
    if (!start || memcmp(start, MAGIC, sizeof MAGIC) != 0)
        return bad(&c, "no magic", err);
    memcpy(&head, start, sizeof head);
    if (head.version != VERSION)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "the recording of the checkpoint has version %llu, this library reads "
                         "version %d: run the same version of ckptfs on all ranks",
                         (unsigned long long)head.version, VERSION);
    if (head.sum != XXH3_64bits((const char *)data + HASHED_AT, len - HASHED_AT))
        return bad(&c, "damaged bytes (its hash differs)", err);
    if (recording_alloc(CKPT_DIR_RECALLS, &r, err) < 0)
        return -1;
    r->begin_ns = head.begin_ns;
    r->of_here = head.machine == machine;
    while (ckpt_cursor_left(&c))
        if (take_answer(&c, r, err) < 0)
            return -1;
    *ret = ckpt_steal(&r);
    return 0;
}
