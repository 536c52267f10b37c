#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A recorded session: what a newcomer types, and what comes out. usage: tests/docs/record.sh [BUILD] >contrib/docs/session.txt
set -euo pipefail
cd "$(dirname "$0")/../.."
source=$PWD build=$(realpath "${1:-build/release}")
top=$(mktemp -d)
trap 'fusermount3 -u "$top/mnt" 2>/dev/null || true; rm -rf "$top"' EXIT
mkdir "$top/mnt" "$top/run"
cp -r tests/golden/nanotron/llama_tp2_pp2_tied/10 "$top/run/10"
cp -r tests/golden/nanotron/llama_tp2_pp2_tied/10 "$top/run/20"
sed -i 's/"last_train_step": 10/"last_train_step": 20/' "$top/run/20/checkpoint_metadata.json"
cd "$top"
PATH=$build/fs:$PATH

# Paths and times of this machine are no part of the session.
clean() { sed -e "s|$top/||g" -e "s|$source/||g" -e 's/ in [0-9.]* s ([^)]*)//' -e 's/, [0-9.]* s (plan [0-9.]* s)//' -e 's/^saved .*/saved     2026-11-24T14:56:57+0000/' -e 's/ *$//'; }

type_it() {
  printf '$ %s\n' "$*"
  bash -c "$*" 2>&1 | clean
  echo
}

type_it "find run -name '*.safetensors' | sort | head -3"
type_it 'ckpt info run'
type_it 'ckptfs run mnt'
type_it 'ls mnt mnt/latest/'
type_it 'cp -r $(readlink -f mnt/latest) my-model && ls my-model'
type_it 'ckpt verify run my-model'
type_it 'ckpt explain run model.layers.0.mlp.down_proj.weight'
type_it 'ckpt export run copy'
type_it 'ckpt load run --layout tp=1 --verify'
type_it 'truncate -s 200 "$(find run/20 -name "*tp-rank-1*" | sort | head -1)"'
type_it 'ckpt info run || ckpt info run --step 10'
type_it 'fusermount3 -u mnt'
