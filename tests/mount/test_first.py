# SPDX-License-Identifier: Apache-2.0
"""A first look at the mount, as tests/run.sh without options takes it: a real checkpoint of every format is mounted and compared with what the
official converter made of it, and transformers loads one of them from the mount. The other tests look closer."""

import os
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "golden"))
import case as cases  # noqa: E402
from mountlib import CKPTFS, SOURCE, Mount, need_fuse  # noqa: E402

GOLDEN = os.path.join(SOURCE, "tests", "golden")
NANOTRON = os.path.join(GOLDEN, "nanotron", "llama_tp2_pp2_tied")


def size(folder):
    return sum(os.path.getsize(os.path.join(top, name)) for top, _, names in os.walk(folder) for name in names)


def smallest_of_each_format():
    """[(format, case, the folder with its oracle)], one for each folder of tests/golden with cases that show a model."""
    found = {}
    for folder, _, files in os.walk(GOLDEN):
        case = cases.load(os.path.join(folder, "case.json")) if "case.json" in files else {"compare": "refuse"}
        expected = os.path.join(folder, case.get("expected") or "expected")
        if case["compare"] != "refuse" and not case.get("steps") and os.path.isdir(expected):
            kind = os.path.relpath(folder, GOLDEN).split(os.sep)[0]
            found[kind] = min(found.get(kind, (size(folder) + 1,)), (size(folder), folder, case, expected), key=lambda x: x[0])
    return [(kind, case, expected) for kind, (_, _, case, expected) in sorted(found.items())]


class First(unittest.TestCase):
    def mount(self, run, *options):
        """The model's folder of a mount that ends with the test."""
        top = tempfile.TemporaryDirectory()
        self.addCleanup(top.cleanup)
        mount = Mount(run, top.name, *[x for o in options for x in ("-o", o)], program=CKPTFS)
        self.addCleanup(mount.__exit__, None, None, None)
        latest = os.path.join(top.name, "latest")
        return latest if os.path.exists(latest) else top.name

    def test_every_format_once(self):
        seen = smallest_of_each_format()
        self.assertGreaterEqual({kind for kind, _, _ in seen}, {"accelerate", "automodel", "dcp", "deepspeed", "megatron", "torchtitan", "verl"})
        for kind, case, expected in seen:
            with self.subTest(kind):
                shown = self.mount(os.path.join(case["folder"], case["open"]), *cases.options_of(case))
                self.assertEqual(cases.compare_export(case, shown, expected), [])

    def test_nanotron(self):
        got, want = cases.read_tensors(self.mount(NANOTRON)), cases.read_tensors(NANOTRON + ".expected")
        self.assertEqual(cases.compare_tensors(got, want), [])

    def test_transformers_loads_from_a_mount(self):
        try:
            import torch
            import transformers
        except ImportError as e:
            self.skipTest(f"no {e.name}")
        shown = self.mount(NANOTRON)
        got = transformers.AutoModelForCausalLM.from_pretrained(shown).state_dict()
        want = transformers.AutoModelForCausalLM.from_pretrained(NANOTRON + ".expected").state_dict()
        self.assertEqual(got.keys(), want.keys())
        self.assertTrue(all(torch.equal(t, want[name]) for name, t in got.items()))


if __name__ == "__main__":
    need_fuse()
    unittest.main()
