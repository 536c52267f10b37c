# SPDX-License-Identifier: Apache-2.0
"""A load that runs in a thread of its own."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ._fork import check_process
from ._library import library
from ._load import TICK_MS, Watch
from ._state_dict import load_state_dict
from ._tensors import is_sharded_tensor, like

if TYPE_CHECKING:
    import torch

    from ._comm import Group
    from ._load import Load
    from ._targets import Entry
    from ._view import Path, View


class LoadHandle(Watch):
    """A load_state_dict() that runs in a thread of its own; load_async() returns it.

    Its methods may be called from any thread of this process. In a process that was forked from it
    each call raises CkptError "usage".
    """

    def __init__(self, target: Any, run: Path | View, process_group: Group, given: dict[str, Any]):
        self._process = os.getpid()
        self._over = threading.Event()
        self._news: queue.SimpleQueue[tuple[str, torch.Tensor] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # protects the next four
        self._load: Load | None = None
        self._ended, self._cancelled = False, False
        self._pausing = 0  # threads that wait in pause()
        self._shown = (0, 0)
        self._result: Any = None
        self._failure: BaseException | None = None
        self._left: dict[Entry, int] = {}  # wants that have not arrived
        context = surroundings()
        self._thread = threading.Thread(
            target=self._run,
            args=(context, target, run, process_group, given),
            name="ckptfs-load",
        )
        self._thread.start()

    # The caller's side.

    @property
    def progress(self) -> tuple[int, int]:
        """How many of this rank's tensors have arrived, and of how many: (arrived, all).

        (0, 0) before the ranks have agreed on what to load.
        """
        self._check()
        return self._shown

    def done(self) -> bool:
        """Return whether the load has ended, well or not."""
        self._check()
        return self._over.is_set()

    def wait(self, timeout: float | None = None) -> torch.nn.modules.module._IncompatibleKeys:
        """Wait for the end of the load.

        Args:
            timeout: How long to wait, in seconds; None waits for ever.

        Returns:
            What load_state_dict returns.

        Raises:
            TimeoutError: The load has not ended in time. It goes on.
            CkptError: What load_state_dict raises, as are its other errors.
        """
        self._check()
        if not self._over.wait(timeout):
            raise TimeoutError(
                f"the load is not over after {timeout} s: {self._shown[0]} of {self._shown[1]} "
                "tensors have arrived"
            )
        if self._failure is not None:
            raise self._failure
        return self._result

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) pairs as they arrive, each of them once.

        The tensor is where it will stay: this rank's part of the model's own tensor or, if that was
        on the meta device, the memory that the model gets at the end. All callers share one
        iterator.

        Yields: The name in the model or state dict, and the tensor, in its destination's shape and
            dtype.

        Raises:
            CkptError: What the load raises. Until the last pair has come, the load can fail.
        """
        self._check()
        return self._arriving()

    def _arriving(self):
        while (pair := self._next()) is not None:
            yield pair
        self._news.put(None)  # for other callers of tensors()
        if self._failure is not None:
            raise self._failure

    def cancel(self) -> None:
        """Stop the load on all ranks.

        wait() raises CkptError "cancelled" on every rank, and tensors that had memory may be filled
        in part. It takes effect when the ranks have agreed on what to load. A load that has ended
        stays as it is.
        """
        self._check()
        with self._lock:
            self._cancelled = True
            if self._load is not None:
                self._load.cancel()

    def pause(self, timeout: float | None = None) -> None:
        """Stop exchanging data, on all ranks after the same piece of work.

        All ranks call pause() and resume() equally often, each within the load's
        exchange_timeout_ms of the others. pause() returns when the exchange has stopped, or the
        load has ended. Until resume() the program may use its network, and NCCL on its devices.
        Each rank goes on reading what it alone needs.

        Args:
            timeout: How long to wait, in seconds; None waits for ever.

        Raises:
            TimeoutError: The exchange has not stopped in time. Call pause() again before anything
                else.
            CkptError: What the load raises.
        """
        self._check()
        until = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            if not self._changed.wait_for(lambda: self._load is not None or self._ended, timeout):
                raise TimeoutError(f"the load has not begun after {timeout} s")
            load = self._load
            self._pausing += load is not None
        try:
            while load is not None and library().load_pause(load.load, TICK_MS) == 1:
                if until is not None and time.monotonic() > until:
                    raise TimeoutError(f"the load is not paused after {timeout} s")
        finally:
            with self._changed:
                self._pausing -= load is not None
                self._changed.notify_all()
        if load is None and self._over.is_set() and self._failure is not None:
            raise self._failure

    def resume(self) -> None:
        """Go on after pause(), on all ranks.

        On a device the load goes on after the work that is queued on the stream that is current
        here.
        """
        self._check()
        with self._lock:
            if self._load is not None:
                self._load.resume()

    def __repr__(self) -> str:
        state = "running"
        if self._over.is_set():
            state = "done" if self._failure is None else f"failed: {self._failure}"
        return f"<ckptfs.LoadHandle: {self._shown[0]} of {self._shown[1]} tensors, {state}>"

    def _next(self):
        self._check()
        return self._news.get()

    def _check(self):
        check_process(self._process, "LoadHandle")

    # The load's side.

    def _run(self, surroundings, target, run, process_group, given):
        try:
            with surroundings():
                self._result = load_state_dict(target, run, process_group, progress=self, **given)
        except BaseException as e:
            self._failure = e
        self._news.put(None)
        self._over.set()
        self.stopped()

    def __call__(self, done, of):
        self._shown = (done, of)

    def started(self, load):
        """Called by the load when it runs."""
        for entry, _ in load.wants:  # of a Copy the other name is told
            self._left[entry] = self._left.get(entry, 0) + 1
        with self._changed:
            self._load = load
            if self._cancelled:
                self._load.cancel()
            self._changed.notify_all()

    def stopped(self):
        """Called by the load when it has ended."""
        with self._changed:
            self._load, self._ended = None, True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._pausing)  # in a call on what is freed next

    def arrived(self, entry, tensor):
        """Called by the load when a part of a tensor has arrived."""
        self._left[entry] -= 1
        if entry.of is None and not self._left[entry]:
            self._news.put(
                (
                    entry.name,
                    entry.tensor if is_sharded_tensor(entry.tensor) else like(entry.tensor, tensor),
                )
            )


def load_async(
    model_or_state_dict: torch.nn.Module
    | Mapping[str, Any]
    | Sequence[torch.nn.Module | Mapping[str, Any]],
    run: Path | View,
    process_group: Group = None,
    **given: Any,
) -> LoadHandle:
    """Do what load_state_dict does in a thread of its own.

        load = ckptfs.load_async(model, run)
        for name, tensor in load.tensors():  # as they arrive
            ...
        result = load.wait()

    A program that uses NCCL meanwhile, for a training step, does so between load.pause() and
    load.resume(), on all ranks. Models and state dicts are not to be used before wait() returns,
    and until then no other load runs on the same process group or Comm. Python does not exit before
    the load has ended: cancel() it first.

    Args:
        model_or_state_dict: As for load_state_dict.
        run: As for load_state_dict.
        process_group: As for load_state_dict.
        **given: Further arguments of load_state_dict, except progress.

    Returns:
        A LoadHandle.

    Raises:
        ValueError: progress= is given. Other errors are raised by LoadHandle.wait().
    """
    if "progress" in given:
        raise ValueError("progress=: load_async() gives a LoadHandle, which has progress")
    return LoadHandle(model_or_state_dict, run, process_group, given)


def surroundings():
    """Return a context manager that gives another thread what torch keeps for this one."""
    import contextlib

    import torch

    device, stream = torch.get_default_device(), None
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        stream = torch.cuda.current_stream()

    @contextlib.contextmanager
    def same():
        with contextlib.ExitStack() as stack:
            if stream is not None:
                stack.enter_context(torch.cuda.stream(stream))
            if device.type != "cpu":
                stack.enter_context(torch.device(device))
            yield

    return same
