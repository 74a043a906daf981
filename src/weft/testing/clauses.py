"""A contract as numbered clauses, each of which somebody's code keeps, breaks, or need not keep."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.errors import WeftError
from ..wire.interface import Failure, Wire

COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "prod": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
"""How two ranks' contributions to a reduction combine, by the name of the op."""


class Outcome(NamedTuple):
    """What a clause found.

    Attributes:
        number: of the clause, from 1.
        title: what it demands.
        error: what is wrong, or "".
        skipped: why it does not apply here, or "".
    """

    number: int
    title: str
    error: str = ""
    skipped: str = ""

    def __str__(self) -> str:
        verdict = "ok"
        if self.skipped:
            verdict = f"skipped: {self.skipped}"
        if self.error:
            verdict = f"FAILED: {self.error}"
        return f"{self.number:2}  {self.title}  {verdict}"


def title_of(body: Callable[..., object]) -> str:
    """The title of a clause: the first line of its docstring."""
    assert body.__doc__ is not None
    return body.__doc__.splitlines()[0].rstrip(".")


def asked_for(clauses: Iterable[int], count: int) -> set[int]:
    """The numbers of the clauses to try; all, where none is asked for.

    Raises:
        WeftError: no clause of the `count` there are has one of these numbers.
    """
    known = set(range(1, count + 1))
    asked = set(clauses) or known
    unknown = asked - known
    if unknown:
        raise WeftError(f"clauses have numbers from 1 to {count}, not {min(unknown)}")
    return asked


def tried(number: int, title: str, check: Callable[[], str | None]) -> Outcome:
    """What comes of a clause: whatever it raises is an outcome, and the next ones are tried.

    A check may return why there was nothing to try.
    """
    error = ""
    skipped = None
    try:
        skipped = check()
    except Exception as failure:
        notes = "".join(f" ({note})" for note in getattr(failure, "__notes__", ()))
        kind = "" if isinstance(failure, AssertionError) else f"{type(failure).__name__}: "
        error = f"{kind}{failure}{notes}"
    return Outcome(number, title, error, skipped or "")


def stated(wire: Wire, body: Callable[[Wire], Any]) -> Any:
    """Run the body of a clause on a wire, and close that; a rank that raises aborts it before.

    What the body raises says in which line of it, if it has no words.
    """
    try:
        return body(wire)
    except BaseException as error:
        line = _line_of(body, error)
        if not isinstance(error, AssertionError):
            error.add_note(f"in: {line}")
        elif not error.args:
            error.args = (line,)
        text = f"rank {wire.rank} raised {type(error).__name__}: {error}"
        wire.abort(Failure("aborted", wire.rank, text))
        raise
    finally:
        wire.close()


def _line_of(body: Callable[..., Any], error: BaseException) -> str | None:
    """The line of the body's module that the error comes from."""
    function = body.func if isinstance(body, functools.partial) else body
    module = sys.modules[function.__module__]
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame.line for frame in frames if frame.filename == module.__file__]
    return own[-1] if own else frames[-1].line


def raise_if_broken(subject: str, outcomes: Sequence[Outcome]) -> None:
    """Raise an AssertionError that lists the clauses that were broken, if any were."""
    broken = [str(outcome) for outcome in outcomes if outcome.error]
    if broken:
        lines = "\n".join(broken)
        raise AssertionError(f"{subject} breaks {len(broken)} of {len(outcomes)} clauses:\n{lines}")
