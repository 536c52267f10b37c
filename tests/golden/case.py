# SPDX-License-Identifier: Apache-2.0
"""One real checkpoint with its oracle, as a case.json beside it says: what to open, with which options, and how to compare.

    open, base, options   what ckpt is given (paths are relative to the case)
    view                  raw: under the stored names
    padded                true: the oracle keeps the rows behind the vocabulary
    compare               bytes: every file of expected/; tensors: the union of the tensors; refuse: an error, and no bytes
    says                  what the error of "refuse" has to say
    bytes                 side files that must be equal to the byte
    absent                files that must not be there
    config                true: config.json has every key that the oracle's states, with its value
    weight_map            true: each tensor is in the file that the index of expected/ names; or what the index must say
    states                {state: oracle, and which of its names have no such state}: of test_states.py
    steps                 {step: folder with its oracle} of a run; incomplete: steps that it must not show; latest
"""

import json
import os
import struct
import subprocess
import sys
import tarfile
import tempfile

BUILD = os.environ.get("CKPTFS_BUILD", "build/release")
SOURCE = os.path.abspath(os.environ.get("CKPTFS_SOURCE", os.path.join(os.path.dirname(__file__), "..", "..")))
CKPT = os.path.join(BUILD, "fs", "ckpt")


def roots():
    """Where cases are: the tree's own, and the collection."""
    yield os.path.join(SOURCE, "tests", "golden")
    fixtures = os.environ.get("CKPTFS_FIXTURES") or os.path.join(SOURCE, "..", "shared", "fixtures")
    if os.path.isdir(fixtures):
        yield fixtures
    elif os.environ.get("CKPTFS_FIXTURES"):
        sys.exit(f"CKPTFS_FIXTURES={fixtures} is not a directory")
    oracles = os.path.join(SOURCE, "..", "shared", "oracles")
    if os.path.isdir(oracles):
        yield oracles


def unpack(name, folder):
    """Unpack an archive of tests/golden. Debian 12's Python 3.11.2 has no filters yet; later ones warn if none is named."""
    safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    with tarfile.open(os.path.join(SOURCE, "tests", "golden", name)) as archive:
        archive.extractall(folder, **safe)


# ---- tensors ----


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


def crop(got, want):
    """want without the rows behind the vocabulary, which Megatron-Bridge's exports keep."""
    for name, (dtype, shape, data) in want.items():
        rows = got[name][1][0] if name in got and got[name][1] else 0
        if name.rsplit(".", 2)[-2] in ("embed_tokens", "word_embeddings", "lm_head", "embed_tokens_per_layer") and rows < shape[0]:
            want[name] = (dtype, [rows, *shape[1:]], data[:len(data) // shape[0] * rows])
    return want


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


# ---- files ----


def weight_map(folder):
    """{tensor: file} by the index; without one, by the only file."""
    indices = [f for f in os.listdir(folder) if f.endswith(".safetensors.index.json")]
    if indices:
        with open(os.path.join(folder, indices[0])) as f:
            return indices[0], json.load(f)["weight_map"]
    files = [f for f in os.listdir(folder) if f.endswith(".safetensors")]
    return None, {tensor: files[0] for tensor in read_tensors(folder)}


def compare_maps(out, expected, stated):
    name, got = weight_map(out)
    want_name, want = (name, stated) if isinstance(stated, dict) else weight_map(expected)
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
    if any(p.endswith(".safetensors differs") for p in problems):
        problems += compare_tensors(read_tensors(out), read_tensors(expected))
    return problems


def compare_config(out, expected):
    path = os.path.join(expected, "config.json")
    if not os.path.exists(path):
        return []
    with open(path) as a, open(os.path.join(out, "config.json")) as b:
        want, got = json.load(a), json.load(b)
    return [f"config.json: {k} is {got.get(k, 'absent')!r}, expected {v!r}" for k, v in want.items() if got.get(k) != v]


def all_files(folder):
    for top, _, files in os.walk(folder):
        for name in sorted(files):
            yield os.path.relpath(os.path.join(top, name), folder)


# ---- cases ----


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


def compare_export(case, out, expected):
    if case["compare"] == "bytes":
        return compare_bytes(out, expected, all_files(expected))
    got, want = read_tensors(out), read_tensors(expected)
    problems = compare_tensors(got, crop(got, want) if case.get("padded") else want)
    problems += compare_bytes(out, expected, case.get("bytes") or [])
    problems += compare_config(out, expected) if case.get("config") else []
    problems += [f"{name} is there" for name in case.get("absent") or [] if os.path.exists(os.path.join(out, name))]
    return problems + (compare_maps(out, expected, case["weight_map"]) if case.get("weight_map") else [])


def check_export(case, expected, step=None):
    with tempfile.TemporaryDirectory() as tmp:
        out = os.path.join(tmp, "out")
        done = run(case, "export", out, *(["--step", step] if step else []))
        if done.returncode:
            return [f"refused: {done.stderr.strip()}"]
        return compare_export(case, out, os.path.join(case["folder"], expected))


def check_refused(case):
    """Refused by one who knows what it is; or, where there is an oracle, served right."""
    expected = os.path.join(case["folder"], case.get("expected") or "expected")
    with tempfile.TemporaryDirectory() as tmp:
        out = os.path.join(tmp, "out")
        done = run(case, "export", out)
        if done.returncode == 0:
            return compare_tensors(read_tensors(out), read_tensors(expected)) if os.path.isdir(expected) else [f"was not refused: {case['note']}"]
    if os.environ.get("CKPTFS_VERBOSE"):
        print(f"     {done.stderr.strip()}")
    if "neither a checkpoint of a known format" in done.stderr:
        return ["refused without knowing what it is"]
    if case.get("says", "") not in done.stderr:
        return [f"does not say '{case['says']}': {done.stderr.strip()}"]
    return [] if done.returncode == 1 and done.stderr.strip() else [f"exit {done.returncode}: {done.stderr.strip()}"]


def check_steps(case):
    problems = []
    for step, expected in case["steps"].items():
        problems += [f"step {step}: {p}" for p in check_export(case, expected, step)]
    info = run(case, "info", "--json")
    if info.returncode:
        return problems + [f"refused: {info.stderr.strip()}"]
    shown = json.loads(info.stdout)["steps"]
    problems += [f"the step {step} is not shown" for step in case["steps"] if step not in shown]
    problems += [f"the step {step} is shown, though incomplete" for step in case.get("incomplete") or [] if step in shown]
    if case.get("latest") in case["steps"]:
        problems += [f"latest: {p}" for p in check_export(case, case["steps"][case["latest"]])]
    return problems


def check_sources(case):
    """The view knows the files that its tensors are read from, each once: by them it tells one save of a step from another. It knows which step that is, also
    by a link."""
    with tempfile.TemporaryDirectory() as tmp:
        link = os.path.join(tmp, "link")
        os.symlink(os.path.realpath(os.path.join(case["folder"], case["open"])), link)
        told = [run(c, "info", "--json") for c in (case, dict(case, open=link))]
    if any(done.returncode for done in told):
        return [done.stderr.strip() for done in told]
    info, by_link = (json.loads(done.stdout) for done in told)
    tops = [os.path.join(case["folder"], case[k]) for k in ("open", "base") if case.get(k)]
    there = sum(os.path.getsize(top) if os.path.isfile(top) else sum(os.path.getsize(os.path.join(top, n)) for n in all_files(top)) for top in tops)
    problems = [f"opened by a link: {k} is {by_link.get(k)}, not {info.get(k)}" for k in ("step", "epoch", "iteration", "steps") if info.get(k) != by_link.get(k)]
    if info["tensors"] and not 0 < info["stored_bytes"] <= there:
        problems.append(f"info: {info['shard_files']} files of {info['stored_bytes']} bytes; there are {there}")
    return problems


def check(case):
    """A list of what is wrong."""
    if case["compare"] == "refuse":
        return check_refused(case)
    if case.get("steps"):
        return check_steps(case)
    return check_export(case, case.get("expected") or "expected") or check_sources(case)
