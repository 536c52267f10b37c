#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Loading tensor-parallel slices of one model into N ranks: ckptfs beside its peers, in one run, rounds interleaved.

usage: tests/bench/bench_load.py [--build build/release] [--dir SCRATCH] [--layers 8] [--ranks 2,4] [--rounds 3] [METHOD...]

Needs an interpreter with torch and safetensors. Times are from a barrier after all imports to the last rank's end, on CPU with gloo; the
files are in the page cache. `read` is what went through read(2) and its kin, of the model's size (mmap does not count there).
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

HIDDEN, FFN, HEADS, KV, VOCAB = 2048, 5632, 32, 4, 32000
COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
ROW = ("o_proj", "down_proj")
METHODS = ["ckptfs", "ckptfs once", "get_slice", "get_slice pread", "dcp hf", "broadcast"]


def shapes(layers):
    kv = KV * HIDDEN // HEADS
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    for i in range(layers):
        at = f"model.layers.{i}."
        for name, shape in (("input_layernorm", (HIDDEN,)), ("post_attention_layernorm", (HIDDEN,)), ("self_attn.q_proj", (HIDDEN, HIDDEN)),
                            ("self_attn.k_proj", (kv, HIDDEN)), ("self_attn.v_proj", (kv, HIDDEN)), ("self_attn.o_proj", (HIDDEN, HIDDEN)),
                            ("mlp.gate_proj", (FFN, HIDDEN)), ("mlp.up_proj", (FFN, HIDDEN)), ("mlp.down_proj", (HIDDEN, FFN))):
            yield f"{at}{name}.weight", shape
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCAB, HIDDEN)


def generate(folder, layers):
    import torch
    from safetensors.torch import save_file
    os.makedirs(folder, exist_ok=True)
    tensors = {n: torch.randint(-30000, 30000, s, dtype=torch.int16).view(torch.bfloat16) for n, s in shapes(layers)}
    names = list(tensors)
    index = {}
    for i, part in enumerate((names[:len(names) // 2], names[len(names) // 2:])):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        save_file({n: tensors[n] for n in part}, os.path.join(folder, file), metadata={"format": "pt"})
        index.update({n: file for n in part})
    size = sum(t.numel() * 2 for t in tensors.values())
    with open(os.path.join(folder, "model.safetensors.index.json"), "w") as f:
        json.dump({"metadata": {"total_size": size}, "weight_map": index}, f)
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": FFN,
                   "num_attention_heads": HEADS, "num_key_value_heads": KV, "num_hidden_layers": layers, "vocab_size": VOCAB,
                   "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}, f)


def split_dim(name):
    return 0 if any(c in name for c in COLUMN) else 1 if any(r in name for r in ROW) else None


# ---- one rank ----

def empty_state(layers, mesh):
    import torch
    from torch.distributed.tensor import DTensor, Replicate, Shard
    state = {}
    for name, shape in shapes(layers):
        d = split_dim(name)
        local = list(shape)
        if d is not None:
            local[d] //= mesh.size()
        stride = tuple([shape[1], 1] if len(shape) == 2 else [1])
        state[name] = DTensor.from_local(torch.empty(local, dtype=torch.bfloat16), mesh, [Replicate() if d is None else Shard(d)], run_check=False,
                                         shape=torch.Size(shape), stride=stride)
    return state


def load_ckptfs(folder, state, readers):
    import ckptfs
    ckptfs.load_state_dict(state, folder, readers=readers)
    return state


def load_slices(folder, layers, mesh, **backend):
    import torch
    from safetensors import safe_open
    with open(os.path.join(folder, "model.safetensors.index.json")) as f:
        index = json.load(f)["weight_map"]
    rank, n, state = mesh.get_rank(), mesh.size(), {}
    files = {f: safe_open(os.path.join(folder, f), "pt", **backend) for f in set(index.values())}
    for name, file in index.items():
        s, d = files[file].get_slice(name), split_dim(name)
        if d is None:
            state[name] = s[:].clone()
            continue
        part = s.get_shape()[d] // n
        piece = slice(rank * part, (rank + 1) * part)
        state[name] = (s[piece] if d == 0 else s[:, piece]).clone(memory_format=torch.contiguous_format)
    return state


def load_dcp(folder, state):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    dcp.load(state, storage_reader=HuggingFaceStorageReader(folder))
    return state


def load_broadcast(folder, layers, mesh):
    import torch
    import torch.distributed as dist
    from safetensors import safe_open
    with open(os.path.join(folder, "model.safetensors.index.json")) as f:
        index = json.load(f)["weight_map"]
    files = {f: safe_open(os.path.join(folder, f), "pt") for f in set(index.values())} if dist.get_rank() == 0 else None
    state = {}
    for name, shape in shapes(layers):
        full = files[index[name]].get_tensor(name).clone() if files else torch.empty(shape, dtype=torch.bfloat16)
        dist.broadcast(full, 0)
        d = split_dim(name)
        state[name] = full if d is None else full.chunk(mesh.size(), d)[mesh.get_rank()].contiguous()
    return state


def worker(folder, layers, method):
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    import ckptfs  # noqa: F401
    import safetensors  # noqa: F401
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if method == "dcp hf":
        import torch.distributed.checkpoint  # noqa: F401
    state = empty_state(layers, mesh) if method == "dcp hf" or method.startswith("ckptfs") else None
    before = int(open("/proc/self/io").read().split()[1])
    dist.barrier()
    usage, begin = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    if method.startswith("ckptfs"):
        state = load_ckptfs(folder, state, "once" if "once" in method else "auto")
    elif method.startswith("get_slice"):
        state = load_slices(folder, layers, mesh, **({"backend": "pread"} if "pread" in method else {}))
    elif method == "dcp hf":
        state = load_dcp(folder, state)
    else:
        state = load_broadcast(folder, layers, mesh)
    end, after = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
    read = int(open("/proc/self/io").read().split()[1]) - before
    digest = sum(int((t.to_local() if hasattr(t, "to_local") else t).view(torch.int16).to(torch.int64).sum()) for t in state.values())
    cpu = after.ru_utime + after.ru_stime - usage.ru_utime - usage.ru_stime
    got = [None] * dist.get_world_size()
    dist.all_gather_object(got, (end, cpu, read, after.ru_maxrss, digest, begin))
    if dist.get_rank() == 0:
        print("RESULT", json.dumps({"wall": max(g[0] for g in got) - min(g[5] for g in got), "cpu": sum(g[1] for g in got),
                                    "read": sum(g[2] for g in got), "rss": max(g[3] for g in got), "digest": sum(g[4] for g in got)}))
    dist.destroy_process_group()


# ---- all of them ----

def run(folder, layers, method, n, port):
    env = dict(os.environ, WORLD_SIZE=str(n), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    args = [sys.executable, os.path.abspath(__file__), "--worker", folder, "--layers", str(layers), method]
    ranks = [subprocess.Popen(args, env=dict(env, RANK=str(r), LOCAL_RANK=str(r)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
             for r in range(n)]
    out = [p.communicate() for p in ranks]
    line = next((x for x in out[0][0].splitlines() if x.startswith("RESULT")), None)
    if line is None:
        return None, out[0][1].strip().splitlines()[-1:] or "no result"
    return json.loads(line[7:]), None


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--build", default="build/release")
    p.add_argument("--dir")
    p.add_argument("--layers", type=int, default=8)
    p.add_argument("--ranks", default="2,4")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--worker", metavar="FOLDER", help=argparse.SUPPRESS)
    p.add_argument("methods", nargs="*")
    a = p.parse_args()
    os.environ.setdefault("CKPTFS_LIBRARY_PATH", os.path.abspath(a.build))
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "contrib", "python"))
    if a.worker:
        return worker(a.worker, a.layers, a.methods[0])
    with tempfile.TemporaryDirectory(dir=a.dir) as folder:
        generate(folder, a.layers)
        size = sum(os.path.getsize(os.path.join(folder, f)) for f in os.listdir(folder))
        methods = a.methods or METHODS
        port = 20000 + os.getpid() % 20000
        for n in [int(x) for x in a.ranks.split(",")]:
            results, why = {m: [] for m in methods}, {}
            for _ in range(a.rounds):
                for m in methods:
                    port += 1
                    got, error = run(folder, a.layers, m, n, port)
                    if got:
                        results[m].append(got)
                    else:
                        why[m] = error
            print(f"{n} ranks, {size / 1e9:.3f} GB, {a.rounds} rounds (load average {os.getloadavg()[0]:.1f})")
            base = min((r["wall"] for r in results.get("get_slice", [])), default=None)
            digests = {r["digest"] for rs in results.values() for r in rs}
            print(f"  {'':16} {'wall med':>9} {'min':>7} {'x get_slice':>11} {'cpu s':>7} {'read':>6} {'RSS MB':>7}")
            for m, rs in results.items():
                if not rs:
                    print(f"  {m:16} {why[m]}")
                    continue
                wall = [r["wall"] for r in rs]
                ratio = f"{min(wall) / base:.2f}" if base else "-"
                print(f"  {m:16} {statistics.median(wall):9.3f} {min(wall):7.3f} {ratio:>11} {min(r['cpu'] for r in rs):7.3f} "
                      f"{min(r['read'] for r in rs) / size:6.2f} {max(r['rss'] for r in rs) / 1024:7.0f}")
            if len(digests) > 1:
                sys.exit("the methods loaded different bytes")


if __name__ == "__main__":
    main()
