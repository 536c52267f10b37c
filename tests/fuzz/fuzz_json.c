/* SPDX-License-Identifier: Apache-2.0 */
/* JSON: text that is accepted survives being written and read again, in both styles. */
#include "fuzz.h"

#include <stdlib.h>
#include <string.h>

#include "../unit/pull_tree.h"
#include "base/json.h"

/* Pulled value by value it is the same; whole == NULL: jansson refuses it. */
static void check_pulled(const uint8_t *data, size_t size, const json_t *whole)
{
    struct ckpt_err err = {0}, skipped = {0};
    json_t *j = pull_tree((const char *)data, size, false, &err);

    (void)pull_tree((const char *)data, size, true, &skipped);
    MUST(err.code == skipped.code);
    if (err.code)
        check_err(&err);
    if (whole)
        MUST(j && json_equal(whole, j));
    else
        MUST(!j || (!json_is_object(j) && !json_is_array(j)));
    json_decref(j);
}

static void check_dumped(const json_t *j)
{
    struct ckpt_err err = {0};
    json_t *again;

    for (int style = 0; style < 4; style++) {
        char *text;
        size_t len;
        MUST(ckpt_json_dump(j, style & 1 ? CKPT_JSON_PYTHON : CKPT_JSON_COMPACT, style & 2, &text,
                            &len, &err) == 0);
        MUST(ckpt_json_parse(text, len, "output", &again, &err) == 0);
        MUST(json_equal(j, again));
        json_decref(again);
        free(text);
    }
    (void)ckpt_json_at(j, "a.b.c");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct ckpt_err err = {0}, strict_err = {0};
    json_t *j = NULL, *strict = NULL;

    (void)ckpt_json_parse_strict((const char *)data, size, "input", &strict, &strict_err);
    if (!strict)
        check_err(&strict_err);
    check_pulled(data, size, strict);
    if (ckpt_json_parse((const char *)data, size, "input", &j, &err) < 0) {
        check_err(&err);
        MUST(!strict);
        return 0;
    }
    check_dumped(j);
    if (strict)
        MUST(json_equal(j, strict));
    json_decref(strict);
    json_decref(j);
    return 0;
}
