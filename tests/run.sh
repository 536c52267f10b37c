#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Install what the tests need, build, and run them.
#
#   tests/run.sh              build/release, all tests that this machine can run
#   tests/run.sh --strict     as CI does: a skipped test is a failure; also the sanitizers, the fuzz targets and the lints
#   tests/run.sh --no-install with what is there
set -euo pipefail
cd "$(dirname "$0")/.."

strict=0 install=1
for arg in "$@"; do
  case $arg in
  --strict) strict=1 ;;
  --no-install) install=0 ;;
  *) sed -n '3,8p' "$0"; exit 2 ;;
  esac
done

venv=${CKPTFS_VENV:-build/venv}
jobs=$(nproc)

if ((install)); then
  contrib/install-deps.sh tests
  if ! cmp -s tests/requirements.txt "$venv/requirements.txt"; then # made for these very versions, and to the end?
    python3 -m venv "$venv"
    # torch first: with none installed, other packages would ask for a build with CUDA
    "$venv/bin/pip" install --quiet "$(grep '^torch==' tests/requirements.txt)"
    "$venv/bin/pip" install --quiet -r tests/requirements.txt
    cp tests/requirements.txt "$venv/requirements.txt"
  fi
  while read -r megatron needs; do # of each a folder of its own; 0.17 and later ask for Python 3.12, but run on 3.11
    if [[ ! -d $venv/${megatron/==/-}/megatron ]]; then
      # shellcheck disable=SC2086 # none or several
      "$venv/bin/pip" install --quiet --no-deps --ignore-requires-python --target "$venv/${megatron/==/-}" "$megatron" $needs
    fi
  done <tests/requirements-megatron.txt
  grep -v '^deepspeed==' tests/requirements-deepspeed.txt >"$venv/deepspeed-needs.txt"
  grep '^deepspeed==' tests/requirements-deepspeed.txt | while read -r deepspeed; do # likewise, without what it would compile
    if [[ ! -d $venv/${deepspeed/==/-}/deepspeed ]]; then
      DS_BUILD_OPS=0 "$venv/bin/pip" install --quiet --no-deps --no-build-isolation --target "$venv/${deepspeed/==/-}" "$deepspeed" -r "$venv/deepspeed-needs.txt"
    fi
  done
  if [[ ! -d $venv/bridge/megatron/bridge ]]; then # they ask for Python 3.12, and run with 3.11
    "$venv/bin/pip" install --quiet --no-deps --ignore-requires-python --target "$venv/bridge" -r tests/requirements-bridge.txt
  fi
  if [[ ! -d $venv/transformers4/transformers ]]; then
    "$venv/bin/pip" install --quiet --no-deps --target "$venv/transformers4" -r tests/requirements-4.txt
  fi
  if [[ ! -d $venv/cuda/nvidia/nccl ]]; then # a compiler for device code, and NCCL
    "$venv/bin/pip" install --quiet --no-deps --target "$venv/cuda" -r tests/requirements-cuda.txt
  fi
  if ! cmp -s tests/requirements-bucket.txt "$venv/moto/requirements.txt"; then # a store that speaks S3's protocol
    rm -rf "$venv/moto"
    "$venv/bin/pip" install --quiet --no-deps --target "$venv/moto" -r tests/requirements-bucket.txt
    cp tests/requirements-bucket.txt "$venv/moto/requirements.txt"
  fi
  if ! cmp -s tests/requirements-more.txt "$venv/more/requirements.txt"; then # loaders beside ours; the oldest accelerate and PEFT
    rm -rf "$venv/more"
    "$venv/bin/pip" install --quiet --no-deps --target "$venv/more" -r tests/requirements-more.txt
    cp tests/requirements-more.txt "$venv/more/requirements.txt"
  fi
  if ! cmp -s tests/requirements-vllm.txt "$venv/vllm/requirements.txt"; then # over the torch of the venv
    rm -rf "$venv/vllm"
    if "$venv/bin/pip" install --quiet --no-deps --target "$venv/vllm" -r tests/requirements-vllm.txt; then
      cp tests/requirements-vllm.txt "$venv/vllm/requirements.txt"
    else
      rm -rf "$venv/vllm" # what is there in part would fail in a strange way
      echo 'vLLM could not be installed: the test engines/vllm is skipped, which is a failure with --strict' >&2
    fi
  fi
fi
python=$(command -v python3)
[[ -x $venv/bin/python ]] && python=$(realpath -s "$venv/bin/python")

# tell_failures PRESET: the last lines of each test that failed (without the stacks of leaks)
tell_failures() {
  awk '/^[0-9]+\/[0-9]+ Testing: / { name = $3; n = 0 }
       !/^ *#[0-9]+ 0x|leak of .* byte|^$/ { line[n++] = $0 }
       /^Test (Failed|Timeout)/ { print "failed: " name; for (i = n > 40 ? n - 40 : 0; i < n; i++) print "    " line[i] }' \
    "build/$1/Testing/Temporary/LastTest.log"
}

# again PRESET: run what failed once more, alone. True if it all passes now; it is told all the same, and its first output stays in the log. Only
# for a few tests of several processes, which meet the timing of the kernel, of torch and of MPI on a busy machine; never after a sanitizer's report.
again() {
  local logs=build/$1/Testing/Temporary failed
  failed=$(cut -d: -f2 "$logs/LastTestsFailed.log")
  (($(wc -l <<<"$failed") <= 2)) && ! grep -qvE '^(load|mount|gpu|interop)/' <<<"$failed" || return 1
  ! grep -qE 'ERROR: AddressSanitizer|ERROR: LeakSanitizer|WARNING: ThreadSanitizer|runtime error:' "$logs/LastTest.log" || return 1
  ctest --test-dir "build/$1" --rerun-failed --output-on-failure -j 1 >"build/$1/again.log" 2>&1 || return 1
  { echo "unstable, tests of '$1' that failed once and passed when they ran alone:"; echo "$failed"; } >>"$failures"
}

# the venv's folders of a library of which several versions are tested, separated by ':'
folders() { find "$(realpath -m "$venv")" -maxdepth 1 -type d -name "$1" 2>/dev/null | sort | paste -sd:; }

failed=0
failures=build/failures.txt # what failed anywhere, told once more at the very end: the logs of three builds are long
mkdir -p build
: >"$failures"
skips='\*\*\*Skipped|\[  SKIPPED \]|\(.*skipped=[0-9]|\.\.\. skipped ' # as ctest, cmocka and unittest say it

# run PRESET CTEST-ARGS...: build the preset and run its tests; in strict mode nothing may be skipped
run() {
  local preset=$1 log
  shift
  cmake --preset "$preset" -DCKPTFS_TESTS=ON -DCKPTFS_PYTHON="$python" -DCUDAToolkit_ROOT="$(realpath -m "$venv/cuda")" \
    -DNCCL_ROOT="$(realpath -m "$venv/cuda")" -DCKPTFS_TRANSFORMERS4="$(realpath -m "$venv/transformers4")" \
    -DCKPTFS_MEGATRON="$(folders 'megatron-core-*')" -DCKPTFS_DEEPSPEED="$(folders 'deepspeed-*')" \
    -DCKPTFS_VLLM="$(realpath -m "$venv/vllm")" -DCKPTFS_BRIDGE="$(realpath -m "$venv/bridge")" \
    -DCKPTFS_MOTO="$(realpath -m "$venv/moto")" -DCKPTFS_MORE="$(realpath -m "$venv/more")" >/dev/null
  cmake --build --preset "$preset" -j "$jobs"
  log=build/$preset/ctest.log
  ctest --test-dir "build/$preset" --no-tests=error --output-on-failure -j "$jobs" "$@" 2>&1 | tee "$log" || {
    { echo "tests of '$preset' failed:"; tell_failures "$preset"; } >>"$failures"
    again "$preset" || failed=1
  }
  # ctest knows of whole programs only; unittest counts the cases that it skipped in the program's own output
  if ((strict)) && grep -E "$skips" "$log" "build/$preset/Testing/Temporary/LastTest.log"; then
    failed=1
    { echo "strict: tests of '$preset' were skipped:"; grep -hE "$skips" "$log" "build/$preset/Testing/Temporary/LastTest.log"; } >>"$failures"
  fi
}

if ((strict)); then
  run asan -LE 'interop|bench|engines'
  run tsan -L 'unit|mount|load|bucket'
  if [[ -f tests/fuzz/run.sh ]]; then
    mkdir -p build/fuzz
    # from a fixed number: what a change brings is found again at its author's; the long runs of tests/release.sh look for the rest
    CKPTFS_FUZZ_SEED=${CKPTFS_FUZZ_SEED:-1} sh tests/fuzz/run.sh "${CKPTFS_FUZZ_SECONDS:-10}" 2>&1 | tee build/fuzz/log || {
      failed=1
      { echo "fuzzing failed:"; sed -n '/SUMMARY\|ERROR\|Base64\|found something/p' build/fuzz/log; } >>"$failures"
    }
  fi
fi
run release -LE bench # last: its closing line is the one that counts
cat "$failures" >&2
exit $failed
