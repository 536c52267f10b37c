# SPDX-License-Identifier: Apache-2.0
"""What goes wrong on one rank is the same error on all, with rank, file and offset, before the deadline; nobody hangs."""

import contextlib
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

from ranks import SLOW, free_port, launched
from runner import run

BUILD = os.environ.get("CKPTFS_BUILD", "build/release")
HERE = os.path.dirname(os.path.abspath(__file__))
GOLDEN = os.path.join(HERE, "..", "golden", "nanotron", "llama_tp2_pp2_tied")
SHIM = os.path.join(BUILD, "tests", "fail_read.so")
LOAD_RANKS = os.path.join(BUILD, "tests", "load_ranks")
CKPT = os.path.join(BUILD, "fs", "ckpt")
STALL = 2 * max(1, SLOW / 2)  # seconds that a rank may be silent
DEADLINE_MS = int(1000 * max(1, SLOW / 2))
FILES = 20  # a process may have open
TOO_LONG = rf"takes longer than {DEADLINE_MS / 1000:.1f} s"
SLACK = 5 * SLOW  # seconds, for machines that do other things too


def copies(top, n):
    """All files are as new as what a test changes in them: a young shard beside an old marker is a save under way."""
    out = []
    for r in range(n):
        out.append(os.path.join(top, f"rank{r}", "run"))
        shutil.copytree(GOLDEN, out[-1], symlinks=True, copy_function=shutil.copyfile)
    return out


def shards(run):
    return sorted(os.path.join(d, f) for d, _, files in os.walk(run) for f in files if f.endswith(".safetensors"))


def threads(runs, fault, job, options=(), **env):
    args = [LOAD_RANKS, *options] + (["-f", fault] if fault else []) + runs + ["--", job]
    begin = time.monotonic()
    done = subprocess.run(args, capture_output=True, text=True, timeout=60 * SLOW, env=dict(os.environ, LOAD_TIMEOUT_MS=str(DEADLINE_MS), **env))
    return done, time.monotonic() - begin


def same_error(done, n, *needles):
    """All n ranks failed with one text that has these words in it."""
    told = [line.split(": ", 1)[1] for line in done.stdout.splitlines() if " rank " in line.split(": ")[0]]
    assert done.returncode == 1 and len(told) == n, (done.returncode, done.stdout, done.stderr)
    assert len(set(told)) == 1, told
    for needle in needles:
        assert re.search(needle, told[0]), (needle, told[0])


def errors_reach_all(runs, **io):
    """One rank's error, or one of those that all have, is the job's; it names the rank, the file and the offset."""
    for readers in ("once", "each"):
        for number, rank in ((1, "1"), (99, r"\d")):
            done, _ = threads(runs, f"eio@{number}", f"tp=2,dp=2:4:{readers}", **io)
            same_error(done, 4, rf"^io: rank {rank}: reading '.*/rank{rank}/.*\.safetensors' at byte \d+: Input/output error")
            done, _ = threads(runs, f"short@{number}", f"tp=2,dp=2:4:{readers}", **io)
            same_error(done, 4, rf"^stale: rank {rank}: .*/rank{rank}/.*ends at byte \d+")


def slow_reads_end_in_time(runs, **io):
    for fault in ("delay@1:8000", "hang@1"):
        for readers in ("once", "each"):
            done, seconds = threads(runs, fault, f"tp=2,dp=2:4:{readers}", **io)
            same_error(done, 4, r"^timeout: rank 1: tensor '.*': reading '.*/rank1/.*' at byte \d+ " + TOO_LONG)
            assert seconds < DEADLINE_MS / 1000 + SLACK, (fault, seconds)
    done, _ = threads(runs, "delay@1:300", "tp=2,dp=2:4:once", **io)
    assert done.returncode == 0, done.stdout


def a_read_of_the_page_cache_that_waits_all_the_same(runs):
    done, seconds = threads(runs, "stall@1", "tp=2,dp=2:4:each")
    same_error(done, 4, r"^timeout: rank 1: .* " + TOO_LONG)
    assert seconds < 2 * DEADLINE_MS / 1000 + SLACK, seconds


def checkpoints_that_differ(top):
    runs = copies(top, 2)
    other = os.path.join(HERE, "..", "golden", "nanotron", "llama_tp1_pp1_untied_interleaved")
    done, _ = threads([runs[0], other], None, "fsdp=2:2:once")
    same_error(done, 2, r"^conflict: rank 1 sees another checkpoint than rank 0: '.*/rank0/.*\.safetensors' has \d+ bytes on rank 0 and \d+ bytes on rank 1")


def checkpoints_with_other_bytes(top):
    """The same shapes and sizes, as another step of a run has them."""
    runs = copies(top, 3)
    for path in shards(runs[2]):
        with open(path, "r+b") as f:
            head = 8 + int.from_bytes(f.read(8), "little")
            f.seek(head)
            data = f.read()
            f.seek(head)
            f.write(bytes(b ^ 1 for b in data))
    done, _ = threads(runs, None, "fsdp=3:3:auto")
    same_error(done, 3, r"^conflict: rank 2 sees another checkpoint than rank 0: tensor '.*' has other bytes there than '.*/rank0/.*' has here, at byte \d+")


def safetensors(path, tensors):
    """Write F32 tensors: {name: shape}."""
    header, data = {}, b""
    for name, shape in tensors.items():
        rng = random.Random(name)
        body = b"".join(struct.pack("<f", rng.uniform(-1, 1)) for _ in range(math.prod(shape)))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(body)]}
        data += body
    text = json.dumps(header).encode()
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + data)


def computed_values_that_differ(top):
    """Adapters with the same tensors, and another scale in one rank's adapter_config.json."""
    base, weight, runs = os.path.join(top, "base"), "model.layers.0.self_attn.q_proj", []
    safetensors(os.path.join(base, "model.safetensors"), {f"{weight}.weight": [8, 8]})
    with open(os.path.join(base, "config.json"), "w") as f:
        json.dump({"model_type": "llama"}, f)
    for r, alpha in enumerate((4, 4, 8)):
        runs.append(os.path.join(top, f"rank{r}", "run"))
        safetensors(os.path.join(runs[-1], "adapter_model.safetensors"),
                    {f"base_model.model.{weight}.lora_A.weight": [2, 8], f"base_model.model.{weight}.lora_B.weight": [8, 2]})
        with open(os.path.join(runs[-1], "adapter_config.json"), "w") as f:
            json.dump({"peft_type": "LORA", "r": 2, "lora_alpha": alpha, "target_modules": ["q_proj"]}, f)
    merge = ["-o", "lora=merge", "-o", f"base={base}"]
    done, _ = threads(runs[:2], None, "fsdp=2:2:once", options=merge)
    assert done.returncode == 0, (done.stdout, done.stderr)
    done, _ = threads(runs, None, "fsdp=3:3:once", options=merge)
    same_error(done, 3, r"^conflict: rank 2 sees another checkpoint than rank 0, or another view of it")


def budgets(runs, **io):
    done, _ = threads(runs, None, "fsdp=4:4:once:1000", **io)
    same_error(done, 4, r"^limit: host_bytes is 1000, but ranks that share what they read need at least \d+")
    least = int(re.search(r"at least (\d+)", done.stdout).group(1))
    done, _ = threads(runs, None, f"fsdp=4:4:once:{least}", **io)
    assert done.returncode == 0 and int(done.stdout.split("buffers ")[1].split()[0]) <= least, done.stdout


# ---- processes ----

def start(runs, layout, *more, far=False, preexec=(), storage=(), **env):
    """A process a rank, over tcp; far: each on a machine of its own, so that nobody reads another's memory; preexec: what each does first;
    storage: that of each."""
    env = dict(os.environ, **launched(len(runs), **env))
    return [subprocess.Popen([CKPT, "load", run, "--layout", layout, *more],
                             env=dict(env, RANK=str(r), **({"CKPTFS_NODE": str(r)} if far else {}), **(storage[r].env if storage else {})),
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                             preexec_fn=preexec[r] if preexec else None)
            for r, run in enumerate(runs)]


class Storage:
    """How long each read of a process takes (tests/mount/fail_read.c); may change at any time."""

    def __init__(self, path, ms):
        self.path = path
        self.env = {"LD_PRELOAD": SHIM, "CKPTFS_FAIL_READ": path, "ASAN_OPTIONS": os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0"}
        with open(path, "wb") as f:
            f.write(struct.pack("<4i", 4, ms, 0, 0))

    def slow(self, ms):
        with open(self.path, "r+b") as f:
            f.write(struct.pack("<2i", 4, ms))

    def reads(self):
        with open(self.path, "rb") as f:
            return struct.unpack("<4i", f.read())[3]


def finish(processes, timeout=60 * SLOW):
    return [(p.communicate(timeout=timeout), p.returncode) for p in processes]


def a_file_is_short_on_one_rank(top):
    runs = copies(top, 3)
    path = shards(runs[1])[0]
    os.truncate(path, os.path.getsize(path) - 10)
    told = set()
    for (_, err), status in finish(start(runs, "fsdp=3", "--readers", "once")):
        assert status == 1, (status, err)
        told.add(err.split(": ", 1)[1])
    assert len(told) == 1 and "rank 1: " in list(told)[0] and os.path.basename(path) in list(told)[0], told


def a_file_is_missing_on_one_rank(top):
    runs = copies(top, 2)
    lost = [s for s in shards(runs[1]) if "token_embedding" in s][-1]  # of which rank 1 reads the last rows
    os.unlink(lost)
    told = set()
    for (_, err), status in finish(start(runs, "fsdp=2", "--readers", "each")):
        assert status == 1, (status, err)
        told.add(err.split(": ", 1)[1])
    assert len(told) == 1 and "rank 1: " in list(told)[0] and lost in list(told)[0] and "No such file" in list(told)[0], told


def a_node_has_other_bytes(top):
    """Each node has a copy: whatever differs in size, in a header or in a sampled place is another checkpoint."""
    runs = copies(top, 2)
    ends = finish(start(runs, "fsdp=2", "--readers", "each", "--verify", far=True))
    assert [status for _, status in ends] == [0, 0], ends
    for path in shards(runs[1]):  # all bytes of all tensors, which is more than the samples need
        with open(path, "r+b") as f:
            begin = 8 + int.from_bytes(f.read(8), "little")
            f.seek(begin)
            data = f.read()
            f.seek(begin)
            f.write(bytes(b ^ 1 for b in data))
        os.utime(path, (1, 1))
    told = set()
    for (_, err), status in finish(start(runs, "fsdp=2", "--readers", "each", far=True)):
        assert status == 1, (status, err)
        told.add(err.split(": ", 1)[1])
    assert len(told) == 1 and "rank 1" in list(told)[0] and "copies of the checkpoint must be equal" in list(told)[0], told


def a_killed_rank_is_an_error_elsewhere(top):
    runs = copies(top, 3)
    failed = 0
    for i in range(12):
        victim = i % 3
        processes = start(runs, "fsdp=3", "--readers", "once" if i % 2 else "each", "--exchange-timeout", "2", far=i % 4 > 1, CKPTFS_MEET_TIMEOUT="3")
        time.sleep(0.004 * i)
        processes[victim].send_signal(signal.SIGKILL)
        begin = time.monotonic()
        done = finish(processes)
        assert time.monotonic() - begin < 20 + SLACK, "survivors hang"
        others = [status for k, (_, status) in enumerate(done) if k != victim]
        assert all(s in (0, 1) for s in others), done
        failed += any(others)
    print(f"     {failed} of 12 were killed early enough to be missed")


def a_stopped_rank_is_an_error_elsewhere(top):
    runs = copies(top, 3)
    processes = start(runs, "fsdp=3", "--readers", "once", "--exchange-timeout", "2", CKPTFS_MEET_TIMEOUT="3")
    time.sleep(0.01)
    processes[2].send_signal(signal.SIGSTOP)
    try:
        others = finish(processes[:2], timeout=20 + SLACK)
    finally:
        processes[2].send_signal(signal.SIGKILL)
        processes[2].communicate()
    assert all(status in (0, 1) for _, status in others), others


def in_the_middle(top, n, slow, ms, far=False):
    """A load by n ranks over TCP that exchange all they read, after the third read of those that read slowly."""
    os.makedirs(top)
    storage = [Storage(os.path.join(top, f"reads{r}"), ms if r in slow else 0) for r in range(n)]
    processes = start(copies(top, 1) * n, f"dp={n}", "--readers", "once", "--threads", "1", "--exchange-timeout", str(STALL), far=far, storage=storage)
    while sum(storage[r].reads() for r in slow) < 3 and all(p.poll() is None for p in processes):
        time.sleep(0.01)
    return processes, storage


def survivors(processes, victim):
    """What the other ranks said, after at most how many seconds."""
    begin = time.monotonic()
    try:
        ends = finish([p for r, p in enumerate(processes) if r != victim], timeout=20 + SLACK)
    finally:
        processes[victim].send_signal(signal.SIGKILL)
        processes[victim].communicate()
    assert all(status == 1 for _, status in ends), ends
    return [err.split(": ", 1)[1] for (_, err), _ in ends], time.monotonic() - begin


def a_frozen_rank_is_named_in_time(top):
    """By all, whether it is a leaf of the tree of ranks, its root or in between (a rank has 32 below it)."""
    for n, victim, far in ((3, 2, False), (3, 0, False), (5, 2, True), (36, 1, False)):
        if n > 32 and SLOW > 1:
            continue
        processes, _ = in_the_middle(os.path.join(top, f"{n}-{victim}"), n, range(2, n), 100, far)
        processes[victim].send_signal(signal.SIGSTOP)
        told, seconds = survivors(processes, victim)
        assert set(told) == {f"rank {victim} sent nothing for {STALL:.1f} s\n"}, (n, victim, told)
        assert seconds < 1.5 * STALL + SLOW, seconds


def a_rank_that_hangs_in_a_read_is_named_in_time(top):
    for n, victim in ((3, 2), (4, 1)):
        processes, storage = in_the_middle(os.path.join(top, f"{n}-{victim}"), n, [victim], 100)
        storage[victim].slow(3600 * 1000)
        told, seconds = survivors(processes, victim)
        assert len(set(told)) == 1 and re.match(rf"rank {victim} has been reading '.*\.safetensors' at byte \d+ for {STALL:.1f} s", told[0]), told
        assert seconds < 1.5 * STALL + SLOW, seconds


def rank_0_says_whom_it_waits_for(top):
    """A rank that comes late, and one that has come and is stopped while rank 0 opens the run, which takes a second or two."""
    run, port = copies(top, 1)[0], free_port()

    def rank(r, **more):
        env = dict(os.environ, **launched(3, RANK=str(r), MASTER_PORT=str(port)), **more)
        return subprocess.Popen([CKPT, "load", run, "--layout", "dp=3"], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    storage = Storage(os.path.join(top, "reads"), 30)
    processes = [rank(0, **storage.env), rank(1)]
    time.sleep(11)
    processes.append(rank(2))
    while storage.reads() < 3 and processes[0].poll() is None:
        time.sleep(0.01)
    processes[2].send_signal(signal.SIGSTOP)
    time.sleep(12 + 3 * SLOW)
    processes[2].send_signal(signal.SIGCONT)
    ends = finish(processes)
    assert [status for _, status in ends] == [0, 0, 0], ends
    said = ends[0][0][1].splitlines()
    assert said[0] == f"ckpt-load: note: waiting for rank 2 for 10 s now, to come to MASTER_PORT={port}", ends
    assert said[1:] == [f"ckpt-load: note: waiting for rank 2 for 10 s now, to open '{run}'"], ends
    assert not ends[1][0][1] and not ends[2][0][1], ends


def ranks_that_do_not_come_are_named_by_all(top):
    """Also one that has another secret, which rank 0 knows, and the others hear of."""
    run, secrets = copies(top, 1)[0], ["0123456789abcdef0123"] * 2 + ["another secret of this job"]
    env = [dict(os.environ, **launched(3, MASTER_PORT=str(free_port()), CKPTFS_MEET_TIMEOUT="3")) for _ in range(2)]
    port = env[0]["MASTER_PORT"]
    for secret in (False, False, True):
        processes = [subprocess.Popen([CKPT, "load", run, "--layout", "dp=3"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                      env=dict(env[0], RANK=str(r), **({"CKPTFS_SECRET": secrets[r]} if secret else {})))
                     for r in range(3 if secret else 2)]
        told = [err.split(": ", 1)[1] for (_, err), _ in finish(processes)]
        if "libsodium" in told[0]:
            return "(without secrets: no libsodium)"
        why = ": a process that came as rank 2 has another CKPTFS_SECRET, or none" if secret else ""
        assert told[:2] == [f"rank 2 did not come to MASTER_PORT={port} within 3.0 s{why}\n"] * 2, told
        assert not secret or "a process there has another CKPTFS_SECRET, or none" in told[2], told


def another_path_on_one_rank(top):
    """It is told within seconds, with both paths, whether there is nothing or another run."""
    good = copies(top, 2)
    os.rename(os.path.join(good[1], "10"), os.path.join(good[1], "20"))
    with open(os.path.join(good[1], "latest.txt"), "w") as f:
        f.write("20")
    nowhere = os.path.join(top, "nowhere")
    for runs, text in (([good[0], good[0], nowhere], f"rank 2: rank 0 loads '{good[0]}', but here: cannot open directory '{nowhere}': No such file or directory"),
                       ([good[0], good[1], good[0]], f"rank 1: the run '{good[1]}' has no step '10' here, which rank 0 loads from '{good[0]}'"),
                       ([nowhere, good[0], good[0]], f"rank 0: cannot open directory '{nowhere}': No such file or directory")):
        begin = time.monotonic()
        ends = finish(start(runs, "dp=3"))
        assert time.monotonic() - begin < 5 + SLACK, ends
        assert [err.split(": ", 1)[1] for (_, err), _ in ends] == [text + "\n"] * 3, (text, ends)


def storage_that_hangs_while_it_is_opened(top):
    """On rank 0, which opens the run for all: it ends too, and says the same."""
    run = copies(top, 1)[0]
    storage = [Storage(os.path.join(top, f"reads{r}"), 0 if r else 3600 * 1000) for r in range(2)]
    begin = time.monotonic()
    ends = finish(start([run, run], "dp=2", "--exchange-timeout", str(STALL), storage=storage), timeout=20 + SLACK)
    assert time.monotonic() - begin < 2 * STALL + SLACK, ends
    assert [err.split(": ", 1)[1] for (_, err), _ in ends] == [f"rank 0: opening '{run}': nothing was read for {STALL:.1f} s\n"] * 2, ends


def a_slow_rank_is_waited_for(top):
    """Much longer than the timeout, by ranks that wait for nothing else; also if all are stopped for a while."""
    processes, _ = in_the_middle(top, 3, [2], int(STALL * 500))
    for sign in (signal.SIGSTOP, signal.SIGCONT):
        for p in processes:
            p.send_signal(sign)
        time.sleep(1.5 * STALL)
    ends = finish(processes)
    assert [status for _, status in ends] == [0, 0, 0], ends


def a_damaged_latest_step(top):
    """It is not passed over silently: the error says which step it is, and that another can be had."""
    run = copies(top, 1)[0]
    shutil.copytree(os.path.join(run, "10"), os.path.join(run, "20"))
    with open(os.path.join(run, "latest.txt"), "w") as f:
        f.write("20")
    os.truncate(shards(os.path.join(run, "20"))[0], 50)
    (_, err), status = finish(start([run], "fsdp=1"))[0]
    assert status == 1 and "(step '20' is the latest; the newest that can be read is '10': --step 10)" in err, err
    (_, err), status = finish(start([run], "fsdp=1", "--step", "10"))[0]
    assert status == 0, err


def later_step(run, name="20"):
    """A run's next step, which differs in the last byte of one shard; the latest."""
    step = os.path.join(run, name)
    shutil.copytree(os.path.join(run, "10"), step)
    change_last_byte(shards(step)[-1])
    with open(os.path.join(run, "latest.txt"), "w") as f:
        f.write(name)
    return step


def change_last_byte(path):
    with open(path, "r+b") as f:
        f.seek(-1, os.SEEK_END)
        byte = f.read(1)[0]
        f.seek(-1, os.SEEK_END)
        f.write(bytes([byte ^ 1]))


def ranks_that_see_other_steps(top):
    """Rank 0's latest step is loaded by all, or none loads."""
    runs = copies(top, 2)
    later_step(runs[1])
    ends = finish(start(runs, "fsdp=2", "--readers", "once", "--verify", "--json"))
    assert [status for _, status in ends] == [0, 0], ends
    assert json.loads(ends[0][0][0])["step"] == "10", ends
    ends = finish(start([runs[1], runs[0]], "fsdp=2", "--readers", "once", "--exchange-timeout", "4"))
    for (_, err), status in ends:
        assert status == 1 and err.split(": ", 1)[1] == f"rank 1: the run '{runs[0]}' has no step '20' here, which rank 0 loads from '{runs[1]}'\n", ends
    ends = finish(start(runs, "fsdp=2", "--step", "10", "--verify", "--json"))
    assert [status for _, status in ends] == [0, 0], ends
    for more in ([], ["--step", "20"]):
        processes = start([runs[1], runs[0]], "fsdp=2", "--verify", "--json", *more)
        time.sleep(1)  # and it appears
        shutil.copytree(os.path.join(runs[1], "20"), os.path.join(runs[0], ".20"), copy_function=shutil.copy2)
        os.rename(os.path.join(runs[0], ".20"), os.path.join(runs[0], "20"))
        ends = finish(processes)
        assert [status for _, status in ends] == [0, 0] and json.loads(ends[0][0][0])["step"] == "20", ends
        shutil.rmtree(os.path.join(runs[0], "20"))


def steps_opened_by_hand(top):
    """Each rank opens what it likes: another step is refused, by name, whatever the sampled bytes say."""
    runs = copies(top, 2)
    steps = os.path.join(runs[0], "10"), later_step(runs[1])
    link = os.path.join(runs[1], "newest")
    os.symlink("20", link)
    for other in (runs[1], steps[1], link):
        first = runs[0] if other == runs[1] else steps[0]
        done, _ = threads([first, other], None, "fsdp=2:2:once")
        same_error(done, 2, r"^conflict: rank 1 loads '20', rank 0 '10': all ranks must load the same step")


def a_step_that_is_saved_anew_while_ranks_open_it(top):
    """The second rank opens it after that, the first one still has the old files, maybe in open descriptors: no mixture is loaded."""
    for number, replace in enumerate(("cp {new} {old}", "cp {new} {old}.tmp && mv {old}.tmp {old}")):
        runs = copies(os.path.join(top, str(number)), 2)
        old, new = (shards(run)[-1] for run in runs)
        change_last_byte(new)
        done, _ = threads([runs[0], runs[0]], None, "fsdp=2:2:once", ["-x", replace.format(old=old, new=new)])
        same_error(done, 2, rf"^stale: rank 0: '{re.escape(old)}' changed since the checkpoint was opened: it was saved anew while the ranks opened it")


def statistics(top):
    runs = copies(top, 2)
    for more in ((), ("--check",)):
        for far in (False, True):
            (out, err), status = finish(start(runs, "tp=2", "--json", "--verify", "--readers", "once", *more, far=far))[0]
            assert status == 0, err
            got = json.loads(out.splitlines()[-1])
            for key in ("ranks", "transport", "needed_bytes", "unique_bytes", "read_bytes", "sent_bytes", "reads", "wall_s", "busy_s", "verified"):
                assert key in got, key
            assert got["verified"] is True and got["ranks"] == 2 and got["transport"] == "tcp" and got["read_bytes"] == got["unique_bytes"]


def jobs_with_neighbouring_ports_do_not_meet(top):
    """One job's ranks look for their rank 0 while another's listens at the next port."""
    run, port = copies(top, 1)[0], free_port()

    def rank(job, r):
        env = dict(os.environ, **launched(3, RANK=str(r), MASTER_PORT=str(port + job)))
        return subprocess.Popen([CKPT, "load", run, "--layout", ("fsdp=3", "dp=3")[job], "--json"], env=env,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    early = [rank(1, 0), rank(0, 1), rank(0, 2)]
    time.sleep(0.5)
    done = finish(early + [rank(1, 1), rank(1, 2), rank(0, 0)])
    assert all(status == 0 for _, status in done), done


def what_repeats_the_greeting_is_no_rank(top):
    """An echo service has MASTER_PORT, as a socket has that Linux let connect to itself; rank 0 is at the next port."""
    runs, echo = copies(top, 1) * 3, socket.create_server(("127.0.0.1", 0))
    heard = []

    def repeat():
        while True:
            try:
                conn, _ = echo.accept()
            except OSError:
                return
            with conn, contextlib.suppress(ConnectionError):
                while data := conn.recv(4096):
                    heard.append(data)
                    conn.sendall(data)

    threading.Thread(target=repeat, daemon=True).start()
    done = finish(start(runs, "fsdp=3", "--json", MASTER_PORT=str(echo.getsockname()[1])))
    echo.close()
    assert all(status == 0 for _, status in done) and heard, (done, heard)


def too_few_descriptors(top):
    begin = time.monotonic()
    done = finish(start(copies(top, 1) * 6, "fsdp=6", preexec=[lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))] * 6))
    assert time.monotonic() - begin < SLACK
    for (_, err), status in done:
        assert status == 1 and re.search(rf"\d+ connections are needed .* no more than {FILES} ", err), (status, err)


def rates_decide_who_reads(top):
    """Those that are given; the others are assumed, and none is measured."""
    runs = copies(top, 2)
    assumed = {"node_storage": 2e9, "page_cache": 8e9, "copy": 8e9, "local_link": 2e9, "network": 3e9}
    for far, given, decided in ((False, {}, "each"), (False, {"page_cache": 1e3, "local_link": 1e12}, "once"), (True, {"network": 1e3}, "each")):
        rates = [*("--rates", ",".join(f"{k}={v:.0f}" for k, v in given.items()))] if given else []
        out = finish(start(runs, "dp=2", "--json", "--verify", *rates, far=far))
        assert all(status == 0 for _, status in out), out
        got = json.loads(out[0][0][0].splitlines()[-1])
        assert got["readers"] == decided and got["rates"] == {**assumed, "shared_storage": 0, **given}, (given, got)


def main():
    with tempfile.TemporaryDirectory() as top:
        runs = copies(os.path.join(top, "shared"), 4)
        tests = [(errors_reach_all, runs), (slow_reads_end_in_time, runs), (budgets, runs),
                 (a_read_of_the_page_cache_that_waits_all_the_same, runs)]
        tests += [(t, os.path.join(top, t.__name__)) for t in (
            checkpoints_that_differ, checkpoints_with_other_bytes, computed_values_that_differ, a_file_is_short_on_one_rank,
             a_file_is_missing_on_one_rank, a_node_has_other_bytes, a_killed_rank_is_an_error_elsewhere,
             a_stopped_rank_is_an_error_elsewhere, a_frozen_rank_is_named_in_time, a_rank_that_hangs_in_a_read_is_named_in_time, storage_that_hangs_while_it_is_opened,
             a_slow_rank_is_waited_for, rank_0_says_whom_it_waits_for, ranks_that_do_not_come_are_named_by_all, another_path_on_one_rank, a_damaged_latest_step, ranks_that_see_other_steps, steps_opened_by_hand,
             a_step_that_is_saved_anew_while_ranks_open_it, statistics, jobs_with_neighbouring_ports_do_not_meet,
             what_repeats_the_greeting_is_no_rank, too_few_descriptors, rates_decide_who_reads)]
        run([(t.__name__, lambda t=t, arg=arg: t(arg)) for t, arg in tests])


main()
