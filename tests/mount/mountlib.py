# SPDX-License-Identifier: Apache-2.0
"""What the mount tests share: temporary runs, mounts, and skipping where there is no FUSE."""
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

SOURCE = os.environ.get("CKPTFS_SOURCE", os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
BUILD = os.environ.get("CKPTFS_BUILD", os.path.join(SOURCE, "build", "release"))
CKPTFS = os.path.join(BUILD, "fs", "ckptfs")
CKPT = os.path.join(BUILD, "fs", "ckpt")
FAKE = os.path.join(BUILD, "tests", "ckptfs-fake")  # the mount program on made-up files

# memory that a sanitizer keeps aside is not the daemon's
os.environ.setdefault("ASAN_OPTIONS", "quarantine_size_mb=1")


# memory that a daemon may grow by in tests of leaks; sanitizers keep freed memory for a while
GROWTH = (32 if os.environ.get("CKPTFS_SANITIZE") else 4) << 20


def digests(folder):
    """{path: SHA-256} of all files below a folder."""
    found = {}
    for d, _, names in os.walk(folder):
        for n in names:
            with open(os.path.join(d, n), "rb") as f:
                found[os.path.relpath(os.path.join(d, n), folder)] = hashlib.sha256(f.read()).hexdigest()
    return found


def need_fuse():
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError:
        print("no access to /dev/fuse")
        sys.exit(77)
    if not shutil.which("fusermount3"):
        print("no fusermount3")
        sys.exit(77)


def mounted(path):
    """The fstype of the topmost mount at path, or None. Asks the mount nothing."""
    found = None
    with open("/proc/self/mountinfo", errors="surrogateescape") as f:
        for line in f:
            left, right = line.split(" - ", 1)
            if left.split()[4].encode(errors="surrogateescape").decode("unicode_escape") == path:
                found = right.split()[0]
    return found


def wait_until(condition, what, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"timed out: {what}")
        time.sleep(0.02)


def fake_bytes(name, off, n):
    """The content of a made-up file (see fake_api.c)."""
    base = len(os.path.basename(name))
    return bytes((131 * p + 17 * (p >> 8) + base) & 255 for p in range(off, off + n))


def make_step(run, name, files, **side):
    """A made-up step; side files: error=, open_ms=, read_ms=, fault=."""
    step = os.path.join(run, name)
    os.makedirs(step, exist_ok=True)
    for key, value in side.items():
        with open(os.path.join(step, key), "w") as f:
            f.write(f"{value}\n")
    with open(os.path.join(step, "files.new"), "w") as f:
        f.writelines(f"{k} {v}\n" for k, v in files.items())
    os.rename(os.path.join(step, "files.new"), os.path.join(step, "files"))
    return step


class Mount:
    """A mount in the foreground, as a context: ended by SIGTERM, and it must exit with 0."""

    def __init__(self, run, mountpoint, *args, program=None, wait=True):
        self.mountpoint = mountpoint
        self.log = tempfile.TemporaryFile()
        before = mounted(mountpoint)
        self.process = subprocess.Popen([program or FAKE, run, mountpoint, "-f", *args],
                                        stderr=self.log, stdin=subprocess.DEVNULL)
        if wait:
            wait_until(lambda: mounted(mountpoint) != before or self.process.poll() is not None,
                       "mounting")
            if self.process.poll() is not None:
                raise AssertionError("ckptfs ended: " + self.text())

    def text(self):
        self.log.seek(0)
        return self.log.read().decode()

    def end(self, sig=signal.SIGTERM, seconds=40):
        self.process.send_signal(sig)
        return self.process.wait(seconds)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        if self.process.poll() is None:
            status = self.end()
            if not exc[0]:
                assert status == 0, f"exit status {status}: {self.text()}"
        if mounted(self.mountpoint) == "fuse.ckptfs":
            subprocess.run(["fusermount3", "-u", "-z", self.mountpoint], check=False)
            if not exc[0]:
                raise AssertionError("the mount is left behind")


class Case(unittest.TestCase):
    """A temporary directory with an empty run and a mountpoint."""

    def setUp(self):
        self.tmp = os.path.realpath(tempfile.mkdtemp(prefix="ckptfs-test-"))
        self.run_dir = os.path.join(self.tmp, "run")
        self.mnt = os.path.join(self.tmp, "mnt")
        os.mkdir(self.run_dir)
        os.mkdir(self.mnt)
        self.addCleanup(self.clean)

    def clean(self):
        for _ in range(8):
            if not mounted(self.mnt):
                break
            subprocess.run(["fusermount3", "-u", "-z", self.mnt], check=False)
        shutil.rmtree(self.tmp, ignore_errors=True)

    def at(self, *names):
        return os.path.join(self.mnt, *names)


def main():
    need_fuse()
    unittest.main(verbosity=2, warnings="ignore")
