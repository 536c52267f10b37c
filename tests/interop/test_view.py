# SPDX-License-Identifier: Apache-2.0
"""Every file of a view is the one that save_pretrained of the installed transformers writes."""

import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import unittest

try:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers
    from huggingface_hub import split_state_dict_into_shards_factory
    from safetensors.torch import save as st_save
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()
DUMP = os.path.join(os.environ.get("CKPTFS_BUILD", "build/dev"), "tests", "vtree_dump")
ST_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}


def raw(t):
    if t.numel() == 0:
        return b""
    return t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def digests(root):
    found = {}
    for folder, _, names in os.walk(root):
        for name in names:
            path = os.path.join(folder, name)
            with open(path, "rb") as f:
                found[os.path.relpath(path, root)] = hashlib.sha256(f.read()).hexdigest()
    return found


def dump(tensors, spec, out):
    """tensors: [(name, tensor, block, cast or None)]"""
    listed = []
    with tempfile.TemporaryDirectory() as tmp:
        data, spec_path = os.path.join(tmp, "data"), os.path.join(tmp, "spec.json")
        with open(data, "wb") as f:
            for name, t, block, cast in tensors:
                entry = {"name": name, "dtype": ST_NAMES[t.dtype], "shape": list(t.shape)}
                entry["block"] = block
                if cast is not None:
                    entry["cast"] = ST_NAMES[cast]
                listed.append(entry)
                f.write(raw(t))
        with open(spec_path, "w") as f:
            json.dump({"tensors": listed, **spec}, f)
        subprocess.run([DUMP, spec_path, data, out], check=True)


def state_dict_of(model):
    """What save_pretrained hands to its splitter; and the tensors' storages as block numbers."""
    state = remove_tied_weights_from_state_dict(dict(model.state_dict()), model)
    state = revert_weight_conversion(model, state)
    owners = {}
    for name, t in state.items():
        owners.setdefault(t.untyped_storage().data_ptr(), []).append(name)
    shared = [names for names in owners.values() if len(names) > 1]
    block = {name: i + 1 for i, names in enumerate(shared) for name in names}
    return state, block


COMMON = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=12,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
)
MOE = dict(
    moe_intermediate_size=16,
    shared_expert_intermediate_size=24,
    num_experts=13,
    num_experts_per_tok=2,
)


def configs():
    t = transformers
    yield "llama", t.LlamaConfig(**COMMON)
    yield "llama_tied", t.LlamaConfig(**COMMON, tie_word_embeddings=True, pad_token_id=0)
    yield "mistral", t.MistralConfig(**COMMON)
    yield "smollm3", t.SmolLM3Config(**COMMON, pad_token_id=3)
    yield "qwen2", t.Qwen2Config(**COMMON)
    yield "starcoder2", t.Starcoder2Config(**COMMON)
    yield "mamba", t.MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=12, state_size=8)
    yield "qwen2_moe", t.Qwen2MoeConfig(**COMMON, **MOE)
    mixed = dict(mlp_only_layers=[0, 3], decoder_sparse_step=2)
    yield "qwen2_moe_mixed", t.Qwen2MoeConfig(**COMMON, **MOE, **mixed)
    one = {**MOE, "num_experts": 1, "num_experts_per_tok": 1}
    yield "qwen2_moe_one", t.Qwen2MoeConfig(**COMMON, **one)


class View(unittest.TestCase):
    maxDiff = None

    def compare(self, model, tensors, size, **spec):
        with tempfile.TemporaryDirectory() as want, tempfile.TemporaryDirectory() as got:
            kw = {} if size is None else {"max_shard_size": size}
            model.save_pretrained(want, **kw)
            with open(os.path.join(want, "config.json")) as f:
                config = json.load(f)
            dump(tensors, {"config": config, **kw, **spec}, got)
            self.assertEqual(digests(got), digests(want))
            return len(os.listdir(want))

    def test_models(self):
        rng = random.Random(20)
        for label, config in configs():
            with self.subTest(label), tempfile.TemporaryDirectory() as d:
                torch.manual_seed(7)
                dtype = rng.choice([torch.float32, torch.bfloat16])
                transformers.AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(d)
                model = transformers.AutoModelForCausalLM.from_pretrained(d, dtype=dtype)
                state, block = state_dict_of(model)
                tensors = [(k, v, block.get(k, 0), None) for k, v in state.items()]
                largest = max(v.numel() * v.element_size() for v in state.values())
                sizes = [None, 1, largest - 1, largest, 3 * largest, 10**6]
                sizes.append(rng.randrange(1000, 200000))
                for size in sizes:
                    with self.subTest(size=size):
                        chunk = rng.choice([4096, 65537, 1000, 1 << 20])
                        n = self.compare(model, tensors, size, chunk=chunk)
                        self.assertTrue(size is None or size > largest or n > 10)
                # The same files if the catalogue's order is another one and the view sorts.
                runs = {}
                for entry in tensors:
                    runs.setdefault(entry[2] or entry[0], []).append(entry)
                mixed = list(runs.values())
                rng.shuffle(mixed)
                self.compare(model, [e for run in mixed for e in run], sizes[-1], sort=True)

    def test_a_model_in_memory_keeps_its_own_order(self):
        model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**COMMON))
        state, block = state_dict_of(model)
        self.assertEqual(next(iter(state)), "model.embed_tokens.weight")
        self.compare(model, [(k, v, block.get(k, 0), None) for k, v in state.items()], 30000)

    def test_cast(self):
        with tempfile.TemporaryDirectory() as d:
            auto = transformers.AutoModelForCausalLM
            auto.from_config(transformers.LlamaConfig(**COMMON)).save_pretrained(d)
            model = auto.from_pretrained(d, dtype=torch.bfloat16)
            plain = auto.from_pretrained(d, dtype=torch.float32)
            state, _ = state_dict_of(plain)
            tensors = [(k, v, 0, torch.bfloat16) for k, v in state.items()]
            self.compare(model, tensors, 30000, chunk=4097)

    def test_one_file_of_all_types_and_odd_names(self):
        names = ['a"b', "a\\b", "a\nb", "a\x01b", "a\x1f", "\x7f", "é", "€", "😀", "\t\b\f\r"]
        names += ["/", "", "a", "B", "_"]
        tensors = {n: torch.arange(i, dtype=torch.float32) for i, n in enumerate(names)}
        rng = random.Random(5)
        for i in range(3):
            for dtype in ST_NAMES:
                shape = [rng.randrange(4) for _ in range(rng.randrange(4))]
                tensors[f"{rng.randrange(1000)}.{dtype}.{i}"] = torch.randint(0, 2, shape).to(dtype)
        for chosen in (tensors, {"x": torch.zeros(3)}, {"z": torch.zeros(0, 3)}):
            with tempfile.TemporaryDirectory() as got:
                dump([(k, v, 0, None) for k, v in chosen.items()], {"chunk": 61}, got)
                with open(os.path.join(got, "model.safetensors"), "rb") as f:
                    self.assertEqual(f.read(), st_save(chosen, metadata={"format": "pt"}))
                self.assertEqual(os.listdir(got), ["model.safetensors"])

    def test_weight_map(self):
        """A base's index decides; what it does not know goes to the last file."""
        with tempfile.TemporaryDirectory() as d:
            torch.manual_seed(3)
            auto = transformers.AutoModelForCausalLM
            auto.from_config(transformers.LlamaConfig(**COMMON)).save_pretrained(d)
            model = auto.from_pretrained(d)
            state, _ = state_dict_of(model)
            tensors = [(k, v, 0, None) for k, v in state.items()]
            with tempfile.TemporaryDirectory() as want, tempfile.TemporaryDirectory() as got:
                model.save_pretrained(want, max_shard_size=50000)
                with open(os.path.join(want, "model.safetensors.index.json")) as f:
                    weight_map = json.load(f)["weight_map"]
                weight_map["of.the.base.only"] = "model-99999-of-99999.safetensors"
                del weight_map["model.norm.weight"]
                dump(tensors[::-1], {"weight_map": weight_map}, got)
                os.remove(os.path.join(want, "config.json"))
                os.remove(os.path.join(want, "generation_config.json"))
                self.assertEqual(digests(got), digests(want))

    def test_random_splits(self):
        """The official splitter, with storages of several tensors."""
        rng = random.Random(99)
        for _ in range(80):
            tensors, storage = [], {}
            for block in range(1, rng.randrange(2, 12)):
                n, size = rng.choice([(1, 0), (1, 3), (1, 9), (1, 20), (3, 2), (2, 8), (4, 5)])
                for i in range(n):
                    name = f"{block:02d}.{i}"
                    storage[name] = (block, n * size)
                    tensors.append((name, torch.zeros(size, dtype=torch.uint8), block, None))
            limit = rng.choice([1, 5, 9, 12, 20, 40])
            want = split_state_dict_into_shards_factory(
                {name: name.encode() for name, *_ in tensors},
                get_storage_size=lambda t: storage[t.decode()][1],
                get_storage_id=lambda t: storage[t.decode()][0],
                filename_pattern="model{suffix}.safetensors",
                max_shard_size=limit,
            )
            with tempfile.TemporaryDirectory() as got:
                dump(tensors, {"max_shard_size": limit}, got)
                index = os.path.join(got, "model.safetensors.index.json")
                files = set(os.listdir(got)) - {"model.safetensors.index.json"}
                self.assertEqual(files, set(want.filename_to_tensors))
                if want.is_sharded:
                    with open(index) as f:
                        self.assertEqual(json.load(f)["weight_map"], want.tensor_to_filename)
                self.assertEqual(os.path.exists(index), want.is_sharded)

    def test_generation_config(self):
        t = transformers
        for config in (
            t.LlamaConfig(**COMMON, output_hidden_states=True),
            t.LlamaConfig(**COMMON, use_cache=False, pad_token_id=5),
            t.LlamaConfig(**{**COMMON, "eos_token_id": [2, 3]}),
            t.LlamaConfig(**{**COMMON, "bos_token_id": None}, decoder_start_token_id=4),
        ):
            model = t.AutoModelForCausalLM.from_config(config)
            state, _ = state_dict_of(model)
            self.compare(model, [(k, v, 0, None) for k, v in state.items()], None)


if __name__ == "__main__":
    unittest.main()
