# SPDX-License-Identifier: Apache-2.0
"""ckptfs.torch.StorageReader under dcp.load: models of other frameworks into FSDP2 and plain ones; a real DCP with optimizer, lr and step,
equal to what torch's own reader gives; no_dist; errors."""

import os
import subprocess
import sys
import warnings

from built import MEGATRON, NANOTRON, PACKAGE, end_rank, need_transformers_5, skip, torchrun
from runner import run_in_folders

LLAMA = os.path.join(NANOTRON, "llama_tp2_pp2_tied")

try:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    import transformers
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
except ImportError as e:
    skip(e)
need_transformers_5(transformers)

import ckptfs  # noqa: E402
from ckptfs.torch import StorageReader  # noqa: E402

warnings.simplefilter("ignore")


def official(folder):
    return {k: v for n in os.listdir(folder) if n.endswith(".safetensors") for k, v in load_file(os.path.join(folder, n)).items()}


def empty_model(folder):
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(7.0)
    return model


def full(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def same_model(model, want):
    state = model.state_dict()
    for name, t in want.items():
        assert torch.equal(full(state[name]), t.float()), name


def tied(state, want):
    """dcp.load asks for every name; a tied one is in the checkpoint once."""
    return {k: v for k, v in state.items() if k in want}


def models_of_other_frameworks(top):
    for run, folder, base in ((LLAMA, LLAMA + ".expected", None),
                              (os.path.join(MEGATRON, "run"), os.path.join(MEGATRON, "expected"), os.path.join(MEGATRON, "base")),
                              (LLAMA + ".expected", LLAMA + ".expected", None)):
        model, want = empty_model(folder), official(folder)
        reader = StorageReader(run, base=base)
        dcp.load(tied(model.state_dict(), want), storage_reader=reader)
        same_model(model, want)
        assert reader.stats["read_bytes"] > 0


def trained(folder):
    """A model and its optimizer after a step."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.8, 0.9))
    model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()
    return model, optimizer


def flat(state, prefix=""):
    items = state.items() if isinstance(state, dict) else enumerate(state)
    for key, value in items:
        name = f"{prefix}{key}"
        if isinstance(value, (dict, list)):
            yield from flat(value, name + ".")
        else:
            yield name, value


def equal(a, b):
    a, b = dict(flat(a)), dict(flat(b))
    assert set(a) == set(b), set(a) ^ set(b)
    for k in a:
        assert torch.equal(full(a[k]), full(b[k])) if isinstance(a[k], torch.Tensor) else a[k] == b[k] and type(a[k]) is type(b[k]), (k, a[k], b[k])


def a_dcp_with_optimizer_lr_and_step_as_torch_reads_it(top):
    model, optimizer = trained(LLAMA + ".expected")
    names, states = get_state_dict(model, optimizer)
    saved = {"model": names, "optim": states, "step": 17, "lr": 1e-3, "words": ["a", "b"], "nothing": None, "rng": torch.arange(9, dtype=torch.uint8)}
    dcp.save(saved, checkpoint_id=top, no_dist=True)
    got = []
    for reader in (None, StorageReader(top, view="raw")):
        model, optimizer = trained(LLAMA + ".expected")
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        names, states = get_state_dict(model, optimizer)
        target = {"model": names, "optim": states, "step": 0, "lr": 0.0, "words": None, "nothing": 1, "rng": torch.zeros(9, dtype=torch.uint8)}
        dcp.load(target, checkpoint_id=top if reader is None else None, storage_reader=reader, no_dist=True)
        set_state_dict(model, optimizer, model_state_dict=target["model"], optim_state_dict=target["optim"])
        got.append(target)
    equal(*got)
    assert got[1]["step"] == 17 and got[1]["words"] == ["a", "b"]


def the_nested_dict_of_a_checkpoint_without_a_model(top):
    """All of it, one key of it, and a sharded optimizer's state: what torch's own reader gives, nested as it was saved."""
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
    model, optimizer = trained(LLAMA + ".expected")
    names, states = get_state_dict(model, optimizer)
    saved = {"model": names, "optim": states, "app": {"step": 17, 3: [torch.ones(2), {"x": torch.zeros(1)}]}, "words": ["a"]}
    dcp.save(saved, checkpoint_id=top, no_dist=True)
    reader = StorageReader(top, view="raw")
    for keys in (None, {"optim"}, {"app"}, {"words", "model"}):
        want = _load_state_dict_from_keys(keys, checkpoint_id=top)
        got = _load_state_dict_from_keys(keys, storage_reader=reader)
        assert want and set(got) == set(want)
        equal(got, want)
    with ckptfs.open(top, view="raw") as f:
        assert f.paths()["app.3.1.x"] == ("app", "3", 1, "x") and f.paths()["words"] == ("words",)
    for view, run in (("raw", top), (None, LLAMA), ("raw", LLAMA)):
        try:
            _load_state_dict_from_keys({"nobody"}, storage_reader=StorageReader(run, view=view))
        except CheckpointException as e:
            assert "nothing of" in str(e.failures) and "tensors" in str(e.failures), e.failures
        else:
            raise AssertionError("{} without an error")


def the_whole_of_a_checkpoint_without_a_model(top):
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
    want = official(LLAMA + ".expected")
    got = _load_state_dict_from_keys(storage_reader=StorageReader(LLAMA))
    tied = {"lm_head.weight": "model.embed_tokens.weight"}  # under both names, as in the model's state dict
    assert set(got) == set(want) | set(tied) and all(torch.equal(got[k], want[tied.get(k, k)]) for k in got)


def a_checkpoint_of_values_without_tensors(top):
    values = {"step": 5, "lr": {"a": 0.1}, "list": [1, 2]}
    dcp.save(values, checkpoint_id=top, no_dist=True)
    state = {"step": 0, "lr": {"a": 0.0}, "list": [0, 0]}
    dcp.load(state, storage_reader=StorageReader(top, view="raw"), no_dist=True)
    assert state == values, state
    try:
        dcp.load(dict(state), storage_reader=StorageReader(top), no_dist=True)
    except CheckpointException as e:
        assert "names no tensor" in str(e), e
    else:
        raise AssertionError("a model without tensors")


def a_tied_model_as_it_is_made(top):
    """Its state dict has the output embedding too, which no file has."""
    from transformers import AutoConfig, AutoModelForCausalLM
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(LLAMA + ".expected"))
    state, want = model.state_dict(), official(LLAMA + ".expected")
    assert "lm_head.weight" in state and "lm_head.weight" not in want
    dcp.load(state, storage_reader=StorageReader(LLAMA), no_dist=True)
    assert all(torch.equal(t, want[name].to(t.dtype)) for name, t in model.named_parameters())


def errors_say_what_is_wrong(top):
    name = "model.norm.weight"
    for reader, target, words in ((StorageReader(os.path.join(top, "nowhere")), {name: torch.zeros(32)}, "nowhere"),
                                  (StorageReader(LLAMA), {"nobody": torch.zeros(32)}, "nobody"),
                                  (StorageReader(LLAMA), {name: torch.zeros(33)}, "33")):
        try:
            dcp.load(target, storage_reader=reader, no_dist=True)
        except (Exception, CheckpointException) as e:
            said = str(e) + "".join(map(str, getattr(e, "failures", {}).values())) + str(e.__cause__) + str(e.__context__)
            assert words in said, said
        else:
            raise AssertionError("no error")


def without_torch_it_says_what_to_install(top):
    os.makedirs(os.path.join(top, "torch"))
    with open(os.path.join(top, "torch", "__init__.py"), "w", encoding="utf-8") as f:
        f.write("raise ImportError('no torch here')\n")
    done = subprocess.run([sys.executable, "-c", "import ckptfs.torch as t\ntry:\n t.StorageReader('x')\nexcept ImportError as e:\n print(e)"],
                          capture_output=True, text=True, env=dict(os.environ, PYTHONPATH=f"{top}:{PACKAGE}"))
    assert "pip install torch" in done.stdout, done


def two_ranks_read_every_byte_once(top):
    os.makedirs(top)
    torchrun(2, __file__, top)


def fsdp2(model, mesh):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def local_parts(state):
    """A state dict with this rank's parts in the places of ShardedTensors."""
    if isinstance(state, dict):
        return {k: local_parts(v) for k, v in state.items()}
    return [s.tensor for s in state.local_shards()] if hasattr(state, "local_shards") else state


def one_of_two_ranks(top):
    dist.init_process_group("gloo")
    mesh, folder = init_device_mesh("cpu", (2,)), LLAMA + ".expected"
    want = official(folder)
    reader = StorageReader(LLAMA, readers="once")
    for shard in (True, False):  # cut in two, then whole on both
        model = fsdp2(empty_model(folder), mesh) if shard else empty_model(folder)
        dcp.load(tied(model.state_dict(), want), storage_reader=reader)
        same_model(model, want)
        assert reader.stats["read_bytes"] <= 1.05 * reader.stats["unique_bytes"], reader.stats
    model, _ = trained(folder)
    model = fsdp2(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()
    names, states = get_state_dict(model, optimizer)
    dcp.save({"model": names, "optim": states, "step": 3}, checkpoint_id=os.path.join(top, "saved"))
    got = []
    for reader in (None, StorageReader(os.path.join(top, "saved"), view="raw")):
        blank = fsdp2(empty_model(folder), mesh)
        optimizer = torch.optim.AdamW(blank.parameters(), lr=0.5)
        names, states = get_state_dict(blank, optimizer)
        target = {"model": names, "optim": states, "step": 0}
        dcp.load(target, checkpoint_id=os.path.join(top, "saved") if reader is None else None, storage_reader=reader)
        got.append(target)
    equal(*got)
    saved, whole = os.path.join(top, "saved"), empty_model(folder).state_dict()
    equal(*[local_parts(load_sharded_optimizer_state_dict(whole, "optim", r)) for r in (dcp.FileSystemReader(saved), StorageReader(saved, view="raw"))])
    if dist.get_rank() == 1:  # a rank alone, while the other one goes on
        model = empty_model(folder)
        dcp.load(tied(model.state_dict(), want), storage_reader=StorageReader(LLAMA), no_dist=True)
        same_model(model, want)
    dist.barrier()


if __name__ == "__main__":
    if "--rank" in sys.argv:
        one_of_two_ranks(sys.argv[-1])
        end_rank()
    run_in_folders((models_of_other_frameworks, a_dcp_with_optimizer_lr_and_step_as_torch_reads_it, the_whole_of_a_checkpoint_without_a_model,
                    the_nested_dict_of_a_checkpoint_without_a_model, a_checkpoint_of_values_without_tensors, a_tied_model_as_it_is_made,
                    errors_say_what_is_wrong, without_torch_it_says_what_to_install, two_ranks_read_every_byte_once))
