# SPDX-License-Identifier: Apache-2.0
"""The option average=: the mean of several steps. The oracle is torch: the sum in F64, one division, and torch's own rounding."""

import errno
import json
import os
import shutil
import subprocess
import sys
import unittest

try:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import torch.distributed.checkpoint as dcp
    import transformers as tf
    from safetensors.torch import load_file, save, save_file
    from tensor_case import CKPT, ViewCase
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

tf.utils.logging.disable_progress_bar()
tf.utils.logging.set_verbosity_error()
SIZES = dict(vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def mean(tensors, dtype):
    total = torch.zeros(tensors[0].shape, dtype=torch.float64)
    for t in tensors:
        total += t.double()
    return (total / len(tensors)).to(dtype)


def same(a, b):
    """Equal bits; NaNs are equal to each other, as their payload is nobody's."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    nan = a != a
    if not torch.equal(nan, b != b):
        return False
    zero = torch.zeros((), dtype=a.dtype)
    a, b = torch.where(nan, zero, a), torch.where(nan, zero, b)
    return a.contiguous().view(torch.uint8).equal(b.contiguous().view(torch.uint8)) if a.ndim else bool(a == b)


def special(dtype, seed):
    """Numbers of all sizes, ties, infinities, NaN, subnormals and zeros of both signs."""
    g = torch.Generator().manual_seed(seed)
    info = torch.finfo(dtype)
    edges = torch.tensor([0.0, -0.0, info.max, -info.max, info.tiny, info.smallest_normal / 2, float("inf"), float("-inf"), float("nan"), 1.0, 1.0 + info.eps],
                         dtype=torch.float64)
    picked = edges[torch.randint(len(edges), (300,), generator=g)]
    return torch.cat([picked, torch.randn(5000, generator=g, dtype=torch.float64), torch.randn(500, generator=g, dtype=torch.float64) * 1e-5]).to(dtype)


class Case(ViewCase):
    def tensors(self, run, *options):
        return self.view(run, *options)[0]

    def are(self, got, want):
        self.assertEqual(sorted(got), sorted(want))
        for k, t in want.items():
            self.assertTrue(same(got[k], t), k)


class Values(Case):
    def run_of(self, steps):
        """A run of DCPs, whose steps have these tensors."""
        for i, state in enumerate(steps):
            dcp.save(state, checkpoint_id=self.path("run", f"step-{(i + 1) * 10}"), no_dist=True)
        return self.path("run")

    def test_dtypes(self):
        steps = [{str(d)[6:]: special(d, 10 * i + k) for k, d in enumerate(FLOATS)} for i in range(4)]
        for state in steps:
            state["matrix"] = torch.randn(70, 90).bfloat16()
            state["scalar"], state["empty"], state["ids"] = torch.randn(()), torch.empty(0, 3), torch.arange(7)
        run = self.run_of(steps)
        for option, chosen in {"last:2": (2, 3), "last:3": (1, 2, 3), "last:4": (0, 1, 2, 3), "step-10+step-40": (0, 3), "step-40+step-10+step-20": (0, 1, 3)}.items():
            held = [steps[i] for i in chosen]
            floats = [k for k in held[0] if k != "ids"]
            with self.subTest(option=option):
                got = self.tensors(run, "view=raw", "average=" + option)
                self.are(got, {**{k: mean([s[k] for s in held], held[0][k].dtype) for k in floats}, "ids": held[0]["ids"]})
                for dtype in FLOATS[:3]:
                    got = self.tensors(run, "view=raw", "average=" + option, "dtype=" + str(dtype)[6:])
                    self.are({k: got[k] for k in floats}, {k: mean([s[k] for s in held], dtype) for k in floats})
        self.are(self.tensors(run, "view=raw", "average=step-20"), steps[1])

    def test_faults(self):
        a = {"w": torch.randn(4, 5), "ids": torch.arange(7)}
        for name, state, says in (
            ("names", {"w": a["w"], "x": a["ids"]}, "average: step 'step-10' has no tensor 'x', which 'step-20' has"),
            ("shape", {"w": torch.randn(4, 6), "ids": a["ids"]}, "average: 'w' is F32 [4, 6] in step 'step-20', and F32 [4, 5] in 'step-10'"),
            ("dtype", {"w": a["w"].half(), "ids": a["ids"]}, "average: 'w' is F16 [4, 5] in step 'step-20', and F32 [4, 5] in 'step-10'"),
            ("ids", {"w": a["w"], "ids": a["ids"] + 1}, "average: 'ids' is I64, of which there is no mean, and step 'step-10' has other values than 'step-20'"),
        ):
            with self.subTest(name=name):
                shutil.rmtree(self.path("run"), ignore_errors=True)
                self.assertIn(says, self.refused(self.run_of([a, state]), "view=raw", "average=last:2"))
        run = self.run_of([a, a])
        for option, says in {"last:3": "last:3: the run has only 2 finished steps", "last:0": "last:0 is no step", "step-10+step-30": "no finished step 'step-30'",
                             "step-10+step-10": "step 'step-10' is named twice", "step-10+": None, "+step-10": "a step's name is empty", "last": "no finished step 'last'"}.items():
            if says:
                self.assertIn(says, self.refused(run, "view=raw", "average=" + option), option)
        self.assertIn("is no folder of steps", self.refused(os.path.join(run, "step-10"), "view=raw", "average=last:1"))

    def test_names(self):
        os.makedirs(self.path("run"))
        for i, name in enumerate(("a+b-1", "a+b-2")):
            dcp.save({"w": torch.full((3,), float(i))}, checkpoint_id=self.path("run", name), no_dist=True)
        self.are(self.tensors(self.path("run"), "view=raw", "average=a\\+b-1+a\\+b-2"), {"w": torch.full((3,), 0.5)})


class Models(Case):
    """Steps of frameworks, through their recipes, in other views, and as adapters that are merged."""

    def models(self, n=3):
        run = self.path("run")
        weights = []
        for i in range(n):
            torch.manual_seed(i)
            model = tf.AutoModelForCausalLM.from_config(tf.Qwen2Config(**SIZES, tie_word_embeddings=False)).bfloat16()
            dcp.save({"model": model.state_dict()}, checkpoint_id=os.path.join(run, f"step-{i + 1}"), no_dist=True)
            weights.append({k: v.clone() for k, v in model.state_dict().items()})
        model.save_pretrained(self.path("base"))
        return run, weights

    def test_views(self):
        run, weights = self.models()
        base = "base=" + self.path("base")
        want = {k: mean([w[k] for w in weights], torch.bfloat16) for k in weights[0]}
        self.are(self.tensors(run, base, "average=last:3"), want)
        self.are(self.tensors(run, base, "average=last:3", "dtype=float32"), {k: mean([w[k] for w in weights], torch.float32) for k in want})
        for view in ("view=dcp", "view=nanotron,tp=2", "view=megatron,tp=2,pp=2", "view=megatron_legacy,tp=2"):
            with self.subTest(view=view):
                shutil.rmtree(self.path("other"), ignore_errors=True)
                subprocess.run([CKPT, "export", run, self.path("other"), "-o", base, "-o", "average=last:3", "-o", view], check=True, capture_output=True)
                self.are(self.tensors(self.path("other"), base), want)
        info = json.loads(subprocess.run([CKPT, "info", run, "--json", "-o", base, "-o", "average=last:3"], capture_output=True, text=True, check=True).stdout)
        self.assertEqual(info["average"], ["step-1", "step-2", "step-3"])
        self.assertNotIn("steps", info)

    def test_config(self):
        run = self.path("hf")
        for i, size in enumerate((48, 48, 64)):
            torch.manual_seed(i)
            tf.AutoModelForCausalLM.from_config(tf.LlamaConfig(**{**SIZES, "intermediate_size": size})).save_pretrained(os.path.join(run, f"checkpoint-{i + 1}"))
        held = [load_file(os.path.join(run, f"checkpoint-{i}", "model.safetensors")) for i in (1, 2)]
        self.are(self.tensors(run, "average=checkpoint-1+checkpoint-2"), {k: mean([h[k] for h in held], torch.float32) for k in held[0]})
        self.assertIn("config.json of step 'checkpoint-2' has another 'intermediate_size' than that of 'checkpoint-3'", self.refused(run, "average=last:2"))


class Mounted(Case):
    def test_mount(self):
        run = self.path("run")
        steps = []
        for i in range(3):
            steps.append({"a.weight": torch.randn(300, 200), "b.weight": torch.randn(70)})
            os.makedirs(os.path.join(run, f"checkpoint-{i}"))
            save_file(steps[-1], os.path.join(run, f"checkpoint-{i}", "model.safetensors"), metadata={"format": "pt"})
        mnt, fd = self.path("mnt"), os.open("/dev/null", os.O_RDONLY)
        os.makedirs(mnt)
        subprocess.run([os.path.join(os.path.dirname(CKPT), "ckptfs"), run, mnt, "-o", "view=raw,average=last:2"], check=True, capture_output=True)
        try:
            self.assertEqual(os.listdir(mnt), ["model.safetensors"])
            self.are(load_file(os.path.join(mnt, "model.safetensors")), {k: mean([s[k] for s in steps[1:]], torch.float32) for k in steps[0]})
            with open(os.path.join(mnt, ".ckptfs", "stats.json")) as f:
                self.assertEqual(json.load(f)["average"], ["checkpoint-1", "checkpoint-2"])
            # a step that is new is none of them; one that is saved again is not mixed with what was opened
            shutil.copytree(os.path.join(run, "checkpoint-0"), os.path.join(run, "checkpoint-9"))
            os.close(fd)
            fd = os.open(os.path.join(mnt, "model.safetensors"), os.O_RDONLY)
            again = save({k: t + 1 for k, t in steps[1].items()}, metadata={"format": "pt"})
            with open(os.path.join(run, "checkpoint-1", "model.safetensors"), "r+b") as f:
                f.write(again)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            with self.assertRaises(OSError) as e:
                for at in range(0, os.fstat(fd).st_size, 4096):
                    os.pread(fd, 4096, at)
            self.assertEqual(e.exception.errno, errno.ESTALE)
        finally:
            os.close(fd)
            subprocess.run(["fusermount3", "-u", mnt], check=True)


if __name__ == "__main__":
    unittest.main()
