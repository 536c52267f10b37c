# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of Megatron-DeepSpeed, and what DeepSpeed itself and transformers 4 make of them (megatron_deepspeed_oracle.py).
CKPTFS_DEEPSPEED: folders named deepspeed-VERSION, separated by ':'; CKPTFS_TRANSFORMERS4: a folder with transformers 4."""

import os
import shutil
import subprocess
import sys
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
TRANSFORMERS4 = os.environ.get("CKPTFS_TRANSFORMERS4", "")
DEEPSPEED = [p for p in os.environ.get("CKPTFS_DEEPSPEED", "").split(":") if os.path.isdir(p)]
NESTED = [p for p in DEEPSPEED if "-0.16" in p]  # ds_to_universal of 0.19 fails on dicts in a module
if not NESTED or not os.path.isdir(TRANSFORMERS4):
    print("skipped: CKPTFS_DEEPSPEED has no deepspeed-0.16, or CKPTFS_TRANSFORMERS4 no transformers")
    sys.exit(77)
try:
    import torch
    from safetensors.torch import load_file

    import megatron_deepspeed_writer as mds
    from megatron_deepspeed_case import ModelCase, gpt2, llama, trained
    from tensor_case import export, read_all
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)


class Joined(ModelCase):
    def ask(self, deepspeed, *args):
        done = subprocess.run([sys.executable, os.path.join(HERE, "megatron_deepspeed_oracle.py"), *args], capture_output=True, text=True,
                              env=os.environ | {"PYTHONPATH": f"{TRANSFORMERS4}:{deepspeed}"})
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_universal(self):
        """DeepSpeed's own conversion, which joins the tensor-parallel ranks by the rules of Megatron-DeepSpeed."""
        for deepspeed in NESTED:
            for tp in (1, 2):
                cfg, sd = llama(tp == 2)
                full = trained(sd)
                run = self.path(f"u{tp}{os.path.basename(deepspeed)}")
                tag = mds.save_modules(mds.Model(sd, cfg, 4), run, tp, mds.Model(full, cfg, 4))
                self.ask(deepspeed, "universal", tag, tag + "_universal")
                self.served(tag + "_universal", sd, cfg)
                shutil.rmtree(tag + "_universal.out")
                self.served(tag + "_universal", full, cfg, "dtype=float32")
                model = os.path.join(tag + "_universal", "mp_rank_00_model_states.pt")
                root = torch.load(model, weights_only=False)
                root["universal_checkpoint_info"]["parameter_with_2_sub_params_cat_dim_0"] = []
                torch.save(root, model)
                if tp > 1:
                    self.refused(tag + "_universal", "gate and up of 2 tensor-parallel ranks alternate")

    def test_what_others_make_of_it(self):
        """DeepSpeed joins the ranks, transformers converts (megatron_deepspeed_oracle.py)."""
        for old in DEEPSPEED:
            for tp, pp in ((1, 1), (2, 1), (2, 2)):
                cfg, sd = gpt2()
                run = self.path(f"o{tp}{pp}{os.path.basename(old)}")
                tag = mds.save_layers(mds.Model(sd, cfg, 4), run, tp, pp)
                self.ask(old, tag, run + ".safetensors")
                self.assertEqual(export(run, run + ".out").returncode, 0)
                want = {k: t[:60] if k == "transformer.wte.weight" else t for k, t in load_file(run + ".safetensors").items() if k != "lm_head.weight"}
                self.same({k: t.float() for k, t in read_all(run + ".out").items()}, want, run)


if __name__ == "__main__":
    unittest.main()
