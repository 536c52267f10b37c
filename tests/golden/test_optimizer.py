# SPDX-License-Identifier: Apache-2.0
"""The option optimizer, of every real checkpoint that has Adam's moments, in every format that is written with them: what is read back of
the view has the source's moments under the model's names, and its masters or weights, to the bit. --tree: without the
collection's cases."""

import collections
import concurrent.futures
import glob
import json
import os
import sys
import tempfile

import case

RUNS = os.path.join(case.SOURCE, "tests", "load", "runs")
MOMENTS = ("exp_avg", "exp_avg_sq")
HYPER = {"lr": 0.001, "betas": "0.9+0.95", "eps": 1e-8, "weight_decay": 0.1, "optimizer_step": 7, "initial_lr": 0.002}
VIEWS = {"dcp": {"view": "dcp"}, "torchtitan": {"view": "torchtitan", "fuse_qkv": "no"}, "torchtitan_fused": {"view": "torchtitan", "fuse_qkv": "yes"},
         "megatron": {"view": "megatron", "min_lr": 0.0001}, "deepspeed_universal": {"view": "deepspeed_universal"}}
WRITTEN = collections.Counter()
HAS_MASTERS = ("megatron", "deepspeed_universal")  # the others' weights are the masters
DTYPES = {"F32": "float32", "BF16": "bfloat16"}
NOT_NAMED = "nothing says whose"  # by a number, where nobody knows which parameter has that


def exported(loaded, out, **options):
    """The tensors that an export wrote, or what was said instead."""
    done = case.run(dict(loaded, options={**(loaded.get("options") or {}), **options}), "export", out)
    return done.stderr.strip().splitlines()[-1] if done.returncode else case.read_tensors(out)


def check_view(view, loaded, want, top):
    """Write a view with the optimizer, and read it back."""
    out = os.path.join(top, view)
    said = exported(loaded, out, optimizer="yes", **HYPER, **VIEWS[view])
    if isinstance(said, str):  # what can't be written at all: the last one has no form without an optimizer
        refused = view != "deepspeed_universal" and isinstance(exported(loaded, os.path.join(top, f"{view}_plain"), view=VIEWS[view]["view"]), str)
        return [] if refused else [f"view={view}: {said}"]
    WRITTEN[view] += 1
    problems, written = [], {"folder": top, "open": view, "base": "base"}
    for kind, tensors in want.items():
        is_weight = kind == "master" and view not in HAS_MASTERS
        how = {"dtype": DTYPES[next(iter(tensors.values()))[0]]} if is_weight else {"state": kind}
        got = exported(written, os.path.join(top, f"{view}_{kind}"), **how)
        if not isinstance(got, str) and is_weight:  # what is frozen has no master
            got = {name: got[name] for name in got if name in tensors}
        found = [got] if isinstance(got, str) else case.compare_tensors(got, tensors)
        problems += [f"view={view}, {kind}: {p}" for p in found]
    return problems


def check(loaded):
    with tempfile.TemporaryDirectory() as top:
        weights = exported(loaded, os.path.join(top, "base"))
        want = {kind: exported(loaded, os.path.join(top, f"source_{kind}"), state=kind) for kind in (*MOMENTS, "master")}
        said = [f"{kind}: {want[kind]}" for kind in MOMENTS if isinstance(want[kind], str)]
        if said or isinstance(weights, str):
            return [problem for problem in said or [weights] if NOT_NAMED not in problem]
        if isinstance(want["master"], str) and "has no state 'master'" not in want["master"]:
            return [want["master"]]
        if isinstance(want["master"], str):  # it trains F32 weights
            want["master"] = {name: weights[name] for name in want["exp_avg"]}
        for file in glob.glob(os.path.join(top, "base", "*.safetensors*")):
            os.remove(file)
        return [p for view in VIEWS for p in check_view(view, loaded, want, top)]


def cases(unpacked):
    """(name, case) of all that may have moments: of the tree, of its archives, of the collection, and runs of frameworks."""
    for name in ("megatron", "nanotron-zero1"):
        yield name, {"folder": RUNS, "open": name}
    for root in (unpacked, *list(case.roots())[: 1 if "--tree" in sys.argv else None]):
        for path in sorted(glob.glob(os.path.join(root, "*", "*", "case*.json"))):
            loaded = case.load(path)
            if loaded["compare"] != "refuse" and not loaded.get("steps") and loaded.get("view") in (None, "hf"):
                options = {k: v for k, v in (loaded.get("options") or {}).items() if k not in ("dtype", "max_shard_size", "state")}
                yield os.path.relpath(path, root), dict(loaded, options=options)


def has_moments(loaded):
    done = case.run(loaded, "info", "--json")
    return done.returncode == 0 and json.loads(done.stdout).get("states", {}).keys() >= set(MOMENTS)


def main():
    passed = failed = 0
    with tempfile.TemporaryDirectory() as unpacked, concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for archive in ("trainers.tar.xz", "orbax.tar.xz"):
            case.unpack(archive, unpacked)
        for name, checked in [(name, pool.submit(check, loaded)) for name, loaded in cases(unpacked) if has_moments(loaded)]:
            problems = checked.result()
            passed += not problems
            failed += bool(problems)
            print(f"{'ok  ' if not problems else 'FAIL'} {name}", *[f"\n     {p[:600]}" for p in problems[:10]])
    print(f"{passed} passed, {failed} failed; written:", dict(WRITTEN))
    return 1 if failed or any(WRITTEN[view] < 4 for view in VIEWS) else 0


if __name__ == "__main__":
    sys.exit(main())
