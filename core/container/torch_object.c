/* SPDX-License-Identifier: Apache-2.0 */
/* From an archive to values. */
#include "container/torch_object.h"

#include <inttypes.h>

#include "container/pickle_json.h"
#include "container/pickle_value.h"
#include "container/torch.h"

static int refuse_attack(struct ckpt_pickle *p, struct ckpt_err *err)
{
    char name[CKPT_PV_TEXT];

    if (!ckpt_pickle_attack(p, name, sizeof name))
        return 0;
    ckpt_pickle_release(p);
    return ckpt_fail(err, CKPT_UNSUPPORTED,
                     "its pickle asks for %s, which no checkpoint needs: refused (nothing of it "
                     "was run)",
                     name);
}

int ckpt_torch_read(struct ckpt_source *s, struct ckpt_pickle *ret, struct ckpt_err *err)
{
    struct ckpt_torch t;
    int result;

    if (ckpt_torch_open(s, 0, s->size, &t, err) < 0)
        return -1;
    if (t.pickle->len > CKPT_TORCH_MAX_OBJECT)
        result = ckpt_fail(err, CKPT_LIMIT, "its pickle has %" PRIu64 " bytes", t.pickle->len);
    else
        result = ckpt_torch_pickle(&t, ret, err);
    ckpt_torch_release(&t);
    return result < 0 ? -1 : refuse_attack(ret, err);
}

int ckpt_torch_object(struct ckpt_source *s, const char *name, bool leaves, json_t *out,
                      struct ckpt_err *err)
{
    struct ckpt_pickle p;
    json_t *value = NULL;
    int result;

    if (ckpt_torch_read(s, &p, err) < 0)
        return -1;
    if (leaves)
        result = ckpt_pickle_leaves(&p, p.root, name, out, err);
    else if ((result = ckpt_pickle_value(&p, p.root, &value, err)) == 0)
        result = json_object_set_new(out, name, value) < 0 ? ckpt_nomem(err) : 0;
    ckpt_pickle_release(&p);
    return result < 0 ? -1 : ckpt_source_check(s, err);
}
