/* SPDX-License-Identifier: Apache-2.0 */
/* Taking tensors from the base. */
#include "model/opening.h"

#include <string.h>

#include "base/mem.h"
#include "base/str.h"
#include "model/dequantize.h"
#include "model/names.h"

enum { MOST_SHOWN = 3 };

struct taking {
    struct ckpt_opening *o;
    json_t *names;         /* {name in the base: name in the view} where they differ */
    json_t *taken;         /* names in the view */
    uint32_t first_source; /* number of the base's first source in o->cat */
};

static void taking_release(struct taking *t)
{
    json_decref(t->names);
    json_decref(t->taken);
}

/* The names of the base's tensors in the view, from o->base_names, which is the reverse. */
static json_t *reverse(const json_t *names)
{
    json_t *back = json_object(), *other;
    const char *name;

    json_object_foreach((json_t *)names, name, other)
        ckpt_json_set(&back, json_string_value(other), json_string(name));
    return back;
}

/* Does config.json say that the tensor is another one, which the model has? */
static bool is_tied(const struct ckpt_opening *o, const char *name)
{
    const struct ckpt_type *type = ckpt_opening_type(o);
    const bool tied = ckpt_names_tie(type, o->config);

    for (size_t i = 0; tied && i < type->ties.n; i++)
        if (strcmp(type->ties.pair[i].from, name) == 0)
            return true;
    return false;
}

static int take(struct taking *t, const struct ckpt_tensor *of, const char *name,
                struct ckpt_err *err)
{
    struct ckpt_tensor own = *of;

    own.name = name;
    if (json_array_append_new(t->taken, json_string(name)) < 0)
        return ckpt_nomem(err);
    return ckpt_catalog_copy(t->o->cat, &own, t->first_source, err);
}

/* Say which tensors these are: all in `about`, the first in a warning. */
static int tell(struct taking *t, struct ckpt_err *err)
{
    const size_t n = json_array_size(t->taken);
    ckpt_cleanup(ckpt_str_release) struct ckpt_str names = {0};

    for (size_t i = 0; i < n && i < MOST_SHOWN; i++)
        ckpt_str_printf(&names, "%s'%s'", i ? ", " : "",
                        json_string_value(json_array_get(t->taken, i)));
    if (n == 0)
        return 0;
    ckpt_catalog_warn(t->o->cat, "%zu tensor%s of base '%s': %s%s", n,
                      n == 1 ? " is that" : "s are those", ckpt_dir_path(t->o->shared->base->dir),
                      ckpt_str_get(&names), n > MOST_SHOWN ? " ..." : "");
    return json_object_set(t->o->cat->about, "from_base", t->taken) < 0 ? ckpt_nomem(err) : 0;
}

int ckpt_opening_take_missing(struct ckpt_opening *o, struct ckpt_err *err)
{
    const struct ckpt_base *base = o->shared->base;
    ckpt_cleanup(taking_release) struct taking t = {.o = o, .taken = json_array()};

    if (o->shared->opt->missing != CKPT_LACKS_FROM_BASE)
        return 0;
    if (!base || !base->cat)
        return ckpt_fail(err, CKPT_USAGE,
                         "option missing=base needs base=DIR, a model directory with weights");
    if (ckpt_is_quantized(base->cat))
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "option missing=base: the weights of base '%s' are quantised: export it "
                         "with the option dequantize, and give the result as base=",
                         ckpt_dir_path(base->dir));
    t.first_source = (uint32_t)o->cat->sources.len;
    if (!t.taken || !(t.names = reverse(o->base_names)))
        return ckpt_nomem(err);
    if (ckpt_catalog_add_sources(o->cat, base->cat, err) < 0)
        return -1;
    for (size_t i = 0; i < base->cat->tensors.len; i++) {
        const struct ckpt_tensor *of = &base->cat->tensors.ptr[i];
        const char *other = ckpt_json_str(t.names, of->name), *name = other ? other : of->name;
        if (!ckpt_catalog_find(o->cat, name) && !is_tied(o, name) && take(&t, of, name, err) < 0)
            return -1;
    }
    return tell(&t, err);
}
