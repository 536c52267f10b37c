#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Every C file is as clang-format has it, no line is longer than 100 columns, and every source, script and CMake file begins with
# its licence: format.sh SOURCE_DIR
set -eu
cd "$1"
bad=0

files() { find core fs include tests -name build -prune -o -type f \( "$@" \) -print | grep -v __pycache__ | sort; }

if command -v clang-format >/dev/null; then
    files -name '*.[ch]' | xargs clang-format --dry-run -Werror 2>&1 | grep 'error:' | cut -d: -f1 | sort -u >/tmp/format.$$ || true
    if [ -s /tmp/format.$$ ]; then
        echo "not as clang-format has it:"
        sed 's/^/  /' /tmp/format.$$
        bad=1
    fi
    rm -f /tmp/format.$$
else
    echo "clang-format is not here: only lengths and licences are looked at"
fi

long=$(files -name '*.[ch]' | xargs awk 'length($0) > 100 { print "  " FILENAME ":" FNR }')
if [ -n "$long" ]; then
    echo "longer than 100 columns:"
    echo "$long"
    bad=1
fi

for f in CMakeLists.txt $(files -name '*.[ch]' -o -name '*.py' -o -name '*.sh' -o -name CMakeLists.txt -o -name '*.cmake') \
    $(find contrib cmake -type f \( -name '*.sh' -o -name '*.cmake' -o -name '*.in' \)); do
    if ! head -n 2 "$f" | grep -q 'SPDX-License-Identifier: Apache-2.0'; then
        echo "no SPDX line: $f"
        bad=1
    fi
done
exit $bad
