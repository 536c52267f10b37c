# SPDX-License-Identifier: Apache-2.0
"""What survives fork(): views do, as long as the library's locks are free when the process is copied. Loads, the objects that control them, iterators
that read ahead and process groups do not: in a child each use of them is an error, and closing them gives back nothing, for the parent goes on with them.
"""

import contextlib
import os
import sys
import threading

from ._library import CkptError, library

_free = threading.Condition(threading.RLock())  # no lock of the library's is held by a read of ours
_reads = 0
_loads = []  # views that loads are running on
_groups = None  # the process group of the process that this one was forked from


@contextlib.contextmanager
def reading(view):
    """The handle of an open view, which stays good meanwhile whoever closes the view. CkptError: it is closed."""
    global _reads
    with _free:
        view.check()
        handle = library().view_hold(view._view)
        _reads += 1
    try:
        yield handle
    finally:
        with _free:
            _reads -= 1
            _free.notify_all()
        library().view_release(handle)


def taken(view):
    """The handle of a view that is being closed, which has none any more; None: it had none."""
    with _free:
        handle, view._view = view._view, None
        return handle


@contextlib.contextmanager
def loading(view):
    """A load runs on a view: its threads hold locks that a child would wait for."""
    with _free:
        _loads.append(view)
    try:
        yield
    finally:
        with _free:
            _loads.remove(view)


def check_process(process, what):
    """CkptError if `what` was made by that process, and this one was forked from it. To be called before any lock of `what` is taken: the thread that held
    the lock at the fork is not here to release it.
    """
    if process != os.getpid():
        raise CkptError(
            "usage",
            f"this {what} belongs to process {process}, from which this one was forked: its threads and connections are there only. "
            "Use it there, or make another one here",
        )


def check_group(group):
    """CkptError if a process group was made by the process that this one was forked from."""
    if group is not None and group is _groups:
        raise CkptError(
            "usage",
            "this process was forked from one with a process group, whose connections are not its own: call "
            "torch.distributed.destroy_process_group() and make another group, or start processes by spawn",
        )


def _before():
    _free.acquire()
    _free.wait_for(lambda: _reads == 0)


def _in_child():
    global _groups
    for view in _loads:
        view._lost = "this process was forked while a load was running on it"
    _loads.clear()
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        _groups = dist.group.WORLD
    _free.release()


os.register_at_fork(before=_before, after_in_parent=_free.release, after_in_child=_in_child)
