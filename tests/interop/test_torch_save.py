# SPDX-License-Identifier: Apache-2.0
"""What people write with torch.save alone: the whole model in one file under the usual names, state dicts inside others, one file of
DTensors per rank. The view is to the byte what save_pretrained writes; what can't be read is refused by name."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

try:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import torch.distributed as dist
    import transformers as tf
    from safetensors.torch import load_file, save_file
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from tensor_case import ranks
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

tf.utils.logging.disable_progress_bar()
tf.utils.logging.set_verbosity_error()
CKPT = os.path.join(os.environ.get("CKPTFS_BUILD", "build/dev"), "fs", "ckpt")
SEED = int(os.environ.get("CKPTFS_SEED", "1"))
SIZES = dict(vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=12, num_attention_heads=4, num_key_value_heads=2)


def model():
    torch.manual_seed(SEED)
    return tf.AutoModelForCausalLM.from_config(tf.Qwen2Config(**SIZES, tie_word_embeddings=True))


def write_ranks(world, rank, patterns, nested, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    state = {k: distribute_tensor(v, mesh, [Shard(0)]) for k, v in model().state_dict().items()}
    for pattern in patterns:
        torch.save({"model": state, "optimizer": {"state": {0: {"step": torch.ones(rank + 1)}}}} if nested else state, pattern.format(rank))
    dist.destroy_process_group()


def write_replicas(world, rank, pattern, add, store):
    """A matrix in parts on one dimension of the mesh and copied on the other, and a copied vector; `add` to the values of rank `add[0]`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (2, world // 2))
    state = {"a": distribute_tensor(torch.arange(64.0).reshape(8, 8), mesh, [Replicate(), Shard(0)]),
             "b": distribute_tensor(torch.arange(5.0), mesh, [Replicate(), Replicate()])}
    for name, at, value in add if rank == world - 1 else ():
        state[name].to_local().view(-1)[at] += value
    torch.save(state, pattern.format(rank))
    dist.destroy_process_group()


class TorchSave(unittest.TestCase):
    def setUp(self):
        self.tmp = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.tmp)
        self.model = model()
        self.model.save_pretrained(self.at("want"))
        self.model.config.save_pretrained(self.at("base"))

    def at(self, *parts):
        path = os.path.join(self.tmp, *parts)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return path

    def export(self, run, *options):
        done = subprocess.run([CKPT, "export", "-q", run, run + ".out", *(a for o in options for a in ("-o", o))], capture_output=True, text=True)
        return done, run + ".out"

    def check(self, run, *options):
        done, out = self.export(run, *options)
        self.assertEqual(done.returncode, 0, done.stderr)
        with open(os.path.join(out, "model.safetensors"), "rb") as got, open(self.at("want", "model.safetensors"), "rb") as want:
            self.assertTrue(got.read() == want.read(), run)

    def test_whole(self):
        state = self.model.state_dict()
        dicts = {"flat": state, "nested": {"model_state_dict": state, "epoch": 3, "args": SEED, "optimizer_state_dict": {"state": {0: {"exp_avg": torch.ones(3)}}}},
                 "wrapped": {"state_dict": {"module." + k: v for k, v in state.items()}}}
        for name in ("pytorch_model.bin", "pytorch_model_fsdp.bin", "model.pt", "model.pth", "checkpoint.pt"):
            for kind, saved in dicts.items():
                with self.subTest(name=name, kind=kind):
                    torch.save(saved, self.at(name + kind, name))
                    self.check(self.at(name + kind), f"base={self.at('base')}")

    def test_states_are_told(self):
        """The raw view has no optimizer's states of such files, and says so; a view of the model does not speak of them."""
        state = self.model.state_dict()
        torch.save({"model": state, "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}}}, self.at("inside", "checkpoint.pt"))
        torch.save(state, self.at("beside", "model_world_size_1_rank_0.pt"))
        torch.save({"state": {}}, self.at("beside", "optim_world_size_1_rank_0.pt"))
        torch.save(state, self.at("without", "model.pt"))
        for run, left_out in (("inside", "'optimizer' in 'checkpoint.pt'"), ("beside", "'optim_world_size_1_rank_0.pt'"), ("without", None)):
            for view in (["-o", "view=raw"], ["-o", f"base={self.at('base')}"]):
                done = subprocess.run([CKPT, "ls", self.at(run), *view], capture_output=True, text=True)
                self.assertEqual(done.returncode, 0, done.stderr)
                told = f"left out: the optimizer's states ({left_out})" if left_out and "view=raw" in view else ""
                self.assertTrue(told in done.stderr and ("left out" in done.stderr) == bool(told), f"{run} {view}: {done.stderr}")

    def raw(self, name, saved, file="checkpoint.pt"):
        torch.save(saved, self.at(name, file))
        done, out = self.export(self.at(name), "view=raw")
        return done.returncode, done.stderr, load_file(os.path.join(out, "model.safetensors")) if done.returncode == 0 else None

    def test_tensors_with_attributes(self):
        """torch pickles them as it does tensors of a subclass; so are those of FSDP1's FULL_STATE_DICT on a CPU."""
        state = self.model.state_dict()
        for t in state.values():
            t._owner = "a module"
        for name in ("pytorch_model_fsdp.bin", "pytorch_model.bin", "model_world_size_1_rank_0.pt"):
            torch.save(state, self.at("marked" + name, name))
            self.check(self.at("marked" + name), f"base={self.at('base')}")

    def test_what_is_no_plain_tensor(self):
        """Nothing is left out without a word: kinds of tensors that safetensors has not, objects, lists of tensors."""
        x, eye = torch.ones(2), torch.eye(3)
        for i, (y, text) in enumerate(((eye.to_sparse(), "_rebuild_sparse_tensor"), (torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "_rebuild_qtensor"),
                                       (torch.empty(3, device="meta"), "_rebuild_meta_tensor"))):
            for j, saved in enumerate(({"x": x, "y": y}, {"model": {"x": x, "y": y}})):
                code, said, _ = self.raw(f"special{i}{j}", saved)
                self.assertEqual(code, 1)
                self.assertIn(f"y': not a plain tensor but torch._utils.{text}", said)
        for i, saved in enumerate(({"model": torch.nn.Linear(2, 2), "epoch": 1}, {"model": [{"x": x}], "epoch": 1}, {"epoch": 1}, {"optimizer": {"state": {}}})):
            code, said, _ = self.raw(f"none{i}", saved)
            self.assertEqual(code, 1)
            self.assertIn("checkpoint.pt' has no tensors under names", said)
        code, said, _ = self.raw("numbers", {"model": {"x": x}, "opt": {"state": {0: {"exp_avg": x}}}})
        self.assertIn("a key of the state dict 'opt.state' is not a valid name of a tensor: it is no text", said)
        for i, y in enumerate((torch.nn.Linear(2, 2), [x, x], ({"x": x},))):
            for j, saved in enumerate(({"model": {"x": x}, "y": y}, {"x": x, "y": y})):
                code, _, got = self.raw(f"some{i}{j}", saved)
                self.assertEqual((code, len(got)), (0, 1))
                told = subprocess.run([CKPT, "ls", self.at(f"some{i}{j}"), "-o", "view=raw"], capture_output=True, text=True).stderr
                self.assertIn("left out: 'y' in 'checkpoint.pt'", told)
        code, _, got = self.raw("data", {"model": {"x": x, "_extra_state": None}, "epoch": 1, "losses": [0.5, 1.0], "args": SEED})
        told = subprocess.run([CKPT, "ls", self.at("data"), "-o", "view=raw"], capture_output=True, text=True).stderr
        self.assertEqual((code, told), (0, ""))

    def test_two_tensors_of_one_name(self):
        """Neither wins, in whichever order they stand, unless they are one tensor."""
        x, y = torch.arange(12.0).reshape(3, 4), torch.zeros(3, 4)
        model = {"model.a": x}, {"model": {"a": y}}
        for i, saved in enumerate(({"a": {"b": x}, "a.b": y}, {"a.b": y, "a": {"b": x}}, {"a": {"b.c": x}, "a.b": {"c": y}},
                                   model[0] | model[1], model[1] | model[0], {"a": {"b": x}, "a.b": x.clone()}, {"a": {"b": x}, "a.b": x[:2]},
                                   {"a": {"b": x}, "a.b": x.int()}, {"a": {"b": x[:, :3]}, "a.b": x.T},
                                   {"a": {"b": x[:0]}, "a.b": x[:, :0]}, {"state_dict": {"a": {"b": x}, "a.b": y}})):
            for file in ("checkpoint.pt", "pytorch_model.bin", "rank0.pt", "model_world_size_1_rank_0.pt"):
                code, said, _ = self.raw(f"twice{i}{file}", saved, file)
                self.assertEqual(code, 1, saved)
                self.assertRegex(said, r"tensor '(state_dict\.)?(a\.b|a\.b\.c|model\.a)': two different tensors of the file have this name")
        for i, saved in enumerate(({"a": {"b": x}, "a.b": x}, {"a.b": x.detach(), "a": {"b": torch.nn.Parameter(x)}}, {"a": {"b": x[:0]}, "a.b": y[:0]})):
            code, said, got = self.raw(f"once{i}", saved)
            self.assertEqual((code, list(got or ())), (0, ["a.b"]), said)
            self.assertTrue(torch.equal(got["a.b"], saved["a.b"]))

    def test_hub_of_old(self):
        names = list(self.model.state_dict())
        for i, part in enumerate((names[:40], names[40:])):
            torch.save({k: self.model.state_dict()[k] for k in part}, self.at("hub", f"pytorch_model-{i + 1:05}-of-00002.bin"))
        self.model.config.save_pretrained(self.at("hub"))
        self.check(self.at("hub"))
        index = {name: f"pytorch_model-{1 + (i >= 40):05}-of-00002.bin" for i, name in enumerate(names)}
        for more, text in (({}, None), ({"model.other": index[names[0]]}, "lacks tensor 'model.other', which the index maps to it"),
                           ({names[0]: "pytorch_model-00003-of-00003.bin"}, "names the file 'pytorch_model-00003-of-00003.bin', which is not there")):
            with open(self.at("hub", "pytorch_model.bin.index.json"), "w") as f:
                json.dump({"metadata": {}, "weight_map": index | more}, f)
            if text:
                self.assertIn(text, self.export(self.at("hub"))[0].stderr)
            else:
                self.check(self.at("hub"))
        os.remove(self.at("hub", "pytorch_model-00002-of-00002.bin"))
        done, _ = self.export(self.at("hub"))
        self.assertIn("2 ranks wrote, the file of rank 1 is missing", done.stderr)

    def test_a_base_of_another_depth(self):
        torch.save(self.model.state_dict(), self.at("depth", "pytorch_model.bin"))
        tf.Qwen2Config(**SIZES | {"num_hidden_layers": 14}, tie_word_embeddings=True).save_pretrained(self.at("deeper"))
        for base, count in (("base", 0), ("deeper", 1)):
            told = subprocess.run([CKPT, "info", self.at("depth"), "-o", f"base={self.at(base)}"], capture_output=True, text=True).stdout
            self.assertEqual(told.count("the checkpoint has 12 layers, by config.json it has 14"), count, told)

    def test_before_zip(self):
        torch.save(self.model.state_dict(), self.at("old", "pytorch_model.bin"), _use_new_zipfile_serialization=False)
        done, _ = self.export(self.at("old"))
        self.assertEqual(done.returncode, 1)
        self.assertIn("pytorch_model.bin': it has torch.save's format of before 1.6", done.stderr)

    def test_ranks(self):
        for nested in (False, True):
            names = ("rank{}.pt", "model_rank_{}.pt", "checkpoint-rank{}.pth")
            runs = [self.at(f"{nested}{i}", name) for i, name in enumerate(names)]
            ranks.run(3, "test_torch_save", "write_ranks", runs, nested, self.at(f"store{nested}"), folder=self.tmp)
            for run in map(os.path.dirname, runs):
                with self.subTest(run):
                    self.check(run, f"base={self.at('base')}")
        os.remove(runs[0].format(2))
        done, _ = self.export(os.path.dirname(runs[0]) + "/", f"base={self.at('base')}")
        self.assertEqual(done.returncode, 1)
        self.assertIn("in the files of 2 ranks: rows 68..101 of 101 are in no shard", done.stderr)

    def save_ranks(self, name, pattern, *saved):
        for rank, state in enumerate(saved):
            torch.save(state, self.at(name, pattern.format(rank, rank + 1)))
        return self.at(name)

    def check_refused(self, run, *needles):
        done, _ = self.export(run, "view=raw")
        self.assertEqual(done.returncode, 1, run)
        for needle in needles:
            self.assertIn(needle, done.stderr)

    def check_copied(self, run, want, warned, *options):
        done, out = self.export(run, "view=raw", *options)
        self.assertEqual(done.returncode, 0, done.stderr)
        got = load_file(os.path.join(out, "model.safetensors"))
        self.assertEqual(sorted(got), sorted(want))
        for name, t in want.items():
            self.assertTrue(torch.equal(got[name].reshape(-1).view(torch.uint8), t.reshape(-1).contiguous().view(torch.uint8)), f"{run}: {name}")
        told = subprocess.run([CKPT, "ls", run, *(a for o in ("view=raw", *options) for a in ("-o", o))], capture_output=True, text=True).stderr
        self.assertIn(warned, told) if warned else self.assertEqual(told, "")

    def test_copies(self):
        """Copies of one save are one tensor; those of two saves, and slices that do not say so, are refused by tensor, files and element."""
        x, big = torch.arange(12.0).reshape(3, 4), torch.randn(600, 700)
        one, nan = torch.zeros(3, 4), torch.tensor([float("nan"), -0.0])
        one[2, 1] = 1
        for i, pattern in enumerate(("rank{}.pt", "model_rank_{}.pt", "pytorch_model_fsdp_0_rank{}.bin", "pytorch_model_fsdp_rank{}.bin", "model_world_size_3_rank_{}.pt",
                                     "pytorch_model-0000{1}-of-00003.bin")):
            files = pattern.format(0, 1), pattern.format(2, 3)
            own = [{f"only{r}": x + r} for r in range(3)]
            mine = {"only0": x, "only1": x + 1, "only2": x + 2}
            for k, (first, last, element) in enumerate(((x, x + one, "[2, 1]"), (x.T, (x + one).T, "[1, 2]"), (x.T, (x + one).T.contiguous(), "[1, 2]"), (big, big + 1, "[0, 0]"),
                                                        (big.T, big.T * 2, "[0, 0]"), (x[0, 0], x[0, 1], "[]"), (nan, -nan, "[0]"), (x.bfloat16(), (x + one).bfloat16(), "[2, 1]"),
                                                        (x.int(), (x + one).int(), "[2, 1]"), (x[:, ::2], x[:, 1::2], "[0, 0]"))):
                run = self.save_ranks(f"two{i}.{k}", pattern, *({"a.w": t} | o for t, o in zip((first, first.clone(), last), own)))
                sampled = first.numel() > 1000 and "-of-" in pattern
                self.check_refused(run, "tensor 'a.w'", f"'{files[0]}'", f"'{files[1]}'" if not sampled else "parts of one model", "" if sampled else f"element {element}", "allow_mixed")
                self.check_copied(run, {"a.w": first} | mine, "tensor 'a.w'", "allow_mixed")
            same = {"t": x, "t2": x.T, "n": nan, "e": x[:0], "s": x[0, 0], "v": x[0].expand(3, 4)} | ({} if "-of-" in pattern else {"b": big, "bt": big.T})
            self.check_copied(self.save_ranks(f"one{i}", pattern, *(same | o for o in own)), same | mine, None)
            for k, (first, last) in enumerate(((x, x[:2]), (x, x.double()), (x[:0], x[:, :0]), (x[:0], x[:0].int()), (x, x.flatten()))):
                run = self.save_ranks(f"kinds{i}.{k}", pattern, {"a": first}, {"a": first}, {"a": last})
                self.check_refused(run, "tensor 'a' is F32 [", f"'{files[0]}', but ", f"'{files[1]}'")

    def test_copies_that_drift(self):
        """Buffers and counters are the lowest rank's, with a warning, but not in parts of one model, which have no copies."""
        x = torch.ones(4)
        drifting = {"bn.running_mean": x, "bn.num_batches_tracked": torch.tensor(3), "step": torch.tensor(7.0), "rng_state": torch.zeros(16, dtype=torch.uint8)}
        for name, t in drifting.items():
            run = self.save_ranks("drift." + name, "rank{}.pt", {"w": x, name: t}, {"w": x, name: t + 1})
            self.check_copied(run, {"w": x, name: t}, f"'{name}' in 'rank1.pt' is not the one in 'rank0.pt'")
        run = self.save_ranks("drift", "rank{}.pt", *({"w": x} | {k: t + r for k, t in drifting.items()} for r in range(3)))
        self.check_copied(run, {"w": x} | drifting, "'bn.running_mean' in 'rank1.pt', and 7 more, is not the one in 'rank0.pt'")
        run = self.save_ranks("drift_and", "rank{}.pt", *({k: t + r for k, t in drifting.items()} | {"w": x + r} for r in range(2)))
        self.check_refused(run, "tensor 'w' in 'rank0.pt' is not the one in 'rank1.pt' (element [0])")
        run = self.save_ranks("drift_parts", "pytorch_model-0000{1}-of-00002.bin", {"step": x}, {"step": x + 1})
        self.check_refused(run, "tensor 'step' is in 'pytorch_model-00001-of-00002.bin'")

    def test_replicas(self):
        for i, (add, element) in enumerate((([], None), ([["a", 9, 1]], "tensor 'a' in 'rank1.pt' is not the one in 'rank3.pt' (element [5, 1])"),
                                            ([["b", 4, 1]], "tensor 'b' in 'rank0.pt' is not the one in 'rank3.pt' (element [4])"))):
            ranks.run(4, "test_torch_save", "write_replicas", self.at(f"replicas{i}", "rank{}.pt"), add, self.at(f"store{i}"), folder=self.tmp)
            if element:
                self.check_refused(self.at(f"replicas{i}"), element)
            want = {"a": torch.arange(64.0).reshape(8, 8), "b": torch.arange(5.0)}
            self.check_copied(self.at(f"replicas{i}"), want, element, *(["allow_mixed"] if element else []))

    def test_many_copies(self):
        """Opening compares samples, whose number does not grow with the number of copies."""
        state = {f"w{i}": torch.full((64, 64), float(i)) for i in range(600)}
        run = self.save_ranks("many", "rank{}.pt", *[state] * 9)
        log = self.at("strace.log")
        self.check_copied(run, state, None)
        if shutil.which("strace"):
            subprocess.run(["strace", "-f", "-o", log, "-e", "trace=pread64,preadv", CKPT, "ls", run, "-o", "view=raw"], stdout=subprocess.DEVNULL)
            with open(log) as f:
                self.assertLess(sum(line.endswith(" = 1024\n") for line in f), 2 * 4096 + 200)
        torch.save({k: t + 1 for k, t in state.items()}, self.at("many", "rank8.pt"))
        self.check_refused(run, "'rank0.pt'", "'rank8.pt'")

    def test_a_save_while_it_is_opened(self):
        """Nothing marks the end of a save, and what was opened first was of the one before: all is opened again, and is of one save."""
        run, names = self.at("opened", ""), [self.at("opened", f"rank{r}.pt") for r in range(4)]
        digest = [CKPT, "digest", run, "-q", "-o", "view=raw"]

        def save(value):
            for r, path in enumerate(names):
                torch.save({f"w{r}": torch.full((64,), value)}, path + ".tmp")
                os.rename(path + ".tmp", path)

        def opened():
            with open(f"/proc/{slow.pid}/task/{slow.pid}/children") as f:
                at = f"/proc/{f.read().split()[0]}/fd"
            return {os.path.realpath(os.path.join(at, fd)) for fd in os.listdir(at)}

        save(1.0)
        slow = subprocess.Popen(["strace", "-f", "-o", self.at("strace.log"), "-P", "rank3.pt", "-e", "trace=openat2", "-e", "inject=openat2:delay_enter=3000000:when=1",
                                 *digest], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while slow.poll() is None:
            try:
                if set(map(os.path.realpath, names[:3])) <= opened():
                    break
            except (OSError, IndexError):
                pass  # it has not begun
        self.assertIsNone(slow.poll(), "it opened the last file too early")
        save(2.0)
        out, err = slow.communicate()
        self.assertEqual((slow.returncode, out), (0, subprocess.run(digest, capture_output=True, text=True).stdout), err)

    def test_names_that_tell_less_are_asked_for_last(self):
        """A usual name counts, whatever lies beside it under a name of its own; of two of those, none does."""
        run, want = self.at("guess", "")[:-1], {"w": torch.arange(8.0)}
        torch.save(want, self.at("guess", "pytorch_model.bin"))
        save_file({"w": torch.zeros(8)}, self.at("guess", "model.fp16.safetensors"))
        done, out = self.export(run, "view=raw")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue(torch.equal(load_file(os.path.join(out, "model.safetensors"))["w"], want["w"]))
        os.rename(self.at("guess", "pytorch_model.bin"), self.at("guess", "best.pt"))
        self.check_refused(run, "looks like a checkpoint of")

    def test_adapter(self):
        path = self.at("adapter", "adapter_model.bin")
        weights = {f"base_model.model.model.layers.0.self_attn.q_proj.lora_{ab}.weight": torch.randn(*shape).T.contiguous().T
                   for ab, shape in (("A", (4, 32)), ("B", (32, 4)))}
        torch.save(weights, path)
        with open(self.at("adapter", "adapter_config.json"), "w") as f:
            f.write('{"peft_type": "LORA", "r": 4}')
        done, out = self.export(self.at("adapter"))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(sorted(os.listdir(out)), ["adapter_config.json", "adapter_model.safetensors"])
        got = load_file(os.path.join(out, "adapter_model.safetensors"))
        self.assertEqual(sorted(got), sorted(weights))
        for name, t in weights.items():
            self.assertTrue(torch.equal(got[name], t), name)
        torch.save(weights | {"base_model": {name.split(".", 1)[1]: t + 1}}, path)
        self.assertIn("two different tensors of the file have this name", self.export(self.at("adapter"))[0].stderr)


if __name__ == "__main__":
    unittest.main()
