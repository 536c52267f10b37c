# SPDX-License-Identifier: Apache-2.0
"""Makes orbax.tar.xz: saves by orbax-checkpoint's own code of small random trees and of models under MaxText's names, with what orbax restores
and what MaxText's own tables and hooks make of them.

    python tests/golden/make_orbax.py FOLDER MAPPING

Needs orbax-checkpoint 0.12.8 with jax on a CPU, torch and transformers. MAPPING is checkpoint_conversion/utils/param_mapping.py of maxtext 0.2.5,
which is imported as a file: it needs jax and numpy only. FOLDER gets orbax/CASE, which is packed by

    XZ_OPT=-9 tar --sort=name --owner=0 --group=0 --mtime=@0 -cJf orbax.tar.xz -C FOLDER orbax

Shapes are those of MaxText's parameters: kernels are [in, out] with heads apart, and scanned layers are stacked along dimension 1."""

import importlib.util
import json
import os
import shutil
import sys
import tempfile
from types import SimpleNamespace

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file

LAYERS, HIDDEN, HEADS, KV, HEAD, FFN, VOCAB = 4, 32, 4, 2, 16, 48, 72
P = jax.sharding.PartitionSpec


# ---- Hugging Face's side: a config, and the shapes of the tensors on the hub ----

def config_of(family):
    common = dict(vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
                  num_key_value_heads=KV, head_dim=HEAD, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    llama3 = {"rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 32}
    t = transformers
    return {
        "llama": lambda: t.LlamaConfig(**common, rope_parameters=llama3, tie_word_embeddings=False),
        "mistral": lambda: t.MistralConfig(**common, tie_word_embeddings=False),
        "qwen2": lambda: t.Qwen2Config(**{k: v for k, v in common.items() if k != "head_dim"} | {"hidden_size": HEADS * HEAD}, tie_word_embeddings=True),
        "qwen3": lambda: t.Qwen3Config(**common, tie_word_embeddings=False),
        "qwen3_moe": lambda: t.Qwen3MoeConfig(**common, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True,
                                              tie_word_embeddings=False, decoder_sparse_step=1, mlp_only_layers=[]),
        "mixtral": lambda: t.MixtralConfig(**common | {"hidden_size": HEADS * HEAD}, num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False),
        "gemma2": lambda: t.Gemma2Config(**common, query_pre_attn_scalar=HEAD, sliding_window=16),
        "gemma3": lambda: t.Gemma3TextConfig(**common | {"num_hidden_layers": 8}, query_pre_attn_scalar=HEAD, sliding_window=16),
        "deepseek_v3": lambda: t.DeepseekV3Config(**{k: v for k, v in common.items() if k != "head_dim"} | {"num_key_value_heads": HEADS}, tie_word_embeddings=False,
                                                  n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=24, n_group=1, topk_group=1,
                                                  first_k_dense_replace=1, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16),
    }[family]()


def shapes_of(config):
    with tempfile.TemporaryDirectory() as tmp:
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp)
        with safe_open(os.path.join(tmp, "model.safetensors"), "pt") as f:
            return {name: tuple(f.get_slice(name).get_shape()) for name in f.keys()}


# ---- MaxText's side ----

def unscanned_shape(key, hf, config):
    """The shape of a parameter whose Hugging Face tensor has the shape hf, of one layer and one expert."""
    heads, kv, head = config.num_attention_heads, getattr(config, "num_key_value_heads", None), getattr(config, "head_dim", None)
    head = head or config.hidden_size // heads
    part = key.split("-")
    if key.endswith("embedding"):
        return hf
    if len(hf) == 1:
        return (heads if "query" in part else kv, head) if part[-1] == "bias" and "self_attention" in key else hf
    n_in, n_out = hf[1], hf[0]
    attention = part[-2].split("_")[0] if "self_attention" in key else ""
    if attention in ("query", "key", "value"):
        n = heads if attention == "query" else kv
        return (n_in, n, n_out // n)
    if part[-2] in ("wq_b", "wkv_b"):
        return (n_in, heads, n_out // heads)
    if part[-2] == "out":
        return (heads, n_in // heads, n_out)
    return (n_in, n_out)


def mapped(mapping, family, config, shapes, scan, rng, dtype):
    """The parameters that MaxText has, and the tensors that its hooks make of them."""
    names = {"llama": "llama3.1-8b", "mistral": "llama3.1-8b", "qwen2": "qwen2.5-7b", "qwen3": "qwen3-8b", "qwen3_moe": "qwen3-30b-a3b",
             "mixtral": "mixtral-8x7b", "gemma2": "gemma2-2b", "gemma3": "gemma3-4b", "deepseek_v3": "deepseek3-671b"}
    c = config.to_dict()
    rename = lambda name: name
    if family == "gemma3":  # MaxText has Gemma 3 with the names of the model that sees; its encoder is left out
        c = {"text_config": c, "vision_config": {"num_hidden_layers": 0}}
        rename = lambda name: name.replace("model.language_model.", "model.")
    run = SimpleNamespace(num_experts=c.get("num_local_experts", 0) or 0, head_dim=HEAD, param_scan_axis=1)
    paths = mapping.PARAM_MAPPING[names[family]](c, run, scan)
    hooks = mapping.HOOK_FNS[names[family]](c, run, scan, saving_to_hf=True)
    tree, expected = {}, {}

    def emit(key, weight, targets, axis_of):
        if isinstance(targets, list):
            axis = axis_of(weight)
            for i, t in enumerate(targets):
                emit(key, jax.lax.index_in_dim(weight, i, axis=axis, keepdims=False), t, lambda w: 0)
            return
        target, weight = rename(targets), np.asarray(weight)  # numpy rounds a quotient once, XLA on a CPU does not
        for hook in (lambda h: h if isinstance(h, list) else [h] if h else [])(hooks.get(key)):
            weight = hook(weight, shapes[target])
        expected[target] = np.asarray(weight).astype(dtype).reshape(shapes[target])

    for key, targets in paths.items():
        first, sizes = targets, []
        while isinstance(first, list):
            sizes.append(len(first))
            first = first[0] if first else None
        if not first or rename(first) not in shapes:
            continue
        shape = unscanned_shape(key, shapes[rename(first)], config)
        experts = len(sizes) == 2 or (sizes and not scan)
        if experts:
            shape = (sizes[0], *shape)
        if scan and sizes:
            shape = (shape[0], sizes[-1], *shape[1:])
        if key.endswith("embedding") and family in ("qwen2", "gemma2"):
            shape = (shape[0] + 8, shape[1])  # padded
        values = few(rng, shape) + (1 if "norm" in key else 0)
        weight = jnp.asarray(values.astype(ml_dtypes.bfloat16).astype(np.float32)).astype(dtype)
        emit(key, weight, targets, lambda w: 0 if experts else 1)
        at = tree
        *folders, leaf = key.split("-")[1:]
        for f in folders:
            at = at.setdefault(f, {})
        at[leaf] = weight
    assert set(expected) == set(shapes), set(expected) ^ set(shapes)
    return tree, expected


def halves(mapping, config, shapes, scan, rng, dtype):
    """Mistral, as MaxText's script llama_mistral_mixtral_orbax_to_hf.py makes it: no order of rows changes, queries are multiplied."""
    tree, expected = mapped(mapping, "mistral", config, shapes, scan, rng, dtype)
    for layer in range(LAYERS):
        a = tree["decoder"]["layers"]["self_attention"] if scan else tree["decoder"]["layers_%d" % layer]["self_attention"]
        for which, name in (("query", "q"), ("key", "k")):
            w = np.asarray(a[which]["kernel"])
            w = w[:, layer] if scan else w
            w = w.astype(np.float32) * (np.float32(np.sqrt(HEAD)) if name == "q" else np.float32(1))
            expected["model.layers.%d.self_attn.%s_proj.weight" % (layer, name)] = w.astype(dtype).reshape(w.shape[0], -1).T
    return tree, expected


def few(rng, shape):
    """Random values of which there are few, so that the archive is small."""
    return rng.integers(-3, 4, size=shape) / 8.0


# ---- saving ----

def sharded(tree, devices):
    """Each array over the devices along the first dimensions that divide."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]).reshape(-1, 1 if devices < 4 else 2), ("x", "y"))

    def put(a):
        spec, free = [None] * a.ndim, ["y", "x"]
        for d, size in enumerate(a.shape):
            if free and size % mesh.shape[free[-1]] == 0:
                spec[d] = free.pop()
        return jax.device_put(a, jax.sharding.NamedSharding(mesh, P(*spec)))

    return jax.tree.map(put, tree)


def save(folder, tree, ocdbt=True, zarr3=True, chunk=None, item="items"):
    step = os.path.join(os.path.abspath(folder), "0")
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)
    checkpointer = ocp.Checkpointer(ocp.CompositeCheckpointHandler(**{item: handler}) if item else handler)
    args = ocp.args.PyTreeSave(tree, save_args=jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=chunk), tree))
    checkpointer.save(step, args=ocp.args.Composite(**{item: args}) if item else args)
    checkpointer.close()
    for top, _, files in os.walk(step):
        for f in files:
            path = os.path.join(top, f)
            os.chmod(path, 0o644)
            if f == "commit_success.txt":  # it has the path
                with open(path, "w") as out:
                    out.write("Checkpoint commit was successful")


def tensor(a):
    a = np.asarray(a)
    if a.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(a.view(np.int16).copy()).view(torch.bfloat16)
    if a.dtype in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
        return torch.from_numpy(a.view(np.int8).copy()).view(torch.float8_e4m3fn if a.dtype == ml_dtypes.float8_e4m3fn else torch.float8_e5m2)
    return torch.from_numpy(np.array(a))


def write_case(folder, expected, config=None, **case):
    os.makedirs(os.path.join(folder, "expected"))
    save_file({k: tensor(v).contiguous() for k, v in expected.items()}, os.path.join(folder, "expected", "model.safetensors"))
    if config:
        config.architectures = [type(transformers.AutoModelForCausalLM.from_config(config)).__name__]
        config.save_pretrained(os.path.join(folder, "base"))
    with open(os.path.join(folder, "case.json"), "w") as f:
        json.dump({"open": "run", "view": "hf", "base": "base" if config else None, "options": {}, "compare": "tensors"} | case, f, indent=1)


def flat(tree, prefix=""):
    if isinstance(tree, dict):
        items = tree.items()
    elif hasattr(tree, "_fields"):
        items = zip(tree._fields, tree)
    elif isinstance(tree, (list, tuple)):
        items = enumerate(tree)
    else:
        return {} if tree is None or isinstance(tree, str) else {prefix[:-1]: np.asarray(tree)}
    return {k: v for name, value in items for k, v in flat(value, "%s%s." % (prefix, name)).items()}


def tree_case(folder, rng, **how):
    """Any tree: the oracle is what was saved, which orbax's restore has, too."""
    tree = {"a": {"w": rng.normal(size=(8, 6)).astype(np.float32), "h": rng.normal(size=(4, 8)).astype(ml_dtypes.bfloat16)},
            "list": [np.arange(5, dtype=np.int32), {"u": np.arange(7, dtype=np.uint8)}], "zeros": np.zeros((4, 4), np.float32),
            "scalar": np.float32(2.5), "flags": np.array([True, False, True]), "long": np.arange(3), "f8": rng.normal(size=(4, 4)).astype(ml_dtypes.float8_e4m3fn),
            "slash/in": np.arange(2, dtype=np.float32)}
    tree = {k: sharded(v, 4) if k in ("a", "zeros", "f8") else v for k, v in tree.items()}
    tree |= {"text": "hello", "none": None, "empty": {}, "opt": optax.adam(1e-3).init({"p": jnp.ones((2, 3))})}
    save(os.path.join(folder, "run"), tree, **how)
    write_case(folder, flat(tree), view="raw")


def main():
    out, mapping_file = sys.argv[1:]
    spec = importlib.util.spec_from_file_location("param_mapping", mapping_file)
    mapping = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mapping)
    top = os.path.join(out, "orbax")
    shutil.rmtree(top, ignore_errors=True)
    rng = np.random.default_rng(5)
    tree_case(os.path.join(top, "tree_ocdbt_zarr3"), rng, chunk=48)
    tree_case(os.path.join(top, "tree_ocdbt_zarr2"), rng, zarr3=False, item="default")
    tree_case(os.path.join(top, "tree_files_zarr3"), rng, ocdbt=False, item=None)
    tree_case(os.path.join(top, "tree_files_zarr2"), rng, ocdbt=False, zarr3=False, chunk=32)
    bf16, f32 = ml_dtypes.bfloat16, np.float32
    cases = [("llama", True, bf16, 4, {}), ("llama", False, f32, 1, {"zarr3": False}), ("mistral", True, f32, 2, {}), ("mistral", False, bf16, 1, {}),
             ("qwen2", True, bf16, 2, {"ocdbt": False}), ("qwen2", False, f32, 1, {}), ("qwen3", True, f32, 4, {"chunk": 4096}), ("qwen3", False, bf16, 2, {}),
             ("qwen3_moe", True, bf16, 4, {}), ("qwen3_moe", False, bf16, 1, {}), ("mixtral", True, bf16, 2, {}), ("mixtral", False, bf16, 1, {"zarr3": False}),
             ("gemma2", True, f32, 2, {}), ("gemma2", False, bf16, 1, {}), ("gemma3", True, bf16, 1, {}), ("gemma3", False, f32, 1, {}),
             ("deepseek_v3", True, bf16, 4, {}), ("deepseek_v3", False, bf16, 1, {})]
    for family, scan, dtype, devices, how in cases:
        config = config_of(family)
        shapes = shapes_of(config)
        make = halves if family == "mistral" else lambda *args, family=family: mapped(mapping, family, *args)
        params, expected = make(*((mapping,) if family == "mistral" else ()), config, shapes, scan, rng, dtype)
        params = sharded(params, devices)
        folder = os.path.join(top, "%s_%s" % (family, "scan" if scan else "layers"))
        if family == "qwen3" and not scan:  # as NNX's classes have it
            def nnx(t):
                return {k: nnx(v) for k, v in t.items()} if isinstance(t, dict) else {"value": t}
            state = nnx(params)
        elif family == "llama" and scan:  # a whole training state
            opt = optax.adamw(1e-3).init({"params": params})
            opt = jax.tree.map(lambda a: jnp.asarray(few(rng, a.shape), a.dtype) if a.ndim else a, opt)
            state = {"params": {"params": params}, "opt_state": opt, "step": np.int32(7)}
        else:
            state = {"params": {"params": params}}
        save(os.path.join(folder, "run"), state, **how)
        write_case(folder, expected, config)


main()
