# SPDX-License-Identifier: Apache-2.0
"""Real checkpoints with their oracles: what ckpt exports of them is compared tensor by tensor or byte by byte.

usage: test_golden.py [FORMAT | FORMAT/CASE]

A case has a case.json (see case.py), or, of nanotron, an oracle CASE.expected/ beside it with one directory for each step or the files of
one, or, of Megatron, CASE.expected.safetensors. The tree's own copies and the collection in CKPTFS_FIXTURES are tried.
"""

import concurrent.futures
import glob
import json
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
import tempfile

import case
from case import check_export, compare_tensors, read_file, read_tensors, run

FORMATS = ["huggingface", "torch", "nanotron", "dcp", "automodel", "accelerate", "trainer", "lightning", "verl", "torchtitan", "fused", "peft", "megatron", "deepspeed", "bridge", "olmo_core", "litgpt", "torchtune", "orbax"]


# ---- cases with a case.json ----


def check_lost_shards(loaded):
    """Without any one of its shards an Automodel checkpoint is refused."""
    source = os.path.join(loaded["folder"], loaded["open"])
    problems = []
    for shard in sorted(os.path.basename(p) for p in glob.glob(os.path.join(source, "model", "shard-*"))):
        with tempfile.TemporaryDirectory() as tmp:
            copy = os.path.join(tmp, "epoch_0_step_10")
            shutil.copytree(source, copy, copy_function=os.symlink)
            os.chmod(os.path.join(copy, "model"), 0o755)
            os.remove(os.path.join(copy, "model", shard))
            done = run(dict(loaded, open=copy, options=dict(loaded["options"] or {}, follow_symlinks=True)), "info")
            if done.returncode != 1:
                problems.append(f"is not refused without {shard}")
    return problems


def check_merged(loaded):
    """An adapter merged into its base: W + s B A, rounded once."""
    if not os.path.isdir(os.path.join(loaded["folder"], "expected_merged")):
        return []
    options = dict(loaded.get("options") or {}, lora="merge")
    merged = dict(loaded, options=options, expected="expected_merged", compare="tensors", bytes=[], weight_map=False)
    return [f"lora=merge: {p}" for p in case.check(merged)]


def check_bridge_adapter(loaded):
    """Bridge's PEFT export, with a base and without one, and its merged export."""
    folder = loaded["folder"]
    problems = case.check(loaded) + case.check({k: v for k, v in loaded.items() if k != "base"})
    with tempfile.TemporaryDirectory() as base:
        shutil.copy(os.path.join(folder, "base", "config.json"), base)
        shutil.copy(os.path.join(folder, "base_weights", "model.safetensors"), base)
        return problems + check_merged(dict(loaded, base=base))


def check_bridge(loaded):
    """With the base, and without one: the same, or an error that says what would help."""
    if os.path.isdir(os.path.join(loaded["folder"], "base_weights")):
        return check_bridge_adapter(loaded)
    loaded["padded"] = True
    problems = case.check(loaded)
    with tempfile.TemporaryDirectory() as tmp:
        alone, out = {k: v for k, v in loaded.items() if k != "base"}, os.path.join(tmp, "out")
        done = run(alone, "export", out)
        if done.returncode == 0:
            problems += [f"without a base: {p}" for p in case.compare_export(alone, out, os.path.join(loaded["folder"], "expected"))]
        elif not any(word in done.stderr for word in ("base=", "model_type=")):
            problems.append(f"without a base: {done.stderr.strip()}")
    return problems or check_way_back(loaded)


def layout_of(loaded, config):
    """Random options of view=megatron that the model can be divided by."""
    text = config.get("thinker_config", config)
    text = text.get("text_config", text)
    rnd = random.Random(os.environ.get("CKPTFS_SEED", "1") + os.path.basename(loaded["folder"]))
    tp = rnd.choice((1, 2))
    options = {"tp": tp, "pp": rnd.choice((1, 2) if text["num_hidden_layers"] % 2 == 0 else (1,)), "make_vocab_size_divisible_by": rnd.choice((1, 64, 128))}
    if any("expert" in key and value for key, value in text.items()):
        options |= {"ep": rnd.choice((1, 2)), "etp": rnd.choice((1, tp))}
    return options


def names_in(path):
    done = subprocess.run([case.CKPT, "ls", path, "-o", "view=raw"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in done.stdout.splitlines() if line.strip()}


class Stub:
    state = {}

    def __init__(self, *args):
        pass

    def __setstate__(self, state):
        self.state = state


class Unpickler(pickle.Unpickler):
    """Reads .metadata without torch."""

    def find_class(self, module, name):
        return tuple if (module, name) == ("torch", "Size") else type(name, (Stub,), {})


def catalogue_of(path):
    """{key of .metadata: "an object", or its dtype, size and boxes}"""
    (at,) = glob.glob(os.path.join(path, "*", ".metadata"))
    with open(at, "rb") as f:
        keys = Unpickler(f).load().state["state_dict_metadata"]
    box = lambda c: (c.state["offsets"], c.state["sizes"])
    return {key: (v.state["properties"].state[0].__name__, v.state["size"], sorted(map(box, v.state["chunks"]))) if "size" in v.state else "an object"
            for key, v in keys.items()}


def digests_of(path):
    done = subprocess.run([case.CKPT, "digest", "--tensors", path, "-o", "view=raw"], capture_output=True, text=True, check=True)
    return {line.split()[-1]: line for line in done.stdout.splitlines() if not line.startswith("#")}


# Modules of other libraries or of Bridge's own, whose norms and projections have no extra state: Megatron does not look at these
EXTRA = ("multi_modal_projector.linear_", "patch_merge_mlp.", "resampler_model.", "visual.", "vision_tower.", "thinker.audio_model.", "thinker.visual.",
         "decoder.layers.self_attention.q_layernorm.", "decoder.layers.self_attention.k_layernorm.")


def check_same_layout(loaded, model, written):
    """Written at the layout of Bridge's run it has Bridge's catalogue: keys, dtypes, sizes, boxes, extra states; and its bytes."""
    run_of_bridge = os.path.join(loaded["folder"], loaded["open"])
    with open(glob.glob(os.path.join(run_of_bridge, "*", "run_config.yaml"))[0]) as f:
        stated = dict(re.findall(r"^  (\w+)_parallel_size: (\d+)$", f.read(), re.M))
    theirs = catalogue_of(run_of_bridge)
    options = {"tp": stated["tensor_model"], "make_vocab_size_divisible_by": 1}
    if any(".experts.experts." in key for key in theirs):
        options |= {"ep": stated["expert_model"], "etp": stated["expert_tensor"]}
    if stated["pipeline_model"] != "1" and "layout" not in loaded["parallel"]:  # stages of a layout of its own have the same boxes
        options["pp"] = stated["pipeline_model"]
    done = run({"folder": model, "open": model, "options": {"view": "megatron"} | options}, "export", written)
    if done.returncode:
        return [f"written with {options}: {done.stderr.strip()}"]
    ours = catalogue_of(written)
    theirs.pop("common_state/shard_0_1")  # common.pt here
    problems = [f"{k} is {ours.get(k, 'not there')}, Bridge's {v}" for k, v in theirs.items() if ours.get(k) != v]
    problems += [f"{k} is not Bridge's" for k in ours.keys() - theirs.keys() if not (k.startswith(EXTRA) and "._extra_state/" in k)]
    ours, theirs = digests_of(written), digests_of(run_of_bridge)
    problems += [f"{k}: {ours.get(k)}, Bridge's {v}" for k, v in theirs.items() if ours.get(k) != v]
    return [f"written with {options}: {p}" for p in problems or ([] if ours else ["no tensors"])]


def check_way_back(loaded):
    """The oracle written as Megatron's checkpoint has the names that Bridge gave its own, and is the oracle when it is read again."""
    with tempfile.TemporaryDirectory() as tmp:
        model, written, again = (os.path.join(tmp, n) for n in ("hf", "megatron", "again"))
        shutil.copytree(os.path.join(loaded["folder"], loaded["base"]), model)
        for path in glob.glob(os.path.join(loaded["folder"], "expected", "*")):
            shutil.copy(path, model)
        with open(os.path.join(model, "config.json")) as f:
            options = layout_of(loaded, json.load(f))
        done = run({"folder": tmp, "open": model, "options": {"view": "megatron"} | options}, "export", written)
        if done.returncode:
            return [] if "there is no way back" in done.stderr else [f"written with {options}: {done.stderr.strip()}"]
        done = run(dict(loaded, open=written), "export", again)
        if done.returncode:
            return [f"written with {options}, read again: {done.stderr.strip()}"]
        got, theirs, ours = read_tensors(again), names_in(os.path.join(loaded["folder"], loaded["open"])), names_in(written)
        problems = compare_tensors(got, case.crop(got, read_tensors(model)))
        problems = [f"written with {options}: {p}" for p in problems + [f"the names differ: {n}" for n in sorted(ours ^ theirs)]]
        return problems + check_same_layout(loaded, model, os.path.join(tmp, "same"))


def check_json(fmt, path):
    loaded = case.load(path)
    if fmt == "bridge":
        return check_bridge(loaded)
    problems = case.check(loaded)
    if not problems and fmt == "automodel" and loaded["compare"] != "refuse" and "steps" not in loaded:
        problems = check_lost_shards(loaded)
    return problems or check_merged(loaded)


# ---- others ----


def bare(folder, path, **options):
    return {"folder": folder, "open": path, "compare": "tensors", "options": options}


def check_config(run_case, expected, step):
    """Every key that the oracle's config.json states."""
    with tempfile.TemporaryDirectory() as tmp:
        out = os.path.join(tmp, "out")
        run(run_case, "export", out, *(["--step", step] if step else []))
        return case.compare_config(out, expected)


def check_nanotron(folder, name):
    expected, own = os.path.join(folder, name + ".expected"), bare(folder, name)
    steps = [s for s in sorted(os.listdir(expected)) if os.path.isdir(os.path.join(expected, s))]
    problems = []
    for step in steps or [None]:
        at = os.path.join(expected, step or "")
        problems += [f"step {step}: {p}" for p in check_export(own, at, step) + check_config(own, at, step)]
    for inner in sorted(os.listdir(os.path.join(folder, name))):  # a step directory given by itself is the same
        if not steps and os.path.isdir(os.path.join(folder, name, inner, "model")):
            problems += [f"{inner}/: {p}" for p in check_export(bare(folder, os.path.join(name, inner)), expected)]
    return problems


def check_bare_megatron(folder, name):
    """Without a run's arguments: the numbers that shapes cannot tell are options."""
    with tempfile.TemporaryDirectory() as tmp:
        out = os.path.join(tmp, "out")
        done = run(bare(folder, name, num_attention_heads=4, num_key_value_heads=2, head_dim=4), "export", out)
        if done.returncode:
            return [f"refused: {done.stderr.strip()}"]
        return compare_tensors(read_tensors(out), read_file(os.path.join(folder, name + ".expected.safetensors")))


# ---- all ----


def cases(root):
    """(name, function that gives a list of problems)"""
    for fmt in FORMATS:
        folder = os.path.join(root, fmt)
        for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
            if name.endswith(".expected.safetensors"):
                yield f"{fmt}/{name[:-21]}", lambda f=folder, n=name[:-21]: check_bare_megatron(f, n)
            if name.endswith(".expected"):
                yield f"{fmt}/{name[:-9]}", lambda f=folder, n=name[:-9]: check_nanotron(f, n)
            for path in sorted(glob.glob(os.path.join(folder, name, "case*.json"))):
                yield f"{fmt}/{name}/{os.path.basename(path)}", lambda f=fmt, p=path: check_json(f, p)


def main():
    only = sys.argv[1] if len(sys.argv) > 1 else ""
    passed = failed = 0
    todo, seen = [], set()
    with tempfile.TemporaryDirectory() as unpacked, concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        case.unpack("bridge.tar.xz", os.path.join(unpacked, "bridge"))
        case.unpack("trainers.tar.xz", unpacked)
        case.unpack("orbax.tar.xz", unpacked)
        for root in [unpacked, *case.roots()]:
            for name, check in cases(root):
                if not (name + "/").startswith(only.rstrip("/") + "/" if only else "") or (name.startswith("bridge/") and name in seen):
                    continue  # the collection has the archive's cases, too
                seen.add(name)
                todo.append((name, pool.submit(check)))
        for name, checked in todo:
            problems = checked.result()
            print(f"{'ok  ' if not problems else 'FAIL'} {name}")
            for p in problems[:10]:
                print(f"     {p}")
            passed, failed = passed + (not problems), failed + bool(problems)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
