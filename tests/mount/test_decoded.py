# SPDX-License-Identifier: Apache-2.0
"""Arrays in large compressed chunks: an export and a mount with cache_dir= decompress each once, into a temporary file, and take little memory."""

import json
import math
import os
import subprocess

from mountlib import CKPT, CKPTFS, Case, Mount, main

BLOCK, BLOCKS, ARRAYS = 128 * 1024, 1280, 2  # 160 MiB an array: together they are more than the budget in memory


def value(array, block):
    return (block * 7 + array) % 256


def frame(size, byte_of):
    """A frame of zstd, written by hand after RFC 8878: blocks of one repeated byte."""
    out = bytearray(b"\x28\xb5\x2f\xfd\x00\x38")
    for at in range(0, size, BLOCK):
        header = (at + BLOCK >= size) | 1 << 1 | min(BLOCK, size - at) << 3
        out += header.to_bytes(3, "little") + bytes([byte_of(at // BLOCK)])
    return bytes(out)


def write(path, data):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as f:
        f.write(data if isinstance(data, bytes) else json.dumps(data).encode())


def save(step, arrays, dtype, byte_of):
    """A step of Orbax's, whose arrays ({name with dots: shape}) are files of zarr 3, in one chunk each."""
    write(os.path.join(step, "_CHECKPOINT_METADATA"), {"commit_timestamp_nsecs": 5})
    write(os.path.join(step, "items", "_METADATA"), {
        "use_ocdbt": False, "use_zarr3": True, "store_array_data_equal_to_fill_value": True,
        "tree_metadata": {n: {"key_metadata": [{"key": k, "key_type": 2} for k in n.split(".")], "value_metadata": {"value_type": "jax.Array"}} for n in arrays}})
    for n, (name, shape) in enumerate(arrays.items()):
        write(os.path.join(step, "items", name, "zarr.json"), {
            "zarr_format": 3, "node_type": "array", "shape": shape, "data_type": dtype, "fill_value": 0, "codecs": [{"name": "bytes"}, {"name": "zstd"}],
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shape}}, "chunk_key_encoding": {"name": "default"}})
        size = math.prod(shape) * {"uint8": 1, "float32": 4}[dtype]
        write(os.path.join(step, "items", name, "c", *("0" for _ in shape)), frame(size, lambda block, n=n: byte_of(n, block)))


def save_scanned(top):
    """A Llama as MaxText saves it, whose layers lie in one array; and its config."""
    hidden, layers, heads, kv, head, ffn, vocab = 1024, 4, 16, 4, 64, 8192, 64
    at = "params.params.decoder."
    arrays = {"params.params.token_embedder.embedding": [vocab, hidden], at + "decoder_norm.scale": [hidden], at + "logits_dense.kernel": [hidden, vocab]}
    at += "layers."
    arrays |= {at + f"self_attention.{n}.kernel": [hidden, layers, k, head] for n, k in (("query", heads), ("key", kv), ("value", kv))}
    arrays |= {at + "self_attention.out.kernel": [heads, layers, head, hidden], at + "mlp.wo.kernel": [ffn, layers, hidden]}
    arrays |= {at + f"mlp.wi_{i}.kernel": [hidden, layers, ffn] for i in (0, 1)}
    arrays |= {at + f"{n}_self_attention_layer_norm.scale": [hidden, layers] for n in ("pre", "post")}
    save(os.path.join(top, "run", "0"), arrays, "float32", lambda n, block: (block * 7 + n) % 61)
    write(os.path.join(top, "base", "config.json"), {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": ffn, "vocab_size": vocab,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": head, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256, "hidden_act": "silu", "tie_word_embeddings": False, "dtype": "float32",
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}})
    return os.path.join(top, "run"), "base=" + os.path.join(top, "base")


class Decoded(Case):
    def setUp(self):
        super().setUp()
        save(os.path.join(self.run_dir, "0"), {f"a{n}": [BLOCKS, BLOCK] for n in range(ARRAYS)}, "uint8", value)

    def check(self, file):
        with open(file, "rb") as f:
            size = int.from_bytes(f.read(8), "little")
            header = json.loads(f.read(size))
            for n in reversed(range(ARRAYS)):
                lo, hi = header[f"a{n}"]["data_offsets"]
                self.assertEqual(hi - lo, BLOCKS * BLOCK)
                for b in [*range(0, BLOCKS, 64), BLOCKS - 1]:
                    f.seek(8 + size + lo + (b + 1) * BLOCK - 2)
                    self.assertEqual(list(f.read(2)), [value(n, b)] * 2)

    def export(self, *options):
        """What it said, the most memory in MiB, the digest."""
        out = os.path.join(self.tmp, "out")
        p = subprocess.Popen([CKPT, "export", self.run_dir, out, "-o", "view=raw", "--weights-only", *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        said, noted = p.stdout.read(), p.stderr.read()
        _, status, usage = os.wait4(p.pid, 0)
        p.returncode = os.waitstatus_to_exitcode(status)
        p.stdout.close()
        p.stderr.close()
        self.assertEqual(p.returncode, 0, noted)
        self.check(os.path.join(out, "model.safetensors"))
        self.assertEqual(sorted(os.listdir(self.tmp)), ["mnt", "out", "run"])
        subprocess.run(["rm", "-r", out], check=True)
        return noted, usage.ru_maxrss / 1024, said.split("xxh3")[-1]

    def test_an_export_keeps_what_is_decompressed_beside_its_files(self):
        noted, most, digest = self.export()
        self.assertIn(f"2 chunks are compressed: each is decompressed once, into a temporary file in '{self.tmp}'", noted)
        if "address" not in os.environ.get("CKPTFS_SANITIZE", ""):
            self.assertLess(most, 128)
        noted, _, other = self.export("-o", "cache_dir=no")
        self.assertNotIn("temporary file", noted)
        self.assertEqual(other, digest)

    def test_a_folder_may_be_called_as_a_word_of_the_option(self):
        os.mkdir(os.path.join(self.tmp, "no"))
        done = subprocess.run([CKPT, "export", self.run_dir, "no/out", "-o", "view=raw", "--weights-only"], cwd=self.tmp, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(f"into a temporary file in '{self.tmp}/no'", done.stderr)

    def test_a_mount_has_its_file_before_the_sandbox(self):
        folder = os.path.join(self.tmp, "cache")
        os.mkdir(folder)
        with Mount(self.run_dir, self.mnt, "-o", f"view=raw,cache_dir={folder}", program=CKPTFS) as m:
            self.check(self.at("0", "model.safetensors"))
            fds = f"/proc/{m.process.pid}/fd"
            held = [os.stat(os.path.join(fds, fd)).st_size for fd in os.listdir(fds) if os.readlink(os.path.join(fds, fd)).startswith(folder + "/")]
            self.assertEqual(held, [ARRAYS * BLOCKS * BLOCK])
            self.assertNotIn("warning", m.text())
        self.assertEqual(os.listdir(folder), [])

    def test_layers_in_one_chunk_are_those_that_memory_has(self):
        run, base = save_scanned(os.path.join(self.tmp, "scanned"))
        tool = lambda word, cache: subprocess.run([CKPT, word, run, "-o", f"{base},rope=half,cache_dir={cache}"], capture_output=True, text=True, check=True)
        self.assertRegex(tool("info", "no").stdout, "9 compressed chunks hold parts of up to 4 tensors each, and may be decompressed again for each of them, as memory keeps 256 of their 425 MiB: ")
        self.assertRegex(tool("info", self.tmp).stdout, f"12 chunks are compressed: each is decompressed once, into a temporary file in '{self.tmp}' .of 425 MiB")
        self.assertEqual(tool("digest", "no").stdout, tool("digest", self.tmp).stdout)

    def test_a_folder_that_is_not_there_is_told(self):
        for command in ([CKPTFS, self.run_dir, self.mnt], [CKPT, "export", self.run_dir, os.path.join(self.tmp, "out")], [CKPT, "digest", self.run_dir]):
            done = subprocess.run([*command, "-o", "view=raw,cache_dir=/nowhere/else"], capture_output=True, text=True)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn("'/nowhere/else': making a temporary file (cache_dir=): No such file or directory", done.stderr)


if __name__ == "__main__":
    main()
