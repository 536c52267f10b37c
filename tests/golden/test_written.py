# SPDX-License-Identifier: Apache-2.0
"""Views in the frameworks' formats: at its own layout a real checkpoint is itself, and from format to format the model stays what it is."""

import os
import random
import subprocess
import tempfile
import unittest

from case import CKPT, SOURCE

GOLDEN = os.path.join(SOURCE, "tests", "golden")
MEGATRON = os.path.join(GOLDEN, "megatron", "m19_llama_tp2pp2")
LAYOUTS = {"dcp": ["ranks=3"], "dcp_hf": ["ranks=2"], "torchtitan": ["ranks=2"], "nanotron": ["tp=2", "pp=2"], "megatron": ["tp=2", "pp=4"],
           "megatron_legacy": ["tp=4", "pp=2"]}
PADDING = "make_vocab_size_divisible_by=8"


def options_of(view):
    return [f"view={view}", *LAYOUTS[view], *([PADDING] if view.startswith("megatron") else [])]


def files(folder):
    found = {}
    for at, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(at, name), "rb") as f:
                found[os.path.relpath(os.path.join(at, name), folder)] = f.read()
    return found


class Written(unittest.TestCase):
    maxDiff = None

    def setUp(self):
        tmp = tempfile.TemporaryDirectory()
        self.addCleanup(tmp.cleanup)
        self.tmp = tmp.name

    def ckpt(self, command, *operands, options=()):
        done = subprocess.run([CKPT, command, *operands, *[x for o in options for x in ("-o", o)]], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, f"{operands} {options}: {done.stderr}")
        return done.stdout

    def export(self, source, name, *options):
        out = os.path.join(self.tmp, name)
        self.ckpt("export", source, out, options=options)
        return out

    def test_megatron_is_itself(self):
        run = os.path.join(MEGATRON, "run")
        out = self.export(run, "megatron", "view=megatron", "tp=2", "pp=2", f"base={MEGATRON}/base")
        self.assertEqual(sorted(os.listdir(out)), sorted(os.listdir(run)))
        padded = ("output_layer.weight", "embedding.word_embeddings.weight")  # with random values
        tensors = [sorted(t for t in self.ckpt("digest", "--tensors", x, options=["view=raw"]).splitlines() if not t.startswith("#") and not t.endswith(padded)) for x in (out, run)]
        self.assertGreater(len(tensors[1]), 6)
        self.assertEqual(*tensors)

    def test_from_format_to_format(self):
        """Each format is made of each other one, at layouts that differ."""
        source = os.path.join(MEGATRON, "expected")
        want, r = files(source), random.Random(int(os.environ.get("CKPTFS_SEED", "1")))
        for first in LAYOUTS:
            run = self.export(source, first, *options_of(first))
            for second in r.sample([v for v in LAYOUTS if v != first], 2):
                again = self.export(run, f"{first}-{second}", *options_of(second), f"base={source}")
                got = files(self.export(again, f"{first}-{second}-hf", f"base={source}"))
                self.assertEqual(got.keys(), want.keys(), f"{first}, {second}")
                for name, data in want.items():
                    self.assertTrue(got[name] == data, f"{first}, {second}: {name}")


if __name__ == "__main__":
    unittest.main()
