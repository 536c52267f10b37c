# SPDX-License-Identifier: Apache-2.0
"""What a mount shows and how it reads, on made-up files."""
import concurrent.futures
import ctypes
import ctypes.util
import errno
import json
import mmap
import os
import random
import shutil
import stat
import subprocess
import time
import unittest

from mountlib import GROWTH, Case, Mount, fake_bytes, main, make_step, wait_until

FILES = {"config.json": 1000, "model.safetensors": 3 * 1024 * 1024 + 17, "sub/deep/x.py": 33, "empty": 0}


class Tree(Case):
    def setUp(self):
        super().setUp()
        for step in ("100", "200", "1000"):
            make_step(self.run_dir, step, FILES)

    def test_a_folder_shows_steps_and_latest(self):
        with Mount(self.run_dir, self.mnt):
            self.assertEqual(sorted(os.listdir(self.mnt)), ["100", "1000", "200", "latest"])
            self.assertEqual(os.readlink(self.at("latest")), "1000")
            self.assertEqual(sorted(os.listdir(self.at("latest"))),
                             ["config.json", "empty", "model.safetensors", "sub"])
            self.assertEqual(os.listdir(self.at("100", "sub", "deep")), ["x.py"])

    def test_one_checkpoint_is_the_root(self):
        with Mount(os.path.join(self.run_dir, "100"), self.mnt):
            self.assertEqual(sorted(os.listdir(self.mnt)),
                             ["config.json", "empty", "model.safetensors", "sub"])
            self.assertEqual(open(self.at("config.json"), "rb").read(), fake_bytes("config.json", 0, 1000))

    def test_stat_says_what_is_so(self):
        with Mount(self.run_dir, self.mnt, "-o", "uid=12,gid=34,umask=0027"):
            st = os.stat(self.at("100", "model.safetensors"))
            self.assertEqual(st.st_size, FILES["model.safetensors"])
            self.assertEqual(st.st_blksize, 1 << 20)
            self.assertEqual(st.st_blocks, (st.st_size + 511) // 512)
            self.assertEqual((st.st_uid, st.st_gid), (12, 34))
            self.assertEqual(stat.S_IMODE(st.st_mode), 0o640)
            self.assertEqual(stat.S_IMODE(os.stat(self.at("100")).st_mode), 0o750)
            self.assertEqual(st.st_mtime_ns, os.stat(os.path.join(self.run_dir, "100", "files")).st_mtime_ns)
            for folder in ("", "100", os.path.join("100", "sub"), ".ckptfs"):
                self.assertEqual(os.stat(self.at(folder)).st_nlink, 1)  # unknown: find looks into every folder
                with self.assertRaises(FileNotFoundError):
                    os.stat(self.at(folder, "x" * 255))
                for n in (256, 1000, 2000):
                    with self.assertRaises(OSError) as error:
                        os.stat(self.at(folder, "x" * n))
                    self.assertEqual(error.exception.errno, errno.ENAMETOOLONG, (folder, n))
            with self.assertRaises(FileNotFoundError):
                os.stat(self.at("100", "nothing"))
            with self.assertRaises(FileNotFoundError):
                os.stat(self.at("nothing"))

    def test_numbers_and_times_survive_a_remount_and_a_forget(self):
        def look():
            return {os.path.join(d, n): (lambda s: (s.st_ino, s.st_mtime_ns, s.st_size))(os.lstat(os.path.join(d, n)))
                    for d, subs, names in os.walk(self.mnt) for n in subs + names}

        with Mount(self.run_dir, self.mnt):
            first = look()
            by_readdir = {e.path: e.inode() for e in os.scandir(self.at("100"))}
            if os.geteuid() == 0:
                with open("/proc/sys/vm/drop_caches", "w") as f:
                    f.write("2")
            self.assertEqual(look(), first)
        for path, ino in by_readdir.items():
            self.assertEqual(first[path][0], ino)
        self.assertEqual(len({v[0] for v in first.values()}), len(first))
        with Mount(self.run_dir, self.mnt):
            self.assertEqual(look(), first)

    def test_any_range_reads_the_same(self):
        name, size = "model.safetensors", FILES["model.safetensors"]
        want = fake_bytes(name, 0, size)
        rng = random.Random(1)
        with Mount(self.run_dir, self.mnt):
            path = self.at("200", name)
            with open(path, "rb") as f:
                self.assertEqual(f.read(), want)
            fd = os.open(path, os.O_RDONLY)
            for _ in range(200):
                off = rng.choice([0, 1, size - 1, size, size + 5, rng.randrange(size), rng.randrange(size) & ~4095])
                n = rng.choice([0, 1, 4095, 4096, 1 << 20, rng.randrange(1 << 20)])
                self.assertEqual(os.pread(fd, n, off), want[off:off + n])
            os.close(fd)
            with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as m:
                self.assertEqual(m[:], want)
            shutil.copyfile(path, os.path.join(self.tmp, "copy"))  # sendfile
            self.assertEqual(open(os.path.join(self.tmp, "copy"), "rb").read(), want)
            subprocess.run(["cmp", path, os.path.join(self.tmp, "copy")], check=True)
            fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
            buf = mmap.mmap(-1, 1 << 20)
            got = b""
            while n := os.preadv(fd, [buf], len(got)):
                got += buf[:n]
            os.close(fd)
            self.assertEqual(got, want)

    def test_sixteen_readers_at_once(self):
        name, size = "model.safetensors", FILES["model.safetensors"]
        want = fake_bytes(name, 0, size)

        def read(k):
            rng = random.Random(k)
            fd = os.open(self.at(("100", "200", "1000")[k % 3], name), os.O_RDONLY)
            good = True
            for _ in range(40):
                off = rng.randrange(size)
                good = good and os.pread(fd, 70000, off) == want[off:off + 70000]
            os.close(fd)
            return good

        with Mount(self.run_dir, self.mnt, "-o", "threads=16"):
            with concurrent.futures.ThreadPoolExecutor(16) as pool:
                self.assertTrue(all(pool.map(read, range(16))))

    def test_every_change_is_refused(self):
        libc = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)
        with Mount(self.run_dir, self.mnt):
            f, d = self.at("100", "config.json"), self.at("100")
            tries = {
                "open w": lambda: os.open(f, os.O_WRONLY),
                "open rw": lambda: os.open(f, os.O_RDWR),
                "open trunc": lambda: os.open(f, os.O_RDONLY | os.O_TRUNC),
                "create": lambda: os.open(d + "/new", os.O_CREAT | os.O_WRONLY),
                "truncate": lambda: os.truncate(f, 0),
                "chmod": lambda: os.chmod(f, 0o777),
                "chown": lambda: os.chown(f, 1, 1),
                "utime": lambda: os.utime(f),
                "unlink": lambda: os.unlink(f),
                "rmdir": lambda: os.rmdir(d),
                "mkdir": lambda: os.mkdir(d + "/new"),
                "mknod": lambda: os.mknod(d + "/new"),
                "mkfifo": lambda: os.mkfifo(d + "/new"),
                "rename": lambda: os.rename(f, d + "/new"),
                "link": lambda: os.link(f, d + "/new"),
                "symlink": lambda: os.symlink("x", d + "/new"),
                "setxattr": lambda: os.setxattr(f, "user.x", b"1"),
                "removexattr": lambda: os.removexattr(f, "user.x"),
                "access w": lambda: os.access(f, os.W_OK) or self.fail_with(errno.EROFS),
            }
            for what, change in tries.items():
                with self.assertRaises(OSError, msg=what) as caught:
                    change()
                self.assertEqual(caught.exception.errno, errno.EROFS, what)
            fd = os.open(f, os.O_RDONLY)
            self.assertNotEqual(libc.fallocate(fd, 0, 0, 1), 0)
            os.close(fd)
            self.assertEqual(open(f, "rb").read(), fake_bytes("config.json", 0, 1000))

    @staticmethod
    def fail_with(code):
        raise OSError(code, os.strerror(code))

    def test_statfs_attributes_and_the_control_directory(self):
        with Mount(self.run_dir, self.mnt):
            st = os.statvfs(self.mnt)
            self.assertEqual((st.f_bfree, st.f_bavail), (0, 0))
            self.assertEqual(st.f_blocks, (sum(FILES.values()) + 4095) // 4096)
            f = self.at("100", "config.json")
            self.assertEqual(os.listxattr(f), ["user.ckptfs.source"])
            self.assertEqual(os.getxattr(f, "user.ckptfs.source"), b"fake 1, step 0")
            self.assertEqual(os.getxattr(self.at("100"), "user.ckptfs.source"), b"fake 1, step 0")
            with self.assertRaises(OSError) as caught:
                os.getxattr(f, "user.other")
            self.assertEqual(caught.exception.errno, errno.ENODATA)
            self.assertNotIn(".ckptfs", os.listdir(self.mnt))
            before = json.load(open(self.at(".ckptfs", "stats.json")))
            open(f, "rb").read()
            after = json.load(open(self.at(".ckptfs", "stats.json")))
            self.assertGreater(after["mount"]["bytes"], before["mount"]["bytes"])
            self.assertEqual(os.listdir(self.at(".ckptfs")), ["stats.json", "stats.prom"])
            with self.assertRaises(FileNotFoundError):
                open(self.at(".ckptfs", "other"))

    def test_a_broken_step_says_why(self):
        make_step(self.run_dir, "300", FILES, error="shard 7 is missing")
        with Mount(self.run_dir, self.mnt):
            self.assertEqual(os.listdir(self.at("300")), ["CKPTFS-ERROR.txt"])
            self.assertIn("shard 7 is missing", open(self.at("300", "CKPTFS-ERROR.txt")).read())
            with self.assertRaises(FileNotFoundError):
                os.stat(self.at("300", "config.json"))
            os.unlink(os.path.join(self.run_dir, "300", "error"))
            wait_until(lambda: "config.json" in os.listdir(self.at("300")), "the step becoming readable")
            wait_until(lambda: os.path.exists(self.at("300", "config.json")), "its files appearing")

    def test_steps_come_and_go_and_are_saved_again(self):
        with Mount(self.run_dir, self.mnt):
            make_step(self.run_dir, "2000", FILES)
            wait_until(lambda: "2000" in os.listdir(self.mnt), "the new step")
            wait_until(lambda: os.readlink(self.at("latest")) == "2000", "latest")
            shutil.rmtree(os.path.join(self.run_dir, "100"))
            wait_until(lambda: not os.path.exists(self.at("100")), "the step going")
            old = os.stat(self.at("200", "config.json"))
            held = open(self.at("200", "config.json"), "rb")
            time.sleep(0.01)
            make_step(self.run_dir, "200", {"config.json": 500, "added": 3})
            wait_until(lambda: os.stat(self.at("200", "config.json")).st_size == 500, "the new generation")
            self.assertNotEqual(os.stat(self.at("200", "config.json")).st_ino, old.st_ino)
            self.assertEqual(sorted(os.listdir(self.at("200"))), ["added", "config.json"])
            self.assertEqual(held.read(), fake_bytes("config.json", 0, 1000))
            held.close()

    def test_a_single_checkpoint_saved_again_shows_the_new(self):
        step = os.path.join(self.run_dir, "200")
        with Mount(step, self.mnt):
            self.assertEqual(os.stat(self.at("config.json")).st_size, 1000)
            time.sleep(0.01)
            make_step(self.run_dir, "200", {"config.json": 500})
            wait_until(lambda: os.stat(self.at("config.json")).st_size == 500, "the new generation")
            wait_until(lambda: os.listdir(self.mnt) == ["config.json"], "the new listing")

    def test_listing_a_run_opens_no_step(self):
        for k in range(20):
            make_step(self.run_dir, str(5000 + k), FILES, open_ms=3000)
        make_step(self.run_dir, "9000", FILES)
        with Mount(self.run_dir, self.mnt):
            begin = time.monotonic()
            for name in os.listdir(self.mnt):
                os.stat(self.at(name), follow_symlinks=False)
            subprocess.run(["ls", "-l", self.mnt], check=True, stdout=subprocess.DEVNULL)
            self.assertLess(time.monotonic() - begin, 1.5)

    def test_a_slow_step_does_not_stop_the_others(self):
        make_step(self.run_dir, "300", FILES, open_ms=2500)
        with Mount(self.run_dir, self.mnt):
            slow = subprocess.Popen(["ls", self.at("300")], stdout=subprocess.DEVNULL)
            time.sleep(0.2)
            begin = time.monotonic()
            self.assertEqual(len(open(self.at("100", "config.json"), "rb").read()), 1000)
            os.listdir(self.mnt)
            self.assertLess(time.monotonic() - begin, 1)
            self.assertIsNone(slow.poll())
            self.assertEqual(slow.wait(60), 0)

    def test_a_bad_shard_fails_the_reads_concerned_and_nothing_else(self):
        make_step(self.run_dir, "400", FILES, fault=2 * 1024 * 1024 + 5)
        with Mount(self.run_dir, self.mnt) as m:
            fd = os.open(self.at("400", "model.safetensors"), os.O_RDONLY)
            self.assertEqual(os.pread(fd, 4096, 0), fake_bytes("model.safetensors", 0, 4096))
            for _ in range(3):
                with self.assertRaises(OSError) as caught:
                    os.pread(fd, 4096, 2 * 1024 * 1024)
                self.assertEqual(caught.exception.errno, errno.EIO)
            self.assertEqual(os.fstat(fd).st_size, FILES["model.safetensors"])
            os.unlink(os.path.join(self.run_dir, "400", "fault"))
            self.assertEqual(os.pread(fd, 4096, 2 * 1024 * 1024), fake_bytes("model.safetensors", 2 << 20, 4096))
            os.close(fd)
            self.assertEqual(m.text().count("shard went bad"), 1)

    def test_null_reads_are_constant_and_complete(self):
        with Mount(self.run_dir, self.mnt, "-o", "null"):
            data = open(self.at("100", "model.safetensors"), "rb").read()
            self.assertEqual(len(data), FILES["model.safetensors"])
            self.assertEqual(len(set(data)), 1)

    def test_direct_io_reads_the_same(self):
        with Mount(self.run_dir, self.mnt, "-o", "io=direct"):
            path = self.at("100", "model.safetensors")
            want = fake_bytes("model.safetensors", 0, FILES["model.safetensors"])
            self.assertEqual(open(path, "rb").read(), want)
            with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as m:
                self.assertEqual(m[:], want)

    def test_a_find_through_many_steps_keeps_no_views(self):
        for k in range(100):
            make_step(self.run_dir, str(20000 + k), FILES)
        with Mount(self.run_dir, self.mnt) as m:
            def resident():
                with open(f"/proc/{m.process.pid}/statm") as f:
                    return int(f.read().split()[1]) * os.sysconf("SC_PAGESIZE")

            subprocess.run(["find", self.mnt, "-ls"], check=True, stdout=subprocess.DEVNULL)
            before = resident()
            for _ in range(3):
                subprocess.run(["find", self.mnt, "-ls"], check=True, stdout=subprocess.DEVNULL)
            self.assertLess(resident() - before, GROWTH)


if __name__ == "__main__":
    main()
