/* SPDX-License-Identifier: Apache-2.0 */
/* Lines are appended, each by one write; the file is read as a whole. */
#include "tool/record.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/err.h"
#include "base/fdio.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/str.h"
#include "common.h"

#define NAME ".ckptfs-exports"

/* Open the record; *ret_fd is -1 if there is none and `flags` do not create one. */
static int open_record(const char *dest, int flags, int *ret_fd, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *path = ckpt_asprintf("%s/" NAME, dest);
    struct stat st;

    if (!path)
        return ckpt_nomem(err);
    *ret_fd = open(path, flags | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666);
    if (*ret_fd < 0)
        return errno == ENOENT ? 0 : ckpt_fail_errno(err, errno, "%s", path);
    if (fstat(*ret_fd, &st) == 0 && S_ISREG(st.st_mode))
        return 0;
    ckpt_closep(ret_fd);
    return ckpt_fail(err, CKPT_LIMIT, "%s is not a record of exports", path);
}

int ckpt_record_read(struct ckpt_record *ret, const char *dest, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *text = NULL;
    size_t cap = 0;
    int fd;

    *ret = (struct ckpt_record){.dest = dest, .saves = json_object()};
    if (!ret->saves)
        return ckpt_nomem(err);
    if (open_record(dest, O_RDONLY, &fd, err) < 0)
        return -1;
    FILE *file = fd < 0 ? NULL : fdopen(fd, "r");
    if (fd >= 0 && !file)
        ckpt_closep(&fd);
    /* a line that a crash has cut off says nothing */
    while (file && getline(&text, &cap, file) > 0) {
        ckpt_cleanup(ckpt_json_decrefp) json_t *line =
            json_loads(text, JSON_REJECT_DUPLICATES, NULL);
        const char *step = ckpt_json_str(line, "step");
        if (step)
            (void)json_object_set(ret->saves, step, json_object_get(line, "generation"));
    }
    if (file)
        (void)fclose(file);
    return 0;
}

void ckpt_record_release(struct ckpt_record *r) { json_decref(r->saves); }

bool ckpt_record_find(const struct ckpt_record *r, const char *step, uint64_t *ret_generation)
{
    const char *digits = ckpt_json_str(r->saves, step);
    char *end = NULL;

    if (!digits || !*digits)
        return false;
    *ret_generation = strtoull(digits, &end, 16);
    return !*end;
}

int ckpt_record_add(struct ckpt_record *r, const char *step, uint64_t generation,
                    struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *text = NULL, *line = NULL;
    char digits[24];
    uint64_t known;
    int fd;

    if (ckpt_record_find(r, step, &known) && known == generation)
        return 0;
    (void)snprintf(digits, sizeof digits, "%016" PRIx64, generation);
    ckpt_cleanup(ckpt_json_decrefp) json_t *j =
        json_pack("{s:o, s:s}", "step", ckptfs_json_text(step), "generation", digits);
    if (!j || !(text = json_dumps(j, JSON_COMPACT)) || !(line = ckpt_asprintf("%s\n", text)) ||
        json_object_set_new(r->saves, step, json_string(digits)) < 0)
        return ckpt_nomem(err);
    if (open_record(r->dest, O_WRONLY | O_CREAT | O_APPEND, &fd, err) < 0)
        return -1;
    const size_t len = strlen(line);
    const ssize_t n = write(fd, line, len);
    const int e = n == (ssize_t)len ? 0 : n < 0 ? errno : ENOSPC;
    ckpt_closep(&fd);
    return e ? ckpt_fail_errno(err, e, "writing %s/" NAME, r->dest) : 0;
}
