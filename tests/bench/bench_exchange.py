#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What exchanges between GPUs take by a simulated clock, beside what the loader's cost model says.

usage: tests/bench/bench_exchange.py [--build build/release] [--links FILE] [--window BYTES] [--scale N] [--most RANKS] [--within SHARE] [LAYOUT...]

The loads are real, over the double of CUDA and NCCL (tests/gpu/double), with ranks as threads and 8 ranks on each node, and every byte is
compared: the loader's own code decides what is uploaded, exchanged and placed, in which order, and what waits for what. Only time is
simulated: each stream has a clock, and copies and collectives take what --links says (tests/bench/links.json, with its sources), which the
loader does not read. The cost model is that of `ckpt plan --transport nccl`; it is told the links' rates (--rates), but has latencies of its
own. The checkpoint is a Llama of 0.9 MB; --window: small, so that there are many windows. With --scale, all rates are so many times lower,
as if checkpoint and windows were so many times larger.

A line for each layout: ranks, windows, collectives of each rank, simulated seconds, seconds of the model (of which latency), simulated /
model, and seconds and memory that the run took. --within: an exit status of 1 if one of the ratios is not within this share of 1.
"""

import argparse
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time

import plan_scale

HERE = os.path.dirname(os.path.abspath(__file__))
NODE = 8
LAYOUTS = ("dp=8", "tp=8,dp=8", "tp=8,dp=16", "dp=64", "dp=256", "dp=1024")
BUDGET = 4 << 20  # host_bytes and device_bytes: small, as there are many ranks
ENDLESS = 1e18


def generate(run):
    """A run of nanotron's with tp=8, and random data."""
    sizes = {"LAYERS": 2, "HIDDEN": 128, "HEADS": 8, "KV_HEADS": 8, "FFN": 256, "VOCAB": 512}
    for name, value in sizes.items():
        setattr(plan_scale, name, value)
    plan_scale.CONFIG.update(hidden_size=128, intermediate_size=256, num_attention_heads=8, num_hidden_layers=2, num_key_value_heads=8, vocab_size=512)
    plan_scale.generate(run)
    for folder, _, files in os.walk(run):
        for name in files:
            if name.endswith(".safetensors"):
                with open(os.path.join(folder, name), "r+b") as f:
                    head = int.from_bytes(f.read(8), "little") + 8
                    size = f.seek(0, os.SEEK_END) - head
                    f.seek(head)
                    f.write(os.urandom(size))


def scaled(links, scale):
    return {k: v / scale if k.endswith("_bytes_s") else v for k, v in links.items()}


def plan(a, run, layout, rates):
    command = [os.path.join(a.build, "fs", "ckpt"), "plan", run, "--layout", layout, "--transport", "nccl", "--readers", "once", "--json", "--ranks-per-node",
               str(NODE), "--host-bytes", str(BUDGET), "--device-bytes", str(BUDGET), "--window-bytes", str(a.window), "--threads", "1", "--rates",
               ",".join(f"{k}={v:.0f}" for k, v in rates.items())]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def model(a, run, layout, links):
    """Seconds by the cost model without set-up, those that are latency, and the plan."""
    free = plan(a, run, layout, dict.fromkeys(("node_storage", "page_cache", "copy", "local_link", "network"), ENDLESS))
    rates = {"node_storage": ENDLESS, "page_cache": ENDLESS, "copy": NODE * links["upload_bytes_s"], "local_link": links["link_bytes_s"],
             "network": NODE * links["net_bytes_s"]}
    got = plan(a, run, layout, rates)
    return got["modelled_s"]["once"], free["modelled_s"]["once"], got


def simulate(a, run, layout, links, top):
    """Simulated seconds, collectives of each rank, and what running it took: seconds, MB."""
    ranks = math.prod(int(part.split("=")[1]) for part in layout.split(","))
    path = os.path.join(top, "links.json")
    with open(path, "w") as f:
        json.dump(links, f)
    env = dict(os.environ, LD_LIBRARY_PATH=os.path.join(a.build, "tests", "gpu-double"), CKPTFS_TRANSPORT="nccl", CKPTFS_GPU_THREADS="1",
               CKPTFS_GPU_COUNT=str(ranks), CKPTFS_GPU_NODE=str(NODE), CKPTFS_GPU_LINKS=path, LOAD_THREADS="1", LOAD_WINDOW=str(a.window))
    begin = time.monotonic()
    p = subprocess.Popen([os.path.join(a.build, "tests", "gpu_ranks"), "-c", f"threads={ranks}", run, "--", f"{layout}:once:{BUDGET}:{BUDGET}"], env=env,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said = p.stdout.read()
    _, status, usage = os.wait4(p.pid, 0)
    told = [line.split() for line in said.splitlines() if line.startswith("gpu double: simulated")]
    if status or not told or " once over nccl " not in said:
        sys.exit(f"{layout}: {said}")
    return float(told[0][3]), int(told[0][5]) / ranks, time.monotonic() - begin, usage.ru_maxrss / 1024


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--build", default="build/release")
    p.add_argument("--links", default=os.path.join(HERE, "links.json"))
    p.add_argument("--window", type=int, default=64 << 10)
    p.add_argument("--scale", type=float, default=1)
    p.add_argument("--most", type=int, default=1024)
    p.add_argument("--within", type=float)
    p.add_argument("layouts", nargs="*", metavar="LAYOUT")
    a = p.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with open(a.links) as f:
        links = scaled({k: v for k, v in json.load(f).items() if k.endswith(("_s", "_share"))}, a.scale)
    top, wrong = tempfile.mkdtemp(), []
    try:
        run = os.path.join(top, "llama")
        generate(run)
        print(f"{'layout':12} {'ranks':>5} {'windows':>7} {'calls':>5} {'simulated':>10} {'model':>10} {'latency':>10} {'ratio':>6} {'took':>8} {'memory':>9}",
              flush=True)
        for layout in a.layouts or LAYOUTS:
            modelled, latency, got = model(a, run, layout, links)
            if got["ranks"] > a.most:
                continue
            seconds, calls, took, memory = simulate(a, run, layout, links, top)
            ratio = seconds / modelled
            print(f"{layout:12} {got['ranks']:5} {got['windows']:7} {calls:5.0f} {seconds:8.6f} s {modelled:8.6f} s {latency:8.6f} s {ratio:6.2f} {took:6.1f} s "
                  f"{memory:6.0f} MB", flush=True)
            if a.within and abs(ratio - 1) > a.within:
                wrong.append(layout)
    finally:
        shutil.rmtree(top, True)
    if wrong:
        sys.exit(f"not within {a.within:.0%}: {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
