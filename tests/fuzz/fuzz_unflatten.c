/* SPDX-License-Identifier: Apache-2.0 */
/* Flat parameters of FSDP1. Input, a line each: config.json, then
 *
 *     f NAME DTYPE RANKS DATA PADDING DATA ...   a flat parameter: numbers of elements, in turns
 *     c NAME DTYPE DIMENSIONS                    another tensor of the checkpoint
 *     b NAME DTYPE DIMENSIONS                    a tensor of the base
 *
 * Where the parameters are found, they lie inside the flat ones, each in one run, do not overlap,
 * leave nothing out but padding, and are read back as what lies there. */
#include "fuzz.h"

#include <stdio.h>

#include "base/json.h"
#include "model/unflatten.h"
#include "recipe/library/recipe.h"

enum { MOST_LINES = 40, MOST_UNITS = 8, MOST_RANKS = 8, MOST_ELEMENTS = 1 << 12, LEAD = 3 };

/* A flat parameter. Each rank's part is a source, which begins with LEAD elements of its own. */
struct unit {
    char *name;
    enum ckpt_dtype dtype;
    uint32_t source; /* of the first rank */
    uint64_t numel, share, nrank;
    bool padding[MOST_ELEMENTS];
    uint8_t data[(MOST_ELEMENTS + MOST_RANKS * LEAD) * 8];
    uint8_t seen[MOST_ELEMENTS];
};

struct job {
    struct ckpt_catalog *cat, *base;
    struct unit unit[MOST_UNITS];
    size_t nunit;
};

/* ---- the flat parameters ---- */

/* 42, as the dtype has it; 0 for those that are not floating point, of which no padding is known.
 */
static uint64_t padding_of(enum ckpt_dtype dtype)
{
    switch (dtype) {
    case CKPT_F64:
        return 0x4045000000000000;
    case CKPT_F32:
        return 0x42280000;
    case CKPT_BF16:
        return 0x4228;
    case CKPT_F16:
        return 0x5140;
    default:
        return 0;
    }
}

/* The elements are numbered; what is before them is 0xff. */
static void fill_unit(struct unit *u)
{
    const size_t esize = ckpt_dtype_size(u->dtype);
    uint8_t *p = u->data;

    for (uint64_t i = 0; i < u->numel; i++) {
        uint64_t value = u->padding[i] ? padding_of(u->dtype) : i + 1;
        if (i % u->share == 0) {
            memset(p, 0xff, LEAD * esize);
            p += LEAD * esize;
        }
        memcpy(p, &value, esize);
        p += esize;
    }
}

static void add_ranks(struct job *j, struct unit *u, size_t index)
{
    const size_t esize = ckpt_dtype_size(u->dtype);
    struct ckpt_piece_draft piece[MOST_RANKS] = {0};
    struct ckpt_err err = {0};
    uint8_t *at = u->data;
    size_t n = 0;

    for (uint64_t lo = 0; lo < u->numel; lo += u->share, n++) {
        const uint64_t len = ckpt_min_u64(u->share, u->numel - lo);
        struct ckpt_source *s;
        MUST(ckpt_source_mem_new("rank", at, (LEAD + len) * esize, &s, &err) == 0);
        const uint32_t source = ckpt_catalog_add_source(j->cat, s, &err);
        ckpt_source_unref(s);
        if (lo == 0)
            u->source = source;
        piece[n] = (struct ckpt_piece_draft){.dst = lo,
                                             .src = LEAD * esize,
                                             .source = source,
                                             .naxis = 1,
                                             .axis = {{len, 1, esize}}};
        at += (LEAD + len) * esize;
    }
    MUST(ckpt_catalog_set_pieces(j->cat, index, piece, n, &err) == 0);
}

static bool is_flat(const char *name)
{
    const char *own = strrchr(name, '.');

    return strcmp(own ? own + 1 : name, "_flat_param") == 0;
}

static void add_unit(struct job *j, const char *name, enum ckpt_dtype dtype, const char *line)
{
    struct unit *u = &j->unit[j->nunit];
    struct ckpt_err err = {0};
    unsigned long n;
    size_t index;
    int end;

    if (!is_flat(name) || j->nunit == MOST_UNITS || sscanf(line, "%9lu%n", &n, &end) < 1 ||
        n == 0 || n > MOST_RANKS)
        return;
    *u = (struct unit){.dtype = dtype, .nrank = n};
    line += end;
    for (bool padding = false; sscanf(line, "%9lu%n", &n, &end) == 1; padding = !padding) {
        line += end;
        while (n-- && u->numel < MOST_ELEMENTS)
            u->padding[u->numel++] = padding;
    }
    u->share = (u->numel + u->nrank - 1) / u->nrank;
    if (ckpt_catalog_add(j->cat, name, dtype, &u->numel, 1, &index, &err) < 0)
        return;
    MUST(u->name = strdup(name));
    j->nunit++;
    fill_unit(u);
    if (u->numel)
        add_ranks(j, u, index);
}

/* ---- the others ---- */

static void add_tensor(struct ckpt_catalog *cat, const char *name, enum ckpt_dtype dtype,
                       const char *line)
{
    uint64_t dim[CKPT_MAX_RANK], numel;
    struct ckpt_err err = {0};
    uint32_t rank = 0;
    unsigned long n;
    size_t index;
    int end;

    for (; rank < CKPT_MAX_RANK && sscanf(line, "%9lu%n", &n, &end) == 1; line += end)
        dim[rank++] = n;
    if (ckpt_shape_numel(dim, rank, &numel))
        (void)ckpt_catalog_add(cat, name, dtype, dim, rank, &index, &err);
}

static void add_line(struct job *j, const char *line)
{
    char which, name[200], dtype[20];
    enum ckpt_dtype type;
    int at = 0;

    if (sscanf(line, "%c %199s %19s%n", &which, name, dtype, &at) < 3 ||
        !ckpt_dtype_parse(dtype, strlen(dtype), &type))
        return;
    if (which == 'f')
        add_unit(j, name, type, line + at);
    else
        add_tensor(which == 'b' ? j->base : j->cat, name, type, line + at);
}

/* ---- what must hold ---- */

static struct unit *unit_of(struct job *j, uint32_t source)
{
    for (size_t i = 0; i < j->nunit; i++) {
        struct unit *u = &j->unit[i];
        if (u->numel && source >= u->source &&
            source - u->source < (u->numel + u->share - 1) / u->share)
            return u;
    }
    return NULL;
}

/* The element of the flat parameter that lies at this byte of the source. */
static uint64_t element_at(const struct unit *u, uint32_t source, uint64_t byte)
{
    const uint64_t esize = ckpt_dtype_size(u->dtype), lo = (source - u->source) * u->share;

    MUST(byte % esize == 0 && byte / esize >= LEAD);
    MUST(byte / esize - LEAD < ckpt_min_u64(u->share, u->numel - lo));
    return lo + byte / esize - LEAD;
}

/* Note in where[] for each element of the piece which one of the flat parameter it is. */
static void walk_piece(struct job *j, const struct ckpt_tensor *t, const struct ckpt_piece *p,
                       uint64_t *where)
{
    struct unit *u = unit_of(j, p->source);
    uint64_t at[CKPT_MAX_AXES] = {0};
    uint32_t k;

    MUST(u && t->dtype == u->dtype && p->naxis <= CKPT_MAX_AXES);
    do {
        uint64_t dst = p->dst, src = p->src;
        for (k = 0; k < p->naxis; k++) {
            MUST(p->axis[k].n > 0);
            dst += at[k] * p->axis[k].dst;
            src += at[k] * p->axis[k].src;
        }
        MUST(dst < t->numel && where[dst] == UINT64_MAX);
        where[dst] = element_at(u, p->source, src);
        for (k = p->naxis; k > 0 && ++at[k - 1] == p->axis[k - 1].n; k--)
            at[k - 1] = 0;
    } while (k > 0);
}

static void check_param(struct job *j, const struct ckpt_tensor *t)
{
    uint64_t *where = malloc(t->numel * sizeof *where);
    struct unit *u = unit_of(j, t->piece[0].source);

    MUST(where && u && t->numel <= u->numel);
    memset(where, 0xff, t->numel * sizeof *where);
    for (size_t i = 0; i < t->npiece; i++) {
        MUST(unit_of(j, t->piece[i].source) == u);
        walk_piece(j, t, &t->piece[i], where);
    }
    for (uint64_t i = 0; i < t->numel; i++)
        MUST(where[i] == where[0] + i && u->seen[where[i]]++ == 0);

    const size_t esize = ckpt_dtype_size(t->dtype);
    uint8_t *value = malloc(t->numel * esize);
    struct ckpt_err err = {0};
    MUST(value && ckpt_tensor_pread(j->cat, t, NULL, value, t->numel * esize, 0, &err) == 0);
    for (uint64_t i = 0; i < t->numel; i++) {
        const uint64_t flat = where[i], want = u->padding[flat] ? padding_of(u->dtype) : flat + 1;
        MUST(memcmp(value + i * esize, &want, esize) == 0);
    }
    free(value);
    free(where);
    read_back(j->cat, t);
}

/* Every tensor of the base is there with its shape, but for the copies of tied ones. */
static void check_names(struct job *j, const struct ckpt_type *type)
{
    const char *root = j->unit[0].name;

    for (size_t i = 1; i < j->nunit; i++)
        if (strlen(j->unit[i].name) < strlen(root))
            root = j->unit[i].name;
    for (size_t i = 0; i < j->base->tensors.len; i++) {
        const struct ckpt_tensor *b = &j->base->tensors.ptr[i];
        char name[512];
        bool tied = false;
        (void)snprintf(name, sizeof name, "%.*s%s", (int)(strlen(root) - strlen("_flat_param")),
                       root, b->name);
        for (size_t k = 0; k < type->ties.n; k++)
            tied |= strcmp(type->ties.pair[k].from, b->name) == 0;
        const struct ckpt_tensor *t = ckpt_catalog_find(j->cat, name);
        MUST(t || tied);
        MUST(!t || (t->rank == b->rank && memcmp(t->dim, b->dim, b->rank * sizeof *b->dim) == 0));
    }
}

static void check(struct job *j, const struct ckpt_type *type)
{
    for (size_t i = 0; i < j->cat->tensors.len; i++)
        if (j->cat->tensors.ptr[i].npiece)
            check_param(j, &j->cat->tensors.ptr[i]);
    for (size_t i = 0; i < j->nunit; i++)
        for (uint64_t k = 0; k < j->unit[i].numel; k++)
            MUST(j->unit[i].seen[k] || j->unit[i].padding[k] || !padding_of(j->unit[i].dtype));
    if (j->nunit)
        check_names(j, type);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct ckpt_recipes *recipes;
    static struct job job;
    struct input in = {data, size};
    char *config = input_text(&in, '\n');
    struct ckpt_err err = {0};
    json_t *hf = NULL;

    MUST(recipes || ckpt_recipes_load(NULL, &recipes, &err) == 0);
    job.nunit = 0;
    MUST(ckpt_catalog_new(&job.cat, &err) == 0 && ckpt_catalog_new(&job.base, &err) == 0);
    for (int i = 0; i < MOST_LINES && in.left; i++) {
        char *line = input_text(&in, '\n');
        add_line(&job, line);
        free(line);
    }
    (void)ckpt_json_parse(config, strlen(config), "config.json", &hf, NULL);
    const struct ckpt_types *types = ckpt_recipes_types(recipes);
    const struct ckpt_base base = {.cat = job.base};
    if (ckpt_unflatten(job.cat, types, &base, hf, &err) < 0)
        check_err(&err);
    else if (job.nunit)
        check(&job, ckpt_types_find(types, ckpt_json_str(hf, "model_type")));
    for (size_t i = 0; i < job.nunit; i++)
        free(job.unit[i].name);
    json_decref(hf);
    ckpt_catalog_free(job.cat);
    ckpt_catalog_free(job.base);
    free(config);
    return 0;
}
