# SPDX-License-Identifier: Apache-2.0
"""What the tests of the Python package begin with: the package and the library of this build, the checkpoints, and who runs several ranks."""

import atexit
import os
import sys

import ranks

HERE = os.path.dirname(os.path.abspath(__file__))
BUILD = os.path.abspath(os.environ.get("CKPTFS_BUILD", "build/release"))
PACKAGE = os.path.abspath(os.path.join(HERE, "..", "..", "contrib", "python"))
GOLDEN = os.path.abspath(os.path.join(HERE, "..", "golden"))
NANOTRON = os.path.join(GOLDEN, "nanotron")
MEGATRON = os.path.join(GOLDEN, "megatron", "m19_llama_tp2pp2")

os.environ["CKPTFS_LIBRARY_PATH"] = BUILD
os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, PACKAGE)


def skip(why):
    print(f"skipped: {why}")
    sys.exit(77)


def need_transformers_5(transformers):
    if int(transformers.__version__.split(".")[0]) < 5:
        skip("transformers 5 is needed")


def end_rank():
    """Leaves the process group and ends this rank's process well, without taking the interpreter down: a thread of torch's gloo group may be about
    to drop a tensor that Python knows, and a process whose interpreter is going aborts then (pytorch/pytorch issue 190489)."""
    import torch.distributed as dist
    dist.destroy_process_group()
    atexit._run_exitfuncs()  # multiprocessing's among them: without it, its processes outlive this one
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def torchrun(n, script, *args, **env):
    """n ranks of a program that is given --rank and these arguments; they must all end well."""
    ranks.torchrun(n, script, "--rank", *args, env=env, check=True)
