/* SPDX-License-Identifier: Apache-2.0 */
/* What the pump has prepared before it reads, and what of a list of items it moves. The view is
 * made up: it says what it is asked for. */
#include "test.h"

#include <stdlib.h>

#include "base/err.h"
#include "common.h"
#include "out.h"
#include "tool/pump.h"

enum { MOST = 4096, BYTES = 1 << 20 };
static const uint64_t AHEAD = 1 << 30; /* how far it looks, behind what is read next */

/* ---- a made-up view ---- */

struct request {
    const struct ckpt_node *file;
    uint64_t off, end;
};

static struct request prepared[MOST];
static size_t nprepared, nread;
static int answers[MOST]; /* of ckpt_view_prepare, one after the other; 2 behind the last */
static size_t nanswer;
static uint64_t already;

int ckpt_view_prepare(struct ckpt_view *view, const struct ckpt_node *file, uint64_t off,
                      uint64_t end)
{
    const size_t n = nprepared++;

    (void)view;
    assert_true(n < MOST);
    prepared[n] = (struct request){file, off, end};
    return n < nanswer ? answers[n] : 2;
}

int ckpt_item_pread(struct ckpt_view *view, const struct ckpt_item *item, void *buf, size_t len,
                    uint64_t off, struct ckpt_err *err)
{
    (void)view;
    (void)item;
    (void)off;
    (void)err;
    nread++;
    memset(buf, 'x', len);
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

/* Let one thread move the items. */
static void run(struct ckpt_item *item, size_t n, const int *answer, size_t nans)
{
    struct ckpt_items items = {.item = item, .n = n};
    const struct ckpt_pump pump = {.items = &items, .jobs = 1, .quiet = true};
    struct ckpt_err err = {0};

    for (size_t i = 0; i < n; i++)
        items.bytes += item[i].size;
    nprepared = nread = 0;
    nanswer = nans;
    for (size_t i = 0; i < nans; i++)
        answers[i] = answer[i];
    if (ckpt_pump_run(&pump, NULL, &err) < 0)
        fail_msg("%s", err.text);
}

static void check_request(size_t i, size_t file, uint64_t off, uint64_t end)
{
    assert_true(i < nprepared);
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

TESTS(T(pump, what_is_prepared_is_not_asked_for_again),
      T(pump, what_is_there_is_neither_read_nor_prepared),
      T(pump, one_part_is_made_between_two_reads_and_what_is_left_after_the_next),
      T(pump, what_others_make_is_passed_over_and_looked_at_again),
      T(pump, no_more_is_prepared_where_something_cannot_be),
      T(pump, it_looks_so_far_ahead_and_no_farther),
      T(pump, tensors_have_nothing_to_prepare_and_empty_files_are_passed))
