/* SPDX-License-Identifier: Apache-2.0 */
/* The first round of the agreement: each rank sends facts about itself, rank 0 compares and
 * combines them. */
#include "load/engine/job.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/map.h"
#include "base/mem.h"
#include "base/str.h"
#include "comm/comm.h"
#include "comm/shm.h"
#include "device/device.h"
#include "load/engine/same.h"
#include "load/load_inner.h"
#include "tensor/residency.h"

enum {
    HELLO_FILES = 1024, /* files whose sizes are sent, to name one that differs */
    STEP_TEXT = 128,    /* bytes of the step's name that are sent, for messages */
    VERSION = 16,       /* of the messages between ranks */
};

/* ---- the messages ---- */

/* Each rank sends this message; the sizes of its first HELLO_FILES files follow, each a
 * uint64_t. */
struct hello {
    unsigned char checkpoint[16]; /* ckpt_catalog_digest */
    char step[STEP_TEXT];         /* the step's name, or its beginning */
    uint64_t step_hash;
    uint64_t wants[2], form[2]; /* hash of this rank's table of wants, and of its form alone */
    uint64_t node;              /* ckpt_node_digest */
    uint64_t options;           /* hash of the options that must be equal */
    uint64_t files;             /* ckpt_catalog_files */
    double resident, bytes;     /* struct ckpt_residency, as is shared */
    uint32_t shared, version;
    uint32_t no_same_host; /* it cannot map the memory of all ranks of its node */
    uint32_t alone;        /* it has no communicators of an earlier load */
    uint32_t renewed;      /* how often the transport has been renewed after failed loads */
    uint64_t share;        /* options.share; CKPT_SHARE_NONE: a number that no other rank has */
    uint64_t wants_hash;   /* ckpt_load.wants_hash, for a reload; else 0 */
    uint64_t skip;         /* hash of the tensors that this rank would not send; 0: all are sent */
};

/* Fail with the name of the first file whose size differs between this rank and rank r, whose file
 * sizes are data[0..len). False: no such file. */
static bool fail_file(const struct ckpt_load *load, uint32_t r, const unsigned char *data,
                      size_t len, struct ckpt_err *err)
{
    const struct ckpt_catalog *cat = load->view->cat;

    for (size_t i = 0; i < cat->sources.len && (i + 1) * sizeof(uint64_t) <= len; i++) {
        uint64_t size;
        memcpy(&size, data + i * sizeof size, sizeof size);
        if (size == cat->sources.ptr[i]->size)
            continue;
        ckpt_cleanup(ckpt_freep) char *name = ckpt_source_name(cat->sources.ptr[i]);
        (void)ckpt_fail(err, CKPT_CONFLICT,
                        "rank %" PRIu32 " sees another checkpoint than rank 0: '%s' has %" PRIu64
                        " bytes on rank 0 and %" PRIu64 " bytes on rank %" PRIu32,
                        r, name ? name : "a file", cat->sources.ptr[i]->size, size, r);
        return true;
    }
    return false;
}

/* CONFLICT if rank r (b) does not match rank 0 (a). */
static int compare_hello(uint32_t r, const struct hello *a, const struct hello *b,
                         struct ckpt_err *err)
{
    if (a->version != b->version)
        return ckpt_fail(err, CKPT_CONFLICT, "rank %" PRIu32 " runs another version of ckptfs", r);
    if (a->step_hash != b->step_hash)
        return ckpt_fail(err, CKPT_CONFLICT,
                         "rank %" PRIu32 " loads '%.*s', rank 0 '%.*s': all ranks must load the "
                         "same step, and copies of it must have the same name",
                         r, STEP_TEXT - 1, b->step, STEP_TEXT - 1, a->step);
    if (memcmp(a->checkpoint, b->checkpoint, sizeof a->checkpoint) != 0)
        return ckpt_fail(err, CKPT_CONFLICT,
                         "rank %" PRIu32 " sees another checkpoint than rank 0, or another view "
                         "of it: other tensors, shapes, dtypes, files or computed values",
                         r);
    if (a->wants_hash != b->wants_hash)
        return ckpt_fail(err, CKPT_CONFLICT,
                         "rank %" PRIu32 " does not plan or reload the same load as rank 0", r);
    if (a->options != b->options)
        return ckpt_fail(err, CKPT_CONFLICT, "rank %" PRIu32 " was given other options than rank 0",
                         r);
    if (a->renewed != b->renewed)
        return ckpt_fail(err, CKPT_CONFLICT,
                         "the last load failed on rank 0 or on rank %" PRIu32
                         ", but not on both: make a new comm",
                         r);
    return 0;
}

/* Numbers of ranks by a key: ranks with equal keys have the same number. */
struct numbering {
    uint64_t (*key)[2]; /* per rank */
    uint32_t *of;       /* per rank: its number */
    uint32_t *first;    /* per number: its first rank */
    uint32_t n;         /* how many numbers there are */
};

static bool numbering_init(struct numbering *v, uint32_t nrank)
{
    v->key = calloc(nrank, sizeof *v->key);
    v->of = malloc(nrank * sizeof *v->of);
    v->first = malloc(nrank * sizeof *v->first);
    return v->key && v->of && v->first;
}

static void numbering_release(struct numbering *v)
{
    free(v->key);
    free(v->of);
    free(v->first);
}

static bool number_ranks(struct numbering *v, uint32_t nrank)
{
    return ckpt_map_number((const uint64_t(*)[2])v->key, nrank, v->of, v->first, &v->n) == 0;
}

/* Rank 0 collects this from the messages of all ranks. */
struct hellos {
    uint32_t nrank;
    struct hello first;               /* of rank 0 */
    struct numbering class, form;     /* by tables of wants, and by their forms alone */
    struct numbering node, share;     /* by machines, and by options.share */
    struct ckpt_residency *residency; /* per rank */
    struct ckpt_job_facts is;
};

static bool hellos_init(struct hellos *all, uint32_t nrank)
{
    all->nrank = nrank;
    all->residency = calloc(nrank, sizeof *all->residency);
    return numbering_init(&all->class, nrank) && numbering_init(&all->form, nrank) &&
           numbering_init(&all->node, nrank) && numbering_init(&all->share, nrank) &&
           all->residency;
}

static void hellos_release(struct hellos *all)
{
    numbering_release(&all->class);
    numbering_release(&all->form);
    numbering_release(&all->node);
    numbering_release(&all->share);
    free(all->residency);
}

/* Compare the message of rank r with that of rank 0, which comes first, and take its facts. */
static int take_hello(struct hellos *all, const struct ckpt_load *load, uint32_t r,
                      const unsigned char *data, size_t len, struct ckpt_err *err)
{
    struct hello h;

    if (len < sizeof h)
        return ckpt_fail(err, CKPT_CONFLICT, "rank %" PRIu32 " runs another version of ckptfs", r);
    memcpy(&h, data, sizeof h);
    if (r == 0)
        all->first = h;
    if (memcmp(h.checkpoint, all->first.checkpoint, sizeof h.checkpoint) != 0 &&
        fail_file(load, r, data + sizeof h, len - sizeof h, err))
        return -1;
    if (compare_hello(r, &all->first, &h, err) < 0)
        return -1;
    memcpy(all->class.key[r], h.wants, sizeof h.wants);
    memcpy(all->form.key[r], h.form, sizeof h.form);
    all->node.key[r][0] = h.node;
    all->share.key[r][0] = h.share;
    all->residency[r] = (struct ckpt_residency){h.resident, h.bytes, h.shared != 0};
    all->is.shared |= h.shared;
    all->is.copies |= h.files != all->first.files;
    all->is.no_same_host |= h.no_same_host;
    all->is.alone |= h.alone;
    all->is.send_all |= h.skip != all->first.skip;
    return 0;
}

static void put_numbers(struct ckpt_str *out, const uint32_t *number, size_t n)
{
    ckpt_str_append(out, (const char *)number, n * sizeof *number);
}

/* Append rank 0's answer, which becomes struct ckpt_job: the facts; for each rank its class, its
 * node and its group of options.share; for each class its first rank; and for each class the class
 * of the first rank whose table has the same form. */
static int put_answer(struct hellos *all, struct ckpt_str *out, struct ckpt_err *err)
{
    const uint32_t n = all->nrank;

    if (!number_ranks(&all->class, n) || !number_ranks(&all->form, n) ||
        !number_ranks(&all->node, n) || !number_ranks(&all->share, n) ||
        ckpt_residency_least(all->residency, n, all->node.of, all->node.n, &all->is.cached) < 0)
        return ckpt_nomem(err);
    all->is.nclass = all->class.n;
    all->is.nnode = all->node.n;
    all->is.nshare = all->share.n;
    ckpt_str_append(out, (const char *)&all->is, sizeof all->is);
    put_numbers(out, all->class.of, n);
    put_numbers(out, all->node.of, n);
    put_numbers(out, all->share.of, n);
    put_numbers(out, all->class.first, all->class.n);
    for (uint32_t c = 0; c < all->class.n; c++)
        put_numbers(out, &all->class.of[all->form.first[all->form.of[all->class.first[c]]]], 1);
    return out->failed ? ckpt_nomem(err) : 0;
}

static int reduce_hello(void *ctx, const unsigned char *const *data, const size_t *len,
                        struct ckpt_str *answer, struct ckpt_err *err)
{
    const struct ckpt_load *load = ctx;
    ckpt_cleanup(hellos_release) struct hellos all = {0};

    if (!hellos_init(&all, load->comm->x->size))
        return ckpt_nomem(err);
    for (uint32_t r = 0; r < all.nrank; r++)
        if (take_hello(&all, load, r, data[r], len[r], err) < 0)
            return -1;
    return put_answer(&all, answer, err);
}

/* Write this rank's message. */
static int write_hello(const struct ckpt_load *load, const struct ckpt_table *table,
                       struct ckpt_str *out, struct ckpt_err *err)
{
    const struct ckpt_catalog *cat = load->view->cat;
    const struct ckpt_xport *x = load->comm->x;
    const XXH128_hash_t wants = XXH3_128bits(table->data, table->len);
    const XXH128_hash_t form = XXH3_128bits(table->data, table->form);
    const struct ckpt_load_options *opt = &load->opt;
    const uint64_t number[] = {opt->readers,      opt->host_bytes, opt->device_bytes,
                               opt->window_bytes, opt->verify,     opt->direct};
    struct ckpt_residency residency;
    struct hello h;

    memset(&h, 0, sizeof h);
    if (ckpt_catalog_digest(cat, h.checkpoint, err) < 0)
        return -1;
    (void)snprintf(h.step, sizeof h.step, "%s", load->view->name);
    h.step_hash = XXH3_64bits(load->view->name, strlen(load->view->name));
    memcpy(h.wants, &wants, sizeof wants);
    memcpy(h.form, &form, sizeof form);
    h.node = ckpt_node_digest();
    h.options =
        XXH3_64bits_withSeed(&opt->rates, sizeof opt->rates, XXH3_64bits(number, sizeof number));
    h.files = ckpt_catalog_files(cat);
    ckpt_residency_estimate(cat, x->rank, x->size, &residency);
    h.resident = residency.resident;
    h.bytes = residency.bytes;
    h.shared = residency.shared;
    h.no_same_host = !x->same_host;
    h.alone = !x->device || !x->device->connected;
    h.renewed = load->comm->renewed;
    h.share = opt->share == CKPT_SHARE_NONE ? (uint64_t)CKPT_SHARE_NONE + x->rank : opt->share;
    h.wants_hash = load->wants_hash;
    if (load->inputs.job_wants && load->inputs.job_wants->skip)
        h.skip = XXH3_64bits(load->inputs.job_wants->skip, cat->tensors.len) | 1;
    h.version = VERSION;
    ckpt_str_append(out, (const char *)&h, sizeof h);
    for (size_t i = 0; i < cat->sources.len && i < HELLO_FILES; i++)
        ckpt_str_append(out, (const char *)&cat->sources.ptr[i]->size, sizeof(uint64_t));
    return out->failed ? ckpt_nomem(err) : 0;
}

/* ---- the round ---- */

/* True if all numbers of rank 0's answer are in range. `word` is what follows the struct. */
static bool answer_ok(const struct ckpt_job_facts *a, const uint32_t *word, uint32_t n)
{
    if (a->nclass < 1 || a->nclass > n || a->nnode < 1 || a->nnode > n || a->nshare < 1 ||
        a->nshare > n)
        return false;
    for (uint32_t r = 0; r < n; r++)
        if (word[r] >= a->nclass || word[n + r] >= a->nnode || word[2 * (size_t)n + r] >= a->nshare)
            return false;
    const uint32_t *first_of = word + 3 * (size_t)n, *owner_of = first_of + a->nclass;
    for (uint32_t c = 0; c < a->nclass; c++)
        if (first_of[c] >= n || owner_of[c] > c || owner_of[owner_of[c]] != owner_of[c])
            return false;
    return true;
}

/* Takes the answer. */
static int read_answer(unsigned char *answer, size_t len, uint32_t n, struct ckpt_job *ret,
                       struct ckpt_err *err)
{
    const uint32_t *word = (const uint32_t *)(const void *)(answer + sizeof ret->is);

    ret->answer = answer;
    if (len >= sizeof ret->is)
        memcpy(&ret->is, answer, sizeof ret->is);
    if (len < sizeof ret->is ||
        len != sizeof ret->is + (3 * (size_t)n + 2 * (size_t)ret->is.nclass) * sizeof *word ||
        !answer_ok(&ret->is, word, n))
        return ckpt_fail(err, CKPT_FORMAT,
                         "rank 0 sent a damaged message about the ranks of the job");
    ret->class_of = word;
    ret->node = word + n;
    ret->share = word + 2 * (size_t)n;
    ret->first_of = word + 3 * (size_t)n;
    ret->owner_of = ret->first_of + ret->is.nclass;
    ret->hash = XXH3_64bits(answer, len);
    return 0;
}

int ckpt_job_agree(struct ckpt_load *load, int rc, const struct ckpt_table *table,
                   struct ckpt_job *ret, struct ckpt_err *err)
{
    struct ckpt_round round = {.comm = load->comm,
                               .timeout_ms = load->opt.exchange_timeout_ms,
                               .reduce = reduce_hello,
                               .ctx = load};
    unsigned char *answer = NULL;
    struct ckpt_err own = rc < 0 ? *err : (struct ckpt_err){0};
    ckpt_cleanup(ckpt_str_release) struct ckpt_str message = {0};
    size_t len = 0;

    *ret = (struct ckpt_job){0};
    if (rc == 0)
        rc = write_hello(load, table, &message, &own);
    round.own = message.ptr;
    round.own_len = message.len;
    rc = ckpt_round_run(&round, rc, &answer, &len, &own);
    if (rc < 0) {
        *err = (struct ckpt_err){0};
        return ckpt_err_move(err, &own);
    }
    rc = read_answer(answer, len, load->comm->x->size, ret, err);
    if (rc < 0) /* the other ranks learn it in their next round, whichever that is */
        (void)ckpt_comm_agree(load->comm, rc, load->opt.exchange_timeout_ms, err);
    return rc;
}
