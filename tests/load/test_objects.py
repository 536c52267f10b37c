# SPDX-License-Identifier: Apache-2.0
"""What checkpoints hold beside tensors, against torch's own readers: View.objects(), and load_state_dict into optimizers and modules."""

import argparse
import collections
import glob
import json
import math
import os
import sys
import types

from runner import run_in_folders

BUILD = os.environ.get("CKPTFS_BUILD", "build/release")
HERE = os.path.dirname(os.path.abspath(__file__))
FIXTURES = os.environ.get("CKPTFS_FIXTURES", os.path.join(HERE, "..", "..", "..", "shared", "fixtures"))

try:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

os.environ["CKPTFS_LIBRARY_PATH"] = BUILD
sys.path.insert(0, os.path.join(HERE, "..", "..", "contrib", "python"))
import ckptfs  # noqa: E402


def same(mine, theirs):
    """Equal, of equal types, NaN like NaN."""
    if isinstance(theirs, float) and math.isnan(theirs):
        return isinstance(mine, float) and math.isnan(mine)
    if isinstance(theirs, dict):
        return isinstance(mine, dict) and list(mine) == list(theirs) and all(same(mine[k], v) for k, v in theirs.items())
    if isinstance(theirs, (list, tuple)):
        return type(mine) is type(theirs) and len(mine) == len(theirs) and all(map(same, mine, theirs))
    if isinstance(theirs, argparse.Namespace):
        return isinstance(mine, argparse.Namespace) and same(vars(mine), vars(theirs))
    return type(mine) is type(theirs) and mine == theirs


VALUES = {"int": 3, "negative": -(1 << 40), "float": 1e-05, "nan": math.nan, "inf": math.inf, "minus": -math.inf, "text": "läuft\u2028", "nul": "a\0b", "bytes": b"\x00\xff\x80",
          "none": None, "true": True, "false": False, "tuple": (0.9, (1, "x"), ()), "ints": (1, 2, 3), "list": [1, [2.5, None]],
          "dict": ({1: "a", (2, 3): "b", None: 4, "$float": "nan"},), "marks": ({"$tuple": 5}, {}), "empty": [], "ordered": (collections.OrderedDict(b=1, a=2),),
          "size": torch.Size([2, 3]), "set": {7}, "namespace": argparse.Namespace(lr=0.1, deep=[(1,)])}


def values_are_what_torch_reads(top):
    """Each kind of value, from a DCP and from a torch.save file."""
    state = {"w": torch.ones(2), "values": dict(VALUES), "other": torch.float16, "module": types.SimpleNamespace}
    dcp.save(state, checkpoint_id=top, no_dist=True)
    os.makedirs(top + "2")
    torch.save(state, os.path.join(top + "2", "pytorch_model.bin"))
    for run in (top, top + "2"):
        with ckptfs.open(run, view="raw") as f:
            got = f.objects()
        for k, v in VALUES.items():
            want = tuple(v) if isinstance(v, torch.Size) else (dict(v[0]),) if k == "ordered" else list(v) if k == "set" else v
            assert same(got[f"values.{k}"], want), (run, k, got[f"values.{k}"])
        assert got["other"] == ckptfs.Opaque("torch.float16") and isinstance(got["module"], ckptfs.Opaque)
        assert set(got) == {"other", "module", *(f"values.{k}" for k in VALUES)}, set(got)


class Net(torch.nn.Module):
    def __init__(self, extra=None):
        super().__init__()
        self.a, self.extra = torch.nn.Linear(3, 2), extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def trained(seed, flat, **args):
    torch.manual_seed(seed)
    net = Net({"scale": (seed, 0.5), "amax": [math.inf]})
    optimizer = torch.optim.AdamW(net.parameters(), **args)
    net.a(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, last_epoch=-1)
    return {"model": net.state_dict(), "optim": get_optimizer_state_dict(net, optimizer, options=options), "sched": scheduler.state_dict(), "step": seed}


def an_optimizer_is_restored(top):
    """lr, betas, weight decay, the scheduler and _extra_state, as torch's distributed checkpoint restores them."""
    for flat in (False, True):
        saved = trained(1, flat, lr=0.25, betas=(0.5, 0.75), weight_decay=0.125)
        dcp.save(saved, checkpoint_id=f"{top}{flat}", no_dist=True)
        mine, theirs = trained(2, flat, lr=0.01), trained(3, flat, lr=0.02)
        result = ckptfs.load_state_dict(mine, f"{top}{flat}", view="raw")
        dcp.load(theirs, checkpoint_id=f"{top}{flat}", no_dist=True)
        assert result == ([], []), result

        def check(a, b, at=""):
            if isinstance(b, torch.Tensor):
                assert torch.equal(a, b), at
            elif isinstance(b, dict):
                assert list(a) == list(b), at
                for k in b:
                    check(a[k], b[k], f"{at}.{k}")
            else:
                assert same(a, b), (at, a, b)
        check(mine, theirs)
        check(mine, saved)
        assert mine["step"] == 1 and mine["model"]["_extra_state"]["scale"] == (1, 0.5)


def a_module_gets_its_extra_state(top):
    dcp.save(Net((1, {"x": math.nan})).state_dict(), checkpoint_id=top, no_dist=True)
    net = Net("old")
    ckptfs.load_state_dict(net, top, view="raw")
    assert net.extra[0] == 1 and math.isnan(net.extra[1]["x"])
    dcp.save(Net({"x": {"y": 2.5}, "z": [{"k": (1,)}, {"k": 2}], "n": [3]}).state_dict(), checkpoint_id=top + "3", no_dist=True)
    net = Net("old")
    ckptfs.load_state_dict(net, top + "3", view="raw")  # torch has taken it apart
    assert net.extra == {"x": {"y": 2.5}, "z": [{"k": (1,)}, {"k": 2}], "n": [3]}, net.extra
    dcp.save(Net({"x": 1, "t": torch.ones(2)}).state_dict(), checkpoint_id=top + "4", no_dist=True)
    net = Net("old")
    assert ckptfs.load_state_dict(net, top + "4", view="raw", strict=False).missing_keys == ["_extra_state"] and net.extra == "old"
    dcp.save(Net(torch.arange(4)).state_dict(), checkpoint_id=top + "2", no_dist=True)  # a tensor, as Transformer Engine's
    net = Net(torch.zeros(4, dtype=torch.int64))
    ckptfs.load_state_dict(net, top + "2", view="raw")
    assert torch.equal(net.extra, torch.arange(4))


def objects_that_torch_compressed(top):
    """The values that the writer of this golden checkpoint gave, through torch's ZStandard extension."""
    with ckptfs.open(os.path.join(HERE, "..", "golden", "dcp", "zstd_1r", "run"), view="raw") as f:
        assert f.objects() == {"step": 3, "note": "text"}, f.objects()


def what_cannot_be_restored_is_missing(top):
    dcp.save({"w": torch.ones(2), "dtype": torch.float16, "lr": 0.5}, checkpoint_id=top, no_dist=True)
    state = {"w": torch.zeros(2), "dtype": torch.bfloat16, "lr": 0.1, "epoch": 3}
    try:
        ckptfs.load_state_dict(state, top, view="raw")
    except RuntimeError as e:
        assert '"dtype"' in str(e) and '"epoch"' in str(e) and '"lr"' not in str(e), e
    else:
        raise AssertionError("no error")
    assert state["lr"] == 0.1
    result = ckptfs.load_state_dict(state, top, view="raw", strict=False)
    assert result.missing_keys == ["dtype", "epoch"] and state["lr"] == 0.5 and state["dtype"] is torch.bfloat16 and state["epoch"] == 3


def an_attack_is_refused(top):
    """Nothing is run, and the error says what it wanted."""
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {top}.run",)
    dcp.save({"w": torch.ones(2), "x": Evil()}, checkpoint_id=top, no_dist=True)
    with ckptfs.open(top, view="raw") as f:
        try:
            f.objects()
        except ckptfs.CkptError as e:
            assert e.code == "unsupported" and "system" in str(e) and "'x'" in str(e), e
        else:
            raise AssertionError("no error")
    assert not os.path.exists(top + ".run")


def leaves(value, prefix=""):
    """What torch.load read, under flat names; tensors left out."""
    if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(v, dict) for v in value)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for key, x in items for k, v in leaves(x, f"{prefix}.{key}" if prefix else str(key)).items()}
    return {} if isinstance(value, torch.Tensor) else {prefix: value}


def files_of_frameworks(top):
    """Megatron's common.pt and nanotron's scheduler, held against torch.load."""
    count = 0
    for path in sorted(glob.glob(os.path.join(FIXTURES, "megatron", "*", "**", "common.pt"), recursive=True))[:4]:
        want = leaves(torch.load(path, weights_only=False))
        with ckptfs.open(os.path.dirname(path), view="raw") as f:
            got = f.objects()
        plain = {k: v for k, v in want.items() if isinstance(v, (int, float, str, bool, type(None)))}
        assert plain and all(same(got[k], v) for k, v in plain.items()), path
        args = got.get("args")
        for k, v in vars(want["args"]).items() if args is not None else ():
            assert not isinstance(v, (int, float, str, bool, type(None))) or same(getattr(args, k), v), (path, k)
        count += 1
    for path in sorted(glob.glob(os.path.join(FIXTURES, "nanotron", "*", "*", "lr_scheduler", "*pp-0-of*tp-0-of*.pt")))[:2]:
        want = leaves(torch.load(path, weights_only=False), "lr_scheduler")
        with ckptfs.open(os.path.dirname(os.path.dirname(path)), view="raw") as f:
            got = f.objects()
        assert all(same(got[k], v) for k, v in want.items()) and got["optimizer.param_groups.0.betas"], path
        count += 1
    return f"{count} checkpoints"


def an_item_of_any_name_is_found(top):
    """A step of Orbax's with one item, which has no usual name: its values and paths are found where its arrays are."""
    files = {"_CHECKPOINT_METADATA": {"commit_timestamp_nsecs": 5}, "odd/_strings.json": {"note": "text"},
             "odd/_METADATA": {"use_ocdbt": False, "use_zarr3": True, "tree_metadata": {
                 "w": {"key_metadata": [{"key": "layers", "key_type": 2}, {"key": "w", "key_type": 2}], "value_metadata": {"value_type": "jax.Array"}}}},
             "odd/layers.w/zarr.json": {"zarr_format": 3, "node_type": "array", "shape": [2], "data_type": "uint8", "fill_value": 7, "codecs": [{"name": "bytes"}],
                                        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2]}}, "chunk_key_encoding": {"name": "default"}}}
    for name, what in files.items():
        path = os.path.join(top, "0", name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as f:
            json.dump(what, f)
    with ckptfs.open(top, view="raw") as f:
        assert list(f.keys()) == ["layers.w"] and f.paths() == {"layers.w": ("layers", "w")} and f.objects() == {"note": "text"}, (f.paths(), f.objects())


run_in_folders((values_are_what_torch_reads, an_optimizer_is_restored, a_module_gets_its_extra_state, objects_that_torch_compressed,
                what_cannot_be_restored_is_missing, an_item_of_any_name_is_found, an_attack_is_refused, files_of_frameworks))
