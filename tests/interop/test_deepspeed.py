# SPDX-License-Identifier: Apache-2.0
"""What the installed versions of DeepSpeed write at test time (deepspeed_writer.py), against the live model and DeepSpeed's own
converter. CKPTFS_DEEPSPEED: folders named deepspeed-VERSION (pip install --no-deps --target), separated by ':'."""

import os
import re
import shutil
import sys
import unittest

try:
    import torch

    import deepspeed_writer as writer
    import megatron_deepspeed_writer as mds
    from megatron_deepspeed_case import ModelCase, gpt2, llama, trained
    from tensor_case import CASES, SEED, TensorCase, export, ranks, read_all
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

VERSIONS = [p for p in os.environ.get("CKPTFS_DEEPSPEED", "").split(":") if os.path.isdir(p)]
if not VERSIONS:
    print("skipped: CKPTFS_DEEPSPEED has no folder with deepspeed")
    sys.exit(77)


def widened(tensors):
    return {k: t.float() if t.is_floating_point() else t for k, t in tensors.items()}


def moments_of(tensors):
    return {k: t for k, t in tensors.items() if k.startswith("optim.state.")}


class Written(TensorCase):
    more = ()  # options of both views

    def view(self, at, *options):
        options += self.more
        shutil.rmtree(at + ".out", ignore_errors=True)
        done = export(at, at + ".out", "view=raw", *options)
        self.assertEqual(done.returncode, 0, done.stderr)
        return read_all(at + ".out"), done.stderr

    def subset(self, got, want, what):
        self.same({k: got[k] for k in want if k in got}, want, what)

    def served(self, at, weights, masters, moments, what, left_out=False):
        """Both views have these weights and masters, and the moments, of which those known are compared."""
        got, said = self.view(at)
        states = moments_of(got)
        self.same({k: t for k, t in got.items() if k not in states}, weights, what)
        self.subset(states, moments, what + ": moments")
        if left_out is not None:
            self.assertEqual("left out" in said, left_out, what)
        got, _ = self.view(at, "dtype=float32")
        self.same({k: t for k, t in got.items() if k not in states}, widened(weights) | masters, what + ": float32")
        self.subset(got, moments, what + ": float32: moments")

    def clear(self):
        shutil.rmtree(self.tmp)
        os.makedirs(self.tmp)

    def ranks(self, version, world, function, *args):
        ranks.run(world, "deepspeed_writer", function, ranks.free_port(), self.tmp, *args, folder=self.tmp, PYTHONPATH=version)


class Toys(Written):
    @staticmethod
    def nameless(plan):
        """Are the optimizer's states in the model file, without names?"""
        return not plan["stage"] and not plan["bf16_optimizer"]

    def toy(self, plan):
        at = self.path(f"toy-{plan['seed']}")
        want = torch.load(at + ".want")
        names = writer.trained_names(plan)
        weights = {k: t for k, t in want["weights"].items() if not (plan["exclude"] and k in names["frozen"])}
        masters = dict(want["masters"])
        converted = {k: t for k, t in want["converted"].items() if k in names["trained"]}
        if plan["stage"]:
            self.assertEqual(sorted(converted), sorted(names["trained"]))
        for alias, owner in names["tied"].items():
            if owner in masters:
                masters[alias] = masters[owner]
        self.subset(masters, {k: t for k, t in converted.items() if k in masters}, "DeepSpeed's converter and its live model")
        masters |= widened(converted)
        tag = os.path.join(at, f"global_step{plan['steps']}")
        self.served(tag, weights, masters, want["moments"], str(plan), left_out=self.nameless(plan))
        if plan["universal"]:
            universal = {k: t for k, t in weights.items()}
            self.served(tag + "_universal", universal, masters, want["moments"], f"universal {plan}")

    def test_all(self):
        for version in VERSIONS:
            old = version.endswith("-0.16.7")
            for world in (1, 2, 3, 4):
                seeds = [1000 * SEED + 100 * world + i for i in range(max(1, CASES // 2))]
                self.ranks(version, world, "toys", seeds, old)
                for seed in seeds:
                    plan = writer.make_plan(seed, world, old)
                    with self.subTest(version=os.path.basename(version), plan=plan):
                        self.toy(plan)
                self.clear()


class Wrapped(Written):
    def test_all(self):
        for version in VERSIONS:
            # 0.16.7 fails to save the steps of torch's AdamW with elastic_checkpoint, and to train such modules with ZeRO 3
            stages, elastic = ((1, 2), 0) if version.endswith("-0.16.7") else ((1, 2, 3), 1)
            self.ranks(version, 3, "wrapped", stages, elastic)
            for stage in stages:
                with self.subTest(version=os.path.basename(version), stage=stage):
                    tag = self.path(f"wrapped{stage}/global_step1")
                    want = torch.load(self.path(f"wrapped{stage}.want"))
                    for options, tensors in (((), {k: t.bfloat16() for k, t in want.items()}), (("dtype=float32",), want)):
                        got, said = self.view(tag, *options)
                        self.same({k: got.get(k) for k in tensors}, tensors, str(options))
                        states = {f"optim.state.{k}.{x}" for k in want if k != "head.weight" and k[:8] != "layers.2" for x in ("exp_avg", "exp_avg_sq")}
                        self.assertEqual(set(moments_of(got)), set() if stage == elastic else states)
                        self.assertEqual("elastic_checkpoint" in said, stage == elastic)
                        if stage < 3 and stage != elastic:
                            self.same(self.view(tag + "_universal", *options)[0], got, f"universal {options}")
                    if stage == 3:
                        done = export(tag + "_universal", self.path("none"), "view=raw")
                        self.assertIn("the values of 'layers.2.weight' (a frozen parameter?) are not in this universal checkpoint", done.stderr)
            self.clear()


class Experts(Written):
    def experts(self, plan, old):
        at = self.path(f"moe-{plan['seed']}")
        weights, masters, moments = {}, {}, {}
        for rank in range(plan["world"]):
            want = torch.load(f"{at}.want-{rank}")
            weights |= want["weights"]
            masters |= want["masters"]
            moments |= want["moments"]
        tag = os.path.join(at, f"global_step{plan['steps']}")
        if old and plan["stage"]:  # nothing names what the optimizer's files hold
            got, said = self.view(tag)
            self.same(got, weights, str(plan))
            self.assertIn("the optimizer's states are left out", said)
            done = export(tag, at + ".none", "view=raw", "dtype=float32")
            self.assertEqual(done.returncode, 1)
            self.assertIn("has no param_shapes", done.stderr)
        else:
            self.served(tag, weights, masters if plan["stage"] else {}, moments if plan["stage"] else {}, str(plan))

    def test_all(self):
        for version in VERSIONS:
            for world in (2, 4):
                seeds = [1000 * SEED + 100 * world + i for i in range(max(1, CASES // 3))]
                self.ranks(version, world, "moes", seeds, version.endswith("-0.16.7"))
                for seed in seeds:
                    plan = writer.moe_plan(seed, world)
                    with self.subTest(version=os.path.basename(version), plan=plan):
                        self.experts(plan, version.endswith("-0.16.7"))
                self.clear()


class Parallel(Written):
    def test_tied(self):
        """Of tied parameters, only the first rank's file says so, and the rules for joining the ranks name one."""
        for version in VERSIONS:
            if version.endswith("-0.16.7"):
                continue
            self.ranks(version, 4, "parallels", [1, 2, 3])
            for name, _ in writer.tied_models():
                for stage in (1, 2, 3):
                    with self.subTest(version=os.path.basename(version), name=name, stage=stage):
                        want = torch.load(self.path(f"{name}{stage}.want"))
                        self.served(self.path(f"{name}{stage}/global_step1"), want, widened(want), {}, f"{name}{stage}")
            self.clear()


class Pipelines(Written):
    def pipeline(self, plan, old):
        at = self.path(f"pipe-{plan['seed']}")
        wants = [torch.load(f"{at}.want-{rank}") for rank in range(plan["world"])]
        weights, masters, moments = ({k: t for want in wants for k, t in want[x].items()} for x in ("weights", "masters", "moments"))
        tag = os.path.join(at, f"global_step{plan['steps']}")
        named = plan["stage"] or (old and plan["dtype"] == "bf16")
        self.more = ()
        if not named and "function" in plan["kinds"]:  # whether a file is missing there, nothing tells
            done = export(tag, at + ".none", "view=raw")
            self.assertEqual(done.returncode, 1)
            self.assertIn("is missing although its neighbours are there", done.stderr)
            self.more = ("allow_partial",)
        if plan["tied"]:  # the last layer has a file too
            last = len(plan["kinds"])
            for tensors in (weights, masters):
                tensors |= {f"{last}.{x}": tensors[f"0.{x}"] for x in ("weight", "bias") if tensors and f"0.{x}" in tensors}
        if not named and plan["dtype"] == "bf16":  # optimizer files whose parameters nothing names
            got, said = self.view(tag)
            self.same(got, weights, str(plan))
            self.assertIn("the optimizer's states are left out", said)
            done = export(tag, at + ".none", "view=raw", "dtype=float32", *self.more)
            self.assertEqual(done.returncode, 1)
            self.assertIn("has no param_shapes", done.stderr)
            return
        self.served(tag, weights, masters if named else {}, moments if named else {}, str(plan), left_out=None)
        if plan["universal"]:
            own = (lambda k: re.sub(r"^(optim\.state\.)?0\.", r"\1tied_modules.tie.", k)) if plan["tied"] else lambda k: k
            last = f"{len(plan['kinds'])}."  # which layers are tied, the conversion does not say
            weights, masters, moments = ({own(k): t for k, t in d.items() if not k.startswith(last)} for d in (weights, masters, moments))
            self.served(tag + "_universal", weights, masters, moments, f"universal {plan}", left_out=None)
            said = self.view(tag + "_universal")[1]
            self.assertIn("parameters that were not trained, if the pipeline had any", said)
            self.assertEqual("several stages list 'tied_modules.tie.weight'" in said, plan["tied"])

    def test_all(self):
        for version in VERSIONS:
            for world in (2, 4):
                seeds = [1000 * SEED + 100 * world + i for i in range(max(1, CASES // 3))]
                self.ranks(version, world, "pipes", seeds)
                for seed in seeds:
                    plan = writer.pipe_plan(seed) | {"world": world}
                    with self.subTest(version=os.path.basename(version), plan=plan):
                        self.pipeline(plan, version.endswith("-0.16.7"))
                self.clear()


class ParallelPipelines(ModelCase):
    """Nothing says how the parameters of a pipeline's tensor-parallel ranks are cut: DeepSpeed's converter refuses, and what it makes if it is told
    to go on has every parameter twice as large as it is, as all ranks have the same. We refuse both."""
    ranks = Written.ranks

    def test_refused(self):
        version = next((v for v in VERSIONS if not v.endswith("-0.16.7")), None)
        if not version:
            self.skipTest("DeepSpeed 0.19 is needed")
        at = self.path("parallel")
        self.ranks(version, 4, "pipe_parallel")
        tag = os.path.join(at, "global_step1")
        with open(at + ".said") as f:
            self.assertIn("universal_checkpoint_info", f.read())
        one, two = (torch.load(os.path.join(tag, f"layer_00-model_{t:02d}-model_states.pt"), weights_only=False)["weight"] for t in (0, 1))
        made = torch.load(os.path.join(tag + "_universal", "zero", "0.weight", "fp32.pt"), weights_only=False)["param"]
        self.assertTrue(torch.equal(one, two) and torch.equal(made.view(-1), torch.cat([one, two]).view(-1)))
        for options in (["view=raw"], ["view=raw", "allow_partial"], ["view=raw", "dtype=float32"]):
            self.refused(tag, "does not say how the layers of several tensor-parallel ranks are joined (no universal_checkpoint_info)", *options)
            self.refused(tag + "_universal", "had no rules to join the parts of 2 tensor-parallel ranks (--inject_missing_state joins all as rows", *options)
        first = os.path.join(tag, "mp_rank_00_model_states.pt")
        root = torch.load(first, weights_only=False)
        torch.save(root | {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}, first)
        self.refused(tag, "convert the tag by DeepSpeed's ds_to_universal", "view=raw")


class MegatronPipelines(ModelCase):
    """Universal checkpoints of pipelines with Megatron-DeepSpeed's layers, whose numbers of ranks are 4."""
    ranks, clear = Written.ranks, Written.clear
    plans = ("llama", 2, 2, "bf16"), ("tied", 2, 1, "fp16"), ("gpt2", 1, 2, "fp32"), ("gpt2", 2, 2, "bf16")

    def plan(self, name, kind, tp, pp, dtype, **info):
        """Write NAME.plan."""
        cfg, sd = gpt2() if kind == "gpt2" else llama(kind == "tied")
        full = trained(sd)
        model = mds.Model(full, cfg, 4)
        root = model.root(tp, pp)
        root["universal_checkpoint_info"] |= info
        client = {k: root[k] for k in ("args", "checkpoint_version", "iteration", "tokens", "universal_checkpoint_info")}
        zero = {"stage": 1, "dtype": dtype, "round_robin": False, "align": False, "sub_group": 10**9, "persist": 0}
        torch.save({"layers": mds.pipeline(model), "tied": not model.head, "tp": tp, "pp": pp, "client": client, "zero": zero}, self.path(name + ".plan"))

    def raw(self, name, tp, pp, tied):
        """The layers' own names; without tensor parallelism, the moments, too."""
        universal = self.path(name + "/global_step1_universal")
        self.assertEqual(export(universal, self.path("raw"), "view=raw", "dtype=float32").returncode, 0)
        got = read_all(self.path("raw"))
        shutil.rmtree(self.path("raw"))
        layers = torch.load(self.path(name + ".plan"), weights_only=False)["layers"]
        own = {f"{'tied_modules.embed' if tied and number == 1 else number}.{k}": t for number, layer in layers for k, (t, _) in layer.items()}
        cut = lambda k, t: t[:60] if k.endswith(("word_embeddings.weight", "lm_head.weight")) else t
        moments = moments_of(got)
        self.same({k: t for k, t in got.items() if k not in moments}, {k: cut(k, t) for k, t in own.items()}, name)
        self.assertEqual(set(moments), {f"optim.state.{k}.{x}" for k in own for x in ("exp_avg", "exp_avg_sq")})
        if tp == 1:
            wants = [torch.load(self.path(f"{name}.want-{rank}"))["moments"] for rank in (3, 2, 1, 0)]  # the first stage's are kept
            self.same(moments, {k: cut(k.rsplit(".", 1)[0], t) for want in wants for k, t in want.items()}, name + ": moments")

    def refusals(self, tag):
        """What was left out, or is of another save."""
        drop = lambda key: lambda root: root.pop(key)
        names = [os.path.join(tag, f"mp_rank_{i:02d}_model_states.pt") for i in range(4)]
        experts = {"2.mlp.deepspeed_moe.experts.deepspeed_experts.0.w": torch.Size([3])}
        for i, change, needle in (
                (0, drop("universal_checkpoint_info"), "had no rules to join the parts of 2 tensor-parallel ranks"),
                (2, drop("param_shapes"), "mp_rank_02_model_states.pt' has no param_shapes"),
                (1, lambda root: root["param_shapes"].append(experts), "cannot convert the experts of a pipeline"),
                (3, lambda root: root["buffer_names"].append("5.scale"), "the values of 1 buffers ('5.scale', ...), which 'mp_rank_03_model_states.pt' lists"),
                (3, lambda root: root["param_shapes"].append({"9.x": torch.Size([3])}), "the model files of 1 ranks list '9.x', those of 2 tensor-parallel ranks"),
                (2, lambda root: root["param_shapes"][0].update({"6.weight": torch.Size([3])}), "in a shape other than param_shapes"),
                (3, lambda root: root["param_shapes"].append({"1.word_embeddings.weight": torch.Size([32, 32])}), "the model files of 2 ranks list '2."),
                (0, lambda root: root.update(mp_world_size=8, checkpoint_parallel_dimensions={}), "model_states.pt' says that there are 8"),
                (0, lambda root: root.update(module=[]), "'module' is not a state dict")):
            root = torch.load(names[i], weights_only=False)
            shutil.copy(names[i], self.path("before"))
            change(root)
            torch.save(root, names[i])
            self.refused(tag, needle, "view=raw")
            shutil.copy(self.path("before"), names[i])
        os.rename(names[3], self.path("rank3"))
        self.refused(tag, "says that there are 4", "view=raw")
        os.rename(self.path("rank3"), names[3])
        os.rename(os.path.join(tag, "zero/6.weight"), self.path("norm"))
        self.refused(tag, "zero/6.weight/fp32.pt' is missing", "view=raw")
        os.rename(self.path("norm"), os.path.join(tag, "zero/6.weight"))

    def warned(self, tag, text, *options):
        done = export(tag, self.path("warned"), "view=raw", *options)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(text, done.stderr)
        shutil.rmtree(self.path("warned"))

    def left_out(self, tag):
        path = os.path.join(tag, "mp_rank_03_model_states.pt")
        root = torch.load(path, weights_only=False)
        torch.save(root | {"buffer_names": ["5.scale", "5.shift"]}, path)
        self.warned(tag, "the values of 2 buffers ('5.scale', ...)", "allow_partial")
        torch.save(root, path)

    def unknown_dtype(self, tag):
        path = os.path.join(tag, "mp_rank_00_model_states.pt")
        for config in ({}, {"bf16": {"enabled": "auto"}}, {"bf16": {"enabled": True}, "keep_in_fp32_modules": ["norm"]}):
            root = torch.load(path, weights_only=False)
            torch.save(root | {"ds_config": config}, path)
            self.warned(tag, "does not say in which dtype the pipeline was trained: its F32 masters are shown")

    def shown_all(self, name, kind, tp, pp, dtype):
        tag = self.path(name + "/global_step1_universal")
        self.refused(tag, "a model of Megatron-DeepSpeed")
        self.raw(name, tp, pp, kind != "llama")
        if kind == "llama":
            self.refusals(tag)
            self.left_out(tag)
            self.unknown_dtype(tag)

    def test_all(self):
        for i, version in enumerate(VERSIONS):  # each plan with one of them
            plans = {"-".join(map(str, plan)): plan for plan in self.plans[i::len(VERSIONS)]}
            for name, plan in plans.items():
                self.plan(name, *plan)
            self.plan("unmatched", "gpt2", 1, 2, "bf16", pipeline_replicated_parameter_patterns=[])
            self.ranks(version, 4, "megatron_pipes", [*plans, "unmatched"])
            for name, plan in plans.items():
                with self.subTest(version=os.path.basename(version), name=name):
                    self.shown_all(name, *plan)
            self.warned(self.path("unmatched/global_step1_universal"), "has the copy of the last one")
            self.clear()


if __name__ == "__main__":
    unittest.main()
