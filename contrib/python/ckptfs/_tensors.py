# SPDX-License-Identifier: Apache-2.0
"""Torch's tensors, DTensors and ShardedTensors: what a rank holds of them, and where it lies."""

import sys

from ._library import CkptError
from ._view import TORCH

REPLICATE, SHARD = 0, 1
SAFETENSORS = {v: k for k, v in TORCH.items()}


def is_dtensor(t):
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


def is_sharded_tensor(t):
    module = sys.modules.get("torch.distributed._shard.sharded_tensor")
    return module is not None and isinstance(t, module.ShardedTensor)


def local_tensors(t):
    """What this rank holds of it."""
    if is_dtensor(t):
        return [t._local_tensor]
    return [shard.tensor for shard in t.local_shards()] if is_sharded_tensor(t) else [t]


def is_meta(t):
    """Does it have no memory?"""
    return any(local.is_meta for local in local_tensors(t))


def home():
    """The device of plain tensors that get memory: the default one."""
    import torch

    device = torch.get_default_device()
    return torch.device("cpu") if device.type == "meta" else device


def home_of(t):
    """Where a tensor is, or shall be if it is on the meta device: DTensors where their mesh is."""
    import torch

    local = local_tensors(t)
    if local and not local[0].is_meta:
        return local[0].device
    return torch.device(t.device_mesh.device_type) if is_dtensor(t) else home()


def places(dtensor):
    """(an order of its mesh's dimensions, [(kind, dimension of the tensor)] for each of them in that order): the first that divides a dimension of the
    tensor is the outermost. Torch divides in the order of the mesh, but a _StridedShard as if split_factor parts were there already: those that
    later dimensions of the mesh make. So it belongs behind as many of them as make so many parts; if there are none, a rank's part is no box.
    """
    sizes, kinds, orders = dtensor.device_mesh.shape, {}, {}
    for m, p in reversed([*enumerate(dtensor.placements)]):
        dim = getattr(p, "dim", 0)
        dim += dtensor.dim() if dim < 0 else 0
        is_shard = p.is_shard() or hasattr(
            p, "split_factor"
        )  # a _StridedShard is none in some versions of torch
        if p.is_replicate() or (is_shard and sizes[m] == 1):
            kinds[m] = REPLICATE, 0
            continue
        order, parts, at = orders.setdefault(dim, []), 1, 0
        factor = getattr(p, "split_factor", 1)
        while parts < factor and at < len(order):
            parts, at = parts * sizes[order[at]], at + 1
        if parts != factor or not is_shard:
            raise CkptError(
                "unsupported",
                f"a parameter with the placements {tuple(dtensor.placements)} on a mesh of {tuple(sizes)} can't be loaded"
                f"{'' if parts == factor else f': of dimension {dim}, {p} takes rows that do not lie together'}",
            )
        order.insert(at, m)
        kinds[m] = SHARD, dim
    order = sorted(kinds)
    if any(o != sorted(o) for o in orders.values()):
        order = sum(orders.values(), []) + [m for m in order if kinds[m][0] == REPLICATE]
    return order, [kinds[m] for m in order]


def is_strided(t):
    """Has a local tensor elements in memory of its own, as sparse ones and wrappers of other tensors have not?"""
    import torch

    try:
        return t.layout is torch.strided and (t.is_meta or t.data_ptr() is not None)
    except RuntimeError:  # torch's, for what has no storage
        return False


def memory(t):
    """What tensors have in common that share their memory (tied weights), also on the meta device; None: it has none."""
    t = local_tensors(t)
    t = t[0] if len(t) == 1 else None
    if t is None or not t.numel() or not is_strided(t):
        return None
    at = (t.untyped_storage()._cdata, t.storage_offset()) if t.is_meta else t.data_ptr()
    return (t.device, at, t.shape, t.stride())


def loses(stored, dtype):
    """Has a cast of what is stored (safetensors' word) to this torch.dtype no place for fractions or imaginary parts?"""
    return not dtype.is_complex and stored.startswith(
        "C" if dtype.is_floating_point else ("F", "BF", "C")
    )


def same_bits(a, b):
    """Two plain tensors of one shape and dtype."""
    import torch

    a, b = (t.detach().contiguous().view(-1).view(torch.uint8) for t in (a, b))
    return bool(torch.equal(a, b))


def like(t, local):
    """The DTensor t with other memory."""
    if not is_dtensor(t):
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, t.device_mesh, t.placements, run_check=False, shape=t.shape, stride=t.stride()
    )


def written(t):
    """Tell autograd that somebody else has written a tensor's memory: its version goes up."""
    if not t.is_inference():
        t.detach().as_strided((0,), (1,)).zero_()
