# SPDX-License-Identifier: Apache-2.0
"""Loads into device memory, every byte compared: every checkpoint at 1 to 4 ranks, and every way to make the communicator. Over a double of CUDA and
NCCL; over the real ones, too, where there is a GPU.

usage: test_gpu.py [WORDS OF A TEST'S NAME]     CKPTFS_FIXTURES: the collection; GPU_SAMPLE: only names that begin so; GPU_RANKS_MOST: of
every checkpoint (4)
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

from launch import BUILD, CKPT, GOLDEN, HERE, LLAMA, MOE, SLOW, environment, has_gpu, mpirun, processes, threads
from runner import run
from test_fixtures import FIXTURES, checkpoints, has_experts, opens

LAYOUTS = {1: ["dp=1"], 2: ["tp=2", "pp=2"], 3: ["dp=3"], 4: ["tp=2,pp=2", "ep=2,tp=2"]}
MOST_RANKS = int(os.environ.get("GPU_RANKS_MOST", "4"))  # per checkpoint; several share a GPU with NCCL >= 2.30 only
WAYS = ["env", "tcp", "given"]
UNKNOWN = ("no model file says", "config.json lacks a size", "heads, which is no multiple")  # of layouts that a model does not allow


def check(result, what, n_loads=None, status=0, merges=False):
    assert set(result.statuses) == {status}, f"{what}: {result}"
    loads = list(result.loads())
    assert n_loads is None or len(loads) == n_loads, f"{what}: {result}"
    for load in loads:
        assert load["transport"] == "nccl", load
        if load["layout"] != "random" and load["readers"] == "once":
            # columns of computed tensors are read as rows, by each rank that wants some
            most = int(load["layout"].split("tp=")[1].split(",")[0]) if "tp=" in load["layout"] else 1.05
            most = max(most, load["ranks"]) if merges else most  # each rank that computes a part of a product reads its matrices
            assert load["read"] <= most * load["unique"], f"{what} reads too much: {load}"
    return loads


def is_refused(result, layout, path, options):
    """Was it refused, with reason, and by all ranks?"""
    told = {line.partition(": ")[2] for line in result.lines if line.startswith(f"{layout} rank ")}
    unknown = UNKNOWN + (("but this model has no experts",) if told and not has_experts(path, options) else ())
    refused = {t for t in told if any(u in t for u in unknown)}
    gone = {t for t in told if t.startswith("peer: rank ") and t.endswith(" is gone")}  # a stage without layers has nothing to refuse
    return bool(refused) and refused | gone == told


def check_checkpoint(name, path, options, real):
    """Several loads are in one process, as beginning takes longer than they do; one that may be refused is the last."""
    args = [a for o in options for a in ("-o", o)] + [path, "--"]
    for n in range(1, MOST_RANKS + 1):
        jobs = [f"fsdp={n}:{'each' if n % 2 else 'once'}", "random:once", f"random:{'once' if n % 2 else 'each'}:{1 << 20}:{1 << 20}"]
        for layout in LAYOUTS[n]:
            jobs.append(f"{layout}:once")
            result = threads(n, args + jobs, real, LOAD_VERIFY="1" if n == 3 else "", CKPTFS_GPU_THREADS=str(n % 2))
            refused = int(is_refused(result, layout, path, options))
            check(result, f"{name}, {n} ranks, {layout}", len(jobs) - refused, refused, "lora=merge" in options)
            jobs = []


def all_checkpoints(real):
    seen = 0
    sample = os.environ.get("GPU_SAMPLE", "")
    for top in [GOLDEN] + ([FIXTURES] if os.path.isdir(FIXTURES) else []):
        for name, path, options in checkpoints(top):
            if name.startswith(sample) and opens(path, options):
                check_checkpoint(name, path, options, real)
                seen += 1
    assert seen
    return f"({seen} checkpoints)"


def every_way_to_a_communicator(real):
    jobs = ["tp=2:once", "random:once", "random:each", "fsdp=2:auto"]
    with tempfile.TemporaryDirectory() as top:
        for way in WAYS:
            more = {} if way == "env" else {"CKPTFS_TRANSPORT": "tcp"}
            connects = "env" if way == "env" else "tcp"
            meet = ["-m", os.path.join(top, way)] if way == "given" else []
            check(processes(2, ["-c", connects, *meet, LLAMA, "--", *jobs], real, LOAD_VERIFY="1", **more), way, len(jobs))
            if meet:
                meet[1] += "2"
                check(processes(2, ["-n", "-c", connects, *meet, LLAMA, "--", *jobs], real, **more), f"{way}, not blocking", len(jobs))


def with_a_secret(real):
    """The connections that carry NCCL's control messages prove it."""
    result = processes(2, [LLAMA, "--", "tp=2:once"], real, CKPTFS_SECRET="a secret of sixteen or more")
    if "libsodium" in repr(result):
        return "(no libsodium)"
    check(result, "with a secret", 1)


def over_mpi(real):
    if not shutil.which("mpirun") or not os.path.exists(os.path.join(BUILD, "core", "libckptfs_load_mpi.so.0")):
        return "(no MPI here)"
    if SLOW > 1:
        return "(sanitizers see much in MPI)"
    for way in ("env", "mpi"):
        check(mpirun(3, ["-c", way, LLAMA, "--", "fsdp=3:once", "random:each"], real), way, 2)


def more_ranks(real):
    check(processes(8, [LLAMA, "--", "tp=2,pp=2,dp=2:once", "random:once", "random:each", "fsdp=8:once"], real), "8 ranks", 4)
    check(processes(4, [MOE, "--", "ep=2,tp=2:once", "random:once", "fsdp=4:once"], real), "experts", 3)


def groups_that_share(real):
    """Two groups of the caller's: each reads all that it wants, and exchanges it over a communicator of its own; no byte goes in pairs."""
    fault = {} if real else {"CKPTFS_GPU_FAULT": "ncclSend:error"}
    result = processes(6, [LLAMA, "--", "dp=6:once"], real, LOAD_SHARE="3", **fault)
    loads = list(result.loads())
    assert result.good and len(loads) == 1 and loads[0]["read"] == 2 * loads[0]["unique"] and loads[0]["sent"], result
    result = processes(6, [LLAMA, "--", "random:once", "random:auto", "tp=2,dp=3:once"], real, LOAD_SHARE="3")
    assert result.good and len(list(result.loads())) == 3, result


def parts_of_the_run(real):
    """Each rank has a part of the run, or one has nearly all: what all want is read by a rank that has it, and goes from there by all-gathers, or in pairs."""
    with tempfile.TemporaryDirectory() as top:
        files = sorted(os.path.relpath(os.path.join(folder, name), LLAMA) for folder, _, names in os.walk(LLAMA) for name in names)
        for name, owner in (("even", lambda i: i % 5 % 3), ("skewed", lambda i: 2 * (i % 12 == 5))):
            for i, file in enumerate(files):
                put = os.path.join(top, name, str(owner(i)), file)
                os.makedirs(os.path.dirname(put), exist_ok=True)
                shutil.copy2(os.path.join(LLAMA, file), put)
            for per_node, verify in ((0, ""), (0, "1"), (2, "")):
                args = [os.path.join(top, name, "{rank}"), "--", "dp=4:once", "tp=2,dp=2:once", "random:once"]
                result = processes(4, args, real, ranks_per_node=per_node, LOAD_VERIFY=verify)
                dp, tp, _ = check(result, f"{name} parts", 3)
                assert dp["read"] == dp["unique"] and tp["read"] == tp["unique"] and dp["sent"] >= 3 * dp["unique"], result
                assert dp["sent"] <= (3 if name == "skewed" else 6) * (dp["unique"] + 64 * 200), result  # what a unit is rounded up to


def some_ranks_give_back_communicators(real):
    """The next load makes them anew on all ranks."""
    check(processes(4, [LLAMA, "--", "tp=2,dp=2:once", "dp=4:once", "tp=2,dp=2:once"], real, LOAD_RELEASE="1"), "communicators given back", 3)


def some_ranks_on_one_device(real):
    check(processes(3, [LLAMA, "--", "random:once"], real, CKPTFS_GPU_COUNT="1", NCCL_MULTI_RANK_GPU_ENABLE="1"), "3 ranks, one device", 1)


def budgets(real):
    """What is too little is refused, with what would do; and that does."""
    for kind, jobs in (("host_bytes", "random:once:{}:0"), ("device_bytes", "random:once:0:{}")):
        result = processes(2, [LLAMA, "--", jobs.format(1000)], real)
        told = set(result.told.values())
        assert len(result.told) == 2 and len(told) == 1, result
        found = re.search(rf"^limit: .*{kind}.* at least (\d+)", list(told)[0])
        assert found, told
        check(processes(2, [LLAMA, "--", jobs.format(found.group(1))], real), f"the least {kind}", 1)


def more_threads_than_the_device_has_marks(_):
    """A read slot for each thread, and a piece for each slot."""
    for readers, more in (("once", ["--window-bytes", "1024"]), ("each", [])):
        result = processes(2, ["load", LLAMA, "--layout", "dp=2", "--readers", readers, "--threads", "100", "--host-bytes", "4G", "--device-bytes", "4G",
                               "--verify", *more], program=CKPT)
        assert result.good and f"over nccl, readers {readers}" in result.out, result


def one_context_each(_):
    """A context takes hundreds of MB of a device: no rank has one on another's, not by any thread of the loader's."""
    check(processes(3, [LLAMA, "--", "random:once", "fsdp=3:each"], CKPTFS_GPU_CONTEXTS="1"), "ranks", 2)
    result = processes(3, ["load", LLAMA, "--layout", "dp=3"], program=CKPT, CKPTFS_GPU_CONTEXTS="1")
    assert result.good and "over nccl" in result.out, result


def an_environment_that_takes_the_timeouts(_):
    result = processes(2, ["load", LLAMA, "--layout", "dp=2"], program=CKPT, NCCL_COMM_BLOCKING="1")
    assert result.good and "NCCL_COMM_BLOCKING=1 is set" in result.err, result
    result = processes(2, ["load", LLAMA, "--layout", "dp=2"], program=CKPT, NCCL_COMM_BLOCKING="0")
    assert result.good and "NCCL_COMM_BLOCKING" not in result.err, result


def pauses_for_the_callers_work(real):
    """Collectives of the caller's communicator come between the same windows on all ranks; without pauses they would not."""
    jobs = ["dp=3:once:1500000:1500000", "random:once:1500000:1500000", "fsdp=3:once"]
    with tempfile.TemporaryDirectory() as top:
        for i, more in enumerate(({}, {"CKPTFS_GPU_JITTER_US": "1000"}, {"LOAD_VERIFY": "1"})):
            result = processes(3, ["-p", "3", "-c", "tcp", "-m", os.path.join(top, f"id{i}"), LLAMA, "--", *jobs], real, CKPTFS_TRANSPORT="tcp", **more)
            check(result, "pauses", 3)
        if not real:  # the order is chance: on a busy machine it may be the same on all ranks
            for i in range(10):
                meet = ["-m", os.path.join(top, f"without{i}")]
                result = processes(3, ["-p", "-6", "-c", "tcp", *meet, LLAMA, "--", *jobs], CKPTFS_TRANSPORT="tcp", CKPTFS_GPU_JITTER_US="1000")
                if "another order of communicators" in result.err:
                    break
            assert "another order of communicators" in result.err, result


def memory_of_the_callers(real):
    """All device memory of loads comes from the caller's allocator, as soon as the work on the caller's stream is done with it, and goes back; if it
    has none left, that is the error, and nothing is lost."""
    for more in {}, {} if real else {"CKPTFS_GPU_JITTER_US": "2000"}:
        check(processes(2, ["-a", "-c", "tcp", LLAMA, "--", "dp=2:once", "fsdp=2:each"], real, CKPTFS_TRANSPORT="tcp", **more), "own memory", 2)
    if not real:
        for n, after, transport in ((1, 3, "self"), (1, 40, "self"), (2, 43, "tcp")):  # a destination; of the windows; of one rank's windows
            fault = f"cuMemAlloc:rank={n - 1}:after={after}:error"
            result = processes(n, ["-a", "-c", "tcp", LLAMA, "--", f"dp={n}:once"], CKPTFS_TRANSPORT=transport, CKPTFS_GPU_FAULT=fault)
            assert set(result.told) == set(range(n)) and len(set(result.told.values())) == 1, result
            assert re.match(r"nomem: .*the caller's allocator \(struct ckpt_nccl.alloc\) gave no \d+ bytes", result.told[0]), result
            assert "leak" not in result.err and "was not given back" not in result.err, result


def a_capture_elsewhere(real):
    """The caller captures a graph while a load is planned and runs: no call of ours disturbs that."""
    for n in (1, 2):
        check(processes(n, ["-g", LLAMA, "--", "random:once", f"fsdp={n}:each", f"dp={n}:once"], real), f"{n} ranks", 3)


def rates_decide_who_reads(_):
    """Those that are given; the others are assumed, for devices. What every rank wants is read by each where the page cache is fast."""
    assumed = {"node_storage": 20e9, "page_cache": 40e9, "copy": 400e9, "local_link": 300e9, "network": 400e9}
    slow = {"page_cache": 1000}
    for n, ranks_per_node, given, decided in ((3, 0, {}, "each"),  # so little is not worth a communicator
                                              (3, 0, slow, "once"), (3, 0, {**slow, "local_link": 10}, "each"), (3, 1, {**slow, "network": 10}, "each")):
        more = ["--rates", ",".join(f"{k}={v}" for k, v in given.items())] if given else []
        result = processes(n, ["load", LLAMA, "--layout", f"dp={n}", "--json", "--verify", *more], program=CKPT, ranks_per_node=ranks_per_node)
        assert result.good, result
        got = json.loads(result.lines[-1])
        assert got["verified"] and got["readers"] == decided, (got, decided)
        assert got["rates"] == {**assumed, "shared_storage": 0, **given}, got


def slow_devices(_):
    """Every piece of a stream's work waits a while: what is not waited for is seen."""
    for n in (1, 3):
        jobs = ["random:once", "random:each", "random:once:600000:300000", f"dp={n}:once"]
        check(processes(n, [LLAMA, "--", *jobs], CKPTFS_GPU_JITTER_US="2000"), f"{n} slow devices", 4)


def a_stream_for_each_load(_):
    """On one comm, each load comes after what is queued on the stream that it is given, not on that which the comm was made with."""
    for n in (1, 2):
        jobs = ["random:once", f"dp={n}:once", "random:each", f"fsdp={n}:each"]
        check(processes(n, ["-e", "-c", "tcp", LLAMA, "--", *jobs], CKPTFS_TRANSPORT="tcp" if n > 1 else "self", CKPTFS_GPU_JITTER_US="2000"), f"{n} ranks", 4)


def no_device(_):
    """Asked for devices where there are none, programs say so: with the real libraries, too."""
    for double in (True, False):
        env = environment(not double, {"CUDA_VISIBLE_DEVICES": ""})
        done = subprocess.run([CKPT, "load", LLAMA, "--layout", "dp=1"], env=env, capture_output=True, text=True, timeout=60 * SLOW)
        assert done.returncode == 1 and "there is no CUDA device: " in done.stderr, done


LEAST_CUDA = 12000  # whose driver knows PTX 8.0
LEAST_GPU = 52


def any_driver_since_cuda_12(_):
    """One build serves CUDA 12 and 13: nothing of a CUDA runtime is linked, the kernel is PTX that the oldest driver compiles, and that driver has
    all calls, in the form that is used. Which CUDA brought a form is what NVIDIA's header says."""
    library = os.path.realpath(os.path.join(BUILD, "core", "libckptfs_load_nccl.so.0"))
    needed = re.findall(r"NEEDED.*\[(.*)\]", subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout)
    assert "libnccl.so.2" in needed and not any("cuda" in name for name in needed), needed
    with open(library, "rb") as f:
        code = f.read()
    ptx = re.findall(rb"\n\.version (\d+)\.(\d+)\n\.target sm_(\w+)\n", code)
    assert [(int(major), int(minor), int(sm)) for major, minor, sm in ptx] == [(8, 0, LEAST_GPU)], ptx
    assert b"\x50\xed\x55\xba" not in code and b"ckpt_copy_list" in code, "a fat binary, or no kernel"
    headers = next(line.split("=", 1)[1].strip() for line in open(os.path.join(BUILD, "CMakeCache.txt")) if line.startswith("CUDA_INCLUDE_DIR:"))
    with open(os.path.join(headers, "cudaTypedefs.h")) as f:
        known = f.read()
    with open(os.path.join(HERE, "..", "..", "core", "device", "cuda_driver.h")) as f:
        calls = re.findall(r"CALL\(\w+, (cu\w+?)(_v\d)?,[\s\\]*PFN_(cu\w+)_v(\d+)\)", f.read())
    assert len(calls) > 30, calls
    for name, form, typed, version in calls:
        forms = sorted({int(v) for v in re.findall(rf"\*PFN_{name}_v(\d+)\)", known)})
        assert name == typed and int(version) in forms and int(version) <= LEAST_CUDA, (name, version, forms)
        assert forms.index(int(version)) == (int(form[2:]) - 1 if form else 0), (name, form, version, forms)  # the first form has no suffix


PYTHON = """
import ckptfs
from ckptfs._library import library, new, nccl_library, to_device
assert nccl_library() is not None
comm = new(library().comm_self)
try:
    to_device(comm, 0, None)
    print("a device")
except ckptfs.CkptError as e:
    print(e.code, e)
library().comm_free(comm)
"""


def python_asks_for_a_device(_):
    """There is one, of the double; and there is none."""
    if SLOW > 1:
        return "(Python is not linked with sanitizers)"
    for devices, expected in (("1", "a device\n"), ("0", "unsupported there is no CUDA device: ")):
        env = environment(False, {"CKPTFS_GPU_COUNT": devices, "CKPTFS_LIBRARY_PATH": BUILD, "PYTHONPATH": os.path.join(HERE, "..", "..", "contrib", "python")})
        done = subprocess.run([sys.executable, "-c", PYTHON], env=env, capture_output=True, text=True, timeout=60 * SLOW)
        assert done.returncode == 0 and done.stdout.startswith(expected), done


OTHER_DEVICE = """
from ctypes import byref, c_size_t, c_void_p
import ckptfs
from ckptfs._library import library, new, to_device
comm = new(library().comm_self)
to_device(comm, 1, None)
library().comm_free(comm)
print("good")
"""


def no_context_beside_the_callers(_):
    """The thread's current device is 0, and was never used; ours is 1: then there is a context on that one alone."""
    if SLOW > 1:
        return "(Python is not linked with sanitizers)"
    env = environment(False, {"CKPTFS_GPU_CONTEXTS": "1", "CKPTFS_LIBRARY_PATH": BUILD, "PYTHONPATH": os.path.join(HERE, "..", "..", "contrib", "python")})
    done = subprocess.run([sys.executable, "-c", OTHER_DEVICE], env=env, capture_output=True, text=True, timeout=60 * SLOW)
    assert done.returncode == 0 and done.stdout == "good\n" and "contexts" not in done.stderr, done


TORCH_MEMORY = """
import ctypes, sys, types, warnings
from ctypes import byref, c_size_t, c_uint64, c_void_p
import torch
import ckptfs
from ckptfs._library import CkptError, Dest, Err, library, new
from ckptfs._load import make_options

cuda, held, asked, most = ctypes.CDLL("libcuda.so.1"), {}, [], [1 << 60]
def alloc(size, device, stream):
    assert (device, stream) == (0, 0), (device, stream)
    if len(asked) >= most[0]:
        raise RuntimeError("CUDA out of memory. Tried to allocate everything")
    address = c_uint64()
    assert cuda.cuMemAlloc_v2(byref(address), c_size_t(size)) == 0
    asked.append(size)
    held[address.value] = size
    return address.value
def delete(address):
    held.pop(address)
    assert cuda.cuMemFree_v2(c_uint64(address)) == 0
torch.cuda.caching_allocator_alloc, torch.cuda.caching_allocator_delete = alloc, delete
torch.cuda.current_stream = lambda device: types.SimpleNamespace(cuda_stream=0)  # this torch knows no CUDA

dll = ctypes.CDLL(library().path)
def load(allocator):
    asked.clear()
    given, wants = [], 0
    with ckptfs.Comm(no_dist=True, device=0, allocator=allocator) as comm, ckptfs.View(sys.argv[1]) as view:
        handle = new(library().load_new, view._view, comm.handle, byref(make_options("auto", {})))
        try:
            library().load_want_layout(handle, b"tp=1")
            wants = library().load_wants(handle)
            for want in range(wants):
                memory, err = c_void_p(), Err()
                if dll.ckpt_comm_alloc(comm.handle, c_size_t(1 << 20), byref(memory), byref(err)) < 0:
                    raise CkptError("nomem", err.text.decode())
                given.append(memory)
                library().load_set_dest(handle, want, byref(Dest(memory, None, None)))
            library().load_plan(handle)
            library().load_start(handle)
            assert library().load_wait(handle, 60000) == 0
            print(allocator, "asked" if len(asked) > wants else len(asked))
        except CkptError as e:
            print(allocator, e.code, e)
        finally:
            library().load_free(handle)
            for memory in given:
                dll.ckpt_comm_dealloc(comm.handle, memory)
    assert not held, held
    return wants

with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    wants = load("torch")
    load("driver")
    for most[0] in (wants - 1, wants + 2):
        load("torch")
    print(*sorted({str(w.message) for w in said}))
try:
    ckptfs.Comm(no_dist=True, device=0, allocator="mine")
except ValueError as e:
    print(e)
"""


TORCH_STREAMS = """
import ctypes, sys, types
from ctypes import byref, c_size_t, c_uint64, c_void_p
import torch
import ckptfs
from ckptfs._library import Dest, Err, library
from ckptfs._load import Load, make_options

cuda, dll, current, asked, streams = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(library().path), [0], [], []
def alloc(size, device, stream):
    asked.append(stream)
    address = c_uint64()
    assert cuda.cuMemAlloc_v2(byref(address), c_size_t(size)) == 0
    return address.value
torch.cuda.caching_allocator_alloc = alloc
torch.cuda.caching_allocator_delete = lambda address: cuda.cuMemFree_v2(c_uint64(address))
torch.cuda.current_stream = lambda device: types.SimpleNamespace(cuda_stream=current[0])  # this torch knows no CUDA
def new_stream():
    stream, context = c_void_p(), c_void_p()
    assert cuda.cuDevicePrimaryCtxRetain(byref(context), 0) == 0 and cuda.cuCtxSetCurrent(context) == 0
    assert cuda.cuStreamCreate(byref(stream), 1) == 0
    current[0] = stream.value
    streams.append(stream)

with ckptfs.Comm(no_dist=True, device=0) as comm, ckptfs.View(sys.argv[1]) as view, ckptfs.View(sys.argv[1]) as other:
    made = []
    for _ in range(2):  # loads on one comm
        new_stream()
        asked.clear()
        load, memory = Load(view, comm, make_options("auto", {})), []
        made.append((load, memory))
        library().load_want_layout(load.load, b"tp=1")
        for want in range(library().load_wants(load.load)):
            memory.append(c_void_p())
            assert dll.ckpt_comm_alloc(comm.handle, c_size_t(1 << 20), byref(memory[-1]), byref(Err())) == 0
            library().load_set_dest(load.load, want, byref(Dest(memory[-1], None, None)))
        load.run(None)
        assert len(asked) > len(memory) and set(asked) == {current[0]}, (asked, current)
    for go_on in (lambda: load.rerun(other, None), load.resume):
        new_stream()
        go_on()
        memory.append(c_void_p())
        assert dll.ckpt_comm_alloc(comm.handle, c_size_t(1), byref(memory[-1]), byref(Err())) == 0
        assert asked[-1] == current[0], (asked, current)
    for load, memory in made:
        load.close()
        for address in memory:
            dll.ckpt_comm_dealloc(comm.handle, address)
for stream in streams:
    assert cuda.cuStreamDestroy_v2(stream) == 0
print("good")
"""


KEPT_MEMORY = """
import ctypes, sys, threading, time, types
from ctypes import byref, c_size_t, c_void_p
import torch
import ckptfs
from ckptfs import _comm
from ckptfs._comm import joined
from ckptfs._library import Dest, Err, library
from ckptfs._load import Load, make_options

torch.cuda.current_stream = lambda device: types.SimpleNamespace(cuda_stream=0)  # this torch knows no CUDA
_comm.TORCH = _comm.DRIVER
dll, used = ctypes.CDLL(library().path), set()
def load(idle_s, drop=False):
    with joined(None, 0, no_dist=True, idle_s=idle_s) as comm, ckptfs.View(sys.argv[1]) as view:
        used.add(comm)
        load, memory = Load(view, comm, make_options("auto", {})), []
        library().load_want_layout(load.load, b"tp=1")
        for want in range(library().load_wants(load.load)):
            memory.append(c_void_p())
            assert dll.ckpt_comm_alloc(comm.handle, c_size_t(1 << 20), byref(memory[-1]), byref(Err())) == 0
            library().load_set_dest(load.load, want, byref(Dest(memory[-1], None, None)))
        stats = load.run(None)
        assert ckptfs.release() == 0  # a load runs
        if drop:  # one that has ended, as a Reloader's, holds none of it
            assert library().comm_release(comm.handle) == stats["kept_bytes"]
        load.close()
        for address in memory:
            dll.ckpt_comm_dealloc(comm.handle, address)
        return stats["kept_bytes"]
def threads():
    return [t for t in threading.enumerate() if isinstance(t, threading.Timer)]
kept = load(60)
assert kept > 0 and len(threads()) == 1 and load(None) == kept and not threads()
assert ckptfs.release() == kept and ckptfs.release() == 0
assert load(0.05) == kept
threads()[0].join()
assert ckptfs.release() == 0 and not threads()  # it was given back, and nothing waits for anything
assert load(0.05) == kept == load(60) and len(used) == 1
assert load(60, True) == kept and ckptfs.release() == 0
print("good")
"""


HOST_TENSORS = """
import sys, types
import torch
import ckptfs
from ckptfs import _comm
from ckptfs._comm import joined
from ckptfs._load import Load, make_options
from ckptfs._targets import Entry

torch.cuda.current_stream = lambda device: types.SimpleNamespace(cuda_stream=0)  # this torch knows no CUDA
_comm.TORCH = _comm.DRIVER
with joined(None, 0, no_dist=True, idle_s=None) as comm, ckptfs.View(sys.argv[1]) as view:
    load, tensors = Load(view, comm, make_options("auto", {})), {}
    for i, name in enumerate(view):
        expected = view.get_tensor(name)
        t = torch.empty_like(expected, dtype=torch.float64 if i % 3 == 1 else expected.dtype)
        t = torch._neg_view(t) if i % 3 == 2 else t  # which C can't write
        tensors[name] = t, expected
        load.want_box(name, [0] * t.dim(), list(t.shape), t, Entry(name, t, None))
    assert len(load.direct) < len(tensors)
    load.run(None)
    assert all(torch.equal(t, expected.to(t.dtype)) for t, expected in tensors.values())
    load._copy = lambda to, part: 1 / 0
    try:
        load.rerun(view, None)
    except ckptfs.CkptError as e:
        assert "destination of want" in str(e) and isinstance(e.__cause__, ZeroDivisionError), e
    else:
        raise AssertionError("a copy that fails")
    load.close()
print("good")
"""


def python(script):
    """A script with this build's package, given the checkpoint."""
    env = environment(False, {"CKPTFS_LIBRARY_PATH": BUILD, "PYTHONPATH": os.path.join(HERE, "..", "..", "contrib", "python")})
    return subprocess.run([sys.executable, "-c", script, LLAMA], env=env, capture_output=True, text=True, timeout=120 * SLOW)


def good_with_torch(script, *unsaid):
    """Run a script that says that all is good, and on stderr none of these words. Returns why it can't run, or None."""
    if SLOW > 1:
        return "(Python is not linked with sanitizers)"
    if importlib.util.find_spec("torch") is None:
        return "(torch is not installed)"
    done = python(script)
    assert done.returncode == 0 and done.stdout == "good\n" and not any(word in done.stderr for word in unsaid), done
    return None


def what_is_kept_for_the_next_load(_):
    """Pinned memory: until release(), or until nothing was loaded for idle_s; nothing of it is left at exit."""
    return good_with_torch(KEPT_MEMORY, "leak")


def tensors_on_the_host(_):
    """CPU tensors of a load to a device: filled on the host, by C or, where it can't write them, part by part by torch."""
    return good_with_torch(HOST_TENSORS)


def streams_of_torch(_):
    """Each load, reload and resume comes after the stream that is current where it is called."""
    return good_with_torch(TORCH_STREAMS)


def memory_of_torch(_):
    """Loads from Python take device memory from torch's caching allocator, and give it back, unless that is turned off; if it has none, they say so."""
    if SLOW > 1:
        return "(Python is not linked with sanitizers)"
    done = python(TORCH_MEMORY)
    refused = "torch nomem CUDA device 0: the caller's allocator (struct ckpt_nccl.alloc) gave no "
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == 6 and "leak" not in done.stderr, done
    assert lines[:2] == ["torch asked", "driver 0"] and all(line.startswith(refused) for line in lines[2:4]), lines
    assert lines[4:] == ["torch's caching allocator: CUDA out of memory. Tried to allocate everything", "allocator='mine': expected 'torch' or 'driver'"], lines


DEFAULTS = """
import os, sys, types, warnings
import torch, torch.distributed as dist
import ckptfs
torch.cuda.is_available, torch.cuda.current_device = lambda: True, lambda: 0  # this torch knows no CUDA
torch.cuda.current_stream = lambda device: types.SimpleNamespace(cuda_stream=0)
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1], RANK="0", WORLD_SIZE="1")
dist.init_process_group("gloo")
for config in ("cpu:gloo,cuda:gloo", "cpu:gloo,cuda:nccl", "cuda:nccl"):
    dist.get_backend_config = lambda group: config
    for given in (None, "cpu", "cuda", "cuda:0", torch.device("cuda", 0), 0):
        with ckptfs.Comm(device=given) as comm:
            assert comm.device == (None if given == "cpu" or given is None and "nccl" not in config else 0), (config, given, comm)
try:
    ckptfs.Comm(device="meta")
except ValueError as e:
    print(e)
with warnings.catch_warnings(record=True) as said, ckptfs.Comm(device="cpu") as comm, ckptfs.Comm() as other:
    warnings.simplefilter("always")
    for device in ("cpu", "cuda:0", "cuda:0"):
        comm.check_place(torch.device(device))
        other.check_place(torch.device(device))
    print(*[w.message for w in said])
os._exit(sys.stdout.flush() or 0)
"""


def the_devices_that_comms_take(_):
    """Comm() takes the current one where the group has NCCL for it; CUDA tensors over a Comm of the host are told once."""
    if SLOW > 1:
        return "(Python is not linked with sanitizers)"
    if importlib.util.find_spec("torch") is None:
        return "(torch is not installed)"
    from ranks import free_port
    env = environment(False, {"CKPTFS_LIBRARY_PATH": BUILD, "PYTHONPATH": os.path.join(HERE, "..", "..", "contrib", "python")})
    done = subprocess.run([sys.executable, "-c", DEFAULTS, str(free_port())], env=env, capture_output=True, text=True, timeout=120 * SLOW)
    assert done.returncode == 0 and done.stdout == (
        "device=meta: expected a CUDA device, or 'cpu'\nthere are tensors on cuda:0, but this Comm has no CUDA device "
        "(Comm(device=...) gives it one): the load goes through host memory, which is slower\n"), done


DETOUR = """
import sys, warnings
import ckptfs
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    with ckptfs.Comm(no_dist=True, device=0) as comm:
        print(comm.device, *[str(w.message) for w in said])
"""


def python_says_why_not(_):
    """CUDA tensors, and a library that can't be used: the load takes the slow way, and tells."""
    if SLOW > 1:
        return "(Python is not linked with sanitizers)"
    with tempfile.TemporaryDirectory() as top:
        shutil.copy(os.path.join(BUILD, "core", "libckptfs_load.so.0"), top)
        env = environment(False, {"CKPTFS_LIBRARY_PATH": top, "PYTHONPATH": os.path.join(HERE, "..", "..", "contrib", "python")})
        for kind, why in (("is not there", "libckptfs_load_nccl.so.0: cannot open shared object"), ("is broken", "libckptfs_load_nccl.so.0: file too short")):
            done = subprocess.run([sys.executable, "-c", DETOUR], env=env, capture_output=True, text=True, timeout=60 * SLOW)
            assert done.returncode == 0 and re.match(f"None CUDA and NCCL can't be used .*{why}.*: the load goes through host memory", done.stdout), (kind, done)
            open(os.path.join(top, "libckptfs_load_nccl.so.0"), "w").close()


def main():
    tests = [every_way_to_a_communicator, with_a_secret, over_mpi, more_ranks, groups_that_share, parts_of_the_run, some_ranks_give_back_communicators, some_ranks_on_one_device, budgets, pauses_for_the_callers_work, memory_of_the_callers, a_capture_elsewhere, all_checkpoints]
    cases = [(t.__name__, lambda t=t: t(False)) for t in tests + [more_threads_than_the_device_has_marks, one_context_each, an_environment_that_takes_the_timeouts, no_context_beside_the_callers, rates_decide_who_reads, slow_devices, a_stream_for_each_load, any_driver_since_cuda_12, no_device, python_asks_for_a_device, python_says_why_not, memory_of_torch, streams_of_torch, tensors_on_the_host, the_devices_that_comms_take, what_is_kept_for_the_next_load]]
    if has_gpu():
        cases += [(t.__name__ + "_on_a_real_device", lambda t=t: t(True)) for t in tests]
    run(cases)


main()
