#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs on storage at a distance (slow_fs.c: a latency for every request, one rate for all bytes), beside 16 parallel readers of the same files, which is what
the storage gives. Formats: torch's distributed checkpoint of 8 ranks, Megatron's of 4, nanotron's of 8, DeepSpeed's ZeRO 3 of 8 where --deepspeed names a
folder with that package, and a Hugging Face directory of four files. `many` is only opened: nanotron's, --files small files in a third as many folders.

usage: tests/bench/bench_far.py [--build build/release] [--dir SCRATCH] [--latency-us 3000] [--rate 3e8] [--gib 0.4] [--files 4304] [--rounds 3] [FORMAT...]
       tests/bench/bench_far.py --cold ...      the same runs on the local disk of --dir, none of whose pages are in memory, beside `cp -r` of the run

Each command sees a fresh mount of the storage, whose cache is empty. Times are of whole programs, the best of all rounds, which are interleaved; ratios are
the parallel readers' time divided by ours (for ckpt load: of two ranks that need half each; `start` is such a load of one number), so 1 is as fast
as the storage; of `many`, those read the heads
of all files that `find` names, 32 at once. `requests` are those that the
storage saw: reads, and opens, attributes and lists together.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import types

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "..", "mount")]
import bench  # noqa: E402
import bench_dcp  # noqa: E402
import bench_deepspeed  # noqa: E402
import bench_megatron  # noqa: E402
import figures  # noqa: E402
from storage import Storage  # noqa: E402

NUMBERS = dict(num_attention_heads=bench_dcp.HEADS, num_key_value_heads=bench_dcp.KV, head_dim=bench_dcp.HIDDEN // bench_dcp.HEADS, model_type="llama",
               max_position_embeddings=4096, rms_norm_eps=1e-5)
MAPPED = """
import glob, json, mmap, os, struct, sys
step = mmap.PAGESIZE
paths = {os.path.realpath(p) for p in glob.glob(sys.argv[1] + "/**/*.safetensors", recursive=True)}  # below a step, too, of which `latest` is a link
assert paths
for path in sorted(paths):
    with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as m:
        n = struct.unpack("<Q", m[:8])[0]
        tensors = sorted(v["data_offsets"] for k, v in json.loads(m[8:8 + n]).items() if k != "__metadata__")
        for a, b in tensors:
            sum(m[8 + n + at] for at in range(a, b, step))
"""


def dcp(opt, at):
    bench_dcp.write_run(at, 8, 0, opt.layers)
    shutil.rmtree(at + ".hf")
    os.makedirs(at + ".base")
    with open(os.path.join(at + ".base", "config.json"), "w", encoding="utf-8") as f:
        json.dump(llama(opt), f)
    return [f"base={at}.base"]


def megatron(opt, at):
    bench_megatron.write_dist(at, opt.layers)
    return [f"{k}={v}" for k, v in NUMBERS.items()]


def nanotron(opt, at):
    bench.make_raw_run(at, int(opt.gib * 2**30), 1, bench.TP, os.urandom(8 << 20))
    return ["view=raw"]


def deepspeed(opt, at):
    os.environ["PYTHONPATH"] = os.path.abspath(opt.deepspeed)
    os.environ["DS_ACCELERATOR"] = "cpu"
    layers = max(1, round((opt.gib * 2**30 / 4 - 2 * 32000 * 1024) / 12845056))
    bench_deepspeed.write(os.path.dirname(at), at, layers)
    base = at + ".base"
    bench_deepspeed.write_base(base, layers)
    return [f"base={base}", "dtype=float32"]


def huggingface(opt, at):
    scratch = at + ".scratch"
    options = dcp(opt, scratch)
    export = [os.path.join(opt.build, "fs", "ckpt"), "export", "-q", scratch, at, "-o", f"max_shard_size={int(opt.gib * 2**28)}"]
    subprocess.run(export + [a for o in options for a in ("-o", o)], check=True)
    shutil.rmtree(scratch)
    shutil.rmtree(scratch + ".base")
    return []


def many(opt, at):
    bench.make_llama(at, opt.files, os.urandom(1 << 20))
    return []


def llama(opt):
    return dict(NUMBERS, architectures=["LlamaForCausalLM"], hidden_size=bench_dcp.HIDDEN, intermediate_size=bench_dcp.FFN, vocab_size=bench_dcp.VOCAB,
                num_hidden_layers=opt.layers, tie_word_embeddings=False, dtype="bfloat16")


FORMATS = {"dcp": dcp, "megatron": megatron, "nanotron": nanotron, "deepspeed": deepspeed, "huggingface": huggingface, "many": many}


def floor(opt, run, options):
    subprocess.run(f"find {run} -type f -size +64k -print0 | xargs -0 -P16 -I@ dd if=@ of=/dev/null bs=4M status=none", shell=True, check=True)


def heads(opt, run, options):
    subprocess.run(f"find {run} -type f -print0 | xargs -0 -P32 -n32 head -qc 4096 >/dev/null", shell=True, check=True)


def export(opt, run, options):
    subprocess.run([os.path.join(opt.build, "fs", "ckpt"), "export", "-q", run, opt.out] + options, check=True, stdout=subprocess.DEVNULL)


def copy(opt, run, options):
    with contextlib.closing(bench.Mount(opt, run, *options[1::2])) as mount:
        subprocess.run(["cp", "-r", mount.at, opt.out], check=True)


def mapped(opt, run, options):
    with contextlib.closing(bench.Mount(opt, run, *options[1::2])) as mount:
        subprocess.run([sys.executable, "-c", MAPPED, mount.at], check=True)


def two_ranks(opt, *args):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "OMPI"))}
    mpirun = ["mpirun", "-n", "2", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    subprocess.run(mpirun + [os.path.join(opt.build, "fs", "ckpt"), "load", *args], check=True, env=env, stdout=subprocess.DEVNULL)


def load(opt, run, options):
    layout = "tp=2" if not any(o.startswith("view") for o in options) else "fsdp=2"
    two_ranks(opt, run, "--layout=" + layout, *options)


def start(opt, run, options):
    """A load of one number: what MPI needs, and what every load needs."""
    os.makedirs(opt.out)
    header = json.dumps({"x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    with open(os.path.join(opt.out, "model.safetensors"), "wb") as f:
        f.write(len(header).to_bytes(8, "little") + header + b"x")
    two_ranks(opt, opt.out, "--layout=dp=2", "-o", "view=raw")


def copied(opt, run, options):
    subprocess.run(["cp", "-r", run, opt.out], check=True)


def info(opt, run, options):
    subprocess.run([os.path.join(opt.build, "fs", "ckpt"), "info", run] + options, check=True, stdout=subprocess.DEVNULL)


def ls(opt, run, options):
    with contextlib.closing(bench.Mount(opt, run, *options[1::2])) as mount:
        os.listdir(mount.at)


WAYS = {"floor": floor, "export": export, "cp": copy, "mapped": mapped, "load": load, "start": start, "info": info, "ls": ls}
OPENS = {"floor": heads, "info": info, "ls": ls}


@contextlib.contextmanager
def cold(top):
    """The local disk, as a storage that counts nothing."""
    bench.drop(top)
    yield types.SimpleNamespace(at=top, counts=None)


def measure(opt, name, top, options):
    """{way: (best seconds, counts of that round)}"""
    best = {}
    ways = OPENS if name == "many" else WAYS | {"floor": copied} if opt.cold else WAYS
    for i in range(opt.rounds):
        for way in list(ways)[:: 1 if i % 2 == 0 else -1]:
            if opt.ways and way not in opt.ways and way != "floor" and not (way == "start" and "load" in opt.ways):
                continue
            with cold(top) if opt.cold else Storage(opt.build, top, opt.latency_us, opt.rate, opt.dir) as storage:
                begin = time.monotonic()
                ways[way](opt, os.path.join(storage.at, "run"), options)
                took = time.monotonic() - begin
            shutil.rmtree(opt.out, ignore_errors=True)
            if way not in best or took < best[way][0]:
                best[way] = took, storage.counts
    if "load" in best:
        print(f"{name:12} load without the start of its ranks: {best['floor'][0] / (best['load'][0] - best['start'][0]):.2f}")
    for way, (took, counts) in best.items():
        saw = counts and f"{counts['bytes'] / 1e9:5.2f} GB in {counts['reads']:6} reads, {counts['opens'] + counts['attributes'] + counts['lists']:5} others"
        print(f"{name:12} {way:8} {took:7.2f} s  {best['floor'][0] / took:5.2f}  {saw or ''}", flush=True)
    return {way: [took] for way, (took, _) in best.items()}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--build", default="build/release")
    p.add_argument("--dir")
    p.add_argument("--tmpfs", default="/dev/shm")
    p.add_argument("--latency-us", type=int, default=3000)
    p.add_argument("--rate", type=float, default=3e8)
    p.add_argument("--gib", type=float, default=0.4)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--files", type=int, default=4304)
    p.add_argument("--cold", action="store_true", help="local files, none of whose pages are in memory")
    p.add_argument("--deepspeed", help="a folder with DeepSpeed's package")
    p.add_argument("--ways", nargs="*", choices=[w for w in WAYS if w != "floor"])
    p.add_argument("--keep", help="keep the runs in this folder, and take those that are there")
    figures.add_option(p)
    p.add_argument("formats", nargs="*", choices=[[], *FORMATS])
    opt = p.parse_args()
    opt.build = os.path.abspath(opt.build)
    opt.out = os.path.join(opt.tmpfs, f"ckptfs-bench-{os.getpid()}")
    layer = 2 * (2 * bench_dcp.HIDDEN**2 + 2 * bench_dcp.HIDDEN**2 * bench_dcp.KV // bench_dcp.HEADS + 3 * bench_dcp.HIDDEN * bench_dcp.FFN)
    opt.layers = max(1, round((opt.gib * 2**30 - 4 * bench_dcp.VOCAB * bench_dcp.HIDDEN) / layer))
    charts = []
    with contextlib.ExitStack() as stack:
        tmp = os.path.abspath(opt.keep) if opt.keep else stack.enter_context(tempfile.TemporaryDirectory(dir=opt.dir))
        os.makedirs(tmp, exist_ok=True)
        for name in opt.formats or [f for f in FORMATS if f != "deepspeed" or opt.deepspeed]:
            top, note = os.path.join(tmp, name), os.path.join(tmp, name + ".json")
            if not os.path.exists(note):
                os.makedirs(top)
                options = FORMATS[name](opt, os.path.join(top, "run"))
                with open(note, "w", encoding="utf-8") as f:
                    json.dump(options, f)
            with open(note, encoding="utf-8") as f:
                options = [a for o in json.load(f) for a in ("-o", o)]
            title = f"{name}: cold" if opt.cold else f"{name}: {opt.latency_us / 1000:g} ms, {opt.rate / 1e6:g} MB/s"
            charts.append(figures.chart(title, "s", measure(opt, name, top, options), lambda w: w != "floor"))
    figures.write(opt.json, charts)


if __name__ == "__main__":
    main()
