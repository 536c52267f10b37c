/* SPDX-License-Identifier: Apache-2.0 */
/* Any bytes as a JSON string. */
#include "json_text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fail.h"

enum { LONGEST = 4, ESCAPED = 4 }; /* bytes of a character, of "\xNN" */

/* Bytes of the character at s; 0: it is none. jansson knows. */
static size_t character(const char *s, size_t left)
{
    for (size_t n = 1; n <= LONGEST && n <= left; n++) {
        json_t *j = json_stringn(s, n);
        if (!j)
            continue;
        json_decref(j);
        return n;
    }
    return 0;
}

json_t *ckptfs_json_text(const char *bytes)
{
    size_t left = strlen(bytes);
    CKPTFS_CLEANUP(ckptfs_freep) char *text = NULL;
    json_t *plain = json_string(bytes);

    if (plain || !(text = malloc(left * ESCAPED + 1)))
        return plain;
    char *to = text;
    while (left) {
        size_t n = character(bytes, left);
        if (n)
            memcpy(to, bytes, n);
        else
            (void)snprintf(to, ESCAPED + 1, "\\x%02x", (unsigned char)*bytes);
        to += n ? n : ESCAPED;
        bytes += n ? n : 1;
        left -= n ? n : 1;
    }
    return json_stringn(text, (size_t)(to - text));
}

void ckptfs_json_append(json_t **list, json_t *value)
{
    if (!*list) {
        json_decref(value);
    } else if (!value || json_array_append_new(*list, value) < 0) {
        json_decref(*list);
        *list = NULL;
    }
}
