# SPDX-License-Identifier: Apache-2.0
"""Nothing is left out without a word: weights that the config does not speak of, and copies of tied weights that are none. Real nanotron
runs whose config was changed, and a state dict as torch's DCP writes it."""

import json
import os
import shutil
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, "..", "load")]
from runner import run_in_folders  # noqa: E402

BUILD = os.environ.get("CKPTFS_BUILD", "build/release")
CKPT = os.path.join(BUILD, "fs", "ckpt")
GOLDEN = os.path.join(HERE, "..", "golden", "nanotron")


def ckpt(*args):
    done = subprocess.run([CKPT, *args], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


def changed(top, case, change):
    """A copy of a golden nanotron run whose model_config.json `change` has edited."""
    shutil.copytree(os.path.join(GOLDEN, case), top)
    path = os.path.join(top, "10", "model_config.json")
    with open(path) as f:
        config = json.load(f)
    change(config)
    with open(path, "w") as f:
        json.dump(config, f)
    return top


def refused_then_allowed(run, words, *options):
    """Every command refuses the run with these words, and leaves nothing behind; with allow_leftover it warns with them on stderr."""
    out = run + ".out"
    for command in (["export", run, out], ["digest", run], ["info", run]):
        status, _, err = ckpt(*command, *options)
        assert status == 1 and words in err and "allow_leftover" in err, (command, status, err)
    assert not os.path.exists(out)
    for command in (["export", run, out], ["digest", run], ["verify", run, out]):
        status, _, err = ckpt(*command, *options, "-o", "allow_leftover")
        assert status == 0 and "warning: " in err and words in err, (command, status, err)


def layers_beyond_the_config(top):
    run = changed(top, "llama_tp2_pp2_tied", lambda c: c.update(num_hidden_layers=2))
    refused_then_allowed(run, "12 tensors of the checkpoint are not part of the model")
    with open(os.path.join(run + ".out", "config.json")) as f:
        assert json.load(f)["num_hidden_layers"] == 2


def shared_experts_without_their_flag(top):
    run = changed(top, "qwen2_moe_epbranch_tp1_dp2_ep2", lambda c: c["moe_config"].update(enable_shared_expert=False))
    refused_then_allowed(run, "tensors of the checkpoint are not part of the model")


def an_output_embedding_that_is_no_copy(top):
    run = changed(top, "llama_tp1_pp1_untied_interleaved", lambda c: c.update(tie_word_embeddings=True))
    refused_then_allowed(run, "'lm_head.weight'")
    run = changed(top + ".option", "llama_tp1_pp1_untied_interleaved", lambda c: None)
    refused_then_allowed(run, "'lm_head.weight'", "-o", "tie_word_embeddings=true")


def state_dict(top, head):
    """What a trainer saves of a small tied Llama whose state dict names both embeddings."""
    import torch
    import torch.distributed.checkpoint as dcp
    import transformers

    config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                                      num_key_value_heads=2, tie_word_embeddings=True)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    state = dict(model.state_dict())
    assert "lm_head.weight" in state
    state["lm_head.weight"] = head(state["model.embed_tokens.weight"])
    dcp.save(state, checkpoint_id=top, no_dist=True)
    model.save_pretrained(top + ".base")
    return top


def both_names_of_one_embedding(top):
    run = state_dict(top, lambda embedding: embedding.clone())
    status, _, err = ckpt("export", run, run + ".out", "-o", "base=" + run + ".base")
    assert status == 0 and "warning" not in err, err
    with open(os.path.join(run + ".out", "model.safetensors"), "rb") as ours, open(os.path.join(run + ".base", "model.safetensors"), "rb") as theirs:
        assert ours.read() == theirs.read()


def two_embeddings_in_a_tied_model(top):
    run = state_dict(top, lambda embedding: embedding + 1)
    refused_then_allowed(run, "'lm_head.weight'", "-o", "base=" + run + ".base")


run_in_folders((layers_beyond_the_config, shared_experts_without_their_flag, an_output_embedding_that_is_no_copy,
                both_names_of_one_embedding, two_embeddings_in_a_tied_model))
