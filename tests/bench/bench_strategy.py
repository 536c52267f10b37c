#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""ckptfs.megatron.LoadShardedStrategy beside Megatron's own strategies: the same torch_dist checkpoint, saved by two ranks with tp=2, loaded by four with
tp=2 dp=2 through dist_checkpointing.load, rounds interleaved, on CPU with gloo. Files are in the page cache.

usage: tests/bench/bench_strategy.py --megatron FOLDER [--build build/release] [--dir SCRATCH] [--ranks 4] [--layers 8] [--rounds 5] [--json FILE]

FOLDER has the package `megatron`. `ckptfs` chooses who reads, `ckptfs once` reads every byte on one rank. `megatron` is TorchDistLoadShardedStrategy,
in which every rank reads what it wants; `megatron parallel` is the same inside FullyParallelLoadStrategyWrapper over the data-parallel group, which
reads each shard on one of its ranks and broadcasts it; both without their wait for a device, and with host memory where they say "cuda". Times are of
dist_checkpointing.load, from a barrier to the last rank's end, the median of the rounds. `read` is what all ranks read through read(2) and its kin
(rchar of /proc/self/io), of the bytes that the checkpoint's tensors have; mmap does not count.
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
sys.path[:0] = [os.path.join(HERE, "..", "..", "contrib", "python")]
import figures  # noqa: E402
from bench_reader import MODEL, rchar  # noqa: E402

TP = 2


def without_cuda():
    """Megatron's exchange makes its tensors on "cuda"."""
    import torch
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    torch.cuda.synchronize, torch.cuda.current_device = lambda *_: None, lambda: "cpu"
    torch.Tensor.cuda = lambda self, *_, **__: self

    def on_host(make):
        def made(*args, **more):
            more.update({"device": "cpu"} if "device" in more else {})
            return make(*args, **more)
        return made
    torch.empty, torch.empty_like = on_host(torch.empty), on_host(torch.empty_like)
    init = ShardedTensor.init_data
    ShardedTensor.init_data = lambda self, device, *args: init(self, "cpu", *args)


def state_of(layers, fill):
    import torch
    import torch.distributed as dist
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    part, replica = dist.get_rank() % TP, dist.get_rank() // TP
    state = {}
    for name, shape in MODEL.shapes(layers):
        cut = shape[0] % TP == 0 and len(shape) > 1
        local = [shape[0] // TP, *shape[1:]] if cut else list(shape)
        data = torch.randn(local).bfloat16() if fill else torch.empty(local, dtype=torch.bfloat16)
        if fill and not cut:
            dist.broadcast(data, 0)
        state[name] = ShardedTensor.from_rank_offsets(name, data, *([(0, part, TP)] if cut else []), replica_id=replica if cut else dist.get_rank())
    return state


def methods_of(group):
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

    from ckptfs.megatron import LoadShardedStrategy
    return {"megatron": TorchDistLoadShardedStrategy, "megatron parallel": lambda: FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), group),
            "ckptfs": LoadShardedStrategy, "ckptfs once": lambda: LoadShardedStrategy(readers="once")}


def one_rank(args):
    import torch
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    without_cuda()
    folder = os.path.join(args.dir, "run")
    if args.save:
        if dist.get_rank() == 0:
            os.makedirs(folder)
        dist.barrier()
        dist_checkpointing.save(state_of(args.layers, True), folder, ("torch_dist", 1))
        dist.barrier()
        dist.destroy_process_group()
        return
    groups = [dist.new_group(range(t, dist.get_world_size(), TP)) for t in range(TP)]
    methods = methods_of(groups[dist.get_rank() % TP])
    times, reads, sums = {m: [] for m in methods}, {}, {}
    for number in range(args.rounds + 1):  # the first warms up
        for method in list(methods)[:: 1 if number % 2 else -1]:
            state, strategy = state_of(args.layers, False), methods[method]()
            dist.barrier()
            before, start = rchar(), time.monotonic()
            state = dist_checkpointing.load(state, folder, strategy, validate_access_integrity=False)
            dist.barrier()
            took, read = time.monotonic() - start, torch.tensor(rchar() - before)
            dist.all_reduce(read)
            if number:
                times[method].append(took)
                reads[method] = int(read)
            sums[method] = [t.view(torch.int16).to(torch.int64).sum() for t in state.values()]
    assert all(s == sums["megatron"] for s in sums.values())
    if dist.get_rank() == 0:
        size = sum(2 * torch.Size(shape).numel() for _, shape in MODEL.shapes(args.layers))
        figures.write(args.json, [figures.chart(f"dist_checkpointing.load of {size / 1e9:.2f} GB, {dist.get_world_size()} ranks", "s", times, lambda name: name.startswith("ckptfs"))])
        for method in methods:
            middle = statistics.median(times[method])
            print(f"{method:17} {dist.get_world_size()} ranks  {middle:7.3f} s ({min(times[method]):.3f} to {max(times[method]):.3f})  {size / middle / 1e9:6.2f} GB/s  "
                  f"read {reads[method] / size:.3f} of {size / 1e9:.2f} GB")
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megatron", required=True)
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
    env = dict(os.environ, CKPTFS_LIBRARY_PATH=os.path.abspath(args.build), OMP_NUM_THREADS="1", PYTHONPATH=os.path.abspath(args.megatron))
    try:
        for ranks, more in ((TP, ["--save"]), (args.ranks, [])):
            subprocess.run([sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", os.path.abspath(__file__),
                            "--megatron", args.megatron, "--dir", folder, "--layers", str(args.layers), "--rounds", str(args.rounds), *(["--json", args.json] if args.json else []), *more], check=True, env=env)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
