/* SPDX-License-Identifier: Apache-2.0 */
/* A view as an owning local. */
#ifndef CKPT_FS_VIEW_H
#define CKPT_FS_VIEW_H

#include <stddef.h>

#include <ckptfs/ckptfs.h>

/* Release the view for ckpt_cleanup; view is the address of the variable. */
static inline void ckptfs_viewp(struct ckpt_view **view)
{
    ckpt_view_release(*view);
    *view = NULL;
}

#endif
