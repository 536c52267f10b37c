#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Includes point down only, and files do not include each other in a circle: layers.py SOURCE_DIR"""
import os
import re
import sys

RECIPE = ("recipe/language", "recipe/library", "recipe/apply")

BELOW_LOAD = ("base", "io", "tensor", "container", *RECIPE, "view", "format", "model", "run")

# A layer is the nearest folder that is listed here. Readers know files and not models: format includes no recipe.
BELOW = {
    "base": {"base"},
    "io": {"base", "io"},
    "tensor": {"base", "io", "tensor"},
    "container": {"base", "io", "tensor", "container"},
    "recipe/language": {"base", "io", "tensor", "recipe/language"},
    "recipe/library": {"base", "io", "tensor", "recipe/language", "recipe/library"},
    "recipe/apply": {"base", "io", "tensor", "recipe/language", "recipe/library", "recipe/apply"},
    "view": {"base", "io", "tensor", "container", "view"},
    "format": {"base", "io", "tensor", "container", "view", "format"},
    "model": {"base", "io", "tensor", "container", *RECIPE, "view", "format", "model"},
    "run": {"base", "io", "tensor", "container", *RECIPE, "view", "format", "model", "run"},
    "device": {"base", "tensor", "device"},
    "comm": {"base", "tensor", "device", "comm"},
    "load/want": {*BELOW_LOAD, "load/want"},
    "load/plan": {*BELOW_LOAD, "device", "load/want", "load/plan"},
    "load": {*BELOW_LOAD, "device", "comm", "load/want", "load/plan", "load"},  # with load/engine
    "": {"base", "io", "tensor", "container", *RECIPE, "view", "format", "model", "run"},  # core/api.c
}
# Tables that declare nothing, and the layer that may read them although they are not below it: recipes are found by the names of formats.
LISTS = {"recipe/library": {"format/readers.def", "format/writers.def"}}
# Third-party headers and the only places that may include them.
PLACES = [
    (r"jansson\.h", r"core/base/json\.h|fs/.*"),
    (r"fuse.*\.h|fuse3/.*", r"fs/.*"),
    (r"curl/.*", r"core/io/bucket/helper/.*\.c"),
    (r"expat\.h", r"core/io/bucket/helper/text\.c"),
    (r"yaml\.h", r"core/container/config\.c"),
    (r"zstd.*\.h", r"core/container/zstd\.c"),
    (r"pcre2.*\.h", r"core/base/regex\.c"),
    (r"sodium.*\.h", r"core/comm/secret\.c"),
    (r"mpi\.h", r"core/comm/mpi/xport\.c|include/ckptfs/load_mpi\.h"),
    (r"nccl\.h", r"core/comm/nccl/xport\.c|include/ckptfs/load_nccl\.h"),
    (r"(cuda|cudaTypedefs|cuda_runtime|cuda_runtime_api)\.h", r"core/device/cuda_driver\.h|include/ckptfs/load_nccl\.h"),
]
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^">]+)[">]', re.M)


def sources(root, top):
    for folder, dirs, files in os.walk(os.path.join(root, top)):
        dirs.sort()
        for name in sorted(files):
            if name.endswith((".c", ".h")):
                yield os.path.relpath(os.path.join(folder, name), root)


def layer_of(path):
    """The layer of a path below core/; None: it is in none."""
    folder = os.path.dirname(path)
    while folder and folder not in BELOW:
        folder = os.path.dirname(folder)
    return folder if folder or "/" not in path else None


def core_allows(path, quote, name):
    layer = layer_of(path[len("core/"):])
    if quote == "<" or layer is None:
        return layer is not None
    return layer_of(name) in BELOW[layer] or name in LISTS.get(layer, ())


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


def modules(root):
    """{module: the modules that it includes}; a module is a .c file and its header."""
    found = {}
    for top in ("core", "fs"):
        for path in sources(root, top):
            module = found.setdefault(os.path.splitext(path)[0], set())
            with open(os.path.join(root, path), encoding="utf-8") as f:
                for quote, name in INCLUDE.findall(f.read()):
                    for folder in (top, "core"):
                        if quote == '"' and os.path.exists(os.path.join(root, folder, name)):
                            module.add(os.path.splitext(os.path.join(folder, name))[0])
                            break
            module.discard(os.path.splitext(path)[0])
    return found


def circles(graph):
    """Sets of modules each of which includes, directly or not, all others."""
    reach = {}
    for start in graph:
        seen, todo = set(), [start]
        while todo:
            new = graph.get(todo.pop(), set()) - seen
            seen |= new
            todo += new
        reach[start] = seen
    return {frozenset(b for b in reach[a] if a in reach.get(b, ())) for a in graph if a in reach[a]}


def check_circles(root):
    found = circles(modules(root))
    for circle in sorted(map(sorted, found)):
        yield "these include each other in a circle: " + ", ".join(circle)


def main():
    root = sys.argv[1]
    bad = [e for top in ("core", "fs", "include") for p in sources(root, top) for e in check(root, p)]
    bad += check_circles(root)
    print("\n".join(bad) if bad else "includes point down only, and in no circle but those that are listed")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
