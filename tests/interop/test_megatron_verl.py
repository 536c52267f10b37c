# SPDX-License-Identifier: Apache-2.0
"""Steps of verl's Megatron runs, as its MegatronCheckpointManager composes them, with distributed checkpoints by megatron-core of the
folders CKPTFS_MEGATRON: up to 0.8 one of model, optimizer, scheduler and random states with huggingface/ beside it (0.4.1 and 0.7.0), since
0.9 one each (0.9.1). The model must be save_pretrained's, with the config and the tokenizer that verl put there."""

import argparse
import json
import os
import pickle
import shutil
import subprocess
import sys
import unittest

try:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    import megatron_writer as mw
    from tensor_case import CKPT, SEED, TensorCase, export, ranks, read_all
    from test_megatron import CORES, make_model
    from test_written_megatron import PLAN, preload
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

ADAM = ("fp32_param", "exp_avg", "exp_avg_sq")


def common_of(optimizer):
    """What of verl's state dict is in common.pt: the optimizer's groups and the scheduler's numbers."""
    groups = [{"lr": 1e-6, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "wd_mult": 1.0, "step": torch.tensor(7)}]
    scheduler = {"max_lr": 1e-6, "lr_warmup_steps": 0, "num_steps": 7, "lr_decay_style": "constant", "start_wd": 0.01}
    return {"optimizer": {"param_state_sharding_type": "fully_reshardable", "optimizer": {"param_groups": groups}}, "lr_scheduler": scheduler} if optimizer else {}


def one_save(world, rank, folder, jobs):
    """The ranks of a job: tp * pp of them, each of which has the pieces of its tensor rank and of its half of the layers."""
    import torch.distributed as dist
    preload()
    mw.without_forks()
    from megatron.core import dist_checkpointing as dc
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    dist.init_process_group("gloo", init_method=f"file://{folder}.store", rank=rank, world_size=world)
    piece = dc.ShardedTensor.from_rank_offsets
    for job in jobs:
        with open(job["state"], "rb") as f:
            sd, cfg = pickle.load(f)
        torch.manual_seed(SEED)
        model = mw.Model(sd, cfg, job["plan"])
        if job["value"]:
            model.last["output_layer.weight"] = torch.randn(1, cfg.hidden_size).to(torch.bfloat16), mw.ALL
        state = common_of("optimizer" in job["holds"])
        for i, (key, lead, t, cut) in enumerate(mw.chunks(model)):
            if i % world != rank:
                continue
            at = [(a, k, n) for a, (n, k) in enumerate(lead)] + ([(cut[0] + len(lead), cut[1], cut[2])] if cut else [])
            how = dict(prepend_axis_num=len(lead), replica_id=0)
            if "model" in job["holds"]:
                state[f"model{i}"] = piece(key, t.clone(), *at, **how)
            if "adapter" in job["holds"] and "linear_proj.weight" in key:
                state[f"adapter{i}"] = piece(key.replace("linear_proj.weight", "linear_proj.adapter.linear_in.weight"), t.clone(), *at, **how)
            if "optimizer" in job["holds"]:
                for x in ADAM:
                    state[f"{x}{i}"] = piece(f"optimizer.state.{x}.{key}", t.float(), *at, **how)
        if "rng" in job["holds"]:
            state["rng_state"] = ShardedObject("rng_state", [{"torch_rng_state": torch.get_rng_state(), "rng_tracker_states": {}}], (2, 2), (rank // 2, rank % 2))
        os.makedirs(job["dir"], exist_ok=True)
        dc.save(state, job["dir"], content_metadata={"singleton_local_shards": False, "chained_optim_avoid_prefix": True})
    dist.destroy_process_group()


@unittest.skipUnless(CORES, "no megatron-core")
class Verl(TensorCase):
    def setUp(self):
        super().setUp()
        self.want = {}

    def save(self, core, *steps):
        """(folder of a step's actor or critic, family, {distributed checkpoint in it: what it holds}, value head) each, in one job of 4 ranks."""
        jobs = []
        for folder, name, parts, value in steps:
            hf, state = self.path(f"{name}.hf"), self.path(f"{name}.pkl")
            if name not in self.want:
                sd, cfg = make_model(name, hf, SEED)
                self.want[name] = sd
                with open(state, "wb") as f:
                    pickle.dump((sd, cfg), f)
            plan = PLAN | dict(tp=2, pp=2, ep=1, etp=2, container="dist", bridge=False, centred=False, pad=0)
            jobs += [dict(dir=os.path.join(folder, at), state=state, plan=plan, holds=holds, value=value) for at, holds in parts.items()]
        ranks.run(4, "test_megatron_verl", "one_save", self.path(f"job{len(os.listdir(self.tmp))}"), jobs, folder=self.tmp, PYTHONPATH=core, OMP_NUM_THREADS="1")

    def add_config(self, name, folder):
        """What verl adds: hf_config.save_pretrained and the tokenizer's."""
        os.makedirs(folder)
        shutil.copy(os.path.join(self.path(f"{name}.hf"), "config.json"), folder)
        with open(os.path.join(folder, "tokenizer_config.json"), "w") as f:
            json.dump({"model_max_length": 64}, f)

    def served(self, name, path, *options):
        out = self.path("out")
        done = export(path, out, *options)
        self.assertEqual((done.returncode, "warning" in done.stderr), (0, False), f"{path}: {done.stderr}")
        self.same(read_all(out), self.want[name], path)
        for file in ("config.json", "tokenizer_config.json"):
            with open(os.path.join(out, file), "rb") as mine, open(os.path.join(self.config, file), "rb") as theirs:
                self.assertEqual(mine.read(), theirs.read(), f"{path}: {file}")
        shutil.rmtree(out)

    def refused(self, path, *needles):
        done = export(path, self.path("out"))
        self.assertEqual(done.returncode, 1, done.stdout)
        for needle in needles:
            self.assertIn(needle, done.stderr)

    def raw(self, path):
        """The names and tensors of the raw view."""
        out = self.path("raw")
        done = export(path, out, "view=raw")
        self.assertEqual(done.returncode, 0, done.stderr)
        got = read_all(out)
        shutil.rmtree(out)
        return got

    def objects(self, path):
        """The values besides tensors, by name, through the library."""
        top = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "contrib", "python")
        program = "import sys, ckptfs\nwith ckptfs.open(sys.argv[1], view='raw') as f:\n    print('\\n'.join(f.objects()))"
        env = os.environ | {"PYTHONPATH": top, "CKPTFS_LIBRARY_PATH": os.environ.get("CKPTFS_BUILD", "build/dev")}
        done = subprocess.run([sys.executable, "-c", program, path], env=env, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout.split("\n")

    def test_steps_at_every_depth(self):
        """Both layouts, of the oldest and the newest pinned version; what a user may name; model, config and tokenizer, with no option."""
        old, new = ({"dist_ckpt": ["model", "optimizer", "rng"]}, "huggingface"), \
                   ({"model/dist_ckpt": ["model"], "optimizer/dist_ckpt": ["optimizer"], "extra/dist_ckpt": ["rng"]}, "model/huggingface")
        for core in CORES[:1] + CORES[1:][-1:]:
            runs = [(name, self.path(f"{os.path.basename(core)}-{name}-{i}"), *layout) for name in ("llama", "qwen3_moe", "deepseek_v3") for i, layout in enumerate((old, new))]
            self.save(core, *[(f"{run}/global_step_7/actor", name, parts, False) for name, run, parts, _ in runs])
            for name, run, parts, config in runs:
                with self.subTest(f"{name} {config} {core}"):
                    actor = f"{run}/global_step_7/actor"
                    self.config = os.path.join(actor, config)
                    self.add_config(name, self.config)
                    with open(f"{run}/latest_checkpointed_iteration.txt", "w") as f:
                        f.write("7")
                    for path in (run, os.path.dirname(actor), actor, os.path.join(actor, list(parts)[0])):
                        self.served(name, path)
                    done = subprocess.run([CKPT, "explain", actor, "model.norm.weight"], capture_output=True, text=True)
                    self.assertIn("recipe ", done.stdout, done.stderr)
                    raw = self.raw(actor)
                    states = {f"optimizer.state.{x}.{k}": t.float() for x in ADAM for k, t in raw.items() if not k.startswith("optimizer.")}
                    self.assertGreater(len(states), 20)
                    self.same({k: t for k, t in raw.items() if k.startswith("optimizer.")}, states, actor)
                    objects = " ".join(self.objects(actor))
                    for one in ("rng_state", "lr_scheduler", "num_steps", "param_groups"):
                        self.assertIn(one, objects)

    def test_value_heads_and_half_adapters_are_refused(self):
        critic, adapter = self.path("critic"), self.path("adapter")
        self.save(CORES[-1], (critic, "llama", {"dist_ckpt": ["model"]}, True), (adapter, "llama", {"model/dist_ckpt": ["adapter"]}, False))
        self.add_config("llama", f"{critic}/huggingface")
        self.add_config("llama", f"{adapter}/model/huggingface")
        self.refused(critic, "'output_layer.weight' has one row: it is a value head")
        self.assertEqual(self.raw(critic)["output_layer.weight"].shape, (1, 32))
        self.refused(adapter, "lora_B")  # a matrix without the other

    def test_no_config(self):
        """0.9 without hf_model saves no config (the folder for it is there): base= says what the model is."""
        actor = self.path("actor")
        self.save(CORES[-1], (actor, "llama", {"model/dist_ckpt": ["model"]}, False))
        os.makedirs(f"{actor}/model/huggingface")
        self.refused(actor, "holds no model config", "base=")
        self.config = self.path("base")
        self.add_config("llama", self.config)
        self.served("llama", actor, f"base={self.config}")

    def test_models_that_verl_exported(self):
        """With mbridge, dist_ckpt holds the optimizer and the model is in huggingface/; with hf_model it is in both."""
        for layout, holds in (("", ["optimizer", "rng"]), ("", ["model", "optimizer"]), ("model/", ["model"])):
            with self.subTest(f"{layout} {holds}"):
                run = self.path(f"run{len(os.listdir(self.tmp))}")
                actor = f"{run}/global_step_7/actor"
                self.save(CORES[-1], (actor, "qwen3_moe", {f"{layout}dist_ckpt": holds}, False))
                self.config = f"{actor}/{layout}huggingface"
                self.add_config("qwen3_moe", self.config)
                for file in os.listdir(self.path("qwen3_moe.hf")):
                    if "safetensors" in file:
                        shutil.copy(os.path.join(self.path("qwen3_moe.hf"), file), self.config)
                for path in (run, os.path.dirname(actor), actor):
                    self.served("qwen3_moe", path)
                self.assertEqual("embedding.word_embeddings.weight" in self.raw(f"{actor}/{layout}dist_ckpt"), "model" in holds)


if __name__ == "__main__":
    unittest.main()
