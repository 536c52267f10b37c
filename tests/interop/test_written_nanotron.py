# SPDX-License-Identifier: Apache-2.0
"""view=nanotron: the files are those that nanotron's own code wrote for real checkpoints, and those that an independent writer makes of the
same Hugging Face tensors at any tp and pp; our own reader makes the model of them again."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import unittest

try:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers as tf

    import nanotron_writer as nt
    from tensor_case import CASES, CKPT, SEED, WrittenCase, export, read_all
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

tf.utils.logging.disable_progress_bar()
tf.utils.logging.set_verbosity_error()
SOURCE = os.environ.get("CKPTFS_SOURCE", os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
FIXTURES = os.environ.get("CKPTFS_FIXTURES") or os.path.join(SOURCE, "..", "shared", "fixtures")
COMMON = dict(vocab_size=96, hidden_size=64, intermediate_size=48, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4,
              max_position_embeddings=64, bos_token_id=1, eos_token_id=2)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=40, mlp_only_layers=[1])
FAMILIES = [
    (tf.LlamaConfig, dict(tie_word_embeddings=False), nt.llama_like),
    (tf.LlamaConfig, dict(tie_word_embeddings=True), nt.llama_like),
    (tf.Qwen2Config, dict(tie_word_embeddings=True), nt.llama_like),
    (tf.MistralConfig, dict(sliding_window=8), nt.llama_like),
    (tf.SmolLM3Config, dict(no_rope_layer_interval=3, pad_token_id=0), nt.llama_like),
    (tf.Qwen2MoeConfig, MOE, lambda sd, cfg: nt.llama_like(sd, cfg, moe=nt.moe_main)),
    (tf.Starcoder2Config, {}, nt.starcoder2),
    (tf.MambaConfig, dict(state_size=8, num_hidden_layers=5, hidden_size=32, intermediate_size=64), nt.mamba),
]


def parameters(folder):
    """{file below model/: (metadata, header, data)}"""
    found = {}
    for at, _, names in os.walk(os.path.join(folder, "model")):
        for name in names:
            with open(os.path.join(at, name), "rb") as f:
                n = int.from_bytes(f.read(8), "little")
                header = json.loads(f.read(n))
                assert (n + 8) % 8 == 0
                meta = {k: re.sub(r"np\.int64\((\d+)\)", r"\1", v) for k, v in header.pop("__metadata__").items()}
                found[os.path.relpath(os.path.join(at, name), folder)] = meta, header, f.read()
    return found


def layout(files):
    """tp and pp, by the names of files."""
    ranks = [re.search(r"pp-rank-\d+-of-(\d+)_tp-rank-\d+-of-(\d+)", n) for n in files]
    pp, tp = max((int(m[1]), int(m[2])) for m in ranks if m)
    return tp, pp


def anywhere(files):
    """Names without the stage, which the independent writer assigns in another way."""
    return {re.sub(r"pp-rank-\d+-of", "pp-rank-x-of", n): f for n, f in files.items()}


class Nanotron(WrittenCase):
    def model(self, name, cls, config):
        path, model = self.save_model(name, cls(**{**COMMON, **config}), "100KB")
        return path, read_all(path), model.config

    def same_parameters(self, got, want, what):
        self.assertEqual(sorted(got), sorted(want), what)
        for name in want:
            self.assertEqual(got[name][:2], want[name][:2], f"{what}: {name}")
            self.assertTrue(got[name][2] == want[name][2], f"{what}: {name}")

    # ---- real checkpoints ----

    def check_real(self, step, what):
        """A checkpoint at its own layout is itself; at another one it is the same model."""
        want = parameters(step)
        tp, pp = layout(want)
        out = self.path(what)
        self.export(step, out, "view=nanotron", f"tp={tp}", f"pp={pp}")
        number = os.path.basename(step)
        self.assertEqual(sorted(os.listdir(out)), sorted([number, "latest.txt"]), what)
        with open(os.path.join(out, "latest.txt")) as f:
            self.assertEqual(f.read(), number, what)
        self.same_parameters(parameters(os.path.join(out, number)), want, what)
        with open(os.path.join(out, number, "model_config.json")) as a, open(os.path.join(step, "model_config.json")) as b:
            self.assertEqual(a.read(), b.read(), what)
        model = self.export(step, self.path(what + ".hf"))
        again = self.export(self.export(step, self.path(what + ".4"), "view=nanotron", "tp=1", "pp=3"), self.path(what + ".again"))
        self.same_files(again, model)

    def pieces(self, run, name, *options):
        done = subprocess.run([CKPT, "explain", "--json", run, name, *[x for o in options for x in ("-o", o)]], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, f"{name}: {done.stderr}")
        return len(json.loads(done.stdout)["pieces"])

    def test_mapped_twice_is_read_as_once(self):
        """A tensor that is mapped to the hub's and back is read from as many pieces as the stored one; experts, which the hub has one by one, from
        one for each and each half; rotary pairs, which lie apart on the hub, from no more than the shards have."""
        golden = os.path.join(SOURCE, "tests", "golden", "nanotron")
        for name in ("llama_tp2_pp2_tied", "llama_tp1_pp1_untied_interleaved"):
            run = os.path.join(golden, name, "10")
            for t in ("attn.qkv_proj", "attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
                t = f"model.decoder.1.pp_block.{t}.weight"
                self.assertLessEqual(self.pieces(run, t, "view=nanotron"), self.pieces(run, t, "view=raw"), f"{name}: {t}")

    def test_real_checkpoints(self):
        found = 0
        for root in [os.path.join(SOURCE, "tests", "golden"), FIXTURES]:
            folder = os.path.join(root, "nanotron")
            for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
                steps = [s for s in os.listdir(os.path.join(folder, name)) if s.isdigit()] if os.path.isdir(os.path.join(folder, name)) else []
                for step in [] if name.endswith(".expected") or "epbranch" in name else steps:
                    found += 1
                    with self.subTest(name, step=step):
                        self.check_real(os.path.join(folder, name, step), f"{name}-{step}-{found}")
        self.assertGreater(found, 1)

    # ---- from the hub ----

    def check_family(self, i, seed):
        cls, config, make = FAMILIES[i]
        rng = random.Random(f"{SEED} {seed}")
        tp, pp = rng.choice([1, 2, 4]), rng.choice([1, 2, 3, 5])
        what = f"{cls.__name__} {config}, tp {tp}, pp {pp}, CKPTFS_SEED={SEED}"
        source, tensors, cfg = self.model(f"model-{seed}", cls, config)
        run = self.export(source, self.path(f"run-{seed}"), "view=nanotron", f"tp={tp}", f"pp={pp}")
        self.assertEqual(sorted(os.listdir(run)), ["0", "latest.txt"], what)
        want = self.path(f"want-{seed}")
        params = make(tensors, cfg)
        for p in params:
            if p.name.endswith("router.weight"):
                p.data = p.data.to(torch.bfloat16)  # nanotron converts it when it loads
        nt.write_params(params, want, tp, pp, cfg.num_hidden_layers, version="1.5")
        self.same_parameters(anywhere(parameters(os.path.join(run, "0"))), anywhere(parameters(want)), what)
        self.same_files(self.export(run, self.path(f"back-{seed}"), f"base={source}"), source)
        self.same(read_all(self.export(run, self.path(f"bare-{seed}"))), tensors, what)
        return run

    def test_every_family_at_random_layouts(self):
        for i in range(len(FAMILIES)):
            for k in range(max(CASES // 3, 1)):
                with self.subTest(FAMILIES[i][0].__name__, k=k):
                    self.check_family(i, 10 * i + k)

    def test_from_one_layout_to_another(self):
        """Every number of ranks from every other, through nanotron's own format only."""
        source, tensors, _ = self.model("model", *FAMILIES[0][:2])
        run = self.export(source, self.path("run"), "view=nanotron", "tp=4", "pp=2")
        for tp, pp in ((1, 1), (2, 3), (4, 2)):
            other = self.export(run, self.path(f"run-{tp}-{pp}"), "view=nanotron", f"tp={tp}", f"pp={pp}")
            direct = self.export(source, self.path(f"direct-{tp}-{pp}"), "view=nanotron", f"tp={tp}", f"pp={pp}")
            self.same_parameters(parameters(os.path.join(other, "0")), parameters(os.path.join(direct, "0")), f"tp {tp}, pp {pp}")
            self.same(read_all(self.export(other, self.path(f"hf-{tp}-{pp}"))), tensors, f"tp {tp}, pp {pp}")

    def test_casts_are_divided(self):
        source, tensors, _ = self.model("model", *FAMILIES[0][:2])
        run = self.export(source, self.path("run"), "view=nanotron", "tp=2", "dtype=float32")
        self.same(read_all(self.export(run, self.path("back"))), {n: t.float() for n, t in tensors.items()}, "float32")

    def test_config_has_what_training_needs(self):
        """The arguments of nanotron's dataclass, and its types (nanotron/config/models_config.py)."""
        import yaml

        source, _, cfg = self.model("model", *FAMILIES[0][:2])
        run = self.export(source, self.path("run"), "view=nanotron", "tp=2", "pp=3")
        with open(os.path.join(run, "0", "model_config.json")) as f:
            text = f.read()
            model = json.loads(text)
        self.assertEqual(text, json.dumps(model))
        self.assertEqual([(k, type(v)) for k, v in model.items()],
                         [(k, t) for k, t in dict(
                             bos_token_id=int, eos_token_id=int, hidden_act=str, hidden_size=int, initializer_range=float, intermediate_size=int,
                             is_llama_config=bool, max_position_embeddings=int, num_attention_heads=int, num_hidden_layers=int, attention_bias=bool,
                             num_key_value_heads=int, pad_token_id=type(None), pretraining_tp=int, rms_norm_eps=float, rope_scaling=type(None),
                             rope_theta=float, rope_interleaved=bool, tie_word_embeddings=bool, use_cache=bool, vocab_size=int,
                             _attn_implementation=str, z_loss_enabled=bool, z_loss_coefficient=float).items()])
        self.assertEqual((model["hidden_size"], model["rope_theta"], model["rms_norm_eps"]), (64, 10000.0, cfg.rms_norm_eps))
        with open(os.path.join(run, "0", "config.yaml")) as f:
            config = yaml.safe_load(f)
        self.assertEqual(config["model"]["model_config"], model)
        self.assertEqual((config["parallelism"]["tp"], config["parallelism"]["pp"], config["model"]["dtype"]), (2, 3, "bfloat16"))
        with open(os.path.join(run, "0", "checkpoint_metadata.json")) as f:
            meta = json.load(f)
        self.assertEqual((meta["tp"], meta["version"], meta["metas"]["last_train_step"]), (2, "1.5", 0))

    def test_padding_is_zeros_and_said(self):
        source, tensors, _ = self.model("model", tf.LlamaConfig, dict(vocab_size=101, tie_word_embeddings=False))
        done = export(source, self.path("run"), "view=nanotron", "tp=4")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("'model.lm_head.pp_block.weight' is padded with zeros: dimension 0 becomes 104, a multiple of 4", done.stderr)
        with open(os.path.join(self.path("run"), "0", "model_config.json")) as f:
            self.assertEqual(json.load(f)["vocab_size"], 104)
        back = read_all(self.export(self.path("run"), self.path("back")))
        for name in ("lm_head.weight", "model.embed_tokens.weight"):
            self.assertEqual(back[name].shape[0], 104)
            self.assertEqual(back[name][101:].abs().max().item(), 0)
            tensors[name] = torch.cat([tensors[name], torch.zeros(3, 64, dtype=torch.bfloat16)])
        self.same(back, tensors, "padded")

    def test_padding_is_cropped_on_the_way_back(self):
        """By a base, or by vocab_size=; a vocabulary of more tokens than there are rows is no padding."""
        for i, (cls, config, _) in enumerate(FAMILIES):
            with self.subTest(f"{cls.__name__} {config}"):
                source, tensors, _ = self.model(f"model{i}", cls, {**config, "vocab_size": 41})
                run = self.export(source, self.path(f"run{i}"), "view=nanotron", "tp=2")
                self.same_files(self.export(run, self.path(f"back{i}"), f"base={source}"), source)
                done = export(run, self.path(f"bare{i}"), "vocab_size=41")
                self.assertIn("the checkpoint has 42 rows of a vocabulary of 41 tokens", done.stderr)
                back = self.path(f"bare{i}")
                self.same(read_all(back), tensors, cls.__name__)
                with open(os.path.join(back, "config.json")) as f:
                    self.assertEqual(json.load(f)["vocab_size"], 41)
                longer, _, _ = self.model(f"longer{i}", cls, {**config, "vocab_size": 43})
                for how in (f"base={longer}", "vocab_size=43"):
                    done = export(run, self.path("refused"), how)
                    self.assertEqual(done.returncode, 1, done.stderr)
                    self.assertIn("is 42", done.stderr)
                    self.assertIn("43", done.stderr)

    def test_padding_of_a_real_run(self):
        fixture = os.path.join(FIXTURES, "nanotron", "llama_fp32_tp2_pp1_vocabpad")
        whole = self.export(fixture, self.path("whole"))
        with open(os.path.join(whole, "config.json")) as f:
            config = json.load(f)
        config["vocab_size"] -= 14
        os.mkdir(self.path("base"))
        with open(os.path.join(self.path("base"), "config.json"), "w") as f:
            json.dump(config, f)
        got, want = read_all(self.export(fixture, self.path("got"), f"base={self.path('base')}")), read_all(whole)
        self.same(got, {n: t[:130] if t.shape[0] == 144 else t for n, t in want.items()}, "130 of 144 rows")

    def test_steps_of_a_run(self):
        """Each step of a run is shown as a run folder of that step."""
        run = self.path("run")
        for step in ("10", "20"):
            shutil.copytree(os.path.join(SOURCE, "tests", "golden", "nanotron", "llama_tp2_pp2_tied", "10"), os.path.join(run, step))
            with open(os.path.join(run, step, "checkpoint_metadata.json"), "r+") as f:
                text = f.read().replace('"last_train_step": 10', f'"last_train_step": {step}')
                f.seek(0)
                f.write(text)
        for step in ("10", "20"):
            out = self.path(step)
            done = subprocess.run([CKPT, "export", run, out, "--step", step, "-o", "view=nanotron", "-o", "tp=2"], capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(sorted(os.listdir(out)), sorted([step, "latest.txt"]))

    # ---- refusals ----

    def refuses(self, source, text, *options, status=1):
        done = export(source, self.path("refused"), "view=nanotron", *options)
        self.assertEqual(done.returncode, status, done.stderr)
        self.assertIn(text, done.stderr)

    def test_refuses(self):
        source, _, _ = self.model("model", *FAMILIES[0][:2])
        self.refuses(source, "has 4 of kv_heads, which cannot be divided among 8 ranks", "tp=8", status=2)
        self.refuses(source, "cannot be divided among 3 ranks", "tp=3", status=2)
        self.refuses(source, "the model has 6 layers, which cannot be divided among 7 stages", "pp=7", status=2)
        self.refuses(source, "option ep does not apply to view=nanotron", "ep=2", status=2)
        self.refuses(source, "option ranks does not apply to view=nanotron", "ranks=2", status=2)
        source, _, _ = self.model("qwen3", tf.Qwen3Config, {})
        self.refuses(source, "no recipe makes a model of type 'qwen3'")
        source, _, _ = self.model("wide", tf.LlamaConfig, dict(head_dim=16))
        self.refuses(source, "heads of hidden_size / num_attention_heads = 64 / 8 elements, the model's have 16")
        source, _, _ = self.model("bias", tf.LlamaConfig, dict(attention_bias=True))
        self.refuses(source, "no bias on o_proj")
        source, _, _ = self.model("topk", tf.Qwen2MoeConfig, {**MOE, "norm_topk_prob": True})
        self.refuses(source, "norm_topk_prob is true")


if not os.path.isdir(os.path.join(FIXTURES, "nanotron")):  # the collection is more than this tree has
    del Nanotron.test_padding_of_a_real_run


if __name__ == "__main__":
    unittest.main()
