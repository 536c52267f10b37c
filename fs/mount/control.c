/* SPDX-License-Identifier: Apache-2.0 */
/* The content of stats.json. */
#include "mount/mount.h"

#include <stdlib.h>

#include <fuse_lowlevel.h>
#include <jansson.h>

#include "base/mem.h"
#include "base/str.h"
#include "common.h"

static json_int_t load(_Atomic uint64_t *n)
{
    return (json_int_t)atomic_load_explicit(n, memory_order_relaxed);
}

static json_t *settings(const struct ckptfs *fs)
{
    const struct ckptfs_negotiated *n = &fs->negotiated;
    char sandbox[64];

    return json_pack("{s:s, s:s, s:i, s:i, s:i, s:s, s:b, s:b, s:s}", "version", ckpt_version(),
                     "libfuse", fuse_pkgversion(), "protocol_minor", (int)n->proto_minor,
                     "max_read", (int)n->max_read, "threads", (int)fs->config->threads, "io",
                     fs->config->direct ? "direct" : "buffered", "direct_mmap", n->direct_mmap,
                     "null", fs->config->null_reads, "sandbox",
                     ckptfs_sandbox_text(&fs->sandbox, sandbox, sizeof sandbox));
}

/* The warnings of all views opened so far. */
static json_t *warnings_of(struct ckpt_run *run)
{
    struct ckpt_err err = {0};
    char *text = NULL;
    json_t *list = NULL;

    if (run && ckpt_run_warnings(run, &text, &err) == 0)
        list = json_loads(text, 0, NULL);
    free(text);
    return list ? list : json_array();
}

char *ckptfs_stats_text(struct ckptfs *fs)
{
    struct ckpt_stats run_stats = {.size = sizeof run_stats};
    struct ckpt_run *run = atomic_load(&fs->refresh.run);
    struct ckptfs_steps *steps = ckptfs_steps_hold(&fs->refresh);
    struct ckptfs_counters *c = &fs->count;

    if (run)
        ckpt_run_stats(run, &run_stats);
    json_t *j = json_pack(
        "{s:o, s:I, s:I, s:{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}, s:{s:I, s:I, s:I, s:I, s:I, "
        "s:I, "
        "s:I},"
        " s:o, s:i, s:s, s:o}",
        "run", ckptfs_json_text(fs->config->run), "uptime_s",
        (json_int_t)(time(NULL) - fs->started), "steps", (json_int_t)(steps ? steps->n : 0), /**/
        "mount", "lookups", load(&c->lookups), "opens", load(&c->opens), "reads", load(&c->reads),
        "bytes", load(&c->read_bytes), "errors", load(&c->errors), "open_files",
        load(&c->open_files), "nodes", (json_int_t)ckptfs_nodes_count(&fs->nodes), "waiting",
        (json_int_t)ckptfs_admission_waiting(&fs->admission), /**/
        "source", "requests", (json_int_t)run_stats.requests, "bytes", (json_int_t)run_stats.bytes,
        "reads", (json_int_t)run_stats.source_reads, "read_bytes",
        (json_int_t)run_stats.source_bytes, "cache_bytes", (json_int_t)run_stats.slab_bytes,
        "open_files", (json_int_t)run_stats.open_files, "errors", (json_int_t)run_stats.errors, /**/
        "settings", settings(fs), "readahead_kib", (int)fs->negotiated.readahead_kib, "bdi",
        fs->negotiated.dev, "warnings", warnings_of(run));
    ckptfs_steps_release(steps);
    ckpt_cleanup(ckpt_freep) char *text =
        j ? json_dumps(j, JSON_INDENT(2) | JSON_PRESERVE_ORDER) : NULL;
    json_decref(j);
    return text ? ckpt_asprintf("%s\n", text) : NULL;
}
