/* SPDX-License-Identifier: Apache-2.0 */
/* Fuzzing a reader with a whole checkpoint: the input is a list of files; what loads is read back
 * to the last byte.
 *
 *     file = name '\n'  kind (u8)  length (u16, little-endian)  bytes
 *
 * kind 1 stands for a directory, 2 for a FIFO, 3 for a symbolic link (the bytes are its target),
 * and all others for a file; 4 for one whose bytes are only the JSON of a safetensors header, which
 * gets its length and as many bytes of data as the offsets ask for. */
#ifndef CKPT_TESTS_FUZZ_FUZZ_READER_H
#define CKPT_TESTS_FUZZ_FUZZ_READER_H

#include "fuzz.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/par.h"
#include "format/reader.h"

enum { MOST_FILES = 64, MOST_DATA = 1 << 16 };

static char root[64];
static const char *fuzz_step; /* the checkpoint's folder, in that of its run; NULL: it is alone */
static bool fuzz_far;         /* read it a second time, as if it were on storage at a distance */

static int remove_one(const char *path, const struct stat *st, int kind, struct FTW *ftw)
{
    (void)st;
    (void)kind;
    (void)ftw;
    (void)remove(path);
    return 0;
}

static void remove_root(void) { (void)nftw(root, remove_one, 16, FTW_DEPTH | FTW_PHYS); }

/* The harness itself must not leave its directory. */
static bool name_is_safe(const char *name)
{
    return *name && *name != '/' && strlen(name) < 512 && !strstr(name, "..");
}

static void make_parents(int dir, char *name)
{
    for (char *slash = strchr(name, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        (void)mkdirat(dir, name, 0700);
        *slash = '/';
    }
}

/* The largest number in the header, kept small: how long the data should be. */
static size_t data_len(const uint8_t *json, size_t len)
{
    size_t most = 0, number = 0;

    for (size_t i = 0; i < len; i++) {
        bool digit = json[i] >= '0' && json[i] <= '9';
        if (digit)
            number = number * 10 + (size_t)(json[i] - '0');
        if (number > MOST_DATA || !digit)
            number = 0;
        /* only what stands before a closing bracket: the end of a pair of offsets */
        if (digit && i + 1 < len && json[i + 1] == ']' && number > most)
            most = number;
    }
    return most;
}

static void write_all(int fd, const void *buf, size_t len)
{
    if (len)
        (void)!write(fd, buf, len);
}

static void make_file(int dir, const char *name, uint8_t kind, const uint8_t *bytes, size_t len)
{
    static uint8_t data[MOST_DATA];
    int fd = openat(dir, name, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_NONBLOCK, 0600);

    if (fd < 0)
        return;
    if (kind == 4) {
        uint8_t length[8] = {(uint8_t)len, (uint8_t)(len >> 8)};
        write_all(fd, length, sizeof length);
    }
    write_all(fd, bytes, len);
    if (kind == 4) {
        for (size_t i = 0; i < sizeof data; i++)
            data[i] = (uint8_t)(i * 13 + (i >> 8));
        write_all(fd, data, data_len(bytes, len));
    }
    (void)close(fd);
}

static void make_entry(int dir, struct input *in)
{
    char *name = input_text(in, '\n');
    uint8_t kind = input_u8(in);
    size_t len = input_u16(in);
    const uint8_t *bytes = input_take(in, len, &len);

    if (name_is_safe(name)) {
        make_parents(dir, name);
        if (kind == 1)
            (void)mkdirat(dir, name, 0700);
        else if (kind == 2)
            (void)mkfifoat(dir, name, 0600);
        else if (kind == 3) {
            char *target = malloc(len + 1);
            MUST(target);
            if (len)
                memcpy(target, bytes, len);
            target[len] = '\0';
            (void)!symlinkat(target, dir, name);
            free(target);
        } else
            make_file(dir, name, kind, bytes, len);
    }
    free(name);
}

static void read_objects(const struct ckpt_reader *r, struct ckpt_dir *dir,
                         const struct ckpt_reader_options *opt)
{
    struct ckpt_err err = {0};
    json_t *out = json_object();

    MUST(out);
    if (r->objects && r->objects(dir, opt, out, &err) < 0)
        check_err(&err);
    json_decref(out);
}

static void load_and_read(const struct ckpt_reader *r, enum ckpt_far_rule rule)
{
    const struct ckpt_far_options far = {.rule = rule};
    struct ckpt_reader_options opt = {.states = true, .raw = true};
    struct ckpt_catalog *cat = NULL;
    struct ckpt_dir *dir = NULL;
    struct ckpt_err err = {0};

    if (fuzz_step) { /* which may have become a file */
        char path[128];
        (void)snprintf(path, sizeof path, "%s/%s", root, fuzz_step);
        (void)mkdir(path, 0700);
    }
    MUST(ckpt_fdpool_new(4, &opt.pool, &err) == 0);
    MUST(ckpt_dir_open(root, CKPT_LINKS_BENEATH, &dir, &err) == 0);
    ckpt_dir_set_far(dir, &far);
    if (fuzz_step) {
        opt.above = dir;
        if (ckpt_dir_open_below(opt.above, fuzz_step, &dir, &err) < 0) {
            ckpt_dir_unref(opt.above);
            ckpt_fdpool_unref(opt.pool);
            return;
        }
    }
    (void)r->probe(dir);
    if (r->finished)
        (void)r->finished(dir, "1", NULL);
    if (r->latest)
        free(r->latest(dir));
    read_objects(r, dir, &opt);
    for (int partial = 0; partial < 2; partial++) {
        err.code = CKPT_OK;
        opt.allow_partial = opt.masters = partial;
        opt.raw = !partial;
        struct ckpt_facts facts = {0};
        MUST(ckpt_catalog_new(&cat, &err) == 0);
        if (r->load(dir, &opt, &facts, cat, &err) == 0)
            read_back_all(cat);
        else
            check_err(&err);
        ckpt_catalog_free(cat);
        ckpt_facts_release(&facts);
    }
    ckpt_dir_unref(dir);
    ckpt_dir_unref(opt.above);
    ckpt_fdpool_unref(opt.pool);
}

static int fuzz_reader(const struct ckpt_reader *r, const uint8_t *data, size_t size)
{
    struct input in = {data, size};

    if (!*root) {
        const char *tmp = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
        (void)snprintf(root, sizeof root, "%s/ckptfs-fuzz-%d", tmp, (int)getpid());
        (void)atexit(remove_root);
        ckpt_parallel_default(1);
    }
    remove_root();
    MUST(mkdir(root, 0700) == 0);
    int dir = open(root, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    MUST(dir >= 0);
    for (int i = 0; i < MOST_FILES && in.left; i++)
        make_entry(dir, &in);
    (void)close(dir);
    load_and_read(r, CKPT_FAR_NEVER);
    if (fuzz_far) {
        const bool near = reads_may_fail;
        reads_may_fail = true;
        load_and_read(r, CKPT_FAR_ALWAYS);
        reads_may_fail = near;
    }
    return 0;
}

#endif
