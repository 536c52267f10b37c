# SPDX-License-Identifier: Apache-2.0
"""A Python that has torch and transformers imported already, for tests: it takes python's own command line and forks a server which imported them once.

usage: python -I -S warm.py [--begin] [-u] [-W FILTER] (SCRIPT | -m MODULE | -c CODE) [ARGUMENT...]

This process passes its arguments, environment, folder and descriptors 0 to 2 to the server, waits for the fork, and ends as it ends; a signal that it
gets it passes on, and the fork does not outlive it. The server has no threads, and ends when it was idle for a while. With --begin it is started if
there is none: as tests do that ctest starts, so that a script that is run by hand, and its ranks, use nothing but the interpreter.

A fork has the server's modules, so the interpreter itself is started instead, without a word, where these could be others than the ones that it would
import: if the environment differs in more than what OURS lists, or a folder of the script or of PYTHONPATH has a module that the server imported from
elsewhere, or looked for in vain. What all forks have in common, and processes of their own have not, is the seed of hash()."""

import hashlib
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
import time

IDLE_S = 20  # between two tests of ctest that use the server there are others that take as long; what a server holds is 400 MB
# Variables that a test, its ranks and torchrun set and that no module reads while it is imported; the fork heeds Python's own and OMP_NUM_THREADS.
OURS = ("CKPTFS_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "PYTHONPATH",
        "PYTHONFAULTHANDLER", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "OMP_NUM_THREADS", "HF_HUB_OFFLINE", "DS_ACCELERATOR", "PWD", "OLDPWD", "SHLVL", "_")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
MODULES = ("torch", "numpy", "safetensors.torch", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
           "torch.distributed.run", "transformers.modeling_utils", "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama",
           "torch._inductor.compile_fx", "accelerate", "peft")


def others(env):
    """The environment without what is ours: of these variables modules may make anything."""
    return sorted((k, v) for k, v in env.items() if not any(k == o or k.startswith(o) and o.endswith("_") and o != "_" for o in OURS))


def address():
    """The server's, in the abstract namespace: another environment, interpreter or version of this file has another."""
    with open(__file__, "rb") as f:
        what = repr((os.getuid(), sys.executable, os.path.abspath(__file__), others(os.environ))).encode() + f.read()
    return "\0ckptfs-warm-" + hashlib.sha256(what).hexdigest()


def is_ours(link):
    """Is the other end of a connection of the same user? Names in the abstract namespace are anybody's."""
    return struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1] == os.getuid()


# ---- the side of the caller ----


def start(name):
    """A server, in the background. It has no descriptor of ours: who reads what the test prints waits until the last one is closed."""
    if os.fork():
        os.wait()
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    null = os.open(os.devnull, os.O_RDWR)
    said = os.path.join(os.environ.get("CKPTFS_BUILD", ""), "tests", "warm.log")
    log = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666) if os.path.isdir(os.path.dirname(said)) else null
    for fd, of in enumerate((null, log, log)):
        os.dup2(of, fd)
    os.closerange(3, 1024)
    env = {k: v for k, v in os.environ.items() if k not in OURS} | {"HF_HUB_OFFLINE": "1", "OPENBLAS_NUM_THREADS": "1"}
    os.execve(sys.executable, [sys.executable, os.path.abspath(__file__), "--serve", name[1:]], env)


def connected(name, begin):
    """A connection to the server, or None. Of several that are started at once one gets the name."""
    for attempt in range(200):
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            link.connect(name)
            return link if is_ours(link) else None
        except OSError:
            link.close()
        if not begin:
            return None
        if attempt == 0:
            start(name)
        time.sleep(0.02)
    return None


def fork(args, begin):
    """A fork that runs with these arguments, waited for: its wait status, or None if there is no server that has the right modules."""
    link = connected(address(), begin)
    if link is None:
        return None
    ignored = [s for s in SIGNALS if signal.getsignal(s) == signal.SIG_IGN]
    job = json.dumps({"args": args, "env": dict(os.environ), "cwd": os.getcwd(), "umask": umask(), "ignored": ignored}).encode("utf-8", "surrogateescape")
    try:
        socket.send_fds(link, [struct.pack("<Q", len(job))], [0, 1, 2])
        link.sendall(job)
        pid = struct.unpack("<q", received(link, 8))[0]
    except (OSError, EOFError):
        return None  # it was about to end, or it could not import torch
    if pid < 0:
        return None
    for sign in SIGNALS:
        signal.signal(sign, lambda number, _: os.kill(pid, number))
    try:
        return struct.unpack("<q", received(link, 8))[0]
    except (OSError, EOFError):
        print("warm.py: the server that forked this test ended", file=sys.stderr)
        return 1 << 8


def umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def received(link, size):
    data = b""
    while len(data) < size:
        more = link.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def call(args):
    """What this program does: it ends as the fork ends, or becomes the interpreter itself."""
    begin = args[:1] == ["--begin"]
    args = args[begin:]
    status = fork(args, begin)
    if status is None:
        os.execv(sys.executable, [sys.executable, *args])
    if os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL) if os.WTERMSIG(status) != signal.SIGKILL else None
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


# ---- the server ----


class Missed:
    """The last finder of modules: it notes what nobody found."""

    def __init__(self):
        self.names = set()

    def find_spec(self, name, path=None, target=None):
        self.names.add(name.partition(".")[0])
        return None


def others_in(folder, missed):
    """The modules of a folder of sys.path that would change what is imported already."""
    try:
        names = {n.partition(".")[0] for n in os.listdir(folder)}
    except OSError:
        return []
    return [n for n in names if n in missed or n in sys.modules and not (getattr(sys.modules[n], "__file__", None) or folder).startswith(folder)]


def serve(name):
    """Fork for each caller. Returns in the forks only, which get what they shall run."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(name)
    except OSError:
        os._exit(0)  # another one was faster
    listener.listen(128)
    missed = Missed()
    sys.meta_path.append(missed)
    for module in MODULES:
        try:
            importlib.import_module(module)
        except ImportError as e:
            print(f"warm.py: {module}: {e}", file=sys.stderr, flush=True)
            if module == "torch":
                os._exit(1)
    sys.meta_path.remove(missed)
    if len(os.listdir("/proc/self/task")) > 1:  # a fork has one thread, and waits for the others in vain
        print("warm.py: a module has started threads", file=sys.stderr, flush=True)
        os._exit(1)
    import gc
    gc.collect()
    gc.freeze()
    running = {}  # {connection: (pid, descriptor of the process, what it runs)}
    while True:
        ready, _, _ = select.select([listener, *running, *(fd for _, fd, _ in running.values())], [], [], IDLE_S)
        if not ready and not running:
            os._exit(0)
        for link, (pid, fd, what) in list(running.items()):
            if fd in ready:
                _, status, used = os.wait4(pid, 0)
                print(f"{used.ru_utime + used.ru_stime:7.2f} s of a processor: {what}", file=sys.stderr, flush=True)
                try:
                    link.sendall(struct.pack("<q", status))
                except OSError:
                    pass
            elif link in ready:  # the caller was killed
                try:
                    os.killpg(pid, signal.SIGKILL)
                except ProcessLookupError:
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            else:
                continue
            link.close()
            os.close(fd)
            del running[link]
        if listener in ready:
            link, _ = listener.accept()
            job = answer(link, missed.names)
            if job is None:
                link.close()
                continue
            pid = os.fork()
            if pid == 0:
                for other, (_, fd, _) in running.items():
                    other.close()
                    os.close(fd)
                listener.close()
                link.close()
                return job
            for fd in job["fds"]:
                os.close(fd)
            running[link] = (pid, os.pidfd_open(pid), " ".join(job["args"])[:200])
            try:
                link.sendall(struct.pack("<q", pid))
            except OSError:
                pass  # the next round sees it


def answer(link, missed):
    """What a caller asks for, or None, and then it knows."""
    fds = []
    try:
        link.settimeout(10)
        if not is_ours(link):
            raise OSError("another user's process asks")
        head, fds, _, _ = socket.recv_fds(link, 8, 3)
        job = json.loads(received(link, struct.unpack("<Q", head)[0]).decode("utf-8", "surrogateescape"))
        link.settimeout(None)
        job["fds"], job["path"] = fds, [p for p in job["env"].get("PYTHONPATH", "").split(os.pathsep) if p]
        job["kind"], job["rest"], job["flags"] = options(job["args"])
        first = {"-c": "", "-m": job["cwd"]}.get(job["kind"]) if job["kind"] else os.path.dirname(os.path.realpath(os.path.join(job["cwd"], job["rest"][0])))
        job["path"].insert(0, first)
        differ = [os.path.join(p, n) for p in job["path"] for n in others_in(os.path.join(job["cwd"], p), missed)]
        if len(fds) == 3 and not differ:
            return job
        print(f"warm.py: not for {job['rest'][:1]}: {differ}", file=sys.stderr, flush=True)
        link.sendall(struct.pack("<q", -1))
    except (OSError, EOFError, ValueError, struct.error) as e:
        print(f"warm.py: {e}", file=sys.stderr, flush=True)
    for fd in fds:
        os.close(fd)
    return None


def options(args):
    """python's own options: (-m, -c or None for a script, what follows, {"-u", and filters of warnings})."""
    flags, i = [], 0
    while i < len(args) and args[i].startswith("-"):
        if args[i] in ("-m", "-c"):
            return args[i], args[i + 1:], flags
        if args[i] == "-W":
            flags.append(args[i + 1])
            i += 1
        elif args[i] == "-u":
            flags.append("-u")
        else:
            raise ValueError(f"option {args[i]}")
        i += 1
    return None, args[i:], flags


# ---- a fork ----


def become(job):
    """Make of this fork what an interpreter is that was started with these arguments: (kind, what to run)."""
    os.setsid()
    for fd, of in enumerate(job["fds"]):
        os.dup2(of, fd)
        os.close(of)
    for sign in SIGNALS:
        signal.signal(sign, signal.SIG_IGN if sign in job["ignored"] else signal.default_int_handler if sign == signal.SIGINT else signal.SIG_DFL)
    env = job["env"]
    os.environ.clear()
    os.environ.update(env)
    os.umask(job["umask"])
    os.chdir(job["cwd"])
    unbuffered = "-u" in job["flags"] or bool(env.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = open(0, closefd=False)
    sys.stdout = sys.__stdout__ = open(1, "w", buffering=1 if unbuffered or os.isatty(1) else -1, closefd=False)
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    sys.dont_write_bytecode = bool(env.get("PYTHONDONTWRITEBYTECODE"))
    sys.path[:] = job["path"] + sys.path[1:]
    sys.argv[:] = [job["kind"] or job["rest"][0], *job["rest"][1:]]
    if env.get("PYTHONFAULTHANDLER"):
        import faulthandler
        faulthandler.enable()
    import multiprocessing.process
    import tempfile
    import warnings
    multiprocessing.process.ORIGINAL_DIR, tempfile.tempdir = job["cwd"], None
    for text in job["flags"]:
        if text != "-u":
            sys.warnoptions.append(text)
            warnings.simplefilter(text)
    import numpy
    import torch
    numpy.random.seed()  # another one in each process, which random sees to itself
    if env.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    sys.modules["__main__"] = type(sys)("__main__")
    return job["kind"], job["rest"][0]


def main():
    if sys.argv[1:2] != ["--serve"]:
        call(sys.argv[1:])
    kind, what = become(serve("\0" + sys.argv[2]))
    if kind == "-m":
        import runpy
        return runpy._run_module_as_main(what)
    names = vars(sys.modules["__main__"])
    names["__builtins__"] = __builtins__
    if kind == "-c":
        return exec(compile(what, "<string>", "exec"), names)
    names.update(__file__=what, __cached__=None)
    with open(what, "rb") as f:
        return exec(compile(f.read(), what, "exec"), names)


if __name__ == "__main__":
    main()
