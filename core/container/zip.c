/* SPDX-License-Identifier: Apache-2.0 */
/* The central directory, and the members' own headers. */
#include "container/zip.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/ckd.h"
#include "base/mem.h"
#include "base/sort.h"
#include "container/stand_in.h"
#include "io/cursor.h"

enum {
    END_LEN = 22,
    LOCATOR_LEN = 20,
    END64_LEN = 56,
    ENTRY_LEN = 46,
    LOCAL_LEN = 30,
    MAX_COMMENT = 65535,
    TAIL = 1024, /* holds the directory of an archive of one tensor */
    ENCRYPTED = 1,
    DESCRIBED = 8,
    ON_UNIX = 3,
    DESCRIPTOR_LEN = 16, /* with its signature, which Python's and PyTorch's writers always give */
    DESCRIPTOR64_LEN = 24,
    EXTRA_HEAD = 4,
    EXTRA_READ = 64, /* of the extra fields that are read with a header: all that torch writes */
};

/* The end of the archive, as far as it was read. */
struct tail {
    unsigned char *ptr;
    size_t len;
    uint64_t off; /* in the archive */
};

static void tail_release(struct tail *t) { free(t->ptr); }

static int read_tail(const struct ckpt_zip *z, size_t len, struct tail *t, struct ckpt_err *err)
{
    free(t->ptr);
    t->len = (size_t)ckpt_min_u64(len, z->len);
    t->off = z->len - t->len;
    if (!(t->ptr = malloc(t->len)))
        return ckpt_nomem(err);
    return ckpt_source_pread(z->source, t->ptr, t->len, z->off + t->off, err);
}

/* Place of the end record in the tail: the last one whose comment reaches the end. */
static bool find_end(const struct tail *t, size_t *ret)
{
    for (size_t i = t->len < END_LEN ? 0 : t->len - END_LEN + 1; i-- > 0;) {
        const unsigned char *p = t->ptr + i;
        size_t comment = p[20] | (size_t)p[21] << 8;
        if (memcmp(p, "PK\5\6", 4) == 0 && i + END_LEN + comment == t->len) {
            *ret = i;
            return true;
        }
    }
    return false;
}

struct directory {
    uint64_t off, len, n;
    uint64_t end; /* what follows it */
};

/* Bytes [off, off+len) of the archive out of the tail, or NULL. */
static const unsigned char *in_tail(const struct tail *t, uint64_t off, uint64_t len)
{
    return off >= t->off && ckpt_range_ok(off - t->off, len, t->len) ? t->ptr + (off - t->off)
                                                                     : NULL;
}

static int read_end64(const struct ckpt_zip *z, uint64_t off, struct directory *d,
                      struct ckpt_err *err)
{
    unsigned char record[END64_LEN];
    struct ckpt_cursor c;

    if (!ckpt_range_ok(off, END64_LEN, z->len))
        return ckpt_fail(err, CKPT_FORMAT, "the zip64 end record lies outside the archive");
    if (ckpt_source_pread(z->source, record, sizeof record, z->off + off, err) < 0)
        return -1;
    ckpt_cursor_init(&c, record, sizeof record, off, "zip");
    if (ckpt_cursor_le32(&c) != 0x06064b50)
        return ckpt_fail(err, CKPT_FORMAT, "no zip64 end record at byte %" PRIu64, off);
    (void)ckpt_cursor_take(&c, 12);
    uint64_t disks = ckpt_cursor_le64(&c), here = ckpt_cursor_le64(&c);
    d->n = ckpt_cursor_le64(&c);
    d->len = ckpt_cursor_le64(&c);
    d->off = ckpt_cursor_le64(&c);
    d->end = off;
    if (disks != 0 || here != d->n)
        return ckpt_fail(err, CKPT_UNSUPPORTED, "zip archives of several disks are not supported");
    return 0;
}

static int read_end(const struct ckpt_zip *z, const struct tail *t, size_t at, struct directory *d,
                    struct ckpt_err *err)
{
    const unsigned char *locator;
    struct ckpt_cursor c;

    ckpt_cursor_init(&c, t->ptr + at, END_LEN, t->off + at, "zip");
    (void)ckpt_cursor_take(&c, 4);
    uint32_t disks = ckpt_cursor_le32(&c);
    uint16_t here = ckpt_cursor_le16(&c);
    d->n = ckpt_cursor_le16(&c);
    d->len = ckpt_cursor_le32(&c);
    d->off = ckpt_cursor_le32(&c);
    d->end = t->off + at;
    if (d->end >= LOCATOR_LEN && (locator = in_tail(t, d->end - LOCATOR_LEN, LOCATOR_LEN)) &&
        memcmp(locator, "PK\6\7", 4) == 0) {
        ckpt_cursor_init(&c, locator + 8, 8, d->end - 12, "zip");
        return read_end64(z, ckpt_cursor_le64(&c), d, err);
    }
    if (disks != 0 || here != d->n)
        return ckpt_fail(err, CKPT_UNSUPPORTED, "zip archives of several disks are not supported");
    return 0;
}

/* Sizes and offset of 32 bits that are full stand in the extra field, in this order. */
static int read_zip64(struct ckpt_cursor *extra, uint64_t *usize, uint64_t *csize, uint64_t *header)
{
    while (ckpt_cursor_left(extra) >= 4) {
        uint16_t id = ckpt_cursor_le16(extra), len = ckpt_cursor_le16(extra);
        const void *block = ckpt_cursor_take(extra, len);
        struct ckpt_cursor c;
        if (!block)
            return -1;
        if (id != 1)
            continue;
        ckpt_cursor_init(&c, block, len, 0, "zip");
        if (*usize == UINT32_MAX)
            *usize = ckpt_cursor_le64(&c);
        if (*csize == UINT32_MAX)
            *csize = ckpt_cursor_le64(&c);
        if (*header == UINT32_MAX)
            *header = ckpt_cursor_le64(&c);
        return c.failed ? -1 : 0;
    }
    return 0;
}

/* Writers on Unix store a file's mode in the upper half of the attributes. */
static bool is_link(uint16_t made_by, uint32_t attributes)
{
    return made_by >> 8 == ON_UNIX && S_ISLNK(attributes >> 16);
}

static int read_entry(const struct ckpt_zip *z, struct ckpt_cursor *c, struct ckpt_zip_entry *e,
                      struct ckpt_err *err)
{
    uint64_t at = ckpt_cursor_off(c);

    if (ckpt_cursor_le32(c) != 0x02014b50)
        return c->failed ? ckpt_cursor_report(c, err)
                         : ckpt_fail(err, CKPT_FORMAT, "no directory entry at byte %" PRIu64, at);
    uint16_t made_by = ckpt_cursor_le16(c);
    (void)ckpt_cursor_take(c, 2);
    uint16_t flags = ckpt_cursor_le16(c), method = ckpt_cursor_le16(c);
    (void)ckpt_cursor_take(c, 4);
    e->crc = ckpt_cursor_le32(c);
    uint64_t csize = ckpt_cursor_le32(c), usize = ckpt_cursor_le32(c);
    uint16_t name_len = ckpt_cursor_le16(c), extra_len = ckpt_cursor_le16(c);
    uint16_t comment_len = ckpt_cursor_le16(c);
    (void)ckpt_cursor_take(c, 4);
    e->is_link = is_link(made_by, ckpt_cursor_le32(c));
    e->header = ckpt_cursor_le32(c);
    e->name = ckpt_cursor_take(c, name_len);
    e->name_len = name_len;
    const void *extra = ckpt_cursor_take(c, extra_len);
    (void)ckpt_cursor_take(c, comment_len);
    if (c->failed)
        return ckpt_cursor_report(c, err);

    struct ckpt_cursor x;
    ckpt_cursor_init(&x, extra, extra_len, 0, "zip");
    if (read_zip64(&x, &usize, &csize, &e->header) < 0 || name_len > CKPT_ZIP_MAX_NAME ||
        memchr(e->name, 0, name_len))
        return ckpt_fail(err, CKPT_FORMAT, "the directory entry at byte %" PRIu64 " is damaged",
                         at);
    if (flags & ENCRYPTED || method != 0 || csize != usize)
        return ckpt_fail(err, CKPT_UNSUPPORTED, "member '%.*s' is %s", (int)name_len, e->name,
                         flags & ENCRYPTED ? "encrypted" : "compressed");
    e->len = usize;
    e->described = flags & DESCRIBED;
    if (!ckpt_range_ok(e->header, LOCAL_LEN + name_len, z->data_end) ||
        usize > z->data_end - e->header - LOCAL_LEN - name_len)
        return ckpt_fail(err, CKPT_FORMAT, "member '%.*s' lies outside the archive", (int)name_len,
                         e->name);
    return 0;
}

static int by_header(const void *a, const void *b)
{
    const struct ckpt_zip_entry *x = *(struct ckpt_zip_entry *const *)a;
    const struct ckpt_zip_entry *y = *(struct ckpt_zip_entry *const *)b;

    return ckpt_u64_cmp(x->header, y->header);
}

/* Finds the member that follows each member in the file. */
static int order_entries(struct ckpt_zip *z, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) struct ckpt_zip_entry **order =
        malloc((z->nentry + 1) * sizeof(struct ckpt_zip_entry *));

    if (!order)
        return ckpt_nomem(err);
    for (size_t i = 0; i < z->nentry; i++)
        order[i] = &z->entry[i];
    qsort(order, z->nentry, sizeof *order, by_header);
    for (size_t i = 0; i < z->nentry; i++)
        order[i]->next = i + 1 < z->nentry ? order[i + 1]->header : z->data_end;
    return 0;
}

static int read_directory(struct ckpt_zip *z, const struct tail *t, const struct directory *d,
                          struct ckpt_err *err)
{
    const unsigned char *have = in_tail(t, d->off, d->len);
    struct ckpt_cursor c;

    if (!ckpt_range_ok(d->off, d->len, z->len) || d->off + d->len != d->end)
        return ckpt_fail(err, CKPT_FORMAT,
                         "the zip directory (bytes %" PRIu64 " and %" PRIu64
                         " following) does not end where the end record begins (%" PRIu64 ")",
                         d->off, d->len, d->end);
    if (d->len > CKPT_ZIP_MAX_DIRECTORY || d->n > d->len / ENTRY_LEN)
        return ckpt_fail(err, CKPT_FORMAT,
                         "the zip directory claims %" PRIu64 " members in %" PRIu64 " bytes", d->n,
                         d->len);
    z->data_end = d->off;
    z->nentry = (size_t)d->n;
    z->entry = calloc(z->nentry + 1, sizeof *z->entry);
    z->directory = malloc((size_t)d->len + 1);
    if (!z->entry || !z->directory)
        return ckpt_nomem(err);
    if (have)
        memcpy(z->directory, have, (size_t)d->len);
    else if (ckpt_source_pread(z->source, z->directory, (size_t)d->len, z->off + d->off, err) < 0)
        return -1;
    ckpt_cursor_init(&c, z->directory, (size_t)d->len, d->off, "zip");
    for (size_t i = 0; i < z->nentry; i++)
        if (read_entry(z, &c, &z->entry[i], err) < 0)
            return -1;
    return order_entries(z, err);
}

static int open_zip(struct ckpt_zip *z, struct ckpt_err *err)
{
    ckpt_cleanup(tail_release) struct tail tail = {0};
    struct directory d;
    size_t at;

    z->head_len = (size_t)ckpt_min_u64(z->len, sizeof z->head);
    if (ckpt_source_pread(z->source, z->head, z->head_len, z->off, err) < 0 ||
        read_tail(z, TAIL, &tail, err) < 0)
        return -1;
    if (!find_end(&tail, &at) &&
        (read_tail(z, END_LEN + MAX_COMMENT, &tail, err) < 0 || !find_end(&tail, &at)))
        return ckpt_refuse_stand_in(z->head, z->head_len, err) < 0
                   ? -1
                   : ckpt_fail(err, CKPT_FORMAT,
                               "there is no zip end record in %" PRIu64 " bytes: the archive is "
                               "truncated, or the file is not a zip archive",
                               z->len);
    return read_end(z, &tail, at, &d, err) < 0 ? -1 : read_directory(z, &tail, &d, err);
}

int ckpt_zip_open(struct ckpt_source *s, uint64_t off, uint64_t len, struct ckpt_zip *ret,
                  struct ckpt_err *err)
{
    ret->source = s;
    ret->off = off;
    ret->len = len;
    ret->entry = NULL;
    ret->directory = NULL;
    ret->nentry = 0;
    if (!ckpt_range_ok(off, len, s->size))
        return ckpt_fail(err, CKPT_FORMAT, "the archive lies outside the file");
    if (open_zip(ret, err) < 0) {
        ckpt_zip_release(ret);
        return -1;
    }
    return 0;
}

void ckpt_zip_release(struct ckpt_zip *z)
{
    free(z->entry);
    free(z->directory);
    z->entry = NULL;
    z->directory = NULL;
}

int ckpt_zip_pread(const struct ckpt_zip *z, void *buf, size_t len, uint64_t off,
                   struct ckpt_err *err)
{
    if (off >= z->off && ckpt_range_ok(off - z->off, len, z->head_len)) {
        memcpy(buf, z->head + (off - z->off), len);
        return 0;
    }
    return ckpt_source_pread(z->source, buf, len, off, err);
}

int ckpt_zip_check(const struct ckpt_zip_entry *e, uint32_t crc, struct ckpt_err *err)
{
    if (e->crc == 0 || e->crc == crc)
        return 0;
    return ckpt_fail(err, CKPT_FORMAT,
                     "the data of member '%.*s' are damaged: CRC-32 %08" PRIx32
                     ", the archive says %08" PRIx32,
                     (int)e->name_len, e->name, crc, e->crc);
}

/* ---- a member's own header ---- */

struct local {
    uint64_t extra, extra_len; /* in the archive */
    bool zip64;
};

static int fail_header(const struct ckpt_zip_entry *e, const char *what, struct ckpt_err *err)
{
    return ckpt_fail(err, CKPT_FORMAT, "the header of member '%.*s' at byte %" PRIu64 " %s",
                     (int)e->name_len, e->name, e->header, what);
}

/* The extra fields must fill their room: PyTorch pads with one of its own ("FB"), so that data are
 * aligned. head: the first head_len bytes of the member. */
static int walk_extra(const struct ckpt_zip *z, const struct ckpt_zip_entry *e,
                      const unsigned char *head, size_t head_len, struct local *l,
                      struct ckpt_err *err)
{
    for (uint64_t at = 0; at < l->extra_len;) {
        const uint64_t here = l->extra - e->header + at;
        unsigned char field[EXTRA_HEAD];
        if (l->extra_len - at < EXTRA_HEAD)
            return fail_header(e, "has an extra field that is cut short", err);
        if (ckpt_range_ok(here, EXTRA_HEAD, head_len))
            memcpy(field, head + here, EXTRA_HEAD);
        else if (ckpt_zip_pread(z, field, EXTRA_HEAD, z->off + e->header + here, err) < 0)
            return -1;
        const uint64_t len = field[2] | (uint64_t)field[3] << 8;
        l->zip64 |= field[0] == 1 && field[1] == 0;
        at += EXTRA_HEAD;
        if (len > l->extra_len - at)
            return fail_header(
                e, "has an extra field that is longer than the extra fields together", err);
        at += len;
    }
    return 0;
}

static int read_local(const struct ckpt_zip *z, const struct ckpt_zip_entry *e, struct local *ret,
                      struct ckpt_err *err)
{
    unsigned char head[LOCAL_LEN + CKPT_ZIP_MAX_NAME + EXTRA_READ];
    const size_t len =
        (size_t)ckpt_min_u64(LOCAL_LEN + e->name_len + EXTRA_READ, z->data_end - e->header);
    struct ckpt_cursor c;

    if (ckpt_zip_pread(z, head, len, z->off + e->header, err) < 0)
        return -1;
    ckpt_cursor_init(&c, head, len, e->header, "zip");
    uint32_t signature = ckpt_cursor_le32(&c);
    (void)ckpt_cursor_take(&c, 2);
    uint16_t flags = ckpt_cursor_le16(&c), method = ckpt_cursor_le16(&c);
    (void)ckpt_cursor_take(&c, 16);
    uint16_t name_len = ckpt_cursor_le16(&c), extra_len = ckpt_cursor_le16(&c);
    if (signature != 0x04034b50 || name_len != e->name_len ||
        memcmp(head + LOCAL_LEN, e->name, e->name_len) != 0)
        return ckpt_fail(err, CKPT_FORMAT,
                         "member '%.*s' does not begin at byte %" PRIu64
                         ", where the directory says so",
                         (int)e->name_len, e->name, e->header);
    if (!(flags & DESCRIBED) == e->described || flags & ENCRYPTED || method != 0)
        return fail_header(e, "has other flags than its entry in the directory", err);
    *ret = (struct local){.extra = e->header + LOCAL_LEN + name_len, .extra_len = extra_len};
    return walk_extra(z, e, head, len, ret, err);
}

int ckpt_zip_data(const struct ckpt_zip *z, const struct ckpt_zip_entry *e, uint64_t *ret_off,
                  struct ckpt_err *err)
{
    struct local l;

    if (read_local(z, e, &l, err) < 0)
        return -1;
    const uint64_t start = l.extra + l.extra_len;
    const uint64_t more = !e->described ? 0 : l.zip64 ? DESCRIPTOR64_LEN : DESCRIPTOR_LEN;
    if (start > e->next || e->len > e->next - start || e->next - start - e->len != more)
        return ckpt_fail(err, CKPT_FORMAT,
                         "member '%.*s': %" PRIu64 " bytes from byte %" PRIu64 ", and %" PRIu64
                         " of a descriptor, do not end where the next member "
                         "begins, at byte %" PRIu64,
                         (int)e->name_len, e->name, e->len, start, more, e->next);
    *ret_off = z->off + start;
    return 0;
}
