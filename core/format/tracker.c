/* SPDX-License-Identifier: Apache-2.0 */
/* A number in a file, and the names of steps that mean it. */
#include "format/tracker.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/str.h"
#include "format/reader.h"

#define TRACKER "latest_checkpointed_iteration.txt"

static const char *const prefixes[] = {
    [CKPT_TRACKER_MEGATRON] = "iter_", [CKPT_TRACKER_VERL] = "global_step_"};

static int see_step(void *ctx, const struct ckpt_entry *e, struct ckpt_err *err)
{
    (void)err;
    *(bool *)ctx |=
        e->kind == CKPT_ENTRY_DIR && ckpt_has_prefix(e->name, prefixes[CKPT_TRACKER_VERL]);
    return 0;
}

/* Does this folder have steps with verl's names? */
static bool is_verl(struct ckpt_dir *run)
{
    bool found = false;

    (void)ckpt_dir_list(run, see_step, &found, NULL);
    return found;
}

char *ckpt_tracker_latest(struct ckpt_dir *run, enum ckpt_tracker_owner owner)
{
    ckpt_cleanup(ckpt_freep) char *word = ckpt_reader_pointer(run, TRACKER);
    unsigned long long step;

    if (!word || is_verl(run) != (owner == CKPT_TRACKER_VERL))
        return NULL;
    word[strcspn(word, " \t\r\n")] = '\0';
    if (owner == CKPT_TRACKER_MEGATRON && strcmp(word, "release") == 0)
        return strdup(word);
    if (!ckpt_parse_u64(word, strlen(word), &step))
        return NULL;
    return owner == CKPT_TRACKER_VERL ? ckpt_asprintf("global_step_%llu", step)
                                      : ckpt_asprintf("iter_%07llu", step);
}

static bool step_of(const char *name, enum ckpt_tracker_owner owner, unsigned long long *ret)
{
    const size_t n = strlen(prefixes[owner]);

    return ckpt_has_prefix(name, prefixes[owner]) &&
           ckpt_parse_u64(name + n, strlen(name + n), ret);
}

bool ckpt_tracker_is_newer(const char *name, const char *latest, enum ckpt_tracker_owner owner)
{
    unsigned long long step, last;

    return latest && step_of(name, owner, &step) && step_of(latest, owner, &last) && step > last;
}
