# SPDX-License-Identifier: Apache-2.0
"""A view with the shape of safetensors.safe_open."""

import json
import os
from ctypes import byref, c_void_p

from ._library import CkptError, TensorInfo, library, new, take_text, u64s

TORCH = {"BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu",
         "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "I16": "int16", "U16": "uint16", "F16": "float16", "BF16": "bfloat16",
         "I32": "int32", "U32": "uint32", "F32": "float32", "C64": "complex64", "F64": "float64", "I64": "int64", "U64": "uint64"}


class Info:
    def __init__(self, index, t):
        self.index, self.name, self.dtype, self.nbytes = index, t.name.decode(), t.dtype.decode(), t.nbytes
        self.shape = [t.shape[d] for d in range(t.rank)]


def _empty(framework, shape, dtype):
    """An uninitialised array, and the address of its bytes."""
    if framework in ("pt", "torch", "pytorch"):
        import torch
        t = torch.empty(shape, dtype=getattr(torch, TORCH[dtype]))
        return t, t.data_ptr()
    import numpy
    if framework not in ("np", "numpy"):
        raise ValueError(f"framework {framework!r}: expected 'pt' or 'np'")
    if dtype == "BF16" or dtype.startswith("F8"):
        raise TypeError(f"numpy has no {dtype}; framework='pt' does, or dtype='float32' converts")
    a = numpy.empty(shape, dtype=TORCH[dtype])
    return a, a.ctypes.data


class Slice:
    """One tensor, read when it is indexed: only the box that is asked for."""

    def __init__(self, view, info):
        self._view, self._info = view, info

    def get_shape(self):
        return list(self._info.shape)

    def get_dtype(self):
        return self._info.dtype

    def __getitem__(self, index):
        shape = self._info.shape
        index = index if isinstance(index, tuple) else (index,)
        if any(i is Ellipsis for i in index):
            at = next(k for k, i in enumerate(index) if i is Ellipsis)
            index = index[:at] + (slice(None),) * (len(shape) - len(index) + 1) + index[at + 1:]
        if len(index) > len(shape):
            raise IndexError(f"'{self._info.name}' has {len(shape)} dimensions, {len(index)} indices were given")
        index += (slice(None),) * (len(shape) - len(index))
        lo, n, after = [], [], []
        for d, (i, size) in enumerate(zip(index, shape)):
            if isinstance(i, slice):
                picked = range(size)[i]
                first, last = (min(picked), max(picked)) if picked else (0, -1)
                after.append([p - first for p in picked] if abs(picked.step) != 1 or picked.step < 0 else slice(None))
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


class Run:
    """A run, opened with the options of ckptfs: its steps are known, no shard was opened."""

    def __init__(self, path, **options):
        lib = library()
        self.handle = None
        opt = new(lib.options_new)
        try:
            for key, value in options.items():
                if value is None or value is False:
                    continue
                text = None if value is True else os.fspath(value) if isinstance(value, os.PathLike) else str(value)
                lib.options_set(opt, key.encode(), text if text is None else text.encode())
            self.handle = new(lib.run_open, os.fsencode(path), opt)
        finally:
            lib.options_free(opt)

    def close(self):
        if self.handle:
            library().run_close(self.handle)
        self.handle = None

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


class View:
    """One checkpoint as tensors with their Hugging Face names (view="raw": the framework's own). See open()."""

    def __init__(self, run, framework="pt", device="cpu", step=None, **options):
        lib = library()
        self._view, self._framework, self._device = None, framework, device
        with Run(run, **options) as opened:
            self._view = new(lib.run_view, opened.handle, step if step is None else os.fsencode(str(step)))
        self._tensors = {}
        for i in range(lib.view_tensors(self._view)):
            t = TensorInfo()
            lib.view_tensor(self._view, i, byref(t))
            info = Info(i, t)
            self._tensors[info.name] = info

    def close(self):
        if self._view:
            library().view_release(self._view)
        self._view = None

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def __del__(self):
        self.close()

    def keys(self):
        return list(self._tensors)

    offset_keys = keys

    def __contains__(self, name):
        return name in self._tensors

    def __len__(self):
        return len(self._tensors)

    def metadata(self):
        return {"format": "pt"}

    def info(self):
        """What `ckpt info` knows of the view."""
        text = c_void_p()
        library().view_info(self._view, byref(text))
        return json.loads(take_text(text))

    def _find(self, name):
        try:
            return self._tensors[name]
        except KeyError:
            raise CkptError("missing", f"there is no tensor '{name}'") from None

    def _read(self, info, lo, n):
        out, address = _empty(self._framework, n, info.dtype)
        if all(n):
            library().view_box_pread(self._view, info.index, u64s(lo), u64s(n), c_void_p(address))
        return out if str(self._device) == "cpu" or self._framework in ("np", "numpy") else out.to(self._device)

    def get_tensor(self, name):
        info = self._find(name)
        return self._read(info, [0] * len(info.shape), info.shape)

    def get_slice(self, name):
        return Slice(self, self._find(name))


def open(run, framework="pt", device="cpu", step=None, **options):
    """Open a run (or one checkpoint) like safetensors.safe_open: keys(), metadata(), get_tensor(), get_slice(); a context manager.

    step: of a run with several; the latest if None. options: those of ckptfs (base=, view=, dtype=, recipe=, ...).
    """
    return View(run, framework, device, step, **options)
