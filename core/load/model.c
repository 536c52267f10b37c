/* SPDX-License-Identifier: Apache-2.0 */
/* Planning only: the plan of a job that need not exist. */
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "load/load_inner.h"

int ckpt_load_model(struct ckpt_view *view, const char *layout, uint32_t ranks,
                    uint32_t ranks_per_node, const struct ckpt_load_options *opt, char **ret_json,
                    struct ckpt_err *err)
{
    (void)view, (void)layout, (void)ranks, (void)ranks_per_node, (void)opt, (void)ret_json;
    return ckpt_fail(err, CKPT_UNSUPPORTED, "planning only is not there yet");
}
