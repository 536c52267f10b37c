/* SPDX-License-Identifier: Apache-2.0 */
/* Views as owning locals, file names in JSON, the limit of open files. */
#include "common.h"

#include <sys/resource.h>

#include "base/mem.h"
#include "base/str.h"

void ckptfs_viewp(struct ckpt_view **view)
{
    ckpt_view_release(*view);
    *view = NULL;
}

json_t *ckptfs_json_text(const char *bytes)
{
    ckpt_cleanup(ckpt_freep) char *shown = NULL;
    json_t *plain = json_string(bytes);

    return plain || !(shown = ckpt_printable(bytes)) ? plain : json_string(shown);
}

void ckptfs_allow_many_files(void)
{
    struct rlimit limit;

    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
        limit.rlim_cur = limit.rlim_max;
        (void)setrlimit(RLIMIT_NOFILE, &limit);
    }
}
