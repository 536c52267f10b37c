# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.checkpoint (and so torchtitan, Lightning, NeMo Automodel) reads what ckptfs reads:

import torch.distributed.checkpoint as dcp
from ckptfs.torch import StorageReader

dcp.load(model.state_dict(), storage_reader=StorageReader("run/checkpoints"))           # nanotron, Megatron, Hugging Face ...
dcp.load({"app": app}, storage_reader=StorageReader("run/step-10", view="raw"))         # a DCP: optimizer, lr and step as well
"""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING, Any, Callable, Mapping

from ._boxes import load_boxes
from ._frameworks import unusable
from ._library import CkptError
from ._objects import is_whole
from ._view import TORCH, View

if TYPE_CHECKING:
    from ._view import Path

try:
    import torch
    from torch.distributed.checkpoint import StorageReader as _Base

    _problem = None
except ImportError as e:
    _problem, _Base = e, object


class StorageReader(_Base):
    """A storage reader for dcp.load: all boxes of a rank's plan are declared, then all ranks load together, every byte read once.

    run            a run, one checkpoint or a model directory; dcp.load's checkpoint_id goes before it
    view           "hf" (default): the hub's names; "memory": those that transformers' classes have in memory; "raw": the framework's own, with
                   optimizer states, and with what is no tensor (lr, step ...) as plain Python values
    process_group  the one that dcp.load is given, if it is given one; None: the default group. With no_dist, and where torch.distributed is not
                   initialised, each process loads for itself
    base, step, options, readers, load_options, progress and others: as for ckptfs.load_state_dict

    Floating tensors are cast to the dtype of their destinations. Tied weights have all the names that the model's class has for them. `stats`: the statistics of the last load, of all ranks together.
    Errors: CkptError, which dcp.load wraps in its CheckpointException; KeyError and ValueError are the planner's.
    """

    def __init__(
        self,
        run: Path,
        *,
        view: str | None = None,
        base: Path | None = None,
        step: str | int | None = None,
        options: Mapping[str, Any] | None = None,
        process_group: torch.distributed.ProcessGroup | None = None,
        readers: str = "auto",
        load_options: Mapping[str, Any] | None = None,
        progress: bool | Callable[[int, int], None] = False,
        **more: Any,
    ):
        if _problem is not None:
            raise unusable("ckptfs.torch", _problem, ("torch",), "torch", "torch") from _problem
        super().__init__()
        self.checkpoint_id, self.stats = os.fspath(run), None
        self._given = dict(
            more, view=None if view == "hf" else view, base=base, step=step, options=options
        )
        self._load = dict(readers=readers, load_options=load_options, progress=progress)
        self._group, self._view, self._tied = process_group, None, {}

    def reset(self, checkpoint_id=None):
        self._close()
        if checkpoint_id is not None:
            self.checkpoint_id = os.fspath(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id):
        return os.path.isdir(checkpoint_id)

    def read_metadata(self):
        """The view's tensors as torch's Metadata, each one chunk. This rank alone: no other takes part."""
        from torch.distributed.checkpoint.metadata import (
            BytesStorageMetadata,
            ChunkStorageMetadata,
            Metadata,
            StorageMeta,
            TensorProperties,
            TensorStorageMetadata,
        )

        self._close()
        self._view = View(self.checkpoint_id, **self._given)
        found = {}
        for info in self._view._tensors.values():
            size = torch.Size(info.shape)
            found[info.name] = TensorStorageMetadata(
                TensorProperties(dtype=getattr(torch, TORCH[info.dtype])),
                size,
                [ChunkStorageMetadata(torch.Size([0] * len(size)), size)],
            )
        self._tied = self._view.tied()
        found.update(
            {name: found[stored] for name, stored in self._tied.items()}
        )  # state dicts have both names
        if self._view.is_raw():
            for name, value in self._view.objects().items():
                if name not in found and is_whole(value):
                    found[name] = BytesStorageMetadata()
        return Metadata(
            found,
            planner_data={name: (name,) for name in found},
            storage_meta=StorageMeta(checkpoint_id=self.checkpoint_id),
        )

    def set_up_storage_reader(self, metadata, is_coordinator):
        pass

    def prepare_local_plan(self, plan):
        return plan

    def prepare_global_plan(self, plans):
        """The plans, each with the number of ranks that load: only here is it known (no_dist)."""
        for plan in plans:
            plan.storage_data = len(plans)
        return plans

    def read_data(self, plan, planner):
        from torch.distributed.checkpoint.planner import LoadItemType

        boxes, todo, objects = [], [], []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                objects.append(item)
                continue
            tensor = planner.resolve_tensor(item).detach()
            if list(tensor.shape) != list(item.lengths):
                raise CkptError(
                    "usage",
                    f"'{item.storage_index.fqn}': the planner's tensor has shape {list(tensor.shape)}, its plan {list(item.lengths)}",
                )
            name = item.storage_index.fqn
            boxes.append((self._tied.get(name, name), tuple(item.storage_offsets), tensor))
            todo.append((item, tensor))
        self.stats = load_boxes(
            boxes, self._view, self._loading_group(plan.storage_data), **self._load
        )
        for item, tensor in todo:
            planner.commit_tensor(item, tensor)
        values = self._view.objects() if objects else {}
        for item in objects:
            buffer = io.BytesIO()
            torch.save(values[item.storage_index.fqn], buffer)
            buffer.seek(0)
            planner.load_bytes(item, buffer)
        self._close()
        done = torch.futures.Future()
        done.set_result(None)
        return done

    def _loading_group(self, ranks):
        """The process group of so many ranks; False: this process alone."""
        dist = torch.distributed
        if ranks in (None, 1) or not (dist.is_available() and dist.is_initialized()):
            return False
        group = self._group if self._group is not None else dist.group.WORLD
        if dist.get_world_size(group) != ranks:
            raise CkptError(
                "usage",
                f"{ranks} ranks load, but the group of this reader has {dist.get_world_size(group)}: give StorageReader the "
                "process_group that dcp.load has",
            )
        return group

    def _close(self):
        if self._view is not None:
            self._view.close()
        self._view = None
