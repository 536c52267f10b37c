# SPDX-License-Identifier: Apache-2.0
"""Serves a training run with vLLM, without a copy of its weights.

    # What vLLM reads before the weights: config, tokenizer.
    ckpt export --no-weights run/checkpoints served/
    vllm serve served/ --load-format ckptfs \
        --model-loader-extra-config '{"run": "run/checkpoints"}'

The installed package has an entry point (vllm.general_plugins), register(), which makes the load
format known in each of vLLM's processes.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ._ahead import ahead
from ._boxes import load_boxes
from ._comm import kept_comm
from ._frameworks import unusable
from ._library import CkptError
from ._running import surroundings
from ._state_dict import step_folder
from ._tensors import same_bits
from ._view import TORCH, View

if TYPE_CHECKING:
    from ._view import Path

try:
    import torch
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader as _Base

    _problem: ImportError | None = None
except ImportError as e:
    _problem, _Base = e, object

BATCH_BYTES = 256 << 20
OWN = {
    "run": None,
    "step": None,
    "prefetch": 2,
    "readers": "auto",
    "batch_bytes": BATCH_BYTES,
    "load_options": None,
}


class ModelLoader(_Base):
    """The loader behind --load-format ckptfs.

    vLLM's weight loaders take whole tensors, by their Hugging Face names, and keep their part.
    --model-loader-extra-config is a JSON object with these members, all of which may be absent:

        run: A run, one checkpoint or a model directory; without it, the model that vLLM was given.
            The folder that vLLM was given is its base, unless another base is given: the engine's
            model is made from that folder's config, which the run may lack.
        step: The step's name or number; without it, the latest one that rank 0 sees.
        readers: "auto", "once" and "node": all ranks of vLLM's world group load together, in
            batches, and each byte is read once in the job, or once on each node. "each": every rank
            reads for itself, and ranks of a node share the page cache.
        batch_bytes: How much is loaded together, in bytes (256 MiB). Up to three batches are in
            memory at a time: of the CUDA devices, if every rank has one, else of the hosts.
        prefetch: How many tensors are read ahead (2), on the host, with readers="each" and for one
            rank.
        load_options: As for ckptfs.load_state_dict.

    All other members are options of ckptfs.open: base, lora, dtype, dequantize and so on.

    Args:
        load_config: vLLM's LoadConfig.

    Raises:
        ImportError: vLLM can't be imported.
        ValueError: The extra config is not a JSON object. From load_weights(): a parameter of the
            model got no values.
        CkptError: From load_weights(): an error in reading; "conflict" if the model ties two
            parameters that have different values in the run, such as an lm_head and an embedding.
    """

    def __init__(self, load_config: Any):
        _need()
        super().__init__(load_config)
        given = load_config.model_loader_extra_config or {}
        if not isinstance(given, dict):
            raise ValueError(
                "--model-loader-extra-config of the load format ckptfs is a JSON object, not a "
                f"{type(given).__name__}"
            )
        self._own = {name: given.get(name, default) for name, default in OWN.items()}
        self._options = {name: value for name, value in given.items() if name not in OWN}

    def download_model(self, model_config: Any) -> None:
        """Open the run once, so that a wrong path or option is an error. Nothing is fetched.

        Args:
            model_config: vLLM's ModelConfig.

        Raises:
            CkptError: The run can't be read.
        """
        self._open(self._run(model_config), self._own["step"], self._base(model_config)).close()

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Fill the engine's model through its own method.

        Args:
            model: The engine's model, a torch.nn.Module.
            model_config: vLLM's ModelConfig.

        Raises:
            CkptError: As the class says.
            ValueError: As the class says.
        """
        others = [source.model_or_path for source in getattr(model, "secondary_weights", ())]
        if others:
            raise CkptError(
                "unsupported",
                f"{type(model).__name__} has weights of other models beside its own "
                f"({', '.join(map(str, others))}): mount the run with ckptfs and use vLLM's own "
                "load format",
            )
        weights = self.weights(self._run(model_config), self._base(model_config))
        load: Any = model.load_weights  # vLLM's models have it
        loaded = load(_without_lost(model, weights))
        if loaded is not None and getattr(model_config, "quantization", None) is None:
            _check_complete(model, loaded)

    def weights(self, run: Path, base: Path | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) pairs in the order of the files.

        Args:
            run: As for ckptfs.open.
            base: As for ckptfs.open.

        Yields:
            The Hugging Face name, and the whole tensor, in the view's dtype: on the current CUDA
            device if every rank that loads has one, else on the CPU.

        Raises:
            CkptError: An error in reading.
        """
        group = _group()
        view = self._open(
            step_folder(run, self._own["step"], group) if group else run,
            None if group else self._own["step"],
            base,
        )
        with view:
            if self._own["readers"] == "each":
                group = None
            device = _device()
            if group is None and device is None:
                yield from view.items(prefetch=self._own["prefetch"])
                return
            comm, _ = kept_comm(group, device, no_dist=group is None)
            same = surroundings()  # the stream on which the model's own method copies
            try:
                for batch in ahead(
                    lambda infos: self._loaded(infos, view, comm, same),
                    _batches(view.infos(), self._own["batch_bytes"]),
                    1,
                ):
                    yield from batch
            finally:
                comm.unhold()

    def _loaded(self, infos, view, comm, same):
        """Load one batch, on all ranks together, to where the Comm loads."""
        device = "cpu" if comm.device is None else torch.device("cuda", comm.device)
        with same():
            pairs = [
                (i.name, torch.empty(i.shape, dtype=getattr(torch, TORCH[i.dtype]), device=device))
                for i in infos
            ]
            load_boxes(
                [(name, [0] * t.dim(), t) for name, t in pairs],
                view,
                comm,
                readers=self._own["readers"],
                load_options=self._own["load_options"],
            )
        return pairs

    def _run(self, model_config):
        run = self._own["run"] or model_config.model
        if not os.path.exists(run):
            raise CkptError(
                "missing",
                f"there is no run '{run}': --model-loader-extra-config '{{\"run\": \"path\"}}' "
                "says where it is",
            )
        return run

    def _base(self, model_config):
        """Return the folder that the engine's model is made from, which is the run's base.

        None if it is the run itself, or is not on this machine under that name.
        """
        folder, run = model_config.model, self._run(model_config)
        return folder if os.path.isdir(folder) and not os.path.samefile(folder, run) else None

    def _open(self, run, step, base):
        return View(run, step=step, options={"base": base, **self._options})


@functools.cache
def register() -> None:
    """Register the load format "ckptfs"; vLLM calls it as a plug-in.

    Raises:
        ImportError: vLLM can't be imported.
    """
    _need()
    register_model_loader("ckptfs")(ModelLoader)


def _need():
    if _problem is not None:
        raise unusable("ckptfs.vllm", _problem, ("torch", "vllm"), "vllm", "vllm") from _problem


def _group():
    """Return the ranks of vLLM's job, which all load at the same time; None for this one alone."""
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    from vllm.distributed import get_world_group

    return get_world_group().cpu_group


def _device():
    """Return the number of the current CUDA device; None if this process uses none."""
    cuda = torch.cuda
    return cuda.current_device() if cuda.is_available() and cuda.is_initialized() else None


def _batches(infos, most):
    """Yield lists of consecutive tensors with so many bytes together: the same on all ranks."""
    batch, size = [], 0
    for info in infos:
        if batch and size + info.nbytes > most:
            yield batch
            batch, size = [], 0
        batch.append(info)
        size += info.nbytes
    if batch:
        yield batch


def _without_lost(model, weights):
    """Yield the pairs, and check that no values are lost.

    Of the names of a tied parameter vLLM loads one and silently skips the others.
    """
    names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    tied = {name: same[0] for same in names.values() if len(same) > 1 for name in same}
    mapper, given = getattr(model, "hf_to_vllm_mapper", None), {}
    for name, tensor in weights:
        for own in mapper.apply_list([name]) if mapper is not None else [name]:
            other, value = (
                given.setdefault(tied[own], (name, tensor)) if own in tied else (name, tensor)
            )
            if value is not tensor and not (
                value.shape == tensor.shape
                and value.dtype == tensor.dtype
                and same_bits(value, tensor)
            ):
                raise CkptError(
                    "conflict",
                    f"'{name}' differs from '{other}' in the run, but vLLM's "
                    f"{type(model).__name__} ties them: does config.json of the folder that vLLM "
                    "serves say tie_word_embeddings=true of another model? `ckpt export "
                    "--no-weights` makes the folder",
                )
        yield name, tensor


def _check_complete(model, loaded):
    """Raise ValueError for parameters that got no values, as vLLM's own loader does.

    What a quantisation method makes itself is not missing.
    """
    missing = {name for name, _ in model.named_parameters()} - set(loaded)
    for at, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "uses_meta_device", False) or getattr(
            method, "process_weights_after_loading", None
        ):
            missing -= {f"{at}.{name}" if at else name for name, _ in module.named_parameters()}
    if missing:
        raise ValueError(
            f"these parameters got nothing from the checkpoint: {', '.join(sorted(missing))}"
        )
