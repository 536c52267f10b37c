/* SPDX-License-Identifier: Apache-2.0 */
/* The commands of all programs and their options. The library's options are in its own table
 * (core/model/options.c). */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

#include "base/err.h"
#include "base/mem.h"
#include "cmdline.h"
#include "mount/config.h"
#include "tool.h"

enum { MOST_THREADS = 1024, MOST_JOBS = 256, MOST_RANKS = 1 << 20 };

const struct ckptfs_command ckptfs_commands[] = {
    {CKPTFS_MOUNT, "ckptfs", "RUN MOUNTPOINT",
     "Mount the checkpoints of a training run as Hugging Face model directories",
     "Every option may be written -o word=value,... too; a comma in a value is written '\\,'.\n"
     "Words of mount(8) and FUSE are understood: auto_unmount, allow_root, noexec, noatime,\n"
     "context=... fusermount3 -u MOUNTPOINT ends the mount.\n",
     "mount"},
    {CKPTFS_INFO, "ckpt info", "RUN", "Show what the run is, its steps, and what the model is",
     "Example: ckpt info run/checkpoints --step=1000\n",
     "show inspect status stat describe summary config steps"},
    {CKPTFS_LS, "ckpt ls", "RUN", "List the tensors, or the files",
     "Example: ckpt ls run/checkpoints --files\n", "list dir tensors keys names files"},
    {CKPTFS_EXPLAIN, "ckpt explain", "RUN TENSOR", "Show where a tensor's bytes come from",
     "Example: ckpt explain run/checkpoints lm_head.weight --svg=head.svg\n"
     "A pattern stands for all tensors that match: '*.q_proj.*'\n",
     "where trace locate tensor why"},
    {CKPTFS_EXPORT, "ckpt export", "RUN DEST", "Write the model directory DEST",
     "Example: ckpt export run/checkpoints my-model --dtype=bfloat16\n"
     "Run it again to resume, or to compare a finished export.\n"
     "Many machines write one export: srun -N 8 ckpt export RUN DEST, or --part I/N by hand.\n"
     "Every step, while training goes on:\n"
     "  ckpt export run/checkpoints models --steps=new --watch --then ./evaluate {}\n",
     "convert save write merge consolidate extract copy cp dump to_hf import"},
    {CKPTFS_VERIFY, "ckpt verify", "A B", "Compare two runs, checkpoints or model directories",
     "Example: ckpt verify run/checkpoints run/checkpoints --step=10 --other-step=20\n"
     "-o and --step are for A.\n",
     "diff compare cmp check validate equal"},
    {CKPTFS_DELTA, "ckpt delta", "A B OUT", "Write what has changed from A to B",
     "Example: ckpt delta run/checkpoints run/checkpoints sync/weight_v000007 --step=6 "
     "--other-step=7\n"
     "-o is for A, and for B unless --other-option is given.\n",
     "patch changes update"},
    {CKPTFS_DIGEST, "ckpt digest", "RUN", "Print XXH3-128 of every file, or of every tensor",
     "Example: ckpt digest run/checkpoints --tensors\n",
     "hash checksum md5sum sha256sum sum fingerprint"},
    {CKPTFS_LOAD, "ckpt load", "RUN",
     "Load the weights into the ranks of a job: under mpirun, torchrun, or alone",
     "Example: mpirun -n 8 ckpt load run/checkpoints --layout tp=4,dp=2\n", "restore"},
    {CKPTFS_PLAN, "ckpt plan", "RUN", "Estimate what such a load would read, send and take",
     "Example: ckpt plan run/checkpoints --layout tp=8,dp=128\n", "estimate simulate predict cost"},
    {0, NULL, NULL, NULL, NULL, NULL}};

static int set_rates(void *into, const struct ckpt_option *o, const char *value,
                     struct ckpt_err *err)
{
    struct ckpt_rates *r = &((struct ckpt_tool *)into)->load.rates;
    static const char *const key[] = {"node_storage", "shared_storage", "page_cache",
                                      "copy",         "local_link",     "network"};
    double *const rate[] = {&r->node_storage, &r->shared_storage, &r->page_cache,
                            &r->copy,         &r->local_link,     &r->network};
    ckpt_cleanup(ckpt_freep) char *copy = strdup(value ? value : "");
    char *rest = copy, *word, *number;

    if (!copy)
        return ckpt_nomem(err);
    while (ckptfs_next_option(&rest, &word, &number)) {
        char *end = NULL;
        size_t k = 0;
        while (k < 6 && strcmp(word, key[k]) != 0)
            k++;
        const double n = k < 6 && number ? strtod(number, &end) : 0;
        if (!end || *end || !(n >= 1 && isfinite(n)))
            return ckpt_fail(err, CKPT_USAGE,
                             "option %s: expected node_storage=N, shared_storage=N, page_cache=N, "
                             "copy=N, local_link=N, network=N in bytes a second, 1 or more",
                             o->word);
        *rate[k] = n;
    }
    return 0;
}

static int set_other(void *into, const struct ckpt_option *o, const char *value,
                     struct ckpt_err *err)
{
    struct ckpt_tool *t = into;
    ckpt_cleanup(ckpt_freep) char *copy = strdup(value);
    char *rest = copy, *word, *of_word;

    (void)o;
    if (!copy)
        return ckpt_nomem(err);
    if (!t->other && ckpt_options_new(&t->other, err) < 0)
        return -1;
    while (ckptfs_next_option(&rest, &word, &of_word))
        if (ckpt_options_set(t->other, word, of_word, err) < 0)
            return -1;
    return 0;
}

static int set_delta_format(void *into, const struct ckpt_option *o, const char *value,
                            struct ckpt_err *err)
{
    const struct ckpt_option text = {
        .word = o->word, .kind = CKPT_OPTION_TEXT, .at = offsetof(struct ckpt_tool, delta_format)};
    uint32_t word;

    return ckpt_option_choice(o, value, &word, err) < 0 ? -1
                                                        : ckpt_option_set(&text, into, value, err);
}

static int set_tolerance(void *into, const struct ckpt_option *o, const char *value,
                         struct ckpt_err *err)
{
    char *end = NULL;
    const double n = strtod(value, &end);

    if (end == value || *end || !(n >= 0 && isfinite(n)))
        return ckpt_fail(err, CKPT_USAGE, "option %s: '%s' is not a number of 0 or more", o->word,
                         value);
    ((struct ckpt_tool *)into)->tolerance = n;
    return 0;
}

#define MOUNT(kind_, member)                                                                       \
    .of = CKPTFS_MOUNT, .kind = CKPT_OPTION_##kind_, .at = offsetof(struct ckptfs_config, member)
#define TOOL(commands, kind_, member)                                                              \
    .of = (commands), .kind = CKPT_OPTION_##kind_, .at = offsetof(struct ckpt_tool, member)
#define LOADS (CKPTFS_LOAD | CKPTFS_PLAN)
#define DELTAS (CKPTFS_DELTA | CKPTFS_EXPORT)

const struct ckpt_option ckptfs_options[] = {
    /* the mount */
    {"foreground", NULL, "stay in the foreground", .letter = 'f', MOUNT(FLAG, foreground),
     .also = "fg no_daemon nodaemon no_fork"},
    {"debug", NULL, "stay there, and say what was negotiated with the kernel", .letter = 'd',
     MOUNT(FLAG, debug), .also = "verbose log_level"},
    {"wait", NULL, "mount even if there is no readable step yet", MOUNT(FLAG, wait)},
    {"io", "buffered|direct", "direct: bypass the page cache (for exports)", MOUNT(CHOICE, direct),
     .also = "direct:direct direct_io:direct o_direct:direct buffered:buffered"},
    {"readahead", "KIB", "the mount's read-ahead (2048; needs root; 0: the kernel's)",
     MOUNT(NUMBER, readahead_kib), .most = 1 << 20, .also = "read_ahead max_readahead"},
    {"threads", "N", "threads that are kept for requests (10)", MOUNT(NUMBER, threads),
     .most = MOST_THREADS,
     .also = "jobs workers num_workers max_workers num_threads nthreads max_threads"},
    {"allow_other", NULL, "let all users access the mount", MOUNT(FLAG, allow_other)},
    {"uid", "N", "the owner that files show", MOUNT(NUMBER, uid), .most = (uid_t)-2},
    {"gid", "N", "the group that files show", MOUNT(NUMBER, gid), .most = (gid_t)-2},
    {"file_mode", "OCTAL", "the mode that files show (644)", MOUNT(OCTAL, file_mode), .most = 0777},
    {"dir_mode", "OCTAL", "the mode that directories show (755)", MOUNT(OCTAL, dir_mode),
     .most = 0777},
    {"umask", "OCTAL", "bits that are removed from both", MOUNT(OCTAL, umask), .most = 0777},
    {"sandbox", "yes|no", "no: let the daemon open, run and connect to whatever its user may",
     MOUNT(FLAG, sandbox), .also = "no_sandbox:no seccomp"},
    {"log-format", "text|json", "json: each message is a line of JSON (text)",
     MOUNT(CHOICE, log_json), .also = "json:json log_json:json"},
    {"null", NULL, NULL, MOUNT(FLAG, null_reads)}, /* a baseline for benchmarks */

    /* the tool */
    {"step", "N", "a step, by name or number (the latest)", TOOL(CKPTFS_TOOL, TEXT, step),
     .also = "iteration iter iterations iter_num ckpt_step checkpoint checkpoint_step "
             "checkpoint_id global_step load_step target_step epoch tag ckpt_convert_step"},
    {"json", NULL, "print JSON, for programs", TOOL(CKPTFS_TOOL, FLAG, json),
     .also = "output_json json_output machine_readable"},
    {"log-format", "text|json", "json: each message is a line of JSON (text)",
     TOOL(CKPTFS_TOOL, CHOICE, log_json), .also = "log_json:json"},
    {"files", NULL, "list the files", TOOL(CKPTFS_LS, FLAG, files), .also = "list_files"},
    {"svg", "FILE", "draw which shard holds which part of the tensor",
     TOOL(CKPTFS_EXPLAIN, TEXT, svg), .also = "plot draw figure image picture"},
    {"tensors", NULL, "tensors only, not files", TOOL(CKPTFS_VERIFY | CKPTFS_DIGEST, FLAG, tensors),
     .also = "tensors_only only_tensors weights_only per_tensor"},
    {"weights-only", NULL, "write only the weights and their index",
     TOOL(CKPTFS_EXPORT, FLAG, weights_only), .also = "only_weights no_config no_tokenizer"},
    {"no-weights", NULL, "write only the other files", TOOL(CKPTFS_EXPORT, FLAG, no_weights),
     .also = "config_only tokenizer_only skip_weights only_config"},
    {"part", "I/N",
     "write part I of N, from 1: N processes write one export, at once or one after the other",
     TOOL(CKPTFS_EXPORT, TEXT, part), .also = "shard rank part_of"},
    {"alone", NULL, "write everything, whatever mpirun or srun has put into the environment",
     TOOL(CKPTFS_EXPORT, FLAG, alone), .also = "single no_mpi no_slurm"},
    {"steps", "all|A..B|new",
     "a directory DEST/STEP for every step, for those with a number from A to B, or for those that "
     "have no finished directory",
     TOOL(CKPTFS_EXPORT, TEXT, steps), .also = "all:all all_steps:all"},
    {"watch", NULL,
     "then wait for new steps, until SIGTERM (or SIGINT, unless that is ignored where it was "
     "started)",
     TOOL(CKPTFS_EXPORT, FLAG, watch), .also = "follow monitor poll daemon"},
    {"then", "CMD ARG...",
     "run this after each export that wrote something; {} is its directory. Last on the line",
     .also = "hook on_export post_hook exec run_after", .of = CKPTFS_EXPORT, .takes_rest = true},
    {"other-step", "N", "a step of B (the latest)",
     TOOL(CKPTFS_VERIFY | CKPTFS_DELTA, TEXT, other_step), .also = "step_b step2 second_step"},
    {"other-option", "WORD=VALUE,...", "what is shown of B: as -o, which is for A",
     .of = CKPTFS_VERIFY | CKPTFS_DELTA, .set = set_other},
    {"delta-from", "STEP", "write what has changed since that step, as ckpt delta does",
     TOOL(CKPTFS_EXPORT, TEXT, delta_from), .also = "delta since incremental diff_from"},
    {"format", "slime|skyrl", "whose files and names (slime)", .of = DELTAS,
     .set = set_delta_format},
    {"encoding", "xor|overwrite", "all bytes by XOR, or the changed ones (xor)",
     TOOL(DELTAS, CHOICE, encoding)},
    {"base-version", "N", "A's version (one less than that at the end of OUT's name)",
     TOOL(DELTAS, TEXT, base_version)},
    {"tolerance", "T", "elements are equal whose difference is not greater (0)",
     .also = "atol rtol tol eps epsilon threshold", .of = CKPTFS_VERIFY, .set = set_tolerance},
    {"jobs", "N", "threads (one for each processor, from 4 to 16)",
     TOOL(CKPTFS_EXPORT | CKPTFS_VERIFY | CKPTFS_DIGEST | CKPTFS_DELTA, NUMBER, jobs), .least = 1,
     .most = MOST_JOBS,
     .also = "j threads workers num_workers max_workers num_threads nthreads num_proc nproc "
             "num_processes processes parallel parallelism cpus"},
    {"quiet", NULL, "no progress bar", .letter = 'q',
     TOOL(CKPTFS_EXPORT | CKPTFS_VERIFY | CKPTFS_DIGEST | CKPTFS_DELTA, FLAG, quiet),
     .also = "silent no_progress disable_tqdm progress"},
    {"verbose", NULL, "all details", .letter = 'v',
     TOOL(CKPTFS_INFO | CKPTFS_EXPLAIN, FLAG, verbose), .also = "debug details long detailed all"},

    /* the loader */
    {"layout", "LAYOUT",
     "who needs what: tp=N,pp=N,ep=N,dp=N,fsdp=N, whose product is the number of ranks",
     TOOL(LOADS, TEXT, layout),
     .also = "mesh device_mesh parallel parallelism tp_size:tp=N tensor_parallel_size:tp=N "
             "tensor_model_parallel_size:tp=N pp_size:pp=N pipeline_parallel_size:pp=N "
             "pipeline_model_parallel_size:pp=N expert_parallel_size:ep=N "
             "expert_model_parallel_size:ep=N dp:dp=N dp_size:dp=N data_parallel_size:dp=N "
             "fsdp:fsdp=N"},
    {"ranks", "N", "ranks of the job (the product of the layout's numbers)",
     TOOL(CKPTFS_PLAN, NUMBER, ranks), .least = 1, .most = MOST_RANKS, .refused_by = CKPTFS_LOAD,
     .also = "world_size num_ranks nranks np nproc num_gpus gpus",
     .why = "its launcher decides how many ranks there are; use ckpt plan"},
    {"ranks-per-node", "N", "ranks on each node (8)", TOOL(CKPTFS_PLAN, NUMBER, ranks_per_node),
     .least = 1, .most = MOST_RANKS, .refused_by = CKPTFS_LOAD,
     .also = "gpus_per_node nproc_per_node local_world_size ntasks_per_node num_gpus_per_node",
     .why = "its launcher decides where ranks are; use ckpt plan"},
    {"readers", "auto|once|node|each",
     "once: every byte by one rank of the job; node: of each node; each: every rank for itself; "
     "auto: what the rates say (auto)",
     TOOL(LOADS, CHOICE, load.readers)},
    {"share", "N", "only each N consecutive ranks share what they read (all)",
     TOOL(LOADS, NUMBER, share_ranks), .least = 1, .most = MOST_RANKS},
    {"local", NULL, "each node has only some of RUN's files (RUN may contain {node}, {rank})",
     TOOL(LOADS, FLAG, local), .also = "local_files node_local local_disk"},
    {"node-files", "FILE",
     "with --local: which node has what, if RUN has all files here: lines NODE PATTERN",
     TOOL(CKPTFS_PLAN, TEXT, node_files), .refused_by = CKPTFS_LOAD,
     .why = "ranks look at what their nodes have; use ckpt plan"},
    {"verify", NULL, "compare what every rank got with an independent read",
     TOOL(CKPTFS_LOAD, FLAG, verify), .refused_by = CKPTFS_PLAN,
     .why = "no data is read; use ckpt load"},
    {"check", NULL, "compare digests of what is sent with what arrives",
     TOOL(CKPTFS_LOAD, FLAG, load.verify), .refused_by = CKPTFS_PLAN,
     .why = "no data is sent; use ckpt load"},
    {"transport", "T",
     "self, tcp or mpi: not what the launcher suggests; nccl: into the memory of a CUDA device in "
     "each rank",
     TOOL(LOADS, TEXT, transport),
     .also = "backend dist_backend distributed_backend device:nccl cuda:nccl gpu:nccl nccl:nccl "
             "mpi:mpi tcp:tcp gloo:tcp"},
    {"host-bytes", "N", "memory for windows of each rank (256M)",
     TOOL(LOADS, BYTES, load.host_bytes), .also = "buffer_size host_memory pinned_memory memory"},
    {"device-bytes", "N", "the same of the rank's device (512M)",
     TOOL(LOADS, BYTES, load.device_bytes), .also = "device_memory gpu_memory"},
    {"window-bytes", "N", "size of a window, all ranks together",
     TOOL(LOADS, BYTES, load.window_bytes)},
    {"threads", "N", "threads that read, of each rank", TOOL(LOADS, NUMBER, load.threads),
     .least = 1, .most = 256,
     .also = "j jobs workers num_workers max_workers num_threads nthreads parallel_reads"},
    {"direct", "auto|never|always",
     "past the page cache (O_DIRECT); auto: what is not in it (auto)",
     TOOL(LOADS, CHOICE, load.direct), .also = "o_direct:always direct_io:always mmap"},
    {"read-timeout", "S", "seconds that one read may take (120)",
     TOOL(CKPTFS_LOAD, SECONDS, load.read_timeout_ms), .refused_by = CKPTFS_PLAN,
     .why = "no data is read; leave it out"},
    {"exchange-timeout", "S",
     "seconds without a heartbeat of another rank, or without a byte from its storage (300)",
     TOOL(CKPTFS_LOAD, SECONDS, load.exchange_timeout_ms), .refused_by = CKPTFS_PLAN,
     .why = "no rank waits for another; leave it out"},
    {"rates", "K=N,...",
     "bytes a second: node_storage, shared_storage, page_cache, copy, local_link, network",
     .of = LOADS, .set = set_rates},

    /* all: cmdline.c knows these by their letters */
    {"options", "WORD=VALUE,...",
     "options below, as in fstab(5); a comma in a value is written '\\,'", .letter = 'o',
     .of = UINT32_MAX},
    {"help", NULL, "this help", .letter = 'h', .of = UINT32_MAX},
    {"version", NULL, "the version", .letter = 'V', .of = UINT32_MAX},
};

/* The exporting commands, and those that print, of which none has --verbose. */
#define SHOWS (CKPTFS_LS | CKPTFS_VERIFY | CKPTFS_DIGEST)
#define OUTPUTS                                                                                    \
    "output output_dir output_path output_file out out_dir out_path outdir outfile dest dest_dir " \
    "dest_path destination save save_dir save_path target_dir target_path export_dir export_path " \
    "hf_output_dir huggingface_output_dir pytorch_dump_folder_path dump_path local_dir_to"
#define INPUTS                                                                                     \
    "i input input_dir input_path run run_dir src source source_dir source_path load_dir "         \
    "load_path load_from checkpoint_dir checkpoint_path checkpoint_input_path ckpt ckpt_dir "      \
    "ckpt_path local_dir resume_from_checkpoint megatron_path path dir"

const struct ckptfs_hint ckptfs_hints[] = {
    {CKPTFS_EXPORT, OUTPUTS, "DEST, the second argument, is the directory to write"},
    {CKPTFS_DELTA, OUTPUTS, "OUT, the third argument, is the directory to write"},
    {CKPTFS_MOUNT, OUTPUTS " mountpoint mount_point", "MOUNTPOINT is the second argument"},
    {CKPTFS_MOUNT | CKPTFS_INFO | CKPTFS_LS | CKPTFS_EXPLAIN | CKPTFS_EXPORT | CKPTFS_DIGEST |
         LOADS,
     INPUTS, "RUN, the first argument, is the run or one of its checkpoints"},
    {CKPTFS_VERIFY | CKPTFS_DELTA, INPUTS " a b left right other second",
     "A and B, the first arguments, are the runs or checkpoints"},
    {CKPTFS_EXPLAIN, "name tensor tensor_name key pattern", "TENSOR is the second argument"},
    {CKPTFS_MOUNT,
     "step iteration iter ckpt_step checkpoint checkpoint_step global_step tag latest",
     "a mount shows every step, MOUNTPOINT/STEP, and the latest, MOUNTPOINT/latest"},
    {CKPTFS_MOUNT, "unmount umount u", "fusermount3 -u MOUNTPOINT ends a mount"},
    {DELTAS, "force overwrite overwrite_output overwrite_output_dir exist_ok clobber yes y",
     "nothing is overwritten: an export resumes its own directory, and needs a new one otherwise"},
    {DELTAS, "resume restart", "the same command, run again, continues what was interrupted"},
    {DELTAS, "dry_run dryrun n simulate", "ckpt info and ckpt ls --files show what is written"},
    {CKPTFS_LOAD, "dry_run dryrun n simulate", "ckpt plan estimates a load"},
    {DELTAS | SHOWS, "verbose v debug log_level", "ckpt info RUN --verbose tells all details"},
    {LOADS, "verbose v debug log_level", "--json tells all figures"},
    {CKPTFS_LOAD, "world_size num_ranks nranks np nproc nproc_per_node num_gpus gpus nnodes",
     "the launcher (mpirun, torchrun) says how many ranks there are; ckpt plan has --ranks"},
    {DELTAS, "device export_device map_location cuda gpu use_gpu cpu use_cpu_initialization",
     "no device is used, and a model need not fit into memory"},
    {DELTAS, "push_to_hub repo_id hub_model_id upload hf_upload_path",
     "nothing is uploaded: export first, and upload DEST"},
    {DELTAS, "safe_serialization safetensors use_safetensors to_safetensors",
     "weights are always written as safetensors"},
    {UINT32_MAX, "trust_remote_code trust", "the code of a model is never run"},
    {UINT32_MAX, "from from_format input_format source_format source_type loader framework",
     "the format of RUN is recognised by its files"},
    {UINT32_MAX, "endpoint endpoint_url region profile aws_profile credentials",
     "a bucket's endpoint, region and credentials are those of AWS's tools (AWS_...)"},
    {0, NULL, NULL}};

const size_t ckptfs_noptions = sizeof ckptfs_options / sizeof *ckptfs_options;
