# SPDX-License-Identifier: Apache-2.0
"""One rank of test_python.py, under torchrun with gloo: python_worker.py CHECKPOINT EXPECTED"""

import glob
import importlib.util
import os
import shutil
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoConfig, AutoModelForCausalLM

import ckptfs
from built import end_rank

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
    # every rank wants a part of its own, which it reads itself
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
    cannot_be_filled_again(model)


def cannot_be_filled_again(model):
    """FSDP1's tensors move: a Reloader refuses it on all ranks, with a Comm of the caller's, too, which serves afterwards."""
    with ckptfs.Comm() as comm:
        for group in (None, comm):
            try:
                ckptfs.Reloader(model, RUN, group)
            except ckptfs.CkptError as e:
                assert e.code == "unsupported" and "FSDP1" in str(e), e
            else:
                raise AssertionError("a Reloader filled FSDP1")
        ckptfs.load_state_dict(model, RUN, comm)


def as_accelerate_does(want, what, dtype=torch.bfloat16):
    """FSDP2 from the meta device: the same parameters, and the same logits, as accelerate's broadcast from rank 0 gives."""
    import types
    from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict
    models = []
    for mine in (True, False):
        model = meta_model(dtype)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        if mine:
            ckptfs.load_state_dict(model, RUN)
        else:
            head = types.SimpleNamespace(is_main_process=dist.get_rank() == 0)
            full_state = {k: want[k].to(dtype) for k in model.state_dict()}  # its other ranks take the model's dtype for the checkpoint's
            fsdp2_load_full_state_dict(head, model, full_state)
            for module, other in zip(model.modules(), models[0].modules()):  # it leaves them on the meta device: its caller knows what to do
                module._buffers.update({k: b for k, b in other._buffers.items() if k in module._non_persistent_buffers_set})
        models.append(model)
    for (name, a), (other, b) in zip(models[0].named_parameters(), models[1].named_parameters()):
        assert name == other and a.dtype == b.dtype and a.placements == b.placements and a.requires_grad == b.requires_grad, (what, name)
        assert torch.equal(a.to_local(), b.to_local()) and a.to_local().stride() == b.to_local().stride(), (what, name)
    ids = torch.arange(8)[None]
    assert torch.equal(models[0].eval()(ids).logits, models[1].eval()(ids).logits), what
    models[0](ids).logits.sum().backward()


def float8_stays(mesh):
    """A sharded parameter whose values are stored as float8_e4m3fn becomes that, and FSDP knows of it."""
    from safetensors.torch import save_file
    import json
    import tempfile
    where = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(where)
    stored = {"weight": torch.arange(15.).view(5, 3).to(torch.float8_e4m3fn), "bias": torch.arange(5.)}
    if dist.get_rank() == 0:
        save_file(stored, os.path.join(where[0], "model.safetensors"))
        with open(os.path.join(where[0], "config.json"), "w") as f:
            json.dump({"model_type": "odd"}, f)
    dist.barrier()
    for device in ("meta", "cpu"):
        net = torch.nn.Linear(3, 5, device=device, dtype=torch.bfloat16)
        fully_shard(net, mesh=mesh)
        ckptfs.load_state_dict(net, where[0])
        state = net.state_dict()
        assert state["weight"].dtype == torch.float8_e4m3fn and state["bias"].dtype == torch.bfloat16
        assert torch.equal(full(state["weight"].to(torch.float32)), stored["weight"].float()) and torch.equal(full(state["bias"]).float(), stored["bias"])


def optimizer_states(mesh):
    """Moments and steps of a sharded optimizer, as torch's distributed checkpoint saved and would load them."""
    import shutil
    import tempfile
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    def make(seed):
        torch.manual_seed(seed)
        net = torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.Linear(9, 5))
        fully_shard(net, mesh=mesh)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        net(torch.randn(3, 7)).sum().backward()
        optimizer.step()
        return net, optimizer
    where = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(where)
    net, optimizer = make(1)
    dcp.save({"model": net.state_dict(), "optim": get_optimizer_state_dict(net, optimizer)}, checkpoint_id=where[0])
    states = []
    for seed, load in ((2, lambda s: ckptfs.load_state_dict(s, where[0], view="raw", readers="once")), (3, lambda s: dcp.load(s, checkpoint_id=where[0]))):
        net, optimizer = make(seed)
        state = {"model": net.state_dict(), "optim": get_optimizer_state_dict(net, optimizer)}
        load(state)
        set_optimizer_state_dict(net, optimizer, state["optim"])
        states.append(state)
    for k, t in states[0]["model"].items():
        assert torch.equal(full(t), full(states[1]["model"][k])), k
    for k, state in states[0]["optim"]["state"].items():
        for s, t in state.items():
            assert torch.equal(full(t), full(states[1]["optim"]["state"][k][s])), (k, s)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(where[0])


def adapter_under_fsdp(want, mesh):
    """peft's names below FSDP2: the base's weights arrive, the adapter's are reported."""
    import peft
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(meta_model(), config)
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    result = ckptfs.load_state_dict(model, RUN, strict=False)
    assert result.missing_keys and all("lora_" in k for k in result.missing_keys) and not result.unexpected_keys, result
    for k, t in model.state_dict().items():
        if "lora_" not in k:
            bare = k.removeprefix("base_model.model.").replace(".base_layer", "")
            assert torch.equal(full(t.detach()), want[bare]), k


def in_a_subgroup(want):
    """The last ranks alone, whose group counts from 0."""
    world = dist.get_world_size()
    ranks = list(range(world // 2, world))
    group = dist.new_group(ranks, backend="gloo")
    if dist.get_rank() in ranks:
        mesh = init_device_mesh("cpu", (len(ranks),)) if len(ranks) == world else None
        model = meta_model()
        ckptfs.load_state_dict(model, RUN, process_group=group, readers="once")
        same(model.state_dict(), want, "subgroup")
        if mesh is None:
            from torch.distributed.device_mesh import DeviceMesh
            mesh = DeviceMesh.from_group(group, "cpu")
        with ckptfs.open(RUN) as f:
            whole = {k: f.get_tensor(k) for k in f.keys()}
        state = {k: distribute_tensor(torch.zeros_like(t), mesh, [Shard(0)], src_data_rank=None) for k, t in whole.items()}
        ckptfs.load_state_dict(state, RUN, process_group=group)
        for k, t in state.items():
            n = -(-whole[k].shape[0] // len(ranks))
            at = (dist.get_rank() - ranks[0]) * n
            assert torch.equal(t.to_local(), whole[k][at:at + n]), k
    else:
        try:
            ckptfs.load_state_dict(dict(want), RUN, process_group=group)
        except ValueError as e:
            assert "process_group" in str(e), e
        else:
            raise AssertionError("loaded in a group of others")
    dist.barrier()


def old_sharded_tensors(want):
    """FSDP1 without a mesh: its state dict has ShardedTensors."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import StateDictType
    from torch.distributed._shard.sharded_tensor import ShardedTensor
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(EXPECTED), dtype=torch.float32)
    model = FSDP(model, device_id=torch.device("cpu"))
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        assert any(isinstance(t, ShardedTensor) for t in model.state_dict().values())
    ckptfs.load_state_dict(model, RUN)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        state = model.state_dict()
        for k, t in (state if dist.get_rank() == 0 else {}).items():
            assert torch.equal(t, want[k]), k


def wrapped(want):
    """DistributedDataParallel around torch.compile's."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(EXPECTED), dtype=torch.float32)
    model = torch.nn.parallel.DistributedDataParallel(torch.compile(model))
    ckptfs.load_state_dict(model, RUN)
    same({k.removeprefix("module._orig_mod."): t for k, t in model.state_dict().items()}, want, "wrapped")


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


def strided(mesh):
    """Several placements divide one dimension: the rows that torch says; and an error on all ranks where they do not lie together."""
    with ckptfs.open(RUN) as f:
        name, whole = next((k, f.get_tensor(k)) for k in f.keys() if len(f.get_slice(k).get_shape()) == 2)
    once, twice, four = (_StridedShard(0, split_factor=f) for f in (1, 2, 4))
    good = [(twice, Shard(0)), (twice, once), (once, once), (once, Shard(0)), (_StridedShard(1, split_factor=2), _StridedShard(1, split_factor=1))]
    for placements in good + [(Shard(0), twice), (twice, Shard(1)), (four, Shard(0))]:
        shape, offset = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
        state = {name: DTensor.from_local(torch.zeros(shape, dtype=whole.dtype), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())}
        try:
            ckptfs.load_state_dict(state, RUN, strict=False)
        except ckptfs.CkptError as e:
            assert placements not in good and e.code == "unsupported" and "do not lie together" in str(e), (placements, e)
        else:
            want = whole[tuple(slice(lo, lo + n) for lo, n in zip(offset, shape))]
            assert placements in good and torch.equal(state[name].to_local(), want), (placements, offset)


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


def ranks_see_other_steps():
    """All but rank 0 see a later step, too, which differs in one byte of its last shard: all load rank 0's, or none loads."""
    rank = dist.get_rank()
    step = sorted(d for d in os.listdir(RUN) if d.isdigit())[-1]
    with tempfile.TemporaryDirectory() as top:
        run = shutil.copytree(RUN, os.path.join(top, "run"))
        if rank:
            shutil.copytree(os.path.join(run, step), os.path.join(run, "999"), copy_function=shutil.copyfile)  # as new as the change
            path = sorted(glob.glob(os.path.join(run, "999", "**", "*.safetensors"), recursive=True))[-1]
            with open(path, "r+b") as f:
                f.seek(-1, os.SEEK_END)
                byte = f.read(1)[0]
                f.seek(-1, os.SEEK_END)
                f.write(bytes([byte ^ 1]))
            with open(os.path.join(run, "latest.txt"), "w") as f:
                f.write("999")
        with ckptfs.open(run, step=step) as f:
            want = {k: f.get_tensor(k) for k in f.keys()}
        with ckptfs.open(run) as later:
            assert all(torch.equal(want[k], later.get_tensor(k)) for k in want) == (rank == 0)
            state = {k: torch.zeros_like(t) for k, t in want.items()}
            ckptfs.load_state_dict(state, run)
            assert all(torch.equal(t, want[k]) for k, t in state.items())
            for source, given in ((run, "999" if rank else None), (later, None)):
                try:
                    ckptfs.load_state_dict(state, source, step=given)
                except ckptfs.CkptError as e:
                    assert e.code == "conflict" and "'999'" in str(e) and f"'{step}'" in str(e), e
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
    if importlib.util.find_spec("accelerate"):
        as_accelerate_does(want, "as accelerate does")
    elif dist.get_rank() == 0:
        print("without accelerate")
    float8_stays(init_device_mesh("cpu", (world,)))
    optimizer_states(init_device_mesh("cpu", (world,)))
    if importlib.util.find_spec("peft"):
        adapter_under_fsdp(want, init_device_mesh("cpu", (world,)))
    wrapped(want)
    if world > 1:
        in_a_subgroup(want)
        ranks_see_other_steps()
    one_rank_fails()
    if world % 2 == 0:
        grid = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        hsdp = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        fsdp2(want, hsdp, "HSDP")
        tensor_parallel(want, grid["tp"], None if world == 2 else grid["dp"])
        if world == 4:
            strided(grid)
    if not glob.glob(os.path.join(RUN, "**", "*experts*"), recursive=True):
        fsdp1(want)
        if world > 1:
            old_sharded_tensors(want)
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"{world} ranks ok")
    end_rank()


main()
