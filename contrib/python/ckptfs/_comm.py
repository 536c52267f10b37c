# SPDX-License-Identifier: Apache-2.0
"""Connects the ranks of a torch process group for libckptfs_load."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import weakref
from ctypes import byref, c_void_p
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, Union

from ._device_memory import DRIVER, TORCH
from ._exchange import Alone, exchange_of
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
MOST_NAMED = 8  # ranks in a message
IDLE_S = 60  # how long the memory of a load is kept for the next one

_open: weakref.WeakSet[Comm] = weakref.WeakSet()  # for release()
_said: set[str] = set()  # why loads to a CUDA device go through host memory


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

    A load that is given a process group uses one Comm for each group and device, which the package
    makes once, and closes when the process group ends. A program that wants to say itself how long
    connections are kept makes a Comm, and gives it as process_group= to one load at a time, in the
    same order on all ranks:

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
        device: The CUDA device that this rank's tensors are on: its number, or a torch.device, or
            what makes one. None is the current one if the group uses NCCL for CUDA ("nccl" and
            "cpu:gloo,cuda:nccl", for example), else host memory, as "cpu" is. If every rank has a
            device and the library for NCCL is there, loads go straight to device memory; otherwise
            the attribute `device` is None afterwards, and loads go through host memory.
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
        device: torch.device | str | int | None = None,
        timeout_ms: int = TIMEOUT_MS,
        *,
        allocator: Literal["torch", "driver"] = "torch",
        no_dist: bool = False,
        _kept: tuple[int, Any] | None = None,  # its number, and the exchange that found the device
    ):
        failure: Exception | None = None
        if allocator not in ("torch", "driver"):
            failure = ValueError(f"allocator={allocator!r}: expected 'torch' or 'driver'")
        self._memory = DRIVER if allocator == "driver" else TORCH
        self._comm: c_void_p | None = None
        self.device: int | None = None
        self.timeout_ms = timeout_ms
        self._said_host = False  # that CUDA tensors are loaded through host memory
        # The ranks of torch's meshes: there are few, but every parameter has one.
        self._meshes: dict[tuple, tuple[list[int], list[int]]] = {}
        self._idle = threading.Condition()  # protects the next six
        self._users: list[int] = []  # threads that load
        self._running: Load | None = None  # the load that close() can cancel
        self._closing = False
        self._holds = 0  # of a Comm that is kept: it is closed when nothing holds it any more
        self._timer: threading.Timer | None = None  # gives memory back when the Comm has been idle
        self._idle_s: float | None = IDLE_S
        self._process = os.getpid()  # a forked one has none of these threads
        self._loads: weakref.WeakSet[Load] = weakref.WeakSet()  # their memory is this Comm's
        dist = _distributed()
        own, self.rank, self.size, self.ranks = members(group, no_dist)
        self.number, words = _kept or (0, None)  # 0: the caller's own
        try:
            self.device = device_number(device, own)
        except (RuntimeError, ValueError) as e:  # the other ranks are told
            failure = failure or e
        # What is kept for the life of a process group must not keep the group alive.
        self._group = weakref.ref(own) if own is not None and self.number else lambda: own
        if self.size > 1:
            check_group(dist.group.WORLD)
        self.words = words or self._words(timeout_ms)
        try:
            if failure is not None:
                raise failure
            if words is None:
                self.device = self._agreed_device()
            self._connect(dist)
        except BaseException as e:
            self.words.fail(e)
            self.close()
            raise
        _open.add(self)

    @property
    def group(self) -> torch.distributed.ProcessGroup | None:
        """The process group; None if this process loads alone, or the group has ended."""
        return self._group()

    def _words(self, timeout_ms):
        return exchange_of(_distributed(), self.group, self.rank, self.size, timeout_ms / 1000)

    def _agreed_device(self):
        device = usable(self.device, self.size)
        if self.size == 1:
            return device
        told = self.words.share([device is not None], _devices)
        return device if _all_have(told, device) else None

    @contextlib.contextmanager
    def in_use(self, timeout_ms, failure=None, idle_s=IDLE_S, words=None):
        """Reserve the connections for one more load, in this thread.

        `failure` is an error because of which this rank can't load: the others are told, and it is
        raised. `words` is an exchange that has begun, if there is one.
        """
        check_process(self._process, "Comm")
        with self._idle:
            if not self._comm or self._closing:
                raise CkptError("usage", "this Comm is closed")
            self._users.append(threading.get_ident())
            self._idle_s = idle_s
            self._stop_timer()
        try:
            self._begin(timeout_ms, failure, words)
            yield self
        except BaseException as e:
            # Who is gone, or left in the middle, may be out of step: the next load connects anew.
            if self.number and (
                not isinstance(e, Exception) or getattr(e, "code", "") in ("peer", "timeout")
            ):
                forget(self)
            if isinstance(e, CkptError):
                raise self._reason(e) from None
            raise
        finally:
            with self._idle:
                self._users.remove(threading.get_ident())
                if self.number and not self._users:  # they would keep the process group alive
                    self.words = Alone()
                    self._meshes = {}
                self._start_timer()
                self._idle.notify_all()

    def _begin(self, timeout_ms, failure, words):
        dist = _distributed()
        if self.size > 1:
            check_group(dist.group.WORLD)
        self.timeout_ms = timeout_ms
        words = words or self._words(timeout_ms)
        with self._idle:
            self.words = words
            failure = failure or (_closed() if self._closing else None)
        if failure is not None:
            words.fail(failure)
            raise failure

    def hold(self) -> Comm:
        """Keep a Comm that the package has made open until unhold()."""
        with self._idle:
            self._holds += 1
        return self

    def unhold(self) -> None:
        """Close the Comm if nothing else holds it."""
        with self._idle:
            self._holds -= 1
            last = self._holds == 0
        if last:
            self.close()

    def is_free(self) -> bool:
        """Return whether a load can use the connections now."""
        with self._idle:
            return bool(self._comm) and not self._closing and not self._users

    def release(self) -> int:
        """Give back pinned memory and communicators that are kept for the next load. Sockets stay.

        Returns:
            The number of bytes; 0 while a load runs.
        """
        if self._process != os.getpid():
            return 0
        with self._idle:
            self._stop_timer()
            return library().comm_release(self._comm) if self._comm and not self._users else 0

    def _start_timer(self):
        if self.device is None or self._users or not self._comm or self._idle_s is None:
            return
        self._timer = threading.Timer(self._idle_s, self.release)
        self._timer.daemon = True
        with contextlib.suppress(RuntimeError):  # Python ends, and so does what is kept
            self._timer.start()

    def _stop_timer(self):
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

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
            own = lib.tcp_address(tcp).decode() if self.rank == 0 else ""
            root = self.words.share(own, itemgetter(0))
        except BaseException:
            lib.tcp_free(tcp)
            raise
        comm = c_void_p()
        lib.tcp_connect(tcp, self.rank, self.size, root.encode(), self.timeout_ms, byref(comm))
        return comm

    def check_place(self, device: torch.device) -> None:
        """Warn once if a tensor is on a CUDA device while loads go through host memory."""
        if device.type != "cuda" or self.device is not None or self._said_host:
            return
        self._said_host = True
        if not self.number:
            _warn_of_detour(
                f"there are tensors on {device}, but this Comm has no CUDA device "
                "(Comm(device=...) gives it one)"
            )
        elif not _said:
            _warn_of_detour("the tensors of this rank are on several CUDA devices")

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
            self._stop_timer()
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


def members(group, no_dist):
    """Return who loads: the process group or None, this rank, how many there are, and {rank: here}.

    The last is {rank in torch's default group: rank among those that load}.
    """
    dist = _distributed()
    if alone(group, no_dist) or dist is None or (group is None and not dist.is_initialized()):
        return None, 0, 1, {0: 0}
    own = group_of(group) if group is not None else dist.group.WORLD
    if group is not None and dist.get_rank(own) < 0:
        raise ValueError("this process is not in process_group")
    ranks = {g: i for i, g in enumerate(dist.get_process_group_ranks(own))}
    return own, dist.get_rank(own), dist.get_world_size(own), ranks


# ---- the Comms that are kept as long as their process groups ----


class _Kept:
    """The Comms of one process group, by their devices.

    Attributes:
        comms: {number of the device, or None for host memory: Comm}.
        last: The number of the last Comm that this rank has taken part in. All ranks give a Comm
            the same number, so that they find out which ones all of them still have.
    """

    def __init__(self):
        self.comms: dict[int | None, Comm] = {}
        self.last = 0

    def number(self, device):
        """Return the number of the Comm that could be used now, or 0."""
        comm = self.comms.get(device)
        return comm.number if comm is not None and comm.is_free() else 0

    def add(self, device, comm):
        """Keep a Comm in place of the one that there was."""
        old, self.comms[device] = self.comms.get(device), comm.hold()
        if old is not None:
            old.unhold()

    def close(self):
        """Close all: the process group has ended, or the process ends."""
        for comm in self.comms.values():
            comm.close()
        self.comms = {}


class _Alone:
    """Stands for the process group of a process that loads alone."""


_alone = _Alone()
_lock = threading.Lock()  # protects the next one
_kept: weakref.WeakKeyDictionary[Any, _Kept] = weakref.WeakKeyDictionary()


def _kept_of(group):
    key = _alone if group is None else group
    with _lock:
        found = _kept.get(key)
        if found is None:
            found = _kept[key] = _Kept()
            weakref.finalize(key, found.close)  # it runs at exit, too
        return found


def forget(comm):
    """Do not use a kept Comm for further loads. It is closed when nothing holds it any more."""
    with _lock:
        found = [
            (kept, device)
            for kept in _kept.values()
            for device, other in kept.comms.items()
            if other is comm
        ]
        for kept, device in found:
            del kept.comms[device]
    for _ in found:
        comm.unhold()


def _in_child():
    global _lock
    _lock = threading.Lock()
    _kept.clear()  # what it had is the parent's
    _open.clear()


os.register_at_fork(after_in_child=_in_child)


def release() -> int:
    """Give back what this process keeps for its next loads to CUDA devices. Sockets stay.

    It is pinned memory (`kept_bytes` in their statistics) and NCCL's communicators, which are given
    back by themselves when nothing has been loaded for load_options["idle_s"] seconds. Memory that
    loads have got from torch's caching allocator is torch's again at their end:
    torch.cuda.empty_cache() frees that. A Reloader between two steps holds none. Each rank calls it
    when it likes.

    Returns:
        The number of pinned bytes.
    """
    return sum(comm.release() for comm in list(_open))


def kept_comm(group, device, timeout_ms=TIMEOUT_MS, failure=None, no_dist=False):
    """Return the Comm of a process group and a device, held, and the exchange that found it.

    It is made where this rank, or another, has none. All ranks call it together; `failure` is an
    error because of which this rank can't load.
    """
    own, rank, size, _ = members(group, no_dist)
    kept = _kept_of(own)
    if size == 1:
        if failure is not None:
            raise failure
        return _kept_alone(kept, own, usable(device, 1), timeout_ms), None
    check_group(_distributed().group.WORLD)
    words = exchange_of(_distributed(), own, rank, size, timeout_ms / 1000)
    if failure is not None:
        words.fail(failure)
        raise failure
    device = usable(device, size)
    try:
        word = [device is not None, kept.last, kept.number(device), kept.number(None)]
        told = words.share(word, _which)
    except BaseException as e:
        if not words.collective:
            words.fail(e)
        raise
    device = device if _all_have(told, device) else None
    if told["new"]:
        kept.last = told["number"]
        where = "cpu" if device is None else device
        comm = Comm(own, where, timeout_ms, _kept=(kept.last, words))
        kept.add(device, comm)
    return kept.comms[device].hold(), words


def _kept_alone(kept, own, device, timeout_ms):
    """Return the Comm of this process alone, held. Over host memory there is nothing to keep."""
    if device is None or (device in kept.comms and not kept.number(device)):  # it is being used
        where = "cpu" if device is None else device
        return Comm(own, where, timeout_ms, no_dist=own is None).hold()
    if device not in kept.comms:
        kept.last += 1
        number = (kept.last, Alone())
        made = Comm(own, device, timeout_ms, no_dist=own is None, _kept=number)
        kept.add(device, made)
    return kept.comms[device].hold()


def _devices(words):
    """Return whether all ranks have a device, and the first of those that have none."""
    without = [rank for rank, (has, *_) in enumerate(words) if not has]
    return {"device": not without, "without": without[: MOST_NAMED + 1]}


def _which(words):
    """Return which Comm all ranks use: whether a new one, its number, and as _devices()."""
    found = _devices(words)
    numbers = {word[2 if found["device"] else 3] for word in words}
    return dict(
        found,
        new=len(numbers) > 1 or 0 in numbers,
        number=1 + max(word[1] for word in words),
    )


def _all_have(told, device):
    """Return whether all ranks have a device; a rank that has one is told which have none."""
    if device is not None and not told["device"]:
        shown = ", ".join(map(str, told["without"][:MOST_NAMED]))
        more = " ..." if len(told["without"]) > MOST_NAMED else ""
        _warn_of_detour(f"rank {shown}{more} loads to no CUDA device, or can't use NCCL")
    return told["device"]


def device_number(device, group):
    """Return the number of the CUDA device that Comm(group, device) means; None is host memory."""
    if isinstance(device, int):
        return device
    if device is None:
        config = group is not None and _distributed().get_backend_config(group)
        if "cuda:nccl" not in str(config).split(","):
            return None
        import torch

        return torch.cuda.current_device() if torch.cuda.is_available() else None
    import torch

    device = torch.device(device)
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        raise ValueError(f"device={device}: expected a CUDA device, or 'cpu'")
    return torch.cuda.current_device() if device.index is None else device.index


def usable(device, size):
    """Return the number of a CUDA device if so many ranks can load to theirs, else None."""
    if device is None:
        return None
    if nccl_library() is None:
        _warn_of_detour(f"CUDA and NCCL can't be used ({nccl_problem()})")
        return None
    if size > 1 and os.environ.get("CKPTFS_SECRET"):
        _warn_of_detour("CKPTFS_SECRET authenticates TCP only, not NCCL")
        return None
    return device


@contextlib.contextmanager
def joined(
    group, device=None, timeout_ms=TIMEOUT_MS, failure=None, no_dist=False, idle_s: Any = IDLE_S
):
    """Provide the Comm for one load: the process group's, or the one that the caller gives."""
    if isinstance(group, Comm) and not alone(group, no_dist):
        with group.in_use(timeout_ms, failure, idle_s):
            yield group
        return
    comm, words = kept_comm(group, device, timeout_ms, failure, no_dist)
    try:
        with comm.in_use(timeout_ms, None, idle_s, words):
            yield comm
    finally:
        comm.unhold()


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
    """Say once why loads to a CUDA device go through host memory."""
    if why not in _said:
        _said.add(why)
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
