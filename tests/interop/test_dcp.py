# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that torch.distributed.checkpoint writes here and now (.metadata and .distcp), from 2 to 8 processes on random meshes:
every tensor of the raw view has the bytes that were saved; a model is to the byte what save_pretrained writes; torchtitan's names give
the model that was renamed; a lost file is named."""

import os
import random
import shutil
import sys
import tempfile
import unittest

try:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers as tf
    from safetensors.torch import load_file, save_file

    import dcp_writer as writer
    from tensor_case import CASES, SEED, TensorCase, export, randomise, read_all
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

tf.utils.logging.disable_progress_bar()
tf.utils.logging.set_verbosity_error()
SIZES = dict(vocab_size=101, hidden_size=48, intermediate_size=72, num_hidden_layers=12, num_attention_heads=6, num_key_value_heads=3,
             head_dim=8, max_position_embeddings=64, bos_token_id=1, eos_token_id=2)


class Dcp(TensorCase):
    def export(self, run, *options):
        done = export(run, run + ".out", *options)
        self.assertEqual(done.returncode, 0, f"{run}: {done.stderr}")
        return run + ".out"

    # ---- any tensors ----

    def check_random(self, world, seed, run):
        what = f"world {world}, CKPTFS_SEED={SEED}, case {seed}"
        want = {f"state.model.{name}": t for name, t in writer.full_tensors(seed, world).items()}
        self.same(read_all(self.export(run, "view=raw")), want, what)
        self.check_lost(seed, run, want)

    def check_lost(self, seed, run, want):
        files = sorted(f for f in os.listdir(run) if f.endswith(".distcp"))
        lost = random.Random(seed).choice(files)
        os.rename(os.path.join(run, lost), self.path("lost"))
        done = export(run, run + ".lost", "view=raw")
        if done.returncode == 0:  # it held objects only
            self.same(read_all(run + ".lost"), want, f"{run} without {lost}")
        else:
            self.assertIn(lost, done.stderr)

    def test_random_meshes(self):
        for world in (2, 3, 4, 8):
            seeds = [SEED * 1000 + world * 100 + i for i in range(CASES)]
            runs = [self.path(f"{world}-{s}") for s in seeds]
            writer.run(world, [{"kind": "random", "storage": "dcp", "dir": d, "seed": s} for s, d in zip(seeds, runs)])
            for seed, run in zip(seeds, runs):
                self.check_random(world, seed, run)

    def test_items_that_torch_compresses(self):
        """torch's ZStandard extension, which needs the module zstandard."""
        try:
            import zstandard  # noqa: F401
        except ImportError as e:
            self.skipTest(str(e))
        for world in (1, 3):
            seeds = [SEED * 1000 + 50 + world * 10 + i for i in range(CASES)]
            jobs = [{"kind": "random", "storage": "dcp", "dir": self.path(f"z{world}-{s}"), "seed": s, "compressed": True} for s in seeds]
            writer.run(world, jobs)
            for job in jobs:
                self.check_random(world, job["seed"], job["dir"])

    def test_files_of_ranks(self):
        """One torch.save file of each rank, as verl's."""
        for world in (2, 4):
            jobs = [{"kind": "ranks", "old": old, "dir": self.path(f"{world}-{old}-{i}"), "seed": SEED * 1000 + world * 10 + i}
                    for i in range(CASES) for old in (False, True)]
            writer.run(world, jobs)
            for job in jobs:
                want = {n: t for n, t in writer.full_tensors(job["seed"], world).items() if t.dim()}
                self.same(read_all(self.export(job["dir"], "view=raw")), want, f"world {world}, {job}")

    # ---- models ----

    def make_model(self, name, config, **job):
        dtype = torch.bfloat16 if job.get("dtype") else torch.float32
        model = randomise(tf.AutoModelForCausalLM.from_config(config, dtype=dtype))
        base, want, run = self.path(name), self.path(name + ".want"), self.path(name + ".run")
        model.save_pretrained(base)
        tf.AutoModelForCausalLM.from_pretrained(base, dtype="auto").save_pretrained(want, max_shard_size="100KB")
        return model, base, want, {"kind": "model", "storage": "dcp", "dir": run, "model": base, "seed": SEED, **job}

    def check_models(self, world, *models):
        """A run that trains F32 masters of a BF16 model has the model's own dtype in its view."""
        made = [self.make_model(name, config, **job) for name, config, job in models]
        writer.run(world, [job for *_, job in made])
        for model, base, want, job in made:
            out = self.export(job["dir"], f"base={base}", "max_shard_size=100KB")
            self.same(read_all(out), read_all(want), base)
            with open(os.path.join(out, "config.json"), "rb") as a, open(os.path.join(want, "config.json"), "rb") as b:
                self.assertEqual(a.read(), b.read(), base)
            loaded = tf.AutoModelForCausalLM.from_pretrained(out, dtype="auto").eval()
            ids = torch.arange(7)[None]
            self.assertTrue(torch.equal(loaded(ids).logits, model.eval()(ids).logits), base)

    def test_models(self):
        torch.manual_seed(SEED)
        moe = dict(num_experts=12, num_local_experts=12, num_experts_per_tok=2, moe_intermediate_size=24)
        self.check_models(3, ("llama", tf.LlamaConfig(**SIZES), {}), ("qwen3-moe", tf.Qwen3MoeConfig(**SIZES, **moe), {"dtype": "float32"}))
        self.check_models(4, ("llama-tied", tf.LlamaConfig(**SIZES, tie_word_embeddings=True), {"mesh": ["hsdp", 2]}),
                          ("qwen3", tf.Qwen3Config(**SIZES), {"mesh": ["tp", 2]}))
        self.check_models(6, ("llama-tp", tf.LlamaConfig(**SIZES), {"mesh": ["tp", 3], "dtype": "float32"}),
                          ("mixtral", tf.MixtralConfig(**SIZES, num_local_experts=12, num_experts_per_tok=2), {"mesh": ["tp", 3]}))

    def test_a_split_follows_the_state_dict_that_was_saved(self):
        """Ranks share the writing of what they all hold, and a pipeline's stages come in the order of the ranks."""
        torch.manual_seed(SEED)
        jobs = []
        for name, mesh in (("every-rank", ["ddp", 1]), ("two-stages", ["pp", 2]), ("four-stages", ["pp", 4])):
            model, base, want, job = self.make_model(name, tf.LlamaConfig(**SIZES), mesh=mesh)
            model.save_pretrained(want, max_shard_size="100KB")
            lent = self.path(name + ".config")
            os.makedirs(lent)
            shutil.copy(os.path.join(want, "config.json"), lent)
            jobs.append((lent, want, job))
        writer.run(4, [job for *_, job in jobs])
        for lent, want, job in jobs:
            out = self.export(job["dir"], f"base={lent}", "max_shard_size=100KB")
            for file in [f for f in os.listdir(want) if f != "generation_config.json"]:
                with open(os.path.join(out, file), "rb") as a, open(os.path.join(want, file), "rb") as b:
                    self.assertEqual(a.read(), b.read(), f"{lent}: {file}")

    # ---- verl ----

    def save_verl(self, world, jobs, **sizes):
        model = randomise(tf.LlamaForCausalLM(tf.LlamaConfig(**{**SIZES, **sizes})))
        base = self.path(f"verl-{len(os.listdir(self.tmp))}")
        model.save_pretrained(base)
        jobs = [{"kind": "verl", "dir": f"{base}.{n}", "model": base, "seed": SEED + n, **job} for n, job in enumerate(jobs)]
        writer.run(world, jobs)
        return base, jobs

    def test_verl_under_fsdp1_and_fsdp2(self):
        torch.manual_seed(SEED)
        ways = [dict(fsdp=1, orig=orig, device_mesh=mesh, wrap=wrap) for orig in (False, True) for mesh in (False, True) for wrap in (None, "LlamaDecoderLayer")]
        ways += [dict(fsdp=2, wrap="LlamaDecoderLayer"), dict(fsdp=2, wrap="LlamaDecoderLayer", replicas=2), dict(fsdp=1, orig=True, device_mesh=True, wrap="LlamaDecoderLayer", replicas=2)]
        for world, sizes, some in ((2, {"tie_word_embeddings": True}, ways[:-2]), (4, {}, ways[-3:])):
            base, jobs = self.save_verl(world, some, num_hidden_layers=2, **sizes)
            for job in jobs:
                self.same(read_all(self.export(job["dir"])), read_all(base), f"world {world}, {job}")

    def test_lora_of_verl(self):
        """The adapter with the config that verl's merger writes, the merged model as PEFT merges it, and the base; or the adapter's tensors only."""
        import json

        import peft

        torch.manual_seed(SEED)
        targets = ["q_proj", "down_proj"]
        common = dict(wrap="LlamaDecoderLayer", lora=targets)
        base, jobs = self.save_verl(2, [dict(fsdp=2, **common), dict(fsdp=1, orig=True, device_mesh=True, **common), dict(fsdp=2, lora_only=True, **common)], num_hidden_layers=2)
        for job in jobs:
            what = str(job)
            model = writer.verl_model(job)
            want, merged = self.path("want"), self.path("merged")
            model.save_pretrained(want)
            out = self.export(job["dir"])
            self.same(read_all(out), read_all(want), what)
            with open(os.path.join(out, "adapter_config.json")) as f:
                config = json.load(f)
            self.assertEqual((config["r"], config["lora_alpha"], sorted(config["target_modules"]), config["task_type"], config["peft_type"]),
                             (4, 12, sorted(targets), "CAUSAL_LM", "LORA"))
            loaded = peft.PeftModel.from_pretrained(tf.AutoModelForCausalLM.from_pretrained(base), out)
            ids = torch.arange(7)[None]
            self.assertTrue(torch.equal(loaded.eval()(ids).logits, model.eval()(ids).logits), what)
            model.merge_and_unload().save_pretrained(merged)
            for n, options in enumerate([["lora=merge", f"base={base}"]] + [["lora=merge"], ["lora=base"]][:0 if job.get("lora_only") else 2]):
                done = export(job["dir"], f"{out}.{n}", *options)
                self.assertEqual(done.returncode, 0, f"{what} {options}: {done.stderr}")
                self.same(read_all(f"{out}.{n}"), read_all(base if options == ["lora=base"] else merged), f"{what} {options}")

    # ---- torchtitan ----

    def pairs(self, t, heads):
        """Rows of rotary halves as rows of rotary pairs."""
        return t.reshape(heads, 2, -1, *t.shape[1:]).transpose(1, 2).reshape(t.shape)

    def titan(self, state, config, style):
        """The inverse of torchtitan's own export, written from its tables; style: new, old or fused."""
        out, kind = {}, config.model_type
        qkv = "" if style == "old" else "qkv_linear."
        experts = "experts" if style == "old" else "routed_experts.inner_experts"
        mark = lambda s: "" if style == "old" else s
        layers = config.num_hidden_layers
        for name, t in state.items():
            parts = name.split(".")
            if parts[0] == "language_model":
                parts = parts[1:]
            if parts[0] == "lm_head":
                out["output.weight" if style == "old" else "lm_head.weight"] = t
            elif parts[1] == "embed_tokens":
                out["tok_embeddings.weight"] = t
            elif parts[1] == "norm":
                out["norm.weight"] = t
            else:
                layer, leaf = int(parts[2]), ".".join(parts[3:])
                at = f"layers.{layer}." if layer < layers else f"mtp_layers.{layer - layers}."
                self.titan_layer(out, at, leaf, t, config, qkv, experts, mark)
        if style == "fused":
            self.fuse_qkv(out, config)
        return out

    def titan_layer(self, out, at, leaf, t, config, qkv, experts, mark):
        renamed = {
            "input_layernorm.weight": "attention_norm.weight", "post_attention_layernorm.weight": "ffn_norm.weight",
            "self_attn.o_proj.weight": "attention.wo.weight", "self_attn.o_proj.bias": "attention.wo.bias", "self_attn.sinks": "attention.sinks",
            "self_attn.q_norm.weight": "attention.q_norm.weight", "self_attn.k_norm.weight": "attention.k_norm.weight",
            "self_attn.q_a_proj.weight": "attention.wq_a.weight", "self_attn.q_a_layernorm.weight": "attention.q_norm.weight",
            "self_attn.q_b_proj.weight": "attention.wq_b.weight", "self_attn.kv_a_proj_with_mqa.weight": "attention.wkv_a.weight",
            "self_attn.kv_a_layernorm.weight": "attention.kv_norm.weight", "self_attn.kv_b_proj.weight": "attention.wkv_b.weight",
            "mlp.gate.weight": "moe.router.gate.weight", "mlp.router.weight": "moe.router.gate.weight", "mlp.router.bias": "moe.router.gate.bias",
            "feed_forward.router.weight": "moe.router.gate.weight", "mlp.gate.e_score_correction_bias": "moe.expert_bias" + mark("_E"),
            "eh_proj.weight": "eh_proj.weight", "enorm.weight": "enorm.weight", "hnorm.weight": "hnorm.weight",
            "shared_head.norm.weight": "mtp_norm.weight",
        }
        for hf, own in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
            renamed[f"mlp.{hf}_proj.weight"] = renamed[f"feed_forward.{hf}_proj.weight"] = f"feed_forward.{own}.weight"
            for shared in ("mlp.shared_experts", "feed_forward.shared_expert"):
                renamed[f"{shared}.{hf}_proj.weight"] = f"moe.shared_experts.{own}.weight"
        own = renamed.get(leaf)
        words = leaf.split(".")
        if words[0] == "self_attn" and words[1] in ("q_proj", "k_proj", "v_proj"):
            which = words[1][0]
            if config.model_type == "llama" and which in "qk":
                t = self.pairs(t, config.num_attention_heads if which == "q" else config.num_key_value_heads)
            module = "" if config.model_type == "deepseek_v3" else qkv
            own = f"attention.{module}w{which}.{words[2]}"
        elif leaf == "feed_forward.experts.down_proj":
            own, t = f"moe.{experts}.w2{mark('_EDF')}", t.transpose(1, 2).contiguous()
        elif leaf == "feed_forward.experts.gate_up_proj":
            w1, w3 = t.transpose(1, 2).chunk(2, dim=1)
            out[f"{at}moe.{experts}.w3{mark('_EFD')}"] = w3.contiguous()
            own, t = f"moe.{experts}.w1{mark('_EFD')}", w1.contiguous()
        elif words[:2] == ["mlp", "experts"] and len(words) == 3:
            own = {"gate_up_proj": "mlp1_weight" + mark("_EGD"), "gate_up_proj_bias": "mlp1_bias" + mark("_EG"),
                   "down_proj": "mlp2_weight" + mark("_EDF"), "down_proj_bias": "mlp2_bias" + mark("_ED")}[words[2]]
            own, t = f"moe.{experts}.{own}", t.transpose(1, 2).contiguous() if t.dim() == 3 else t
        elif words[:2] == ["mlp", "experts"]:
            own = {"gate_proj": "w1" + mark("_EFD"), "up_proj": "w3" + mark("_EFD"), "down_proj": "w2" + mark("_EDF")}[words[3]]
            whole = out.setdefault(f"{at}moe.{experts}.{own}", torch.empty(12, *t.shape, dtype=t.dtype))
            whole[int(words[2])] = t
            return
        out[at + own] = t

    def fuse_qkv(self, out, config):
        groups, d = config.num_key_value_heads, config.head_dim
        for name in [n for n in out if ".qkv_linear.wq." in n]:
            q, k, v = (out.pop(name.replace(".wq.", f".w{w}.")) for w in "qkv")
            parts = [t.reshape(groups, -1, d, *t.shape[1:]) for t in (q, k, v)]
            out[name.replace(".wq.", ".wqkv.")] = torch.cat(parts, 1).reshape(-1, *q.shape[1:])

    def make_titan(self, name, config, style, more=None):
        model = randomise(tf.AutoModelForCausalLM.from_config(config))
        base, run = self.path(name), self.path(name + ".run")
        model.save_pretrained(base)
        want = read_all(base) | (more or {})
        os.remove(os.path.join(base, "model.safetensors"))
        if config.model_type == "llama4_text":
            want = {f"language_model.{n}": t for n, t in want.items()}
        save_file(self.titan(want, config, style), run + ".st")
        return base, want, {"kind": "state", "dir": run, "state": run + ".st", "seed": SEED}

    def check_titans(self, world, *models):
        made = [self.make_titan(*m) for m in models]
        writer.run(world, [job for *_, job in made])
        for base, want, job in made:
            self.same(read_all(self.export(job["dir"], f"base={base}")), want, base)

    def mtp(self, config):
        """What a layer of multi-token prediction has in DeepSeek's repository, beside a layer's tensors."""
        h, n = config.hidden_size, config.num_hidden_layers
        model = randomise(tf.AutoModelForCausalLM.from_config(config))
        with tempfile.TemporaryDirectory() as tmp:
            model.save_pretrained(tmp)
            last = {k: v for k, v in read_all(tmp).items() if k.startswith(f"model.layers.{n - 1}.")}
        more = {k.replace(f"layers.{n - 1}.", f"layers.{n}."): v for k, v in last.items()}
        more |= {f"model.layers.{n}.{k}.weight": torch.randn(h) for k in ("enorm", "hnorm", "shared_head.norm")}
        return more | {f"model.layers.{n}.eh_proj.weight": torch.randn(h, 2 * h)}

    def test_torchtitan(self):
        torch.manual_seed(SEED)
        moe = dict(num_experts=12, num_local_experts=12, num_experts_per_tok=2, moe_intermediate_size=24)
        mla = {k: v for k, v in SIZES.items() if k not in ("head_dim", "num_key_value_heads")} | dict(
            n_routed_experts=12, num_experts_per_tok=2, moe_intermediate_size=24, n_shared_experts=2, first_k_dense_replace=2, kv_lora_rank=16,
            qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, n_group=2, topk_group=1, num_nextn_predict_layers=1)
        llama, oss = tf.LlamaConfig(**SIZES), tf.GptOssConfig(**SIZES, num_local_experts=12, num_experts_per_tok=2)
        deepseek = tf.DeepseekV3Config(**mla, q_lora_rank=24)
        for world, style in ((2, "new"), (3, "old"), (4, "fused")):
            models = [("llama3", llama), ("qwen3-moe", tf.Qwen3MoeConfig(**SIZES, **moe)), ("gpt-oss", oss), ("qwen3", tf.Qwen3Config(**SIZES))]
            models = [(f"{name}-{style}", config, style) for name, config in models]
            if style == "new":
                models += [("llama3-tied", tf.LlamaConfig(**SIZES, tie_word_embeddings=True), style),
                           ("deepseek-mtp", deepseek, style, self.mtp(deepseek))]
            if style == "old":
                models += [("deepseek", tf.DeepseekV3Config(**mla, q_lora_rank=None), style),
                           ("llama4", tf.Llama4TextConfig(**SIZES, intermediate_size_mlp=96, num_local_experts=12, interleave_moe_layer_step=2), style)]
            self.check_titans(world, *models)


if __name__ == "__main__":
    unittest.main()
