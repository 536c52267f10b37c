/* SPDX-License-Identifier: Apache-2.0 */
/* The files of a nanotron checkpoint beside its weights. */
#pragma once

#include "format/writer.h"

/* Add latest.txt, model_config.json, checkpoint_metadata.json and config.yaml. The last has what
 * nanotron needs in order to build the model and to load the weights: no data and no optimizer. */
int ckpt_nanotron_configs(const struct ckpt_writing *w, const char *version, struct ckpt_err *err);
