/* SPDX-License-Identifier: Apache-2.0 */
/* Loads with ranks that are threads of this process, every byte compared with a read of the view.
 *
 *     load_ranks [-o OPTION]... [-f FAULT] [-x COMMAND] RUN [RUN of rank 1 ...] --
 * LAYOUT:RANKS:READERS[:BYTES]...
 *
 * The shell's COMMAND is run when the first RUN has been opened, and the others have not.
 *
 * LAYOUT may be "random": boxes, parts of meshes, casts and strides by chance. BYTES is host_bytes.
 * A job prints one line; the exit status is 1 if any failed. */
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <ckptfs/load.h>

#include "faults.h"
#include "model/view.h"
#include "random.h"
#include "random_wants.h"
#include "tensor/dtype.h"
#include "tensor/read.h"
#include "tensor/slab.h"
#include "tensor/value.h"

enum { MOST_RANKS = 1024, MOST_RUNS = 64 };

struct job {
    const char *layout;
    uint32_t ranks;
    struct ckpt_load_options opt;
    const char *const *run;
    size_t nrun;
    bool both; /* one run, and the views of open_both */
    const struct ckpt_options *options;
    struct ckpt_view *view[MOST_RUNS];
    uint64_t seed;
};

struct rank {
    const struct job *job;
    struct ckpt_comm *comm;
    struct ckpt_view *view;
    uint32_t number;
    int rc;
    struct ckpt_err err;
    struct ckpt_load_stats all;
    const char *readers;
};

static void die(const char *what, const struct ckpt_err *err)
{
    (void)fprintf(stderr, "load_ranks: %s: %s\n", what, err->text);
    exit(2);
}

/* ---- what is wanted ---- */

struct want {
    unsigned char *mem;
    size_t len;
    uint64_t stride[CKPT_LOAD_RANK]; /* elements */
    enum ckpt_dtype dtype;
};

/* Memory for each want; in random jobs some with holes between the rows. */
static int give_memory(struct rank *r, struct ckpt_load *load, struct want *want)
{
    uint64_t rng = r->job->seed + r->number * 7919 + 1;
    const bool holes = strcmp(r->job->layout, "random") == 0;

    for (size_t i = 0; i < ckpt_load_wants(load); i++) {
        struct ckpt_want_info info = {.size = sizeof info};
        struct want *w = &want[i];
        uint64_t step = 1;
        (void)ckpt_load_want_info(load, i, &info, NULL);
        (void)ckpt_dtype_parse(info.dtype, strlen(info.dtype), &w->dtype);
        for (uint32_t d = info.rank; d-- > 0;) {
            w->stride[d] = step;
            step = step * (info.n[d] ? info.n[d] : 1) + (holes ? random_range(&rng, 0, 3) : 0);
        }
        if (info.nbytes == 0)
            step = 1;
        w->len = step * ckpt_dtype_size(w->dtype) + 64;
        w->mem = malloc(w->len);
        memset(w->mem, 0xa5, w->len);
        const struct ckpt_dest dest = {
            .size = sizeof dest, .ptr = w->mem, .stride = w->stride, .dtype = info.dtype};
        if (ckpt_load_set_dest(load, i, &dest, &r->err) < 0)
            return -1;
    }
    return 0;
}

/* With LOAD_WANTS, for scripts: "want RANK NAME lo+n,lo+n". */
static void print_wants(const struct rank *r, struct ckpt_load *load)
{
    for (size_t i = 0; getenv("LOAD_WANTS") && i < ckpt_load_wants(load); i++) {
        struct ckpt_want_info info = {.size = sizeof info};
        char box[CKPT_LOAD_RANK * 48] = "";
        size_t len = 0;
        (void)ckpt_load_want_info(load, i, &info, NULL);
        for (uint32_t d = 0; d < info.rank; d++)
            len += (size_t)snprintf(box + len, sizeof box - len, "%s%" PRIu64 "+%" PRIu64,
                                    d ? "," : "", info.lo[d], info.n[d]);
        (void)printf("want %u %s %s\n", r->number, info.tensor, box);
    }
}

/* ---- comparing ---- */

/* Elements [lo, n) of dimension d.. of a want, with `whole` as the tensor's bytes. */
static bool same(const struct ckpt_want_info *info, const struct want *w, uint32_t d, size_t dst,
                 size_t src, const unsigned char *whole, const uint64_t *unit, enum ckpt_dtype from)
{
    if (d == info->rank) {
        unsigned char expect[16];
        const size_t size = ckpt_dtype_size(w->dtype);
        if (w->dtype == from)
            memcpy(expect, whole + src * size, size);
        else
            ckpt_dtype_cast(expect, w->dtype, whole + src * ckpt_dtype_size(from), from, 1);
        return memcmp(expect, w->mem + dst * size, size) == 0;
    }
    for (uint64_t i = 0; i < info->n[d]; i++)
        if (!same(info, w, d + 1, dst + i * w->stride[d], src + (info->lo[d] + i) * unit[d], whole,
                  unit, from))
            return false;
    return true;
}

/* A tensor as it is loaded: without dtype= not rounded to the view's dtype before it is to the
 * destination's. The caller frees *ret. */
static int read_unrounded(const struct ckpt_view *view, size_t index, unsigned char **ret,
                          enum ckpt_dtype *ret_dtype, struct ckpt_err *err)
{
    struct ckpt_reading rd = view->reading;
    struct ckpt_catalog *cat;
    int rc;

    if (ckpt_catalog_alias(view->cat, &cat, err) < 0)
        return -1;
    const struct ckpt_tensor *t = &cat->tensors.ptr[index];
    *ret_dtype = view->shared->opt->dtype_rule == CKPT_DTYPE_AUTO ? ckpt_value_unrounded(t)
                                                                  : (enum ckpt_dtype)t->dtype;
    if (ckpt_dtype_is_castable(t->dtype) && ckpt_dtype_is_castable(*ret_dtype))
        rc = ckpt_value_cast(cat, index, *ret_dtype, err);
    else
        rc = 0, *ret_dtype = t->dtype;
    *ret = malloc(ckpt_tensor_nbytes(t) + 1);
    if (rc == 0)
        rc = ckpt_elements_pread(t, &rd, *ret, 0, t->numel, err);
    ckpt_slabs_forget(rd.slabs, &rd);
    ckpt_catalog_free(cat);
    return rc;
}

static int check(struct rank *r, struct ckpt_load *load, const struct want *want)
{
    for (size_t i = 0; i < ckpt_load_wants(load); i++) {
        struct ckpt_want_info info = {.size = sizeof info};
        struct ckpt_tensor_info t = {.size = sizeof t};
        uint64_t unit[CKPT_LOAD_RANK], step = 1;
        enum ckpt_dtype from;
        size_t index;
        (void)ckpt_load_want_info(load, i, &info, NULL);
        struct ckpt_view *view = r->job->view[0]; /* whose files are well */
        if (!ckpt_view_find_tensor(view, info.tensor, &index))
            return -1;
        (void)ckpt_view_tensor(view, index, &t, NULL);
        unsigned char *whole;
        if (read_unrounded(view, index, &whole, &from, &r->err) < 0)
            return -1;
        for (uint32_t d = t.rank; d-- > 0;) {
            unit[d] = step;
            step *= t.shape[d];
        }
        bool good = info.nbytes == 0 || same(&info, &want[i], 0, 0, 0, whole, unit, from);
        free(whole);
        if (!good) {
            r->err.code = CKPT_CONFLICT;
            (void)snprintf(r->err.text, sizeof r->err.text, "want %zu of '%s' has wrong bytes", i,
                           info.tensor);
            return -1;
        }
    }
    return 0;
}

/* Every want lands once. */
static int take_all(struct rank *r, struct ckpt_load *load)
{
    const size_t n = ckpt_load_wants(load);
    bool *seen = calloc(n + 1, 1);
    size_t want, count = 0;
    int rc;

    while ((rc = ckpt_load_next(load, UINT32_MAX, &want, &r->err)) == 0) {
        if (want >= n || seen[want]) {
            r->err.code = CKPT_CONFLICT;
            (void)snprintf(r->err.text, sizeof r->err.text, "want %zu landed twice", want);
            free(seen);
            return -1;
        }
        seen[want] = true;
        count++;
    }
    free(seen);
    if (rc == 2 && count == n)
        return 0;
    if (r->err.code == CKPT_OK) {
        r->err.code = CKPT_CONFLICT;
        (void)snprintf(r->err.text, sizeof r->err.text, "%zu of %zu wants landed", count, n);
    }
    return -1;
}

static int load_rank(struct rank *r, struct ckpt_load *load)
{
    const bool random = strcmp(r->job->layout, "random") == 0;
    int rc = random ? random_wants(load, r->view, r->job->ranks, r->number, r->job->seed, &r->err)
                    : ckpt_load_want_layout(load, r->job->layout, &r->err);

    if (rc < 0)
        return -1;
    print_wants(r, load);
    struct want *want = calloc(ckpt_load_wants(load) + 1, sizeof *want);
    rc = give_memory(r, load, want);
    if (rc == 0)
        rc = ckpt_load_plan(load, &r->err);
    if (rc == 0)
        rc = ckpt_load_start(load, &r->err);
    if (rc == 0 && random)
        rc = take_all(r, load);
    if (rc == 0)
        rc = ckpt_load_wait(load, UINT32_MAX, &r->err);
    if (rc == 0)
        rc = check(r, load, want);
    r->all.size = sizeof r->all;
    (void)ckpt_load_stats(load, NULL, &r->all, NULL);
    r->readers = ckpt_load_readers(load);
    for (size_t i = 0; i < ckpt_load_wants(load); i++)
        free(want[i].mem);
    free(want);
    return rc;
}

static void *run_rank(void *arg)
{
    struct rank *r = arg;
    struct ckpt_load *load = NULL;
    struct ckpt_load_options opt = r->job->opt;
    const char *share = getenv("LOAD_SHARE"); /* so many ranks share; 0: none */

    if (share)
        opt.share = atoi(share) ? r->number / (uint32_t)atoi(share) : CKPT_SHARE_NONE;
    r->rc = ckpt_load_new(r->view, r->comm, &opt, &load, &r->err);
    if (r->rc == 0)
        r->rc = load_rank(r, load);
    ckpt_load_free(load);
    ckpt_comm_free(r->comm);
    return NULL;
}

/* ---- jobs ---- */

static int run_job(struct job *j)
{
    struct rank rank[MOST_RANKS];
    struct ckpt_comm *comm[MOST_RANKS];
    pthread_t thread[MOST_RANKS];
    struct ckpt_err err = {0};
    struct timespec a, b;
    int failed = 0;

    if (ckpt_comm_threads(j->ranks, comm, &err) < 0)
        die("threads", &err);
    (void)clock_gettime(CLOCK_MONOTONIC, &a);
    for (uint32_t r = 0; r < j->ranks; r++) {
        rank[r] = (struct rank){.job = j,
                                .comm = comm[r],
                                .number = r,
                                .view = j->view[j->both       ? r % 2
                                                : r < j->nrun ? r
                                                              : 0]};
        if (pthread_create(&thread[r], NULL, run_rank, &rank[r]) != 0)
            die("thread", &err);
    }
    for (uint32_t r = 0; r < j->ranks; r++)
        (void)pthread_join(thread[r], NULL);
    (void)clock_gettime(CLOCK_MONOTONIC, &b);
    for (uint32_t r = 0; r < j->ranks; r++) {
        failed |= rank[r].rc < 0;
        if (rank[r].rc < 0)
            (void)printf("%s:%u rank %u: %s: %s\n", j->layout, j->ranks, r,
                         ckpt_code_name(rank[r].err.code), rank[r].err.text);
    }
    const struct ckpt_load_stats *s = &rank[0].all;
    if (!failed)
        (void)printf("%s:%u %s needed %" PRIu64 " unique %" PRIu64 " read %" PRIu64 " sent %" PRIu64
                     " reads %" PRIu64 " buffers %" PRIu64 "\n",
                     j->layout, j->ranks, rank[0].readers, s->needed_bytes, s->unique_bytes,
                     s->read_bytes, s->sent_bytes, s->reads, s->buffer_bytes);
    else
        (void)printf("%s:%u failed after %.3f s\n", j->layout, j->ranks,
                     (double)(b.tv_sec - a.tv_sec) + (double)(b.tv_nsec - a.tv_nsec) / 1e9);
    (void)fflush(stdout);
    return failed;
}

static void parse_job(char *text, struct job *j)
{
    static const char *const name[] = {"auto", "once", "node", "each"};
    char *ranks = strchr(text, ':'), *readers = ranks ? strchr(ranks + 1, ':') : NULL;
    struct ckpt_err err = {.text = "expected LAYOUT:RANKS:READERS[:BYTES]"};

    if (!readers)
        die(text, &err);
    *ranks = *readers = '\0';
    char *bytes = strchr(readers + 1, ':');
    if (bytes)
        *bytes = '\0';
    j->layout = text;
    j->ranks = (uint32_t)strtoul(ranks + 1, NULL, 10);
    j->opt = (struct ckpt_load_options){.size = sizeof j->opt};
    j->opt.host_bytes = bytes ? strtoull(bytes + 1, NULL, 10) : 0;
    j->opt.read_timeout_ms = faults_timeout();
    j->opt.exchange_timeout_ms = faults_timeout() * 2;
    j->opt.verify = getenv("LOAD_VERIFY") != NULL;
    j->opt.threads = getenv("LOAD_THREADS") ? (uint32_t)atoi(getenv("LOAD_THREADS")) : 0;
    j->opt.direct = getenv("LOAD_DIRECT") ? CKPT_LOAD_DIRECT_ALWAYS : CKPT_LOAD_DIRECT_AUTO;
    for (int i = 0; i < 4; i++)
        if (strcmp(readers + 1, name[i]) == 0)
            j->opt.readers = (enum ckpt_readers)i;
    if (j->ranks < 1 || j->ranks > MOST_RANKS)
        die(text, &err);
}

static struct ckpt_view *open_view(const char *path, const struct ckpt_options *options)
{
    struct ckpt_run *run;
    struct ckpt_view *view;
    struct ckpt_err err = {0};

    if (ckpt_run_open(path, options, &run, &err) < 0 || ckpt_run_view(run, NULL, &view, &err) < 0)
        die(path, &err);
    ckpt_run_close(run);
    return view;
}

/* One of two ranks that open a run together. */
struct opener {
    struct ckpt_comm *comm;
    const char *path;
    const struct ckpt_options *options;
    struct ckpt_view *view;
    struct ckpt_err err;
};

static void *open_one(void *arg)
{
    struct opener *o = arg;

    if (ckpt_load_open(o->comm, o->path, o->options, NULL, 0, NULL, NULL, &o->view, &o->err) < 0)
        die(o->path, &o->err);
    return NULL;
}

/* The views of a rank that has opened the files, and of one that has replayed that. */
static void open_both(const char *path, const struct ckpt_options *options, struct ckpt_view **ret)
{
    struct ckpt_comm *comm[2];
    struct opener o[2];
    pthread_t thread[2];
    struct ckpt_err err = {0};

    if (ckpt_comm_threads(2, comm, &err) < 0)
        die(path, &err);
    for (int i = 0; i < 2; i++) {
        o[i] = (struct opener){.comm = comm[i], .path = path, .options = options};
        (void)pthread_create(&thread[i], NULL, open_one, &o[i]);
    }
    for (int i = 0; i < 2; i++) {
        (void)pthread_join(thread[i], NULL);
        ret[i] = o[i].view;
    }
    ckpt_comm_free(comm[0]);
    ckpt_comm_free(comm[1]);
}

int main(int argc, char **argv)
{
    struct ckpt_options *options;
    struct ckpt_err err = {0};
    struct job job = {.seed = 1};
    const char *command = NULL;
    int opt, failed = 0;

    if (getenv("CKPTFS_SEED"))
        job.seed = strtoull(getenv("CKPTFS_SEED"), NULL, 10);
    if (ckpt_options_new(&options, &err) < 0)
        die("options", &err);
    while ((opt = getopt(argc, argv, "+o:f:x:")) != -1) {
        char *value = opt == 'o' ? strchr(optarg, '=') : NULL;
        if (value)
            *value++ = '\0';
        if (opt == 'o' && ckpt_options_set(options, optarg, value, &err) < 0)
            die(optarg, &err);
        if (opt == 'f')
            faults_set(optarg);
        if (opt == 'x')
            command = optarg;
        if (opt == '?')
            return 2;
    }
    if (optind + 1 < argc && strcmp(argv[optind + 1], "--") == 0) {
        open_both(argv[optind++], options, job.view);
        job.nrun = 2;
        job.both = true;
    }
    for (; optind < argc && strcmp(argv[optind], "--") != 0 && job.nrun < MOST_RUNS; optind++) {
        job.view[job.nrun++] = open_view(argv[optind], options);
        if (job.nrun == 1 && command && system(command) != 0)
            die(command, &err);
    }
    faults_arm();
    for (int i = optind + 1; i < argc; i++) {
        parse_job(argv[i], &job);
        failed |= run_job(&job);
        job.seed++;
    }
    for (size_t i = 0; i < job.nrun; i++)
        ckpt_view_release(job.view[i]);
    ckpt_options_free(options);
    return failed;
}
