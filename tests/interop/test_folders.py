# SPDX-License-Identifier: Apache-2.0
"""The folders of a model directory: sentence-transformers' modules and transformers' other chat templates are shown with their files; a
trainer's steps and logs are not, and what else is left out is named. The oracles are the directory itself and save_pretrained."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import unittest

try:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import torch.distributed.checkpoint as dcp
    import transformers as tf
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

from tensor_case import CKPT, SEED, TensorCase, export

SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
TEMPLATES = {"default": "{{ messages }}", "tool_use": "{{ tools }}", "rag": "{{ documents }}"}
MODULES = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Dense", "Dense"), ("3_Normalize", "Normalize"))


def files(top):
    """{path: SHA-256} of all files below a folder."""
    found = {}
    for folder, _, names in os.walk(top):
        for name in names:
            with open(os.path.join(folder, name), "rb") as f:
                found[os.path.relpath(os.path.join(folder, name), top)] = hashlib.sha256(f.read()).hexdigest()
    return found


class Folders(TensorCase):
    maxDiff = None

    def setUp(self):
        super().setUp()
        torch.manual_seed(SEED)
        self.model = tf.BertModel(tf.BertConfig(**SIZES))
        self.dir = self.path("model")
        self.model.save_pretrained(self.dir)

    def put(self, path, content=b"{}"):
        """A file of the directory: bytes, a text, an object as JSON, or tensors."""
        path = os.path.join(self.dir, path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if path.endswith(".safetensors"):
            return save_file(content, path)
        if path.endswith((".bin", ".pt")):
            return torch.save(content, path)
        with open(path, "wb") as f:
            f.write(content if isinstance(content, bytes) else json.dumps(content).encode())

    def put_modules(self):
        """What SentenceTransformer.save writes of a model with these modules."""
        self.put("modules.json", [{"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
                                  for i, (path, kind) in enumerate(MODULES)])
        self.put("1_Pooling/config.json", {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True})
        self.put("2_Dense/config.json", {"in_features": 32, "out_features": 16, "bias": True})
        dense = {"linear.weight": torch.rand(16, 32), "linear.bias": torch.rand(16)}
        self.put("2_Dense/model.safetensors", dense)
        self.put("2_Dense/pytorch_model.bin", dense)

    def info(self, run):
        done = subprocess.run([CKPT, "info", "--json", run], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        info = json.loads(done.stdout)
        return "\n".join(info.get("notes", [])), "\n".join(info.get("warnings", []))

    def exported(self, run, *options):
        out = self.path("out")
        shutil.rmtree(out, ignore_errors=True)
        done = export(run, out, *options)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.said = done.stderr
        return files(out)

    def check_whole(self, run):
        self.assertEqual(self.exported(run), files(self.dir))
        self.assertNotIn("left out", "".join(self.info(run)))

    def test_modules_of_sentence_transformers(self):
        self.put_modules()
        self.check_whole(self.dir)
        want = files(self.dir)
        for options in (("dtype=bfloat16",), ("max_shard_size=20KB",)):
            got = self.exported(self.dir, *options)
            for name in want:
                if "/" in name or name == "modules.json":
                    self.assertEqual(got.get(name), want[name], f"{options}: {name}")
        listed = subprocess.run([CKPT, "ls", "--files", self.dir], capture_output=True, text=True)
        self.assertIn("2_Dense/pytorch_model.bin", listed.stdout, listed.stderr)

    def test_an_archive(self):
        self.put_modules()
        archive = self.path("model.tar")
        with tarfile.open(archive, "w") as tar:
            tar.add(self.dir, ".")
        self.check_whole(archive)
        self.put("value_head.safetensors", {"v_head.weight": torch.rand(4)})
        with tarfile.open(archive, "w") as tar:
            tar.add(self.dir, ".")
        self.assertIn("value_head", self.info(archive)[1])

    def test_a_snapshot_of_the_hub_cache(self):
        """Its folders are folders, and their files links into blobs/."""
        self.put_modules()
        cache = self.path("models--org--name")
        os.makedirs(os.path.join(cache, "blobs"))
        for path, digest in files(self.dir).items():
            at, blob = os.path.join(cache, "snapshots", "0", path), os.path.join(cache, "blobs", digest)
            os.makedirs(os.path.dirname(at), exist_ok=True)
            shutil.copy(os.path.join(self.dir, path), blob)
            os.symlink(os.path.relpath(blob, os.path.dirname(at)), at)
        self.check_whole(os.path.join(cache, "snapshots", "0"))

    def test_a_module_that_is_large_or_a_model(self):
        """What modules.json names is a part of the model in any case; a folder of which it says nothing is not."""
        for folder in ("encoder", "9_Other"):
            self.model.save_pretrained(os.path.join(self.dir, folder))
        self.put("large/config.json")
        with open(os.path.join(self.dir, "large", "model.bin"), "wb") as f:
            f.truncate((256 << 20) + 1)
        self.put("modules.json", [{"path": "encoder"}])
        got = self.exported(self.dir)
        self.assertIn("encoder/model.safetensors", got)
        self.assertEqual(sorted(n for n in got if n.startswith(("9_Other", "large"))), [])
        self.assertIn("'9_Other' (a model of its own), 'large' (more than 256 MiB)", self.info(self.dir)[0])

    def tokenizer(self):
        tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")))
        tokenizer.chat_template = TEMPLATES
        return tokenizer

    def has_templates(self, folder):
        self.assertEqual(tf.AutoTokenizer.from_pretrained(folder).chat_template, TEMPLATES)

    def test_chat_templates(self):
        """Of a model directory, and of a base, whose templates do not join those of the checkpoint."""
        self.tokenizer().save_pretrained(self.dir)
        self.assertIn("additional_chat_templates/rag.jinja", files(self.dir))
        self.check_whole(self.dir)
        self.has_templates(self.path("out"))
        self.put("1_Pooling/config.json")
        run = self.path("run")
        dcp.save({"model": self.model.state_dict()}, checkpoint_id=run, no_dist=True)
        got = self.exported(run, f"base={self.dir}")
        self.has_templates(self.path("out"))
        self.assertNotIn("1_Pooling/config.json", got)
        os.mkdir(os.path.join(run, "additional_chat_templates"))
        with open(os.path.join(run, "additional_chat_templates", "own.jinja"), "w") as f:
            f.write("{{ own }}")
        got = self.exported(run, f"base={self.dir}")
        self.assertEqual([n for n in got if n.startswith("additional")], ["additional_chat_templates/own.jinja"])

    def test_what_is_left_out_is_named(self):
        ordinary = files(self.dir)
        self.put(".cache/huggingface/download/x.metadata")
        self.put("runs/Nov28/events.out.tfevents.1")
        self.put("training_args.bin", {})
        self.put("optimizer.pt", {})
        self.put("pytorch_model.bin", self.model.state_dict())
        self.put("last/trainer_state.json")
        for step in ("checkpoint-5", "tmp-checkpoint-7"):
            self.model.save_pretrained(os.path.join(self.dir, step))
        dcp.save({"model": self.model.state_dict()}, checkpoint_id=os.path.join(self.dir, "dcp"), no_dist=True)
        self.check_ordinary(ordinary)
        self.put("onnx/model.onnx")
        self.put("original/consolidated.00.pth")
        self.put("a/b/c/d.txt")
        self.put("lora/adapter_config.json", {"peft_type": "LORA"})
        self.put("lora/adapter_model.safetensors", {"x": torch.rand(2)})
        for i in range(129):
            self.put(f"pictures/{i}.png", b"")
        self.put("value_head.safetensors", {"v_head.weight": torch.rand(4)})
        self.put("colbert_linear.pt", {})
        self.assertEqual(sorted(self.exported(self.dir)), sorted(ordinary))
        notes, warnings = self.info(self.dir)
        for words in ("'a' (more than two folders deep)", "'onnx' (the model for other programs)", "'lora' (an adapter of its own)",
                      "'original' (the model for other programs)", "'pictures' (more than 128 files)"):
            self.assertIn(words, notes)
        self.assertEqual(notes.count("left out"), 1, notes)
        self.assertIn("weights beside the model that are not the model's: 'colbert_linear.pt', 'value_head.safetensors'", warnings)
        self.assertIn("value_head", self.said)

    def test_many_folders_are_counted(self):
        for i in range(100):
            self.put(f"f{i}/x.txt")
        self.assertEqual(sum("/" in n for n in self.exported(self.dir)), 64)
        notes, _ = self.info(self.dir)
        self.assertIn("'f64' (more than 64 folders)", notes)
        self.assertIn("'f71' (more than 64 folders) and 28 more", notes)

    def check_ordinary(self, want):
        self.assertEqual(sorted(self.exported(self.dir)), sorted(want))
        self.assertNotIn("left out", "".join(self.info(self.dir)))

    def test_links_out_of_the_directory(self):
        """As for side files: left out with a warning, unless follow_symlinks allows them."""
        self.put_modules()
        with open(self.path("elsewhere.json"), "w") as f:
            f.write("{}")
        os.symlink(self.path("elsewhere.json"), os.path.join(self.dir, "1_Pooling", "out.json"))
        os.symlink(self.path("gone"), os.path.join(self.dir, "1_Pooling", "dangling.json"))
        got = self.exported(self.dir)
        self.assertIn("1_Pooling/config.json", got)
        self.assertNotIn("1_Pooling/out.json", got)
        self.assertIn("1_Pooling/out.json' is a link that leads out", self.info(self.dir)[1])
        self.assertIn("1_Pooling/out.json", self.exported(self.dir, "follow_symlinks"))

    def test_a_shard_in_a_folder_is_no_side_file(self):
        self.put("shards/readme.txt")
        os.rename(os.path.join(self.dir, "model.safetensors"), os.path.join(self.dir, "shards", "all.safetensors"))
        os.symlink("shards/all.safetensors", os.path.join(self.dir, "model.safetensors"))
        self.assertEqual(sorted(self.exported(self.dir)), ["config.json", "model.safetensors", "shards/readme.txt"])


if __name__ == "__main__":
    unittest.main()
