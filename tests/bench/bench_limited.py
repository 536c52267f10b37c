#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The loader where storage is the bottleneck: N machines, played by one, that all want the same model.

usage: tests/bench/bench_limited.py [--build build/release] [--dir SCRATCH] [--nodes 2,4] [--rate 200] [--layers 2] [--rounds 3] (root)

Every "node" is one rank with a copy of the checkpoint of its own (page caches are not shared) in a control group of its own, whose reads
of the disk are limited to so many MB/s (blkio of version 1, io.max of version 2). Before each load all copies are evicted from the page
cache, which is checked. Printed: seconds of the load, what the control groups saw of the disk over the unique bytes, and what the model
says from the rates that the load had: given (--rates), or assumed (auto).
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile

import bench_load
from ranks import launched

V1, V2 = "/sys/fs/cgroup/blkio", "/sys/fs/cgroup"
READERS = ("each", "once", "auto")


class Group:
    """A control group whose reads of one disk are limited; 0: not."""

    def __init__(self, name, disk, rate):
        self.v2 = os.path.exists(os.path.join(V2, "cgroup.controllers"))
        self.disk = disk
        self.path = os.path.join(V2 if self.v2 else V1, name)
        if self.v2:
            self.write(os.path.join(V2, "cgroup.subtree_control"), "+io")
        os.makedirs(self.path, exist_ok=True)
        if rate:
            self.write("io.max" if self.v2 else "blkio.throttle.read_bps_device", f"{disk} rbps={rate}" if self.v2 else f"{disk} {rate}")

    def write(self, file, text):
        with open(os.path.join(self.path, file), "w") as f:
            f.write(text)

    def enter(self):
        self.write("cgroup.procs", str(os.getpid()))

    def read_bytes(self):
        name = "io.stat" if self.v2 else "blkio.throttle.io_service_bytes"
        with open(os.path.join(self.path, name)) as f:
            for line in f:
                word = line.split()
                if word[0] == self.disk and self.v2:
                    return int(dict(w.split("=") for w in word[1:]).get("rbytes", 0))
                if word[:2] == [self.disk, "Read"]:
                    return int(word[2])
        return 0

    def remove(self):
        os.rmdir(self.path)


def disk_of(path):
    """major:minor of the disk (not of a partition) below a file."""
    number = os.stat(path).st_dev
    name = f"{os.major(number)}:{os.minor(number)}"
    at = os.path.realpath(f"/sys/dev/block/{name}")
    if os.path.exists(os.path.join(at, "partition")):
        with open(os.path.join(os.path.dirname(at), "dev")) as f:
            name = f.read().strip()
    return name


def load(a, copies, groups, *more):
    env = dict(os.environ, CKPTFS_TRANSPORT="tcp", **launched(len(copies)))
    args = [os.path.join(a.build, "fs", "ckpt-load"), "load"]
    ranks = [subprocess.Popen([*args, copy, "--layout", f"dp={len(copies)}", "--json", *more], env=dict(env, RANK=str(r), CKPTFS_NODE=str(r)),
                              stdout=subprocess.PIPE, preexec_fn=groups[r].enter) for r, copy in enumerate(copies)]
    out = [p.communicate()[0] for p in ranks]
    if any(p.returncode for p in ranks):
        sys.exit("the load failed")
    return json.loads(out[0])


def model(a, copy, n, rates):
    args = [os.path.join(a.build, "fs", "ckpt-load"), "plan", copy, "--layout", f"dp={n}", "--ranks", str(n), "--ranks-per-node", "1", "--json"]
    given = ",".join(f"{k}={v:.0f}" for k, v in rates.items() if v > 0)
    return json.loads(subprocess.run([*args, "--rates", given], capture_output=True, text=True, check=True).stdout)["modelled_s"]


def compare(a, n, folder):
    size = sum(e[2] for e in bench_load.entries(folder).values())
    copies = []
    for r in range(n):
        copies.append(f"{folder}.node{r}")
        if not os.path.exists(copies[-1]):
            shutil.copytree(folder, copies[-1])
    rate = int(a.rate * 1e6)
    groups = [Group(f"ckptfs-bench-{os.getpid()}-{r}", disk_of(folder), rate) for r in range(n)]
    print(f"{n} nodes of {a.rate:g} MB/s each, {size / 1e9:.3f} GB on each, {a.rounds} rounds")
    print(f"  {'readers':16} {'median s':>9} {'best s':>7} {'model s':>8} {'plan s':>7} {'disk / unique':>14}   chosen, storage rate")
    try:
        for readers in READERS:
            walls, disk, got = [], [], None
            given = () if readers == "auto" else ("--rates", f"node_storage={rate}")
            for _ in range(a.rounds):
                bench_load.evict(*copies)
                before = sum(g.read_bytes() for g in groups)
                got = load(a, copies, groups, "--readers", readers, *given, *a.more)
                walls.append(got["wall_s"])
                disk.append((sum(g.read_bytes() for g in groups) - before) / size)
            said = model(a, folder, n, got["rates"])[got["readers"]]
            print(f"  {readers:16} {statistics.median(walls):9.3f} {min(walls):7.3f} {said:8.3f} {got['plan_s']:7.3f} {statistics.median(disk):14.3f}   "
                  f"{got['readers']}, {got['rates']['node_storage'] / 1e6:.0f} MB/s", flush=True)
    finally:
        for g in groups:
            g.remove()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--build", default="build/release")
    p.add_argument("--dir", help="keep the model there")
    p.add_argument("--nodes", default="2,4")
    p.add_argument("--rate", type=float, default=200, help="MB/s of each node's disk")
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("more", nargs="*", help="further options of ckpt load")
    a = p.parse_args()
    top = a.dir or tempfile.mkdtemp()
    folder = os.path.join(top, f"llama-{a.layers}")
    try:
        if not os.path.exists(os.path.join(folder, "config.json")):
            bench_load.generate(folder, a.layers)
        for n in [int(x) for x in a.nodes.split(",")]:
            compare(a, n, folder)
    finally:
        if not a.dir:
            shutil.rmtree(top, True)


if __name__ == "__main__":
    main()
