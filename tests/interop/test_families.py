# SPDX-License-Identifier: Apache-2.0
"""Families by transformers' own lists: a DCP of the state dict of a small random model of each type is shown as save_pretrained writes
the model, file by file, to the byte; and the files again as the model has them in memory. The models are made of the types' default
configs, in which sizes are replaced by small ones.

    test_families.py Families.test_base (causal, image, masked, seq2seq, speech)     CKPTFS_FAMILIES: all, for every type that transformers has, or some types"""

import json
import os
import re
import sys
import unittest

try:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import torch.distributed.checkpoint as dcp
    import transformers as tf
    from transformers.models.auto import modeling_auto as lists
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from tensor_case import SEED, TensorCase, export, randomise, read_all
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

tf.utils.logging.disable_progress_bar()
tf.utils.logging.set_verbosity_error()
torch.set_num_threads(1)
MOST = 30_000_000  # parameters of a model that is still small
SIZES = {
    32: "hidden_size d_model n_embd embed_dim out_hidden_size projection_dim word_embed_proj_dim embedding_size lru_width text_hidden_size vision_hidden_size",
    48: "intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim ffn_hidden_size",
    2: """num_hidden_layers n_layer num_layers encoder_layers decoder_layers n_layers num_decoder_layers num_key_value_heads num_experts_per_tok
          linear_num_key_heads o_groups""",
    4: "num_attention_heads n_head num_heads n_heads encoder_attention_heads decoder_attention_heads linear_num_value_heads index_n_heads index_topk",
    8: """head_dim d_kv global_head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim linear_key_head_dim linear_value_head_dim mamba_n_heads mamba_d_head
          mamba_d_state mamba_num_heads mamba_head_dim ssm_state_size state_size index_head_dim o_lora_rank hidden_size_per_layer_input""",
    24: """moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size shared_intermediate_size moe_ffn_hidden_size
           expert_ffn_size""",
    12: "num_experts num_local_experts n_routed_experts moe_num_experts",
    16: "kv_lora_rank q_lora_rank num_mel_bins",
    1: "depth n_shared_experts num_shared_experts first_k_dense_replace n_group topk_group mamba_n_groups n_groups moe_layer_start_index",
    0: "pad_token_id num_mtp_modules num_nextn_predict_layers",
    -1: "moe_layer_end_index",
    128: "vocab_size vocab_size_per_layer_input", 64: "max_position_embeddings n_positions max_source_positions max_target_positions",
    28: "image_size", 14: "patch_size",
}
SMALL = {name: size for size, names in SIZES.items() for name in names.split()}
PER_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers", "attn_type_list", "block_types", "num_attention_groups")
OWN = {
    "florence2": {f"vision_config.{k}": v for k, v in {"embed_dim": [16] * 4, "num_heads": [2] * 4, "num_groups": [2] * 4, "depths": [1] * 4, "projection_dim": 32}.items()},
    "gemma4": {"text_config.per_layer_config": {}, "text_config.num_kv_shared_layers": 0},
    "gemma4_text": {"per_layer_config": {}, "num_kv_shared_layers": 0},
    "gemma4_unified": {"text_config.per_layer_config": {}, "text_config.num_kv_shared_layers": 0},
    "glm5_next": {"text_config.num_key_value_heads": 4, "text_config.index_topk": 16, "text_config.qk_rope_head_dim": 0},
    "hunyuan_vl": {"text_config.head_dim": 8},
    "cosmos3_edge": {"text_config.rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}},
    "molmo2": {"adapter_config.vision_feature_layer": [1, 0]},
    "mistral_large4": {"text_config.kv_source_layers": [0, 1]},
    "zaya": {"num_experts_per_tok": 1},
    "laguna": {"num_attention_heads_per_layer": [4, 4]},
    "ernie4_5_vl_moe": {"text_config.moe_intermediate_size": [24, 16], "text_config.rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}},
    "deepseek_ocr2": {"text_config.mlp_layer_types": ["dense", "sparse"], "vision_config.encoder_config.layer_types": ["full_attention"] * 2},
    "inkling_mm_model": {"vision_config.n_layers": 5, "vision_config.patch_size": 4, "text_config.mlp_layer_types": ["dense", "sparse"],
                         **{f"text_config.swa_{k}": v for k, v in {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}.items()}},
    "dots3_note": {f"{part}_config.{k}": v for part, values in {
        "text": {"per_layer_config": {}, "num_key_value_heads": 4, "n_group": 1, "head_dim": 16, "layer_types": ["indexed_attention"] * 2, "rope_parameters": None,
                 "mlp_layer_types": ["dense", "sparse"]},
        "vision": {"per_layer_config": {}, "mlp_layer_types": ["dense", "sparse"], "adapter_in_dim": 32, "adapter_out_dim": 32},
        "audio": {"adapter_input_size": 32, "adapter_out_dim": 32}}.items() for k, v in values.items()},
    "xlnet": {"d_head": 8},
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "lfm2_moe": {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
}
FAMILIES = {
    "causal": "afmoe apertus axk2 bailing_hybrid beam blt deepseek_v4 dots3_note gemma4_text hrm_text hy_v4 inkling2_text kimi_linear kolibri1 lfm3 olmo_hybrid xlnet zaya ctrl marian prophetnet",
    "image": """aria blip blip-2 cosmos3_edge cosmos3_omni deepseek_ocr2 dots3_note ernie4_5_vl_moe florence2 fuyu gemma4_unified glm5_next granite_docling hunyuan_vl hyperclovax_vision_v2 idefics2
                idefics3 inkling2 inkling_mm_model instructblip kimi_k25 kosmos-2 lfm3_vl llama4 minimax_m3_vl mistral4 mistral_large4 mllama molmo2 nemotron_h_omni paddleocr_vl
                pp_chart2table qianfan_ocr qwen2_5_omni_thinker qwen3_5_moe qwen3_omni_moe_thinker qwen3_vl_moe shieldgemma2 step3p7 t5gemma2 udop unlimited_ocr
                video_llava""",
    "masked": "albert convbert distilbert gte jina_embeddings_v3 longformer mpnet nomic_bert roformer ultrabert",
    "seq2seq": "bart glmasr led qwen2_audio t5gemma voxtral",
    "base": """aria bart bert bloom clip deepseek_v3 distilbert gemma3 gpt2 jamba llama llava mamba marian mixtral modernbert qwen3 qwen3_moe qwen3_vl roberta
               siglip t5 wav2vec2 whisper""",
    "speech": "canary cohere_asr dia pop2piano seamless_m4t_v2",
}
SPLIT = {"ernie4_5_vl_moe": "1GB"}  # transformers keeps a layer's gate and up together there, and splits into other files than we do
AUTO = {
    "base": (tf.AutoModel, lists.MODEL_MAPPING_NAMES),
    "causal": (tf.AutoModelForCausalLM, lists.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "image": (tf.AutoModelForImageTextToText, lists.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
    "masked": (tf.AutoModelForMaskedLM, lists.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    "seq2seq": (tf.AutoModelForSeq2SeqLM, lists.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
    "speech": (tf.AutoModelForSpeechSeq2Seq, lists.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES),
}


def shrink(config):
    """A config's values, with small sizes."""
    out = {}
    for key, value in config.items():
        number = isinstance(value, int) and not isinstance(value, bool)
        if key in ("transformers_version", "architectures", "_name_or_path"):
            continue
        if isinstance(value, dict) and (key.endswith("_config") or "model_type" in value):
            out[key] = shrink(value)
        elif key in SMALL and (number or key == "pad_token_id"):
            out[key] = SMALL[key]
        elif key in PER_LAYER and isinstance(value, list):
            out[key] = (list(dict.fromkeys(value)) * 4)[: SMALL["num_hidden_layers"]]
        elif key.endswith(("token_id", "token_index")):
            out[key] = [3] if isinstance(value, list) else 3 if number and value >= 100 else value
        else:
            out[key] = value
    return out


def small_config(kind):
    values = shrink(CONFIG_MAPPING[kind]().to_dict())
    for path, value in OWN.get(kind, {}).items():
        *parts, leaf = path.split(".")
        at = values
        for part in parts:
            at = at[part]
        at[leaf] = value
    values.pop("model_type", None)
    return CONFIG_MAPPING[kind](**values)


def small_model(kind, auto):
    with torch.device("meta"):
        size = sum(p.numel() for p in auto.from_config(small_config(kind)).parameters())
    if size > MOST:
        raise ValueError(f"{size} parameters")
    torch.manual_seed(SEED)
    return randomise(auto.from_config(small_config(kind)))


class Families(TensorCase):
    def check(self, kind, auto):
        at = lambda name: self.path(f"{kind}.{name}")
        model = small_model(kind, auto)
        split = SPLIT.get(kind, "20KB")
        model.save_pretrained(at("want"), max_shard_size=split)
        model.config.save_pretrained(at("base"))
        dcp.save({"model": model.state_dict()}, checkpoint_id=at("run"), no_dist=True)
        done = export(at("run"), at("got"), f"base={at('base')}", f"max_shard_size={split}")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.same(read_all(at("got")), read_all(at("want")), kind)
        for name in os.listdir(at("want")):
            with open(os.path.join(at("want"), name), "rb") as want, open(os.path.join(at("got"), name), "rb") as got:
                self.assertTrue(want.read() == got.read(), f"{kind}: {name}")
        done = export(at("want"), at("memory"), "view=memory")
        self.assertEqual(done.returncode, 0, done.stderr)
        state, got = model.state_dict(), read_all(at("memory"))
        self.same(got, {name: state.get(name, torch.empty(0)) for name in got}, f"{kind} in memory")
        self.assertEqual({t.data_ptr() for t in state.values()}, {state[name].data_ptr() for name in got}, f"{kind} in memory")

    def check_all(self, which):
        auto, known = AUTO[which]
        every = os.environ.get("CKPTFS_FAMILIES") == "all"
        for kind in known if every else os.environ.get("CKPTFS_FAMILIES", FAMILIES[which]).split():
            with self.subTest(kind):
                try:
                    small_config(kind)
                except Exception as e:
                    if every:
                        continue  # the sizes do not fit together
                    raise e
                self.check(kind, auto)

    def test_causal(self):
        self.check_all("causal")

    def test_image(self):
        self.check_all("image")

    def test_masked(self):
        self.check_all("masked")

    def test_seq2seq(self):
        self.check_all("seq2seq")

    def test_speech(self):
        self.check_all("speech")

    # ---- models without a head ----

    def test_base(self):
        self.check_all("base")

    def save_base(self, kind, key=None):
        """Save the state dict of a model without a head, below a key or flat: its path, the options for it, and the model as Hugging Face saves it."""
        model = small_model(kind, tf.AutoModel)
        model.save_pretrained(self.path("want"))
        model.config.save_pretrained(self.path("base"))
        dcp.save({key: model.state_dict()} if key else model.state_dict(), checkpoint_id=self.path("run"), no_dist=True)
        return self.path("run"), f"base={self.path('base')}", read_all(self.path("want"))

    def test_base_without_a_key(self):
        run, base, want = self.save_base("llama")
        done = export(run, self.path("got"), base)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.same(read_all(self.path("got")), want, "llama")

    def test_base_of_an_unknown_conversion(self):
        """save_pretrained converts this type's names in another way if it has no head: refused, not shown under wrong names."""
        run, base, _ = self.save_base("bailing_hybrid", "model")
        done = export(run, self.path("got"), base)
        self.assertEqual(done.returncode, 1)
        self.assertIn("'BailingHybridModel', a model without a head, and how transformers saves that of model type 'bailing_hybrid' is not known", done.stderr)

    # ---- torchtitan ----

    def titan_expert(self, leaf):
        """The name of the tensor that has all experts, and, after '#', the expert's place in it."""
        _, _, expert, proj, _ = leaf.split(".")
        return "moe.routed_experts.inner_experts." + {"gate_proj": "w1_EFD", "up_proj": "w3_EFD", "down_proj": "w2_EDF"}[proj] + f"#{expert}"

    def titan_qwen3_5(self, name, t, keys, values):
        """{torchtitan's name: tensor}, by the tables of its state dict adapter."""
        text = re.fullmatch(r"model\.language_model\.layers\.(\d+)\.(.*)", name)
        block = re.fullmatch(r"model\.visual\.blocks\.(\d+)\.(.*)", name)
        if text:
            at, leaf = f"layers.{text[1]}.", text[2]
            if leaf in ("linear_attn.in_proj_qkv.weight", "linear_attn.conv1d.weight"):
                to = "in_proj_" if "proj" in leaf else "conv_"
                return {f"{at}attn.{to}{x}.weight": part for x, part in zip("qkv", t.split([keys, keys, values]))}
            if leaf.startswith("mlp.experts."):
                return {at + self.titan_expert(leaf): t}
            for old, new in (("self_attn.", "attn."), ("linear_attn.", "attn."), ("mlp.gate.", "moe.router.gate."), ("mlp.shared_expert_gate", "moe.shared_experts.gate"),
                             ("mlp.shared_expert.gate_proj", "moe.shared_experts.w1"), ("mlp.shared_expert.up_proj", "moe.shared_experts.w3"),
                             ("mlp.shared_expert.down_proj", "moe.shared_experts.w2"), ("mlp.gate_proj", "feed_forward.w1"), ("mlp.up_proj", "feed_forward.w3"),
                             ("mlp.down_proj", "feed_forward.w2"), ("input_layernorm", "attention_norm"), ("post_attention_layernorm", "ffn_norm")):
                leaf = leaf.replace(old, new)
            return {at + re.sub(r"([qkvo])_proj\.weight", r"w\1.weight", leaf): t}
        if block:
            at, leaf = f"vision_encoder.layers.{block[1]}.", block[2]
            if "attn.qkv" in leaf:
                return {f"{at}attn.w{x}.{leaf.split('.')[-1]}": part for x, part in zip("qkv", t.chunk(3))}
            return {at + leaf: t}
        for old, new in (("model.language_model.embed_tokens", "tok_embeddings"), ("model.language_model.norm", "norm"), ("model.visual.", "vision_encoder."),
                         ("patch_embed.proj.", "patch_embed."), ("pos_embed.weight", "pos_embed")):
            name = name.replace(old, new)
        return {name: t.flatten(1) if name == "vision_encoder.patch_embed.weight" else t}

    def check_titan(self, what, kind, config, titan, hub=lambda name: name):
        """config: of the model; titan(name, tensor): what torchtitan saves of a tensor; hub(name): the hub's name of what save_pretrained wrote."""
        base, run = self.path(f"{what}.base"), self.path(f"{what}.run")
        config.pop("model_type")
        model = randomise(tf.AutoModelForImageTextToText.from_config(CONFIG_MAPPING[kind](**config)))
        model.save_pretrained(base)
        want, state = {hub(name): t for name, t in read_all(base).items()}, {}
        os.remove(os.path.join(base, "model.safetensors"))
        for name, t in want.items():
            state |= titan(name, t)
        for name in {name.split("#")[0] for name in state if "#" in name}:
            experts = [key for key in state if key.startswith(name + "#")]
            state[name] = torch.stack([state.pop(f"{name}#{e}") for e in range(len(experts))])
        if "lm_head.weight" not in state:
            state["lm_head.weight"] = state["tok_embeddings.weight"]
        dcp.save({name: t.contiguous() for name, t in state.items()}, checkpoint_id=run, no_dist=True)
        done = export(run, run + ".out", f"base={base}")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.same(read_all(run + ".out"), want, what)

    def test_torchtitan_qwen3_5(self):
        kinds = ["linear_attention", "full_attention", "linear_attention"]
        for tied in (False, True):
            config = shrink(CONFIG_MAPPING["qwen3_5"]().to_dict()) | {"tie_word_embeddings": tied}
            config["text_config"] |= {"num_hidden_layers": 3, "layer_types": kinds, "linear_value_head_dim": 16, "tie_word_embeddings": tied}
            self.check_titan(f"tied {tied}", "qwen3_5", config, lambda name, t: self.titan_qwen3_5(name, t, 16, 64))

    def test_torchtitan_qwen3_5_moe(self):
        """The experts have the order that E, F and D in torchtitan's names say; its own export transposes them, and transformers cannot load that."""
        config = shrink(CONFIG_MAPPING["qwen3_5_moe"]().to_dict())
        config["text_config"] |= {"layer_types": ["linear_attention", "full_attention"], "linear_value_head_dim": 16}
        self.check_titan("moe", "qwen3_5_moe", config, lambda name, t: self.titan_qwen3_5(name, t, 16, 64))

    def titan_kimi_k25(self, name, t):
        """{torchtitan's name: tensor}, by the tables of its state dict adapter, which deepseek_v3's is a part of."""
        fused = re.fullmatch(r"vision_tower\.encoder\.blocks\.(\d+)\.wqkv\.(\w+)", name)
        if fused:
            return {f"vision_encoder.layers.{fused[1]}.attn.w{x}.{fused[2]}": part for x, part in zip("qkv", t.chunk(3))}
        layer = re.match(r"language_model\.model\.layers\.(\d+)\.(mlp\.experts\..*)", name)
        if layer:
            return {f"layers.{layer[1]}.{self.titan_expert(layer[2])}": t}
        for old, new in (
            (r"language_model\.(model\.)?", ""), ("embed_tokens", "tok_embeddings"), (r"self_attn\.kv_a_proj_with_mqa", "attention.wkv_a"), (r"self_attn\.kv_a_layernorm", "attention.kv_norm"),
            (r"self_attn\.kv_b_proj", "attention.wkv_b"), (r"self_attn\.o_proj", "attention.wo"), (r"self_attn\.q_a_proj", "attention.wq_a"),
            (r"self_attn\.q_a_layernorm", "attention.q_norm"), (r"self_attn\.q_b_proj", "attention.wq_b"), (r"mlp\.shared_experts\.gate_proj", "moe.shared_experts.w1"),
            (r"mlp\.shared_experts\.up_proj", "moe.shared_experts.w3"), (r"mlp\.shared_experts\.down_proj", "moe.shared_experts.w2"),
            (r"mlp\.gate\.e_score_correction_bias", "moe.expert_bias_E"), (r"mlp\.gate\.", "moe.router.gate."), (r"mlp\.gate_proj", "feed_forward.w1"), (r"mlp\.up_proj", "feed_forward.w3"),
            (r"mlp\.down_proj", "feed_forward.w2"), ("input_layernorm", "attention_norm"), ("post_attention_layernorm", "ffn_norm"),
            (r"vision_tower\.patch_embed\.proj\.", "vision_encoder.patch_embed."), (r"vision_tower\.patch_embed\.pos_emb\.weight", "vision_encoder.pos_embed"),
            (r"vision_tower\.encoder\.blocks\.", "vision_encoder.layers."), (r"\.norm1\.", ".norm2."), (r"\.norm0\.", ".norm1."), (r"\.wo\.(?=weight|bias)(?<!attention\.wo\.)", ".attn.proj."),
            (r"mlp\.fc0", "mlp.linear_fc1"), (r"mlp\.fc1", "mlp.linear_fc2"), (r"vision_tower\.encoder\.final_layernorm", "vision_encoder.final_norm"),
            (r"mm_projector\.proj\.0", "mm_projector.linear_1"), (r"mm_projector\.proj\.2", "mm_projector.linear_2"), (r"mm_projector\.", "vision_encoder.projector.")):
            name = re.sub(old, new, name)
        return {name: t.flatten(1) if name == "vision_encoder.patch_embed.weight" else t}

    def test_torchtitan_kimi_k25(self):
        """Under the names of the hub, which torchtitan reads and writes. save_pretrained writes a few of them in another way."""
        config = shrink(CONFIG_MAPPING["kimi_k25"]().to_dict()) | {"tie_word_embeddings": False, "projection_hidden_size": 32}
        hub = lambda name: name.replace("model.blocks.", "model.layers.").replace("model.mm_projector.", "mm_projector.").replace("encoder.patch_embed.", "patch_embed.")
        self.check_titan("kimi_k25", "kimi_k25", config, self.titan_kimi_k25, hub)

    def titan_muse_glimmer(self, name, t):
        pairs = lambda t, heads: t.reshape(heads, 2, -1, *t.shape[1:]).transpose(1, 2).reshape(t.shape)  # of the rows of rotary halves
        if re.search(r"[qk]_proj", name):
            t = pairs(t, 4 if "q_proj" in name or "vision" in name else 2)
        for old, new in (
            (r"model\.language_model\.embed_tokens", "tok_embeddings.embedding"), (r"model\.language_model\.", ""), (r"model\.vision_tower\.", "vision_encoder."),
            (r"patch_embedder\.patch_embedding", "conv1_linear"), (r"patch_embedder\.position_embedding_table\.weight", "positional_embedding_vlm"),
            (r"self_attn\.([qkv])_proj", r"attention.qkv_linear.w\1"), (r"self_attn\.o_proj", "attention.wo"), (r"self_attn\.gate_proj", "attention.o_gate"),
            (r"mlp\.gate_proj", "feed_forward.w1"), (r"mlp\.down_proj", "feed_forward.w2"), (r"mlp\.up_proj", "feed_forward.w3"),
            ("input_layernorm", "attention_norm"), ("post_attention_layernorm", "post_attention_norm"), ("pre_feedforward_layernorm", "ffn_norm"),
            ("post_feedforward_layernorm", "post_ffn_norm"), (r"attn\.([qkv])_proj", r"attn.w\1"), (r"mlp\.fc", "mlp.linear_fc"),
            (r"model\.vision_adapter\.fc1", "vision_adapter.c_fc"), (r"model\.vision_adapter\.fc2", "vision_adapter.c_proj"), (r"model\.vision_proj", "vision_proj")):
            name = re.sub(old, new, name)
        return {name: t}

    def test_torchtitan_muse_glimmer(self):
        config = shrink(CONFIG_MAPPING["muse_glimmer"]().to_dict()) | {"projector_hidden_size": 40}
        self.check_titan("muse_glimmer", "muse_glimmer", config, self.titan_muse_glimmer)

    def test_part_of_an_unknown_model(self):
        """The embedding of one part does not make the other parts something to leave out."""
        base = self.path("base")
        os.makedirs(base)
        with open(os.path.join(base, "config.json"), "w") as f:
            json.dump({"model_type": "nova", "vision_config": {"model_type": "x"}, "text_config": {"model_type": "y"}}, f)
        dcp.save({"eyes.w": torch.ones(4), "text.model.embed_tokens.weight": torch.ones(4, 4)}, checkpoint_id=self.path("run"), no_dist=True)
        done = export(self.path("run"), self.path("got"), f"base={base}")
        self.assertEqual(done.returncode, 1)
        self.assertIn("'eyes.w' is not below it", done.stderr)
        done = export(self.path("run"), self.path("got"), f"base={base}", "allow_leftover")
        self.assertEqual(done.returncode, 0, done.stderr)


if __name__ == "__main__":
    unittest.main()
