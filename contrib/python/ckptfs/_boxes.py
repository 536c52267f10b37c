# SPDX-License-Identifier: Apache-2.0
"""Loads boxes of tensors into the caller's memory, on all ranks together."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Callable

from ._library import CkptError, Stats
from ._load import make_options, run_together
from ._state_dict import Spec, together
from ._targets import Copy, Entry, device_of
from ._tensors import memory

if TYPE_CHECKING:
    import torch

    from ._comm import Group
    from ._view import Path, View

    Box = tuple[str, Sequence[int], torch.Tensor]


class _Boxes:
    """The caller's boxes, as a part that device_of() can look at."""

    def __init__(self, boxes):
        import torch

        boxes = list(boxes)
        for name, _, tensor in boxes:
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(
                    f"'{name}': expected (name, offset, torch.Tensor), "
                    f"not a {type(tensor).__name__}"
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
                    f"'{name}': {len(offset)} offsets were given for a destination of "
                    f"{tensor.dim()} dimensions"
                )


def _wanted(view, name, offset, tensor, clip):
    """Return the box inside the view's tensor, and the part of the destination that it fills.

    None if no element of the box lies inside the tensor.
    """
    shape = view._find(name).shape
    if len(shape) != len(offset):
        raise CkptError("usage", f"'{name}' has {len(shape)} dimensions, the box {len(offset)}")
    n = [max(0, min(size, lo + want) - lo) for size, lo, want in zip(shape, offset, tensor.shape)]
    if not clip and (n != list(tensor.shape) or any(lo < 0 for lo in offset)):
        raise CkptError(
            "usage",
            f"'{name}' has shape {shape}: the box at {offset} of {list(tensor.shape)} goes beyond "
            "it (clip=True leaves that out)",
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
    no_dist: bool = False,
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
    """Fill tensors with boxes of a checkpoint's tensors, on all ranks of a group together.

    Each rank gives its own list of boxes, which may be empty. A destination that is given under two
    names, as tied weights are, is filled if both names have the same values in the checkpoint.

    Args:
        boxes: (name, offset, tensor) triples, or a function without arguments that makes them.
            `tensor` is a plain torch.Tensor of any strides, on the CPU or on a CUDA device, and
            gets the elements [offset, offset + tensor.shape) of the view's tensor `name`. `offset`
            has one integer for each dimension. Values are cast if both dtypes are floating ones.
        run: A run, one checkpoint, a model directory, or an open View.
        process_group: The ranks that load together: a torch process group, a DeviceMesh, or a Comm.
            None is the default group, or this process if torch.distributed is not initialised.
        no_dist: True loads in this process alone, whatever groups there are.
        clip: True leaves elements of a destination as they are that lie beyond the end of the
            checkpoint's tensor, such as the padding of a vocabulary. False makes that an error.
        view: As for load_state_dict.
        base: As for open.
        step: As for open.
        options: As for open.
        readers: As for load_state_dict.
        load_options: As for load_state_dict.
        progress: As for load_state_dict.
        **more: Further options of open.

    Returns:
        The statistics of all ranks together: {"needed_bytes": ..., "unique_bytes": ...,
        "read_bytes": ..., "wall_s": ...}; sizes in bytes, times in seconds.

    Raises:
        NotFoundError: There is no such tensor.
        CkptError: "usage" for a box that lies beyond its tensor; "conflict" for destinations that
            share a part of their memory, or for two names of one destination that have different
            values. All ranks raise it. Destinations are unchanged if the error is found before data
            is read.
        TypeError: A destination is not a torch.Tensor.
        ValueError: An argument is wrong. Other ranks raise a CkptError then.
    """
    return fill_boxes(
        boxes,
        (run, view, dict(options or {}), dict(more, base=base, step=step)),
        process_group,
        no_dist=no_dist,
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
    no_dist: bool = False,
    clip: bool,
    readers: str,
    load_options: Mapping[str, Any] | None,
    progress: bool | Callable[[int, int], None],
    check: Callable[[View], None] | None = None,
    may_be_empty: bool = False,
) -> dict[str, int | float]:
    """Do what load_boxes does, for a view that is opened by Spec(*source).

    check(view) is called on every rank before anything is read; what it raises fails all ranks.
    With may_be_empty the view is not opened if no rank has a box: statistics are zeros then.
    """

    def prepare():
        native, spec = make_options(readers, load_options), Spec(*source)
        mine = _Boxes(boxes() if callable(boxes) else boxes)
        return native, spec, mine, device_of([mine])

    with together(process_group, no_dist, prepare) as (comm, native, spec, mine):
        if may_be_empty and not comm.share(lambda: bool(mine.boxes), any):
            return Stats().as_dict()
        return run_together(
            comm,
            lambda: next(spec.views(comm)),
            lambda load: _declare(load, mine, clip, check),
            native,
            progress,
        )


def _declare(load, mine, clip, check):
    """Declare the boxes of this rank to a load."""
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
