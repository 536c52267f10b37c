# SPDX-License-Identifier: Apache-2.0
"""Filling models and state dicts in place: every rank its part."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from ctypes import byref, c_void_p
from typing import TYPE_CHECKING, Any, Callable, Iterable, Mapping, Sequence

from ._comm import TIMEOUT_MS, joined
from ._library import CkptError, library, take_bytes
from ._load import make_options, run_together
from ._match import Match, combined, judge
from ._targets import device_of, parts_of
from ._tensors import is_meta
from ._view import Run, View, spelled

if TYPE_CHECKING:
    import torch

    from ._comm import Group
    from ._view import Path


def load_state_dict(
    model_or_state_dict: torch.nn.Module
    | Mapping[str, Any]
    | Sequence[torch.nn.Module | Mapping[str, Any]],
    run: Path | View,
    process_group: Group = None,
    view: str | None = None,
    base: Path | None = None,
    key_mapping: Mapping[str, str] | Path | None = None,
    strict: bool = True,
    *,
    step: str | int | None = None,
    missing: str | None = None,
    names: Iterable[str] | Callable[[str], bool] | None = None,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | str | None = None,
    options: Mapping[str, Any] | None = None,
    readers: str = "auto",
    load_options: Mapping[str, Any] | None = None,
    progress: bool | Callable[[int, int], None] = False,
    **more: Any,
) -> torch.nn.modules.module._IncompatibleKeys:
    """Fill the tensors of a model or state dict in place with a checkpoint's, on all ranks of a process group together.

    Plain tensors are filled whole; DTensors (FSDP, HSDP, tensor parallelism, any mesh) and ShardedTensors each rank's part. What is on the meta
    device gets memory when the load has succeeded: models get new parameters, state dicts new tensors in place of the meta ones (DTensors with
    the same mesh and placements). Every byte is read by one rank or by each, whatever is faster (readers="once", "node", "each" say it).

    model_or_state_dict  a torch.nn.Module, a state dict, or a list of them: the stages of a pipeline that this rank holds
    run                  a run, one checkpoint or a model directory; or an open ckptfs.View (then view=, base=, step= and options are the View's)
    process_group        None: the default one if torch.distributed is initialised, else this process alone; False: this process alone; or a Comm
    view                 "hf" (default): Hugging Face names, the hub's or those that the model's class has in memory; "raw": the framework's own, and
                         optimizer states too: nested dicts and lists are named as torch's distributed checkpoints name them; what is no tensor in
                         them (lr, betas, _extra_state) is replaced by what View.objects() has, and missing where that has nothing plain;
                         "torchtitan": the model under torchtitan's names, of any checkpoint that is read, Hugging Face directories included
    base, step, options  as for ckptfs.open, which also says how other options are given
    key_mapping          {pattern: replacement} from the view's names to the model's, as transformers' from_pretrained has it; or a JSON file of that
    strict               missing or unexpected keys are an error, as in torch; another shape always is. What some rank's model has is not unexpected
    missing              "init": parameters that the checkpoint lacks are no error; they are initialised as by their classes (transformers'
                         _init_weights, or reset_parameters), alike on all ranks. None: they stay as they were, on the meta device if they were there
    names                a collection of the model's names, or a function of a name: only these are filled, nothing else is missing or unexpected
    device               where what is on the meta device gets memory; None: torch's default device. DTensors get it where their mesh is
    dtype                a torch.dtype: floating tensors that get memory get it in this one; None: as the model's. A word such as "float32" is the
                         option of ckptfs.open instead, which converts what is read
    load_options         {"host_bytes": ..., "threads": ..., "verify": ..., "exchange_timeout_ms": ..., "rates": {...}};
                         exchange_timeout_ms is also how long to wait for ranks that do not come. {"share_with": a process group}: only ranks that
                         give the same group (each its own: Megatron's data-parallel group) share what they read; ranks that are not in what they
                         give share with none, and those that give None with each other
    progress             True: a bar, on rank 0; or a function of (tensors that have arrived, all), called on each rank

    Floating tensors are cast to the model's dtype, but for float8_e4m3fn: a model's parameter becomes that. Memory layouts stay as they are. Names of one
    tensor (tied weights) that the checkpoint has several tensors for must be copies of each other there: CkptError "conflict",
    as are tensors that share a part of their memory.
    Returns what torch's load_state_dict does, a named tuple of missing_keys and unexpected_keys, the same on all ranks, with `stats` beside them.

    Errors, on all ranks: RuntimeError in torch's words for keys and shapes; CkptError with its `code` for all else; TypeError and ValueError for
    arguments, where the other ranks get a CkptError. If nothing could be loaded, models and state dicts are as before, but for tensors that had
    memory if the failure came while it was being filled.
    """
    with contextlib.ExitStack() as stack:
        parts, spec, native, failure, lost = None, None, None, None, []
        try:
            if missing not in (None, "init"):
                raise ValueError(f"missing={missing!r}: expected 'init' or None")
            native = make_options(readers, load_options)
            if isinstance(dtype, str):  # an option of the view
                more["dtype"], dtype = dtype, None
            spec = Spec(run, view, dict(options or {}), dict(more, base=base, step=step))
            if device is not None:
                stack.enter_context(_default(device))
            parts = parts_of(model_or_state_dict)
            lost = _choose(parts, names, dtype)
        except (
            Exception
        ) as e:  # the other ranks must hear of it: nobody waits for a rank that has given up
            failure = e
        timeout_ms = (native.exchange_timeout_ms if native else 0) or TIMEOUT_MS
        on = device_of(parts) if parts is not None and failure is None else None
        with joined(process_group, on, timeout_ms, failure) as comm, spec:  # raises the failure
            spec.check(comm)
            match, verdict = _agreed(comm, spec, parts, key_mapping, missing == "init")
            _check_names(comm, lost)
            result = judge(match, verdict, strict, missing == "init", names is not None)
            result.stats = _fill(comm, match, verdict["copies"], native, progress)
        _finish(parts, match, result, verdict["seed"] if missing == "init" else None, dtype)
        return result


def _default(device):
    import torch

    return torch.device(device)


def _choose(parts, names, dtype):
    """Narrow the parts to what is to be filled, as it is to be. Returns the names that none of them has."""
    if dtype is not None:
        import torch

        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(
                f"dtype={dtype!r}: expected a floating torch.dtype, or a word for what is read"
            )
        for part in parts:
            for entry in part.entries:
                entry.dtype = dtype
    if names is None:
        return []
    if isinstance(names, str):
        raise ValueError(
            f"names={names!r}: expected a collection of names, or a function of a name"
        )
    wanted = names if callable(names) else set(names).__contains__
    found = set().union(*[part.choose(wanted) for part in parts])
    return [] if callable(names) else sorted(set(names) - found)


def _check_names(comm, lost):
    """names= must be somebody's: a stage of a pipeline has not all of them."""
    lost = comm.share(lambda: lost, lambda words: sorted(set(words[0]).intersection(*words[1:])))
    if lost:
        raise ValueError(
            f"names=: nothing that is to be filled is called {', '.join(lost[:8])}{' ...' if len(lost) > 8 else ''}"
        )


def _finish(parts, match, result, seed, dtype):
    """What is left once all tensors have arrived. seed: what the checkpoint lacks is initialised from it; None: it stays."""
    for value, stored in match.values:
        value.put(stored)
    for part, lacking in zip(parts, match.lacking):
        if seed is not None:
            part.initialise([e.tensor for e in lacking], seed, dtype)
        part.finish(result)
    _warn_of_meta(match.lacking if seed is None else [])


class Spec:
    """Which view: `run`, and how it is opened. Closes what it has opened."""

    def __init__(self, run, view, options, more):
        if view is not None and not isinstance(view, str):
            raise ValueError(
                f"view={view!r}: expected a word such as 'hf', 'memory', 'raw' or 'torchtitan'"
            )
        self.run, self.given = (
            run,
            dict(spelled(options, more), view=None if view == "hf" else view),
        )
        self.opened = []
        if isinstance(run, View):
            named = sorted(k for k, v in dict(self.given, view=view).items() if v is not None)
            if named:
                raise ValueError(
                    f"{', '.join(n + '=' for n in named)} with an open View: it was opened with its own options; give the run's path, "
                    "or open the View with these"
                )
            run.check()

    def check(self, comm):
        """Do all ranks give the same: an open View of the same step, or a run, which they open together?"""
        step = self.run._step if isinstance(self.run, View) else None
        problem = comm.share(lambda: [isinstance(self.run, View), step], _difference)
        if problem is not None:
            raise CkptError(*problem)

    def has_other(self):
        return self.run.is_plain() if isinstance(self.run, View) else self.given["view"] is None

    def views(self, comm):
        """Opened by all ranks together: the view that was asked for, then one whose names may fit better where it lacks some: the hub's names first, then those that the
        model's class has in memory (transformers stacks experts, for one).
        """
        first = (
            self.run
            if isinstance(self.run, View)
            else self._keep(View(self.run, comm=comm, **self.given))
        )
        yield first
        yield self._keep(first.again(comm, view="memory"))

    def keep_only(self, view):
        for other in self.opened:
            if other is not view:
                other.close()

    def _keep(self, view):
        self.opened.append(view)
        return view

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.keep_only(None)


def _difference(words):
    """What is wrong with all ranks' [is it a View, of which step]: [code, text], or None."""
    if len({is_view for is_view, _ in words}) > 1:
        return [
            "usage",
            "run is an open View on some ranks and a path on others: give all ranks the same",
        ]
    others = sorted({step or "" for _, step in words} - {words[0][1] or ""})
    if others:
        return [
            "conflict",
            f"the View of one rank is of step '{others[0]}', that of rank 0 of '{words[0][1]}': all load the same step",
        ]
    return None


def step_folder(run, step=None, group=None):
    """The path of the step that all ranks of a process group load (None: the latest, rank 0's); of one checkpoint, its own. A `run` that is a link, as
    a mount's `latest`, means what it leads to now, for all ranks what it leads to on rank 0.
    """
    seen = failure = None
    asked = None if step is None else str(step)
    try:
        run = os.fsdecode(run)
        at = os.path.realpath(run) if os.path.islink(run) else run
        seen = Run(at)
    except Exception as e:  # the other ranks must hear of it
        failure = e
    with joined(group, failure=failure) as comm, seen:
        found, other, name = comm.share(
            lambda: [
                asked,
                seen.find_step(asked) if comm.rank == 0 else None,
                os.path.basename(at),
            ],
            _one_step,
        )
        if other is not None:
            raise CkptError(
                "conflict",
                f"step '{other}' is asked for on one rank, but rank 0 loads '{found}': all load the same step",
            )
        text = c_void_p()  # a rank may see it a little later
        library().comm_step(
            comm.handle,
            seen.handle,
            os.fsencode(found) if found else None,
            comm.timeout_ms,
            byref(text),
        )
        beside = os.path.join(os.path.dirname(at), name)
        if (
            at != run and not found and os.path.exists(beside)
        ):  # the link has moved between two ranks
            at = beside
        return os.path.join(at, os.fsdecode(take_bytes(text)))


def _one_step(words):
    """[rank 0's step, a step that another rank asked for instead or None, rank 0's name], of what all ranks [asked for, found, are named]."""
    asked, found, name = words[0]
    others = sorted({a for a, _, _ in words if a is not None} - {asked, found})
    return [found, others[0] if others else None, name]


def _agreed(comm, spec, parts, key_mapping, init):
    """The match of all ranks' tensors with the view that has most of their names, and the verdict on it."""
    found, views = [], spec.views(comm)

    def prepare(view):
        match = Match(view, parts, _mapping(key_mapping))
        found.append(match)
        if init:
            match.check_initialise()
        return match.word(other=spec.has_other())

    def verdict():
        view = next(views)
        return comm.share(lambda: prepare(view), combined)

    verdicts = [verdict()]
    if verdicts[0]["missing"] and verdicts[0]["other"]:
        verdicts.append(verdict())
    best = min(range(len(found)), key=lambda i: len(verdicts[i]["missing"]))
    spec.keep_only(found[best].view)
    return found[best], verdicts[best]


def _fill(comm, match, copies, native, progress):
    def declare(load):
        load.compares = copies
        for entry, source in match.pairs + match.copies:
            load.want(entry, source)

    return run_together(comm, lambda: match.view, declare, native, progress)


def _warn_of_meta(lacking):
    """What the checkpoint lacks and has no memory can't be computed with."""
    names = [e.name for part in lacking for e in part if is_meta(e.tensor)]
    if names:
        warnings.warn(
            f"not in the checkpoint, so still on the meta device (missing='init' initialises them): {', '.join(names[:8])}"
            f"{f' and {len(names) - 8} more' if len(names) > 8 else ''}",
            stacklevel=3,
        )


def _mapping(key_mapping):
    if isinstance(key_mapping, (str, os.PathLike)):
        with open(key_mapping, encoding="utf-8") as f:
            return json.load(f)
    return key_mapping
