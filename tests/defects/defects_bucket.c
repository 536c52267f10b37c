/* SPDX-License-Identifier: Apache-2.0 */
/* Lies of a store's lists. */
#include "defects.h"

#include <stdlib.h>

#include "io/bucket/helper/helper.h"

#define LIST(body)                                                                                 \
    "<ListBucketResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">" body                    \
    "</ListBucketResult>"
#define WHEN "<LastModified>2026-11-26T01:02:03.000Z</LastModified>"
#define ITEM(key)                                                                                  \
    "<Contents><Key>" key "</Key>" WHEN "<ETag>&quot;e&quot;</ETag><Size>7</Size></Contents>"

static char *repeated(const char *before, const char *unit, int n, const char *after)
{
    struct ckpt_str s = {0};

    ckpt_str_puts(&s, before);
    for (int i = 0; i < n; i++)
        ckpt_str_puts(&s, unit);
    ckpt_str_puts(&s, after);
    return s.ptr;
}

static char *laughs(void)
{
    return strdup("<!DOCTYPE x [<!ENTITY a \"aaaaaaaaaa\"><!ENTITY b \"&a;&a;&a;&a;\">]>" LIST(
        "<Name>&b;</Name>"));
}
static char *deep(void) { return repeated("", "<ListBucketResult>", 5000, ""); }
static char *long_key(void)
{
    return repeated("<ListBucketResult><Contents><Key>", "k", 5000, "</Key>");
}
static char *long_text(void)
{
    return repeated("<ListBucketResult><Name>", "k", 100000, "</Name></ListBucketResult>");
}
static char *too_many(void)
{
    return repeated("<ListBucketResult>", ITEM("a"), 3000, "</ListBucketResult>");
}

static const struct lie {
    const char *name, *text;
    char *(*make)(void);
    enum ckpt_code code;
    const char *needle;
} lies[] = {
    {"sound", LIST(ITEM("a") "<CommonPrefixes><Prefix>b/</Prefix></CommonPrefixes>"), NULL, CKPT_OK,
     NULL},
    {"sound_empty", LIST(""), NULL, CKPT_OK, NULL},
    {"sound_encoded", LIST("<EncodingType>url</EncodingType>" ITEM("a%2Bb+c")), NULL, CKPT_OK,
     NULL},
    {"sound_prefixed", "<s:ListBucketResult xmlns:s=\"x\"></s:ListBucketResult>", NULL, CKPT_OK,
     NULL},
    {"empty", "", NULL, CKPT_FORMAT, "malformed XML"},
    {"html", "<html><body>Log in</body></html>", NULL, CKPT_FORMAT, "another document"},
    {"cut", "<ListBucketResult><Contents>", NULL, CKPT_FORMAT, "malformed XML"},
    {"no_key", LIST("<Contents><Size>1</Size></Contents>"), NULL, CKPT_FORMAT,
     "without key or size"},
    {"no_size", LIST("<Contents><Key>a</Key><ETag>e</ETag></Contents>"), NULL, CKPT_FORMAT,
     "without key or size"},
    {"no_etag", LIST("<Contents><Key>a</Key><Size>1</Size></Contents>"), NULL, CKPT_FORMAT,
     "without an ETag"},
    {"size_negative", LIST("<Contents><Key>a</Key><Size>-1</Size></Contents>"), NULL, CKPT_FORMAT,
     "no number"},
    {"size_huge", LIST("<Contents><Key>a</Key><Size>99999999999999999999</Size></Contents>"), NULL,
     CKPT_FORMAT, "no number"},
    {"time_odd", LIST("<Contents><Key>a</Key><LastModified>yesterday</LastModified></Contents>"),
     NULL, CKPT_FORMAT, "a time"},
    {"encoded_nul", LIST("<EncodingType>url</EncodingType>" ITEM("a%00b")), NULL, CKPT_FORMAT,
     "without key"},
    {"encoded_cut", LIST("<EncodingType>url</EncodingType>" ITEM("a%2")), NULL, CKPT_FORMAT,
     "without key"},
    {"truncated_without_token", LIST("<IsTruncated>true</IsTruncated>"), NULL, CKPT_FORMAT,
     "truncated"},
    {"entities", NULL, laughs, CKPT_FORMAT, "malformed XML"},
    {"deep", NULL, deep, CKPT_FORMAT, "malformed XML"},
    {"long_key", NULL, long_key, CKPT_FORMAT, "too long"},
    {"long_text", NULL, long_text, CKPT_FORMAT, "malformed XML"},
    {"too_many", NULL, too_many, CKPT_FORMAT, "too large"},
};

/* Profiles: what is found in a text, "" for nothing. */
static const struct {
    const char *name, *text, *section, *key, *value;
} profiles[] = {
    {"plain", "[a]\nk = v\n", "a", "k", "v"},
    {"blanks", "[ a ]\r\nk=v w \r\n", "a", "k", "v w"},
    {"other_section", "[b]\nk = v\n", "a", "k", ""},
    {"comment", "[a]\n# k = v\n; k = w\n", "a", "k", ""},
    {"nested", "[a]\ns3 =\n  k = v\n", "a", "k", ""},
    {"longer_key", "[a]\nkk = v\n", "a", "k", ""},
    {"last_wins", "[a]\nk = v\n[a]\nk = w\n", "a", "k", "w"},
    {"no_value", "[a]\nk\nk", "a", "k", ""},
    {"open_section", "[a\nk = v\n", "a", "k", ""},
};

int main(int argc, char **argv)
{
    struct judge j = {.filter = argc > 1 ? argv[1] : NULL};
    static char out[1 << 16];
    char more[256];
    uint64_t len;

    for (size_t i = 0; i < sizeof lies / sizeof lies[0]; i++) {
        const struct lie *lie = &lies[i];
        char *own = lie->make ? lie->make() : NULL;
        const char *text = own ? own : lie->text;
        struct ckpt_err err = {0};
        clock_t begin = clock();
        if (wanted(&j, lie->name))
            judge(&j, lie->name,
                  ckpt_xml_list(text, strlen(text), out, sizeof out, &len, more, sizeof more, &err),
                  &err, lie->code, "ListObjectsV2", lie->needle, begin);
        free(own);
    }
    for (size_t i = 0; i < sizeof profiles / sizeof profiles[0]; i++) {
        struct ckpt_err err = {0};
        char *value = ckpt_ini_get(profiles[i].text, profiles[i].section, profiles[i].key, NULL);
        const bool good = strcmp(value ? value : "", profiles[i].value) == 0;
        if (wanted(&j, profiles[i].name))
            judge(&j, profiles[i].name, good ? 0 : -1, &err, CKPT_OK, NULL, NULL, clock());
        free(value);
    }
    return verdict(&j);
}
