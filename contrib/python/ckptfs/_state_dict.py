# SPDX-License-Identifier: Apache-2.0
"""Filling models and state dicts in place: every rank its part."""

import re
import sys
from collections import namedtuple
from ctypes import byref, c_char_p, c_size_t, c_void_p

from ._comm import Comm
from ._library import (NO_LIMIT, READERS, CkptError, Dest, LoadOptions, Mesh, Place, Stats, WantInfo, library, new, u32s, u64s)
from ._view import TORCH, View

REPLICATE, SHARD, STRIDED = 0, 1, 2
CASTABLE = {"F16", "BF16", "F32", "F64"}
SAFETENSORS = {v: k for k, v in TORCH.items()}
WRAPPERS = re.compile(r"(^|\.)(_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module)(?=\.|$)")

Loaded = namedtuple("Loaded", ["missing_keys", "unexpected_keys", "stats"])


def _is_dtensor(t):
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


# ---- names ----

def _clean(name):
    """Without what wrappers of modules put into names."""
    name = WRAPPERS.sub(r"\1", name)
    while ".." in name:
        name = name.replace("..", ".")
    return name.strip(".")


def _mapped(view_names, key_mapping):
    """{name that the model has: name in the view}, by patterns as transformers' key_mapping: the first that matches renames."""
    if not key_mapping:
        return {n: n for n in view_names}
    out = {}
    for name in view_names:
        new_name = name
        for pattern, replacement in key_mapping.items():
            replacement = re.sub(r"\(.*\)", "", replacement.lstrip("^"))
            new_name, hits = re.subn(pattern, replacement, name)
            if hits:
                break
        if new_name in out:
            raise CkptError("conflict", f"key_mapping gives '{new_name}' to '{out[new_name]}' and '{name}'")
        out[new_name] = name
    return out


def _spellings(name):
    """The name, and what it is without adapters around it."""
    name = _clean(name)
    yield name
    if name.startswith("module."):
        yield name[len("module."):]
    bare = re.sub(r"^base_model\.model\.", "", name).replace(".base_layer.", ".")
    if bare != name:
        yield bare


def _find(name, names, tied=None):
    """The view's tensor of that name; for a tied weight that was not saved, the one that it is tied to."""
    for spelling in _spellings(name):
        if spelling in names:
            return names[spelling]
    for spelling in _spellings(name):
        if tied and spelling in tied:
            return _find(tied[spelling], names)
    return None


def _tied(model):
    """{name: the name that it is tied to}, as transformers' models know it."""
    found = {}
    for module in model.modules() if model is not None else ():
        keys = getattr(module, "all_tied_weights_keys", None)
        if isinstance(keys, dict):
            found.update({k: v for k, v in keys.items() if k not in found})
    return found


# ---- targets: tensors to be filled ----

def _place_list(dtensor):
    import torch.distributed.tensor as dt
    strided = getattr(dt.placement_types, "_StridedShard", ())
    out = []
    for p in dtensor.placements:
        dim = getattr(p, "dim", 0)
        dim += dtensor.dim() if dim < 0 else 0
        if strided and isinstance(p, strided):
            out.append((STRIDED, dim))
        elif p.is_shard():
            out.append((SHARD, dim))
        elif p.is_replicate():
            out.append((REPLICATE, 0))
        else:
            raise CkptError("unsupported", f"a parameter with the placement {p} can't be loaded")
    return out


class Target:
    """One tensor of the model: where it is, and which part of the whole it holds."""

    def __init__(self, name, tensor, comm):
        self.name, self.tensor = name, tensor
        self.shape = list(tensor.shape)
        self.mesh = None
        self.local = tensor
        if _is_dtensor(tensor):
            self.local = tensor._local_tensor
            try:
                self.mesh = (*comm.mesh(tensor.device_mesh), _place_list(tensor))
            except KeyError as e:
                raise CkptError("usage", f"'{name}': rank {e} of its mesh is not in the process group") from None
        self.late = []  # (staging tensor, what to copy it to) after the load

    def __repr__(self):
        return f"Target({self.name})"


class Loader:
    """The wants of one load."""

    def __init__(self, view, comm, options):
        import torch
        self.view, self.comm = view, comm
        self.device = torch.device("cpu") if comm.device is None else torch.device("cuda", comm.device)
        self.keep = []  # what C holds pointers into
        self.late = []
        self.progress = []
        self.load = new(library().load_new, view._view, comm.handle, byref(options))

    def close(self):
        if self.load:
            library().load_free(self.load)
        self.load = None

    def _destination(self, tensor, dtype):
        """A Dest for a local tensor: itself where C can write it, else a staging tensor that is copied later."""
        import torch
        stored, wanted = dtype, SAFETENSORS.get(str(tensor.dtype).removeprefix("torch."))
        direct = tensor.device == self.device and (stored == wanted or (stored in CASTABLE and wanted in CASTABLE))
        direct = direct and all(s >= 0 for s in tensor.stride()) and not _overlaps(tensor)
        to = tensor
        if not direct:
            keep_dtype = stored == wanted or not (stored in CASTABLE and wanted in CASTABLE)
            to = torch.empty(tensor.shape, dtype=getattr(torch, TORCH[stored]) if keep_dtype else tensor.dtype, device=self.device)
            self.late.append((to, tensor))
        stride = u64s(list(to.stride()))
        self.keep.append((to, stride))
        return Dest(c_void_p(to.data_ptr()), stride, SAFETENSORS[str(to.dtype).removeprefix("torch.")].encode())

    def want_box(self, name, lo, n, tensor):
        info = self.view._tensors[name]
        number = c_size_t()
        library().load_want(self.load, name.encode(), u64s(lo), u64s(n), byref(self._destination(tensor, info.dtype)), byref(number))

    def want(self, target, name):
        """The whole of a target is the tensor `name`."""
        lib, info = library(), self.view._tensors[name]
        if info.shape != target.shape:
            raise CkptError("conflict", f"'{target.name}' has the shape {target.shape}, '{name}' of the checkpoint {info.shape}")
        if target.mesh is None:
            return self.want_box(name, [0] * len(info.shape), info.shape, target.local)
        dims, ranks, places = target.mesh
        mesh = Mesh(len(dims), u32s(dims), u32s(ranks))
        place = (Place * max(len(places), 1))(*[Place(k, d) for k, d in places])
        dest, number, got = self._destination(target.local, info.dtype), c_size_t(), WantInfo()
        lib.load_want_part(self.load, name.encode(), None, None, byref(mesh), place, byref(dest), byref(number))
        lib.load_want_info(self.load, number, byref(got))
        have = list(target.local.shape)
        if [got.n[d] for d in range(got.rank)] != have and target.local.numel():
            raise CkptError("unsupported", f"'{target.name}': torch holds {have} of it here, not {[got.n[d] for d in range(got.rank)]}")

    def run(self, progress):
        import torch
        lib = library()
        lib.load_plan(self.load)
        lib.load_start(self.load)
        total, done, number = len(self.keep), 0, c_size_t()
        bar = _bar(progress, total)
        try:
            while bar is not None and lib.load_next(self.load, NO_LIMIT, byref(number)) == 0:
                done += 1
                bar(done, total)
            lib.load_wait(self.load, NO_LIMIT)
        finally:
            if hasattr(bar, "close"):
                bar.close()
        with torch.no_grad():
            for staging, to in self.late:
                to.copy_(staging)
        stats = Stats()
        lib.load_stats(self.load, None, byref(stats))
        return {name: getattr(stats, name) for name, _ in Stats._fields_}


def _overlaps(t):
    """Do several indices share an element (expanded tensors)?"""
    return any(s == 0 and n > 1 for s, n in zip(t.stride(), t.shape))


def _bar(progress, total):
    if not progress:
        return None
    if callable(progress):
        return progress
    try:
        from tqdm import tqdm
    except ImportError:
        def show(done, of):
            print(f"\rckptfs: {done}/{of} tensors", end="\n" if done == of else "", file=sys.stderr, flush=True)
        return show
    bar = tqdm(total=total, unit="tensor", desc="ckptfs")

    def update(done, of):
        bar.update(done - bar.n)
    update.close = bar.close
    return update


# ---- models ----

def _materialize(model):
    """Give parameters and buffers on the meta device memory, on the CPU or where their mesh is; tied ones stay tied."""
    import torch
    made = {}

    def real(t, is_param):
        if id(t) not in made:
            if _is_dtensor(t):
                from torch.distributed.tensor import DTensor
                local = torch.empty_like(t._local_tensor, device=t.device_mesh.device_type)
                new_t = DTensor.from_local(local, t.device_mesh, t.placements, run_check=False, shape=t.shape, stride=t.stride())
            else:
                new_t = torch.empty_like(t, device="cpu")
            made[id(t)] = (torch.nn.Parameter(new_t, requires_grad=t.requires_grad) if is_param else new_t, t)
        return made[id(t)][0]

    for module in model.modules():
        for table, is_param in ((module._parameters, True), (module._buffers, False)):
            for key, t in table.items():
                if t is not None and t.is_meta and (is_param or key not in module._non_persistent_buffers_set):
                    table[key] = real(t, is_param)


def _is_fsdp1(model):
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(m, fsdp.FullyShardedDataParallel) for m in model.modules())


def _tensors(target):
    """(state dict, model or None, what to call at the end). The state dict's tensors are the model's own."""
    import torch
    if not isinstance(target, torch.nn.Module):
        return dict(target), None, None
    if _is_fsdp1(target):
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        from torch.distributed.fsdp import StateDictType
        with FSDP.state_dict_type(target, StateDictType.SHARDED_STATE_DICT):
            state = target.state_dict()

        def finish():
            with FSDP.state_dict_type(target, StateDictType.SHARDED_STATE_DICT):
                target.load_state_dict(state)
        return state, target, finish
    _materialize(target)
    return target.state_dict(keep_vars=True), target, None


def _memory(t):
    """What entries have in common that share their memory (tied weights); None: it has none."""
    t = t._local_tensor if _is_dtensor(t) else t
    return (t.device, t.data_ptr(), t.shape, t.stride()) if t.numel() else None


def _report(model, missing, unexpected):
    lines = []
    if unexpected:
        lines.append("Unexpected key(s) in state_dict: " + ", ".join(f'"{k}"' for k in unexpected) + ". ")
    if missing:
        lines.insert(0, "Missing key(s) in state_dict: " + ", ".join(f'"{k}"' for k in missing) + ". ")
    what = type(model).__name__ if model is not None else "the state dict"
    return "Error(s) in loading state_dict for {}:\n\t{}".format(what, "\n\t".join(lines))


def _options(readers, options):
    opt = LoadOptions()
    opt.size = _sizeof(LoadOptions)
    opt.readers = READERS[readers]
    for key, value in (options or {}).items():
        setattr(opt, key, value)
    return opt


def _sizeof(struct):
    import ctypes
    return ctypes.sizeof(struct)


def load_state_dict(model_or_state_dict, run, process_group=None, view="hf", base=None, key_mapping=None, strict=True, *, step=None, options=None,
                    readers="auto", load_options=None, progress=False):
    """Fill the tensors of a model or state dict in place with a checkpoint's, on all ranks of a process group together.

    Plain tensors are filled whole; DTensors (FSDP, HSDP, tensor parallelism, any mesh) each rank's part. Parameters on the meta device are
    given memory first. Every byte is read by one rank or by each, whatever is faster (readers="once", "node", "each" say it).

    run                  a run, one checkpoint or a model directory; or an open ckptfs.View
    process_group        None: the default one if torch.distributed is initialised, else this process alone
    view                 "hf": Hugging Face names, the hub's or those that the model's class has in memory; "raw": the framework's own
    base, step, options  as for ckptfs.open (options: a dict)
    key_mapping          {pattern: replacement} from the view's names to the model's, as transformers' from_pretrained has it
    strict               missing or unexpected keys are an error, as in torch
    load_options         {"host_bytes": ..., "threads": ..., "verify": ..., "exchange_timeout_ms": ...}
    progress             True: a bar; or a function of (tensors that have arrived, all)

    Floating tensors are cast to the model's dtype; others must be what the checkpoint has. Returns missing_keys, unexpected_keys, stats.
    """
    state, model, finish = _tensors(model_or_state_dict)
    if view not in ("hf", "raw"):
        raise ValueError(f"view={view!r}: expected 'hf' or 'raw'")
    with Comm(process_group, _device(state)) as comm:
        opened, loader, failure = None, None, None
        try:
            args = dict(options or {}, step=step, view=None if view == "hf" else view, base=base)
            tied = _tied(model)
            opened, names = _open(run, state, key_mapping, tied, args)
            loader = Loader(opened, comm, _options(readers, load_options))
            missing, unexpected = _want_all(state, loader, names, tied)
            if strict and (missing or unexpected):
                raise RuntimeError(_report(model, missing, unexpected))
        except Exception as e:  # the other ranks must hear of it: nobody waits for a rank that has given up
            failure = e
        try:
            _agree(comm, failure)
            stats = loader.run(progress)
        finally:
            if loader:
                loader.close()
            if opened and opened is not run:
                opened.close()
    if finish:
        finish()
    return Loaded(missing, unexpected, stats)


def _device(state):
    """The CUDA device that a state dict's tensors are on; None: on the CPU, or on several."""
    import torch
    found = {t.device if not _is_dtensor(t) else t._local_tensor.device for t in state.values() if isinstance(t, torch.Tensor)}
    found = {d.index if d.index is not None else torch.cuda.current_device() for d in found if d.type == "cuda"}
    return found.pop() if len(found) == 1 else None


def _agree(comm, failure):
    from ._comm import TIMEOUT_MS
    from ._library import CODES, Err
    import ctypes
    err = Err()
    if failure is not None:
        err.code = CODES.index(getattr(failure, "code", "usage"))
        err.text = str(failure).encode()[:1023]
    dll = library()
    raw = dll.comm_agree_raw
    rc = raw(comm.handle, -1 if failure else 0, TIMEOUT_MS, ctypes.byref(err))
    if failure is not None:
        raise failure
    if rc < 0:
        raise CkptError(CODES[err.code], err.text.decode(errors="replace"))


def _missing(state, names, tied):
    import torch
    return [n for n, t in state.items() if isinstance(t, torch.Tensor) and _find(n, names, tied) is None]


def _want_all(state, loader, names, tied):
    """Declare wants for all that the view has. Returns the names that are missing, and those that nobody asked for."""
    import torch
    unused, filled = set(names.values()), set()
    missing = _missing(state, names, tied)
    for name, tensor in state.items():
        source = _find(name, names, tied) if isinstance(tensor, torch.Tensor) else None
        if source is None:
            continue
        unused.discard(source)
        memory = _memory(tensor)
        if memory is None or memory not in filled:
            filled.add(memory)
            loader.want(Target(name, tensor, loader.comm), source)
    missing = [m for m in missing if _memory(state[m]) is None or _memory(state[m]) not in filled]  # tied: its twin was loaded
    shown = {v: k for k, v in names.items()}
    return missing, [shown[v] for v in loader.view.keys() if v in unused]


def _open(run, state, key_mapping, tied, args):
    """The view that knows the state dict's names, and {name: name in the view}: the hub's names, or those that the model's class has in
    memory (transformers stacks experts, for one)."""
    opened = run if isinstance(run, View) else View(run, **args)
    names = _mapped(opened.keys(), key_mapping)
    if isinstance(run, View) or args["view"] is not None or not _missing(state, names, tied):
        return opened, names
    other = View(run, **dict(args, view="memory"))
    other_names = _mapped(other.keys(), key_mapping)
    if len(_missing(state, other_names, tied)) < len(_missing(state, names, tied)):
        opened.close()
        return other, other_names
    other.close()
    return opened, names
