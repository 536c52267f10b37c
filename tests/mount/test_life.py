# SPDX-License-Identifier: Apache-2.0
"""Starting, ending, dying and being started again, on made-up files."""
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
import unittest

from mountlib import GROWTH, FAKE, Case, Mount, fake_bytes, main, make_step, mounted, wait_until

FILES = {"config.json": 1000, "model.safetensors": 3 * 1024 * 1024 + 17}


def run(*args):
    return subprocess.run([FAKE, *args], capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL)


class Life(Case):
    def setUp(self):
        super().setUp()
        make_step(self.run_dir, "100", FILES)

    def daemon_pids(self):
        me = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as f:
                    if self.mnt.encode() in f.read().split(b"\0"):
                        me.append(int(pid))
            except OSError:
                pass
        return me

    def test_the_daemon_is_up_when_the_command_returns(self):
        done = run(self.run_dir, self.mnt)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(mounted(self.mnt), "fuse.ckptfs")
        self.assertEqual(len(open(self.at("100", "config.json"), "rb").read()), 1000)
        with open("/proc/self/mountinfo", errors="surrogateescape") as f:
            line = next(x for x in f if f" {self.mnt} " in x)
        for word in ("ro", "nosuid", "nodev"):
            self.assertIn(word, line.split()[5].split(","))
        self.assertEqual(line.split(" - ")[1].split()[1], self.run_dir)
        subprocess.run(["fusermount3", "-u", self.mnt], check=True)
        wait_until(lambda: not self.daemon_pids(), "the daemon ending")
        self.assertIsNone(mounted(self.mnt))

    def test_a_path_that_is_not_utf8_has_statistics(self):
        odd = os.fsdecode(os.fsencode(self.tmp) + b"/r\xff un")
        make_step(odd, "100", FILES)
        with Mount(odd, self.mnt):
            with open(self.at(".ckptfs", "stats.json")) as f:
                self.assertTrue(json.load(f)["run"].endswith("/r\\xff un"))

    def test_read_ahead_is_raised_before_the_command_returns(self):
        if os.geteuid() != 0 or not os.access("/sys/class/bdi", os.W_OK):
            self.skipTest("only root may, and only where /sys is")
        self.assertEqual(run(self.run_dir, self.mnt, "-o", "readahead=4096").returncode, 0)
        with open("/proc/self/mountinfo", errors="surrogateescape") as f:
            dev = next(x for x in f if f" {self.mnt} " in x).split()[2]
        with open(f"/sys/class/bdi/{dev}/read_ahead_kb") as f:
            self.assertEqual(int(f.read()), 4096)

    def test_errors_reach_the_terminal_with_a_status(self):
        empty = os.path.join(self.tmp, "empty")
        os.mkdir(empty)
        broken = os.path.join(self.tmp, "broken")
        os.mkdir(broken)
        make_step(broken, "7", FILES, error="shard 7 is missing")
        plain = os.path.join(self.tmp, "plain")
        open(plain, "w").close()
        for status, words, args in (
                (1, "neither a checkpoint", [empty, self.mnt]),
                (1, "shard 7 is missing", [broken, self.mnt]),
                (1, "No such file", [self.tmp + "/absent", self.mnt]),
                (1, "No such file", [self.run_dir, self.tmp + "/absent"]),
                (2, "not a directory", [self.run_dir, plain]),
                (2, "missing arguments: usage: ckptfs RUN MOUNTPOINT", [self.run_dir]),
                (2, "too many", [self.run_dir, self.mnt, "x"]),
                (2, "no such option (", [self.run_dir, self.mnt, "-o", "bogus"]),
                (2, "did you mean --readahead", [self.run_dir, self.mnt, "-o", "readahed=1"]),
                (2, "no such option", [self.run_dir, self.mnt, "-x"]),
                (2, "not understood", [self.run_dir, self.mnt, "-o", "dtype=bogus"]),
                (2, "not a number from", [self.run_dir, self.mnt, "-o", "threads=many"]),
                (2, "octal", [self.run_dir, self.mnt, "-o", "umask=9"]),
                (2, "buffered|direct", [self.run_dir, self.mnt, "-o", "io=odd"]),
                (2, "always", [self.run_dir, self.mnt, "-o", "suid"]),
        ):
            for foreground in ([], ["-f"]):
                done = run(*args, *foreground)
                self.assertEqual(done.returncode, status, (args, done.stderr))
                self.assertIn(words, done.stderr)
                self.assertIsNone(mounted(self.mnt))
        self.assertEqual(self.daemon_pids(), [])

    def test_words_that_mount_and_fuse_know_are_accepted(self):
        words = ("rw,ro,nosuid,nodev,defaults,noauto,user,_netdev,nofail,x-systemd.automount,noexec,noatime,"
                 "async,sync,relatime,nodiratime,default_permissions,base=a\\,b")
        self.assertEqual(run(self.run_dir, self.mnt, "-o", words, "-o", "threads=3").returncode, 0)
        self.assertEqual(mounted(self.mnt), "fuse.ckptfs")

    def test_help_and_version(self):
        self.assertEqual(run("-h").returncode, 0)
        self.assertIn("MOUNTPOINT", run("--help").stdout)
        self.assertIn("libfuse", run("-V").stdout)

    def test_a_comma_in_the_path_is_no_option(self):
        odd = os.path.join(self.tmp, "a,b \\c")
        os.rename(self.run_dir, odd)
        mnt = os.path.join(self.tmp, "m,n o")
        os.mkdir(mnt)
        with Mount(odd, mnt):
            with open("/proc/self/mounts", errors="surrogateescape") as f:
                self.assertIn("a,b\\040\\134c", f.read())
            self.assertEqual(os.listdir(mnt + "/100"), sorted(FILES))

    def test_run_and_mountpoint_may_not_be_knotted(self):
        inside = os.path.join(self.run_dir, "mnt")
        os.mkdir(inside)
        for args in ((self.run_dir, inside), (self.run_dir, self.run_dir), (self.run_dir, self.tmp)):
            done = run(*args)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIsNone(mounted(args[1]))

    def test_a_live_mount_is_not_mounted_over(self):
        with Mount(self.run_dir, self.mnt):
            done = run(self.run_dir, self.mnt)
            self.assertEqual(done.returncode, 1)
            self.assertIn("already", done.stderr)

    def test_whoever_may_open_the_mountpoint_cannot_keep_it_from_being_mounted(self):
        fd = os.open(self.mnt, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            with Mount(self.run_dir, self.mnt):
                self.assertEqual(os.listdir(self.mnt + "/100"), sorted(FILES))
        finally:
            os.close(fd)

    def test_sigterm_ends_it_while_readers_run(self):
        for sig in (signal.SIGTERM, signal.SIGINT):
            m = Mount(self.run_dir, self.mnt)
            stop = threading.Event()

            def read():
                while not stop.is_set():
                    try:
                        with open(self.at("100", "model.safetensors"), "rb", buffering=0) as f:
                            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                            while f.read(65536):
                                pass
                    except OSError:
                        return

            readers = [threading.Thread(target=read) for _ in range(16)]
            for r in readers:
                r.start()
            time.sleep(0.3)
            self.assertEqual(m.end(sig), 0, m.text())
            stop.set()
            for r in readers:
                r.join(10)
            self.assertIsNone(mounted(self.mnt))

    def test_sigterm_is_obeyed_while_storage_hangs(self):
        make_step(self.run_dir, "200", FILES, read_ms=60000)
        m = Mount(self.run_dir, self.mnt)
        reader = subprocess.Popen(["cat", self.at("200", "config.json")], stdout=subprocess.DEVNULL,
                                  stderr=subprocess.DEVNULL)
        time.sleep(0.3)
        self.assertEqual(m.end(), 0)
        self.assertNotEqual(reader.wait(10), 0)
        self.assertIsNone(mounted(self.mnt))

    def test_a_hung_step_or_file_stops_nothing_else(self):
        """Forty callers wait for one step that does not open, forty for one file of which no read returns."""
        make_step(self.run_dir, "200", FILES, open_ms=60000)
        make_step(self.run_dir, "300", FILES, read_ms=60000)

        def callers(*args):
            return [subprocess.Popen(args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for _ in range(40)]

        def waiting():
            with open(self.at(".ckptfs", "stats.json")) as f:
                return json.load(f)["mount"]["waiting"]

        m = Mount(self.run_dir, self.mnt)
        openers = callers("ls", self.at("200"))
        wait_until(lambda: waiting() == 39, "all but one to be queued", 60)
        readers = callers("dd", "if=" + self.at("300", "model.safetensors"), "iflag=direct", "bs=4096", "count=1")
        wait_until(lambda: waiting() == 39 + 32, "all but eight to be queued", 60)
        for name in ("config.json", "model.safetensors"):
            done = subprocess.run(["cat", self.at("100", name)], capture_output=True, timeout=20)
            self.assertEqual(done.stdout, fake_bytes(name, 0, FILES[name]))
        self.assertEqual(subprocess.run(["ls", self.mnt, self.at("300")], capture_output=True, timeout=20).returncode, 0)
        self.assertTrue(all(p.poll() is None for p in openers + readers))
        for p in openers:
            p.kill()
        wait_until(lambda: sum(p.poll() is None for p in openers) == 1, "all killed callers to be gone whose requests were queued", 30)
        self.assertEqual(waiting(), 32)
        self.assertEqual(m.end(), 0)
        for p in openers + readers:
            p.wait(20)

    def test_a_connection_that_ends_while_storage_hangs_ends_the_daemon(self):
        make_step(self.run_dir, "200", FILES, read_ms=600000)

        control = os.path.join(self.tmp, "control")
        os.mkdir(control)

        def abort(m):
            with open("/proc/self/mountinfo", errors="surrogateescape") as f:
                minor = next(x for x in f if f" {self.mnt} " in x).split()[2].split(":")[1]
            subprocess.run(["mount", "-t", "fusectl", "fusectl", control], check=True)
            try:
                with open(os.path.join(control, minor, "abort"), "w") as f:
                    f.write("1")
            finally:
                subprocess.run(["umount", control], check=True)

        def detach(m):
            subprocess.run(["fusermount3", "-u", "-z", self.mnt], check=True)

        for way in [detach] + [abort] * (os.geteuid() == 0):  # only root may abort
            m = Mount(self.run_dir, self.mnt)
            reader = subprocess.Popen(["cat", self.at("200", "config.json")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            time.sleep(0.3)
            way(m)
            if way is detach:  # the connection lasts as long as somebody uses it
                reader.kill()
            m.process.wait(40)
            reader.wait(20)
            subprocess.run(["fusermount3", "-u", "-z", "-q", self.mnt])
            self.assertIsNone(mounted(self.mnt))

    def test_one_of_several_that_are_started_at_once_mounts(self):
        for _ in range(3):
            started = [subprocess.Popen([FAKE, self.run_dir, self.mnt], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
                       for _ in range(6)]
            done = [(p.communicate(timeout=60)[1], p.returncode) for p in started]
            self.assertEqual(sorted(status for _, status in done), [0] + [1] * 5, done)
            with open("/proc/self/mountinfo", errors="surrogateescape") as f:
                self.assertEqual(sum(f" {self.mnt} " in line for line in f), 1)
            subprocess.run(["fusermount3", "-u", self.mnt], check=True)
            wait_until(lambda: not self.daemon_pids(), "the daemon ending")

    def test_a_killed_reader_does_not_wait_for_a_stopped_daemon(self):
        m = Mount(self.run_dir, self.mnt)
        script = "import sys, time; f = open(sys.argv[1], 'rb'); f.read(10); print('open', flush=True); time.sleep(600)"
        reader = subprocess.Popen([sys.executable, "-c", script, self.at("100", "config.json")], stdout=subprocess.PIPE)
        reader.stdout.readline()
        m.process.send_signal(signal.SIGSTOP)
        try:
            reader.kill()
            reader.wait(10)
        finally:
            m.process.send_signal(signal.SIGCONT)
        self.assertEqual(m.end(), 0)

    def test_a_killed_daemon_leaves_what_fusermount_cleans(self):
        m = Mount(self.run_dir, self.mnt)
        m.end(signal.SIGKILL)
        with self.assertRaises(OSError):
            os.listdir(self.mnt)
        subprocess.run(["fusermount3", "-u", self.mnt], check=True)
        self.assertIsNone(mounted(self.mnt))

    def test_a_stale_mount_is_replaced(self):
        for _ in range(3):
            m = Mount(self.run_dir, self.mnt)
            os.stat(self.mnt)  # the kernel remembers the answer for a second
            m.end(signal.SIGKILL)
            self.assertEqual(mounted(self.mnt), "fuse.ckptfs")
            self.assertEqual(run(self.run_dir, self.mnt + "/").returncode, 0)
            self.assertEqual(os.listdir(self.mnt), ["100", "latest"])
            subprocess.run(["fusermount3", "-u", self.mnt], check=True)
            self.assertIsNone(mounted(self.mnt))
            wait_until(lambda: not self.daemon_pids(), "the daemon ending")

    def test_sighup_rescans_and_sigusr1_reports(self):
        with Mount(self.run_dir, self.mnt) as m:
            open(self.at("100", "config.json"), "rb").read()
            m.process.send_signal(signal.SIGUSR1)
            wait_until(lambda: "reads," in m.text(), "the report")
            make_step(self.run_dir, "200", FILES)
            m.process.send_signal(signal.SIGHUP)
            time.sleep(0.2)
            self.assertIn("200", os.listdir(self.mnt))

    def test_wait_mounts_before_the_first_step(self):
        empty = os.path.join(self.tmp, "later")
        with Mount(empty, self.mnt, "-o", "wait"):
            self.assertEqual(os.listdir(self.mnt), [])
            os.mkdir(empty)
            make_step(empty, "10", FILES)
            wait_until(lambda: os.listdir(self.mnt) == ["10", "latest"], "the first step")
            wait_until(lambda: os.path.exists(self.at("latest", "config.json")), "its files")

    def test_wait_shows_why_a_step_can_not_be_read(self):
        make_step(self.run_dir, "100", FILES, error="half written")
        with Mount(self.run_dir, self.mnt, "-o", "wait"):
            self.assertIn("half written", open(self.at("latest", "CKPTFS-ERROR.txt")).read())

    def test_root_gives_up_its_privileges(self):
        if os.geteuid() != 0:
            self.skipTest("not root")
        with Mount(self.run_dir, self.mnt) as m:
            with open(f"/proc/{m.process.pid}/status") as f:
                status = dict(line.rstrip("\n").split(":\t", 1) for line in f if ":\t" in line)
            self.assertEqual(int(status["CapEff"], 16), 1 << 2)
            self.assertEqual(int(status["CapPrm"], 16) & ~(1 << 2), 0)
            self.assertEqual(status["NoNewPrivs"].strip(), "1")

    def test_descriptors_and_memory_are_flat_over_many_opens(self):
        with Mount(self.run_dir, self.mnt) as m:
            def count():
                return len(os.listdir(f"/proc/{m.process.pid}/fd"))

            def resident():
                with open(f"/proc/{m.process.pid}/statm") as f:
                    return int(f.read().split()[1]) * os.sysconf("SC_PAGESIZE")

            for _ in range(100):
                open(self.at("100", "config.json"), "rb").read()
            fds, rss = count(), resident()
            for _ in range(1000):
                open(self.at("100", "config.json"), "rb").read()
            self.assertLessEqual(count(), fds + 2)
            self.assertLess(resident() - rss, 2 * GROWTH)


if __name__ == "__main__":
    main()
