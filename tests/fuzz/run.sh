#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Build the fuzz preset and run every target for some seconds: tests/fuzz/run.sh [SECONDS [TARGET...]]
set -eu
seconds=${1:-60}
[ $# -gt 0 ] && shift
cd "$(dirname "$0")/../.."
cmake --preset fuzz >/dev/null
cmake --build --preset fuzz
python3 tests/fuzz/seeds.py build/fuzz/seeds
[ $# -gt 0 ] || set -- $(cd tests/fuzz && ls fuzz_*.c | sed 's/\.c$//')

failed=
for target; do
    mkdir -p "build/fuzz/corpus/$target" "build/fuzz/finds/$target"
    old=
    [ -d "tests/fuzz/regressions/$target" ] && old="tests/fuzz/regressions/$target"
    echo "== $target, $seconds s"
    log="build/fuzz/finds/$target.log"
    if ! "build/fuzz/tests/$target" -max_total_time="$seconds" -timeout=60 -rss_limit_mb=2048 -max_len=65536 \
        -print_final_stats=1 -artifact_prefix="build/fuzz/finds/$target/" \
        "build/fuzz/corpus/$target" "build/fuzz/seeds/$target" $old >"$log" 2>&1; then
        failed="$failed $target"
        tail -n 40 "$log"
    else
        grep -E 'number_of_executed_units|peak_rss_mb' "$log"
    fi
done
[ -z "$failed" ] || { echo "found something:$failed (inputs in build/fuzz/finds)"; exit 1; }
