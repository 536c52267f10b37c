/* SPDX-License-Identifier: Apache-2.0 */
/* Lies of a Hugging Face directory: its index and its files. */
#include "directory.h"

#define INDEX "model.safetensors.index.json"
#define F1 "model-00001-of-00002.safetensors"
#define F2 "model-00002-of-00002.safetensors"
#define U8(name, lo, hi)                                                                           \
    "\"" name "\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[" #lo "," #hi "]}"

static void index_text(struct tree *t, const char *map)
{
    char text[4096];
    (void)snprintf(text, sizeof text, "{\"metadata\":{},\"weight_map\":%s}", map);
    tree_text(t, INDEX, text);
}

static void sound(struct tree *t)
{
    tree_text(t, "config.json", "{\"model_type\":\"llama\"}");
    tree_st(t, F1, "{" U8("a", 0, 4) "," U8("b", 4, 8) "}", 8);
    tree_st(t, F2, "{" U8("c", 0, 4) "}", 4);
    index_text(t, "{\"a\":\"" F1 "\",\"b\":\"" F1 "\",\"c\":\"" F2 "\"}");
}

static void nothing(struct tree *t) { (void)t; }

static void dotdot(struct tree *t) { index_text(t, "{\"a\":\"../" F1 "\"}"); }

static void dotdot_inside(struct tree *t) { index_text(t, "{\"a\":\"x/../" F1 "\"}"); }

static void absolute(struct tree *t) { index_text(t, "{\"a\":\"/etc/passwd\"}"); }

static void empty_name(struct tree *t) { index_text(t, "{\"a\":\"\"}"); }

static void link_out(struct tree *t)
{
    tree_delete(t, F2);
    tree_link(t, "/etc/passwd", F2);
}

static void in_folders(struct tree *t)
{
    tree_dirs(t, "x/y/");
    tree_st(t, "x/y/" F2, "{" U8("c", 0, 4) "}", 4);
    index_text(t, "{\"a\":\"" F1 "\",\"b\":\"" F1 "\",\"c\":\"x/y/" F2 "\"}");
}

static void folder_missing(struct tree *t)
{
    in_folders(t);
    index_text(t, "{\"c\":\"x/z/" F2 "\"}");
}

static void file_in_folder_link_out(struct tree *t)
{
    in_folders(t);
    tree_delete(t, "x/y/" F2);
    tree_link(t, "/etc/passwd", "x/y/" F2);
}

static void folder_link_out(struct tree *t)
{
    in_folders(t);
    tree_link(t, "/etc", "x/out");
    index_text(t, "{\"c\":\"x/out/passwd\"}");
}

static void missing_file(struct tree *t) { tree_delete(t, F2); }

static void tensor_elsewhere(struct tree *t)
{
    index_text(t, "{\"a\":\"" F1 "\",\"b\":\"" F1 "\",\"c\":\"" F1 "\"}");
}

static void tensor_missing(struct tree *t) { index_text(t, "{\"a\":\"" F1 "\",\"z\":\"" F2 "\"}"); }

static void map_array(struct tree *t) { index_text(t, "[]"); }

static void map_empty(struct tree *t) { index_text(t, "{}"); }

static void map_of_numbers(struct tree *t) { index_text(t, "{\"a\":1}"); }

static void map_absent(struct tree *t) { tree_text(t, INDEX, "{}"); }

static void map_twice(struct tree *t) { index_text(t, "{\"a\":\"" F1 "\",\"a\":\"" F2 "\"}"); }

static void index_array(struct tree *t) { tree_text(t, INDEX, "[]"); }

/* Its files hold changes, whatever stands before that in the index. */
static void map_of_changes(struct tree *t)
{
    char text[8192];
    (void)snprintf(text, sizeof text,
                   "{\"x\":\"%05000d\",\"weight_map\":{\"a\":\"" F1
                   "\"},\"metadata\":{\"version\":\"1\",\"delta_encoding\":\"xor\"}}",
                   0);
    tree_text(t, INDEX, text);
}

static void index_garbage(struct tree *t) { tree_text(t, INDEX, "{"); }

static void file_is_dir(struct tree *t)
{
    tree_delete(t, F2);
    tree_dirs(t, F2 "/");
}

static void file_is_fifo(struct tree *t)
{
    tree_delete(t, F2);
    tree_fifo(t, F2);
}

static void file_is_config(struct tree *t) { index_text(t, "{\"a\":\"config.json\"}"); }

static void truncated(struct tree *t) { tree_truncate(t, F2, 1); }

static void config_garbage(struct tree *t) { tree_text(t, "config.json", "nope"); }

static void config_array(struct tree *t) { tree_text(t, "config.json", "[]"); }

static void extra_tensor(struct tree *t) { index_text(t, "{\"a\":\"" F1 "\"}"); }

static void no_files(struct tree *t) { tree_delete(t, INDEX); }

static void shards_of_two(struct tree *t)
{
    tree_delete(t, INDEX);
    tree_st(t, "model-00003-of-00003.safetensors", "{" U8("z", 0, 4) "}", 4);
}

static void shard_missing(struct tree *t)
{
    tree_delete(t, INDEX);
    tree_delete(t, F2);
}

static void first_shard_missing(struct tree *t)
{
    tree_delete(t, INDEX);
    tree_delete(t, F1);
}

static void no_weights(struct tree *t)
{
    shard_missing(t);
    tree_delete(t, F1);
}

static void tensor_in_two_shards(struct tree *t)
{
    tree_delete(t, INDEX);
    tree_st(t, F2, "{" U8("a", 0, 4) "}", 4);
}

static void one_variant(struct tree *t)
{
    no_files(t);
    tree_delete(t, F1);
    tree_delete(t, F2);
    tree_st(t, "model.fp16-00001-of-00001.safetensors", "{" U8("a", 0, 4) "}", 4);
}

static void two_variants(struct tree *t)
{
    one_variant(t);
    tree_st(t, "model.non-ema.safetensors", "{" U8("a", 0, 4) "}", 4);
}

static const char lfs[] = "version https://git-lfs.github.com/spec/v1\noid sha256:4cac\nsize 12\n";

static void shard_is_pointer(struct tree *t) { tree_text(t, F2, lfs); }

static void config_is_pointer(struct tree *t) { tree_text(t, "config.json", lfs); }

static void index_is_page(struct tree *t) { tree_text(t, INDEX, "\n<!DOCTYPE html>\n<html>"); }

static void shard_is_answer(struct tree *t)
{
    tree_text(t, F2, "\xef\xbb\xbf<?xml version=\"1.0\"?><Error><Code>AccessDenied</Code></Error>");
}

/* 200000 tensors of one file, of which the index knows one. */
static void many_unmapped(struct tree *t)
{
    enum { N = 200000, ROOM = 90 };
    char *text = malloc((size_t)N * ROOM);
    size_t at = 0;
    for (int i = 0; i < N; i++)
        at += (size_t)snprintf(text + at, ROOM,
                               "%c\"t%d\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}",
                               i ? ',' : '{', i);
    (void)strcpy(text + at, "}");
    tree_st(t, F1, text, 0);
    free(text);
    index_text(t, "{\"t0\":\"" F1 "\"}");
}

static const struct lie lies[] = {
    {"sound", nothing, CKPT_OK, NULL, NULL},
    {"sound_extra_tensor", extra_tensor, CKPT_OK, NULL, NULL},
    {"sound_many_unmapped", many_unmapped, CKPT_OK, NULL, NULL},
    {"map_dotdot", dotdot, CKPT_FORMAT, "../" F1, "not a path below"},
    {"map_dotdot_inside", dotdot_inside, CKPT_FORMAT, "x/../" F1, "not a path below"},
    {"map_absolute", absolute, CKPT_FORMAT, "/etc/passwd", "not a path below"},
    {"map_empty_name", empty_name, CKPT_FORMAT, "''", "not a path below"},
    {"map_array", map_array, CKPT_FORMAT, INDEX, "weight_map"},
    {"map_empty", map_empty, CKPT_FORMAT, INDEX, "weight_map"},
    {"map_absent", map_absent, CKPT_FORMAT, INDEX, "weight_map"},
    {"map_of_numbers", map_of_numbers, CKPT_FORMAT, INDEX, "'a' is not a name"},
    {"map_twice", map_twice, CKPT_FORMAT, INDEX, "duplicate"},
    {"map_of_changes", map_of_changes, CKPT_UNSUPPORTED, INDEX, "delta_encoding"},
    {"index_array", index_array, CKPT_FORMAT, INDEX, "not a JSON object"},
    {"index_garbage", index_garbage, CKPT_FORMAT, INDEX, "not valid JSON"},
    {"link_out", link_out, CKPT_UNSUPPORTED, F2, "leads out of"},
    {"sound_in_folders", in_folders, CKPT_OK, NULL, NULL},
    {"folder_missing", folder_missing, CKPT_MISSING, "x/z/" F2, "No such file"},
    {"file_in_folder_link_out", file_in_folder_link_out, CKPT_UNSUPPORTED, F2, "leads out of"},
    {"folder_link_out", folder_link_out, CKPT_UNSUPPORTED, "x/out/passwd", "leads out of"},
    {"missing_file", missing_file, CKPT_MISSING, F2, "No such file"},
    {"tensor_elsewhere", tensor_elsewhere, CKPT_MISSING, F1, "lacks tensor 'c'"},
    {"tensor_missing", tensor_missing, CKPT_MISSING, F2, "lacks tensor 'z'"},
    {"file_is_dir", file_is_dir, CKPT_FORMAT, F2, "is a directory"},
    {"file_is_fifo", file_is_fifo, CKPT_FORMAT, F2, "is a FIFO"},
    {"file_is_config", file_is_config, CKPT_FORMAT, "config.json", "header claims"},
    {"truncated", truncated, CKPT_FORMAT, F2, "is truncated"},
    {"config_garbage", config_garbage, CKPT_FORMAT, "config.json", "not valid JSON"},
    {"config_array", config_array, CKPT_FORMAT, "config.json", "not a JSON object"},
    {"sound_no_index", no_files, CKPT_OK, NULL, NULL},
    {"sound_one_variant", one_variant, CKPT_OK, NULL, NULL},
    {"two_variants", two_variants, CKPT_CONFLICT, "fp16, non-ema", "choose one with -o variant="},
    {"shards_of_two", shards_of_two, CKPT_CONFLICT, "of 2 and one of 3", "shards of two models"},
    {"shard_missing", shard_missing, CKPT_MISSING, "of 2 shards", "number 2 is missing"},
    {"first_shard_missing", first_shard_missing, CKPT_MISSING, F2, "number 1 is missing"},
    {"tensor_in_two_shards", tensor_in_two_shards, CKPT_CONFLICT, F2, "tensor 'a' is in"},
    {"shard_is_pointer", shard_is_pointer, CKPT_FORMAT, F2, "git lfs pull"},
    {"config_is_pointer", config_is_pointer, CKPT_FORMAT, "config.json", "git lfs pull"},
    {"index_is_page", index_is_page, CKPT_FORMAT, INDEX, "a web page"},
    {"shard_is_answer", shard_is_answer, CKPT_FORMAT, F2, "an XML document"},
    {"no_weights", no_weights, CKPT_MISSING, "model.safetensors", "No such file"},
};

int main(int argc, char **argv)
{
    return tell_all(argc, argv, &ckpt_reader_hf, sound, lies, sizeof lies / sizeof lies[0]);
}
