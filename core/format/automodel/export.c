/* SPDX-License-Identifier: Apache-2.0 */
/* The split into files of NeMo Automodel. */
#include "format/automodel/export.h"

#include <inttypes.h>
#include <string.h>

#include "base/ckd.h"
#include "base/map.h"
#include "base/mem.h"
#include "base/sort.h"
#include "base/str.h"

#define SUFFIX ".safetensors"

static const uint64_t default_file_len = UINT64_C(5) << 30; /* Automodel's 5 GiB */

/* ---- the split ---- */

/* Parse the digits before *end, at least one, and move *end to the first of them. False: there are
 * none, or the number is too large. */
static bool number_before(const char *begin, const char **end, uint64_t *ret)
{
    unsigned long long value;
    const char *s = *end;

    while (s > begin && s[-1] >= '0' && s[-1] <= '9')
        s--;
    if (!ckpt_parse_u64(s, (size_t)(*end - s), &value))
        return false;
    *end = s;
    *ret = value;
    return true;
}

static bool text_before(const char *begin, const char **end, const char *text)
{
    size_t len = strlen(text);

    if ((size_t)(*end - begin) < len || memcmp(*end - len, text, len) != 0)
        return false;
    *end -= len;
    return true;
}

bool ckpt_automodel_file_number(const char *name, uint64_t *ret_number)
{
    const char *end = name + strlen(name);
    uint64_t i, n;

    *ret_number = 1;
    if (strcmp(name, "model" SUFFIX) == 0)
        return true;
    if (!text_before(name, &end, SUFFIX) || !number_before(name, &end, &n) ||
        !text_before(name, &end, "-of-") || !number_before(name, &end, &i) ||
        !text_before(name, &end, "-") || i < 1 || i > n)
        return false;
    *ret_number = i;
    return true;
}

void ckpt_automodel_number_files(const char *const *name, size_t n, uint64_t *ret_number)
{
    ckpt_cleanup(ckpt_freep) bool *seen = calloc(n + 1, sizeof *seen);
    bool own = seen != NULL;

    for (size_t i = 0; i < n; i++) {
        bool known = ckpt_automodel_file_number(name[i], &ret_number[i]);
        own = own && known && ret_number[i] <= n && !seen[ret_number[i]];
        if (own)
            seen[ret_number[i]] = true;
    }
    for (size_t i = 0; i < n && n > 1 && !own; i++)
        ret_number[i] = i + 1;
}

uint64_t ckpt_automodel_equally(size_t i, size_t n, uint64_t nfile)
{
    uint64_t each = n / nfile, more = n % nfile, first = more * (each + 1);

    return i < first ? i / (each + 1) + 1 : more + (i - first) / each + 1;
}

void ckpt_automodel_by_size(const uint64_t *len, size_t n, uint64_t max_len, uint64_t *ret_number)
{
    uint64_t file = 1, used = 0;

    for (size_t i = 0; i < n; i++) {
        if (used && (used > max_len || len[i] > max_len - used)) {
            file++;
            used = 0;
        }
        used += len[i];
        ret_number[i] = file;
    }
}

/* ---- by a base ---- */

struct split {
    const struct ckpt_catalog *cat;
    const struct ckpt_split_base *base;
    CKPT_VEC(const char *) files; /* files of the base, sorted */
    uint64_t *number;             /* number of each file, in the order of the base's map */
    uint64_t *file; /* number of each tensor's file; 0: the base does not have the tensor */
    uint64_t last;
};

static void split_release(struct split *s)
{
    ckpt_vec_release(&s->files);
    free(s->number);
    free(s->file);
}

static int number_files(struct split *s, struct ckpt_err *err)
{
    const struct ckpt_weight_map *map = s->base->weight_map;
    ckpt_cleanup(ckpt_freep) uint64_t *sorted = NULL; /* number of each of s->files */

    for (size_t i = 0; map && i < map->files.len; i++)
        if (ckpt_vec_push(&s->files, map->files.ptr[i]) < 0)
            return ckpt_nomem(err);
    ckpt_sort(s->files.ptr, s->files.len, ckpt_strings_cmp);
    sorted = malloc((s->files.len + 1) * sizeof *sorted);
    s->number = malloc((s->files.len + 1) * sizeof *s->number);
    if (!sorted || !s->number)
        return ckpt_nomem(err);
    ckpt_automodel_number_files(s->files.ptr, s->files.len, sorted);
    for (size_t i = 0; i < s->files.len; i++)
        s->number[ckpt_map_find(&map->by_file, s->files.ptr[i])] = sorted[i];
    return 0;
}

/* The number of the base's file with this tensor; 0: the base does not have it. A base without an
 * index is one file. */
static uint64_t file_in_base(const struct split *s, const char *tensor)
{
    const char *name = ckpt_json_str_or(s->base->names, tensor, tensor);
    const struct ckpt_weight_map *map = s->base->weight_map;

    if (!map)
        return ckpt_catalog_find(s->base->cat, name) ? 1 : 0;
    const uint32_t file = ckpt_weight_map_find(map, name);
    return file == UINT32_MAX ? 0 : s->number[file];
}

static int by_size(struct split *s, struct ckpt_err *err)
{
    const size_t n = s->cat->tensors.len;
    ckpt_cleanup(ckpt_freep) uint64_t *len = malloc((n + 1) * sizeof *len);

    if (!len)
        return ckpt_nomem(err);
    for (size_t i = 0; i < n; i++)
        len[i] = ckpt_tensor_nbytes(&s->cat->tensors.ptr[i]);
    ckpt_automodel_by_size(len, n, default_file_len, s->file);
    for (size_t i = 0; i < n; i++)
        s->last = ckpt_max_u64(s->last, s->file[i]);
    return 0;
}

static int assign(struct split *s, const struct ckpt_naming *naming, const json_t *config,
                  struct ckpt_err *err)
{
    const size_t n = s->cat->tensors.len;
    bool converted = false;

    for (size_t i = 0; i < n; i++) {
        const char *name = s->cat->tensors.ptr[i].name;
        s->file[i] = file_in_base(s, name);
        s->last = ckpt_max_u64(s->last, s->file[i]);
        converted |= !s->file[i] && naming->is_converted(naming->ctx, config, name);
    }
    if (converted && s->files.len) {
        for (size_t i = 0; i < n; i++)
            s->file[i] = ckpt_automodel_equally(i, n, s->files.len);
        s->last = n ? s->file[n - 1] : 0;
        return 0;
    }
    return s->last ? 0 : by_size(s, err);
}

static int make_map(const struct split *s, struct ckpt_weight_map *map, struct ckpt_err *err)
{
    for (size_t i = 0; i < s->cat->tensors.len; i++) {
        char name[80];
        (void)snprintf(name, sizeof name, "model-%05" PRIu64 "-of-%05" PRIu64 SUFFIX,
                       s->file[i] ? s->file[i] : s->last, s->last);
        if (ckpt_weight_map_put(map, s->cat->tensors.ptr[i].name, name, err) < 0)
            return -1;
    }
    return 0;
}

int ckpt_automodel_split(const struct ckpt_catalog *cat, const struct ckpt_split_base *base,
                         const struct ckpt_naming *naming, const json_t *config,
                         struct ckpt_weight_map **ret, struct ckpt_err *err)
{
    ckpt_cleanup(split_release) struct split s = {.cat = cat, .base = base};
    ckpt_cleanup(ckpt_weight_map_unrefp) struct ckpt_weight_map *map = NULL;

    *ret = NULL;
    if (!base->cat && !base->weight_map)
        return 0;
    if (!(s.file = calloc(cat->tensors.len + 1, sizeof *s.file)))
        return ckpt_nomem(err);
    if (ckpt_weight_map_new(&map, err) < 0 || number_files(&s, err) < 0 ||
        assign(&s, naming, config, err) < 0 || make_map(&s, map, err) < 0)
        return -1;
    *ret = ckpt_steal(&map);
    return 0;
}
