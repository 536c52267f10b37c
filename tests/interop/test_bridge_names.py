# SPDX-License-Identifier: Apache-2.0
"""Names of Megatron-Bridge's families against transformers' own classes: what ckpt exports of Bridge's saves (tests/golden/bridge.tar.xz) is
loaded with from_pretrained, with a base and, where the run says enough, with the config.json that ckptfs makes. No tensor may be missing,
unknown or of another shape. Blocks of multi-token prediction are loaded by transformers' MtpModel, which names them of its own."""

import glob
import json
import os
import random
import sys

try:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers as tf
    from transformers.modeling_layers import MtpModel

    from tensor_case import SEED, TensorCase, export, randomise, read_all
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "golden"))
from case import unpack  # noqa: E402

tf.utils.logging.disable_progress_bar()
tf.utils.logging.set_verbosity(tf.utils.logging.CRITICAL)
UNKNOWN = {"bailing__ep2", "decilm__tp2", "mimo__tp2"}  # transformers has no class: nobody has compared these names
OTHER = {"step3p5__ep2"}  # beside an encoder only
LORA = {"llama__lora_tp2", "qwen2__canonical_tp2"}
AS = {"kimi_k2": "deepseek_v3"}  # whose code its repositories use
# What Bridge's models do not have
LACKS = {"gemma3_vl__tp2": "model.vision_tower.head."}
# Keys that a run does not say, or says otherwise: YaRN by 1.0 is none
ELSEWHERE = {"rope_parameters", "max_position_embeddings", "model_type", "initializer_range", "attention_dropout", "use_cache", "bos_token_id", "eos_token_id",
             "pad_token_id", "router_aux_loss_coef", "transformers_version", "_name_or_path", "architectures"}
MTP = {"dsv3_mtp__pp2layout": r"model\.layers\.3\.", "qwen3_next_mtp__ep2": r"^mtp\."}


class BridgeNames(TensorCase):
    def setUp(self):
        super().setUp()
        unpack("bridge.tar.xz", self.tmp)

    def exported(self, case, name, *options):
        """The export of a case, whose config.json names a type that transformers has; None: the run alone does not say enough."""
        done = export(self.path(f"{case}/run"), self.path(name), *options)
        if done.returncode and not options:
            self.assertRegex(done.stderr, "base=|model_type=")
            return None
        self.assertEqual(done.returncode, 0, done.stderr)
        at = self.path(f"{name}/config.json")
        os.chmod(at, 0o644)
        with open(at) as f:
            config = json.load(f)
        config["model_type"] = AS.get(config["model_type"], config["model_type"])
        config.pop("auto_map", None)  # code of a repository
        if config["model_type"] == "glm_moe_dsa":
            config.pop("num_experts", None)  # which transformers 5.12 wrote with the default
        with open(at, "w") as f:
            json.dump(config, f)
        return self.path(name)

    def load(self, case, folder):
        config = tf.AutoConfig.from_pretrained(folder)
        cls = getattr(tf, (config.architectures or [""])[0], None) or tf.AutoModelForCausalLM
        model, info = cls.from_pretrained(folder, output_loading_info=True)
        missing = {k for k in info["missing_keys"] if not k.startswith(LACKS.get(case, "?"))}
        text = config.get_text_config()
        behind = f"model.layers.{text.num_hidden_layers}."  # for MtpModel
        unknown = {k for k in info["unexpected_keys"] if not k.startswith(behind)}
        self.assertEqual((missing, unknown, set(info["mismatched_keys"])), (set(), set(), set()), f"{case}: {folder}")
        return model

    def test_every_family(self):
        cases = set(os.listdir(self.tmp)) - LORA
        self.assertTrue(UNKNOWN | OTHER | set(MTP) < cases)
        for case in sorted(cases - UNKNOWN - OTHER):
            with self.subTest(case):
                model = self.load(case, self.exported(case, f"{case}-hf", f"base={self.path(case)}/base"))
                if case in MTP:
                    self.check_mtp(case, model)
                alone = self.exported(case, f"{case}-alone")
                if alone:
                    same = self.load(case, alone).config.to_dict()
                    differ = {k: (same[k], v) for k, v in model.config.to_dict().items() if k in same and k not in ELSEWHERE and same[k] != v}
                    self.assertEqual(differ, {}, f"{case}: config.json of the run alone")

    def check_mtp(self, case, model):
        """MtpModel finds and renames the tensors by patterns; a missing one is an error of its own."""
        model._keys_to_ignore_on_load_unexpected = [MTP[case]]  # the class has the layer of the family's largest model
        text = model.config.get_text_config()
        text.num_mtp_layers = 1
        if getattr(text, "layer_types", None):
            text.mtp_layer_types = ["full_attention"]
        mtp = MtpModel.from_pretrained(model)
        self.assertGreater(len([n for n, _ in mtp.named_parameters() if n.startswith("layers.")]), 15)

    def test_step(self):
        """transformers has Step 3.5 as the language model of Step 3.7, and saves it under the repositories' names."""
        case = "step3p5__ep2"
        with open(self.path(f"{case}/base/config.json")) as f:
            config = tf.AutoConfig.for_model("step3p7", text_config=json.load(f), vision_config=dict(num_hidden_layers=1, hidden_size=32, intermediate_size=32, num_attention_heads=2))
        tf.Step3p7ForConditionalGeneration(config).save_pretrained(self.path("saved"))
        want = {k: v.shape for k, v in read_all(self.path("saved")).items() if not k.startswith(("vision_model.", "vit_large_projector."))}
        got = {k: v.shape for k, v in read_all(self.exported(case, "shown", f"base={self.path(case)}/base")).items()}
        self.assertEqual(got, want)

    def test_what_llama_4_computes_is_refused(self):
        """Nothing else in a run says it, and its tensors are those of other families."""
        (at,) = glob.glob(self.path("olmoe__ep2/run/*/run_config.yaml"))
        with open(at) as f:
            stated = f.read()
        for key in ("qk_l2_norm", "moe_apply_probs_on_input"):
            self.assertIn(f"  {key}: false\n", stated)
            with open(at, "w") as f:
                f.write(stated.replace(f"  {key}: false\n", f"  {key}: true\n"))
            for options in ([], [f"base={self.path('olmoe__ep2/base')}"]):
                done = export(self.path("olmoe__ep2/run"), self.path("refused"), *options)
                self.assertEqual(done.returncode, 1, done.stderr)
                self.assertIn("as in Llama 4, which is not read", done.stderr)

    def test_written_and_read_again(self):
        """Families of which there is no save of Bridge's: transformers' own model, as Megatron's checkpoint of a random layout."""
        text = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
                    head_dim=16, bos_token_id=1, eos_token_id=2, pad_token_id=0)
        yarn = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=32, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0,
                    llama_4_scaling_beta=0.1)
        rope = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25, mrope_section=[1, 1, 0], mrope_interleaved=True)
        linear = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8, linear_conv_kernel_dim=4,
                      layer_types=["linear_attention"] * 3 + ["full_attention"])
        pixtral = dict(model_type="pixtral", hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=28, patch_size=14, head_dim=8)
        tower = dict(depth=2, hidden_size=32, intermediate_size=48, num_heads=4, out_hidden_size=32, num_position_embeddings=16, patch_size=2, spatial_merge_size=2,
                     temporal_patch_size=1, in_channels=3)
        rnd = random.Random(SEED)
        tied = rnd.random() < 0.5
        models = {
            "exaone4": tf.Exaone4ForCausalLM(tf.Exaone4Config(**text, sliding_window=16, sliding_window_pattern=4, tie_word_embeddings=tied)),
            "mistral3": tf.Mistral3ForConditionalGeneration(tf.Mistral3Config(text_config=text | dict(model_type="ministral3", sliding_window=None, rope_parameters=yarn),
                                                                              vision_config=pixtral, tie_word_embeddings=False)),
            "qwen3_5": tf.Qwen3_5ForConditionalGeneration(tf.Qwen3_5Config(text_config=text | linear | dict(rope_parameters=rope), vision_config=tower,
                                                                           tie_word_embeddings=False)),
        }
        for name, model in models.items():
            for key, p in randomise(model).named_parameters():
                if key.endswith("linear_attn.norm.weight"):
                    p.data.mul_(4).round_().div_(4).add_(0.0)  # Megatron's is less by 1, which rounds
            model.save_pretrained(self.path(name))
            options = [f"tp={rnd.choice((1, 2))}", f"pp={rnd.choice((1, 2, 4))}", f"make_vocab_size_divisible_by={rnd.choice((1, 64, 128))}"]
            with self.subTest(name, options=options):
                for source, to, given in ((name, f"{name}-megatron", ["view=megatron", *options]), (f"{name}-megatron", f"{name}-again", [f"base={self.path(name)}"])):
                    done = export(self.path(source), self.path(to), *given)
                    self.assertEqual(done.returncode, 0, done.stderr)
                self.same(read_all(self.path(f"{name}-again")), read_all(self.path(name)), name)


if __name__ == "__main__":
    import unittest

    unittest.main()
