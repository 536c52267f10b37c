# SPDX-License-Identifier: Apache-2.0
"""Memory that is not there: of every allocation that a command makes, one fails in each run. The command must say so, with status 1, or do
all the same what it does otherwise: the same output, the same files. It never crashes, hangs, or succeeds with other output.

usage: test_malloc.py LIBRARY [all]     LIBRARY: fail_malloc; without `all`, some of the allocations, others in each run (CKPTFS_SEED)
"""

import os
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "mount"))
from mountlib import digests  # noqa: E402

BUILD = os.environ.get("CKPTFS_BUILD", "build/release")
SOURCE = os.environ.get("CKPTFS_SOURCE", os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
GOLDEN = os.path.join(SOURCE, "tests", "golden")
CKPT = os.path.join(BUILD, "fs", "ckpt")
LIBRARY = os.path.abspath(sys.argv[1])
SAMPLES = None if sys.argv[2:] == ["all"] else 60
SEED = int(os.environ.get("CKPTFS_SEED") or random.randrange(1 << 30))

LLAMA = os.path.join(GOLDEN, "nanotron", "llama_tp2_pp2_tied")
MEGATRON = os.path.join(GOLDEN, "megatron", "m19_llama_tp2pp2")
TITAN = os.path.join(GOLDEN, "torchtitan", "deepseek_v3_dp2")
COMPRESSED = os.path.join(GOLDEN, "dcp", "zstd_1r", "run")
COMMANDS = [["export", LLAMA, "OUT", "--quiet"],
            ["digest", LLAMA, "--json"],
            ["info", LLAMA, "--json"],
            ["ls", LLAMA, "--json"],
            ["explain", LLAMA, "model.layers.1.self_attn.q_proj.weight", "--json"],
            ["digest", os.path.join(MEGATRON, "run"), "-o", "base=" + os.path.join(MEGATRON, "base"), "--json"],
            ["digest", os.path.join(TITAN, "run"), "-o", "base=" + os.path.join(TITAN, "base"), "--json"],
            ["digest", COMPRESSED, "-o", "view=raw", "--json"]]


def without_times(text):
    """Seconds and rates differ in every run."""
    return "\n".join(line for line in text.splitlines() if '"seconds"' not in line and "/s)" not in line)


def run(command, out, **env):
    shutil.rmtree(out, ignore_errors=True)
    args = [out if a == "OUT" else a for a in command]
    done = subprocess.run([CKPT, *args], capture_output=True, text=True, errors="replace", timeout=120,
                          env=dict(os.environ, LD_PRELOAD=LIBRARY, MALLOC_ARENA_MAX="1", **env))
    return done, (without_times(done.stdout), digests(out))


def check(command, top):
    out, counted = os.path.join(top, "out"), os.path.join(top, "count")
    done, want = run(command, out, CKPTFS_COUNT_MALLOC=counted)
    assert done.returncode == 0, done.stderr
    with open(counted) as f:
        total = int(f.read())
    assert total > 1000, f"only {total} allocations were seen"
    bad = refused = 0
    for n in range(1, total + 1) if SAMPLES is None else sorted(random.sample(range(1, total + 1), SAMPLES)):
        done, got = run(command, out, CKPTFS_FAIL_MALLOC=str(n))
        refused += done.returncode == 1
        wrong = (f"ended with {done.returncode}" if done.returncode not in (0, 1) else
                 "status 0 with other output" if done.returncode == 0 and got != want else
                 "status 1 without a word" if done.returncode == 1 and not done.stderr.strip() else None)
        if wrong:
            bad += 1
            print(f"FAIL {' '.join(command)}: allocation {n} of {total}: {wrong}: {done.stderr.strip()[:300]}", flush=True)
    print(f"{'FAIL' if bad else 'ok  '} {command[0]} {os.path.relpath(command[1], GOLDEN)}: {total} allocations, {refused} refused", flush=True)
    return not bad


def main():
    random.seed(SEED)
    print(f"CKPTFS_SEED={SEED}")
    with tempfile.TemporaryDirectory() as top:
        archive = os.path.join(top, "run.nemo")
        with tarfile.open(archive, "w") as tar:
            tar.add(LLAMA, arcname=".")
        good = [check(command, top) for command in [*COMMANDS, ["digest", archive, "--json"]]]
    print(f"{sum(good)} passed, {len(good) - sum(good)} failed")
    sys.exit(not all(good))


main()
