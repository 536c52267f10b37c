#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Exports of an Orbax checkpoint as MaxText saves it, side by side with orbax's own restore to numpy: wall time and peak memory.

usage: tests/bench/bench_orbax.py [--build build/release] [--dir SCRATCH] [--layers 8] [--rounds 3] [--option cache_dir=no]
Run it with a Python that has orbax-checkpoint and jax. The save is a scanned Llama of 32-bit floats, all layers in one array each, in an
OCDBT database of zarr 3. The goals: at most orbax's time, below 512 MiB.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

HIDDEN, FFN, VOCAB, HEADS, KV, HEAD = 1536, 4096, 32000, 24, 8, 64
SAVE = """
import sys, jax, numpy as np, orbax.checkpoint as ocp
hidden, ffn, vocab, heads, kv, head, layers = map(int, sys.argv[2:])
rng = np.random.default_rng(1)
made = lambda *shape: rng.standard_normal(shape, dtype=np.float32)
norms = lambda *shape: {"scale": made(*shape)}
attention = {n: {"kernel": made(hidden, layers, k, head)} for n, k in (("query", heads), ("key", kv), ("value", kv))}
attention["out"] = {"kernel": made(heads, layers, head, hidden)}
mlp = {"wi_0": {"kernel": made(hidden, layers, ffn)}, "wi_1": {"kernel": made(hidden, layers, ffn)}, "wo": {"kernel": made(ffn, layers, hidden)}}
scanned = {"self_attention": attention, "mlp": mlp, "pre_self_attention_layer_norm": norms(hidden, layers), "post_self_attention_layer_norm": norms(hidden, layers)}
tree = {"params": {"params": {"token_embedder": {"embedding": made(vocab, hidden)}, "decoder": {
    "layers": scanned, "decoder_norm": norms(hidden), "logits_dense": {"kernel": made(hidden, vocab)}}}}}
c = ocp.Checkpointer(ocp.CompositeCheckpointHandler(items=ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)))
c.save(sys.argv[1], args=ocp.args.Composite(items=ocp.args.PyTreeSave(jax.tree.map(jax.numpy.asarray, tree))))
"""
RESTORE = """
import sys, jax, numpy as np, orbax.checkpoint as ocp
h = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)
c = ocp.Checkpointer(h)
meta = c.metadata(sys.argv[1] + "/items").item_metadata
args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), meta.tree if hasattr(meta, "tree") else meta)
got = c.restore(sys.argv[1] + "/items", args=ocp.args.PyTreeRestore(restore_args=args))
assert all(isinstance(a, np.ndarray) for a in jax.tree.leaves(got))
"""


def save(top, layers):
    shape = [HIDDEN, FFN, VOCAB, HEADS, KV, HEAD, layers]
    subprocess.run([sys.executable, "-c", SAVE, os.path.join(top, "run", "0"), *map(str, shape)], check=True)
    os.makedirs(os.path.join(top, "base"))
    with open(os.path.join(top, "base", "config.json"), "w") as f:
        json.dump({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": FFN, "vocab_size": VOCAB,
                   "num_hidden_layers": layers, "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": HEAD, "rms_norm_eps": 1e-5,
                   "max_position_embeddings": 2048, "hidden_act": "silu", "tie_word_embeddings": False, "dtype": "float32",
                   "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}, f)


def timed(command):
    """Seconds, seconds of processors, and the most memory in MiB, of a process."""
    begin = time.monotonic()
    p = subprocess.Popen(command)
    _, status, usage = os.wait4(p.pid, 0)
    p.returncode = os.waitstatus_to_exitcode(status)
    if p.returncode:
        sys.exit(f"{command[0]} failed")
    return time.monotonic() - begin, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--build", default="build/release")
    p.add_argument("--dir", help="keep the save there")
    p.add_argument("--layers", type=int, default=8)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--option", action="append", default=[], help="of ckpt export")
    p.add_argument("--no-peer", action="store_true", help="without orbax's restore")
    a = p.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    top = os.path.abspath(a.dir or tempfile.mkdtemp())
    out, ckpt = os.path.join(top, "out"), os.path.join(a.build, "fs", "ckpt")
    try:
        if not os.path.exists(os.path.join(top, "base")):
            save(top, a.layers)
        tools = {"ckpt export": lambda: [ckpt, "export", os.path.join(top, "run"), out, "-q", f"--base={top}/base", *(f"--option={o}" for o in a.option)]}
        if not a.no_peer:
            tools["orbax restore"] = lambda: [sys.executable, "-c", RESTORE, os.path.join(top, "run", "0")]
        results = {name: [] for name in tools}
        for _ in range(a.rounds):
            for name, command in tools.items():
                shutil.rmtree(out, True)
                os.sync()
                results[name].append(timed(command()))
        for name, got in results.items():
            s, cpu = (min(g[i] for g in got) for i in (0, 1))
            print(f"{name:14} {s:7.2f} s ({cpu:.2f} s of processors), at most {max(g[2] for g in got):5.0f} MiB   (all: {', '.join(f'{g[0]:.2f}' for g in got)})")
    finally:
        shutil.rmtree(out, True)
        if not a.dir:
            shutil.rmtree(top, True)


if __name__ == "__main__":
    main()
