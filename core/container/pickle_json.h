/* SPDX-License-Identifier: Apache-2.0 */
/* A pickle's plain values as JSON, for configurations. */
#ifndef CKPT_CONTAINER_PICKLE_JSON_H
#define CKPT_CONTAINER_PICKLE_JSON_H

#include "base/json.h"
#include "container/pickle.h"

/* None, booleans, numbers, strings, sequences and dicts become the same in JSON; entries of a dict
 * whose keys are not strings are left out. An object of the table whose slot 1 is a dict
 * (argparse.Namespace) becomes that dict; a global or a foreign object becomes its dotted name
 * ("torch.bfloat16"). Bytes, tensors, NaN and infinities, and values at a depth of more than 16,
 * become null. *ret is new. LIMIT: more than 10^6
 * values. */
int ckpt_pickle_json(const struct ckpt_pickle *p, ckpt_pv v, json_t **ret, struct ckpt_err *err);

/* Find the first global of the pickle that only an attack needs ("os.system"), and write it into
 * buf; false: there is none. No function is ever called here, but the pickle was made to call it
 * where it is loaded with Python. */
bool ckpt_pickle_attack(const struct ckpt_pickle *p, char *buf, size_t cap);

#endif
