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
        self.rank, self.size, self.got = rank, size, {}
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
            assert tensor.device.type == "cpu" and tensor.shape == self.whole[name].shape and name not in self.got, name
            own = name.replace(".", "_")
            if hasattr(self, own):
                getattr(self, own).copy_(self.part(tensor))
                loaded.add(own)
            self.got[name] = tensor
        return loaded

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
        self.loaded = dict(weights)


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
    loaded(Engine(), RUN)
    loaded(Engine(), RUN + ".expected")
    import ckptfs.vllm
    with mock.patch("ckptfs.vllm._device", lambda: 0), mock.patch("ckptfs._comm.nccl_library", lambda: None):  # in batches, which are on the host then
        for size in (1, 5000, 1 << 20):
            loaded(Engine(), RUN, batch_bytes=size)
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


def ranks_that_share_what_they_read(top):
    torchrun(3, __file__)


def what_is_wrong_is_said(top):
    registered()
    for call, words in ((lambda: loaded(Engine(), os.path.join(top, "nowhere")), "nowhere"),
                        (lambda: loaded(Engine(), RUN, colour="red"), "colour"),
                        (lambda: loaded(Engine(lacks=["model.norm.weight"]), RUN), "extra"),
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
        engine = Engine(rank, size)
        loaded(engine, RUN, **extra)
        assert all(torch.equal(engine.got[name], t) for name, t in engine.whole.items())


if __name__ == "__main__":
    if "--rank" in sys.argv:
        dist.init_process_group("gloo")
        one_rank()
        dist.barrier()
        end_rank()
    run_in_folders((one_process, a_head_that_the_engine_does_not_take, ranks_that_share_what_they_read, what_is_wrong_is_said, without_vllm_it_says_what_to_install))
