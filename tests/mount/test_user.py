# SPDX-License-Identifier: Apache-2.0
"""An ordinary user's mount, and mount(8)'s helper. Started by root it makes its own /dev/fuse that users may open, where nobody else sees it."""
import os
import shutil
import stat
import subprocess
import sys
import time
import unittest

from mountlib import FAKE, SOURCE, Case, main, make_step, mounted, wait_until

NOBODY = 65534
HELPER = os.path.join(SOURCE, "contrib", "mount.fuse.ckptfs")


def enter_namespace():
    """Run this script again in a mount namespace of its own, with a /dev/fuse of mode 0666 as udev makes it."""
    if os.geteuid() != 0 or os.environ.get("CKPTFS_TEST_NAMESPACE"):
        return
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        print("skipped: no mount namespace of our own (a chroot?)")
        sys.exit(77)
    os.environ["CKPTFS_TEST_NAMESPACE"] = "1"
    script = ('d=$(mktemp -d) && mount -t tmpfs tmpfs "$d" && mknod -m 0666 "$d/fuse" c 10 229 && '
              'mount --bind "$d/fuse" /dev/fuse && exec "$@"')
    os.execvp("unshare", ["unshare", "-m", "sh", "-c", script, "sh", sys.executable, *sys.argv])


def as_user(*args, **kw):
    if os.geteuid() == 0:
        args = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *args)
    return subprocess.run(args, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL, **kw)


class User(Case):
    def setUp(self):
        super().setUp()
        make_step(self.run_dir, "100", {"config.json": 1000})
        # where programs of another user can be reached: the build may lie below a private directory
        self.program = shutil.copy(FAKE, os.path.join(self.tmp, "ckptfs"))
        os.chmod(self.tmp, 0o755)
        if os.geteuid() == 0:
            os.chown(self.mnt, NOBODY, NOBODY)

    def test_everything_works_without_privileges(self):
        done = as_user(self.program, self.run_dir, self.mnt)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(mounted(self.mnt), "fuse.ckptfs")
        self.assertEqual(as_user("wc", "-c", self.at("100", "config.json")).stdout.split()[0], "1000")
        st = as_user("stat", "-c", "%U %a", self.at("100", "config.json")).stdout.split()
        self.assertEqual(st[1], "644")
        if os.geteuid() == 0: # others are kept out, even root
            with self.assertRaises(PermissionError):
                os.listdir(self.mnt)
        self.assertEqual(as_user("fusermount3", "-u", self.mnt).returncode, 0)
        self.assertIsNone(mounted(self.mnt))

    def test_a_copy_belongs_to_who_makes_it(self):
        """What the README teaches: the copy can be changed and deleted; the mount itself cannot."""
        own = os.path.join(self.tmp, "own")
        os.mkdir(own)
        os.chmod(own, 0o777)
        self.assertEqual(as_user(self.program, self.run_dir, self.mnt).returncode, 0)
        for command in (["cp", "-r", self.at("100"), own + "/model"], ["touch", own + "/model/new"], ["truncate", "-s", "1", own + "/model/config.json"],
                        ["rm", own + "/model/config.json"], ["rm", "-r", own + "/model"]):
            done = as_user(*command)
            self.assertEqual((done.returncode, done.stderr), (0, ""), command)
        self.assertIn("Read-only file system", as_user("touch", self.at("100", "new")).stderr)
        self.assertEqual(as_user("fusermount3", "-u", self.mnt).returncode, 0)

    def test_a_signal_unmounts(self):
        done = as_user(self.program, self.run_dir, self.mnt)
        self.assertEqual(done.returncode, 0, done.stderr)
        pid = as_user("pgrep", "-f", f"{self.program} {self.run_dir} {self.mnt}").stdout.split()
        self.assertEqual(len(pid), 1)
        self.assertEqual(as_user("kill", pid[0]).returncode, 0)
        wait_until(lambda: not mounted(self.mnt), "the unmount")

    def test_a_stale_mount_is_replaced(self):
        self.assertEqual(as_user(self.program, self.run_dir, self.mnt).returncode, 0)
        pid = as_user("pgrep", "-f", f"{self.program} {self.run_dir} {self.mnt}").stdout.split()
        as_user("kill", "-9", pid[0])
        time.sleep(0.2)
        done = as_user(self.program, self.run_dir, self.mnt)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(as_user("ls", self.at("100")).stdout, "config.json\n")
        as_user("fusermount3", "-u", self.mnt)
        self.assertIsNone(mounted(self.mnt))

    def test_d_prints_the_command_that_makes_it_faster(self):
        with open(os.path.join(self.tmp, "log"), "w+") as log:
            args = [self.program, self.run_dir, self.mnt, "-d"]
            if os.geteuid() == 0:
                args = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *args]
            p = subprocess.Popen(args, stderr=log)
            wait_until(lambda: mounted(self.mnt), "mounting")
            time.sleep(0.2)
            p.terminate()
            self.assertEqual(p.wait(60), 0)
            log.seek(0)
            self.assertRegex(log.read(), r"echo 2048 \| sudo tee /sys/class/bdi/\d+:\d+/read_ahead_kb")

    def test_an_error_is_an_error(self):
        done = as_user(self.program, "/nonexistent", self.mnt)
        self.assertEqual(done.returncode, 1)
        self.assertIn("/nonexistent", done.stderr)

    def test_the_helper_of_mount(self):
        if os.geteuid() != 0:
            self.skipTest("mount(8) needs root")
        env = dict(os.environ, PATH=self.tmp + ":" + os.environ["PATH"])
        done = subprocess.run([HELPER, self.run_dir, self.mnt, "-n", "-o", "rw,allow_other,noauto"], env=env,
                              capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(as_user("ls", self.at("100")).stdout, "config.json\n")
        subprocess.run(["umount", self.mnt], check=True)
        self.assertEqual(subprocess.run([HELPER, "/nonexistent", self.mnt], env=env, stderr=subprocess.DEVNULL).returncode, 32)
        self.assertEqual(subprocess.run([HELPER, self.run_dir, self.mnt, "-o", "bogus"], env=env,
                                        stderr=subprocess.DEVNULL).returncode, 1)

    def test_mount_t_fuse_ckptfs(self):
        """mount(8) itself, with the helper laid over /sbin (only here)."""
        sbin = os.path.realpath("/sbin")
        upper = os.path.join(self.tmp, "upper")
        if os.geteuid() != 0 or os.environ.get("CKPTFS_TEST_NAMESPACE") != "1":
            self.skipTest("needs root and a mount namespace")
        os.mkdir(upper)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", upper], check=True)
        os.mkdir(upper + "/u")
        os.mkdir(upper + "/w")
        if subprocess.run(["mount", "-t", "overlay", "overlay", "-o", f"lowerdir={sbin},upperdir={upper}/u,workdir={upper}/w",
                           sbin], stderr=subprocess.DEVNULL).returncode:
            subprocess.run(["umount", upper])
            self.skipTest("no overlayfs")
        try:
            shutil.copy(HELPER, sbin + "/mount.fuse.ckptfs")
            shutil.copy(self.program, sbin + "/ckptfs")
            done = subprocess.run(["mount", "-t", "fuse.ckptfs", self.run_dir, self.mnt, "-o", "allow_other,nofail"],
                                  capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(as_user("ls", self.at("100")).stdout, "config.json\n")
            subprocess.run(["umount", self.mnt], check=True)
        finally:
            subprocess.run(["umount", "-l", sbin])
            subprocess.run(["umount", "-l", upper])


if __name__ == "__main__":
    enter_namespace()
    helper = shutil.which("fusermount3")
    if not helper or not os.stat(helper).st_mode & stat.S_ISUID:
        print("no set-user-id fusermount3")
        sys.exit(77)
    main()
