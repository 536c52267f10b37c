# SPDX-License-Identifier: Apache-2.0
"""Processes of a job's ranks, forked from one that has imported torch and the like once: that takes seconds of processor time otherwise,
in each of them.

The server has no threads when it forks; what a rank needs, it starts itself. It ends with the test that began it. A module may have a
function preload() for what it imports late.

usage: ranks.py MODULE; then a line of JSON for each job, and for each an answer"""

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import traceback

_servers = {}


def free_port():
    """A port on which ranks can meet."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


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


def _serve(module):
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever is printed, by imports too, is no answer
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
    key = module, tuple(sorted(env.items()))
    if key not in _servers:
        if not _servers:
            atexit.register(_end)
        _servers[key] = subprocess.Popen([sys.executable, os.path.abspath(__file__), module], env=os.environ | env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         text=True, start_new_session=True)
    return _servers[key]


def run(world, module, function, *args, folder, timeout=300, **env):
    """function(world, rank, *args) of a module of this folder in `world` processes; args are JSON. AssertionError: what they printed, if one fails."""
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
    _serve(sys.argv[1])
