#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Install what the tests need, build, and run them.
#
#   tests/run.sh              for somebody who has just cloned: units, lints, defects, golden checkpoints, and every format once through a
#                             mount, the loader and transformers; 6 minutes on two processors, installation included
#   tests/run.sh --all        all tests that this machine can run: also every framework that packages offer, vLLM among them; an hour
#   tests/run.sh --strict     all, as CI does: a skipped test is a failure; also the sanitizers and the fuzz targets
#   tests/run.sh --no-install any of them with what is there
#   tests/run.sh --all -- -R PATTERN    what follows "--" is for ctest: only some of the tests
set -euo pipefail
cd "$(dirname "$0")/.."

strict=0 install=1 all=0 only=()
while (($#)); do
  case $1 in
  --strict) strict=1 all=1 ;;
  --all) all=1 ;;
  --no-install) install=0 ;;
  --) shift; only=("$@"); break ;;
  *) sed -n '3,11p' "$0"; exit 2 ;;
  esac
  shift
done

venv=${CKPTFS_VENV:-build/venv}
jobs=$(nproc)
mkdir -p build

# used: seconds of processors that all processes have taken which have ended (in a variable: in a shell of its own there would be none)
used() {
  times >build/times
  used=$(awk 'NR == 2 { split($0, t, /[ms ]+/); print int(60 * (t[1] + t[3]) + t[2] + t[4]) }' build/times)
}

# phase NAME: from here on time counts as NAME's, until the next phase begins
phases=() phase= phase_began=0 phase_used=0
phase() {
  used
  [[ -z $phase ]] || phases+=("$(printf '%6d s, of processors %6d s  %s' $((SECONDS - phase_began)) $((used - phase_used)) "$phase")")
  phase=$1 phase_began=$SECONDS phase_used=$used
}

# The interpreter that a newcomer has: Debian's own where there is one, whatever other comes first in PATH.
system_python=/usr/bin/python3
[[ -x $system_python ]] || system_python=$(command -v python3 || echo "$system_python")

pip_install() { "$venv/bin/pip" install --quiet "$@"; }

# install_torch VERSION: the build for CPUs is asked for by its name, which pip finds where an index or a folder offers it
# (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS: PyTorch has an index of them); else the one with CUDA's libraries, which works, too.
install_torch() {
  echo "== torch $1 for CPUs, 200 MB to fetch"
  pip_install "torch==$1+cpu" 2>build/torch.log && return
  echo "== pip knows no index with it: torch $1 with CUDA, 3 GB to fetch"
  pip_install "torch==$1"
}

# install_venv: torch, transformers and the linters, for the versions of requirements.txt and this interpreter
install_venv() {
  local made_for
  made_for=$("$system_python" --version; cat tests/requirements.txt)
  [[ $made_for != "$(cat "$venv/made-for" 2>/dev/null)" ]] || return 0 # and to the end: it is written last
  rm -rf "$venv"
  "$system_python" -m venv "$venv"
  # torch first: with none installed, other packages would ask for a build with CUDA
  install_torch "$(sed -n 's/^torch==//p' tests/requirements.txt)"
  pip_install -r tests/requirements.txt
  echo "$made_for" >"$venv/made-for"
}

# packages FOLDER FILE [PIP-ARGUMENTS]: the packages of a file of requirements, in a folder of the venv; anew if the file has changed.
# They go over the venv's own packages (PYTHONPATH), so nothing that they need beside the file is installed.
packages() {
  local into=$venv/$1 file=$2
  shift 2
  ! cmp -s "$file" "$into/requirements.txt" || return 0
  rm -rf "$into"
  pip_install --no-deps --target "$into" -r "$file" "$@" || return 1
  cp "$file" "$into/requirements.txt"
}

# each_version PACKAGE FILE [PIP-ARGUMENTS]: as packages, a folder PACKAGE-VERSION for each line of the file that names a version of
# PACKAGE. What else the line has, and all lines of other packages, goes with it.
each_version() {
  local package=$1 file=$2 version more
  shift 2
  grep "^$package==" "$file" | while read -r version more; do
    { echo "$version" && tr ' ' '\n' <<<"$more" && grep -v "^$package==" "$file" || true; } >"$venv/needs-$package.txt"
    packages "${version/==/-}" "$venv/needs-$package.txt" "$@"
  done
}

# install_first: what the builds and the tests of sanitizers need beside the venv
install_first() {
  packages cuda tests/requirements-cuda.txt # a compiler for device code, and NCCL
  packages moto tests/requirements-bucket.txt # a store that speaks S3's protocol
}

# install_frameworks: what else --all tests against. megatron-core from 0.17 on and Megatron-Bridge ask for Python 3.12, and run with 3.11.
install_frameworks() {
  each_version megatron-core tests/requirements-megatron.txt --ignore-requires-python
  DS_BUILD_OPS=0 each_version deepspeed tests/requirements-deepspeed.txt --no-build-isolation # without what it would compile
  packages bridge tests/requirements-bridge.txt --ignore-requires-python
  packages transformers4 tests/requirements-4.txt
  packages more tests/requirements-more.txt # loaders beside ours; the oldest accelerate and PEFT
  packages vllm tests/requirements-vllm.txt || {
    rm -rf "$venv/vllm" # what is there in part would fail in a strange way
    echo 'vLLM could not be installed: the test engines/vllm is skipped, which is a failure with --strict' >&2
  }
}

# wait_for_frameworks: they are installed beside the builds and tests that do without them, as much of it is waiting for a network
frameworks=
wait_for_frameworks() {
  [[ -n $frameworks ]] || return 0
  phase 'frameworks: the rest of their installation'
  wait "$frameworks" || { cat build/frameworks.log >&2; exit 1; }
  cat build/frameworks.log >&2
}

if ((all)); then
  echo "== tests/run.sh: system packages and twelve sets of Python packages (5 GB), a build, all tests: an hour on two processors"
else
  echo "== tests/run.sh: system packages, torch and transformers in $venv (1.2 GB), a build, the first tests: 6 minutes on two processors"
fi
if ((install)); then
  phase 'system packages'
  contrib/install-deps.sh "$( ((all)) && echo all-tests || echo tests)"
  phase 'torch and transformers'
  install_venv
  if ((all)); then
    phase 'what builds need'
    install_first
    install_frameworks >build/frameworks.log 2>&1 &
    frameworks=$!
  fi
fi
python=$system_python
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
  repeated=$((repeated + $(wc -l <<<"$failed")))
  { echo "unstable, tests of '$1' that failed once and passed when they ran alone:"; echo "$failed"; } >>"$failures"
}

# the venv's folders of a library of which several versions are tested, separated by ':'
folders() { find "$(realpath -m "$venv")" -maxdepth 1 -type d -name "$1" 2>/dev/null | sort | paste -sd:; }

failed=0
repeated=0 # tests that failed once and passed when they ran alone
failures=build/failures.txt # what failed anywhere, told once more at the very end: the logs of three builds are long
: >"$failures"
skips='\*\*\*Skipped|\[  SKIPPED \]|\(.*skipped=[0-9]|\.\.\. skipped ' # as ctest, cmocka and unittest say it

# run PRESET CTEST-ARGS...: build the preset and run its tests; in strict mode nothing may be skipped
run() {
  local preset=$1 log
  shift
  phase "$preset: build"
  cmake --preset "$preset" -DCKPTFS_TESTS=ON -DCKPTFS_PYTHON="$python" -DCUDAToolkit_ROOT="$(realpath -m "$venv/cuda")" \
    -DNCCL_ROOT="$(realpath -m "$venv/cuda")" -DCKPTFS_TRANSFORMERS4="$(realpath -m "$venv/transformers4")" \
    -DCKPTFS_MEGATRON="$(folders 'megatron-core-*')" -DCKPTFS_DEEPSPEED="$(folders 'deepspeed-*')" \
    -DCKPTFS_VLLM="$(realpath -m "$venv/vllm")" -DCKPTFS_BRIDGE="$(realpath -m "$venv/bridge")" \
    -DCKPTFS_MOTO="$(realpath -m "$venv/moto")" -DCKPTFS_MORE="$(realpath -m "$venv/more")" >/dev/null
  cmake --build --preset "$preset" -j "$jobs"
  log=build/$preset/ctest.log
  phase "$preset: tests"
  ctest --test-dir "build/$preset" --no-tests=error --output-on-failure -j "$jobs" "$@" "${only[@]}" 2>&1 | tee "$log" || {
    { echo "tests of '$preset' failed:"; tell_failures "$preset"; } >>"$failures"
    again "$preset" || failed=1
  }
  # ctest knows of whole programs only; unittest counts the cases that it skipped in the program's own output
  if ((strict)) && grep -E "$skips" "$log" "build/$preset/Testing/Temporary/LastTest.log"; then
    failed=1
    { echo "strict: tests of '$preset' were skipped:"; grep -hE "$skips" "$log" "build/$preset/Testing/Temporary/LastTest.log"; } >>"$failures"
  fi
}

# tell_times: how long each phase took, and the 30 slowest tests of all presets
tell_times() {
  phase end
  echo '== time'
  printf '%s\n' "${phases[@]}"
  echo '== the slowest tests'
  for log in build/*/ctest.log; do
    [[ ! $log -nt build/began ]] || sed -nE "s/^ *[0-9]+\/[0-9]+ Test +#[0-9]+: ([^ ]+) .* ([0-9.]+) sec.*/\2 $(basename "$(dirname "$log")") \1/p" "$log"
  done | sort -rn | awk 'NR <= 30 { printf "%8.1f s  %-8s %s\n", $1, $2, $3 }'
}

touch build/began
if ((strict)); then
  export CKPTFS_STRICT=1
  # the long ones mostly wait (those of faults, for timeouts), so there are twice as many as processors
  run asan -LE 'interop|bench|engines' -j $((2 * jobs))
  # beside the tests of threads, which mostly wait; always the same inputs: the long runs of tests/release.sh look for others
  mkdir -p build/fuzz
  CKPTFS_FUZZ_RUNS=${CKPTFS_FUZZ_RUNS:-20000} nice -n 19 sh tests/fuzz/run.sh >build/fuzz/log 2>&1 &
  fuzzing=$!
  run tsan -LE interop -j $((2 * jobs))
  phase 'fuzzing: the rest'
  wait "$fuzzing" || {
    failed=1
    { echo "fuzzing failed:"; sed -n '/SUMMARY\|ERROR\|Base64\|found something/p' build/fuzz/log; } >>"$failures"
  }
  cat build/fuzz/log
fi
if ((all)); then
  wait_for_frameworks
  # what ran twice with all its cases, under either sanitizer, does not depend on optimisation: --all runs it in this build
  twice='^(bucket/bucket|bucket/moto|load/test_faults|gpu/test_gpu_faults|mount/(life|resave|faults))$'
  run release -LE bench -E "$( ((strict)) && echo "$twice" || echo '^$')" -j $((jobs + strict))
else
  run release -L 'lint|unit|defects|golden|fuzz|first'
fi
tell_times
cat "$failures" >&2
((all)) || echo '== tests/run.sh --all adds: every format and framework in depth, the loader under faults, buckets, mounts for an hour'
echo "$(grep -h 'tests passed,' build/release/ctest.log || true); $repeated needed to be run again (contrib/HACKING.md lists what is known of such tests)"
exit $failed
