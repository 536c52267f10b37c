#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The Python package is as ruff formats it, ruff finds nothing wrong in it, and mypy finds its types consistent:
# python.sh SOURCE_DIR [FOLDER OF ruff AND mypy]. pyproject.toml has the rules, tests/requirements.txt the versions; without
# the tools the test is skipped.
set -eu
cd "$1"
PATH=${2:+$2:}$PATH
bad=0

for tool in ruff mypy; do
    command -v $tool >/dev/null || { echo "skipped: $tool is not here"; exit 77; }
done
ruff format --no-cache --diff contrib/python || bad=1
ruff check --no-cache contrib/python || bad=1
mypy --cache-dir=/dev/null || bad=1
exit $bad
