# SPDX-License-Identifier: Apache-2.0
"""accelerate's FSDP2 path over a training run instead of a state dict that rank 0 holds:

from ckptfs.accelerate import loading_from

with loading_from("run/checkpoints"):        # what prepare() would broadcast from rank 0 comes from the run
    model = accelerator.prepare(model)       # with fsdp_version 2 and cpu_ram_efficient_loading
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Iterator

from ._frameworks import unusable
from ._state_dict import load_state_dict

if TYPE_CHECKING:
    import torch

    from ._view import Path

try:
    import accelerate

    _problem = None
except ImportError as e:
    _problem = e


def fsdp2_load_full_state_dict(
    accelerator: accelerate.Accelerator,
    model: torch.nn.Module,
    run: Path,
    cpu_offload: bool = False,
    **options: Any,
) -> torch.nn.Module:
    """accelerate.utils.fsdp_utils.fsdp2_load_full_state_dict with a run in place of full_sd: fill an FSDP2 model, usually on the meta device.

    accelerator  the Accelerator
    run          a run, one checkpoint or a model directory, on all ranks
    cpu_offload  True: the sharded parameters stay on the CPU
    options      those of ckptfs.load_state_dict: base, step, strict, missing, key_mapping ...

    Every rank reads its part, instead of rank 0 all of it. Returns the model. RuntimeError, in torch's words: missing and unexpected keys.
    """
    _need()
    load_state_dict(model, run, **options)
    if cpu_offload:
        state = {
            name: t.to("cpu") if hasattr(t, "to") else t for name, t in model.state_dict().items()
        }
        model.load_state_dict(state, assign=True)
    return model


@contextlib.contextmanager
def loading_from(run: Path, **options: Any) -> Iterator[None]:
    """Within it accelerate's FSDP2 preparation takes a model's weights from the run; what the model held before is not looked at."""
    _need()
    from accelerate.utils import fsdp_utils

    theirs = fsdp_utils.fsdp2_load_full_state_dict

    def ours(accelerator, model, full_sd, cpu_offload=False):
        return fsdp2_load_full_state_dict(accelerator, model, run, cpu_offload, **options)

    fsdp_utils.fsdp2_load_full_state_dict = ours
    try:
        yield
    finally:
        fsdp_utils.fsdp2_load_full_state_dict = theirs


def _need():
    if _problem is not None:
        raise unusable(
            "ckptfs.accelerate", _problem, ("accelerate",), "accelerate", "accelerate"
        ) from _problem
