/* SPDX-License-Identifier: Apache-2.0 */
/* A reader of a made-up format, whole: this file, and one line of format/readers.def.
 *
 *     newest.toy                       the name of the last step that was saved
 *     saves/best                       a link to a step
 *     saves/step_N/net/weights.toy     "NAME ROWS COLS\n", padded with blanks to 64 bytes, and F32
 *     saves/step_N/net/done.toy        written when the weights are
 *     saves/step_N/net/words/          config.json and the tokenizer */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "container/config.h"
#include "format/reader.h"
#include "io/source.h"
#include "tensor/box.h"

#define WEIGHTS "weights.toy"
#define DONE "done.toy"
#define WORDS "words"

enum { HEADER_BYTES = 64 };

static enum ckpt_evidence toy_probe(struct ckpt_dir *dir)
{
    return ckpt_dir_has_file(dir, WEIGHTS) ? CKPT_BY_NAMES : CKPT_NOT_MINE;
}

static bool toy_finished(struct ckpt_dir *dir, const char *name, const char *latest)
{
    (void)name, (void)latest;
    return ckpt_dir_has_file(dir, DONE);
}

static char *toy_latest(struct ckpt_dir *run)
{
    char *text;
    size_t len;

    return ckpt_dir_read_file(run, "newest.toy", 64, &text, &len, NULL) < 0 ? NULL : text;
}

static int add_tensor(struct ckpt_source *source, const char *header, struct ckpt_catalog *cat,
                      struct ckpt_err *err)
{
    struct ckpt_box box = {.rank = 2};
    struct ckpt_piece_draft piece;
    unsigned rows, cols;
    char name[HEADER_BYTES];
    size_t index;

    if (sscanf(header, "%63s %4u %4u", name, &rows, &cols) != 3)
        return ckpt_fail(err, CKPT_FORMAT, "'" WEIGHTS "' does not begin with NAME ROWS COLS");
    const uint64_t dim[] = {rows, cols}, stride[] = {(uint64_t)cols * 4, 4};
    memcpy(box.n, dim, sizeof dim);
    const uint32_t at = ckpt_catalog_add_source(cat, source, err);
    if (at == UINT32_MAX || ckpt_catalog_add(cat, name, CKPT_F32, dim, 2, &index, err) < 0)
        return -1;
    ckpt_piece_from_box(dim, &box, at, HEADER_BYTES, stride, &piece);
    return ckpt_catalog_set_pieces(cat, index, &piece, 1, err);
}

static int read_weights(struct ckpt_dir *dir, struct ckpt_fdpool *pool, struct ckpt_catalog *cat,
                        struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_source_unrefp) struct ckpt_source *source = NULL;
    char header[HEADER_BYTES + 1] = "";

    if (ckpt_source_file_new(dir, WEIGHTS, pool, &source, err) < 0 ||
        ckpt_source_pread(source, header, HEADER_BYTES, 0, err) < 0)
        return -1;
    return add_tensor(source, header, cat, err);
}

static int toy_load(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                    struct ckpt_facts *facts, struct ckpt_catalog *cat, struct ckpt_err *err)
{
    facts->names = CKPT_NAMES_HUB;
    facts->files = CKPT_FILES_CONFIG;
    facts->files_at = WORDS;
    if (read_weights(dir, opt->pool, cat, err) < 0 ||
        ckpt_config_read_if(dir, WORDS "/config.json", CKPT_CONFIG_MAX_BYTES, &cat->config, err) <
            0)
        return -1;
    return json_object_set_new(cat->about, "format", json_string("toy")) < 0 ? ckpt_nomem(err) : 0;
}

static const char *const markers[] = {DONE, NULL};
static const char *const rewrites[] = {DONE, NULL};
static const char *const inner_models[] = {"net", NULL};
static const char *const inner_runs[] = {"saves", NULL};
static const char *const links[] = {"best", NULL};

const struct ckpt_reader ckpt_reader_toy = {
    .name = "toy",
    .probe = toy_probe,
    .load = toy_load,
    .latest = toy_latest,
    .finished = toy_finished,
    .markers = markers,
    .rewrites = rewrites,
    .inner_models = inner_models,
    .inner_runs = inner_runs,
    .links = links,
};
