# SPDX-License-Identifier: Apache-2.0
"""The run, the checkpoint or the directory inside it: whatever a user names, the model is the same."""

import json
import os
import shutil
import subprocess
import tempfile
import unittest

from case import CKPT, all_files, compare_bytes, roots

# case, in the tree or in the collection: what may be named
LAYOUTS = {
    "torchtitan/deepseek_v3_dp2": ["run/checkpoint/step-20", "run/checkpoint", "run"],
    "verl/fsdp2_llama_w4": ["run/global_step_20/actor", "run/global_step_20", "run"],
    "torchtitan/llama3_dp2": ["run/checkpoint/step-20", "run/checkpoint", "run"],
    "torchtitan/qwen3_dp2_hf": ["run/checkpoint/step-20", "run/checkpoint", "run"],
    "trainer/fsdp2_sharded_llama_w2": ["run/checkpoint-4/pytorch_model_fsdp_0", "run/checkpoint-4", "run"],
}


def digest(path, base):
    args = [CKPT, "digest", "--tensors", path] + (["-o", f"base={base}"] if os.path.isdir(base) else [])
    return subprocess.run(args, capture_output=True, text=True)


class Layouts(unittest.TestCase):
    def same(self, base, paths):
        first = digest(paths[0], base)
        self.assertEqual(first.returncode, 0, first.stderr)
        self.assertGreater(len(first.stdout.splitlines()), 5)
        for path in paths[1:]:
            got = digest(path, base)
            self.assertEqual((got.returncode, got.stdout), (0, first.stdout), f"{path}: {got.stderr}")

    def test_named_at_any_depth(self):
        found = [os.path.join(root, case) for root in roots() for case in LAYOUTS if os.path.isdir(os.path.join(root, case))]
        self.assertTrue(found)
        for case in found:
            with self.subTest(case):
                paths = LAYOUTS["/".join(case.split("/")[-2:])]
                self.same(os.path.join(case, "base"), [os.path.join(case, p) for p in paths])

    def test_steps_of_verl(self):
        """The tracker is written last: a step with a higher number is not finished; one with a lower number is no reason for a warning."""
        with tempfile.TemporaryDirectory() as tmp:
            run = os.path.join(tmp, "run")
            shutil.copytree(os.path.join(next(roots()), "verl", "fsdp2_llama_w4", "run"), run)
            for step in ("5", "30"):
                shutil.copytree(os.path.join(run, "global_step_20"), os.path.join(run, "global_step_" + step))
            os.makedirs(os.path.join(run, "global_step_20", "critic"))
            info = subprocess.run([CKPT, "info", "--json", run], capture_output=True, text=True)
            self.assertEqual((info.returncode, info.stderr), (0, ""))
            self.assertEqual(json.loads(info.stdout)["steps"], ["global_step_5", "global_step_20"])
            self.assertIn("step global_step_20", json.loads(info.stdout)["source"])
            with open(os.path.join(run, "latest_checkpointed_iteration.txt"), "w") as f:
                f.write("5")
            info = subprocess.run([CKPT, "info", "--json", run], capture_output=True, text=True)
            self.assertEqual((json.loads(info.stdout)["steps"], info.stderr), (["global_step_5"], ""))
            shutil.rmtree(os.path.join(run, "global_step_5"))
            info = subprocess.run([CKPT, "info", run], capture_output=True, text=True)
            self.assertEqual(info.returncode, 1)
            self.assertIn("no finished checkpoint", info.stderr)

    def test_megatron_of_verl(self):
        """A distributed checkpoint without arguments, and the config in huggingface/; in the layout of verl's versions before and since 2 of its schema
        (verl/utils/megatron_utils.py). The oracle is save_pretrained's, as for the same checkpoint in NeMo's layout."""
        case = os.path.join(next(roots()), "megatron", "n16_llama_tp2")
        for weights, config in (("dist_ckpt", "huggingface"), ("model/dist_ckpt", "model/huggingface")):
            with self.subTest(weights), tempfile.TemporaryDirectory() as tmp:
                run = os.path.join(tmp, "run")
                actor = os.path.join(run, "global_step_7", "actor")
                shutil.copytree(os.path.join(case, "run", "weights"), os.path.join(actor, weights))
                shutil.copytree(os.path.join(case, "base"), os.path.join(actor, config))
                with open(os.path.join(run, "latest_checkpointed_iteration.txt"), "w") as f:
                    f.write("7")
                for path in (run, os.path.dirname(actor), actor, os.path.join(actor, weights)):
                    out = os.path.join(tmp, str(len(path)))
                    done = subprocess.run([CKPT, "export", path, out], capture_output=True, text=True)
                    self.assertEqual((done.returncode, "warning" in done.stderr), (0, False), done.stderr)
                    self.assertEqual(compare_bytes(out, os.path.join(case, "expected"), all_files(os.path.join(case, "expected"))), [])
                text = os.path.join(actor, config, "config.json")
                with open(text) as f:  # another family's config is not ignored
                    other = f.read().replace('"model_type": "llama"', '"model_type": "nemotron"')
                with open(text, "w") as f:
                    f.write(other)
                done = subprocess.run([CKPT, "info", actor], capture_output=True, text=True)
                self.assertEqual(done.returncode, 1, done.stdout)
                self.assertIn("nemotron", done.stderr)

    def test_steps_of_verl_with_megatron(self):
        """Their distributed checkpoints are finished before the files beside them are there: the tracker decides, as for FSDP's."""
        case = os.path.join(next(roots()), "megatron", "n16_llama_tp2")
        with tempfile.TemporaryDirectory() as run:
            for step in ("5", "20", "30"):
                actor = os.path.join(run, "global_step_" + step, "actor")
                shutil.copytree(os.path.join(case, "run", "weights"), os.path.join(actor, "dist_ckpt"))
                if step != "30":
                    shutil.copytree(os.path.join(case, "base"), os.path.join(actor, "huggingface"))
            with open(os.path.join(run, "latest_checkpointed_iteration.txt"), "w") as f:
                f.write("20")
            info = subprocess.run([CKPT, "info", "--json", run], capture_output=True, text=True)
            self.assertEqual((info.returncode, info.stderr), (0, ""))
            self.assertEqual(json.loads(info.stdout)["steps"], ["global_step_5", "global_step_20"])
            self.assertIn("step global_step_20", json.loads(info.stdout)["source"])

    def test_megatron_of_nemo_rl(self):
        """Its checkpoint manager makes step_N/policy/weights, and Megatron-Bridge saves into that as into the folder of a run: iter_0000000 and a tracker."""
        case = os.path.join(next(roots()), "megatron", "m19_llama_tp2pp2")
        iteration, base = os.path.join(case, "run", "iter_0000010"), os.path.join(case, "base")
        with tempfile.TemporaryDirectory() as tmp:
            run = os.path.join(tmp, "results")

            def save(step, part="policy", name="iter_0000000", tracker="0"):
                weights = os.path.join(run, step, part, "weights")
                shutil.copytree(iteration, os.path.join(weights, name))
                if tracker is not None:
                    with open(os.path.join(weights, "latest_checkpointed_iteration.txt"), "w") as f:
                        f.write(tracker)
                os.makedirs(os.path.join(run, step, part, "optimizer"), exist_ok=True)
                return os.path.join(weights, name)

            def info(path, *options):
                return subprocess.run([CKPT, "info", "--json", path, *options], capture_output=True, text=True)
            first = save("step_5")
            last = save("step_10", tracker=None)
            self.same(base, [iteration, first, os.path.dirname(first), os.path.join(run, "step_5"), last, os.path.join(run, "step_10"), run])
            self.assertEqual(json.loads(info(run).stdout)["steps"], ["step_5", "step_10"])
            # the tracker decides among several
            shutil.copytree(first, os.path.join(os.path.dirname(first), "iter_0000003"))
            os.remove(os.path.join(os.path.dirname(first), "iter_0000003", ".metadata"))
            self.same(base, [iteration, os.path.join(run, "step_5")])
            os.remove(os.path.join(os.path.dirname(first), "latest_checkpointed_iteration.txt"))
            shutil.copytree(first, os.path.join(os.path.dirname(first), "iter_0000007"))
            said = info(os.path.join(run, "step_5"))
            self.assertEqual(said.returncode, 1)
            self.assertIn("holds two models, 'policy/weights/iter_0000000' and 'policy/weights/iter_000000", said.stderr)
            self.assertIn("-o part=policy/weights/iter_0000000", said.stderr)
            self.assertEqual(info(os.path.join(run, "step_5"), "-o", "part=policy/weights/iter_0000007").returncode, 0)
            # two models in a step, and a model that is found without looking for steps
            save("step_10", "value")
            self.assertIn("'policy/weights/iter_0000000' and 'value/weights/iter_0000000'", info(os.path.join(run, "step_10")).stderr)
            shutil.copytree(iteration, os.path.join(run, "step_10", "export"))
            self.same(base, [iteration, os.path.join(run, "step_10")])

    def test_folders_of_weights(self):
        """Whoever names the folder of weights alone means the checkpoint, whose config is in the folder above; if its weights are those."""
        case = os.path.join(next(roots()), "megatron", "n16_llama_tp2")
        with tempfile.TemporaryDirectory() as tmp:
            out, expected = os.path.join(tmp, "out"), os.path.join(tmp, "expected")
            for path, to in ((os.path.join(case, "run"), expected), (os.path.join(case, "run", "weights"), out)):
                done = subprocess.run([CKPT, "export", path, to], capture_output=True, text=True)
                self.assertEqual((done.returncode, "warning" in done.stderr), (0, False), done.stderr)
            self.assertIn("tokenizer.json", all_files(expected))
            self.assertEqual(compare_bytes(out, expected, all_files(expected)), [])
            both = os.path.join(tmp, "both")
            shutil.copytree(os.path.join(case, "run"), both)
            shutil.copytree(os.path.join(case, "run", "weights"), os.path.join(both, "dist_ckpt"))
            done = subprocess.run([CKPT, "info", os.path.join(both, "dist_ckpt")], capture_output=True, text=True)
            self.assertEqual(done.returncode, 1, done.stdout)
            self.assertIn("holds no model config", done.stderr)

    def test_a_model_that_verl_saved_as_hugging_face_does(self):
        expected = os.path.join(next(roots()), "megatron", "n16_llama_tp2", "expected")
        for folder in ("huggingface", "model/huggingface"):
            with self.subTest(folder), tempfile.TemporaryDirectory() as tmp:
                actor = os.path.join(tmp, "global_step_7", "actor")
                shutil.copytree(expected, os.path.join(actor, folder))
                self.same("", [expected, actor, os.path.dirname(actor), tmp])

    def test_project_of_accelerate(self):
        """project_dir/checkpoints/checkpoint_0 and so on."""
        case = os.path.join(next(roots()), "accelerate", "fsdp2_rankbin_llama_w2")
        with tempfile.TemporaryDirectory() as tmp:
            project = os.path.join(tmp, "project")
            step = os.path.join(project, "checkpoints", "checkpoint_0")
            shutil.copytree(os.path.join(case, "run"), step)
            self.same(os.path.join(case, "base"), [step, project])


if __name__ == "__main__":
    unittest.main()
