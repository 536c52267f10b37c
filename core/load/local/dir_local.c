/* SPDX-License-Identifier: Apache-2.0 */
/* A directory of the functions of dir.h over the roster, this rank's own directory, and requests to
 * other ranks. Files are looked for in the roster alone: what a rank gets later does not exist. */
#include "load/local/dir_local.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/mem.h"
#include "io/iov.h"
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

/* The error of this rank's directory, as the functions of a directory return it. */
static int fail_own(struct ckpt_err *own, struct ckpt_err *err)
{
    return own->code == CKPT_MISSING ? ENOENT : ckpt_err_move(err, own);
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
        return ckpt_dir_look(l->own, below, ret, &own) < 0 ? fail_own(&own, err) : 0;
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
                     "'%s' has %llu bytes at %s, and another size, or is no file, at %s: a file "
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
        return ckpt_dir_open_file(l->own, below, ret_fd, ret, &own) < 0 ? fail_own(&own, err) : 0;
    describe(e, ret);
    return 0;
}

static int local_list(void *ctx, const char *below, struct ckpt_str *ret, struct ckpt_err *err)
{
    const struct local *l = ctx;
    const struct ckpt_roster_entry *e = ckpt_roster_find(&l->roster, below);

    (void)err;
    if (!e)
        return ENOENT;
    if (e->is.kind != CKPT_ENTRY_DIR)
        return ENOTDIR;
    ckpt_roster_list(&l->roster, below, ret);
    return 0;
}

static const char *local_elsewhere(void *ctx, const char *below)
{
    const struct local *l = ctx;
    const struct ckpt_roster_entry *e = ckpt_roster_find(&l->roster, below);

    return e && e->is.kind == CKPT_ENTRY_FILE && !is_own(l, e) ? rank_at(l, choose_rank(l, e))->who
                                                               : NULL;
}

/* ---- reading what others have ---- */

/* A request of one file, as it is sent. */
struct asking {
    struct ckpt_local_request head;
    char path[PATH_MAX];
};

/* Ask for the bytes of iov[0..n), at most CKPT_SERVICE_REPLY. */
static int ask(const struct local *l, const struct ckpt_roster_entry *e, uint32_t r,
               const struct iovec *iov, int n, uint64_t off, struct ckpt_err *err)
{
    const struct ckpt_file_id *id = &e->is.id;
    struct asking q = {.head = {off, id->size, id->mtime_ns, id->ctime_ns}};
    const size_t len = strlen(e->is.path);

    memcpy(q.path, e->is.path, len);
    if (ckpt_service_ask(l->service, r, rank_at(l, r)->address, &q,
                         offsetof(struct asking, path) + len, iov, n, l->timeout_ms, err) == 0)
        return 0;
    return err && (err->code == CKPT_PEER || err->code == CKPT_TIMEOUT)
               ? ckpt_err_in(err, "asking %s for '%s' at byte %llu", rank_at(l, r)->who, e->is.path,
                             (unsigned long long)off)
               : -1;
}

/* Take the next buffers of at most CKPT_SERVICE_REPLY bytes together; returns their number. */
static int take_buffers(struct ckpt_iov_cursor *c, int *left, struct iovec *ret, uint64_t *ret_len)
{
    int n = 0;

    *ret_len = 0;
    while (*left > 0 && *ret_len < CKPT_SERVICE_REPLY) {
        const size_t len =
            (size_t)ckpt_min_u64(c->iov->iov_len - c->at, CKPT_SERVICE_REPLY - *ret_len);
        ret[n++] = (struct iovec){(char *)c->iov->iov_base + c->at, len};
        *ret_len += len;
        c->at += len;
        if (c->at == c->iov->iov_len) {
            *c = (struct ckpt_iov_cursor){c->iov + 1, 0};
            --*left;
        }
    }
    return n;
}

static int local_read(void *ctx, const char *below, const char *tag, uint64_t size,
                      const struct iovec *iov, int n, uint64_t off, enum ckpt_read_how how,
                      struct ckpt_err *err)
{
    const struct local *l = ctx;
    const struct ckpt_roster_entry *e = ckpt_roster_find(&l->roster, below);
    struct ckpt_iov_cursor from = {iov, 0};
    uint64_t len;
    int rc = 0;

    (void)tag;
    (void)size;
    if (how == CKPT_READ_CACHED || how == CKPT_READ_PREFETCH)
        return how == CKPT_READ_CACHED;
    if (!e)
        return ckpt_fail(err, CKPT_STALE, "'%s' is on no node", below);
    const uint32_t r = choose_rank(l, e);
    ckpt_cleanup(ckpt_freep) struct iovec *some = malloc(((size_t)n + 1) * sizeof *some);
    if (!some)
        return ckpt_nomem(err);
    for (; n > 0 && rc == 0; off += len) {
        const int k = take_buffers(&from, &n, some, &len);
        rc = ask(l, e, r, some, k, off, err);
    }
    return rc;
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
                                              .read = local_read,
                                              .elsewhere = local_elsewhere};

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
