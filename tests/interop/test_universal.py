# SPDX-License-Identifier: Apache-2.0
"""The view deepspeed_universal: DeepSpeed's own engine resumes from it (load_universal), at every stage of ZeRO, and on other numbers of ranks.
Masters and moments are the source's, bit for bit, and after a step with the same input they are those of the run that went on."""

import os
import shutil
import sys

try:
    import torch
    import torch.distributed.checkpoint as dcp
    import transformers as tf
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.state_dict import get_state_dict

    from states_case import MOMENTS, SIZES, StatesCase, megatron_run, nanotron_run, trained
    from tensor_case import export, ranks
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

DEEPSPEED = [p for p in os.environ.get("CKPTFS_DEEPSPEED", "").split(":") if os.path.isdir(p)]
if not DEEPSPEED:
    print("skipped: CKPTFS_DEEPSPEED has no folder with deepspeed")
    sys.exit(77)


def moments_of(masters):
    return {f"optim.state.{k}.{kind}": of(t.float()) for k, t in masters.items() for kind, of in MOMENTS.items()}


class Universal(StatesCase):
    def universal(self, run, name, *options, ok=True):
        out = self.path(name)
        shutil.rmtree(out, ignore_errors=True)
        done = export(run, out, "view=deepspeed_universal", *options)
        self.assertEqual(done.returncode == 0, ok, done.stderr)
        return out if ok else done.stderr, done.stderr

    def resume(self, world, jobs):
        """Jobs of deepspeed_writer.resumed: what each has found."""
        ranks.run(world, "deepspeed_writer", "resumed", ranks.free_port(), self.tmp, jobs, folder=self.tmp, PYTHONPATH=DEEPSPEED[-1])
        return [torch.load(self.path(job[-1] + ".got")) for job in jobs]

    def read_again(self, view, base, masters, moments):
        """Our own reader finds in the view what it was made of."""
        with open(os.path.join(view, "latest_universal")) as f:
            tag = os.path.join(view, f.read())
        for run in (view, tag):
            self.same(self.view(run, "state=master", "base=" + base)[0], masters)
        for kind in MOMENTS:
            self.same(self.view(view, "state=" + kind, "base=" + base)[0], {k[len("optim.state."):-len(kind) - 1]: t for k, t in moments.items() if k.endswith("." + kind)})

    def test_deepspeed(self):
        """From DeepSpeed, whose other ranks and stage had other partitions."""
        ranks.run(2, "deepspeed_writer", "groups", ranks.free_port(), self.tmp, [1, 2], folder=self.tmp, PYTHONPATH=DEEPSPEED[-1])
        os.makedirs(self.path("one"))
        ranks.run(2, "deepspeed_writer", "groups", ranks.free_port(), self.path("one"), [3], False, folder=self.tmp, PYTHONPATH=DEEPSPEED[-1])
        views, jobs = {}, []
        for source in ("groups1", "groups2", "one/groups3"):
            wide = source[:3] != "one"
            base, views[source] = self.path(source + "-base"), self.path(source + "-view")
            _, said = self.universal(self.path(source, "global_step2"), views[source], "optimizer", "base=" + base)
            self.assertIn(f"the optimizer that resumes must have {1 + wide} of them, in this order", said)
            self.assertEqual("ZeRO 3 gives all groups of parameters the hyper-parameters of the first" in said, wide)
            want = torch.load(self.path(source + ".want"))
            self.read_again(views[source], base, want["masters"], want["moments"])
            jobs += [[views[source], base, stage, wide, "bf16", f"{source.replace('/', '-')}-{stage}"] for stage in (1, 2, 3)]
        for world in (1, 2):
            for job, got in zip(jobs, self.resume(world, jobs)):
                with self.subTest(job=job[-1], world=world):
                    source, stage, wide = job[0].removeprefix(self.tmp + "/").removesuffix("-view"), job[2], job[3]
                    want = torch.load(self.path(source + ".want"))
                    self.assertEqual(got["global_steps"], 2)
                    self.same(got["masters"], want["masters"])
                    self.same(got["moments"], want["moments"])
                    decays = [0.125] * (1 + wide) if stage == 3 else [0.125, 0.0][:1 + wide]
                    self.assertEqual([[g[k] for k in ("lr", "betas", "eps", "weight_decay")] for g in got["groups"]],
                                     [[0.0078125, (0.75, 0.875), 1e-6, decay] for decay in decays])
                    self.assertEqual(set(got["steps"]), {2.0})
                    if stage < 3 or not wide:  # ZeRO 3 gives all groups the first one's, and one step
                        self.same(got["after"][0], want["after"][0])
                        self.same(got["after"][1], want["after"][1])

    def test_conversions(self):
        """What DeepSpeed's own ds_to_universal makes of a tag: the same files, with the same tensors, and they are read alike."""
        ranks.run(2, "deepspeed_writer", "groups", ranks.free_port(), self.tmp, [1, 2, 3], folder=self.tmp, PYTHONPATH=DEEPSPEED[-1])
        for stage in (1, 2, 3):
            own, base = self.path(f"groups{stage}", "global_step2_universal"), self.path(f"groups{stage}-base")
            want = torch.load(self.path(f"groups{stage}.want"))
            self.check_mixed(stage, base)
            for run in (self.path(f"groups{stage}", "global_step2"), own):
                with self.subTest(stage=stage, run=os.path.basename(run)):
                    view, _ = self.universal(run, "written", "optimizer", "base=" + base)
                    tag = os.path.join(view, "global_step2_universal")
                    self.assertEqual(sorted(os.listdir(tag + "/zero")), sorted(os.listdir(own + "/zero")))
                    for name in want["masters"]:
                        for file in ("fp32", "exp_avg", "exp_avg_sq"):
                            got, theirs = (torch.load(f"{top}/zero/{name}/{file}.pt") for top in (tag, own))
                            theirs = theirs if isinstance(theirs, dict) else {"cat_dim": 0, "param": theirs.view(got["param"].shape)}
                            self.assertEqual((list(got), got["cat_dim"]), (["cat_dim", "param"], theirs["cat_dim"]))
                            self.same({"": got["param"]}, {"": theirs["param"]}, f"{name}/{file}")
                        step = torch.load(f"{tag}/zero/{name}/step.pt")
                        self.assertEqual((step, step.dtype, step.shape), (2, torch.float32, ()))
                        if stage < 3:
                            self.same({"": step}, {"": torch.load(f"{own}/zero/{name}/step.pt")})
                    got, said = torch.load(f"{tag}/zero/optimizer_state.pt"), want["converted"]
                    self.assertEqual([{k: v for k, v in g.items() if k != "params"} for g in got["param_groups"]],
                                     [{k: v for k, v in g.items() if k != "params"} for g in said["groups"]])
                    self.assertEqual(got["param_groups"], got["optimizer_state_dict"]["param_groups"])
                    self.assertEqual(got["optimizer_state_dict"]["state"], {0: {"step": 2}})
                    for file in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
                        got = torch.load(os.path.join(tag, file))
                        self.assertEqual([k for k in got if k not in said["keys"]], [])
                        for k in set(said) - {"groups", "keys", "shapes"}:
                            self.assertEqual(got[k], said[k], k)
                        self.assertEqual([{k: tuple(s) for k, s in g.items()} for g in got["param_shapes"]], said["shapes"])

    def check_mixed(self, stage, base):
        """One rank's file of the optimizer, or all of them, is of the next step, or one is missing."""
        mixed, file = self.path("mixed"), "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
        shutil.rmtree(mixed, ignore_errors=True)
        shutil.copytree(self.path(f"groups{stage}", "global_step2"), mixed)

        def refused(*words):
            for option in ("state=exp_avg", "state=master"):
                said = self.refused(mixed, option, "base=" + base)
                for word in words:
                    self.assertIn(word, said)

        for rank in (1, 0):
            shutil.copy2(self.path(f"groups{stage}", "global_step3", "bf16_" + file.format(rank)), mixed)
            if rank:
                refused("the optimizer of rank 0 has taken 2 steps, that of rank 1 3: files of different saves")
            elif stage < 3:  # the weights of ZeRO 3 lie in these files, so they are of step 3 now
                refused("in the optimizer files, rounded, is not the weight in 'mp_rank_00_model_states.pt': files of different saves")
        os.remove(os.path.join(mixed, "bf16_" + file.format(1)))
        refused(f"the optimizer file of data-parallel rank 1 of 2 (*{file.format(1)}) is missing")

    def test_torch(self):
        """From torch's checkpoints, in F32, with a frozen parameter or a tied one; experts under the names that the model has in memory."""
        configs = {"llama": tf.LlamaConfig(**SIZES), "tied": tf.Qwen2Config(**SIZES, tie_word_embeddings=True),
                   "moe": tf.Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8)}
        jobs, wants = [], []
        threads = torch.get_num_threads()
        self.addCleanup(torch.set_num_threads, threads)
        torch.set_num_threads(1)  # as ranks have, whose gradients are to be the same to the bit
        for name, config in configs.items():
            model, optimizer = trained(config)
            model.requires_grad_(True)
            norm = model.model.norm.weight
            optimizer.param_groups[1]["params"].append(norm)  # at its end, as a parameter that joins late is
            optimizer.state[norm] = {"step": torch.tensor(1.), **{kind: of(norm.detach()) for kind, of in MOMENTS.items()}}
            config.save_pretrained(self.path(name))
            own, optim = get_state_dict(model, optimizer)
            dcp.save({"model": own, "optim": optim}, checkpoint_id=self.path(name + "-run"), no_dist=True)
            view, _ = self.universal(self.path(name + "-run"), name + "-view", "optimizer", "names=memory", "base=" + self.path(name))
            masters = {k: p.detach().clone() for k, p in model.named_parameters()}
            ids = torch.arange(1, 9)[None]
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            after = {k: p.detach().clone() for k, p in model.named_parameters()}
            moments = {f"optim.state.{k}.{kind}": optimizer.state[p][kind].clone() for k, p in model.named_parameters() for kind in MOMENTS}
            for stage in (1, 2, 3):
                jobs.append([view, self.path(name), stage, True, "fp32", f"{name}-{stage}"])
                wants.append((masters, after, moments))
        for world in (1, 2):
            for job, got, (masters, after, moments) in zip(jobs, self.resume(world, jobs), wants):
                with self.subTest(job=job[-1], world=world):
                    self.same(got["masters"], masters)
                    self.same(got["moments"], moments_of(masters))
                    if job[2] < 3:  # ZeRO 3 gives all groups the first one's hyper-parameters
                        self.same(got["after"][1], moments)
                        self.same(got["after"][0], after)

    def test_frameworks(self):
        """From Megatron's and nanotron's runs, whose moments torch wrote anew."""
        megatron_run(self.path("megatron"))
        nanotron_run(self.path("nanotron"), lr=0.25)
        jobs, wants = [], []
        for name, run in (("megatron", self.path("megatron", "iter_0000010")), ("nanotron", self.path("nanotron"))):
            masters = self.view(run, "state=master")[0]
            export(run, self.path(name + "-base"))
            view, _ = self.universal(run, name + "-view", "optimizer")
            self.read_again(view, self.path(name + "-base"), masters, moments_of(masters))
            for stage in (1, 3):
                jobs.append([view, self.path(name + "-base"), stage, False, "bf16", f"{name}-{stage}"])
                wants.append(masters)
        for job, got, masters in zip(jobs, self.resume(2, jobs), wants):
            with self.subTest(job=job[-1]):
                self.same(got["masters"], masters)
                self.same(got["moments"], moments_of(masters))

    def test_faults(self):
        model, optimizer = trained(tf.LlamaConfig(**SIZES))
        model.save_pretrained(self.path("base"))
        base = "base=" + self.path("base")
        own, optim = get_state_dict(model, optimizer)
        dcp.save({"model": own, "optim": optim}, checkpoint_id=self.path("run"), no_dist=True)
        self.assertIn("view=deepspeed_universal: DeepSpeed loads a universal checkpoint with the optimizer's states only: add the option optimizer",
                      self.universal(self.path("run"), "written", base, ok=False)[0])
        self.assertIn("option tp does not apply to view=deepspeed_universal", self.universal(self.path("run"), "written", "optimizer", base, "tp=2", ok=False)[0])

        # A frozen parameter: in the module alone, and there for our own reader.
        view, said = self.universal(self.path("run"), "written", "optimizer", base)
        self.assertIn("1 tensors have no state of the optimizer ('model.norm.weight' first): DeepSpeed loads no such tensor", said)
        tag = os.path.join(view, "global_step1_universal")
        self.assertFalse(os.path.exists(tag + "/zero/model.norm.weight"))
        module = torch.load(tag + "/mp_rank_00_model_states.pt")["module"]
        self.assertEqual({k for k, t in module.items() if t.numel()}, {"model.norm.weight"})
        self.same(self.view(view, base)[0], load_file(self.path("base", "model.safetensors")))

        # Model files of another step beside them.
        first = os.path.join(tag, "zero_pp_rank_0_mp_rank_00_model_states.pt")
        held = torch.load(first)
        torch.save(held | {"global_steps": 2}, first)
        self.assertIn("holds files of several saves", self.refused(tag, base))
        torch.save(held, first)
        file = tag + "/zero/optimizer_state.pt"
        said = torch.load(file)
        for group in said["param_groups"] + said["optimizer_state_dict"]["param_groups"]:
            group["step"] = 0  # as DeepSpeed's FusedAdam leaves it
        torch.save(said, file)
        again, _ = self.universal(view, "again", "optimizer", base)
        self.assertEqual(torch.load(again + "/global_step1_universal/zero/lm_head.weight/step.pt"), 1)
        [step] = [f"{tag}/zero/{k}/step.pt" for k in list(held["param_shapes"][0])[:1]]
        torch.save(7, step)
        said, _ = self.universal(view, "again", "optimizer", base, ok=False)
        self.assertIn("says that the optimizer took 1 steps, 'zero/model.embed_tokens.weight/step.pt' says 7: files of two saves", said)
        torch.save("two", step)
        said, _ = self.universal(view, "again", "optimizer", base, ok=False)
        self.assertIn("step.pt' is neither a number nor a tensor of one F32", said)

        apart = {**optim, "state": {k: {**v, "step": v["step"] + (k == "lm_head.weight")} for k, v in optim["state"].items()}}
        dcp.save({"model": own, "optim": apart}, checkpoint_id=self.path("apart"), no_dist=True)
        said, _ = self.universal(self.path("apart"), "written", "optimizer", base, ok=False)
        self.assertIn("took different numbers of steps, and DeepSpeed has one for all: give it with optimizer_step=N", said)
        self.universal(self.path("apart"), "written", "optimizer", base, "optimizer_step=5")


if __name__ == "__main__":
    import unittest
    unittest.main()
