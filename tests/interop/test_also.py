# SPDX-License-Identifier: Apache-2.0
"""The option also=: a run whose files lie in several directories, as on nodes without a shared filesystem. Golden checkpoints, whose files
are dealt out to 2 to 5 directories, some of them to several, give the same bytes as in one."""

import errno
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "load"))
import ranks  # noqa: E402

CKPT = os.path.join(os.environ.get("CKPTFS_BUILD", "build/dev"), "fs", "ckpt")
GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "golden")
SEED = int(os.environ.get("CKPTFS_SEED", "1"))
CASES = int(os.environ.get("CKPTFS_CASES", "40"))


def cases():
    """Runs of the tree that can be opened, with their options."""
    for top, folders, files in os.walk(GOLDEN):
        if "case.json" in files and not os.path.basename(top).startswith("neg_"):
            with open(os.path.join(top, "case.json")) as f:
                case = json.load(f)
            run = os.path.normpath(os.path.join(top, case.get("open", "run")))
            if case.get("compare") in ("bytes", "tensors") and os.path.isdir(run):
                given = {"base": os.path.join(top, case["base"])} if case.get("base") else {}
                given.update(view=case.get("view", "hf"), **(case.get("options") or {}))
                yield run, [f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in given.items() if k != "key_mapping"]
            folders.clear()


def digest(run, options, *also):
    words = [a for o in [*options, *("also=" + d for d in also)] for a in ("-o", o)]
    return subprocess.run([CKPT, "digest", "-q", run, *words], capture_output=True, text=True)


class Case(unittest.TestCase):
    def setUp(self):
        self.top = tempfile.TemporaryDirectory()

    def tearDown(self):
        self.top.cleanup()

    def at(self, *path):
        return os.path.join(self.top.name, *path)

    def deal(self, run, n, rng, copies=0.2):
        """Deal the files of a run out to n directories with all its folders; returns their paths."""
        nodes = [self.at("nodes", str(i), "run") for i in range(n)]
        for top, folders, files in os.walk(run):
            below = os.path.relpath(top, run)
            for node in nodes:
                os.makedirs(os.path.join(node, below), exist_ok=True)
            for file in files:
                chosen = rng.sample(nodes, rng.randint(2, n)) if rng.random() < copies else [rng.choice(nodes)]
                for node in chosen:
                    shutil.copy2(os.path.join(top, file), os.path.join(node, below, file), follow_symlinks=True)
        return nodes


class Unions(Case):
    def test_golden(self):
        rng = random.Random(SEED)
        found = sorted(cases(), key=lambda c: c[0])
        self.assertGreater(len(found), 20)
        for i in range(CASES):
            run, options = rng.choice(found)
            n = rng.randint(2, 8)
            with self.subTest(i=i, run=os.path.relpath(run, GOLDEN), n=n):
                shutil.rmtree(self.at("nodes"), ignore_errors=True)
                nodes = self.deal(run, n, rng)
                want, got = digest(run, options), digest(nodes[0], options, *nodes[1:])
                self.assertEqual((got.returncode, got.stdout), (want.returncode, want.stdout), got.stderr)
                self.assertEqual(want.returncode, 0, want.stderr)


class Loads(Case):
    def test_ranks_take_the_step_that_all_nodes_have(self):
        """A step that lies in one directory only may still be copied: no rank takes it for the latest."""
        whole = os.path.join(GOLDEN, "dcp", "fsdp2_uneven_4r", "run")
        nodes = [self.at("nodes", str(i)) for i in range(2)]
        for node in nodes:
            shutil.copytree(whole, os.path.join(node, "step-10"))
        for node, shard in zip(nodes, ("__2_0.distcp", "__1_0.distcp")):
            os.remove(os.path.join(node, "step-10", shard))
        shutil.copytree(whole, os.path.join(nodes[0], "step-20"))
        for n in (1, 2):
            command = [CKPT, "load", nodes[0], "--layout", f"fsdp={n}", "-o", "view=raw,also=" + nodes[1], "--json"]
            done = ranks.ended(ranks.started(n, command))
            self.assertEqual([status for status, _, _ in done], [0] * n, done)
            self.assertEqual(json.loads(done[0][1])["step"], "step-10")


class Faults(Case):
    RUN = os.path.join(GOLDEN, "dcp", "fsdp2_uneven_4r", "run")

    def nodes(self):
        """Rank 0's node has all that is no shard; each node has its own shard."""
        nodes = [self.at("nodes", str(i), "step-10") for i in range(4)]
        files = sorted(os.listdir(self.RUN))
        for i, node in enumerate(nodes):
            os.makedirs(node)
            for file in files:
                if file == f"__{i}_0.distcp" or (i == 0 and not file.endswith(".distcp")):
                    shutil.copy(os.path.join(self.RUN, file), node)
        return nodes

    def test_one_shard_each(self):
        nodes = self.nodes()
        want = digest(self.RUN, ["view=raw"])
        got = digest(nodes[0], ["view=raw"], *nodes[1:])
        self.assertEqual((got.returncode, got.stdout), (0, want.stdout), got.stderr)
        # in another order, with the run's folders instead of the step's
        runs = [os.path.dirname(n) for n in nodes]
        got = digest(runs[2], ["view=raw"], runs[0], runs[3], runs[1])
        self.assertEqual((got.returncode, got.stdout), (0, want.stdout), got.stderr)

    def test_what_lacks_is_told(self):
        nodes = self.nodes()
        os.remove(os.path.join(nodes[2], "__2_0.distcp"))
        done = digest(nodes[0], ["view=raw"], *nodes[1:])
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("__2_0.distcp", done.stderr)
        shutil.rmtree(nodes[2])
        runs = [os.path.dirname(n) for n in nodes]
        done = digest(runs[0], ["view=raw"], *runs[1:])
        self.assertIn(f"step-10 (which '{runs[2]}' has not)", done.stderr)
        done = digest(runs[0], ["view=raw"], self.at("nodes", "9"))
        self.assertIn("cannot open directory", done.stderr)

    def test_copies_must_be_the_same(self):
        nodes = self.nodes()
        shard = "__1_0.distcp"
        shutil.copy(os.path.join(nodes[1], shard), nodes[3])
        self.assertEqual(digest(nodes[0], ["view=raw"], *nodes[1:]).returncode, 0)
        path = os.path.join(nodes[3], shard)
        with open(path, "r+b") as f:
            f.seek(os.path.getsize(path) // 2)
            byte = f.read(1)
            f.seek(-1, 1)
            f.write(bytes([byte[0] ^ 1]))
        done = digest(nodes[0], ["view=raw"], *nodes[1:])
        self.assertNotEqual(done.returncode, 0)
        self.assertIn(f"'{nodes[1]}/{shard}' and '{path}' are not the same file: their bytes differ", done.stderr)
        os.truncate(path, 100)
        self.assertIn("their sizes differ", digest(nodes[0], ["view=raw"], *nodes[1:]).stderr)
        os.remove(path)
        # what no view reads may differ: logs, states of generators
        for i, node in enumerate(nodes):
            with open(os.path.join(node, "rank.log"), "w") as f:
                f.write("log" * (i + 1))
        self.assertEqual(digest(nodes[0], ["view=raw"], *nodes[1:]).returncode, 0)

    def test_verify_compares_wholly(self):
        """A byte of a large copy that no sample sees: verify reads all."""
        nodes = [self.at(str(i)) for i in range(2)]
        source = os.path.join(GOLDEN, "huggingface", "no_index", "run")
        data = bytearray(3 << 20)
        for node in nodes:
            os.makedirs(node)
        header = json.dumps({"w": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
        header += b" " * (-len(header) % 8)
        for i, node in enumerate(nodes):
            data[1234567] = i
            with open(os.path.join(node, "model.safetensors"), "wb") as f:
                f.write(len(header).to_bytes(8, "little") + header + data)
        self.assertTrue(os.path.isdir(source))
        self.assertEqual(digest(nodes[0], ["view=raw"], nodes[1]).returncode, 0)
        done = subprocess.run([CKPT, "verify", nodes[0], nodes[0], "-o", "view=raw", "-o", "also=" + nodes[1]], capture_output=True, text=True)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("are not the same file", done.stderr + done.stdout)

    def test_archives(self):
        """A member may be an archive."""
        nodes = self.nodes()
        subprocess.run(["tar", "-C", nodes[3], "-cf", self.at("three.tar"), "."], check=True)
        got = digest(nodes[0], ["view=raw"], nodes[1], nodes[2], self.at("three.tar"))
        self.assertEqual((got.returncode, got.stdout), (0, digest(self.RUN, ["view=raw"]).stdout), got.stderr)

    def test_saved_again_while_it_is_mounted(self):
        """What was opened is never mixed with what one node saves into the same file afterwards."""
        nodes = self.nodes()
        mnt = self.at("mnt")
        os.makedirs(mnt)
        words = ",".join(["view=raw", *("also=" + n for n in nodes[1:])])
        subprocess.run([os.path.join(os.path.dirname(CKPT), "ckptfs"), nodes[0], mnt, "-o", words], check=True, capture_output=True)
        fd = os.open(os.path.join(mnt, "model.safetensors"), os.O_RDONLY)
        try:
            path = os.path.join(nodes[2], "__2_0.distcp")
            with open(path, "r+b") as f:
                data = f.read()
                f.seek(0)
                f.write(bytes(255 - b for b in data))
            with self.assertRaises(OSError) as e:
                while os.read(fd, 1 << 16):
                    pass
            self.assertEqual(e.exception.errno, errno.ESTALE)
        finally:
            os.close(fd)
            subprocess.run(["fusermount3", "-uz", mnt], check=True)

    def test_mount_follows_saves(self):
        """A step appears when all nodes have it."""
        nodes = self.nodes()
        runs = [os.path.dirname(n) for n in nodes]
        mnt = self.at("mnt")
        os.makedirs(mnt)
        words = ",".join(["view=raw", *("also=" + r for r in runs[1:])])
        subprocess.run([os.path.join(os.path.dirname(CKPT), "ckptfs"), runs[0], mnt, "-o", words], check=True, capture_output=True)
        try:
            self.assertIn("step-10", os.listdir(mnt))
            for i, run in enumerate(runs):
                self.assertNotIn("step-20", os.listdir(mnt))
                shutil.copytree(nodes[i], os.path.join(run, "step-20"))
            subprocess.run([CKPT, "info", mnt], capture_output=True)
            for _ in range(600):
                if "step-20" in os.listdir(mnt):
                    break
                time.sleep(0.1)
            self.assertIn("step-20", os.listdir(mnt))
            with open(os.path.join(mnt, "step-20", "model.safetensors"), "rb") as a, open(os.path.join(mnt, "step-10", "model.safetensors"), "rb") as b:
                self.assertEqual(a.read(), b.read())
        finally:
            subprocess.run(["fusermount3", "-uz", mnt], check=True)


if __name__ == "__main__":
    if not os.access(CKPT, os.X_OK):
        sys.exit(f"{CKPT} is not built")
    unittest.main()
