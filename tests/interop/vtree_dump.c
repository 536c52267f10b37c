/* SPDX-License-Identifier: Apache-2.0 */
/* vtree_dump SPEC DATA OUTDIR: lay out tensors whose bytes lie end to end in DATA and write every
 * file of the view. SPEC is JSON:
 *
 *     {"tensors": [{"name", "dtype", "shape", "block"?, "cast"?}...],
 *      "config"?, "weight_map"?, "max_shard_size"?, "sort"?, "chunk"?}
 *
 * generation_config.json is derived from config. Reads are `chunk` bytes, so that they cut
 * everything somewhere. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../unit/made_map.h"
#include "base/mem.h"
#include "model/opening.h"
#include "tensor/value.h"
#include "view/view.h"

static struct ckpt_err err;

static void die(void)
{
    (void)fprintf(stderr, "vtree_dump: %s\n", err.text);
    exit(1);
}

static json_t *load(const char *path)
{
    json_error_t je;
    json_t *j = json_load_file(path, 0, &je);

    if (!j) {
        (void)fprintf(stderr, "vtree_dump: %s: %s\n", path, je.text);
        exit(1);
    }
    return j;
}

static uint64_t add_tensor(struct ckpt_catalog *cat, const json_t *spec, uint32_t source,
                           uint64_t at)
{
    const json_t *shape = json_object_get(spec, "shape");
    const char *dtype_name = ckpt_json_str(spec, "dtype"), *cast = ckpt_json_str(spec, "cast");
    uint64_t dim[CKPT_MAX_RANK] = {0}, stride[CKPT_MAX_RANK] = {0};
    struct ckpt_box box = {.rank = (uint32_t)json_array_size(shape)};
    struct ckpt_piece_draft piece;
    enum ckpt_dtype dtype = CKPT_U8;
    size_t index;

    if (!ckpt_dtype_parse(dtype_name, strlen(dtype_name), &dtype))
        exit(2);
    for (uint32_t d = 0; d < box.rank; d++)
        dim[d] = box.n[d] = (uint64_t)json_integer_value(json_array_get(shape, d));
    ckpt_shape_strides(dim, box.rank, stride);
    for (uint32_t d = 0; d < box.rank; d++)
        stride[d] *= ckpt_dtype_size(dtype);
    if (ckpt_catalog_add(cat, ckpt_json_str(spec, "name"), dtype, dim, box.rank, &index, &err) < 0)
        die();
    struct ckpt_tensor *t = &cat->tensors.ptr[index];
    uint64_t nbytes = ckpt_tensor_nbytes(t);
    t->block = (uint32_t)json_integer_value(json_object_get(spec, "block"));
    ckpt_piece_from_box(dim, &box, source, at, stride, &piece);
    if (nbytes && ckpt_catalog_set_pieces(cat, index, &piece, 1, &err) < 0)
        die();
    if (cast && (!ckpt_dtype_parse(cast, strlen(cast), &dtype) ||
                 ckpt_value_cast(cat, index, dtype, &err) < 0))
        die();
    return at + nbytes;
}

static void write_file(const struct ckpt_vnode *node, const char *path, size_t chunk)
{
    FILE *f = fopen(path, "wb");
    void *buf = malloc(chunk);
    uint64_t off = 0;
    size_t n;

    if (!f || !buf)
        exit(2);
    do {
        if (ckpt_vfile_pread(NULL, node, buf, chunk, off, &n, &err) < 0)
            die();
        if (fwrite(buf, 1, n, f) != n)
            exit(2);
        off += n;
    } while (n == chunk);
    if (off != node->size || fclose(f) != 0)
        exit(2);
    free(buf);
}

static void write_dir(const struct ckpt_catalog *cat, const struct ckpt_vnode *dir,
                      const char *path, size_t chunk)
{
    if (mkdir(path, 0777) < 0 && errno != EEXIST)
        exit(2);
    for (size_t i = 0; i < dir->nchild; i++) {
        char below[4096];
        (void)snprintf(below, sizeof below, "%s/%s", path, dir->child[i]->name);
        if (dir->child[i]->kind == CKPT_NODE_DIR)
            write_dir(cat, dir->child[i], below, chunk);
        else
            write_file(dir->child[i], below, chunk);
    }
}

/* The bytes of a small file as a source. */
static struct ckpt_source *source_of(const char *path)
{
    struct ckpt_source *s = NULL;
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    char *data;

    if (fd < 0 || fstat(fd, &st) < 0 || !(data = malloc((size_t)st.st_size + 1)) ||
        read(fd, data, (size_t)st.st_size) != st.st_size)
        exit(2);
    if (ckpt_source_mem_new(path, data, (size_t)st.st_size, &s, &err) < 0)
        die();
    free(data);
    (void)close(fd);
    return s;
}

int main(int argc, char **argv)
{
    struct ckpt_catalog *cat = NULL;
    struct ckpt_vtree *tree = NULL;
    json_t *generation = NULL, *tensor;
    uint64_t at = 0;
    size_t i;

    if (argc != 4)
        return 2;
    json_t *spec = load(argv[1]);
    struct ckpt_source *data = source_of(argv[2]);
    struct ckpt_vtree_options opt = {.config = json_object_get(spec, "config"),
                                     .weight_map =
                                         made_map(json_incref(json_object_get(spec, "weight_map"))),
                                     .sort = ckpt_json_bool(spec, "sort", false)};
    struct ckpt_recipes *recipes = NULL;
    uint64_t chunk = 65537;
    (void)ckpt_json_u64(spec, "max_shard_size", &opt.max_shard_size);
    (void)ckpt_json_u64(spec, "chunk", &chunk);
    if (ckpt_catalog_new(&cat, &err) < 0)
        die();
    uint32_t source = ckpt_catalog_add_source(cat, data, &err);
    json_array_foreach(json_object_get(spec, "tensors"), i, tensor)
        at = add_tensor(cat, tensor, source, at);
    if (ckpt_recipes_load(NULL, &recipes, &err) < 0 ||
        (opt.config &&
         ckpt_generation_config(opt.config, ckpt_types_any(ckpt_recipes_types(recipes)),
                                &generation, &err) < 0))
        die();
    opt.generation = generation;
    if (ckpt_vtree_new(cat, &opt, &tree, &err) < 0)
        die();
    write_dir(cat, ckpt_vtree_root(tree), argv[3], (size_t)chunk);
    ckpt_vtree_free(tree);
    ckpt_catalog_free(cat);
    ckpt_source_unref(data);
    json_decref(generation);
    ckpt_recipes_free(recipes);
    json_decref(spec);
    return 0;
}
