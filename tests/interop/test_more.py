# SPDX-License-Identifier: Apache-2.0
"""Other people's loaders on files of the mount, whose tensors must be those of safetensors' own reading of an export; and the tests of
accelerate and PEFT once more with the oldest versions that run beside the newest torch and transformers on a CPU. All lie in a folder of their
own (CKPTFS_MORE, made by tests/run.sh from requirements-more.txt)."""

import glob
import os
import subprocess
import sys
import tempfile
import unittest

SOURCE = os.path.abspath(os.environ.get("CKPTFS_SOURCE", "."))
MORE = os.environ.get("CKPTFS_MORE", "")
GOLDEN = os.path.join(SOURCE, "tests", "golden")
CASES = {"nanotron/llama_tp2_pp2_tied": [], "verl/fsdp2_llama_w4/run": [],
         "deepspeed/z3_qwen3_frozen_w3/run": ["-o", f"base={GOLDEN}/deepspeed/z3_qwen3_frozen_w3/base"]}
sys.path.insert(0, os.path.join(SOURCE, "tests", "mount"))
sys.path.append(MORE)

try:
    import fastsafetensors
    import runai_model_streamer
    import torch
    from safetensors.torch import load_file
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)
from mountlib import CKPT, CKPTFS, Case, Mount, need_fuse  # noqa: E402


def by_fastsafetensors(files):
    loader = fastsafetensors.SafeTensorsFileLoader(fastsafetensors.SingleGroup(), torch.device("cpu"), nogds=True)
    loader.add_filenames({0: files})
    buffers = loader.copy_files_to_device()
    try:
        return {name: buffers.get_tensor(name).clone() for name in buffers.key_to_rank_lidx}
    finally:
        buffers.close()
        loader.close()


def by_runai(files):
    with runai_model_streamer.SafetensorsStreamer() as streamer:
        streamer.stream_files(files)
        return {name: tensor.clone() for name, tensor in streamer.get_tensors()}


class Loaders(Case):
    def test_each_reads_what_safetensors_reads(self):
        for run, options in CASES.items():
            with tempfile.TemporaryDirectory() as out:
                path, copy = os.path.join(GOLDEN, run), os.path.join(out, "copy")
                subprocess.run([CKPT, "export", path, copy, *options], check=True, capture_output=True)
                want = {k: v for f in glob.glob(copy + "/*.safetensors") for k, v in load_file(f).items()}
                self.assertGreater(len(want), 10)
                for by in (by_fastsafetensors, by_runai):
                    with self.subTest(by.__name__, run=run), Mount(path, self.mnt, *options, program=CKPTFS):
                        step = self.mnt if glob.glob(self.at("*.safetensors")) else os.path.realpath(self.at("latest"))
                        got = by(sorted(glob.glob(step + "/*.safetensors")))
                        self.assertEqual(got.keys(), want.keys())
                        for name, tensor in want.items():
                            self.assertEqual((got[name].dtype, got[name].shape), (tensor.dtype, tensor.shape), name)
                            self.assertTrue(torch.equal(got[name].view(torch.uint8), tensor.view(torch.uint8)), name)


class Oldest(unittest.TestCase):
    def run_again(self, package, test, *words):
        with open(os.path.join(SOURCE, "tests", "requirements-more.txt")) as f:
            version = next(line.split("==")[1] for line in f.read().split() if line.startswith(package + "=="))
        env = dict(os.environ, PYTHONPATH=MORE)
        found = subprocess.run([sys.executable, "-c", f"import {package}; print({package}.__version__)"], env=env, capture_output=True, text=True)
        self.assertEqual(found.stdout.strip(), version, found.stderr)
        done = subprocess.run([sys.executable, "-W", "ignore", os.path.join(SOURCE, "tests", test), *words], env=env, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout[-3000:] + done.stderr[-3000:])

    def test_accelerate(self):
        self.run_again("accelerate", "load/test_accelerate.py", "tied_model_as_accelerate")

    def test_peft(self):
        self.run_again("peft", "interop/test_lora.py")


if __name__ == "__main__":
    need_fuse()
    unittest.main(verbosity=2)
