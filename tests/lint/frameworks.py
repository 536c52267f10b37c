#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A framework is a folder: frameworks.py SOURCE_DIR [OBJECT_DIR]

1. No file outside of core/format/NAME includes one of its headers, and no object outside of it, but those of the tables (format/reader.c,
   changes.c, trainer.c and writer.c), needs one of its symbols. USERS lists the folders
   that are containers of others, with who uses them.
2. The words of WORDS stand in no code of core and fs outside of core/format/NAME, strings and #include lines counted, comments aside. ALLOWED
   lists what stays, with the reason; CEILING is how many others there are: it can only fall.

OBJECT_DIR has the objects of which the static library consists, in the folders of their sources. Where it isn't given symbols are not looked at."""
import os
import re
import subprocess
import sys

# Nobody uses a folder, except for the folders and files named here. Those without an entry can be deleted, with their data and their lines in the
# tables: tests/delete_framework.sh does that with each, and builds.
USERS = {
    "dcp": ("format/megatron/", "format/olmo_core/", "format/torchtitan/"),  # a container of theirs
    "huggingface": ("format/deepspeed/", "format/delta/", "format/megatron/", "model/base.c"),  # a model or an adapter beside, or the base
    "torch": ("format/deepspeed/", "format/huggingface/", "format/litgpt/"),  # files of torch.save
}

TABLES = ("format/reader.c", "format/changes.c", "format/trainer.c", "format/writer.c")

WORDS = re.compile("nanotron|megatron|deepspeed|automodel|torchtitan|slime|skyrl|vllm|sharded_state|olmo_core|model_and_optim|litgpt|lit_model|torchtune|orbax|maxtext", re.I)

# What stays, at most MOST words: a file, how many, why.
MOST = 7
ALLOWED = [
    ("fs/options.c", 4, "the words of an option, which --help and the completions list and the command looks for in the library's table; and 'megatron_path',\n     which other programs call RUN"),
    ("core/format/reader.c", 1, "SHARDED_STATE_DICT is a word of torch's FSDP1, not vLLM's format"),
]

# How many words are left that no reason keeps. It can only fall.
CEILING = 0

INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.M)
# A string, a character or a comment. A string that looks like a comment is none.
TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|/\*.*?\*/|//[^\n]*', re.S)
# A line of a table: CKPT_READER(NAME, ...). It may name one framework.
ENTRY = re.compile(r"\s*CKPT_[A-Z_]+\(\s*(\w+)")


def sources(root):
    for top in ("core", "fs"):
        for folder, dirs, files in os.walk(os.path.join(root, top)):
            dirs.sort()
            for name in sorted(files):
                if name.endswith((".c", ".h")):
                    path = os.path.relpath(os.path.join(folder, name), root)
                    with open(os.path.join(root, path), encoding="utf-8") as f:
                        yield path, f.read()


def framework_of(path):
    """The folder below core/format of a file or an object; None: it is in none."""
    part = path.removeprefix("core/").split("/")
    return part[1] if len(part) > 2 and part[0] == "format" else None


def may_use(path, name):
    return framework_of(path) == name or path.removeprefix("core/").startswith(USERS.get(name, ()))


def includes(root):
    for path, text in sources(root):
        for m in INCLUDE.finditer(text):
            name = framework_of(m.group(1))
            if name and not may_use(path, name):
                yield "%s:%d: \"%s\" is a framework's, which only its own folder includes" % (path, text.count("\n", 0, m.start()) + 1, m.group(1))


def symbols(objects):
    """Symbols of a framework that objects of other folders need."""
    paths = sorted(os.path.relpath(os.path.join(folder, f), objects) for folder, _, files in os.walk(objects) for f in files if f.endswith(".o"))
    defined, needed = {}, []
    for line in subprocess.run(["nm", "-A", "-P", "-g", *paths], cwd=objects, check=True, capture_output=True, text=True).stdout.splitlines():
        path, rest = line.split(": ", 1)
        symbol, kind = rest.split()[:2]
        if kind == "U":
            needed.append((path, symbol))
        else:
            defined[symbol] = framework_of(path)
    if not any(defined.values()):
        yield "%s: no object of core/format is there" % objects
    for path, symbol in needed:
        name = defined.get(symbol)
        if name and not may_use(path, name) and path not in [t + ".o" for t in TABLES]:
            yield "%s needs %s, which core/format/%s defines" % (path, symbol, name)


def words_of(path, text):
    """The lines of a file, without comments, with their words."""
    if framework_of(path):
        return
    code = TOKEN.sub(lambda m: re.sub(r"[^\n]", " ", m.group(0)) if m.group(0)[0] == "/" else m.group(0), text)
    for number, line in enumerate(code.split("\n"), 1):
        found = WORDS.findall(line)
        entry = ENTRY.match(line)
        if found and not (entry and set(found) <= {entry.group(1)}):
            yield number, found


def count(root):
    """The findings that no reason keeps, and what is wrong with the reasons."""
    left, kept = [], {}
    allowed = {path: n for path, n, _ in ALLOWED}
    for path, text in sources(root):
        for number, found in words_of(path, text):
            for word in found:
                kept[path] = kept.get(path, 0) + 1
                if kept[path] > allowed.get(path, 0):
                    left.append("%s:%d: %s" % (path, number, word))
    bad = ["%s has %d words of frameworks, of which %d are allowed: correct the list" % (path, kept.get(path, 0), n)
           for path, n in allowed.items() if kept.get(path, 0) < n]
    if sum(allowed.values()) > MOST:
        bad.append("%d words are allowed, at most %d may be" % (sum(allowed.values()), MOST))
    return left, bad


def check_itself():
    """The rules, on texts of which the answer is known."""
    text = '/* slime */ x = "/* vLLM */"; // vllm\nCKPT_A(nanotron, "nanotron")\nCKPT_A(nanotron, "megatron")\n#include "format/automodel/a.h"\n'
    assert [n for n, _ in words_of("core/model/a.c", text)] == [1, 3, 4]
    assert not list(words_of("core/format/delta/a.c", text)) and list(words_of("core/format/a.c", text))
    assert framework_of("format/delta/a.c.o") == "delta" and framework_of("core/format/reader.c") is None
    assert may_use("core/format/delta/a.c", "delta") and may_use("format/megatron/a.c.o", "dcp") and not may_use("format/dcp/a.c.o", "megatron") and not may_use("core/model/a.c", "dcp")


def main():
    check_itself()
    root = sys.argv[1]
    bad = list(includes(root))
    bad += symbols(sys.argv[2]) if len(sys.argv) > 2 else []
    left, wrong = count(root)
    bad += wrong
    if len(left) > CEILING:
        bad += left + ["a framework's word stands %d times in rooms that know none, %d at most: it belongs in core/format/NAME" % (len(left), CEILING)]
    elif len(left) < CEILING:
        bad.append("only %d words are left: lower CEILING, which is %d, so that it can only fall" % (len(left), CEILING))
    print("\n".join(bad) if bad else "nobody outside of a framework's folder needs it; %d words are left, and %d stay for a reason" %
          (len(left), sum(n for _, n, _ in ALLOWED)))
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
