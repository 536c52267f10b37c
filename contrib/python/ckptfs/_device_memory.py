# SPDX-License-Identifier: Apache-2.0
"""Device memory of loads from torch's caching allocator: what torch has kept serves a load, and what the load gives back serves torch."""

import warnings

from ._library import ALLOC, DEALLOC


@ALLOC
def _alloc(device, size, stream):
    try:
        import torch

        return torch.cuda.caching_allocator_alloc(size, device or 0, stream or 0)
    except Exception as e:  # the load fails with an error of its own, which has no room for torch's
        warnings.warn(f"torch's caching allocator: {e}", stacklevel=2)
        return None


@DEALLOC
def _dealloc(_, memory):
    import torch

    torch.cuda.caching_allocator_delete(memory)


TORCH = (
    _alloc,
    _dealloc,
)  # they live as long as the process: a read that hangs gives its memory back late
DRIVER = ALLOC(), DEALLOC()
