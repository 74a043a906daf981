"""Figures and facts in words, the same in every command: one way to write a number.

Ranks and the examples use this, too, so it needs neither typer nor rich, which come with the extra
`cli`.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata

import weft


def number(value: float | None, scale: float = 1.0) -> str:
    """`scale` times the value in three figures, more before the point; "-": it is not known.

    Example:
        >>> [number(value) for value in (0.12345, 12.345, 12345.6, None)]
        ['0.12', '12.3', '12346', '-']
    """
    if value is None:
        return "-"
    value *= scale
    if value >= 1e7:
        return f"{value:.2e}"
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def ms(seconds: float) -> str:
    """A time in milliseconds, with its unit."""
    return f"{number(seconds, 1e3)} ms"


def mib(nbytes: float) -> str:
    """A size in MiB, with its unit."""
    return f"{number(nbytes, 2**-20)} MiB"


def versions() -> dict[str, str]:
    """What computes here, each with its version."""
    return {
        "weft": weft.__version__,
        "torch": metadata.version("torch"),
        "python": platform.python_version(),
        "kernels": weft.kernels.describe(),
    }


def listed(facts: Mapping[str, object]) -> str:
    """Names with what belongs to them, in a line."""
    return ", ".join(f"{name} {fact}" for name, fact in facts.items())
