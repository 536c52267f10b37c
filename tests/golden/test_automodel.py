# SPDX-License-Identifier: Apache-2.0
"""HF-sharded checkpoints: NeMo Automodel's and those of DCP's HuggingFaceStorageWriter; adapters.

usage: test_automodel.py [CASE]
"""

import glob
import os
import shutil
import sys
import tempfile

import case
from test_golden import SOURCE

# what other readers, or options that are still to come, must do
LATER = {
    "torchtitan/qwen3_dp2_hf": "torchtitan recipes",
}
PATTERNS = ["automodel/*/case*.json", "dcp/*hf_*/case*.json", "torchtitan/qwen3_dp2_hf/case*.json", "peft/*/case*.json"]


def roots():
    yield os.path.join(SOURCE, "tests", "golden")
    fixtures = os.environ.get("CKPTFS_FIXTURES") or os.path.join(SOURCE, "..", "shared", "fixtures")
    if os.path.isdir(fixtures):
        yield fixtures
    elif os.environ.get("CKPTFS_FIXTURES"):
        sys.exit(f"CKPTFS_FIXTURES={fixtures} is no directory")


def check_lost_shards(loaded):
    """Without any one of its shards an Automodel checkpoint is refused."""
    source = os.path.join(loaded["folder"], loaded["open"])
    problems = []
    for shard in sorted(os.path.basename(p) for p in glob.glob(os.path.join(source, "model", "shard-*"))):
        with tempfile.TemporaryDirectory() as tmp:
            copy = os.path.join(tmp, "epoch_0_step_10")
            shutil.copytree(source, copy, copy_function=os.symlink)
            os.chmod(os.path.join(copy, "model"), 0o755)
            os.remove(os.path.join(copy, "model", shard))
            done = case.run(dict(loaded, open=copy, options=dict(loaded["options"] or {}, follow_symlinks=True)), "info")
            if done.returncode != 1:
                problems.append(f"is not refused without {shard}")
    return problems


def check_merged(loaded):
    """An adapter merged into its base: W + s B A, rounded once."""
    if not os.path.isdir(os.path.join(loaded["folder"], "expected_merged")):
        return []
    options = dict(loaded.get("options") or {}, lora="merge")
    merged = dict(loaded, options=options, expected="expected_merged", compare="tensors", bytes=[], weight_map=False)
    return [f"lora=merge: {p}" for p in case.check(merged)]


def main():
    only = sys.argv[1] if len(sys.argv) > 1 else ""
    counts = {"ok": 0, "FAIL": 0, "later": 0}
    for root in roots():
        for path in sorted(p for pattern in PATTERNS for p in glob.glob(os.path.join(root, pattern))):
            name = os.path.relpath(os.path.dirname(path), root)
            if only not in name:
                continue
            loaded = case.load(path)
            problems = case.check(loaded)
            if not problems and name.startswith("automodel/") and loaded["compare"] != "refuse" and "steps" not in loaded:
                problems = check_lost_shards(loaded)
            problems = problems or check_merged(loaded)
            state = "ok" if not problems else "later" if name in LATER else "FAIL"
            counts[state] += 1
            print(f"{state:5} {name} {os.path.basename(path)[4:-5]}" + (f" ({LATER[name]})" if state == "later" else ""))
            for p in problems[:10] if state == "FAIL" or only else []:
                print(f"      {p}")
    print(", ".join(f"{n} {state}" for state, n in counts.items()))
    return 1 if counts["FAIL"] or not counts["ok"] else 0


if __name__ == "__main__":
    sys.exit(main())
