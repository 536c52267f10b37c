#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Build the preset asan, and run every target for some seconds: tests/fuzz/run.sh [SECONDS [TARGET...]]
# Each run begins at another random number.
#
# With CKPTFS_FUZZ_RUNS=N each target gets N inputs instead, and always the same ones: a slow machine sees what a fast one has seen. Targets
# whose input is a whole directory, or what two ranks say, are slower, and get a tenth.
set -eu
seconds=${1:-60}
[ $# -gt 0 ] && shift
cd "$(dirname "$0")/../.."
[ -e build/asan/build.ninja ] || cmake --preset asan -DCKPTFS_TESTS=ON >/dev/null
cmake --build --preset asan
python3 tests/fuzz/seeds.py build/fuzz/seeds
[ $# -gt 0 ] || set -- $(cd tests/fuzz && ls fuzz_*.c | sed 's/\.c$//')

# How long a target runs.
limits() {
    if [ -z "${CKPTFS_FUZZ_RUNS:-}" ]; then
        echo "-max_total_time=$seconds -seed=0"
    elif [ "$1" = fuzz_rounds ] || grep -q 'fuzz_reader\.h' "tests/fuzz/$1.c"; then
        echo "-runs=$((CKPTFS_FUZZ_RUNS / 10)) -seed=1"
    else
        echo "-runs=$CKPTFS_FUZZ_RUNS -seed=1"
    fi
}

# One target; its words go to a log, and its failure leaves a file beside it.
fuzz() {
    mkdir -p "build/fuzz/corpus/$1" "build/fuzz/finds/$1"
    old=
    [ -d "tests/fuzz/regressions/$1" ] && old="tests/fuzz/regressions/$1"
    # shellcheck disable=SC2046 # several arguments
    "build/asan/tests/$1" $(limits "$1") -timeout=60 -rss_limit_mb=2048 -max_len=65536 -print_final_stats=1 -artifact_prefix="build/fuzz/finds/$1/" \
        "build/fuzz/corpus/$1" "build/fuzz/seeds/$1" $old >"build/fuzz/finds/$1.log" 2>&1 || touch "build/fuzz/finds/$1.failed"
}

mkdir -p build/fuzz/finds
rm -f build/fuzz/finds/*.failed
jobs=$(nproc)
running=0
for target; do # as many at once as there are processors
    fuzz "$target" &
    running=$((running + 1))
    [ $((running % jobs)) -ne 0 ] || wait
done
wait

failed=
for target; do
    log="build/fuzz/finds/$target.log"
    echo "== $target, $(limits "$target")"
    if [ -e "build/fuzz/finds/$target.failed" ]; then
        failed="$failed $target"
        tail -n 60 "$log"
    else
        grep -E 'number_of_executed_units|peak_rss_mb' "$log"
    fi
done
[ -z "$failed" ] || { echo "found something:$failed (inputs in build/fuzz/finds)"; exit 1; }
