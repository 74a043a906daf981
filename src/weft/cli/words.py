"""Figures and facts in words, the same in every command, and what options are made of."""

from __future__ import annotations

import os
import platform
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable
from importlib import metadata

import weft
from weft.base.cores import cores_of_process


def number(value: float | None, scale: float = 1.0) -> str:
    """`scale` times the value in three figures, more before the point; "-": it is not known.

    Example:
        >>> [number(value) for value in (0.12345, 12.345, 12345.6, None)]
        ['0.12', '12.3', '12346', '-']
    """
    if value is None:
        return "-"
    value *= scale
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def about() -> str:
    """What computes here, and how busy it is."""
    return (
        f"weft {weft.__version__}, torch {metadata.version('torch')}, "
        f"Python {platform.python_version()}, kernels {weft.kernels.describe()}, "
        f"{cores_of_process()} cores, load {os.getloadavg()[0]:.1f}"
    )


def size(text: str) -> int:
    """An option that is a whole number above 0."""
    if not text.isdecimal() or not int(text):
        raise ArgumentTypeError(f"{text!r} is no number above 0")
    return int(text)


def several(known: Iterable[str]) -> Callable[[str], list[str]]:
    """An option that is some of these names, divided by commas.

    Example:
        >>> several("abc")("b,a"), several("abc")("all"), several("abc")("none")
        (['b', 'a'], ['a', 'b', 'c'], [])
    """
    names = list(known)

    def read(text: str) -> list[str]:
        found = {"all": names, "none": []}.get(text, text.split(","))
        for name in found:
            if name not in names:
                raise ArgumentTypeError(f"unknown {name!r}: choose from {', '.join(names)}")
        return found

    return read
