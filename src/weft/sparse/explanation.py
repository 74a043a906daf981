"""What a call would run, and why, as a value that prints in two lines."""

from __future__ import annotations

from dataclasses import dataclass

from .choose import Line
from .sizes import Sizes


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a call would run, and why. Prints both, and the bound.

    Attributes:
        chosen: the algorithm.
        why: the line of the rule that decides (`weft.sparse.choose`), in words.
        bound: bytes that the average rank must receive by any exact schedule, an index counted as
            4: at least and at most, since nobody knows before the call which rows ranks share.
        sizes: by which it was chosen.
    """

    chosen: str
    why: str
    bound: tuple[float, float]
    sizes: Sizes

    @classmethod
    def of(cls, line: Line, sizes: Sizes) -> Explanation:
        """Of a call of these sizes."""
        least, most = map(sizes.bound, sizes.union)
        return cls(*line, (least, most), sizes)

    def __str__(self) -> str:
        least, most = (f"{each:.0f}" for each in self.bound)
        between = least if least == most else f"{least} to {most}"
        return f"{self.chosen}: {self.why}\nbound: {between} bytes a rank"

    __repr__ = __str__
