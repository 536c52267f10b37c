/* SPDX-License-Identifier: Apache-2.0 */
/* YAML: what is accepted is a JSON value that can be written and read again. */
#include "fuzz.h"

#include "container/config.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct ckpt_err err = {0};
    json_t *j, *again;
    char *text;
    size_t len;

    if (ckpt_yaml_parse((const char *)data, size, "input", &j, &err) < 0) {
        check_err(&err);
        return 0;
    }
    if (json_is_object(j) || json_is_array(j)) {
        MUST(ckpt_json_dump(j, CKPT_JSON_COMPACT, false, &text, &len, &err) == 0);
        if (ckpt_json_parse(text, len, "output", &again, &err) < 0)
            abort();
        MUST(json_equal(j, again));
        json_decref(again);
        free(text);
    }
    json_decref(j);
    return 0;
}
