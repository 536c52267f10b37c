# SPDX-License-Identifier: Apache-2.0
"""FSDP1's flat parameters (LOCAL_STATE_DICT), which torch writes on CPU: in files of ranks (accelerate's) and in DCP, with and without
use_orig_params, they are refused by name."""

import os
import sys
import unittest
import warnings

try:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import StateDictType

    from tensor_case import TensorCase, export, ranks
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)


def write(world, rank, top, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", rank=rank, world_size=world)
    for orig in (False, True):
        at = os.path.join(top, f"orig{orig:d}")
        os.makedirs(at + ".ranks", exist_ok=True)
        inner = FSDP(torch.nn.Linear(5, 3), use_orig_params=orig, device_id=torch.device("cpu"))
        model = FSDP(torch.nn.Sequential(inner, torch.nn.Linear(3, 7)), use_orig_params=orig, device_id=torch.device("cpu"))
        with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            state = model.state_dict()
        torch.save(state, f"{at}.ranks/pytorch_model_fsdp_rank{rank}.bin")
        dcp.save({"model": state}, checkpoint_id=at + ".dcp")
    dist.destroy_process_group()


class Flat(TensorCase):
    def test_flat_parameters_are_refused_by_name(self):
        ranks.run(2, "test_flat", "write", self.path("."), ranks.free_port(), folder=self.path("."))
        for form in ("orig0.ranks", "orig1.ranks", "orig0.dcp", "orig1.dcp"):
            for view in ((), ("view=raw",)):
                with self.subTest(form=form, view=view):
                    done = export(self.path(form), self.path("out"), *view)
                    self.assertEqual(done.returncode, 1)
                    self.assertIn("_flat_param' is a flat parameter of FSDP1 (LOCAL_STATE_DICT)", done.stderr)
                    self.assertIn("save with SHARDED_STATE_DICT or FULL_STATE_DICT", done.stderr)


if __name__ == "__main__":
    unittest.main()
