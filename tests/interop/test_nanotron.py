# SPDX-License-Identifier: Apache-2.0
"""Random nanotron runs against transformers: every weight file and index of an export is, byte for byte, what from_pretrained and
save_pretrained write; config.json loads; the mounted model gives the same logits."""

import contextlib
import gc
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

try:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers as tf
    from safetensors import safe_open
    from safetensors.torch import load_file

    import nanotron_writer as nt
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

tf.utils.logging.disable_progress_bar()
tf.utils.logging.set_verbosity_error()
BIN = os.path.join(os.environ.get("CKPTFS_BUILD", "build/dev"), "fs")
SEED = int(os.environ.get("CKPTFS_SEED", "1"))

COMMON = dict(vocab_size=96, hidden_size=64, intermediate_size=48, num_hidden_layers=12, num_attention_heads=8,
              num_key_value_heads=4, max_position_embeddings=64, bos_token_id=1, eos_token_id=2)
BASE_CONFIG = {"bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "initializer_range": 0.02,
               "max_position_embeddings": 64, "pad_token_id": None, "pretraining_tp": 1, "rms_norm_eps": 1e-06,
               "rope_scaling": None, "rope_theta": 10000.0, "use_cache": True}


def nt_config(cfg, marker, **more):
    out = dict(BASE_CONFIG, hidden_size=cfg.hidden_size, intermediate_size=cfg.intermediate_size,
               num_attention_heads=cfg.num_attention_heads, num_hidden_layers=cfg.num_hidden_layers,
               num_key_value_heads=cfg.num_key_value_heads, tie_word_embeddings=cfg.tie_word_embeddings,
               vocab_size=cfg.vocab_size, rope_interleaved=False)
    out[marker] = True
    out.update(more)
    return {k: v for k, v in out.items() if v != "absent"}


def save_oracle(model_class, cfg, dtype, seed, path, max_shard_size):
    """Write a random model the official way; returns its tensors under their saved names."""
    with tempfile.TemporaryDirectory() as first:
        model = model_class(cfg).to(dtype)
        nt.random_(model, seed)
        model.save_pretrained(first)
        model_class.from_pretrained(first, dtype="auto").save_pretrained(path, max_shard_size=max_shard_size)
    tensors = {}
    for name in os.listdir(path):
        if name.endswith(".safetensors"):
            tensors.update(load_file(os.path.join(path, name)))
    return tensors


def weights(path):
    """{file: sha256} of the weight files and the index."""
    found = {}
    for name in sorted(os.listdir(path)):
        if ".safetensors" in name:
            with open(os.path.join(path, name), "rb") as f:
                found[name] = hashlib.sha256(f.read()).hexdigest()
    return found


def run_tool(*args):
    done = subprocess.run([os.path.join(BIN, "ckpt"), *args], capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(f"ckpt {' '.join(args)}: {done.stderr}")
    return done.stdout


@contextlib.contextmanager
def mounted(run, *options):
    at = tempfile.mkdtemp()
    args = [os.path.join(BIN, "ckptfs"), run, at]
    for o in options:
        args += ["-o", o]
    subprocess.run(args, check=True)
    try:
        yield at
    finally:
        subprocess.run(["fusermount3", "-u", at], check=True)
        for _ in range(50):
            with contextlib.suppress(OSError):
                os.rmdir(at)
                break
            time.sleep(0.1)


def logits(path, ids):
    model = tf.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        found = model.eval()(ids).logits.clone()
    del model
    gc.collect()  # models have cycles, and map the files
    return found


class Nanotron(unittest.TestCase):
    def setUp(self):
        self.tmp = tempfile.mkdtemp()
        self.run_dir = os.path.join(self.tmp, "run")
        self.oracle = os.path.join(self.tmp, "oracle")
        self.rng = random.Random(f"{SEED} {self.id()}")

    def tearDown(self):
        shutil.rmtree(self.tmp)

    def check(self, options=(), max_shard_size=None, same_logits=True):
        out = os.path.join(self.tmp, "out")
        opts = list(options) + ([f"max_shard_size={max_shard_size}"] if max_shard_size else [])
        run_tool("export", self.run_dir, out, *[x for o in opts for x in ("-o", o)])
        self.assertEqual(weights(out), weights(self.oracle))
        cfg = tf.AutoConfig.from_pretrained(out)
        oracle_cfg = tf.AutoConfig.from_pretrained(self.oracle)
        self.assertEqual(cfg.architectures, oracle_cfg.architectures)
        self.assertEqual(str(cfg.dtype), str(oracle_cfg.dtype))
        if not os.path.exists("/dev/fuse"):
            return
        with mounted(self.run_dir, *opts) as at:
            latest = os.path.join(at, "latest") if os.path.exists(os.path.join(at, "latest")) else at  # one checkpoint, not a run
            self.assertEqual(weights(latest), weights(self.oracle))
            for name in weights(self.oracle):
                if name.endswith(".safetensors"):
                    self.compare_slices(os.path.join(latest, name), os.path.join(self.oracle, name))
            if same_logits:
                ids = torch.arange(24).reshape(2, 12) * 3 % 96
                ours, theirs = logits(latest, ids), logits(self.oracle, ids)
                self.assertTrue(torch.isfinite(ours).all())
                self.assertTrue(torch.equal(ours, theirs), "logits differ")

    def compare_slices(self, ours, theirs):
        with safe_open(ours, "pt") as a, safe_open(theirs, "pt") as b:
            self.assertEqual(sorted(a.keys()), sorted(b.keys()))
            for name in self.rng.sample(sorted(a.keys()), min(5, len(a.keys()))):
                x, y = a.get_slice(name), b.get_slice(name)
                lo = self.rng.randrange(x.get_shape()[0])
                self.assertTrue(torch.equal(x[lo:lo + 3], y[lo:lo + 3]), name)

    def test_llama_everywhere(self):
        """TP x PP, tied or not, every way in which the rotary layout is recorded, every spelling of file names."""
        rounds = [("absent", True), (True, True), (False, False)]
        for n, (key, interleaved) in enumerate(rounds):
            with self.subTest(rope_interleaved=key):
                shutil.rmtree(self.tmp)
                os.makedirs(self.tmp)
                tie, tp, pp = n % 2 == 0, self.rng.choice([1, 2, 4]), self.rng.choice([1, 2, 3])
                dtype = self.rng.choice([torch.bfloat16, torch.float32, torch.float16])
                cfg = tf.LlamaConfig(**COMMON, tie_word_embeddings=tie)
                size = self.rng.choice(["20KB", "100KB", "10MB"])
                sd = save_oracle(tf.LlamaForCausalLM, cfg, dtype, n, self.oracle, size)
                params = nt.llama_like(sd, cfg, interleaved)
                nt.write_run(self.run_dir, 20, params, nt_config(cfg, "is_llama_config", rope_interleaved=key), tp, pp, 12,
                             version=self.rng.choice(["1.2", "1.3", "1.4", "1.5", None]), numpy2=n == 1, broken=n == 2)
                self.check(max_shard_size=size)

    def test_llama_saved_inside_ddp_with_its_config_in_yaml_only(self):
        cfg = tf.LlamaConfig(**COMMON, tie_word_embeddings=False)
        sd = save_oracle(tf.LlamaForCausalLM, cfg, torch.bfloat16, 5, self.oracle, "50GB")
        config = nt_config(cfg, "is_llama_config")
        yaml = "model:\n  dtype: bfloat16\n  model_config:\n" + "".join(
            f"    {k}: {'1.0e-06' if k == 'rms_norm_eps' else json.dumps(v)}\n" for k, v in config.items())
        nt.write_run(self.run_dir, 7, nt.llama_like(sd, cfg), config, 2, 1, 12, config_yaml=yaml, model_config_json=False,
                     prefix="module.")
        self.check()

    def test_qwen2_with_bias(self):
        cfg = tf.Qwen2Config(**COMMON, tie_word_embeddings=True)
        sd = save_oracle(tf.Qwen2ForCausalLM, cfg, torch.bfloat16, 6, self.oracle, "64KB")
        for interleaved in (False, True):
            shutil.rmtree(self.run_dir, ignore_errors=True)
            shutil.rmtree(os.path.join(self.tmp, "out"), ignore_errors=True)
            config = nt_config(cfg, "is_qwen2_config", attention_bias=True, rope_interleaved=interleaved,
                               sliding_window_size=None, no_rope_layer=None, moe_config=None, _use_qkv_packed=True)
            nt.write_run(self.run_dir, 3, nt.llama_like(sd, cfg, interleaved), config, 4, 2, 12)
            self.check(max_shard_size="64KB")

    def test_mistral_is_qwen_with_a_window(self):
        cfg = tf.MistralConfig(**COMMON, sliding_window=8, tie_word_embeddings=False)
        sd = save_oracle(tf.MistralForCausalLM, cfg, torch.bfloat16, 7, self.oracle, "50GB")
        config = nt_config(cfg, "is_qwen2_config", attention_bias=False, sliding_window_size=8, no_rope_layer=None,
                           moe_config=None, _use_qkv_packed=True)
        nt.write_run(self.run_dir, 3, nt.llama_like(sd, cfg), config, 2, 2, 12)
        self.check()

    def test_smollm3_is_qwen_with_layers_without_positions(self):
        for window in (None, 8):
            shutil.rmtree(self.tmp)
            os.makedirs(self.tmp)
            rope = [0 if (i + 1) % 4 == 0 else 1 for i in range(12)]
            kw = {} if window is None else dict(use_sliding_window=True, sliding_window=window, layer_types=[
                "sliding_attention" if r else "full_attention" for r in rope])
            cfg = tf.SmolLM3Config(**COMMON, no_rope_layer_interval=4, no_rope_layers=rope, tie_word_embeddings=True,
                                   pad_token_id=None, rope_parameters={"rope_theta": 10000.0, "rope_type": "default"}, **kw)
            sd = save_oracle(tf.SmolLM3ForCausalLM, cfg, torch.bfloat16, 8, self.oracle, "50GB")
            config = nt_config(cfg, "is_qwen2_config", attention_bias=False, sliding_window_size=window, no_rope_layer=4,
                               moe_config=None, _use_qkv_packed=True)
            nt.write_run(self.run_dir, 3, nt.llama_like(sd, cfg), config, 1, 2, 12)
            self.check()

    def moe_config(self, **kw):
        return tf.Qwen2MoeConfig(**COMMON, num_experts=12, num_experts_per_tok=2, moe_intermediate_size=24,
                                 shared_expert_intermediate_size=40, decoder_sparse_step=1, tie_word_embeddings=False, **kw)

    def nt_moe(self, cfg, layers, **kw):
        return dict(num_experts=12, top_k=2, moe_intermediate_size=24, shared_expert_intermediate_size=40,
                    router_aux_loss_coef=cfg.router_aux_loss_coef, layers=layers, enable_shared_expert=True,
                    token_dispatcher_type="alltoall", **kw)

    def test_qwen2_moe(self):
        dense = [0, 5]
        cfg = self.moe_config(mlp_only_layers=dense, norm_topk_prob=False)
        size = "60KB"
        # the router is stored in F32: as it is in an F32 model, and cast in a BF16 one
        for dtype, options in ((torch.float32, ()), (torch.bfloat16, ("dtype=bfloat16",))):
            shutil.rmtree(self.tmp)
            os.makedirs(self.tmp)
            sd = save_oracle(tf.Qwen2MoeForCausalLM, cfg, dtype, 9, self.oracle, size)
            config = nt_config(cfg, "is_qwen2_config", attention_bias=True, sliding_window_size=None, no_rope_layer=None,
                               moe_config=self.nt_moe(cfg, [i for i in range(12) if i not in dense]), _use_qkv_packed=True)
            nt.write_run(self.run_dir, 3, nt.llama_like(sd, cfg, moe=nt.moe_main), config, 2, 2, 12, version="1.5")
            self.check(options, size)

    def test_qwen2_moe_of_the_expert_parallel_branch(self):
        cfg = self.moe_config(norm_topk_prob=True, qkv_bias=False)
        sd = save_oracle(tf.Qwen2MoeForCausalLM, cfg, torch.float32, 10, self.oracle, "50GB")
        config = nt_config(cfg, "is_qwen2_config", attention_bias=False, sliding_window_size=None, no_rope_layer=None,
                           moe_config=self.nt_moe(cfg, list(range(12)), moe_impl="transformer_engine",
                                                  moe_router_pre_softmax=False), _use_qkv_packed=True)
        nt.write_run(self.run_dir, 3, nt.llama_like(sd, cfg, moe=nt.moe_branch(3)), config, 1, 2, 12, ep=3)
        self.check()

    def test_starcoder2(self):
        for kv in (4, 1):
            shutil.rmtree(self.tmp)
            os.makedirs(self.tmp)
            cfg = tf.Starcoder2Config(**dict(COMMON, num_key_value_heads=kv), sliding_window=None, use_bias=True,
                                      tie_word_embeddings=True, attention_dropout=0.1, residual_dropout=0.1, embedding_dropout=0.1)
            sd = save_oracle(tf.Starcoder2ForCausalLM, cfg, torch.bfloat16, 11, self.oracle, "30KB")
            config = {"activation_function": "gelu_pytorch_tanh", "attn_pdrop": 0.1, "bos_token_id": 1, "embd_pdrop": 0.1,
                      "eos_token_id": 2, "grouped_query": kv > 1, "multi_query": kv == 1, "hidden_size": 64,
                      "initializer_range": 0.02, "intermediate_size": 48, "is_starcoder2_config": True,
                      "layer_norm_epsilon": 1e-05, "max_position_embeddings": 64, "num_attention_heads": 8,
                      "num_hidden_layers": 12, "num_kv_heads": kv if kv > 1 else None, "resid_pdrop": 0.1, "rope_theta": 10000,
                      "sliding_window_size": None, "use_position_embeddings": False, "use_rotary_embeddings": True,
                      "global_attn_layers": [], "vocab_size": 96}
            nt.write_run(self.run_dir, 3, nt.starcoder2(sd, cfg), config, 2, 3, 12)
            self.check(max_shard_size="30KB")

    def test_mamba(self):
        cfg = tf.MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=12, state_size=16, expand=2, conv_kernel=4,
                             tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, pad_token_id=0)
        sd = save_oracle(tf.MambaForCausalLM, cfg, torch.float32, 12, self.oracle, "40KB")
        config = {"is_mamba_config": True, "d_model": 32, "num_hidden_layers": 12, "vocab_size": 96, "ssm_cfg": None,
                  "rms_norm": True, "fused_add_norm": True, "residual_in_fp32": True, "pad_vocab_size_multiple": 8,
                  "dtype": "float32", "rms_norm_eps": 1e-05, "pad_token_id": None}
        nt.write_run(self.run_dir, 3, nt.mamba(sd, cfg), config, 2, 2, 12)
        self.check(max_shard_size="40KB")

    def alone(self, model_class, cfg, config, interleaved=False, moe=None, made=None):
        """Weights as save_weights writes them, without the files around model/, and the base that says what they are."""
        shutil.rmtree(self.tmp)
        os.makedirs(self.tmp)
        sd = save_oracle(model_class, cfg, torch.bfloat16, 15, self.oracle, "50GB")
        params = made(sd, cfg) if made else nt.llama_like(sd, cfg, interleaved, moe)
        nt.write_params(params, self.run_dir, 2, 2, 12)
        return "base=" + self.oracle

    def test_weights_alone_become_the_model_that_a_base_names(self):
        """config.json is the base's, to the byte: the checkpoint says nothing of its own."""
        rope = {"rope_type": "default", "rope_theta": 500000.0}
        dense = dict(COMMON, tie_word_embeddings=False, rope_parameters=rope)
        no_rope = [int((i + 1) % 4 != 0) for i in range(12)]
        cases = ((tf.LlamaForCausalLM, tf.LlamaConfig(**dense), "half"), (tf.LlamaForCausalLM, tf.LlamaConfig(**dense), "interleaved"),
                 (tf.Qwen2ForCausalLM, tf.Qwen2Config(**dense), "half"), (tf.MistralForCausalLM, tf.MistralConfig(**dense, sliding_window=8), "half"),
                 (tf.SmolLM3ForCausalLM, tf.SmolLM3Config(**dense, no_rope_layer_interval=4, no_rope_layers=no_rope, pad_token_id=None), "half"),
                 (tf.Starcoder2ForCausalLM, tf.Starcoder2Config(**dict(COMMON, rope_parameters=rope), use_bias=True, tie_word_embeddings=True), None))
        for model_class, cfg, order in cases:
            with self.subTest(model=model_class.__name__, order=order):
                base = self.alone(model_class, cfg, None, order == "interleaved", made=None if order else nt.starcoder2)
                options = [base] + ([f"rope={order}"] if order else [])
                self.check(options, same_logits=False)
                with open(os.path.join(self.oracle, "config.json")) as a, open(os.path.join(self.tmp, "out", "config.json")) as b:
                    self.assertEqual(json.load(a), json.load(b))

    def test_weights_alone_of_experts(self):
        for bias in (True, False):
            cfg = self.moe_config(mlp_only_layers=[0, 5], norm_topk_prob=False, qkv_bias=bias)
            base = self.alone(tf.Qwen2MoeForCausalLM, cfg, None, moe=nt.moe_main)
            self.check([base, "rope=half", "dtype=bfloat16"], same_logits=False)

    def test_weights_alone_in_another_view(self):
        """view=nanotron says then what was missing, so that it is read without a base."""
        options = [self.alone(tf.LlamaForCausalLM, tf.LlamaConfig(**COMMON, tie_word_embeddings=False), None, True), "rope=interleaved"]
        made, again = os.path.join(self.tmp, "made"), os.path.join(self.tmp, "again")
        run_tool("export", self.run_dir, made, *[x for o in (*options, "view=nanotron", "tp=4") for x in ("-o", o)])
        run_tool("export", made, again)
        self.assertEqual(weights(again), weights(self.oracle))

    def test_weights_alone_say_what_they_lack(self):
        base = self.alone(tf.LlamaForCausalLM, tf.LlamaConfig(**COMMON, tie_word_embeddings=False), None)

        def refused(*words, at=self.run_dir, options=()):
            with self.assertRaises(AssertionError) as e:
                run_tool("ls", at, *[x for o in options for x in ("-o", o)])
            for word in words:
                self.assertIn(word, str(e.exception))
        refused("weights alone", "model_config.json", "base=DIR", "view=raw")
        refused("rows of q and k", "rope=half", "rope=interleaved", options=[base])
        self.assertIn("model.decoder.11.pp_block.attn.qkv_proj.weight ", run_tool("ls", self.run_dir, "-o", "view=raw"))
        # the folder of the weights itself means its checkpoint, and not one whose modules lie one folder further down
        self.assertEqual(run_tool("ls", os.path.join(self.run_dir, "model"), "-o", "view=raw"), run_tool("ls", self.run_dir, "-o", "view=raw"))
        loose = os.path.join(self.tmp, "loose", "model")
        shutil.copytree(os.path.join(self.run_dir, "model", "model", "decoder"), os.path.join(loose, "model", "decoder"))
        self.assertIn("model.decoder.0.", run_tool("ls", loose, "-o", "view=raw"))
        # neither a run that lies in a folder of this name, nor other files
        above, other = os.path.join(self.tmp, "above"), os.path.join(self.tmp, "other")
        shutil.copytree(self.run_dir, os.path.join(above, "model", "10"))
        with open(os.path.join(above, "model", "latest.txt"), "w") as f:
            f.write("10")
        refused("folder of runs", "'model'", at=above)
        os.makedirs(os.path.join(other, "model"))
        shutil.copy(os.path.join(self.oracle, "model.safetensors"), os.path.join(other, "model", "model_fp16.safetensors"))
        refused("neither a checkpoint", at=other)

    def test_stale_shards_of_another_topology_are_not_mixed(self):
        cfg = tf.LlamaConfig(**COMMON, tie_word_embeddings=True)
        old = save_oracle(tf.LlamaForCausalLM, cfg, torch.bfloat16, 13, self.oracle, "50GB")
        config = nt_config(cfg, "is_llama_config")
        nt.write_run(self.run_dir, 3, nt.llama_like(old, cfg), config, 4, 1, 12)
        shutil.rmtree(self.oracle)
        new = save_oracle(tf.LlamaForCausalLM, cfg, torch.bfloat16, 14, self.oracle, "50GB")
        nt.write_run(self.run_dir, 3, nt.llama_like(new, cfg), config, 2, 1, 12)
        self.check()


if __name__ == "__main__":
    unittest.main()
