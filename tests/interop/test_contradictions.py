# SPDX-License-Identifier: Apache-2.0
"""Model directories whose tensors contradict their config.json: refused, with the tensor, what was found and what was expected, where
transformers refuses them or initialises tensors at random; and shown where it loads them. A DeepSpeed checkpoint beside a model of
placeholders is what is read."""

import json
import os
import shutil
import subprocess
import sys
import unittest

try:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers as tf
    from safetensors.torch import load_file, save_file
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

from tensor_case import CKPT, SEED, TensorCase, export, randomise, read_all

tf.utils.logging.disable_progress_bar()
tf.utils.logging.set_verbosity_error()
SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=64)
ENCODER = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
DEEPSPEED = os.path.join(os.environ.get("CKPTFS_SOURCE", "."), "tests", "golden", "deepspeed", "z3_qwen3_frozen_w3")
NORM = "model.layers.1.input_layernorm.weight"


def llama(**more):
    return tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES | more))


CODER = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)

# what no list has, and whose names or shapes might be taken for wrong ones
OTHERS = {
    "bert": lambda: tf.BertForMaskedLM(tf.BertConfig(**ENCODER)),
    "bert without a head": lambda: tf.BertModel(tf.BertConfig(**ENCODER)),
    "llama without a head": lambda: tf.LlamaModel(tf.LlamaConfig(**SIZES)),
    "llama that classifies": lambda: tf.LlamaForSequenceClassification(tf.LlamaConfig(**SIZES, num_labels=3)),
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64)),
    "bart": lambda: tf.BartForConditionalGeneration(tf.BartConfig(d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
                                                                  decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=64)),
    "t5": lambda: tf.T5ForConditionalGeneration(tf.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=64)),
    "opt": lambda: tf.OPTForCausalLM(tf.OPTConfig(hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64, word_embed_proj_dim=16)),
    "vit": lambda: tf.ViTForImageClassification(tf.ViTConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8)),
    "wav2vec2": lambda: tf.Wav2Vec2ForCTC(tf.Wav2Vec2Config(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, conv_dim=(32,) * 7,
                                                            num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2, vocab_size=32, mask_time_prob=0.0)),
    "neox": lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**ENCODER)),
    "bloom": lambda: tf.BloomForCausalLM(tf.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=64)),
    "tied": lambda: llama(tie_word_embeddings=True),
    # classes with one of their type's parts
    "clip without a text model": lambda: tf.CLIPForImageClassification(tf.CLIPConfig(
        text_config=CODER, vision_config=CODER | dict(image_size=32, patch_size=8))),
    "whisper without a decoder": lambda: tf.WhisperForAudioClassification(tf.WhisperConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
        vocab_size=64, max_source_positions=32, pad_token_id=0)),
}


class Contradictions(TensorCase):
    def setUp(self):
        super().setUp()
        torch.manual_seed(SEED)

    def saved(self, model):
        shutil.rmtree(self.path("run"), ignore_errors=True)
        randomise(model).save_pretrained(self.path("run"))
        return self.path("run")

    def with_tensors(self, **changed):
        """A llama's directory with some tensors replaced ('.' is written '__')."""
        run = self.saved(llama())
        tensors = load_file(os.path.join(run, "model.safetensors"))
        for name, tensor in changed.items():
            tensors[name.replace("__", ".")] = tensor
        save_file(tensors, os.path.join(run, "model.safetensors"), {"format": "pt"})
        return run

    def both(self, run, *options):
        """Exit status and messages of info and export, which agree."""
        info = subprocess.run([CKPT, "info", run, *(w for o in options for w in ("-o", o))], capture_output=True, text=True)
        out = self.path("out")
        done = export(run, out, *options)
        shutil.rmtree(out, ignore_errors=True)
        self.assertEqual(info.returncode, done.returncode, info.stderr + done.stderr)
        return done.returncode, done.stderr

    def refused(self, run, *words, options=()):
        status, text = self.both(run, *options)
        self.assertEqual(status, 1, (words, text))
        for word in words:
            self.assertIn(word, text)

    def test_placeholders_and_parts(self):
        self.refused(self.with_tensors(**{NORM.replace(".", "__"): torch.zeros(0)}), NORM, "is [0], not [32]", "view=raw")
        self.refused(self.with_tensors(**{NORM.replace(".", "__"): torch.zeros(16)}), NORM, "model.safetensors", "is [16], not [32]")
        self.refused(self.with_tensors(lm_head__weight=torch.zeros(32, 32)), "lm_head.weight", "is [32, 32], not [64, 32]")
        self.assertEqual(self.both(self.path("run"), "view=raw")[0], 0)

    def test_an_unlisted_type_has_no_empty_parameter(self):
        run = self.saved(OTHERS["gpt2"]())
        tensors = load_file(os.path.join(run, "model.safetensors"))
        name = "transformer.h.0.ln_1.weight"
        save_file(tensors | {name: torch.zeros(0)}, os.path.join(run, "model.safetensors"), {"format": "pt"})
        self.refused(run, name, "no elements", "[0]")
        with open(os.path.join(run, "config.json")) as f:
            config = json.load(f)
        with open(os.path.join(run, "config.json"), "w") as f:
            json.dump(config | {"adapter_size": 0}, f)
        self.assertEqual(self.both(run)[0], 0)

    def test_a_file_without_tensors(self):
        run = self.saved(llama())
        save_file({}, os.path.join(run, "model.safetensors"), {"format": "pt"})
        self.refused(run, "no tensors", "config.json")

    def test_a_prefix_that_transformers_does_not_know(self):
        """It would load nothing, and initialise the whole model at random."""
        run = self.saved(llama())
        weights = os.path.join(run, "model.safetensors")
        save_file({f"policy_model.{k}": t for k, t in load_file(weights).items()}, weights, {"format": "pt"})
        model, info = tf.AutoModelForCausalLM.from_pretrained(run, output_loading_info=True)
        self.assertEqual(len(info["missing_keys"]), len(dict(model.named_parameters())))
        self.refused(run, "none of the tensors", "policy_model.")

    def test_another_model_s_config(self):
        for ours, theirs in (("bert", "tied"), ("tied", "bert"), ("gpt2", "tied"), ("tied", "gpt2"), ("gpt2", "bert"), ("vit", "gpt2")):
            run = self.saved(OTHERS[ours]())
            weights = os.path.join(run, "model.safetensors")
            keep = load_file(weights)
            run = self.saved(OTHERS[theirs]())
            shutil.copy(os.path.join(run, "config.json"), self.path("config.json"))
            save_file(keep, weights, {"format": "pt"})
            with self.subTest(tensors=ours, config=theirs):
                self.refused(run, "none of the tensors", "model_type")
                status, text = self.both(run, "allow_partial")
                self.assertEqual((status, "none of the tensors" in text), (0, True), text)

    def test_a_quantised_model_s_weights_have_any_shape(self):
        run = self.with_tensors(model__layers__0__mlp__down_proj__weight=torch.zeros(1024, 1, dtype=torch.uint8))
        with open(os.path.join(run, "config.json")) as f:
            config = json.load(f)
        with open(os.path.join(run, "config.json"), "w") as f:
            json.dump(config | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, f)
        self.assertEqual(self.both(run)[0], 0)
        tensors = load_file(os.path.join(run, "model.safetensors"))
        save_file(tensors | {NORM: torch.zeros(16)}, os.path.join(run, "model.safetensors"), {"format": "pt"})
        self.refused(run, NORM, "is [16], not [32]")

    def with_config(self, run, **changed):
        with open(os.path.join(run, "config.json")) as f:
            config = json.load(f)
        with open(os.path.join(run, "config.json"), "w") as f:
            json.dump(config | changed, f)

    def test_packed_weights_have_any_shape_and_a_key_that_only_mlx_knows(self):
        name = "model.layers.0.mlp.down_proj"
        run = self.with_tensors(**{f"{name}.weight".replace(".", "__"): torch.zeros(32, 6, dtype=torch.int32)})
        self.with_config(run, quantization={"group_size": 16, "bits": 4})
        self.assertEqual(self.both(run), (0, ""))

    def test_code_of_its_own_may_have_other_shapes(self):
        run = self.with_tensors(**{NORM.replace(".", "__"): torch.zeros(16)})
        self.with_config(run, auto_map={"AutoModelForCausalLM": "modeling.Own"})
        status, text = self.both(run)
        self.assertEqual(status, 0, text)
        self.assertIn(NORM, text)

    def test_a_class_that_is_not_transformers_may_have_other_shapes(self):
        run = self.with_tensors(lm_head__weight=torch.zeros(40, 32))
        for own in ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"):
            self.with_config(run, architectures=[own])
            status, text = self.both(run)
            self.assertEqual((status, "lm_head.weight" in text, f"'{own}'" in text), (0, True, True), text)
        for theirs in (["LlamaForCausalLM"], ["LlamaForSequenceClassification"], ["LlamaModel"], None):
            self.with_config(run, architectures=theirs)
            self.refused(run, "lm_head.weight", "is [40, 32], not [64, 32]")

    def test_right_models_are_right(self):
        for name, make in OTHERS.items():
            run = self.saved(make())
            with self.subTest(model=name):
                self.assertEqual(self.both(run)[0], 0, self.both(run)[1])

    def test_the_trainer_s_checkpoint_beside_placeholders(self):
        run = shutil.copytree(os.path.join(DEEPSPEED, "run"), self.path("deepspeed"))
        base = f"base={os.path.join(DEEPSPEED, 'base')}"
        done = export(run, self.path("want"), base)
        self.assertEqual(done.returncode, 0, done.stderr)
        want = read_all(self.path("want"))
        for f in os.listdir(os.path.join(DEEPSPEED, "base")):
            if f.endswith(".json"):
                shutil.copy(os.path.join(DEEPSPEED, "base", f), run)
        for hollow in ({k: torch.zeros(0, dtype=t.dtype) for k, t in want.items()}, {}):
            save_file(hollow, os.path.join(run, "model.safetensors"), {"format": "pt"})
            out = self.path("out")
            done = export(run, out, base)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.same(read_all(out), want, "deepspeed")
            shutil.rmtree(out)
            info = subprocess.run([CKPT, "info", "--json", run, "-o", base], capture_output=True, text=True)
            self.assertIn("placeholders without values", info.stdout)
        save_file(want, os.path.join(run, "model.safetensors"), {"format": "pt"})
        info = subprocess.run([CKPT, "info", "--json", run, "-o", base], capture_output=True, text=True)
        self.assertEqual(json.loads(info.stdout)["format"], "hf", info.stderr)


if __name__ == "__main__":
    unittest.main()
