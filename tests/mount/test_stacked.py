# SPDX-License-Identifier: Apache-2.0
"""Runs in a bucket that somebody else mounts: Debian's rclone and s3fs over moto's server, and ckptfs on top (contrib/docs/mounts.md). What
`ckpt export` and the mount give is what they give of the plain folder. moto lies in its own folder (CKPTFS_MOTO, made by tests/run.sh)."""

import errno
import os
import shutil
import subprocess
import sys
import unittest

from mountlib import CKPT, CKPTFS, SOURCE, Case, Mount, digests, main, mounted, wait_until
from test_real import write_model

MOTO = os.environ.get("CKPTFS_MOTO", "")
GOLDEN = os.path.join(SOURCE, "tests", "golden")
SERVER = """
import logging, time
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
time.sleep(3600)
"""
RCLONE = {"rclone": ["--attr-timeout", "0"], "rclone, its own cache": ["--vfs-cache-mode", "full"]}
S3FS = {"s3fs": ["noforget", "enable_noobj_cache"]}


class Stacked(Case):
    @classmethod
    def setUpClass(cls):
        outside = {k: v for k, v in os.environ.items() if not k.startswith("AWS_") and not k.lower().endswith("_proxy")}
        cls.env = dict(outside, AWS_ACCESS_KEY_ID="key", AWS_SECRET_ACCESS_KEY="secret", RCLONE_CONFIG=os.devnull)
        cls.server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True, env=dict(cls.env, PYTHONPATH=MOTO))
        cls.url = f"http://127.0.0.1:{int(cls.server.stdout.readline())}"
        cls.remote = f":s3,provider=Other,env_auth,force_path_style,endpoint='{cls.url}':bucket"

    @classmethod
    def tearDownClass(cls):
        cls.server.kill()
        cls.server.communicate()

    def call(self, *args):
        done = subprocess.run(args, env=self.env, capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, 0, f"{args}: {done.stderr}")
        return done

    def put(self, path, key):
        self.call("rclone", "copyto", path, f"{self.remote}/{key}")

    def bucket(self, kind, prefix):
        """A mount of what the bucket has below a prefix, which ends with the test."""
        at = os.path.join(self.tmp, f"{kind} {prefix}")
        os.mkdir(at)
        if kind in RCLONE:
            self.call("rclone", "mount", f"{self.remote}/{prefix}", at, "--read-only", "--daemon", "--cache-dir", at + ".cache", *RCLONE[kind])
        else:
            self.call("s3fs", f"bucket:/{prefix}", at, "-o", ",".join([f"url={self.url}", "use_path_request_style", "ro", *S3FS[kind]]))
        self.addCleanup(subprocess.run, ["fusermount3", "-u", "-z", at])
        wait_until(lambda: mounted(at), f"{kind} mounts")
        return at

    def test_what_comes_out_is_that_of_the_folder(self):
        for name, step in (("nanotron/llama_tp2_pp2_tied", "10"), ("verl/fsdp2_llama_w4/run", "global_step_20")):
            run, prefix = os.path.join(GOLDEN, name), name.split("/")[0]
            plain = os.path.join(self.tmp, prefix)
            self.call(CKPT, "export", run, plain)
            want = digests(plain)
            self.assertGreater(len(want), 2)
            self.put(run, prefix)
            for kind in (*RCLONE, *S3FS):
                with self.subTest(kind, run=name):
                    below, out = self.bucket(kind, prefix), os.path.join(self.tmp, f"{kind} {prefix} out")
                    self.call(CKPT, "export", below, out)
                    self.assertEqual(digests(out), want)
                    self.assertIn("equal", self.call(CKPT, "verify", plain, below).stdout)
                    with Mount(below, self.mnt, program=CKPTFS):
                        self.assertEqual(os.readlink(self.at("latest")), step)
                        self.assertEqual(digests(self.at(step)), want)

    def test_files_that_the_kernel_has_forgotten(self):
        """More files than ckptfs may have open: it opens them again, and must find the same ones."""
        if os.geteuid():
            self.skipTest("only root can have the kernel forget")
        run = os.path.join(GOLDEN, "nanotron", "llama_tp2_pp2_tied")
        self.put(run, "forgotten")
        for kind in (*RCLONE, *S3FS):
            few = os.path.join(self.tmp, "few")
            with open(few, "w") as f:
                f.write(f'#!/bin/sh\nexec prlimit --nofile=60 {CKPTFS} "$@"\n')
            os.chmod(few, 0o755)
            with self.subTest(kind), Mount(self.bucket(kind, "forgotten"), self.mnt, program=few):
                before = digests(self.at("10"))
                with open("/proc/sys/vm/drop_caches", "w") as f:
                    f.write("3\n")
                self.assertEqual(digests(self.at("10")), before)

    def test_an_object_that_is_overwritten_while_it_is_read(self):
        """Old bytes, then an error: never bytes of both. (s3fs notices too late, and rclone's own cache may have all old bytes.)"""
        file, folders = "model.safetensors", [os.path.join(self.tmp, n) for n in ("old", "new")]
        for seed, folder in enumerate(folders):
            write_model(folder, seed)
        self.put(folders[0], "over")
        with Mount(self.bucket("rclone", "over"), self.mnt, program=CKPTFS):
            with open(self.at(file), "rb", buffering=0) as f, open(os.path.join(folders[0], file), "rb") as old:
                self.assertEqual(f.read(1 << 16), old.read(1 << 16))
                self.put(os.path.join(folders[1], file), f"over/{file}")
                with self.assertRaises(OSError) as e:
                    while data := f.read(1 << 20):
                        self.assertEqual(data, old.read(len(data)))
                self.assertEqual(e.exception.errno, errno.ESTALE)


if __name__ == "__main__":
    for needed in ("rclone", "s3fs"):
        if not shutil.which(needed):
            print("skipped: no", needed)
            sys.exit(77)
    if not os.path.isdir(os.path.join(MOTO, "moto")):
        print("skipped: no moto in CKPTFS_MOTO")
        sys.exit(77)
    main()
