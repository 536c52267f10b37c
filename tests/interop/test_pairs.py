# SPDX-License-Identifier: Apache-2.0
"""A run goes on in another framework: three real steps in one, an export with the option optimizer, and a fourth step after the other's own loader.
Every source is resumed by every target: a tiny Llama, one with tied embeddings but from torchtitan, and a tiny Qwen3-MoE but from nanotron.

    source      FSDP2 on 2 ranks; torchtitan, also with fuse_qkv; Megatron's distributed optimizer, TP 2 x PP 2 (tied: TP 2 x DP 2; with experts: PP 2 x EP 2); DeepSpeed,
                ZeRO 3 on 3 ranks; nanotron, TP 2
    target      view=dcp: dcp.load and set_state_dict on FSDP2's 2 ranks; view=torchtitan, also with fuse_qkv; view=megatron: dist_checkpointing.load into Megatron's distributed
                optimizer, TP 2 (tied: one rank; with experts: EP 2); view=deepspeed_universal: an engine's load_checkpoint, ZeRO 2 on 2 ranks

Masters and moments are the source's, element for element. Then both take a step with the same gradients, and have the same masters and moments, bit for
bit: all of them compute AdamW as torch does. The losses of the batch before that step and of the next one after it agree to 1e-3, where one computes in
F32 and the other in BF16.

FSDP2 and DeepSpeed are real: they train the model and save. torchtitan is not installed: parameters with its names and shapes train, which compute by
Hugging Face's model, and are saved and loaded as its CheckpointManager does, which is torch's dcp with the optimizer's state dict flattened. Megatron's
optimizer is real, but its gradients are those of Hugging Face's model; the loss of its own model is that of a target. nanotron's files are a writer's."""

import json
import os
import shutil
import sys
import tempfile
import unittest

try:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

    import nanotron_writer as nt
    import pairs_ranks as pairs
    from pairs_ranks import CONFIGS, DECAYS, HYPER, KINDS, SIZES, STEPS
    from tensor_case import CKPT, TensorCase, export, fuse_qkv, ranks
    from test_nanotron import nt_config
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "contrib", "python"))
os.environ.setdefault("CKPTFS_LIBRARY_PATH", os.path.join(os.path.dirname(os.path.abspath(CKPT)), "..", "core"))
from ckptfs.torch import StorageReader

DEEPSPEED = [p for p in os.environ.get("CKPTFS_DEEPSPEED", "").split(":") if os.path.isdir(p)]
CORES = [p for p in os.environ.get("CKPTFS_MEGATRON", "").split(":") if os.path.isdir(p)]
SOURCES = [("fsdp2", "llama"), ("fsdp2", "moe"), ("fsdp2", "tied"), ("torchtitan", "llama"), ("torchtitan", "moe"), ("torchtitan_fused", "llama"),
           ("torchtitan_fused", "moe"), ("nanotron", "llama"), ("nanotron", "tied")]
SOURCES += [("megatron", "llama"), ("megatron", "moe"), ("megatron", "tied")] if CORES else []
SOURCES += [("deepspeed", "llama"), ("deepspeed", "moe"), ("deepspeed", "tied")] if DEEPSPEED else []
WIDE = {"nanotron": False}  # sources whose optimizer has one group of parameters
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
SCHEDULE = ("initial_lr=0.5", "min_lr=0.0625")  # by which Megatron finds a group of parameters


# ---- torchtitan ----

def titan(tensors, fused=False):
    """Tensors under torchtitan's names, by the tables of its state dict adapters. fused: q, k and v are one parameter, head by head of k, as they are in
    memory, and so in the optimizer's state, with fuse_qkv; torchtitan divides the weights when it saves them."""
    out = {}
    moe = any("experts" in k for k in tensors)
    renamed = {"input_layernorm.weight": "attention_norm.weight", "post_attention_layernorm.weight": "ffn_norm.weight", "self_attn.o_proj.weight": "attention.wo.weight",
               "self_attn.q_norm.weight": "attention.q_norm.weight", "self_attn.k_norm.weight": "attention.k_norm.weight", "mlp.gate.weight": "moe.router.gate.weight",
               "mlp.gate_proj.weight": "feed_forward.w1.weight", "mlp.up_proj.weight": "feed_forward.w3.weight", "mlp.down_proj.weight": "feed_forward.w2.weight"}
    experts = "moe.routed_experts.inner_experts."
    for name, t in tensors.items():
        if not name.startswith("model.layers."):
            out[name.removeprefix("model.").replace("embed_tokens", "tok_embeddings")] = t
            continue
        _, _, layer, leaf = name.split(".", 3)
        at = f"layers.{layer}."
        if leaf == "mlp.experts.gate_up_proj":
            out[at + experts + "w1_EFD"], out[at + experts + "w3_EFD"] = (half.contiguous() for half in t.chunk(2, dim=1))
        elif leaf == "mlp.experts.down_proj":
            out[at + experts + "w2_EDF"] = t
        elif leaf in ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"):
            which = leaf[len("self_attn."):][0]
            if not moe and which in "qk":  # Llama's rows of rotary halves as rows of rotary pairs
                heads = SIZES["num_attention_heads" if which == "q" else "num_key_value_heads"]
                t = t.reshape(heads, 2, -1, t.shape[1]).transpose(1, 2).reshape(t.shape)
            out[f"{at}attention.qkv_linear.w{which}.weight"] = t
        else:
            out[at + renamed[leaf]] = t
    return fuse(out) if fused else out


def fuse(tensors):
    return fuse_qkv(tensors, SIZES["num_key_value_heads"])


class Titan(torch.nn.Module):
    """A model with torchtitan's parameters, which computes by Hugging Face's: these are the same elements in another order."""

    def __init__(self, name, seed, fused=False):
        super().__init__()
        model, self.fused = pairs.fresh(name, seed), fused
        self.hidden = [model]  # no module of this one
        self.shapes = {k: p.shape for k, p in model.named_parameters()}
        ids, at = {}, 0
        for k, shape in self.shapes.items():
            ids[k] = torch.arange(at, at + shape.numel()).view(shape)
            at += shape.numel()
        for k, t in titan({k: p.detach().clone() for k, p in model.named_parameters()}, fused).items():
            *path, last = k.split(".")
            module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, torch.nn.Module())
                module = module._modules[part]
            module.register_parameter(last, torch.nn.Parameter(t.clone()))
        order = titan(ids, fused)
        self.names = [k for k, _ in self.named_parameters()]
        self.order = torch.argsort(torch.cat([order[k].flatten() for k in self.names]))

    def back(self, tensors):
        """Tensors under torchtitan's names as those of Hugging Face's model."""
        flat = torch.cat([tensors[k].flatten() for k in self.names])[self.order]
        return {k: t.view(self.shapes[k]) for k, t in zip(self.shapes, flat.split([s.numel() for s in self.shapes.values()]))}

    def forward(self, **inputs):
        return torch.func.functional_call(self.hidden[0], self.back(dict(self.named_parameters())), (), inputs)


def titan_goes_on(model, optimizer):
    gradients = titan({k: pairs.gradient(k, shape) for k, shape in model.shapes.items()}, model.fused)
    held = pairs.go_on(model, optimizer, lambda name, shape: gradients[name])
    return held | {at: {kind: model.back(t) for kind, t in held[at].items()} for at in ("states", "after")}


# ---- the table ----

class Pairs(TensorCase):
    maxDiff = None
    seen = {}  # {(source, model, target): the largest difference of a loss}

    @classmethod
    def setUpClass(cls):
        torch.set_num_threads(1)  # all is tiny
        cls.top = tempfile.mkdtemp()
        cls.addClassCleanup(shutil.rmtree, cls.top)
        for name in CONFIGS:
            cls.train_here(name)
        ranks.run(2, "pairs_ranks", "fsdp2_source", cls.top, list(CONFIGS), folder=cls.top)
        os.remove(cls.at("meet"))
        if CORES:
            for name, layout in (("llama", (2, 2, 1)), ("moe", (1, 2, 2)), ("tied", (2, 1, 1))):
                os.makedirs(cls.at(f"megatron-{name}", f"iter_{STEPS:07}"))
                ranks.run(4, "pairs_ranks", "megatron_source", ranks.free_port(), cls.top, name, layout, folder=cls.top, PYTHONPATH=CORES[-1], OMP_NUM_THREADS="1")
        if DEEPSPEED:
            ranks.run(3, "pairs_ranks", "deepspeed_source", ranks.free_port(), cls.top, list(CONFIGS), folder=cls.top, PYTHONPATH=DEEPSPEED[-1])

    @classmethod
    def at(cls, *names):
        return os.path.join(cls.top, *names)

    @classmethod
    def train_here(cls, name):
        """torchtitan's run and nanotron's, and what Megatron's ranks do."""
        CONFIGS[name].save_pretrained(cls.at(name + "-hf"))
        if not CONFIGS[name].tie_word_embeddings:
            cls.train_titan("torchtitan", name)
            cls.train_titan("torchtitan_fused", name)
        cls.train_others(name)

    @classmethod
    def train_titan(cls, source, name):
        model = Titan(name, 1, fused=source.endswith("fused"))
        optimizer = pairs.make_adamw(model, True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        pairs.train(model, optimizer, lambda _: schedule.step())
        weights = titan(model.back({k: p.detach() for k, p in model.named_parameters()}))
        dcp.save({**weights, "optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT), "lr_scheduler": schedule.state_dict(),
                  "train_state": {"step": torch.tensor(STEPS)}}, checkpoint_id=cls.at(f"{source}-{name}", f"step-{STEPS}"), no_dist=True)
        torch.save(titan_goes_on(model, optimizer), cls.at(f"{source}-{name}.want"))

    @classmethod
    def train_others(cls, name):
        for wide in (True, False)[:1 + (name != "moe")]:
            model, gradients = pairs.fresh(name), []
            start = {k: p.detach().clone() for k, p in model.named_parameters()}
            optimizer = pairs.make_adamw(model, wide)
            pairs.train(model, optimizer, lambda _, m=model: gradients.append({k: p.grad.clone() for k, p in m.named_parameters()}))
            held = pairs.go_on(model, optimizer)
            if wide:
                cls.in_hub_names(name, held, start=start, gradients=gradients)
            else:
                cls.write_nanotron(name, held["states"], optimizer)
            torch.save(held, cls.at(f"{'megatron' if wide else 'nanotron'}-{name}.want"))

    @classmethod
    def in_hub_names(cls, name, held, **more):
        """What a source has, for Megatron's ranks: the path."""
        if isinstance(held, str):
            path, held = held.removesuffix(".want") + ".hub", torch.load(held)
        else:
            path = cls.at(f"{name}.hub")
        out = {at: {kind: pairs.hub(name, t) for kind, t in held[at].items()} for at in ("states", "after")}
        out["gradient"] = pairs.hub(name, {k: pairs.gradient(k, t.shape) for k, t in held["states"]["master"].items()})
        for k, t in more.items():
            out[k] = [pairs.hub(name, one) for one in t] if isinstance(t, list) else pairs.hub(name, t)
        torch.save(out, path)
        return path

    @classmethod
    def write_nanotron(cls, name, states, optimizer):
        config, run = CONFIGS[name], cls.at("nanotron-" + name)
        parameters = {kind: nt.llama_like(t, config) for kind, t in states.items()}
        step = nt.write_run(run, STEPS, nt.llama_like({k: t.bfloat16() for k, t in states["master"].items()}, config), nt_config(config, "is_llama_config"), 2, 1, 2)
        os.makedirs(os.path.join(step, "optimizer"))
        with open(os.path.join(step, "optimizer", "optimizer_config.json"), "w") as f:
            json.dump({"type": "OptimizerFromGradientAccumulator", "configs": {},
                       "parallelism": {"tp_size": "2", "dp_size": "1", "pp_size": "1", "expert_parallel_size": "1"}}, f)
        for rank in range(2):
            parts = {kind: {p.name: p.data if p.dim is None else nt.shard(p, rank, 2, None, False)[0] for p in ps} for kind, ps in parameters.items()}
            names = dict(enumerate(parts["master"]))
            group = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
            torch.save({"state": {i: {"step": torch.tensor(float(STEPS)), **{kind: parts[kind][k] for kind in KINDS}} for i, k in names.items()},
                        "param_groups": [{**group, "initial_lr": group["lr"], "params": list(names)}], "names": names, "gradient_accumulator": parts["master"]},
                       os.path.join(step, "optimizer", f"optimizer_pp-0-of-1_tp-{rank}-of-2_exp-0-of-1.pt"))

    # ---- what is compared ----

    def exported(self, form, *options):
        """{(source, model): the view}"""
        views = {}
        for source, name in SOURCES:
            view = self.path(f"{source}-{name}")
            done = export(self.at(f"{source}-{name}"), view, "view=" + form, "optimizer", "base=" + self.at(name + "-hf"), *options,
                          *(SCHEDULE[:1] if form in ("torchtitan", "megatron") else ()), *(("ep=2",) if (form, name) == ("megatron", "moe") else ()))
            self.assertEqual(done.returncode, 0, f"{source}, {name}, {form}: {done.stderr}")
            views[source, name] = view
        return views

    def tell(self, target, key, want, losses):
        differences = [abs(a - b) / b for a, b in zip(losses, want["losses"])]
        self.seen[(*key, target)] = max(differences)
        self.assertLess(max(differences), 1e-3, f"{key}, {target}: {losses}, {want['losses']}")

    def check(self, target, key, got):
        source, _ = key
        want = torch.load(self.at("-".join(key) + ".want"))
        with self.subTest(source=key, target=target):
            self.assertEqual([(g["weight_decay"], *(g[k] for k in HYPER)) for g in got["groups"]],
                             [(decay, *HYPER.values()) for decay in DECAYS[:1 + WIDE.get(source, True)]])
            self.assertEqual(got["steps"], [float(STEPS)])
            for at in ("states", "after"):
                for kind, t in want[at].items():
                    self.same(got[at][kind], t, f"{key}, {target}, {at}, {kind}")
            self.tell(target, key, want, got["losses"])

    def jobs(self, views):
        return {self.path("-".join(key) + ".got"): [view, key[1], WIDE.get(key[0], True)] for key, view in views.items()}

    def check_jobs(self, target, views):
        for key in views:
            self.check(target, key, torch.load(self.path("-".join(key) + ".got")))

    def test_sources_learn(self):
        """The states are of steps that did something: a loss that fell, and no moment that is zero everywhere."""
        for source, name in SOURCES:
            want = torch.load(self.at(f"{source}-{name}.want"))
            start = dict(pairs.fresh(name).named_parameters())
            for k, t in want["states"]["master"].items():
                self.assertFalse(torch.equal(t, start[k]), (source, k))
                self.assertTrue(want["states"]["exp_avg"][k].any() and want["states"]["exp_avg_sq"][k].any(), (source, k))
                self.assertFalse(torch.equal(t, want["after"]["master"][k]), (source, k))

    # ---- the targets ----

    def test_dcp(self):
        views = self.exported("dcp", "names=memory", "ranks=2")
        ranks.run(2, "pairs_ranks", "fsdp2_target", self.tmp, self.jobs(views), folder=self.tmp)
        self.check_jobs("dcp", views)

    def goes_on_in_torchtitan(self, target, key, fused, **where):
        model = Titan(key[1], 2, fused)
        optimizer = pairs.make_adamw(model, WIDE.get(key[0], True), known=False)
        for group in optimizer.param_groups:
            group["initial_lr"] = 9.0
        weights = titan(model.back({k: p.detach() for k, p in model.named_parameters()}))
        state = {**weights, "optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT)}
        dcp.load(state, **where, no_dist=True)
        set_optimizer_state_dict(model, optimizer, state.pop("optimizer"), options=FLAT)
        model.load_state_dict(fuse(state) if fused else state)
        self.check(target, key, titan_goes_on(model, optimizer))

    def go_on_in_torchtitan(self, target, is_fused, *options):
        for key, view in self.exported("torchtitan", *options).items():
            self.goes_on_in_torchtitan(target, key, is_fused(key[0]), checkpoint_id=os.path.join(view, f"step-{STEPS}"))

    def test_torchtitan(self):
        """Without an option, a run of torchtitan's goes on as it was."""
        self.go_on_in_torchtitan("torchtitan", lambda source: source == "torchtitan_fused")

    def test_torchtitan_apart(self):
        self.go_on_in_torchtitan("torchtitan, apart", lambda _: False, "fuse_qkv=no")

    def test_torchtitan_fused(self):
        self.go_on_in_torchtitan("torchtitan, fused", lambda _: True, "fuse_qkv")

    def test_torchtitan_reader(self):
        """Without a view that is exported: dcp.load by ckptfs's own reader."""
        for key in SOURCES:
            reader = StorageReader(self.at("-".join(key)), view="torchtitan", optimizer=True, fuse_qkv=True, base=self.at(key[1] + "-hf"), initial_lr=0.5)
            self.goes_on_in_torchtitan("torchtitan, reader", key, True, storage_reader=reader)

    @unittest.skipUnless(CORES, "CKPTFS_MEGATRON names no megatron-core")
    def test_megatron(self):
        views, jobs = self.exported("megatron", "dtype=bfloat16", "make_vocab_size_divisible_by=8", SCHEDULE[1]), {name: {} for name in CONFIGS}
        for (source, name), view in views.items():
            wanted = self.in_hub_names(name, self.at(f"{source}-{name}.want"))
            jobs[name][self.path(f"{source}-{name}.json")] = [os.path.join(view, f"iter_{STEPS:07}"), name, wanted]
        for name, layout in (("llama", (2, 1, 1)), ("moe", (1, 1, 2)), ("tied", (1, 1, 1))):
            ranks.run(2, "pairs_ranks", "megatron_target", ranks.free_port(), jobs[name], layout, folder=self.tmp, PYTHONPATH=CORES[-1], OMP_NUM_THREADS="1")
        for key in views:
            with self.subTest(source=key):
                with open(self.path("-".join(key) + ".json")) as f:
                    got = json.load(f)
                decays = DECAYS if WIDE.get(key[0], True) else (DECAYS[0],) * 2
                for group, decay in zip(got["groups"], decays * 2):
                    self.assertEqual(group, {**HYPER, "betas": list(HYPER["betas"]), "weight_decay": decay, "step": STEPS})
                self.tell("megatron", key, torch.load(self.at("-".join(key) + ".want")), got["losses"])

    @unittest.skipUnless(DEEPSPEED, "CKPTFS_DEEPSPEED has no folder with deepspeed")
    def test_universal(self):
        views = self.exported("deepspeed_universal", "names=memory")
        ranks.run(2, "pairs_ranks", "deepspeed_target", ranks.free_port(), self.jobs(views), folder=self.tmp, PYTHONPATH=DEEPSPEED[-1])
        self.check_jobs("deepspeed_universal", views)

    @unittest.skipUnless(DEEPSPEED, "CKPTFS_DEEPSPEED has no folder with deepspeed")
    def test_universal_on_tensor_parallel_ranks(self):
        """DeepSpeed's AutoTP cuts what it loads by what it knows of its layers, at every stage of ZeRO."""
        key, view, result = ("nanotron", "llama"), self.path("view"), self.path("losses.json")
        done = export(self.at("-".join(key)), view, "view=deepspeed_universal", "optimizer")
        self.assertEqual(done.returncode, 0, done.stderr)
        ranks.run(4, "pairs_ranks", "deepspeed_parallel", ranks.free_port(), result, view, key[1], self.at("-".join(key) + ".want"), [1, 2, 3], 2, folder=self.tmp,
                  PYTHONPATH=DEEPSPEED[-1])
        with open(result) as f:
            for stage, losses in zip((1, 2, 3), json.load(f)):
                self.tell(f"universal, TP, ZeRO {stage}", key, torch.load(self.at("-".join(key) + ".want")), losses)

    @classmethod
    def tearDownClass(cls):
        for key, difference in sorted(cls.seen.items()):
            print(f"{key[0]:17}{key[1]:8}{key[2]:24}losses differ by {difference:.1e}")


if __name__ == "__main__":
    unittest.main()
