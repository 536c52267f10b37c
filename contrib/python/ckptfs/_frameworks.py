# SPDX-License-Identifier: Apache-2.0
"""What an adapter says whose framework can't be imported."""

import importlib.metadata
import sys


def unusable(adapter, error, top, distribution, install, supported=None):
    """The ImportError to raise for `error`, which importing a framework's parts has raised: the framework is not installed, or it is, and the cause is
    another one, such as a part that its version lacks.

    adapter       the module of ours
    top           the framework's modules, of which one is missing if it is not installed
    distribution  the name that pip knows it by
    install       what to tell pip
    supported     the versions that the adapter is tested with
    """
    if isinstance(error, ModuleNotFoundError) and error.name in top:
        return ImportError(f"{adapter} needs {distribution}: pip install {install}")
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        version = getattr(sys.modules.get(top[-1]), "__version__", "of an unknown version")
    said = f"{adapter} can't use the installed {distribution} {version}: {error}"
    if supported:
        said += f". {adapter} is tested with {distribution} {supported}"
    if (
        error.name is None and top[-1] not in sys.modules
    ):  # no module is missing, the framework itself gave up
        said += f". Perhaps it is to be installed anew: pip install {install}"
    return ImportError(said)
