#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Ratios that matter, side by side in one run: the mount against the null daemon (the product's own session with a constant buffer), cp and
sha256sum through the mount against the real file, ckpt export against cp, and opening a run of very many files.

usage: tests/bench/bench.py [--build build/release] [--dir SCRATCH] [--gib 1.0] [--rounds 5] [--files 100000] [GROUP...]
groups: read copy export cold views open direct (default: all but direct)
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time

ROW = 4096  # elements of a row: 1 KiB a rank at eight ranks of bf16
TP = 8


def write_st(path, shape, metadata, block):
    """One bf16 tensor 'data' whose bytes repeat `block` (of random bytes)."""
    n = 2
    for d in shape:
        n *= d
    header = {"__metadata__": metadata, "data": {"dtype": "BF16", "shape": shape, "data_offsets": [0, n]}}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        left = n
        while left > 0:
            left -= f.write(block[:left])


def shard_meta(dim, rank, ranks, shape, chunks=None):
    """The local shape and the metadata of a rank's file: the dimension's chunks are split one by one."""
    def slices(lo, hi):
        return "|".join(f"{lo},{hi},None" if d == dim else "None,None,None" for d in range(len(shape)))

    local, pairs, at, done = list(shape), [], 0, 0
    for n in chunks or [shape[dim]]:
        part = n // ranks
        lo = at + rank * part
        pairs.append(slices(done, done + part) + "#" + slices(lo, lo + part))
        at, done = at + n, done + part
    local[dim] = done
    return local, {"version": "1.5", "local_global_slices_pairs": ";".join(pairs),
                   "unsharded_shape": "(" + ", ".join(map(str, shape)) + ")"}


def write_config(path, **config):
    with open(os.path.join(path, "model_config.json"), "w") as f:
        json.dump(dict(config, is_llama_config=True), f)


def make_raw_run(path, nbytes, dim, ranks, block):
    """Four tensors [rows, 4096], cut along `dim` over `ranks` files each. For view=raw."""
    rows = nbytes // 4 // (2 * ROW)
    for i in range(4):
        folder = os.path.join(path, "model", "model", f"w{i}")
        for r in range(ranks):
            local, meta = shard_meta(dim, r, ranks, [rows, ROW])
            write_st(os.path.join(folder, f"model_weight_pp-rank-0-of-1_tp-rank-{r}-of-{ranks}.safetensors"), local, meta, block)
    write_config(path)


def make_llama(path, files, block):
    """A Llama of so many layers that it has this many parameter files, TP 8: 34 a layer, each of a few KiB."""
    h, layers = 64, max(1, files // 34)
    sharded = {"attn/qkv_proj": (0, [3 * h, h], [h, h, h]), "attn/o_proj": (1, [h, h], [h]),
               "mlp/gate_up_proj": (0, [2 * h, h], [h, h]), "mlp/down_proj": (1, [h, h], [h])}
    metas = {name: [shard_meta(dim, r, TP, shape, chunks) for r in range(TP)] for name, (dim, shape, chunks) in sharded.items()}

    def put(folder, name):
        for r in range(TP):
            local, meta = metas[name][r]
            write_st(os.path.join(folder, f"model_weight_pp-rank-0-of-1_tp-rank-{r}-of-{TP}.safetensors"), local, meta, block)

    root = os.path.join(path, "model", "model")
    for i in range(layers):
        at = os.path.join(root, "decoder", str(i), "pp_block")
        for name in sharded:
            put(os.path.join(at, name), name)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            write_st(os.path.join(at, norm, "model_weight.safetensors"), [h], {}, block)
    write_st(os.path.join(root, "final_layer_norm", "pp_block", "model_weight.safetensors"), [h], {}, block)
    put(os.path.join(root, "token_position_embeddings", "pp_block", "token_embedding"), "attn/o_proj")
    write_config(path, hidden_size=h, num_attention_heads=8, num_key_value_heads=8, intermediate_size=h, vocab_size=h,
                 num_hidden_layers=layers, max_position_embeddings=64, rms_norm_eps=1e-6, rope_theta=10000.0, hidden_act="silu",
                 rope_interleaved=False, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, initializer_range=0.02)
    return 34 * layers + 1 + TP


class Mount:
    def __init__(self, args, run, *options):
        self.at = tempfile.mkdtemp(dir=args.dir)
        cmd = [os.path.join(args.build, "fs", "ckptfs"), run, self.at]
        for o in options:
            cmd += ["-o", o]
        self.proc = subprocess.Popen(cmd + ["-f"])
        t0 = time.monotonic()
        while not os.path.ismount(self.at):
            if self.proc.poll() is not None:
                sys.exit(f"ckptfs {run}: exit {self.proc.returncode}")
            time.sleep(0.001)
        self.up_s = time.monotonic() - t0

    def file(self):
        return os.path.join(self.at, "model.safetensors")

    def memory(self):
        """Bytes of memory that belong to the daemon alone."""
        with open(f"/proc/{self.proc.pid}/smaps_rollup") as f:
            return sum(int(line.split()[1]) * 1024 for line in f if line.startswith(("Anonymous:",)))

    def cpu_s(self):
        with open(f"/proc/{self.proc.pid}/stat") as f:
            fields = f.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self):
        subprocess.run(["fusermount3", "-u", self.at], check=True)
        self.proc.wait()
        os.rmdir(self.at)


def reader(args, how, *files):
    out = subprocess.run([os.path.join(args.build, "tests", "bench_reader"), how, *files], check=True, capture_output=True, text=True).stdout
    n, s = out.split()
    return int(n) / float(s) / 1e9


def timed(cmd):
    t0 = time.monotonic()
    subprocess.run(cmd, shell=isinstance(cmd, str), check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - t0


def interleaved(args, cases):
    """{name: fn} run in turn, --rounds times after one for warming; who begins changes from round to round."""
    got, names = {name: [] for name in cases}, list(cases)
    for fn in cases.values():
        fn()
    for i in range(args.rounds):
        for k in range(len(names)):
            name = names[(i + k) % len(names)]
            got[name].append(cases[name]())
    return got


ROWS = []


def report(what, ours, theirs, unit="GB/s", goal=None, faster_is_more=True):
    """A row: median of ours and of the reference, the ratio of medians, and of the bests."""
    a, b = statistics.median(ours), statistics.median(theirs)
    best = max if faster_is_more else min
    ratio, best_ratio = (a / b, best(ours) / best(theirs)) if faster_is_more else (b / a, best(theirs) / best(ours))
    ROWS.append((what, f"{a:.2f}", f"{b:.2f}", unit, f"{ratio:.2f}", f"{best_ratio:.2f}", goal or ""))
    print(f"  {what}: {ratio:.2f} (best {best_ratio:.2f})", file=sys.stderr)


def bench_read(args, runs):
    with contextlib.ExitStack() as stack:
        mounts = {}
        for name, (run, options) in {"contig": (runs["contig"], ["view=raw"]), "rows": (runs["rows"], ["view=raw"]),
                                     "null": (runs["contig"], ["view=raw", "null"])}.items():
            mounts[name] = m = Mount(args, run, *options)
            stack.callback(m.close)
        for how, label in (("seq", "sequential 1 MiB"), ("p4", "four readers"), ("mmap", "mmap, copied out")):
            got = interleaved(args, {n: (lambda m=m, how=how: reader(args, how, m.file())) for n, m in mounts.items()})
            report(f"{label}: contiguous / null daemon", got["contig"], got["null"], goal=">= 0.95")
            report(f"{label}: 8-way 1 KiB interleave / contiguous", got["rows"], got["contig"], goal=">= 0.90")


def bench_copy(args, runs):
    real = os.path.join(args.dir, "real")
    subprocess.run([os.path.join(args.build, "fs", "ckpt"), "export", runs["contig"], real, "-o", "view=raw"], check=True,
                   stdout=subprocess.DEVNULL)
    real = os.path.join(real, "model.safetensors")
    m = Mount(args, runs["contig"], "view=raw")
    dest = os.path.join(args.dir, "copy")

    def cp(src):
        s = timed(["cp", src, dest])
        os.unlink(dest)
        return os.path.getsize(src) / s / 1e9

    def fresh(path, fn):
        fd = os.open(path, os.O_RDONLY)
        if path == m.file():  # the mount's own pages; those of the shards stay
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        return fn(path)

    try:
        got = interleaved(args, {"mount": lambda: fresh(m.file(), cp), "real": lambda: fresh(real, cp)})
        report("cp through the mount / cp of the real file", got["mount"], got["real"])
        sha = lambda p: os.path.getsize(p) / timed(["sha256sum", p]) / 1e9  # noqa: E731
        got = interleaved(args, {"mount": lambda: fresh(m.file(), sha), "real": lambda: fresh(real, sha)})
        report("sha256sum through the mount / of the real file", got["mount"], got["real"], goal=">= 0.90")
    finally:
        m.close()


def bench_export(args, runs):
    ckpt = os.path.join(args.build, "fs", "ckpt")
    real = os.path.join(args.dir, "real2")
    subprocess.run([ckpt, "export", runs["contig"], real, "-o", "view=raw"], check=True, stdout=subprocess.DEVNULL)
    size = os.path.getsize(os.path.join(real, "model.safetensors"))

    def run(cmd):
        dest = os.path.join(args.dir, "export")
        os.sync()
        s = timed(cmd.format(dest=dest))
        shutil.rmtree(dest)
        return size / s / 1e9

    got = interleaved(args, {"contig": lambda: run(f"{ckpt} export {runs['contig']} {{dest}} -o view=raw && sync"),
                             "rows": lambda: run(f"{ckpt} export {runs['rows']} {{dest}} -o view=raw && sync"),
                             "cp": lambda: run(f"cp -r {real} {{dest}} && sync")})
    report("ckpt export / cp && sync", got["contig"], got["cp"], goal=">= 0.90")
    report("ckpt export, row-parallel / cp && sync", got["rows"], got["cp"], goal=">= 0.90")


def make_hub(path, nbytes, block):
    """A Llama of two wide layers as it is on the hub, of about so many bytes."""
    h = max(int((nbytes / 2 / 2 / 12) ** 0.5) // 512, 1) * 512  # heads of 64 for eight ranks
    f = 8 * h // 3 // 256 * 256
    shapes = {"model.embed_tokens.weight": [256, h], "lm_head.weight": [256, h], "model.norm.weight": [h]}
    for i in range(2):
        at = f"model.layers.{i}."
        shapes |= {f"{at}self_attn.{x}_proj.weight": [h, h] for x in "qkvo"}
        shapes |= {f"{at}mlp.{x}_proj.weight": [f, h] for x in ("gate", "up")} | {f"{at}mlp.down_proj.weight": [h, f]}
        shapes |= {f"{at}{x}_layernorm.weight": [h] for x in ("input", "post_attention")}
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name in sorted(shapes):
        n = 2
        for d in shapes[name]:
            n *= d
        header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [at, at + n]}
        at += n
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    os.makedirs(path)
    with open(os.path.join(path, "model.safetensors"), "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        while at > 0:
            out.write(block[:at])
            at -= len(block)
    with open(os.path.join(path, "config.json"), "w") as out:
        json.dump(dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=h, intermediate_size=f, num_hidden_layers=2,
                       num_attention_heads=h // 64, num_key_value_heads=h // 64, vocab_size=256, max_position_embeddings=64, rms_norm_eps=1e-6,
                       rope_theta=10000.0, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2), out)


def bench_views(args, runs):
    """cp of a whole view in a framework's format / of the hf view, and the processor time of the daemon, which a busy machine hardly changes."""
    hub = os.path.join(args.dir, "hub")
    make_hub(hub, int(args.gib * 2**30), runs["block"])
    views = {"hf": ["view=hf", "max_shard_size=1GB"], "dcp": ["view=dcp", "ranks=8"], "nanotron": ["view=nanotron", "tp=8", "pp=2"],
             "megatron": ["view=megatron", "tp=8", "pp=2"], "megatron_legacy": ["view=megatron_legacy", "tp=8", "pp=2"]}
    dest = os.path.join(args.dir, "copy")
    cpu = {name: [] for name in views}

    def cp(name, m):
        before = m.cpu_s()
        s = timed(["cp", "-r", m.at, dest])
        size = sum(os.path.getsize(os.path.join(at, n)) for at, _, names in os.walk(dest) for n in names)
        shutil.rmtree(dest)
        cpu[name].append((m.cpu_s() - before) / size * 1e9)
        return size / s / 1e9

    def fresh(name, m):
        for at, _, names in os.walk(m.at):
            for n in names:
                fd = os.open(os.path.join(at, n), os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)
        return cp(name, m)

    with contextlib.ExitStack() as stack:
        mounts = {}
        for name, options in views.items():
            mounts[name] = m = Mount(args, hub, *options)
            stack.callback(m.close)
        got = interleaved(args, {n: (lambda n=n, m=m: fresh(n, m)) for n, m in mounts.items()})
        for name in [n for n in views if n != "hf"]:
            report(f"cp of view={name} / cp of view=hf", got[name], got["hf"], goal=">= 0.90")
            report(f"the daemon's time for view=hf / for view={name}", cpu[name], cpu["hf"], unit="s/GB", goal=">= 0.90", faster_is_more=False)


def drop(path):
    for folder, _, names in os.walk(path):
        for name in names:
            fd = os.open(os.path.join(folder, name), os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def bench_cold(args, runs):
    real = os.path.join(args.dir, "real3")
    subprocess.run([os.path.join(args.build, "fs", "ckpt"), "export", runs["contig"], real, "-o", "view=raw"], check=True,
                   stdout=subprocess.DEVNULL)
    with contextlib.ExitStack() as stack:
        cases = {"native": (real, os.path.join(real, "model.safetensors"))}
        for name in ("contig", "rows"):
            m = Mount(args, runs[name], "view=raw")
            stack.callback(m.close)
            cases[name] = (runs[name], m.file())

        def cold(folder, path):
            drop(folder)
            return reader(args, "seq", path)

        got = interleaved(args, {n: (lambda c=c: cold(*c)) for n, c in cases.items()})
        report("cold storage: contiguous / native", got["contig"], got["native"], goal=">= 0.90")
        report("cold storage: row-parallel / native", got["rows"], got["native"], goal=">= 0.90")


def bench_direct(args, runs):
    """io=direct beside the page cache; first reads. Says what the mount does: without FUSE_CAP_DIRECT_IO_ALLOW_MMAP only files opened with O_DIRECT
    are direct."""
    with contextlib.ExitStack() as stack:
        mounts = {}
        for name, options in {"buffered": ["view=raw"], "direct": ["view=raw", "io=direct"]}.items():
            mounts[name] = m = Mount(args, runs["contig"], *options)
            stack.callback(m.close)
        with open(os.path.join(mounts["direct"].at, ".ckptfs", "stats.json")) as f:
            print(f"  {json.load(f)['settings']}", file=sys.stderr)
        for how, label in (("seq", "sequential 1 MiB"), ("p4", "four readers"), ("mmap", "mmap, copied out")):
            got = interleaved(args, {n: (lambda m=m, how=how: reader(args, how, m.file())) for n, m in mounts.items()})
            report(f"{label}: io=direct / io=buffered", got["direct"], got["buffered"])


def bench_open(args, block):
    run = os.path.join(args.dir, "many")
    print(f"  writing {args.files} parameter files", file=sys.stderr)
    files = make_llama(run, args.files, block)
    info = json.loads(subprocess.run([os.path.join(args.build, "fs", "ckpt"), "info", run, "--json"], check=True, capture_output=True,
                                     text=True).stdout)
    empty = os.path.join(args.dir, "small")
    make_llama(empty, 34, block)
    ups, memories = [], []
    for _ in range(args.rounds):
        m = Mount(args, run)
        t0 = time.monotonic()
        os.listdir(m.at)
        ups.append(m.up_s + time.monotonic() - t0)
        memories.append(m.memory())
        m.close()
    small = Mount(args, empty)
    base = small.memory()
    small.close()
    ROWS.append((f"open: {files} parameter files, mount to first ls", f"{statistics.median(ups):.2f}", "", "s", "", "", "seconds"))
    ROWS.append((f"open: daemon memory per piece ({info['pieces']} pieces)", f"{(statistics.median(memories) - base) / info['pieces']:.0f}",
                 "", "bytes", "", "", "<= 200"))
    m = Mount(args, run)
    try:
        marks = []
        for _ in range(2):
            for _ in range(1000):
                with open(m.file(), "rb") as f:
                    f.read(1)
            marks.append(m.memory())
        ROWS.append(("open: memory after 1000 and after 2000 opens", f"{marks[0] / 1e6:.1f}", f"{marks[1] / 1e6:.1f}", "MB",
                     f"{marks[1] / marks[0]:.2f}", "", "flat"))
    finally:
        m.close()
    shutil.rmtree(run)
    bench_steps(args, empty)


def bench_steps(args, one):
    """`find` through 100 steps, twice."""
    run = os.path.join(args.dir, "steps")
    for i in range(100):
        shutil.copytree(one, os.path.join(run, str(i)), copy_function=os.link)
    m = Mount(args, run)
    try:
        marks = []
        for _ in range(3):
            timed(["find", m.at, "-type", "f"])
            marks.append(m.memory())
        ROWS.append(("open: memory after find through 100 steps, first and third pass", f"{marks[0] / 1e6:.1f}", f"{marks[2] / 1e6:.1f}",
                     "MB", f"{marks[2] / marks[0]:.2f}", "", "flat"))
    finally:
        m.close()
    shutil.rmtree(run)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--build", default="build/release")
    p.add_argument("--dir")
    p.add_argument("--gib", type=float, default=1.0)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--files", type=int, default=100000)
    p.add_argument("groups", nargs="*")
    args = p.parse_args()
    groups = args.groups or ["read", "copy", "export", "cold", "views", "open"]
    args.dir = tempfile.mkdtemp(dir=args.dir)
    block = os.urandom(8 << 20)
    runs = {"contig": os.path.join(args.dir, "contig"), "rows": os.path.join(args.dir, "rows"), "block": block}
    try:
        if set(groups) - {"open", "views"}:
            make_raw_run(runs["contig"], int(args.gib * 2**30), 0, 1, block)
            make_raw_run(runs["rows"], int(args.gib * 2**30), 1, TP, block)
        for g in groups:
            print(f"{g}:", file=sys.stderr)
            bench_open(args, block) if g == "open" else globals()["bench_" + g](args, runs)
    finally:
        shutil.rmtree(args.dir, ignore_errors=True)
    width = max(len(r[0]) for r in ROWS)
    print(f"{'':{width}}  {'ours':>8} {'ref':>8} {'unit':>6} {'ratio':>6} {'best':>6}  goal")
    for r in ROWS:
        print(f"{r[0]:{width}}  {r[1]:>8} {r[2]:>8} {r[3]:>6} {r[4]:>6} {r[5]:>6}  {r[6]}")


if __name__ == "__main__":
    main()
