"""Whether an object is a framework's, and what is said where it is not."""

from __future__ import annotations

import sys
from typing import Any

import weft


def check_kind(given: object, module: str, name: str) -> None:
    """Raise WeftError, on this rank alone, if an object is not of the class `module.name`."""
    # whoever has such an object has imported the framework
    kind: Any = getattr(sys.modules.get(module), name, None)
    if kind is None or not isinstance(given, kind):
        raise weft.WeftError(f"this is a {type(given).__name__}: pass a {module}.{name}")
