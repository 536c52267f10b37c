# SPDX-License-Identifier: Apache-2.0
"""A model that is filled again and again, each time from another step."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any, Mapping, Sequence

from ._comm import TIMEOUT_MS, Comm
from ._fork import check_process, loading
from ._library import CkptError
from ._load import Watch
from ._state_dict import load_state_dict
from ._targets import Fsdp1, device_of, parts_of
from ._tensors import local_tensors
from ._view import View

if TYPE_CHECKING:
    import torch

    from ._comm import Group
    from ._view import Path


class Reloader(Watch):
    """A model or state dict that is filled again and again with the same tensors of other steps, as where the weights of an inference engine follow
    those of a trainer. It is filled once when it is made, as by load_state_dict(model_or_state_dict, run, process_group, **given), whose result is
    `result`. Later loads match no names, and the ranks do not tell each other again what they want:

        with ckptfs.Reloader(model, run) as weights:
            while ...:
                weights.reload(step=n)

    All ranks make it and call its methods together. process_group may be a Comm, which must stay open; else the connections are the Reloader's own.
    Only tensors are filled again: not lr, _extra_state and the like of raw views. They must stay in the memory where they are.
    Errors: those of load_state_dict.
    """

    def __init__(
        self,
        model_or_state_dict: torch.nn.Module
        | Mapping[str, Any]
        | Sequence[torch.nn.Module | Mapping[str, Any]],
        run: Path | View,
        process_group: Group = None,
        **given: Any,
    ):
        if "progress" in given:
            raise ValueError("progress=: a Reloader does not show it")
        self._target, self._load, self._own = model_or_state_dict, None, None
        self._closing, self._process = False, os.getpid()
        self._changed, self._runs = (
            threading.Condition(),
            None,
        )  # the thread that is in reload(): close() waits for it
        self._comm = (
            self._checked(process_group)
            if isinstance(process_group, Comm)
            else self._joined(process_group)
        )
        try:
            self.result = load_state_dict(
                model_or_state_dict, run, self._comm, progress=self, **given
            )
            self._places = _places(parts_of(model_or_state_dict))
        except BaseException:
            self.close()
            raise

    def reload(self, run: Path | None = None, *, step: str | int | None = None) -> dict[str, Any]:
        """Fill the same tensors from `step` (None: the latest, rank 0's) of `run` (None: the run as before). Returns the statistics of all ranks.
        CkptError: "conflict": the step has other tensors, shapes or dtypes, and nothing was changed; "usage": a tensor was moved. After an error another
        step may be loaded; if it came while data was being loaded, the tensors are filled in part until then.
        """
        with self._running():
            return self._reload(run, step)

    def _reload(self, run, step):
        comm, old = self._comm, self._load.view
        with comm.in_use(comm.timeout_ms):
            comm.share(self._check)
            view = View(
                old._run if run is None else run,
                old._framework,
                old._device,
                step,
                options=old._options,
                comm=comm,
            )
            try:
                with loading(view):
                    stats = self._load.rerun(view, None)
            finally:
                view.close()
        for part in parts_of(self._target):
            part.finish(self.result)
        return stats

    @contextlib.contextmanager
    def _running(self):
        check_process(self._process, "Reloader")
        with self._changed:
            if self._load is None or self._closing:
                raise CkptError("usage", "this Reloader is closed")
            if self._runs is not None:
                raise CkptError("usage", "this Reloader is in reload() in another thread")
            self._runs = threading.get_ident()
        try:
            yield
        finally:
            with self._changed:
                self._runs = None
                self._changed.notify_all()

    def close(self) -> None:
        """Give back memory and connections. A reload() that runs in another thread is cancelled on all ranks, and its end waited for.
        In a forked process nothing is given back: it is the parent's.
        """
        if self._process != os.getpid():
            self._load = self._own = None
            return
        with self._changed:
            if self._runs == threading.get_ident():
                raise CkptError(
                    "usage", "reload() runs in this very thread: close the Reloader when it is over"
                )
            self._closing = True
            if self._runs is not None:
                self._load.cancel()
            self._changed.wait_for(lambda: self._runs is None)
            if self._load is not None:
                self._load.kept = False
                self._load.close()
            if self._own is not None:
                self._own.close()
            self._load = self._own = None

    def __enter__(self) -> Reloader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def started(self, load):
        load.kept = True
        self._load = load

    def _parts(self):
        """The parts of what is to be filled, all of whose tensors stay where they are."""
        parts = parts_of(self._target)
        if any(isinstance(part, Fsdp1) for part in parts):
            raise CkptError(
                "unsupported",
                "a Reloader does not fill FullyShardedDataParallel (FSDP1), whose tensors move; fully_shard (FSDP2) it does",
            )
        return parts

    def _checked(self, comm):
        """The caller's Comm, if a Reloader can fill what it got, on all ranks."""
        with comm.in_use(comm.timeout_ms):
            comm.share(lambda: bool(self._parts()))
        return comm

    def _joined(self, group):
        device = failure = None
        try:
            device = device_of(self._parts())
        except Exception as e:  # the other ranks must hear of it
            failure = e
        self._own = Comm(group, device, TIMEOUT_MS, failure)
        return self._own

    def _check(self):
        """Are all tensors where they were?"""
        for name, place in _places(parts_of(self._target)).items():
            if self._places.get(name) != place:
                raise CkptError(
                    "usage",
                    f"'{name}' is not in the memory where it was when the Reloader was made: make another one",
                )


def _places(parts):
    """{name: addresses of its local tensors}"""
    return {
        entry.name: [t.data_ptr() for t in local_tensors(entry.tensor)]
        for part in parts
        for entry in part.entries
    }
