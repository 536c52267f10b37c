# SPDX-License-Identifier: Apache-2.0
"""load_state_dict on two ranks of a torch process group: stages of a pipeline, models on the meta device, ranks that fail, stay away or are
interrupted. Each case is a function that both ranks run in processes of their own."""

import json
import os
import signal
import sys
import tempfile
import threading
import warnings

from built import BUILD, end_rank, skip
from ranks import PYTHON, ended, started
from runner import run

PATIENCE_S = 240  # less than the 300 s that a load waits by default, and than gloo's own timeout

try:
    import torch
    import torch.distributed as dist
    from safetensors.torch import save_file
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
except ImportError as e:
    skip(e)

import ckptfs  # noqa: E402


def net(layers=4):
    return torch.nn.Sequential(*[torch.nn.Linear(6, 6) for _ in range(layers)])


def saved(top, state, rank=0):
    """A checkpoint that rank 0 makes."""
    if rank == 0:
        save_file(state, os.path.join(top, "model.safetensors"))
        with open(os.path.join(top, "config.json"), "w") as f:
            json.dump({"model_type": "odd"}, f)
    if dist.is_initialized():
        dist.barrier()
    return top


def weights():
    torch.manual_seed(1)
    return net().state_dict()


def error_of(kind, fn, *args, **kwargs):
    try:
        fn(*args, **kwargs)
    except kind as e:
        return e
    raise AssertionError("no error")


class Stage(torch.nn.Module):
    """Some layers, under the names that they have in the whole model."""

    def __init__(self, *layers):
        super().__init__()
        for i in layers:
            self.add_module(str(i), torch.nn.Linear(6, 6, device="meta"))


# ---- the cases: functions of a folder and the rank ----

def stages_of_a_pipeline(top, rank):
    """Strict: every rank has its part, one of them two stages; what no rank has is unexpected for all, what one lacks is missing for all."""
    state = weights()
    saved(top, state, rank)
    parts = [Stage(0), Stage(3)] if rank == 0 else Stage(1, 2)
    result = ckptfs.load_state_dict(parts, top)
    assert result == ([], []), result
    for part in parts if rank == 0 else [parts]:
        for k, t in part.state_dict().items():
            assert torch.equal(t, state[k]), k
    saved(top, dict(state, extra=torch.zeros(1)), rank)
    said = str(error_of(RuntimeError, ckptfs.load_state_dict, parts, top))
    assert "Unexpected" in said and '"extra"' in said and '"1.weight"' not in said, said
    result = ckptfs.load_state_dict(parts, top, strict=False)
    assert result == ([], ["extra"]), result
    saved(top, {k: t for k, t in state.items() if k != "2.bias"}, rank)
    more = Stage(0) if rank == 0 else Stage(1, 2, 3)
    said = error_of(RuntimeError, ckptfs.load_state_dict, more, top)
    assert 'Missing key(s) in state_dict: "2.bias". ' in str(said) and "Unexpected" not in str(said), said
    assert all(p.is_meta for p in more.parameters())
    result = ckptfs.load_state_dict([], top, strict=False) if rank == 0 else ckptfs.load_state_dict(Stage(1, 2), top, strict=False)
    assert result.missing_keys == ["2.bias"] and set(result.unexpected_keys) == {f"{i}.{k}" for i in (0, 3) for k in ("weight", "bias")}, result


def sharded_state_dict_on_meta(top, rank):
    """FSDP2's, filled in place of its meta values."""
    state = weights()
    saved(top, state, rank)
    mesh = init_device_mesh("cpu", (2,))
    with torch.device("meta"):
        model = net()
    fully_shard(model, mesh=mesh)
    own = model.state_dict()
    placed = {k: t.placements for k, t in own.items()}
    ckptfs.load_state_dict(own, top)
    for k, t in own.items():
        assert isinstance(t, DTensor) and t.device_mesh == mesh and t.placements == placed[k] and not t.to_local().is_meta, k
        assert torch.equal(t.full_tensor(), state[k]), k
    assert all(p.is_meta for p in model.parameters())


def initialised_alike(top, rank):
    """missing="init": plain tensors are equal on both ranks, DTensors the parts of what one process has."""
    state = weights()
    saved(top, {k: t for k, t in state.items() if k not in ("1.weight", "3.bias")}, rank)
    torch.manual_seed(5 + rank)  # rank 0's counts

    def full(sharded, group=None):
        with torch.device("meta"):
            model = net()
        if sharded:
            fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        ckptfs.load_state_dict(model, top, missing="init")
        return {k: t.full_tensor() if isinstance(t, DTensor) else t for k, t in model.state_dict().items()}
    plain, sharded = full(False), full(True)
    both = [None, None]
    dist.all_gather_object(both, plain)
    for k, t in plain.items():
        assert torch.equal(both[0][k], both[1][k]) and torch.equal(t, sharded[k]), k
        assert torch.equal(t, state[k]) or k in ("1.weight", "3.bias")
    assert plain["1.weight"].abs().max() <= 6 ** -0.5 and plain["1.weight"].std() > 0.05


def a_strict_load_fails_on_all(top, rank):
    """Only rank 1 lacks something: neither model changes, both hear of it in the same words."""
    saved(top, weights(), rank)
    with torch.device("meta"):
        model = net(4 + rank)
    said = str(error_of(RuntimeError, ckptfs.load_state_dict, model, top))
    assert '"4.weight"' in said and all(p.is_meta for p in model.parameters()), said
    both = [None, None]
    dist.all_gather_object(both, said)
    assert both[0] == both[1]


def a_peer_that_stays_away(top, rank):
    """The options' deadline holds from the first call."""
    saved(top, weights(), rank)
    if rank == 0:
        said = error_of(ckptfs.CkptError, ckptfs.load_state_dict, net(), top, load_options={"exchange_timeout_ms": 1500})
        assert said.code == "timeout" and "rank 1 did not come" in str(said), said
    dist.barrier()


def a_peer_that_stays_away_from_rank_1(top, rank):
    saved(top, weights(), rank)
    if rank == 1:
        said = error_of(ckptfs.CkptError, ckptfs.load_state_dict, net(), top, load_options={"exchange_timeout_ms": 1500})
        assert said.code == "timeout" and "rank 0" in str(said), said
    dist.barrier()


def loads_again_after_a_timeout(top, rank):
    """The ranks find together again."""
    state = weights()
    saved(top, state, rank)
    if rank == 0:
        error_of(ckptfs.CkptError, ckptfs.load_state_dict, net(), top, load_options={"exchange_timeout_ms": 500})
    dist.barrier()
    if rank == 1:  # comes too late
        error_of(ckptfs.CkptError, ckptfs.load_state_dict, net(), top, load_options={"exchange_timeout_ms": 3000})
    dist.barrier()
    model = net()
    ckptfs.load_state_dict(model, top)
    assert all(torch.equal(model.state_dict()[k], t) for k, t in state.items())


def a_rank_that_missed_loads(top, rank):
    """Whichever it was, and however many it missed: the next load is everybody's, at once."""
    state = weights()
    saved(top, state, rank)
    for other in (0, 1):
        if rank == other:
            for _ in range(2):
                said = error_of(ckptfs.CkptError, ckptfs.load_state_dict, net(), top, load_options={"exchange_timeout_ms": 300})
                assert said.code == "timeout", said
        dist.barrier()
        for _ in range(2):
            model = net()
            ckptfs.load_state_dict(model, top, load_options={"exchange_timeout_ms": 20000})
            assert all(torch.equal(model.state_dict()[k], t) for k, t in state.items())


def a_link_that_moves(top, rank):
    """As a mount's `latest` does, between two ranks: both load what it leads to on rank 0."""
    from ckptfs._state_dict import step_folder
    for step in ("10", "20") if rank == 0 else ():
        os.makedirs(os.path.join(top, step))
        save_file(weights(), os.path.join(top, step, "model.safetensors"))
    link = os.path.join(top, f"latest-{rank}")  # what each of them sees at its own moment
    dist.barrier()
    os.symlink("10" if rank == 0 else "20", link)
    assert os.path.normpath(step_folder(link)) == os.path.join(os.path.realpath(top), "10")


def interrupted_while_it_waits(top, rank):
    saved(top, weights(), rank)
    if rank == 0:
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
        error_of(KeyboardInterrupt, ckptfs.load_state_dict, net(), top)
    dist.barrier()


def a_rank_that_fails_early(top, rank):
    """Before the ranks are connected, and in several lines."""
    from ckptfs import _comm
    saved(top, weights(), rank)
    if rank == 1:
        def nowhere():
            raise OSError("no address:\n  the network is down")
        _comm._own_address = nowhere
        error_of(OSError, ckptfs.load_state_dict, net(), top)
    else:
        said = error_of(ckptfs.CkptError, ckptfs.load_state_dict, net(), top)
        assert str(said) == "rank 1: no address:\n  the network is down", repr(str(said))
    dist.barrier()


def a_rank_that_fails_later(top, rank):
    """While wants are declared: an error of many lines arrives as it is."""
    from ckptfs import _load
    saved(top, weights(), rank)
    if rank == 0:
        class Broken(_load.Load):
            def want(self, *args):
                raise ValueError("first\nsecond")
        _load.Load = Broken
        error_of(ValueError, ckptfs.load_state_dict, net(), top)
    else:
        said = error_of(ckptfs.CkptError, ckptfs.load_state_dict, net(), top)
        assert "first\nsecond" in str(said), repr(str(said))
    dist.barrier()


def only_a_group_shares(top, rank):
    """Ranks that give the same group read once, ranks of different groups once each; who is in no group reads for itself."""
    saved(top, weights(), rank)
    own = [dist.new_group([r]) for r in range(2)]
    both = dist.new_group([0, 1])
    for group, times in ((None, 1), (both, 1), (own[rank], 2), (own[0], 2)):  # of the last one, rank 1 is no member
        model = net()
        stats = ckptfs.load_state_dict(model, top, readers="once", load_options={"share_with": group}).stats
        assert stats["read_bytes"] == times * stats["unique_bytes"], (group, stats)
        assert all(torch.equal(v, weights()[k]) for k, v in model.state_dict().items())
    said = error_of((TypeError, ckptfs.CkptError), ckptfs.load_state_dict, net(), top, load_options={"share_with": "dp" if rank == 0 else both})
    assert "share_with='dp': expected a process group" in str(said), said
    with ckptfs.Comm(own[rank]) as comm:
        said = error_of(ckptfs.CkptError if comm.size > 1 else ValueError, ckptfs.load_state_dict, net(), top, comm, load_options={"share_with": both})
        assert f"share_with has rank {1 - rank}, which does not take part" in str(said), said


def one_bar(top, rank):
    saved(top, weights(), rank)
    ckptfs.load_state_dict(net(), top, progress=True)


def in_a_child(check):
    """Fork: check() must be true in the child, which ends without this process's exit handlers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if check() else 2
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


def a_forked_child_has_no_process_group(top, rank):
    """Its parent's sockets and threads are not its own."""
    saved(top, weights(), rank)
    in_a_child(lambda: "forked" in str(error_of(ckptfs.CkptError, ckptfs.load_state_dict, net(), top)))
    ckptfs.load_state_dict(net(), top)


def sockets():
    """How many this process has."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
        except FileNotFoundError:
            pass
    return found


def kept():
    """The Comms that are kept, and open."""
    from ckptfs import _comm
    return [c for k in _comm._kept.values() for c in k.comms.values() if c.handle]


def the_second_load_connects_nothing(top, rank):
    """A process group has one Comm as long as it lives: after good loads, failed ones, beside a Reloader and the caller's own."""
    state = weights()
    saved(top, state, rank)
    ckptfs.load_state_dict(net(), top, readers="once")
    first, had = kept(), sockets()
    assert len(first) == 1
    for n in range(3):
        model = net()
        ckptfs.load_state_dict(model, top, readers="once")
        assert all(torch.equal(model.state_dict()[k], t) for k, t in state.items())
        error_of(RuntimeError, ckptfs.load_state_dict, net(4 + rank), top)
        assert "no.such" in str(error_of(ckptfs.CkptError, ckptfs.load_boxes, [("no.such", (0,), torch.zeros(1))] if rank else [], top))
    with ckptfs.Reloader(net(), top) as weights_of:
        weights_of.reload()
        ckptfs.load_layout(top, "dp=2")
        weights_of.reload()
    assert kept() == first and sockets() == had, (had, sockets())
    with ckptfs.Comm() as own:
        ckptfs.load_state_dict(net(), top, own)
    assert kept() == first and sockets() == had, (had, sockets())
    # one rank has given it up: all connect anew, together
    if rank:
        kept()[0].close()
    ckptfs.load_state_dict(net(), top)
    assert len(kept()) == 1 and kept() != first and not first[0].handle


def a_group_that_ends(top, rank):
    """Its Comm ends with it, whoever ends it; other groups keep theirs."""
    saved(top, weights(), rank)
    before = sockets()
    ckptfs.load_state_dict(net(), top)
    pair = dist.new_group([0, 1])
    at = sockets()
    ckptfs.load_state_dict(net(), top, pair)
    first, second = kept()
    assert first.group is dist.group.WORLD and second.group is pair and sockets() > at
    dist.barrier()
    dist.destroy_process_group(pair)
    del pair
    assert kept() == [first] and second.handle is None
    ckptfs.load_state_dict(net(), top)
    dist.barrier()
    dist.destroy_process_group()
    assert not kept() and first.handle is None and sockets() < before, (before, sockets())
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    dist.init_process_group("gloo")
    ckptfs.load_state_dict(net(), top)
    assert len(kept()) == 1


def a_fork_between_loads(top, rank):
    """The child has none of the connections, and ends without an effect on them."""
    saved(top, weights(), rank)
    ckptfs.load_state_dict(net(), top)
    first = kept()

    def child():
        said = error_of(ckptfs.CkptError, ckptfs.load_state_dict, net(), top)
        alone = net()
        ckptfs.load_state_dict(alone, top, no_dist=True)
        good = "forked" in str(said) and not kept() and ckptfs.release() == 0
        import atexit
        atexit._run_exitfuncs()
        return good

    in_a_child(child)
    ckptfs.load_state_dict(net(), top)
    assert kept() == first


CASES = (the_second_load_connects_nothing, a_group_that_ends, a_fork_between_loads, stages_of_a_pipeline, sharded_state_dict_on_meta, initialised_alike, a_strict_load_fails_on_all, a_peer_that_stays_away,
         a_peer_that_stays_away_from_rank_1, loads_again_after_a_timeout, a_rank_that_missed_loads, a_link_that_moves,
         interrupted_while_it_waits, a_rank_that_fails_early, a_rank_that_fails_later, only_a_group_shares, one_bar, a_forked_child_has_no_process_group)


def one_rank(name, top):
    dist.init_process_group("gloo")
    case = next(c for c in CASES if c.__name__ == name)
    case(top, dist.get_rank())
    dist.barrier()
    end_rank()


def both_ranks(case):
    with tempfile.TemporaryDirectory() as top:
        env = dict(CKPTFS_LIBRARY_PATH=BUILD, OMP_NUM_THREADS="1", PYTHONFAULTHANDLER="1")
        ranks = ended(started(2, [*PYTHON, os.path.abspath(__file__), "--rank", case.__name__, top], env=env), PATIENCE_S)
        assert not any(status for status, *_ in ranks), "\n".join(out[-1000:] + err[-4000:] for _, out, err in ranks)
        return [err for *_, err in ranks]


def test_of(case):
    said = both_ranks(case)
    if case is one_bar:
        assert "tensor" in said[0] and "tensor" not in said[1], said


if sys.argv[1:2] == ["--rank"]:
    one_rank(*sys.argv[2:])
else:
    run([(c.__name__, lambda c=c: test_of(c)) for c in CASES])
