#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Includes point down only: layers.py SOURCE_DIR"""
import os
import re
import sys

BELOW = {
    "base": {"base"},
    "io": {"base", "io"},
    "tensor": {"base", "io", "tensor"},
    "container": {"base", "io", "tensor", "container"},
    "ckpt": {"base", "io", "tensor", "container", "ckpt"},
    "recipe": {"base", "io", "tensor", "recipe"},
    "view": {"base", "io", "tensor", "container", "view"},
    "run": {"base", "io", "tensor", "container", "ckpt", "recipe", "view", "run"},
    "load": {"base", "io", "tensor", "container", "ckpt", "recipe", "view", "run", "load"},
    "": {"base", "io", "tensor", "container", "ckpt", "recipe", "view", "run"},  # core/api.c
}
# Third-party headers and the only places that may include them.
PLACES = [
    (r"jansson\.h", r"core/base/json\.h|fs/.*"),
    (r"fuse.*\.h|fuse3/.*", r"fs/.*"),
    (r"yaml\.h", r"core/container/yaml\.c"),
    (r"pcre2.*\.h", r"core/base/regex\.c"),
    (r"mpi\.h", r"core/load/xport_mpi\.c|include/ckptfs/load_mpi\.h"),
    (r"nccl\.h", r"core/load/(xport_nccl|cuda)\.c|include/ckptfs/load_nccl\.h"),
    (r"(cuda|cuda_runtime|cuda_runtime_api)\.h", r"core/load/(xport_nccl|cuda)\.c|core/load/cuda\.h|include/ckptfs/load_nccl\.h"),
]
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^">]+)[">]', re.M)


def sources(root, top):
    for folder, dirs, files in os.walk(os.path.join(root, top)):
        dirs.sort()
        for name in sorted(files):
            if name.endswith((".c", ".h")):
                yield os.path.relpath(os.path.join(folder, name), root)


def core_allows(path, quote, name):
    layer = os.path.dirname(path)[len("core/"):]
    if quote == "<" or layer not in BELOW:
        return layer in BELOW
    return os.path.dirname(name) in BELOW[layer]


def fs_allows(root, path, quote, name):
    if quote == "<" or os.path.dirname(name) == "base":
        return True
    return os.path.exists(os.path.join(root, "fs", name))


def check(root, path):
    with open(os.path.join(root, path), encoding="utf-8") as f:
        text = f.read()
    for m in INCLUDE.finditer(text):
        quote, name = m.groups()
        line = text.count("\n", 0, m.start()) + 1
        ours = name.startswith("ckptfs/")
        for header, places in PLACES:
            if re.fullmatch(header, name) and quote == "<" and not re.fullmatch(places, path):
                yield "%s:%d: <%s> may only be included in %s" % (path, line, name, places)
        if path.startswith("include/") and quote == "<" and not ours and "/" in name:
            yield "%s:%d: a public header includes <%s>" % (path, line, name)
        elif path.startswith("core/") and not ours and not core_allows(path, quote, name):
            yield "%s:%d: \"%s\" is not below this layer" % (path, line, name)
        elif path.startswith("fs/") and not ours and not fs_allows(root, path, quote, name):
            yield "%s:%d: fs includes only <ckptfs/...>, base and its own files, not \"%s\"" % (path, line, name)


def main():
    root = sys.argv[1]
    bad = [e for top in ("core", "fs", "include") for p in sources(root, top) for e in check(root, p)]
    print("\n".join(bad) if bad else "includes point down only")
    sys.exit(1 if bad else 0)


main()
