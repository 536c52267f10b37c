# SPDX-License-Identifier: Apache-2.0
"""With a base that has weights its names decide, whatever the class: models of other libraries, of code of their own, with heads of trainers, in a
DCP, a file of torch.save or accelerate's folder; a base that is quantised and a run that is not; value heads in a model directory; pipelines."""

import json
import os
import shutil
import subprocess
import sys
import unittest

try:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import torch.distributed.checkpoint as dcp
    import transformers as tf
    from safetensors.torch import load_file, save_file
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

from tensor_case import CKPT, SEED, TensorCase, export, randomise, read_all

tf.utils.logging.disable_progress_bar()
SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=64)
DIFFUSERS = "diffusion_pytorch_model"


def shapes():
    """Names of a model that no list has, some of which look like those of others."""
    names = {"time_text_embed.timestep_embedder.linear_1.weight": (8, 4), "x_embedder.weight": (8, 6), "proj_out.weight": (6, 8), "proj_out.bias": (6,)}
    for i in range(3):
        names |= {f"blocks.{i}.attn.to_q.weight": (8, 8), f"blocks.{i}.attn.embed_tokens.weight": (5, 8), f"blocks.{i}.norm.weight": (8,)}
    return names


def tensors(seed, names=None):
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g).bfloat16() for name, shape in (names or shapes()).items()}


class Names(TensorCase):
    def setUp(self):
        super().setUp()
        torch.manual_seed(SEED)

    def write(self, name, tensors, config=None, file="model.safetensors"):
        os.makedirs(self.path(name), exist_ok=True)
        save_file(tensors, os.path.join(self.path(name), file), {"format": "pt"})
        if config:
            with open(os.path.join(self.path(name), "config.json"), "w") as f:
                json.dump(config, f)
        return self.path(name)

    def ours(self, run, *options):
        out = self.path("out")
        shutil.rmtree(out, ignore_errors=True)
        done = export(run, out, *options)
        self.assertEqual(done.returncode, 0, done.stderr)
        return out, done.stderr

    def diffusers_base(self, sharded=False):
        """A directory as diffusers writes it: (its path, its files)."""
        state, config = tensors(1), {"_class_name": "SomeTransformer2DModel", "_diffusers_version": "0.35.0", "num_layers": 3}
        if not sharded:
            return self.write("base", state, config, f"{DIFFUSERS}.safetensors"), [f"{DIFFUSERS}.safetensors", "config.json"]
        files = {name: f"{DIFFUSERS}-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(state))}
        for file in set(files.values()):
            self.write("base", {k: state[k] for k in files if files[k] == file}, config, file)
        with open(self.path(f"base/{DIFFUSERS}.safetensors.index.json"), "w") as f:
            json.dump({"metadata": {"total_size": 1}, "weight_map": files}, f)
        return self.path("base"), ["config.json", f"{DIFFUSERS}.safetensors.index.json", *sorted(set(files.values()))]

    def runs(self, state):
        """The same tensors in every container."""
        for prefix in ("", "module.", "transformer."):
            at = self.path(f"dcp.{prefix}")
            dcp.save({prefix + k: v for k, v in state.items()} | {"optimizer.step": torch.tensor(3)}, checkpoint_id=at, no_dist=True)
            yield at
        os.makedirs(self.path("torch"))
        torch.save({"model": state, "step": 3}, self.path("torch/model.pt"))
        yield self.path("torch")
        os.makedirs(self.path("accelerate/checkpoint_5"))
        save_file(state, self.path("accelerate/checkpoint_5/model.safetensors"), {"format": "pt"})
        yield self.path("accelerate")

    def test_models_of_another_library_have_its_files(self):
        state = tensors(2)
        for sharded in (False, True):
            base, files = self.diffusers_base(sharded)
            for run in self.runs(state):
                with self.subTest(run=os.path.relpath(run, self.tmp), sharded=sharded):
                    out, said = self.ours(run, f"base={base}")
                    self.assertEqual((sorted(os.listdir(out)), "warning" in said), (sorted(files), False), said)
                    self.same(read_all(out), state, run)
                    with open(os.path.join(out, "config.json"), "rb") as a, open(os.path.join(base, "config.json"), "rb") as b:
                        self.assertEqual(a.read(), b.read())
                    out, _ = self.ours(run, f"base={base}", "max_shard_size=200")
                    self.assertTrue(all(f.startswith(DIFFUSERS) for f in os.listdir(out) if "safetensors" in f), os.listdir(out))
                    self.assertIn(f"{DIFFUSERS}.safetensors.index.json", os.listdir(out))
                    self.same(read_all(out), state, run)
            for name in os.listdir(self.tmp):
                shutil.rmtree(self.path(name))

    def test_what_the_base_has_is_a_weight_by_any_name(self):
        """A table that most classes compute, a part that is called like an optimizer's."""
        state = tensors(2, shapes() | {"sinusoid.inv_freq": (4,), "scheduler.sigmas.weight": (4, 4)})
        base = self.write("base", {k: torch.zeros_like(v) for k, v in state.items()}, {"_class_name": "X"}, f"{DIFFUSERS}.safetensors")
        for prefix in ("", "model."):
            run = self.path(f"run.{prefix}")
            dcp.save({prefix + k: v for k, v in state.items()} | {"optimizer.state.blocks.0.norm.weight": torch.ones(8).bfloat16()}, checkpoint_id=run, no_dist=True)
            out, said = self.ours(run, f"base={base}")
            self.same(read_all(out), state, prefix)
            self.assertEqual(said, "")

    def test_without_a_base_it_is_asked_for(self):
        run = next(self.runs(tensors(2)))
        done = export(run, self.path("no"))
        self.assertEqual(done.returncode, 1)
        self.assertIn("base=DIR", done.stderr)

    def test_another_model_s_base_is_refused(self):
        base, _ = self.diffusers_base()
        run = next(self.runs(tensors(2, {k: tuple(2 * n for n in shape) for k, shape in shapes().items()})))
        done = export(run, self.path("no"), f"base={base}")
        self.assertEqual(done.returncode, 1)
        self.assertIn("of another shape", done.stderr)

    def test_a_copy_that_the_base_has_not_is_left_out_with_a_warning(self):
        base, _ = self.diffusers_base()
        state = tensors(2)
        dcp.save(state | {"again.weight": state["x_embedder.weight"], "more.weight": torch.randn(8, 6).bfloat16()}, checkpoint_id=self.path("run"), no_dist=True)
        out, said = self.ours(self.path("run"), f"base={base}")
        self.assertEqual(set(read_all(out)) - set(state), {"more.weight"})
        self.assertIn("'again.weight' is 'x_embedder.weight'", said)
        self.assertIn("'more.weight'" if "'more.weight'" in said else "more.weight", said)

    def test_a_config_whose_own_sizes_are_none_of_the_model(self):
        """PaliGemma's, whose text model alone has a vocabulary and a width."""
        part = dict(intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        model = randomise(tf.PaliGemmaForConditionalGeneration(tf.PaliGemmaConfig(
            vision_config=dict(part, model_type="siglip_vision_model", hidden_size=32, image_size=28, patch_size=14, projection_dim=48),
            text_config=dict(part, model_type="gemma", hidden_size=48, num_key_value_heads=1, head_dim=12, vocab_size=120), projection_dim=48)))
        model.save_pretrained(self.path("want"))
        dcp.save({"model": model.state_dict()}, checkpoint_id=self.path("run/step-1"), no_dist=True)
        shutil.copy(self.path("want/config.json"), self.path("run"))
        for options in ((), (f"base={self.path('want')}",)):
            out, _ = self.ours(self.path("run"), *options)
            for name in os.listdir(self.path("want")):
                with open(os.path.join(out, name), "rb") as a, open(self.path(f"want/{name}"), "rb") as b:
                    self.assertEqual(a.read(), b.read(), name)

    # ---- heads ----

    def llama(self, name, cls=None, **more):
        model = randomise((cls or tf.LlamaForCausalLM)(tf.LlamaConfig(**SIZES, **more))).bfloat16()
        model.save_pretrained(self.path(name))
        return self.path(name), read_all(self.path(name))

    def test_value_heads_in_a_model_directory(self):
        run, state = self.llama("model")
        head = {"v_head.summary.weight": torch.randn(1, 32).bfloat16(), "v_head.summary.bias": torch.randn(1).bfloat16()}
        for held in ("", "pretrained_model."):
            stored = {held + k: v for k, v in state.items()} | head
            save_file(stored, os.path.join(run, "model.safetensors"), {"format": "pt"})
            out, said = self.ours(run)
            self.same(read_all(out), state, held)
            self.assertIn("'v_head.summary.bias' first", said)
            _, info = tf.LlamaForCausalLM.from_pretrained(out, output_loading_info=True)
            self.assertFalse(info["missing_keys"] or info["unexpected_keys"], info)
            out, _ = self.ours(run, "view=raw")
            self.same(read_all(out), stored, held)
            with self.subTest("in a .bin"):
                os.makedirs(self.path("bin"), exist_ok=True)
                torch.save(stored, self.path("bin/pytorch_model.bin"))
                shutil.copy(os.path.join(run, "config.json"), self.path("bin"))
                out, said = self.ours(self.path("bin"))
                self.same(read_all(out), state, held)
                self.assertIn("left out: 2 tensors", said)
                self.assertIn("v_head.summary.", said)

    def test_a_head_of_the_class_stays(self):
        """Code of its own, another class, a base that has it."""
        run, state = self.llama("model")
        head = {"v_head.weight": torch.randn(1, 32).bfloat16()}
        save_file(state | head, os.path.join(run, "model.safetensors"), {"format": "pt"})
        with open(os.path.join(run, "config.json")) as f:
            config = json.load(f)
        for own in ({"auto_map": {"AutoModel": "modeling.Reward"}}, {"architectures": ["RewardModel"]}):
            with open(os.path.join(run, "config.json"), "w") as f:
                json.dump(config | own, f)
            out, said = self.ours(run)
            self.same(read_all(out), state | head, str(own))
            self.assertNotIn("left out", said)
        with open(os.path.join(run, "config.json"), "w") as f:
            json.dump(config, f)
        dcp.save({"model": state | head}, checkpoint_id=self.path("run"), no_dist=True)
        base = self.write("base", {k: torch.zeros_like(v) for k, v in (state | head).items()}, config)
        for at in (run, self.path("run")):
            out, said = self.ours(at, f"base={base}")
            self.same(read_all(out), state | head, at)
            self.assertNotIn("left out", said)

    def test_a_reward_model_of_transformers_is_its_class(self):
        run, state = self.llama("model", tf.LlamaForSequenceClassification, num_labels=1)
        self.assertIn("score.weight", state)
        out, said = self.ours(run)
        self.same(read_all(out), state, "score")
        self.assertEqual(said, "")

    def test_a_class_that_is_called_a_model_and_has_a_head(self):
        """A reward model of a trainer, with a base and with the config alone."""
        _, state = self.llama("model", tf.LlamaForSequenceClassification, num_labels=1)
        state |= {"mean": torch.zeros(1).bfloat16(), "std": torch.ones(1).bfloat16()}
        with open(self.path("model/config.json")) as f:
            config = json.load(f) | {"architectures": ["RewardModel"]}
        with_weights = self.write("base", {k: torch.zeros_like(v) for k, v in state.items()}, config)
        os.makedirs(self.path("alone"))
        shutil.copy(os.path.join(with_weights, "config.json"), self.path("alone"))
        for key in ("", "model"):
            run = self.path(f"run{key}")
            dcp.save({key: state} if key else state, checkpoint_id=run, no_dist=True)
            for base in (with_weights, self.path("alone")):
                out, said = self.ours(run, f"base={base}")
                self.same(read_all(out), state, base)
                self.assertNotIn("left out", said)

    # ---- quantised bases ----

    def quantised(self, how):
        """(base, its tensors): the weights of a llama, packed."""
        path, state = self.llama("base", tie_word_embeddings=False)
        packed = {}
        for name, t in state.items():
            module = name.removesuffix(".weight")
            if "_proj" not in name:
                packed[name] = t
            elif how == "fp8":
                packed |= {name: t.float().to(torch.float8_e4m3fn), f"{module}.weight_scale": torch.ones(1)}
            elif how == "packed":
                packed |= {f"{module}.weight_packed": torch.zeros(t.shape[0], t.shape[1] // 8, dtype=torch.int32),
                           f"{module}.weight_scale": torch.ones(t.shape[0], 1).bfloat16(), f"{module}.weight_shape": torch.tensor(t.shape)}
            elif how == "gptq":
                packed |= {f"{module}.qweight": torch.zeros(t.shape[1] // 8, t.shape[0], dtype=torch.int32), f"{module}.qzeros": torch.zeros(1, 4, dtype=torch.int32),
                           f"{module}.scales": torch.ones(1, t.shape[0]).half(), f"{module}.g_idx": torch.zeros(t.shape[1], dtype=torch.int32)}
            else:
                packed |= {name: torch.zeros(t.numel() // 2, 1, dtype=torch.uint8), f"{name}.absmax": torch.ones(4), f"{name}.quant_map": torch.ones(16),
                           f"{name}.quant_state.bitsandbytes__nf4": torch.zeros(8, dtype=torch.uint8)}
        save_file(packed, os.path.join(path, "model.safetensors"), {"format": "pt"})
        with open(os.path.join(path, "config.json")) as f:
            config = json.load(f)
        with open(os.path.join(path, "config.json"), "w") as f:
            json.dump(config | {"quantization_config": {"quant_method": {"fp8": "compressed-tensors", "packed": "compressed-tensors"}.get(how, how)}}, f)
        return path, packed

    def test_a_quantised_base_of_a_run_that_is_not(self):
        for how in ("fp8", "packed", "gptq", "bitsandbytes"):
            base, packed = self.quantised(how)
            plain, state = self.llama("plain", tie_word_embeddings=False)
            for key in ("", "model."):
                with self.subTest(how=how, key=key):
                    run = self.path(f"{how}.{key}")
                    dcp.save({key + k: v for k, v in state.items()}, checkpoint_id=run, no_dist=True)
                    out, said = self.ours(run, f"base={base}")
                    self.same(read_all(out), state, how)
                    self.assertEqual(said, "")
                    with open(os.path.join(out, "config.json"), "rb") as a, open(os.path.join(plain, "config.json"), "rb") as b:
                        self.assertEqual(a.read(), b.read())
                    info = subprocess.run([CKPT, "info", "-v", run, "-o", f"base={base}"], capture_output=True, text=True)
                    self.assertNotIn("quantised", info.stdout)
            with self.subTest(how=how, run="quantised, too"):
                run = self.path(f"{how}.too")
                dcp.save(packed, checkpoint_id=run, no_dist=True)
                out, _ = self.ours(run, f"base={base}")
                self.same(read_all(out), packed, how)
                with open(os.path.join(out, "config.json")) as f:
                    self.assertIn("quantization_config", json.load(f))

    def test_blocks_and_scales_stand_for_a_tensor(self):
        """MXFP4 as gpt-oss has it."""
        config = tf.GptOssConfig(**SIZES, head_dim=8, num_local_experts=2, num_experts_per_tok=1, layer_types=["full_attention"] * 2)
        model = randomise(tf.GptOssForCausalLM(config)).bfloat16()
        model.save_pretrained(self.path("plain"))
        state, packed = read_all(self.path("plain")), {}
        for name, t in state.items():
            if name.endswith(("gate_up_proj", "down_proj")):
                packed |= {f"{name}_blocks": torch.zeros(t.shape[0], t.shape[2], t.shape[1] // 32, 16, dtype=torch.uint8),
                           f"{name}_scales": torch.zeros(t.shape[0], t.shape[2], t.shape[1] // 32, dtype=torch.uint8)}
            else:
                packed[name] = t
        with open(self.path("plain/config.json")) as f:
            base = self.write("base", packed, json.load(f) | {"quantization_config": {"quant_method": "mxfp4"}})
        dcp.save({"model": model.state_dict()}, checkpoint_id=self.path("run"), no_dist=True)
        out, said = self.ours(self.path("run"), f"base={base}")
        self.same(read_all(out), state, "mxfp4")
        self.assertEqual(said, "")
        with open(os.path.join(out, "config.json"), "rb") as a, open(self.path("plain/config.json"), "rb") as b:
            self.assertEqual(a.read(), b.read())

    # ---- pipelines ----

    def test_a_pipeline_is_no_run(self):
        for part in ("unet", "vae"):
            self.write(f"pipeline/{part}", tensors(1), {"_class_name": "X"}, f"{DIFFUSERS}.safetensors")
        with open(self.path("pipeline/model_index.json"), "w") as f:
            json.dump({"_class_name": "StableDiffusionPipeline", "unet": ["diffusers", "X"], "vae": ["diffusers", "X"]}, f)
        done = export(self.path("pipeline"), self.path("no"))
        self.assertEqual(done.returncode, 1)
        for word in ("model_index.json", "/unet'", "/vae'"):
            self.assertIn(word, done.stderr)
        self.same(read_all(self.ours(self.path("pipeline/unet"))[0]), load_file(self.path(f"pipeline/unet/{DIFFUSERS}.safetensors")), "unet")
        for step in ("checkpoint-10", "checkpoint-20"):  # a trainer's steps beside the finished pipeline
            dcp.save(tensors(2), checkpoint_id=self.path(f"pipeline/{step}"), no_dist=True)
        out, said = self.ours(self.path("pipeline"), f"base={self.path('pipeline/unet')}")
        self.same(read_all(out), tensors(2), "steps")
        self.assertIn("is left out", said)


if __name__ == "__main__":
    unittest.main()
