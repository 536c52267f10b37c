# SPDX-License-Identifier: Apache-2.0
"""Serves a training run with vLLM, without a copy of its weights.

    # What vLLM reads before the weights: config, tokenizer.
    ckpt export --no-weights run/checkpoints served/
    vllm serve served/ --load-format ckptfs \
        --model-loader-extra-config '{"run": "run/checkpoints"}'

The installed package has an entry point (vllm.general_plugins), register(), which makes the load
format, and the weight transfer backend of the same name, known in each of vLLM's processes.
"""

from __future__ import annotations

import functools
import logging
import os
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ._ahead import ahead
from ._boxes import load_boxes
from ._comm import kept_comm
from ._frameworks import unusable
from ._library import READERS, CkptError, is_bucket
from ._load import make_options
from ._running import surroundings
from ._state_dict import step_folder
from ._tensors import same_bits
from ._view import View, torch_dtype

if TYPE_CHECKING:
    from ._view import Path

try:
    import torch
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader as _Base

    from ._recorded import Recorded, Recorder

    _problem: ImportError | None = None
except ImportError as e:
    _problem, _Base = e, object

BATCH_BYTES = 256 << 20
OWN = {
    "run": None,
    "step": None,
    "slices": True,
    "prefetch": 2,
    "readers": "auto",
    "batch_bytes": BATCH_BYTES,
    "load_options": None,
}
KINDS = {  # of the values: (is one, what is expected)
    "run": (lambda x: isinstance(x, (str, os.PathLike)), "a path"),
    "step": (lambda x: isinstance(x, str) or _is_number(x, 0), "a step's name or number"),
    "slices": (lambda x: isinstance(x, bool), "true or false"),
    "prefetch": (lambda x: _is_number(x, 0), "a number of tensors"),
    "readers": (lambda x: isinstance(x, str) and x in READERS, f"one of {', '.join(READERS)}"),
    "batch_bytes": (lambda x: _is_number(x, 1), "a number of bytes"),
    "load_options": (lambda x: isinstance(x, dict), "a JSON object"),
}

_log = logging.getLogger("vllm.ckptfs")  # vLLM shows what is below its own name


class _Plan:
    """What this rank's model takes of a run: the next loads of the same model read it at once.

    Attributes:
        folder: What the model was made from.
        names: How its tied parameters are called, {name: a name that stands for all}.
        boxes: {(name, offset, shape): None} of the checkpoint's tensors.
        whole: Why whole tensors are given to it, or None.
        stats: The statistics of the last load.
    """

    def __init__(self, folder, model):
        self.folder, self.names = folder, _tied(model)
        self.boxes, self.whole, self.stats = {}, None, {}


_plans: weakref.WeakKeyDictionary[Any, _Plan] = weakref.WeakKeyDictionary()


class ModelLoader(_Base):
    """The loader behind --load-format ckptfs.

    vLLM's weight loaders take whole tensors, by their Hugging Face names, and keep their part. They
    are given tensors without values, which note what is kept, and then all ranks load just that
    together, to where it belongs. What can't be noted (arithmetic on the values, for example) is
    read by itself, and the log says so.

    --model-loader-extra-config is a JSON object with these members, all of which may be absent:

        run: A run, one checkpoint or a model directory; without it, the model that vLLM was given.
            The folder that vLLM was given is its base, unless another base is given: the engine's
            model is made from that folder's config, which the run may lack.
        step: The step's name or number; without it, the latest one that rank 0 sees.
        slices: false gives the model whole tensors, as quantized models always get them.
        readers: "auto", "once" and "node": all ranks of vLLM's world group load together, and each
            byte is read once in the job, or once on each node. "each": every rank reads for itself,
            and ranks of a node share the page cache.
        batch_bytes: How much is loaded together, in bytes (256 MiB), of whole tensors. Up to three
            batches are in memory at a time: of the CUDA devices, if every rank has one, else of the
            hosts.
        prefetch: How many whole tensors are read ahead (2), on the host, with readers="each" and
            for one rank.
        load_options: As for ckptfs.load_state_dict.

    All other members are options of ckptfs.open: base, lora, dtype, dequantize and so on.

    Args:
        load_config: vLLM's LoadConfig.

    Raises:
        ImportError: vLLM can't be imported.
        ValueError: The extra config is not a JSON object, or a value is not what it should be. From
            load_weights(): a parameter of the model got no values.
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
        for name, value in self._own.items():
            is_one, expected = KINDS[name]
            if not is_one(value) and not (value is None and OWN[name] is None):
                raise ValueError(
                    f"--model-loader-extra-config: {name}={value!r}: expected {expected}"
                )
        make_options(self._own["readers"], self._own["load_options"])

    def download_model(self, model_config: Any) -> None:
        """Open the run once, so that a wrong path or option is an error. Nothing is fetched.

        Args:
            model_config: vLLM's ModelConfig.

        Raises:
            CkptError: The run can't be read.
        """
        run, step, base = self._source(model_config)
        self._open(run, step, base).close()

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
        plan = _plans[model] = _Plan(model_config.model, model)
        plan.whole = self._needs_whole(model_config)
        load: Any = model.load_weights  # type: ignore[operator]  # vLLM's models have it
        with self._view(*self._source(model_config)) as view:
            loaded = None if plan.whole else self._load_slices(model, load, view, plan)
            if plan.whole:
                loaded = load(_without_lost(model, view, self._whole(view)))
        if loaded is not None and getattr(model_config, "quantization", None) is None:
            _check_complete(model, loaded)

    def get_all_weights(
        self, model_config: Any, model: torch.nn.Module
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Return what a model that is loaded already needs of a step, for vLLM's reload_weights.

        What this rank's model takes is read to the host before this returns, so that an error in
        reading leaves the engine with the weights that it has.

        Args:
            model_config: vLLM's ModelConfig. If it names another model than the one that was
                loaded, as reload_weights(weights_path=...) has it, that is the run or the step.
            model: The engine's model.

        Returns:
            (name, tensor) pairs for the model's own load_weights().

        Raises:
            CkptError: An error in reading; the model is as it was.
        """
        return self.taken(model_config, model, by_path=True)

    def taken(
        self, model_config: Any, model: torch.nn.Module, by_path: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Do what get_all_weights does.

        Args:
            model_config: As for get_all_weights.
            model: As for get_all_weights.
            by_path: As for get_all_weights, another model's name in model_config is the run.

        Returns:
            (name, tensor) pairs.

        Raises:
            CkptError: An error in reading; the model is as it was.
        """
        plan = _plans.get(model)
        view = self._view(*self._source(model_config, plan, by_path))
        if plan is None:
            plan = _plans[model] = _Plan(model_config.model, model)
            plan.whole = self._needs_whole(model_config)
        if plan.whole:
            _log.info("ckptfs: %s: whole tensors (%s)", view, plan.whole)
            _repack_experts(model)
            return self._closing(_without_lost(model, view, self._whole(view)), view)
        held = {
            (name, lo, n): torch.empty(n, dtype=_dtype(view._find(name)), device="cpu")
            for name, lo, n in plan.boxes
        }
        self._fill(model, view, plan, held.items())
        _repack_experts(model)
        recorder = self._recorder(view, plan, held)
        # vLLM copies the last ones when it has seen all: they hold the recorder, and that the view.
        weakref.finalize(recorder, self._tell_alone, recorder.alone, plan).atexit = False
        return ((info.name, recorder.tensor(info)) for info in view.infos())

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
        view = self._view(run, self._own["step"], base)
        yield from self._closing(self._whole(view), view)

    def _whole(self, view):
        group = None if self._own["readers"] == "each" else _group()
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
            pairs = [(i.name, torch.empty(i.shape, dtype=_dtype(i), device=device)) for i in infos]
            self._load([(name, [0] * t.dim(), t) for name, t in pairs], view, comm)
        return pairs

    def _load(self, boxes, view, group, **more):
        return load_boxes(
            boxes,
            view,
            group,
            readers=self._own["readers"],
            load_options=self._own["load_options"],
            **more,
        )

    def _load_slices(self, model, load, view, plan):
        """Load what the model's own method takes of the view. Returns what the method returns.

        If that can't be found out on some rank, plan.whole says why, and the model is not loaded.
        """
        recorder, loaded, failure = self._recorder(view, plan), None, None
        try:
            with recorder:
                loaded = load((info.name, recorder.tensor(info)) for info in view.infos())
            _check_kept(model)
        except Exception as e:
            failure = e
        try:
            plan.whole = _agree(failure)
            if plan.whole:
                plan.boxes.clear()
                _log.warning(
                    "ckptfs: %s is given whole tensors, because its weight loaders failed with "
                    "tensors that note what is kept: %s",
                    type(model).__name__,
                    plan.whole,
                )
                return None
            self._fill(model, view, plan, recorder.copies())
            self._tell_alone(recorder.alone, plan)
            return loaded
        finally:
            recorder.close()

    def _fill(self, model, view, plan, copies):
        """Load boxes of the view to their destinations, on all ranks together."""
        group, twins = _group(), _twins(model, view.keys(), plan.names)
        boxes = [
            (other, lo, to)
            for (name, lo, _), to in copies
            for other in (name, *twins.get(name, ()))
        ]
        try:
            stats = self._load(boxes, view, group, no_dist=group is None)
        except CkptError as e:
            if e.code == "conflict" and twins:
                raise CkptError("conflict", f"{e}. {_untie(model)}") from e
            raise
        own = sum(to.numel() * _dtype(view._find(name)).itemsize for (name, *_), to in copies)
        all_ = sum(info.nbytes for info in view.infos())
        more = {"boxes": len(boxes), "own_bytes": own, "all_bytes": all_}
        plan.stats = dict(stats, **more, alone_bytes=0, alone=[])
        _log.info(
            "ckptfs: %s: this rank takes %.1f MB of %.1f MB, in %d boxes; all ranks have read "
            "%.1f MB in %.2f s",
            view,
            own / 1e6,
            all_ / 1e6,
            len(boxes),
            stats["read_bytes"] / 1e6,
            stats["wall_s"],
        )

    @staticmethod
    def _tell_alone(alone, plan):
        """Note what a rank has read by itself, {name: bytes}, and warn of it."""
        plan.stats.update(alone_bytes=sum(alone.values()), alone=sorted(alone))
        if alone:
            _log.warning(
                "ckptfs: the model's weight loaders do more than copy with some tensors, of which "
                "this rank has read %d bytes by itself (%d tensors): %s%s",
                sum(alone.values()),
                len(alone),
                ", ".join(sorted(alone)[:4]),
                " ..." if len(alone) > 4 else "",
            )

    def _recorder(self, view, plan, held=None):
        device = _device()
        return Recorder(
            lambda name, lo, n: view._read(view._find(name), lo, n),
            torch.device("cpu") if device is None else torch.device("cuda", device),
            held,
            plan.boxes,
        )

    @staticmethod
    def _closing(pairs, view):
        with view:
            yield from pairs

    def _needs_whole(self, model_config):
        """Return why whole tensors are given to a model, or None."""
        quantization = getattr(model_config, "quantization", None)
        if not self._own["slices"]:
            return '"slices": false'
        return f"quantization={quantization}" if quantization is not None else None

    def _source(self, model_config, plan=None, by_path=False):
        """Return the run, the step and the base: the folder that the engine's model is made from.

        No base if that is the run itself, or is not on this machine under that name. `by_path`: a
        model that was loaded from `plan` is reloaded from model_config's path, if that is another.
        """
        folder, run, step = model_config.model, self._own["run"], self._own["step"]
        if plan is not None:
            given, folder = folder, plan.folder
            if given != folder and by_path:  # reload_weights(weights_path=...)
                run, step = given, None
        run = run or folder
        if not is_bucket(run) and not os.path.exists(run):
            raise CkptError(
                "missing",
                f"there is no run '{run}': --model-loader-extra-config '{{\"run\": \"path\"}}' "
                "says where it is, or weights_path of reload_weights",
            )
        same = not os.path.isdir(folder) or (not is_bucket(run) and os.path.samefile(folder, run))
        return run, step, None if same else folder

    def _view(self, run, step, base):
        """Open the run at the step that rank 0 chooses."""
        group = _group()
        if group is not None:
            run, step = step_folder(run, step, group), None
        return self._open(run, step, base)

    def _open(self, run, step, base):
        return View(run, step=step, options={"base": base, **self._options})


@functools.cache
def register() -> None:
    """Register the load format "ckptfs", and the weight transfer backend; vLLM's plug-in calls it.

    Raises:
        ImportError: vLLM can't be imported.
    """
    _need()
    register_model_loader("ckptfs")(ModelLoader)
    try:
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    except ImportError:  # older ones
        return
    WeightTransferEngineFactory.register_engine("ckptfs", "ckptfs._weight_transfer", "Engine")


def last_load(model: torch.nn.Module) -> dict[str, Any]:
    """Return the statistics of the last load of an engine's model in this process.

    Args:
        model: The engine's model.

    Returns:
        What ckptfs.load_boxes returns, of all ranks together, and of this rank: "boxes", their
        number; "own_bytes", what it took of the tensors' "all_bytes"; "alone_bytes", what it read
        by itself because it could not be noted, of the tensors "alone". {} if nothing was loaded in
        slices.
    """
    plan = _plans.get(model)
    return dict(plan.stats) if plan is not None else {}


def _need():
    if _problem is not None:
        raise unusable("ckptfs.vllm", _problem, ("torch", "vllm"), "vllm", "vllm") from _problem


def _is_number(x, least):
    return isinstance(x, int) and not isinstance(x, bool) and x >= least


def _dtype(info):
    return torch_dtype(info.dtype)


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


def _agree(failure):
    """Return what went wrong on some rank, or None. What has failed in reading is raised."""
    is_reading = isinstance(failure, CkptError)
    words = [failure and (is_reading, f"{type(failure).__name__}: {failure}")]
    group = _group()
    if group is not None:
        word, words = words[0], [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(words, word, group)
    if is_reading:
        raise failure
    words = [word for word in words if word]
    for text in [text for was_reading, text in words if was_reading]:
        raise CkptError("peer", f"another rank has failed: {text}")
    return words[0][1] if words else None


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


def _tied(model):
    """Return {name of a parameter that has several: the first of these}."""
    names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: same[0] for same in names.values() if len(same) > 1 for name in same}


def _own_names(model, name):
    """Return what the model calls a tensor of the checkpoint."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return mapper.apply_list([name]) if mapper is not None else [name]


def _twins(model, names, tied):
    """Return {name of a checkpoint's tensor: others that are the same parameter of the model}.

    Args:
        model: The engine's model.
        names: The names in the checkpoint.
        tied: What _tied() found.
    """
    parameters = {}  # {parameter: {one of its names: what the checkpoint has for that}}
    for name in names if tied else ():
        for own in _own_names(model, name):
            if own in tied:
                parameters.setdefault(tied[own], {}).setdefault(own, []).append(name)
    twins = {}
    for found in parameters.values():
        # Several for one name are parts of it, such as the gate and the up projection.
        same = [names[0] for names in found.values() if len(names) == 1]
        twins.update({name: [x for x in same if x != name] for name in same if len(same) > 1})
    return twins


def _untie(model):
    return (
        f"vLLM's {type(model).__name__} ties them: does config.json of the folder that vLLM serves "
        "say tie_word_embeddings=true of another model? `ckpt export --no-weights` makes the folder"
    )


def _without_lost(model, view, weights):
    """Yield the pairs, and check that no values are lost.

    Of the names of a tied parameter vLLM loads one and silently skips the others.
    """
    twins, given = _twins(model, view.keys(), _tied(model)), {}
    for name, tensor in weights:
        for other in twins.get(name, ()):
            value = given.get(other, tensor)
            if value is not tensor and not (
                value.shape == tensor.shape
                and value.dtype == tensor.dtype
                and same_bits(value, tensor)
            ):
                raise CkptError(
                    "conflict", f"'{name}' differs from '{other}' in the run. {_untie(model)}"
                )
        if name in twins:
            given[name] = tensor
        yield name, tensor


def _repack_experts(model):
    """Have vLLM pack experts for its CPU kernel once more when they are reloaded.

    It does so (0.32.0) only while it has no kernel yet, and would take unpacked ones for packed.
    """
    for module in model.modules():
        if _packs_experts(module):
            module.quant_method.moe_kernel = None


def _packs_experts(module):
    kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
    return type(getattr(kernel, "fused_experts", None)).__module__.endswith(".cpu_moe")


def _check_kept(model):
    """Raise TypeError if the model has a tensor without values."""
    for at, module in model.named_modules():
        for name, value in (*module._parameters.items(), *module._buffers.items()):
            if isinstance(value, Recorded):
                raise TypeError(f"it keeps what it is given, as {at}.{name}")


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
