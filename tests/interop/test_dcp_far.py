# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of torch.distributed.checkpoint at a distance, where the headers of most items are read with their data (far=always): the same tensors, a
damaged header is an error of those who read its tensor, and of nobody else, and items that torch wrote differently are never taken for others."""

import os
import pickle
import shutil
import subprocess
import sys
import unittest
import warnings

try:
    import torch
    import torch.distributed.checkpoint as dcp

    from tensor_case import CKPT, TensorCase, export, read_all
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

LAYERS = 12
PACKAGES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "contrib", "python")


class Far(TensorCase):
    def setUp(self):
        super().setUp()
        warnings.simplefilter("ignore")  # a save of one process warns that it is one

    def save(self, change=lambda state: None):
        """A run of layers that are alike, with shapes, dtypes and a scalar that are not; (its folder, the tensors)."""
        torch.manual_seed(5)
        state = {}
        for i in range(LAYERS):
            state[f"layers.{i}.q.weight"] = torch.randn(64, 48, dtype=torch.bfloat16)
            state[f"layers.{i}.norm.weight"] = torch.randn(64)
            state[f"layers.{i}.odd.weight"] = torch.randn(3 + i, 7 * i + 1)
            state[f"layers.{i}.step"] = torch.tensor(float(i))
        state["large.0"], state["large.1"], state["large.2"] = (torch.randn(1100, 300) for _ in range(3))
        change(state)
        run = self.path("run")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(run, thread_count=2), no_dist=True)
        return run, state

    def item(self, run, name):
        """The file of a tensor's only item, where it begins, and its length."""
        with open(os.path.join(run, ".metadata"), "rb") as f:
            storage = pickle.load(f).storage_data
        at = next(v for k, v in storage.items() if k.fqn == name)
        return os.path.join(run, at.relative_path), at.offset, at.length

    def damage(self, run, name, at, text):
        """Write text over the tensor's item, from its byte `at` on (from its end, if that is negative)."""
        path, off, length = self.item(run, name)
        with open(path, "r+b") as f:
            f.seek(off + (at if at >= 0 else length + at))
            f.write(text)
        return off

    def refused(self, done, *words):
        self.assertEqual(done.returncode, 1, done.stderr)
        for word in words:
            self.assertIn(word, done.stderr)

    def test_the_same_tensors(self):
        run, state = self.save()
        for far in ("always", "never"):
            done = export(run, self.path(far), f"view=raw,far={far}")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.same(read_all(self.path(far)), state, far)

    def test_a_damaged_header(self):
        for at, text in ((0, b"PX"), (120, b"\xff\xff"), (-22, b"PX")):
            run, _ = self.save()
            off = self.damage(run, "layers.6.q.weight", at, text)
            self.refused(export(run, self.path("never"), "view=raw,far=never"), "layers.6.q.weight", f"item at byte {off} ")
            self.assertEqual(subprocess.run([CKPT, "info", run, "-o", "view=raw,far=always"], capture_output=True).returncode, 0)
            self.refused(export(run, self.path("always"), "view=raw,far=always"), "layers.6.q.weight", f"item at byte {off} ")
            shutil.rmtree(run)

    def test_an_item_of_another_tensor(self):
        """The metadata of two tensors are exchanged: the headers say what the items are."""
        run, _ = self.save()
        with open(os.path.join(run, ".metadata"), "rb") as f:
            metadata = pickle.load(f)
        keys = {k.fqn: k for k in metadata.storage_data}
        a, b = keys["layers.6.norm.weight"], keys["layers.6.odd.weight"]
        metadata.storage_data[a], metadata.storage_data[b] = metadata.storage_data[b], metadata.storage_data[a]
        with open(os.path.join(run, ".metadata"), "wb") as f:
            pickle.dump(metadata, f)
        for far in ("always", "never"):
            self.refused(export(run, self.path(far), f"view=raw,far={far}"), "the item ", "the metadata say")

    def test_an_item_that_is_written_differently(self):
        """Some of many are transposed: their items have the same lengths as the others'."""
        names = [f"square.{i}" for i in range(20)]
        run, _ = self.save(lambda state: state.update({name: torch.randn(40, 40) for name in names}))
        places = sorted((*self.item(run, name)[:2], name) for name in names)
        turned = [name for _, _, name in places[8:12]]  # the first and the last are the samples
        shutil.rmtree(run)
        run, state = self.save(lambda state: state.update({name: torch.randn(40, 40).t() if name in turned else torch.randn(40, 40) for name in names}))
        done = export(run, self.path("never"), "view=raw,far=never")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.same(read_all(self.path("never")), state)
        self.refused(export(run, self.path("always"), "view=raw,far=always"), "square.", "it is not contiguous", "far=never")

    def test_items_that_are_all_written_differently(self):
        """All are transposed: the samples say so, and all headers are read."""
        run, state = self.save(lambda s: s.update({f"square.{i}": torch.randn(40, 40).t() for i in range(6)}))
        done = export(run, self.path("always"), "view=raw,far=always")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.same(read_all(self.path("always")), state)

    def test_a_file_that_is_written_again(self):
        """Whoever reads an item whose file was written over since the checkpoint was opened is told so, and not that its header is damaged."""
        run, _ = self.save()
        path, off, _ = self.item(run, "layers.6.q.weight")
        reading = """
import sys, ckptfs
with ckptfs.open(sys.argv[1], view="raw", far="always") as f:
    with open(sys.argv[2], "r+b") as g:
        g.seek(int(sys.argv[3]))
        g.write(b"no zip archive")
    try:
        f.get_tensor("layers.6.q.weight")
    except OSError as e:
        print(e)
"""
        env = dict(os.environ, PYTHONPATH=PACKAGES, CKPTFS_LIBRARY_PATH=os.path.dirname(os.path.dirname(CKPT)))
        done = subprocess.run([sys.executable, "-c", reading, run, path, str(off)], env=env, capture_output=True, text=True)
        self.assertIn("changed since the checkpoint was opened", done.stdout + done.stderr)


if __name__ == "__main__":
    unittest.main()
