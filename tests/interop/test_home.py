# SPDX-License-Identifier: Apache-2.0
"""The config and the tokenizer that lie with a checkpoint's weights, or in the folder of its run, are found without an option, in any
format. The oracle is transformers' save_pretrained, and what `base=` makes of the same folder."""

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
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

from tensor_case import CKPT, SEED, TensorCase, export, randomise, read_all

SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=64)
FILES = ("config.json", "tokenizer_config.json")


def read(*path):
    with open(os.path.join(*path), "rb") as f:
        return f.read()


class Home(TensorCase):
    def setUp(self):
        super().setUp()
        torch.manual_seed(SEED)
        self.model = randomise(tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES, tie_word_embeddings=False)))
        self.base = self.path("base")
        self.model.save_pretrained(self.base)
        with open(self.path("base/tokenizer_config.json"), "w") as f:
            json.dump({"model_max_length": 64}, f)

    def dcp(self, at, **more):
        os.makedirs(self.path(at))
        dcp.save({"model": self.model.state_dict() | more}, checkpoint_id=self.path(at), no_dist=True)

    def put(self, at, files=FILES):
        os.makedirs(self.path(at), exist_ok=True)
        for name in files:
            shutil.copy(os.path.join(self.base, name), self.path(at))

    def info(self, path):
        done = subprocess.run([CKPT, "info", "--json", path], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    def served(self, run, config_from):
        """The run is the model, byte for byte as transformers saved it, and `info` says whose config that is."""
        out = self.path("out")
        done = export(run, out)
        self.assertEqual((done.returncode, "warning" in done.stderr), (0, False), f"{run}: {done.stderr}")
        self.assertEqual(sorted(os.listdir(out)), sorted(os.listdir(self.base)), run)
        for name in os.listdir(self.base):
            self.assertEqual(read(out, name), read(self.base, name), f"{run}: {name}")
        shutil.rmtree(out)
        self.assertEqual(os.path.realpath(self.info(run)["config_from"]), os.path.realpath(config_from), run)

    def test_places(self):
        for i, (weights, home, named) in enumerate((
                ("step-4", "step-4", ""), ("step-4", "", ""), ("step-4", "step-4/huggingface", ""), ("step-4", "huggingface", ""),
                ("step-4", "hf", "step-4"), ("step-4", "", "step-4"), ("checkpoint-2/pytorch_model_fsdp_0", "checkpoint-2", ""),
                ("checkpoint-2/pytorch_model_fsdp_0", "checkpoint-2/pytorch_model_fsdp_0", "checkpoint-2"),
                ("checkpoint-2/pytorch_model_fsdp_0", "checkpoint-2", "checkpoint-2/pytorch_model_fsdp_0"),
                ("checkpoint-2/pytorch_model_fsdp_0", "", ""))):
            with self.subTest(weights=weights, home=home, named=named):
                self.dcp(f"{i}/{weights}")
                self.put(f"{i}/{home}")
                self.served(self.path(f"{i}/{named}"), self.path(f"{i}/{home}"))

    def test_the_nearest_counts_and_a_base_before_all(self):
        self.dcp("run/step-4")
        self.put("run/step-4")
        self.put("run")
        with open(self.path("run/config.json"), "w") as f:
            json.dump({"model_type": "gpt2"}, f)
        self.served(self.path("run"), self.path("run/step-4"))
        with open(self.path("run/step-4/config.json"), "w") as f:
            json.dump({"model_type": "gpt2"}, f)
        done = export(self.path("run"), self.path("based"), f"base={self.base}")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(read(self.path("based"), "config.json"), read(self.base, "config.json"))

    def test_what_is_not_a_model_s_config(self):
        self.dcp("run/step-4")
        with open(self.path("run/step-4/config.json"), "w") as f:
            json.dump({"learning_rate": 0.1}, f)
        done = subprocess.run([CKPT, "info", self.path("run")], capture_output=True, text=True)
        self.assertIn("step-4/config.json' is not a model's: it has no model_type", done.stderr)
        self.assertIn("base=DIR", done.stderr)
        self.put("run")
        self.served(self.path("run"), self.path("run"))

    def test_another_model_s_config_is_refused(self):
        self.dcp("run/step-4")
        tf.LlamaConfig(**SIZES | {"vocab_size": 128}).save_pretrained(self.path("run"))
        done = export(self.path("run"), self.path("out"))
        self.assertEqual(done.returncode, 1)
        self.assertIn("has shape [64, 32] here, config.json says [128, 32]", done.stderr)

    def test_frameworks_whose_names_recipes_map(self):
        """torchtitan saves no config at all; with one it needs no base."""
        golden = os.path.join(os.environ.get("CKPTFS_SOURCE", "."), "tests", "golden", "torchtitan")
        found = 0
        for case in sorted(os.listdir(golden)):
            base, run = os.path.join(golden, case, "base"), self.path(case)
            if not os.path.isdir(base):
                continue
            found += 1
            shutil.copytree(os.path.join(golden, case), run)
            shutil.rmtree(os.path.join(run, "base"))
            step, = {os.path.dirname(root) if os.path.basename(root) == "checkpoint" else root
                     for root, _, files in os.walk(run) if ".metadata" in files}
            for name in os.listdir(base):
                if not name.startswith("model"):
                    shutil.copy(os.path.join(base, name), step)
            want = export(step, self.path(f"{case}.want"), f"base={step}")
            got = export(step, self.path(f"{case}.got"))
            self.assertEqual((want.returncode, got.returncode), (0, 0), want.stderr + got.stderr)
            self.same(read_all(self.path(f"{case}.got")), read_all(self.path(f"{case}.want")), case)
            self.assertEqual(read(self.path(f"{case}.got"), "config.json"), read(self.path(f"{case}.want"), "config.json"))
        self.assertGreater(found, 0)


if __name__ == "__main__":
    unittest.main()
