# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's distributed checkpoints, each byte read once per job.

    from ckptfs.megatron import load, LoadShardedStrategy

    # In place of dist_checkpointing.load; a run, or the folder of one iteration.
    state = load(model.sharded_state_dict(), "run/checkpoints")

    # From what another framework saved: a Hugging Face model, a run of nanotron, ranks' files.
    state = load(model.sharded_state_dict(), "org/model")

    # With the optimizer, from what another framework saved.
    metadata = {"distrib_optim_sharding_type": "fully_reshardable"}
    weights = model.sharded_state_dict()
    states = optimizer.sharded_state_dict(weights, is_loading=True, metadata=metadata)
    state = load({"model": weights, "optimizer": states}, "run", options={"min_lr": 0.0})

    # Or as a strategy of dist_checkpointing.load.
    strategy = LoadShardedStrategy(group=data_parallel_group)
    state = dist_checkpointing.load(sharded_state_dict, folder, sharded_strategy=strategy)

Formats are torch_dist, and zarr, which megatron-core itself has not read since 0.16.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Callable

from ._boxes import fill_boxes
from ._comm import joined
from ._frameworks import unusable
from ._library import NotFoundError
from ._state_dict import step_folder
from ._view import View

if TYPE_CHECKING:
    from ._comm import Group
    from ._view import Path

try:
    import torch
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException, maybe_load_config
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace as replace_values
    from megatron.core.dist_checkpointing.dict_utils import (
        extract_matching_values,
        merge,
        nested_values,
    )
    from megatron.core.dist_checkpointing.mapping import (
        ShardedObject,
        ShardedTensor,
        ShardedTensorFactory,
    )
    from megatron.core.dist_checkpointing.strategies.torch import (
        TorchDistLoadShardedStrategy as _Base,
    )
    from torch.distributed.checkpoint import FileSystemReader

    _problem: ImportError | None = None
except ImportError as e:
    _problem, _Base = e, object


CONFIG = "metadata.json"  # a distributed checkpoint of Megatron's has it
METADATA = ".metadata"  # torch's, of torch_dist
OPTIMIZER = "optimizer."  # begins the keys of an optimizer's tensors
# An optimizer that is not distributed has another word for its masters.
MASTERS = ("optimizer.state.fp32_param.", "optimizer.state.param.")


class LoadShardedStrategy(_Base):
    """A strategy for dist_checkpointing.load, with which all ranks load together.

    FullyParallelLoadStrategyWrapper takes it too, but is not needed: readers="once" shares as well.
    Tensors that have data are filled in place; others are made on the current CUDA device, or on
    the CPU if there is none. With allow_shape_mismatch a tensor is clipped, and elements that the
    checkpoint does not have (the padding of a vocabulary) are zero, as Megatron does it.
    ShardedObjects of torch_dist, and the rare tensors with a flattened_range (distributed
    optimizers up to 0.15), are read by Megatron's own strategy.

    Args:
        group: The ranks that share what they read: a process group, DeviceMesh or Comm, all of
            whose ranks load at the same time. Megatron's data-parallel group shares what is
            replicated. None is the default group; with load_options={"share_with": the
            data-parallel group} all ranks open the checkpoint together then, and the ranks of each
            data-parallel group share.
        readers: As for ckptfs.load_state_dict.
        load_options: As for ckptfs.load_state_dict.
        progress: As for ckptfs.load_state_dict.

    Attributes:
        stats: The statistics of the last load; sizes in bytes, times in seconds.

    Raises:
        ImportError: megatron-core can't be imported.
        CheckpointingException: From load(): a key that the checkpoint lacks, or another global
            shape. Ranks that do not find the error themselves raise a CkptError.
        CkptError: From load(): an error in reading.
    """

    def __init__(
        self,
        group: Group = None,
        *,
        readers: str = "auto",
        load_options: Mapping[str, Any] | None = None,
        progress: bool | Callable[[int, int], None] = False,
    ):
        if _problem is not None:
            raise unusable(
                "ckptfs.megatron",
                _problem,
                ("torch", "megatron", "megatron.core"),
                "megatron-core",
                "megatron-core",
                "0.15 to 0.19",
            ) from _problem
        super().__init__()
        # Megatron replaces quantized tensors by what is filled here, as up to 0.18.
        self.stream_ckpt_dequant = False
        self.stats, self._group, self._backend = None, group, "torch_dist"
        self._view: View | None = None  # where the tensors are, if not in the folder
        self._load = {"readers": readers, "load_options": load_options, "progress": progress}

    def check_backend_compatibility(self, loaded_backend):
        """Raise CheckpointingException for a format that is neither torch_dist nor zarr."""
        if loaded_backend not in ("torch_dist", "zarr"):
            raise CheckpointingException(
                f"ckptfs.megatron reads torch_dist and zarr, not '{loaded_backend}'"
            )
        self._backend = loaded_backend

    def check_version_compatibility(self, loaded_version):
        """Raise CheckpointingException for another version of the format than 1."""
        if loaded_version != 1:
            raise CheckpointingException(
                f"version {loaded_version} of '{self._backend}' is not known to ckptfs"
            )

    @property
    def can_handle_sharded_objects(self):
        """Whether load() takes ShardedObjects: those of torch_dist."""
        return self._backend == "torch_dist"

    def load(self, sharded_state_dict, checkpoint_dir, *async_strategy):
        """Load a sharded state dict, on all ranks of the group together.

        Where no rank has a tensor to fill, the checkpoint is not opened for tensors.

        Args:
            sharded_state_dict: Megatron's nested dict with ShardedTensors in it.
            checkpoint_dir: The folder of one iteration.
            async_strategy: For Megatron's own strategy; from 0.17 on.

        Returns:
            The dict, with torch tensors in place of the ShardedTensors.
        """
        self._check(checkpoint_dir)
        theirs, ours = extract_matching_values(sharded_state_dict, _is_theirs)
        tensors = [t for t in nested_values(ours) if isinstance(t, ShardedTensor)]
        places = [self._place(t) for t in tensors]
        boxes, shapes = [], {}

        def destinations():
            boxes.extend(_box(t, *place) for t, place in zip(tensors, places))
            return boxes

        def check(view):
            for t, (name, stacked) in zip(tensors, places):
                shapes[name] = _checked_shape(view, t, name, stacked)

        self.stats = fill_boxes(
            destinations,
            (self._view, None, {}, {}) if self._view else (checkpoint_dir, "raw", {}, {}),
            self._group,
            clip=True,
            check=check,
            may_be_empty=True,
            **self._load,
        )
        for t, (name, offset, data) in zip(tensors, boxes):
            if t.allow_shape_mismatch:
                _zero_beyond(data, offset, shapes[name])
        replace_values(lambda t: t.data if isinstance(t, ShardedTensor) else t, ours)
        if next(iter(nested_values(theirs)), None) is not None:
            merge(ours, self._load_theirs(theirs, checkpoint_dir, *async_strategy))
        return ours

    def load_tensors_metadata(self, checkpoint_dir, metadata=None):
        """Return {key: ShardedTensor without data}: shapes and dtypes; no tensor is read.

        Args:
            checkpoint_dir: The folder of one iteration.
            metadata: What torch has read of it, or None. It is asked for nothing but whether there
                are tensors at all.
        """
        from ._view import torch_dtype

        try:
            view = View(os.fspath(checkpoint_dir), view="raw")
        except NotFoundError:
            if _has_tensors(checkpoint_dir, metadata):
                raise
            return {}
        with view:
            return {
                i.name: ShardedTensor.from_rank_offsets(
                    i.name,
                    torch.empty(i.shape, dtype=torch_dtype(i.dtype), device="meta"),
                ).without_data()
                for i in view._tensors.values()
            }

    def load_sharded_metadata(self, checkpoint_dir):
        """Return load_tensors_metadata(), with the ShardedObjects of a torch_dist checkpoint."""
        self._check(checkpoint_dir)
        if not self.can_handle_sharded_objects:
            return self.load_tensors_metadata(checkpoint_dir)
        return super().load_sharded_metadata(checkpoint_dir)

    def _check(self, checkpoint_dir):
        """Check the format, as Megatron does up to 0.16.

        dist_checkpointing.save writes metadata.json when all else is there; what a save strategy
        writes by itself has none, and is torch_dist if it has a .metadata.
        """
        config = maybe_load_config(checkpoint_dir)
        if config is None:
            if not os.path.exists(os.path.join(checkpoint_dir, METADATA)):
                raise CheckpointingException(
                    f"'{checkpoint_dir}' has neither {CONFIG} nor {METADATA}: expected the folder "
                    "of one iteration, of which the save is complete"
                )
            self._backend = "torch_dist"
            return
        self.check_backend_compatibility(config.sharded_backend)
        self.check_version_compatibility(config.sharded_backend_version)

    def _place(self, t):
        """Return the name under which a ShardedTensor is read, and how many axes are in the name.

        The axes that Megatron puts before a tensor's own (layers, experts) are numbers in the names
        of a view: ...layers.3.mlp.experts.experts.1....
        """
        key = t.key
        if self._view is not None and key.startswith(MASTERS[0]):
            key = MASTERS[1] + key[len(MASTERS[0]) :]
        if self._view is None or not t.prepend_axis_num or key in self._view:
            return key, 0
        words, numbers = key.split("."), list(t.global_offset[: t.prepend_axis_num])
        for i in range(len(words) - 1, 0, -1):
            stacked = words[i - 1] == "layers" or words[max(i - 2, 0) : i] == ["experts"] * 2
            if stacked and not words[i].isdigit() and numbers:
                words.insert(i, str(numbers.pop()))
        return ".".join(words), t.prepend_axis_num

    def _load_theirs(self, theirs, checkpoint_dir, *async_strategy):
        if self._backend == "torch_dist":
            return super().load(theirs, checkpoint_dir, *async_strategy)
        values = list(nested_values(theirs))
        if any(isinstance(v, ShardedTensor) for v in values):
            raise CheckpointingException(
                "flattened tensors of a zarr checkpoint are not supported: load it with the "
                "optimizer's unflattened keys"
            )
        raise CheckpointingException(
            f"'{values[0].key}' is an object of a zarr checkpoint, which Megatron-Core has not "
            "read since 0.17: take the ShardedObjects out of the state dict"
        )


def load(
    sharded_state_dict: dict[str, Any],
    run: Path,
    *,
    group: Group = None,
    step: str | int | None = None,
    strict: Any = None,
    options: Mapping[str, Any] | None = None,
    readers: str = "auto",
    load_options: Mapping[str, Any] | None = None,
    progress: bool | Callable[[int, int], None] = False,
    **more: Any,
) -> Any:
    """Do dist_checkpointing.load for a step of a run, through LoadShardedStrategy.

    All ranks of the group call it together. What is not a distributed checkpoint of Megatron's is
    laid out as one (view="megatron"): its tensors are read from where they are, and nothing of them
    is written. If the state dict has tensors of an optimizer, what is laid out has them too, as
    a fully reshardable distributed optimizer saves them; one that is not distributed finds the same
    masters and moments. All ranks have such tensors, or give the option {"optimizer": True}.

    Args:
        sharded_state_dict: Megatron's nested dict with ShardedTensors in it.
        run: A run, the folder of one iteration, or anything else that ckptfs reads: a Hugging Face
            model, a run of another framework, Megatron's ranks' files.
        group: As for LoadShardedStrategy.
        step: The step's name or number; None is the latest one that rank 0 sees, on all ranks.
        strict: One of Megatron's StrictHandling values; None is Megatron's default.
        options: As for ckptfs.open, for what is laid out: {"base": ..., "dtype": ...}; and the
            optimizer's numbers that the run does not state: {"lr": ..., "min_lr": ...}.
        readers: As for ckptfs.load_state_dict.
        load_options: As for ckptfs.load_state_dict.
        progress: As for ckptfs.load_state_dict.
        **more: Further arguments of dist_checkpointing.load.

    Returns:
        What dist_checkpointing.load returns.

    Raises:
        ImportError: megatron-core can't be imported.
        CheckpointingException: A key that the checkpoint lacks, or another global shape.
        CkptError: An error in reading.
    """
    strategy = LoadShardedStrategy(
        group, readers=readers, load_options=load_options, progress=progress
    )
    if strict is not None:
        more["strict"] = strict
    folder = step_folder(run, step, group)
    if os.path.exists(os.path.join(folder, CONFIG)):
        return dist_checkpointing.load(sharded_state_dict, folder, strategy, **more)
    if any(
        isinstance(t, (ShardedTensor, ShardedTensorFactory)) and t.key.startswith(OPTIMIZER)
        for t in nested_values(sharded_state_dict)
    ):
        options = {"optimizer": True, **(options or {})}
    with _laid_out(folder, options, group) as (strategy._view, made):
        return dist_checkpointing.load(sharded_state_dict, made, strategy, **more)


@contextlib.contextmanager
def _laid_out(run: str, options: Mapping[str, Any] | None, group: Group) -> Iterator[Any]:
    """Lay a checkpoint out as Megatron's, on all ranks of the group together.

    Yields its view, and a folder with its files, in which the tensors' bytes are holes.
    """
    with joined(group) as comm:
        view = View(run, view="megatron", options=options, comm=comm)
    with view, tempfile.TemporaryDirectory(prefix="ckptfs-") as top:
        folder = ""
        for name in view.files():
            path = os.path.join(top, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as f:
                if name.endswith(".distcp"):
                    f.truncate(view._file_size(name))
                else:
                    f.write(view.read(name))
            if os.path.basename(name) == CONFIG:
                folder = os.path.dirname(path)
        _write_objects(view, os.path.relpath(folder, top), folder)
        yield view, folder


def _write_objects(view, below, folder):
    """Write what is not a tensor where the view's .distcp files have it."""
    with open(os.path.join(folder, METADATA), "rb") as f:
        metadata = pickle.load(f)  # the library has just written it
    for index, at in metadata.storage_data.items():
        if hasattr(metadata.state_dict_metadata[index.fqn], "chunks"):
            continue
        name = os.path.join(below, at.relative_path)
        with open(os.path.join(folder, at.relative_path), "r+b") as f:
            f.seek(at.offset)
            f.write(view._read_file(name, at.offset, at.length))


def _has_tensors(checkpoint_dir, metadata):
    """Return whether a checkpoint that has no tensors for a view has some for torch.

    True where torch can't say it.
    """
    if metadata is None:
        if not os.path.exists(os.path.join(checkpoint_dir, METADATA)):
            return True
        metadata = FileSystemReader(checkpoint_dir).read_metadata()
    return any(hasattr(entry, "chunks") for entry in metadata.state_dict_metadata.values())


def _is_theirs(value):
    return isinstance(value, ShardedObject) or (
        isinstance(value, ShardedTensor) and getattr(value, "flattened_range", None) is not None
    )


def _zero_beyond(data, offset, shape):
    """Set the elements of a box to zero that lie beyond a tensor of that shape."""
    for d, (lo, size) in enumerate(zip(offset, shape)):
        inside = min(max(size - lo, 0), data.shape[d])
        data.narrow(d, inside, data.shape[d] - inside).zero_()


def _checked_shape(view, t, name, stacked):
    """Return the shape of the checkpoint's tensor, once it is known to fit."""
    info = view._tensors.get(name)
    if info is None:
        raise CheckpointingException(f"'{name}' is not in the checkpoint {view}")
    want = tuple(t.global_shape)[stacked:]
    if tuple(info.shape) != want and not t.allow_shape_mismatch:
        raise CheckpointingException(
            f"Global shape mismatch for loaded ({tuple(info.shape)}) and expected "
            f"({want}) tensor for key {name}"
        )
    return info.shape


def _box(t, name, stacked):
    """Return (name, offset, tensor) of a ShardedTensor, which has memory afterwards."""
    if t.data is None:
        t.init_data(
            torch.device("cuda", torch.cuda.current_device())
            if torch.cuda.is_available()
            else "cpu"
        )
    data = t.data.detach()
    for _ in range(t.prepend_axis_num - stacked):
        data = data[None]
    return name, tuple(t.global_offset)[stacked:], data
