# SPDX-License-Identifier: Apache-2.0
"""One rank of test_python.py, under torchrun with gloo: python_worker.py CHECKPOINT EXPECTED"""

import glob
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoConfig, AutoModelForCausalLM

import ckptfs

RUN, EXPECTED = sys.argv[1:3]


def meta_model(dtype=torch.float32):
    config = AutoConfig.from_pretrained(EXPECTED)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def full(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def reference():
    """The state dict of the model as transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(EXPECTED, dtype=torch.float32).state_dict()


def same(state, want, what):
    assert set(state) == set(want), (what, set(state) ^ set(want))
    for name, t in state.items():
        assert torch.equal(full(t.detach()).to(want[name].dtype), want[name]), f"{what}: {name}"


def plain(want):
    for readers in ("once", "each", "auto"):
        model = meta_model()
        result = ckptfs.load_state_dict(model, RUN, readers=readers)
        assert not result.missing_keys and not result.unexpected_keys
        same(model.state_dict(), want, f"plain, {readers}")


def fsdp2(want, mesh, what):
    model = meta_model()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    result = ckptfs.load_state_dict(model, RUN, readers="once")
    same(model.state_dict(), want, what)
    if dist.get_world_size() > 1:
        assert result.stats["sent_bytes"] > 0
    assert result.stats["read_bytes"] <= 1.05 * result.stats["unique_bytes"]


def tensor_parallel(want, mesh, fsdp_mesh):
    model = meta_model()
    for layer in model.model.layers:
        plan = {"self_attn.q_proj": ColwiseParallel(), "self_attn.k_proj": ColwiseParallel(), "self_attn.v_proj": ColwiseParallel(),
                "self_attn.o_proj": RowwiseParallel()}
        parallelize_module(layer, mesh, plan)
        if fsdp_mesh is not None:
            fully_shard(layer, mesh=fsdp_mesh)
    if fsdp_mesh is not None:
        fully_shard(model, mesh=fsdp_mesh)
    ckptfs.load_state_dict(model, RUN, readers="once")
    same(model.state_dict(), want, "tensor parallel")


def fsdp1(want):
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import StateDictType
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(EXPECTED), dtype=torch.float32)
    model = FSDP(model, device_mesh=mesh, device_id=torch.device("cpu"))
    ckptfs.load_state_dict(model, RUN)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        same(model.state_dict(), want, "FSDP1")


def dictionary():
    """A state dict of plain tensors and DTensors: casts, strides, uneven shards, a name that is not there."""
    with ckptfs.open(RUN) as f:
        whole = {k: f.get_tensor(k) for k in f.keys()}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state, expect = {}, {}
    for i, (k, t) in enumerate(whole.items()):
        if i % 3 == 0:
            state[k] = torch.empty(t.shape[::-1], dtype=torch.float64).permute(*reversed(range(t.dim())))  # transposed memory
        elif i % 3 == 1:
            state[k] = distribute_tensor(torch.zeros_like(t), mesh, [Shard(t.dim() - 1)])
        else:
            state[k] = distribute_tensor(torch.zeros_like(t, dtype=torch.float32), mesh, [Replicate()])
        expect[k] = t
    state["not.there"] = torch.zeros(3)
    result = ckptfs.load_state_dict(state, RUN, strict=False)
    assert result.missing_keys == ["not.there"] and not result.unexpected_keys, result
    for k, t in expect.items():
        assert torch.equal(full(state[k]).to(t.dtype), t), k
    try:
        ckptfs.load_state_dict(state, RUN)
    except RuntimeError as e:
        assert 'Missing key(s) in state_dict: "not.there"' in str(e), e
    else:
        raise AssertionError("strict did not report a missing key")


def renamed():
    with ckptfs.open(RUN) as f:
        whole = {k: f.get_tensor(k) for k in f.keys()}
    state = {re_name(k): torch.zeros_like(t) for k, t in whole.items()}
    ckptfs.load_state_dict(state, RUN, key_mapping={r"^model\.": "net."})
    for k, t in whole.items():
        assert torch.equal(state[re_name(k)], t), k


def re_name(k):
    return "net." + k[len("model."):] if k.startswith("model.") else k


def one_rank_fails():
    """Every rank gets the error of the one that can't go on."""
    rank, world = dist.get_rank(), dist.get_world_size()
    with ckptfs.open(RUN) as f:
        state = {k: torch.zeros(f.get_slice(k).get_shape()) for k in f.keys()}
    try:
        ckptfs.load_state_dict(state, RUN if rank != world - 1 else "/no/such/place")
    except (ckptfs.CkptError, RuntimeError) as e:
        assert "/no/such/place" in str(e), e
    else:
        raise AssertionError("no error")


def main():
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    want = reference()
    plain(want)
    fsdp2(want, init_device_mesh("cpu", (world,)), "FSDP2")
    dictionary()
    renamed()
    one_rank_fails()
    if world % 2 == 0:
        grid = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        hsdp = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        fsdp2(want, hsdp, "HSDP")
        tensor_parallel(want, grid["tp"], None if world == 2 else grid["dp"])
    if not glob.glob(os.path.join(RUN, "**", "*experts*"), recursive=True):
        fsdp1(want)
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"{world} ranks ok")
    dist.destroy_process_group()


main()
