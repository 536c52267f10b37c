# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models as Megatron-LM would have saved them: names, fusions and cuts by ranks, written independently of the recipes,
in each of Megatron's containers. torch_dist is written by the published megatron-core itself.

"""

import argparse
import collections
import json
import multiprocessing.dummy
import os
import pickle
import random
import types

import torch

COL, ROW, GLU, ALL = "col", "row", "glu", None  # how tensor ranks cut: rows, columns, rows of each half; not at all


def parts(t, rule, n):
    """What each of n tensor ranks holds."""
    if rule == COL:
        return list(t.chunk(n, 0))
    if rule == ROW:
        return list(t.chunk(n, 1))
    if rule == GLU:
        gate, up = t.chunk(2, 0)
        return [torch.cat(p) for p in zip(gate.chunk(n, 0), up.chunk(n, 0))]
    if callable(rule):
        return rule(t, n)
    return [t] * n


# ---- modules: {name: (tensor, rule)} ----

def qkv(sd, at, cfg, end):
    """By query groups: the group's queries, its key, its value."""
    q, k, v = (sd[f"{at}{x}_proj.{end}"] for x in "qkv")
    groups = cfg.num_key_value_heads
    split = [x.reshape(groups, -1, *x.shape[1:]) for x in (q, k, v)]
    return torch.cat(split, 1).reshape(-1, *q.shape[1:])


def attention(sd, at, cfg):
    at += "self_attn."
    out = {}
    if at + "qkv_proj.weight" in sd:
        w, d = sd[at + "qkv_proj.weight"], cfg.hidden_size // cfg.num_attention_heads
        q, k, v = w.split([cfg.num_attention_heads * d, cfg.num_key_value_heads * d, cfg.num_key_value_heads * d])
        sd = dict(sd) | {at + "q_proj.weight": q, at + "k_proj.weight": k, at + "v_proj.weight": v}
    for end in ("weight", "bias"):
        if f"{at}q_proj.{end}" in sd:
            out[f"self_attention.linear_qkv.{end}"] = qkv(sd, at, cfg, end), COL
    out["self_attention.linear_proj.weight"] = sd[at + "o_proj.weight"], ROW
    if at + "o_proj.bias" in sd:
        out["self_attention.linear_proj.bias"] = sd[at + "o_proj.bias"], ALL
    for x in "qk":
        if f"{at}{x}_norm.weight" in sd:
            out[f"self_attention.{x}_layernorm.weight"] = sd[f"{at}{x}_norm.weight"], ALL
    if at + "sinks" in sd:
        out["self_attention.core_attention.softmax_offset"] = sd[at + "sinks"], COL
    return out


def latent_attention(sd, at, cut_down):
    at += "self_attn."
    down = COL if cut_down else ALL
    names = {"q_proj": ("linear_q_proj", COL), "q_a_proj": ("linear_q_down_proj", down), "q_b_proj": ("linear_q_up_proj", COL),
             "kv_a_proj_with_mqa": ("linear_kv_down_proj", down), "kv_b_proj": ("linear_kv_up_proj", COL), "o_proj": ("linear_proj", ROW)}
    out = {f"self_attention.{m}.weight": (sd[f"{at}{h}.weight"], rule) for h, (m, rule) in names.items() if f"{at}{h}.weight" in sd}
    for x in ("q", "kv"):
        if f"{at}{x}_a_layernorm.weight" in sd:
            out[f"self_attention.linear_{x}_up_proj.layer_norm_weight"] = sd[f"{at}{x}_a_layernorm.weight"], ALL
    return out


def mlp(sd, at, to, up="up_proj", down="down_proj"):
    out = {}
    for end in ("weight", "bias"):
        if f"{at}gate_proj.{end}" in sd:
            out[f"{to}linear_fc1.{end}"] = torch.cat([sd[f"{at}gate_proj.{end}"], sd[f"{at}up_proj.{end}"]]), GLU
        elif f"{at}gate_up_proj.{end}" in sd:
            out[f"{to}linear_fc1.{end}"] = sd[f"{at}gate_up_proj.{end}"], GLU
        elif f"{at}{up}.{end}" in sd:
            out[f"{to}linear_fc1.{end}"] = sd[f"{at}{up}.{end}"], COL
        if f"{at}{down}.{end}" in sd:
            out[f"{to}linear_fc2.{end}"] = sd[f"{at}{down}.{end}"], ROW if end == "weight" else ALL
    return out


def experts(sd, at):
    """[{name behind the expert: (tensor, rule)}], one an expert."""
    if at + "mlp.experts.gate_up_proj" in sd:  # GPT-OSS: transposed, gate and up interleaved
        at += "mlp.experts."
        one = []
        for e in range(len(sd[at + "gate_up_proj"])):
            fc1, b1 = sd[at + "gate_up_proj"][e].T, sd[at + "gate_up_proj_bias"][e]
            one.append({"linear_fc1.weight": (torch.cat([fc1[0::2], fc1[1::2]]), GLU), "linear_fc1.bias": (torch.cat([b1[0::2], b1[1::2]]), GLU),
                        "linear_fc2.weight": (sd[at + "down_proj"][e].T.contiguous(), ROW), "linear_fc2.bias": (sd[at + "down_proj_bias"][e], ALL)})
        return one
    for place, names in (("mlp.experts.", None), ("mixer.experts.", None), ("block_sparse_moe.experts.", "w1 w3 w2")):
        found = []
        while f"{at}{place}{len(found)}.{'w2' if names else 'down_proj'}.weight" in sd:
            here = f"{at}{place}{len(found)}."
            if names:
                g, u, d = (sd[f"{here}{n}.weight"] for n in names.split())
                found.append({"linear_fc1.weight": (torch.cat([g, u]), GLU), "linear_fc2.weight": (d, ROW)})
            else:
                found.append(mlp(sd, here, ""))
        if found:
            return found
    return []


def moe(sd, at):
    out = {}
    for h, m in (("mlp.gate.weight", "mlp.router.weight"), ("block_sparse_moe.gate.weight", "mlp.router.weight"), ("mixer.gate.weight", "mlp.router.weight"),
                 ("mlp.router.weight", "mlp.router.weight"), ("mlp.router.bias", "mlp.router.bias"),
                 ("mlp.gate.e_score_correction_bias", "mlp.router.expert_bias"), ("mixer.gate.e_score_correction_bias", "mlp.router.expert_bias"),
                 ("mlp.shared_expert_gate.weight", "mlp.shared_experts.gate_weight")):
        if at + h in sd:
            out[m] = sd[at + h], ALL
    for place in ("mlp.shared_experts.", "mlp.shared_expert.", "mixer.shared_experts."):
        out |= mlp(sd, at + place, "mlp.shared_experts.")
    return out


def norms(sd, at, te, moe_layer, sandwich, mla):
    """TransformerEngine's spelling keeps a norm in the projection behind it, except before experts and latent attention; local modules
    save it under that projection's name too, even before experts."""
    out = {}
    for end in ("weight", "bias"):
        if f"{at}input_layernorm.{end}" in sd:
            fused = f"self_attention.linear_qkv.layer_norm_{end}" if te != "plain" and not mla else f"input_layernorm.{end}"
            out[fused] = sd[f"{at}input_layernorm.{end}"], ALL
        before = "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
        if f"{at}{before}.{end}" in sd:
            fused = (te == "te" and not moe_layer) or te == "local"
            out[f"mlp.linear_fc1.layer_norm_{end}" if fused else f"pre_mlp_layernorm.{end}"] = sd[f"{at}{before}.{end}"], ALL
    if sandwich:
        out["mlp.linear_fc2.post_layernorm.weight"] = sd[f"{at}post_feedforward_layernorm.weight"], ALL
        out["self_attention.linear_proj.post_layernorm.weight"] = sd[f"{at}post_attention_layernorm.weight"], ALL
    return out


def cut_parts(sizes):
    """A cut of several row blocks, each by ranks."""
    def rule(t, n):
        return [torch.cat(p) for p in zip(*(b.chunk(n, 0) for b in t.split(sizes)))]
    return rule


def mixer(sd, at, cfg, whole):
    """Mamba: torch_dist has the parts apart, ranks' files one block of each rank's parts."""
    at += "mixer."
    inner, state = cfg.mamba_num_heads * cfg.mamba_head_dim, cfg.n_groups * cfg.ssm_state_size
    sizes = {"in_proj.weight": {"z": inner, "x": inner, "B": state, "C": state, "dt": cfg.mamba_num_heads}}
    sizes["conv1d.weight"] = sizes["conv1d.bias"] = {"x": inner, "B": state, "C": state}
    out = {f"mixer.{x}": (sd[at + x], COL) for x in ("A_log", "D", "dt_bias", "norm.weight")}
    out["mixer.out_proj.weight"] = sd[at + "out_proj.weight"], ROW
    for name, split in sizes.items():
        if whole:
            out[f"mixer.{name}"] = sd[at + name], cut_parts(list(split.values()))
        else:
            out |= {f"mixer.{name}.{k}": (t, COL) for k, t in zip(split, sd[at + name].split(list(split.values())))}
    return out


# ---- a model ----

class Model:
    """Everything that stands in layers, and what does not; sd: the model's state dict as save_pretrained writes it."""

    def __init__(self, sd, cfg, plan):
        t, self.plan = cfg.model_type, plan
        self.hybrid = t == "nemotron_h"
        base, layers = ("backbone.", "backbone.layers.") if self.hybrid else ("model.", "model.layers.")
        self.n = len(cfg.layers_block_type) if self.hybrid else cfg.num_hidden_layers
        self.layers, self.experts = [], []
        for i in range(self.n):
            at = f"{layers}{i}."
            self.experts.append(experts(sd, at))
            self.layers.append(self.layer(sd, at, cfg, bool(self.experts[-1])))
        self.mtp, self.mtp_experts = {}, []
        if plan["mtp"]:  # the last layer predicts a token further on
            at, h = f"{layers}{self.n - 1}.", cfg.hidden_size
            inner, self.mtp_experts = self.layers.pop(), self.experts.pop()
            self.mtp = {f"transformer_layer.{k}": v for k, v in inner.items()}
            self.mtp |= {f"{x}.weight": (sd[f"{at}{x}.weight"], ALL) for x in ("enorm", "hnorm")}
            self.mtp |= {"eh_proj.weight": (sd[at + "eh_proj.weight"], COL), "final_layernorm.weight": (sd[at + "shared_head.norm.weight"], ALL)}
            self.n -= 1
        if plan["halves"]:  # of the hybrid model: attention and MLP are layers of their own
            mine = lambda layer, attention: {k: v for k, v in layer.items() if k.startswith(("self_attention.", "input_layernorm.")) == attention}
            self.layers = [mine(layer, attention) for layer in self.layers for attention in (True, False)]
            self.experts = [e for one in self.experts for e in ([], one)]
            self.n *= 2
        pad = plan["pad"]
        vocab = lambda w: (torch.cat([w, torch.randn(pad, w.shape[1]).to(w.dtype)]), COL)
        self.first = {"embedding.word_embeddings.weight": vocab(sd[base + ("embeddings.weight" if self.hybrid else "embed_tokens.weight")])}
        norm = base + ("norm_f" if self.hybrid else "norm")
        self.last = {f"decoder.{'final_norm' if self.hybrid or plan['halves'] else 'final_layernorm'}.{end}": (sd[f"{norm}.{end}"], ALL)
                     for end in ("weight", "bias") if f"{norm}.{end}" in sd}
        self.tied = "lm_head.weight" not in sd
        if not self.tied:
            self.last["output_layer.weight"] = vocab(sd["lm_head.weight"])

    def layer(self, sd, at, cfg, sparse):
        plan = self.plan
        if self.hybrid:
            norm = at + "norm.weight"
            if at + "mixer.A_log" in sd:
                return mixer(sd, at, cfg, plan["container"] == "ranks") | {"mixer.in_proj.layer_norm_weight": (sd[norm], ALL)}
            if at + "mixer.q_proj.weight" in sd:
                sd = {k.replace(".mixer.", ".self_attn."): v for k, v in sd.items()}
                return attention(sd, at, cfg) | {"self_attention.linear_qkv.layer_norm_weight": (sd[norm], ALL)}
            if sparse:
                return moe(sd, at) | {"pre_mlp_layernorm.weight": (sd[norm], ALL)}
            return mlp(sd, at + "mixer.", "mlp.") | {"mlp.linear_fc1.layer_norm_weight": (sd[norm], ALL)}
        mla = at + "self_attn.kv_b_proj.weight" in sd
        out = latent_attention(sd, at, plan["cut_down"]) if mla else attention(sd, at, cfg)
        out |= norms(sd, at, plan["spec"], sparse, at + "pre_feedforward_layernorm.weight" in sd, mla)
        if sparse:
            return out | moe(sd, at)
        return out | mlp(sd, at + "mlp.", "mlp.", *(("c_fc", "c_proj") if cfg.model_type == "starcoder2" else ()))


def chunks(model):
    """All of a torch_dist or zarr checkpoint: (key, leading (axis size, index) pairs, tensor, [(axis, index, of)]) a chunk."""
    plan, tp, etp = model.plan, model.plan["tp"], model.plan["etp"]
    stacked = plan["stacked"] and not model.hybrid and not plan["halves"] and len({frozenset(l) for l in model.layers}) == 1

    def cut(key, lead, t, rule, n):
        if rule == GLU and plan["singleton"]:
            gate, up = t.chunk(2, 0)
            yield from cut(key + "_w", lead, gate, COL, n)
            yield from cut(key + "_v", lead, up, COL, n)
        elif rule == GLU:
            for k, half in enumerate(t.chunk(2, 0)):
                for r, p in enumerate(half.chunk(n, 0)):
                    yield key, lead, p, (0, k * n + r, 2 * n)
        elif rule in (COL, ROW):
            axis = 0 if rule == COL else 1
            for r, p in enumerate(t.chunk(n, axis)):
                yield key, lead, p, (axis, r, n)
        else:
            yield key, lead, t, None

    for part in (model.first, model.last):
        for key, (t, rule) in part.items():
            yield from cut(key, [], t, rule, tp)
    for key, (t, rule) in model.mtp.items():
        yield from cut("mtp.layers.0." + key, [], t, rule, tp)
    for e, one in enumerate(model.mtp_experts):
        for key, (t, rule) in one.items():
            yield from cut(f"mtp.layers.0.transformer_layer.mlp.experts.experts.{key}", [(len(model.mtp_experts), e)], t, rule, etp)
    for i, layer in enumerate(model.layers):
        at, lead = ("decoder.layers.", [(model.n, i)]) if stacked else (f"decoder.layers.{i}.", [])
        for key, (t, rule) in layer.items():
            yield from cut(at + key, lead, t, rule, tp)
        for e, one in enumerate(model.experts[i]):
            for key, (t, rule) in one.items():
                if plan["singleton"]:
                    yield from cut(f"{at}mlp.experts.experts.{e}.{key}", lead, t, rule, etp)
                else:
                    yield from cut(f"{at}mlp.experts.experts.{key}", lead + [(len(model.experts[i]), e)], t, rule, etp)


# ---- containers ----

def without_forks():
    """megatron-core's writer forks beside gloo's threads, which can hang on a busy machine, and starts a process for its queue: it shall use threads."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    filesystem_async.mp = types.SimpleNamespace(get_context=lambda _: multiprocessing.dummy)


def write_dist(model, path, ns, rank, world):
    """This rank's share, by megatron-core."""
    from megatron.core import dist_checkpointing as dc
    without_forks()
    torch.cuda.synchronize = lambda *_: None  # it asks for a GPU although no tensor is there
    torch.cuda.current_device = lambda: "cpu"
    state = {"args": ns, "checkpoint_version": 3.0, "iteration": 10} if ns else {"iteration": 10}
    for i, (key, lead, t, cut) in enumerate(chunks(model)):
        if i % world != rank:
            continue
        offsets = [(a, at, n) for a, (n, at) in enumerate(lead)]
        if cut:
            offsets.append((cut[0] + len(lead), cut[1], cut[2]))
        state[f"part{i}"] = dc.ShardedTensor.from_rank_offsets(model.plan["prefix"] + key, t.clone(), *offsets, prepend_axis_num=len(lead), replica_id=0)
    if rank == 0:
        for i in range(model.n):
            state[f"extra{i}"] = dc.mapping.ShardedObject("decoder.layers.mlp.linear_fc1._extra_state", None, (model.n,), (i,))
        state["adam"] = dc.ShardedTensor.from_rank_offsets("optimizer.state.exp_avg.output_layer.weight", torch.ones(4, 4), replica_id=0)
    dc.save(state, path, ("torch_dist", 1))


def write_zarr(model, path, ns):
    """As Core 0.15 did: a directory an array, a raw file a chunk; bfloat16 by that name, or as two bytes."""
    r = random.Random(model.plan["seed"])
    numpy = {torch.float32: "<f4", torch.float16: "<f2"}
    arrays = collections.defaultdict(list)
    for key, lead, t, cut in chunks(model):
        arrays[model.plan["prefix"] + key].append((lead, t, cut))
    for key, list_ in arrays.items():
        lead, t, cut = list_[0]
        os.makedirs(os.path.join(path, key))
        shape = [n for n, _ in lead] + list(t.shape)
        if cut:
            shape[len(lead) + cut[0]] *= cut[2]
        head = {"chunks": [1] * len(lead) + list(t.shape), "compressor": None, "dtype": numpy.get(t.dtype) or r.choice(["bfloat16", "<V2", "|V2"]),
                "fill_value": None, "filters": None, "order": "C", "shape": shape, "zarr_format": 2}
        for lead, t, cut in list_:
            index = [i for _, i in lead] + [0] * t.dim()
            if cut:
                index[len(lead) + cut[0]] = cut[1]
            with open(os.path.join(path, key, ".".join(map(str, index))), "wb") as f:
                f.write(t.contiguous().view(torch.uint8).numpy().tobytes())
        with open(os.path.join(path, key, ".zarray"), "w") as f:
            json.dump(head, f, indent=4, sort_keys=True)
    torch.save(({"args": ns} if ns else {}) | {"checkpoint_version": 3.0, "iteration": 10}, os.path.join(path, "common.pt"))
    with open(os.path.join(path, "metadata.json"), "w") as f:
        json.dump({"sharded_backend": "zarr", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}, f)


def rank_state(model, tp, pp, ep, stage):
    """One rank's state dict of one virtual stage."""
    plan, out = model.plan, collections.OrderedDict()
    ntp, npp, nvp, nep, netp = (plan[k] for k in ("tp", "pp", "vpp", "ep", "etp"))

    def put(key, t, rule, n, r):
        out[plan["prefix"] + key] = parts(t, rule, n)[r].clone()

    def put_experts(at, mine):
        for j, one in enumerate(mine):
            for key, (t, rule) in one.items():
                put(f"{at}mlp.experts.local_experts.{j}.{key}" if plan["sequential"] else f"{at}mlp.experts.{key}{j}", t, rule, netp, tp % netp)

    lo = [0]
    for v in range(nvp):
        for p in range(npp):
            lo.append(lo[-1] + plan["layers"][v * npp + p])
    k = stage * npp + pp
    if k == 0:
        for key, (t, rule) in model.first.items():
            put(key, t, rule, ntp, tp)
    for local, i in enumerate(range(lo[k], lo[k + 1])):
        at = f"decoder.layers.{local}."
        for key, (t, rule) in model.layers[i].items():
            put(at + key, t, rule, ntp, tp)
        out[f"{plan['prefix']}{at}mlp.linear_fc1._extra_state"] = None
        count = len(model.experts[i]) // nep if model.experts[i] else 0
        mine = model.experts[i][ep * count:(ep + 1) * count]
        if mine and plan["grouped"]:
            fc1 = torch.stack([parts(*e["linear_fc1.weight"], netp)[tp % netp].T for e in mine])
            fc2 = torch.stack([parts(*e["linear_fc2.weight"], netp)[tp % netp].T for e in mine])
            out[f"{plan['prefix']}{at}mlp.experts.weight1"] = fc1.contiguous().view(fc1.shape[1], -1)
            out[f"{plan['prefix']}{at}mlp.experts.weight2"] = fc2.contiguous().view(-1, fc2.shape[2])
            continue
        put_experts(at, mine)
    if k == npp * nvp - 1:
        for key, (t, rule) in model.mtp.items():
            put("mtp.layers.0." + key, t, rule, ntp, tp)
        count = len(model.mtp_experts) // nep
        put_experts("mtp.layers.0.transformer_layer.", model.mtp_experts[ep * count:(ep + 1) * count])
        if model.mtp and k > 0:  # its inputs' embedding
            put("embedding.word_embeddings.weight", *model.first["embedding.word_embeddings.weight"], ntp, tp)
        for key, (t, rule) in model.last.items():
            put(key, t, rule, ntp, tp)
        if model.tied and npp > 1:
            put("output_layer.weight", *model.first["embedding.word_embeddings.weight"], ntp, tp)
    return out


def before_core(sd):
    """The names of the model class before Megatron-Core, nested as it nested them."""
    names = {"self_attention.linear_qkv.": "self_attention.query_key_value.", "self_attention.linear_proj.": "self_attention.dense.",
             "pre_mlp_layernorm.": "post_attention_layernorm.", "mlp.linear_fc1.": "mlp.dense_h_to_4h.", "mlp.linear_fc2.": "mlp.dense_4h_to_h."}
    out = collections.defaultdict(dict)
    for key, t in sd.items():
        for now, old in names.items():
            key = key.replace(now, old)
        top, rest = key.split(".", 1)
        if top == "embedding":
            out["embedding"]["word_embeddings"] = {"weight": t}
        else:
            out["encoder" if top == "decoder" else top][rest] = t
    return {"language_model": dict(out)}


def share_storage(sd):
    """All tensors of a dtype are views of one buffer, as the distributed optimizer leaves them."""
    for dtype in {t.dtype for t in sd.values() if t is not None}:
        mine = {k: t for k, t in sd.items() if t is not None and t.dtype == dtype}
        buffer = torch.cat([t.reshape(-1) for t in mine.values()])
        at = 0
        for k, t in mine.items():
            sd[k] = buffer[at:at + t.numel()].view(t.shape)
            at += t.numel()
    return sd


def write_ranks(model, path, ns):
    plan = model.plan
    ntp, npp, nep, netp = (plan[k] for k in ("tp", "pp", "ep", "etp"))
    ranks = {(t, e) for t in range(ntp) for e in range(nep)} if netp == ntp else {(r % ntp, r // netp) for r in range(netp * nep)}
    for pp in range(npp):
        for tp, ep in ranks:
            folder = os.path.join(path, f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if npp > 1 else "") + (f"_{ep:03d}" if nep > 1 else ""))
            os.makedirs(folder)
            state = {"args": ns, "checkpoint_version": 3.0, "iteration": 10, "rng_state": [{"np": b"x"}]}
            for v in range(plan["vpp"]):
                sd = rank_state(model, tp, pp, ep, v)
                sd = share_storage(sd) if plan["share"] else sd
                state[f"model{v}" if plan["vpp"] > 1 else "model"] = before_core(sd) if plan["old"] else sd
            torch.save(state, os.path.join(folder, "model_optim_rng.pt"))


def write_dcp(model, path, ns, split):
    """torch_dcp, or (split) fsdp_dtensor's names."""
    import torch.distributed.checkpoint as dcp
    sd = {}
    for part in [model.first, model.last] + [{f"decoder.layers.{i}.{k}": v for k, v in l.items()} for i, l in enumerate(model.layers)]:
        sd |= {k: t for k, (t, _) in part.items()}
    for i, list_ in enumerate(model.experts):
        for e, one in enumerate(list_):
            for key, (t, rule) in one.items():
                sd[f"decoder.layers.{i}.mlp.experts.{key}{e}"] = t
    if split:
        for key in [k for k in sd if ".linear_fc1.weight" in k]:
            sd[key + "_w"], sd[key + "_v"] = sd.pop(key).chunk(2, 0)
    prefix = "module." if split else ""
    dcp.save({"model": {prefix + k: t.clone() for k, t in sd.items()}, "args": ns, "iteration": 10, "checkpoint_version": 3.0,
              "optimizer": {"state": {"w": torch.ones(3)}}}, checkpoint_id=path, no_dist=True)


# ---- arguments ----

def arguments(cfg, plan, tied):
    """What Megatron-LM's arguments would be, as far as they tell the model."""
    get = lambda k, d=None: getattr(cfg, k, d)
    rope = get("rope_parameters") or {}
    t = cfg.model_type
    zero = plan["centred"] or t in ("gemma", "gemma2", "gemma3_text", "nemotron")
    ns = argparse.Namespace(
        num_layers=len(cfg.layers_block_type) if t == "nemotron_h" else cfg.num_hidden_layers * (2 if plan["halves"] else 1) - plan["mtp"], hidden_size=cfg.hidden_size, ffn_hidden_size=cfg.intermediate_size,
        num_attention_heads=cfg.num_attention_heads, group_query_attention=cfg.num_key_value_heads != cfg.num_attention_heads,
        num_query_groups=cfg.num_key_value_heads if cfg.num_key_value_heads != cfg.num_attention_heads else 1,
        kv_channels=get("head_dim") or cfg.hidden_size // cfg.num_attention_heads, max_position_embeddings=cfg.max_position_embeddings,
        layernorm_epsilon=get("rms_norm_eps") or get("norm_eps") or get("norm_epsilon") or get("layer_norm_epsilon"), rotary_base=int(rope.get("rope_theta", 10000)),
        rotary_percent=rope.get("partial_rotary_factor", 1.0), vocab_size=None, padded_vocab_size=cfg.vocab_size + plan["pad"],
        untie_embeddings_and_output_weights=not tied, add_qkv_bias=False, add_bias_linear=False, layernorm_zero_centered_gamma=zero,
        swiglu=t not in ("nemotron", "gemma", "gemma2", "gemma3_text", "gpt_oss", "starcoder2", "nemotron_h"), squared_relu=t in ("nemotron", "nemotron_h"),
        tensor_model_parallel_size=plan["tp"], pipeline_model_parallel_size=plan["pp"], expert_model_parallel_size=plan["ep"], expert_tensor_parallel_size=plan["etp"],
        num_experts=get("num_local_experts") or get("num_experts") or get("n_routed_experts"), moe_router_topk=get("num_experts_per_tok") or 2,
        moe_ffn_hidden_size=get("moe_intermediate_size") if t not in ("mixtral", "gpt_oss") else cfg.intermediate_size, multi_latent_attention="kv_lora_rank" in cfg.to_dict(),
        moe_router_pre_softmax=t in ("qwen2_moe", "deepseek_v2"), moe_router_score_function="sigmoid" if t in ("deepseek_v3", "glm4_moe", "nemotron_h") else "softmax",
        moe_router_topk_scaling_factor=get("routed_scaling_factor"), moe_router_num_groups=None, moe_router_group_topk=None,
        params_dtype=torch.bfloat16, bf16=True, position_embedding_type="rope", rotary_interleaved=False, window_size=None, use_rope_scaling=False, mtp_num_layers=plan["mtp"] or None,
        untouched=object)
    if t in ("deepseek_v2", "deepseek_v3"):
        ns.__dict__.update(q_lora_rank=cfg.q_lora_rank, kv_lora_rank=cfg.kv_lora_rank, qk_head_dim=cfg.qk_nope_head_dim, qk_pos_emb_head_dim=cfg.qk_rope_head_dim,
                           v_head_dim=cfg.v_head_dim, moe_shared_expert_intermediate_size=cfg.moe_intermediate_size * cfg.n_shared_experts)
    if rope.get("rope_type") == "llama3":
        ns.__dict__.update(use_rope_scaling=True, rope_scaling_factor=rope["factor"])
    if rope.get("rope_type") == "yarn":
        ns.__dict__.update(rope_type="yarn", rotary_scaling_factor=rope["factor"], moe_router_num_groups=cfg.n_group, moe_router_group_topk=cfg.topk_group)
        ns.__dict__.update({k: rope[k] for k in ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")})
    if t == "glm4_moe":
        ns.moe_shared_expert_intermediate_size = cfg.moe_intermediate_size * cfg.n_shared_experts
    if t == "qwen2_moe":
        ns.moe_shared_expert_intermediate_size = cfg.shared_expert_intermediate_size
    if t in ("gemma2", "gemma3_text"):
        ns.__dict__.update(query_pre_attn_scalar=cfg.query_pre_attn_scalar, window_size=(cfg.sliding_window, 0), attn_logit_softcapping=cfg.attn_logit_softcapping,
                           final_logit_softcapping=cfg.final_logit_softcapping)
    if t == "gemma3_text":
        ns.rotary_base = (10000, 1000000)
    if t == "gpt_oss":
        ns.__dict__.update(window_size=(cfg.sliding_window - 1, 0), window_attn_skip_freq=2, activation_func_clamp_value=7.0, softmax_type="learnable")
    if t == "nemotron_h":
        ns.__dict__.update(mamba_num_heads=cfg.mamba_num_heads, mamba_head_dim=cfg.mamba_head_dim, mamba_state_dim=cfg.ssm_state_size, mamba_num_groups=cfg.n_groups,
                           moe_shared_expert_intermediate_size=cfg.moe_shared_expert_intermediate_size)
    del ns.untouched
    return ns


def run_config(cfg, ns):
    """The model part of Megatron-Bridge's run_config.yaml."""
    t, act = cfg.model_type, "megatron.core.activations."
    say = {k: v for k, v in vars(ns).items() if isinstance(v, (int, float, str, bool, type(None)))}
    for gone in ("num_experts", "untie_embeddings_and_output_weights", "group_query_attention", "swiglu", "squared_relu", "max_position_embeddings", "padded_vocab_size"):
        say.pop(gone)
    provider = {"mistral": "MistralModelProvider", "phi3": "Phi3ModelProvider", "gemma": "GemmaModelProvider", "gemma2": "Gemma2ModelProvider"}.get(t, "GPTModelProvider")
    function = {"gemma": act + "fast_gelu", "gemma2": act + "fast_gelu", "gemma3_text": act + "fast_gelu", "nemotron": act + "squared_relu",
                "nemotron_h": act + "squared_relu", "gpt_oss": act + "quick_gelu", "starcoder2": "torch.nn.functional.gelu"}.get(t, "torch.nn.functional.silu")
    say.update(_target_=f"megatron.bridge.models.{provider}", activation_func={"_call_": False, "_target_": function}, gated_linear_unit=t not in ("nemotron", "nemotron_h", "starcoder2"),
               num_moe_experts=ns.num_experts, share_embeddings_and_output_weights=not ns.untie_embeddings_and_output_weights, seq_length=ns.max_position_embeddings,
               num_query_groups=ns.num_query_groups if ns.group_query_attention else None, vocab_size=cfg.vocab_size,
               params_dtype={"_call_": False, "_target_": "torch.bfloat16"}, attention_backend={"_args_": [5], "_call_": True, "_target_": "megatron.core.transformer.enums.AttnBackend"})
    for pair in ("window_size", "rotary_base"):
        if isinstance(getattr(ns, pair), tuple):
            say[pair] = list(getattr(ns, pair))
    return {"_target_": "megatron.bridge.training.config.ConfigContainer", "checkpoint": {"save": "run"}, "model": say, "tokenizer": {"vocab_size": None}}


def write(job, rank=0, world=1):
    with open(job["state"], "rb") as f:
        sd, cfg = pickle.load(f)
    model, plan, path = Model(sd, cfg, job["plan"]), job["plan"], job["dir"]
    ns = arguments(cfg, plan, model.tied)
    os.makedirs(path, exist_ok=True)
    if plan["bridge"] and rank == 0:
        import yaml
        with open(os.path.join(path, "run_config.yaml"), "w") as f:
            yaml.safe_dump(run_config(cfg, ns), f)
    ns = None if plan["bridge"] else ns
    if plan["container"] == "dist":
        write_dist(model, path, ns, rank, world)
    elif plan["container"] == "zarr":
        write_zarr(model, path, ns)
    elif plan["container"] == "ranks":
        write_ranks(model, path, ns)
    else:
        write_dcp(model, path, ns, plan["container"] == "fsdp")


def write_jobs(world, rank, path):
    """This rank's part of the torch_dist checkpoints of a JSON file of {"dir", "plan"}."""
    import torch.distributed as dist
    with open(path) as f:
        jobs = json.load(f)
    dist.init_process_group("gloo", init_method=f"file://{path}.store", rank=rank, world_size=world)
    for job in jobs:
        torch.manual_seed(job["plan"]["seed"])
        write(job, rank, world)
    dist.destroy_process_group()
