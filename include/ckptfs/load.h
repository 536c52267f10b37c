/* SPDX-License-Identifier: Apache-2.0 */
/* libckptfs_load: loads parts of a view into the memory of many ranks; each byte is read from
 * storage once.
 *
 *     ckpt_comm_*  ->  ckpt_load_open  ->  ckpt_load_new  ->  ckpt_load_want_*  ->  ckpt_load_plan
 *                  ->  ckpt_load_start  ->  ckpt_load_wait | ckpt_load_next  ->  ckpt_load_free
 *                      ^-- ckpt_load_reload <--'
 *
 * All ranks open the same checkpoint, and each declares its wants: which boxes of which tensors it
 * needs, and where to put them. All ranks together then agree on a plan, which says which rank
 * reads which bytes and sends them to which ranks. The library contains libckptfs. Any view can be
 * loaded, with Hugging Face's names or with the framework's own (view=raw). Boxes count elements;
 * of F4 and F6 the last dimension counts packs of 2 and 4 of them, which are whole bytes, as
 * torch's float4_e2m1fn_x2 does.
 *
 * Guarantees:
 * - Destinations belong to the caller. They are written only while a load runs: after
 *   ckpt_load_wait has reported the end (success or failure) or ckpt_load_free has returned, the
 *   library does not touch them. After a failure their contents are undefined.
 * - If one rank fails, all ranks report the same error, which names the rank, the file and the
 *   offset. PEER, TIMEOUT and CANCELLED, which may be consequences of another rank's error, are
 *   reported only if no rank has another one. No call waits longer than the timeouts in the
 *   options.
 * - Memory other than the destinations stays within options.host_bytes. A plan that needs more is
 *   refused.
 * - A comm serves any number of loads, one after the other, also after a load that has failed on
 *   all ranks, as long as none of them is gone.
 *
 * Functions return 0, or -1 with *err filled, unless they say otherwise. A comm and its loads must
 * be used by one thread at a time; different comms are independent. A function marked COLLECTIVE
 * must be called by all ranks of the comm, in the same order. No MPI, NCCL or CUDA type appears in
 * this header; see load_mpi.h and load_nccl.h. */
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

/* A group of ranks and the transport between them. */
struct ckpt_comm;

/* A comm of one rank: this process. */
CKPT_PUBLIC int ckpt_comm_self(struct ckpt_comm **ret, struct ckpt_err *err);

/* Make n ranks inside one process, ret[0..n), each to be used by one thread of its own. For tests,
 * and for programs in which ranks are threads. Free each with ckpt_comm_free. */
CKPT_PUBLIC int ckpt_comm_threads(uint32_t n, struct ckpt_comm **ret, struct ckpt_err *err);

/* COLLECTIVE. Make the comm that the environment describes. Under mpirun it uses MPI:
 * libckptfs_load_mpi is loaded, and MPI is initialised unless it is already. If RANK, WORLD_SIZE,
 * MASTER_ADDR and MASTER_PORT are set, as torchrun sets them, it uses TCP. Otherwise it is this
 * process alone. CKPTFS_TRANSPORT=self|tcp|mpi overrides that choice. CKPTFS_TRANSPORT=nccl adds a
 * CUDA device to each rank (load_nccl.h): the device whose number is the rank's number on its node,
 * which also becomes the calling thread's current device. TCP and NCCL wait CKPTFS_MEET_TIMEOUT
 * seconds for all ranks (default: 300). */
CKPT_PUBLIC int ckpt_comm_from_env(struct ckpt_comm **ret, struct ckpt_err *err);

/* While rank 0 waits for other ranks, in the functions that make a comm and in those that are
 * COLLECTIVE and wait, it says after 10 s, and then every 30 s, which ranks it waits for and for
 * what. Called by the thread that waits; text is borrowed. */
typedef void ckpt_comm_log(void *ctx, const char *text);

/* COLLECTIVE. Make a comm as ckpt_comm_from_env does, with a function to which rank 0 says whom it
 * waits for; log may be NULL. */
CKPT_PUBLIC int ckpt_comm_from_env_log(ckpt_comm_log *log, void *ctx, struct ckpt_comm **ret,
                                       struct ckpt_err *err);

/* Set that function for a comm; NULL: none. */
CKPT_PUBLIC void ckpt_comm_set_log(struct ckpt_comm *comm, ckpt_comm_log *log, void *ctx);

/* TCP in two steps, for programs that have their own way to exchange a few bytes: every rank calls
 * ckpt_tcp_listen, rank 0 sends its ckpt_tcp_address (NUL-terminated, less than CKPT_TCP_ADDRESS
 * bytes with the NUL) to all other ranks, and all call ckpt_tcp_connect. `host` is the name or
 * address under which other ranks reach this one; NULL: the name of this machine.
 *
 * A rank listens on the first address of `host` that is this machine's (on all addresses if none
 * is), or on the interface that CKPTFS_INTERFACE names, by its name or an address; the port is one
 * of CKPTFS_PORT_RANGE ("20000-20099") if that is set. Handshakes go on side by side, so that
 * strangers who connect delay nobody.
 *
 * If CKPTFS_SECRET is set, to the same at least 16 random characters on all ranks, both ends of
 * every new connection prove that they know it, by a keyed hash of random numbers (BLAKE2b, by
 * libsodium): a process that can reach the ports, but does not know the secret, cannot take part.
 * What is sent afterwards is neither encrypted nor authenticated: whoever controls the network
 * between the ranks can read the weights and change them. UNSUPPORTED: the library was built
 * without libsodium. With NCCL this holds for the connections that carry its control messages; NCCL
 * makes its own for the data, which no secret protects. Over MPI the launcher decides who takes
 * part, and ranks that do not have the same secret are an error that names them.
 *
 * Over TCP, ranks on the same machine map each other's buffers (a memfd, opened by /proc/PID/fd),
 * which takes no permission but that of one user's processes in one PID namespace; else they use
 * sockets. */
struct ckpt_tcp;
enum { CKPT_TCP_ADDRESS = 256 };
CKPT_PUBLIC int ckpt_tcp_listen(const char *host, struct ckpt_tcp **ret, struct ckpt_err *err);
/* The address that rank 0 sends to the others. Borrowed from tcp. */
CKPT_PUBLIC const char *ckpt_tcp_address(const struct ckpt_tcp *tcp);
/* Stop listening and free tcp, if ckpt_tcp_connect will not be called. */
CKPT_PUBLIC void ckpt_tcp_free(struct ckpt_tcp *tcp);

/* COLLECTIVE. Connect all ranks, which register at rank 0. root: the address of rank 0, which
 * itself may give NULL. tcp is freed by this call, whether it succeeds or not. A rank is connected
 * to its neighbours in a tree of 32 and, once data is exchanged, to the ranks that it exchanges
 * data with; its listener stays open for them. The process's soft limit of open files is raised as
 * far as the tree needs it. LIMIT: the hard limit is too low. TIMEOUT: not all ranks connected
 * within timeout_ms. */
CKPT_PUBLIC int ckpt_tcp_connect(struct ckpt_tcp *tcp, uint32_t rank, uint32_t size,
                                 const char *root, uint32_t timeout_ms, struct ckpt_comm **ret,
                                 struct ckpt_err *err);

/* Close the connections and free the comm. All its loads must have been freed. */
CKPT_PUBLIC void ckpt_comm_free(struct ckpt_comm *comm);

/* Give back the memory that the comm keeps for its next load (nccl: pinned memory, kept_bytes in
 * the statistics, and NCCL's communicators), which is slow to make. Sockets stay. Returns the
 * number of pinned bytes. Other ranks need not do the same; loads that are not freed keep what they
 * use. */
CKPT_PUBLIC uint64_t ckpt_comm_release(struct ckpt_comm *comm);

/* This rank's number, the number of ranks, and the name of the transport: "self", "threads", "tcp",
 * "mpi" or "nccl" (static). */
CKPT_PUBLIC uint32_t ckpt_comm_rank(const struct ckpt_comm *comm);
CKPT_PUBLIC uint32_t ckpt_comm_size(const struct ckpt_comm *comm);
CKPT_PUBLIC const char *ckpt_comm_transport(const struct ckpt_comm *comm);

/* COLLECTIVE. Tell all ranks whether a preparation that each of them did alone, such as opening the
 * run, has succeeded everywhere. rc is this rank's result; if it is negative, err holds the reason.
 * Either all ranks get 0, or all get -1 and the same error, that of a rank that failed. A failure
 * is reported at once, without waiting for the remaining ranks. */
CKPT_PUBLIC int ckpt_comm_agree(struct ckpt_comm *comm, int rc, uint32_t timeout_ms,
                                struct ckpt_err *err);

/* COLLECTIVE. Open the run at `path` and the view of one of its steps on all ranks, in the way of
 * ckpt_run_open, ckpt_run_find_step and ckpt_run_view, but with the files opened by rank 0 only: it
 * sends all that it has read to the other ranks, which open the same step from that. During a load,
 * a rank then opens only the files that it reads itself. It compares each of them with rank 0's: a
 * file with other times, but of the same size, is taken for a copy if it has the same bytes in the
 * places that rank 0 has read. opt may be NULL, and is the same on all ranks, as is the path,
 * except that each node may have a copy of the checkpoint in a place of its own.
 *
 * Rank 0 opens `step`, or the latest one that it sees (NULL). Other ranks ask for the same step or
 * pass NULL (CONFLICT). MISSING: a rank does not see the step, within 35 s if its path is rank 0's
 * (NFS may show it late), or 4 s if it has another; the text names both paths. A failure is the
 * same on all ranks. timeout_ms: how long to wait without news from another rank, or from storage;
 * 0: 300 s. The caller closes *ret_run, frees *ret_step and releases *ret_view; ret_run and
 * ret_step may be NULL. */
CKPT_PUBLIC int ckpt_load_open(struct ckpt_comm *comm, const char *path,
                               const struct ckpt_options *opt, const char *step,
                               uint32_t timeout_ms, struct ckpt_run **ret_run, char **ret_step,
                               struct ckpt_view **ret_view, struct ckpt_err *err);

/* COLLECTIVE. Open a run of which each node has only some files, such as those that its own ranks
 * have saved: as ckpt_load_open, but of a directory that has the files of all ranks. Every rank
 * lists its directory once. A file that this node has not is read by a rank that has it and sent to
 * this one; nothing is written anywhere. Ranks whose nodes have a file read it as ever. If all
 * ranks list the same files, it is ckpt_load_open.
 *
 * `path` is equal on all ranks, and may contain {rank} and {node}, which become the rank's number
 * and its node's (nodes are counted in the order of their first ranks). A rank may have no such
 * directory; MISSING: none has. MISSING also names a file that no rank has, and the rank of the
 * training that wrote it, if the name tells. CONFLICT: a file that is needed has different sizes on
 * two nodes, or other contents (files of up to 1 MiB are compared if their times differ). A larger
 * file of one size with other times is taken for a copy, as by ckpt_load_open. PEER: a rank that
 * has a file can't be reached; requests go over TCP connections of their own, also over MPI, under
 * the rules of ckpt_tcp_listen.
 *
 * Each rank answers the others until its view and run are closed, so close them only after all
 * ranks have loaded. */
CKPT_PUBLIC int ckpt_load_open_local(struct ckpt_comm *comm, const char *path,
                                     const struct ckpt_options *opt, const char *step,
                                     uint32_t timeout_ms, struct ckpt_run **ret_run,
                                     char **ret_step, struct ckpt_view **ret_view,
                                     struct ckpt_err *err);

/* COLLECTIVE. Choose the step that all ranks load: the step that rank 0 asks for, by
 * ckpt_run_find_step (NULL: the latest step that rank 0 sees; other ranks may see another one as
 * the latest). Other ranks ask for the same step or pass NULL. CONFLICT: two ranks ask for
 * different steps; the text names both. MISSING: a rank still does not see the step after some
 * seconds. *ret is a new string for ckpt_run_view, which the caller frees. */
CKPT_PUBLIC int ckpt_comm_step(struct ckpt_comm *comm, struct ckpt_run *run, const char *step,
                               uint32_t timeout_ms, char **ret, struct ckpt_err *err);

/* Allocate `len` bytes where the comm's destinations are (host memory, or device memory), aligned
 * to at least 256 bytes. For programs that have no allocator for device memory. */
CKPT_PUBLIC int ckpt_comm_alloc(struct ckpt_comm *comm, size_t len, void **ret,
                                struct ckpt_err *err);
/* Free what ckpt_comm_alloc of the same comm has returned. NULL is allowed. */
CKPT_PUBLIC void ckpt_comm_dealloc(struct ckpt_comm *comm, void *mem);
/* Copy `len` bytes of such memory to `dst` in host memory. */
CKPT_PUBLIC int ckpt_comm_fetch(struct ckpt_comm *comm, void *dst, const void *mem, size_t len,
                                struct ckpt_err *err);

/* ---- options ---- */

/* Which ranks read from storage; the bytes that other ranks need are then sent to them. */
enum ckpt_readers {
    CKPT_READERS_AUTO, /* the fastest of the three by the rates */
    CKPT_READERS_ONCE, /* one rank of the job, of those that need it, reads each byte */
    CKPT_READERS_NODE, /* one rank of each node reads each byte that the node needs */
    CKPT_READERS_EACH, /* each rank reads the bytes that it needs */
};

/* For options.share: this rank shares what it reads with no other. */
#define CKPT_SHARE_NONE UINT32_MAX

/* Rates for choosing between the ways to read, in bytes per second; 0: the library's assumption. */
struct ckpt_rates {
    double node_storage;   /* one node, reading from storage */
    double shared_storage; /* all nodes together, if they share the storage */
    double page_cache;     /* one node, reading bytes that are in its page cache */
    double copy;           /* one node, copying within memory (nccl: to its devices) */
    double local_link; /* one rank, sending to other ranks of its node (nccl: between devices) */
    double network;    /* one node, sending to other nodes */
};

/* Use of O_DIRECT, which reads without filling the page cache and saves a copy. AUTO uses it for
 * large reads of uncached data that no other rank of the node repeats. */
enum ckpt_load_direct { CKPT_LOAD_DIRECT_AUTO, CKPT_LOAD_DIRECT_NEVER, CKPT_LOAD_DIRECT_ALWAYS };

struct ckpt_load_options {
    size_t size; /* sizeof(struct ckpt_load_options) */
    enum ckpt_readers readers;
    uint64_t host_bytes;   /* memory per rank: windows (nccl: pinned), the plan and what all ranks
                              want, and bounce buffers of the reading threads, at most a quarter
                              of it; 0: 256 MiB */
    uint64_t device_bytes; /* device memory for windows, per rank (nccl); 0: 512 MiB */
    uint64_t window_bytes; /* size of a window, the parts of all readers together; 0: chosen by the
                              plan */
    uint32_t threads; /* reading threads per rank, which is the number of reads in flight; 0: chosen
                         by the plan. Fewer if host_bytes has no room for their buffers */
    uint32_t read_timeout_ms;     /* limit for one read of storage; 0: 120 s */
    uint32_t exchange_timeout_ms; /* limit for a rank that sends no heartbeat, or that has read
                                     nothing while it waits for storage and other ranks wait for
                                     it; however slow a rank is, it is waited for as long as it
                                     reads or moves bytes. Half of the limit for a job in which all
                                     ranks are alive, but none reads or moves anything; 0: 300 s */
    bool verify;                  /* compare XXH3 digests of sent and received bytes */
    struct ckpt_rates rates;
    enum ckpt_load_direct direct;
    uint32_t share; /* ranks that give the same number here share what they read, and no others do,
                       for example those of a data-parallel group: ONCE reads a byte once for each
                       such group, NODE once for its ranks of each node. Only this option, threads
                       and the timeouts may differ from rank to rank */
};

/* ---- a load ---- */

/* One load: the wants of this rank, the plan and its execution. */
struct ckpt_load;

/* Make a load. view and comm are borrowed until ckpt_load_free; opt is copied and may be NULL. An
 * option that is 0 means its default. */
CKPT_PUBLIC int ckpt_load_new(struct ckpt_view *view, struct ckpt_comm *comm,
                              const struct ckpt_load_options *opt, struct ckpt_load **ret,
                              struct ckpt_err *err);

/* Free a load, after stopping it if it runs. Reads that are under way are waited for, up to 5 s
 * after each began (or read_timeout_ms, if that is less). If the operating system has not returned
 * from a read by then, the memory of that read is freed when it does; destinations are not written
 * any more. */
CKPT_PUBLIC void ckpt_load_free(struct ckpt_load *load);

/* ---- wants ---- */

enum { CKPT_LOAD_RANK = 12, CKPT_LOAD_CUTS = 8 }; /* most dimensions of a tensor, and of a mesh */

/* A destination that is a function: called with each part of a want as it arrives, on a thread of
 * the library, for several parts at the same time. The part is elements [lo[d], lo[d]+n[d]) of the
 * want. Element i of it is at data + i . stride, in elements of dtype ("F32"), which is the dtype
 * in which the tensor is read; all borrowed for the call. A negative result makes the load fail. */
typedef int ckpt_dest_put(void *ctx, const uint64_t *lo, const uint64_t *n, const void *data,
                          const uint64_t *stride, const char *dtype);

/* Where to put a want's elements: in device memory if the comm has devices, else in host memory. */
struct ckpt_dest {
    size_t size; /* sizeof(struct ckpt_dest) */
    void *ptr;   /* address of the want's first element, aligned for the dtype on a device; NULL: to
                    be set by ckpt_load_set_dest */
    const uint64_t *stride; /* distance between neighbours in each dimension, in elements of dtype;
                               NULL: dense row-major */
    const char *dtype;      /* "F32" or "float32" to convert to; NULL: as the view. Unless the view
                               was opened with dtype=, what is stored is rounded once, to this */
    bool host;              /* the comm has devices, but ptr is in host memory */
    ckpt_dest_put *put;     /* instead of ptr, and on the host; stride is not used */
    void *ctx;              /* the first argument of put */
};

/* Declare a want: the elements [lo[d], lo[d]+n[d]) of a tensor in each dimension d; lo == NULL: the
 * whole tensor. *ret_want (may be NULL) is the want's number: 0, 1, 2 ... in the order of
 * declaration. Arrays and names are copied; dest->ptr is borrowed for the load's life. MISSING:
 * there is no such tensor. USAGE: the box is not inside the tensor, or there is no conversion to
 * the dtype. */
CKPT_PUBLIC int ckpt_load_want(struct ckpt_load *load, const char *tensor, const uint64_t *lo,
                               const uint64_t *n, const struct ckpt_dest *dest, size_t *ret_want,
                               struct ckpt_err *err);

/* A mesh of ranks with dim[0] x dim[1] x ... members in row-major order. ranks lists the ranks of
 * the members; NULL: 0, 1, 2 ... */
struct ckpt_mesh {
    size_t size; /* sizeof(struct ckpt_mesh) */
    uint32_t ndim;
    const uint32_t *dim;
    const uint32_t *ranks;
};

/* How a tensor is distributed along one dimension of a mesh, with the terms of PyTorch's DTensor.
 * SHARD divides dimension `dim` of the tensor as torch.chunk does: pieces of ceil(size / ranks)
 * rows, of which the last ones may be smaller or empty. Several mesh dimensions may divide the same
 * tensor dimension; the first is then the outermost. STRIDED (DTensor's _StridedShard) is a
 * division that applies after those of the later mesh dimensions, as with FSDP over tensor
 * parallelism. */
enum ckpt_placement_kind { CKPT_REPLICATE, CKPT_SHARD, CKPT_STRIDED };
struct ckpt_placement {
    enum ckpt_placement_kind kind;
    uint32_t dim;
};

/* Declare as a want this rank's part of a tensor (or of its box lo, n) that is distributed over a
 * mesh, with one placement per mesh dimension. Prefer it to ckpt_load_want: ranks that declare the
 * same meshes and placements in the same order cost the plan nothing extra. This rank must be in
 * the mesh. The want may have no elements. */
CKPT_PUBLIC int ckpt_load_want_part(struct ckpt_load *load, const char *tensor, const uint64_t *lo,
                                    const uint64_t *n, const struct ckpt_mesh *mesh,
                                    const struct ckpt_placement *place /* one per mesh dimension */,
                                    const struct ckpt_dest *dest, size_t *ret_want,
                                    struct ckpt_err *err);

/* Declare as wants everything that this rank needs of a model under a parallel layout such as
 * "tp=2,pp=2,ep=1,dp=2" or "fsdp=4". Sizes that are not given are 1; their product must be the size
 * of the comm. Among consecutive ranks tp varies fastest, then ep, fsdp, dp, pp. The division
 * follows the sharding annotations of the model file, or, for a family without a model file, the
 * names that most families use for the parts of their layers:
 * - tp divides rows or columns of matrices, and the vocabulary, as torch.chunk does; a tensor that
 *   fuses several parts is divided part by part. An attention head stays whole, so the number of
 *   heads must be a multiple of tp (USAGE). If there are fewer key heads than ranks, each key head
 *   goes to tp / heads consecutive ranks. Scales of quantized weights are divided with their
 *   weights where every cut falls between two blocks.
 * - ep divides the experts, whether they are one tensor each or stacked: ceil(experts / ep) each.
 *   ep of more than 1 is an error (USAGE) if the model has no experts.
 * - pp divides the layers as evenly as possible; the first stages get one more. The first stage
 *   also gets the embedding and the encoders of other modalities, the last stage everything after
 *   the layers. If the model has no separate output matrix, the last stage gets the embedding too.
 * - fsdp divides dimension 0 of the result as torch.chunk does. dp divides nothing.
 *
 * A tensor without an annotation is on every rank of its stage. Set the destinations with
 * ckpt_load_set_dest. On failure no want is added. UNSUPPORTED: none of the model's names is known,
 * and the layout has more than dp and fsdp. */
CKPT_PUBLIC int ckpt_load_want_layout(struct ckpt_load *load, const char *layout,
                                      struct ckpt_err *err);

struct ckpt_want_info {
    size_t size;        /* sizeof(struct ckpt_want_info), set before the call */
    const char *tensor; /* this and dtype are valid as long as the load */
    const char *dtype;  /* dtype of the destination */
    uint32_t rank;
    uint64_t lo[CKPT_LOAD_RANK], n[CKPT_LOAD_RANK];
    uint64_t nbytes; /* size of the box when dense, in dtype */
};
/* The number of wants that were declared. */
CKPT_PUBLIC size_t ckpt_load_wants(const struct ckpt_load *load);
/* Describe a want. All members but size are zero if there is no such want. Fails only if ret->size
 * is not set (USAGE). */
CKPT_PUBLIC int ckpt_load_want_info(const struct ckpt_load *load, size_t want,
                                    struct ckpt_want_info *ret, struct ckpt_err *err);

/* Set the destination of a want, before ckpt_load_start. The dtype, if given, must be that of the
 * declaration. */
CKPT_PUBLIC int ckpt_load_set_dest(struct ckpt_load *load, size_t want,
                                   const struct ckpt_dest *dest, struct ckpt_err *err);

/* ---- planning and running ---- */

/* COLLECTIVE. Exchange the wants and agree on a plan. CONFLICT: the ranks see different checkpoints
 * or steps (for example directories with different names), or have different options. STALE: the
 * checkpoint was saved again between the times at which two ranks opened it. LIMIT: host_bytes is
 * too small; the text says how much is needed. */
CKPT_PUBLIC int ckpt_load_plan(struct ckpt_load *load, struct ckpt_err *err);

/* COLLECTIVE, but it does not wait for other ranks. Start the load. Every want that has elements
 * must have a destination. If the start fails on one rank, that rank waits until the others know of
 * it; the load has then failed on all ranks and cannot be started again. Only a load of a single
 * rank that lacked a destination may be started again. A load that has ended is reloaded before it
 * is started again. */
CKPT_PUBLIC int ckpt_load_start(struct ckpt_load *load, struct ckpt_err *err);

/* Wait for the end of the load. 0: all wants of all ranks have arrived. 1: not yet, after
 * timeout_ms milliseconds (UINT32_MAX: no limit; 0: do not wait). -1: the load has failed on all
 * ranks. */
CKPT_PUBLIC int ckpt_load_wait(struct ckpt_load *load, uint32_t timeout_ms, struct ckpt_err *err);

/* Wait for the next want to arrive; each want is reported once, in the order of arrival. 0:
 * *ret_want has arrived and may be used at once, although the load can still fail. 1: none within
 * timeout_ms milliseconds. 2: all wants have been reported. -1: the load has failed. */
CKPT_PUBLIC int ckpt_load_next(struct ckpt_load *load, uint32_t timeout_ms, size_t *ret_want,
                               struct ckpt_err *err);

/* COLLECTIVE. Pause a load that runs: from the return of this call to ckpt_load_resume the ranks
 * exchange nothing, so that the program can use the network, or its devices for operations of other
 * NCCL communicators (load_nccl.h). All ranks stop after the same window. Each goes on with what it
 * reads for itself alone, and reads ahead as far as its memory permits. 0: the load is paused, or
 * over. 1: not yet after timeout_ms milliseconds (UINT32_MAX: no limit); call it again. -1: the
 * load has failed.
 *
 * All ranks must pause, and resume, within exchange_timeout_ms of each other. Loads wait for paused
 * ranks as long as it takes; wants go on arriving as long as something is read. May be called from
 * any thread. */
CKPT_PUBLIC int ckpt_load_pause(struct ckpt_load *load, uint32_t timeout_ms, struct ckpt_err *err);

/* COLLECTIVE, but it does not wait for other ranks. Go on after ckpt_load_pause has returned 0; on
 * devices, after the work that is queued on the caller's stream now. Nothing happens if the load is
 * not paused, or is over. */
CKPT_PUBLIC int ckpt_load_resume(struct ckpt_load *load, struct ckpt_err *err);

/* COLLECTIVE. After the end of a load, good or bad, get ready to run it again: the same wants into
 * the same destinations, from `view`, such as the view of a later step (NULL: from the same view
 * again). The ranks do not exchange their wants again; they compare what they see, as in
 * ckpt_load_plan, and each of them plans anew. Destinations may be set until ckpt_load_start, which
 * follows. The statistics are then those of the new run, and plan_s the time of this call.
 *
 * changed_only: tensors that are known to be as in the last run are not read and not sent, and
 * their wants have arrived at the start. The caller vouches that nobody has written to the
 * destinations since. It is known, without reading data, of tensors that both views make of the
 * same bytes of the same files: those that a step of changes (slime, SkyRL) does not touch. Where
 * nothing is known (other formats; a whole version, or another base, begins a new chain), where the
 * last run has failed, or ranks do not know the same, everything is sent; rank 0 logs that, and the
 * statistics tell what was skipped.
 *
 * CONFLICT: the new view has not the same tensors with the same shapes and dtypes; the text names
 * the first that differs. After that, or after any other failure, the load may be reloaded from
 * another view or freed. USAGE: the load still runs, or its last run has left a read that has not
 * returned within read_timeout_ms (reads that are under way after a failure are waited for). */
CKPT_PUBLIC int ckpt_load_reload(struct ckpt_load *load, struct ckpt_view *view, bool changed_only,
                                 struct ckpt_err *err);

/* Stop the load: it fails with CANCELLED on every rank. Call ckpt_load_wait afterwards. May be
 * called from any thread. */
CKPT_PUBLIC void ckpt_load_cancel(struct ckpt_load *load);

/* ---- what it cost ---- */

struct ckpt_load_stats {
    size_t size;             /* sizeof(struct ckpt_load_stats), set before the call */
    uint64_t needed_bytes;   /* size of this rank's wants, in the dtypes in which they are read */
    uint64_t unique_bytes;   /* stored bytes that any rank needs, counted once */
    uint64_t read_bytes;     /* read from storage by this rank */
    uint64_t reads;          /* number of reads */
    uint64_t sent_bytes;     /* sent to other ranks */
    uint64_t received_bytes; /* received from other ranks */
    uint64_t buffer_bytes;   /* memory used out of host_bytes */
    uint64_t device_bytes;   /* as buffer_bytes, but device memory */
    double plan_s, wall_s;   /* duration of ckpt_load_plan; from start to end */
    double first_s;          /* from start to the arrival of the first want */
    double read_s, place_s;  /* time spent reading and copying, summed over threads */
    double send_s;           /* busy time of the thread that sends and receives */
    uint64_t kept_bytes;  /* of buffer_bytes, rounded up to pages: pinned memory that the comm keeps
                             for its next load (ckpt_comm_release) */
    double exchange_rate; /* bytes a second that a rank received in its fastest window of 1 MiB or
                             more; 0: there was none. Of the job: the least of all ranks. The next
                             load of the comm plans by it where options.rates says nothing */
    double setup_s; /* seconds that the comm has spent on making communicators, for this load and
                       earlier ones; 0 in host memory over TCP */
    uint64_t skipped_bytes;   /* of wants that a reload has not sent again (changed_only) */
    uint64_t skipped_tensors; /* the view's tensors that it has not sent, to no rank */
    uint64_t asked_bytes; /* of read_bytes: those that another rank has read and sent to this one,
                             which has not the file (ckpt_load_open_local) */
};

/* The statistics of this rank (own) and of the whole job (job), either of which may be NULL. Those
 * of the job are sums over all ranks, except that buffer_bytes, device_bytes, kept_bytes, wall_s,
 * first_s and setup_s are the largest of any rank, unique_bytes and skipped_tensors are counted
 * once, and plan_s is this rank's. They are known only after the load has succeeded. Fails only if
 * a struct's size is not set (USAGE). */
CKPT_PUBLIC int ckpt_load_stats(const struct ckpt_load *load, struct ckpt_load_stats *own,
                                struct ckpt_load_stats *job, struct ckpt_err *err);

/* Which ranks read, as the plan decided: "each", "node" or "once". Static storage. */
CKPT_PUBLIC const char *ckpt_load_readers(const struct ckpt_load *load);

/* The rates by which the plan decided: those given in the options, or the library's assumptions.
 * shared_storage is 0 unless it was given. */
CKPT_PUBLIC void ckpt_load_rates(const struct ckpt_load *load, struct ckpt_rates *ret);

/* ---- reading one box ---- */

/* Read the elements [lo[d], lo[d]+n[d]) of tensor i of the view (lo == NULL: all), dense and
 * row-major, in the dtype of the view, into buf. Needs no comm. Safe from many threads. */
CKPT_PUBLIC int ckpt_view_box_pread(struct ckpt_view *view, size_t i, const uint64_t *lo,
                                    const uint64_t *n, void *buf, struct ckpt_err *err);

/* ---- planning only ---- */

/* Open a run of which each node has only some files, for ckpt_load_model, which then plans what
 * ckpt_load_open_local and a load would do; layout, ranks and ranks_per_node are as there. `path`
 * contains {node}: the directories of all nodes, counted from 0, are looked at from this machine; a
 * node may have none. Or it is a directory with all files, and `list` a file that says which node
 * has what: lines NODE PATTERN, where the pattern (fnmatch(3); '*' matches '/', too) is of paths
 * below the run's directory, and NODE a number or '*', which is every node. Empty lines and lines
 * that begin with '#' say nothing. USAGE: a line is neither, or a file is named by none. Sizes of
 * what several nodes have are compared, and no contents. The caller releases *ret_view. */
CKPT_PUBLIC int ckpt_load_open_nodes(const char *path, const char *list, const char *layout,
                                     uint32_t ranks, uint32_t ranks_per_node,
                                     const struct ckpt_options *opt, const char *step,
                                     struct ckpt_view **ret_view, struct ckpt_err *err);

/* Plan without loading: what a job of `ranks` ranks (0: the product of the layout's numbers),
 * `ranks_per_node` of them on each node, would do under a layout (as in ckpt_load_want_layout), if
 * each `share_ranks` consecutive ranks share what they read (0: all ranks; opt->share must be 0).
 * transport: "nccl": destinations are on devices; anything else, or NULL: in host memory. *ret_json
 * is JSON text that the caller frees. It has reads, bytes and transfers per rank (least, mean,
 * most), the estimated time of each way to read, by opt->rates, and `exchanges`: the collectives of
 * the rank that exchanges most, each with its call, its members and on how many nodes they are, the
 * number of windows and the bytes of a window. Of a run of ckpt_load_open_nodes it also has
 * asked_bytes, which ranks ask of others, and `by_node`: what the ranks of each node read of their
 * own files, and what they ask of others. No tensor data is read. */
CKPT_PUBLIC int ckpt_load_model(struct ckpt_view *view, const char *layout, uint32_t ranks,
                                uint32_t ranks_per_node, uint32_t share_ranks,
                                const char *transport, const struct ckpt_load_options *opt,
                                char **ret_json, struct ckpt_err *err);

#ifdef __cplusplus
}
#endif

#endif
