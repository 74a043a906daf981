"""What several commands read from the command line, what a launcher says, and how they fail."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer import Option

import weft

from .bench.cases import CASES, REAL, Case, Distribution, Dtype, WireDtype


def writable(path: Path | None) -> Path | None:
    """Refuse a file that cannot be written: better now than after the work."""
    if path is not None and not os.access(path if path.exists() else path.parent, os.W_OK):
        raise typer.BadParameter(f"{path} cannot be written")
    return path


def _picture(path: Path | None) -> Path | None:
    """Refuse a file that no picture can be drawn into."""
    if path is not None and path.suffix not in (".png", ".svg"):
        raise typer.BadParameter(f"{path}: the file's name ends in .png or .svg")
    if path is not None and (missing := missing_extra()):
        raise typer.BadParameter(missing)
    return writable(path)


def _at_most(limit: int) -> Callable[[int | None], int | None]:
    """Refuse numbers that are larger; `max=` would stand in the help with all its digits."""

    def check(given: int | None) -> int | None:
        if given is not None and given > limit:
            raise typer.BadParameter(f"{given} is more than {limit}")
        return given

    return check


THE_CASE = "The case"
OUTPUT = "Output"
"""Headings of several commands' options."""

Cases = Annotated[
    str | None,
    Option(
        metavar="NAMES",
        help=f"Some of {', '.join(CASES)}, divided by commas; or all.",
        show_default="your own sizes, if any",
        rich_help_panel=THE_CASE,
    ),
]
CasesOrReal = Annotated[
    str | None,
    Option(
        metavar="NAMES",
        help=f"Some of {', '.join(CASES)}, or all; of {', '.join(REAL)}, or real.",
        show_default="your own sizes, if any",
        rich_help_panel=THE_CASE,
    ),
]
Rows = Annotated[
    int | None,
    Option(
        callback=_at_most(1 << 62),
        metavar="N",
        help="Indices that each rank brings.",
        rich_help_panel=THE_CASE,
    ),
]
Height = Annotated[
    int | None,
    Option(
        callback=_at_most(1 << 62),
        metavar="N",
        help="Rows of the dense tensor.",
        rich_help_panel=THE_CASE,
    ),
]
Width = Annotated[
    int | None,
    Option(
        callback=_at_most(1 << 40),
        metavar="N",
        help="Values in a row; 1: scalars.",
        rich_help_panel=THE_CASE,
    ),
]
Drawn = Annotated[
    Distribution | None, Option(help="How indices are drawn.", rich_help_panel=THE_CASE)
]
ValueDtype = Annotated[
    Dtype,
    Option(metavar="DTYPE", help="Of values: float32, bfloat16 ...", rich_help_panel=THE_CASE),
]
SentDtype = Annotated[
    WireDtype | None,
    Option(
        metavar="DTYPE",
        help="In which weft sends values: bfloat16 ...",
        show_default="their own",
        rich_help_panel=THE_CASE,
    ),
]
Timeout = Annotated[float | None, Option(help="Longest wait, in seconds.", show_default="300")]
Json = Annotated[
    Path | None,
    Option(callback=writable, help="Write all figures to this file.", rich_help_panel=OUTPUT),
]
Csv = Annotated[
    Path | None,
    Option(callback=writable, help="The same, separated by commas.", rich_help_panel=OUTPUT),
]
Picture = Annotated[
    Path | None,
    Option(
        callback=_picture,
        help="Draw the quickest algorithms: .png or .svg.",
        rich_help_panel=OUTPUT,
    ),
]


def missing_extra() -> str:
    """What to install if pictures and reports cannot be made here; empty if they can."""
    missing = [name for name in ("matplotlib", "jinja2") if find_spec(name) is None]
    if not missing:
        return ""
    return f"it needs {' and '.join(missing)}: pip install {' '.join(missing)}"


def refuse(option: str, words: str) -> NoReturn:
    """End with exit status 2 and what is wrong with an option."""
    raise typer.BadParameter(words, param_hint=option)


def names(
    option: str,
    given: str,
    there_is: Iterable[str],
    groups: Mapping[str, Iterable[str]] | None = None,
) -> tuple[str, ...]:
    """A list that is divided by commas, of known names.

    Args:
        option: that it was given to.
        given: the list; "all" are all that there is.
        there_is: the known names.
        groups: lists of names that have a name of their own, as "all" has.

    Example:
        >>> names("--case", "a, b", ["a", "b", "c"]), names("--case", "all", ["a", "b", "c"])
        (('a', 'b'), ('a', 'b', 'c'))
        >>> names("--case", "a,real", ["a"], {"real": ["b", "c"]})
        ('a', 'b', 'c')
    """
    groups = groups or {}
    known = [*there_is, *(name for group in groups.values() for name in group)]
    lists = {"all": [*there_is]} | {name: [*group] for name, group in groups.items()}
    choice = f"choose from {', '.join([*known, *groups])}"
    found: list[str] = []
    for name in filter(None, map(str.strip, given.split(","))):
        if name not in known and name not in lists:
            refuse(option, f"unknown {name!r}: {choice}")
        found += lists.get(name, [name])
    if not found:
        refuse(option, f"unknown {given!r}: {choice}")
    return tuple(dict.fromkeys(found))


def rate(given: str) -> float:
    """Bits a second of a speed.

    Example:
        >>> rate("250mbit")
        250000000.0
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", given.strip().lower())
    if match is None or float(match[1]) == 0:
        refuse("--link", f"{given!r} is not a speed: write it as 1gbit or 250mbit")
    return float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]]


def cases_of(
    given: str | None,
    default: str,
    own: dict[str, Any],
    kind: dict[str, Any],
    size: float = 1.0,
    density: float | None = None,
    real: Mapping[str, Case] | None = None,
) -> tuple[Case, ...]:
    """The cases that options ask for.

    Args:
        given: names of cases, or None: the case "own" if there are sizes of one's own, else those
            of `default`.
        own: sizes; those that are None are not given.
        kind: what else all cases are to have.
        size: times the rows and the height of a case.
        density: rows over height, which gives the one of them that is not given.
        real: cases of real work that can be asked for, too, also by the name "real".
    """
    own = {name: value for name, value in own.items() if value is not None}
    if density is not None and "rows" in own and "height" in own:
        refuse("--density", "density is --rows divided by --height: give two of the three")
    known = CASES | dict(real or {})
    groups = {"real": real} if real else None
    cases = [known[name] for name in names("--case", given or default, CASES, groups)]
    if given is None and (own or density is not None):
        cases = [replace(CASES["uniform"], name="own")]
    made = []
    for case in cases:
        case = replace(case.scaled(size), **own, **kind)
        if density is not None and "rows" in own:
            case = replace(case, height=max(1, round(case.rows / density)))
        elif density is not None:
            case = replace(case, rows=max(1, round(case.height * density)))
        if (fault := case.fault()) is not None:
            refuse(f"case {case.name}", fault)
        made.append(case)
    return tuple(made)


def launched(ranks: int | None) -> bool:
    """Whether a launcher (torchrun, `tools/netlab`) made this process one of the ranks.

    RANK and WORLD_SIZE are set then, and `--ranks` must not say another number.
    """
    size = os.environ.get("WORLD_SIZE")
    if size is None or "RANK" not in os.environ:
        return False
    if ranks not in (None, int(size)):
        refuse("--ranks", f"{ranks}, but the launcher started {size}: leave --ranks out")
    return True


@contextmanager
def failing(command: str, status: int) -> Iterator[None]:
    """An error of weft or of the system is one line, and that exit status."""
    try:
        yield
    except (weft.Error, OSError) as error:
        typer.echo(f"weft {command}: {error}", err=True)
        raise typer.Exit(status) from None
