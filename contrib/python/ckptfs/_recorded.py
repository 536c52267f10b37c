# SPDX-License-Identifier: Apache-2.0
"""Tensors without values, which note what of them is copied where.

An engine's weight loaders are given these in place of a checkpoint's tensors. They narrow, index
and transpose them, which changes the geometry only, and end in `parameter.copy_(part)`, which is
noted as a box of the checkpoint's tensor and its destination. So one load can fill all
destinations, on all ranks together. Whatever else is done with such a tensor reads what it has,
at once, and is counted.
"""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ._library import CkptError
from ._load import CASTABLE
from ._tensors import SAFETENSORS, is_strided
from ._view import torch_dtype

Box = tuple[str, tuple[int, ...], tuple[int, ...]]  # name, offset, shape

COPY = torch.ops.aten.copy_.default
OTHER_DTYPE = torch.ops.aten.view.dtype


class Recorded(torch.Tensor):
    """A part of a checkpoint's tensor: a view of it by size, strides and offset."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    _of: _Whole

    @staticmethod
    def __new__(cls, of, size, stride, offset):
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            size,
            strides=stride,
            storage_offset=offset,
            dtype=of.dtype,
            device=of.recorder.device,
        )
        self._of = of
        return self

    def _geometry(self):
        return torch.empty(0, dtype=self.dtype, device="meta").as_strided(
            self.size(), self.stride(), self.storage_offset()
        )

    def value(self) -> torch.Tensor:
        """Return its values, which are read now, unless they have been."""
        of = self._of
        if of.values is not None:
            return of.values.as_strided(self.size(), self.stride(), self.storage_offset())
        lo, n, stride, offset, _ = of.region(self)
        return of.recorder.read(of.name, lo, n).as_strided(self.size(), stride, offset)

    def __repr__(self, **_: Any) -> str:
        return f"<'{self._of.name}': {self.dtype} {list(self.size())}>"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is COPY and isinstance(args[1], cls) and not isinstance(args[0], cls):
            args[1]._of.recorder.copy(args[0], args[1])
            return args[0]
        if getattr(func, "is_view", False) and func is not OTHER_DTYPE and isinstance(args[0], cls):
            of = args[0]._of
            return tree_map(
                lambda t: cls(of, t.size(), t.stride(), t.storage_offset()),
                func(args[0]._geometry(), *args[1:], **kwargs),
            )
        for argument, given in zip(func._schema.arguments, args):
            alias = argument.alias_info
            if alias is not None and alias.is_write and isinstance(given, cls):
                given._of.fill()  # from now on it is a tensor like others
        args, kwargs = tree_map(
            lambda x: x.value() if isinstance(x, cls) else x, (tuple(args), kwargs)
        )
        return func(*args, **kwargs)

    def _no_memory(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"{self!r} has no memory of its own")

    data_ptr = untyped_storage = storage = _no_memory


def _reading(name):
    return lambda self, *args, **kwargs: getattr(self.value(), name)(*args, **kwargs)


for _name in ("numpy", "tolist", "__array__", "__dlpack__"):
    setattr(Recorded, _name, _reading(_name))


class _Whole:
    """A tensor of the checkpoint, of which Recorded ones are views."""

    def __init__(self, recorder, info):
        self.recorder, self.name, self.shape = recorder, info.name, tuple(info.shape)
        self.dtype = torch_dtype(info.dtype)
        self.stride = _row_major(self.shape)
        self.values = None  # once somebody has changed them

    def fill(self):
        if self.values is None:
            zero = (0,) * len(self.shape)
            self.values = self.recorder.read(self.name, zero, self.shape).clone()

    def region(self, view):
        """Return (offset, shape) of the smallest box that is known to have a view's elements.

        And the view's strides and offset within that box, and the dimensions of the box that are
        the view's, or None if the view is not just a box of which dimensions were permuted.
        """
        size, stride, offset = view.size(), view.stride(), view.storage_offset()
        lo, rest = [], offset
        for s, d in zip(self.stride, self.shape):
            lo.append(rest // s if d > 1 and view.numel() else 0)
            rest -= lo[-1] * s
        n, dims = [1] * len(self.shape), {}
        for i, (d, s) in enumerate(zip(size, stride)):
            if d == 1:
                continue
            at = next((k for k, t in enumerate(self.stride) if t == s and self.shape[k] > 1), None)
            if at is None or at in dims.values() or lo[at] + d > self.shape[at] or not d:
                dims = None
                break
            dims[i], n[at] = at, d
        if dims is not None and not rest:
            own = _row_major(n)
            inside = [own[dims[i]] if i in dims else 0 for i in range(len(size))]
            return tuple(lo), tuple(n), inside, 0, dims
        if not view.numel():
            return (0,) * len(n), (0,) * len(n), [0] * len(size), 0, None
        row = self.stride[0]  # as many rows as the view reaches into
        first = offset // row
        last = (offset + sum((d - 1) * s for d, s in zip(size, stride))) // row
        others = len(n) - 1
        return (
            (first,) + (0,) * others,
            (last - first + 1, *self.shape[1:]),
            stride,
            offset - first * row,
            None,
        )


class _Copy:
    """A copy that is to be done: a box, and the tensor of the box's shape that gets it."""

    def __init__(self, box, to, given):
        self.box, self.to = box, to
        self.key = (*_reach(given), given.dtype, given.shape, given.stride())


class Recorder(TorchDispatchMode):
    """Makes Recorded tensors, and keeps what is copied of them.

    In a `with` statement copies are noted, and copies() has them; outside of one they are done at
    once. In the statement's thread an operation that reads or changes a destination
    finds it filled, because its copies are done first.

    Args:
        read: A function of (name, offset, shape), which reads a box to the host.
        device: What the tensors say is theirs.
        held: Boxes that have been read, {box: tensor}.
        boxes: Gets all boxes that were copied or read, {box: None}.
    """

    def __init__(
        self,
        read: Callable[[str, tuple[int, ...], tuple[int, ...]], torch.Tensor],
        device: torch.device,
        held: dict[Box, torch.Tensor] | None = None,
        boxes: dict[Box, None] | None = None,
    ):
        super().__init__()
        self._read, self.device, self.held = read, device, held or {}
        self.boxes: dict[Box, None] = {} if boxes is None else boxes
        self.waiting: dict[int, list[_Copy]] = {}  # of each storage
        self.recording = self.closed = False
        self.alone: dict[str, int] = {}  # bytes that this rank has read by itself, by name

    def tensor(self, info: Any) -> Recorded:
        """Return a tensor that stands for one of the checkpoint's."""
        of = _Whole(self, info)
        return Recorded(of, of.shape, of.stride, 0)

    def __enter__(self):
        self.recording = True
        return super().__enter__()

    def __exit__(self, *exc):
        self.recording = False
        return super().__exit__(*exc)

    def copies(self) -> list[tuple[Box, torch.Tensor]]:
        """Return the boxes that were to be copied, and where to."""
        return [(copy.box, copy.to) for copies in self.waiting.values() for copy in copies]

    def close(self) -> None:
        """Drop all copies. Reading one of the tensors is an error from now on."""
        self.waiting, self.held, self.closed = {}, {}, True

    def read(self, name, lo, n):
        """Return a box that is needed now."""
        if self.closed:
            raise CkptError(
                "unsupported",
                f"'{name}' is read after the load has ended, by a model that has kept it: "
                '"slices": false in --model-loader-extra-config gives it whole tensors',
            )
        self.boxes[name, lo, n] = None
        held = self.held.get((name, lo, n))
        if held is None:
            held = self._read(name, lo, n)
            self.alone[name] = self.alone.get(name, 0) + held.numel() * held.element_size()
        return held.to(self.device)

    def copy(self, to, tensor):
        """Do what to.copy_(tensor) does, now or later."""
        if to.is_meta:  # a rehearsal, in which vLLM counts elements
            to.copy_(tensor._geometry())
            return
        at = tensor
        if tensor.shape != to.shape:
            at = tensor._geometry().expand(to.shape)
        of = tensor._of
        lo, n, _, _, dims = of.region(at)
        if not (
            self.recording
            and of.values is None
            and dims is not None
            and is_strided(to)
            and _fits(of.dtype, to.dtype)
        ):
            self.settle(to)
            to.copy_(tensor.value())
            return
        box, stride = (of.name, lo, n), [1] * len(n)
        for i, d in dims.items():
            stride[d] = to.stride(i)
        with torch._C.DisableTorchFunctionSubclass():
            filled = to.detach().as_strided(n, stride, to.storage_offset())
        copy = _Copy(box, filled, to)
        self.settle(to, copy.key)
        self.boxes[box] = None
        self.waiting.setdefault(to.untyped_storage().data_ptr(), []).append(copy)

    def settle(self, tensor, key=None):
        """Do the copies to this memory now, or forget those to the very same place (`key`)."""
        if tensor.is_meta or not is_strided(tensor):
            return
        copies = self.waiting.get(tensor.untyped_storage().data_ptr())
        if not copies or not tensor.numel():
            return
        start, end = _reach(tensor)
        met = [c for c in copies if c.key[0] < end and start < c.key[1]]
        for copy in met:
            copies.remove(copy)
            if copy.key != key:
                copy.to.copy_(self.read(*copy.box))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        noted = func is COPY and isinstance(args[1], Recorded)
        if self.waiting and not noted and not getattr(func, "is_view", False):
            for x in tree_leaves((args, kwargs)):
                if isinstance(x, torch.Tensor) and not isinstance(x, Recorded):
                    self.settle(x)
        return func(*args, **kwargs)


def _row_major(shape):
    stride, step = [], 1
    for d in reversed(shape):
        stride.append(step)
        step *= max(d, 1)
    return tuple(reversed(stride))


def _reach(tensor):
    """Return the addresses of a tensor's first byte, and after its last one."""
    item, start = tensor.element_size(), tensor.data_ptr()
    return start, start + item * (
        1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))
    )


def _fits(stored, dtype):
    """Return whether a load casts as copy_() does."""
    return (
        stored == dtype
        or {SAFETENSORS.get(str(d).removeprefix("torch.")) for d in (stored, dtype)} <= CASTABLE
    )
