"""What a call would run, and why: the table of all algorithms, as text.

`explanation` makes it of a call's sizes. `together` and `after_stating` are for lists of tables,
which may take several calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..call.combining import opening_rounds
from .choose import Line, chosen, is_eager, why_not
from .registry import ALGORITHMS, ALONE, EAGER
from .sizes import Sizes
from .traffic import Traffic, of_eager

_CHOSEN = "chosen"
_RULED_OUT = "ruled out"
_TITLES = "algorithm", "rounds", "messages", "bytes", "of bound", ""


@dataclass(frozen=True, slots=True)
class _Line:
    algorithm: str
    rounds: int | None
    messages: int | None
    bytes: tuple[int, int] | None
    of_bound: tuple[float, float] | None
    verdict: str

    @property
    def cells(self) -> tuple[str, ...]:
        """As they stand in the table; "-": nobody has said."""
        rounds, messages = (
            "-" if each is None else str(each) for each in (self.rounds, self.messages)
        )
        nbytes = "-" if self.bytes is None else _range(*map(str, self.bytes))
        of_bound = "-"
        if self.of_bound is not None:
            of_bound = _range(*(f"{each:.2f}" for each in self.of_bound))
        return self.algorithm, rounds, messages, nbytes, of_bound, self.verdict


def _range(least: str, most: str) -> str:
    return least if least == most else f"{least} to {most}"


@dataclass(frozen=True, slots=True)
class Batch:
    """Tables of a list that are reduced together: of one row shape and dtype.

    Attributes:
        tables: their numbers in the list.
        dtype: of their values.
        row_shape: shape of a row.
    """

    tables: tuple[int, ...]
    dtype: torch.dtype
    row_shape: tuple[int, ...]

    def __str__(self) -> str:
        who = "table" if len(self.tables) == 1 else "tables"
        numbers = ", ".join(map(str, self.tables))
        return f"{who} {numbers}: {str(self.dtype).removeprefix('torch.')} rows of {self.row_shape}"


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a call would run, and why; prints as a table.

    How many rows the result will have nobody knows before the call. So what depends on that is a
    range: from the rows of the rank with most, to those of all ranks together.

    Attributes:
        chosen: name of the algorithm that would run; several, of a list, joined by " and ".
        why: the line of the rule that decided (`weft.sparse.choose`), in words.
        sizes: by which it was chosen.
        lines: for each algorithm: algorithm, rounds (that the average rank waits for, those that
            open the call among them), messages (sent), bytes (received, at least and at most),
            of_bound (bytes, as a multiple of the bound), verdict ("chosen", "" or "ruled out" and
            why). The chosen one comes first, those that are ruled out last. Empty in a group of
            one, and of a list of which no rank has rows.
        groups: of a list, the tables that are reduced together; those without rows are in none.
        calls: of a list that takes several calls, what each would do; `lines` is empty then.
        device: where the rows are, and for an accelerator how they travel: "cuda (nccl)".
        stating: rounds in which ranks state the tables of a list, before its first call; they are
            among those that open that call. Without rows there is no call, and they are all.
    """

    chosen: str
    why: str
    sizes: Sizes
    lines: tuple[_Line, ...]
    groups: tuple[Batch, ...] = ()
    calls: tuple[Explanation, ...] = ()
    device: str = "cpu"
    stating: int = 0

    @property
    def bound(self) -> tuple[float, float]:
        """Bytes that the average rank must receive, by any exact schedule: at least, and at most.

        An index counts as 4.
        """
        if self.calls:
            bounds = [call.bound for call in self.calls]
            return sum(least for least, _ in bounds), sum(most for _, most in bounds)
        least, most = map(self.sizes.bound, self.sizes.union)
        return least, most

    @property
    def _head(self) -> list[str]:
        """The lines above the table."""
        sizes = self.sizes
        text = [
            f"{sizes.ranks} rank{'s' * (sizes.ranks > 1)}, {sizes.total} rows in all "
            f"(most {sizes.most}, fewest {sizes.fewest}), {_range(*map(str, sizes.union))} in the "
            f"result, {sizes.row} bytes each; bound "
            f"{_range(*(f'{each:.0f}' for each in self.bound))} bytes a rank"
        ]
        if self.lines:
            text.append(f"{self.chosen}: {self.why}")
        if self.device != "cpu":
            text.append(f"rows on {self.device}")
        if self.calls:
            return [*text, f"{len(self.calls)} calls, one after the other:"]
        text += map(str, self.groups)
        if not self.lines:
            text.append(self._why_nothing_is_sent)
        return text

    @property
    def _why_nothing_is_sent(self) -> str:
        """Why there is no table of algorithms."""
        if self.sizes.ranks == 1:
            return "nothing is sent: the group has one rank"
        rounds = "the round" if self.stating == 1 else f"the {self.stating} rounds"
        return f"no rank has rows: nothing is sent after {rounds} in which ranks say so"

    def __str__(self) -> str:
        if self.calls:
            return "\n".join([*self._head, *map(str, self.calls)])
        if not self.lines:
            return "\n".join(self._head)
        rows = [_TITLES, *(line.cells for line in self.lines)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        text = []
        for name, *figures, verdict in rows:
            aligned = [f"{each:>{width}}" for each, width in zip(figures, widths[1:], strict=False)]
            text.append("  ".join([f"{name:{widths[0]}}", *aligned, verdict]).rstrip())
        return "\n".join([*self._head, *text])

    __repr__ = __str__


def explanation(sizes: Sizes, algorithm: str, index_bytes: int, carrier: str = "") -> Explanation:
    """The table of all algorithms for a call, with what would run.

    Args:
        sizes: of the call, `suited` to the link.
        algorithm: that was asked for, or "auto".
        index_bytes: of an index in the opening exchange.
        carrier: as for `chosen`.
    """
    if sizes.ranks == 1:
        return Explanation(ALONE, "", sizes, ())
    if algorithm == "auto" and is_eager(sizes, index_bytes):
        best = Line(EAGER, "all rows fit in the opening exchange")
        table = [_line(EAGER, sizes, of_eager(sizes, index_bytes), _CHOSEN)]
    else:
        best = chosen(sizes, algorithm, carrier)
        table = [_of_algorithm(best.algorithm, sizes, _CHOSEN)]
    serving = []
    ruled_out = []
    for name in sorted(ALGORITHMS.keys() - {best.algorithm}):
        reason = why_not(sizes, name)
        if reason is None:
            serving.append(_of_algorithm(name, sizes, ""))
        else:
            ruled_out.append(_of_algorithm(name, sizes, f"{_RULED_OUT}: {reason}"))
    return Explanation(best.algorithm, best.why, sizes, (*table, *serving, *ruled_out))


def _of_algorithm(name: str, sizes: Sizes, verdict: str) -> _Line:
    """The line of an algorithm, for the fewest and the most rows that the result may have."""
    traffic = ALGORITHMS[name].traffic
    if traffic is None:
        return _Line(name, None, None, None, None, verdict)
    least, most = (traffic(sizes, union) for union in sizes.union)
    return _line(name, sizes, least, verdict, most)


def _line(
    name: str, sizes: Sizes, least: Traffic, verdict: str, most: Traffic | None = None
) -> _Line:
    most = most or least
    rounds = opening_rounds(sizes.ranks) + max(least.rounds, most.rounds)
    messages = max(least.messages, most.messages)
    nbytes = round(least.bytes), round(most.bytes)
    bounds = map(sizes.bound, sizes.union)
    least_ratio, most_ratio = (
        got / bound if bound else 1.0 for got, bound in zip(nbytes, bounds, strict=True)
    )
    return _Line(name, rounds, messages, nbytes, (least_ratio, most_ratio), verdict)


def together(calls: Sequence[Explanation]) -> Explanation:
    """Several calls as one, whose sizes are the sums of theirs."""
    names = " and ".join(dict.fromkeys(call.chosen for call in calls))
    of_calls = [call.sizes for call in calls]
    total = sum(sizes.total for sizes in of_calls)
    sizes = of_calls[0].but(
        total=total,
        most=sum(sizes.most for sizes in of_calls),
        fewest=sum(sizes.fewest for sizes in of_calls),
        places=sum(sizes.places for sizes in of_calls),
        row=sum(sizes.total * sizes.row for sizes in of_calls) // max(1, total),
    )
    groups = tuple(group for call in calls for group in call.groups)
    return Explanation(names, "", sizes, (), groups, tuple(calls))


def after_stating(first: Explanation, rounds: int) -> Explanation:
    """The first call of a list, before which the list's tables are stated in so many rounds."""
    lines = [
        line if line.rounds is None else replace(line, rounds=line.rounds + rounds)
        for line in first.lines
    ]
    return replace(first, lines=tuple(lines), stating=rounds)
