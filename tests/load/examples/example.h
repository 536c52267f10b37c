/* SPDX-License-Identifier: Apache-2.0 */
/* What the examples share: errors, and a run under its own names. */
#ifndef CKPT_TESTS_LOAD_EXAMPLE_H
#define CKPT_TESTS_LOAD_EXAMPLE_H

#include <errno.h>
#include <stdio.h>

#include <ckptfs/load.h>

static inline int die(const struct ckpt_err *err)
{
    (void)fprintf(stderr, "%s: %s\n", program_invocation_short_name, err->text);
    return 1;
}

/* The latest step of the run, opened by all ranks; NULL: *err says why, the same on all. */
static inline struct ckpt_view *open_raw(struct ckpt_comm *comm, const char *path,
                                         struct ckpt_err *err)
{
    struct ckpt_options *options = NULL;
    struct ckpt_view *view = NULL;

    if (ckpt_options_new(&options, err) == 0 &&
        ckpt_options_set(options, "view", "raw", err) == 0 &&
        ckpt_load_open(comm, path, options, NULL, 60000, NULL, NULL, &view, err) < 0)
        view = NULL;
    ckpt_options_free(options);
    return view;
}

#endif
