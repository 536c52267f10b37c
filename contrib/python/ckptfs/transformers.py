# SPDX-License-Identifier: Apache-2.0
"""transformers' models straight from a training run, without a mount and without a copy.

from ckptfs.transformers import from_pretrained, tokenizer_from_pretrained

# tp_plan="auto" under torchrun, quantization_config=... and so on, as usual.
model = from_pretrained("run/checkpoints", device_map="auto")
tokenizer = tokenizer_from_pretrained("run/checkpoints", base="org/name")
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ._frameworks import unusable
from ._view import View

if TYPE_CHECKING:
    import torch

    from ._view import Path

try:
    import transformers

    _problem: ImportError | None = None
except ImportError as e:
    _problem = e

WEIGHTS = (".safetensors", ".safetensors.index.json")


def from_pretrained(
    run: Path,
    cls: type[Any] | None = None,
    *,
    base: Path | None = None,
    step: str | int | None = None,
    options: Mapping[str, Any] | None = None,
    dtype: torch.dtype | str = "auto",
    **kwargs: Any,
) -> transformers.PreTrainedModel:
    """Return the model that a run holds, by transformers' own from_pretrained.

    Parameters and dtypes are those of a copy that `ckpt export` makes. transformers asks for its
    tensors one after another; each is read then, and only the part that this process keeps
    (tp_plan).

    Args:
        run: A run, one checkpoint or a model directory.
        cls: A model class or an Auto class; None is the one that config.json names.
        base: As for ckptfs.open.
        step: As for ckptfs.open.
        options: As for ckptfs.open.
        dtype: A torch.dtype, or "auto" for what config.json says.
        **kwargs: transformers' own: device_map, tp_plan, quantization_config, attn_implementation
            and so on.

    Returns:
        The model.

    Raises:
        ImportError: transformers can't be imported.
        CkptError: The run can't be read.
        ValueError: The view has no config.json (base= gives one), or no class is known for it.
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
            state_dict={name: view.get_slice(name) for name in view},
            **kwargs,
        )
        if os.path.exists(os.path.join(folder, "generation_config.json")) and model.can_generate():
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model


def tokenizer_from_pretrained(
    run: Path,
    cls: type[Any] | None = None,
    *,
    base: Path | None = None,
    step: str | int | None = None,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> transformers.PreTrainedTokenizerBase:
    """Return the tokenizer that lies beside the model, or beside the base.

    Args:
        run: As for from_pretrained.
        cls: The class: None is AutoTokenizer; AutoProcessor, for example.
        base: As for ckptfs.open.
        step: As for ckptfs.open.
        options: As for ckptfs.open.
        **kwargs: transformers' own.

    Returns:
        The tokenizer, or what the class makes.

    Raises:
        ImportError: transformers can't be imported.
        CkptError: The run can't be read.
        ValueError: The view has no config.json.
    """
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
    """Provide a folder with the view's files except the weights."""
    with tempfile.TemporaryDirectory(prefix="ckptfs-") as folder:
        for name in view.files():
            if not name.endswith(WEIGHTS):
                os.makedirs(os.path.dirname(os.path.join(folder, name)), exist_ok=True)
                with open(os.path.join(folder, name), "wb") as f:
                    f.write(view.read(name))
        if not view.config:
            raise ValueError(f"{view}: there is no config.json; base= gives one")
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
