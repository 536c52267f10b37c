# SPDX-License-Identifier: Apache-2.0
"""Boxes of tensors into memory of the caller's, all ranks together."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, Callable, Iterable, Mapping, Sequence

from ._comm import TIMEOUT_MS, joined
from ._library import CkptError
from ._load import make_options, run_together
from ._state_dict import Spec
from ._targets import Copy, Entry, device_of
from ._tensors import memory

if TYPE_CHECKING:
    import torch

    from ._comm import Group
    from ._view import Path, View

    Box = tuple[str, Sequence[int], torch.Tensor]


class _Boxes:
    """What device_of() asks of a part of a model."""

    def __init__(self, boxes):
        import torch

        boxes = list(boxes)
        for name, _, tensor in boxes:
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(
                    f"'{name}': expected (name, offset, torch.Tensor), not a {type(tensor).__name__}"
                )
        self.boxes = [
            (name, [operator.index(lo) for lo in offset], tensor, Entry(name, tensor, None))
            for name, offset, tensor in boxes
        ]
        self.entries = [entry for *_, entry in self.boxes]
        for name, offset, tensor, _ in self.boxes:
            if tensor.is_meta:
                raise ValueError(
                    f"'{name}': its destination is on the meta device, which has no memory"
                )
            if len(offset) != tensor.dim():
                raise ValueError(
                    f"'{name}': {len(offset)} offsets were given for a destination of {tensor.dim()} dimensions"
                )


def _wanted(view, name, offset, tensor, clip):
    """The box that lies inside the view's tensor, and the part of the destination that it fills; None: nothing does."""
    shape = view._find(name).shape
    if len(shape) != len(offset):
        raise CkptError("usage", f"'{name}' has {len(shape)} dimensions, the box {len(offset)}")
    n = [max(0, min(size, lo + want) - lo) for size, lo, want in zip(shape, offset, tensor.shape)]
    if not clip and (n != list(tensor.shape) or any(lo < 0 for lo in offset)):
        raise CkptError(
            "usage",
            f"'{name}' has shape {shape}: the box at {offset} of {list(tensor.shape)} goes beyond it (clip=True leaves that out)",
        )
    if any(lo < 0 for lo in offset):
        raise CkptError("usage", f"'{name}': the box begins at {offset}")
    if not all(n):
        return None
    for d, length in enumerate(n):
        tensor = tensor.narrow(d, 0, length)
    return offset, n, tensor


def load_boxes(
    boxes: Iterable[Box] | Callable[[], Iterable[Box]],
    run: Path | View,
    process_group: Group = None,
    *,
    clip: bool = False,
    view: str | None = None,
    base: Path | None = None,
    step: str | int | None = None,
    options: Mapping[str, Any] | None = None,
    readers: str = "auto",
    load_options: Mapping[str, Any] | None = None,
    progress: bool | Callable[[int, int], None] = False,
    **more: Any,
) -> dict[str, int | float]:
    """Fill tensors with boxes of a checkpoint's tensors, on all ranks of a process group together; each rank gives its own list, which may be empty.

    boxes   [(name, offset, tensor), ...]: `tensor` (plain torch, on the CPU or a CUDA device, any strides) gets the elements of tensor `name` from
            `offset` on (one number a dimension), as many as its shape says; cast to its dtype where that is a floating one
    clip    True: what lies beyond the end of the checkpoint's tensor (the padding of a vocabulary) stays as it is; False: it is an error
    The rest is load_state_dict's. Returns the statistics of all ranks together: {"needed_bytes", "unique_bytes", "read_bytes", ...}.

    CkptError, on all ranks: "missing": no such tensor; "usage": a box beyond its tensor; "conflict": destinations share a part of their memory.
    Destinations are as before if that is found. One destination of two names, as tied weights have, is filled if both have the same values there, else
    it is a "conflict", too.
    """
    return fill_boxes(
        boxes,
        (run, view, dict(options or {}), dict(more, base=base, step=step)),
        process_group,
        clip=clip,
        readers=readers,
        load_options=load_options,
        progress=progress,
    )


def fill_boxes(
    boxes: Iterable[Box] | Callable[[], Iterable[Box]],
    source: tuple[Any, ...],
    process_group: Group,
    *,
    clip: bool,
    readers: str,
    load_options: Mapping[str, Any] | None,
    progress: bool | Callable[[int, int], None],
    check: Callable[[View], None] | None = None,
) -> dict[str, int | float]:
    """load_boxes of Spec(*source). check(view) is called on every rank before anything is read; what it raises fails all ranks."""
    mine = spec = native = failure = None
    try:
        native = make_options(readers, load_options)
        spec = Spec(*source)
        mine = _Boxes(boxes() if callable(boxes) else boxes)
    except Exception as e:  # the other ranks must hear of it
        failure = e
    timeout_ms = (native.exchange_timeout_ms if native else 0) or TIMEOUT_MS
    device = device_of([mine]) if mine is not None and failure is None else None
    with joined(process_group, device, timeout_ms, failure) as comm, spec:
        spec.check(comm)
        return run_together(
            comm,
            lambda: next(spec.views(comm)),
            lambda load: _declare(load, mine, clip, check),
            native,
            progress,
        )


def _declare(load, mine, clip, check):
    if check is not None:
        check(load.view)
    load.compares = True  # some rank may have copies
    first = {}  # {memory: the first box that fills it}
    for name, offset, tensor, entry in mine.boxes:
        wanted = _wanted(load.view, name, offset, tensor, clip)
        if wanted is None:
            continue
        offset, n, tensor = wanted
        at = memory(tensor)
        other, *source = (
            first.setdefault((at, tensor.dtype), (entry, name, offset))
            if at
            else (entry, name, offset)
        )
        if source != [name, offset]:  # tied weights that were saved under both names
            entry = Copy(Entry(name, tensor, None), other)
            tensor = entry.tensor
        load.want_box(name, offset, n, tensor, entry)
