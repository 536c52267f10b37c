/* SPDX-License-Identifier: Apache-2.0 */
/* Reading the manifest and the trees of an OCDBT database. */
#include "container/ocdbt.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/crc32.h"
#include "base/map.h"
#include "base/str.h"
#include "container/zstd.h"
#include "io/cursor.h"

enum {
    MANIFEST_MAGIC = 0x0cdb3a2a,
    BTREE_MAGIC = 0x0cdb20de,
    VERSIONS_MAGIC = 0x0cdb1234,
    MAX_PATH = 65535,            /* bytes of a path or a key, as tensorstore has it */
    MAX_NODE = 256 << 20,        /* bytes of a node, stored and decompressed */
    MAX_KEYS = 16 * 1024 * 1024, /* of a database */
    NODE_COST = 4096,            /* added to the bytes of each node, against many small ones */
    MAGIC = 4,
    HEADER = MAGIC + 8, /* the magic number and the length */
    FOOTER = 4,
};

/* Nodes and keys of a database are at most so long together: who refers to one node again and
 * again is stopped by this. */
#define MAX_READ (UINT64_C(2) << 30)

struct reading {
    ckpt_ocdbt_open_fn *open;
    void *ctx;
    struct ckpt_ocdbt *db;
    struct ckpt_map by_path;  /* of db->files */
    struct ckpt_str small;    /* values that the nodes hold */
    CKPT_VEC(size_t) inlined; /* the values that lie in `small`: their indices */
    uint64_t left;            /* of MAX_READ */
};

static void reading_release(struct reading *r)
{
    ckpt_map_release(&r->by_path);
    ckpt_str_release(&r->small);
    ckpt_vec_release(&r->inlined);
}

/* ---- numbers ---- */

/* Seven bits a byte, the lowest first; the last byte has no eighth bit. */
static uint64_t take_varint(struct ckpt_cursor *c)
{
    uint64_t value = 0;

    for (unsigned shift = 0; shift < 64; shift += 7) {
        const uint8_t byte = ckpt_cursor_u8(c);
        const uint64_t bits = byte & 0x7f;
        if (shift == 63 && bits > 1)
            break;
        value |= bits << shift;
        if (!(byte & 0x80))
            return c->failed ? 0 : value;
    }
    if (!c->failed) {
        c->failed = true;
        c->failed_at = ckpt_cursor_off(c);
    }
    return 0;
}

static uint32_t be32(const unsigned char *p)
{
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

/* n numbers, each of a byte at least; NULL: there are not as many, or there is no memory. The
 * caller frees them. */
static uint64_t *take_varints(struct ckpt_cursor *c, uint64_t n, struct ckpt_err *err)
{
    if (n > ckpt_cursor_left(c)) {
        (void)ckpt_fail(err, CKPT_FORMAT, "it claims %" PRIu64 " entries in %zu bytes", n,
                        ckpt_cursor_left(c));
        return NULL;
    }
    uint64_t *ret = malloc(((size_t)n + 1) * sizeof *ret);
    if (!ret)
        (void)ckpt_nomem(err);
    for (uint64_t i = 0; ret && i < n; i++)
        ret[i] = take_varint(c);
    return ret;
}

static int check_cursor(const struct ckpt_cursor *c, struct ckpt_err *err)
{
    return c->failed ? ckpt_fail(err, CKPT_FORMAT,
                                 "its contents end at byte %" PRIu64 ", where more was expected",
                                 c->failed_at)
                     : 0;
}

/* ---- files ---- */

static int open_file(struct reading *r, const char *path, struct ckpt_source **ret,
                     struct ckpt_err *err)
{
    const uint32_t known = ckpt_map_find(&r->by_path, path);
    struct ckpt_source *s = NULL;
    struct ckpt_ocdbt_file *f;

    if (known != CKPT_NONE) {
        *ret = r->db->files.ptr[known].source;
        return 0;
    }
    if (r->open(r->ctx, path, &s, err) < 0)
        return -1;
    if (ckpt_vec_add(&r->db->files, &f) < 0) {
        ckpt_source_unref(s);
        return ckpt_nomem(err);
    }
    f->source = *ret = s;
    f->path = ckpt_arena_strdup(&r->db->arena, path);
    return f->path &&
                   ckpt_map_add(&r->by_path, f->path, (uint32_t)r->db->files.len - 1) != CKPT_NONE
               ? 0
               : ckpt_nomem(err);
}

/* The files to which the entries of a node refer: whole paths, and how much of each is the
 * beginning of the paths in the node that lies there. */
struct files {
    uint64_t n;
    const char **path;
    size_t *base;
};

static void files_release(struct files *f)
{
    free(f->path);
    free(f->base);
}

/* One path: what it shares with the one before, and its own bytes. */
static int take_path(struct ckpt_cursor *c, const char *beginning, uint64_t shared, uint64_t own,
                     struct ckpt_str *path, struct ckpt_err *err)
{
    const size_t before = strlen(beginning);

    if (own > MAX_PATH || shared > MAX_PATH || before + shared + own > MAX_PATH)
        return ckpt_fail(err, CKPT_FORMAT, "the path of a data file has more than %d bytes",
                         MAX_PATH);
    if (path->len < before + shared)
        return ckpt_fail(err, CKPT_FORMAT,
                         "the path of a data file shares more with the one before than that has");
    const char *bytes = ckpt_cursor_take(c, own);
    if (!bytes)
        return check_cursor(c, err);
    if (memchr(bytes, '\0', (size_t)own))
        return ckpt_fail(err, CKPT_FORMAT, "the path of a data file holds a NUL");
    path->len = before + (size_t)shared;
    ckpt_str_append(path, bytes, (size_t)own);
    return path->failed ? ckpt_nomem(err) : 0;
}

static int take_files(struct reading *r, struct ckpt_cursor *c, const char *beginning,
                      struct files *ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str path = {0};
    const uint64_t n = take_varint(c);
    ckpt_cleanup(ckpt_freep) uint64_t *shared = take_varints(c, n ? n - 1 : 0, err);
    ckpt_cleanup(ckpt_freep) uint64_t *own = shared ? take_varints(c, n, err) : NULL;
    ckpt_cleanup(ckpt_freep) uint64_t *base = own ? take_varints(c, n, err) : NULL;

    if (!base)
        return -1;
    if (check_cursor(c, err) < 0)
        return -1;
    ret->path = calloc((size_t)n + 1, sizeof *ret->path);
    ret->base = calloc((size_t)n + 1, sizeof *ret->base);
    ckpt_str_puts(&path, beginning);
    if (!ret->path || !ret->base || path.failed)
        return ckpt_nomem(err);
    const size_t before = path.len;
    for (uint64_t i = 0; i < n; i++) {
        if (take_path(c, beginning, i ? shared[i - 1] : 0, own[i], &path, err) < 0)
            return -1;
        if (base[i] > path.len - before)
            return ckpt_fail(err, CKPT_FORMAT, "the base of a data file's path is longer than it");
        if (ckd_sub(&r->left, r->left, path.len) || r->left > MAX_READ)
            return ckpt_fail(err, CKPT_LIMIT, "the paths of its data files are too long");
        ret->base[i] = before + (size_t)base[i];
        if (!(ret->path[i] = ckpt_arena_strdup(&r->db->arena, ckpt_str_get(&path))))
            return ckpt_nomem(err);
    }
    ret->n = n;
    return 0;
}

/* ---- nodes ---- */

/* Where a node lies. */
struct place {
    const char *path;
    size_t base; /* so much of the path is the beginning of those in the node */
    uint64_t off, len;
};

/* Name the node in an error. */
static int blame(const struct place *p, struct ckpt_err *err)
{
    return ckpt_err_in(err, "'%s', the node at byte %" PRIu64, p->path, p->off);
}

/* The bytes of a node without header and checksum, decompressed; malloc'ed. */
struct body {
    unsigned char *bytes;
    size_t len;
};

static int unpack(const unsigned char *raw, size_t len, uint32_t magic, struct body *ret,
                  struct ckpt_err *err)
{
    struct ckpt_cursor c;

    if (len < HEADER + FOOTER || be32(raw) != magic)
        return ckpt_fail(err, CKPT_FORMAT, "it does not begin with the magic number %08x", magic);
    ckpt_cursor_init(&c, raw + MAGIC, len - MAGIC, 0, "");
    const uint64_t said = ckpt_cursor_le64(&c);
    if (said != len)
        return ckpt_fail(err, CKPT_FORMAT, "it has %zu bytes, but says that it has %" PRIu64, len,
                         said);
    ckpt_cursor_init(&c, raw + len - FOOTER, FOOTER, 0, "");
    if (ckpt_crc32c(0, raw, len - FOOTER) != ckpt_cursor_le32(&c))
        return ckpt_fail(err, CKPT_FORMAT, "its checksum (CRC-32C) is wrong: it is damaged");
    ckpt_cursor_init(&c, raw + HEADER, len - HEADER - FOOTER, HEADER, "");
    const uint64_t version = take_varint(&c), compression = take_varint(&c);
    if (check_cursor(&c, err) < 0)
        return -1;
    if (version != 0 || compression > 1)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "version %" PRIu64 " with compression %" PRIu64
                         " is not supported, only version 0 with none (0) or zstd (1)",
                         version, compression);
    if (compression)
        return ckpt_zstd_decompress(c.at, ckpt_cursor_left(&c), MAX_NODE, (void **)&ret->bytes,
                                    &ret->len, err);
    ret->len = ckpt_cursor_left(&c);
    if (!(ret->bytes = malloc(ret->len + 1)))
        return ckpt_nomem(err);
    memcpy(ret->bytes, c.at, ret->len);
    return 0;
}

static int read_node(struct reading *r, const struct place *p, uint32_t magic, struct body *ret,
                     struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) unsigned char *raw = NULL;
    struct ckpt_source *s = NULL;

    if (open_file(r, p->path, &s, err) < 0)
        return -1;
    if (!ckpt_range_ok(p->off, p->len, s->size))
        return ckpt_fail(err, CKPT_FORMAT,
                         "'%s' has %" PRIu64 " bytes, but a node of %" PRIu64
                         " should lie at byte %" PRIu64,
                         p->path, s->size, p->len, p->off);
    if (p->len > MAX_NODE)
        return ckpt_fail(err, CKPT_LIMIT,
                         "'%s': the node at byte %" PRIu64 " has %" PRIu64
                         " bytes, at most %d are read",
                         p->path, p->off, p->len, MAX_NODE);
    if (!(raw = malloc((size_t)p->len + 1)))
        return ckpt_nomem(err);
    if (ckpt_source_pread(s, raw, (size_t)p->len, p->off, err) < 0)
        return -1;
    if (unpack(raw, (size_t)p->len, magic, ret, err) < 0)
        return blame(p, err);
    if (ckd_sub(&r->left, r->left, p->len + ret->len + NODE_COST) || r->left > MAX_READ)
        return ckpt_fail(err, CKPT_LIMIT,
                         "'%s': the nodes of the database have more than %" PRIu64
                         " bytes together, or some are there again and again",
                         p->path, (uint64_t)MAX_READ);
    return 0;
}

static void body_release(struct body *b) { free(b->bytes); }

/* The place that entry i of a node names. */
static int place_of(const struct files *files, uint64_t id, uint64_t off, uint64_t len,
                    struct place *ret, struct ckpt_err *err)
{
    if (id >= files->n)
        return ckpt_fail(err, CKPT_FORMAT, "it refers to data file %" PRIu64 " of %" PRIu64, id,
                         files->n);
    *ret = (struct place){files->path[id], files->base[id], off, len};
    return 0;
}

/* ---- keys ---- */

/* Keys of a node, each of which shares its beginning with the one before. */
struct keys {
    uint64_t n;
    uint64_t *shared, *own, *common; /* common: of interior nodes */
    const char *bytes;
};

static void keys_release(struct keys *k)
{
    free(k->shared);
    free(k->own);
    free(k->common);
}

static int take_keys(struct ckpt_cursor *c, bool interior, struct keys *k, struct ckpt_err *err)
{
    uint64_t sum = 0;

    k->n = take_varint(c);
    if (check_cursor(c, err) < 0 || !(k->shared = take_varints(c, k->n ? k->n - 1 : 0, err)) ||
        !(k->own = take_varints(c, k->n, err)) ||
        (interior && !(k->common = take_varints(c, k->n, err))))
        return -1;
    for (uint64_t i = 0; i < k->n; i++)
        if (ckd_add(&sum, sum, k->own[i]))
            return ckpt_fail(err, CKPT_FORMAT, "its keys have more than 2^64 bytes");
    k->bytes = ckpt_cursor_take(c, sum);
    return check_cursor(c, err);
}

/* Make `key`, which ends with key i - 1 after `before` bytes, end with key i. */
static int next_key(struct keys *k, uint64_t i, size_t before, struct ckpt_str *key,
                    struct ckpt_err *err)
{
    const uint64_t shared = i ? k->shared[i - 1] : 0, own = k->own[i];

    if (i && shared > key->len - before)
        return ckpt_fail(err, CKPT_FORMAT, "a key shares more with the one before than that has");
    if (own > MAX_PATH || before + shared + own > MAX_PATH)
        return ckpt_fail(err, CKPT_LIMIT, "a key has more than %d bytes", MAX_PATH);
    if (memchr(k->bytes, '\0', (size_t)own))
        return ckpt_fail(err, CKPT_UNSUPPORTED, "a key holds a NUL");
    key->len = before + (size_t)shared;
    ckpt_str_append(key, k->bytes, (size_t)own);
    k->bytes += own;
    if (k->common && k->common[i] > shared + own)
        return ckpt_fail(err, CKPT_FORMAT,
                         "the common beginning of a node's keys is longer than "
                         "the first");
    return key->failed ? ckpt_nomem(err) : 0;
}

/* ---- leaves ---- */

static int add_value(struct reading *r, const char *key, const struct ckpt_ocdbt_value *at,
                     struct ckpt_err *err)
{
    struct ckpt_ocdbt *db = r->db;
    struct ckpt_ocdbt_value v = *at;

    if (db->values.len && strcmp(db->values.ptr[db->values.len - 1].key, key) >= 0)
        return ckpt_fail(err, CKPT_FORMAT, "key '%s' comes after '%s'", key,
                         db->values.ptr[db->values.len - 1].key);
    if (db->values.len == MAX_KEYS || ckd_sub(&r->left, r->left, strlen(key)) || r->left > MAX_READ)
        return ckpt_fail(err, CKPT_LIMIT,
                         "the database has more than %d keys, or %" PRIu64 " bytes of them",
                         MAX_KEYS, (uint64_t)MAX_READ);
    if (!(v.key = ckpt_arena_strdup(&db->arena, key)) || ckpt_vec_push(&db->values, v) < 0)
        return ckpt_nomem(err);
    return 0;
}

static int add_inline(struct reading *r, struct ckpt_cursor *c, const char *key, uint64_t len,
                      struct ckpt_err *err)
{
    const struct ckpt_ocdbt_value at = {.off = r->small.len, .len = len};
    const char *bytes = ckpt_cursor_take(c, len);

    if (!bytes)
        return check_cursor(c, err);
    ckpt_str_append(&r->small, bytes, (size_t)len);
    if (r->small.failed || ckpt_vec_push(&r->inlined, r->db->values.len) < 0)
        return ckpt_nomem(err);
    return add_value(r, key, &at, err);
}

static int add_outer(struct reading *r, const char *key, const struct place *p,
                     struct ckpt_err *err)
{
    struct ckpt_ocdbt_value at = {.off = p->off, .len = p->len};

    if (open_file(r, p->path, &at.source, err) < 0)
        return ckpt_err_in(err, "the value of '%s'", key);
    if (!ckpt_range_ok(at.off, at.len, at.source->size))
        return ckpt_fail(err, CKPT_FORMAT,
                         "the value of '%s' is at bytes %" PRIu64 " to %" PRIu64
                         " of '%s', which has %" PRIu64,
                         key, at.off, at.off + at.len, p->path, at.source->size);
    return add_value(r, key, &at, err);
}

/* The columns of a leaf. */
struct leaf {
    struct keys keys;
    uint64_t *len, *kind, *file, *off;
};

static void leaf_release(struct leaf *l)
{
    keys_release(&l->keys);
    free(l->len);
    free(l->kind);
    free(l->file);
    free(l->off);
}

static int read_leaf(struct reading *r, struct ckpt_cursor *c, const struct files *files,
                     struct ckpt_str *key, struct ckpt_err *err)
{
    ckpt_cleanup(leaf_release) struct leaf l = {{0}};
    const size_t before = key->len;
    uint64_t outer = 0, k = 0;

    if (take_keys(c, false, &l.keys, err) < 0 || !(l.len = take_varints(c, l.keys.n, err)) ||
        !(l.kind = take_varints(c, l.keys.n, err)))
        return -1;
    for (uint64_t i = 0; i < l.keys.n; i++) {
        if (l.kind[i] > 1)
            return ckpt_fail(err, CKPT_UNSUPPORTED,
                             "a value is stored in a way (%" PRIu64 ") that is not known",
                             l.kind[i]);
        outer += l.kind[i];
    }
    if (!(l.file = take_varints(c, outer, err)) || !(l.off = take_varints(c, outer, err)) ||
        check_cursor(c, err) < 0)
        return -1;
    for (uint64_t i = 0; i < l.keys.n; i++) {
        struct place p = {0};
        if (next_key(&l.keys, i, before, key, err) < 0)
            return -1;
        if (!l.kind[i] && add_inline(r, c, ckpt_str_get(key), l.len[i], err) < 0)
            return -1;
        if (l.kind[i] && (place_of(files, l.file[k], l.off[k], l.len[i], &p, err) < 0 ||
                          add_outer(r, ckpt_str_get(key), &p, err) < 0))
            return -1;
        k += l.kind[i];
    }
    key->len = before;
    return 0;
}

/* ---- the B+tree ---- */

/* The columns of an interior node. */
struct interior {
    struct keys keys;
    uint64_t *file, *off, *len, *nkey;
};

static void interior_release(struct interior *n)
{
    keys_release(&n->keys);
    free(n->file);
    free(n->off);
    free(n->len);
    free(n->nkey);
}

static int take_interior(struct ckpt_cursor *c, struct interior *n, struct ckpt_err *err)
{
    if (take_keys(c, true, &n->keys, err) < 0 || !(n->file = take_varints(c, n->keys.n, err)) ||
        !(n->off = take_varints(c, n->keys.n, err)) ||
        !(n->len = take_varints(c, n->keys.n, err)) || !(n->nkey = take_varints(c, n->keys.n, err)))
        return -1;
    for (int column = 0; column < 2; column++) { /* bytes of nodes, and of values in files */
        ckpt_cleanup(ckpt_freep) uint64_t *ignored = take_varints(c, n->keys.n, err);
        if (!ignored)
            return -1;
    }
    return check_cursor(c, err);
}

static int read_tree(struct reading *r, const struct place *p, uint8_t height, uint64_t nkey,
                     struct ckpt_str *key, struct ckpt_err *err);

static int read_children(struct reading *r, const struct place *at, struct ckpt_cursor *c,
                         const struct files *files, uint8_t height, struct ckpt_str *key,
                         struct ckpt_err *err)
{
    ckpt_cleanup(interior_release) struct interior n = {{0}};
    ckpt_cleanup(ckpt_str_release) struct ckpt_str common = {0};
    const size_t before = key->len;

    if (take_interior(c, &n, err) < 0)
        return blame(at, err);
    for (uint64_t i = 0; i < n.keys.n; i++) {
        struct place p = {0};
        if (next_key(&n.keys, i, before, key, err) < 0 ||
            place_of(files, n.file[i], n.off[i], n.len[i], &p, err) < 0)
            return blame(at, err);
        ckpt_str_clear(&common);
        ckpt_str_append(&common, ckpt_str_get(key), before + (size_t)n.keys.common[i]);
        if (common.failed)
            return ckpt_nomem(err);
        if (read_tree(r, &p, (uint8_t)(height - 1), n.nkey[i], &common, err) < 0)
            return -1;
    }
    key->len = before;
    return 0;
}

static int read_btree_body(struct reading *r, const struct place *p, const struct body *b,
                           uint8_t height, struct ckpt_str *key, struct ckpt_err *err)
{
    ckpt_cleanup(files_release) struct files files = {0};
    ckpt_cleanup(ckpt_freep) char *beginning = strndup(p->path, p->base);
    struct ckpt_cursor c;

    if (!beginning)
        return ckpt_nomem(err);
    ckpt_cursor_init(&c, b->bytes, b->len, 0, "");
    const uint8_t own = ckpt_cursor_u8(&c);
    if (check_cursor(&c, err) < 0)
        return blame(p, err);
    if (own != height) {
        (void)ckpt_fail(err, CKPT_FORMAT, "it has height %u, where %u is expected", own, height);
        return blame(p, err);
    }
    if (take_files(r, &c, beginning, &files, err) < 0)
        return blame(p, err);
    if (height && read_children(r, p, &c, &files, height, key, err) < 0)
        return -1;
    if (!height && read_leaf(r, &c, &files, key, err) < 0)
        return blame(p, err);
    if (!ckpt_cursor_left(&c))
        return 0;
    (void)ckpt_fail(err, CKPT_FORMAT, "%zu bytes follow its last entry", ckpt_cursor_left(&c));
    return blame(p, err);
}

/* Read all keys below a node, which begin with `key`. */
static int read_tree(struct reading *r, const struct place *p, uint8_t height, uint64_t nkey,
                     struct ckpt_str *key, struct ckpt_err *err)
{
    ckpt_cleanup(body_release) struct body body = {0};
    const size_t had = r->db->values.len;

    if (read_node(r, p, BTREE_MAGIC, &body, err) < 0)
        return -1;
    if (read_btree_body(r, p, &body, height, key, err) < 0)
        return -1;
    if (r->db->values.len - had == nkey)
        return 0;
    (void)ckpt_fail(err, CKPT_CONFLICT, "it holds %zu keys, but what refers to it says %" PRIu64,
                    r->db->values.len - had, nkey);
    return blame(p, err);
}

/* ---- versions ---- */

/* A root of the B+tree, or a node of the tree of versions. */
struct version {
    uint64_t generation, file, off, len, nkey;
    uint8_t height;
};

/* Columns of numbers. */
struct columns {
    uint64_t *column[7];
};

static void columns_release(struct columns *c)
{
    for (size_t i = 0; i < sizeof c->column / sizeof c->column[0]; i++)
        free(c->column[i]);
}

/* Skip the times, eight bytes each, and generations must ascend. */
static int take_times(struct ckpt_cursor *c, const uint64_t *generation, uint64_t n,
                      struct ckpt_err *err)
{
    (void)ckpt_cursor_take(c, n * 8);
    if (check_cursor(c, err) < 0)
        return -1;
    for (uint64_t i = 0; i < n; i++)
        if (generation[i] <= (i ? generation[i - 1] : 0))
            return ckpt_fail(err, CKPT_FORMAT, "the numbers of its versions do not ascend");
    return 0;
}

/* Roots of B+trees; *ret is the last of them, which is the newest. *ret_n may be 0. */
static int take_roots(struct ckpt_cursor *c, uint64_t *ret_n, struct version *ret,
                      struct ckpt_err *err)
{
    ckpt_cleanup(columns_release) struct columns v = {{NULL}};
    const uint64_t n = take_varint(c);
    const unsigned char *height;

    if (!(v.column[0] = take_varints(c, n, err)))
        return -1;
    height = ckpt_cursor_take(c, n);
    for (int i = 1; i < 7; i++)
        if (!(v.column[i] = take_varints(c, n, err)))
            return -1;
    if (take_times(c, v.column[0], n, err) < 0)
        return -1;
    if (n)
        *ret = (struct version){.generation = v.column[0][n - 1],
                                .file = v.column[1][n - 1],
                                .off = v.column[2][n - 1],
                                .len = v.column[3][n - 1],
                                .nkey = v.column[4][n - 1],
                                .height = height[n - 1]};
    *ret_n = n;
    return 0;
}

/* Nodes of the tree of versions likewise. Their heights stand in the manifest only. */
static int take_nodes(struct ckpt_cursor *c, bool heights, uint64_t *ret_n, struct version *ret,
                      struct ckpt_err *err)
{
    ckpt_cleanup(columns_release) struct columns v = {{NULL}};
    const uint64_t n = take_varint(c);

    for (int i = 0; i < 5; i++) /* generation, file, offset, length, number of generations */
        if (!(v.column[i] = take_varints(c, n, err)))
            return -1;
    if (take_times(c, v.column[0], n, err) < 0)
        return -1;
    const unsigned char *height = ckpt_cursor_take(c, heights ? n : 0);
    if (check_cursor(c, err) < 0)
        return -1;
    if (n)
        *ret = (struct version){.generation = v.column[0][n - 1],
                                .file = v.column[1][n - 1],
                                .off = v.column[2][n - 1],
                                .len = v.column[3][n - 1],
                                .height = heights ? height[n - 1] : 0};
    *ret_n = n;
    return 0;
}

/* The newest version, by the manifest, or by a node of the tree of versions. */
struct newest {
    struct version root;
    struct place place; /* of the root; its path lives in the arena */
};

static int read_versions(struct reading *r, const struct place *p, uint8_t height,
                         struct newest *ret, struct ckpt_err *err);

/* Follow the newest of the nodes. */
static int descend(struct reading *r, const struct files *files, const struct version *v,
                   struct newest *ret, struct ckpt_err *err)
{
    struct place p = {0};

    return place_of(files, v->file, v->off, v->len, &p, err) < 0
               ? -1
               : read_versions(r, &p, v->height, ret, err);
}

static int take_newest(const struct files *files, const struct version *v, struct newest *ret,
                       struct ckpt_err *err)
{
    ret->root = *v;
    if (v->off == UINT64_MAX && v->len == UINT64_MAX) /* a version without keys has no root */
        return 0;
    return place_of(files, v->file, v->off, v->len, &ret->place, err);
}

static int read_versions_body(struct reading *r, const struct body *b, const char *beginning,
                              uint8_t height, struct newest *ret, struct ckpt_err *err)
{
    ckpt_cleanup(files_release) struct files files = {0};
    struct version v = {0};
    struct ckpt_cursor c;
    uint64_t n = 0;

    ckpt_cursor_init(&c, b->bytes, b->len, 0, "");
    (void)ckpt_cursor_u8(&c); /* the binary logarithm of how many children a node has */
    const uint8_t own = ckpt_cursor_u8(&c);
    if (check_cursor(&c, err) < 0)
        return -1;
    if (own != height)
        return ckpt_fail(err, CKPT_FORMAT, "it has height %u, where %u is expected", own, height);
    if (take_files(r, &c, beginning, &files, err) < 0 ||
        (height ? take_nodes(&c, false, &n, &v, err) : take_roots(&c, &n, &v, err)) < 0)
        return -1;
    if (!n)
        return ckpt_fail(err, CKPT_FORMAT, "it has no versions");
    v.height = height ? (uint8_t)(height - 1) : v.height;
    return height ? descend(r, &files, &v, ret, err) : take_newest(&files, &v, ret, err);
}

static int read_versions(struct reading *r, const struct place *p, uint8_t height,
                         struct newest *ret, struct ckpt_err *err)
{
    ckpt_cleanup(body_release) struct body body = {0};
    ckpt_cleanup(ckpt_freep) char *beginning = strndup(p->path, p->base);

    if (!beginning)
        return ckpt_nomem(err);
    if (read_node(r, p, VERSIONS_MAGIC, &body, err) < 0)
        return -1;
    return read_versions_body(r, &body, beginning, height, ret, err) < 0 ? blame(p, err) : 0;
}

/* ---- the manifest ---- */

/* Skip the configuration, which says how tensorstore writes. */
static int take_config(struct ckpt_cursor *c, struct ckpt_err *err)
{
    (void)ckpt_cursor_take(c, 16); /* uuid */
    const uint64_t kind = take_varint(c);
    (void)take_varint(c); /* the most bytes of a value that a node holds, and of a node */
    (void)take_varint(c);
    (void)ckpt_cursor_u8(c);
    const uint64_t compression = take_varint(c);
    if (compression == 1)
        (void)ckpt_cursor_le32(c); /* its level */
    if (check_cursor(c, err) < 0)
        return -1;
    if (kind != 0)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "its manifest is divided over several files (kind %" PRIu64
                         "), which is not supported",
                         kind);
    if (compression > 1)
        return ckpt_fail(err, CKPT_UNSUPPORTED, "compression %" PRIu64 " is not known",
                         compression);
    return 0;
}

static int read_manifest_body(struct reading *r, const struct body *b, struct newest *ret,
                              struct ckpt_err *err)
{
    ckpt_cleanup(files_release) struct files files = {0};
    struct version root = {0}, older = {0};
    uint64_t nroot = 0, nolder = 0;
    struct ckpt_cursor c;

    ckpt_cursor_init(&c, b->bytes, b->len, 0, "");
    if (take_config(&c, err) < 0 || take_files(r, &c, "", &files, err) < 0 ||
        take_roots(&c, &nroot, &root, err) < 0 || take_nodes(&c, true, &nolder, &older, err) < 0)
        return -1;
    if (ckpt_cursor_left(&c))
        return ckpt_fail(err, CKPT_FORMAT, "%zu bytes follow its last entry", ckpt_cursor_left(&c));
    if (nroot)
        return take_newest(&files, &root, ret, err);
    return nolder ? descend(r, &files, &older, ret, err) : 0;
}

static int read_manifest(struct reading *r, struct newest *ret, struct ckpt_err *err)
{
    ckpt_cleanup(body_release) struct body body = {0};
    struct place p = {.path = CKPT_OCDBT_MANIFEST};
    struct ckpt_source *s = NULL;

    if (open_file(r, p.path, &s, err) < 0)
        return -1;
    p.len = s->size;
    if (read_node(r, &p, MANIFEST_MAGIC, &body, err) < 0)
        return -1;
    return read_manifest_body(r, &body, ret, err) < 0 ? ckpt_err_in(err, "'%s'", p.path) : 0;
}

/* ---- all ---- */

/* Give the values that nodes hold a source. */
static int settle_small(struct reading *r, struct ckpt_err *err)
{
    struct ckpt_ocdbt *db = r->db;

    if (!r->inlined.len)
        return 0;
    if (ckpt_source_mem_new("a node of " CKPT_OCDBT_MANIFEST, ckpt_str_get(&r->small), r->small.len,
                            &db->small, err) < 0)
        return -1;
    for (size_t i = 0; i < r->inlined.len; i++)
        db->values.ptr[r->inlined.ptr[i]].source = db->small;
    return 0;
}

int ckpt_ocdbt_read(ckpt_ocdbt_open_fn *open, void *ctx, struct ckpt_ocdbt *ret,
                    struct ckpt_err *err)
{
    ckpt_cleanup(reading_release) struct reading r = {
        .open = open, .ctx = ctx, .db = ret, .left = MAX_READ};
    ckpt_cleanup(ckpt_str_release) struct ckpt_str key = {0};
    struct newest newest = {{0}};

    if (read_manifest(&r, &newest, err) < 0)
        return -1;
    ret->generation = newest.root.generation;
    if (newest.place.path &&
        read_tree(&r, &newest.place, newest.root.height, newest.root.nkey, &key, err) < 0)
        return -1;
    return settle_small(&r, err);
}

void ckpt_ocdbt_release(struct ckpt_ocdbt *db)
{
    for (size_t i = 0; i < db->files.len; i++)
        ckpt_source_unref(db->files.ptr[i].source);
    ckpt_source_unref(db->small);
    ckpt_vec_release(&db->files);
    ckpt_vec_release(&db->values);
    ckpt_arena_release(&db->arena);
    *db = (struct ckpt_ocdbt){0};
}

size_t ckpt_ocdbt_at_least(const struct ckpt_ocdbt *db, const char *key)
{
    size_t lo = 0, hi = db->values.len;

    while (lo < hi) {
        const size_t mid = lo + (hi - lo) / 2;
        if (strcmp(db->values.ptr[mid].key, key) < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

const struct ckpt_ocdbt_value *ckpt_ocdbt_find(const struct ckpt_ocdbt *db, const char *key)
{
    const size_t at = ckpt_ocdbt_at_least(db, key);

    return at < db->values.len && strcmp(db->values.ptr[at].key, key) == 0 ? &db->values.ptr[at]
                                                                           : NULL;
}
