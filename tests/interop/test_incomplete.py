# SPDX-License-Identifier: Apache-2.0
"""Model directories that lack tensors: refused where transformers reports them as missing, and shown where it does not. For every type
that a model file lists and transformers has; one tensor of each kind (of all layers and experts) is taken out in turn; and tensors of other
shapes are refused. What is not checked says so in `ckpt info`."""

import json
import os
import re
import shutil
import subprocess
import sys
import unittest

try:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers as tf
    from safetensors.torch import load_file, save_file
    from transformers.models.auto import modeling_auto as lists

    from tensor_case import CKPT, TensorCase, export
    from test_families import small_model
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

tf.utils.logging.disable_progress_bar()
tf.utils.logging.set_verbosity_error()
MODELS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "core", "recipe", "data", "models")

UNCHECKED = ["gemma3", "llama4", "llama4_text"]  # the first is a class with an encoder; of the others the list has the whole model's names


def listed_types():
    for name in sorted(os.listdir(MODELS)):
        with open(os.path.join(MODELS, name)) as f:
            model = json.load(f)
        if not model.get("open"):
            yield from (t for t in model.get("model_types", []) if t in lists.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


class Incomplete(TensorCase):
    def lacks(self, source):
        """What transformers misses in this directory."""
        try:
            return sorted(tf.AutoModelForCausalLM.from_pretrained(source, output_loading_info=True)[1]["missing_keys"])
        except RuntimeError as e:  # one of the tensors that it stacks
            return [str(e)]

    def check(self, kind, source, what):
        missing = self.lacks(source)
        done = export(source, self.path("out"))
        shutil.rmtree(self.path("out"), ignore_errors=True)
        with self.subTest(type=kind, without=what):
            self.assertEqual(done.returncode, 1 if missing else 0, (missing, done.stderr))
            if missing:
                self.assertRegex(done.stderr, r"lacks \d+ tensors? of the model")
                self.assertIn(what, done.stderr)
                self.assertIn("allow_partial", done.stderr)

    def test_a_tensor_less(self):
        checked, unchecked = 0, []
        for kind in listed_types():
            source = self.path("model")
            try:
                small_model(kind, tf.AutoModelForCausalLM).save_pretrained(source)
            except Exception as e:  # a type whose default config cannot be made small
                print(f"{kind}: not built ({str(e)[:100]})")
                continue
            self.check(kind, source, None)
            info = json.loads(subprocess.run([CKPT, "info", source, "--json"], capture_output=True, text=True, check=True).stdout)
            if "completeness_not_checked" in info:
                unchecked.append(kind)
                shutil.rmtree(source)
                continue
            tensors = load_file(os.path.join(source, "model.safetensors"))
            kinds = {re.sub(r"\d+", "#", name): name for name in sorted(tensors)}
            for name in kinds.values():
                save_file({k: t for k, t in tensors.items() if k != name}, os.path.join(source, "model.safetensors"), metadata={"format": "pt"})
                self.check(kind, source, name)
            grown = {k: t.new_zeros((t.shape[0] + 1, *t.shape[1:])) if t.dim() else t for k, t in tensors.items()}
            save_file(grown, os.path.join(source, "model.safetensors"), metadata={"format": "pt"})
            done = subprocess.run([CKPT, "info", source], capture_output=True, text=True)
            with self.subTest(type=kind, shapes="larger"):
                self.assertEqual(done.returncode, 1)
                self.assertGreater(int(re.search(r"(\d+) tensors are of another shape", done.stderr)[1]), len(tensors) * 0.8)
            shutil.rmtree(source)
            checked += 1
        self.assertGreater(checked, 15)
        self.assertEqual(unchecked, UNCHECKED)


if __name__ == "__main__":
    unittest.main()
