/* SPDX-License-Identifier: Apache-2.0 */
/* What the pump has prepared before it reads, what of a list of items it moves, and how its threads
 * share that. The view is made up: it says what it is asked for. */
#include "test.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/err.h"
#include "common.h"
#include "out.h"
#include "tool/pump.h"

enum { MOST = 4096, BYTES = 1 << 20, PAGE = 4096 };
static const uint64_t AHEAD = 1 << 30; /* how far it looks, behind what is read next */

/* ---- a made-up view ---- */

struct request {
    const struct ckpt_node *file;
    uint64_t off, end;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct request prepared[MOST];
static size_t nprepared;
static _Atomic size_t nread;
static int answers[MOST]; /* of ckpt_view_prepare, one after the other; 2 behind the last */
static size_t nanswer;
static uint64_t already;

int ckpt_view_prepare(struct ckpt_view *view, const struct ckpt_node *file, uint64_t off,
                      uint64_t end)
{
    (void)view;
    (void)pthread_mutex_lock(&lock);
    const size_t n = nprepared++;
    if (n < MOST)
        prepared[n] = (struct request){file, off, end};
    (void)pthread_mutex_unlock(&lock);
    return n < nanswer ? answers[n] : 2;
}

/* The bytes [off, off + len) of an item: each page of it has another one. */
static void fill(const struct ckpt_item *item, char *buf, size_t len, uint64_t off)
{
    for (size_t i = 0, n; i < len; i += n) {
        n = PAGE - (off + i) % PAGE;
        n = n < len - i ? n : len - i;
        memset(buf + i, (int)((item->size + (off + i) / PAGE) & 0x7f), n);
    }
}

int ckpt_item_pread(struct ckpt_view *view, const struct ckpt_item *item, void *buf, size_t len,
                    uint64_t off, struct ckpt_err *err)
{
    (void)view;
    (void)err;
    nread++;
    fill(item, buf, len, off);
    return 0;
}

void ckpt_progress_begin(struct ckpt_progress *p, uint64_t done, uint64_t total, bool quiet)
{
    already = done;
    *p = (struct ckpt_progress){.already = done, .total = total, .shown = !quiet};
}

void ckpt_progress_draw(const struct ckpt_progress *p, uint64_t done, const char *name)
{
    (void)p;
    (void)done;
    (void)name;
}

void ckpt_progress_end(const struct ckpt_progress *p) { (void)p; }

json_t *ckptfs_json_text(const char *text) { return json_string(text); }

/* ---- runs ---- */

static const char files[8]; /* their addresses are the made-up nodes */

static const struct ckpt_node *node(size_t i) { return (const struct ckpt_node *)&files[i]; }

/* A file of these bytes, of which those before `start` are there. */
static struct ckpt_item file_of(size_t i, uint64_t start, uint64_t size)
{
    static char path[] = "file";
    return (struct ckpt_item){.path = path, .size = size, .start = start, .file = node(i)};
}

/* A list of these items, of which nothing was asked or moved yet. */
static struct ckpt_items begin(struct ckpt_item *item, size_t n)
{
    struct ckpt_items items = {.item = item, .n = n};

    for (size_t i = 0; i < n; i++)
        items.bytes += item[i].size;
    nprepared = nanswer = 0;
    nread = 0;
    return items;
}

/* Let one thread move the items. */
static void run(struct ckpt_item *item, size_t n, const int *answer, size_t nans)
{
    struct ckpt_items items = begin(item, n);
    const struct ckpt_pump pump = {.items = &items, .jobs = 1, .quiet = true};
    struct ckpt_err err = {0};

    nanswer = nans;
    for (size_t i = 0; i < nans; i++)
        answers[i] = answer[i];
    if (ckpt_pump_run(&pump, NULL, &err) < 0)
        fail_msg("%s", err.text);
}

static void check_request(size_t i, size_t file, uint64_t off, uint64_t end)
{
    assert_true(i < nprepared && i < MOST);
    assert_ptr_equal(prepared[i].file, node(file));
    assert_int_equal(prepared[i].off, off);
    assert_int_equal(prepared[i].end, end);
}

TEST(pump, what_is_prepared_is_not_asked_for_again)
{
    struct ckpt_item item[] = {file_of(0, 0, 3 * BYTES), file_of(1, 0, BYTES)};

    run(item, 2, NULL, 0);
    CHECK_EQ(nread, 4);
    CHECK_EQ(nprepared, 2);
    check_request(0, 0, 0, 3 * BYTES);
    check_request(1, 1, 0, BYTES);
}

TEST(pump, what_is_there_is_neither_read_nor_prepared)
{
    struct ckpt_item item[] = {file_of(0, BYTES, 3 * BYTES)};

    run(item, 1, NULL, 0);
    CHECK_EQ(nread, 2);
    CHECK_EQ(already, BYTES);
    CHECK_EQ(nprepared, 1);
    check_request(0, 0, BYTES, 3 * BYTES);
}

TEST(pump, one_part_is_made_between_two_reads_and_what_is_left_after_the_next)
{
    struct ckpt_item item[] = {file_of(0, 0, 3 * BYTES), file_of(1, 0, BYTES)};

    /* the first file has two parts to make, and the second one */
    run(item, 2, (const int[]){0, 0, 2, 0, 2}, 5);
    CHECK_EQ(nread, 4);
    CHECK_EQ(nprepared, 5);
    check_request(0, 0, 0, 3 * BYTES);
    check_request(1, 0, BYTES, 3 * BYTES); /* what lies behind the next read */
    check_request(2, 0, 2 * BYTES, 3 * BYTES);
    check_request(3, 1, 0, BYTES);
    check_request(4, 1, 0, BYTES);
}

TEST(pump, what_others_make_is_passed_over_and_looked_at_again)
{
    struct ckpt_item item[] = {file_of(0, 0, 2 * BYTES), file_of(1, 0, BYTES)};

    run(item, 2, (const int[]){1, 2, 2}, 3);
    CHECK_EQ(nprepared, 4);
    check_request(0, 0, 0, 2 * BYTES);
    check_request(1, 1, 0, BYTES);
    check_request(2, 0, BYTES, 2 * BYTES); /* the first was not whole, so the second is not known */
    check_request(3, 1, 0, BYTES);
}

TEST(pump, no_more_is_prepared_where_something_cannot_be)
{
    struct ckpt_item item[] = {file_of(0, 0, 3 * BYTES), file_of(1, 0, BYTES)};

    run(item, 2, (const int[]){-1}, 1);
    CHECK_EQ(nread, 4);
    CHECK_EQ(nprepared, 1);
}

TEST(pump, it_looks_so_far_ahead_and_no_farther)
{
    struct ckpt_item item[] = {file_of(0, AHEAD - 2 * BYTES, AHEAD), file_of(1, 0, AHEAD),
                               file_of(2, CKPT_PUMP_SKIP, 7), file_of(3, 0, BYTES)};

    /* of the second, little is read: the others have most of it */
    item[1].start = AHEAD - BYTES;
    item[1].size = AHEAD + BYTES / 2;
    run(item, 4, NULL, 0);
    CHECK_EQ(nread, 5);
    CHECK_EQ(already, AHEAD - 2 * BYTES + AHEAD - BYTES + 7);
    CHECK_EQ(nprepared, 3);
    check_request(0, 0, AHEAD - 2 * BYTES, AHEAD);
    check_request(1, 1, AHEAD - BYTES, AHEAD + BYTES / 2);
    check_request(2, 3, 0, BYTES);
    /* a large file is looked at to the end of what lies so near, then read by read */
    item[0] = file_of(0, 0, AHEAD + 2 * BYTES + 5);
    run(item, 1, NULL, 0);
    CHECK_EQ(nprepared, 4);
    check_request(0, 0, 0, AHEAD);
    check_request(1, 0, AHEAD, AHEAD + BYTES);
    check_request(2, 0, AHEAD + BYTES, AHEAD + 2 * BYTES);
    check_request(3, 0, AHEAD + 2 * BYTES, AHEAD + 2 * BYTES + 5);
}

TEST(pump, tensors_have_nothing_to_prepare_and_empty_files_are_passed)
{
    struct ckpt_item item[] = {file_of(0, 0, BYTES), file_of(1, 0, 0), file_of(2, 0, BYTES)};

    item[0].file = NULL;
    run(item, 3, NULL, 0);
    CHECK_EQ(nread, 2);
    CHECK_EQ(nprepared, 2);
    check_request(0, 1, 0, 0);
    check_request(1, 2, 0, BYTES);
}

/* ---- many threads ---- */

enum { JOBS = 4, SPARE = 2 /* of the pump */, MOST_MARKS = 64, PATIENCE_MS = 20000 };

static struct {
    size_t item;
    uint64_t off;
} marks[MOST_MARKS];
static size_t nmark;
static _Atomic size_t passed; /* chunks through the sink */

/* The first chunk waits until all other buffers have been filled and passed on. */
static int pass(void *ctx, size_t item, const void *buf, size_t len, uint64_t off, void *scratch,
                struct ckpt_err *err)
{
    const struct ckpt_item *items = ctx;

    fill(&items[item], scratch, len, off);
    if (memcmp(buf, scratch, len) != 0)
        return ckpt_fail(err, CKPT_IO, "other bytes");
    if (item == 0 && off == 0)
        for (unsigned ms = 0; passed < JOBS + SPARE - 1; ms++) {
            if (ms == PATIENCE_MS)
                return ckpt_fail(err, CKPT_IO, "after %zu chunks, nobody reads", (size_t)passed);
            ckpt_pause_ms(1);
        }
    passed++;
    return 0;
}

/* The first mark of an item takes some time, in which the next one could overtake it. */
static int note(void *ctx, size_t item, uint64_t off, struct ckpt_err *err)
{
    const struct ckpt_item *items = ctx;

    if (off < items[item].size)
        ckpt_pause_ms(30);
    (void)pthread_mutex_lock(&lock);
    if (nmark < MOST_MARKS) {
        marks[nmark].item = item;
        marks[nmark].off = off;
    }
    nmark++;
    (void)pthread_mutex_unlock(&lock);
    return items[item].path[0] == '!' ? ckpt_fail(err, CKPT_IO, "the disk is full") : 0;
}

static int run_many(struct ckpt_item *item, size_t n, bool hash, struct ckpt_err *err)
{
    struct ckpt_items items = begin(item, n);
    const struct ckpt_pump pump = {.items = &items,
                                   .jobs = JOBS,
                                   .quiet = true,
                                   .hash = hash,
                                   .ctx = item,
                                   .sink = pass,
                                   .mark = note};

    nmark = 0;
    passed = 0;
    return ckpt_pump_run(&pump, NULL, err);
}

TEST(pump, no_thread_waits_while_there_is_a_buffer)
{
    struct ckpt_item item[] = {file_of(0, 0, 20 * BYTES + 5), file_of(1, 0, 0),
                               file_of(2, 0, 2 * BYTES), file_of(3, 0, 77)};
    const size_t n = sizeof item / sizeof item[0];
    struct ckpt_err err = {0};

    for (int hash = 0; hash < 2; hash++) {
        if (run_many(item, n, hash, &err) < 0)
            fail_msg("%s", err.text);
        CHECK_EQ(nread, 24);
        CHECK_EQ(nmark, hash ? n : 0);
    }
    for (size_t i = 0; i < n; i++) { /* the hashes are those of the bytes in their order */
        char *bytes = malloc(item[i].size + 1);
        assert_non_null(bytes);
        fill(&item[i], bytes, item[i].size, 0);
        assert_true(XXH128_isEqual(item[i].hash, XXH3_128bits(bytes, item[i].size)));
        free(bytes);
    }
}

TEST(pump, marks_of_an_item_come_in_their_order)
{
    struct ckpt_item item[20];
    struct ckpt_err err = {0};

    for (size_t i = 0; i < 20; i++)
        item[i] = file_of(i % 8, i % 2 ? CKPT_PUMP_MARK - BYTES : 0,
                          i % 2 ? CKPT_PUMP_MARK + BYTES : 8 * BYTES);
    if (run_many(item, 20, true, &err) < 0)
        fail_msg("%s", err.text);
    CHECK_EQ(nmark, 30);
    for (size_t i = 0; i < nmark; i++)
        for (size_t j = i + 1; j < nmark; j++)
            assert_true(marks[i].item != marks[j].item || marks[i].off < marks[j].off);
}

TEST(pump, a_mark_that_fails_ends_it)
{
    struct ckpt_item item[] = {file_of(0, 0, 20 * BYTES), file_of(1, 0, BYTES),
                               file_of(2, 0, MOST * (uint64_t)BYTES)};
    static char full[] = "!";
    struct ckpt_err err = {0};

    item[1].path = full;
    CHECK_EQ(run_many(item, 3, true, &err), -1);
    assert_string_equal(err.text, "the disk is full");
    assert_true(nread < MOST);
}

TESTS(T(pump, what_is_prepared_is_not_asked_for_again),
      T(pump, what_is_there_is_neither_read_nor_prepared),
      T(pump, one_part_is_made_between_two_reads_and_what_is_left_after_the_next),
      T(pump, what_others_make_is_passed_over_and_looked_at_again),
      T(pump, no_more_is_prepared_where_something_cannot_be),
      T(pump, it_looks_so_far_ahead_and_no_farther),
      T(pump, tensors_have_nothing_to_prepare_and_empty_files_are_passed),
      T(pump, no_thread_waits_while_there_is_a_buffer),
      T(pump, marks_of_an_item_come_in_their_order), T(pump, a_mark_that_fails_ends_it))
