# SPDX-License-Identifier: Apache-2.0
"""ckptfs.nanotron.load_weights over stand-ins for nanotron's data structures (nanotron is not on PyPI), on checkpoints that nanotron wrote: every
rank's parameters, under the sizes that they were saved with and under others, against what nanotron's ranks wrote and the official conversion."""

import glob
import os
import shutil
import subprocess
import sys
import time
import warnings

from built import NANOTRON, PACKAGE, end_rank, skip, torchrun
from runner import run_in_folders

try:
    import torch
    import torch.distributed as dist
    from safetensors import safe_open
    from safetensors.torch import load_file
except ImportError as e:
    skip(e)

import nanotron_structures as structures  # noqa: E402

TIED = "llama_tp2_pp2_tied"
LAYERS, HIDDEN, VOCAB, FFN = 4, 32, 128, 64
EMBEDDING, HEAD = "model.token_position_embeddings.pp_block.token_embedding.weight", "model.lm_head.pp_block.weight"

warnings.simplefilter("ignore")


def under_any_parallel_sizes(top):
    torchrun(4, __file__, "sizes")


def weights_that_save_weights_wrote_alone(top):
    """Nothing but model/, whose names are the model's, or those of one inside DistributedDataParallel; loaded by each of the two."""
    for name, inner in (("plain", "model"), ("wrapped", os.path.join("model", "module"))):
        shutil.copytree(os.path.join(NANOTRON, TIED, "10", "model"), os.path.join(top, name, inner))
    torchrun(2, __file__, "alone", TOP=top)


def a_parameter_that_does_not_fit_is_said_on_all_ranks(top):
    torchrun(2, __file__, "errors")


def without_nanotron_it_says_what_to_install(top):
    done = subprocess.run([sys.executable, "-c", "import ckptfs.nanotron as n\ntry:\n n.load_weights(None, None, 'x')\nexcept ImportError as e:\n print(e)"],
                          capture_output=True, text=True, env=dict(os.environ, PYTHONPATH=PACKAGE))
    assert "pip install git+https" in done.stdout, done


# ---- a model of nanotron's: names, and which slices of a whole tensor a rank has ----

def shapes(tied, layers):
    """{name: (the whole tensor's shape, dimension that is divided or None, sizes of the parts that are divided each)}"""
    found = {EMBEDDING: ((VOCAB, HIDDEN), 0, [VOCAB]), HEAD: ((VOCAB, HIDDEN), 0, [VOCAB]),
             "model.final_layer_norm.pp_block.weight": ((HIDDEN,), None, None)}
    for i in layers:
        at = f"model.decoder.{i}.pp_block."
        found |= {at + "input_layernorm.weight": ((HIDDEN,), None, None), at + "post_attention_layernorm.weight": ((HIDDEN,), None, None),
                  at + "attn.qkv_proj.weight": ((64, HIDDEN), 0, [32, 16, 16]), at + "attn.o_proj.weight": ((HIDDEN, HIDDEN), 1, [HIDDEN]),
                  at + "mlp.gate_up_proj.weight": ((2 * FFN, HIDDEN), 0, [FFN, FFN]), at + "mlp.down_proj.weight": ((HIDDEN, FFN), 1, [FFN])}
    return found


def slice_pairs(dims, dim, parts, rank, size):
    """As nanotron's ranks have them: of each part of the divided dimension an equal share, one after another."""
    if len(parts) == 1:
        share = parts[0] // size
        local = [slice(None)] * dims
        whole = [slice(None)] * dims
        whole[dim] = slice(rank * share, (rank + 1) * share)
        return (structures.SlicesPair(tuple(local), tuple(whole)),)
    out, at = [], 0
    for part in parts:
        share, local, whole = part // size, [slice(None)] * dims, [slice(None)] * dims
        local[dim], whole[dim] = slice(at // size, at // size + share), slice(at + rank * share, at + (rank + 1) * share)
        out.append(structures.SlicesPair(tuple(local), tuple(whole)))
        at += part
    return tuple(out)


def holder(root, name):
    """The module that a parameter lies in, made where it is not there, and the parameter's own name."""
    *path, leaf = name.split(".")
    for part in path:
        if part not in dict(root.named_children()):
            root.add_module(part, torch.nn.Module())
        root = getattr(root, part)
    return root, leaf


def stage_has(name, pp, stages):
    """nanotron divides by cost, not evenly: here the last stage has one layer and the head."""
    if stages == 1:
        return True
    parts = name.split(".")
    if parts[1] == "decoder":
        return (pp == stages - 1) == (int(parts[2]) == LAYERS - 1)
    return (pp == 0) == (name == EMBEDDING)


def rank_model(context, tied, dtype=torch.bfloat16, layers=LAYERS):
    model, size = torch.nn.Module(), context.tp_pg.size()
    for name, (shape, dim, parts) in shapes(tied, range(layers)).items():
        if not stage_has(name, context.pp_rank, context.pp_pg.size()):
            continue
        local = [n // size if d == dim else n for d, n in enumerate(shape)]
        parameter = structures.NanotronParameter(torch.full(local, 7.0, dtype=dtype))
        if dim is not None:
            parameter.mark_as_sharded((), slice_pairs(len(shape), dim, parts, context.tp_rank, size), shape)
        if tied and name in (EMBEDDING, HEAD):
            parameter.mark_as_tied(EMBEDDING, model)
        module, leaf = holder(model, name)
        module.register_parameter(leaf, parameter)
    return model


# ---- the truth ----

def files_of(case, name):
    *path, leaf = name.split(".")
    return sorted(glob.glob(os.path.join(NANOTRON, case, "*", "model", *path, f"model_{leaf}*.safetensors")))


def converted(case):
    """{nanotron's name: whole tensor} of the official conversion to Hugging Face, joined again; q and k are left out (their rows are in another order)."""
    hub = {}
    for file in glob.glob(os.path.join(NANOTRON, case + ".expected", "*.safetensors")):
        hub |= load_file(file)
    out = {EMBEDDING: hub["model.embed_tokens.weight"], HEAD: hub.get("lm_head.weight", hub["model.embed_tokens.weight"]),
           "model.final_layer_norm.pp_block.weight": hub["model.norm.weight"]}
    for i in range(LAYERS):
        at, hf = f"model.decoder.{i}.pp_block.", f"model.layers.{i}."
        if hf + "input_layernorm.weight" not in hub:
            break
        out |= {at + n: hub[hf + h] for n, h in (("input_layernorm.weight", "input_layernorm.weight"), ("attn.o_proj.weight", "self_attn.o_proj.weight"),
                                                 ("post_attention_layernorm.weight", "post_attention_layernorm.weight"),
                                                 ("mlp.down_proj.weight", "mlp.down_proj.weight"))}
        out[at + "mlp.gate_up_proj.weight"] = torch.cat([hub[hf + "mlp.gate_proj.weight"], hub[hf + "mlp.up_proj.weight"]])
        out[at + "v"] = hub[hf + "self_attn.v_proj.weight"]
    return out


def check(name, got, truth, context):
    """A rank's part against the official conversion."""
    _, dim, parts = shapes(False, range(LAYERS))[name]
    rank, size = context.tp_rank, context.tp_pg.size()
    if name.endswith("qkv_proj.weight"):
        v = truth[name.replace("attn.qkv_proj.weight", "v")].chunk(size)[rank]
        assert torch.equal(got[-len(v):], v), name
        return
    whole = truth[name]
    want = whole if dim is None else torch.cat([part.chunk(size, dim)[rank] for part in whole.split(parts, dim)], dim)
    assert torch.equal(got, want), name


def check_same_sizes(name, got, tied, case, context):
    """A rank's part against the very file that nanotron's rank wrote, wherever its stage was."""
    files = files_of(case, EMBEDDING if tied and name == HEAD else name)
    file = files[0] if len(files) == 1 else next(f for f in files if f"_tp-rank-{context.tp_rank}-of-" in f)
    assert torch.equal(got, load_file(file)["data"]), name


def sizes():
    from ckptfs.nanotron import load_weights
    for tp, pp, dp in ((2, 2, 1), (4, 1, 1), (1, 2, 2), (2, 1, 2)):
        context = structures.ParallelContext(tp, pp, dp)
        truth, model = converted(TIED), rank_model(context, True)
        metadata = load_weights(model, context, os.path.join(NANOTRON, TIED), readers="once")
        assert metadata.stats["read_bytes"] <= 1.02 * metadata.stats["unique_bytes"], metadata.stats
        same = (tp, pp) == (2, 2)
        for name, parameter in model.state_dict().items():
            check(name, parameter, truth, context)
            if tp == 2:
                check_same_sizes(name, parameter, True, TIED, context)
            check_metadata(metadata[name], [] if same else files_of(TIED, EMBEDDING if name == HEAD else name))
        assert list(metadata) == list(model.state_dict())
    one_step_of_a_run(context)
    a_checkpoint_of_another_framework(context)
    another_dtype_and_some_names(context)


def alone():
    from ckptfs.nanotron import load_weights
    for tp, pp in ((2, 1), (1, 2)):
        context, truth = structures.ParallelContext(tp, pp, 1), converted(TIED)
        for saved in ("plain", "wrapped"):
            for is_wrapped in (False, True):
                model = outer = rank_model(context, True)
                if is_wrapped:
                    outer = torch.nn.Module()
                    outer.module = model
                metadata = load_weights(outer, context, os.path.join(os.environ["TOP"], saved))
                assert list(metadata) == list(outer.state_dict()), metadata
                for name, parameter in model.state_dict().items():
                    check(name, parameter, truth, context)
                if saved == "plain":
                    name = ("module." if is_wrapped else "") + EMBEDDING
                    if name in metadata:
                        check_metadata(metadata[name], files_of(TIED, EMBEDDING))


    late = os.path.join(os.environ["TOP"], "late")
    if dist.get_rank() == 0:  # saved by a slower rank, for which the others do not wait
        time.sleep(1)
        shutil.copytree(os.path.join(os.environ["TOP"], "plain"), late)
    load_weights(rank_model(context, True), context, late)


def check_metadata(got, files):
    """{(pp, tp): TensorMetadata} of what the files' headers say."""
    want = {}
    for file in files:
        with safe_open(file, "pt") as f:
            if f.metadata():
                stem = os.path.basename(file).split("_")
                want[stem[2].split("-")[2], stem[3].split("-")[2]] = structures.TensorMetadata.from_str_dict(f.metadata())
    assert got == want, (got, want)


def one_step_of_a_run(context):
    """The folder of a step, and a run with the step's name, are the same."""
    from ckptfs.nanotron import load_weights
    for folder, step in ((os.path.join(NANOTRON, TIED, "10"), None), (os.path.join(NANOTRON, TIED), 10)):
        model = rank_model(context, True)
        load_weights(model, context, folder, step=step)
        assert torch.equal(model.get_parameter("model.final_layer_norm.pp_block.weight"), converted(TIED)["model.final_layer_norm.pp_block.weight"])


def a_checkpoint_of_another_framework(context):
    """The official conversion to Hugging Face, read back under nanotron's names."""
    from ckptfs.nanotron import load_weights
    model = rank_model(context, True)
    metadata = load_weights(model, context, os.path.join(NANOTRON, TIED + ".expected"))
    assert list(metadata) == list(model.state_dict()) and not any(metadata.values())
    for name, parameter in model.state_dict().items():
        check(name, parameter, converted(TIED), context)


def another_dtype_and_some_names(context):
    from ckptfs.nanotron import load_weights
    model, name = rank_model(context, True, torch.float32), "model.decoder.1.pp_block.mlp.down_proj.weight"
    chosen = {name: model.state_dict()[name]}
    assert list(load_weights(model, context, os.path.join(NANOTRON, TIED), chosen)) == [name]
    check(name, model.get_parameter(name).bfloat16(), converted(TIED), context)
    assert (model.get_parameter(EMBEDDING) == 7).all()


def errors():
    from ckptfs import CkptError
    from ckptfs.nanotron import load_weights
    context, mine = structures.ParallelContext(2, 1, 1), dist.get_rank() == 1

    def fails(change, code, *words):
        model = rank_model(context, True)
        if mine:
            change(model)
        try:
            load_weights(model, context, os.path.join(NANOTRON, TIED))
        except CkptError as e:
            assert e.code == code and all(word in str(e) for word in words), (e.code, e)
        else:
            raise AssertionError("no error")
        assert all((p == 7).all() for p in model.parameters())

    def plain(model):
        model.model.final_layer_norm.pp_block.weight = torch.nn.Parameter(torch.full((HIDDEN,), 7.0))

    def other_name(model):
        model.get_parameter(HEAD).tied.name = "model.nowhere.weight"

    def other_shape(model):
        model.get_parameter(EMBEDDING).sharded.unsharded_shape = (VOCAB + 2, HIDDEN)

    def stepped(model):
        pair, = model.get_parameter(EMBEDDING).sharded.local_global_slices_pairs
        pair.global_slices = (slice(0, VOCAB, 2), slice(None))

    def beyond(model):
        pair, = model.get_parameter(EMBEDDING).sharded.local_global_slices_pairs
        pair.global_slices = (slice(VOCAB - 8, VOCAB + 56), slice(None))
    fails(plain, "unsupported", "final_layer_norm", "NanotronParameter")
    fails(other_name, "missing", "model.nowhere.weight")
    fails(other_shape, "conflict", EMBEDDING, "130", "128")
    fails(stepped, "unsupported", "step")
    fails(beyond, "conflict", EMBEDDING)


if __name__ == "__main__":
    if "--rank" in sys.argv:
        structures.install()
        dist.init_process_group("gloo")
        {"sizes": sizes, "alone": alone, "errors": errors}[sys.argv[-1]]()
        dist.barrier()
        end_rank()
    run_in_folders((under_any_parallel_sizes, weights_that_save_weights_wrote_alone, a_parameter_that_does_not_fit_is_said_on_all_ranks, without_nanotron_it_says_what_to_install))
