# SPDX-License-Identifier: Apache-2.0
"""view=megatron with the option optimizer: megatron-core's own distributed optimizer, on CPUs, loads it at other layouts. Its masters and moments are
those that an independent writer gives that rank; after a step with the same gradients its masters are those of torch's AdamW, bit for bit. And what that
optimizer saves is resumed by torch from view=dcp, and is what view=megatron shows."""

import os
import shutil
import sys
import unittest

try:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import torch.distributed.checkpoint as dcp
    import transformers as tf
    from torch.distributed.checkpoint.state_dict import get_state_dict

    import megatron_writer as mw
    import test_resume as torch_resume
    import test_written_megatron as written
    from states_case import MOMENTS, StatesCase, megatron_run, nanotron_run, trained
    from tensor_case import CKPT, export, ranks, read_all
    from test_written_megatron import CORES, PACKAGE
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

SIZES = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)
DEEPSPEED = [p for p in os.environ.get("CKPTFS_DEEPSPEED", "").split(":") if os.path.isdir(p)]
CONFIGS = {"llama": tf.LlamaConfig(**SIZES), "biases": tf.Qwen2Config(**SIZES),
           "moe": tf.Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8, norm_topk_prob=True)}
HYPER = dict(lr=0.25, betas=(0.75, 0.875), eps=1e-6)
SCHEDULE = ("initial_lr=0.5", "min_lr=0.0625")
MASTER = "optimizer.state.param."


def gradient(name, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(name) + sum(map(ord, name))))


def stepped(masters, groups):
    """All masters after a step of AdamW, with the numbers of Megatron's groups of matrices and of vectors."""
    out = {}
    for k, t in masters.items():
        group = groups[t.ndim == 1]
        p = torch.nn.Parameter(t.clone())
        optimizer = torch.optim.AdamW([p], **{key: group[key] for key in ("lr", "betas", "eps", "weight_decay")})
        optimizer.state[p] = {"step": torch.tensor(float(group["step"])), **{kind: of(t) for kind, of in MOMENTS.items()}}
        p.grad = gradient(k, t.shape)
        optimizer.step()
        out[k] = p.detach()
    return out


# ---- a rank of Megatron's ----

def preload():
    """Megatron's optimizers, on a machine without a GPU: they name CUDA where they make numbers, and in the names of dtypes."""
    written.preload()
    try:
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    except ImportError:
        return
    if "real" in vars(DistributedOptimizer):
        return
    # With TransformerEngine's Adam, which needs CUDA, parameters have no tensor "step"; with torch's this function looks for one in vain.
    DistributedOptimizer.real = DistributedOptimizer._set_main_param_and_optimizer_states

    def set_states(self, p, tensors):
        self.real(p, {"step": self._get_main_param_and_optimizer_states(p)["step"], **tensors})

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states
    for name in ("tensor", "zeros", "empty", "full"):
        make = getattr(torch, name)
        setattr(torch, name, lambda *a, make=make, device=None, **k: make(*a, device="cpu" if device == "cuda" else device, **k))
    torch.Tensor.cuda = lambda self, *a, **k: self
    dtype = torch.Tensor.type
    torch.Tensor.type = lambda self, *a, **k: dtype(self, *a, **k) if a or k else "torch.cuda." + dtype(self).split(".")[-1]


def one_rank(world, rank, port, *args):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    resume(*args)


def make_optimizer(model, config, distributed, initial_lr, min_lr):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=distributed, grad_reduce_in_fp32=True), model)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=initial_lr, min_lr=min_lr, weight_decay=9.0, clip_grad=0.0, bf16=config.bf16,
                                                       use_distributed_optimizer=distributed), [ddp])
    for one in optimizer.chained_optimizers:  # a step that changes nothing, as torch's AdamW has no state before
        for group in one.optimizer.param_groups:
            for p in group["params"]:
                one.optimizer.state[p] = {"step": torch.tensor(0.), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    return optimizer


def states_of(optimizer, model):
    """{kind: {name: (first, elements)}}: what this rank has of each parameter, by Megatron's own functions."""
    out = {kind: {} for kind in ("param", *MOMENTS)}
    for name, p in model.named_parameters():
        for one in optimizer.chained_optimizers:
            first = 0
            if hasattr(one, "model_param_group_index_map"):  # distributed
                if p not in one.model_param_group_index_map:
                    continue
                states, first = one._get_main_param_and_optimizer_states(p), one._get_model_param_range_map(p)["param"].start
            else:
                main = getattr(p, "main_param", p)
                if main not in one.optimizer.state:
                    continue
                states = {"param": main, **one.optimizer.state[main]}
            for kind in out:
                out[kind][name] = first, states[kind].detach().flatten().clone()
    return out


def compare(got, want, copies):
    """What ranks have is what an independent writer gives them, and together they have all: each parameter once, but that of an expert is on one rank."""
    import torch.distributed as dist
    assert set(got) <= set(want), set(got) - set(want)
    for k, (first, t) in got.items():
        assert torch.equal(t, want[k].flatten()[first:first + t.numel()]), (k, first, (t - want[k].flatten()[first:first + t.numel()]).abs().max())
    count = torch.tensor([sum(t.numel() for _, t in got.values()), sum(t.numel() / (1 if ".experts." in k else copies) for k, t in want.items())])
    dist.all_reduce(count)
    assert count[0] == count[1], count


def save(world, rank, port, path, top, tp, pp, ep):
    """A rank of a job that saves a model and a distributed optimizer, with the masters in `top`."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch.distributed as dist
    preload()
    from megatron.core import dist_checkpointing
    dist.init_process_group("gloo")
    cfg = tf.AutoConfig.from_pretrained(os.path.join(top, "hf"))
    model, config = written.gpt_model(cfg, tp, pp, ep)
    model.to(config.params_dtype)
    optimizer = make_optimizer(model, config, True, 0.5, 0.0625)
    masters = written.of_rank(read_all(os.path.join(top, "masters")), cfg, tp, pp, ep)
    parameters = dict(model.named_parameters())
    for name, p in parameters.items():
        p.data.copy_(masters[name])
    for one in optimizer.chained_optimizers:
        for name, p in parameters.items():
            if p in one.model_param_group_index_map:
                at = one._get_model_param_range_map(p)["param"]
                t = masters[name].flatten()[at.start:at.end]
                one._set_main_param_and_optimizer_states(p, {"param": t, **{kind: of(t) for kind, of in MOMENTS.items()}})
        for group in one.optimizer.param_groups:
            group.update(HYPER, weight_decay=0.125 * group["wd_mult"])
        for state in one.optimizer.state.values():
            state["step"] = torch.tensor(5.)
    metadata = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True, "singleton_local_shards": False}
    sharded = written.sharded_model(model, config)
    plan = {**written.PLAN, "centred": False, "tp": tp, "pp": pp, "ep": ep, "etp": 1 if ep > 1 else tp}
    state = {"model": sharded, "optimizer": optimizer.sharded_state_dict(sharded, is_loading=False, metadata=metadata), "iteration": 10, "checkpoint_version": 3.0,
             "args": mw.arguments(cfg, plan, cfg.tie_word_embeddings)}
    mw.without_forks()
    dist_checkpointing.save(state, path, content_metadata=metadata)
    dist.barrier()
    dist.destroy_process_group()


def resume(path, top, kind, tp, pp, ep, initial_lr, min_lr, options):
    """Load the states, compare them, and take a step. kind: of optimizer, "distributed", "float16" or "float32"; options: of ckptfs.megatron.load, or None."""
    import torch.distributed as dist
    preload()
    from megatron.core import dist_checkpointing
    dist.init_process_group("gloo")
    cfg = tf.AutoConfig.from_pretrained(os.path.join(top, "hf"))
    model, config = written.gpt_model(cfg, tp, pp, ep, torch.float32 if kind == "float32" else torch.bfloat16)
    model.to(config.params_dtype)
    optimizer = make_optimizer(model, config, kind == "distributed", initial_lr, min_lr)
    for p in model.parameters():
        p.data.fill_(7)
    sharded = written.sharded_model(model, config)
    metadata = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
    if options is None:
        load, metadata = dist_checkpointing.load, dist_checkpointing.load_content_metadata(path)
    else:
        import ckptfs.megatron
        fill, stats = ckptfs.megatron.fill_boxes, []
        ckptfs.megatron.fill_boxes = lambda *a, **k: stats.append(fill(*a, **k)) or stats[-1]
        load = lambda state, path: ckptfs.megatron.load(state, path, options=options, readers="once")  # noqa: E731
    state = {"model": sharded, "optimizer": optimizer.sharded_state_dict(sharded, is_loading=True, metadata=metadata)}
    loaded = load(state, path)
    if options:  # slices only, each byte once
        assert len(stats) == 1 and stats[0]["read_bytes"] <= 1.05 * stats[0]["unique_bytes"], stats
    model.load_state_dict(loaded["model"], strict=False)
    groups = loaded["optimizer"]
    if kind == "float32":  # which alone has them one level higher
        inner = groups["optimizer"]
        groups = {"state": {**groups["state"], **inner["state"]}, "param_groups": [{**g, **own} for g, own in zip(inner["param_groups"], groups["param_groups"])]}
    optimizer.load_state_dict(groups)

    masters = read_all(os.path.join(top, "masters"))
    rank = lambda tensors: written.of_rank(tensors, cfg, tp, pp, ep)  # noqa: E731
    got, copies = states_of(optimizer, model), dist.get_world_size() // (tp * pp)
    for state, of in {"param": lambda x: x, **MOMENTS}.items():
        want = rank({k: of(t) for k, t in masters.items()})
        compare(got[state], want, copies)
    for k, p in model.named_parameters():
        assert torch.equal(p.data, rank(masters)[k].to(p.dtype)), k

    for one in optimizer.chained_optimizers:  # where torch's Adam stands in, all have one tensor, to which each adds its step
        for state in one.optimizer.state.values():
            state["step"] = state["step"].clone()
    gradients = rank({k: gradient(k, t.shape) for k, t in masters.items()})
    for k, p in model.named_parameters():
        p.main_grad.copy_(gradients[k])
    assert optimizer.step()[0]
    want = rank(read_all(os.path.join(top, "stepped")))
    compare(states_of(optimizer, model)["param"], want, copies)
    for k, t in want.items():
        assert torch.equal(dict(model.named_parameters())[k].data, t.to(config.params_dtype)), k
    if "opt_param_scheduler" in loaded and min_lr is not None:
        check_scheduler(optimizer, loaded, initial_lr, min_lr)
    dist.barrier()
    dist.destroy_process_group()


def check_scheduler(optimizer, loaded, max_lr, min_lr):
    """Megatron's scheduler goes on where the run was if it may override what the checkpoint does not say, and else refuses it."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    numbers = dict(init_lr=0.0, max_lr=max_lr, min_lr=min_lr, lr_warmup_steps=8, lr_decay_steps=8000, lr_decay_style="cosine", start_wd=0.1, end_wd=0.1,
                   wd_incr_steps=8000, wd_incr_style="constant")
    scheduler = OptimizerParamScheduler(optimizer, **numbers, use_checkpoint_opt_param_scheduler=False, override_opt_param_scheduler=True)
    scheduler.load_state_dict(loaded["opt_param_scheduler"])
    assert scheduler.num_steps == loaded["args"].consumed_train_samples > 0
    try:
        OptimizerParamScheduler(optimizer, **numbers, use_checkpoint_opt_param_scheduler=False).load_state_dict(loaded["opt_param_scheduler"])
    except AssertionError as e:
        assert "do not match" in str(e), e
    else:
        raise AssertionError("a schedule was made up")


# ---- the tests ----

class MegatronCase(StatesCase):
    def laid_out(self, run, *options, ok=True):
        """The step of the view, and what was said."""
        out = self.path("megatron-view")
        shutil.rmtree(out, ignore_errors=True)
        done = export(run, out, "view=megatron", "optimizer", "make_vocab_size_divisible_by=8", *options)
        self.assertEqual(done.returncode == 0, ok, done.stderr)
        if not ok:
            return done.stderr
        with open(os.path.join(out, "latest_checkpointed_iteration.txt")) as f:
            return os.path.join(out, f"iter_{int(f.read()):07}"), done.stderr

    def common(self, step):
        return torch.load(os.path.join(step, "common.pt"), weights_only=False)

    def groups(self, step):
        """Those of matrices, and of vectors."""
        optimizer = self.common(step)["optimizer"]
        found = [one["optimizer"]["param_groups"] for one in ([optimizer[0], optimizer[1]] if 0 in optimizer else [optimizer])]
        for groups in found:
            self.assertEqual([g["wd_mult"] for g in groups], [1.0, 0.0])
            self.assertEqual([{k: v for k, v in g.items() if k != "is_expert_parallel"} for g in groups],
                             [{k: v for k, v in g.items() if k != "is_expert_parallel"} for g in found[0]])
        return found[0]

    def reads_back(self, step, run, masters, *options):
        """Our own reader finds the moments that the run has, and those tell whose the masters are."""
        for kind, of in MOMENTS.items():
            want, _ = self.view(run, f"state={kind}", *options)
            self.same(self.view(step, f"state={kind}", *options)[0], want, kind)
            self.same({k: of(t) for k, t in masters.items()}, want, kind)

    def is_cut_alike(self, step, masters):
        """The states of a parameter are stored as it is."""
        metadata = dcp.FileSystemReader(step).read_metadata().state_dict_metadata
        weights = {k: m for k, m in metadata.items() if hasattr(m, "chunks") and not k.startswith("optimizer.")}
        for kind in ("param", *MOMENTS):
            self.assertEqual({k.split(".", 3)[3]: (m.size, m.chunks) for k, m in metadata.items() if k.startswith(f"optimizer.state.{kind}.")},
                             {k: (m.size, m.chunks) for k, m in weights.items()})
            self.assertEqual({m.properties.dtype for k, m in metadata.items() if k.startswith("optimizer.state.")}, {torch.float32})

    def prepare(self, step):
        """What ranks compare: the model, its masters, and these after a step."""
        from safetensors.torch import save_file
        for name in ("hf", "masters", "stepped"):
            shutil.rmtree(self.path(name), ignore_errors=True)
            os.makedirs(self.path(name))
        done = export(step, self.path("hf"))
        self.assertEqual(done.returncode, 0, done.stderr)
        masters, _ = self.view(step, "state=master")
        self.is_cut_alike(step, masters)
        save_file(masters, self.path("masters", "model.safetensors"))
        save_file(stepped(masters, self.groups(step)), self.path("stepped", "model.safetensors"))
        return masters

    def ranks(self, path, kind, tp, pp, ep, options=None, initial_lr=0.5, min_lr=0.0625, core=-1):
        if not CORES:
            self.skipTest("CKPTFS_MEGATRON names no megatron-core")
        try:
            ranks.run(max(tp, ep) * pp, "test_resume_megatron", "one_rank", ranks.free_port(), path, self.tmp, kind, tp, pp, ep, initial_lr, min_lr, options,
                      folder=self.tmp, timeout=500, PYTHONPATH=f"{CORES[core]}:{PACKAGE}", OMP_NUM_THREADS="1",
                      CKPTFS_LIBRARY_PATH=os.path.join(os.path.dirname(CKPT), "..", "core"))
        except AssertionError as e:
            self.fail(f"{os.path.basename(CORES[core])}, {kind}, tp {tp}, pp {pp}, ep {ep}: {e}")

    def tensors(self, step):
        metadata = dcp.FileSystemReader(step).read_metadata().state_dict_metadata
        whole = {k: torch.empty(m.size, dtype=m.properties.dtype) for k, m in metadata.items() if hasattr(m, "chunks") and m.size.numel()}
        dcp.load(whole, checkpoint_id=step, no_dist=True)
        return whole

    def torch_run(self, name, step=1, decay=0.1, **more):
        """A run of torch's, whose masters are its weights."""
        model, optimizer = trained(CONFIGS[name], frozen=False)
        for group in optimizer.param_groups:
            group.update(HYPER, **more)
        optimizer.param_groups[0]["weight_decay"] = decay
        for state in optimizer.state.values():
            state["step"] = torch.tensor(float(step))
        model.save_pretrained(self.path(name))
        own, optim = get_state_dict(model, optimizer)
        dcp.save({"model": own, "optim": optim}, checkpoint_id=self.path(name + "-run"), no_dist=True)
        return self.path(name + "-run"), "base=" + self.path(name)


class ResumeMegatron(MegatronCase):
    def test_torch(self):
        """A dense model: at another layout than it is laid out for; and its states, read back."""
        run, base = self.torch_run("llama")
        step, said = self.laid_out(run, base, "dtype=bfloat16", "tp=2", "pp=2", *SCHEDULE)
        self.assertIn("there is no opt_param_scheduler, on which Megatron-LM's scripts insist: give global_batch_size=N", said)
        self.assertNotIn("opt_param_scheduler", self.common(step))
        step, said = self.laid_out(run, base, "dtype=bfloat16", "tp=2", "pp=2", "global_batch_size=4", *SCHEDULE)
        self.assertNotIn("opt_param_scheduler", said)
        self.assertEqual(self.common(step)["opt_param_scheduler"]["num_steps"], 4)
        self.assertIn("the states of schedulers, random numbers and data loaders are not in this view", said)
        masters = self.prepare(step)
        self.reads_back(step, run, masters, base)
        matrices, vectors = self.groups(step)
        self.assertEqual({k: matrices[k] for k in (*HYPER, "weight_decay", "max_lr", "min_lr", "step")},
                         {**HYPER, "weight_decay": 0.1, "max_lr": 0.5, "min_lr": 0.0625, "step": 1})
        self.assertEqual(vectors["weight_decay"], 0.0)
        args = self.common(step)["args"]
        self.assertEqual((args.params_dtype, args.bf16, args.no_save_rng), (torch.bfloat16, True, True))
        for layout in ((1, 1, 1), (2, 1, 1), (1, 2, 1)):
            self.ranks(step, "distributed", *layout)
        self.ranks(step, "distributed", 2, 1, 1, core=0)

    def test_without_a_view(self):
        """ckptfs.megatron.load of the run itself, also into optimizers that are not distributed."""
        run, base = self.torch_run("biases")
        step, _ = self.laid_out(run, base, "dtype=bfloat16", *SCHEDULE)
        self.prepare(step)
        options = {"base": self.path("biases"), "dtype": "bfloat16", "make_vocab_size_divisible_by": 8, "initial_lr": 0.5, "min_lr": 0.0625}
        for kind, layout in (("distributed", (2, 2, 1)), ("float16", (2, 1, 1)), ("float32", (1, 1, 1))):
            self.ranks(run, kind, *layout, options | ({"dtype": "float32"} if kind == "float32" else {}))

    def test_experts(self):
        """Experts that other ranks share than the rest of the model have an optimizer of their own."""
        run, base = self.torch_run("moe")
        step, _ = self.laid_out(run, base, "dtype=bfloat16", "ep=2", *SCHEDULE)
        self.assertEqual([one["optimizer"]["param_groups"][0]["is_expert_parallel"] for one in (self.common(step)["optimizer"][i] for i in range(2))], [False, True])
        masters = self.prepare(step)
        self.reads_back(step, run, masters, base)
        self.ranks(step, "distributed", 1, 1, 2)
        step, _ = self.laid_out(run, base, "dtype=bfloat16", *SCHEDULE)
        self.ranks(step, "distributed", 1, 2, 1)

    def test_megatron(self):
        """Megatron's own run, whose masters are not its weights."""
        megatron_run(self.path("run"))
        run = self.path("run", "iter_0000010")
        step, said = self.laid_out(self.path("run"), "tp=2", "pp=4")
        for kind, stored in (("param", "fp32_param"), *((k, k) for k in MOMENTS), (None, None)):
            want, got = ({k: t for k, t in self.tensors(path).items() if k.startswith("optimizer.state." + word + ".") or (not word and not k.startswith("optimizer."))}
                         for path, word in ((run, stored or ""), (step, kind or "")))
            self.same({k.replace("optimizer.state.fp32_param.", MASTER): t for k, t in want.items()}, got)
        own = torch.load(os.path.join(run, "common.pt"), weights_only=False, pickle_module=torch_resume.WithoutMegatron)["optimizer"]["optimizer"]
        for group, want in zip(self.groups(step), own["param_groups"]):
            self.assertEqual(group, {**want, "bias_correction": True, "step": 1})
        self.prepare(step)
        self.ranks(step, "distributed", 2, 1, 1, initial_lr=0.0, min_lr=None)
        # Two groups of matrices that differ (--decoupled-lr), of which nothing says what they have.
        common = torch.load(os.path.join(run, "common.pt"), weights_only=False, pickle_module=torch_resume.WithoutMegatron)
        groups = common["optimizer"]["optimizer"]["param_groups"]
        groups.append({**groups[0], "lr": 9.0, "is_decoupled_lr": True})
        torch.save({"iteration": 10, "args": mw.arguments(tf.AutoConfig.from_pretrained(self.path("hf")), {**written.PLAN, "centred": False, "tp": 2, "pp": 1, "ep": 1}, True),
                    "optimizer": common["optimizer"]}, os.path.join(run, "common.pt"))
        self.assertIn("the run has 2 groups of parameters, and nothing says to which '", self.laid_out(self.path("run"), ok=False))
        step, _ = self.laid_out(self.path("run"), "lr=0.5")
        self.assertEqual([g["lr"] for g in self.groups(step)], [0.5, 0.5])

    def test_nanotron(self):
        run = self.path("nanotron")
        nanotron_run(run, lr=0.25)
        step, _ = self.laid_out(run, "tp=2", "min_lr=0.0625")
        masters = self.prepare(step)
        self.reads_back(step, run, masters)
        self.assertEqual([(g["step"], g["max_lr"]) for g in self.groups(step)], [(7, 0.0003)] * 2)
        self.ranks(step, "distributed", 2, 1, 1, initial_lr=0.0003)

    @unittest.skipUnless(DEEPSPEED, "CKPTFS_DEEPSPEED has no folder with deepspeed")
    def test_deepspeed(self):
        ranks.run(3, "deepspeed_writer", "groups", ranks.free_port(), self.tmp, [3], folder=self.tmp, PYTHONPATH=DEEPSPEED[-1])
        run, base = self.path("groups3", "global_step2"), "base=" + self.path("groups3-base")
        step, _ = self.laid_out(run, base, *SCHEDULE)
        want = torch.load(self.path("groups3.want"))
        masters = self.prepare(step)
        self.same(masters, want["masters"])
        for kind in MOMENTS:
            self.same(self.view(step, f"state={kind}", base)[0], {k: want["moments"][f"optim.state.{k}.{kind}"] for k in masters})
        self.assertEqual([(g["step"], g["weight_decay"], g["lr"]) for g in self.groups(step)], [(2, 0.125, 0.0078125), (2, 0.0, 0.0078125)])

    def test_faults(self):
        run, base = self.torch_run("llama")
        for missing, text in (("initial_lr", "give it with the option initial_lr=X"), ("min_lr", "give it with the option min_lr=X")):
            self.assertIn(text, self.laid_out(run, base, *(o for o in SCHEDULE if not o.startswith(missing)), ok=False))
        model, optimizer = trained(CONFIGS["llama"], frozen=False)
        own, optim = get_state_dict(model, optimizer)

        def saved(name, change):
            state = {k: dict(v) for k, v in optim["state"].items()}
            groups = [{**g, **HYPER, "params": list(g["params"])} for g in optim["param_groups"]]
            change(state, groups)
            dcp.save({"model": own, "optim": {"state": state, "param_groups": groups}}, checkpoint_id=self.path(name), no_dist=True)
            return self.path(name), base, *SCHEDULE

        first, second = "model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.down_proj.weight"
        steps = saved("steps", lambda state, groups: state[second].update(step=torch.tensor(3.)))
        said = self.laid_out(*steps, ok=False)
        self.assertIn("steps, and '", said)
        self.assertIn("but view=megatron has one number for all: give it with optimizer_step=N", said)
        step, _ = self.laid_out(*steps, "optimizer_step=4")
        self.assertEqual(self.groups(step)[0]["step"], 4)
        endless = saved("endless", lambda state, groups: [s.update(step=torch.tensor(1e30)) for s in state.values()])
        self.assertIn("which is no number of steps: give it with optimizer_step=N", self.laid_out(*endless, ok=False))
        frozen = saved("frozen", lambda state, groups: (state.pop(first), groups[0]["params"].remove(first)))
        self.assertIn("1 parts of 'decoder.layers.mlp.linear_fc2.weight' have a state, and 1 have none", self.laid_out(*frozen, ok=False))

        def apart(state, groups):
            groups[0]["params"].remove(first)
            groups.append({**groups[0], "params": [first], "lr": 1.0})

        self.assertIn("in one group of parameters, but the run in two that differ: give numbers for all", self.laid_out(*saved("apart", apart), ok=False))
        step, _ = self.laid_out(*saved("apart", apart), "lr=0.25")
        one = saved("one", lambda state, groups: (groups[0]["params"].extend(groups.pop()["params"])))
        step, said = self.laid_out(*one)
        self.assertIn("the run has the weight decay 0.1 for 'decoder.", said)
        self.assertEqual([g["weight_decay"] for g in self.groups(step)], [0.1, 0.1])
        self.assertIn("option min_lr: it goes with the option optimizer", self.refused(run, "min_lr=1", base))
        self.assertIn("option global_batch_size: it goes with the option optimizer", self.refused(run, "view=megatron", "global_batch_size=1", base))
        self.assertIn("option dequantize: with optimizer", self.laid_out(run, base, "dequantize", ok=False))


@unittest.skipUnless(CORES, "CKPTFS_MEGATRON names no megatron-core")
class FromMegatron(MegatronCase, torch_resume.Resume):
    """From what megatron-core saves of its distributed optimizer."""

    def saved(self, name, tp, pp, ep):
        """Its run; one of torch's that holds the same; and the base."""
        from safetensors.torch import save_file
        torch_run, base = self.torch_run(name, step=5, decay=0.125, initial_lr=0.5)
        for folder in ("hf", "masters"):
            os.makedirs(self.path(folder))
        CONFIGS[name].save_pretrained(self.path("hf"))
        save_file({k: t.clone() for k, t in read_all(self.path(name)).items()}, self.path("masters", "model.safetensors"))
        step = self.path("run", "iter_0000010")
        os.makedirs(step)
        try:
            ranks.run(max(tp, ep) * pp, "test_resume_megatron", "save", ranks.free_port(), step, self.tmp, tp, pp, ep, folder=self.tmp, timeout=500,
                      PYTHONPATH=f"{CORES[-1]}:{PACKAGE}", OMP_NUM_THREADS="1")
        except AssertionError as e:
            self.fail(f"{os.path.basename(CORES[-1])} saves tp {tp}, pp {pp}, ep {ep}: {e}")
        return step, torch_run, base

    def is_resumed(self, name, *layout):
        step, torch_run, base = self.saved(name, *layout)
        # Megatron's own: keys, boxes, bytes and groups.
        own, _ = self.laid_out(step, *(f"{k}={n}" for k, n in zip(("tp", "pp", "ep"), layout) if n > 1))
        want, got = (dcp.FileSystemReader(p).read_metadata().state_dict_metadata for p in (step, own))
        boxes = lambda m: (m.size, sorted((c.offsets, c.sizes) for c in m.chunks))  # noqa: E731
        self.assertEqual(*({k: boxes(m) for k, m in of.items() if k.startswith("optimizer.")} for of in (got, want)))
        self.same({k: t for k, t in self.tensors(own).items() if "optimizer." in k}, {k: t for k, t in self.tensors(step).items() if "optimizer." in k})
        # Torch's and torchtitan's: what they are of a run that holds the same.
        for form in ("dcp", "torchtitan"):
            views = [self.read(os.path.join(self.resumable(run, base, form=form)[0], *(os.listdir(self.path("view-" + form)) if form == "torchtitan" else ())))
                     for run in (step, torch_run)]
            self.assertEqual(*(sorted(v) for v in views))
            for k, t in views[1].items():
                if isinstance(t, torch.Tensor):
                    self.assertTrue(torch.equal(views[0][k], t), k)
                elif k.endswith(".params"):
                    self.assertEqual(sorted(views[0][k]), sorted(t))
                else:
                    self.assertEqual(views[0][k], t, k)
        after = []
        for run in (step, torch_run):
            view, _ = self.resumable(run, "base=" + self.path("hf"), "names=memory")
            model, _ = torch_resume.blank(CONFIGS[name])
            model.requires_grad_(True)
            optimizer = torch_resume.optimizer_of(model)
            torch_resume.resume(model, optimizer, view)
            self.assertEqual([g["weight_decay"] for g in optimizer.param_groups], [0.125, 0.0])
            after.append(torch_resume.go_on(model, optimizer))
        self.same(*after)

    def test_tp_and_pp(self):
        self.is_resumed("llama", 2, 2, 1)

    def test_experts_and_pp(self):
        self.is_resumed("moe", 1, 2, 2)


if __name__ == "__main__":
    unittest.main()
