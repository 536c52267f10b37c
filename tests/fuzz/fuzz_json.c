/* SPDX-License-Identifier: Apache-2.0 */
/* JSON: what is accepted survives being written and read again, in both styles. */
#include "fuzz.h"

#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/json_members.h"

/* Cut into its members, an object is the same; whole == NULL: it is none, or is refused. */
static void check_members(const uint8_t *data, size_t size, const json_t *whole)
{
    char *text = malloc(size + 1);
    struct ckpt_json_members m;
    struct ckpt_err err = {0};
    json_t *value;
    const char *name;
    size_t n = 0;
    int rc;

    MUST(text != NULL);
    memcpy(text, data, size);
    json_t *parts = json_object();
    if ((rc = ckpt_json_members_begin(&m, text, size, "input", &err)) == 0) {
        while ((rc = ckpt_json_members_next(&m, &name, &value, &err)) > 0) {
            n++;
            MUST(json_object_set(parts, name, value) == 0);
        }
        ckpt_json_members_release(&m);
    }
    if (rc < 0)
        check_err(&err);
    const bool taken = rc == 0 && n == json_object_size(parts); /* none of them twice */
    MUST(taken == (whole != NULL) && (!whole || json_equal(whole, parts)));
    json_decref(parts);
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct ckpt_err err = {0};
    json_t *j, *again;

    if (ckpt_json_parse((const char *)data, size, "input", &j, &err) < 0) {
        check_err(&err);
        check_members(data, size, NULL);
        return 0;
    }
    check_members(data, size, json_is_object(j) ? j : NULL);
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
