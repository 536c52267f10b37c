# SPDX-License-Identifier: Apache-2.0
"""Models that Megatron-DeepSpeed saved, in the form of one module and in that of a pipeline, with tensor parallelism: they are shown as
the Hugging Face models that they are."""

import os
import shutil
import sys
import unittest

try:
    import torch

    import megatron_deepspeed_writer as mds
    from megatron_deepspeed_case import ModelCase, gpt2, llama, trained
    from tensor_case import export, read_all
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)


class Served(ModelCase):
    def test_modules(self):
        for tp in (1, 2):
            for tied in (False, True):
                cfg, sd = llama(tied)
                run = self.path(f"m{tp}{tied}")
                mds.save_modules(mds.Model(sd, cfg, 4), run, tp)
                self.served(run, sd, cfg)

    def test_what_arguments_say(self):
        cfg, sd = llama(rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
        run = self.path("theta")
        tag = mds.save_modules(mds.Model(sd, cfg, 4), run)
        self.assertEqual(self.served(run, sd, cfg)[1]["rope_parameters"]["rope_theta"], 500000.0)
        self.change(tag, "mp_rank_00", lambda root: root.pop("universal_checkpoint_info"), "_model_states.pt")
        done = export(run, run + ".rows")
        self.assertIn("does not say how long the vocabulary is: all 64 rows are shown", done.stderr)
        self.assertEqual(len(read_all(run + ".rows")["model.embed_tokens.weight"]), 64)
        self.change(tag, "mp_rank_00", lambda root: root.pop("checkpoint_version"), "_model_states.pt")
        self.refused(run, "its tensors have Megatron-DeepSpeed's names")

    def test_raw(self):
        """With the module's own names, as states have them."""
        cfg, sd = llama()
        for tp in (1, 2):
            model, run = mds.Model(sd, cfg, 4), self.path(f"raw{tp}")
            mds.save_modules(model, run, tp, model)
            self.assertEqual(export(run, run + ".out", "view=raw").returncode, 0)
            want = {f"language_model.encoder.layers.{i}.{name}": t for i, layer in enumerate(model.layers) for name, (t, rule) in layer.items()}
            got = read_all(run + ".out")
            self.same({name: got[name] for name in want}, want, run)
        mds.save_layers(mds.Model(sd, cfg), self.path("layers"), 2)
        self.refused(self.path("layers"), "does not say how the layers of several tensor-parallel ranks are joined", "view=raw", "allow_partial")

    def test_layers(self):
        for tp, pp, gaps in ((1, 1, (0, 0)), (2, 1, (0, 0)), (1, 2, (0, 0)), (2, 2, (1, 1))):
            for tied in (False, True):
                cfg, sd = llama(tied)
                run = self.path(f"l{tp}{pp}{tied}")
                mds.save_layers(mds.Model(sd, cfg, 4), run, tp, pp, gaps)
                self.served(run, sd, cfg)

    def test_masters(self):
        for name, save, keys in (("z1", mds.save_modules, {}), ("z1tp", mds.save_modules, {"tp": 2}), ("z3", mds.save_modules, {"stage": 3}),
                                 ("z3tp", mds.save_modules, {"tp": 2, "stage": 3, "world": 3}), ("pp", mds.save_layers, {"pp": 2}),
                                 ("pptp", mds.save_layers, {"tp": 2, "pp": 2}),
                                 ("tied", mds.save_layers, {"tp": 2, "pp": 2}), ("gpt2", mds.save_layers, {"tp": 2, "pp": 2})):
            cfg, sd = gpt2() if name == "gpt2" else llama(name == "tied")
            full = trained(sd)
            run = self.path(name)
            save(mds.Model(sd, cfg, 4), run, masters=mds.Model(full, cfg, 4), **keys)
            self.served(run, sd, cfg)
            shutil.rmtree(run + ".out")
            self.served(run, full, cfg, "dtype=float32")

    def test_gpt2(self):
        for tp, pp in ((1, 0), (2, 0), (1, 2), (2, 2)):
            cfg, sd = gpt2()
            run = self.path(f"g{tp}{pp}")
            model = mds.Model(sd, cfg, 4)
            mds.save_layers(model, run, tp, pp) if pp else mds.save_modules(model, run, tp)
            self.served(run, sd, cfg)

    def test_what_no_recipe_converts(self):
        cfg, sd = llama()
        for i, (key, value, needle) in enumerate((
                ("ds_sequence_parallel_fpdt", False, "all queries before all keys and values"), ("glu_activation", "swiglu", "glu_activation"),
                ("num_experts", [4], "experts (num_experts [4])"), ("num_experts", [1, 2], "experts (num_experts [1,2])"),
                ("use_rotary_position_embeddings", False, "neither rotary embeddings"), ("use_rotary_position_embeddings", ..., "neither rotary embeddings"))):
            run = self.path(str(i))
            mds.save_modules(mds.Model(sd, cfg), run, **{key: value})
            self.refused(run, needle)

    def test_models_that_compute_otherwise(self):
        """The same tensors as llama's, but not its computation; so is code without the engine of DeepSpeed, which saves as Megatron-LM did."""
        cfg, sd = llama()
        for i, (key, value, needle) in enumerate((
                ("apply_residual_connection_post_layernorm", True, "residual connections begin behind the norms"), ("rotary_percent", 0.5, "(rotary_percent 0.5)"),
                ("position_embedding_type", "alibi", "its positions"), ("position_embedding_type", "none", "its positions"), ("no_rope_freq", 4, "(no_rope_freq 4)"),
                ("quick_geglu", True, "is not a SiLU"), ("activation", "fast-geglu", "is not a SiLU"))):
            run = self.path(str(i))
            mds.save_modules(mds.Model(sd, cfg), run, **{key: value})
            self.refused(run, needle)
        run = self.path("1p")
        mds.save_modules(mds.Model(sd, cfg, 4), run, apply_layernorm_1p=True)  # its RMSNorm has no such variant
        self.served(run, sd, cfg)
        for name, needle in (("ranks", ""), ("fpdt", "all queries before all keys and values")):
            run = self.path(name)
            mds.save_ranks(mds.Model(sd, cfg, 4), run, 2, **({"ds_sequence_parallel_fpdt": False} if needle else {}))
            self.refused(run, needle) if needle else self.served(run, sd, cfg, "vocab_size=60")

    def test_arguments_that_contradict_the_tensors(self):
        cfg, sd = llama()
        for i, (key, value, needle) in enumerate((
                ("tensor_model_parallel_size", 2, "has the model files of 1 ranks (mp_rank_*), its args say 2"),
                ("tensor_model_parallel_size", ..., "have no tensor_model_parallel_size"), ("pipeline_model_parallel_size", 3, "has no files of layers"),
                ("num_layers", 3, "are not part of the model"), ("num_layers", 5, "'model.layers.4.input_layernorm.weight'"),
                ("hidden_size", 64, "the config makes it 64"), ("num_attention_heads", 8, "makes it 96"), ("num_key_value_heads", 4, "makes it 96"),
                ("ffn_hidden_size", 96, "the config makes it 96"), ("untie_embeddings_and_output_weights", False, "other values"))):
            run = self.path(str(i))
            mds.save_modules(mds.Model(sd, cfg), run, **{key: value})
            self.refused(run, needle)
        run = self.path("layers")
        mds.save_layers(mds.Model(sd, cfg), run, num_layers=5)
        self.refused(run, "there are 4 transformer layers (2 to 5), its args say 5")

    def test_files_that_are_missing_or_too_many(self):
        cfg, sd = llama()
        for i, (name, needle) in enumerate((
                ("layer_03-model_01", "layer_03-model_01-model_states.pt is missing"), ("layer_03-model_00", "layer_03-model_00-model_states.pt is missing"),
                ("layer_03", "there are 3 transformer layers"), ("layer_01", "no layer is the embedding"), ("layer_06", "no layer is the final norm"),
                ("layer_07", "lm_head.weight"), ("mp_rank_03", "the model files of 3 ranks"), ("mp_rank_00", "mp_rank_00_model_states.pt"))):
            run = self.path(f"lost{i}")
            tag = mds.save_layers(mds.Model(sd, cfg), run, 2, 2)
            for file in os.listdir(tag):
                if file.startswith(name):
                    os.remove(os.path.join(tag, file))
            self.refused(run, needle)
        run = self.path("more")
        tag = mds.save_layers(mds.Model(sd, cfg), run, 2, 2)
        shutil.copy(os.path.join(tag, "layer_03-model_01-model_states.pt"), os.path.join(tag, "layer_03-model_02-model_states.pt"))
        self.refused(run, "of a tensor-parallel rank that the run did not have")
        run = self.path("module")
        tag = mds.save_modules(mds.Model(sd, cfg), run, 2)
        os.remove(os.path.join(tag, "mp_rank_01_model_states.pt"))
        self.refused(run, "the model files of 1 tensor-parallel ranks are there")

    def change(self, tag, file, change, end="-model_states.pt"):
        path = os.path.join(tag, file + end)
        root = torch.load(path, weights_only=False)
        change(root)
        torch.save(root, path)

    def test_layers_that_lie(self):
        cfg, sd = llama()
        norm = "input_layernorm.weight"
        for i, (file, change, needle) in enumerate((
                ("layer_03-model_01", lambda d: d.update({norm: d[norm].float()}), "'3.input_layernorm.weight' is BF16[32] on the first"),
                ("layer_03-model_01", lambda d: d.update({norm: d[norm][:9].clone()}), "and BF16[9] on rank 1"),
                ("layer_03-model_01", lambda d: d.pop(norm), "'3.input_layernorm.weight' is not in the files of tensor-parallel rank 1"),
                ("layer_03-model_01", lambda d: d.update(x=d[norm]), "'3.x' is in the files of tensor-parallel rank 1, but not in"),
                ("layer_03-model_00", lambda d: d.pop(norm), "there are 3 transformer layers (2 to 5)"),
                ("layer_06-model_00", lambda d: d.update(x=d.pop("weight")), "no layer is the final norm"),
                ("layer_07-model_00", lambda d: d.update(weight=d.pop("lm_head.weight")), "the layers' order is not Megatron-DeepSpeed's"),
                ("layer_07-model_00", lambda d: d.update(x=d.pop("lm_head.weight")), "'7.x' is in no layer of a known kind"))):
            run = self.path(str(i))
            self.change(mds.save_layers(mds.Model(sd, cfg), run, 2, 1), file, change)
            self.refused(run, needle)

    def test_queries_apart(self):
        """Grouped queries as the code of July to November 2023 had them."""
        cfg, sd = llama()
        model = mds.Model(sd, cfg)
        for layer in model.layers:
            w = layer.pop("self_attention.query_key_value.weight")[0]
            layer |= {"self_attention.query.weight": (w[:32], mds.COL), "self_attention.key_value.weight": (w[32:], mds.COL)}
        run = self.path("run")
        mds.save_modules(model, run)
        self.refused(run, "are two projections")


if __name__ == "__main__":
    unittest.main()
