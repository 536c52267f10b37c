# SPDX-License-Identifier: Apache-2.0
"""What the installed versions of DeepSpeed write at test time (deepspeed_writer.py), against the live model and DeepSpeed's own
converter. CKPTFS_DEEPSPEED: folders named deepspeed-VERSION (pip install --no-deps --target), separated by ':'."""

import os
import shutil
import sys
import unittest

try:
    import torch

    import deepspeed_writer as writer
    import ranks
    from tensor_case import CASES, SEED, TensorCase, export, read_all
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


if __name__ == "__main__":
    unittest.main()
