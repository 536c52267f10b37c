# SPDX-License-Identifier: Apache-2.0
"""One export that many processes write: by mpirun, by --part in any order, killed and resumed, beside other jobs. What they write is what one process writes, and
DEST is whole or not there. CKPTFS_KILLS: how many exports are killed (10); CKPTFS_SEED: of their moments."""
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

from mountlib import CKPT, Case, digests, wait_until
from test_real import write_model

sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "load"))
from ranks import mpirun  # noqa: E402

UNIT, BEAT, STALE, LAUNCH = 256 << 10, 100, 1500, 30000  # bytes and milliseconds, instead of 256 MiB, 5, 60 and 60 s
KILLS = int(os.environ.get("CKPTFS_KILLS", "10"))
SEED = int(os.environ.get("CKPTFS_SEED") or random.randrange(1 << 30))
LAUNCHERS = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
ENVIRON = {k: v for k, v in os.environ.items() if k not in LAUNCHERS} | {"CKPTFS_EXPORT_TEST": f"{UNIT},{BEAT},{STALE},{LAUNCH}"}
IMPATIENT = {"CKPTFS_EXPORT_TEST": f"{UNIT},{BEAT},{STALE},2000"}  # where a process waits for one that does not come
SHARDS = "--max-shard-size=2MB"  # many files, of which none need be cut


def start(*args, env=None, **kw):
    return subprocess.Popen([CKPT, "export", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRON | (env or {}), **kw)


def end(p):
    out, err = p.communicate(timeout=120)
    return subprocess.CompletedProcess(p.args, p.returncode, out, err)


def export(*args, **kw):
    return end(start(*args, **kw))


def ranks(n):
    """The environments of n processes of one mpirun."""
    return [{"OMPI_COMM_WORLD_SIZE": str(n), "OMPI_COMM_WORLD_RANK": str(i)} for i in range(n)]


def info(out, *args):
    return subprocess.run([CKPT, "info", out, *args], capture_output=True, text=True, env=ENVIRON)


class Parts(Case):
    def setUp(self):
        super().setUp()
        write_model(os.path.join(self.run_dir, "10"), 10)
        self.want, self.digest = {}, {}
        for more in ((), (SHARDS,)):
            dest = os.path.join(self.tmp, f"want{len(more)}")
            done = export(self.run_dir, dest, *more)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.want[more], self.digest[more] = digests(dest), done.stdout.splitlines()[-1]
            shutil.rmtree(dest)
        self.out = os.path.join(self.tmp, "out")
        self.work = os.path.join(self.tmp, ".out.ckptfs-export")

    def is_whole(self, more=()):
        self.assertEqual(digests(self.out), self.want[more])
        self.assertEqual(sorted(os.listdir(self.tmp)), ["mnt", "out", "run"])

    def paused(self, *args, env=None):
        """An export that is stopped in the middle, with little of its part written."""
        def lines():
            return sum(len(open(os.path.join(self.work, "processes", n)).readlines()) for n in os.listdir(os.path.join(self.work, "processes")))

        while True:
            p = start(self.run_dir, self.out, *args, env=env)
            self.addCleanup(lambda: p.poll() is not None or (p.kill(), p.communicate()))
            while p.poll() is None:
                if os.path.exists(os.path.join(self.work, "files", ".model.safetensors.partial")):  # all of its part is claimed
                    break
            p.send_signal(signal.SIGSTOP)
            if p.poll() is None and os.path.isdir(os.path.join(self.work, "files")) and lines() < 4:
                return p
            p.kill()  # it was faster
            p.communicate()
            shutil.rmtree(self.out, ignore_errors=True)
            shutil.rmtree(self.work, ignore_errors=True)

    def test_parts_in_any_order(self):
        for more in ((), (SHARDS,)):
            for order in ((1, 2, 3, 4), (3, 1, 4, 2), (4, 3, 2, 1)):
                for k, part in enumerate(order):
                    done = export(self.run_dir, self.out, *more, "-q", "--part", f"{part}/4")
                    self.assertEqual((done.returncode, done.stderr), (0, ""))
                    if k == 3:
                        self.assertEqual(done.stdout.splitlines()[-1], self.digest[more])
                        continue
                    self.assertNotIn("xxh3", done.stdout)
                    self.assertEqual([int(n) for n in re.findall(r"part (\d)/4 lacks: ", done.stdout)], sorted(set(range(1, 5)) - set(order[:k + 1])))
                    self.assertFalse(os.path.exists(self.out))
                    state = json.loads(info(self.out, "--json").stdout)
                    self.assertEqual([p["part"] for p in sorted(state["processes"], key=lambda p: p["part"])], sorted(order[:k + 1]))
                    self.assertEqual({p["state"] for p in state["processes"]}, {"has ended"})
                    self.assertEqual(state["written_bytes"] + sum(f["bytes"] for f in state["lacking"]), state["bytes"])
                    self.assertTrue(0 < state["written_bytes"] < state["bytes"])
                    told = info(self.out).stdout
                    self.assertIn("export    unfinished, of hf, step 10, generation", told)
                    self.assertIn(f"part {part}/4 has ended (host ", told)
                self.is_whole(more)
                shutil.rmtree(self.out)

    def test_parts_at_once(self):
        for n in (2, 3, 7):
            for more in ((), (SHARDS,)):
                done = [end(p) for p in [start(self.run_dir, self.out, *more, "--part", f"{i + 1}/{n}") for i in range(n)]]
                self.assertEqual([(d.returncode, d.stderr) for d in done], n * [(0, "")])
                self.assertEqual([line for d in done for line in d.stdout.splitlines() if line.startswith("xxh3")], [self.digest[more]])
                self.is_whole(more)
                shutil.rmtree(self.out)

    def test_launched_ranks_wait_for_each_other(self):
        for more in ((), (SHARDS,)):
            for n in (2, 5):
                started = [start(self.run_dir, self.out, *more, "-q", env=e) for e in ranks(n)[1:]]
                time.sleep(0.5)
                self.assertEqual([p.poll() for p in started], (n - 1) * [None])
                done = [end(p) for p in [*started, start(self.run_dir, self.out, *more, "-q", env=ranks(n)[0])]]
                self.assertEqual([(d.returncode, d.stderr) for d in done], n * [(0, "")])
                self.assertEqual([line for d in done for line in d.stdout.splitlines() if line.startswith("xxh3")], [self.digest[more]])
                self.is_whole(more)
                shutil.rmtree(self.out)

    def test_mpirun(self):
        if not shutil.which("mpirun"):
            self.skipTest("no mpirun")
        for more in ((), (SHARDS,)):
            done = mpirun(4, [CKPT, "export", self.run_dir, self.out, *more], base=ENVIRON)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(re.findall("^xxh3.*", done.stdout, re.M), [self.digest[more]])
            self.is_whole(more)
            shutil.rmtree(self.out)

    def test_which_environment_counts(self):
        def of(env, *args):
            done = export(self.run_dir, self.out, *args, env=IMPATIENT | env)
            shutil.rmtree(self.out, ignore_errors=True)
            shutil.rmtree(self.work, ignore_errors=True)
            return done
        for env in ({"RANK": "1", "WORLD_SIZE": "4"}, {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
                    {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}):
            done = of(env)
            self.assertEqual((done.returncode, done.stdout.splitlines()[-1]), (0, self.digest[()]), env)
        for size, rank in (("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), ("PMI_SIZE", "PMI_RANK"), ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")):
            done = of({size: "3", rank: "1"})
            self.assertEqual(done.returncode, 1)
            self.assertRegex(done.stderr, rf"part [13]/3 has not begun within 2 s: {size}=3 in the environment made this process part 2/3; .*--alone writes everything")
            self.assertEqual(of({size: "3", rank: "1"}, "--alone").returncode, 0)
            self.assertIn("part 3/4, ", of({size: "3", rank: "1"}, "--part=3/4").stdout)
            for env in ({size: "3"}, {size: "3", rank: "3"}, {size: "0", rank: "0"}, {size: "x", rank: "0"}):
                done = of(env)
                self.assertEqual((done.returncode, size in done.stderr, "--alone" in done.stderr), (2, True, True), done.stderr)
        for given in ("0/2", "3/2", "1", "1/", "/2", "1/2/3", "-1/2", "1/0", "1/99999999999"):
            self.assertIn(f"'{given}' is not I/N", of({}, f"--part={given}").stderr)
        self.assertIn("leave one out", of({}, "--part=1/2", "--alone").stderr)

    def test_killed_at_random_moments(self):
        rng = random.Random(SEED)
        print(f"CKPTFS_SEED={SEED}")
        done = 0
        for more in ((), (SHARDS,)):
            for _ in range((KILLS + 1) // 2):
                for _ in range(rng.randrange(1, 4)):  # so often, each time with another number
                    n = rng.randrange(1, 5)
                    launched = n > 1 and rng.random() < 0.5
                    running = [start(self.run_dir, self.out, *more, *([] if launched else ["--part", f"{i + 1}/{n}"]), "--jobs=2", env=IMPATIENT | (e if launched else {}))
                               for i, e in enumerate(ranks(n))]
                    time.sleep(rng.random() ** 2 * 0.2)
                    victims = running if rng.random() < 0.5 else [rng.choice(running)]
                    for p in victims:
                        p.kill()
                    for p in map(end, running):
                        self.assertIn(p.returncode, (0, 1, -signal.SIGKILL), p.stderr)
                        self.assertTrue(p.returncode != 1 or "has ended, and" in p.stderr or "has not begun" in p.stderr, p.stderr)
                    if os.path.exists(self.out):
                        self.assertEqual(digests(self.out), self.want[more])
                n = rng.randrange(1, 5)
                finished = [end(p) for p in [start(self.run_dir, self.out, *more, env=e) for e in ranks(n)]]
                self.assertEqual([(p.returncode, p.stderr) for p in finished], n * [(0, "")])
                self.is_whole(more)
                self.assertEqual(export(self.run_dir, self.out, *more).stdout.splitlines()[-1], self.digest[more])
                shutil.rmtree(self.out)
                done += 1
        self.assertGreaterEqual(done, KILLS)

    def test_what_is_whole_stays_with_another_number(self):
        for more in ((), (SHARDS,)):
            self.assertEqual(export(self.run_dir, self.out, *more, "--part=2/3").returncode, 0)
            before = json.loads(info(self.out, "--json").stdout)["written_bytes"]
            self.assertEqual(export(self.run_dir, self.out, *more, "--part=1/2").returncode, 0)
            done = export(self.run_dir, self.out, *more, "--part=2/2", "--json")
            self.assertTrue(before > 0 and done.returncode == 0, done.stderr)
            self.assertEqual("xxh3 " + json.loads(done.stdout)["xxh3"], self.digest[more])
            self.is_whole(more)
            shutil.rmtree(self.out)

    def test_nothing_is_written_twice(self):
        """Every byte of the files is written by one process, once, and read back once if its file was cut."""
        if not shutil.which("strace"):
            self.skipTest("no strace")
        size = sum(os.path.getsize(os.path.join(self.run_dir, "10", n)) for n in os.listdir(os.path.join(self.run_dir, "10")))
        written = read = 0
        for part in (2, 3, 1):
            log = os.path.join(self.tmp, "trace")
            subprocess.run(["strace", "-f", "-y", "-e", "trace=pwrite64,pread64,preadv,preadv2", "-o", log, CKPT, "export", self.run_dir, self.out, "-q", "--jobs=1", f"--part={part}/3"],
                           check=True, stdout=subprocess.DEVNULL, env=ENVIRON | {"ASAN_OPTIONS": "detect_leaks=0"})
            with open(log) as f:
                for line in f:
                    call = re.search(r"(pwrite64|pread64|preadv2?)\(\d+<[^>]*ckptfs-export/files/.*= (\d+)$", line)
                    if call and call[1] == "pwrite64":
                        written += int(call[2])
                    elif call:
                        read += int(call[2])
            os.unlink(log)
        self.assertEqual(written, size)
        self.assertEqual(read, os.path.getsize(os.path.join(self.out, "model.safetensors")))

    def test_a_span_of_two_that_live_is_an_error(self):
        first = self.paused("--part=1/2")
        for part in ("1/2", "1/1", "2/3"):
            done = export(self.run_dir, self.out, "--part", part)
            self.assertEqual(done.returncode, 1)
            self.assertRegex(done.stderr, rf"part 1/2 \(host .*, process {first.pid}\) lives and writes model.safetensors from byte \d+, which is of this part, {part}, too")
        self.assertEqual(export(self.run_dir, self.out, "--part=2/2").returncode, 0)
        self.assertRegex(export(self.run_dir, self.out, "--part=2/2").stdout, rf"part 1/2 lacks: .*, being written \(host .*, process {first.pid}\)")
        self.assertIn("part 1/2 writes (host ", info(self.out).stdout)
        first.send_signal(signal.SIGCONT)
        done = end(first)
        self.assertEqual((done.returncode, done.stdout.splitlines()[-1]), (0, self.digest[()]), done.stderr)
        self.is_whole()

    def test_a_process_of_another_host_is_dead_when_it_is_silent(self):
        first = self.paused("--part=1/2")
        first.kill()
        first.communicate()
        (journal,) = os.listdir(os.path.join(self.work, "processes"))
        path = os.path.join(self.work, "processes", journal)
        with open(path) as f:
            head, *lines = f.read().splitlines(keepends=True)
        elsewhere = json.dumps(json.loads(head) | {"where": "another machine", "host": "faraway"}) + "\n"
        with open(path, "w") as f:
            f.writelines([elsewhere, *lines])
        began = time.monotonic()
        self.assertEqual(export(self.run_dir, self.out, "--part=1/2").returncode, 0)
        self.assertGreater(time.monotonic() - began, STALE / 1000 - 0.3)
        self.assertEqual(export(self.run_dir, self.out, "--part=2/2").returncode, 0)
        self.is_whole()
        # one whose heart beats
        shutil.rmtree(self.out)
        first = self.paused("--part=1/2")
        (journal,) = os.listdir(os.path.join(self.work, "processes"))
        path = os.path.join(self.work, "processes", journal)
        with open(path, "w") as f:
            f.write(elsewhere)
        beats = subprocess.Popen(["sh", "-c", 'while sleep 0.1; do touch "$0"; done', path])
        try:
            done = export(self.run_dir, self.out, "--part=1/2")
        finally:
            beats.kill()
            beats.wait()
        self.assertEqual(done.returncode, 1)
        self.assertIn("(host faraway, process ", done.stderr)

    def test_two_jobs_into_one_destination(self):
        write_model(os.path.join(self.run_dir, "20"), 20)
        self.assertEqual(export(self.run_dir, self.out, "--step=10", "--part=1/2").returncode, 0)
        for more, words in (("--step=20",), "step 20"), (("--step=10", "--dtype=float32"), "--dtype=float32"), (("--step=10", "--weights-only"), "--weights-only"):
            done = export(self.run_dir, self.out, "--part=2/2", *more)
            self.assertEqual(done.returncode, 1)
            self.assertIn("an unfinished export of something else is there", done.stderr)
            self.assertRegex(done.stderr, f"it is of hf, step 10, .*export .*--step=10 --part=1/2'; this one is of .*{words}")
        self.assertEqual(export(self.run_dir, self.out, "--step=10", "--part=2/2").returncode, 0)
        self.is_whole()
        with tempfile.TemporaryFile() as f:
            done = export(self.run_dir, self.out, "--step=20", "--part=1/2", stdin=f)
            self.assertIn("is not empty", done.stderr)
            self.assertEqual(os.fstat(f.fileno()).st_size, 0)  # it has joined no job: there is no journal that it could end
        for _ in range(5):  # at once: never a mixture
            shutil.rmtree(self.out)
            running = [start(self.run_dir, self.out, "--step=10"), start(self.run_dir, self.out, "--step=20")]
            done = [end(p) for p in running]
            self.assertIn(0, [d.returncode for d in done], [d.stderr for d in done])
            won = ["10", "20"][[d.returncode for d in done].index(0)]
            self.assertEqual(subprocess.run([CKPT, "verify", self.run_dir, self.out, "--step", won], stdout=subprocess.DEVNULL).returncode, 0)
            self.assertEqual(sorted(os.listdir(self.tmp)), ["mnt", "out", "run"], [d.stderr for d in done])

    def test_a_rank_that_sees_another_step(self):
        write_model(os.path.join(self.run_dir, "20"), 20)
        envs = ranks(2)
        first = start(self.run_dir, self.out, "--step=10", env=IMPATIENT | envs[0])
        wait_until(lambda: os.path.exists(os.path.join(self.work, "job")), "it has begun")
        second = export(self.run_dir, self.out, env=envs[1])
        self.assertEqual(second.returncode, 1)
        self.assertRegex(second.stderr, "it is of hf, step 10, .*; this one is of hf, step 20, ")
        done = end(first)
        self.assertEqual(done.returncode, 1)
        self.assertIn("part 2/2 has not begun within 2 s", done.stderr)
        self.assertEqual(export(self.run_dir, self.out, "--step=10").returncode, 0)
        self.is_whole()

    def test_a_rank_that_is_killed(self):
        envs = ranks(3)
        first = self.paused(env=envs[1])
        others = [start(self.run_dir, self.out, env=envs[i]) for i in (0, 2)]
        wait_until(lambda: len(os.listdir(os.path.join(self.work, "processes"))) == 3, "all have begun")
        time.sleep(1)
        self.assertEqual([p.poll() for p in others], [None, None])
        first.kill()
        for done in map(end, others):
            self.assertEqual(done.returncode, 1)
            self.assertRegex(done.stderr, rf"part 2/3 \(host .*, process {first.pid}\) has ended, and \d of its files lack, .*: run the same command again, with any number")
        self.assertIn("part 2/3 was killed", info(self.out).stdout)
        self.assertFalse(os.path.exists(self.out))
        done = export(self.run_dir, self.out)
        self.assertIn("resumed", done.stdout)
        self.is_whole()

    def test_a_part_into_a_finished_destination_is_compared(self):
        self.assertEqual(export(self.run_dir, self.out).returncode, 0)
        for part in (1, 2, 3):
            done = export(self.run_dir, self.out, f"--part={part}/3")
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertIn("already complete: every byte of it was compared", done.stdout)
        self.assertEqual([end(p).returncode for p in [start(self.run_dir, self.out, env=e) for e in ranks(3)]], [0, 0, 0])
        with open(os.path.join(self.out, "model.safetensors"), "r+b") as f:
            f.seek(5000000)
            byte = f.read(1)
            f.seek(5000000)
            f.write(bytes([byte[0] ^ 1]))
        done = [export(self.run_dir, self.out, f"--part={part}/3") for part in (1, 2, 3)]
        self.assertEqual(sorted(d.returncode for d in done), [0, 0, 1])
        self.assertIn("model.safetensors differs at byte 5000000", "".join(d.stderr for d in done))

    def test_a_unit_that_was_damaged_is_found(self):
        self.assertEqual(export(self.run_dir, self.out, "--part=1/2").returncode, 0)
        path = os.path.join(self.work, "files", ".model.safetensors.partial")
        with open(path, "r+b") as f:
            while not (f.read(UNIT).strip(b"\0")):
                pass
            at = f.tell() - UNIT + 5
            f.seek(at)
            byte = f.read(1)
            f.seek(at)
            f.write(bytes([byte[0] ^ 1]))
        done = export(self.run_dir, self.out, "--part=2/2")
        self.assertEqual(done.returncode, 1)
        self.assertIn(f"bytes {at // UNIT * UNIT} to {at // UNIT * UNIT + UNIT} are not those that were written there", done.stderr)
        self.assertFalse(os.path.exists(self.out))

    def test_a_part_that_may_not_write_is_resumed(self):
        limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, resource.RLIM_INFINITY))  # noqa: E731
        done = export(self.run_dir, self.out, "--part=2/2", preexec_fn=limit)
        self.assertEqual(done.returncode, 1)
        self.assertIn("File too large", done.stderr)
        for part in (1, 2):
            done = export(self.run_dir, self.out, f"--part={part}/2")
            self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.is_whole()

    def test_a_full_disk_is_met_by_one_rank(self):
        if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", self.mnt]).returncode:
            self.skipTest("can't mount a tmpfs")
        try:
            out = self.at("out")
            self.assertIn("no space", export(self.run_dir, out, "--part=1/2").stderr)  # of all parts: the first one looks
            self.assertEqual(os.listdir(self.mnt), [])
        finally:
            subprocess.run(["umount", self.mnt], check=True)

    def test_an_unfinished_export_of_an_older_version_is_resumed(self):
        """DEST/.ckptfs-export was a journal, and the files were written in DEST itself."""
        hashes = os.path.join(self.tmp, "hashes")
        shutil.copytree(os.path.join(self.run_dir, "10"), hashes)
        with open(os.path.join(hashes, "model.safetensors"), "rb") as f:
            prefix = f.read(3 << 20)
        with open(os.path.join(hashes, "tokenizer.json"), "wb") as f:
            f.write(prefix)
        digest = {f["name"]: f["xxh3"] for f in json.loads(subprocess.run([CKPT, "digest", hashes, "--json"], capture_output=True, text=True).stdout)["items"]}
        shutil.rmtree(hashes)
        self.assertEqual(export(self.run_dir, self.out, "--part=1/2").returncode, 0)
        with open(os.path.join(self.work, "job")) as f:
            source = json.loads(f.read())["export"]
        shutil.rmtree(self.work)
        for n in (1, 3):
            os.mkdir(self.out)
            shutil.copy(os.path.join(self.run_dir, "10", "config.json"), self.out)
            with open(os.path.join(self.out, ".model.safetensors.partial"), "wb") as f:
                f.write(prefix)
            st = os.stat(os.path.join(self.out, "config.json"))
            with open(os.path.join(self.out, ".ckptfs-export"), "w") as f:
                for line in ({"export": source}, {"file": "config.json", "len": st.st_size, "mtime_ns": st.st_mtime_ns, "xxh3": digest["config.json"]},
                             {"file": "model.safetensors", "len": len(prefix), "mtime_ns": 0, "xxh3": digest["tokenizer.json"]}):
                    f.write(json.dumps(line) + "\n")
            for done in [end(p) for p in [start(self.run_dir, self.out, env=e) for e in ranks(n)]]:
                self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertEqual(os.stat(os.path.join(self.out, "config.json")).st_ino, st.st_ino)
            self.is_whole()
            shutil.rmtree(self.out)

    def test_a_destination_that_cannot_be_replaced(self):
        """A mountpoint, and the working directory: the work folder is in it, and nothing of it stays."""
        for n in (1, 3):
            os.mkdir(self.out)
            done = [end(p) for p in [start(self.run_dir, ".", cwd=self.out, env=e) for e in ranks(n)]]
            self.assertEqual([(d.returncode, d.stderr) for d in done], n * [(0, "")])
            self.is_whole()
            self.assertIn("already complete", export(self.run_dir, self.out).stdout)
            shutil.rmtree(self.out)
        if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", self.mnt]).returncode:
            self.skipTest("can't mount a tmpfs")
        try:
            for part in (2, 1):
                done = export(self.run_dir, self.mnt, f"--part={part}/2")
                self.assertEqual((done.returncode, done.stderr), (0, ""))
                if part == 2:
                    self.assertIn("unfinished", info(self.mnt).stdout)
            self.assertEqual(digests(self.mnt), self.want[()])
        finally:
            subprocess.run(["umount", self.mnt], check=True)

    def test_an_empty_destination_keeps_its_mode(self):
        os.mkdir(self.out, 0o750)
        self.assertEqual(export(self.run_dir, self.out, "--part=1/2").returncode, 0)
        self.assertEqual(os.listdir(self.out), [])
        self.assertEqual(export(self.run_dir, self.out, "--part=2/2").returncode, 0)
        self.assertEqual(os.stat(self.out).st_mode & 0o7777, 0o750)
        self.is_whole()

    def test_a_folder_that_was_left_behind_is_deleted(self):
        """By a process that was killed after DEST had its name, and by one that was killed before it wrote who it is."""
        self.paused("--part=1/2").kill()
        shutil.copytree(self.work, self.work + ".kept")
        self.assertEqual(export(self.run_dir, self.out).returncode, 0)
        os.rename(self.work + ".kept", self.work)
        shutil.rmtree(os.path.join(self.work, "files"))
        self.assertIn("already complete", export(self.run_dir, self.out).stdout)
        self.is_whole()
        shutil.rmtree(self.out)
        for name in ("files", "processes", "claims"):
            os.makedirs(os.path.join(self.work, name))
        with open(os.path.join(self.work, "job"), "w") as f:
            f.write('{"expo')
        self.assertEqual(export(self.run_dir, self.out).returncode, 0)
        self.is_whole()

    def test_anything_may_lie_in_the_work_folder(self):
        """It is an error that names the file, or it is left out; the bytes are the view's."""
        def put(name, data):
            with open(os.path.join(self.work, name), "wb") as f:
                f.write(data)
        self.assertEqual(export(self.run_dir, self.out, "--part=1/2").returncode, 0)
        kept = os.path.join(self.tmp, "kept")
        os.rename(self.work, kept)
        with open(os.path.join(kept, "job")) as f:
            job = json.load(f)
        unit = json.dumps({"file": "model.safetensors", "from": UNIT, "len": UNIT, "xxh3": 32 * "0"}).encode() + b"\n"
        head = json.dumps({"host": "h", "where": "", "pid": 1, "start": 1, "part": 1, "parts": 1}).encode() + b"\n"
        for words, spoil in (
                ("something else", lambda: put("job", b"\xff\n")), ("something else", lambda: put("job", b"[]\n")), ("something else", lambda: put("job", b'{"export":7}\n')),
                ("something else", lambda: put("job", json.dumps(job | {"cut": 1}).encode() + b"\n")), ("with xxHash 1; ", lambda: put("job", json.dumps(job | {"xxhash": 1}).encode() + b"\n")),
                ("job: ", lambda: (os.unlink(os.path.join(self.work, "job")), os.mkdir(os.path.join(self.work, "job")))),
                ("processes/odd: ", lambda: os.mkdir(os.path.join(self.work, "processes", "odd"))), ("processes/odd: ", lambda: os.mkfifo(os.path.join(self.work, "processes", "odd"))),
                ("is no claim", lambda: [put(f"claims/{i}.0", b"../job\n") for i in range(100)]),
                ("are not those that were written there", lambda: put("processes/odd", head + unit)),
                ("a hash of model.safetensors that is none", lambda: put("processes/odd", head + b'{"file":"model.safetensors","hashed":%d,"state":"00"}\n' % UNIT)),
                ("a hash of model.safetensors that is none", lambda: put("processes/odd", head + b'{"file":"model.safetensors","hashed":%d,"state":"%s"}\n' % (UNIT, 1152 * b"f"))),
                (None, lambda: put("processes/odd", b"")), (None, lambda: put("processes/odd", 5000 * b"\0\xff{}[]\n")), (None, lambda: put("processes/odd", head + head + b"[1]\nnull\n")),
                (None, lambda: put("processes/odd", head + b'{"file":"model.safetensors","from":-1,"len":-1,"xxh3":"0"}\n{"file":"x","len":1,"mtime_ns":1,"xxh3":""}\n{"file"')),
                (None, lambda: [put(f"claims/{i}.0", b"odd\n") for i in range(100)]), (None, lambda: put("claims/0.0", b""))):
            shutil.copytree(kept, self.work)
            spoil()
            self.assertIn(info(self.out).returncode, (0, 1, 2))
            done = export(self.run_dir, self.out, "--part=2/2")
            if words:
                self.assertEqual(done.returncode, 1, (words, done.stdout))
                self.assertIn(words, done.stderr)
                self.assertFalse(os.path.exists(self.out))
            else:
                self.assertEqual((done.returncode, done.stdout.splitlines()[-1]), (0, self.digest[()]), done.stderr)
                self.assertEqual(digests(self.out), self.want[()])
            shutil.rmtree(self.work, ignore_errors=True)
            shutil.rmtree(self.out, ignore_errors=True)

    def test_steps_are_exported_by_many(self):
        write_model(os.path.join(self.run_dir, "20"), 20)
        running = [start(self.run_dir, self.out, "--steps=all", "--then", "echo", "made {}", env=e) for e in ranks(3)]
        done = [end(p) for p in running]
        self.assertEqual([(d.returncode, d.stderr) for d in done], 3 * [(0, "")])
        self.assertEqual(sorted(line for d in done for line in d.stdout.splitlines() if line.startswith("made")), [f"made {self.out}/10", f"made {self.out}/20"])
        self.assertEqual(sorted(os.listdir(self.out)), [".ckptfs-exports", "10", "20"])


if __name__ == "__main__":
    unittest.main(verbosity=2, warnings="ignore")
