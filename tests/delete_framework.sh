#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A framework is a folder: what is left without it builds. In a copy of the tree core/format/NAME and core/recipe/data/NAME are
# deleted, and its lines in readers.def and writers.def; then libraries and programs are built.
#
#   tests/delete_framework.sh [NAME ...]      nanotron, megatron, deepspeed, delta, automodel, vllm, torchtitan, olmo_core, litgpt and orbax by default, each in turn
set -uo pipefail
cd "$(dirname "$0")/.."
names=("$@")
((${#names[@]})) || names=(nanotron megatron deepspeed delta automodel vllm torchtitan olmo_core litgpt orbax)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tree=$work/tree
mkdir -p "$tree" "$work/kept"
git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -pt "$tree"
cmake -S "$tree" -B "$work/build" -DCMAKE_BUILD_TYPE=Debug -DCKPTFS_TESTS=OFF >/dev/null || exit 1
cmake --build "$work/build" -j "$(nproc)" >"$work/log" 2>&1 || { tail -20 "$work/log"; exit 1; }

# entries NAME: what the folder defines for the tables, as a pattern
entries() { grep -rhoP '^const struct ckpt_\w+ ckpt_(reader|writer|trainer|changes)_\K\w+(?= = \{)' "$tree/core/format/$1" | paste -sd'|'; }

failed=()
for name in "${names[@]}"; do
  format=$tree/core/format data=$tree/core/recipe/data kept=$work/kept/$name begin=$SECONDS
  [[ -d $format/$name ]] || { echo "$name: there is no core/format/$name"; failed+=("$name"); continue; }
  mkdir -p "$kept"
  cp -p "$format"/*.def "$kept/"
  own=$(entries "$name")
  sed -i -E "/^CKPT_[A-Z_]+\\((${own:-$name})[,)]/d" "$format/readers.def" "$format/writers.def"
  mv "$format/$name" "$kept/format"
  [[ ! -d $data/$name ]] || mv "$data/$name" "$kept/data"
  if cmake --build "$work/build" -j "$(nproc)" >"$work/log" 2>&1; then
    echo "$name: builds without it ($((SECONDS - begin)) s)"
  else
    echo "$name: does not build without it"
    grep -E 'error|undefined' "$work/log" | sed "s|$work/||g" | head -5
    failed+=("$name")
  fi
  mv "$kept/format" "$format/$name"
  [[ ! -d $kept/data ]] || mv "$kept/data" "$data/$name"
  cp "$kept"/*.def "$format/" # newer than the objects that were made without the lines
done
((${#failed[@]} == 0)) || { echo "not deletable: ${failed[*]}"; exit 1; }
