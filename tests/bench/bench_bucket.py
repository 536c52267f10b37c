#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A run in a bucket into memory: `ckpt export`, a copy from the mount and ckptfs.open beside parallel ranged GETs by plain curl, and Run:ai's model
streamer where its package for S3 is installed. Two runs: a model of four safetensors files, and what FSDP's 128 ranks save, which only ckptfs makes a model of
(curl gets the same bytes). The server is that of the tests, a process of its own; it waits --latency seconds before each answer. Two more rows have the shape of
a real store: the model at 20 ms with 25 MB/s for each connection, and a model of 1,000 files of 2 MiB at 20 ms.

usage: tests/bench/bench_bucket.py [--build build/release] [--dir SCRATCH] [--latency 0 0.02] [--mib 1024] [--rounds 5] [--rows ROW...] [--json FILE]

Times are of whole programs, from their start to their end (in Python, of tensors in memory, without imports), rounds interleaved, medians; ratios are
curl's time divided by theirs.
"""

import argparse
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, "..", "bucket"), HERE]
import figures  # noqa: E402
from server import Store  # noqa: E402
from test_bucket import fsdp_run, model_files  # noqa: E402

PART = 8 << 20
STREAM = """
import sys, time, torch
from runai_model_streamer import SafetensorsStreamer
begin = time.perf_counter()
with SafetensorsStreamer() as s:
    s.stream_files(sys.argv[1:])
    assert sum(t.numel() for _, t in s.get_tensors())
print(time.perf_counter() - begin)
"""
OPEN = """
import sys, time, torch, ckptfs
begin = time.perf_counter()
with ckptfs.open(sys.argv[1], anonymous=True, cache="no", view=sys.argv[2]) as f:
    assert sum(f.get_tensor(k).numel() for k in f.keys())
print(time.perf_counter() - begin)
"""


def serve(pipe, folder, latency, rate):
    with Store(latency=latency, anonymous=True, verify=False, rate=rate) as s:
        for run in os.listdir(folder):
            s.put_folder("b", run + "/", os.path.join(folder, run))
        pipe.send(s.url)
        pipe.recv()


def curl(out, url, files):
    """One request for each 8 MiB, 32 at once."""
    parts = [(name, at, min(at + PART, size) - 1) for name, size in files.items() for at in range(0, size, PART)]
    text = "next\n".join(f'url = "{url}/{name}"\nrange = {a}-{b}\noutput = "{out}/{name}.{a}"\nfail\nsilent\nhttp1.1\n' for name, a, b in parts)
    subprocess.run(["curl", "-Z", "--parallel-max", "32", "-K", "-"], input=text, text=True, check=True, capture_output=True)
    got = sum(os.path.getsize(os.path.join(out, name)) for name in os.listdir(out))
    assert got == sum(files.values()), f"curl got {got} bytes of {sum(files.values())}"


def copy(out, args, url, env):
    mnt = out + ".mnt"
    os.makedirs(mnt, exist_ok=True)
    subprocess.run([os.path.join(args.build, "fs", "ckptfs"), url, mnt, "-o", "anonymous,cache=no,view=" + args.view], env=env, check=True)
    try:
        subprocess.run(["cp", "-r", mnt + "/.", out], check=True)
    finally:
        subprocess.run(["fusermount3", "-u", mnt], check=True)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--build", default=os.path.join(HERE, "..", "..", "build", "release"))
    p.add_argument("--dir", default="/dev/shm/ckptfs-bench-bucket")
    p.add_argument("--latency", type=float, nargs="+", default=[0, 0.02])
    p.add_argument("--mib", type=int, default=1024)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--rows", nargs="+", choices=["model", "fsdp", "model, 25 MB/s", "small"], help="these alone")
    figures.add_option(p)
    args = p.parse_args()
    runs, out, charts = os.path.join(args.dir, "runs"), os.path.join(args.dir, "out"), []
    shutil.rmtree(args.dir, True)
    os.makedirs(runs)
    for run, mib, shards in (("model", args.mib // 4, 4), ("small", 2, 1000)):
        if args.rows and not any(r.startswith(run) for r in args.rows):
            continue
        os.makedirs(os.path.join(runs, run))
        for name, data in model_files(7, mib, shards=shards).items():
            with open(os.path.join(runs, run, name), "wb") as f:
                f.write(data)
    if not args.rows or "fsdp" in args.rows:
        fsdp_run(os.path.join(runs, "fsdp"), 128, max(1, args.mib // 16), 128 * 64)
    has_streamer = subprocess.run([sys.executable, "-c", "import runai_model_streamer_s3"], capture_output=True, check=False).returncode == 0
    rows = [(("model", "fsdp"), latency, 0) for latency in args.latency] + [(("model",), 0.02, 25e6), (("small",), 0.02, 0)]
    for names, latency, rate in rows:
        names = [n for n in names if not args.rows or n + (", 25 MB/s" if rate else "") in args.rows]
        if not names:
            continue
        ours, theirs = multiprocessing.Pipe()
        server = multiprocessing.Process(target=serve, args=(theirs, runs, latency, rate))
        server.start()
        url = ours.recv()
        env = dict(os.environ, AWS_ENDPOINT_URL=url, AWS_ACCESS_KEY_ID="AKIDEXAMPLE", AWS_SECRET_ACCESS_KEY="secret/key+with=signs",
                   RUNAI_STREAMER_S3_ENDPOINT=url, RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING="0", AWS_EC2_METADATA_DISABLED="true", AWS_REGION="us-east-1", CKPTFS_LIBRARY_PATH=args.build,
                   PYTHONPATH=os.pathsep.join([os.path.join(HERE, "..", "..", "contrib", "python"), os.environ.get("PYTHONPATH", "")]))
        for run in names:
            files = {f: os.path.getsize(os.path.join(runs, run, f)) for f in sorted(os.listdir(os.path.join(runs, run)))}
            args.view = "raw" if run == "fsdp" else "hf"
            export = [os.path.join(args.build, "fs", "ckpt"), "export", f"s3://b/{run}", out, "-q", "-o", "anonymous,cache=no,view=" + args.view]
            ways = {"curl": lambda: curl(out, f"{url}/b/{run}", files),
                    "ckpt export": lambda: subprocess.run(export, env=env, check=True, capture_output=True),
                    "ckptfs, cp": lambda: copy(out, args, f"s3://b/{run}", env)}
            ways["ckptfs.open"] = lambda: float(subprocess.run([sys.executable, "-c", OPEN, f"s3://b/{run}", args.view], env=env, check=True,
                                                               capture_output=True, text=True).stdout)
            if has_streamer and run == "model":
                ways["runai-model-streamer"] = lambda: float(subprocess.run(
                    [sys.executable, "-c", STREAM, *(f"s3://b/{run}/{f}" for f in files if f.endswith(".safetensors"))],
                    env=env, check=True, capture_output=True, text=True).stdout)
            times = {name: [] for name in ways}
            for _ in range(args.rounds):
                for name, way in ways.items():
                    shutil.rmtree(out, True)
                    if name != "ckpt export":
                        os.mkdir(out)
                    begin = time.perf_counter()
                    told = way()
                    times[name].append(told if isinstance(told, float) else time.perf_counter() - begin)
            first = statistics.median(times["curl"])
            what = f"{latency * 1000:.0f} ms" + (f", {rate / 1e6:.0f} MB/s for each connection" if rate else "")
            print(f"{run}, {sum(files.values()) >> 20} MiB in {len(files)} objects, {what}")
            for name, all_ in times.items():
                middle = statistics.median(all_)
                print(f"  {name:22} {middle:6.2f} s  {first / middle:5.2f}   ({min(all_):.2f} to {max(all_):.2f})", flush=True)
            charts.append(figures.chart(f"{run}, {what}", "s", times, lambda name: name.startswith("ckpt")))
        ours.send(1)
        server.join(5)
        server.kill()
    shutil.rmtree(args.dir, True)
    figures.write(args.json, charts)


if __name__ == "__main__":
    main()
