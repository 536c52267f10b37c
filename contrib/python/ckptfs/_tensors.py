# SPDX-License-Identifier: Apache-2.0
"""Tensors to be filled: torch's own, DTensors and ShardedTensors, in models and in state dicts."""

import sys
import warnings

from ._library import CkptError
from ._view import TORCH

REPLICATE, SHARD, STRIDED = 0, 1, 2
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


def places(dtensor):
    """[(kind, dimension)] for each dimension of its mesh."""
    import torch.distributed.tensor as dt
    strided = getattr(dt.placement_types, "_StridedShard", ())
    out = []
    for p in dtensor.placements:
        dim = getattr(p, "dim", 0)
        dim += dtensor.dim() if dim < 0 else 0
        if strided and isinstance(p, strided):
            out.append((STRIDED, dim))
        elif p.is_shard():
            out.append((SHARD, dim))
        elif p.is_replicate():
            out.append((REPLICATE, 0))
        else:
            raise CkptError("unsupported", f"a parameter with the placement {p} can't be loaded")
    return out


def memory(t):
    """What entries have in common that share their memory (tied weights); None: it has none."""
    t = local_tensors(t)
    t = t[0] if len(t) == 1 else None
    return (t.device, t.data_ptr(), t.shape, t.stride()) if t is not None and t.numel() else None


def like(t, local):
    """The DTensor t with other memory."""
    if not is_dtensor(t):
        return local
    from torch.distributed.tensor import DTensor
    return DTensor.from_local(local, t.device_mesh, t.placements, run_check=False, shape=t.shape, stride=t.stride())


# ---- state dicts ----

def _has_tensors(value):
    import torch
    if isinstance(value, dict):
        return any(_has_tensors(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return any(_has_tensors(v) for v in value)
    return isinstance(value, torch.Tensor)


def flatten(value, prefix=""):
    """{name: tensor} of nested dicts and lists, named as torch's distributed checkpoints name them."""
    import torch
    if isinstance(value, torch.Tensor):
        return {prefix: value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) and _has_tensors(value) else ()
    out = {}
    for key, v in items:
        out.update(flatten(v, f"{prefix}.{key}" if prefix else str(key)))
    return out


class Entries:
    """The tensors of a model or state dict, by name, and what has to be done when they are filled."""

    def __init__(self, target):
        import torch
        self.model = target if isinstance(target, torch.nn.Module) else None
        self._fsdp1 = self.model is not None and _is_fsdp1(self.model)
        if self.model is None:
            if not isinstance(target, dict) and not hasattr(target, "items"):
                raise TypeError(f"Expected state_dict to be dict-like, got {type(target)}.")
            self.tensors = flatten(dict(target))
        elif self._fsdp1:
            with _sharded(self.model):
                self._state = self.model.state_dict()
            self.tensors = flatten(dict(self._state))
        else:
            _materialize(self.model)
            self.tensors = {n: t for n, t in self.model.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}

    @property
    def name(self):
        return type(self.model).__name__ if self.model is not None else "the state dict"

    def device(self):
        """The CUDA device that the tensors are on; None: on the CPU, or on several."""
        import torch
        found = {t.device for whole in self.tensors.values() for t in local_tensors(whole)}
        found = {d.index if d.index is not None else torch.cuda.current_device() for d in found if d.type == "cuda"}
        return found.pop() if len(found) == 1 else None

    def can_replace(self):
        return self.model is not None and not self._fsdp1

    def replace(self, old, local):
        """Give a parameter or buffer of the model other memory, of another dtype; tied ones stay tied."""
        import torch
        new = like(old, local)
        if isinstance(old, torch.nn.Parameter):
            new = torch.nn.Parameter(new, requires_grad=old.requires_grad)
        for module in self.model.modules():
            for table in (module._parameters, module._buffers):
                for key, t in table.items():
                    if t is old:
                        table[key] = new

    def finish(self, result):
        """All are filled: what torch does after load_state_dict."""
        if self._fsdp1:
            with _sharded(self.model):
                self.model.load_state_dict(self._state)
            return
        if self.model is None:
            return
        _revive(self.model)
        for module in self.model.modules():
            for hook in module._load_state_dict_post_hooks.values():
                hook(module, result)


# ---- models ----

def _is_fsdp1(model):
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(m, fsdp.FullyShardedDataParallel) for m in model.modules())


def _sharded(model):
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
    return FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT)


def _home():
    import torch
    device = torch.get_default_device()
    return torch.device("cpu") if device.type == "meta" else device


def _materialize(model):
    """Give parameters and buffers on the meta device memory, on the default device or where their mesh is; tied ones stay tied."""
    import torch
    made = {}

    def real(t, is_param):
        if id(t) not in made:
            device = t.device_mesh.device_type if is_dtensor(t) else _home()
            new = like(t, torch.empty_like(t._local_tensor if is_dtensor(t) else t, device=device))
            if is_param:
                new = torch.nn.Parameter(new, requires_grad=t.requires_grad)
                new.__dict__.update(t.__dict__)
            made[id(t)] = (new, t)
        return made[id(t)][0]

    for module in model.modules():
        for table, is_param in ((module._parameters, True), (module._buffers, False)):
            for key, t in table.items():
                if t is not None and t.is_meta and (is_param or key not in module._non_persistent_buffers_set):
                    table[key] = real(t, is_param)


def _revive(model):
    """Buffers that are not saved and still are on the meta device are what the model's class computes (transformers' rotary frequencies)."""
    import torch
    lost = []
    for name, module in model.named_modules():
        meta = [k for k in module._non_persistent_buffers_set if module._buffers.get(k) is not None and module._buffers[k].is_meta]
        if not meta:
            continue
        init = _initializer(model, name, module)
        if init is None:
            lost += [f"{name}.{k}" if name else k for k in meta]
            continue
        for k in meta:
            module._buffers[k] = torch.empty_like(module._buffers[k], device=_home())
        with torch.no_grad():
            init(module)
    if lost:
        warnings.warn(f"not saved, so still on the meta device: {', '.join(lost)}", stacklevel=4)


def _initializer(model, name, module):
    """What fills a module's buffers: its transformers model's _init_weights, if it would touch no parameter."""
    if any(True for _ in module.parameters()):
        return None
    owner = model
    found = owner if hasattr(owner, "_init_weights") else None
    for part in name.split(".") if name else ():
        owner = getattr(owner, part)
        found = owner if hasattr(owner, "_init_weights") else found
    return found._init_weights if found is not None else None
