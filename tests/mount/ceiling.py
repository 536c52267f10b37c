#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A daemon in a memory cgroup, by hand and as root: a model of 64 GiB (sparse shards) is read by 16 readers for some seconds, in every way.
The kernel must not kill the daemon, every byte must be right, and the status is 1 if not.

usage: tests/mount/ceiling.py [--mib 64] [--seconds 20]"""

import argparse
import json
import mmap
import os
import random
import struct
import subprocess
import sys
import tempfile
import threading
import time

from mountlib import CKPTFS, mounted, wait_until

FILES, GIB = 16, 1 << 30
MARK = 1 << 22  # so many bytes apart lie eight bytes that say where they are; all others are zeros


def cgroup(name, mib):
    """A new memory cgroup, of version 2 or 1: its folder."""
    for top, limit in (("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")):
        folder = os.path.join(top, name)
        try:
            os.mkdir(folder)
        except OSError:
            continue
        if os.path.exists(os.path.join(folder, limit)):
            with open(os.path.join(folder, limit), "w") as f:
                f.write(str(mib << 20))
            return folder
        os.rmdir(folder)
    sys.exit("there is no memory cgroup that may be written")


def make_model(folder):
    """Sparse files: a model of FILES tensors of 4 GiB."""
    names, size = {}, 4 * GIB
    for i in range(FILES):
        file = f"model-{i + 1:05}-of-{FILES:05}.safetensors"
        header = json.dumps({f"t{i}": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
        header += b" " * (-len(header) % 8)
        names[f"t{i}"] = file
        with open(os.path.join(folder, file), "wb") as f:
            f.write(struct.pack("<Q", len(header)) + header)
            begin = f.tell()
            f.truncate(begin + size)
            for at in range(0, size, MARK):
                f.seek(begin + at)
                f.write(struct.pack("<Q", i << 40 | at))
    with open(os.path.join(folder, "model.safetensors.index.json"), "w") as f:
        json.dump({"metadata": {"total_size": FILES * size}, "weight_map": names}, f)
    with open(os.path.join(folder, "config.json"), "w") as f:
        f.write('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')


class Reader(threading.Thread):
    def __init__(self, folder, how, until):
        super().__init__()
        self.folder, self.how, self.until, self.bytes, self.wrong = folder, how, until, 0, None

    def run(self):
        r = random.Random(self.ident)
        try:
            while time.monotonic() < self.until and not self.wrong:
                self.one(r)
        except OSError as e:
            self.wrong = repr(e)

    def one(self, r):
        i = r.randrange(FILES)
        path = os.path.join(self.folder, f"model-{i + 1:05}-of-{FILES:05}.safetensors")
        fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if self.how == "direct" else 0))
        try:
            begin = 8 + struct.unpack("<Q", os.pread(fd, 8, 0))[0] if self.how != "direct" else os.stat(path).st_size - 4 * GIB
            for _ in range(8):
                at = r.randrange(4 * GIB // MARK) * MARK
                data = self.part(fd, begin + at, r.choice([4096, 1 << 20, 4 << 20]))
                self.bytes += len(data)
                if struct.unpack("<Q", data[:8])[0] != i << 40 | at or any(data[8:4096]):
                    self.wrong = f"{path}: byte {at}"
        finally:
            os.close(fd)

    def part(self, fd, at, n):
        if self.how == "read":
            return os.pread(fd, n, at)
        low = at // 4096 * 4096
        if self.how == "map":
            with mmap.mmap(fd, n + at - low, prot=mmap.PROT_READ, offset=low) as m:
                return m[at - low:at - low + n]
        room = mmap.mmap(-1, n + 4096)
        os.preadv(fd, [room], low)
        return room[at - low:at - low + n]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--mib", type=int, default=64)
    p.add_argument("--seconds", type=float, default=20)
    a = p.parse_args()
    with tempfile.TemporaryDirectory(prefix="ckptfs-ceiling-") as top:
        run, mnt = os.path.join(top, "run"), os.path.join(top, "mnt")
        os.mkdir(run)
        os.mkdir(mnt)
        make_model(run)
        group = cgroup(f"ckptfs-{os.getpid()}", a.mib)
        enter = f"echo $$ >{group}/cgroup.procs; exec {CKPTFS} {run} {mnt} -f"
        daemon = subprocess.Popen(["sh", "-c", enter], stderr=subprocess.PIPE, text=True)
        try:
            wait_until(lambda: mounted(mnt) or daemon.poll() is not None, "mounting")
            until = time.monotonic() + a.seconds
            readers = [Reader(mnt, how, until) for how in ("read", "map", "direct", "read") * 4]
            for r in readers:
                r.start()
            most = 0
            while any(r.is_alive() for r in readers):
                time.sleep(0.1)
                try:
                    with open(f"/proc/{daemon.pid}/status") as f:
                        most = max(most, int(dict(line.split(":", 1) for line in f).get("VmRSS", "0 kB").split()[0]))
                except OSError:
                    break
            for r in readers:
                r.join()
            alive = daemon.poll() is None
        finally:
            subprocess.run(["fusermount3", "-u", "-z", mnt], check=False)
            daemon.terminate()
            daemon.wait()
            time.sleep(0.2)
            os.rmdir(group)
    wrong = [r.wrong for r in readers if r.wrong]
    print(f"{sum(r.bytes for r in readers) / GIB:.1f} GiB read under {a.mib} MiB, the daemon had {most / 1024:.1f} MiB at most")
    print("\n".join(wrong[:5]) if wrong else "good" if alive else f"the daemon ended: {daemon.stderr.read()}")
    sys.exit(1 if wrong or not alive else 0)


if __name__ == "__main__":
    main()
