# SPDX-License-Identifier: Apache-2.0
"""A view with the shape of safetensors.safe_open."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from ctypes import POINTER, byref, c_char, c_size_t, c_void_p
from typing import TYPE_CHECKING, Any, Iterable, Iterator, Mapping, Union

from ._ahead import ahead
from ._fork import reading, taken
from ._library import CkptError, Step, TensorInfo, library, new, take_bytes, take_text, u64s
from ._objects import value

if TYPE_CHECKING:
    import numpy
    import torch

Path = Union[str, bytes, "os.PathLike[str]"]

TORCH = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}

MOST_READ = 1 << 30  # bytes
MOST_TOLD = 8  # warnings

TORCHES, NUMPIES = ("pt", "torch", "pytorch"), ("np", "numpy")


class Info:
    """Of one tensor of a view."""

    def __init__(self, index, t):
        self.index, self.name, self.dtype, self.nbytes = (
            index,
            t.name.decode(),
            t.dtype.decode(),
            t.nbytes,
        )
        self.file, self.offset = t.file, t.file_off
        self.shape = [t.shape[d] for d in range(t.rank)]


def _empty(framework, shape, dtype):
    """An uninitialised array, and the address of its bytes."""
    if framework in TORCHES:
        import torch

        t = torch.empty(
            shape, dtype=getattr(torch, TORCH[dtype]), device="cpu"
        )  # whatever the default device is
        return t, t.data_ptr()
    import numpy

    if dtype == "BF16" or dtype.startswith("F8"):
        raise TypeError(f"numpy has no {dtype}; framework='pt' does, or dtype='float32' converts")
    a = numpy.empty(shape, dtype=TORCH[dtype])
    return a, a.ctypes.data


class Slice:
    """One tensor, read when it is indexed: only the box that is asked for. CkptError once the view is closed."""

    def __init__(self, view, info):
        self._view, self._info = view, info

    def get_shape(self) -> list[int]:
        self._view.check()
        return list(self._info.shape)

    def get_dtype(self) -> str:
        self._view.check()
        return self._info.dtype

    def __getitem__(self, index: Any) -> torch.Tensor | numpy.ndarray:
        shape = self._info.shape
        index = index if isinstance(index, tuple) else (index,)
        if any(i is Ellipsis for i in index):
            at = next(k for k, i in enumerate(index) if i is Ellipsis)
            index = index[:at] + (slice(None),) * (len(shape) - len(index) + 1) + index[at + 1 :]
        for i in index:
            if (
                i is None
                or isinstance(i, bool)
                or str(getattr(i, "dtype", "")).removeprefix("torch.") == "bool"
                or (isinstance(i, (list, tuple)) and any(isinstance(k, bool) for k in i))
            ):
                raise TypeError(
                    f"{i!r} is no index of a slice: expected integers, slices, '...' or a list of integers"
                )
        if sum(isinstance(i, (list, tuple)) for i in index) > 1:
            raise TypeError(
                "a slice takes one list of integers: index what it gives with the others"
            )
        if len(index) > len(shape):
            raise IndexError(
                f"'{self._info.name}' has {len(shape)} dimensions, {len(index)} indices were given"
            )
        index += (slice(None),) * (len(shape) - len(index))
        lo, n, after = [], [], []
        for d, (i, size) in enumerate(zip(index, shape)):
            if isinstance(i, slice):
                picked = range(size)[i]
                first, last = (min(picked), max(picked)) if picked else (0, -1)
                after.append(
                    [p - first for p in picked]
                    if abs(picked.step) != 1 or picked.step < 0
                    else slice(None)
                )
            elif isinstance(i, (list, tuple)):
                picked = [range(size)[k] for k in i]
                first, last = (min(picked), max(picked)) if picked else (0, -1)
                after.append([p - first for p in picked])
            else:
                first = last = range(size)[i]
                after.append(0)
            lo.append(first)
            n.append(last - first + 1)
        out = self._view._read(self._info, lo, n)
        for d in reversed(range(len(after))):
            if not isinstance(after[d], slice):
                out = out[(slice(None),) * d + (after[d],)]
        return out


def spelled(options, more):
    """The options of a view, as keywords and as a dict: one spelling each."""
    twice = sorted(k for k in more if k in options and more[k] is not None)
    if twice:
        raise ValueError(f"{', '.join(twice)}: given as keyword and in options, once is enough")
    return {**more, **options}


def _word(value):
    """An option's value as the library has it: a torch.dtype is its name."""
    return os.fsencode(
        value
        if isinstance(value, os.PathLike)
        else str(value).removeprefix("torch." if type(value).__name__ == "dtype" else "")
    )


@contextlib.contextmanager
def _native(options):
    """The library's object for the options of a view."""
    lib = library()
    opt = new(lib.options_new)
    try:
        for key, value in options.items():
            if value is None or value is False:
                continue
            text = None if value is True else _word(value)
            lib.options_set(opt, key.encode(), text)
        yield opt
    finally:
        lib.options_free(opt)


class Run:
    """A run, opened with the options of ckptfs: its steps are known, no shard was opened."""

    def __init__(self, path, **options):
        self.handle = None
        with _native(options) as opt:
            self.handle = new(library().run_open, os.fsencode(path), opt)

    def find_step(self, wanted=None):
        """The name of the step that a name, or the number that it ends in, means; None: the latest. "" if there is only one checkpoint."""
        return os.fsdecode(
            take_bytes(
                new(
                    library().run_find_step,
                    self.handle,
                    None if wanted is None else os.fsencode(str(wanted)),
                )
            )
        )

    def steps(self):
        """The names of the steps, oldest first; none of one checkpoint."""
        lib, found, n = library(), POINTER(Step)(), c_size_t()
        if not lib.run_is_folder(self.handle):
            return []
        lib.run_steps(self.handle, byref(found), byref(n))
        try:
            return [os.fsdecode(found[i].name) for i in range(n.value)]
        finally:
            lib.steps_free(found, n)

    def close(self):
        if self.handle:
            library().run_close(self.handle)
        self.handle = None

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


class View:
    """One checkpoint as tensors with their Hugging Face names (view="raw": the framework's own). See open().

    Reading is safe from many threads, and in forked children. A closed view raises CkptError. Pickling keeps path and options, and opens the same
    step again.
    """

    _view = None  # also where __init__ fails
    _lost = None  # why it is no good in this process

    def __init__(
        self,
        run: Path,
        framework: str = "pt",
        device: torch.device | str | int = "cpu",
        step: str | int | None = None,
        *,
        options: Mapping[str, Any] | None = None,
        comm: Any = None,
        **more: Any,
    ):
        if framework not in TORCHES + NUMPIES:
            raise ValueError(f"framework={framework!r}: expected 'pt' or 'np'")
        self._run, self._framework, self._device = (
            os.path.abspath(os.fsdecode(run)),
            framework,
            device,
        )
        self._options = {
            k: v
            for k, v in spelled(dict(options or {}), more).items()
            if v is not None and v is not False
        }
        step = self._options.pop("step", None) if step is None else step
        self._step = step if step is None else str(step)
        self._view = self._open() if comm is None else self._open_together(comm)
        self._tensors = {
            info.name: info for info in map(self._info, range(library().view_tensors(self._view)))
        }
        if comm is None or comm.rank == 0:
            self._warn()

    def _open(self):
        with Run(self._run, **self._options) as run:
            self._step = run.find_step(
                self._step or None
            )  # "": there is only one. For again(): the same, whatever the latest is by then
            return new(library().run_view, run.handle, os.fsencode(self._step))

    def _open_together(self, comm):
        """As _open, by all ranks of a comm: rank 0 opens the files and chooses the step, the others take what it has read."""
        lib, step, view = library(), c_void_p(), c_void_p()
        with contextlib.ExitStack() as stack:
            try:
                opt = stack.enter_context(_native(self._options))
            except CkptError as e:
                comm.agree(e)  # the others are in load_open
            asked = os.fsencode(self._step) if self._step else None
            lib.load_open(
                comm.handle,
                os.fsencode(self._run),
                opt,
                asked,
                comm.timeout_ms,
                None,
                byref(step),
                byref(view),
            )
        self._step = os.fsdecode(take_bytes(step))
        return view

    def _info(self, i):
        t = TensorInfo()
        library().view_tensor(self._view, i, byref(t))
        return Info(i, t)

    def _warn(self):
        """Tell what was left out, guessed or not found, as ckpt does on its terminal."""
        said = self.info()["warnings"]
        for text in said[:MOST_TOLD]:
            warnings.warn(f"'{self._run}': {text}", stacklevel=4)
        if len(said) > MOST_TOLD:
            warnings.warn(
                f"'{self._run}': and {len(said) - MOST_TOLD} more warnings, which View.info()['warnings'] lists",
                stacklevel=4,
            )

    def again(self, comm: Any = None, **changed: Any) -> View:
        """The same step, opened anew, with other options; by all ranks of a comm together, if one is given."""
        return View(
            self._run,
            self._framework,
            self._device,
            self._step,
            options={**self._options, **changed},
            comm=comm,
        )

    def is_plain(self) -> bool:
        """Has it the usual names, the hub's?"""
        return self._options.get("view") in (None, "hf")

    def is_raw(self) -> bool:
        """Has it the framework's own names?"""
        return self._options.get("view") not in (None, "hf", "memory")

    def check(self) -> None:
        """CkptError if it is closed."""
        if not self._view:
            raise CkptError("usage", f"the view of '{self._run}' is closed")
        if self._lost:
            raise CkptError("usage", f"the view of '{self._run}' can't be used: {self._lost}")

    def close(self) -> None:
        """Give everything back. Reads that are running come to their end; using the view after this is a CkptError."""
        handle = taken(self) if self._view else None
        if handle:
            library().view_release(handle)

    def __enter__(self) -> View:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self):
        self.close()

    def __repr__(self) -> str:
        about = f"step '{self._step}', " if self._step else ""
        return f"<ckptfs.View of '{self._run}', {about}{f'{len(self._tensors)} tensors' if self._view else 'closed'}>"

    def __reduce__(self):
        with reading(self) as view:
            return _reopened, (
                self._run,
                self._framework,
                str(self._device),
                self._step,
                self._options,
                library().view_generation(view),
            )

    def keys(self) -> list[str]:
        """The tensors' names, in the checkpoint's order."""
        self.check()
        return list(self._tensors)

    offset_keys = keys

    def __contains__(self, name: str) -> bool:
        self.check()
        return name in self._tensors

    def __len__(self) -> int:
        self.check()
        return len(self._tensors)

    def metadata(self) -> dict[str, str]:
        """As a safetensors file of transformers has it: {"format": "pt"}."""
        self.check()
        return {"format": "pt"}

    def info(self) -> dict[str, Any]:
        """What `ckpt info` knows of the view: a dict."""
        with reading(self) as view:
            return json.loads(take_text(new(library().view_info, view)))

    def steps(self) -> list[str]:
        """The names of the run's steps as they are now, oldest first: list of str, each good for open(run, step=name). [] of one checkpoint."""
        self.check()
        with Run(self._run, **self._options) as run:
            return run.steps()

    def files(self) -> list[str]:
        """The paths of the view's files (weights, index, config, tokenizer ...), as the mount and `ckpt export` name them: list of str, by name."""
        with reading(self) as view:
            return list(_paths(library().view_root(view), ""))

    def read(self, name: str) -> bytes:
        """The bytes of one of files(). CkptError "missing": there is no such file; "limit": it has more than 1 GiB (weights: get_tensor)."""
        lib = library()
        with reading(self) as view:
            node = None if "\0" in os.fsdecode(name) else lib.view_find(view, os.fsencode(name))
            if not node or lib.node_is_dir(node):
                raise CkptError(
                    "missing", f"there is no file '{name}' in the view: files() lists them"
                )
            size, got = lib.node_size(node), c_size_t()
            if size > MOST_READ:
                raise CkptError(
                    "limit", f"'{name}' has {size} bytes: read() gives files of at most {MOST_READ}"
                )
            buffer = (c_char * max(size, 1))()
            lib.node_pread(view, node, buffer, size, 0, byref(got))
            return buffer.raw[: got.value]

    @property
    def config(self) -> dict[str, Any]:
        """config.json as a dict; {} where the view has none (view="raw", or a checkpoint that says nothing of its model)."""
        with reading(self) as view:
            if not library().view_find(view, b"config.json"):
                return {}
        return json.loads(self.read("config.json"))

    def tied(self) -> dict[str, str]:
        """{another name that the model's class has: the tensor that it is tied to}, as {"lm_head.weight": "model.embed_tokens.weight"}; {} if none is."""
        return self.info()["tied"]

    def explain(self, name: str) -> dict[str, Any]:
        """Where a tensor comes from: the rule that makes it, the framework's tensors, and per shard the bytes. CkptError "missing": there is none."""
        with reading(self) as view:
            return json.loads(take_text(new(library().view_explain, view, name.encode())))

    def items(
        self, names: Iterable[str] | None = None, prefetch: int = 2
    ) -> Iterator[tuple[str, torch.Tensor | numpy.ndarray]]:
        """(name, tensor) pairs in the order of the files, `prefetch` tensors read ahead by as many threads.

        names: which tensors, in any order; None: all. Tensors are get_tensor()'s, on the view's device, each the caller's own. The iterator reads
        while it is iterated: at most prefetch + 1 tensors are in memory beside those that the caller keeps.
        """
        return ahead(
            lambda info: (info.name, self._read(info, [0] * len(info.shape), info.shape)),
            self.infos(names),
            prefetch,
        )

    def infos(self, names: Iterable[str] | None = None) -> list[Info]:
        """What is known of the tensors (all, or those with these names), in the order of the files: list of objects with name, dtype (safetensors'
        word), shape and nbytes.
        """
        infos = (
            list(self._tensors.values())
            if names is None
            else [self._find(n) for n in dict.fromkeys(names)]
        )
        with reading(self) as view:
            place = {file: i for i, file in enumerate(_nodes(library().view_root(view)))}
        return sorted(infos, key=lambda info: (place[info.file], info.offset))

    def objects(self) -> dict[str, Any]:
        """What the checkpoint holds beside tensors: {name: plain Python value}, {} where the format has nothing of the kind.

        An optimizer's param_groups, a scheduler's state, the run's arguments: of DCP, Megatron's common.pt and rank files, nanotron's optimizer and
        lr_scheduler, torch.save files; of what every rank wrote, the first rank's. Named as torch's distributed checkpoints name them. The
        pickles are read as data: nothing is imported or called, and what only that could make is a ckptfs.Opaque. Sets come as lists.
        Read anew at each call. CkptError "unsupported": a pickle that only an attack has; "limit": more than a pickle may hold.
        """
        with reading(self) as view:
            return {
                k: value(v)
                for k, v in json.loads(take_text(new(library().view_objects, view))).items()
            }

    def _find(self, name):
        self.check()
        try:
            return self._tensors[name]
        except KeyError:
            raise CkptError("missing", f"there is no tensor '{name}'") from None

    def _read(self, info, lo, n):
        with reading(self) as view:
            out, address = _empty(self._framework, n, info.dtype)
            if all(n):
                library().view_box_pread(view, info.index, u64s(lo), u64s(n), c_void_p(address))
        return (
            out
            if str(self._device) == "cpu" or self._framework in NUMPIES
            else out.to(self._device)
        )

    def get_tensor(self, name: str) -> torch.Tensor | numpy.ndarray:
        """The whole tensor: torch's or numpy's, of the shape and dtype that get_slice() tells. CkptError "missing": there is none."""
        info = self._find(name)
        return self._read(info, [0] * len(info.shape), info.shape)

    def get_slice(self, name: str) -> Slice:
        """The tensor as something to index: slice[2:4, ..., :8] reads only that box, of the dtype that get_dtype() tells (safetensors' word) and the
        shape that indexing get_shape() gives. CkptError "missing": there is none.
        """
        return Slice(self, self._find(name))


def _nodes(node):
    """The files below a node."""
    lib = library()
    if not lib.node_is_dir(node):
        yield node
    for i in range(lib.node_children(node)):
        yield from _nodes(lib.node_child(node, i))


def _paths(node, top):
    lib = library()
    for i in range(lib.node_children(node)):
        child = lib.node_child(node, i)
        path = top + os.fsdecode(lib.node_name(child))
        if lib.node_is_dir(child):
            yield from _paths(child, path + "/")
        else:
            yield path


def _reopened(run, framework, device, step, options, generation):
    """What pickle makes of a view."""
    view = View(run, framework, device, step, options=options)
    if library().view_generation(view._view) != generation:
        view.close()
        raise CkptError("stale", f"'{run}' was saved again since this view of it was pickled")
    return view


def open(
    run: Path,
    framework: str = "pt",
    device: torch.device | str | int = "cpu",
    step: str | int | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    **more: Any,
) -> View:
    """Open a run (or one checkpoint) like safetensors.safe_open: keys(), metadata(), get_tensor(), get_slice(); a context manager.

    step       of a run with several: its directory's name, or the number that this ends in (10, "10", "global_step_10"); the latest if None
    framework  "pt" (torch) or "np" (numpy)
    options    those of ckptfs (base, view, dtype, recipe, lora, ...): as keywords, or a dict of them, or some of each
    """
    return View(run, framework, device, step, options=options, **more)
