/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "container/pickle.h"
#include "test.h"

enum { POINT, CALL };
static const char *const point_slots[] = {"x", "y", NULL};
static const struct ckpt_pickle_global globals[] = {
    [POINT] = {"m", "Point", CKPT_PICKLE_OBJ, point_slots},
    [CALL] = {NULL, "call"},
    {"torch", "Size", CKPT_PICKLE_SIZE},
    {"collections", "OrderedDict", CKPT_PICKLE_DICT},
    {NULL},
};
static const struct ckpt_pickle_rules rules = {globals, false};

/* A literal with its NULs. */
#define BYTES(s) (s), sizeof(s) - 1

static int parse(const char *data, size_t len, struct ckpt_pickle *p, struct ckpt_err *err)
{
    /* a copy of just the size: a read past the end is seen by the sanitizer */
    char *own = malloc(len + !len);
    memcpy(own, data, len);
    int result = ckpt_pickle_parse(own, len, &rules, p, err);
    free(own);
    return result;
}

TEST(pickle, an_object_keeps_the_members_that_have_slots)
{
    struct ckpt_pickle p;
    struct ckpt_err err = {0};
    int64_t x;

    CHECK_OK(parse(BYTES("\x80\x04\x8c\1m\x8c\5Point\x93)\x81\x94}\x94(\x8c\1xK\7\x8c\1zK\1u"
                         "b."),
                   &p, &err));
    CHECK_EQ(ckpt_pv_rule(&p, p.root), POINT);
    CHECK(ckpt_pv_int(ckpt_pv_slot(&p, p.root, 0), &x) && x == 7);
    CHECK_EQ(ckpt_pv_kind(ckpt_pv_slot(&p, p.root, 1)), CKPT_PV_ABSENT);
    CHECK_EQ(ckpt_pv_kind(ckpt_pv_slot(&p, p.root, 9)), CKPT_PV_ABSENT);
    ckpt_pickle_release(&p);
}

TEST(pickle, equal_tuples_of_integers_are_kept_once_and_a_size_is_one)
{
    struct ckpt_pickle p;
    struct ckpt_err err = {0};
    size_t n;

    CHECK_OK(parse(BYTES("\x80\x02(K\1J\xff\xff\xff\xff\x86K\1\x8a\1\xff\x86"
                         "ctorch\nSize\nK\1J\xff\xff\xff\xff\x86\x85Rt."),
                   &p, &err));
    CHECK_EQ(ckpt_pv_len(&p, p.root), 3);
    CHECK(ckpt_pv_at(&p, p.root, 0) == ckpt_pv_at(&p, p.root, 1));
    CHECK(ckpt_pv_at(&p, p.root, 0) == ckpt_pv_at(&p, p.root, 2));
    const int64_t *t = ckpt_pv_ints(&p, ckpt_pv_at(&p, p.root, 0), &n);
    CHECK(n == 2 && t[0] == 1 && t[1] == -1);
    ckpt_pickle_release(&p);
}

TEST(pickle, nothing_is_called_and_what_is_foreign_is_opaque)
{
    struct ckpt_pickle p;
    struct ckpt_err err = {0};

    CHECK_OK(parse(BYTES("\x80\x02"
                         "cposix\nsystem\nX\2\0\0\0id\x85R}X\1\0\0\0aK\1s"
                         "b."),
                   &p, &err));
    CHECK_EQ(ckpt_pv_kind(p.root), CKPT_PV_OPAQUE);
    CHECK_STR(ckpt_pv_module(&p, p.root), "posix");
    CHECK_STR(ckpt_pv_name(&p, p.root), "system");
    ckpt_pickle_release(&p);
}

TEST(pickle, a_used_state_is_given_back_unless_the_memo_still_gives_it)
{
    struct ckpt_pickle p;
    struct ckpt_err err = {0};
    int64_t x;

    /* the memo forgets a state that became an object's */
    CHECK_FAILS(parse(BYTES("\x80\x04"
                            "cm\nPoint\n)\x81}\x94"
                            "bh\0."),
                      &p, &err),
                CKPT_FORMAT, "memo entry 0");
    /* here it was asked for before: both see it */
    CHECK_OK(
        parse(BYTES("\x80\x04}\x94\x8c\1xK\5scm\nPoint\n)\x81h\0bcm\nPoint\n)\x81h\0b}\x86\x87."),
              &p, &err));
    CHECK(ckpt_pv_int(ckpt_pv_slot(&p, ckpt_pv_at(&p, ckpt_pv_at(&p, p.root, 2), 0), 0), &x) &&
          x == 5);
    ckpt_pickle_release(&p);
}

TEST(pickle, integers_above_60_bits_are_opaque)
{
    struct ckpt_pickle p;
    struct ckpt_err err = {0};
    int64_t v;

    CHECK_OK(parse(
        BYTES("\x80\x02("
              "\x8a\x09\0\0\0\0\0\0\0\0\x40\x8a\x05\0\0\0\0\1\x8a\0\x8a\x08\0\0\0\0\0\0\0\x40t."),
        &p, &err));
    CHECK_EQ(ckpt_pv_kind(ckpt_pv_at(&p, p.root, 0)), CKPT_PV_OPAQUE);
    CHECK(ckpt_pv_int(ckpt_pv_at(&p, p.root, 1), &v) && v == INT64_C(1) << 32);
    CHECK(ckpt_pv_int(ckpt_pv_at(&p, p.root, 2), &v) && v == 0);
    CHECK_EQ(ckpt_pv_kind(ckpt_pv_at(&p, p.root, 3)), CKPT_PV_OPAQUE);
    ckpt_pickle_release(&p);
}

TEST(pickle, an_ordered_dict_takes_attributes)
{
    struct ckpt_pickle p;
    struct ckpt_err err = {0};

    CHECK_OK(parse(BYTES("\x80\x02"
                         "ccollections\nOrderedDict\n)RX\1\0\0\0aK\1s}X\1\0\0\0mK\2sb."),
                   &p, &err));
    CHECK_EQ(ckpt_pv_npair(&p, p.root), 1);
    CHECK_EQ(ckpt_pv_kind(ckpt_pv_get(&p, p.root, "a")), CKPT_PV_INT);
    CHECK_EQ(ckpt_pv_kind(ckpt_pv_get(&p, p.root, "m")), CKPT_PV_ABSENT);
    ckpt_pickle_release(&p);
}

static const struct lie {
    const char *name;
    const char *data;
    size_t len;
    enum ckpt_code code;
    const char *says;
} lies[] = {
    {"nothing", BYTES(""), CKPT_FORMAT, "is truncated"},
    {"text", BYTES("(dp0\n."), CKPT_FORMAT, "not a pickle of protocol 2"},
    {"protocol 6", BYTES("\x80\x06N."), CKPT_UNSUPPORTED, "protocol 6"},
    {"no stop", BYTES("\x80\x04N"), CKPT_FORMAT, "is truncated"},
    {"stop at once", BYTES("\x80\x04."), CKPT_FORMAT, "more values than the stack holds"},
    {"frame too long", BYTES("\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xffN."), CKPT_FORMAT,
     "is truncated"},
    {"string too long", BYTES("\x80\x04X\xff\xff\xff\x7f."), CKPT_FORMAT, "is truncated"},
    {"string of 2^63", BYTES("\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\xff."), CKPT_FORMAT,
     "is truncated"},
    {"memo bomb", BYTES("\x80\x02Nr\xff\xff\xff\xff."), CKPT_LIMIT, "memo entry 4294967295"},
    {"memo hole", BYTES("\x80\x02Nq\5h\2."), CKPT_FORMAT, "memo entry 2 was never stored"},
    {"tuple of nothing", BYTES("\x80\x04\x87."), CKPT_FORMAT, "more values than the stack holds"},
    {"pop across a mark", BYTES("\x80\x04K\1(\x85."), CKPT_FORMAT,
     "more values than the stack holds"},
    {"no mark", BYTES("\x80\x04K\1t."), CKPT_FORMAT, "the stack has no mark"},
    {"odd dict", BYTES("\x80\x04}(K\1u."), CKPT_FORMAT, "a key without a value"},
    {"members into an int", BYTES("\x80\x04K\1K\2a."), CKPT_FORMAT, "members into an integer"},
    {"state into an int", BYTES("\x80\x04K\1}b."), CKPT_FORMAT, "give a state to an integer"},
    {"calling a string", BYTES("\x80\x04\x8c\1a)R."), CKPT_FORMAT, "cannot call a string"},
    {"arguments in a list",
     BYTES("\x80\x04"
           "cm\nPoint\n]\x81."),
     CKPT_FORMAT, "arguments"},
    {"size of a string",
     BYTES("\x80\x04"
           "ctorch\nSize\n\x8c\1a\x85R."),
     CKPT_FORMAT, "a size made from"},
    {"global of an int", BYTES("\x80\x04K\1K\1\x93."), CKPT_FORMAT, "name is not a string"},
    {"endless global",
     BYTES("\x80\x04"
           "caaaa"),
     CKPT_FORMAT, "is truncated"},
    {"persistent id", BYTES("\x80\x04NQ."), CKPT_UNSUPPORTED, "persistent id"},
    {"extension", BYTES("\x80\x04\x82\1."), CKPT_UNSUPPORTED, "0x82"},
    {"inst", BYTES("\x80\x02(ios\nsystem\n."), CKPT_UNSUPPORTED, "0x69"},
    {"text int", BYTES("\x80\x02I5\n."), CKPT_UNSUPPORTED, "0x49"},
    {"out-of-band buffer", BYTES("\x80\x05\x97."), CKPT_UNSUPPORTED, "0x97"},
    {"zeros", BYTES("\x80\x04\0\0\0"), CKPT_UNSUPPORTED, "0x00"},
    {"pairs that are none",
     BYTES("\x80\x04"
           "ccollections\nOrderedDict\n]K\1a\x85R."),
     CKPT_FORMAT, "a dict made from"},
};

TEST(pickle, lies_are_refused)
{
    struct ckpt_err err;
    struct ckpt_pickle p;

    for (size_t i = 0; i < sizeof lies / sizeof lies[0]; i++)
        CHECK_FAILS(parse(lies[i].data, lies[i].len, &p, &err), lies[i].code, lies[i].says);
}

TEST(pickle, marks_have_a_limit)
{
    char data[2 + CKPT_PICKLE_MAX_MARKS + 2] = "\x80\x04";
    struct ckpt_pickle p;
    struct ckpt_err err;

    memset(data + 2, '(', sizeof data - 2);
    CHECK_FAILS(parse(data, sizeof data, &p, &err), CKPT_LIMIT, "nests deeper");
}

/* A long pickle comes through the window in pieces. */
TEST(pickle, a_source_reads_as_memory_does)
{
    enum { N = 200000 };
    ckpt_cleanup(ckpt_source_unrefp) struct ckpt_source *s = NULL;
    unsigned char *data = malloc(8 + 3 * N);
    struct ckpt_pickle p;
    struct ckpt_err err = {0};
    size_t len = 0;
    int64_t v;

    data[len++] = 0x80;
    data[len++] = 4;
    data[len++] = '(';
    for (int i = 0; i < N; i++) {
        data[len++] = 'M';
        data[len++] = (unsigned char)i;
        data[len++] = (unsigned char)(i >> 8);
    }
    data[len++] = 't';
    data[len++] = '.';
    CHECK_OK(ckpt_source_mem_new("mem", data, len, &s, &err));
    free(data);
    CHECK_OK(ckpt_pickle_read(s, 0, len, &rules, NULL, &p, &err));
    CHECK_EQ(ckpt_pv_len(&p, p.root), N);
    CHECK(ckpt_pv_int(ckpt_pv_at(&p, p.root, 100001), &v) && v == 100001 % 65536);
    ckpt_pickle_release(&p);
    CHECK_FAILS(ckpt_pickle_read(s, 1, len, &rules, NULL, &p, &err), CKPT_FORMAT, "outside");
}

TESTS(T(pickle, an_object_keeps_the_members_that_have_slots),
      T(pickle, equal_tuples_of_integers_are_kept_once_and_a_size_is_one),
      T(pickle, nothing_is_called_and_what_is_foreign_is_opaque),
      T(pickle, a_used_state_is_given_back_unless_the_memo_still_gives_it),
      T(pickle, integers_above_60_bits_are_opaque), T(pickle, an_ordered_dict_takes_attributes),
      T(pickle, lies_are_refused), T(pickle, marks_have_a_limit),
      T(pickle, a_source_reads_as_memory_does))
