# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed and transformers 4 make of a pipeline checkpoint of Megatron-DeepSpeed's GPT-2, as Megatron-DeepSpeed's own
tools/convert_checkpoint/deepspeed_to_transformers.py uses them: DeepSpeedCheckpoint joins the tensor-parallel ranks' layers, and
transformers converts the result. Run by test_deepspeed_joined.py with both in PYTHONPATH.
With "universal" DeepSpeed's ds_to_universal converts a tag of ZeRO 1.

usage: megatron_deepspeed_oracle.py TAG OUT.safetensors
       megatron_deepspeed_oracle.py universal TAG OUT
"""

import argparse
import glob
import os
import shutil
import sys
import tempfile

os.environ["DS_ACCELERATOR"] = "cpu"
import torch
from safetensors.torch import save_file


def joined(tag):
    """The state dict of legacy Megatron, without parallelism."""
    from deepspeed.checkpoint.deepspeed_checkpoint import DeepSpeedCheckpoint
    c = DeepSpeedCheckpoint(tag, tp_degree=1, pp_degree=1)
    embedding = {name.split(".")[0]: {"weight": t} for name, t in c.get_embedding_state(0).items()}
    encoder = {f"layers.{i}.{name}": t for i, layer in enumerate(c.get_transformer_state(0, 0)) for name, t in layer.items()}
    encoder |= {f"final_layernorm.{name}": t for name, t in c.get_final_norm_state(0).items()}
    args = c.get_args()
    args.tensor_model_parallel_size = args.pipeline_model_parallel_size = 1
    return {"model": {"language_model": {"embedding": embedding, "encoder": encoder}}, "args": args, "checkpoint_version": 3.0}


def converted(folder):
    """What transformers' converter would save; its last lines, which need a tokenizer from the hub, are left out."""
    from transformers.models.megatron_gpt2 import checkpoint_reshaping_and_interoperability as tool
    found = {}

    def take(state_dict, max_shard_size):
        found.update(state_dict)
        raise StopIteration
    tool.split_torch_state_dict_into_shards = take
    tool.AutoTokenizer = type("AutoTokenizer", (), {"from_pretrained": staticmethod(lambda name: None)})
    try:
        tool.convert_checkpoint_from_megatron_to_transformers(argparse.Namespace(load_path=folder, save_path=folder, tokenizer_name=None, max_shard_size="1GB",
                                                                                 print_checkpoint_structure=False))
    except StopIteration:
        pass
    return found


def main(tag, out):
    torch.serialization.add_safe_globals([argparse.Namespace])
    work = tempfile.mkdtemp()
    try:
        copy = shutil.copytree(tag, os.path.join(work, "tag"))
        for name in os.listdir(copy):
            if name.startswith("mp_rank_"):  # it counts these files, too
                torch.save({}, os.path.join(copy, "zero_pp_rank_0_" + name.replace("model_states", "optim_states")))
        rank = os.path.join(work, "iter", "mp_rank_00")
        os.makedirs(rank)
        torch.save(joined(copy), os.path.join(rank, "model_optim_rng.pt"))
        save_file({k: v.contiguous().clone() for k, v in converted(os.path.dirname(rank)).items() if not k.endswith((".attn.bias", ".masked_bias"))}, out)
    finally:
        shutil.rmtree(work)


def add_moments(tag):
    """What ds_to_universal needs besides the masters: moments, and where each rank's parts of parameters begin."""
    from deepspeed.utils.tensor_fragment import fragment_address
    for model in glob.glob(os.path.join(tag, "mp_rank_*")):
        shapes = torch.load(model, weights_only=False)["param_shapes"][0]
        lo = 0
        for file in sorted(glob.glob(os.path.join(tag, "zero_pp_rank_*" + os.path.basename(model).replace("model_states", "optim_states")))):
            root = torch.load(file, weights_only=False)
            state = root["optimizer_state_dict"]
            own, at, here = state["single_partition_of_fp32_groups"][0], 0, {}
            for name, shape in shapes.items():
                first, end = max(at, lo), min(at + shape.numel(), lo + len(own))
                if first < end:
                    here[name] = fragment_address(start=first - lo, numel=end - first)
                at += shape.numel()
            lo += len(own)
            state["param_slice_mappings"] = [here]
            state["base_optimizer_state"] = {"state": {0: {"exp_avg": own * 2, "exp_avg_sq": own * 3, "step": torch.tensor(5.0)}}, "param_groups": [{"lr": 0.1}]}
            torch.save(root, file)


def universal(tag, out):
    from deepspeed.checkpoint import ds_to_universal
    add_moments(tag)
    ds_to_universal.main(argparse.Namespace(input_folder=tag, output_folder=out, num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True,
                                            inject_missing_state=False))


if __name__ == "__main__":
    if sys.argv[1] == "universal":
        universal(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
