/* SPDX-License-Identifier: Apache-2.0 */
/* The table of element types. */
#include "tensor/dtype.h"

#include <assert.h>
#include <string.h>

enum { FLOAT = 1, CASTABLE = 2 };

static const struct {
    const char *name, *torch;
    const char *alias;               /* torch's short or old name, or NULL */
    unsigned char size, flags, pack; /* pack 0: 1 */
} types[CKPT_NDTYPE] = {
    [CKPT_OPAQUE] = {"(opaque)", "(opaque)", NULL, 1, 0, 0},
    [CKPT_BOOL] = {"BOOL", "bool", NULL, 1, 0},
    [CKPT_F4] = {"F4", "float4_e2m1fn_x2", NULL, 1, FLOAT, 2},
    [CKPT_F6_E2M3] = {"F6_E2M3", "float6_e2m3fn", NULL, 3, FLOAT, 4}, /* torch has none */
    [CKPT_F6_E3M2] = {"F6_E3M2", "float6_e3m2fn", NULL, 3, FLOAT, 4},
    [CKPT_U8] = {"U8", "uint8", NULL, 1, 0},
    [CKPT_I8] = {"I8", "int8", NULL, 1, 0},
    [CKPT_F8_E5M2] = {"F8_E5M2", "float8_e5m2", NULL, 1, FLOAT},
    [CKPT_F8_E4M3] = {"F8_E4M3", "float8_e4m3fn", NULL, 1, FLOAT},
    [CKPT_F8_E8M0] = {"F8_E8M0", "float8_e8m0fnu", NULL, 1, FLOAT},
    [CKPT_F8_E4M3FNUZ] = {"F8_E4M3FNUZ", "float8_e4m3fnuz", NULL, 1, FLOAT},
    [CKPT_F8_E5M2FNUZ] = {"F8_E5M2FNUZ", "float8_e5m2fnuz", NULL, 1, FLOAT},
    [CKPT_I16] = {"I16", "int16", "short", 2, 0},
    [CKPT_U16] = {"U16", "uint16", NULL, 2, 0},
    [CKPT_F16] = {"F16", "float16", "half", 2, FLOAT | CASTABLE},
    [CKPT_BF16] = {"BF16", "bfloat16", NULL, 2, FLOAT | CASTABLE},
    [CKPT_I32] = {"I32", "int32", "int", 4, 0},
    [CKPT_U32] = {"U32", "uint32", NULL, 4, 0},
    [CKPT_F32] = {"F32", "float32", "float", 4, FLOAT | CASTABLE},
    [CKPT_C64] = {"C64", "complex64", "cfloat", 8, 0},
    [CKPT_F64] = {"F64", "float64", "double", 8, FLOAT | CASTABLE},
    [CKPT_I64] = {"I64", "int64", "long", 8, 0},
    [CKPT_U64] = {"U64", "uint64", NULL, 8, 0},
};

size_t ckpt_dtype_size(enum ckpt_dtype t)
{
    assert((unsigned)t < CKPT_NDTYPE);
    return types[t].size;
}

unsigned ckpt_dtype_pack(enum ckpt_dtype t)
{
    assert((unsigned)t < CKPT_NDTYPE);
    return t == CKPT_OPAQUE ? 0 : types[t].pack ? types[t].pack : 1;
}

const char *ckpt_dtype_name(enum ckpt_dtype t)
{
    assert((unsigned)t < CKPT_NDTYPE);
    return types[t].name;
}

const char *ckpt_dtype_torch_name(enum ckpt_dtype t)
{
    assert((unsigned)t < CKPT_NDTYPE);
    return types[t].torch;
}

static bool equals(const char *want, const char *name, size_t len)
{
    return want && strlen(want) == len && memcmp(want, name, len) == 0;
}

bool ckpt_dtype_parse(const char *name, size_t len, enum ckpt_dtype *ret)
{
    static const char prefix[] = "torch.";
    const size_t plen = sizeof prefix - 1;
    bool torch = len > plen && memcmp(name, prefix, plen) == 0;

    if (torch) {
        name += plen;
        len -= plen;
    }
    for (int t = CKPT_OPAQUE + 1; t < CKPT_NDTYPE; t++) {
        if (equals(types[t].torch, name, len) || equals(types[t].alias, name, len) ||
            (!torch && equals(types[t].name, name, len))) {
            *ret = (enum ckpt_dtype)t;
            return true;
        }
    }
    return false;
}

bool ckpt_dtype_is_castable(enum ckpt_dtype t)
{
    return (unsigned)t < CKPT_NDTYPE && types[t].flags & CASTABLE;
}

bool ckpt_dtype_is_float(enum ckpt_dtype t)
{
    return (unsigned)t < CKPT_NDTYPE && types[t].flags & FLOAT;
}
