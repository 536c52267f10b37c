# SPDX-License-Identifier: Apache-2.0
"""A Megatron job asks for its own names and boxes of a Hugging Face directory: it gets what Megatron itself saved of the same model."""

import os
import sys

from built import MEGATRON, end_rank, skip, torchrun
from runner import run

try:
    import torch
    import torch.distributed as dist
except ImportError as e:
    skip(e)

import ckptfs  # noqa: E402

TP = 2
VIEW = dict(view="megatron", tp=TP, make_vocab_size_divisible_by=8)


def saved():
    """{name of a module's tensor: the whole tensor}, of Megatron's own checkpoint, in which equal layers are one tensor."""
    whole = {}
    with ckptfs.open(os.path.join(MEGATRON, "run"), view="raw") as f:
        for name in f.keys():
            t, layers = f.get_tensor(name), "decoder.layers."
            if name.startswith(layers):
                whole.update((f"{layers}{i}.{name[len(layers):]}", part) for i, part in enumerate(t))
            else:
                whole[name] = t
    return whole


def boxes_of(name, t, rank):
    """[(offset, size)]: what a tensor-parallel rank has; gate and up are divided one by one."""
    def part(dim, lo, n):
        offset, size = [0] * t.dim(), list(t.shape)
        offset[dim], size[dim] = lo + rank * n // TP, n // TP
        return offset, size

    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return [part(1, 0, t.shape[1])]
    if name.endswith("linear_fc1.weight"):
        half = t.shape[0] // 2
        return [part(0, 0, half), part(0, half, half)]
    if name.endswith(("linear_qkv.weight", "embeddings.weight", "output_layer.weight")):
        return [part(0, 0, t.shape[0])]
    return [([0] * t.dim(), list(t.shape))]


def rank():
    dist.init_process_group("gloo")
    whole, wanted = saved(), []
    vocab = len(ckptfs.open(os.path.join(MEGATRON, "expected")).get_tensor("lm_head.weight"))
    for name, t in whole.items():
        for offset, size in boxes_of(name, t, dist.get_rank()):
            wanted.append((name, offset, torch.full(size, 7, dtype=t.dtype)))
    stats = ckptfs.load_boxes(wanted, os.path.join(MEGATRON, "expected"), readers="once", **VIEW)
    for name, offset, got in wanted:
        want = whole[name][tuple(slice(lo, lo + n) for lo, n in zip(offset, got.shape))]
        rows = max(min(vocab - offset[0], len(got)), 0) if name.startswith(("output_layer", "embedding")) else len(got)
        assert torch.equal(got[:rows], want[:rows]), name  # Megatron's padding is random
        assert not got[rows:].any(), name
    assert stats["read_bytes"] <= 1.02 * stats["unique_bytes"], stats


if __name__ == "__main__":
    if "--rank" in sys.argv:
        rank()
        end_rank()
    run([("boxes_under_megatrons_names", lambda: torchrun(TP, __file__))])
