# SPDX-License-Identifier: Apache-2.0
"""Live runs: a writer adds, rotates and saves steps again, in every way that trainers do; readers
know what each save holds, and accept one save, all of it, or an error.

usage: test_resave.py [--seconds N] [unittest arguments]     (seconds of each format; by hand, long)
"""
import collections
import errno
import hashlib
import json
import mmap
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
import unittest
import zlib

from mountlib import CKPT, CKPTFS, SOURCE, Case, Mount, main, wait_until

GOLDEN = os.path.join(SOURCE, "tests", "golden")
SECONDS = 7
SAVES = 5
PAGES = mmap.mmap(-1, 1 << 20)  # aligned, for reads past the page cache
APART = 600  # seconds that seem to lie between one save and the next

# name: the golden checkpoint, steps' names, the file that ends a save, the run's pointer file and what it says, the view (nanotron has no
# list of its tensors, but a recipe misses those that are not there)
Format = collections.namedtuple("Format", "checkpoint step marker pointer says view")
FORMATS = {
    "nanotron": Format("nanotron/llama_tp2_pp2_tied/10", "{}", "model_config.json", "latest.txt", "{}", "hf"),
    "dcp": Format("dcp/fsdp2_uneven_4r/run", "step-{}", ".metadata", None, None, "raw"),
    "megatron torch_dist": Format("megatron/d15_tp2pp2", "iter_{:07}", "metadata.json", "latest_checkpointed_iteration.txt", "{}", "raw"),
    "megatron ranks": Format("megatron/l12_tp2pp2/iter_0000010", "iter_{:07}", None, "latest_checkpointed_iteration.txt", "{}", "raw"),
}


# ---- saves: real checkpoints with other weights ----

def zip_records(data):
    """(name, places of its CRC, begin and end of its bytes) of each stored tensor of the archives in a file, one after the other."""
    names, local = [], {}
    for m in re.finditer(b"PK\x03\x04|PK\x01\x02", data):
        p, central = m.start(), m.group() == b"PK\x01\x02"
        at = 28 if central else 26
        n = int.from_bytes(data[p + at:p + at + 2], "little")
        name = bytes(data[p + (46 if central else 30):][:n])
        if b"/data/" not in name:
            continue
        if not central:
            local[name] = p, p + 30 + n + int.from_bytes(data[p + 28:p + 30], "little")
        elif name in local:
            size = int.from_bytes(data[p + 20:p + 24], "little")
            start, begin = local.pop(name)
            crcs = [p + 16] + [start + 14] * any(data[start + 14:start + 18])
            if data[begin + size:begin + size + 4] == b"PK\x07\x08":
                crcs.append(begin + size + 4)
            names.append((crcs, begin, begin + size))
    return names


def other_weights(path, k):
    """Save k has other values in every shard, at both ends of every tensor."""
    with open(path, "rb") as f:
        data = bytearray(f.read())
    if path.endswith(".safetensors"):
        n = int.from_bytes(data[:8], "little")
        offsets = [t["data_offsets"] for name, t in json.loads(data[8:8 + n]).items() if name != "__metadata__"]
        records = [([], 8 + n + lo, 8 + n + hi) for lo, hi in offsets]
    else:
        records = zip_records(data)
    for crcs, lo, hi in records:
        for at in {lo, hi - 1} if hi > lo else ():
            data[at] ^= k
        for at in crcs:
            data[at:at + 4] = zlib.crc32(data[lo:hi]).to_bytes(4, "little")
    with open(path, "wb") as f:
        f.write(data)
    return bool(records)


def files_of(folder):
    return sorted(os.path.relpath(os.path.join(d, n), folder) for d, _, names in os.walk(folder) for n in names)


def make_saves(fmt, folder):
    """SAVES folders, and for each the names of its shards."""
    saves = []
    for k in range(SAVES):
        path = os.path.join(folder, str(k))
        shutil.copytree(os.path.join(GOLDEN, fmt.checkpoint), path, copy_function=shutil.copyfile)
        shards = [f for f in files_of(path) if f.endswith((".safetensors", ".distcp", ".pt")) and other_weights(os.path.join(path, f), k)]
        assert len(shards) > 1, path
        saves.append(path)
    return saves


# ---- the writer ----

class Writer(threading.Thread):
    """Saves for `seconds`, as if there were minutes between one save and the next: at the end of each its files become older."""

    def __init__(self, fmt, saves, run, seconds, seed):
        super().__init__()
        self.fmt, self.saves, self.run_dir, self.seconds = fmt, saves, run, seconds
        self.r = random.Random(seed)
        self.number, self.steps, self.last = 0, [], {}
        self.done = collections.Counter()
        self.failed = None

    def step(self, number):
        return os.path.join(self.run_dir, self.fmt.step.format(number))

    def point_at(self, number):
        if self.fmt.pointer:
            with open(os.path.join(self.run_dir, self.fmt.pointer), "w") as f:
                f.write(self.fmt.says.format(number))

    def put(self, source, target, how, pause):
        """A shard's new bytes, in its old place (in parts) or under another name first."""
        with open(source, "rb") as f:
            data = f.read()
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if how == "overwrite":
            # rsync --inplace does not truncate; of ranks' files without a marker nobody could tell
            keep = self.fmt.marker and os.path.exists(target) and self.r.random() < 0.5
            with open(target, "r+b" if keep else "wb", buffering=0) as f:
                for at in range(0, len(data), len(data) // 3 + 1):
                    f.write(data[at:at + len(data) // 3 + 1])
                    time.sleep(pause / 3)
        else:
            with open(target + ".tmp", "wb") as f:
                f.write(data)
            time.sleep(pause)
            os.rename(target + ".tmp", target)

    def save(self, number, how, slow):
        k = self.r.choice([k for k in range(SAVES) if k != self.last.get(number)])
        step, source = self.step(number), self.saves[k]
        files = [f for f in files_of(source) if f != self.fmt.marker]
        self.r.shuffle(files)  # ranks
        if how == "rmtree" and os.path.exists(step):
            shutil.rmtree(step)
        for f in files:
            self.put(os.path.join(source, f), os.path.join(step, f), how, self.r.random() * 0.15 if slow else 0)
        if number == self.number:
            self.point_at(number)
        if self.fmt.marker:
            self.put(os.path.join(source, self.fmt.marker), os.path.join(step, self.fmt.marker), "rename", 0)
            files.append(self.fmt.marker)
        self.last[number] = k
        self.done[how] += 1
        time.sleep(self.r.choice([0, 0.02, 1.2]))
        then = time.time() - APART
        for f in files:
            os.utime(os.path.join(step, f), (then, then))

    def add(self, slow=False):
        self.number += 10
        self.steps.append(self.number)
        self.save(self.number, "new", slow)

    def rotate(self):
        step = self.step(self.steps.pop(0))
        if self.r.random() < 0.5:
            os.rename(step, os.path.join(self.run_dir, ".trash"))
            step = os.path.join(self.run_dir, ".trash")
        shutil.rmtree(step)

    def touch(self):
        step = self.step(self.r.choice(self.steps))
        os.utime(os.path.join(step, self.r.choice(files_of(step))), (time.time() - APART,) * 2)

    def turn(self):
        slow = self.r.random() < 0.5
        act = self.r.choice(["add", "touch", "rename", "rename", "overwrite", "overwrite", "rmtree"])
        if act == "add":
            self.add(slow)
        elif act == "touch":
            self.touch()
        else:
            self.save(self.r.choice(self.steps), act, slow)
        while len(self.steps) > 3:
            self.rotate()

    def run(self):
        end = time.monotonic() + self.seconds
        try:
            while time.monotonic() < end:
                self.turn()
        except BaseException as e:
            self.failed = e
            raise


# ---- the readers ----

def ckpt(*args, view="raw"):
    return subprocess.run([CKPT, *args, "-o", f"view={view}", "-q"], capture_output=True, text=True, timeout=300)


def summary(data):
    return f"{len(data)} bytes, {hashlib.sha256(data).hexdigest()[:16]}"


def weights(folder):
    """What is in a step, as far as saves differ in it."""
    with open(os.path.join(folder, "model.safetensors"), "rb") as f:
        return summary(f.read())


class Readers:
    def __init__(self, case, fmt, saves, run):
        self.case, self.view, self.run_dir = case, fmt.view, run
        self.stop = threading.Event()
        self.seen = collections.Counter()
        self.bad, self.said = [], collections.Counter()
        self.hashes, self.digests = {}, {}
        for k, path in enumerate(saves):
            out = os.path.join(case.tmp, f"known-{k}")
            done = ckpt("export", path, out, view=self.view)
            assert done.returncode == 0, done.stderr
            self.hashes[weights(out)] = k
            self.digests[json.loads(ckpt("digest", path, "--json", view=self.view).stdout)["xxh3"]] = k
        assert len(self.hashes) == len(self.digests) == len(saves)

    def judge(self, who, known, found):
        self.seen[who + (" good" if found in known else " MIXED")] += 1
        if found not in known:
            self.bad.append((who, found))

    def failed(self, who, why):
        self.seen[who + " error"] += 1
        self.said[re.sub(r"/tmp/\S*/run", "RUN", why.strip())[:300]] += 1

    def steps(self):
        return [s for s in os.listdir(self.run_dir) if s[0] != "." and os.path.isdir(os.path.join(self.run_dir, s))]

    def read_mount(self, who):
        try:
            step = random.choice(os.listdir(self.case.mnt))
            self.judge(who, self.hashes, weights(self.case.at(step)))
        except OSError as e:
            self.failed(who, os.strerror(e.errno))

    def read_slowly(self, who):
        """A file that stays open while its step changes."""
        try:
            step = random.choice(os.listdir(self.case.mnt))
            data = b""
            with open(self.case.at(step, "model.safetensors"), "rb", buffering=0) as f:
                while part := f.read(65536):
                    data += part
                    time.sleep(0.02)
            self.judge(who, self.hashes, summary(data))
        except OSError as e:
            self.failed(who, os.strerror(e.errno))

    def export(self, who):
        out = os.path.join(self.case.tmp, "out")
        step = random.choice(self.steps() or ["none"])
        done = ckpt("export", self.run_dir, out, "--step", step, view=self.view)
        if done.returncode == 0:
            self.judge(who, self.hashes, weights(out))
        else:
            self.failed(who, done.stderr)
        shutil.rmtree(out, ignore_errors=True)

    def digest(self, who):
        done = ckpt("digest", self.run_dir, "--json", *(["--step", random.choice(self.steps() or ["none"])] if random.random() < 0.7 else []), view=self.view)
        if done.returncode == 0:
            self.judge(who, self.digests, json.loads(done.stdout)["xxh3"])
        else:
            self.failed(who, done.stderr)

    def loop(self, act, who):
        while not self.stop.is_set():
            act(who)

    def start(self):
        acts = [(self.read_mount, "mount"), (self.read_slowly, "slow"), (self.export, "export"), (self.digest, "digest")]
        self.threads = [threading.Thread(target=self.loop, args=a) for a in acts]
        for t in self.threads:
            t.start()

    def end(self):
        self.stop.set()
        for t in self.threads:
            t.join()


class Live(Case):
    def live(self, name):
        fmt, seed = FORMATS[name], int(os.environ.get("CKPTFS_SEED", 11))  # by hand: others, and --seconds
        saves = make_saves(fmt, os.path.join(self.tmp, "saves"))
        writer = Writer(fmt, saves, self.run_dir, SECONDS, seed)
        readers = Readers(self, fmt, saves, self.run_dir)
        writer.add()
        writer.add()
        with Mount(self.run_dir, self.mnt, "-o", f"view={fmt.view}", program=CKPTFS) as m:
            readers.start()
            writer.start()
            writer.join()
            readers.end()
            print(f"\n{name}, seed {seed}: saves {dict(writer.done)}, reads {dict(sorted(readers.seen.items()))}")
            if "-v" in sys.argv:
                print(*(f"  {n} x {what}\n" for what, n in readers.said.most_common()), m.text())
            self.assertIsNone(writer.failed)
            self.assertEqual(readers.bad, [], f"CKPTFS_SEED={seed}")
            for who in ("mount", "slow", "export", "digest"):
                self.assertGreater(readers.seen[who + " good"], 0, readers.said)
            self.settle(writer, readers)

    def settle(self, writer, readers):
        """When nothing changes any more, all steps can be read again, without a remount."""
        def readable(number):
            try:
                return readers.hashes.get(weights(self.at(os.path.basename(writer.step(number))))) == writer.last[number]
            except OSError:
                return False

        for number in writer.steps:
            wait_until(lambda: readable(number), f"step {number} to be readable")

    def test_nanotron(self):
        self.live("nanotron")

    def test_dcp(self):
        self.live("dcp")

    def test_megatron_torch_dist(self):
        self.live("megatron torch_dist")

    def test_megatron_ranks(self):
        self.live("megatron ranks")


class Steps(Case):
    """One thing at a time, on a nanotron run of steps 10 and 20."""

    def setUp(self):
        super().setUp()
        os.chmod(self.tmp, 0o755)
        for step in ("10", "20"):
            shutil.copytree(os.path.join(GOLDEN, FORMATS["nanotron"].checkpoint), os.path.join(self.run_dir, step), copy_function=shutil.copyfile)
        self.point_at("20")
        self.shard = next(f for f in files_of(os.path.join(self.run_dir, "20")) if "down_proj" in f)

    def point_at(self, step):
        with open(os.path.join(self.run_dir, "latest.txt"), "w") as f:
            f.write(step)

    def mount(self):
        return Mount(self.run_dir, self.mnt, "-o", "view=raw", program=CKPTFS)

    def test_after_a_touch_new_opens_read_on(self):
        with self.mount() as m:
            want = weights(self.at("20"))
            held = os.open(self.at("20", "model.safetensors"), os.O_RDONLY | os.O_DIRECT)
            os.utime(os.path.join(self.run_dir, "20", self.shard))
            failed = 0
            for _ in range(20):  # whoever had it open before
                try:
                    with open(held, "rb", buffering=0, closefd=False) as f:
                        f.seek(0)
                        while f.readinto(memoryview(PAGES)):
                            pass
                except OSError as e:
                    self.assertEqual(e.errno, errno.ESTALE)
                    failed += 1
            os.close(held)
            self.assertEqual(failed, 20)
            for _ in range(20):
                self.assertEqual(weights(self.at("20")), want)
            self.assertEqual(m.text().count("\n"), 1, m.text())
            self.assertIn(self.shard, m.text())

    def read_past_the_cache(self, between):
        """All of step 20; between() is called after the first page."""
        with open(os.open(self.at("20", "model.safetensors"), os.O_RDONLY | os.O_DIRECT), "rb", buffering=0) as f:
            f.readinto(memoryview(PAGES)[:4096])
            between()
            while f.readinto(PAGES):
                pass

    def test_a_write_that_has_begun_is_no_touch(self):
        """The kernel changes a file's times when a write begins, and its bytes later; a mapping shows both moments apart."""
        stored, said = threading.Event(), []

        def read():
            try:
                said.append(self.read_past_the_cache(lambda: stored.wait(60)))
            except OSError as e:
                said.append(e.errno)

        with self.mount(), open(os.path.join(self.run_dir, "20", self.shard), "r+b") as f, mmap.mmap(f.fileno(), 0) as shard:
            self.read_past_the_cache(lambda: None)
            shard[-1] = shard[-1]
            with self.assertRaises(OSError):
                self.read_past_the_cache(lambda: None)
            t = threading.Thread(target=read)
            t.start()
            time.sleep(0.7)
            shard[-1] ^= 1
            stored.set()
            t.join()
            self.assertIn(said[0], (errno.ESTALE, errno.EIO, errno.ENOENT))

    def test_a_removed_step_is_not_there(self):
        for k in range(5):
            step = os.path.join(self.run_dir, "15")
            shutil.copytree(os.path.join(self.run_dir, "10"), step, copy_function=shutil.copyfile)
            with self.mount():
                os.rename(step, os.path.join(self.run_dir, ".trash"))
                shutil.rmtree(os.path.join(self.run_dir, ".trash"))
                for look in (lambda: os.listdir(self.at("15")), lambda: open(self.at("15", "CKPTFS-ERROR.txt")),
                             lambda: open(self.at("15", "model.safetensors"))):
                    with self.assertRaises(FileNotFoundError):
                        look()
                self.assertEqual(sorted(os.listdir(self.mnt)), ["10", "20", "latest"])

    def test_a_step_that_is_being_saved_says_so(self):
        old = time.time() - APART
        step = os.path.join(self.run_dir, "20")
        for f in files_of(step):
            os.utime(os.path.join(step, f), (old, old))
        os.utime(os.path.join(step, self.shard))
        with self.mount() as m:
            self.assertEqual(os.readlink(self.at("latest")), "20")
            self.assertEqual(os.listdir(self.at("20")), ["CKPTFS-ERROR.txt"])
            with open(self.at("20", "CKPTFS-ERROR.txt")) as f:
                said = f.read()
            self.assertIn("is being written", said)
            self.assertIn(self.shard, said)
            self.assertGreater(len(os.listdir(self.at("10"))), 0)
            for _ in range(20):
                os.listdir(self.at("20"))
            self.assertLessEqual(m.text().count("\n"), 2, m.text())  # at the start that the latest can't be read; and once for readers
        done = ckpt("digest", self.run_dir)
        self.assertEqual(done.returncode, 1)
        self.assertIn("is being written", done.stderr)
        self.assertIn("--step 10", done.stderr)
        done = subprocess.run([CKPT, "digest", self.run_dir, "-q", "-o", "view=raw,allow_mixed"], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_an_export_of_a_step_that_changed_leaves_nothing(self):
        out = os.path.join(self.tmp, "out")
        stop = threading.Event()

        def churn():
            while not stop.is_set():
                path = os.path.join(self.run_dir, "20", self.shard)
                shutil.copyfile(path, path + ".new")
                os.rename(path + ".new", path)

        t = threading.Thread(target=churn)
        t.start()
        failed = 0
        for _ in range(100):
            if failed == 5:
                break
            done = ckpt("export", self.run_dir, out)
            if done.returncode:
                failed += 1
                self.assertIn(self.shard, done.stderr)
                self.assertFalse(os.path.exists(out), done.stderr)
            shutil.rmtree(out, ignore_errors=True)
        stop.set()
        t.join()
        self.assertGreater(failed, 0)

    def test_a_pointer_to_a_missing_step_is_said(self):
        self.point_at("30")
        done = ckpt("digest", self.run_dir)
        self.assertEqual(done.returncode, 0)
        self.assertIn("names step '30'", done.stderr)
        with self.mount() as m:
            self.assertEqual(os.readlink(self.at("latest")), "20")
            self.assertEqual(m.text().count("names step '30'"), 1)

    @unittest.skipIf(os.geteuid(), "root alone may become another user")
    def test_the_latest_is_the_latest_though_it_is_forbidden(self):
        program = shutil.copy(CKPT, os.path.join(self.tmp, "ckpt"))
        user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", program]
        for forbidden, mode in (("20", 0), (os.path.join("20", "model"), 0o600), (os.path.join("20", self.shard), 0)):
            path = os.path.join(self.run_dir, forbidden)
            before = os.stat(path).st_mode & 0o777
            os.chmod(path, mode)
            for pointer in (True, False):
                (self.point_at("20") if pointer else os.unlink(os.path.join(self.run_dir, "latest.txt")))
                done = subprocess.run([*user, "digest", self.run_dir, "-q", "-o", "view=raw"], capture_output=True, text=True, cwd=self.tmp)
                self.assertEqual(done.returncode, 1, (forbidden, done.stdout))
                self.assertIn("Permission denied", done.stderr)
                self.assertIn("--step 10", done.stderr)
            os.chmod(path, before)
            self.point_at("20")


if __name__ == "__main__":
    if "--seconds" in sys.argv:
        at = sys.argv.index("--seconds")
        SECONDS = float(sys.argv[at + 1])
        del sys.argv[at:at + 2]
    main()
