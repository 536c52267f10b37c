# SPDX-License-Identifier: Apache-2.0
"""Versions of changes, as slime and SkyRL write them: chains that are read, damage that is named, and what `ckpt delta` writes.

The versions are made here as the frameworks make them (numpy, zstandard, xxhash, safetensors), from their sources.
"""

import contextlib
import fcntl
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import unittest
import zlib

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "load"))
from ranks import PYTHON, ended, started  # noqa: E402

try:
    import numpy as np
    import safetensors.numpy
    import safetensors.torch
    import torch
    import xxhash
    import zstandard
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

BUILD = os.path.abspath(os.environ.get("CKPTFS_BUILD", "build/dev"))
CKPT, CKPTFS = (os.path.join(BUILD, "fs", name) for name in ("ckpt", "ckptfs"))
INDEX = "model.safetensors.index.json"
SHAPES = {"model.embed_tokens.weight": (96, 32), "lm_head.weight": (96, 32), "model.norm.weight": (32,), "model.scale": ()}
SHAPES |= {f"model.layers.{i}.self_attn.{n}_proj.weight": (32, 32) for i in range(2) for n in "qo"}


def checksum(kind, data):
    if kind == "xxh3-128":
        return xxhash.xxh3_128(data.tobytes()).hexdigest()
    return f"{zlib.adler32(data.tobytes(), 1):08x}" if kind == "adler32" else "not known"


def overwrite_encode(new, mask):
    at = np.flatnonzero(mask).astype("<u4")
    return np.concatenate([np.array([at.size], "<u4").view(np.uint8), at.view(np.uint8), new[mask]])


def pack(data):
    return np.frombuffer(zstandard.ZstdCompressor(level=1).compress(data.tobytes()), dtype=np.uint8)


def dump(value, path):
    with open(path, "w") as f:
        json.dump(value, f)


class Chain:
    """A folder of versions and, for each of them, the model's bytes."""

    def __init__(self, top, kind="slime", seed=0, shapes=None):
        self.top, self.kind, self.rng = top, kind, np.random.default_rng(seed)
        self.shapes = shapes or SHAPES
        self.dtypes = {n: torch.bfloat16 if i % 3 else torch.float32 for i, n in enumerate(self.shapes)}
        self.bytes = {n: self.rng.integers(0, 256, self.size(n), dtype=np.uint8) for n in self.shapes}
        self.states = [dict(self.bytes)]

    def size(self, name):
        return int(np.prod(self.shapes[name], dtype=np.int64)) * self.dtypes[name].itemsize

    def tensors(self, version=-1):
        return {n: torch.from_numpy(b.copy()).view(self.dtypes[n]).reshape(self.shapes[n]) for n, b in self.states[version].items()}

    def name(self, version):
        return f"weight_v{version:06d}" if self.kind == "slime" else f"delta-{version:08d}"

    def folder(self, version):
        return os.path.join(self.top, self.name(version))

    def write_whole(self, folder, version=-1):
        os.makedirs(folder, exist_ok=True)
        names, tensors = sorted(self.shapes), self.tensors(version)
        files = {n: f"model-{1 + (i > 2):05d}-of-00002.safetensors" for i, n in enumerate(names)}
        for file in set(files.values()):
            safetensors.torch.save_file({n: tensors[n] for n in names if files[n] == file}, os.path.join(folder, file), metadata={"format": "pt"})
        dump({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, os.path.join(folder, "config.json"))
        dump({"metadata": {"total_size": 1}, "weight_map": files}, os.path.join(folder, INDEX))

    def step(self, encoding="xor", sums="xxh3-128", fraction=0.03, write=True):
        """Change some tensors, and write the version."""
        version, blobs, digests = len(self.states), {}, {}
        for n in sorted(self.shapes):
            if self.rng.random() < 0.3:
                continue
            old, new = self.bytes[n], self.bytes[n].copy()
            at = self.rng.choice(len(new), max(1, int(len(new) * fraction)), replace=False)
            new[at] ^= self.rng.integers(1, 256, len(at), dtype=np.uint8)
            blobs[n] = pack(new ^ old if encoding == "xor" else overwrite_encode(new, new != old))
            digests[n], self.bytes[n] = checksum(sums, new), new
        self.states.append(dict(self.bytes))
        if write:
            self.write(version, blobs, digests, encoding, sums)
        return blobs, digests

    def write(self, version, blobs, digests, encoding="xor", sums="xxh3-128", base=None, **more):
        folder = self.folder(version)
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
        base = version - 1 if base is None else base
        names = sorted(blobs)
        parts = [p for p in (names[:3], names[3:]) if p]
        files = {}
        for i, part in enumerate(parts):
            if self.kind == "slime":
                file, meta = f"model-{i:05d}-of-{len(parts):05d}.safetensors", {n: digests[n] for n in part}
            else:
                file, meta = f"delta-rank00000-file{i:06d}.safetensors", None
            with open(os.path.join(folder, file), "wb") as f:
                f.write(safetensors.numpy.save({n: blobs[n] for n in part}, metadata=meta))
            files |= dict.fromkeys(part, file)
        if self.kind == "slime":
            meta = {"version": f"{version:06d}", "base_version": f"{base:06d}", "delta_encoding": encoding, "compression_format": "zstd"}
            dump({"metadata": meta | {"checksum_format": sums} | more, "weight_map": files}, os.path.join(folder, INDEX))
            return
        records = [
            dict(name=n, dtype=str(self.dtypes[n]).removeprefix("torch."), shape=list(self.shapes[n]), uncompressed_num_bytes=self.size(n),
                 compressed_num_bytes=len(blobs[n]), payload_file=files[n], payload_key=n, checksum=digests[n], checksum_algorithm=sums) | more
            for n in names
        ]
        dump(dict(version=version, base_version=base, tensors=records, payload_files=sorted(set(files.values()))), os.path.join(folder, "manifest.json"))


def run(*args, **more):
    return subprocess.run([CKPT, *args], capture_output=True, text=True, timeout=300, **more)


class Delta(unittest.TestCase):
    def setUp(self):
        self.dir = tempfile.mkdtemp(prefix="ckptfs-delta-")
        self.addCleanup(shutil.rmtree, self.dir, ignore_errors=True)
        self.base = os.path.join(self.dir, "base")
        self.run_dir = os.path.join(self.dir, "run")

    def chain(self, kind="slime", seed=0, base=True, **more):
        c = Chain(self.run_dir, kind, seed, **more)
        c.write_whole(self.base if base else c.folder(0))
        return c

    def check(self, c, version, *args, step=True):
        """The version's tensors are the model's bytes."""
        out = os.path.join(self.dir, "out")
        shutil.rmtree(out, ignore_errors=True)
        done = run("export", "-q", c.top, out, *(["--step", c.name(version)] if step else []), *args)
        self.assertEqual(done.returncode, 0, done.stderr)
        found = {}
        for name in os.listdir(out):
            if name.endswith(".safetensors"):
                found |= safetensors.torch.load_file(os.path.join(out, name))
        expected = c.tensors(version)
        self.assertEqual(found.keys(), expected.keys())
        for n, t in expected.items():
            self.assertEqual(found[n].dtype, t.dtype)
            self.assertTrue(torch.equal(found[n].reshape(-1).view(torch.uint8), t.reshape(-1).view(torch.uint8)), (version, n))
        return done.stderr

    def test_chains(self):
        for seed, (kind, encoding, sums) in enumerate([("slime", "xor", "xxh3-128"), ("slime", "overwrite", "adler32"), ("skyrl", "xor", "xxh3-128"), ("slime", None, "xxh3-128")]):
            with self.subTest(kind=kind, encoding=encoding):
                shutil.rmtree(self.run_dir, ignore_errors=True)
                c = self.chain(kind, seed)
                for _ in range(12):
                    c.step(encoding or random.Random(len(c.states)).choice(["xor", "overwrite"]), sums)
                for version in (1, 2, 7, 12):
                    self.check(c, version, "-o", f"base={self.base}")
                self.check(c, 12, "-o", f"base={self.base}", step=False)
                done = run("load", c.top, "--layout", "dp=1", "--verify", "-o", f"base={self.base}")
                self.assertEqual(done.returncode, 0, done.stderr)
                # every byte compared; ranks that want rows of a changed tensor get all of it from the one that decodes it
                jobs = ["fsdp=3:3:once", "random:4:once", "random:3:node", "random:2:each"]
                done = subprocess.run([os.path.join(BUILD, "tests", "load_ranks"), "-o", f"base={self.base}", c.top, "--", *jobs], capture_output=True, text=True)
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                self.assertGreater(int(done.stdout.split(" sent ")[1].split()[0]), 0)

    def test_whole_versions(self):
        """The first version is in the folder; a later whole one is where chains begin again."""
        c = self.chain(base=False)
        for version in range(1, 8):
            c.step(write=version != 4)
            if version == 4:
                c.write_whole(c.folder(4))
        shutil.rmtree(c.folder(3))
        for version in (0, 2, 4, 6, 7):
            self.check(c, version)
        self.check(c, 7, "-o", f"base={c.folder(0)}")

    def test_words(self):
        """info and explain say what there is; a version without changes is one, too."""
        c = self.chain()
        blobs, _ = c.step()
        c.step()
        c.write(3, {}, {})
        c.states.append(dict(c.bytes))
        self.check(c, 3, "-o", f"base={self.base}")
        info = json.loads(run("info", c.top, "--json", "-o", f"base={self.base}").stdout)
        self.assertIn("slime delta", json.dumps(info))
        self.assertIn(json.dumps([c.name(1), c.name(2), c.name(3)]), json.dumps(info))
        done = run("explain", c.top, sorted(blobs)[0], "-o", f"base={self.base}")
        self.assertIn(f"changed by {c.name(1)}", done.stdout)

    def test_many_levels(self):
        c = self.chain(shapes={"model.norm.weight": (64,)})
        for _ in range(65):
            c.step(fraction=0.5)
        self.check(c, 64, "-o", f"base={self.base}")
        done = run("export", "-q", c.top, os.path.join(self.dir, "o"), "-o", f"base={self.base}")
        self.assertRegex(done.stderr, "more than 64 versions since the last whole one")

    def test_defects(self):
        """Each names the version and what is wrong; at opening, or at the first read of the tensor."""
        q = "model.layers.0.self_attn.q_proj.weight"

        def swapped(c, v, blobs, digests):
            other = [n for n in blobs if c.size(n) == c.size(q) and n != q][0]
            blobs[q], blobs[other] = blobs[other], blobs[q]
            c.write(v, blobs, digests)

        def cut(c, v, blobs, digests):
            c.write(v, blobs | {q: blobs[q][:-9]}, digests)

        def file_cut(c, v, blobs, digests):
            path = os.path.join(c.folder(v), "model-00000-of-00002.safetensors")
            os.truncate(path, os.path.getsize(path) - 20)

        def gone(c, v, blobs, digests):
            os.remove(os.path.join(c.folder(v), "model-00001-of-00002.safetensors"))

        def again(**more):
            return lambda c, v, blobs, digests: c.write(v, blobs, digests, **more)

        def blob(data, encoding="xor"):
            return lambda c, v, blobs, digests: c.write(v, {q: pack(np.frombuffer(data, np.uint8))}, {q: digests[q]}, encoding)

        size = Chain(self.run_dir).size(q)
        cases = {
            "swapped": (swapped, r"_proj.weight' in version 'weight_v000002'.*checksum"),
            "cut": (cut, rf"'{q}' in version 'weight_v000002'.*damaged"),
            "file cut": (file_cut, "weight_v000002/model-00000-of-00002.safetensors"),
            "gone": (gone, "weight_v000002/model-00001-of-00002.safetensors"),
            "gap": (lambda c, v, b, d: shutil.rmtree(c.folder(1)), "changes since version 1, and there is no 'weight_v000001'.*whole version"),
            "encoding": (again(delta_encoding="delta"), "delta_encoding is delta.*expected xor or overwrite"),
            "packing": (again(compression_format="lz4"), "compression_format lz4.*zstd"),
            "numbers": (again(base=7), "version and an earlier base_version"),
            "short": (blob(bytes(size - 1)), rf"'{q}'.*shorter"),
            "long": (blob(bytes(size + 1)), rf"'{q}'.*longer"),
            "positions": (blob(struct.pack("<III", 2, 5, 5) + b"xy", "overwrite"), rf"'{q}'.*do not ascend"),
            "outside": (blob(struct.pack("<II", 1, size) + b"x", "overwrite"), rf"'{q}'.*outside of the tensor"),
            "count": (blob(struct.pack("<II", size + 1, 0), "overwrite"), rf"'{q}'.*more positions than the tensor has bytes"),
            "no values": (blob(struct.pack("<III", 2, 1, 2) + b"x", "overwrite"), rf"'{q}'.*shorter"),
            "unknown": (lambda c, v, b, d: c.write(v, b | {"new.weight": b[q]}, d | {"new.weight": d[q]}), "changes 'new.weight', which the whole model does not have"),
            "no checksum": (lambda c, v, b, d: c.write(v, b, d | {q: ""}), rf"'{q}'.*checksum"),
        }
        for what, (spoil, text) in cases.items():
            with self.subTest(what):
                shutil.rmtree(self.run_dir, ignore_errors=True)
                c = self.chain(seed=5)
                c.step()
                while q not in (made := c.step(write=False))[0] or len(made[0]) < 6:
                    c.states.pop()
                    c.bytes = dict(c.states[-1])
                c.write(2, *made)
                spoil(c, 2, *(dict(m) for m in made))
                done = run("export", "-q", c.top, os.path.join(self.dir, f"bad {what}"), "--step", c.name(2), "-o", f"base={self.base}")
                self.assertEqual(done.returncode, 1, what)
                self.assertRegex(done.stderr, text)

    def test_records(self):
        """SkyRL tells shapes and dtypes."""
        for more, text in (({"shape": [5]}, "another shape or dtype"), ({"dtype": "int8"}, "another shape or dtype"), ({"payload_key": "x"}, "has no 'x'"), ({"name": None}, "record 0 lacks name")):
            shutil.rmtree(self.run_dir, ignore_errors=True)
            c = self.chain("skyrl")
            c.write(1, *c.step(), **more)
            self.assertRegex(run("info", c.top, "-o", f"base={self.base}").stderr, text)

    def test_what_a_folder_holds_is_decided_by_parsing(self):
        """Where in the index or manifest a word stands, or in what, does not matter."""
        for kind, file in (("slime", INDEX), ("skyrl", "manifest.json")):
            shutil.rmtree(self.run_dir, ignore_errors=True)
            c = self.chain(kind)
            c.step()
            path = os.path.join(c.folder(1), file)
            with open(path) as f:
                good = json.load(f)
            last = "metadata" if kind == "slime" else "base_version"
            for padding in (0, 5000, 70000, 2000000):
                dump({"padding": "x" * padding} | {k: v for k, v in good.items() if k != last} | {last: good[last]}, path)
                self.check(c, 1, "-o", f"base={self.base}")
            if kind == "slime":  # within the metadata, too
                dump({"metadata": {"padding": [{"x": "y" * 5000}]} | good["metadata"], "weight_map": good["weight_map"]}, path)
                self.check(c, 1, "-o", f"base={self.base}")
                done = run("info", self.base, "-o", f"base={c.folder(1)}")
                self.assertRegex(done.stderr, "weight_v000001/model.safetensors.index.json': its metadata has delta_encoding: the files hold what has changed since another version")
                dump(dict(version=1, base_version=0, tensors=[], payload_files=[]), os.path.join(c.folder(1), "manifest.json"))
                self.assertRegex(run("info", self.run_dir, "-o", f"base={self.base}").stderr, "has slime's model.safetensors.index.json and SkyRL's manifest.json: it holds two versions")
        # a model in whose index or manifest the words are names or texts is a model
        whole = os.path.join(self.dir, "whole")
        shutil.copytree(self.base, whole)
        with open(os.path.join(whole, INDEX)) as f:
            index = json.load(f)
        dump({"metadata": {"note": "\"delta_encoding\"", "total_size": 1, "x": {"delta_encoding": 1}}, "delta_encoding": 2} | index, os.path.join(whole, INDEX))
        dump({"note": "\"base_version\": 1", "x": {"base_version": 1}}, os.path.join(whole, "manifest.json"))
        self.assertEqual(json.loads(run("info", "--json", whole).stdout)["format"], "hf")

    def test_a_manifest_that_names_too_little(self):
        """Each would have shown the base's tensors in the place of changed ones."""
        def records(keep):
            return lambda m: m | {"tensors": [r for r in m["tensors"] if keep(r)]}

        cases = {
            "a record less": (lambda m: m | {"tensors": m["tensors"][1:]}, "manifest.json names [0-9]+ tensors, its files have [0-9]+"),
            "a file less": (records(lambda r: r["payload_file"].endswith("0.safetensors")), "manifest.json names [0-9]+ tensors, its files have [0-9]+"),
            "none": (lambda m: m | {"tensors": []}, "manifest.json names 0 tensors"),
            "no list": (lambda m: {k: v for k, v in m.items() if k != "tensors"}, "manifest.json': tensors is not there, expected a list of records"),
            "no list of records": (lambda m: m | {"tensors": {r["name"]: r for r in m["tensors"]}}, "tensors is not a list"),
            "no list of files": (lambda m: m | {"payload_files": 2}, "payload_files is not a list"),
            "no names of files": (lambda m: m | {"payload_files": [2]}, r"payload_files\[0\] is not the name"),
            "a file more": (lambda m: m | {"payload_files": [*m["payload_files"], "x.safetensors"]}, "x.safetensors"),
        }
        c = self.chain("skyrl", seed=1)
        while len((made := c.step(write=False))[0]) < 6:
            c.states.pop()
        c.write(1, *made)
        path = os.path.join(c.folder(1), "manifest.json")
        with open(path) as f:
            good = json.load(f)
        for what, (spoil, text) in cases.items():
            with self.subTest(what):
                dump(spoil(good), path)
                done = run("info", c.top, "-o", f"base={self.base}")
                self.assertEqual(done.returncode, 1)
                self.assertRegex(done.stderr, text)
        dump({k: v for k, v in good.items() if k != "payload_files"}, path)  # the records say it all
        shutil.copy(os.path.join(c.folder(1), "delta-rank00000-file000000.safetensors"), os.path.join(c.folder(1), "delta-rank00000-file000009.safetensors"))
        self.assertRegex(run("info", c.top, "-o", f"base={self.base}").stderr, "file000009.safetensors' is left out: manifest.json does not name it")

    def test_without_a_base(self):
        c = self.chain()
        c.step()
        c.step()
        self.assertIn("slime delta", run("info", c.folder(2) + "/", "-o", f"base={self.base}").stdout)
        shutil.rmtree(c.folder(2))
        self.assertRegex(run("info", c.top).stderr, "base= gives it")
        for path in (c.folder(1) + "/", os.path.join(c.folder(1), ".")):  # one version, alone
            self.assertIn("slime delta", run("info", path, "-o", f"base={self.base}").stdout)
        link = os.path.join(self.dir, "link")
        os.symlink(c.folder(1), link)
        self.assertIn("slime delta", run("info", link, "-o", f"base={self.base}").stdout)
        self.check(c, 1, "-o", f"base={self.base}")
        wrong = os.path.join(self.dir, "wrong")
        Chain(self.run_dir, seed=9).write_whole(wrong)
        done = run("export", "-q", c.top, os.path.join(self.dir, "bad"), "-o", f"base={wrong}")
        self.assertRegex(done.stderr, "checksum.*damaged, or of another base")

    def test_checksums_of_another_kind(self):
        c = self.chain()
        c.step(sums="blake3")
        self.assertRegex(self.check(c, 1, "-o", f"base={self.base}"), "not compared")

    def test_mount(self):
        """A new version appears while the old one is read; one that is written over is not mixed with it."""
        mnt = os.path.join(self.dir, "mnt")
        os.mkdir(mnt)
        c = self.chain()
        c.step()
        daemon = subprocess.Popen([CKPTFS, c.top, mnt, "-f", "-o", f"base={self.base}"], stderr=subprocess.PIPE, text=True)
        self.addCleanup(daemon.wait)
        self.addCleanup(subprocess.run, ["fusermount3", "-u", mnt])
        until = time.monotonic() + 60
        while not os.path.ismount(mnt) and time.monotonic() < until:
            time.sleep(0.05)

        def read(step):
            found = {}
            for name in os.listdir(os.path.join(mnt, step)):
                if name.endswith(".safetensors"):
                    found |= safetensors.torch.load_file(os.path.join(mnt, step, name))
            return found

        def same(found, version):
            return all(torch.equal(found[n].reshape(-1).view(torch.uint8), t.reshape(-1).view(torch.uint8)) for n, t in c.tensors(version).items())

        self.assertTrue(same(read(c.name(1)), 1))
        held = os.open(os.path.join(mnt, c.name(1), sorted(n for n in os.listdir(os.path.join(mnt, c.name(1))) if n.endswith(".safetensors"))[0]), os.O_RDONLY)
        self.addCleanup(os.close, held)
        before = os.pread(held, 1 << 20, 0)
        c.step("overwrite")
        while os.readlink(os.path.join(mnt, "latest")) != c.name(2) and time.monotonic() < until:
            time.sleep(0.1)
        self.assertTrue(same(read("latest"), 2))
        self.assertEqual(os.pread(held, 1 << 20, 0), before)

    def test_rewritten(self):
        """A version that is written again while it is read: what was opened gives its bytes or an error, never those of both."""
        mnt = os.path.join(self.dir, "mnt")
        os.mkdir(mnt)
        c = self.chain(shapes={f"w{i}.weight": (1 << 19,) for i in range(24)})
        c.step()
        daemon = subprocess.Popen([CKPTFS, c.top, mnt, "-f", "-o", f"base={self.base}"], stderr=subprocess.DEVNULL)
        self.addCleanup(daemon.wait)
        self.addCleanup(subprocess.run, ["fusermount3", "-u", mnt])
        until = time.monotonic() + 60
        while not os.path.ismount(mnt) and time.monotonic() < until:
            time.sleep(0.05)
        step = os.path.join(mnt, c.name(1))
        paths = [os.path.join(step, n) for n in sorted(os.listdir(step)) if n.endswith(".safetensors")]
        for mode in ("in place", "renamed"):
            held = [open(p, "rb", buffering=0) for p in paths]
            expected = c.tensors(1)
            got = [f.read(1 << 20) for f in held]
            again = Chain(self.run_dir, seed=11, shapes=c.shapes)
            again.bytes, again.states = dict(c.states[0]), [dict(c.states[0])]
            blobs, digests = again.step(write=False)
            if mode == "renamed":
                again.top = os.path.join(self.dir, "beside")
                again.write(1, blobs, digests)
                for file in os.listdir(again.folder(1)):
                    os.replace(os.path.join(again.folder(1), file), os.path.join(c.folder(1), file))
            else:
                before = {f: os.stat(os.path.join(c.folder(1), f)).st_ino for f in os.listdir(c.folder(1))}
                again.top = os.path.join(self.dir, "beside")
                again.write(1, blobs, digests)
                for file in os.listdir(again.folder(1)):
                    shutil.copyfile(os.path.join(again.folder(1), file), os.path.join(c.folder(1), file))
                self.assertEqual(before, {f: os.stat(os.path.join(c.folder(1), f)).st_ino for f in os.listdir(c.folder(1))})
            for f, head in zip(held, got):
                try:
                    text = head + f.read()
                except OSError:
                    continue
                for n, t in safetensors.torch.load(text).items():
                    self.assertTrue(torch.equal(t.reshape(-1).view(torch.uint8), expected[n].reshape(-1).view(torch.uint8)), (mode, n))
            for f in held:
                f.close()
            c.states[1] = again.states[1]
            while time.monotonic() < until:  # and then the new ones
                try:
                    found = {n: t for p in paths for n, t in safetensors.torch.load_file(p).items()}
                    if all(torch.equal(found[n].view(torch.uint8), t.view(torch.uint8)) for n, t in c.tensors(1).items()):
                        break
                except (OSError, safetensors.SafetensorError):
                    pass
                time.sleep(0.2)
            else:
                self.fail(f"{mode}: the new version does not appear")
            c.rng = np.random.default_rng(12)

    def flat(self, c, most):
        """All tensors are right, and reading them takes at most so many MiB."""
        whole = os.path.join(self.dir, "whole")
        c.write_whole(whole)
        digests = []
        for args in ([c.top, "-o", f"base={self.base}", "--jobs", "6"], [whole, "-o", "view=raw"]):  # these names are no llama's
            used = 0
            with tempfile.TemporaryFile() as out, subprocess.Popen([CKPT, "digest", "--tensors", *args], stdout=out) as done:
                while done.poll() is None:  # rusage has this process's own memory, of before the exec
                    with contextlib.suppress(OSError), open(f"/proc/{done.pid}/status") as f:
                        used = max([used, *(int(line.split()[1]) >> 10 for line in f if line.startswith("VmHWM"))])
                    time.sleep(0.01)
                out.seek(0)
                digests.append((out.read(), used))
            self.assertEqual(done.returncode, 0)
        self.assertEqual(digests[0][0], digests[1][0])
        print(f"memory: {digests[0][1]} MiB", file=sys.stderr)
        if "asan" not in BUILD and "tsan" not in BUILD:
            self.assertTrue(0 < digests[0][1] < most, digests[0][1])

    def test_many_tensors(self):
        """10,000 tensors in a chain of 5."""
        c = self.chain(shapes={f"model.layers.{i // 100}.mlp.experts.{i % 100}.weight": (16, 32) for i in range(10000)})
        for _ in range(5):
            c.step()
        self.flat(c, 150)

    def test_more_than_the_budget(self):
        """Tensors of 700 MiB together, more than the cache may hold, read by six threads."""
        c = self.chain(shapes={f"w{i}.weight": (n << 17, 2) for i, n in enumerate((100, 3, 200, 80, 120, 40, 200))})
        for _ in range(2):
            c.step(fraction=0.0001)
        self.flat(c, 600)

    def test_long_tensor(self):
        """One that is folded in parts: reads in any order, by several threads, and damage at its end."""
        sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "..", "contrib", "python"))
        shapes = {"a.weight": (70, 1 << 20)}  # F32: 280 MiB
        c = self.chain(shapes=shapes)
        c.step(fraction=0.001, sums="xxh3-128")
        while len(c.states) < 3 or "a.weight" not in made[0]:
            made = c.step("overwrite", fraction=0.001, write=False)
        c.write(2, *made, encoding="overwrite") if len(c.states) == 3 else self.skipTest("unlucky seed")
        script = """
import sys, threading, numpy as np, ckptfs
view = ckptfs.View(sys.argv[1], base=sys.argv[2])
expected = np.load(sys.argv[3], mmap_mode="r")
order = [69, 0, 33, 34, 1, 68, 2]
def read(rows):
    for r in rows:
        assert (view.get_slice("a.weight")[r:r + 1].view(__import__("torch").uint8).numpy().reshape(-1) == expected[r]).all(), r
threads = [threading.Thread(target=read, args=(order[k:] + order[:k],)) for k in range(3)]
[t.start() for t in threads]; [t.join() for t in threads]
print("good")
"""
        np.save(os.path.join(self.dir, "e.npy"), c.states[2]["a.weight"].reshape(70, -1))
        env = dict(os.environ, PYTHONPATH=os.path.join(os.environ.get("CKPTFS_SOURCE", "."), "contrib", "python"), CKPTFS_LIBRARY_PATH=BUILD)
        done = subprocess.run([*PYTHON, "-c", script, c.top, self.base, os.path.join(self.dir, "e.npy")], capture_output=True, text=True, env=env, timeout=600)
        self.assertEqual(done.stdout, "good\n", done.stderr[-2000:])
        c.write(2, made[0], {"a.weight": "0" * 32}, encoding="overwrite")
        done = run("digest", "--tensors", c.top, "-o", f"base={self.base}")
        self.assertRegex(done.stderr, "checksum")

    RELOADS = """
import json, logging, os, sys, torch, ckptfs
top, base, other, out, names = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], json.loads(sys.argv[5])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if size > 1:
    torch.distributed.init_process_group("gloo")
said = []
logging.getLogger("ckptfs").addHandler(type("H", (logging.Handler,), {"emit": lambda self, r: said.append(r.getMessage())})())
with ckptfs.View(top, step=names[1], base=base) as view:
    tensors = {n: torch.empty_like(view[n]) for n in view}
results = []
with ckptfs.Reloader(tensors, top, step=names[1], base=base) as r:
    def reload(step, changed=True, run=None):
        said.clear()
        for t in tensors.values():  # who is left alone shows it
            t.view(-1).view(torch.uint8)[0] ^= 0xff
        try:
            stats = r.reload(run, step=step, changed_only=changed)
        except ckptfs.CkptError as e:
            return results.append([str(e), {}, []])
        left = []
        for n, t in tensors.items():
            first = t.view(-1).view(torch.uint8)[:1]
            with ckptfs.View(run or top, step=step, base=base, told=None) as view:
                want = view[n].reshape(-1).view(torch.uint8)
            if int(first[0]) == int(want[0]) ^ 0xff:
                left.append(n)
                first ^= 0xff
            assert torch.equal(t.reshape(-1).view(torch.uint8), want), (step, n)
        results.append([stats, left, list(said)])
    reload(names[2])
    reload(names[3], changed=rank == 0)
    reload(names[4])
    reload(names[5])
    reload(names[5])
    reload(names[6])
    reload(names[5])
    reload(names[5], run=other)
    reload(names[7])
with open(f"{out}.{rank}", "w") as f:
    json.dump(results, f)
"""

    def test_reloader(self):
        """changed_only: what a step leaves alone is neither read nor sent; everything is, and it is told, where that is not known."""
        c = self.chain(seed=3)
        blobs = [None] + [c.step(write=v != 4)[0] for v in range(1, 8)]
        c.write_whole(c.folder(4), 4)
        path = os.path.join(c.folder(6), "model-00000-of-00002.safetensors")
        with open(path, "r+b") as f:  # its first blob is damaged
            (n,) = struct.unpack("<Q", f.read(8))
            f.seek(8 + n + 8)
            f.write(b"\xff" * 8)
        other = os.path.join(self.dir, "other")
        shutil.copytree(c.top, other)  # other files, so nothing is known
        env = dict(os.environ, PYTHONPATH=os.path.join(os.environ.get("CKPTFS_SOURCE", "."), "contrib", "python"), CKPTFS_LIBRARY_PATH=BUILD)
        for size in (1, 2):
            out = os.path.join(self.dir, f"results{size}")
            args = [*PYTHON, "-c", self.RELOADS, c.top, self.base, other, out, json.dumps([c.name(v) for v in range(8)])]
            said = ended(started(size, args, env=env), 300)
            self.assertEqual([status for status, *_ in said], [0] * size, said)
            whole = set(c.shapes)
            expected = [whole - set(blobs[2]), whole - set(blobs[3]) if size == 1 else set(), set(), whole - set(blobs[5]), whole, None, set(), set(), None]
            for rank in range(size):
                with open(f"{out}.{rank}") as f:
                    results = json.load(f)
                self.assertEqual(len(results), 9)
                for i, ((stats, left, log), skipped) in enumerate(zip(results, expected)):
                    with self.subTest(size=size, rank=rank, i=i):
                        if skipped is None:
                            self.assertRegex(stats, "weight_v000006.*damaged|weight_v000006.*checksum")
                            continue
                        self.assertEqual(set(left), skipped)
                        self.assertEqual(stats["skipped_tensors"], len(skipped))
                        self.assertEqual(stats["skipped_bytes"], size * sum(map(c.size, skipped)))
                        self.assertEqual(stats["needed_bytes"] + stats["skipped_bytes"], size * sum(map(c.size, whole)))
                        self.assertEqual(stats["read_bytes"] == 0, skipped == whole)
                        self.assertEqual(any("as a whole" in text for text in log), rank == 0 and not skipped)

    def test_two_at_once(self):
        """One of two deltas into one folder fails, and the other's is whole; what an interrupted one leaves is not in the way."""
        c = self.chain()
        c.step(write=False)
        whole = os.path.join(self.dir, "whole")
        c.write_whole(whole)
        for kind in ("slime", "skyrl"):
            c.kind = kind
            shutil.rmtree(self.run_dir, ignore_errors=True)
            for _ in range(5):  # the folders above it are made, too
                args = [CKPT, "delta", self.base, whole, c.folder(1), "--format", kind, "-q"]
                both = [subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
                said = [p.communicate(timeout=300)[1] for p in both]
                self.assertEqual(sorted(p.returncode != 0 for p in both), [False, True], said)
                self.assertRegex("".join(said), "another ckpt delta is writing to|has a finished version already")
                self.assertFalse([n for n in os.listdir(c.folder(1)) if n.startswith(".")])
                self.check(c, 1, "-o", f"base={self.base}")
                shutil.rmtree(c.folder(1))
            os.mkdir(c.folder(1))
            with open(os.path.join(c.folder(1), ".ckptfs-delta"), "w") as lock:
                with open(os.path.join(c.folder(1), "model-00009-of-00010.safetensors"), "w"):
                    pass  # as an interrupted one leaves them
                fcntl.flock(lock, fcntl.LOCK_EX)
                self.assertRegex(run(*args[1:]).stderr, "another ckpt delta is writing to")
                fcntl.flock(lock, fcntl.LOCK_UN)
                self.assertEqual(run(*args[1:]).returncode, 0)
            self.assertFalse([n for n in os.listdir(c.folder(1)) if n.startswith(".") or "00009" in n])
            self.check(c, 1, "-o", f"base={self.base}")
        other = os.path.join(self.dir, "other", "v1")
        shutil.copytree(whole, other)
        os.remove(os.path.join(other, INDEX))
        before = sorted(os.listdir(other))
        self.assertRegex(run("delta", self.base, whole, other).stderr, "is not empty: it holds ")
        self.assertEqual(sorted(os.listdir(other)), before)
        less = Chain(self.run_dir, shapes={**SHAPES, "model.norm.weight": (33,)})
        less.write_whole(os.path.join(self.dir, "less"))
        self.assertEqual(run("delta", self.base, os.path.join(self.dir, "less"), os.path.join(self.dir, "n", "e", "w1")).returncode, 1)
        self.assertFalse(os.path.exists(os.path.join(self.dir, "n")))  # what failed leaves nothing

    def test_written(self):
        """ckpt delta: what it writes leads from A to B, also where B is in another form; and what can't be said is an error."""
        c = self.chain()
        for _ in range(3):
            c.step(write=False)
        for v in range(1, 4):
            c.write_whole(os.path.join(self.dir, f"whole{v}"), v)
        for kind, encoding in (("slime", "xor"), ("slime", "overwrite"), ("skyrl", "xor")):
            shutil.rmtree(self.run_dir, ignore_errors=True)
            os.makedirs(self.run_dir)
            c.kind, before = kind, self.base
            for v in range(1, 4):
                done = run("delta", before, os.path.join(self.dir, f"whole{v}"), c.folder(v), "--format", kind, "--encoding", encoding, "--json", "-q")
                self.assertEqual(done.returncode, 0, done.stderr)
                told, before = json.loads(done.stdout), os.path.join(self.dir, f"whole{v}")
                old, new = (np.concatenate([c.states[k][n] for n in sorted(SHAPES)]) for k in (v - 1, v))
                self.assertEqual(told["changed_bytes"], int((old != new).sum()))
                self.assertEqual(told["bytes"], len(new))
            for v in range(1, 4):
                self.check(c, v, "-o", f"base={self.base}")
            if kind == "slime":  # as its receivers read it
                with open(os.path.join(c.folder(2), INDEX)) as f:
                    index = json.load(f)
                self.assertEqual(index["metadata"], {"version": "000002", "base_version": "000001", "delta_encoding": encoding, "compression_format": "zstd", "checksum_format": "xxh3-128"})
                for file in set(index["weight_map"].values()):
                    with safetensors.safe_open(os.path.join(c.folder(2), file), "np") as f:
                        for n in f.keys():
                            got = np.frombuffer(zstandard.ZstdDecompressor().decompress(f.get_tensor(n).tobytes()), np.uint8)
                            old, new = c.states[1][n], c.states[2][n]
                            self.assertTrue((got == (old ^ new if encoding == "xor" else overwrite_encode(new, old != new))).all())
                            self.assertEqual(f.metadata()[n], checksum("xxh3-128", new))
        steps = os.path.join(self.dir, "steps")
        for v in range(1, 4):
            c.write_whole(os.path.join(steps, f"step-{v}"), v)
        shutil.rmtree(c.folder(3))
        done = run("export", "-q", steps, c.folder(3), "--delta-from", "step-2", "--step", "step-3", "--format", kind)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.check(c, 3, "-o", f"base={self.base}")
        self.assertEqual(run("export", steps, c.folder(9), "--delta-from", "step-2", "--steps", "all").returncode, 2)
        done = run("delta", self.base, os.path.join(self.dir, "whole1"), c.folder(3))
        self.assertRegex(done.stderr, "finished version already")
        self.assertRegex(run("delta", self.base, self.base, os.path.join(self.dir, "x")).stderr, "ends with the number")
        for base in ("x", "-1", "5"):
            done = run("delta", self.base, self.base, os.path.join(self.dir, "v5"), "--base-version", base)
            self.assertEqual(done.returncode, 2)
            self.assertRegex(done.stderr, f"--base-version {base} is not a version before 5")
        other = Chain(self.run_dir, shapes={**SHAPES, "model.norm.weight": (33,)})
        other.write_whole(os.path.join(self.dir, "other"))
        self.assertRegex(run("delta", self.base, os.path.join(self.dir, "other"), os.path.join(self.dir, "v1")).stderr, r"'model.norm.weight' is .* \[32\] in .* \[33\]")
        less = Chain(self.run_dir, shapes={n: s for n, s in SHAPES.items() if n != "lm_head.weight"})
        less.write_whole(os.path.join(self.dir, "less"))
        opt = ["-o", "allow_partial"]
        self.assertRegex(run("delta", self.base, os.path.join(self.dir, "less"), os.path.join(self.dir, "v2"), *opt).stderr, "'lm_head.weight' is not in")


unittest.main()
