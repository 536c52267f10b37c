#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Every C file is as clang-format 14 has it, no line is longer than 100 columns, and every source, script and CMake file begins
# with its licence: format.sh SOURCE_DIR [FOLDER OF clang-format]. Other versions format differently: without version 14, which
# tests/requirements.txt pins, the test is skipped after the other two checks.
set -eu
cd "$1"
PATH=${2:+$2:}$PATH
bad=0

files() { find core fs include tests -name build -prune -o -type f \( "$@" \) -print | grep -v __pycache__ | sort; }

skip=0
if clang-format --version 2>/dev/null | grep -q 'version 14\.'; then
    files -name '*.[ch]' | xargs clang-format --dry-run -Werror 2>&1 | grep 'error:' | cut -d: -f1 | sort -u >/tmp/format.$$ || true
    if [ -s /tmp/format.$$ ]; then
        echo "not as clang-format has it:"
        sed 's/^/  /' /tmp/format.$$
        bad=1
    fi
    rm -f /tmp/format.$$
else
    echo "clang-format 14 is not here: only lengths and licences were checked"
    skip=77
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
[ $bad -ne 0 ] || exit $skip
exit $bad
