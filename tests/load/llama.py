# SPDX-License-Identifier: Apache-2.0
"""A Llama of any size, as tests and benchmarks make it: names, shapes, config.json."""

from collections import namedtuple


class Llama(namedtuple("Llama", "hidden ffn heads kv vocab")):
    def shapes(self, layers):
        """(name, shape) of all tensors, in the model's order."""
        hidden, ffn, kv = self.hidden, self.ffn, self.kv * self.hidden // self.heads
        yield "model.embed_tokens.weight", (self.vocab, hidden)
        for i in range(layers):
            at = f"model.layers.{i}."
            for name, shape in (("input_layernorm", (hidden,)), ("post_attention_layernorm", (hidden,)), ("self_attn.q_proj", (hidden, hidden)),
                                ("self_attn.k_proj", (kv, hidden)), ("self_attn.v_proj", (kv, hidden)), ("self_attn.o_proj", (hidden, hidden)),
                                ("mlp.gate_proj", (ffn, hidden)), ("mlp.up_proj", (ffn, hidden)), ("mlp.down_proj", (hidden, ffn))):
                yield f"{at}{name}.weight", shape
        yield "model.norm.weight", (hidden,)
        yield "lm_head.weight", (self.vocab, hidden)

    def config(self, layers):
        return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": self.hidden, "intermediate_size": self.ffn,
                "num_attention_heads": self.heads, "num_key_value_heads": self.kv, "num_hidden_layers": layers, "vocab_size": self.vocab,
                "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
