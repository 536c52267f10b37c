# SPDX-License-Identifier: Apache-2.0
"""Families whose weights transformers keeps otherwise in memory than on the hub: a DCP of the state dict of a small random model is
shown as save_pretrained writes the model, file by file, to the byte."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

try:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import torch.distributed.checkpoint as dcp
    import transformers as tf
    from safetensors.torch import load_file, save_file

    from tensor_case import randomise
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

tf.utils.logging.disable_progress_bar()
tf.utils.logging.set_verbosity_error()
CKPT = os.path.join(os.environ.get("CKPTFS_BUILD", "build/dev"), "fs", "ckpt")
SEED = int(os.environ.get("CKPTFS_SEED", "1"))
SIZES = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=64,
    max_position_embeddings=64, moe_intermediate_size=24, shared_expert_intermediate_size=24, num_experts=12, num_local_experts=12,
    n_routed_experts=12, num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=16,
    qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, n_group=1, topk_group=1, pad_token_id=0,
)
OWN = {
    "phimoe": {"head_dim": None},
    "lfm2_moe": {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4},
    "nemotron_h": {"layers_block_type": ["mamba", "moe", "attention"], "num_hidden_layers": 3, "mamba_num_heads": 4, "mamba_head_dim": 8,
                   "ssm_state_size": 8, "n_groups": 2, "moe_shared_expert_intermediate_size": 24},
    "granitemoeshared": {"shared_intermediate_size": 24},
    "granitemoehybrid": {"shared_intermediate_size": 24, "layer_types": ["attention", "mamba"], "mamba_n_heads": 8, "mamba_d_head": 8,
                         "mamba_d_state": 8, "mamba_n_groups": 1},
}
CONVERTED = """qwen2_moe qwen3_moe qwen3_next deepseek_v2 deepseek_v3 deepseek_v32 dots1 glm4_moe glm4_moe_lite olmoe flex_olmo longcat_flash
    hunyuan_v1_moe cohere2_moe mellum solar_open mixtral minimax minimax_m2 phimoe ernie4_5_moe exaone_moe mimo_v2_flash hy_v3 laguna axk1
    lfm2_moe jamba nemotron_h granitemoe granitemoeshared granitemoehybrid aria_text qwen3_5_moe_text qwen4_exp_text gpt_neox flint""".split()
TEXT = {k: SIZES[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")}
VISION = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, image_size=28, patch_size=14)
ROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
QWEN = dict(depth=1, hidden_size=32, num_heads=2, out_hidden_size=32, intermediate_size=32)
VISUAL = {
    "gemma3": dict(text_config=TEXT, vision_config=VISION, mm_tokens_per_image=4),
    "llava": dict(text_config={"model_type": "llama", **TEXT}, vision_config={"model_type": "clip_vision_model", **VISION}),
    "mistral3": dict(text_config={"model_type": "mistral", **TEXT}, vision_config={"model_type": "pixtral", **VISION}),
    "qwen2_vl": dict(text_config=TEXT | ROPE, vision_config=dict(depth=1, embed_dim=32, hidden_size=32, num_heads=2)),
    "qwen2_5_vl": dict(text_config=TEXT | ROPE, vision_config=QWEN),
    "qwen3_vl": dict(text_config=TEXT | ROPE, vision_config=QWEN | {"deepstack_visual_indexes": [0]}),
}
AS_THEY_ARE = "gpt_oss llama4_text llama qwen3 gemma2 granitemoe_swa minimax_m3_vl_text opt gpt_neox_japanese bert roberta electra rembert".split()


class Fused(unittest.TestCase):
    def setUp(self):
        self.tmp = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.tmp)

    def model(self, kind):
        sizes = VISUAL.get(kind) or {k: v for k, v in {**SIZES, **OWN.get(kind, {})}.items() if v is not None}
        auto = tf.AutoModelForImageTextToText if kind in VISUAL else tf.AutoModelForCausalLM
        return randomise(auto.from_config(tf.models.auto.configuration_auto.CONFIG_MAPPING[kind](**sizes)))

    def check(self, kind):
        torch.manual_seed(SEED)
        at = lambda *parts: os.path.join(self.tmp, kind, *parts)
        model = self.model(kind)
        model.save_pretrained(at("want"), max_shard_size="20KB")
        model.config.save_pretrained(at("base"))
        dcp.save({"model": model.state_dict()}, checkpoint_id=at("run"), no_dist=True)
        done = subprocess.run([CKPT, "export", "-q", at("run"), at("got"), "-o", f"base={at('base')}", "-o", "max_shard_size=20KB"],
                              capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(sorted(os.listdir(at("got"))), sorted(os.listdir(at("want"))))
        for name in os.listdir(at("want")):
            with open(at("want", name), "rb") as want, open(at("got", name), "rb") as got:
                self.assertTrue(want.read() == got.read(), name)
        self.check_memory(model, at("want"), at("memory"))
        if kind in CONVERTED:
            self.check_again(model, at)

    def check_again(self, model, at):
        """The hub's own directory, split anew as transformers does."""
        model.save_pretrained(at("whole"))
        done = subprocess.run([CKPT, "export", "-q", at("whole"), at("again"), "-o", "max_shard_size=20KB"], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        for name in os.listdir(at("want")):
            with open(at("want", name), "rb") as want, open(at("again", name), "rb") as got:
                self.assertTrue(want.read() == got.read(), f"split anew: {name}")

    def check_memory(self, model, hub, out):
        """And back: from the hub's names to those that the model has."""
        done = subprocess.run([CKPT, "export", "-q", hub, out, "-o", "view=memory"], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        want, seen = {}, set()
        for name, t in model.state_dict().items():
            if t.data_ptr() not in seen:  # else it is tied
                want[name] = t
            seen.add(t.data_ptr())
        got = {}
        for name in os.listdir(out):
            got |= load_file(os.path.join(out, name)) if name.endswith(".safetensors") else {}
        self.assertEqual(sorted(got), sorted(want))
        for name, t in want.items():
            self.assertTrue(torch.equal(got[name], t), name)

    def test_converted(self):
        for kind in CONVERTED:
            with self.subTest(kind):
                self.check(kind)

    def test_visual(self):
        for kind in VISUAL:
            with self.subTest(kind):
                self.check(kind)

    def test_as_they_are(self):
        for kind in AS_THEY_ARE:
            with self.subTest(kind):
                self.check(kind)

    def test_experts_in_either_order(self):
        """Qwen3-VL's are [in, out] in repositories, and [out, in] as transformers 5 and Megatron-Bridge save them. transformers loads both."""
        config = tf.Qwen3VLMoeConfig(text_config={k: v for k, v in SIZES.items() if k != "n_routed_experts"} | ROPE, vision_config=QWEN | {"deepstack_visual_indexes": [0]})
        model = randomise(tf.Qwen3VLMoeForConditionalGeneration(config))
        at = lambda name: os.path.join(self.tmp, name)
        model.save_pretrained(at("saved"))
        shutil.copytree(at("saved"), at("repository"))
        saved = load_file(at("saved/model.safetensors"))
        save_file({k: v.transpose(1, 2).contiguous() if ".experts." in k else v for k, v in saved.items()}, at("repository/model.safetensors"))
        with open(at("repository/config.json")) as f:
            stated = json.load(f)
        with open(at("repository/config.json"), "w") as f:
            json.dump(stated | {"transformers_version": "4.57.1"}, f)
        dcp.save(model.state_dict(), checkpoint_id=at("dcp"))
        for name in ("saved", "repository"):
            done = subprocess.run([CKPT, "export", "-q", at("dcp"), at(f"{name}-dcp"), "-o", f"base={at(name)}"], capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stderr)
            shown, base = load_file(at(f"{name}-dcp/model.safetensors")), load_file(at(f"{name}/model.safetensors"))
            self.assertEqual(shown.keys(), base.keys())
            self.assertTrue(all(torch.equal(shown[k], v) for k, v in base.items()), name)
            loaded = tf.Qwen3VLMoeForConditionalGeneration.from_pretrained(at(name)).state_dict()
            self.assertTrue(all(torch.equal(loaded[k], v) for k, v in saved.items()), name)
            self.check_memory(model, at(name), at(f"{name}-memory"))
            for view, to in (("view=megatron", f"{name}-megatron"), ("view=hf", f"{name}-back")):
                source = at(name if view == "view=megatron" else f"{name}-megatron")
                done = subprocess.run([CKPT, "export", "-q", source, at(to), "-o", view, "-o", f"base={at('saved')}"], capture_output=True, text=True)
                self.assertEqual(done.returncode, 0, done.stderr)
            back = load_file(at(f"{name}-back/model.safetensors"))
            self.assertEqual(back.keys(), saved.keys())
            self.assertTrue(all(torch.equal(back[k], v) for k, v in saved.items()), name)

    def test_without_config(self):
        """Names alone do not say which family it is."""
        model = self.model("mixtral")
        dcp.save({"model": model.state_dict()}, checkpoint_id=os.path.join(self.tmp, "run"), no_dist=True)
        done = subprocess.run([CKPT, "ls", os.path.join(self.tmp, "run")], capture_output=True, text=True)
        self.assertEqual(done.returncode, 1)
        self.assertIn("base=DIR", done.stderr)


if __name__ == "__main__":
    unittest.main()
