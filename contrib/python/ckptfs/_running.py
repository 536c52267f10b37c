# SPDX-License-Identifier: Apache-2.0
"""A load that runs beside its caller."""

from __future__ import annotations

import os
import queue
import threading
import time
from typing import TYPE_CHECKING, Any, Iterator, Mapping, Sequence

from ._fork import check_process
from ._library import library
from ._load import TICK_MS, Watch
from ._state_dict import load_state_dict
from ._tensors import is_sharded_tensor, like

if TYPE_CHECKING:
    import torch

    from ._comm import Group
    from ._view import Path, View


class Running(Watch):
    """A load_state_dict() in a thread of its own, from load_async(). All of it may be called from any thread of this
    process; in one that was forked from it each call is a CkptError "usage".
    """

    def __init__(self, target: Any, run: Path | View, process_group: Group, given: dict[str, Any]):
        self._process = os.getpid()
        self._lock, self._over, self._news = (
            threading.Lock(),
            threading.Event(),
            queue.SimpleQueue(),
        )
        self._changed = threading.Condition(self._lock)  # the three that follow
        self._load, self._ended, self._pausing = (
            None,
            False,
            0,
        )  # pausing: threads that wait in pause()
        self._cancelled, self._shown = False, (0, 0)
        self._result = self._failure = None
        self._left = {}  # {entry: wants that have not arrived}
        self._late = []  # entries that are copied to their places at the end
        surroundings = _surroundings()
        self._thread = threading.Thread(
            target=self._run,
            args=(surroundings, target, run, process_group, given),
            name="ckptfs-load",
        )
        self._thread.start()

    # ---- the caller's side ----

    @property
    def progress(self) -> tuple[int, int]:
        """(tensors of this rank that have arrived, all); (0, 0) before the ranks have agreed on what to load."""
        self._check()
        return self._shown

    def done(self) -> bool:
        """Is it over, well or not?"""
        self._check()
        return self._over.is_set()

    def wait(self, timeout: float | None = None) -> torch.nn.modules.module._IncompatibleKeys:
        """What load_state_dict returns; raises what it raises. TimeoutError: it is not over after `timeout` seconds, and goes on."""
        self._check()
        if not self._over.wait(timeout):
            raise TimeoutError(
                f"the load is not over after {timeout} s: {self._shown[0]} of {self._shown[1]} tensors have arrived"
            )
        if self._failure is not None:
            raise self._failure
        return self._result

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) pairs as they arrive, each once; one iterator. The tensor is filled where it will stay: this rank's part of the model's own,
        or, for what was on the meta device, the one that the model gets at the end. Those that are cast or copied on the way come at the end. Raises
        what the load raises: until the last pair has come, it can fail.
        """
        self._check()
        return self._arriving()

    def _arriving(self):
        while (pair := self._next()) is not None:
            yield pair
        self._news.put(None)  # for the next one who asks
        if self._failure is not None:
            raise self._failure

    def cancel(self) -> None:
        """Stop it: wait() raises CkptError "cancelled" on every rank, and tensors that had memory may be filled in part. It takes effect when the
        ranks have agreed on what to load; a load that is over stays as it is.
        """
        self._check()
        with self._lock:
            self._cancelled = True
            if self._load is not None:
                self._load.cancel()

    def pause(self, timeout: float | None = None) -> None:
        """On all ranks: stop exchanging data, all after the same piece of work, and return once that is so, or once the load is over. Until resume(), the
        program may use its network, and NCCL on its devices. Each rank goes on reading what it alone needs. The ranks call pause() and resume() equally
        often, each within the load's exchange_timeout_ms of the others. Raises what the load raises. TimeoutError: not after `timeout` seconds; call it
        again before anything else.
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
        """On all ranks: go on after pause(); on devices, after what is queued now on the stream that is current here."""
        self._check()
        with self._lock:
            if self._load is not None:
                self._load.resume()

    def _next(self):
        self._check()
        return self._news.get()

    def _check(self):
        check_process(self._process, "Running")

    # ---- the load's side ----

    def _run(self, surroundings, target, run, process_group, given):
        try:
            with surroundings():
                self._result = load_state_dict(target, run, process_group, progress=self, **given)
            for entry in self._late:
                self._news.put((entry.name, entry.tensor))
        except BaseException as e:
            self._failure = e
        self._news.put(None)
        self._over.set()
        self.stopped()

    def __call__(self, done, of):
        self._shown = (done, of)

    def started(self, load):
        for entry, _ in load.wants:  # of a Copy the other name is told
            self._left[entry] = self._left.get(entry, 0) + 1
        with self._changed:
            self._load = load
            if self._cancelled:
                self._load.cancel()
            self._changed.notify_all()

    def stopped(self):
        with self._changed:
            self._load, self._ended = None, True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._pausing)  # in a call on what is freed next

    def arrived(self, entry, tensor):
        self._left[entry] -= 1
        if entry.of is not None:
            return
        if tensor is None:
            self._late += [] if entry in self._late else [entry]
        elif not self._left[entry] and entry not in self._late:
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
) -> Running:
    """load_state_dict(model_or_state_dict, run, process_group, **given) beside the caller: returns at once, with a Running.

        load = ckptfs.load_async(model, run)
        for name, tensor in load.tensors():     # as they arrive; or: load.progress, load.done(), load.cancel()
            ...
        result = load.wait()

    A program that uses NCCL meanwhile, for a training step, does so between load.pause() and load.resume(), on all ranks.

    All arguments are load_state_dict's, but for progress=, which the Running has. Models and state dicts are not to be touched before wait() returns,
    and until then no other load runs on the same process group or Comm. Python ends only when the load has ended: cancel() it first.
    """
    if "progress" in given:
        raise ValueError("progress=: load_async() gives a Running, which has progress")
    return Running(model_or_state_dict, run, process_group, given)


def _surroundings():
    """What torch keeps for each thread: a function that makes it the same in another one."""
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
