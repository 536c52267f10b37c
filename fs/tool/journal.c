/* SPDX-License-Identifier: Apache-2.0 */
/* Lines are appended one by one; the file is read back as a whole. */
#include "tool/journal.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/err.h"
#include "base/json.h"
#include "base/mem.h"
#include "common.h"

const char ckpt_journal_name[] = ".ckptfs-export";

/* Takes the line, which is NULL if there was no memory for it. */
static int append(const struct ckpt_journal *j, json_t *line, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *text = line ? json_dumps(line, JSON_COMPACT) : NULL;

    json_decref(line);
    if (!text)
        return ckpt_nomem(err);
    if (fprintf(j->file, "%s\n", text) < 0 || fflush(j->file) != 0 ||
        fdatasync(fileno(j->file)) < 0)
        return ckpt_fail_errno(err, errno, "writing %s", ckpt_journal_name);
    return 0;
}

int ckpt_journal_add(const struct ckpt_journal *j, const char *path, uint64_t len, int64_t mtime_ns,
                     const char *xxh3, struct ckpt_err *err)
{
    /* what resuming goes by: a line says something, and of a whole file when it was written */
    assert(*path && strlen(xxh3) == 32 && (len > 0 || mtime_ns != 0));
    return append(j,
                  json_pack("{s:o, s:I, s:I, s:s}", "file", ckptfs_json_text(path), "len",
                            (json_int_t)len, "mtime_ns", (json_int_t)mtime_ns, "xxh3", xxh3),
                  err);
}

/* Is this the first line of a journal of `source`? */
static int check_head(const json_t *line, const char *source, struct ckpt_err *err)
{
    const char *of = ckpt_json_str(line, "export");

    if (of && strcmp(of, source) == 0)
        return 0;
    return ckpt_fail(err, CKPT_CONFLICT,
                     "it holds an unfinished export of something else (%s in %s); remove it or "
                     "choose another directory",
                     of ? of : "unreadable", ckpt_journal_name);
}

/* Read all lines; *ret_new: there is none. A line that a crash has cut off is ignored: what it said
 * is exported again. */
static int read_lines(struct ckpt_journal *j, const char *source, bool *ret_new,
                      struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *text = NULL;
    size_t cap = 0;

    *ret_new = true;
    while (getline(&text, &cap, j->file) > 0) {
        ckpt_cleanup(ckpt_json_decrefp) json_t *line =
            json_loads(text, JSON_REJECT_DUPLICATES, NULL);
        const char *path = ckpt_json_str(line, "file");
        if (*ret_new && check_head(line, source, err) < 0)
            return -1;
        *ret_new = false;
        if (path && json_object_set(j->line, path, line) < 0)
            return ckpt_nomem(err);
    }
    return 0;
}

static int open_file(int dest, struct ckpt_journal *j, struct ckpt_err *err)
{
    const int flags = O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW;
    ckpt_cleanup(ckpt_closep) int own = openat(dest, ckpt_journal_name, flags, 0666);
    const int fd = own;
    struct stat st;

    if (fd < 0 || fstat(fd, &st) < 0 || !(j->file = fdopen(fd, "a+")))
        return ckpt_fail_errno(err, errno, "%s", ckpt_journal_name);
    own = -1;
    if (!S_ISREG(st.st_mode))
        return ckpt_fail(err, CKPT_LIMIT, "%s is not a journal of an export", ckpt_journal_name);
    if (flock(fd, LOCK_EX | LOCK_NB) < 0 && errno == EWOULDBLOCK)
        return ckpt_fail(err, CKPT_CONFLICT, "another export is writing there");
    if (fstat(fd, &st) == 0 && st.st_nlink == 0) /* deleted before it was locked here */
        return ckpt_fail(err, CKPT_CONFLICT, "another export has just ended there: try again");
    return 0;
}

int ckpt_journal_open(int dest, const char *source, struct ckpt_journal *ret, bool *ret_new,
                      struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_journal_close) struct ckpt_journal j = {.line = json_object()};

    if (open_file(dest, &j, err) < 0 || read_lines(&j, source, ret_new, err) < 0 ||
        (*ret_new && append(&j, json_pack("{s:s}", "export", source), err) < 0))
        return -1;
    *ret = j;
    j = (struct ckpt_journal){0};
    return 0;
}

void ckpt_journal_close(struct ckpt_journal *j)
{
    if (j->file)
        (void)fclose(j->file);
    json_decref(j->line);
    *j = (struct ckpt_journal){0};
}
