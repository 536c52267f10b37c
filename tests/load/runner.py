# SPDX-License-Identifier: Apache-2.0
"""Tests that are functions: what each test program's main() does with them."""

import os
import sys
import tempfile
import traceback


def run(tests):
    """[(name, function)]: run those that the command line names, and exit."""
    passed = failed = 0
    for name, test in tests:
        if len(sys.argv) > 1 and sys.argv[1] not in name:
            continue
        try:
            said = test()
            print("ok  ", name, said or "", flush=True)
            passed += 1
        except Exception as e:
            traceback.print_exc()
            print("FAIL", name, e, flush=True)
            failed += 1
    print(f"{passed} passed, {failed} failed")
    sys.exit(1 if failed or not passed else 0)


def run_in_folders(tests):
    """Functions of a path, which is each one's own to make."""
    with tempfile.TemporaryDirectory() as top:
        run([(t.__name__, lambda t=t: t(os.path.join(top, t.__name__))) for t in tests])
