/* SPDX-License-Identifier: Apache-2.0 */
/* The content of stats.json and stats.prom. */
#include "mount/mount.h"

#include <stdlib.h>

#include <fuse_lowlevel.h>
#include <jansson.h>

#include "base/json.h"
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

/* Add the facts about the run: where it is stored, which steps' mean it is. */
static void add_facts(struct ckpt_run *run, json_t *to)
{
    ckpt_cleanup(ckpt_freep) char *text = NULL;
    struct ckpt_err err;

    if (run && ckpt_run_facts(run, &text, &err) == 0) {
        ckpt_cleanup(ckpt_json_decrefp) json_t *facts = json_loads(text, 0, NULL);
        (void)json_object_update(to, facts);
    }
}

/* The warnings of all views opened so far. */
static json_t *warnings_of(struct ckpt_run *run)
{
    struct ckpt_err err = {0};
    ckpt_cleanup(ckpt_freep) char *text = NULL;
    json_t *list = NULL;

    if (run && ckpt_run_warnings(run, &text, &err) == 0)
        list = json_loads(text, 0, NULL);
    return list ? list : json_array();
}

static json_t *stats(struct ckptfs *fs)
{
    struct ckpt_stats run_stats = {.size = sizeof run_stats};
    struct ckpt_run *run = atomic_load(&fs->refresh.run);
    ckpt_cleanup(ckptfs_steps_releasep) struct ckptfs_steps *steps =
        ckptfs_steps_hold(&fs->refresh);
    struct ckptfs_counters *c = &fs->count;

    if (run)
        (void)ckpt_run_stats(run, &run_stats, NULL);
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
    add_facts(run, j);
    ckptfs_json_bucket(j);
    return j;
}

char *ckptfs_stats_text(struct ckptfs *fs)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *j = stats(fs);
    ckpt_cleanup(ckpt_freep) char *text =
        j ? json_dumps(j, JSON_INDENT(2) | JSON_PRESERVE_ORDER) : NULL;
    return text ? ckpt_asprintf("%s\n", text) : NULL;
}

/* A number of stats.json. `in` NULL: at its top. */
struct metric {
    const char *in, *key, *name, *help;
    bool is_counter;
};

static const struct metric metrics[] = {
    {NULL, "uptime_s", "uptime_seconds", "Time since the mount was made", false},
    {NULL, "steps", "steps", "Steps that are shown", false},
    {NULL, "readahead_kib", "readahead_kib", "Read-ahead of the mount", false},
    {"mount", "lookups", "mount_lookups_total", "Names looked up", true},
    {"mount", "opens", "mount_opens_total", "Files opened", true},
    {"mount", "reads", "mount_reads_total", "Reads of files", true},
    {"mount", "bytes", "mount_bytes_total", "Bytes read from files", true},
    {"mount", "errors", "mount_errors_total", "Requests that failed", true},
    {"mount", "open_files", "mount_open_files", "Files that are open", false},
    {"mount", "nodes", "mount_nodes", "Inodes that the kernel holds", false},
    {"mount", "waiting", "mount_waiting", "Requests that wait for storage", false},
    {"source", "requests", "source_requests_total", "Reads of views", true},
    {"source", "bytes", "source_bytes_total", "Bytes of these reads", true},
    {"source", "reads", "source_reads_total", "Reads of shards", true},
    {"source", "read_bytes", "source_read_bytes_total", "Bytes read from shards", true},
    {"source", "cache_bytes", "source_cache_bytes", "Memory that holds transposed rows", false},
    {"source", "open_files", "source_open_files", "Shards that are open", false},
    {"source", "errors", "source_errors_total", "Reads of views that failed", true},
    {"bucket", "requests", "bucket_requests_total", "Requests to the store of a bucket", true},
    {"bucket", "bytes", "bucket_bytes_total", "Bytes of its answers", true},
    {"bucket", "retries", "bucket_retries_total", "Requests that were repeated", true},
    {"bucket", "connections", "bucket_connections_total", "Connections made to it", true},
};

char *ckptfs_stats_prometheus(struct ckptfs *fs)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *j = stats(fs);
    /* a string of JSON without control characters is a label's value, too */
    ckpt_cleanup(ckpt_freep) char *run =
        j ? json_dumps(json_object_get(j, "run"), JSON_ENCODE_ANY) : NULL;
    ckpt_cleanup(ckpt_str_release) struct ckpt_str out = {0};

    if (!run)
        return NULL;
    ckpt_str_printf(&out,
                    "# HELP ckptfs_info The version, and the run that is mounted\n"
                    "# TYPE ckptfs_info gauge\nckptfs_info{version=\"%s\",run=%s} 1\n",
                    ckpt_version(), run);
    for (size_t i = 0; i < sizeof metrics / sizeof *metrics; i++) {
        const struct metric *m = &metrics[i];
        const json_t *value = json_object_get(m->in ? json_object_get(j, m->in) : j, m->key);
        ckpt_str_printf(
            &out, "# HELP ckptfs_%s %s\n# TYPE ckptfs_%s %s\nckptfs_%s %" JSON_INTEGER_FORMAT "\n",
            m->name, m->help, m->name, m->is_counter ? "counter" : "gauge", m->name,
            json_integer_value(value));
    }
    ckpt_str_printf(&out,
                    "# HELP ckptfs_warnings Warnings of the steps that were opened\n"
                    "# TYPE ckptfs_warnings gauge\nckptfs_warnings %zu\n",
                    json_array_size(json_object_get(j, "warnings")));
    return out.failed ? NULL : ckpt_steal(&out.ptr);
}
