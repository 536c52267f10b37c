/* SPDX-License-Identifier: Apache-2.0 */
/* libckptfs_load: every rank gets its slices of a view, every byte is read from storage once.
 *
 *     ckpt_comm_*  ->  ckpt_load_new  ->  ckpt_load_want_*  ->  ckpt_load_plan  ->  ckpt_load_start
 *                  ->  ckpt_load_wait | ckpt_load_next  ->  ckpt_load_free
 *
 * Each rank opens the same checkpoint, says which boxes of which tensors it needs and where they
 * shall go, and all ranks together agree on a plan: who reads what, who sends it to whom. The
 * library contains libckptfs; any view will do, HF names or the framework's own (view=raw).
 *
 * What it promises:
 * - Destinations are the caller's. They are written only while a load runs: once ckpt_load_wait
 *   has reported the end, good or bad, or ckpt_load_free has returned, nothing touches them again.
 *   After a failure their contents are undefined.
 * - An error on one rank is the same error on all, naming rank, file and offset. Nobody waits
 *   longer than the deadlines in the options.
 * - Memory beyond the destinations stays within options.host_bytes; a plan that can't is refused.
 *
 * Functions return 0, or -1 with *err filled, unless they say otherwise. A comm and its loads
 * belong to one thread at a time; different comms are independent. Those marked COLLECTIVE must be
 * called by all ranks of the comm in the same order. No MPI, NCCL or CUDA type appears here: see
 * load_mpi.h and load_nccl.h. */
#ifndef CKPTFS_LOAD_H
#define CKPTFS_LOAD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <ckptfs/ckptfs.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- the ranks that load together ---- */

struct ckpt_comm;

/* One process alone. */
CKPT_PUBLIC int ckpt_comm_self(struct ckpt_comm **ret, struct ckpt_err *err);

/* COLLECTIVE. n ranks inside one process, one thread each: ret[0..n). For tests, and for programs
 * that are built so. Free each. */
CKPT_PUBLIC int ckpt_comm_threads(uint32_t n, struct ckpt_comm **ret, struct ckpt_err *err);

/* COLLECTIVE. As the environment says: under mpirun MPI (libckptfs_load_mpi is loaded then, and
 * initialises MPI if nobody has), with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun
 * sets them, TCP, else this process alone. CKPTFS_TRANSPORT=self|tcp|mpi decides otherwise; nccl
 * adds a CUDA device to each rank of what the launcher connects (load_nccl.h): that of its number
 * on its machine, which becomes the calling thread's. CKPTFS_MEET_TIMEOUT is how many seconds TCP
 * and NCCL wait for all ranks (300). */
CKPT_PUBLIC int ckpt_comm_from_env(struct ckpt_comm **ret, struct ckpt_err *err);

/* Over TCP, ranks of one machine read each other's memory where the system lets them; where Yama
 * restricts that to parents, a rank lifts it for itself while it has such a comm (PR_SET_PTRACER).
 *
 * TCP in two steps, for programs that have their own way to exchange a few bytes: listen, pass
 * ckpt_tcp_address (NUL-terminated, less than CKPT_TCP_ADDRESS bytes) around, connect. `host` is
 * the name or address under which the others reach this rank; NULL: this machine's name. */
struct ckpt_tcp;
enum { CKPT_TCP_ADDRESS = 256 };
CKPT_PUBLIC int ckpt_tcp_listen(const char *host, struct ckpt_tcp **ret, struct ckpt_err *err);
CKPT_PUBLIC const char *ckpt_tcp_address(const struct ckpt_tcp *tcp);
CKPT_PUBLIC void ckpt_tcp_free(struct ckpt_tcp *tcp);

/* COLLECTIVE. address[r] is that of rank r, for all `size` ranks. Takes tcp, whatever comes of it.
 * Two descriptors for each rank: the process's soft limit of open files is raised as far as they
 * need it; LIMIT if the hard one forbids that. */
CKPT_PUBLIC int ckpt_tcp_connect(struct ckpt_tcp *tcp, uint32_t rank, uint32_t size,
                                 const char *const *address, uint32_t timeout_ms,
                                 struct ckpt_comm **ret, struct ckpt_err *err);

CKPT_PUBLIC void ckpt_comm_free(struct ckpt_comm *comm);

CKPT_PUBLIC uint32_t ckpt_comm_rank(const struct ckpt_comm *comm);
CKPT_PUBLIC uint32_t ckpt_comm_size(const struct ckpt_comm *comm);
CKPT_PUBLIC const char *ckpt_comm_transport(const struct ckpt_comm *comm); /* "tcp" */

/* COLLECTIVE. Do all ranks agree that all is well? rc is this rank's verdict; if negative, err says
 * why. All get 0, or all get -1 and the same error, that of a rank that failed: it is told at
 * once, others are not waited for. For what is done before a load: opening the run. */
CKPT_PUBLIC int ckpt_comm_agree(struct ckpt_comm *comm, int rc, uint32_t timeout_ms,
                                struct ckpt_err *err);

/* COLLECTIVE. The step of a run that all ranks load: the one that rank 0 means (as
 * ckpt_run_find_step has it; NULL: its latest, which another rank may not see yet, or see a later
 * one). A rank other than 0 means the same or gives NULL: another step is CONFLICT, which names
 * both. A step that a rank still does not see after some seconds is MISSING. *ret is for
 * ckpt_run_view; the caller frees it. */
CKPT_PUBLIC int ckpt_comm_step(struct ckpt_comm *comm, struct ckpt_run *run, const char *step,
                               uint32_t timeout_ms, char **ret, struct ckpt_err *err);

/* Memory where the comm's destinations lie (the host's, or a device's), aligned to 256 bytes at
 * least; and a copy of some of it on the host. For programs that have no allocator of their own. */
CKPT_PUBLIC int ckpt_comm_alloc(struct ckpt_comm *comm, size_t len, void **ret,
                                struct ckpt_err *err);
CKPT_PUBLIC void ckpt_comm_dealloc(struct ckpt_comm *comm, void *mem);
CKPT_PUBLIC int ckpt_comm_fetch(struct ckpt_comm *comm, void *dst, const void *mem, size_t len,
                                struct ckpt_err *err);

/* ---- options ---- */

enum ckpt_readers {
    CKPT_READERS_AUTO, /* what the rates say is fastest */
    CKPT_READERS_ONCE, /* every unique byte by one rank of the job */
    CKPT_READERS_NODE, /* every unique byte by one rank of each node */
    CKPT_READERS_EACH, /* every rank for itself */
};

/* Bytes a second; 0: assumed. */
struct ckpt_rates {
    double node_storage;   /* one node, reading from storage */
    double shared_storage; /* all nodes together, where they share it */
    double page_cache;     /* one node, reading what is in its page cache */
    double copy;           /* one node, within memory (nccl: to its devices) */
    double local_link;     /* one rank, to others of its node (nccl: between devices) */
    double network;        /* one node, to other nodes */
};

/* Reads past the page cache (O_DIRECT), which spare a copy and leave the cache to others: large
 * ones of what is not in it, where no other rank of the node wants the same bytes from it. */
enum ckpt_load_direct { CKPT_LOAD_DIRECT_AUTO, CKPT_LOAD_DIRECT_NEVER, CKPT_LOAD_DIRECT_ALWAYS };

struct ckpt_load_options {
    size_t size; /* sizeof (struct ckpt_load_options): what the caller knows of */
    enum ckpt_readers readers;
    uint64_t host_bytes;          /* memory per rank: windows (nccl: pinned), and a quarter of it
                                     that threads read through; 0: 256 MiB */
    uint64_t device_bytes;        /* device memory for windows, per rank (nccl); 0: 256 MiB */
    uint64_t window_bytes;        /* of a window, all owners together; 0: what suits */
    uint32_t threads;             /* that read, per rank: reads in flight; 0: what suits. Less where
                                     host_bytes has no room for what they read through */
    uint32_t read_timeout_ms;     /* one read of storage; 0: 120 s */
    uint32_t exchange_timeout_ms; /* hearing nothing from a rank that owes us something; 0: 300 s */
    bool verify;                  /* XXH3 of what was sent against what was received */
    struct ckpt_rates rates;
    enum ckpt_load_direct direct;
};

/* ---- a load ---- */

struct ckpt_load;

/* Both are borrowed until ckpt_load_free; opt may be NULL. */
CKPT_PUBLIC int ckpt_load_new(struct ckpt_view *view, struct ckpt_comm *comm,
                              const struct ckpt_load_options *opt, struct ckpt_load **ret,
                              struct ckpt_err *err);

/* Stop if it runs. The memory of reads that the operating system does not return from is given
 * back when it does. */
CKPT_PUBLIC void ckpt_load_free(struct ckpt_load *load);

/* ---- wants ---- */

enum { CKPT_LOAD_RANK = 12, CKPT_LOAD_CUTS = 8 }; /* most dimensions, of a tensor and of a mesh */

/* Where a want goes: host memory, or the device's if the comm has devices. */
struct ckpt_dest {
    void *ptr;              /* of the want's first element, aligned on a device; NULL: later */
    const uint64_t *stride; /* per dimension, in elements of dtype; NULL: row-major without holes */
    const char *dtype;      /* "F32" or "float32": cast to it; NULL: as in the view */
};

/* Elements [lo[d], lo[d]+n[d]) of a tensor; lo == NULL: all of it. *ret_want (may be NULL) is the
 * want's number: 0, 1, 2 ... in the order of declaration. Arrays and names are copied. MISSING: no
 * such tensor; USAGE: outside of it, or a cast that does not exist. */
CKPT_PUBLIC int ckpt_load_want(struct ckpt_load *load, const char *tensor, const uint64_t *lo,
                               const uint64_t *n, const struct ckpt_dest *dest, size_t *ret_want,
                               struct ckpt_err *err);

/* A mesh of ranks: dim[0] x dim[1] ... of them, row-major; ranks == NULL: 0, 1, 2 ... */
struct ckpt_mesh {
    uint32_t ndim;
    const uint32_t *dim;
    const uint32_t *ranks;
};

/* What the ranks along each dimension of a mesh hold of a tensor; PyTorch's words. SHARD cuts `dim`
 * into torch.chunk's pieces: ceil(size / ranks) each, the last ones less or nothing. Several
 * mesh dimensions may cut one tensor dimension, the first of them outermost; STRIDED is a cut that
 * comes after those of the later mesh dimensions (FSDP over tensor parallelism). */
enum ckpt_placement { CKPT_REPLICATE, CKPT_SHARD, CKPT_STRIDED };
struct ckpt_place {
    enum ckpt_placement kind;
    uint32_t dim;
};

/* This rank's part of a tensor (or of its box lo, n) that is laid out over a mesh. Ranks that
 * declare the same mesh and placements in the same order cost the plan nothing extra: prefer it to
 * boxes. This rank must be in the mesh. A want may be empty. */
CKPT_PUBLIC int ckpt_load_want_part(struct ckpt_load *load, const char *tensor, const uint64_t *lo,
                                    const uint64_t *n, const struct ckpt_mesh *mesh,
                                    const struct ckpt_place *place /* one per mesh dimension */,
                                    const struct ckpt_dest *dest, size_t *ret_want,
                                    struct ckpt_err *err);

/* All that this rank needs of a model under "tp=2,pp=2,ep=1,dp=2" or "fsdp=4" (any of these, the
 * rest is 1). Their product must be the comm's size. tp varies fastest among ranks, then ep, fsdp,
 * dp, pp. As inference engines do it, by the marks of the model file (or, for families without one,
 * by what most families call the parts of their layers):
 * - tp divides the rows or columns of matrices, and the vocabulary, into torch.chunk's pieces, and
 *   each of several parts that are fused in one tensor. Heads are never torn apart, so their number
 *   must be a multiple of tp (USAGE). Of fewer key heads than ranks each goes to tp / heads
 *   neighbours. Scales follow their weights where all cuts fall between blocks.
 * - ep divides the experts, one tensor each or stacked: ceil(experts / ep) each.
 * - pp divides the layers as evenly as can be, the first stages get one more. The embedding and
 *   towers of other senses go to the first stage, and what follows the layers to the last; where
 *   there is no output matrix the embedding goes there too.
 * - fsdp divides dimension 0 of what is left, in PyTorch's chunks. dp divides nothing.
 * What no file speaks of is on every rank of its stage. Destinations are to be set later. A layout
 * that fails leaves no wants behind.
 * UNSUPPORTED: nothing of the model's names is known and the layout asks for more than dp, fsdp. */
CKPT_PUBLIC int ckpt_load_want_layout(struct ckpt_load *load, const char *layout,
                                      struct ckpt_err *err);

struct ckpt_want_info {
    const char *tensor; /* these live as long as the load */
    const char *dtype;  /* of the destination */
    uint32_t rank;
    uint64_t lo[CKPT_LOAD_RANK], n[CKPT_LOAD_RANK];
    uint64_t nbytes; /* dense, in dtype */
};
CKPT_PUBLIC size_t ckpt_load_wants(const struct ckpt_load *load);
/* All zero if there is no such want. */
CKPT_PUBLIC void ckpt_load_want_info(const struct ckpt_load *load, size_t want,
                                     struct ckpt_want_info *ret);

/* Before ckpt_load_start. A dtype, if given, must be that of the declaration. */
CKPT_PUBLIC int ckpt_load_set_dest(struct ckpt_load *load, size_t want,
                                   const struct ckpt_dest *dest, struct ckpt_err *err);

/* ---- planning and running ---- */

/* COLLECTIVE. Exchange the wants and agree on a plan. CONFLICT: the ranks see different
 * checkpoints or steps (directories by different names, for one), or declared different options;
 * STALE: a rank opened the checkpoint before it was saved anew, another one after that; LIMIT:
 * host_bytes is too little (the text says what would do). */
CKPT_PUBLIC int ckpt_load_plan(struct ckpt_load *load, struct ckpt_err *err);

/* COLLECTIVE (all ranks must start; it does not wait for them). Every want with elements has a
 * destination by now. If it fails on one rank, which waits for the others to hear of it, the load
 * has failed on all, and is not started again; only a load of one rank that lacked a destination
 * may be. */
CKPT_PUBLIC int ckpt_load_start(struct ckpt_load *load, struct ckpt_err *err);

/* 0: all that this rank wants has arrived, and all ranks have what they want. 1: not yet, after
 * timeout_ms (UINT32_MAX: no limit; 0: just look). -1: failed, on all ranks. */
CKPT_PUBLIC int ckpt_load_wait(struct ckpt_load *load, uint32_t timeout_ms, struct ckpt_err *err);

/* The number of a want that has arrived, each once, in the order of arrival: 0 and *ret_want; 1:
 * none within timeout_ms; 2: there are no more; -1: failed. What arrived may be used at once,
 * though the load can still fail. */
CKPT_PUBLIC int ckpt_load_next(struct ckpt_load *load, uint32_t timeout_ms, size_t *ret_want,
                               struct ckpt_err *err);

/* Stop; every rank's load fails with CANCELLED. Call ckpt_load_wait after it. From any thread. */
CKPT_PUBLIC void ckpt_load_cancel(struct ckpt_load *load);

/* ---- what it cost ---- */

struct ckpt_load_stats {
    uint64_t needed_bytes;   /* wanted by this rank, in the view's dtypes */
    uint64_t unique_bytes;   /* of storage, that hold what anybody wants, counted once */
    uint64_t read_bytes;     /* from sources, by this rank */
    uint64_t reads;          /* calls */
    uint64_t sent_bytes;     /* to other ranks */
    uint64_t received_bytes; /* from other ranks */
    uint64_t buffer_bytes;   /* memory that was taken out of host_bytes */
    uint64_t retries;        /* reads that another rank did for us */
    uint64_t device_bytes;   /* as buffer_bytes, of the device's memory */
    double plan_s, wall_s;   /* ckpt_load_plan; from start to the end */
    double first_s;          /* from start to the first want */
    double read_s, place_s;  /* busy, threads added up */
    double send_s;           /* something was being sent or received */
};

/* Of this rank; job: of all ranks together (bytes and busy times added, wall the longest), known
 * after a good end. Either may be NULL. */
CKPT_PUBLIC void ckpt_load_stats(const struct ckpt_load *load, struct ckpt_load_stats *own,
                                 struct ckpt_load_stats *job);

/* What the plan decided: "each", "node" or "once". Static. */
CKPT_PUBLIC const char *ckpt_load_readers(const struct ckpt_load *load);

/* The rates that it was decided by: given or assumed. shared_storage is 0 if it was not given. */
CKPT_PUBLIC void ckpt_load_rates(const struct ckpt_load *load, struct ckpt_rates *ret);

/* ---- one box, at once ---- */

/* Elements [lo[d], lo[d]+n[d]) of tensor i of the view (lo == NULL: all), row-major without holes
 * into buf. Alone, without a comm; safe from many threads. */
CKPT_PUBLIC int ckpt_view_box_pread(struct ckpt_view *view, size_t i, const uint64_t *lo,
                                    const uint64_t *n, void *buf, struct ckpt_err *err);

/* ---- planning only ---- */

/* What a job of `ranks` ranks, `ranks_per_node` of them on each node, would do under a layout: JSON
 * text that the caller frees, with reads, bytes and sends per rank (least, mean, most) and the
 * modelled time of each way to read. opt->rates say how fast things are. Nothing is read. */
CKPT_PUBLIC int ckpt_load_model(struct ckpt_view *view, const char *layout, uint32_t ranks,
                                uint32_t ranks_per_node, const struct ckpt_load_options *opt,
                                char **ret_json, struct ckpt_err *err);

#ifdef __cplusplus
}
#endif

#endif
