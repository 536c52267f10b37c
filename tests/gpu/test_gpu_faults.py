# SPDX-License-Identifier: Apache-2.0
"""Faults of files, ranks, devices and NCCL while loading into device memory: the same error on all ranks, in time; the caller's own communicator is
as good as ever. Over the double; those that need no order to it over real libraries, too, where there is a GPU.

usage: test_gpu_faults.py [WORDS OF A TEST'S NAME]
"""

import concurrent.futures
import os
import re
import shutil
import tempfile
import time

from launch import LLAMA, SLOW, has_gpu, processes, threads
from runner import run

DEADLINE_MS = 1000
SLACK = 10 * SLOW  # seconds, for machines that do other things too
DRAIN = 20  # seconds that a device which has stopped is waited for
ALL = "dp=3:once"
N = 3


def go(args, fault=None, launch=processes, n=N, real=False, **more):
    """With short deadlines and several windows; the result, and the seconds it took."""
    begin = time.monotonic()
    if fault:
        more["CKPTFS_GPU_FAULT"] = fault
    result = launch(n, args, real, LOAD_TIMEOUT_MS=str(int(DEADLINE_MS * max(1, SLOW / 2))), **{"LOAD_WINDOW": "24576", **more})
    return result, time.monotonic() - begin


def same_error(result, pattern, n=N):
    assert set(result.statuses) == {1}, result
    assert len(result.told) == n and len(set(result.told.values())) == 1, result
    assert re.search(pattern, result.told[0]), (pattern, result)


def copies(top):
    for r in range(N):
        shutil.copytree(LLAMA, os.path.join(top, f"rank{r}"), symlinks=True)
    return os.path.join(top, "rank%r")


# ---- files ----


def reads_that_fail(real):
    with tempfile.TemporaryDirectory() as top:
        path = copies(top)
        for readers in ("once", "each"):
            for number, rank in ((1, "1"), (99, r"\d")):
                result, _ = go(["-f", f"eio@{number}", path, "--", f"dp=3:{readers}"], real=real)
                same_error(result, rf"^io: rank {rank}: reading '.*/rank{rank}/.*\.safetensors' at byte \d+: Input/output error")
        result, seconds = go(["-f", "hang@1", path, "--", ALL], real=real)
        same_error(result, r"^timeout: rank 1: tensor '.*': reading '.*/rank1/.*' at byte \d+ takes longer")
        assert seconds < DEADLINE_MS / 1000 * max(1, SLOW / 2) + SLACK + DRAIN, seconds


def checkpoints_that_differ(real):
    with tempfile.TemporaryDirectory() as top:
        path = copies(top)
        shard = next(os.path.join(d, f) for d, _, files in os.walk(os.path.join(top, "rank1")) for f in sorted(files) if f.endswith(".safetensors"))
        os.truncate(shard, os.path.getsize(shard) - 8)
        result, _ = go([path, "--", ALL], real=real)
        same_error(result, rf"rank 1.*{os.path.basename(shard)}")


def cancelled(real):
    with tempfile.TemporaryDirectory() as top:
        for fault in ("hang@0", "delay@0:900"):  # much later than the cancel, and before the deadline
            result, _ = go(["-f", fault, "-x", "2:20", copies(os.path.join(top, fault[:4])), "--", ALL], real=real)
            same_error(result, r"^cancelled: ")


# ---- devices ----


def calls_that_fail(_):
    """One rank's CUDA or NCCL call: which device, what was being done, and why."""
    for fault, pattern in (("cuMemcpyHtoDAsync:rank=1:error", r"^io: rank 1: CUDA device 1: uploading: unknown error"),
                           ("cuMemcpyHtoDAsync:rank=1:after=1:async", r"rank 1: CUDA device 1: .*: an illegal memory access was encountered"),
                           ("cuLaunchKernel:rank=2:error", r"^io: rank 2: CUDA device 2: copying: unknown error"),
                           ("cuEventQuery:rank=1:error", r"rank 1: CUDA device 1: "),
                           ("cuStreamWaitEvent:rank=1:error", r"rank 1: CUDA device 1: "),
                           ("cuModuleLoadData:rank=1:error", r"rank 1: CUDA device 1: loading the copy kernel"),
                           ("ncclAllGather:rank=1:after=1:error", r"^peer: rank 1: NCCL: an exchange: internal error"),
                           ("ncclGroupEnd:rank=0:error", r"^peer: rank 0: NCCL: an exchange: internal error"),
                           ("ncclAllGather:rank=2:async", r"^peer: rank 2: NCCL: an exchange: unhandled system error"),
                           ("ncclGetUniqueId:error", r"^peer: rank 0: NCCL: a new communicator: unhandled system error")):
        result, _ = go(["-k", LLAMA, "--", ALL], fault)
        same_error(result, pattern)


def out_of_memory(_):
    """On the device, for windows; and pinned. The next load may have less."""
    for call in ("cuMemHostRegister", "cuMemAlloc"):
        after = 0 if call == "cuMemHostRegister" else wants()
        result, _ = go([LLAMA, "--", ALL], f"{call}:rank=2:after={after}:times=1:error")
        same_error(result, r"^nomem: rank 2: CUDA device 2")
        result, _ = go([LLAMA, "--", ALL, ALL], f"{call}:rank=2:after={after}:times=1:error")
        assert len(result.told) == N and len(list(result.loads())) == 1, result


def wants():
    """cuMemAlloc calls of a rank before the load's own: each want is one."""
    lo, hi = 0, 512
    while hi - lo > 1:
        mid = (lo + hi) // 2
        result, _ = go([LLAMA, "--", "dp=1:once"], f"cuMemAlloc:after={mid}:times=1:error", n=1)
        lo, hi = (lo, mid) if set(result.statuses) == {1} or result.good else (mid, hi)
    return hi


def misuse(_):
    """What the caller gives is looked at: streams, memory; and which NCCL is there."""
    with tempfile.TemporaryDirectory() as top:
        result, _ = go(["-k", "-s", "-c", "tcp", "-m", os.path.join(top, "id"), LLAMA, "--", ALL], CKPTFS_TRANSPORT="tcp")
        same_error(result, r"^usage: rank \d: the stream given is of CUDA device \d, this rank's is \d")
    result, _ = go(["-k", LLAMA, "--", ALL], "cuStreamIsCapturing:rank=1:error")
    same_error(result, r"^usage: rank 1: the caller's stream is being captured in a graph")
    result, _ = go(["-w", LLAMA, "--", "random:once"])
    same_error(result, r"^usage: rank \d: the destination of tensor '.*' is not in memory of this rank's device")
    result, _ = go([LLAMA, "--", ALL], CKPTFS_GPU_NCCL="21704")
    same_error(result, r"^unsupported: NCCL 2.17 is too old")
    result, _ = go([LLAMA, "--", ALL], CKPTFS_GPU_DRIVER="11080")
    same_error(result, r"^unsupported: (rank \d: )?there is no CUDA device: its driver \(libcuda.so.1\) is of CUDA 11.8; 12.0 or later is needed")


def stuck_collectives(_):
    for fault in ("ncclAllGather:rank=1:after=1:hang", "ncclSend:rank=0:hang", "ncclRecv:rank=2:hang"):  # the tied embedding is on two stages
        result, seconds = go([LLAMA, "--", "pp=3:once" if "AllGather" not in fault else ALL], fault)
        same_error(result, r"^timeout: rank \d: window \d+ of \d+ is stuck")
        assert seconds < 4 * DEADLINE_MS / 1000 * max(1, SLOW / 2) + SLACK, seconds


def stopped_device(fault, job):
    result, seconds = go(["-k", LLAMA, "--", job], fault)
    same_error(result, r"^timeout: ")
    assert seconds < DRAIN + 4 * DEADLINE_MS / 1000 * max(1, SLOW / 2) + SLACK, seconds


def stopped_devices(_):
    """What was queued on a device never ends: nothing can be done but say so. They are waited for at the same time."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(stopped_device, ("cuMemcpyHtoDAsync:rank=1:hang", "cuLaunchKernel:rank=1:hang"), (ALL, "dp=3:each")))


def stuck_caller():
    """Our work comes after the caller's, which never ends; no communicator can be aborted then, since that waits for all work."""
    with tempfile.TemporaryDirectory() as top:
        args = ["-k", "-c", "tcp", "-m", os.path.join(top, "id"), LLAMA, "--", ALL]
        result, seconds = go(args, "cuMemsetD8Async:rank=1:hang", CKPTFS_TRANSPORT="tcp")
        same_error(result, r"^timeout: ")
        assert seconds < DRAIN + 4 * DEADLINE_MS / 1000 * max(1, SLOW / 2) + SLACK, seconds


def busy_caller():
    """Nobody waits long to be rid of a comm, and what it had goes all the same: the double would see a leak."""
    with tempfile.TemporaryDirectory() as top:
        result, seconds = go(["-b", "12", "-c", "tcp", "-m", os.path.join(top, "id"), LLAMA, "--", "dp=2:once"], n=2, CKPTFS_TRANSPORT="tcp")
        assert result.good and 12 < seconds < 24 + SLACK, (seconds, result)


def callers_with_work_of_their_own(_):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(lambda case: case(), (stuck_caller, busy_caller)))


def communicators_that_fail(_):
    """Nobody waits for a rank that can't make it."""
    for rank in range(N):
        result, seconds = go([LLAMA, "--", ALL], f"ncclCommInitRankConfig:rank={rank}:error")
        same_error(result, rf"^peer: rank {rank}: NCCL: making a communicator: unhandled system error")
        assert seconds < SLACK, seconds
    result, seconds = go([LLAMA, "--", ALL], "ncclCommInitRankConfig:rank=1:hang", CKPTFS_MEET_TIMEOUT="3")
    same_error(result, r"^timeout: rank \d: NCCL: making a communicator takes longer than 3 s")
    assert seconds < 3 + SLACK, seconds


def given_communicators(_):
    """A rank can't make ours beside the caller's, which blocks or does not: nobody waits for it, and the caller's works."""
    for blocks in ([], ["-n"]):
        with tempfile.TemporaryDirectory() as top:
            args = ["-c", "tcp", "-m", os.path.join(top, "id"), *blocks, LLAMA, "--", ALL]
            result, seconds = go(args, "ncclCommInitRankConfig:rank=1:after=1:error", CKPTFS_TRANSPORT="tcp")
            same_error(result, r"^peer: rank 1: NCCL: making a communicator: unhandled system error")
            assert sum("the caller's communicator works" in line for line in result.lines) == N, result
            assert seconds < SLACK, seconds


def a_timeout_that_is_no_number(_):
    """It is refused: not taken for the default."""
    for text in ("3s", "x", "-1", "86401"):
        result, seconds = go(["-k", LLAMA, "--", "dp=2:once"], n=2, CKPTFS_MEET_TIMEOUT=text)
        same_error(result, rf"^usage: (rank \d: )?CKPTFS_MEET_TIMEOUT={text}: expected a number from 0 to 86400", 2)
        assert seconds < SLACK, seconds


def killed_ranks(_):
    """Wherever it is: the others say that it is gone."""
    for fault in ("ncclCommInitRankConfig:rank=2:kill", "cuMemAlloc:rank=1:after=3:kill", "cuMemcpyHtoDAsync:rank=1:kill", "ncclAllGather:rank=1:after=2:kill",
                  "cuLaunchKernel:rank=2:kill", "ncclGroupEnd:rank=0:kill", "cuEventQuery:rank=1:kill"):
        for more in ({}, {"CKPTFS_GPU_REMOTE": "1"}):
            result, seconds = go([LLAMA, "--", ALL], fault, **more)
            assert sorted(result.statuses) == [-9, 1, 1] and len(result.told) == N - 1, (fault, result)
            assert all(t.startswith("peer: ") for t in result.told.values()), (fault, result)
            assert seconds < SLACK, (fault, seconds)


def the_callers_communicator(_):
    """It works after whatever happens to ours, and the next load gets a new one."""
    for fault in ("ncclAllGather:rank=1:after=1:times=1:error", "ncclAllGather:rank=0:after=1:times=1:hang"):
        with tempfile.TemporaryDirectory() as top:
            args = ["-c", "tcp", "-m", os.path.join(top, "id"), LLAMA, "--", ALL, "random:once"]
            result, _ = go(args, fault, CKPTFS_TRANSPORT="tcp")
            assert len(result.told) == N and sum("the caller's communicator works" in line for line in result.lines) == N, result
            assert [load["layout"] for load in result.loads()] == ["random"], result


def the_same_comm_again(_):
    """After a load that failed, the next one on the same comm has a new communicator."""
    for fault in ("ncclAllGather:rank=1:after=1:times=1:error", "ncclAllGather:rank=0:after=1:times=1:hang", "cuMemcpyHtoDAsync:rank=2:times=1:error"):
        result, _ = go(["-r", LLAMA, "--", ALL, ALL, "random:once"], fault)
        assert len(result.told) == N and [load["layout"] for load in result.loads()] == ["dp=3", "random"], (fault, result)


def memory_is_pinned_once(_):
    """A load pins one slab, the next one takes it; one that needs another size gives it up and has its own: no leak is seen."""
    result, _ = go([LLAMA, "--", ALL, ALL, ALL], "cuMemHostRegister:after=1:error")
    assert result.good and len(list(result.loads())) == 3, result
    result, _ = go([LLAMA, "--", ALL, "random:once:40000000", ALL], "cuMemHostRegister:after=3:error")
    assert result.good and len(list(result.loads())) == 3, result
    result, _ = go([LLAMA, "--", ALL], "cuMemHostRegister:rank=1:error")
    same_error(result, r"^nomem: rank 1: CUDA device 1: pinning host memory: out of memory")


def communicators_that_are_needed(_):
    """They are made where something is exchanged, and kept for the next load."""
    result, _ = go([LLAMA, "--", "fsdp=3:each", "dp=3:each"], "ncclCommInitRankConfig:rank=0:error")
    assert result.good and len(list(result.loads())) == 2, result
    result, _ = go([LLAMA, "--", "dp=3:each", ALL, "pp=3:once"], "ncclCommInitRankConfig:rank=0:after=1:error")
    assert result.good and len(list(result.loads())) == 3, result


def communicators_of_groups(_):
    """Ranks that want the same have a communicator of their own, split from ours: nothing goes in pairs. It is kept for the same groups, also while
    others come between, and made anew after a failure: an abort of the one of all ranks ends what is queued on the others."""
    six = ["tp=2,dp=3:once"]
    result, _ = go([LLAMA, "--", *six], "ncclSend:error", n=6)
    assert result.good, result
    result, _ = go([LLAMA, "--", *six, *six], "ncclCommSplit:rank=0:after=1:error", n=6)
    assert result.good, result
    result, _ = go([LLAMA, "--", *six, "pp=2,dp=3:once", "fsdp=2,dp=3:once", *six], "ncclSend:error", n=6, CKPTFS_GPU_JITTER_US="500")
    assert result.good and len(list(result.loads())) == 4, result
    result, _ = go([LLAMA, "--", *six, "pp=2,dp=3:once", *six, "pp=2,dp=3:once"], "ncclCommInitRankConfig:after=1:error,ncclCommSplit:after=2:error", n=6)
    assert result.good and len(list(result.loads())) == 4, result
    result, _ = go([LLAMA, "--", *six], "ncclCommSplit:rank=4:error", n=6)
    same_error(result, r"^peer: rank 4: NCCL: splitting a communicator: unhandled system error", 6)
    result, seconds = go([LLAMA, "--", *six], "ncclCommSplit:rank=1:hang", n=6, CKPTFS_MEET_TIMEOUT="3")
    same_error(result, r"^timeout: rank \d: NCCL: splitting a communicator takes longer than 3 s", 6)
    assert seconds < 3 + SLACK, seconds
    for fault in ("after=2:times=1:error", "times=1:hang"):
        result, _ = go(["-r", LLAMA, "--", *six, *six, "random:once"], f"ncclAllGather:rank=1:{fault}", n=6)
        assert len(result.told) == 6 and [load["layout"] for load in result.loads()] == ["tp=2,dp=3", "random"], result


def communicators_of_many_groups(_):
    """So many are not kept: all are made anew, once for several loads."""
    jobs = ["random:once"] * 10
    result, _ = go([LLAMA, "--", *jobs], n=6)
    assert result.good and len(list(result.loads())) == len(jobs), result
    result, _ = go([LLAMA, "--", *jobs], "ncclCommInitRankConfig:after=1:error", n=6)
    assert not result.good and len(list(result.loads())) > 2, result


def threads_of_one_process(_):
    result, _ = go([LLAMA, "--", ALL], "ncclAllGather:after=1:times=1:error", launch=threads)
    same_error(result, r"^peer: rank \d: NCCL: an exchange: internal error")


def main():
    both = [reads_that_fail, checkpoints_that_differ, cancelled]
    ordered = [calls_that_fail, out_of_memory, communicators_that_fail, a_timeout_that_is_no_number, given_communicators, misuse, stuck_collectives, stopped_devices, callers_with_work_of_their_own, killed_ranks, the_callers_communicator,
               the_same_comm_again, memory_is_pinned_once, communicators_that_are_needed, communicators_of_groups, communicators_of_many_groups, threads_of_one_process]
    cases = [(t.__name__, lambda t=t: t(False)) for t in both + ordered]
    if has_gpu():
        cases += [(t.__name__ + "_on_a_real_device", lambda t=t: t(True)) for t in both]
    run(cases)


main()
