# SPDX-License-Identifier: Apache-2.0
"""What happens to views and loads when a process forks.

Views can be used in the child, because fork() waits until no read holds a lock of the library.
Loads, the objects that control them, iterators that read ahead and process groups can't: in a child
each use of them is an error, and closing them gives nothing back, because the parent goes on with
them.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import TYPE_CHECKING

from ._library import CkptError, library

if TYPE_CHECKING:
    from ._view import View

_free = threading.Condition(threading.RLock())  # protects the next three
_reads = 0  # how many are running, each of which may hold a lock of the library
_forks = 0  # how many wait for the reads to end: no other one begins, or they might wait for ever
_mine = threading.local()  # reads: how many of them are this thread's
_loads: list[View] = []  # views that loads are running on
_groups = None  # the process group of the process that this one was forked from


@contextlib.contextmanager
def reading(view):
    """Provide the handle of an open view, which stays valid even if another thread closes the view.

    CkptError "usage" if the view is closed.
    """
    global _reads
    depth = getattr(_mine, "reads", 0)
    with _free:
        if not depth:
            _free.wait_for(lambda: not _forks)
        view.check()
        handle = library().view_hold(view._view)
        _reads += 1
    _mine.reads = depth + 1
    try:
        yield handle
    finally:
        _mine.reads = depth
        with _free:
            _reads -= 1
            _free.notify_all()
        library().view_release(handle)


def taken(view):
    """Take the handle from a view that is being closed; None if it had none."""
    with _free:
        handle, view._view = view._view, None
        return handle


@contextlib.contextmanager
def loading(view):
    """Mark a view as used by a load, whose threads hold locks that a child would wait for."""
    with _free:
        _loads.append(view)
    try:
        yield
    finally:
        with _free:
            _loads.remove(view)


def check_process(process, what):
    """Raise CkptError "usage" if this process was forked from the one that made `what`.

    Call it before any lock of `what` is taken: the thread that held the lock when the process
    forked does not exist here, and can't release it.
    """
    if process != os.getpid():
        raise CkptError(
            "usage",
            f"this {what} belongs to process {process}, from which this one was forked: its "
            "threads and connections are there only. Use it there, or make another one here",
        )


def check_group(group):
    """Raise CkptError "usage" if a process group was made before this process was forked."""
    if group is not None and group is _groups:
        raise CkptError(
            "usage",
            "this process was forked from one with a process group, whose connections are not its "
            "own: call torch.distributed.destroy_process_group() and make another group, or start "
            "processes by spawn",
        )


def _before():
    global _forks
    _free.acquire()
    _forks += 1
    _free.wait_for(lambda: _reads == 0)


def _in_parent():
    global _forks
    _forks -= 1
    _free.notify_all()
    _free.release()


def _in_child():
    global _forks, _groups
    _forks = 0
    for view in _loads:
        view._lost = "this process was forked while a load was running on it"
    _loads.clear()
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        _groups = dist.group.WORLD
    _free.release()


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
