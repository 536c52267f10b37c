# SPDX-License-Identifier: Apache-2.0
"""FSDP1's flat parameters (LOCAL_STATE_DICT), which torch writes on CPU: with base weights of the same shapes they are split into the
parameters that the model had. Every type whose file says "flat_parameters", wrapped by layer and whole, with and without
use_orig_params, tied and not, with odd sizes; in files of ranks (accelerate's) and in DCP."""

import functools
import json
import os
import shutil
import sys
import unittest
import warnings

try:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    import transformers as tf
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import MixedPrecision, StateDictType
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    import ranks
    from tensor_case import SEED, TensorCase, export, read_all
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

tf.utils.logging.disable_progress_bar()
ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
SIZES = dict(hidden_size=30, intermediate_size=44, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=3, head_dim=10, vocab_size=65,
             max_position_embeddings=64, pad_token_id=0)


def types():
    with open(os.path.join(ROOT, "core", "recipe", "data", "types", "dense.json")) as f:
        return json.load(f)["model_types"]


def make(kind, tied, dtype=torch.float32):
    model = tf.AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**SIZES, tie_word_embeddings=tied))
    with torch.no_grad():
        for p in model.parameters():
            p.normal_()
    return model.to(dtype)


def cases(world):
    """kind, tied, wrapped by layer, use_orig_params, compute dtype"""
    for i, kind in enumerate(types() if world == 2 else ["llama"]):
        for orig in (False, True):
            yield kind, bool(i & 1), True, orig, None
    for orig in (False, True):
        for tied in (False, True):
            yield "llama", tied, False, orig, None
    yield "llama", False, True, True, torch.bfloat16


def name(case):
    kind, tied, layers, orig, dtype = case
    return f"{kind}-{tied:d}{layers:d}{orig:d}{dtype is not None:d}"


def wrap(model, layers, orig, dtype):
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={type(model.model.layers[0])}) if layers else None
    return FSDP(model, auto_wrap_policy=policy, use_orig_params=orig, device_id=torch.device("cpu"),
                mixed_precision=MixedPrecision(param_dtype=dtype) if dtype else None)


def write(world, rank, top, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", rank=rank, world_size=world)
    for case in cases(world):
        kind, tied, layers, orig, dtype = case
        at = os.path.join(top, name(case))
        torch.manual_seed(SEED)
        model = make(kind, tied)
        if rank == 0:
            model.save_pretrained(at + ".want")
            make(kind, tied).save_pretrained(at + ".base")  # other values
            os.makedirs(at + ".ranks")
        dist.barrier()
        wrapped = wrap(model, layers, orig, dtype)
        with FSDP.state_dict_type(wrapped, StateDictType.LOCAL_STATE_DICT):
            state = wrapped.state_dict()
        torch.save(state, f"{at}.ranks/pytorch_model_fsdp_rank{rank}.bin")
        if not layers or kind == "llama":
            dcp.save({"model": state}, checkpoint_id=at + ".dcp")
    dist.destroy_process_group()


class Flat(TensorCase):
    def split(self, top, case, form):
        at = os.path.join(top, name(case))
        out = f"{at}.{form}.out"
        done = export(f"{at}.{form}", out, f"base={at}.base")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.same(read_all(out), read_all(at + ".want"), f"{name(case)} {form}")

    def test_all(self):
        for world in (2, 3):
            top = self.path(f"w{world}")
            os.makedirs(top)
            ranks.run(world, "test_flat", "write", top, ranks.free_port(), folder=self.path("."))
            for case in cases(world):
                with self.subTest(case=name(case), world=world):
                    self.split(top, case, "ranks")
                    if os.path.exists(os.path.join(top, name(case) + ".dcp")):
                        self.split(top, case, "dcp")
        self.refusals(os.path.join(top, name(next(cases(2)))))

    def refusals(self, at):
        def fails(text, *options):
            done = export(at + ".ranks", at + ".out", *options)
            self.assertEqual(done.returncode, 1)
            self.assertIn(text, done.stderr)

        fails("is an FSDP flat parameter (LOCAL_STATE_DICT)")
        shutil.copytree(at + ".base", at + ".config")
        os.remove(at + ".config/model.safetensors")
        fails("give base=DIR with the model's weights", f"base={at}.config")
        with open(at + ".base/config.json") as f:
            config = json.load(f)
        with open(at + ".base/config.json", "w") as f:
            json.dump(dict(config, model_type="gpt_bigcode"), f)
        fails("the order of a 'gpt_bigcode' model's parameters is not proven", f"base={at}.base")
        torch.manual_seed(0)
        tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES | {"intermediate_size": 48}, tie_word_embeddings=False)).save_pretrained(at + ".other")
        fails("is base another model's?", f"base={at}.other")
        fails("is an FSDP flat parameter (LOCAL_STATE_DICT)", "view=raw")


if __name__ == "__main__":
    unittest.main()
