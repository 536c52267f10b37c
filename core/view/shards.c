/* SPDX-License-Identifier: Apache-2.0 */
/* Splitting by size, and following another model's split. */
#include "view/shards.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/sort.h"
#include "base/str.h"
#include "container/safetensors.h"
#include "tensor/fqn.h"
#include "view/files.h"

void ckpt_shards_release(struct ckpt_shards *s)
{
    ckpt_arena_release(&s->arena);
    free(s->name);
    free(s->file);
    *s = (struct ckpt_shards){0};
}

/* The unit at the end of text[0..*len), which is cut off with the blanks before it; 1 if there is
 * none, 0 if it is another. */
static uint64_t cut_unit(const char *text, size_t *len)
{
    static const char letters[] = "KMGT";
    uint64_t unit = 1000;

    if (*len && text[*len - 1] >= '0' && text[*len - 1] <= '9')
        return 1;
    if (*len < 2 || (text[*len - 1] | 0x20) != 'b')
        return 0;
    const char *letter = memchr(letters, text[*len - 2] & ~0x20, sizeof letters - 1);
    if (!letter)
        return 0;
    for (const char *l = letters; l < letter; l++)
        unit *= 1000;
    for (*len -= 2; *len && text[*len - 1] == ' ';)
        --*len;
    return unit;
}

bool ckpt_shards_parse_size(const char *text, uint64_t *ret_size)
{
    size_t len = strlen(text);
    uint64_t unit = cut_unit(text, &len);
    unsigned long long whole;
    char number[64];

    if (unit == 1) {
        if (!ckpt_parse_u64(text, len, &whole) || whole == 0 || whole > INT64_MAX)
            return false;
        *ret_size = whole;
        return true;
    }
    if (unit == 0 || len == 0 || len >= sizeof number || strspn(text, "0123456789.") < len)
        return false;
    memcpy(number, text, len);
    number[len] = '\0';
    char *end;
    double size = strtod(number, &end) * (double)unit; /* as Python's float: rounded, then cut */
    if (end != number + len || size < 1 || size >= 0x1p63)
        return false;
    *ret_size = (uint64_t)size;
    return true;
}

static int count_totals(const struct ckpt_catalog *cat, struct ckpt_shards *s, struct ckpt_err *err)
{
    for (size_t i = 0; i < cat->tensors.len; i++) {
        const struct ckpt_tensor *t = &cat->tensors.ptr[i];
        if (ckd_add(&s->total_bytes, s->total_bytes, ckpt_tensor_nbytes(t)) ||
            s->total_bytes > INT64_MAX ||
            ckd_add(&s->total_numel, s->total_numel, ckpt_tensor_elements(t)))
            return ckpt_fail(err, CKPT_LIMIT, "the tensors up to '%s' have 2^63 bytes or more",
                             t->name);
    }
    return 0;
}

static int init(const struct ckpt_catalog *cat, struct ckpt_shards *s, struct ckpt_err *err)
{
    *s = (struct ckpt_shards){0};
    if (!(s->file = malloc((cat->tensors.len + 1) * sizeof *s->file)))
        return ckpt_nomem(err);
    return count_totals(cat, s, err);
}

/* ---- by size ---- */

/* A tensor or a block of neighbours. */
struct item {
    uint64_t nbytes;
    size_t header; /* bytes of header, at most */
    uint32_t first, n;
};

static struct item item_at(const struct ckpt_catalog *cat, size_t first)
{
    const struct ckpt_tensor *t = &cat->tensors.ptr[first];
    struct item it = {.first = (uint32_t)first};

    do {
        it.nbytes += ckpt_tensor_nbytes(&t[it.n]);
        it.header += ckpt_st_header_bound(&t[it.n]);
        it.n++;
    } while (t->block && first + it.n < cat->tensors.len && t[it.n].block == t->block);
    return it;
}

static int item_cmp(const void *a, const void *b, void *arg)
{
    const struct item *x = a, *y = b;
    const struct ckpt_tensor *t = arg;
    int c = ckpt_fqn_cmp(t[x->first].name, t[y->first].name);

    return c ? c : ckpt_u64_cmp(x->first, y->first);
}

/* New: the items in the order of splitting. */
static struct item *items_new(const struct ckpt_catalog *cat, bool sorted, size_t *ret_n)
{
    struct item *item = malloc((cat->tensors.len + 1) * sizeof *item);
    size_t n = 0;

    if (!item)
        return NULL;
    for (size_t i = 0; i < cat->tensors.len; i += item[n++].n)
        item[n] = item_at(cat, i);
    if (sorted)
        qsort_r(item, n, sizeof *item, item_cmp, cat->tensors.ptr);
    *ret_n = n;
    return item;
}

static void assign(struct ckpt_shards *s, const struct item *it, size_t file)
{
    for (uint32_t i = 0; i < it->n; i++)
        s->file[it->first + i] = (uint32_t)file;
}

/* The file being filled gets its number when it is closed, after the large items that passed it. */
static void split(struct ckpt_shards *s, const struct item *item, size_t n, uint64_t max)
{
    const size_t max_header = CKPT_ST_MAX_HEADER - CKPT_ST_MAX_KEPT - 64;
    size_t begin = 0, header = 0;
    uint64_t nbytes = 0;

    for (size_t i = 0; i <= n; i++) {
        if (i < n && item[i].nbytes > max) {
            assign(s, &item[i], s->nfile++);
            continue;
        }
        bool full = i < n && (item[i].nbytes > max - nbytes ||
                              (header && item[i].header > max_header - header));
        if (full || i == n) {
            bool any = false;
            for (; begin < i; begin++)
                if (item[begin].nbytes <= max) {
                    assign(s, &item[begin], s->nfile);
                    any = true;
                }
            s->nfile += any;
            nbytes = header = 0;
        }
        if (i < n) {
            nbytes += item[i].nbytes;
            header = item[i].header > max_header - header ? max_header : header + item[i].header;
        }
    }
}

static int name_numbered(struct ckpt_shards *s, const char *stem, struct ckpt_err *err)
{
    if (!(s->name = calloc(s->nfile + 1, sizeof *s->name)))
        return ckpt_nomem(err);
    for (size_t i = 0; i < s->nfile; i++) {
        ckpt_cleanup(ckpt_freep) char *name =
            s->nfile > 1 ? ckpt_asprintf("%s-%05zu-of-%05zu.safetensors", stem, i + 1, s->nfile)
                         : ckpt_asprintf("%s.safetensors", stem);
        if (!name || !(s->name[i] = ckpt_arena_strdup(&s->arena, name)))
            return ckpt_nomem(err);
    }
    return 0;
}

int ckpt_shards_split(const struct ckpt_catalog *cat, uint64_t max_size, bool sorted,
                      const char *stem, struct ckpt_shards *ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_shards_release) struct ckpt_shards s = {0};
    ckpt_cleanup(ckpt_freep) struct item *item = NULL;
    size_t n;

    if (init(cat, &s, err) < 0)
        return -1;
    if (!(item = items_new(cat, sorted, &n)))
        return ckpt_nomem(err);
    split(&s, item, n, max_size);
    if (name_numbered(&s, stem ? stem : "model", err) < 0)
        return -1;
    *ret = s;
    s = (struct ckpt_shards){0};
    return 0;
}

/* ---- by a map ---- */

/* Check where a map puts a tensor: a file in the model's directory, or in folders of it, which a
 * view has, too. */
static int check_file_name(const char *tensor, const char *name, struct ckpt_err *err)
{
    if (!ckpt_has_suffix(name, ".safetensors") || !ckpt_vfiles_path_ok(name) || name[0] == '.' ||
        strstr(name, "/."))
        return ckpt_fail(err, CKPT_FORMAT,
                         "weight_map: '%s' lies in '%s', expected a .safetensors file in the "
                         "model's directory or in a folder of it, such as "
                         "'shards/model-00001-of-00002.safetensors', without '..' and hidden names",
                         tensor, name);
    return 0;
}

/* A file of a map is used if tensors are in it. */
struct used {
    const char *name;
    uint32_t number; /* in the map */
};

/* s->name: the files that tensors of cat are in, sorted. place[]: of a file of the map its index
 * there; UINT32_MAX: it is not used. */
static int name_mapped(const struct ckpt_catalog *cat, const struct ckpt_weight_map *map,
                       struct used *used, uint32_t *place, struct ckpt_shards *s,
                       struct ckpt_err *err)
{
    memset(place, 0xff, map->files.len * sizeof *place);
    for (size_t i = 0; i < cat->tensors.len; i++) {
        const uint32_t file = s->file[i] = ckpt_weight_map_find(map, cat->tensors.ptr[i].name);
        if (file == UINT32_MAX || place[file] != UINT32_MAX)
            continue;
        if (check_file_name(cat->tensors.ptr[i].name, map->files.ptr[file], err) < 0)
            return -1;
        place[file] = 0;
        used[s->nfile++] = (struct used){map->files.ptr[file], file};
    }
    if (s->nfile == 0)
        return ckpt_fail(err, CKPT_MISSING, "weight_map names none of the tensors");
    qsort(used, s->nfile, sizeof *used, ckpt_strings_cmp); /* by the first member */
    if (!(s->name = calloc(s->nfile, sizeof *s->name)))
        return ckpt_nomem(err);
    for (size_t i = 0; i < s->nfile; i++) {
        place[used[i].number] = (uint32_t)i;
        if (!(s->name[i] = ckpt_arena_strdup(&s->arena, used[i].name)))
            return ckpt_nomem(err);
    }
    return 0;
}

int ckpt_shards_by_map(const struct ckpt_catalog *cat, const struct ckpt_weight_map *map,
                       struct ckpt_shards *ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_shards_release) struct ckpt_shards s = {0};
    ckpt_cleanup(ckpt_freep) struct used *used = malloc((map->files.len + 1) * sizeof *used);
    ckpt_cleanup(ckpt_freep) uint32_t *place = malloc((map->files.len + 1) * sizeof *place);

    if (!used || !place)
        return ckpt_nomem(err);
    if (init(cat, &s, err) < 0 || name_mapped(cat, map, used, place, &s, err) < 0)
        return -1;
    for (size_t i = 0; i < cat->tensors.len; i++)
        s.file[i] = s.file[i] == UINT32_MAX ? (uint32_t)s.nfile - 1 : place[s.file[i]];
    s.mapped = true;
    *ret = s;
    s = (struct ckpt_shards){0};
    return 0;
}

int ckpt_shards_choose(const struct ckpt_catalog *cat, const struct ckpt_weight_map *map,
                       uint64_t max_size, bool sorted, const char *stem, struct ckpt_shards *ret,
                       struct ckpt_err *err)
{
    struct ckpt_err why = {0};

    if (map) {
        if (ckpt_shards_by_map(cat, map, ret, &why) == 0)
            return 0;
        if (why.code != CKPT_MISSING)
            return ckpt_err_move(err, &why);
    }
    return ckpt_shards_split(cat, max_size ? max_size : CKPT_DEFAULT_SHARD_SIZE, sorted, stem, ret,
                             err);
}

/* ---- the index ---- */

static void put_head(const struct ckpt_index *x, struct ckpt_str *out)
{
    ckpt_str_puts(out, "{\n  \"metadata\": {\n    \"total_parameters\": ");
    ckpt_str_put_u64(out, x->shards->total_numel);
    ckpt_str_puts(out, ",\n    \"total_size\": ");
    ckpt_str_put_u64(out, x->shards->total_bytes);
    ckpt_str_puts(out, "\n  },\n  \"weight_map\": {\n");
}

static void put_entry(const void *ctx, size_t i, struct ckpt_str *out)
{
    const struct ckpt_index *x = ctx;
    uint32_t tensor = x->by_name[i];

    if (i == 0)
        put_head(x, out);
    ckpt_str_puts(out, "    ");
    ckpt_json_put_string(out, x->cat->tensors.ptr[tensor].name);
    ckpt_str_puts(out, ": ");
    ckpt_json_put_string(out, x->shards->name[x->shards->file[tensor]]);
    ckpt_str_puts(out, i + 1 < x->cat->tensors.len ? ",\n" : "\n  }\n}\n");
}

int ckpt_index_text(const struct ckpt_index *index, struct ckpt_arena *arena, struct ckpt_text *ret,
                    struct ckpt_err *err)
{
    assert(index->cat->tensors.len > 0);
    return ckpt_text_init(ret, put_entry, index, index->cat->tensors.len, CKPT_TEXT_SHORT, arena,
                          err);
}
