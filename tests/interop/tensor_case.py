# SPDX-License-Identifier: Apache-2.0
"""What tests share that compare tensors with ckpt's: exports, reading them, and a test case with a folder of its own."""

import os
import shutil
import subprocess
import sys
import tempfile
import unittest

import torch
from safetensors import safe_open

sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "load"))
import ranks  # noqa: E402, F401

CKPT = os.path.join(os.environ.get("CKPTFS_BUILD", "build/dev"), "fs", "ckpt")
SEED = int(os.environ.get("CKPTFS_SEED", "1"))
CASES = int(os.environ.get("CKPTFS_CASES", "6"))


def export(run, out, *options):
    args = [CKPT, "export", run, out]
    for o in options:
        args += ["-o", o]
    return subprocess.run(args, capture_output=True, text=True)


def read_all(folder):
    tensors = {}
    for name in sorted(os.listdir(folder)):
        if name.endswith(".safetensors"):
            with safe_open(os.path.join(folder, name), "pt") as f:
                for k in f.keys():
                    tensors[k] = f.get_tensor(k)
    return tensors


def raw(t):
    return t.reshape(-1).contiguous().view(torch.uint8) if t.numel() else t.reshape(-1)


def randomise(model):
    saved = model.state_dict()
    for name, p in [*model.named_parameters(), *model.named_buffers()]:
        if name in saved and p.is_floating_point():
            p.data.normal_()
    return model


def fuse_qkv(tensors, kv_heads):
    """What torchtitan's FusedQKVLinear makes of q, k and v, and of their biases, when it loads them: for each head of k its heads of q, that of k,
    and that of v."""
    out = dict(tensors)
    for name in [k for k in tensors if ".wq." in k]:
        parts = [out.pop(name.replace(".wq.", f".w{x}.")).unflatten(0, (kv_heads, -1)) for x in "qkv"]
        out[name.replace(".wq.", ".wqkv.")] = torch.cat(parts, 1).flatten(0, 1)
    return out


class TensorCase(unittest.TestCase):
    def setUp(self):
        self.tmp = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.tmp)

    def path(self, *names):
        return os.path.join(self.tmp, *names)

    def same(self, got, want, what=""):
        self.assertEqual(sorted(got), sorted(want), what)
        for name, t in want.items():
            self.assertEqual((got[name].dtype, got[name].shape), (t.dtype, t.shape), f"{what}: {name}")
            self.assertTrue(torch.equal(raw(got[name]), raw(t)), f"{what}: {name}")


class ViewCase(TensorCase):
    """Views that are exported again and again, and those that are refused."""

    def view(self, run, *options):
        """{name: tensor} of the view, and what was said."""
        out = self.path("view")
        shutil.rmtree(out, ignore_errors=True)
        done = export(run, out, *options)
        self.assertEqual(done.returncode, 0, done.stderr)
        return read_all(out), done.stderr

    def refused(self, run, *options):
        """What is said."""
        done = subprocess.run([CKPT, "ls", run, *(a for o in options for a in ("-o", o))], capture_output=True, text=True)
        self.assertIn(done.returncode, (1, 2), done.stdout)
        return done.stderr


class WrittenCase(TensorCase):
    """Views in other formats, exported, and compared with directories."""
    maxDiff = None

    def export(self, run, out, *options):
        done = export(run, out, *options)
        self.assertEqual(done.returncode, 0, f"{options}: {done.stderr}")
        return out

    def same_files(self, got, want):
        self.assertEqual(sorted(os.listdir(got)), sorted(os.listdir(want)))
        for name in os.listdir(want):
            with open(os.path.join(got, name), "rb") as a, open(os.path.join(want, name), "rb") as b:
                self.assertTrue(a.read() == b.read(), name)

    def save_model(self, name, config, max_shard_size):
        """A random model of a config, saved as Hugging Face does: (its path, the model)."""
        import transformers as tf
        torch.manual_seed(SEED)
        model = randomise(tf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))
        path = self.path(name)
        model.save_pretrained(path, max_shard_size=max_shard_size)
        return path, model
