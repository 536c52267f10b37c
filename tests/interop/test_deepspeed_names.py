# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed checkpoints of Megatron-DeepSpeed, whose module is a dict of dicts, as its state_dict_for_save_checkpoint makes it, or flat:
view=raw has all tensors. Without the run's arguments they are refused as a Hugging Face model, by name (with them:
test_deepspeed_megatron.py)."""

import os
import shutil
import sys
import unittest

try:
    import torch

    from tensor_case import TensorCase, export, read_all
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

NONE = ("optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments lr_scheduler data_sampler random_ltd").split()


def layer():
    return {"input_layernorm.weight": torch.randn(8), "self_attention.query_key_value.weight": torch.randn(24, 8), "self_attention.dense.weight": torch.randn(8, 8),
            "mlp.dense_h_to_4h.weight": torch.randn(32, 8), "mlp.dense_4h_to_h.weight": torch.randn(8, 32)}


def gpt():
    encoder = {f"layers.{i}.{name}": t for i in range(2) for name, t in layer().items()}
    return {"language_model": {"embedding": {"word_embeddings": {"weight": torch.randn(16, 8)}, "position_embeddings": {"weight": torch.randn(12, 8)}},
                               "encoder": encoder | {"final_layernorm.weight": torch.randn(8)}}}


def flat(d, prefix=""):
    out = {}
    for key, value in d.items():
        out |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return out


class Names(TensorCase):
    def save(self, name, module):
        at = self.path(name)
        os.makedirs(os.path.join(at, "global_step5"))
        with open(os.path.join(at, "latest"), "w") as f:
            f.write("global_step5")
        torch.save({"module": module, "buffer_names": [], "global_steps": 5, "dp_world_size": 1, "mp_world_size": 1, "ds_config": {}, "ds_version": "0.16.7"} | dict.fromkeys(NONE),
                   os.path.join(at, "global_step5", "mp_rank_00_model_states.pt"))
        return at

    def test_megatron(self):
        want = gpt()
        for name, module in (("nested", want), ("flat", flat(want))):
            run = self.save(name, module)
            done = export(run, run + ".raw", "view=raw")
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.same(read_all(run + ".raw"), flat(want), name)
            done = export(run, run + ".out")
            self.assertEqual(done.returncode, 1)
            self.assertIn("its tensors have Megatron-DeepSpeed's names", done.stderr)

    def test_a_pipeline_without_its_last_layer(self):
        """Without ZeRO nothing lists the parameters; the optimizers' count of them tells."""
        golden = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "golden", "deepspeed", "pipe_pp2_w2", "run")
        for name, missing in (("whole", None), ("short", "layer_08-model_states.pt")):
            run = self.path(name)
            shutil.copytree(golden, run)
            if missing:
                os.remove(os.path.join(run, "global_step2", missing))
            done = export(run, run + ".raw", "view=raw")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual("have 12 parameters, but the layers' files 11 tensors: layers at the end are missing" in done.stderr, bool(missing), done.stderr)

    def test_a_dict_in_itself(self):
        module = gpt()
        module["language_model"]["encoder"]["again"] = module
        done = export(self.save("cycle", module), self.path("out"), "view=raw")
        self.assertEqual(done.returncode, 1)
        self.assertIn("too many or too deep dicts", done.stderr)


if __name__ == "__main__":
    unittest.main()
