# SPDX-License-Identifier: Apache-2.0
"""Sharded training checkpoints as Hugging Face models, from Python.

    with ckptfs.open("run/checkpoints") as f:  # like safetensors.safe_open
        f.get_slice("model.embed_tokens.weight")[:16]

    # Every rank gets its part of a model, and every byte is read once.
    ckptfs.load_state_dict(model, "run/checkpoints")

    # Any boxes of tensors, into any memory.
    ckptfs.load_boxes([("lm_head.weight", (0, 0), tensor)], "run/checkpoints")

    # A load that runs in the background: progress, tensors as they arrive, cancel, wait.
    load = ckptfs.load_async(model, "run/checkpoints")

    # This rank's tensors under a parallel layout, without a model.
    ckptfs.load_layout("run/checkpoints", "tp=2,pp=2")

    # The same tensors of other steps, again and again.
    ckptfs.Reloader(model, "run/checkpoints").reload(step=20)

    # Values that are not tensors, and the files beside the weights.
    f.objects()["optim.param_groups.0.lr"]
    f.config, f.read("tokenizer.json"), f.steps()

The modules of frameworks (ckptfs.torch, ckptfs.transformers, ckptfs.accelerate, ckptfs.megatron,
ckptfs.nanotron, ckptfs.vllm) are imported when they are first used, and their frameworks with them.
The libraries are looked for below the build directory that CKPTFS_LIBRARY_PATH names, then in this
package, then where the system has them. torch is imported only by the functions that need it.
"""

from ._boxes import load_boxes
from ._comm import Comm, release
from ._layout import load_layout
from ._library import CkptError, NotFoundError
from ._objects import Opaque
from ._reloader import Reloader
from ._running import LoadHandle, load_async
from ._state_dict import load_state_dict
from ._view import View, open

__all__ = [
    "CkptError",
    "Comm",
    "LoadHandle",
    "NotFoundError",
    "Opaque",
    "Reloader",
    "View",
    "load_async",
    "load_boxes",
    "load_layout",
    "load_state_dict",
    "open",
    "release",
]


FRAMEWORKS = ("accelerate", "megatron", "nanotron", "torch", "transformers", "vllm")


def __getattr__(name):
    if name == "__version__":  # the library's
        from ._library import library

        return library().version().decode()
    if name in FRAMEWORKS:
        import importlib

        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module 'ckptfs' has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *FRAMEWORKS})
