# SPDX-License-Identifier: Apache-2.0
"""LoRA as Megatron-Bridge saves it, written here as its modules shard it (tests/golden has real saves): PEFT's adapter, the
merged model and the base of it."""

import json
import os
import subprocess
import sys
import tempfile
import unittest

try:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import torch.distributed.checkpoint as dcp
    import transformers
    import yaml
    from peft import PeftModel
    from safetensors.torch import load_file, save_file
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()
CKPT = os.path.join(os.environ.get("CKPTFS_BUILD", "build/dev"), "fs", "ckpt")
ROOT = "base_model.model.model.layers"
LAYERS, HIDDEN, HEADS, GROUPS, HEAD, FFN, EXPERTS, EXPERT_FFN, RANK, ALPHA = 3, 64, 8, 4, 8, 96, 4, 48, 4, 10
SIZES = dict(vocab_size=96, hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=GROUPS, head_dim=HEAD,
             max_position_embeddings=64, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False)  # fmt: skip
MODEL = dict(num_layers=LAYERS, hidden_size=HIDDEN, ffn_hidden_size=FFN, num_attention_heads=HEADS, num_query_groups=GROUPS, kv_channels=HEAD, gated_linear_unit=True,
             vocab_size=96, layernorm_epsilon=1e-6, rotary_base=10000, share_embeddings_and_output_weights=False, hf_model_id="org/name")  # fmt: skip


def halves(parts):
    """What Megatron's swiglu sharding makes of the ranks' rows: all first halves, then all second halves."""
    return torch.cat([p.chunk(2)[i] for i in (0, 1) for p in parts])


class Adapter:
    """Random adapters under PEFT's names (want), and the same under Megatron's (stored)."""

    def __init__(self, canonical, tp, experts, expert_rank=RANK):
        self.rng = torch.Generator().manual_seed(tp + 10 * canonical)
        self.want, rows = {}, []
        for layer in range(LAYERS):
            at, row = f"{ROOT}.{layer}.", {}
            self.attention(at + "self_attn.", row, canonical)
            if experts:
                own = [self.mlp(f"{at}mlp.experts.{e}.", EXPERT_FFN, expert_rank, canonical, 1) for e in range(EXPERTS)]
                row |= {f"mlp.experts.experts.{k}": torch.stack([o[k] for o in own]) for k in own[0]}
            else:
                row |= {f"mlp.{k}": v for k, v in self.mlp(at + "mlp.", FFN, RANK, canonical, tp).items()}
            rows.append(row)
        self.stored = {f"decoder.layers.{k}": torch.stack([r[k] for r in rows]) for k in rows[0]}

    def pair(self, name, rows, cols, rank=RANK, a=None):
        made = [a if a is not None else self.random(rank, cols), self.random(rows, rank)]
        self.want |= {f"{name}.lora_A.weight": made[0], f"{name}.lora_B.weight": made[1]}
        return made

    def random(self, *shape):
        return (torch.randn(shape, generator=self.rng) * 0.1).bfloat16()

    def attention(self, at, row, canonical):
        a, sizes = self.random(RANK, HIDDEN), dict(q=HEADS * HEAD, k=GROUPS * HEAD, v=GROUPS * HEAD)
        made = {p: self.pair(f"{at}{p}_proj", n, HIDDEN, a=None if canonical else a) for p, n in sizes.items()}
        to = "self_attention.linear_qkv.adapter."
        if canonical:
            row |= {f"{to}adapter_{p}.linear_{io}.weight": made[p][i] for p in sizes for i, io in enumerate(("in", "out"))}
        else:
            groups = [b.view(GROUPS, -1, RANK) for _, b in made.values()]
            row |= {f"{to}linear_in.weight": a, f"{to}linear_out.weight": torch.cat(groups, 1).reshape(-1, RANK)}
        self.put(row, "self_attention.linear_proj", self.pair(at + "o_proj", HIDDEN, HEADS * HEAD))

    def put(self, row, name, pair):
        row |= {f"{name}.adapter.linear_in.weight": pair[0], f"{name}.adapter.linear_out.weight": pair[1]}

    def mlp(self, at, ffn, rank, canonical, tp):
        a, row = self.random(rank, HIDDEN), {}
        made = {p: self.pair(f"{at}{p}_proj", ffn, HIDDEN, rank, None if canonical else a) for p in ("gate", "up")}
        for p, (own, b) in made.items() if canonical else ():
            row |= {f"linear_fc1.adapter.adapter_{p}.linear_in.weight": own, f"linear_fc1.adapter.adapter_{p}.linear_out.weight": halves(b.chunk(tp))}
        if not canonical:
            fused = [torch.cat(r) for r in zip(made["gate"][1].chunk(tp), made["up"][1].chunk(tp))]
            self.put(row, "linear_fc1", (a, halves(fused)))
        self.put(row, "linear_fc2", self.pair(at + "down_proj", HIDDEN, ffn, rank))
        return row


def merge(base, want, alpha=ALPHA):
    out = dict(base)
    for name, a in want.items():
        if ".lora_A." in name:
            b, target = want[name.replace("lora_A", "lora_B")], name.removeprefix("base_model.model.").replace(".lora_A", "")
            out[target] = (base[target].float() + alpha / a.shape[0] * (b.float() @ a.float())).bfloat16()
    return out


class LoraOfMegatron(unittest.TestCase):
    def setUp(self):
        self.tmp = tempfile.TemporaryDirectory()
        self.addCleanup(self.tmp.cleanup)
        self.base = os.path.join(self.tmp.name, "base")

    def model(self, experts):
        torch.manual_seed(3)
        config = transformers.Qwen3MoeConfig(num_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=EXPERT_FFN, **SIZES) if experts else transformers.LlamaConfig(**SIZES)
        transformers.AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(self.base)
        self.weights = load_file(os.path.join(self.base, "model.safetensors"))

    def save(self, tensors, config, peft):
        """A torch_dist save with Bridge's run_config.yaml."""
        run = os.path.join(self.tmp.name, f"run{len(os.listdir(self.tmp.name))}")
        dcp.save({k: v.contiguous() for k, v in tensors.items()}, checkpoint_id=run, no_dist=True)
        with open(os.path.join(run, "metadata.json"), "w") as f:
            json.dump({"sharded_backend": "torch_dist", "sharded_backend_version": 1}, f)
        with open(os.path.join(run, "run_config.yaml"), "w") as f:
            yaml.safe_dump({"model": {"_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider", **MODEL, **config}, "peft": peft}, f)
        return run

    def export(self, run, *options, fails=None):
        self.out = os.path.join(self.tmp.name, f"out{len(os.listdir(self.tmp.name))}")
        done = subprocess.run([CKPT, "export", run, self.out, *(x for o in options for x in ("-o", o))], capture_output=True, text=True)
        if fails:
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertIn(fails, done.stderr)
            return None
        self.assertEqual(done.returncode, 0, done.stderr)
        self.said = done.stderr
        return {k: v for f in os.listdir(self.out) if f.endswith(".safetensors") for k, v in load_file(os.path.join(self.out, f)).items()}

    def same(self, got, want):
        self.assertEqual(got.keys(), want.keys())
        for name, t in want.items():
            self.assertTrue(got[name].dtype == t.dtype and torch.equal(got[name], t), name)

    def peft(self, canonical):
        return {"_target_": "megatron.bridge.peft." + ("canonical_lora.CanonicalLoRA" if canonical else "lora.LoRA"), "dim": RANK, "alpha": ALPHA, "dropout": 0.0}

    def megatron(self):
        """The base's tensors as a checkpoint of Megatron stores them."""
        self.export(self.base, "view=megatron")
        run = self.out
        return {k: v for k, v in self.export(run, "view=raw").items() if v.is_floating_point()}

    def cases(self):
        for experts in (False, True):
            self.model(experts)
            for canonical in (False, True):
                for tp in (1,) if experts else (1, 2, 4):
                    with self.subTest(experts=experts, canonical=canonical, tp=tp):
                        config = dict(tensor_model_parallel_size=tp, **(dict(num_moe_experts=EXPERTS, moe_ffn_hidden_size=EXPERT_FFN, moe_router_topk=2, qk_layernorm=True) if experts else {}))
                        yield Adapter(canonical, tp, experts), config, self.peft(canonical)
            if experts:
                yield Adapter(False, 1, True, RANK // 2), config, dict(self.peft(False), normalize_moe_lora=True)

    def test_an_adapter(self):
        for adapter, config, peft in self.cases():
            run = self.save(adapter.stored, config, peft)
            self.same(self.export(run, f"base={self.base}"), adapter.want)
            self.assertEqual(self.said, "")
            self.same(self.export(run, f"base={self.base}", "lora=merge"), merge(self.weights, adapter.want))
            self.same(self.export(run, "view=raw"), adapter.stored)
            self.same(self.export(run, "lora=adapter"), adapter.want)
            self.assertIn("base= says otherwise", self.said)

    def test_peft_reads_it(self):
        self.model(False)
        adapter = Adapter(True, 2, False)
        self.export(self.save(adapter.stored, dict(tensor_model_parallel_size=2), self.peft(True)), f"base={self.base}")
        model = transformers.AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.bfloat16)
        merged = PeftModel.from_pretrained(model, self.out).merge_and_unload().state_dict()
        self.same({k: merged[k] for k in self.weights}, merge(self.weights, adapter.want))

    def test_a_whole_model(self):
        for experts in (False, True):
            self.model(experts)
            stored, adapter = self.megatron(), Adapter(False, 1, experts)
            config = dict(tensor_model_parallel_size=1, **(dict(num_moe_experts=EXPERTS, moe_ffn_hidden_size=EXPERT_FFN, moe_router_topk=2, qk_layernorm=True) if experts else {}))
            for alpha, peft in ((None, None), (ALPHA, self.peft(False))):
                run = self.save(stored | adapter.stored, config, peft)
                self.same(self.export(run, f"base={self.base}", "lora=base"), self.weights)
                self.same(self.export(run, f"base={self.base}", "lora=adapter"), adapter.want)
                self.assertIs("alpha" in self.said, alpha is None)
                self.same(self.export(run, f"base={self.base}"), adapter.want)
                self.assertIn("left out", self.said)
                if alpha:
                    self.same(self.export(run, f"base={self.base}", "lora=merge"), merge(self.weights, adapter.want))
                else:
                    self.export(run, f"base={self.base}", "lora=merge", fails="option lora_alpha=")
                self.same(self.export(run, f"base={self.base}", "lora=merge", "lora_alpha=6"), merge(self.weights, adapter.want, 6))

    def test_what_is_refused(self):
        self.model(False)
        adapter = Adapter(True, 2, False)
        self.export(self.save(adapter.stored, {}, self.peft(True)), fails="tensor_model_parallel_size")
        self.export(self.save(adapter.stored | {"decoder.layers.mlp.linear_fc2.adapter.weight_magnitude": torch.ones(LAYERS, HIDDEN)}, dict(tensor_model_parallel_size=2), self.peft(True)),
                    fails="weight_magnitude")  # fmt: skip
        self.export(self.save(adapter.stored, dict(tensor_model_parallel_size=2, gated_linear_unit=False), self.peft(True)), fails="not gated")
        self.export(self.save(adapter.stored, dict(tensor_model_parallel_size=2), self.peft(True)), "model_type=phi3", fails="phi3")
        half = {k: v for k, v in adapter.stored.items() if "linear_fc2.adapter.linear_out" not in k}
        self.export(self.save(half, dict(tensor_model_parallel_size=2), self.peft(True)), fails="down_proj.lora_B")

    def test_an_option_for_peft_itself(self):
        """lora_alpha= counts where the adapter's config has none."""
        self.model(False)
        adapter = Adapter(False, 1, False)
        os.mkdir(folder := os.path.join(self.tmp.name, "peft"))
        save_file({k: v.clone() for k, v in adapter.want.items()}, os.path.join(folder, "adapter_model.safetensors"))
        with open(os.path.join(folder, "adapter_config.json"), "w") as f:
            json.dump({"peft_type": "LORA", "r": RANK}, f)
        self.export(folder, f"base={self.base}", "lora=merge", fails="option lora_alpha=")
        self.same(self.export(folder, f"base={self.base}", "lora=merge", "lora_alpha=3"), merge(self.weights, adapter.want, 3))


if __name__ == "__main__":
    unittest.main()
