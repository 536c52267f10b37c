# SPDX-License-Identifier: Apache-2.0
"""Every real checkpoint loaded by 1 to 8 ranks (threads) in layouts other than its own, every byte compared with the view's.

usage: test_fixtures.py [FORMAT[/CASE]]     CKPTFS_FIXTURES: the collection
       test_fixtures.py --first             one checkpoint of each format in tests/golden, one and four ranks
"""

import json
import os
import re
import subprocess
import sys
import tempfile

from ranks import SLOW

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "golden"))
import case as cases  # noqa: E402
from case import BUILD, CKPT, SOURCE  # noqa: E402

NOT_YET = ()  # formats that no reader knows; everything else must open
LOAD_RANKS = os.path.join(BUILD, "tests", "load_ranks")
FIXTURES = os.environ.get("CKPTFS_FIXTURES") or os.path.join(SOURCE, "..", "shared", "fixtures")
TP = {1: ["tp=1"], 2: ["tp=2", "pp=2", "ep=2"], 3: ["dp=3"], 4: ["tp=2,pp=2", "tp=4", "ep=2,tp=2"], 5: ["dp=5"], 6: ["tp=2,dp=3", "tp=2,fsdp=3"],
      7: ["dp=7"], 8: ["tp=2,pp=2,dp=2", "tp=2,ep=2,fsdp=2", "tp=8"]}


def checkpoints(top):
    """(name, path, options) of what can be opened below a folder."""
    for folder, dirs, files in os.walk(top):
        dirs.sort()
        for name in sorted(f for f in files if f.startswith("case") and f.endswith(".json")):
            case = cases.load(os.path.join(folder, name))
            if case["compare"] != "refuse":
                yield os.path.relpath(folder, top), os.path.join(folder, case["open"]), list(cases.options_of(case))
        for d in [d for d in dirs if d + ".expected" in dirs or d + ".expected.safetensors" in files]:
            yield os.path.relpath(os.path.join(folder, d), top), os.path.join(folder, d), []


def opens(path, options):
    args = [CKPT, "info", path]
    for o in options:
        args += ["-o", o]
    return subprocess.run(args, capture_output=True).returncode == 0


def has_experts(path, options):
    """Does the model have routed experts, by the names of its tensors (a shared expert is none)?"""
    args = [CKPT, "ls", "--json", path]
    for o in options:
        args += ["-o", o]
    listed = json.loads(subprocess.run(args, capture_output=True, text=True, check=True).stdout)
    return any(re.search(r"(^|[._])experts[._]", t["name"]) for t in listed)


def run(path, options, jobs, **env):
    args = [LOAD_RANKS]
    for o in options:
        args += ["-o", o]
    return subprocess.run([*args, path, "--", *jobs], capture_output=True, text=True, timeout=300 * SLOW, env=dict(os.environ, **env))


def judge(layout, lines, experts, merges):
    """(what is wrong, was it loaded?) of what the jobs of one layout said; some models can't be divided in every way."""
    told = [line for line in lines if " rank " in line]
    expected = [t for t in told if "no model file says" in t or "config.json lacks a size" in t or "which is no multiple of it" in t]
    if expected:  # a stage without layers has no heads to refuse, and finds the others gone
        expected += [t for t in told if ": peer: rank " in t and t.endswith(" is gone")]
    problems = []
    if "ep=" in layout and not experts:
        refusal = [t for t in told if t.endswith("ep=2, but this model has no experts")]
        if not refusal and not expected:
            problems.append(f"{layout} was not refused, though the model has no experts")
        expected += refusal
    problems += [t for t in told if t not in expected]
    for line in lines:
        word, ranks = line.split(), int(line.split()[0].rpartition(":")[2])
        # columns of what is computed, or lies in small runs, are read as rows by each rank that wants some of them
        most = 1.05 if "tp" not in layout else int(layout.split("tp=")[1].split(",")[0])
        most = max(most, ranks) if merges else most  # each rank that computes a part of a product reads its matrices
        if len(word) > 8 and word[1] == "once" and int(word[7]) > most * int(word[5]):
            problems.append(f"reads too much: {line}")
    return problems, not told


def check(name, path, options):
    """Run all jobs in one process, which opens the checkpoint once; each line that it prints begins with LAYOUT:RANKS."""
    jobs = []
    for n in range(1, 9):
        jobs += [f"fsdp={n}:{n}:{'each' if n % 2 else 'once'}", f"random:{n}:once", f"random:{n}:{'once' if n % 2 else 'each'}:{1 << 20}"]
    layouts = [(layout, n) for n, some in TP.items() for layout in some]
    for layout, n in layouts:
        jobs += [f"{layout}:{n}:once"] + ([f"{layout}:{n}:each"] if n == 4 else [])
    result = run(path, options, jobs)
    lines = result.stdout.splitlines()
    problems = [result.stderr] if result.returncode not in (0, 1) else []
    known, divided, experts = set(), 0, has_experts(path, options)
    for layout, n in layouts:
        mine = [line for line in lines if line.startswith(f"{layout}:{n} ")]
        if not mine:
            problems.append(f"{layout} by {n} ranks said nothing")
        wrong, loaded = judge(layout, mine, experts, "lora=merge" in options)
        problems += wrong
        divided += loaded
        known.update(mine)
    problems += [line for line in lines if " rank " in line and line not in known]
    print(f"{'FAIL' if problems else 'ok  '} {name}: {divided} layouts with tp, pp, ep")
    for p in problems[:8]:
        print("    ", p)
    return not problems


def first():
    """Load one checkpoint of each format."""
    seen, failed = {}, 0
    for name, path, options in checkpoints(os.path.join(SOURCE, "tests", "golden")):
        kind = name.split(os.sep)[0]
        if kind in seen or not opens(path, options):
            continue
        seen[kind] = name
        result = run(path, options, ["fsdp=1:1:each", "random:4:once", "fsdp=4:4:once"])
        problems = [line for line in result.stdout.splitlines() if " rank " in line] + ([result.stderr] if result.returncode else [])
        failed += bool(problems)
        print(f"{'FAIL' if problems else 'ok  '} {name}", *problems[:8], sep="\n     ")
    print(f"{len(seen) - failed} passed, {failed} failed")
    sys.exit(1 if failed or len(seen) < 8 else 0)


def check_two(name, path, options):
    """Two ranks, by tensor parallelism and by FSDP."""
    jobs = ["tp=2:2:once", "fsdp=2:2:once"]
    result = run(path, options, jobs)
    lines = result.stdout.splitlines()
    problems = [result.stderr] if result.returncode not in (0, 1) else []
    for layout in ("tp=2", "fsdp=2"):
        mine = [line for line in lines if line.startswith(f"{layout}:2 ")]
        wrong, loaded = judge(layout, mine, True, "lora=merge" in options)
        problems += wrong + ([] if mine and (loaded or layout == "tp=2") else [f"{layout} was not loaded: {mine}"])
        print(f"     {name}: {layout} {'loaded' if loaded else 'not divided'}")
    print(f"{'FAIL' if problems else 'ok  '} {name}", *problems[:8], sep="\n     ")
    return not problems


def packed(only):
    """The saves of trainers.tar.xz and orbax.tar.xz: (how many, how many failed)."""
    with tempfile.TemporaryDirectory() as top:
        cases.unpack("trainers.tar.xz", top)
        cases.unpack("orbax.tar.xz", top)
        results = [check_two(*checkpoint) for checkpoint in checkpoints(top) if checkpoint[0].startswith(only)]
        return len(results), results.count(False)


def main():
    only = sys.argv[1] if len(sys.argv) > 1 else ""
    if only == "--first":
        first()
    seen, failed, closed = 0, 0, 0
    for top in [os.path.join(SOURCE, "tests", "golden")] + ([FIXTURES] if os.path.isdir(FIXTURES) else []):
        for name, path, options in checkpoints(top):
            if not name.startswith(only):
                continue
            if not opens(path, options):
                closed += 1
                if not name.startswith(NOT_YET):
                    print(f"FAIL {name} {options}: can't be opened")
                    seen, failed = seen + 1, failed + 1
                continue
            seen += 1
            failed += not check(name, path, options)
    more, wrong = packed(only)
    seen, failed = seen + more, failed + wrong
    print(f"{seen - failed} passed, {failed} failed ({closed} can't be opened)")
    sys.exit(1 if failed or not seen else 0)


if __name__ == "__main__":
    main()
