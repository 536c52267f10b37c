# SPDX-License-Identifier: Apache-2.0
"""Saves by torch's HuggingFaceStorageWriter from several processes (gloo): random sharded tensors, and models under FSDP2.

usage: dcp_hf_writer.py WORLD RANK JOBS, where JOBS is a JSON file: a list of {"kind", "dir", "seed", ...}; rank r of all jobs runs in
one process.
"""

import json
import os
import random
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8,
          torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]


def tensor(name, dtype, shape, seed):
    """Random bytes: every value, NaNs included."""
    g = torch.Generator().manual_seed(hash_of(name) ^ seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=g).bool()
    size = torch.empty((), dtype=dtype).element_size()
    return torch.randint(0, 256, (*shape, size), generator=g, dtype=torch.uint8).view(dtype).reshape(shape)


def hash_of(text):
    h = 5381
    for c in text.encode():
        h = (h * 33 + c) % 2**31
    return h


def plan(seed, world):
    """The same on every rank: mesh shape, and per tensor its dtype, shape and placements; the number of files and each one's."""
    r = random.Random(seed)
    meshes = [(world,)] + [(a, world // a) for a in range(2, world) if world % a == 0]
    mesh = r.choice(meshes)
    tensors = {}
    for i in range(r.randint(3, 30)):
        rank = r.choice([0, 1, 1, 2, 2, 2, 3, 5])
        shape = [r.choice([0, 1, 2, 3, 5, 7, 8, 13, 16]) for _ in range(rank)]
        placements = [r.choice(["R"] + [d for d in range(rank)] * 2) for _ in mesh]
        name = r.choice(["model.layers.%d.w", "a%d", "b.%d.\u00e9\"\\", "%d"]) % i
        tensors[name] = (r.choice(DTYPES), shape, placements)
    nfile = r.choice([1, 1, 2, 3])
    files = {name: 1 + i % nfile for i, name in enumerate(tensors)} if nfile > 1 else None
    return mesh, tensors, files


def full_tensors(seed, world):
    return {name: tensor(name, dtype, shape, seed) for name, (dtype, shape, _) in plan(seed, world)[1].items()}


def sharded(full, mesh, placements):
    shape, offset = compute_local_shape_and_global_offset(full.shape, mesh, placements)
    local = full
    for d, (n, lo) in enumerate(zip(shape, offset)):
        local = local.narrow(d, min(lo, full.shape[d]), n)
    return DTensor.from_local(local.contiguous(), mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


def save(state, folder, files=None, **more):
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(folder, fqn_to_index_mapping=files, save_distributed=True, **more))


def save_random(job, world):
    shape, tensors, files = plan(job["seed"], world)
    mesh = init_device_mesh("cpu", shape)
    state = {}
    for name, (dtype, dims, placements) in tensors.items():
        full = tensor(name, dtype, dims, job["seed"])
        state[name] = sharded(full, mesh, [Replicate() if p == "R" else Shard(p) for p in placements]) if dims else full
    save(state, job["dir"], files)


def save_model(job, world):
    import transformers as tf
    from torch.distributed.fsdp import fully_shard

    model = tf.AutoModelForCausalLM.from_pretrained(job["model"], dtype="auto")
    for layer in model.model.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    state = model.state_dict()
    if model.config.tie_word_embeddings:  # the safetensors library refuses two names of one memory
        del state["lm_head.weight"]
    save(state, job["dir"])


def main():
    world, rank, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}.store", world_size=world, rank=rank)
    with open(path) as f:
        jobs = json.load(f)
    for job in jobs:
        {"random": save_random, "model": save_model}[job["kind"]](job, world)
        dist.barrier()
    dist.destroy_process_group()


def run(world, jobs):
    """Do the jobs in `world` processes of this file."""
    import subprocess

    with tempfile.TemporaryDirectory() as tmp:
        path = os.path.join(tmp, "jobs")
        with open(path, "w") as f:
            json.dump(jobs, f)
        ranks = [subprocess.Popen([sys.executable, os.path.abspath(__file__), str(world), str(r), path], stdout=subprocess.DEVNULL,
                                  stderr=subprocess.PIPE, text=True) for r in range(world)]
        errors = [p.communicate(timeout=300)[1] for p in ranks]
        for p, e in zip(ranks, errors):
            if p.returncode:
                raise AssertionError(f"a writer failed: {e[-2000:]}")


if __name__ == "__main__":
    main()
