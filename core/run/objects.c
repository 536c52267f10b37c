/* SPDX-License-Identifier: Apache-2.0 */
/* The values that a checkpoint holds besides tensors. */
#include "base/log.h"
#include "format/reader.h"
#include "run/checkpoint.h"

int ckpt_checkpoint_objects(const struct ckpt_view *view, json_t **ret, struct ckpt_err *err)
{
    const struct ckpt_shared *s = view->shared;
    const struct ckpt_reader_options opt = {
        .pool = s->pool, .log = &s->opt->log, .allow_partial = s->opt->allow_partial};
    const struct ckpt_reader *reader = ckpt_reader_probe(view->dir, err);
    ckpt_cleanup(ckpt_json_decrefp) json_t *out = json_object();

    if (!reader)
        return -1;
    if (!out)
        return ckpt_nomem(err);
    if (reader->objects && reader->objects(view->dir, &opt, out, err) < 0)
        return -1;
    *ret = ckpt_steal(&out);
    return 0;
}
