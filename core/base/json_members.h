/* SPDX-License-Identifier: Apache-2.0 */
/* The members of one large JSON object, each parsed when its turn comes: a header of a million
 * tensors is never a million trees in memory at once.
 *
 * The text is cut at the commas between members; each member is parsed by jansson as an object of
 * its own, by the rules of ckpt_json_parse, so that what is accepted, and what it means, is
 * jansson's to say. Only equal keys of two members are not noticed: the caller compares names. */
#ifndef CKPT_BASE_JSON_MEMBERS_H
#define CKPT_BASE_JSON_MEMBERS_H

#include <stddef.h>

#include "base/err.h"
#include "base/json.h"

struct ckpt_json_members {
    char *text; /* borrowed; changed while a member is parsed, and restored */
    size_t len, at;
    const char *what; /* names the text in errors; borrowed */
    bool first;
    json_t *now; /* the object of the present member */
};

/* Begin with the first member of text[0..len), which must be an object (FORMAT). LIMIT if it is
 * nested deeper than ckpt_json_parse allows. Nothing needs to be released on failure. */
int ckpt_json_members_begin(struct ckpt_json_members *m, char *text, size_t len, const char *what,
                            struct ckpt_err *err);
void ckpt_json_members_release(struct ckpt_json_members *m);

/* The next member: 1; 0 after the last one, when nothing but white space follows the object; -1
 * with *err. *ret_name and *ret_value live until the next call. */
int ckpt_json_members_next(struct ckpt_json_members *m, const char **ret_name, json_t **ret_value,
                           struct ckpt_err *err);

/* How many members there are, if the text is valid: commas outside of members, and one. From the
 * beginning; does not parse. */
size_t ckpt_json_members_count(const struct ckpt_json_members *m);

#endif
