# SPDX-License-Identifier: Apache-2.0
"""Storage at a distance (tests/mount/slow_fs.c, a FUSE filesystem with a latency): every format has the same bytes and messages as on a local disk, by
digest, through a mount and in loads; opening takes few requests; a step that is added to a run appears, and one that is saved again is not mixed. A
server that hangs is an error within the timeout, which names the file, and nothing else than that."""

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "..", "golden"), os.path.join(HERE, "..", "bench")]
import bench  # noqa: E402
import case as cases  # noqa: E402
from mountlib import BUILD, CKPTFS, Mount, mounted, need_fuse, wait_until  # noqa: E402
from storage import Storage  # noqa: E402
from test_first import NANOTRON, smallest_of_each_format  # noqa: E402

CKPT = os.path.join(BUILD, "fs", "ckpt")


def ckpt(*args):
    return subprocess.run([CKPT, *args], capture_output=True, text=True, timeout=120)


TIMEOUT = 2  # seconds
HUNG = ("-o", f"timeout={TIMEOUT}")


def write_large(run, size=(20 << 20) + 700001):
    """Three files of weights; the last part of each is no whole number of blocks."""
    os.makedirs(run)
    block = os.urandom(1 << 20)
    for i in range(3):
        header = json.dumps({f"t{i}": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
        with open(os.path.join(run, f"model-{i + 1:05}-of-00003.safetensors"), "wb") as f:
            f.write(len(header).to_bytes(8, "little") + header)
            for k in range(size >> 20):
                f.write(block[k:] + block[:k])
            f.write(block[:size & ((1 << 20) - 1)])
    return size


def same_end(a, b, size):
    """Have both files the same last bytes? Their headers may differ."""
    with open(a, "rb") as x, open(b, "rb") as y:
        return x.read()[-size:] == y.read()[-size:]


def lines_about(text, name):
    return [line for line in text.splitlines() if name in line and ("answer" in line or "again" in line)]


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
            size = write_large(run)
            with Storage(BUILD, run, 3000) as far:
                for command in (["digest"], ["export", "--weights-only"]):
                    out = [os.path.join(top, "out")] if command[0] == "export" else []
                    got = ckpt(*command[:1], far.at, *out, *command[1:])
                    self.assertEqual(got.returncode, 0, got.stderr)
                for i in range(3):
                    name = f"model-{i + 1:05}-of-00003.safetensors"
                    self.assertTrue(same_end(os.path.join(run, name), os.path.join(top, "out", name), size))
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


class Hung(unittest.TestCase):
    """Storage that gives no answer."""

    FIRST = "model-00001-of-00003.safetensors"

    def setUp(self):
        self.top = os.path.realpath(tempfile.mkdtemp(prefix="ckptfs-hung-"))
        self.addCleanup(shutil.rmtree, self.top, ignore_errors=True)
        self.stack = contextlib.ExitStack()
        self.addCleanup(self.stack.close)
        self.run_dir, self.at = os.path.join(self.top, "run"), os.path.join(self.top, "at")
        os.mkdir(self.at)

    def storage(self, folder, *args):
        return self.stack.enter_context(Storage(BUILD, folder, *args, top=self.top))

    def error_of(self, read):
        """The error of a read, which comes after about the timeout."""
        begin = time.monotonic()
        with self.assertRaises(OSError) as caught:
            read()
        self.assertLess(time.monotonic() - begin, TIMEOUT + 8)
        return caught.exception.errno

    def read_again(self, fd, n, off):
        """What is read as soon as there is no error."""
        got = []

        def works():
            with contextlib.suppress(OSError):
                got.append(os.pread(fd, n, off))
            return got
        wait_until(works, "the storage to answer again", 30)
        return got[0]

    def reads_under_a_mount(self, *more):
        size = write_large(self.run_dir)
        far = self.storage(self.run_dir, 1000)
        with Mount(far.at, self.at, *HUNG, *more, program=CKPTFS) as m:
            fd = os.open(os.path.join(self.at, self.FIRST), os.O_RDONLY)
            try:
                total = os.fstat(fd).st_size
                os.pread(fd, 100, 0)
                far.hang()
                for off in (9 << 20, 12 << 20, 15 << 20):
                    self.assertIn(self.error_of(lambda off=off: os.pread(fd, 1 << 20, off)), (errno.ETIMEDOUT, errno.EIO))
                self.assertEqual(len(lines_about(m.text(), self.FIRST)), 1, m.text())
                far.go_on()
                got = b"".join(self.read_again(fd, 1 << 20, off) for off in range(0, total, 1 << 20))
            finally:
                far.go_on()
                os.close(fd)
            with open(os.path.join(self.run_dir, self.FIRST), "rb") as f:
                self.assertEqual(got[-size:], f.read()[-size:])
            said = lines_about(m.text(), self.FIRST)
            self.assertEqual(len(said), 2, m.text())
            self.assertIn("has given no answer for", said[0])
            self.assertIn("can be read again", said[1])

    def test_reads_of_a_mount(self):
        self.reads_under_a_mount()

    def test_reads_of_a_mount_that_hang_in_the_kernel(self):
        """What is not far is read by the thread that serves the request, which hangs; the request is answered in its place."""
        self.reads_under_a_mount("-o", "far=never")

    def test_a_step_that_is_opened(self):
        shutil.copytree(NANOTRON, self.run_dir)
        step = next(name for name in os.listdir(self.run_dir) if name.isdigit())
        old = str(int(step) - 1)
        shutil.copytree(os.path.join(self.run_dir, step), os.path.join(self.run_dir, old))
        far = self.storage(self.run_dir, 1000)
        with Mount(far.at, self.at, *HUNG, program=CKPTFS) as m:
            want = cases.read_tensors(os.path.join(self.at, step))
            far.hang()
            begin = time.monotonic()
            try:
                self.assertEqual(os.listdir(os.path.join(self.at, old)), ["CKPTFS-ERROR.txt"])
                self.assertLess(time.monotonic() - begin, TIMEOUT + 15)
            finally:
                far.go_on()
            wait_until(lambda: "CKPTFS-ERROR.txt" not in os.listdir(os.path.join(self.at, old)), "the step", 60)
            self.assertEqual(cases.compare_tensors(cases.read_tensors(os.path.join(self.at, old)), want), [])
            self.assertLessEqual(len(lines_about(m.text(), f"step {old}")), 2, m.text())
            self.assertIn(f"{old} can be opened again", m.text())

    def fails(self, far, *command):
        """Run a command until it has said its error, which names a file of the storage; then the storage goes on, and the process ends."""
        begin = time.monotonic()
        p = subprocess.Popen([CKPT, *command, *HUNG], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if far.hangs_after:
            time.sleep(far.hangs_after)
            far.hang()
        said = ""
        for line in p.stderr:
            said += line
            if "no answer" in line:
                break
        self.assertLess(time.monotonic() - begin, far.hangs_after + TIMEOUT + 15, said)
        self.assertIn(f"has given no answer for {TIMEOUT} s", said)
        self.assertIn(far.at, said)
        far.go_on()
        said += p.stderr.read()
        p.stderr.close()
        self.assertEqual(p.wait(60), 1, said)
        return said

    def test_an_export_is_resumed(self):
        size = write_large(self.run_dir)
        far, out = self.storage(self.run_dir, 1000, 2e7), os.path.join(self.top, "out")
        far.hangs_after = 1.5
        self.fails(far, "export", far.at, out, "--weights-only")
        got = ckpt("export", far.at, out, "--weights-only")
        self.assertEqual(got.returncode, 0, got.stderr)
        for i in range(3):
            name = f"model-{i + 1:05}-of-00003.safetensors"
            self.assertTrue(same_end(os.path.join(self.run_dir, name), os.path.join(out, name), size))

    def test_commands_that_find_it_hanging(self):
        shutil.copytree(NANOTRON, self.run_dir)
        far = self.storage(self.run_dir, 1000)
        far.hangs_after = 0
        self.stack.enter_context(Mount(NANOTRON, self.at, program=CKPTFS))  # info looks whether what it is given is a mount
        for command in (["digest", far.at], ["verify", far.at, NANOTRON + ".expected"], ["info", far.at]):
            with self.subTest(command[0]):
                far.hang()
                self.fails(far, *command)
        self.assertEqual(ckpt("digest", far.at).stdout, ckpt("digest", self.run_dir).stdout)

    def test_a_hang_at_any_request(self):
        """Whichever request is the first without an answer: who waits for it is one that gives up."""
        for n in (1, 2, 3, 4, 5, 6, 8, 11, 16, 24, 36, 54, 80, 120, 180):
            with self.subTest(n), Storage(BUILD, NANOTRON, 1000, top=self.top, hang_after=n) as far:
                far.hang(30)
                p = subprocess.Popen([CKPT, "info", far.at, "-o", "timeout=0.5"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
                begin = time.monotonic()
                said = p.stderr.readline()
                self.assertLess(time.monotonic() - begin, 15, said)
                far.go_on()
                self.assertIn("has given no answer for 0.5 s", said)
                said += p.communicate(timeout=60)[1]
                self.assertEqual(p.returncode, 1, said)

    def mount_that_hangs(self, far):
        """A mount, and a process that waits for bytes of it."""
        m = Mount(far.at, self.at, "-o", "timeout=300", program=CKPTFS)
        far.hang()
        reader = subprocess.Popen(["cat", os.path.join(self.at, self.FIRST)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(1)
        return m, reader

    def test_a_mount_that_ends(self):
        write_large(self.run_dir)
        far = self.storage(self.run_dir, 1000)
        m, reader = self.mount_that_hangs(far)
        try:
            begin = time.monotonic()
            m.process.send_signal(signal.SIGTERM)
            wait_until(lambda: not mounted(self.at), "the mount point to be free", 20)
            self.assertLess(time.monotonic() - begin, 3)
            wait_until(lambda: "has not answered yet" in m.text(), "the log", 20)
            self.assertIn(self.FIRST, m.text())
            self.assertIn("this process stays until it has", m.text())
        finally:
            far.go_on()
            subprocess.run(["fusermount3", "-u", "-z", "-q", self.at], check=False)
            reader.kill()
            reader.wait(60)
        self.assertEqual(m.process.wait(60), 0, m.text())

    def test_a_mount_that_is_unmounted(self):
        """The connection lasts until its last reader is gone, and the reader until it is answered."""
        write_large(self.run_dir)
        far = self.storage(self.run_dir, 1000)
        m, reader = self.mount_that_hangs(far)
        try:
            subprocess.run(["fusermount3", "-u", "-z", self.at], check=True)
            self.assertIsNone(mounted(self.at))
        finally:
            far.go_on()
            self.assertEqual(reader.wait(60), 0)
        self.assertEqual(m.process.wait(60), 0, m.text())


if __name__ == "__main__":
    need_fuse()
    unittest.main()
