#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Includes point down only, and modules need each other in no circle: layers.py SOURCE_DIR [OBJECT_DIR...]

A module is a .c file and its header. Two modules can need each other's functions although neither includes the other's header, where a third one
declares them. So the objects of OBJECT_DIR, folders of which each holds a library's in the folders of their sources, are looked at, too."""
import os
import re
import subprocess
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
# Objects below core that need each other's symbols in a circle: several files of what is one module. A set can only get smaller.
ONE_MODULE = [
    {"io/dir", "io/dir_folder"},  # ckpt_dir_open makes a folder, which is a directory
    {"load/engine/engine_life", "load/engine/messages", "load/engine/pump", "load/engine/pump_device", "load/engine/window", "load/engine/worker"},
    {"model/check", "model/complete", "model/dequantize", "model/model"},
    {"model/names", "model/prefix"},  # a search, and its first part
    {"recipe/apply/apply", "recipe/apply/items", "recipe/apply/lacks", "recipe/apply/sources", "recipe/apply/target"},
    {"recipe/apply/instance", "recipe/apply/lower"},
    {"view/ahead", "view/vtree"},
]
# Tables name modules that use them: a reader asks the table for other readers.
TABLES = {"format/reader", "format/changes", "format/trainer", "format/writer"}
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


def symbols(folders):
    """{object: the objects of whose symbols it needs one}, without the tables."""
    defined, needed = {}, []
    for folder in folders:
        paths = sorted(os.path.relpath(os.path.join(d, f), folder) for d, _, files in os.walk(folder) for f in files if f.endswith(".c.o"))
        for line in subprocess.run(["nm", "-A", "-P", "-g", *paths], cwd=folder, check=True, capture_output=True, text=True).stdout.splitlines():
            path, rest = line.split(": ", 1)
            symbol, kind = rest.split()[:2]
            module = path[:-len(".c.o")]
            if kind == "U":
                needed.append((module, symbol))
            elif kind.isupper():
                defined[symbol] = module
    graph = {}
    for module, symbol in needed:
        if symbol in defined and module not in TABLES and defined[symbol] != module:
            graph.setdefault(module, set()).add(defined[symbol])
    return graph


def check_symbols(graph):
    found = [set(c) for c in circles(graph)]
    for circle in found:
        if not any(circle <= one for one in ONE_MODULE):
            yield "these need each other's functions in a circle: " + ", ".join(sorted(circle))
    for one in ONE_MODULE:
        if one not in found:
            yield "these are no circle any more: correct the list, which has " + ", ".join(sorted(one))


def main():
    root, objects = sys.argv[1], sys.argv[2:]
    bad = [e for top in ("core", "fs", "include") for p in sources(root, top) for e in check(root, p)]
    bad += check_circles(root)
    bad += check_symbols(symbols(objects)) if objects else []
    print("\n".join(bad) if bad else "includes point down only, and modules need each other in no circle but those that are listed")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
