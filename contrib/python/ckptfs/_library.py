# SPDX-License-Identifier: Apache-2.0
"""The functions of include/ckptfs/*.h that this package uses, through ctypes."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import warnings
from ctypes import (
    POINTER,
    byref,
    c_bool,
    c_char_p,
    c_double,
    c_int,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from types import SimpleNamespace

HERE = os.path.dirname(os.path.abspath(__file__))
VERSION = "0.3.0"  # of this package, and so of the library whose structs are below
NAME = "libckptfs_load.so.0"
NCCL_NAME = "libckptfs_load_nccl.so.0"
RANK = 12  # most dimensions
NO_LIMIT = 0xFFFFFFFF
SHARE_NONE = 0xFFFFFFFF
CODES = [
    "ok",
    "io",
    "format",
    "unsupported",
    "missing",
    "conflict",
    "stale",
    "limit",
    "nomem",
    "usage",
    "timeout",
    "peer",
    "cancelled",
]
READERS = {"auto": 0, "once": 1, "node": 2, "each": 3}


class CkptError(RuntimeError):
    """An error of libckptfs, or of this package.

    An error whose code is "missing" is a NotFoundError, and so a KeyError, too.

    Args:
        code: A word of CODES, which are the error codes of include/ckptfs/err.h.
        text: Which file or tensor, what was found, what was expected.

    Attributes:
        code: The word.
    """

    def __new__(cls, code: str, text: str) -> CkptError:
        """Return the class for the code, as OSError does for an errno."""
        kind = NotFoundError if cls is CkptError and code == "missing" else cls
        return super().__new__(kind, code, text)

    def __init__(self, code: str, text: str):
        super().__init__(text)
        self.code = code

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would quote it

    def __reduce__(self):
        return type(self), (self.code, self.args[0])


class NotFoundError(CkptError, KeyError):
    """CkptError "missing": a tensor, file, step or folder is not there. It is a KeyError, too."""


class Err(ctypes.Structure):
    """struct ckpt_err."""

    _fields_ = [("code", c_int), ("text", ctypes.c_char * 1024)]


class _Sized(ctypes.Structure):
    """A struct that begins with its size."""

    def __init__(self, *members, **more):
        super().__init__(ctypes.sizeof(self), *members, **more)


class TensorInfo(_Sized):
    """struct ckpt_tensor_info."""

    _fields_ = [
        ("size", c_size_t),
        ("name", c_char_p),
        ("dtype", c_char_p),
        ("shape", POINTER(c_uint64)),
        ("rank", c_uint32),
        ("nbytes", c_uint64),
        ("file", c_void_p),
        ("file_off", c_uint64),
    ]


class Step(ctypes.Structure):
    """struct ckpt_step."""

    _fields_ = [
        ("name", c_char_p),
        ("generation", c_uint64),
        ("mtime_ns", ctypes.c_int64),
        ("is_latest", c_bool),
    ]


PUT = ctypes.CFUNCTYPE(
    c_int, c_void_p, POINTER(c_uint64), POINTER(c_uint64), c_void_p, POINTER(c_uint64), c_char_p
)


class Dest(_Sized):
    """struct ckpt_dest."""

    _fields_ = [
        ("size", c_size_t),
        ("ptr", c_void_p),
        ("stride", POINTER(c_uint64)),
        ("dtype", c_char_p),
        ("host", c_bool),
        ("put", PUT),
        ("ctx", c_void_p),
    ]


class Mesh(_Sized):
    """struct ckpt_mesh."""

    _fields_ = [
        ("size", c_size_t),
        ("ndim", c_uint32),
        ("dim", POINTER(c_uint32)),
        ("ranks", POINTER(c_uint32)),
    ]


class Place(ctypes.Structure):
    """struct ckpt_placement."""

    _fields_ = [("kind", c_int), ("dim", c_uint32)]


class WantInfo(_Sized):
    """struct ckpt_want_info."""

    _fields_ = [
        ("size", c_size_t),
        ("tensor", c_char_p),
        ("dtype", c_char_p),
        ("rank", c_uint32),
        ("lo", c_uint64 * RANK),
        ("n", c_uint64 * RANK),
        ("nbytes", c_uint64),
    ]


class Rates(ctypes.Structure):
    """struct ckpt_rates."""

    _fields_ = [
        (n, c_double)
        for n in ("node_storage", "shared_storage", "page_cache", "copy", "local_link", "network")
    ]


class LoadOptions(_Sized):
    """struct ckpt_load_options."""

    _fields_ = [
        ("size", c_size_t),
        ("readers", c_int),
        ("host_bytes", c_uint64),
        ("device_bytes", c_uint64),
        ("window_bytes", c_uint64),
        ("threads", c_uint32),
        ("read_timeout_ms", c_uint32),
        ("exchange_timeout_ms", c_uint32),
        ("verify", c_bool),
        ("rates", Rates),
        ("direct", c_int),
        ("share", c_uint32),
    ]


ALLOC = ctypes.CFUNCTYPE(c_void_p, c_void_p, c_size_t, c_void_p)
DEALLOC = ctypes.CFUNCTYPE(None, c_void_p, c_void_p)
LOG = ctypes.CFUNCTYPE(None, c_void_p, c_char_p)


class Nccl(_Sized):
    """struct ckpt_nccl."""

    _fields_ = [
        ("size", c_size_t),
        ("device", c_int),
        ("stream", c_void_p),
        ("alloc", ALLOC),
        ("dealloc", DEALLOC),
        ("user", c_void_p),
    ]


class Stats(_Sized):
    """struct ckpt_load_stats."""

    BYTES = (
        "needed_bytes",
        "unique_bytes",
        "read_bytes",
        "reads",
        "sent_bytes",
        "received_bytes",
        "buffer_bytes",
        "device_bytes",
    )
    LATER = (
        ("kept_bytes", c_uint64),
        ("exchange_rate", c_double),
        ("setup_s", c_double),
        ("skipped_bytes", c_uint64),
        ("skipped_tensors", c_uint64),
        ("asked_bytes", c_uint64),
    )
    SECONDS = ("plan_s", "wall_s", "first_s", "read_s", "place_s", "send_s")
    _fields_ = [
        ("size", c_size_t),
        *[(name, c_uint64) for name in BYTES],
        *[(name, c_double) for name in SECONDS],
        *LATER,
    ]

    def as_dict(self):
        """Return {name: number}."""
        return {name: getattr(self, name) for name, _ in self._fields_[1:]}


P, E = c_void_p, POINTER(Err)
SIGNATURES = {  # those that return int get an Err last, and raise it
    "ckpt_version": (c_char_p, []),
    "ckpt_options_new": (c_int, [POINTER(P), E]),
    "ckpt_options_free": (None, [P]),
    "ckpt_options_set": (c_int, [P, c_char_p, c_char_p, E]),
    "ckpt_run_open": (c_int, [c_char_p, P, POINTER(P), E]),
    "ckpt_run_close": (None, [P]),
    "ckpt_run_find_step": (c_int, [P, c_char_p, POINTER(P), E]),
    "ckpt_run_view": (c_int, [P, c_char_p, POINTER(P), E]),
    "ckpt_run_steps": (c_int, [P, POINTER(POINTER(Step)), POINTER(c_size_t), E]),
    "ckpt_run_is_folder": (c_bool, [P]),
    "ckpt_steps_free": (None, [POINTER(Step), c_size_t]),
    "ckpt_view_root": (P, [P]),
    "ckpt_view_find": (P, [P, c_char_p]),
    "ckpt_node_name": (c_char_p, [P]),
    "ckpt_node_is_dir": (c_bool, [P]),
    "ckpt_node_size": (c_uint64, [P]),
    "ckpt_node_children": (c_size_t, [P]),
    "ckpt_node_child": (P, [P, c_size_t]),
    "ckpt_node_pread": (c_int, [P, P, P, c_size_t, c_uint64, POINTER(c_size_t), E]),
    "ckpt_view_explain": (c_int, [P, c_char_p, POINTER(P), E]),
    "ckpt_view_hold": (P, [P]),
    "ckpt_view_release": (None, [P]),
    "ckpt_view_source": (c_char_p, [P]),
    "ckpt_view_generation": (c_uint64, [P]),
    "ckpt_view_tensors": (c_size_t, [P]),
    "ckpt_view_tensor": (c_int, [P, c_size_t, POINTER(TensorInfo), E]),
    "ckpt_view_info": (c_int, [P, POINTER(P), E]),
    "ckpt_view_unchanged": (c_bool, [P, P, c_size_t]),
    "ckpt_view_objects": (c_int, [P, POINTER(P), E]),
    "ckpt_view_paths": (c_int, [P, POINTER(P), E]),
    "ckpt_view_states": (c_int, [P, POINTER(P), E]),
    "ckpt_view_box_pread": (c_int, [P, c_size_t, POINTER(c_uint64), POINTER(c_uint64), P, E]),
    "ckpt_comm_self": (c_int, [POINTER(P), E]),
    "ckpt_comm_from_env": (c_int, [POINTER(P), E]),
    "ckpt_comm_free": (None, [P]),
    "ckpt_comm_release": (c_uint64, [P]),
    "ckpt_comm_set_log": (None, [P, LOG, P]),
    "ckpt_comm_transport": (c_char_p, [P]),
    "ckpt_comm_agree": (c_int, [P, c_int, c_uint32, E]),
    "ckpt_comm_step": (c_int, [P, P, c_char_p, c_uint32, POINTER(P), E]),
    "ckpt_load_open": (
        c_int,
        [P, c_char_p, P, c_char_p, c_uint32, POINTER(P), POINTER(P), POINTER(P), E],
    ),
    "ckpt_load_open_local": (
        c_int,
        [P, c_char_p, P, c_char_p, c_uint32, POINTER(P), POINTER(P), POINTER(P), E],
    ),
    "ckpt_tcp_listen": (c_int, [c_char_p, POINTER(P), E]),
    "ckpt_tcp_address": (c_char_p, [P]),
    "ckpt_tcp_free": (None, [P]),
    "ckpt_tcp_connect": (c_int, [P, c_uint32, c_uint32, c_char_p, c_uint32, POINTER(P), E]),
    "ckpt_load_new": (c_int, [P, P, POINTER(LoadOptions), POINTER(P), E]),
    "ckpt_load_free": (None, [P]),
    "ckpt_load_want": (
        c_int,
        [P, c_char_p, POINTER(c_uint64), POINTER(c_uint64), POINTER(Dest), POINTER(c_size_t), E],
    ),
    "ckpt_load_want_part": (
        c_int,
        [
            P,
            c_char_p,
            POINTER(c_uint64),
            POINTER(c_uint64),
            POINTER(Mesh),
            POINTER(Place),
            POINTER(Dest),
            POINTER(c_size_t),
            E,
        ],
    ),
    "ckpt_load_want_layout": (c_int, [P, c_char_p, E]),
    "ckpt_load_wants": (c_size_t, [P]),
    "ckpt_load_set_dest": (c_int, [P, c_size_t, POINTER(Dest), E]),
    "ckpt_load_want_info": (c_int, [P, c_size_t, POINTER(WantInfo), E]),
    "ckpt_load_plan": (c_int, [P, E]),
    "ckpt_load_start": (c_int, [P, E]),
    "ckpt_load_wait": (c_int, [P, c_uint32, E]),
    "ckpt_load_next": (c_int, [P, c_uint32, POINTER(c_size_t), E]),
    "ckpt_load_cancel": (None, [P]),
    "ckpt_load_pause": (c_int, [P, c_uint32, E]),
    "ckpt_load_resume": (c_int, [P, E]),
    "ckpt_load_reload": (c_int, [P, P, c_bool, E]),
    "ckpt_load_stats": (c_int, [P, POINTER(Stats), POINTER(Stats), E]),
    "ckpt_load_readers": (c_char_p, [P]),
}
_lib = None
_nccl = _nccl_problem = None


def _open():
    top = os.environ.get("CKPTFS_LIBRARY_PATH")
    if top:
        for folder in (top, os.path.join(top, "core"), os.path.join(top, "lib")):
            if os.path.exists(os.path.join(folder, NAME)):
                return ctypes.CDLL(os.path.join(folder, NAME))
        raise ImportError(
            f"CKPTFS_LIBRARY_PATH={top}: there is no {NAME} in it, nor in core/ or lib/ below"
        )
    own = os.path.join(HERE, "lib", NAME)  # in a package that pip installed
    try:
        return ctypes.CDLL(own if os.path.exists(own) else NAME)
    except OSError as e:
        raise ImportError(
            f"{NAME} is not installed; CKPTFS_LIBRARY_PATH names the directory of a build ({e})"
        ) from None


def _wrap(fn):
    def call(*args):
        for arg in args:
            if isinstance(arg, bytes) and 0 in arg:  # C would see only what is before it
                raise ValueError(f"embedded null byte: {arg!r}")
        err = Err()
        result = fn(*args, byref(err))
        if result < 0:
            raise CkptError(CODES[err.code], err.text.decode(errors="replace"))
        return result

    return call


def _check_version(dll):
    """Refuse a library of another version, whose structs may be larger than those above."""
    dll.ckpt_version.restype = c_char_p
    version = dll.ckpt_version().decode()
    if version != VERSION:
        raise ImportError(
            f"{dll._name} is of version {version}, the Python package ckptfs in '{HERE}' of "
            f"{VERSION}: install both of one version, or name the directory of its build in "
            "CKPTFS_LIBRARY_PATH"
        )


class _Library:
    """The functions by their names without "ckpt_"."""

    def __init__(self):
        dll = _open()
        self.path = dll._name
        _check_version(dll)
        for name, (result, args) in SIGNATURES.items():
            fn = getattr(dll, name)
            fn.restype, fn.argtypes = result, args
            setattr(self, name[5:], _wrap(fn) if args and args[-1] is E else fn)
        self.comm_agree_raw = dll.ckpt_comm_agree


def library():
    """Return the library, which is opened once."""
    global _lib
    if _lib is None:
        _lib = _Library()
    return _lib


def nccl_library():
    """Return the functions of libckptfs_load_nccl, which lies beside libckptfs_load.

    None if it was not built or can't be loaded; nccl_problem() says why.
    """
    global _nccl, _nccl_problem
    if _nccl is None:
        folder = os.path.dirname(library().path)
        try:
            dll = ctypes.CDLL(os.path.join(folder, NCCL_NAME))
            dll.ckpt_comm_nccl.restype, dll.ckpt_comm_nccl.argtypes = (
                c_int,
                [P, POINTER(Nccl), POINTER(P), E],
            )
            dll.ckpt_comm_nccl_stream.restype, dll.ckpt_comm_nccl_stream.argtypes = c_int, [P, P, E]
            _nccl = SimpleNamespace(
                comm_nccl=_wrap(dll.ckpt_comm_nccl),
                comm_nccl_stream=_wrap(dll.ckpt_comm_nccl_stream),
            )
        except OSError as e:
            _nccl, _nccl_problem = False, str(e)
    return _nccl or None


def nccl_problem():
    """Return why nccl_library() is None."""
    return _nccl_problem


def to_device(comm, device, stream, memory=None):
    """Give a comm over host memory this rank's CUDA device.

    `memory` is a pair of functions that allocate and free memory of the device and get the device's
    number. They must live as long as the process. None uses the driver's.
    """
    functions = memory or (ALLOC(), DEALLOC())
    how = Nccl(device, stream, *functions, device)
    nccl_library().comm_nccl(comm, byref(how), byref(c_void_p()))


def is_bucket(run):
    """Return whether a run is in a bucket (s3://...), not at a path of this machine."""
    return os.fsdecode(run).startswith("s3://")


def warn(text):
    """Warn at the line that called this package, by itself or through torch."""
    frame, level = sys._getframe(1), 2
    inner = ("ckptfs", "torch", "contextlib")
    while frame.f_back and str(frame.f_globals.get("__name__")).partition(".")[0] in inner:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


@LOG
def _say(_, text):
    logging.getLogger("ckptfs").warning("%s", text.decode(errors="replace"))


def say_waits(comm):
    """Let rank 0's logger "ckptfs" tell which ranks it waits for, after 10 s."""
    library().comm_set_log(comm, _say, None)


def new(fn, *args):
    """Call fn(*args, &handle) and return the handle."""
    handle = c_void_p()
    fn(*args, byref(handle))
    return handle


def u64s(values):
    """Return a C array of uint64_t; at least one element."""
    return (c_uint64 * max(len(values), 1))(*values)


def u32s(values):
    """Return a C array of uint32_t; at least one element."""
    return (c_uint32 * max(len(values), 1))(*values)


def take_bytes(pointer):
    """Return a text that the library has allocated, and free it. The bytes of a path may be any."""
    text = ctypes.cast(pointer, c_char_p).value
    free = ctypes.CDLL(None).free
    free.argtypes = [c_void_p]
    free(pointer)
    return text


def take_text(pointer):
    """Return a text that the library has allocated, decoded, and free it."""
    return take_bytes(pointer).decode()
