/* SPDX-License-Identifier: Apache-2.0 */
/* ckpt plan: what a load by a job of a given size would do. No tensor data is read. */

#include "base/err.h"
#include "base/json.h"
#include "base/mem.h"
#include "common.h"
#include "out.h"
#include "summary.h"
#include "tool.h"

int ckpt_cmd_plan(const struct ckpt_tool *t, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_runp) struct ckpt_run *run = NULL;
    ckpt_cleanup(ckptfs_viewp) struct ckpt_view *view = NULL;
    ckpt_cleanup(ckpt_freep) char *text = NULL;

    if (ckpt_tool_open(t, &run, &view, err) < 0 ||
        ckpt_load_model(view, t->layout, t->ranks, t->ranks_per_node ? t->ranks_per_node : 8,
                        t->share_ranks, t->transport, &t->load, &text, err) < 0)
        return -1;
    ckpt_cleanup(ckpt_json_decrefp) json_t *plan = NULL;
    if (ckpt_out_parse(text, &plan, err) < 0)
        return -1;
    if (t->json)
        return ckpt_out_json(plan, err);
    ckpt_summary_of_plan(plan, t->ranks == 0);
    return 0;
}
