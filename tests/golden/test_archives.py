# SPDX-License-Identifier: Apache-2.0
"""Every golden checkpoint inside an archive, which is read in place: by Python's tarfile and zipfile, and by GNU tar, in all their formats."""

import bz2
import gzip
import io
import lzma
import os
import random
import shutil
import stat
import subprocess
import tarfile
import tempfile
import unittest
import zipfile

import case as golden
from case import CKPT, roots


def python_tar(form):
    def pack(folder, path, above=""):
        with tarfile.open(path, "w", format=form) as tar:
            tar.add(folder, arcname=above or ".")

    return pack


def gnu_tar(form):
    def pack(folder, path, above=""):
        what = ["-C", os.path.dirname(folder), "--transform", f"s,^{os.path.basename(folder)},{above}/,", os.path.basename(folder)] if above else ["-C", folder, "."]
        subprocess.run(["tar", f"--format={form}", "-cf", path, *what], check=True)

    return pack


def python_zip(folder, path, above=""):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as z:
        for top, dirs, files in os.walk(folder):
            for name in files + dirs:
                full = os.path.join(top, name)
                z.write(full, os.path.join(above, os.path.relpath(full, folder)))


WRITERS = [python_tar(tarfile.USTAR_FORMAT), python_tar(tarfile.GNU_FORMAT), python_tar(tarfile.PAX_FORMAT), gnu_tar("gnu"), gnu_tar("posix"), gnu_tar("ustar"), python_zip]
WRITER_NAMES = ["tarfile ustar", "tarfile gnu", "tarfile pax", "tar gnu", "tar posix", "tar ustar", "zip"]


def run(*args):
    return subprocess.run([CKPT, *args], capture_output=True, text=True)


def cases():
    for top, _, files in os.walk(next(roots())):
        for name in sorted(files):
            if name.startswith("case") and name.endswith(".json"):
                yield golden.load(os.path.join(top, name))


class Archives(unittest.TestCase):
    def setUp(self):
        self.tmp = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.tmp)

    def path(self, name):
        return os.path.join(self.tmp, name)

    def model(self, folder="model"):
        """A small Hugging Face model."""
        out = self.path(folder)
        shutil.copytree(os.path.join(next(roots()), "accelerate", "fsdp2_rankbin_llama_w2", "expected"), out)
        return out

    def digest(self, path, *args):
        done = run("digest", path, *args)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def refused(self, path, *words):
        done = run("info", path)
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        for word in words:
            self.assertIn(word, done.stderr)

    def test_every_golden_case_in_one_of_the_formats(self):
        count = 0
        for n, case in enumerate(sorted(cases(), key=lambda c: c["folder"])):
            source = os.path.normpath(os.path.join(case["folder"], case["open"]))
            if os.path.isfile(source):
                continue
            which = n % len(WRITERS)
            path = self.path(f"{n}.nemo")
            WRITERS[which](source, path)
            with self.subTest(case["folder"], writer=WRITER_NAMES[which]):
                self.assertEqual(golden.check(case | {"open": path}), [])
            os.remove(path)
            count += 1
        self.assertGreater(count, 30)

    def test_one_case_in_every_format(self):
        model = self.model()
        want = self.digest(model)
        for name, write in zip(WRITER_NAMES + ["tar v7"], WRITERS + [gnu_tar("v7")]):
            with self.subTest(name):
                write(model, self.path("a"))
                self.assertEqual(self.digest(self.path("a")), want)

    def test_names_longer_than_a_header_has_room_for(self):
        model = self.model()
        want = self.digest(model)
        deep = "/".join(["a" * 60] * 5)
        for name, write in zip(WRITER_NAMES, WRITERS):
            if "ustar" not in name:
                with self.subTest(name):
                    write(model, self.path("a"), deep)
                    # one folder in a folder is no step: the run is the archive's only folder
                    outer = run("info", self.path("a"))
                    self.assertEqual(outer.returncode, 1, outer.stdout)
                    write(model, self.path("b"), "s" * 150)
                    self.assertEqual(self.digest(self.path("b"), "--step", "s" * 150), want)

    def test_a_folder_of_steps(self):
        runs = self.path("runs")
        for step in ("100", "200"):
            shutil.copytree(self.model(step), os.path.join(runs, step))
        os.symlink("200", os.path.join(runs, "latest"))
        with tarfile.open(self.path("runs.tar"), "w") as tar:
            tar.add(runs, arcname="")
        self.assertEqual(self.digest(self.path("runs.tar"), "--step", "100"), self.digest(self.path("100")))

    def test_links_out_of_a_folder(self):
        """Of side files, of the config and of weights; the option that follows them is named, and archives are not."""
        for kept, name in (("tokenizer.json", "side"), ("config.json", "config"), ("model.safetensors.index.json", "weights")):
            model, out = self.model(name), self.path(name + ".out")
            with open(os.path.join(model, kept), "a"):
                pass
            os.rename(os.path.join(model, kept), out)
            os.symlink(out, os.path.join(model, kept))
            done = run("info", model)
            self.assertEqual(done.returncode, name == "weights", done.stderr)
            self.assertIn(f"{kept}' is a link that leads out of '{model}' (option follow_symlinks allows it)", done.stderr)
            self.assertNotIn("archive", done.stderr)
            self.assertEqual(run("info", model, "-o", "follow_symlinks").stderr, "")
        done = run("export", self.path("config"), self.path("exported"))
        self.assertEqual(done.returncode, 1)
        self.assertIn("follow_symlinks", done.stderr.splitlines()[-1])

    def test_links_that_lead_nowhere(self):
        """A snapshot of the hub's cache, packed without tar's -h; one whose weights are files; a folder of runs; nothing."""
        model = self.model("snapshot")
        os.symlink("../../blobs/1", os.path.join(model, "tokenizer.model"))
        os.symlink("nothing", os.path.join(model, "merges.txt"))
        gnu_tar("gnu")(model, self.path("part.tar"))
        done = run("info", self.path("part.tar"))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("2 side files that are links", done.stdout + done.stderr)
        for name in os.listdir(model):
            os.remove(os.path.join(model, name))
            os.symlink("../../blobs/" + name, os.path.join(model, name))
        gnu_tar("gnu")(model, self.path("links.tar"))
        self.refused(self.path("links.tar"), "links to files that are not in it", "tar -h")
        runs = self.path("runs")
        for name in ("a", "b"):
            shutil.copytree(self.model(name), os.path.join(runs, name, "step-1"))
        gnu_tar("gnu")(runs, self.path("runs.tar"))
        self.refused(self.path("runs.tar"), "unpack it and give one of 'a', 'b'")
        subprocess.run(["tar", "-cf", self.path("empty.tar"), "-T", "/dev/null"], check=True)
        zipfile.ZipFile(self.path("empty.zip"), "w").close()
        for name in ("empty.tar", "empty.zip"):
            self.refused(self.path(name), "is an archive without any file")

    def test_names_with_control_characters_are_printed_escaped(self):
        model = self.model()
        with open(os.path.join(model, "a\x1b[31mb.txt"), "w"):
            pass
        python_tar(tarfile.PAX_FORMAT)(model, self.path("a.tar"))
        self.assertNotIn("\x1b", self.digest(self.path("a.tar")))

    def test_links_inside_are_followed_and_those_out_of_it_are_not(self):
        model = self.model()
        want = self.digest(model)
        blobs = os.path.join(model, ".blobs")
        os.mkdir(blobs)
        for n, name in enumerate(sorted(os.listdir(model))):
            if name.endswith(".safetensors"):
                os.rename(os.path.join(model, name), os.path.join(blobs, str(n)))
                os.symlink(f"../model/./.blobs/{n}", os.path.join(model, name))
        os.link(os.path.join(model, "config.json"), os.path.join(blobs, "config"))  # one of the two is a hard link in the archive
        with tarfile.open(self.path("a.tar"), "w") as tar:
            tar.add(model, arcname="model")
            self.assertIn(tarfile.LNKTYPE, [m.type for m in tar.getmembers()])
        self.assertEqual(self.digest(self.path("a.tar"), "--step", "model"), want)
        for name in os.listdir(model):
            if name.endswith(".safetensors"):
                os.remove(os.path.join(model, name))
                os.symlink("../../etc/passwd", os.path.join(model, name))
        with tarfile.open(self.path("b.tar"), "w") as tar:
            tar.add(model, arcname=".")
        self.refused(self.path("b.tar"), "leads out of the archive")

    def test_links_in_a_zip_archive(self):
        """zip -y stores the target's name as the link's data."""
        model = self.model()
        want = self.digest(model)

        def pack(path, away):
            with zipfile.ZipFile(path, "w") as z:
                for name in sorted(os.listdir(model)):
                    if name.endswith(".json") and away:
                        z.write(os.path.join(model, name), name)
                        continue
                    z.write(os.path.join(model, name), f".blobs/{name}")
                    link = zipfile.ZipInfo(name)
                    link.create_system = 3
                    link.external_attr = (stat.S_IFLNK | 0o777) << 16
                    z.writestr(link, f"{away}.blobs/{name}")

        pack(self.path("a.zip"), "")
        self.assertEqual(self.digest(self.path("a.zip")), want)
        pack(self.path("b.zip"), "../")
        self.refused(self.path("b.zip"), "leads out of the archive")

    def test_of_two_members_with_one_name_the_second_counts(self):
        model = self.model()
        with tarfile.open(self.path("a.tar"), "w") as tar:
            info = tarfile.TarInfo("config.json")
            info.size = 3
            tar.addfile(info, io.BytesIO(b"{x}"))
            tar.add(model, arcname=".")
        self.assertEqual(self.digest(self.path("a.tar")), self.digest(model))

    def test_an_appended_archive(self):
        """tar -r writes over the mark at the end."""
        model = self.model()
        first, rest = sorted(os.listdir(model))[0], sorted(os.listdir(model))[1:]
        subprocess.run(["tar", "-cf", self.path("a.tar"), "-C", model, first], check=True)
        subprocess.run(["tar", "-rf", self.path("a.tar"), "-C", model, *rest], check=True)
        self.assertEqual(self.digest(self.path("a.tar")), self.digest(model))

    def test_compressed_archives_are_refused_with_the_way_out(self):
        gnu_tar("gnu")(self.model(), self.path("a.tar"))
        with open(self.path("a.tar"), "rb") as f:
            data = f.read()
        for name, packed, command in (("a.nemo", gzip.compress(data), "tar -xzf"), ("b.tar.bz2", bz2.compress(data), "tar -xjf"), ("c.tar.xz", lzma.compress(data), "tar -xJf")):
            with open(self.path(name), "wb") as f:
                f.write(packed)
            self.refused(self.path(name), command, "unpack it")
        with zipfile.ZipFile(self.path("d.zip"), "w", zipfile.ZIP_DEFLATED) as z:
            z.writestr("config.json", "{}" * 100)
        self.refused(self.path("d.zip"), "compressed", "unzip")

    def test_what_no_reader_reads_is_named(self):
        for name, words in (("model.nemo", "give the archive itself"), ("model_weights.ckpt", "NeMo 1"), ("model-q4.gguf", "GGUF"), ("_CHECKPOINT_METADATA", "Orbax"), ("manifest.ocdbt", "Orbax"),
                            ("flax_model.msgpack", "Flax"), ("tf_model.h5", "TensorFlow"), ("model.ckpt.data-00000-of-00001", "TensorFlow"),
                            ("consolidated.00.pth", "its maker's own format"), ("consolidated.safetensors", "its maker's own format")):
            with self.subTest(name), tempfile.TemporaryDirectory() as tmp:
                with open(os.path.join(tmp, name), "wb") as f:
                    f.write(b"GGUF")
                self.refused(tmp, words, name)
                if name.endswith(".gguf"):
                    self.refused(os.path.join(tmp, name), "GGUF", "gguf_file")
        with tempfile.TemporaryDirectory() as tmp:  # one is read; of two, none is the model
            for name in ("epoch=0-step=2.ckpt", "last.ckpt"):
                with open(os.path.join(tmp, name), "wb") as f:
                    f.write(b"PK")
            self.refused(tmp, "several models in one file each", "give the file itself")
        model = self.model()  # beside what is read, they are no reason to refuse
        want = self.digest(model, "--tensors")
        with open(os.path.join(model, "model-q4.gguf"), "wb") as f:
            f.write(b"GGUF")
        self.assertEqual(self.digest(model, "--tensors"), want)

    def test_other_files_are_no_archives(self):
        model = self.model()
        name = next(n for n in os.listdir(model) if n.endswith(".safetensors"))
        done = run("info", os.path.join(model, name))
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("give the folder", done.stderr)
        with zipfile.ZipFile(self.path("model.pt"), "w") as z:  # as torch.save names its members
            z.writestr("model/data.pkl", b"\x80\x02N.")
        self.assertIn("what was saved is None", run("info", self.path("model.pt")).stderr)

    def test_a_truncated_archive_is_refused_wherever_it_ends(self):
        gnu_tar("gnu")(self.model(), self.path("a.tar"))
        with open(self.path("a.tar"), "rb") as f:
            data = f.read()
        with tarfile.open(self.path("a.tar")) as tar:
            last = tar.getmembers()[-1]
        end = last.offset_data + -(-last.size // 512) * 512  # of the members; zeros follow
        cuts = [end, end + 511, end + 512, end + 1023, last.offset, last.offset_data] + random.Random(0).sample(range(512, end), 20)
        for cut in cuts:
            with open(self.path("b.tar"), "wb") as f:
                f.write(data[:cut])
            with self.subTest(cut):
                self.refused(self.path("b.tar"), "truncated, or still being written")

    def test_an_export_and_a_base(self):
        model = self.model()
        gnu_tar("gnu")(model, self.path("a.tar"))
        done = run("export", self.path("a.tar"), self.path("out"))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(run("verify", model, self.path("out")).returncode, 0)
        case = os.path.join(next(roots()), "accelerate", "fsdp2_rankbin_llama_w2")
        gnu_tar("gnu")(os.path.join(case, "base"), self.path("base.tar"))
        want = self.digest(os.path.join(case, "run"), "-o", f"base={case}/base")
        self.assertEqual(self.digest(os.path.join(case, "run"), "-o", f"base={self.path('base.tar')}"), want)


if __name__ == "__main__":
    unittest.main()
