# SPDX-License-Identifier: Apache-2.0
"""Makes states.json, by hand: digests of the moments and masters in tests/load/runs/megatron as torch.distributed.checkpoint loads them,
under the names that Megatron's optimizer has for its parameters. Needs torch and safetensors, and nothing of ckptfs but its digests' form.

    python make_states.py > states.json"""

import json
import os

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save
from test_states import RUNS, digest

STATES = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "fp32_param": "master"}


def tensor_of(t):
    """The tensor as case.read_file has it: (dtype, shape, bytes)."""
    data = save({"t": t.contiguous()})
    n = int.from_bytes(data[:8], "little")
    held = json.loads(data[8:8 + n])["t"]
    return held["dtype"], held["shape"], data[8 + n:]


def main():
    step = os.path.join(RUNS, "megatron", "iter_0000010")
    metadata = dcp.FileSystemReader(step).read_metadata().state_dict_metadata
    whole = {k: torch.empty(m.size, dtype=m.properties.dtype) for k, m in metadata.items() if k.startswith("optimizer.state.") and hasattr(m, "chunks")}
    dcp.load(whole, checkpoint_id=step, no_dist=True)
    states = {}
    for key, t in whole.items():
        kind, name = key.removeprefix("optimizer.state.").split(".", 1)
        states.setdefault(STATES[kind], {})[name] = digest(tensor_of(t))
    print(json.dumps({"megatron": states}, indent=1, sort_keys=True))


if __name__ == "__main__":
    main()
