# SPDX-License-Identifier: Apache-2.0
"""Views in other formats, against the formats' own writers and loaders: the files are those that torch writes for the same tensors, torch
loads them, and our own reader makes the model of them again."""

import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import unittest

try:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import numpy
    import torch
    import torch.distributed.checkpoint as dcp
    import transformers as tf
    from safetensors.torch import load_file, save_file
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    import dcp_writer as writer
    from tensor_case import CASES, CKPT, SEED, WrittenCase, export, raw, read_all
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

tf.utils.logging.disable_progress_bar()
tf.utils.logging.set_verbosity_error()
DTYPES = [t for t in writer.DTYPES] + [torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.float8_e4m3fnuz]
SOURCE = os.environ.get("CKPTFS_SOURCE", os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
FIXTURES = os.environ.get("CKPTFS_FIXTURES") or os.path.join(SOURCE, "..", "shared", "fixtures")
DUMP = os.path.join(os.environ.get("CKPTFS_BUILD", "build/dev"), "tests", "archive_dump")
COMMON = dict(vocab_size=101, hidden_size=48, intermediate_size=72, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=3, head_dim=8,
              max_position_embeddings=64, bos_token_id=1, eos_token_id=2)


def header(path):
    """The metadata and the tensors of a safetensors file, and its data."""
    with open(path, "rb") as f:
        n = int.from_bytes(f.read(8), "little")
        text = f.read(n)
        assert (n + 8) % 8 == 0
        tensors = json.loads(text)
        return tensors.pop("__metadata__", None), list(tensors.items()), f.read()


def order(run, *options):
    """Names in the order of the view's tensors."""
    done = subprocess.run([CKPT, "ls", "--json", run, *[x for o in options for x in ("-o", o)]], capture_output=True, text=True, check=True)
    return [t["name"] for t in json.loads(done.stdout)]


class Stream:
    """Keeps the beginning and the end of what is written: a tensor of 4 GiB takes no room."""

    KEPT = 1 << 20

    def __init__(self):
        self.size, self.head, self.tail = 0, b"", b""

    def write(self, data):
        data = memoryview(data)
        self.head += bytes(data[: max(self.KEPT - len(self.head), 0)])
        self.tail = (self.tail + bytes(data[-self.KEPT :]))[-self.KEPT :]
        self.size += len(data)
        return len(data)

    def flush(self):
        pass


class Written(WrittenCase):
    maxDiff = None

    def source(self, seed, world):
        """A directory of random tensors, empty ones and scalars among them. At most one rank has no rows of one: of several that state the same
        torch takes the one with the least bytes so far, we the first."""
        r, tensors = random.Random(seed), {}
        for i in range(r.randint(1, 24)):
            shape = [r.choice([0, 1, 2, 3, 5, 7, 8, 13]) for _ in range(r.choice([0, 1, 1, 2, 2, 2, 3, 5]))]
            shape[:1] = [max(n, world - 1) for n in shape[:1]]
            tensors[r.choice(["model.layers.%d.w", "a%d", "b.%d.\u00e9\"\\", "%d"]) % i] = writer.tensor(f"t{i}", r.choice(DTYPES), shape, seed)
        path = self.path(f"source-{seed}")
        os.mkdir(path)
        save_file(tensors, os.path.join(path, "model.safetensors"), {"format": "pt"})
        return path, tensors

    def model(self, name, cls=tf.LlamaConfig, **config):
        path, model = self.save_model(name, cls(**COMMON, **config), "100KB")
        return path, {n: t.detach() for n, t in model.state_dict().items()}

    # ---- torch.save ----

    def check_archive(self, tensor):
        """Head and tail of the archive are those of torch without CRCs."""
        what, head, tail = f"{tensor.dtype} {tuple(tensor.shape)}", self.path("head"), self.path("tail")
        done = subprocess.run([DUMP, str(tensor.dtype), head, tail, *map(str, tensor.shape)], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, f"{what}: {done.stderr}")
        stream = Stream()
        torch.serialization.set_crc32_options(False)
        torch.save(tensor, stream)
        with open(head, "rb") as a, open(tail, "rb") as b:
            head, tail = a.read(), b.read()
        self.assertEqual(stream.size, len(head) + tensor.nbytes + len(tail), what)
        self.assertTrue(stream.head.startswith(head), what)
        self.assertTrue(stream.tail.endswith(tail), what)

    def test_archives(self):
        for dtype in DTYPES:
            for shape in ((), (1,), (0,), (7, 0, 3), (2, 300), (70000, 1, 2), (2, 1, 3, 1, 2)):
                self.check_archive(torch.zeros(shape).to(dtype))

    def test_archives_of_4_gib(self):
        """Where numbers stop to fit 32 bits. Nothing writes to the zeros, so that they take no memory."""
        for n in (2**32 - 2000, 2**32 - 2, 2**32 - 1, 2**32 + 100):
            self.check_archive(torch.from_numpy(numpy.zeros(n, dtype=numpy.uint8)))
        self.check_archive(torch.from_numpy(numpy.zeros((2**31, 3), dtype=numpy.uint8)))

    # ---- view=dcp_hf ----

    def check_hf(self, world, seed):
        what = f"world {world}, CKPTFS_SEED={SEED}, case {seed}"
        source, tensors = self.source(seed, world)
        got = self.export(source, self.path(f"hf-{world}-{seed}"), "view=dcp_hf", f"ranks={world}")
        want = self.path(f"hf-{world}-{seed}.want")
        writer.run(world, [{"kind": "rows", "dir": want, "state": os.path.join(source, "model.safetensors"), "names": order(source),
                            "files": {n: 1 for n in tensors}}])
        self.assertEqual(sorted(os.listdir(got)), sorted(os.listdir(want)), what)
        for name in os.listdir(want):
            (meta, mine, data), (torchs, theirs, bytes_) = header(os.path.join(got, name)), header(os.path.join(want, name))
            self.assertEqual(meta, torchs, f"{what}: {name}")  # with the text of DCP_SHARDING_INFO
            self.assertEqual(mine, theirs, f"{what}: {name}")
            self.assertTrue(data == bytes_, f"{what}: {name}")
        self.same(read_all(self.export(got, got + ".again", "view=raw")), tensors, what)

    def test_hf_is_what_torch_writes(self):
        for world in (1, 2, 3):
            for i in range(max(CASES // 2, 1)):
                self.check_hf(world, SEED * 1000 + world * 100 + i)

    def test_hf_is_loaded_by_torch(self):
        source, tensors = self.model("model")
        for ranks in (1, 2, 5, 64):
            got = self.export(source, self.path(f"ranks-{ranks}"), "view=dcp_hf", f"ranks={ranks}")
            self.assertIn("shard-00001-model-00002-of-00002.safetensors", os.listdir(got))
            state = {n: torch.full_like(t, 7) for n, t in tensors.items()}
            dcp.load(state, storage_reader=HuggingFaceStorageReader(got), no_dist=True)
            self.same(state, tensors, f"{ranks} ranks")
            self.same_files(self.export(got, self.path(f"again-{ranks}")), source)

    def test_hf_is_loaded_into_fsdp2(self):
        source, tensors = self.model("model")
        got = self.export(source, self.path("dcp"), "view=dcp_hf", "ranks=3")
        writer.run(2, [{"kind": "load", "dir": got, "model": source, "dtype": "bfloat16", "storage": "hf", "out": self.path("loaded")}])
        self.same(load_file(self.path("loaded")), tensors, "fsdp2")

    # ---- view=dcp ----

    def metadata(self, folder):
        with open(os.path.join(folder, ".metadata"), "rb") as f:
            return pickle.load(f)

    def check_dcp(self, world, seed):
        what = f"world {world}, CKPTFS_SEED={SEED}, case {seed}"
        source, tensors = self.source(seed, world)
        got = self.export(source, self.path(f"dcp-{world}-{seed}"), "view=dcp", f"ranks={world}")
        want = self.path(f"dcp-{world}-{seed}.want")
        writer.run(world, [{"kind": "rows", "dir": want, "state": os.path.join(source, "model.safetensors"), "names": order(source)}])
        mine, theirs = vars(self.metadata(got)), vars(self.metadata(want))
        self.assertEqual(vars(mine.pop("storage_meta")), {**vars(theirs.pop("storage_meta")), "checkpoint_id": None, "save_id": None}, what)
        self.assertEqual([(i.fqn, i.index) for i in mine["storage_data"]], [(i.fqn, i.index) for i in theirs["storage_data"]], what)
        self.assertEqual(mine, theirs, what)
        for name in os.listdir(want):
            with open(os.path.join(want, name), "rb") as a, open(os.path.join(got, name), "rb") as b:
                self.assertTrue(name == ".metadata" or a.read() == b.read(), f"{what}: {name}")
        self.assertEqual(sorted(os.listdir(got)), sorted(os.listdir(want)), what)
        self.same(read_all(self.export(got, got + ".again", "view=raw")), tensors, what)

    def test_dcp_is_what_torch_writes(self):
        for world in (1, 2, 3):
            for i in range(max(CASES // 2, 1)):
                self.check_dcp(world, SEED * 1000 + world * 100 + i)

    def check_loaded(self, run, tensors, what):
        state = {n: torch.full_like(t, 7) for n, t in tensors.items()}
        dcp.load(state, checkpoint_id=run, no_dist=True)
        self.same(state, tensors, what)

    def test_dcp_is_loaded_by_torch(self):
        """More ranks than rows, empty tensors and scalars too."""
        source, tensors = self.source(SEED, 1)
        for ranks in (1, 2, 5, 16):
            self.check_loaded(self.export(source, self.path(f"ranks-{ranks}"), "view=dcp", f"ranks={ranks}"), tensors, f"{ranks} ranks")

    def test_dcp_is_loaded_into_fsdp2(self):
        for ranks in (1, 3):
            source, tensors = self.model(f"model-{ranks}")
            got = self.export(source, self.path(f"dcp-{ranks}"), "view=dcp", f"ranks={ranks}")
            writer.run(2, [{"kind": "load", "dir": got, "model": source, "dtype": "bfloat16", "out": self.path("loaded")}])
            self.same(load_file(self.path("loaded")), tensors, f"fsdp2, {ranks} ranks")
            self.same_files(self.export(got, self.path(f"again-{ranks}"), f"base={source}"), source)

    def test_dcp_under_the_names_in_memory(self):
        """transformers stacks experts in memory: the hub's one by one, and as one tensor."""
        source, tensors = self.model("moe", tf.Qwen3MoeConfig, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
        hub = {n: t for f in os.listdir(source) if f.endswith(".safetensors") for n, t in load_file(os.path.join(source, f)).items()}
        self.assertNotEqual(sorted(hub), sorted(tensors))
        self.check_loaded(self.export(source, self.path("memory"), "view=dcp", "names=memory", "ranks=2"), tensors, "names=memory")
        self.check_loaded(self.export(source, self.path("hub"), "view=dcp", "names=hub", "ranks=2"), hub, "names=hub")

    # ---- view=torchtitan ----

    def load_dcp(self, folder):
        """All tensors of a distributed checkpoint but a trainer's states, by torch."""
        state = {n: torch.empty(tuple(t.size), dtype=t.properties.dtype) for n, t in self.metadata(folder).state_dict_metadata.items()
                 if isinstance(t, TensorStorageMetadata) and n.split(".")[0] not in ("optimizer", "lr_scheduler", "dataloader", "train_state")}
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        return state

    def check_flat(self, run, name, *options):
        """A tensor that is mapped there and back is read from as many pieces as one that is not mapped at all."""
        def pieces(*more):
            done = subprocess.run([CKPT, "explain", "--json", run, name, *[x for o in more for x in ("-o", o)]], capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, f"{name}: {done.stderr}")
            return json.loads(done.stdout)["pieces"]

        if options[1] != "dtype=bfloat16" and "experts" not in name:
            self.assertEqual(len(pieces("view=torchtitan", *options)), len(pieces("view=raw")), name)

    def check_torchtitan(self, case, name):
        """torchtitan's own checkpoint: of the model that torchtitan exported of it, and of itself, there and back."""
        model, steps = self.path(name), [f for f, _, files in os.walk(os.path.join(case, "run")) if ".metadata" in files]
        shutil.copytree(os.path.join(case, "base"), model)
        shutil.copytree(os.path.join(case, "expected"), model, dirs_exist_ok=True)
        for step in steps:
            number = os.path.basename(step).removeprefix("step-")
            want = self.load_dcp(step)
            dtype = next(t for n, t in want.items() if n.endswith("tok_embeddings.weight")).dtype
            biases = {n for n in want if "expert_bias" in n and "deepseek" not in name}  # Hugging Face has no place for them
            for source, folder in ((model, "step-0"), (step, f"step-{number}")):
                out = self.path(f"{name}-{number}-{folder}-{len(os.listdir(self.tmp))}")
                done = export(source, out, "view=torchtitan", "ranks=2", f"base={os.path.join(case, 'base')}", f"dtype={str(dtype)[6:]}")
                self.assertEqual(done.returncode, 0, f"{source}: {done.stderr}")
                self.assertEqual("expert_bias" in done.stderr, bool(biases), done.stderr)
                self.assertEqual(os.listdir(out), [folder])
                got = self.load_dcp(os.path.join(out, folder))
                self.assertEqual(sorted(got), sorted(set(want) - biases), source)
                for n, t in got.items():  # an export is in 16 bits where a save is in 32
                    self.assertEqual(t.shape, want[n].shape, f"{source}: {n}")
                    self.assertTrue(torch.equal(t.bfloat16(), want[n].bfloat16()), f"{source}: {n}")
                    if source == step:
                        self.check_flat(step, n, f"base={os.path.join(case, 'base')}", f"dtype={str(dtype)[6:]}")
                        self.assertTrue(torch.equal(raw(t), raw(want[n].to(t.dtype))), f"{source}: {n}")

    def test_torchtitan_of_real_checkpoints(self):
        found = 0
        for root in [os.path.join(SOURCE, "tests", "golden"), FIXTURES]:
            folder = os.path.join(root, "torchtitan")
            for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
                case = os.path.join(folder, name)
                if os.path.isdir(os.path.join(case, "base")):
                    found += 1
                    self.check_torchtitan(case, f"{name}-{found}")
        self.assertTrue(found)

    def test_torchtitan_and_back(self):
        """From the hub to torchtitan and back is the same model, file by file."""
        moe = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
        mla = dict(n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, n_shared_experts=1, moe_intermediate_size=24, kv_lora_rank=16,
                   qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, first_k_dense_replace=1)
        families = [(tf.LlamaConfig, {}), (tf.LlamaConfig, {"tie_word_embeddings": True}), (tf.Qwen3Config, {"tie_word_embeddings": True}),
                    (tf.Qwen3MoeConfig, moe), (tf.DeepseekV3Config, {**mla, "q_lora_rank": 16}), (tf.DeepseekV3Config, {**mla, "q_lora_rank": None}),
                    (tf.GptOssConfig, {"num_local_experts": 4, "num_experts_per_tok": 2})]
        for i, (cls, config) in enumerate(families):
            with self.subTest(cls.__name__, i=i):
                source, _ = self.model(f"source-{i}", cls, **config)
                run = self.export(source, self.path(f"run-{i}"), "view=torchtitan", "ranks=3")
                names = self.load_dcp(os.path.join(run, "step-0"))
                self.assertTrue("tok_embeddings.weight" in names and "lm_head.weight" in names)
                back = self.export(os.path.join(run, "step-0"), self.path(f"back-{i}"), f"base={source}")
                self.same_files(back, source)

    def test_loader_knows_torchtitans_names(self):
        """A job that has torchtitan's names loads a Hugging Face directory; and hostile options are refused in Python, too."""
        os.environ["CKPTFS_LIBRARY_PATH"] = os.path.join(os.path.dirname(CKPT), "..", "core")
        sys.path.insert(0, os.path.join(SOURCE, "contrib", "python"))
        import ckptfs

        source, _ = self.model("source")
        want = self.load_dcp(os.path.join(self.export(source, self.path("run"), "view=torchtitan"), "step-0"))
        state = {n: torch.full_like(t, 7) for n, t in want.items()}
        ckptfs.load_state_dict(state, source, view="torchtitan")
        self.same(state, want, "loaded")
        for options in ({"view": "xml"}, {"tp": 2}, {"view": "dcp", "tp": 2}, {"view": "dcp", "ranks": 0}):
            with self.assertRaises(ckptfs.CkptError) as caught:
                ckptfs.load_state_dict(state, source, **options)
            self.assertEqual(caught.exception.code, "usage", options)

    def test_torchtitan_refuses(self):
        source, _ = self.model("qwen2", tf.Qwen2Config)
        done = export(source, self.path("out"), "view=torchtitan")
        self.assertEqual(done.returncode, 1)
        self.assertIn("no recipe makes a model of type 'qwen2'", done.stderr)
        os.remove(os.path.join(source, "config.json"))
        done = export(source, self.path("out"), "view=torchtitan")
        self.assertEqual(done.returncode, 1)
        self.assertIn("give one with base=DIR", done.stderr)
        for name, cls, config, text in (("mlp_bias", tf.LlamaConfig, {"mlp_bias": True}, "has no equivalent in the format"),
                                        ("llama", tf.LlamaConfig, {"attention_bias": True}, "torchtitan's projections have no biases"),
                                        ("qwen3", tf.Qwen3Config, {"attention_bias": True}, "torchtitan's projections have no biases")):
            source, _ = self.model(name, cls, **config)
            done = export(source, self.path("out"), "view=torchtitan")
            self.assertEqual(done.returncode, 1, name)
            self.assertIn(text, done.stderr)
        source, _ = self.model("gelu", hidden_act="gelu")
        done = export(source, self.path("out"), "view=torchtitan")
        self.assertEqual(done.returncode, 1)
        self.assertIn("torchtitan's models compute with SiLU", done.stderr)


if __name__ == "__main__":
    unittest.main()
