# SPDX-License-Identifier: Apache-2.0
"""Adds saves by two processes to orbax.tar.xz: jax.distributed on CPUs, arrays on devices of both, by orbax-checkpoint's own code.

    python tests/golden/make_orbax_processes.py FOLDER

Needs orbax-checkpoint 0.12.8 with jax. FOLDER/orbax has what make_orbax.py made, and gets two cases more; it is packed as make_orbax.py says."""

import json
import os
import subprocess
import sys

PROCESSES = 2
CASES = {"processes_ocdbt_zarr3": {"use_ocdbt": True, "use_zarr3": True}, "processes_files_zarr2": {"use_ocdbt": False}}


def write_safetensors(path, arrays):
    names = {"float32": "F32", "bfloat16": "BF16", "int32": "I32"}
    header, at = {}, 0
    for name, a in arrays.items():
        header[name] = {"dtype": names[str(a.dtype)], "shape": list(a.shape), "data_offsets": [at, at + a.nbytes]}
        at += a.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text + b"".join(a.tobytes() for a in arrays.values()))


def save(top, process):
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    import jax
    import ml_dtypes
    import numpy as np
    import orbax.checkpoint as ocp

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize("127.0.0.1:29711", num_processes=PROCESSES, process_id=process)
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(PROCESSES, 2), ("x", "y"))
    spec = jax.sharding.PartitionSpec
    rng = np.random.default_rng(5)
    arrays = {"both": rng.normal(size=(8, 6)).astype(np.float32), "columns": rng.normal(size=(4, 8)).astype(ml_dtypes.bfloat16),
              "rows": np.arange(24, dtype=np.int32).reshape(12, 2), "copies": rng.normal(size=7).astype(np.float32), "scalar": np.array(2.5, np.float32)}
    on = {"both": spec("x", "y"), "columns": spec(None, ("x", "y")), "rows": spec(("y", "x")), "copies": spec(), "scalar": spec()}
    tree = {k: jax.make_array_from_callback(a.shape, jax.sharding.NamedSharding(mesh, on[k]), lambda i, a=a: a[i]) for k, a in arrays.items()}
    for name, how in CASES.items():
        folder = os.path.join(top, "orbax", name)
        c = ocp.Checkpointer(ocp.CompositeCheckpointHandler(items=ocp.PyTreeCheckpointHandler(**how)))
        c.save(os.path.join(folder, "run", "0"), args=ocp.args.Composite(items=ocp.args.PyTreeSave({"params": tree})))
        if process:
            continue
        os.makedirs(os.path.join(folder, "expected"))
        write_safetensors(os.path.join(folder, "expected", "model.safetensors"), {"params." + k: a for k, a in arrays.items()})
        with open(os.path.join(folder, "case.json"), "w") as f:
            json.dump({"open": "run", "view": "raw", "base": None, "options": {}, "compare": "tensors"}, f, indent=1)


def plain(folder):
    """Files that all may read, without paths of the machine in them."""
    for top, _, files in os.walk(folder):
        for file in files:
            path = os.path.join(top, file)
            os.chmod(path, 0o644)
            if file == "commit_success.txt":
                with open(path, "w") as out:
                    out.write("Checkpoint commit was successful")


def main():
    top = os.path.abspath(sys.argv[1])
    if len(sys.argv) > 2:
        save(top, int(sys.argv[2]))
        return
    ranks = [subprocess.Popen([sys.executable, __file__, top, str(i)]) for i in range(PROCESSES)]
    if any([p.wait() for p in ranks]):
        sys.exit("a process failed")
    for name in CASES:
        plain(os.path.join(top, "orbax", name))


main()
