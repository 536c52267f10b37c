#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Seeds of the fuzz targets, made from tests/golden and a few texts: seeds.py DIRECTORY"""
import io
import json
import os
import struct
import sys
import tarfile
import zipfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
GOLDEN = os.path.join(ROOT, "tests", "golden", "nanotron")
RECIPES = os.path.join(ROOT, "core", "recipe", "data")


def put(out, target, name, data):
    folder = os.path.join(out, target)
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, name), "wb") as f:
        f.write(data if isinstance(data, bytes) else data.encode())


def walk(top):
    for folder, dirs, files in os.walk(top):
        dirs.sort()
        for f in sorted(files):
            yield os.path.join(folder, f)


def read(path):
    with open(path, "rb") as f:
        return f.read()


def header_of(data):
    n = struct.unpack("<Q", data[:8])[0]
    return data[8:8 + n]


def safetensors(header, data=b"", pad=True):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    if pad:
        text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def tensor(dtype, shape, lo, hi):
    return {"dtype": dtype, "shape": shape, "data_offsets": [lo, hi]}


def safetensors_seeds(out):
    files = {
        "empty": safetensors({}),
        "metadata": safetensors({"__metadata__": {"format": "pt"}}),
        "scalar": safetensors({"a": tensor("F64", [], 0, 8)}, bytes(8)),
        "zero": safetensors({"a": tensor("F32", [0, 5], 0, 0), "b": tensor("U8", [3], 0, 3)}, b"abc"),
        "two": safetensors({"b": tensor("BF16", [2, 2], 0, 8), "a": tensor("I8", [4], 8, 12)}, bytes(range(12))),
        "overlap": safetensors({"b": tensor("BF16", [2, 2], 0, 8), "a": tensor("I8", [4], 4, 8)}, bytes(8)),
        "rank": safetensors({"a": tensor("U8", [1] * 12, 0, 1)}, b"x"),
        "huge": safetensors({"a": tensor("U8", [2**62, 2**62], 0, 1)}, b"x"),
        "length": struct.pack("<Q", 2**63) + b"{}",
    }
    for name, data in files.items():
        put(out, "fuzz_safetensors", name, data)
    seen = set()
    for path in walk(GOLDEN):
        if path.endswith(".safetensors") and os.path.getsize(path) < 40000:
            data = read(path)
            kind = (len(header_of(data)) // 8, b"np.int" in data)
            if kind not in seen and len(seen) < 40:
                seen.add(kind)
                put(out, "fuzz_safetensors", "golden%d" % len(seen), data)


def slices_seeds(out):
    lines = [
        ("(64, 32)", "(64, 32)", "0,32,None|None,None,None#0,32,None|None,None,None;32,48,None|None,None,None#"
         "32,48,None|None,None,None;48,64,None|None,None,None#48,64,None|None,None,None"),
        ("(np.int64(64), 32)", "(32, 32)", "0,16,None|None,None,None#16,32,None|None,None,None;"
         "16,24,None|None,None,None#40,48,None|None,None,None;24,32,None|None,None,None#56,64,None|None,None,None"),
        ("(np.int64(64),)", "(32,)", "0,16,None#16,32,None;16,24,None#40,48,None;24,32,None#56,64,None"),
        ("(32, np.int32(32))", "(32, 16)", "None,None,None|None,None,None#None,None,None|16,32,None"),
        ("()", "()", "#"),
        ("(32,)", "(16,)", "None,None,1#16,32,1"),
    ]
    names = ["model_weight.safetensors", "model_weight_pp-rank-0-of-2_tp-rank-1-of-2.safetensors",
             "model_model_weight.safetensors_pp-rank-0-of-2_tp-rank-1-of-2_exp-rank-0-of-1.safetensors",
             "model_A_log_pp-rank-0-of-2_tp-rank-1-of-2_exp-rank-1-of-2.safetensors"]
    for i, (shape, local, pairs) in enumerate(lines):
        put(out, "fuzz_slices", "seed%d" % i, "\n".join([shape, local, pairs, "1.%d" % i, names[i % 4]]))


def pack(files):
    out = b""
    for name, kind, data in files:
        out += name.encode() + b"\n" + bytes([kind]) + struct.pack("<H", len(data)) + data
    return out


CONFIG = ("model_config.json", 0, b'{"is_llama_config":true}')


def shard(tp, of, shape, whole, pairs):
    n = 2
    for s in shape:
        n *= s
    header = {"__metadata__": {"version": "1.4", "local_global_slices_pairs": pairs, "unsharded_shape": whole},
              "data": tensor("BF16", shape, 0, n)}
    return ("model/model/l/model_weight_pp-rank-0-of-1_tp-rank-%d-of-%d.safetensors" % (tp, of), 4,
            json.dumps(header, separators=(",", ":")).encode())


def plain(path, shape):
    n = 2
    for s in shape:
        n *= s
    return ("model/model/%s/model_weight.safetensors" % path, 4,
            json.dumps({"__metadata__": {}, "data": tensor("BF16", shape, 0, n)}, separators=(",", ":")).encode())


def nanotron_seeds(out):
    all_ = "None,None,None|None,None,None"
    rows = [shard(r, 2, [4, 6], "(8, 6)", all_ + "#%d,%d,None|None,None,None" % (4 * r, 4 * r + 4)) for r in (0, 1)]
    cols = [shard(r, 2, [4, 3], "(4, 6)", all_ + "#None,None,None|%d,%d,None" % (3 * r, 3 * r + 3)) for r in (0, 1)]
    fused = [shard(r, 2, [4, 2], "(np.int64(8), 2)",
                   "0,2,None|None,None,None#%d,%d,None|None,None,None;2,4,None|None,None,None#%d,%d,None|None,None,None"
                   % (2 * r, 2 * r + 2, 4 + 2 * r, 6 + 2 * r)) for r in (0, 1)]
    seeds = {
        "plain": [CONFIG, plain("norm", [8])],
        "rows": [CONFIG] + rows,
        "columns": [CONFIG, plain("a.b".replace(".", "/"), [3, 3])] + cols,
        "fused": [CONFIG] + fused,
        "missing_rank": [CONFIG, rows[0]],
        "fifo": [CONFIG, (rows[0][0], 2, b""), rows[1]],
        "link": [CONFIG, ("model/model/l", 1, b""), (rows[0][0], 3, b"../../../elsewhere"), rows[1]],
        "yaml": [("config.yaml", 0, b"model:\n  model_config:\n    is_llama_config: true\nparallelism: {tp: 2, pp: 1}\n")] + rows,
        "two_topologies": [CONFIG, ("checkpoint_metadata.json", 0, b'{"tp":2,"version":"1.5"}')] + rows
        + [shard(0, 1, [8, 6], "(8, 6)", all_ + "#" + all_)],
        "latest": [("latest.txt", 0, b"10"), CONFIG, plain("norm", [8])],
    }
    run = os.path.join(ROOT, "tests", "load", "runs", "nanotron-zero1", "2")
    files = [(os.path.relpath(path, run), 0, read(path)) for path in walk(run)]
    seeds["zero1_stage1"] = [f for f in files if not any(part in f[0] for part in ("decoder", "optimizer_pp-0", "config.yaml"))]
    seeds["zero1_second_tp_rank"] = [f for f in seeds["zero1_stage1"] if "_tp-0-of" not in f[0]]
    seeds["no_states"] = [f for f in seeds["zero1_stage1"] if "optimizer_pp" not in f[0]]
    for name, files in seeds.items():
        put(out, "fuzz_nanotron", name, pack(files))


def hf_shard(rank, lo, shape, nfile=1, name="w"):
    info = json.dumps({name: {"saved_offsets": lo}})
    n = 1
    for s in shape:
        n *= s
    header = {name: tensor("U8", shape, 0, n), "__metadata__": {"DCP_SHARDING_INFO": info, "DCP_VERSION": "1.0"}}
    return ("model/shard-%05d-model-00001-of-%05d.safetensors" % (rank, nfile), 4, json.dumps(header, separators=(",", ":")).encode())


def dcp_hf_seeds(out):
    meta = "model/.hf_metadata/"
    config = (meta + "config.json", 0, b'{"model_type":"llama"}')
    maps = [(meta + "fqn_to_file_index_mapping.json", 0, b'{"w":2}'), (meta + "fqn_to_dtype_mapping.json", 0, b'{"w":"BF16"}')]
    rows = [hf_shard(1, [0, 0], [3, 2]), hf_shard(2, [3, 0], [2, 2])]
    boxes = [hf_shard(1 + 2 * i + j, [2 * i, 3 * j], [2, 3]) for i in range(2) for j in range(2)]
    scalar = [hf_shard(1, [], [])]
    index = ("model/consolidated/model.safetensors.index.json", 0, b'{"weight_map":{"w":"model-00001-of-00001.safetensors"}}')
    seeds = {
        "rows": [config] + maps + rows,
        "boxes": boxes,
        "scalar": scalar,
        "empty_last": rows + [hf_shard(3, [5, 0], [0, 2])],
        "missing": [rows[1]],
        "stale": rows + [hf_shard(3, [2, 0], [2, 2])],
        "two_counts": [rows[0], hf_shard(2, [3, 0], [2, 2], 2)],
        "consolidated": [index, ("model/consolidated/config.json", 0, config[2])] + rows,
        "diffusers": [(meta + "config.json", 0, b'{"_diffusers_version":"0"}')] + rows,
        "latest": [("LATEST", 0, b"epoch_0_step_1\n"), (".incomplete", 0, b"")] + rows,
        "latest_link": [("epoch_0_step_1", 1, b""), ("LATEST", 3, b"epoch_0_step_1")] + rows,
        "fifo": [rows[0], (rows[1][0], 2, b"")],
        "top": [(n.replace("model/", ""), k, d) for n, k, d in rows],
        "sharded": [(n.replace("model/", "sharded/"), k, d) for n, k, d in rows],
    }
    for name, files in seeds.items():
        put(out, "fuzz_dcp_hf", name, pack(files))


def peft_seeds(out):
    config = ("adapter_config.json", 0, b'{"peft_type":"LORA"}')
    header = {"a.lora_A.weight": tensor("F32", [2, 3], 0, 24), "a.lora_B.weight": tensor("F32", [3, 2], 24, 48)}
    weights = ("adapter_model.safetensors", 4, json.dumps(header, separators=(",", ":")).encode())
    put(out, "fuzz_peft", "plain", pack([config, weights]))
    put(out, "fuzz_peft", "below", pack([("model/" + n, k, d) for n, k, d in (config, weights)]))


def zstd_frame(data):
    """One raw block."""
    return b"\x28\xb5\x2f\xfd" + bytes([0x20, len(data)]) + (len(data) << 3 | 1).to_bytes(3, "little") + data


def delta_seeds(out):
    whole = safetensors({"a": tensor("BF16", [2, 3], 0, 12), "b": tensor("U8", [4], 12, 16)}, bytes(range(16)))
    xor = zstd_frame(bytes(11) + b"\x01")
    over = zstd_frame(struct.pack("<III", 2, 0, 3) + b"xy")
    base = [("v0/model.safetensors", 0, whole), ("v0/config.json", 0, b'{"model_type":"llama"}')]

    def slime(v, encoding, name, blob, sums):
        meta = {"version": f"{v:06d}", "base_version": f"{v - 1:06d}", "delta_encoding": encoding, "compression_format": "zstd", "checksum_format": sums}
        head = {"__metadata__": {name: "00000000"}, name: tensor("U8", [len(blob)], 0, len(blob))}
        index = json.dumps({"metadata": meta, "weight_map": {name: "m.safetensors"}}).encode()
        return [(f"v{v}/m.safetensors", 0, safetensors(head, blob)), (f"v{v}/model.safetensors.index.json", 0, index)]

    record = {"name": "a", "dtype": "bfloat16", "shape": [2, 3], "payload_file": "d.safetensors", "payload_key": "a", "checksum": "0", "checksum_algorithm": "none"}
    manifest = json.dumps({"version": 2, "base_version": 0, "tensors": [record]}).encode()
    seeds = {
        "chain": base + slime(1, "xor", "a", xor, "none") + slime(2, "overwrite", "b", over, "none"),
        "sums": base + slime(1, "xor", "a", xor, "adler32") + slime(2, "xor", "a", xor, "xxh3-128"),
        "skyrl": base + [("v2/d.safetensors", 0, safetensors({"a": tensor("U8", [len(xor)], 0, len(xor))}, xor)), ("v2/manifest.json", 0, manifest)],
        "gap": slime(2, "xor", "a", xor, "none"),
    }
    for name, files in seeds.items():
        put(out, "fuzz_delta", name, pack(files))


def directory_seeds(out):
    """The small ones of the golden checkpoints, file by file."""
    for target, fmt, mark in (("fuzz_dcp", "dcp", "metadata"), ("fuzz_rank_files", "accelerate", ".bin")):
        top = os.path.join(os.path.dirname(GOLDEN), fmt)
        for case in sorted(os.listdir(top)):
            run = os.path.join(top, case, "run")
            files = [(os.path.relpath(path, run), 0, read(path)) for path in walk(run)]
            if any(name.endswith(mark) for name, _, _ in files) and all(len(data) < 65536 for _, _, data in files):
                put(out, target, case, pack(files))


def without_crcs(data):
    """A torch.save file whose checksums are 0, as torch may write it: a changed pickle is read, not refused."""
    import io
    import zipfile
    if not data.startswith(b"PK\3\4"):
        return data
    own = bytearray(data)
    with zipfile.ZipFile(io.BytesIO(data)) as z:
        at = z.start_dir
        for e in z.infolist():
            crc = struct.pack("<I", e.CRC)
            local = e.header_offset
            end = local + 30 + sum(struct.unpack("<HH", data[local + 26:local + 30])) + e.file_size
            for place in (local + 14, end + 4, at + 16):
                if data[place:place + 4] == crc:
                    own[place:place + 4] = bytes(4)
            at += 46 + sum(struct.unpack("<HHH", data[at + 28:at + 34]))
    return bytes(own)


def deepspeed_seeds(out):
    """Golden tags by themselves; those of the Trainer from above."""
    top = os.path.join(os.path.dirname(GOLDEN), "deepspeed")
    for case in sorted(os.listdir(top)):
        for at, _, names in sorted(os.walk(os.path.join(top, case, "run"))):
            files = [(os.path.relpath(path, at), 0, without_crcs(read(path))) for path in walk(at)]
            if any(n.endswith("_states.pt") for n in names) or "config.json" in names or "adapter_config.json" in names:
                put(out, "fuzz_deepspeed", "%s-%s" % (case, os.path.basename(at)), pack([f for f in files if len(f[2]) < 65536][:64]))


def megatron_seeds(out):
    """Golden runs, of which the larger files are left out (few bytes of tensors are enough), and a zarr one by hand."""
    top = os.path.join(os.path.dirname(GOLDEN), "megatron")
    for case in sorted(os.listdir(top)):
        run = os.path.join(top, case)
        if not os.path.isdir(run):
            continue
        for step in ("run/iter_0000010", "run", "iter_0000010", ""):
            if os.path.isdir(os.path.join(run, step)):
                run = os.path.join(run, step)
                break
        files = [(os.path.relpath(path, run), 0, read(path)) for path in walk(run)]
        put(out, "fuzz_megatron", case, pack([f for f in files if len(f[2]) < 65536][:64]))
    head = {"zarr_format": 2, "shape": [3, 2], "chunks": [2, 2], "dtype": "|u1", "compressor": None, "filters": None, "order": "C", "fill_value": None}
    name = "embedding.word_embeddings.weight/"
    mark = ("metadata.json", 0, b'{"sharded_backend": "zarr"}')
    zarr = [mark, (name + ".zarray", 0, json.dumps(head).encode()), (name + "0.0", 0, b"abcd"), (name + "1.0", 0, b"efgh")]
    put(out, "fuzz_megatron", "zarr", pack(zarr))
    put(out, "fuzz_megatron", "zarr_missing", pack(zarr[:-1]))
    put(out, "fuzz_megatron", "config", pack(zarr + [("run_config.yaml", 0, b"model:\n  _target_: a.b.GPTModelProvider\n  vocab_size: 3\n")]))
    put(out, "fuzz_megatron", "tokenizer", pack(zarr + [("tokenizer/tokenizer.json", 0, b'{"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 7}]}')]))
    put(out, "fuzz_megatron", "nemo", pack([("weights/" + n, k, d) for n, k, d in zarr] + [("context/model.yaml", 0, b"_target_: a.LlamaModel\nconfig: {num_layers: 2}\n")]))
    for i, more in enumerate([{}, {"dtype": "bfloat16", "dimension_separator": "/"}, {"shape": [], "chunks": []}, {"compressor": {"id": "zlib"}}, {"shape": [7, 0]}]):
        put(out, "fuzz_zarr", "seed%d" % i, json.dumps(head | more))


def varint(n):
    out = b""
    while n > 127:
        out += bytes([n & 127 | 128])
        n >>= 7
    return out + bytes([n])


def columns(*lists):
    return b"".join(varint(n) for numbers in lists for n in numbers)


OCDBT_FILES = columns([1], [3], [0]) + b"d/a"


def ocdbt_manifest(off, length, height, keys, older=b"\0", kind=0):
    config = bytes(16) + columns([kind, 1024, 10**8]) + bytes([4]) + varint(1) + struct.pack("<i", 0)
    root = columns([1], [5]) + bytes([height]) + columns([0], [off], [length], [keys], [9], [9]) + struct.pack("<Q", 1) if keys else columns([0])
    return config + OCDBT_FILES + root + older


def ocdbt_leaf(values, off=0):
    """Keys with inline values (bytes), or lengths of values in the data file."""
    names, out = sorted(values), b""
    inline = [values[n] for n in names if isinstance(values[n], bytes)]
    outer = [values[n] for n in names if not isinstance(values[n], bytes)]
    out += bytes([0]) + OCDBT_FILES + columns([len(names)], [0] * (len(names) - 1), [len(n) for n in names]) + "".join(names).encode()
    sizes = [len(values[n]) if isinstance(values[n], bytes) else values[n] for n in names]
    return out + columns(sizes, [not isinstance(values[n], bytes) for n in names], [0] * len(outer), [off] * len(outer)) + b"".join(inline)


def ocdbt_interior(keys, commons, places, counts, height=1):
    n = len(keys)
    return (bytes([height]) + OCDBT_FILES + columns([n], [0] * (n - 1), [len(k) for k in keys], commons) + "".join(keys).encode()
            + columns([0] * n, [p[0] for p in places], [p[1] for p in places], counts, [1] * n, [1] * n))


def zarr3(shape, chunk, inner=None, dtype="uint8", codecs=("bytes",)):
    codecs = [{"name": c} for c in codecs]
    if inner is not None:
        index = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
        codecs = [{"name": "sharding_indexed", "configuration": {"chunk_shape": inner, "codecs": codecs, "index_codecs": index}}]
    return json.dumps({"zarr_format": 3, "node_type": "array", "shape": shape, "data_type": dtype, "codecs": codecs, "fill_value": 0,
                       "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}}, "chunk_key_encoding": {"name": "default"}}).encode()


def orbax_seeds(out):
    """A database of one leaf, one of height 1, one with a tree of versions; arrays in files and in shards."""
    around = 4 + 8 + 2 + 4  # header and checksum of a node

    def nodes(*list_):
        return b"".join(bytes([kind, 0]) + struct.pack("<H", len(body)) + body for kind, body in list_)

    leaf = ocdbt_leaf({"a/c/0": 4, "a/zarr.json": zarr3([4], [4]), "b": b"x"})
    put(out, "fuzz_ocdbt", "leaf", nodes((3, b"abcd"), (1, leaf), (0, ocdbt_manifest(4, len(leaf) + around, 0, 3))))
    one, two = ocdbt_leaf({"1": b"u", "2": b"v"}), ocdbt_leaf({"b": b"w"})
    places = [(0, len(one) + around), (len(one) + around, len(two) + around)]
    top = ocdbt_interior(["a1", "bb"], [1, 1], places, [2, 1])
    begin = sum(p[1] for p in places)
    put(out, "fuzz_ocdbt", "height", nodes((1, one), (1, two), (1, top), (0, ocdbt_manifest(begin, len(top) + around, 1, 3))))
    versions = bytes([4, 0]) + OCDBT_FILES + columns([1], [5]) + bytes([1]) + columns([0], [begin], [len(top) + around], [3], [9], [9]) + bytes(8)
    older = columns([1], [5], [0], [begin + len(top) + around], [len(versions) + around], [1]) + bytes(8) + bytes([0])
    put(out, "fuzz_ocdbt", "versions", nodes((1, one), (1, two), (1, top), (2, versions), (0, ocdbt_manifest(0, 0, 0, 0, older))))
    put(out, "fuzz_ocdbt", "empty", nodes((0, ocdbt_manifest(0, 0, 0, 0))))
    put(out, "fuzz_ocdbt", "kind", nodes((0, ocdbt_manifest(0, 0, 0, 0, kind=1))))

    absent = struct.pack("<QQ", 2**64 - 1, 2**64 - 1)
    heads = {"raw": (zarr3([3, 2], [2, 2]), b"abcd"), "f32": (zarr3([], [], dtype="float32"), b"abcd"),
             "shard": (zarr3([3, 4], [4, 4], [2, 2]), b"abcdefghijkl" + struct.pack("<QQQQQQ", 0, 4, 4, 4, 8, 4) + absent),
             "zstd": (zarr3([4], [4], codecs=("bytes", "zstd")), bytes.fromhex("28b52ffd200421000061626364"))}
    for name, (head, chunk) in heads.items():
        put(out, "fuzz_zarr_chunk", name, head + b"\0" + chunk)
        put(out, "fuzz_zarr", "v3_" + name, head)

    def leaf_of(name, kind="jax.Array"):
        return {"key_metadata": [{"key": k, "key_type": 2} for k in name.split(".")], "value_metadata": {"value_type": kind, "skip_deserialize": kind == "None"}}

    tree = {"tree_metadata": {"a": leaf_of("params.a"), "b": leaf_of("opt_state.mu.a"), "c": leaf_of("n", "None")}, "use_ocdbt": False, "use_zarr3": True}
    step = ("_CHECKPOINT_METADATA", 0, b'{"commit_timestamp_nsecs": 5}')
    head, chunk = heads["raw"]
    files = [step, ("items/_METADATA", 0, json.dumps(tree).encode())]
    for name in ("params.a", "opt_state.mu.a"):
        files += [("items/%s/zarr.json" % name, 0, head), ("items/%s/c/0/0" % name, 0, chunk), ("items/%s/c/1/0" % name, 0, chunk)]
    put(out, "fuzz_orbax", "files", pack(files))
    put(out, "fuzz_orbax", "fill", pack(files[:-1]))
    put(out, "fuzz_orbax", "every_chunk", pack([(n, k, d.replace(b'"use_zarr3"', b'"store_array_data_equal_to_fill_value": true, "use_zarr3"')) for n, k, d in files[:-1]]))
    two = [(n.replace("items/", ""), k, d) for n, k, d in files] + [("_sharding", 0, b"{}")]
    put(out, "fuzz_orbax", "no_folder", pack(two))


def text_seeds(out):
    seen = 0
    for path in list(walk(GOLDEN)) + list(walk(RECIPES)):
        name = os.path.basename(path)
        if name.endswith(".json"):
            put(out, "fuzz_json", "%d-%s" % (seen, name), read(path))
        elif name.endswith(".yaml"):
            put(out, "fuzz_yaml", "%d-%s" % (seen, name), read(path))
        seen += 1
    for path in walk(os.path.join(RECIPES, "nanotron")):
        put(out, "fuzz_recipe", os.path.basename(path), read(path))
    more = ["[1e-05, 1e16, -0.0, 1.5, 9223372036854775807]", '{"a": {"b": {"c": "\\u00e9\\ud83d\\ude00\\n"}}}', "[[[[]]]]"]
    for i, text in enumerate(more):
        put(out, "fuzz_json", "text%d" % i, text)
    more = ["a: &x [1, 2]\nb: *x\n", "- ~\n- null\n- true\n- 1.0e-06\n- '1'\n- 1f1b\n", "a: &a [*a]\n",
            "? [a]\n: b\n", "a: |\n  text\n  more\n", "--- {a: 1, a: 2}\n...\n", "a: !!int '3'\nb: \"\\0\"\n"]
    for i, text in enumerate(more):
        put(out, "fuzz_yaml", "text%d" % i, text)
    item = "<Contents><Key>%s</Key><LastModified>2026-11-26T01:02:03.5Z</LastModified><ETag>&quot;e&quot;</ETag><Size>7</Size></Contents>"
    page = "<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken>%s</ListBucketResult>"
    more = [page % (item % "a" + "<CommonPrefixes><Prefix>b/</Prefix></CommonPrefixes>"),
            page % ("<EncodingType>url</EncodingType>" + item % "a%2Bb+c"), "[default]\nregion = eu-west-1\n# x\n[profile y]\nregion=z\n",
            "<Error><Code>SlowDown</Code><Message>m</Message></Error>", "2026-11-26T01:02:03.000Z", "a/../b+c d=%"]
    for i, text in enumerate(more):
        put(out, "fuzz_bucket", "text%d" % i, text)
    for i in range(8):
        put(out, "fuzz_axes", "seed%d" % i, bytes((k * k * (i + 3) + i) % 256 for k in range(96)))


def dcp_seeds(out):
    """Metadata and single items of the golden checkpoints."""
    n = 0
    for path in sorted(walk(os.path.join(GOLDEN, "..", "dcp"))):
        if path.endswith(".metadata"):
            n += 1
            put(out, "fuzz_dcp_metadata", "golden%d" % n, read(path))
        elif path.endswith(".distcp") and "strides" in path or "conj" in path and path.endswith(".distcp"):
            data = read(path)
            ends = [i + 22 for i in range(len(data)) if data[i:i + 4] == b"PK\5\6"]
            for k, (lo, hi) in enumerate(zip([0] + ends, ends)):
                put(out, "fuzz_torch", "%s%d" % (os.path.basename(path), k), data[lo:hi])


def rank_piece_seeds(out):
    """A rank's file with its storages cut down to nothing: the pickle is what counts."""
    import io
    import zipfile
    n = 0
    for path in sorted(walk(os.path.join(GOLDEN, "..", "accelerate"))):
        if not path.endswith(".bin"):
            continue
        n += 1
        put(out, "fuzz_rank_piece", "whole%d" % n, read(path))
        to = io.BytesIO()
        with zipfile.ZipFile(path) as z, zipfile.ZipFile(to, "w", zipfile.ZIP_STORED) as small:
            for name in z.namelist():
                small.writestr(name, z.read(name) if "/data/" not in name else b"")
        put(out, "fuzz_rank_piece", "small%d" % n, to.getvalue())


def value_seeds(out):
    """Adapters and their bases; block-scaled weights."""
    lora = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
    q, x = "base_model.model.l.0.q_proj.", "base_model.model.l.0.mlp.experts."
    pair = ["a %slora_A.weight F32 2 6" % q, "a %slora_B.weight BF16 8 2" % q, "b l.0.q_proj.weight BF16 8 6"]
    experts = ["b l.0.mlp.experts.%d.%s_proj.weight F16 5 6" % (e, p) for e in (0, 1) for p in ("gate", "up")]
    stack = ["a %slora_A.weight F32 4 6" % x, "a %slora_B.weight F32 10 4" % x]
    e = "base_model.model.e.lora_embedding_"
    cases = {
        "linear": (lora, {}, pair),
        "dora": ({**lora, "use_dora": True}, {}, pair + ["a %slora_magnitude_vector F32 8" % q]),
        "pattern": ({**lora, "r": 9, "rank_pattern": {"q_.*": 2}, "use_rslora": True}, {}, pair),
        "bias": (lora, {}, pair + ["a %slora_B.bias F32 8" % q, "b l.0.q_proj.bias F32 8"]),
        "embedding": (lora, {"vocab_size": 7}, ["a %sA F32 2 7" % e, "a %sB F32 3 2" % e, "b e.weight F32 7 3"]),
        "grown": (lora, {"vocab_size": 7}, pair + ["a base_model.model.h.weight F32 9 3", "b h.weight BF16 7 3"]),
        "experts": ({**lora, "target_parameters": ["experts.gate_up_proj"]}, {}, stack + experts),
        "fused": ({**lora, "peft_version": "0.18.0", "target_parameters": ["down_proj"]}, {"model_type": "gpt_oss"},
                  ["a %slora_A.weight F32 4 6" % x, "a %slora_B.weight F32 6 4" % x, "b l.0.mlp.experts.down_proj F32 2 6 6"]),
        "fp8": ({}, {"dtype": "float16", "quantization_config": {"weight_block_size": [3, 4]}},
                ["b w.weight F8_E4M3 2 7 9", "b w.weight_scale_inv BF16 2 3 3"]),
        "mxfp4": ({}, {"torch_dtype": "float32"}, ["b x_blocks U8 2 3 4 16", "b x_scales U8 2 3 4"]),
        "both": (lora, {}, pair[:2] + ["b l.0.q_proj.weight F8_E4M3 8 6", "b l.0.q_proj.weight_scale_inv F8_E8M0 1 1"]),
    }
    for name, (adapter, config, lines) in cases.items():
        put(out, "fuzz_values", name, "\n".join([json.dumps(adapter), json.dumps(config), *lines]))


def recording_seeds(out):
    def answer(kind, path, data, off=0):
        return struct.pack("<QIHBB", off, len(data), len(path) + 1, kind, 0) + path + b"\0" + data

    def look(kind, errno, size):
        return struct.pack("<7Qx", errno, kind, 11, size, 1, 2, 9)
    start = struct.pack("<QQ", 7, 1000)
    file = answer(0, b"a/b", look(0, 0, 100)) + answer(2, b"a/b", b"head") + answer(2, b"a/b", b"0123456789", 90) + answer(3, b"a/b", b"sample", 50)
    put(out, "fuzz_recording", "empty", start)
    put(out, "fuzz_recording", "file", start + file)
    put(out, "fuzz_recording", "step", start + answer(0, b".", look(1, 0, 0)) + answer(1, b".", b"\0a\0\x81b\0") + file + answer(0, b"none", look(2, 2, 0)))


def load_seeds(out):
    version, grid = 3, (2, 2, 2, 0, 1, 2, 3)
    rows = (3, 20)
    put(out, "fuzz_wants", "empty", bytes((0, version, 0, 0, 0)))
    put(out, "fuzz_wants", "whole", bytes((0, version, 0, 0, 2, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0)))
    put(out, "fuzz_wants", "boxes", bytes((0, version, 1, 1, 3, *grid, 0, 2, 0, 0, 1, 1, 0, 1, 1, 0, 0, 2, 1, 0, 0, 0, 1, 0, 0, 0, 0, *rows)))
    put(out, "fuzz_wants", "columns", bytes((0, version, 1, 2, 2, 1, 5, 0, 1, 2, 3, 4, 0, 1, 1, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 2, 2, 0, 0, 0)))
    put(out, "fuzz_wants", "shared", bytes((6, version, 0, 0, 2, 0, 0, 1, 0, 0, 2, 0, 6, 2, 0, 0, 20, 1, 3, 2, 5, 20, 20, 0, 2, 1, 7)))
    recording_seeds(out)
    for secret in (0, 1):
        greeting = struct.pack("<IIQQII16sII", 0x74706B63, 7, 1, 2, 7, 2, b"n" * 16, secret, 0)
        address = b"127.0.0.1 29500 " + b"0123456789abcdef" * 2 + b" 1 2 3 4"
        confirmation = struct.pack("<II256s32s", 0, 0, address, b"")
        put(out, "fuzz_handshake", "calls%d" % secret, bytes([secret]) + greeting + confirmation)
        answer = struct.pack("<IIQQII16sII32s", 0x74706B63, 7, 1, 2, 7, 0, b"n" * 16, secret, 0, b"")
        put(out, "fuzz_handshake", "answers%d" % secret, bytes([2 + secret]) + answer)
    put(out, "fuzz_rounds", "good", b"")
    for message in (0, 1, 3, 6):
        put(out, "fuzz_rounds", "lost%d" % message, struct.pack("<BHB", message, 0xfffe, 0))
        put(out, "fuzz_rounds", "short%d" % message, struct.pack("<BHB", message, 0xffff, 21))
        for at in (12, 16, 20, 36, 60):
            put(out, "fuzz_rounds", "wrong%d_%d" % (message, at), struct.pack("<BHB", message, at, 0xfe))


def archive_seeds(out):
    for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w", format=form) as tar:
            def add(name, data=b"", **more):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                for key, value in more.items():
                    setattr(member, key, value)
                tar.addfile(member, io.BytesIO(data))

            add("./config.json", b"{}")
            add("folder", type=tarfile.DIRTYPE)
            add("folder/" + "n" * 90, b"x" * 600)
            add("link", type=tarfile.SYMTYPE, linkname="folder/../config.json")
            add("again", type=tarfile.LNKTYPE, linkname="./config.json")
            add("config.json", b"{1}")
            if form != tarfile.USTAR_FORMAT:
                add("/".join(["long"] * 60), b"y", mtime=1.5)
        put(out, "fuzz_archive", f"tar{form}", packed.getvalue().rstrip(b"\0") + bytes(1024 + 511))
    data = read(os.path.join(GOLDEN, "..", "dcp", "zstd_1r", "run", "__0_0.distcp"))
    put(out, "fuzz_zstd", "several", data)
    put(out, "fuzz_zstd", "one", data[:data.index(b"\x28\xb5\x2f\xfd", 4)])
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as z:
        z.writestr("config.json", "{}")
        z.writestr("folder/file", "x" * 100)
    put(out, "fuzz_archive", "zip", packed.getvalue())


def trainer_seeds(out):
    """Of the saves in trainers.tar.xz, those of which each file is small enough."""
    runs = {}
    with tarfile.open(os.path.join(ROOT, "tests", "golden", "trainers.tar.xz")) as archive:
        for member in archive:
            if not member.isfile() or "/run/" not in member.name or member.name.startswith("torchtune"):
                continue
            trainer, case, _, *rest = member.name.split("/")
            inside = [part for part in rest if not part.startswith(("step", "final"))]
            step = "_".join(part for part in rest if part.startswith(("step", "final")))
            runs.setdefault((trainer, f"{case}_{step}"), []).append(("/".join(inside), 0, archive.extractfile(member).read()))
    for (trainer, name), files in runs.items():
        if all(len(data) < 1 << 16 for _, _, data in files):
            put(out, "fuzz_" + trainer, name, pack(files))


def main():
    out = sys.argv[1]
    orbax_seeds(out)
    trainer_seeds(out)
    archive_seeds(out)
    load_seeds(out)
    rank_piece_seeds(out)
    dcp_seeds(out)
    megatron_seeds(out)
    deepspeed_seeds(out)
    directory_seeds(out)
    safetensors_seeds(out)
    slices_seeds(out)
    nanotron_seeds(out)
    dcp_hf_seeds(out)
    peft_seeds(out)
    delta_seeds(out)
    text_seeds(out)
    value_seeds(out)


main()
