/* SPDX-License-Identifier: Apache-2.0 */
/* ckpt-load: load a view's weights into the ranks of a job, or estimate the cost of that. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "tool.h"

/* Options without effect are refused. The table of options refuses those of the other command. */
static int check_useful(const struct ckpt_tool *t, struct ckpt_err *err)
{
    const struct {
        bool given;
        const char *name;
        const char *why; /* and what to do */
    } of_sharing[] = {
        {t->share_ranks, "--share",
         "ranks that read for themselves share nothing; use once or node"},
        {t->load.window_bytes, "--window-bytes",
         "nothing is exchanged; use --host-bytes, or once or node"},
        {t->load.verify, "--check", "nothing is sent; use --verify, or once or node"},
    };
    const char *transport = t->transport ? t->transport : getenv("CKPTFS_TRANSPORT");

    for (size_t i = 0; i < sizeof of_sharing / sizeof *of_sharing; i++)
        if (of_sharing[i].given && t->load.readers == CKPT_READERS_EACH)
            return ckpt_fail(err, CKPT_USAGE, "%s does not apply to --readers each: %s",
                             of_sharing[i].name, of_sharing[i].why);
    if (t->load.device_bytes && (!transport || strcmp(transport, "nccl") != 0))
        return ckpt_fail(err, CKPT_USAGE,
                         "--device-bytes does not apply to loads into host memory: use "
                         "--host-bytes, or give --transport nccl");
    if (t->node_files && !t->local)
        return ckpt_fail(err, CKPT_USAGE,
                         "--node-files does not apply to a run that all nodes see: add --local");
    return t->layout ? 0 : ckpt_fail(err, CKPT_USAGE, "--layout is missing (tp=2,pp=2 or fsdp=4)");
}

static void print_wait(void *tool, const char *text) { ckpt_tool_print(tool, CKPT_INFO, text); }

static int load(struct ckpt_tool *t, struct ckpt_comm **ret_comm, struct ckpt_err *err)
{
    if (t->transport && setenv("CKPTFS_TRANSPORT", t->transport, 1) < 0)
        return ckpt_nomem(err);
    if (ckpt_comm_from_env_log(print_wait, t, ret_comm, err) < 0)
        return -1;
    if (ckpt_comm_rank(*ret_comm) == 0)
        ckpt_tool_log(t);
    if (t->share_ranks)
        t->load.share = ckpt_comm_rank(*ret_comm) / t->share_ranks;
    return ckpt_cmd_load(t, *ret_comm, err);
}

int main(int argc, char **argv)
{
    char name[32] = "ckpt-load";
    struct ckpt_tool tool;
    struct ckpt_comm *comm = NULL;
    struct ckpt_err err = {0};
    uint32_t command = 0;

    (void)argc;
    int rc = ckpt_tool_init(&tool, name, argv, &command, &err);
    if (rc == 0 && command && !(command & (CKPTFS_LOAD | CKPTFS_PLAN)))
        rc = ckpt_fail(&err, CKPT_USAGE, "expected load or plan: use %s", tool.line.command->name);
    if (rc == 0 && command && (rc = check_useful(&tool, &err)) == 0) {
        ckpt_tool_limits();
        if (command == CKPTFS_PLAN) {
            ckpt_tool_log(&tool);
            rc = ckpt_cmd_plan(&tool, &err);
        } else {
            rc = load(&tool, &comm, &err);
        }
    }
    if (comm && ckpt_comm_size(comm) > 1)
        (void)snprintf(name, sizeof name, "ckpt-load[%u]", ckpt_comm_rank(comm));
    rc = ckpt_tool_finish(&tool, rc, &err);
    ckpt_comm_free(comm);
    ckpt_tool_release(&tool);
    return rc;
}
