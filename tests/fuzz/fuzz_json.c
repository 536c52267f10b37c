/* SPDX-License-Identifier: Apache-2.0 */
/* JSON: what is accepted survives being written and read again, in both styles. */
#include "fuzz.h"

#include "base/json.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct ckpt_err err = {0};
    json_t *j, *again;

    if (ckpt_json_parse((const char *)data, size, "input", &j, &err) < 0) {
        check_err(&err);
        return 0;
    }
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
    json_decref(j);
    return 0;
}
