/* SPDX-License-Identifier: Apache-2.0 */
/* Lies in the recording of an opened checkpoint, which comes from another process. */
#include "defects.h"

#include <stdlib.h>
#include <xxhash.h>

#include "base/str.h"
#include "io/recording.h"

/* ---- recordings as io/recording_blob.c describes them ---- */

static void num(struct ckpt_str *s, uint64_t v, unsigned n)
{
    for (unsigned i = 0; i < n; i++)
        ckpt_str_putc(s, (char)(v >> 8 * i));
}

static void text(struct ckpt_str *s, const char *t)
{
    num(s, strlen(t) + 1, 2);
    ckpt_str_append(s, t, strlen(t) + 1);
}

/* What follows the hash, up to the entries. */
static void start(struct ckpt_str *s, uint32_t nroot, uint32_t nentry)
{
    num(s, 7, 8);
    num(s, 1000, 8);
    num(s, nroot, 4);
    for (uint32_t i = 0; i < nroot && i < 100; i++)
        num(s, 5, 8);
    num(s, nentry, 4);
}

static void entry(struct ckpt_str *s, unsigned root, unsigned flags, const char *path)
{
    num(s, root, 1);
    num(s, flags, 1);
    text(s, path);
}

enum { LOOK = 1, LIST = 4, A_FILE = 0, A_DIR = 1 };

static void look(struct ckpt_str *s, unsigned kind, unsigned errnum, uint64_t size)
{
    num(s, kind, 1);
    num(s, errnum, 2);
    num(s, 11, 8);
    num(s, size, 8);
    num(s, 1, 8);
    num(s, 2, 8);
}

static void chunk(struct ckpt_str *s, uint64_t off, uint32_t len)
{
    num(s, off, 8);
    num(s, len, 4);
    for (uint32_t i = 0; i < len && i < 64; i++)
        ckpt_str_putc(s, 'x');
}

/* An entry for a file of 100 bytes, whose chunks follow. */
static void file(struct ckpt_str *s, uint32_t nchunk)
{
    start(s, 1, 1);
    entry(s, 0, LOOK, "a");
    look(s, A_FILE, 0, 100);
    num(s, nchunk, 4);
}

static void list(struct ckpt_str *s, const char *name, unsigned kind)
{
    start(s, 1, 1);
    entry(s, 0, LIST, ".");
    num(s, 1, 4);
    num(s, kind, 1);
    text(s, name);
    num(s, 0, 4);
}

static void path(struct ckpt_str *s, const char *p)
{
    start(s, 1, 1);
    entry(s, 0, 0, p);
    num(s, 0, 4);
}

/* ---- the lies ---- */

static void sound(struct ckpt_str *s)
{
    file(s, 2);
    chunk(s, 0, 8);
    chunk(s, 90, 10);
}
static void sound_empty(struct ckpt_str *s) { start(s, 0, 0); }
static void sound_list(struct ckpt_str *s) { list(s, "b", A_DIR | 128); }
static void roots_many(struct ckpt_str *s) { start(s, 9, 0); }
static void roots_2_32(struct ckpt_str *s) { start(s, UINT32_MAX, 0); }
static void root_unknown(struct ckpt_str *s)
{
    start(s, 1, 1);
    entry(s, 1, 0, "a");
    num(s, 0, 4);
}
static void flag_unknown(struct ckpt_str *s)
{
    start(s, 1, 1);
    entry(s, 0, 16, "a");
    num(s, 0, 4);
}
static void entries_many(struct ckpt_str *s) { start(s, 1, UINT32_MAX); }
static void entries_few(struct ckpt_str *s)
{
    sound(s);
    num(s, 0, 4);
}
static void entry_twice(struct ckpt_str *s)
{
    start(s, 1, 2);
    for (int i = 0; i < 2; i++) {
        entry(s, 0, 0, "a");
        num(s, 0, 4);
    }
}
static void path_up(struct ckpt_str *s) { path(s, "a/../../etc"); }
static void path_absolute(struct ckpt_str *s) { path(s, "/etc/passwd"); }
static void path_empty(struct ckpt_str *s) { path(s, ""); }
static void path_slash_last(struct ckpt_str *s) { path(s, "a/"); }
static void path_open(struct ckpt_str *s)
{
    start(s, 1, 1);
    num(s, 0, 2);
    num(s, 2, 2);
    num(s, 0x6161, 2); /* no NUL */
    num(s, 0, 4);
}
static void path_with_nul(struct ckpt_str *s)
{
    start(s, 1, 1);
    num(s, 0, 2);
    num(s, 3, 2);
    num(s, 0, 3);
    num(s, 0, 4);
}
static void kind_unknown(struct ckpt_str *s)
{
    start(s, 1, 1);
    entry(s, 0, LOOK, "a");
    look(s, 3, 0, 100);
    num(s, 0, 4);
}
static void errno_unknown(struct ckpt_str *s)
{
    start(s, 1, 1);
    entry(s, 0, LOOK, "a");
    look(s, A_FILE, 5, 100);
    num(s, 0, 4);
}
static void size_huge(struct ckpt_str *s)
{
    start(s, 1, 1);
    entry(s, 0, LOOK, "a");
    look(s, A_FILE, 0, UINT64_MAX);
    num(s, 0, 4);
}
static void name_slash(struct ckpt_str *s) { list(s, "a/b", A_FILE); }
static void name_up(struct ckpt_str *s) { list(s, "..", A_DIR); }
static void name_empty(struct ckpt_str *s) { list(s, "", A_DIR); }
static void name_kind(struct ckpt_str *s) { list(s, "a", 5); }
static void names_many(struct ckpt_str *s)
{
    start(s, 1, 1);
    entry(s, 0, LIST, ".");
    num(s, UINT32_MAX, 4);
}
static void chunk_beyond(struct ckpt_str *s)
{
    file(s, 1);
    chunk(s, 95, 6);
}
static void chunk_wraps(struct ckpt_str *s)
{
    file(s, 1);
    chunk(s, UINT64_MAX - 1, 6);
}
static void chunk_empty(struct ckpt_str *s)
{
    file(s, 1);
    chunk(s, 5, 0);
    num(s, 0, 8);
}
static void chunk_long(struct ckpt_str *s)
{
    file(s, 1);
    chunk(s, 0, UINT32_MAX);
}
static void chunks_many(struct ckpt_str *s) { file(s, UINT32_MAX); }
static void chunks_overlap(struct ckpt_str *s)
{
    file(s, 2);
    chunk(s, 0, 8);
    chunk(s, 7, 8);
}
static void chunks_touch(struct ckpt_str *s)
{
    file(s, 2);
    chunk(s, 0, 8);
    chunk(s, 8, 8);
}
static void chunks_backwards(struct ckpt_str *s)
{
    file(s, 2);
    chunk(s, 50, 8);
    chunk(s, 0, 8);
}
static void chunk_of_directory(struct ckpt_str *s)
{
    start(s, 1, 1);
    entry(s, 0, LOOK, "a");
    look(s, A_DIR, 0, 100);
    num(s, 1, 4);
    chunk(s, 0, 8);
}
static void chunk_of_missing(struct ckpt_str *s)
{
    start(s, 1, 1);
    entry(s, 0, LOOK, "a");
    look(s, A_FILE, 2, 100);
    num(s, 1, 4);
    chunk(s, 0, 8);
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
    {"roots_many", roots_many, CKPT_FORMAT, "too many roots"},
    {"roots_2_32", roots_2_32, CKPT_FORMAT, "too many roots"},
    {"root_unknown", root_unknown, CKPT_FORMAT, "unknown root"},
    {"flag_unknown", flag_unknown, CKPT_FORMAT, "unknown root or flag"},
    {"entries_many", entries_many, CKPT_FORMAT, "more entries than bytes"},
    {"entries_few", entries_few, CKPT_FORMAT, "bytes after its end"},
    {"entry_twice", entry_twice, CKPT_FORMAT, "the same path twice"},
    {"path_up", path_up, CKPT_FORMAT, "malformed path"},
    {"path_absolute", path_absolute, CKPT_FORMAT, "malformed path"},
    {"path_empty", path_empty, CKPT_FORMAT, "more entries than bytes"},
    {"path_slash_last", path_slash_last, CKPT_FORMAT, "malformed path"},
    {"path_open", path_open, CKPT_FORMAT, "malformed path"},
    {"path_with_nul", path_with_nul, CKPT_FORMAT, "malformed path"},
    {"kind_unknown", kind_unknown, CKPT_FORMAT, "unknown kind"},
    {"errno_unknown", errno_unknown, CKPT_FORMAT, "unknown error number"},
    {"size_huge", size_huge, CKPT_FORMAT, "impossible size"},
    {"name_slash", name_slash, CKPT_FORMAT, "malformed name"},
    {"name_up", name_up, CKPT_FORMAT, "malformed name"},
    {"name_empty", name_empty, CKPT_FORMAT, "malformed name"},
    {"name_kind", name_kind, CKPT_FORMAT, "malformed name"},
    {"names_many", names_many, CKPT_FORMAT, "more names than bytes"},
    {"chunk_beyond", chunk_beyond, CKPT_FORMAT, "beyond the end"},
    {"chunk_wraps", chunk_wraps, CKPT_FORMAT, "beyond the end"},
    {"chunk_empty", chunk_empty, CKPT_FORMAT, "beyond the end"},
    {"chunk_long", chunk_long, CKPT_FORMAT, "more data was expected"},
    {"chunks_many", chunks_many, CKPT_FORMAT, "what is no file"},
    {"chunks_overlap", chunks_overlap, CKPT_FORMAT, "out of order"},
    {"chunks_touch", chunks_touch, CKPT_FORMAT, "out of order"},
    {"chunks_backwards", chunks_backwards, CKPT_FORMAT, "out of order"},
    {"chunk_of_directory", chunk_of_directory, CKPT_FORMAT, "what is no file"},
    {"chunk_of_missing", chunk_of_missing, CKPT_FORMAT, "what is no file"},
};

static void wrap(struct ckpt_str *out, const struct ckpt_str *body, uint32_t version)
{
    ckpt_str_append(out, "ckptfsRC", 8);
    num(out, version, 4);
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
    wrap(&whole, &body, 1);
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
    wrap(&whole, &body, 1);
    wrap(&later, &body, 2);
    if (wanted(j, "version_2"))
        judge(j, "version_2", decode(later.ptr, later.len, &err), &err, CKPT_UNSUPPORTED,
              "recording", "version 2", clock());
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
              i >= 8 && i < 12 ? CKPT_UNSUPPORTED : CKPT_FORMAT, "recording", "", clock());
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
