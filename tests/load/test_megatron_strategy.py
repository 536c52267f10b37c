# SPDX-License-Identifier: Apache-2.0
"""ckptfs.megatron under the published megatron-core, the oldest and the newest pinned version: what dist_checkpointing.load gives is what it gives with Megatron's own
strategy. Ranks of a gloo group save under one cut and load under another: layers, experts, padded vocabularies, objects, factories; zarr."""

import os
import subprocess
import sys
import warnings

from built import GOLDEN, PACKAGE, end_rank, skip, torchrun
from runner import run_in_folders

ZARR = os.path.join(GOLDEN, "megatron", "z12_tp2pp2")
CORES = [p for p in os.environ.get("CKPTFS_MEGATRON", "").split(":") if os.path.isdir(p)]
CORES = CORES[:1] + CORES[1:][-1:]

try:
    import numpy
    import torch
    import torch.distributed as dist
    from safetensors.torch import load_file
except ImportError as e:
    skip(e)
if not CORES:
    skip("CKPTFS_MEGATRON names no megatron-core")

warnings.simplefilter("ignore")


def ranks(case, top):
    os.makedirs(top, exist_ok=True)
    for core in CORES:
        folder = os.path.join(top, os.path.basename(core))
        os.makedirs(folder)
        torchrun(2, __file__, case, folder, PYTHONPATH=f"{core}:{PACKAGE}")


def torch_dist_as_megatron_reads_it(top):
    ranks("torch_dist", top)


def state_dicts_without_tensors(top):
    ranks("objects", top)


def what_a_save_strategy_writes_by_itself(top):
    ranks("without_config", top)


def zarr_which_megatron_no_longer_reads(top):
    ranks("zarr", top)


def without_megatron_it_says_what_to_install(top):
    done = subprocess.run([sys.executable, "-c", "import ckptfs.megatron as m\ntry:\n m.LoadShardedStrategy()\nexcept ImportError as e:\n print(e)"],
                          capture_output=True, text=True, env=dict(os.environ, PYTHONPATH=PACKAGE))
    assert "pip install megatron-core" in done.stdout, done


def whole(name, *shape, dtype=torch.bfloat16):
    g = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randn(shape, generator=g).to(dtype)


def state(fill, cut, vocab=96):
    """A sharded state dict as Megatron's modules make it. `cut`: the dimension that the two ranks share out ("tp" on columns, "pp" on layers)."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
    rank = dist.get_rank()

    def local(t, dim):
        t = t.chunk(2, dim)[rank].contiguous()
        return t.clone() if fill else torch.full_like(t, 7.0)

    out = {}
    embedding = whole("embedding", 96, 16)
    if vocab != 96:
        embedding = torch.cat([embedding, torch.full((vocab - 96, 16), 3.0, dtype=embedding.dtype)])
    mine = embedding.chunk(2, 0)[rank].contiguous().clone()
    if not fill:
        mine[: max(0, min(len(mine), 96 - rank * len(mine)))] = 7.0
    out["embedding.weight"] = ShardedTensor.from_rank_offsets("embedding.weight", mine, (0, rank, 2), allow_shape_mismatch=True)
    for layer in range(4):
        if cut == "pp" and layer // 2 != rank:
            continue
        t = whole(f"layer{layer}", 24, 16)
        if cut == "pp":
            data = t.clone() if fill else torch.full_like(t, 7.0)
            sharded = ShardedTensor.from_rank_offsets("layers.weight", data, (0, layer, 4), prepend_axis_num=1)
        else:
            sharded = ShardedTensor.from_rank_offsets("layers.weight", local(t, 0), (0, layer, 4), (1, rank, 2), prepend_axis_num=1)
        out[f"layers.{layer}.weight"] = sharded
    row = whole("row", 10, 32, dtype=torch.float32)
    out["row"] = [ShardedTensor.from_rank_offsets("row.weight", local(row, 1), (1, rank, 2))]
    norm = whole("norm", 16)
    out["norm"] = ShardedTensor.from_rank_offsets("norm.weight", norm.clone() if fill else torch.full_like(norm, 7.0), replica_id=rank)
    out["empty"] = ShardedTensor.from_rank_offsets("norm.weight", norm.clone() if fill else torch.full_like(norm, 7.0), replica_id=rank + 2)
    out["object"] = ShardedObject("rng", {"seed": 3, "rank": rank} if fill else None, (2,), (rank,), replica_id=0)

    def build(key, t, replica_id, _):
        return [ShardedTensor.from_rank_offsets(f"{key}.{half}", part.contiguous(), (0, rank, 2), replica_id=replica_id)
                for half, part in zip(("gate", "up"), t.chunk(2, 0))]
    glu = whole("glu", 4, 8)
    out["glu"] = ShardedTensorFactory("glu", glu + rank if fill else torch.full_like(glu, 7.0), build, torch.cat)
    out["step"] = 17
    return out


def flat(v, at=""):
    if isinstance(v, (dict, list)):
        for k, x in v.items() if isinstance(v, dict) else enumerate(v):
            yield from flat(x, f"{at}.{k}")
    else:
        yield at, v


def equal(a, b):
    a, b = dict(flat(a)), dict(flat(b))
    assert set(a) == set(b), set(a) ^ set(b)
    for k in a:
        assert torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype if isinstance(a[k], torch.Tensor) else a[k] == b[k], k


def torch_dist(top):
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
    from ckptfs.megatron import LoadShardedStrategy, load
    iteration = os.path.join(top, "iter_0000010")
    if dist.get_rank() == 0:
        os.makedirs(iteration)
        with open(os.path.join(top, "latest_checkpointed_iteration.txt"), "w", encoding="utf-8") as f:
            f.write("10")
    dist.barrier()
    dist_checkpointing.save(state(True, "tp"), iteration, ("torch_dist", 1))
    dist.barrier()
    for cut in ("tp", "pp"):
        for vocab in (96, 128):
            strategy = LoadShardedStrategy(readers="once")
            theirs = dist_checkpointing.load(state(False, cut, vocab), iteration)
            ours = dist_checkpointing.load(state(False, cut, vocab), iteration, strategy)
            equal(theirs, ours)
            assert ours["step"] == 17 and ours["object"] == {"seed": 3, "rank": dist.get_rank()}
            assert strategy.stats["read_bytes"] <= 1.05 * strategy.stats["unique_bytes"], strategy.stats
            wrapped = FullyParallelLoadStrategyWrapper(LoadShardedStrategy(readers="once"), exchange_algo="gather_object")
            equal(dist_checkpointing.load(state(False, cut, vocab), iteration, wrapped), ours)
            equal(load(state(False, cut, vocab), top), ours)
            equal(load(state(False, cut, vocab), iteration, strict="return_all")[0], ours)
    theirs, ours = dist_checkpointing.load_tensors_metadata(iteration), LoadShardedStrategy().load_tensors_metadata(iteration)
    assert {k: (t.global_shape, t.dtype) for k, t in theirs.items()} == {k: (t.global_shape, t.dtype) for k, t in ours.items()}
    wrong = state(False, "tp")
    wrong["row"][0].global_shape = (10, 64)
    try:
        dist_checkpointing.load(wrong, iteration, LoadShardedStrategy(), validate_access_integrity=False)
    except CheckpointingException as e:
        assert "shape mismatch" in str(e) and "row.weight" in str(e), e
    else:
        raise AssertionError("no error")
    wrong_on_one_rank(iteration)


def wrong_on_one_rank(iteration):
    """The rank that finds it raises Megatron's exception; the other one hears of it, and does not wait for its peer."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException
    import ckptfs
    from ckptfs.megatron import LoadShardedStrategy
    wrong = state(False, "tp")
    if dist.get_rank() == 1:
        wrong["row"][0].global_shape = (10, 64)
    try:
        dist_checkpointing.load(wrong, iteration, LoadShardedStrategy(), validate_access_integrity=False)
    except (CheckpointingException, ckptfs.CkptError) as e:
        assert isinstance(e, CheckpointingException) == (dist.get_rank() == 1), e
        assert "shape mismatch" in str(e) and "row.weight" in str(e), e
    else:
        raise AssertionError("no error")
    assert (wrong["norm"].data == 7.0).all()


def made_on_rank_0(top, name):
    """A folder that all ranks see."""
    folder = os.path.join(top, name)
    if dist.get_rank() == 0:
        os.makedirs(folder)
    dist.barrier()
    return folder


def few(tensor, fill=True):
    """Objects and common values, and on one rank perhaps a tensor."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
    rank = dist.get_rank()
    out = {"object": ShardedObject("rng", {"rank": rank} if fill else None, (2,), (rank,), replica_id=0), "step": 17}
    if tensor and rank == 1:
        out["norm"] = ShardedTensor.from_rank_offsets("norm.weight", whole("norm", 16) if fill else torch.full((16,), 7.0, dtype=torch.bfloat16))
    return out


def objects(top):
    """Nothing is opened for tensors where no rank has one: the first checkpoint has none at all, which no view shows."""
    from megatron.core import dist_checkpointing
    from ckptfs.megatron import LoadShardedStrategy, load
    for name, tensor in (("none", False), ("one", True)):
        folder = made_on_rank_0(top, name)
        dist_checkpointing.save(few(tensor), folder, ("torch_dist", 1))
        dist.barrier()
        for wants in (False, True)[:1 + tensor]:
            strategy = LoadShardedStrategy(readers="once")
            theirs = dist_checkpointing.load(few(wants, False), folder)
            ours = dist_checkpointing.load(few(wants, False), folder, strategy)
            equal(theirs, ours)
            assert ours["object"] == {"rank": dist.get_rank()} and ours["step"] == 17 and ("norm" in ours) == (wants and dist.get_rank() == 1), ours
            assert strategy.stats["read_bytes"] == (32 if wants else 0), strategy.stats
            equal(load(few(wants, False), folder), ours)
            got, missing, unexpected = load(few(wants, False), folder, strict="return_all")
            equal(got, ours)
            assert missing == ({"norm.weight"} if tensor and not wants else set()) and unexpected == set(), (missing, unexpected)
        has = {"norm.weight"} if tensor else set()
        assert set(LoadShardedStrategy().load_tensors_metadata(folder)) == set(dist_checkpointing.load_tensors_metadata(folder)) == has
    only_common = made_on_rank_0(top, "common")
    dist_checkpointing.save({"common": (3, 5)}, only_common, ("torch_dist", 1))
    dist.barrier()
    equal(dist_checkpointing.load({}, only_common), dist_checkpointing.load({}, only_common, LoadShardedStrategy()))
    try:
        LoadShardedStrategy().load_tensors_metadata(os.path.join(top, "nowhere"))
    except Exception as e:
        assert "nowhere" in str(e), e
    else:
        raise AssertionError("no error")


def without_config(top):
    """A load strategy that is called without dist_checkpointing reads a folder without metadata.json, and says that it is missing. Other views refuse it."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
    import ckptfs
    from ckptfs.megatron import LoadShardedStrategy
    folder, empty = made_on_rank_0(top, "saved"), made_on_rank_0(top, "empty")

    def wanted(fill=False):
        state = few(True, fill)
        word = whole("words", 96, 16).chunk(2, 0)[dist.get_rank()].clone()
        state["words"] = ShardedTensor.from_rank_offsets("embedding.word_embeddings.weight", word if fill else torch.full_like(word, 7.0),
                                                         (0, dist.get_rank(), 2))
        if not fill:
            del state["step"]
        return state
    dist_checkpointing.save(wanted(True), folder, ("torch_dist", 1))
    dist.barrier()
    if dist.get_rank() == 0:
        os.remove(os.path.join(folder, "metadata.json"))
    dist.barrier()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        LoadShardedStrategy(readers="once").load(wanted(), folder)
    assert any("metadata.json is missing" in str(w.message) for w in said) == (dist.get_rank() == 0), [str(w.message) for w in said]
    try:
        ckptfs.open(folder)
    except ckptfs.NotFoundError as e:
        assert "the save was not finished: metadata.json is missing" in str(e), e
    else:
        raise AssertionError("no error")
    equal(TorchDistLoadShardedStrategy().load(wanted(), folder), LoadShardedStrategy(readers="once").load(wanted(), folder))
    assert {k: type(v) for k, v in LoadShardedStrategy().load_sharded_metadata(folder).items()} == \
        {k: type(v) for k, v in TorchDistLoadShardedStrategy().load_sharded_metadata(folder).items()}
    try:
        LoadShardedStrategy().load(wanted(), empty)
    except CheckpointingException as e:
        assert empty in str(e) and "neither metadata.json nor .metadata" in str(e), e
    else:
        raise AssertionError("no error")


def zarr(top):
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
    from ckptfs.megatron import load
    hub, rank = load_file(ZARR + ".expected.safetensors"), dist.get_rank()
    layers = sum(k.endswith("self_attn.o_proj.weight") for k in hub)

    def stacked(name):
        return torch.stack([hub[f"model.layers.{i}.{name}"] for i in range(layers)])
    want = {"embedding.word_embeddings.weight": hub["model.embed_tokens.weight"], "decoder.final_layernorm.weight": hub["model.norm.weight"],
            "decoder.layers.self_attention.linear_proj.weight": stacked("self_attn.o_proj.weight"),
            "decoder.layers.mlp.linear_fc2.weight": stacked("mlp.down_proj.weight")}
    parts = {k: t.chunk(2, 0)[rank].contiguous() for k, t in want.items()}
    target = {k: ShardedTensor.from_rank_offsets(k, torch.zeros_like(t), (0, rank, 2), allow_shape_mismatch="embed" in k) for k, t in parts.items()}
    got = load(target, ZARR)
    for k, t in parts.items():
        assert torch.equal(got[k], t), k
    try:
        load({"rng": ShardedObject("rng", None, (1,), (0,), replica_id=rank)}, ZARR)
    except CheckpointingException as e:  # up to 0.16 Megatron looks for the file
        assert "'rng' is an object of a zarr checkpoint" in str(e) or "rng/shard_0_1.pt" in str(e), e
    else:
        raise AssertionError("no error")


if __name__ == "__main__":
    if "--rank" in sys.argv:
        dist.init_process_group("gloo")
        numpy.product = numpy.prod  # 0.15 asks for numpy 1
        if not torch.cuda.is_available():  # Megatron waits for a device that is not there
            torch.cuda.synchronize, torch.cuda.current_device = lambda *_: None, lambda: "cpu"
        {"torch_dist": torch_dist, "objects": objects, "without_config": without_config, "zarr": zarr}[sys.argv[-2]](sys.argv[-1])
        dist.barrier()
        end_rank()
    run_in_folders((torch_dist_as_megatron_reads_it, state_dicts_without_tensors, what_a_save_strategy_writes_by_itself, zarr_which_megatron_no_longer_reads, without_megatron_it_says_what_to_install))
