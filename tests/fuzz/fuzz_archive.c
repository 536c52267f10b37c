/* SPDX-License-Identifier: Apache-2.0 */
/* The input is an archive: every file of an accepted one lies within it, and every name of a list
 * can be looked up. The checksums of tar headers are made right first, which mutations break. */
#include "fuzz.h"

#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include "base/mem.h"
#include "container/archive.h"

enum { BLOCK = 512, CHECKSUM_AT = 148, DEEPEST = 8, MOST = 1 << 16 };

static char path[64];

static void remove_file(void) { (void)unlink(path); }

static void mend_checksums(unsigned char *bytes, size_t len)
{
    for (size_t at = 0; at + BLOCK <= len; at += BLOCK) {
        unsigned char *h = bytes + at;
        unsigned sum = 0;
        if (memcmp(h + 257, "ustar", 5) != 0)
            continue;
        memset(h + CHECKSUM_AT, ' ', 8);
        for (size_t i = 0; i < BLOCK; i++)
            sum += h[i];
        for (int i = 5; i >= 0; i--, sum >>= 3)
            h[CHECKSUM_AT + i] = (unsigned char)('0' + (sum & 7));
        h[CHECKSUM_AT + 6] = '\0';
    }
}

struct walk {
    struct ckpt_dir *dir;
    size_t archive_len;
    int depth;
};

static void read_folder(struct ckpt_dir *dir, size_t archive_len, int depth);

static int see(void *ctx, const struct ckpt_entry *e, struct ckpt_err *err)
{
    const struct walk *w = ctx;
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *below = NULL;
    ckpt_cleanup(ckpt_freep) char *text = NULL;
    struct ckpt_dir_found found;
    int fd;

    MUST(strcmp(e->name, "..") != 0 && !strchr(e->name, '/'));
    if (e->kind == CKPT_ENTRY_DIR && w->depth < DEEPEST) {
        MUST(ckpt_dir_open_below(w->dir, e->name, &below, err) == 0);
        if (!e->is_link)
            read_folder(below, w->archive_len, w->depth + 1);
    } else if (e->kind == CKPT_ENTRY_FILE) {
        size_t len;
        MUST(ckpt_dir_open_file(w->dir, e->name, &fd, &found, err) == 0);
        MUST(ckpt_range_ok(found.extent.off, found.extent.len, w->archive_len));
        (void)close(fd);
        MUST(ckpt_dir_read_file(w->dir, e->name, MOST, &text, &len, err) == 0 &&
             len == found.extent.len);
    }
    return 0;
}

static void read_folder(struct ckpt_dir *dir, size_t archive_len, int depth)
{
    struct walk w = {dir, archive_len, depth};
    struct ckpt_err err = {0};

    MUST(ckpt_dir_list(dir, see, &w, &err) == 0);
}

static void write_file(const unsigned char *bytes, size_t len)
{
    if (!*path) {
        (void)snprintf(path, sizeof path, "/tmp/ckptfs-fuzz-archive-%ld", (long)getpid());
        (void)atexit(remove_file);
    }
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    MUST(fd >= 0 && write(fd, bytes, len) == (ssize_t)len);
    (void)close(fd);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *dir = NULL;
    ckpt_cleanup(ckpt_freep) unsigned char *bytes = malloc(size + 1);
    struct ckpt_err err = {0};

    if (size > MOST)
        return 0;
    MUST(bytes);
    if (size)
        memcpy(bytes, data, size);
    mend_checksums(bytes, size);
    write_file(bytes, size);
    if (ckpt_archive_open(path, &(struct ckpt_access){0}, &dir, &err) < 0)
        check_err(&err);
    else
        read_folder(dir, size, 0);
    return 0;
}
