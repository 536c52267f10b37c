/* SPDX-License-Identifier: Apache-2.0 */
/* The folders of a model directory that a view shows with its files: modules of
 * sentence-transformers ("1_Pooling"), chat templates, pictures. */
#pragma once

#include <stdbool.h>

#include "base/err.h"
#include "base/json.h"
#include "base/vec.h"
#include "io/dir.h"

/* A file of such a folder. */
struct ckpt_side_entry {
    char *path;         /* from the folder that has the side folder: "1_Pooling/config.json" */
    bool leads_nowhere; /* it is a link that leads to nothing, or out */
};

/* A side folder holds these files. All zero before; release it after a failure, too. */
struct ckpt_side_folder {
    CKPT_VEC(struct ckpt_side_entry) files;
    const char *why; /* static: why the folder is left out; "": for a reason that users know, such
                        as a step of a trainer; NULL: it is shown */
};

/* Does the name of a folder say that a trainer, or a tool, keeps something for itself there: steps,
 * logs, caches? */
bool ckpt_side_is_of_tools(const char *name);

/* Read what the folder `name` of dir holds. A module is a part of the model, however large it is,
 * and although it may be a model itself. Of a folder that is left out not all files are listed. */
int ckpt_side_folder_read(struct ckpt_dir *dir, const char *name, bool is_module,
                          struct ckpt_side_folder *ret, struct ckpt_err *err);

/* Free the list of files. */
void ckpt_side_folder_release(struct ckpt_side_folder *folder);

/* The list modules.json of sentence-transformers; NULL: dir has none that can be read. New. */
json_t *ckpt_side_modules(const struct ckpt_dir *dir);

/* Does the list (or NULL) name the folder? */
bool ckpt_side_is_module(const json_t *modules, const char *name);
