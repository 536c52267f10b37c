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
import os, sys, torch, transformers as tf
tf.utils.logging.set_verbosity_error()
version, folder = sys.argv[1:3]
assert tf.__version__.startswith(version), tf.__version__
for name in sorted(n for n in os.listdir(folder) if os.path.isdir(os.path.join(folder, n))):
    path = os.path.join(folder, name)
    config = tf.AutoConfig.from_pretrained(path)
    model, info = tf.AutoModelForCausalLM.from_pretrained(path, dtype="auto", output_loading_info=True)
    assert type(model).__name__ == config.architectures[0], (name, type(model))
    assert not any(info.values()), (name, info)
    with torch.no_grad():
        logits = model.float().eval()(torch.arange(24).reshape(2, 12)).logits
    assert logits.isfinite().all(), name
    torch.save(logits, f"{path}.{version}pt")
"""


def load(folder, version, path=""):
    env = dict(os.environ, HF_HUB_OFFLINE="1", PYTHONPATH=path)
    done = subprocess.run([sys.executable, "-c", LOAD, version, folder], env=env, capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(f"transformers {version}: {done.stderr[-2000:]}")


class Transformers4(unittest.TestCase):
    def test_golden_models_load_in_both(self):
        import torch
        runs = os.path.join(SOURCE, "tests", "golden", "nanotron")
        more = os.path.join(os.environ.get("CKPTFS_FIXTURES", os.path.join(SOURCE, "..", "shared", "fixtures")), "nanotron")
        if os.path.isdir(more):
            runs = more
        names = sorted(n[:-9] for n in os.listdir(runs) if n.endswith(".expected"))
        with tempfile.TemporaryDirectory() as tmp:
            for name in names:
                subprocess.run([os.path.join(BUILD, "fs", "ckpt"), "export", os.path.join(runs, name), os.path.join(tmp, name)],
                               check=True, capture_output=True)
            load(tmp, "5.")
            load(tmp, "4.5", OLD)
            for name in names:
                a, b = (torch.load(os.path.join(tmp, f"{name}.{v}pt")) for v in ("5.", "4.5"))
                self.assertTrue(torch.allclose(a, b, atol=1e-4), name)


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
