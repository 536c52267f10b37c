# SPDX-License-Identifier: Apache-2.0
"""Writes nanotron checkpoints from Hugging Face tensors, at any TP x PP x EP.

Independent of the reader in core/: it goes the other way, from the notes on nanotron's format. A parameter is a whole tensor and how nanotron
shards it: `dim` None (replicated, a plain file) or a dimension, with the sizes of the chunks that are split one by one (q|k|v, gate|up).
"""
import json
import os
import random

import torch
from safetensors.torch import save_file


def interleave(w, heads):
    """Rows of q or k as rotary pairs (2j, 2j+1) want them, from Hugging Face's halves (j, j + d/2)."""
    d = w.shape[0] // heads
    halves = w.reshape(heads, 2, d // 2, *w.shape[1:])
    return halves.transpose(1, 2).reshape(w.shape).contiguous()


class Param:
    def __init__(self, name, data, dim=None, chunks=None, expert=False):
        self.name, self.data, self.dim, self.expert = name, data.contiguous(), dim, expert
        self.chunks = chunks or ([data.shape[dim]] if dim is not None else None)


def _bound(v):
    return "None" if v is None else str(v)


def _slices(rank, dim, lo, hi):
    one = [(None, None, None)] * rank
    one[dim] = (lo, hi, None)
    return "|".join(",".join(_bound(b) for b in s) for s in one)


def _shape_text(shape, dim, numpy2):
    parts = [f"np.int64({n})" if numpy2 and d == dim else str(n) for d, n in enumerate(shape)]
    return "(" + ", ".join(parts) + ("," if len(parts) == 1 else "") + ")"


def shard(p, rank, size, version, numpy2):
    """The local tensor of `rank`, and the metadata that says where it belongs."""
    pieces, pairs, at, local = [], [], 0, 0
    single = len(p.chunks) == 1
    for n in p.chunks:
        assert n % size == 0, (p.name, n, size)
        part = n // size
        lo = at + rank * part
        pieces.append(p.data.narrow(p.dim, lo, part))
        mine = _slices(p.data.dim(), p.dim, None, None) if single else _slices(p.data.dim(), p.dim, local, local + part)
        pairs.append(mine + "#" + _slices(p.data.dim(), p.dim, lo, lo + part))
        at, local = at + n, local + part
    meta = {"local_global_slices_pairs": ";".join(pairs),
            "unsharded_shape": _shape_text(p.data.shape, p.dim, numpy2 and not single)}
    if version is not None:
        meta["version"] = version
    return torch.cat(pieces, p.dim).contiguous(), meta


def stage_of(name, layers, pp):
    """Any assignment of blocks to stages will do: readers must take it from the file names."""
    if ".decoder." in name:
        return int(name.split(".decoder.")[1].split(".")[0]) * pp // max(layers, 1)
    return pp - 1 if name.startswith(("model.final_layer_norm", "model.lm_head")) else 0


def write_params(params, path, tp, pp, layers, ep=1, version="1.4", numpy2=False, broken=False, prefix=""):
    for p in params:
        parts = (prefix + p.name).split(".")
        folder = os.path.join(path, "model", *parts[:-1])
        os.makedirs(folder, exist_ok=True)
        leaf = parts[-1]
        if p.dim is None:
            save_file({"data": p.data}, os.path.join(folder, f"model_{leaf}.safetensors"), metadata={})
            continue
        ranks = ep if p.expert else tp
        for r in range(ranks):
            data, meta = shard(p, r, ranks, version, numpy2)
            at = f"pp-rank-{stage_of(p.name, layers, pp)}-of-{pp}_tp-rank-{0 if p.expert else r}-of-{tp}"
            if p.expert:
                at += f"_exp-rank-{r}-of-{ep}"
            # "broken": what nanotron wrote from 2024-03-06 to 2024-04-25 (versions 1.2 and 1.3), with the suffix twice
            stem = f"model_model_{leaf}.safetensors" if broken else f"model_{leaf}"
            name = f"{stem}_{at}.safetensors"
            save_file({"data": data}, os.path.join(folder, name), metadata=meta)


def write_run(path, step, params, model_config, tp, pp, layers, ep=1, version="1.4", config_yaml=None,
              model_config_json=True, latest=True, **kw):
    ckpt = os.path.join(path, str(step))
    write_params(params, ckpt, tp, pp, layers, ep=ep, version=version, **kw)
    if config_yaml is not None:
        with open(os.path.join(ckpt, "config.yaml"), "w") as f:
            f.write(config_yaml)
    with open(os.path.join(ckpt, "checkpoint_metadata.json"), "w") as f:
        json.dump({"dp": 1, "metas": {"consumed_train_samples": 1, "last_train_step": step}, "tp": tp,
                   "version": version or "1.1"}, f, indent=2, sort_keys=True)
    if latest:
        with open(os.path.join(path, "latest.txt"), "w") as f:
            f.write(str(step))
    if model_config_json:
        with open(os.path.join(ckpt, "model_config.json"), "w") as f:
            json.dump(model_config, f)
    return ckpt


# ---- families: Hugging Face tensors -> nanotron's ----

def _layer(sd, i, root="model.layers"):
    at = f"{root}.{i}."
    return {k[len(at):]: v for k, v in sd.items() if k.startswith(at)}


def _qkv(t, at, what, heads, kv_heads, interleaved):
    q, k, v = (t[f"self_attn.{x}_proj.{what}"] for x in "qkv")
    chunks = [q.shape[0], k.shape[0], v.shape[0]]
    if interleaved:
        q, k = interleave(q, heads), interleave(k, kv_heads)
    return Param(at + f"attn.qkv_proj.{what}", torch.cat([q, k, v]), 0, chunks)


def _gate_up(t, frm, name):
    gate, up = t[frm + "gate_proj.weight"], t[frm + "up_proj.weight"]
    return Param(name, torch.cat([gate, up]), 0, [gate.shape[0], up.shape[0]])


def llama_like(sd, cfg, interleaved=False, moe=None):
    """Llama, Qwen2, Mistral, SmolLM3 and Qwen2-MoE: one decoder on nanotron's side."""
    heads, kv = cfg.num_attention_heads, cfg.num_key_value_heads
    out = [Param("model.token_position_embeddings.pp_block.token_embedding.weight", sd["model.embed_tokens.weight"], 0),
           Param("model.final_layer_norm.pp_block.weight", sd["model.norm.weight"])]
    if not cfg.tie_word_embeddings:
        out.append(Param("model.lm_head.pp_block.weight", sd["lm_head.weight"], 0))
    for i in range(cfg.num_hidden_layers):
        t, at = _layer(sd, i), f"model.decoder.{i}.pp_block."
        out.append(Param(at + "input_layernorm.weight", t["input_layernorm.weight"]))
        out.append(Param(at + "post_attention_layernorm.weight", t["post_attention_layernorm.weight"]))
        out.append(_qkv(t, at, "weight", heads, kv, interleaved))
        if "self_attn.q_proj.bias" in t:
            out.append(_qkv(t, at, "bias", heads, kv, interleaved))
        out.append(Param(at + "attn.o_proj.weight", t["self_attn.o_proj.weight"], 1))
        if "mlp.gate_proj.weight" in t:
            out.append(_gate_up(t, "mlp.", at + "mlp.gate_up_proj.weight"))
            out.append(Param(at + "mlp.down_proj.weight", t["mlp.down_proj.weight"], 1))
        else:
            out += moe(t, cfg, at + "mlp.")
    return out


def _experts(t, cfg):
    e = range(cfg.num_experts)
    return ([t[f"mlp.experts.{i}.gate_proj.weight"] for i in e], [t[f"mlp.experts.{i}.up_proj.weight"] for i in e],
            [t[f"mlp.experts.{i}.down_proj.weight"] for i in e])


def _shared(t, at):
    return [Param(at + "router.weight", t["mlp.gate.weight"].float()),
            _gate_up(t, "mlp.shared_expert.", at + "shared_expert.gate_up_proj.weight"),
            Param(at + "shared_expert.down_proj.weight", t["mlp.shared_expert.down_proj.weight"], 1),
            Param(at + "shared_expert_gate.weight", t["mlp.shared_expert_gate.weight"])]


def moe_main(t, cfg, at):
    """Since 2025-06: all experts of a layer in one tensor, [in, out]."""
    gate, up, down = _experts(t, cfg)
    merged = torch.stack([torch.cat([g.T, u.T], 1) for g, u in zip(gate, up)])
    return _shared(t, at) + [Param(at + "experts.merged_gate_up_proj", merged),
                             Param(at + "experts.merged_down_proj", torch.stack([d.T for d in down]))]


def moe_branch(ep):
    """The open expert-parallel branch: local expert I of every EP rank in one sharded parameter weightI."""
    def make(t, cfg, at):
        gate, up, down = _experts(t, cfg)
        local, out = cfg.num_experts // ep, _shared(t, at)
        for i in range(local):
            ids = [r * local + i for r in range(ep)]
            out.append(Param(at + f"experts.linear_fc1.weight{i}", torch.cat([torch.cat([gate[g], up[g]]) for g in ids]), 0, expert=True))
            out.append(Param(at + f"experts.linear_fc2.weight{i}", torch.cat([down[g] for g in ids]), 0, expert=True))
        return out
    return make


def starcoder2(sd, cfg):
    heads, kv = cfg.num_attention_heads, cfg.num_key_value_heads
    d = cfg.hidden_size // heads
    out = [Param("model.token_embeddings.pp_block.token_embedding.weight", sd["model.embed_tokens.weight"], 0)]
    out += [Param(f"model.final_layer_norm.pp_block.{w}", sd[f"model.norm.{w}"]) for w in ("weight", "bias")]
    for i in range(cfg.num_hidden_layers):
        t, at = _layer(sd, i), f"model.decoder.{i}.pp_block."
        for w in ("weight", "bias"):
            out.append(Param(at + f"ln_1.{w}", t[f"input_layernorm.{w}"]))
            out.append(Param(at + f"ln_2.{w}", t[f"post_attention_layernorm.{w}"]))
            q, k, v = (t[f"self_attn.{x}_proj.{w}"] for x in "qkv")
            if kv == 1:
                out.append(Param(at + f"attn.qkv.q.{w}", q, 0))
                out.append(Param(at + f"attn.qkv.kv.{w}", torch.cat([k, v])))
            else:
                groups = []
                for g in range(kv):
                    r = heads // kv
                    groups += [q[g * r * d:(g + 1) * r * d], k[g * d:(g + 1) * d], v[g * d:(g + 1) * d]]
                out.append(Param(at + f"attn.query_key_value.{w}", torch.cat(groups), 0))
            out.append(Param(at + f"ff.c_fc.{w}", t[f"mlp.c_fc.{w}"], 0))
        o = "attn.o" if kv == 1 else "attn.dense"
        out += [Param(at + f"{o}.weight", t["self_attn.o_proj.weight"], 1), Param(at + f"{o}.bias", t["self_attn.o_proj.bias"]),
                Param(at + "ff.c_proj.weight", t["mlp.c_proj.weight"], 1), Param(at + "ff.c_proj.bias", t["mlp.c_proj.bias"])]
    return out


def mamba(sd, cfg):
    out = [Param("model.token_position_embeddings.pp_block.token_embedding.weight", sd["backbone.embeddings.weight"], 0),
           Param("model.final_layer_norm.pp_block.weight", sd["backbone.norm_f.weight"])]
    split = {"A_log": 0, "D": 0, "in_proj.weight": 0, "conv1d.weight": 0, "conv1d.bias": 0, "dt_proj.weight": 0, "dt_proj.bias": 0,
             "x_proj.weight": 1, "out_proj.weight": 1}
    for i in range(cfg.num_hidden_layers):
        t, at = _layer(sd, i, "backbone.layers"), f"model.decoder.{i}.pp_block."
        out.append(Param(at + "norm.weight", t["norm.weight"]))
        for name, dim in split.items():
            w = t["mixer." + name]
            if name == "in_proj.weight":  # even rows are the first half, odd rows the second
                w = torch.stack([w[:w.shape[0] // 2], w[w.shape[0] // 2:]], 1).reshape(w.shape)
            out.append(Param(at + "mixer." + name, w, dim))
    return out


def random_(model, seed):
    """Fill every parameter, norms too, so that no two tensors are alike."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * 0.05)


def pick(rng: random.Random, *choices):
    return rng.choice(choices)
