# SPDX-License-Identifier: Apache-2.0
"""The mount and the tool on real checkpoints, with the real library."""
import datetime
import json
import mmap
import os
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
import unittest
from xml.etree import ElementTree

from mountlib import GROWTH, CKPT, CKPTFS, SOURCE, Case, Mount, digests, main, wait_until

GOLDEN = os.path.join(SOURCE, "tests", "golden", "nanotron", "llama_tp2_pp2_tied")


def write_safetensors(path, tensors):
    """{name: (dtype, shape, bytes)} as the safetensors library writes them."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape, data) in sorted(tensors.items()):
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for _, (_, _, data) in sorted(tensors.items()):
            f.write(data)


def write_model(folder, seed, rows=4000):
    """An HF model directory of a few made-up tensors, about 16 MB."""
    rng = random.Random(seed)
    os.makedirs(folder)
    tensors = {f"model.layers.{k}.weight": ("BF16", [rows, 512], rng.randbytes(rows * 1024)) for k in range(4)}
    tensors["model.norm.weight"] = ("BF16", [512], rng.randbytes(1024))
    write_safetensors(os.path.join(folder, "model.safetensors"), tensors)
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16"}, f)
    with open(os.path.join(folder, "tokenizer.json"), "w") as f:
        f.write('{"version": "1.0"}')
    return tensors


def ckpt(*args, **kw):
    return subprocess.run([CKPT, *args], capture_output=True, text=True, timeout=120, **kw)


def text(path):
    with open(path) as f:
        return f.read()


class Real(Case):
    def model(self, *steps):
        for s in steps:
            self.tensors = write_model(os.path.join(self.run_dir, s), s)
        return os.path.join(self.run_dir, steps[-1])

    def mount(self, run=None, *args):
        return Mount(run or self.run_dir, self.mnt, *args, program=CKPTFS)

    def test_folders_of_a_model_directory(self):
        """Modules of sentence-transformers and chat templates are shown in their folders; a trainer's steps and a larger model are not."""
        folder = os.path.join(self.run_dir, "model")
        write_model(folder, 1)
        with open(os.path.join(folder, "config.json"), "w") as f:
            f.write('{"model_type": "unknown"}')
        dense = {"linear.weight": ("F32", [8, 8], bytes(range(256)))}
        for name in ("1_Pooling", "2_Dense", "additional_chat_templates", "runs"):
            os.mkdir(os.path.join(folder, name))
        write_safetensors(os.path.join(folder, "2_Dense", "model.safetensors"), dense)
        for name in ("modules.json", "1_Pooling/config.json", "2_Dense/config.json", "additional_chat_templates/rag.jinja"):
            with open(os.path.join(folder, name), "w") as f:
                f.write("[]" if name == "modules.json" else "{}")
        want = digests(folder)
        with open(os.path.join(folder, "runs", "events"), "w") as f:
            f.write("x")
        for name in ("checkpoint-5", "other"):
            write_model(os.path.join(folder, name), 2)
        with self.mount(folder):
            self.assertEqual(digests(self.mnt), want)
            self.assertEqual(os.listdir(self.at("1_Pooling")), ["config.json"])

    def test_paths_in_options_are_relative_to_where_it_was_started(self):
        """The daemon goes to /; what it was told before still means the same."""
        case = os.path.join(SOURCE, "tests", "golden", "torchtitan", "deepseek_v3_dp2")
        done = subprocess.run([os.path.abspath(CKPTFS), "run/checkpoint", self.mnt, "-o", "base=base"], cwd=case, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        try:
            with open(os.path.join(case, "base", "tokenizer.json"), "rb") as a, open(os.path.join(self.mnt, "latest", "tokenizer.json"), "rb") as b:
                self.assertEqual(a.read(), b.read())
        finally:
            subprocess.run(["fusermount3", "-u", self.mnt], check=True)

    def test_the_mount_and_the_export_are_the_same_files(self):
        self.model("10", "20")
        out = os.path.join(self.tmp, "out")
        self.assertEqual(ckpt("export", self.run_dir, out).returncode, 0)
        with self.mount():
            self.assertEqual(sorted(os.listdir(self.mnt)), ["10", "20", "latest"])
            self.assertEqual(digests(self.at("latest/")), digests(out))
            self.assertEqual(os.getxattr(self.at("20", "config.json"), "user.ckptfs.source").split(b",")[0][:2], b"hf")
            with open(self.at(".ckptfs", "stats.json")) as f:
                self.assertGreater(json.load(f)["source"]["read_bytes"], 16000000)
        self.assertEqual(ckpt("verify", self.run_dir, out).returncode, 0)

    def test_shards_in_folders_stay_there(self):
        """An index may name files in folders: a mount and an export have the same folders, and every file is the same one."""
        folder = os.path.join(self.run_dir, "model")
        tensors = write_model(folder, 1, 40)
        os.remove(os.path.join(folder, "model.safetensors"))
        where = {name: f"shards/{'ab'[k % 2]}/model.safetensors" for k, name in enumerate(sorted(tensors))}
        for file in sorted(set(where.values())):
            os.makedirs(os.path.dirname(os.path.join(folder, file)))
            write_safetensors(os.path.join(folder, file), {k: v for k, v in tensors.items() if where[k] == file})
        total = sum(len(data) for _, _, data in tensors.values())
        head = {"total_parameters": total // 2, "total_size": total}
        with open(os.path.join(folder, "model.safetensors.index.json"), "w") as f:
            f.write(json.dumps({"metadata": head, "weight_map": where}, indent=2) + "\n")
        want = digests(folder)
        del want["config.json"]  # it is written anew
        out = os.path.join(self.tmp, "out")
        self.assertEqual(ckpt("export", folder, out).returncode, 0)
        exported = digests(out)
        with self.mount(folder):
            self.assertEqual(digests(self.mnt), exported)
        exported.pop("config.json")
        self.assertEqual(exported, want)
        self.assertEqual(ckpt("verify", folder, out).returncode, 0)

    def test_golden_nanotron_equals_the_official_conversion(self):
        with open(os.path.join(GOLDEN + ".expected", "model.safetensors"), "rb") as f:
            want = f.read()
        with self.mount(GOLDEN):
            path = self.at("latest", "model.safetensors")
            with open(path, "rb") as f:
                self.assertEqual(f.read(), want)
            with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as m:
                self.assertEqual(m[:], want)

    def test_warnings_are_in_the_log_once_and_in_the_statistics(self):
        run = self.run_dir
        shutil.copytree(GOLDEN, run, dirs_exist_ok=True)
        with open(os.path.join(run, "10", "model_config.json")) as f:
            config = json.load(f)
        config["num_hidden_layers"] = 2  # of 4
        with open(os.path.join(run, "10", "model_config.json"), "w") as f:
            json.dump(config, f)
        with self.mount(run, "-o", "allow_leftover") as m:
            for _ in range(3):
                digests(os.path.join(self.mnt, "10"))
            with open(os.path.join(self.mnt, ".ckptfs", "stats.json")) as f:
                said = [w for w in json.load(f)["warnings"] if "not part of the model" in w["text"]]
            self.assertEqual([w["step"] for w in said], ["10"])
            self.assertEqual(m.text().count("not part of the model"), 1, m.text())

    def test_parallel_readers_see_the_bytes(self):
        step = self.model("10")
        with open(os.path.join(step, "model.safetensors"), "rb") as f:
            want = f.read()
        bad = []

        def read(k):
            rng = random.Random(k)
            fd = os.open(self.at("10", "model.safetensors"), os.O_RDONLY)
            for _ in range(60):
                off, n = rng.randrange(len(want)), rng.choice([1, 4096, 131072, 1 << 20, 3 << 20])
                if os.pread(fd, n, off) != want[off:off + n]:
                    bad.append((off, n))
            os.close(fd)

        with self.mount():
            threads = [threading.Thread(target=read, args=(k,)) for k in range(16)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
        self.assertEqual(bad, [])

    def test_a_find_through_many_steps_keeps_no_views(self):
        for k in range(40):
            write_model(os.path.join(self.run_dir, str(100 + k)), k, rows=1)
        with self.mount() as m:
            def resident():
                with open(f"/proc/{m.process.pid}/statm") as f:
                    return int(f.read().split()[1]) * os.sysconf("SC_PAGESIZE")

            def look():
                subprocess.run(["find", self.mnt, "-type", "f", "-exec", "cat", "{}", "+"], check=True,
                               stdout=subprocess.DEVNULL)

            look()
            before, fds = resident(), len(os.listdir(f"/proc/{m.process.pid}/fd"))
            for _ in range(4):
                look()
            self.assertLess(resident() - before, GROWTH)
            self.assertLessEqual(len(os.listdir(f"/proc/{m.process.pid}/fd")), fds + 4)

    def damage(self, change, errors=("EIO", "ESTALE")):
        """Change the shard under an open file: reads give an error or the right bytes, and the daemon lives."""
        import errno
        step = self.model("10")
        self.model("20")
        shard = os.path.join(step, "model.safetensors")
        with open(shard, "rb") as f:
            want = f.read()
        with self.mount() as m:
            fd = os.open(self.at("10", "model.safetensors"), os.O_RDONLY)
            self.assertEqual(os.pread(fd, 4096, 0), want[:4096])
            time.sleep(0.02)
            change(shard)
            failed = 0
            for off in range(0, len(want), 1 << 20):
                try:
                    got = os.pread(fd, 1 << 20, off)
                    self.assertEqual(got, want[off:off + len(got)])
                    # pages that were read before may come first, then the error
                    failed += len(got) < min(1 << 20, len(want) - off)
                except OSError as e:
                    self.assertIn(errno.errorcode[e.errno], errors)
                    failed += 1
            os.close(fd)
            self.assertEqual(len(os.listdir(self.at("20"))), 3)
            self.assertIsNone(m.process.poll())
            return failed, m.text()

    def test_a_truncated_shard_gives_an_error(self):
        failed, log = self.damage(lambda p: os.truncate(p, 1 << 20))
        self.assertGreater(failed, 10)
        self.assertIn("model.safetensors", log)

    def test_a_shard_overwritten_in_place_gives_an_error(self):
        def overwrite(path):
            with open(path, "r+b") as f:
                f.seek(1 << 20)
                f.write(b"x" * (14 << 20))

        failed, _ = self.damage(overwrite)
        self.assertGreater(failed, 10)

    def test_a_shard_renamed_over_keeps_serving_the_old(self):
        def replace(path):
            shutil.copy(path, path + ".new")
            os.truncate(path + ".new", 1 << 20)
            os.rename(path + ".new", path)

        self.damage(replace)

    def test_an_interrupted_export_is_taken_up(self):
        self.model("10")
        out, want = os.path.join(self.tmp, "out"), os.path.join(self.tmp, "want")
        self.assertEqual(ckpt("export", self.run_dir, want).returncode, 0)
        for delay in (0.001, 0.003, 0.006, 0.01, 0.02):
            p = subprocess.Popen([CKPT, "export", self.run_dir, out, "--jobs", "2"], stdout=subprocess.DEVNULL,
                                 stderr=subprocess.DEVNULL)
            time.sleep(delay)
            p.send_signal(signal.SIGKILL)
            p.wait()
            self.assertIn(sorted(os.listdir(out)) if os.path.exists(out) else [], ([], sorted(os.listdir(want))))
            shutil.rmtree(out, ignore_errors=True)
        done = ckpt("export", self.run_dir, out, "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(digests(out), digests(want))
        self.assertEqual(sorted(n for n in os.listdir(self.tmp) if "ckptfs-export" in n), [])
        self.assertEqual(json.loads(done.stdout)["xxh3"], json.loads(ckpt("digest", self.run_dir, "--json").stdout)["xxh3"])

    def test_an_interrupted_export_says_how_to_go_on(self):
        write_model(os.path.join(self.run_dir, "10"), 10, rows=60000)
        for sig, more in ((signal.SIGINT, ()), (signal.SIGTERM, ("--steps", "all"))):
            out = os.path.join(self.tmp, f"out-{sig}")
            dest = os.path.join(out, "10") if more else out
            p = subprocess.Popen([CKPT, "export", self.run_dir, out, "--jobs=1", *more], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            work = os.path.join(os.path.dirname(dest), f".{os.path.basename(dest)}.ckptfs-export")
            wait_until(lambda: os.path.exists(os.path.join(work, "files", ".model.safetensors.partial")), "it has begun")
            p.send_signal(sig)
            self.assertEqual((p.communicate()[1], p.returncode), ("ckpt: interrupted: run the same command again to resume\n", -sig))
            self.assertFalse(os.path.exists(dest))
            done = ckpt("export", self.run_dir, out, *more)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertIn("resumed", done.stdout)
            self.assertEqual(ckpt("verify", self.run_dir, dest).returncode, 0)

    def test_words_links_and_unfinished_saves_beside_numbered_steps(self):
        self.model("checkpoint-9", "checkpoint-100", "checkpoint-final", "tmp-checkpoint-120", "checkpoint-130_incomplete")
        os.symlink("checkpoint-9", os.path.join(self.run_dir, "checkpoint-best"))
        shown = ["checkpoint-100", "checkpoint-9", "checkpoint-best", "checkpoint-final", "latest"]
        with self.mount():
            self.assertEqual(sorted(os.listdir(self.mnt)), shown)
            self.assertEqual(os.readlink(self.at("latest")), "checkpoint-100")
            self.assertEqual(os.readlink(self.at("checkpoint-best")), "checkpoint-9")
            self.assertEqual(sorted(e.name for e in os.scandir(self.mnt) if e.is_symlink()), ["checkpoint-best", "latest"])
            self.assertTrue(os.path.samefile(self.at("checkpoint-best", "config.json"), self.at("checkpoint-9", "config.json")))
            os.unlink(os.path.join(self.run_dir, "checkpoint-best"))
            os.symlink("checkpoint-100", os.path.join(self.run_dir, "checkpoint-best"))
            wait_until(lambda: os.readlink(self.at("checkpoint-best")) == "checkpoint-100", "the link to move")
        done = ckpt("info", self.run_dir)
        self.assertIn("is no step: its name says that its save is in progress, or was interrupted (and 1 more)", done.stderr)
        self.assertRegex(done.stdout, "steps +3: checkpoint-final, checkpoint-9, checkpoint-100\nlink +checkpoint-best -> checkpoint-100\n")
        self.assertEqual(json.loads(ckpt("info", "--json", self.run_dir).stdout)["links"], {"checkpoint-best": "checkpoint-100"})
        self.assertEqual(ckpt("export", self.run_dir, os.path.join(self.tmp, "best"), "--step=checkpoint-best").returncode, 0)
        self.assertEqual(ckpt("verify", self.run_dir, os.path.join(self.tmp, "best")).returncode, 0)

    def test_steps_are_exported_one_by_one(self):
        out = os.path.join(self.tmp, "out")
        self.model("step-5", "step-10", "step-20", "step-30")
        os.truncate(os.path.join(self.run_dir, "step-20", "model.safetensors"), 1 << 20)
        done = ckpt("export", self.run_dir, out, "--steps=10..", "--json", "--then", "sh", "-c", "test $1 != $2/step-10 || exit 3", "sh", "{}", out)
        self.assertEqual(done.returncode, 1)
        self.assertEqual([json.loads(line)["step"] for line in done.stdout.splitlines()], ["step-10", "step-30"])
        self.assertIn("ckpt: step 'step-10': sh: exit status 3\n", done.stderr)
        self.assertRegex(done.stderr, "ckpt: step 'step-20': .*model.safetensors")
        self.assertEqual(sorted(os.listdir(out)), [".ckptfs-exports", "step-10", "step-30"])
        self.assertEqual(ckpt("verify", self.run_dir, os.path.join(out, "step-10"), "--step", "10").returncode, 0)
        # unfinished and absent ones are new; what is finished is left alone, and no command runs
        with open(os.path.join(out, "step-10", "model.safetensors"), "r+b") as f:
            f.truncate(1 << 20)
        self.assertIn("step-10 is not empty", ckpt("export", self.run_dir, out, "--steps=new").stderr)
        shutil.rmtree(os.path.join(out, "step-10"))
        shutil.rmtree(os.path.join(self.run_dir, "step-20"))
        done = ckpt("export", self.run_dir, out, "--steps=new", "--then", "echo", "made<{}>")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(re.findall("made<.*>", done.stdout), [f"made<{out}/step-10>"])
        done = ckpt("export", self.run_dir, out, "--steps=new", "--then", "echo", "made")
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "", ""))
        done = ckpt("export", self.run_dir, out, "--steps=all")
        self.assertEqual((done.returncode, done.stdout.count("every byte was compared")), (0, 3), done.stderr)
        for args, words in ((["--steps=7..9"], "no step is one of --steps=7..9"), (["--steps=7-9"], "'7-9' is not all, new"), (["--watch"], "--watch needs --steps"),
                            (["--steps=all", "--step=5"], "leave one out"), (["--then"], "needs a value"), (["--then=ls"], "last on the line")):
            self.assertIn(words, ckpt("export", self.run_dir, out, *args).stderr)
        self.assertIn("is one checkpoint", ckpt("export", os.path.join(self.run_dir, "step-5"), out, "--steps=all").stderr)
        self.assertIn("no-such-command: No such file", ckpt("export", self.run_dir, out + "-one", "--then", "no-such-command").stderr)

    def test_steps_are_exported_while_a_run_grows(self):
        run, out, said = self.at("..", "growing"), os.path.join(self.tmp, "out"), os.path.join(self.tmp, "said")
        os.mkdir(run)
        with open(said, "w") as f:
            p = subprocess.Popen([CKPT, "export", run, out, "--steps=all", "--watch", "--then", "sh", "-c", "echo did $0", "{}"], stdout=f, stderr=subprocess.STDOUT)
        try:
            for step in ("10", "20"):
                write_model(os.path.join(self.tmp, "new"), int(step))
                os.rename(os.path.join(self.tmp, "new"), os.path.join(run, step))
                wait_until(lambda: f"did {out}/{step}\n" in text(said), step)
                self.assertEqual(ckpt("verify", run, os.path.join(out, step), "--step", step).returncode, 0)
        finally:
            p.terminate()
        self.assertEqual(p.wait(60), 0, text(said))
        self.assertEqual(text(said).count("did "), 2, text(said))
        self.assertTrue(text(said).startswith(f"ckpt: note: watching '{run}' until SIGINT or SIGTERM\n"), text(said))
        self.assertEqual(sorted(os.listdir(out)), [".ckptfs-exports", "10", "20"])

    def watch(self, *args, **kw):
        """Export every step of the run into `out` and go on; what it says is in the file `said`."""
        out, said = os.path.join(self.tmp, "out"), os.path.join(self.tmp, "said")
        with open(said, "w") as f:
            p = subprocess.Popen([CKPT, "export", self.run_dir, out, "--steps=all", "--watch", *args], stdout=f, stderr=subprocess.STDOUT, **kw)
        self.addCleanup(lambda: p.poll() is not None or (p.kill(), p.wait()))
        return p, out, said

    def test_a_watch_tries_a_failed_step_again(self):
        """Only the contents of a file that no folder's time tells of change; it is told once."""
        model = self.model("10")
        name = "model-00001-of-00001.safetensors"
        os.rename(os.path.join(model, "model.safetensors"), os.path.join(model, name))
        with open(os.path.join(model, "model.safetensors.index.json"), "w") as f:
            json.dump({"metadata": {}, "weight_map": dict.fromkeys(self.tensors, name)}, f)
        whole = os.path.getsize(os.path.join(model, name))
        with open(os.path.join(model, name), "rb") as f:
            tail = f.read()[1 << 20:]
        os.truncate(os.path.join(model, name), 1 << 20)
        p, out, said = self.watch()
        wait_until(lambda: "ckpt: step '10': " in text(said), "the failure")
        time.sleep(5)
        self.assertEqual(text(said).count("step '10': "), 1, text(said))
        with open(os.path.join(model, name), "r+b") as f:
            f.seek(1 << 20)
            f.write(tail)
        wait_until(lambda: "/10: " in text(said), "the export")
        p.terminate()
        self.assertEqual(p.wait(60), 0, text(said))
        self.assertEqual(os.path.getsize(os.path.join(out, "10", name)), whole)
        self.assertEqual(ckpt("verify", self.run_dir, os.path.join(out, "10")).returncode, 0)

    def test_a_watch_ends_by_sigterm_whatever_is_ignored(self):
        self.model("10")

        def ignore():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

        p, out, said = self.watch(preexec_fn=ignore)
        wait_until(lambda: "/10: " in text(said), "the export")
        self.assertIn("until SIGTERM (it was started with SIGINT ignored", text(said).splitlines()[0])
        p.send_signal(signal.SIGINT)
        time.sleep(1)
        self.assertIsNone(p.poll())
        p.terminate()
        self.assertEqual(p.wait(60), 0, text(said))

    def test_a_watch_waits_for_files_that_have_their_size_before_their_bytes(self):
        write_model(os.path.join(self.tmp, "made"), 5)
        made, step = os.path.join(self.tmp, "made", "model.safetensors"), os.path.join(self.run_dir, "10")
        with open(made, "rb") as f:
            data = f.read()
        p, out, said = self.watch()
        os.mkdir(step)
        with open(os.path.join(step, "model.safetensors"), "wb") as f:
            f.truncate(len(data))
            for name in ("config.json", "tokenizer.json"):
                shutil.copy(os.path.join(self.tmp, "made", name), step)
            for part in range(0, len(data), 1 << 20):
                f.write(data[part:part + (1 << 20)])
                f.flush()
                time.sleep(0.4)
                self.assertFalse(os.path.exists(os.path.join(out, "10")))
            f.flush()
            written = time.monotonic()
            with mmap.mmap(os.open(f.name, os.O_RDWR), 0) as m:  # and once more through a mapping
                while time.monotonic() < written + 6:
                    m[-8:] = m[-8:]
                    m.flush()
                    time.sleep(0.3)
                self.assertFalse(os.path.exists(os.path.join(out, "10")))
        wait_until(lambda: "/10: " in text(said), "the export")
        p.terminate()
        self.assertEqual(p.wait(60), 0, text(said))
        with open(os.path.join(out, "10", "model.safetensors"), "rb") as f:
            self.assertEqual(f.read(), data)
        self.assertEqual(text(said).count("step '10' is being written: it is exported when its files have not changed for 5 s"), 1)

    def test_a_step_that_was_saved_again_is_named(self):
        self.model("10")
        out = os.path.join(self.tmp, "out")
        self.assertEqual(ckpt("export", self.run_dir, out, "--steps=new").returncode, 0)
        with open(os.path.join(self.run_dir, "10", "trainer_state.json"), "w") as f:
            f.write("{}")  # the folder changes, the model does not
        os.unlink(f.name)
        done = ckpt("export", self.run_dir, out, "--steps=new")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn("every byte was compared", done.stdout)
        self.assertEqual(ckpt("export", self.run_dir, out, "--steps=new").stdout, "")
        for rows in (4000, 4008):  # of the same size, and of another one
            shutil.rmtree(os.path.join(self.run_dir, "10"))
            write_model(os.path.join(self.run_dir, "10"), rows + 1, rows)
            done = ckpt("export", self.run_dir, out, "--steps=new")
            self.assertEqual((done.returncode, done.stdout), (1, ""))
            self.assertIn(f"step '10': it was saved again since it was exported, and '{out}/10' holds the save of before: remove that directory", done.stderr)
        shutil.rmtree(os.path.join(out, "10"))
        self.assertEqual(ckpt("export", self.run_dir, out, "--steps=new").returncode, 0)
        self.assertEqual(ckpt("verify", self.run_dir, os.path.join(out, "10")).returncode, 0)
        # another view of the same save is what it was: another export
        done = ckpt("export", self.run_dir, out, "--steps=all", "-o", "dtype=float32")
        self.assertIn("is not empty", done.stderr)

    def test_a_file_that_may_not_grow_is_an_error(self):
        """ulimit -f: of the export, its journal, and what a command prints."""
        def limited(size, out, *args):
            limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))  # noqa: E731
            return subprocess.run([CKPT, *args], stdout=out, stderr=subprocess.PIPE, text=True, preexec_fn=limit)

        self.model("10")
        journal = [] if "thread" in os.environ.get("CKPTFS_SANITIZE", "") else [(0, ".ckptfs-export")]  # where no file may grow, TSan does not start
        for size, where in journal + [(100, "100"), (4096, "4096")]:
            out = os.path.join(self.tmp, f"limited-{size}")
            done = limited(size, subprocess.DEVNULL, "export", self.run_dir, out, "-q")
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertRegex(done.stderr, f"writing .*{where}.*: File too large")
            self.assertEqual(ckpt("export", self.run_dir, out).returncode, 0)
        with open(os.path.join(self.tmp, "printed"), "w") as f:
            done = limited(10, f, "ls", self.run_dir)
        self.assertEqual((done.returncode, done.stderr), (1, "ckpt: the output could not be written\n"))

    def test_small_files_of_an_export_that_fails_are_kept(self):
        """Small files are brought to disk together; where the next one fails, those that were written before are."""
        step = self.model("10")
        rng = random.Random(1)
        sizes = [200 << 10, 200 << 10, 200 << 10, 400 << 10]
        tensors = {f"model.layers.{k}.weight": ("BF16", [n // 1024, 512], rng.randbytes(n)) for k, n in enumerate(sizes)}
        write_safetensors(os.path.join(step, "model.safetensors"), tensors)
        out, work = self.at("..", "out"), self.at("..", ".out.ckptfs-export")
        command = ("export", step, out, "--jobs=1", "--max-shard-size=250KB")
        done = ckpt(*command, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (300 << 10, resource.RLIM_INFINITY)))
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr, "writing .*model-00003-of-00004.*: File too large")
        self.assertIn("what is written is kept: the same command resumes it", done.stderr)
        small = [f"model-0000{k}-of-00004.safetensors" for k in (1, 2)]
        self.assertLessEqual(set(small), set(os.listdir(os.path.join(work, "files"))))
        left = [f["name"] for f in json.loads(ckpt("info", out, "--json").stdout)["lacking"]]
        self.assertTrue(left and not set(small) & set(left), left)
        inodes = [os.stat(os.path.join(work, "files", n)).st_ino for n in small]
        done = ckpt(*command)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn("resumed", done.stdout)
        self.assertEqual([os.stat(os.path.join(out, n)).st_ino for n in small], inodes)  # not written again
        self.assertEqual(ckpt("verify", step, out).returncode, 0)

    def test_export_refuses_what_is_not_its_own(self):
        self.model("10")
        out = os.path.join(self.tmp, "out")
        os.mkdir(out)
        with open(os.path.join(out, "thesis.tex"), "w") as f:
            f.write("mine")
        done = ckpt("export", self.run_dir, out)
        self.assertEqual(done.returncode, 1)
        self.assertIn("thesis.tex", done.stderr)
        self.assertEqual(os.listdir(out), ["thesis.tex"])
        # an unfinished export of another source
        os.unlink(os.path.join(out, "thesis.tex"))
        with open(os.path.join(out, ".ckptfs-export"), "w") as f:
            f.write('{"export":"something else"}\n')
        done = ckpt("export", self.run_dir, out)
        self.assertEqual(done.returncode, 1)
        self.assertIn("something else", done.stderr)
        self.assertEqual(os.listdir(out), [".ckptfs-export"])

    def test_folders_above_an_export_are_made(self):
        one = self.model("10")
        for dest, *more in (("a/b/c",), ("d/e//f/",), ("g/h", "--steps=all")):
            run, at = (self.run_dir if more else one), os.path.join(self.tmp, dest)
            self.assertEqual(ckpt("export", run, at, *more).returncode, 0)
            self.assertEqual(ckpt("verify", one, os.path.join(at, "10" if more else "")).returncode, 0)
        os.truncate(os.path.join(one, "model.safetensors"), 1 << 20)
        os.mkdir(self.at("..", "kept"))
        self.assertEqual(ckpt("export", one, self.at("..", "kept", "x", "y")).returncode, 1)
        self.assertEqual(os.listdir(self.at("..", "kept")), [])  # what failed leaves nothing
        with open(self.at("..", "file"), "w"):
            pass
        for name in ("file", "file/x"):
            self.assertRegex(ckpt("export", self.model("20"), self.at("..", name)).stderr, f"making the folder '.*{name}': (File exists|Not a directory)")
            shutil.rmtree(os.path.join(self.run_dir, "20"))

    def test_an_export_onto_its_finished_self_is_compared(self):
        step = self.model("10")
        out = os.path.join(self.tmp, "out")
        first = ckpt("export", self.run_dir, out)
        self.assertEqual(first.returncode, 0, first.stderr)
        before = {n: os.stat(os.path.join(out, n)).st_mtime_ns for n in os.listdir(out)}
        again = ckpt("export", self.run_dir, out)
        self.assertEqual((again.returncode, again.stderr), (0, ""))
        self.assertIn("already complete", again.stdout)
        self.assertEqual(again.stdout.splitlines()[-1], first.stdout.splitlines()[-1])  # the digest
        self.assertEqual({n: os.stat(os.path.join(out, n)).st_mtime_ns for n in os.listdir(out)}, before)
        self.assertTrue(json.loads(ckpt("export", self.run_dir, out, "--json").stdout)["already_complete"])
        with open(os.path.join(out, "model.safetensors"), "r+b") as f:
            f.seek(-5, os.SEEK_END)
            byte = f.read(1)
            f.seek(-1, os.SEEK_CUR)
            f.write(bytes([byte[0] ^ 1]))
            at = f.seek(0, os.SEEK_END) - 5
        done = ckpt("export", self.run_dir, out)
        self.assertEqual(done.returncode, 1)
        self.assertIn(f"model.safetensors differs at byte {at}", done.stderr)
        self.assertEqual(sorted(os.listdir(out)), sorted(before))
        self.assertTrue(os.path.isdir(step))

    def test_a_full_disk_is_said_at_once_and_leaves_nothing(self):
        if os.geteuid() != 0:
            self.skipTest("needs to mount a tmpfs")
        self.model("10")
        small = os.path.join(self.tmp, "small")
        os.mkdir(small)
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small]).returncode:
            self.skipTest("can't mount a tmpfs")
        try:
            done = ckpt("export", self.run_dir, os.path.join(small, "out"))
            self.assertEqual(done.returncode, 1)
            self.assertIn("space", done.stderr)
            self.assertEqual(os.listdir(small), [])
        finally:
            subprocess.run(["umount", small], check=True)

    def test_verify_names_the_differences(self):
        self.model("10")
        out = os.path.join(self.tmp, "out")
        self.assertEqual(ckpt("export", self.run_dir, out).returncode, 0)
        shard = os.path.join(out, "model.safetensors")
        start = os.path.getsize(shard) - 1024 - 4000 * 1024  # of model.layers.3.weight
        with open(shard, "r+b") as f:
            for element in (512 * 7 + 3, 512 * 3999):
                f.seek(start + 2 * element)
                old = f.read(2)
                f.seek(start + 2 * element)
                f.write(bytes(b ^ 1 for b in old))
        done = ckpt("verify", self.run_dir, out)
        self.assertEqual(done.returncode, 1)
        self.assertIn("model.layers.3.weight: 2 of 2048000 elements differ, max |a - b| = ", done.stdout)
        self.assertIn("1 of 5 tensors differ, 0 of 2 files\n", done.stdout)
        with open(os.path.join(out, "tokenizer.json"), "a") as f:
            f.write(" ")
        with open(os.path.join(out, "README.md"), "w") as f:
            f.write("hello")
        found = json.loads(ckpt("verify", self.run_dir, out, "--json").stdout)
        self.assertEqual([d.get("tensor") or d.get("file") for d in found["differences"]],
                         ["model.layers.3.weight", "tokenizer.json"])
        self.assertEqual(found["notes"], ["README.md: only in the directory"])
        write_safetensors(shard, {"model.norm.weight": ("F16", [512], bytes(1024)), "more": ("U8", [1], b"1")})
        what = [d["what"] for d in json.loads(ckpt("verify", self.run_dir, out, "--json", "--tensors").stdout)["differences"]]
        self.assertEqual(len(what), 6)
        self.assertTrue(any("missing" in w for w in what) and any("F16" in w for w in what) and
                        any("only in" in w for w in what))

    def test_the_tool_reports_and_exits_as_documented(self):
        self.model("10", "iter_0020")
        for status, args in ((0, ["info", self.run_dir]), (0, ["ls", self.run_dir, "--step", "20"]),
                             (0, ["ls", "--files", "--json", self.run_dir]),
                             (0, ["explain", self.run_dir, "model.norm.weight"]), (0, ["-h"]), (0, ["--version"]),
                             (0, ["digest", self.run_dir, "--tensors"]),
                             (1, ["explain", self.run_dir, "nothing"]), (1, ["ls", self.run_dir, "--step", "30"]),
                             (1, ["info", self.tmp + "/absent"]), (2, ["load", "x"]),
                             (2, []), (2, ["ls"]), (2, ["bogus", self.run_dir]), (2, ["ls", self.run_dir, "--odd"]),
                             (2, ["ls", self.run_dir, "-o", "bogus"]), (2, ["export", self.run_dir]),
                             (2, ["ls", self.run_dir, "--jobs", "0"])):
            done = ckpt(*args)
            self.assertEqual(done.returncode, status, (args, done.stderr))
            self.assertEqual(bool(done.stderr), status != 0, (args, done.stderr))
            self.assertNotIn("\033", done.stdout)
        names = [t["name"] for t in json.loads(ckpt("ls", self.run_dir, "--json").stdout)]
        self.assertEqual(sorted(names), sorted(self.tensors))

    def test_options_have_two_spellings(self):
        """`-o key=value`, `--key=value` and `--key value`, for the tool, the loader and the mount."""
        want = json.loads(ckpt("ls", GOLDEN, "--json", "-o", "dtype=float32,max_shard_size=20KB").stdout)
        self.assertEqual({t["dtype"] for t in want}, {"F32"})
        for args in (["--dtype", "float32", "--max-shard-size=20KB"], ["--dtype=float32", "--max_shard_size", "20KB", "--allow-partial"]):
            for at in (0, 1, 2):
                command = ["ls", GOLDEN, "--json"]
                command[at + 1:at + 1] = args
                self.assertEqual(json.loads(ckpt(*command).stdout), want, command)
        self.assertEqual(ckpt("load", GOLDEN, "--layout", "tp=1", "--dtype", "float32", "--verify").returncode, 0)
        with Mount(GOLDEN, self.mnt, "--dtype", "float32", "--threads=3", "--sandbox", "no", program=CKPTFS):
            with open(self.at(".ckptfs", "stats.json")) as f:
                settings = json.load(f)["settings"]
            self.assertEqual((settings["threads"], settings["sandbox"]), (3, "none"))
            with open(self.at("latest", "config.json")) as f:
                self.assertIn("float32", f.read())
        for args, words in ((["--nonsense"], "nonsense"), (["--dtype"], "dtype"), (["--dtype=odd"], "odd"), (["--nonsense", "x"], "nonsense")):
            done = ckpt("ls", GOLDEN, *args)
            self.assertEqual(done.returncode, 2, args)
            self.assertIn(words, done.stderr)

    def test_what_people_type_first(self):
        """Errors that say what to do."""
        file = os.path.join(GOLDEN, "10", "config.yaml")
        for args, words in ((["info", GOLDEN, "--step", "20"], "it has 10"), (["info", file], f"give the folder that it lies in, '{os.path.dirname(file)}'"),
                            (["load", GOLDEN, "--layout", "tp=2"], "mpirun -n 2"), (["verify", GOLDEN, file], "give the folder")):
            done = ckpt(*args)
            self.assertNotEqual(done.returncode, 0, args)
            self.assertIn(words, done.stderr)
        for n in range(5, 40):
            os.symlink(os.path.join(GOLDEN, "10"), os.path.join(self.run_dir, str(n)))
        self.assertIn("28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, and 23 older ones",
                      ckpt("info", self.run_dir, "--step", "99", "-o", "follow_symlinks").stderr)

    def test_a_config_is_missing_or_another_models(self):
        titan = os.path.join(SOURCE, "tests", "golden", "torchtitan", "deepseek_v3_dp2", "run", "checkpoint", "step-20")
        adapter = os.path.join(SOURCE, "tests", "golden", "peft", "lora_dcp_w2", "run")
        told = ckpt("info", titan).stderr
        for word in ("torchtitan saves none", "base=DIR", "'intermediate_size'", "'n_shared_experts'"):
            self.assertIn(word, told)
        other = os.path.join(self.tmp, "other")
        self.assertEqual(ckpt("export", GOLDEN, other).returncode, 0)
        change = {"vocab_size": 128}
        with open(os.path.join(other, "config.json")) as f:
            config = json.load(f) | change
        with open(os.path.join(other, "config.json"), "w") as f:
            json.dump(config, f)
        megatron = os.path.join(SOURCE, "tests", "golden", "megatron", "m19_llama_tp2pp2", "run")
        told = ckpt("info", megatron, "-o", f"base={other}").stderr
        for word in ("is 96", "vocab=128", f"is base '{other}' another model's?"):
            self.assertIn(word, told)
        self.assertIn("all 96 rows are shown, of which the last may be padding", ckpt("digest", megatron).stderr)
        self.assertNotIn("padding", ckpt("digest", megatron, "-o", "vocab_size=90").stderr)
        out = os.path.join(self.tmp, "adapter")
        done = ckpt("export", adapter, out)
        self.assertEqual((done.returncode, os.path.exists(out)), (1, False))
        self.assertIn("--weights-only", done.stderr)
        self.assertEqual(ckpt("export", adapter, out, "--weights-only").returncode, 0)
        self.assertEqual(os.listdir(out), ["adapter_model.safetensors"])

    def test_parts_of_an_export(self):
        files = {}
        for part in ("--weights-only", "--no-weights"):
            self.assertEqual(ckpt("export", GOLDEN, os.path.join(self.tmp, part), part).returncode, 0)
            files[part] = sorted(os.listdir(os.path.join(self.tmp, part)))
        self.assertEqual(files, {"--weights-only": ["model.safetensors"], "--no-weights": ["config.json", "generation_config.json"]})
        self.assertEqual(ckpt("export", GOLDEN, self.tmp + "/x", "--no-weights", "--weights-only").returncode, 2)
        self.assertEqual(ckpt("export", GOLDEN, self.tmp + "/x", "--no-weights", "-o", "view=dcp").returncode, 2)

    def test_the_folder_above_a_run(self):
        shutil.copytree(os.path.join(GOLDEN, "10"), os.path.join(self.run_dir, "10"), copy_function=shutil.copyfile)
        top = os.path.dirname(self.run_dir)
        self.assertIn(f"a folder of runs: give one of '{os.path.basename(self.run_dir)}'", ckpt("info", top).stderr)
        for at in (top, self.run_dir):
            self.assertEqual(ckpt("export", os.path.join(self.run_dir, "10"), os.path.join(at, "exported")).returncode, 0)
        done = ckpt("info", top)
        self.assertEqual((done.returncode, done.stdout), (2, ""))
        self.assertIn("a folder of runs ('run') and of models ('exported')", done.stderr)
        done = ckpt("info", self.run_dir, "--json")
        self.assertEqual(json.loads(done.stdout)["steps"], ["10"])
        self.assertIn("exported' is left out", done.stderr)

    def test_summaries_for_people(self):
        told = ckpt("info", GOLDEN).stdout
        for line in ("format    nanotron 1.4, written with TP 2, PP 2, DP 1", "steps     1: 10", "model     LlamaForCausalLM (llama), by recipe nanotron/llama",
                     "weights   41.2 K parameters in 38 tensors, 80.6 KiB, bfloat16"):
            self.assertIn(line + "\n", told)
        self.assertIn("has config yaml: true", ckpt("info", GOLDEN, "-v").stdout)
        self.assertIn("optimizer no\n" if not os.path.isdir(GOLDEN + "/10/optimizer") else "optimizer yes\n", told)
        shards = [os.path.join(d, f) for d, _, files in os.walk(GOLDEN + "/10/model") for f in files if f.endswith(".safetensors")]
        saved = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(max(os.path.getmtime(f) for f in shards)))
        self.assertIn(f"saved     {saved}\n", told)
        said = json.loads(ckpt("info", GOLDEN, "--json").stdout)
        self.assertEqual((said["shard_files"], said["stored_bytes"]), (len(shards), sum(map(os.path.getsize, shards))))
        self.assertRegex(told, r"files     3 files, from 43 files of the checkpoint with [0-9.]+ KiB\n")
        self.model("2", "4")
        self.assertIn("steps     2: 2, 4\n", ckpt("info", self.run_dir).stdout)
        told = ckpt("explain", GOLDEN, "model.layers.0.mlp.down_proj.weight").stdout
        for line in ("A  columns 0-32  from ", "B  columns 32-64  from ", "   " + 16 * "A" + 16 * "B" + "\n"):
            self.assertIn(line, told)
        self.assertIn("element stride 32", ckpt("explain", GOLDEN, "model.layers.0.self_attn.q_proj.weight", "-v").stdout)
        told = ckpt("plan", GOLDEN, "--layout", "tp=2").stdout
        self.assertIn("layout    tp=2: 2 ranks on 1 node (the product of the layout's numbers)\n", told)
        self.assertEqual(told.replace(" (the product of the layout's numbers)", ""), ckpt("plan", GOLDEN, "--layout", "tp=2", "--ranks", "2").stdout)
        self.assertRegex(told, r"read +40.6 KiB +40.6 KiB +40.6 KiB\n")

    def test_errors_say_what_next(self):
        name = "model.layers.0.mlp.down_proj"
        for given, meant in ((name, name + ".weight"), (name + ".wieght", name + ".weight"), ("model.nrm.weight", "model.norm.weight")):
            self.assertIn(f"there is no tensor '{given}'; did you mean '{meant}'?", ckpt("explain", GOLDEN, given).stderr)
        self.assertNotIn("did you mean", ckpt("explain", GOLDEN, "visual.patch").stderr)
        self.assertIn("no tensor's name matches '*.nothing'", ckpt("explain", GOLDEN, "*.nothing").stderr)
        for run in ("gs://bucket/run", "hf:/a/b", "/here/gs://bucket"):
            self.assertIn("mount the bucket first", ckpt("info", run).stderr)
            self.assertIn("mount the bucket first", subprocess.run([CKPTFS, run, self.mnt], capture_output=True, text=True).stderr)
        self.assertIn("mount the bucket first", ckpt("info", GOLDEN, "-o", "base=gs://bucket/model").stderr)
        self.assertNotIn("bucket", ckpt("info", self.tmp + "/a:b/absent").stderr)
        done = subprocess.run([CKPTFS, self.run_dir, self.mnt], capture_output=True, text=True)
        self.assertEqual(done.returncode, 1)
        self.assertIn("(-o wait mounts it before its first save)", done.stderr)

    def test_messages_are_lines_of_json(self):
        for program, done in (("ckpt", ckpt("info", self.tmp + '/a "b"', "--log-format", "json")),
                              ("ckpt-load", ckpt("plan", self.tmp + '/a "b"', "--layout", "tp=1", "--log-format=json")),
                              ("ckptfs", subprocess.run([CKPTFS, self.tmp + '/a "b"', self.mnt, "-o", "log_format=json"], capture_output=True, text=True))):
            (line,) = [json.loads(text) for text in done.stderr.splitlines()]
            self.assertEqual((line["program"], line["severity"]), (program, "error"))
            self.assertIn('/a "b"', line["text"])
            self.assertLess(abs(datetime.datetime.fromisoformat(line["time"].replace("Z", "+00:00")).timestamp() - time.time()), 60)
        self.model("10")
        with self.mount(None, "-o", "log_format=json", "-d") as m:
            wait_until(lambda: m.text().endswith("\n"), "what was negotiated is said")
            self.assertEqual({json.loads(text)["severity"] for text in m.text().splitlines()}, {"info"}, m.text())

    def test_prometheus_gets_the_numbers_of_the_statistics(self):
        self.model("10")
        with self.mount():
            digests(os.path.join(self.mnt, "10"))
            with open(os.path.join(self.mnt, ".ckptfs", "stats.json")) as f, open(os.path.join(self.mnt, ".ckptfs", "stats.prom")) as g:
                said, lines = json.load(f), g.read().splitlines()
        got = {name: float(n) for name, n in (x.rsplit(" ", 1) for x in lines if not x.startswith("#"))}
        for name in got:
            kind = "counter" if name.endswith("_total") else "gauge"
            self.assertIn(f"# TYPE {name.partition('{')[0]} {kind}", lines)
        self.assertEqual(got[f'ckptfs_info{{version="{said["settings"]["version"]}",run="{self.run_dir}"}}'], 1)
        for group in ("mount", "source"):
            for key, n in said[group].items():
                self.assertIn(f"ckptfs_{group}_{key}", [name.removesuffix("_total") for name in got])
        self.assertEqual(got["ckptfs_mount_bytes_total"], said["mount"]["bytes"])
        self.assertEqual(got["ckptfs_source_read_bytes_total"], said["source"]["read_bytes"])
        self.assertEqual((got["ckptfs_steps"], got["ckptfs_warnings"]), (1, 0))

    def test_a_drawing_covers_the_tensor(self):
        out, tensor = self.tmp + "/t.svg", "model.layers.0.mlp.down_proj.weight"
        self.assertEqual(ckpt("explain", GOLDEN, tensor, "--svg", out).stdout, ckpt("explain", GOLDEN, tensor).stdout)
        top = ElementTree.parse(out).getroot()
        names = [t.text for t in top.iter("{http://www.w3.org/2000/svg}text")]
        self.assertEqual(names[0], f"{tensor}: BF16, 32 x 64")
        self.assertEqual(names[1:], [p["file"] for p in json.loads(ckpt("explain", GOLDEN, tensor, "--json").stdout)["pieces"]])
        blocks = [{k: float(v) for k, v in r.attrib.items() if k in ("x", "y", "width", "height")}
                  for r in top.iter("{http://www.w3.org/2000/svg}rect") if r.get("stroke")]
        self.assertEqual(blocks, [{"x": 40, "y": 40, "width": 320, "height": 320}, {"x": 360, "y": 40, "width": 320, "height": 320}])
        self.assertEqual(ckpt("explain", GOLDEN, "model.norm.weight", "--svg", out).returncode, 0)
        self.assertEqual(len(ElementTree.parse(out).getroot().findall("{http://www.w3.org/2000/svg}rect")), 2)
        self.assertEqual(ckpt("explain", GOLDEN, "*.q_proj.*", "--svg", out).returncode, 2)
        self.assertEqual(ckpt("explain", GOLDEN, tensor, "--svg", self.tmp + "/absent/t.svg").returncode, 1)

    def test_a_converter_is_no_file_of_the_model(self):
        run = os.path.join(self.tmp, "zero")
        shutil.copytree(os.path.join(SOURCE, "tests", "golden", "deepspeed", "z3_qwen3_frozen_w3", "run"), run, copy_function=shutil.copyfile)
        for name in ("zero_to_fp32.py", "zero_to_torch.py", "modeling_x.py"):
            for folder, _, _ in os.walk(run):
                open(os.path.join(folder, name), "w").close()
        listed = ckpt("ls", "--files", run).stdout
        self.assertIn("modeling_x.py", listed)
        self.assertNotIn("zero_to_", listed)

    def test_a_pattern_explains_all_that_match(self):
        names = [n for n in (f"model.layers.{i}.self_attn.q_proj.weight" for i in range(4))]
        self.assertEqual([t["tensor"] for t in json.loads(ckpt("explain", GOLDEN, "*.q_proj.*", "--json").stdout)], names)
        told = ckpt("explain", GOLDEN, "*.q_proj.*").stdout
        self.assertEqual(told, "\n".join(ckpt("explain", GOLDEN, name).stdout for name in names))
        self.assertRegex(told, r"recipe    nanotron/dense \(rules\[[0-9]+\].*, counted from 0\)\n")

    def test_digest_is_what_xxhsum_says(self):
        if not shutil.which("xxhsum"):
            self.skipTest("no xxhsum")
        self.model("10")
        out = os.path.join(self.tmp, "out")
        self.assertEqual(ckpt("export", self.run_dir, out).returncode, 0)
        listing = ckpt("digest", self.run_dir).stdout
        done = subprocess.run(["xxhsum", "-c", "-"], input=listing, cwd=out, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_info_of_a_mountpoint_says_what_was_negotiated(self):
        self.model("10")
        with self.mount():
            done = ckpt("info", self.mnt)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(done.stdout.splitlines()[0], f"run       {self.run_dir}")
            self.assertIn("weights   8.2 M parameters in 5 tensors", done.stdout)
            self.assertNotIn("max read", done.stdout)
            self.assertIn("max read: 1048576", ckpt("info", self.mnt, "-v").stdout)
            said = json.loads(ckpt("info", self.mnt, "--json").stdout)
            self.assertEqual((said["settings"]["max_read"], said["steps"], said["format"]), (1048576, 1, "hf"))


if __name__ == "__main__":
    if not os.path.exists(CKPTFS):
        print("no ckptfs program")
        sys.exit(77)
    main()
