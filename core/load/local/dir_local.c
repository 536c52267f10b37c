/* SPDX-License-Identifier: Apache-2.0 */
/* A directory of the functions of dir.h over the roster, this rank's own directory, and requests to
 * other ranks. Files are looked for in the roster alone: what a rank gets later does not exist. */
#include "load/local/dir_local.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/mem.h"
#include "base/vec.h"
#include "io/source.h"
#include "load/local/answers.h"

struct local {
    struct ckpt_roster roster;
    struct ckpt_local_ranks ranks;
    struct ckpt_dir *own; /* or NULL */
    struct ckpt_service *service;
    uint32_t timeout_ms;
};

static const struct ckpt_local_rank *rank_at(const struct local *l, uint32_t r)
{
    return &l->ranks.rank[r];
}

/* Has this rank the entry? */
static bool is_own(const struct local *l, const struct ckpt_roster_entry *e)
{
    return l->own && ckpt_roster_has(&l->roster, e, rank_at(l, l->ranks.self)->listing);
}

/* The rank to be asked for a file: one that has the first holder's, of this node if there is one,
 * and otherwise another one for each rank that asks. */
static uint32_t choose_rank(const struct local *l, const struct ckpt_roster_entry *e)
{
    const struct ckpt_holder *holder = &l->roster.holder.ptr[e->holder];
    uint32_t n = 0, far = holder->rank;

    for (uint32_t r = 0; r < l->ranks.n; r++)
        for (uint32_t i = 0; i < e->nholder; i++) {
            if (holder[i].is_copy || rank_at(l, r)->listing != holder[i].rank)
                continue;
            if (rank_at(l, r)->node == rank_at(l, l->ranks.self)->node)
                return r;
            n++;
            if (n == 1 || (l->ranks.self + r) % n == 0)
                far = r;
        }
    return far;
}

/* ---- the functions ---- */

static void describe(const struct ckpt_roster_entry *e, struct ckpt_dir_found *ret)
{
    *ret =
        (struct ckpt_dir_found){.kind = e->is.kind, .id = e->is.id, .extent = {0, e->is.id.size}};
}

/* Ask this rank's directory why an entry that the roster lacks can't be opened. */
static int look_lost(const struct local *l, const char *below, struct ckpt_err *err)
{
    struct ckpt_dir_found found;
    struct ckpt_err own = {0};

    if (!l->own || ckpt_dir_look(l->own, below, &found, &own) == 0 || own.code == CKPT_MISSING)
        return ENOENT;
    return own.code == CKPT_UNSUPPORTED ? EXDEV : ckpt_err_move(err, &own);
}

static int local_look(void *ctx, const char *below, struct ckpt_dir_found *ret,
                      struct ckpt_err *err)
{
    const struct local *l = ctx;
    const struct ckpt_roster_entry *e = ckpt_roster_find(&l->roster, below);
    struct ckpt_err own = {0};

    if (!e)
        return look_lost(l, below, err);
    if (e->is.kind == CKPT_ENTRY_FILE && is_own(l, e))
        return ckpt_dir_look(l->own, below, ret, &own) < 0 ? ckpt_listing_errno(&own, err) : 0;
    describe(e, ret);
    /* by its own folder a rank knows whether it sees the very same one as another rank */
    if (strcmp(below, ".") == 0 && l->own)
        (void)ckpt_dir_stat(l->own, ".", &ret->id);
    return 0;
}

static int fail_differs(const struct local *l, const struct ckpt_roster_entry *e,
                        struct ckpt_err *err)
{
    const uint32_t first = l->roster.holder.ptr[e->holder].rank;

    return ckpt_fail(err, CKPT_CONFLICT,
                     "'%s', of %llu bytes at %s, has another size or other contents at %s: a file "
                     "that several nodes have must be the same",
                     e->is.path, (unsigned long long)e->is.id.size, rank_at(l, first)->who,
                     rank_at(l, e->differs)->who);
}

static int local_open(void *ctx, const char *below, int *ret_fd, struct ckpt_dir_found *ret,
                      struct ckpt_err *err)
{
    const struct local *l = ctx;
    const struct ckpt_roster_entry *e = ckpt_roster_find(&l->roster, below);
    struct ckpt_err own = {0};

    if (!e)
        return look_lost(l, below, err);
    if (e->differs != CKPT_NONE)
        return fail_differs(l, e, err);
    *ret_fd = -1;
    if (e->is.kind == CKPT_ENTRY_FILE && is_own(l, e))
        return ckpt_dir_open_file(l->own, below, ret_fd, ret, &own) < 0
                   ? ckpt_listing_errno(&own, err)
                   : 0;
    describe(e, ret);
    return 0;
}

static int local_list(void *ctx, const char *below, struct ckpt_str *ret, struct ckpt_err *err)
{
    const struct local *l = ctx;

    (void)err;
    return ckpt_roster_list(&l->roster, below, ret);
}

static const char *local_elsewhere(void *ctx, const char *below)
{
    const struct local *l = ctx;
    const struct ckpt_roster_entry *e = ckpt_roster_find(&l->roster, below);

    return e && e->is.kind == CKPT_ENTRY_FILE && !is_own(l, e) ? rank_at(l, choose_rank(l, e))->who
                                                               : NULL;
}

static void local_holders(void *ctx, const char *below, bool *ret, uint32_t n)
{
    const struct local *l = ctx;
    const struct ckpt_roster_entry *e = ckpt_roster_find(&l->roster, below);

    memset(ret, 0, n * sizeof *ret);
    for (uint32_t i = 0; e && i < e->nholder; i++)
        if (l->roster.holder.ptr[e->holder + i].rank < n)
            ret[l->roster.holder.ptr[e->holder + i].rank] = true;
    for (uint32_t r = 0; r < n && r < l->ranks.n; r++)
        ret[r] = ret[rank_at(l, r)->listing]; /* of a rank before it, or itself */
}

/* ---- reading what others have ---- */

/* A request of one file, as it is built: n buffers for the bytes of its runs. */
struct asking {
    const struct local *l;
    const struct ckpt_roster_entry *e;
    uint32_t rank; /* which is asked */
    struct ckpt_local_request head;
    struct ckpt_local_run run[CKPT_LOCAL_RUNS];
    uint64_t len; /* bytes of the runs */
    CKPT_VEC(struct iovec) iov;
};

static struct asking *asking_new(const struct local *l, const struct ckpt_roster_entry *e)
{
    struct asking *q = calloc(1, sizeof *q);

    if (!q)
        return NULL;
    q->l = l;
    q->e = e;
    q->rank = choose_rank(l, e);
    q->head = (struct ckpt_local_request){
        .size = e->is.id.size, .mtime_ns = e->is.id.mtime_ns, .ctime_ns = e->is.id.ctime_ns};
    return q;
}

static void asking_free(struct asking *q)
{
    ckpt_vec_release(&q->iov);
    free(q);
}

CKPT_CLEANUP_BY(asking_free, struct asking)

/* Send the request, wait for the bytes, and begin another one. */
static int ask(struct asking *q, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str text = {0};
    const struct ckpt_local_rank *rank = rank_at(q->l, q->rank);
    struct ckpt_err own = {0};

    if (q->head.nrun == 0)
        return 0;
    ckpt_str_append(&text, (const char *)&q->head, sizeof q->head);
    ckpt_str_append(&text, (const char *)q->run, q->head.nrun * sizeof *q->run);
    ckpt_str_puts(&text, q->e->is.path);
    if (text.failed)
        return ckpt_nomem(err);
    if (ckpt_service_ask(q->l->service, q->rank, rank->address, text.ptr, text.len, q->iov.ptr,
                         (int)q->iov.len, q->l->timeout_ms, &own) < 0) {
        if (!ckpt_has_prefix(own.text, rank->who)) /* it is no error of the answer */
            (void)ckpt_err_in(&own, "asking %s for '%s' at byte %llu", rank->who, q->e->is.path,
                              (unsigned long long)q->run[0].off);
        return ckpt_err_move(err, &own);
    }
    q->head.nrun = 0;
    q->len = q->iov.len = 0;
    return 0;
}

/* Add bytes [off, off + len) to the request, where there is room for them. */
static int add_bytes(struct asking *q, void *buf, size_t len, uint64_t off, struct ckpt_err *err)
{
    struct ckpt_local_run *last = q->head.nrun ? &q->run[q->head.nrun - 1] : NULL;

    if (last && last->off + last->len == off)
        last->len += len;
    else
        q->run[q->head.nrun++] = (struct ckpt_local_run){off, len};
    q->len += len;
    return ckpt_vec_push(&q->iov, ((struct iovec){buf, len})) < 0 ? ckpt_nomem(err) : 0;
}

/* Add a run, and send the request whenever it is full. */
static int add_run(struct asking *q, const struct ckpt_source_run *run, struct ckpt_err *err)
{
    uint64_t off = run->off;

    for (int i = 0; i < run->n; i++)
        for (size_t at = 0, len; at < run->iov[i].iov_len; at += len, off += len) {
            if ((q->len == CKPT_SERVICE_REPLY || q->head.nrun == CKPT_LOCAL_RUNS) &&
                ask(q, err) < 0)
                return -1;
            len = (size_t)ckpt_min_u64(run->iov[i].iov_len - at, CKPT_SERVICE_REPLY - q->len);
            if (add_bytes(q, (char *)run->iov[i].iov_base + at, len, off, err) < 0)
                return -1;
        }
    return 0;
}

static int local_read_elsewhere(void *ctx, const char *below, const struct ckpt_source_run *run,
                                size_t n, struct ckpt_err *err)
{
    const struct local *l = ctx;
    const struct ckpt_roster_entry *e = ckpt_roster_find(&l->roster, below);
    ckpt_cleanup(asking_freep) struct asking *q = e ? asking_new(l, e) : NULL;

    if (!q)
        return e ? ckpt_nomem(err) : ckpt_fail(err, CKPT_STALE, "'%s' is on no node", below);
    for (size_t i = 0; i < n; i++)
        if (add_run(q, &run[i], err) < 0)
            return -1;
    return ask(q, err);
}

static void local_free(void *ctx)
{
    struct local *l = ctx;

    ckpt_service_close(l->service);
    ckpt_roster_release(&l->roster);
    ckpt_dir_unref(l->own);
    free(l->ranks.rank);
    free(l);
}

static const struct ckpt_dir_ops local_ops = {.look = local_look,
                                              .open = local_open,
                                              .list = local_list,
                                              .free = local_free,
                                              .elsewhere = local_elsewhere,
                                              .read_elsewhere = local_read_elsewhere,
                                              .holders = local_holders};

/* ---- opening ---- */

int ckpt_dir_open_local(const char *path, const char *real, struct ckpt_dir *own,
                        struct ckpt_roster *roster, struct ckpt_local_ranks *ranks,
                        struct ckpt_service **service, uint32_t timeout_ms, struct ckpt_dir **ret,
                        struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) struct local *l = calloc(1, sizeof *l);

    if (!l)
        return ckpt_nomem(err);
    l->timeout_ms = timeout_ms;
    if (ckpt_dir_open_other(path, (struct ckpt_dir_way){&local_ops, l}, NULL, NULL, ret, err) < 0)
        return -1;
    l->own = ckpt_dir_ref(own);
    l->roster = *roster;
    *roster = (struct ckpt_roster){0};
    l->ranks = *ranks;
    *ranks = (struct ckpt_local_ranks){0};
    l->service = ckpt_steal(service);
    l = NULL;
    return ckpt_dir_take_after(*ret, own, real, err);
}
