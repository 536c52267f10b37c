# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.checkpoint (and so torchtitan, Lightning, NeMo Automodel) on what ckptfs reads.

import torch.distributed.checkpoint as dcp
from ckptfs.torch import StorageReader

# A model of any framework.
dcp.load(model.state_dict(), storage_reader=StorageReader("run/checkpoints"))

# Model and AdamW of a run of any framework, for torch's set_state_dict.
model_state, optim_state = get_state_dict(model, optimizer)
state = {"model": model_state, "optim": optim_state}
dcp.load(state, storage_reader=StorageReader("run/checkpoints", optimizer=True))

# A distributed checkpoint with its optimizer, lr and step.
dcp.load({"app": app}, storage_reader=StorageReader("run/step-10", view="raw"))
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Callable

from ._boxes import load_boxes
from ._comm import group_of
from ._frameworks import unusable
from ._library import CkptError, is_bucket, warn
from ._objects import is_whole
from ._view import View, torch_dtype

if TYPE_CHECKING:
    from ._view import Path

try:
    import torch
    from torch.distributed.checkpoint import StorageReader as _Base

    _problem: ImportError | None = None
except ImportError as e:
    _problem, _Base = e, object  # type: ignore[assignment, misc]


def _path_of(name: str) -> tuple[str | int, ...]:
    """Return the path in the state dict of a name in a view with an optimizer.

    In the view "dcp" it is nested, below "model" and "optim"; torchtitan's has the model's names
    flat, and the optimizer's below "optimizer".
    """
    top, rest = name.split(".", 1)
    if top in ("model", "optimizer"):
        return (top, rest)
    if top != "optim":
        return (name,)
    kind, rest = rest.split(".", 1)
    if kind == "param_groups":
        number, key = rest.split(".", 1)
        return (top, kind, int(number), key)
    return (top, kind, *rest.rsplit(".", 1))


class StorageReader(_Base):
    """A storage reader for dcp.load: the ranks declare the boxes of their plans and load together.

    Every byte is read once. Floating tensors are cast to the dtypes of their destinations. Tied
    weights have all names that the model's class has for them. With dcp.load's no_dist, and where
    torch.distributed is not initialised, each process loads alone.

    Args:
        run: A run, one checkpoint or a model directory; dcp.load's checkpoint_id replaces it.
        view: None or "hf" for the hub's names; "memory" for those that transformers' classes have
            in memory; "raw" for the framework's own, with optimizer states, and with values that
            are not tensors (lr, step and so on) as plain Python values; "torchtitan" for
            torchtitan's names of any checkpoint.
        optimizer: The model, below "model.", with what AdamW has of it, below "optim.", as torch's
            get_state_dict names them: the view "dcp" with the option optimizer, whose further
            options (lr and so on) `more` takes. The view may be None, "hf" or "memory"; or
            "torchtitan", for what its CheckpointManager gives to dcp.load, with fuse_qkv=True for
            a model with fuse_qkv.
        base: As for ckptfs.open.
        step: As for ckptfs.open.
        options: As for ckptfs.open.
        process_group: The one that dcp.load is given, if it is given one (a DeviceMesh will do);
            None is the default group.
        readers: As for ckptfs.load_state_dict.
        load_options: As for ckptfs.load_state_dict.
        progress: As for ckptfs.load_state_dict.
        **more: Further options of ckptfs.open.

    Attributes:
        stats: The statistics of the last load, of all ranks together; sizes in bytes, times in
            seconds.

    Raises:
        ImportError: torch can't be imported.
        CkptError: From dcp.load, which wraps it in its CheckpointException.
        KeyError: From dcp.load's planner, for a name that is not there.
        ValueError: From dcp.load's planner, for another shape.
    """

    def __init__(
        self,
        run: Path,
        *,
        view: str | None = None,
        optimizer: bool = False,
        base: Path | None = None,
        step: str | int | None = None,
        options: Mapping[str, Any] | None = None,
        process_group: torch.distributed.ProcessGroup | torch.distributed.DeviceMesh | None = None,
        readers: str = "auto",
        load_options: Mapping[str, Any] | None = None,
        progress: bool | Callable[[int, int], None] = False,
        **more: Any,
    ):
        if _problem is not None:
            raise unusable("ckptfs.torch", _problem, ("torch",), "torch", "torch") from _problem
        super().__init__()
        self.checkpoint_id, self.stats = os.fspath(run), None
        if optimizer:
            if view not in (None, "hf", "memory", "torchtitan"):
                raise CkptError(
                    "usage",
                    f"optimizer=True goes with the views 'memory' and 'torchtitan', not '{view}'",
                )
            more["optimizer"] = True
            if view != "torchtitan":
                more["names"], view = "memory" if view == "memory" else "hub", "dcp"
        self._optimizer = optimizer
        self._given = dict(
            more, view=None if view == "hf" else view, base=base, step=step, options=options
        )
        self._load = {"readers": readers, "load_options": load_options, "progress": progress}
        self._group = process_group
        self._view: View | None = None
        self._tied: dict[str, str] = {}

    def reset(self, checkpoint_id=None):
        """Begin another load; checkpoint_id replaces the run unless it is None."""
        self._close()
        if checkpoint_id is not None:
            self.checkpoint_id = os.fspath(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id):
        """Return whether a checkpoint_id is a directory, or in a bucket."""
        return is_bucket(checkpoint_id) or os.path.isdir(checkpoint_id)

    def read_metadata(self):
        """Return the view's tensors as torch's Metadata, one chunk each; without other ranks.

        `planner_data`, from which torch makes the nested state dict where it loads a whole
        checkpoint or one key of it, has the paths that the checkpoint was saved with in view="raw"
        of one of torch's own; in other views and formats names are flat: each is a key of the
        state dict. Values that only code could make (view="raw") are left out, with a warning.
        """
        from torch.distributed.checkpoint.metadata import (
            BytesStorageMetadata,
            ChunkStorageMetadata,
            Metadata,
            StorageMeta,
            TensorProperties,
            TensorStorageMetadata,
        )

        self._close()
        # Every rank opens its own; one of them warns.
        dist = torch.distributed
        other = dist.is_available() and dist.is_initialized() and dist.get_rank() > 0
        self._view = View(self.checkpoint_id, told=None if other else (), **self._given)
        found = {}
        for info in self._view._tensors.values():
            size = torch.Size(info.shape)
            try:
                dtype = torch_dtype(info.dtype)
            except CkptError as e:
                warn(f"left out: '{info.name}': {e}")
                continue
            found[info.name] = TensorStorageMetadata(
                TensorProperties(dtype=dtype),
                size,
                [ChunkStorageMetadata(torch.Size([0] * len(size)), size)],
            )
        self._tied = self._view.tied()
        # State dicts have both names.
        found.update(
            {name: found[stored] for name, stored in self._tied.items() if stored in found}
        )
        paths: dict[str, tuple[str | int, ...]] = {}
        if self._optimizer:
            found.update({name: BytesStorageMetadata() for name in self._values()})
            paths = {name: _path_of(name) for name in found}
        elif self._view.is_raw():
            values = self._view.objects()
            lost = [name for name, value in values.items() if not is_whole(value)]
            found.update({n: BytesStorageMetadata() for n in values if n not in (*found, *lost)})
            if lost and not other:
                warn(
                    f"'{self.checkpoint_id}': {len(lost)} values that only code could make are "
                    f"left out: {', '.join(lost[:5])}{' ...' if len(lost) > 5 else ''}"
                )
            if self._given["view"] == "raw":
                paths = self._view.paths()
        return Metadata(
            found,
            planner_data={name: paths.get(name, (name,)) for name in found},
            storage_meta=StorageMeta(checkpoint_id=self.checkpoint_id),
        )

    def set_up_storage_reader(self, metadata, is_coordinator):
        """Do nothing: read_metadata() has opened the view."""
        pass

    def prepare_local_plan(self, plan):
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans):
        """Return the plans, each with the number of ranks: only here it is known (no_dist).

        Raises:
            CkptError: "missing" if no rank's plan asks for anything, though the view has tensors:
                torch's planners for whole checkpoints leave out every name that does not lie below
                the keys that they are given.
        """
        if self._view is not None and len(self._view) and not any(plan.items for plan in plans):
            names = self._view.keys()
            raise CkptError(
                "missing",
                f"nothing of '{self.checkpoint_id}' was asked for: it has {len(names)} tensors, "
                f"such as '{names[0]}', and none under a key that was given",
            )
        for plan in plans:
            plan.storage_data = len(plans)
        return plans

    def read_data(self, plan, planner):
        """Load what the planner wants, on all ranks together.

        Args:
            plan: This rank's LoadPlan.
            planner: The LoadPlanner, which gives the tensors to fill.

        Returns:
            A Future that is done.

        Raises:
            CkptError: An error in reading, or a planner's tensor that does not have its plan's
                shape.
        """
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
                    f"'{item.storage_index.fqn}': the planner's tensor has shape "
                    f"{list(tensor.shape)}, its plan {list(item.lengths)}",
                )
            name = item.storage_index.fqn
            boxes.append((self._tied.get(name, name), tuple(item.storage_offsets), tensor))
            todo.append((item, tensor))
        group = self._loading_group(plan.storage_data)
        self.stats = load_boxes(boxes, self._view, group, no_dist=group is None, **self._load)
        for item, tensor in todo:
            planner.commit_tensor(item, tensor)
        values = self._values() if objects else {}
        for item in objects:
            buffer = io.BytesIO()
            torch.save(values[item.storage_index.fqn], buffer)
            buffer.seek(0)
            planner.load_bytes(item, buffer)
        self._close()
        done = torch.futures.Future()
        done.set_result(None)
        return done

    def _values(self):
        """Return the values beside tensors, by their names."""
        values = self._view.objects()
        if not self._optimizer:
            return values
        if self._given["view"] == "torchtitan":
            return {
                f"optimizer.param_groups.{name}.{key}": value
                for group in values["optim.param_groups"]
                for name in group["params"]
                for key, value in group.items()
                if key != "params"
            }
        return {
            f"optim.param_groups.{i}.{key}": value
            for i, group in enumerate(values["optim.param_groups"])
            for key, value in group.items()
        }

    def _loading_group(self, ranks):
        """Return the process group of so many ranks; None for this process alone."""
        dist = torch.distributed
        if ranks in (None, 1) or not (dist.is_available() and dist.is_initialized()):
            return None
        group = group_of(self._group) if self._group is not None else dist.group.WORLD
        if dist.get_world_size(group) != ranks:
            raise CkptError(
                "usage",
                f"{ranks} ranks load, but the group of this reader has "
                f"{dist.get_world_size(group)}: give StorageReader the process_group that dcp.load "
                "has",
            )
        return group

    def _close(self):
        if self._view is not None:
            self._view.close()
        self._view = None
