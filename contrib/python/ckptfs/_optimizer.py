# SPDX-License-Identifier: Apache-2.0
"""Fills the states of AdamW beside a model, on every rank its part."""

from __future__ import annotations

from typing import Any

from ._library import CkptError, warn
from ._load import run_together
from ._names import tied_names
from ._state_dict import Spec
from ._targets import Entry, Model
from ._tensors import is_meta
from ._view import View

MOMENTS = ("exp_avg", "exp_avg_sq")
HYPER = ("lr", "betas", "eps", "weight_decay", "initial_lr")


class Weights:
    """The model's tensors in the view "dcp" with an optimizer, under their names without "model.".

    Args:
        view: The view.
        tied: {name: the name that it is tied to}: the view has both, and one is enough.
    """

    def __init__(self, view, tied):
        self.view = view
        names = [name[len("model.") :] for name in view._tensors if name.startswith("model.")]
        self._tensors = {
            name: view._tensors["model." + name]
            for name in names
            if name not in tied
            or _name(name, MOMENTS[0]) in view._tensors
            or tied[name] not in names
        }

    def keys(self):
        """Return the tensors' names, in the checkpoint's order."""
        return list(self._tensors)

    def is_raw(self):
        """Return False: the names are the model's."""
        return False

    def close(self):
        """Close the view."""
        self.view.close()


class TrainingSpec(Spec):
    """A run, opened as a model and its optimizer: the view "dcp" with the option optimizer."""

    def __init__(self, run, view, options, more):
        if isinstance(run, View):
            raise ValueError("optimizer= with an open View: give the run's path")
        if view not in (None, "hf", "memory"):
            raise ValueError(f"optimizer= goes with view='memory', not with view={view!r}")
        self._one, self._tied = view is not None, {}
        names = "memory" if view == "memory" else "hub"
        super().__init__(run, "dcp", options, dict(more, optimizer=True, names=names))

    def expect(self, parts):
        """Note which names the models that are to be filled tie to others."""
        for part in parts:
            self._tied.update(tied_names(part.model))

    def has_other(self):
        """Return whether views() has a second view."""
        return not self._one

    def views(self, comm):
        """Yield the view with the hub's names, then one with those of the class in memory."""
        first = View(self.run, comm=comm, **self.given)
        yield self._keep(Weights(first, self._tied))
        yield self._keep(Weights(first.again(comm, names="memory"), self._tied))
        raise CkptError(
            "unsupported",
            "optimizer= fills models with the hub's names or those of transformers' classes; for "
            "torchtitan's names use dcp.load with ckptfs.torch.StorageReader(RUN, "
            "view='torchtitan', optimizer=True), or let its CheckpointManager load what `ckpt "
            "export RUN DIR -o view=torchtitan -o optimizer` writes; both with fuse_qkv for a "
            "model that fuses q, k and v",
        )


def check_arguments(optimizer: Any, **given: Any) -> None:
    """Check that the optimizer is Adam's kind, and that nothing is asked for beside it."""
    import torch

    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer: expected a torch.optim.Optimizer, not {type(optimizer)}")
    if "betas" not in optimizer.defaults or any(g.get("amsgrad") for g in optimizer.param_groups):
        raise TypeError(
            f"optimizer: {type(optimizer).__name__} has other states than AdamW without amsgrad "
            "(step, exp_avg, exp_avg_sq), which are those that are filled"
        )
    named = sorted(name for name, value in given.items() if value is not None)
    if named:
        raise ValueError(f"{', '.join(n + '=' for n in named)} does not go with optimizer=")


class States:
    """The states of one rank's parameters, and the groups that they are in.

    Args:
        match: The Match of the model's tensors with those of Weights.
        optimizer: The optimizer.
        strict: A parameter of the optimizer without states in the run is an error.
    """

    def __init__(self, match, optimizer, strict):
        self.view, self._optimizer = match.view.view, optimizer
        _check_parts(match)
        stored = {id(e.tensor): (e, source) for e, source in match.pairs}
        groups = self.view.objects()["optim.param_groups"]
        self._group_of = {name: i for i, g in enumerate(groups) for name in g["params"]}
        self.pairs: list[tuple[Entry, str]] = []
        self._filled: list[tuple[Any, dict[str, Any]]] = []
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
        lost = []
        for group in optimizer.param_groups:
            mine = [stored[id(p)] for p in group["params"] if id(p) in stored]
            if len(mine) < len(group["params"]):
                raise CkptError(
                    "usage",
                    f"{len(group['params']) - len(mine)} parameters of the optimizer are none of "
                    "the model's that are filled: give load_state_dict the model whose parameters "
                    "it has",
                )
            lost += [e.name for e, source in mine if source not in self._group_of]
            found = [(e, source) for e, source in mine if source in self._group_of]
            for entry, source in found:
                self._add(entry, source, group)
            if found:
                self._groups.append((group, self._one_group(groups, found)))
        if lost and strict:
            raise CkptError(
                "missing",
                f"the run has no state of {len(lost)} parameters of the optimizer ('{lost[0]}' "
                "first), which were frozen there: leave them out of the optimizer, or "
                "strict=False lets them begin anew",
            )
        held = {id(p) for g in optimizer.param_groups for p in g["params"]}
        over = [s for e, s in match.pairs if s in self._group_of and id(e.tensor) not in held]
        if over:
            warn(
                f"the run has states of {len(over)} parameters that the optimizer does not have "
                f"('{over[0]}' first): they are left out"
            )

    def _add(self, entry, source, group):
        """Add a parameter's moments, which are filled where they are, if the optimizer has them."""
        import torch

        p = entry.tensor
        state = dict(self._optimizer.state.get(p, {}))
        for kind in MOMENTS:
            if kind not in state:
                state[kind] = torch.zeros_like(p, memory_format=torch.preserve_format).detach()
            self.pairs.append(
                (Entry(f"{kind} of {entry.name}", state[kind], None), _name(source, kind))
            )
        on_device = group.get("capturable") or group.get("fused")
        state["step"] = torch.as_tensor(
            float(self.view.get_tensor(_name(source, "step"))),
            dtype=torch.float32,
            device=p.device if on_device else "cpu",
        )
        self._filled.append((p, state))

    def _one_group(self, groups, found):
        """Return the run's group that all these parameters are in, or groups that are alike."""
        first = groups[self._group_of[found[0][1]]]
        for entry, source in found:
            other = groups[self._group_of[source]]
            if any(first.get(key) != other.get(key) for key in HYPER):
                raise CkptError(
                    "unsupported",
                    f"a group of the optimizer has '{found[0][0].name}' and '{entry.name}', which "
                    "have other hyper-parameters in the run: make the run's groups, or give "
                    "numbers for all with lr= and weight_decay=",
                )
        return first

    def put(self):
        """Give the optimizer what was filled, and its groups the run's hyper-parameters."""
        import torch

        for p, state in self._filled:
            self._optimizer.state[p] = state
        for group, stored in self._groups:
            for key in HYPER:
                if key not in stored:
                    continue
                value = stored[key]
                if isinstance(group.get(key), torch.Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = tuple(value) if key == "betas" else value


def _name(parameter, kind):
    return f"optim.state.{parameter}.{kind}"


def _check_parts(match):
    for part in match.parts:
        if not isinstance(part, Model):
            raise CkptError(
                "unsupported",
                f"optimizer= fills the states of models, and {part.name} is none, or FSDP1 around "
                "one: use ckptfs.torch.StorageReader(RUN, optimizer=True) with torch's "
                "get_state_dict",
            )
        for entry in part.entries:
            if is_meta(entry.tensor):
                raise CkptError(
                    "usage",
                    f"'{entry.name}' is on the meta device: give the model memory (to_empty) "
                    "before the optimizer is made of its parameters",
                )


def agreed_states(comm, match, optimizer, strict):
    """Return this rank's States; if one rank's can't be made, all ranks raise its error."""
    made: list[States] = []
    comm.share(lambda: made.append(States(match, optimizer, strict)), len)
    return made[0]


def fill(comm, match, states, copies, native, progress):
    """Load the weights and the states together; returns the statistics."""

    def declare(load):
        load.compares = copies
        for entry, source in match.pairs + match.copies:
            load.want(entry, "model." + source)
        for entry, source in states.pairs:
            load.want(entry, source)

    return run_together(comm, lambda: states.view, declare, native, progress)
