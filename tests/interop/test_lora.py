# SPDX-License-Identifier: Apache-2.0
"""lora=merge gives the model that PEFT's merge_and_unload saves; LoRA keys in a DCP give PEFT's adapter."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
import warnings

try:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import torch.distributed.checkpoint as dcp
    import transformers
    from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
    from safetensors.torch import load_file, save_file
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()
warnings.simplefilter("ignore")
CKPT = os.path.join(os.environ.get("CKPTFS_BUILD", "build/dev"), "fs", "ckpt")
COMMON = dict(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
)
MOE = dict(num_local_experts=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def tensors(folder):
    found = {}
    for name in sorted(os.listdir(folder)):
        if name.endswith(".safetensors"):
            found.update(load_file(os.path.join(folder, name)))
    return found


def randomize(model, words, scale=0.05):
    g = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if any(w in name for w in words):
                p.copy_(torch.randn(p.shape, generator=g) * scale + (1.0 if "magnitude" in name else 0.0))


class Lora(unittest.TestCase):
    def setUp(self):
        self.fresh()

    def fresh(self):
        """New directories, also in the middle of a test."""
        self.tmp = tempfile.TemporaryDirectory()
        self.addCleanup(self.tmp.cleanup)
        self.base, self.adapter = os.path.join(self.tmp.name, "base"), os.path.join(self.tmp.name, "adapter")
        torch.manual_seed(1)

    def model(self, config, dtype=torch.bfloat16):
        model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
        randomize(model, ["bias", "norm"], 0.3)
        model.save_pretrained(self.base, max_shard_size="60KB")
        return transformers.AutoModelForCausalLM.from_pretrained(self.base, dtype=dtype)

    def save_adapter(self, model, words=("lora_", "bias", "modules_to_save"), **lora):
        peft = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **lora))
        randomize(peft, words)
        peft.save_pretrained(self.adapter, safe_serialization=True)
        return peft

    def theirs(self, dtype, vocab=None):
        """A fresh model, as a user would merge it."""
        model = transformers.AutoModelForCausalLM.from_pretrained(self.base, dtype=dtype)
        if vocab:
            model.resize_token_embeddings(vocab)
        merged = PeftModel.from_pretrained(model, self.adapter).merge_and_unload()
        out = os.path.join(self.tmp.name, "theirs")
        merged.save_pretrained(out)
        return tensors(out)

    def run_ckpt(self, *args, check=True):
        return subprocess.run([CKPT, *args], capture_output=True, text=True, check=check)

    def ours(self, *options, source=None):
        out = os.path.join(self.tmp.name, f"ours{len(os.listdir(self.tmp.name))}")
        args = [a for o in ("lora=merge", f"base={self.base}", *options) for a in ("-o", o)]
        done = self.run_ckpt("export", source or self.adapter, out, "-q", *args, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.out = out
        return tensors(out)

    def same(self, got, want, tolerance=0.0):
        self.assertEqual(set(got), set(want))
        for name, w in want.items():
            g = got[name]
            self.assertEqual((g.dtype, g.shape), (w.dtype, w.shape), name)
            if not torch.equal(g, w):
                worst = ((g.double() - w.double()).abs() / w.double().abs().clamp(min=1e-2)).max().item()
                self.assertLessEqual(worst, tolerance, name)

    def test_linear_layers(self):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            with self.subTest(dtype=dtype):
                self.fresh()
                model = self.model(transformers.LlamaConfig(**COMMON), dtype)
                before = tensors(self.base)
                self.save_adapter(model, r=8, lora_alpha=20, target_modules=LINEAR)
                got = self.ours()
                self.same(got, self.theirs(dtype))
                changed = {n for n, t in got.items() if not torch.equal(t, before[n])}
                self.assertEqual(changed, {n for n in got if any(w in n for w in LINEAR)})
                index = "model.safetensors.index.json"
                with open(os.path.join(self.base, index), "rb") as a, open(os.path.join(self.out, index), "rb") as b:
                    self.assertEqual(a.read(), b.read())
                self.assertFalse([f for f in os.listdir(self.out) if "adapter" in f])

    def test_a_dtype_that_is_asked_for(self):
        """As if the base had been loaded with it: the sum in F32 is not rounded."""
        model = self.model(transformers.LlamaConfig(**COMMON))
        self.save_adapter(model, r=8, lora_alpha=20, target_modules=LINEAR)
        self.same(self.ours("dtype=float32"), self.theirs(torch.float32))

    def test_patterns_of_ranks_and_alphas(self):
        for rslora in (False, True):
            with self.subTest(rslora=rslora):
                self.fresh()
                model = self.model(transformers.LlamaConfig(**COMMON))
                patterns = dict(rank_pattern={"q_proj": 3, "layers.1.mlp.up_proj": 16}, alpha_pattern={r"^model\.layers\.0\..*_proj": 5})
                self.save_adapter(model, r=4, lora_alpha=8, use_rslora=rslora, target_modules=LINEAR, **patterns)
                self.same(self.ours(), self.theirs(torch.bfloat16))

    def test_dora(self):
        for dtype, tolerance in ((torch.bfloat16, 2**-7), (torch.float32, 1e-5)):
            with self.subTest(dtype=dtype):
                self.fresh()
                model = self.model(transformers.LlamaConfig(**COMMON), dtype)
                self.save_adapter(model, r=8, lora_alpha=16, use_dora=True, target_modules=["q_proj", "down_proj"])
                self.same(self.ours(), self.theirs(dtype), tolerance)

    def test_biases(self):
        for kind in (dict(bias="all"), dict(bias="lora_only"), dict(lora_bias=True)):
            with self.subTest(**kind):
                self.fresh()
                model = self.model(transformers.Qwen2Config(**COMMON))
                self.save_adapter(model, r=4, target_modules=["q_proj", "k_proj"], **kind)
                self.same(self.ours(), self.theirs(torch.bfloat16))

    def test_an_adapter_with_all_biases_is_shown_as_it_is(self):
        """PEFT saves biases of a module of which the adapter has a copy under three names."""
        config = transformers.BertConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
        model = get_peft_model(transformers.BertForSequenceClassification(config), LoraConfig(
            task_type="SEQ_CLS", r=4, target_modules=["query"], bias="all"))
        randomize(model, ["lora_", "bias", "modules_to_save"])
        model.save_pretrained(self.adapter)
        out = os.path.join(self.tmp.name, "out")
        done = self.run_ckpt("export", self.adapter, out, "-q")
        self.assertNotIn("left out", done.stderr)
        got, want = tensors(out), tensors(self.adapter)
        self.assertIn("base_model.model.classifier.original_module.bias", want)
        self.same(got, want)

    def test_modules_to_save_and_embeddings(self):
        """In F32; in smaller types PEFT rounds the delta of an embedding before it adds it."""
        model = self.model(transformers.LlamaConfig(**COMMON), torch.float32)
        self.save_adapter(model, r=4, target_modules=["v_proj", "embed_tokens"], modules_to_save=["lm_head"])
        self.same(self.ours(), self.theirs(torch.float32))

    def test_tied_embeddings_that_were_trained_apart(self):
        model = self.model(transformers.LlamaConfig(**COMMON, tie_word_embeddings=True))
        self.save_adapter(model, r=4, target_modules=["v_proj"], modules_to_save=["embed_tokens", "lm_head"])
        fresh = transformers.AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.bfloat16)
        merged = PeftModel.from_pretrained(fresh, self.adapter).merge_and_unload()
        self.same(self.ours(), dict(merged.state_dict()))
        self.assertFalse(transformers.AutoConfig.from_pretrained(self.out).tie_word_embeddings)

    def test_a_vocabulary_that_has_grown(self):
        model = self.model(transformers.LlamaConfig(**COMMON))
        model.resize_token_embeddings(104)
        peft = get_peft_model(model, LoraConfig(r=4, target_modules=["v_proj"], task_type="CAUSAL_LM"))
        randomize(peft, ["lora_", "embed_tokens", "lm_head"])
        peft.save_pretrained(self.adapter, save_embedding_layers=True)
        self.same(self.ours(), self.theirs(torch.bfloat16, vocab=104))
        config = transformers.AutoConfig.from_pretrained(self.out)
        self.assertEqual(config.vocab_size, 104)

    def test_a_tied_vocabulary_that_has_grown(self):
        model = self.model(transformers.LlamaConfig(**COMMON, tie_word_embeddings=True))
        model.resize_token_embeddings(104)
        self.save_adapter(model, words=["lora_", "embed_tokens"], r=4, target_modules=["v_proj"])
        self.assertIn("base_model.model.lm_head.weight", tensors(self.adapter))  # PEFT saves both
        self.same(self.ours(), self.theirs(torch.bfloat16, vocab=104))
        config = transformers.AutoConfig.from_pretrained(self.out)
        self.assertEqual((config.vocab_size, config.tie_word_embeddings), (104, True))

    def test_trained_tokens_are_rows_of_an_embedding(self):
        for tied, indices in ((False, [63, 7, 3]), (True, [63, 7, 3]), (False, {"embed_tokens": [5, 2], "lm_head": [4]})):
            with self.subTest(tied=tied, indices=indices):
                self.fresh()
                model = self.model(transformers.LlamaConfig(**COMMON, tie_word_embeddings=tied))
                self.save_adapter(model, words=("lora_", "trainable_tokens"), r=4, target_modules=LINEAR, trainable_token_indices=indices)
                self.same(self.ours(), self.theirs(torch.bfloat16))

    def test_the_head_of_a_tied_model(self):
        for targets in (["q_proj", "lm_head"], ["q_proj", "lm_head", "embed_tokens"]):
            with self.subTest(targets):
                self.fresh()
                model = self.model(transformers.LlamaConfig(**COMMON, tie_word_embeddings=True))
                self.save_adapter(model, r=4, target_modules=targets)
                self.same(self.ours(), self.theirs(torch.bfloat16))

    def test_changes_that_are_rounded_first(self):
        """Of embeddings and of stacked experts, in types smaller than F32."""
        model = self.model(transformers.LlamaConfig(**COMMON), torch.bfloat16)
        self.save_adapter(model, words=["lora_"], r=4, target_modules=["v_proj", "embed_tokens"])
        self.same(self.ours(), self.theirs(torch.bfloat16))
        shutil.rmtree(self.adapter)
        shutil.rmtree(self.base)
        shutil.rmtree(os.path.join(self.tmp.name, "theirs"))
        model = self.model(transformers.Qwen3MoeConfig(**COMMON, num_experts=4, moe_intermediate_size=24), torch.bfloat16)
        names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        self.save_adapter(model, words=["lora_"], r=4, target_modules=["q_proj"], target_parameters=names, lora_dropout=0.0)
        self.same(self.ours(), self.theirs(torch.bfloat16))

    def check_experts(self, config, names):
        model = self.model(config, torch.float32)
        self.save_adapter(model, r=4, target_modules=["q_proj"], target_parameters=names, lora_dropout=0.0)
        got = self.ours()
        self.same(got, self.theirs(torch.float32))
        before = tensors(self.base)
        changed = [n for n, t in got.items() if not torch.equal(t, before[n])]
        self.assertTrue([n for n in changed if "experts" in n or "block_sparse_moe" in n], changed)

    def test_experts_one_by_one(self):
        both = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        for names in (both, both[:1], both[1:]):
            with self.subTest(names=names):
                self.fresh()
                self.check_experts(transformers.Qwen3MoeConfig(**COMMON, **MOE), names)

    def test_experts_under_other_names(self):
        self.check_experts(transformers.MixtralConfig(**COMMON, num_local_experts=4), ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])

    def test_experts_in_tensors_of_other_names(self):
        names = ["block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"]
        self.check_experts(transformers.GraniteMoeConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2), names)
        names = ["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"]
        self.fresh()
        layers = ["conv", "full_attention"]
        self.check_experts(transformers.Lfm2MoeConfig(**COMMON, **MOE, layer_types=layers, num_dense_layers=1), names)

    def test_fused_experts(self):
        config = {**COMMON, "intermediate_size": 64}
        self.check_experts(
            transformers.GptOssConfig(**config, num_local_experts=4, num_experts_per_tok=2), ["experts.gate_up_proj", "experts.down_proj"]
        )

    def test_a_dcp_of_the_whole_state_dict_and_of_the_adapter(self):
        model = self.model(transformers.LlamaConfig(**COMMON))
        peft = self.save_adapter(model, r=4, target_modules=LINEAR, modules_to_save=["lm_head"], use_dora=True)
        want, merged = tensors(self.adapter), self.theirs(torch.bfloat16)
        for name, state in (("whole", peft.state_dict()), ("adapter", get_peft_model_state_dict(peft))):
            run, out = os.path.join(self.tmp.name, name), os.path.join(self.tmp.name, name + "_out")
            dcp.save({"model": dict(state)}, checkpoint_id=run, no_dist=True)
            self.run_ckpt("export", run, out, "-q", "-o", f"base={self.adapter}")
            self.assertEqual(sorted(os.listdir(out)), ["adapter_config.json", "adapter_model.safetensors"])
            for file in os.listdir(out):
                with open(os.path.join(out, file), "rb") as a, open(os.path.join(self.adapter, file), "rb") as b:
                    self.assertEqual(a.read(), b.read(), file)
            with open(os.path.join(out, "adapter_config.json"), "rb") as a, open(os.path.join(run, "adapter_config.json"), "wb") as b:
                b.write(a.read())
            self.same(self.ours(source=run), merged, 2**-7)
        self.same(tensors(out), want)

    def whole(self, model, **lora):
        """A DCP of a whole PeftModel, and a base that lends both configs, but no weights."""
        peft = self.save_adapter(model, **lora)
        run, lent = os.path.join(self.tmp.name, "whole"), os.path.join(self.tmp.name, "lent")
        dcp.save({"model": dict(peft.state_dict())}, checkpoint_id=run, no_dist=True)
        os.makedirs(lent)
        shutil.copy(os.path.join(self.base, "config.json"), lent)
        shutil.copy(os.path.join(self.adapter, "adapter_config.json"), lent)
        return run, lent

    def shown(self, run, *options):
        out = os.path.join(self.tmp.name, f"shown{len(os.listdir(self.tmp.name))}")
        done = self.run_ckpt("export", run, out, "-q", *[a for o in options for a in ("-o", o)], check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        return out, done.stderr

    def test_a_whole_peft_model_is_its_adapter_and_says_what_else_it_could_be(self):
        for lora in (dict(target_modules=LINEAR), dict(target_modules=LINEAR + ["embed_tokens"]), dict(target_modules=["embed_tokens"]),
                     dict(target_modules=["q_proj"], modules_to_save=["lm_head"])):
            with self.subTest(lora):
                self.fresh()
                run, lent = self.whole(self.model(transformers.LlamaConfig(**COMMON)), r=4, **lora)
                want = tensors(self.adapter)
                out, said = self.shown(run, f"base={lent}")
                self.same(tensors(out), want)
                for word in ("left out", "lora=merge", "lora=base"):
                    self.assertIn(word, said)
                out, said = self.shown(run, f"base={lent}", "lora=adapter")
                self.same(tensors(out), want)
                self.assertEqual(said, "")

    def test_a_whole_peft_model_merges_into_its_own_base(self):
        """Of every kind: the base that it holds is the one that it was trained on, whatever base= lends."""
        cases = {
            "untied, a module saved": (transformers.LlamaConfig(**COMMON), dict(modules_to_save=["lm_head"], use_dora=True), LINEAR),
            "tied, the embedding adapted": (transformers.LlamaConfig(**COMMON, tie_word_embeddings=True), {}, LINEAR + ["embed_tokens"]),
            "experts": (transformers.Qwen3MoeConfig(**COMMON, **MOE), {}, ["q_proj", "v_proj"]),
        }
        for name, (config, lora, targets) in cases.items():
            with self.subTest(name):
                self.fresh()
                run, lent = self.whole(self.model(config), r=4, target_modules=targets, **lora)
                want = self.theirs(torch.bfloat16)
                out, _ = self.shown(run, f"base={lent}", "lora=merge")
                self.same(tensors(out), want, 2**-7)
                self.assertFalse([f for f in os.listdir(out) if "adapter" in f])
                transformers.AutoModelForCausalLM.from_pretrained(out)
                other = os.path.join(self.tmp.name, "other")
                shutil.copytree(self.base, other)
                for file in [f for f in os.listdir(other) if f.endswith(".safetensors")]:
                    path = os.path.join(other, file)
                    save_file({k: v + 1 for k, v in load_file(path).items()}, path, {"format": "pt"})
                shutil.copy(os.path.join(lent, "adapter_config.json"), other)
                out, _ = self.shown(run, f"base={other}", "lora=merge")
                self.same(tensors(out), want, 2**-7)

    def test_the_base_of_a_whole_peft_model(self):
        model = self.model(transformers.LlamaConfig(**COMMON, tie_word_embeddings=True))
        run, lent = self.whole(model, r=4, target_modules=LINEAR + ["embed_tokens"])
        out, _ = self.shown(run, f"base={lent}", "lora=base", "max_shard_size=60KB")
        for file in [f for f in os.listdir(self.base) if f != "generation_config.json"]:
            with open(os.path.join(out, file), "rb") as a, open(os.path.join(self.base, file), "rb") as b:
                self.assertEqual(a.read(), b.read(), file)
        self.assertFalse([f for f in os.listdir(out) if "adapter" in f])

    def test_what_lora_cannot_show_is_refused(self):
        run, lent = self.whole(self.model(transformers.LlamaConfig(**COMMON)), r=4, target_modules=LINEAR)
        os.remove(os.path.join(lent, "adapter_config.json"))
        for source, option, words in ((self.base, "lora=adapter", "has no adapter"), (self.base, "lora=merge", "has no adapter"),
                                      (self.base, "lora=base", "not a checkpoint of a whole PEFT model"),
                                      (self.adapter, "lora=base", "not a checkpoint of a whole PEFT model"),
                                      (run, "lora=merge", "adapter_config.json"), (run, "lora=both", "adapter|merge|base")):
            done = self.run_ckpt("info", source, "-o", option, "-o", f"base={lent}", check=False)
            self.assertNotEqual(done.returncode, 0, (source, option))
            self.assertIn(words, done.stderr)

    def test_the_base_that_the_adapter_names(self):
        """Without base=: a directory, or a model in the hub's cache; for one adapter, and for a run of them."""
        model = self.model(transformers.LlamaConfig(**COMMON))
        self.save_adapter(model, r=4, target_modules=LINEAR)
        want = self.theirs(torch.bfloat16)
        cache = os.path.join(self.tmp.name, "cache")
        snapshot = os.path.join(cache, "models--some--base", "snapshots", "abc")
        shutil.copytree(self.base, snapshot)
        os.makedirs(os.path.join(cache, "models--some--base", "refs"))
        with open(os.path.join(cache, "models--some--base", "refs", "main"), "w") as f:
            f.write("abc")
        os.environ["HF_HUB_CACHE"] = cache
        self.addCleanup(os.environ.pop, "HF_HUB_CACHE")
        run = os.path.join(self.tmp.name, "run")
        for name in (self.base, "some/base"):
            self.change(lambda file: file, {"base_model_name_or_path": name})
            shutil.rmtree(run, ignore_errors=True)
            for step in ("checkpoint-1", "checkpoint-2"):
                shutil.copytree(self.adapter, os.path.join(run, step))
            for source in (self.adapter, os.path.join(run, "checkpoint-2")):
                out, said = self.shown(source, "lora=merge")
                self.same(tensors(out), want)
                self.assertIn("which adapter_config.json names", said)
            out = os.path.join(self.tmp.name, f"latest{len(os.listdir(self.tmp.name))}")
            done = self.run_ckpt("export", run, out, "-o", "lora=merge", check=False)
            self.assertEqual(done.returncode, 0, done.stderr)
        self.change(lambda file: file, {"base_model_name_or_path": "some/other"})
        self.says(["needs base=DIR", "'some/other'", "local hub cache"], "lora=merge")
        self.adapter = os.path.join(run, "checkpoint-2")
        self.change(lambda file: file, {"base_model_name_or_path": self.base})
        self.says(["names the base", "another step", "'some/base'"], "lora=merge", of=run)

    # ---- adapters that do nothing, or not what their config says ----

    FILE = "adapter_model.safetensors"

    def change(self, f, config=None):
        """Replace the adapter's tensors by f of them, and keys of its config."""
        file, said = os.path.join(self.adapter, self.FILE), os.path.join(self.adapter, "adapter_config.json")
        save_file(f(load_file(file)), file, {"format": "pt"})
        with open(said) as j:
            now = json.load(j) | (config or {})
        with open(said, "w") as j:
            json.dump(now, j)

    def says(self, words, *options, code=1, of=None):
        done = self.run_ckpt("export", of or self.adapter, os.path.join(self.tmp.name, f"no{len(os.listdir(self.tmp.name))}"),
                             *[a for o in options for a in ("-o", o)], check=False)
        self.assertEqual(done.returncode != 0, code != 0, done.stderr)
        for word in words:
            self.assertIn(word, done.stderr)
        return done.stderr

    def test_adapters_that_do_nothing_are_refused(self):
        """PEFT loads these with a warning at most, and the model is the base's."""
        def halved(file):
            return {k: v for k, v in file.items() if "layers.1.self_attn.q_proj.lora_B" not in k}

        def of_other_rank(file):
            return {k: v[:2].contiguous() if "lora_A" in k else v[:, :2].contiguous() for k, v in file.items()}

        cases = {
            "no tensors": (lambda file: {}, {}, ["no tensors", "change nothing"]),
            "placeholders": (lambda file: {k: torch.zeros(0) for k in file}, {}, ["is empty ([0])", "lora_A"]),
            "no LoRA": (lambda file: {"base_model.model.lm_head.weight": torch.rand(96, 64)}, {}, ["LORA", "change nothing"]),
            "half a pair": (halved, {}, ["layers.1.self_attn.q_proj.lora_A", "no 'model.layers.1.self_attn.q_proj.lora_B.weight'"]),
            "another rank": (of_other_rank, {}, ["has rank 2", "says 4"]),
            "another rank of one": (lambda file: file, {"rank_pattern": {"layers.1.self_attn.q_proj": 8}}, ["has rank 4", "says 8"]),
            "no matrix": (lambda file: {k: v.flatten() for k, v in file.items()}, {}, ["not a matrix"]),
            "other modules": (lambda file: file, {"target_modules": ["k_proj", "fc1"]}, ["targets 'k_proj' and others", "none of"]),
        }
        for name, (f, config, words) in cases.items():
            for options in ((), ("lora=merge",)):
                with self.subTest(name, options=options):
                    self.fresh()
                    self.save_adapter(self.model(transformers.LlamaConfig(**COMMON)), r=4, target_modules=["q_proj", "v_proj"])
                    self.change(f, config)
                    self.says(words, *options, f"base={self.base}")
                    self.run_ckpt("info", self.adapter, "-o", "view=raw")

    def test_weights_beside_an_adapter_are_named(self):
        """A projector or a value head that was trained with it, and not a trainer's states."""
        self.save_adapter(self.model(transformers.LlamaConfig(**COMMON)), r=4, target_modules=["q_proj"])
        for name in ("optimizer.pt", "training_args.bin", "rng_state.pth", "adapter_model.bin"):
            torch.save({}, os.path.join(self.adapter, name))
        for options in ((), ("lora=merge",)):
            self.assertNotIn("beside", self.says([], *options, f"base={self.base}", code=0))
        torch.save({"mm_projector.weight": torch.rand(4)}, os.path.join(self.adapter, "non_lora_trainables.bin"))
        save_file({"v_head.weight": torch.rand(4)}, os.path.join(self.adapter, "value_head.safetensors"))
        for options in ((), ("lora=merge",)):
            said = self.says(["left out", "'non_lora_trainables.bin', 'value_head.safetensors'"], *options, f"base={self.base}", code=0)
            self.assertEqual("not merged" in said, bool(options))

    def test_a_base_of_another_shape_is_refused(self):
        self.save_adapter(self.model(transformers.LlamaConfig(**COMMON)), r=4, target_modules=["q_proj"])
        other = os.path.join(self.tmp.name, "other")
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**COMMON, "hidden_size": 32})).save_pretrained(other)
        self.says(["[4, 64]", "'model.layers.0.self_attn.q_proj.weight' is [64, 32]", "another model's"], f"base={other}")

    def test_targets_without_matrices_are_a_warning(self):
        def less(file):
            return {k: v for k, v in file.items() if "layers.1.self_attn.q_proj" not in k}

        self.save_adapter(self.model(transformers.LlamaConfig(**COMMON)), r=4, target_modules=LINEAR)
        for options in ((), ("lora=merge",)):
            self.assertNotIn("no matrices", self.says([], *options, f"base={self.base}", code=0))
        self.change(less)
        for options in ((), ("lora=merge",)):
            self.says(["no matrices for 1 modules", "('model.layers.1.self_attn.q_proj' first)"], *options, f"base={self.base}", code=0)

    def test_the_checkpoint_beside_an_empty_adapter_is_named(self):
        """Trainers with ZeRO-3 leave both."""
        golden = os.path.join(os.environ["CKPTFS_SOURCE"], "tests/golden/deepspeed/trainer_z3_lora_llama_w2/run/checkpoint-2")
        self.save_adapter(self.model(transformers.LlamaConfig(**COMMON)), r=4, target_modules=["q_proj"])
        self.change(lambda file: {})
        shutil.copytree(os.path.join(golden, "global_step2"), os.path.join(self.adapter, "global_step2"))
        self.says(["no tensors", "'global_step2' beside it"])

    def test_a_base_that_is_dequantised(self):
        model = self.model(transformers.LlamaConfig(**COMMON))
        self.save_adapter(model, r=4, target_modules=LINEAR)
        want = self.ours()
        g = torch.Generator().manual_seed(2)
        for name in [f for f in os.listdir(self.base) if f.endswith(".safetensors")]:
            path = os.path.join(self.base, name)
            file = load_file(path)
            for key in [k for k in file if "_proj.weight" in k]:
                file[key] = torch.randn(file[key].shape, generator=g).to(torch.float8_e4m3fn)
                file[key + "_scale_inv"] = torch.rand(1, 1, generator=g)
            save_file(file, path, {"format": "pt"})
        index = os.path.join(self.base, "model.safetensors.index.json")
        os.remove(index)
        files = {f: load_file(os.path.join(self.base, f)) for f in os.listdir(self.base) if f.endswith(".safetensors")}
        save_file({k: t for f in files.values() for k, t in f.items()}, os.path.join(self.base, "model.safetensors"), {"format": "pt"})
        args = ("export", self.adapter, os.path.join(self.tmp.name, "no"), "-o", "lora=merge", "-o", f"base={self.base}")
        self.assertIn("dequantize", self.run_ckpt(*args, check=False).stderr)
        got = self.ours("dequantize")
        self.assertEqual(set(got), set(want))
        ordinary = os.path.join(self.tmp.name, "ordinary")
        self.run_ckpt("export", self.base, ordinary, "-q", "-o", "dequantize")
        self.base = ordinary
        self.same(got, self.theirs(torch.bfloat16))

    def test_a_base_of_bitsandbytes(self):
        """Only transformers dequantises it. The error names the two steps, and the second one is PEFT's merge."""
        model = self.model(transformers.LlamaConfig(**COMMON))
        self.save_adapter(model, r=4, target_modules=LINEAR)
        packed = os.path.join(self.tmp.name, "packed")
        shutil.copytree(self.base, packed)
        for load, dtype in (({"load_in_4bit": True}, torch.uint8), ({"load_in_8bit": True}, torch.int8)):
            for name in [f for f in os.listdir(packed) if f.endswith(".safetensors")]:
                file = load_file(os.path.join(self.base, name))
                save_file({k: torch.zeros(t.shape if dtype == torch.int8 else (t.numel() // 2, 1), dtype=dtype) if "_proj.weight" in k else t
                           for k, t in file.items()}, os.path.join(packed, name), {"format": "pt"})
            with open(os.path.join(self.base, "config.json")) as f:
                config = json.load(f)
            with open(os.path.join(packed, "config.json"), "w") as f:
                json.dump(config | {"quantization_config": {"quant_method": "bitsandbytes"} | load}, f)
            args = ("export", self.adapter, os.path.join(self.tmp.name, "no"), "-o", "lora=merge", "-o", f"base={packed}")
            said = self.run_ckpt(*args, check=False).stderr
            for words in ("_proj.weight' is", "model.dequantize()", "save_original_format=False", "lora=merge with base=DIR", "before it was quantised"):
                self.assertIn(words, said)
            said = self.run_ckpt(*args, "-o", "dequantize", check=False).stderr
            self.assertIn("transformers dequantises those of bitsandbytes: model = model.dequantize()", said)
        plain = transformers.AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.bfloat16)
        plain.save_pretrained(os.path.join(self.tmp.name, "plain"), save_original_format=False)
        self.base = os.path.join(self.tmp.name, "plain")
        self.same(self.ours(), self.theirs(torch.bfloat16))

    def test_mxfp4_experts(self):
        """What people train gpt-oss with: adapters of stacked experts, on a base that stays quantised."""
        config = transformers.GptOssConfig(**{**COMMON, "intermediate_size": 96}, num_local_experts=4, num_experts_per_tok=2)
        model = self.model(config, torch.float32)
        names = ["experts.gate_up_proj", "experts.down_proj"]
        self.save_adapter(model, r=4, target_modules=["q_proj"], target_parameters=names, lora_dropout=0.0)
        g = torch.Generator().manual_seed(2)
        base = tensors(self.base)
        for name in [n for n in base if n.endswith(("gate_up_proj", "down_proj"))]:
            experts, inner, outer = base.pop(name).shape
            base[name + "_blocks"] = torch.randint(0, 256, (experts, outer, inner // 32, 16), dtype=torch.uint8, generator=g)
            base[name + "_scales"] = torch.randint(118, 126, (experts, outer, inner // 32), dtype=torch.uint8, generator=g)
        for old in os.listdir(self.base):
            if ".safetensors" in old:
                os.remove(os.path.join(self.base, old))
        save_file(base, os.path.join(self.base, "model.safetensors"), {"format": "pt"})
        got = self.ours("dequantize")
        ordinary = os.path.join(self.tmp.name, "ordinary")
        self.run_ckpt("export", self.base, ordinary, "-q", "-o", "dequantize")
        self.base = ordinary
        self.same(got, self.theirs(torch.float32))


if __name__ == "__main__":
    unittest.main()
