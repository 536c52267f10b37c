# SPDX-License-Identifier: Apache-2.0
"""Tests run with the interpreter that a newcomer has: Debian's own, where there is one. A newer one beside it knows functions that Debian's does
not, and then a test passes here that is red on a fresh machine. Another interpreter is a skip, which --strict does not allow."""

import os
import sys

DEBIANS = "/usr/bin/python3"
if os.path.exists(DEBIANS) and os.path.realpath(sys._base_executable) != os.path.realpath(DEBIANS):
    print(f"skipped: the tests run with {os.path.realpath(sys._base_executable)}; make CKPTFS_PYTHON's venv with {DEBIANS}")
    sys.exit(77)
