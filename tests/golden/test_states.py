# SPDX-License-Identifier: Apache-2.0
"""The option state=: what an optimizer has of each parameter, in real checkpoints, against oracles that were made without ckptfs.

An oracle of view=raw that has the optimizer's tensors says what each moment is. Where an oracle has the F32 masters, the case's member
"states" says so: {"master": {"oracle": folder, "without": names of the oracle that have none}}. states.json has digests of moments in
tests/load/runs, which make_states.py made of what torch loads."""

import concurrent.futures
import glob
import hashlib
import json
import os
import re
import sys
import tempfile

import case

RUNS = os.path.join(case.SOURCE, "tests", "load", "runs")
KINDS = ("exp_avg", "exp_avg_sq")
NAMED = re.compile(r"(?:.*\.)?optim(?:izer)?\.state\.(.*)\.(exp_avg|exp_avg_sq)$")


def shown(loaded, state):
    """The tensors of a state, or what was said instead."""
    options = {**(loaded.get("options") or {}), "state": state}
    options.pop("dtype", None)
    with tempfile.TemporaryDirectory() as tmp:
        out = os.path.join(tmp, "out")
        done = case.run(dict(loaded, options=options), "export", out)
        return done.stderr.strip() if done.returncode else case.read_tensors(out)


def compare(loaded, state, want):
    got = shown(loaded, state)
    problems = [got] if isinstance(got, str) else case.compare_tensors(got, want)
    return [f"state={state}: {p}" for p in problems]


def moments_in(oracle):
    """{kind: {parameter: tensor}} of an oracle's names."""
    found = {}
    for name, tensor in oracle.items():
        named = NAMED.match(name)
        if named:
            found.setdefault(named[2], {})[named[1]] = tensor
    return found


def wanted(loaded):
    """{state: tensors} of a case, by its oracles; {} if these know of no states."""
    folder, found = loaded["folder"], {}
    expected = os.path.join(folder, loaded.get("expected") or "expected")
    if loaded["compare"] == "refuse" or loaded.get("steps"):
        return {}
    if loaded.get("view") == "raw" and loaded["compare"] == "tensors":
        found = moments_in(case.read_tensors(expected))
    for state, said in (loaded.get("states") or {}).items():
        oracle = case.read_tensors(os.path.join(folder, said["oracle"]))
        assert oracle.keys() >= set(said["without"]), f"{folder}: states: without"
        found[state] = {k: t for k, t in oracle.items() if k not in said["without"] and not NAMED.match(k)}
    return found


def check_case(loaded, states):
    return [p for state, want in states.items() for p in compare(loaded, state, want)]


def digest(tensor):
    dtype, shape, data = tensor
    return f"{dtype} {shape} {hashlib.sha256(data).hexdigest()[:16]}"


def check_digests(name, states):
    problems = []
    for state, want in states.items():
        got = shown({"folder": RUNS, "open": name, "view": "raw"}, state)
        got = got if isinstance(got, str) else {k: digest(t) for k, t in got.items()}
        problems += [] if got == want else [f"state={state}: {got}, expected {want}"]
    return problems


def check_nanotron():
    """What the ranks of nanotron had in memory, of moments that lie in flat slices (ZeRO-1)."""
    loaded = {"folder": RUNS, "open": "nanotron-zero1", "view": "raw"}
    truth = moments_in(case.read_file(os.path.join(RUNS, "nanotron-zero1.expected.safetensors")))
    return [p for kind in KINDS for p in compare(loaded, kind, truth[kind])]


def cases():
    """(name, function that gives a list of problems)"""
    for root in case.roots():
        for path in sorted(glob.glob(os.path.join(root, "*", "*", "case*.json"))):
            loaded = case.load(path)
            states = wanted(loaded)
            if states:
                yield os.path.relpath(path, root), lambda loaded=loaded, states=states: check_case(loaded, states)
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "states.json")) as f:
        for name, states in json.load(f).items():
            yield f"load/runs/{name}", lambda name=name, states=states: check_digests(name, states)
    yield "load/runs/nanotron-zero1", check_nanotron


def main():
    failed = compared = 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, checked in [(name, pool.submit(check)) for name, check in cases()]:
            problems = checked.result()
            compared += 1
            failed += bool(problems)
            print(f"{'ok  ' if not problems else 'FAIL'} {name}")
            for p in problems[:10]:
                print(f"     {p[:600]}")
    print(f"{compared - failed} passed, {failed} failed")
    return 1 if failed or not compared else 0


if __name__ == "__main__":
    sys.exit(main())
