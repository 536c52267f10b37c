/* SPDX-License-Identifier: Apache-2.0 */
/* Recordings of what was read while a checkpoint was opened, and their replay elsewhere. */
#include "test.h"

#include <stdlib.h>
#include <time.h>

#include "io/dir.h"
#include "io/dir_archive.h"
#include "io/recording.h"
#include "io/source.h"
#include "tree.h"

enum { HERE = 1, THERE = 2, SIZE = 4096, HEADER = 100 };

static void tree_data(const struct tree *t, const char *name, size_t len)
{
    unsigned char data[SIZE];

    for (size_t i = 0; i < len; i++)
        data[i] = tree_byte(i);
    tree_put(t, name, data, len);
}

/* A tree, and its directory opened with a recording. */
struct side {
    struct tree t;
    struct ckpt_dir *dir;
    struct ckpt_fdpool *pool;
    struct ckpt_recording *rec;
};

static void use(struct side *s, struct ckpt_recording *rec)
{
    struct ckpt_err err = {0};

    TREE_MUST(ckpt_dir_open(s->t.path, CKPT_LINKS_BENEATH, &s->dir, &err) == 0);
    TREE_MUST(ckpt_fdpool_new(0, &s->pool, &err) == 0);
    s->rec = rec;
    TREE_MUST(ckpt_dir_use(s->dir, rec, &err) == 0);
}

static void side_close(struct side *s)
{
    ckpt_fdpool_unref(s->pool);
    ckpt_dir_unref(s->dir);
    ckpt_recording_unref(s->rec);
    tree_close(&s->t);
}

static void begin_recording(struct side *s, uint64_t most)
{
    struct ckpt_recording *rec = NULL;
    struct ckpt_err err = {0};

    tree_open(&s->t);
    tree_data(&s->t, "step/a", SIZE);
    tree_data(&s->t, "step/b", SIZE);
    tree_text(&s->t, "step/config", "words");
    TREE_MUST(ckpt_recording_new(HERE, most, &rec, &err) == 0);
    use(s, rec);
}

static struct ckpt_source *open_source(struct side *s, const char *name)
{
    struct ckpt_source *source = NULL;
    struct ckpt_err err = {0};

    if (ckpt_source_file_new(s->dir, name, s->pool, &source, &err) < 0)
        fail_msg("%s", err.text);
    return source;
}

static void read_some(struct ckpt_source *s, size_t len, uint64_t off)
{
    unsigned char buf[SIZE];
    struct ckpt_err err = {0};

    if (ckpt_source_pread(s, buf, len, off, &err) < 0)
        fail_msg("%s", err.text);
    for (size_t i = 0; i < len; i++)
        if (buf[i] != tree_byte(off + i))
            fail_msg("byte %zu", i);
}

static int count(void *ctx, const struct ckpt_entry *e, struct ckpt_err *err)
{
    (void)e;
    (void)err;
    ++*(int *)ctx;
    return 0;
}

/* What opening a checkpoint does: look, list, read a file and headers. */
static void open_checkpoint(struct side *s, struct ckpt_source **ret_a, struct ckpt_source **ret_b)
{
    struct ckpt_dir *step;
    struct ckpt_err err = {0};
    char *text;
    size_t len;
    int n = 0;

    TREE_MUST(!ckpt_dir_has_file(s->dir, "none"));
    TREE_MUST(ckpt_dir_open_below(s->dir, "step", &step, &err) == 0);
    TREE_MUST(ckpt_dir_list(step, count, &n, &err) == 0 && n == 3);
    TREE_MUST(ckpt_dir_read_file(step, "config", 10, &text, &len, &err) == 0);
    TREE_MUST(len == 5 && strcmp(text, "words") == 0);
    free(text);
    *ret_a = open_source(s, "step/a");
    *ret_b = open_source(s, "step/b");
    read_some(*ret_a, 8, 0);
    read_some(*ret_a, HEADER - 8, 8);
    read_some(*ret_b, HEADER, 0);
    ckpt_dir_unref(step);
}

static void record(struct side *s, struct ckpt_str *blob)
{
    struct ckpt_source *a, *b;
    struct ckpt_err err = {0};

    open_checkpoint(s, &a, &b);
    ckpt_recording_sample(s->rec);
    read_some(b, 16, 2000);
    if (ckpt_recording_encode(s->rec, blob, &err) < 0)
        fail_msg("%s", err.text);
    ckpt_recording_end(s->rec);
    ckpt_source_unref(a);
    ckpt_source_unref(b);
}

static void begin_replay(struct side *s, const struct ckpt_str *blob, uint64_t machine)
{
    struct ckpt_recording *rec = NULL;
    struct ckpt_err err = {0};

    tree_open(&s->t);
    if (ckpt_recording_decode(blob->ptr, blob->len, machine, &rec, &err) < 0)
        fail_msg("%s", err.text);
    use(s, rec);
}

/* Another node's tree: the same bytes, older than the recording. */
static void copy_files(struct side *s)
{
    const struct timespec old[2] = {{1000, 0}, {1000, 0}};
    static const char *const names[] = {"step/a", "step/b"};

    for (size_t i = 0; i < 2; i++) {
        tree_data(&s->t, names[i], SIZE);
        TREE_MUST(utimensat(s->t.fd, names[i], old, 0) == 0);
    }
}

static void change_byte(struct side *s, const char *name, off_t off)
{
    const struct timespec old[2] = {{1000, 0}, {1000, 0}};
    int fd = openat(s->t.fd, name, O_WRONLY);

    TREE_MUST(fd >= 0 && pwrite(fd, "x", 1, off) == 1 && close(fd) == 0);
    TREE_MUST(utimensat(s->t.fd, name, old, 0) == 0);
}

struct pair {
    struct side here, there;
    struct ckpt_str blob;
    struct ckpt_source *a, *b; /* there */
};

/* A recording, and its replay in an empty directory; then the files appear there. */
static void pair_open(struct pair *p)
{
    *p = (struct pair){0};
    begin_recording(&p->here, CKPT_RECORDING_MOST);
    record(&p->here, &p->blob);
    begin_replay(&p->there, &p->blob, THERE);
    open_checkpoint(&p->there, &p->a, &p->b);
    ckpt_recording_end(p->there.rec);
    ckpt_str_release(&p->blob);
    copy_files(&p->there);
}

static void pair_close(struct pair *p)
{
    ckpt_source_unref(p->a);
    ckpt_source_unref(p->b);
    side_close(&p->here);
    side_close(&p->there);
}

TEST(recording, a_replay_needs_no_files)
{
    struct ckpt_str blob = {0};
    struct side here = {0}, there = {0};
    struct ckpt_source *a, *b;
    struct ckpt_err err = {0};

    begin_recording(&here, CKPT_RECORDING_MOST);
    record(&here, &blob);
    begin_replay(&there, &blob, THERE);
    open_checkpoint(&there, &a, &b);
    CHECK_EQ(a->size, SIZE);
    CHECK_OK(ckpt_source_check(a, &err));
    CHECK_EQ(ckpt_fdpool_open_count(there.pool), 0);
    ckpt_recording_end(there.rec);
    CHECK(!ckpt_dir_has_dir(there.dir, "step"));
    ckpt_source_unref(a);
    ckpt_source_unref(b);
    side_close(&here);
    side_close(&there);
    ckpt_str_release(&blob);
}

TEST(recording, what_was_not_recorded_is_read_from_the_file)
{
    struct pair p;
    struct ckpt_err err = {0};

    pair_open(&p);
    read_some(p.a, 500, 3000);
    CHECK_OK(ckpt_source_check(p.a, &err));
    CHECK(ckpt_fdpool_open_count(p.there.pool) == 1);
    pair_close(&p);
}

TEST(recording, bytes_beyond_the_limit_are_left_to_the_files)
{
    struct ckpt_str blob = {0};
    struct side here = {0}, there = {0};
    struct ckpt_source *a;

    begin_recording(&here, HEADER / 2);
    record(&here, &blob);
    begin_replay(&there, &blob, THERE);
    copy_files(&there);
    a = open_source(&there, "step/a");
    read_some(a, 8, 0); /* recorded */
    CHECK_EQ(ckpt_fdpool_open_count(there.pool), 0);
    read_some(a, HEADER, 0);
    CHECK_EQ(ckpt_fdpool_open_count(there.pool), 1);
    ckpt_source_unref(a);
    side_close(&here);
    side_close(&there);
    ckpt_str_release(&blob);
}

TEST(recording, a_file_of_another_size_is_another_checkpoint)
{
    struct ckpt_err err = {0};
    char buf[8];
    struct pair p;

    pair_open(&p);
    tree_data(&p.there.t, "step/a", SIZE - 1);
    TREE_MUST(utimensat(p.there.t.fd, "step/a", (struct timespec[2]){{1000, 0}, {1000, 0}}, 0) ==
              0);
    CHECK_FAILS(ckpt_source_pread(p.a, buf, 8, 0, &err), CKPT_CONFLICT, "has 4095 bytes here");
    pair_close(&p);
}

TEST(recording, a_copy_with_another_header_is_another_checkpoint)
{
    struct ckpt_err err = {0};
    char buf[8];
    struct pair p;

    pair_open(&p);
    change_byte(&p.there, "step/a", HEADER - 1);
    CHECK_FAILS(ckpt_source_pread(p.a, buf, 8, 3000, &err), CKPT_CONFLICT, "has other bytes");
    pair_close(&p);
}

TEST(recording, one_copy_makes_all_samples_be_compared)
{
    struct ckpt_err err = {0};
    char buf[8];
    struct pair p;

    pair_open(&p);
    change_byte(&p.there, "step/b", 2007);
    for (int i = 0; i < 2; i++)
        CHECK_FAILS(ckpt_source_pread(p.a, buf, 8, 3000, &err), CKPT_CONFLICT,
                    "step/b' has other bytes than where rank 0 opened it (16 bytes from byte 2000");
    pair_close(&p);
}

TEST(recording, a_file_written_after_the_recording_is_stale)
{
    struct ckpt_err err = {0};
    char buf[8];
    struct pair p;

    pair_open(&p);
    /* not "now": the clock of files runs up to a tick behind the one of the recording */
    const struct timespec later = {.tv_sec = time(NULL) + 10};
    TREE_MUST(utimensat(p.there.t.fd, "step/a", (struct timespec[2]){later, later}, 0) == 0);
    CHECK_FAILS(ckpt_source_pread(p.a, buf, 8, 3000, &err), CKPT_STALE, "changed since");
    pair_close(&p);
}

TEST(recording, the_same_directory_has_no_copies)
{
    struct ckpt_err err = {0};
    struct ckpt_str blob = {0};
    struct side here = {0};
    struct ckpt_source *a;
    char buf[8];

    begin_recording(&here, CKPT_RECORDING_MOST);
    record(&here, &blob);
    ckpt_fdpool_unref(here.pool);
    ckpt_dir_unref(here.dir);
    ckpt_recording_unref(here.rec);
    struct ckpt_recording *rec;
    CHECK_OK(ckpt_recording_decode(blob.ptr, blob.len, HERE, &rec, &err));
    use(&here, rec);
    a = open_source(&here, "step/a");
    ckpt_recording_end(rec);
    copy_files(&here); /* equal bytes, other times */
    CHECK_FAILS(ckpt_source_pread(a, buf, 8, 3000, &err), CKPT_STALE, "changed since");
    ckpt_source_unref(a);
    side_close(&here);
    ckpt_str_release(&blob);
}

TEST(recording, a_file_that_changes_meanwhile_is_left_out)
{
    struct ckpt_str blob = {0};
    struct side here = {0}, there = {0};
    begin_recording(&here, CKPT_RECORDING_MOST);
    CHECK(ckpt_dir_has_file(here.dir, "step/a"));
    change_byte(&here, "step/a", 5);
    CHECK(ckpt_dir_has_file(here.dir, "step/a"));
    CHECK(ckpt_dir_has_file(here.dir, "step/b"));
    struct ckpt_err err = {0};
    CHECK_OK(ckpt_recording_encode(here.rec, &blob, &err));
    begin_replay(&there, &blob, THERE);
    CHECK(!ckpt_dir_has_file(there.dir, "step/a"));
    CHECK(ckpt_dir_has_file(there.dir, "step/b"));
    side_close(&here);
    side_close(&there);
    ckpt_str_release(&blob);
}

static int see_kind(void *ctx, const struct ckpt_entry *e, struct ckpt_err *err)
{
    (void)err;
    if (strcmp(e->name, "link") == 0 && e->is_link)
        *(enum ckpt_entry_kind *)ctx = e->kind;
    return 0;
}

TEST(recording, a_link_in_a_listing_is_what_it_was)
{
    enum ckpt_entry_kind kind = CKPT_ENTRY_UNKNOWN;
    struct ckpt_str blob = {0};
    struct side here = {0}, there = {0};
    struct ckpt_err err = {0};

    begin_recording(&here, CKPT_RECORDING_MOST);
    TREE_MUST(symlinkat("step/a", here.t.fd, "link") == 0);
    CHECK_OK(ckpt_dir_list(here.dir, see_kind, &kind, &err));
    CHECK_OK(ckpt_recording_encode(here.rec, &blob, &err));
    begin_replay(&there, &blob, THERE);
    kind = CKPT_ENTRY_UNKNOWN;
    CHECK_OK(ckpt_dir_list(there.dir, see_kind, &kind, &err));
    CHECK(kind == CKPT_ENTRY_FILE);
    side_close(&here);
    side_close(&there);
    ckpt_str_release(&blob);
}

TEST(recording, a_copy_is_known_as_the_file_that_was_recorded)
{
    struct ckpt_file_id then, now;
    struct ckpt_err err = {0};
    struct pair p;

    pair_open(&p);
    CHECK(ckpt_source_file_id(p.a, &then));
    read_some(p.a, 500, 3000);
    CHECK(ckpt_dir_stat(p.there.dir, "step/a", &now) && ckpt_file_id_eq(&then, &now));
    CHECK_OK(ckpt_source_file_verify(p.a, true, &err));
    TREE_MUST(fchmodat(p.there.t.fd, "step/a", 0600, 0) == 0);
    CHECK_FAILS(ckpt_source_check(p.a, &err), CKPT_STALE, "changed since");
    pair_close(&p);
}

TEST(recording, a_copy_that_is_replaced_is_stale)
{
    const struct timespec older[2] = {{900, 0}, {900, 0}};
    struct ckpt_err err = {0};
    struct pair p;

    pair_open(&p);
    read_some(p.a, 500, 3000);
    TREE_MUST(utimensat(p.there.t.fd, "step/a", older, 0) == 0);
    CHECK_FAILS(ckpt_source_file_verify(p.a, true, &err), CKPT_STALE, "changed since");
    pair_close(&p);
}

/* ---- archives: files are ranges of one ---- */

enum { INDEX = 64, MEMBER_A = 128, MEMBER_B = 2500 };

/* An index that says where two files of HEADER bytes and more are, whatever its bytes say. */
static int read_index(struct ckpt_dir *folder, const char *name,
                      struct ckpt_archive_index **ret_index, struct ckpt_file_id *ret_id,
                      struct ckpt_err *err)
{
    const struct ckpt_member a = {.kind = CKPT_ENTRY_FILE, .off = MEMBER_A, .len = 2000};
    const struct ckpt_member b = {.kind = CKPT_ENTRY_FILE, .off = MEMBER_B, .len = 1000};
    struct ckpt_source *s = NULL;
    struct ckpt_fdpool *pool;
    char index[INDEX];

    TREE_MUST(ckpt_fdpool_new(1, &pool, err) == 0);
    int rc = ckpt_source_file_new(folder, name, pool, &s, err);
    if (rc == 0)
        rc = ckpt_source_pread(s, index, sizeof index, 0, err);
    if (rc == 0) {
        TREE_MUST(ckpt_source_file_id(s, ret_id));
        TREE_MUST(ckpt_archive_index_new(ret_index, err) == 0);
        TREE_MUST(ckpt_archive_index_add(*ret_index, "step/a", 6, &a, err) == 0);
        TREE_MUST(ckpt_archive_index_add(*ret_index, "step/b", 6, &b, err) == 0);
        TREE_MUST(ckpt_archive_index_seal(*ret_index, err) == 0);
    }
    ckpt_source_unref(s);
    ckpt_fdpool_unref(pool);
    return rc;
}

static void use_archive(struct side *s, struct ckpt_recording *rec)
{
    struct ckpt_err err = {0};
    char path[5000];

    (void)snprintf(path, sizeof path, "%s/archive", s->t.path);
    if (ckpt_dir_open_archive(path, read_index, &(struct ckpt_far_options){0}, rec, &s->dir, &err) <
        0)
        fail_msg("%s", err.text);
    TREE_MUST(ckpt_fdpool_new(0, &s->pool, &err) == 0);
    s->rec = rec;
}

static void copy_archive(struct side *s)
{
    const struct timespec old[2] = {{1000, 0}, {1000, 0}};

    tree_data(&s->t, "archive", SIZE);
    TREE_MUST(utimensat(s->t.fd, "archive", old, 0) == 0);
}

static void open_members(struct side *s, struct ckpt_source **ret_a, struct ckpt_source **ret_b)
{
    char head[8];

    TREE_MUST(!ckpt_dir_has_file(s->dir, "step/c"));
    TREE_MUST(ckpt_dir_read_head(s->dir, "step/b", head, sizeof head) == sizeof head);
    TREE_MUST((unsigned char)head[1] == tree_byte(MEMBER_B + 1));
    *ret_a = open_source(s, "step/a");
    *ret_b = open_source(s, "step/b");
}

static void read_member(struct ckpt_source *s, uint64_t base, size_t len, uint64_t off)
{
    unsigned char buf[SIZE];
    struct ckpt_err err = {0};

    TREE_MUST(ckpt_source_pread(s, buf, len, off, &err) == 0);
    for (size_t i = 0; i < len; i++)
        TREE_MUST(buf[i] == tree_byte(base + off + i));
}

/* A recording of an archive, and its replay where there is none; then a copy appears there. */
static void archives_open(struct pair *p)
{
    struct ckpt_recording *rec = NULL;
    struct ckpt_source *a, *b;
    struct ckpt_err err = {0};

    *p = (struct pair){0};
    tree_open(&p->here.t);
    tree_data(&p->here.t, "archive", SIZE);
    TREE_MUST(ckpt_recording_new(HERE, CKPT_RECORDING_MOST, &rec, &err) == 0);
    use_archive(&p->here, rec);
    open_members(&p->here, &a, &b);
    read_member(a, MEMBER_A, HEADER, 0);
    TREE_MUST(ckpt_recording_encode(rec, &p->blob, &err) == 0);
    ckpt_recording_end(rec);
    ckpt_source_unref(a);
    ckpt_source_unref(b);
    tree_open(&p->there.t);
    TREE_MUST(ckpt_recording_decode(p->blob.ptr, p->blob.len, THERE, &rec, &err) == 0);
    use_archive(&p->there, rec);
    open_members(&p->there, &p->a, &p->b);
    read_member(p->a, MEMBER_A, HEADER, 0);
    TREE_MUST(ckpt_fdpool_open_count(p->there.pool) == 0);
    ckpt_recording_end(rec);
    ckpt_str_release(&p->blob);
    copy_archive(&p->there);
}

TEST(recording, an_archive_is_opened_without_it)
{
    struct ckpt_err err = {0};
    struct pair p;

    archives_open(&p);
    read_member(p.a, MEMBER_A, 500, 1500);
    read_member(p.b, MEMBER_B, 1000, 0);
    CHECK_OK(ckpt_source_check(p.a, &err));
    CHECK(ckpt_dir_has_dir(p.there.dir, "step"));
    pair_close(&p);
}

TEST(recording, an_archive_with_another_index_is_another_checkpoint)
{
    struct ckpt_err err = {0};
    char buf[8];
    struct pair p;

    archives_open(&p);
    change_byte(&p.there, "archive", INDEX - 1);
    CHECK_FAILS(ckpt_source_pread(p.b, buf, 8, 500, &err), CKPT_CONFLICT, "has other bytes");
    pair_close(&p);
}

TESTS(T(recording, an_archive_is_opened_without_it),
      T(recording, an_archive_with_another_index_is_another_checkpoint),
      T(recording, a_replay_needs_no_files),
      T(recording, what_was_not_recorded_is_read_from_the_file),
      T(recording, bytes_beyond_the_limit_are_left_to_the_files),
      T(recording, a_file_of_another_size_is_another_checkpoint),
      T(recording, a_copy_with_another_header_is_another_checkpoint),
      T(recording, one_copy_makes_all_samples_be_compared),
      T(recording, a_file_written_after_the_recording_is_stale),
      T(recording, the_same_directory_has_no_copies),
      T(recording, a_link_in_a_listing_is_what_it_was),
      T(recording, a_copy_is_known_as_the_file_that_was_recorded),
      T(recording, a_copy_that_is_replaced_is_stale),
      T(recording, a_file_that_changes_meanwhile_is_left_out))
