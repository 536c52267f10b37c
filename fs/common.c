/* SPDX-License-Identifier: Apache-2.0 */
/* Views as owning locals, file names in JSON, the limit of open files. */
#include "common.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/ckd.h"
#include "base/err.h"
#include "base/json.h"
#include "base/str.h"

struct ckpt_tensor_info ckptfs_tensor(const struct ckpt_view *view, size_t i)
{
    struct ckpt_tensor_info info = {.size = sizeof info};

    (void)ckpt_view_tensor(view, i, &info, NULL);
    return info;
}

json_t *ckptfs_json_shape(const struct ckpt_tensor_info *info)
{
    json_t *shape = json_array();

    for (uint32_t d = 0; d < info->rank; d++)
        ckpt_json_append(&shape, json_integer((json_int_t)info->shape[d]));
    return shape;
}

json_t *ckptfs_json_text(const char *bytes)
{
    ckpt_cleanup(ckpt_freep) char *shown = NULL;
    json_t *plain = json_string(bytes);

    return plain || !(shown = ckpt_printable(bytes)) ? plain : json_string(shown);
}

char *ckptfs_log_json(const char *program, enum ckpt_log_severity severity, const char *text)
{
    static const char *const word[] = {[CKPT_ERROR] = "error",
                                       [CKPT_WARNING] = "warning",
                                       [CKPT_INFO] = "info",
                                       [CKPT_DEBUG] = "debug"};
    char time[40] = "", shown[CKPT_ERR_TEXT];
    struct timespec now = {0};
    struct tm utc;

    (void)clock_gettime(CLOCK_REALTIME, &now);
    if (gmtime_r(&now.tv_sec, &utc))
        (void)strftime(time, sizeof time, "%Y-%m-%dT%H:%M:%S", &utc);
    (void)snprintf(shown, sizeof shown, "%s", text);
    ckpt_cleanup(ckpt_json_decrefp) json_t *j = json_pack(
        "{s:o, s:s, s:s, s:o}", "time", json_sprintf("%s.%03ldZ", time, now.tv_nsec / 1000000),
        "severity", word[severity], "program", program, "text", ckptfs_json_text(shown));
    return j ? json_dumps(j, JSON_COMPACT) : NULL;
}

uint64_t ckptfs_scan_pause(const char *run, uint64_t took_ms)
{
    return ckpt_has_prefix(run, "s3://") ? ckpt_max_u64(15000, 10 * took_ms)
                                         : ckpt_max_u64(1000, 4 * took_ms);
}

void ckptfs_json_bucket(json_t *into)
{
    ckpt_cleanup(ckpt_freep) char *text = NULL;
    json_t *j = ckpt_bucket_info(&text, NULL) == 0 && text ? json_loads(text, 0, NULL) : NULL;

    if (j)
        (void)json_object_set_new(into, "bucket", j);
}

/* Cut off the last component of a path, with the slashes before it. False: there was only one. */
static bool cut_last(char *path)
{
    size_t len = strlen(path);

    while (len && path[len - 1] == '/')
        len--;
    while (len && path[len - 1] != '/')
        len--;
    while (len > 1 && path[len - 1] == '/')
        len--;
    path[len] = '\0';
    return len > 0;
}

int ckptfs_make_folder(const char *path, size_t *ret_made, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *above = strdup(path);
    struct stat st;

    *ret_made = 0;
    if (!above)
        return ckpt_nomem(err);
    if (mkdir(path, 0777) == 0)
        return *ret_made = 1, 0;
    if (errno == ENOENT && cut_last(above)) {
        if (ckptfs_make_folder(above, ret_made, err) < 0)
            return -1;
        if (mkdir(path, 0777) == 0)
            return ++*ret_made, 0;
    }
    if (errno == EEXIST && stat(path, &st) == 0 && S_ISDIR(st.st_mode))
        return 0;
    return ckpt_fail_errno(err, errno, "making the folder '%s'", path);
}

void ckptfs_remove_made(const char *path, size_t made)
{
    ckpt_cleanup(ckpt_freep) char *own = strdup(path);

    for (; own && made && rmdir(own) == 0; made--)
        if (!cut_last(own))
            break;
}

void ckptfs_allow_many_files(void)
{
    struct rlimit limit;

    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
        limit.rlim_cur = limit.rlim_max;
        (void)setrlimit(RLIMIT_NOFILE, &limit);
    }
}
