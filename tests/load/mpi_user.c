/* SPDX-License-Identifier: Apache-2.0 */
/* A program with an MPI of its own, as a user would write it: mpi_user RUN LEVEL [LAYOUT]
 *
 * With a LAYOUT, or "random", all ranks load together, without and with verify, and rank 0 prints
 * how many all-gathers of how many ranks it has started.
 *
 * LEVEL is single, funneled or serialized, which are refused, or multiple. The odd and the even
 * ranks load separately: first loads that fail on one rank, which all ranks of that half must hear
 * of; then a load on the same communicator, twice, which they pause. */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <ckptfs/load_mpi.h>

#include "random_wants.h"

enum { MOST_RANKS = 64, SEEDS = 6 };

static int gathers[MOST_RANKS + 1]; /* by the number of ranks */

/* In place of MPI's, whose other name it calls. */
int MPI_Iallgatherv(const void *send, int nsend, MPI_Datatype send_type, void *receive,
                    const int *nreceive, const int *place, MPI_Datatype receive_type, MPI_Comm comm,
                    MPI_Request *request)
{
    int size;

    (void)MPI_Comm_size(comm, &size);
    gathers[size]++;
    return PMPI_Iallgatherv(send, nsend, send_type, receive, nreceive, place, receive_type, comm,
                            request);
}

static int die(const struct ckpt_err *err)
{
    (void)fprintf(stderr, "mpi_user: %s\n", err->text);
    (void)MPI_Abort(MPI_COMM_WORLD, 1);
    return 1;
}

static int check(struct ckpt_view *view, const struct ckpt_want_info *w, const unsigned char *got,
                 struct ckpt_err *err)
{
    unsigned char *want = malloc(w->nbytes + 1);
    size_t i;
    int differ = 1;

    if (ckpt_view_find_tensor(view, w->tensor, &i) &&
        ckpt_view_box_pread(view, i, w->lo, w->n, want, err) == 0)
        differ = memcmp(want, got, w->nbytes) != 0;
    free(want);
    return differ;
}

struct job {
    const char *run, *layout;
    int level, rank;
};

/* Load, with a collective of our own in the middle; and the same once more. */
static int load_twice(struct ckpt_load *load, MPI_Comm half, struct ckpt_err *err)
{
    for (int run = 0; run < 2; run++) {
        int one = 1, all = 0, size, rc;
        if ((run && ckpt_load_reload(load, NULL, false, err) < 0) ||
            ckpt_load_start(load, err) < 0 || ckpt_load_pause(load, UINT32_MAX, err) < 0)
            return -1;
        (void)MPI_Allreduce(&one, &all, 1, MPI_INT, MPI_SUM, half);
        (void)MPI_Comm_size(half, &size);
        if (all != size || ckpt_load_resume(load, err) < 0)
            return -1;
        while ((rc = ckpt_load_wait(load, 5, err)) == 1)
            ; /* a trainer would do something else here */
        if (rc < 0)
            return -1;
    }
    return 0;
}

/* A planned load of this layout; mem[i] is the destination of want i. A negative seed: every rank
 * reads for itself; an odd one: with verify. */
static int prepare(struct ckpt_view *view, struct ckpt_comm *comm, const char *layout, int seed,
                   struct ckpt_load **ret, unsigned char ***ret_mem, struct ckpt_err *err)
{
    const struct ckpt_load_options opt = {.size = sizeof opt,
                                          .verify = seed % 2 != 0,
                                          .readers =
                                              seed < 0 ? CKPT_READERS_EACH : CKPT_READERS_ONCE};
    const bool random = strcmp(layout, "random") == 0;

    if (ckpt_load_new(view, comm, &opt, ret, err) < 0 ||
        (random ? random_wants(*ret, view, ckpt_comm_size(comm), ckpt_comm_rank(comm),
                               (uint64_t)abs(seed), err)
                : ckpt_load_want_layout(*ret, layout, err)) < 0 ||
        ckpt_load_plan(*ret, err) < 0)
        return -1;
    const size_t n = ckpt_load_wants(*ret);
    *ret_mem = calloc(n, sizeof **ret_mem);
    for (size_t i = 0; i < n; i++) {
        struct ckpt_want_info w = {.size = sizeof w};
        (void)ckpt_load_want_info(*ret, i, &w, NULL);
        (*ret_mem)[i] = malloc(w.nbytes + 1);
        const struct ckpt_dest dest = {.size = sizeof dest, .ptr = (*ret_mem)[i], .dtype = w.dtype};
        if (ckpt_load_set_dest(*ret, i, &dest, err) < 0)
            return -1;
    }
    return 0;
}

static void finish(struct ckpt_load *load, unsigned char **mem)
{
    const size_t n = ckpt_load_wants(load);

    ckpt_load_free(load);
    for (size_t i = 0; i < n; i++)
        free(mem[i]);
    free(mem);
}

/* One rank cannot start, or cancels the load before the others start it: it fails on all ranks with
 * that rank's error. 1: the rank had read all that it needs, and said so, before the cancel; then
 * the load is good on all ranks. */
static int fail_on(uint32_t rank, bool starts, struct ckpt_view *view, struct ckpt_comm *comm,
                   const char *layout, MPI_Comm half, struct ckpt_err *err)
{
    const enum ckpt_code expected = starts ? CKPT_CANCELLED : CKPT_USAGE;
    const struct ckpt_dest nowhere = {.size = sizeof nowhere};
    const bool mine = ckpt_comm_rank(comm) == rank;
    struct ckpt_err why = {0};
    struct ckpt_load *load = NULL;
    unsigned char **mem;
    char culprit[32];

    (void)snprintf(culprit, sizeof culprit, "rank %u: ", (unsigned)rank);
    if (prepare(view, comm, layout, 0, &load, &mem, err) < 0 ||
        (mine && !starts && ckpt_load_set_dest(load, 0, &nowhere, err) < 0))
        return -1;
    if (!mine && starts)
        (void)MPI_Barrier(half);
    int rc = ckpt_load_start(load, &why);
    if (mine && starts) {
        ckpt_load_cancel(load);
        (void)MPI_Barrier(half);
    }
    if (rc == 0)
        rc = ckpt_load_wait(load, UINT32_MAX, &why);
    finish(load, mem);
    if (rc == -1 && why.code == expected && strncmp(why.text, culprit, strlen(culprit)) == 0)
        return 0;
    if (rc == 0 && starts)
        return 1;
    err->code = CKPT_CONFLICT;
    (void)snprintf(err->text, sizeof err->text, "a load was to fail on rank %u, but: %.200s",
                   (unsigned)rank, rc < 0 ? why.text : "it did not");
    return -1;
}

/* Cancel on that rank, until one cancel comes in time. */
static int cancel_on(uint32_t rank, struct ckpt_view *view, struct ckpt_comm *comm,
                     const char *layout, MPI_Comm half, struct ckpt_err *err)
{
    int rc = 1;

    for (int i = 0; rc == 1 && i < 20; i++)
        rc = fail_on(rank, true, view, comm, layout, half, err);
    if (rc == 1)
        (void)snprintf(err->text, sizeof err->text, "rank %u cancelled 20 loads, all too late",
                       (unsigned)rank);
    return rc == 0 ? 0 : -1;
}

/* Compare what was loaded with what every rank has read for itself, or with the view. */
static void check_all(struct ckpt_view *view, struct ckpt_load *load, unsigned char **mem,
                      unsigned char **alone)
{
    const size_t n = ckpt_load_wants(load);
    struct ckpt_err err = {0};

    for (size_t i = 0; i < n; i++) {
        struct ckpt_want_info w = {.size = sizeof w};
        (void)ckpt_load_want_info(load, i, &w, NULL);
        if (w.nbytes &&
            (alone ? memcmp(alone[i], mem[i], w.nbytes) : check(view, &w, mem[i], &err))) {
            (void)fprintf(stderr, "mpi_user: '%s' is wrong\n", w.tensor);
            (void)MPI_Abort(MPI_COMM_WORLD, 1);
        }
    }
    finish(load, mem);
}

static int load_all(struct ckpt_view *view, struct ckpt_comm *comm, const char *layout, int seed,
                    struct ckpt_load **ret, unsigned char ***ret_mem, struct ckpt_err *err)
{
    return prepare(view, comm, layout, seed, ret, ret_mem, err) < 0 ||
                   ckpt_load_start(*ret, err) < 0
               ? -1
               : ckpt_load_wait(*ret, UINT32_MAX, err);
}

static int load_together(const struct job *job)
{
    struct ckpt_view *view;
    struct ckpt_comm *comm;
    struct ckpt_load *load, *alone = NULL;
    struct ckpt_err err = {0};
    unsigned char **mem, **expect = NULL;

    if (ckpt_comm_mpi(MPI_COMM_WORLD, &comm, &err) < 0 ||
        ckpt_load_open(comm, job->run, NULL, NULL, 0, NULL, NULL, &view, &err) < 0)
        return die(&err);
    for (int seed = 1; seed <= SEEDS; seed++) {
        if (load_all(view, comm, job->layout, seed, &load, &mem, &err) < 0 ||
            (strcmp(job->layout, "random") == 0 &&
             load_all(view, comm, job->layout, -seed, &alone, &expect, &err) < 0))
            return die(&err);
        check_all(view, load, mem, expect);
        if (alone)
            finish(alone, expect);
    }
    ckpt_comm_free(comm);
    ckpt_view_release(view);
    for (int n = 0; n <= MOST_RANKS && job->rank == 0; n++)
        if (gathers[n])
            (void)printf("%d gathers of %d\n", gathers[n], n);
    return 0;
}

static int load_half(const struct job *job)
{
    struct ckpt_view *view;
    struct ckpt_comm *comm;
    struct ckpt_load *load;
    struct ckpt_err err = {0};
    unsigned char **mem;
    MPI_Comm half;
    char layout[32];
    int size;

    (void)MPI_Comm_split(MPI_COMM_WORLD, job->rank % 2, job->rank, &half);
    (void)MPI_Comm_size(half, &size);
    (void)snprintf(layout, sizeof layout, "dp=%d", size);
    if (ckpt_comm_mpi(half, &comm, &err) < 0) {
        if (job->rank == 0)
            (void)printf("refused: %s\n", err.text);
        return job->level < MPI_THREAD_MULTIPLE && err.code == CKPT_USAGE ? 0 : die(&err);
    }
    if (ckpt_load_open(comm, job->run, NULL, NULL, 0, NULL, NULL, &view, &err) < 0)
        return die(&err);
    for (int rank = 0; rank < size; rank++)
        if (fail_on((uint32_t)rank, false, view, comm, layout, half, &err) < 0 ||
            cancel_on((uint32_t)rank, view, comm, layout, half, &err) < 0)
            return die(&err);
    if (prepare(view, comm, layout, 0, &load, &mem, &err) < 0 || load_twice(load, half, &err) < 0)
        return die(&err);
    if (job->rank == 0)
        (void)printf("%zu wants over %s\n", ckpt_load_wants(load), ckpt_comm_transport(comm));
    check_all(view, load, mem, NULL);
    ckpt_comm_free(comm);
    ckpt_view_release(view);
    (void)MPI_Comm_free(&half);
    return 0;
}

static int level_of(const char *name)
{
    static const char *const names[] = {"single", "funneled", "serialized", "multiple"};
    static const int levels[] = {MPI_THREAD_SINGLE, MPI_THREAD_FUNNELED, MPI_THREAD_SERIALIZED,
                                 MPI_THREAD_MULTIPLE};

    for (int i = 0; i < 4; i++)
        if (strcmp(names[i], name) == 0)
            return levels[i];
    return -1;
}

int main(int argc, char **argv)
{
    struct job job = {.level = argc == 3 || argc == 4 ? level_of(argv[2]) : -1};
    int level;

    if (job.level < 0 || MPI_Init_thread(&argc, &argv, job.level, &level) != MPI_SUCCESS)
        return 2;
    job.run = argv[1];
    job.layout = argv[3];
    (void)MPI_Comm_rank(MPI_COMM_WORLD, &job.rank);
    const int result = job.layout ? load_together(&job) : load_half(&job);
    return MPI_Finalize() == MPI_SUCCESS ? result : 1;
}
