# SPDX-License-Identifier: Apache-2.0
"""Runs in a bucket: the tool and the mount against a store that recomputes signatures and has bad days (server.py)."""
import hashlib
import json
import os
import pickle
import random
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest

from server import Store

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, "..", "mount"), os.path.join(HERE, "..", "load")]
from mountlib import digests, wait_until  # noqa: E402
from ranks import mpirun  # noqa: E402

SOURCE = os.environ.get("CKPTFS_SOURCE", os.path.join(HERE, "..", ".."))
BUILD = os.environ.get("CKPTFS_BUILD", os.path.join(SOURCE, "build", "release"))
CKPT, CKPTFS = (os.path.join(BUILD, "fs", name) for name in ("ckpt", "ckptfs"))
GOLDEN = os.path.join(SOURCE, "tests", "golden", "nanotron", "llama_tp2_pp2_tied")


def run(store, *args, env=None, timeout=30, **more):
    return subprocess.run([CKPT, *args], env=env or store.env(**more), capture_output=True, text=True, timeout=timeout)


def model_files(seed, megabytes, shards=1):
    """An HF model of made-up tensors as {name: bytes}."""
    rng, files, where = random.Random(seed), {}, {}
    for s in range(shards):
        name = f"model-{s + 1:05d}-of-{shards:05d}.safetensors"
        header, data = {"__metadata__": {"format": "pt"}}, []
        rows = megabytes * 1024
        for k in range(4):
            tensor = f"model.layers.{4 * s + k}.weight"
            header[tensor] = {"dtype": "BF16", "shape": [rows // 4, 512], "data_offsets": [k * rows * 256, (k + 1) * rows * 256]}
            data.append(rng.randbytes(rows * 256))
            where[tensor] = name
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        files[name] = struct.pack("<Q", len(text)) + text + b"".join(data)
    files["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": where}).encode()
    files["config.json"] = json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16"}).encode()
    return files


def fsdp_run(folder, ranks, tensors, rows, columns=512):
    """What torch.distributed.checkpoint writes for FSDP: every rank's file has its rows of every tensor."""
    import torch
    from torch.distributed.checkpoint import metadata as m
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    os.mkdir(folder)
    files = [open(os.path.join(folder, f"__{r}_0.distcp"), "wb") for r in range(ranks)]
    state, storage, n = {}, {}, rows // ranks
    for t in range(tensors):
        name, full = f"layers.{t}.weight", torch.arange(t, t + rows * columns, dtype=torch.int32).view(rows, columns)
        chunks = [m.ChunkStorageMetadata(torch.Size([r * n, 0]), torch.Size([n, columns])) for r in range(ranks)]
        for r in range(ranks):
            at = files[r].tell()
            torch.save(full[r * n:(r + 1) * n].clone(), files[r])
            storage[m.MetadataIndex(name, chunks[r].offsets, r)] = _StorageInfo(f"__{r}_0.distcp", at, files[r].tell() - at)
        state[name] = m.TensorStorageMetadata(m.TensorProperties(dtype=torch.int32), full.size(), chunks)
    for f in files:
        f.close()
    with open(os.path.join(folder, ".metadata"), "wb") as f:
        pickle.dump(m.Metadata(state, {}, storage), f)
    return rows * columns * 4 * tensors


def helpers(p):
    """The processes below a program that make HTTP: keeper and worker."""
    out = subprocess.run(["ps", "-e", "-o", "pid=,ppid=,comm="], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in out.splitlines()]
    keeper = [int(pid) for pid, ppid, comm in rows if int(ppid) == p.pid and comm == "ckptfs-http"]
    return keeper + [int(pid) for pid, ppid, _ in rows if int(ppid) in keeper]


class Case(unittest.TestCase):
    def setUp(self):
        self.tmp = tempfile.mkdtemp(prefix="ckptfs-bucket-")
        self.addCleanup(shutil.rmtree, self.tmp, True)

    def path(self, name):
        return os.path.join(self.tmp, name)

    def expected(self):
        """What an export of the golden run gives."""
        out = self.path("expected")
        if not os.path.exists(out):
            subprocess.run([CKPT, "export", GOLDEN, out, "-q"], check=True, capture_output=True)
        return digests(out)

    def export(self, store, url, *args, **more):
        out = tempfile.mkdtemp(dir=self.tmp)
        os.rmdir(out)
        r = run(store, "export", url, out, "-q", *args, **more)
        self.assertEqual(r.returncode, 0, r.stderr)
        return digests(out)

    def fails(self, r, *words, code=1):
        self.assertEqual(r.returncode, code, r.stderr)
        for w in words:
            self.assertIn(w, r.stderr)
        self.assertNotIn("secret/key", r.stderr)


class Reading(Case):
    def test_names_and_pages(self):
        """Keys with signs that URLs, queries and signatures treat differently, and pages of three."""
        for prefix in ("", "run/", "a=b+c d/é%2F&x;/run~(1)*'!/", "deep/er/and/deeper/"):
            with self.subTest(prefix), Store(page=3) as s:
                s.put_folder("bucket", prefix, GOLDEN)
                s.put("bucket", prefix + "10/", b"")  # what consoles make for a folder
                if prefix:
                    s.put("bucket", prefix, b"")
                url = "s3://bucket" + ("/" + prefix if prefix else "")
                self.assertEqual(self.export(s, url), self.expected())
                self.assertEqual(self.export(s, url.rstrip("/") + "/10"), self.expected())

    def test_odd_file_names(self):
        files = model_files(1, 1)
        with Store() as s:
            for name, data in files.items():
                s.put("b", "m/" + name, data)
            for name in ("merges=1.txt", "to ken.json", "ü+%25.txt", "a&b<c>\"'.txt"):
                s.put("b", "m/" + name, name.encode())
            r = run(s, "ls", "s3://b/m", "--files")
            self.assertEqual(r.returncode, 0, r.stderr)
            got = self.export(s, "s3://b/m")
            self.assertEqual(got["config.json"], hashlib.sha256(files["config.json"]).hexdigest())

    def test_folders_of_a_model(self):
        """Its modules and chat templates are shown; folders of other models are not."""
        files = dict(model_files(1, 1), **{"config.json": b'{"model_type": "unknown"}'})
        more = {"modules.json": b"[]", "1_Pooling/config.json": b"{}", "additional_chat_templates/rag.jinja": b"{{ documents }}"}
        with Store() as s:
            for name, data in (files | more | {f"checkpoint-5/{name}": data for name, data in files.items()}).items():
                s.put("b", "m/" + name, data)
            want = {name: hashlib.sha256(data).hexdigest() for name, data in (files | more).items()}
            got = self.export(s, "s3://b/m")
            self.assertEqual(sorted(got), sorted(want))
            self.assertEqual({name: got[name] for name in more}, {name: want[name] for name in more})

    def test_large_object(self):
        files = model_files(2, 100)
        with Store(latency=0.02) as s:
            for name, data in files.items():
                s.put("b", "m/" + name, data)
            os.mkdir(self.path("m"))
            for name, data in files.items():
                with open(os.path.join(self.path("m"), name), "wb") as f:
                    f.write(data)
            subprocess.run([CKPT, "export", self.path("m"), self.path("local"), "-q"], check=True, capture_output=True)
            self.assertEqual(self.export(s, "s3://b/m"), digests(self.path("local")))
            size = sum(map(len, files.values()))
            self.assertLess(s.served, size * 1.05 + (1 << 20))  # nothing is fetched twice
            self.assertGreater(s.most_open, 4)  # several connections at once
            self.assertLess(s.connections, 40)  # which are kept

    def test_a_file_of_many_objects(self):
        """Its bytes are fetched ahead along the file, whatever object they are in. Headers of two items say where the data of all of them are."""
        ranks, tensors = 48, 6
        for rows in (48 * 40, 48 * 160):
            with self.subTest(rows), Store(latency=0.05) as s:
                size = fsdp_run(self.path(f"m{rows}"), ranks, tensors, rows)
                local = self.path(f"local{rows}")
                subprocess.run([CKPT, "export", self.path(f"m{rows}"), local, "-q", "-o", "view=raw"], check=True, capture_output=True)
                s.put_folder("b", "m/", self.path(f"m{rows}"))
                self.assertEqual(run(s, "info", "s3://b/m", "-o", "view=raw,cache=no").returncode, 0)
                opening, s.most_waiting = len(s.requests("get")), 0
                self.assertLess(opening, 12)
                s.log.clear()
                s.served = 0
                self.assertEqual(self.export(s, "s3://b/m", "-o", "view=raw,cache=no"), digests(local))
                self.assertGreater(s.most_waiting, 12)
                self.assertLess(len(s.requests("get")), opening + ranks * (tensors + 1))
                self.assertLess(s.served, size * 1.1 + opening * 64 * 1024)

    def test_many_small_files(self):
        """What comes next is in the next file."""
        os.mkdir(self.path("m"))
        for name, data in model_files(3, 2, shards=24).items():
            with open(os.path.join(self.path("m"), name), "wb") as f:
                f.write(data)
        subprocess.run([CKPT, "export", self.path("m"), self.path("local"), "-q"], check=True, capture_output=True)
        with Store(latency=0.05) as s:
            s.put_folder("b", "m/", self.path("m"))
            self.assertEqual(self.export(s, "s3://b/m"), digests(self.path("local")))
            self.assertGreater(s.most_waiting, 8)
            self.assertLess(s.served, 24 * (2 << 20) * 1.05 + (1 << 20))

    def test_helpers_cannot_be_dumped(self):
        """Nor traced, by whom they belong to: /proc/PID is root's then."""
        who = {} if os.getuid() else {"user": 65534, "group": 65534}
        with Store(latency=1) as s:
            s.put_folder("b", "run/", GOLDEN)
            p = subprocess.Popen([CKPT, "info", "s3://b/run"], env=s.env(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **who)
            until = time.monotonic() + 20
            while len(helpers(p)) < 2:
                self.assertLess(time.monotonic(), until)
                time.sleep(0.05)
            time.sleep(0.2)
            pids = [p.pid, *helpers(p)]
            look = [subprocess.run(["cat", f"/proc/{pid}/environ"], capture_output=True, **who).returncode for pid in pids]
            owners = [os.stat(f"/proc/{pid}/mem").st_uid for pid in pids]
            p.kill()
            p.wait()
            self.assertEqual(look, [0, 1, 1])
            self.assertEqual(owners, [os.getuid() or 65534, 0, 0])

    def test_one_object(self):
        with Store() as s:
            s.put("b", "m/run.tar", b"x" * 5000)
            s.put("b", "m/run.tart/config.json", b"{}")
            self.fails(run(s, "info", "s3://b/m/run.tar"), "s3://b/m/run.tar", "is an object, not a folder", "copy it")
            self.fails(run(s, "info", "s3://b/m/run.t"), "no object whose key begins with 'm/run.t/'")

    def test_nothing_there(self):
        with Store() as s:
            s.put("b", "other/x", b"1")
            self.fails(run(s, "info", "s3://b/run"), "'s3://b/run'", "no object whose key begins with 'run/'")
            self.fails(run(s, "info", "s3://none/run"), "s3://none/run/", "404 NoSuchBucket", "does not exist")
            self.fails(run(s, "info", "s3://b/other"), "neither a checkpoint")
            self.fails(run(s, "info", "s3:///x"), "expected s3://BUCKET", code=2)
            self.fails(run(s, "info", "s3://b/x//y"), "no empty part", code=2)
            self.fails(run(s, "info", "s3://b/x/../y"), "'..'", code=2)

    def test_names_that_no_file_has(self):
        for key in ("run//x", "run/./b", "run/10//x"):
            with self.subTest(key), Store() as s:
                s.put_folder("b", "run/", GOLDEN)
                s.put("b", key, b"1")
                self.fails(run(s, "info", "s3://b/run"), f"'s3://b/{key[:-1]}", "no file can have this name")
        for key in ("run/logs//x", "run/a/../b", "run/a/./c"):  # a folder beside the steps
            with self.subTest(key), Store() as s:
                s.put_folder("b", "run/", GOLDEN)
                s.put("b", key, b"1")
                self.assertEqual(self.export(s, "s3://b/run"), self.expected())
        with Store() as s:
            s.put_folder("b", "run/", GOLDEN)
            s.put("b", "run/10", b"1")
            self.fails(run(s, "info", "s3://b/run"), "'s3://b/run/10' is an object, and other objects are below it")
        with Store() as s:
            s.put_folder("b", "run/", GOLDEN)
            s.put("b", "run/10", b"")  # an older kind of marker
            self.assertEqual(self.export(s, "s3://b/run"), self.expected())

    def test_many_steps(self):
        """Where there are many folders, all are listed at once."""
        with Store() as s:
            for step in range(10, 400, 10):
                s.put_folder("b", f"run/{step}/", os.path.join(GOLDEN, "10"))
            s.put("b", "run/latest.txt", b"390")
            r = run(s, "info", "s3://b/run", "--json")
            self.assertEqual(len(json.loads(r.stdout)["steps"]) if r.returncode == 0 else r.stderr, 39)
            self.assertLess(len(s.requests("list")), 20)

    def test_steps_with_a_folder_for_runs(self):
        """NeMo-RL with Megatron: what lies three folders down in each step costs no more than what lies in the step itself."""
        iteration = os.path.join(SOURCE, "tests", "golden", "megatron", "m19_llama_tp2pp2", "run", "iter_0000010")
        asked = []
        for place in ("", "policy/weights/iter_0000000/"):
            with Store() as s:
                for step in range(10, 400, 10):
                    s.put_folder("b", f"run/step_{step}/{place}", iteration)
                r = run(s, "info", "s3://b/run", "--json")
                self.assertEqual(len(json.loads(r.stdout)["steps"]) if r.returncode == 0 else r.stderr, 39)
                asked.append((len(s.requests("list")), len(s.requests("get"))))
        self.assertEqual(asked[0], asked[1])
        self.assertLess(asked[0][0], 20)

    def test_info_tells_of_the_store(self):
        with Store() as s:
            s.put_folder("b", "run/", GOLDEN)
            r = run(s, "info", "-v", "s3://b/run")
            for w in (s.url, "us-east-1", "environment"):
                self.assertIn(w, r.stdout)
            b = json.loads(run(s, "info", "--json", "s3://b/run").stdout)["bucket"]
            self.assertGreater(b["requests"], 40)
            self.assertEqual(b["retries"], 0)

    def test_four_round_trips_before_the_first_byte(self):
        """The list, the index, all headers and the config at once, data: headers come while there is no answer for the config."""
        with Store() as s:
            for name, data in model_files(3, 1, shards=4).items():
                s.put("b", "m/" + name, data)
            s.rule("stall", key="config.json")
            p = subprocess.Popen([CKPT, "info", "s3://b/m", "-o", "cache=no"], env=s.env(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                wait_until(lambda: len(s.requests("get")) == 6, "headers")
                self.assertEqual(len(s.requests("list")), 1)
                self.assertTrue(s.requests("get")[0][2].endswith(".index.json"))
            finally:
                p.kill()
                p.wait()

    def test_a_run_in_two_prefixes(self):
        """The option also=: files in either prefix, one in both; a bucket and a directory do not mix."""
        source = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "golden", "dcp", "fsdp2_uneven_4r", "run")
        with Store() as s:
            for i, name in enumerate(sorted(os.listdir(source))):
                with open(os.path.join(source, name), "rb") as f:
                    data = f.read()
                for prefix in ("one", "two") if name == "__1_0.distcp" else (("one", "two")[i % 2],):
                    s.put("b", f"{prefix}/{name}", data)
            got = run(s, "digest", "-q", "s3://b/one", "-o", "view=raw", "-o", "also=s3://b/two")
            self.assertEqual((got.returncode, got.stdout), (0, run(s, "digest", "-q", source, "-o", "view=raw").stdout), got.stderr)
            self.assertIn("either in buckets or in directories", run(s, "digest", "s3://b/one", "-o", "view=raw", "-o", "also=" + source).stderr)

    def test_headers_are_one_request_each(self):
        """64 KiB of the right end, many at once: one after the other they would take 20 s."""
        with Store(latency=0.1) as s:
            for name, data in model_files(3, 1, shards=200).items():
                s.put("b", "m/" + name, data)
            begin = time.monotonic()
            r = run(s, "info", "s3://b/m")
            self.assertEqual(r.returncode, 0, r.stderr)
            self.assertLess(len(s.requests("get")), 210)
            self.assertLess(len(s.requests("list")), 6)
            self.assertLess(time.monotonic() - begin, 15)

    def test_an_export_has_small_parts_at_both_ends(self):
        """The first come soon, the last keep all connections busy; in between they are large, and none is a small rest."""
        with Store() as s:
            for name, data in model_files(8, 64).items():
                s.put("b", "m/" + name, data)
            self.export(s, "s3://b/m", "-o", "cache=no")
            parts = sorted(tuple(int(x) for x in x[3][6:].split("-")) for x in s.requests("get") if x[2].endswith(".safetensors"))[1:]
        sizes = [b + 1 - a for a, b in parts]
        self.assertEqual(sum(sizes), parts[-1][1] + 1 - parts[0][0])  # each byte once
        self.assertLessEqual(max(sizes[:3]), 1 << 20)
        self.assertTrue(8 << 20 <= max(sizes) < 9 << 20)
        self.assertLess(max(b + 1 - a for a, b in parts if a >= 56 << 20), 3 << 20)
        self.assertGreaterEqual(min(sizes), 256 << 10)

    def test_cache(self):
        """Headers are kept in files, by ETag; damaged files are not used."""
        files = model_files(3, 1, shards=20)
        cache = self.path("cache")
        with Store() as s:
            for name, data in files.items():
                s.put("b", "m/" + name, data)

            def gets(*more):
                s.log.clear()
                r = run(s, "info", "s3://b/m", *more)
                self.assertEqual(r.returncode, 0, r.stderr)
                return len(s.requests("get"))
            self.assertGreaterEqual(gets("-o", "cache=" + cache), 20)
            self.assertEqual(gets("-o", "cache=" + cache), 0)
            self.assertGreaterEqual(gets("-o", "cache=no"), 20)
            self.assertEqual(gets("-o", "cache=" + cache), 0)
            name = "model-00003-of-00020.safetensors"
            s.put("b", "m/" + name, model_files(4, 1, shards=20)[name])
            self.assertEqual(gets("-o", "cache=" + cache), 1)
            for i, name in enumerate(sorted(os.listdir(cache))):
                with open(os.path.join(cache, name), "r+b") as f:
                    if i % 2:
                        f.truncate(1000)
                    else:
                        f.seek(200)
                        f.write(b"damage")
            self.assertGreaterEqual(gets("-o", "cache=" + cache), 20)
            self.assertEqual({oct(stat.S_IMODE(os.stat(os.path.join(cache, n)).st_mode)) for n in os.listdir(cache)}, {"0o600"})
            self.fails(run(s, "info", "s3://b/m", "-o", "cache=/proc/none"), "option cache")
            home = self.path("home")
            os.mkdir(home)
            for expected in (20, 0):
                s.log.clear()
                self.assertEqual(run(s, "info", "s3://b/m", HOME=home).returncode, 0)
                self.assertGreaterEqual(len(s.requests("get")), expected)
            self.assertEqual(len(s.requests("get")), 0)
            self.assertEqual(os.listdir(os.path.join(home, ".cache")), ["ckptfs"])

    def test_base(self):
        files = model_files(1, 1)
        with Store() as s:
            s.put_folder("b", "run/", GOLDEN)
            for name, data in files.items():
                s.put("b", "base/" + name, data)
            s.put("b", "base/tokenizer.json", b'{"version": "1.0"}')
            r = run(s, "ls", "--files", GOLDEN, "-o", "base=s3://b/base")
            self.assertEqual(r.returncode, 0, r.stderr)
            self.assertIn("tokenizer.json", r.stdout)
            self.fails(run(s, "info", GOLDEN, "-o", "base=s3://b/nothing"), "s3://b/nothing")

    def test_anonymous(self):
        with Store(anonymous=True) as s:
            s.put_folder("b", "run/", GOLDEN)
            env = s.env(AWS_ACCESS_KEY_ID=None, AWS_SECRET_ACCESS_KEY=None)
            self.fails(run(s, "info", "s3://b/run", env=env), "no credentials", "-o anonymous", code=2)
            for args, more in ((["-o", "anonymous"], {}), ([], {"AWS_NO_SIGN_REQUEST": "true"})):
                r = run(s, "info", "s3://b/run", *args, env={**env, **more})
                self.assertEqual(r.returncode, 0, r.stderr)
            self.assertFalse([1 for x in s.log if "authorization" in x[4]])

    def test_without_helper(self):
        with Store() as s:
            s.put_folder("b", "run/", GOLDEN)
            self.fails(run(s, "info", "s3://b/run", CKPTFS_HTTP="/nonexistent/ckptfs-http"), "/nonexistent/ckptfs-http")


class Faults(Case):
    """What each fault is answered with; see the table in contrib/docs/buckets.md."""

    def setUp(self):
        super().setUp()
        self.store = self.enterContext(Store())
        self.store.put_folder("b", "run/", GOLDEN)

    def test_passing(self):
        """Faults that pass: the export is right, and some requests were repeated."""
        for rule in (dict(act="status", status=503), dict(act="status", status=500, code="InternalError"),
                     dict(act="status", status=429, code="TooManyRequests"), dict(act="status", status=408, code="RequestTimeout"),
                     dict(act="status", status=400, code="RequestTimeout"), dict(act="drop"), dict(act="truncate"),
                     dict(act="truncate", after=1), dict(act="less")):
            for kind in ("get", "list") if rule["act"] in ("status", "drop") else ("get",):
                with self.subTest(rule=rule, kind=kind):
                    self.store.rules.clear()
                    # a server that has never answered is given up soon
                    r = self.store.rule(kind=kind, times=2 if kind == "list" else 12, key="" if kind == "list" else "model_weight", **rule)
                    self.assertEqual(self.export(self.store, "s3://b/run"), self.expected())
                    self.assertEqual(r.times, 0)

    def test_storm(self):
        """Half of all requests fail for a while; not more than 50 a second are repeated."""
        for k in range(12):
            self.store.put_folder("b", f"run/{k + 20}/", os.path.join(GOLDEN, "10"))
        rule = self.store.rule("status", kind="any", times=None)

        def end():
            rule.times = 0
        threading.Timer(3, end).start()
        rule.key = ".safetensors"
        begin = time.monotonic()
        self.assertEqual(self.export(self.store, "s3://b/run/10"), self.expected())
        self.assertGreater(time.monotonic() - begin, 2.9)
        self.assertLess(rule.hits, 50 * 3 + 100)

    def test_time_starts_with_the_request(self):
        """A request that has waited for its turn for longer than the timeout is repeated, too."""
        files = model_files(8, 64)
        with Store(latency=0.5) as s:
            for k, v in files.items():
                s.put("b", "m/" + k, v)

            def large():
                return [x for x in s.requests("get") if int(x[3].split("-")[1]) - int(x[3][6:].split("-")[0]) > 2 << 20]

            def spoil():
                while len(large()) < 6:
                    time.sleep(0.02)
                s.rule("status", key=".safetensors", times=2)
            threading.Thread(target=spoil, daemon=True).start()
            got = self.export(s, "s3://b/m", "-o", "connections=1,timeout=2,cache=no")
            self.assertEqual(len(got), 3)
            self.assertEqual(s.rules[0].times, 0)

    def test_stall(self):
        for after in (0, 100):
            with self.subTest(after=after):
                self.store.rule("stall", key="qkv_proj", times=2, after=after)
                self.assertEqual(self.export(self.store, "s3://b/run", "-o", "timeout=12"), self.expected())

    def test_lasting(self):
        """Faults that do not pass: an error that names object, range and the server's words."""
        for rule, words in (
                (dict(act="status", status=503), ("bytes 0 to", "503 SlowDown: as the test wants", "attempts in")),
                (dict(act="status", status=403, code="AccessDenied"), ("bytes 0 to", "403 AccessDenied")),
                (dict(act="status", status=412, code="PreconditionFailed"), ("was replaced since",)),
                (dict(act="status", status=404, code="NoSuchKey"), ("was removed since",)),
                (dict(act="drop"), ("bytes 0 to", "attempts in")),
                (dict(act="wrong_range"), ("expected 'bytes",)),
                (dict(act="truncate", after=1), ("bytes 0 to",))):
            with self.subTest(rule=rule):
                self.store.rules.clear()
                self.store.rule(key="qkv_proj", times=None, **rule)
                begin = time.monotonic()
                r = run(self.store, "export", "s3://b/run", self.path("out"), "-q", "-o", "timeout=3")
                self.fails(r, "s3://b/run/10/model/model/", "qkv_proj", *words)
                self.assertLess(time.monotonic() - begin, 30)

    def test_first_connections(self):
        """A server that resets its first connections."""
        rule = self.store.rule("drop", kind="any", times=5)
        self.assertEqual(self.export(self.store, "s3://b/run"), self.expected())
        self.assertEqual(rule.times, 0)

    def test_lasting_faults_of_a_run(self):
        """The tool looks for an older step that can be read, but not for long."""
        for step in (20, 30, 40):
            self.store.put_folder("b", f"run/{step}/", os.path.join(GOLDEN, "10"))
        self.store.rule("status", key="0/", times=None)
        begin = time.monotonic()
        self.fails(run(self.store, "info", "s3://b/run", "-o", "timeout=5", "-o", "cache=no"), "503 SlowDown")
        self.assertLess(time.monotonic() - begin, 12)

    def test_bad_lists(self):
        self.store.rule("garbage", kind="list", times=None)
        self.fails(run(self.store, "info", "s3://b/run"), "ListObjectsV2", "s3://b/run/")

    def test_more_bytes_than_asked(self):
        self.store.rule("more", key="qkv_proj", times=1)
        self.assertIn(run(self.store, "info", "s3://b/run").returncode, (0, 1))

    def test_no_server(self):
        env = self.store.env(AWS_ENDPOINT_URL="http://127.0.0.1:9")
        begin = time.monotonic()
        self.fails(run(self.store, "info", "s3://b/run", env=env), "s3://b/run/", "connect")
        self.assertLess(time.monotonic() - begin, 10)
        for url, words in (("ftp://x", "not http"), ("http://u:p@x", "password")):
            r = run(self.store, "info", "s3://b/run", env=self.store.env(AWS_ENDPOINT_URL=url))
            self.fails(r, words, code=2)

    def test_names_of_hosts(self):
        """They are looked up in the sandbox of what makes the HTTP."""
        url = self.store.url.replace("127.0.0.1", "localhost")
        self.assertEqual(digests(self.done(self.store.env(AWS_ENDPOINT_URL=url))), self.expected())
        env = self.store.env(AWS_ENDPOINT_URL="http://nowhere.invalid")
        self.fails(run(self.store, "info", "s3://b/run", env=env), "resolve", "nowhere.invalid")

    def test_region(self):
        self.store.region = "eu-central-7"
        for region in ("eu-central-7", "us-west-2", None):
            env = self.store.env(AWS_REGION=region)
            self.assertEqual(digests(self.done(env)), self.expected())
        self.store.region = "r" * 63
        self.assertEqual(digests(self.done(self.store.env(AWS_REGION="r" * 63))), self.expected())
        self.fails(run(self.store, "info", "s3://b/run", AWS_REGION="r" * 64), "AWS_REGION (region) is longer than 63 bytes", code=2)

    def done(self, env):
        out = self.path(f"out{random.random()}")
        r = subprocess.run([CKPT, "export", "s3://b/run", out, "-q"], env=env, capture_output=True, text=True)
        self.assertEqual(r.returncode, 0, r.stderr)
        return out

    def test_region_of_the_header(self):
        rule = self.store.rule("status", kind="any", status=301, code="PermanentRedirect", times=1,
                               headers=[("x-amz-bucket-region", "ap-south-9")])
        self.store.region = "ap-south-9"
        self.assertEqual(digests(self.done(self.store.env(AWS_REGION="us-east-1"))), self.expected())
        self.assertEqual(rule.times, 0)

    def test_wrong_key(self):
        self.fails(run(self.store, "info", "s3://b/run", AWS_SECRET_ACCESS_KEY="wrong"), "403 SignatureDoesNotMatch")
        self.fails(run(self.store, "info", "s3://b/run", AWS_ACCESS_KEY_ID="nobody"), "403 InvalidAccessKeyId")


class Loads(Case):
    def setUp(self):
        super().setUp()
        self.store = self.enterContext(Store())
        self.files = model_files(7, 16, shards=2)
        for name, data in self.files.items():
            self.store.put("b", "m/" + name, data)
        self.size = sum(len(v) for k, v in self.files.items() if k.endswith(".safetensors"))

    def load(self, *args):
        self.store.served = 0
        self.store.log.clear()
        r = mpirun(4, [CKPT, "load", "s3://b/m", "--layout", "dp=2,fsdp=2", "--json", "-o", "cache=no", *args], base=self.store.env())
        self.assertEqual(r.returncode, 0, r.stderr)
        return json.loads(r.stdout.splitlines()[-1])

    def test_once(self):
        """Each byte leaves the bucket once per job, and rank 0 alone lists and reads headers."""
        told = self.load("--readers=once")
        self.assertEqual(told["read_bytes"], told["unique_bytes"])
        self.assertLess(self.store.served, self.size + 3 * 65536 + 10000)
        self.assertLess(len(self.store.requests("list")), 6)
        self.assertGreater(told["bucket"]["requests"], 2)
        self.load("--readers=once", "--verify")

    def test_each(self):
        """Every rank for itself: still not a byte more than planned."""
        told = self.load("--readers=each")
        self.assertLess(self.store.served, told["read_bytes"] + 3 * 65536 + 10000)
        self.load("--readers=each", "--verify")

    def test_failure(self):
        name = "model-00002-of-00002.safetensors"
        self.store.put("b", "cache/x", b"")
        args = ["s3://b/m", "-o", "cache=" + self.path("cache")]
        self.assertEqual(run(self.store, "info", *args).returncode, 0)  # its header is known now
        self.store.rule("status", status=403, code="AccessDenied", times=None, key=name)
        r = run(self.store, "load", *args, "--layout", "fsdp=1", PATH=os.environ["PATH"])
        self.fails(r, "s3://b/m/" + name, "403 AccessDenied")


PROGRAM = """
import os, sys, ckptfs
url, local = sys.argv[1:]
a, b = (ckptfs.View(x, framework="np", dtype="float32") for x in (url, local))
bits = lambda x: x.tobytes()
same = lambda: all(bits(a.get_tensor(k)) == bits(b.get_tensor(k)) for k in b.keys())
assert sorted(a.keys()) == sorted(b.keys()) and len(list(b.keys())) == 38 and same()
child = os.fork()
if child == 0:
    os._exit(0 if same() else 1)
assert os.waitpid(child, 0)[1] == 0
assert same() and a.info()["bucket"]["requests"] > 0
try:
    ckptfs.View(url + "-not")
    sys.exit("no error")
except ckptfs.NotFoundError as e:
    assert url + "-not" in str(e)
"""


READ = """
import sys, ckptfs
f = ckptfs.open(sys.argv[1], view="raw", cache="no", framework="np")
for name in sys.argv[2:]:
    f.get_tensor(name)
print("read", flush=True)
sys.stdin.read()
"""


def is_asked_for(store, metadata, name):
    """Is each item of the tensor within what was asked for?"""
    got = [(x[2].split("/")[-1], *(int(n) for n in x[3][6:].split("-"))) for x in store.requests("get")]
    items = [i for index, i in metadata.storage_data.items() if index.fqn == name]
    ends = [(i.relative_path, at) for i in items for at in (i.offset, i.offset + i.length - 1)]
    return all(any(path == key and first <= at <= last for key, first, last in got) for path, at in ends)


class Python(Case):
    def test_tensor_by_tensor(self):
        """What comes next is fetched ahead for who reads tensors in the order of the state dict, and for who reads them in that of the file."""
        run_dir = self.path("m")
        fsdp_run(run_dir, 4, 60, 1024)
        with open(os.path.join(run_dir, ".metadata"), "rb") as f:
            metadata = pickle.load(f)
        for numbers in ([0, 1, 2, 3, 4, 5], [0, 1, 10, 11, 12, 13]):
            with self.subTest(numbers), Store() as s:
                s.put_folder("b", "m/", run_dir)
                env = s.env(PYTHONPATH=os.path.join(SOURCE, "contrib", "python"), CKPTFS_LIBRARY_PATH=BUILD)
                names = [f"layers.{n}.weight" for n in numbers]
                with subprocess.Popen([sys.executable, "-c", READ, "s3://b/m", *names[:4]], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as p:
                    self.assertEqual(p.stdout.readline(), b"read\n")
                    wait_until(lambda: all(is_asked_for(s, metadata, n) for n in names), "the next tensors")
                    p.stdin.close()

    def test_view(self):
        """Also in a process that is forked."""
        with Store() as s:
            s.put_folder("b", "run/", GOLDEN)
            env = s.env(PYTHONPATH=os.path.join(SOURCE, "contrib", "python"), CKPTFS_LIBRARY_PATH=BUILD)
            r = subprocess.run([sys.executable, "-c", PROGRAM, "s3://b/run", GOLDEN], env=env, capture_output=True, text=True, timeout=120)
            self.assertEqual(r.returncode, 0, r.stderr)


class Mounted(Case):
    def setUp(self):
        super().setUp()
        if not shutil.which("fusermount3") or not os.access("/dev/fuse", os.R_OK | os.W_OK):
            self.fail("these tests need FUSE")
        self.mnt = self.path("mnt")
        os.mkdir(self.mnt)

    def mount(self, store, url, *args, **more):
        log = open(self.path("log"), "w+")
        self.addCleanup(log.close)
        p = subprocess.Popen([CKPTFS, "-f", *args, url, self.mnt], env=store.env(**more), stdout=log, stderr=log)

        def end():
            p.terminate()
            self.assertEqual(p.wait(30), 0)
        self.addCleanup(end)
        until = time.monotonic() + 20
        while not os.path.ismount(self.mnt):
            self.assertIsNone(p.poll(), open(self.path("log")).read())
            self.assertLess(time.monotonic(), until)
            time.sleep(0.05)
        return p

    def test_reads_in_the_sandbox(self):
        with Store() as s:
            s.put_folder("b", "run/", GOLDEN)
            p = self.mount(s, "s3://b/run")
            self.assertEqual(digests(os.path.join(self.mnt, "10")), self.expected())
            with open(os.path.join(self.mnt, ".ckptfs", "stats.json")) as f:
                stats = json.load(f)
            if os.path.exists("/sys/kernel/security/landlock") or "landlock" in stats["settings"]["sandbox"]:
                self.assertIn("landlock", stats["settings"]["sandbox"])
            self.assertGreater(stats["bucket"]["requests"], 40)
            self.assertEqual(stats["bucket"]["endpoint"], s.url)
            keeper, worker = helpers(p)
            for pid in (keeper, worker):
                with open(f"/proc/{pid}/limits") as f:
                    self.assertRegex(f.read(), r"Max core file size +0 +0 ")
            with open(f"/proc/{worker}/status") as f:
                status = f.read()
            self.assertRegex(status, r"NoNewPrivs:\s1")
            self.assertRegex(status, r"Seccomp:\s2")
            self.assertRegex(status, r"CapEff:\s0+\n")
            text = open(self.path("log")).read() + json.dumps(stats)
            self.assertNotIn("secret/key", text)

    def test_a_copy_of_many_files(self):
        """cp reads files in the order of their inodes, which is that of the parts: what comes next is fetched ahead, and nothing twice."""
        n, size = 40, 2 << 20
        files = model_files(5, size >> 20, shards=n)
        with Store(latency=0.02) as s:
            for k, v in files.items():
                s.put("b", "m/" + k, v)
            self.mount(s, "s3://b/m", "-o", "cache=no")
            s.log.clear()
            s.served = 0
            subprocess.run(["cp", "-r", self.mnt + "/.", self.path("copy")], check=True)
            for k, v in files.items():
                if k.endswith(".safetensors"):
                    with open(os.path.join(self.path("copy"), k), "rb") as f:
                        self.assertEqual(f.read()[-size:], v[-size:], k)
            self.assertLess(len(s.requests("get")), 4 * n)
            self.assertLess(s.served, 1.1 * n * size)

    def test_worker_that_is_killed(self):
        """Another one takes its place, and asks again for what was on its way; not when the keeper is killed."""
        files = model_files(6, 64)
        name = "model-00001-of-00001.safetensors"
        with Store(latency=0.25) as s:
            for k, v in files.items():
                s.put("b", "m/" + k, v)
            p = self.mount(s, "s3://b/m", "-o", "cache=no,connections=2")
            killed = []

            def kill():
                for _ in range(5):
                    time.sleep(0.2)
                    killed.extend(helpers(p)[1:])
                    os.kill(killed[-1], signal.SIGKILL)
            before, killer = len(s.log), threading.Thread(target=kill)
            killer.start()
            with open(os.path.join(self.mnt, name), "rb") as f:
                got = f.read()
            killer.join()
            self.assertEqual(hashlib.sha256(got[-60 << 20:]).hexdigest(), hashlib.sha256(files[name][-60 << 20:]).hexdigest())
            self.assertEqual(len(set(killed)), 5)
            self.assertGreater(len(s.log), before + 8 + 3)  # some parts were asked for twice
            os.kill(helpers(p)[0], signal.SIGKILL)
            until = time.monotonic() + 20
            with self.assertRaises(OSError), open(os.path.join(self.mnt, name), "rb", buffering=0) as f:
                while time.monotonic() < until:  # what is held may be read until the end is noticed
                    os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    f.seek(0)
                    while f.read(1 << 20):
                        pass
            with open(self.path("log")) as f:
                self.assertIn("ckptfs-http) has ended", f.read())

    def test_replaced_object(self):
        """Never mixed bytes: ESTALE, and the message names the object."""
        files = model_files(4, 64)
        name = "model-00001-of-00001.safetensors"
        with Store() as s:
            for k, v in files.items():
                s.put("b", "m/" + k, v)
            self.mount(s, "s3://b/m")
            path = os.path.join(self.mnt, name)
            with open(path, "rb", buffering=0) as f:
                head = f.read(4096)
                s.put("b", "m/" + name, model_files(5, 64)[name])
                with self.assertRaises(OSError) as e:
                    os.pread(f.fileno(), 4096, 40 << 20)
                self.assertIn(e.exception.errno, (5, 116))
            self.assertTrue(head)
            with open(self.path("log")) as f:
                self.assertRegex(f.read(), "m/" + name + ".*replaced since")

    def test_new_step_and_removed_object(self):
        with Store() as s:
            s.put_folder("b", "run/10/", os.path.join(GOLDEN, "10"))
            s.put("b", "run/latest.txt", b"10")
            self.mount(s, "s3://b/run")
            s.put_folder("b", "run/20/", os.path.join(GOLDEN, "10"))
            s.put("b", "run/latest.txt", b"20")
            until = time.monotonic() + 40
            while not os.path.isdir(os.path.join(self.mnt, "20")):
                self.assertLess(time.monotonic(), until)
                time.sleep(0.5)
            self.assertEqual(digests(os.path.join(self.mnt, "20")), self.expected())
            self.assertEqual(os.readlink(os.path.join(self.mnt, "latest")), "20")

    def test_helper_ends_before_what_it_ran(self):
        """credential_process leaves an agent behind: that has nothing of the helper, whose end is noticed."""
        with Store() as s:
            for k, v in model_files(6, 64).items():
                s.put("b", "m/" + k, v)
            os.mkdir(self.path(".aws"))
            with open(self.path("creds.json"), "w") as f:
                json.dump({"Version": 1, "AccessKeyId": "AKIDEXAMPLE", "SecretAccessKey": s.keys["AKIDEXAMPLE"][0]}, f)
            with open(self.path(".aws/config"), "w") as f:
                f.write(f"[default]\ncredential_process = sleep 50 >/dev/null 2>&1 & echo $! >{self.path('pid')}; cat {self.path('creds.json')}\n")
            p = self.mount(s, "s3://b/m", "-o", "cache=no", AWS_ACCESS_KEY_ID=None, AWS_SECRET_ACCESS_KEY=None, HOME=self.tmp)
            with open(self.path("pid")) as f:
                agent = int(f.read())
            self.addCleanup(os.kill, agent, signal.SIGKILL)
            self.assertFalse([x for x in os.listdir(f"/proc/{agent}/fd") if int(x) > 2])
            s.latency = 3600  # what is asked for now has no answer
            said = []

            def read():
                try:
                    with open(os.path.join(self.mnt, "model-00001-of-00001.safetensors"), "rb") as f:
                        f.read()
                except OSError as e:
                    said.append(e)
            reader = threading.Thread(target=read)
            reader.start()
            time.sleep(0.5)
            for pid in helpers(p):
                os.kill(pid, signal.SIGKILL)
            reader.join(20)
            self.assertFalse(reader.is_alive())
            self.assertTrue(said)

    def test_token_expires_while_mounted(self):
        """The profile's process gives new credentials when the store says that the old ones have expired."""
        files = model_files(6, 64)
        with Store() as s:
            s.keys = {"ID1": ("one", "token1")}
            for k, v in files.items():
                s.put("b", "m/" + k, v)
            os.mkdir(self.path(".aws"))
            with open(self.path("creds.json"), "w") as f:
                json.dump({"Version": 1, "AccessKeyId": "ID1", "SecretAccessKey": "one", "SessionToken": "token1"}, f)
            with open(self.path(".aws/config"), "w") as f:
                f.write(f"[default]\nregion = us-east-1\ncredential_process = cat {self.path('creds.json')}\n")
            self.mount(s, "s3://b/m", AWS_ACCESS_KEY_ID=None, AWS_SECRET_ACCESS_KEY=None, AWS_SESSION_TOKEN=None, HOME=self.tmp)
            with open(os.path.join(self.mnt, "model-00001-of-00001.safetensors"), "rb", buffering=0) as f:
                f.read(4096)
                with open(self.path("creds.json"), "w") as g:
                    json.dump({"Version": 1, "AccessKeyId": "ID2", "SecretAccessKey": "two", "SessionToken": "token2"}, g)
                s.keys = {"ID1": ("one", "token1"), "ID2": ("two", "token2")}
                s.expired = {"token1"}
                self.assertEqual(len(os.pread(f.fileno(), 1 << 20, 40 << 20)), 1 << 20)
            self.assertEqual({x[4]["x-amz-security-token"] for x in s.log}, {"token1", "token2"})


def sts_answer(action, name, secret, token):
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 3600))
    return (f'<{action}Response xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><{action}Result><Credentials><AccessKeyId>{name}'
            f"</AccessKeyId><SecretAccessKey>{secret}</SecretAccessKey><SessionToken>{token}</SessionToken><Expiration>{when}"
            f"</Expiration></Credentials></{action}Result></{action}Response>")


class Credentials(Case):
    """All places, in the order of AWS's tools."""

    def setUp(self):
        super().setUp()
        self.store = self.enterContext(Store())
        self.store.put_folder("b", "run/", GOLDEN)
        self.store.keys = {"GOOD": ("good", "good-token")}
        os.mkdir(self.path(".aws"))
        self.env = self.store.env(AWS_ACCESS_KEY_ID=None, AWS_SECRET_ACCESS_KEY=None, AWS_SESSION_TOKEN=None, HOME=self.tmp)

    def write(self, name, text):
        with open(self.path(name), "w") as f:
            f.write(text)

    def kind(self, **more):
        env = {k: v for k, v in {**self.env, **more}.items() if v is not None}
        r = subprocess.run([CKPT, "info", "--json", "s3://b/run"], env=env, capture_output=True, text=True, timeout=60)
        self.assertEqual(r.returncode, 0, r.stderr)
        return json.loads(r.stdout)["bucket"]["credentials"]

    def refused(self, *words, **more):
        env = {k: v for k, v in {**self.env, **more}.items() if v is not None}
        r = subprocess.run([CKPT, "info", "s3://b/run"], env=env, capture_output=True, text=True, timeout=60)
        self.assertNotEqual(r.returncode, 0)
        for w in words:
            self.assertIn(w, r.stderr)

    def test_environment(self):
        self.assertEqual(self.kind(AWS_ACCESS_KEY_ID="GOOD", AWS_SECRET_ACCESS_KEY="good", AWS_SESSION_TOKEN="good-token"), "environment")
        self.refused("secret access key is missing", AWS_ACCESS_KEY_ID="GOOD")

    def test_profiles(self):
        self.write(".aws/credentials", "# mine\n[default]\naws_access_key_id = BAD\naws_secret_access_key=bad\n\n[work]\n"
                   "aws_access_key_id=GOOD\naws_secret_access_key =  good\naws_session_token = good-token\n")
        self.assertEqual(self.kind(AWS_PROFILE="work"), "profile 'work'")
        self.refused("InvalidAccessKeyId")
        self.refused("no such profile", AWS_PROFILE="none")
        self.write("elsewhere", "[x]\naws_access_key_id=GOOD\naws_secret_access_key=good\naws_session_token=good-token\n")
        self.assertEqual(self.kind(AWS_PROFILE="x", AWS_SHARED_CREDENTIALS_FILE=self.path("elsewhere")), "profile 'x'")

    def test_region_and_endpoint_of_the_profile(self):
        self.store.region = "eu-north-5"
        self.write(".aws/config", f"[profile w]\nregion = eu-north-5\nendpoint_url = {self.store.url}/\naws_access_key_id=GOOD\n"
                   "aws_secret_access_key=good\naws_session_token=good-token\n")
        self.kind(AWS_PROFILE="w", AWS_ENDPOINT_URL=None, AWS_REGION=None)
        self.assertEqual(len({x[4]["authorization"].split("/")[2] for x in self.store.log}), 1)

    def test_process(self):
        self.write(".aws/config", "[default]\ncredential_process = echo '{\"Version\": 1, \"AccessKeyId\": \"GOOD\", "
                   "\"SecretAccessKey\": \"good\", \"SessionToken\": \"good-token\"}'\n")
        self.assertEqual(self.kind(), "profile 'default'")
        self.write(".aws/config", "[default]\ncredential_process = false\n")
        self.refused("credential_process failed with status 1: false")
        self.write(".aws/config", "[default]\ncredential_process = echo no session >&2; exit 7\n")
        self.refused("credential_process failed with status 7: no session")
        self.write(".aws/config", "[default]\ncredential_process = echo no\n")
        self.refused("not a JSON object")

    def test_role(self):
        seen = []

        def sts(method, headers, body):
            seen.append((headers.get("authorization", ""), body.decode()))
            return 200, sts_answer("AssumeRole", "GOOD", "good", "good-token")
        self.store.extra["/"] = sts
        self.write(".aws/config", "[profile deep]\nrole_arn = arn:aws:iam::1:role/r\nsource_profile = src\nexternal_id = e&1\n"
                   "[profile src]\naws_access_key_id=SRC\naws_secret_access_key=src\n"
                   "[profile circle]\nrole_arn = arn:aws:iam::1:role/r\nsource_profile = circle2\n"
                   "[profile circle2]\nrole_arn = arn:aws:iam::1:role/r\nsource_profile = circle\n[profile mfa]\n"
                   "role_arn = arn:aws:iam::1:role/r\nsource_profile = src\nmfa_serial = x\n")
        self.assertIn("role arn:aws:iam::1:role/r", self.kind(AWS_PROFILE="deep"))
        self.assertIn("Credential=SRC/", seen[0][0])
        self.assertIn("/us-east-1/sts/", seen[0][0])
        self.assertIn("RoleArn=arn%3Aaws%3Aiam%3A%3A1%3Arole%2Fr", seen[0][1])
        self.assertIn("ExternalId=e%261", seen[0][1])
        self.refused("circle", AWS_PROFILE="circle")
        self.refused("mfa_serial", AWS_PROFILE="mfa")

    def test_web_identity(self):
        self.write("token", "ey.token\n")
        self.store.extra["/"] = lambda m, h, body: ((200, sts_answer("AssumeRoleWithWebIdentity", "GOOD", "good", "good-token"))
                                                    if b"WebIdentityToken=ey.token" in body and "authorization" not in h else (403, ""))
        self.assertIn("web identity", self.kind(AWS_WEB_IDENTITY_TOKEN_FILE=self.path("token"), AWS_ROLE_ARN="arn:x"))
        self.refused("can't be read", AWS_WEB_IDENTITY_TOKEN_FILE="/none", AWS_ROLE_ARN="arn:x")

    def document(self, **more):
        return json.dumps({"AccessKeyId": "GOOD", "SecretAccessKey": "good", "Token": "good-token",
                           "Expiration": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 900)), **more})

    def test_container(self):
        self.store.extra["/creds"] = lambda m, h, b: (200, self.document()) if h.get("authorization") == "tok" else (401, "{}")
        self.assertEqual(self.kind(AWS_CONTAINER_CREDENTIALS_FULL_URI=self.store.url + "/creds", AWS_CONTAINER_AUTHORIZATION_TOKEN="tok"),
                         "container")
        self.refused("401", AWS_CONTAINER_CREDENTIALS_FULL_URI=self.store.url + "/creds")
        self.refused("neither https", AWS_CONTAINER_CREDENTIALS_FULL_URI="http://example.invalid/creds")

    def test_instance(self):
        roles = "/latest/meta-data/iam/security-credentials/"
        self.store.extra["/latest/api/token"] = lambda m, h, b: (200, "T1") if m == "PUT" else (405, "")
        self.store.extra[roles] = lambda m, h, b: (200, "my-role") if h.get("x-aws-ec2-metadata-token") == "T1" else (401, "")
        self.store.extra[roles + "my-role"] = lambda m, h, b: (200, self.document()) if h.get("x-aws-ec2-metadata-token") == "T1" else (401, "")
        self.assertEqual(self.kind(AWS_EC2_METADATA_DISABLED=None, AWS_EC2_METADATA_SERVICE_ENDPOINT=self.store.url), "instance (IMDSv2)")
        self.refused("no credentials", AWS_EC2_METADATA_SERVICE_ENDPOINT=self.store.url)

    def test_refused(self):
        self.write(".aws/config", "[default]\nsso_session = x\n")
        self.refused("uses SSO", "credential_process")
        self.refused("certificates '/none'", AWS_CA_BUNDLE="/none", AWS_ACCESS_KEY_ID="GOOD", AWS_SECRET_ACCESS_KEY="good")

    def test_expired_for_good(self):
        """Credentials that the store refuses as expired, and no others to be had."""
        self.store.expired = {"good-token"}
        begin = time.monotonic()
        self.refused("ExpiredToken", AWS_ACCESS_KEY_ID="GOOD", AWS_SECRET_ACCESS_KEY="good", AWS_SESSION_TOKEN="good-token")
        self.assertLess(time.monotonic() - begin, 20)

    def test_tls(self):
        """Certificates of AWS_CA_BUNDLE, and no others; the payload is not hashed."""
        import ssl
        cert, key = self.path("cert.pem"), self.path("key.pem")
        subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext",
                        "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert], check=True, capture_output=True)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key)
        with Store(tls=context) as s:
            s.put_folder("b", "run/", GOLDEN)
            self.fails(run(s, "info", "s3://b/run"), "certificate")
            self.assertEqual(self.export(s, "s3://b/run", AWS_CA_BUNDLE=cert), self.expected())


if os.environ.get("CKPTFS_SANITIZE"):  # neither Python nor mpirun loads libraries that are built with one
    del Python, Loads.test_once, Loads.test_each

if __name__ == "__main__":
    unittest.main(verbosity=1)
