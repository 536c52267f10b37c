# SPDX-License-Identifier: Apache-2.0
"""Storage at a distance (tests/mount/slow_fs.c, a FUSE filesystem with a latency): every format has the same bytes and messages as on a local disk, by
digest, through a mount and in loads; opening takes few requests; a step that is added to a run appears, and one that is saved again is not mixed."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "..", "golden"), os.path.join(HERE, "..", "bench")]
import bench  # noqa: E402
import case as cases  # noqa: E402
from mountlib import BUILD, CKPTFS, Mount, need_fuse  # noqa: E402
from storage import Storage  # noqa: E402
from test_first import NANOTRON, smallest_of_each_format  # noqa: E402

CKPT = os.path.join(BUILD, "fs", "ckpt")


def ckpt(*args):
    return subprocess.run([CKPT, *args], capture_output=True, text=True, timeout=120)


def options(case):
    return [x for o in cases.options_of(case) for x in ("-o", o)]


class Far(unittest.TestCase):
    def test_every_format_is_the_same(self):
        for kind, case, _ in smallest_of_each_format():
            with self.subTest(kind), Storage(BUILD, case["folder"]) as far:
                near = ckpt("digest", os.path.join(case["folder"], case["open"]), *options(case), "-o", "far=never")
                got = ckpt("digest", os.path.join(far.at, case["open"]), *options(case))
                self.assertEqual(near.returncode, 0, near.stderr)
                self.assertEqual((got.returncode, got.stdout), (0, near.stdout), got.stderr)

    def test_a_mount_of_it(self):
        with Storage(BUILD, NANOTRON) as far, tempfile.TemporaryDirectory() as top, Mount(far.at, top, program=CKPTFS):
            latest = os.path.join(top, "latest")
            got, want = cases.read_tensors(latest if os.path.exists(latest) else top), cases.read_tensors(NANOTRON + ".expected")
            self.assertEqual(cases.compare_tensors(got, want), [])

    def test_large_files(self):
        """Parts of several MiB, ahead of streams and not; and a file that has grown since is another one."""
        with tempfile.TemporaryDirectory() as top:
            run = os.path.join(top, "run")
            os.mkdir(run)
            block, size = os.urandom(1 << 20), (20 << 20) + 700001  # the last part is no whole number of blocks
            for i in range(3):
                header = json.dumps({f"t{i}": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
                with open(os.path.join(run, f"model-{i + 1:05}-of-00003.safetensors"), "wb") as f:
                    f.write(len(header).to_bytes(8, "little") + header)
                    for k in range(20):
                        f.write(block[k:] + block[:k])
                    f.write(block[:700001])
            with Storage(BUILD, run, 3000) as far:
                for command in (["digest"], ["export", "--weights-only"]):
                    out = [os.path.join(top, "out")] if command[0] == "export" else []
                    got = ckpt(*command[:1], far.at, *out, *command[1:])
                    self.assertEqual(got.returncode, 0, got.stderr)
                for i in range(3):
                    name = f"model-{i + 1:05}-of-00003.safetensors"
                    with open(os.path.join(run, name), "rb") as a, open(os.path.join(top, "out", name), "rb") as b:
                        self.assertEqual(a.read()[-size:], b.read()[-size:])
            # all is read once for each of the two, and the first parts by the kernel, too
            self.assertLess(far.counts["bytes"], 2.2 * 3 * size)
            self.assertLess(far.counts["reads"], 600)

    def test_opening_takes_few_requests(self):
        """What is not there is known from lists: there are no requests for each name that some reader looks for."""
        for kind, case, _ in smallest_of_each_format():
            run = os.path.join(case["folder"], case["open"])
            files = sum(len(names) for _, _, names in os.walk(run))
            folders = sum(1 for _ in os.walk(run))
            with self.subTest(kind), Storage(BUILD, case["folder"], 0) as far:
                got = ckpt("info", os.path.join(far.at, case["open"]), *options(case))
                self.assertEqual(got.returncode, 0, got.stderr)
            self.assertLess(far.counts["opens"] + far.counts["attributes"], 40 + 5 * files)
            self.assertLessEqual(far.counts["lists"], folders + 2)

    def test_many_files(self):
        """Each file is opened and read once, and each folder is listed once, though many threads ask for them."""
        with tempfile.TemporaryDirectory() as top:
            run = os.path.join(top, "run")
            os.makedirs(run)
            bench.make_llama(run, 1000, bytes(1 << 16))
            files = sum(len(names) for _, _, names in os.walk(run))
            folders = sum(1 for _ in os.walk(run))
            with Storage(BUILD, top, 300) as far:
                got = ckpt("info", os.path.join(far.at, "run"))
                self.assertEqual(got.returncode, 0, got.stderr)
            self.assertLessEqual(far.counts["opens"], files + 4)
            self.assertLessEqual(far.counts["reads"], files + 4)
            self.assertLessEqual(far.counts["lists"], folders + 2)

    def test_polls_of_many_steps_take_few_requests(self):
        """A poll, one a second at most, looks at the latest step and at one other, not at all of them."""
        def requests(seconds):
            with Storage(BUILD, top, 1000) as far, Mount(os.path.join(far.at, "run"), at, program=CKPTFS):
                self.assertIn("30", os.listdir(at))
                time.sleep(seconds)
            return sum(far.counts[what] for what in ("opens", "attributes", "lists", "reads"))

        with tempfile.TemporaryDirectory() as top:
            run, at = os.path.join(top, "run"), os.path.join(top, "at")
            os.makedirs(at)
            step = next(name for name in os.listdir(NANOTRON) if name.isdigit())
            for k in range(30):
                shutil.copytree(os.path.join(NANOTRON, step), os.path.join(run, str(k + 1)))
            with open(os.path.join(run, "latest.txt"), "w", encoding="utf-8") as f:
                f.write("30")
            opening = requests(1)
            self.assertLess(requests(9) - opening, 9 * 80)

    def test_steps_come(self):
        """A poll forgets the lists of folders."""
        with tempfile.TemporaryDirectory() as top, contextlib.ExitStack() as stack:
            run, at = os.path.join(top, "run"), os.path.join(top, "at")
            os.makedirs(at)
            shutil.copytree(NANOTRON, run)
            step = next(name for name in os.listdir(run) if name.isdigit())
            far = stack.enter_context(Storage(BUILD, run))
            stack.enter_context(Mount(far.at, at, program=CKPTFS))
            before = cases.read_tensors(os.path.join(at, step))
            new = str(int(step) + 10)
            shutil.copytree(os.path.join(run, step), os.path.join(run, ".new"))
            os.rename(os.path.join(run, ".new"), os.path.join(run, new))
            with open(os.path.join(run, "latest.txt"), "w", encoding="utf-8") as f:
                f.write(new)
            end = time.monotonic() + 60
            while not os.path.exists(os.path.join(at, new)):
                self.assertLess(time.monotonic(), end)
                time.sleep(0.2)
            self.assertEqual(cases.compare_tensors(cases.read_tensors(os.path.join(at, new)), before), [])


if __name__ == "__main__":
    need_fuse()
    unittest.main()
