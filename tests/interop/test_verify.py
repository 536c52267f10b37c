# SPDX-License-Identifier: Apache-2.0
"""`ckpt verify A B`: the figures are those of torch, and A and B are anything that is read."""
import json
import os
import subprocess
import tempfile
import unittest

import torch
from safetensors.torch import load_file, save_file

HERE = os.path.dirname(os.path.abspath(__file__))
CKPT = os.path.join(os.environ.get("CKPTFS_BUILD", "build/release"), "fs", "ckpt")
NANOTRON = os.path.join(HERE, "..", "golden", "nanotron", "llama_tp2_pp2_tied")
MEGATRON = os.path.join(HERE, "..", "golden", "megatron", "m19_llama_tp2pp2", "run")
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
          torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool]


def verify(*args):
    done = subprocess.run([CKPT, "verify", *args], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


class Verify(unittest.TestCase):
    def setUp(self):
        self.tmp = tempfile.TemporaryDirectory()
        self.addCleanup(self.tmp.cleanup)

    def at(self, *path):
        return os.path.join(self.tmp.name, *path)

    def save(self, step, tensors):
        os.makedirs(self.at("run", step), exist_ok=True)
        save_file(tensors, self.at("run", step, "model.safetensors"))
        return self.at("run", step)

    def pair(self):
        """Tensors of every dtype, of which a fifth of the elements differ."""
        torch.manual_seed(0)
        a, noise = torch.randn(300, 700) * 3, torch.randn(300, 700) * (torch.rand(300, 700) < 0.2)
        return [{str(t)[6:]: (x.clamp(0, 200) if t == torch.uint8 else x > 0 if t == torch.bool else x).to(t) for t in DTYPES} for x in (a, a + noise)]

    def test_figures_are_those_of_torch(self):
        a, b = self.pair()
        dirs = self.save("1", a), self.save("2", b)
        status, out, err = verify(*dirs, "--json")
        self.assertEqual((status, err), (1, ""))
        said = json.loads(out)
        found = {d["tensor"]: d for d in said["differences"]}
        self.assertEqual((said["different_tensors"], said["all_tensors"], said["files"], sorted(found)), (len(DTYPES), len(DTYPES), 0, sorted(a)))
        for name, d in found.items():
            x, y = a[name].double(), b[name].double()
            far = (x - y).abs()
            bits = [t[name].reshape(-1).view(torch.uint8).reshape(far.numel(), -1) for t in (a, b)]
            self.assertEqual((d["elements"], d["differing"]), (far.numel(), int((bits[0] != bits[1]).any(1).sum())), name)
            self.assertAlmostEqual(d["max_abs"], far.max().item(), delta=1e-7 * far.max().item(), msg=name)
            self.assertEqual(divmod(int(far.argmax()), 700), tuple(d["at"]), name)
            self.assertAlmostEqual(d["b"] - d["a"], (y - x)[tuple(d["at"])].item(), delta=1e-6, msg=name)
        # two steps of one run, a file of torch.save, and the run's latest step
        torch.save(b, self.at("b.bin"))
        os.makedirs(self.at("bin"))
        os.rename(self.at("b.bin"), self.at("bin", "pytorch_model.bin"))
        for args in ((self.at("run"), self.at("run"), "--step=1", "--other-step=2"), (self.at("run"), self.at("bin"), "--step=1", "--other-option", "view=raw"), (dirs[0], self.at("run"))):
            status, out, err = verify(*args, "--json")
            again = json.loads(out)
            self.assertEqual(([d | {"what": ""} for d in again["differences"]], status), ([d | {"what": ""} for d in said["differences"]], 1), args)
        self.assertEqual(verify(self.at("run"), self.at("bin"), "--other-option=view=raw")[0], 0)

    def test_what_is_said(self):
        torch.manual_seed(0)
        a = {name: torch.randn(4, 8) for name in ("far", "near", "nan", "zero", "same", "shape")} | {"large": torch.tensor([2**63 - 1, 0])}
        b = {name: t.clone() for name, t in a.items()} | {"shape": torch.zeros(4, 7), "more": torch.zeros(1)}
        a["far"][2, 3], b["far"][2, 3], b["far"][0, 0] = 1.5, 1.5078125, a["far"][0, 0] + 0.001
        b["near"][0, 1] += 0.0001
        b["nan"][3, 3] = float("nan")
        a["zero"][1, 1], b["zero"][1, 1] = 0.0, -0.0
        b["large"][0] = -2**63
        dirs = self.save("1", a), self.save("2", b)
        status, out, _ = verify(*dirs)
        self.assertEqual(status, 1)
        for line in ("tensor far: 2 of 32 elements differ, max |a - b| = 0.0078125 at [2, 3] (1.5, 1.5078125)",
                     f"tensor shape: F32 [4, 8], in {dirs[1]} F32 [4, 7]", f"tensor more: only in {dirs[1]}",
                     "tensor zero: 1 of 32 elements differ, max |a - b| = 0 at [1, 1] (0, -0)",
                     "tensor large: 1 of 2 elements differ, max |a - b| = 18446744073709551615 at [0] (9223372036854775807, -9223372036854775808)",
                     "7 of 8 tensors differ, 0 of 0 files"):
            self.assertIn(line + "\n", out)
        self.assertRegex(out, r"tensor nan: 1 of 32 elements differ, at \[3, 3\] \([-0-9.]+, nan\); 1 of them NaN on one side only")
        status, out, _ = verify(*dirs, "--tolerance=0.001")
        self.assertEqual(status, 1)
        self.assertRegex(out, "within 0.001: tensor near: 1 of 32 elements differ, max")
        self.assertIn("within 0.001: tensor zero", out)
        self.assertIn("\ntensor far: 2 of 32", out)
        self.assertIn("5 of 8 tensors differ", out)
        for name in ("far", "nan", "shape", "more", "large"):
            a.pop(name, 0), b.pop(name)
        dirs = self.save("1", a), self.save("2", b)
        status, out, _ = verify(*dirs, "--tolerance=0.001", "--tensors")
        self.assertEqual((status, out.splitlines()[-1]), (0, "equal within 0.001: 3 tensors, 384 B"))
        self.assertEqual([d["within"] for d in json.loads(verify(*dirs, "--tolerance=0.001", "--json")[1])["within"]], [1, 1])
        self.assertIn("'-1' is not a number of 0 or more", verify(*dirs, "--tolerance=-1")[2])
        self.assertEqual(verify(*dirs, "--other-option", "nonsense")[0], 2)

    def test_runs_of_frameworks(self):
        self.assertEqual(verify(NANOTRON, NANOTRON)[:2], (0, "equal: 38 tensors, 80.6 KiB, 2 files\n"))
        status, out, _ = verify(NANOTRON, NANOTRON, "--other-option", "dtype=float32")
        self.assertEqual(status, 1)
        self.assertIn(f"BF16 [32], in {NANOTRON} F32 [32]", out)
        self.assertIn("38 of 38 tensors differ, 1 of 2 files\n", out)
        self.assertEqual(verify(NANOTRON, NANOTRON, "-o", "dtype=float32", "--other-option=dtype=float32")[0], 0)
        run = self.at("megatron")
        subprocess.run([CKPT, "export", "-q", NANOTRON, run, "-o", "view=megatron"], check=True, capture_output=True)
        self.assertEqual(verify(NANOTRON, run, "--tensors")[:2], (0, "equal: 38 tensors, 80.6 KiB\n"))
        self.assertEqual(verify(NANOTRON, run, "-o", "view=megatron", "--other-option", "view=megatron")[0], 0)
        model = self.at("model")
        subprocess.run([CKPT, "export", "-q", NANOTRON, model], check=True, capture_output=True)
        torch.save(load_file(os.path.join(model, "model.safetensors")), os.path.join(model, "pytorch_model.bin"))
        os.unlink(os.path.join(model, "model.safetensors"))
        self.assertEqual(verify(NANOTRON, model)[:2], (0, "equal: 38 tensors, 80.6 KiB, 2 files\n"))
        status, out, _ = verify(NANOTRON, MEGATRON)
        self.assertEqual(status, 1)
        self.assertRegex(out, "layers.0.input_layernorm.weight: 32 of 32 elements differ, max .* = 2.6484375 at")


if __name__ == "__main__":
    unittest.main()
