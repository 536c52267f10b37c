# SPDX-License-Identifier: Apache-2.0
"""Which dtype each tensor of a view gets, a row per rule: dtype=, the base's headers, its config and its list of tensors. State dicts as
torch's DCP writes them, with a buffer and a scalar that the base may not have; once under the hub's names, once under torchtitan's."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

try:
    import torch
    import torch.distributed.checkpoint as dcp
    import transformers
    from safetensors import safe_open
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

CKPT = os.path.join(os.environ.get("CKPTFS_BUILD", "build/dev"), "fs", "ckpt")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
CONFIG = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
                                  num_key_value_heads=4, tie_word_embeddings=False)
WEIGHT, BUFFER, SCALAR = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate.e_score_correction_bias", "logit_scale"
TITAN = {"model.embed_tokens": "tok_embeddings", "model.layers": "layers", "self_attn.q_proj": "attention.wq",
         "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv", "self_attn.o_proj": "attention.wo",
         "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2", "mlp.up_proj": "feed_forward.w3",
         "post_attention_layernorm": "ffn_norm", "input_layernorm": "attention_norm", "model.norm": "norm", "lm_head": "output"}


def weights(dtype):
    torch.manual_seed(0)
    return {k: v.to(dtype) for k, v in transformers.LlamaForCausalLM(CONFIG).state_dict().items()}


def titan_name(name):
    for hub, own in TITAN.items():
        name = name.replace(hub, own)
    return name


class Dtypes(unittest.TestCase):
    def setUp(self):
        self.tmp = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.tmp)

    def run_of(self, dtype, extra=(), name=str):
        top = os.path.join(self.tmp, "run", "step-10")
        state = {name(k): v for k, v in (weights(dtype) | dict(extra)).items()}
        dcp.save(state, checkpoint_id=top, no_dist=True)
        return top

    def base(self, says, headers=None, index=None):
        """config.json says `says`; headers: the weights themselves in that dtype; index: names without their files."""
        top = os.path.join(self.tmp, "base")
        os.makedirs(top)
        model = transformers.LlamaForCausalLM(CONFIG)
        if headers is not None:
            model.to(headers).save_pretrained(top)
        else:
            CONFIG.architectures = ["LlamaForCausalLM"]
            CONFIG.save_pretrained(top)
        with open(os.path.join(top, "config.json")) as f:
            config = json.load(f)
        config.pop("dtype", None)
        if says:
            config["dtype"] = says
        with open(os.path.join(top, "config.json"), "w") as f:
            json.dump(config, f)
        if index is not None:
            with open(os.path.join(top, "model.safetensors.index.json"), "w") as f:
                json.dump({"metadata": {}, "weight_map": {k: "model-00001-of-00001.safetensors" for k in index}}, f)
        return top

    def check(self, run, base, want, says, *options):
        """`want`: {tensor: dtype}; WEIGHT stands for every other weight too. `says`: the dtype of config.json and of `ckpt info`."""
        out = os.path.join(self.tmp, "out")
        shutil.rmtree(out, ignore_errors=True)
        options = [a for o in options for a in ("-o", o)]
        subprocess.run([CKPT, "export", run, out, "-o", f"base={base}", *options], check=True, timeout=120)
        got = {}
        for file in os.listdir(out):
            if file.endswith(".safetensors"):
                with safe_open(os.path.join(out, file), "pt") as f:
                    got |= {k: f.get_tensor(k).dtype for k in f.keys()}
        self.assertEqual(got, {k: want.get(k, want[WEIGHT]) for k in got})
        self.assertLessEqual(set(want), set(got))
        with open(os.path.join(out, "config.json")) as f:
            config = json.load(f)
        self.assertEqual(config.get("dtype", config.get("torch_dtype", "float32")), says)
        self.assertEqual(transformers.AutoConfig.from_pretrained(out).dtype or F32, getattr(torch, says))
        info = subprocess.run([CKPT, "info", run, "-o", f"base={base}", "--json", *options], check=True, timeout=120,
                              capture_output=True, text=True).stdout
        self.assertEqual(json.loads(info)["dtype"], says)

    EXTRA = {BUFFER: torch.ones(8), SCALAR: torch.tensor(2.6592)}
    KEPT = {BUFFER: F32, SCALAR: F32}

    def test_the_option_goes_first(self):
        self.check(self.run_of(F32), self.base("bfloat16", headers=BF16), {WEIGHT: F16}, "float16", "dtype=float16")

    def test_the_bases_header_widens_and_narrows(self):
        for stored, header, says in ((BF16, F32, "float32"), (F32, BF16, "bfloat16"), (F16, BF16, "bfloat16")):
            with self.subTest(stored=stored, header=header):
                shutil.rmtree(self.tmp)
                self.check(self.run_of(stored), self.base("float16", headers=header), {WEIGHT: header}, says)

    def test_what_the_bases_weights_lack_stays_as_stored(self):
        self.check(self.run_of(F32, self.EXTRA), self.base("bfloat16", headers=BF16), {WEIGHT: BF16} | self.KEPT, "bfloat16")

    def test_f32_weights_take_the_16_bits_of_a_config(self):
        self.check(self.run_of(F32, self.EXTRA), self.base("bfloat16"), {WEIGHT: BF16} | self.KEPT, "bfloat16")

    def test_what_the_bases_index_lacks_stays_as_stored(self):
        index = [k for k in weights(F32) if k != "lm_head.weight"]
        self.check(self.run_of(F32, self.EXTRA), self.base("bfloat16", index=index),
                   {WEIGHT: BF16, "lm_head.weight": F32} | self.KEPT, "bfloat16")

    def test_a_config_alone_never_widens(self):
        for says in ("float32", None, "float16"):
            for name in (str, titan_name):
                with self.subTest(says=says, name=name.__name__):
                    shutil.rmtree(self.tmp)
                    self.check(self.run_of(BF16, name=name), self.base(says), {WEIGHT: BF16}, "bfloat16")

    def test_torchtitans_f32_weights_take_the_16_bits_of_a_config(self):
        self.check(self.run_of(F32, name=titan_name), self.base("bfloat16"), {WEIGHT: BF16}, "bfloat16")

    def test_scalars_and_buffers_of_16_bits_stay_so(self):
        extra = {BUFFER: torch.ones(8, dtype=BF16), SCALAR: torch.tensor(2.5, dtype=BF16)}
        self.check(self.run_of(BF16, extra), self.base("float32"), {WEIGHT: BF16, BUFFER: BF16, SCALAR: BF16}, "bfloat16")


if __name__ == "__main__":
    unittest.main()
