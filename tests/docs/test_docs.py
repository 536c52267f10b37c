# SPDX-License-Identifier: Apache-2.0
"""What the documents tell people to type is run: every ```console and ```python block of README.md and contrib/docs.

A file's console blocks run in one shell, in order, with RUN (a nanotron run), MNT (an empty directory) and the programs in PATH; a mount
that is left behind is ended. A python block with an import runs with RUN and `model` (on the meta device); one without is only parsed.
Every name below `ckptfs` that a document mentions exists. ```text is not run: it needs another machine, or shows what comes out."""

import ast
import glob
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import unittest

SOURCE = os.path.realpath(os.environ.get("CKPTFS_SOURCE", os.path.join(os.path.dirname(__file__), "..", "..")))
BUILD = os.path.realpath(os.environ.get("CKPTFS_BUILD", os.path.join(SOURCE, "build", "release")))
GOLDEN = os.path.join(SOURCE, "tests", "golden", "nanotron", "llama_tp2_pp2_tied")
os.environ.update(HF_HUB_OFFLINE="1", CKPTFS_LIBRARY_PATH=BUILD)
sys.path.insert(0, os.path.join(SOURCE, "contrib", "python"))

try:
    import torch
    import transformers

    import ckptfs
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)
if not os.path.exists("/dev/fuse"):
    print("skipped: no /dev/fuse")
    sys.exit(77)

DOCUMENTS = [os.path.join(SOURCE, "README.md"), *sorted(glob.glob(os.path.join(SOURCE, "contrib", "docs", "**", "*.md"), recursive=True))]
MODULES = ("torch", "transformers", "accelerate", "megatron", "nanotron", "vllm")


def blocks(path, word):
    with open(path) as f:
        return re.findall(rf"^```{word}\n(.*?)^```$", f.read(), re.M | re.S)


def commands(path):
    """The lines after a "$ ", without their comments."""
    return [line[2:].split("  #")[0].rstrip() for block in blocks(path, "console") for line in block.splitlines() if line.startswith("$ ")]


class Documents(unittest.TestCase):
    def setUp(self):
        self.tmp = tempfile.mkdtemp(prefix="ckptfs-docs-")
        self.run_dir, self.mnt = os.path.join(self.tmp, "run"), os.path.join(self.tmp, "mnt")
        shutil.copytree(GOLDEN, self.run_dir, copy_function=shutil.copyfile)
        os.mkdir(self.mnt)
        self.addCleanup(shutil.rmtree, self.tmp)

    def shell(self, text):
        env = os.environ | {"RUN": self.run_dir, "MNT": self.mnt, "PATH": os.path.join(BUILD, "fs") + ":" + os.environ["PATH"], "LC_ALL": "C"}
        return subprocess.run(["bash", "-e", "-c", text], cwd=self.tmp, env=env, capture_output=True, text=True, timeout=240)

    def test_commands(self):
        seen = 0
        for path in DOCUMENTS:
            lines = commands(path)
            seen += len(lines)
            mounts = any(line.startswith("ckptfs ") for line in lines)
            if not mounts and any("$MNT" in line for line in lines):
                self.shell("ckptfs $RUN $MNT")
            with self.subTest(path):
                try:
                    for line in lines:
                        done = self.shell(line)
                        self.assertEqual(done.returncode, 0, f"{line}\n{done.stdout}{done.stderr}")
                finally:
                    if os.path.ismount(self.mnt):
                        self.shell("fusermount3 -u $MNT")
        self.assertGreater(seen, 5)

    def model(self):
        with ckptfs.open(self.run_dir) as f, torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**f.config))

    def test_python(self):
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(self.tmp)  # what a block writes
        ran = 0
        for path in DOCUMENTS:
            for block in blocks(path, "python"):
                with self.subTest(path, block=block):
                    code = compile(block.replace("\n  \n", "\n"), path, "exec")
                    if "import " in block:
                        exec(code, {"RUN": self.run_dir, "model": self.model()})
                        ran += 1
        self.assertGreater(ran, 3)

    def test_names(self):
        modules = {name: importlib.import_module(f"ckptfs.{name}") for name in MODULES}
        for path in DOCUMENTS:
            with open(path) as f:
                for name in set(re.findall(r"\bckptfs((?:\.[A-Za-z_]+)+)\(", f.read())):
                    with self.subTest(path, name=name):
                        first, *rest = name[1:].split(".")
                        found = modules.get(first) or getattr(ckptfs, first)
                        for part in rest:
                            found = getattr(found, part)

    def test_the_recorded_session_is_what_comes_out(self):
        done = subprocess.run([os.path.join(SOURCE, "tests", "docs", "record.sh"), BUILD], capture_output=True, text=True, timeout=240)
        self.assertEqual(done.returncode, 0, done.stderr)
        with open(os.path.join(SOURCE, "contrib", "docs", "session.txt")) as f:
            self.assertEqual(done.stdout, f.read())

    def test_pictures_show_their_figures(self):
        figures = os.path.join(SOURCE, "contrib", "docs", "figures")
        made = subprocess.run([sys.executable, os.path.join(SOURCE, "tests", "bench", "plot.py"),
                               *(os.path.join(figures, f"{name}.json") for name in ("load", "reader", "strategy"))],
                              check=True, capture_output=True, text=True).stdout
        with open(os.path.join(figures, "loads.svg"), encoding="utf-8") as f:
            self.assertEqual(f.read(), made, "plot.py load.json reader.json strategy.json > loads.svg")

    def test_manual_pages_list_the_options_that_help_lists(self):
        """The same words with the same values: help is printed from the table of options, the pages' .It are written by hand."""
        for page, begin, commands in (("mount/ckptfs.1", "The options are:", ["ckptfs"]), ("load/ckpt-load.1", ".Bl -tag", ["ckpt load", "ckpt plan"]),
                                      ("tool/ckpt.1", "The options are:", [f"ckpt {c}" for c in "info ls explain export verify delta digest".split()])):
            said = [self.shell(f"{c} --help").stdout for c in commands]
            if page != "mount/ckptfs.1":  # which describes what is shown for all of them
                said = [text.split("What is shown of the checkpoint:")[0] for text in said]
            helped = {word for text in said for found in re.findall(r"^  (?:-(\w),|   ) --(\S+)", text, re.M) for word in found if word}
            with open(os.path.join(SOURCE, "fs", page)) as f:
                options = re.split(r"\.S[sh] (?:ENVIRONMENT|Extended)", f.read().split(begin, 1)[1])[0]
            listed = set()
            for line in re.findall(r"^\.It (.*)$", options, re.M):
                plain = re.sub(r"\b(?:Fl|Cm|Ar) -?", "", re.sub(r" *\bNs *", "", line).replace(" | ", "|"))
                if not plain.startswith("auto_unmount"):  # FUSE's
                    listed.update(words.split()[0] for words in plain.split(" , "))
            self.assertEqual(listed, helped, page)

    def test_help_is_a_word_too(self):
        def said(*args):
            return subprocess.run([os.path.join(BUILD, "fs", "ckpt"), *args], capture_output=True, text=True, check=True).stdout
        self.assertEqual(said("help"), said("--help"))
        self.assertEqual(said("help", "export"), said("export", "--help"))

    def test_help_has_what_a_command_obeys(self):
        """A command that shows no files is silent about the formats of files; `ckpt help options` has everything."""
        def words(*args):
            said = subprocess.run([os.path.join(BUILD, "fs", "ckpt"), *args], capture_output=True, text=True, check=True).stdout
            return set(re.findall(r"^  (?:-\w,|   ) --([\w-]+)", said, re.M))
        info, export, everything = words("info", "--help"), words("export", "--help"), words("help", "options")
        self.assertTrue({"json", "base", "connections"} <= info and not {"tp", "ranks", "names", "layout"} & info, info)
        self.assertTrue({"base", "tp", "names", "connections", "watch"} <= export, export)
        for command in "info ls explain export verify delta digest load plan".split():
            self.assertLessEqual(words(command, "--help"), everything)

    def test_what_is_wrong_with_a_command_line_is_said(self):
        for typed, text in (("ckpt", "no command"), ("ckpt exprot $RUN x", "exprot: no such command; did you mean export"),
                            ("ckpt ls", "missing arguments: usage: ckpt ls RUN"), ("ckpt ls $RUN x", "too many arguments"),
                            ("ckpt ls $RUN --dtpe=stored", "option dtpe: no such option; did you mean --dtype"), ("ckpt ls $RUN -x", "-x: no such option"),
                            ("ckpt ls $RUN --dtype", "--dtype needs a value"), ("ckpt ls $RUN -o", "-o needs a value"),
                            ("ckpt --tensors ls $RUN", "--tensors does not apply to ckpt ls: it is an option of ckpt verify, ckpt digest"),
                            ("ckpt info $RUN --layout tp=1", "--layout does not apply to ckpt info"), ("ckpt digest $RUN --jobs 0", "'0' is not a number from 1 to 256"),
                            ("ckpt ls $RUN -o jobs=3", "option jobs: no such option"), ("ckpt-load ls $RUN", "expected load or plan")):
            done = self.shell(typed)
            self.assertEqual((done.returncode, text in done.stderr, done.stdout), (2, True, ""), (typed, done.stderr))
        for typed in ("ckpt --json --step 10 ls $RUN", "ckpt ls $RUN --max-shard-size 20KB --allow_partial=no", "ckpt ls $RUN --view dcp --ranks 2", "ckpt ls -- $RUN",
                      "ckpt info $RUN --num-attention-heads 4", "ckpt --layout tp=1 load $RUN", "ckpt plan $RUN --layout tp=1 --ranks 1 -o view=dcp,ranks=2"):
            self.assertEqual(self.shell(typed).returncode, 0, (typed, self.shell(typed).stderr))

    def test_completions_offer_the_words_of_help(self):
        """What is typed after `ckpt`, and what bash then offers."""
        script = os.path.join(SOURCE, "contrib", "completions", "ckpt.bash")
        for typed, offered in (("ckpt ex", ["explain", "export"]), ("ckpt export RUN --no", ["--no-weights"]), ("ckpt ls RUN --f", ["--files", "--follow_symlinks", "--far=", "--fuse_qkv"]),
                               ("ckpt plan RUN --readers=", ["auto", "once", "node", "each"]), ("ckptfs --sand", ["--sandbox="]), ("ckptfs RUN -o wait,allow_o", ["wait,allow_other"]),
                               ("ckpt info RUN -o view=dcp", ["dcp", "dcp_hf"]), ("ckpt digest --jobs 3 RUN -o dequantize,lor", ["dequantize,lora=", "dequantize,lora_alpha="])):
            program = typed.split()[0]
            ask = f'source {script}; COMP_LINE="$1" COMP_POINT=${{#1}}; _ckpt_complete {program}; printf "%s\\n" "${{COMPREPLY[@]}}"'
            self.assertEqual(self.shell(f"bash -c {shlex.quote(ask)} bash {shlex.quote(typed)}").stdout.split(), offered, typed)

    def test_latest_is_resolved_once(self):
        """It may move between two files that a program opens: only what opens one is given the link itself."""
        more = ["contrib/docs/session.txt", "contrib/quickstart.sh", *glob.glob("fs/*.1", root_dir=SOURCE), *glob.glob("contrib/python/ckptfs/*.py", root_dir=SOURCE)]
        seen = 0
        for path in DOCUMENTS + [os.path.join(SOURCE, name) for name in more]:
            with open(path) as f:
                for line in f:
                    if re.search(r"(/mnt/run|MNT|mnt)/latest", line):
                        seen += 1
                        self.assertRegex(line, r"readlink -f|\bcd |\bls |^mnt/latest/?:$", path)
        self.assertGreater(seen, 5)

    def test_links(self):
        for path in DOCUMENTS:
            with open(path) as f:
                for link in re.findall(r"\]\(([^)#:]+)\)", f.read()):
                    self.assertTrue(os.path.exists(os.path.join(os.path.dirname(path), link)), f"{path}: {link}")

    def test_pages_of_frameworks_begin_with_a_line(self):
        for path in DOCUMENTS:
            if "/frameworks/" in path:
                first = blocks(path, "python")[0]
                self.assertEqual(first.count("\n"), 1, path)
                ast.parse(first)


if __name__ == "__main__":
    unittest.main(verbosity=2)
