#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The main job, from nothing: install, build, mount a small real nanotron run (TP 2 x PP 2), list it, copy the model out, verify the copy;
# then the same of a Megatron and of a torchtitan (DCP) run, and what a rank of a job would load.
set -euo pipefail
cd "$(dirname "$0")/.."
say() { printf '\n\033[1m$ %s\033[0m\n' "$*"; }

say contrib/install-deps.sh
contrib/install-deps.sh
say 'cmake --preset release && cmake --build --preset release'
cmake --preset release -DCKPTFS_TESTS=OFF >/dev/null
cmake --build --preset release

bin=build/release/fs
run=tests/golden/nanotron/llama_tp2_pp2_tied
tmp=$(mktemp -d)
trap 'mountpoint -q "$tmp/mnt" && fusermount3 -u "$tmp/mnt"; rm -rf "$tmp"' EXIT

say "find $run -name '*.safetensors' | head -4"
find "$run" -name '*.safetensors' | sort | awk 'NR <= 4 { print } END { print "... " NR " shard files" }'

mkdir "$tmp/mnt"
say "ckptfs $run MNT"
if [[ ! -e /dev/fuse ]]; then
  echo 'no /dev/fuse on this machine: exporting without a mount'
  $bin/ckpt export "$run" "$tmp/model"
else
  $bin/ckptfs "$run" "$tmp/mnt"
  say 'ls -l MNT MNT/latest/'
  ls -l "$tmp/mnt" "$tmp/mnt/latest/"
  say 'cp -r $(readlink -f MNT/latest) model'
  cp -r "$(readlink -f "$tmp/mnt/latest")" "$tmp/model"
fi
say "ckpt verify $run model"
$bin/ckpt verify "$run" "$tmp/model"
say "ckpt export $run model2"
$bin/ckpt export "$run" "$tmp/model2"
say 'cmp model/model.safetensors EXPECTED'
cmp "$tmp/model/model.safetensors" "$run.expected/model.safetensors"
diff -r "$tmp/model" "$tmp/model2"
echo 'identical: the mount, the export, and the oracle'

megatron=tests/golden/megatron/m19_llama_tp2pp2
say "ckpt export $megatron/run model3 -o base=$megatron/base"
$bin/ckpt export "$megatron/run" "$tmp/model3" -o "base=$megatron/base"
diff -r "$tmp/model3" "$megatron/expected"
echo 'identical: Megatron torch_dist, TP 2 x PP 2, and the oracle'

titan=tests/golden/torchtitan/deepseek_v3_dp2
say "ckpt export $titan/run model4 -o base=$titan/base"
$bin/ckpt export "$titan/run" "$tmp/model4" -o "base=$titan/base"
cmp "$tmp/model4/model.safetensors" "$titan/expected/model.safetensors"
echo 'identical: torchtitan DCP and the oracle'

say "ckpt load $megatron/run --layout tp=1 --verify"
$bin/ckpt load "$megatron/run" --layout tp=1 --verify
