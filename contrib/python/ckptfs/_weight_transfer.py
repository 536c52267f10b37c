# SPDX-License-Identifier: Apache-2.0
"""The weight transfer backend of vLLM that takes a step of a run when a trainer has saved it.

It is registered by ckptfs.vllm.register(), and vLLM imports it when it is used.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

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
from .vllm import ModelLoader, _check_complete


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
    """

    step: str | int | None = None


class Engine(WeightTransferEngine):
    """Takes the weights of a step."""

    init_info_cls, update_info_cls = Init, Update
    supports_draft_weight_update = False
    _given: dict[str, Any] | None = None

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
        loader = self._loader({**(self._given or {}), "step": update_info.step})
        weights = loader.taken(self.model_config, self.model)
        initialize_layerwise_reload(self.model)
        loaded = self.model.load_weights(weights)
        finalize_layerwise_reload(self.model, self.model_config)
        if loaded is not None and self.model_config.quantization is None:
            _check_complete(self.model, loaded)

    def finish_weight_update(self) -> None:
        """Do nothing: the weights are there."""

    def shutdown(self) -> None:
        """Forget the run."""
        self._given = None

    @staticmethod
    def _loader(given):
        return ModelLoader(LoadConfig(load_format="ckptfs", model_loader_extra_config=given))
