# SPDX-License-Identifier: Apache-2.0
"""The run, the checkpoint or the directory inside it: whatever a user names, the model is the same."""

import os
import shutil
import subprocess
import tempfile
import unittest

from case import CKPT, roots

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
