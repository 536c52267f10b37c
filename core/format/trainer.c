/* SPDX-License-Identifier: Apache-2.0 */
/* The list of trainers, and what readers ask all of them. */
#include "format/trainer.h"

#include <fnmatch.h>
#include <stddef.h>

const struct ckpt_trainer *const ckpt_trainers[] = {
#define CKPT_READER(NAME, ...)
#define CKPT_TRAINER(NAME) &ckpt_trainer_##NAME,
#include "format/readers.def"
#undef CKPT_TRAINER
#undef CKPT_READER
    NULL,
};

char *ckpt_trainers_latest(struct ckpt_dir *run)
{
    char *latest = NULL;

    for (const struct ckpt_trainer *const *t = ckpt_trainers; *t && !latest; t++)
        latest = (*t)->latest ? (*t)->latest(run) : NULL;
    return latest;
}

bool ckpt_trainers_finished(struct ckpt_dir *dir, const char *name, const char *latest)
{
    for (const struct ckpt_trainer *const *t = ckpt_trainers; *t; t++)
        if ((*t)->finished && !(*t)->finished(dir, name, latest))
            return false;
    return true;
}

bool ckpt_trainers_is_step_name(const char *name)
{
    for (const struct ckpt_trainer *const *t = ckpt_trainers; *t; t++)
        for (const char *const *pattern = (*t)->step_names; pattern && *pattern; pattern++)
            if (fnmatch(*pattern, name, 0) == 0)
                return true;
    return ckpt_reader_is_step_name(name);
}

void ckpt_trainers_describe(const struct ckpt_dir *dir, const char *name, struct ckpt_catalog *cat)
{
    for (const struct ckpt_trainer *const *t = ckpt_trainers; *t; t++)
        if ((*t)->describe)
            (*t)->describe(dir, name, cat);
}

ckpt_split_fn *ckpt_trainers_split(void)
{
    for (const struct ckpt_trainer *const *t = ckpt_trainers; *t; t++)
        if ((*t)->split)
            return (*t)->split;
    return NULL;
}
