#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What planning costs for the largest jobs: `ckpt plan` of a Llama of 405B parameters, as nanotron saved it with tp=8.

usage: tests/bench/plan_scale.py [--build build/release] [--dir SCRATCH] [--readers once] [--rates K=N,...] [--timeout 300] [LAYOUT...]

The run has 811 GB in 4,301 files, of which only the headers are written: the rest of each file is a hole. Printed for each layout:
seconds and peak memory of `ckpt plan`, what it says, and its estimate of `once` beside two floors. A floor is the time of the slowest of a
node's storage, its network link and its copies, if the job reads each byte once, what a node wants and has not read itself enters it once, and
each wanted byte is copied once (at the rate `copy`), or twice (out of the page cache or the socket, too, at `page_cache`).
A layout's number of ranks is the product of its parts.
"""

import argparse
import json
import math
import os
import resource
import shutil
import struct
import subprocess
import tempfile
import time

LAYERS, HIDDEN, HEADS, KV_HEADS, FFN, VOCAB, TP = 126, 16384, 128, 8, 53248, 128256, 8
LAYOUTS = ("tp=8", "tp=8,dp=8", "tp=8,dp=64", "tp=8,dp=128", "fsdp=1024", "tp=8,pp=16,dp=32", "tp=8,dp=512", "tp=8,pp=16,dp=128",
           "fsdp=16384", "tp=8,dp=2048")
CONFIG = {
    "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": HIDDEN, "initializer_range": 0.02,
    "intermediate_size": FFN, "is_llama_config": True, "max_position_embeddings": 8192, "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS, "num_key_value_heads": KV_HEADS, "pad_token_id": None, "pretraining_tp": 1, "rms_norm_eps": 1e-5,
    "rope_scaling": None, "rope_theta": 500000.0, "rope_interleaved": False, "tie_word_embeddings": False, "use_cache": True,
    "vocab_size": VOCAB,
}


def write(path, shape, metadata):
    """A safetensors file of one tensor in BF16, whose data is a hole; its size."""
    size = 2 * math.prod(shape)
    head = {"__metadata__": metadata, "data": {"dtype": "BF16", "shape": shape, "data_offsets": [0, size]}}
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        f.truncate(8 + len(text) + size)
    return size


def write_shards(folder, shape, dim, parts):
    """One file a tensor-parallel rank. parts: the lengths along `dim` of what is divided each for itself (q, k, v)."""
    size = 0
    for r in range(TP):
        local, pairs, at, base = list(shape), [], 0, 0
        local[dim] = sum(parts) // TP
        for n in parts:
            pair = [["None,None,None"] * len(shape), ["None,None,None"] * len(shape)]
            pair[0][dim] = f"{at},{at + n // TP},None"
            pair[1][dim] = f"{base + r * n // TP},{base + (r + 1) * n // TP},None"
            pairs.append("#".join("|".join(side) for side in pair))
            at, base = at + n // TP, base + n
        size += write(os.path.join(folder, f"model_weight_pp-rank-0-of-1_tp-rank-{r}-of-{TP}.safetensors"), local,
                      {"version": "1.4", "unsharded_shape": f"({', '.join(map(str, shape))})", "local_global_slices_pairs": ";".join(pairs)})
    return size


def generate(run):
    """The run; how many bytes and files its model has."""
    step = os.path.join(run, "10")
    model, q, kv, size = os.path.join(step, "model", "model"), HIDDEN, HIDDEN // HEADS * KV_HEADS, 0
    os.makedirs(step)
    for name, value in (("model_config.json", json.dumps(CONFIG)), ("config.yaml", "general:\n  step: 10\n"),
                        ("checkpoint_metadata.json", json.dumps({"version": "1.4", "tp": TP, "dp": 1, "metas": {"last_train_step": 10}}))):
        with open(os.path.join(step, name), "w") as f:
            f.write(value)
    size += write_shards(os.path.join(model, "token_position_embeddings", "pp_block", "token_embedding"), [VOCAB, HIDDEN], 0, [VOCAB])
    size += write_shards(os.path.join(model, "lm_head", "pp_block"), [VOCAB, HIDDEN], 0, [VOCAB])
    size += write(os.path.join(model, "final_layer_norm", "pp_block", "model_weight.safetensors"), [HIDDEN], {})
    for i in range(LAYERS):
        block = os.path.join(model, "decoder", str(i), "pp_block")
        size += write_shards(os.path.join(block, "attn", "qkv_proj"), [q + 2 * kv, HIDDEN], 0, [q, kv, kv])
        size += write_shards(os.path.join(block, "attn", "o_proj"), [HIDDEN, q], 1, [q])
        size += write_shards(os.path.join(block, "mlp", "gate_up_proj"), [2 * FFN, HIDDEN], 0, [FFN, FFN])
        size += write_shards(os.path.join(block, "mlp", "down_proj"), [HIDDEN, FFN], 1, [FFN])
        for norm in ("input_layernorm", "post_attention_layernorm"):
            size += write(os.path.join(block, norm, "model_weight.safetensors"), [HIDDEN], {})
    with open(os.path.join(run, "latest.txt"), "w") as f:
        f.write("10")
    return size, sum(len(files) for _, _, files in os.walk(os.path.join(step, "model")))


def floor(got, layout, copies):
    """Seconds that no way to load can do without, by the rates of a plan."""
    rates, nodes, unique = got["rates"], got["nodes"], got["unique_bytes"]
    sharded = math.prod(int(n) for kind, n in (part.split("=") for part in layout.split(",")) if kind != "dp")
    node, wanted = unique * min(1, got["ranks_per_node"] / sharded), got["needed_bytes"] / nodes
    return max(unique / nodes / rates["node_storage"], (node - unique / nodes) / rates["network"],
               wanted / rates["copy"] + (copies - 1) * wanted / rates["page_cache"])


def plan(ckpt, run, layout, readers, rates, timeout):
    """(seconds, MB, what it says or why it did not)."""
    ranks = math.prod(int(part.split("=")[1]) for part in layout.split(","))
    command = [ckpt, "plan", run, "--layout", layout, "--ranks", str(ranks), "--readers", readers, "--json", *(["--rates", rates] if rates else [])]
    begin = time.monotonic()
    limit = lambda: resource.setrlimit(resource.RLIMIT_CPU, (timeout, timeout))  # noqa: E731
    p = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=limit)
    said, told = p.stdout.read(), p.stderr.read()
    _, status, usage = os.wait4(p.pid, 0)
    if status:
        return time.monotonic() - begin, usage.ru_maxrss / 1024, told.strip() or f"more than {timeout} s"
    got = json.loads(said)
    return (time.monotonic() - begin, usage.ru_maxrss / 1024,
            f"{got['ranks']} ranks, {got['readers']}, {got['windows']} windows, pieces of {got['piece_bytes'] / 2**20:.2f} MiB, "
            f"once modelled {got['modelled_s']['once']:.1f} s, floors {floor(got, layout, 1):.1f} and {floor(got, layout, 2):.1f} s")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--build", default="build/release")
    p.add_argument("--dir", help="keep the run there")
    p.add_argument("--readers", default="once")
    p.add_argument("--rates", help="as for ckpt plan")
    p.add_argument("--timeout", type=int, default=300)
    p.add_argument("layouts", nargs="*", metavar="LAYOUT")
    a = p.parse_args()
    top = a.dir or tempfile.mkdtemp()
    run = os.path.join(top, "llama-405b")
    try:
        if not os.path.isdir(run):
            size, files = generate(run)
            print(f"{size / 1e9:.0f} GB in {files} files", flush=True)
        for layout in a.layouts or LAYOUTS:
            seconds, memory, said = plan(os.path.join(a.build, "fs", "ckpt"), run, layout, a.readers, a.rates, a.timeout)
            print(f"{layout:20} {seconds:7.2f} s {memory:7.0f} MB  {said}", flush=True)
    finally:
        if not a.dir:
            shutil.rmtree(top, True)


if __name__ == "__main__":
    main()
