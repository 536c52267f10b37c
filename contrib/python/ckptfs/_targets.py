# SPDX-License-Identifier: Apache-2.0
"""What is to be filled: models and state dicts, as lists of their tensors."""

import sys

from ._modules import Modules
from ._objects import is_open
from ._tensors import home_of, is_dtensor, is_meta, is_sharded_tensor, like, local_tensors


class Entry:
    """One tensor to be filled. What has no memory yet, and what takes another dtype, is given to its owner with put() once the load is over: a
    load that fails leaves it as it was.
    """

    of = None  # of a Copy: the entry whose values it must have

    def __init__(self, name, tensor, put, retype=False):
        self.name, self.tensor, self._put = name, tensor, put
        self.retype = retype  # may it become float8, as its values are stored?
        self.twins = []  # others with the same memory
        self.dtype = None  # what it shall have, if it gets memory
        if is_meta(tensor) and is_sharded_tensor(tensor):
            raise TypeError(f"'{name}' is a ShardedTensor on the meta device: give it memory first")

    def home(self):
        return home_of(self.tensor)

    def dtype_of(self, local):
        """What a local part of it shall have."""
        return (
            self.dtype
            if self.dtype is not None and local.is_meta and local.is_floating_point()
            else local.dtype
        )

    def put(self, local):
        """The rank's part of the tensor, filled."""
        whole = like(self.tensor, local)
        for entry in (self, *self.twins):
            entry._put(whole)


class Copy(Entry):
    """An entry whose memory another one has, while the checkpoint has a tensor for each (tied weights that were saved under both names): it is read into
    memory of its own, and compared.
    """

    def __init__(self, entry, of):
        local = local_tensors(entry.tensor)[0]
        own = entry.tensor if local.is_meta else like(entry.tensor, local.new_empty(local.shape))
        super().__init__(entry.name, own, lambda whole: None, entry.retype)
        self.of, self.dtype = of, entry.dtype


class Value:
    """Something of a state dict that is no tensor, and how it is replaced; `put` None: it can't be."""

    def __init__(self, name, put):
        self.name, self.put = name, put


class Part:
    """A model or state dict. `entries`: its tensors. `values`: what else it has, for raw views. `model`: torch's, or None."""

    model, name, entries, values = None, "the state dict", (), ()

    def choose(self, wanted):
        """Only these names, by a function of a name, are to be filled. Returns those that are there."""
        self.entries = [e for e in self.entries if wanted(e.name)]
        self.values = [v for v in self.values if wanted(v.name)]
        return {x.name for x in (*self.entries, *self.values)}

    def run_pre_hooks(self, names, like):
        """The names as the model's hooks leave them, and error messages: see Modules.run_pre_hooks."""
        return names, []

    def check_initialise(self, tensors):
        """missing="init": can these be initialised? They are the part's own tensors, as in entries."""
        if tensors:
            raise ValueError(
                f"missing='init' initialises parameters of models; {self.name} is none, or FSDP1 around one"
            )

    def initialise(self, tensors, seed, dtype=None):
        pass

    def finish(self, result):
        """All are filled."""


class StateDict(Part):
    """A state dict, with other dicts and lists in it: its tensors are named as torch's distributed checkpoints name them."""

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
    """A model below FullyShardedDataParallel: its sharded state dict is filled and given back."""

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
    """Any other model: parameters and buffers in place."""

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
    """The parts of what load_state_dict was given: a model, a state dict, or a list of them (stages of a pipeline)."""
    import torch

    if isinstance(target, (list, tuple)):
        return [part for t in target for part in parts_of(t)]
    if not isinstance(target, torch.nn.Module):
        if not isinstance(target, dict) and not hasattr(target, "items"):
            raise TypeError(f"Expected state_dict to be dict-like, got {type(target)}.")
        return [StateDict(target)]
    return [Fsdp1(target) if _is_fsdp1(target) else Model(target)]


def device_of(parts):
    """The number of the CUDA device that all tensors are on, or shall be; None: on the CPU, or on several."""
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
    """A function that replaces a value of a dict or list."""
    if not hasattr(holder, "__setitem__"):
        raise TypeError(
            f"'{name}' is on the meta device, in a {type(holder).__name__}: that can't be given another tensor"
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
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    return FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
