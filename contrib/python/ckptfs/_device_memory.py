# SPDX-License-Identifier: Apache-2.0
"""Where loads get memory on a CUDA device: a pair of functions for libckptfs_load_nccl."""

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


# They live as long as the process, because a read that hangs gives its memory back late.
TORCH = _alloc, _dealloc
DRIVER = ALLOC(), DEALLOC()
