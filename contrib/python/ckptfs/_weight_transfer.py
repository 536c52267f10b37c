# SPDX-License-Identifier: Apache-2.0
"""The weight transfer backend of vLLM that takes a step of a run when a trainer has saved it.

It is registered by ckptfs.vllm.register(), and vLLM imports it when it is used.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config.load import LoadConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from ._library import CkptError, is_bucket
from .vllm import ModelLoader, _check_complete, _log, _packs_experts, _plans

try:
    from vllm.model_executor.model_loader.checkpoint_weight_patch import (
        CheckpointWeightPatch as Patch,
    )
    from vllm.model_executor.model_loader.checkpoint_weight_patch import (
        load_checkpoint_weight_patches as load_patches,
    )
except ImportError:  # before 0.29
    Patch = None


@dataclass
class Init(WeightTransferInitInfo):
    """What /init_weight_transfer_engine is given.

    Attributes:
        run: The run that the trainer saves to.
        options: Further members of --model-loader-extra-config, as ckptfs.vllm.ModelLoader has
            them.
    """

    run: str = ""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Update(WeightTransferUpdateInfo):
    """What /update_weights is given.

    Attributes:
        step: The step's name or number; None for the latest one that rank 0 sees.
        patches: Write only the elements that differ from the step that this backend gave the engine
            last, as vLLM's CheckpointWeightPatch. Nothing else may have changed the weights since.
    """

    step: str | int | None = None
    patches: bool = False


class Engine(WeightTransferEngine):
    """Takes the weights of a step."""

    init_info_cls, update_info_cls = Init, Update
    supports_draft_weight_update = False
    _given: dict[str, Any] | None = None
    _has: tuple[str, str | None, Any] | None = None  # run, step and base of the engine's weights

    def init_transfer_engine(self, init_info: Init) -> None:
        """Note the run, which may have no step yet.

        Args:
            init_info: Where the run is.

        Raises:
            CkptError: There is no such folder.
            ValueError: An option is wrong.
        """
        given = {**init_info.options, "run": init_info.run}
        if not init_info.run or not (is_bucket(init_info.run) or os.path.exists(init_info.run)):
            raise CkptError(
                "missing",
                f"there is no run '{init_info.run}': init_info is "
                '{"run": "path", "options": {...}}',
            )
        self._loader(given)
        self._given = given

    def start_weight_update(self) -> None:
        """Do nothing: receive_weights() changes nothing before it has read everything.

        Raises:
            CkptError: There was no init_weight_transfer_engine().
        """
        if self._given is None:
            raise CkptError("usage", "init_weight_transfer_engine was not called: it names the run")

    def receive_weights(self, update_info: Update) -> None:
        """Load a step. On an error in reading the engine keeps the weights that it has.

        Args:
            update_info: Which step.

        Raises:
            CkptError: An error in reading.
            ValueError: A parameter got no values.
        """
        self.start_weight_update()
        given = {**(self._given or {}), "step": update_info.step}
        loader = self._loader(given)
        had, has = self._has, None
        with loader._view(*loader._source(self.model_config, _plans.get(self.model))) as view:
            has = (view._run, view._step or None, view._options.get("base"))
            patches = self._patches(loader, had, view) if update_info.patches else None
        self._has = None  # until all is written
        if patches is not None:
            # They are in the places of the old weights, so there is no layerwise reload.
            load_patches(self.model, patches, validate_unique_indices=False)
        else:
            self._load_whole(self._loader({**given, "run": has[0], "step": has[1]}))
        self._has = has

    def _load_whole(self, loader):
        weights = loader.taken(self.model_config, self.model)
        initialize_layerwise_reload(self.model)
        loaded = self.model.load_weights(weights)
        finalize_layerwise_reload(self.model, self.model_config)
        if loaded is not None and self.model_config.quantization is None:
            _check_complete(self.model, loaded)

    def _patches(self, loader, had, view):
        """Return what differs between two steps, as vLLM's patches; nothing is written yet."""
        why = (
            "this vLLM has no CheckpointWeightPatch (0.29 has)"
            if Patch is None
            else "no step is known that the engine has: take one without patches first"
            if had is None
            else _no_patches(self.model, self.model_config)
        )
        if why:
            raise CkptError("unsupported", f'"patches": {why}')
        found = []
        with loader._open(*had) as old:
            same = view.unchanged(old)
            for name in view:
                if name not in same:
                    found.append(_patch(name, old[name], view[name], self.device))
        found = [patch for patch in found if patch is not None]
        _log.info("ckptfs: %s: %d of %d tensors are patched", view, len(found), len(view))
        return found

    def finish_weight_update(self) -> None:
        """Do nothing: the weights are there."""

    def shutdown(self) -> None:
        """Forget the run."""
        self._given = self._has = None

    @staticmethod
    def _loader(given):
        return ModelLoader(LoadConfig(load_format="ckptfs", model_loader_extra_config=given))


def _no_patches(model, model_config):
    """Return why single elements of the model can't be written, or None."""
    if model_config.quantization is not None:
        return f"quantization={model_config.quantization}: whole steps are needed"
    for name, module in model.named_modules():
        packed = getattr(getattr(module, "cpu_linear", None), "__code__", None)
        if (packed is not None and packed.co_freevars) or _packs_experts(module):
            return f"{name} keeps its weights in another order: whole steps are needed"
    return None


def _patch(name, old, new, device):
    """Return the elements in which a tensor differs; None if there are none."""
    if old.shape != new.shape or old.dtype != new.dtype:
        raise CkptError("conflict", f"'{name}' has another shape or dtype than in the step before")
    if new.numel() == 0:
        return None
    bits = getattr(torch, f"int{8 * new.element_size()}")
    new = new.reshape(-1)
    at = torch.nonzero(old.reshape(-1).view(bits) != new.view(bits)).reshape(-1)
    if not len(at):
        return None
    values = new[at]
    if not new.is_floating_point() or torch.isnan(values).any():
        raise CkptError(
            "unsupported",
            f"\"patches\": '{name}' changes to values that vLLM's patches can't say (NaN, or no "
            "floating-point numbers): take the step without patches",
        )
    at = at.to(torch.int32 if new.numel() < 1 << 31 else torch.int64)
    return Patch(name, tuple(old.shape), new.dtype, values.to(device), at.to(device))
