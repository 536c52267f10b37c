# SPDX-License-Identifier: Apache-2.0
"""Families that no recipe knows (speech, images), in checkpoints of torch and Megatron: the error says so, names no other families, and what it
advises works: base= with the weights of the model whose names they are."""

import argparse
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
    import transformers
    from safetensors.torch import load_file
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

BUILD = os.environ.get("CKPTFS_BUILD", "build/release")
CKPT = os.path.join(BUILD, "fs", "ckpt")
OTHERS = ("llama", "qwen", "deepseek", "kimi", "torchtitan/", "megatron/")


def models():
    torch.manual_seed(0)
    yield transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, conv_dim=(8, 8), conv_stride=(5, 2),
        conv_kernel=(10, 3), num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2, vocab_size=12))
    yield transformers.ViTForImageClassification(transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=8, patch_size=4))


def ckpt(*args):
    done = subprocess.run([CKPT, *args], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stderr


def save(top, model, prefix):
    """A trainer's checkpoint, with an optimizer, and the model that it began with, of other values. The names are the hub's (ViT has others in
    transformers 5's memory)."""
    model.save_pretrained(top + ".base")
    state = {prefix + name: tensor + 1 for name, tensor in load_file(top + ".base/model.safetensors").items()}
    dcp.save({**state, "optimizer.step": torch.tensor(3)}, checkpoint_id=top + ".run", no_dist=True)
    return top + ".run", top + ".base"


def check_unknown(run, told, *options):
    status, err = ckpt("ls", run, *options)
    assert status == 1 and "no recipe fits" in err and "base=DIR" in err and "view=raw" in err, err
    for text in told:
        assert text in err, (text, err)
    assert not any(other in err for other in OTHERS), err
    assert ckpt("ls", run, "-o", "view=raw") == (0, "")


def torch_checkpoints(top):
    for model in models():
        kind = model.config.model_type
        run, base = save(f"{top}.{kind}", model, "app.model.")
        check_unknown(run, ["app.model." + kind + "."])
        check_unknown(run, [f"model type '{kind}'"], "-o", "model_type=" + kind)


def a_base_with_weights_helps(top):
    """With a trainer's prefix, and without."""
    for model in models():
        for prefix in ("", "app.model."):
            at = f"{top}.{model.config.model_type}.{prefix}"
            run, base = save(at, model, prefix)
            status, err = ckpt("export", run, at + ".out", "-o", "base=" + base)
            assert status == 0, err
            have, want = load_file(at + ".out/model.safetensors"), load_file(base + "/model.safetensors")
            assert sorted(have) == sorted(want), (sorted(have), sorted(want))
            for name, tensor in want.items():
                assert torch.equal(have[name], tensor + 1), name
            type(model).from_pretrained(at + ".out")


def what_a_base_has_and_the_run_lacks_is_told(top):
    model = next(models())
    run, base = save(top, model, "")
    lost = sorted(model.state_dict())[0]
    state = {name: tensor for name, tensor in model.state_dict().items() if name != lost}
    dcp.save(state, checkpoint_id=top + ".less", no_dist=True)
    status, err = ckpt("ls", top + ".less", "-o", "base=" + base)
    assert status == 1 and lost in err, err


def two_models_are_a_conflict(top):
    run, base = save(top, next(models()), "")
    state = load_file(base + "/model.safetensors")
    dcp.save({at + name: tensor for name, tensor in state.items() for at in ("student.", "teacher.")}, checkpoint_id=top + ".two", no_dist=True)
    status, err = ckpt("ls", top + ".two", "-o", "base=" + base)
    assert status == 1 and "two models" in err and "student." in err and "teacher." in err and "part=" in err, err
    for part in ("student", "teacher."):
        check_part(top + ".two", base, part, state, "tensors that are not below")


def an_average_of_the_weights_is_told(top):
    run, base = save(top, next(models()), "")
    state = load_file(base + "/model.safetensors")
    dcp.save({at + name: tensor + (at == "ema.") for name, tensor in state.items() for at in ("model.", "ema.")}, checkpoint_id=top + ".two", no_dist=True)
    check_part(top + ".two", base, None, state, "an average of the weights")
    check_part(top + ".two", base, "ema", {name: tensor + 1 for name, tensor in state.items()}, "tensors that are not below 'ema'")


def check_part(run, base, part, state, words):
    out = f"{run}.{part}"
    status, err = ckpt("export", run, out, "-o", "base=" + base, *(["-o", f"part={part}"] if part else []))
    assert status == 0 and words in err, err
    have = load_file(out + "/model.safetensors")
    assert have.keys() == state.keys() and all(torch.equal(have[name], tensor) for name, tensor in state.items())


def a_megatron_checkpoint(top):
    model = list(models())[1]
    dcp.save({"module." + name: tensor for name, tensor in model.state_dict().items()}, checkpoint_id=top, no_dist=True)
    with open(os.path.join(top, "metadata.json"), "w") as f:
        json.dump({"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}, f)
    torch.save({"args": argparse.Namespace(num_layers=2, hidden_size=16, num_attention_heads=2), "iteration": 1}, os.path.join(top, "common.pt"))
    check_unknown(top, ["format 'megatron'", "vit."])


def a_known_family_is_named(top):
    dcp.save({"tok_embeddings.weight": torch.zeros(8, 4)}, checkpoint_id=top, no_dist=True)
    status, err = ckpt("ls", top, "-o", "model_type=llama")
    assert status == 1 and "no recipe fits" in err and "near are: torchtitan/llama3 expects '" in err and "qwen" not in err, err


if __name__ == "__main__":
    run_in_folders([torch_checkpoints, a_base_with_weights_helps, what_a_base_has_and_the_run_lacks_is_told, two_models_are_a_conflict, an_average_of_the_weights_is_told,
                    a_megatron_checkpoint, a_known_family_is_named])
