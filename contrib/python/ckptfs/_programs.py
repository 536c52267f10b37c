# SPDX-License-Identifier: Apache-2.0
"""The commands `ckptfs` and `ckpt` of an installed package, which run the programs in its bin/."""

import os
import sys


def _run(name):
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", name)
    if not os.path.exists(path):
        sys.exit(
            f"{name}: {path} is not there: this package was not installed by pip, so use the "
            "program of the build"
        )
    os.execv(path, [name, *sys.argv[1:]])


def ckptfs():
    """Become the program ckptfs."""
    _run("ckptfs")


def ckpt():
    """Become the program ckpt."""
    _run("ckpt")
