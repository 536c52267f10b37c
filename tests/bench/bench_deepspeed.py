#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Exports of a ZeRO 3 checkpoint of 8 ranks (BF16 training, F32 masters, Adam's moments) that an installed DeepSpeed writes here, side by
side: ckpt export of the masters, DeepSpeed's own zero_to_fp32.py, and cp of the consolidated files: wall time and peak memory.

usage: tests/bench/bench_deepspeed.py --deepspeed FOLDER [--build build/release] [--dir SCRATCH] [--tmpfs /dev/shm] [--gib 2] [--rounds 3] [--json FILE]
FOLDER has deepspeed (pip install --no-deps --target). --gib is the size of the checkpoint. Run it with a Python that has torch.
"""

import json
import os
import shutil
import sys
import tempfile

import figures
from bench_dcp import arguments, measure, report

RANKS, HIDDEN, FFN, VOCAB, HEADS = 8, 1024, 2816, 32000, 16
INTEROP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "interop")
RUN = """
import sys; sys.path.insert(0, {interop!r})
from tensor_case import ranks
ranks.run({ranks}, "deepspeed_writer", "large", ranks.free_port(), {at!r}, {shapes!r}, folder={tmp!r}, timeout=1800)
"""


def shapes(layers):
    out = {"model.embed_tokens.weight": [VOCAB, HIDDEN]}
    for i in range(layers):
        at = f"model.layers.{i}."
        out |= {f"{at}self_attn.{x}_proj.weight": [HIDDEN, HIDDEN] for x in "qkvo"}
        out |= {f"{at}mlp.{x}_proj.weight": [FFN, HIDDEN] for x in ("gate", "up")}
        out |= {f"{at}mlp.down_proj.weight": [HIDDEN, FFN], f"{at}input_layernorm.weight": [HIDDEN], f"{at}post_attention_layernorm.weight": [HIDDEN]}
    return out | {"model.norm.weight": [HIDDEN], "lm_head.weight": [VOCAB, HIDDEN]}


def write_base(base, layers):
    os.mkdir(base)
    with open(os.path.join(base, "config.json"), "w") as f:
        json.dump(dict(model_type="llama", architectures=["LlamaForCausalLM"], hidden_size=HIDDEN, intermediate_size=FFN, vocab_size=VOCAB,
                       num_attention_heads=HEADS, num_key_value_heads=HEADS, num_hidden_layers=layers, dtype="bfloat16", tie_word_embeddings=False), f)


def write(tmp, at, layers):
    measure([sys.executable, "-c", RUN.format(interop=INTEROP, ranks=RANKS, at=at, shapes=shapes(layers), tmp=tmp)])


def size_of(folder):
    return sum(os.path.getsize(os.path.join(top, f)) for top, _, files in os.walk(folder) for f in files)


def main():
    p = arguments()
    p.add_argument("--deepspeed", required=True)
    figures.add_option(p)
    opt = p.parse_args()
    os.environ["PYTHONPATH"] = os.path.abspath(opt.deepspeed)
    os.environ["DS_ACCELERATOR"] = "cpu"
    ckpt = os.path.abspath(os.path.join(opt.build, "fs", "ckpt"))
    layers = max(1, round((opt.gib * 2**30 / 12 - 2 * VOCAB * HIDDEN) / (4 * HIDDEN * HIDDEN + 3 * HIDDEN * FFN)))
    with tempfile.TemporaryDirectory(dir=opt.dir) as tmp:
        at, dest = os.path.join(tmp, "run"), os.path.join(opt.tmpfs, "ckptfs-bench-out")
        write(tmp, at, layers)
        base = os.path.join(tmp, "base")
        write_base(base, layers)
        tag = os.path.join(at, "global_step0")
        whole, half = os.path.join(tmp, "whole"), os.path.join(tmp, "half")
        bf16 = [ckpt, "export", "-q", tag, "-o", f"base={base}"]
        f32 = bf16 + ["-o", "dtype=float32"]
        commands = {"cp": ["cp", "-r", whole, dest], "ckpt export": f32 + [dest], "cp (16-bit)": ["cp", "-r", half, dest], "ckpt export (16-bit)": bf16 + [dest],
                    "zero_to_fp32.py": [sys.executable, "-W", "ignore", os.path.join(at, "zero_to_fp32.py"), at, dest, "--safe_serialization"]}
        measure(f32 + [whole])
        measure(bf16 + [half])
        seconds, memory = {name: [] for name in commands}, {}
        for i in range(opt.rounds):
            for name in sorted(commands, reverse=i % 2 == 0):  # the first one changes
                shutil.rmtree(dest, ignore_errors=True)
                took, memory[name] = measure(commands[name])
                seconds[name].append(took)
        shutil.rmtree(dest, ignore_errors=True)
        title = f"ZeRO 3, {RANKS} ranks, {size_of(tag) / 2**30:.1f} GiB, to tmpfs"
        for what, names in (("F32", ["cp", "ckpt export", "zero_to_fp32.py"]), ("BF16", ["cp (16-bit)", "ckpt export (16-bit)"])):
            report(f"{title}: {what}", {n.removesuffix(" (16-bit)"): seconds[n] for n in names}, {n.removesuffix(" (16-bit)"): memory[n] for n in names})
        figures.write(opt.json, [figures.chart(title, "s", seconds, lambda n: n.startswith("ckpt")),
                                 figures.chart("Peak memory", "MiB", {n: [m] for n, m in memory.items()}, lambda n: n.startswith("ckpt"))])


if __name__ == "__main__":
    main()
