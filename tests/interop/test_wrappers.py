# SPDX-License-Identifier: Apache-2.0
"""Names that wrappers leave behind in safetensors: transformers loads the view as the model that was wrapped."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import unittest
import warnings

try:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import torch.distributed as dist
    import transformers
    from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
    from safetensors.torch import load_file, save_file
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.nn.parallel import DistributedDataParallel
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()
warnings.simplefilter("ignore")
CKPT = os.path.join(os.environ.get("CKPTFS_BUILD", "build/dev"), "fs", "ckpt")
SMALL = dict(vocab_size=96, hidden_size=64, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64)


def named(module):
    """The parameters under the names that they have in memory, as a script without unwrapping saves them."""
    return dict(module.named_parameters())


def compiled_in_ddp(model):
    return DistributedDataParallel(torch.compile(model)).state_dict()


def ddp_in_compiled(model):
    return torch.compile(DistributedDataParallel(model)).state_dict()


def ddp(model):
    return DistributedDataParallel(model).state_dict()


def compiled(model):
    return torch.compile(model).state_dict()


def layers_compiled_and_checkpointed(model):
    layers = model.model.layers
    layers[0] = torch.compile(checkpoint_wrapper(layers[0]))
    layers[1] = checkpoint_wrapper(torch.compile(layers[1]))
    return named(model)


def all_of_them(model):
    layers_compiled_and_checkpointed(model)
    return named(torch.compile(DistributedDataParallel(model)))


def parts_in_ddp(model):
    """DDP around a part: its name is in the middle."""
    model.model = DistributedDataParallel(model.model)
    return named(model)


class Wrappers(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)

    @classmethod
    def tearDownClass(cls):
        dist.destroy_process_group()

    def setUp(self):
        tmp = tempfile.TemporaryDirectory()
        self.addCleanup(tmp.cleanup)
        self.tmp = tmp.name
        torch.manual_seed(1)

    def run_ckpt(self, *args):
        return subprocess.run([CKPT, *args], capture_output=True, text=True)

    def ours(self, run, *options):
        out = os.path.join(self.tmp, f"ours{len(os.listdir(self.tmp))}")
        done = self.run_ckpt("export", run, out, *[a for o in options for a in ("-o", o)])
        self.assertEqual(done.returncode, 0, done.stderr)
        return out, done.stderr

    def write(self, where, state, index=False):
        os.makedirs(where)
        state = {k: v.detach().clone() for k, v in state.items()}
        if not index:
            return save_file(state, os.path.join(where, "model.safetensors"), {"format": "pt"})
        files = {k: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, k in enumerate(sorted(state))}
        for file in set(files.values()):
            save_file({k: state[k] for k in files if files[k] == file}, os.path.join(where, file), {"format": "pt"})
        with open(os.path.join(where, "model.safetensors.index.json"), "w") as f:
            json.dump({"metadata": {}, "weight_map": files}, f)

    def same_model(self, folder, cls, want):
        model, info = cls.from_pretrained(folder, output_loading_info=True)
        self.assertFalse(info["missing_keys"] or info["unexpected_keys"], info)
        got = model.state_dict()
        self.assertEqual(set(got), set(want))
        for name, t in want.items():
            self.assertTrue(torch.equal(got[name], t), name)

    def test_the_same_names_in_a_bin_file(self):
        """One rule for all containers."""
        config = transformers.LlamaConfig(**SMALL)
        for wrap in (compiled, ddp, compiled_in_ddp, layers_compiled_and_checkpointed, all_of_them, parts_in_ddp):
            with self.subTest(wrap=wrap.__name__):
                model = transformers.LlamaForCausalLM(config)
                want = {k: v.clone() for k, v in model.state_dict().items()}
                run = os.path.join(self.tmp, wrap.__name__)
                os.makedirs(run)
                torch.save(wrap(model), os.path.join(run, "pytorch_model.bin"))
                config.save_pretrained(run)
                out, said = self.ours(run)
                self.same_model(out, transformers.LlamaForCausalLM, want)
                self.assertIn("parts that wrappers", said)

    def check(self, cls, config, wrap, index=False, options=()):
        model = cls(config)
        want = {k: v.clone() for k, v in model.state_dict().items()}
        plain, run = os.path.join(self.tmp, "plain"), os.path.join(self.tmp, "run")
        for old in (plain, run):
            shutil.rmtree(old, ignore_errors=True)
        model.save_pretrained(plain)
        self.write(run, wrap(model), index)
        shutil.copy(os.path.join(plain, "config.json"), run)
        out, said = self.ours(run, *options)
        self.same_model(out, cls, want)
        self.assertIn("parts that wrappers", said)
        return out

    def test_every_order_of_wrappers(self):
        config = transformers.LlamaConfig(**SMALL)
        for wrap in (compiled, ddp, compiled_in_ddp, ddp_in_compiled, layers_compiled_and_checkpointed, all_of_them, parts_in_ddp):
            for index in (False, True):
                with self.subTest(wrap=wrap.__name__, index=index):
                    out = self.check(transformers.LlamaForCausalLM, config, wrap, index)
                    self.assertEqual(os.path.exists(os.path.join(out, "model.safetensors.index.json")), index)

    def test_models_without_a_head_and_of_no_text(self):
        for cls, config in ((transformers.LlamaModel, transformers.LlamaConfig(**SMALL)),
                            (transformers.BertForSequenceClassification, transformers.BertConfig(**SMALL)),
                            (transformers.ViTForImageClassification, transformers.ViTConfig(**{k: v for k, v in SMALL.items() if "hidden" in k}, num_attention_heads=4, intermediate_size=80))):
            for wrap in (compiled, ddp, compiled_in_ddp):
                with self.subTest(cls=cls.__name__, wrap=wrap.__name__):
                    self.check(cls, config, wrap)

    def test_the_base_tells_the_names_of_a_class_that_nobody_knows(self):
        """A class with a part `module` of its own: a base that has it keeps it; one that has it not lets it go."""
        state = {"module.head.weight": torch.rand(4, 4), "module.body.module.weight": torch.rand(4, 4)}
        wanted = {"plain": {"head.weight", "body.module.weight"}, "wrapped": set(state)}
        for case, names in wanted.items():
            base, run = os.path.join(self.tmp, case, "base"), os.path.join(self.tmp, case, "run")
            self.write(base, dict(zip(sorted(names), (torch.rand(4, 4), torch.rand(4, 4)))))
            self.write(run, {"_orig_mod." + k: v for k, v in state.items()})
            for folder in (base, run):
                with open(os.path.join(folder, "config.json"), "w") as f:
                    json.dump({"model_type": "nobodys", "architectures": ["NobodysModel"]}, f)
            out, _ = self.ours(run, f"base={base}")
            self.assertEqual(set(load_file(os.path.join(out, "model.safetensors"))), names)
        out, said = self.ours(run)
        self.assertEqual(set(load_file(os.path.join(out, "model.safetensors"))), set(state))
        self.assertIn("all names begin with 'module.'", said)

    def test_two_names_that_become_one_are_an_error(self):
        config = transformers.LlamaConfig(**SMALL)
        model = transformers.LlamaForCausalLM(config)
        for part in ("_orig_mod.", "module."):
            run = os.path.join(self.tmp, part)
            self.write(run, model.state_dict() | {part + "model.norm.weight": torch.rand(64)})
            config.save_pretrained(run)
            done = self.run_ckpt("export", run, os.path.join(self.tmp, "no"))
            self.assertNotEqual(done.returncode, 0)
            self.assertIn(f"'{part}model.norm.weight'", done.stderr)
            self.assertIn("are both 'model.norm.weight'", done.stderr)
            self.assertEqual(self.run_ckpt("info", run, "-o", "view=raw").returncode, 0)

    # ---- adapters ----

    def adapter(self, **lora):
        """A base in a folder, and a PeftModel over it with trained matrices."""
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
        base = os.path.join(self.tmp, f"base{len(os.listdir(self.tmp))}")
        model.save_pretrained(base)
        peft = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **lora))
        with torch.no_grad():
            for name, p in peft.named_parameters():
                if p.requires_grad:
                    p.copy_(torch.randn(p.shape))
        return base, peft

    def saved(self, peft, state):
        """What a script writes that saves the tensors that `state` gives beside PEFT's config."""
        run = os.path.join(self.tmp, f"adapter{len(os.listdir(self.tmp))}")
        peft.save_pretrained(run)
        file = os.path.join(run, "adapter_model.safetensors")
        want = load_file(file)
        save_file({k: v.detach().clone() for k, v in state(peft).items()}, file, {"format": "pt"})
        return run, want

    def same_adapter(self, base, run, want):
        out, said = self.ours(run)
        got = load_file(os.path.join(out, "adapter_model.safetensors"))
        self.assertEqual(set(got), set(want))
        model = PeftModel.from_pretrained(transformers.LlamaForCausalLM.from_pretrained(base), out)
        loaded = get_peft_model_state_dict(model)
        self.assertEqual(set(loaded), set(want))
        for name, t in want.items():
            self.assertTrue(torch.equal(got[name], t) and torch.equal(loaded[name], t), name)
        return said

    def test_adapters_under_other_names(self):
        def renamed(f):
            return lambda peft: {f(k): v for k, v in get_peft_model_state_dict(peft).items()}

        def trained(module):
            return {k: p for k, p in module.named_parameters() if p.requires_grad}

        def layers(peft):
            inner = peft.base_model.model.model.layers
            inner[0] = torch.compile(checkpoint_wrapper(inner[0]))
            return trained(torch.compile(DistributedDataParallel(peft)))

        ways = {
            "with the adapter's name": lambda peft: trained(peft),
            "compiled": lambda peft: trained(torch.compile(peft)),
            "ddp": lambda peft: trained(DistributedDataParallel(peft)),
            "layers wrapped": layers,
            "the root twice": renamed(lambda k: "base_model.model." + k),
            "no root": renamed(lambda k: k.removeprefix("base_model.model.")),
            "half a root": renamed(lambda k: k.removeprefix("base_model.")),
            "below a prefix": renamed(lambda k: "policy." + k),
            "wrapped inside": renamed(lambda k: k.replace("base_model.model.", "base_model.model.module._orig_mod.")),
            "the whole model": lambda peft: DistributedDataParallel(peft).state_dict(),
        }
        for name, state in ways.items():
            for lora in (dict(target_modules=["q_proj", "v_proj"]), dict(target_modules=["q_proj"], use_dora=True, modules_to_save=["lm_head"])):
                with self.subTest(name, **lora):
                    base, peft = self.adapter(**lora)
                    run, want = self.saved(peft, state)
                    said = self.same_adapter(base, run, want)
                    self.assertIn("as PEFT writes them", said)
                    self.assertEqual("left out" in said, name == "the whole model")

    def test_an_adapter_of_peft_stays_as_it_is(self):
        base, peft = self.adapter(target_modules=["q_proj", "embed_tokens"], modules_to_save=["lm_head"], use_dora=False)
        run, want = self.saved(peft, get_peft_model_state_dict)
        self.assertNotIn("as PEFT writes them", self.same_adapter(base, run, want))

    def test_two_adapters_in_one_file_are_an_error(self):
        base, peft = self.adapter(target_modules=["q_proj"])
        peft.add_adapter("other", LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"]))
        run, _ = self.saved(peft, lambda peft: {k: v for k, v in peft.state_dict().items() if "lora_" in k})
        done = self.run_ckpt("export", run, os.path.join(self.tmp, "no"))
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("two adapters", done.stderr)

    def test_raw_names_stay(self):
        run = os.path.join(self.tmp, "raw")
        self.write(run, compiled(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))))
        out, _ = self.ours(run, "view=raw")
        self.assertEqual(set(load_file(os.path.join(out, "model.safetensors"))), set(load_file(os.path.join(run, "model.safetensors"))))


if __name__ == "__main__":
    unittest.main()
