# SPDX-License-Identifier: Apache-2.0
"""Makes trainers.tar.xz: saves of OLMo-core, LitGPT and torchtune by these packages' own code, of small random models, with what comes out of
their own converters.

    python tests/golden/make_trainers.py olmo_core|litgpt|torchtune FOLDER

Needs ai2-olmo-core 3.0.0, litgpt 0.5.13 and torchtune 0.6.1 (one at a time is enough), torch, transformers and peft. FOLDER gets olmo_core/CASE,
litgpt/CASE and torchtune/CASE, which are packed by

    XZ_OPT=-9 tar --sort=name --owner=0 --group=0 --mtime=@0 -cJf trainers.tar.xz -C FOLDER olmo_core litgpt torchtune

(Paths in the metadata of OLMo-core's saves were replaced at equal length.) Where a converter makes no config.json, or refuses a kind of model, the
logits of the package's model and of transformers' on what ckpt shows (CKPT names the command) are compared instead; so they are for all others."""

import io
import json
import os
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

CKPT = os.environ.get("CKPT", "build/release/fs/ckpt")
VOCAB = 40


def rounded(t):
    """Half of the bytes are zeros, so that the archive is small."""
    return t.bfloat16().float()


def fill(module, offset):
    """Random values; those of norms are near offset(name)."""
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(rounded(offset(name) + 0.3 * torch.randn_like(p)))


def write_case(folder, **case):
    with open(os.path.join(folder, "case.json"), "w") as f:
        json.dump({"view": "hf", "base": None, "options": {}, "compare": "tensors"} | case, f, indent=1)


def write_expected(folder, tensors, config=None, file="model.safetensors"):
    os.makedirs(folder, exist_ok=True)
    save_file({k: v.contiguous().clone() for k, v in tensors.items()}, os.path.join(folder, file))
    if config:
        with open(os.path.join(folder, "config.json"), "w") as f:
            json.dump(config, f, indent=1, sort_keys=True)


def shown(source, out, **options):
    args = [x for key, value in options.items() for x in ("-o", f"{key}={value}")]
    subprocess.run([CKPT, "export", source, out, *args], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def compare_logits(case, model, source, **options):
    """The package's model and transformers', on what ckpt shows of the save, give the same logits."""
    from transformers import AutoModelForCausalLM

    out = os.path.join(source, "..", "shown")
    shown(source, out, **options)
    other = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        a, b = model.eval()(tokens), other(tokens).logits
    a = a if torch.is_tensor(a) else a.logits
    difference = (a - b).abs().max().item()
    print(f"{case}: {type(other).__name__}, logits differ by {difference:.1e} of {a.abs().max().item():.1f}")
    assert difference < 1e-4, case
    shutil.rmtree(out)


# ---- OLMo-core ----


def olmo_config(kind):
    from olmo_core.nn.attention import AttentionBackendName, SlidingWindowAttentionConfig
    from olmo_core.nn.rope import StepwiseRoPEScalingConfig, YaRNRoPEScalingConfig
    from olmo_core.nn.transformer.config import TransformerConfig

    sizes = dict(d_model=16, vocab_size=VOCAB, n_layers=2, n_heads=4, n_kv_heads=2, attn_backend=AttentionBackendName.torch)
    dense = sizes | dict(hidden_size_multiple_of=8)
    behind = dict(qk_norm=True, block_name="reordered_norm", layer_norm_eps=1e-6)
    if kind.startswith("olmo2"):
        return TransformerConfig.llama_like(**dense, **behind)
    if kind == "olmo3":
        windows = SlidingWindowAttentionConfig(pattern=[4, 4, -1], force_full_attention_on_first_layer=False, force_full_attention_on_last_layer=True)
        config = TransformerConfig.llama_like(**dense | {"n_layers": 3}, **behind, sliding_window=windows)
        return config.with_rope_scaling(YaRNRoPEScalingConfig(factor=8.0, beta_fast=32, beta_slow=1, old_context_len=16))
    if kind == "llama":
        return TransformerConfig.llama_like(**dense, rope_scaling=StepwiseRoPEScalingConfig(factor=8.0, old_context_len=16))
    if kind == "qwen3":
        return TransformerConfig.llama_like(**dense, head_dim=6, qk_norm=True, use_head_qk_norm=True, layer_norm_eps=1e-6, tie_word_embeddings=True)
    if kind == "gemma3":
        own = {k: v for k, v in sizes.items() if k != "n_layers"}
        return TransformerConfig.gemma3_like(**own, n_layers=3, hidden_size=24, head_dim=6, local_window_size=4, global_layer_interval=3, tie_word_embeddings=True)
    dropless = kind == "flex_olmo_dropless"
    return TransformerConfig.llama_like_moe(**sizes, num_experts=4, top_k=2, expert_hidden_size=8, dropless=dropless, capacity_factor=None if dropless else 4.0,
                                            reordered_norm=True, qk_norm=True, layer_norm_eps=1e-6)


# What the converter leaves to its caller, or what is the trainer's in the save.
NOT_OF_CONVERTER = {"bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "transformers_version", "architectures", "dtype", "use_cache",
                    "initializer_range", "attention_dropout"}


def olmo_expected(kind, model, full):
    """The converter's tensors, and its config where it makes one."""
    from olmo_core.nn.hf.config import get_hf_config
    from olmo_core.nn.hf.convert import convert_state_to_hf
    from transformers import AutoConfig

    try:
        config = get_hf_config(model)
        stated = {k: v for k, v in json.loads(config.to_json_string(use_diff=False)).items() if k not in NOT_OF_CONVERTER and v is not None}
        stated = {k: v for k, v in stated.items() if k in ("rope_parameters", "layer_types", "sliding_window", "model_type") or k.startswith("num_")
                  or k in ("hidden_size", "intermediate_size", "rms_norm_eps", "vocab_size", "tie_word_embeddings", "attention_bias", "hidden_act")}
        for rope in [stated["rope_parameters"], *stated["rope_parameters"].values()]:
            if isinstance(rope, dict):
                rope.pop("attention_factor", None)  # transformers' own default
    except NotImplementedError:
        config, stated = AutoConfig.for_model({"gemma3": "gemma3_text"}.get(kind, kind), num_hidden_layers=model.n_layers), None
        config.tie_word_embeddings = model.tie_word_embeddings
    tensors = convert_state_to_hf(config, dict(full))
    if kind == "flex_olmo_dropless":  # the converter turns these, which have the rows of another class: see the README
        for name in list(tensors):
            layer, _, rest = name.removeprefix("model.layers.").partition(".mlp.experts.")
            expert, _, part = rest.partition(".")
            if part in ("gate_proj.weight", "up_proj.weight"):
                whole = full[f"blocks.{layer}.feed_forward_moe.experts.mlp.{'w1' if part.startswith('gate') else 'w3'}"]
                tensors[name] = whole.chunk(4)[int(expert)]
    if model.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    return tensors, stated


def olmo_rank(rank, world, kind, folder, port):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    from olmo_core.distributed.checkpoint import save_model_and_optim_state

    for step in (10, 20) if kind == "olmo2" else (10,):
        torch.manual_seed(step)
        config = olmo_config(kind)
        model, whole = config.build(), config.build()
        fill(whole, lambda name: 1.0 if "norm" in name else 0.0)
        full = {k: v.clone() for k, v in whole.state_dict().items()}
        model.load_state_dict(full)
        for block in model.blocks.values():
            fully_shard(block)
        fully_shard(model)
        optim = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optim.step()
        at = os.path.join(folder, "run", f"step{step}")
        if rank == 0:
            os.makedirs(os.path.join(at, "train"))
        dist.barrier()
        save_model_and_optim_state(os.path.join(at, "model_and_optim"), model, optim)
        torch.save({"global_step": step}, os.path.join(at, "train", f"rank{rank}.pt"))
        if rank == 0:
            tokenizer = {"vocab_size": VOCAB, "eos_token_id": 0, "pad_token_id": 1}
            with open(os.path.join(at, "config.json"), "w") as f:
                json.dump({"run_name": "x", "model": config.as_config_dict(), "dataset": {"tokenizer": tokenizer, "sequence_length": 32}}, f)
            with open(os.path.join(at, ".metadata.json"), "w") as f:
                json.dump({"ephemeral": None, "version": "3.0.0"}, f)
            write_expected(os.path.join(folder, f"expected{step}" if kind == "olmo2" else "expected"), *olmo_expected(kind, whole, full))
            if "flex" not in kind:  # the router of experts runs on GPUs only
                compare_logits(f"olmo_core/{kind}", whole, at)
        dist.barrier()
    dist.destroy_process_group()


def make_olmo_core(top):
    import torch.multiprocessing as mp

    for i, (kind, world) in enumerate([("olmo2", 2), ("olmo3", 3), ("llama", 2), ("qwen3", 2), ("gemma3", 2), ("flex_olmo", 2), ("flex_olmo_dropless", 2)]):
        folder = os.path.join(top, "olmo_core", kind)
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
        mp.spawn(olmo_rank, args=(world, kind, folder, 29600 + i), nprocs=world)
        steps = {"steps": {"step10": "expected10", "step20": "expected20"}, "latest": "step20"} if kind == "olmo2" else {}
        write_case(folder, open="run", config=True, made_by=f"ai2-olmo-core 3.0.0, save_model_and_optim_state, FSDP2, {world} ranks", **steps)
    # the folder of the weights by itself, without config.json: a base says what it is
    source, folder = os.path.join(top, "olmo_core", "qwen3"), os.path.join(top, "olmo_core", "qwen3_bare")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    os.makedirs(os.path.join(folder, "base"))
    shown(os.path.join(folder, "run"), os.path.join(folder, "base", "x"))
    shutil.move(os.path.join(folder, "base", "x", "config.json"), os.path.join(folder, "base"))
    shutil.rmtree(os.path.join(folder, "base", "x"))
    os.remove(os.path.join(folder, "run", "step10", "config.json"))
    write_case(folder, open="run/step10/model_and_optim", base="base", made_by="the same, config.json lost; the base has a config alone")


    make_olmo_defects(top)


def make_olmo_defects(top):
    def damage(case, says, change, source="olmo3"):
        folder = os.path.join(top, "olmo_core", case)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(os.path.join(top, "olmo_core", source, "run", "step10"), os.path.join(folder, "run", "step10"))
        path = os.path.join(folder, "run", "step10", "config.json")
        with open(path) as f:
            config = json.load(f)
        change(config, config["model"], config["model"]["block"])
        with open(path, "w") as f:
            json.dump(config, f)
        write_case(folder, open="run", compare="refuse", says=says, note=case, made_by=f"{source}, damaged")

    damage("no_model", "no object 'model'", lambda config, model, block: config.pop("model"))
    damage("no_layers", "n_layers", lambda config, model, block: model.update(n_layers=0))
    damage("no_block", "does not say what layer 2", lambda config, model, block: model.update(block={"a": block}, block_pattern=["a", "a", "b"], block_overrides=None))
    damage("no_window", "no size for layer 0", lambda config, model, block: [b["sequence_mixer"]["sliding_window"].update(pattern=[]) for b in
                                                                           (block, *model["block_overrides"].values())])
    damage("two_windows", "windows of several sizes", lambda config, model, block: block["sequence_mixer"]["sliding_window"].update(pattern=[4, 8, -1]))
    damage("complex", "complex numbers", lambda config, model, block: [b["sequence_mixer"]["rope"].update(name="complex") for b in
                                                                      (block, *model["block_overrides"].values())])
    damage("other_heads", "dimension 0 of", lambda config, model, block: [b["sequence_mixer"].update(n_kv_heads=4) for b in
                                                                                (block, *model["block_overrides"].values())])
    damage("two_kinds", "layers of several kinds", lambda config, model, block: model["block_overrides"]["2"].update(dropout=0.5))


# ---- LitGPT ----

SMALL = dict(n_layer=2, n_embd=16, n_head=4, vocab_size=VOCAB - 3, padded_vocab_size=VOCAB, block_size=32)
GROUPED = SMALL | dict(n_query_groups=2, intermediate_size=24)
GEMMA = GROUPED | dict(n_layer=3, head_size=6, attention_scores_scalar=6, sliding_window_size=4)
LITGPT = {
    "llama": ("Llama-3.2-1B", GROUPED), "mistral": ("Mistral-7B-v0.3", GROUPED), "qwen2": ("Qwen2.5-0.5B", GROUPED),
    "qwen3": ("Qwen3-0.6B", GROUPED | dict(head_size=6)), "gemma": ("Gemma-7b", GROUPED | dict(head_size=6)),
    "gemma2": ("Gemma-2-2b", GEMMA | dict(sliding_window_indices=[1, 0, 1])),
    "gemma3": ("Gemma-3-1b-it", GEMMA | dict(sliding_window_indices=[1, 1, 0], rope_indices=[1, 1, 0])),
    "phi2": ("phi-2", SMALL | dict(rotary_percentage=0.5)), "phi3": ("Phi-3-mini-4k-instruct", GROUPED | dict(sliding_window_size=4)),
    "pythia": ("pythia-14m", SMALL | dict(rotary_percentage=0.5)), "mixtral": ("Mixtral-8x7B-v0.1", GROUPED | dict(n_expert=2, n_expert_per_token=1)),
    "qwen3_moe": ("Qwen3-30B-A3B", GROUPED | dict(n_expert=4, n_expert_per_token=2, moe_intermediate_size=8, head_size=4)),
}


def litgpt_model(kind, seed):
    from litgpt.config import Config
    from litgpt.model import GPT

    name, sizes = LITGPT[kind]
    torch.manual_seed(seed)
    config = Config.from_name(name, **sizes)
    model = GPT(config)
    gemma = "Gemma" in name
    fill(model, lambda n: 1.0 if n.endswith("weight") and ("norm" in n or "ln_f" in n) and not gemma else 0.0)
    if gemma:  # its classes tie them
        model.lm_head.weight.data.copy_(model.transformer.wte.weight.data)
    return config, model


def litgpt_save(config, model, step, **more):
    import lightning
    from litgpt.utils import save_config

    os.makedirs(step)
    lightning.Fabric(devices=1, accelerator="cpu").save(os.path.join(step, "lit_model.pth"), {"model": model, **more})
    save_config(config, Path(step))


def litgpt_converted(step):
    from litgpt.scripts.convert_lit_checkpoint import convert_lit_checkpoint

    out = Path(step + ".converted")
    with redirect_stdout(io.StringIO()):
        convert_lit_checkpoint(Path(step), out)
    tensors = torch.load(out / "model.pth", mmap=False)
    shutil.rmtree(out)
    return tensors


def make_litgpt_lora(top):
    """LoRA on q and v, as LitGPT does by itself, and on all: the adapter, and what LitGPT's own merge makes of it."""
    import lightning
    import yaml
    from litgpt import lora
    from litgpt.scripts.merge_lora import merge_lora
    from litgpt.utils import save_config

    for case, kind, more in (("lora", "llama", {}), ("lora_all", "qwen3", dict(lora_key=True, lora_projection=True, lora_mlp=True, lora_head=True))):
        folder = os.path.join(top, "litgpt", case)
        shutil.rmtree(folder, ignore_errors=True)
        config, model = litgpt_model(kind, 5)
        base, step = os.path.join(folder, "lit_base"), os.path.join(folder, "run", "final")
        os.makedirs(base), os.makedirs(step)
        torch.save(model.state_dict(), os.path.join(base, "lit_model.pth"))
        save_config(config, Path(base))
        given = dict(lora_r=2, lora_alpha=4, lora_dropout=0.05, lora_query=True, lora_key=False, lora_value=True, lora_projection=False, lora_mlp=False,
                     lora_head=False) | more
        adapted = lora.GPT(lora.Config.from_file(os.path.join(base, "model_config.yaml"), **given))
        adapted.load_state_dict(model.state_dict(), strict=False)
        with torch.no_grad():
            for name, p in adapted.named_parameters():
                if "lora_" in name:
                    p.copy_(rounded(0.2 * torch.randn_like(p)))
        lightning.Fabric(devices=1, accelerator="cpu").save(os.path.join(step, "lit_model.pth.lora"), {"model": adapted}, filter={"model": lora.lora_filter})
        save_config(config, Path(step))
        with open(os.path.join(step, "hyperparameters.yaml"), "w") as f:
            yaml.dump(given | {"checkpoint_dir": base, "precision": "32-true"}, f)
        for at in (base, step):
            for name in ("tokenizer.json", "tokenizer_config.json"):
                with open(os.path.join(at, name), "w") as f:
                    f.write("{}")
        merged = os.path.join(folder, "merged")
        shutil.copytree(step, merged)
        with redirect_stdout(io.StringIO()):
            merge_lora(Path(merged))
        write_expected(os.path.join(folder, "expected_merged"), litgpt_converted(merged))
        write_expected(os.path.join(folder, "expected"), litgpt_peft(config, adapted), file="adapter_model.safetensors")
        shown(base, os.path.join(folder, "base"))
        with open(os.path.join(step, "hyperparameters.yaml"), "w") as f:
            yaml.dump(given | {"checkpoint_dir": "checkpoints/x", "precision": "32-true"}, f)
        shutil.rmtree(merged), shutil.rmtree(base)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            os.remove(os.path.join(step, name))
        for name in os.listdir(os.path.join(folder, "base")):
            if name.startswith("tokenizer"):
                os.remove(os.path.join(folder, "base", name))
        write_case(folder, open="run", base="base", made_by="litgpt 0.5.13: fabric.save with lora_filter, merge_lora, convert_lit_checkpoint")


def litgpt_peft(config, adapted):
    """The matrices of LoRA as PEFT names them: of q, k and v, those that are adapted, one below the other."""
    names = {"attn.proj": "self_attn.o_proj", "mlp.fc_1": "mlp.gate_proj", "mlp.fc_2": "mlp.up_proj", "mlp.proj": "mlp.down_proj"}
    tensors, rows = {}, (config.n_head * config.head_size, config.n_query_groups * config.head_size, config.n_query_groups * config.head_size)
    for name, p in adapted.state_dict().items():
        module, _, which = name.rpartition(".")
        if not which.startswith("lora_"):
            continue
        if module == "lm_head":
            tensors[f"base_model.model.lm_head.{which}.weight"] = p
            continue
        _, _, layer, part = module.split(".", 3)
        prefix = f"base_model.model.model.layers.{layer}."
        if part == "attn.qkv":
            enabled = [x for x, on in zip("qkv", adapted.transformer.h[int(layer)].attn.qkv.enable_lora) if on]
            sizes = [len(p) // len(enabled)] * len(enabled) if which == "lora_A" else [n for x, n in zip("qkv", rows) if x in enabled]
            for x, t in zip(enabled, p.split(sizes)):
                tensors[f"{prefix}self_attn.{x}_proj.{which}.weight"] = t
        else:
            tensors[f"{prefix}{names[part]}.{which}.weight"] = p
    return tensors


def make_litgpt(top):
    for kind in LITGPT:
        folder = os.path.join(top, "litgpt", kind)
        shutil.rmtree(folder, ignore_errors=True)
        if kind == "llama":  # a run of pretraining that has ended, one of whose saves was interrupted
            for seed, name in enumerate(("step-00000010", "step-00000020", "final")):
                config, model = litgpt_model(kind, seed)
                step = os.path.join(folder, "run", name)
                litgpt_save(config, model, step, optimizer=torch.optim.AdamW(model.parameters()), iter_num=3, step_count=10)
                write_expected(os.path.join(folder, "expected_" + name), litgpt_converted(step))
            os.makedirs(os.path.join(folder, "run", "step-00000030"))
            shutil.copy(os.path.join(step, "lit_model.pth"), os.path.join(folder, "run", "step-00000030"))
            write_case(folder, open="run", steps={n: "expected_" + n for n in ("step-00000010", "step-00000020", "final")}, incomplete=["step-00000030"], latest="final",
                       made_by="litgpt 0.5.13: fabric.save as litgpt pretrain does, convert_lit_checkpoint")
            compare_logits("litgpt/" + kind, model, os.path.join(folder, "run"))
            continue
        config, model = litgpt_model(kind, 3)
        step = os.path.join(folder, "run")
        litgpt_save(config, model, step)
        write_expected(os.path.join(folder, "expected"), litgpt_converted(step))
        compare_logits("litgpt/" + kind, model, step)
        file = "run/lit_model.pth" if kind == "qwen3" else "run"  # the file stands for its folder
        write_case(folder, open=file, made_by="litgpt 0.5.13: fabric.save as litgpt finetune_full does, convert_lit_checkpoint")
    make_litgpt_untied(top)
    make_litgpt_lora(top)
    make_litgpt_defects(top)


def make_litgpt_untied(top):
    """Gemma's output matrix, which LitGPT trains by itself: its converter leaves it out."""
    folder = os.path.join(top, "litgpt", "gemma2_untied")
    shutil.rmtree(folder, ignore_errors=True)
    config, model = litgpt_model("gemma2", 4)
    with torch.no_grad():
        model.lm_head.weight.copy_(rounded(0.3 * torch.randn_like(model.lm_head.weight)))
    litgpt_save(config, model, os.path.join(folder, "run"))
    write_expected(os.path.join(folder, "expected"), litgpt_converted(os.path.join(folder, "run")))
    write_case(folder, open="run", made_by="litgpt 0.5.13: fabric.save as litgpt finetune_full does, convert_lit_checkpoint")
    compare_logits("litgpt/gemma2_untied", model, os.path.join(folder, "run"), tie_word_embeddings="false")


def make_litgpt_defects(top):
    def damage(case, says, change, source="qwen2"):
        folder = os.path.join(top, "litgpt", case)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(os.path.join(top, "litgpt", source, "run"), os.path.join(folder, "run"))
        change(os.path.join(folder, "run"))
        write_case(folder, open="run", compare="refuse", says=says, note=case, made_by=f"{source}, damaged")

    def edit(old, new):
        def change(run):
            path = os.path.join(run, "model_config.yaml")
            with open(path) as f:
                text = f.read()
            assert old in text
            with open(path, "w") as f:
                f.write(text.replace(old, new))
        return change

    damage("broken_config", "model_config.yaml", edit("n_head: 4", "n_head: [4"))
    damage("other_groups", "dimension 0 of tensor 'transformer.h.0.attn.qkv", edit("n_query_groups: 2", "n_query_groups: 4"))
    damage("no_config", "model_config.yaml", lambda run: os.remove(os.path.join(run, "model_config.yaml")))
    damage("prompts", "adapter fine-tuning", lambda run: os.rename(os.path.join(run, "lit_model.pth"), os.path.join(run, "lit_model.pth.adapter_v2")))
    damage("own_yarn", "YaRN", edit("rope_adjustments: null", "rope_adjustments: {factor: 4.0, beta_fast: 32, beta_slow: 1, original_max_seq_len: 16}"))


# ---- torchtune ----


def make_torchtune(top):
    """FullModelHFCheckpointer of a tiny Llama, and the names of older versions."""
    from torchtune.training import FullModelHFCheckpointer
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = os.path.join(top, "torchtune", "epochs")
    shutil.rmtree(os.path.join(top, "torchtune"), ignore_errors=True)
    torch.manual_seed(2)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                                         max_position_embeddings=32)).bfloat16()
    source = os.path.join(folder, "source")
    model.save_pretrained(source, max_shard_size="5KB")
    files = sorted(f for f in os.listdir(source) if f.endswith(".safetensors"))
    checkpointer = FullModelHFCheckpointer(source, files, "LLAMA3", os.path.join(folder, "run"), safe_serialization=True)
    state = checkpointer.load_checkpoint()
    for epoch in (0, 1):
        checkpointer.save_checkpoint({k: v for k, v in state.items()}, epoch=epoch, intermediate_checkpoint=epoch == 0)
    tensors = {k: v for k, v in model.state_dict().items()}
    write_expected(os.path.join(folder, "expected"), tensors)
    shutil.rmtree(source)
    write_case(folder, open="run", steps={"epoch_0": "expected", "epoch_1": "expected"}, latest="epoch_1", made_by="torchtune 0.6.1: FullModelHFCheckpointer")
    saved = os.path.join(folder, "run", "epoch_1")
    parts = [load_file(os.path.join(saved, f)) for f in sorted(os.listdir(saved)) if f.endswith(".safetensors")]

    def other_names(case, name, save, at="run"):
        folder = os.path.join(top, "torchtune", case)
        write_expected(os.path.join(folder, "expected"), tensors)
        os.makedirs(os.path.join(folder, at))
        shutil.copy(os.path.join(saved, "config.json"), os.path.join(folder, at))
        for i, part in enumerate(parts):
            save(part, os.path.join(folder, at, name.format(i + 1, len(parts))))
        write_case(folder, open="run", made_by="the same tensors, under the names of torchtune's older versions")

    other_names("ft_model", "ft-model-{:05}-of-{:05}.safetensors", save_file, "run/epoch_0")
    other_names("ft_model_bin", "ft-model-{:05}-of-{:05}.bin", torch.save, "run/epoch_0")
    other_names("hf_model", "hf_model_{:04}_0.pt", torch.save)
    other_names("hf_model_safe", "hf_model_{:04}_3.safetensors", save_file)
    other_names("hf_model_epochs", "hf_model_{:04}_11.pt", torch.save)
    other_names("with_adapter", "model-{:05}-of-{:05}.safetensors", save_file, "run/epoch_0")
    for i, part in enumerate(parts):  # an earlier epoch, of other values
        torch.save({k: v + 1 for k, v in part.items()}, os.path.join(top, "torchtune", "hf_model_epochs", "run", f"hf_model_{i + 1:04}_2.pt"))
    folder = os.path.join(top, "torchtune", "with_adapter")
    at = os.path.join(folder, "run", "epoch_0")
    shutil.copy(os.path.join(saved, "model.safetensors.index.json"), at)
    save_file({f"base_model.model.model.layers.0.self_attn.q_proj.lora_{x}.weight": torch.ones(s) for x, s in (("A", (2, 16)), ("B", (16, 2)))},
              os.path.join(at, "adapter_model.safetensors"))
    with open(os.path.join(at, "adapter_config.json"), "w") as f:
        json.dump({"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "base_model_name_or_path": "x"}, f)
    write_case(folder, open="run", absent=["adapter_config.json"], made_by="the same model, and an adapter beside it as torchtune 0.6.1 writes them with LoRA")


if __name__ == "__main__":
    {"olmo_core": make_olmo_core, "litgpt": make_litgpt, "torchtune": make_torchtune}[sys.argv[1]](os.path.abspath(sys.argv[2]))
