# SPDX-License-Identifier: Apache-2.0
"""What tests of optimizers' states share: moments whose values tell their place (exp_avg is twice the master, exp_avg_sq its square), in
models that torch trains, and in runs of the frameworks' own whose optimizers' files torch writes anew."""

import glob
import os
import shutil

import torch
import torch.distributed.checkpoint as dcp
import transformers as tf
from tensor_case import ViewCase
from torch.distributed.checkpoint import FileSystemReader

tf.utils.logging.disable_progress_bar()
tf.utils.logging.set_verbosity_error()
RUNS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "load", "runs")
SIZES = dict(vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
MOMENTS = {"exp_avg": lambda x: 2 * x, "exp_avg_sq": lambda x: x * x}


def trained(config, frozen=True):
    """A model after one step of AdamW, whose moments tell their place, and whose last norm is frozen."""
    torch.manual_seed(1)
    model = tf.AutoModelForCausalLM.from_config(config)
    model.model.norm.weight.requires_grad_(not frozen)
    groups = [{"params": [p for p in model.parameters() if p.requires_grad and p.ndim > 1], "weight_decay": 0.1},
              {"params": [p for p in model.parameters() if p.requires_grad and p.ndim == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()
    for p, state in optimizer.state.items():
        for kind, of in MOMENTS.items():
            state[kind] = of(p.detach())
    return model, optimizer


def megatron_run(run):
    """Megatron's run with these moments, as the step of run: all its tensors."""
    step, out = os.path.join(RUNS, "megatron", "iter_0000010"), os.path.join(run, "iter_0000010")
    metadata = FileSystemReader(step).read_metadata().state_dict_metadata
    whole = {k: torch.empty(m.size, dtype=m.properties.dtype) for k, m in metadata.items() if hasattr(m, "chunks") and m.size.numel()}
    dcp.load(whole, checkpoint_id=step, no_dist=True)
    for k in [k for k in whole if k.startswith("optimizer.state.fp32_param.")]:
        for kind, of in MOMENTS.items():
            whole[k.replace("fp32_param", kind)] = of(whole[k])
    dcp.save(whole, checkpoint_id=out, no_dist=True)
    for file in ("common.pt", "metadata.json"):
        shutil.copy(os.path.join(step, file), out)
    return whole


def nanotron_run(run, **group):
    """nanotron's run with these moments, and with these keys of its group: the paths of its optimizer's shards."""
    shutil.copytree(os.path.join(RUNS, "nanotron", "20"), run)
    paths = sorted(glob.glob(os.path.join(run, "optimizer", "optimizer_pp-*.pt")))
    for path in paths:
        held = torch.load(path, weights_only=False)
        held["names"] = dict(enumerate(held["gradient_accumulator"]))
        held["state"] = {i: {"step": torch.tensor(7.), **{kind: of(held["gradient_accumulator"][n]) for kind, of in MOMENTS.items()}}
                         for i, n in held["names"].items()}
        held["param_groups"][0].update(group)
        torch.save(held, path)
    return paths


class StatesCase(ViewCase):
    def moments_are_of(self, run, masters, *options):
        for kind, of in MOMENTS.items():
            self.same(self.view(run, f"state={kind}", *options)[0], {k: of(t) for k, t in masters.items()})
