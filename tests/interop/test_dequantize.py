# SPDX-License-Identifier: Apache-2.0
"""The option dequantize gives what torch's and transformers' own dequantisers give, of directories and of a DCP."""

import json
import os
import subprocess
import sys
import tempfile
import unittest

try:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file, save_file
    from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

CKPT = os.path.join(os.environ.get("CKPTFS_BUILD", "build/dev"), "fs", "ckpt")
SHORT = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "vocab_size": 16, "dtype": "bfloat16"}


def write_model(folder, tensors, quantization):
    """Two files and an index: a tensor and its scales need not share one."""
    names = sorted(tensors)
    files = {n: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, n in enumerate(names)}
    for file in set(files.values()):
        save_file({n: tensors[n] for n in names if files[n] == file}, os.path.join(folder, file), {"format": "pt"})
    with open(os.path.join(folder, "model.safetensors.index.json"), "w") as f:
        json.dump({"metadata": {"total_size": 0}, "weight_map": files}, f)
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump({**CONFIG, "quantization_config": quantization}, f)


def export(source, *options):
    with tempfile.TemporaryDirectory() as tmp:
        out = os.path.join(tmp, "out")
        args = [CKPT, "export", source, out, "-q", *(a for o in options for a in ("-o", o))]
        subprocess.run(args, check=True, capture_output=True)
        got = {}
        for name in os.listdir(out):
            if name.endswith(".safetensors"):
                got.update(load_file(os.path.join(out, name)))
        with open(os.path.join(out, "config.json")) as f:
            return got, json.load(f)


def fp8(g, *shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=g).view(torch.float8_e4m3fn)


def scales(g, *shape):
    return torch.randn(shape, generator=g).exp() * 2.0 ** torch.randint(-12, 12, shape, generator=g)


class Dequantize(unittest.TestCase):
    def same(self, got, want, name):
        self.assertEqual(got.dtype, want.dtype, name)
        self.assertEqual(got.shape, want.shape, name)
        self.assertTrue(torch.equal(got.isnan(), want.isnan()), name)
        self.assertTrue(torch.equal(got.nan_to_num(0.0), want.nan_to_num(0.0)), name)

    def fp8_model(self, shapes):
        g = torch.Generator().manual_seed(3)
        model = {"model.embed_tokens.weight": torch.randn(16, 8, generator=g).bfloat16()}
        for i, (rows, cols) in enumerate(shapes):
            name = f"model.layers.{i}.mlp.up_proj.weight"
            model[name] = fp8(g, rows, cols)
            model[name + "_scale_inv"] = scales(g, -(-rows // 128), -(-cols // 128))
        return model

    def test_fp8_with_partial_blocks_as_torch(self):
        model = self.fp8_model([(1, 1), (127, 129), (128, 256), (300, 513), (1000, 40), (5, 1025)])
        with tempfile.TemporaryDirectory() as tmp:
            write_model(tmp, model, {"quant_method": "fp8", "weight_block_size": [128, 128]})
            for dtype, options in ((torch.float32, ["dtype=float32"]), (torch.bfloat16, []), (torch.float16, ["dtype=float16"])):
                want = {n: torch.zeros(t.shape, dtype=dtype) for n, t in model.items() if "layers" in n and not n.endswith("_inv")}
                dcp.load(want, storage_reader=QuantizedHuggingFaceStorageReader(tmp, target_dtype=dtype), no_dist=True)
                got, config = export(tmp, "dequantize", *options)
                self.assertNotIn("quantization_config", config)
                self.assertEqual(config["dtype"], SHORT[dtype])
                self.assertEqual(set(got), {n for n in model if not n.endswith("_inv")})
                for name, t in want.items():
                    self.same(got[name], t, name)

    def test_fp8_of_whole_blocks_as_transformers(self):
        g = torch.Generator().manual_seed(4)
        model = {"model.embed_tokens.weight": torch.randn(16, 8, generator=g).bfloat16()}
        for i, scale in enumerate((torch.float32, torch.bfloat16, torch.float8_e8m0fnu)):
            model[f"l.{i}.weight"] = fp8(g, 256, 384)
            model[f"l.{i}.weight_scale_inv"] = scales(g, 2, 3).to(scale)
        model["experts.gate_up_proj"] = fp8(g, 3, 128, 256)
        model["experts.gate_up_proj_scale_inv"] = scales(g, 3, 1, 2)
        with tempfile.TemporaryDirectory() as tmp:
            write_model(tmp, model, {"quant_method": "fp8", "weight_block_size": [128, 128]})
            got, _ = export(tmp, "dequantize")
        for name in model:
            if name + "_scale_inv" in model:
                want = Fp8Dequantize(None)._dequantize_one(model[name], model[name + "_scale_inv"], output_dtype=torch.bfloat16)
                self.same(got[name], want, name)

    def mxfp4_model(self):
        g = torch.Generator().manual_seed(5)
        blocks = torch.randint(0, 256, (4, 96, 5, 16), dtype=torch.uint8, generator=g)
        scale = torch.randint(100, 150, (4, 96, 5), dtype=torch.uint8, generator=g)
        scale.view(-1)[:255] = torch.arange(255, dtype=torch.uint8)
        return {
            "model.embed_tokens.weight": torch.randn(16, 8, generator=g).bfloat16(),
            "model.layers.0.mlp.experts.down_proj_blocks": blocks,
            "model.layers.0.mlp.experts.down_proj_scales": scale,
            "model.layers.0.mlp.experts.down_proj_bias": torch.randn(4, 96, generator=g).bfloat16(),
        }

    def check_mxfp4(self, got, model, dtype):
        down = "model.layers.0.mlp.experts.down_proj"
        want = convert_moe_packed_tensors(model[down + "_blocks"], model[down + "_scales"], dtype=dtype)
        self.same(got[down], want, down)
        self.assertEqual(set(got), {"model.embed_tokens.weight", down, down + "_bias"})

    def test_mxfp4_as_transformers(self):
        model = self.mxfp4_model()
        with tempfile.TemporaryDirectory() as tmp:
            write_model(tmp, model, {"quant_method": "mxfp4"})
            for dtype, options in ((torch.bfloat16, []), (torch.float32, ["dtype=float32"])):
                got, config = export(tmp, "dequantize", *options)
                self.assertNotIn("quantization_config", config)
                self.check_mxfp4(got, model, dtype)
            stored, config = export(tmp)
            self.assertIn("quantization_config", config)
            self.assertEqual({n: t.dtype for n, t in stored.items()}, {n: t.dtype for n, t in model.items()})

    def test_others_are_passed_through_or_refused(self):
        """ModelOpt's NVFP4 and FP8, and compressed-tensors' packed integers: as they are stored, and no dequantisation that is none."""
        u8, f8 = torch.zeros(32, 8, dtype=torch.uint8), torch.ones(32, 1).to(torch.float8_e4m3fn)
        for method, parts, needle in (("modelopt", {"": u8, "_scale": f8, "_scale_2": torch.tensor(0.5)}, "weight"),
                                      ("modelopt", {"": f8, "_scale": torch.tensor(0.5)}, "only block-scaled"),
                                      ("compressed-tensors", {"_packed": u8.to(torch.int32), "_scale": torch.ones(32, 1)}, "weight_packed' is I32"),
                                      ("compressed-tensors", {"_packed": u8, "_scale": f8}, "only block-scaled"),
                                      ("bitsandbytes", {"": u8, ".absmax": torch.ones(4), ".quant_map": torch.ones(16)}, "l.0.weight")):
            model = {"model.embed_tokens.weight": torch.ones(16, 8).bfloat16()} | {f"l.0.weight{x}": t for x, t in parts.items()}
            with tempfile.TemporaryDirectory() as tmp:
                write_model(tmp, model, {"quant_method": method})
                stored, config = export(tmp)
                self.assertEqual(config["quantization_config"], {"quant_method": method})
                self.assertEqual({n: (t.dtype, t.float().tolist()) for n, t in stored.items()}, {n: (t.dtype, t.float().tolist()) for n, t in model.items()})
                with self.assertRaises(subprocess.CalledProcessError) as e:
                    export(tmp, "dequantize")
                self.assertIn(needle, e.exception.stderr.decode())
                with self.assertRaises(subprocess.CalledProcessError) as e:
                    export(tmp, "dtype=bfloat16")
                self.assertIn("cast their scales", e.exception.stderr.decode())

    def test_a_dcp_of_both(self):
        model = {**self.fp8_model([(200, 130)]), **self.mxfp4_model()}
        with tempfile.TemporaryDirectory() as tmp:
            base, run = os.path.join(tmp, "base"), os.path.join(tmp, "run")
            os.mkdir(base)
            with open(os.path.join(base, "config.json"), "w") as f:
                json.dump({**CONFIG, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, f)
            dcp.save({"model": model}, checkpoint_id=run, no_dist=True)
            got, config = export(run, "dequantize", f"base={base}")
        self.assertNotIn("quantization_config", config)
        up = "model.layers.0.mlp.up_proj.weight"
        by = model[up + "_scale_inv"].repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :130]
        self.same(got.pop(up), (model[up].float() * by).bfloat16(), up)
        self.check_mxfp4(got, model, torch.bfloat16)


if __name__ == "__main__":
    unittest.main()
