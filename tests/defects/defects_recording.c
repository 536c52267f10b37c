/* SPDX-License-Identifier: Apache-2.0 */
/* Lies in the recording of an opened checkpoint, which comes from another process. */
#include "defects.h"

#include <stdlib.h>
#include <xxhash.h>

#include "base/str.h"
#include "io/recording.h"

/* ---- recordings as io/recording.c describes them ---- */

enum { LOOK, LIST, BYTES, SAMPLE, A_FILE = 0, A_DIR = 1 };

static void num(struct ckpt_str *s, uint64_t v, unsigned n)
{
    for (unsigned i = 0; i < n; i++)
        ckpt_str_putc(s, (char)(v >> 8 * i));
}

/* What follows the hash, up to the answers. */
static void start(struct ckpt_str *s)
{
    num(s, 7, 8);
    num(s, 1000, 8);
}

/* An answer up to the path, which follows with the data. */
static void head(struct ckpt_str *s, unsigned kind, size_t path_len, uint64_t off, uint32_t len)
{
    num(s, off, 8);
    num(s, len, 4);
    num(s, path_len, 2);
    num(s, kind, 1);
    num(s, 0, 1);
}

static void about(struct ckpt_str *s, unsigned kind, const char *path, uint64_t off, uint32_t len)
{
    head(s, kind, strlen(path) + 1, off, len);
    ckpt_str_append(s, path, strlen(path) + 1);
}

static void look(struct ckpt_str *s, const char *path, uint64_t kind, uint64_t errnum,
                 uint64_t size)
{
    const uint64_t number[] = {errnum, kind, 11, size, 1, 2, 3};

    about(s, LOOK, path, 0, sizeof number + 1);
    for (size_t i = 0; i < sizeof number / sizeof *number; i++)
        num(s, number[i], 8);
    num(s, 0, 1); /* no ETag */
}

static void list(struct ckpt_str *s, const char *data, uint32_t len)
{
    start(s);
    about(s, LIST, ".", 0, len);
    ckpt_str_append(s, data, len);
}

static void bytes(struct ckpt_str *s, unsigned kind, const char *path, uint64_t off)
{
    about(s, kind, path, off, 4);
    ckpt_str_append(s, "text", 4);
}

static void path(struct ckpt_str *s, const char *p)
{
    start(s);
    bytes(s, BYTES, p, 0);
}

/* ---- the lies ---- */

static void sound(struct ckpt_str *s)
{
    start(s);
    look(s, "a", A_FILE, 0, 100);
    bytes(s, BYTES, "a", 0);
    bytes(s, BYTES, "a", 90);
    bytes(s, SAMPLE, "a", 50);
}
static void sound_empty(struct ckpt_str *s) { start(s); }
static void sound_list(struct ckpt_str *s)
{
    list(s,
         "\x81"
         "b\0"
         "\0c",
         6);
}
static void kind_unknown(struct ckpt_str *s)
{
    start(s);
    bytes(s, 4, "a", 0);
}
static void answer_twice(struct ckpt_str *s)
{
    start(s);
    for (int i = 0; i < 2; i++)
        look(s, "a", A_FILE, 0, 100);
}
static void order_of_paths(struct ckpt_str *s)
{
    start(s);
    look(s, "b", A_FILE, 0, 100);
    look(s, "a", A_FILE, 0, 100);
}
static void order_of_kinds(struct ckpt_str *s)
{
    start(s);
    bytes(s, BYTES, "a", 0);
    look(s, "a", A_FILE, 0, 100);
}
static void order_of_bytes(struct ckpt_str *s)
{
    start(s);
    bytes(s, BYTES, "a", 50);
    bytes(s, BYTES, "a", 0);
}
static void path_up(struct ckpt_str *s) { path(s, "a/../../etc"); }
static void path_absolute(struct ckpt_str *s) { path(s, "/etc/passwd"); }
static void path_empty(struct ckpt_str *s) { path(s, ""); }
static void path_slash_last(struct ckpt_str *s) { path(s, "a/"); }
static void path_long(struct ckpt_str *s)
{
    char p[5000] = "";

    memset(p, 'a', sizeof p - 1);
    path(s, p);
}
static void path_open(struct ckpt_str *s)
{
    start(s);
    head(s, BYTES, 2, 0, 0);
    num(s, 0x6161, 2); /* no NUL */
}
static void path_with_nul(struct ckpt_str *s)
{
    start(s);
    head(s, BYTES, 3, 0, 0);
    num(s, 0, 3);
}
static void path_none(struct ckpt_str *s)
{
    start(s);
    head(s, BYTES, 0, 0, 0);
}
static void path_beyond(struct ckpt_str *s)
{
    start(s);
    head(s, BYTES, 4096, 0, 0);
}
static void entry_kind(struct ckpt_str *s)
{
    start(s);
    look(s, "a", 3, 0, 100);
}
static void errno_unknown(struct ckpt_str *s)
{
    start(s);
    look(s, "a", A_FILE, 5, 100);
}
static void errno_huge(struct ckpt_str *s)
{
    start(s);
    look(s, "a", A_FILE, UINT64_C(1) << 32 | 2, 100);
}
static void size_huge(struct ckpt_str *s)
{
    start(s);
    look(s, "a", A_FILE, 0, UINT64_MAX);
}
static void look_short(struct ckpt_str *s)
{
    start(s);
    bytes(s, LOOK, "a", 0);
}
static void name_slash(struct ckpt_str *s) { list(s, "\0a/b", 5); }
static void name_up(struct ckpt_str *s) { list(s, "\1..", 4); }
static void name_empty(struct ckpt_str *s) { list(s, "\1", 2); }
static void name_kind(struct ckpt_str *s) { list(s, "\5a", 3); }
static void name_open(struct ckpt_str *s) { list(s, "\0a", 2); }
static void name_cut(struct ckpt_str *s) { list(s, "\0a\0\1", 4); }
static void data_long(struct ckpt_str *s)
{
    start(s);
    about(s, BYTES, "a", 0, UINT32_MAX);
}

static const struct lie {
    const char *name;
    void (*body)(struct ckpt_str *s);
    enum ckpt_code code;
    const char *needle;
} lies[] = {
    {"sound", sound, CKPT_OK, NULL},
    {"sound_empty", sound_empty, CKPT_OK, NULL},
    {"sound_list", sound_list, CKPT_OK, NULL},
    {"kind_unknown", kind_unknown, CKPT_FORMAT, "unknown kind"},
    {"answer_twice", answer_twice, CKPT_FORMAT, "twice, or out of order"},
    {"order_of_paths", order_of_paths, CKPT_FORMAT, "twice, or out of order"},
    {"order_of_kinds", order_of_kinds, CKPT_FORMAT, "twice, or out of order"},
    {"order_of_bytes", order_of_bytes, CKPT_FORMAT, "twice, or out of order"},
    {"path_up", path_up, CKPT_FORMAT, "malformed path"},
    {"path_absolute", path_absolute, CKPT_FORMAT, "malformed path"},
    {"path_empty", path_empty, CKPT_FORMAT, "malformed path"},
    {"path_slash_last", path_slash_last, CKPT_FORMAT, "malformed path"},
    {"path_long", path_long, CKPT_FORMAT, "malformed path"},
    {"path_open", path_open, CKPT_FORMAT, "malformed path"},
    {"path_with_nul", path_with_nul, CKPT_FORMAT, "malformed path"},
    {"path_none", path_none, CKPT_FORMAT, "malformed path"},
    {"path_beyond", path_beyond, CKPT_FORMAT, "more data was expected"},
    {"entry_kind", entry_kind, CKPT_FORMAT, "impossible entry"},
    {"errno_unknown", errno_unknown, CKPT_FORMAT, "impossible entry"},
    {"errno_huge", errno_huge, CKPT_FORMAT, "impossible entry"},
    {"size_huge", size_huge, CKPT_FORMAT, "impossible entry"},
    {"look_short", look_short, CKPT_FORMAT, "impossible entry"},
    {"name_slash", name_slash, CKPT_FORMAT, "malformed name"},
    {"name_up", name_up, CKPT_FORMAT, "malformed name"},
    {"name_empty", name_empty, CKPT_FORMAT, "malformed name"},
    {"name_kind", name_kind, CKPT_FORMAT, "malformed name"},
    {"name_open", name_open, CKPT_FORMAT, "malformed name"},
    {"name_cut", name_cut, CKPT_FORMAT, "malformed name"},
    {"data_long", data_long, CKPT_FORMAT, "more data was expected"},
};

static void wrap(struct ckpt_str *out, const struct ckpt_str *body, uint32_t version)
{
    ckpt_str_append(out, "ckptfsRC", 8);
    num(out, version, 8);
    num(out, XXH3_64bits(body->ptr, body->len), 8);
    ckpt_str_append(out, body->ptr, body->len);
}

static int decode(const char *data, size_t len, struct ckpt_err *err)
{
    struct ckpt_recording *rec = NULL;
    int rc = ckpt_recording_decode(data, len, 0, &rec, err);

    if (rc == 0)
        ckpt_recording_end(rec);
    ckpt_recording_unref(rec);
    return rc;
}

static void try_body(struct judge *j, const struct lie *lie)
{
    struct ckpt_str body = {0}, whole = {0};
    struct ckpt_err err = {0};
    const clock_t begin = clock();

    lie->body(&body);
    wrap(&whole, &body, 3);
    judge(j, lie->name, decode(whole.ptr, whole.len, &err), &err, lie->code, "recording",
          lie->needle, begin);
    ckpt_str_release(&body);
    ckpt_str_release(&whole);
}

/* A sound one that is cut, has another version, or a flipped bit. */
static void try_whole(struct judge *j)
{
    struct ckpt_str body = {0}, whole = {0}, later = {0};
    struct ckpt_err err = {0};

    sound(&body);
    wrap(&whole, &body, 3);
    wrap(&later, &body, 4);
    if (wanted(j, "version_4"))
        judge(j, "version_4", decode(later.ptr, later.len, &err), &err, CKPT_UNSUPPORTED,
              "recording", "version 4", clock());
    for (size_t i = 0; i < whole.len && wanted(j, "cut"); i++) {
        char *part = malloc(i + 1); /* so that a sanitizer sees a byte too far */
        memcpy(part, whole.ptr, i);
        err = (struct ckpt_err){0};
        judge(j, "cut", decode(part, i, &err), &err, CKPT_FORMAT, "recording", "", clock());
        free(part);
    }
    for (size_t i = 0; i < whole.len && wanted(j, "flip"); i++) {
        whole.ptr[i] ^= 1;
        err = (struct ckpt_err){0};
        judge(j, "flip", decode(whole.ptr, whole.len, &err), &err,
              i >= 8 && i < 16 ? CKPT_UNSUPPORTED : CKPT_FORMAT, "recording", "", clock());
        whole.ptr[i] ^= 1;
    }
    ckpt_str_release(&body);
    ckpt_str_release(&whole);
    ckpt_str_release(&later);
}

int main(int argc, char **argv)
{
    struct judge j = {.filter = argc > 1 ? argv[1] : NULL};

    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++)
        if (wanted(&j, lies[i].name))
            try_body(&j, &lies[i]);
    try_whole(&j);
    return verdict(&j);
}
