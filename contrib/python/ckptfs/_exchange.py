# SPDX-License-Identifier: Apache-2.0
"""A few bytes from every rank to every rank of a torch process group, through the group's store.

Collectives are not used: gloo and NCCL wait 10 to 30 minutes for a rank that does not come, and do
not react to Ctrl-C meanwhile. Here every wait ends with the caller's deadline, names the absent
ranks, reacts to Ctrl-C, and ends at once if a rank has given up.
"""

import contextlib
import json
import logging
import time

from ._library import CODES, CkptError

SHORT_S, LONG_S = 0.001, 0.1  # between two queries of the store
SAY_S, SAY_AGAIN_S = 10, 30  # when rank 0 first says which ranks it waits for, and how often


def told(error):
    """Return an exception as a message for other ranks."""
    code = getattr(error, "code", "usage")
    return {"code": code if code in CODES else "usage", "text": str(error) or type(error).__name__}


class Exchange:
    """The exchanges of one load.

    All ranks make it and call share() in the same order; a rank that can't go on calls fail().
    """

    collective = False

    def __init__(self, store, rank, size, deadline_s):
        self.store, self.rank, self.size, self.deadline_s = store, rank, size, deadline_s
        self.turn, self.old = 0, None
        # The store counts the loads, so that no state is kept here.
        self.number = self._asked(lambda: store.add(_count(rank), 1))
        self.load = f"ckptfs/{self.number}"

    def share(self, word, combine=list):
        """Return combine([word of rank 0, word of rank 1, ...]), computed by rank 0.

        Words and the result are values that JSON has. Raises the error of a rank that called
        fail(); CkptError "timeout" if a rank did not come, "peer" if the process with the store has
        ended.
        """
        self.turn += 1
        top = f"{self.load}/{self.turn}"
        self._asked(lambda: self.store.set(f"{top}/{self.rank}", json.dumps(word)))
        if self.rank == 0:
            keys = [f"{top}/{r}" for r in range(self.size)]
            self._await(keys)
            result = json.dumps(
                combine([json.loads(self._asked(lambda k=k: self.store.get(k))) for k in keys])
            )
            self._asked(lambda: self.store.set(f"{top}/all", result))
            # All ranks came, so all have read the previous result.
            for key in [*keys, *([self.old] if self.old else [])]:
                self._asked(lambda k=key: self.store.delete_key(k))
            self.old = f"{top}/all"
        else:
            self._await([f"{top}/all"])
            result = self._asked(lambda: self.store.get(f"{top}/all"))
        return json.loads(result)

    def fail(self, error):
        """Tell the other ranks that this one gives up, and why. Never raises.

        An error that another rank has told is not told again.
        """
        if getattr(error, "is_told", False):
            return
        with contextlib.suppress(RuntimeError):  # the store is gone, and so is the job
            self.store.set(f"{self.load}/failed", json.dumps(dict(told(error), rank=self.rank)))

    def failure(self):
        """Return the error that some rank has told, or None."""
        if not self._asked(lambda: self.store.check([f"{self.load}/failed"])):
            return None
        word = json.loads(self._asked(lambda: self.store.get(f"{self.load}/failed")))
        error = CkptError(word["code"], f"rank {word['rank']}: {word['text']}")
        error.is_told = True
        return error

    def _await(self, keys):
        # rank 0 notices first which rank is absent, and tells it: the others wait longer
        patience = self.deadline_s if self.rank == 0 else self.deadline_s * 1.5 + 1
        begin, say, pause = time.monotonic(), SAY_S, SHORT_S
        while not self._asked(lambda: self.store.check(keys)):
            failure = self.failure()
            if failure is not None:
                raise failure
            waited = time.monotonic() - begin
            if self.rank == 0 and waited > say:
                say += SAY_AGAIN_S
                logging.getLogger("ckptfs").warning(
                    "waiting for %s for %.0f s now, to come to this load",
                    self._absent(keys),
                    waited,
                )
            if waited > patience:
                self._count_absent()
                raise CkptError(
                    "timeout",
                    f"{self._absent(keys)} did not come to load within {patience:g} s "
                    "(load_options={'exchange_timeout_ms': ...} is how long to wait)",
                )
            time.sleep(pause)
            pause = min(2 * pause, LONG_S)

    def _count_absent(self):
        """Count this load for the ranks that have not come to it.

        It is over for them, too, so that the next load that they come to is the next one of all
        ranks.
        """
        for rank in range(self.size):
            self._count_to(_count(rank))

    def _count_to(self, key):
        """Raise a rank's count to this load's number, unless the rank comes at this moment."""
        seen = self._asked(lambda: self.store.add(key, 0))
        if seen < self.number:
            self._asked(lambda: self.store.compare_set(key, str(seen), str(self.number)))

    def _absent(self, keys):
        if self.rank != 0:
            return "rank 0, or a rank that it waits for,"
        absent = [str(r) for r, key in enumerate(keys) if not self.store.check([key])]
        shown = ", ".join(absent[:8]) + (" ..." if len(absent) > 8 else "")
        return f"rank{'s' if len(absent) > 1 else ''} {shown}"

    @staticmethod
    def _asked(call):
        try:
            return call()
        except CkptError:
            raise
        except RuntimeError as e:  # torch's DistError and its children
            raise CkptError(
                "peer",
                "the process group's store does not answer, its process has probably ended: "
                f"{str(e).splitlines()[0]}",
            ) from None


def _count(rank):
    """Return the store's key for the number of loads that a rank has come to."""
    return f"ckptfs/loads/{rank}"


class Gather:
    """The same for a group without a store (MPI's), by a collective with its own deadline.

    A rank that fails must still call the collective.
    """

    collective = True

    def __init__(self, dist, group, size):
        self.dist, self.group, self.size = dist, group, size

    def share(self, word, combine=list):
        words = [None] * self.size
        self.dist.all_gather_object(words, word, group=self.group)
        for rank, w in enumerate(words):
            if isinstance(w, dict) and "code" in w:
                raise CkptError(w["code"], f"rank {rank}: {w['text']}")
        return combine(words)

    def fail(self, error):
        self.dist.all_gather_object([None] * self.size, told(error), group=self.group)

    def failure(self):
        return None


class Alone:
    """The same for one rank."""

    collective = False

    def share(self, word, combine=list):
        return combine([word])

    def fail(self, error):
        pass

    def failure(self):
        return None


def exchange_of(dist, group, rank, size, deadline_s):
    """Return the exchange of a group's ranks."""
    if size == 1:
        return Alone()
    store = None
    try:
        store = group.get_group_store()
    except (AttributeError, RuntimeError):
        with contextlib.suppress(AttributeError, KeyError):
            store = dist.distributed_c10d._get_process_group_store(group)
    return Gather(dist, group, size) if store is None else Exchange(store, rank, size, deadline_s)
