# SPDX-License-Identifier: Apache-2.0
"""Connects the ranks of a torch process group for libckptfs_load."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
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
    warn,
)

if TYPE_CHECKING:
    import torch

    from ._load import Load

    Group = Union[torch.distributed.ProcessGroup, torch.distributed.DeviceMesh, "Comm", None]

TIMEOUT_MS = 300 * 1000


def _own_address():
    """Return the address under which others reach this machine: its own on the way to rank 0."""
    to = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(to, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as s:
            s.connect(address)  # sends nothing
            return s.getsockname()[0]
    except OSError:
        return "127.0.0.1"


class Comm:
    """The ranks that load together, and their connections.

    A load that is given a process group makes a Comm for itself. A program that loads often makes
    one Comm, and gives it as process_group= to one load at a time, in the same order on all ranks:

        with ckptfs.Comm() as comm:
            for run in runs:
                ckptfs.load_state_dict(model, run, comm)

    A Comm can be used again after a load that failed. A load to a CUDA device begins after the work
    that is queued on the stream that is current where the load is called (load_async, reload,
    resume and so on). All ranks of the group make the Comm together. close() may be called from any
    thread; everything else by one thread at a time.

    Args:
        group: A torch process group or a DeviceMesh, all of whose ranks load. None is the default
            group, or this process if torch.distributed is not initialised.
        device: The number of the CUDA device that this rank's tensors are on, or None. If every
            rank has one and the library for NCCL is there, loads go straight to device memory;
            otherwise the attribute `device` is None afterwards, and loads go through host memory.
        timeout_ms: How long to wait for another rank, in milliseconds.
        allocator: Where loads get the memory that they need on a CUDA device: "torch" (the caching
            allocator, on its current stream) or "driver" (CUDA's, which torch does not account
            for).
        no_dist: True connects to no other rank: this process loads alone.

    Attributes:
        rank: This process's rank among those that load.
        size: The number of those ranks.
        ranks: {rank in torch's default group: rank here}.
        device: The number of the CUDA device, or None.

    Raises:
        CkptError: "timeout" or "peer" if a rank did not come; later "usage" if the Comm is closed,
            or if this process was forked from the one that made it.
        ValueError: This process is not in the group, or an argument is wrong.
    """

    # A load may run in a thread of its own, while another thread closes the Comm.

    def __init__(
        self,
        group: torch.distributed.ProcessGroup | torch.distributed.DeviceMesh | None = None,
        device: int | None = None,
        timeout_ms: int = TIMEOUT_MS,
        *,
        allocator: Literal["torch", "driver"] = "torch",
        no_dist: bool = False,
        _failure: BaseException | None = None,  # this rank can't load: the others are told
    ):
        failure = _failure
        if allocator not in ("torch", "driver"):
            failure = failure or ValueError(
                f"allocator={allocator!r}: expected 'torch' or 'driver'"
            )
        self._memory = DRIVER if allocator == "driver" else TORCH
        self._comm: c_void_p | None = None
        self.group: torch.distributed.ProcessGroup | None = None
        self.device, self.timeout_ms = device, timeout_ms
        # The ranks of torch's meshes: there are few, but every parameter has one.
        self._meshes: dict[tuple, tuple[list[int], list[int]]] = {}
        self._idle = threading.Condition()  # protects the next three
        self._users: list[int] = []  # threads that load
        self._running: Load | None = None  # the load that close() can cancel
        self._closing = False
        self._process = os.getpid()  # a forked one has none of these threads
        self._loads: weakref.WeakSet[Load] = weakref.WeakSet()  # their memory is this Comm's
        dist = _distributed()
        self.rank, self.size, self.ranks = 0, 1, {0: 0}
        is_alone = alone(group, no_dist) or dist is None
        if not is_alone and (group is not None or dist.is_initialized()):
            self.group = group_of(group) if group is not None else dist.group.WORLD
            if group is not None and dist.get_rank(self.group) < 0:
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
        """Reserve the connections for one more load, in this thread.

        `failure` is an error because of which this rank can't load: the others are told, and it is
        raised.
        """
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
        """Return the error that a rank told before it went, if `error` says that it is gone."""
        try:
            return (error.code == "peer" and self.words.failure()) or error
        except CkptError:  # nor is the store there
            return error

    def add(self, load):
        """Remember a Load, which is freed before this Comm is."""
        self._loads.add(load)

    def runs(self, load):
        """Remember the Load that runs from now on, which close() cancels; None if there is none."""
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
                f"rank {', '.join(without[:8])}{' ...' if len(without) > 8 else ''} loads to no "
                "CUDA device, or can't use NCCL"
            )
            self.device = None
        table = (c_char_p * self.size)(*[address.encode() for address, _ in told])
        comm = c_void_p()
        lib.tcp_connect(tcp, self.rank, self.size, table, self.timeout_ms, byref(comm))
        return comm

    def after_stream(self) -> None:
        """Make the next load wait for what is queued on this thread's stream of the device."""
        if self.device is not None:
            nccl_library().comm_nccl_stream(self._comm, _stream(self.device))

    def share(self, prepare, combine=list):
        """Return combine([prepare() of every rank]), which is the same on all ranks.

        If prepare() fails on one rank, all ranks raise its error.
        """
        try:
            word = prepare()
        except BaseException as e:
            self.words.fail(e)
            raise
        return self.words.share(word, combine)

    def agree(self, failure):
        """Return if every rank goes on; otherwise raise, on the failed rank, its own error."""
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
        """Return a DeviceMesh's sizes, its dimensions in this order, and its ranks in this Comm.

        Raises KeyError for a rank of the mesh that is not in the group.
        """
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
        """Close the connections.

        A load that runs on them in another thread, as one from load_async() does, is cancelled on
        all ranks, and close() waits for its end. In a forked process nothing is closed, because the
        connections are the parent's.

        Raises:
            CkptError: "usage" if a load runs on this Comm in this very thread.
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

    def __repr__(self) -> str:
        where = "host memory" if self.device is None else f"cuda:{self.device}"
        state = f"through {where}" if self._comm else "closed"
        return f"<ckptfs.Comm: rank {self.rank} of {self.size}, {state}>"

    def __enter__(self) -> Comm:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def timeout_of(native):
    """Return how long a load with these options waits for another rank, in milliseconds."""
    return (native.exchange_timeout_ms if native is not None else 0) or TIMEOUT_MS


def alone(group, no_dist):
    """Return whether this process is to load alone; ValueError if a group is given, too."""
    if no_dist and group is not None:
        raise ValueError("no_dist=True: this process loads alone, so give it no process_group")
    return no_dist


def group_of(group):
    """Return the process group of a DeviceMesh; a process group, or None, as it is."""
    meshes = sys.modules.get("torch.distributed.device_mesh")
    if meshes is None or not isinstance(group, meshes.DeviceMesh):
        if group is False:
            raise TypeError("process_group=False: no_dist=True says that this process loads alone")
        return group
    if group.get_coordinate() is None:
        raise ValueError("this process is not in process_group")
    if group.mesh.dim() == 1:
        return group.get_group()
    dist = _distributed()
    if group.size() == dist.get_world_size():
        return dist.group.WORLD
    raise ValueError(
        f"{group}: of a mesh of several dimensions that has not all ranks, give the process group"
    )


@contextlib.contextmanager
def joined(group, device=None, timeout_ms=TIMEOUT_MS, failure=None, no_dist=False):
    """Provide the Comm for one load: one that is made for it, or the caller's, which stays open."""
    if isinstance(group, Comm) and not alone(group, no_dist):
        with group.in_use(timeout_ms, failure):
            yield group
        return
    with Comm(group, device, timeout_ms, no_dist=no_dist, _failure=failure) as comm:
        yield comm


def share_number(comm, group):
    """Return the number that stands for a process group in LoadOptions.share.

    Ranks that are given no group share with each other.
    """
    if group is None or comm.group is None:
        return 0
    dist, group = _distributed(), group_of(group)
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
    warn(f"{why}: the load goes through host memory, which is slower")


def _stream(device):
    import torch

    return torch.cuda.current_stream(device).cuda_stream


def _distributed():
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    import torch.distributed as dist

    return dist if dist.is_available() else None
