# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that torch's HuggingFaceStorageWriter writes here and now, from 2 to 8 processes on random meshes: every tensor of the
view has the bytes that were saved; a model is to the byte what save_pretrained writes; a lost shard is refused or changes nothing."""

import os
import random
import sys
import unittest

try:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers as tf

    import dcp_writer as writer
    from tensor_case import CASES, SEED, TensorCase, export, raw, read_all
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

tf.utils.logging.disable_progress_bar()
tf.utils.logging.set_verbosity_error()


class DcpHf(TensorCase):
    def check_random(self, world, seed, run):
        what = f"world {world}, CKPTFS_SEED={SEED}, case {seed}"
        done = export(run, run + ".out", "view=raw")
        self.assertEqual(done.returncode, 0, f"{what}: {done.stderr}")
        self.same(read_all(run + ".out"), writer.full_tensors(seed, world), what)

    def check_lost(self, world, seed, run):
        """Without any one of its files a checkpoint is refused, or only whole tensors and the ends of tensors are gone."""
        files = sorted(f for f in os.listdir(run) if f.startswith("shard-"))
        lost = random.Random(seed).choice(files)
        os.rename(os.path.join(run, lost), self.path("lost"))
        done = export(run, run + ".lost", "view=raw")
        if done.returncode == 0:
            want = writer.full_tensors(seed, world)
            for name, t in read_all(run + ".lost").items():
                part = want[name][tuple(slice(0, n) for n in t.shape)]
                self.assertTrue(torch.equal(raw(t), raw(part)), f"{name} without {lost}")
        else:
            self.assertTrue("tensor '" in done.stderr or "shard-" in done.stderr, done.stderr)

    def test_random_meshes(self):
        for world in (2, 3, 4, 8):
            seeds = [SEED * 1000 + world * 100 + i for i in range(CASES)]
            runs = [self.path(f"{world}-{s}") for s in seeds]
            writer.run(world, [{"kind": "random", "dir": d, "seed": s} for s, d in zip(seeds, runs)])
            for seed, run in zip(seeds, runs):
                self.check_random(world, seed, run)
                self.check_lost(world, seed, run)

    def test_models(self):
        torch.manual_seed(SEED)
        common = dict(vocab_size=101, hidden_size=48, intermediate_size=72, num_hidden_layers=12, num_attention_heads=6,
                      num_key_value_heads=3, head_dim=8, max_position_embeddings=64, bos_token_id=1, eos_token_id=2)
        for cls, tied in ((tf.LlamaConfig, False), (tf.LlamaConfig, True), (tf.Qwen3Config, False)):
            name = f"{cls.__name__}-{tied}"
            model = tf.AutoModelForCausalLM.from_config(cls(**common, tie_word_embeddings=tied), dtype=torch.bfloat16)
            base, want, run = self.path(name), self.path(name + ".want"), self.path(name + ".run")
            model.save_pretrained(base)
            model.save_pretrained(want, max_shard_size="100KB")
            writer.run(3, [{"kind": "model", "dir": run, "model": base}])
            os.remove(os.path.join(base, "model.safetensors"))  # a base that lends its config only
            done = export(run, run + ".out", f"base={base}", "max_shard_size=100KB")
            self.assertEqual(done.returncode, 0, done.stderr)
            for file in sorted(os.listdir(want)):
                with open(os.path.join(want, file), "rb") as a, open(os.path.join(run + ".out", file), "rb") as b:
                    self.assertTrue(a.read() == b.read(), f"{name}: {file}")
            loaded = tf.AutoModelForCausalLM.from_pretrained(run + ".out", dtype="auto").state_dict()
            self.same(loaded, dict(model.state_dict()), name)


if __name__ == "__main__":
    unittest.main()
