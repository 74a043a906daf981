"""What several commands read from the command line, and what a launcher says."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

import typer


def refuse(option: str, words: str) -> NoReturn:
    """End with exit status 2 and what is wrong with an option."""
    raise typer.BadParameter(words, param_hint=option)


def names(option: str, given: str, there_is: Iterable[str]) -> tuple[str, ...]:
    """A list that is divided by commas, of known names; "all" of them.

    Example:
        >>> names("--case", "a, b", ["a", "b", "c"]), names("--case", "all", ["a", "b", "c"])
        (('a', 'b'), ('a', 'b', 'c'))
    """
    known = list(there_is)
    if given == "all":
        return tuple(known)
    found = tuple(dict.fromkeys(name.strip() for name in given.split(",") if name.strip()))
    for name in found:
        if name not in known:
            refuse(option, f"unknown {name!r}: there is {', '.join(known)}")
    if not found:
        refuse(option, f"names nothing: there is {', '.join(known)}")
    return found


def rate(option: str, given: str) -> float:
    """Bits a second of a speed.

    Example:
        >>> rate("--link", "250mbit")
        250000000.0
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", given.strip().lower())
    if match is None or float(match[1]) == 0:
        refuse(option, f"{given!r} is no speed: write it as 1gbit or 250mbit")
    return float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]]


def writable(option: str, path: Path | None) -> None:
    """Refuse a file that cannot be written: better now than after the work."""
    try:
        if path is not None:
            path.open("a").close()
    except OSError as error:
        refuse(option, f"{path} cannot be written: {error.strerror}")


def launched(ranks: int | None) -> bool:
    """Whether a launcher (torchrun, `tools/netlab`) made this process one of the ranks.

    RANK and WORLD_SIZE are set then, and `--ranks` must not say another number.
    """
    size = os.environ.get("WORLD_SIZE")
    if size is None or "RANK" not in os.environ:
        return False
    if ranks not in (None, int(size)):
        refuse("--ranks", f"{ranks} under a launcher that started {size}: leave --ranks out")
    return True
