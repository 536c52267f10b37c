/* SPDX-License-Identifier: Apache-2.0 */
/* Names of DeepSpeed's files. */
#include "format/deepspeed/file.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/sort.h"
#include "base/str.h"
#include "base/take.h"
#include "format/reader.h"

/* "_mp_rank_TT_model_states.pt" */
static bool take_end(const char *s, const char *states, struct ckpt_ds_file_name *f)
{
    return ckpt_take_text(&s, "_mp_rank_") && ckpt_take_u64(&s, &f->mp) && strcmp(s, states) == 0;
}

static bool parse_zero(const char *s, struct ckpt_ds_file_name *f)
{
    if (!ckpt_take_text(&s, "bf16_"))
        (void)ckpt_take_text(&s, "fp16_");
    if (!ckpt_take_text(&s, "zero_pp_rank_") || !ckpt_take_u64(&s, &f->dp))
        return false;
    f->role = CKPT_DS_OPTIM;
    if (take_end(s, "_optim_states.pt", f))
        return true;
    f->role = CKPT_DS_ZERO3_MODEL;
    return take_end(s, "_model_states.pt", f);
}

static bool parse_layer(const char *s, struct ckpt_ds_file_name *f)
{
    if (!ckpt_take_text(&s, "layer_") || !ckpt_take_u64(&s, &f->layer))
        return false;
    f->role = CKPT_DS_EXPERT;
    if (ckpt_take_text(&s, "_expert_"))
        return ckpt_take_u64(&s, &f->expert) && take_end(s, "_model_states.pt", f);
    f->role = CKPT_DS_LAYER;
    if (strcmp(s, "-model_states.pt") == 0)
        return true;
    return ckpt_take_text(&s, "-model_") && ckpt_take_u64(&s, &f->mp) &&
           strcmp(s, "-model_states.pt") == 0;
}

/* Parse a name; false if it is not that of a file of a tag. */
static bool parse_name(const char *name, struct ckpt_ds_file_name *ret)
{
    const char *s = name;

    *ret = (struct ckpt_ds_file_name){.role = CKPT_DS_MODEL};
    if (ckpt_take_text(&s, "mp_rank_"))
        return ckpt_take_u64(&s, &ret->mp) && strcmp(s, "_model_states.pt") == 0;
    if (ckpt_take_text(&s, "expert_")) {
        ret->role = CKPT_DS_EXPERT;
        ret->old_expert = true;
        return ckpt_take_u64(&s, &ret->expert) && take_end(s, "_model_states.pt", ret);
    }
    if (ckpt_take_text(&s, "expp_rank_")) {
        ret->role = CKPT_DS_EXPERT_OPTIM;
        return ckpt_take_u64(&s, &ret->dp) && take_end(s, "_optim_states.pt", ret);
    }
    return parse_layer(name, ret) || parse_zero(name, ret);
}

static int entry_cmp(const void *a, const void *b)
{
    const struct ckpt_ds_file_name *x = &((const struct ckpt_ds_entry *)a)->is;
    const struct ckpt_ds_file_name *y = &((const struct ckpt_ds_entry *)b)->is;
    int c = ckpt_u64_cmp(x->role, y->role);

    c = c ? c : ckpt_u64_cmp(x->mp, y->mp);
    c = c ? c : ckpt_u64_cmp(x->layer, y->layer);
    c = c ? c : ckpt_u64_cmp(x->expert, y->expert);
    return c ? c : ckpt_u64_cmp(x->dp, y->dp);
}

int ckpt_ds_tag_read(struct ckpt_dir *dir, struct ckpt_ds_tag *ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_entries_release) struct ckpt_entries entries = {0};
    struct ckpt_ds_entry *entry;
    struct ckpt_ds_file_name is;
    struct ckpt_entry e;

    if (ckpt_entries_read(dir, &entries, err) < 0)
        return -1;
    while (ckpt_entries_next(&entries, &e)) {
        if (e.kind == CKPT_ENTRY_DIR || !parse_name(e.name, &is))
            continue;
        if (ckpt_vec_add(&ret->files, &entry) < 0 || !(entry->name = strdup(e.name)))
            return ckpt_nomem(err);
        entry->is = is;
    }
    ckpt_sort(ret->files.ptr, ret->files.len, entry_cmp);
    ret->universal = ckpt_dir_has_dir(dir, "zero") || ckpt_dir_has_dir(dir, "tmp");
    return 0;
}

void ckpt_ds_tag_release(struct ckpt_ds_tag *t)
{
    for (size_t i = 0; i < t->files.len; i++)
        free(t->files.ptr[i].name);
    ckpt_vec_release(&t->files);
}

const struct ckpt_ds_entry *ckpt_ds_tag_find(const struct ckpt_ds_tag *t, enum ckpt_ds_role role,
                                             uint64_t mp, uint64_t dp)
{
    for (size_t i = 0; i < t->files.len; i++) {
        const struct ckpt_ds_file_name *f = &t->files.ptr[i].is;
        if (f->role == role && f->mp == mp && f->dp == dp)
            return &t->files.ptr[i];
    }
    return NULL;
}

size_t ckpt_ds_tag_count(const struct ckpt_ds_tag *t, enum ckpt_ds_role role,
                         const struct ckpt_ds_entry **ret_first)
{
    size_t n = 0;

    for (size_t i = 0; i < t->files.len; i++) {
        if (t->files.ptr[i].is.role != role)
            continue;
        if (n++ == 0 && ret_first)
            *ret_first = &t->files.ptr[i];
    }
    return n;
}

/* ---- where tags lie ---- */

/* zero/PARAMETER/fp32.pt, or tmp/PARAMETER/RANK/fp32.00 of a conversion that goes on. */
static bool has_parameters(struct ckpt_dir *dir, const char *folder)
{
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *below = ckpt_reader_folder(dir, folder);
    ckpt_cleanup(ckpt_entries_release) struct ckpt_entries entries = {0};
    struct ckpt_entry e;
    bool found = false;

    if (below)
        (void)ckpt_entries_read(below, &entries, NULL);
    while (!found && ckpt_entries_next(&entries, &e)) {
        ckpt_cleanup(ckpt_freep) char *whole = ckpt_asprintf("%s/fp32.pt", e.name);
        ckpt_cleanup(ckpt_freep) char *part = ckpt_asprintf("%s/0/fp32.00", e.name);
        found = e.kind == CKPT_ENTRY_DIR && whole && part &&
                (ckpt_dir_has_file(below, whole) || ckpt_dir_has_file(below, part));
    }
    return found;
}

bool ckpt_ds_is_tag(struct ckpt_dir *dir)
{
    ckpt_cleanup(ckpt_ds_tag_release) struct ckpt_ds_tag t = {0};

    (void)ckpt_ds_tag_read(dir, &t, NULL);
    return t.files.len ||
           (t.universal && (has_parameters(dir, "zero") || has_parameters(dir, "tmp")));
}

char *ckpt_ds_latest(struct ckpt_dir *run)
{
    char *text = ckpt_reader_pointer(run, "latest");

    if (!text)
        text = ckpt_reader_pointer(run, "latest_universal");
    if (text && *text && strcmp(text, ".") != 0 && strcmp(text, "..") != 0 && !strchr(text, '/'))
        return text;
    free(text);
    return NULL;
}
