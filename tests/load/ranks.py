# SPDX-License-Identifier: Apache-2.0
"""The ranks of a job, as processes of this machine: what a launcher tells them, and who starts them.

    started(n, COMMAND)                   as a launcher would, and ended() waits for them
    torchrun(n, SCRIPT, ...)              torch's own launcher
    mpirun(n, COMMAND)                    MPI's
    run(n, MODULE, FUNCTION, ...)         functions, forked from a process that has imported their module: megatron-core and DeepSpeed take
                                          seconds of processor time otherwise, in each of them

As a program: ranks.py FOLDER MODULE; then a line of JSON for each job of run(), and for each an answer."""

import atexit
import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback

HERE = os.path.dirname(os.path.abspath(__file__))
SLOW = float(os.environ.get("CKPTFS_SLOW", "1"))  # a sanitizer's build takes that much longer
PORTS = range(20000, 32000)  # below those that Linux gives to whoever connects
PYTHON = [sys.executable, "-I", "-S", os.path.join(HERE, "..", "warm.py")]  # with torch, if this test has it from there; else the interpreter
MPI = dict(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", OMPI_MCA_mpi_yield_when_idle="1", OMPI_MCA_rmaps_base_oversubscribe="1",
           OMPI_MCA_btl_vader_single_copy_mechanism="none")


def free_port():
    """A port that nobody has, nor the next one."""
    while True:
        port = random.choice(PORTS)
        try:
            for p in (port, port + 1):
                socket.create_server(("127.0.0.1", p)).close()
            return port
        except OSError:
            pass


def launched(n, **more):
    """What the environment of each of a job's n ranks has more, but for RANK."""
    return {"WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "CKPTFS_MEET_TIMEOUT": "60", **more}


# ---- programs ----


def started(n, command, own=lambda rank: {}, env=None, **how):
    """The processes of n ranks. command: a list, or a function of the rank that gives one; own: what a rank's environment has more."""
    env = os.environ | launched(n) | (env or {})
    how = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) | how
    return [subprocess.Popen(command(r) if callable(command) else command, env=env | {"RANK": str(r)} | own(r), **how) for r in range(n)]


def ended(processes, timeout=120 * SLOW):
    """Wait for them, for so long together, and leave none: [(status, stdout, stderr)]."""
    end = time.monotonic() + timeout
    try:
        said = [p.communicate(timeout=max(end - time.monotonic(), 1)) for p in processes]
    finally:
        for p in processes:
            p.kill()
    return [(p.returncode, *s) for p, s in zip(processes, said)]


def mpirun(n, command, env=None, timeout=120 * SLOW, base=os.environ):
    """MPI's launcher, in a folder of its own: those of a user share one in /tmp, and the last to leave removes it while another arrives."""
    with tempfile.TemporaryDirectory(prefix="mpi") as own:
        env = dict(base) | MPI | {"OMPI_MCA_orte_tmpdir_base": own, "PRTE_MCA_prte_tmpdir_base": own} | (env or {})
        return subprocess.run(["mpirun", "--oversubscribe", "-n", str(n), *command], capture_output=True, text=True, timeout=timeout, env=env)


def torchrun(n, script, *args, python=PYTHON, timeout=600, env=None, **how):
    """torch's launcher, of a script that is given these arguments."""
    command = [*python, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}", "--no-python", *python, "-u"]
    return subprocess.run([*command, os.path.abspath(script), *args], timeout=timeout, env=dict(os.environ, PYTHONFAULTHANDLER="1", **(env or {})), **how)


# ---- functions ----

_servers = {}


def _rank(function, said, args):
    with open(said, "wb", buffering=0) as f:
        os.dup2(f.fileno(), 1)
        os.dup2(f.fileno(), 2)
    code = 1
    try:
        function(*args)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def _serve(folder, module):
    """Without threads, as it forks; what a rank needs, it starts itself. A module may have a function preload() for what it imports late."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever is printed, by imports too, is no answer
    sys.path.insert(0, folder)
    module = __import__(module)
    getattr(module, "preload", int)()
    for line in sys.stdin:
        job = json.loads(line)
        pids = []
        for rank, said in enumerate(job["said"]):
            pids.append(os.fork())
            if pids[-1] == 0:
                _rank(getattr(module, job["function"]), said, (len(job["said"]), rank, *job["args"]))
        print(json.dumps([os.waitpid(pid, 0)[1] for pid in pids]), file=answers, flush=True)


def _end():
    for server in _servers.values():
        server.stdin.close()
        server.wait()
        server.stdout.close()


def _server(module, env):
    """It ends with the test that began it."""
    key = module, tuple(sorted(env.items()))
    if key not in _servers:
        if not _servers:
            atexit.register(_end)
        folder = os.path.dirname(importlib.util.find_spec(module).origin)
        _servers[key] = subprocess.Popen([*PYTHON, os.path.abspath(__file__), folder, module], env=os.environ | env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         text=True, start_new_session=True)
    return _servers[key]


def run(world, module, function, *args, folder, timeout=300, **env):
    """function(world, rank, *args) of a module in `world` processes; args are JSON. AssertionError: what they printed, if one fails."""
    server = _server(module, env)
    said = [os.path.join(folder, f"said-{r}") for r in range(world)]

    def stop(*_):
        os.killpg(server.pid, signal.SIGKILL)

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(timeout)
    try:
        print(json.dumps({"function": function, "said": said, "args": args}), file=server.stdin, flush=True)
        answer = server.stdout.readline()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    if not answer or any(json.loads(answer)):
        raise AssertionError(f"ranks of {function} failed ({answer.strip() or 'no answer in time'}):\n" +
                             "\n".join(open(s).read()[-1500:] for s in said if os.path.exists(s)))


if __name__ == "__main__":
    _serve(*sys.argv[1:])
