#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Loading tensor-parallel slices of one model into N ranks: ckptfs beside its peers, in one run, rounds interleaved.

usage: tests/bench/bench_load.py [--build build/release] [--dir SCRATCH] [--layers 8] [--ranks 2,4] [--rounds 5] [--cold] [--json FILE] [METHOD...]
       tests/bench/bench_load.py --threads 1,2,4 [--readers once] [--cold] ...     how many threads read

Needs an interpreter with torch and safetensors; accelerate, fastsafetensors and runai-model-streamer are compared if they can be
imported (--peers names a folder of packages installed with `pip install --no-deps --target`). Ranks are forked from one process that has
imported everything; every method fills memory that nobody has touched before, on CPU, with gloo. Times are from a barrier to the last
rank's end; the order of the methods rotates from round to round. The files are in the page cache (--cold: in none, which is checked).
`read` is what went through read(2) and its kin, of the model's size (mmap does not count there).

The floors: `floor read`, every byte read once by somebody into a buffer that is used again; `floor slices`, every rank preads its
slices into fresh memory, as rows where they are columns; `floor touch`, fresh memory of that size is written once.
"""

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import resource
import select
import shutil
import signal
import statistics
import sys
import tempfile
import time
from types import SimpleNamespace

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "load"))
import figures  # noqa: E402
from llama import Llama  # noqa: E402
from ranks import free_port  # noqa: E402

MODEL = Llama(2048, 5632, 32, 4, 32000)
COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
ROW = ("o_proj", "down_proj")
DCP_RANKS = 4  # that saved the DCP checkpoint, by rows


def generate(folder, layers):
    import torch
    from safetensors.torch import save_file
    os.makedirs(folder, exist_ok=True)
    tensors = {n: torch.randint(-30000, 30000, s, dtype=torch.int16).view(torch.bfloat16) for n, s in MODEL.shapes(layers)}
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
        json.dump(MODEL.config(layers), f)


def split_dim(name):
    return 0 if any(c in name for c in COLUMN) else 1 if any(r in name for r in ROW) else None


def index_of(folder):
    with open(os.path.join(folder, "model.safetensors.index.json")) as f:
        return json.load(f)["weight_map"]


# ---- what a rank has before it loads ----

def local_shape(name, shape, n):
    d = split_dim(name)
    return tuple(s // n if k == d else s for k, s in enumerate(shape))


def empty_state(layers, mesh):
    import torch
    from torch.distributed.tensor import DTensor, Replicate, Shard
    state = {}
    for name, shape in MODEL.shapes(layers):
        d = split_dim(name)
        stride = tuple([shape[1], 1] if len(shape) == 2 else [1])
        state[name] = DTensor.from_local(torch.empty(local_shape(name, shape, mesh.size()), dtype=torch.bfloat16), mesh,
                                         [Replicate() if d is None else Shard(d)], run_check=False, shape=torch.Size(shape), stride=stride)
    return state


def empty_model(layers, mesh):
    import torch
    model = torch.nn.Module()
    for name, tensor in empty_state(layers, mesh).items():
        *path, last = name.split(".")
        at = model
        for part in path:
            if part not in at._modules:
                at.add_module(part, torch.nn.Module())
            at = at._modules[part]
        at.register_parameter(last, torch.nn.Parameter(tensor, requires_grad=False))
    return model


# ---- methods: prepare(folder, layers, mesh) is not timed, what it returns is; that returns the state ----

def ckptfs_method(**kw):
    def prepare(folder, layers, mesh):
        import ckptfs
        state = empty_state(layers, mesh)

        def load():
            ckptfs.load_state_dict(state, folder, **kw)
            return state
        return load
    return prepare


def slices_method(**backend):
    def prepare(folder, layers, mesh):
        import torch
        from safetensors import safe_open
        rank, n = mesh.get_rank(), mesh.size()

        def load():
            index, state = index_of(folder), {}
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
        return load
    return prepare


def dcp_method(hf):
    def prepare(folder, layers, mesh):
        import torch.distributed.checkpoint as dcp
        state = empty_state(layers, mesh)

        def load():
            reader = dcp.HuggingFaceStorageReader(folder) if hf else dcp.FileSystemReader(folder + ".dcp")
            dcp.load(state, storage_reader=reader)
            return state
        return load
    return prepare


def full_state(folder):
    """Rank 0's: views of the mapped files."""
    from safetensors import safe_open
    index = index_of(folder)
    files = {f: safe_open(os.path.join(folder, f), "pt") for f in set(index.values())}
    return {n: files[f].get_tensor(n) for n, f in index.items()}


def prepare_set_state(folder, layers, mesh):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    model = empty_model(layers, mesh)

    def load():
        full = full_state(folder) if mesh.get_rank() == 0 else {}
        set_model_state_dict(model, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
        return model.state_dict()
    return load


def prepare_accelerate(folder, layers, mesh):
    from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict
    model = empty_model(layers, mesh)

    def load():
        main = mesh.get_rank() == 0
        fsdp2_load_full_state_dict(SimpleNamespace(is_main_process=main), model, full_state(folder) if main else {})
        return model.state_dict()
    return load


def prepare_broadcast(folder, layers, mesh):
    import torch
    import torch.distributed as dist

    def load():
        full, state = full_state(folder) if mesh.get_rank() == 0 else None, {}
        for name, shape in MODEL.shapes(layers):
            whole = full[name].clone() if full else torch.empty(shape, dtype=torch.bfloat16)
            dist.broadcast(whole, 0)
            d = split_dim(name)
            state[name] = whole if d is None else whole.chunk(mesh.size(), d)[mesh.get_rank()].contiguous()
        return state
    return load


def prepare_fastsafetensors(folder, layers, mesh):
    import torch.distributed as dist
    from fastsafetensors import SafeTensorsFileLoader

    def load():
        files = sorted(set(index_of(folder).values()))
        loader = SafeTensorsFileLoader(dist.group.WORLD, "cpu", nogds=True)
        loader.add_filenames({r: [os.path.join(folder, f) for f in files[r::mesh.size()]] for r in range(mesh.size())})
        buffers = loader.copy_files_to_device()
        state = {}
        for name, _ in MODEL.shapes(layers):
            d = split_dim(name)
            t = buffers.get_tensor(name) if d is None else buffers.get_sharded(name, dim=d)
            state[name] = t.clone()  # its buffers are given back
        buffers.close()
        loader.close()
        return state
    return load


def prepare_runai(folder, layers, mesh):
    import torch
    from runai_model_streamer import SafetensorsStreamer
    rank, n = mesh.get_rank(), mesh.size()

    def load():
        state = {}
        with SafetensorsStreamer() as streamer:
            streamer.stream_files([os.path.join(folder, f) for f in sorted(set(index_of(folder).values()))], device="cpu", is_distributed=True)
            for name, tensor in streamer.get_tensors():
                d = split_dim(name)
                part = tensor if d is None else tensor.chunk(n, d)[rank]
                state[name] = part.clone(memory_format=torch.contiguous_format)
        return state
    return load


# ---- floors ----

def entries(folder):
    """{name: (file, offset, nbytes)}"""
    out = {}
    for file in sorted(set(index_of(folder).values())):
        with open(os.path.join(folder, file), "rb") as f:
            size = int.from_bytes(f.read(8), "little")
            for name, e in json.loads(f.read(size)).items():
                if name != "__metadata__":
                    lo, hi = e["data_offsets"]
                    out[name] = (file, 8 + size + lo, hi - lo)
    return out


def prepare_floor_read(folder, layers, mesh):
    where, rank, n = entries(folder), mesh.get_rank(), mesh.size()
    buf = bytearray(1 << 20)
    total = sum(e[2] for e in where.values())

    def load():
        fds = {f: os.open(os.path.join(folder, f), os.O_RDONLY) for f in sorted({e[0] for e in where.values()})}
        at, lo, hi = 0, total * rank // n, total * (rank + 1) // n
        for file, off, size in sorted(where.values()):
            first, last = max(lo - at, 0), min(hi - at, size)
            for k in range(first, last, len(buf)):
                os.preadv(fds[file], [memoryview(buf)[:min(len(buf), last - k)]], off + k)
            at += size
        return None
    return load


def bytes_of(tensor):
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def read_fully(fd, view, off):
    while view:
        got = os.preadv(fd, [view], off)
        view, off = view[got:], off + got


def prepare_floor_slices(folder, layers, mesh):
    import torch
    where, rank, n = entries(folder), mesh.get_rank(), mesh.size()
    rows = torch.empty(1 << 19, dtype=torch.bfloat16)

    def load():
        state = {}
        fds = {f: os.open(os.path.join(folder, f), os.O_RDONLY) for f in {e[0] for e in where.values()}}
        for name, shape in MODEL.shapes(layers):
            file, off, size = where[name]
            d = split_dim(name)
            to = state[name] = torch.empty(local_shape(name, shape, n), dtype=torch.bfloat16)
            if d == 1:
                step = rows.numel() // shape[1]
                for r in range(0, shape[0], step):
                    some = rows[:min(step, shape[0] - r) * shape[1]].view(-1, shape[1])
                    read_fully(fds[file], bytes_of(some), off + r * shape[1] * 2)
                    to[r:r + step] = some.chunk(n, 1)[rank]
            else:
                read_fully(fds[file], bytes_of(to), off + (0 if d is None else rank * to.nbytes))
        return state
    return load


def prepare_floor_touch(folder, layers, mesh):
    import torch

    def load():
        kept = [torch.empty(local_shape(name, shape, mesh.size()), dtype=torch.bfloat16) for name, shape in MODEL.shapes(layers)]
        for t in kept:
            t.view(torch.int16).fill_(1)
        return None
    return load


METHODS = {
    "ckptfs": ckptfs_method(),
    "ckptfs once": ckptfs_method(readers="once"),
    "get_slice": slices_method(),
    "get_slice pread": slices_method(backend="pread"),
    "dcp hf": dcp_method(True),
    "dcp": dcp_method(False),
    "set_state_dict": prepare_set_state,
    "accelerate fsdp2": prepare_accelerate,
    "broadcast": prepare_broadcast,
    "fastsafetensors": prepare_fastsafetensors,
    "runai": prepare_runai,
    "floor read": prepare_floor_read,
    "floor slices": prepare_floor_slices,
    "floor touch": prepare_floor_touch,
}


def thread_methods(threads, readers):
    """ckptfs with each number of threads (0: its own choice)."""
    return {f"threads {t or 'auto'}": ckptfs_method(readers=readers, load_options={"threads": t}) for t in threads}


NEEDS = {"accelerate fsdp2": "accelerate", "fastsafetensors": "fastsafetensors", "runai": "runai_model_streamer"}


# ---- one rank ----

def join_group(rank, n, port):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo")
    return init_device_mesh("cpu", (n,))


def measure(method, folder, layers, rank, n, port):
    """One rank of one load; the sum of all ranks' at rank 0."""
    import torch
    import torch.distributed as dist
    mesh = join_group(rank, n, port)
    load = METHODS[method](folder, layers, mesh)
    before = int(open("/proc/self/io").read().split()[1])
    dist.barrier()
    usage, begin = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    state = load()
    end, after = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
    read = int(open("/proc/self/io").read().split()[1]) - before
    local = [t.to_local() if hasattr(t, "to_local") else t for t in (state or {}).values()]
    digest = sum(int(t.view(torch.int16).to(torch.int64).sum()) for t in local) if state else None
    cpu = after.ru_utime + after.ru_stime - usage.ru_utime - usage.ru_stime
    got = [None] * n
    dist.all_gather_object(got, (end, cpu, read, after.ru_maxrss, digest, begin))
    dist.barrier()
    if rank:
        return None
    return {"wall": max(g[0] for g in got) - min(g[5] for g in got), "cpu": sum(g[1] for g in got), "read": sum(g[2] for g in got),
            "rss": max(g[3] for g in got), "digest": sum(g[4] for g in got) if digest is not None else None}


def save_dcp(folder, layers, rank, port):
    """The same model as torch.distributed.checkpoint saves it, by rows."""
    import torch.distributed.checkpoint as dcp
    from safetensors import safe_open
    from torch.distributed.tensor import DTensor, Shard
    mesh = join_group(rank, DCP_RANKS, port)
    state = {}
    for name, file in index_of(folder).items():
        part = safe_open(os.path.join(folder, file), "pt").get_slice(name)
        rows, shape = part.get_shape()[0] // DCP_RANKS, part.get_shape()
        local = part[rank * rows:(rank + 1) * rows].clone()
        state[name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        assert list(state[name].shape) == shape
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder + ".dcp"))


# ---- all of them ----

def fork_ranks(n, body):
    """Run body(rank) in n processes forked from this one: rank 0's result, or (None, why)."""
    sys.stdout.flush()
    pids, out = [], []
    for rank in range(n):
        r, w = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(r)
                sink = os.open(os.devnull, os.O_WRONLY)
                os.dup2(sink, 1)
                os.dup2(sink, 2)
                os.write(w, json.dumps({"ok": body(rank)}).encode())
                code = 0
            except BaseException as e:  # noqa: BLE001
                os.write(w, json.dumps({"why": f"{type(e).__name__}: {e}"[:300]}).encode())
            finally:
                os._exit(code)
        os.close(w)
        pids.append(pid)
        out.append(r)
    first = why = None
    waiting = dict(zip(out, pids))
    while waiting:
        for r in select.select(list(waiting), [], [])[0]:
            pid = waiting.pop(r)
            with os.fdopen(r, "rb") as f:
                said = json.loads(f.read() or b'{"why": "killed"}')
            os.waitpid(pid, 0)
            if "why" in said and not why:
                why = said["why"]
                for other in waiting.values():  # they would wait for it
                    os.kill(other, signal.SIGKILL)
            first = said.get("ok") if pid == pids[0] else first
    return (None, why) if why else (first, None)


def files_below(*folders):
    for folder in folders:
        for base, _, names in os.walk(folder):
            yield from (os.path.join(base, n) for n in names)


def warm(*folders):
    for path in files_below(*folders):
        with open(path, "rb", buffering=0) as f:
            while f.read(1 << 22):
                pass


def resident(path):
    """Bytes of the file that are in the page cache."""
    size = os.path.getsize(path)
    if not size:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    with open(path, "rb") as f:
        at = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, f.fileno(), 0)
    pages = ctypes.create_string_buffer((size + mmap.PAGESIZE - 1) // mmap.PAGESIZE)
    libc.mincore(at, size, pages)
    libc.munmap(at, size)
    return sum(b & 1 for b in pages.raw) * mmap.PAGESIZE


def evict(*folders):
    for path in files_below(*folders):
        with open(path, "rb") as f:
            os.fsync(f.fileno())
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    left = sum(resident(p) for p in files_below(*folders))
    if left > 16 << 20:
        sys.exit(f"{left >> 20} MiB of the files stay in the page cache: this would not be a cold run")


def import_all(methods):
    """Everything that a method may import, here, so that no rank pays for it."""
    import torch
    import torch.distributed.checkpoint  # noqa: F401
    import torch.distributed.checkpoint.state_dict  # noqa: F401
    import torch.distributed.tensor  # noqa: F401
    import safetensors.torch  # noqa: F401
    import ckptfs._library
    torch.set_num_threads(1)
    ckptfs._library.library()
    missing = {}
    for m in methods:
        try:
            if m in NEEDS:
                __import__(NEEDS[m])
            if m == "accelerate fsdp2":
                import accelerate.utils.fsdp_utils  # noqa: F401
        except ImportError as e:
            missing[m] = f"not compared: {e}"
    return missing


def prepare_data(folder, layers, methods):
    if not os.path.exists(os.path.join(folder, "config.json")):
        generate(folder, layers)
    if "dcp" in methods and not os.path.exists(os.path.join(folder + ".dcp", ".metadata")):
        port = free_port()
        _, why = fork_ranks(DCP_RANKS, lambda rank: save_dcp(folder, layers, rank, port))
        if why:
            sys.exit(f"saving the DCP checkpoint: {why}")


def table(n, size, rounds, results, why):
    print(f"{n} ranks, {size / 1e9:.3f} GB, {rounds} rounds (load average {os.getloadavg()[0]:.1f})")
    base = min((r["wall"] for r in results.get("get_slice", [])), default=None)
    ours = min((r["wall"] for r in results.get("ckptfs", [])), default=None)
    print(f"  {'':18} {'median s':>9} {'best s':>7} {'x get_slice':>11} {'x ckptfs':>9} {'cpu s':>7} {'read':>6} {'RSS MB':>7}")
    for m, rs in results.items():
        if not rs:
            print(f"  {m:18} {why.get(m)}")
            continue
        wall = [r["wall"] for r in rs]
        ratio, times = (f"{min(wall) / b:.2f}" if b else "-" for b in (base, ours))
        print(f"  {m:18} {statistics.median(wall):9.3f} {min(wall):7.3f} {ratio:>11} {times:>9} {min(r['cpu'] for r in rs):7.3f} "
              f"{min(r['read'] for r in rs) / size:6.2f} {max(r['rss'] for r in rs) / 1024:7.0f}", flush=True)
    if len({r["digest"] for rs in results.values() for r in rs if r["digest"] is not None}) > 1:
        sys.exit("the methods loaded different bytes")


def compare(a, folder, methods):
    missing = import_all(methods)
    prepare_data(folder, a.layers, methods)
    size, charts = sum(e[2] for e in entries(folder).values()), []
    for n in [int(x) for x in a.ranks.split(",")]:
        results, why = {m: [] for m in methods}, dict(missing)
        warm(folder, folder + ".dcp")
        for turn in range(a.rounds):
            for m in methods[turn % len(methods):] + methods[:turn % len(methods)]:
                if m in missing:
                    continue
                port = free_port()
                if a.cold:
                    evict(folder, folder + ".dcp")
                elif m in ("fastsafetensors", "runai"):  # they bypass the cache, and leave it as it is
                    warm(folder)
                got, error = fork_ranks(n, lambda rank: measure(m, folder, a.layers, rank, n, port))
                if got:
                    results[m].append(got)
                else:
                    why[m] = error
        table(n, size, a.rounds, results, why)
        walls = {m: [r["wall"] for r in rs] for m, rs in results.items()}
        charts.append(figures.chart(f"{n} ranks load {size / 1e9:.2f} GB", "s", walls, lambda name: name.startswith("ckptfs")))
    figures.write(a.json, charts)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--build", default="build/release")
    p.add_argument("--dir", help="keep the model there")
    p.add_argument("--peers", help="a folder of packages")
    p.add_argument("--layers", type=int, default=8)
    p.add_argument("--ranks", default="2,4")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--cold", action="store_true")
    p.add_argument("--threads", help="1,2,4; 0: its own choice")
    p.add_argument("--readers", default="auto", help="with --threads")
    figures.add_option(p)
    p.add_argument("methods", nargs="*", metavar="METHOD", help=", ".join(METHODS))
    a = p.parse_args()
    if a.threads:
        METHODS.update(thread_methods([int(t) for t in a.threads.split(",")], a.readers))
        a.methods = a.methods or list(METHODS)[-len(a.threads.split(",")):] + ["floor read"]
    unknown = [m for m in a.methods if m not in METHODS]
    if unknown:
        p.error(f"no such method: {unknown[0]}; there are {', '.join(METHODS)}")
    os.environ.setdefault("CKPTFS_LIBRARY_PATH", os.path.abspath(a.build))
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "contrib", "python"))
    if a.peers:
        sys.path.append(a.peers)
    with contextlib.ExitStack() as stack:
        top = a.dir or tempfile.mkdtemp()
        if not a.dir:
            stack.callback(shutil.rmtree, top, True)
        compare(a, os.path.join(top, f"llama-{a.layers}"), a.methods or list(METHODS))


if __name__ == "__main__":
    main()
