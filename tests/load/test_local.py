# SPDX-License-Identifier: Apache-2.0
"""Loads by ranks of which each has only some files of the run (ckpt load --local): every byte is that of an ordinary load, every file is opened where it is,
and what is wrong is named, with its rank."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

from ranks import ended, mpirun, run, started

SOURCE, BUILD = os.path.abspath(os.environ.get("CKPTFS_SOURCE", ".")), os.path.abspath(os.environ.get("CKPTFS_BUILD", "build/release"))
CKPT_LOAD = os.path.join(BUILD, "fs", "ckpt-load")
GOLDEN = os.path.join(SOURCE, "tests", "golden")
RANKS = 4

# name, the run below tests/golden, options, layouts
CASES = [
    ("dcp", "dcp/torch26_fsdp1_4r/run", {"view": "raw"}, ["fsdp=4", "dp=4"]),
    ("megatron", "megatron/l12_tp2pp2", {}, ["tp=2,dp=2", "fsdp=4", "dp=4"]),
    ("deepspeed", "deepspeed/z3_qwen3_frozen_w3/run", {"base": os.path.join(GOLDEN, "deepspeed/z3_qwen3_frozen_w3/base")}, ["tp=2,dp=2", "fsdp=4", "dp=4"]),
    ("nanotron", "nanotron/llama_tp2_pp2_tied", {}, ["tp=2,dp=2", "fsdp=4", "dp=4"]),
]


def files_of(top):
    return sorted(os.path.relpath(os.path.join(folder, name), top) for folder, _, names in os.walk(top) for name in names)


def spread(whole, top):
    """Give each rank every fourth file, so that what belongs together is on several nodes. Returns the path of rank r's part, by {rank}."""
    for rank in range(RANKS):
        os.makedirs(os.path.join(top, f"node-{rank}"))
    for i, name in enumerate(files_of(whole)):
        put = os.path.join(top, f"node-{i % RANKS}", name)
        os.makedirs(os.path.dirname(put), exist_ok=True)
        shutil.copy2(os.path.join(whole, name), put)
    return os.path.join(top, "node-{rank}")


def load(path, layout, *more, env=None, own=lambda rank: {}, before=()):
    """ckpt-load by four ranks over TCP: [(status, stdout, stderr)]."""
    command = [*before, CKPT_LOAD, "load", path, "--local", "--layout", layout, *more]
    return ended(started(RANKS, lambda rank: [c.replace("{RANK}", str(rank)) for c in command], env=env, own=own), 60)


def words(options):
    return [w for key, value in options.items() for w in ("-o", f"{key}={value}")]


def held_by(path):
    """{file: [ranks that have it]}"""
    has = {}
    for rank in range(RANKS):
        for name in files_of(path.replace("{rank}", str(rank))):
            has.setdefault(name, []).append(rank)
    return has


# ---- in the ranks ----


def preload():
    import torch  # noqa: F401

    sys.path.insert(0, os.path.join(SOURCE, "contrib", "python"))
    import ckptfs  # noqa: F401


def compare(world, rank, whole, local, options, layouts):
    """Load both the whole run and the parts, and compare all bytes."""
    import ckptfs
    import torch

    os.environ.update(json.loads(os.environ["JOB"]), RANK=str(rank), LOCAL_RANK=str(rank))
    torch.distributed.init_process_group("gloo")
    for layout in layouts:
        expected = ckptfs.load_layout(whole, layout, **options)
        got = ckptfs.load_layout(local, layout, **options, local_files=True)
        assert got.boxes == expected.boxes and list(got) == list(expected), layout
        for name, tensor in expected.items():
            same = torch.equal(got[name].contiguous().view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8))
            assert same and got[name].dtype == tensor.dtype, (layout, name)
        assert got, "nothing was loaded, which proves nothing"
        assert got.stats["read_bytes"] == got.stats["unique_bytes"], (layout, got.stats)  # each byte once
    torch.distributed.destroy_process_group()


# ---- tests ----


def check_bytes(top, name, whole, options, layouts):
    """Over TCP from Python, against an ordinary load; over MPI by the tool, against an independent read."""
    from ranks import launched

    path = spread(whole, os.path.join(top, name))
    run(RANKS, "test_local", "compare", whole, path, options, layouts, folder=top, timeout=120, CKPTFS_LIBRARY_PATH=BUILD, JOB=json.dumps(launched(RANKS)))
    if shutil.which("mpirun") and os.path.exists(os.path.join(BUILD, "core", "libckptfs_load_mpi.so")):
        said = mpirun(RANKS, [CKPT_LOAD, "load", path, "--local", "--layout", layouts[0], "--verify", *words(options)])
        assert said.returncode == 0 and "over mpi" in said.stdout, said
    print(f"ok   {name}: {', '.join(layouts)}")
    return path


def main():
    with tempfile.TemporaryDirectory() as top:
        for name, whole, options, layouts in CASES:
            check_bytes(top, name, os.path.join(GOLDEN, whole), options, layouts)


if __name__ == "__main__":
    main()
