# SPDX-License-Identifier: Apache-2.0
"""Trainers that ask by their own names: the example programs' parts of nanotron's and Megatron's parameters and optimizer states, against what
those frameworks' own ranks wrote (torch.load, safetensors) and what torch's distributed checkpoint reads: runs/, with optimizers."""

import glob
import os
import shutil
import sys
import tempfile

from ranks import ended, started
from runner import run

BUILD = os.environ.get("CKPTFS_BUILD", "build/release")
HERE = os.path.dirname(os.path.abspath(__file__))
NANOTRON = os.path.join(HERE, "runs", "nanotron")
MEGATRON = os.path.join(HERE, "runs", "megatron")

try:
    import torch
    from safetensors.torch import load_file
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

sys.path.insert(0, os.path.join(HERE, "..", "..", "contrib", "python"))
os.environ["CKPTFS_LIBRARY_PATH"] = BUILD
import ckptfs  # noqa: E402


def launch(program, n, run, out):
    ranks = ended(started(n, [os.path.join(BUILD, "tests", program), run, out]))
    assert not any(status for status, *_ in ranks), ranks
    result = []
    for r in range(n):
        with open(f"{out}.{r}", "rb") as f:
            result.append(f.read())
    return result


def raw(t):
    return t.contiguous().view(torch.uint8).numpy().tobytes()


def nanotron_part(step, layer, tp):
    """A rank's own qkv matrix and its copy in F32, as the rank saved them."""
    at = os.path.join(step, "model", "model", "decoder", str(layer), "pp_block", "attn", "qkv_proj")
    file, = glob.glob(os.path.join(at, f"model_weight_pp-rank-*-of-2_tp-rank-{tp}-of-2.safetensors"))
    name = f"model.decoder.{layer}.pp_block.attn.qkv_proj.weight"
    for state in glob.glob(os.path.join(step, "optimizer", f"optimizer_pp-*-of-2_tp-{tp}-of-2_exp-0-of-1.pt")):
        masters = torch.load(state, weights_only=False)["gradient_accumulator"]
        if name in masters:
            return raw(load_file(file)["data"]) + raw(masters[name])
    raise AssertionError(name)


def nanotron(top):
    step = os.path.join(NANOTRON, "20")
    for rank, got in enumerate(launch("nanotron_trainer", 2, step, os.path.join(top, "nanotron"))):
        assert got == b"".join(nanotron_part(step, layer, rank) for layer in range(4)), f"rank {rank}"


def nanotron_zero(top):
    """The states of ZeRO-1 over three ranks, loaded by other numbers of tensor parallel ranks than the two that saved them."""
    truth = load_file(os.path.join(HERE, "runs", "nanotron-zero1.expected.safetensors"))
    name = "model.decoder.0.pp_block.attn.qkv_proj.weight"
    master = truth["optimizer.gradient_accumulator." + name]
    whole = [master.to(torch.bfloat16), master, truth[f"optimizer.state.{name}.exp_avg"], truth[f"optimizer.state.{name}.exp_avg_sq"]]
    for size in (1, 2, 4):
        for rank, got in enumerate(launch("nanotron_trainer", size, os.path.join(HERE, "runs", "nanotron-zero1"), os.path.join(top, f"zero{size}"))):
            want = [heads.chunk(size)[rank] for t in whole for heads in t.split([16, 8, 8])]
            assert got == b"".join(raw(t) for t in want), f"rank {rank} of {size}"


def megatron(top):
    step = os.path.join(MEGATRON, "iter_0000010")
    metadata = FileSystemReader(step).read_metadata().state_dict_metadata
    whole = {k: torch.empty(m.size, dtype=m.properties.dtype) for k, m in metadata.items() if hasattr(m, "chunks") and m.size.numel()}
    dcp_load(whole, checkpoint_id=step, no_dist=True)
    keys = {"decoder.layers.mlp.linear_fc1.weight": 1, "decoder.layers.self_attention.linear_proj.weight": 2}
    states = ["", "optimizer.state.fp32_param.", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq."]
    assert whole[states[1] + next(iter(keys))].abs().sum() > 0
    for rank, got in enumerate(launch("megatron_trainer", 2, MEGATRON, os.path.join(top, "megatron"))):
        want = b"".join(raw(whole[s + k][layer].chunk(2, dim - 1)[rank]) for layer in range(whole[next(iter(keys))].shape[0]) for k, dim in keys.items() for s in states)
        assert got == want, f"rank {rank}"


def every_state(top):
    """All that the optimizers' files hold is there, from Python: Megatron's against torch's reader, nanotron's joined as its weights are."""
    step = os.path.join(MEGATRON, "iter_0000010")
    metadata = FileSystemReader(step).read_metadata().state_dict_metadata
    whole = {k: torch.empty(m.size, dtype=m.properties.dtype) for k, m in metadata.items() if k.startswith("optimizer.") and hasattr(m, "chunks")}
    dcp_load(whole, checkpoint_id=step, no_dist=True)
    mine = {k: torch.zeros_like(t) for k, t in whole.items()}
    result = ckptfs.load_state_dict(mine, MEGATRON, view="raw", strict=False)
    assert not result.missing_keys and not any(k.startswith("optimizer.") for k in result.unexpected_keys), result
    assert len(mine) > 20 and all(torch.equal(mine[k], t) for k, t in whole.items())
    with ckptfs.open(NANOTRON, view="raw") as f:
        masters = [k for k in f.keys() if k.startswith("optimizer.gradient_accumulator.")]
        weights = [k for k in f.keys() if not k.startswith("optimizer.")]
        assert sorted(m[len("optimizer.gradient_accumulator."):] for m in masters) == sorted(weights)
        for k in weights:  # no step was taken: the masters are the weights
            assert torch.equal(f.get_tensor("optimizer.gradient_accumulator." + k).to(torch.bfloat16), f.get_tensor(k)), k


def adam(top):
    """States of Adam, as nanotron numbers them; a file that can't be read costs only what it holds."""
    run = os.path.join(top, "adam")
    shutil.copytree(os.path.join(NANOTRON, "20"), run)
    files = sorted(glob.glob(os.path.join(run, "optimizer", "optimizer_pp-*.pt")))
    for path in files:
        held = torch.load(path, weights_only=False)
        held["names"] = dict(enumerate(held["gradient_accumulator"]))
        held["state"] = {i: {"step": torch.tensor(7.), "exp_avg": held["gradient_accumulator"][n] * 2, "exp_avg_sq": held["gradient_accumulator"][n].t().contiguous().t() ** 2}
                         for i, n in held["names"].items()}
        torch.save(held, path)
    with ckptfs.open(run, view="raw") as f:
        for k in [k for k in f.keys() if not k.startswith("optimizer.")]:
            master, state = f.get_tensor("optimizer.gradient_accumulator." + k), "optimizer.state." + k
            assert torch.equal(f.get_tensor(state + ".exp_avg"), master * 2) and torch.equal(f.get_tensor(state + ".exp_avg_sq"), master ** 2), k
            assert f.get_tensor(state + ".step") == 7
        n = len(f.keys())
    held = torch.load(files[0], weights_only=False)
    name, master = next(iter(held["gradient_accumulator"].items()))
    held["gradient_accumulator"][name] = master.view((*master.shape, *[1] * 9))
    torch.save(held, files[0])
    with ckptfs.open(run, view="raw") as f:
        assert len(f.keys()) == n - 1 and any(f"{name}' in" in w and "the parameter's file has" in w for w in f.info()["warnings"])
    os.truncate(files[0], 1000)
    with ckptfs.open(run, view="raw") as f:
        assert "model.decoder.0.pp_block.attn.qkv_proj.weight" in f and "optimizer.state.model.decoder.0.pp_block.attn.qkv_proj.weight.exp_avg" not in f
        assert "optimizer.state.model.decoder.3.pp_block.attn.qkv_proj.weight.exp_avg" in f and len(f.keys()) < n
        assert any(os.path.basename(files[0]) in w for w in f.info()["warnings"])


def main():
    with tempfile.TemporaryDirectory() as top:
        run([(t.__name__, lambda t=t: t(top)) for t in (nanotron, nanotron_zero, megatron, every_state, adam)])


main()
