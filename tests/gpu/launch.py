# SPDX-License-Identifier: Apache-2.0
"""Starting gpu_ranks: as processes, under mpirun, or as threads of one; over the double, or over the real libraries where there is a GPU."""

import os
import shutil
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, "..", "load"), os.path.join(HERE, "..", "golden")]
from ranks import SLOW, ended, started  # noqa: E402
from ranks import mpirun as under_mpi  # noqa: E402
BUILD = os.environ.get("CKPTFS_BUILD", "build/release")
GPU_RANKS = os.path.join(BUILD, "tests", "gpu_ranks")
CKPT = os.path.join(BUILD, "fs", "ckpt")
DOUBLE = os.path.join(BUILD, "tests", "gpu-double")
GOLDEN = os.path.join(HERE, "..", "golden")
LLAMA = os.path.join(GOLDEN, "nanotron", "llama_tp2_pp2_tied")
MOE = os.path.join(GOLDEN, "nanotron", "qwen2_moe_epbranch_tp1_dp2_ep2")


def has_gpu():
    return shutil.which("nvidia-smi") is not None and subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode == 0


def environment(real, more):
    """Several ranks may share a real GPU, if NCCL takes little of it for each; of the double's devices each has one."""
    env = dict(os.environ, CKPTFS_TRANSPORT="nccl", CKPTFS_MEET_TIMEOUT="60", TSAN_OPTIONS="atexit_sleep_ms=0 halt_on_error=1 report_thread_leaks=0")
    if real:
        env["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        env.setdefault("NCCL_MAX_CTAS", "2")
    else:
        env["LD_LIBRARY_PATH"] = DOUBLE + ":" + env.get("LD_LIBRARY_PATH", "")
    return dict(env, **more)


class Result:
    """What the ranks printed, and how each ended."""

    def __init__(self, statuses, out, err):
        self.statuses, self.out, self.err = statuses, out, err
        self.lines = [line for line in out.splitlines() if line.strip()]
        self.good = not any(statuses)
        self.told = {}  # {rank: error}
        for line in self.lines:
            head, _, text = line.partition(": ")
            if " rank " in head:
                self.told[int(head.split(" rank ")[1])] = text

    def loads(self):
        """A dict for each load that went well."""
        for line in self.lines:
            words = line.split()
            if words[4:5] == ["over"]:
                numbers = dict(zip(words[6::2], words[7::2]))
                yield dict({k: int(v) for k, v in numbers.items()}, layout=words[0], ranks=int(words[1]), readers=words[3], transport=words[5])

    def __repr__(self):
        err = "\n".join(line for line in self.err.splitlines() if not line.startswith("gpu double: leak: "))
        return f"{self.statuses} {self.out[-1500:]} {err[-6000:]}"


def processes(n, args, real=False, program=GPU_RANKS, ranks_per_node=0, **more):
    """As torchrun would, without it. ranks_per_node: of machines that are played."""
    if program == CKPT:  # which loads libraries late: LeakSanitizer stumbles over their threads' variables
        more["ASAN_OPTIONS"] = "detect_leaks=0"
    def own(rank):
        return {"LOCAL_RANK": str(rank), **({"CKPTFS_NODE": str(rank // ranks_per_node)} if ranks_per_node else {})}
    statuses, *text = zip(*ended(started(n, [program, *args], own, environment(real, more)), 60 * SLOW))
    return Result(list(statuses), *map("".join, text))


def mpirun(n, args, real=False, **more):
    done = under_mpi(n, [GPU_RANKS, *args], environment(real, more), 60 * SLOW)
    return Result([done.returncode], done.stdout, done.stderr)


def threads(n, args, real=False, **more):
    """CKPTFS_GPU_THREADS="1": those of the double meet in memory, else over sockets."""
    done = subprocess.run([GPU_RANKS, "-c", f"threads={n}", *args], env=environment(real, more), capture_output=True, text=True, timeout=120 * SLOW)
    return Result([done.returncode], done.stdout, done.stderr)
