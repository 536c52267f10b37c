# SPDX-License-Identifier: Apache-2.0
"""What strace sees of a job that opens a checkpoint: rank 0 alone reads directories and headers; every rank opens the files that it reads, and no others
but for a few whose residency it looks at."""

import collections
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile

from ranks import ended, started

SOURCE, BUILD = os.environ.get("CKPTFS_SOURCE", "."), os.environ.get("CKPTFS_BUILD", "build/release")
CKPT_LOAD = os.path.join(BUILD, "fs", "ckpt-load")
CALLS = "openat,openat2,open,getdents64,pread64,preadv,preadv2,read"
OPEN = re.compile(r"open(?:at2?)?\(.*\) += \d+<([^>]*)>")
READ = re.compile(r"(?:pread64|preadv2?|read)\(\d+<([^>]*)>")
PLACE = re.compile(r"pread(?:64|v|v2)\(.*?, (\d+)(?:, (?:0|RWF_\w+))?\) += \d+$")
LOOKS = 32  # files whose residency all ranks of a job look at

CASES = [
    ("nanotron/llama_tp2_pp2_tied", ["pp=4", "dp=4", "tp=2,dp=2"], []),
    ("dcp/torch26_fsdp1_4r", ["fsdp=4", "dp=4"], ["-o", "view=raw"]),
    ("megatron/l12_tp2pp2", ["pp=4", "dp=4"], []),
]


def ends(text):
    """Whole calls of a trace: one that others interrupted stands on two lines."""
    begun = {}
    for line in text.splitlines():
        pid, _, call = line.partition(" ")
        call = call.strip()
        if call.endswith("<unfinished ...>"):
            begun[pid] = call[:-len("<unfinished ...>")]
        elif call.startswith("<... "):
            yield begun.pop(pid, "") + call.split("resumed>", 1)[1]
        else:
            yield call


class Trace:
    """Of one rank: how often it opened each file of the run, the files that it read from, the offsets of its reads, and the number of its listings of
    directories. A run is a folder, or one file: an archive."""

    def __init__(self, path, run):
        self.opened, self.read, self.at, self.listed = collections.Counter(), set(), set(), 0
        with open(path, errors="replace") as f:
            for call in ends(f.read()):
                opened, read = OPEN.match(call), READ.match(call)
                if opened and (opened.group(1) + "/").startswith(run + "/") and "O_PATH" not in call and "O_DIRECTORY" not in call:
                    self.opened[opened.group(1)] += 1
                elif read and (read.group(1) + "/").startswith(run + "/"):
                    self.read.add(read.group(1))
                    self.at.update(int(at.group(1)) for at in [PLACE.match(call)] if at)
                elif call.startswith("getdents64") and run in call:
                    self.listed += 1


def start(top, run, layout, ranks, options):
    out = os.path.join(top, "trace")
    return ended(started(ranks, lambda rank: ["strace", "-f", "-y", "-o", f"{out}.{rank}", "-e", f"trace={CALLS}", CKPT_LOAD, "load", run, "--layout", layout,
                                              *options]), 300)


def job(top, run, layout, ranks, options):
    said = start(top, run, layout, ranks, options)
    assert not any(status for status, *_ in said), said
    return [Trace(os.path.join(top, f"trace.{r}"), run) for r in range(ranks)]


def check(traces, files, what):
    first, others = traces[0], traces[1:]
    for rank, t in enumerate(others, 1):
        assert t.listed == 0, (what, rank, "lists directories")
        more = set(t.opened) - t.read
        assert len(more) <= LOOKS // len(traces), (what, rank, "opens, but does not read", sorted(more))
        twice = {f: n for f, n in t.opened.items() if n > 2}  # once more for O_DIRECT
        assert not twice, (what, rank, twice)
    opens = sum(sum(t.opened.values()) for t in others)
    reads = sum(len(t.read) for t in others)
    assert opens <= 2 * reads + LOOKS, (what, opens, reads)
    print(f"ok   {what}: rank 0 opens {sum(first.opened.values())} times ({files} files), the others {opens} times to read {reads} files")


def copied(top):
    """Two ranks' files with the same tensors: a module of DeepSpeed's, which torch.save wrote."""
    run = os.path.realpath(top)
    for name in ("rank0.pt", "rank1.pt"):
        shutil.copyfile(os.path.join(SOURCE, "tests", "golden", "deepspeed", "z2_llama_align_w2", "run", "global_step2", "mp_rank_00_model_states.pt"), os.path.join(run, name))
    return run


def check_copies(top):
    """Rank 0 alone compares the copies that ranks' files have, and all ranks fail by what it finds."""
    run = copied(top)
    options = ["-o", "view=raw"]
    first, *others = job(top, run, "dp=4", 4, ["--readers", "each", *options])
    assert os.path.join(run, "rank1.pt") in first.read
    for t in others:
        assert t.read == {os.path.join(run, "rank0.pt")}, t.read
    with zipfile.ZipFile(os.path.join(run, "rank1.pt")) as z:
        storages = [(i.header_offset, i.file_size) for i in z.infolist() if "/data/" in i.filename]
    with open(os.path.join(run, "rank1.pt"), "r+b") as f:
        for at, size in storages:
            f.seek(at + 26)
            name, extra = int.from_bytes(f.read(2), "little"), int.from_bytes(f.read(2), "little")
            f.seek(at + 30 + name + extra)
            f.write(b"\x3f" * size)
    said = start(top, run, "dp=4", 4, options)
    assert all(status == 1 and "in 'rank0.pt' is not the one in 'rank1.pt'" in err for status, _, err in said), said
    job(top, run, "dp=4", 4, [*options, "-o", "allow_mixed"])
    print("ok   copies are compared by rank 0 alone, and all fail by what it finds")


def packed_tar(folder, path):
    """The offsets at which parts of the archive's index begin."""
    with tarfile.open(path, "w") as tar:
        tar.add(folder, arcname=".")
    with tarfile.open(path) as tar:
        return {m.offset for m in tar.getmembers()}


def packed_zip(folder, path):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as z:
        for top, _, names in os.walk(folder):
            for name in names:
                z.write(os.path.join(top, name), os.path.relpath(os.path.join(top, name), folder))
    with zipfile.ZipFile(path) as z:
        return {z.start_dir, *(i.header_offset for i in z.infolist())}


def check_archive(traces, index, what):
    """Rank 0 reads the index of an archive; the others read what they load, and of the index nothing."""
    assert len(traces[0].at & index) >= 2, (what, "rank 0 did not read the index", traces[0].at, index)  # several parts at once, where files are small
    for rank, t in enumerate(traces[1:], 1):
        assert not t.at & index, (what, rank, "reads the index at", sorted(t.at & index))
        assert t.at, (what, rank, "reads nothing, which proves nothing")
        assert sum(t.opened.values()) <= len(t.at) + LOOKS // len(traces), (what, rank, t.opened, t.at)  # each file in it is opened when it is read
    print(f"ok   {what}: {len(index)} parts of the index, read by rank 0 alone")


def main():
    if not shutil.which("strace") or subprocess.run(["strace", "-o", os.devnull, "true"], capture_output=True).returncode != 0:
        print("strace is not there, or may not be used")
        sys.exit(77)
    with tempfile.TemporaryDirectory() as top:
        for name, layouts, options in CASES:
            run = os.path.realpath(shutil.copytree(os.path.join(SOURCE, "tests", "golden", name), os.path.join(top, name)))
            files = sum(len(names) for _, _, names in os.walk(run))
            for layout in layouts:
                for readers in ("once", "each"):
                    traces = job(top, run, layout, 4, ["--readers", readers, *options])
                    check(traces, files, f"{name} {layout} {readers}")
            for pack in (packed_tar, packed_zip):
                archive = run + ".archive"
                index = pack(run, archive)
                check_archive(job(top, archive, layouts[0], 4, ["--readers", "each", *options]), index, f"{pack.__name__} {name}")
    with tempfile.TemporaryDirectory() as top:
        check_copies(top)


main()
