/* SPDX-License-Identifier: Apache-2.0 */
/* Each line is appended with a single write; the file is read back as a whole. */
#include "tool/journal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/err.h"
#include "base/fdio.h"
#include "base/mem.h"
#include "common.h"

const char ckpt_journal_name[] = ".ckptfs-export";

enum { MOST_BYTES = 256 << 20 };

static int append(const struct ckpt_journal *j, json_t *line, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *text = line ? json_dumps(line, JSON_COMPACT) : NULL;
    int rc = 0;

    json_decref(line);
    size_t n = text ? strlen(text) : 0;
    char *longer = text ? realloc(text, n + 2) : NULL;
    if (!longer)
        return ckpt_nomem(err);
    text = longer;
    memcpy(text + n, "\n", 2);
    /* O_APPEND keeps the lines of several threads apart. Where only a part of a line found room,
     * the next write says why. */
    for (size_t done = 0; rc == 0 && done < n + 1;) {
        const ssize_t put = write(j->fd, text + done, n + 1 - done);
        if (put < 0 && errno == EINTR)
            continue;
        if (put <= 0)
            rc = ckpt_fail_errno(err, put < 0 ? errno : ENOSPC, "writing %s", ckpt_journal_name);
        else
            done += (size_t)put;
    }
    if (rc == 0 && fdatasync(j->fd) < 0)
        rc = ckpt_fail_errno(err, errno, "writing %s", ckpt_journal_name);
    return rc;
}

int ckpt_journal_add_complete(const struct ckpt_journal *j, const char *path, uint64_t size,
                              int64_t mtime_ns, const char *xxh3, struct ckpt_err *err)
{
    return append(j,
                  json_pack("{s:o, s:I, s:I, s:s}", "complete", ckptfs_json_text(path), "size",
                            (json_int_t)size, "mtime_ns", (json_int_t)mtime_ns, "xxh3", xxh3),
                  err);
}

int ckpt_journal_add_partial(const struct ckpt_journal *j, const char *path, uint64_t len,
                             const char *xxh3, struct ckpt_err *err)
{
    return append(j,
                  json_pack("{s:o, s:I, s:s}", "partial", ckptfs_json_text(path), "len",
                            (json_int_t)len, "xxh3", xxh3),
                  err);
}

/* Parse one line. A line that a crash has cut off ends the journal; whatever follows it is ignored.
 */
static bool take_line(struct ckpt_journal *j, const json_t *line)
{
    const char *path;

    if ((path = json_string_value(json_object_get(line, "complete"))))
        return json_object_set(j->complete, path, (json_t *)line) == 0;
    if ((path = json_string_value(json_object_get(line, "partial"))))
        return json_object_set(j->partial, path, (json_t *)line) == 0;
    return true;
}

static int parse(struct ckpt_journal *j, char *text, const char *source, struct ckpt_err *err)
{
    char *save = NULL;
    bool head = true;

    for (char *p = strtok_r(text, "\n", &save); p; p = strtok_r(NULL, "\n", &save)) {
        json_t *line = json_loads(p, JSON_REJECT_DUPLICATES, NULL);
        const char *of = json_string_value(json_object_get(line, "export"));
        bool good = line && (!head || (of && strcmp(of, source) == 0)) && take_line(j, line);
        if (head && !good) {
            (void)ckpt_fail(err, CKPT_CONFLICT,
                            "it holds an unfinished export of something else (%s in %s); remove it "
                            "or choose another directory",
                            of ? of : "unreadable", ckpt_journal_name);
            json_decref(line);
            return -1;
        }
        json_decref(line);
        if (!good)
            break;
        head = false;
    }
    return 0;
}

static int read_all(int fd, char **ret, struct ckpt_err *err)
{
    struct stat st;
    uint64_t have = 0;

    if (fstat(fd, &st) < 0)
        return ckpt_fail_errno(err, errno, "%s", ckpt_journal_name);
    if (!S_ISREG(st.st_mode) || st.st_size > MOST_BYTES)
        return ckpt_fail(err, CKPT_LIMIT, "%s is not a journal of an export", ckpt_journal_name);
    char *text = malloc((size_t)st.st_size + 1);
    if (!text)
        return ckpt_nomem(err);
    /* a part that cannot be read is exported again */
    (void)ckpt_fdio_pread(fd, text, (size_t)st.st_size, &have);
    text[have] = '\0';
    *ret = text;
    return 0;
}

int ckpt_journal_open(int dest, const char *source, struct ckpt_journal *ret, bool *ret_new,
                      struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *text = NULL;
    struct ckpt_journal j = {.complete = json_object(), .partial = json_object()};

    j.fd =
        openat(dest, ckpt_journal_name, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (j.fd < 0) {
        (void)ckpt_fail_errno(err, errno, "%s", ckpt_journal_name);
        goto fail;
    }
    if (flock(j.fd, LOCK_EX | LOCK_NB) < 0 && errno == EWOULDBLOCK) {
        (void)ckpt_fail(err, CKPT_CONFLICT, "another export is writing there");
        goto fail;
    }
    if (read_all(j.fd, &text, err) < 0 || parse(&j, text, source, err) < 0)
        goto fail;
    *ret_new = !*text;
    if (*ret_new && append(&j, json_pack("{s:s}", "export", source), err) < 0)
        goto fail;
    *ret = j;
    return 0;
fail:
    ckpt_journal_close(&j);
    return -1;
}

void ckpt_journal_close(struct ckpt_journal *j)
{
    if (j->fd >= 0)
        (void)close(j->fd);
    json_decref(j->complete);
    json_decref(j->partial);
    *j = (struct ckpt_journal){.fd = -1};
}
