# SPDX-License-Identifier: Apache-2.0
"""Models of every family that Megatron trains, of 12 layers and more, as its containers hold them at random tensor, pipeline, virtual
pipeline and expert parallelism: the view has the weights of save_pretrained to the byte, split into the same files, and what transformers
loads from it computes the same, also where config.json comes from the run's arguments. torch_dist is written by megatron-core of the
folders CKPTFS_MEGATRON (pip install --no-deps --target; several, separated by ':')."""

import copy
import functools
import json
import os
import pickle
import random
import shutil
import sys
import tempfile
import unittest

try:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers as tf
    from safetensors.torch import load_file

    import megatron_writer as writer
    from tensor_case import SEED, TensorCase, export, ranks, read_all
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

tf.utils.logging.disable_progress_bar()
tf.utils.logging.set_verbosity_error()
CORES = [p for p in os.environ.get("CKPTFS_MEGATRON", "").split(":") if os.path.isdir(p)]
DENSE = dict(vocab_size=90, hidden_size=32, intermediate_size=48, num_hidden_layers=12, num_attention_heads=8, num_key_value_heads=4,
             max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0)
MLA = dict(num_key_value_heads=8, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
MOE = dict(moe_intermediate_size=16, num_experts_per_tok=2)
CASES = {
    "llama": ("LlamaConfig", dict(head_dim=8)),
    "llama_tied": ("LlamaConfig", dict(tie_word_embeddings=True)),
    "llama_scaled": ("LlamaConfig", dict(rope_parameters={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                                          "original_max_position_embeddings": 8192, "rope_theta": 500000.0})),
    "mistral": ("MistralConfig", dict(sliding_window=None)),
    "qwen2": ("Qwen2Config", dict(tie_word_embeddings=True)),
    "qwen3": ("Qwen3Config", dict(head_dim=16)),
    "phi3": ("Phi3Config", {}),
    "gemma": ("GemmaConfig", dict(head_dim=8)),
    "gemma2": ("Gemma2Config", dict(head_dim=8, query_pre_attn_scalar=8)),
    "gemma3": ("Gemma3TextConfig", dict(head_dim=8, query_pre_attn_scalar=8)),
    "nemotron": ("NemotronConfig", {}),
    "starcoder2": ("Starcoder2Config", dict(use_bias=True)),
    "mixtral": ("MixtralConfig", dict(num_local_experts=8, num_experts_per_tok=2)),
    "qwen2_moe": ("Qwen2MoeConfig", dict(num_experts=8, shared_expert_intermediate_size=24, **MOE)),
    "qwen3_moe": ("Qwen3MoeConfig", dict(num_experts=8, norm_topk_prob=True, head_dim=16, **MOE)),
    "deepseek_v2": ("DeepseekV2Config", dict(n_routed_experts=8, n_shared_experts=2, first_k_dense_replace=1, **MLA, **MOE)),
    "deepseek_v3": ("DeepseekV3Config", dict(n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=2, n_group=1, topk_group=1, num_nextn_predict_layers=0, **MLA, **MOE)),
    "deepseek_v3_yarn": ("DeepseekV3Config", dict(n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1, n_group=2, topk_group=1, num_nextn_predict_layers=0,
                                                  rope_parameters={"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
                                                                   "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 10000.0}, **MLA, **MOE)),
    "deepseek_v3_direct": ("DeepseekV3Config", dict(n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=0, n_group=1, topk_group=1, num_nextn_predict_layers=0,
                                                    **(MLA | {"q_lora_rank": None}), **MOE)),
    "glm4_moe": ("Glm4MoeConfig", dict(n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1, head_dim=8, num_nextn_predict_layers=0, use_qk_norm=True, attention_bias=True, **MOE)),
    "gpt_oss": ("GptOssConfig", dict(num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=8,
                                     rope_parameters={"rope_type": "default", "rope_theta": 150000.0})),
    "nemotron_h": ("NemotronHConfig", dict(layers_block_type=["linear_attention", "mlp", "full_attention", "moe"] * 3, head_dim=8, mamba_num_heads=8, mamba_head_dim=8,
                                           n_groups=4, ssm_state_size=8, conv_kernel=4, n_routed_experts=8, moe_shared_expert_intermediate_size=16, **MOE)),
}
HALVES = ("llama", "llama_tied", "qwen2", "qwen3", "qwen3_moe", "glm4_moe")  # the hybrid model of Megatron-LM has these too
NEEDS_BASE = ("mistral", "phi3")  # nothing in the checkpoint tells them from llama


def make_config(name):
    kind, more = CASES[name]
    args = DENSE | more
    if name == "nemotron_h":
        del args["num_hidden_layers"]
    return getattr(tf, kind)(**args)


def make_model(name, folder, seed):
    """Saved by save_pretrained; (state dict as in its files, config)."""
    torch.manual_seed(seed)
    model = tf.AutoModelForCausalLM.from_config(make_config(name)).to(torch.bfloat16)
    for key, p in [*model.named_parameters(), *model.named_buffers()]:
        if p.is_floating_point() and key in model.state_dict():
            p.data = (torch.randn(p.shape) * 0.3 + (1.0 if "norm" in key else 0.0)).to(p.dtype)
    for key, p in model.named_buffers():
        if "e_score_correction_bias" in key:
            p.data = p.data.float()
    model.save_pretrained(folder + ".first")
    model = tf.AutoModelForCausalLM.from_pretrained(folder + ".first", dtype="auto")
    model.save_pretrained(folder, max_shard_size="60KB")
    return read_all(folder), model.config


def make_plan(r, container, name, cfg):
    moe = "num_experts_per_tok" in cfg.to_dict() and name != "llama"
    tp = r.choice([1, 2, 4])
    plan = dict(container=container, seed=r.randrange(1 << 30), tp=tp, etp=tp, pp=1, vpp=1, ep=1, pad=r.choice([6, 38]), prefix="", bridge=False, stacked=r.random() < 0.6,
                singleton=False, spec=r.choice(["te", "local", "plain"]), cut_down=r.random() < 0.5, sequential=r.random() < 0.4, grouped=False, share=r.random() < 0.5, halves=False, mtp=0, old=False, centred=False)
    n = len(cfg.layers_block_type) if name == "nemotron_h" else cfg.num_hidden_layers
    if container in ("dist", "zarr"):
        plan.update(prefix=r.choice(["", "", "module.", "model."]), singleton=container == "dist" and r.random() < 0.25, etp=r.choice([1, 2]))
        plan["stacked"] &= not plan["singleton"]
        plan["bridge"] = r.random() < 0.4
        plan["halves"] = name in HALVES and r.random() < 0.3
    if container == "ranks":
        plan.update(pp=r.choice([1, 2, 3]), ep=r.choice([1, 2, 4]) if moe else 1)
        plan["vpp"] = r.choice([1, 2]) if plan["pp"] > 1 else 1
        if moe and plan["ep"] > 1 and tp > 1 and r.random() < 0.4 and plan["ep"] >= tp:
            plan["etp"] = 1
        plan["grouped"] = moe and r.random() < 0.3 and name != "gpt_oss"
        if name == "gpt_oss":  # biases of experts: every rank has the second one whole
            plan["sequential"] = True
        if name in ("llama", "llama_tied", "qwen2", "nemotron", "starcoder2") and r.random() < 0.4:
            plan.update(old=True, spec="plain")
        stages, left = plan["pp"] * plan["vpp"], n
        plan["layers"] = []
        for i in range(stages):  # uneven, now and then without a layer
            k = left if i == stages - 1 else r.randint(0, left - (stages - 1 - i))
            plan["layers"].append(k)
            left -= k
    return plan


class Megatron(TensorCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp()
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        cls.family = staticmethod(functools.cache(cls.family))  # made once for all containers
        cls.theirs = staticmethod(functools.cache(cls.logits))

    @classmethod
    def family(cls, name):
        """(folder of save_pretrained, state dict, config, both pickled) of a random model."""
        hf = os.path.join(cls.folder, name)
        sd, cfg = make_model(name, hf, random.Random(f"{SEED} {name}").randrange(1 << 30))
        with open(hf + ".pkl", "wb") as f:
            pickle.dump((sd, cfg), f)
        return hf, sd, cfg, hf + ".pkl"

    def weight_map(self, folder):
        with open(os.path.join(folder, "model.safetensors.index.json")) as f:
            return json.load(f)["weight_map"]

    @staticmethod
    def logits(folder):
        model = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            return model(torch.arange(3, 27).reshape(2, 12)).logits[..., :90]

    def save_dist(self, jobs, core, world):
        spec = self.path(f"jobs{len(os.listdir(self.tmp))}.json")
        with open(spec, "w") as f:
            json.dump(jobs, f)
        ranks.run(world, "megatron_writer", "write_jobs", spec, folder=self.tmp, PYTHONPATH=core)

    def check(self, job, name, what):
        hf, want, _, _ = self.family(name)
        base = self.path("base")
        shutil.rmtree(base, ignore_errors=True)
        os.makedirs(base)
        shutil.copy(os.path.join(hf, "config.json"), base)
        out = job["dir"] + ".out"
        done = export(job["dir"], out, f"base={base}", "max_shard_size=60KB")
        self.assertEqual(done.returncode, 0, f"{what}: {done.stderr}")
        self.same(read_all(out), want, what)
        self.assertEqual(self.weight_map(out), self.weight_map(hf), what)
        options = [f"model_type={name}"] if name in NEEDS_BASE and not job["plan"]["bridge"] else []
        out = job["dir"] + ".own"
        done = export(job["dir"], out, *options)
        self.assertEqual(done.returncode, 0, f"{what}, without a base: {done.stderr}")
        got = read_all(out)
        rows = ("lm_head.weight", "embed_tokens.weight", "embeddings.weight")  # padding stays where nothing says how long the vocabulary is
        self.same({k: v[:90] if k.endswith(rows) else v for k, v in got.items()}, want, what)
        self.check_config(out, hf, what)
        mine, theirs = self.logits(out), self.theirs(hf)
        self.assertTrue(torch.isfinite(mine).all(), what)
        self.assertTrue(torch.equal(mine, theirs), f"{what}: logits differ by {(mine - theirs).abs().max()}")

    def check_config(self, out, hf, what):
        """What config.json says is what the model's own says, but for the padded vocabulary and older spellings of the rotary embedding."""
        mine, theirs = ({}, {})
        for config, folder in ((mine, out), (theirs, hf)):
            with open(os.path.join(folder, "config.json")) as f:
                config.update(json.load(f))
            if (config.get("rope_parameters") or {}).get("partial_rotary_factor") == 1.0:
                del config["rope_parameters"]["partial_rotary_factor"]
        free = ("vocab_size", "dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id")
        wrong = {k: (v, theirs[k]) for k, v in mine.items() if k not in free and theirs.get(k) and theirs[k] != v}
        self.assertEqual(wrong, {}, what)

    def run_cases(self, container, names=None):
        r = random.Random(f"{SEED} {container}")
        jobs = []
        for name in names or CASES:
            _, _, cfg, state = self.family(name)
            plan = make_plan(r, container, name, cfg)
            jobs.append((dict(dir=self.path(f"{name}.{container}"), state=state, plan=plan), name))
        if container == "dist":
            for i, core in enumerate(CORES):
                mine = jobs[i::len(CORES)]
                self.save_dist([j for j, _ in mine], core, 1 + i % 2)
        else:
            for job, _ in jobs:
                torch.manual_seed(job["plan"]["seed"])
                writer.write(job)
        for job, name in jobs:
            with self.subTest(name):
                self.check(job, name, f"{name} in {container}, CKPTFS_SEED={SEED}, {job['plan']}")

    def test_ranks_files_that_lie(self):
        class Evil:
            def __reduce__(self):
                return os.system, (f"touch {marker}",)

        marker = self.path("executed")
        _, _, cfg, state = self.family("llama")
        plan = make_plan(random.Random(SEED), "ranks", "llama", cfg) | dict(tp=2, etp=2, pp=2, vpp=1, layers=[6, 6], old=False)
        sound = self.path("sound")
        writer.write(dict(dir=sound, state=state, plan=plan))

        def change(run, edit, rank="mp_rank_01_001", **how):
            path = os.path.join(run, rank, "model_optim_rng.pt")
            whole = torch.load(path, weights_only=False)
            torch.save(edit(whole) or whole, path, **how)

        def without(key):
            return lambda w: [w["model"].pop(k) for k in list(w["model"]) if k.endswith(key)] and None

        def other_shape(w):
            w["model"]["decoder.layers.0.mlp.linear_fc2.weight"] = torch.zeros(3, 3, dtype=torch.bfloat16)

        def twice(w):
            name = "decoder.layers.0.mlp.linear_fc2.weight"
            w["model"]["decoder"] = {name.split(".", 1)[1]: w["model"][name] + 1}

        def quantised(w):
            key = "decoder.layers.0.mlp.linear_fc2.weight"
            w["model"][key] = w["model"][key].to(torch.float8_e4m3fn)

        lies = {
            "sound": (lambda run: None, None),
            "stale": (lambda run: shutil.copytree(f"{run}/mp_rank_00_000", f"{run}/mp_rank_02_000"), None),
            "no_rank": (lambda run: shutil.rmtree(f"{run}/mp_rank_01_001"), "rank 'mp_rank_01_001' is missing"),
            "no_stage": (lambda run: [shutil.rmtree(f"{run}/mp_rank_0{t}_001") for t in (0, 1)], "rank 'mp_rank_00_001' is missing"),
            "no_file": (lambda run: os.remove(f"{run}/mp_rank_01_001/model_optim_rng.pt"), "mp_rank_01_001' has no model_optim_rng.pt"),
            "truncated": (lambda run: os.truncate(f"{run}/mp_rank_01_001/model_optim_rng.pt", 20000), "truncated"),
            "old_format": (lambda run: change(run, lambda w: None, _use_new_zipfile_serialization=False), "before 1.6"),
            "no_tensor": (lambda run: change(run, without("0.mlp.linear_fc2.weight")), "linear_fc2.weight' is not in the file of tensor rank 1"),
            "other_shape": (lambda run: change(run, other_shape), "linear_fc2.weight' is "),
            "twice": (lambda run: change(run, twice), "two different tensors of the file have the name"),
            "fp8": (lambda run: [change(run, quantised, f"mp_rank_0{t}_001") for t in (0, 1)], "fp8"),
            "no_model": (lambda run: change(run, lambda w: {"args": w["args"]}), "has no state dict"),
            "evil": (lambda run: change(run, lambda w: w | {"args": Evil()}), "posix.system"),
            "version": (lambda run: [change(run, lambda w: w | {"checkpoint_version": 1.0}, f"mp_rank_0{t}_00{p}") for t in (0, 1) for p in (0, 1)], "version 1"),
        }
        for name, (lie, needle) in lies.items():
            run = self.path(name)
            shutil.copytree(sound, run) if name != "sound" else None
            lie(run)
            done = export(run, run + ".out")
            with self.subTest(name):
                if needle is None:
                    self.assertEqual(done.returncode, 0, done.stderr)
                else:
                    self.assertEqual(done.returncode, 1, done.stderr)
                    self.assertIn(needle, done.stderr)
        self.assertFalse(os.path.exists(marker))

    def test_zero_centred_norms(self):
        """Stored less one, where Hugging Face's family multiplies by the weight itself: one is added, in F32, and rounded once."""
        r = random.Random(f"{SEED} centred")
        for name, container in (("llama", "zarr"), ("qwen3_moe", "ranks"), ("deepseek_v3", "zarr"), ("nemotron_h", "ranks")):
            _, sd, cfg, state = self.family(name)
            plan = make_plan(r, container, name, cfg) | dict(centred=True, bridge=False, grouped=False)
            job = dict(dir=self.path(f"{name}.{container}"), state=state, plan=plan)
            writer.write(job)
            what = f"{name} in {container}, CKPTFS_SEED={SEED}, {plan}"
            done = export(job["dir"], job["dir"] + ".out", "vocab_size=90")
            self.assertEqual(done.returncode, 0, f"{what}: {done.stderr}")
            norm = lambda k: "norm" in k and "mixer.norm" not in k
            self.same(read_all(job["dir"] + ".out"), {k: (t.float() + 1).to(t.dtype) if norm(k) else t for k, t in sd.items()}, what)

    def test_layers_of_multi_token_prediction(self):
        """Behind the others, as the hub's repositories have them; transformers does not load them."""
        r = random.Random(f"{SEED} mtp")
        for name, container in (("deepseek_v3", "zarr"), ("deepseek_v3", "ranks"), ("glm4_moe", "zarr"), ("glm4_moe", "ranks")):
            _, want, cfg, _ = self.family(name)
            want, cfg = dict(want), copy.deepcopy(cfg)
            at, h = "model.layers.11.", cfg.hidden_size
            for x, shape in (("enorm", [h]), ("hnorm", [h]), ("eh_proj", [h, 2 * h]), ("shared_head.norm", [h])):
                want[f"{at}{x}.weight"] = torch.randn(shape).to(torch.bfloat16)
            cfg.num_hidden_layers = 12
            plan = make_plan(r, container, name, cfg) | dict(mtp=1, grouped=False)
            if container == "ranks":
                plan.update(pp=2, vpp=1, layers=[4, 7])
            state = self.path("mtp.pkl")
            with open(state, "wb") as f:
                pickle.dump((want, cfg), f)
            job = dict(dir=self.path(f"{name}.{container}"), state=state, plan=plan)
            writer.write(job)
            done = export(job["dir"], job["dir"] + ".out", "vocab_size=90")
            what = f"{name} in {container}, CKPTFS_SEED={SEED}, {plan}"
            self.assertEqual(done.returncode, 0, f"{what}: {done.stderr}")
            self.same(read_all(job["dir"] + ".out"), want, what)

    @unittest.skipUnless(CORES, "no megatron-core")
    def test_torch_dist_of_every_family(self):
        self.run_cases("dist")

    def test_ranks_files_of_every_family(self):
        self.run_cases("ranks")

    def test_zarr_of_every_family(self):
        self.run_cases("zarr")

    def test_torch_dcp_of_every_family(self):
        self.run_cases("dcp", ["llama", "qwen3_moe", "deepseek_v3", "gemma2", "nemotron"])

    def test_fsdp_dtensor(self):
        self.run_cases("fsdp", ["llama", "qwen3_moe"])


if __name__ == "__main__":
    unittest.main()
