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

FORMATS = ["nanotron"]  # of the collection, those that ckptfs reads
BUILD = os.environ.get("CKPTFS_BUILD", "build/release")
SOURCE = os.environ.get("CKPTFS_SOURCE", os.path.join(os.path.dirname(__file__), "..", ".."))
CKPT = os.path.join(BUILD, "fs", "ckpt")


def read_tensors(folder):
    """{name: (dtype, shape, bytes)} of all safetensors files of a folder."""
    found = {}
    for name in sorted(os.listdir(folder)):
        if not name.endswith(".safetensors"):
            continue
        with open(os.path.join(folder, name), "rb") as f:
            data = f.read()
        (n,) = struct.unpack("<Q", data[:8])
        for tensor, t in json.loads(data[8:8 + n]).items():
            if tensor == "__metadata__":
                continue
            lo, hi = t["data_offsets"]
            assert tensor not in found, f"{tensor} is in two files"
            found[tensor] = (t["dtype"], t["shape"], data[8 + n + lo:8 + n + hi])
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


def check_case(folder, case):
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
            if name.endswith(".expected") and (only is None or only in (fmt, f"{fmt}/{name[:-9]}")):
                yield fmt, folder, name[:-9]


def main():
    roots = [os.path.join(SOURCE, "tests", "golden")]
    fixtures = os.environ.get("CKPTFS_FIXTURES") or os.path.join(SOURCE, "..", "shared", "fixtures")
    if os.path.isdir(fixtures):
        roots.append(fixtures)
    elif os.environ.get("CKPTFS_FIXTURES"):
        sys.exit(f"CKPTFS_FIXTURES={fixtures} is no directory")
    only = sys.argv[1] if len(sys.argv) > 1 else None
    passed = failed = 0
    for root in roots:
        for fmt, folder, case in cases(root, only):
            problems = check_case(folder, case)
            print(f"{'ok  ' if not problems else 'FAIL'} {fmt}/{case}")
            for p in problems[:10]:
                print(f"     {p}")
            passed, failed = passed + (not problems), failed + bool(problems)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
