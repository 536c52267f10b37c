#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""ckptfs.torch.StorageReader beside torch's own FileSystemReader: the same distributed checkpoint, saved by two ranks, loaded into FSDP2's parts of N
ranks by dcp.load, rounds interleaved, on CPU with gloo, into memory that nobody has touched before. Files are in the page cache.

usage: tests/bench/bench_reader.py [--build build/release] [--dir SCRATCH] [--ranks 4] [--layers 8] [--rounds 5] [--json FILE]

Times are of dcp.load, from a barrier to the last rank's end, the median of the rounds. `read` is what all ranks read through read(2) and its kin
(rchar of /proc/self/io), of the bytes that the checkpoint's tensors have; mmap does not count there.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, "..", "load"), os.path.join(HERE, "..", "..", "contrib", "python")]
import figures  # noqa: E402
from llama import Llama  # noqa: E402

MODEL = Llama(2048, 5632, 32, 4, 32000)


def state_of(layers, fill):
    """FSDP2's part of every tensor, as a state dict of DTensors."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    mesh, size = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_world_size()
    state = {}
    for name, shape in MODEL.shapes(layers):
        rows = len(range(shape[0])[dist.get_rank() * -(-shape[0] // size):][:-(-shape[0] // size)])
        local = torch.randn(rows, *shape[1:]).bfloat16() if fill else torch.empty(rows, *shape[1:], dtype=torch.bfloat16)
        state[name] = DTensor.from_local(local, mesh, [Shard(0)], shape=torch.Size(shape), stride=torch.empty(shape, device="meta").stride(), run_check=False)
    return state


def rchar():
    with open("/proc/self/io", encoding="ascii") as f:
        return int(f.readline().split()[1])


def one_rank(args):
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from ckptfs.torch import StorageReader
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = os.path.join(args.dir, "dcp")
    if args.save:
        dcp.save(state_of(args.layers, True), checkpoint_id=folder)
        dist.destroy_process_group()
        return
    methods = {"torch": lambda: dcp.FileSystemReader(folder), "ckptfs": lambda: StorageReader(folder, view="raw")}
    times, reads, sums = {m: [] for m in methods}, {m: 0 for m in methods}, {}
    for number in range(args.rounds + 1):  # the first warms up
        for method in list(methods)[:: 1 if number % 2 else -1]:
            state = state_of(args.layers, False)
            reader = methods[method]()
            dist.barrier()
            before, start = rchar(), time.monotonic()
            dcp.load(state, storage_reader=reader)
            dist.barrier()
            took, read = time.monotonic() - start, torch.tensor(rchar() - before)
            dist.all_reduce(read)
            if number:
                times[method].append(took)
                reads[method] = int(read)
            sums[method] = [t.to_local().view(torch.int16).to(torch.int64).sum() for t in state.values()]
    assert sums["torch"] == sums["ckptfs"]
    if dist.get_rank() == 0:
        size = sum(2 * torch.Size(shape).numel() for _, shape in MODEL.shapes(args.layers))
        figures.write(args.json, [figures.chart(f"dcp.load of {size / 1e9:.2f} GB into FSDP2, {dist.get_world_size()} ranks", "s", times, ["ckptfs"].__contains__)])
        for method in methods:
            middle = statistics.median(times[method])
            print(f"{method:8} {dist.get_world_size()} ranks  {middle:7.3f} s ({min(times[method]):.3f} to {max(times[method]):.3f})  {size / middle / 1e9:6.2f} GB/s  "
                  f"read {reads[method] / size:.3f} of {size / 1e9:.2f} GB")
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", default=os.path.join(HERE, "..", "..", "build", "release"))
    parser.add_argument("--dir")
    for name, n in (("ranks", 4), ("layers", 8), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=n)
    figures.add_option(parser)
    parser.add_argument("--save", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if "RANK" in os.environ:
        one_rank(args)
        return
    folder = tempfile.mkdtemp(prefix="ckptfs-bench-", dir=args.dir)
    env = dict(os.environ, CKPTFS_LIBRARY_PATH=os.path.abspath(args.build), OMP_NUM_THREADS="1")
    try:
        for ranks, more in ((2, ["--save"]), (args.ranks, [])):
            subprocess.run([sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", os.path.abspath(__file__),
                            "--dir", folder, "--layers", str(args.layers), "--rounds", str(args.rounds), *(["--json", args.json] if args.json else []), *more], check=True, env=env)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
