/* SPDX-License-Identifier: Apache-2.0 */
/* A recording as bytes, which come from another process and are checked like a file's.
 *
 *     magic, u32 version, u64 XXH3 of all that follows
 *     u64 machine, u64 begin_ns, u32 roots, roots x u64 inode, u32 entries
 *     entries x: u8 root, u8 flags, string path
 *                if LOOK:  u8 kind, u16 errno, 4 x u64 identity
 *                if BIRTH: u64 birth_ns
 *                if LIST:  u32 names, names x (u8 kind and LINK, string name)
 *                u32 chunks, chunks x (u64 off, u32 len, bytes)
 *
 * Numbers are little-endian. A string is u16 len and bytes, of which the last one is NUL. */
#include <limits.h>
#include <string.h>
#include <xxhash.h>

#include "base/ckd.h"
#include "io/cursor.h"
#include "io/recording_table.h"

static const char MAGIC[8] = "ckptfsRC";

enum {
    VERSION = 1,
    SUM_AT = sizeof MAGIC + 4, /* offset of the hash */
    BODY_AT = SUM_AT + 8,
    LOOK = 1,
    BIRTH = 2,
    LIST = 4,
    WITNESS = 8,
    LINK = 128,
    /* bytes of the smallest ones */
    LEAST_ENTRY = 10,
    LEAST_NAME = 5,
    LEAST_CHUNK = 13,
};

/* ---- encoding ---- */

static void put(struct ckpt_str *out, uint64_t v, unsigned n)
{
    char byte[8];

    for (unsigned i = 0; i < n; i++)
        byte[i] = (char)(v >> 8 * i);
    ckpt_str_append(out, byte, n);
}

static void put_string(struct ckpt_str *out, const char *s)
{
    const size_t len = strlen(s) + 1;

    put(out, len, 2);
    ckpt_str_append(out, s, len);
}

static void put_look(struct ckpt_str *out, const struct ckpt_look *l)
{
    put(out, l->kind, 1);
    put(out, (uint64_t)l->errnum, 2);
    put(out, l->id.inode, 8);
    put(out, l->id.size, 8);
    put(out, (uint64_t)l->id.mtime_ns, 8);
    put(out, (uint64_t)l->id.ctime_ns, 8);
}

static void put_list(struct ckpt_str *out, const struct ckpt_recorded *f)
{
    put(out, f->nlist, 4);
    for (size_t i = 0; i < f->nlist; i++) {
        put(out, (uint64_t)f->list[i].kind | (f->list[i].is_link ? LINK : 0), 1);
        put_string(out, f->list[i].name);
    }
}

static void put_chunks(struct ckpt_str *out, const struct ckpt_recorded *f)
{
    put(out, f->chunk.len, 4);
    for (size_t i = 0; i < f->chunk.len; i++) {
        put(out, f->chunk.ptr[i].off, 8);
        put(out, f->chunk.ptr[i].len, 4);
        ckpt_str_append(out, (const char *)f->chunk.ptr[i].data, f->chunk.ptr[i].len);
    }
}

static void put_entry(struct ckpt_str *out, const struct ckpt_recorded *f)
{
    const int flags = (f->has_look ? LOOK : 0) | (f->has_birth ? BIRTH : 0) |
                      (f->has_list ? LIST : 0) | (f->witness ? WITNESS : 0);

    put(out, (uint64_t)(f->key[0] - '0'), 1);
    put(out, (uint64_t)flags, 1);
    put_string(out, f->key + 1);
    if (f->has_look)
        put_look(out, &f->look);
    if (f->has_birth)
        put(out, (uint64_t)f->birth_ns, 8);
    if (f->has_list)
        put_list(out, f);
    put_chunks(out, f);
}

/* Bytes are only good for a file whose identity is known. */
static void drop_useless(struct ckpt_recorded *f)
{
    if (!f->has_look || f->look.errnum || f->look.kind != CKPT_ENTRY_FILE)
        f->chunk.len = 0;
}

int ckpt_recording_encode(struct ckpt_recording *r, struct ckpt_str *out, struct ckpt_err *err)
{
    const size_t start = out->len;
    const uint32_t nroot = (uint32_t)ckpt_min_u64(r->nroot, CKPT_RECORDING_ROOTS);
    uint64_t n = 0;
    int rc = 0;

    (void)pthread_mutex_lock(&r->lock);
    for (size_t i = 0; i < r->file.len; i++)
        n += !r->file.ptr[i].changed;
    ckpt_str_append(out, MAGIC, sizeof MAGIC);
    put(out, VERSION, 4);
    put(out, 0, 8);
    put(out, r->machine, 8);
    put(out, (uint64_t)r->begin_ns, 8);
    put(out, nroot, 4);
    for (uint32_t i = 0; i < nroot; i++)
        put(out, r->root_inode[i], 8);
    put(out, n, 4);
    for (size_t i = 0; i < r->file.len && rc == 0; i++) {
        struct ckpt_recorded *f = &r->file.ptr[i];
        drop_useless(f);
        rc = ckpt_recorded_join(r, f);
        if (!f->changed)
            put_entry(out, f);
    }
    (void)pthread_mutex_unlock(&r->lock);
    if (rc < 0 || out->failed)
        return ckpt_nomem(err);
    const uint64_t sum = XXH3_64bits(out->ptr + start + BODY_AT, out->len - start - BODY_AT);
    for (unsigned i = 0; i < 8; i++)
        out->ptr[start + SUM_AT + i] = (char)(sum >> 8 * i);
    return 0;
}

/* ---- decoding ---- */

struct decoding {
    struct ckpt_cursor c;
    struct ckpt_recording *r;
    struct ckpt_err *err;
};

static int bad(struct decoding *d, const char *what)
{
    if (d->c.failed)
        return ckpt_cursor_report(&d->c, d->err);
    return ckpt_fail(d->err, CKPT_FORMAT, "the recording of the checkpoint has %s at byte %llu",
                     what, (unsigned long long)ckpt_cursor_off(&d->c));
}

/* NUL-terminated, and without a NUL before; NULL: not so. */
static const char *take_string(struct decoding *d)
{
    const uint16_t len = ckpt_cursor_le16(&d->c);
    const char *s = ckpt_cursor_take(&d->c, len);

    return s && len && strnlen(s, len) == (size_t)len - 1 ? s : NULL;
}

/* A path below a root: "." or names that lead down. */
static bool path_ok(const char *path)
{
    if (strcmp(path, ".") == 0)
        return true;
    for (;;) {
        const size_t n = strcspn(path, "/");
        if (n == 0 || (n == 2 && memcmp(path, "..", 2) == 0))
            return false;
        if (path[n] == '\0')
            return true;
        path += n + 1;
    }
}

static bool name_ok(const char *name)
{
    return *name && !strchr(name, '/') && strcmp(name, ".") != 0 && strcmp(name, "..") != 0;
}

/* May n items of at least `least` bytes each follow? */
static bool fits(const struct decoding *d, uint64_t n, uint64_t least)
{
    return n <= ckpt_cursor_left(&d->c) / least;
}

static int take_look(struct decoding *d, struct ckpt_recorded *f)
{
    struct ckpt_cursor *c = &d->c;
    const uint8_t kind = ckpt_cursor_u8(c);

    f->look.errnum = ckpt_cursor_le16(c);
    f->look.id.inode = ckpt_cursor_le64(c);
    f->look.id.size = ckpt_cursor_le64(c);
    f->look.id.mtime_ns = (int64_t)ckpt_cursor_le64(c);
    f->look.id.ctime_ns = (int64_t)ckpt_cursor_le64(c);
    if (c->failed || kind > CKPT_ENTRY_OTHER)
        return bad(d, "an unknown kind of entry");
    if (f->look.errnum && !ckpt_errno_is_answer(f->look.errnum))
        return bad(d, "an unknown error number");
    if (f->look.id.size > INT64_MAX)
        return bad(d, "a file of an impossible size");
    f->look.kind = (enum ckpt_entry_kind)kind;
    f->has_look = true;
    return 0;
}

static int take_list(struct decoding *d, struct ckpt_recorded *f)
{
    const uint32_t n = ckpt_cursor_le32(&d->c);

    if (d->c.failed || !fits(d, n, LEAST_NAME))
        return bad(d, "more names than bytes");
    if (!(f->list = ckpt_arena_alloc(&d->r->arena, ((size_t)n + 1) * sizeof *f->list)))
        return ckpt_nomem(d->err);
    for (uint32_t i = 0; i < n; i++) {
        const uint8_t kind = ckpt_cursor_u8(&d->c);
        const char *name = take_string(d);
        if (!name || !name_ok(name) || (kind & ~LINK) > CKPT_ENTRY_OTHER)
            return bad(d, "a malformed name");
        f->list[i] = (struct ckpt_listed){(char *)name, (enum ckpt_entry_kind)(kind & ~LINK),
                                          (kind & LINK) != 0};
    }
    f->nlist = n;
    f->has_list = true;
    return 0;
}

static int take_chunks(struct decoding *d, struct ckpt_recorded *f)
{
    const bool is_file = f->has_look && !f->look.errnum && f->look.kind == CKPT_ENTRY_FILE;
    const uint32_t n = ckpt_cursor_le32(&d->c);
    uint64_t end = 0;

    if (d->c.failed || !fits(d, n, LEAST_CHUNK) || (n && !is_file))
        return bad(d, "bytes of what is no file");
    if (ckpt_vec_reserve(&f->chunk, n) < 0)
        return ckpt_nomem(d->err);
    for (uint32_t i = 0; i < n; i++) {
        struct ckpt_chunk chunk = {.off = ckpt_cursor_le64(&d->c)};
        chunk.len = ckpt_cursor_le32(&d->c);
        chunk.data = ckpt_cursor_take(&d->c, chunk.len);
        if (!chunk.data || chunk.len == 0 || !ckpt_range_ok(chunk.off, chunk.len, f->look.id.size))
            return bad(d, "bytes beyond the end of a file");
        if (i && chunk.off <= end)
            return bad(d, "bytes out of order");
        end = chunk.off + chunk.len;
        f->chunk.ptr[f->chunk.len++] = chunk;
    }
    return n ? ckpt_recorded_digest(f, d->err) : 0;
}

/* The table's key: the root's digit and the path, in the arena. */
static struct ckpt_recorded *add_entry(struct decoding *d, uint8_t root, const char *path)
{
    const size_t len = strlen(path);
    char *key = ckpt_arena_alloc(&d->r->arena, len + 2);
    struct ckpt_recorded *f = NULL;
    bool is_new = false;

    if (key) {
        key[0] = (char)('0' + root);
        memcpy(key + 1, path, len + 1);
        f = ckpt_recording_put(d->r, key, len + 1, &is_new);
    }
    if (!f)
        (void)ckpt_nomem(d->err);
    else if (!is_new)
        (void)bad(d, "the same path twice");
    return is_new ? f : NULL;
}

static int take_entry(struct decoding *d)
{
    const uint8_t root = ckpt_cursor_u8(&d->c), flags = ckpt_cursor_u8(&d->c);
    const char *path = take_string(d);
    struct ckpt_recorded *f;

    if (!path || strlen(path) > PATH_MAX || !path_ok(path))
        return bad(d, "a malformed path");
    if (root >= d->r->nroot || flags & ~(LOOK | BIRTH | LIST | WITNESS))
        return bad(d, "an unknown root or flag");
    if (!(f = add_entry(d, root, path)))
        return -1;
    f->witness = (flags & WITNESS) != 0;
    if (flags & LOOK && take_look(d, f) < 0)
        return -1;
    if (flags & BIRTH) {
        f->has_birth = true;
        f->birth_ns = (int64_t)ckpt_cursor_le64(&d->c);
    }
    if (flags & LIST && take_list(d, f) < 0)
        return -1;
    return take_chunks(d, f);
}

static int take_start(struct decoding *d, const void *data, size_t len)
{
    const char *magic = ckpt_cursor_take(&d->c, sizeof MAGIC);
    const uint32_t version = ckpt_cursor_le32(&d->c);
    const uint64_t sum = ckpt_cursor_le64(&d->c);

    if (d->c.failed || memcmp(magic, MAGIC, sizeof MAGIC) != 0)
        return bad(d, "no magic");
    if (version != VERSION)
        return ckpt_fail(d->err, CKPT_UNSUPPORTED,
                         "the recording of the checkpoint has version %u, this library reads "
                         "version %d: run the same version of ckptfs on all ranks",
                         version, VERSION);
    if (sum != XXH3_64bits((const char *)data + BODY_AT, len - BODY_AT))
        return bad(d, "damaged bytes (its hash differs)");
    return 0;
}

static int take_all(struct decoding *d)
{
    struct ckpt_recording *r = d->r;

    r->machine = ckpt_cursor_le64(&d->c);
    r->begin_ns = (int64_t)ckpt_cursor_le64(&d->c);
    r->nroot = ckpt_cursor_le32(&d->c);
    if (d->c.failed || r->nroot > CKPT_RECORDING_ROOTS)
        return bad(d, "too many roots");
    for (uint32_t i = 0; i < r->nroot; i++)
        r->root_inode[i] = ckpt_cursor_le64(&d->c);
    const uint32_t n = ckpt_cursor_le32(&d->c);
    if (d->c.failed || !fits(d, n, LEAST_ENTRY))
        return bad(d, "more entries than bytes");
    if (ckpt_vec_reserve(&r->file, n) < 0)
        return ckpt_nomem(d->err);
    for (uint32_t i = 0; i < n; i++)
        if (take_entry(d) < 0)
            return -1;
    if (ckpt_cursor_left(&d->c))
        return bad(d, "bytes after its end");
    r->nroot = 0; /* counts the directories of this process now */
    return 0;
}

int ckpt_recording_decode(const void *data, size_t len, uint64_t machine,
                          struct ckpt_recording **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_recording_unrefp) struct ckpt_recording *r = NULL;
    struct decoding d = {.err = err};

    if (ckpt_recording_alloc(CKPT_REPLAYING, &r, err) < 0)
        return -1;
    ckpt_cursor_init(&d.c, data, len, 0, "the recording of the checkpoint");
    d.r = r;
    if (take_start(&d, data, len) < 0 || take_all(&d) < 0)
        return -1;
    r->same_machine = r->machine == machine;
    *ret = ckpt_steal(&r);
    return 0;
}
