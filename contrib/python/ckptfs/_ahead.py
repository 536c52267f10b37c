# SPDX-License-Identifier: Apache-2.0
"""Doing a few things ahead of who iterates over them."""

import collections
import concurrent.futures


def ahead(make, of, n):
    """make(x) for each x, in order; up to n of them are being made while the caller has another. Errors come in their turn."""
    if n <= 0:
        for x in of:
            yield make(x)
        return
    with concurrent.futures.ThreadPoolExecutor(n, "ckptfs-ahead") as pool:
        waiting, rest = collections.deque(), iter(of)
        try:
            for x in rest:
                waiting.append(pool.submit(make, x))
                if len(waiting) > n:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
