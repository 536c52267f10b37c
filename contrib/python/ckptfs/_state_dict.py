# SPDX-License-Identifier: Apache-2.0
"""Filling models and state dicts in place: every rank its part."""

import json
import os
from ctypes import byref, c_void_p

from ._comm import TIMEOUT_MS, Comm
from ._library import CODES, CkptError, Err, library, take_bytes
from ._load import Load, make_options
from ._names import Names, tied_names
from ._tensors import Entries, memory
from ._view import Run, View


def load_state_dict(model_or_state_dict, run, process_group=None, view="hf", base=None, key_mapping=None, strict=True, *, step=None, options=None,
                    readers="auto", load_options=None, progress=False):
    """Fill the tensors of a model or state dict in place with a checkpoint's, on all ranks of a process group together.

    Plain tensors are filled whole; DTensors (FSDP, HSDP, tensor parallelism, any mesh) and ShardedTensors each rank's part. Parameters on the
    meta device are given memory first. Every byte is read by one rank or by each, whatever is faster (readers="once", "node", "each" say it).

    run                  a run, one checkpoint or a model directory; or an open ckptfs.View
    process_group        None: the default one if torch.distributed is initialised, else this process alone
    view                 "hf": Hugging Face names, the hub's or those that the model's class has in memory; "raw": the framework's own, and
                         optimizer states too: nested dicts and lists are named as torch's distributed checkpoints name them
    base, step, options  as for ckptfs.open (options: a dict)
    key_mapping          {pattern: replacement} from the view's names to the model's, as transformers' from_pretrained has it; or a JSON file of that
    strict               missing or unexpected keys are an error, as in torch; another shape always is
    load_options         {"host_bytes": ..., "threads": ..., "verify": ..., "exchange_timeout_ms": ..., "io": "uring", "rates": {...}}
    progress             True: a bar; or a function of (tensors that have arrived, all)

    Floating tensors are cast to the model's dtype, but for float8_e4m3fn: a model's parameter becomes that. Memory layouts stay as they are.
    Returns what torch's load_state_dict does, a named tuple of missing_keys and unexpected_keys, with `stats` beside them.
    """
    entries, seen, opened, load, failure, stats = None, None, None, None, None, None
    args = dict(options or {}, view=None if view == "hf" else view, base=base)
    try:
        if view not in ("hf", "raw"):
            raise ValueError(f"view={view!r}: expected 'hf' or 'raw'")
        entries = Entries(model_or_state_dict)
        seen = None if isinstance(run, View) else Run(run, **args)
    except Exception as e:  # the other ranks must hear of it: nobody waits for a rank that has given up
        failure = e
    with Comm(process_group, entries.device() if entries else None) as comm:
        try:
            _agree(comm, failure)
            if seen:
                step = _same_step(comm, seen, step)
        finally:
            if seen:
                seen.close()
        try:
            opened, names = _open(run, entries, key_mapping, dict(args, step=step))
            load = Load(opened, comm, make_options(readers, load_options))
            result = _want_all(entries, load, names)
            _judge(entries, load, result, strict)
        except Exception as e:
            failure = e
        try:
            _agree(comm, failure)
            stats = load.run(progress)
        finally:
            if load:
                load.close()
            if opened and opened is not run:
                opened.close()
    entries.finish(result)
    result.stats = stats
    return result


def _result(missing, unexpected):
    from torch.nn.modules.module import _IncompatibleKeys

    class Loaded(_IncompatibleKeys):
        stats = None
    return Loaded(missing, unexpected)


def _agree(comm, failure):
    """Does every rank go on? If not, all raise: whoever failed its own error."""
    err = Err()
    if failure is not None:
        err.code = CODES.index(getattr(failure, "code", "usage"))
        err.text = str(failure).encode()[:1023]
    rc = library().comm_agree_raw(comm.handle, -1 if failure else 0, TIMEOUT_MS, byref(err))
    if failure is not None:
        raise failure
    if rc < 0:
        raise CkptError(CODES[err.code], err.text.decode(errors="replace"))


def _same_step(comm, run, step):
    """Rank 0's step of the run, on all ranks: each may see another one as the latest."""
    text = c_void_p()
    library().comm_step(comm.handle, run.handle, None if step is None else os.fsencode(str(step)), TIMEOUT_MS, byref(text))
    return os.fsdecode(take_bytes(text))


def _missing(entries, names):
    return [n for n in entries.tensors if names.find(n) is None]


def _want_all(entries, load, names):
    """Declare wants for all that the view has: the names that are missing, and those that nobody asked for."""
    unused, filled, missing = set(names.source.values()), set(), []
    for name, tensor in entries.tensors.items():
        source = names.find(name)
        if source is None:
            missing.append(name)
            continue
        unused.discard(source)
        where = memory(tensor)
        if where is None or where not in filled:
            filled.add(where)
            load.want(name, tensor, source, (lambda local, t=tensor: entries.replace(t, local)) if entries.can_replace() else None)
    missing = [m for m in missing if memory(entries.tensors[m]) is None or memory(entries.tensors[m]) not in filled]  # tied: its twin is loaded
    shown = {v: k for k, v in names.source.items()}
    return _result(missing, [shown[v] for v in load.view.keys() if v in unused])


def _judge(entries, load, result, strict):
    """Errors in torch's words."""
    lines = list(load.mismatched)
    if strict and result.unexpected_keys:
        lines.insert(0, "Unexpected key(s) in state_dict: " + ", ".join(f'"{k}"' for k in result.unexpected_keys) + ". ")
    if strict and result.missing_keys:
        lines.insert(0, "Missing key(s) in state_dict: " + ", ".join(f'"{k}"' for k in result.missing_keys) + ". ")
    if lines:
        raise RuntimeError("Error(s) in loading state_dict for {}:\n\t{}".format(entries.name, "\n\t".join(lines)))


def _open(run, entries, key_mapping, args):
    """The view that knows the model's names, and the names: the hub's, or those that the model's class has in memory (transformers stacks
    experts, for one)."""
    if isinstance(key_mapping, (str, os.PathLike)):
        with open(key_mapping, encoding="utf-8") as f:
            key_mapping = json.load(f)
    tied = tied_names(entries.model)
    opened = run if isinstance(run, View) else View(run, **args)
    names = Names(opened, key_mapping, tied)
    missing = [] if isinstance(run, View) or args["view"] is not None else _missing(entries, names)
    if not missing:
        return opened, names
    other = View(run, **dict(args, view="memory"))
    other_names = Names(other, key_mapping, tied)
    if len(_missing(entries, other_names)) < len(missing):
        opened.close()
        return other, other_names
    other.close()
    return opened, names
