# SPDX-License-Identifier: Apache-2.0
"""Doing a few things ahead of who iterates over them."""

import collections
import concurrent.futures
import os

from ._fork import check_process


def ahead(make, of, n):
    """make(x) for each x, in order; up to n of them are being made while the caller has another. Errors come in their turn.
    CkptError "usage": this process was forked since the first x was asked for.
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
        if (
            process == os.getpid()
        ):  # else the pool's threads are not here, and its locks may be theirs
            for future in waiting:
                future.cancel()
            pool.shutdown()
