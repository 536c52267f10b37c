# SPDX-License-Identifier: Apache-2.0
"""The same view loads in transformers 4 and 5, without help, and gives the same logits. Transformers 4 lies in its own folder
(CKPTFS_TRANSFORMERS4, made by tests/run.sh), which goes before the installed version in the path of a second process."""

import os
import subprocess
import sys
import tempfile
import unittest

BUILD = os.environ.get("CKPTFS_BUILD", "build/dev")
SOURCE = os.environ.get("CKPTFS_SOURCE", ".")
OLD = os.environ.get("CKPTFS_TRANSFORMERS4", "")

LOAD = """
import sys, torch, transformers as tf
tf.utils.logging.set_verbosity_error()
assert tf.__version__.startswith(sys.argv[3]), tf.__version__
config = tf.AutoConfig.from_pretrained(sys.argv[1])
model, info = tf.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto", output_loading_info=True)
assert type(model).__name__ == config.architectures[0], type(model)
assert not any(info.values()), info
with torch.no_grad():
    logits = model.float().eval()(torch.arange(24).reshape(2, 12)).logits
assert logits.isfinite().all()
torch.save(logits, sys.argv[2])
"""


def load(model, out, version, path=""):
    env = dict(os.environ, HF_HUB_OFFLINE="1", PYTHONPATH=path)
    done = subprocess.run([sys.executable, "-c", LOAD, model, out, version], env=env, capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(f"transformers {version}: {done.stderr[-2000:]}")


class Transformers4(unittest.TestCase):
    def test_golden_models_load_in_both(self):
        import torch
        folder = os.path.join(SOURCE, "tests", "golden", "nanotron")
        more = os.path.join(os.environ.get("CKPTFS_FIXTURES", os.path.join(SOURCE, "..", "shared", "fixtures")), "nanotron")
        if os.path.isdir(more):
            folder = more
        for case in sorted(n[:-9] for n in os.listdir(folder) if n.endswith(".expected")):
            with self.subTest(case), tempfile.TemporaryDirectory() as tmp:
                model, a, b = (os.path.join(tmp, n) for n in ("model", "a", "b"))
                subprocess.run([os.path.join(BUILD, "fs", "ckpt"), "export", os.path.join(folder, case), model], check=True,
                               capture_output=True)
                load(model, a, "5.")
                load(model, b, "4.5", OLD)
                self.assertTrue(torch.allclose(torch.load(a), torch.load(b), atol=1e-4))


if __name__ == "__main__":
    if not os.path.isdir(os.path.join(OLD, "transformers")):
        print("skipped: CKPTFS_TRANSFORMERS4 has no transformers")
        sys.exit(77)
    try:
        import torch  # noqa: F401
    except ImportError as e:
        print(f"skipped: {e}")
        sys.exit(77)
    unittest.main()
