# SPDX-License-Identifier: Apache-2.0
"""What a view tells beside single tensors: steps, files, config, explain, items; and boxes into given memory, alone and on two ranks. The oracle
is the official conversion, or the tool."""

import json
import os
import random
import shutil
import subprocess
import sys
import threading

from built import BUILD, NANOTRON, end_rank, skip, torchrun
from runner import run_in_folders

LLAMA = os.path.join(NANOTRON, "llama_tp2_pp2_tied")
CKPT = os.path.join(BUILD, "fs", "ckpt")

try:
    import torch
    import torch.distributed as dist
    from safetensors.torch import load_file
except ImportError as e:
    skip(e)

import ckptfs  # noqa: E402


def official():
    return load_file(os.path.join(LLAMA + ".expected", "model.safetensors"))


def error_of(code, fn, *args, **kwargs):
    try:
        fn(*args, **kwargs)
    except ckptfs.CkptError as e:
        assert e.code == code, e
        return str(e)
    raise AssertionError("no error")


def steps_are_named_as_they_are_now(top):
    for step in ("5", "10", "100"):
        shutil.copytree(os.path.join(LLAMA, "10"), os.path.join(top, step), copy_function=shutil.copyfile)
    with ckptfs.open(top) as f:
        assert f.steps() == ["5", "10", "100"]
        shutil.rmtree(os.path.join(top, "5"))
        assert f.steps() == ["10", "100"]
        assert [ckptfs.open(top, step=s).config["model_type"] for s in f.steps()] == ["llama", "llama"]
    with ckptfs.open(os.path.join(top, "10")) as f:
        assert f.steps() == []
    error_of("usage", f.steps)


def files_are_those_of_an_export(top):
    subprocess.run([CKPT, "export", "-q", LLAMA, top], check=True)
    want = sorted(os.path.relpath(os.path.join(d, n), top) for d, _, names in os.walk(top) for n in names)
    with ckptfs.open(LLAMA) as f:
        assert sorted(f.files()) == want
        for name in want:
            with open(os.path.join(top, name), "rb") as file:
                assert f.read(name) == file.read(), name
        assert f.config == json.loads(f.read("config.json"))
        assert "tokenizer.json" in error_of("missing", f.read, "tokenizer.json")
        error_of("missing", f.read, "")
    with ckptfs.open(LLAMA, view="raw") as f:
        assert f.config == {}


def explain_is_what_the_tool_says(top):
    with ckptfs.open(LLAMA) as f:
        for name in ("model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight"):
            said = subprocess.run([CKPT, "explain", "--json", LLAMA, name], check=True, capture_output=True, text=True).stdout
            assert f.explain(name) == json.loads(said)
        error_of("missing", f.explain, "nobody")


def items_are_the_tensors_in_the_order_of_the_files(top):
    want = official()
    for options in ({}, {"max_shard_size": "20KB"}):
        with ckptfs.open(LLAMA, **options) as f:
            for prefetch in (0, 1, 7):
                got = list(f.items(prefetch=prefetch))
                assert {n for n, _ in got} == set(want)
                assert all(torch.equal(t, want[n]) and t.dtype == want[n].dtype for n, t in got)
                assert [n for n, _ in got] == [n for n, _ in f.items(prefetch=0)]
            some = ["model.norm.weight", "model.embed_tokens.weight", "model.norm.weight"]
            assert sorted(n for n, _ in f.items(some)) == sorted(set(some))
            error_of("missing", f.items, ["nobody"])
    out = os.path.join(top)
    subprocess.run([CKPT, "export", "-q", LLAMA, out, "-o", "max_shard_size=20KB"], check=True)
    with open(os.path.join(out, "model.safetensors.index.json"), encoding="utf-8") as file:
        files = json.load(file)["weight_map"]
    with ckptfs.open(LLAMA, max_shard_size="20KB") as f:
        in_order = [files[n] for n, _ in f.items()]
        assert in_order == sorted(in_order) and len(set(in_order)) > 1


def items_that_are_given_up_leave_no_thread(top):
    with ckptfs.open(LLAMA) as f:
        for i, _ in enumerate(f.items(prefetch=4)):
            if i == 2:
                break
    f.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("ckptfs-ahead")]


def random_boxes(want, seed, n=60):
    """Boxes of tensors, and destinations of odd strides and dtypes."""
    r, boxes = random.Random(seed), []
    for _ in range(n):
        name = r.choice(sorted(want))
        lo = [r.randrange(s) for s in want[name].shape]
        size = [r.randint(1, s - k) for s, k in zip(want[name].shape, lo)]
        dtype = r.choice([torch.bfloat16, torch.float32])
        holder = torch.full([2 * s for s in size], 7.0, dtype=dtype)
        boxes.append((name, tuple(lo), holder[tuple(slice(0, 2 * s, 2) for s in size)]))
    return boxes


def check_boxes(want, boxes):
    for name, lo, tensor in boxes:
        part = want[name][tuple(slice(k, k + s) for k, s in zip(lo, tensor.shape))]
        assert torch.equal(tensor, part.to(tensor.dtype)), name


def boxes_get_what_they_ask_for(top):
    want, boxes = official(), random_boxes(official(), 1)
    stats = ckptfs.load_boxes(boxes, LLAMA)
    check_boxes(want, boxes)
    assert stats["needed_bytes"] > 0
    with ckptfs.open(LLAMA) as f:
        boxes = random_boxes(want, 2)
        ckptfs.load_boxes(boxes, f)
        check_boxes(want, boxes)
    assert ckptfs.load_boxes([], LLAMA)["needed_bytes"] == 0


def boxes_beyond_their_tensor_are_clipped_or_refused(top):
    name, want = "model.embed_tokens.weight", official()["model.embed_tokens.weight"]
    rows, columns = want.shape
    tensor = torch.full((rows, columns), 7.0, dtype=want.dtype)
    assert "clip=True" in error_of("usage", ckptfs.load_boxes, [(name, (8, 0), tensor)], LLAMA)
    assert bool((tensor == 7).all())
    ckptfs.load_boxes([(name, (8, 0), tensor)], LLAMA, clip=True)
    assert torch.equal(tensor[:-8], want[8:]) and bool((tensor[-8:] == 7).all())
    beyond = torch.full((4, columns), 7.0, dtype=want.dtype)
    ckptfs.load_boxes([(name, (rows + 3, 0), beyond)], LLAMA, clip=True)
    assert bool((beyond == 7).all())
    error_of("usage", ckptfs.load_boxes, [(name, (-1, 0), tensor)], LLAMA, clip=True)
    error_of("usage", ckptfs.load_boxes, [(name, (0, 0, 0), tensor[None])], LLAMA)
    error_of("missing", ckptfs.load_boxes, [("nobody", (0, 0), tensor)], LLAMA)
    for wrong in ([(name, (0,), tensor)], [(name, (0, 0), torch.empty(2, 2, device="meta"))]):
        try:
            ckptfs.load_boxes(wrong, LLAMA)
        except ValueError:
            continue
        raise AssertionError("no error")


def boxes_on_two_ranks_are_read_once(top):
    torchrun(2, __file__)


def one_of_two_ranks():
    dist.init_process_group("gloo")
    rank, want = dist.get_rank(), official()
    boxes = random_boxes(want, 3) if rank == 0 else []  # a rank may want nothing
    ckptfs.load_boxes(boxes, LLAMA)
    check_boxes(want, boxes)
    whole = [(n, (0,) * t.dim(), torch.empty_like(t)) for n, t in want.items()]  # both the same
    stats = ckptfs.load_boxes(whole, LLAMA, readers="once")
    check_boxes(want, whole)
    assert stats["needed_bytes"] == 2 * stats["unique_bytes"] and stats["read_bytes"] <= 1.05 * stats["unique_bytes"], stats
    tensor = torch.zeros_like(want["model.norm.weight"])
    name = "nobody" if rank == 1 else "model.norm.weight"
    error_of("missing", ckptfs.load_boxes, [(name, (0,), tensor)], LLAMA)


if __name__ == "__main__":
    if "--rank" in sys.argv:
        one_of_two_ranks()
        end_rank()
    run_in_folders((steps_are_named_as_they_are_now, files_are_those_of_an_export, explain_is_what_the_tool_says,
                    items_are_the_tensors_in_the_order_of_the_files, items_that_are_given_up_leave_no_thread, boxes_get_what_they_ask_for,
                    boxes_beyond_their_tensor_are_clipped_or_refused, boxes_on_two_ranks_are_read_once))
