/* SPDX-License-Identifier: Apache-2.0 */
/* ckptfs-http: the parts of the program. It is two processes. The keeper (main.c) finds
 * credentials, where users keep them; the worker (worker.c), which has no access to files, makes
 * the HTTP to the store. Neither can be traced or dumped. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/str.h"
#include "io/bucket/wire.h"

/* Credentials with which requests are signed. They are a message from the keeper to the worker,
 * and are cleared after use. */
struct ckpt_secret {
    enum ckpt_code code; /* not OK: there is none, and `text` says why */
    int64_t expires;     /* seconds since 1970; 0: never */
    char kind[128];      /* for people: "environment", "profile 'x'" ... */
    char key[256], secret[256], token[8192];
    char text[CKPT_ERR_TEXT];
};

/* Where the store is. */
struct ckpt_site {
    char region[64];
    char endpoint[256];  /* of AWS_ENDPOINT_URL and the like, without '/' at its end; "": AWS */
    char ca_bundle[512]; /* AWS_CA_BUNDLE; "": the system's */
    bool anonymous;
};

/* ---- aws.c ---- */

/* Read region, endpoint and CA bundle from the environment and the profile. */
int ckpt_site_find(struct ckpt_site *site, struct ckpt_err *err);

/* Find credentials, in the order of AWS's own tools. *s says so if there are none. */
void ckpt_secret_find(const struct ckpt_site *site, struct ckpt_secret *s);

/* The text of a file, malloc'ed; NULL: it cannot be read. */
char *ckpt_read_text(const char *path);

struct curl_slist;

/* Add a header to a request's. */
void ckpt_header_add(struct curl_slist **list, const char *name, const char *value);
/* Clear and free them. */
void ckpt_headers_free(struct curl_slist **list);

/* Let a request be signed; a token becomes one of its headers. */
void ckpt_sign(void *curl, struct curl_slist **headers, const struct ckpt_secret *by,
               const char *region, const char *service);

/* ---- text.c ---- */

/* A profile's settings are lines "key = value" below "[name]". Get the value of `key` in the
 * section `section` of a file's text; malloc'ed. NULL: there is none. `ret_found` (may be NULL): is
 * there such a section? */
char *ckpt_ini_get(const char *text, const char *section, const char *key, bool *ret_found);

/* Seconds since 1970 of "2026-11-26T01:02:03Z" (fractions are left out), or -1. */
int64_t ckpt_time_parse(const char *text);

/* Append as S3 encodes: all but A-Z, a-z, 0-9, '-', '.', '_', '~', and '/' with `path`. */
void ckpt_url_encode(struct ckpt_str *out, const char *text, bool path);

/* The text of the first element `name` of XML, "" if there is none. */
void ckpt_xml_text(const char *xml, size_t len, const char *name, char *ret, size_t cap);

/* Parse a page of ListObjectsV2: entries (struct ckpt_wire_entry) are written to out[0..cap), and
 * *ret_len is their length. `more` gets the token of the next page, "" if this is the last.
 * FORMAT. */
int ckpt_xml_list(const char *xml, size_t len, void *out, size_t cap, uint64_t *ret_len, char *more,
                  size_t more_cap, struct ckpt_err *err);

/* ---- worker.c ---- */

/* Serve until the socket is closed. `number`: of this worker; questions to others are not answered.
 * `ca`: certificates, or NULL. `keeper` is the socket to the keeper. */
int ckpt_worker_run(const struct ckpt_wire_setup *setup, unsigned number,
                    const struct ckpt_site *site, const char *ca, int keeper, void *memory);
