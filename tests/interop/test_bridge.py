# SPDX-License-Identifier: Apache-2.0
"""What view=megatron writes, loaded on two ranks by Megatron-Bridge's own modules and megatron-core (CKPTFS_BRIDGE: a folder with
requirements-bridge.txt): every parameter of both ranks is what Bridge's own import of the same Hugging Face model gives it.

CKPTFS_CASES families are chosen by CKPTFS_SEED, with one layout each; CKPTFS_FAMILIES=all takes all of them with every layout."""

import glob
import json
import os
import random
import shutil
import sys
import unittest

try:
    from tensor_case import CASES, SEED, TensorCase, export, ranks
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

BRIDGE = os.environ.get("CKPTFS_BRIDGE", "")
if not os.path.isdir(os.path.join(BRIDGE, "megatron", "bridge")):
    print("skipped: CKPTFS_BRIDGE names no folder with megatron-bridge")
    sys.exit(77)
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "golden"))
from case import unpack  # noqa: E402
TP, PP, EP, BOTH = {"tp": 2}, {"pp": 2}, {"ep": 2, "etp": 1}, {"tp": 2, "ep": 2, "etp": 1}
# That Bridge's own modules can be built at; GLM-4.5V's ask for a config of transformers 5.12
LAYOUTS = {
    "bailing__ep2": [EP, BOTH], "decilm__tp2": [TP], "dsv3_mtp__pp2layout": [BOTH, EP], "ernie4_5_moe__ep2": [EP, BOTH], "ernie4_5_vl__ep2": [EP, BOTH], "exaone_moe__ep2": [EP, BOTH],
    "falcon_h1__pp2": [PP], "gemma3_vl__tp2": [TP, PP], "glm4_moe_lite__ep2": [EP, BOTH], "glm_moe_dsa__ep2": [EP], "hy_v3__ep2": [EP, BOTH],
    "kimi_k2__ep2": [EP, BOTH], "mimo__tp2": [TP, PP], "minimax_m2__ep2": [EP, PP], "minimax_m3__ep2": [EP, BOTH], "olmoe__ep2": [EP, BOTH, PP], "qwen2_5_vl__tp2": [TP, PP],
    "qwen3_5__tp2": [TP, PP], "qwen3_5_moe__ep2": [EP, BOTH, PP], "qwen3_5_moe_vl__ep2": [EP, BOTH, PP], "qwen3_next__tp2": [EP, PP, TP | {"etp": 2}], "qwen3_next_mtp__ep2": [EP, BOTH, PP],
    "qwen3_omni_moe__ep2": [EP, BOTH, PP], "qwen3_vl__tp2": [TP], "qwen3_vl_moe__ep2": [EP, BOTH],
}
OPTION = {"tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "ep": "expert_model_parallel_size", "etp": "expert_tensor_parallel_size"}


class Bridge(TensorCase):
    def setUp(self):
        super().setUp()
        unpack("bridge.tar.xz", self.path("cases"))

    def check(self, case, layout):
        model, written = self.path(f"{case}-model"), self.path(f"{case}-megatron")
        for folder in (model, written):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.path(f"cases/{case}/base"), model)
        for path in glob.glob(self.path(f"cases/{case}/expected/*")):
            shutil.copy(path, model)
        os.chmod(os.path.join(model, "config.json"), 0o644)
        with open(os.path.join(model, "config.json"), "r+") as f:
            config = json.load(f)
            if config["model_type"] == "glm_moe_dsa":
                config.pop("num_experts")  # which transformers 5.12 wrote with the default
            f.seek(0)
            f.truncate()
            json.dump(config, f)
        done = export(model, written, "view=megatron", *[f"{k}={v}" for k, v in layout.items()])
        self.assertEqual(done.returncode, 0, done.stderr)
        stated = {OPTION[k]: v for k, v in layout.items()}
        ranks.run(2, "bridge_ranks", "load", model, glob.glob(os.path.join(written, "*", ""))[0], stated, self.path(f"store{len(os.listdir(self.tmp))}"), folder=self.tmp,
                  PYTHONPATH=BRIDGE, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", CUDA_DEVICE_MAX_CONNECTIONS="1")

    def test_loads(self):
        everything = [(case, layout) for case, layouts in LAYOUTS.items() for layout in layouts]
        rnd = random.Random(SEED)
        chosen = everything if os.environ.get("CKPTFS_FAMILIES") == "all" else [(c, rnd.choice(LAYOUTS[c])) for c in rnd.sample(sorted(LAYOUTS), CASES)]
        for case, layout in chosen:
            with self.subTest(case, layout=layout):
                self.check(case, layout)


if __name__ == "__main__":
    unittest.main()
