# SPDX-License-Identifier: Apache-2.0
"""What the tests of Megatron-DeepSpeed's checkpoints share: random models, and comparing what is shown with them."""

import json
import os

import torch
import transformers as tf

from tensor_case import SEED, TensorCase, export, randomise, read_all

KEYS = {"llama": ("model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads rms_norm_eps "
                  "max_position_embeddings tie_word_embeddings").split(),
        "gpt2": "model_type vocab_size n_embd n_layer n_head n_inner n_positions layer_norm_epsilon activation_function tie_word_embeddings".split()}


def llama(tied=False, **keys):
    cfg = tf.LlamaConfig(**dict(vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
                                max_position_embeddings=64, rms_norm_eps=1e-6, tie_word_embeddings=tied, dtype=torch.bfloat16) | keys)
    torch.manual_seed(SEED)
    return cfg, randomise(tf.LlamaForCausalLM(cfg).to(torch.bfloat16)).state_dict()


def gpt2():
    cfg = tf.GPT2Config(vocab_size=60, n_embd=32, n_layer=4, n_head=4, n_inner=96, n_positions=64, bos_token_id=0, eos_token_id=0,
                        activation_function="gelu_fast", dtype=torch.bfloat16)
    torch.manual_seed(SEED)
    return cfg, randomise(tf.GPT2LMHeadModel(cfg).to(torch.bfloat16)).state_dict()


def trained(sd):
    """A float32 model that is sd when rounded."""
    return {k: v.float() + torch.rand(v.shape) * v.float().abs() * 2**-10 for k, v in sd.items()}


class ModelCase(TensorCase):
    def served(self, run, sd, cfg, *options):
        out = run + ".out"
        done = export(run, out, *options)
        self.assertEqual(done.returncode, 0, done.stderr)
        want = {k: v for k, v in sd.items() if k != "lm_head.weight" or not cfg.tie_word_embeddings}
        self.same(read_all(out), want, run)
        with open(os.path.join(out, "config.json")) as f:
            got = json.load(f)
        for key in KEYS[cfg.model_type]:
            self.assertEqual(got[key], getattr(cfg, key), key)
        return done.stderr, got

    def refused(self, run, needle, *options):
        done = export(run, run + ".out", *options)
        self.assertEqual((done.returncode, needle in done.stderr), (1, True), done.stderr)
