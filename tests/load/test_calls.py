# SPDX-License-Identifier: Apache-2.0
"""Ways to call the loader from Python: one Comm for many loads, loads that run beside the caller, parts of a model, layouts without a model. Each case
is a function of a folder that ranks run, or that this process runs alone."""

import importlib
import inspect
import json
import os
import pickle
import shutil
import sys
import threading
import time
import typing
import warnings
from typing import Any, Sequence

from built import NANOTRON, end_rank, skip, torchrun
from runner import run_in_folders

try:
    import numpy
    import torch
    import torch.distributed as dist
    import transformers
    from safetensors.torch import load_file, save_file
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
except ImportError as e:
    skip(e)

import ckptfs  # noqa: E402
from ckptfs import CkptError  # noqa: E402

warnings.simplefilter("ignore")
RUN = os.path.join(NANOTRON, "llama_tp2_pp2_tied")
MOE = os.path.join(NANOTRON, "qwen2_moe_epbranch_tp1_dp2_ep2")
OTHER = os.path.join(NANOTRON, "llama_tp1_pp1_untied_interleaved")


def conversion(run=RUN):
    return load_file(os.path.join(run + ".expected", "model.safetensors"))


def error_of(kind, fn, *args, **kwargs):
    try:
        fn(*args, **kwargs)
    except kind as e:
        return e
    raise AssertionError("no error")


def zeros(run=RUN):
    return {name: torch.zeros_like(t) for name, t in conversion(run).items()}


def meta_model(run=RUN):
    with open(os.path.join(run + ".expected", "config.json"), encoding="utf-8") as f, torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**json.load(f)))


def same_model(model, run=RUN, dtype=None):
    want, got = conversion(run), model.state_dict()
    for k, t in want.items():
        assert not got[k].is_meta and torch.equal(got[k], t.to(dtype or got[k].dtype)) and (dtype is None or got[k].dtype == dtype), k


def equal(got, run=RUN):
    want = conversion(run)
    assert list(got) == list(want) and all(torch.equal(got[k], want[k]) for k in want)


# ---- cases of two ranks ----

def one_comm_for_many_loads(top):
    rank = dist.get_rank()
    with ckptfs.Comm() as comm:
        assert (comm.rank, comm.size) == (rank, 2)
        for run in (RUN, OTHER, RUN):
            state = zeros(run)
            ckptfs.load_state_dict(state, run, comm)
            equal(state, run)
        box = torch.zeros(4, 8, dtype=torch.bfloat16)
        ckptfs.load_boxes([("model.embed_tokens.weight", (rank, 3), box)] if rank else [], RUN, comm)
        assert torch.equal(box, conversion()["model.embed_tokens.weight"][1:5, 3:11] if rank else torch.zeros_like(box))
        # what fails before the load, on one rank or on all, leaves it good
        state = dict(zeros(), **({"odd": torch.zeros(2)} if rank else {}))
        assert "odd" in str(error_of(RuntimeError, ckptfs.load_state_dict, state, RUN, comm))
        said = str(error_of((CkptError, ValueError), ckptfs.load_boxes, [], RUN, comm, **({"load_options": {"colour": 1}} if rank else {})))
        assert "colour" in said, said
        state = zeros()
        ckptfs.load_state_dict(state, RUN, process_group=comm)
        equal(state)
    assert "closed" in str(error_of(CkptError, ckptfs.load_state_dict, zeros(), RUN, comm))


def a_load_beside_the_caller(top):
    rank = dist.get_rank()
    with ckptfs.Comm() as comm:
        for n in range(3):
            model = meta_model()
            load = ckptfs.load_async(model, RUN, comm)
            seen = dict(load.tensors())
            assert not load.wait().missing_keys and load.done() and load.progress[0] == load.progress[1] > 0
            same_model(model)
            assert all(torch.equal(seen[k], model.state_dict()[k]) for k in seen) and len(seen) == load.progress[1]
    # one rank fails before it: both hear of it
    load = ckptfs.load_async({"odd": torch.zeros(2)} if rank else zeros(), RUN)
    assert "odd" in str(error_of(RuntimeError, load.wait)) and "odd" in str(error_of(RuntimeError, list, load.tensors()))
    # one rank cancels it: on both it is cancelled, or was over before
    state = zeros()
    load = ckptfs.load_async(state, RUN, load_options={"exchange_timeout_ms": 120000})
    if rank:
        load.cancel()
    try:
        load.wait()
        equal(state)
    except CkptError as e:
        assert e.code == "cancelled", (e.code, e)
    dist.barrier()
    state = zeros()
    ckptfs.load_state_dict(state, RUN)
    equal(state)


def a_load_that_pauses(top):
    """The program's own collectives run between pause() and resume(), whenever they come; also before the load has begun, and after its end."""
    rank = dist.get_rank()
    with ckptfs.Comm() as comm:
        for n in range(4):
            state = zeros()
            load = ckptfs.load_async(state, RUN, comm, readers="once", load_options={"host_bytes": 400 << 10})
            for _ in range(3):
                if n % 2 == rank:
                    time.sleep(0.01)
                load.pause()
                total = torch.ones(1)
                dist.all_reduce(total)
                assert total.item() == 2
                load.resume()
            load.wait()
            load.pause(1)
            load.resume()
            equal(state)
        # what fails, fails for who pauses, too; and the Comm serves the next load
        load = ckptfs.load_async(dict(zeros(), odd=torch.zeros(2)), RUN, comm)
        assert "odd" in str(error_of(RuntimeError, load.pause)) and "odd" in str(error_of(RuntimeError, load.wait))
        state = zeros()
        ckptfs.load_state_dict(state, RUN, comm)
        equal(state)


def begun(comm, **given):
    """A load that has begun to speak with the other ranks."""
    words = comm.words
    load = ckptfs.load_async(zeros(), RUN, comm, **given)
    while comm.words is words:
        time.sleep(0.001)
    return load


def good_or_cancelled(call):
    try:
        call()
    except CkptError as e:
        assert e.code == "cancelled", e


def a_comm_that_is_closed_under_a_load(top):
    """As where an exception leaves the with block: the load is cancelled on all ranks, and what it uses is there until it has ended."""
    rank = dist.get_rank()
    for pauses in (True, False):
        with ckptfs.Comm() as comm:
            load = begun(comm, readers="once", load_options={"host_bytes": 400 << 10})
            if pauses:  # data is being exchanged, unless the other rank has closed its Comm already
                good_or_cancelled(load.pause)
        good_or_cancelled(load.wait)
        assert "closed" in str(error_of(CkptError, ckptfs.load_state_dict, zeros(), RUN, comm))
        dist.barrier()
    # it waits for a rank that comes too late
    comm = ckptfs.Comm()
    if not rank:
        load = begun(comm)
        comm.close()
        assert error_of(CkptError, load.wait).code == "cancelled"
    dist.barrier()
    if rank:
        assert error_of(CkptError, ckptfs.load_state_dict, zeros(), RUN, comm).code == "cancelled"
        comm.close()

    with ckptfs.Comm() as comm:  # by the load itself
        def close(done, of):
            comm.close()
        assert "this very thread" in str(error_of(CkptError, ckptfs.load_state_dict, zeros(), RUN, comm, progress=close))
        state = zeros()
        ckptfs.load_state_dict(state, RUN, comm)
        equal(state)


def a_model_that_follows(top):
    """Other steps into the same memory: what was on the meta device, what is cast, DTensors; and steps that do not fit."""
    rank = dist.get_rank()
    if rank == 0:
        for step, change in ((1, 0), (2, 1), (3, 2)):
            shutil.copytree(RUN + ".expected", os.path.join(top, f"step-{step}"))
            tensors = {k: t + change for k, t in conversion().items()}
            if step == 3:
                tensors["model.norm.weight"] = torch.zeros(33, dtype=torch.bfloat16)
            save_file(tensors, os.path.join(top, f"step-{step}", "model.safetensors"), metadata={"format": "pt"})
    dist.barrier()

    def check(model, change):
        state = model.state_dict()
        for k, want in conversion().items():
            whole = state[k].full_tensor() if isinstance(state[k], DTensor) else state[k]
            assert torch.equal(whole, (want + change).to(whole.dtype)), (k, change)
    mesh = init_device_mesh("cpu", (2,))
    for kind in ("meta", "cast", "fsdp"):
        model = meta_model().to_empty(device="cpu").float() if kind == "cast" else meta_model()
        if kind == "fsdp":
            fully_shard(model, mesh=mesh)
        with ckptfs.Reloader(model, top, step=1) as weights:
            check(model, 0)
            where = {k: p.data_ptr() for k, p in model.named_parameters() if not isinstance(p, DTensor)}
            assert weights.reload(step=2)["unique_bytes"] > 0
            check(model, 1)
            for given in ({"step": 3}, {}, {"step": 1 + rank}, {"step": 9}, {"run": OTHER}):
                assert error_of(CkptError, weights.reload, **given).code in ("conflict", "missing"), given
            weights.reload(os.path.join(top, "step-1"))
            check(model, 0)
            assert where == {k: p.data_ptr() for k, p in model.named_parameters() if not isinstance(p, DTensor)}
            if rank and kind == "meta":
                model.model.norm.weight.data = model.model.norm.weight.data.clone()
            if kind == "meta":
                assert "model.norm.weight" in str(error_of(CkptError, weights.reload, step=2))
        assert "closed" in str(error_of(CkptError, weights.reload, step=1))
    assert "odd" in str(error_of(RuntimeError, ckptfs.Reloader, {"odd": torch.zeros(2)} if rank else zeros(), top, step=1))


def names_of_either_rank(top):
    """A name is wrong if no rank has it."""
    rank = dist.get_rank()
    mine, theirs = ("model.norm.weight", "lm_head.weight")[:: 1 if rank else -1]
    state = {mine: torch.zeros_like(conversion(OTHER)[mine])}
    ckptfs.load_state_dict(state, OTHER, names=[mine, theirs])
    assert torch.equal(state[mine], conversion(OTHER)[mine])
    said = str(error_of(ValueError, ckptfs.load_state_dict, state, OTHER, names=[mine, "nowhere"]))
    assert "nowhere" in said and mine not in said, said
    said = error_of((CkptError, RuntimeError), ckptfs.load_state_dict, state, OTHER, names=[mine], **({"device": "nonsense"} if rank else {}))
    assert "nonsense" in str(said), said


def layouts_without_a_model(top):
    rank, want = dist.get_rank(), conversion()
    for layout, part in (("tp=2", half), ("pp=2", None), ("dp=2", lambda name, t, r: t), ("fsdp=2", lambda name, t, r: t.chunk(2, 0)[r])):
        got = ckptfs.load_layout(RUN, layout, readers="once")
        if part is None:
            assert ("model.embed_tokens.weight" in got) and ("model.layers.0.mlp.up_proj.weight" in got) == (rank == 0)
            assert ("model.norm.weight" in got) == (rank == 1) and all(torch.equal(t, want[k]) for k, t in got.items())
            continue
        assert set(got) == set(want) and set(got.boxes) == set(want)
        for k, t in got.items():
            assert torch.equal(t, part(k, want[k], rank)), (layout, k)
        assert got.stats["read_bytes"] <= 1.02 * got.stats["unique_bytes"]
    fused = ckptfs.load_layout(MOE, "tp=2", view="memory")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    with ckptfs.open(MOE, view="memory") as f:
        gate, up = f.get_tensor(name).chunk(2, 1)
    assert torch.equal(fused[name], torch.cat([gate.chunk(2, 1)[rank], up.chunk(2, 1)[rank]], 1)) and len(fused.boxes[name]) == 2
    assert {t.dtype for t in ckptfs.load_layout(RUN, "tp=2", dtype=torch.float32).values()} == {torch.float32}
    assert error_of(CkptError, ckptfs.load_layout, RUN, "tp=3").code == "usage"


def half(name, t, rank):
    """Tensor parallelism, as Megatron has it: columns of what comes back, rows of what goes out, nothing of the norms."""
    if "norm" in name:
        return t
    return t.chunk(2, 1 if "o_proj" in name or "down_proj" in name else 0)[rank]


def a_mesh_in_place_of_a_group(top):
    """A DeviceMesh is taken where a process group is; no_dist=True is this process alone, whatever the others do."""
    for shape, names in (((2,), ("tp",)), ((1, 2), ("dp", "tp"))):
        mesh, state = init_device_mesh("cpu", shape, mesh_dim_names=names), zeros()
        ckptfs.load_state_dict(state, RUN, mesh, load_options={"share_with": mesh["tp"]})
        equal(state)
    state = zeros()
    ckptfs.load_boxes([(name, [0] * t.dim(), t) for name, t in state.items()], RUN, mesh["tp"])
    equal(state)
    equal(ckptfs.load_layout(RUN, "tp=1", mesh["dp"]))
    with ckptfs.Comm(mesh) as comm:
        assert repr(comm) == f"<ckptfs.Comm: rank {comm.rank} of 2, through host memory>", comm
    assert repr(comm) == f"<ckptfs.Comm: rank {comm.rank} of 2, closed>", comm
    if dist.get_rank() == 0:  # the other rank loads nothing
        state = zeros()
        ckptfs.load_state_dict(state, RUN, no_dist=True)
        equal(state)
        equal(ckptfs.load_layout(RUN, "tp=1", no_dist=True))
        with ckptfs.Reloader(state, RUN, no_dist=True) as weights:
            weights.reload()
    for call in (lambda: ckptfs.load_state_dict(zeros(), RUN, mesh, no_dist=True), lambda: ckptfs.Comm(dist.group.WORLD, no_dist=True)):
        assert "no_dist=True" in str(error_of(ValueError, call))
    assert "no_dist=True" in str(error_of(TypeError, ckptfs.load_state_dict, zeros(), RUN, False))


RANKS = (one_comm_for_many_loads, a_load_beside_the_caller, a_load_that_pauses, a_comm_that_is_closed_under_a_load, a_model_that_follows, names_of_either_rank, layouts_without_a_model,
         a_mesh_in_place_of_a_group)


def two_ranks(top):
    os.makedirs(top)
    torchrun(2, __file__, top)


# ---- cases of one process ----

def a_comm_of_one_process(top):
    with ckptfs.Comm(no_dist=True) as comm:
        for _ in range(2):
            state = zeros()
            ckptfs.load_state_dict(state, RUN, comm)
            equal(state)


def names_that_are_not_there(top):
    """Each is a KeyError, as of a dict, and a CkptError "missing", which says itself plainly and can be pickled."""
    with ckptfs.open(RUN) as view:
        assert list(view) == view.keys() and torch.equal(view[view.keys()[0]], view.get_tensor(view.keys()[0]))
        for call in (view.get_tensor, view.get_slice, view.__getitem__, view.explain, view.read, lambda name: view.infos([name]),
                     lambda name: ckptfs.load_boxes([(name, (0,), torch.zeros(1))], view)):
            for kind in (KeyError, CkptError, ckptfs.NotFoundError):
                error = error_of(kind, call, "no.such")
            assert error.code == "missing" and "no.such" in str(error) and not str(error).startswith('"'), error
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), again.code, str(again)) == (type(error), "missing", str(error))
        error = pickle.loads(pickle.dumps(CkptError("io", "text")))
        assert (type(error), error.code, str(error)) == (CkptError, "io", "text") and not isinstance(error, KeyError)
        name = next(n for n in view.keys() if len(view.get_slice(n).get_shape()) == 2)
        error = error_of(IndexError, lambda: view.get_slice(name)[:, 1 << 20])
        assert str(error) == f"'{name}': index {1 << 20} is out of range for dimension 1 of size {view.get_slice(name).get_shape()[1]}", error


def what_objects_say_of_themselves(top):
    with ckptfs.open(RUN) as view:
        n, name = len(view), view.keys()[0]
        part = view.get_slice(name)
        assert repr(part) == f"<ckptfs.Slice of '{name}': {part.get_dtype()} {part.get_shape()}>", part
        assert repr(view.infos([name])) == f"[<ckptfs.Info '{name}': {part.get_dtype()} {part.get_shape()}>]"
        assert repr(view).startswith(f"<ckptfs.View of '{os.path.abspath(RUN)}', ") and repr(view).endswith(f"{n} tensors>"), view
    assert repr(view).endswith("closed>"), view
    with ckptfs.Reloader(zeros(), RUN) as weights:
        assert f"{n} tensors of '{os.path.abspath(RUN)}', step" in repr(weights), weights
    assert repr(weights) == "<ckptfs.Reloader: closed>"
    load = ckptfs.load_async(zeros(), RUN)
    load.wait()
    assert repr(load) == f"<ckptfs.LoadHandle: {n} of {n} tensors, done>", load
    load = ckptfs.load_async({"no.such": torch.zeros(1)}, RUN)
    error_of(RuntimeError, load.wait)
    assert "0 of 0 tensors, failed: " in repr(load), load


def some_names_of_a_model(top):
    """The others stay on the meta device; nothing is missing or unexpected, tied names go together."""
    model = meta_model(OTHER)
    result = ckptfs.load_state_dict(model, OTHER, names=lambda name: "layers.1." in name or name == "lm_head.weight")
    assert not result.missing_keys and not result.unexpected_keys
    for k, t in model.state_dict().items():
        chosen = "layers.1." in k or k == "lm_head.weight"
        assert t.is_meta != chosen and (not chosen or torch.equal(t, conversion(OTHER)[k].to(t.dtype))), k
    tied = meta_model()
    ckptfs.load_state_dict(tied, RUN, names={"lm_head.weight"})
    assert tied.lm_head.weight is tied.model.embed_tokens.weight and not tied.lm_head.weight.is_meta
    assert "lm_heat" in str(error_of(ValueError, ckptfs.load_state_dict, meta_model(), RUN, names=["lm_heat"]))
    assert "collection" in str(error_of(ValueError, ckptfs.load_state_dict, meta_model(), RUN, names="lm_head.weight"))


def another_dtype_and_device(top):
    """Of what gets memory; what has memory stays as it is."""
    model = meta_model()
    ckptfs.load_state_dict(model, RUN, dtype=torch.float64, device="cpu")
    same_model(model, dtype=torch.float64)
    state = {"model.norm.weight": torch.zeros(32), "model.embed_tokens.weight": torch.empty(128, 32, device="meta", dtype=torch.bfloat16)}
    with torch.device("meta"):
        ckptfs.load_state_dict(state, RUN, strict=False, dtype=torch.float16)
    assert state["model.norm.weight"].dtype == torch.float32 and state["model.embed_tokens.weight"].dtype == torch.float16
    assert all(torch.equal(t, conversion()[k].to(t.dtype)) for k, t in state.items())
    model = torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(32, device="meta")})})
    ckptfs.load_state_dict(model, RUN, strict=False, missing="init", dtype=torch.float64)
    assert model["model"]["norm"].bias.dtype == torch.float64 and (model["model"]["norm"].bias == 0).all()
    assert "dtype" in str(error_of(ValueError, ckptfs.load_state_dict, zeros(), RUN, dtype=torch.int8))


def a_load_that_is_waited_for(top):
    model = meta_model()
    load = ckptfs.load_async(model, RUN, dtype=torch.float32)
    try:
        load.wait(0)
    except TimeoutError:
        pass
    assert load.wait(120).stats["read_bytes"] > 0
    load.cancel()  # too late: nothing happens
    load.wait()
    same_model(model, dtype=torch.float32)
    assert "step" in str(error_of(CkptError, ckptfs.load_async(meta_model(), RUN, step=11).wait))
    assert "progress" in str(error_of(ValueError, ckptfs.load_async, model, RUN, progress=True))


def a_load_that_is_cancelled(top):
    """As soon as one of many tensors is there."""
    os.makedirs(top)
    mib, n = 1 << 20, 512
    header = json.dumps({f"t{i}": {"dtype": "U8", "shape": [mib], "data_offsets": [i * mib, (i + 1) * mib]} for i in range(n)}).encode()
    with open(os.path.join(top, "model.safetensors"), "wb") as f:  # sparse: nothing is written
        f.write(len(header).to_bytes(8, "little") + header)
        f.truncate(8 + len(header) + n * mib)
    with open(os.path.join(top, "config.json"), "w", encoding="utf-8") as f:
        f.write('{"model_type": "odd"}')

    class Cancelling(ckptfs.LoadHandle):
        def arrived(self, entry, tensor):
            super().arrived(entry, tensor)
            self.cancel()
    state = {f"t{i}": torch.empty(mib, dtype=torch.uint8, device="meta") for i in range(n)}
    load = Cancelling(state, top, None, {"load_options": {"threads": 1, "window_bytes": mib}})
    assert error_of(CkptError, load.wait).code == "cancelled" and 0 < load.progress[0] < n
    assert all(t.is_meta for t in state.values())


def a_reloader_that_is_closed_elsewhere(top):
    """While another thread is in reload(), at any moment of it: that ends, with an error or well, and nothing is freed before."""
    os.makedirs(top)
    stored = {str(i): torch.rand(1 << 20) for i in range(16)}
    save_file(stored, os.path.join(top, "model.safetensors"))
    with open(os.path.join(top, "config.json"), "w") as f:
        f.write('{"model_type": "odd"}')
    state = {k: torch.zeros_like(t) for k, t in stored.items()}
    for i in range(20):
        weights = ckptfs.Reloader(state, top)
        closing = threading.Timer(0.004 * i, weights.close)
        closing.start()
        try:
            while True:
                weights.reload()
        except CkptError as e:
            assert e.code in ("cancelled", "usage"), e
        closing.join()
        assert "closed" in str(error_of(CkptError, weights.reload))


def public_functions_tell_their_types(top):
    """Each parameter and result has a type that exists, and a docstring says what it is about."""
    known = {"torch": torch, "transformers": transformers, "numpy": numpy, "Group": Any, "Box": Any, "Sequence": Sequence, "Path": str}
    for name in ("", ".torch", ".transformers", ".accelerate", ".megatron", ".nanotron", ".vllm"):
        module = importlib.import_module("ckptfs" + name)
        public = ckptfs.__all__ if not name else [n for n, thing in vars(module).items() if not n.startswith("_") and getattr(thing, "__module__", "") == module.__name__]
        for thing in (getattr(module, n) for n in public):
            assert thing.__doc__, thing
            for f in filter(inspect.isfunction, vars(thing).values()) if isinstance(thing, type) else [inspect.unwrap(thing)]:
                if not f.__qualname__.rpartition(".")[2].startswith("_") and f.__qualname__ not in HOOKS and f.__qualname__.split(".")[0] not in THEIRS:
                    hints = typing.get_type_hints(f, {**vars(ckptfs), **known, **vars(sys.modules[f.__module__])})
                    lacks = [p for p in inspect.signature(f).parameters if p != "self" and p not in hints]
                    assert not lacks and "return" in hints and f.__doc__, (f, lacks, hints)


# how a load talks to its LoadHandle, and Comm's own part in a load
HOOKS = {"LoadHandle.started", "LoadHandle.stopped", "LoadHandle.arrived", "Reloader.started", "Comm.in_use", "Comm.add", "Comm.runs", "Comm.share", "Comm.agree", "Comm.mesh"}
THEIRS = {"StorageReader", "LoadShardedStrategy"}  # the methods are as the framework has them


if __name__ == "__main__":
    if "--rank" in sys.argv:
        dist.init_process_group("gloo")
        for case in RANKS:
            case(os.path.join(sys.argv[-1], case.__name__))
            dist.barrier()
        end_rank()
    run_in_folders((two_ranks, a_comm_of_one_process, names_that_are_not_there, what_objects_say_of_themselves, some_names_of_a_model, another_dtype_and_device, a_load_that_is_waited_for,
                    a_load_that_is_cancelled, a_reloader_that_is_closed_elsewhere, public_functions_tell_their_types))
