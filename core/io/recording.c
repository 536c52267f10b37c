/* SPDX-License-Identifier: Apache-2.0 */
/* The table of a recording, and its bytes, which come from another process and are checked like a
 * file's: a struct head, then for each answer, sorted by their questions, a struct entry, the path
 * with a NUL, and the data. */
#include "io/recording.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <pthread.h>
#include <string.h>
#include <time.h>
#include <xxhash.h>

#include "base/fdio.h"
#include "base/sort.h"
#include "base/vec.h"
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

void ckpt_recording_unref(struct ckpt_recording *r)
{
    if (!r || atomic_fetch_sub(&r->refs, 1) != 1)
        return;
    ckpt_vec_release(&r->answer);
    ckpt_arena_release(&r->arena);
    (void)pthread_mutex_destroy(&r->lock);
    free(r);
}

/* NULL is allowed */
enum ckpt_dir_memory ckpt_recording_memory(const struct ckpt_recording *r)
{
    return (enum ckpt_dir_memory)atomic_load(&r->memory);
}

uint64_t ckpt_recording_progress(const struct ckpt_recording *r)
{
    return r ? atomic_load_explicit(&r->progress, memory_order_relaxed) : 0;
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

/* Sorts answers by their questions; of several to one question, the longest is first. */
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

/* Record an answer, if a recording runs. A failure to do so is not reported: other processes will
 * ask their own files. */
static void put_answer(struct ckpt_recording *r, const struct ckpt_question *q,
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

/* The index of the first answer that is not before a question. */
static size_t lower_bound(const struct ckpt_recording *r, const struct ckpt_question *q)
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
        a = ckpt_recording_at(r, lower_bound(r, q));
    return a && question_cmp(&a->to, q) == 0 ? a : NULL;
}

/* Keep the identity that the file of a look has in this process. */
static int keep_identity(struct ckpt_recording *r, struct ckpt_answer *look,
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

/* ---- a directory with a recording, over the functions of the directory itself ---- */

struct recorded {
    struct ckpt_dir_way real;
    struct ckpt_recording *rec;
    uint32_t root;        /* number of the directory in it */
    bool is_same;         /* the very directory of the recording: it has no copies */
    char *path;           /* for messages */
    pthread_mutex_t lock; /* protects the result of comparing the samples: */
    bool compared;
    struct ckpt_err other; /* what differs; code 0: nothing does */
};

static struct ckpt_question ask(const struct recorded *r, const char *below,
                                enum ckpt_question_kind kind, uint64_t off)
{
    return (struct ckpt_question){r->root, below, kind, off};
}

static bool is_replaying(const struct recorded *r)
{
    return ckpt_recording_memory(r->rec) == CKPT_DIR_RECALLS;
}

/* The recorded look at an entry; NULL: there is none. */
static struct ckpt_answer *find_look(const struct recorded *r, const char *below,
                                     struct ckpt_looked *ret)
{
    const struct ckpt_question q = ask(r, below, CKPT_ASK_LOOK, 0);
    struct ckpt_answer *a = ckpt_recording_find(r->rec, &q);

    return a && ckpt_looked_get(a, ret) ? a : NULL;
}

/* Record the result of looking: 0, an errno, or -1. */
static void put_look(const struct recorded *r, const char *below, int rc,
                     const struct ckpt_dir_found *found)
{
    const struct ckpt_question q = ask(r, below, CKPT_ASK_LOOK, 0);
    struct ckpt_looked look = {.errnum = (uint64_t)rc, .kind = CKPT_ENTRY_OTHER};

    if (rc == 0) {
        look = (struct ckpt_looked){0, found->kind, found->id, found->birth_ns};
        memcpy(look.tag, found->tag, sizeof look.tag);
    }
    const struct iovec iov = {&look, offsetof(struct ckpt_looked, tag) + strlen(look.tag) + 1};
    if (rc == 0 || ckpt_errno_is_answer(rc))
        put_answer(r->rec, &q, &iov, 1);
}

/* ---- copies ---- */

/* Compare a recorded range of bytes with those of the file that is open as fd. */
static int compare_range(const struct recorded *r, const struct ckpt_answer *a, int fd,
                         struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) void *buf = malloc(a->len + 1);
    uint64_t off = a->to.off;

    if (!buf)
        return ckpt_nomem(err);
    const int rc = ckpt_fdio_pread(fd, buf, a->len, &off);
    if (rc)
        return ckpt_fail_errno(err, ckpt_fdio_errno(rc), "reading '%s/%s' at byte %" PRIu64,
                               r->path, a->to.path, off);
    if (XXH3_64bits(buf, a->len) == a->sum)
        return 0;
    return ckpt_fail(err, CKPT_CONFLICT,
                     "'%s/%s' has other bytes than where rank 0 opened it (%zu bytes from byte "
                     "%" PRIu64 " on): copies of the checkpoint must be equal on all nodes",
                     r->path, a->to.path, a->len, a->to.off);
}

/* Compare all bytes that the recording has of a file. */
static int compare_file(const struct recorded *r, const char *below, int fd, struct ckpt_err *err)
{
    const struct ckpt_question q = ask(r, below, CKPT_ASK_BYTES, 0);
    const struct ckpt_answer *a;

    for (size_t i = lower_bound(r->rec, &q); (a = ckpt_recording_at(r->rec, i)); i++) {
        if (a->to.root != r->root || strcmp(a->to.path, below) != 0)
            break;
        if (compare_range(r, a, fd, err) < 0)
            return -1;
    }
    return 0;
}

static int compare_sample(const struct recorded *r, const struct ckpt_answer *a,
                          struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_closep) int fd = -1;
    struct ckpt_dir_found found;
    const int rc = r->real.ops->open(r->real.ctx, a->to.path, &fd, &found, err);

    if (rc < 0)
        return -1;
    /* a part of the copy is missing, which is an error for ranks that read it; or another machine
     * has it, so that there is no copy here */
    if (rc == ENOENT || (rc == 0 && fd < 0))
        return 0;
    return rc ? ckpt_fail_errno(err, rc, "cannot open '%s/%s', which is a copy of what rank 0 has",
                                r->path, a->to.path)
              : compare_range(r, a, fd, err);
}

/* Compare the samples of all files, at the first copy that this directory turns out to have. */
static int compare_samples(struct recorded *r, struct ckpt_err *err)
{
    const struct ckpt_answer *a;
    int rc = 0;

    (void)pthread_mutex_lock(&r->lock);
    for (size_t i = 0; !r->compared && rc == 0 && (a = ckpt_recording_at(r->rec, i)); i++)
        if (a->to.root == r->root && a->to.kind == CKPT_ASK_SAMPLE)
            rc = compare_sample(r, a, &r->other);
    r->compared = true;
    rc = r->other.code ? ckpt_err_move(err, &r->other) : 0;
    (void)pthread_mutex_unlock(&r->lock);
    return rc;
}

static int fail_changed(const struct recorded *r, const char *below, struct ckpt_err *err)
{
    return ckpt_fail(err, CKPT_STALE, "'%s/%s' changed since the checkpoint was opened", r->path,
                     below);
}

/* Is the file, which has the identity `now`, the one that was recorded as `then`, or a copy of it?
 * fd is -1 if it is not open yet. */
static int check_copy(struct recorded *r, const char *below, int fd, const struct ckpt_file_id *now,
                      const struct ckpt_file_id *then, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_closep) int own = -1;
    struct ckpt_dir_found found = {0};

    if (now->size == then->size && now->mtime_ns == then->mtime_ns &&
        now->ctime_ns == then->ctime_ns)
        return 0;
    if (r->is_same || now->mtime_ns > r->rec->begin_ns)
        return fail_changed(r, below, err);
    if (now->size != then->size)
        return ckpt_fail(err, CKPT_CONFLICT,
                         "'%s/%s' has %" PRIu64 " bytes here and %" PRIu64
                         " where rank 0 opened it: the nodes see different checkpoints",
                         r->path, below, now->size, then->size);
    if (fd < 0 && r->real.ops->open(r->real.ctx, below, &own, &found, NULL) == 0)
        fd = own;
    if (fd < 0 || (fd == own && !ckpt_file_id_eq(&found.id, now)))
        return fail_changed(r, below, err);
    return compare_file(r, below, fd, err) < 0 ? -1 : compare_samples(r, err);
}

/* Give a file that is known by another identity here the recorded one. Only what ctime has gained
 * since then stays. */
static void translate(const struct ckpt_file_id *here, const struct ckpt_file_id *then,
                      struct ckpt_file_id *id)
{
    if (id->inode != here->inode || id->size != here->size || id->mtime_ns != here->mtime_ns)
        return;
    id->inode = then->inode;
    id->mtime_ns = then->mtime_ns;
    id->ctime_ns =
        (int64_t)((uint64_t)id->ctime_ns - (uint64_t)here->ctime_ns + (uint64_t)then->ctime_ns);
}

/* Recognise what was found: if the recording knows the file, its identity becomes the recorded one.
 */
static int recognise(struct recorded *r, const char *below, int fd, struct ckpt_dir_found *found,
                     struct ckpt_err *err)
{
    struct ckpt_looked then;
    struct ckpt_answer *a = found->kind == CKPT_ENTRY_FILE ? find_look(r, below, &then) : NULL;

    if (!a || then.errnum || then.kind != CKPT_ENTRY_FILE)
        return 0;
    if (!atomic_load(&a->here) && (check_copy(r, below, fd, &found->id, &then.id, err) < 0 ||
                                   keep_identity(r->rec, a, &found->id, err) < 0))
        return -1;
    translate(atomic_load(&a->here), &then.id, &found->id);
    return 0;
}

/* ---- the functions ---- */

static int recorded_look(void *ctx, const char *below, struct ckpt_dir_found *ret,
                         struct ckpt_err *err)
{
    struct recorded *r = ctx;
    struct ckpt_looked look;

    if (is_replaying(r) && find_look(r, below, &look)) {
        *ret = (struct ckpt_dir_found){
            (enum ckpt_entry_kind)look.kind, look.id, {0, look.id.size}, look.birth_ns};
        memcpy(ret->tag, look.tag, sizeof ret->tag);
        return (int)look.errnum;
    }
    const int rc = r->real.ops->look(r->real.ctx, below, ret, err);
    put_look(r, below, rc, ret);
    if (rc == 0)
        (void)recognise(r, below, -1, ret, NULL); /* if it is another file, opening it says so */
    return rc;
}

static int recorded_open(void *ctx, const char *below, int *ret_fd, struct ckpt_dir_found *ret,
                         struct ckpt_err *err)
{
    struct recorded *r = ctx;
    ckpt_cleanup(ckpt_closep) int fd = -1;
    const int rc = r->real.ops->open(r->real.ctx, below, &fd, ret, err);

    put_look(r, below, rc, ret);
    if (rc)
        return rc;
    if (recognise(r, below, fd, ret, err) < 0)
        return -1;
    *ret_fd = fd;
    fd = -1;
    return 0;
}

static int recorded_list(void *ctx, const char *below, struct ckpt_str *ret, struct ckpt_err *err)
{
    struct recorded *r = ctx;
    const struct ckpt_question q = ask(r, below, CKPT_ASK_LIST, 0);
    const struct ckpt_answer *a = is_replaying(r) ? ckpt_recording_find(r->rec, &q) : NULL;

    if (a) {
        ckpt_str_append(ret, (const char *)a->data, a->len);
        return 0;
    }
    const int rc = r->real.ops->list(r->real.ctx, below, ret, err);
    const struct iovec iov = {(char *)ckpt_str_get(ret), ret->len};
    if (rc == 0 && !ret->failed)
        put_answer(r->rec, &q, &iov, 1);
    return rc;
}

/* Every request names the ETag, so that the object is the recorded one. */
static int recorded_read(void *ctx, const char *below, const char *tag, uint64_t size,
                         const struct iovec *iov, int n, uint64_t off, enum ckpt_read_how how,
                         struct ckpt_err *err)
{
    const struct ckpt_dir_way *real = &((const struct recorded *)ctx)->real;

    return real->ops->read(real->ctx, below, tag, size, iov, n, off, how, err);
}

static const char *recorded_elsewhere(void *ctx, const char *below)
{
    const struct ckpt_dir_way *real = &((const struct recorded *)ctx)->real;

    return real->ops->elsewhere ? real->ops->elsewhere(real->ctx, below) : NULL;
}

/* These two are asked only of a directory whose files can be elsewhere. */
static int recorded_read_elsewhere(void *ctx, const char *below, const struct ckpt_source_run *run,
                                   size_t n, struct ckpt_err *err)
{
    const struct ckpt_dir_way *real = &((const struct recorded *)ctx)->real;

    return real->ops->read_elsewhere(real->ctx, below, run, n, err);
}

static void recorded_holders(void *ctx, const char *below, bool *ret, uint32_t n)
{
    const struct ckpt_dir_way *real = &((const struct recorded *)ctx)->real;

    real->ops->holders(real->ctx, below, ret, n);
}

/* The step is chosen where the answers are recorded. */
static const char *recorded_lacks(void *ctx, const char *below)
{
    const struct recorded *r = ctx;
    const struct ckpt_dir_way *real = &r->real;

    return real->ops->lacks && !is_replaying(r) ? real->ops->lacks(real->ctx, below) : NULL;
}

static void recorded_refresh(void *ctx)
{
    const struct ckpt_dir_way *real = &((const struct recorded *)ctx)->real;

    if (real->ops->refresh)
        real->ops->refresh(real->ctx);
}

static void recorded_free(void *ctx)
{
    struct recorded *r = ctx;

    if (r->real.ops->free)
        r->real.ops->free(r->real.ctx);
    ckpt_recording_unref(r->rec);
    (void)pthread_mutex_destroy(&r->lock);
    free(r->path);
    free(r);
}

static enum ckpt_dir_memory recorded_memory(void *ctx)
{
    return ckpt_recording_memory(((const struct recorded *)ctx)->rec);
}

static void recorded_keep(void *ctx, const char *below, const struct iovec *iov, int n,
                          uint64_t off)
{
    const struct recorded *r = ctx;
    const struct ckpt_question q = ask(r, below, CKPT_ASK_BYTES, off);

    put_answer(r->rec, &q, iov, n);
}

static bool recorded_recall(void *ctx, const char *below, const struct iovec *iov, int n,
                            uint64_t off)
{
    const struct recorded *r = ctx;
    const struct ckpt_question q = ask(r, below, CKPT_ASK_BYTES, off);
    const struct ckpt_answer *a = is_replaying(r) ? ckpt_recording_find(r->rec, &q) : NULL;
    struct ckpt_iov_cursor to = {iov, 0};
    const uint64_t len = ckpt_iov_len(iov, n);

    if (!a || a->len < len)
        return false;
    ckpt_iov_put(&to, a->data, (size_t)len);
    return true;
}

static void recorded_known_as(void *ctx, const char *below, struct ckpt_file_id *id)
{
    const struct recorded *r = ctx;
    struct ckpt_looked then;
    const struct ckpt_answer *a = find_look(r, below, &then);
    const struct ckpt_file_id *here = a ? atomic_load(&a->here) : NULL;

    if (here)
        translate(here, &then.id, id);
}

static const struct ckpt_dir_ops recorded_ops = {.look = recorded_look,
                                                 .open = recorded_open,
                                                 .list = recorded_list,
                                                 .free = recorded_free,
                                                 .read = recorded_read,
                                                 .refresh = recorded_refresh,
                                                 .elsewhere = recorded_elsewhere,
                                                 .read_elsewhere = recorded_read_elsewhere,
                                                 .holders = recorded_holders,
                                                 .lacks = recorded_lacks,
                                                 .memory = recorded_memory,
                                                 .keep = recorded_keep,
                                                 .recall = recorded_recall,
                                                 .known_as = recorded_known_as};

int ckpt_dir_use(struct ckpt_dir *dir, struct ckpt_recording *rec, struct ckpt_err *err)
{
    struct recorded *r = rec ? calloc(1, sizeof *r) : NULL;
    struct ckpt_dir_found itself = {0};
    struct ckpt_looked then;

    if (!rec)
        return 0;
    if (!r || !(r->path = strdup(ckpt_dir_path(dir)))) {
        free(r);
        return ckpt_nomem(err);
    }
    (void)pthread_mutex_init(&r->lock, NULL);
    atomic_fetch_add(&rec->refs, 1);
    r->rec = rec;
    r->root = atomic_fetch_add(&rec->nroot, 1);
    r->real = ckpt_dir_replace(dir, (struct ckpt_dir_way){&recorded_ops, r});
    /* the identity of the directory itself is the first thing to be recorded */
    const bool skip = ckpt_dir_has_objects(dir) && is_replaying(r); /* it would be listed */
    const int rc = skip ? ENOENT : r->real.ops->look(r->real.ctx, ".", &itself, NULL);
    put_look(r, ".", rc, &itself);
    r->is_same =
        rc == 0 && rec->of_here && find_look(r, ".", &then) && then.id.inode == itself.id.inode;
    return 0;
}

/* ---- encoding ---- */

static void encode_answer(struct ckpt_str *out, const struct ckpt_answer *a)
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
            encode_answer(out, &a[i]);
}

int ckpt_recording_encode(struct ckpt_recording *r, struct ckpt_str *out, struct ckpt_err *err)
{
    struct head head = {.version = VERSION, .machine = r->machine, .begin_ns = r->begin_ns};
    const size_t start = out->len;
    size_t next;

    memcpy(head.magic, MAGIC, sizeof MAGIC);
    ckpt_str_append(out, (const char *)&head, sizeof head);
    (void)pthread_mutex_lock(&r->lock);
    ckpt_sort(r->answer.ptr, r->answer.len, answer_cmp);
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
