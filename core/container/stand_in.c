/* SPDX-License-Identifier: Apache-2.0 */
/* The first bytes of each kind. */
#include "container/stand_in.h"

#include <string.h>
#include <strings.h>

static const struct stand_in {
    const char *begin; /* in any case */
    const char *is;
} stand_ins[] = {
    {"version https://git-lfs.github.com/spec/",
     "it is a pointer of git-lfs, not the file itself: fetch it with 'git lfs pull'"},
    {"<!doctype html", "it is a web page, not the file itself: download it again"},
    {"<html", "it is a web page, not the file itself: download it again"},
    {"<?xml",
     "it is an XML document, as stores answer with errors, not the file itself: download it "
     "again"},
    {"<error>",
     "it is an XML document, as stores answer with errors, not the file itself: download "
     "it again"},
};

int ckpt_refuse_stand_in(const void *bytes, size_t n, struct ckpt_err *err)
{
    const char *text = bytes, *end = text + n;

    if (n >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0) /* a byte order mark */
        text += 3;
    while (text < end && (*text == ' ' || *text == '\t' || *text == '\r' || *text == '\n'))
        text++;
    for (size_t i = 0; i < sizeof stand_ins / sizeof stand_ins[0]; i++) {
        const size_t len = strlen(stand_ins[i].begin);
        if ((size_t)(end - text) >= len && strncasecmp(text, stand_ins[i].begin, len) == 0)
            return ckpt_fail(err, CKPT_FORMAT, "%s", stand_ins[i].is);
    }
    return 0;
}
