/* SPDX-License-Identifier: Apache-2.0 */
/* How far an unfinished export is: by its job and its journals alone, without the checkpoint. */
#include <dirent.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/err.h"
#include "base/json.h"
#include "base/mem.h"
#include "common.h"
#include "out.h"
#include "tool/export/export.h"

enum { MOST_SHOWN = 20 }; /* files that are named for people */

/* The files of the job's list. */
static int list_files(const json_t *what, struct ckpt_items *items, struct ckpt_err *err)
{
    const json_t *list = json_object_get(what, "files");

    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *file = json_array_get(list, i);
        const char *name = ckpt_json_str(file, "name");
        uint64_t bytes;
        if (!name || !ckpt_json_u64(file, "bytes", &bytes) || bytes > INT64_MAX)
            return ckpt_fail(err, CKPT_FORMAT, "the job's list of files is not an export's");
        if (ckpt_items_add_name(items, name, bytes, err) < 0)
            return -1;
    }
    return 0;
}

static int take(void *ctx, const json_t *line, struct ckpt_err *err)
{
    return ckpt_done_take(ctx, line, err);
}

/* The bytes of a file that are not on disk. */
static uint64_t missing_of(const struct ckpt_done *done, size_t item)
{
    uint64_t sum = 0, from, to, prefix = 0;

    for (size_t i = 0; i < done->file[item].prefix.len; i++)
        if (done->file[item].prefix.ptr[i].len > prefix)
            prefix = done->file[item].prefix.ptr[i].len;
    for (size_t u = done->spans->first[item]; u < done->spans->first[item + 1]; u++) {
        (void)ckpt_spans_place(done->spans, done->items, u, &from, &to);
        if (!ckpt_done_has(done, item, u))
            sum += to - (prefix > from ? prefix : from);
    }
    return sum;
}

static const char *state_of(const struct ckpt_process *p)
{
    return p->lives                      ? "writes"
           : p->has_ended && !p->is_good ? "has failed"
           : p->has_ended                ? "has ended"
                                         : "was killed";
}

static json_t *processes(const struct ckpt_job *job)
{
    json_t *list = json_array();

    for (size_t i = 0; i < job->all.len; i++) {
        const struct ckpt_process *p = &job->all.ptr[i];
        if (p->is_known)
            ckpt_json_append(&list, json_pack("{s:o, s:I, s:I, s:I, s:s}", "host",
                                              ckptfs_json_text(p->host), "pid", (json_int_t)p->pid,
                                              "part", (json_int_t)p->part, "parts",
                                              (json_int_t)p->parts, "state", state_of(p)));
    }
    return list;
}

/* Put together what the job says and what is done. */
static json_t *put_together(const char *dest, const struct ckpt_job *job, const json_t *what,
                            const struct ckpt_done *done)
{
    json_t *lacking = json_array();
    uint64_t missing = 0;
    size_t whole = 0;

    for (size_t i = 0; i < done->items->n; i++) {
        const uint64_t bytes = missing_of(done, i);
        missing += bytes;
        whole += done->file[i].whole;
        if (!done->file[i].whole)
            ckpt_json_append(&lacking, json_pack("{s:s, s:I}", "name", done->items->item[i].path,
                                                 "bytes", (json_int_t)bytes));
    }
    return json_pack("{s:o, s:s, s:s, s:s, s:s, s:I, s:I, s:I, s:I, s:o, s:o}", "unfinished_export",
                     ckptfs_json_text(dest), "export", ckpt_json_str_or(what, "export", ""),
                     "command", ckpt_json_str_or(what, "command", ""), "only",
                     ckpt_json_str_or(what, "only", ""), "folder", job->path, "files",
                     (json_int_t)done->items->n, "bytes", (json_int_t)done->items->bytes,
                     "whole_files", (json_int_t)whole, "written_bytes",
                     (json_int_t)(done->items->bytes - missing), "lacking", lacking, "processes",
                     processes(job));
}

static int describe(const char *dest, struct ckpt_job *job, const json_t *what, json_t **ret,
                    struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_items_release) struct ckpt_items items = {0};
    ckpt_cleanup(ckpt_spans_release) struct ckpt_spans spans = {0};
    ckpt_cleanup(ckpt_done_release) struct ckpt_done done = {0};
    uint64_t cut;

    if (!ckpt_json_u64(what, "cut", &cut) || cut < 1)
        return ckpt_fail(err, CKPT_FORMAT, "%s: the job is not an export's", job->path);
    if (list_files(what, &items, err) < 0 || ckpt_spans_divide(&items, cut, 1, &spans, err) < 0 ||
        ckpt_done_init(&done, &items, &spans, err) < 0 ||
        ckpt_job_refresh(job, take, &done, err) < 0)
        return ckpt_err_in(err, "%s", job->path);
    *ret = put_together(dest, job, what, &done);
    return *ret ? 0 : ckpt_nomem(err);
}

/* Is it an empty folder, but for a work folder? A path that is not there is, too. */
static bool is_empty(const char *dest)
{
    DIR *d = opendir(dest);
    struct stat st;
    bool empty = d || stat(dest, &st) < 0;

    for (struct dirent *e; d && empty && (e = readdir(d));)
        empty = e->d_name[0] == '.';
    if (d)
        (void)closedir(d);
    return empty;
}

int ckpt_export_state(const char *dest, json_t **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *what = NULL;
    struct ckpt_job job = {0};

    *ret = NULL;
    if (strstr(dest, "://") || !is_empty(dest))
        return 0;
    int rc = ckpt_dest_look(dest, &job, &what, err);
    if (rc > 0)
        rc = job.files < 0 ? 0 : describe(dest, &job, what, ret, err);
    ckpt_job_release(&job);
    return rc < 0 ? -1 : 0;
}

static uint64_t number(const json_t *j, const char *key)
{
    return (uint64_t)json_integer_value(json_object_get(j, key));
}

void ckpt_export_print_state(const json_t *state)
{
    char a[CKPT_OUT_SIZE], b[CKPT_OUT_SIZE];
    const json_t *lacking = json_object_get(state, "lacking"),
                 *all = json_object_get(state, "processes");

    (void)printf("export    unfinished, of %s\n", ckpt_json_str_or(state, "export", ""));
    (void)printf("folder    %s\n", ckpt_json_str_or(state, "folder", ""));
    (void)printf("begun by  %s\n", ckpt_json_str_or(state, "command", ""));
    (void)printf("written   %s of %s, %" PRIu64 " of %" PRIu64 " files are whole\n",
                 ckpt_out_size(number(state, "written_bytes"), a),
                 ckpt_out_size(number(state, "bytes"), b), number(state, "whole_files"),
                 number(state, "files"));
    for (size_t i = 0; i < json_array_size(lacking); i++) {
        const json_t *file = json_array_get(lacking, i);
        if (i == MOST_SHOWN) {
            (void)printf("          and %zu more files\n", json_array_size(lacking) - i);
            break;
        }
        if (number(file, "bytes") || number(state, "bytes") == 0)
            (void)printf("%s %s: %s\n", i ? "         " : "lacking  ",
                         ckpt_json_str_or(file, "name", ""),
                         ckpt_out_size(number(file, "bytes"), a));
        else
            (void)printf("%s %s: is written, and is read back\n", i ? "         " : "lacking  ",
                         ckpt_json_str_or(file, "name", ""));
    }
    for (size_t i = 0; i < json_array_size(all); i++) {
        const json_t *p = json_array_get(all, i);
        (void)printf("%s part %" PRIu64 "/%" PRIu64 " %s (host %s, process %" PRIu64 ")\n",
                     i ? "         " : "processes", number(p, "part"), number(p, "parts"),
                     ckpt_json_str_or(p, "state", ""), ckpt_json_str_or(p, "host", ""),
                     number(p, "pid"));
    }
}
