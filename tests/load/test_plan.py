#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What `ckpt plan` says is what a load does: ranks over tcp, one to four of them on each "machine", every way to read; to the byte."""

import json
import os
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "golden"))

from case import BUILD  # noqa: E402
from ranks import launched  # noqa: E402

CKPT_LOAD = os.path.join(BUILD, "fs", "ckpt-load")
RUN = os.path.join(HERE, "..", "golden", "nanotron", "llama_tp2_pp2_tied")
SUMS = ("read_bytes", "sent_bytes", "received_bytes")


def load(layout, ranks, per_node, readers):
    command = [CKPT_LOAD, "load", RUN, "--layout", layout, "--readers", readers, "--json"]
    env = dict(os.environ, **launched(ranks))
    every = [subprocess.Popen(command, env=dict(env, RANK=str(r), CKPTFS_NODE=str(r // per_node)), stdout=subprocess.PIPE, text=True)
             for r in range(ranks)]
    said = [p.communicate(timeout=120)[0] for p in every]
    assert not any(p.returncode for p in every), (layout, readers)
    return json.loads(said[0].splitlines()[-1])


def plan(layout, ranks, per_node, readers):
    command = [CKPT_LOAD, "plan", RUN, "--layout", layout, "--ranks", str(ranks), "--ranks-per-node", str(per_node), "--readers", readers]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main():
    for layout, ranks, per_node in (("tp=2,dp=2", 4, 4), ("dp=4", 4, 2), ("fsdp=4", 4, 4), ("tp=2,dp=2", 4, 2), ("tp=2,fsdp=2", 4, 1),
                                    ("pp=2,dp=2", 4, 3), ("dp=3", 3, 2)):
        for readers in ("once", "node", "each"):
            got, said = load(layout, ranks, per_node, readers), plan(layout, ranks, per_node, readers)
            for k in ("readers", "unique_bytes", "needed_bytes"):
                assert got[k] == said[k], (layout, per_node, readers, k, got[k], said[k])
            for k in SUMS:  # the plan has means, rounded down
                assert got[k] // ranks == said[k]["mean"], (layout, per_node, readers, k, got[k], said[k])
        print(f"ok   {layout}, {per_node} ranks a node: read, sent and received as planned")


main()
