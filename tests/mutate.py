#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How much do the tests notice? Change one operator, constant or condition of the source at a time, build, and run the tests until
one fails. By hand: an hour or more. What was tried is kept, so that a run can be stopped and goes on later.

usage: tests/mutate.py [--count N] [--seed N] [--commit COMMIT] [--list]

The places are drawn by the seed from the source of HEAD, wherever the tests are run: with --commit, from the same lines of an older
commit, so that two commits can be compared. The tests are those of the commit. A line that the older commit does not have is "gone".
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
SECONDS = 180  # of tests, for each change; what is not noticed by then counts as not noticed
MEMORY = 16 << 30  # of addresses, for each process: a loop that allocates ends
# what is quick first; then what reads whole checkpoints, beginning with what is nearest to the change
STAGES = ["unit|defects|golden", "first"]
NEAREST = [
    ("core/(load|comm|device)|fs/load", ["load", "interop", "mount"]),
    ("fs/mount|core/(run|view|io)", ["mount", "load", "interop"]),
    ("", ["interop", "load", "mount"]),
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
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
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


def judged(tree, place, log):
    """How a change was noticed: "build", or the stage of tests; "not noticed", or "gone"."""
    path, text, new = changed(tree, place)
    if new is None:
        return "gone"
    try:
        with open(path, "w", encoding="utf-8") as f:
            f.write(new)
        if not run(["cmake", "--build", "build/release", "-j", str(os.cpu_count())], tree, 600, log):
            return "build"
        end = time.monotonic() + SECONDS
        for stage in STAGES + next(stages for files, stages in NEAREST if re.match(files, place["file"])):
            args = ["ctest", "--test-dir", "build/release", "-L", stage, "--stop-on-failure", "--timeout", "120", "-j", str(os.cpu_count())]
            good = run(args, tree, max(1, end - time.monotonic()), log)
            if good is None:
                break
            if not good:
                return stage
        return "not noticed"
    finally:
        with open(path, "w", encoding="utf-8") as f:
            f.write(text)


def prepare(commit):
    """A work tree of the commit with a build whose quick tests pass."""
    tree = os.path.join(PLACE, commit)
    if not os.path.isdir(tree):
        subprocess.run(["git", "worktree", "add", "--detach", tree, commit], cwd=SOURCE, check=True)
    os.makedirs(os.path.join(tree, "build"), exist_ok=True)
    venv = os.path.join(tree, "build", "venv")
    if not os.path.exists(venv):
        os.symlink(os.path.join(SOURCE, "build", "venv"), venv)
    subprocess.run(["tests/run.sh", "--all", "--no-install", "--", "-L", "unit|defects|golden"], cwd=tree, check=True)
    return tree


def main():
    parser = argparse.ArgumentParser(usage=__doc__.split("usage: ")[1].split("\n")[0])
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--commit", default="HEAD")
    parser.add_argument("--list", action="store_true")
    a = parser.parse_args()
    todo = chosen(a.count, a.seed)
    if a.list:
        for p in todo:
            print(f"{p['file']}: '{p['old'].strip()}' -> '{p['new'].strip()}': {p['line'].strip()}")
        return
    commit = subprocess.run(["git", "rev-parse", "--short", a.commit], cwd=SOURCE, capture_output=True, text=True, check=True).stdout.strip()
    os.makedirs(PLACE, exist_ok=True)
    kept = os.path.join(PLACE, f"{commit}.jsonl")
    done = {}
    if os.path.exists(kept):
        with open(kept, encoding="utf-8") as f:
            for line in f:
                p = json.loads(line)
                done[json.dumps(p["place"], sort_keys=True)] = p["said"]
    tree = None
    for n, place in enumerate(todo):
        key = json.dumps(place, sort_keys=True)
        if key not in done:
            tree = tree or prepare(commit)
            with open(os.path.join(PLACE, f"{commit}-{n}.log"), "w", encoding="utf-8") as log:
                done[key] = judged(tree, place, log)
            with open(kept, "a", encoding="utf-8") as f:
                f.write(json.dumps({"place": place, "said": done[key]}) + "\n")
        print(f"{n + 1:3} {done[key]:20} {place['file']}: '{place['old'].strip()}' -> '{place['new'].strip()}': {place['line'].strip()}", flush=True)
    said = [done[json.dumps(p, sort_keys=True)] for p in todo]
    tried = [s for s in said if s != "gone"]
    noticed = [s for s in tried if s != "not noticed"]
    print(f"{len(noticed)} of {len(tried)} changes were noticed at {commit}" + (f"; {len(said) - len(tried)} lines are gone" if len(said) > len(tried) else ""))


if __name__ == "__main__":
    sys.exit(main())
