# SPDX-License-Identifier: Apache-2.0
"""Torch's tensors, DTensors and ShardedTensors: what a rank has of them, and where that is."""

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
    """Return the tensors with the elements that this rank has."""
    if is_dtensor(t):
        return [t._local_tensor]
    return [shard.tensor for shard in t.local_shards()] if is_sharded_tensor(t) else [t]


def is_meta(t):
    """Return whether a tensor has no memory."""
    return any(local.is_meta for local in local_tensors(t))


def home():
    """Return the device of plain tensors that get memory: torch's default one."""
    import torch

    device = torch.get_default_device()
    return torch.device("cpu") if device.type == "meta" else device


def home_of(t):
    """Return where a tensor is, or gets memory: a DTensor where its mesh is."""
    import torch

    local = local_tensors(t)
    if local and not local[0].is_meta:
        return local[0].device
    return torch.device(t.device_mesh.device_type) if is_dtensor(t) else home()


def places(dtensor):
    """Return an order of a DTensor's mesh dimensions, and what each of them divides.

    That is [(kind, dimension of the tensor)] in that order.

    The first mesh dimension that divides a dimension of the tensor is the outermost. Torch divides
    in the order of the mesh, but a _StridedShard as if split_factor parts were there already: those
    that later dimensions of the mesh make. So it belongs behind as many of them as make that many
    parts. If there are none, a rank's part is not a box: CkptError "unsupported".
    """
    sizes, kinds, orders = dtensor.device_mesh.shape, {}, {}
    for m, p in reversed([*enumerate(dtensor.placements)]):
        dim = getattr(p, "dim", 0)
        dim += dtensor.dim() if dim < 0 else 0
        # In some versions of torch a _StridedShard is not a Shard.
        is_shard = p.is_shard() or hasattr(p, "split_factor")
        if p.is_replicate() or (is_shard and sizes[m] == 1):
            kinds[m] = REPLICATE, 0
            continue
        order, parts, at = orders.setdefault(dim, []), 1, 0
        factor = getattr(p, "split_factor", 1)
        while parts < factor and at < len(order):
            parts, at = parts * sizes[order[at]], at + 1
        if parts != factor or not is_shard:
            why = f": of dimension {dim}, {p} takes rows that do not lie together"
            raise CkptError(
                "unsupported",
                f"a parameter with the placements {tuple(dtensor.placements)} on a mesh of "
                f"{tuple(sizes)} can't be loaded{'' if parts == factor else why}",
            )
        order.insert(at, m)
        kinds[m] = SHARD, dim
    order = sorted(kinds)
    if any(o != sorted(o) for o in orders.values()):
        dividing = [m for o in orders.values() for m in o]
        order = dividing + [m for m in order if kinds[m][0] == REPLICATE]
    return order, [kinds[m] for m in order]


def is_strided(t):
    """Return whether a local tensor has elements in memory of its own.

    Sparse tensors and classes that wrap other tensors (quantised ones) do not.
    """
    import torch

    if t.layout is not torch.strided or hasattr(t, "__tensor_flatten__"):
        return False
    try:
        return t.untyped_storage() is not None
    except (RuntimeError, NotImplementedError):  # torch's, for a tensor without storage
        return False


def memory(t):
    """Return what tensors that share their memory have in common (tied weights), on any device.

    None if the tensor has no memory.
    """
    t = local_tensors(t)
    t = t[0] if len(t) == 1 else None
    if t is None or not t.numel() or not is_strided(t):
        return None
    at = (t.untyped_storage()._cdata, t.storage_offset()) if t.is_meta else t.data_ptr()
    return (t.device, at, t.shape, t.stride())


def loses(stored, dtype):
    """Return whether a cast to a torch.dtype loses fractions or imaginary parts of what is stored.

    `stored` is safetensors' word.
    """
    return not dtype.is_complex and stored.startswith(
        "C" if dtype.is_floating_point else ("F", "BF", "C")
    )


def same_bits(a, b):
    """Return whether two plain tensors of one shape and dtype have the same bytes."""
    import torch

    a, b = (t.detach().contiguous().view(-1).view(torch.uint8) for t in (a, b))
    return bool(torch.equal(a, b))


def like(t, local):
    """Return a DTensor as t is, with another local tensor; for any other t the local tensor."""
    if not is_dtensor(t):
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, t.device_mesh, t.placements, run_check=False, shape=t.shape, stride=t.stride()
    )


def dressed(old, new):
    """Return new memory in the place of a tensor: of the same class, with the same attributes.

    The class, which may be a subclass of torch.nn.Parameter, is not called.
    """
    import torch

    is_parameter = isinstance(old, torch.nn.Parameter)
    if is_dtensor(old) and not is_parameter:
        return new
    if is_dtensor(old):
        new = torch.nn.Parameter(new, requires_grad=old.requires_grad)
    elif is_parameter or type(old) is not type(new):
        new = torch.Tensor._make_subclass(type(old), new.detach(), old.requires_grad)
    new.__dict__.update(old.__dict__)
    return new


def written(t):
    """Tell autograd that a tensor's memory was written: its version goes up."""
    if not t.is_inference():
        nothing = t.detach().as_strided((0,), (1,))
        nothing.copy_(nothing)  # which every dtype has
