# SPDX-License-Identifier: Apache-2.0
"""The daemon's sandbox: what an exploit does first fails, what a mount needs works, and who meets a rule is told so."""

import io
import json
import os
import shutil
import subprocess
import tarfile

from mountlib import BUILD, CKPTFS, Case, Mount, main, mounted, wait_until

PROBE = os.path.join(BUILD, "tests", "sandbox_probe")
GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "golden", "nanotron", "llama_tp2_pp2_tied")
ALLOWED = {"read the run", "start a thread"}
# The tests' build looks for leaks at exit, by a process that traces the one that ends.
TRACED = {"make a process", "trace", "kill", "read its own memory"} if "address" in os.environ.get("CKPTFS_SANITIZE", "") else set()


def step_of(run):
    return shutil.copytree(os.path.join(GOLDEN, "10"), run, copy_function=shutil.copyfile)


class Sandbox(Case):
    def kernel_has_it(self):
        with Mount(self.real_run(), self.mnt, program=CKPTFS):
            return self.settings()["sandbox"].startswith("landlock") and "seccomp" in self.settings()["sandbox"]

    def settings(self):
        with open(os.path.join(self.mnt, ".ckptfs", "stats.json")) as f:
            return json.load(f)["settings"]

    def real_run(self, name="real"):
        run = os.path.join(self.tmp, name)
        if not os.path.exists(run):
            shutil.copytree(GOLDEN, run, copy_function=shutil.copyfile)
        return run

    def setUp(self):
        super().setUp()
        if not self.kernel_has_it():
            self.skipTest("this kernel has no Landlock or no seccomp")

    def test_the_first_steps_of_an_exploit_fail(self):
        inside, outside = os.path.join(self.run_dir, "shard"), os.path.join(self.tmp, "secret")
        for path in (inside, outside):
            with open(path, "w") as f:
                f.write("text")
        done = subprocess.run([PROBE, self.run_dir, inside, outside], capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = dict(line.split(": ", 1) for line in done.stdout.splitlines()[1:])
        self.assertGreaterEqual(len(lines), 20)
        for what, result in lines.items():
            if what not in TRACED:
                self.assertEqual(result, "done" if what in ALLOWED else "refused", what)

    def test_sandbox_no_turns_it_off(self):
        with Mount(self.real_run(), self.mnt, "-o", "sandbox=no", program=CKPTFS) as m:
            self.assertEqual(self.settings()["sandbox"], "none")
            with open(f"/proc/{m.process.pid}/status") as f:
                self.assertIn("Seccomp:\t0", f.read())

    def test_a_wrong_word_is_refused(self):
        done = subprocess.run([CKPTFS, self.real_run(), self.mnt, "-o", "sandbox=maybe"], capture_output=True, text=True)
        self.assertEqual(done.returncode, 2)
        self.assertIn("yes or no", done.stderr)

    def test_a_step_that_comes_later_is_read(self):
        run = self.real_run()
        with Mount(run, self.mnt, program=CKPTFS):
            step_of(os.path.join(run, "20"))
            wait_until(lambda: "20" in os.listdir(self.mnt), "the step")
            with open(os.path.join(self.mnt, "20", "model.safetensors"), "rb") as f:
                self.assertGreater(len(f.read()), 1000)

    def test_the_checkpoint_above_a_folder_of_weights_is_read(self):
        run = shutil.copytree(os.path.join(GOLDEN, "..", "..", "megatron", "n16_llama_tp2", "run"), os.path.join(self.tmp, "nemo"))
        with Mount(os.path.join(run, "weights"), self.mnt, program=CKPTFS):
            self.assertTrue({"config.json", "tokenizer.json"} <= set(os.listdir(self.mnt)))
            with open(os.path.join(self.mnt, "tokenizer.json"), "rb") as f:
                self.assertGreater(len(f.read()), 1000)

    def test_the_config_and_the_tokenizer_above_a_step_are_read(self):
        run = self.real_run("trained")
        with Mount(os.path.join(run, "10"), self.mnt, program=CKPTFS):
            with open(os.path.join(self.mnt, "config.json")) as f:
                config = f.read()
        for name, text in (("config.json", config), ("tokenizer_config.json", "{}")):
            with open(os.path.join(run, name), "w") as f:
                f.write(text)
        with Mount(os.path.join(run, "10"), self.mnt, program=CKPTFS):
            for name, text in (("config.json", config), ("tokenizer_config.json", "{}")):
                with open(os.path.join(self.mnt, name)) as f:
                    self.assertEqual(f.read(), text)

    def test_a_config_that_comes_later_is_shown(self):
        run = self.real_run("trained")
        with Mount(run, self.mnt, program=CKPTFS):
            with open(os.path.join(self.mnt, "10", "config.json")) as f:
                config = json.load(f)
            with open(os.path.join(run, "config.json"), "w") as f:
                json.dump(config | {"my_note": "new"}, f)
            wait_until(lambda: "my_note" in open(os.path.join(self.mnt, "10", "config.json")).read(), "the config")

    def pack(self, name, extra):
        """The real run with one file more, in a tar archive; written over in its place."""
        run = os.path.join(self.tmp, "packed", "10")
        if not os.path.isdir(run):
            shutil.copytree(os.path.join(self.real_run(), "10"), run)
        with open(os.path.join(run, "tokenizer.json"), "w") as f:
            f.write(extra)
        path = os.path.join(self.tmp, name)
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            tar.add(run, arcname=".")
        with open(path, "wb") as f:
            f.write(packed.getvalue())
        return path

    def test_an_archive_is_read_and_noticed_when_it_is_written_again(self):
        """Of its folder, the daemon may open the archive only; another one under its name is not opened, and a warning says so."""
        path = self.pack("run.nemo", "1")
        text = os.path.join(self.mnt, "tokenizer.json")

        def shown(want):
            try:
                with open(text) as f:
                    return f.read() == want
            except OSError:
                return False

        with Mount(path, self.mnt, program=CKPTFS) as m:
            with open(os.path.join(self.mnt, "model.safetensors"), "rb") as f:
                self.assertGreater(len(f.read()), 1000)
            self.assertTrue(shown("1"))
            self.pack("run.nemo", "22")
            wait_until(lambda: shown("22"), "the new archive")
            os.rename(self.pack("other.nemo", "333"), path)
            wait_until(lambda: "looking for new steps" in m.text(), "the warning")
            self.assertIn("sandbox=no", m.text())

    def test_links_are_followed_to_where_they_led_when_it_was_mounted(self):
        """A step elsewhere, linked before and after the mount: the second one's error says what the matter is."""
        run = self.real_run()
        early, late = step_of(os.path.join(self.tmp, "early")), step_of(os.path.join(self.tmp, "late"))
        os.symlink(early, os.path.join(run, "20"))
        with Mount(run, self.mnt, "-o", "follow_symlinks", program=CKPTFS):
            with open(os.path.join(self.mnt, "20", "model.safetensors"), "rb") as f:
                self.assertGreater(len(f.read()), 1000)
            os.symlink(late, os.path.join(run, "30"))
            wait_until(lambda: "30" in os.listdir(self.mnt), "the step")
            with open(os.path.join(self.mnt, "30", "CKPTFS-ERROR.txt")) as f:
                self.assertIn("sandbox=no", f.read())

    def test_links_of_single_files(self):
        run = self.real_run()
        elsewhere = os.path.join(self.tmp, "blobs")
        os.mkdir(elsewhere)
        for folder, _, files in os.walk(os.path.join(run, "10", "model")):
            for file in files:
                path, target = os.path.join(folder, file), os.path.join(elsewhere, f"{len(os.listdir(elsewhere))}.bin")
                os.rename(path, target)
                os.symlink(target, path)
        with Mount(run, self.mnt, "-o", "follow_symlinks", program=CKPTFS):
            with open(os.path.join(self.mnt, "10", "model.safetensors"), "rb") as f:
                self.assertGreater(len(f.read()), 1000)

    def test_a_base_from_the_hub_cache(self):
        """Its files are links to blobs/; a recipe file may lie anywhere."""
        model = os.path.join(self.tmp, "hub", "models--org--name")
        snapshot, blobs = os.path.join(model, "snapshots", "abc"), os.path.join(model, "blobs")
        for folder in (snapshot, blobs, os.path.join(model, "refs")):
            os.makedirs(folder)
        with open(os.path.join(model, "refs", "main"), "w") as f:
            f.write("abc")
        out = os.path.join(self.tmp, "out")
        subprocess.run([os.path.join(BUILD, "fs", "ckpt"), "export", "-q", self.real_run(), out], check=True)
        for name in os.listdir(out):
            os.rename(os.path.join(out, name), os.path.join(blobs, name + ".blob"))
            os.symlink(f"../../blobs/{name}.blob", os.path.join(snapshot, name))
        os.environ["HF_HUB_CACHE"] = os.path.join(self.tmp, "hub")
        self.addCleanup(os.environ.pop, "HF_HUB_CACHE")
        with Mount(self.real_run(), self.mnt, "-o", "base=org/name", program=CKPTFS):
            with open(os.path.join(self.mnt, "latest", "config.json")) as ours, open(os.path.join(snapshot, "config.json")) as theirs:
                self.assertEqual(ours.read(), theirs.read())
        with Mount(snapshot, self.mnt, program=CKPTFS), open(os.path.join(self.mnt, "model.safetensors"), "rb") as ours, \
                open(os.path.join(snapshot, "model.safetensors"), "rb") as theirs:
            self.assertEqual(ours.read(), theirs.read())

    def test_the_mounter_ends_with_the_daemon(self):
        run = self.real_run()
        for signal in ("TERM", "KILL"):
            with self.subTest(signal):
                subprocess.run([CKPTFS, run, self.mnt], check=True)
                pids = subprocess.run(["pgrep", "-f", f"{CKPTFS} {run} {self.mnt}"], capture_output=True, text=True).stdout.split()
                self.assertEqual(len(pids), 1)
                with open(f"/proc/{pids[0]}/task/{pids[0]}/children") as f:
                    children = f.read().split()
                self.assertEqual(len(children), 1)
                subprocess.run(["kill", f"-{signal}", *pids], check=True)
                wait_until(lambda: not os.path.exists(f"/proc/{children[0]}"), "the mounter's end")
                self.assertEqual(mounted(self.mnt), None if signal == "TERM" else "fuse.ckptfs")
                subprocess.run(["fusermount3", "-u", "-q", self.mnt], check=False)

    def test_a_mount_that_lost_its_mounter_says_how_it_ends(self):
        with Mount(self.real_run(), self.mnt, program=CKPTFS) as m:
            with open(f"/proc/{m.process.pid}/task/{m.process.pid}/children") as f:
                subprocess.run(["kill", "-KILL", f.read().strip()], check=True)
            with open(os.path.join(self.mnt, "latest", "config.json")) as f:
                json.load(f)
            m.process.terminate()
            self.assertEqual(m.process.wait(60), 0)
            self.assertIn(f"fusermount3 -u {self.mnt}", m.text())
            subprocess.run(["fusermount3", "-u", self.mnt], check=True)


if __name__ == "__main__":
    main()
