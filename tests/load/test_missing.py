# SPDX-License-Identifier: Apache-2.0
"""load_state_dict and what has no values: parameters that a checkpoint lacks, models and state dicts on the meta device, loads that fail."""

import json
import os
import sys
import warnings

from runner import run_in_folders

BUILD = os.environ.get("CKPTFS_BUILD", "build/release")
HERE = os.path.dirname(os.path.abspath(__file__))
LLAMA = os.path.join(HERE, "..", "golden", "nanotron", "llama_tp1_pp1_untied_interleaved")

try:
    import torch
    import transformers
    from safetensors.torch import save_file
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)
if int(transformers.__version__.split(".")[0]) < 5:
    print("skipped: transformers 5 is needed")
    sys.exit(77)

os.environ["CKPTFS_LIBRARY_PATH"] = BUILD
sys.path.insert(0, os.path.join(HERE, "..", "..", "contrib", "python"))
import ckptfs  # noqa: E402


def folder(top, tensors):
    os.makedirs(top, exist_ok=True)
    save_file(tensors, os.path.join(top, "model.safetensors"))
    with open(os.path.join(top, "config.json"), "w") as f:
        json.dump({"model_type": "odd"}, f)
    return top


def on_meta(make):
    with torch.device("meta"):
        return make()


def classifier():
    config = transformers.AutoConfig.from_pretrained(LLAMA + ".expected", num_labels=3, pad_token_id=0)
    return transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)


def error_of(kind, fn, *args, **kwargs):
    try:
        fn(*args, **kwargs)
    except kind as e:
        return str(e)
    raise AssertionError("no error")


def loaded(model, *args, **kwargs):
    """The result, and what it warned of."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = ckptfs.load_state_dict(model, *args, **kwargs)
    return result, " ".join(str(w.message) for w in said)


def a_head_that_is_missing_stays_on_meta(top):
    model = on_meta(classifier)
    result, said = loaded(model, LLAMA, strict=False)
    assert result.missing_keys == ["score.weight"] and result.unexpected_keys == ["lm_head.weight"], result
    assert model.score.weight.is_meta and "score.weight" in said and "missing='init'" in said, said
    assert not any(p.is_meta for p in model.model.parameters())


def a_head_that_is_missing_is_initialised(top):
    """As from_pretrained does it: normal numbers of the configuration's width; what was loaded is not touched."""
    ids = torch.arange(8)[None]
    torch.manual_seed(7)
    heads = []
    for _ in range(2):
        before = torch.random.get_rng_state()
        model = on_meta(classifier)
        result, said = loaded(model, LLAMA, strict=False, missing="init")
        assert torch.equal(torch.random.get_rng_state(), before) and not said, said
        theirs = transformers.AutoModelForSequenceClassification.from_pretrained(LLAMA + ".expected", num_labels=3, pad_token_id=0, dtype=torch.float32)
        for k, t in theirs.model.state_dict().items():
            assert torch.equal(model.model.state_dict()[k], t), k
        head = model.score.weight
        assert 0.3 < head.std() / theirs.score.weight.std() < 3 and head.requires_grad and isinstance(head, torch.nn.Parameter)
        theirs.score.weight = head
        assert torch.equal(model.eval()(ids).logits, theirs.eval()(ids).logits)
        heads.append(head)
    assert torch.equal(*heads)
    model = classifier()  # not on meta: the same
    old = model.score.weight
    loaded(model, LLAMA, strict=False, missing="init")
    assert torch.equal(model.score.weight, heads[0]) and not torch.equal(model.score.weight, old)


def torchs_modules_are_initialised(top):
    """Each by its own reset_parameters, children before parents."""
    torch.manual_seed(3)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm, self.attention = torch.nn.Linear(300, 200), torch.nn.BatchNorm1d(200), torch.nn.MultiheadAttention(200, 2)
    stored = Net().state_dict()
    kept = {k: t for k, t in stored.items() if k in ("a.bias", "norm.weight", "attention.in_proj_weight")}
    run = folder(top, {k: torch.full_like(t, 5.) for k, t in kept.items()})
    net = on_meta(Net)
    result, _ = loaded(net, run, missing="init")  # strict: what is missing is no error then
    assert set(result.missing_keys) == set(stored) - set(kept)
    state = net.state_dict()
    assert all(bool((state[k] == 5).all()) for k in kept) and not any(t.is_meta or t.isnan().any() for t in state.values())
    assert state["a.weight"].abs().max() <= 300 ** -0.5 and 0.7 < state["a.weight"].std() / stored["a.weight"].std() < 1.4
    assert torch.equal(state["norm.running_var"], torch.ones(200)) and int(state["norm.num_batches_tracked"]) == 0
    assert bool((state["attention.out_proj.bias"] == 0).all()) and state["attention.out_proj.weight"].std() > 0


def what_no_class_initialises_is_an_error(top):
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.scale = torch.nn.Linear(2, 2), torch.nn.Parameter(torch.ones(3))
    run = folder(top, {k: torch.ones(2, 2) for k in ("inner.weight",)})
    net = on_meta(Odd)
    said = error_of(ckptfs.CkptError, ckptfs.load_state_dict, net, run, missing="init")
    assert "reset_parameters" in said and all(p.is_meta for p in net.parameters()), said
    assert "of models" in error_of(ValueError, ckptfs.load_state_dict, {"x": torch.zeros(1)}, run, missing="init", strict=False)
    error_of(ValueError, ckptfs.load_state_dict, net, run, missing="zero")


def a_load_that_fails_changes_nothing_on_meta(top):
    """Names, shapes, a file that is cut off."""
    def net():
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    state = net().state_dict()
    runs = [folder(top + "0", {k: t for k, t in state.items() if k != "1.bias"}), folder(top + "1", {**state, "1.bias": torch.zeros(7)}), folder(top + "2", state)]
    view = ckptfs.open(runs[2])
    os.truncate(os.path.join(runs[2], "model.safetensors"), os.path.getsize(os.path.join(runs[2], "model.safetensors")) - 8)
    for run in (runs[0], runs[1], view):
        model = on_meta(net)
        before = dict(model.named_parameters())
        error_of(RuntimeError, ckptfs.load_state_dict, model, run)
        assert all(p.is_meta and p is before[k] for k, p in model.named_parameters())
        own = {k: torch.empty_like(t, device="meta") for k, t in state.items()}
        values = dict(own)
        error_of(RuntimeError, ckptfs.load_state_dict, own, run)
        assert all(own[k] is values[k] for k in own)


def meta_values_of_a_state_dict_are_replaced(top):
    stored = {"w": torch.randn(3, 4), "v": torch.randn(3, 4), "deep.0.b": torch.arange(5.), "deep.1.c": torch.arange(2), "plain": torch.randn(2)}
    run = folder(top, stored)
    plain = torch.zeros(2)
    state = {"w": torch.empty(3, 4, device="meta", dtype=torch.float64), "v": torch.empty(3, 4, device="meta"), "plain": plain,
             "deep": [{"b": torch.empty(5, device="meta")}, {"c": torch.empty(2, dtype=torch.int64, device="meta")}]}
    result = ckptfs.load_state_dict(state, run)
    assert not result.missing_keys and not result.unexpected_keys
    assert state["w"].dtype == torch.float64 and torch.equal(state["w"], stored["w"].double()) and torch.equal(state["v"], stored["v"])
    assert torch.equal(state["deep"][0]["b"], stored["deep.0.b"]) and torch.equal(state["deep"][1]["c"], stored["deep.1.c"])
    assert state["plain"] is plain and torch.equal(plain, stored["plain"])
    net = on_meta(lambda: torch.nn.Linear(4, 3))  # a model's own, which the user gives back
    run = folder(top + "2", torch.nn.Linear(4, 3).state_dict())
    state = net.state_dict()
    ckptfs.load_state_dict(state, run)
    net.load_state_dict(state, assign=True)
    with ckptfs.open(run) as f:
        assert torch.equal(net.weight, f.get_tensor("weight")) and torch.equal(net.bias, f.get_tensor("bias"))
    error_of(TypeError, ckptfs.load_state_dict, {"pair": (torch.empty(1, device="meta"),)}, run)


def tied_tensors_on_meta_stay_tied(top):
    """Equal shapes are no tie."""
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
            self.c.weight = self.a.weight
    stored = {f"{m}.{k}": torch.randn(3, 3) if k == "weight" else torch.randn(3) for m in "abc" for k in ("weight", "bias") if (m, k) != ("c", "weight")}
    run = folder(top, stored)
    net = on_meta(Net)
    ckptfs.load_state_dict(net, run)
    assert net.c.weight is net.a.weight and all(torch.equal(net.state_dict()[k], t) for k, t in stored.items())
    state = on_meta(Net).state_dict()
    ckptfs.load_state_dict(state, run)
    assert state["c.weight"] is state["a.weight"] and all(torch.equal(state[k], t) for k, t in stored.items())


class Marked(torch.nn.Parameter):
    """A parameter with something to remember, which nn.Parameter's constructor does not know; as nanotron's are."""
    def __new__(cls, tensor, mark):
        new = torch.nn.Parameter.__new__(cls, tensor.detach(), False)
        new.mark = mark
        return new


class Wrapped(torch.Tensor):
    """A tensor that has its values in others, as quantised ones do."""
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return cls(args[0].inner) if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default) else NotImplemented


def parameters_keep_their_classes(top):
    """And what they remember: a parameter with memory is the same object, one on the meta device one like it."""
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.plain = Marked(torch.zeros(2, 2), "of mine"), torch.nn.Parameter(torch.zeros(3))
            self.plain.note, self.noted = "kept", torch.nn.Buffer(torch.zeros(4))
            self.register_buffer("special", torch.zeros(5).as_subclass(type("Special", (torch.Tensor,), {})))
    stored = {k: torch.randn_like(t).as_subclass(torch.Tensor) for k, t in Net().state_dict().items()}
    run = folder(top, stored)
    for net in (Net(), on_meta(Net)):
        has_memory, before = not net.weight.is_meta, dict(net.named_parameters())
        ckptfs.load_state_dict(net, run)
        assert type(net.weight) is Marked and net.weight.mark == "of mine" and not net.weight.requires_grad
        assert type(net.plain) is torch.nn.Parameter and net.plain.note == "kept" and net.plain.requires_grad
        assert isinstance(net.noted, torch.nn.Buffer) and type(net.special).__name__ == "Special"
        assert all(torch.equal(t, stored[k]) for k, t in net.state_dict().items())
        assert all((p is before[k]) == has_memory for k, p in net.named_parameters())
    state = on_meta(Net).state_dict(keep_vars=True)
    ckptfs.load_state_dict(state, run)
    assert type(state["weight"]) is Marked and torch.equal(state["weight"], stored["weight"])
    for device in ("cpu", "meta"):  # the class does not allow it
        said = error_of(ckptfs.CkptError, ckptfs.load_state_dict, {"weight": Wrapped(torch.zeros(2, 2, device=device))}, run, names=["weight"])
        assert "'weight' is a Wrapped" in said and "without memory of its own" in said, said


def what_has_memory_stays_as_it_was(top):
    run = folder(top, {"weight": torch.ones(2, 2)})
    net = torch.nn.Linear(2, 2)
    bias, value = net.bias, net.bias.detach().clone()
    version = net.weight._version
    result, said = loaded(net, run, strict=False)
    assert result.missing_keys == ["bias"] and net.bias is bias and torch.equal(bias, value) and not said
    assert net.weight._version > version  # autograd hears of it: a graph that has saved the old values is no good any more
    x = torch.ones(1, 2, requires_grad=True)
    y = net(x).sum()
    loaded(net, run, strict=False)
    assert "modified by an inplace operation" in error_of(RuntimeError, y.backward)


run_in_folders((a_head_that_is_missing_stays_on_meta, a_head_that_is_missing_is_initialised, torchs_modules_are_initialised,
                what_no_class_initialises_is_an_error, a_load_that_fails_changes_nothing_on_meta, meta_values_of_a_state_dict_are_replaced,
                tied_tensors_on_meta_stay_tied, parameters_keep_their_classes, what_has_memory_stays_as_it_was))
