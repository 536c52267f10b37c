# SPDX-License-Identifier: Apache-2.0
"""load_state_dict in one process, held against torch, transformers, peft and accelerate: casts, names, errors, buffers, state dicts of optimizers."""

import itertools
import json
import logging
import os
import random
import subprocess
import sys
import threading
import time
import warnings
from types import SimpleNamespace

from runner import run_in_folders

BUILD = os.environ.get("CKPTFS_BUILD", "build/release")
HERE = os.path.dirname(os.path.abspath(__file__))
GOLDEN = os.path.join(HERE, "..", "golden", "nanotron")
PACKAGE = os.path.join(HERE, "..", "..", "contrib", "python")
LLAMA = os.path.join(GOLDEN, "llama_tp1_pp1_untied_interleaved")
TIED = os.path.join(GOLDEN, "llama_tp2_pp2_tied")
MOE = os.path.join(GOLDEN, "qwen2_moe_epbranch_tp1_dp2_ep2")

try:
    import torch
    import torch.distributed.checkpoint as dcp
    import transformers
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)
if int(transformers.__version__.split(".")[0]) < 5:
    print("skipped: transformers 5 is needed")
    sys.exit(77)

os.environ["CKPTFS_LIBRARY_PATH"] = BUILD
sys.path.insert(0, PACKAGE)
import ckptfs  # noqa: E402
from ckptfs.torch import StorageReader  # noqa: E402


def folder(top, tensors, config=None):
    os.makedirs(top, exist_ok=True)
    save_file(tensors, os.path.join(top, "model.safetensors"))
    with open(os.path.join(top, "config.json"), "w") as f:
        json.dump(config or {"model_type": "odd"}, f)
    return top


def model(expected, meta=True, dtype=torch.float32):
    config = transformers.AutoConfig.from_pretrained(expected)
    with torch.device("meta" if meta else "cpu"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def error_of(fn, *args, **kwargs):
    try:
        fn(*args, **kwargs)
    except RuntimeError as e:
        return str(e)
    raise AssertionError("no error")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("scratch", torch.ones(3), persistent=False)


def what_torch_returns_and_says(top):
    run = folder(top, Net().state_dict())
    net = Net()
    result = ckptfs.load_state_dict(net, run)
    missing, unexpected = result
    theirs = Net().load_state_dict(load_file(os.path.join(run, "model.safetensors")))
    assert isinstance(result, type(theirs)) and result == theirs and repr(result) == repr(theirs) and missing == [] == unexpected
    assert result.stats["read_bytes"] > 0 and torch.equal(net.scratch, torch.ones(3))
    for k, t in load_file(os.path.join(run, "model.safetensors")).items():
        assert torch.equal(net.state_dict()[k], t), k
    state = Net().state_dict()
    del state["a.bias"], state["steps"]
    state["c.weight"], state["b.weight"] = torch.zeros(1), torch.zeros(2, 5)
    run = folder(top + "2", state)
    for strict in (True, False):
        assert error_of(ckptfs.load_state_dict, Net(), run, strict=strict) == error_of(Net().load_state_dict, load_file(run + "/model.safetensors"), strict=strict)
    del state["b.weight"]
    run = folder(top + "3", state)
    theirs = Net().load_state_dict(state, strict=False)
    assert ckptfs.load_state_dict(Net(), run, strict=False) == theirs
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with torch.device("meta"):
            net = Net()
        ckptfs.load_state_dict(net, top)
    assert any("scratch" in str(w.message) for w in said) and not net.a.weight.is_meta


def what_the_view_warns_of_is_told(top):
    """What is left out, guessed or not found, once, as ckpt does on its terminal."""
    megatron = os.path.join(GOLDEN, "..", "megatron", "l12_tp2pp2")
    for run, options, needle in ((TIED, {}, None), (megatron, {}, "does not say how long the vocabulary is"), (megatron, {"view": "raw"}, None)):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with ckptfs.open(run, **options) as view:
                told = [f"'{os.path.abspath(run)}': {text}" for text in view.info()["warnings"]]
        assert [str(w.message) for w in said] == told and (not needle or needle in told[0]), (told, said)
        assert all(w.filename == __file__ for w in said), said
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ckptfs.load_state_dict({"lm_head.weight": torch.zeros(48, 16)}, megatron, names=["lm_head.weight"], dtype="float32")
        dcp.load({"lm_head.weight": torch.zeros(48, 16)}, storage_reader=StorageReader(megatron, dtype="float32"), no_dist=True)
    said = [w for w in said if "does not say how long the vocabulary is" in str(w.message)]
    assert len(said) == 2 and all(w.filename == __file__ for w in said), said


def a_config_that_no_load_needs_is_not_missed(top):
    dcp.save({"model.embed_tokens.weight": torch.ones(4, 4)}, checkpoint_id=top, no_dist=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ckptfs.load_state_dict({"model.embed_tokens.weight": torch.zeros(4, 4)}, top)
        with ckptfs.open(top) as view:
            assert any("no config.json" in text for text in view.info()["notes"]) and not view.info()["warnings"], view.info()


def casts(top):
    """As accelerate's: floating to the model's dtype, float8_e4m3fn left alone, memory layouts kept; integers as torch copies them."""
    torch.manual_seed(0)
    stored = {"bf16": torch.randn(5, 6, dtype=torch.bfloat16), "f16": torch.randn(5, 6).half(), "f32": torch.randn(5, 6), "f64": torch.randn(5, 6, dtype=torch.float64),
              "f8": torch.randn(5, 6).to(torch.float8_e4m3fn), "f8e5": torch.randn(5, 6).to(torch.float8_e5m2), "i32": torch.randint(9, (5, 6), dtype=torch.int32)}
    stored["f32"][0, :4] = torch.tensor([float("nan"), float("inf"), 3e38, 1e-40])
    run = folder(top, stored)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn):
        for layout in ("plain", "turned", "meta"):
            net = torch.nn.Module()
            for k, t in stored.items():
                like = torch.zeros(t.shape, dtype=dtype if t.is_floating_point() else torch.int64)
                like = like if layout != "turned" else torch.zeros(6, 5, dtype=like.dtype).t()
                p = torch.nn.Parameter(like.to("meta") if layout == "meta" else like, requires_grad=False)
                net.register_parameter(k, p)
            ckptfs.load_state_dict(net, run)
            for k, t in stored.items():
                got = getattr(net, k)
                want = t if t.dtype == torch.float8_e4m3fn else t.to(dtype) if t.is_floating_point() else t.to(torch.int64)
                assert got.dtype == want.dtype and not got.is_meta, (k, dtype, got.dtype)
                assert torch.equal(got.double().nan_to_num(7), want.double().nan_to_num(7)), (k, dtype, layout)
                assert got.is_contiguous() == (layout != "turned"), (k, dtype, layout)
    state = {k: torch.zeros(t.shape, dtype=torch.bfloat16) for k, t in stored.items()}  # nothing of a caller's dictionary is replaced
    own = dict(state)
    ckptfs.load_state_dict(state, run)
    assert all(state[k] is own[k] and torch.equal(own[k].double(), stored[k].to(torch.bfloat16).double()) for k in own if k != "f32")


def casts_that_lose_everything(top):
    """Fractions in integers and the like: torch copies them, without a word."""
    run = folder(top, {"f": torch.rand(3), "c": torch.zeros(2, dtype=torch.complex64)})
    for f, c in ((torch.int8, torch.complex64), (torch.bool, torch.complex64), (torch.float32, torch.float32)):
        state = {"f": torch.ones(3).to(f), "c": torch.ones(2).to(c)}
        assert "dtype mismatch for " in error_of(ckptfs.load_state_dict, state, run) and all(bool(t.all()) for t in state.values())
    assert "f is a tensor in the checkpoint, but not" in error_of(ckptfs.load_state_dict, {"f": [1., 2., 3.], "c": torch.zeros(2, dtype=torch.complex64)}, run)
    for tensor, kind in ((torch.zeros(3, dtype=torch.int16), ckptfs.CkptError), ([0., 0., 0.], TypeError)):
        try:
            ckptfs.load_boxes([("f", (0,), tensor)], run)
        except kind as e:
            assert "'f'" in str(e)
        else:
            raise AssertionError(tensor)
    for bad in ({"host_bytes": -1}, {"threads": 2**32}, {"rates": {"network": -1.}}):
        try:
            ckptfs.load_state_dict({}, run, strict=False, load_options=bad)
        except ValueError as e:
            assert "load_options" in str(e)
            continue
        raise AssertionError(bad)


def tied_weights_that_were_not(top):
    """A model that ties what the checkpoint has two tensors for: they must be equal, else one of them would be lost without a word."""
    class Tied(torch.nn.Module):
        def __init__(self, device):
            super().__init__()
            self.a, self.b = torch.nn.Linear(3, 4, bias=False, device=device), torch.nn.Linear(3, 4, bias=False, device=device)
            self.b.weight = self.a.weight

    one = torch.rand(4, 3)
    one[0, 0] = float("nan")
    run = folder(top, {"a.weight": one, "b.weight": one.clone()})
    other = folder(top + "-other", {"a.weight": one, "b.weight": one + 1})
    for device in ("cpu", "meta"):
        net = Tied(device)
        ckptfs.load_state_dict(net, run)
        assert net.a.weight is net.b.weight and torch.equal(net.b.weight.detach().nan_to_num(9), one.nan_to_num(9))
        running = ckptfs.load_async(net, run)
        assert [name for name, _ in running.tensors()] == ["a.weight"]
        running.wait()
        with ckptfs.Reloader(net, run) as again:
            again.reload()
            assert not error_of_code(again.reload, other) and not error_of_code(ckptfs.load_state_dict, Tied(device), other)
        ckptfs.load_state_dict(net, other, names=["b.weight"])
        assert torch.equal(net.a.weight.detach().nan_to_num(9), (one + 1).nan_to_num(9))
    shared = torch.zeros(4, 3)
    assert not error_of_code(ckptfs.load_state_dict, {"a.weight": shared, "b.weight": shared}, other)


def error_of_code(fn, *args):
    try:
        fn(*args)
    except ckptfs.CkptError as e:
        return None if e.code == "conflict" and "one tensor in what is to be filled" in str(e) else e
    return "no error"


def odd_memory(top):
    """Views of larger tensors, expanded ones, scalars, nothing at all."""
    stored = {"m": torch.arange(12.).view(3, 4), "s": torch.tensor(5.), "e": torch.zeros(0, 3), "x": torch.full((4,), 3.)}
    run = folder(top, stored, {"model_type": "odd", "num_empty_rows": 0})
    large = torch.full((9, 9), -1.)
    state = {"m": large[1:7:2, 2:6], "s": torch.zeros(()), "e": torch.zeros(0, 3), "x": torch.zeros(1).expand(4)}
    assert "'x' has several elements in one place" in refused(ckptfs.load_state_dict, state, run) and bool((large == -1).all())
    state["x"] = torch.zeros(4)
    ckptfs.load_state_dict(state, run)
    assert all(torch.equal(state[k], t) for k, t in stored.items())
    assert int((large != -1).sum()) == 12
    state["m"].untyped_storage().resize_(64)  # C would write beyond it
    assert "'m' needs 204 bytes of its storage, which has 64" in refused(ckptfs.load_state_dict, state, run)
    state["m"] = torch.zeros(3, 4).to_sparse()
    assert "'m' is a Tensor (torch.sparse_coo) without memory" in refused(ckptfs.load_state_dict, state, run)
    assert ckptfs.load_state_dict({**state, "other": state["m"]}, run, names=["s"]).missing_keys == []


def refused(fn, *args, **kwargs):
    try:
        fn(*args, **kwargs)
    except ckptfs.CkptError as e:
        return str(e)
    raise AssertionError("no error")


def conjugates_and_negatives(top):
    """Views whose elements are other than the memory under them, which torch computes when they are read."""
    stored = {"c": torch.complex(torch.arange(6.), torch.arange(6.) + 1), "f": torch.arange(6.)}
    run, memory = folder(top, stored), torch.zeros(2, 6, dtype=torch.complex64)
    state = {"c": memory[0].conj(), "f": memory[1].conj().imag}
    assert state["c"].is_conj() and state["f"].is_neg()
    ckptfs.load_state_dict(state, run)
    assert torch.equal(state["c"], stored["c"]) and torch.equal(state["f"], stored["f"]) and torch.equal(memory[0], stored["c"].conj().resolve_conj())
    memory.zero_()
    ckptfs.load_boxes([("c", (2,), memory[0, :4].conj()), ("f", (0,), memory[1].conj().imag)], run)
    assert torch.equal(memory[0, :4].conj(), stored["c"][2:]) and torch.equal(memory[1].conj().imag, stored["f"])


def memory_that_is_shared_in_part(top):
    """Two tensors that have a part of one storage in common can't both be filled, unless with the same values; those that only lie among each other can."""
    stored = {"a": torch.arange(12.).view(3, 4), "b": -torch.arange(12.).view(3, 4)}
    run = folder(top, stored)
    rows, columns = torch.full((4, 4), 9.), torch.full((3, 8), 9.)
    for state in ({"a": rows[:3], "b": rows[1:]}, {"a": rows[:3], "b": rows.view(-1)[:12].view(4, 3).t()}, {"a": torch.nn.Parameter(rows[:3]), "b": rows[1:].conj()}):
        said = refused(ckptfs.load_state_dict, state, run)
        assert "'a' and 'b' share a part of their memory" in said and bool((rows == 9).all()), said
    state = {"a": columns[:, ::2], "b": columns[:, 1::2]}
    ckptfs.load_state_dict(state, run)
    assert all(torch.equal(state[k], t) for k, t in stored.items())
    ckptfs.load_state_dict({"a": rows[:3], "again": {"b": rows[1:]}}, run, names=["a"], strict=False)
    assert torch.equal(rows[:3], stored["a"])
    assert "share a part" in refused(ckptfs.load_boxes, [("a", (0, 0), rows[:3]), ("b", (0, 0), rows[2:])], run)
    assert "share a part" in refused(ckptfs.load_boxes, [("a", (0, 0), rows[:2]), ("a", (0, 0), rows[1:3])], run)
    twice = folder(top + "2", {**stored, "c": stored["a"].clone()})
    ckptfs.load_boxes([("a", (1, 0), rows[:2]), ("c", (1, 0), rows[:2])], twice)  # tied weights that were saved under both names
    assert torch.equal(rows[:2], stored["a"][1:])
    assert "'b' and 'a': they are one tensor in what is to be filled" in refused(ckptfs.load_boxes, [("a", (1, 0), rows[:2]), ("b", (1, 0), rows[:2])], twice)
    rows.fill_(9)
    ckptfs.load_boxes([("a", (0, 0), rows[:2]), ("a", (1, 0), rows[1:3])], run)  # the same row of the same tensor
    assert torch.equal(rows[:3], stored["a"])
    ckptfs.load_boxes([("a", (0, 0), rows[:4]), ("b", (0, 0), rows[3:])], run, clip=True)  # what is left out is not filled
    assert torch.equal(rows[:3], stored["a"]) and torch.equal(rows[3], stored["b"][0])


def addresses(t):
    """Of all bytes of all elements, each as often as it is there."""
    found = [t.storage_offset()]
    for stride, n in zip(t.stride(), t.shape):
        found = [at + i * stride for at in found for i in range(n)]
    return [at * t.element_size() + i for at in found for i in range(t.element_size())]


def random_strides(top):
    """Overlaps as counted byte by byte."""
    from ckptfs._overlap import Place
    rng, memory, seen = random.Random(7), torch.zeros(4000, dtype=torch.uint8), set()

    def some():
        rank, dtype = rng.randint(0, 3), rng.choice((torch.uint8, torch.int16, torch.float32))
        strides = [rng.choice((rng.randint(0, 12), rng.choice((1, 2, 3, 5, 10, 15, 25, 50)))) for _ in range(rank)]
        return memory.view(dtype).as_strided([rng.randint(1, 5) for _ in range(rank)], strides, rng.randint(0, 60))
    for _ in range(3000):
        a, b = some(), some()
        mine, theirs = addresses(a), addresses(b)
        p, q = (Place("t", t, "t", [0] * t.dim()) for t in (a, b))
        itself, other = len(set(mine)) < len(mine), not set(mine).isdisjoint(theirs)
        assert p.overlaps_itself() == itself and p.overlaps(q) == other and q.overlaps(p) == other, (a.shape, a.stride(), b.shape, b.stride())
        seen.add((itself, other))
    assert len(seen) == 4


def who_hears_of_a_failure_does_not_tell_it_as_its_own(top):
    from ckptfs._exchange import Exchange
    store = torch.distributed.HashStore()
    ranks = [Exchange(store, r, 3, 5) for r in range(3)]
    ranks[1].fail(ValueError("no such thing"))
    try:
        ranks[2].share(1)
    except ckptfs.CkptError as e:
        ranks[2].fail(e)
    assert refused(ranks[0].share, 1) == "rank 1: no such thing"
    ranks[0].fail(ckptfs.CkptError("io", "its own"))
    assert refused(ranks[2].share, 1) == "rank 0: its own"


def who_is_absent_is_named_on_all_ranks(top):
    """Also where another rank than rank 0 has waited longest."""
    from ckptfs import _exchange
    from ckptfs._exchange import Exchange
    store, said, heard = torch.distributed.HashStore(), {}, []
    ear = logging.Handler()
    ear.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("ckptfs").addHandler(ear)
    _exchange.SAY_S, before = 0.2, _exchange.SAY_S

    def wait(rank):
        exchange = Exchange(store, rank, 3, 0.5)
        try:
            exchange.share(rank)
        except ckptfs.CkptError as e:
            exchange.fail(e)
            said[rank] = str(e)
    threads = [threading.Thread(target=wait, args=(rank,)) for rank in (2, 0)]
    for thread in threads:
        thread.start()
        time.sleep(0.3)
    for thread in threads:
        thread.join()
    _exchange.SAY_S = before
    logging.getLogger("ckptfs").removeHandler(ear)
    assert "rank 1 did not come to load within 0.5 s" in said[0] and said[2] == f"rank 0: {said[0]}", said
    assert heard == ["waiting for rank 1 for 0 s now, to come to this load"], heard


def a_failed_load_is_told_to_autograd(top):
    """It may have written: a graph that has saved the values from before is no good any more."""
    run, net = folder(top, {"weight": torch.ones(3, 4)}), torch.nn.Linear(4, 3, bias=False)
    with ckptfs.open(run) as view:
        out = net(torch.ones(1, 4, requires_grad=True)).sum()
        os.truncate(os.path.join(run, "model.safetensors"), os.path.getsize(os.path.join(run, "model.safetensors")) - 4)
        assert "ends at byte" in refused(ckptfs.load_state_dict, net, view)
    try:
        out.backward()
    except RuntimeError as e:
        assert "modified by an inplace operation" in str(e)
        return
    raise AssertionError("a gradient of values that are gone")


def models_work(top):
    """Meta models, and those wrapped, compute what from_pretrained's do."""
    ids = torch.arange(8)[None]
    for run in (LLAMA, TIED, MOE):
        expected = run + ".expected"
        theirs = transformers.AutoModelForCausalLM.from_pretrained(expected, dtype=torch.float32)
        want = theirs(ids).logits
        mine = model(expected)
        ckptfs.load_state_dict(mine, run)
        assert not any(t.is_meta for t in (*mine.parameters(), *mine.buffers()))
        assert torch.equal(mine.eval()(ids).logits, want), run
        if theirs.config.tie_word_embeddings:
            assert mine.lm_head.weight is mine.model.embed_tokens.weight
        compiled = torch.compile(model(expected, meta=False))
        ckptfs.load_state_dict(compiled, run)
        assert torch.equal(compiled._orig_mod.eval()(ids).logits, want), run


def adapters(top):
    """peft's models: the base's weights, and the adapter's own, by whatever name it has."""
    try:
        import peft
    except ImportError:
        print("     without peft")
        return
    expected = LLAMA + ".expected"
    base = transformers.AutoModelForCausalLM.from_pretrained(expected, dtype=torch.float32)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"], modules_to_save=["lm_head"], init_lora_weights=False)
    theirs = peft.get_peft_model(base, config, adapter_name="fine")
    theirs.save_pretrained(top)
    mine = peft.get_peft_model(model(expected, meta=False), config, adapter_name="mine")
    result = ckptfs.load_state_dict(mine, LLAMA, strict=False)
    assert all("lora_" in k for k in result.missing_keys) and not result.unexpected_keys, result
    result = ckptfs.load_state_dict(mine, os.path.join(top, "fine"), strict=False)
    assert not result.unexpected_keys, result
    want = {k.replace(".fine", ""): v for k, v in theirs.state_dict().items()}
    for k, t in mine.state_dict().items():
        assert torch.equal(t, want[k.replace(".mine", "")]), k


def optimizers(top):
    """What torch's distributed checkpoints say of a model and its optimizer, by their names."""
    def make(seed):
        torch.manual_seed(seed)
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        for _ in range(2):
            net.b(net.a(torch.randn(5, 3))).sum().backward()
            optimizer.step()
        return {"model": net.state_dict(), "optim": get_optimizer_state_dict(net, optimizer), "list": [torch.full((2,), float(seed)), {"deep": torch.full((1,), seed)}]}
    saved = make(1)
    dcp.save(saved, checkpoint_id=top, no_dist=True)
    mine = make(2)
    ckptfs.load_state_dict(mine, top, view="raw")
    theirs = make(3)
    dcp.load(theirs, checkpoint_id=top, no_dist=True)
    for part in (mine, theirs):
        for k, t in saved["model"].items():
            assert torch.equal(part["model"][k], t), k
        for k, state in saved["optim"]["state"].items():
            for s, t in state.items():
                assert torch.equal(part["optim"]["state"][k][s], t), (k, s)
        assert torch.equal(part["list"][0], saved["list"][0]) and torch.equal(part["list"][1]["deep"], saved["list"][1]["deep"])
    part = {"optim": make(4)["optim"]}
    result = ckptfs.load_state_dict(part, top, view="raw", strict=False)
    assert result.missing_keys == [] and set(result.unexpected_keys) == {"list.0", "list.1.deep", *(f"model.{k}" for k in saved["model"])}, result


def mappings(top):
    stored = {"model.a.weight": torch.randn(2, 3), "model.b.weight": torch.randn(2)}
    run = folder(top, stored)
    state = {"net.a.weight": torch.zeros(2, 3), "net.b.weight": torch.zeros(2)}
    for mapping in ({"^model.": "net."}, {r"^model\.(?=a)": "net.", "model": "net"}, os.path.join(top, "map.json")):
        for t in state.values():
            t.zero_()
        if isinstance(mapping, str):
            with open(mapping, "w") as f:
                json.dump({"^model": "net"}, f)
        ckptfs.load_state_dict(state, run, key_mapping=mapping)
        assert all(torch.equal(state[k.replace("model", "net")], t) for k, t in stored.items()), mapping


def progress_is_shown(top):
    run = folder(top, {f"t{i}": torch.randn(3) for i in range(5)})
    seen = []
    ckptfs.load_state_dict({f"t{i}": torch.zeros(3) for i in range(5)}, run, progress=lambda done, of: seen.append((done, of)))
    assert seen == [(i, 5) for i in range(6)], seen
    ckptfs.load_state_dict({f"t{i}": torch.zeros(3) for i in range(5)}, run, progress=True)
    ckptfs.load_state_dict({f"t{i}": torch.zeros(3) for i in range(5)}, run, load_options={"threads": 2})
    for bad in ({"readers": "all"}, {"load_options": {"speed": 3}}, {"view": 3}):
        try:
            ckptfs.load_state_dict({}, run, **bad)
        except ValueError:
            continue
        raise AssertionError(bad)
    try:
        ckptfs.load_state_dict({}, run, view="cooked")  # the words are the library's
    except ckptfs.CkptError as e:
        assert e.code == "usage" and "'cooked' is not one of" in str(e), e
    else:
        raise AssertionError("no error")


def the_base_models_prefix(top):
    """A task's model from its base's weights, the base from a task's: what from_pretrained loads, lacks and leaves, and the same values."""
    expected = LLAMA + ".expected"
    base, task = os.path.join(top, "base"), os.path.join(top, "task")
    transformers.AutoModel.from_pretrained(expected, dtype=torch.float32).save_pretrained(base)
    transformers.AutoModelForCausalLM.from_pretrained(expected, dtype=torch.float32).save_pretrained(task)
    for run, kind in ((task, transformers.AutoModel), (base, transformers.AutoModelForCausalLM), (LLAMA, transformers.AutoModel)):
        theirs, info = kind.from_pretrained(task if run == LLAMA else run, dtype=torch.float32, output_loading_info=True)
        with torch.device("meta"):
            mine = kind.from_config(transformers.AutoConfig.from_pretrained(expected), dtype=torch.float32)
        result = ckptfs.load_state_dict(mine, run, strict=False)
        assert set(result.missing_keys) == set(info["missing_keys"]) and set(result.unexpected_keys) == set(info["unexpected_keys"]), (run, result)
        for k, t in mine.state_dict().items():
            assert t.is_meta if k in result.missing_keys else torch.equal(t, theirs.state_dict()[k]), k
    tied = os.path.join(top, "tied")  # the head is tied to an embedding that has the prefix only in the model
    transformers.AutoModel.from_pretrained(TIED + ".expected", dtype=torch.float32).save_pretrained(tied)
    mine = model(TIED + ".expected")
    assert ckptfs.load_state_dict(mine, tied) == ([], []) and mine.lm_head.weight is mine.model.embed_tokens.weight


def whole_peft_models_are_refused(top):
    """By a plain model: it would compute without the adapter. The error says what adds it."""
    try:
        import peft
    except ImportError:
        print("     without peft")
        return
    expected = LLAMA + ".expected"
    base = transformers.AutoModelForCausalLM.from_pretrained(expected, dtype=torch.float32)
    wrapped = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    dcp.save({"model": wrapped.state_dict()}, checkpoint_id=top, no_dist=True)
    for given in ({}, {"view": "raw"}, {"strict": False}):
        said = error_of(ckptfs.load_state_dict, model(expected), top, **given)
        assert "lora='merge'" in said and "PEFT" in said, said


class Renamed(torch.nn.Module):
    """As classes are that have loaded older checkpoints ever since: a hook brings the names up to date."""

    def __init__(self, hook):
        super().__init__()
        self.layer = torch.nn.Linear(2, 3)
        self.layer._register_load_state_dict_pre_hook(hook)


def pre_hooks_run(top):
    stored = {"layer.gamma": torch.randn(3, 2), "layer.bias": torch.randn(3), "layer.old": torch.zeros(1)}
    run = folder(top, stored)

    def hook(state, prefix, metadata, strict, missing, unexpected, errors):
        if prefix + "gamma" in state:
            state[prefix + "weight"] = state.pop(prefix + "gamma")
        state.pop(prefix + "old", None)
    mine, theirs = Renamed(hook), Renamed(hook)
    assert ckptfs.load_state_dict(mine, run) == theirs.load_state_dict(dict(stored))
    assert all(torch.equal(mine.state_dict()[k], t) for k, t in theirs.state_dict().items())

    def turns(state, prefix, *rest):
        state[prefix + "weight"] = state.pop(prefix + "gamma") * 2
    assert "pre-hook" in error_of(ckptfs.load_state_dict, Renamed(turns), run)

    def complains(state, prefix, metadata, strict, missing, unexpected, errors):
        errors.append("too old")
        hook(state, prefix, metadata, strict, missing, unexpected, errors)
    said = error_of(ckptfs.load_state_dict, Renamed(complains), run)
    assert said == error_of(Renamed(complains).load_state_dict, dict(stored)), said


def wrappers_in_every_order(top):
    """Around a layer and around the model: torch's for activation checkpoints and offloading, torch.compile, DataParallel; those of the first two
    keep their part of a name out of the state dict. As load_state_dict of a plain model, with a tied weight and one that is missing."""
    import itertools
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper

    def tied():
        m = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)), torch.nn.Linear(3, 3))
        m[2].weight = m[0].weight
        return m
    want = tied()
    run = folder(top, {k: v for k, v in want.state_dict().items() if k != "2.weight"})
    wrappers = {"checkpoint": checkpoint_wrapper, "offload": offload_wrapper, "compile": torch.compile, "module": torch.nn.DataParallel}
    for n in (1, 2, 3):
        for names in itertools.permutations(wrappers, n):
            for where in ("layer", "model", "both"):
                m = tied()
                for name in names:
                    if where in ("layer", "both") and name != "module":
                        m[1] = wrappers[name](m[1])
                for name in names:
                    m = wrappers[name](m) if where in ("model", "both") else m
                ckptfs.load_state_dict(m, run)
                got = [t for _, t in sorted(((k.split(".")[-1], tuple(t.flatten().tolist())) for k, t in m.state_dict().items()))]
                assert got == [t for _, t in sorted(((k.split(".")[-1], tuple(t.flatten().tolist())) for k, t in want.state_dict().items()))], (names, where)
    short = folder(os.path.join(top, "short"), {k: v for k, v in want.state_dict().items() if k not in ("2.weight", "1.0.bias")})
    m = tied()
    m[1] = checkpoint_wrapper(m[1])
    assert ckptfs.load_state_dict(m, short, strict=False).missing_keys == ["1.0.bias"]


def as_safe_open(top):
    """The same answers as safetensors' own, for every way to slice that it has."""
    torch.manual_seed(0)
    run = folder(top, {"m": torch.randn(5, 6), "v": torch.randn(7), "s": torch.tensor(3.), "b": torch.randn(4, 2).bfloat16()})
    with safe_open(os.path.join(run, "model.safetensors"), framework="pt") as theirs, ckptfs.open(run, framework="pt") as mine:
        assert set(mine.keys()) == set(theirs.keys()) and mine.offset_keys() == theirs.offset_keys()
        assert list(mine.get_tensors()) == list(theirs.get_tensors()) and all(torch.equal(t, mine.get_tensors()[k]) for k, t in theirs.get_tensors().items())
        assert {n for n in dir(theirs) if not n.startswith("_")} <= set(dir(mine))
        for k in theirs.keys():
            assert torch.equal(mine.get_tensor(k), theirs.get_tensor(k))
            assert mine.get_slice(k).get_shape() == theirs.get_slice(k).get_shape() and mine.get_slice(k).get_dtype() == theirs.get_slice(k).get_dtype()
        for index in (slice(None), slice(1, 3), (slice(None), slice(2, 5)), (slice(0, 2), 3), 2, -1, (..., 1), (slice(None), -2), ...):
            assert torch.equal(mine.get_slice("m")[index], theirs.get_slice("m")[index]), index
        assert torch.equal(mine.get_slice("m")[[0, 3]], theirs.get_tensor("m")[[0, 3]])
    for backend in ("mmap", "pread"):
        with ckptfs.open(run, "pt", backend=backend) as mine:
            assert len(mine) == 4
    try:
        ckptfs.open(run, backend="io_uring")
    except ValueError as e:
        assert "backend" in str(e)
    else:
        raise AssertionError("no error")


def modules_of_frameworks_are_imported_when_they_are_used(top):
    """Without their frameworks until then; a name that is none is an AttributeError."""
    code = ("import sys, ckptfs; assert 'torch' not in sys.modules; assert {'torch', 'transformers', 'vllm', 'megatron', 'nanotron', 'accelerate'} <= set(dir(ckptfs)); "
            "assert ckptfs.torch.StorageReader and ckptfs.transformers.from_pretrained and ckptfs.accelerate.loading_from; assert ckptfs.vllm and ckptfs.nanotron; "
            "assert not hasattr(ckptfs, 'nobody'); from ckptfs import *; assert open is ckptfs.open")
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=dict(os.environ, PYTHONPATH=PACKAGE))
    assert not done.returncode, done.stderr


def orders_of_placements(top):
    """Meshes whose dimensions divide one of a tensor: the rows that torch's own splits leave, or a refusal where no order of the mesh gives them."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard
    from ckptfs._tensors import places
    rows, given = torch.arange(128 * 81), [Replicate(), Shard(0), *[_StridedShard(0, split_factor=f) for f in (1, 2, 3, 4, 6)]]

    def parts(mesh, cut):
        return [cut(at) for at in itertools.product(*map(range, mesh))]

    def torchs(mesh, placements, at):
        part = rows
        for p, n, i in zip(placements, mesh, at):
            part = part if p.is_replicate() else p._split_tensor(part, n, with_padding=False)[0][i]
        return part

    def nested(mesh, order, at):
        part = rows
        for m in order:
            part = part.chunk(mesh[m])[at[m]]
        return part
    loaded = 0
    for mesh in (2, 2, 2), (2, 3, 2), (1, 2, 4), (4, 2):
        for placements in itertools.product(given, repeat=len(mesh)):
            want = parts(mesh, lambda at: torchs(mesh, placements, at))
            try:
                order, kinds = places(SimpleNamespace(device_mesh=SimpleNamespace(shape=mesh), placements=placements, dim=lambda: 1))
                orders = [[m for m, (kind, _) in zip(order, kinds) if kind]]
                loaded += 1
            except ckptfs.CkptError as e:
                assert e.code == "unsupported", e
                orders = itertools.permutations([m for m, p in enumerate(placements) if not p.is_replicate()])
            found = any(all(map(torch.equal, want, parts(mesh, lambda at: nested(mesh, order, at)))) for order in orders)
            assert found == isinstance(orders, list), (mesh, placements)
    assert loaded > 100, loaded


def without_torch(top):
    """numpy alone."""
    folder(top, {"m": torch.arange(6.).view(2, 3), "i": torch.arange(4)})
    script = ("import sys; sys.modules['torch'] = None\n"
              "import numpy, ckptfs\n"
              f"with ckptfs.open({top!r}, framework='np') as f:\n"
              "    assert f.get_tensor('m').tolist() == [[0, 1, 2], [3, 4, 5]] and f.get_slice('m')[:, 1].tolist() == [1, 4]\n"
              "    assert f.get_tensor('i').dtype == numpy.int64\n"
              "print('good')")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=dict(os.environ, PYTHONPATH=PACKAGE))
    assert done.stdout == "good\n", done.stderr


run_in_folders((what_torch_returns_and_says, what_the_view_warns_of_is_told, a_config_that_no_load_needs_is_not_missed, casts, casts_that_lose_everything, tied_weights_that_were_not, odd_memory, conjugates_and_negatives,
                memory_that_is_shared_in_part, random_strides, who_hears_of_a_failure_does_not_tell_it_as_its_own, who_is_absent_is_named_on_all_ranks,
                a_failed_load_is_told_to_autograd,
                models_work, adapters, optimizers, mappings, progress_is_shown,
                the_base_models_prefix, whole_peft_models_are_refused, pre_hooks_run, wrappers_in_every_order, modules_of_frameworks_are_imported_when_they_are_used,
                as_safe_open, orders_of_placements, without_torch))
