#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Loads into GPU memory beside what CUDA and NCCL do alone, in one run, rounds interleaved.

usage: tests/bench/bench_gpu.py [--build build/release] [--dir SCRATCH] [--layers 32] [--ranks 1,2,4] [--window MIB] [--rounds 5] [--json FILE]

One rank: a checkpoint in the page cache into device memory, whole, with holes between rows, and cast, against large copies from pinned memory
(the ceiling); and the copy kernel against copies within the device. Several ranks: `--readers once`, replicated and sharded, against
ncclBroadcast of the same windows. Ranks beyond the GPUs share them, which takes NCCL 2.30 or later (NCCL_MAX_CTAS is lowered, since what NCCL takes
for all of them must fit); without MPS they take turns, and only ratios of what several ranks do mean something.

GB/s: what a rank has at the end, a second; of a load from its start to the last rank's end. `of copies`: what a rank uploads a second, of
what pinned copies alone do with as many ranks; `of broadcasts`: what a rank has, of ncclBroadcast from all roots. `busy`: seconds of reading
threads, of placing, of sending, all ranks added; `gpu s`: by events. Medians; the first round of each is not counted, `first s` is its time.

It needs a GPU; --double runs it over the double of tests/gpu, where times mean nothing.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, "..", "load")]
from llama import Llama  # noqa: E402
from ranks import launched  # noqa: E402

MODEL = Llama(2048, 5632, 32, 4, 32000)
SMALL = Llama(64, 176, 4, 2, 256)
MIB = 1 << 20
COPIES, BROADCASTS = "cuMemcpyAsync to the device", "ncclBroadcast, all roots"
IN_DEVICE = "cuMemcpyAsync in the device"
NO_GPU = 77


def generate(folder, model, layers):
    """One BF16 file of random bytes: two blocks of them in turn, as no stage looks at values."""
    os.makedirs(folder, exist_ok=True)
    shapes, header, at = list(model.shapes(layers)), {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes:
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    block = os.urandom(MIB)
    with open(os.path.join(folder, "model.safetensors"), "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for off in range(0, at, MIB):
            f.write(block[:at - off])
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(model.config(layers), f)


def warm(folder):
    with open(os.path.join(folder, "model.safetensors"), "rb", buffering=0) as f:
        while f.read(4 * MIB):
            pass


def environment(a, share=1):
    """share: most ranks of a GPU."""
    env = dict(os.environ, NCCL_MULTI_RANK_GPU_ENABLE="1")
    if share > 1:
        env.setdefault("NCCL_MAX_CTAS", str(max(2, 16 // share)))
    if a.double:
        env["LD_LIBRARY_PATH"] = os.path.join(a.build, "tests", "gpu-double") + ":" + env.get("LD_LIBRARY_PATH", "")
    return env


def program_of(a):
    program = os.path.join(a.build, "tests", "bench_gpu")
    if not os.path.exists(program):
        sys.exit(f"{program} was not built: it needs CUDA and NCCL")
    return program


def count_gpus(a):
    done = subprocess.run([program_of(a)], env=environment(a), capture_output=True, text=True)
    if done.returncode == NO_GPU or "libcuda.so.1" in done.stderr:
        sys.exit("there is no GPU here: nothing can be measured (--double runs it over the double, where times mean nothing)")
    if done.returncode:
        sys.exit(f"bench_gpu ended with {done.returncode}: {done.stderr.strip()}")
    return int(done.stdout)


def run_ranks(a, n, devices, folder):
    """What rank 0 printed: facts, and the measurements."""
    env = dict(environment(a, -(-n // devices)), **launched(n, CKPTFS_TRANSPORT="tcp"))
    warm(folder)
    with tempfile.TemporaryDirectory() as top, contextlib.ExitStack() as stack:
        args = [program_of(a), folder, os.path.join(top, "id"), str(int(a.window * MIB)), str(a.rounds)]
        out, err = (stack.enter_context(open(os.path.join(top, name), "w+")) for name in ("out", "err"))
        ranks = [subprocess.Popen(args, env=dict(env, RANK=str(r), LOCAL_RANK=str(r)), stdout=out, stderr=err)
                 for r in range(n)]
        wait_for(ranks, a.timeout)
        out.seek(0)
        err.seek(0)
        if any(p.returncode for p in ranks):
            sys.exit(f"{n} ranks ended with {[p.returncode for p in ranks]}: {err.read()[-2000:].strip()}")
        lines = [json.loads(line) for line in out]
    return lines[0], lines[1:]


def wait_for(ranks, timeout):
    """If one fails, or all take too long, the others are ended."""
    until = time.monotonic() + timeout
    while any(p.poll() is None for p in ranks) and not any(p.poll() for p in ranks) and time.monotonic() < until:
        time.sleep(0.02)
    for p in ranks:
        if p.poll() is None:
            p.kill()
        p.wait()


def summary(lines):
    """{method: medians of its rounds but the first}, in the order of the program."""
    out = {}
    for line in sorted(lines, key=lambda x: x["round"]):
        out.setdefault(line["method"], []).append(line)
    result = {}
    for method, rounds in out.items():
        later = rounds[1:]

        def median(f):
            return statistics.median(f(x) for x in later)
        s = median(lambda x: x["s"])
        row = {"s": s, "best_s": min(x["s"] for x in later), "first_s": rounds[0]["s"], "gpu_s": median(lambda x: x["gpu_s"]), "bytes": later[0]["bytes"],
               "GB/s": later[0]["bytes"] / s / 1e9}
        if "busy_s" in later[0]:
            row.update(readers=later[0]["readers"], read_bytes=later[0]["read_bytes"], sent_bytes=later[0]["sent_bytes"],
                       unique_bytes=later[0]["unique_bytes"], plan_s=median(lambda x: x["plan_s"]), to_first_s=median(lambda x: x["first_s"]),
                       busy_s={k: median(lambda x: x["busy_s"][k]) for k in later[0]["busy_s"]})
        result[method] = row
    return result


def add_ratios(n, rows):
    for method, row in rows.items():
        if "busy_s" in row:
            row["of_copies"] = row["read_bytes"] / n / row["s"] / 1e9 / rows[COPIES]["GB/s"]
            if "replicated" in method:
                row["of_broadcasts"] = row["GB/s"] / rows[BROADCASTS]["GB/s"]
        elif method.startswith("kernel"):
            row["of_copies_in_device"] = row["bytes"] / row["gpu_s"] / (rows[IN_DEVICE]["bytes"] / rows[IN_DEVICE]["gpu_s"])


def table(n, facts, a, rows):
    print(f"{n} ranks on {min(n, facts['devices'])} GPUs, NCCL {facts['nccl']}, {facts['model_bytes'] / 1e9:.3f} GB, windows of {a.window:g} MiB, "
          f"{a.rounds} rounds (load average {os.getloadavg()[0]:.1f})")
    print(f"  {'':30} {'median s':>9} {'best s':>8} {'first s':>8} {'GB/s':>8} {'gpu s':>8} {'of copies':>10} {'of broadcasts':>13}  busy: read place send")
    for method, r in rows.items():
        ratios = [f"{r[k]:.2f}" if k in r else "" for k in ("of_copies", "of_broadcasts")]
        if "of_copies_in_device" in r:
            ratios[0] = f"{r['of_copies_in_device']:.2f}"
        busy = " ".join(f"{v:.3f}" for v in r.get("busy_s", {}).values())
        print(f"  {method:30} {r['s']:9.4f} {r['best_s']:8.4f} {r['first_s']:8.4f} {r['GB/s']:8.2f} {r['gpu_s']:8.4f} {ratios[0]:>10} {ratios[1]:>13}  {busy}",
              flush=True)


def compare(a, folder):
    devices = count_gpus(a)
    model = SMALL if a.smoke else MODEL
    if not os.path.exists(os.path.join(folder, "config.json")):
        generate(folder, model, a.layers)
    out = {}
    for n in [int(x) for x in a.ranks.split(",")]:
        facts, lines = run_ranks(a, n, devices, folder)
        rows = summary(lines)
        add_ratios(n, rows)
        table(n, facts, a, rows)
        out[str(n)] = dict(facts, window_bytes=int(a.window * MIB), rounds=a.rounds, methods=rows)
    return out


def check_smoke(a, results):
    """All was measured, with the bytes that it should have; and without a GPU there is a clear word."""
    for n, result in results.items():
        rows, size = result["methods"], result["model_bytes"]
        assert len(rows) == (8 if n == "1" else 7), rows
        for method, row in rows.items():
            assert row["s"] > 0 and row["bytes"] > 0, (method, row)
            assert "busy_s" in row or row["gpu_s"] > 0, (method, row)
            if "once" in method:
                assert row["unique_bytes"] == size and row["read_bytes"] <= 1.05 * size, (method, row)
            if "replicated" in method:
                assert row["bytes"] == size and row["of_broadcasts"] > 0, (method, row)
    args = [sys.executable, __file__, "--build", a.build, "--double", "--layers", "1", "--ranks", "1"]
    done = subprocess.run(args, capture_output=True, text=True, env=dict(os.environ, CUDA_VISIBLE_DEVICES=""))
    assert done.returncode == 1 and "there is no GPU here" in done.stderr, done


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--build", default="build/release")
    p.add_argument("--dir", help="keep the model there")
    p.add_argument("--layers", type=int, default=32)
    p.add_argument("--ranks", default="1,2,4")
    p.add_argument("--window", type=float, default=32, help="MiB, of all ranks together")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--json", metavar="FILE")
    p.add_argument("--timeout", type=float, default=1800, help="seconds for the ranks")
    p.add_argument("--double", action="store_true")
    p.add_argument("--smoke", action="store_true", help="a tiny model over the double, checked: the own test of this program")
    a = p.parse_args()
    if a.smoke:
        a.double, a.layers, a.rounds, a.window, a.ranks = True, 2, 1, 0.0625, "1,2"
    if a.rounds < 1:
        p.error("--rounds: at least one")
    with contextlib.ExitStack() as stack:
        top = a.dir or tempfile.mkdtemp()
        if not a.dir:
            stack.callback(shutil.rmtree, top, True)
        results = compare(a, os.path.join(top, f"llama-{'small' if a.smoke else a.layers}"))
    if a.json:
        with open(a.json, "w") as f:
            json.dump(results, f, indent=1)
    if a.smoke:
        check_smoke(a, results)


if __name__ == "__main__":
    main()
