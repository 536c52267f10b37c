# SPDX-License-Identifier: Apache-2.0
"""transformers' models straight from a training run, without a mount and without a copy:

from ckptfs.transformers import from_pretrained, tokenizer_from_pretrained

model = from_pretrained("run/checkpoints", device_map="auto")          # tp_plan="auto" under torchrun, quantization_config=..., as usual
tokenizer = tokenizer_from_pretrained("run/checkpoints", base="org/name")
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import TYPE_CHECKING, Any, Mapping

from ._frameworks import unusable
from ._view import View

if TYPE_CHECKING:
    import torch

    from ._view import Path

try:
    import transformers

    _problem = None
except ImportError as e:
    _problem = e

WEIGHTS = (".safetensors", ".safetensors.index.json")


def from_pretrained(
    run: Path,
    cls: type | None = None,
    *,
    base: Path | None = None,
    step: str | int | None = None,
    options: Mapping[str, Any] | None = None,
    dtype: torch.dtype | str = "auto",
    **kwargs: Any,
) -> transformers.PreTrainedModel:
    """cls.from_pretrained of the model that a run is: the same parameters, in the same dtypes, as from a copy that `ckpt export` makes.

    run      a run, one checkpoint or a model directory
    cls      a model class or an Auto class; None: the one that config.json names
    base, step, options   as for ckptfs.open
    dtype    "auto": what config.json says; or a torch.dtype
    kwargs   transformers' own: device_map, tp_plan, quantization_config, attn_implementation ...

    transformers asks for its tensors one after another; each is read then, only the part that this process keeps (tp_plan), and nothing is held
    beside the model. CkptError: the run can't be read; ValueError: the view has no config.json (base= lends one).
    """
    _need()
    with View(run, base=base, step=step, options=options) as view, _side_files(view) as folder:
        config = transformers.AutoConfig.from_pretrained(
            folder, **({"trust_remote_code": True} if kwargs.get("trust_remote_code") else {})
        )
        model = _class(cls, config).from_pretrained(
            None,
            config=config,
            dtype=_dtype(dtype, config),
            state_dict={name: view.get_slice(name) for name in view.keys()},
            **kwargs,
        )
        if os.path.exists(os.path.join(folder, "generation_config.json")) and model.can_generate():
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model


def tokenizer_from_pretrained(
    run: Path,
    cls: type | None = None,
    *,
    base: Path | None = None,
    step: str | int | None = None,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> transformers.PreTrainedTokenizerBase:
    """The tokenizer (cls: AutoTokenizer; or AutoProcessor ...) that lies beside the model, or that the base lends."""
    _need()
    with View(run, base=base, step=step, options=options) as view, _side_files(view) as folder:
        return (cls or transformers.AutoTokenizer).from_pretrained(folder, **kwargs)


def _need():
    if _problem is not None:
        raise unusable(
            "ckptfs.transformers", _problem, ("transformers",), "transformers", "transformers"
        ) from _problem


@contextlib.contextmanager
def _side_files(view):
    """A folder with the view's files but the weights."""
    with tempfile.TemporaryDirectory(prefix="ckptfs-") as folder:
        for name in view.files():
            if not name.endswith(WEIGHTS):
                os.makedirs(os.path.dirname(os.path.join(folder, name)), exist_ok=True)
                with open(os.path.join(folder, name), "wb") as f:
                    f.write(view.read(name))
        if not view.config:
            raise ValueError(f"{view}: there is no config.json; base= lends one")
        yield folder


def _class(cls, config):
    mapping = getattr(cls, "_model_mapping", None)
    if mapping is not None:
        found = mapping[type(config)]
        return found[0] if isinstance(found, (list, tuple)) else found
    if cls is not None:
        return cls
    for name in config.architectures or []:
        if hasattr(transformers, name):
            return getattr(transformers, name)
    raise ValueError(
        f"config.json names no class that transformers has ({config.architectures}): give cls="
    )


def _dtype(dtype, config):
    if dtype != "auto":
        return dtype
    return config.dtype if config.dtype is not None else "float32"
