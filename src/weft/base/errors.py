"""The exceptions of weft: one base, two families.

```
Error                    whatever weft raises on purpose
├── WeftError            the caller erred: every rank of the group raises the same text,
│                        nothing was lost, and the next call works
│   └── StillRunning     a wait for asynchronous work timed out: it goes on, wait again
└── WireError            a peer or a link failed: the group is broken for good and says so;
                         start the group again (under torchrun: let it restart the job)
```

A `WeftError` that is raised before anything could be sent (a group the caller is not in, use
before `weft.init`, use after `weft.shutdown`) is raised on the calling rank alone.

A function that users call to communicate is an `entry`: there the traceback of an error ends, whose
text says what a user can mend, and that of Ctrl-C. With WEFT_TRACEBACK=1 in the environment the
traceback goes on to where weft raised the error.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ParamSpec, TypeVar

from ._torch import uncompiled, without_modes, without_transforms
from .frames import is_within_libraries

P = ParamSpec("P")
T = TypeVar("T")
_SIMILAR = 0.7  # of difflib's ratio: names that are so alike were mixed up
_LONGEST = 500  # characters of an error that travel


class Error(Exception):
    """Base of everything weft raises on purpose."""

    __module__ = "weft"  # as users name it, in a traceback, too


class WeftError(Error, ValueError):
    """The caller erred; the same text is raised on every rank and the next call works.

    Attributes:
        is_conclusion: whether every rank of the call that runs raises it: see `conclusion`.
    """

    __module__ = "weft"
    is_conclusion = False


def check(wrong: str | None) -> None:
    """Raise WeftError with what is wrong, if anything is."""
    if wrong is not None:
        raise WeftError(wrong)


def conclusion(text: str) -> WeftError:
    """The error that every rank of an open call raises, since it follows from what all know.

    Behind the opening of a call no other rank hears what one raises: any other error there ends the
    group.
    """
    error = WeftError(text)
    error.is_conclusion = True
    return error


class StillRunning(WeftError, TimeoutError):
    """A wait for asynchronous work timed out, on this rank alone: it goes on, wait again."""

    __module__ = "weft"


class WireError(Error, ConnectionError):
    """A peer or a link failed; the group can no longer be used.

    Attributes:
        rank: the rank that raises, in the group's numbering.
        culprit: the rank that is to blame, or None if nobody could be named.
    """

    __module__ = "weft"

    def __init__(self, text: str, *, rank: int | None = None, culprit: int | None = None) -> None:
        super().__init__(text)
        self.rank = rank
        self.culprit = culprit


class AbsentError(TimeoutError):
    """Some ranks did not come, or could not be reached, in time; users get a WireError of it.

    Attributes:
        ranks: these ranks, in order.
    """

    def __init__(self, ranks: Sequence[int], what: str) -> None:
        super().__init__(f"{names(ranks)} {what}")
        self.ranks = list(ranks)


def entry(function: Callable[P, T]) -> Callable[P, T]:
    """The same function, as users call it: what is below it is not in the traceback of an error.

    torch.compile does not look into it, either (`uncompiled`), and no mode is active in it.
    """
    plainly = without_modes(function)

    @functools.wraps(function)
    def inside(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return plainly(*args, **kwargs)
        except Error as error:
            if _ends_with_the_call():
                error.__traceback__ = None  # `raise` alone adds no frame: the caller's is the last
            elif error.__cause__ is None:
                error.__suppress_context__ = False
            raise
        except KeyboardInterrupt as interrupt:
            # in a function of the program's, which weft called, its frames say where
            if _ends_with_the_call() and is_within_libraries(interrupt.__traceback__):
                interrupt.__traceback__ = None
            raise

    return uncompiled(inside)


def _ends_with_the_call() -> bool:
    """Whether tracebacks do not go on into weft."""
    return os.environ.get("WEFT_TRACEBACK", "") in ("", "0")


def untransformed(function: Callable[P, T]) -> Callable[P, T]:
    """An `entry` that is outside of the transforms of torch.func's that its caller is in."""
    return entry(without_transforms(function))


def meant(given: object, known: Iterable[str], others: Mapping[str, str] | None = None) -> str:
    """A question to add to an error about a name that is unknown; empty: nothing is like it.

    Args:
        given: the name.
        known: those that there are.
        others: what people call some of these elsewhere.

    Example:
        >>> meant("spilt", ["split", "gather"]), meant("mean", ["avg"], {"mean": "avg"})
        (" (did you mean 'split'?)", " (did you mean 'avg'?)")
        >>> meant("oak", ["split", "gather"])
        ''
    """
    if not isinstance(given, str):
        return ""
    name = (others or {}).get(given.lower()) or nearest(given.lower(), known)
    return f" (did you mean {name!r}?)" if name else ""


def nearest(given: str, known: Iterable[str]) -> str | None:
    """The name that was mixed up with an unknown one; None: nothing is like it.

    Example:
        >>> nearest("spilt", ["split", "gather"])
        'split'
    """
    near = difflib.get_close_matches(given, list(known), 1, _SIMILAR)
    return near[0] if near else None


def names(ranks: Sequence[int]) -> str:
    """The ranks in words.

    Example:
        >>> names([2]), names([1, 2, 5])
        ('rank 2', 'ranks 1, 2 and 5')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def summed_up(text: str, most: int, short: str) -> str:
    """What ranks compare: the text or, if it has more than `most` bytes, `short` and a digest.

    Example:
        >>> summed_up("a, b", 10, "2 letters"), summed_up("a, b, c, d", 9, "4 letters")
        ('a, b', '4 letters (digest 68424a970635)')
    """
    data = text.encode(errors="backslashreplace")
    if len(data) <= most:
        return text
    return f"{short} (digest {hashlib.sha256(data).hexdigest()[:12]})"


def in_short(text: str) -> str:
    """As much of an error's text as travels to other ranks, on one line.

    Example:
        >>> in_short("bad  address, at line 3")
        'bad address, at line 3'
    """
    return " ".join(text.split())[:_LONGEST]
