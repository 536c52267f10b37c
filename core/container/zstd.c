/* SPDX-License-Identifier: Apache-2.0 */
/* Decompressing by libzstd: streams, because only the end of one tells its length. */
#include "container/zstd.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <zstd.h>

#include "base/ckd.h"
#include "base/mem.h"
#include "io/iov.h"

enum {
    IN_BYTES = 1 << 20,
    AHEAD = 8 << 20, /* fetched ahead, if it is far */
    OUT_BYTES = 256 * 1024,
    KEPT = 64 * 1024,       /* of the beginning and of the end */
    MOST_RATIO = 64 * 1024, /* a block of 4 bytes is 128 KiB at most */
    MAX_WINDOW_LOG = 27,    /* memory that a frame may ask for: 128 MiB, the library's own limit */
};

struct source_zstd {
    struct ckpt_source source;
    struct ckpt_decoded_part part;
    struct ckpt_source *of;
    struct ckpt_decoded *decoded;
    uint64_t off, len; /* in `of`, compressed */
    bool claimed;      /* another file says how long they are; nothing was decompressed before */
    struct kept {
        unsigned char head[KEPT], tail[KEPT]; /* the tail ends where the source ends */
    } * kept;                                 /* NULL: settled */
};

static struct source_zstd *self(const struct ckpt_source *s) { return (struct source_zstd *)s; }

bool ckpt_zstd_is_frame(const unsigned char head[CKPT_ZSTD_MAGIC_LEN])
{
    return memcmp(head, "\x28\xb5\x2f\xfd", CKPT_ZSTD_MAGIC_LEN) == 0;
}

/* ---- decompressing ---- */

struct ckpt_zstd_stream {
    struct ckpt_source *of; /* borrowed */
    ZSTD_DStream *d;
    ZSTD_inBuffer in;
    uint64_t off, len, read; /* the compressed bytes in `of`, and how many of them went in */
    bool open;               /* within a frame */
    unsigned char input[];   /* IN_BYTES, or all */
};

int ckpt_zstd_stream_new(struct ckpt_source *of, uint64_t off, uint64_t len,
                         struct ckpt_zstd_stream **ret, struct ckpt_err *err)
{
    struct ckpt_zstd_stream *s = malloc(sizeof *s + (size_t)ckpt_min_u64(IN_BYTES, len));

    if (!s)
        return ckpt_nomem(err);
    s->of = of;
    s->in = (ZSTD_inBuffer){s->input, 0, 0};
    s->off = off;
    s->len = len;
    s->read = 0;
    s->open = true;
    s->d = ZSTD_createDStream();
    if (!s->d || ZSTD_isError(ZSTD_DCtx_setParameter(s->d, ZSTD_d_windowLogMax, MAX_WINDOW_LOG))) {
        ckpt_zstd_stream_free(s);
        return ckpt_nomem(err);
    }
    *ret = s;
    return 0;
}

void ckpt_zstd_stream_free(struct ckpt_zstd_stream *s)
{
    if (s)
        (void)ZSTD_freeDStream(s->d);
    free(s);
}

static int fail_damaged(const struct ckpt_zstd_stream *s, const char *why, struct ckpt_err *err)
{
    return ckpt_fail(err, CKPT_FORMAT,
                     "the bytes compressed by zstd at byte %" PRIu64
                     " are damaged near byte %" PRIu64 ": %s",
                     s->off, s->off + s->read, why);
}

static int refill(struct ckpt_zstd_stream *s, struct ckpt_err *err)
{
    const size_t n = (size_t)ckpt_min_u64(IN_BYTES, s->len - s->read);

    (void)ckpt_source_prefetch(s->of, s->off + s->read, ckpt_min_u64(s->len - s->read, AHEAD));
    if (ckpt_source_pread(s->of, s->input, n, s->off + s->read, err) < 0)
        return -1;
    s->in = (ZSTD_inBuffer){s->input, n, 0};
    s->read += n;
    return 0;
}

int ckpt_zstd_stream_read(struct ckpt_zstd_stream *s, void *buf, size_t len, size_t *ret_len,
                          struct ckpt_err *err)
{
    ZSTD_outBuffer out = {buf, len, 0};

    while (out.pos < out.size) {
        if (s->in.pos == s->in.size && s->read < s->len && refill(s, err) < 0)
            return -1;
        const size_t had = s->in.pos, made = out.pos;
        const size_t rc = ZSTD_decompressStream(s->d, &out, &s->in);
        if (ZSTD_isError(rc))
            return fail_damaged(s, ZSTD_getErrorName(rc), err);
        if (s->in.pos > had || out.pos > made)
            s->open = rc != 0;
        else if (s->read == s->len)
            break;
    }
    *ret_len = out.pos;
    return out.pos < len && s->open ? fail_damaged(s, "they end within a frame", err) : 0;
}

int ckpt_zstd_decompress(const void *data, size_t len, size_t max_len, void **ret_data,
                         size_t *ret_len, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_source_unrefp) struct ckpt_source *of = NULL;
    ckpt_cleanup(ckpt_freep) char *out = NULL;
    struct ckpt_zstd_stream *s = NULL;
    size_t made = 0, cap = 0, n = 0;
    int rc = ckpt_source_mem_new("", data, len, &of, err) < 0
                 ? -1
                 : ckpt_zstd_stream_new(of, 0, len, &s, err);

    while (rc == 0 && made == cap && made <= max_len) {
        char *grown = realloc(out, cap = 2 * cap + OUT_BYTES);
        if (!grown) {
            rc = ckpt_nomem(err);
            break;
        }
        out = grown;
        rc = ckpt_zstd_stream_read(s, out + made, cap - made, &n, err);
        made += n;
    }
    ckpt_zstd_stream_free(s);
    if (rc == 0 && made > max_len)
        rc = ckpt_fail(err, CKPT_FORMAT,
                       "the bytes compressed by zstd are more than %zu bytes when decompressed",
                       max_len);
    if (rc < 0)
        return -1;
    *ret_data = ckpt_steal(&out);
    *ret_len = made;
    return 0;
}

/* ---- compressing ---- */

struct ckpt_zstd_frame {
    ZSTD_CCtx *c;
    ZSTD_outBuffer out; /* size is what is allocated */
};

int ckpt_zstd_frame_new(uint64_t len, struct ckpt_zstd_frame **ret, struct ckpt_err *err)
{
    struct ckpt_zstd_frame *f = calloc(1, sizeof *f);

    if (!f || !(f->c = ZSTD_createCCtx()) ||
        ZSTD_isError(ZSTD_CCtx_setParameter(f->c, ZSTD_c_compressionLevel, 1)) ||
        ZSTD_isError(ZSTD_CCtx_setPledgedSrcSize(f->c, len))) {
        (void)ckpt_zstd_frame_end(f, NULL, NULL, NULL);
        return ckpt_nomem(err);
    }
    *ret = f;
    return 0;
}

/* Compress until the input is used up and, with ZSTD_e_end, the frame is complete. */
static int compress(struct ckpt_zstd_frame *f, const void *data, size_t len, ZSTD_EndDirective end,
                    struct ckpt_err *err)
{
    ZSTD_inBuffer in = {data, len, 0};
    size_t left = 0;

    do {
        if (f->out.size - f->out.pos < OUT_BYTES) {
            const size_t more = f->out.size + f->out.size / 2 + OUT_BYTES;
            void *grown = realloc(f->out.dst, more);
            if (!grown)
                return ckpt_nomem(err);
            f->out.dst = grown;
            f->out.size = more;
        }
        left = ZSTD_compressStream2(f->c, &f->out, &in, end);
        if (ZSTD_isError(left))
            return ckpt_fail(err, CKPT_IO, "zstd: %s", ZSTD_getErrorName(left));
    } while (in.pos < in.size || (end == ZSTD_e_end && left));
    return 0;
}

int ckpt_zstd_frame_add(struct ckpt_zstd_frame *f, const void *data, size_t len,
                        struct ckpt_err *err)
{
    return compress(f, data, len, ZSTD_e_continue, err);
}

int ckpt_zstd_frame_end(struct ckpt_zstd_frame *f, void **ret_data, size_t *ret_len,
                        struct ckpt_err *err)
{
    int rc = f && ret_data ? compress(f, NULL, 0, ZSTD_e_end, err) : 0;

    if (f && ret_data && rc == 0) {
        *ret_data = f->out.dst;
        *ret_len = f->out.pos;
    } else if (f) {
        free(f->out.dst);
    }
    if (f)
        (void)ZSTD_freeCCtx(f->c);
    free(f);
    return rc;
}

/* ---- the first time: the length, the beginning and the end ---- */

static void keep_ends(struct kept *k, const unsigned char *bytes, size_t len, uint64_t at)
{
    const size_t n = len < KEPT ? len : KEPT;

    if (at < KEPT)
        memcpy(k->head + at, bytes, len < KEPT - at ? len : (size_t)(KEPT - at));
    memmove(k->tail, k->tail + n, KEPT - n);
    memcpy(k->tail + KEPT - n, bytes + len - n, n);
}

static int measure(struct source_zstd *z, uint64_t max_len, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) unsigned char *out = malloc(OUT_BYTES);
    struct ckpt_zstd_stream *s = NULL;
    size_t n = OUT_BYTES;
    int rc = out ? ckpt_zstd_stream_new(z->of, z->off, z->len, &s, err) : ckpt_nomem(err);

    for (; rc == 0 && n == OUT_BYTES; z->source.size += n) {
        rc = ckpt_zstd_stream_read(s, out, OUT_BYTES, &n, err);
        if (rc == 0 && z->source.size + n > max_len)
            rc = ckpt_fail(err, CKPT_FORMAT,
                           "the bytes compressed by zstd at byte %" PRIu64 " are more than %" PRIu64
                           " bytes when decompressed",
                           z->off, max_len);
        if (rc == 0)
            keep_ends(z->kept, out, n, z->source.size);
    }
    ckpt_zstd_stream_free(s);
    return rc;
}

/* ---- later: all of it ---- */

static const struct source_zstd *of_part(const struct ckpt_decoded_part *part)
{
    return (const struct source_zstd *)((const char *)part - offsetof(struct source_zstd, part));
}

/* The stream has `more` bytes than were expected, or fewer. */
static int fail_length(const struct source_zstd *z, bool more, struct ckpt_err *err)
{
    if (!z->claimed)
        return ckpt_fail(err, CKPT_STALE, "compressed bytes changed since they were opened");
    return ckpt_fail(err, CKPT_FORMAT,
                     "the bytes compressed by zstd at byte %" PRIu64 " are %s than %" PRIu64
                     " bytes when decompressed",
                     z->off, more ? "more" : "fewer", z->part.len);
}

static int copy(const struct source_zstd *z, struct ckpt_zstd_stream *s, ckpt_decoded_put *put,
                void *to, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) unsigned char *out = malloc(OUT_BYTES);
    size_t n = 0, more = 0;

    if (!out)
        return ckpt_nomem(err);
    for (uint64_t left = z->part.len; left > 0; left -= n) {
        const size_t part = (size_t)ckpt_min_u64(OUT_BYTES, left);
        if (ckpt_zstd_stream_read(s, out, part, &n, err) < 0)
            return -1;
        if (n < part)
            return fail_length(z, false, err);
        if (!put(to, out, n))
            return 1;
    }
    if (ckpt_zstd_stream_read(s, out, 1, &more, err) < 0)
        return -1;
    return more ? fail_length(z, true, err) : ckpt_source_check(z->of, err);
}

static int decode(const struct ckpt_decoded_part *part, ckpt_decoded_put *put, void *to,
                  struct ckpt_err *err)
{
    const struct source_zstd *z = of_part(part);
    struct ckpt_zstd_stream *s = NULL;
    struct ckpt_err own = {0};
    int rc = ckpt_zstd_stream_new(z->of, z->off, z->len, &s, &own);

    if (rc == 0)
        rc = copy(z, s, put, to, &own);
    ckpt_zstd_stream_free(s);
    if (rc >= 0)
        return rc;
    if (z->claimed && own.code == CKPT_FORMAT) {
        ckpt_cleanup(ckpt_freep) char *name = ckpt_source_name(z->of);
        (void)ckpt_err_in(&own, "'%s'", name);
    }
    return ckpt_err_move(err, &own);
}

/* ---- the source ---- */

/* Read what is kept of the beginning and the end. False: it lies elsewhere. */
static bool read_kept(const struct source_zstd *z, const struct ckpt_source_run *run)
{
    const uint64_t size = z->source.size, tail = size < KEPT ? 0 : size - KEPT,
                   len = ckpt_iov_len(run->iov, run->n);
    struct ckpt_iov_cursor to = {run->iov, 0};

    if (z->kept && ckpt_range_ok(run->off, len, KEPT))
        ckpt_iov_put(&to, z->kept->head + run->off, len);
    else if (z->kept && run->off >= tail)
        ckpt_iov_put(&to, z->kept->tail + (KEPT - (size - run->off)), len);
    else
        return false;
    return true;
}

static int zstd_read(struct ckpt_source *s, const struct ckpt_source_way *way,
                     const struct ckpt_source_run *run, size_t n, struct ckpt_err *err)
{
    struct source_zstd *z = self(s);

    if (n == 1 && way->how == CKPT_READ_AHEAD && read_kept(z, run))
        return 0;
    return ckpt_decoded_read(z->decoded, &z->part, way, run, n, err);
}

static int zstd_check(struct ckpt_source *s, struct ckpt_err *err)
{
    return ckpt_source_check(self(s)->of, err);
}

static char *zstd_name(const struct ckpt_source *s) { return ckpt_source_name(self(s)->of); }

static void zstd_free(struct ckpt_source *s)
{
    struct source_zstd *z = self(s);

    ckpt_decoded_forget(z->decoded, &z->part);
    ckpt_decoded_unref(z->decoded);
    ckpt_source_unref(z->of);
    free(z->kept);
    free(z);
}

static struct ckpt_source *zstd_stored(const struct ckpt_source *s, uint64_t *ret_off)
{
    *ret_off = self(s)->off;
    return self(s)->of;
}

static enum ckpt_prepared zstd_prepare(struct ckpt_source *s)
{
    return ckpt_decoded_prepare(self(s)->decoded, &self(s)->part);
}

static const struct ckpt_source_ops zstd_ops = {.read = zstd_read,
                                                .check = zstd_check,
                                                .name = zstd_name,
                                                .free = zstd_free,
                                                .stored = zstd_stored,
                                                .prepare = zstd_prepare};

static struct source_zstd *new_source(struct ckpt_decoded *decoded, struct ckpt_source *of,
                                      uint64_t off, uint64_t len, struct ckpt_err *err)
{
    struct source_zstd *z = calloc(1, sizeof *z);

    assert(ckpt_range_ok(off, len, of->size));
    if (!z) {
        (void)ckpt_nomem(err);
        return NULL;
    }
    atomic_init(&z->source.refs, 1);
    z->source.ops = &zstd_ops;
    z->decoded = ckpt_decoded_ref(decoded);
    z->of = ckpt_source_ref(of);
    z->off = off;
    z->len = len;
    return z;
}

/* The length is known now. */
static void announce(struct source_zstd *z)
{
    z->part.len = z->source.size;
    z->part.decode = decode;
    ckpt_decoded_add(z->decoded, &z->part);
}

int ckpt_source_zstd_new(struct ckpt_decoded *decoded, struct ckpt_source *of, uint64_t off,
                         uint64_t len, uint64_t max_len, struct ckpt_source **ret,
                         struct ckpt_err *err)
{
    struct source_zstd *z = new_source(decoded, of, off, len, err);

    if (!z)
        return -1;
    if (!(z->kept = malloc(sizeof *z->kept)))
        (void)ckpt_nomem(err);
    if (!z->kept || measure(z, max_len, err) < 0) {
        zstd_free(&z->source);
        return -1;
    }
    announce(z);
    *ret = &z->source;
    return 0;
}

int ckpt_source_zstd_of_size(struct ckpt_decoded *decoded, struct ckpt_source *of, uint64_t off,
                             uint64_t len, uint64_t size, struct ckpt_source **ret,
                             struct ckpt_err *err)
{
    if (size / MOST_RATIO > len || size > SIZE_MAX)
        return ckpt_fail(err, CKPT_FORMAT,
                         "%" PRIu64 " bytes at byte %" PRIu64 " cannot be %" PRIu64
                         " when decompressed",
                         len, off, size);
    struct source_zstd *z = new_source(decoded, of, off, len, err);
    if (!z)
        return -1;
    z->claimed = true;
    z->source.size = size;
    announce(z);
    *ret = &z->source;
    return 0;
}

void ckpt_source_zstd_settle(struct ckpt_source *s)
{
    assert(s->ops == &zstd_ops);
    free(self(s)->kept);
    self(s)->kept = NULL;
}
