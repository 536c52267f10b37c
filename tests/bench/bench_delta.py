#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Reading a step that is a difference, side by side with a receiver that patches its own copy of the model.

usage: tests/bench/bench_delta.py [--build build/release] [--dir SCRATCH] [--gib 2] [--tensor-mib 128] [--changed 0.03] [--steps 1] [--rounds 5]

A model of BF16 weights, and steps in which so many elements changed by their last bit, as slime writes them (xor, zstd 1, xxh3-128).
The receiver does what inference engines do: threads decompress each blob in parts of 2 MiB, combine them with the mapped copy in place,
and compare the checksum. It has the bytes then, but nobody has read them; so it is measured alone, and with the reading and hashing of
what it made. ckptfs opens the step and reads all tensors by as many threads (through the library), or also hashes them ("ckpt digest").
Printed: medians, and the ratios that matter; and with --rate the digest from a storage of so many MB/s (a preloaded library that lets
pread wait), over that of a full model from it. On a busy machine run it by "chrt -f 10".
"""

import argparse
import concurrent.futures
import ctypes
import itertools
import json
import mmap
import os
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time

import numpy as np
import xxhash
import zstandard

SLOW = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static double next;
static ssize_t wait_for(ssize_t n)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    double now = t.tv_sec + 1e-9 * t.tv_nsec, rate = atof(getenv("SLOW_BYTES_PER_S"));
    pthread_mutex_lock(&lock);
    next = (next > now ? next : now) + (n > 0 ? n : 0) / rate;
    double until = next;
    pthread_mutex_unlock(&lock);
    t = (struct timespec){until, (until - (long)until) * 1e9};
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL);
    return n;
}
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
ssize_t pread(int fd, void *b, size_t n, off_t o) { return wait_for(REAL(pread)(fd, b, n, o)); }
ssize_t pread64(int fd, void *b, size_t n, off64_t o) { return wait_for(REAL(pread64)(fd, b, n, o)); }
ssize_t preadv(int fd, const struct iovec *v, int k, off_t o) { return wait_for(REAL(preadv)(fd, v, k, o)); }
ssize_t preadv64(int fd, const struct iovec *v, int k, off64_t o) { return wait_for(REAL(preadv64)(fd, v, k, o)); }
ssize_t preadv2(int fd, const struct iovec *v, int k, off_t o, int f) { return wait_for(REAL(preadv2)(fd, v, k, o, f)); }
ssize_t preadv64v2(int fd, const struct iovec *v, int k, off64_t o, int f) { return wait_for(REAL(preadv64v2)(fd, v, k, o, f)); }
"""


def header_of(path):
    """The header of a safetensors file, and where its data begins."""
    with open(path, "rb") as f:
        (n,) = struct.unpack("<Q", f.read(8))
        header = json.loads(f.read(n))
    meta = header.pop("__metadata__", {})
    return header, meta, 8 + n


def write_model(folder, arrays):
    os.makedirs(folder, exist_ok=True)
    header, at = {}, 0
    for name, a in arrays.items():
        header[name] = {"dtype": "BF16", "shape": [len(a) // 1024, 1024], "data_offsets": [at, at + a.nbytes]}
        at += a.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(os.path.join(folder, "model.safetensors"), "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for a in arrays.values():
            f.write(a)
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, f)


def make(a, top):
    """The base, the steps, and the full model that they lead to."""
    rng = np.random.default_rng(1)
    arrays = {}
    for i in range(int(a.gib * 1024 / a.tensor_mib)):
        values = rng.standard_normal(int(a.tensor_mib * 2**19), dtype=np.float32)
        values *= 0.02
        arrays[f"model.layers.{i}.mlp.up_proj.weight"] = (values.view(np.uint32) >> 16).astype(np.uint16)
    write_model(os.path.join(top, "base"), arrays)
    os.mkdir(os.path.join(top, "run"))
    before = os.path.join(top, "base")
    for step in range(1, a.steps + 1):
        for w in arrays.values():
            at = rng.integers(0, len(w), int(len(w) * a.changed))
            w[at] ^= 1
        after = os.path.join(top, f"full{step}")
        write_model(after, arrays)
        subprocess.run([os.path.join(a.build, "fs", "ckpt"), "delta", "-q", before, after, os.path.join(top, "run", f"weight_v{step:06d}")], check=True)
        if step > 1:
            shutil.rmtree(before)
        before = after
    return before


def patch(copy, run, steps, threads):
    """Bring the copy to the last step, as inference engines do."""
    path = os.path.join(copy, "model.safetensors")
    header, _, data = header_of(path)
    with open(path, "r+b") as f, mmap.mmap(f.fileno(), 0) as mapped:

        def apply(blob, name, digest):
            begin, end = header[name]["data_offsets"]
            region = np.ndarray((end - begin,), np.uint8, mapped, data + begin)
            hasher, reader, at = xxhash.xxh3_128(), zstandard.ZstdDecompressor().stream_reader(blob), 0
            while block := reader.read(2 << 20):
                part = region[at : at + len(block)]
                part ^= np.frombuffer(block, np.uint8)
                hasher.update(part)
                at += len(block)
            assert hasher.hexdigest() == digest

        for step in range(1, steps + 1):
            folder = os.path.join(run, f"weight_v{step:06d}")
            with concurrent.futures.ThreadPoolExecutor(threads) as pool:
                jobs = []
                for file in sorted(x for x in os.listdir(folder) if x.endswith(".safetensors")):
                    blobs, sums, begin = header_of(os.path.join(folder, file))
                    with open(os.path.join(folder, file), "rb") as g:
                        raw = memoryview(g.read())
                    for name, entry in blobs.items():
                        lo, hi = entry["data_offsets"]
                        jobs.append(pool.submit(apply, raw[begin + lo : begin + hi], name, sums[name]))
                for job in jobs:
                    job.result()


def timed(fn, *args):
    begin = time.perf_counter()
    fn(*args)
    return time.perf_counter() - begin


def read_all(a, threads, run, base):
    """Open the step, and read all tensors in parts of 1 MiB, in order."""
    lib, failed = a.library, ctypes.create_string_buffer(2048)
    opt, handle, view, tickets = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p(), itertools.count()

    def call(rc):
        assert rc >= 0, failed.raw

    call(lib.ckpt_options_new(ctypes.byref(opt), failed))
    call(lib.ckpt_options_set(opt, b"base", base.encode(), failed))
    call(lib.ckpt_run_open(run.encode(), opt, ctypes.byref(handle), failed))
    call(lib.ckpt_run_view(handle, None, ctypes.byref(view), failed))
    parts, n = int(a.tensor_mib), lib.ckpt_view_tensors(view)

    def work(_):
        part = ctypes.create_string_buffer(1 << 20)
        for k in tickets:
            if k >= parts * n:
                return
            call(lib.ckpt_view_tensor_pread(view, ctypes.c_size_t(k // parts), part, ctypes.c_size_t(1 << 20), ctypes.c_uint64(k % parts << 20), failed))

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    lib.ckpt_view_release(view)
    lib.ckpt_run_close(handle)
    lib.ckpt_options_free(opt)


def digest(a, *args, env=None):
    done = subprocess.run([os.path.join(a.build, "fs", "ckpt"), "digest", "--tensors", *args], capture_output=True, text=True, check=True, env=env)
    return done.stdout


def slow_library(top):
    source, lib = os.path.join(top, "slow.c"), os.path.join(top, "slow.so")
    with open(source, "w") as f:
        f.write(SLOW)
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", source, "-o", lib, "-ldl"], check=True)
    return lib


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--build", default="build/release")
    p.add_argument("--dir", default="/dev/shm", help="a tmpfs")
    p.add_argument("--gib", type=float, default=2)
    p.add_argument("--tensor-mib", type=int, default=128)
    p.add_argument("--changed", type=float, default=0.03)
    p.add_argument("--steps", type=int, default=1)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--rate", type=float, default=1000, help="MB/s of the slow storage; 0: not measured")
    a = p.parse_args()
    top = tempfile.mkdtemp(prefix="ckptfs-bench-", dir=a.dir)
    try:
        full = make(a, top)
        base, run = os.path.join(top, "base"), os.path.join(top, "run")
        step = [run, "-o", f"base={base}"]
        copy, threads = os.path.join(top, "copy"), os.cpu_count()
        a.library = ctypes.CDLL(os.path.join(a.build, "core/libckptfs.so.0"))
        times = {k: [] for k in ("receiver", "receiver, then digest", "ckptfs reads", "ckptfs digest", "full model, digest")}
        for _ in range(a.rounds):
            shutil.copytree(base, copy)
            times["receiver"].append(timed(patch, copy, run, a.steps, threads))
            times["receiver, then digest"].append(times["receiver"][-1] + timed(digest, a, copy))
            shutil.rmtree(copy)
            times["ckptfs reads"].append(timed(read_all, a, threads, run, base))
            times["ckptfs digest"].append(timed(digest, a, *step))
            times["full model, digest"].append(timed(digest, a, full))
        assert digest(a, *step) == digest(a, full), "other bytes"
        blobs = sum(os.path.getsize(os.path.join(d, f)) for d, _, files in os.walk(run) for f in files)
        print(f"{a.gib:g} GiB in tensors of {a.tensor_mib:g} MiB, {a.steps} steps of {100 * a.changed:g} %, {blobs / 2**20:.0f} MiB of changes, {threads} processors")
        best = {k: statistics.median(v) for k, v in times.items()}
        for k, v in times.items():
            print(f"  {k:22} {best[k]:6.2f} s ({min(v):.2f} to {max(v):.2f})")
        print(f"  ratios: {best['ckptfs reads'] / best['receiver']:.2f} read, {best['ckptfs digest'] / best['receiver, then digest']:.2f} digest")
        if a.rate:
            env = dict(os.environ, LD_PRELOAD=slow_library(top), SLOW_BYTES_PER_S=str(a.rate * 1e6))
            slow = {k: statistics.median([timed(lambda w=w: digest(a, *w, env=env)) for _ in range(3)]) for k, w in (("step", step), ("full", [full]))}
            print(f"  at {a.rate:g} MB/s: step {slow['step']:.2f} s, full model {slow['full']:.2f} s, ratio {slow['step'] / slow['full']:.2f}")
    finally:
        shutil.rmtree(top)


if __name__ == "__main__":
    sys.exit(main())
