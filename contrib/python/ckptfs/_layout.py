# SPDX-License-Identifier: Apache-2.0
"""Loads a rank's tensors under a parallel layout, as ckpt-load does, without a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Callable

from ._load import make_options, run_together
from ._state_dict import Spec, together

if TYPE_CHECKING:
    import torch

    from ._comm import Group
    from ._view import Path, View

    Tensors = dict[str, torch.Tensor]
else:
    Tensors = dict


class Layout(Tensors):
    """The tensors of one rank: a dict of {name: tensor}.

    Attributes:
        boxes: {name: [(offset, shape), ...]}, the parts of the whole tensor that this rank has, in
            elements. A fused tensor has one box for each of its parts.
        stats: The load's statistics; sizes in bytes, times in seconds.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        boxes: dict[str, list[tuple[list[int], list[int]]]],
        stats: dict[str, int | float],
    ):
        super().__init__(tensors)
        self.boxes, self.stats = boxes, stats


def load_layout(
    run: Path | View,
    layout: str,
    process_group: Group = None,
    *,
    no_dist: bool = False,
    device: torch.device | str | int | None = None,
    view: str | None = None,
    base: Path | None = None,
    step: str | int | None = None,
    options: Mapping[str, Any] | None = None,
    readers: str = "auto",
    load_options: Mapping[str, Any] | None = None,
    progress: bool | Callable[[int, int], None] = False,
    **more: Any,
) -> Layout:
    """Load everything that this rank has of a model under a parallel layout, on all ranks together.

    A tensor that fuses several parts, such as gate and up projections, is divided part by part; the
    rank's pieces of the parts are joined along the divided dimension.

    Args:
        run: A run, one checkpoint, a model directory, or an open View.
        layout: Sizes such as "tp=2,pp=2,ep=1,dp=2" or "fsdp=4". Sizes that are not given are 1, and
            their product is the number of ranks. Of consecutive ranks tp varies fastest, then ep,
            fsdp, dp, pp. `ckpt-load --layout` and include/ckptfs/load.h say what each size divides.
        process_group: As for load_state_dict.
        no_dist: As for load_state_dict.
        device: Where the tensors are made. None is torch's default device.
        view: As for load_state_dict.
        base: As for open.
        step: As for open.
        options: As for open.
        readers: As for load_state_dict.
        load_options: As for load_state_dict.
        progress: As for load_state_dict.
        **more: Further options of open, and local_files=True as for load_state_dict.
            dtype=torch.float32 (or "float32") converts the values.

    Returns:
        A Layout: the tensors under the view's names, in the view's dtypes.

    Raises:
        CkptError: "usage" if the layout does not fit the ranks or the model; "unsupported" if no
            model file says how the view is divided. All ranks raise it.
        ValueError: An argument is wrong. Other ranks raise a CkptError then.
    """

    def prepare():
        spec = Spec(run, view, dict(options or {}), dict(more, base=base, step=step))
        home = _home(device)
        return make_options(readers, load_options), spec, home, _number(home)

    found = {}
    with together(process_group, no_dist, prepare) as (comm, native, spec, home):
        stats = run_together(
            comm,
            lambda: next(spec.views(comm)),
            lambda load: found.update(load.want_layout(layout)),
            native,
            progress,
        )
    return Layout(
        {name: tensor.to(home) for name, (tensor, _) in found.items()},
        {name: boxes for name, (_, boxes) in found.items()},
        stats,
    )


def _home(device):
    """Return the device where the tensors are made."""
    import torch

    from ._tensors import home

    return torch.device(device) if device is not None else home()


def _number(device):
    """Return the number of a CUDA device; None for any other device."""
    import torch

    if device is None or device.type != "cuda":
        return None
    return device.index if device.index is not None else torch.cuda.current_device()
