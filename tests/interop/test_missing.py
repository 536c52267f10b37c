# SPDX-License-Identifier: Apache-2.0
"""missing=base: tensors that the checkpoint lacks come from the base, byte for byte; each is named; without the option the error names it.
Checkpoints of several formats, of models whose tensors were taken out; the oracle is the dict that was saved, with the base's in the holes."""

import glob
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

SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=64)
GOLDEN = os.path.join(os.environ.get("CKPTFS_SOURCE", "."), "tests", "golden", "nanotron")
HOLES = ("model.norm.weight", "model.layers.1.mlp.down_proj.weight")


class Missing(TensorCase):
    def model(self, name, **more):
        """A random model: (its folder, its state dict)."""
        model = randomise(tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES | more))).bfloat16()
        model.save_pretrained(self.path(name))
        return self.path(name), read_all(self.path(name))

    def setUp(self):
        super().setUp()
        torch.manual_seed(SEED)
        self.base, self.theirs = self.model("base", tie_word_embeddings=False)
        _, self.ours = self.model("trained", tie_word_embeddings=False)

    def dcp(self, name, tensors):
        dcp.save({"model": tensors}, checkpoint_id=self.path(name), no_dist=True)
        return self.path(name)

    def filled(self, run, want, taken, *options):
        out = self.path("out")
        done = export(run, out, f"base={self.base}", "missing=base", *options)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.same(read_all(out), want, run)
        shutil.rmtree(out)
        done = subprocess.run([CKPT, "info", "--json", run, *(w for o in (f"base={self.base}", "missing=base", *options) for w in ("-o", o))], capture_output=True, text=True)
        self.assertEqual(sorted(json.loads(done.stdout).get("from_base", [])), sorted(taken), run)
        for name in sorted(taken)[:3]:
            self.assertIn(f"'{name}'", done.stderr)

    def refused(self, run, names, *options):
        done = export(run, self.path("refused"), f"base={self.base}", *options)
        self.assertEqual(done.returncode, 1, done.stdout)
        for name in names:
            self.assertIn(name, done.stderr)
        self.assertIn("missing=base", done.stderr)

    def holes(self, names=HOLES):
        return {k: t for k, t in self.ours.items() if k not in names}, {k: self.theirs[k] if k in names else t for k, t in self.ours.items()}

    def test_dcp(self):
        have, want = self.holes()
        run = self.dcp("run", have)
        self.refused(run, HOLES)
        self.filled(run, want, HOLES)
        self.filled(self.dcp("whole", self.ours), self.ours, ())

    def test_a_model_directory(self):
        have, want = self.holes()
        run = self.path("trained")
        save_file(have, os.path.join(run, "model.safetensors"), {"format": "pt"})
        self.refused(run, HOLES)
        self.filled(run, want, HOLES)
        self.filled(run, want, HOLES, "max_shard_size=20KB")

    def test_other_formats_are_made_of_it(self):
        have, want = self.holes()
        run = self.dcp("run", have)
        for view in ("dcp", "megatron"):
            out = self.path(view)
            done = export(run, out, f"base={self.base}", "missing=base", f"view={view}", *(["tp=2"] if view == "megatron" else []))
            self.assertEqual(done.returncode, 0, done.stderr)
            back = self.path(f"{view}.back")
            done = export(out, back, f"base={self.base}")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.same(read_all(back), want, view)

    def test_a_recipe_s_sources(self):
        """A nanotron run whose last norm and whose second layer's down projection were not saved."""
        run = shutil.copytree(os.path.join(GOLDEN, "llama_tp1_pp1_untied_interleaved"), self.path("nanotron"))
        done = export(run, self.path("whole"))
        self.assertEqual(done.returncode, 0, done.stderr)
        ours = read_all(self.path("whole"))
        self.base = shutil.copytree(self.path("whole"), self.path("base2"))
        self.theirs = {k: t + 1 for k, t in ours.items()}
        save_file(self.theirs, os.path.join(self.base, "model.safetensors"), {"format": "pt"})
        for part in ("final_layer_norm", "decoder/1/pp_block/mlp/down_proj"):
            found = glob.glob(os.path.join(run, "10", "model", "model", part, "**", "*.safetensors"), recursive=True)
            self.assertTrue(found, part)
            for f in found:
                os.remove(f)
        self.refused(run, ["model.layers.1.mlp.down_proj.weight"])
        self.filled(run, {k: self.theirs[k] if k in HOLES else t for k, t in ours.items()}, HOLES)

    def test_a_tied_head_is_never_missing(self):
        self.base, self.theirs = self.model("tied_base", tie_word_embeddings=False)
        have = {k: t for k, t in self.ours.items() if k != "lm_head.weight"}
        run = self.dcp("tied", have)
        tf.LlamaConfig(**SIZES, tie_word_embeddings=True).save_pretrained(self.path("tied_config"))
        shutil.copy(self.path("tied_config/config.json"), self.base)
        self.filled(run, have, ())
        tf.LlamaConfig(**SIZES, tie_word_embeddings=False).save_pretrained(self.base)
        self.filled(run, have | {"lm_head.weight": self.theirs["lm_head.weight"]}, ["lm_head.weight"])

    def test_a_misspelling_is_no_hole(self):
        right, wrong = HOLES[1], HOLES[1].replace("weight", "weigth")
        for extra in ([wrong], [wrong, "foo.layers.0.mlp.up_proj.weight"]):
            have = {wrong if k == right else k: t for k, t in self.ours.items()} | {k: self.ours[right].clone() for k in extra[1:]}
            folder = self.path("trained")
            save_file(have, os.path.join(folder, "model.safetensors"), {"format": "pt"})
            for run in (folder, self.dcp(f"run{len(extra)}", have)):
                done = export(run, self.path("refused"), f"base={self.base}", "missing=base")
                self.assertEqual(done.returncode, 1, done.stdout)
                for word in (*extra, "allow_leftover"):
                    self.assertIn(word, done.stderr)
                want = {k: self.theirs[k] if k == right else t for k, t in self.ours.items()}
                self.filled(run, want, [right], "allow_leftover")

    def test_what_is_beside_the_model_is_no_hole(self):
        right = HOLES[1]
        run = self.path("beside")
        tensors = {"m." + ("x." if k == right else "") + k: t for k, t in self.ours.items()}
        tensors["x.up_proj.weight"] = tensors.pop(f"m.x.{right}")
        dcp.save(tensors, checkpoint_id=run, no_dist=True)
        done = export(run, self.path("refused"), f"base={self.base}", "missing=base")
        self.assertEqual(done.returncode, 1, done.stdout)
        for word in ("x.up_proj.weight", "allow_leftover"):
            self.assertIn(word, done.stderr)
        self.filled(run, {k: self.theirs[k] if k == right else t for k, t in self.ours.items()}, [right], "allow_leftover")

    def test_shapes_are_the_base_s(self):
        have, _ = self.holes(HOLES[:1])
        have[HOLES[1]] = have[HOLES[1]][:, :16].contiguous()
        folder = self.path("trained")
        save_file(have, os.path.join(folder, "model.safetensors"), {"format": "pt"})
        for run in (folder, self.dcp("run", have)):
            done = export(run, self.path("refused"), f"base={self.base}", "missing=base")
            self.assertEqual(done.returncode, 1, done.stdout)
            for word in (HOLES[1], "[32, 16]", "[32, 64]"):
                self.assertIn(word, done.stderr)

    def test_every_name_is_told(self):
        holes = [k for k in self.ours if "layers.1." in k]
        have, _ = self.holes(holes)
        run = self.dcp("run", have)
        done = subprocess.run([CKPT, "info", run, "-o", f"base={self.base}", "-o", "missing=base"], capture_output=True, text=True)
        for name in holes:
            self.assertIn(name, done.stdout)
        warning = export(run, self.path("out"), f"base={self.base}", "missing=base").stderr
        self.assertIn(f"{len(holes)} tensors", warning)
        self.assertEqual(sum(f"'{name}'" in warning for name in holes), 5, warning)

    def test_both_dtypes_are_told(self):
        masters = {k: t.float() for k, t in self.ours.items()}
        run = self.dcp("masters", masters)
        command = [CKPT, "info", run, "-o", f"base={self.base}"]
        text = subprocess.run(command, capture_output=True, text=True).stdout
        self.assertRegex(text, r"weights .*, bfloat16\n")
        self.assertRegex(text, r"stored +as float32 ")
        info = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True).stdout)
        self.assertEqual((info["dtype"], info["stored_dtype"]), ("bfloat16", "float32"))
        self.assertEqual((info["dtypes"], info["stored_dtypes"]), ({"bfloat16": len(masters)}, {"float32": len(masters)}))
        mixed = {k: t.float() if k.endswith("norm.weight") else t for k, t in self.ours.items()}
        text = subprocess.run([CKPT, "info", self.dcp("mixed", mixed)], capture_output=True, text=True).stdout
        self.assertRegex(text, r"weights .*, bfloat16, 5 float32\n")

    def test_a_tied_head_is_explained(self):
        self.model("tied_model", tie_word_embeddings=True)
        command = [CKPT, "explain", self.path("tied_model"), "lm_head.weight"]
        done = subprocess.run(command, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("model.embed_tokens.weight: BF16 [64, 32]", done.stdout)
        self.assertIn("is the same as: lm_head.weight", done.stdout)
        told = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True).stdout)
        self.assertEqual((told["tensor"], told["is_the_same_as"]), ("model.embed_tokens.weight", "lm_head.weight"))

    def test_a_load_gets_them(self):
        have, want = self.holes()
        run = self.dcp("run", have)
        top = os.path.join(os.environ.get("CKPTFS_SOURCE", "."), "contrib", "python")
        program = ("import sys, torch, ckptfs\nfrom safetensors.torch import load_file\nwant = load_file(sys.argv[3])\n"
                   "got = {k: torch.empty_like(t) for k, t in want.items()}\n"
                   "ckptfs.load_boxes([(k, [0] * t.dim(), t) for k, t in got.items()], sys.argv[1], base=sys.argv[2], missing='base')\n"
                   "assert all(torch.equal(got[k], t) for k, t in want.items())\n")
        save_file(want, self.path("want.safetensors"))
        env = os.environ | {"PYTHONPATH": top, "CKPTFS_LIBRARY_PATH": os.environ.get("CKPTFS_BUILD", "build/dev")}
        done = subprocess.run([sys.executable, "-c", program, run, self.base, self.path("want.safetensors")], env=env, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_what_does_not_go_together(self):
        run = self.dcp("run", self.ours)
        for options, words in ((["missing=base"], "needs base=DIR"), ([f"base={self.base}", "missing=all"], "is not one of error|base"),
                               ([f"base={self.base}", "missing=base", "view=raw"], "does not apply to view=raw")):
            done = export(run, self.path("refused"), *options)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(words, done.stderr)
        os.remove(os.path.join(self.base, "model.safetensors"))
        done = export(run, self.path("refused"), f"base={self.base}", "missing=base")
        self.assertIn("a model directory with weights", done.stderr)

    def test_a_part_that_is_missing_is_an_error(self):
        run = self.dcp("run", self.ours)
        with open(glob.glob(os.path.join(run, "*.distcp"))[0], "r+b") as f:
            f.truncate(os.fstat(f.fileno()).st_size // 2)
        done = export(run, self.path("refused"), f"base={self.base}", "missing=base")
        self.assertEqual(done.returncode, 1, done.stderr)


if __name__ == "__main__":
    unittest.main()
