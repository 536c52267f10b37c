/* SPDX-License-Identifier: Apache-2.0 */
/* Which kind of archive a file is, by its first bytes; and the index of a zip archive. */
#include "container/archive.h"

#include <string.h>
#include <sys/stat.h>

#include "base/mem.h"
#include "base/str.h"
#include "container/tar.h"
#include "container/zip.h"
#include "io/archive_index.h"
#include "io/recording.h"
#include "io/source.h"

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
    return (len == CKPT_TAR_BLOCK && zeros == len) || (len >= 4 && memcmp(head, "PK\5\6", 4) == 0);
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
        return fail_file(NULL, 0, path, err);
    for (size_t i = 0; i < z.nentry; i++)
        if (add_zip_entry(&z, &z.entry[i], m, err) < 0)
            return ckpt_err_in(err, "'%s'", path);
    return 0;
}

/* ---- any ---- */

static int index_source(struct ckpt_source *s, const char *path, struct ckpt_archive_index *m,
                        struct ckpt_err *err)
{
    unsigned char head[CKPT_TAR_BLOCK] = {0};
    const size_t len = s->size < sizeof head ? (size_t)s->size : sizeof head;

    if (ckpt_source_pread(s, head, len, 0, err) < 0)
        return -1;
    const struct packed *p = packed_as(head, len);
    if (p)
        return fail_packed(p, path, err);
    const bool is_zip = len >= 4 && memcmp(head, "PK\3\4", 4) == 0;
    const bool is_tar = len == sizeof head && ckpt_tar_is_header(head);
    if (!is_zip && !is_tar)
        return fail_file(head, len, path, err);
    if (is_zip && index_zip(s, path, m, err) < 0)
        return -1;
    if (is_tar && ckpt_tar_index(s, m, err) < 0)
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

bool ckpt_archive_is_file(const char *path)
{
    struct stat st;

    return stat(path, &st) == 0 && S_ISREG(st.st_mode);
}

int ckpt_archive_open(const char *path, const struct ckpt_access *how, struct ckpt_dir **ret,
                      struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *dir = NULL;

    if (ckpt_archive_is_file(path))
        return ckpt_dir_open_archive(path, ckpt_archive_read_index, how->recording, ret, err);
    if ((ckpt_is_bucket(path) ? ckpt_dir_open_bucket(path, &how->bucket, how->recording, &dir, err)
                              : ckpt_dir_open(path, how->links, &dir, err)) < 0 ||
        ckpt_dir_use(dir, how->recording, err) < 0)
        return -1;
    *ret = ckpt_steal(&dir);
    return 0;
}
