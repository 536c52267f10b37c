#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One export that several processes write, each through a link of its own to shared storage (slow_writes_fs.c: one rate for the bytes of a mount).

usage: tests/bench/bench_parts.py [--build build/release] [--dir SCRATCH] [--parts 4] [--rate 1e8] [--mb 800] [--files 16] [--rounds 3] [--cut]

Prints, as JSON, the rates of one process and of all together, the best of all rounds, and their quotient divided by the number of processes: 1 is as fast as
the links. `--cut`: one file, which is divided among the processes and read back once.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "mount"))
from mountlib import mounted, wait_until  # noqa: E402
from test_real import write_safetensors  # noqa: E402


def write_model(folder, files, size):
    """A Hugging Face directory of so many files of a tensor each."""
    os.makedirs(folder)
    weight_map = {}
    for k in range(files):
        name = f"model-{k + 1:05}-of-{files:05}.safetensors"
        data = os.urandom(1 << 20) * (size >> 20)
        write_safetensors(os.path.join(folder, name), {f"layer.{k}.weight": ("U8", [len(data)], data)})
        weight_map[f"layer.{k}.weight"] = name
    with open(os.path.join(folder, "model.safetensors.index.json"), "w") as f:
        json.dump({"metadata": {}, "weight_map": weight_map}, f)
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, f)


def mount(opt, shared, at):
    os.makedirs(at)
    p = subprocess.Popen([os.path.join(opt.build, "tests", "slow_writes_fs"), shared, at, str(opt.rate)])
    wait_until(lambda: mounted(at), "mounting")
    return p


def export(opt, run, dests, env):
    """Seconds until all processes have ended, each of which sees DEST through its own mount."""
    begin = time.monotonic()
    running = [subprocess.Popen([os.path.join(opt.build, "fs", "ckpt"), "export", "-q", run, dest], stdout=subprocess.PIPE, text=True,
                                env=env | {"OMPI_COMM_WORLD_SIZE": str(len(dests)), "OMPI_COMM_WORLD_RANK": str(i)}) for i, dest in enumerate(dests)]
    said = [p.communicate()[0] for p in running]
    assert not any(p.returncode for p in running), said
    return time.monotonic() - begin, [line for text in said for line in text.splitlines() if line.startswith("xxh3")]


def main():
    parser = argparse.ArgumentParser()
    for name, kind, usual in (("build", str, "build/release"), ("dir", str, None), ("parts", int, 4), ("rate", float, 1e8), ("mb", int, 800), ("files", int, 16), ("rounds", int, 3)):
        parser.add_argument(f"--{name}", type=kind, default=usual)
    parser.add_argument("--cut", action="store_true")
    opt = parser.parse_args()
    files = 1 if opt.cut else opt.files
    env = dict(os.environ) | ({"CKPTFS_EXPORT_TEST": f"{16 << 20}"} if opt.cut else {})
    top = os.path.realpath(tempfile.mkdtemp(dir=opt.dir))
    shared, mounts = os.path.join(top, "shared"), [os.path.join(top, f"machine{i}") for i in range(opt.parts)]
    os.mkdir(shared)
    write_model(os.path.join(top, "run", "10"), files, opt.mb * 1000000 // files)
    size = sum(e.stat().st_size for e in os.scandir(os.path.join(top, "run", "10")))
    daemons = [mount(opt, shared, at) for at in mounts]
    best = {}
    try:
        for _ in range(opt.rounds):
            digests = set()
            for n in (1, opt.parts):
                seconds, digest = export(opt, os.path.join(top, "run"), [os.path.join(at, "out") for at in mounts[:n]], env)
                digests.update(digest)
                best[n] = min(best.get(n, seconds), seconds)
                assert os.listdir(shared) == ["out"]
                shutil.rmtree(os.path.join(shared, "out"))
            assert len(digests) == 1, digests
        print(json.dumps({"bytes": size, "parts": opt.parts, "files": files, "rate_of_one": size / best[1], "rate_of_all": size / best[opt.parts],
                          "of_the_links": best[1] / best[opt.parts] / opt.parts}))
    finally:
        for at, p in zip(mounts, daemons):
            subprocess.run(["fusermount3", "-u", at], check=False)
            p.wait()
        shutil.rmtree(top)


main()
