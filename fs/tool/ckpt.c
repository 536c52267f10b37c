/* SPDX-License-Identifier: Apache-2.0 */
/* ckpt: the command-line tool, which inspects, exports and compares what ckptfs would mount. */
#include <errno.h>
#include <libgen.h>
#include <limits.h>
#include <stdlib.h>
#include <unistd.h>

#include <jansson.h>

#include "base/err.h"
#include "base/mem.h"
#include "base/str.h"
#include "tool.h"

/* The loader is a separate program, so that this one need not link MPI or CUDA. */
static int run_loader(const struct ckpt_tool *t, char **argv, struct ckpt_err *err)
{
    char path[PATH_MAX] = "";

    if (readlink("/proc/self/exe", path, sizeof path - 1) < 0)
        return ckpt_fail_errno(err, errno, "/proc/self/exe");
    ckpt_cleanup(ckpt_freep) char *loader = ckpt_asprintf("%s/ckpt-load", dirname(path));
    if (!loader)
        return ckpt_nomem(err);
    (void)execv(loader, argv);
    return ckpt_fail_errno(err, errno, "%s needs the loader, which is not installed: %s",
                           t->line.command->name, loader);
}

/* After an allocation has failed while it parses a text, jansson 2.14 continues, and then fails an
 * assertion or writes out of bounds. Therefore this program ends when it is out of memory. */
static void *json_memory(size_t n)
{
    void *p = malloc(n ? n : 1);

    if (!p) {
        static const char text[] = "ckpt: out of memory\n";
        (void)!write(STDERR_FILENO, text, sizeof text - 1);
        _exit(1);
    }
    return p;
}

static int run(const struct ckpt_tool *t, uint32_t command, char **argv, struct ckpt_err *err)
{
    switch (command) {
    case CKPTFS_INFO:
        return ckpt_cmd_info(t, err);
    case CKPTFS_LS:
        return ckpt_cmd_ls(t, err);
    case CKPTFS_EXPLAIN:
        return ckpt_cmd_explain(t, err);
    case CKPTFS_EXPORT:
        return (t->delta_from ? ckpt_cmd_delta : ckpt_cmd_export)(t, err);
    case CKPTFS_VERIFY:
        return ckpt_cmd_verify(t, err);
    case CKPTFS_DELTA:
        return ckpt_cmd_delta(t, err);
    case CKPTFS_DIGEST:
        return ckpt_cmd_digest(t, err);
    default:
        return run_loader(t, argv, err);
    }
}

int main(int argc, char **argv)
{
    struct ckpt_tool tool;
    uint32_t command = 0;
    struct ckpt_err err = {0};

    (void)argc;
    json_set_alloc_funcs(json_memory, free);
    int rc = ckpt_tool_init(&tool, "ckpt", argv, &command, &err);
    if (rc == 0 && command) {
        ckpt_tool_limits();
        ckpt_tool_log(&tool);
        rc = run(&tool, command, argv, &err);
    }
    rc = ckpt_tool_finish(&tool, rc, &err);
    ckpt_tool_release(&tool);
    return rc;
}
