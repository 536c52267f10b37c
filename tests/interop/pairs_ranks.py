# SPDX-License-Identifier: Apache-2.0
"""What test_pairs.py and its ranks share: the models, three real steps of AdamW, one more with gradients that follow from the parameters' names, and what a
framework has then, under the names that Hugging Face's model has in memory; and the ranks of FSDP2, megatron-core and DeepSpeed, as sources and as targets."""

import contextlib
import importlib.util
import json
import os
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers as tf
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

tf.utils.logging.disable_progress_bar()
tf.utils.logging.set_verbosity_error()
SIZES = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, tie_word_embeddings=False)
CONFIGS = {"llama": tf.LlamaConfig(**SIZES),
           "tied": tf.LlamaConfig(**(SIZES | {"tie_word_embeddings": True})),
           "moe": tf.Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True)}
KINDS = ("exp_avg", "exp_avg_sq")
STEPS = 3
HYPER = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
DECAYS = (0.1, 0.0)  # of matrices, and of vectors


def batch(step):
    return torch.randint(0, SIZES["vocab_size"], (2, 16), generator=torch.Generator().manual_seed(100 + step))


def gradient(name, shape):
    """In F32. DeepSpeed accumulates gradients in 16 bits, so the numbers have few digits: they are the same everywhere."""
    g = torch.Generator().manual_seed(len(name) + sum(map(ord, name)))
    return torch.randint(-31, 32, shape, generator=g) / 1024


def fresh(name, seed=1):
    torch.manual_seed(seed)
    return tf.AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)


def make_groups(parameters, wide):
    """wide: a group of matrices, and one of vectors, without a weight decay; else one group."""
    parameters = list(parameters)
    if not wide:
        return [{"params": parameters, "weight_decay": DECAYS[0]}]
    return [{"params": [p for p in parameters if (p.ndim > 1) == matrices], "weight_decay": DECAYS[not matrices]} for matrices in (True, False)]


def make_adamw(model, wide, known=True):
    """known: with the numbers of the run; else with others, which the checkpoint has to replace."""
    groups = make_groups(model.parameters(), wide)
    if known:
        return torch.optim.AdamW(groups, **HYPER)
    return torch.optim.AdamW([{**g, "weight_decay": 0.5} for g in groups], lr=9.0, betas=(0.5, 0.5), eps=1.0)


def loss_of(model, step):
    ids = batch(step)
    return model(input_ids=ids, labels=ids).loss


def train(model, optimizer, on_gradients=lambda step: None):
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        on_gradients(step)
        optimizer.step()


def whole(t):
    return (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()


def states_of(model, optimizer):
    named = dict(model.named_parameters())
    return {"master": {k: whole(p) for k, p in named.items()}, **{kind: {k: whole(optimizer.state[p][kind]) for k, p in named.items()} for kind in KINDS}}


def set_gradients(model, of=gradient):
    for name, p in model.named_parameters():
        p.grad = of(name, p.shape)
        if hasattr(p, "device_mesh"):
            from torch.distributed.tensor import distribute_tensor
            p.grad = distribute_tensor(p.grad, p.device_mesh, p.placements)


def go_on(model, optimizer, of=gradient):
    """What a model has, and what the fourth step makes of it: {"states", "after", "losses": those of the fourth batch and, after the step, of the fifth}."""
    held = {"states": states_of(model, optimizer), "groups": [{k: g[k] for k in (*HYPER, "weight_decay")} for g in optimizer.param_groups],
            "steps": sorted({float(s["step"]) for s in optimizer.state.values()})}
    loss = loss_of(model, STEPS)
    loss.backward()  # after which FSDP2 has its shards again
    set_gradients(model, of)
    optimizer.step()
    held["after"] = states_of(model, optimizer)
    with torch.no_grad():
        return held | {"losses": [float(loss), float(loss_of(model, STEPS + 1))]}


def hub(name, tensors):
    """Tensors under the names that the hub has, which are others than in memory for experts, as transformers itself writes them."""
    model = fresh(name)
    model.load_state_dict(tensors, strict=not CONFIGS[name].tie_word_embeddings)
    with tempfile.TemporaryDirectory() as tmp:
        model.save_pretrained(tmp)
        return load_file(os.path.join(tmp, "model.safetensors"))


# ---- torch: FSDP2 ----

def fsdp2_model(name, seed):
    from torch.distributed.fsdp import fully_shard
    model = fresh(name, seed)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def meet(top, rank, world):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + os.path.join(top, "meet"), rank=rank, world_size=world)


def fsdp2_source(world, rank, top, names):
    meet(top, rank, world)
    for name in names:
        model = fsdp2_model(name, 1)
        optimizer = make_adamw(model, True)
        train(model, optimizer)
        own, optim = get_state_dict(model, optimizer)
        dcp.save({"model": own, "optim": optim}, checkpoint_id=os.path.join(top, f"fsdp2-{name}"))
        held = go_on(model, optimizer)
        if rank == 0:
            torch.save(held, os.path.join(top, f"fsdp2-{name}.want"))
    dist.barrier()
    dist.destroy_process_group()


def fsdp2_target(world, rank, top, views):
    """views: {name of the result: [view, model, groups are wide]}"""
    meet(top, rank, world)
    for result, (view, name, wide) in views.items():
        model = fsdp2_model(name, 2)
        optimizer = make_adamw(model, wide, known=False)
        own, optim = get_state_dict(model, optimizer)
        dcp.load({"model": own, "optim": optim}, checkpoint_id=view)
        set_state_dict(model, optimizer, model_state_dict=own, optim_state_dict=optim)
        held = go_on(model, optimizer)
        if rank == 0:
            torch.save(held, result)
    dist.barrier()
    dist.destroy_process_group()


# ---- DeepSpeed ----

def preload():
    """What the framework takes seconds to import, once for all ranks: the one that is on the path."""
    if importlib.util.find_spec("deepspeed"):
        import deepspeed_writer
        deepspeed_writer.preload()
    elif importlib.util.find_spec("megatron"):
        import test_resume_megatron
        test_resume_megatron.preload()


def deepspeed_engine(deepspeed, name, stage, wide, known, tp=1, **more):
    """tp: tensor-parallel ranks, to which DeepSpeed's AutoTP divides the model."""
    import deepspeed_writer as dw
    model = fresh(name, 1 if known else 2)
    if tp > 1:
        model, more = deepspeed.tp_model_init(model, tp_size=tp, dtype=torch.bfloat16), more | {"tensor_parallel": {"autotp_size": tp}}
    plan = {"stage": stage, "dtype": "bf16", "round_robin": False, "sub_group": 10**9, "persist": 0, "align": False}
    config = dw.config_of(plan) | {"gradient_clipping": 0.0} | more
    return deepspeed.initialize(model=model, optimizer=make_adamw(model, wide, known), config=config)[0]


def part_of(t, shape, rank, ranks):
    """The part of a tensor that a tensor-parallel rank has in this shape; t itself if it is not divided."""
    divided = [d for d in range(t.ndim) if t.shape[d] != shape[d]]
    assert len(divided) < 2 and all(t.shape[d] == ranks * shape[d] for d in divided), (t.shape, shape)
    return t.chunk(ranks, divided[0])[rank] if divided else t


def set_deepspeed_gradients(engine, name, rank, ranks):
    """Of the fourth step, in place of those that a backward has made."""
    from deepspeed.utils import safe_set_full_grad
    gradients = {k: gradient(k, p.shape) for k, p in fresh(name).named_parameters()}
    for k, p in engine.module.named_parameters():
        if hasattr(p, "ds_id"):  # of ZeRO 3, whose last rank has less than others
            g = part_of(gradients[k], p.ds_shape, rank, ranks).flatten()
            p._z3_optimizer.set_fp32_grad_for_param(torch.nn.functional.pad(g, (0, dist.get_world_size())), p)
        else:
            safe_set_full_grad(p, part_of(gradients[k], p.shape, rank, ranks))


def deepspeed_goes_on(engine, name, rank=0, ranks=1):
    """rank: among the tensor-parallel ranks, of which each tells its part."""
    import deepspeed_writer as dw

    def states():
        masters, moments = dw.live_states(engine)
        return {"master": masters, **{kind: {k: moments[f"optim.state.{k}.{kind}"] for k in masters} for kind in KINDS}}

    inner = engine.optimizer.optimizer
    held = {"states": states(), "groups": [{k: g[k] for k in (*HYPER, "weight_decay")} for g in inner.param_groups],
            "steps": sorted({float(s["step"]) for s in inner.state.values() if s})}
    loss = loss_of(engine, STEPS)
    engine.backward(loss)
    set_deepspeed_gradients(engine, name, rank, ranks)
    engine.step()
    held["after"] = states()
    with torch.no_grad():
        return held | {"losses": [float(loss), float(loss_of(engine, STEPS + 1))]}


def deepspeed_source(world, rank, port, top, names):
    import deepspeed_writer as dw
    deepspeed = dw.start(world, rank, port)
    for name in names:
        with contextlib.redirect_stdout(None):
            engine = deepspeed_engine(deepspeed, name, 3, True, True)
            for step in range(STEPS):
                engine.backward(loss_of(engine, step))
                engine.step()
            engine.save_checkpoint(os.path.join(top, f"deepspeed-{name}"))
        held = deepspeed_goes_on(engine, name)
        if rank == 0:
            torch.save(held, os.path.join(top, f"deepspeed-{name}.want"))
        dist.barrier()
        engine.destroy()


def deepspeed_target(world, rank, port, views):
    import deepspeed_writer as dw
    deepspeed = dw.start(world, rank, port)
    for result, (view, name, wide) in views.items():
        with contextlib.redirect_stdout(None):
            engine = deepspeed_engine(deepspeed, name, 2, wide, False, checkpoint={"load_universal": True})
            engine.load_checkpoint(view)
        held = deepspeed_goes_on(engine, name)
        if rank == 0:
            torch.save(held, result)
        dist.barrier()
        engine.destroy()


def deepspeed_parallel(world, rank, port, result, view, name, wanted, stages, tp):
    """Engines that AutoTP divides load the view of a run with one group of parameters. What each rank has is compared here: its part, bit for bit."""
    import deepspeed_writer as dw
    deepspeed, want, losses = dw.start(world, rank, port), torch.load(wanted), []
    from deepspeed.utils import groups
    for stage in stages:
        with contextlib.redirect_stdout(None):
            engine = deepspeed_engine(deepspeed, name, stage, False, False, tp, checkpoint={"load_universal": True})
            engine.load_checkpoint(view)
        own = groups.get_tensor_model_parallel_rank()
        got = deepspeed_goes_on(engine, name, own, tp)
        divided = set()
        for at in ("states", "after"):
            for kind, tensors in want[at].items():
                assert set(got[at][kind]) == set(tensors)
                for k, t in got[at][kind].items():
                    assert torch.equal(t, part_of(tensors[k], t.shape, own, tp)), (stage, at, kind, k)
                    divided |= {d for d in range(t.ndim) if t.shape[d] != tensors[k].shape[d]}
        assert divided == {0, 1}, divided  # columns and rows
        losses.append(got["losses"])
        dist.barrier()
        engine.destroy()
    if rank == 0:
        with open(result, "w") as f:
            json.dump(losses, f)


# ---- Megatron ----

MASTERS = {"param": "master", **{kind: kind for kind in KINDS}}


def megatron_model(name, layout, dtype=torch.bfloat16):
    """This rank's model, its optimizer, and a function that gives its part of tensors under the hub's names."""
    import test_resume_megatron as resume
    import test_written_megatron as written
    from megatron.core import parallel_state
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    model, config = written.gpt_model(CONFIGS[name], *layout, dtype, "allgather")
    model.to(dtype)
    optimizer = resume.make_optimizer(model, config, True, 0.5, 0.0625)
    return model, config, optimizer, lambda tensors: written.of_rank(tensors, CONFIGS[name], *layout)


def megatron_start(world, rank, port):
    import test_resume_megatron as resume
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    resume.preload()
    dist.init_process_group("gloo")


def megatron_step(model, optimizer, gradients):
    for k, p in model.named_parameters():
        p.main_grad.copy_(gradients[k])
    assert optimizer.step()[0]


def compare_megatron(model, optimizer, want, rank, copies):
    """What this rank's optimizer has is its part of these states, bit for bit."""
    import test_resume_megatron as resume
    got = resume.states_of(optimizer, model)
    for kind, of in MASTERS.items():
        resume.compare(got[kind], rank(want[of]), copies)


def megatron_source(world, rank, port, top, name, layout):
    """Megatron's own distributed optimizer takes the three steps with the gradients that Hugging Face's model had, and saves."""
    import megatron_writer as mw
    import test_written_megatron as written
    megatron_start(world, rank, port)
    from megatron.core import dist_checkpointing
    model, config, optimizer, part = megatron_model(name, layout)
    held = torch.load(os.path.join(top, f"{name}.hub"))
    parameters, start = dict(model.named_parameters()), part(held["start"])
    for one in optimizer.chained_optimizers:
        for k, p in parameters.items():
            p.data.copy_(start[k])
            if p in one.model_param_group_index_map:
                at = one._get_model_param_range_map(p)["param"]
                t = start[k].flatten()[at.start:at.end]
                one._set_main_param_and_optimizer_states(p, {"param": t, **{kind: torch.zeros_like(t) for kind in KINDS}})
        for group in one.optimizer.param_groups:
            group.update(HYPER, weight_decay=DECAYS[0] * group["wd_mult"])
        for state in one.optimizer.state.values():
            state["step"] = torch.tensor(0.)
    for gradients in held["gradients"]:
        megatron_step(model, optimizer, part(gradients))
    copies = world // (layout[0] * layout[1])
    compare_megatron(model, optimizer, held["states"], part, copies)
    metadata = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True, "singleton_local_shards": False}
    sharded = written.sharded_model(model, config)
    tp, pp, ep = layout
    plan = {**written.PLAN, "centred": False, "tp": tp, "pp": pp, "ep": ep, "etp": 1 if ep > 1 else tp}
    state = {"model": sharded, "optimizer": optimizer.sharded_state_dict(sharded, is_loading=False, metadata=metadata), "iteration": STEPS,
             "checkpoint_version": 3.0, "args": mw.arguments(CONFIGS[name], plan, CONFIGS[name].tie_word_embeddings)}
    mw.without_forks()
    dist_checkpointing.save(state, os.path.join(top, f"megatron-{name}", f"iter_{STEPS:07}"), content_metadata=metadata)
    megatron_step(model, optimizer, part(held["gradient"]))
    compare_megatron(model, optimizer, held["after"], part, copies)
    dist.barrier()
    dist.destroy_process_group()


def megatron_loss(model, step):
    """The loss of this batch, on all ranks."""
    ids = batch(step)
    tokens, labels = ids[:, :-1], ids[:, 1:]
    at = torch.arange(tokens.shape[1])
    with torch.no_grad():
        each = model.eval()(tokens, at[None].expand_as(tokens), (at[None, :] > at[:, None])[None, None], labels=labels)
    return float(each.float().mean())


def megatron_target(world, rank, port, views, layout):
    """views: {name of the result: [view's step, model, what is wanted]}. The states are compared here, and the losses are told."""
    import test_written_megatron as written
    megatron_start(world, rank, port)
    from megatron.core import dist_checkpointing, tensor_parallel
    tracker = type("Tracker", (), {"fork": lambda self, *_: contextlib.nullcontext()})()
    tensor_parallel.get_cuda_rng_tracker = lambda *_: tracker
    copies = world // (layout[0] * layout[1])
    for result, (view, name, wanted) in views.items():
        held = torch.load(wanted)
        model, config, optimizer, part = megatron_model(name, layout)
        for p in model.parameters():
            p.data.fill_(7)
        sharded = written.sharded_model(model, config)
        metadata = dist_checkpointing.load_content_metadata(view)
        state = {"model": sharded, "optimizer": optimizer.sharded_state_dict(sharded, is_loading=True, metadata=metadata)}
        loaded = dist_checkpointing.load(state, view)
        model.load_state_dict(loaded["model"], strict=False)
        optimizer.load_state_dict(loaded["optimizer"])
        compare_megatron(model, optimizer, held["states"], part, copies)
        groups = [{k: g[k] for k in (*HYPER, "weight_decay", "step")} for one in optimizer.chained_optimizers for g in one.optimizer.param_groups]
        for one in optimizer.chained_optimizers:  # where torch's Adam stands in, all have one tensor, to which each adds its step
            for s in one.optimizer.state.values():
                s["step"] = s["step"].clone()
        losses = [megatron_loss(model, STEPS)]
        megatron_step(model, optimizer, part(held["gradient"]))
        compare_megatron(model, optimizer, held["after"], part, copies)
        losses.append(megatron_loss(model, STEPS + 1))
        if rank == 0:
            with open(result, "w") as f:
                json.dump({"losses": losses, "groups": groups}, f)
    dist.barrier()
    dist.destroy_process_group()
