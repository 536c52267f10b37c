/* SPDX-License-Identifier: Apache-2.0 */
/* Merges the listings of nodes' directories, or divides the listing of one by a list of patterns,
 * and is then a directory over the roster. */
#include "load/local/planned.h"

#include <errno.h>
#include <fnmatch.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/str.h"
#include "io/bucket/dir_bucket.h"
#include "load/local/listing.h"
#include "load/local/roster.h"
#include "model/options.h"

struct planned {
    struct ckpt_roster roster;
    uint32_t nnode, per_node;
    struct ckpt_dir **dir; /* per node: of its files; NULL: it has none */
};

static void planned_free(void *ctx)
{
    struct planned *p = ctx;

    for (uint32_t i = 0; p->dir && i < p->nnode; i++)
        ckpt_dir_unref(p->dir[i]);
    ckpt_roster_release(&p->roster);
    free(p->dir);
    free(p);
}

static void planned_freep(struct planned **p)
{
    if (*p)
        planned_free(*p);
}

/* ---- the functions ---- */

/* The directory of the first node that has it. */
static const struct ckpt_dir *dir_of(const struct planned *p, const struct ckpt_roster_entry *e)
{
    return p->dir[p->roster.holder.ptr[e->holder].rank];
}

static int planned_look(void *ctx, const char *below, struct ckpt_dir_found *ret,
                        struct ckpt_err *err)
{
    const struct planned *p = ctx;
    const struct ckpt_roster_entry *e = ckpt_roster_find(&p->roster, below);
    struct ckpt_err own = {0};

    if (!e)
        return ENOENT;
    *ret = (struct ckpt_dir_found){.kind = e->is.kind, .id = e->is.id}; /* a folder's newest time */
    return e->is.kind == CKPT_ENTRY_FILE && ckpt_dir_look(dir_of(p, e), below, ret, &own) < 0
               ? ckpt_listing_errno(&own, err)
               : 0;
}

static int planned_open(void *ctx, const char *below, int *ret_fd, struct ckpt_dir_found *ret,
                        struct ckpt_err *err)
{
    const struct planned *p = ctx;
    const struct ckpt_roster_entry *e = ckpt_roster_find(&p->roster, below);
    struct ckpt_err own = {0};

    if (!e)
        return ENOENT;
    if (e->differs != CKPT_NONE)
        return ckpt_fail(err, CKPT_CONFLICT,
                         "'%s', of %llu bytes at node %" PRIu32 ", has another size at node "
                         "%" PRIu32 ": a file that several nodes have must be the same",
                         e->is.path, (unsigned long long)e->is.id.size,
                         p->roster.holder.ptr[e->holder].rank, e->differs);
    return ckpt_dir_open_file(dir_of(p, e), below, ret_fd, ret, &own) < 0
               ? ckpt_listing_errno(&own, err)
               : 0;
}

static int planned_list(void *ctx, const char *below, struct ckpt_str *ret, struct ckpt_err *err)
{
    const struct planned *p = ctx;

    (void)err;
    return ckpt_roster_list(&p->roster, below, ret);
}

/* Headers are read here, whichever node has them. */
static const char *planned_elsewhere(void *ctx, const char *below)
{
    (void)ctx, (void)below;
    return NULL;
}

static int planned_read_elsewhere(void *ctx, const char *below, const struct ckpt_source_run *run,
                                  size_t n, struct ckpt_err *err)
{
    (void)ctx, (void)run, (void)n;
    return ckpt_fail(err, CKPT_MISSING, "'%s' is at no other rank: this is a plan", below);
}

static void planned_holders(void *ctx, const char *below, bool *ret, uint32_t n)
{
    const struct planned *p = ctx;
    const struct ckpt_roster_entry *e = ckpt_roster_find(&p->roster, below);

    memset(ret, 0, n * sizeof *ret);
    for (uint32_t i = 0; e && i < e->nholder; i++) {
        const uint64_t first = (uint64_t)p->roster.holder.ptr[e->holder + i].rank * p->per_node;
        for (uint64_t r = first; r < first + p->per_node && r < n; r++)
            ret[r] = true;
    }
}

static const struct ckpt_dir_ops planned_ops = {.look = planned_look,
                                                .open = planned_open,
                                                .list = planned_list,
                                                .free = planned_free,
                                                .elsewhere = planned_elsewhere,
                                                .read_elsewhere = planned_read_elsewhere,
                                                .holders = planned_holders};

/* The functions where all nodes have all files: a load is an ordinary one then. */
static const struct ckpt_dir_ops whole_ops = {
    .look = planned_look, .open = planned_open, .list = planned_list, .free = planned_free};

static bool is_whole(const struct planned *p)
{
    bool is = true;

    for (size_t i = 0; i < p->roster.entry.len; i++) {
        const struct ckpt_roster_entry *e = &p->roster.entry.ptr[i];
        is &= e->nholder == p->nnode;
        for (uint32_t k = 0; k < e->nholder; k++)
            is &= !p->roster.holder.ptr[e->holder + k].is_copy;
    }
    return is;
}

/* ---- who has what: the listings of all nodes ---- */

struct listings {
    const struct ckpt_planned_parts *parts;
    struct ckpt_access how;
    struct planned *p;
    struct ckpt_str *of; /* per node */
};

static void listings_release(struct listings *l)
{
    for (uint32_t i = 0; l->of && i < l->parts->nnode; i++)
        ckpt_str_release(&l->of[i]);
    free(l->of);
}

/* Look at the directory of each node. */
static int look_at_nodes(struct listings *l, struct ckpt_err *err)
{
    bool any = false;

    for (uint32_t i = 0; i < l->parts->nnode; i++) {
        ckpt_cleanup(ckpt_freep) char *path = NULL;
        struct ckpt_err own = {0};
        if (ckpt_listing_path(l->parts->path, 0, i, &path, err) < 0) /* it has no {rank} */
            return -1;
        if (ckpt_listing_open(path, &l->how, &l->p->dir[i], &own) < 0) {
            if (own.code != CKPT_MISSING)
                return ckpt_err_move(err, &own);
            continue;
        }
        if (ckpt_listing_read(l->p->dir[i], &l->of[i], err) < 0)
            return -1;
        any = true;
    }
    return any ? 0
               : ckpt_fail(err, CKPT_MISSING, "none of the %" PRIu32 " nodes has a directory '%s'",
                           l->parts->nnode, l->parts->path);
}

/* ---- the same by a list ---- */

/* A line of the list. */
struct rule {
    uint32_t node; /* CKPT_NONE: every node */
    const char *pattern;
};
typedef CKPT_VEC(struct rule) rule_vec;

/* Take a line apart, which is changed. 1: it has a rule; 0: it is empty, or a comment. */
static int take_line(const struct listings *l, char *line, size_t number, struct rule *ret,
                     struct ckpt_err *err)
{
    char *rest = line + strspn(line, " \t");
    const size_t len = strcspn(rest, " \t\r");

    if (!*rest || *rest == '#' || *rest == '\r')
        return 0;
    *ret = (struct rule){CKPT_NONE, rest + len + strspn(rest + len, " \t")};
    for (size_t n = strlen(ret->pattern); n && strchr(" \t\r", ret->pattern[n - 1]); n--)
        ((char *)ret->pattern)[n - 1] = '\0';
    if (!(len == 1 && *rest == '*')) {
        unsigned long long node;
        if (!ckpt_parse_u64(rest, len, &node) || node >= l->parts->nnode)
            return ckpt_fail(err, CKPT_USAGE,
                             "'%s', line %zu: '%.*s' is no node: expected a number below %" PRIu32
                             ", which is the number of nodes, or '*' for all of them",
                             l->parts->list, number, (int)len, rest, l->parts->nnode);
        ret->node = (uint32_t)node;
    }
    if (!*ret->pattern)
        return ckpt_fail(err, CKPT_USAGE,
                         "'%s', line %zu: expected NODE PATTERN, such as '0 *rank_0*': which of "
                         "the run's files has the node?",
                         l->parts->list, number);
    return 1;
}

static int take_lines(const struct listings *l, char *text, rule_vec *ret, struct ckpt_err *err)
{
    size_t number = 1;

    for (char *line = text, *next; line; line = next, number++) {
        struct rule rule;
        if ((next = strchr(line, '\n')))
            *next++ = '\0';
        const int rc = take_line(l, line, number, &rule, err);
        if (rc < 0)
            return -1;
        if (rc > 0 && ckpt_vec_push(ret, rule) < 0)
            return ckpt_nomem(err);
    }
    return 0;
}

/* Add an entry of the run to the listings of the nodes that have it; folders are at all of them.
 * `last`: per node, the number of the entry that was added last. False: no node has it. */
static bool add_entry(struct listings *l, const rule_vec *rules, const struct ckpt_seen *e,
                      size_t number, size_t *last)
{
    bool any = false;

    if (e->kind != CKPT_ENTRY_FILE) {
        for (uint32_t i = 0; i < l->parts->nnode; i++)
            ckpt_seen_put(&l->of[i], e);
        return true;
    }
    for (size_t k = 0; k < rules->len; k++) {
        const struct rule *r = &rules->ptr[k];
        if (fnmatch(r->pattern, e->path, 0) != 0)
            continue;
        any = true;
        const uint32_t lo = r->node == CKPT_NONE ? 0 : r->node;
        const uint32_t hi = r->node == CKPT_NONE ? l->parts->nnode : lo + 1;
        for (uint32_t i = lo; i < hi; i++)
            if (last[i] != number) {
                last[i] = number;
                ckpt_seen_put(&l->of[i], e);
            }
    }
    return any;
}

/* Divide the listing of the whole run. */
static int divide(struct listings *l, const rule_vec *rules, const struct ckpt_str *whole,
                  struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) size_t *last = calloc(l->parts->nnode, sizeof *last);
    struct ckpt_cursor c;
    struct ckpt_seen e;
    size_t number = 0;
    int rc;

    if (!last)
        return ckpt_nomem(err);
    ckpt_cursor_init(&c, whole->ptr, whole->len, 0, "a listing");
    while ((rc = ckpt_seen_get(&c, &e, err)) > 0)
        if (!add_entry(l, rules, &e, ++number, last))
            return ckpt_fail(err, CKPT_USAGE,
                             "'%s': no line names '%s', which would be on no node: add one, such "
                             "as '0 %s', or '* %s' if all nodes have it",
                             l->parts->list, e.path, e.path, e.path);
    return rc;
}

enum { MOST_LIST = 64 << 20 }; /* bytes of a list */

static int read_list(const char *path, char **ret, struct ckpt_err *err)
{
    const char *slash = strrchr(path, '/');
    ckpt_cleanup(ckpt_freep) char *folder =
        slash ? strndup(path, slash > path ? (size_t)(slash - path) : 1) : strdup(".");
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *dir = NULL;
    size_t len = 0;

    if (!folder)
        return ckpt_nomem(err);
    if (ckpt_dir_open(folder, CKPT_LINKS_ANY, &dir, err) < 0 ||
        ckpt_dir_read_file(dir, slash ? slash + 1 : path, MOST_LIST, ret, &len, err) < 0)
        return -1;
    return strlen(*ret) == len ? 0
                               : ckpt_fail(err, CKPT_FORMAT,
                                           "'%s' has a byte 0 at %zu: expected lines of text, NODE "
                                           "PATTERN",
                                           path, strlen(*ret));
}

/* All nodes' directory is the run's. */
static int look_at_list(struct listings *l, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *text = NULL;
    ckpt_cleanup(ckpt_vec_cleanup) rule_vec rules = {0};
    ckpt_cleanup(ckpt_str_release) struct ckpt_str whole = {0};

    if (read_list(l->parts->list, &text, err) < 0 || take_lines(l, text, &rules, err) < 0 ||
        ckpt_listing_open(l->parts->path, &l->how, &l->p->dir[0], err) < 0 ||
        ckpt_listing_read(l->p->dir[0], &whole, err) < 0)
        return -1;
    for (uint32_t i = 1; i < l->parts->nnode; i++)
        l->p->dir[i] = ckpt_dir_ref(l->p->dir[0]);
    return divide(l, &rules, &whole, err);
}

/* ---- opening ---- */

static int merge(struct listings *l, struct ckpt_err *err)
{
    const uint32_t n = l->parts->nnode;
    ckpt_cleanup(ckpt_freep) const unsigned char **data = calloc(n, sizeof *data);
    ckpt_cleanup(ckpt_freep) size_t *len = calloc(n, sizeof *len);
    ckpt_cleanup(ckpt_str_release) struct ckpt_str all = {0};

    if (!data || !len)
        return ckpt_nomem(err);
    for (uint32_t i = 0; i < n; i++) {
        if (l->of[i].failed)
            return ckpt_nomem(err);
        data[i] = (const unsigned char *)l->of[i].ptr;
        len[i] = l->of[i].len;
    }
    if (ckpt_roster_merge(data, len, n, &all, err) < 0)
        return -1;
    return ckpt_roster_decode(all.ptr, all.len, n, &l->p->roster, err);
}

static int check_parts(const struct ckpt_planned_parts *parts, const struct ckpt_options *opt,
                       struct ckpt_err *err)
{
    const bool by_node = strstr(parts->path, "{node}");

    if (strstr(parts->path, "{rank}"))
        return ckpt_fail(err, CKPT_USAGE,
                         "'%s': a plan looks at the directories of nodes: use {node}", parts->path);
    if (by_node == (parts->list != NULL))
        return ckpt_fail(err, CKPT_USAGE,
                         by_node ? "'%s' has {node}, and '%s' says which node has what: one of "
                                   "them is enough"
                                 : "'%s' is the same for all nodes%s: write {node} for the number "
                                   "of the node, or give a list of what each has",
                         parts->path, by_node ? parts->list : "");
    if (ckpt_is_bucket(parts->path))
        return ckpt_fail(err, CKPT_USAGE,
                         "'%s' is a bucket, which all nodes see: plan without local", parts->path);
    if (opt && opt->also.len)
        return ckpt_fail(err, CKPT_USAGE,
                         "option also does not go with a local load: leave it out");
    return 0;
}

int ckpt_planned_open(const struct ckpt_planned_parts *parts, const struct ckpt_options *opt,
                      struct ckpt_dir **ret, struct ckpt_err *err)
{
    ckpt_cleanup(planned_freep) struct planned *p = NULL;
    ckpt_cleanup(listings_release) struct listings l = {.parts = parts};
    uint32_t first = 0;

    if (check_parts(parts, opt, err) < 0)
        return -1;
    if (!(p = calloc(1, sizeof *p)))
        return ckpt_nomem(err);
    p->nnode = parts->nnode;
    p->per_node = parts->per_node;
    p->dir = calloc(parts->nnode, sizeof *p->dir);
    l.how = ckpt_options_access(opt);
    l.p = p;
    l.of = calloc(parts->nnode, sizeof *l.of);
    if (!p->dir || !l.of)
        return ckpt_nomem(err);
    if ((parts->list ? look_at_list : look_at_nodes)(&l, err) < 0 || merge(&l, err) < 0)
        return -1;
    while (!p->dir[first])
        first++;
    const struct ckpt_dir *some = p->dir[first];
    if (ckpt_dir_open_other(parts->path,
                            (struct ckpt_dir_way){is_whole(p) ? &whole_ops : &planned_ops, p}, NULL,
                            NULL, ret, err) < 0)
        return -1;
    p = NULL;
    return ckpt_dir_take_after(*ret, some, ckpt_dir_real_path(some), err);
}
