# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models as Megatron-DeepSpeed saves them: one nested state dict a tensor-parallel rank, or numbered layers of a pipeline.
Names, fusions and cuts are those of its megatron/model/{gpt_model,language_model,transformer}.py and of its converter
tools/hf2megads_weight_converter.py; they are written independently of the recipes."""

import argparse
import os

import torch

COL, ROW, GLU, ALL = "col", "row", "glu", None  # how tensor ranks cut: rows, columns, rows of each half; not at all
NONE = "optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments lr_scheduler data_sampler random_ltd".split()


def cut(t, rule, n):
    if rule == GLU:
        return [torch.cat(pair) for pair in zip(*(half.chunk(n) for half in t.chunk(2)))]
    return [p.clone() for p in t.chunk(n, 0 if rule == COL else 1)] if rule else [t] * n


def by_heads(q, k, v, groups):
    """Each group of heads: its queries, its key, its value."""
    return torch.cat([x.reshape(groups, -1, *x.shape[1:]) for x in (q, k, v)], 1).reshape(-1, *q.shape[1:])


def llama_layers(sd, cfg):
    for i in range(cfg.num_hidden_layers):
        at = lambda name: sd[f"model.layers.{i}.{name}.weight"]
        yield {"input_layernorm.weight": (at("input_layernorm"), ALL),
               "self_attention.query_key_value.weight": (by_heads(*(at(f"self_attn.{x}_proj") for x in "qkv"), cfg.num_key_value_heads), COL),
               "self_attention.dense.weight": (at("self_attn.o_proj"), ROW), "post_attention_layernorm.weight": (at("post_attention_layernorm"), ALL),
               "mlp.dense_h_to_4h.weight": (torch.cat([at("mlp.gate_proj"), at("mlp.up_proj")]), GLU), "mlp.dense_4h_to_h.weight": (at("mlp.down_proj"), ROW)}


def gpt2_layers(sd, cfg):
    """GPT-2's projections are transposed, and its attention has all queries, then all keys and values."""
    names = {"input_layernorm": "ln_1", "self_attention.dense": "attn.c_proj", "post_attention_layernorm": "ln_2", "mlp.dense_h_to_4h": "mlp.c_fc",
             "mlp.dense_4h_to_h": "mlp.c_proj"}
    rules = {"self_attention.dense.weight": ROW, "mlp.dense_h_to_4h.weight": COL, "mlp.dense_h_to_4h.bias": COL, "mlp.dense_4h_to_h.weight": ROW}
    for i in range(cfg.n_layer):
        layer = {}
        for end in ("weight", "bias"):
            at = lambda name: sd[f"transformer.h.{i}.{name}.{end}"]
            layer[f"self_attention.query_key_value.{end}"] = by_heads(*at("attn.c_attn").mT.chunk(3) if end == "weight" else at("attn.c_attn").chunk(3), cfg.n_head), COL
            for name, hf in names.items():
                layer[f"{name}.{end}"] = (at(hf).mT.contiguous() if end == "weight" and "." in hf else at(hf)), rules.get(f"{name}.{end}")
        yield layer


def padded(w, pad):
    return torch.cat([w, torch.full((pad, w.shape[1]), 7, dtype=w.dtype)]), COL


class Model:
    """embedding, layers, norm and head: {local name: (tensor, rule)}."""

    def __init__(self, sd, cfg, pad=0):
        self.cfg, self.pad = cfg, pad
        if cfg.model_type == "gpt2":
            self.embedding = {"word_embeddings.weight": padded(sd["transformer.wte.weight"], pad), "position_embeddings.weight": (sd["transformer.wpe.weight"], ALL)}
            self.layers, self.head = list(gpt2_layers(sd, cfg)), {}
            self.norm = {end: (sd[f"transformer.ln_f.{end}"], ALL) for end in ("weight", "bias")}
            self.words = dict(use_rotary_position_embeddings=False, add_position_embedding=True, normalization="layernorm", swiglu=False, add_bias_linear=True,
                              bias_gelu_fusion=True, ffn_hidden_size=cfg.n_inner, num_key_value_heads=cfg.n_head, layernorm_epsilon=cfg.layer_norm_epsilon)
            return
        self.words = dict(ffn_hidden_size=cfg.intermediate_size, num_key_value_heads=cfg.num_key_value_heads, layernorm_epsilon=cfg.rms_norm_eps,
                          rope_theta=int(cfg.rope_parameters["rope_theta"]))
        self.embedding = {"word_embeddings.weight": padded(sd["model.embed_tokens.weight"], pad)}
        self.layers = list(llama_layers(sd, cfg))
        self.norm = {"weight": (sd["model.norm.weight"], ALL)}
        self.head = {} if cfg.tie_word_embeddings else {"lm_head.weight": padded(sd["lm_head.weight"], pad)}

    def args(self, tp, pp, **others):
        """Those of megatron/arguments.py that say something about the model, and some of other kinds; others replace them."""
        c = self.cfg
        known = dict(num_layers=c.num_hidden_layers, encoder_num_layers=c.num_hidden_layers, hidden_size=c.hidden_size,
                     num_attention_heads=c.num_attention_heads, kv_channels=c.hidden_size // c.num_attention_heads,
                     max_position_embeddings=c.max_position_embeddings, seq_length=c.max_position_embeddings, use_rotary_position_embeddings=True,
                     rope_theta=10000, rotary_percent=1.0, add_position_embedding=False, normalization="rmsnorm",
                     apply_layernorm_1p=False, swiglu=True, squared_relu=False, openai_gelu=False, onnx_safe=None, add_bias_linear=False,
                     bias_gelu_fusion=False, untie_embeddings_and_output_weights=not c.tie_word_embeddings, padded_vocab_size=c.vocab_size + self.pad,
                     make_vocab_size_divisible_by=128, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, num_experts=[1], mlp_type="standard",
                     topk=1, params_dtype=torch.bfloat16, deepspeed=True, no_pipeline_parallel=pp == 0, init_method_std=0.02, attention_dropout=0.0,
                     hidden_dropout=0.0, tokenizer_type="HFTokenizer", rank=0, consumed_train_samples=64, lr=1e-5)
        return argparse.Namespace(**{k: v for k, v in (known | self.words | others).items() if v is not ...})

    def rules(self, tp, pp):
        """UniversalCheckpointInfo of gpt_model.py."""
        w, words = r"\d+.", self.words
        at, norm, tied = (w, r"\d+.", r"tied_modules.embed.") if pp else (r"language_model.encoder.layers." + w, r"language_model.encoder.final_layernorm.",
                                                                          r"language_model.embedding.")
        bias = words.get("add_bias_linear", False)
        out = {"vocabulary_parameter_patterns": [tied + r"word_embeddings.weight"],
               "parameter_with_2_sub_params_cat_dim_0": [at + r"mlp.dense_h_to_4h.weight"] * words.get("swiglu", True)}
        if self.head:
            out["vocabulary_parameter_patterns"] = [w + r"word_embeddings.weight", w + r"lm_head.weight"] if pp else [
                tied + r"word_embeddings.weight", r"language_model.output_layer.weight"]
        positions = [tied + r"position_embeddings.weight"] * words.get("add_position_embedding", False)
        if pp:
            out["pipeline_replicated_parameter_patterns"] = [] if self.head else out["vocabulary_parameter_patterns"] + positions
        if tp > 1:
            out["tp_replicated_parameter_patterns"] = [at + r"input_layernorm.weight", at + r"post_attention_layernorm.weight", norm + "weight"] + [
                norm + "bias"] * bias + positions + [at + name for name in ("self_attention.dense.bias", "mlp.dense_4h_to_h.bias", "input_layernorm.bias",
                                                                            "post_attention_layernorm.bias") if bias]
            out["parameter_with_row_parallelism_patterns"] = [at + r"mlp.dense_4h_to_h.weight", at + r"self_attention.dense.weight"]
        return out

    def root(self, tp, pp, **others):
        """What a model file has beside the module: megatron/checkpointing.py's client_state, and DeepSpeed's own."""
        info = {"universal_checkpoint_version": 0.2, "original_vocab_size": self.cfg.vocab_size, "padded_vocab_size": self.cfg.vocab_size + self.pad}
        info |= self.rules(tp, pp)
        return {"args": self.args(tp, max(pp, 1), **others), "checkpoint_version": 3.0, "iteration": 5, "tokens": 640, "universal_checkpoint_info": info,
                "module": None, "buffer_names": [], "global_steps": 5, "dp_world_size": 1, "mp_world_size": tp * max(pp, 1), "ds_config": {},
                "ds_version": "0.16.7"} | dict.fromkeys(NONE)


def part(piece, t, tp):
    return {name: cut(*v, tp)[t] for name, v in piece.items()}


def nest(d):
    """word_embeddings.weight -> {"word_embeddings": {"weight"}}"""
    out = {}
    for name, value in d.items():
        a, b = name.rsplit(".", 1)
        out.setdefault(a, {})[b] = value
    return out


def module(model, t, tp):
    """TransformerLanguageModel.state_dict_for_save_checkpoint, in GPTModel's."""
    encoder = {f"layers.{i}.{name}": v for i, layer in enumerate(model.layers) for name, v in part(layer, t, tp).items()}
    encoder |= {f"final_layernorm.{name}": v for name, v in part(model.norm, t, tp).items()}
    parts = {"embedding": nest(part(model.embedding, t, tp)), "encoder": encoder}
    if model.head:
        parts["output_layer"] = {"weight": part(model.head, t, tp)["lm_head.weight"]}
    return {"language_model": parts}


def start(at):
    tag = os.path.join(at, "global_step5")
    os.makedirs(tag)
    with open(os.path.join(at, "latest"), "w") as f:
        f.write("global_step5")
    return tag


def save_modules(model, at, tp=1, **others):
    """Without a pipeline: a file a tensor-parallel rank."""
    tag = start(at)
    for t in range(tp):
        torch.save(model.root(tp, 0, **others) | {"module": module(model, t, tp)}, os.path.join(tag, f"mp_rank_{t:02d}_model_states.pt"))


def save_ranks(model, at, tp=1, **others):
    """Without DeepSpeed's engine: as Megatron-LM did then."""
    for t in range(tp):
        folder = os.path.join(at, "iter_0000005", f"mp_rank_{t:02d}")
        os.makedirs(folder)
        root = model.root(tp, 0, **others)
        torch.save({k: root[k] for k in ("args", "checkpoint_version", "iteration")} | {"model": module(model, t, tp)}, os.path.join(folder, "model_optim_rng.pt"))
    with open(os.path.join(at, "latest_checkpointed_iteration.txt"), "w") as f:
        f.write("5")


def pipeline(model):
    """[(number, {local name: (tensor, rule)})] of GPTModelPipe: a function, the embedding, the layers, the norm, the head, a function.
    A tied head is a function, too."""
    end = 2 + len(model.layers)
    found = [(1, model.embedding)] + [(2 + i, layer) for i, layer in enumerate(model.layers)] + [(end, model.norm)]
    return found + ([(end + 1, model.head)] if model.head else [])


def save_layers(model, at, tp=1, pp=1, **others):
    """A pipeline: a file a layer and tensor-parallel rank, and model files without weights, of stage after stage."""
    tag = start(at)
    for number, layer in pipeline(model):
        for t in range(tp):
            torch.save(part(layer, t, tp), os.path.join(tag, f"layer_{number:02d}-model_{t:02d}-model_states.pt"))
    for i in range(tp * pp):
        torch.save(model.root(tp, pp, **others), os.path.join(tag, f"mp_rank_{i:02d}_model_states.pt"))
