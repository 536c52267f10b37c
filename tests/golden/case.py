# SPDX-License-Identifier: Apache-2.0
"""One real checkpoint with its oracle, as a case.json beside it says: what to open, with which options, and how to compare.

    open, base, options   what ckpt is given (paths are relative to the case)
    compare               bytes: every file of expected/; tensors: the union of the tensors; refuse: an error, and no bytes
    bytes                 side files that must be equal to the byte
    weight_map            true: each tensor is in the file that the index of expected/ names
    steps                 {step: folder with its oracle} of a run; incomplete: steps that it must not show; latest
"""

import json
import os
import subprocess
import tempfile

from test_golden import CKPT, compare_tensors, read_tensors


def load(path):
    with open(path) as f:
        case = json.load(f)
    case["folder"] = os.path.dirname(os.path.abspath(path))
    return case


def options_of(case):
    given = {} if case.get("view", "hf") == "hf" else {"view": case["view"]}
    if case.get("base"):
        given["base"] = os.path.join(case["folder"], case["base"])
    given.update(case.get("options") or {})
    for key, value in given.items():
        if isinstance(value, bool):
            value = str(value).lower()
        elif key == "key_mapping":
            value = os.path.join(case["folder"], value)
        yield f"{key}={value}"


def run(case, command, *args):
    args = [CKPT, command, os.path.join(case["folder"], case["open"]), *args]
    for o in options_of(case):
        args += ["-o", o]
    return subprocess.run(args, capture_output=True, text=True)


def weight_map(folder):
    """{tensor: file} by the index; without one, by the only file."""
    indices = [f for f in os.listdir(folder) if f.endswith(".safetensors.index.json")]
    if indices:
        with open(os.path.join(folder, indices[0])) as f:
            return indices[0], json.load(f)["weight_map"]
    files = [f for f in os.listdir(folder) if f.endswith(".safetensors")]
    return None, {tensor: files[0] for tensor in read_tensors(folder)}


def compare_maps(out, expected):
    (name, got), (want_name, want) = weight_map(out), weight_map(expected)
    problems = [] if name == want_name else [f"the index is {name}, expected {want_name}"]
    return problems + [f"{t} is in {got.get(t)}, expected {f}" for t, f in want.items() if got.get(t) != f]


def compare_bytes(out, expected, names):
    problems = []
    for name in names:
        path = os.path.join(out, name)
        if not os.path.exists(path):
            problems.append(f"there is no {name}")
            continue
        with open(path, "rb") as a, open(os.path.join(expected, name), "rb") as b:
            if a.read() != b.read():
                problems.append(f"{name} differs")
    return problems


def all_files(folder):
    for top, _, files in os.walk(folder):
        for name in sorted(files):
            yield os.path.relpath(os.path.join(top, name), folder)


def compare_export(case, out, expected):
    if case["compare"] == "bytes":
        return compare_bytes(out, expected, all_files(expected))
    problems = compare_tensors(read_tensors(out), read_tensors(expected))
    problems += compare_bytes(out, expected, case.get("bytes") or [])
    return problems + (compare_maps(out, expected) if case.get("weight_map") else [])


def check_export(case, expected, step=None):
    with tempfile.TemporaryDirectory() as tmp:
        out = os.path.join(tmp, "out")
        done = run(case, "export", out, *(["--step", step] if step else []))
        if done.returncode:
            return [f"refused: {done.stderr.strip()}"]
        return compare_export(case, out, os.path.join(case["folder"], expected))


def check_refused(case):
    with tempfile.TemporaryDirectory() as tmp:
        done = run(case, "export", os.path.join(tmp, "out"))
    if done.returncode == 0:
        return [f"was not refused: {case['note']}"]
    return [] if done.returncode == 1 and done.stderr.strip() else [f"exit {done.returncode}: {done.stderr.strip()}"]


def check_steps(case):
    problems = []
    for step, expected in case["steps"].items():
        problems += [f"step {step}: {p}" for p in check_export(case, expected, step)]
    info = run(case, "info", "--json")
    if info.returncode:
        return problems + [f"refused: {info.stderr.strip()}"]
    shown = json.loads(info.stdout)["steps"]
    if sorted(shown) != sorted(case["steps"]):
        problems.append(f"the steps are {shown}, expected {sorted(case['steps'])}")
    if case.get("latest") in case["steps"]:
        problems += [f"latest: {p}" for p in check_export(case, case["steps"][case["latest"]])]
    return problems


def check(case):
    """A list of what is wrong; and what ckpt said, if that is of interest."""
    if case["compare"] == "refuse":
        return check_refused(case)
    if case.get("steps"):
        return check_steps(case)
    return check_export(case, case.get("expected") or "expected")
