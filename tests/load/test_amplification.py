# SPDX-License-Identifier: Apache-2.0
"""What strace sees: with --readers once every wanted byte is read once by the job; reads past the page cache are aligned. And what a load takes of
memory."""

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile

from llama import Llama
from ranks import ended, mpirun, started

BUILD = os.environ.get("CKPTFS_BUILD", "build/release")
CKPT_LOAD = os.path.join(BUILD, "fs", "ckpt-load")
MODEL, LAYERS = Llama(512, 1408, 8, 4, 4096), 3
READ = re.compile(r"(?:pread64|preadv2?|read)\((\d+)<([^>]*)>.*?, (\d+)(?:, RWF_NOWAIT)?\) += (\d+)$")
ALIGN = 4096
BUDGET = 8 << 20  # of one rank's memory


def generate(folder):
    os.makedirs(folder)
    header, at = {}, 0
    for name, shape in MODEL.shapes(LAYERS):
        size = 2 * shape[0] * (shape[1] if len(shape) == 2 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(os.path.join(folder, "model.safetensors"), "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for lo in range(0, at, 1 << 20):
            f.write(os.urandom(min(1 << 20, at - lo)))
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(MODEL.config(LAYERS), f)
    return 8 + len(text)


def traced(top, name, ranks, args):
    """Run the ranks under strace; the program's JSON, and the text of all traces."""
    out = os.path.join(top, name)
    strace = ["strace", "-f", "-y", "-o", out + ".$RANK", "-e", "trace=read,pread64,preadv,preadv2,fcntl", CKPT_LOAD, "load", *args, "--json"]
    shell = "exec " + " ".join(strace)
    if shutil.which("mpirun"):
        done = mpirun(ranks, ["sh", "-c", "RANK=$OMPI_COMM_WORLD_RANK " + shell.replace("exec ", "; exec ", 1)], timeout=300)
        said = done.stdout if done.returncode == 0 else sys.exit(f"{name}: {done.stderr[-2000:]}")
    else:
        said = ended(started(ranks, ["sh", "-c", shell]), 300)[0][1]
    lines = []
    for r in range(ranks):
        with open(f"{out}.{r}", errors="replace") as f:
            lines += [(r, line.rstrip()) for line in f]
    return json.loads(said.strip().splitlines()[-1]), lines


SAMPLED = 16 * 64  # bytes of tensors that rank 0 reads while it opens, to compare copies on other machines with


def joined(lines):
    """A call that others interrupted stands on two lines: put together."""
    begun = {}
    for rank, line in lines:
        pid, _, call = line.partition(" ")
        call = call.strip()
        if call.endswith("<unfinished ...>"):
            begun[rank, pid] = call[:-len("<unfinished ...>")]
        elif call.startswith("<... "):
            yield rank, begun.pop((rank, pid), "") + call.split("resumed>", 1)[1]
        else:
            yield rank, call


def shard_reads(lines, data):
    """(rank, descriptor, offset, bytes) of reads of the shard's tensors."""
    for rank, call in joined(lines):
        m = READ.match(call)
        if m and m.group(2).endswith(".safetensors"):
            if call.startswith("read("):
                sys.exit(f"a shard is read without an offset: {call[:200]}")
            if int(m.group(3)) >= data:
                yield rank, int(m.group(1)), int(m.group(3)), int(m.group(4))


def check(ok, *what):
    if not ok:
        sys.exit("FAIL " + " ".join(str(w) for w in what))


def descriptors(lines):
    """(rank, descriptor) of those that read past the page cache."""
    found = ((rank, re.match(r"fcntl\((\d+)<[^>]*>, F_SETFL, .*O_DIRECT\b", call)) for rank, call in joined(lines))
    return {(rank, int(m.group(1))) for rank, m in found if m}


def cold(top, run, data):
    """What is not in the page cache is not brought there either, where one rank reads it once."""
    evict(run)
    got, lines = traced(top, "cold", 1, [run, "--layout", "dp=1"])
    direct, past, all_bytes = descriptors(lines), 0, 0
    for rank, fd, _, n in shard_reads(lines, data):
        all_bytes += n
        past += n if (rank, fd) in direct else 0
    if direct:
        check(past > 0.9 * all_bytes, "of", all_bytes, "cold bytes", past, "were read past the page cache")
        print(f"ok   {past / all_bytes:.2f} of cold files is read past the page cache")


def rows_and_columns(top, run, data):
    """Each of four ranks reads for itself: rows past the page cache, slices of columns, whose holes are the others', through it."""
    evict(run)
    got, lines = traced(top, "columns", 4, [run, "--layout", "tp=4", "--readers", "each"])
    direct, at, columns = descriptors(lines), data, []
    for name, shape in MODEL.shapes(LAYERS):
        size = 2 * shape[0] * (shape[1] if len(shape) == 2 else 1)
        columns += [(at + ALIGN, at + size - ALIGN)] if re.search(r"\.(o|down)_proj\.", name) else []
        at += size
    past = [(off, off + n) for rank, fd, off, n in shard_reads(lines, data) if (rank, fd) in direct]
    if direct:
        check(not [p for p in past for c in columns if p[0] < c[1] and c[0] < p[1]], "columns were read past the page cache, by each rank")
        share = sum(hi - lo for lo, hi in past) / got["unique_bytes"]
        check(share > 0.02, share, "of what is wanted was read past the page cache")
        print(f"ok   {share:.2f} of cold files is read past the page cache by ranks that read rows and columns")


def evict(run):
    with open(os.path.join(run, "model.safetensors"), "rb") as f:
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def peak(run, *args, layout="dp=1", cold=False, budget=BUDGET):
    """Bytes of memory that rank 0 of a load takes at most, its destinations included."""
    if cold:
        evict(run)
    else:
        with open(os.path.join(run, "model.safetensors"), "rb") as f:
            while f.read(1 << 20):  # a child's peak begins with this process's
                pass
    n = int(layout.split("=")[1])
    ranks = started(n, [CKPT_LOAD, "load", run, "--layout", layout, "--host-bytes", str(budget), "--threads", "16", *args], stdout=subprocess.DEVNULL, stderr=None)
    _, status, usage = os.wait4(ranks[0].pid, 0)
    check(status == 0 and not any(p.wait() for p in ranks[1:]), *args, "failed")
    return usage.ru_maxrss * 1024


def memory(run):
    """What is in the page cache goes straight to its destination: that takes no memory. All else stays within the budget."""
    least = peak(run, "--direct", "never")
    for args in (["--direct", direct] for direct in ("never", "always")):
        took = peak(run, *args, cold=True) - least
        check(took <= BUDGET + (2 << 20), *args, "takes", took, "bytes, more than --host-bytes", BUDGET)
        print(f"ok   {took / BUDGET:.2f} of the budget is taken with {' '.join(args)}")
    # slices of columns are read as rows
    least = peak(run, "--readers", "each", layout="tp=2", budget=1 << 20)
    for readers in ("each", "once"):
        took = peak(run, "--readers", readers, layout="tp=2", cold=True) - least
        check(took <= BUDGET + (2 << 20), "tp=2 takes", took, "bytes, more than --host-bytes", BUDGET)
        print(f"ok   {took / BUDGET:.2f} of the budget is taken with tp=2 --readers {readers}")


def main():
    if not shutil.which("strace") or subprocess.run(["strace", "-o", os.devnull, "true"], capture_output=True).returncode != 0:
        print("strace is not there, or may not be used")
        sys.exit(77)
    with tempfile.TemporaryDirectory() as top:
        run = os.path.join(top, "run")
        data = generate(run)
        for layout in ("dp=4", "tp=4", "fsdp=4", "tp=2,dp=2"):
            got, lines = traced(top, layout, 4, [run, "--layout", layout, "--readers", "once", "--direct", "never"])
            seen = sum(n for _, _, _, n in shard_reads(lines, data)) - SAMPLED
            check(seen == got["read_bytes"], layout, "strace saw", seen, "bytes, the statistics say", got["read_bytes"])
            most = 1.05 if "tp" in layout else 1
            check(got["unique_bytes"] <= seen <= most * got["unique_bytes"], layout, seen, "bytes were read of", got["unique_bytes"])
            print(f"ok   {layout}: {seen / got['unique_bytes']:.4f} of what is wanted was read, in {got['reads']} reads")
        got, lines = traced(top, "direct", 4, [run, "--layout", "dp=4", "--readers", "once", "--direct", "always", "--verify"])
        check(got["verified"], "direct: not verified")
        direct = descriptors(lines)
        for rank, call in joined(lines):
            m = READ.match(call)
            if m and m.group(2).endswith(".safetensors") and (rank, int(m.group(1))) in direct:
                vector = [int(n) for n in re.findall(r"iov_len=(\d+)", call)]
                asked = sum(vector) if vector else int(call.rsplit(", ", 2)[1])
                check(asked % ALIGN == 0 and int(m.group(3)) % ALIGN == 0, "a direct read is not aligned:", call[:200])
        if not direct:
            print("     this file system has no O_DIRECT")
        print(f"ok   direct reads are aligned ({len(direct)} descriptors)")
        cold(top, run, data)
        rows_and_columns(top, run, data)
        memory(run)


main()
