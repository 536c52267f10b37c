/* SPDX-License-Identifier: Apache-2.0 */
/* Numbers of processes mean something within one boot of one kernel, and one namespace of pids. */
#include "tool/export/process.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/err.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/str.h"
#include "common.h"

enum { HOST = 65 };

static void host_name(char host[HOST])
{
    if (gethostname(host, HOST - 1) < 0 || !*host)
        (void)snprintf(host, HOST, "unknown");
    host[HOST - 1] = '\0';
}

/* The beginning of a small file of /proc without its newline; "" if it cannot be read. */
static void read_small(const char *path, char *buf, size_t size)
{
    ckpt_cleanup(ckpt_closep) int fd = open(path, O_RDONLY | O_CLOEXEC);
    const ssize_t n = fd < 0 ? 0 : read(fd, buf, size - 1);

    buf[n > 0 ? n : 0] = '\0';
    buf[strcspn(buf, "\n")] = '\0';
}

/* Which processes see each other: the boot of the kernel, and the namespace. */
static char *where(void)
{
    char boot[64], space[64] = "";

    read_small("/proc/sys/kernel/random/boot_id", boot, sizeof boot);
    const ssize_t n = readlink("/proc/self/ns/pid", space, sizeof space - 1);
    return n > 0 && *boot ? ckpt_asprintf("%s %s", boot, space) : strdup("");
}

/* When a process began, in ticks since the boot: field 22 of /proc/PID/stat, of which the second
 * may hold blanks and parentheses. 0: not known. *ret_is_zombie: it has ended, and its parent does
 * not know it yet. */
static uint64_t start_of(int64_t pid, bool *ret_is_zombie)
{
    char path[64], text[1024];
    unsigned long long start = 0;

    (void)snprintf(path, sizeof path, "/proc/%" PRId64 "/stat", pid);
    read_small(path, text, sizeof text);
    const char *at = strrchr(text, ')');
    *ret_is_zombie = at && (strncmp(at, ") Z", 3) == 0 || strncmp(at, ") X", 3) == 0);
    for (int field = 2; at && field < 22; field++)
        at = strchr(at + 1, ' ');
    if (at)
        start = strtoull(at + 1, NULL, 10);
    return start;
}

json_t *ckpt_process_line(uint32_t part, uint32_t parts)
{
    ckpt_cleanup(ckpt_freep) char *here = where();
    char host[HOST];
    bool zombie;

    host_name(host);
    return !here ? NULL
                 : json_pack("{s:o, s:s, s:I, s:I, s:I, s:I}", "host", ckptfs_json_text(host),
                             "where", here, "pid", (json_int_t)getpid(), "start",
                             (json_int_t)start_of(getpid(), &zombie), "part", (json_int_t)part,
                             "parts", (json_int_t)parts);
}

char *ckpt_process_name(void)
{
    struct timespec now = {0};
    char host[HOST];

    host_name(host);
    for (char *c = host; *c; c++)
        if (!strchr("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-", *c))
            *c = '_';
    (void)clock_gettime(CLOCK_REALTIME, &now);
    return ckpt_asprintf("%s.%d.%lld%09ld", host, (int)getpid(), (long long)now.tv_sec,
                         now.tv_nsec);
}

int ckpt_process_take(struct ckpt_process *p, const json_t *line, struct ckpt_err *err)
{
    const char *host = ckpt_json_str(line, "host"), *here = ckpt_json_str(line, "where");
    uint64_t pid, part, parts;

    if (!host || !here || !ckpt_json_u64(line, "pid", &pid) ||
        !ckpt_json_u64(line, "start", &p->start) || !ckpt_json_u64(line, "part", &part) ||
        !ckpt_json_u64(line, "parts", &parts) || pid < 1 || pid > INT32_MAX || part > UINT32_MAX ||
        parts > UINT32_MAX)
        return 0;
    free(p->host);
    free(p->where);
    p->host = strdup(host);
    p->where = strdup(here);
    p->pid = (int64_t)pid;
    p->part = (uint32_t)part;
    p->parts = (uint32_t)parts;
    p->is_known = p->host && p->where;
    return p->is_known ? 0 : ckpt_nomem(err);
}

void ckpt_process_release(struct ckpt_process *p)
{
    free(p->name);
    free(p->host);
    free(p->where);
    *p = (struct ckpt_process){0};
}

enum ckpt_life ckpt_process_life(const struct ckpt_process *p, int64_t now_ns, uint64_t stale_ms)
{
    if (p->has_ended)
        return CKPT_DEAD;
    ckpt_cleanup(ckpt_freep) char *here = where();
    if (p->is_known && here && *here && strcmp(here, p->where) == 0) {
        bool zombie;
        if (kill((pid_t)p->pid, 0) < 0 && errno == ESRCH)
            return CKPT_DEAD;
        const uint64_t start = start_of(p->pid, &zombie);
        return zombie || (start && p->start && start != p->start) ? CKPT_DEAD : CKPT_LIVES;
    }
    return now_ns - p->beat_ns > (int64_t)stale_ms * 1000000 ? CKPT_DEAD : CKPT_SEEMS_ALIVE;
}

char *ckpt_process_text(const struct ckpt_process *p)
{
    const char *host = p->host ? p->host : "?";

    return p->parts > 1
               ? ckpt_asprintf("part %" PRIu32 "/%" PRIu32 " (host %s, process %" PRId64 ")",
                               p->part, p->parts, host, p->pid)
               : ckpt_asprintf("host %s, process %" PRId64, host, p->pid);
}
