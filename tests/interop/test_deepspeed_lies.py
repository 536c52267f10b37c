# SPDX-License-Identifier: Apache-2.0
"""Named lies about DeepSpeed's checkpoints: a golden one is loaded by torch, one thing in it is changed, and torch saves it again. Each
must be refused by an error that says what is wrong; the same without a change must be served.

usage: test_deepspeed_lies.py [NAME]
"""

import enum
import glob
import os
import shutil
import subprocess
import sys
import tempfile
import types

import torch

SOURCE = os.environ.get("CKPTFS_SOURCE") or os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
CKPT = os.path.join(os.environ.get("CKPTFS_BUILD", "build/release"), "fs", "ckpt")
GOLDEN = os.path.join(SOURCE, "tests", "golden", "deepspeed")
F32 = ["view=raw", "dtype=float32"]
RAW = ["view=raw"]


def stand_ins():
    """Classes of DeepSpeed that its pickles name."""
    stage = enum.IntEnum("ZeroStageEnum", {"s%d" % i: i for i in range(4)})
    known = {
        "deepspeed.runtime.fp16.loss_scaler": [type("LossScaler", (), {}), type("DynamicLossScaler", (), {})],
        "deepspeed.runtime.zero.config": [stage],
        "deepspeed.utils.tensor_fragment": [type("fragment_address", (), {})],
    }
    for name, classes in known.items():
        for i in range(1, name.count(".") + 2):
            part = ".".join(name.split(".")[:i])
            sys.modules.setdefault(part, types.ModuleType(part))
        for c in classes:
            c.__module__ = name
            setattr(sys.modules[name], c.__name__, c)


class Lie:
    def __init__(self, case, files, change, needle, options=RAW):
        self.case, self.files, self.change, self.needle, self.options = case, files, change, needle, options


def set_at(*path_and_value):
    """Change what lies at a path of keys."""
    *path, last, value = path_and_value

    def change(root):
        for key in path:
            root = root[key]
        root[last] = value(root[last]) if callable(value) else value
    return change


def drop(*path):
    def change(root):
        for key in path[:-1]:
            root = root[key]
        del root[path[-1]]
    return change


def first_shape(shape):
    """The first parameter's shape."""
    def change(root):
        group = root["param_shapes"][0]
        group[next(iter(group))] = shape
    return change


def affine(key, change):
    """Something of one parameter's affine map."""
    def apply(root):
        params = root["universal_checkpoint_info"]["affine_map"]["params"]
        entry = next(v for k, v in params.items() if key in k)
        change(entry)
    return apply


def piece_of(rank, key, value):
    return lambda entry: entry["ranks"][rank]["pieces"][0].__setitem__(key, value)


def rename_expert(shapes):
    name = next(iter(shapes))
    shapes[name + "x"] = shapes.pop(name)


def flip_shapes(shapes):
    for name, shape in shapes.items():
        shapes[name] = shape[::-1]


def nest_first(module):
    """The first tensor once more, in a dict."""
    name = next(iter(module))
    first, rest = name.split(".", 1)
    return dict(module) | {first: {rest: module[name] + 1}}


def renumber(root):
    for name in list(root):
        root[name.replace(".1.", ".7.")] = root.pop(name)


O = "optimizer_state_dict"
M = "mp_rank_00_model_states.pt"
Z2, Z3, TP, MOE, MOE_Z2, UC = "z2_llama_align_w2", "z3_qwen3_frozen_w3", "tp2_z1_llama_w2", "moe_ep2_w2", "moe_z2_ep2_w4", "uc_z3_qwen2_g2_w2"
MASTERS = "single_partition_of_fp32_groups"

LIES = {
    "paddings_unknown": Lie(Z2, "*optim*", drop(O, "param_alignment_paddings"), "different saves", F32),
    "paddings_too_few": Lie(Z2, "*optim*", set_at(O, "param_alignment_paddings", 0, lambda p: p[:-1]), "param_alignment_paddings of group 0 has", F32),
    "paddings_negative": Lie(Z2, "*optim*", set_at(O, "param_alignment_paddings", 0, 0, -6), "not a number of elements", F32),
    "paddings_huge": Lie(Z2, "*optim*", set_at(O, "param_alignment_paddings", 0, 0, 2**62), "not a number of elements", F32),
    "another_world": Lie(Z2, "*rank_1*optim*", set_at(O, "partition_count", [3]), "of 3 ranks", F32),
    "count_no_number": Lie(Z2, "*rank_1*optim*", set_at(O, "partition_count", ["2"]), "partition_count", F32),
    "count_zero": Lie(Z2, "*rank_1*optim*", set_at(O, "partition_count", [0]), "partition_count", F32),
    "more_ranks": Lie(Z2, M, set_at("dp_world_size", 3), "rank 2 of 3", F32),
    "endless_ranks": Lie(Z2, M, set_at("dp_world_size", 2**40), "rank 2 of 1099511627776", F32),
    "no_ranks": Lie(Z2, M, set_at("dp_world_size", 0), "dp_world_size", F32),
    "fewer_ranks": Lie(Z2, M, set_at("dp_world_size", 1), "remove the stale ones", F32),
    "other_values": Lie(Z2, "*rank_1*optim*", set_at(O, MASTERS, 0, lambda t: t * 2), "rounded, is not the weight", F32),
    "masters_square": Lie(Z2, "*rank_1*optim*", set_at(O, MASTERS, 0, lambda t: t[:20].reshape(4, 5)), "not a tensor of one dimension", F32),
    "masters_short": Lie(Z2, "*rank_0*optim*", set_at(O, MASTERS, 0, lambda t: t[:20].clone()), "different saves", F32),
    "masters_integers": Lie(Z2, "*rank_1*optim*", set_at(O, MASTERS, 0, lambda t: t.long()), "is I64", F32),
    "masters_of_two_dtypes": Lie(Z2, "*rank_1*optim*", set_at(O, MASTERS, 0, lambda t: t.bfloat16()), "another's BF16", F32),
    "masters_one_group_more": Lie(Z2, "*rank_1*optim*", set_at(O, MASTERS, lambda g: g + g), "groups of parameters", F32),
    "masters_lost": Lie(Z2, "*optim*", drop(O, MASTERS), "it is not of ZeRO", F32),
    "no_optimizer": Lie(Z2, "*rank_0*optim*", drop(O), "no optimizer_state_dict", F32),
    "shape_negative": Lie(Z2, M, first_shape([-3, 4]), "a dimension of -3", F32),
    "shape_endless": Lie(Z2, M, first_shape([2**40, 2**40]), "more elements than any file"),
    "shape_no_shape": Lie(Z2, M, first_shape("7x3"), "not a shape", F32),
    "shape_of_many_dimensions": Lie(Z2, M, first_shape([1] * 30), "dimensions"),
    "shape_other": Lie(Z2, M, first_shape([5, 5]), "different saves", F32),
    "shapes_no_dict": Lie(Z2, M, set_at("param_shapes", ["x"]), "param_shapes[0] is not a dict"),
    "module_lost": Lie(Z2, M, set_at("module", None), "'module' is not a state dict"),
    "module_key_no_text": Lie(Z2, M, set_at("module", lambda m: {5: t for t in m.values()}), "is not a string"),
    "module_lacks_one": Lie(Z2, M, set_at("module", lambda m: dict(list(m.items())[1:])), "which the module does not have", F32),
    "module_twice": Lie(Z2, M, set_at("module", nest_first), "is listed twice"),
    "module_twice_in_pieces": Lie(Z3, "zero_pp_rank_0*model*", set_at("module", nest_first), "is listed twice"),
    "root_no_dict": Lie(Z2, M, None, "its content is not a dict"),
    "slices_lost": Lie(Z3, "*rank_1*optim*", drop(O, "fp32_flat_groups"), "it is not of ZeRO"),
    "slices_short": Lie(Z3, "*rank_1*optim*", set_at(O, "fp32_flat_groups", 0, lambda t: t[:7].clone()), "different saves"),
    "slices_long": Lie(Z3, "*rank_1*optim*", set_at(O, "fp32_flat_groups", lambda g: g + g), "different saves"),
    "stage_other": Lie(Z3, "*rank_1*optim*", lambda r: r[O].update({MASTERS: r[O]["fp32_flat_groups"]}), "different saves"),
    "frozen_short": Lie(Z3, "zero_pp_rank_2*model*", set_at("frozen_param_fragments", lambda d: {k: t[:1].clone() for k, t in d.items()}), "no slice"),
    "frozen_lost": Lie(Z3, "zero_pp_rank_1*model*", set_at("frozen_param_fragments", {}), "no slice"),
    "frozen_lost_on_first": Lie(Z3, "zero_pp_rank_0*model*", set_at("frozen_param_fragments", {}), "only a placeholder"),
    "frozen_shape_lost": Lie(Z3, "zero_pp_rank_0*model*", set_at("frozen_param_shapes", {}), "frozen_param_shapes"),
    "frozen_dtype": Lie(Z3, "zero_pp_rank_1*model*", set_at("frozen_param_fragments", lambda d: {k: t.float() for k, t in d.items()}), "no slice"),
    "another_step": Lie(Z3, "zero_pp_rank_1*model*", set_at("global_steps", 7), "of step 7"),
    "joins_unknown": Lie(TP, "mp_rank_00*", drop("universal_checkpoint_info"), "nothing in the checkpoint says"),
    "joins_later_version": Lie(TP, "mp_rank_00*", set_at("universal_checkpoint_info", "affine_map", "version", 2), "version 2"),
    "joins_bad_pattern": Lie(TP, "mp_rank_00*", set_at("universal_checkpoint_info", "vocabulary_parameter_patterns", ["("]), "not a regular expression"),
    "piece_scaled": Lie(TP, "mp_rank_00*", affine("q_proj", piece_of(0, "scale", 0.5)), "scaled"),
    "piece_outside": Lie(TP, "mp_rank_00*", affine("q_proj", piece_of(1, "source", [64, [8, 1]])), "outside"),
    "piece_on_another": Lie(TP, "mp_rank_00*", affine("q_proj", piece_of(1, "source", [0, [8, 1]])), "two shards hold the same"),
    "piece_no_box": Lie(TP, "mp_rank_00*", affine("q_proj", piece_of(1, "source", [32, [7, 1]])), "not a box"),
    "piece_too_long": Lie(TP, "mp_rank_00*", affine("q_proj", piece_of(1, "shape", [9, 8])), "outside"),
    "pieces_lost": Lie(TP, "mp_rank_00*", affine("q_proj", lambda e: e["ranks"][1].update(pieces=[])), "are in no shard"),
    "rank_lost": Lie(TP, "mp_rank_00*", affine("q_proj", lambda e: e["ranks"].pop(1)), "has no rank 1"),
    "whole_shape_endless": Lie(TP, "mp_rank_00*", affine("q_proj", lambda e: e.update(logical_shape=[2**40, 2**40])), "larger than any file"),
    "shard_shape_other": Lie(TP, "mp_rank_00*", affine("q_proj", lambda e: e["ranks"][0].update(shard_shape=[5, 8])), "another shape"),
    "degree_other": Lie(TP, "mp_rank_00*", set_at("checkpoint_parallel_dimensions", "tp_degree", 3), "says that there are 3"),
    "experts_unknown": Lie(MOE, M, drop("num_experts"), "num_experts"),
    "experts_more": Lie(MOE, M, set_at("num_experts", [4, 5]), "layer_1_expert_4"),
    "experts_endless": Lie(MOE, M, set_at("num_experts", [4, 2**50]), "layer_1_expert_4"),
    "experts_fewer": Lie(MOE, M, set_at("num_experts", [4]), "4"),
    "expert_counts_differ": Lie(MOE_Z2, "*rank_3*optim*", set_at(O, "partition_count", 1, 1), "partition_count of group 1 is 1", F32),
    "expert_count_no_divisor": Lie(MOE_Z2, "*optim*", set_at(O, "partition_count", lambda c: [c[0], 3, *c[2:]]), "partition_count of group 1 is 3", F32),
    "expert_count_lost": Lie(MOE_Z2, "*optim*", set_at(O, "partition_count", lambda c: c[:1]), "is 0 in the optimizer file of rank 0", F32),
    "expert_ranks_swapped": Lie(MOE_Z2, "*rank_0*optim*", set_at(O, MASTERS, 1, lambda t: t.flip(0)), "rounded, is not the weight in 'layer_", F32),
    "expert_masters_short": Lie(MOE_Z2, "*rank_2*optim*", set_at(O, MASTERS, 1, lambda t: t[:5].clone()), "different saves", F32),
    "expert_not_listed": Lie(MOE_Z2, M, lambda r: rename_expert(r["param_shapes"][1]), "does not list", F32),
    "expert_shape_other": Lie(MOE_Z2, M, lambda r: flip_shapes(r["param_shapes"][1]), "has one shape there", F32),
    "experts_among_others": Lie(MOE_Z2, M, lambda r: r["param_shapes"][0].update(r["param_shapes"].pop(1)), "has experts' and other parameters", F32),
    "expert_number_other": Lie(MOE_Z2, "layer_0_expert_1_*", renumber, "does not have the number of its expert", F32),
    "expert_listed_twice_over": Lie(MOE_Z2, "layer_0_expert_1_*", lambda r: r.popitem(), "lists", F32),
    "universal_short": Lie(UC, "zero/model.norm.weight/fp32.pt", "short", "in a shape other than"),
}


def change_file(path, change):
    if change == "short":
        return torch.save(torch.zeros(3), path)
    if change is None:
        return torch.save([1], path)
    root = torch.load(path, weights_only=False)
    change(root)
    return torch.save(root, path)


def tag_of(folder):
    return next(top for top, dirs, files in sorted(os.walk(folder)) if any(f.endswith("_states.pt") for f in files))


def export(tag, options, tmp):
    args = [CKPT, "export", tag, os.path.join(tmp, "out")]
    os.makedirs(tmp, exist_ok=True)
    return subprocess.run(args + [a for o in options for a in ("-o", o)], capture_output=True, text=True, timeout=300)


def check(name, lie):
    with tempfile.TemporaryDirectory() as tmp:
        run = shutil.copytree(os.path.join(GOLDEN, lie.case, "run"), os.path.join(tmp, "run"), copy_function=shutil.copyfile)
        tag = tag_of(run)
        sound = export(tag, lie.options, os.path.join(tmp, "sound"))
        paths = glob.glob(os.path.join(tag, lie.files))
        if sound.returncode or not paths:
            return "the sound one: %s" % (sound.stderr.strip() or "no file is " + lie.files)
        for path in paths:
            change_file(path, lie.change)
        done = export(tag, lie.options, tmp)
        if done.returncode != 1:
            return "exit status %d, expected an error with '%s'" % (done.returncode, lie.needle)
        if lie.needle not in done.stderr:
            return "does not say '%s': %s" % (lie.needle, done.stderr.strip())
        return None


def main():
    stand_ins()
    failed = 0
    for name, lie in LIES.items():
        if len(sys.argv) > 1 and sys.argv[1] not in name:
            continue
        problem = check(name, lie)
        failed += problem is not None
        if problem:
            print(f"FAIL {name}: {problem}")
    print(f"{len(LIES)} lies, {failed} failed")
    return failed != 0


if __name__ == "__main__":
    sys.exit(main())
