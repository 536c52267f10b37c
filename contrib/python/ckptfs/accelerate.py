# SPDX-License-Identifier: Apache-2.0
"""accelerate's FSDP2 path with a training run in place of a state dict that rank 0 holds.

from ckptfs.accelerate import loading_from

# With fsdp_version 2 and cpu_ram_efficient_loading: what prepare() would broadcast from rank 0
# comes from the run.
with loading_from("run/checkpoints"):
    model = accelerator.prepare(model)
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ._frameworks import unusable
from ._state_dict import load_state_dict

if TYPE_CHECKING:
    import torch

    from ._view import Path

try:
    import accelerate

    _problem: ImportError | None = None
except ImportError as e:
    _problem = e


def fsdp2_load_full_state_dict(
    accelerator: accelerate.Accelerator,
    model: torch.nn.Module,
    run: Path,
    cpu_offload: bool = False,
    **options: Any,
) -> torch.nn.Module:
    """Fill an FSDP2 model from a run; every rank reads its part.

    It does what accelerate.utils.fsdp_utils.fsdp2_load_full_state_dict does, with a run in place of
    full_sd. All ranks call it together.

    Args:
        accelerator: The Accelerator.
        model: The FSDP2 model, usually on the meta device.
        run: A run, one checkpoint or a model directory, on all ranks.
        cpu_offload: True leaves the sharded parameters on the CPU, and loads them there.
        **options: Arguments of ckptfs.load_state_dict: base, step, strict, missing, key_mapping and
            so on.

    Returns:
        The model.

    Raises:
        RuntimeError: Keys or shapes do not fit, in torch's words.
        CkptError: Any other error in loading.
        ImportError: accelerate can't be imported.
    """
    _need()
    if cpu_offload:
        import torch

        model._apply(lambda t: torch.empty_like(t, device="cpu") if t.is_meta else t.to("cpu"))
    load_state_dict(model, run, **options)
    return model


@contextlib.contextmanager
def loading_from(run: Path, **options: Any) -> Iterator[None]:
    """Let accelerate's FSDP2 preparation take a model's weights from a run, within a `with` block.

    The values that the model has before are not used. accelerate has no hook for it (1.15): the
    function that it calls is another one within the block.

    Args:
        run: As for fsdp2_load_full_state_dict.
        **options: As for fsdp2_load_full_state_dict.

    Yields:
        None.

    Raises:
        ImportError: accelerate can't be imported. accelerator.prepare() raises what
            fsdp2_load_full_state_dict raises.
        RuntimeError: At the end of the block: nothing was loaded, and the model has the values that
            it had.
    """
    _need()
    from accelerate.utils import fsdp_utils

    theirs = fsdp_utils.fsdp2_load_full_state_dict
    used = False

    def ours(accelerator, model, full_sd, cpu_offload=False):
        nonlocal used
        used = True
        return fsdp2_load_full_state_dict(accelerator, model, run, cpu_offload, **options)

    fsdp_utils.fsdp2_load_full_state_dict = ours
    try:
        yield
    finally:
        fsdp_utils.fsdp2_load_full_state_dict = theirs
    if not used:
        raise RuntimeError(
            f"accelerate loaded nothing from {os.fspath(run)!r}: prepare(model) asks for weights "
            "with fsdp_version=2 and cpu_ram_efficient_loading=True only"
        )


def _need():
    if _problem is not None:
        raise unusable(
            "ckptfs.accelerate", _problem, ("accelerate",), "accelerate", "accelerate"
        ) from _problem
