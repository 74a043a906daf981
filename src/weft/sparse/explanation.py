"""What a call would run, and why, as a value that prints in two lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .choose import Line
from .sizes import Sizes


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a call would run, and why. Prints both, and the bound.

    Attributes:
        chosen: the algorithm; of a list that takes several calls, theirs, joined by " and ".
        why: the line of the rule that decides (`weft.sparse.choose`), in words.
        bound: bytes that the average rank must receive by any exact schedule, an index counted as
            4: at least and at most, since nobody knows before the call which rows ranks share.
        sizes: by which it was chosen; of several calls those of the first.
    """

    chosen: str
    why: str
    bound: tuple[float, float]
    sizes: Sizes

    @classmethod
    def of(cls, lines: Sequence[Line], sizes: Sequence[Sizes]) -> Explanation:
        """Of some calls, which run one after the other."""
        least, most = zip(*(map(each.bound, each.union) for each in sizes), strict=True)
        names, reasons = (dict.fromkeys(each) for each in zip(*lines, strict=True))
        bound = sum(least), sum(most)
        return cls(" and ".join(names), "; ".join(reasons), bound, sizes[0])

    def __str__(self) -> str:
        least, most = (f"{each:.0f}" for each in self.bound)
        between = least if least == most else f"{least} to {most}"
        return f"{self.chosen}: {self.why}\nbound: {between} bytes a rank"

    __repr__ = __str__
