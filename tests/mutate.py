#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How much do the tests notice? Change one operator, constant or condition of the source at a time, build, and run the tests until
one fails. By hand: an hour or more. What was tried is kept, so that a run can be stopped and goes on later.

usage: tests/mutate.py [--count N] [--seed N] [--seconds N] [--commit COMMIT] [--missed-at COMMIT] [--list]

The places are drawn by the seed from the source of HEAD, wherever the tests are run: with --commit, from the same lines of an older
commit, so that two commits can be compared. The tests are those of the commit. A line that the older commit does not have is "gone".
With --missed-at the places are those that the tests of that commit did not notice, from its results: `--commit OLD --missed-at NEW`
finds out whether everything that was noticed at OLD is noticed at NEW, without trying at OLD what NEW notices.
Needs what `tests/run.sh --all` has installed (build/venv). Results: build/mutate/COMMIT.jsonl.
"""

import argparse
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time

SOURCE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PLACE = os.path.join(SOURCE, "build", "mutate")
SECONDS = 180  # of tests that are not quick, for each change; what is not noticed by then counts as not noticed
NEAREST_S = 120  # the programs that are nearest to a change take a tenth of it, or wait for ever
HANGING = 5  # times what the quick tests have taken without a change: one of them waits for ever
MEMORY = 32 << 30  # of data, for each process: a loop that allocates ends; the tests with hundreds of threads map 24 GiB, and use little
# labels of tests, by what is nearest to the change; before them come the programs that test its module, and the other quick ones
QUICK = "unit|defects"
STAGES = [
    ("core/(device|comm/nccl|load/engine/[a-z_]*device)", ["gpu", "load", "first", "golden", "interop", "mount"]),
    ("core/(load|comm|device)|fs/load", ["load", "first", "golden", "interop", "mount"]),
    ("core/io/bucket", ["bucket", "first", "golden", "load"]),
    ("fs/|core/(run|view|io)", ["first", "mount", "golden", "load", "interop"]),
    ("", ["first", "golden", "interop", "load", "mount"]),
]

# (pattern, what it becomes); a place is one match of one of them in code
CHANGES = [
    (r" <= ", " < "),
    (r" < ", " <= "),
    (r" >= ", " > "),
    (r" > ", " >= "),
    (r" == ", " != "),
    (r" != ", " == "),
    (r" && ", " || "),
    (r" \|\| ", " && "),
    (r" \+ ", " - "),
    (r" - ", " + "),
    (r" \* (?=[a-z(])", " + "),
    (r" \+= ", " -= "),
    (r"\bif \((?=[a-z])", "if (!"),
    (r"\btrue\b", "false"),
    (r"\bfalse\b", "true"),
    (r"\breturn 0;", "return -1;"),
    (r"\b0\b(?=[;,)])", "1"),
    (r"\b1\b(?=[;,)])", "0"),
    (r"\b(?:[2-9]|[1-9][0-9]+)\b(?=[;,)])", "1"),
]


def code_of(text):
    """The text with comments, strings and directives as spaces, so that columns stay."""
    blank = lambda m: re.sub(r"[^\n]", " ", m.group())  # noqa: E731
    text = re.sub(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', blank, text, flags=re.S)
    return re.sub(r"^#(?:[^\n]*\\\n)*[^\n]*", blank, text, flags=re.M)


def places(tree):
    """All (file, the line's text, the how-manieth such line, column, old, new) of a tree's core and fs."""
    for top in ("core", "fs"):
        for folder, dirs, files in os.walk(os.path.join(tree, top)):
            dirs.sort()
            for name in sorted(f for f in files if f.endswith(".c")):
                path = os.path.join(folder, name)
                with open(path, encoding="utf-8") as f:
                    text = f.read()
                lines, seen = text.split("\n"), {}
                for line, code in zip(lines, code_of(text).split("\n")):
                    nth = seen[line] = seen.get(line, -1) + 1
                    for pattern, new in CHANGES:
                        for m in re.finditer(pattern, code):
                            yield {"file": os.path.relpath(path, tree), "line": line, "nth": nth, "at": m.start(), "old": m.group(), "new": new}


def chosen(count, seed):
    """`count` places of HEAD: each kind of change is as likely as any other."""
    kinds = {}
    for p in places(SOURCE):
        kinds.setdefault((p["new"], p["old"] if not p["old"].isdigit() else "N"), []).append(p)
    r, order = random.Random(seed), sorted(kinds)
    return [r.choice(kinds[order[i % len(order)]]) for i in range(count)]


def limited():
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    with open("/proc/self/oom_score_adj", "w", encoding="utf-8") as f:
        f.write("1000")  # where the machine has less, it ends this one first
    os.setsid()


def run(args, tree, seconds, log):
    """True if it ended well, False if not, None if the time was over; nothing of it goes on running."""
    p = subprocess.Popen(args, cwd=tree, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=limited)
    try:
        return p.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        return None
    finally:
        try:
            os.killpg(p.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        p.wait()


def changed(tree, place):
    """The file's path, its text, and the text with the change; None for the last if the line is gone."""
    path = os.path.join(tree, place["file"])
    try:
        with open(path, encoding="utf-8") as f:
            text = f.read()
    except FileNotFoundError:
        return path, None, None
    lines, left = text.split("\n"), place["nth"]
    for i, line in enumerate(lines):
        if line == place["line"]:
            if left == 0:
                end = place["at"] + len(place["old"])
                lines[i] = line[: place["at"]] + place["new"] + line[end:]
                return path, text, "\n".join(lines)
            left -= 1
    return path, text, None


def nearest(tree, file):
    """The programs that test a file's module: they are called like it, or include its header; if there are none, a header of its folder."""
    folder, name = os.path.split(os.path.splitext(file.split("/", 1)[1])[0])
    alike, beside = [], []
    for kind in ("unit", "defects", "mount"):
        top = os.path.join(tree, "tests", kind)
        for test in sorted(t[:-2] for t in os.listdir(top) if re.match(r"(test|defects)_.*\.c$", t)):
            with open(os.path.join(top, test + ".c"), encoding="utf-8") as f:
                text = f.read()
            if test.endswith("_" + name) or f'#include "{folder}/{name}.h"' in text:
                alike.append(test)
            elif folder and f'#include "{folder}/' in text:
                beside.append(test)
    return alike or beside


def build(tree, targets, log):
    args = ["cmake", "--build", "build/release", "-j", str(os.cpu_count())]
    return run(args + (["--target", *targets] if targets else []), tree, 900, log)


def test(tree, seconds, log, *which):
    """As run. What fails is tried once more, as it may have met a busy machine; a test that then waits for ever has failed, too."""
    args = ["ctest", "--test-dir", "build/release", "--stop-on-failure", "-j", str(os.cpu_count())]
    good = run([*args, *which], tree, max(1, seconds), log)
    return bool(run([*args, *which, "--rerun-failed"], tree, NEAREST_S, log)) if good is False else good


def judged(tree, usual, place, seconds, log):
    """How a change was noticed: "build", or the stage of tests; "not noticed", or "gone". `usual`: the seconds of the quick tests."""
    path, text, new = changed(tree, place)
    if new is None:
        return "gone"
    try:
        with open(path, "w", encoding="utf-8") as f:
            f.write(new)
        near = nearest(tree, place["file"])
        names = f"/({'|'.join(near)})$" if near else "^$"  # of no test
        if near and not build(tree, near, log):
            return "build"
        if near and not test(tree, NEAREST_S, log, "-L", QUICK, "-R", names):
            return "nearest"
        if not build(tree, [], log):
            return "build"
        if not test(tree, HANGING * usual, log, "-L", QUICK, "-E", names):
            return QUICK
        end = time.monotonic() + seconds
        for label in next(labels for files, labels in STAGES if re.match(files, place["file"])):
            good = test(tree, end - time.monotonic(), log, "-L", label, "-E", names)
            if good is None:
                break
            if not good:
                return label
        return "not noticed"
    finally:
        with open(path, "w", encoding="utf-8") as f:
            f.write(text)


def prepare(commit):
    """A work tree of the commit with a build whose tests pass, which are not run again when the work goes on, and the seconds that the quick
    ones took."""
    tree = os.path.join(PLACE, commit)
    passed = os.path.join(tree, "build", "passed")
    if not os.path.isdir(tree):
        subprocess.run(["git", "worktree", "add", "--detach", tree, commit], cwd=SOURCE, check=True)
    subprocess.run(["git", "checkout", "--", "core", "fs"], cwd=tree, check=True)  # what was killed has left a change
    if os.path.exists(passed):
        with open(passed, encoding="utf-8") as f:
            return tree, float(f.read())
    os.makedirs(os.path.join(tree, "build"), exist_ok=True)
    venv = os.path.join(tree, "build", "venv")
    if not os.path.exists(venv):
        os.symlink(os.path.join(SOURCE, "build", "venv"), venv)
    subprocess.run(["tests/run.sh", "--all", "--no-install", "--", "-L", "golden|first"], cwd=tree, check=True)
    began = time.monotonic()
    if not test(tree, 3600, None, "-L", QUICK):
        sys.exit(f"the quick tests of {commit} fail without a change: {tree}")
    with open(passed, "w", encoding="utf-8") as f:
        f.write(str(time.monotonic() - began))
    return tree, time.monotonic() - began


def read_results(commit):
    """{place: how it was noticed} of earlier runs at a commit, and the file that has them."""
    kept, done = os.path.join(PLACE, f"{commit}.jsonl"), {}
    if os.path.exists(kept):
        with open(kept, encoding="utf-8") as f:
            for line in f:
                p = json.loads(line)
                done[key_of(p["place"])] = p["said"]
    return kept, done


def key_of(place):
    return json.dumps(place, sort_keys=True)


def short(commit):
    return subprocess.run(["git", "rev-parse", "--short", commit], cwd=SOURCE, capture_output=True, text=True, check=True).stdout.strip()


def main():
    parser = argparse.ArgumentParser(usage=__doc__.split("usage: ")[1].split("\n")[0])
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=int, default=SECONDS)
    parser.add_argument("--commit", default="HEAD")
    parser.add_argument("--missed-at")
    parser.add_argument("--list", action="store_true")
    a = parser.parse_args()
    if subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "core", "fs"], cwd=SOURCE).returncode:
        sys.exit("core or fs differ from HEAD: other places would be drawn; commit or undo that first")
    if a.missed_at:
        kept, before = read_results(short(a.missed_at))
        if len(before) < a.count:
            sys.exit(f"{kept} has {len(before)} of {a.count} places: first run tests/mutate.py --commit {a.missed_at}")
        todo = [json.loads(p) for p, said in before.items() if said == "not noticed"]
    else:
        todo = chosen(a.count, a.seed)
    if a.list:
        for p in todo:
            print(f"{p['file']}: '{p['old'].strip()}' -> '{p['new'].strip()}': {p['line'].strip()}")
        return
    commit = short(a.commit)
    os.makedirs(PLACE, exist_ok=True)
    kept, done = read_results(commit)
    prepared = None
    for n, place in enumerate(todo):
        key = key_of(place)
        if key not in done:
            prepared = prepared or prepare(commit)
            with open(os.path.join(PLACE, f"{commit}-{n}.log"), "w", encoding="utf-8") as log:
                done[key] = judged(*prepared, place, a.seconds, log)
            with open(kept, "a", encoding="utf-8") as f:
                f.write(json.dumps({"place": place, "said": done[key]}) + "\n")
        print(f"{n + 1:3} {done[key]:20} {place['file']}: '{place['old'].strip()}' -> '{place['new'].strip()}': {place['line'].strip()}", flush=True)
    said = [done[key_of(p)] for p in todo]
    tried = [s for s in said if s != "gone"]
    noticed = [s for s in tried if s != "not noticed"]
    print(f"{len(noticed)} of {len(tried)} changes were noticed at {commit}" + (f"; {len(said) - len(tried)} lines are gone" if len(said) > len(tried) else ""))


if __name__ == "__main__":
    sys.exit(main())
