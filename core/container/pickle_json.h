/* SPDX-License-Identifier: Apache-2.0 */
/* A pickle's plain values as JSON, for configurations. */
#ifndef CKPT_CONTAINER_PICKLE_JSON_H
#define CKPT_CONTAINER_PICKLE_JSON_H

#include "base/json.h"
#include "container/pickle.h"

/* None, booleans, numbers, strings, sequences, dicts with string keys (others are left out) become
 * what they are in JSON; objects of the table of which slot 1 is a dict (argparse.Namespace) become
 * that; globals and foreign objects their dotted name ("torch.bfloat16"); bytes, tensors, floats
 * that are no numbers and what lies deeper than 16 become null. *ret is new. LIMIT: more than 10^6
 * values. */
int ckpt_pickle_json(const struct ckpt_pickle *p, ckpt_pv v, json_t **ret, struct ckpt_err *err);

/* Find the first global of the pickle that only an attack needs ("os.system"), and write it into
 * buf; false: there is none. No function is ever called, but whoever wrote the pickle wanted it to
 * be. */
bool ckpt_pickle_attack(const struct ckpt_pickle *p, char *buf, size_t cap);

#endif
