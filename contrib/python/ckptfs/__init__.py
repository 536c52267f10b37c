# SPDX-License-Identifier: Apache-2.0
"""ckptfs: sharded training checkpoints as Hugging Face models, from Python.

    with ckptfs.open("run/checkpoints") as f:          # like safetensors.safe_open
        f.get_slice("model.embed_tokens.weight")[:16]

    ckptfs.load_state_dict(model, "run/checkpoints")   # every rank gets its part, every byte is read once

    ckptfs.load_boxes([("lm_head.weight", (0, 0), tensor)], "run/checkpoints")   # any boxes, into any memory

    load = ckptfs.load_async(model, "run/checkpoints")           # beside the caller: progress, tensors as they arrive, cancel, wait
    ckptfs.load_layout("run/checkpoints", "tp=2,pp=2")           # this rank's tensors of a layout, without a model
    ckptfs.Reloader(model, "run/checkpoints").reload(step=20)    # the same tensors of other steps, again and again

    f.objects()["optim.param_groups.0.lr"]             # what is no tensor, as plain Python values
    f.config, f.read("tokenizer.json"), f.steps()      # and what lies beside it

The libraries are found below the build directory that CKPTFS_LIBRARY_PATH names, else in this package, else where the system has them.
torch is imported only where tensors of it are made.
"""

from ._boxes import load_boxes
from ._comm import Comm
from ._layout import load_layout
from ._library import CkptError
from ._objects import Opaque
from ._reloader import Reloader
from ._running import Running, load_async
from ._state_dict import load_state_dict
from ._view import View, open

__all__ = [
    "CkptError",
    "Comm",
    "Opaque",
    "Reloader",
    "Running",
    "View",
    "load_async",
    "load_boxes",
    "load_layout",
    "load_state_dict",
    "open",
]


def __getattr__(name):
    if name == "__version__":  # the library's
        from ._library import library

        return library().version().decode()
    raise AttributeError(f"module 'ckptfs' has no attribute {name!r}")
