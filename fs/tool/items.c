/* SPDX-License-Identifier: Apache-2.0 */
/* Listing the files and tensors of a view. */
#include "tool/items.h"

#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/sort.h"
#include "base/str.h"
#include "base/vec.h"
#include "common.h"

bool ckpt_is_weights(const char *path) { return ckpt_has_suffix(path, ".safetensors"); }

/* Takes the path; NULL: there was no memory for it. */
static int push(struct ckpt_items *items, char *path, struct ckpt_item item, struct ckpt_err *err)
{
    item.path = path;
    item.fd = -1;
    if (!path ||
        ckpt_vec_reserve_((void **)&items->item, &items->cap, items->n, 1, sizeof item) < 0) {
        free(path);
        return ckpt_nomem(err);
    }
    items->item[items->n++] = item;
    items->bytes += item.size - item.first;
    return 0;
}

static int walk(const struct ckpt_node *dir, const char *prefix, struct ckpt_items *items,
                struct ckpt_err *err)
{
    for (size_t i = 0, n = ckpt_node_children(dir); i < n; i++) {
        const struct ckpt_node *node = ckpt_node_child(dir, i);
        const struct ckpt_item file = {.size = ckpt_node_size(node), .file = node};
        char *path = ckpt_asprintf("%s%s%s", prefix, *prefix ? "/" : "", ckpt_node_name(node));
        const bool is_dir = path && ckpt_node_is_dir(node);
        const int rc = is_dir ? walk(node, path, items, err) : push(items, path, file, err);
        if (is_dir)
            free(path);
        if (rc < 0)
            return -1;
    }
    return 0;
}

static int weights_first(const void *a, const void *b)
{
    const struct ckpt_item *x = a, *y = b;
    int order = ckpt_is_weights(y->path) - ckpt_is_weights(x->path);
    return order ? order : strcmp(x->path, y->path);
}

int ckpt_items_files(const struct ckpt_view *view, struct ckpt_items *ret, struct ckpt_err *err)
{
    if (walk(ckpt_view_root(view), "", ret, err) < 0)
        return -1;
    ckpt_sort(ret->item, ret->n, weights_first);
    return 0;
}

bool ckpt_items_have_config(const struct ckpt_items *items)
{
    for (size_t i = 0; i < items->n; i++) {
        const char *slash = strrchr(items->item[i].path, '/');
        const char *name = slash ? slash + 1 : items->item[i].path;
        if (strcmp(name, "config.json") == 0 || strcmp(name, "adapter_config.json") == 0)
            return true;
    }
    return false;
}

void ckpt_items_keep(struct ckpt_items *items, bool weights)
{
    size_t n = 0;

    items->bytes = 0;
    for (size_t i = 0; i < items->n; i++) {
        const struct ckpt_item item = items->item[i];
        if ((ckpt_is_weights(item.path) || ckpt_has_suffix(item.path, ".safetensors.index.json")) !=
            weights) {
            free(item.path);
            continue;
        }
        items->bytes += item.size;
        items->item[n++] = item;
    }
    items->n = n;
}

int ckpt_items_tensors(const struct ckpt_view *view, struct ckpt_items *ret, struct ckpt_err *err)
{
    for (size_t i = 0, n = ckpt_view_tensors(view); i < n; i++) {
        const struct ckpt_tensor_info info = ckptfs_tensor(view, i);
        const struct ckpt_item tensor = {.size = info.nbytes, .tensor = i};
        if (push(ret, strdup(info.name), tensor, err) < 0)
            return -1;
    }
    return 0;
}

int ckpt_items_add_part(struct ckpt_items *items, const struct ckpt_item *of, uint64_t from,
                        uint64_t to, struct ckpt_err *err)
{
    const struct ckpt_item part = {.size = to, .file = of->file, .first = from, .start = from};

    return push(items, strdup(of->path), part, err);
}

int ckpt_items_add_name(struct ckpt_items *items, const char *path, uint64_t size,
                        struct ckpt_err *err)
{
    return push(items, strdup(path), (struct ckpt_item){.size = size}, err);
}

void ckpt_items_release(struct ckpt_items *items)
{
    for (size_t i = 0; i < items->n; i++) {
        free(items->item[i].path);
        (void)XXH3_freeState(items->item[i].state);
        ckpt_closep(&items->item[i].fd);
    }
    free(items->item);
    *items = (struct ckpt_items){0};
}

int ckpt_item_pread(struct ckpt_view *view, const struct ckpt_item *item, void *buf, size_t len,
                    uint64_t off, struct ckpt_err *err)
{
    size_t got = 0;

    if (!item->file)
        return ckpt_view_tensor_pread(view, item->tensor, buf, len, off, err);
    if (ckpt_node_pread(view, item->file, buf, len, off, &got, err) < 0)
        return -1;
    if (got != len)
        return ckpt_fail(err, CKPT_IO, "%s: %zu of %zu bytes at offset %llu", item->path, got, len,
                         (unsigned long long)off);
    return 0;
}
