# SPDX-License-Identifier: Apache-2.0
"""Real checkpoints against their oracles: tests/golden, and the collection at CKPTFS_FIXTURES. Needs nothing but Python and the ckpt tool.

usage: test_golden.py [FORMAT[/CASE]]
"""

import json
import os
import struct
import subprocess
import sys
import tempfile

FORMATS = ["nanotron", "dcp", "accelerate", "trainer", "lightning", "verl", "torchtitan", "fused", "megatron"]  # of the collection, those that ckptfs reads
NOT_YET = os.path.join(os.path.dirname(os.path.abspath(__file__)), "not_yet.txt")  # cases that other parts are to make work
BUILD = os.environ.get("CKPTFS_BUILD", "build/release")
SOURCE = os.environ.get("CKPTFS_SOURCE", os.path.join(os.path.dirname(__file__), "..", ".."))
CKPT = os.path.join(BUILD, "fs", "ckpt")


def read_file(path):
    """{name: (dtype, shape, bytes)} of a safetensors file."""
    with open(path, "rb") as f:
        data = f.read()
    (n,) = struct.unpack("<Q", data[:8])
    found = {}
    for tensor, t in json.loads(data[8:8 + n]).items():
        if tensor != "__metadata__":
            lo, hi = t["data_offsets"]
            found[tensor] = (t["dtype"], t["shape"], data[8 + n + lo:8 + n + hi])
    return found


def read_tensors(folder):
    """The same of all safetensors files of a folder."""
    found = {}
    for name in sorted(os.listdir(folder)):
        if name.endswith(".safetensors"):
            more = read_file(os.path.join(folder, name))
            assert not found.keys() & more.keys(), f"{found.keys() & more.keys()} is in two files"
            found.update(more)
    return found


def compare_tensors(got, want):
    problems = [f"missing: {n}" for n in sorted(want.keys() - got.keys())]
    problems += [f"not expected: {n}" for n in sorted(got.keys() - want.keys())]
    for name in sorted(got.keys() & want.keys()):
        (d1, s1, b1), (d2, s2, b2) = got[name], want[name]
        if (d1, s1) != (d2, s2):
            problems.append(f"{name}: {d1} {s1}, expected {d2} {s2}")
        elif b1 != b2:
            at = next(i for i in range(len(b1)) if b1[i] != b2[i])
            problems.append(f"{name}: differs from byte {at} on")
    return problems


def compare_config(got, want):
    return [f"config.json: {k} is {got.get(k, 'absent')!r}, expected {v!r}" for k, v in want.items() if got.get(k) != v]


def export(source, dest, options, step=None):
    args = [CKPT, "export", source, dest]
    for o in options:
        args += ["-o", o]
    if step:
        args += ["--step", step]
    return subprocess.run(args, capture_output=True, text=True)


def check_export(source, expected, options=(), step=None):
    with tempfile.TemporaryDirectory() as tmp:
        out = os.path.join(tmp, "out")
        done = export(source, out, options, step)
        if done.returncode:
            return [f"refused: {done.stderr.strip()}"]
        problems = compare_tensors(read_tensors(out), read_tensors(expected))
        config = os.path.join(expected, "config.json")
        if os.path.exists(config):
            with open(config) as a, open(os.path.join(out, "config.json")) as b:
                problems += compare_config(json.load(b), json.load(a))
        return problems


def compare_files(out, expected):
    """Every file under expected, byte for byte."""
    problems = []
    for folder, _, names in os.walk(expected):
        for name in names:
            path = os.path.relpath(os.path.join(folder, name), expected)
            if not os.path.exists(os.path.join(out, path)):
                problems.append(f"{path}: not there")
                continue
            with open(os.path.join(out, path), "rb") as a, open(os.path.join(expected, path), "rb") as b:
                if a.read() != b.read():
                    problems.append(f"{path}: differs")
    if any(".safetensors: " in p for p in problems):
        problems += compare_tensors(read_tensors(out), read_tensors(expected))
    return problems


def weight_map(folder):
    with open(os.path.join(folder, "model.safetensors.index.json")) as f:
        return json.load(f)["weight_map"]


def check_output(folder, case, out, expected):
    if case["compare"] == "bytes":
        return compare_files(out, expected)
    problems = compare_tensors(read_tensors(out), read_tensors(expected))
    for name in case.get("bytes", []):
        with open(os.path.join(out, name), "rb") as a, open(os.path.join(expected, name), "rb") as b:
            if a.read() != b.read():
                problems.append(f"{name}: differs")
    if case.get("weight_map"):
        want = case["weight_map"] if isinstance(case["weight_map"], dict) else weight_map(expected)
        if weight_map(out) != want:
            problems.append("weight_map differs")
    return problems


def check_json(folder, path):
    """A case of the first shape of the collection's README."""
    with open(os.path.join(folder, path)) as f:
        case = json.load(f)
    source = os.path.join(folder, case["open"])
    options = [f"{k}={v}" for k, v in (case.get("options") or {}).items()]
    options += ["view=raw"] if case["view"] == "raw" else []
    options += [f"base={os.path.join(folder, case['base'])}"] if case.get("base") else []
    if case.get("steps"):
        wanted = {step: os.path.join(folder, e) for step, e in case["steps"].items()}
    else:
        wanted = {None: os.path.join(folder, case.get("expected") or "expected")}
    problems = []
    for step, expected in wanted.items():
        with tempfile.TemporaryDirectory() as tmp:
            out = os.path.join(tmp, "out")
            done = export(source, out, options, step)
            if case["compare"] == "refuse":
                if done.returncode == 0 and not os.path.isdir(expected):
                    problems.append("not refused")
                elif done.returncode == 0:
                    problems += compare_tensors(read_tensors(out), read_tensors(expected))
                elif done.returncode < 0 or not done.stderr.strip():
                    problems.append(f"no error but status {done.returncode}")
                elif "neither a checkpoint of a known format" in done.stderr:
                    problems.append("refused without knowing what it is")
                elif os.environ.get("CKPTFS_VERBOSE"):
                    print(f"     {done.stderr.strip()}")
            elif done.returncode:
                problems.append(f"refused: {done.stderr.strip()}")
            else:
                problems += check_output(folder, case, out, expected)
    return problems


def check_bare(folder, case):
    """A Megatron checkpoint without a run's arguments: the numbers that shapes cannot tell are options."""
    options = ["num_attention_heads=4", "num_key_value_heads=2", "head_dim=4"]
    with tempfile.TemporaryDirectory() as tmp:
        out = os.path.join(tmp, "out")
        done = export(os.path.join(folder, case), out, options)
        if done.returncode:
            return [f"refused: {done.stderr.strip()}"]
        return compare_tensors(read_tensors(out), read_file(os.path.join(folder, case + ".expected.safetensors")))


def check_case(folder, case):
    if case.endswith(".json"):
        return check_json(os.path.join(folder, os.path.dirname(case)), os.path.basename(case))
    if os.path.exists(os.path.join(folder, case + ".expected.safetensors")):
        return check_bare(folder, case)
    expected = os.path.join(folder, case + ".expected")
    source = os.path.join(folder, case)
    steps = [s for s in sorted(os.listdir(expected)) if os.path.isdir(os.path.join(expected, s))]
    problems = []
    for step in steps:
        problems += [f"step {step}: {p}" for p in check_export(source, os.path.join(expected, step), step=step)]
    if not steps:
        problems += check_export(source, expected)
        for inner in sorted(os.listdir(source)):  # a step directory given by itself is the same
            if os.path.isdir(os.path.join(source, inner, "model")):
                problems += [f"{inner}/: {p}" for p in check_export(os.path.join(source, inner), expected)]
    return problems


def cases(root, only):
    for fmt in FORMATS:
        folder = os.path.join(root, fmt)
        for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
            if name.endswith(".expected.safetensors") and fmt == "megatron" and (only is None or only in (fmt, f"{fmt}/{name[:-21]}")):
                yield fmt, folder, name[:-21]
            if name.endswith(".expected") and (only is None or only in (fmt, f"{fmt}/{name[:-9]}")):
                yield fmt, folder, name[:-9]
            inner = os.path.join(folder, name)
            for case in sorted(os.listdir(inner)) if os.path.isdir(inner) else []:
                if case.startswith("case") and case.endswith(".json") and (only is None or only in (fmt, f"{fmt}/{name}")):
                    yield fmt, folder, f"{name}/{case}"


def main():
    roots = [os.path.join(SOURCE, "tests", "golden")]
    fixtures = os.environ.get("CKPTFS_FIXTURES") or os.path.join(SOURCE, "..", "shared", "fixtures")
    if os.path.isdir(fixtures):
        roots.append(fixtures)
    elif os.environ.get("CKPTFS_FIXTURES"):
        sys.exit(f"CKPTFS_FIXTURES={fixtures} is no directory")
    only = sys.argv[1] if len(sys.argv) > 1 else None
    with open(NOT_YET) as f:
        not_yet = {line.split()[0] for line in f if line.strip() and not line.startswith("#")}
    passed = failed = 0
    for root in roots:
        for fmt, folder, case in cases(root, only):
            problems = check_case(folder, case)
            if problems and f"{fmt}/{case}" in not_yet:
                print(f"todo {fmt}/{case}: {problems[0]}")
                continue
            print(f"{'ok  ' if not problems else 'FAIL'} {fmt}/{case}")
            for p in problems[:10]:
                print(f"     {p}")
            passed, failed = passed + (not problems), failed + bool(problems)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
