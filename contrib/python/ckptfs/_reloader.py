# SPDX-License-Identifier: Apache-2.0
"""Fills a model again and again, each time from another step."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ._comm import Comm, alone, kept_comm
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
    from ._load import Load
    from ._view import Path


class Reloader(Watch):
    """Fills a model or state dict again and again with the same tensors of other steps.

    An inference engine uses it to follow the weights of a trainer:

        with ckptfs.Reloader(model, run) as weights:
            while ...:
                weights.reload(step=n)

    Making it loads once, as load_state_dict does; `result` is what that returned. Later loads match
    no names again, and the ranks do not exchange again what they want. All ranks make the Reloader
    and call its methods together. Only tensors are filled again, not lr, _extra_state and other
    values of raw views. The tensors must stay in the memory where they are.

    Args:
        model_or_state_dict: As for load_state_dict.
        run: As for load_state_dict.
        process_group: As for load_state_dict. A Comm must stay open.
        no_dist: As for load_state_dict.
        **given: Further arguments of load_state_dict, except progress.

    Attributes:
        result: What load_state_dict returned: missing_keys, unexpected_keys, stats.

    Raises:
        CkptError: As load_state_dict; "unsupported" for FSDP1, whose tensors move.
        RuntimeError: As load_state_dict.
        ValueError: As load_state_dict.
    """

    def __init__(
        self,
        model_or_state_dict: torch.nn.Module
        | Mapping[str, Any]
        | Sequence[torch.nn.Module | Mapping[str, Any]],
        run: Path | View,
        process_group: Group = None,
        *,
        no_dist: bool = False,
        **given: Any,
    ):
        if "progress" in given:
            raise ValueError("progress=: a Reloader does not show it")
        if given.get("optimizer") is not None:
            raise ValueError("optimizer=: a Reloader fills weights alone; use load_state_dict")
        self._target, self._process = model_or_state_dict, os.getpid()
        self._load: Load | None = None
        self._own: Comm | None = None  # the process group's, which the Reloader holds
        self._changed = threading.Condition()  # protects the next two, and _load
        self._closing = False
        self._runs: int | None = None  # the thread that is in reload(): close() waits for it
        self._places: dict[str, list[int]] = {}  # where the tensors must stay
        self._comm = (
            self._checked(process_group)
            if isinstance(process_group, Comm) and not alone(process_group, no_dist)
            else self._joined(process_group, no_dist)
        )
        try:
            self.result = load_state_dict(
                model_or_state_dict, run, self._comm, progress=self, **given
            )
            self._places = _places(parts_of(model_or_state_dict))
        except BaseException:
            self.close()
            raise

    def reload(
        self,
        run: Path | None = None,
        *,
        step: str | int | None = None,
        changed_only: bool = False,
    ) -> dict[str, Any]:
        """Fill the same tensors from another step. All ranks call it together.

        After an error another step may be loaded. If the error came while data was being loaded,
        the tensors are filled in part until then.

        Args:
            run: A run; None is the run as before.
            step: The step's name or number; None is the latest one that rank 0 sees.
            changed_only: Leave alone the tensors that the step has unchanged, as far as that is
                known without reading them: those that none of its changes (slime, SkyRL) since the
                step before touches. You vouch that nothing else has written to the tensors since.
                Everything is loaded, with a warning, where nothing is known: of other formats,
                after a whole version or an error. All ranks say the same.

        Returns:
            The statistics of all ranks together; sizes in bytes, times in seconds. "skipped_bytes"
            and "skipped_tensors" are what changed_only has left alone.

        Raises:
            CkptError: "conflict" if the step has other tensors, shapes or dtypes, and nothing was
                changed; "usage" if a tensor was moved, or the Reloader is closed or in use.
        """
        with self._running():
            return self._reload(run, step, changed_only)

    def _reload(self, run, step, changed_only):
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
                told=old._told,
            )
            try:
                with loading(view):
                    stats = self._load.rerun(view, None, changed_only)
            finally:
                view.close()
        for part in parts_of(self._target):
            part.finish(self.result)
        if changed_only and not stats["skipped_tensors"] and comm.rank == 0:
            logging.getLogger("ckptfs").warning(
                "step '%s' was loaded as a whole: nothing of it was known to be as before",
                view._step,
            )
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
        """Give back memory and connections.

        A reload() that runs in another thread is cancelled on all ranks, and close() waits for its
        end. In a forked process nothing is given back, because it is the parent's.

        Raises:
            CkptError: "usage" if reload() runs in this very thread.
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
            if self._runs is not None and self._load is not None:
                self._load.cancel()
            self._changed.wait_for(lambda: self._runs is None)
            if self._load is not None:
                self._load.kept = False
                self._load.close()
            if self._own is not None:
                self._own.unhold()
            self._load = self._own = None

    def __repr__(self) -> str:
        if self._load is None:
            return "<ckptfs.Reloader: closed>"
        view, n = self._load.view, sum(map(len, self._places.values()))
        return f"<ckptfs.Reloader: {n} tensors of '{view._run}', step '{view._step}'>"

    def __enter__(self) -> Reloader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def started(self, load):
        """Keep the Load for later."""
        load.kept = True
        self._load = load

    def _parts(self):
        """Return the parts of what is to be filled, all of whose tensors stay where they are."""
        parts = parts_of(self._target)
        if any(isinstance(part, Fsdp1) for part in parts):
            raise CkptError(
                "unsupported",
                "a Reloader does not fill FullyShardedDataParallel (FSDP1), whose tensors move; it "
                "does fill fully_shard (FSDP2)",
            )
        return parts

    def _checked(self, comm):
        """Return the caller's Comm, if a Reloader can fill what it was given, on all ranks."""
        with comm.in_use(comm.timeout_ms):
            comm.share(lambda: bool(self._parts()))
        return comm

    def _joined(self, group, no_dist):
        """Return the process group's Comm."""
        device = failure = None
        try:
            device = device_of(self._parts())
        except Exception as e:  # the other ranks are told
            failure = e
        self._own, _ = kept_comm(group, device, failure=failure, no_dist=no_dist)
        return self._own

    def _check(self):
        """Check that all tensors are where they were."""
        for name, place in _places(parts_of(self._target)).items():
            if self._places.get(name) != place:
                raise CkptError(
                    "usage",
                    f"'{name}' is not in the memory where it was when the Reloader was made: make "
                    "another one",
                )


def _places(parts):
    """Return {name: addresses of its local tensors}."""
    return {
        entry.name: [t.data_ptr() for t in local_tensors(entry.tensor)]
        for part in parts
        for entry in part.entries
    }
