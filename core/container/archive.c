/* SPDX-License-Identifier: Apache-2.0 */
/* Which kind of archive a file is, by its first bytes; and the index of a zip or a tar archive. */
#include "container/archive.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/mem.h"
#include "base/par.h"
#include "base/str.h"
#include "container/zip.h"
#include "io/far/dir_bounded.h"
#include "io/far/dir_listed.h"
#include "io/source.h"

enum {
    BLOCK = 512,             /* of a tar archive */
    MAX_EXTENDED = 1 << 20,  /* bytes of one pax header, or of a long name */
    LEAST_AHEAD = 4 * BLOCK, /* a header with a long name */
    AHEAD = 16 * 1024,       /* small members are read with one call */
};

/* Formats that must be unpacked: their first bytes, and the command. */
static const struct packed {
    const char *magic, *name, *command;
    size_t len;
} packed[] = {
    {"\x1f\x8b", "gzip", "tar -xzf '%s' -C DIR", 2},
    {"\x28\xb5\x2f\xfd", "zstd", "tar --zstd -xf '%s' -C DIR", 4},
    {"\xfd"
     "7zXZ",
     "xz", "tar -xJf '%s' -C DIR", 5},
    {"BZh", "bzip2", "tar -xjf '%s' -C DIR", 3},
    {"\x04\x22\x4d\x18", "lz4", "lz4 -dc '%s' | tar -xf - -C DIR", 4},
};

static const struct packed *packed_as(const unsigned char *head, size_t len)
{
    for (size_t i = 0; i < sizeof packed / sizeof *packed; i++)
        if (len >= packed[i].len && memcmp(head, packed[i].magic, packed[i].len) == 0)
            return &packed[i];
    return NULL;
}

static int fail_packed(const struct packed *p, const char *path, struct ckpt_err *err)
{
    const char *rest = strstr(p->command, "%s");

    return ckpt_fail(err, CKPT_UNSUPPORTED,
                     "'%s' is compressed (%s), and can't be read in place: unpack it (%.*s%s%s) "
                     "and give DIR",
                     path, p->name, (int)(rest - p->command), p->command, path, rest + 2);
}

/* Formats of one file that people try: their first bytes, and what to do. */
static const struct other {
    const char *magic, *text;
    size_t len;
} others[] = {
    {"GGUF",
     "is a model in GGUF, which is one file already: transformers reads it by "
     "from_pretrained(DIR, gguf_file=NAME)",
     4},
    {"\x89HDF", "is a file of TensorFlow (HDF5): load it with transformers 4 (from_tf=True)", 4},
};

/* An archive without members: a tar is zeros, a zip only the end of its directory. */
static bool is_empty(const unsigned char *head, size_t len)
{
    size_t zeros = 0;

    while (zeros < len && head[zeros] == 0)
        zeros++;
    return (len == BLOCK && zeros == len) || (len >= 4 && memcmp(head, "PK\5\6", 4) == 0);
}

static int fail_file(const unsigned char *head, size_t len, const char *path, struct ckpt_err *err)
{
    const char *slash = strrchr(path, '/');

    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (len >= others[i].len && memcmp(head, others[i].magic, others[i].len) == 0)
            return ckpt_fail(err, CKPT_UNSUPPORTED, "'%s' %s", path, others[i].text);
    if (is_empty(head, len))
        return ckpt_fail(err, CKPT_MISSING, "'%s' is an archive without any file", path);
    return ckpt_fail(err, CKPT_USAGE, "'%s' is a file: give the folder that it lies in, '%.*s'",
                     path,
                     slash == path ? 1
                     : slash       ? (int)(slash - path)
                                   : 1,
                     slash ? path : ".");
}

/* ---- zip ---- */

/* A file of torch.save is a zip archive too, but no directory. */
static bool is_torch_save(const struct ckpt_zip *z)
{
    static const char tail[] = "/data.pkl";
    const size_t n = sizeof tail - 1;

    for (size_t i = 0; i < z->nentry; i++) {
        const struct ckpt_zip_entry *e = &z->entry[i];
        if (e->name_len > n && memcmp(e->name + e->name_len - n, tail, n) == 0 &&
            !memchr(e->name, '/', e->name_len - n))
            return true;
    }
    return false;
}

/* Add the file itself, as the only one of a folder. */
static int add_itself(const struct ckpt_source *s, const char *name, struct ckpt_archive_index *m,
                      struct ckpt_err *err)
{
    const struct ckpt_member whole = {.kind = CKPT_ENTRY_FILE, .len = s->size};

    return ckpt_archive_index_add(m, name, strlen(name), &whole, err);
}

/* A symbolic link, whose data are the name that it leads to. */
static int add_zip_link(const struct ckpt_zip *z, const struct ckpt_zip_entry *e, uint64_t off,
                        struct ckpt_archive_index *m, struct ckpt_err *err)
{
    char target[CKPT_ARCHIVE_MAX_NAME + 1];

    if (e->len > CKPT_ARCHIVE_MAX_NAME)
        return ckpt_fail(err, CKPT_FORMAT, "member '%.*s' is a link to a name that is too long",
                         (int)e->name_len, e->name);
    if (ckpt_zip_pread(z, target, (size_t)e->len, off, err) < 0)
        return -1;
    target[e->len] = '\0';
    return ckpt_archive_index_add_link(m, e->name, e->name_len, target, err);
}

static int add_zip_entry(const struct ckpt_zip *z, const struct ckpt_zip_entry *e,
                         struct ckpt_archive_index *m, struct ckpt_err *err)
{
    struct ckpt_member what = {.kind = CKPT_ENTRY_FILE, .len = e->len};

    if (e->name_len && e->name[e->name_len - 1] == '/')
        what = (struct ckpt_member){.kind = CKPT_ENTRY_DIR};
    else if (ckpt_zip_data(z, e, &what.off, err) < 0)
        return -1;
    return e->is_link ? add_zip_link(z, e, what.off, m, err)
                      : ckpt_archive_index_add(m, e->name, e->name_len, &what, err);
}

static int index_zip(struct ckpt_source *s, const char *path, struct ckpt_archive_index *m,
                     struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_zip_release) struct ckpt_zip z = {0};
    struct ckpt_err own = {0};

    if (ckpt_zip_open(s, 0, s->size, &z, &own) < 0)
        return own.code != CKPT_UNSUPPORTED
                   ? ckpt_fail(err, own.code, "'%s': %s", path, own.text)
                   : ckpt_fail(err, own.code,
                               "'%s': %s: unpack it (unzip '%s' -d DIR) and give DIR", path,
                               own.text, path);
    if (is_torch_save(&z))
        return add_itself(s, "model.pt", m, err);
    for (size_t i = 0; i < z.nentry; i++)
        if (add_zip_entry(&z, &z.entry[i], m, err) < 0)
            return ckpt_err_in(err, "'%s'", path);
    return 0;
}

/* ---- tar: a row of headers, each with the bytes of one member behind it ---- */

/* The fields of a header: offset and length. */
enum {
    NAME = 0,
    NAME_LEN = 100,
    SIZE = 124,
    NUMBER_LEN = 12,
    CHECKSUM = 148,
    CHECKSUM_LEN = 8,
    TYPE = 156,
    LINK = 157,
    MAGIC = 257,
    PREFIX = 345,
    PREFIX_LEN = 155,
};

struct tar {
    struct ckpt_source *source;
    struct ckpt_archive_index *index;
    uint64_t at; /* the next header */
    uint64_t have_at;
    size_t have_len, ahead; /* ahead: how much is read at once */
    unsigned char have[AHEAD];
    /* from extended headers, for the next member; NULL or false: not given */
    char *name, *target;
    uint64_t size;
    bool has_size;
};

/* One member's header. */
struct header {
    char *name, *target; /* owned */
    uint64_t off, len;   /* of its bytes */
    unsigned char type;
};

static void header_release(struct header *h)
{
    free(h->name);
    free(h->target);
}

static void forget_extended(struct tar *t)
{
    free(t->name);
    free(t->target);
    t->name = t->target = NULL;
    t->has_size = false;
}

/* Read further ahead where headers lie close to each other, and least behind a large member, whose
 * bytes are no header's. */
static void choose_ahead(struct tar *t, uint64_t off)
{
    const bool close = t->have_len && off >= t->have_at && off - t->have_at <= 2 * t->have_len;

    t->ahead = !close ? LEAST_AHEAD : 2 * t->ahead < AHEAD ? 2 * t->ahead : AHEAD;
}

/* The block at `off`, valid until the next call. NULL: it cannot be read. */
static const unsigned char *block_at(struct tar *t, uint64_t off, struct ckpt_err *err)
{
    if (off < t->have_at || !ckpt_range_ok(off - t->have_at, BLOCK, t->have_len)) {
        const uint64_t left = off < t->source->size ? t->source->size - off : 0;
        choose_ahead(t, off);
        t->have_at = off;
        t->have_len = 0;
        if (left < BLOCK) {
            (void)ckpt_fail(err, CKPT_FORMAT,
                            "the tar archive ends at byte %" PRIu64
                            " without the mark that ends it: it is truncated, or still being "
                            "written",
                            t->source->size);
            return NULL;
        }
        const size_t len = left < t->ahead ? (size_t)left : t->ahead;
        if (ckpt_source_pread(t->source, t->have, len, off, err) < 0)
            return NULL;
        t->have_len = len;
    }
    return t->have + (off - t->have_at);
}

/* ---- fields ---- */

/* An octal number that fills at most len bytes, with blanks before it and a blank or NUL behind;
 * or, if the first bit is set, one in base 256 (GNU, star). */
static bool parse_number(const unsigned char *p, size_t len, uint64_t *ret)
{
    uint64_t v = 0;
    size_t i = 0;

    if (*p & 0x80) {
        if (*p & 0x7f)
            return false; /* negative, or more than 64 bits can hold */
        for (i = 1; i < len; i++) {
            if (v >> 56)
                return false;
            v = v << 8 | p[i];
        }
        *ret = v;
        return true;
    }
    while (i < len && p[i] == ' ')
        i++;
    for (; i < len && p[i] >= '0' && p[i] <= '7'; i++)
        v = v << 3 | (unsigned)(p[i] - '0');
    *ret = v;
    return i == len || p[i] == ' ' || p[i] == '\0';
}

/* Is this block a header of a tar archive? Its checksum decides. */
static bool is_header(const unsigned char block[BLOCK])
{
    uint64_t stated, sum = 0;

    for (size_t i = 0; i < BLOCK; i++)
        sum += i >= CHECKSUM && i < CHECKSUM + CHECKSUM_LEN ? ' ' : block[i];
    return block[NAME] && parse_number(block + CHECKSUM, CHECKSUM_LEN, &stated) && stated == sum;
}

static bool is_zero(const unsigned char *block)
{
    for (size_t i = 0; i < BLOCK; i++)
        if (block[i])
            return false;
    return true;
}

static char *field_text(const unsigned char *p, size_t len)
{
    return strndup((const char *)p, len);
}

/* The name of a ustar header is in two fields; GNU's headers have times in the place of the first.
 */
static char *name_of(const unsigned char *block)
{
    ckpt_cleanup(ckpt_freep) char *prefix =
        memcmp(block + MAGIC, "ustar", 6) == 0 ? field_text(block + PREFIX, PREFIX_LEN) : NULL;
    ckpt_cleanup(ckpt_freep) char *name = field_text(block + NAME, NAME_LEN);

    return prefix && *prefix && name ? ckpt_asprintf("%s/%s", prefix, name) : ckpt_steal(&name);
}

/* ---- extended headers ---- */

/* The bytes of an extended header, with a NUL behind. */
static int read_text(struct tar *t, const struct header *h, char **ret, struct ckpt_err *err)
{
    if (h->len > MAX_EXTENDED)
        return ckpt_fail(err, CKPT_LIMIT,
                         "the extended header at byte %" PRIu64 " has %" PRIu64
                         " bytes, at most %d are expected",
                         t->at, h->len, MAX_EXTENDED);
    ckpt_cleanup(ckpt_freep) char *text = malloc((size_t)h->len + 1);
    if (!text)
        return ckpt_nomem(err);
    if (ckpt_source_pread(t->source, text, (size_t)h->len, h->off, err) < 0)
        return -1;
    text[h->len] = '\0';
    *ret = ckpt_steal(&text);
    return 0;
}

static int fail_pax(const struct tar *t, const char *what, struct ckpt_err *err)
{
    return ckpt_fail(err, CKPT_FORMAT, "the pax header at byte %" PRIu64 " %s", t->at, what);
}

static int replace(char **text, const char *value, size_t len, struct ckpt_err *err)
{
    free(*text);
    return (*text = strndup(value, len)) ? 0 : ckpt_nomem(err);
}

/* One record of a pax header: value[0..len) of `key`. */
static int take_record(struct tar *t, bool global, const char *key, const char *value, size_t len,
                       struct ckpt_err *err)
{
    const bool is_path = strcmp(key, "path") == 0, is_link = strcmp(key, "linkpath") == 0;
    const bool is_size = strcmp(key, "size") == 0;
    unsigned long long size;

    if (ckpt_has_prefix(key, "GNU.sparse."))
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "the tar archive has a sparse file (at byte %" PRIu64
                         "): make it without --sparse, or unpack it",
                         t->at);
    if (global && (is_path || is_link || is_size))
        return fail_pax(t, "gives all members one name or size", err);
    if ((is_path || is_link) && memchr(value, '\0', len))
        return fail_pax(t, "has a name with a NUL in it", err);
    if (is_path)
        return replace(&t->name, value, len, err);
    if (is_link)
        return replace(&t->target, value, len, err);
    if (!is_size)
        return 0;
    if (!ckpt_parse_u64(value, len, &size))
        return fail_pax(t, "has a size that is not a number", err);
    t->size = size;
    t->has_size = true;
    return 0;
}

/* Records: "LENGTH KEY=VALUE\n", where LENGTH counts all of these bytes. */
static int read_pax(struct tar *t, const struct header *h, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *text = NULL;

    if (read_text(t, h, &text, err) < 0)
        return -1;
    for (char *p = text, *end = text + h->len; p < end;) {
        const size_t left = (size_t)(end - p), digits = strspn(p, "0123456789");
        unsigned long long len;
        if (digits >= left || p[digits] != ' ' || !ckpt_parse_u64(p, digits, &len) || len > left ||
            len < digits + 3 || p[len - 1] != '\n')
            return fail_pax(t, "has a record whose length is wrong", err);
        char *key = p + digits + 1, *last = p + len - 1;
        char *equals = memchr(key, '=', (size_t)(last - key));
        if (!equals)
            return fail_pax(t, "has a record without '='", err);
        *equals = '\0';
        if (take_record(t, h->type == 'g', key, equals + 1, (size_t)(last - equals - 1), err) < 0)
            return -1;
        p += len;
    }
    return 0;
}

/* GNU's long names are members of their own before the one that they name. */
static int read_long(struct tar *t, const struct header *h, struct ckpt_err *err)
{
    char **to = h->type == 'L' ? &t->name : &t->target;
    char *text = NULL;

    if (read_text(t, h, &text, err) < 0)
        return -1;
    free(*to);
    *to = text;
    return 0;
}

/* ---- members ---- */

static bool has_bytes(unsigned char type) { return !strchr("12345 6", type) || type == '\0'; }

static int fail_unsupported(const struct header *h, const char *what, struct ckpt_err *err)
{
    return ckpt_fail(err, CKPT_UNSUPPORTED, "member '%s' of the tar archive is %s: unpack it",
                     h->name, what);
}

static int add_member(struct tar *t, const struct header *h, struct ckpt_err *err)
{
    const size_t n = strlen(h->name);
    const bool is_dir = h->type == '5' || (n && h->name[n - 1] == '/');
    const struct ckpt_member dir = {.kind = CKPT_ENTRY_DIR}, other = {.kind = CKPT_ENTRY_OTHER};
    const struct ckpt_member file = {CKPT_ENTRY_FILE, h->off, h->len, 0};

    switch (h->type) {
    case '\0':
    case '0':
    case '7':
        return ckpt_archive_index_add(t->index, h->name, n, is_dir ? &dir : &file, err);
    case '5':
        return ckpt_archive_index_add(t->index, h->name, n, &dir, err);
    case '1':
        return ckpt_archive_index_add_same(t->index, h->name, n, h->target, err);
    case '2':
        return ckpt_archive_index_add_link(t->index, h->name, n, h->target, err);
    case '3':
    case '4':
    case '6':
        return ckpt_archive_index_add(t->index, h->name, n, &other, err);
    case 'V': /* the archive's label */
        return 0;
    case 'S':
        return fail_unsupported(h, "a sparse file", err);
    case 'M':
        return fail_unsupported(h, "the rest of a file in another volume", err);
    default:
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "member '%s' of the tar archive has type 0x%02x: unpack it", h->name,
                         h->type);
    }
}

/* The name, the target and the size, of which extended headers have priority. */
static int read_header(struct tar *t, const unsigned char *block, struct header *h,
                       struct ckpt_err *err)
{
    uint64_t size;

    if (!is_header(block))
        return ckpt_fail(err, CKPT_FORMAT,
                         "no tar header at byte %" PRIu64 ": its checksum is wrong", t->at);
    if (!parse_number(block + SIZE, NUMBER_LEN, &size))
        return ckpt_fail(err, CKPT_FORMAT,
                         "the tar header at byte %" PRIu64 " has a size that is not a number",
                         t->at);
    h->type = block[TYPE];
    const bool extended = h->type && strchr("xgLK", h->type);
    h->name = extended || !t->name ? name_of(block) : ckpt_steal(&t->name);
    h->target =
        extended || !t->target ? field_text(block + LINK, NAME_LEN) : ckpt_steal(&t->target);
    if (!h->name || !h->target)
        return ckpt_nomem(err);
    h->off = t->at + BLOCK;
    h->len = !has_bytes(h->type) ? 0 : !extended && t->has_size ? t->size : size;
    if (!ckpt_range_ok(h->off, h->len, t->source->size))
        return ckpt_fail(err, CKPT_FORMAT,
                         "member '%s' needs %" PRIu64 " bytes from byte %" PRIu64
                         " on, the tar archive has %" PRIu64
                         " in all: it is truncated, or still being written",
                         h->name, h->len, h->off, t->source->size);
    return 0;
}

static int read_member(struct tar *t, const unsigned char *block, struct ckpt_err *err)
{
    ckpt_cleanup(header_release) struct header h = {0};
    int result;

    if (read_header(t, block, &h, err) < 0)
        return -1;
    const bool extended = h.type && strchr("xgLK", h.type);
    if (h.type == 'x' || h.type == 'g')
        result = read_pax(t, &h, err);
    else if (extended)
        result = read_long(t, &h, err);
    else
        result = add_member(t, &h, err);
    if (!extended)
        forget_extended(t);
    t->at = h.off + (h.len + BLOCK - 1) / BLOCK * BLOCK;
    return result;
}

/* The archive ends with two blocks of zeros. */
static int check_end(struct tar *t, struct ckpt_err *err)
{
    const unsigned char *second = block_at(t, t->at + BLOCK, err);

    if (!second)
        return -1;
    return is_zero(second) ? 0
                           : ckpt_fail(err, CKPT_FORMAT,
                                       "a block of zeros at byte %" PRIu64
                                       " of the tar archive, where a header should be",
                                       t->at);
}

static int read_all(struct tar *t, struct ckpt_err *err)
{
    const unsigned char *block;

    while ((block = block_at(t, t->at, err))) {
        if (is_zero(block))
            return check_end(t, err);
        if (read_member(t, block, err) < 0)
            return -1;
    }
    return -1;
}

/* POSIX ustar and pax, GNU's long names, and what came before them (POSIX.1-2017, pax; tar(5)).
 * FORMAT: a header is damaged, a member ends after the file, or the mark at the archive's end is
 * missing. UNSUPPORTED: sparse files, archives of several volumes. */
static int index_tar(struct ckpt_source *s, struct ckpt_archive_index *m, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) struct tar *t = calloc(1, sizeof *t);

    if (!t)
        return ckpt_nomem(err);
    t->source = s;
    t->index = m;
    const int result = read_all(t, err);
    forget_extended(t);
    return result;
}

/* ---- any ---- */

/* Is the file one of several that a model consists of ("model-00001-of-00002.safetensors")? */
static bool is_shard(const char *path)
{
    const char *slash = strrchr(path, '/');

    return strstr(slash ? slash : path, "-of-") != NULL;
}

/* The name of a file that is a checkpoint without being an archive: safetensors (a header's length,
 * and the header), or what torch.save wrote before 1.6 (a pickle). NULL: it is none. */
static const char *file_as(const unsigned char *head, size_t len, uint64_t size)
{
    uint64_t header = 0;

    for (int i = 7; i >= 0 && len > 8; i--)
        header = header << 8 | head[i];
    if (len > 8 && header >= 2 && header <= size - 8 && head[8] == '{')
        return "model.safetensors";
    return len > 2 && head[0] == 0x80 && head[1] >= 2 && head[1] <= 5 ? "model.pt" : NULL;
}

static int index_source(struct ckpt_source *s, const char *path, struct ckpt_archive_index *m,
                        struct ckpt_err *err)
{
    unsigned char head[BLOCK] = {0};
    const size_t len = s->size < sizeof head ? (size_t)s->size : sizeof head;

    if (ckpt_source_pread(s, head, len, 0, err) < 0)
        return -1;
    const struct packed *p = packed_as(head, len);
    if (p)
        return fail_packed(p, path, err);
    const bool is_zip = len >= 4 && memcmp(head, "PK\3\4", 4) == 0;
    const bool is_tar = len == sizeof head && is_header(head);
    if (!is_zip && !is_tar) {
        const char *as = is_shard(path) ? NULL : file_as(head, len, s->size);
        return as ? add_itself(s, as, m, err) : fail_file(head, len, path, err);
    }
    if (is_zip && index_zip(s, path, m, err) < 0)
        return -1;
    if (is_tar && index_tar(s, m, err) < 0)
        return ckpt_err_in(err, "'%s'", path);
    return ckpt_source_check(s, err);
}

int ckpt_archive_read_index(struct ckpt_dir *folder, const char *name,
                            struct ckpt_archive_index **ret_index, struct ckpt_file_id *ret_id,
                            struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_archive_index_freep) struct ckpt_archive_index *m = NULL;
    ckpt_cleanup(ckpt_source_unrefp) struct ckpt_source *s = NULL;
    ckpt_cleanup(ckpt_freep) char *path = strcmp(ckpt_dir_path(folder), ".") == 0
                                              ? strdup(name)
                                              : ckpt_asprintf("%s/%s", ckpt_dir_path(folder), name);
    struct ckpt_fdpool *pool = NULL;

    if (!path)
        return ckpt_nomem(err);
    if (ckpt_archive_index_new(&m, err) < 0 || ckpt_fdpool_new(1, &pool, err) < 0)
        return -1;
    int result = ckpt_source_file_new(folder, name, pool, &s, err);
    if (result == 0)
        result = index_source(s, path, m, err);
    if (result == 0)
        result = ckpt_archive_index_seal(m, err);
    ckpt_fdpool_unref(pool);
    if (result < 0)
        return -1;
    (void)ckpt_source_file_id(s, ret_id);
    *ret_index = ckpt_steal(&m);
    return 0;
}

bool ckpt_archive_is_itself(const struct ckpt_dir *dir)
{
    static const char *const names[] = {"model.pt", "model.safetensors"};
    struct ckpt_dir_found found;

    for (size_t i = 0; i < sizeof names / sizeof *names && ckpt_dir_is_archive(dir); i++)
        if (ckpt_dir_look(dir, names[i], &found, NULL) == 0 && found.extent.off == 0 &&
            found.extent.len == found.id.size)
            return true;
    return false;
}

/* Open a folder, or an archive that is a file. */
static int open_path(const char *path, const struct ckpt_access *how, struct ckpt_dir **ret,
                     struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *dir = NULL;
    bool is_file;

    if (ckpt_dir_open_bounded(path, how->links, &how->far, &is_file, &dir, err) < 0)
        return -1;
    if (is_file) {
        if (ckpt_dir_open_archive(path, ckpt_archive_read_index, &how->far, how->recording, ret,
                                  err) < 0)
            return -1;
        ckpt_dir_set_far(*ret, &how->far);
        return 0;
    }
    ckpt_dir_set_far(dir, &how->far);
    if (ckpt_dir_bound(dir, err) < 0)
        return -1;
    if (ckpt_dir_is_far(dir)) {
        ckpt_parallel_default(CKPT_FAR_QUESTIONS);
        if (!ckpt_dir_ignores_case(dir) && ckpt_dir_keep_lists(dir, err) < 0)
            return -1;
    }
    if (ckpt_dir_use(dir, how->recording, err) < 0)
        return -1;
    *ret = ckpt_steal(&dir);
    return 0;
}

int ckpt_archive_open(const char *path, const struct ckpt_access *how, struct ckpt_dir **ret,
                      struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *dir = NULL;

    if (!ckpt_is_bucket(path))
        return open_path(path, how, ret, err);
    if (ckpt_dir_open_bucket(path, how->is_around, &how->bucket, how->recording, &dir, err) < 0 ||
        ckpt_dir_use(dir, how->recording, err) < 0)
        return -1;
    *ret = ckpt_steal(&dir);
    return 0;
}
