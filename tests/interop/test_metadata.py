# SPDX-License-Identifier: Apache-2.0
"""The entries of `__metadata__` in a Hugging Face directory's files stay, in the files that are shown and in Python's metadata(). The oracle is
safetensors: its save_file writes what is read, and its safe_open reads what is shown."""

import json
import os
import re
import sys
import unittest

try:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers as tf
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

tf.utils.logging.disable_progress_bar()
HERE = os.path.dirname(os.path.abspath(__file__))
os.environ["CKPTFS_LIBRARY_PATH"] = os.environ.get("CKPTFS_BUILD", "build/dev")
sys.path.insert(0, os.path.join(HERE, "..", "..", "contrib", "python"))
import ckptfs  # noqa: E402

from tensor_case import SEED, TensorCase, export, randomise  # noqa: E402

SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=64)
PT = {"format": "pt"}
STRANGE = {'a"\\/é\n\x01\x7f\u2028': '{"_type": "Float8Tensor"}', "": "", "long": "\t" * 200_000}


def read(*path):
    with open(os.path.join(*path), "rb") as f:
        return f.read()


def shown(folder):
    """Return {file: metadata} by safetensors."""
    found = {}
    for name in sorted(os.listdir(folder)):
        if name.endswith(".safetensors"):
            with safe_open(os.path.join(folder, name), "pt") as f:
                found[name] = f.metadata()
    return found


class Metadata(TensorCase):
    def model(self, at, *metadata):
        """Save a model of as many files as there are arguments, each with its metadata, and return the files' names."""
        torch.manual_seed(SEED)
        model = randomise(tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES, tie_word_embeddings=False)))
        model.save_pretrained(self.path(at))
        tensors, n = load_file(self.path(f"{at}/model.safetensors")), len(metadata)
        os.remove(self.path(f"{at}/model.safetensors"))
        names = [f"model-{i + 1:05}-of-{n:05}.safetensors" for i in range(n)] if n > 1 else ["model.safetensors"]
        where = {tensor: names[i * n // len(tensors)] for i, tensor in enumerate(sorted(tensors))}
        for name, entries in zip(names, metadata):
            save_file({k: v for k, v in tensors.items() if where[k] == name}, self.path(f"{at}/{name}"), metadata=entries)
        if n > 1:
            with open(self.path(f"{at}/model.safetensors.index.json"), "w") as f:
                json.dump({"metadata": {}, "weight_map": where}, f)
        return names

    def adapter(self, at, metadata):
        """Save a PEFT adapter of the model."""
        os.makedirs(self.path(at))
        name = "base_model.model.model.layers.0.self_attn.q_proj.lora_%s.weight"
        save_file({name % "A": torch.randn(4, 32), name % "B": torch.randn(32, 4)}, self.path(f"{at}/adapter_model.safetensors"), metadata=metadata)
        with open(self.path(f"{at}/adapter_config.json"), "w") as f:
            json.dump({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}, f)

    def check(self, run, want, *options, warns=None):
        """Export a run, and compare its files' metadata with `want`, {file: metadata}; and what Python says with their union."""
        self.out = self.path(f"out-{run}-{len(os.listdir(self.tmp))}")
        done = export(self.path(run), self.out, *options)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(shown(self.out), want)
        if warns:
            self.assertRegex(done.stderr, warns)
        else:
            self.assertNotIn("warning", done.stderr)
        said = [m for m in want.values() if m is not None]
        union = {k: v for m in said for k, v in m.items() if all(o.get(k, v) == v for o in said)}
        with ckptfs.open(self.path(run), options=dict(o.split("=") for o in options)) as view:
            self.assertEqual(view.metadata(), union if said else None)

    def test_a_files_own_entries_stay(self):
        metadata = ({**PT, "step": "1"}, {"step": "2", "by": "us"}, None, {"format": "mlx", **STRANGE})
        names = self.model("run", *metadata)
        want = [{**PT, **(m or {})} for m in metadata]
        self.check("run", dict(zip(names, want)))
        for name, entries in zip(names, metadata):
            if entries and "format" in entries:
                self.assertTrue(read(self.out, name) == read(self.path("run"), name), name)
        self.check("run", dict(zip(names, want)), "dtype=bfloat16")

    def test_files_split_anew_have_the_union_where_they_agree(self):
        names = self.model("run", {**PT, "step": "1", "by": "us"}, {"step": "2", "by": "us"}, {"host": "here"}, None)
        union = {**PT, "by": "us", "host": "here"}
        self.check("run", {"model.safetensors": union}, "max_shard_size=5GB", warns=re.escape("1 entries of __metadata__") + ".*'step' first")
        done = export(self.path("run"), self.path("split"), "max_shard_size=9KB")
        self.assertEqual(done.returncode, 0, done.stderr)
        found = shown(self.path("split"))
        self.assertGreater(len(found), len(names))
        self.assertEqual(found, dict.fromkeys(found, union))

    def test_files_of_the_bases_split_have_the_union(self):
        self.model("run", {**PT, "step": "1"})
        names = self.model("base", {"base": "1"}, {"base": "2"})
        self.check("run", dict.fromkeys(names, {**PT, "step": "1"}), f"base={self.path('base')}")

    def test_one_file(self):
        for at, entries in (("some", STRANGE), ("none", None), ("format", PT)):
            self.model(at, entries)
            self.check(at, {"model.safetensors": {**PT, **(entries or {})}})
        self.assertTrue(read(self.out, "model.safetensors") == read(self.path("format"), "model.safetensors"))

    def test_what_torch_says_of_a_ranks_parts_is_not_shown(self):
        self.model("run", {**PT, "DCP_SHARDING_INFO": "{}", "DCP_VERSION": "1.0", "mine": "1"})
        self.check("run", {"model.safetensors": {**PT, "mine": "1"}})

    def test_adapters(self):
        self.model("base", {**PT, "base": "1"})
        for at, entries in (("some", {**PT, "rank": "4"}), ("none", None), ("format", PT)):
            self.adapter(at, entries)
            self.check(at, {"adapter_model.safetensors": entries})
            self.assertTrue(read(self.out, "adapter_model.safetensors") == read(self.path(at), "adapter_model.safetensors"), at)
            merged = self.path(f"merged-{at}")
            done = export(self.path(at), merged, "lora=merge", f"base={self.path('base')}")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(shown(merged), {"model.safetensors": PT}, "as save_pretrained writes a merged model")
        self.adapter("other", {"rank": "4"})
        self.check("other", {"adapter_model.safetensors": {**PT, "rank": "4"}})

    def test_entries_that_are_too_large_are_left_out(self):
        names = self.model("run", {**PT, "step": "1"}, {"large": "x" * (33 << 20)})
        self.check("run", {names[0]: {**PT, "step": "1"}, names[1]: PT}, warns=f"{names[1]}.*left out: at most 32 MiB")

    def test_views_without_safetensors_files(self):
        self.model("run", {**PT, "step": "1"})
        with ckptfs.open(self.path("run"), view="dcp") as view:
            self.assertEqual(view.metadata(), PT)


if __name__ == "__main__":
    unittest.main()
