#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What `ckpt plan` says is what a load does, to the byte: ranks over tcp, one to four of them on each "machine", every way to read; and
hundreds of ranks as threads, each of which gets the right bytes."""

import json
import os
import re
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "golden"))

from case import BUILD  # noqa: E402
from ranks import SLOW, ended, started  # noqa: E402

CKPT_LOAD = os.path.join(BUILD, "fs", "ckpt-load")
RUN = os.path.join(HERE, "..", "golden", "nanotron", "llama_tp2_pp2_tied")
SUMS = ("read_bytes", "sent_bytes", "received_bytes")


def load(layout, ranks, per_node, readers, *more):
    command = [CKPT_LOAD, "load", RUN, "--layout", layout, "--readers", readers, "--json", *more]
    said = ended(started(ranks, command, lambda rank: {"CKPTFS_NODE": str(rank // per_node)}))
    assert not any(status for status, *_ in said), (layout, readers, said)
    return json.loads(said[0][1].splitlines()[-1])


def plan(layout, ranks, per_node, readers, *more):
    command = [CKPT_LOAD, "plan", RUN, "--layout", layout, "--ranks", str(ranks), "--ranks-per-node", str(per_node), "--readers", readers, "--json", *more]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def many(layout, ranks):
    """Ranks as threads, which compare all that they get with the view."""
    done = subprocess.run([os.path.join(BUILD, "tests", "load_ranks"), RUN, "--", f"{layout}:{ranks}:once"], capture_output=True, text=True,
                          env=dict(os.environ, LOAD_THREADS="1"), timeout=120 * SLOW)
    assert done.returncode == 0, (done.stdout, done.stderr)
    word = done.stdout.split()
    got, said = {k: int(word[word.index(k) + 1]) for k in ("needed", "unique", "read", "sent")}, plan(layout, ranks, ranks, "once")
    assert got["needed"] == said["needed_bytes"] and got["unique"] == said["unique_bytes"], (got, said)
    assert got["read"] // ranks == said["read_bytes"]["mean"] and got["sent"] // ranks == said["sent_bytes"]["mean"], (got, said)
    print(f"ok   {layout}: {ranks} ranks as threads, as planned")


def shared(layout, ranks, together, readers, times):
    """Only ranks of the same group of the caller's share: what several groups want is read once by each, and by all ranks right."""
    done = subprocess.run([os.path.join(BUILD, "tests", "load_ranks"), RUN, "--", f"{layout}:{ranks}:{readers}"], capture_output=True, text=True,
                          env=dict(os.environ, LOAD_THREADS="1", LOAD_SHARE=str(together)), timeout=120 * SLOW)
    assert done.returncode == 0, (done.stdout, done.stderr)
    word = done.stdout.split()
    got = {k: int(word[word.index(k) + 1]) for k in ("unique", "read", "sent")}
    assert times is None or got["read"] == times * got["unique"], (layout, together, readers, got)
    assert together or not got["sent"], got
    print(f"ok   {layout} {readers}: groups of {together or 'no'} ranks share")


def planned(layout, ranks, per_node, readers, *more):
    """A load does what the plan says, to the byte."""
    got, said = load(layout, ranks, per_node, readers, *more), plan(layout, ranks, per_node, readers, *more)
    for k in ("readers", "unique_bytes", "needed_bytes"):
        assert got[k] == said[k], (layout, per_node, readers, more, k, got[k], said[k])
    for k in SUMS:  # the plan has means, rounded down
        assert got[k] // ranks == said[k]["mean"], (layout, per_node, readers, more, k, got[k], said[k])
    return got


def shared_by_the_tool():
    """--share N: each group of N consecutive ranks reads what it wants once."""
    for readers, per_node, share, times in (("once", 2, 4, 1), ("once", 2, 3, 2), ("once", 4, 2, 2), ("once", 4, 1, 4), ("node", 2, 4, 2), ("node", 3, 2, 3)):
        got = planned("dp=4", 4, per_node, readers, "--share", str(share))
        assert got["read_bytes"] == times * got["unique_bytes"], (readers, per_node, share, got)
    planned("tp=2,dp=2", 4, 4, "once", "--share", "3")
    print("ok   --share: read, sent and received as planned")


def useless_options():
    """What has no effect is refused, before anything is opened, with what to do."""
    for command, options, text in (("plan", ["--device-bytes", "1G"], "--device-bytes does not apply .* give --transport nccl"),
                                   ("plan", ["--verify"], "--verify does not apply to ckpt plan"),
                                   ("plan", ["--check"], "--check does not apply to ckpt plan"),
                                   ("plan", ["--read-timeout", "1"], "--read-timeout does not apply to ckpt plan"),
                                   ("plan", ["--exchange-timeout", "1"], "--exchange-timeout does not apply to ckpt plan"),
                                   ("plan", ["--readers", "each", "--share", "2"], "--share does not apply to --readers each"),
                                   ("load", ["--ranks", "1"], "--ranks does not apply to ckpt load: .*use ckpt plan"),
                                   ("load", ["--ranks-per-node", "1"], "--ranks-per-node does not apply to ckpt load"),
                                   ("load", ["--device-bytes", "1G"], "--device-bytes does not apply .* give --transport nccl"),
                                   ("load", ["--window-bytes", "1M", "--readers", "each"], "--window-bytes does not apply to --readers each"),
                                   ("load", ["--check", "--readers", "each"], "--check does not apply to --readers each")):
        ranks = ["--ranks", "1"] if command == "plan" else []
        done = subprocess.run([CKPT_LOAD, command, RUN, "--layout", "tp=1", *ranks, *options], capture_output=True, text=True)
        assert done.returncode == 2 and re.match(f"ckpt-load: {text}", done.stderr) and not done.stdout, (command, options, done)
    print("ok   options without effect are refused")


def main():
    useless_options()
    shared_by_the_tool()
    for readers in ("once", "node"):
        for together, times in ((8, 1), (4, 2), (2, 4), (1, 8), (0, 8)):
            shared("dp=8", 8, together, readers, times)
    for together in (4, 3, 0):
        shared("tp=2,dp=4", 8, together, "once", {4: 2, 3: None, 0: None}[together])
        shared("random", 8, together, "once", None)
        shared("random", 8, together, "auto", None)
    for layout, ranks, per_node in (("tp=2,dp=2", 4, 4), ("dp=4", 4, 2), ("fsdp=4", 4, 4), ("tp=2,dp=2", 4, 2), ("tp=2,fsdp=2", 4, 1),
                                    ("pp=2,dp=2", 4, 3), ("dp=3", 3, 2),
                                    ("tp=2,dp=32", 64, 8), ("dp=40", 40, 3))[:7 if SLOW > 1 else None]:
        for readers in ("once", "node", "each"):
            planned(layout, ranks, per_node, readers)
        print(f"ok   {layout}, {per_node} ranks a node: read, sent and received as planned")
    for layout, ranks in (("tp=2,dp=64", 128),) if SLOW > 1 else (("tp=2,dp=256", 512), ("fsdp=512", 512), ("tp=2,pp=2,dp=64", 256)):
        many(layout, ranks)


main()
