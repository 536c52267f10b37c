#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Exports of Megatron-Core checkpoints with stacked layers, tensor parallel 4, side by side with cp of the same bytes in one file.

usage: tests/bench/bench_megatron.py [--build build/release] [--dir SCRATCH] [--tmpfs /dev/shm] [--gib 2] [--rounds 3]
Run it with a Python that has torch.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile

from bench_dcp import FFN, HEADS, HIDDEN, KV, VOCAB, arguments, measure, report

DIM = HIDDEN // HEADS
TP = 4
WRITE = """
import json, sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method="file://" + folder + ".store", world_size=world, rank=rank)
mesh = init_device_mesh("cpu", (world,))
def cut(shape, dim):
    local = [n // world if i == dim else n for i, n in enumerate(shape)]
    return DTensor.from_local(torch.zeros(local, dtype=torch.bfloat16), mesh, [Replicate() if dim is None else Shard(dim)], run_check=False)
dcp.save({name: cut(shape, dim) for name, (shape, dim) in json.loads(sys.argv[4]).items()}, checkpoint_id=folder)
"""


def tensors(layers):
    """{key: (global shape, the dimension that tensor parallelism cuts)}"""
    at = "decoder.layers."
    return {
        "embedding.word_embeddings.weight": ([VOCAB, HIDDEN], 0), "output_layer.weight": ([VOCAB, HIDDEN], 0),
        "decoder.final_layernorm.weight": ([HIDDEN], None),
        at + "self_attention.linear_qkv.layer_norm_weight": ([layers, HIDDEN], None),
        at + "self_attention.linear_qkv.weight": ([layers, (HEADS + 2 * KV) * DIM, HIDDEN], 1),
        at + "self_attention.linear_proj.weight": ([layers, HIDDEN, HIDDEN], 2),
        at + "mlp.linear_fc1.layer_norm_weight": ([layers, HIDDEN], None),
        at + "mlp.linear_fc1.weight": ([layers, 2 * FFN, HIDDEN], 1),
        at + "mlp.linear_fc2.weight": ([layers, HIDDEN, FFN], 2),
    }


def finish(folder, backend):
    common = os.path.join(folder, "common.pt")
    subprocess.run([sys.executable, "-c", f"import torch; torch.save({{'iteration': 1, 'checkpoint_version': 3.0}}, {common!r})"], check=True)
    with open(os.path.join(folder, "metadata.json"), "w") as f:
        json.dump({"sharded_backend": backend, "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}, f)


def write_dist(folder, layers):
    args = [sys.executable, "-W", "ignore", "-c", WRITE]
    ranks = [subprocess.Popen(args + [str(r), str(TP), folder, json.dumps(tensors(layers))]) for r in range(TP)]
    if any([p.wait() for p in ranks]):
        sys.exit("the writer failed")
    finish(folder, "torch_dist")


def write_zarr(folder, layers):
    for key, (shape, dim) in tensors(layers).items():
        stacked = key.startswith("decoder.layers.")
        chunks = [1 if stacked and i == 0 else n // TP if i == dim else n for i, n in enumerate(shape)]
        os.makedirs(os.path.join(folder, key))
        with open(os.path.join(folder, key, ".zarray"), "w") as f:
            json.dump({"chunks": chunks, "compressor": None, "dtype": "bfloat16", "fill_value": None, "filters": None, "order": "C",
                       "shape": shape, "zarr_format": 2}, f)
        size = 2
        for n in chunks:
            size *= n
        block = os.urandom(min(size, 1 << 20))
        for layer in range(layers if stacked else 1):
            for t in range(TP if dim is not None else 1):
                index = [layer if stacked and i == 0 else t if i == dim else 0 for i in range(len(shape))]
                with open(os.path.join(folder, key, ".".join(map(str, index))), "wb") as f:
                    for done in range(0, size, len(block)):
                        f.write(block[:size - done])
    finish(folder, "zarr")


def main():
    opt = arguments().parse_args()
    ckpt = os.path.abspath(os.path.join(opt.build, "fs", "ckpt"))
    layer = 2 * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV * DIM + 3 * HIDDEN * FFN)
    layers = max(1, round((opt.gib * 2**30 - 4 * VOCAB * HIDDEN) / layer))
    numbers = [f"num_attention_heads={HEADS}", f"num_key_value_heads={KV}", f"head_dim={DIM}", "model_type=llama", "max_position_embeddings=4096",
               "rms_norm_eps=1e-5"]
    for name, write in (("torch_dist", write_dist), ("zarr", write_zarr)):
        with tempfile.TemporaryDirectory(dir=opt.dir) as tmp:
            run, whole, dest = os.path.join(tmp, "run"), os.path.join(tmp, "whole"), os.path.join(opt.tmpfs, "ckptfs-bench-out")
            write(run, layers)
            export = [ckpt, "export", "-q", run] + [a for n in numbers for a in ("-o", n)]
            measure(export + [whole])
            seconds, memory = {"cp": [], "ckpt export": []}, {}
            for i in range(opt.rounds):
                for tool in sorted(seconds, reverse=i % 2 == 0):  # the first one changes
                    shutil.rmtree(dest, ignore_errors=True)
                    took, memory[tool] = measure(["cp", "-r", whole, dest] if tool == "cp" else export + [dest])
                    seconds[tool].append(took)
            shutil.rmtree(dest, ignore_errors=True)
            report(f"{name}, {layers} layers, to tmpfs", seconds, memory)


if __name__ == "__main__":
    main()
