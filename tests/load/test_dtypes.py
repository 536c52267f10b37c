# SPDX-License-Identifier: Apache-2.0
"""In which dtype a load reads: what is stored, cast once to the destination's dtype, also where base= shows the files in BF16; dtype= is obeyed. Of a tensor
that all ranks want in a narrower dtype only that many bytes travel."""

import functools
import json
import os
import struct
import subprocess
import sys
import warnings

from built import end_rank, need_transformers_5, skip, torchrun
from runner import run_in_folders

try:
    import safetensors.torch
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    import transformers
except ImportError as e:
    skip(e)

need_transformers_5(transformers)
import ckptfs  # noqa: E402

warnings.simplefilter("ignore")
CONFIG = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, dtype="bfloat16")
TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@functools.lru_cache(maxsize=None)
def tensors():
    torch.manual_seed(5)
    return {k: torch.randn(t.shape) for k, t in transformers.LlamaForCausalLM(CONFIG).state_dict().items()}


def make(top):
    """A DCP with F32 weights, and the BF16 model from which training began."""
    transformers.LlamaForCausalLM(CONFIG).bfloat16().save_pretrained(os.path.join(top, "base"))
    dcp.save(tensors(), checkpoint_id=os.path.join(top, "run"), no_dist=True)
    return os.path.join(top, "run"), os.path.join(top, "base")


def each_destination_gets_its_own_rounding(top):
    run, base = make(top)
    with ckptfs.open(run, base=base) as f:
        assert {info.dtype for info in f.infos()} == {"BF16"}  # files are the base's
    for dtype in TYPES:
        for options in ({"base": base}, {"view": "raw"}):
            state = {k: torch.zeros_like(t, dtype=dtype) for k, t in tensors().items()}
            ckptfs.load_state_dict(state, run, **options)
            assert all(torch.equal(state[k], t.to(dtype)) for k, t in tensors().items()), (dtype, options)


def written(path, tensors):
    """A file of (name, dtype, shape, bytes), as safetensors writes it, but in this order and with any word for a dtype."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, dtype, shape, data in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + b"".join(t[3] for t in tensors))


def exported(model, top):
    subprocess.run([os.path.join(os.environ["CKPTFS_BUILD"], "fs", "ckpt"), "export", "-q", model, os.path.join(top, "out"), "--weights-only"], check=True)
    with open(os.path.join(model, "model.safetensors"), "rb") as a, open(os.path.join(top, "out", "model.safetensors"), "rb") as b:
        return a.read() == b.read()


def elements_of_less_than_a_byte_are_loaded_in_pairs(top):
    model = os.path.join(top, "model")
    os.makedirs(model)
    stored = {"w": torch.randint(0, 256, (6, 4), dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "scale": torch.arange(6, dtype=torch.uint8).view(torch.float8_e8m0fnu),
              "c": torch.complex(torch.randn(3), torch.randn(3)), "bias": torch.randn(5)}
    safetensors.torch.save_file(stored, os.path.join(model, "model.safetensors"), {"format": "pt"})
    assert exported(model, top)
    state = {k: torch.zeros(t.shape, dtype=torch.uint8).view(t.dtype) if t.element_size() == 1 else torch.zeros_like(t) for k, t in stored.items()}
    ckptfs.load_state_dict(state, model)
    bits = lambda t: t.view(torch.uint8) if t.element_size() == 1 else t
    assert all(torch.equal(bits(state[k]), bits(t)) for k, t in stored.items())
    with ckptfs.open(model) as f, safetensors.safe_open(os.path.join(model, "model.safetensors"), "pt") as theirs:
        for k, t in stored.items():
            ours = f.get_tensor(k)
            assert ours.dtype == t.dtype and torch.equal(bits(ours), bits(theirs.get_tensor(k)))
            assert f.get_slice(k).get_shape() == theirs.get_slice(k).get_shape() and f.get_slice(k).get_dtype() == theirs.get_slice(k).get_dtype()
        w = f.get_slice("w")
        assert w.get_shape() == [6, 8] and torch.equal(bits(w[2:4, 2:6]), bits(stored["w"])[2:4, 1:3]) and torch.equal(bits(w[1]), bits(stored["w"])[1])
        for index in ((0, slice(1, 3)), (0, slice(0, 3)), (0, 4)):
            try:
                w[index]
            except IndexError as e:
                assert "whole bytes" in str(e)
            else:
                raise AssertionError(index)


def what_torch_has_no_dtype_for_is_copied_and_said(top):
    model = os.path.join(top, "model")
    os.makedirs(model)
    f6, odd = bytes(range(24)), bytes(range(7))
    written(os.path.join(model, "model.safetensors"), [("odd", "F7_X", [2, 4], odd), ("bias", "F32", [2], b"12345678"), ("a", "F6_E3M2", [2, 8], f6[12:]), ("b", "F6_E2M3", [2, 8], f6[:12])])
    assert exported(model, top)
    with ckptfs.open(model) as f:
        assert f.get_slice("a").get_shape() == [2, 8] and torch.equal(f.get_tensor("bias").view(torch.uint8), torch.frombuffer(bytearray(b"12345678"), dtype=torch.uint8))
        assert f.get_slice("odd").get_shape() == [2, 4] and f.get_slice("odd").get_dtype() == "F7_X"
        for name, word in (("a", "F6_E3M2"), ("odd", "F7_X")):
            try:
                f.get_tensor(name)
            except ckptfs.CkptError as e:
                assert word in str(e), e
            else:
                raise AssertionError(name)
    state = {"bias": torch.zeros(2)}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        dcp.load(state, storage_reader=ckptfs.torch.StorageReader(model), no_dist=True)
    assert state["bias"].numpy().tobytes() == b"12345678" and any("left out: 'odd'" in str(w.message) for w in told), told


def dtype_is_obeyed(top):
    run, base = make(top)
    for options in ({"dtype": "bfloat16", "view": "raw"}, {"dtype": "bfloat16", "base": base}):
        state = {k: torch.zeros_like(t) for k, t in tensors().items()}
        ckptfs.load_state_dict(state, run, **options)
        assert all(torch.equal(state[k], t.bfloat16().float()) for k, t in tensors().items()), options


def a_layout_is_the_view_s(top):
    run, base = make(top)
    parts = ckptfs.load_layout(run, "tp=1", base=base)
    assert all(torch.equal(parts[k], t.bfloat16()) for k, t in tensors().items())


def one_tensor_twice(top):
    """In two dtypes: the wider one is read."""
    run, base = make(top)
    name, t = next(iter(tensors().items()))
    wide, narrow, part = torch.zeros_like(t), torch.zeros_like(t, dtype=torch.bfloat16), torch.zeros(3, 5, dtype=torch.float64)
    ckptfs.load_boxes([(name, [0, 0], wide), (name, [0, 0], narrow), (name, [2, 1], part)], run, base=base)
    assert torch.equal(wide, t) and torch.equal(narrow, t.bfloat16()) and torch.equal(part, t[2:5, 1:6].double())


def reloaded(top):
    run, base = make(top)
    state = {k: torch.zeros_like(t) for k, t in tensors().items()}
    with ckptfs.Reloader(state, run, base=base) as weights:
        for _ in range(2):
            for t in state.values():
                t.zero_()
            weights.reload()
            assert all(torch.equal(state[k], t) for k, t in tensors().items())


def on_two_ranks(top):
    make(top)
    torchrun(2, __file__, top)


def rank_of_two(top):
    run, base, rank = os.path.join(top, "run"), os.path.join(top, "base"), dist.get_rank()
    stored = sum(4 * t.numel() for t in tensors().values())
    for dtypes in ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16), (torch.float32, torch.bfloat16)):
        for options in ({"base": base}, {"view": "raw"}):
            state = {k: torch.zeros_like(t, dtype=dtypes[rank]) for k, t in tensors().items()}
            got = ckptfs.load_state_dict(state, run, readers="once", **options)
            assert all(torch.equal(state[k], t.to(dtypes[rank])) for k, t in tensors().items()), (dtypes, options)
            narrow = torch.float32 not in dtypes
            assert got.stats["sent_bytes"] <= stored // (2 if narrow else 1), (dtypes, options, got.stats)
            assert got.stats["read_bytes"] <= 1.1 * stored, (dtypes, got.stats)


if __name__ == "__main__":
    if "--rank" in sys.argv:
        dist.init_process_group("gloo")
        rank_of_two(sys.argv[-1])
        dist.barrier()
        end_rank()
    run_in_folders((each_destination_gets_its_own_rounding, elements_of_less_than_a_byte_are_loaded_in_pairs, what_torch_has_no_dtype_for_is_copied_and_said, dtype_is_obeyed, a_layout_is_the_view_s, one_tensor_twice, reloaded, on_two_ranks))
