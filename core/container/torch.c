/* SPDX-License-Identifier: Apache-2.0 */
/* Finding a tensor's bytes in a torch.save file. */
#include "container/torch.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/crc32.h"
#include "base/str.h"

enum { MAX_ITEM_PICKLE = 1 << 20, MAX_NESTING = 8 };

/* ---- globals ---- */

static const char *const spec_slots[] = {"mesh", "placements", "tensor_meta", "shard_order", NULL};
static const char *const mesh_slots[] = {
    "_coordinate_on_dim", "_rank", "mesh", "_rank_map", "_layout", "_mesh_dim_names", NULL};
static const char *const layout_slots[] = {"axes", "shape", "stride", NULL};
static const char *const flat_slots[] = {"shape", "stride", NULL};
static const char *const placement_slots[] = {"dim", "split_factor", NULL};
static const char *const local_slots[] = {"tensor", "metadata", NULL};
static const char *const shard_slots[] = {"shard_offsets", "shard_sizes", "placement", NULL};
static const char *const sharded_slots[] = {"shards_metadata", "size", "tensor_properties", NULL};

/* Pickles of protocol 2, which torch.save writes, have Python 2's module names. */
static const struct ckpt_pickle_global globals[] = {
    [CKPT_TORCH_TENSOR_V2] = {"torch._utils", "_rebuild_tensor_v2"},
    [CKPT_TORCH_TENSOR_V3] = {"torch._utils", "_rebuild_tensor_v3"},
    [CKPT_TORCH_PARAMETER] = {"torch._utils", "_rebuild_parameter"},
    [CKPT_TORCH_PARAMETER_STATE] = {"torch._utils", "_rebuild_parameter_with_state"},
    [CKPT_TORCH_DEVICE_TENSOR] = {"torch._utils", "_rebuild_device_tensor_from_cpu_tensor"},
    [CKPT_TORCH_SUBCLASS_V2] = {"torch._tensor", "_rebuild_from_type_v2"},
    [CKPT_TORCH_WRAPPER] = {"torch._utils", "_rebuild_wrapper_subclass"},
    [CKPT_TORCH_DTENSOR_SPEC] = {NULL, "DTensorSpec", CKPT_PICKLE_OBJ, spec_slots},
    [CKPT_TORCH_DEVICE_MESH] = {NULL, "DeviceMesh", CKPT_PICKLE_OBJ, mesh_slots},
    [CKPT_TORCH_MESH_LAYOUT] = {NULL, "_MeshLayout", CKPT_PICKLE_OBJ, layout_slots},
    [CKPT_TORCH_FLAT_LAYOUT] = {NULL, "_FlatLayout", CKPT_PICKLE_OBJ, flat_slots},
    [CKPT_TORCH_SHARD] = {"torch.distributed.tensor.placement_types", "Shard", CKPT_PICKLE_OBJ,
                          placement_slots},
    [CKPT_TORCH_STRIDED_SHARD] = {"torch.distributed.tensor.placement_types", "_StridedShard",
                                  CKPT_PICKLE_OBJ, placement_slots},
    [CKPT_TORCH_REPLICATE] = {"torch.distributed.tensor.placement_types", "Replicate",
                              CKPT_PICKLE_OBJ, placement_slots},
    [CKPT_TORCH_PARTIAL] = {"torch.distributed.tensor.placement_types", "Partial", CKPT_PICKLE_OBJ,
                            placement_slots},
    [CKPT_TORCH_LOCAL_SHARD] = {"torch.distributed._shard.sharded_tensor.shard", "Shard",
                                CKPT_PICKLE_OBJ, local_slots},
    [CKPT_TORCH_SHARD_METADATA] = {NULL, "ShardMetadata", CKPT_PICKLE_OBJ, shard_slots},
    [CKPT_TORCH_SHARDED_METADATA] = {NULL, "ShardedTensorMetadata", CKPT_PICKLE_OBJ, sharded_slots},
    [CKPT_TORCH_GET_LAYOUT] = {"torch.serialization", "_get_layout"},
    [CKPT_TORCH_BYTES] = {"_codecs", "encode"}, /* bytes, and sets, in protocol 2 */
    [CKPT_TORCH_SET] = {"__builtin__", "set"},
    [CKPT_TORCH_NAMESPACE] = {"argparse", "Namespace"},
    [CKPT_TORCH_SIMPLE_NAMESPACE] = {"types", "SimpleNamespace"},
    {"torch.distributed._tensor.placement_types", "Shard", CKPT_PICKLE_OBJ, placement_slots},
    {"torch.distributed._tensor.placement_types", "_StridedShard", CKPT_PICKLE_OBJ,
     placement_slots},
    {"torch.distributed._tensor.placement_types", "Replicate", CKPT_PICKLE_OBJ, placement_slots},
    {NULL, "ShardOrderEntry"},
    {"torch", "Size", CKPT_PICKLE_SIZE},
    {"collections", "OrderedDict", CKPT_PICKLE_DICT},
    {NULL},
};

const struct ckpt_pickle_rules ckpt_torch_rules = {globals, true};

bool ckpt_torch_is_data(const struct ckpt_pickle *p, ckpt_pv v)
{
    const int rule = ckpt_pv_kind(v) == CKPT_PV_OBJ ? ckpt_pv_rule(p, v) : CKPT_PICKLE_OTHER;

    return ckpt_pv_kind(v) != CKPT_PV_OBJ ||
           (rule >= CKPT_TORCH_BYTES && rule <= CKPT_TORCH_SIMPLE_NAMESPACE);
}

bool ckpt_torch_is_tensor(const struct ckpt_pickle *p, ckpt_pv v)
{
    return !ckpt_torch_is_data(p, v) && ckpt_pv_rule(p, v) >= 0;
}

bool ckpt_torch_dtype(const struct ckpt_pickle *p, ckpt_pv v, enum ckpt_dtype *ret)
{
    const char *name = ckpt_pv_name(p, v);
    return ckpt_pv_kind(v) == CKPT_PV_GLOBAL && strcmp(ckpt_pv_module(p, v), "torch") == 0 &&
           ckpt_dtype_parse(name, strlen(name), ret) &&
           strcmp(name, ckpt_dtype_torch_name(*ret)) == 0;
}

/* ---- layouts ---- */

static const struct {
    const char *name;
    enum ckpt_dtype dtype;
} storages[] = {
    {"DoubleStorage", CKPT_F64},    {"FloatStorage", CKPT_F32},        {"HalfStorage", CKPT_F16},
    {"BFloat16Storage", CKPT_BF16}, {"LongStorage", CKPT_I64},         {"IntStorage", CKPT_I32},
    {"ShortStorage", CKPT_I16},     {"CharStorage", CKPT_I8},          {"ByteStorage", CKPT_U8},
    {"BoolStorage", CKPT_BOOL},     {"ComplexFloatStorage", CKPT_C64},
};

static bool storage_dtype(const char *name, enum ckpt_dtype *ret)
{
    for (size_t i = 0; i < sizeof storages / sizeof storages[0]; i++)
        if (strcmp(storages[i].name, name) == 0) {
            *ret = storages[i].dtype;
            return true;
        }
    return false;
}

const char *ckpt_torch_storage_name(enum ckpt_dtype dtype)
{
    for (size_t i = 0; i < sizeof storages / sizeof storages[0]; i++)
        if (storages[i].dtype == dtype)
            return storages[i].name;
    return NULL;
}

static int fail_dtype(const struct ckpt_pickle *p, ckpt_pv v, struct ckpt_err *err)
{
    static const char suffix[] = "Storage";
    const char *name = ckpt_pv_name(p, v);
    char text[64] = "";
    size_t len = strlen(name);

    if (!ckpt_has_suffix(name, suffix) || len >= sizeof text)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "dtype %s.%s has no name in safetensors and is not supported",
                         ckpt_pv_module(p, v), name);
    memcpy(text, name, len - (sizeof suffix - 1));
    bool cdouble = strcmp(text, "ComplexDouble") == 0;
    return ckpt_fail(err, CKPT_UNSUPPORTED,
                     "dtype %s (%s.%s) has no name in safetensors and is not supported",
                     cdouble ? "complex128" : text, ckpt_pv_module(p, v), name);
}

/* ("storage", class, key, location, numel) */
static int parse_storage(const struct ckpt_pickle *p, ckpt_pv v, ckpt_pv dtype,
                         struct ckpt_torch_layout *l, struct ckpt_err *err)
{
    ckpt_pv args = ckpt_pv_slot(p, v, 0), class = ckpt_pv_at(p, args, 1);
    const char *tag = ckpt_pv_str(p, ckpt_pv_at(p, args, 0));
    const char *key = ckpt_pv_str(p, ckpt_pv_at(p, args, 2));

    if (ckpt_pv_rule(p, v) != CKPT_PICKLE_PERSID || !tag || strcmp(tag, "storage") != 0 || !key ||
        ckpt_pv_kind(class) != CKPT_PV_GLOBAL)
        return ckpt_fail(err, CKPT_FORMAT, "a tensor has no storage");
    if (strlen(key) >= sizeof l->key)
        return ckpt_fail(err, CKPT_LIMIT, "the key of a storage has %zu characters", strlen(key));
    (void)strcpy(l->key, key);
    if (ckpt_pv_kind(dtype) != CKPT_PV_ABSENT)
        return ckpt_torch_dtype(p, dtype, &l->dtype) ? 0 : fail_dtype(p, dtype, err);
    return storage_dtype(ckpt_pv_name(p, class), &l->dtype) ? 0 : fail_dtype(p, class, err);
}

static int parse_sizes(const struct ckpt_pickle *p, ckpt_pv size, ckpt_pv stride,
                       struct ckpt_torch_layout *l, struct ckpt_err *err)
{
    size_t rank, nstride;
    const int64_t *n = ckpt_pv_ints(p, size, &rank), *s = ckpt_pv_ints(p, stride, &nstride);

    if (!n || !s || rank != nstride)
        return ckpt_fail(err, CKPT_FORMAT, "a tensor's size and stride are not tuples of integers");
    if (rank > CKPT_MAX_RANK)
        return ckpt_fail(err, CKPT_LIMIT, "%zu dimensions, at most %d are supported", rank,
                         CKPT_MAX_RANK);
    l->rank = (uint32_t)rank;
    for (size_t d = 0; d < rank; d++) {
        if (n[d] < 0 || s[d] < 0)
            return ckpt_fail(err, CKPT_FORMAT, "a tensor has size %" PRId64 ", stride %" PRId64,
                             n[d], s[d]);
        l->dim[d] = (uint64_t)n[d];
        l->stride[d] = (uint64_t)s[d];
    }
    return 0;
}

/* Bytes of the storage up to the last element. */
static int count_bytes(struct ckpt_torch_layout *l, struct ckpt_err *err)
{
    uint64_t last = l->first, numel;

    l->nbyte = 0;
    if (!ckpt_shape_numel(l->dim, l->rank, &numel))
        return ckpt_fail(err, CKPT_FORMAT, "a tensor is larger than any file");
    if (numel == 0)
        return 0;
    for (uint32_t d = 0; d < l->rank; d++) {
        uint64_t more;
        if (ckd_mul(&more, l->dim[d] - 1, l->stride[d]) || ckd_add(&last, last, more))
            return ckpt_fail(err, CKPT_FORMAT, "a tensor is larger than any file");
    }
    if (ckd_add(&last, last, UINT64_C(1)) ||
        ckd_mul(&l->nbyte, last, (uint64_t)ckpt_dtype_size(l->dtype)))
        return ckpt_fail(err, CKPT_FORMAT, "a tensor is larger than any file");
    return 0;
}

/* {"conj": True}: the bytes are not the values. */
static int check_bits(const struct ckpt_pickle *p, ckpt_pv meta, struct ckpt_err *err)
{
    for (size_t i = 0; i < ckpt_pv_npair(p, meta); i++) {
        const char *key = ckpt_pv_str(p, ckpt_pv_key(p, meta, i));
        ckpt_pv value = ckpt_pv_value(p, meta, i);
        if (ckpt_pv_kind(value) != CKPT_PV_BOOL || ckpt_pv_id(value))
            return ckpt_fail(err, CKPT_UNSUPPORTED,
                             "it was saved as a lazy view ('%s' is set), so that the stored bytes "
                             "are not its values",
                             key ? key : "?");
    }
    return 0;
}

/* (storage, offset, size, stride, requires_grad, hooks[, dtype][, bits]) */
static int parse_tensor(const struct ckpt_pickle *p, ckpt_pv v, ckpt_pv args, bool v3,
                        struct ckpt_torch_layout *l, struct ckpt_err *err)
{
    ckpt_pv none = 0;
    int64_t first;

    if (!ckpt_pv_int(ckpt_pv_at(p, args, 1), &first) || first < 0 ||
        ckpt_pv_len(p, args) < (v3 ? 7 : 6))
        return ckpt_fail(err, CKPT_FORMAT, "arguments of %s.%s are not a tensor's",
                         ckpt_pv_module(p, v), ckpt_pv_name(p, v));
    l->first = (uint64_t)first;
    if (parse_storage(p, ckpt_pv_at(p, args, 0), v3 ? ckpt_pv_at(p, args, 6) : none, l, err) < 0 ||
        parse_sizes(p, ckpt_pv_at(p, args, 2), ckpt_pv_at(p, args, 3), l, err) < 0 ||
        check_bits(p, ckpt_pv_at(p, args, v3 ? 7 : 6), err) < 0)
        return -1;
    return count_bytes(l, err);
}

/* (function, class, its arguments, state): a plain tensor that somebody gave attributes. */
static int parse_plain_subclass(const struct ckpt_pickle *p, ckpt_pv v, struct ckpt_torch_layout *l,
                                struct ckpt_err *err)
{
    const ckpt_pv call = ckpt_pv_slot(p, v, 0), class = ckpt_pv_at(p, call, 1);
    const int rule = ckpt_pv_rule(p, ckpt_pv_at(p, call, 0));

    if ((rule != CKPT_TORCH_TENSOR_V2 && rule != CKPT_TORCH_TENSOR_V3) ||
        strcmp(ckpt_pv_module(p, class), "torch") != 0 ||
        strcmp(ckpt_pv_name(p, class), "Tensor") != 0)
        return ckpt_fail(err, CKPT_UNSUPPORTED, "a tensor subclass (%s) is not supported",
                         ckpt_pv_text(p, class).text);
    return parse_tensor(p, v, ckpt_pv_at(p, call, 2), rule == CKPT_TORCH_TENSOR_V3, l, err);
}

int ckpt_torch_layout_of(const struct ckpt_pickle *p, ckpt_pv v, struct ckpt_torch_layout *ret,
                         struct ckpt_err *err)
{
    for (int i = 0; i < MAX_NESTING; i++) {
        switch (ckpt_pv_kind(v) == CKPT_PV_OBJ ? ckpt_pv_rule(p, v) : CKPT_PICKLE_OTHER) {
        case CKPT_TORCH_TENSOR_V2:
            return parse_tensor(p, v, ckpt_pv_slot(p, v, 0), false, ret, err);
        case CKPT_TORCH_TENSOR_V3:
            return parse_tensor(p, v, ckpt_pv_slot(p, v, 0), true, ret, err);
        case CKPT_TORCH_PARAMETER:
        case CKPT_TORCH_PARAMETER_STATE:
        case CKPT_TORCH_DEVICE_TENSOR:
            v = ckpt_pv_at(p, ckpt_pv_slot(p, v, 0), 0);
            continue;
        case CKPT_TORCH_SUBCLASS_V2:
            return parse_plain_subclass(p, v, ret, err);
        default:
            return ckpt_fail(err, CKPT_UNSUPPORTED, "not a plain tensor but %s",
                             ckpt_pv_text(p, v).text);
        }
    }
    return ckpt_fail(err, CKPT_FORMAT, "a tensor wrapped more than %d times", MAX_NESTING);
}

/* ---- the archive ---- */

static bool ends_with(const struct ckpt_zip_entry *e, const char *suffix)
{
    size_t len = strlen(suffix);
    return e->name_len >= len && memcmp(e->name + e->name_len - len, suffix, len) == 0;
}

/* The member PREFIX/name, or NULL. */
static const struct ckpt_zip_entry *member(const struct ckpt_torch *t, const char *name)
{
    size_t len = strlen(name);

    for (size_t i = 0; i < t->zip.nentry; i++) {
        const struct ckpt_zip_entry *e = &t->zip.entry[i];
        if (e->name_len == t->prefix_len + len && memcmp(e->name, t->prefix, t->prefix_len) == 0 &&
            memcmp(e->name + t->prefix_len, name, len) == 0)
            return e;
    }
    return NULL;
}

static int check_byteorder(const struct ckpt_torch *t, struct ckpt_err *err)
{
    const struct ckpt_zip_entry *e = member(t, "byteorder");
    char text[7] = "";
    uint64_t off;

    if (!e) /* torch < 2.1 */
        return 0;
    if (ckpt_zip_data(&t->zip, e, &off, err) < 0)
        return -1;
    if (e->len < sizeof text && ckpt_zip_pread(&t->zip, text, (size_t)e->len, off, err) < 0)
        return -1;
    return strcmp(text, "little") == 0
               ? 0
               : ckpt_fail(err, CKPT_UNSUPPORTED, "byte order '%s' is not supported, only 'little'",
                           text);
}

/* Find the member data.pkl with the shortest path, because another one may be in a subdirectory. */
static int find_pickle(struct ckpt_torch *t, struct ckpt_err *err)
{
    static const char name[] = "data.pkl";
    const struct ckpt_zip_entry *pkl = NULL;

    for (size_t i = 0; i < t->zip.nentry; i++) {
        const struct ckpt_zip_entry *e = &t->zip.entry[i];
        if (ends_with(e, "/data.pkl") && (!pkl || e->name_len < pkl->name_len))
            pkl = e;
    }
    if (!pkl)
        return ckpt_fail(err, CKPT_FORMAT, "the archive has no %s: not a torch.save file", name);
    t->prefix = pkl->name;
    t->prefix_len = pkl->name_len - (sizeof name - 1);
    t->pickle = pkl;
    return ckpt_zip_data(&t->zip, pkl, &t->pickle_off, err);
}

/* Is it the format that torch.save wrote before 1.6, and may still: pickles one after the other,
 * the first of which is a number? */
static bool is_old_format(struct ckpt_source *s, uint64_t off, uint64_t len)
{
    static const unsigned char magic[] = {0x80, 0x02, 0x8a, 0x0a};
    unsigned char head[sizeof magic];

    return len >= sizeof head && ckpt_source_pread(s, head, sizeof head, off, NULL) == 0 &&
           memcmp(head, magic, sizeof magic) == 0;
}

int ckpt_torch_open(struct ckpt_source *s, uint64_t off, uint64_t len, struct ckpt_torch *ret,
                    struct ckpt_err *err)
{
    struct ckpt_err e = {0};

    if (ckpt_zip_open(s, off, len, &ret->zip, &e) < 0)
        return is_old_format(s, off, len)
                   ? ckpt_fail(err, CKPT_UNSUPPORTED,
                               "it has torch.save's format of before 1.6, not a zip archive: load "
                               "and save it once with a newer torch")
                   : ckpt_err_move(err, &e);
    if (find_pickle(ret, err) < 0 || check_byteorder(ret, err) < 0) {
        ckpt_torch_release(ret);
        return -1;
    }
    return 0;
}

void ckpt_torch_release(struct ckpt_torch *t) { ckpt_zip_release(&t->zip); }

int ckpt_torch_pickle(const struct ckpt_torch *t, struct ckpt_pickle *ret, struct ckpt_err *err)
{
    uint32_t crc;

    if (ckpt_pickle_read(t->zip.source, t->pickle_off, t->pickle->len, &ckpt_torch_rules, &crc, ret,
                         err) < 0)
        return -1;
    if (ckpt_zip_check(t->pickle, crc, err) < 0) {
        ckpt_pickle_release(ret);
        return -1;
    }
    return 0;
}

/* Find the byte in the source where the layout's storage begins; it must be long enough. */
static int find_storage(const struct ckpt_torch *t, const struct ckpt_torch_layout *l,
                        uint64_t *ret_off, struct ckpt_err *err)
{
    char name[sizeof "data/" + sizeof l->key] = "data/";
    const struct ckpt_zip_entry *e = member(t, strcat(name, l->key));

    if (!e)
        return ckpt_fail(err, CKPT_FORMAT, "storage '%s' is not in the archive", l->key);
    if (e->len < l->nbyte)
        return ckpt_fail(err, CKPT_FORMAT,
                         "storage '%s' has %" PRIu64 " bytes, its tensor needs %" PRIu64, l->key,
                         e->len, l->nbyte);
    return ckpt_zip_data(&t->zip, e, ret_off, err);
}

int ckpt_torch_locate(const struct ckpt_torch *t, const struct ckpt_torch_layout *l,
                      struct ckpt_torch_tensor *ret, struct ckpt_err *err)
{
    const size_t esize = ckpt_dtype_size(l->dtype);
    uint64_t dense[CKPT_MAX_RANK];

    *ret = (struct ckpt_torch_tensor){.dtype = l->dtype, .rank = l->rank, .contiguous = true};
    memcpy(ret->dim, l->dim, l->rank * sizeof *l->dim);
    ckpt_shape_strides(l->dim, l->rank, dense);
    (void)ckpt_shape_numel(l->dim, l->rank, &ret->numel);
    for (uint32_t d = 0; d < l->rank; d++) {
        ret->contiguous &= l->dim[d] == 1 || l->stride[d] == dense[d];
        ret->stride[d] = l->stride[d] * esize;
    }
    if (ret->numel == 0)
        return 0;
    if (find_storage(t, l, &ret->off, err) < 0)
        return -1;
    ret->off += l->first * esize;
    return 0;
}

/* ---- one tensor ---- */

void ckpt_torch_memo_release(struct ckpt_torch_memo *memo)
{
    free(memo->pickle);
    *memo = (struct ckpt_torch_memo){0};
}

static int understand(struct ckpt_torch_memo *memo, unsigned char **pickle, size_t len,
                      struct ckpt_err *err)
{
    struct ckpt_torch_layout layout = {0};
    struct ckpt_pickle p;

    if (memo->pickle && memo->len == len && memcmp(memo->pickle, *pickle, len) == 0)
        return 0;
    if (ckpt_pickle_parse(*pickle, len, &ckpt_torch_rules, &p, err) < 0)
        return ckpt_err_in(err, "data.pkl");
    int result = ckpt_torch_layout_of(&p, p.root, &layout, err);
    ckpt_pickle_release(&p);
    if (result < 0)
        return -1;
    free(memo->pickle);
    *memo = (struct ckpt_torch_memo){ckpt_steal(pickle), len, layout};
    return 0;
}

static int read_item(const struct ckpt_torch *t, struct ckpt_torch_memo *memo,
                     struct ckpt_torch_tensor *ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) unsigned char *pickle = NULL;
    size_t len = (size_t)t->pickle->len;

    if (t->pickle->len > MAX_ITEM_PICKLE)
        return ckpt_fail(err, CKPT_LIMIT, "data.pkl has %" PRIu64 " bytes, too many for one tensor",
                         t->pickle->len);
    if (!(pickle = malloc(len + 1)))
        return ckpt_nomem(err);
    if (ckpt_zip_pread(&t->zip, pickle, len, t->pickle_off, err) < 0 ||
        ckpt_zip_check(t->pickle, ckpt_crc32(0, pickle, len), err) < 0 ||
        understand(memo, &pickle, len, err) < 0)
        return -1;
    return ckpt_torch_locate(t, &memo->layout, ret, err);
}

int ckpt_torch_item(struct ckpt_source *s, uint64_t off, uint64_t len, struct ckpt_torch_memo *memo,
                    struct ckpt_torch_tensor *ret, struct ckpt_err *err)
{
    struct ckpt_torch t;

    if (ckpt_torch_open(s, off, len, &t, err) < 0)
        return -1;
    int result = read_item(&t, memo, ret, err);
    ckpt_torch_release(&t);
    return result;
}
