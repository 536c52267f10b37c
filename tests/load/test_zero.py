# SPDX-License-Identifier: Apache-2.0
"""nanotron's optimizer states, cut over data-parallel ranks (ZeRO-1): runs/nanotron-zero1 against what its ranks had in memory, cut anew for
other numbers of ranks, read in boxes and by other numbers of ranks, and a table of lies about it: what they concern is left out, with the reason."""

import glob
import itertools
import json
import os
import random
import shutil
import sys

from runner import run_in_folders

BUILD = os.environ.get("CKPTFS_BUILD", "build/release")
HERE = os.path.dirname(os.path.abspath(__file__))
STEP = os.path.join(HERE, "runs", "nanotron-zero1", "2")
NDP, NTP, NPP = 3, 2, 2
QKV, GATE, NORM = (f"model.decoder.0.pp_block.{m}.weight" for m in ("attn.qkv_proj", "mlp.gate_up_proj", "input_layernorm"))
TIED = "model.token_position_embeddings.pp_block.token_embedding.weight"

try:
    import torch
    from safetensors.torch import load_file
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

sys.path.insert(0, os.path.join(HERE, "..", "..", "contrib", "python"))
os.environ["CKPTFS_LIBRARY_PATH"] = BUILD
import ckptfs  # noqa: E402

TRUTH = load_file(os.path.join(HERE, "runs", "nanotron-zero1.expected.safetensors"))


def shown(run):
    """The states that a raw view has, and its warnings."""
    with ckptfs.open(run, view="raw") as f:
        return {k: f.get_tensor(k) for k in f.keys() if k.startswith("optimizer.")}, f.info().get("warnings", [])


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8) if a.dim() else a, b.view(torch.uint8) if b.dim() else b)


def check_all(run, truth=TRUTH, warnings=()):
    states, said = shown(run)
    assert sorted(states) == sorted(truth), set(states) ^ set(truth)
    assert all(same(states[k], t) for k, t in truth.items())
    assert len(said) == len(warnings) and all(w in s for w, s in zip(warnings, said)), said


def file_name(pp, dp, tp, ndp=NDP, exp="0-of-1"):
    return f"optimizer_pp-{pp}-of-{NPP}_dp-{dp}-of-{ndp}_tp-{tp}-of-{NTP}_exp-{exp}.pt"


def change(run, pp, dp, tp, fn):
    """What a rank saved, changed."""
    path = os.path.join(run, "optimizer", file_name(pp, dp, tp))
    held = torch.load(path, weights_only=False)
    fn(held)
    torch.save(held, path)


def state_of(held, param):
    return held["state"][next(i for i, n in held["names"].items() if n == param)]


def change_config(run, fn):
    path = os.path.join(run, "optimizer", "optimizer_config.json")
    with open(path) as f:
        config = json.load(f)
    fn(config)
    with open(path, "w") as f:
        json.dump(config, f)


# ---- what is true ----

def as_it_was_in_memory(top):
    """And the copies in F32, rounded, are the weights that were saved."""
    check_all(STEP)
    check_all(os.path.dirname(STEP))
    with ckptfs.open(STEP, view="raw") as f:
        weights = [k for k in f.keys() if not k.startswith("optimizer.")]
        assert len(weights) * 4 == len(TRUTH)
        for k in weights:
            master = f.get_tensor("optimizer.gradient_accumulator." + k)
            assert same(master.to(torch.bfloat16), f.get_tensor(k)) and not torch.equal(master.to(torch.bfloat16).float(), master), k


def shares(numel, ndp):
    """As nanotron cuts: parts rounded up, and the last ones shorter by one."""
    sizes = [-(-numel // ndp)] * ndp
    for i in range(sum(sizes) - numel):
        sizes[-1 - i] -= 1
    return [(sum(sizes[:i]), sum(sizes[:i + 1])) for i in range(ndp)]


def cut_anew(run, ndp, config):
    """The same states, had there been ndp ranks."""
    old = {(pp, tp): [torch.load(os.path.join(run, "optimizer", file_name(pp, dp, tp)), weights_only=False) for dp in range(NDP)] for pp in range(NPP) for tp in range(NTP)}
    for path in glob.glob(os.path.join(run, "optimizer", "*.pt")):
        os.unlink(path)
    for (pp, tp), held in old.items():
        params = list(held[0]["gradient_accumulator"])
        whole = {n: {k: torch.cat([state_of(h, n)[k] for h in held]) for k in ("exp_avg", "exp_avg_sq")} for n in params}
        masters = {n: torch.cat([h["gradient_accumulator"][n] for h in held]) for n in params}
        for dp in range(ndp):
            own = [(n, *shares(masters[n].numel(), ndp)[dp]) for n in params]
            own = [(n, lo, hi) for n, lo, hi in own if lo < hi]
            torch.save({"names": {i: n for i, (n, _, _) in enumerate(own)},
                        "state": {i: {"step": torch.tensor(2.), **{k: t[lo:hi].clone() for k, t in whole[n].items()}} for i, (n, lo, hi) in enumerate(own)},
                        "gradient_accumulator": {n: masters[n][lo:hi] for n, lo, hi in own}},  # views of one storage
                       os.path.join(run, "optimizer", file_name(pp, dp, tp, ndp)))
    if config:
        change_config(run, lambda c: (c["parallelism"].update(dp_size=str(ndp)), c["configs"].update(param_name_to_dp_rank_offsets={
            n: {str(dp): [str(lo), str(hi)] for dp, (lo, hi) in enumerate(shares(int(own[str(NDP - 1)][1]), ndp)) if lo < hi}
            for n, own in c["configs"]["param_name_to_dp_rank_offsets"].items()})))
    else:
        os.unlink(os.path.join(run, "optimizer", "optimizer_config.json"))


def any_number_of_ranks(top):
    for ndp in (1, 2, 5, 20):  # the norms have 16 elements
        for config in (False, True):
            run = shutil.copytree(STEP, os.path.join(top, f"{ndp}{config}"))
            cut_anew(run, ndp, config)
            check_all(run)


def expert_ranks(top):
    """What is no expert's is the same on all expert-parallel ranks, or was cut over them, where they are data-parallel ranks too."""
    copies, cut = (shutil.copytree(STEP, os.path.join(top, name)) for name in ("copies", "cut"))
    for pp, dp, tp in itertools.product(range(NPP), range(NDP), range(NTP)):
        path = os.path.join(copies, "optimizer", file_name(pp, dp, tp))
        shutil.copy(path, path.replace("_exp-0-of-1", "_exp-1-of-2"))
        os.rename(path, path.replace("_exp-0-of-1", "_exp-0-of-2"))
        os.rename(os.path.join(cut, "optimizer", file_name(pp, dp, tp)), os.path.join(cut, "optimizer", file_name(pp, dp, tp, exp=f"{dp}-of-3")))
    os.unlink(os.path.join(copies, "optimizer", file_name(0, 1, 0, exp="0-of-2")))
    check_all(copies)
    check_all(cut)


def boxes(top):
    """Parts that have nothing to do with how it was cut."""
    rng = random.Random(int(os.environ.get("CKPTFS_SEED", "1")))
    with ckptfs.open(STEP, view="raw") as f:
        for k, t in TRUTH.items():
            part = f.get_slice(k)
            for _ in range(8 if t.dim() else 0):
                at = tuple(slice(lo, rng.randint(lo, n)) for n in t.shape for lo in [rng.randrange(n)])
                assert torch.equal(part[at], t[at]), (k, at)


def other_strides(top):
    """Tensors that do not lie in one piece in their storage."""
    run, truth = shutil.copytree(STEP, os.path.join(top, "run")), dict(TRUTH)

    def spread(held):
        state = state_of(held, QKV)
        twice = torch.stack([state["exp_avg"], torch.full_like(state["exp_avg"], 7)], 1).flatten()
        state["exp_avg"] = twice[::2]
        state_of(held, NORM)["exp_avg"] = torch.full((1,), 3.).expand(5)
    change(run, 0, 1, 0, spread)
    truth[f"optimizer.state.{NORM}.exp_avg"] = torch.cat([TRUTH[f"optimizer.state.{NORM}.exp_avg"][:6], torch.full((5,), 3.), TRUTH[f"optimizer.state.{NORM}.exp_avg"][11:]])
    check_all(run, truth)


def other_saves(top):
    """Files of a save that was cut differently lie beside; the optimizer's own file says which one is meant."""
    run = shutil.copytree(STEP, os.path.join(top, "run"))
    stale = shutil.copytree(STEP, os.path.join(top, "stale"))
    cut_anew(stale, 2, False)
    for path in glob.glob(os.path.join(stale, "optimizer", "*.pt")):
        shutil.copy(path, os.path.join(run, "optimizer"))
        if "_dp-0-" in path:
            shutil.copy(path, os.path.join(run, "optimizer", os.path.basename(path).replace("_dp-0-of-2", "")))
    check_all(run)
    with open(os.path.join(run, "optimizer", "optimizer_config.json")) as f:
        said_it = f.read()
    for fn in (lambda c: c.pop("type"), lambda c: c["parallelism"].pop("dp_size"), lambda c: c["parallelism"].update(dp_size="4"), None):
        if fn:
            change_config(run, fn)
        else:
            os.unlink(os.path.join(run, "optimizer", "optimizer_config.json"))
        check_all(run, {}, ["the files of several saves lie there"])
        config_text(said_it)(run)
    change_config(run, lambda c: c.update(type="OptimizerFromGradientAccumulator"))  # whose tensors are whole, and these are not
    states, said = shown(run)
    assert all(k.endswith(".step") for k in states) and all("the parameter's file has" in s for s in said), said


# ---- what is not ----

def offsets(param, dp, value):
    def lie(run):
        change_config(run, lambda c: c["configs"]["param_name_to_dp_rank_offsets"][param].update({str(dp): value}))
    return lie


def no_offsets(run):
    change_config(run, lambda c: c["configs"]["param_name_to_dp_rank_offsets"][QKV].pop("0"))


def odd_ranks(run):
    change_config(run, lambda c: c["configs"]["param_name_to_dp_rank_offsets"].update({QKV: [["0", "86"]]}))


def many_ranks(run):
    change_config(run, lambda c: c["configs"]["param_name_to_dp_rank_offsets"][QKV].update({str(dp): ["0", "256"] for dp in range(3, 200000)}))


def config_text(text):
    def lie(run):
        with open(os.path.join(run, "optimizer", "optimizer_config.json"), "w") as f:
            f.write(text)
    return lie


def changed(param, key, fn, pp=0, dp=1, tp=0):
    def lie(run):
        def change_one(held):
            own = held["gradient_accumulator"] if key is None else state_of(held, param)
            own[key or param] = fn(own[key or param])
        change(run, pp, dp, tp, change_one)
    return lie


def gone(*files):
    def lie(run):
        for at in files:
            os.unlink(os.path.join(run, "optimizer", file_name(*at)))
    return lie


def truncated(run):
    os.truncate(os.path.join(run, "optimizer", file_name(0, 1, 0)), 1000)


def endless_ranks(run):
    os.unlink(os.path.join(run, "optimizer", "optimizer_config.json"))
    for pp, dp, tp in itertools.product(range(NPP), range(NDP), range(NTP)):
        os.rename(os.path.join(run, "optimizer", file_name(pp, dp, tp)), os.path.join(run, "optimizer", file_name(pp, dp, tp, 4294967295)))


def keys_of(*params):
    return {f"optimizer.gradient_accumulator.{p}" for p in params} | {f"optimizer.state.{p}.{k}" for p in params for k in ("exp_avg", "exp_avg_sq")}


FIRST_STAGE = keys_of(*{k.split("accumulator.")[1] for k in TRUTH if "accumulator.model.decoder." in k})
AVG = {f"optimizer.state.{QKV}.exp_avg"}
LIES = [  # name, the lie, what is left out, the reason
    ("sound", lambda run: None, set(), None),
    ("sound_config_without_offsets", lambda run: change_config(run, lambda c: c["configs"].clear()), set(), None),
    ("sound_config_offsets_are_numbers", offsets(QKV, 0, [0, 86]), set(), None),
    ("sound_config_offsets_a_list", lambda run: change_config(run, lambda c: c["configs"].update(param_name_to_dp_rank_offsets=[])), set(), None),
    ("sound_config_many_ranks", many_ranks, set(), None),
    ("sound_config_empty", config_text("{}"), set(), None),
    ("sound_config_garbage", config_text('{"type": '), set(), "not used"),
    ("sound_config_array", config_text("[1]"), set(), "not used"),
    ("sound_tied_on_the_other_stage", gone((1, 1, 0)), keys_of("model.final_layer_norm.pp_block.weight"), "no file has the part of dp-rank 1 of 3 (tp-rank 0)"),
    ("negative", offsets(QKV, 0, ["-1", "86"]), keys_of(QKV), "dp-rank 0 are not two offsets"),
    ("negative_number", offsets(QKV, 0, [-1, 86]), keys_of(QKV), "dp-rank 0 are not two offsets"),
    ("beyond", offsets(QKV, 2, ["171", "257"]), keys_of(QKV), "171..257, the parameter has 256 elements"),
    ("far_beyond", offsets(QKV, 2, ["171", "18446744073709551615"]), keys_of(QKV), "the parameter has 256 elements"),
    ("no_integer_of_64_bits", offsets(QKV, 2, ["171", "18446744073709551616"]), keys_of(QKV), "not two offsets"),
    ("huge_interval", offsets(QKV, 0, ["18446744073709551530", "18446744073709551615"]), keys_of(QKV), "the parameter has 256 elements"),
    ("backwards", offsets(QKV, 1, ["171", "86"]), keys_of(QKV), "171..86"),
    ("fraction", offsets(QKV, 1, [86.0, 171]), keys_of(QKV), "not two offsets"),
    ("one_offset", offsets(QKV, 1, ["86"]), keys_of(QKV), "not two offsets"),
    ("three_offsets", offsets(QKV, 1, ["86", "171", "171"]), keys_of(QKV), "not two offsets"),
    ("no_list", offsets(QKV, 1, "86"), keys_of(QKV), "not two offsets"),
    ("nothing", offsets(QKV, 1, None), keys_of(QKV), "not two offsets"),
    ("no_offsets", no_offsets, keys_of(QKV), "says that dp-rank 0 has nothing of it"),
    ("ranks_are_a_list", odd_ranks, keys_of(QKV), "has nothing of it"),
    ("overlap", offsets(QKV, 1, ["85", "170"]), keys_of(QKV), f"{file_name(0, 1, 0)}' overlaps another file"),
    ("same_twice", offsets(GATE, 2, ["128", "256"]), keys_of(GATE), "overlaps another file"),
    ("empty", offsets(QKV, 1, ["86", "86"]), keys_of(QKV), "it is [85], dp-rank 1 of 3 has elements 86..86"),
    ("longer", changed(QKV, "exp_avg", lambda t: torch.cat([t, t[:1]])), AVG, "it is [86], dp-rank 1 of 3 has elements 86..171"),
    ("shorter", changed(QKV, "exp_avg", lambda t: t[1:]), AVG, "it is [84]"),
    ("two_dimensions", changed(QKV, "exp_avg", lambda t: t[None]), AVG, "it is [1, 85]"),
    ("number", changed(QKV, "exp_avg", lambda t: t[0].clone()), AVG, "a number in this file and a tensor in others"),
    ("number_first", changed(QKV, "exp_avg", lambda t: t[0].clone(), dp=0), AVG, "a tensor in this file and a number in others"),
    ("other_dtype", changed(QKV, "exp_avg", lambda t: t.half()), AVG, "it is F16 in this file and F32 in others"),
    ("master_of_other_dtype", changed(QKV, None, lambda t: t.half()), {f"optimizer.gradient_accumulator.{QKV}"}, "it is F16 in this file and F32 in others"),
    ("no_tensor", changed(QKV, "exp_avg", lambda t: "exp_avg"), AVG, "no file has the part of dp-rank 1 of 3 (tp-rank 0): rows 6..8 of 32"),
    ("no_such_parameter", lambda run: change(run, 0, 1, 0, lambda h: h["gradient_accumulator"].update(other=torch.zeros(3))), set(), "no such parameter"),
    ("missing_rank", gone((0, 1, 0)), FIRST_STAGE, "no file has the part of dp-rank 1 of 3 (tp-rank 0)"),
    ("missing_last_rank", gone((0, 2, 1)), None, "no file has the part of dp-rank 2 of 3 (tp-rank 1)"),
    ("missing_group", gone(*((0, dp, 1) for dp in range(NDP))), None, "are in no shard"),
    ("missing_first_group", gone(*((0, dp, 0) for dp in range(NDP))), None, f"{NORM}.exp_avg': no file of tp-rank 0 has it"),
    ("no_files", gone(*itertools.product(range(NPP), range(NDP), range(NTP))), set(TRUTH), None),
    ("truncated", truncated, FIRST_STAGE, file_name(0, 1, 0)),
    ("endless_ranks", endless_ranks, set(TRUTH) - {k for k in TRUTH if k.endswith(".step")}, "of 4294967295 has elements"),
]


def lies(top):
    for name, lie, lost, reason in LIES:
        run = shutil.copytree(STEP, os.path.join(top, name))
        lie(run)
        states, said = shown(run)
        if lost is not None:
            assert set(states) == set(TRUTH) - lost, f"{name}: {set(TRUTH) - lost ^ set(states)}"
        assert (set(TRUTH) - set(states) or lost == set()) and all(same(states[k], TRUTH[k]) for k in states), name
        assert any(reason in s for s in said) if reason else not said, f"{name}: {said}"
        shutil.rmtree(run)


run_in_folders((as_it_was_in_memory, any_number_of_ranks, expert_ranks, boxes, other_strides, other_saves, lies))
