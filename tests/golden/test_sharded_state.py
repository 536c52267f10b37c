# SPDX-License-Identifier: Apache-2.0
"""view=sharded_state against vLLM's own saves (vllm.tar.xz), file by file and byte by byte, and what it refuses."""

import json
import os
import shutil
import struct
import subprocess
import tempfile
import unittest

from case import CKPT, read_tensors, unpack

VIEW = ["view=sharded_state"]


class ShardedState(unittest.TestCase):
    maxDiff = None

    @classmethod
    def setUpClass(cls):
        tmp = tempfile.TemporaryDirectory()
        cls.addClassCleanup(tmp.cleanup)
        cls.cases = tmp.name
        unpack("vllm.tar.xz", cls.cases)

    def setUp(self):
        tmp = tempfile.TemporaryDirectory()
        self.addCleanup(tmp.cleanup)
        self.tmp = tmp.name

    def hf(self, name):
        return os.path.join(self.cases, name, "hf")

    def run_export(self, source, name, *options):
        out = os.path.join(self.tmp, name)
        return out, subprocess.run([CKPT, "export", source, out, *[x for o in options for x in ("-o", o)]], capture_output=True, text=True)

    def export(self, source, name, *options):
        out, done = self.run_export(source, name, *options)
        self.assertEqual(done.returncode, 0, f"{source} {options}: {done.stderr}")
        return out

    def layouts(self, name):
        with open(os.path.join(self.cases, name, "case.json")) as f:
            for i, (tp, pp, size) in enumerate(json.load(f)["layouts"]):
                yield os.path.join(self.cases, name, str(i)), [*VIEW, f"tp={tp}", f"pp={pp}", *([f"max_size={size}"] if size else [])]

    def same_files(self, got, want, what):
        """All files of vLLM's save, and the model's other files beside them."""
        weights = sorted(n for n in os.listdir(got) if n.endswith(".safetensors"))
        self.assertEqual(weights, sorted(os.listdir(want)), what)
        for name in weights:
            with open(os.path.join(got, name), "rb") as a, open(os.path.join(want, name), "rb") as b:
                self.assertTrue(a.read() == b.read(), f"{what}: {name}")

    def test_is_what_vllm_saves(self):
        seen = 0
        for name in sorted(os.listdir(self.cases)):
            for want, options in self.layouts(name):
                with self.subTest(name, options=options):
                    got = self.export(self.hf(name), f"{name}-{os.path.basename(want)}", *options)
                    self.same_files(got, want, f"{name} {options}")
                    sides = {n for n in os.listdir(self.hf(name)) if not n.startswith("model")}
                    self.assertEqual({n for n in os.listdir(got) if not n.endswith(".safetensors")}, sides)
                    for side in sides:
                        with open(os.path.join(got, side), "rb") as a, open(os.path.join(self.hf(name), side), "rb") as b:
                            self.assertEqual(a.read(), b.read(), side)
                    seen += 1
        self.assertGreater(seen, 10)

    def test_of_any_checkpoint(self):
        """The source is cut, stacked and padded otherwise: each rank's file is still vLLM's."""
        for name, *through in (("qwen2", "view=megatron", "tp=2", "pp=3"), ("mixtral", "view=megatron_legacy", "tp=2", "ep=2"), ("qwen2", "view=dcp", "ranks=3"),
                               ("qwen3_moe", "view=dcp", "names=memory"), ("llama", "view=dcp_hf", "ranks=2")):
            run = self.export(self.hf(name), f"{name}-{through[0]}", *through)
            for want, options in self.layouts(name):
                got = self.export(run, f"{name}-{through[0]}-{os.path.basename(want)}", *options, f"base={self.hf(name)}")
                self.same_files(got, want, f"{name} by {through} {options}")

    def test_max_size(self):
        """The first part is empty if no tensor fits; max_shard_size is the same option."""
        got = self.export(self.hf("qwen3"), "small", *VIEW, "max_size=1")
        n = len(os.listdir(got))
        self.assertEqual(read_tensors(got).keys(), read_tensors(self.export(self.hf("qwen3"), "one", *VIEW)).keys())
        with open(os.path.join(got, "model-rank-0-part-0.safetensors"), "rb") as f:
            self.assertEqual(f.read(), struct.pack("<Q", 8) + b"{}      ")
        self.assertIn(f"model-rank-0-part-{len(read_tensors(got))}.safetensors", os.listdir(got))
        self.assertEqual(len(os.listdir(self.export(self.hf("qwen3"), "hub", *VIEW, "max_shard_size=1"))), n)

    def test_dtype_is_cast_in_slices(self):
        import torch
        got = read_tensors_of(self.export(self.hf("phi3"), "f16", *VIEW, "tp=2", "dtype=float16"), 0)
        [(want, _)] = self.layouts("phi3")
        for name, (dtype, shape, data) in read_tensors_of(want, 0).items():
            if dtype == "BF16":
                as_f16 = torch.frombuffer(bytearray(data), dtype=torch.bfloat16).to(torch.float16).numpy().tobytes()
                with self.subTest(name):
                    self.assertEqual(got[name], ("F16", shape, as_f16))

    def refuses(self, source, status, says, *options):
        _, done = self.run_export(source, "refused", *VIEW, *options)
        self.assertEqual(done.returncode, status, f"{options}: {done.stderr}")
        self.assertIn(says, done.stderr)
        self.assertFalse(os.path.exists(os.path.join(self.tmp, "refused")), options)

    def test_refusals(self):
        kv2, kv1 = self.hf("qwen2"), self.hf("llama")
        for source, status, says, *options in (
            (kv2, 2, "which cannot be divided among 3 ranks", "tp=3"),
            (kv1, 2, "has 4 of heads, which cannot be divided among 8 ranks", "tp=8"),
            (kv2, 2, "the model has 3 layers, which cannot be divided among 4 stages", "pp=4"),
            (kv2, 2, "'0' is not a number from 1", "tp=0"),
            (kv2, 2, "'lots' is not a size such as 5GB", "max_size=lots"),
            (kv2, 2, "'0' is not a size such as 5GB", "max_size=0"),
            (kv2, 2, "option ep does not apply to view=sharded_state: its files are those of tp and pp", "ep=2"),
            (self.with_config("qwen2", model_type="unheard_of"), 1, "no recipe makes a model of type 'unheard_of'"),
            (self.with_config("qwen3", attention_bias=True), 1, "gives its Qwen3 no bias in o_proj", "allow_partial"),
            (self.with_config("qwen2", None), 1, "needs a config.json that says which model it is; give one with base=DIR"),
        ):
            with self.subTest(options or says):
                self.refuses(source, status, says, *options)

    def with_config(self, name, remove=(), **changes):
        """A copy of a model with another config; None: without one."""
        out = tempfile.mkdtemp(dir=self.tmp)
        shutil.copytree(self.hf(name), out, dirs_exist_ok=True)
        path = os.path.join(out, "config.json")
        with open(path) as f:
            config = json.load(f)
        os.remove(path)
        if remove is not None:
            with open(path, "w") as f:
                json.dump({**config, **changes}, f)
        return out

    def write(self, tensors, **config):
        """A model directory of {name: (dtype, shape, data)}."""
        out, at, header = tempfile.mkdtemp(dir=self.tmp), 0, {}
        with open(os.path.join(out, "config.json"), "w") as f:
            json.dump(config, f)
        for name, (dtype, shape, data) in tensors.items():
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
            at += len(data)
        text = json.dumps(header).encode()
        with open(os.path.join(out, "model.safetensors"), "wb") as f:
            f.write(struct.pack("<Q", len(text)) + text + b"".join(t[2] for t in tensors.values()))
        return out

    def config(self, name):
        with open(os.path.join(self.hf(name), "config.json")) as f:
            return json.load(f)

    def test_key_and_value_heads_are_repeated_or_divided(self):
        shapes = {"self_attn.q_proj": [24, 24], "self_attn.k_proj": [12, 24], "self_attn.v_proj": [12, 24], "self_attn.o_proj": [24, 24], "mlp.gate_proj": [8, 24],
                  "mlp.up_proj": [8, 24], "mlp.down_proj": [24, 8], "input_layernorm": [24], "post_attention_layernorm": [24]}
        shapes = {**{f"model.layers.0.{n}.weight": s for n, s in shapes.items()}, "model.norm.weight": [24], "model.embed_tokens.weight": [5, 24], "lm_head.weight": [5, 24]}
        zeros = {n: ("BF16", s, bytes(2 * s[0] * (s[1] if len(s) > 1 else 1))) for n, s in shapes.items()}
        source = self.write(zeros, **{**self.config("llama"), "attention_bias": False, "mlp_bias": False, "hidden_size": 24, "intermediate_size": 8, "num_hidden_layers": 1,
                                      "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 4, "vocab_size": 5, "dtype": "bfloat16"})
        self.refuses(source, 2, "has 3 of kv_heads, which cannot be divided among 2 ranks", "tp=2")
        self.refuses(source, 2, "has 6 of heads, which cannot be divided among 4 ranks", "tp=4")
        self.refuses(source, 2, "has 64 elements, which cannot be divided among 3 ranks", "tp=3")

    def test_quantised_weights_are_refused(self):
        tensors = read_tensors(self.hf("qwen3"))
        for name in [n for n in tensors if n.endswith("_proj.weight")]:
            _, shape, data = tensors[name]
            tensors[name] = ("F8_E4M3", shape, data[: len(data) // 2])
            tensors[name + "_scale_inv"] = ("F32", [1, 1], b"\0\0\x80\x3f")
        source = self.write(tensors, **self.config("qwen3"), quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
        self.refuses(source, 1, "are quantised, which view=sharded_state has no place for")


def read_tensors_of(folder, rank):
    """The tensors of one rank."""
    with tempfile.TemporaryDirectory() as tmp:
        for name in os.listdir(folder):
            if name.startswith(f"model-rank-{rank}-"):
                os.symlink(os.path.join(folder, name), os.path.join(tmp, name))
        return read_tensors(tmp)


if __name__ == "__main__":
    unittest.main()
