# SPDX-License-Identifier: Apache-2.0
"""A family that the tree does not know, added with files only, at run time: `recipe=DIR` makes its model of a framework's checkpoint (written by
torch), recognises it under its own names, and divides it over the ranks of a layout."""

import json
import os
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, "..", "load")]
from runner import run_in_folders  # noqa: E402

try:
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

BUILD = os.environ.get("CKPTFS_BUILD", "build/release")
CKPT = os.path.join(BUILD, "fs", "ckpt")
LOAD_RANKS = os.path.join(BUILD, "tests", "load_ranks")

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN, VOCAB, LAYERS = 8, 2, 4, 32, 24, 40, 2
CONFIG = {"model_type": "nova", "architectures": ["NovaForCausalLM"], "hidden_size": HIDDEN, "n_rays": HEADS, "n_beams": KV_HEADS,
          "ray_size": HEAD_DIM, "corona_size": FFN, "num_hidden_layers": LAYERS, "vocab_size": VOCAB, "tie_word_embeddings": False}

FILES = {
    "models/nova.json": {
        "model_types": ["nova"], "config": {"architectures": ["NovaForCausalLM"], "model_type": "nova"},
        "needs": ["hidden_size", "n_rays", "n_beams", "ray_size", "corona_size", "num_hidden_layers", "vocab_size", "tie_word_embeddings"],
        "dims": {"vocab": "vocab_size", "hidden": "hidden_size", "ffn": "corona_size", "layer": "num_hidden_layers", "heads": "n_rays",
                 "kv_heads": "n_beams", "head_dim": "ray_size"},
        "tensors": [
            {"when": "not tie_word_embeddings", "tied": "nova.lexicon.weight", "tensors": ["verdict.weight  vocab/tp hidden"]},
            "nova.lexicon.weight  vocab/tp hidden",
            {"each": "layer", "at": "nova.strata.{layer}.", "tensors": [
                "gaze.key.weight  (kv_heads head_dim)/tp* hidden", "gaze.query.weight  (heads head_dim)/tp hidden",
                "gaze.value.weight  (kv_heads head_dim)/tp* hidden", "corona.weight  ffn/tp hidden"]}]},
    "types/nova.json": {
        "model_types": ["nova"], "embedding": "nova.lexicon.weight", "output": "verdict.weight", "ties": {"verdict.weight": None},
        "layers": "nova.strata.", "stages": {"embedding": ["lexicon"], "last": ["verdict"], "layers": ["strata."]}},
    "forge/nova.json": {
        "format": "dcp", "model": "nova", "has": ["words"],
        "config": {"hidden_size": "shape(words, 1)", "vocab_size": "shape(words, 0)", "num_hidden_layers": "len(layers(s.{layer}.gaze))",
                   "corona_size": "shape(s.{layer}.corona, 0)", "n_rays": str(HEADS), "n_beams": str(KV_HEADS), "ray_size": str(HEAD_DIM),
                   "tie_word_embeddings": False},
        "rules": [
            {"from": "words", "to": "nova.lexicon.weight"}, {"from": "judge", "to": "verdict.weight"},
            {"at": ["s.{layer}.", "nova.strata.{layer}."], "rules": [
                {"from": "gaze  (q=heads head_dim + k=kv_heads head_dim + v=kv_heads head_dim) h",
                 "to": ["gaze.query.weight  (q head_dim) h", "gaze.key.weight  (k head_dim) h", "gaze.value.weight  (v head_dim) h"]},
                {"from": "corona  f h", "to": "corona.weight  f h"}]}]},
}


def write_files(top):
    for name, value in FILES.items():
        path = os.path.join(top, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as f:
            json.dump(value, f)
    return top


def forge_state():
    torch.manual_seed(0)
    state = {"words": torch.randn(VOCAB, HIDDEN), "judge": torch.randn(VOCAB, HIDDEN)}
    for i in range(LAYERS):
        state[f"s.{i}.gaze"] = torch.randn((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN)
        state[f"s.{i}.corona"] = torch.randn(FFN, HIDDEN)
    return state


def hub_state(state):
    """What the recipe must make of it, by torch's own operations."""
    out = {"nova.lexicon.weight": state["words"], "verdict.weight": state["judge"]}
    for i in range(LAYERS):
        q, k, v = state[f"s.{i}.gaze"].split([HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM])
        at = f"nova.strata.{i}."
        out.update({at + "gaze.query.weight": q, at + "gaze.key.weight": k, at + "gaze.value.weight": v, at + "corona.weight": state[f"s.{i}.corona"]})
    return out


def ckpt(*args):
    done = subprocess.run([CKPT, *args], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stderr


def check_export(run, want, options):
    out = run + ".out"
    status, err = ckpt("export", run, out, *options)
    assert status == 0, err
    have = load_file(os.path.join(out, "model.safetensors"))
    assert sorted(have) == sorted(want), (sorted(have), sorted(want))
    for name, tensor in want.items():
        assert torch.equal(have[name], tensor), name
    with open(os.path.join(out, "config.json")) as f:
        config = json.load(f)
    assert config["model_type"] == "nova" and config["n_beams"] == KV_HEADS, config


def save(top, state):
    dcp.save(state, checkpoint_id=top, no_dist=True)
    return top


def a_framework_of_its_own(top):
    run = save(top + ".run", forge_state())
    status, err = ckpt("ls", run)
    assert status == 1 and "no recipe fits" in err, err
    check_export(run, hub_state(forge_state()), ["-o", "recipe=" + write_files(top + ".files")])


def a_model_under_its_own_names(top):
    """As a trainer saves it: below a prefix, with an optimizer, the tied output twice."""
    want = hub_state(forge_state())
    want["verdict.weight"] = want["nova.lexicon.weight"]
    state = {"app.model." + name: tensor for name, tensor in want.items()}
    state["optimizer.step"] = torch.tensor(3)
    run, base = save(top + ".run", state), top + ".base"
    os.makedirs(base)
    with open(os.path.join(base, "config.json"), "w") as f:
        json.dump(dict(CONFIG, tie_word_embeddings=True), f)
    options = ["-o", "base=" + base]
    status, err = ckpt("ls", run, *options)
    assert status == 1 and "recipe" in err, err
    del want["verdict.weight"]
    check_export(run, want, options + ["-o", "recipe=" + write_files(top + ".files")])


def layouts(run, layout, nrank, options):
    """{(rank, tensor): [box]}, or the error's text; the program compares every byte."""
    done = subprocess.run([LOAD_RANKS, *options, run, "--", f"{layout}:{nrank}:once"], capture_output=True, text=True, timeout=120,
                          env=dict(os.environ, LOAD_WANTS="1"))
    if done.returncode:
        return done.stdout + done.stderr
    found = {}
    for line in done.stdout.splitlines():
        if line.startswith("want "):
            _, rank, name, box = line.split(" ")
            found.setdefault((int(rank), name), []).append(box)
    return found


def layouts_by_its_files(top):
    options = ["-o", "recipe=" + write_files(top + ".files")]
    run = save(top + ".run", forge_state())
    at = "nova.strata.1.gaze."
    found = layouts(run, "tp=4", 4, options)
    assert isinstance(found, dict), found
    assert found[2, at + "query.weight"] == [f"16+8,0+{HIDDEN}"], found[2, at + "query.weight"]
    assert found[1, at + "key.weight"] == [f"0+4,0+{HIDDEN}"] and found[2, at + "key.weight"] == [f"4+4,0+{HIDDEN}"]  # two ranks share a head
    found = layouts(run, "pp=2", 2, options)
    assert (0, "nova.lexicon.weight") in found and (1, "nova.lexicon.weight") not in found
    assert (1, "verdict.weight") in found and (0, "verdict.weight") not in found
    assert (1, at + "query.weight") in found and (0, at + "query.weight") not in found
    assert "no multiple" in layouts(run, "tp=16", 16, options)


def an_exported_model_too(top):
    """A hub directory needs no recipe; its layout does."""
    files = write_files(top + ".files")
    run = save(top + ".run", forge_state())
    status, err = ckpt("export", run, top + ".hub", "-o", "recipe=" + files)
    assert status == 0, err
    assert "no model file says" in layouts(top + ".hub", "tp=2", 2, [])
    found = layouts(top + ".hub", "tp=2", 2, ["-o", "recipe=" + files])
    assert found[1, "nova.strata.0.corona.weight"] == [f"{FFN // 2}+{FFN // 2},0+{HIDDEN}"], found


def its_files_go_first(top):
    """A recipe for a checkpoint that a built-in one fits too."""
    files = write_files(top + ".files")
    state = {"tok_embeddings.weight": torch.randn(VOCAB, HIDDEN), "layers.0.attention_norm.weight": torch.randn(HIDDEN),
             "layers.0.feed_forward.w1.weight": torch.randn(FFN, HIDDEN)}
    mine = {"format": "dcp", "has": ["tok_embeddings.weight"], "model": {"model_types": ["star"], "tensors": ["a  vocab hidden"],
            "config": {"model_type": "star"}, "dims": {"vocab": "vocab_size", "hidden": "hidden_size"}},
            "config": {"vocab_size": "shape(tok_embeddings.weight, 0)", "hidden_size": "shape(tok_embeddings.weight, 1)"},
            "ignores": [{"names": "^layers", "why": "of no use"}], "rules": [{"from": "tok_embeddings.weight", "to": "a"}]}
    with open(os.path.join(files, "forge", "star.json"), "w") as f:
        json.dump(mine, f)
    run = save(top + ".run", state)
    status, err = ckpt("ls", run)
    assert status == 1 and "what a llama model needs" in err, err
    status, err = ckpt("export", run, top + ".out", "-o", "recipe=" + files)
    assert status == 0, err
    assert list(load_file(os.path.join(top + ".out", "model.safetensors"))) == ["a"]


def errors_name_the_file(top):
    files = write_files(top + ".files")
    run = save(top + ".run", forge_state())
    with open(os.path.join(files, "types", "nova.json"), "w") as f:
        f.write('{"model_types": ["nova"], "embeding": "x"}')
    status, err = ckpt("ls", run, "-o", "recipe=" + files)
    assert status == 1 and files in err and "types/nova: embeding: unknown key" in err, err
    os.makedirs(top + ".empty")
    status, err = ckpt("ls", run, "-o", "recipe=" + top + ".empty")
    assert status == 1 and "holds no recipe" in err and "models/NAME.json" in err, err


if __name__ == "__main__":
    run_in_folders([a_framework_of_its_own, a_model_under_its_own_names, layouts_by_its_files, an_exported_model_too, its_files_go_first,
                    errors_name_the_file])
