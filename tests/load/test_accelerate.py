# SPDX-License-Identifier: Apache-2.0
"""ckptfs.accelerate against accelerate's own: fsdp2_prepare_model, under torchrun and gloo, gives the same parameters, shard by shard. On the CPU
prepare() never chooses FSDP, so its plugin is given to fsdp2_prepare_model, which prepare() calls."""

import os
import sys
import warnings

from built import NANOTRON, end_rank, need_transformers_5, skip, torchrun
from runner import run_in_folders

try:
    import accelerate
    import torch
    import torch.distributed as dist
    import transformers
    from accelerate.utils import FullyShardedDataParallelPlugin, fsdp_utils
except ImportError as e:
    skip(e)
need_transformers_5(transformers)

from ckptfs.accelerate import fsdp2_load_full_state_dict, loading_from  # noqa: E402

warnings.simplefilter("ignore")


def a_tied_model_as_accelerate_gives_it(top):
    torchrun(2, __file__, "llama_tp2_pp2_tied")


def an_untied_model_on_three_ranks(top):
    torchrun(3, __file__, "llama_tp1_pp1_untied_interleaved")


def what_the_run_lacks_is_said(top):
    class Accelerator:
        is_main_process = True
    model = torch.nn.Linear(3, 3)
    before = model.weight.clone()
    try:
        fsdp2_load_full_state_dict(Accelerator(), model, os.path.join(NANOTRON, "llama_tp2_pp2_tied"))
    except RuntimeError as e:
        assert "Missing key(s)" in str(e), e
    else:
        raise AssertionError("no error")
    assert torch.equal(model.weight, before)


def a_block_in_which_nothing_is_loaded_is_an_error(top):
    try:
        with loading_from(os.path.join(NANOTRON, "llama_tp2_pp2_tied")):
            pass
    except RuntimeError as e:
        assert "cpu_ram_efficient_loading" in str(e), e
    else:
        raise AssertionError("no error")


def prepared(accelerator, folder, fill):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if fill is not None:
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(fill)
    return fsdp_utils.fsdp2_prepare_model(accelerator, model)


def one_rank(case):
    run, expected = os.path.join(NANOTRON, case), os.path.join(NANOTRON, case + ".expected")
    accelerator = accelerate.Accelerator(cpu=True)
    assert accelerator.num_processes == dist.get_world_size() > 1
    # cpu_offload pins memory, which torch can't do without an accelerator
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, cpu_ram_efficient_loading=True, auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"], reshard_after_forward=True, cpu_offload=False)
    theirs = prepared(accelerator, expected, None)
    with loading_from(run):
        ours = prepared(accelerator, expected, 7.0)
    a, b = theirs.state_dict(), ours.state_dict()
    assert list(a) == list(b)
    for k in a:
        assert a[k].placements == b[k].placements and a[k].dtype == b[k].dtype and torch.equal(a[k].to_local(), b[k].to_local()), k
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)
    fsdp2_load_full_state_dict(accelerator, ours, run, cpu_offload=True)
    assert all(t.device.type == "cpu" for t in ours.state_dict().values())
    assert fsdp_utils.fsdp2_load_full_state_dict.__module__ == "accelerate.utils.fsdp_utils"


if __name__ == "__main__":
    if "--rank" in sys.argv:
        one_rank(sys.argv[-1])
        end_rank()
    run_in_folders((a_tied_model_as_accelerate_gives_it, an_untied_model_on_three_ranks, what_the_run_lacks_is_said,
                    a_block_in_which_nothing_is_loaded_is_an_error))
