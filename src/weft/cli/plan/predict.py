"""Predictions: for each link, sizes and number of ranks what `auto` would choose, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.sparse.choice import Explanation, predicted
from weft.wire.link import Link

from .sizes import Sizes

__all__ = ["Named", "Prediction", "predict"]


@dataclass(frozen=True, slots=True)
class Named:
    """A link with what it is called.

    Attributes:
        within: it is that of ranks on one host.
    """

    name: str
    link: Link
    within: bool = False

    def per_host(self, ranks: int, per_host: int) -> int:
        """Of so many ranks, those that share a host."""
        return ranks if self.within else per_host


@dataclass(frozen=True, slots=True)
class Prediction:
    """What was asked, and the answer for all algorithms."""

    sizes: Sizes
    link: Named
    ranks: int
    per_host: int
    answer: Explanation

    def json(self) -> dict[str, Any]:
        """As plain values; milliseconds, bytes received and messages sent by a rank."""
        load = self.answer.load
        return {
            "case": self.sizes.name,
            "link": self.link.name,
            "ranks": self.ranks,
            "per_host": self.per_host,
            "rows": load.most,
            "union": load.union,
            "bound_bytes": load.bound,
            "chosen": self.answer.chosen,
            "algorithms": [
                {
                    "algorithm": line.algorithm,
                    "milliseconds": line.milliseconds,
                    "bytes": line.bytes,
                    "messages": line.messages,
                    "of_bound": line.of_bound,
                    "verdict": line.verdict,
                }
                for line in self.answer.lines
            ],
        }


def predict(
    sizes: Sequence[Sizes], links: Sequence[Named], ranks: Sequence[int], per_host: int = 1
) -> list[Prediction]:
    """All combinations, the number of ranks changing quickest; neighbours share a host.

    Those that would all be on one host, whose link they do not use, are left out.
    """
    return [
        Prediction(*(one, link, count, shared), predicted(one.load(count, shared), link.link))
        for one in sizes
        for link in links
        for count in ranks
        if (shared := link.per_host(count, per_host)) < count or link.within
    ]
