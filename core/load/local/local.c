/* SPDX-License-Identifier: Apache-2.0 */
/* The rounds before a local load's checkpoint is opened. */
#include "load/local/local.h"

#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/map.h"
#include "base/mem.h"
#include "base/str.h"
#include "comm/comm.h"
#include "comm/shm.h"
#include "load/local/answers.h"
#include "load/local/dir_local.h"
#include "model/options.h"

/* The rounds collect this. */
struct gathering {
    struct ckpt_comm *comm;
    uint32_t timeout_ms;
    const char *given; /* the path, before {rank} and {node} are replaced */
    char *path;
    char *real; /* the canonical path of the first rank that has the directory */
    struct ckpt_dir *own;
    struct ckpt_str listing;
    struct ckpt_local_ranks ranks;
    struct ckpt_service *service;
    struct ckpt_roster roster;
    bool failed; /* a round has, so all ranks have the same error */
};

static void gathering_release(struct gathering *g)
{
    ckpt_service_close(g->service);
    ckpt_roster_release(&g->roster);
    ckpt_str_release(&g->listing);
    ckpt_dir_unref(g->own);
    free(g->ranks.rank);
    free(g->real);
    free(g->path);
}

/* COLLECTIVE. A round about `own` bytes of each rank. */
static int run_round(struct gathering *g, int rc, const void *own, size_t own_len,
                     int (*reduce)(void *ctx, const unsigned char *const *data, const size_t *len,
                                   struct ckpt_str *answer, struct ckpt_err *err),
                     unsigned char **ret, size_t *ret_len, struct ckpt_err *err)
{
    struct ckpt_round round = {.comm = g->comm,
                               .timeout_ms = g->timeout_ms,
                               .own = own,
                               .own_len = own_len,
                               .reduce = reduce,
                               .ctx = g};

    if (rc < 0)
        (void)ckpt_err_in(err, "rank %" PRIu32, g->ranks.self);
    rc = ckpt_round_run(&round, rc, ret, ret_len, err);
    g->failed = rc < 0;
    return rc;
}

static int fail_version(uint32_t rank, struct ckpt_err *err)
{
    return ckpt_fail(err, CKPT_CONFLICT, "rank %" PRIu32 " runs another version of ckptfs", rank);
}

/* ---- the first round: who the ranks are ---- */

static int reduce_ranks(void *ctx, const unsigned char *const *data, const size_t *len,
                        struct ckpt_str *answer, struct ckpt_err *err)
{
    const struct gathering *g = ctx;

    for (uint32_t r = 0; r < g->ranks.n; r++) {
        if (len[r] != sizeof(struct ckpt_local_rank))
            return fail_version(r, err);
        ckpt_str_append(answer, (const char *)data[r], len[r]);
    }
    return answer->failed ? ckpt_nomem(err) : 0;
}

/* Describe this rank. */
static void introduce(const struct gathering *g, struct ckpt_local_rank *ret)
{
    memset(ret, 0, sizeof *ret);
    ret->node = ckpt_node_digest();
    if (gethostname(ret->host, sizeof ret->host - 1) < 0)
        (void)strcpy(ret->host, "an unnamed machine");
    (void)snprintf(ret->who, sizeof ret->who, "rank %" PRIu32 " on %s", g->ranks.self, ret->host);
}

/* The bytes of rank 0's answer become the ranks. */
static int take_ranks(struct gathering *g, const unsigned char *data, size_t len,
                      struct ckpt_err *err)
{
    if (len != g->ranks.n * sizeof *g->ranks.rank)
        return fail_version(0, err);
    if (!(g->ranks.rank = malloc(len)))
        return ckpt_nomem(err);
    memcpy(g->ranks.rank, data, len);
    for (uint32_t r = 0; r < g->ranks.n; r++) {
        struct ckpt_local_rank *k = &g->ranks.rank[r];
        k->host[sizeof k->host - 1] = k->who[sizeof k->who - 1] = '\0';
        k->address[sizeof k->address - 1] = '\0';
    }
    return 0;
}

/* From now on errors about a rank that is gone say which machine it was on. */
static void name_hosts(const struct gathering *g)
{
    ckpt_cleanup(ckpt_freep) const char **host = malloc(g->ranks.n * sizeof *host);

    for (uint32_t r = 0; host && r < g->ranks.n; r++)
        host[r] = g->ranks.rank[r].host;
    if (host)
        ckpt_comm_name_hosts(g->comm, host);
}

static int meet(struct gathering *g, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) unsigned char *answer = NULL;
    struct ckpt_local_rank own;
    size_t len = 0;

    introduce(g, &own);
    if (run_round(g, 0, &own, sizeof own, reduce_ranks, &answer, &len, err) < 0)
        return -1;
    if (take_ranks(g, answer, len, err) < 0)
        return -1;
    name_hosts(g);
    return 0;
}

/* ---- the second round: do all see the same? ---- */

/* The number of this rank's node, in the order of the nodes' first ranks. */
static int number_node(const struct ckpt_local_ranks *ranks, uint32_t *ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) uint64_t(*key)[2] = calloc((size_t)ranks->n + 1, sizeof *key);
    ckpt_cleanup(ckpt_freep) uint32_t *number = malloc((ranks->n + (size_t)1) * sizeof *number);
    uint32_t n;

    for (uint32_t r = 0; key && r < ranks->n; r++)
        key[r][0] = ranks->rank[r].node;
    if (!key || !number || ckpt_map_number(key, ranks->n, number, NULL, &n) < 0)
        return ckpt_nomem(err);
    *ret = number[ranks->self];
    return 0;
}

/* Set g->path: the path with the numbers of this rank and its node. */
static int make_path(struct gathering *g, struct ckpt_err *err)
{
    uint32_t number = 0;

    return number_node(&g->ranks, &number, err) < 0
               ? -1
               : ckpt_listing_path(g->given, g->ranks.self, number, &g->path, err);
}

/* Open and list this rank's directory, if it has one. */
static int look_around(struct gathering *g, const struct ckpt_options *opt, struct ckpt_err *err)
{
    const struct ckpt_access how = ckpt_options_access(opt);
    struct ckpt_err own = {0};

    if (ckpt_is_bucket(g->given))
        return ckpt_fail(err, CKPT_USAGE,
                         "'%s' is a bucket, which all nodes see: load it without local", g->given);
    if (opt->also.len)
        return ckpt_fail(err, CKPT_USAGE,
                         "option also names directories that this rank has, and a local load asks "
                         "the other ranks: use one of them");
    if (make_path(g, err) < 0)
        return -1;
    if (ckpt_listing_open(g->path, &how, &g->own, &own) < 0)
        return own.code == CKPT_MISSING ? 0 : ckpt_err_move(err, &own);
    return ckpt_listing_read(g->own, &g->listing, err);
}

/* Each rank sends this, and the canonical path of its directory. */
struct sight {
    uint64_t digest;
    uint32_t has, unused;
    char address[CKPT_TCP_ADDRESS];
};

/* Rank 0's answer: the sight of each rank, and the path of the first that has the directory. */
static int reduce_sights(void *ctx, const unsigned char *const *data, const size_t *len,
                         struct ckpt_str *answer, struct ckpt_err *err)
{
    const struct gathering *g = ctx;
    const struct sight none = {0};
    struct sight s = none;
    uint32_t first = g->ranks.n;

    for (uint32_t r = 0; r < g->ranks.n; r++) {
        if (len[r] < sizeof s)
            return fail_version(r, err);
        memcpy(&s, data[r], sizeof s);
        if (s.has && first == g->ranks.n)
            first = r;
        ckpt_str_append(answer, (const char *)&s, sizeof s);
    }
    if (first == g->ranks.n)
        return ckpt_fail(err, CKPT_MISSING, "none of the %" PRIu32 " ranks has a directory '%s'",
                         g->ranks.n, g->given);
    ckpt_str_append(answer, (const char *)data[first] + sizeof s, len[first] - sizeof s);
    return answer->failed ? ckpt_nomem(err) : 0;
}

/* Note for each rank the first one that has the same sight. */
static int find_alike(struct gathering *g, const struct sight *s, struct ckpt_err *err)
{
    const uint32_t n = g->ranks.n;
    ckpt_cleanup(ckpt_freep) uint64_t(*key)[2] = calloc((size_t)n + 1, sizeof *key);
    ckpt_cleanup(ckpt_freep) uint32_t *number = malloc((n + (size_t)1) * sizeof *number);
    ckpt_cleanup(ckpt_freep) uint32_t *first = malloc((n + (size_t)1) * sizeof *first);
    uint32_t different;

    for (uint32_t r = 0; key && r < n; r++) {
        key[r][0] = s[r].digest;
        key[r][1] = s[r].has;
    }
    if (!key || !number || !first || ckpt_map_number(key, n, number, first, &different) < 0)
        return ckpt_nomem(err);
    for (uint32_t r = 0; r < n; r++)
        g->ranks.rank[r].listing = first[number[r]];
    return 0;
}

/* *ret_same: all ranks see the same files. */
static int take_sights(struct gathering *g, const unsigned char *data, size_t len, bool *ret_same,
                       struct ckpt_err *err)
{
    const size_t size = g->ranks.n * sizeof(struct sight);
    const struct sight *s = (const struct sight *)(const void *)data;

    if (len < size)
        return fail_version(0, err);
    *ret_same = true;
    if (find_alike(g, s, err) < 0)
        return -1;
    for (uint32_t r = 0; r < g->ranks.n; r++) {
        struct ckpt_local_rank *k = &g->ranks.rank[r];
        memcpy(k->address, s[r].address, sizeof k->address);
        k->address[sizeof k->address - 1] = '\0';
        *ret_same &= k->listing == 0;
    }
    return (g->real = strndup((const char *)data + size, len - size)) ? 0 : ckpt_nomem(err);
}

static int write_sight(struct gathering *g, struct ckpt_str *out, struct ckpt_err *err)
{
    struct sight s;

    memset(&s, 0, sizeof s);
    if (ckpt_listing_digest(ckpt_str_get(&g->listing), g->listing.len, &s.digest, err) < 0 ||
        ckpt_answers_open(g->comm, g->own, g->ranks.rank[g->ranks.self].who, &g->service, err) < 0)
        return -1;
    s.has = g->own != NULL;
    (void)snprintf(s.address, sizeof s.address, "%s", ckpt_service_address(g->service));
    ckpt_str_append(out, (const char *)&s, sizeof s);
    if (g->own)
        ckpt_str_puts(out, ckpt_dir_real_path(g->own));
    return out->failed ? ckpt_nomem(err) : 0;
}

static int compare(struct gathering *g, int rc, bool *ret_same, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str own = {0};
    ckpt_cleanup(ckpt_freep) unsigned char *answer = NULL;
    size_t len = 0;

    if (rc == 0)
        rc = write_sight(g, &own, err);
    if (run_round(g, rc, own.ptr, own.len, reduce_sights, &answer, &len, err) < 0)
        return -1;
    return take_sights(g, answer, len, ret_same, err);
}

/* ---- the third round: who has what ---- */

static int reduce_listings(void *ctx, const unsigned char *const *data, const size_t *len,
                           struct ckpt_str *answer, struct ckpt_err *err)
{
    const struct gathering *g = ctx;

    return ckpt_roster_merge(data, len, g->ranks.n, answer, err);
}

/* One of the ranks with equal listings speaks for them. */
static bool is_speaker(const struct gathering *g)
{
    return g->ranks.rank[g->ranks.self].listing == g->ranks.self;
}

static int merge(struct gathering *g, struct ckpt_err *err)
{
    const bool sends = is_speaker(g);
    ckpt_cleanup(ckpt_freep) unsigned char *answer = NULL;
    size_t len = 0;

    if (run_round(g, 0, sends ? g->listing.ptr : NULL, sends ? g->listing.len : 0, reduce_listings,
                  &answer, &len, err) < 0)
        return -1;
    return ckpt_roster_decode(answer, len, g->ranks.n, &g->roster, err);
}

/* ---- a round about small files of equal size that have other times ---- */

enum { COMPARED = 1 << 20 }; /* bytes of the largest that is compared: all ranks read all of it */

static bool has_copies(const struct gathering *g, const struct ckpt_roster_entry *e)
{
    bool has = false;

    for (uint32_t k = 0; k < e->nholder; k++)
        has |= g->roster.holder.ptr[e->holder + k].is_copy != 0;
    return has;
}

/* Is it such a file? */
static bool is_compared(const struct gathering *g, const struct ckpt_roster_entry *e)
{
    return has_copies(g, e) && e->is.kind == CKPT_ENTRY_FILE && e->is.id.size <= COMPARED;
}

/* A hash of this rank's file; 0: it can't be read, which is an error for who needs it. */
static uint64_t hash_own(const struct gathering *g, const struct ckpt_roster_entry *e)
{
    ckpt_cleanup(ckpt_freep) char *text = NULL;
    size_t len = 0;

    if (!ckpt_roster_has(&g->roster, e, g->ranks.self) ||
        ckpt_dir_read_file(g->own, e->is.path, COMPARED, &text, &len, NULL) < 0)
        return 0;
    return XXH3_64bits(text, len) | 1;
}

/* The first rank that has other bytes than the first holder; CKPT_NONE: none has. */
static uint32_t find_other(const struct gathering *g, const struct ckpt_roster_entry *e, size_t at,
                           const unsigned char *const *data, const size_t *len)
{
    uint64_t first = 0, hash = 0;

    for (uint32_t k = 0; k < e->nholder; k++) {
        const uint32_t r = g->roster.holder.ptr[e->holder + k].rank;
        if (len[r] < (at + 1) * sizeof hash)
            return r;
        memcpy(&hash, data[r] + at * sizeof hash, sizeof hash);
        first = first ? first : hash;
        if (hash && hash != first)
            return r;
    }
    return CKPT_NONE;
}

static int reduce_hashes(void *ctx, const unsigned char *const *data, const size_t *len,
                         struct ckpt_str *answer, struct ckpt_err *err)
{
    const struct gathering *g = ctx;
    size_t n = 0;

    for (size_t i = 0; i < g->roster.entry.len; i++) {
        const struct ckpt_roster_entry *e = &g->roster.entry.ptr[i];
        if (!is_compared(g, e))
            continue;
        const uint32_t other = find_other(g, e, n++, data, len);
        ckpt_str_append(answer, (const char *)&other, sizeof other);
    }
    return answer->failed ? ckpt_nomem(err) : 0;
}

/* COLLECTIVE, and no round where there are no such files. The roster is the same on all ranks. */
static int compare_copies(struct gathering *g, struct ckpt_err *err)
{
    const bool sends = is_speaker(g);
    ckpt_cleanup(ckpt_str_release) struct ckpt_str own = {0};
    ckpt_cleanup(ckpt_freep) unsigned char *answer = NULL;
    size_t len = 0, n = 0;

    for (size_t i = 0; i < g->roster.entry.len; i++) {
        if (!is_compared(g, &g->roster.entry.ptr[i]))
            continue;
        const uint64_t hash = sends ? hash_own(g, &g->roster.entry.ptr[i]) : 0;
        ckpt_str_append(&own, (const char *)&hash, sizeof hash);
        n++;
    }
    if (n == 0)
        return 0;
    if (run_round(g, own.failed ? ckpt_nomem(err) : 0, own.ptr, own.len, reduce_hashes, &answer,
                  &len, err) < 0)
        return -1;
    if (len != n * sizeof(uint32_t))
        return fail_version(0, err);
    for (size_t i = 0, at = 0; i < g->roster.entry.len; i++) {
        struct ckpt_roster_entry *e = &g->roster.entry.ptr[i];
        if (!is_compared(g, e))
            continue;
        uint32_t other;
        memcpy(&other, answer + at++ * sizeof other, sizeof other);
        if (other < g->ranks.n && e->differs == CKPT_NONE)
            e->differs = other;
    }
    return 0;
}

/* Rank 0 tells the user what was found. */
static void say_found(const struct gathering *g, bool same, const struct ckpt_log *log)
{
    size_t file = 0, copy = 0;
    const char *first = "";

    if (g->ranks.self)
        return;
    for (size_t i = 0; i < g->roster.entry.len; i++) {
        const struct ckpt_roster_entry *e = &g->roster.entry.ptr[i];
        file += e->is.kind == CKPT_ENTRY_FILE;
        if (has_copies(g, e) && copy++ == 0)
            first = e->is.path;
    }
    if (same)
        ckpt_logf(log, CKPT_LOG_INFO, "'%s': all ranks see the same files: an ordinary load",
                  g->given);
    else
        ckpt_logf(log, CKPT_LOG_INFO, "'%s': %zu files of %" PRIu32 " ranks%s%s%s", g->given, file,
                  g->ranks.n, copy ? "; several have '" : "", first,
                  copy ? "', with other times, which are taken for copies" : "");
}

/* ---- all of it ---- */

/* The rounds. After a failure that is this rank's alone the others learn of it in their next round,
 * whichever that is. */
static int gather(struct gathering *g, const struct ckpt_options *opt, struct ckpt_dir **ret_dir,
                  struct ckpt_err *err)
{
    bool same = false;
    int rc = meet(g, err);

    if (rc < 0 && g->failed)
        return -1;
    if (rc == 0)
        rc = look_around(g, opt, err);
    if (compare(g, rc, &same, err) < 0)
        return -1;
    if (!same && (merge(g, err) < 0 || compare_copies(g, err) < 0))
        return -1;
    say_found(g, same, &opt->log);
    return same ? 0
                : ckpt_dir_open_local(g->path, g->real, g->own, &g->roster, &g->ranks, &g->service,
                                      g->timeout_ms, ret_dir, err);
}

int ckpt_local_open(struct ckpt_comm *comm, const char *path, const struct ckpt_options *opt,
                    uint32_t timeout_ms, char **ret_path, struct ckpt_dir **ret_dir,
                    struct ckpt_err *err)
{
    ckpt_cleanup(gathering_release) struct gathering g = {
        .comm = comm, .timeout_ms = timeout_ms, .given = path};

    g.ranks.self = ckpt_comm_rank(comm);
    g.ranks.n = ckpt_comm_size(comm);
    const int rc = gather(&g, opt, ret_dir, err);
    if ((rc < 0 && g.failed) || ckpt_comm_agree(comm, rc, timeout_ms, err) < 0)
        return -1;
    *ret_path = ckpt_steal(&g.path);
    return 0;
}

/* ---- a file that no rank has ---- */

/* Does a word like "mp_rank_01" or "tp-rank-0-of-2" begin here? Its length, or 0. */
static size_t rank_word(const char *text)
{
    const size_t n = strspn(text, "abcdefghijklmnopqrstuvwxyz0123456789_-");

    for (size_t i = 0; i + 5 < n; i++)
        if (ckpt_has_prefix(text + i, "rank") && (text[i + 4] == '_' || text[i + 4] == '-') &&
            isdigit((unsigned char)text[i + 5]))
            return n;
    return 0;
}

/* Does a number of a rank begin here, as in torch's "__3_0.distcp"? Its digits, or 0. */
static size_t rank_digits(const char *text)
{
    const bool begins = ckpt_has_prefix(text, "__");
    const size_t n = begins ? strspn(text + 2, "0123456789") : 0;

    return n && text[2 + n] == '_' ? n : 0;
}

/* Append what the name of a file in the text says about the rank of the training that wrote it. */
static void add_writer(struct ckpt_str *out, const char *text)
{
    for (; *text; text++) {
        const size_t word = rank_word(text), digits = rank_digits(text);
        if (digits)
            ckpt_str_printf(out, "; by its name, rank %.*s of the training wrote it", (int)digits,
                            text + 2);
        else if (word)
            ckpt_str_printf(out, "; '%.*s' says which rank of the training wrote it", (int)word,
                            text);
        if (digits || word)
            return;
    }
}

void ckpt_local_explain(uint32_t n, const char *what, struct ckpt_err *err)
{
    const struct ckpt_err was = *err;
    const char *slash = strrchr(was.text, '/');
    ckpt_cleanup(ckpt_str_release) struct ckpt_str writer = {0};

    if (was.code != CKPT_MISSING)
        return;
    add_writer(&writer, slash ? slash : was.text);
    *err = (struct ckpt_err){0};
    (void)ckpt_fail(err, was.code, "%s (looked for at all %" PRIu32 " %s of this job%s)", was.text,
                    n, what, ckpt_str_get(&writer));
}
