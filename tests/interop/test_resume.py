# SPDX-License-Identifier: Apache-2.0
"""The option optimizer: torch resumes from the view with its own loader, dcp.load and set_state_dict. The view has what torch itself
would have saved, key by key; and after a step with the same gradients all parameters are those of the run that went on, bit for bit."""

import os
import pickle
import shutil
import subprocess
import sys
import unittest

try:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    import transformers as tf
    from safetensors.torch import load_file
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    from states_case import MOMENTS, SIZES, StatesCase, megatron_run, nanotron_run, trained
    from tensor_case import CKPT, export, fuse_qkv, ranks
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

DEEPSPEED = [p for p in os.environ.get("CKPTFS_DEEPSPEED", "").split(":") if os.path.isdir(p)]
CONFIGS = {"llama": tf.LlamaConfig(**SIZES), "tied": tf.Qwen2Config(**SIZES, tie_word_embeddings=True),
           "moe": tf.Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8)}


def blank(config):
    """A model and an optimizer that nothing was loaded into."""
    model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.model.norm.weight.requires_grad_(False)
    return model, optimizer_of(model)


def optimizer_of(model):
    return torch.optim.AdamW([{"params": [p for p in model.parameters() if p.requires_grad and p.ndim > 1]},
                              {"params": [p for p in model.parameters() if p.requires_grad and p.ndim == 1]}], lr=9.0, weight_decay=0.5)


def resume(model, optimizer, path):
    own, optim = get_state_dict(model, optimizer)
    dcp.load({"model": own, "optim": optim}, checkpoint_id=path, no_dist=not dist.is_initialized())
    set_state_dict(model, optimizer, model_state_dict=own, optim_state_dict=optim)


def gradient(name, p):
    g = torch.Generator().manual_seed(len(name) + sum(map(ord, name)))
    return torch.randn(p.shape, generator=g)


def ckptfs():
    """The package in the tree, with the libraries that were built."""
    if "ckptfs" not in sys.modules:
        sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "contrib", "python"))
        os.environ.setdefault("CKPTFS_LIBRARY_PATH", os.path.join(os.path.dirname(os.path.abspath(CKPT)), "..", "core"))
    import ckptfs
    return ckptfs


def go_on(model, optimizer):
    """A step with gradients that follow from the names alone; all parameters then."""
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        p.grad = gradient(name, p)
        if hasattr(p, "device_mesh"):
            from torch.distributed.tensor import distribute_tensor
            p.grad = distribute_tensor(p.grad, p.device_mesh, p.placements)
    optimizer.step()
    return {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for n, p in model.named_parameters()}


class Resume(StatesCase):
    def resumable(self, run, *options, ok=True, form="dcp"):
        out = self.path("view-" + form)
        shutil.rmtree(out, ignore_errors=True)
        done = export(run, out, "view=" + form, "optimizer", *options)
        self.assertEqual(done.returncode == 0, ok, done.stderr)
        return out if ok else done.stderr, done.stderr

    def read(self, path):
        """All tensors of a DCP, and all objects."""
        whole = {}
        for k, m in FileSystemReader(path).read_metadata().state_dict_metadata.items():
            whole[k] = torch.empty(m.size, dtype=m.properties.dtype) if hasattr(m, "size") else None
        dcp.load(whole, checkpoint_id=path, no_dist=True)
        return whole

    def is_as_saved(self, view, saved):
        got, want = (FileSystemReader(p).read_metadata() for p in (view, saved))
        self.assertEqual(got.planner_data, want.planner_data)
        got, want = self.read(view), self.read(saved)
        self.assertEqual(sorted(got), sorted(want))
        for k, v in want.items():
            if isinstance(v, torch.Tensor):
                self.assertTrue(got[k].dtype == v.dtype and torch.equal(got[k], v), k)
            elif k.endswith(".params"):
                self.assertEqual(sorted(got[k]), sorted(p for p in v if p != "model.norm.weight"), k)
            else:
                self.assertEqual((type(got[k]), got[k]), (type(v), v), k)


class Torch(Resume):
    """From torch's own checkpoints, nested and flattened, and those of trainers that have two of them."""

    def test_all(self):
        for name, config in CONFIGS.items():
            model, optimizer = trained(config)
            for group, lr in zip(optimizer.param_groups, (0.25, 0.125)):
                group.update(lr=lr, betas=(0.75, 0.875), eps=1e-6)
            config.save_pretrained(self.path(name))
            own, optim = get_state_dict(model, optimizer)
            _, flat = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
            flat = {k: v for k, v in flat.items() if "model.norm.weight" not in k}
            saved = self.path(name + "-saved")
            dcp.save({"model": own, "optim": optim}, checkpoint_id=saved, no_dist=True)
            forms = {"nested": {"": {"model": own, "optim": optim}}, "flat": {"": {"model": own, "optim": flat}},
                     "app": {"": {"app": {"model": own, "optimizer_0": optim}}},
                     "accelerate": {"pytorch_model_fsdp_0": {"model": own}, "optimizer_0": {"optimizer": optim}}}
            for form, folders in forms.items():
                for folder, state in folders.items():
                    dcp.save(state, checkpoint_id=self.path(f"{name}-{form}", folder), no_dist=True)
            want = go_on(model, optimizer)
            for form in forms:
                run = self.path(f"{name}-{form}")
                with self.subTest(name=name, form=form):
                    view, said = self.resumable(run, "base=" + self.path(name), "names=memory", "ranks=3")
                    self.assertIn("the states of schedulers, random numbers and data loaders are not in this view", said)
                    if form != "flat":  # torch gives no order of groups back
                        self.is_as_saved(view, saved)
                    fresh = blank(config)
                    resume(*fresh, view)
                    self.assertEqual([g["lr"] for g in fresh[1].param_groups], [0.25, 0.125])
                    self.assertEqual([g["weight_decay"] for g in fresh[1].param_groups], [0.1, 0.0])
                    self.same(go_on(*fresh), want)

    def test_hub_names(self):
        """Experts that are stacked in memory are apart in the view, and so are their moments; each has the step of all."""
        model, optimizer = trained(CONFIGS["moe"])
        model.save_pretrained(self.path("base"))
        own, optim = get_state_dict(model, optimizer)
        dcp.save({"model": own, "optim": optim}, checkpoint_id=self.path("run"), no_dist=True)
        view = self.read(self.resumable(self.path("run"), "base=" + self.path("base"))[0])
        weights = load_file(self.path("base", "model.safetensors"))
        self.assertEqual(sorted(k for k in view if k.startswith("model.")), sorted("model." + k for k in weights))
        for k, t in weights.items():
            self.assertTrue(torch.equal(view["model." + k], t), k)
            for kind, of in {**MOMENTS, "step": lambda _: torch.tensor(1.)}.items():
                key = f"optim.state.{k}.{kind}"
                self.assertEqual(key in view, k != "model.norm.weight")
                if key in view:
                    self.assertTrue(torch.equal(view[key], of(t)), key)
        params = [view[f"optim.param_groups.{i}.params"] for i in range(2)]
        self.assertEqual(sorted(params[0]), sorted(k for k, t in weights.items() if t.ndim > 1))
        self.assertEqual(sorted(params[1]), sorted(k for k, t in weights.items() if t.ndim == 1 and k != "model.norm.weight"))

    def test_mesh(self):
        """Into FSDP2 on two ranks."""
        config = CONFIGS["llama"]
        model, optimizer = trained(config)
        model.save_pretrained(self.path("base"))
        own, optim = get_state_dict(model, optimizer)
        dcp.save({"model": own, "optim": optim}, checkpoint_id=self.path("run"), no_dist=True)
        view, _ = self.resumable(self.path("run"), "base=" + self.path("base"), "ranks=3")
        ranks = [subprocess.Popen([sys.executable, os.path.abspath(__file__), "rank", str(r), self.tmp, view]) for r in range(2)]
        self.assertEqual([r.wait(timeout=240) for r in ranks], [0, 0])
        self.same(torch.load(self.path("stepped.pt")), go_on(model, optimizer))

    def test_reader(self):
        """Without a view that is mounted: dcp.load by ckptfs's own reader."""
        StorageReader = ckptfs().torch.StorageReader
        for name, config in CONFIGS.items():
            model, optimizer = trained(config)
            config.save_pretrained(self.path(name))
            own, optim = get_state_dict(model, optimizer)
            dcp.save({"model": own, "optim": optim}, checkpoint_id=self.path(name + "-run"), no_dist=True)
            fresh = blank(config)
            own, optim = get_state_dict(*fresh)
            reader = StorageReader(self.path(name + "-run"), base=self.path(name), view="memory", optimizer=True, lr=0.25)
            dcp.load({"model": own, "optim": optim}, storage_reader=reader, no_dist=True)
            set_state_dict(*fresh, model_state_dict=own, optim_state_dict=optim)
            self.assertEqual([(g["lr"], g["weight_decay"]) for g in fresh[1].param_groups], [(0.25, 0.1), (0.25, 0.0)])
            for group in optimizer.param_groups:
                group["lr"] = 0.25
            self.same(go_on(*fresh), go_on(model, optimizer))

    def test_load_state_dict(self):
        """Model and optimizer are filled in place, without torch's state dicts; names are found where they are those in memory."""
        for name, config in CONFIGS.items():
            with self.subTest(name=name):
                model, optimizer = trained(config)
                config.save_pretrained(self.path(name))
                own, optim = get_state_dict(model, optimizer)
                dcp.save({"model": own, "optim": optim}, checkpoint_id=self.path(name + "-run"), no_dist=True)
                fresh = blank(config)
                result = ckptfs().load_state_dict(fresh[0], self.path(name + "-run"), base=self.path(name), optimizer=fresh[1], lr=0.25)
                self.assertEqual((result.missing_keys, result.unexpected_keys), ([], []))
                tensors = {id(t): t for t in [*model.parameters(), *(s[k] for s in optimizer.state.values() for k in MOMENTS)]}
                self.assertEqual(result.stats["read_bytes"], sum(t.nbytes for t in tensors.values()))  # each byte once
                self.assertEqual([(g["lr"], g["weight_decay"], g["betas"]) for g in fresh[1].param_groups], [(0.25, 0.1, (0.9, 0.999)), (0.25, 0.0, (0.9, 0.999))])
                for p, q in zip(fresh[0].parameters(), model.parameters()):
                    self.assertEqual(list(fresh[1].state.get(p, {})), list(optimizer.state.get(q, {})) and [*MOMENTS, "step"])
                for group in optimizer.param_groups:
                    group["lr"] = 0.25
                self.same(go_on(*fresh), go_on(model, optimizer))

    def test_load_state_dict_on_a_mesh(self):
        config = CONFIGS["llama"]
        model, optimizer = trained(config)
        model.save_pretrained(self.path("base"))
        own, optim = get_state_dict(model, optimizer)
        dcp.save({"model": own, "optim": optim}, checkpoint_id=self.path("run"), no_dist=True)
        ranks = [subprocess.Popen([sys.executable, os.path.abspath(__file__), "rank", str(r), self.tmp, self.path("run"), self.path("base")]) for r in range(2)]
        self.assertEqual([r.wait(timeout=240) for r in ranks], [0, 0])
        self.same(torch.load(self.path("stepped.pt")), go_on(model, optimizer))

    def test_load_state_dict_faults(self):
        model, optimizer = trained(CONFIGS["llama"])
        model.save_pretrained(self.path("base"))
        own, optim = get_state_dict(model, optimizer)
        dcp.save({"model": own, "optim": optim}, checkpoint_id=self.path("run"), no_dist=True)
        dcp.save({"model": own}, checkpoint_id=self.path("weights"), no_dist=True)

        def said(error, target, its, run="run", **more):
            with self.assertRaises(error) as raised:
                ckptfs().load_state_dict(target, self.path(run), base=self.path("base"), optimizer=its, **more)
            return str(raised.exception)

        failed, (fresh, blank_one) = ckptfs().CkptError, blank(CONFIGS["llama"])
        before = {k: t.clone() for k, t in fresh.state_dict().items()}
        self.assertIn("has no state 'exp_avg'", said(failed, fresh, blank_one, "weights"))
        self.assertIn("SGD has other states than AdamW", said(TypeError, fresh, torch.optim.SGD(fresh.parameters(), lr=1.)))
        self.assertIn("expected a torch.optim.Optimizer", said(TypeError, fresh, fresh))
        self.assertIn("amsgrad", said(TypeError, fresh, torch.optim.AdamW(fresh.parameters(), amsgrad=True)))
        self.assertIn("dtype=, names= does not go with optimizer=", said(ValueError, fresh, blank_one, names=["x"], dtype="bfloat16"))
        self.assertIn("optimizer= goes with view='memory'", said(ValueError, fresh, blank_one, view="raw"))
        self.assertIn("2 parameters of the optimizer are none of the model's", said(failed, fresh, torch.optim.AdamW([*map(torch.nn.Parameter, torch.ones(2, 3))])))
        one_group = torch.optim.AdamW([p for p in fresh.parameters() if p.requires_grad])
        self.assertIn("which have other hyper-parameters in the run", said(failed, fresh, one_group))
        fresh.model.norm.weight.requires_grad_(True)
        thawed = torch.optim.AdamW([{"params": [p for p in fresh.parameters() if p.ndim > 1]}, {"params": [p for p in fresh.parameters() if p.ndim == 1]}])
        self.assertIn("the run has no state of 1 parameters of the optimizer ('model.norm.weight' first)", said(failed, fresh, thawed))
        with torch.device("meta"):
            nowhere = tf.AutoModelForCausalLM.from_config(CONFIGS["llama"])
        self.assertIn("is on the meta device", said(failed, nowhere, torch.optim.AdamW(nowhere.parameters())))
        self.same(fresh.state_dict(), before)
        self.assertEqual(len(one_group.state) + len(thawed.state) + len(blank_one.state), 0)
        ckptfs().load_state_dict(fresh, self.path("run"), base=self.path("base"), optimizer=thawed, strict=False)
        self.assertEqual(len(thawed.state), len(optimizer.state))
        ckptfs().load_state_dict(fresh, self.path("run"), base=self.path("base"), optimizer=one_group, weight_decay=0.5)
        self.assertEqual(one_group.param_groups[0]["weight_decay"], 0.5)

    def test_faults(self):
        model, optimizer = trained(CONFIGS["llama"])
        model.save_pretrained(self.path("base"))
        base = "base=" + self.path("base")
        own, optim = get_state_dict(model, optimizer)
        bare = {"state": optim["state"], "param_groups": [{"params": g["params"], "eps": 0.5} for g in optim["param_groups"]]}
        dcp.save({"model": own, "optim": bare}, checkpoint_id=self.path("bare"), no_dist=True)
        said, _ = self.resumable(self.path("bare"), base, ok=False)
        self.assertIn("does not say lr of its optimizer: give it with the option lr=X", said)
        said, _ = self.resumable(self.path("bare"), base, "lr=0.1", ok=False)
        self.assertIn("give it with the option betas=B1+B2", said)
        view, said = self.resumable(self.path("bare"), base, "lr=0.1", "betas=0.5+0.75", "weight_decay=0", "eps=0.25", "optimizer_step=7")
        self.assertIn("optimizer: eps is that of the option, not the run's", said)
        self.assertIn("the run does not say amsgrad, maximize, foreach, capturable, differentiable, fused, decoupled_weight_decay: torch's defaults", said)
        got = self.read(view)
        self.assertEqual([got[f"optim.param_groups.0.{k}"] for k in ("lr", "betas", "eps", "weight_decay")], [0.1, (0.5, 0.75), 0.25, 0.0])
        self.assertEqual(got["optim.state.lm_head.weight.step"], 7)

        half = {**optim, "state": {k: {m: t for m, t in v.items() if m != "exp_avg_sq" or "mlp" not in k} for k, v in optim["state"].items()}}
        dcp.save({"model": own, "optim": half}, checkpoint_id=self.path("half"), no_dist=True)
        said, _ = self.resumable(self.path("half"), base, ok=False)
        self.assertIn("has exp_avg, but not exp_avg_sq", said)

        dcp.save({"model": own}, checkpoint_id=self.path("apart", "pytorch_model_fsdp_0"), no_dist=True)
        dcp.save({"optimizer": optim}, checkpoint_id=self.path("apart", "optimizer_0"), no_dist=True)
        self.resumable(self.path("apart"), base)
        os.remove(self.path("apart", "optimizer_0", "__0_0.distcp"))
        said, _ = self.resumable(self.path("apart"), base, ok=False)
        self.assertIn("has no state 'exp_avg': it has weight; left out: the optimizer's states: ", said)

        stepless = {**optim, "state": {k: {m: t for m, t in v.items() if m != "step"} for k, v in optim["state"].items()}}
        dcp.save({"model": own, "optim": stepless}, checkpoint_id=self.path("stepless"), no_dist=True)
        self.assertIn("give the number with the option optimizer_step=N", self.resumable(self.path("stepless"), base, ok=False)[0])

        lost = {**optim, "param_groups": [{**g, "params": g["params"][1:]} for g in optim["param_groups"]]}
        dcp.save({"model": own, "optim": lost}, checkpoint_id=self.path("lost"), no_dist=True)
        self.assertIn("the run has 2 groups of parameters, and nothing says to which", self.resumable(self.path("lost"), base, ok=False)[0])

        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        sgd.step()
        own, optim = get_state_dict(model, sgd)
        dcp.save({"model": own, "optim": optim}, checkpoint_id=self.path("sgd"), no_dist=True)
        self.assertIn("has the state 'momentum_buffer', which AdamW has not", self.resumable(self.path("sgd"), base, ok=False)[0])
        dcp.save({"model": own}, checkpoint_id=self.path("weights"), no_dist=True)
        self.assertIn("has no state 'exp_avg': it has weight", self.resumable(self.path("weights"), base, "lr=1", ok=False)[0])
        for step in ("step-1", "step-2"):
            shutil.copytree(self.path("bare"), self.path(os.path.join("steps", step)))
        for run, option, text in (("bare", "state=master", "it does not go with state="), ("bare", "dtype=bfloat16", "option dtype: with optimizer each tensor keeps"),
                                  ("steps", "average=last:2", "it does not go with average=")):
            self.assertIn(text, self.resumable(self.path(run), base, option, ok=False)[0])
        self.assertIn("option min_lr does not apply to view=dcp", self.refused(self.path("bare"), "view=dcp", "optimizer", "lr=1", "betas=0.5+0.5", "weight_decay=0", "min_lr=1", base))
        self.assertIn("option lr: it goes with the option optimizer", self.refused(self.path("bare"), "lr=1", base))
        self.assertIn("option optimizer: view=hf has no place for an optimizer, but view=dcp, view=torchtitan", self.refused(self.path("bare"), "optimizer", base))
        for value in ("betas=0.9", "betas=0.9+1", "lr=-1", "lr=x", "lr=1e-400", "optimizer_step=1.5"):
            self.assertIn("is not", self.refused(self.path("bare"), "view=dcp", "optimizer", value, base))

    def test_steps_and_groups_apart(self):
        """What is joined must agree: experts that are apart in the run, and stacked in memory."""
        model, optimizer = trained(CONFIGS["moe"])
        model.save_pretrained(self.path("base"))
        weights = load_file(self.path("base", "model.safetensors"))
        experts = sorted(k for k in weights if "experts" in k)

        def saved(name, steps, groups):
            state = {k: {"step": torch.tensor(float(steps(k))), **{m: of(t) for m, of in MOMENTS.items()}} for k, t in weights.items()}
            rest = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8}
            dcp.save({"model": weights, "optim": {"state": state, "param_groups": [{"params": g, "weight_decay": 0.1 * i, **rest} for i, g in enumerate(groups)]}},
                     checkpoint_id=self.path(name), no_dist=True)
            return self.path(name), "base=" + self.path("base"), "names=memory"

        view = self.read(self.resumable(*saved("good", lambda k: 5, [list(weights)]))[0])
        stacked = [k for k in view if "experts" in k and k.endswith(".step")]
        self.assertEqual(len(stacked), 4)
        self.assertEqual({float(view[k]) for k in stacked}, {5.0})
        run = saved("steps", lambda k: 5 + (k == experts[3]), [list(weights)])
        self.assertIn("which took different numbers of steps: give one for all with optimizer_step=N", self.resumable(*run, ok=False)[0])
        self.resumable(*run, "optimizer_step=5")
        run = saved("groups", lambda k: 5, [[k for k in weights if k != experts[3]], [experts[3]]])
        self.assertIn("which are in different groups of the optimizer", self.resumable(*run, ok=False)[0])


class Lost:
    def __init__(self, *_):
        pass


class WithoutMegatron:
    """Reads a common state whose enumerations are Megatron's, without them."""
    load = pickle.load

    class Unpickler(pickle.Unpickler):
        def find_class(self, module, name):
            return Lost if module.startswith("megatron") else super().find_class(module, name)


class Frameworks(Resume):
    """From runs of frameworks, whose moments torch writes anew: twice the master, and its square."""

    def check(self, run, vectors, *options):
        masters, _ = self.view(run, "state=master")
        path, said = self.resumable(run, *options)
        view = self.read(path)
        tied = () if "lm_head.weight" in masters else ("lm_head.weight",)
        self.assertEqual(sorted(k for k in view if k.startswith("model.")), sorted("model." + k for k in [*masters, *tied]))
        for k, t in masters.items():
            self.assertTrue(torch.equal(view["model." + k], t), k)
            for kind, of in MOMENTS.items():
                self.assertTrue(torch.equal(view[f"optim.state.{k}.{kind}"], of(t)), k)
        config = tf.AutoConfig.from_pretrained(self.export_config(run))
        model, _ = blank(config)
        model.requires_grad_(True)
        optimizer = optimizer_of(model) if vectors else torch.optim.AdamW(model.parameters(), lr=9.0)
        resume(model, optimizer, path)
        # The run goes on: its masters and moments, by hand.
        other, _ = blank(config)
        other.requires_grad_(True)
        other.load_state_dict(masters, strict=not config.tie_word_embeddings)
        by_hand = optimizer_of(other) if vectors else torch.optim.AdamW(other.parameters())
        for mine, of in zip(by_hand.param_groups, optimizer.param_groups):
            mine.update({k: v for k, v in of.items() if k != "params"})
        for p in other.parameters():
            by_hand.state[p] = {"step": view["optim.state.model.norm.weight.step"].clone(), **{kind: of(p.detach()) for kind, of in MOMENTS.items()}}
        in_place, _ = blank(config)
        in_place.requires_grad_(True)
        its = optimizer_of(in_place) if vectors else torch.optim.AdamW(in_place.parameters(), lr=9.0)
        ckptfs().load_state_dict(in_place, run, optimizer=its)
        stepped = go_on(other, by_hand)
        self.same(go_on(model, optimizer), stepped)
        self.same(go_on(in_place, its), stepped)
        return view, said

    def export_config(self, run):
        out = self.path("hf")
        shutil.rmtree(out, ignore_errors=True)
        subprocess.run([CKPT, "export", run, out], check=True, capture_output=True)
        return out

    def test_megatron(self):
        whole = megatron_run(self.path("megatron"))
        run = self.path("megatron", "iter_0000010")
        lost = {k: t for k, t in whole.items() if k != "optimizer.state.fp32_param.decoder.final_layernorm.weight"}
        shutil.copytree(run, self.path("lost", "iter_0000010"))
        dcp.save(lost, checkpoint_id=self.path("lost", "iter_0000010"), no_dist=True)
        said, _ = self.resumable(self.path("lost"), ok=False)
        self.assertIn("'decoder.final_layernorm.weight' has moments and is BF16, but has no master, which others have", said)
        view, said = self.check(run, False)
        self.assertEqual(view["optim.param_groups.0.betas"], (0.9, 0.999))
        self.assertEqual(view["optim.state.model.norm.weight.step"], 1)
        self.assertNotIn("optim.param_groups.1.lr", view)
        # Two groups that differ: those of one dimension have no weight decay.
        common = torch.load(os.path.join(run, "common.pt"), weights_only=False, pickle_module=WithoutMegatron)
        for key, value in vars(common["args"]).items():
            if isinstance(value, Lost):
                setattr(common["args"], key, None)
        common["optimizer"]["optimizer"]["param_groups"][0].update(weight_decay=0.125)
        for group in common["optimizer"]["optimizer"]["param_groups"]:
            group.update(lr=0.25, step=9)
        torch.save(common, os.path.join(run, "common.pt"))
        view, said = self.check(run, True)
        self.assertIn("the run has 2 groups of parameters and does not say which parameters they have", said)
        self.assertEqual([view[f"optim.param_groups.{i}.weight_decay"] for i in range(2)], [0.125, 0.0])
        self.assertEqual(view["optim.state.model.norm.weight.step"], 9)

    def test_nanotron(self):
        run = self.path("nanotron")
        shards = nanotron_run(run, lr=0.25)
        view, _ = self.check(run, False)
        self.assertEqual(view["optim.state.model.norm.weight.step"], 7)
        self.assertEqual([view[f"optim.param_groups.0.{k}"] for k in ("lr", "betas", "eps", "weight_decay", "initial_lr")], [0.25, (0.9, 0.95), 1e-8, 0.01, 0.0003])
        os.remove(shards[0])
        said, _ = self.resumable(run, ok=False)
        self.assertIn("'model.embed_tokens.weight' has none: left out: ", said)
        self.assertIn("rows 0..64 of 128 are in no shard", said)


class Torchtitan(Resume):
    """Into torchtitan's checkpoints: what its CheckpointManager loads, the optimizer's state dict flattened under its own names."""

    def test_all(self):
        configs = {"llama": tf.LlamaConfig(**SIZES, rope_theta=5e5), "moe": CONFIGS["moe"]}
        for name, config in configs.items():
            with self.subTest(name=name):
                model, optimizer = trained(config)
                for group in optimizer.param_groups:
                    group["initial_lr"] = 0.5
                model.save_pretrained(self.path(name))
                base = "base=" + self.path(name)
                own, optim = get_state_dict(model, optimizer)
                run = self.path(name + "-run")
                dcp.save({"model": own, "optim": optim}, checkpoint_id=run, no_dist=True)
                nested = self.read(self.resumable(run, base)[0])
                out, said = self.resumable(run, base, "ranks=3", form="torchtitan")
                self.assertIn("('layers.0.attention.qkv_linear.wq.weight'), as in torchtitan's models with fuse_qkv=False: build the model so", said)
                step = os.path.join(out, "step-1")  # torchtitan loads a model alone from step-0
                view, paths = self.read(step), FileSystemReader(step).read_metadata().planner_data
                weights = {k: t for k, t in view.items() if not k.startswith("optimizer.")}
                for kind, of in MOMENTS.items():
                    self.same({k[len("optimizer.state."):-len(kind) - 1]: t for k, t in view.items() if k.startswith("optimizer.state.") and k.endswith("." + kind)},
                               {k: of(t) for k, t in weights.items() if k != "norm.weight"})
                for k in view:
                    self.assertEqual(paths[k], ("optimizer", k[len("optimizer."):]) if k.startswith("optimizer.") else (k,))
                names = {k.split(".", 2)[2].rsplit(".", 1)[0] for k in view if k.startswith("optimizer.param_groups.")}
                self.assertEqual(names, set(weights) - {"norm.weight"})
                group = optim["param_groups"][0]
                for k in names:
                    want = {**group, "weight_decay": 0.1 if weights[k].ndim > 1 else 0.0}
                    self.assertEqual({key: view[f"optimizer.param_groups.{k}.{key}"] for key in group if key != "params"}, {key: v for key, v in want.items() if key != "params"})
                    self.assertEqual(view[f"optimizer.state.{k}.step"], 1)
                # And back again: what the view says of itself is what the run said.
                again = self.read(self.resumable(out, base)[0])
                self.assertEqual(sorted(again), sorted(nested))
                for k, t in nested.items():
                    if isinstance(t, torch.Tensor):
                        self.assertTrue(torch.equal(again[k], t), k)
                    elif k.endswith(".params"):
                        self.assertEqual(sorted(again[k]), sorted(t))
                    else:
                        self.assertEqual(again[k], t, k)
        del optimizer.param_groups[0]["initial_lr"]
        own, optim = get_state_dict(model, optimizer)
        dcp.save({"model": own, "optim": optim}, checkpoint_id=run, no_dist=True)
        self.assertIn("give it with the option initial_lr=X", self.resumable(run, base, form="torchtitan", ok=False)[0])

    def saved(self, name, model, optim, initial_lr=0.5):
        model.save_pretrained(self.path(name))
        for group in optim["param_groups"]:
            group["initial_lr"] = initial_lr
        dcp.save({"model": model.state_dict(), "optim": optim}, checkpoint_id=self.path(name + "-run"), no_dist=True)
        return self.path(name + "-run"), "base=" + self.path(name)

    def test_fused(self):
        """fuse_qkv: states of q, k and v, and of their biases, are those of one parameter; their weights stay apart, as torchtitan saves them."""
        configs = {"llama": tf.LlamaConfig(**SIZES), "moe": CONFIGS["moe"], "bias": tf.GptOssConfig(**SIZES, head_dim=8, num_local_experts=4, num_experts_per_tok=2)}
        for name, config in configs.items():
            with self.subTest(name=name):
                run, base = self.saved(name, *(lambda model, optimizer: (model, get_state_dict(model, optimizer)[1]))(*trained(config)))
                apart = self.read(os.path.join(self.resumable(run, base, "fuse_qkv=no", form="torchtitan")[0], "step-1"))
                out, said = self.resumable(run, base, "fuse_qkv", "ranks=3", form="torchtitan")
                self.assertNotIn("q, k and v", said)
                view = self.read(os.path.join(out, "step-1"))
                weights = {k: t for k, t in view.items() if not k.startswith("optimizer.")}
                self.same(weights, {k: t for k, t in apart.items() if not k.startswith("optimizer.")})
                parameters = fuse_qkv({k: t for k, t in weights.items() if k != "norm.weight"}, config.num_key_value_heads)
                self.assertEqual(sum(".wqkv." in k for k in parameters), config.num_hidden_layers * (1 + (name == "bias")))
                for kind, of in MOMENTS.items():
                    self.same({k[len("optimizer.state."):-len(kind) - 1]: t for k, t in view.items() if k.startswith("optimizer.state.") and k.endswith("." + kind)},
                              {k: of(t) for k, t in parameters.items()})
                for k in parameters:
                    like = k.replace(".wqkv.", ".wq.")
                    self.assertEqual({key: v for key, v in view.items() if key.startswith(f"optimizer.param_groups.{k}.") or key == f"optimizer.state.{k}.step"},
                                     {key.replace(like, k): v for key, v in apart.items() if key.startswith(f"optimizer.param_groups.{like}.") or key == f"optimizer.state.{like}.step"})
                self.assertEqual({k.split(".", 2)[2].rsplit(".", 1)[0] for k in view if k.startswith("optimizer.")}, set(parameters))
                # The view is a run of such a model, and what is written of it is as it was, unless an option says otherwise.
                kept = self.path(name + "-fused")
                shutil.copytree(out, kept)
                self.is_as_saved(os.path.join(self.resumable(kept, base, form="torchtitan")[0], "step-1"), os.path.join(kept, "step-1"))
                again = self.read(os.path.join(self.resumable(kept, base, "fuse_qkv=no", form="torchtitan")[0], "step-1"))
                for got, want in ((again, apart), [self.read(self.resumable(r, base)[0]) for r in (kept, run)]):
                    self.same(*({k: t for k, t in one.items() if isinstance(t, torch.Tensor)} for one in (got, want)))
                    self.assertEqual(sorted(got), sorted(want))

    def test_fused_faults(self):
        """q, k and v have states of one kind, or none."""
        model, optimizer = trained(CONFIGS["llama"])
        optim = get_state_dict(model, optimizer)[1]
        first = "model.layers.0.self_attn.k_proj.weight"

        def states(change):
            return {**optim, "state": {k: change(v) if k == first else v for k, v in optim["state"].items() if k != first or change(v)}}

        def refused(name, change, *options):
            run, base = self.saved(name, model, states(change))
            return self.resumable(run, base, *options, form="torchtitan", ok=False)[0]

        said = refused("frozen", lambda v: None, "fuse_qkv")
        self.assertRegex(said, r"'layers\.0\.attention\.qkv_linear\.\w+\.weight' is made of 'model\.model\.layers\.0\.self_attn\.[qv]_proj\.weight', which has moments, "
                               rf"and of 'model\.{first}', which has none")
        run, base = self.path("frozen-run"), "base=" + self.path("frozen")
        self.assertIn("is made of", self.resumable(run, base, "min_lr=0", form="megatron", ok=False)[0])  # where they are always one
        self.resumable(run, base, form="torchtitan")
        said = refused("steps", lambda v: {**v, "step": torch.tensor(2.0)}, "fuse_qkv")
        self.assertIn("which took different numbers of steps", said)
        said = refused("dtype", lambda v: {**v, "exp_avg": v["exp_avg"].bfloat16()}, "fuse_qkv")
        self.assertIn(first, said)
        for layer, p in ((0, "q"), (0, "k"), (0, "v"), (1, "q"), (1, "k"), (1, "v")):
            del optim["state"][f"model.layers.{layer}.self_attn.{p}_proj.weight"]
        run, base = self.saved("all", model, optim)
        self.assertIn("option fuse_qkv: there are no states of q, k and v", self.resumable(run, base, "fuse_qkv", form="torchtitan")[1])


@unittest.skipUnless(DEEPSPEED, "CKPTFS_DEEPSPEED has no folder with deepspeed")
class DeepSpeed(Resume):
    """From what DeepSpeed's ranks write, whose optimizer has two groups."""

    def test_zero(self):
        version = DEEPSPEED[-1]
        ranks.run(3, "deepspeed_writer", "groups", ranks.free_port(), self.tmp, [1, 2, 3], folder=self.tmp, PYTHONPATH=version)
        for stage in (1, 2, 3):
            with self.subTest(stage=stage):
                want = torch.load(self.path(f"groups{stage}.want"))
                base = self.path(f"groups{stage}-base")
                path, _ = self.resumable(self.path(f"groups{stage}", "global_step2"), "base=" + base)
                view = self.read(path)
                self.same({k: t for k, t in view.items() if k.startswith("model.")}, {"model." + k: t for k, t in want["masters"].items()})
                self.same({k: t for k, t in view.items() if k.startswith("optim.state.") and not k.endswith(".step")}, want["moments"])
                self.assertEqual({float(t) for k, t in view.items() if k.endswith(".step")}, {2.0})
                for i, decay in enumerate((0.125, 0.0)):
                    self.assertEqual([view[f"optim.param_groups.{i}.{k}"] for k in ("lr", "betas", "eps", "weight_decay")], [0.0078125, (0.75, 0.875), 1e-6, decay])
                    self.assertEqual(sorted(view[f"optim.param_groups.{i}.params"]), sorted(k for k, t in want["masters"].items() if (t.ndim > 1) == (i == 0)))
                model = tf.AutoModelForCausalLM.from_config(tf.AutoConfig.from_pretrained(base))
                optimizer = optimizer_of(model)
                resume(model, optimizer, path)
                other = tf.AutoModelForCausalLM.from_config(model.config)
                other.load_state_dict(want["masters"])
                by_hand = optimizer_of(other)
                for group, decay in zip(by_hand.param_groups, (0.125, 0.0)):
                    group.update(lr=0.0078125, betas=(0.75, 0.875), eps=1e-6, weight_decay=decay)
                for name, p in other.named_parameters():
                    by_hand.state[p] = {"step": torch.tensor(2.), **{kind: want["moments"][f"optim.state.{name}.{kind}"] for kind in MOMENTS}}
                self.same(go_on(model, optimizer), go_on(other, by_hand))


def run_rank(rank, top, view, base=None):
    """Resume from a view; with a base, from a run by ckptfs.load_state_dict."""
    from torch.distributed.fsdp import fully_shard
    dist.init_process_group("gloo", init_method="file://" + os.path.join(top, "meet"), rank=rank, world_size=2)
    torch.manual_seed(3)
    model = tf.AutoModelForCausalLM.from_config(CONFIGS["llama"])
    model.model.norm.weight.requires_grad_(False)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = optimizer_of(model)
    if base is None:
        resume(model, optimizer, view)
    else:
        ckptfs().load_state_dict(model, view, base=base, optimizer=optimizer)
    stepped = go_on(model, optimizer)
    if rank == 0:
        torch.save(stepped, os.path.join(top, "stepped.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        run_rank(int(sys.argv[2]), *sys.argv[3:])
    else:
        unittest.main()
