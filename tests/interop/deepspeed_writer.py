# SPDX-License-Identifier: Apache-2.0
"""Models of random shapes that an installed DeepSpeed trains for some steps and saves, on CPU with gloo; beside each checkpoint lies
what the live model, its optimizer and DeepSpeed's own converter say that it holds. ranks.py runs the functions in all ranks."""

import contextlib
import gc
import importlib
import os
import random
import warnings

os.environ["DS_ACCELERATOR"] = "cpu"
import torch
import torch.distributed as dist

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def preload():
    """What takes seconds to import, once for all ranks: DeepSpeed, and what it and torch's optimizers import when they are used."""
    import deepspeed
    import torch._dynamo
    import torch._inductor.compile_fx
    import torch.distributed.fsdp  # noqa: F401
    for late in ("deepspeed.checkpoint.ds_to_universal", "deepspeed.utils.zero_to_fp32", "deepspeed.runtime.zero.muon.muon_optimizer"):
        with contextlib.suppress(ImportError):
            importlib.import_module(late)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would need a compiler; gloo does without
    gc.freeze()  # it collects garbage often, and that much of it takes long


class Leaf(torch.nn.Module):
    """A weight, perhaps a bias, and a forward whose gradient differs from element to element."""

    def __init__(self, shape, bias):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(shape))
        if bias:
            self.bias = torch.nn.Parameter(torch.randn(shape[-1]))

    def forward(self, x):
        for p in self.parameters():
            x = x + (p * p * torch.linspace(0.1, 1, p.numel(), dtype=p.dtype).view(p.shape)).sum() / p.numel()
        return x


class Toy(torch.nn.Module):
    def __init__(self, plan):
        super().__init__()
        self.layers = torch.nn.ModuleList(Leaf(s, b) for s, b in zip(plan["shapes"], plan["biases"]))
        if plan["tied"]:
            self.head = Leaf(plan["shapes"][0], False)
            self.head.weight = self.layers[0].weight
        self.register_buffer("scale", torch.randn(3))
        self.register_buffer("count", torch.tensor([2**40 + 3, -1]))
        for i in plan["frozen"]:
            self.layers[i].requires_grad_(False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x) if hasattr(self, "head") else x


def make_plan(seed, world, old):
    """old: the version has no parameter_alignment, and cannot convert two groups of stage 3."""
    r = random.Random(seed)
    n = r.randint(3, 7)
    stage = r.choice([0, 1, 1, 2, 2, 3, 3, 3])
    plan = {"stage": stage, "world": world, "seed": seed, "dtype": r.choice(["bf16", "bf16", "fp16", "fp32"]), "steps": r.randint(1, 2),
            "shapes": [[r.randint(1, 9) for _ in range(r.randint(1, 3))] for _ in range(n)], "biases": [r.random() < 0.5 for _ in range(n)],
            "tied": r.random() < 0.4, "frozen": r.sample(range(1, n), r.choice([0, 0, 1, 2])), "groups": r.randint(1, 3),
            "exclude": r.random() < 0.3, "round_robin": stage in (1, 2) and r.random() < 0.3, "align": not old and stage in (1, 2) and r.random() < 0.5,
            "sub_group": r.choice([10**9, 40]), "persist": r.choice([0, 100])}
    plan["bf16_optimizer"] = old and stage == 0 and plan["dtype"] == "bf16"  # it has masters then
    plan["exclude"] &= bool(plan["frozen"])
    plan["universal"] = (stage in (1, 2, 3) and r.random() < 0.5 and not plan["round_robin"] and not plan["exclude"] and not (stage == 3 and plan["frozen"])
                         and not (old and stage == 3 and (plan["groups"] > 1 or plan["sub_group"] < 10**9)))
    return plan


def groups_of(model, n):
    """The trained parameters in n groups, each of which has some."""
    mine = [p for p in model.parameters() if p.requires_grad]
    return [{"params": mine[i::n], "lr": 0.01 * (i + 1)} for i in range(min(n, len(mine)))]


def trained_names(plan):
    """The names of the toy's frozen and trained parameters, and {alias: owner} of the tied ones."""
    model = Toy(plan)
    names = {"frozen": set(), "trained": set(), "tied": {"head.weight": "layers.0.weight"} if plan["tied"] else {}}
    for name, p in model.named_parameters(remove_duplicate=False):
        names["trained" if p.requires_grad else "frozen"].add(name)
    return names


def config_of(plan):
    zero = {"stage": plan["stage"], "round_robin_gradients": plan["round_robin"], "sub_group_size": plan["sub_group"],
            "stage3_param_persistence_threshold": plan["persist"]}
    if plan["align"]:
        zero["parameter_alignment"] = True
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    if plan["dtype"] == "fp16":
        config["fp16"] = {"enabled": True, "loss_scale": 8}
    if plan["dtype"] == "bf16":
        config["bf16"] = {"enabled": True}
    return config


def start(world, rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    import deepspeed
    cpu = deepspeed.accelerator.get_accelerator()
    cpu.is_fp16_supported = lambda: True
    cpu.supported_dtypes = lambda: list(DTYPES.values())
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    return deepspeed


def live_weights(model, plan, masters):
    """Every name of the state dict, aliases too, as the model computes with it. ZeRO 3 has the weights in pieces, and what 0.16.7 gathers
    from them on CPU is sometimes read too early: there they are the masters, rounded, and the frozen ones are as they were made."""
    out = dict(model.named_buffers())
    if plan["stage"] == 3:
        torch.manual_seed(plan["seed"])
        made = Toy(plan).state_dict()
    for name, p in model.named_parameters(remove_duplicate=False):
        owner = "layers.0.weight" if name == "head.weight" else name
        out[name] = p if plan["stage"] < 3 else (masters[owner] if p.requires_grad else made[owner]).to(DTYPES[plan["dtype"]])
    return {k: v.detach().clone() for k, v in out.items()}


def live_states(engine):
    """Masters and moments as DeepSpeed's own interface finds them in its partitions; all ranks take part."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    masters, moments = {}, {}
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):  # 0.19.8 links them after the first group's first step, and so the first group's only
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, p in engine.module.named_parameters():
        if not p.requires_grad or not (hasattr(p, "_hp_mapping") or hasattr(p, "ds_id")):
            continue
        masters[name] = safe_get_full_fp32_param(p).clone()
        for key in ("exp_avg", "exp_avg_sq"):
            moments[f"optim.state.{name}.{key}"] = safe_get_full_optimizer_state(p, key).clone()
    return masters, moments


def has_state(p, key):
    """Does every rank that has a part of the parameter know its moment? The interface loses those of some partitions of one element."""
    mapping = getattr(p, "_hp_mapping", None)
    lost = torch.tensor([int(mapping is not None and key not in mapping.optim_fragment)])
    dist.all_reduce(lost)
    return not lost.item()


def train(engine, steps, x):
    for _ in range(steps):
        engine.backward(engine(x).float().sum())
        engine.step()


def convert(at, tag):
    """A universal checkpoint of a tag, by DeepSpeed's own program."""
    import argparse
    from deepspeed.checkpoint import ds_to_universal
    ds_to_universal.main(argparse.Namespace(input_folder=f"{at}/{tag}", output_folder=f"{at}/{tag}_universal", num_extract_workers=1, num_merge_workers=1,
                                            keep_temp_folder=False, strict=True, inject_missing_state=True))


def write_toy(deepspeed, rank, at, plan):
    torch.manual_seed(plan["seed"])
    model = Toy(plan)
    if plan["stage"] == 0 or plan["dtype"] == "fp32":
        model = model.to(DTYPES[plan["dtype"]])
    optimizer = torch.optim.AdamW(groups_of(model, plan["groups"]))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config_of(plan))
    train(engine, plan["steps"], torch.ones(1, dtype=DTYPES[plan["dtype"]]))
    engine.save_checkpoint(at, exclude_frozen_parameters=plan["exclude"])
    masters, moments = live_states(engine) if not plan["round_robin"] else ({}, {})
    weights = live_weights(engine.module, plan, masters)
    if rank == 0:
        tag = f"global_step{plan['steps']}"
        if plan["universal"]:
            convert(at, tag)
        torch.save({"weights": weights, "masters": masters, "moments": moments, "converted": own_converter(at, plan)}, at + ".want")
    dist.barrier()
    engine.destroy()


def own_converter(at, plan):
    if plan["stage"] == 0:
        return {}
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    return {k: v.clone() for k, v in get_fp32_state_dict_from_zero_checkpoint(at).items()}


def toys(world, rank, port, top, seeds, old):
    """Train and save the toys of these seeds, one after the other."""
    deepspeed = start(world, rank, port)
    for seed in seeds:
        with contextlib.redirect_stdout(None):
            write_toy(deepspeed, rank, os.path.join(top, f"toy-{seed}"), make_plan(seed, world, old))


def write_wrapped(deepspeed, rank, at, stage, elastic):
    """With torch's checkpoint_wrapper, whose word is in the names of parameters, but not in those of a state dict."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    plan = {"shapes": [[3, 5], [7], [4, 3]], "biases": [True, False, True], "tied": True, "frozen": [2], "seed": 5, "stage": stage, "dtype": "bf16", "round_robin": False,
            "align": False, "sub_group": 10**9, "persist": 0}
    torch.manual_seed(5)
    model = Toy(plan)
    want = {k: t.clone() for k, t in model.state_dict().items() if t.is_floating_point() and k != "scale"}
    model.layers = torch.nn.ModuleList(checkpoint_wrapper(layer) for layer in model.layers)
    config = config_of(plan)
    config["zero_optimization"]["elastic_checkpoint"] = elastic
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups_of(model, 1)), config=config)
    train(engine, 1, torch.ones(1, dtype=torch.bfloat16))
    engine.save_checkpoint(at)
    if rank == 0:
        trained = {k.replace("_checkpoint_wrapped_module.", ""): t for k, t in own_converter(at, plan).items()}
        want = {k: trained.get(k, trained["layers.0.weight"]) if k[:8] != "layers.2" else t.bfloat16().float() for k, t in want.items()}
        torch.save(want, at + ".want")
        if not elastic:
            convert(at, "global_step1")
    dist.barrier()
    engine.destroy()


def wrapped(world, rank, port, top, stages, elastic):
    deepspeed = start(world, rank, port)
    for stage in stages:
        with contextlib.redirect_stdout(None):
            write_wrapped(deepspeed, rank, os.path.join(top, f"wrapped{stage}"), stage, stage == elastic)


# ---- experts ----

class Expert(torch.nn.Module):
    def __init__(self, hidden, inner):
        super().__init__()
        self.up, self.down = torch.nn.Linear(hidden, inner), torch.nn.Linear(inner, hidden, bias=False)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Sparse(torch.nn.Module):
    def __init__(self, plan):
        from deepspeed.moe.layer import MoE
        super().__init__()
        h = plan["hidden"]
        self.first = torch.nn.Linear(h, h)
        self.moe = torch.nn.ModuleList(MoE(h, Expert(h, inner), num_experts=n, ep_size=ep, k=1, min_capacity=4) for n, ep, inner in plan["layers"])

    def forward(self, x):
        x = self.first(x)
        for layer in self.moe:
            x = x + layer(x)[0]
        return x


def moe_plan(seed, world):
    r = random.Random(seed)
    sizes = [ep for ep in (1, 2, 4) if world % ep == 0]
    layers = [(ep * r.randint(1, 2), ep, r.randint(3, 9)) for ep in (r.choice(sizes) for _ in range(r.randint(1, 3)))]
    return {"seed": seed, "world": world, "stage": r.choice([0, 1, 1, 2, 2]), "dtype": r.choice(["bf16", "fp16", "fp32"]), "hidden": r.randint(3, 8), "layers": layers,
            "round_robin": False, "sub_group": 10**9, "persist": 0, "align": False, "steps": 1}


def global_names(model, plan, ep_rank):
    """{local name: name in the checkpoint} of this rank's parameters: experts are numbered over all ranks there."""
    names = {}
    for name, _ in model.named_parameters():
        parts = name.split(".")
        if "deepspeed_experts" in parts:
            n, ep, _ = plan["layers"][int(parts[1])]
            at = parts.index("deepspeed_experts") + 1
            parts[at] = str(ep_rank[ep] * (n // ep) + int(parts[at]))
        names[name] = ".".join(parts)
    return names


def write_moe(deepspeed, rank, at, plan):
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
    from deepspeed.utils import groups
    torch.manual_seed(plan["seed"] + rank)
    model = Sparse(plan).to(DTYPES[plan["dtype"]])
    params = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(params, lr=0.01), config=config_of(plan))
    torch.manual_seed(100 + rank)
    train(engine, plan["steps"], torch.randn(8, plan["hidden"], dtype=DTYPES[plan["dtype"]]))
    engine.save_checkpoint(at)
    ep_rank = {ep: groups._get_expert_parallel_rank(f"ep_size_{ep}") for _, ep, _ in plan["layers"]}
    names = global_names(engine.module, plan, ep_rank)
    masters, moments = live_states(engine)
    weights = {names[k]: p.detach().clone() for k, p in engine.module.named_parameters()}
    moments = {f"optim.state.{names[k.removeprefix('optim.state.').rsplit('.', 1)[0]]}.{k.rsplit('.', 1)[1]}": t for k, t in moments.items()}
    torch.save({"weights": weights, "masters": {names[k]: t for k, t in masters.items()}, "moments": moments}, f"{at}.want-{rank}")
    dist.barrier()
    engine.destroy()


def moes(world, rank, port, top, seeds, old):
    deepspeed = start(world, rank, port)
    for seed in seeds:
        with contextlib.redirect_stdout(None):
            write_moe(deepspeed, rank, os.path.join(top, f"moe-{seed}"), moe_plan(seed, world))


# ---- tensor parallelism ----

def tied_models():
    """Small models with tied embeddings: OPT's is on all ranks, llama's is divided."""
    import transformers as tf
    sizes = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64)
    yield "opt", tf.OPTConfig(**sizes, ffn_dim=48, word_embed_proj_dim=32)
    yield "llama", tf.LlamaConfig(**sizes, intermediate_size=48, num_key_value_heads=2, tie_word_embeddings=True)


def write_parallel(deepspeed, rank, at, config, stage):
    import transformers as tf
    torch.manual_seed(7)
    model = tf.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    want = {k: t.clone() for k, t in model.state_dict().items()}
    more = {"tensor_parallel": {"autotp_size": 2}}
    model = deepspeed.tp_model_init(model, tp_size=2, dtype=torch.bfloat16)
    plan = {"stage": stage, "dtype": "bf16", "round_robin": False, "sub_group": 10**9, "persist": 0, "align": False}
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.0), config=config_of(plan) | more)
    ids = torch.arange(1, 9).view(1, 8)
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()  # without a learning rate: the weights are those of the beginning
    engine.save_checkpoint(at)
    if rank == 0:
        torch.save(want, at + ".want")
    dist.barrier()
    engine.destroy()


def parallels(world, rank, port, top, stages):
    deepspeed = start(world, rank, port)
    for name, config in tied_models():
        for stage in stages:
            with contextlib.redirect_stdout(None):
                write_parallel(deepspeed, rank, os.path.join(top, f"{name}{stage}"), config, stage)


def llama_engine(deepspeed, config, stage, wide, dtype="bf16", lr=9.0, betas=(0.5, 0.5), eps=1.0, decay=(0.5, 0.5), **more):
    """An engine of a llama. wide: the optimizer has one group for matrices, and one for all else."""
    import transformers as tf
    model = tf.AutoModelForCausalLM.from_config(config)
    groups = [{"params": [p for p in model.parameters() if not wide or (p.ndim > 1) == matrices], "weight_decay": decay[not matrices]}
              for matrices in ([True, False] if wide else [True])]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps)
    plan = {"stage": stage, "dtype": dtype, "round_robin": False, "sub_group": 10**9, "persist": 0, "align": False}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config_of(plan) | {"gradient_clipping": 0.0} | more)[0]


IDS = torch.arange(1, 9).view(1, 8)


def llama_step(engine):
    engine.backward(engine(input_ids=IDS, labels=IDS).loss)
    engine.step()


def write_groups(deepspeed, rank, at, stage, wide=True):
    """A llama after two steps, whose optimizer has two groups, its conversion, and what it is after a third step."""
    import transformers as tf
    torch.manual_seed(7)
    config = tf.LlamaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, num_key_value_heads=2)
    engine = llama_engine(deepspeed, config, stage, wide, lr=0.0078125, betas=(0.75, 0.875), eps=1e-6, decay=(0.125, 0.0))
    for _ in range(2):
        llama_step(engine)
    engine.save_checkpoint(at)
    masters, moments = live_states(engine)
    llama_step(engine)
    engine.save_checkpoint(at)
    after = live_states(engine)
    if rank == 0:
        torch.save({"masters": masters, "moments": moments, "after": after, "converted": converted(at)}, at + ".want")
        config.save_pretrained(at + "-base")
    dist.barrier()
    engine.destroy()


def converted(at):
    """What the conversion of a llama says besides tensors, without DeepSpeed's own classes."""
    convert(at, "global_step2")
    top = f"{at}/global_step2_universal"
    optimizer = torch.load(f"{top}/zero/optimizer_state.pt", weights_only=False)
    [file] = {"mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"} & set(os.listdir(top))
    model = torch.load(os.path.join(top, file), weights_only=False)
    keys = ("global_steps", "skipped_steps", "mp_world_size", "ds_version", "shared_params", "buffer_names")
    return {"groups": optimizer["param_groups"], "keys": list(model), "shapes": [{k: tuple(s) for k, s in g.items()} for g in model["param_shapes"]],
            **{k: model[k] for k in keys}}


def groups(world, rank, port, top, stages, wide=True):
    deepspeed = start(world, rank, port)
    for stage in stages:
        with contextlib.redirect_stdout(None):
            write_groups(deepspeed, rank, os.path.join(top, f"groups{stage}"), stage, wide)


def resumed(world, rank, port, top, jobs):
    """Load universal checkpoints, (folder, its model's, stage, groups as of llama_engine, dtype, name), and take a step: NAME.got has what was
    loaded, and what it is then."""
    import transformers as tf
    deepspeed = start(world, rank, port)
    for view, base, stage, wide, dtype, name in jobs:
        torch.manual_seed(11)
        with contextlib.redirect_stdout(None):
            engine = llama_engine(deepspeed, tf.AutoConfig.from_pretrained(base), stage, wide, dtype, checkpoint={"load_universal": True})
            loaded, _ = engine.load_checkpoint(view)
        masters, moments = live_states(engine)
        inner = engine.optimizer.optimizer
        groups = [{k: v for k, v in g.items() if k != "params"} for g in inner.param_groups]
        steps = [float(s["step"]) for s in inner.state.values() if s]
        at = engine.global_steps
        llama_step(engine)
        after = live_states(engine)
        if rank == 0:
            torch.save({"loaded": loaded, "masters": masters, "moments": moments, "groups": groups, "steps": steps, "global_steps": at, "after": after},
                       os.path.join(top, name + ".got"))
        dist.barrier()
        engine.destroy()


def inside(module, path):
    """The module below this one whose name's parts are given; it is made if it is not there."""
    for part in path:
        if not hasattr(module, part):
            module.add_module(part, torch.nn.Module())
        module = getattr(module, part)
    return module


# ---- for tests/bench ----

def large(world, rank, port, at, shapes):
    """A checkpoint of ZeRO 3 with weights of these names and shapes, with moments, but without a step, which would take long."""
    deepspeed = start(world, rank, port)
    config = config_of({"stage": 3, "dtype": "bf16", "round_robin": False, "sub_group": 10**9, "persist": 0, "align": False})
    model = torch.nn.Module()
    with deepspeed.zero.Init(config_dict_or_path=config):
        for name, shape in shapes.items():
            *path, last, _ = name.split(".")
            inside(model, path).add_module(last, Leaf(shape, False))
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
    for flat in engine.optimizer.fp32_partitioned_groups_flat:
        engine.optimizer.optimizer.state[flat] = {"step": torch.tensor(1.0), "exp_avg": flat * 0.1, "exp_avg_sq": flat * flat}
    engine.save_checkpoint(at)


# ---- pipelines ----

def pipe_plan(seed):
    r = random.Random(seed)
    h = r.randint(3, 7)
    kinds = [r.choice(["linear", "linear", "function"]) for _ in range(r.randint(2, 5))]
    plan = {"seed": seed, "hidden": h, "kinds": ["linear", *kinds, "linear"], "tied": r.random() < 0.6, "stage": r.choice([0, 1, 1]), "dtype": r.choice(["bf16", "fp32"]),
            "round_robin": False, "sub_group": 10**9, "persist": 0, "align": False, "steps": 1}
    plan["universal"] = plan["stage"] == 1 and kinds[0] == "linear"  # ds_to_universal needs a file of layer 1
    return plan


def write_pipe(deepspeed, rank, at, plan):
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    h = plan["hidden"]
    torch.manual_seed(plan["seed"])
    specs = [LayerSpec(torch.nn.Linear, h, h) if kind == "linear" else torch.tanh for kind in plan["kinds"]]
    if plan["tied"]:
        specs[0] = TiedLayerSpec("tie", torch.nn.Linear, h, h, tied_weight_attr=["weight", "bias"])
        specs.append(TiedLayerSpec("tie", torch.nn.Linear, h, h, tied_weight_attr=["weight", "bias"]))
    model = PipelineModule(layers=specs, num_stages=2, loss_fn=lambda out, _: out.float().pow(2).mean(), partition_method="uniform")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    config = config_of(plan) | {"gradient_accumulation_steps": 1}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    x = torch.randn(1, h, dtype=DTYPES[plan["dtype"]])
    engine.train_batch(data_iter=iter([(x, x)] * 4))
    engine.save_checkpoint(at)
    names = {k: k.replace("tied_modules.tie.", "0.") for k, _ in engine.module.named_parameters()}
    masters, moments = live_states(engine)
    weights = {names[k]: p.detach().clone() for k, p in engine.module.named_parameters()}
    moments = {f"optim.state.{names[k.removeprefix('optim.state.').rsplit('.', 1)[0]]}.{k.rsplit('.', 1)[1]}": t for k, t in moments.items()}
    torch.save({"weights": weights, "masters": {names[k]: t for k, t in masters.items()}, "moments": moments}, f"{at}.want-{rank}")
    dist.barrier()
    if rank == 0 and plan["universal"]:
        convert(at, f"global_step{plan['steps']}")


def pipes(world, rank, port, top, seeds):
    deepspeed = start(world, rank, port)
    for seed in seeds:
        with contextlib.redirect_stdout(None):
            write_pipe(deepspeed, rank, os.path.join(top, f"pipe-{seed}"), pipe_plan(seed))


def pipe_parallel(world, rank, port, top):
    """Two stages of two tensor-parallel ranks each, whose layers no rank cuts, as DeepSpeed's own test of such a pipeline makes it, with its two
    conversions: parallel.said has the error of the first, which injects no state, and the second is there."""
    import argparse
    from deepspeed.checkpoint import ds_to_universal
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
    deepspeed, at = start(world, rank, port), os.path.join(top, "parallel")
    torch.manual_seed(1)
    layers = [torch.nn.Linear(8, 8) for _ in range(4)] + [torch.nn.Linear(8, 1)]
    model = PipelineModule(layers=layers, topology=PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1))
    plan = {"stage": 1, "dtype": "fp32", "round_robin": False, "sub_group": 10**9, "persist": 0, "align": False}
    with contextlib.redirect_stdout(None):
        engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01), config=config_of(plan) | {"gradient_accumulation_steps": 1})
        x = torch.randn(1, 8)
        engine.train_batch(data_iter=iter([(x, torch.zeros(1))] * 4))
        engine.save_checkpoint(at)
        dist.barrier()
        if rank == 0:
            said = ""
            try:
                ds_to_universal.main(argparse.Namespace(input_folder=f"{at}/global_step1", output_folder=f"{at}.refused", num_extract_workers=1, num_merge_workers=1,
                                                        keep_temp_folder=False, strict=True, inject_missing_state=False))
            except AssertionError as e:
                said = str(e)
            with open(at + ".said", "w") as f:
                f.write(said)
            convert(at, "global_step1")
    dist.barrier()


def megatron_pipes(world, rank, port, top, names):
    """The pipelines of the plans NAME.plan."""
    import megatron_pipeline_writer
    deepspeed = start(world, rank, port)
    for name in names:
        with contextlib.redirect_stdout(None):
            megatron_pipeline_writer.write(deepspeed, world, rank, os.path.join(top, name))
