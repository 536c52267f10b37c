# SPDX-License-Identifier: Apache-2.0
"""nanotron's models from checkpoints under any parallel sizes, each byte read once per job.

from ckptfs.nanotron import load_weights

# In place of nanotron.serialize.load_weights.
param_shard_metadata = load_weights(model, parallel_context, "run/checkpoints")

# From what another framework saved: a Hugging Face model, a run of Megatron, a DCP.
load_weights(model, parallel_context, "org/model")
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Callable

from ._boxes import load_boxes
from ._comm import joined
from ._frameworks import unusable
from ._library import CkptError
from ._state_dict import step_folder
from ._view import View

if TYPE_CHECKING:
    import torch

    from ._view import Path

try:
    from nanotron.parallel.parameters import NanotronParameter
    from nanotron.serialize.metadata import TensorMetadata

    _problem: ImportError | None = None
except ImportError as e:
    _problem = e

SHARD = re.compile(
    r"_pp-rank-(\d+)-of-(\d+)_tp-rank-(\d+)-of-(\d+)(?:_exp-rank-\d+-of-\d+)?\.safetensors$"
)
MOST_HEADER = 100 << 20  # bytes, safetensors' own limit


class ParamShardMetadata(dict):
    """What nanotron's load_optimizer asks for: how each parameter was sharded.

    It is {parameter: {(pp rank, tp rank), both as text: TensorMetadata}}.

    Attributes:
        stats: The load's statistics; sizes in bytes, times in seconds.
    """

    stats: dict[str, int | float] | None = None


def load_weights(
    model: torch.nn.Module,
    parallel_context: Any,
    root_folder: Path,
    filtered_state_dict: Mapping[str, torch.Tensor] | None = None,
    *,
    step: str | int | None = None,
    view: str | None = None,
    options: Mapping[str, Any] | None = None,
    readers: str = "auto",
    load_options: Mapping[str, Any] | None = None,
    progress: bool | Callable[[int, int], None] = False,
) -> ParamShardMetadata:
    """Do what nanotron.serialize.load_weights does, as one load of all ranks.

    All ranks of parallel_context.world_pg call it together. Floating tensors are cast to the
    parameters' dtypes. Attributes that early checkpoints have beside a tensor (Mamba's
    _no_weight_decay) are not read, because the model's class sets them. Parameters are unchanged if
    an error is found before data is read.

    Args:
        model: The module whose parameters are NanotronParameters, in memory (not on the meta
            device). Sharded ones get their slices (local_global_slices_pairs) of the whole tensor,
            tied ones the tensor of the tie's first name.
        parallel_context: nanotron's ParallelContext.
        root_folder: One checkpoint, as for nanotron's own load_weights, a run, or anything else
            that ckptfs reads, such as a Hugging Face model.
        filtered_state_dict: {name: tensor} to fill instead of model.state_dict(), under names of
            the model's parameters; None fills the model.
        step: Of a run: the step's name or number; None is the latest one that rank 0 sees.
        view: "raw" for a checkpoint as it is; "nanotron" for the model of any checkpoint, laid out
            under nanotron's names. None is "raw" for a checkpoint of nanotron's, and "nanotron" for
            any other.
        options: As for ckptfs.open, such as {"base": ...}.
        readers: As for ckptfs.load_state_dict.
        load_options: As for ckptfs.load_state_dict.
        progress: As for ckptfs.load_state_dict.

    Returns:
        A ParamShardMetadata: for parameters that were saved over other pipeline or tensor parallel
        sizes how they were sharded, and {} for the others.

    Raises:
        ImportError: nanotron can't be imported.
        NotFoundError: The checkpoint lacks a parameter.
        CkptError: "conflict" for a parameter of another shape; "unsupported" for a parameter that
            is not a NanotronParameter, or for slices with a step. All ranks raise it.
    """
    if _problem is not None:
        raise unusable(
            "ckptfs.nanotron",
            _problem,
            ("torch", "nanotron"),
            "nanotron",
            "git+https://github.com/huggingface/nanotron",
        ) from _problem
    group = parallel_context.world_pg
    # nanotron's ranks may load what they have just saved, without waiting for each other: each
    # reads its own files. Here each reads of all, and what they saved is there when all have come.
    with joined(group) as comm:
        comm.share(lambda: None, lambda words: None)
    folder = step_folder(root_folder, step, group)
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(View(folder, view=view or "raw", options=options))
        if view is None and source.info()["format"] != "nanotron":
            source = stack.enter_context(source.again(view="nanotron"))
        state = model.state_dict() if filtered_state_dict is None else filtered_state_dict
        metadata = ParamShardMetadata()

        def boxes():
            sources = _Sources(model, source)
            metadata.update({name: sources.metadata(name, parallel_context) for name in state})
            return [box for name, tensor in state.items() for box in sources.boxes(name, tensor)]

        metadata.stats = load_boxes(
            boxes, source, group, readers=readers, load_options=load_options, progress=progress
        )
    return metadata


class _Sources:
    """The parts of the view's tensors that a model's parameters are."""

    def __init__(self, model, view):
        self.model, self.view = model, view
        self.prefixes = {id(m): f"{name}." if name else "" for name, m in model.named_modules()}

    def _parameter(self, name):
        try:
            found = self.model.get_parameter(name)
        except AttributeError:
            found = None
        if not isinstance(found, NanotronParameter):
            raise CkptError(
                "unsupported",
                f"'{name}' of the model is a {type(found).__name__}, not a NanotronParameter: "
                "nanotron saves nothing else",
            )
        return found

    def _stored(self, name, parameter):
        """Return the view's name of a parameter: tied parameters are stored once."""
        if parameter.is_tied:
            name = parameter.get_tied_info().get_full_name_from_module_id_to_prefix(
                module_id_to_prefix=self.prefixes
            )
        # A model inside DistributedDataParallel has "module." before every name, which the view
        # leaves out, whether the model was saved so or not.
        bare = name.removeprefix("module.")
        if name not in self.view and bare not in self.view:
            raise CkptError("missing", f"'{name}' is not in {self.view}")
        return name if name in self.view else bare

    def boxes(self, name, tensor):
        """Return [(stored name, offset, part of the tensor)] that fill a parameter's tensor."""
        parameter = self._parameter(name)
        stored, tensor = self._stored(name, parameter), tensor.detach()
        have, sharded = (
            self.view._tensors[stored].shape,
            parameter.get_sharded_info() if parameter.is_sharded else None,
        )
        want = [int(n) for n in (sharded.unsharded_shape if sharded else tensor.shape)]
        if want != have:
            raise CkptError(
                "conflict",
                f"'{name}': the model's whole tensor has shape {want}, that of the checkpoint's "
                f"'{stored}' is {have}",
            )
        if not sharded:
            return [(stored, [0] * tensor.dim(), tensor)]
        return [
            _box(name, stored, pair, tensor, have) for pair in sharded.local_global_slices_pairs
        ]

    def metadata(self, name, parallel_context):
        """Return how a parameter was sharded when it was saved; {} if that was as it is now."""
        parameter = self._parameter(name)
        if not parameter.is_sharded:
            return {}
        shards = {}
        for piece in self.view.explain(self._stored(name, parameter))["pieces"]:
            if found := SHARD.search(piece["file"]):
                shards[piece["file"]] = found
        now = [str(group.size()) for group in (parallel_context.pp_pg, parallel_context.tp_pg)]
        if any([found[2], found[4]] == now for found in shards.values()):
            return {}
        return {
            (found[1], found[3]): TensorMetadata.from_str_dict(_metadata_of(file))
            for file, found in shards.items()
        }


def _box(name, stored, pair, tensor, shape):
    if any(s.step not in (None, 1) for s in (*pair.local_slices, *pair.global_slices)):
        raise CkptError("unsupported", f"'{name}': slices with a step: {pair}")
    local = tensor[tuple(pair.local_slices)]
    ranges = [s.indices(size) for s, size in zip(pair.global_slices, shape)]
    n = [hi - lo for lo, hi, _ in ranges]
    if list(local.shape) != n:
        raise CkptError(
            "conflict",
            f"'{name}': its slices {pair} take {list(local.shape)} of the parameter, but {n} of "
            "the whole tensor",
        )
    return stored, [lo for lo, _, _ in ranges], local


def _metadata_of(file):
    """Return the texts in a safetensors file's header."""
    with open(file, "rb") as f:
        size = struct.unpack("<Q", f.read(8))[0]
        if size > min(MOST_HEADER, os.fstat(f.fileno()).st_size):
            raise CkptError("format", f"'{file}': its header is said to have {size} bytes")
        return json.loads(f.read(size)).get("__metadata__", {})
