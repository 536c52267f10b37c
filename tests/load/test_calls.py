# SPDX-License-Identifier: Apache-2.0
"""Ways to call the loader from Python: one Comm for many loads, loads that run beside the caller, parts of a model, layouts without a model. Each case
is a function of a folder that ranks run, or that this process runs alone."""

import os
import sys
import warnings

from built import NANOTRON, skip, torchrun
from runner import run_in_folders

try:
    import torch
    import torch.distributed as dist
    from safetensors.torch import load_file
except ImportError as e:
    skip(e)

import ckptfs  # noqa: E402
from ckptfs import CkptError  # noqa: E402

warnings.simplefilter("ignore")
RUN = os.path.join(NANOTRON, "llama_tp2_pp2_tied")
OTHER = os.path.join(NANOTRON, "llama_tp1_pp1_untied_interleaved")


def conversion(run=RUN):
    return load_file(os.path.join(run + ".expected", "model.safetensors"))


def error_of(kind, fn, *args, **kwargs):
    try:
        fn(*args, **kwargs)
    except kind as e:
        return e
    raise AssertionError("no error")


def zeros(run=RUN):
    return {name: torch.zeros_like(t) for name, t in conversion(run).items()}


def equal(got, run=RUN):
    want = conversion(run)
    assert list(got) == list(want) and all(torch.equal(got[k], want[k]) for k in want)


# ---- cases of two ranks ----

def one_comm_for_many_loads(top):
    rank = dist.get_rank()
    with ckptfs.Comm() as comm:
        assert (comm.rank, comm.size) == (rank, 2)
        for run in (RUN, OTHER, RUN):
            state = zeros(run)
            ckptfs.load_state_dict(state, run, comm)
            equal(state, run)
        box = torch.zeros(4, 8, dtype=torch.bfloat16)
        ckptfs.load_boxes([("model.embed_tokens.weight", (rank, 3), box)] if rank else [], RUN, comm)
        assert torch.equal(box, conversion()["model.embed_tokens.weight"][1:5, 3:11] if rank else torch.zeros_like(box))
        # what fails before the load, on one rank or on all, leaves it good
        state = dict(zeros(), **({"odd": torch.zeros(2)} if rank else {}))
        assert "odd" in str(error_of(RuntimeError, ckptfs.load_state_dict, state, RUN, comm))
        said = str(error_of((CkptError, ValueError), ckptfs.load_boxes, [], RUN, comm, **({"load_options": {"colour": 1}} if rank else {})))
        assert "colour" in said, said
        state = zeros()
        ckptfs.load_state_dict(state, RUN, process_group=comm)
        equal(state)
    assert "closed" in str(error_of(CkptError, ckptfs.load_state_dict, zeros(), RUN, comm))


RANKS = (one_comm_for_many_loads,)


def two_ranks(top):
    os.makedirs(top)
    torchrun(2, __file__, top)


# ---- cases of one process ----

def a_comm_of_one_process(top):
    with ckptfs.Comm(False) as comm:
        for _ in range(2):
            state = zeros()
            ckptfs.load_state_dict(state, RUN, comm)
            equal(state)


if __name__ == "__main__":
    if "--rank" in sys.argv:
        dist.init_process_group("gloo")
        for case in RANKS:
            case(os.path.join(sys.argv[-1], case.__name__))
            dist.barrier()
        dist.destroy_process_group()
        sys.exit()
    run_in_folders((two_ranks, a_comm_of_one_process))
