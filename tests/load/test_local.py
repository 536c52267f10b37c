# SPDX-License-Identifier: Apache-2.0
"""Loads by ranks of which each has only some files of the run (ckpt load --local): every byte is that of an ordinary load, every file is opened where it is,
and what is wrong is named, with its rank."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

from ranks import ended, launched, mpirun, run, started

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "mount"))
from storage import Storage  # noqa: E402

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


# of each a file, and what an error says if it is on no node
LOST = {
    "dcp": ("__2_0.distcp", "'__2_0.distcp'", "rank 2 of the training wrote it"),
    "megatron": ("iter_0000010/mp_rank_01_000/model_optim_rng.pt", "mp_rank_01_000' has no model_optim_rng.pt", "'mp_rank_01_000' says which rank of the training"),
    "deepspeed": ("global_step2/zero_pp_rank_1_mp_rank_00_model_states.pt", "rank 1 of 3", "'zero_pp_rank_1_mp_rank_00_model_states' says which rank of the training"),
    "nanotron": ("10/model/model/decoder/3/pp_block/attn/o_proj/model_weight_pp-rank-1-of-2_tp-rank-0-of-2.safetensors", "decoder/3/pp_block/attn/o_proj",
                 "'tp-rank-0-of-2' says which rank of the training"),
}


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
        if layout.startswith("dp="):  # all want all, so the reader of each byte is a rank that has it, and it travels to the others alone
            assert got.stats["asked_bytes"] == 0 and got.stats["received_bytes"] >= (world - 1) * got.stats["unique_bytes"], (layout, got.stats)
        if layout.startswith("fsdp="):  # each byte is one rank's, which asks for it if it has not the file
            assert 0 < got.stats["asked_bytes"] <= got.stats["unique_bytes"] and got.stats["received_bytes"] == 0, (layout, got.stats)
    torch.distributed.destroy_process_group()


def fault(world, rank, path, layout, top, killed=False):
    """Open the run on all ranks, wait until the test has done its worst, load, and say which error there was. killed: rank 2 is, in the middle."""
    import ckptfs
    import torch

    os.environ.update(json.loads(os.environ["JOB"]), RANK=str(rank), LOCAL_RANK=str(rank))
    torch.distributed.init_process_group("gloo")
    with ckptfs.Comm() as comm:
        view = ckptfs.View(path, comm=comm, local_files=True, timeout=2)
        torch.distributed.barrier()
        open(os.path.join(top, f"opened-{rank}"), "w").close()
        while not os.path.exists(os.path.join(top, "go")):
            time.sleep(0.01)
        said = {}
        if killed and rank == 2:
            threading.Timer(1, os.kill, (os.getpid(), signal.SIGKILL)).start()
        try:
            ckptfs.load_layout(view, layout, comm, load_options={"read_timeout_ms": 2000})
        except ckptfs.CkptError as e:
            said = {"code": e.code, "text": str(e)}
        with open(os.path.join(top, f"error-{rank}"), "w") as f:
            json.dump(said, f)
        if not killed:
            torch.distributed.barrier()
        view.close()
    if killed:  # a barrier would wait for the one that is gone; and the others ask the store, which is rank 0's, until they have said their errors
        while not all(os.path.exists(os.path.join(top, f"error-{r}")) for r in range(world) if r != 2):
            time.sleep(0.01)
        os._exit(0)
    torch.distributed.destroy_process_group()


# ---- tests ----


def launched_job():
    return json.dumps(launched(RANKS))


def check_bytes(top, name, whole, options, layouts):
    """Over TCP from Python, against an ordinary load; over MPI by the tool, against an independent read."""
    path = spread(whole, os.path.join(top, name))
    run(RANKS, "test_local", "compare", whole, path, options, layouts, folder=top, timeout=120, CKPTFS_LIBRARY_PATH=BUILD, JOB=launched_job())
    if has_mpi():
        said = mpirun(RANKS, [CKPT_LOAD, "load", path, "--local", "--layout", layouts[0], "--verify", *words(options)])
        assert said.returncode == 0 and "over mpi" in said.stdout, said
    print(f"ok   {name}: {', '.join(layouts)}")


def failed(said, *parts):
    """All ranks have failed with one error, which has these parts."""
    for status, _, err in said:
        assert status == 1 and all(p in err for p in parts), (parts, said)


def place_of(path, name):
    """Where a file is: at the rank that has it."""
    return next(at for at in (os.path.join(path.replace("{rank}", str(r)), name) for r in range(RANKS)) if os.path.exists(at))


def check_lost(top):
    """A file on no node is named on all ranks, with the rank that wrote it."""
    for name, whole, options, layouts in CASES:
        lost, *parts = LOST[name]
        path = spread(os.path.join(GOLDEN, whole), os.path.join(top, f"{name}-lost"))
        os.remove(place_of(path, lost))
        failed(load(path, layouts[0], *words(options)), *parts, "all 4 ranks")
    print(f"ok   a file on no node: {', '.join(LOST)}")


def check_lacks(top):
    """A folder on no node; files of two sizes by one name, or with other bytes."""
    path = spread(os.path.join(GOLDEN, "dcp/torch26_fsdp1_4r/run"), os.path.join(top, "lacks"))
    raw = ["-o", "view=raw"]
    lost = "__2_0.distcp"
    at = place_of(path, lost)
    shutil.copy2(at, os.path.join(path.replace("{rank}", "0"), lost))
    assert all(status == 0 for status, *_ in load(path, "fsdp=4", *raw, "--verify")), "a copy is no error"
    os.truncate(os.path.join(path.replace("{rank}", "0"), lost), 10)
    failed(load(path, "fsdp=4", *raw), f"'{lost}', of 10 bytes at rank 0", "has another size", "must be the same")
    shutil.copyfile(at, os.path.join(path.replace("{rank}", "0"), lost))
    with open(os.path.join(path.replace("{rank}", "0"), lost), "r+b") as f:
        f.write(b"?")
    failed(load(path, "fsdp=4", *raw), f"'{lost}', of ", "or other contents at rank", "must be the same")
    failed(load(os.path.join(top, "nothing-{rank}"), "fsdp=4", *raw), "none of the 4 ranks has a directory")
    print("ok   what is on no node, or differs, is named")


def check_nodes(top):
    """{node} counts nodes; a rank of a node without a directory takes part; where all see all files it is an ordinary load."""
    whole = os.path.join(GOLDEN, "nanotron/llama_tp2_pp2_tied")
    for name in files_of(whole):
        put = os.path.join(top, f"machine-{name.endswith('json') + 0}", name)
        os.makedirs(os.path.dirname(put), exist_ok=True)
        shutil.copy2(os.path.join(whole, name), put)
    machines = load(os.path.join(top, "machine-{node}"), "tp=2,dp=2", "--verify", own=lambda rank: {"CKPTFS_NODE": f"n{rank * 3 // RANKS}"})
    assert all(status == 0 for status, *_ in machines) and "readers once" in machines[0][1], machines
    whole_again = load(whole, "tp=2,dp=2", "--verify")
    assert all(status == 0 for status, *_ in whole_again), whole_again
    print("ok   nodes of one and of two ranks, one without files; all files everywhere")


def plan(path, layout, *more, status=0):
    """What ckpt plan prints: JSON, or its error."""
    command = [CKPT_LOAD, "plan", path, "--local", "--layout", layout, "--ranks-per-node", "1", "--json", *more]
    said = subprocess.run(command, capture_output=True, text=True)
    assert said.returncode == status, said
    return said.stderr if status else json.loads(said.stdout)


def check_plan(top):
    """ckpt plan --local says what a load does, to the byte, whether it looks at the nodes' directories or is told what they have."""
    for name, whole, options, layouts in CASES:
        whole = os.path.join(GOLDEN, whole)
        path = spread(whole, os.path.join(top, f"{name}-plan")).replace("{rank}", "{node}")
        listed = os.path.join(top, f"{name}-files")
        with open(listed, "w") as f:
            f.write("# which node has what\n\n" + "".join(f"{i % RANKS} {file}\n" for i, file in enumerate(files_of(whole))))
        for layout in layouts:
            said = plan(path, layout, *words(options))
            assert said == plan(whole, layout, "--node-files", listed, *words(options)), (name, layout)
            got = load(path, layout, "--json", *words(options), own=lambda rank: {"CKPTFS_NODE": str(rank)})
            got = json.loads(got[0][1].splitlines()[-1])
            for k in ("read_bytes", "sent_bytes", "received_bytes"):  # the plan has means, rounded down
                assert got[k] // RANKS == said[k]["mean"], (name, layout, k, got[k], said)
            asked, read = (sum(n[k] for n in said["by_node"]) for k in ("asked_bytes", "read_bytes"))
            assert asked // RANKS == said["asked_bytes"]["mean"] and asked + read == got["read_bytes"], (name, layout, got, said)
            assert asked == got["asked_bytes"], (name, layout, got, said)
    with open(listed, "w") as f:
        f.write("* *\n")
    ordinary = plan(whole, layouts[0], "--node-files", listed)
    assert "by_node" not in ordinary and "asked_bytes" not in ordinary, ordinary
    for text, part in (("0 *.json\n", "no line names '10/config.yaml'"), ("* *\n9 x\n", "line 2: '9' is no node"), ("* *\n1\n", "line 2: expected NODE PATTERN"),
                       ("-1 x\n", "'-1' is no node"), ("0 a\0b\n", "has a byte 0 at 3")):
        with open(listed, "w") as f:
            f.write(text)
        told = plan(whole, layouts[0], "--node-files", listed, status=2 if "byte 0" not in part else 1)
        assert part in told, (part, told)
    assert "write {node} for the number" in plan(whole, layouts[0], status=2)
    assert "one of them is enough" in plan(path, layouts[0], "--node-files", listed, status=2)
    assert "use {node}" in plan(path.replace("{node}", "{rank}"), layouts[0], status=2)
    assert "none of the 4 nodes" in plan(path + "-not", layouts[0], status=1)
    with open(listed, "w") as f:
        f.write("* *\n")
    assert "is a file: a local load needs a directory" in plan(listed, layouts[0], "--node-files", listed, status=2)
    os.remove(place_of(path.replace("{node}", "{rank}"), LOST[name][0]))
    assert "all 4 nodes of this job; " + LOST[name][2] in plan(path, layouts[0], status=1)
    print("ok   plans are what loads do")


def check_copies(top):
    """Files that several nodes have, with other times there, beside files of one node: what is read is the same, each byte once."""
    rng = random.Random(5)
    for name, whole, options, layouts in CASES:
        whole, out = os.path.join(GOLDEN, whole), os.path.join(top, f"{name}-copies")
        for file in files_of(whole):
            for rank in rng.sample(range(RANKS), rng.randint(1, 3)):
                put = os.path.join(out, f"node-{rank}", file)
                os.makedirs(os.path.dirname(put), exist_ok=True)
                shutil.copy(os.path.join(whole, file), put)
        got = load(os.path.join(out, "node-{rank}"), "dp=4", "--verify", "--json", *words(options))
        assert all(status == 0 for status, _, _ in got), (name, got)
        got = json.loads(got[0][1].splitlines()[-1])
        assert got["verified"] and got["asked_bytes"] == 0 and got["read_bytes"] == got["unique_bytes"], (name, got)
    print("ok   files that several nodes have")


def has_mpi():
    return shutil.which("mpirun") and os.path.exists(os.path.join(BUILD, "core", "libckptfs_load_mpi.so"))


def check_namespaces(top):
    """One path, and in each rank's mount namespace another folder lies there; over TCP, and over MPI."""
    may = subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True)
    if may.returncode != 0:
        print("mount namespaces ... skipped (they may not be made here)")  # which --strict does not allow
        return
    here = os.path.join(top, "here")
    os.makedirs(here)
    for name, whole, options, layouts in CASES:
        path = spread(os.path.join(GOLDEN, whole), os.path.join(top, f"{name}-space"))
        script = f'mount --bind {path.replace("{rank}", "${RANK:-$OMPI_COMM_WORLD_RANK}")} {here} && exec "$@"'
        inside = ["unshare", "-rm", "sh", "-c", script, "sh"]
        for layout in layouts:
            said = load(here, layout, "--verify", *words(options), before=inside)
            assert all(status == 0 for status, *_ in said), (name, layout, said)
        if has_mpi():
            said = mpirun(RANKS, [*inside, CKPT_LOAD, "load", here, "--local", "--layout", layouts[-1], "--verify", *words(options)])
            assert said.returncode == 0 and "over mpi" in said.stdout, (name, said)
    print("ok   four mount namespaces, one path")


def check_fault(top, name, do, *parts, at=None, killed=False):
    """`do` is called when all ranks have opened the run; all have an error then, with these parts. killed: but for rank 2, a second later."""
    mine = os.path.join(top, name)
    os.makedirs(mine)
    path = at or spread(os.path.join(GOLDEN, "nanotron/llama_tp2_pp2_tied"), os.path.join(mine, "run"))

    def watch():
        while not all(os.path.exists(os.path.join(mine, f"opened-{r}")) for r in range(RANKS)):
            time.sleep(0.01)
        do(path.replace("{rank}", "2"))
        open(os.path.join(mine, "go"), "w").close()

    threading.Thread(target=watch, daemon=True).start()
    try:
        run(RANKS, "test_local", "fault", path, "dp=4", mine, killed, folder=mine, timeout=60, CKPTFS_LIBRARY_PATH=BUILD, JOB=launched_job())
    except AssertionError as e:
        assert killed and f"[0, 0, {signal.SIGKILL:d}, 0]" in str(e), e
    for rank in [r for r in range(RANKS) if not (killed and r == 2)]:
        with open(os.path.join(mine, f"error-{rank}")) as f:
            said = json.load(f)
        assert said and all(p in said["code"] + ": " + said["text"] for p in parts), (parts, said)
    print(f"ok   {name}: {said['text']}")


def data_files(folder):
    return [os.path.join(folder, name) for name in files_of(folder) if name.endswith(".safetensors")]


def shorten(folder):
    for name in data_files(folder):
        os.truncate(name, os.path.getsize(name) - 8)


def rewrite(folder):
    for name in data_files(folder):
        with open(name, "r+b") as f:
            f.seek(-1, os.SEEK_END)
            f.write(b"?")


def remove(folder):
    for name in data_files(folder):
        os.remove(name)


def check_hang(top, name, seconds, *parts, killed=False):
    """The disk of rank 2 hangs when all have opened the run. It goes on in the end, as closing a file of it hangs, too: a rank that is killed while it
    reads from there is gone only then."""
    if not os.path.exists(os.path.join(BUILD, "tests", "slow_fs")) or not os.access("/dev/fuse", os.W_OK):
        print("storage that hangs ... skipped (no FUSE)")
        return
    path = spread(os.path.join(GOLDEN, "nanotron/llama_tp2_pp2_tied"), os.path.join(top, f"{name}-disks"))
    disk = path.replace("{rank}", "2")
    os.rename(disk, disk + "-disk")
    with Storage(BUILD, disk + "-disk", top=top) as storage:
        os.symlink(storage.at, disk)
        check_fault(top, name, lambda _: storage.hang(seconds), *parts, at=path, killed=killed)


def main():
    with tempfile.TemporaryDirectory() as top:
        for name, whole, options, layouts in CASES:
            check_bytes(top, name, os.path.join(GOLDEN, whole), options, layouts)
        check_lost(top)
        check_lacks(top)
        check_nodes(top)
        check_plan(top)
        check_copies(top)
        check_namespaces(top)
        check_fault(top, "shorter", shorten, "stale: ", "rank 2")
        check_fault(top, "changed", rewrite, "stale: ", "rank 2")
        check_fault(top, "removed", remove, "stale: ", "rank 2")
        check_hang(top, "hang", 6, "timeout: ", "rank 2")
        check_hang(top, "killed", 3, "peer: ", f"rank 2 on {socket.gethostname()}", killed=True)


if __name__ == "__main__":
    main()
