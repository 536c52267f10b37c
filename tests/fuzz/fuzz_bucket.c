/* SPDX-License-Identifier: Apache-2.0 */
/* What ckptfs-http parses: a page of a list, whose entries must be whole; texts of other answers;
 * profiles; times. */
#include "fuzz.h"

#include "io/bucket/helper/helper.h"

static char out[1 << 16];

static void check_entries(uint64_t len)
{
    struct ckpt_wire_entry e;

    MUST(len <= sizeof out);
    for (uint64_t at = 0; at < len; at += e.tag_len + e.key_len) {
        MUST(len - at >= sizeof e);
        memcpy(&e, out + at, sizeof e);
        at += sizeof e;
        MUST(e.tag_len > 0 && e.key_len > 1 && len - at >= (uint64_t)e.tag_len + e.key_len);
        MUST(strlen(out + at) == e.tag_len - 1u && strlen(out + at + e.tag_len) == e.key_len - 1u);
        MUST(e.size <= INT64_MAX);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char more[128], found[64];
    struct ckpt_err err = {0};
    struct ckpt_str url = {0};
    uint64_t len = 0;
    bool any = false;
    char *text = malloc(size + 1), *value;

    if (!text)
        return 0;
    memcpy(text, data, size);
    text[size] = '\0';
    if (ckpt_xml_list(text, size, out, sizeof out, &len, more, sizeof more, &err) == 0)
        check_entries(len);
    else
        check_err(&err);
    ckpt_xml_text(text, size, "Code", found, sizeof found);
    value = ckpt_ini_get(text, "default", "region", &any);
    MUST(!value || any);
    free(value);
    MUST(ckpt_time_parse(text) >= -1 || strlen(text) > 10);
    ckpt_url_encode(&url, text, true);
    MUST(url.len <= 3 * strlen(text));
    ckpt_str_release(&url);
    free(text);
    return 0;
}
