# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of what the recipes know from source alone, saved by the published megatron-core, in the pinned versions that have GroupedMLP, out of its own
modules: layers of multi-token prediction, experts of the old GroupedMLP, and Megatron-FSDP's fsdp_dtensor. Each rank's model gets the
weights that an independent writer gives that rank, under the names and with the shapes that the model's parameters have; what is saved
must be read as the Hugging Face model again. What Megatron-LM's save_checkpoint, which the package lacks, adds to it is done here as it
does it: files of ranks (mp_rank_*) hold the model's state dict, and fsdp_dtensor is saved by torch after four functions of the package.
By hand (tests/release.sh saves): megatron-core's writer forks beside gloo's threads, and has been seen to hang on a busy machine.
"""

import argparse
import math
import os
import pickle
import re
import shutil
import sys
import types
import unittest
import warnings

try:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers as tf

    import megatron_writer as mw
    from tensor_case import SEED, TensorCase, export, ranks, read_all
    from test_megatron import CORES as ALL_CORES, make_model
    from test_written_megatron import PLAN, config_of_args, local_names, preload
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

tf.utils.logging.disable_progress_bar()
tf.utils.logging.set_verbosity_error()
CORES = [c for c in ALL_CORES if os.path.exists(os.path.join(c, "megatron/core/transformer/moe/grouped_gemm_util.py"))]


def full_args(sd, cfg, plan, tied):
    """The writer's arguments, and those that only the model's construction asks for."""
    known = dict(quick_geglu=False, openai_gelu=False, normalization="RMSNorm", qk_layernorm=any("q_norm." in k or "q_a_layernorm." in k for k in sd), moe_grouped_gemm=plan["grouped"], use_rope_scaling=False,
                 pipeline_dtype=torch.bfloat16, moe_router_enable_expert_bias=hasattr(cfg, "topk_group"))
    args = argparse.Namespace(**known | vars(mw.arguments(cfg, plan, tied)))
    args.add_qkv_bias = any("q_proj.bias" in k for k in sd)
    dense = getattr(cfg, "first_k_dense_replace", 0)
    if dense:
        args.moe_layer_freq = [0] * dense + [1] * (args.num_layers - dense)
    return args


def build(args, plan):
    from megatron.core import model_parallel_config, parallel_state
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.moe import grouped_gemm_util
    multi_latent_attention.TELinear = multi_latent_attention.TEColumnParallelLinear = type(None)
    init = DotProductAttention.__init__  # latent attention names sizes that only TransformerEngine's asks for
    DotProductAttention.__init__ = lambda self, *a, k_channels=None, v_channels=None, **k: init(self, *a, **k)
    model_parallel_config.warnings = warnings  # 0.15 warns without an import
    grouped_gemm_util.grouped_gemm = grouped_gemm_util  # its kernels compute; nothing is computed here
    config = config_of_args(args)
    config.moe_grouped_gemm = plan["grouped"]
    spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    last = parallel_state.is_pipeline_last_stage()
    mtp = gpt_layer_specs.get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if plan["mtp"] else None
    return GPTModel(config, spec, vocab_size=args.padded_vocab_size, max_sequence_length=64, pre_process=parallel_state.is_pipeline_first_stage(),
                    post_process=last, share_embeddings_and_output_weights=False, position_embedding_type="rope", mtp_block_spec=mtp)


def local_norms(key):
    """TransformerEngine's names as megatron-core's own modules have them, which keep all norms apart."""
    for x in "q", "kv":
        key = key.replace(f"linear_{x}_up_proj.layer_norm_", f"{x}_layernorm.")
    return local_names(key)


def fill(model, want):
    """The rank's weights into the model, whose names and shapes must be the writer's."""
    got = dict(model.named_parameters()) | {k: b for k, b in model.named_buffers() if k.endswith("expert_bias")}
    assert set(got) == set(want), sorted(set(got) ^ set(want))
    for k, t in want.items():
        assert got[k].shape == t.shape, (k, got[k].shape, t.shape)
        got[k].data = t.clone()


class Einops:
    """What Megatron-FSDP asks of a package that is not there: ranks' numbers in another order."""
    @staticmethod
    def rearrange(t, pattern, **sizes):
        names, groups = ([g.strip("() ").split() for g in re.findall(r"\([^)]*\)|\S+", side)] for side in pattern.split("->"))
        if len(names) == 1:
            known = math.prod(sizes.values())
            t = t.reshape([sizes.get(n, t.numel() // known) for n in names[0]])
        names = sum(names, [])
        size = dict(zip(names, t.shape))
        return t.permute([names.index(n) for g in groups for n in g]).reshape([math.prod(size[n] for n in g) for g in groups])


class Nothing:
    """A stream or an event of a machine without a GPU."""
    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        return lambda *args: self


def save_fsdp(model, common, path):
    """By Megatron-FSDP, as Megatron-LM's save_checkpoint and its preprocess_fsdp_dtensor_state_dict do, which the package lacks."""
    import contextlib
    import torch.distributed.checkpoint as dcp
    cuda = torch.cuda
    cuda.Stream = cuda.Event = cuda.current_stream = Nothing
    cuda.stream, torch.Tensor.cuda = lambda *_: contextlib.nullcontext(), lambda t, *_: t
    from megatron.core.distributed import distributed_data_parallel_config
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter as adapter
    from megatron.core.distributed.fsdp.src.megatron_fsdp import megatron_fsdp, uneven_dtensor
    from megatron.core.transformer import fsdp_dtensor_checkpoint as checkpoint
    adapter.einops, adapter.HAVE_EINOPS, adapter.TELinear = Einops, True, type(None)
    mesh = adapter.DeviceMesh
    adapter.DeviceMesh = type("Mesh", (), {"from_group": staticmethod(lambda *a, device_type, **k: mesh.from_group(*a, device_type="cpu", **k))})
    megatron_fsdp.torch = types.ModuleType("torch")  # it compares with "cuda:cpu"
    megatron_fsdp.torch.__dict__.update(vars(torch), device=lambda _: torch.device("cpu"))
    config = distributed_data_parallel_config.DistributedDataParallelConfig(
        data_parallel_sharding_strategy="optim_grads_params", use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, use_megatron_fsdp=True)
    adapter.FullyShardedDataParallel.sync_rng_states_across_tp_group = lambda *_: None  # of GPUs
    model = adapter.FullyShardedDataParallel(model.config, config, model, device=torch.device("cpu"))
    state = model.state_dict_for_save_checkpoint()
    checkpoint.handle_fp8_extra_state_case(state)
    state, _ = checkpoint.handle_swiglu_in_state_dict(model, state, None)
    if model.config.num_moe_experts:
        state = checkpoint.handle_experts_in_state_dict(state, model.config.num_moe_experts)
    state = uneven_dtensor.preprocess_state_dict_for_uneven_dtensor({"model": state} | common)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path))


def one_save(world, rank, path, state, plan):
    """A rank of a job that saves its model."""
    import torch.distributed as dist
    preload()
    from megatron.core import dist_checkpointing, parallel_state
    dist.init_process_group("gloo", init_method=f"file://{path}.store", rank=rank, world_size=world)
    tp, pp, ep, etp = (plan[k] for k in ("tp", "pp", "ep", "etp"))
    parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp)
    with open(state, "rb") as f:
        sd, cfg = pickle.load(f)
    hf = mw.Model(sd, cfg, plan)
    args = full_args(sd, cfg, plan, hf.tied)
    model = build(args, plan)
    at = (parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_expert_model_parallel_rank())
    fill(model, {local_norms(k): t for k, t in mw.rank_state(hf, *at, 0).items() if t is not None})
    common = {"args": args, "checkpoint_version": 3.0, "iteration": 10}
    if plan["container"] == "dist":
        dist_checkpointing.save(model.sharded_state_dict() | common, path)
    elif plan["container"] == "fsdp":
        save_fsdp(model, common, path)
    else:
        folder = os.path.join(path, "mp_rank_%02d%s%s" % (at[0], f"_{at[1]:03d}" if pp > 1 else "", f"_{at[2]:03d}" if ep > 1 else ""))
        os.makedirs(folder)
        torch.save(common | {"model": model.state_dict_for_save_checkpoint()}, os.path.join(folder, "model_optim_rng.pt"))
    dist.destroy_process_group()


@unittest.skipUnless(CORES, "no megatron-core")
class Saves(TensorCase):
    models = {}

    def model(self, name, mtp):
        """A model of the family, made once; the weights behind its last layer that only multi-token prediction has are random too."""
        if name not in self.models:
            self.models[name] = make_model(name, self.path(f"{name}.hf"), SEED)
        sd, cfg = self.models[name]
        if mtp:
            h = cfg.hidden_size
            shapes = {"enorm": [h], "hnorm": [h], "eh_proj": [h, 2 * h], "shared_head.norm": [h]}
            sd = sd | {f"model.layers.{cfg.num_hidden_layers - 1}.{x}.weight": torch.randn(shape).to(torch.bfloat16) for x, shape in shapes.items()}
        state = self.path(f"{name}.pkl")
        with open(state, "wb") as f:
            pickle.dump((sd, cfg), f)
        return sd, cfg, state

    def check(self, name, core, dp=1, **change):
        what = f"{name}, {os.path.basename(core)}, {change}"
        plan = PLAN | dict(tp=1, pp=1, ep=1, container="dist", cut_down=True, pad=6, bridge=False, centred=False) | change
        plan["layers"] = [12 // plan["pp"]] * plan["pp"]
        plan["layers"][-1] -= plan["mtp"]
        want, cfg, state = self.model(name, plan["mtp"])
        run = self.path(f"run{len(os.listdir(self.tmp))}")
        os.makedirs(run)
        world = dp * plan["pp"] * max(plan["tp"], plan["ep"] * plan["etp"])
        try:
            ranks.run(world, "megatron_saves", "one_save", run, state, plan, folder=self.tmp, PYTHONPATH=core, OMP_NUM_THREADS="1")
        except AssertionError as e:
            self.fail(f"{what}: {e}")
        if plan["container"] == "fsdp":  # which saves the optimizer's F32 weights
            self.read(run, {k: t.float() for k, t in want.items()}, what, "vocab_size=90")
            base = self.path("base")
            cfg.save_pretrained(base)
            self.read(run, want, what, f"base={base}")
        else:
            self.read(run, want, what, "vocab_size=90")

    def read(self, run, want, what, option):
        out = self.path("out")
        done = export(run, out, option)
        self.assertEqual(done.returncode, 0, f"{what}: {done.stderr}")
        self.same(read_all(out), want, f"{what}, {option}")
        shutil.rmtree(out)

    def test_layers_of_multi_token_prediction(self):
        self.check("deepseek_v3", CORES[0], mtp=1)
        for core in CORES:
            self.check("deepseek_v3", core, mtp=1, tp=2, etp=2)
        self.check("glm4_moe", CORES[-1], mtp=1)
        self.check("deepseek_v3", CORES[-1], mtp=1, tp=2, etp=2, container="ranks")

    def test_old_grouped_experts(self):
        for core in CORES:
            self.check("qwen3_moe", core, grouped=True, tp=2, ep=2, etp=2)
        self.check("qwen3_moe", CORES[-1], grouped=True, tp=2, ep=2, etp=2, container="ranks")

    def test_megatron_fsdp(self):
        self.check("llama", CORES[-1], dp=3, container="fsdp")
        self.check("qwen3_moe", CORES[-1], tp=2, ep=2, dp=2, container="fsdp")


if __name__ == "__main__":
    unittest.main()
