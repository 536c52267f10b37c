# SPDX-License-Identifier: Apache-2.0
"""Real launchers: mpirun and torchrun-like processes load one checkpoint of each format and check every byte; a faulty rank under mpirun."""

import json
import os
import shutil
import sys
import tempfile

from ranks import ended, mpirun, started

BUILD = os.environ.get("CKPTFS_BUILD", "build/release")
HERE = os.path.dirname(os.path.abspath(__file__))
GOLDEN = os.path.join(HERE, "..", "golden")
CKPT = os.path.join(BUILD, "fs", "ckpt")
SAMPLES = [("nanotron/llama_tp2_pp2_tied", [], ["tp=2,pp=2", "fsdp=3", "tp=2,fsdp=2"]),
           ("nanotron/qwen2_moe_epbranch_tp1_dp2_ep2", [], ["ep=2,tp=2", "fsdp=4"]),
           ("dcp/fsdp2_uneven_4r/run", ["view=raw"], ["fsdp=3"]),
           ("dcp/hf_sharded_scalars_ints_4r/run", [], ["fsdp=4"]),
           ("automodel/v04_llama_fsdp2/run", [], ["fsdp=2"])]


def size(layout):
    n = 1
    for part in layout.split(","):
        n *= int(part.split("=")[1])
    return n


def under_mpi(n, args):
    done = mpirun(n, args)
    return done.returncode, done.stdout, done.stderr


def as_torchrun(n, args):
    said = ended(started(n, args))
    return max(status for status, *_ in said), said[0][1], "".join(err for *_, err in said)


def check(launch, name, transport, path, options, layout):
    args = [CKPT, "load", path, "--layout", layout, "--verify", "--check", "--json", "--readers", "once"]
    for o in options:
        args += ["-o", o]
    status, out, err = launch(size(layout), args)
    if status:
        return f"{transport} {name} {layout}: status {status}: {err[-600:]}"
    got = json.loads(out.splitlines()[-1])
    if not got["verified"] or got["ranks"] != size(layout) or got["transport"] != transport or got["read_bytes"] > 1.05 * got["unique_bytes"]:
        return f"{transport} {name} {layout}: {got}"
    if got["needed_bytes"] > 0.7 * got["ranks"] * got["unique_bytes"]:
        return f"{transport} {name} {layout}: nothing is divided: {got}"
    return None


def check_fault():
    """mpirun: a rank's file is short; all ranks say so, and the job fails."""
    with tempfile.TemporaryDirectory() as top:
        run = os.path.join(top, "rank1")
        shutil.copytree(os.path.join(GOLDEN, SAMPLES[0][0]), run, symlinks=True)
        path = next(os.path.join(d, f) for d, _, files in os.walk(run) for f in sorted(files) if f.endswith(".safetensors"))
        os.truncate(path, os.path.getsize(path) - 4)
        good = os.path.join(GOLDEN, SAMPLES[0][0])
        script = f'exec "$0" load "$(if [ $OMPI_COMM_WORLD_RANK = 1 ]; then echo {run}; else echo {good}; fi)" --layout fsdp=3'
        status, _, err = under_mpi(3, ["sh", "-c", script, CKPT])
        told = {line.split(": ", 1)[1] for line in err.splitlines() if line.startswith("ckpt-load[")}
        if status == 0 or len(told) != 1 or "rank 1: " not in list(told)[0] or os.path.basename(path) not in list(told)[0]:
            return f"a short file under mpirun: status {status}: {told or err}"
    return None


def check_secret():
    """mpirun: the launcher decides who takes part; a rank with another secret, or none, is named by all."""
    script = 'case $OMPI_COMM_WORLD_RANK in 1) export CKPTFS_SECRET={} ;; *) export CKPTFS_SECRET={} ;; esac; exec "$0" load "$1" --layout fsdp=3 --json'
    good = "a secret of sixteen or more"
    for own, others in ((good, good), (good + "!", good), ("", good), (good, ""), ("short", good)):
        text = script.format(*(f"'{s}'" for s in (own, others)))
        status, out, err = under_mpi(3, ["sh", "-c", text, CKPT, os.path.join(GOLDEN, SAMPLES[0][0])])
        if "libsodium" in err:
            return None
        told = {line.split(": ", 1)[1] for line in err.splitlines() if line.startswith("ckpt-load")}
        which = "rank 1: CKPTFS_SECRET has 5 " if own == "short" else "rank 1: another CKPTFS_SECRET than on rank 0, or none"
        if status if own == others else status == 0 or len(told) != 1 or not list(told)[0].startswith(which):
            return f"secrets {own!r} and {others!r} under mpirun: status {status}: {out} {err[-600:]}"
    return None


def check_program(level):
    """A program that links the loader and has its own MPI, with this thread level; parts of its communicator load."""
    status, out, err = under_mpi(8, [os.path.join(BUILD, "tests", "mpi_user"), os.path.join(GOLDEN, SAMPLES[0][0]), level])
    expected = "over mpi" if level == "multiple" else "refused: MPI was initialised with less than MPI_THREAD_MULTIPLE"
    return None if status == 0 and expected in out else f"mpi_user {level}: status {status}: {out} {err[-600:]}"


def check_gathers(n, layout, sizes, per_node=0):
    """What a group wants comes by MPI's all-gathers, of so many ranks; on several nodes in two steps."""
    program = [os.path.join(BUILD, "tests", "mpi_user"), os.path.join(GOLDEN, SAMPLES[0][0]), "multiple", layout]
    if per_node:
        program = ["sh", "-c", f'CKPTFS_NODE=$((OMPI_COMM_WORLD_RANK / {per_node})) exec "$0" "$@"', *program]
    status, out, err = under_mpi(n, program)
    got = {int(line.split()[-1]) for line in out.splitlines() if " gathers of " in line}
    good = status == 0 and (sizes is None or got == sizes)
    return None if good else f"mpi_user {layout}, {n} ranks, nodes of {per_node or n}: status {status}, gathers of {got}, not {sizes}: {err[-600:]}"


GATHERS = [(2, "dp=2", set()), (3, "dp=3", {3}), (4, "dp=4", {4}), (8, "tp=2,dp=4", {4, 8}), (9, "dp=9", {3}, 3), (8, "dp=8", {2, 4}, 4),
           (8, "tp=2,dp=4", {2, 4}, 4), (5, "dp=5", {5}, 2), *((n, "random", None) for n in (2, 3, 4, 8)), (8, "random", None, 4), (9, "random", None, 3)]


def main():
    launchers = [(as_torchrun, "tcp")]
    has_mpi = shutil.which("mpirun") and os.path.exists(os.path.join(BUILD, "core", "libckptfs_load_mpi.so.0"))
    if has_mpi:
        launchers.append((under_mpi, "mpi"))
    problems, passed = [], 0
    for launch, transport in launchers:
        for name, options, layouts in SAMPLES:
            for layout in layouts:
                problem = check(launch, name, transport, os.path.join(GOLDEN, name), options, layout)
                problems += [problem] if problem else []
                passed += not problem
    if has_mpi:
        for problem in (check_fault(), check_secret(), *(check_gathers(*case) for case in GATHERS),
                        *(check_program(level) for level in ("single", "funneled", "serialized", "multiple"))):
            problems += [problem] if problem else []
            passed += not problem
    for p in problems:
        print("FAIL", p)
    print(f"{passed} passed, {len(problems)} failed" + ("" if has_mpi else " (without MPI)"))
    sys.exit(1 if problems else 0 if has_mpi else 77)


main()
