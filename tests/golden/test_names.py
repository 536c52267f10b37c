# SPDX-License-Identifier: Apache-2.0
"""Paths of any bytes: every command works with them, and shows what is not UTF-8 as errors do."""

import json
import os
import shutil
import subprocess
import sys
import tempfile

BUILD = os.environ.get("CKPTFS_BUILD", "build/release")
HERE = os.path.dirname(os.path.abspath(__file__))
CKPT = os.path.join(BUILD, "fs", "ckpt").encode()
GOLDEN = os.path.join(HERE, "nanotron", "llama_tp2_pp2_tied", "10").encode()
STEP, SHOWN = b"\xfe\xc3\xa4-10", "\\xfeä-10"
TENSOR = b"model.norm.weight"


def ckpt(*args):
    done = subprocess.run([CKPT, *args], capture_output=True, timeout=60)
    assert done.returncode == 0, (args, done.returncode, done.stderr)
    return done.stdout


def in_json(*args):
    return json.loads(ckpt(*args, b"--json"))


def check(top):
    run, dest = os.path.join(top, b"r\xff un"), os.path.join(top, b"d\xff")
    shutil.copytree(GOLDEN, os.path.join(run, STEP))
    shown = os.fsdecode(top) + "/r\\xff un"
    info = in_json(b"info", run)
    assert info["run"] == shown and info["steps"] == [SHOWN], info
    assert SHOWN in ckpt(b"info", run).decode()
    explained = in_json(b"explain", run, TENSOR)
    assert explained["pieces"] and all(p["file"].startswith(f"{shown}/{SHOWN}/") for p in explained["pieces"]), explained
    for command in (b"ls", b"digest"):
        assert in_json(command, run)
    exported = in_json(b"export", run, dest)
    assert exported["dest"] == os.fsdecode(top) + "/d\\xff" and exported["files"], exported
    assert in_json(b"verify", run, dest)["equal"]
    loaded = in_json(b"load", run, b"--layout", b"fsdp=1", b"--verify")
    assert loaded["step"] == SHOWN, loaded
    single = in_json(b"info", os.path.join(run, STEP))
    assert single["run"] == f"{shown}/{SHOWN}", single


def main():
    with tempfile.TemporaryDirectory() as top:
        check(os.fsencode(top))
    print("1 passed")
    sys.exit(0)


main()
