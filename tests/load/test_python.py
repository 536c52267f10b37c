# SPDX-License-Identifier: Apache-2.0
"""The package ckptfs: safe_open's shape, and load_state_dict on 1, 2 and 4 ranks under torchrun with gloo. Skipped without torch and transformers."""

import os
import sys

from ranks import PYTHON, torchrun

BUILD = os.environ.get("CKPTFS_BUILD", "build/release")
HERE = os.path.dirname(os.path.abspath(__file__))
GOLDEN = os.path.join(HERE, "..", "golden", "nanotron")
PACKAGE = os.path.join(HERE, "..", "..", "contrib", "python")

try:
    import torch
    import transformers
    from safetensors.torch import load_file
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)
if int(transformers.__version__.split(".")[0]) < 5:
    print("skipped: transformers 5 is needed")
    sys.exit(77)

os.environ["CKPTFS_LIBRARY_PATH"] = BUILD
sys.path.insert(0, PACKAGE)
import ckptfs  # noqa: E402


def check_slices(run, expected):
    want = load_file(os.path.join(expected, "model.safetensors"))
    with ckptfs.open(run) as f:
        assert set(f.keys()) == set(want) and "model.norm.weight" in f and len(f) == len(want)
        assert f.metadata() == {"format": "pt"}
        for k, t in want.items():
            s = f.get_slice(k)
            assert torch.equal(f.get_tensor(k), t), k
            assert s.get_shape() == list(t.shape) and isinstance(s.get_dtype(), str)
            for index in (slice(1, 3), slice(None), slice(None, None, 2), slice(5, 5), 0, -1, (..., slice(2, 4)), (..., -1), [3, 1], slice(-3, None)):
                if not isinstance(index, list) or t.shape[0] > 3:
                    assert torch.equal(s[index], t[index]), (k, index)
        for bad in (t.shape[0], (0,) * (t.dim() + 1)):
            try:
                s[bad]
            except IndexError:
                continue
            raise AssertionError(f"{bad} is no index of {list(t.shape)}")
    try:
        ckptfs.open(os.path.join(run, "nothing"))
    except ckptfs.CkptError as e:
        assert e.code == "missing", e.code
    else:
        raise AssertionError("opened what is not there")


def check_ranks(n, run, expected, python):
    done = torchrun(n, os.path.join(HERE, "python_worker.py"), run, expected, python=python, timeout=300, capture_output=True, text=True,
                    env=dict(PYTHONPATH=PACKAGE, OMP_NUM_THREADS="1", TORCHELASTIC_ERROR_FILE=""))
    if done.returncode or f"{n} ranks ok" not in done.stdout:
        print(done.stdout[-2000:], done.stderr[-6000:])
        return False
    return True


def main():
    failed = 0
    for name in ("llama_tp1_pp1_untied_interleaved", "llama_tp2_pp2_tied", "qwen2_moe_epbranch_tp1_dp2_ep2"):
        run, expected = os.path.join(GOLDEN, name), os.path.join(GOLDEN, name + ".expected")
        check_slices(run, expected)
        for n in (1, 2, 4) if "moe" not in name else (2,):
            # once as interpreters of their own, each of which has another seed of hash(), and so another order of sets
            good = check_ranks(n, run, expected, [sys.executable] if (n, name) == (2, "llama_tp2_pp2_tied") else PYTHON)
            print(f"{'ok  ' if good else 'FAIL'} {name}, {n} ranks")
            failed += not good
    print(f"{'0' if failed else '1'} passed, {failed} failed")
    sys.exit(1 if failed else 0)


main()
