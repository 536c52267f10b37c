# SPDX-License-Identifier: Apache-2.0
"""Saves by torch's own writers from several processes (gloo): random sharded tensors, given state dicts under random placements, and
models under FSDP2, HSDP and FSDP2 with tensor parallelism; into Hugging Face storage or into .metadata and .distcp files."""

import json
import os
import random
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers as tf
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tensor_case import ranks

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8,
          torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]


def tensor(name, dtype, shape, seed):
    """Random bytes: every value, NaNs included."""
    g = torch.Generator().manual_seed(hash_of(name) ^ seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=g).bool()
    size = torch.empty((), dtype=dtype).element_size()
    return torch.randint(0, 256, (*shape, size), generator=g, dtype=torch.uint8).view(dtype).reshape(shape)


def hash_of(text):
    h = 5381
    for c in text.encode():
        h = (h * 33 + c) % 2**31
    return h


def plan(seed, world):
    """The same on every rank: mesh shape, and per tensor its dtype, shape and placements; the number of files and each one's."""
    r = random.Random(seed)
    meshes = [(world,)] + [(a, world // a) for a in range(2, world) if world % a == 0]
    mesh = r.choice(meshes)
    tensors = {}
    for i in range(r.randint(3, 30)):
        rank = r.choice([0, 1, 1, 2, 2, 2, 3, 5])
        shape = [r.choice([0, 1, 2, 3, 5, 7, 8, 13, 16]) for _ in range(rank)]
        placements = [r.choice(["R"] + [d for d in range(rank)] * 2) for _ in mesh]
        name = r.choice(["model.layers.%d.w", "a%d", "b.%d.\u00e9\"\\", "%d"]) % i
        tensors[name] = (r.choice(DTYPES), shape, placements)
    nfile = r.choice([1, 1, 2, 3])
    files = {name: 1 + i % nfile for i, name in enumerate(tensors)} if nfile > 1 else None
    return mesh, tensors, files


def full_tensors(seed, world):
    return {name: tensor(name, dtype, shape, seed) for name, (dtype, shape, _) in plan(seed, world)[1].items()}


def sharded(full, mesh, placements):
    shape, offset = compute_local_shape_and_global_offset(full.shape, mesh, placements)
    local = full
    for d, (n, lo) in enumerate(zip(shape, offset)):
        local = local.narrow(d, min(lo, full.shape[d]), n)
    return DTensor.from_local(local.clone(memory_format=torch.contiguous_format), mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


def save(state, folder, files=None, **more):
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(folder, fqn_to_index_mapping=files, save_distributed=True, **more))


def save_dcp(state, job):
    """.metadata and .distcp, in one of the ways that the writer has."""
    r = random.Random(job["seed"])
    local = job.get("rank_local", r.random() < 0.2)  # each rank its own metadata
    compressed = {}
    if job.get("compressed"):
        from torch.distributed.checkpoint._extension import ZStandard

        compressed = {"_extensions": [ZStandard()]}
    writer = FileSystemWriter(
        job["dir"], **compressed, single_file_per_rank=r.random() < 0.7, thread_count=r.choice([1, 1, 2, 3]), sync_files=False,
        serialization_format=SerializationFormat.SAFETENSORS if r.random() < 0.3 and not compressed else SerializationFormat.TORCH_SAVE)
    dcp.save(state, storage_writer=writer, use_collectives=not local)


def random_placements(r, mesh, rank):
    return [r.choice(["R"] + list(range(rank)) * 2) for _ in range(mesh.ndim)]


def distribute(full, mesh, placements):
    if not full.dim():
        return full
    return sharded(full, mesh, [Replicate() if p == "R" else Shard(p) for p in placements])


def save_random(job, world):
    shape, tensors, files = plan(job["seed"], world)
    mesh = init_device_mesh("cpu", shape)
    state = {name: distribute(tensor(name, dtype, dims, job["seed"]), mesh, placements)
             for name, (dtype, dims, placements) in tensors.items()}
    if job.get("storage") != "dcp":
        return save(state, job["dir"], files)
    objects = {"step": 7, "text": "x" * 100, "list": [1, {"deep": (2, 3)}], "none": None}
    save_dcp({"state": {"model": state, "objects": objects}, "epoch": 3}, job)


def save_state(job, world):
    """The tensors of a safetensors file, each cut in its own way."""
    from safetensors.torch import load_file

    r = random.Random(job["seed"])
    mesh = init_device_mesh("cpu", r.choice([(world,)] + [(a, world // a) for a in range(2, world) if world % a == 0]))
    state = {name: distribute(t, mesh, random_placements(r, mesh, t.dim())) for name, t in sorted(load_file(job["state"]).items())}
    extra = {"optimizer": {"state": {n: {"exp_avg": t, "step": torch.tensor(3.0)} for n, t in list(state.items())[:5]}}, "train_state": {"step": 3}}
    for part in reversed([p for p in job.get("prefix", "").split(".") if p]):
        state = {part: state}
    save_dcp({**state, **extra}, job)


def save_rows(job, world):
    """The tensors of a safetensors file in the order of `names`, each cut along its first dimension; scalars are written by rank 0. "files":
    into Hugging Face storage, else as torch writes by default, without CRCs."""
    from safetensors.torch import load_file

    full, mesh = load_file(job["state"]), init_device_mesh("cpu", (world,))
    state = {n: sharded(full[n], mesh, [Shard(0)]) if full[n].dim() else full[n] for n in job["names"] if full[n].dim() or dist.get_rank() == 0}
    torch.serialization.set_crc32_options(False)
    if job.get("files"):
        return save(state, job["dir"], job["files"])
    dcp.save(state, checkpoint_id=job["dir"])


def load_model(job, world):
    """Load a model under FSDP2 and save what it holds as one file."""
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.fsdp import fully_shard

    model = tf.AutoModelForCausalLM.from_config(tf.AutoConfig.from_pretrained(job["model"]), dtype=getattr(torch, job["dtype"]))
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    state = {n: t.detach().fill_(7) for n, t in model.state_dict().items()}
    if job.get("storage") == "hf":
        dcp.load(state, storage_reader=HuggingFaceStorageReader(job["dir"]))
    else:
        dcp.load(state, checkpoint_id=job["dir"])
    full = {n: t.full_tensor().contiguous() for n, t in state.items()}
    if dist.get_rank() == 0:
        save_file(full, job["out"])


def save_ranks(job, world):
    """verl's files, one of each rank; "old": as torch 2.4 to 2.9 pickled a mesh, less its coordinates."""
    from torch.distributed.device_mesh import DeviceMesh

    shape, tensors, _ = plan(job["seed"], world)
    mesh = init_device_mesh("cpu", shape)
    state = {name: distribute(tensor(name, dtype, dims, job["seed"]), mesh, placements)
             for name, (dtype, dims, placements) in tensors.items() if dims}
    now, ranks = DeviceMesh.__getstate__, torch.tensor(mesh.mesh.tolist())
    if job["old"]:
        DeviceMesh.__getstate__ = lambda m: {"device_type": "cpu", "mesh": ranks, "mesh_dim_names": None}
    os.makedirs(job["dir"], exist_ok=True)
    torch.save(state, os.path.join(job["dir"], f"model_world_size_{world}_rank_{dist.get_rank()}.pt"))
    DeviceMesh.__getstate__ = now


def parallelize(model, mesh):
    """Llama-like layers: column- and row-parallel matrices."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for layer in model.model.layers:
        plan = {f"self_attn.{n}_proj": ColwiseParallel() for n in "qkv"} | {"self_attn.o_proj": RowwiseParallel()}
        if hasattr(layer.mlp, "down_proj"):
            plan |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()}
        parallelize_module(layer, mesh, plan)


def save_model(job, world):
    """mesh: [world] is FSDP2, ["hsdp", replicas] replicates, ["tp", n] is tensor-parallel inside, ["ddp", 1] has everything on every
    rank, ["pp", n] is a pipeline of n stages, each on world / n ranks that hold the same."""
    from torch.distributed.fsdp import fully_shard

    model = tf.AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, job["dtype"]) if job.get("dtype") else "auto")
    kind, n = job.get("mesh", ["fsdp", 1])
    if kind in ("ddp", "pp"):
        state, stage = model.state_dict(), dist.get_rank() * n // world
        of_key = [min(i * n // len(state), n - 1) for i in range(len(state))]
        state = {key: t for (key, t), s in zip(state.items(), of_key) if s == stage}
        return dcp.save({"model": state}, checkpoint_id=job["dir"])
    mesh = init_device_mesh("cpu", (world,))
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (n, world // n), mesh_dim_names=("replicate", "shard"))
    elif kind == "tp":
        both = init_device_mesh("cpu", (world // n, n), mesh_dim_names=("dp", "tp"))
        parallelize(model, both["tp"])
        mesh = both["dp"]
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    state = model.state_dict()
    if job.get("storage") == "dcp":
        optimizer = torch.optim.AdamW(model.parameters())
        return save_dcp({"app": {"model": state, "optimizer": optimizer.state_dict()}}, job)
    if model.config.tie_word_embeddings:  # the safetensors library refuses two names of one memory
        del state["lm_head.weight"]
    save(state, job["dir"])


def verl_model(job):
    """The model that a step of verl trains, with an adapter if the job has one."""
    import transformers as tf

    model = tf.AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    if job.get("lora"):
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=12, target_modules=job["lora"], task_type="CAUSAL_LM"))
        for name, p in model.named_parameters():  # a fresh adapter changes nothing: B is zero
            if "lora_" in name:
                p.data = tensor(name, torch.int16, tuple(p.shape), job["seed"]).float() / 2**20
    return model


def save_verl(job, world):
    """What FSDPCheckpointManager of verl 0.9.1 writes: one file of each rank with the sharded states of FSDP1 or FSDP2. mesh: [replicas] of a
    hybrid mesh. wrap: the layers' class, or nothing for one flat parameter of the whole model."""
    import functools

    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import ShardedOptimStateDictConfig, ShardedStateDictConfig, ShardingStrategy, StateDictType, fully_shard
    from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

    model, rank = verl_model(job), dist.get_rank()
    config, replicas = model.config, job.get("replicas", 1)
    mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("ddp", "fsdp")) if replicas > 1 else init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    top = os.path.join(job["dir"], "global_step_3", "actor")
    os.makedirs(top, exist_ok=True)
    layers = [m for m in model.modules() if type(m).__name__ == job.get("wrap")]
    if job["fsdp"] == 1:
        policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: m in layers) if layers else None
        model = FSDP(model, auto_wrap_policy=policy, use_orig_params=job["orig"], device_id=torch.device("cpu"), **({"device_mesh": mesh} if job["device_mesh"] else {}),
                     sharding_strategy=ShardingStrategy.HYBRID_SHARD if replicas > 1 else ShardingStrategy.FULL_SHARD)
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig()):
            state = model.state_dict()
    else:
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        state = model.state_dict()
    if job.get("lora_only"):
        state = {k: v for k, v in state.items() if "lora_" in k}
    torch.save(state, os.path.join(top, f"model_world_size_{world}_rank_{rank}.pt"))
    if rank == 0:
        config.save_pretrained(os.path.join(top, "huggingface"))
        with open(os.path.join(top, "fsdp_config.json"), "w") as f:
            json.dump({"FSDP_version": job["fsdp"], "world_size": world}, f, indent=4)
        if job.get("lora"):
            with open(os.path.join(top, "lora_train_meta.json"), "w") as f:
                json.dump({"r": 4, "lora_alpha": 12, "task_type": "CAUSAL_LM"}, f, ensure_ascii=False, indent=4)
    dist.barrier()
    if rank == 0:
        with open(os.path.join(job["dir"], "latest_checkpointed_iteration.txt"), "w") as f:
            f.write("3")


def do_jobs(world, rank, path):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}.store", world_size=world, rank=rank)
    with open(path) as f:
        jobs = json.load(f)
    for job in jobs:
        {"random": save_random, "state": save_state, "model": save_model, "ranks": save_ranks, "rows": save_rows, "load": load_model, "verl": save_verl}[job["kind"]](job, world)
        dist.barrier()
    dist.destroy_process_group()


def run(world, jobs):
    """Do the jobs in `world` processes: a list of {"kind", "dir", "seed", ...}, each done by all ranks."""
    with tempfile.TemporaryDirectory() as tmp:
        path = os.path.join(tmp, "jobs")
        with open(path, "w") as f:
            json.dump(jobs, f)
        ranks.run(world, "dcp_writer", "do_jobs", path, folder=tmp)
