# SPDX-License-Identifier: Apache-2.0
"""Models and state dicts that are to be filled, as lists of their tensors."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ._modules import Modules
from ._objects import is_open
from ._tensors import dressed, home_of, is_dtensor, is_meta, is_sharded_tensor, like, local_tensors

if TYPE_CHECKING:
    import torch


class Entry:
    """One tensor to be filled.

    A tensor that has no memory yet, or gets another dtype, is given to its owner with put() when
    the load has succeeded; a load that fails leaves it as it was.
    """

    of: Entry | None = None  # of a Copy: the entry whose values it must have

    def __init__(self, name, tensor, put, retype=False):
        self.name, self.tensor, self._put = name, tensor, put
        self.retype = retype  # may it become float8, as its values are stored?
        self.twins = []  # others with the same memory
        self.dtype = None  # what it shall have, if it gets memory
        if is_meta(tensor) and is_sharded_tensor(tensor):
            raise TypeError(f"'{name}' is a ShardedTensor on the meta device: give it memory first")

    def home(self):
        """Return the device where the tensor is, or where it gets memory."""
        return home_of(self.tensor)

    def dtype_of(self, local):
        """Return the dtype that a local part of the tensor shall have."""
        return (
            self.dtype
            if self.dtype is not None and local.is_meta and local.is_floating_point()
            else local.dtype
        )

    def put(self, local):
        """Give the owner the rank's part of the tensor, filled."""
        whole = like(self.tensor, local)
        for entry in (self, *self.twins):
            entry._put(dressed(entry.tensor, whole))


class Copy(Entry):
    """An entry whose memory another entry has, while the checkpoint has a tensor for each.

    These are tied weights that were saved under both names. The copy is read into memory of its
    own, and compared.
    """

    def __init__(self, entry, of):
        local = local_tensors(entry.tensor)[0]
        own = entry.tensor if local.is_meta else like(entry.tensor, local.new_empty(local.shape))
        super().__init__(entry.name, own, lambda whole: None, entry.retype)
        self.of, self.dtype = of, entry.dtype


class Value:
    """A value of a state dict that is not a tensor.

    `put` is a function that replaces it, or None if it can't be replaced.
    """

    def __init__(self, name, put):
        self.name, self.put = name, put


class Part:
    """A model or state dict.

    Attributes:
        entries: Its tensors.
        values: What else it has, for raw views.
        model: The torch model, or None.
        name: What errors call it.
    """

    model: torch.nn.Module | None = None
    name = "the state dict"
    entries: list[Entry]
    values: list[Value]

    def choose(self, wanted):
        """Keep only the names for which a function is true. Returns those that are there."""
        self.entries = [e for e in self.entries if wanted(e.name)]
        self.values = [v for v in self.values if wanted(v.name)]
        return {x.name for x in (*self.entries, *self.values)}

    def run_pre_hooks(self, names, like):
        """Return the names as the model's hooks leave them, and their error messages."""
        return names, []

    def check_initialise(self, tensors):
        """Raise an error if these tensors can't be initialised. They are the part's own."""
        if tensors:
            raise ValueError(
                f"missing='init' initialises parameters of models; {self.name} is not a model, or "
                "is FSDP1 around one"
            )

    def initialise(self, tensors, seed, dtype=None):
        """Initialise these tensors as the model's classes do."""
        pass

    def finish(self, result):
        """Called when all parts are filled."""


class StateDict(Part):
    """A state dict, with other dicts and lists in it.

    Its tensors are named as torch's distributed checkpoints name them.
    """

    def __init__(self, state):
        self.entries, self.values = [], []
        self._add("", state)

    def _add(self, prefix, value):
        items = value.items() if hasattr(value, "items") else enumerate(value)
        for key, v in items:
            name = f"{prefix}.{key}" if prefix else str(key)
            if _is_tensor(v):
                self.entries.append(
                    Entry(name, v, _setter(value, key, name) if is_meta(v) else None)
                )
            elif (
                isinstance(v, dict)
                or is_open(v)
                or (isinstance(v, (list, tuple)) and _has_tensors(v))
            ):
                self._add(name, v)
            else:
                self.values.append(
                    Value(
                        name, _setter(value, key, name) if hasattr(value, "__setitem__") else None
                    )
                )


class Fsdp1(Part):
    """A model below FullyShardedDataParallel: its sharded state dict is filled and loaded."""

    def __init__(self, model):
        self.model, self.name = model, type(model).__name__
        with _sharded(model):
            self._state = model.state_dict()
        inside = StateDict(self._state)
        self.entries, self.values = inside.entries, inside.values

    def finish(self, result):
        with _sharded(self.model):
            self.model.load_state_dict(self._state)


class Model(Part):
    """Any other model: its parameters and buffers are filled in place."""

    def __init__(self, model):
        self.model, self.name = model, type(model).__name__
        self.modules = Modules(model)
        state = model.state_dict(keep_vars=True)
        self.entries = [
            Entry(n, t, self._putter(n, t), retype=True) for n, t in state.items() if _is_tensor(t)
        ]
        self.values = [
            Value(n, self.modules.extra_state_setter(n))
            for n, t in state.items()
            if not _is_tensor(t)
        ]

    def _putter(self, name, tensor):
        def put(new):
            self.modules.replace(tensor, new)

        return put

    def run_pre_hooks(self, names, like):
        return self.modules.run_pre_hooks(names, like, True)

    def check_initialise(self, tensors):
        self.modules.check_initialise(tensors)

    def initialise(self, tensors, seed, dtype=None):
        self.modules.initialise(tensors, seed, dtype)

    def finish(self, result):
        self.modules.finish(result)


def parts_of(target):
    """Return the parts of load_state_dict's first argument."""
    import torch

    if isinstance(target, (list, tuple)):
        return [part for t in target for part in parts_of(t)]
    if not isinstance(target, torch.nn.Module):
        if not isinstance(target, dict) and not hasattr(target, "items"):
            raise TypeError(f"Expected state_dict to be dict-like, got {type(target)}.")
        return [StateDict(target)]
    return [Fsdp1(target) if _is_fsdp1(target) else Model(target)]


def device_of(parts):
    """Return the number of the CUDA device of all tensors, or None."""
    import torch

    found = {home_of(e.tensor) for part in parts for e in part.entries if local_tensors(e.tensor)}
    found = {
        d.index if d.index is not None else torch.cuda.current_device()
        for d in found
        if d.type == "cuda"
    }
    return found.pop() if len(found) == 1 else None


def _is_tensor(value):
    import torch

    return isinstance(value, torch.Tensor) or is_dtensor(value) or is_sharded_tensor(value)


def _has_tensors(value):
    if isinstance(value, dict):
        return any(_has_tensors(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return any(_has_tensors(v) for v in value)
    return _is_tensor(value)


def _setter(holder, key, name):
    """Return a function that replaces a value of a dict or list."""
    if not hasattr(holder, "__setitem__"):
        raise TypeError(
            f"'{name}' is on the meta device, in a {type(holder).__name__}: that can't be given "
            "another tensor"
        )

    def put(new):
        holder[key] = new

    return put


def _is_fsdp1(model):
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(
        isinstance(m, fsdp.FullyShardedDataParallel) for m in model.modules()
    )


def _sharded(model):
    """Return a context in which an FSDP1 model gives and takes sharded state dicts."""
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    return FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
