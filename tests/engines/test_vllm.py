# SPDX-License-Identifier: Apache-2.0
"""vLLM itself, on CPUs: the load format, reloads and the weight transfer backend give the tokens and logprobs that vLLM's own loader gives with the
Hugging Face directory, also at tensor parallel size 2, where each rank reads its part only."""

import contextlib
import glob
import json
import os
import re
import shutil
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "load"))
from built import BUILD, PACKAGE, skip  # noqa: E402
from runner import run_in_folders  # noqa: E402

VLLM = os.environ.get("CKPTFS_VLLM", "")
STEPS = ("10", "20")
SMALL = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, head_dim=32, vocab_size=509, max_position_embeddings=512)


def plugin(top):
    """A folder with the entry point that the installed package has."""
    info = os.path.join(top, "ckptfs-0.dist-info")
    os.makedirs(info)
    with open(os.path.join(HERE, "..", "..", "pyproject.toml"), encoding="utf-8") as f:
        group, line = re.search(r'\[project\.entry-points\."(vllm\.general_plugins)"\]\n(.*)\n', f.read()).groups()
    for name, text in (("METADATA", "Metadata-Version: 2.1\nName: ckptfs\nVersion: 0\n"), ("entry_points.txt", f"[{group}]\n{line.replace(chr(34), '')}\n")):
        with open(os.path.join(info, name), "w", encoding="utf-8") as f:
            f.write(text)
    return top


def in_a_process(name, top, binding):
    """Run a function of this file with vLLM. It ends by itself; its output is told if it fails."""
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([plugin(os.path.join(top, "plugin")), PACKAGE, VLLM]), VLLM_CPU_OMP_THREADS_BIND=binding,
               VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1", VLLM_ALLOW_INSECURE_SERIALIZATION="1",
               VLLM_TARGET_DEVICE="cpu", VLLM_CACHE_ROOT=os.path.join(top, "cache"), HF_HOME=os.path.join(top, "cache"))
    with open(os.path.join(top, "log"), "w+", encoding="utf-8") as log:
        done = subprocess.run([sys.executable, "-W", "ignore", os.path.abspath(__file__), "--run", name, top], stdout=log, stderr=subprocess.STDOUT, env=env, timeout=900)
        log.seek(0)
        said = log.read()
    assert not done.returncode, "\n".join(said.splitlines()[-80:])
    return said


# with vLLM


def make(top, config, fused=False, dtype=None):
    """A model of these random weights at each step: top/hf/STEP as Hugging Face has it, and a run of DCP without a config."""
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM
    for step in STEPS:
        torch.manual_seed(int(step))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(6 if p.dim() > 1 else 1).add_(0.1 * torch.randn(p.shape).to(p.dtype) if p.dim() == 1 else 0)
        model.save_pretrained(f"{top}/hf/{step}")
        tensors = model.state_dict() if fused else {k: v for f in glob.glob(f"{top}/hf/{step}/*.safetensors") for k, v in load_file(f).items()}
        dcp.save({k: v.to(dtype or v.dtype) for k, v in tensors.items()}, checkpoint_id=f"{top}/run/{step}", no_dist=True)
    os.makedirs(f"{top}/served")
    shutil.copy(f"{top}/hf/10/config.json", f"{top}/served")


@contextlib.contextmanager
def engine(folder, tp=1, config=None, **more):
    """vLLM over a folder; the load format ckptfs if a config for it is given."""
    from vllm import LLM
    if config is not None:
        more.update(load_format="ckptfs", model_loader_extra_config=config)
    llm = LLM(folder, skip_tokenizer_init=True, enforce_eager=True, tensor_parallel_size=tp, max_model_len=256, dtype="bfloat16", **more)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def said_by(llm):
    """The tokens and the logprobs of the five likeliest ones, of three prompts, the last of which is long enough for the prefix cache."""
    from vllm import SamplingParams
    llm.reset_prefix_cache()
    ask = SamplingParams(max_tokens=8, temperature=0, logprobs=5, detokenize=False, ignore_eos=True)
    prompts = [[1, 5, 9, 100], [7, 8, 300], [(31 * i) % 500 for i in range(200)]]
    found = llm.generate([{"prompt_token_ids": p} for p in prompts], ask, use_tqdm=False)
    return [(list(f.outputs[0].token_ids), [sorted((k, v.logprob) for k, v in d.items()) for d in f.outputs[0].logprobs]) for f in found]


def reload(llm, path=None, **config):
    """vLLM's reload, from a path, with another load config."""
    if config:
        llm.collective_rpc("update_config", args=({"load_config": config},))
    llm.collective_rpc("reload_weights", kwargs={"weights_path": path} if path else {})
    return said_by(llm)


def oracle(llm, top):
    """What vLLM's own loader makes of the Hugging Face directories, {step: ...}, in this very engine."""
    wanted = {}
    for step in STEPS:
        llm.collective_rpc(repacked)  # without this, vLLM 0.32.0 has wrong experts after a reload on CPUs
        wanted[step] = reload(llm, f"{top}/hf/{step}", load_format="auto", model_loader_extra_config={})
    assert wanted["10"] != wanted["20"]
    return wanted


def fails(call, *words):
    try:
        call()
    except Exception as e:
        assert all(w in str(e) for w in words), f"{words}: {type(e).__name__}: {e}"
        return e
    raise AssertionError(f"no error with {words}")


def repacked(worker):
    from ckptfs.vllm import _repack_experts
    _repack_experts(worker.model_runner.get_model())


def loaded(worker):
    """What a worker knows of its last load, and what its process has read."""
    from ckptfs.vllm import last_load
    with open("/proc/self/io", encoding="ascii") as f:
        return dict(last_load(worker.model_runner.get_model()), rchar=int(f.read().split()[1]))


def one_rank(top):
    from transformers import LlamaConfig
    make(top, LlamaConfig(**SMALL, num_key_value_heads=2))
    run, served = f"{top}/run", f"{top}/served"
    with engine(f"{top}/hf/10") as llm:
        own = said_by(llm)
    with engine(served, config={"run": run, "step": "10"}, weight_transfer_config={"backend": "ckptfs"}) as llm:
        got = {"first": said_by(llm), 20: reload(llm, f"{run}/20"), "again": reload(llm), "latest": reload(llm, run), 10: reload(llm, f"{run}/10")}
        [stats] = llm.collective_rpc(loaded)
        assert not stats["alone"] and stats["boxes"] == 21, stats
        steps_by_transfer(llm, run, got)
        steps_that_vanish(llm, run, got)
        wanted = oracle(llm, top)
    assert own == wanted["10"] == got["first"] == got[10] == got["moved 10"] == got["kept"], "step 10"
    assert wanted["20"] == got[20] == got["again"] == got["latest"] == got["moved 20"] == got["moved latest"], "step 20"
    with engine(f"{top}/hf/10", weight_transfer_config={"backend": "ckptfs"}) as llm:  # loaded by vLLM, so nothing is known of what it takes
        got = {}
        steps_by_transfer(llm, run, got)
        assert got["moved 10"] == wanted["10"] and got["moved 20"] == got["moved latest"] == wanted["20"]
    steps_as_patches(top)
    a_link_that_moves(top, run, served, wanted)
    a_head_of_its_own(top, run, wanted)


def steps_by_transfer(llm, run, got):
    fails(lambda: llm.init_weight_transfer_engine({"init_info": {"run": run, "options": {"readers": "all"}}}), "readers")
    fails(lambda: llm.init_weight_transfer_engine({"init_info": {"run": f"{run}/nowhere"}}), "nowhere")
    llm.init_weight_transfer_engine({"init_info": {"run": run}})
    for step in ("20", 10, None):
        llm.start_weight_update()
        llm.update_weights({"update_info": {"step": step} if step else {}})
        llm.finish_weight_update()
        got[f"moved {step or 'latest'}"] = said_by(llm)


def as_if_packed(worker):
    """Let one layer compute with a copy of its weight, as vLLM's packed layers do on CPUs that oneDNN packs for (not with AVX2 alone)."""
    import torch
    layer = worker.model_runner.get_model().lm_head
    if layer.cpu_linear.__code__.co_freevars:
        return
    copy = layer.weight.detach().clone()
    layer.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, copy, bias)


def steps_as_patches(top):
    """Steps of changes, of which only what they change is written into the engine, as vLLM's CheckpointWeightPatch."""
    import torch
    import vllm.model_executor.layers.utils as layers
    from safetensors.torch import load_file, save_file
    torch.manual_seed(1)
    models, chain = [f"{top}/hf/10"], f"{top}/chain"
    os.makedirs(chain)
    for v in (1, 2, 3):
        shutil.copytree(models[-1], f"{top}/whole{v}")
        for file in glob.glob(f"{top}/whole{v}/*.safetensors"):
            tensors = load_file(file)
            for n, t in tensors.items():
                if v == 1 or (n.endswith("_proj.weight") and "layers.1" in n) or "embed" in n:
                    t.mul_(torch.where(torch.rand(t.shape) < 0.05, 1.5, 1).to(t.dtype))
                if v == 3 and "norm" in n:
                    t.view(-1)[0] = float("nan")
            save_file(tensors, file, metadata={"format": "pt"})
        models.append(f"{top}/whole{v}")
        subprocess.run([os.path.join(BUILD, "fs", "ckpt"), "delta", "-q", models[v - 1], models[v], f"{chain}/weight_v{v:06d}"], check=True)
    transfer = {"weight_transfer_config": {"backend": "ckptfs"}}

    def update(llm, step, **more):
        llm.start_weight_update()
        llm.update_weights({"update_info": {"step": f"weight_v{step:06d}", **more}})
        llm.finish_weight_update()
        return said_by(llm)

    with engine(models[0], **transfer) as llm:  # with packed copies of weights
        llm.init_weight_transfer_engine({"init_info": {"run": chain, "options": {"base": models[0]}}})
        fails(lambda: update(llm, 2, patches=True), "no step is known")
        first = update(llm, 1)
        llm.collective_rpc(as_if_packed)
        fails(lambda: update(llm, 2, patches=True), "in another order")
        assert said_by(llm) == first
    sgl, onednn = layers.check_cpu_sgl_kernel, layers.ops._supports_onednn
    layers.check_cpu_sgl_kernel, layers.ops._supports_onednn = (lambda *_: False), False
    with engine(models[2]) as llm:
        plain = said_by(llm)
    with engine(models[0], **transfer) as llm:
        llm.init_weight_transfer_engine({"init_info": {"run": chain, "options": {"base": models[0]}}})
        first = update(llm, 1)
        fails(lambda: update(llm, 3, patches=True), "norm.weight", "NaN")
        assert said_by(llm) == first != plain
        assert update(llm, 2, patches=True) == plain, "patches"
        assert update(llm, 1, patches=True) == first, "back"
        assert update(llm, 2) == plain
    layers.check_cpu_sgl_kernel, layers.ops._supports_onednn = sgl, onednn


def steps_that_vanish(llm, run, got):
    """What can't be read leaves the engine with what it has."""
    import ckptfs.vllm
    reload(llm, f"{run}/10")
    shutil.copytree(f"{run}/20", f"{run}/30")
    fill = ckptfs.vllm.ModelLoader._fill

    def vanishing(*args):
        for file in glob.glob(f"{run}/30/*"):
            os.truncate(file, 100)
        shutil.rmtree(f"{run}/30")
        return fill(*args)

    ckptfs.vllm.ModelLoader._fill = vanishing
    fails(lambda: reload(llm, f"{run}/30"), f"{run}/30")
    llm.start_weight_update()
    shutil.copytree(f"{run}/20", f"{run}/30")
    fails(lambda: llm.update_weights({"update_info": {"step": "30"}}), "30")
    ckptfs.vllm.ModelLoader._fill = fill
    llm.start_weight_update()
    fails(lambda: llm.update_weights({"update_info": {"step": "40"}}), "40")
    fails(lambda: reload(llm, f"{run}/40"), f"{run}/40")
    got["kept"] = said_by(llm)


def a_link_that_moves(top, run, served, wanted):
    """`latest` moves after the step was chosen: all bytes are of that one."""
    import ckptfs.vllm
    link, fill = f"{top}/latest", ckptfs.vllm.ModelLoader._load
    os.symlink("run/10", link)

    def moving(*args, **more):
        os.symlink("run/20", f"{link}.new")
        os.replace(f"{link}.new", link)
        return fill(*args, **more)

    ckptfs.vllm.ModelLoader._load = moving
    with engine(served, config={"run": link}) as llm:
        ckptfs.vllm.ModelLoader._load = fill
        assert said_by(llm) == wanted["10"]
        assert reload(llm) == wanted["20"]


def a_head_of_its_own(top, run, wanted):
    """The folder's config ties head and embedding, the run has others: an error, never the tied model."""
    with open(f"{top}/served/config.json", encoding="utf-8") as f:
        config = json.load(f)
    os.makedirs(f"{top}/tied")
    with open(f"{top}/tied/config.json", "w", encoding="utf-8") as f:
        json.dump(dict(config, tie_word_embeddings=True), f)

    def start(**more):
        with engine(f"{top}/tied", config={"run": run, "step": "10", **more}) as llm:
            return said_by(llm)

    fails(start, "lm_head.weight", "tie_word_embeddings")
    fails(lambda: start(slices=False), "lm_head.weight", "tie_word_embeddings")


def two_ranks(top):
    """Experts, fused and shared ones, fewer key and value heads than ranks, biases, a padded vocabulary, a tied head under both names, F32 at rest."""
    import torch
    from transformers import Qwen2MoeConfig
    make(top, Qwen2MoeConfig(**SMALL, num_key_value_heads=1, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=128,
                             tie_word_embeddings=True), fused=True, dtype=torch.float32)
    run, got = f"{top}/run", {}
    with engine(f"{top}/served", tp=2, config={"run": run, "step": "10", "readers": "once"}) as llm:
        got[10], first = said_by(llm), llm.collective_rpc(loaded)
        got[20], then = reload(llm, f"{run}/20"), llm.collective_rpc(loaded)
        fails(lambda: reload(llm, f"{run}/30"), f"{run}/30")
        fails(lambda: llm.collective_rpc(loaded), f"{run}/30")  # vLLM has left the second rank's answer, and is one behind from now on
        got["kept"] = said_by(llm)
        got["latest"] = reload(llm, run)
        wanted = oracle(llm, top)
    assert got[10] == wanted["10"], "step 10"
    assert got[20] == got["kept"] == got["latest"] == wanted["20"], "step 20"
    size = sum(os.path.getsize(f) for f in glob.glob(f"{run}/10/*.distcp"))
    for a, b in zip(first, then):
        assert not a["alone"] and not b["alone"], (a["alone"], b["alone"])
        # Half of what is divided: not of the head's copy, which is compared, nor of key and value heads, which both ranks have.
        assert a["own_bytes"] == b["own_bytes"] < 0.56 * a["all_bytes"], a
        assert max(a["read_bytes"], b["read_bytes"]) == a["unique_bytes"] < size, (a, b, size)
    read = [b["rchar"] - a["rchar"] for a, b in zip(first, then)]
    assert max(read) < 0.7 * size, (read, size)
    return f"of {size / 1e6:.2f} MB the ranks have read {', '.join(f'{n / 1e6:.2f}' for n in read)} MB"


# without vLLM


def the_load_format_reload_and_transfer(top):
    os.makedirs(top)
    said = in_a_process("one_rank", top, str(min(os.sched_getaffinity(0))))
    assert "has no config.json" not in said, "vLLM has the config"


def two_ranks_read_their_parts(top):
    os.makedirs(top)
    cpus = sorted(os.sched_getaffinity(0))
    return in_a_process("two_ranks", top, f"{cpus[0]}|{cpus[-1]}").splitlines()[-1]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        print("\n" + (globals()[sys.argv[2]](sys.argv[3]) or ""), flush=True)
        sys.exit()
    if not os.path.isdir(os.path.join(VLLM, "vllm")):
        skip("vLLM is not installed: tests/run.sh does it")
    run_in_folders((the_load_format_reload_and_transfer, two_ranks_read_their_parts))
