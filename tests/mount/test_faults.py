# SPDX-License-Identifier: Apache-2.0
"""Faults that a mount meets in real life, row by row: storage that fails, shards that change, daemons that are killed, mounts that are
ended under readers, links that lead out. What is read is right or an error, and nothing is left behind. CKPTFS_FAULTS=N repeats what is
repeated N times as often (by hand)."""
import errno
import mmap
import os
import random
import shutil
import signal
import struct
import subprocess
import threading
import time

from mountlib import BUILD, CKPTFS, SOURCE, Case, Mount, main, mounted, wait_until
from test_real import write_model

TIMES = int(os.environ.get("CKPTFS_FAULTS", "1"))
GOLDEN = os.path.join(SOURCE, "tests", "golden", "nanotron")
SHIM = os.path.join(BUILD, "tests", "fail_read.so")
ERRNO, SHORT, ZERO, DELAY, MOUNT_ENDS = 1, 2, 3, 4, 5


def copied(source, target):
    return shutil.copytree(source, target, copy_function=shutil.copyfile)


def read(path):
    with open(path, "rb") as f:
        return f.read()


class Storage:
    """Makes the reads of a daemon fail (fail_read.c)."""

    def __init__(self, path):
        self.path = path
        self.set(0)
        os.environ.update(LD_PRELOAD=SHIM, CKPTFS_FAIL_READ=path)
        # a sanitizer's library would be the first one otherwise
        os.environ["ASAN_OPTIONS"] += ":verify_asan_link_order=0"

    def set(self, action, value=0, every=0):
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT)
        os.pwrite(fd, struct.pack("<iii", action, value, every), 0)
        os.ftruncate(fd, 16)
        os.close(fd)

    def close(self):
        for name in ("LD_PRELOAD", "CKPTFS_FAIL_READ"):
            os.environ.pop(name, None)


class Readers:
    """Threads that read a file at random places, and compare: what an open file gives is all of one of the `saves`. An OSError is
    counted, a wrong byte is kept."""

    def __init__(self, path, *saves, n=16, seed=1):
        self.path, self.saves, self.errors, self.reads, self.wrong, self.stop = path, saves, {}, 0, [], threading.Event()
        self.opening = threading.Lock()
        self.threads = [threading.Thread(target=self.work, args=(random.Random(seed + i),), daemon=True) for i in range(n)]
        for t in self.threads:
            t.start()

    def work(self, rng):
        while not self.stop.is_set():
            try:
                with self.opening:
                    file = open(self.path, "rb", buffering=0)
                with file as f:
                    saves = self.saves
                    for _ in range(20):
                        off, n = rng.randrange(len(self.saves[0])), rng.choice([1, 100, 4096, 1 << 17])
                        got = self.read(f, off, n)
                        self.reads += 1
                        saves = [s for s in saves if s[off:off + n] == got]
                        if not saves:
                            self.wrong.append((off, n, len(got)))
                        if not saves or self.stop.is_set():
                            break
            except OSError as e:
                self.errors[e.errno] = self.errors.get(e.errno, 0) + 1
                time.sleep(0.01)

    @staticmethod
    def read(f, off, n):
        """All of it: a read may end before a page that fails, the next one then is an error."""
        parts = []
        while n > 0:
            parts.append(os.pread(f.fileno(), n, off))
            if not parts[-1]:
                break
            n, off = n - len(parts[-1]), off + len(parts[-1])
        return b"".join(parts)

    def end(self, test, allowed=()):
        self.stop.set()
        for t in self.threads:
            t.join(60)
        test.assertFalse([t for t in self.threads if t.is_alive()], "a reader hangs")
        test.assertEqual(self.wrong, [])
        test.assertLessEqual(set(self.errors), set(allowed), {errno.errorcode[e]: n for e, n in self.errors.items()})


class Faults(Case):
    def setUp(self):
        if os.geteuid() != 0:
            self.skipTest("aborts connections, which only root may")
        super().setUp()

    def mount(self, run, *args, **kw):
        return Mount(run, self.mnt, *args, program=CKPTFS, **kw)

    def big(self, name="big"):
        """A model directory of 16 MB whose bytes somebody else wrote, and these bytes."""
        run = os.path.join(self.tmp, name)
        write_model(run, 7)
        return run, read(os.path.join(run, "model.safetensors"))

    def golden(self, name="llama_tp2_pp2_tied"):
        run = copied(os.path.join(GOLDEN, name), os.path.join(self.tmp, "golden"))
        return run, os.path.join(GOLDEN, name + ".expected")

    def drop_pages(self):
        """Forget the file's pages, so that the next read asks the daemon."""
        fd = os.open(self.at("model.safetensors"), os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)

    # ---- bytes ----

    def test_every_way_of_reading_gives_the_official_bytes(self):
        """An fsx that only reads: pread, preadv, mmap, sendfile and O_DIRECT at any offset and length, also behind the end."""
        rng = random.Random(3)
        for name in ("llama_tp2_pp2_tied", "llama_tp1_pp1_untied_interleaved"):
            run, expected = self.golden(name)
            with self.mount(run):
                for file in [f for f in os.listdir(expected) if f.endswith(".safetensors")]:
                    want, path = read(os.path.join(expected, file)), self.at("latest", file)
                    self.check_file(path, want, rng)
            shutil.rmtree(run)

    def check_file(self, path, want, rng):
        out = os.open(os.path.join(self.tmp, "out"), os.O_RDWR | os.O_CREAT)
        fd, direct = os.open(path, os.O_RDONLY), os.open(path, os.O_RDONLY | os.O_DIRECT)
        page = mmap.mmap(-1, 1 << 20)
        self.assertEqual(os.fstat(fd).st_size, len(want))
        mapped = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        for _ in range(200 * TIMES):
            off = rng.choice([0, len(want) - 1, len(want), len(want) + 5000, rng.randrange(len(want) + 1)])
            n = rng.choice([0, 1, 7, 4095, 4096, 65536, rng.randrange(1, 1 << 20)])
            part = want[off:off + n]
            self.assertEqual(os.pread(fd, n, off), part)
            buffers = [bytearray(rng.randrange(1, 5000)) for _ in range(4)]
            got = os.preadv(fd, buffers, off)
            self.assertEqual(b"".join(buffers)[:got], want[off:off + sum(map(len, buffers))])
            self.assertEqual(mapped[off:off + n], part)
            if n and off < len(want):
                os.ftruncate(out, 0)
                os.lseek(out, 0, os.SEEK_SET)
                sent = os.sendfile(out, fd, off, n)
                self.assertEqual(os.pread(out, n, 0), part[:sent])
                self.assertGreater(sent, 0)
            aligned = off & ~4095
            got = os.preadv(direct, [memoryview(page)[:65536]], aligned)
            self.assertEqual(page[:got], want[aligned:aligned + 65536])
        mapped.close()
        for f in (fd, direct, out):
            os.close(f)

    # ---- storage ----

    def test_reads_that_fail_are_errors_of_those_reads_and_end_with_the_fault(self):
        run, want = self.big()
        storage = Storage(os.path.join(self.tmp, "storage"))
        self.addCleanup(storage.close)
        faults = [(ERRNO, errno.EIO), (ERRNO, errno.ENOMEM), (ERRNO, errno.ESTALE), (ERRNO, errno.EACCES), (ERRNO, errno.ENXIO),
                  (ERRNO, errno.ETIMEDOUT), (ZERO, 0)]
        harmless = [(ERRNO, errno.EINTR, 2), (SHORT, 1000, 0), (SHORT, 1, 3), (DELAY, 5, 0)]
        with self.mount(run) as m:
            storage.close()
            for action, value in faults:
                for every in (1, 3):
                    with self.subTest(action=action, value=value, every=every):
                        self.drop_pages()
                        storage.set(action, value, every)
                        failed = self.read_all(want)
                        if every == 1: # the kernel asks again for the single page that is wanted
                            self.assertGreater(failed, 0)
                        storage.set(0)
                        self.drop_pages()
                        self.assertEqual(self.read_all(want), 0)
            for action, value, every in harmless:
                with self.subTest(harmless=action, value=value):
                    self.drop_pages()
                    storage.set(action, value, every)
                    self.assertEqual(self.read_all(want, 3), 0)
            storage.set(0)
            self.assertIsNone(m.process.poll())

    def read_all(self, want, parts=32):
        """How many of the file's parts could not be read; those that could are right."""
        failed = 0
        with open(self.at("model.safetensors"), "rb", buffering=0) as f:
            for k in range(parts):
                off = k * len(want) // parts
                try:
                    got = Readers.read(f, off, 4096)
                except OSError:
                    failed += 1
                else:
                    self.assertEqual(got, want[off:off + 4096])
        return failed

    # ---- shards that change ----

    def test_shards_that_change_under_readers_give_old_bytes_or_errors(self):
        def grow(path, old):
            with open(path, "ab") as f:
                f.write(b"x" * 5000)

        def overwrite(path, old):
            with open(path, "r+b") as f:
                f.seek(len(old) // 2)
                f.write(bytes(len(old) // 4))

        def swap(path, old):
            folder = os.path.dirname(path)
            os.rename(folder, folder + ".moved")
            os.symlink(self.elsewhere, folder)

        changes = {
            "truncated": lambda path, old: os.truncate(path, len(old) // 2), "extended": grow, "overwritten": overwrite,
            "touched": lambda path, old: os.utime(path), "removed": lambda path, old: os.unlink(path),
            "renamed over": lambda path, old: os.replace(shutil.copyfile(self.other, path + ".new"), path),
            "forbidden": lambda path, old: os.chmod(path, 0), "a directory swapped for a link": swap,
        }
        other, _ = self.big("other")
        self.elsewhere, self.other = other, os.path.join(other, "model.safetensors")
        with open(self.other, "r+b") as f: # the same header, other numbers
            f.seek(1 << 20)
            f.write(bytes(1 << 20))
        for name, change in changes.items():
            with self.subTest(name):
                run = os.path.join(self.tmp, "steps")
                shutil.rmtree(run, ignore_errors=True)
                write_model(os.path.join(run, "10"), 7)
                path = os.path.join(run, "10", "model.safetensors")
                want = read(path)
                with self.mount(run) as m:
                    readers = Readers(self.at("10", "model.safetensors"), want, *self.later(name, want))
                    wait_until(lambda: readers.reads > 200, "reads")
                    with readers.opening: # files that are open are read on; nobody opens one in the middle of a write(2)
                        change(path, want)
                    time.sleep(0.5)
                    readers.end(self, (errno.EIO, errno.ESTALE, errno.ENOENT))
                    self.assertIsNone(m.process.poll())

    def later(self, name, old):
        """What the file may show afterwards: a model directory has no marker, so another file is another save."""
        if name == "overwritten":
            return [old[:len(old) // 2] + bytes(len(old) // 4) + old[len(old) // 2 + len(old) // 4:]]
        return [read(self.other)] if name == "renamed over" else []

    def test_a_file_that_is_written_over_in_one_long_write(self):
        """The file's times change when it begins; what is read before it ends may not stay in the page cache."""
        run, old = self.big()
        new = old[:len(old) // 8] + bytes(b ^ 1 for b in old[len(old) // 8:])
        with self.mount(run):
            self.assertEqual(read(self.at("model.safetensors")), old)
            with open(os.path.join(run, "model.safetensors"), "r+b") as f, mmap.mmap(f.fileno(), 0) as p:
                half = len(old) // 2
                p[half:] = old[half:]  # these pages are dirty now: what is written to them later leaves the times alone
                p[:half] = new[:half]
                reader = threading.Thread(target=self.read_until_all_is_of_a_save, args=((old, new),), daemon=True)
                reader.start()
                time.sleep(1.5)
                p[half:] = new[half:]
                reader.join(60)
                self.assertFalse(reader.is_alive())
            self.assertEqual(read(self.at("model.safetensors")), new)
            self.assertEqual(self.torn, 0)

    def read_until_all_is_of_a_save(self, saves):
        self.torn = 0
        end = time.monotonic() + 6
        while time.monotonic() < end:
            try:
                self.torn += read(self.at("model.safetensors")) not in saves
            except OSError as e:
                self.assertIn(e.errno, (errno.EIO, errno.ESTALE))
            time.sleep(0.05)

    # ---- daemons that die ----

    def test_a_daemon_that_is_killed_over_and_over_is_replaced(self):
        run, want = self.big()
        readers = Readers(self.at("model.safetensors"), want, n=4)
        for _ in range(10 * TIMES):
            m = self.mount(run, wait=False)
            done = readers.reads
            wait_until(lambda: readers.reads > done + 5, "reads")
            m.process.kill()
            m.process.wait(60)
        with self.mount(run, wait=False) as m:
            done = readers.reads
            wait_until(lambda: readers.reads > done + 5, "reads")
            self.assertEqual(read(self.at("model.safetensors")), want)
            with open("/proc/self/mountinfo") as f:
                self.assertEqual(sum(self.mnt in line for line in f), 1)
        readers.end(self, (errno.ENOTCONN, errno.EIO, errno.ENOENT, errno.ECONNABORTED, errno.EBADF))

    # ---- mounts that end under their readers ----

    def test_a_mount_ends_in_every_way_while_sixteen_read(self):
        run, want = self.big()
        ways = {
            "fusermount3 -u -z": lambda m: subprocess.run(["fusermount3", "-u", "-z", self.mnt], check=True),
            "umount -l": lambda m: subprocess.run(["umount", "-l", self.mnt], check=True),
            "abort": self.abort, "SIGTERM": lambda m: m.process.terminate(),
            "SIGINT twice": lambda m: [m.process.send_signal(signal.SIGINT) for _ in range(2)],
            "SIGTERM and umount at once": lambda m: [m.process.terminate(),
                                                     subprocess.run(["fusermount3", "-u", "-z", "-q", self.mnt], check=False)],
        }
        for _ in range(TIMES):
            for name, end in ways.items():
                with self.subTest(name):
                    m = self.mount(run)
                    readers = Readers(self.at("model.safetensors"), want)
                    wait_until(lambda: readers.reads > 50, "reads")
                    end(m)
                    readers.end(self, (errno.ENOTCONN, errno.EIO, errno.ENOENT, errno.ECONNABORTED, errno.EINTR))
                    self.assertEqual(m.process.wait(60), 0, m.text())
                    self.assertIsNone(mounted(self.mnt))

    def test_a_mount_that_ends_while_a_request_is_handed_over_has_ended_well(self):
        run, _ = self.golden()
        storage = Storage(os.path.join(self.tmp, "storage"))
        self.addCleanup(storage.close)
        m = self.mount(run, "-o", "threads=1") # libfuse cancels the others while they say why they end
        storage.close()
        os.listdir(self.mnt) # it serves by now
        storage.set(MOUNT_ENDS)
        subprocess.run(["umount", "-l", self.mnt], check=True)
        self.assertEqual(m.process.wait(60), 0, m.text())
        self.assertIn("Software caused connection abort", m.text()) # libfuse says so: the shim was asked

    def connections(self):
        """The folder of FUSE's connections, which not every machine has mounted."""
        path = os.path.join(self.tmp, "connections")
        if not os.path.isdir(path):
            os.mkdir(path)
            subprocess.run(["mount", "-t", "fusectl", "none", path], check=True)
            self.addCleanup(subprocess.run, ["umount", path], check=True)
        return path

    def abort(self, m):
        with open(os.path.join(self.connections(), str(os.minor(os.stat(self.mnt).st_dev)), "abort"), "w") as f:
            f.write("1")
        m.process.wait(60)
        subprocess.run(["fusermount3", "-u", "-z", "-q", self.mnt], check=False)

    def test_mounting_and_unmounting_leaves_nothing(self):
        run, _ = self.golden()
        before = len(os.listdir(self.connections()))
        for _ in range(20 * TIMES):
            subprocess.run([CKPTFS, run, self.mnt], check=True, timeout=60)
            os.listdir(self.at("latest"))
            subprocess.run(["fusermount3", "-u", self.mnt], check=True)
        wait_until(lambda: subprocess.run(["pgrep", "-f", self.mnt], capture_output=True).returncode != 0, "the daemons' end")
        wait_until(lambda: len(os.listdir(self.connections())) <= before, "the connections' end")

    # ---- steps that come and go ----

    def test_steps_come_and_go_under_finds_and_maps(self):
        run, expected = self.golden()
        want = read(os.path.join(expected, "model.safetensors"))
        numbers, failures, stop = {}, [], threading.Event()

        def find():
            while not stop.is_set():
                subprocess.run(["find", self.mnt, "-type", "f"], capture_output=True, timeout=60)

        def maps():
            while not stop.is_set():
                with open(self.at("10", "model.safetensors"), "rb") as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as p:
                    if bytes(p) != want or numbers.setdefault("10", os.fstat(f.fileno()).st_ino) != os.fstat(f.fileno()).st_ino:
                        failures.append("step 10")

        with self.mount(run) as m:
            threads = [threading.Thread(target=t) for t in (find, maps, maps)]
            for t in threads:
                t.start()
            for k in range(30 * TIMES):
                step = copied(os.path.join(run, "10"), os.path.join(run, str(20 + k)))
                time.sleep(0.05)
                shutil.rmtree(step)
                time.sleep(0.05)
            stop.set()
            for t in threads:
                t.join(60)
                self.assertFalse(t.is_alive())
            self.assertEqual(failures, [])
            self.assertIsNone(m.process.poll())

    # ---- callers that give up ----

    def test_readers_that_are_killed_leave_no_requests(self):
        run, _ = self.big()
        storage = Storage(os.path.join(self.tmp, "storage"))
        self.addCleanup(storage.close)
        with self.mount(run):
            storage.close()
            waiting = os.path.join(self.connections(), str(os.minor(os.stat(self.mnt).st_dev)), "waiting")
            storage.set(DELAY, 30)
            for k in range(30 * TIMES):
                self.drop_pages()
                reader = subprocess.Popen(["cat", self.at("model.safetensors")], stdout=subprocess.DEVNULL)
                time.sleep(0.03)
                reader.send_signal(signal.SIGKILL if k % 2 else signal.SIGINT)
                reader.wait(60)
            storage.set(0)
            wait_until(lambda: int(read(waiting)) == 0, "the requests' end")

    # ---- links ----

    def test_links_that_lead_out_are_refused(self):
        secret = os.path.join(self.tmp, "secret")
        with open(secret, "w") as f:
            f.write("secret")
        os.mkfifo(os.path.join(self.tmp, "fifo"))
        for target in (secret, "/etc/shadow", "/proc/self/mem", "/dev/zero", "../../secret", os.path.join(self.tmp, "fifo"), self.mnt):
            for link in ("config.json", "tokenizer.json", "model.safetensors"):
                with self.subTest(target=target, link=link):
                    run = os.path.join(self.tmp, "links")
                    shutil.rmtree(run, ignore_errors=True)
                    write_model(os.path.join(run, "10"), 7, 10)
                    os.unlink(os.path.join(run, "10", link))
                    os.symlink(target, os.path.join(run, "10", link))
                    with self.mount(run, "-o", "wait"):
                        seen = {os.path.join(d, n): read(os.path.join(d, n)) for d, _, names in os.walk(self.at("10")) for n in names}
                        self.assertFalse([n for n in seen if n.endswith(link)])
                        for name, data in seen.items():
                            self.assertFalse(data.startswith((b"secret", b"root:")), name)

    def test_a_link_that_is_swapped_all_the_time_never_shows_the_secret(self):
        run, _ = self.golden()
        secret, path = os.path.join(self.tmp, "secret"), os.path.join(run, "10", "model_config.json")
        with open(secret, "w") as f:
            f.write('{"secret": true}')
        good, stop = path + ".good", threading.Event()
        shutil.copyfile(path, good)

        def swap():
            while not stop.is_set():
                for target in (secret, good):
                    os.symlink(target, path + ".new")
                    os.replace(path + ".new", path)

        swapper = threading.Thread(target=swap)
        swapper.start()
        try:
            for _ in range(20 * TIMES):
                done = subprocess.run([os.path.join(BUILD, "fs", "ckpt"), "info", run, "--json"], capture_output=True, text=True, timeout=60)
                self.assertNotIn("secret\": true", done.stdout)
                self.assertNotIn("'secret'", done.stdout + done.stderr)
        finally:
            stop.set()
            swapper.join()


if __name__ == "__main__":
    main()
