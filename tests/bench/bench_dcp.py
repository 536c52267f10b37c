#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Exports of DCP checkpoints, side by side in one run: ckpt export against cp of the consolidated model and against the tools that people
use today (torch's consolidate_safetensors_files and dcp_to_torch_save, accelerate's merge_fsdp_weights): wall time and peak memory.

usage: tests/bench/bench_dcp.py [--build build/release] [--dir SCRATCH] [--tmpfs /dev/shm] [--gib 2] [--rounds 3] [--no-peers]
Run it with a Python that has torch, transformers and accelerate. The goals: >= 0.9 of cp to tmpfs, of cp && sync to disk; memory flat.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

HIDDEN, FFN, VOCAB, HEADS, KV = 2048, 5632, 32000, 32, 4
WRITE = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
rank, world, dim, layers, folder = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
dist.init_process_group("gloo", init_method="file://" + folder + ".store", world_size=world, rank=rank)
mesh = init_device_mesh("cpu", (world,))
torch.manual_seed(rank)
def cut(*shape):
    d = dim if len(shape) > 1 else 0
    local = [n // world if i == d else n for i, n in enumerate(shape)]
    return DTensor.from_local(torch.randn(local).bfloat16(), mesh, [Shard(d)], run_check=False)
h, f, v, kv = %d, %d, %d, %d
state = {"model.embed_tokens.weight": cut(v, h), "model.norm.weight": cut(h), "lm_head.weight": cut(v, h)}
for l in range(layers):
    at = f"model.layers.{l}."
    for name, shape in (("self_attn.q_proj", (h, h)), ("self_attn.k_proj", (kv, h)), ("self_attn.v_proj", (kv, h)), ("self_attn.o_proj", (h, h)),
                        ("mlp.gate_proj", (f, h)), ("mlp.up_proj", (f, h)), ("mlp.down_proj", (h, f)), ("input_layernorm", (h,)),
                        ("post_attention_layernorm", (h,))):
        state[at + name + ".weight"] = cut(*shape)
dcp.save({"model": state}, checkpoint_id=folder + "/pytorch_model_fsdp_0")
dcp.save(state, storage_writer=HuggingFaceStorageWriter(folder + ".hf/sharded", save_distributed=True))
""" % (HIDDEN, FFN, VOCAB, HIDDEN * KV // HEADS)


def write_run(folder, world, dim, layers):
    ranks = [subprocess.Popen([sys.executable, "-W", "ignore", "-c", WRITE, str(r), str(world), str(dim), str(layers), folder]) for r in range(world)]
    if any([p.wait() for p in ranks]):
        sys.exit("the writer failed")


def arguments():
    p = argparse.ArgumentParser()
    p.add_argument("--build", default="build/release")
    p.add_argument("--dir", default=None)
    p.add_argument("--tmpfs", default="/dev/shm")
    p.add_argument("--gib", type=float, default=2)
    p.add_argument("--rounds", type=int, default=3)
    return p


def report(name, seconds, memory):
    """A line for each tool, beside cp: {tool: [seconds]}, {tool: MiB}."""
    cp = seconds["cp"]
    print(f"\n{name}")
    for tool, took in seconds.items():
        print(f"  {tool:32} {statistics.median(took):6.2f} s   best {min(took):6.2f}   speed/cp {statistics.median(cp) / statistics.median(took):5.2f}"
              f" (best {min(cp) / min(took):5.2f})   {memory[tool]:7.0f} MiB", flush=True)


def measure(args):
    """Seconds, and the peak resident memory in MiB (which a child inherits: keep this process small)."""
    begin = time.monotonic()
    p = subprocess.Popen(args, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    error = p.stderr.read()
    _, status, usage = os.wait4(p.pid, 0)
    took = time.monotonic() - begin
    if status:
        sys.exit(f"{args}: {error.decode()[-2000:]}")
    return took, usage.ru_maxrss / 1024


def tools(ckpt, folder, base, whole, dest, sync, peers):
    """name: command that leaves a model in dest."""
    then = "; sync -f $1" if sync else ""
    sh = lambda command, *a: ["sh", "-c", command + then, "sh", *a]
    py = lambda code: [sys.executable, "-W", "ignore", "-c", code]
    yield "cp", sh('cp -r "$2" "$1"', dest, whole)
    yield "ckpt export (.distcp)", sh('"$3" export -q "$2" "$1" -o base="$4"', dest, folder, ckpt, base)
    yield "ckpt export (HF shards)", sh('"$3" export -q "$2" "$1" -o base="$4"', dest, folder + ".hf", ckpt, base)
    if not peers:
        return
    yield "torch consolidate (HF shards)", py(
        "from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files as c\n"
        "from safetensors import safe_open; import os\n"
        f"os.makedirs({dest!r}); src = {folder + '.hf/sharded'!r}; one = os.path.join(src, sorted(os.listdir(src))[0])\n"
        f"c(src, {dest!r}, {{n: 1 for n in safe_open(one, 'pt').keys()}}, num_threads=2)")
    yield "accelerate merge (.distcp)", py(
        f"from accelerate.utils import merge_fsdp_weights as m\nm({folder + '/pytorch_model_fsdp_0'!r}, {dest!r})")
    yield "dcp_to_torch_save (.distcp)", py(
        "from torch.distributed.checkpoint.format_utils import dcp_to_torch_save as d\n"
        f"import os; os.makedirs({dest!r}); d({folder + '/pytorch_model_fsdp_0'!r}, {dest + '/model.pt'!r})")


def compare(name, opt, ckpt, folder, base, whole, where, sync):
    dest = os.path.join(where, "ckptfs-bench-out")
    seconds, memory = {}, {}
    for _ in range(opt.rounds):
        for tool, args in tools(ckpt, folder, base, whole, dest, sync, opt.peers):
            shutil.rmtree(dest, ignore_errors=True)
            os.sync()
            took, rss = measure(args)
            seconds.setdefault(tool, []).append(took)
            memory[tool] = max(memory.get(tool, 0), rss)
    shutil.rmtree(dest, ignore_errors=True)
    report(f"{name}, {'to disk, with sync' if sync else 'to tmpfs'}", seconds, memory)


def main():
    p = arguments()
    p.add_argument("--no-peers", dest="peers", action="store_false")
    opt = p.parse_args()
    ckpt = os.path.abspath(os.path.join(opt.build, "fs", "ckpt"))
    layer = 2 * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN * KV // HEADS + 3 * HIDDEN * FFN)
    layers = max(1, round((opt.gib * 2**30 - 4 * VOCAB * HIDDEN) / layer))
    with tempfile.TemporaryDirectory(dir=opt.dir) as tmp:
        base = os.path.join(tmp, "base")
        os.mkdir(base)
        with open(os.path.join(base, "config.json"), "w") as f:
            json.dump(dict(model_type="llama", architectures=["LlamaForCausalLM"], hidden_size=HIDDEN, intermediate_size=FFN, vocab_size=VOCAB,
                           num_attention_heads=HEADS, num_key_value_heads=KV, num_hidden_layers=layers, dtype="bfloat16"), f)
        for world, dim in ((4, 0), (8, 1)):
            folder, whole = os.path.join(tmp, "run"), os.path.join(tmp, "whole")
            write_run(folder, world, dim, layers)
            measure([ckpt, "export", "-q", folder, whole, "-o", f"base={base}"])
            name = f"{world} shards by {'rows' if dim == 0 else 'columns'}, {layers} layers"
            compare(name, opt, ckpt, folder, base, whole, opt.tmpfs, False)
            compare(name, opt, ckpt, folder, base, whole, tmp, True)
            for path in (folder, folder + ".hf", whole):
                shutil.rmtree(path)
            if os.path.exists(folder + ".store"):
                os.remove(folder + ".store")


if __name__ == "__main__":
    main()
