# SPDX-License-Identifier: Apache-2.0
"""The option state=: what an optimizer has of each parameter, under the model's names. The values tell their place: exp_avg is twice the
master and exp_avg_sq its square, saved again by torch itself, so a view of a state is right if it is that of the view of the masters."""

import glob
import json
import os
import shutil
import subprocess
import sys
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "golden"))
import case  # noqa: E402

try:
    import torch
    import torch.distributed.checkpoint as dcp
    import transformers as tf
    from safetensors.torch import load_file
    from states_case import MOMENTS, RUNS, SIZES, StatesCase, megatron_run, nanotron_run, trained
    from tensor_case import CKPT, export
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)


class Torch(StatesCase):
    """torch's get_state_dict, nested and flattened, below the roots that trainers give it."""

    def test_forms(self):
        for name, config in {"llama": tf.LlamaConfig(**SIZES), "tied": tf.Qwen2Config(**SIZES, tie_word_embeddings=True),
                             "moe": tf.Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8)}.items():
            model, optimizer = trained(config)
            model.save_pretrained(self.path(name))
            weights = load_file(self.path(name, "model.safetensors"))
            frozen = "model.norm.weight"
            moments = {k: t for k, t in weights.items() if k != frozen}
            for flat in (False, True):
                states = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
                own, optim = states[0], states[1]
                if flat:  # as it is when it was saved: no key of a frozen parameter
                    optim = {k: v for k, v in optim.items() if frozen not in k}
                # by folder of the run; in two of them as accelerate and as NeMo Automodel have it
                forms = {"nested": {"": {"model": own, "optim": optim}}, "app": {"": {"app": {"model": own, "optimizer_0": optim}}},
                         "bare": {"": {**own, "optimizer": optim}},
                         "accelerate": {"pytorch_model_fsdp_0": {"model": own}, "optimizer_0": {"optimizer": optim}},
                         "automodel": {"model": own, "optim": {"optim": optim, "sched": {"last_epoch": 1}}}}
                for form, folders in forms.items():
                    with self.subTest(name=name, flat=flat, form=form):
                        run = self.path(f"{name}-{flat}-{form}")
                        for folder, state in folders.items():
                            dcp.save(state, checkpoint_id=os.path.join(run, folder), no_dist=True)
                        self.same(self.view(run, "base=" + self.path(name))[0], weights)
                        self.moments_are_of(run, moments, "base=" + self.path(name))
                        _, said = self.view(run, "state=exp_avg", "base=" + self.path(name))
                        self.assertIn("left out: 1 tensor without 'exp_avg', such as frozen ones: 'model.norm.weight'", said)
                        raw, _ = self.view(run, "state=exp_avg", "view=raw")
                        self.same(raw, {k: 2 * p.detach() for k, p in model.named_parameters() if k != frozen})
                        self.assertIn("has no state 'master': it has weight, step, exp_avg, exp_avg_sq" if not flat else "has no state 'master'",
                                      self.refused(run, "state=master", "base=" + self.path(name)))

    def test_dtypes(self):
        model, optimizer = trained(tf.LlamaConfig(**SIZES))
        model.bfloat16().save_pretrained(self.path("base"))
        own, optim = get_state_dict(model, optimizer)
        dcp.save({"model": own, "optim": optim}, checkpoint_id=self.path("run"), no_dist=True)
        base = "base=" + self.path("base")
        moments, _ = self.view(self.path("run"), "state=exp_avg", base)
        self.assertEqual({t.dtype for t in moments.values()}, {torch.float32})
        self.same(self.view(self.path("run"), "state=exp_avg", base, "dtype=bfloat16")[0], {k: t.bfloat16() for k, t in moments.items()})

    def test_faults(self):
        model, optimizer = trained(tf.LlamaConfig(**SIZES))
        model.save_pretrained(self.path("base"))
        base = "base=" + self.path("base")
        own, optim = get_state_dict(model, optimizer)
        name = "model.layers.0.mlp.up_proj.weight"
        wrong = {**optim, "state": {**optim["state"], name: {**optim["state"][name], "exp_avg": torch.ones(3, 4)}}}
        dcp.save({"model": own, "optim": wrong}, checkpoint_id=self.path("shape"), no_dist=True)
        said = self.refused(self.path("shape"), "state=exp_avg", base)
        self.assertIn(f"'optim.state.{name}.exp_avg' has the shape [3, 4], but its parameter 'model.{name}' has [48, 32]", said)
        dcp.save({"model": own, "optim": optim, "optimizer_1": optim}, checkpoint_id=self.path("twice"), no_dist=True)
        self.assertIn("are both the exp_avg of", self.refused(self.path("twice"), "state=exp_avg", base))
        numbers = {"state": dict(enumerate(optim["state"].values()))}
        dcp.save({"model": own, "optim": numbers}, checkpoint_id=self.path("numbers"), no_dist=True)
        self.assertIn("nothing says whose 'optim.state.0.exp_avg' is", self.refused(self.path("numbers"), "state=exp_avg", base))
        for option in ("missing=base", "lora=merge"):
            self.assertIn("option state: with", self.refused(self.path("twice"), "state=exp_avg", base, option))


class Defects(StatesCase):
    """What is lost or damaged of the moments is an error that names it, in every format."""

    def test_universal(self):
        """DeepSpeed's folders of parameters, as our own view writes them."""
        model, optimizer = trained(tf.LlamaConfig(**SIZES))
        model.save_pretrained(self.path("base"))
        base = "base=" + self.path("base")
        own, optim = get_state_dict(model, optimizer)
        dcp.save({"model": own, "optim": optim}, checkpoint_id=self.path("run"), no_dist=True)
        self.assertEqual(export(self.path("run"), self.path("universal"), "view=deepspeed_universal", "optimizer", base).returncode, 0)
        name = "model.layers.0.mlp.up_proj.weight"
        file = self.path("universal", "global_step1_universal", "zero", name, "exp_avg.pt")
        held = torch.load(file)

        def damaged(value, *words):
            os.remove(file)
            if value is not None:
                torch.save(value, file)
            for options in (("state=exp_avg",), ("view=dcp", "optimizer")):
                said = self.refused(self.path("universal"), base, "allow_mixed", *options)
                for word in (f"'{name}' has exp_avg_sq, but not exp_avg", *words):
                    self.assertIn(word, said)

        damaged({**held, "param": held["param"].t().contiguous()}, "exp_avg.pt' has 1536 elements in a shape other than param_shapes")
        damaged({**held, "param": held["param"][:24].clone()}, "exp_avg.pt' has 768 elements in a shape other than param_shapes")
        damaged({**held, "param": held["param"].reshape(-1)}, "in a shape other than param_shapes")
        damaged({"cat_dim": 0}, "exp_avg.pt")
        damaged("no dict", "exp_avg.pt")
        damaged(None, "is a file of the optimizer lost?")
        self.assertEqual(len(self.view(self.path("universal"), base)[0]), len(model.state_dict()))  # the weights are whole

    def test_dcp(self):
        """One moment of a parameter, or a part of it, is not there."""
        model, optimizer = trained(tf.LlamaConfig(**SIZES))
        model.save_pretrained(self.path("base"))
        base = "base=" + self.path("base")
        own, optim = get_state_dict(model, optimizer)
        name = "model.layers.0.mlp.up_proj.weight"
        half = {**optim, "state": {k: {m: t for m, t in v.items() if m != "exp_avg" or k != name} for k, v in optim["state"].items()}}
        dcp.save({"model": own, "optim": half}, checkpoint_id=self.path("half"), no_dist=True)
        self.assertIn(f"'model.{name}' has exp_avg_sq, but not exp_avg: is a file of the optimizer lost?", self.refused(self.path("half"), "state=exp_avg", base))
        self.view(self.path("half"), "state=exp_avg_sq", base)

    def test_megatron(self):
        for lost in ("__0_0.distcp", "__1_1.distcp"):
            run = self.path("megatron-" + lost)
            shutil.copytree(os.path.join(RUNS, "megatron"), run)
            os.remove(os.path.join(run, "iter_0000010", lost))
            self.assertIn(lost, self.refused(run, "state=exp_avg"))

    def test_nanotron(self):
        """The shards of one tensor-parallel rank of two are lost."""
        run = self.path("nanotron")
        for path in nanotron_run(run):
            if "tp-1-of-2" in path:
                os.remove(path)
        said = self.refused(run, "state=exp_avg")
        self.assertIn("' has none: left out: ", said)
        self.assertIn("rows 64..128 of 128 are in no shard", said)


class Frameworks(StatesCase):
    """Runs of the frameworks' own, whose optimizers' files torch writes anew with other values."""

    def check(self, run, *options):
        weights, _ = self.view(run, *options)
        masters, _ = self.view(run, "state=master", *options)
        self.assertEqual({t.dtype for t in masters.values()}, {torch.float32})
        self.same({k: t.bfloat16() for k, t in masters.items()}, weights)
        self.moments_are_of(run, masters, *options)

    def test_megatron(self):
        megatron_run(self.path("megatron"))
        self.check(self.path("megatron", "iter_0000010"))

    def test_nanotron(self):
        run = self.path("nanotron")
        shards = nanotron_run(run)
        self.check(run)
        os.truncate(shards[0], 1000)
        said = self.refused(run, "state=exp_avg")
        self.assertIn("has none: left out: ", said)


class Fixtures(StatesCase):
    """Every real checkpoint that has an optimizer: a state has the weights' names and shapes, and a master that is rounded is the weight."""

    def test_all(self):
        masters = moments = 0
        for path in sorted(p for root in case.roots() for p in glob.glob(os.path.join(root, "**", "case*.json"), recursive=True)):
            c = case.load(path)
            if c["compare"] == "refuse" or c.get("view") not in (None, "hf", "raw") or c.get("steps"):
                continue
            options = [o for o in case.options_of(c) if not o.startswith(("max_shard_size=", "dtype=", "missing=", "lora="))]
            run = os.path.join(c["folder"], c["open"])
            info = subprocess.run([CKPT, "info", run, "--json", *(a for o in options for a in ("-o", o))], capture_output=True, text=True)
            states = json.loads(info.stdout).get("states", {}) if info.returncode == 0 else {}
            if not states.keys() & {"exp_avg", "master"}:
                continue
            with self.subTest(case=os.path.relpath(path, c["folder"] + "/../..")):
                weights = self.view(run, *options)[0]
                for kind in ("exp_avg", "exp_avg_sq", "master"):
                    if kind not in states:
                        continue
                    if "mfsdp" in path:  # by number: nothing says whose they are
                        self.assertIn("nothing says whose", self.refused(run, f"state={kind}", *options))
                        continue
                    got = self.view(run, f"state={kind}", *options)[0]
                    if "torchtitan" in path:
                        self.assertEqual(sorted(got), sorted(weights))
                    moments += kind == "exp_avg"
                    for name, t in got.items() if c.get("view") != "raw" else ():
                        self.assertEqual(t.shape, weights[name].shape, name)
                        if kind == "master" and weights[name].element_size() == 2:
                            masters += 1
                            self.assertTrue(torch.equal(t.to(weights[name].dtype), weights[name]), name)
        self.assertGreater(moments, 0)
        self.assertGreater(masters, 0)


class Listing(StatesCase):
    def test_info(self):
        run = os.path.join(RUNS, "megatron")
        info = json.loads(subprocess.run([CKPT, "info", run, "--json"], capture_output=True, text=True, check=True).stdout)
        self.assertEqual(sorted(info["states"]), ["exp_avg", "exp_avg_sq", "master", "weight"])
        self.assertEqual(info["states"]["exp_avg"]["dtypes"], {"F32": info["states"]["exp_avg"]["tensors"]})


if __name__ == "__main__":
    unittest.main()
