# SPDX-License-Identifier: Apache-2.0
"""What an adapter says if its framework can't be imported."""

import importlib.metadata
import sys


def unusable(adapter, error, top, distribution, install, supported=None):
    """Return the ImportError to raise after importing a framework's parts has raised `error`.

    Either the framework is not installed, or it is, and the cause is another one, such as a part
    that its version lacks.

    Args:
        adapter: The name of the adapter's module.
        error: What the import raised.
        top: The framework's modules, of which one is missing if the framework is not installed.
        distribution: The name of the framework's distribution in pip.
        install: What to give to `pip install`.
        supported: The versions that the adapter is tested with, as text, or None.
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
    # No module is missing, but the framework itself gave up.
    if error.name is None and top[-1] not in sys.modules:
        said += f". Perhaps it is to be installed anew: pip install {install}"
    return ImportError(said)
