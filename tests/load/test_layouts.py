# SPDX-License-Identifier: Apache-2.0
"""Which parts of a tensor the ranks of a layout want, by family: model directories made here, loaded by ranks that are threads (every byte is compared)."""

import json
import math
import os
import random
import struct
import subprocess

from ranks import SLOW
from runner import run_in_folders

BUILD = os.environ.get("CKPTFS_BUILD", "build/release")
LOAD_RANKS = os.path.join(BUILD, "tests", "load_ranks")
SIZE = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "U8": 1}


def model(top, config, tensors):
    """A model directory: {name: (dtype, shape)}."""
    header, data = {}, b""
    for name, (dtype, shape) in tensors.items():
        n = math.prod(shape) * SIZE[dtype]
        body = random.Random(name).randbytes(n)
        if dtype == "F32":
            body = b"".join(struct.pack("<f", b) for b in body[:n // 4])
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + n]}
        data += body
    text = json.dumps(header).encode()
    os.makedirs(top)
    with open(os.path.join(top, "model.safetensors"), "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + data)
    with open(os.path.join(top, "config.json"), "w") as f:
        json.dump(config, f)
    return top


def wants(path, layout):
    """{(rank, tensor): [box as ((lo, n), ...)]}; the error's text if the layout is refused."""
    n = math.prod(int(part.split("=")[1]) for part in layout.split(","))
    done = subprocess.run([LOAD_RANKS, path, "--", f"{layout}:{n}:once"], capture_output=True, text=True, timeout=60 * SLOW,
                          env=dict(os.environ, LOAD_WANTS="1"))
    if done.returncode:
        return done.stdout + done.stderr
    found = {}
    for line in done.stdout.splitlines():
        if line.startswith("want "):
            _, rank, name, *box = line.split(" ")
            box = tuple(tuple(int(v) for v in d.split("+")) for d in box[0].split(",")) if box and box[0] else ()
            found.setdefault((int(rank), name), []).append(box)
    return found


def expect(path, layout, *cases):
    """(rank, tensor, box, ...): that rank wants these boxes of the tensor; none: nothing of it."""
    found = wants(path, layout)
    assert isinstance(found, dict), f"{layout}: {found}"
    for rank, name, *boxes in cases:
        have = [b for b in found.get((rank, name), []) if all(n for _, n in b)]
        assert have == list(boxes), f"{layout}: rank {rank} wants {have} of {name}, expected {boxes}"


def refuse(path, layout, words):
    found = wants(path, layout)
    assert isinstance(found, str) and words in found, f"{layout}: {found}"


def heads(top):
    """6 heads, 3 key heads: key heads go to several ranks, query heads are never cut."""
    at = "model.layers.{}.self_attn."
    tensors = {"model.embed_tokens.weight": ("BF16", [50, 12]), "lm_head.weight": ("BF16", [50, 12]), "model.norm.weight": ("BF16", [12])}
    for layer in range(3):
        for name, shape in (("q_proj", [24, 12]), ("k_proj", [12, 12]), ("v_proj", [12, 12]), ("o_proj", [12, 24])):
            tensors[at.format(layer) + name + ".weight"] = ("BF16", shape)
        tensors[f"model.layers.{layer}.mlp.gate_proj.weight"] = ("BF16", [10, 12])
    path = model(top, {"model_type": "llama", "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 4, "hidden_size": 12,
                       "intermediate_size": 10, "num_hidden_layers": 3, "vocab_size": 50}, tensors)
    q, k, o = (at.format(0) + n + ".weight" for n in ("q_proj", "k_proj", "o_proj"))
    expect(path, "tp=3", (2, q, ((16, 8), (0, 12))), (2, k, ((8, 4), (0, 12))), (1, o, ((0, 12), (8, 8))),
           (2, "lm_head.weight", ((34, 16), (0, 12))))  # torch.chunk's: 17, 17, 16
    expect(path, "tp=6", (4, q, ((16, 4), (0, 12))), (4, k, ((8, 4), (0, 12))), (5, k, ((8, 4), (0, 12))), (1, k, ((0, 4), (0, 12))))
    expect(path, "pp=2", (0, "model.embed_tokens.weight", ((0, 50), (0, 12))), (1, "model.embed_tokens.weight"), (0, "lm_head.weight"),
           (0, at.format(1) + "q_proj.weight", ((0, 24), (0, 12))), (1, at.format(1) + "q_proj.weight"),
           (1, at.format(2) + "q_proj.weight", ((0, 24), (0, 12))), (0, "model.norm.weight"), (1, "model.norm.weight", ((0, 12),)))
    expect(path, "pp=5", (2, at.format(2) + "q_proj.weight", ((0, 24), (0, 12))), (3, "model.norm.weight"), (4, "model.norm.weight", ((0, 12),)))
    refuse(path, "tp=12", "which is no multiple of it")
    refuse(path, "tp=4", "which is no multiple of it")


def fused(top):
    """Phi-3: each of the fused parts is divided."""
    path = model(top, {"model_type": "phi3", "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 16, "intermediate_size": 6,
                       "num_hidden_layers": 1, "vocab_size": 10},
                 {"model.layers.0.self_attn.qkv_proj.weight": ("BF16", [32, 16]), "model.layers.0.mlp.gate_up_proj.weight": ("BF16", [12, 16])})
    expect(path, "tp=2", (1, "model.layers.0.self_attn.qkv_proj.weight", ((8, 8), (0, 16)), ((20, 4), (0, 16)), ((28, 4), (0, 16))),
           (1, "model.layers.0.mlp.gate_up_proj.weight", ((3, 3), (0, 16)), ((9, 3), (0, 16))))
    expect(path, "tp=4", (1, "model.layers.0.self_attn.qkv_proj.weight", ((4, 4), (0, 16)), ((16, 4), (0, 16)), ((24, 4), (0, 16))))


def blocks_of_scales(top):
    """FP8: scales follow their weights where cuts fall between blocks, else every rank has all."""
    at = "model.layers.1."
    config = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "hidden_size": 16, "intermediate_size": 24,
              "num_hidden_layers": 2, "vocab_size": 10, "quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 4]}}
    tensors = {at + "self_attn.q_proj.weight": ("F8_E4M3", [16, 16]), at + "self_attn.q_proj.weight_scale_inv": ("F32", [4, 4]),
               at + "self_attn.k_proj.weight": ("F8_E4M3", [8, 16]), at + "self_attn.k_proj.weight_scale_inv": ("F32", [2, 4]),
               at + "mlp.down_proj.weight": ("F8_E4M3", [16, 24]), at + "mlp.down_proj.weight_scale_inv": ("F32", [4, 6]),
               at + "mlp.up_proj.weight": ("F8_E4M3", [24, 16]), at + "mlp.up_proj.weight_scale": ("F32", [24, 1])}
    path = model(top, config, tensors)
    expect(path, "tp=2", (1, at + "self_attn.q_proj.weight_scale_inv", ((2, 2), (0, 4))), (1, at + "self_attn.k_proj.weight_scale_inv", ((1, 1), (0, 4))),
           (1, at + "mlp.down_proj.weight_scale_inv", ((0, 4), (3, 3))), (1, at + "mlp.up_proj.weight_scale", ((12, 12), (0, 1))))
    expect(path, "tp=4", (3, at + "self_attn.q_proj.weight_scale_inv", ((3, 1), (0, 4))), (3, at + "self_attn.k_proj.weight_scale_inv", ((1, 1), (0, 4))),
           (3, at + "mlp.down_proj.weight_scale_inv", ((0, 4), (0, 6))))  # 6 columns of 24 are one and a half blocks
    expect(path, "pp=2", (0, at + "mlp.up_proj.weight_scale"), (1, at + "mlp.up_proj.weight_scale", ((0, 24), (0, 1))))


def mxfp4(top):
    """gpt-oss as on the hub: codes [expert, out, in / 32, 16]."""
    at = "model.layers.0.mlp.experts."
    path = model(top, {"model_type": "gpt_oss", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "hidden_size": 64,
                       "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 10, "num_local_experts": 4,
                       "quantization_config": {"quant_method": "mxfp4"}},
                 {at + "gate_up_proj_blocks": ("U8", [4, 128, 2, 16]), at + "gate_up_proj_scales": ("U8", [4, 128, 2]),
                  at + "down_proj_blocks": ("U8", [4, 64, 2, 16]), at + "down_proj_scales": ("U8", [4, 64, 2])})
    expect(path, "tp=2,ep=2", (3, at + "gate_up_proj_blocks", ((2, 2), (64, 64), (0, 2), (0, 16))), (3, at + "gate_up_proj_scales", ((2, 2), (64, 64), (0, 2))),
           (3, at + "down_proj_blocks", ((2, 2), (0, 64), (1, 1), (0, 16))), (3, at + "down_proj_scales", ((2, 2), (0, 64), (1, 1))))
    expect(path, "tp=4", (3, at + "down_proj_scales", ((0, 4), (0, 64), (0, 2))))  # half a block each
    expect(path, "ep=6", (3, at + "gate_up_proj_scales", ((3, 1), (0, 128), (0, 2))), (5, at + "gate_up_proj_scales"))


def unknown_family(top):
    """No file of its own: common names, wherever they stand; towers are not divided, and stand before the layers."""
    text = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "num_experts": 3}
    at = "language_model.model.layers.1."
    tensors = {"language_model.model.embed_tokens.weight": ("BF16", [10, 8]), at + "self_attn.q_proj.weight": ("BF16", [16, 8]),
               at + "self_attn.k_proj.weight": ("BF16", [8, 8]), at + "self_attn.o_proj.weight": ("BF16", [8, 16]),
               at + "mlp.experts.2.up_proj.weight": ("BF16", [6, 8]), at + "mlp.experts.gate_up_proj": ("BF16", [3, 12, 8]),
               at + "odd.weight": ("BF16", [6, 8]), "vision_tower.layers.1.self_attn.q_proj.weight": ("BF16", [16, 8]),
               "language_model.lm_head.weight": ("BF16", [10, 8]), "language_model.model.norm.weight": ("BF16", [8])}
    path = model(top, {"model_type": "seer", "text_config": text}, tensors)
    expect(path, "tp=4", (3, at + "self_attn.q_proj.weight", ((12, 4), (0, 8))), (3, at + "self_attn.k_proj.weight", ((4, 4), (0, 8))),
           (3, at + "self_attn.o_proj.weight", ((0, 8), (12, 4))), (3, "vision_tower.layers.1.self_attn.q_proj.weight", ((0, 16), (0, 8))),
           (3, at + "odd.weight", ((0, 6), (0, 8))))
    expect(path, "ep=3,tp=2", (5, at + "mlp.experts.2.up_proj.weight", ((3, 3), (0, 8))), (1, at + "mlp.experts.2.up_proj.weight"),
           (5, at + "mlp.experts.gate_up_proj", ((2, 1), (3, 3), (0, 8)), ((2, 1), (9, 3), (0, 8))))
    expect(path, "pp=2", (0, "vision_tower.layers.1.self_attn.q_proj.weight", ((0, 16), (0, 8))), (1, "vision_tower.layers.1.self_attn.q_proj.weight"),
           (0, at + "odd.weight"), (1, at + "odd.weight", ((0, 6), (0, 8))), (1, "language_model.lm_head.weight", ((0, 10), (0, 8))),
           (1, "language_model.model.embed_tokens.weight"))
    path = model(top + "2", {"model_type": "seer"}, {"alpha.weight": ("BF16", [4, 4])})
    refuse(path, "tp=2", "no model file says how model_type seer is divided")
    expect(path, "fsdp=3", (1, "alpha.weight", ((2, 2), (0, 4))), (2, "alpha.weight"))


def names_of_others(top):
    """GPT-NeoX's heads hold query, key and value together; GPT-2's transposed matrices have names that nothing knows, so its layers are only staged."""
    at = "gpt_neox.layers.1."
    path = model(top, {"model_type": "gpt_neox_like", "num_attention_heads": 4, "num_hidden_layers": 2},
                 {at + "attention.query_key_value.weight": ("BF16", [24, 8]), at + "attention.query_key_value.bias": ("BF16", [24]),
                  at + "mlp.dense_4h_to_h.weight": ("BF16", [8, 12]), "gpt_neox.embed_in.weight": ("BF16", [6, 8]), "embed_out.weight": ("BF16", [6, 8])})
    expect(path, "tp=2", (1, at + "attention.query_key_value.weight", ((12, 12), (0, 8))), (1, at + "attention.query_key_value.bias", ((12, 12),)),
           (1, at + "mlp.dense_4h_to_h.weight", ((0, 8), (6, 6))))
    path = model(top + "2", {"model_type": "gpt2", "n_head": 2, "n_layer": 2},
                 {"h.0.attn.c_attn.weight": ("BF16", [4, 12]), "h.1.attn.c_attn.weight": ("BF16", [4, 12]), "wte.weight": ("BF16", [6, 4]), "wpe.weight": ("BF16", [5, 4])})
    refuse(path, "tp=2", "no model file says how model_type gpt2 is divided")
    expect(path, "pp=2", (0, "h.0.attn.c_attn.weight", ((0, 4), (0, 12))), (1, "h.0.attn.c_attn.weight"), (1, "h.1.attn.c_attn.weight", ((0, 4), (0, 12))),
           (1, "wte.weight", ((0, 6), (0, 4))), (1, "wpe.weight"))


def state_groups(top):
    """Nemotron-H: Mamba's heads are divided, its groups of states go to several ranks."""
    at = "backbone.layers.0.mixer."
    path = model(top, {"model_type": "nemotron_h", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "hidden_size": 16, "vocab_size": 10,
                       "num_hidden_layers": 1, "mamba_num_heads": 4, "mamba_head_dim": 2, "ssm_state_size": 3, "n_groups": 2, "layers_block_type": ["mamba"]},
                 {at + "in_proj.weight": ("BF16", [8 + 8 + 6 + 6 + 4, 16]), at + "A_log": ("F32", [4]), at + "conv1d.weight": ("BF16", [20, 1, 4]),
                  at + "out_proj.weight": ("BF16", [16, 8])})
    expect(path, "tp=4", (3, at + "A_log", ((3, 1),)), (3, at + "out_proj.weight", ((0, 16), (6, 2))),
           (1, at + "in_proj.weight", ((2, 2), (0, 16)), ((10, 2), (0, 16)), ((16, 3), (0, 16)), ((22, 3), (0, 16)), ((29, 1), (0, 16))),
           (3, at + "conv1d.weight", ((6, 2), (0, 1), (0, 4)), ((11, 3), (0, 1), (0, 4)), ((17, 3), (0, 1), (0, 4))))


run_in_folders((heads, fused, blocks_of_scales, mxfp4, unknown_family, names_of_others, state_groups))
