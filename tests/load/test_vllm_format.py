# SPDX-License-Identifier: Apache-2.0
"""ckptfs.vllm over stand-ins for vLLM's registry and loader interface: the entry point of pyproject.toml registers the load
format, and an engine's model, whose weight loaders keep a rank's part of whole tensors, gets what the official conversion has."""

import glob
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from unittest import mock

from built import BUILD, HERE, NANOTRON, PACKAGE, end_rank, skip, torchrun
from runner import run_in_folders

try:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file, save_file
except ImportError as e:
    skip(e)

import vllm_interface as vllm  # noqa: E402

from ckptfs import CkptError  # noqa: E402

vllm.install()
EMBEDDING = "model.embed_tokens.weight"
RUN = os.path.join(NANOTRON, "llama_tp2_pp2_tied")


def registered():
    """The loader's class, through the entry point that the package declares."""
    with open(os.path.join(HERE, "..", "..", "pyproject.toml"), encoding="utf-8") as f:
        name, value = re.search(r'\[project\.entry-points\."vllm\.general_plugins"\]\n(\w+) = "([^"]+)"', f.read()).groups()
    vllm.load_general_plugins([EntryPoint(name, value, "vllm.general_plugins")] * 2)
    return vllm.FORMATS["ckptfs"]


def conversion():
    tensors = {}
    for file in glob.glob(RUN + ".expected/*.safetensors"):
        tensors |= load_file(file)
    return tensors


class Engine(torch.nn.Module):
    """As vLLM's models are: fused parameters under names of its own, filled by load_weights() from an iterator of whole tensors."""

    def __init__(self, rank=0, size=1, lacks=()):
        super().__init__()
        self.rank, self.size, self.got, self.fails = rank, size, {}, False
        self.whole = conversion()
        for name, t in self.whole.items():
            if name not in lacks:
                self.register_parameter(name.replace(".", "_"), torch.nn.Parameter(torch.zeros_like(self.part(t)), requires_grad=False))
        if lacks:
            self.extra = torch.nn.Parameter(torch.zeros(3))

    def part(self, t):
        return t.chunk(self.size, 0)[self.rank]

    def load_weights(self, weights):
        loaded = set()
        for name, tensor in weights:
            if self.fails:
                self.fails = False
                raise ValueError("a weight loader that wants values")
            assert tensor.device.type == "cpu" and tensor.shape == self.whole[name].shape, name
            own = name.replace(".", "_")
            if hasattr(self, own):
                getattr(self, own).copy_(self.part(tensor))
                loaded.add(own)
            self.got[name] = tensor
        return loaded

    def check_whole(self):
        assert all(torch.equal(self.got[name], t) for name, t in self.whole.items())

    def check(self):
        for name, t in self.whole.items():
            assert torch.equal(getattr(self, name.replace(".", "_")), self.part(t)), name


class TiedEngine(torch.nn.Module):
    """As vLLM's models are that tie the head: one parameter, of whose names in the checkpoint the first is loaded and the others are skipped."""

    hf_to_vllm_mapper = SimpleNamespace(apply_list=lambda names: [name.replace("model.", "language_model.model.", 1) for name in names])

    def __init__(self, tied=True):
        super().__init__()
        self.loaded = {}
        self.head, self.embed = torch.nn.Module(), torch.nn.Module()
        self.add_module("language_model", torch.nn.Module())
        self.language_model.add_module("model", torch.nn.Module())
        self.language_model.model.add_module("embed_tokens", self.embed)
        self.add_module("lm_head", self.head)
        self.embed.weight = torch.nn.Parameter(torch.zeros_like(conversion()[EMBEDDING]))
        self.head.weight = self.embed.weight if tied else torch.nn.Parameter(torch.zeros_like(self.embed.weight))

    def load_weights(self, weights):
        for name, tensor in weights:
            self.loaded[name] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


def model_config(model, quantization=None):
    return SimpleNamespace(model=model, quantization=quantization)


def loaded(engine, model, **extra):
    loader = vllm.get_model_loader(vllm.load_config(**extra))
    loader.download_model(model_config(model))
    assert loader.load_model(SimpleNamespace(make_model=lambda: engine), model_config(model)) is engine
    engine.check()


def one_process(top):
    """A folder of `ckpt export --no-weights` as vLLM's model, the run in the extra configuration; and a run that is the model itself."""
    registered()
    subprocess.run([os.path.join(BUILD, "fs", "ckpt"), "export", "-q", "--no-weights", RUN, top], check=True)
    assert os.path.exists(os.path.join(top, "config.json")) and not glob.glob(os.path.join(top, "*.safetensors"))
    loaded(Engine(), top, run=RUN)
    loaded(Engine(), top, run=RUN, step=10, prefetch=0)
    engine = Engine()
    loaded(engine, top, run=RUN, step=10, prefetch=0, slices=False)
    engine.check_whole()
    loaded(Engine(), RUN)
    loaded(Engine(), RUN + ".expected")
    import ckptfs.vllm
    with mock.patch("ckptfs.vllm._device", lambda: 0), mock.patch("ckptfs._comm.nccl_library", lambda: None):  # in batches, which are on the host then
        for size in (1, 5000, 1 << 20):
            loaded(Engine(), RUN, batch_bytes=size, slices=False)
    with torch.device("meta"):  # an engine's default device is its own
        loader = vllm.get_model_loader(vllm.load_config(run=RUN, dtype="float32"))
        assert {t.dtype for _, t in loader.weights(RUN)} == {torch.float32}


def a_head_that_the_engine_does_not_take(top):
    """The folder's config ties head and embedding, and the run has no config, or another: never the tied model of a run with a head of its own."""
    registered()
    os.makedirs(top)
    served, run, own = (os.path.join(top, name) for name in ("served", "run", "own"))
    subprocess.run([os.path.join(BUILD, "fs", "ckpt"), "export", "-q", "--no-weights", RUN, served], check=True)
    with open(os.path.join(served, "config.json"), encoding="utf-8") as f:
        config = json.load(f)
    assert config["tie_word_embeddings"]
    for path, head, said in ((run, 1, "tie_word_embeddings"), (run, 0, None), (own, 1, "ties them"), (own, 0, None)):
        shutil.rmtree(path, ignore_errors=True)
        os.makedirs(path)
        tensors = conversion()
        tensors["lm_head.weight"] = tensors[EMBEDDING] + head
        if path == own:
            save_file(tensors, os.path.join(path, "model.safetensors"), {"format": "pt"})
            with open(os.path.join(path, "config.json"), "w", encoding="utf-8") as f:
                json.dump(dict(config, tie_word_embeddings=False), f)
        else:
            dcp.save(tensors, checkpoint_id=path, no_dist=True)
        engine = TiedEngine()
        try:
            vllm.get_model_loader(vllm.load_config(run=path)).load_weights(engine, model_config(served))
        except CkptError as e:
            assert e.code == "conflict" and said and said in str(e) and "lm_head.weight" in str(e), e
        else:
            assert said is None and torch.equal(engine.loaded[EMBEDDING], tensors[EMBEDDING]), (path, head)
    with open(os.path.join(served, "config.json"), "w", encoding="utf-8") as f:
        json.dump(dict(config, tie_word_embeddings=False), f)
    tensors["lm_head.weight"] = tensors[EMBEDDING] + 1
    shutil.rmtree(run)
    dcp.save(tensors, checkpoint_id=run, no_dist=True)
    engine = TiedEngine(tied=False)
    vllm.get_model_loader(vllm.load_config(run=run)).load_weights(engine, model_config(served))
    assert torch.equal(engine.loaded["lm_head.weight"], tensors["lm_head.weight"])


def save(top, **tensors):
    for name, t in tensors.items():
        tensors[name] = t.contiguous()
    os.makedirs(top)
    save_file(tensors, os.path.join(top, "model.safetensors"), {"format": "pt"})
    with open(os.path.join(top, "config.json"), "w", encoding="utf-8") as f:
        json.dump({"model_type": "unheard_of"}, f)


class Odd(torch.nn.Module):
    """Destinations, and a function that fills them from tensors by name, as weight loaders do."""

    def __init__(self, fill, **tensors):
        super().__init__()
        self.fill = fill
        for name, t in tensors.items():
            self.register_buffer(name, t)

    def load_weights(self, weights):
        self.fill(self, dict(weights))


def what_loaders_do(top):
    """Each way of filling a destination gives what it gives with whole tensors; what it reads is known."""
    registered()
    from ckptfs.vllm import last_load
    torch.manual_seed(1)
    a, b, c, s = torch.randn(6, 8), torch.randn(4, 6, 8).bfloat16(), torch.arange(24, dtype=torch.int64).view(4, 6), torch.tensor(3.5)
    save(top, a=a, b=b, c=c, s=s)

    def into(shape, dtype=torch.float32):
        return {"out": torch.full(shape, 7, dtype=dtype)}

    def twice(m, w):  # as vLLM's composed_weight_loader: the second statement reads what the first has filled
        m.out.copy_(w["a"][:3])
        m.out.copy_(-m.out.exp())

    def changed(m, w):
        w["a"][2:4].mul_(2)
        m.out.copy_(w["a"])

    def over(m, w):  # the last one stays
        m.out[:4].copy_(w["a"][:4])
        m.out[1:5].copy_(w["a"][2:6])
        m.out[0] = w["a"][5]
        m.out[5] = 1.5

    def same_place(m, w):
        m.out.copy_(w["a"][:3])
        m.out.copy_(w["a"][3:])

    def kept(m, w):
        m.out = w["a"]

    for name, fill, made, alone in (
            ("a slice of a slice", lambda m, w: m.out.copy_(w["a"].narrow(0, 1, 4).chunk(2, 0)[1][:, 2:5]), into((2, 3)), 0),
            ("transposed", lambda m, w: m.out.copy_(w["a"].t()[1:4]), into((3, 6)), 0),
            ("into a transposed part", lambda m, w: m.out.t()[2:8].copy_(w["a"]), into((8, 9)), 0),
            ("one expert", lambda m, w: [m.out[e, 2:].copy_(x.transpose(0, 1)[:, 3:]) for e, x in enumerate(w["b"].unbind())], into((4, 10, 3), torch.bfloat16), 0),
            ("cast", lambda m, w: m.out.copy_(w["b"][1]), into((6, 8)), 0),
            ("cast down", lambda m, w: m.out.data.copy_(w["a"].unsqueeze(0)), into((1, 6, 8), torch.float16), 0),
            ("a scalar", lambda m, w: m.out.data[1:2].copy_(w["s"].view(1)), into((3,)), 0),
            ("an assignment", lambda m, w: m.out.data.__setitem__(1, w["s"]), into((3,)), 0),
            ("fill_(item())", lambda m, w: m.out.fill_(w["s"].item()), into((3,)), 4),
            ("broadcast", lambda m, w: m.out.copy_(w["a"][0]), into((5, 8)), 32),
            ("integers to floats", lambda m, w: m.out.copy_(w["c"][2:]), into((2, 6)), 96),
            ("split", lambda m, w: m.out.copy_(w["a"].view(3, 2, 8).transpose(0, 1)[1]), into((3, 8)), None),
            ("flattened", lambda m, w: m.out.copy_(w["a"].view(-1)[4:20]), into((16,)), None),
            ("arithmetic", lambda m, w: m.out.copy_(w["a"][1:3] * 2 + 1), into((2, 8)), 64),
            ("to(), permute, contiguous", lambda m, w: m.out.copy_(w["b"][2].to(torch.float64).permute(1, 0).contiguous()), into((8, 6), torch.float64), 96),
            ("bits", lambda m, w: m.out.copy_(w["a"].view(torch.int32)[1]), into((8,), torch.int32), 192),
            ("index", lambda m, w: m.out.copy_(w["a"][[4, 1]]), into((2, 8)), 192),
            ("numpy", lambda m, w: m.out.copy_(torch.from_numpy(w["a"].numpy()[1:2])), into((1, 8)), 192),
            ("nothing", lambda m, w: m.out[:0].copy_(w["a"][3:3]), into((2, 8)), 0),
            ("read after it is filled", twice, into((3, 8)), 96), ("changed in place", changed, into((6, 8)), 192), ("over each other", over, into((6, 8)), None),
            ("the same place", same_place, into((3, 8)), 0), ("an empty rest", lambda m, w: (m.out[:6].copy_(w["a"]), m.out[6:].fill_(0)), into((9, 8)), 0),
            ("kept", kept, into((2,)), None)):
        models = []
        for slices in (True, False):
            models.append(Odd(fill, **{k: t.clone() for k, t in made.items()}))
            vllm.get_model_loader(vllm.load_config(slices=slices)).load_weights(models[-1], model_config(top))
        assert torch.equal(models[0].out, models[1].out), (name, models[0].out, models[1].out)
        stats = last_load(models[0])
        assert alone is None or stats["alone_bytes"] == alone, (name, stats)
        if name != "kept":
            again = dict(vllm.get_model_loader(vllm.load_config()).get_all_weights(model_config(top), models[0]))
            models[0].out = made["out"].clone()
            models[0].fill(models[0], again)
            assert torch.equal(models[0].out, models[1].out), ("reloaded", name)
    engine = Odd(lambda m, w: m.later.append(w["a"]))
    engine.later = []
    vllm.get_model_loader(vllm.load_config()).load_weights(engine, model_config(top))
    try:
        engine.later[0] + 1
    except CkptError as e:
        assert "slices" in str(e)
    else:
        raise AssertionError("a tensor was read after the load")


def tied_heads_and_parts(top):
    """A module that the model has under two names makes no twins of a fused parameter's parts."""
    registered()
    gate, up = torch.randn(4, 8), torch.randn(4, 8)
    save(top, **{"mlp.gate": gate, "mlp.up": up, "other.both": torch.cat((gate, up))})

    class Twice(torch.nn.Module):
        hf_to_vllm_mapper = SimpleNamespace(apply_list=lambda names: [f"{name.split('.')[0]}.gate_up.weight" for name in names])

        def __init__(self):
            super().__init__()
            self.mlp, self.other = torch.nn.Module(), torch.nn.Module()
            self.mlp.gate_up = self.other.gate_up = torch.nn.Linear(8, 8, bias=False).requires_grad_(False)

        def load_weights(self, weights):
            for name, t in weights:
                if name != "other.both":
                    self.mlp.gate_up.weight.data.narrow(0, 4 * (name == "mlp.up"), 4).copy_(t)

    for slices in (True, False):
        model = Twice()
        vllm.get_model_loader(vllm.load_config(slices=slices)).load_weights(model, model_config(top))
        assert torch.equal(model.mlp.gate_up.weight, torch.cat((gate, up)))


def a_quantized_model_gets_whole_tensors(top):
    registered()
    import ckptfs.vllm
    engine = Engine()
    loader = vllm.get_model_loader(vllm.load_config())
    loader.load_weights(engine, model_config(RUN, "fp8"))
    engine.check_whole()
    assert not ckptfs.vllm.last_load(engine)
    engine.got = {}
    engine.load_weights(loader.get_all_weights(model_config(RUN, "fp8"), engine))
    engine.check_whole()


def ranks_that_share_what_they_read(top):
    torchrun(3, __file__)


def what_is_wrong_is_said(top):
    registered()
    for call, words in ((lambda: loaded(Engine(), os.path.join(top, "nowhere")), "nowhere"),
                        (lambda: loaded(Engine(), RUN, colour="red"), "colour"),
                        (lambda: loaded(Engine(lacks=["model.norm.weight"]), RUN), "extra"),
                        *((lambda w=wrong: vllm.get_model_loader(vllm.load_config(**w)), next(iter(wrong))) for wrong in (
                            {"readers": "foo"}, {"readers": ["once"]}, {"batch_bytes": "x"}, {"batch_bytes": 0}, {"batch_bytes": True}, {"prefetch": -1}, {"prefetch": 1.5},
                            {"slices": "no"}, {"step": [1]}, {"step": True}, {"run": 3}, {"load_options": []}, {"load_options": {"threads": "x"}},
                            {"load_options": {"rates": 3}}, {"load_options": {"no": 1}})),
                        (lambda: vllm.get_model_loader(SimpleNamespace(load_format="ckptfs", model_loader_extra_config=[1])), "JSON object")):
        try:
            call()
        except Exception as e:
            assert words in str(e), e
        else:
            raise AssertionError(f"no error with {words}")


def without_vllm_it_says_what_to_install(top):
    done = subprocess.run([sys.executable, "-c", "import ckptfs.vllm as v\ntry:\n v.register()\nexcept ImportError as e:\n print(e)"],
                          capture_output=True, text=True, env=dict(os.environ, PYTHONPATH=PACKAGE))
    assert "pip install vllm" in done.stdout, done


def one_rank():
    registered()
    rank, size = dist.get_rank(), dist.get_world_size()
    for extra in ({}, {"batch_bytes": 20000, "readers": "once"}, {"batch_bytes": 1, "readers": "node"}, {"readers": "each"}):
        loaded(Engine(rank, size), RUN, **extra)
        engine = Engine(rank, size)
        loaded(engine, RUN, slices=False, **extra)
        engine.check_whole()
    from ckptfs.vllm import last_load
    engine = Engine(rank, size)
    loaded(engine, RUN, readers="once")
    stats = last_load(engine)
    assert stats["read_bytes"] == stats["all_bytes"] and abs(stats["own_bytes"] * size - stats["all_bytes"]) < 0.1 * stats["all_bytes"], stats
    engine = Engine(rank, size)
    engine.fails = rank == 1  # the others go its way
    loaded(engine, RUN)
    engine.check_whole()


if __name__ == "__main__":
    if "--rank" in sys.argv:
        dist.init_process_group("gloo")
        one_rank()
        dist.barrier()
        end_rank()
    run_in_folders((one_process, a_head_that_the_engine_does_not_take, what_loaders_do, tied_heads_and_parts,
                    a_quantized_model_gets_whole_tensors, ranks_that_share_what_they_read, what_is_wrong_is_said, without_vllm_it_says_what_to_install))
