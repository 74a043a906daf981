"""Which versions of frameworks serve, and what is said of others."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import sys
from types import ModuleType
from typing import Any

import weft

OLDEST = {
    "accelerate": "1.1",
    "lightning": "2.4",
    "pytorch-lightning": "2.4",
    "transformers": "4.57",
}
"""The oldest version of each that has been tried."""


def import_framework(module: str, package: str) -> ModuleType:
    """A module of a framework.

    Args:
        module: its name.
        package: what it is installed as.

    Raises:
        WeftError: it is not installed, or too old; raised on this rank alone.
    """
    try:
        framework = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name.partition(".")[0]):
            raise  # something that the framework itself lacks
        raise weft.WeftError(f"{package} is not installed here: pip install {package}") from None
    check_version(package)
    return framework


def check_kind(given: object, module: str, package: str, name: str) -> None:
    """Raise WeftError if an object is not of a class of a framework, or that is too old.

    Args:
        given: the object.
        module: where the class is.
        package: what that is installed as.
        name: of the class.
    """
    # whoever has such an object has imported the framework
    kind: Any = getattr(sys.modules.get(module), name, None)
    if kind is None or not isinstance(given, kind):
        raise weft.WeftError(f"this is a {type(given).__name__}: pass an {module}.{name}")
    check_version(package)


def check_version(package: str) -> None:
    """Raise WeftError if a package is older than what has been tried."""
    version = importlib.metadata.version(package)
    oldest = OLDEST[package]
    if _numbers(version) < _numbers(oldest):
        raise weft.WeftError(
            f"{package} {version} is too old for weft.trainers: pip install '{package}>={oldest}'"
        )


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers at the beginning of a version, the first two."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
