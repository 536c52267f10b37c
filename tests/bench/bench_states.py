#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Exports of whole training states (weights, F32 masters, Adam's two moments) into the views from which frameworks resume, each beside
`cp -r` of what it has written: wall time, processor time, and peak memory.

usage: tests/bench/bench_states.py [--deepspeed FOLDER] [--build build/release] [--dir SCRATCH] [--tmpfs /dev/shm] [--gib 1] [--rounds 5]
                                   [--many LAYERS] [--disk] [SOURCE...]
sources: dcp (FSDP2 of four ranks), megatron (torch_dist of four tensor-parallel ranks), deepspeed (ZeRO 3 of eight ranks; --deepspeed names
a folder that has the package), many (a DCP of --many small layers: view=deepspeed_universal has 36 files for each). Run it with a Python that
has torch. For comparison there are the weights alone, as a Hugging Face model. With --disk the files are on disk, too, and synced.
"""

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import bench_deepspeed as zero
from bench_dcp import arguments, measure

RANKS = 4
HYPER = ["lr=0.001", "betas=0.9+0.95", "eps=1e-8", "weight_decay=0.1", "optimizer_step=10"]
VIEWS = {"dcp": HYPER, "torchtitan": [*HYPER, "initial_lr=0.001"], "megatron": [*HYPER, "initial_lr=0.001", "min_lr=0.0001"], "deepspeed_universal": HYPER}
WRITE = """
import json, sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method="file://" + folder + ".store", world_size=world, rank=rank)
mesh = init_device_mesh("cpu", (world,))
torch.manual_seed(rank)
def cut(shape, dim, dtype):
    local = [n // world if i == dim else n for i, n in enumerate(shape)]
    place = Replicate() if dim is None else Shard(dim)
    return DTensor.from_local(torch.randn(local).to(getattr(torch, dtype)), mesh, [place], run_check=False)
with open(sys.argv[4]) as f:
    dcp.save({name: cut(*spec) for name, spec in json.load(f).items()}, checkpoint_id=folder)
"""


def save(folder, tensors):
    """A DCP of {key: (shape, the dimension that is cut, dtype)}."""
    listed = folder + ".json"
    with open(listed, "w") as f:
        json.dump(tensors, f)
    args = [sys.executable, "-W", "ignore", "-c", WRITE]
    ranks = [subprocess.Popen([*args, str(r), str(RANKS), folder, listed]) for r in range(RANKS)]
    if any([p.wait() for p in ranks]):
        sys.exit("the writer failed")


def write_dcp(folder, shapes):
    keys = {"model." + k: s for k, s in shapes.items()} | {f"optim.state.{k}.{m}": s for k, s in shapes.items() for m in ("exp_avg", "exp_avg_sq")}
    save(folder, {k: (s, 0, "float32") for k, s in keys.items()})


def write_base(base, layers):
    zero.write_base(base, layers)
    path = os.path.join(base, "config.json")
    with open(path) as f:
        config = json.load(f)
    with open(path, "w") as f:
        json.dump(config | dict(max_position_embeddings=4096, rms_norm_eps=1e-5, hidden_act="silu"), f)


def megatron_tensors(layers):
    h, f, v = zero.HIDDEN, zero.FFN, zero.VOCAB
    at = "decoder.layers."
    return {"embedding.word_embeddings.weight": ([v, h], 0), "output_layer.weight": ([v, h], 0), "decoder.final_layernorm.weight": ([h], None),
            at + "self_attention.linear_qkv.layer_norm_weight": ([layers, h], None), at + "self_attention.linear_qkv.weight": ([layers, 3 * h, h], 1),
            at + "self_attention.linear_proj.weight": ([layers, h, h], 2), at + "mlp.linear_fc1.layer_norm_weight": ([layers, h], None),
            at + "mlp.linear_fc1.weight": ([layers, 2 * f, h], 1), at + "mlp.linear_fc2.weight": ([layers, h, f], 2)}


def write_megatron(folder, layers):
    weights = megatron_tensors(layers)
    states = {f"optimizer.state.{kind}.{k}": (*spec, "float32") for k, spec in weights.items() for kind in ("fp32_param", "exp_avg", "exp_avg_sq")}
    save(folder, {k: (*spec, "bfloat16") for k, spec in weights.items()} | states)
    common = os.path.join(folder, "common.pt")
    subprocess.run([sys.executable, "-c", f"import torch; torch.save({{'iteration': 10, 'checkpoint_version': 3.0}}, {common!r})"], check=True)
    with open(os.path.join(folder, "metadata.json"), "w") as f:
        json.dump({"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}, f)


def measured(args):
    """Wall time, processor time, MiB."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    took, memory = measure(args)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return took, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, memory


def compare(title, cases, where, rounds, sync):
    """Of each case {name: command without DEST}: its export beside cp -r of what it has written, one after the other."""
    dest, whole = os.path.join(where, "ckptfs-bench-out"), os.path.join(where, "ckptfs-bench-whole")
    then = '; sync -f "$0"' if sync else ""
    print(f"\n{title}, {'on disk, with sync' if sync else 'to tmpfs'}")
    for name, export in cases.items():
        shutil.rmtree(whole, ignore_errors=True)
        measure([*export, whole])
        files, size = sum(len(n) for _, _, n in os.walk(whole)), zero.size_of(whole)
        commands = {"ckpt export": [*export, dest], "cp -r": ["cp", "-r", whole, dest]}
        got = {tool: [] for tool in commands}
        for i in range(rounds):
            for tool in sorted(commands, reverse=i % 2 == 0):  # the first one changes
                shutil.rmtree(dest, ignore_errors=True)
                if sync:
                    os.sync()
                got[tool].append(measured(["sh", "-c", '"$@"' + then, where, *commands[tool]]))
        shutil.rmtree(dest, ignore_errors=True)
        wall, cpu = ({t: [r[k] for r in rows] for t, rows in got.items()} for k in (0, 1))
        median, best = (f(wall["ckpt export"]) / f(wall["cp -r"]) for f in (statistics.median, min))
        memory = max(r[2] for r in got["ckpt export"])
        print(f"  {name:36} {size / 2**30:5.2f} GiB {files:6} files   export {min(wall['ckpt export']):6.2f} s   cp -r {min(wall['cp -r']):6.2f} s   ratio of bests {best:5.2f}"
              f" of medians {median:5.2f}   processor {min(cpu['ckpt export']):5.2f} / {min(cpu['cp -r']):5.2f} s   {memory:4.0f} MiB", flush=True)
    shutil.rmtree(whole, ignore_errors=True)


def main():
    p = arguments()
    p.set_defaults(gib=1, rounds=5)
    p.add_argument("--deepspeed")
    p.add_argument("--disk", action="store_true")
    p.add_argument("--many", type=int, default=1048)
    p.add_argument("sources", nargs="*")
    opt = p.parse_args()
    ckpt = os.path.abspath(os.path.join(opt.build, "fs", "ckpt"))
    layers = max(1, round((opt.gib * 2**30 / 12 - 2 * zero.VOCAB * zero.HIDDEN) / (4 * zero.HIDDEN**2 + 3 * zero.HIDDEN * zero.FFN)))
    if opt.deepspeed:
        os.environ |= {"PYTHONPATH": os.path.abspath(opt.deepspeed), "DS_ACCELERATOR": "cpu"}
    with tempfile.TemporaryDirectory(dir=opt.dir) as tmp:
        for source in opt.sources or ["dcp", "megatron", *(["deepspeed"] if opt.deepspeed else []), "many"]:
            run, base, views = os.path.join(tmp, source), os.path.join(tmp, source + "-base"), list(VIEWS)
            if source == "many":
                zero.HIDDEN, zero.FFN, zero.VOCAB, zero.HEADS = 32, 32, 64, 4
                layers, views = opt.many, views[-1:]
            begin = time.monotonic()
            if source == "megatron":
                write_megatron(run, layers)
            elif source == "deepspeed":
                zero.write(tmp, run, layers)
                run = os.path.join(run, "global_step0")
            else:
                write_dcp(run, zero.shapes(layers))
            write_base(base, layers)
            print(f"{source}: {zero.size_of(run) / 2**30:.2f} GiB, written in {time.monotonic() - begin:.0f} s", flush=True)
            plain = [ckpt, "export", "-q", run, "-o", f"base={base}"]
            cases = {} if source == "many" else {"view=hf,dtype=float32 (weights)": [*plain, "-o", "dtype=float32"]}
            cases |= {f"view={v},optimizer": [*plain, "-o", f"view={v},optimizer", *(a for h in VIEWS[v] for a in ("-o", h))] for v in views}
            compare(source, cases, opt.tmpfs, opt.rounds, False)
            if opt.disk:
                compare(source, cases, tmp, opt.rounds, True)


if __name__ == "__main__":
    main()
