# SPDX-License-Identifier: Apache-2.0
"""A rank of test_bridge.py: what megatron-core loads of a checkpoint into Megatron-Bridge's model, against Bridge's own import.
"""

import logging

import bridge_standin  # noqa: F401 (first)
import torch
import torch.distributed as dist

logging.disable(logging.WARNING)
from megatron.bridge import AutoBridge  # noqa: E402
from megatron.core import dist_checkpointing, parallel_state  # noqa: E402


def build(model, layout, weights):
    provider = AutoBridge.from_hf_pretrained(model, trust_remote_code=True).to_megatron_provider(load_weights=weights)
    for key, value in layout.items():
        setattr(provider, key, value)
    provider.gradient_accumulation_fusion, provider.moe_shared_expert_overlap, provider.moe_token_dispatcher_type = False, False, "allgather"
    provider.finalize()
    if not parallel_state.model_parallel_is_initialized():
        provider.initialize_model_parallel(seed=0)
    (chunk,) = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True, mixed_precision_wrapper=None)
    return chunk


def tensors(module):
    return {k: v.clone() for k, v in module.state_dict().items() if isinstance(v, torch.Tensor) and not k.endswith("_extra_state")}


def load(world, rank, model, checkpoint, layout, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    want, module = tensors(build(model, layout, True)), build(model, layout, False)
    with torch.no_grad():
        for t in [*module.parameters(), *(b for n, b in module.named_buffers() if n.endswith("bias"))]:
            t.fill_(77)
    metadata = {"singleton_local_shards": False, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state = dist_checkpointing.load({"model": module.sharded_state_dict(metadata=metadata)}, checkpoint, strict="assume_ok_unexpected")
    module.load_state_dict(state["model"], strict=False)  # attention's extra state is in no checkpoint
    got = tensors(module)
    differ = [k for k in want.keys() | got.keys() if k not in got or k not in want or got[k].dtype != want[k].dtype or not torch.equal(got[k], want[k])]
    assert not differ and len(want) > 5, (len(want), sorted(differ))
    dist.destroy_process_group()
