# SPDX-License-Identifier: Apache-2.0
"""From a torch process group to a comm of libckptfs_load."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import warnings
import weakref
from ctypes import byref, c_char_p, c_void_p
from typing import TYPE_CHECKING, Literal, Union

from ._device_memory import DRIVER, TORCH
from ._exchange import exchange_of
from ._fork import check_group, check_process
from ._library import (
    CODES,
    SHARE_NONE,
    CkptError,
    Err,
    library,
    nccl_library,
    nccl_problem,
    new,
    say_waits,
    to_device,
)

if TYPE_CHECKING:
    import torch

    Group = Union[torch.distributed.ProcessGroup, "Comm", Literal[False], None]

TIMEOUT_MS = 300 * 1000


def _own_address():
    """Under which address the others reach this machine: the one from which it would reach rank 0."""
    to = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(to, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as s:
            s.connect(address)  # sends nothing
            return s.getsockname()[0]
    except OSError:
        return "127.0.0.1"


class Comm:
    """The ranks that load together, and their connections. Loads that are given a process group make one for themselves; who loads often makes
    one, once, and gives it as process_group= to load_state_dict, load_boxes, load_layout ..., to one load at a time, in the same order on all ranks:

        with ckptfs.Comm() as comm:
            for run in runs:
                ckptfs.load_state_dict(model, run, comm)

    group       a torch process group, all of whose ranks make it together; None: the default one; False: this process alone
    device      the number of the CUDA device that this rank's tensors are on, or None. If every rank has one, and the library for NCCL is there,
                loads go straight to device memory; else `device` is None afterwards: through the host
    timeout_ms  how long to wait for another rank, from the first call
    allocator   where the memory that loads need on a CUDA device comes from, and goes back to: "torch" (its caching allocator, on its current stream)
                or "driver", outside of torch's accounts and limits

    A load on a device comes after the work that is queued on the stream that is current where the load is called (load_async, reload, resume ...).

    `rank`, `size`, `ranks` ({global rank: rank here}). It serves after a load that failed, too. CkptError: "timeout" or
    "peer": a rank did not come; "usage": it is closed, or this process was forked. ValueError: this process is not in the group.
    """

    # Another thread may close it while a load runs on it, or the thread that started the load, whose own thread goes on.

    def __init__(
        self,
        group: torch.distributed.ProcessGroup | Literal[False] | None = None,
        device: int | None = None,
        timeout_ms: int = TIMEOUT_MS,
        failure: BaseException
        | None = None,  # failure: this rank can't load; the others hear of it
        *,
        allocator: Literal["torch", "driver"] = "torch",
    ):
        if allocator not in ("torch", "driver"):
            failure = failure or ValueError(
                f"allocator={allocator!r}: expected 'torch' or 'driver'"
            )
        self._memory = DRIVER if allocator == "driver" else TORCH
        self._comm, self.group, self.device, self.timeout_ms = None, None, device, timeout_ms
        self._meshes = {}  # of torch: few, but every parameter has one
        self._idle = threading.Condition()  # of the next line
        self._users, self._running, self._closing = (
            [],
            None,
            False,
        )  # threads that load; the Load that can be cancelled
        self._process = os.getpid()  # a forked one has none of these threads
        self._loads = weakref.WeakSet()  # whose memory belongs to this comm
        dist = _distributed()
        if dist is None or group is False or (group is None and not dist.is_initialized()):
            self.rank, self.size, self.ranks = 0, 1, {0: 0}
        else:
            self.group = group if group is not None else dist.group.WORLD
            if group is not None and dist.get_rank(group) < 0:
                raise ValueError("this process is not in process_group")
            self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
            self.ranks = {g: i for i, g in enumerate(dist.get_process_group_ranks(self.group))}
        if self.size > 1:
            check_group(dist.group.WORLD)
        self.words = exchange_of(dist, self.group, self.rank, self.size, timeout_ms / 1000)
        try:
            if failure is None or self.words.collective:
                self._connect(dist)
            if failure is not None:
                raise failure
        except BaseException as e:
            self.words.fail(e)
            self.close()
            raise

    @contextlib.contextmanager
    def in_use(self, timeout_ms, failure=None):
        """One more load over these connections, in this thread. `failure`: this rank can't; the others hear of it and it is raised."""
        check_process(self._process, "Comm")
        with self._idle:
            if not self._comm or self._closing:
                raise CkptError("usage", "this Comm is closed")
            self._users.append(threading.get_ident())
        try:
            self._begin(timeout_ms, failure)
            yield self
        except CkptError as e:
            raise self._reason(e) from None
        finally:
            with self._idle:
                self._users.remove(threading.get_ident())
                self._idle.notify_all()

    def _begin(self, timeout_ms, failure):
        dist = _distributed()
        if self.size > 1:
            check_group(dist.group.WORLD)
        self.timeout_ms = timeout_ms
        words = exchange_of(dist, self.group, self.rank, self.size, timeout_ms / 1000)
        with self._idle:
            self.words = words
            failure = failure or (_closed() if self._closing else None)
        if failure is not None:
            words.fail(failure)
            raise failure

    def _reason(self, error):
        """Of an error: what a rank that is gone has said before it went, if it has."""
        try:
            return (error.code == "peer" and self.words.failure()) or error
        except CkptError:  # nor is the store there
            return error

    def add(self, load):
        """It is freed before this comm is."""
        self._loads.add(load)

    def runs(self, load):
        """The Load that is running from now on, which close() cancels; None: none is."""
        with self._idle:
            self._running = load
            if load is not None and self._closing:
                load.cancel()

    def _connect(self, dist):
        if self.device is not None and nccl_library() is None:
            _warn_of_detour(f"CUDA and NCCL can't be used ({nccl_problem()})")
            self.device = None
        if self.device is not None and self.size > 1 and os.environ.get("CKPTFS_SECRET"):
            _warn_of_detour("CKPTFS_SECRET authenticates TCP only, not NCCL")
            self.device = None
        if self.size == 1:
            self._comm = new(library().comm_self)
        elif dist.get_backend(self.group) == "mpi" and self.group is dist.group.WORLD:
            self.device = None
            self._comm = new(library().comm_from_env)
        else:
            self._comm = self._tcp()
        say_waits(self._comm)
        if self.device is not None:
            to_device(self._comm, self.device, _stream(self.device), self._memory)

    def _tcp(self):
        lib = library()
        tcp = new(lib.tcp_listen, _own_address().encode())
        try:
            told = self.words.share([lib.tcp_address(tcp).decode(), self.device is not None])
        except BaseException:
            lib.tcp_free(tcp)
            raise
        without = [str(rank) for rank, (_, has_device) in enumerate(told) if not has_device]
        if self.device is not None and without:
            _warn_of_detour(
                f"rank {', '.join(without[:8])}{' ...' if len(without) > 8 else ''} loads to no CUDA device, or can't use NCCL"
            )
            self.device = None
        table = (c_char_p * self.size)(*[address.encode() for address, _ in told])
        comm = c_void_p()
        lib.tcp_connect(tcp, self.rank, self.size, table, self.timeout_ms, byref(comm))
        return comm

    def after_stream(self) -> None:
        """A load that begins or goes on after this comes after the work that is queued now on this thread's current stream of the device."""
        if self.device is not None:
            nccl_library().comm_nccl_stream(self._comm, _stream(self.device))

    def share(self, prepare, combine=list):
        """combine([prepare() of every rank]), the same on all. If prepare() fails on one rank, all raise its error."""
        try:
            word = prepare()
        except BaseException as e:
            self.words.fail(e)
            raise
        return self.words.share(word, combine)

    def agree(self, failure):
        """Does every rank go on? If not, all raise: whoever failed its own error."""
        err = Err()
        if failure is not None:
            if not self.words.collective:
                self.words.fail(failure)  # in full; the others wait below
            err.code = CODES.index(getattr(failure, "code", "usage"))
            err.text = " ".join(str(failure).split()).encode(errors="backslashreplace")[:1023]
        rc = library().comm_agree_raw(
            self.handle, -1 if failure is not None else 0, self.timeout_ms, byref(err)
        )
        if failure is not None:
            raise failure
        if rc < 0:
            raise self.words.failure() or CkptError(
                CODES[err.code], err.text.decode(errors="replace")
            )

    def mesh(self, device_mesh, order):
        """A DeviceMesh's dimensions in this order, and its ranks here. KeyError: one is not in the group."""
        key = (device_mesh, *order)
        if key not in self._meshes:
            mesh = device_mesh.mesh.permute(order)
            self._meshes[key] = (
                list(mesh.shape),
                [self.ranks[int(g)] for g in mesh.flatten().tolist()],
            )
        return self._meshes[key]

    @property
    def handle(self):
        return self._comm

    def close(self) -> None:
        """Close the connections. A load that runs on them in another thread, as from load_async(), is cancelled on all ranks, and its end waited for.
        In a forked process nothing is closed: the connections are the parent's.
        """
        if self._process != os.getpid():
            self._comm = None
            return
        with self._idle:
            if threading.get_ident() in self._users:
                raise CkptError(
                    "usage",
                    "a load runs on this Comm in this very thread: close it when the load is over",
                )
            self._closing = True
            if self._users:
                self.words.fail(_closed())
            if self._running is not None:
                self._running.cancel()
            self._idle.wait_for(lambda: not self._users)
            handle, self._comm = self._comm, None
        if handle:
            for load in list(self._loads):
                load.close()
            library().comm_free(handle)

    def __enter__(self) -> Comm:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@contextlib.contextmanager
def joined(group, device=None, timeout_ms=TIMEOUT_MS, failure=None):
    """The Comm of one load: of a process group, or one that is there already and stays open."""
    if isinstance(group, Comm):
        with group.in_use(timeout_ms, failure):
            yield group
        return
    with Comm(group, device, timeout_ms, failure) as comm:
        yield comm


def share_number(comm, group):
    """What stands for a process group in LoadOptions.share. None: all ranks that give none share."""
    if group is None or comm.group is None:
        return 0
    dist = _distributed()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return SHARE_NONE
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"load_options: share_with={group!r}: expected a process group of torch.distributed"
        )
    ranks = dist.get_process_group_ranks(group)
    outside = [g for g in ranks if g not in comm.ranks]
    if outside:
        raise ValueError(
            f"load_options: share_with has rank {outside[0]}, which does not take part in the load"
        )
    here = [comm.ranks[g] for g in ranks]
    return 1 + min(here) if comm.rank in here else SHARE_NONE


def _closed():
    return CkptError("cancelled", "the Comm was closed while the load was running")


def _warn_of_detour(why):
    warnings.warn(f"{why}: the load goes through host memory, which is slower", stacklevel=5)


def _stream(device):
    import torch

    return torch.cuda.current_stream(device).cuda_stream


def _distributed():
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    import torch.distributed as dist

    return dist if dist.is_available() else None
