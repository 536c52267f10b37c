/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "container/torch.h"
#include "container/torch_file.h"
#include "test.h"

/* A literal with its NULs. */
#define BYTES(s) (s), sizeof(s) - 1

/* What a pickle's value is as text, or its leaves under "p". */
static char *shown(void **state_, const char *data, size_t len, bool leaves)
{
    struct ckpt_pickle p;
    struct ckpt_err err = {0};
    json_t *j = leaves ? json_object() : NULL;
    char *text;

    CHECK_OK(ckpt_pickle_parse(data, len, &ckpt_torch_rules, &p, &err));
    if (leaves)
        CHECK_OK(ckpt_pickle_leaves(&p, p.root, "p", j, &err));
    else
        CHECK_OK(ckpt_pickle_value(&p, p.root, &j, &err));
    CHECK_OK(ckpt_json_dump(j, CKPT_JSON_COMPACT, false, &text, NULL, &err));
    json_decref(j);
    ckpt_pickle_release(&p);
    return text;
}

static void check_text(void **state_, char *got, const char *want)
{
    CHECK_STR(got, want);
    free(got);
}

/* The pickles are what Python's pickle.dumps(value, 2) writes. */
TEST(pickle_value, what_json_has_not_is_marked)
{
    check_text(state_,
               shown(state_,
                     BYTES("\x80\x02]q\x00(K\x01G\x7f\xf0\0\0\0\0\0\0G\xff\xf0\0\0\0\0\0\0"
                           "G\x7f\xf8\0\0\0\0\0\0N\x88"
                           "e."),
                     false),
               "[1,{\"$float\":\"inf\"},{\"$float\":\"-inf\"},{\"$float\":\"nan\"},null,true]");
    check_text(state_, shown(state_, BYTES("\x80\x02K\x01X\x01\0\0\0aq\0\x86q\x01."), false),
               "{\"$tuple\":[1,\"a\"]}");
    check_text(
        state_,
        shown(state_, BYTES("\x80\x02}q\0(K\x01X\x01\0\0\0aq\x01X\x01\0\0\0bq\x02K\x02u."), false),
        "{\"$dict\":[[1,\"a\"],[\"b\",2]]}");
    check_text(state_, shown(state_, BYTES("\x80\x02}q\0X\x02\0\0\0$aq\x01K\x02s."), false),
               "{\"$dict\":[[\"$a\",2]]}");
    check_text(state_, shown(state_, BYTES("\x80\x02X\x03\0\0\0a\0b."), false),
               "{\"$text\":\"610062\"}");
    check_text(state_,
               shown(state_,
                     BYTES("\x80\x02"
                           "c_codecs\nencode\nq\0X\x04\0\0\0\xc3\xbf"
                           "A\x7fq\x01X\x06\0\0\0latin1q\x02\x86q\x03Rq\x04."),
                     false),
               "{\"$bytes\":\"ff417f\"}");
    check_text(state_,
               shown(state_,
                     BYTES("\x80\x02"
                           "c__builtin__\nset\nq\0]q\x01K\x07"
                           "a\x85q\x02Rq\x03."),
                     false),
               "[7]");
    check_text(state_,
               shown(state_,
                     BYTES("\x80\x02"
                           "c__builtin__\nset\nq\0."),
                     false),
               "{\"$object\":\"__builtin__.set\"}");
    check_text(state_,
               shown(state_,
                     BYTES("\x80\x02"
                           "cargparse\nNamespace\nq\0)\x81q\x01}q\x02X\x02\0\0\0lrq\x03K\x05sb."),
                     false),
               "{\"$object\":\"argparse.Namespace\",\"state\":{\"lr\":5}}");
    check_text(state_,
               shown(state_,
                     BYTES("\x80\x02"
                           "cnumpy\nfloat64\nq\0."),
                     false),
               "{\"$object\":\"numpy.float64\"}");
}

TEST(pickle_value, leaves_are_named_as_torch_names_them)
{
    check_text(state_,
               shown(state_,
                     BYTES("\x80\x02}q\0(X\x01\0\0\0aq\x01}q\x02K\x03K\x04sX\x01\0\0\0bq\x03]q\x04"
                           "}q\x05X\x01\0\0\0cq\x06K\x05saX\x01\0\0\0dq\x07]q\x08K\x06"
                           "au."),
                     true),
               "{\"p.a.3\":4,\"p.b.0.c\":5,\"p.d\":[6]}");
    check_text(state_, shown(state_, BYTES("\x80\x02K\x01."), true), "{\"p\":1}");
}

TESTS(T(pickle_value, what_json_has_not_is_marked),
      T(pickle_value, leaves_are_named_as_torch_names_them))
