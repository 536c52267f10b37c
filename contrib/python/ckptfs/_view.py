# SPDX-License-Identifier: Apache-2.0
"""A view of a checkpoint, with the interface of safetensors.safe_open."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from ctypes import POINTER, byref, c_char, c_size_t, c_void_p
from typing import TYPE_CHECKING, Any, Union

from ._ahead import ahead
from ._fork import reading, taken
from ._library import (
    CkptError,
    Step,
    TensorInfo,
    is_bucket,
    library,
    new,
    take_bytes,
    take_text,
    u64s,
    warn,
)
from ._objects import value

if TYPE_CHECKING:
    import numpy
    import torch

Path = Union[str, bytes, "os.PathLike[str]"]

TORCH = {
    "BOOL": "bool",
    "F4": "float4_e2m1fn_x2",
    "F6_E2M3": "float6_e2m3fn",  # torch has neither of these two
    "F6_E3M2": "float6_e3m2fn",
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

PACKS = {"F4": 2, "F6_E2M3": 4, "F6_E3M2": 4}  # the fewest elements that are whole bytes

MOST_READ = 1 << 30  # bytes
PIECE = 64 << 20  # bytes that are read at once for another device
MOST_TOLD = 8  # warnings

BACKENDS = ("mmap", "pread")  # safetensors'
TORCHES, NUMPIES = ("pt", "torch", "pytorch"), ("np", "numpy")


class Info:
    """What is known of one tensor of a view.

    Attributes:
        name: The tensor's name.
        dtype: safetensors' word, such as "BF16".
        shape: The sizes of its dimensions, as torch counts them: of F4 the last one has pairs of
            elements, and of F6 fours, which are the fewest that are whole bytes.
        nbytes: Its size in bytes.
    """

    def __init__(self, index, t):
        self.index, self.name, self.dtype = index, t.name.decode(), t.dtype.decode()
        self.shape, self.nbytes = [t.shape[d] for d in range(t.rank)], t.nbytes
        self.pack = PACKS.get(self.dtype, 1)
        if self.pack > 1:
            self.shape[-1] //= self.pack
        self.file, self.offset = t.file, t.file_off

    def __repr__(self) -> str:
        return f"<ckptfs.Info '{self.name}': {self.dtype} {self.shape}>"


def torch_dtype(word):
    """Return torch's dtype of safetensors' word; CkptError "unsupported" names one it has not."""
    import torch

    try:
        return getattr(torch, TORCH.get(word, word))
    except AttributeError:
        raise CkptError(
            "unsupported", f"torch {torch.__version__} has no dtype for {word}"
        ) from None


def _empty(framework, shape, dtype):
    """Return an uninitialised array, and the address of its bytes."""
    if framework in TORCHES:
        import torch

        # On the CPU, whatever the default device is.
        t = torch.empty(shape, dtype=torch_dtype(dtype), device="cpu")
        return t, t.data_ptr()
    import numpy

    if dtype == "BF16" or dtype.startswith(("F8", "F6", "F4")):
        raise TypeError(f"numpy has no {dtype}; framework='pt' does, or dtype='float32' converts")
    a = numpy.empty(shape, dtype=TORCH[dtype])
    return a, a.ctypes.data


class Slice:
    """A tensor that is read when it is indexed, and then only the box that is asked for."""

    def __init__(self, view, info):
        self._view, self._info = view, info

    def get_shape(self) -> list[int]:
        """Return the sizes of the tensor's dimensions, in elements."""
        self._view.check()
        return self._shape()

    def _shape(self):
        shape = list(self._info.shape)
        if self._info.pack > 1:
            shape[-1] *= self._info.pack
        return shape

    def get_dtype(self) -> str:
        """Return the tensor's dtype, as safetensors' word ("BF16")."""
        self._view.check()
        return self._info.dtype

    def __getitem__(self, index: Any) -> torch.Tensor | numpy.ndarray:
        shape = self._shape()
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
                    f"{i!r}: expected an index of integers, slices, '...' or a list of integers"
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
            first, last, left = self._range(d, i, size)
            lo.append(first)
            n.append(last - first + 1)
            after.append(left)
        if self._info.pack > 1:
            self._count_packs(lo, n, after)
        out = self._view._read(self._info, lo, n)
        for d in reversed(range(len(after))):
            if not isinstance(after[d], slice):
                out = out[(slice(None),) * d + (after[d],)]
        return out

    def _count_packs(self, lo, n, after):
        """Turn a box in elements into one in packs."""
        pack = self._info.pack
        if after[-1] != slice(None) or lo[-1] % pack or n[-1] % pack:
            raise IndexError(
                f"'{self._info.name}' is {self._info.dtype}: an index of its last dimension has to "
                f"take whole bytes, {pack} elements from a multiple of {pack} on"
            )
        lo[-1] //= pack
        n[-1] //= pack

    def _range(self, d, i, size):
        """Return the first and last element that an index takes, and what is left to index."""
        try:
            if isinstance(i, (list, tuple)):
                picked = [range(size)[k] for k in i]
            elif isinstance(i, slice):
                picked = range(size)[i]
            else:
                at = range(size)[i]
                return at, at, 0
        except IndexError:
            raise IndexError(
                f"'{self._info.name}': index {i} is out of range for dimension {d} of size {size}"
            ) from None
        first, last = (min(picked), max(picked)) if picked else (0, -1)
        if isinstance(picked, range) and picked.step == 1:
            return first, last, slice(None)
        return first, last, [p - first for p in picked]

    def __repr__(self) -> str:
        return f"<ckptfs.Slice of '{self._info.name}': {self._info.dtype} {self._info.shape}>"


def spelled(options, more):
    """Return a view's options, given as keywords and as a dict; ValueError for a repeated one."""
    twice = sorted(k for k in more if k in options and more[k] is not None)
    if twice:
        raise ValueError(f"{', '.join(twice)}: given as keyword and in options, once is enough")
    return {**more, **options}


def _word(value):
    """Return an option's value as the library takes it; a torch.dtype is given by its name."""
    return os.fsencode(
        value
        if isinstance(value, os.PathLike)
        else str(value).removeprefix("torch." if type(value).__name__ == "dtype" else "")
    )


@contextlib.contextmanager
def _native(options):
    """Provide the library's object for the options of a view."""
    lib = library()
    opt = new(lib.options_new)
    try:
        for key, value in options.items():
            if value is None or value is False or key == "local_files":  # which no view has
                continue
            for one in value if isinstance(value, (list, tuple)) else (value,):
                lib.options_set(opt, key.encode(), None if one is True else _word(one))
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
        """Return the name of a step, given the name or the number at its end; None is the latest.

        "" if there is only one checkpoint.
        """
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
        """Return the names of the steps, oldest first; [] of one checkpoint."""
        lib, found, n = library(), POINTER(Step)(), c_size_t()
        if not lib.run_is_folder(self.handle):
            return []
        lib.run_steps(self.handle, byref(found), byref(n))
        try:
            return [os.fsdecode(found[i].name) for i in range(n.value)]
        finally:
            lib.steps_free(found, n)

    def close(self):
        """Close the run."""
        if self.handle:
            library().run_close(self.handle)
        self.handle = None

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


class View:
    """One checkpoint as tensors under their Hugging Face names (view="raw": the framework's own).

    ckptfs.open makes it. Reading is safe from many threads, and in forked children. Pickling keeps
    the path and the options, and opens the same step again. Every method raises CkptError "usage"
    once the view is closed.

    Args:
        run: As for open.
        framework: As for open.
        device: As for open.
        step: As for open.
        options: As for open.
        comm: The connected ranks that open the view together; None for this process.
        told: Warnings that were given before; None gives none.
        **more: As for open.
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
        told: Iterable[str] | None = (),
        **more: Any,
    ):
        if framework not in TORCHES + NUMPIES:
            raise ValueError(f"framework={framework!r}: expected 'pt' or 'np'")
        self._run = os.fsdecode(run) if is_bucket(run) else os.path.abspath(os.fsdecode(run))
        self._framework, self._device = framework, device
        self._options = {
            k: v
            for k, v in spelled(dict(options or {}), more).items()
            if v is not None and v is not False
        }
        if comm is None and "local_files" in self._options:
            raise ValueError(
                "local_files: one process sees its own files only; give the path of the run to "
                "load_state_dict, on all ranks"
            )
        step = self._options.pop("step", None) if step is None else step
        self._step = step if step is None else str(step)
        self._view = self._open() if comm is None else self._open_together(comm)
        self._tensors = {
            info.name: info for info in map(self._info, range(library().view_tensors(self._view)))
        }
        said = self.info()["warnings"]
        if told is not None and (comm is None or comm.rank == 0):
            self._warn([text for text in said if text not in told])
        self._told = {*(told or ()), *said}

    def _open(self):
        with Run(self._run, **self._options) as run:
            # Kept for again(): the same step, whatever the latest is by then; "" if there is one.
            self._step = run.find_step(self._step or None)
            return new(library().run_view, run.handle, os.fsencode(self._step))

    def _open_together(self, comm):
        """Do what _open() does on all ranks of a comm.

        Rank 0 opens the files and chooses the step; the other ranks take what it has read.
        """
        lib, step, view = library(), c_void_p(), c_void_p()
        with contextlib.ExitStack() as stack:
            try:
                opt = stack.enter_context(_native(self._options))
            except CkptError as e:
                comm.agree(e)  # the others are in load_open
            asked = os.fsencode(self._step) if self._step else None
            (lib.load_open_local if "local_files" in self._options else lib.load_open)(
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

    def _warn(self, said):
        """Warn of what was left out, guessed or not found, as ckpt does on its terminal."""
        for text in said[:MOST_TOLD]:
            warn(f"'{self._run}': {text}")
        if len(said) > MOST_TOLD:
            warn(
                f"'{self._run}': and {len(said) - MOST_TOLD} more warnings, which "
                "View.info()['warnings'] lists"
            )

    def again(self, comm: Any = None, **changed: Any) -> View:
        """Open the same step anew, with other options.

        Args:
            comm: The connected ranks that open it together; None for this process.
            **changed: The options that change.

        Returns:
            Another View.

        Raises:
            CkptError: The step can't be read with these options.
        """
        return View(
            self._run,
            self._framework,
            self._device,
            self._step,
            options={**self._options, **changed},
            comm=comm,
            told=self._told,
        )

    def is_plain(self) -> bool:
        """Return whether the view has names as on the hub."""
        return self._options.get("view") in (None, "hf")

    def is_raw(self) -> bool:
        """Return whether the view has the framework's own names."""
        return self._options.get("view") not in (None, "hf", "memory")

    def check(self) -> None:
        """Raise CkptError "usage" if the view is closed."""
        if not self._view:
            raise CkptError("usage", f"the view of '{self._run}' is closed")
        if self._lost:
            raise CkptError("usage", f"the view of '{self._run}' can't be used: {self._lost}")

    def close(self) -> None:
        """Close the view. Reads that are running in other threads finish."""
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
        step = f"step '{self._step}', " if self._step else ""
        state = f"{len(self._tensors)} tensors" if self._view else "closed"
        return f"<ckptfs.View of '{self._run}', {step}{state}>"

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
        """Return the tensors' names, in the checkpoint's order."""
        self.check()
        return list(self._tensors)

    def offset_keys(self) -> list[str]:
        """Return the tensors' names, in the order of the files."""
        return [info.name for info in self.infos()]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __getitem__(self, name: str) -> torch.Tensor | numpy.ndarray:
        return self.get_tensor(name)

    def __contains__(self, name: str) -> bool:
        self.check()
        return name in self._tensors

    def __len__(self) -> int:
        self.check()
        return len(self._tensors)

    def metadata(self) -> dict[str, str] | None:
        """Return the entries of `__metadata__` that the view's files of weights have.

        Those of a Hugging Face directory keep what they say there, and every file of a model says
        {"format": "pt"} if it says no format: transformers asks for it.

        Returns:
            Of several files, the entries on which they agree. None if no file has `__metadata__`:
            so are adapters that were saved without it. {"format": "pt"} if the view has no
            safetensors files.
        """
        with reading(self) as view:
            found = [
                _header(view, node)
                for node in dict.fromkeys(info.file for info in self._tensors.values())
                if node and library().node_name(node).endswith(b".safetensors")
            ]
        if not found:
            return {"format": "pt"}
        said = [header["__metadata__"] for header in found if "__metadata__" in header]
        joined = {k: v for entries in said for k, v in entries.items()}
        agreed = {k: v for k, v in joined.items() if all(e.get(k, v) == v for e in said)}
        return agreed if said else None

    def info(self) -> dict[str, Any]:
        """Return what `ckpt info` knows of the view, as a dict."""
        with reading(self) as view:
            return json.loads(take_text(new(library().view_info, view)))

    def unchanged(self, before: View) -> set[str]:
        """Return the tensors that are known to be as in another view, without reading any.

        They are what the changes of a step (slime, SkyRL) do not touch. Of other formats nothing
        is known.

        Args:
            before: Another view, of another step of the same run for example.
        """
        with reading(before) as old, reading(self) as new:
            return {
                info.name
                for info in self._tensors.values()
                if library().view_unchanged(old, new, info.index)
            }

    def steps(self) -> list[str]:
        """Return the names of the run's steps as they are now, oldest first.

        Each name may be given to open(run, step=name). [] if there is only one checkpoint.
        """
        self.check()
        with Run(self._run, **self._options) as run:
            return run.steps()

    def files(self) -> list[str]:
        """Return the paths of the view's files, sorted: weights, config, tokenizer and so on.

        They are those that the mount shows and that `ckpt export` writes.
        """
        with reading(self) as view:
            return list(_paths(library().view_root(view), ""))

    def read(self, name: str) -> bytes:
        """Read one of files().

        Args:
            name: The file's path in the view.

        Returns:
            The bytes of the file.

        Raises:
            NotFoundError: There is no such file.
            CkptError: "limit" if the file has more than 1 GiB (for weights there is get_tensor).
        """
        return self._read_file(name)

    def _read_file(self, name, offset=0, size=None):
        """Read a file, or `size` bytes of it from `offset` on: fewer at the file's end."""
        with reading(self) as view:
            node = self._node(view, name)
            size = library().node_size(node) if size is None else size
            if size > MOST_READ:
                raise CkptError(
                    "limit", f"'{name}' has {size} bytes: read() gives files of at most {MOST_READ}"
                )
            return _pread(view, node, size, offset)

    def _file_size(self, name):
        with reading(self) as view:
            return library().node_size(self._node(view, name))

    def _node(self, view, name):
        lib = library()
        node = None if "\0" in os.fsdecode(name) else lib.view_find(view, os.fsencode(name))
        if not node or lib.node_is_dir(node):
            raise CkptError("missing", f"there is no file '{name}' in the view: files() lists them")
        return node

    @property
    def config(self) -> dict[str, Any]:
        """The view's config.json as a dict.

        {} if there is none: in view="raw", or if the checkpoint says nothing of its model.
        """
        with reading(self) as view:
            if not library().view_find(view, b"config.json"):
                return {}
        return json.loads(self.read("config.json"))

    def tied(self) -> dict[str, str]:
        """Return the further names that the model's class has for tensors, {name: the stored name}.

        For example {"lm_head.weight": "model.embed_tokens.weight"}; {} if there are none.
        """
        return self.info()["tied"]

    def explain(self, name: str) -> dict[str, Any]:
        """Return where a tensor comes from, as a dict.

        Args:
            name: The tensor's name.

        Returns: The rule that makes the tensor, the framework's tensors that it is made of, and for
            each shard the bytes.

        Raises:
            NotFoundError: There is no such tensor.
        """
        with reading(self) as view:
            return json.loads(take_text(new(library().view_explain, view, name.encode())))

    def items(
        self, names: Iterable[str] | None = None, prefetch: int = 2
    ) -> Iterator[tuple[str, torch.Tensor | numpy.ndarray]]:
        """Yield (name, tensor) pairs in the order of the files.

        At most prefetch + 1 tensors are in memory beside those that the caller keeps.

        Args:
            names: Which tensors, in any order; None is all.
            prefetch: How many tensors are read ahead, by as many threads.

        Yields:
            The name, and the tensor as get_tensor() returns it.

        Raises:
            NotFoundError: One of the names is not there.
            CkptError: A tensor can't be read.
        """
        return ahead(
            lambda info: (info.name, self._read(info, [0] * len(info.shape), info.shape)),
            self.infos(names),
            prefetch,
        )

    def infos(self, names: Iterable[str] | None = None) -> list[Info]:
        """Return what is known of the tensors, in the order of the files.

        Args:
            names: Which tensors, in any order; None is all.

        Returns:
            Objects with name, dtype (safetensors' word), shape and nbytes.

        Raises:
            NotFoundError: One of the names is not there.
        """
        infos = (
            list(self._tensors.values())
            if names is None
            else [self._find(n) for n in dict.fromkeys(names)]
        )
        with reading(self) as view:
            place = {file: i for i, file in enumerate(_nodes(library().view_root(view)))}
        return sorted(infos, key=lambda info: (place[info.file], info.offset))

    def paths(self) -> dict[str, tuple[str | int, ...]]:
        """Return the paths of the stored names in the nested state dict that was saved.

        Torch's distributed checkpoints keep them, also of values that are not tensors:
        {"optim.lr": ("optim", "lr")}. Each call reads the metadata again.

        Returns:
            {name: path}; {} of other formats.

        Raises:
            CkptError: The metadata can't be read.
        """
        with reading(self) as view:
            found = json.loads(take_text(new(library().view_paths, view)))
        return {name: tuple(path) for name, path in found.items()}

    def states(self) -> dict[str, Any]:
        """Return which values the checkpoint has of its parameters.

        They are "weight", "master" (F32), "exp_avg" and "exp_avg_sq" of Adam, and others by their
        framework's names. The option state= shows one of them. Each call reads the headers again.

        Returns:
            {"exp_avg": {"tensors": 10, "bytes": 4000, "dtypes": {"F32": 10}}, ...}

        Raises:
            CkptError: a file could not be read.
        """
        with reading(self) as view:
            return json.loads(take_text(new(library().view_states, view)))

    def objects(self) -> dict[str, Any]:
        """Return the values of the checkpoint that are not tensors.

        They are an optimizer's param_groups, a scheduler's state, the run's arguments and the like:
        of DCP, of Megatron's common.pt and rank files, of nanotron's optimizer and lr_scheduler, of
        torch.save files. Of values that every rank wrote, the first rank's are taken. Names are
        those of torch's distributed checkpoints. Pickles are read as data: nothing is imported or
        called, and a value that only code could make is a ckptfs.Opaque. Sets are lists. Each call
        reads the files again.

        Returns:
            {name: plain Python value}; {} if the format has no such values.

        Raises:
            CkptError: "unsupported" for a pickle that only an attack has, "limit" for a pickle that
                is too large.
        """
        with reading(self) as view:
            found = json.loads(take_text(new(library().view_objects, view)))
        return {k: value(v) for k, v in found.items()}

    def _find(self, name):
        self.check()
        try:
            return self._tensors[name]
        except KeyError:
            raise CkptError(
                "missing", f"there is no tensor '{name}' in {self}: keys() lists them"
            ) from None

    def _read(self, info, lo, n):
        if str(self._device) != "cpu" and self._framework in TORCHES:
            return self._read_to_device(info, lo, n)
        with reading(self) as view:
            out, address = _empty(self._framework, n, info.dtype)
            if all(n):
                library().view_box_pread(view, info.index, u64s(lo), u64s(n), c_void_p(address))
        return out

    def _read_to_device(self, info, lo, n):
        """Read a box in pieces of rows: on the host there is never more of it than PIECE."""
        import torch

        out = torch.empty(n, dtype=torch_dtype(info.dtype), device=self._device)
        with reading(self) as view:
            for at, m, part in _pieces(out, PIECE) if all(n) else ():
                piece, address = _empty("pt", m, info.dtype)
                where = u64s([first + further for first, further in zip(lo, at)])
                library().view_box_pread(view, info.index, where, u64s(m), c_void_p(address))
                part.copy_(piece)
        return out

    def get_tensor(self, name: str) -> torch.Tensor | numpy.ndarray:
        """Read a whole tensor.

        Args:
            name: The tensor's name.

        Returns: A torch tensor on the view's device, or a numpy array, of the shape and dtype that
            get_slice() tells. It is the caller's own.

        Raises:
            NotFoundError: There is no such tensor.
            CkptError: The tensor can't be read.
            TypeError: numpy does not have the dtype.
        """
        info = self._find(name)
        return self._read(info, [0] * len(info.shape), info.shape)

    def get_tensors(self) -> dict[str, torch.Tensor | numpy.ndarray]:
        """Read all tensors.

        Returns:
            {name: what get_tensor() returns}, in the order of the files.

        Raises:
            CkptError: A tensor can't be read.
            TypeError: numpy does not have a dtype.
        """
        return dict(self.items())

    def get_slice(self, name: str) -> Slice:
        """Return a tensor to index: slice[2:4, ..., :8] reads only that box.

        Args:
            name: The tensor's name.

        Returns: A Slice. Indexing it gives a tensor of the dtype that get_dtype() tells, and of the
            shape that indexing a tensor of get_shape() gives. An index is an integer, a slice,
            "..." or one list of integers.

        Raises:
            NotFoundError: There is no such tensor.
        """
        return Slice(self, self._find(name))


def _pread(view, node, size, offset):
    """Read `size` bytes of a file from `offset` on: fewer at the file's end."""
    buffer, got = (c_char * max(size, 1))(), c_size_t()
    library().node_pread(view, node, buffer, size, offset, byref(got))
    return buffer.raw[: got.value]


def _header(view, node):
    """Read the header of a safetensors file of the view."""
    size = int.from_bytes(_pread(view, node, 8, 0), "little")
    return json.loads(_pread(view, node, size, 8))


def _pieces(tensor, most):
    """Yield (offset, shape, view) of a tensor's pieces of at most so many bytes, or of an element.

    A piece is a range of one dimension; all later ones are whole, and of the earlier ones it has
    one element.
    """
    if not tensor.dim() or tensor.numel() * tensor.element_size() <= most:
        yield [0] * tensor.dim(), list(tensor.shape), tensor
        return
    row = tensor[0].numel() * tensor.element_size()
    rows = max(most // row, 1)
    for i in range(0, tensor.shape[0], rows):
        part = tensor[i : i + rows]
        if row <= most:
            yield [i] + [0] * (tensor.dim() - 1), list(part.shape), part
            continue
        for at, shape, inner in _pieces(part[0], most):
            yield [i, *at], [1, *shape], inner[None]


def _nodes(node):
    """Yield the files below a node."""
    lib = library()
    if not lib.node_is_dir(node):
        yield node
    for i in range(lib.node_children(node)):
        yield from _nodes(lib.node_child(node, i))


def _paths(node, top):
    """Yield the paths of the files below a node."""
    lib = library()
    for i in range(lib.node_children(node)):
        child = lib.node_child(node, i)
        path = top + os.fsdecode(lib.node_name(child))
        if lib.node_is_dir(child):
            yield from _paths(child, path + "/")
        else:
            yield path


def _reopened(run, framework, device, step, options, generation):
    """Return the view that pickle makes."""
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
    backend: str = "pread",
    options: Mapping[str, Any] | None = None,
    **more: Any,
) -> View:
    """Open a run or one checkpoint, like safetensors.safe_open.

    Args:
        run: The path of a run, of one checkpoint, or of a model directory.
        framework: "pt" for torch's tensors, "np" for numpy's arrays.
        device: Where torch's tensors are made: a torch.device, or what makes one.
        step: Of a run with several steps: the name of the step's directory, or the number at the
            end of it (10, "10", "global_step_10"). None is the latest.
        backend: safetensors' words "mmap" and "pread" are taken, and mean the same here: shards are
            read, never mapped.
        options: Options of ckptfs as a dict: base, view, dtype, recipe, lora and so on. `ckptfs(1)`
            describes them.
        **more: The same options as keywords.

    Returns:
        A View, which is a context manager.

    Raises:
        CkptError: The run can't be read; `code` says which kind of error.
        NotFoundError: There is no such step.
        ValueError: An argument is wrong.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: expected {' or '.join(map(repr, BACKENDS))}")
    return View(run, framework, device, step, options=options, **more)
