# SPDX-License-Identifier: Apache-2.0
"""A rank's tensors under a parallel layout, as the command line's ckpt-load has it, without a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Mapping

from ._comm import TIMEOUT_MS, joined
from ._load import make_options, run_together
from ._state_dict import Spec

if TYPE_CHECKING:
    import torch

    from ._comm import Group
    from ._view import Path, View


class Layout(dict):
    """{name: tensor} of one rank. `boxes`: {name: [(offset, shape), ...]}, which parts of the whole tensor that is; `stats`: the load's statistics."""

    boxes, stats = None, None


def load_layout(
    run: Path | View,
    layout: str,
    process_group: Group = None,
    *,
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
    """Everything that this rank has of a model under a parallel layout, loaded by all ranks of a process group together.

    layout  "tp=2,pp=2,ep=1,dp=2" or "fsdp=4"; sizes that are not given are 1, their product is the number of ranks. Of consecutive ranks tp varies
            fastest, then ep, fsdp, dp, pp. `ckpt-load --layout` and include/ckptfs/load.h say what each divides
    device  where the tensors are; None: torch's default device
    The rest is load_state_dict's; dtype=torch.float32 (or "float32"), an option of ckptfs.open, converts.

    Returns a Layout: a dict of tensors, by the view's names, in the view's dtypes. A tensor that fuses several parts (gate and up) is divided part by
    part, and the rank's pieces of them are joined in that dimension.

    CkptError, on all ranks: "usage": a layout that does not fit the ranks or the model; "unsupported": a view that no model file divides.
    """
    spec = native = failure = home = None
    try:
        home = _home(device)
        native = make_options(readers, load_options)
        spec = Spec(run, view, dict(options or {}), dict(more, base=base, step=step))
    except Exception as e:  # the other ranks must hear of it
        failure = e
    timeout_ms = (native.exchange_timeout_ms if native else 0) or TIMEOUT_MS
    result, found = Layout(), {}
    with joined(process_group, _number(home), timeout_ms, failure) as comm, spec:
        spec.check(comm)
        result.stats = run_together(
            comm,
            lambda: next(spec.views(comm)),
            lambda load: found.update(load.want_layout(layout)),
            native,
            progress,
        )
    result.update({name: tensor.to(home) for name, (tensor, _) in found.items()})
    result.boxes = {name: boxes for name, (_, boxes) in found.items()}
    return result


def _home(device):
    import torch

    from ._tensors import home

    return torch.device(device) if device is not None else home()


def _number(device):
    """The number of a CUDA device; None: it is none."""
    import torch

    if device is None or device.type != "cuda":
        return None
    return device.index if device.index is not None else torch.cuda.current_device()
