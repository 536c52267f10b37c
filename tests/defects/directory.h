/* SPDX-License-Identifier: Apache-2.0 */
/* Tables of lies about a checkpoint directory: each is told to a sound one, which a reader then
 * opens. */
#ifndef CKPT_TESTS_DEFECTS_DIRECTORY_H
#define CKPT_TESTS_DEFECTS_DIRECTORY_H

#include "defects.h"

#include "base/mem.h"
#include "format/reader.h"
#include "model/opening.h"
#include "recipe/library/recipe.h"
#include "tensor/read.h"
#include "tree.h"

struct lie {
    const char *name;
    void (*make)(struct tree *t);
    enum ckpt_code code;
    const char *file, *needle;
};

/* Every byte of what was accepted can be read. */
static inline int read_all(const struct ckpt_catalog *cat, struct ckpt_err *err)
{
    for (size_t i = 0; i < cat->tensors.len; i++) {
        const struct ckpt_tensor *t = &cat->tensors.ptr[i];
        size_t len = (size_t)ckpt_tensor_nbytes(t);
        void *buf = malloc(len + 1);
        int result = ckpt_tensor_pread(t, NULL, buf, len, 0, err);
        free(buf);
        if (result < 0)
            return -1;
    }
    return 0;
}

static inline void tell(struct judge *j, const struct ckpt_reader *reader,
                        void (*sound)(struct tree *t), const struct lie *lie)
{
    struct ckpt_reader_options opt = {0};
    ckpt_cleanup(ckpt_recipes_freep) struct ckpt_recipes *recipes = NULL;
    struct ckpt_naming naming;
    struct ckpt_catalog *cat = NULL;
    struct ckpt_facts facts = {0};
    struct ckpt_dir *dir;
    struct ckpt_err err = {0};
    struct tree t;

    tree_open(&t);
    sound(&t);
    lie->make(&t);
    TREE_MUST(ckpt_recipes_load(NULL, &recipes, &err) == 0);
    naming = ckpt_naming_of(ckpt_recipes_types(recipes));
    opt.naming = &naming;
    TREE_MUST(ckpt_fdpool_new(8, &opt.pool, &err) == 0);
    TREE_MUST(ckpt_dir_open(t.path, CKPT_LINKS_BENEATH, &dir, &err) == 0);
    clock_t begin = clock();
    TREE_MUST(ckpt_catalog_new(&cat, &err) == 0);
    int result = reader->load(dir, &opt, &facts, cat, &err);
    if (result == 0)
        result = read_all(cat, &err);
    judge(j, lie->name, result, &err, lie->code, lie->file, lie->needle, begin);
    ckpt_facts_release(&facts);
    ckpt_catalog_free(cat);
    ckpt_dir_unref(dir);
    ckpt_fdpool_unref(opt.pool);
    tree_close(&t);
}

/* The whole program: argv[1], if given, is part of the names to try. */
static inline int tell_all(int argc, char **argv, const struct ckpt_reader *reader,
                           void (*sound)(struct tree *t), const struct lie *lies, size_t n)
{
    struct judge j = {.filter = argc > 1 ? argv[1] : NULL};

    for (size_t i = 0; i < n; i++)
        if (wanted(&j, lies[i].name))
            tell(&j, reader, sound, &lies[i]);
    return verdict(&j);
}

#endif
