#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How often the ranks of a job open the files of a checkpoint of many files: strace counts, ranks are processes over TCP, every rank wants all.

usage: tests/bench/bench_opens.py [--build build/release] [--dir SCRATCH] [--ranks 4,16] [--files 100000] [--json FILE]

Each byte is read once by the job (--readers once). Rank 0 reads the header of every file, so the least is twice the number of files: once for the
header, once by the rank that reads the data. Looks at a path without opening the file (O_PATH), by which a rank sees at the end that what it has
read has not been replaced, are counted apart. A rank needs about 7 KB of memory a file.
"""

import argparse
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "load"))
import figures  # noqa: E402
from ranks import launched  # noqa: E402

OPEN = re.compile(r'open(?:at2?)?\(.*\.safetensors"')
NUMEL = 64


def generate(run, files):
    weights = {}
    os.makedirs(run)
    for i in range(files):
        name, file = f"model.layers.{i}.weight", f"model-{i + 1:06}-of-{files:06}.safetensors"
        head = json.dumps({name: {"dtype": "BF16", "shape": [NUMEL], "data_offsets": [0, 2 * NUMEL]}}).encode()
        with open(os.path.join(run, file), "wb") as f:
            f.write(struct.pack("<Q", len(head)) + head + bytes(2 * NUMEL))
        weights[name] = file
    for name, value in (("model.safetensors.index.json", {"weight_map": weights}), ("config.json", {"model_type": "odd"})):
        with open(os.path.join(run, name), "w") as f:
            json.dump(value, f)


def count(path):
    """(opens, looks) of a rank's trace."""
    opens = looks = 0
    with open(path, errors="replace") as f:
        for line in filter(OPEN.search, f):
            opens, looks = (opens, looks + 1) if "O_PATH" in line else (opens + 1, looks)
    return opens, looks


def job(build, top, run, ranks):
    env = dict(os.environ, CKPTFS_TRANSPORT="tcp", **launched(ranks))
    load = [os.path.join(build, "fs", "ckpt-load"), "load", run, "--layout", f"dp={ranks}", "--readers", "once"]
    traced = ["strace", "-f", "--seccomp-bpf", "-e", "trace=open,openat,openat2"]
    begin = time.monotonic()
    every = [subprocess.Popen([*traced, "-o", os.path.join(top, f"trace.{r}"), *load], env=dict(env, RANK=str(r)), stdout=subprocess.DEVNULL,
                              stderr=subprocess.PIPE, text=True) for r in range(ranks)]
    told = [p.communicate()[1] for p in every]
    if any(p.returncode for p in every):
        sys.exit(f"the load failed: {''.join(told)[-1000:]}")
    return [count(os.path.join(top, f"trace.{r}")) for r in range(ranks)], time.monotonic() - begin


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--build", default="build/release")
    p.add_argument("--dir", help="where the run is made")
    p.add_argument("--ranks", default="4,16")
    p.add_argument("--files", type=int, default=100000)
    figures.add_option(p)
    a = p.parse_args()
    top, charts = tempfile.mkdtemp(dir=a.dir), []
    try:
        run = os.path.join(top, "run")
        generate(run, a.files)
        for n in [int(x) for x in a.ranks.split(",")]:
            got, seconds = job(a.build, top, run, n)
            opens, looks = [g[0] for g in got], sum(g[1] for g in got)
            print(f"{a.files} files, {n} ranks: {sum(opens)} opens ({opens[0]} of rank 0, {max(opens[1:], default=0)} at most of another), {looks} looks, "
                  f"{seconds:.1f} s under strace", flush=True)
            charts.append(figures.chart(f"{n} ranks load {a.files} files", "opens",
                                        {"all ranks": [sum(opens)], "rank 0": [opens[0]], "looks without an open": [looks]}, lambda name: True))
    finally:
        shutil.rmtree(top, True)
    figures.write(a.json, charts)


if __name__ == "__main__":
    main()
