# SPDX-License-Identifier: Apache-2.0
"""The same against somebody else's store: moto's server (tests/requirements-bucket.txt), filled by boto3."""
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.request

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "mount"))
from mountlib import digests  # noqa: E402

SOURCE = os.environ.get("CKPTFS_SOURCE", os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
BUILD = os.environ.get("CKPTFS_BUILD", os.path.join(SOURCE, "build", "release"))
MOTO = os.environ.get("CKPTFS_MOTO", "")
CKPT = os.path.join(BUILD, "fs", "ckpt")
GOLDEN = os.path.join(SOURCE, "tests", "golden", "nanotron", "llama_tp2_pp2_tied")

FILL = """
import os, sys, boto3
s3 = boto3.client("s3", endpoint_url=sys.argv[1], region_name="us-east-1")
s3.create_bucket(Bucket="runs")
for prefix in sys.argv[3:]:
    for top, _, names in os.walk(sys.argv[2]):
        for name in names:
            path = os.path.join(top, name)
            s3.upload_file(path, "runs", prefix + os.path.relpath(path, sys.argv[2]))
    s3.put_object(Bucket="runs", Key=prefix + "10/", Body=b"")
for i in range(1200):
    s3.put_object(Bucket="runs", Key=f"plain/10/unused/{i}", Body=b"x")
"""
SERVE = "import sys; from moto.server import ThreadedMotoServer as S; s = S(port=0, verbose=False); s.start(); " \
        "print(s.get_host_and_port()[1], flush=True); sys.stdin.read()"


class Moto(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.tmp = tempfile.mkdtemp(prefix="ckptfs-moto-")
        env = {k: v for k, v in os.environ.items() if not k.startswith("AWS_") and not k.lower().endswith("_proxy")}
        env.update(AWS_ACCESS_KEY_ID="testing", AWS_SECRET_ACCESS_KEY="testing", HOME=cls.tmp, PYTHONPATH=MOTO)
        cls.server = subprocess.Popen([sys.executable, "-c", SERVE], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                      stderr=subprocess.DEVNULL, text=True)
        cls.url = f"http://127.0.0.1:{int(cls.server.stdout.readline())}"
        cls.env = {**env, "AWS_ENDPOINT_URL": cls.url}
        cls.prefixes = ("plain/", "a=b+c d/é/")
        subprocess.run([sys.executable, "-c", FILL, cls.url, GOLDEN, *cls.prefixes], env=env, check=True)

    @classmethod
    def tearDownClass(cls):
        cls.server.communicate()
        shutil.rmtree(cls.tmp)

    def test_export(self):
        local = os.path.join(self.tmp, "local")
        subprocess.run([CKPT, "export", GOLDEN, local, "-q"], check=True, capture_output=True)
        for i, prefix in enumerate(self.prefixes):
            out = os.path.join(self.tmp, f"out{i}")
            r = subprocess.run([CKPT, "export", "s3://runs/" + prefix, out, "-q"], env=self.env, capture_output=True, text=True)
            self.assertEqual(r.returncode, 0, r.stderr)
            self.assertEqual(digests(out), digests(local))

    def test_missing(self):
        for url, words in (("s3://runs/none", "no object whose key"), ("s3://none/x", "NoSuchBucket")):
            r = subprocess.run([CKPT, "info", url], env=self.env, capture_output=True, text=True)
            self.assertEqual(r.returncode, 1)
            self.assertIn(words, r.stderr)


if __name__ == "__main__":
    if not os.path.isdir(os.path.join(MOTO, "moto")):
        print("no moto: set CKPTFS_MOTO to a folder made by pip install --target -r tests/requirements-bucket.txt")
        sys.exit(77)
    unittest.main(verbosity=1)
