# SPDX-License-Identifier: Apache-2.0
"""Fills models and state dicts in place, on every rank its part."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from ctypes import byref, c_void_p
from typing import TYPE_CHECKING, Any, Callable

from ._comm import IDLE_S, joined, timeout_of
from ._library import CkptError, library, take_bytes, warn
from ._load import make_options, run_together
from ._match import Match, combined, result_of
from ._targets import device_of, parts_of
from ._tensors import is_meta
from ._view import Run, View, spelled

if TYPE_CHECKING:
    import torch

    from ._comm import Group
    from ._view import Path

TORCHTITAN = "tok_embeddings.weight"  # a name by which torchtitan's models are known


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
    no_dist: bool = False,
    step: str | int | None = None,
    missing: str | None = None,
    names: Iterable[str] | Callable[[str], bool] | None = None,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    options: Mapping[str, Any] | None = None,
    readers: str = "auto",
    load_options: Mapping[str, Any] | None = None,
    progress: bool | Callable[[int, int], None] = False,
    **more: Any,
) -> torch.nn.modules.module._IncompatibleKeys:
    """Fill the tensors of a model or state dict in place, on all ranks of a group together.

    Plain tensors are filled whole; of DTensors (FSDP, HSDP, tensor parallelism, any mesh) and
    ShardedTensors each rank fills its part. Tensors on the meta device get memory when the load has
    succeeded: models get new parameters, of the same class and with the same attributes, and state
    dicts get new tensors (DTensors with the same mesh and placements). Every byte is read by one
    rank or by each, whichever is faster.

    Floating tensors are cast to the model's dtype, except float8_e4m3fn: a model's parameter
    becomes that. Memory layouts stay as they are. If the checkpoint has several tensors for names
    of one tensor (tied weights), they must be equal. If nothing could be loaded, models and state
    dicts are unchanged, except for tensors that had memory if the error came while they were being
    filled.

    Args:
        model_or_state_dict: A torch.nn.Module, a state dict, or a list of them, such as the stages
            of a pipeline that this rank holds.
        run: A run, one checkpoint, a model directory, or an open View (view, base, step and options
            are the View's then).
        process_group: The ranks that load together: a torch process group, a DeviceMesh, or a Comm.
            None is the default group, or this process if torch.distributed is not initialised.
        view: The names: None or "hf" for those that fit, of Hugging Face's on the hub, those that
            the model's class has in memory, and torchtitan's; "torchtitan" for these alone; "raw"
            for the framework's own, with optimizer states. In "raw" views nested dicts and
            lists are named as torch's distributed checkpoints name them, and values that are not
            tensors (lr, betas, _extra_state) are replaced by those of View.objects().
        base: As for open.
        key_mapping: {pattern: replacement} from the view's names to the model's, as in
            transformers' from_pretrained; or the path of a JSON file of that.
        strict: Missing or unexpected keys are an error, as in torch. Another shape always is. A
            name that the model of any rank has is not unexpected.
        no_dist: True loads in this process alone, whatever groups there are.
        step: As for open.
        missing: None leaves parameters that the checkpoint lacks as they are. "init" initialises
            them as their classes do (transformers' _init_weights, or reset_parameters), equally on
            all ranks, and then they are not an error.
        names: Names of the model, or a function of a name: only these are filled, and nothing else
            is missing or unexpected. None fills all.
        device: Where tensors on the meta device get memory; None is torch's default device.
            DTensors get it where their mesh is.
        dtype: The torch.dtype, a floating one, of floating tensors that get memory; None is the
            model's. A word such as "float32" is the option of open, which converts what is read.
        optimizer: An Adam or AdamW of the model's parameters: its states are filled, too, of a run
            of any format that has them, and its groups get the run's lr, betas, eps, weight_decay
            and initial_lr, which options (lr=...) replace. The weights are the run's F32 masters
            then, if it has them, cast to the model's dtype. What says how torch computes (fused,
            foreach) stays. The view may be None, "hf" or "memory".
        options: As for open.
        readers: "once" (each byte is read once), "node" (once on each node), "each" (by each rank
            that needs it), or "auto".
        load_options: Fields of struct ckpt_load_options in include/ckptfs/load.h: {"host_bytes":
            ..., "threads": ..., "verify": ..., "rates": {...}, ...}. "exchange_timeout_ms" is also
            how long to wait for ranks that do not come. "share_with" is a process group or
            DeviceMesh, each rank's own, such as Megatron's data-parallel group: only ranks that
            give the same one share what they read. Ranks that are not in the one they give share
            with no other, and ranks that give None share with each other. "idle_s" is how many
            seconds pinned memory and communicators are kept for the next load (60; None:
            until release()).
        progress: True shows a bar on rank 0. A function is called on each rank with the number of
            tensors that have arrived, and of all.
        **more: Further options of open; and local_files=True, where each node has only some of the
            run's files, such as those that its own ranks have saved: each file is read on a node
            that has it, and sent to the ranks that need it. The path may contain {node} and
            {rank}, the numbers of this rank's node and of the rank.

    Returns: What torch's load_state_dict returns, a named tuple of missing_keys and
        unexpected_keys, which is the same on all ranks. Its attribute `stats` has the statistics of
        all ranks together; sizes in bytes, times in seconds.

    Raises:
        RuntimeError: Keys or shapes do not fit, in torch's words. All ranks raise it.
        CkptError: Any other error in loading; `code` says which kind. All ranks raise it.
            "conflict" is for tied weights with different values, and for tensors that share a part
            of their memory.
        TypeError: An argument is wrong. Other ranks raise a CkptError then.
        ValueError: An argument is wrong. Other ranks raise a CkptError then.
    """
    from . import _optimizer as own

    if isinstance(dtype, str) and optimizer is None:  # an option of the view
        more["dtype"], dtype = dtype, None

    def prepare():
        if missing not in (None, "init"):
            raise ValueError(f"missing={missing!r}: expected 'init' or None")
        native = make_options(readers, load_options)
        given = dict(options or {}), dict(more, base=base, step=step)
        if optimizer is not None:
            own.check_arguments(optimizer, names=names, missing=missing, device=device, dtype=dtype)
            spec = own.TrainingSpec(run, view, *given)
        else:
            spec = Spec(run, view, *given)
        if device is not None:
            stack.enter_context(_default(device))
        parts = parts_of(model_or_state_dict)
        if optimizer is not None:
            spec.expect(parts)
        lost = _choose(parts, names, dtype)
        return native, spec, (parts, lost), device_of(parts)

    with contextlib.ExitStack() as stack:
        with together(process_group, no_dist, prepare) as (comm, native, spec, (parts, lost)):
            match, findings = _agreed(comm, spec, parts, key_mapping, missing == "init")
            _check_names(comm, lost)
            result = result_of(match, findings, strict, missing == "init", names is not None)
            if optimizer is not None:
                states = own.agreed_states(comm, match, optimizer, strict)
                result.stats = own.fill(comm, match, states, findings["copies"], native, progress)
                states.put()
            else:
                result.stats = _fill(comm, match, findings["copies"], native, progress)
        _finish(parts, match, result, findings["seed"] if missing == "init" else None, dtype)
        return result


@contextlib.contextmanager
def together(process_group, no_dist, prepare):
    """Connect the ranks for one load; yields (comm, native options, Spec, what is to be filled).

    prepare() returns the last three and the number of a CUDA device, or None. If it fails on one
    rank, all ranks raise: no rank waits for one that has given up.
    """
    native = spec = target = device = failure = None
    try:
        native, spec, target, device = prepare()
    except Exception as e:
        failure = e
    idle_s = native.idle_s if native is not None else IDLE_S
    with joined(process_group, device, timeout_of(native), failure, no_dist, idle_s) as comm, spec:
        spec.check(comm)
        yield comm, native, spec, target


def _default(device):
    import torch

    return torch.device(device)


def _choose(parts, names, dtype):
    """Narrow the parts to what is to be filled, and note the dtype that it shall have.

    Returns the names that no part has.
    """
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
    """Raise ValueError for names= that no rank has: a pipeline's stage does not have all."""
    lost = comm.share(lambda: lost, lambda words: sorted(set(words[0]).intersection(*words[1:])))
    if lost:
        raise ValueError(
            f"names=: nothing that is to be filled is called {', '.join(lost[:8])}"
            f"{' ...' if len(lost) > 8 else ''}"
        )


def _finish(parts, match, result, seed, dtype):
    """Do what is left once all tensors have arrived.

    `seed`: what the checkpoint lacks is initialised from it; None leaves it as it is.
    """
    for value, stored in match.values:
        value.put(stored)
    for part, lacking in zip(parts, match.lacking):
        if seed is not None:
            part.initialise([e.tensor for e in lacking], seed, dtype)
        part.finish(result)
    _warn_of_meta(match.lacking if seed is None else [])


class Spec:
    """A run and how its view is opened. It closes the views that it has opened."""

    def __init__(self, run, view, options, more):
        if view is not None and not isinstance(view, str):
            raise ValueError(
                f"view={view!r}: expected a word such as 'hf', 'memory', 'raw' or 'torchtitan'"
            )
        self.run, self.opened = run, []
        self.given = dict(spelled(options, more), view=None if view == "hf" else view)
        if isinstance(run, View):
            named = sorted(k for k, v in dict(self.given, view=view).items() if v is not None)
            if named:
                raise ValueError(
                    f"{', '.join(n + '=' for n in named)} with an open View: it was opened with "
                    "its own options; give the run's path, or open the View with these"
                )
            run.check()

    def check(self, comm):
        """Check that all ranks give an open View of the same step, or that all give a run."""
        step = self.run._step if isinstance(self.run, View) else None
        problem = comm.share(lambda: [isinstance(self.run, View), step], _difference)
        if problem is not None:
            raise CkptError(*problem)

    def has_other(self):
        """Return whether views() has a second view."""
        return self.run.is_plain() if isinstance(self.run, View) else self.given["view"] is None

    def views(self, comm):
        """Yield the view that was asked for, then those whose names may fit better.

        All ranks open them together. Names as on the hub come first, then those that the model's
        class has in memory (transformers stacks experts, for example).
        """
        first = (
            self.run
            if isinstance(self.run, View)
            else self._keep(View(self.run, comm=comm, **self.given))
        )
        yield first
        yield self._keep(first.again(comm, view="memory"))
        yield self._keep(first.again(comm, view="torchtitan"))

    def keep_only(self, view):
        """Close the views that were opened, except this one."""
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
    """Return what is wrong with all ranks' [is it a View, of which step]: [code, text], or None."""
    if len({is_view for is_view, _ in words}) > 1:
        return [
            "usage",
            "run is an open View on some ranks and a path on others: give all ranks the same",
        ]
    others = sorted({step or "" for _, step in words} - {words[0][1] or ""})
    if others:
        return [
            "conflict",
            f"the View of one rank is of step '{others[0]}', that of rank 0 of '{words[0][1]}': "
            "all load the same step",
        ]
    return None


def step_folder(run, step=None, group=None):
    """Return the path of the step that all ranks of a process group load.

    `step` None is the latest one that rank 0 sees; of one checkpoint it is the checkpoint's own
    path. If `run` is a link, as a mount's `latest` is, all ranks take what it leads to on rank 0
    now.
    """
    seen = failure = None
    asked = None if step is None else str(step)
    try:
        run = os.fsdecode(run)
        at = os.path.realpath(run) if os.path.islink(run) else run
        seen = Run(at)
    except Exception as e:  # the other ranks are told
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
                f"step '{other}' is asked for on one rank, but rank 0 loads '{found}': all load "
                "the same step",
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
    """Return rank 0's step, another one that a rank asks for or None, and the run's name."""
    asked, found, name = words[0]
    others = sorted({a for a, _, _ in words if a is not None} - {asked, found})
    return [found, others[0] if others else None, name]


def _agreed(comm, spec, parts, key_mapping, init):
    """Return the match with the view that has most of the names, and what all ranks found."""
    found, views = [], spec.views(comm)

    def prepare(view):
        match = Match(view, parts, _mapping(key_mapping))
        found.append(match)
        if init:
            match.check_initialise()
        return match.word(other=spec.has_other())

    def finding():
        view = next(views)
        return comm.share(lambda: prepare(view), combined)

    findings = [finding()]
    if findings[0]["missing"] and findings[0]["other"]:
        findings.append(finding())
        if any(name.endswith(TORCHTITAN) for name in findings[-1]["missing"]):
            findings.append(finding())
    best = min(range(len(found)), key=lambda i: len(findings[i]["missing"]))
    spec.keep_only(found[best].view)
    return found[best], findings[best]


def _fill(comm, match, copies, native, progress):
    def declare(load):
        load.compares = copies
        for entry, source in match.pairs + match.copies:
            load.want(entry, source)

    return run_together(comm, lambda: match.view, declare, native, progress)


def _warn_of_meta(lacking):
    """Warn of tensors that the checkpoint lacks and that have no memory: they can't be used."""
    names = [e.name for part in lacking for e in part if is_meta(e.tensor)]
    if names:
        warn(
            "not in the checkpoint, so still on the meta device (missing='init' initialises them): "
            f"{', '.join(names[:8])}"
            f"{f' and {len(names) - 8} more' if len(names) > 8 else ''}"
        )


def _mapping(key_mapping):
    if isinstance(key_mapping, (str, os.PathLike)):
        with open(key_mapping, encoding="utf-8") as f:
            return json.load(f)
    return key_mapping
