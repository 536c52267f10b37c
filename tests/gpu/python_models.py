#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Loads from Python into GPU memory: what arrives, how fast, beside other loaders; and a CUDA graph that another thread captures meanwhile.

usage: tests/gpu/python_models.py [--cpu] [--layers N] [--ranks 1,2,4] [--dir SCRATCH] [--json FILE]

Each part runs in a process of its own, so that one that fails does not end the others; the status is 1 if one failed. --cpu runs the same parts
in host memory, where there is no GPU: that shows that this program works, and its times mean nothing.

rates      the same file by ckptfs.load_state_dict, ckptfs.open(device=...), safetensors' load_file, and fastsafetensors and
           runai-model-streamer if they are installed; GB/s, the best of three, the file in the page cache
model      a transformers model on the meta device, filled on the GPU: logits equal to those of its own from_pretrained
fsdp2      a model under fully_shard on several ranks that share the GPU: every shard equal to the part of the whole
graph      torch.cuda.graph captured by another thread during a load: both succeed, and a replay gives the right values
first      seconds from the start of a process to the first tensor, with its parts
memory     device memory beyond the destinations while a load runs"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time

BEGIN = time.monotonic()
HERE = os.path.dirname(os.path.abspath(__file__))
SOURCE = os.environ.get("CKPTFS_SOURCE", os.path.join(HERE, "..", ".."))
BUILD = os.environ.get("CKPTFS_BUILD", os.path.join(SOURCE, "build", "gpu"))
GOLDEN = os.path.join(SOURCE, "tests", "golden", "nanotron", "llama_tp2_pp2_tied")
os.environ.setdefault("CKPTFS_LIBRARY_PATH", BUILD)
sys.path[:0] = [os.path.join(SOURCE, "contrib", "python"), os.path.join(SOURCE, "tests", "bench"), os.path.join(SOURCE, "tests", "load")]
PARTS = ("rates", "model", "fsdp2", "graph", "first", "memory")


def device_of(a):
    return "cpu" if a.cpu else "cuda:0"


def sync(a):
    import torch
    if not a.cpu:
        torch.cuda.synchronize()


def checkpoint(a):
    """A model directory of some GB in the page cache, made once."""
    import bench_gpu
    folder = os.path.join(a.dir, f"model-{a.layers}")
    if not os.path.exists(os.path.join(folder, "config.json")):
        bench_gpu.generate(folder, bench_gpu.SMALL if a.cpu else bench_gpu.MODEL, a.layers)
    bench_gpu.warm(folder)
    return folder


def shapes(folder):
    import ckptfs
    with ckptfs.open(folder) as f:
        return {name: f.get_slice(name).get_shape() for name in f.keys()}


# ---- how fast ----

def loaders(a, folder):
    import ckptfs
    import torch
    path, device = os.path.join(folder, "model.safetensors"), device_of(a)

    def into_new_memory():
        state = {name: torch.empty(shape, dtype=torch.bfloat16, device=device) for name, shape in shapes(folder).items()}
        ckptfs.load_state_dict(state, folder, no_dist=True)
        return state

    def opened():
        with ckptfs.open(folder, device=device) as f:
            return {name: f.get_tensor(name) for name in f.keys()}

    def theirs():
        from safetensors.torch import load_file
        return load_file(path, device=device)

    def fast():
        import fastsafetensors as fs
        with fs.fastsafe_open(filenames=[path], nogds=True, device=device) as f:
            return {name: f.get_tensor(name).clone() for name in f.keys()}

    def streamer():
        from runai_model_streamer import SafetensorsStreamer
        with SafetensorsStreamer() as s:
            s.stream_file(path)
            return {name: t.to(device, copy=True) for name, t in s.get_tensors()}

    return {"ckptfs.load_state_dict": into_new_memory, "ckptfs.open": opened, "safetensors load_file": theirs, "fastsafetensors": fast,
            "runai-model-streamer": streamer}


def rates(a):
    import torch
    folder = checkpoint(a)
    size = os.path.getsize(os.path.join(folder, "model.safetensors"))
    want, best, out = None, {}, {"bytes": size}
    for turn in range(4):  # the first is not counted
        for name, load in loaders(a, folder).items():
            begin = time.monotonic()
            try:
                state = load()
            except ImportError as e:
                out[name] = f"not installed: {e}"
                continue
            sync(a)
            took = time.monotonic() - begin
            want = want or {k: v.cpu().view(torch.int16) for k, v in list(state.items())[:20]}  # as bits: some are no numbers
            assert all(want[k].equal(state[k].cpu().view(torch.int16)) for k in want), f"{name}: other values"
            del state
            if turn:
                best[name] = min(took, best.get(name, took))
    out |= {name: round(size / took / 1e9, 2) for name, took in best.items()}
    return out


# ---- what arrives ----

def empty_model(folder, device="meta"):
    import ckptfs
    import torch
    import transformers
    with ckptfs.open(folder) as f, torch.device(device):
        config = transformers.AutoConfig.for_model(**f.config)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def model(a):
    import ckptfs
    import ckptfs.transformers
    import torch
    got = ckptfs.transformers.from_pretrained(GOLDEN, device_map=device_of(a)).eval()
    want = ckptfs.transformers.from_pretrained(GOLDEN).to(device_of(a)).eval()
    tokens = torch.arange(3, 19, device=device_of(a))[None]
    with torch.no_grad():
        assert torch.equal(got(tokens).logits, want(tokens).logits), "other logits"
    filled = empty_model(GOLDEN, device_of(a))
    ckptfs.load_state_dict(filled, GOLDEN, no_dist=True)
    want = dict(want.named_parameters())
    assert all(torch.equal(t, want[name].to(t.dtype)) for name, t in filled.named_parameters()), "other parameters"
    return {"parameters": len(want)}


def fsdp2(a):
    from ranks import PYTHON, ended, started
    out = {}
    for n in (int(w) for w in a.ranks.split(",")):
        args = [*PYTHON, os.path.abspath(__file__), "--part", "rank", *(["--cpu"] if a.cpu else [])]
        said = ended(started(n, args, env=dict(LOCAL_RANK="0", OMP_NUM_THREADS="1", NCCL_MULTI_RANK_GPU_ENABLE="1"), stderr=subprocess.STDOUT), 240)
        assert not any(status for status, *_ in said), f"{n} ranks: " + "\n".join(text[-1500:] for _, text, _ in said)
        out[f"{n} ranks"] = json.loads(said[0][1].splitlines()[-1])
    return out


def rank(a):
    """One of the ranks of fsdp2. torch's own collectives use gloo: the GPU is shared."""
    import ckptfs
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu" if a.cpu else "cuda", (dist.get_world_size(),))
    made = empty_model(GOLDEN)
    for layer in made.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(made, mesh=mesh)
    result = ckptfs.load_state_dict(made, GOLDEN, readers="once")
    with ckptfs.open(GOLDEN) as f:
        for name, t in made.named_parameters():
            local, whole = t.to_local(), f.get_tensor(name)
            part = whole.chunk(dist.get_world_size())  # as FSDP2 cuts dimension 0
            mine = part[dist.get_rank()] if dist.get_rank() < len(part) else whole[:0]
            assert torch.equal(local.cpu(), mine.to(local.dtype)), f"{name}: another shard"
    dist.barrier()
    print(json.dumps({k: v for k, v in result.stats.items() if k in ("read_bytes", "unique_bytes", "sent_bytes")}), flush=True)
    dist.destroy_process_group()
    os._exit(0)  # as long as gloo's threads are there, taking the interpreter down may abort (pytorch/pytorch issue 190489)


# ---- beside a load ----

def graph(a):
    import ckptfs
    import torch
    if a.cpu:
        return {"not run": "graphs are captured on a GPU only"}
    folder, done, failed, captured = checkpoint(a), threading.Event(), [], 0
    state = {name: torch.empty(shape, dtype=torch.bfloat16, device="cuda") for name, shape in shapes(folder).items()}

    def load():
        try:
            ckptfs.load_state_dict(state, folder, no_dist=True)
        except Exception as e:
            failed.append(e)
        done.set()

    x = torch.ones(1 << 20, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        y = x * 2 + 1  # what a capture must not do for the first time
    thread = threading.Thread(target=load)
    thread.start()
    while True:
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            y = x * 2 + 1
        captured += 1
        x.fill_(captured)
        g.replay()
        torch.cuda.synchronize()
        assert torch.all(y == captured * 2 + 1), "a replay gave other values"
        if done.is_set():
            break
    thread.join()
    assert not failed, failed
    with ckptfs.open(folder) as f:
        name = f.keys()[0]
        assert torch.equal(state[name].cpu().view(torch.int16), f.get_tensor(name).view(torch.int16)), f"{name}: other values"
    return {"captured": captured}


def first(a):
    at = {"interpreter": BEGIN}
    import torch
    at["import torch"] = time.monotonic()
    if not a.cpu:
        torch.zeros(1, device="cuda")
    at["CUDA context"] = time.monotonic()
    import ckptfs
    state = {"model.norm.weight": torch.empty(32, dtype=torch.bfloat16, device=device_of(a))}
    ckptfs.load_state_dict(state, GOLDEN, strict=False, no_dist=True)
    sync(a)
    at["the first load"] = time.monotonic()
    ckptfs.load_state_dict(state, GOLDEN, strict=False, no_dist=True)
    sync(a)
    at["the second load"] = time.monotonic()
    names = list(at)
    return {name: round(at[name] - at[before], 3) for before, name in zip(names, names[1:])}


def memory(a):
    import ckptfs
    import torch
    if a.cpu:
        return {"not run": "there is no device memory here"}
    folder = checkpoint(a)
    state = {name: torch.empty(shape, dtype=torch.bfloat16, device="cuda") for name, shape in shapes(folder).items()}
    torch.cuda.synchronize()
    before, least, done = torch.cuda.mem_get_info()[0], [1 << 62], threading.Event()

    def watch():
        while not done.wait(0.002):
            least[0] = min(least[0], torch.cuda.mem_get_info()[0])

    thread = threading.Thread(target=watch)
    thread.start()
    ckptfs.load_state_dict(state, folder, no_dist=True, load_options={"device_bytes": 256 << 20})
    after = torch.cuda.mem_get_info()[0]
    done.set()
    thread.join()
    return {"MiB at most during a load": (before - least[0]) >> 20, "MiB after it": (before - after) >> 20, "device_bytes, MiB": 256}


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--cpu", action="store_true")
    p.add_argument("--layers", type=int, default=0)
    p.add_argument("--ranks", default="1,2,4")
    p.add_argument("--dir", default=os.environ.get("GPU_SCRATCH", "/dev/shm"))
    p.add_argument("--json")
    p.add_argument("--part", choices=(*PARTS, "rank"))
    a = p.parse_args()
    a.layers = a.layers or (2 if a.cpu else 40)
    if a.part:
        result = globals()[a.part](a)
        if result is not None:
            print(json.dumps(result))
        return
    results, failed = {}, 0
    with tempfile.TemporaryDirectory(dir=a.dir) as folder:
        for part in PARTS:
            args = [sys.executable, os.path.abspath(__file__), "--part", part, "--layers", str(a.layers), "--ranks", a.ranks, "--dir", folder]
            done = subprocess.run([*args, *(["--cpu"] if a.cpu else [])], capture_output=True, text=True)
            failed += done.returncode != 0
            results[part] = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"failed": (done.stdout + done.stderr)[-3000:]}
            print(part, json.dumps(results[part], indent=1), flush=True)
    if a.json:
        with open(a.json, "w") as f:
            json.dump(results, f, indent=1)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
