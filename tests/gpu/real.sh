#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The GPU path on a machine with a GPU, in stages of at most nine minutes. That machine needs nvcc, CMake, ninja, a C compiler and
# Python with torch, but no network: what else the build needs is carried there.
#
#   tests/gpu/real.sh pack [SUITE]   on a machine with a network: build/gpu-carry (libraries and headers of Debian's packages) and
#                                    build/gpu-nccl/part-NN (NCCL of tests/requirements-cuda.txt, compressed, 40 MiB each)
#   tests/gpu/real.sh STAGE ...      there, in this order:
#     report    what the machine has: GPU, driver, nvcc, torch, its NCCL
#     nccl      put the parts that were carried together; says which are missing
#     build     build/gpu
#     one       tests of one rank: loads, casts, strides, faults
#     several   tests of several ranks (NCCL >= 2.30, since they share one GPU)
#     sanitize  compute-sanitizer's memcheck and racecheck on a sample
#     python    loads from Python: rates beside other loaders, transformers, FSDP2, a captured graph, time to the first tensor
#     bench     bench_gpu.py
#   tests/gpu/real.sh --double STAGE ...   over the double of tests/gpu: the same script, where there is no GPU
#
# Each stage writes OUT/STAGE.json and OUT/STAGE.log (OUT: the environment's, else build/gpu-results) and can be repeated. A stage
# that takes longer than STAGE_S (540) is stopped; before that, the stacks of its processes go to OUT/STAGE.stacks.
set -uo pipefail
cd "$(dirname "$0")/../.."

double=0
if [[ ${1:-} == --double ]]; then double=1; shift; fi
(($#)) || { sed -n '3,23p' "$0"; exit 2; }
build=$(realpath -m "${GPU_BUILD:-build/gpu}")
out=$(realpath -m "${OUT:-build/gpu-results}")
limit=${STAGE_S:-540}
carry=$PWD/build/gpu-carry
python=${PYTHON:-python3}
mkdir -p "$out"

# ---- on the machine with a network ----

packages=(libjansson-dev libjansson4 libxxhash-dev libxxhash0 libyaml-dev libyaml-0-2 libpcre2-dev libpcre2-8-0 libfuse3-dev libfuse3-3
          libcmocka-dev libcmocka0)

pack() {
  local tmp p
  rm -rf "$carry" build/gpu-nccl
  mkdir -p "$carry" build/gpu-nccl
  tmp=$(mktemp -d)
  for p in "${packages[@]}"; do
    (cd "$tmp" && apt-get download -qq "$p") || { echo "no package $p" >&2; rm -rf "$tmp"; return 1; }
  done
  for p in "$tmp"/*.deb; do dpkg -x "$p" "$carry"; done
  rm -rf "$tmp" "$carry/usr/share/doc" "$carry/usr/share/man" "$carry/usr/lib/debug"
  local nccl=${NCCL_ROOT:-build/venv/cuda}/nvidia/nccl
  [[ -e $nccl/lib/libnccl.so.2 ]] || { echo "$nccl has no NCCL (tests/run.sh installs it, or give NCCL_ROOT)" >&2; return 1; }
  cp -r "$nccl/include" "$carry/nccl-include"
  xz -T0 -1 -c "$nccl/lib/libnccl.so.2" | split -b 40M -d - build/gpu-nccl/part-
  (cd build/gpu-nccl && sha256sum part-* >parts.sha256)
  cp build/gpu-nccl/parts.sha256 "$carry/nccl-parts.sha256"
  du -sh "$carry" build/gpu-nccl/part-*
}

# ---- there ----

nccl_version() { # of the library that a process would load: "2.30.7", or nothing
  local lib=$1
  [[ -e $lib ]] && "$python" - "$lib" <<'P'
import ctypes, sys
v = ctypes.c_int()
if ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(v)) == 0:
    print(f"{v.value // 10000}.{v.value // 100 % 100}.{v.value % 100}")
P
}

torch_nccl() { "$python" -c 'import os, nvidia.nccl as n; print(os.path.join(list(n.__path__)[0], "lib", "libnccl.so.2"))' 2>/dev/null; }

# The NCCL to use: the one that was carried, else torch's.
nccl_library() {
  if [[ -e $PWD/build/gpu-nccl/lib/libnccl.so.2 ]]; then echo "$PWD/build/gpu-nccl/lib/libnccl.so.2"; else torch_nccl; fi
}

json() { # key value ...: an object of strings
  "$python" -c 'import json, sys; a = sys.argv[1:]; print(json.dumps(dict(zip(a[::2], a[1::2])), indent=1))' "$@"
}

report() {
  json gpu "$(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>&1 | head -n 1)" kernel "$(uname -r)" \
    cores "$(nproc)" nvcc "$(nvcc --version 2>&1 | tail -n 1)" cmake "$(cmake --version 2>&1 | head -n 1)" ninja "$(ninja --version 2>&1)" \
    python "$("$python" --version 2>&1)" torch "$("$python" -c 'import torch; print(torch.__version__, torch.version.cuda)' 2>&1 | tail -n 1)" \
    nccl_of_torch "$(nccl_version "$(torch_nccl)")" nccl_carried "$(nccl_version "$PWD/build/gpu-nccl/lib/libnccl.so.2")" \
    compute_sanitizer "$(compute-sanitizer --version 2>&1 | head -n 1)" cuda_gdb "$(cuda-gdb --version 2>&1 | head -n 1)" \
    memory_gib "$(awk '/MemTotal/ { printf "%.0f", $2 / 1048576 }' /proc/meminfo)" date "$(date -u +%F)"
}

nccl() {
  [[ -e $carry/nccl-parts.sha256 ]] || { echo 'build/gpu-carry was not carried'; return 1; }
  if ! (cd build/gpu-nccl 2>/dev/null && sha256sum -c --quiet "$carry/nccl-parts.sha256"); then
    echo "parts are missing or broken: $(ls build/gpu-nccl 2>/dev/null | tr '\n' ' ')"
    return 1
  fi
  mkdir -p build/gpu-nccl/lib
  cat build/gpu-nccl/part-* | xz -dc >build/gpu-nccl/lib/libnccl.so.2
  json version "$(nccl_version "$PWD/build/gpu-nccl/lib/libnccl.so.2")"
}

build() {
  local library args=()
  if [[ -d $carry ]]; then # a sysroot for pkg-config, and what the linker and the loader look through
    export PKG_CONFIG_SYSROOT_DIR=$carry
    export PKG_CONFIG_LIBDIR=$carry/usr/lib/x86_64-linux-gnu/pkgconfig:$carry/usr/share/pkgconfig
    library=$carry/usr/lib/x86_64-linux-gnu
    args+=(-DCMAKE_EXE_LINKER_FLAGS="-Wl,-rpath-link,$library -L$library" -DCMAKE_SHARED_LINKER_FLAGS="-Wl,-rpath-link,$library -L$library"
           -DCMAKE_BUILD_RPATH="$library")
    args+=(-DNCCL_INCLUDE_DIR="$carry/nccl-include" -DNCCL_LIBRARY="$(nccl_library)")
  fi
  cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCKPTFS_TESTS=ON -DCKPTFS_PYTHON="$(command -v "$python")" \
    -DCKPTFS_URING=OFF -DCMAKE_DISABLE_FIND_PACKAGE_MPI=ON "${args[@]}" ${GPU_CMAKE_ARGS:-} || return
  cmake --build "$build" -j "$(nproc)"
}

# What every program below runs with: the libraries, and several ranks on one GPU.
environment() {
  export CKPTFS_BUILD=$build CKPTFS_SOURCE=$PWD NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0
  if ((double)); then
    export LD_LIBRARY_PATH=$build/tests/gpu-double
  else
    export GPU_REAL=1 LD_LIBRARY_PATH
    LD_LIBRARY_PATH=$(dirname "$(nccl_library)"):$carry/usr/lib/x86_64-linux-gnu:${LD_LIBRARY_PATH:-}
  fi
}

# A tests' program with some of its tests: those over real libraries, unless over the double.
tests() {
  local program=$1 words
  shift
  for words; do
    "$python" "tests/gpu/$program.py" "$words" || return
  done
}

one() {
  local suffix=_on_a_real_device
  ((double)) && suffix=
  environment
  GPU_RANKS_MOST=1 GPU_SAMPLE=${GPU_SAMPLE:-} tests test_gpu "all_checkpoints$suffix"
}

several() {
  local suffix=_on_a_real_device version
  ((double)) && suffix=
  environment
  if ((!double)); then
    version=$(nccl_version "$(nccl_library)")
    if [[ $(printf '%s\n2.30\n' "$version" | sort -V | head -n 1) != 2.30 ]]; then
      echo "several ranks on one GPU need NCCL 2.30; this is $version"
      return 1
    fi
  fi
  GPU_SAMPLE=${GPU_SAMPLE:-} tests test_gpu "$suffix" && tests test_gpu_faults "$suffix"
}

sanitize() {
  local tool run
  environment
  for tool in memcheck racecheck; do
    run=(compute-sanitizer "--tool=$tool" --error-exitcode=9 --target-processes=all)
    ((double)) && run=()
    "${run[@]}" "$build/tests/gpu_ranks" -c threads=1 tests/golden/nanotron/llama_tp2_pp2_tied -- random:each fsdp=1:each || return
  done
}

python() {
  environment
  if ((double)); then
    CKPTFS_LIBRARY_PATH=$build "$python" tests/gpu/python_models.py --cpu --ranks 1,2 --json "$out/python.json"
  else
    CKPTFS_LIBRARY_PATH=$build "$python" tests/gpu/python_models.py --layers "${GPU_LAYERS:-160}" --ranks "${GPU_RANKS:-1,2,4}" --json "$out/python.json"
  fi
}

bench() {
  environment
  if ((double)); then
    "$python" tests/bench/bench_gpu.py --build "$build" --double --layers 1 --ranks 1 --rounds 2 --json "$out/bench.json"
  else
    "$python" tests/bench/bench_gpu.py --build "$build" --dir "${GPU_SCRATCH:-/dev/shm}" --layers "${GPU_LAYERS:-160}" --ranks "${GPU_RANKS:-1,2,4}" \
      --json "$out/bench.json"
  fi
}

# ---- one stage ----

# The stacks of everything that the stage runs.
stacks() {
  local pid
  for pid in $(pgrep -g "$1"); do
    echo "== $pid $(tr '\0' ' ' <"/proc/$pid/cmdline")"
    if command -v py-spy >/dev/null && [[ $(readlink "/proc/$pid/exe") == *python* ]]; then py-spy dump --native --pid "$pid"; fi
    local debugger
    debugger=$(command -v cuda-gdb || command -v gdb) && timeout 30 "$debugger" -batch -p "$pid" -ex 'thread apply all bt' 2>&1
    cat "/proc/$pid/stack" 2>/dev/null
  done
}

run_stage() {
  local stage=$1 pid begin=$SECONDS status
  set -m # a process group of its own
  ("$stage") >"$out/$stage.log" 2>&1 &
  pid=$!
  set +m
  while kill -0 "$pid" 2>/dev/null && ((SECONDS - begin < limit)); do sleep 0.2; done
  if kill -0 "$pid" 2>/dev/null; then
    stacks "$pid" >"$out/$stage.stacks" 2>&1
    kill -9 -- "-$pid" 2>/dev/null
    echo "stopped after $limit s: see $stage.stacks" >>"$out/$stage.log"
  fi
  wait "$pid"
  status=$?
  [[ -s $out/$stage.json ]] || json stage "$stage" status "$status" seconds "$((SECONDS - begin))" \
    output "$(tail -c 4000 "$out/$stage.log")" >"$out/$stage.json"
  tail -n 40 "$out/$stage.log"
  echo "== $stage: status $status, $((SECONDS - begin)) s"
  return "$status"
}

for stage; do
  case $stage in
  pack) pack || exit 1 ;;
  report | nccl | build | one | several | sanitize | python | bench) rm -f "$out/$stage".*; run_stage "$stage" || exit 1 ;;
  *) echo "no stage $stage" >&2; exit 2 ;;
  esac
done
