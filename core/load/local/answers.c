/* SPDX-License-Identifier: Apache-2.0 */
/* Reads files for other ranks, each through a source that stays open. */
#include "load/local/answers.h"

#include <pthread.h>
#include <string.h>

#include "base/map.h"
#include "base/thread.h"
#include "base/vec.h"
#include "io/cursor.h"
#include "io/source.h"

struct answers {
    struct ckpt_dir *dir;
    char *who;
    struct ckpt_fdpool *pool;
    pthread_mutex_t lock;  /* protects all that follows */
    struct ckpt_map known; /* of paths, to indices of source */
    struct ckpt_arena arena;
    CKPT_VEC(struct ckpt_source *) source;
};

static void answers_free(void *ctx)
{
    struct answers *a = ctx;

    for (size_t i = 0; i < a->source.len; i++)
        ckpt_source_unref(a->source.ptr[i]);
    ckpt_vec_release(&a->source);
    ckpt_map_release(&a->known);
    ckpt_arena_release(&a->arena);
    ckpt_fdpool_unref(a->pool);
    ckpt_dir_unref(a->dir);
    (void)pthread_mutex_destroy(&a->lock);
    free(a->who);
    free(a);
}

/* The source that others have asked for before, with a reference; NULL: none has. */
static struct ckpt_source *find_known(struct answers *a, const char *path)
{
    ckpt_cleanup(ckpt_unlockp) pthread_mutex_t *held = ckpt_lock(&a->lock);
    const uint32_t i = ckpt_map_find(&a->known, path);

    return i == CKPT_NONE ? NULL : ckpt_source_ref(a->source.ptr[i]);
}

/* Keep a source for the next request. Without memory the next one opens the file again. */
static void keep_known(struct answers *a, const char *path, struct ckpt_source *s)
{
    ckpt_cleanup(ckpt_unlockp) pthread_mutex_t *held = ckpt_lock(&a->lock);
    const char *own = NULL;

    if (ckpt_map_find(&a->known, path) == CKPT_NONE && ckpt_vec_reserve(&a->source, 1) == 0 &&
        (own = ckpt_arena_strdup(&a->arena, path)) &&
        ckpt_map_add(&a->known, own, (uint32_t)a->source.len) != CKPT_NONE)
        a->source.ptr[a->source.len++] = ckpt_source_ref(s);
}

static int open_source(struct answers *a, const char *path, struct ckpt_source **ret,
                       struct ckpt_err *err)
{
    if ((*ret = find_known(a, path)))
        return 0;
    if (ckpt_source_file_new(a->dir, path, a->pool, ret, err) < 0)
        return -1;
    keep_known(a, path, *ret);
    return 0;
}

/* Read all runs of a source to where the reply has them. The runs' lengths are those of the reply.
 */
static int read_runs(struct ckpt_source *s, const struct ckpt_local_run *from, uint32_t n,
                     unsigned char *reply, struct ckpt_err *err)
{
    static const struct ckpt_source_way way = {.how = CKPT_READ_EXACT};
    ckpt_cleanup(ckpt_freep) struct ckpt_source_run *run = calloc(n, sizeof *run);
    ckpt_cleanup(ckpt_freep) struct iovec *iov = calloc(n, sizeof *iov);

    if (!run || !iov)
        return ckpt_nomem(err);
    for (uint32_t i = 0; i < n; reply += from[i++].len) {
        iov[i] = (struct iovec){reply, (size_t)from[i].len};
        run[i] = (struct ckpt_source_run){from[i].off, &iov[i], 1};
    }
    return ckpt_source_read(s, &way, run, n, err);
}

static int read_bytes(struct answers *a, const struct ckpt_local_request *q,
                      const struct ckpt_local_run *run, const char *path, unsigned char *reply,
                      struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_source_unrefp) struct ckpt_source *s = NULL;
    struct ckpt_file_id id;

    if (open_source(a, path, &s, err) < 0) {
        if (err->code == CKPT_MISSING) /* it was listed */
            err->code = CKPT_STALE;
        return -1;
    }
    if (!ckpt_source_file_id(s, &id) || id.size != q->size || id.mtime_ns != q->mtime_ns ||
        id.ctime_ns != q->ctime_ns)
        return ckpt_fail(err, CKPT_STALE, "'%s/%s' changed since the checkpoint was opened",
                         ckpt_dir_path(a->dir), path);
    return read_runs(s, run, q->nrun, reply, err) < 0 ? -1 : ckpt_source_check(s, err);
}

/* Take the runs of a request: malloc'ed, or NULL if they are not all there, or not of the reply's
 * length. */
static struct ckpt_local_run *take_runs(struct ckpt_cursor *c, uint32_t n, size_t reply_len)
{
    const void *data =
        n <= CKPT_LOCAL_RUNS ? ckpt_cursor_take(c, n * sizeof(struct ckpt_local_run)) : NULL;
    ckpt_cleanup(ckpt_freep) struct ckpt_local_run *run =
        data && n ? malloc(n * sizeof *run) : NULL;
    uint64_t left = reply_len;

    if (!run)
        return NULL;
    memcpy(run, data, n * sizeof *run);
    for (uint32_t i = 0; i < n; left -= run[i++].len)
        if (run[i].len > left)
            return NULL;
    return left ? NULL : ckpt_steal(&run);
}

static int answer(void *ctx, const void *request, size_t len, void *reply, size_t reply_len,
                  struct ckpt_err *err)
{
    struct answers *a = ctx;
    struct ckpt_local_request q = {0};
    struct ckpt_cursor c;

    ckpt_cursor_init(&c, request, len, 0, "a request");
    const void *head = ckpt_cursor_take(&c, sizeof q);
    if (head)
        memcpy(&q, head, sizeof q);
    ckpt_cleanup(ckpt_freep) struct ckpt_local_run *run = take_runs(&c, q.nrun, reply_len);
    const size_t path_len = ckpt_cursor_left(&c);
    if (!run || path_len == 0 || !a->dir)
        return ckpt_fail(err, CKPT_FORMAT, "%s: a damaged request", a->who);
    ckpt_cleanup(ckpt_freep) char *path = strndup(ckpt_cursor_take(&c, path_len), path_len);
    if (!path)
        return ckpt_nomem(err);
    return read_bytes(a, &q, run, path, reply, err) < 0 ? ckpt_err_in(err, "%s", a->who) : 0;
}

static const struct ckpt_service_ops ops = {.answer = answer, .free = answers_free};

int ckpt_answers_open(const struct ckpt_comm *comm, struct ckpt_dir *dir, const char *who,
                      struct ckpt_service **ret, struct ckpt_err *err)
{
    struct answers *a = calloc(1, sizeof *a);

    if (!a)
        return ckpt_nomem(err);
    (void)pthread_mutex_init(&a->lock, NULL);
    a->dir = ckpt_dir_ref(dir);
    if (!(a->who = strdup(who)))
        (void)ckpt_nomem(err);
    else if (ckpt_fdpool_new(0, &a->pool, err) == 0 &&
             ckpt_service_open(comm, &ops, a, ret, err) == 0)
        return 0;
    answers_free(a);
    return -1;
}
