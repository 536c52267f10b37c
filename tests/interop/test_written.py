# SPDX-License-Identifier: Apache-2.0
"""Views in other formats, against the formats' own writers and loaders: the files are those that torch writes for the same tensors, torch
loads them, and our own reader makes the model of them again."""

import json
import os
import random
import subprocess
import sys
import unittest

try:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import torch.distributed.checkpoint as dcp
    import transformers as tf
    from safetensors.torch import load_file, save_file
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    import dcp_writer as writer
    from tensor_case import CASES, CKPT, SEED, TensorCase, export, randomise, read_all
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

tf.utils.logging.disable_progress_bar()
tf.utils.logging.set_verbosity_error()
DTYPES = [t for t in writer.DTYPES] + [torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.float8_e4m3fnuz]
COMMON = dict(vocab_size=101, hidden_size=48, intermediate_size=72, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=3, head_dim=8,
              max_position_embeddings=64, bos_token_id=1, eos_token_id=2)


def header(path):
    """The metadata and the tensors of a safetensors file, and its data."""
    with open(path, "rb") as f:
        n = int.from_bytes(f.read(8), "little")
        text = f.read(n)
        assert (n + 8) % 8 == 0
        tensors = json.loads(text)
        return tensors.pop("__metadata__", None), list(tensors.items()), f.read()


def order(run, *options):
    """Names in the order of the view's tensors."""
    done = subprocess.run([CKPT, "ls", "--json", run, *[x for o in options for x in ("-o", o)]], capture_output=True, text=True, check=True)
    return [t["name"] for t in json.loads(done.stdout)]


class Written(TensorCase):
    maxDiff = None

    def source(self, seed, world):
        """A directory of random tensors, empty ones and scalars among them. At most one rank has no rows of one: of several that state the same
        torch takes the one with the least bytes so far, we the first."""
        r, tensors = random.Random(seed), {}
        for i in range(r.randint(1, 24)):
            shape = [r.choice([0, 1, 2, 3, 5, 7, 8, 13]) for _ in range(r.choice([0, 1, 1, 2, 2, 2, 3, 5]))]
            shape[:1] = [max(n, world - 1) for n in shape[:1]]
            tensors[r.choice(["model.layers.%d.w", "a%d", "b.%d.\u00e9\"\\", "%d"]) % i] = writer.tensor(f"t{i}", r.choice(DTYPES), shape, seed)
        path = self.path(f"source-{seed}")
        os.mkdir(path)
        save_file(tensors, os.path.join(path, "model.safetensors"), {"format": "pt"})
        return path, tensors

    def export(self, run, out, *options):
        done = export(run, out, *options)
        self.assertEqual(done.returncode, 0, f"{options}: {done.stderr}")
        return out

    def model(self, name, cls=tf.LlamaConfig, **config):
        torch.manual_seed(SEED)
        model = randomise(tf.AutoModelForCausalLM.from_config(cls(**COMMON, **config), dtype=torch.bfloat16))
        path = self.path(name)
        model.save_pretrained(path, max_shard_size="100KB")
        return path, {n: t.detach() for n, t in model.state_dict().items()}

    def same_files(self, got, want):
        self.assertEqual(sorted(os.listdir(got)), sorted(os.listdir(want)))
        for name in os.listdir(want):
            with open(os.path.join(got, name), "rb") as a, open(os.path.join(want, name), "rb") as b:
                self.assertTrue(a.read() == b.read(), name)

    # ---- view=dcp_hf ----

    def check_hf(self, world, seed):
        what = f"world {world}, CKPTFS_SEED={SEED}, case {seed}"
        source, tensors = self.source(seed, world)
        got = self.export(source, self.path(f"hf-{world}-{seed}"), "view=dcp_hf", f"ranks={world}")
        want = self.path(f"hf-{world}-{seed}.want")
        writer.run(world, [{"kind": "rows", "dir": want, "state": os.path.join(source, "model.safetensors"), "names": order(source),
                            "files": {n: 1 for n in tensors}}])
        self.assertEqual(sorted(os.listdir(got)), sorted(os.listdir(want)), what)
        for name in os.listdir(want):
            (meta, mine, data), (torchs, theirs, bytes_) = header(os.path.join(got, name)), header(os.path.join(want, name))
            self.assertEqual(meta, torchs, f"{what}: {name}")  # with the text of DCP_SHARDING_INFO
            self.assertEqual(mine, theirs, f"{what}: {name}")
            self.assertTrue(data == bytes_, f"{what}: {name}")
        self.same(read_all(self.export(got, got + ".again", "view=raw")), tensors, what)

    def test_hf_is_what_torch_writes(self):
        for world in (1, 2, 3):
            for i in range(max(CASES // 2, 1)):
                self.check_hf(world, SEED * 1000 + world * 100 + i)

    def test_hf_is_loaded_by_torch(self):
        source, tensors = self.model("model")
        for ranks in (1, 2, 5, 64):
            got = self.export(source, self.path(f"ranks-{ranks}"), "view=dcp_hf", f"ranks={ranks}")
            self.assertIn("shard-00001-model-00002-of-00002.safetensors", os.listdir(got))
            state = {n: torch.full_like(t, 7) for n, t in tensors.items()}
            dcp.load(state, storage_reader=HuggingFaceStorageReader(got), no_dist=True)
            self.same(state, tensors, f"{ranks} ranks")
            self.same_files(self.export(got, self.path(f"again-{ranks}")), source)

    def test_hf_is_loaded_into_fsdp2(self):
        source, tensors = self.model("model")
        got = self.export(source, self.path("dcp"), "view=dcp_hf", "ranks=3")
        writer.run(2, [{"kind": "load", "dir": got, "model": source, "dtype": "bfloat16", "storage": "hf", "out": self.path("loaded")}])
        self.same(load_file(self.path("loaded")), tensors, "fsdp2")


if __name__ == "__main__":
    unittest.main()
