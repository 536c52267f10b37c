# SPDX-License-Identifier: Apache-2.0
"""Prepares a few items of an iteration ahead of their use."""

import collections
import concurrent.futures
import os

from ._fork import check_process


def ahead(make, of, n):
    """Yield make(x) for each x of `of`, in order, while up to n later results are being made.

    An error is raised when its item's turn comes. CkptError "usage" if this process was forked
    since the iteration began.
    """
    if n <= 0:
        for x in of:
            yield make(x)
        return
    pool, process = concurrent.futures.ThreadPoolExecutor(n, "ckptfs-ahead"), os.getpid()
    waiting, rest = collections.deque(), iter(of)
    try:
        for x in rest:
            waiting.append(pool.submit(make, x))
            if len(waiting) > n:
                yield waiting.popleft().result()
                check_process(process, "iterator")
        while waiting:
            yield waiting.popleft().result()
            check_process(process, "iterator")
    finally:
        # A forked child has none of the pool's threads, and the pool's locks may be held for ever.
        if process == os.getpid():
            for future in waiting:
                future.cancel()
            pool.shutdown()
