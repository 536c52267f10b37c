/* SPDX-License-Identifier: Apache-2.0 */
/* Lies of a nanotron directory: a sound one, changed in one way. */
#include "directory.h"

#define WHOLE "None,None,None|None,None,None"
#define ROWS(r) "model/model/rows/model_weight_pp-rank-0-of-1_tp-rank-" #r "-of-2.safetensors"
#define COLS(r) "model/model/cols/model_weight_pp-rank-0-of-1_tp-rank-" #r "-of-2.safetensors"
#define NORM "model/model/norm/model_weight.safetensors"
#define META "checkpoint_metadata.json"

static void nothing(struct tree *t) { (void)t; }

/* ---- files ---- */

static void missing_rank(struct tree *t) { tree_delete(t, ROWS(1)); }

static void missing_first_rank(struct tree *t) { tree_delete(t, COLS(0)); }

static void truncated(struct tree *t) { tree_truncate(t, ROWS(1), 1); }

static void truncated_header(struct tree *t)
{
    tree_put(t, ROWS(1), "\x40\0\0\0\0\0\0\0{\"data\":", 16);
}

static void zero_length(struct tree *t) { tree_text(t, ROWS(1), ""); }

static void garbage(struct tree *t) { tree_text(t, ROWS(1), "this is no safetensors file at all"); }

static void fifo(struct tree *t)
{
    tree_delete(t, ROWS(1));
    tree_fifo(t, ROWS(1));
}

static void directory(struct tree *t)
{
    tree_delete(t, ROWS(1));
    tree_dirs(t, ROWS(1) "/");
}

static void link_out(struct tree *t)
{
    tree_delete(t, ROWS(1));
    tree_link(t, "/etc/passwd", ROWS(1));
}

static void link_dangling(struct tree *t)
{
    tree_delete(t, ROWS(1));
    tree_link(t, "nowhere", ROWS(1));
}

static void link_inside(struct tree *t) { tree_link(t, "../rows", "model/model/again"); }

static void link_to_itself(struct tree *t)
{
    tree_delete(t, ROWS(1));
    tree_link(t, "model_weight_pp-rank-0-of-1_tp-rank-1-of-2.safetensors", ROWS(1));
}

static void link_loop(struct tree *t) { tree_link(t, "..", "model/model/loop"); }

/* Each level doubles. */
static void link_bomb(struct tree *t)
{
    tree_link(t, ".", "model/model/a");
    tree_link(t, ".", "model/model/b");
}

/* No loop, but each of 20 directories leads to the next by four links. */
static void link_lattice(struct tree *t)
{
    char name[64], target[64];
    for (int i = 0; i < 20; i++)
        for (int k = 0; k < 4; k++) {
            (void)snprintf(name, sizeof name, "model/model/d%d/l%d", i, k);
            (void)snprintf(target, sizeof target, "../d%d", i + 1);
            tree_link(t, target, name);
        }
    tree_dirs(t, "model/model/d20/");
}

static void deep(struct tree *t)
{
    char name[512] = "model";
    for (int i = 0; i < 40; i++)
        (void)strcat(name, "/x");
    (void)strcat(name, "/");
    tree_dirs(t, name);
}

static void no_weights(struct tree *t)
{
    tree_delete(t, ROWS(0));
    tree_delete(t, ROWS(1));
    tree_delete(t, COLS(0));
    tree_delete(t, COLS(1));
    tree_delete(t, NORM);
}

static void fp8(struct tree *t) { tree_text(t, "model/model/norm/model_weight_metadata.pkl", "x"); }

static void foreign_files(struct tree *t)
{
    tree_text(t, "model/config.json", "{");
    tree_text(t, "model/model/norm/model_weight.safetensors.lock", "");
    tree_text(t, "model/model/rows/model_weight_pp-rank-0-of-1.safetensors", "");
    tree_text(t, "model/model/rows/notes.txt", "");
}

static void dir_named_model(struct tree *t) { nt_plain(t, "model/model/model_head", 2, 2); }

/* ---- topologies ---- */

static void old_tp1(struct tree *t)
{
    nt_row_shard(t, "model/model/rows", 1, 0, 1, 8, 6);
    nt_col_shard(t, "model/model/cols", 1, 0, 1, 4, 6);
}

static void two_without_metadata(struct tree *t)
{
    old_tp1(t);
    tree_delete(t, META);
}

static void two_metadata_of_neither(struct tree *t)
{
    old_tp1(t);
    tree_text(t, META, "{\"tp\": 4, \"version\": \"1.4\"}");
}

static void two_chosen_incomplete(struct tree *t)
{
    old_tp1(t);
    tree_delete(t, ROWS(1));
}

static void two_parameter_of_other(struct tree *t)
{
    old_tp1(t);
    nt_row_shard(t, "model/model/only", 1, 0, 1, 8, 6);
}

static void two_pp(struct tree *t)
{
    nt_row_shard(t, "model/model/rows", 2, 0, 2, 8, 6);
    nt_row_shard(t, "model/model/rows", 2, 1, 2, 8, 6);
}

static void many_topologies(struct tree *t)
{
    for (unsigned n = 1; n < 24; n++)
        nt_row_shard(t, "model/model/rows", n, 0, 1, 8, 6);
}

static void plain_and_sharded(struct tree *t) { nt_plain(t, "model/model/rows", 8, 6); }

/* The same shards by another pipeline rank: a re-save after the stages moved. */
static void moved_stage(struct tree *t)
{
    nt_shard_at(t, "model/model/rows/model_weight_pp-rank-1-of-2_tp-rank-0-of-1.safetensors",
                "BF16", 8, 6, "1.4", "(8, 6)", WHOLE "#" WHOLE);
    nt_shard_at(t, "model/model/rows/model_weight_pp-rank-0-of-2_tp-rank-0-of-1.safetensors",
                "BF16", 8, 6, "1.4", "(8, 6)", WHOLE "#" WHOLE);
    tree_delete(t, ROWS(0));
    tree_delete(t, ROWS(1));
    tree_delete(t, COLS(0));
    tree_delete(t, COLS(1));
}

/* ---- contradictions ---- */

static void rows1(struct tree *t, const char *dtype, unsigned rows, const char *version,
                  const char *shape, const char *pairs)
{
    nt_shard_at(t, ROWS(1), dtype, rows, 6, version, shape, pairs);
}

#define SECOND WHOLE "#4,8,None|None,None,None"

static void other_shape(struct tree *t) { rows1(t, "BF16", 4, "1.4", "(9, 6)", SECOND); }

static void other_dtype(struct tree *t) { rows1(t, "F32", 4, "1.4", "(8, 6)", SECOND); }

static void other_rank(struct tree *t) { rows1(t, "BF16", 4, "1.4", "(8, 6, 1)", SECOND); }

static void gap(struct tree *t)
{
    rows1(t, "BF16", 3, "1.4", "(8, 6)", WHOLE "#5,8,None|None,None,None");
}

static void overlap(struct tree *t)
{
    rows1(t, "BF16", 5, "1.4", "(8, 6)", WHOLE "#3,8,None|None,None,None");
}

static void same_twice(struct tree *t)
{
    rows1(t, "BF16", 4, "1.4", "(8, 6)", WHOLE "#0,4,None|None,None,None");
}

static void past_whole(struct tree *t)
{
    rows1(t, "BF16", 4, "1.4", "(8, 6)", WHOLE "#5,9,None|None,None,None");
}

static void huge_whole(struct tree *t)
{
    const char *shape = "(4611686018427387904, 4611686018427387904)";
    nt_shard_at(t, ROWS(0), "BF16", 4, 6, "1.4", shape, "0,4,None|0,6,None#0,4,None|0,6,None");
    nt_shard_at(t, ROWS(1), "BF16", 4, 6, "1.4", shape, "0,4,None|0,6,None#4,8,None|0,6,None");
}

/* 2^32 x 2^32: the number of elements wraps to 0. */
static void wrapping_whole(struct tree *t)
{
    const char *shape = "(4294967296, 4294967296)";
    nt_shard_at(t, ROWS(0), "BF16", 4, 6, "1.4", shape, "0,0,None|0,0,None#0,0,None|0,0,None");
    nt_shard_at(t, ROWS(1), "BF16", 4, 6, "1.4", shape, "0,0,None|0,0,None#0,0,None|0,0,None");
}

static void no_metadata(struct tree *t)
{
    tree_st(t, ROWS(1), "{\"data\":{\"dtype\":\"BF16\",\"shape\":[4,6],\"data_offsets\":[0,48]}}",
            48);
}

static void concat_dim(struct tree *t)
{
    tree_st(t, ROWS(1),
            "{\"__metadata__\":{\"version\":\"1.0\",\"concat_dim\":\"0\"},"
            "\"data\":{\"dtype\":\"BF16\",\"shape\":[4,6],\"data_offsets\":[0,48]}}",
            48);
}

static void newer_shard(struct tree *t) { rows1(t, "BF16", 4, "1.6", "(8, 6)", SECOND); }

static void newer_metadata(struct tree *t)
{
    tree_text(t, META, "{\"tp\": 2, \"version\": \"1.6\"}");
}

static void no_version(struct tree *t)
{
    nt_shard_at(t, ROWS(0), "BF16", 4, 6, NULL, "(8, 6)", WHOLE "#0,4,None|None,None,None");
    rows1(t, "BF16", 4, NULL, "(8, 6)", SECOND);
}

static void other_version(struct tree *t) { rows1(t, "BF16", 4, "1.3", "(8, 6)", SECOND); }

static void numpy_shape(struct tree *t) { rows1(t, "BF16", 4, "1.4", "(np.int64(8), 6)", SECOND); }

static void no_data_tensor(struct tree *t)
{
    tree_st(t, NORM, "{\"weight\":{\"dtype\":\"BF16\",\"shape\":[4,2],\"data_offsets\":[0,16]}}",
            16);
}

static void no_weight_decay(struct tree *t)
{
    tree_st(t, NORM,
            "{\"data\":{\"dtype\":\"BF16\",\"shape\":[4,2],\"data_offsets\":[0,16]},"
            "\"_no_weight_decay\":{\"dtype\":\"BOOL\",\"shape\":[],\"data_offsets\":[16,17]}}",
            17);
}

/* ---- configs ---- */

static void config_missing(struct tree *t) { tree_delete(t, "model_config.json"); }

/* save_weights writes no more than this. */
static void weights_alone(struct tree *t)
{
    tree_delete(t, "model_config.json");
    tree_delete(t, META);
}

static void weights_alone_incomplete(struct tree *t)
{
    weights_alone(t);
    tree_delete(t, ROWS(1));
}

/* Nothing says which of two saves is meant. */
static void weights_alone_twice(struct tree *t)
{
    weights_alone(t);
    old_tp1(t);
}

static void config_array(struct tree *t) { tree_text(t, "model_config.json", "[1]"); }

static void config_garbage(struct tree *t) { tree_text(t, "model_config.json", "{\"a\": "); }

static void config_empty(struct tree *t) { tree_text(t, "model_config.json", ""); }

static void config_fifo(struct tree *t)
{
    tree_delete(t, "model_config.json");
    tree_fifo(t, "model_config.json");
}

static void config_large(struct tree *t)
{
    int fd = openat(t->fd, "model_config.json", O_WRONLY);
    TREE_MUST(fd >= 0 && ftruncate(fd, 1LL << 40) == 0);
    (void)close(fd);
}

static void config_in_yaml(struct tree *t)
{
    tree_delete(t, "model_config.json");
    tree_text(t, "config.yaml", "model:\n  model_config:\n    is_llama_config: true\n");
}

static void yaml_garbage(struct tree *t) { tree_text(t, "config.yaml", "a: [1, 2\nb: {"); }

static void yaml_without_model(struct tree *t)
{
    tree_delete(t, "model_config.json");
    tree_text(t, "config.yaml", "general:\n  step: 1\n");
}

static void metadata_garbage(struct tree *t) { tree_text(t, META, "{]"); }

static void metadata_strange(struct tree *t)
{
    tree_text(t, META, "{\"tp\": \"two\", \"version\": 1.4, \"metas\": []}");
}

static const struct lie lies[] = {
    {"sound", nothing, CKPT_OK, NULL, NULL},
    {"sound_no_version", no_version, CKPT_OK, NULL, NULL},
    {"sound_numpy_shape", numpy_shape, CKPT_OK, NULL, NULL},
    {"sound_no_weight_decay", no_weight_decay, CKPT_OK, NULL, NULL},
    {"sound_foreign_files", foreign_files, CKPT_OK, NULL, NULL},
    {"sound_two_topologies", old_tp1, CKPT_OK, NULL, NULL},
    {"sound_config_in_yaml", config_in_yaml, CKPT_OK, NULL, NULL},
    {"sound_config_missing", config_missing, CKPT_OK, NULL, NULL},
    {"sound_yaml_without_model", yaml_without_model, CKPT_OK, NULL, NULL},
    {"sound_weights_alone", weights_alone, CKPT_OK, NULL, NULL},
    {"sound_link_inside", link_inside, CKPT_OK, NULL, NULL},
    {"sound_metadata_strange", metadata_strange, CKPT_OK, NULL, NULL},
    {"sound_directory_named_model_", dir_named_model, CKPT_OK, NULL, NULL},

    {"missing_rank", missing_rank, CKPT_MISSING, "model/model/rows", "tp-rank-1-of-2"},
    {"missing_first_rank", missing_first_rank, CKPT_MISSING, "model/model/cols", "tp-rank-0-of-2"},
    {"truncated", truncated, CKPT_FORMAT, ROWS(1), "is truncated: it has 47 bytes"},
    {"truncated_header", truncated_header, CKPT_FORMAT, ROWS(1), "header claims 64 bytes"},
    {"zero_length", zero_length, CKPT_FORMAT, ROWS(1), "has 0 bytes"},
    {"garbage", garbage, CKPT_FORMAT, ROWS(1), "not a safetensors file?"},
    {"fifo", fifo, CKPT_FORMAT, ROWS(1), "is a FIFO"},
    {"directory", directory, CKPT_FORMAT, ROWS(1), "is a directory"},
    {"link_out", link_out, CKPT_UNSUPPORTED, ROWS(1), "leads out of"},
    {"link_dangling", link_dangling, CKPT_MISSING, ROWS(1), "No such file"},
    {"link_to_itself", link_to_itself, CKPT_IO, ROWS(1), "symbolic links"},
    {"link_loop", link_loop, CKPT_FORMAT, "model/model/loop", "directory that contains the link"},
    {"link_bomb", link_bomb, CKPT_FORMAT, "model/model/a", "directory that contains the link"},
    {"link_lattice", link_lattice, CKPT_LIMIT, "model/model/d", "reached by links"},
    {"deep", deep, CKPT_LIMIT, "x/x/x", "nest deeper than 32"},
    {"no_weights", no_weights, CKPT_MISSING, "/model'", "no weights"},
    {"fp8", fp8, CKPT_UNSUPPORTED, "model_weight_metadata.pkl", "FP8"},

    {"two_without_metadata", two_without_metadata, CKPT_CONFLICT, "/model'", "2 saves"},
    {"two_metadata_of_neither", two_metadata_of_neither, CKPT_CONFLICT, "/model'", "2 saves"},
    {"two_chosen_incomplete", two_chosen_incomplete, CKPT_MISSING, "model/model/rows",
     "tp-rank-1-of-2"},
    {"two_parameter_of_other", two_parameter_of_other, CKPT_CONFLICT, "model.only",
     "only shards of another save"},
    {"two_pp", two_pp, CKPT_CONFLICT, "/model'", "PP 1"},
    {"many_topologies", many_topologies, CKPT_CONFLICT, "/model'", "more than 16 topologies"},
    {"plain_and_sharded", plain_and_sharded, CKPT_CONFLICT, "model.rows",
     "has a file without shards and"},
    {"moved_stage", moved_stage, CKPT_CONFLICT, "pp-rank-1-of-2", "overlap"},

    {"other_shape", other_shape, CKPT_CONFLICT, "tp-rank-1-of-2", "[9, 6]"},
    {"other_dtype", other_dtype, CKPT_CONFLICT, "tp-rank-1-of-2", "F32"},
    {"other_version", other_version, CKPT_CONFLICT, "tp-rank-1-of-2", "'1.3'"},
    {"other_rank", other_rank, CKPT_FORMAT, ROWS(1), "data has 2 dimensions"},
    {"gap", gap, CKPT_MISSING, "model/model/rows", "rows 4..5 of 8 are in no shard"},
    {"overlap", overlap, CKPT_CONFLICT, "tp-rank-1-of-2", "overlaps"},
    {"same_twice", same_twice, CKPT_CONFLICT, "tp-rank-1-of-2", "overlaps"},
    {"past_whole", past_whole, CKPT_FORMAT, ROWS(1), "not slices"},
    {"huge_whole", huge_whole, CKPT_MISSING, "model.rows", "are in no shard"},
    {"wrapping_whole", wrapping_whole, CKPT_LIMIT, "model.rows", "2^63"},
    {"no_metadata", no_metadata, CKPT_FORMAT, ROWS(1), "local_global_slices_pairs"},
    {"concat_dim", concat_dim, CKPT_UNSUPPORTED, ROWS(1), "concat_dim"},
    {"newer_shard", newer_shard, CKPT_UNSUPPORTED, ROWS(1), "1.6 is newer than 1.5"},
    {"newer_metadata", newer_metadata, CKPT_UNSUPPORTED, META, "1.6 is newer than 1.5"},
    {"no_data_tensor", no_data_tensor, CKPT_FORMAT, NORM, "no tensor 'data'"},

    {"weights_alone_incomplete", weights_alone_incomplete, CKPT_MISSING, "model/model/rows",
     "tp-rank-1-of-2"},
    {"weights_alone_twice", weights_alone_twice, CKPT_CONFLICT, "/model'", "2 saves"},
    {"config_array", config_array, CKPT_FORMAT, "model_config.json", "object"},
    {"config_garbage", config_garbage, CKPT_FORMAT, "model_config.json", "not valid JSON"},
    {"config_empty", config_empty, CKPT_FORMAT, "model_config.json", "not valid JSON"},
    {"config_fifo", config_fifo, CKPT_FORMAT, "model_config.json", "is a FIFO"},
    {"config_large", config_large, CKPT_LIMIT, "model_config.json", "at most"},
    {"yaml_garbage", yaml_garbage, CKPT_FORMAT, "config.yaml", "not valid YAML"},
    {"metadata_garbage", metadata_garbage, CKPT_FORMAT, META, "not valid JSON"},
};

static void sound(struct tree *t) { nt_checkpoint(t, ""); }

int main(int argc, char **argv)
{
    return tell_all(argc, argv, &ckpt_reader_nanotron, sound, lies, sizeof lies / sizeof lies[0]);
}
