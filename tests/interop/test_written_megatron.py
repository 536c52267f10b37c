# SPDX-License-Identifier: Apache-2.0
"""view=megatron: the published megatron-core, in the oldest and the newest pinned version, loads it into GPT models at other layouts, and every parameter is what
an independent writer gives that rank; real checkpoints at their own layout are themselves; our own reader makes the model of it again.
"""

import dataclasses
import functools
import io
import json
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
import unittest
import warnings

try:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers as tf
    from safetensors.torch import save_file

    import megatron_writer as mw
    import nanotron_writer as nt
    from tensor_case import CASES, CKPT, SEED, WrittenCase, export, ranks, read_all
    from test_nanotron import nt_config
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

warnings.simplefilter("ignore")
tf.utils.logging.disable_progress_bar()
tf.utils.logging.set_verbosity_error()
CORES = [p for p in os.environ.get("CKPTFS_MEGATRON", "").split(":") if os.path.isdir(p)]
SOURCE = os.environ.get("CKPTFS_SOURCE", os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
FIXTURES = os.environ.get("CKPTFS_FIXTURES") or os.path.join(SOURCE, "..", "shared", "fixtures")
PACKAGE = os.path.join(SOURCE, "contrib", "python")
COMMON = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
              max_position_embeddings=64, bos_token_id=1, eos_token_id=2)
MOE = dict(num_experts_per_tok=2, moe_intermediate_size=24)
YARN = dict(rope_type="yarn", factor=32.0, original_max_position_embeddings=4096, beta_fast=32.0, beta_slow=1.0, rope_theta=150000.0)
FAMILIES = [
    (tf.LlamaConfig, dict(tie_word_embeddings=False)),
    (tf.LlamaConfig, dict(tie_word_embeddings=True, num_key_value_heads=4)),
    (tf.MistralConfig, dict(sliding_window=8)),
    (tf.Qwen2Config, dict(tie_word_embeddings=True)),
    (tf.Qwen3Config, dict(head_dim=16)),
    (tf.Qwen3MoeConfig, dict(num_experts=4, head_dim=8, **MOE)),
    (tf.Qwen3MoeConfig, dict(num_experts=4, head_dim=8, mlp_only_layers=[1], **MOE)),
    (tf.Qwen2MoeConfig, dict(num_experts=4, shared_expert_intermediate_size=40, **MOE)),
    (tf.MixtralConfig, dict(num_local_experts=4, num_experts_per_tok=2)),
    (tf.Phi3Config, dict(pad_token_id=0, tie_word_embeddings=False)),
    (tf.NemotronConfig, dict(tie_word_embeddings=False)),
    (tf.GemmaConfig, dict(head_dim=8)),
    (tf.DeepseekV3Config, dict(n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, n_shared_experts=1, moe_intermediate_size=24,
                               kv_lora_rank=16, q_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, first_k_dense_replace=1,
                               num_key_value_heads=4)),
    (tf.DeepseekV3Config, dict(n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1, n_shared_experts=1, moe_intermediate_size=24,
                               kv_lora_rank=16, q_lora_rank=None, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, first_k_dense_replace=1,
                               num_key_value_heads=4, rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=1.0))),
    (tf.DeepseekV2Config, dict(n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=2, moe_intermediate_size=24, kv_lora_rank=16,
                               q_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, first_k_dense_replace=1,
                               num_key_value_heads=4, tie_word_embeddings=False)),
    (tf.Glm4MoeConfig, dict(n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, head_dim=8, use_qk_norm=True, attention_bias=True,
                            num_nextn_predict_layers=0, **MOE)),
    (tf.Starcoder2Config, dict(use_bias=True, sliding_window=None)),
    (tf.GptOssConfig, dict(num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=8, tie_word_embeddings=False,
                           rope_parameters=YARN | dict(truncate=False))),
    (tf.NemotronHConfig, dict(num_hidden_layers=None, layers_block_type=["linear_attention", "moe", "full_attention", "mlp"], mamba_num_heads=8, mamba_head_dim=8,
                              n_groups=4, ssm_state_size=8, head_dim=8, n_routed_experts=4, n_shared_experts=1, moe_shared_expert_intermediate_size=40,
                              tie_word_embeddings=False, **MOE)),
]
# Those whose modules megatron-core has without TransformerEngine, in the oldest version and the newest in turn. Learnt offsets of softmax and
# gates of shared experts need a newer one than the oldest; queries of latent attention that are not compressed have a norm in the newest.
LOGITS = [(0, dict(rope_parameters=dict(rope_type="default", rope_theta=5000.5))), (5, dict(norm_topk_prob=True)), (1, {}), (7, {}), (3, {}), (8, {}), (4, {}),
          (12, {}), (14, {}), (13, {}), (15, {}), (17, {}), (16, {})]
# What Megatron-Bridge's loader reads of the arguments without a default.
BRIDGE_ARGS = {"heterogeneous_layers_config_path", "no_persist_layer_norm", "overlap_p2p_comm", "decoder_first_pipeline_num_layers",
               "decoder_last_pipeline_num_layers", "fp8_param_gather", "bias_swiglu_fusion", "init_method_xavier_uniform", "config_logger_dir",
               "cp_comm_type", "is_hybrid_model", "init_model_with_meta_device", "qk_l2_norm", "fp16_lm_cross_entropy"}
PLAN = dict(mtp=False, halves=False, pad=0, container="ranks", spec="te", cut_down=False, stacked=True, singleton=False, prefix="", seed=0,
            vpp=1, etp=1, sequential=True, grouped=False)


def state_of(folder):
    """Shapes and boxes of tensors, names of objects, the boxes' bytes, the arguments; of a torch_dist checkpoint."""
    with open(os.path.join(folder, ".metadata"), "rb") as f:
        meta = pickle.load(f)
    tensors, objects, data = {}, set(), {}
    for name, entry in meta.state_dict_metadata.items():
        if "_extra_state/shard_" in name:
            objects.add(name)
        elif "/shard_" not in name and "optimizer" not in name:
            tensors[name] = entry.size, sorted((tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks), entry.properties
    for index, at in meta.storage_data.items():
        if index.fqn in tensors:
            with open(os.path.join(folder, at.relative_path), "rb") as f:
                f.seek(at.offset)
                data[index.fqn, tuple(index.offset)] = torch.load(io.BytesIO(f.read(at.length)), weights_only=False)
    args = vars(torch.load(os.path.join(folder, "common.pt"), weights_only=False)["args"])
    return tensors, objects, data, args


def local_names(key):
    """TransformerEngine's names of norms as megatron-core's local modules have them."""
    for te, local in (("self_attention.linear_qkv.layer_norm_", "input_layernorm."), ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")):
        key = key.replace(te, local)
    return key


def preload():
    """Megatron, on a machine without a GPU."""
    torch.cuda.synchronize, torch.cuda.current_device, torch.cuda.device_count = lambda *_: None, lambda: "cpu", lambda: 0
    torch.cuda.set_device = torch.cuda.Stream = lambda *_: None
    try:
        import megatron.core.dist_checkpointing
        import megatron.core.models.gpt.gpt_layer_specs
        import megatron.core.parallel_state  # noqa: F401
    except ImportError:
        pass  # the path names none


def one_rank(world, rank, port, *args):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    load(*args)


def gpt_model(cfg, tp, pp, ep, dtype=torch.bfloat16, dispatcher="alltoall"):
    """A rank's GPT model, and its config. dispatcher: of tokens to experts; with "allgather" it computes without a GPU."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep, expert_tensor_parallel_size=1 if ep > 1 else None)
    experts = getattr(cfg, "num_local_experts", getattr(cfg, "num_experts", None)) if "moe" in cfg.model_type or cfg.model_type == "mixtral" else None
    q_norm = cfg.model_type.startswith("qwen3")
    extra = dict(num_moe_experts=experts, moe_router_topk=2, moe_ffn_hidden_size=getattr(cfg, "moe_intermediate_size", cfg.intermediate_size),
                 moe_token_dispatcher_type=dispatcher) if experts else {}
    config = TransformerConfig(
        num_layers=cfg.num_hidden_layers, hidden_size=cfg.hidden_size, ffn_hidden_size=cfg.intermediate_size, num_attention_heads=cfg.num_attention_heads,
        num_query_groups=cfg.num_key_value_heads, kv_channels=getattr(cfg, "head_dim", None) or cfg.hidden_size // cfg.num_attention_heads,
        add_bias_linear=False, add_qkv_bias=cfg.model_type == "qwen2", gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        normalization="RMSNorm", layernorm_epsilon=getattr(cfg, "rms_norm_eps", 1e-5), qk_layernorm=q_norm, use_cpu_initialization=True, params_dtype=dtype, bf16=dtype == torch.bfloat16,
        pipeline_dtype=dtype, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, expert_model_parallel_size=ep,
        expert_tensor_parallel_size=1 if ep > 1 else None, gradient_accumulation_fusion=False, **extra)
    spec = get_gpt_layer_local_spec(num_experts=experts, moe_grouped_gemm=False, qk_layernorm=q_norm, normalization="RMSNorm")
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    model = GPTModel(config, spec, vocab_size=cfg.vocab_size, max_sequence_length=64, pre_process=first, post_process=last,
                     share_embeddings_and_output_weights=cfg.tie_word_embeddings, position_embedding_type="rope", rotary_base=cfg.rope_parameters["rope_theta"])
    torch.nn.RMSNorm.get_extra_state, torch.nn.RMSNorm.set_extra_state = lambda self: None, lambda self, state: None  # as TransformerEngine's since 2
    return model, config


def sharded_model(model, config):
    """The model's sharded state dict, as if it had TransformerEngine's modules, which are what trains."""
    sharded = {k: v for k, v in model.sharded_state_dict().items() if not v.key.endswith("layer_norm__extra_state")}  # fused there
    if config.num_moe_experts:  # they keep the norm before experts apart
        for t in sharded.values():
            t.key = t.key.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
    return sharded


def of_rank(tensors, cfg, tp, pp, ep):
    """What an independent writer gives this rank of the model."""
    from megatron.core import parallel_state
    plan = {**PLAN, "tp": tp, "pp": pp, "ep": ep, "etp": 1 if ep > 1 else tp, "layers": [cfg.num_hidden_layers // pp] * pp}
    want = mw.rank_state(mw.Model(tensors, cfg, plan), parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank(),
                         parallel_state.get_expert_model_parallel_rank(), 0)
    return {local_names(k): t for k, t in want.items() if t is not None}


def load(path, model_dir, tp, pp, ep):
    """A rank of a job that loads the checkpoint into a GPT model, and compares each parameter."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    preload()
    import ckptfs.megatron
    from megatron.core import dist_checkpointing, parallel_state
    dist.init_process_group("gloo")
    cfg = tf.AutoConfig.from_pretrained(model_dir)
    model, config = gpt_model(cfg, tp, pp, ep)
    want = of_rank(read_all(model_dir), cfg, tp, pp, ep)

    def fill(load, source):
        for p in model.parameters():
            p.data.fill_(7)
        sharded = sharded_model(model, config)
        assert any(v.key == "decoder.final_layernorm._extra_state" for v in sharded.values()) or not parallel_state.is_pipeline_last_stage()
        loaded = load(sharded, source)
        assert loaded["args"].num_layers == cfg.num_hidden_layers and loaded["checkpoint_version"] == 3.0
        missing, unexpected = model.load_state_dict({k: v for k, v in loaded.items() if k in sharded}, strict=False)
        assert not [k for k in missing if "_extra_state" not in k] and not unexpected, (missing, unexpected)
        got = dict(model.named_parameters())
        assert set(got) == set(want), set(got) ^ set(want)
        for k, t in want.items():
            assert got[k].shape == t.shape and torch.equal(got[k].data, t), (source, k)

    fill(dist_checkpointing.load, path)
    fill(ckptfs.megatron.load, path)
    fill(ckptfs.megatron.load, model_dir)  # no conversion: the Hugging Face model itself
    if cfg.model_type == "llama":
        saved = f"{path}.{tp}-{pp}"
        dcp.save({"model": read_all(model_dir)}, checkpoint_id=os.path.join(saved, "dcp", "step-10"))
        if not dist.get_rank():
            nt.write_run(os.path.join(saved, "nanotron"), 20, nt.llama_like(read_all(model_dir), cfg), nt_config(cfg, "is_llama_config"), 2, 2, cfg.num_hidden_layers)
        dist.barrier()
        fill(functools.partial(ckptfs.megatron.load, options={"base": model_dir}), os.path.join(saved, "dcp"))
        fill(ckptfs.megatron.load, os.path.join(saved, "nanotron"))
        try:
            ckptfs.megatron.load(model.sharded_state_dict(), os.path.join(saved, "dcp"))
        except ckptfs.CkptError as e:
            assert "config.json" in str(e) and "base" in str(e), e
        else:
            raise AssertionError("which model it is was guessed")
    dist.barrier()
    dist.destroy_process_group()


def config_of_args(args):
    """The config that Megatron-LM's core_transformer_config_from_args makes of these arguments."""
    from megatron.core.activations import quick_gelu, squared_relu
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig
    cls = MLATransformerConfig if args.multi_latent_attention else TransformerConfig
    known = {f.name for f in dataclasses.fields(cls)}
    more = dict(num_moe_experts=args.num_experts, num_query_groups=args.num_query_groups if args.group_query_attention else None, use_cpu_initialization=True,
                gradient_accumulation_fusion=False, moe_token_dispatcher_type="allgather", moe_grouped_gemm=False, bias_activation_fusion=False)
    if args.swiglu:
        more.update(activation_func=torch.nn.functional.silu, gated_linear_unit=True)
    elif args.quick_geglu:
        more.update(activation_func=quick_gelu, gated_linear_unit=True)
    elif args.squared_relu:
        more["activation_func"] = squared_relu
    elif args.openai_gelu:  # without a GPU there is no fusion, which approximates it
        more["activation_func"] = functools.partial(torch.nn.functional.gelu, approximate="tanh")
    config = cls(**{k: v for k, v in vars(args).items() if k in known and (v is not None or k == "q_lora_rank")} | more)
    for k, v in vars(args).items():
        if k.startswith("yarn_") or (k in ("yarn_mscale", "yarn_mscale_all_dim")):
            setattr(config, k, v)
    for k in ("yarn_mscale", "yarn_mscale_all_dim"):
        setattr(config, k, getattr(config, k, None))
    return config


def one_logits(world, rank, port, path, tokens, out):
    """What a GPT model computes that has the arguments and the weights of the checkpoint."""
    import contextlib
    import torch.distributed as dist
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    preload()
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(1, 1)
    args = torch.load(os.path.join(path, "common.pt"), weights_only=False)["args"]
    tracker = type("Tracker", (), {"fork": lambda self, *_: contextlib.nullcontext()})()
    tensor_parallel.get_cuda_rng_tracker = lambda *_: tracker
    ones = torch.ones
    torch.ones = lambda *a, device=None, **k: ones(*a, device="cpu" if device == "cuda" else device, **k)
    moe_utils.te_general_gemm = None  # the name is missing without TransformerEngine
    multi_latent_attention.TELinear = multi_latent_attention.TEColumnParallelLinear = type(None)
    init = DotProductAttention.__init__  # latent attention names sizes that only TransformerEngine's asks for
    DotProductAttention.__init__ = lambda self, *a, k_channels=None, v_channels=None, **k: init(self, *a, **k)
    config = config_of_args(args)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=args.normalization) if args.num_experts else \
        get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm, normalization=args.normalization)
    model = GPTModel(config, spec, vocab_size=args.padded_vocab_size, max_sequence_length=args.max_position_embeddings, parallel_output=False,
                     share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights, position_embedding_type=args.position_embedding_type,
                     rotary_percent=args.rotary_percent, rotary_base=args.rotary_base, rope_scaling=args.use_rope_scaling,
                     rope_scaling_factor=args.rope_scaling_factor)
    sharded = model.sharded_state_dict()
    stored = set(dist_checkpointing.load_tensors_metadata(path))
    for t in sharded.values():  # norms are TransformerEngine's, which trains: kept apart before experts, but not between latent projections
        if t.key not in stored and "_extra_state" not in t.key:
            for a, b in (("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."), ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
                         ("q_layernorm.", "linear_q_up_proj.layer_norm_"), ("kv_layernorm.", "linear_kv_up_proj.layer_norm_")):
                if (other := t.key.replace("." + a, "." + b)) in stored:
                    t.key = other
            assert t.key in stored, t.key
    loaded = dist_checkpointing.load(sharded, path)
    missing, unexpected = model.load_state_dict({k: v for k, v in loaded.items() if k in sharded}, strict=False)
    assert not [k for k in missing if "_extra_state" not in k] and not unexpected, (missing, unexpected)
    tokens = torch.load(tokens)
    at = torch.arange(tokens.shape[1])
    with torch.no_grad():
        got = model.eval()(tokens, at[None].expand_as(tokens), (at[None, :] > at[:, None])[None, None])
    torch.save(got, out)
    dist.destroy_process_group()


class Megatron(WrittenCase):
    def model(self, name, cls, config):
        path, model = self.save_model(name, cls(**{**COMMON, **config}), "40KB")
        return path, read_all(path), model.config

    # ---- Megatron's own loader ----

    def run_ranks(self, core, folder, model, tp, pp, ep):
        port = ranks.free_port()
        world = max(tp, ep) * pp
        try:
            ranks.run(world, "test_written_megatron", "one_rank", port, folder, model, tp, pp, ep, folder=self.tmp, timeout=500, PYTHONPATH=f"{core}:{PACKAGE}",
                      CKPTFS_LIBRARY_PATH=os.path.join(os.path.dirname(CKPT), "..", "core"), OMP_NUM_THREADS="1")
        except AssertionError as e:
            self.fail(f"{os.path.basename(core)}, tp {tp}, pp {pp}, ep {ep}: {e}")

    def check_loads(self, i, written, layouts):
        if not CORES:
            self.skipTest("CKPTFS_MEGATRON names no megatron-core")
        source, _, _ = self.model("model", *FAMILIES[i])
        run = self.export(source, self.path("run"), "view=megatron", "make_vocab_size_divisible_by=8", *written)
        with open(os.path.join(run, "latest_checkpointed_iteration.txt")) as f:
            self.assertEqual(f.read(), "release")
        for core in CORES[:1] + CORES[1:][-1:]:
            for layout in layouts:
                self.run_ranks(core, os.path.join(run, "release"), source, *layout)

    def test_loads_a_dense_model(self):
        self.check_loads(0, ["tp=2", "pp=4"], [(2, 1, 1), (1, 2, 1)])

    def test_loads_tied_embeddings_and_norms_of_queries(self):
        self.check_loads(1, ["tp=4", "pp=2"], [(1, 1, 1)])
        self.tmp = self.path("next")
        os.mkdir(self.tmp)
        self.check_loads(4, ["tp=1", "pp=2", "vpp=2"], [(2, 1, 1)])

    def test_loads_experts(self):
        self.check_loads(5, ["tp=2", "pp=1", "ep=4"], [(1, 1, 2), (1, 2, 1)])

    def check_logits(self, core, i, **config):
        """Megatron computes what transformers does, in F32, from arguments and weights of the view."""
        cls, own = FAMILIES[i]
        torch.manual_seed(SEED)
        model = tf.AutoModelForCausalLM.from_config(cls(**{**COMMON, **own, **config}), dtype=torch.float32).eval()
        for name, p in [*model.named_parameters(), *model.named_buffers()]:
            if name in model.state_dict() and p.is_floating_point():
                p.data = torch.randn(p.shape) * 0.2 + (1 if "norm" in name and name.endswith("weight") else 0)
        source = self.path(f"logits-{i}")
        model.save_pretrained(source)
        run = self.export(source, source + ".run", "view=megatron", "make_vocab_size_divisible_by=40")
        tokens = torch.randint(0, COMMON["vocab_size"], (2, 24))
        torch.save(tokens, source + ".tokens")
        port = ranks.free_port()
        ranks.run(1, "test_written_megatron", "one_logits", port, os.path.join(run, "release"), source + ".tokens", source + ".logits", folder=self.tmp, timeout=500,
                  PYTHONPATH=core, OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1")  # compiling needs Python's headers
        got = torch.load(source + ".logits")[..., :COMMON["vocab_size"]]
        with torch.no_grad():
            want = model(tokens).logits
        self.assertLess((got - want).abs().max() / want.abs().max(), 2e-5, f"{cls.__name__}, {os.path.basename(core)}")

    def test_logits(self):
        if not CORES:
            self.skipTest("CKPTFS_MEGATRON names no megatron-core")
        for k, (i, config) in enumerate(LOGITS):
            with self.subTest(FAMILIES[i][0].__name__):
                self.check_logits(CORES[-(k % 2) if i != 13 else 0], i, **config)

    # ---- real checkpoints ----

    def check_real(self, case):
        with open(os.path.join(case, "run", "latest_checkpointed_iteration.txt")) as f:
            step = "iter_%07d" % int(f.read())
        want, base = state_of(os.path.join(case, "run", step)), os.path.join(case, "base")
        size = lambda k: want[3][k + "_parallel_size"] or 1
        options = [f"tp={size('tensor_model')}", f"pp={size('pipeline_model')}", f"vpp={size('virtual_pipeline_model')}"]
        options += [f"ep={size('expert_model')}", f"etp={size('expert_tensor')}"] if want[3]["num_experts"] else []
        options += [f"base={base}"] if os.path.isdir(base) else []
        out = self.export(os.path.join(case, "run"), self.path(os.path.basename(case)), "view=megatron", *options)
        self.assertEqual(sorted(os.listdir(out)), [step, "latest_checkpointed_iteration.txt"])
        got = state_of(os.path.join(out, step))
        self.assertEqual(got[0], want[0])  # shapes, boxes, dtypes
        self.assertEqual(want[1] - got[1], set())  # objects: those of norms are TransformerEngine 2's
        self.assertTrue(all(re.search(r"(layernorm|final_norm)\._extra_state/shard_", name) for name in got[1] - want[1]), got[1] - want[1])
        self.assertLessEqual(BRIDGE_ARGS, set(got[3]))
        for (name, at), t in want[2].items():
            rows = len(t)
            if name.split(".")[0] in ("embedding", "output_layer"):  # padding is random there
                vocab = got[3]["vocab_size"]
                rows = max(min(vocab - at[0], rows), 0)
            self.assertTrue(torch.equal(got[2][name, at][:rows], t[:rows]), f"{name} {at}")
        for k, v in got[3].items():
            if k not in ("vocab_size", "world_size", "data_parallel_size", "expert_tensor_parallel_size", "ckpt_format", "use_dist_ckpt"):
                there = want[3].get(k, v)
                self.assertEqual(v, list(there) if isinstance(there, tuple) else there, k)
        for k in ("num_layers", "hidden_size", "padded_vocab_size", "num_query_groups", "swiglu", "untie_embeddings_and_output_weights"):
            self.assertIn(k, got[3])
        if os.path.isdir(base) and os.path.isdir(os.path.join(case, "expected")):
            self.same_files(self.export(out, out + ".hf", f"base={base}"), os.path.join(case, "expected"))

    def test_real_checkpoints(self):
        folder = os.path.join(FIXTURES, "megatron")
        names = ["m16_llama_tp2pp2", "m16_llama_tp4_g2", "m16_mixtral_tp2ep2", "m16_qwen2_tp2_tied_optim", "m16_qwen2moe_tp2", "m16_qwen3_pp2_vpp2",
                 "m16_qwen3moe_ep4", "m16_dsv3_tp2ep2", "m16_nemotron_tp2pp2", "m16_gptoss_tp2ep2", "m16_nemotronh_tp2"]
        if not CORES:
            self.skipTest("CKPTFS_MEGATRON names no megatron-core")
        sys.path.insert(0, CORES[-1])  # classes of the arguments
        try:
            for name in names:
                with self.subTest(name):
                    self.check_real(os.path.join(folder, name))
        finally:
            sys.path.pop(0)

    def test_objects_of_norms(self):
        """As a job with TransformerEngine 2's norms saved them."""
        case = os.path.join(FIXTURES, "..", "oracles", "bridge", "dsv3_mtp__pp2layout")
        if not CORES:
            self.skipTest("CKPTFS_MEGATRON names no megatron-core")
        sys.path.insert(0, CORES[-1])
        self.addCleanup(sys.path.pop, 0)
        out = self.export(os.path.join(case, "run"), self.path("norms"), "view=megatron", f"base={case}/base")
        found = []
        for run in (out, os.path.join(case, "run")):
            step, = (name for name in os.listdir(run) if name.startswith(("iter_", "release")))
            with open(os.path.join(run, step, ".metadata"), "rb") as f:
                found.append({name for name in pickle.load(f).state_dict_metadata if "_extra_state/shard_" in name})
        self.assertEqual(*found)

    # ---- view=megatron_legacy ----

    def states(self, folder):
        """{mp_rank_...: (the tensors of its modules, other keys)}"""
        found = {}
        for name in sorted(os.listdir(folder)):
            state = torch.load(os.path.join(folder, name, "model_optim_rng.pt"), weights_only=False)
            modules = {k: v for k, v in state.items() if k.startswith("model")}
            found[name] = {k: {n: t for n, t in m.items() if not n.endswith("_extra_state")} for k, m in modules.items()}, state
        return found

    def same_states(self, got, want):
        self.assertEqual(sorted(got), sorted(want))
        for rank in want:
            self.assertEqual(sorted(got[rank][0]), sorted(want[rank][0]))
            for module, tensors in want[rank][0].items():
                self.same(got[rank][0][module], tensors, f"{rank}: {module}")

    def test_legacy_of_real_checkpoints(self):
        folder = os.path.join(FIXTURES, "megatron")
        if not CORES:
            self.skipTest("CKPTFS_MEGATRON names no megatron-core")
        sys.path.insert(0, CORES[-1])
        self.addCleanup(sys.path.pop, 0)
        for name, options in (("l16_llama_tp2pp2", ["tp=2", "pp=2"]), ("l16_qwen3moe_ep2", ["ep=2"])):
            case = os.path.join(folder, name)
            base = f"base={case}/base"
            out = self.export(os.path.join(case, "run"), self.path(name), "view=megatron_legacy", base, *options)
            got, want = self.states(os.path.join(out, "iter_0000010")), self.states(os.path.join(case, "run", "iter_0000010"))
            vocab = got[sorted(got)[0]][1]["args"].vocab_size
            for rank, (modules, state) in want.items():  # padding is random there
                last = int(rank.split("_")[2]) == max(int(r.split("_")[2]) for r in want)
                for m in modules.values():
                    for t in (m[k] for k in ("embedding.word_embeddings.weight", "output_layer.weight") if k in m and last):
                        t[len(t) - (state["args"].padded_vocab_size - vocab):] = 0
                self.assertEqual((got[rank][1]["iteration"], got[rank][1]["checkpoint_version"]), (10, 3.0))
            self.same_states(got, want)
            self.same_files(self.export(out, self.path(name + ".hf"), base), os.path.join(case, "expected"))

    def check_legacy(self, i, tp, pp, vpp=1, ep=1, etp=1):
        """What each rank of Megatron's job has, by the independent writer; the way back gives the model again."""
        cls, config = FAMILIES[i]
        name = f"legacy-{i}-{tp}-{pp}-{vpp}-{ep}-{etp}"
        source, tensors, cfg = self.model(name, cls, config)
        run = self.export(source, self.path(name + ".run"), "view=megatron_legacy", "make_vocab_size_divisible_by=8", f"tp={tp}", f"pp={pp}", f"vpp={vpp}",
                          *([f"ep={ep}", f"etp={etp}"] if ep * etp > 1 else []))
        plan = {**PLAN, "tp": tp, "pp": pp, "vpp": vpp, "ep": ep, "etp": etp if ep * etp > 1 else tp, "sequential": False, "share": False, "old": False,
                "layers": [cfg.num_hidden_layers // pp // vpp] * pp * vpp}
        want = self.path(name + ".want")
        mw.write_ranks(mw.Model(tensors, cfg, plan), want, None)
        self.same_states(self.states(os.path.join(run, "release")), self.states(want))
        self.same_files(self.export(run, self.path(name + ".back"), f"base={source}"), source)

    def test_legacy_is_what_ranks_have(self):
        self.check_legacy(0, 2, 2)
        self.check_legacy(1, 1, 4)  # tied: the last stage has a copy
        self.check_legacy(1, 2, 2, vpp=2)
        self.check_legacy(5, 2, 1, ep=2, etp=2)
        self.check_legacy(6, 1, 2, ep=4)
        self.check_legacy(7, 2, 2, etp=2)
        self.check_legacy(8, 2, 1, ep=4)
        self.check_legacy(13, 2, 2, ep=2)
        self.check_legacy(14, 1, 4)
        self.check_legacy(15, 2, 2, ep=2)
        self.check_legacy(16, 2, 2)
        self.check_legacy(17, 2, 1, ep=2)
        self.check_legacy(18, 2, 2, ep=2)
        self.check_legacy(18, 4, 1, etp=4)

    def test_legacy_refuses(self):
        source, _, _ = self.model("experts", *FAMILIES[5])
        done = export(source, self.path("refused"), "view=megatron_legacy", "etp=2")
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("etp=2 must divide tp=1", done.stderr)

    # ---- there and back ----

    def check_family(self, i, seed):
        rng = random.Random(f"{SEED} {seed}")
        cls, config = FAMILIES[i]
        source, tensors, cfg = self.model(f"model-{seed}", cls, config)
        options = [f"tp={rng.choice([1, 2, 4])}", f"pp={rng.choice([1, 2, 4])}"]
        if any(x in cls.__name__ for x in ("Moe", "Mixtral", "Deepseek", "GptOss")):
            options += [f"ep={rng.choice([1, 2, 4])}", f"etp={rng.choice([1, 2])}"]
        run = self.export(source, self.path(f"run-{seed}"), "view=megatron", *options)
        self.same_files(self.export(run, self.path(f"back-{seed}"), f"base={source}"), source)
        again = self.export(run, self.path(f"again-{seed}"), "view=megatron", "tp=2", f"base={source}")
        self.same_files(self.export(again, self.path(f"back-again-{seed}"), f"base={source}"), source)

    def test_every_family_at_random_layouts(self):
        for i in range(len(FAMILIES)):
            for k in range(max(CASES // 3, 1)):
                with self.subTest(FAMILIES[i][0].__name__, i=i, k=k):
                    self.check_family(i, 10 * i + k)

    def test_through_nanotron(self):
        """From one framework to another, without a Hugging Face directory on the way."""
        source, _, _ = self.model("model", *FAMILIES[0])
        nanotron = self.export(source, self.path("nanotron"), "view=nanotron", "tp=2", "pp=2")
        megatron = self.export(nanotron, self.path("megatron"), "view=megatron", "tp=4", "make_vocab_size_divisible_by=24")
        self.same_files(self.export(megatron, self.path("back"), f"base={source}"), source)

    # ---- what is lost ----

    def config_again(self, run, name):
        """config.json of a checkpoint that is read without a base, with the rotary embedding as transformers 5 says it."""
        config = self.config_of(self.export(run, self.path(name)))
        rope = {"rope_theta": config.get("rope_theta"), **(config.get("rope_scaling") or {"rope_type": "default"})}
        return {"rope_parameters": rope, "head_dim": config["hidden_size"] // config["num_attention_heads"], **config}

    def config_of(self, folder):
        with open(os.path.join(folder, "config.json")) as f:
            return json.load(f)

    def check_lost(self, i, view):
        """The keys that a warning names are those that differ, or are not there, when the view is read again."""
        cls, config = FAMILIES[i]
        rope = dict(rope_parameters=dict(rope_type="default", rope_theta=12345.5))
        source, _, _ = self.model(f"{view}-{i}", cls, dict(config, eos_token_id=[2, 3], use_cache=False, **rope))
        done = export(source, self.path(f"{view}-{i}.run"), f"view={view}")
        self.assertEqual(done.returncode, 0, done.stderr)
        listed = re.search(r"does not keep these keys of config.json: (.*) \(base=", done.stderr).group(1).split(", ")
        want, got = self.config_of(source), self.config_again(self.path(f"{view}-{i}.run"), f"{view}-{i}.back")
        for config in (want, got):
            if (config.get("rope_parameters") or {}).get("partial_rotary_factor") == 1:
                del config["rope_parameters"]["partial_rotary_factor"]
        differ = {k for k, v in want.items() if v is not None and v != got.get(k)} - {"transformers_version", "dtype"}
        self.assertEqual(set(listed), differ)
        self.assertIn("eos_token_id", differ)
        self.assertNotIn("rope_parameters", differ)
        self.assertNotIn("keys of config.json", export(source, self.path("with base"), f"view={view}", f"base={source}").stderr)
        shutil.rmtree(self.path("with base"))

    def test_lost_keys_are_listed(self):
        for i in (0, 3, 5, 7, 11):
            self.check_lost(i, "megatron")
        self.check_lost(4, "megatron_legacy")
        self.check_lost(0, "nanotron")
        self.check_lost(3, "nanotron")
        source, _, _ = self.model("model", *FAMILIES[0])
        for view in ("dcp", "torchtitan"):
            self.assertIn(f"note: view={view} has no place for config.json", export(source, self.path(view), f"view={view}").stderr)

    # ---- refusals ----

    def refuses(self, source, text, *options, status=2):
        done = export(source, self.path("refused"), "view=megatron", *options)
        self.assertEqual(done.returncode, status, done.stderr)
        self.assertIn(text, done.stderr)

    def test_refuses(self):
        source, _, _ = self.model("model", *FAMILIES[0])
        self.refuses(source, "cannot be divided among 3 ranks", "tp=3")
        self.refuses(source, "the model has 4 layers, which cannot be divided among 3 stages", "pp=3")
        self.refuses(source, "the model has 4 layers, which cannot be divided among 8 stages\n", "pp=8")
        self.refuses(source, "the model has 4 layers, which cannot be divided among 2 stages of 3 parts each\n", "pp=2", "vpp=3")
        self.refuses(source, "option ep: the model has no experts", "ep=2")
        self.refuses(source, "option vpp: there is only one stage", "vpp=2")
        self.refuses(source, "option ranks does not apply to view=megatron", "ranks=2")
        source, _, _ = self.model("experts", *FAMILIES[5])
        self.refuses(source, "the model has 4 experts, which cannot be divided among 3 ranks", "ep=3")
        source, _, _ = self.model("bias", tf.LlamaConfig, dict(attention_bias=True))
        self.refuses(source, "biases in all projections or in none", status=1)
        for name, cls, config, text in (
                ("dense", tf.Qwen3MoeConfig, FAMILIES[5][1] | dict(mlp_only_layers=[0, 1, 2, 3]), "could not be read again: megatron/qwen3_moe"),
                ("gelu", tf.LlamaConfig, dict(hidden_act="gelu"), "but the model's activation is"),
                ("gemma2", tf.Gemma2Config, dict(head_dim=8), "no norms behind attention and MLP"),
                ("gemma3", tf.Gemma3TextConfig, dict(head_dim=8), "no norms behind attention and MLP"),
                ("windows", tf.GptOssConfig, FAMILIES[17][1] | dict(layer_types=["full_attention"] * 4), "windows in every second layer"),
                ("yarn", tf.LlamaConfig, dict(rope_parameters=YARN), "do not have the model's rotary embeddings"),
                ("groups", tf.DeepseekV2Config, FAMILIES[14][1] | dict(n_group=2, topk_group=1, topk_method="group_limited_greedy"), "scores a group of experts"),
                ("tanh", tf.Starcoder2Config, dict(hidden_act="gelu"), "openai_gelu")):
            source, _, _ = self.model(name, cls, config)
            self.refuses(source, text, status=1)

    def test_what_is_computed_takes_two_steps(self):
        """Quantised weights and adapters: refused, whatever may be left out; a view of the view that computes them is right."""
        source, tensors, _ = self.model("model", *FAMILIES[0])
        half = {k: t.float().to(torch.float8_e4m3fn) if "proj" in k else t for k, t in tensors.items()}
        scales = {f"{k}_scale_inv": torch.ones(1, 1) * 2 for k in half if "proj" in k}
        quantised = self.path("quantised")
        os.makedirs(quantised)
        save_file({**half, **scales}, os.path.join(quantised, "model.safetensors"), metadata={"format": "pt"})
        with open(os.path.join(quantised, "config.json"), "w") as f:
            json.dump(self.config_of(source) | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, f)
        adapter = self.path("adapter")
        os.makedirs(adapter)
        name, r = "model.layers.0.self_attn.q_proj", 2
        rows, columns = tensors[name + ".weight"].shape
        save_file({f"base_model.model.{name}.lora_A.weight": torch.rand(r, columns), f"base_model.model.{name}.lora_B.weight": torch.rand(rows, r)},
                  os.path.join(adapter, "adapter_model.safetensors"), metadata={"format": "pt"})
        with open(os.path.join(adapter, "adapter_config.json"), "w") as f:
            json.dump({"peft_type": "LORA", "r": r, "lora_alpha": 4, "target_modules": ["q_proj"], "base_model_name_or_path": source}, f)
        for view in ("megatron", "megatron_legacy", "nanotron", "torchtitan"):
            for run, text, options in ((quantised, "are quantised, which", []), (quantised, "are quantised, which", ["dequantize"]),
                                       (quantised, "are quantised, which", ["allow_leftover"]), (adapter, "is a LoRA adapter, which", []),
                                       (adapter, "is a LoRA adapter, which", [f"base={source}"]), (adapter, "in one step", [f"base={source}", "lora=merge"])):
                done = export(run, self.path("refused"), f"view={view}", *options)
                self.assertEqual(done.returncode, 1, (view, options, done.stderr))
                self.assertIn(text, done.stderr)
            for run, options in ((quantised, ["dequantize"]), (adapter, [f"base={source}", "lora=merge"])):
                computed = self.export(run, self.path(f"{view}-{len(options)}"), *options)
                there = self.export(computed, computed + ".there", f"view={view}")
                self.same(read_all(self.export(there, computed + ".back", f"base={computed}")), read_all(computed), view)

    def test_a_model_that_lacks_tensors_is_refused(self):
        source, tensors, _ = self.model("model", *FAMILIES[0])
        shutil.rmtree(source)
        lacks = "of the model that config.json describes: '%s'"
        for name, change, text in (("model.norm.weight", {}, lacks % "model.norm.weight"),
                                   ("model.layers.1.mlp.down_proj.weight", {}, lacks % "model.layers.1.mlp.down_proj.weight"),
                                   (None, {"num_hidden_layers": 5}, lacks % "model.layers.4.input_layernorm.weight"),
                                   (None, {"tie_word_embeddings": True}, "the config ties 'lm_head.weight' to 'model.embed_tokens.weight'")):
            os.makedirs(source, exist_ok=True)
            save_file({k: t for k, t in tensors.items() if k != name}, os.path.join(source, "model.safetensors"), metadata={"format": "pt"})
            with open(os.path.join(source, "config.json"), "w") as f:
                f.write(tf.LlamaConfig(**{**COMMON, "tie_word_embeddings": False, **change}, architectures=["LlamaForCausalLM"]).to_json_string())
            for view in ("megatron", "megatron_legacy", "nanotron", "torchtitan"):
                done = export(source, self.path("refused"), f"view={view}")
                self.assertEqual(done.returncode, 1, (name, view, done.stderr))
                self.assertIn(text, done.stderr)

    def test_copies_of_tied_tensors(self):
        """A tied copy is stored as the framework stores ties; one with other values is refused, or left out if that is asked for."""
        source, tensors, _ = self.model("model", *FAMILIES[1])
        embedding = tensors["model.embed_tokens.weight"]
        shutil.copytree(source, self.path("copies"))
        for view in ("megatron", "nanotron", "torchtitan"):
            want = self.names(source, view)
            for other in (0, 1):
                for name in os.listdir(self.path("copies")):
                    if "safetensors" in name:
                        os.remove(self.path(f"copies/{name}"))
                save_file({**tensors, "lm_head.weight": embedding + other}, self.path("copies/model.safetensors"), metadata={"format": "pt"})
                done = self.tool("ls", self.path("copies"), f"view={view}")
                self.assertEqual(done.returncode, other, done.stderr)
                self.assertEqual("allow_leftover leaves it out" in done.stderr, bool(other))
                self.assertEqual(self.names(self.path("copies"), view, "allow_leftover"), want)
                run = self.export(self.path("copies"), self.path(f"{view}-{other}"), f"view={view}", "allow_leftover")
                self.same(read_all(self.export(run, run + ".back", f"base={source}")), tensors, view)

    def names(self, source, *options):
        done = self.tool("ls", "--json", source, f"view={options[0]}", *options[1:])
        self.assertEqual(done.returncode, 0, done.stderr)
        return [t["name"] for t in json.loads(done.stdout)]

    def tool(self, command, *args):
        return subprocess.run([CKPT, command, *[x for a in args for x in (["-o", a] if "=" in a or a == "allow_leftover" else [a])]],
                              capture_output=True, text=True)

    def test_words_of_the_tool(self):
        source, _, _ = self.model("model", *FAMILIES[0])
        done = self.tool("explain", source, "decoder.final_layernorm.weight", "view=megatron", "tp=2")
        self.assertIn("A  all  from", done.stdout)
        done = self.tool("export", source, self.path("refused"), "view=nanotron", "--no-weights")
        self.assertIn("--no-weights: view=nanotron is written whole", done.stderr)
        self.assertEqual(done.returncode, 2)


if not os.path.isdir(os.path.join(FIXTURES, "megatron")):  # the collection is more than this tree has
    del Megatron.test_real_checkpoints, Megatron.test_legacy_of_real_checkpoints, Megatron.test_objects_of_norms


if __name__ == "__main__":
    unittest.main()
