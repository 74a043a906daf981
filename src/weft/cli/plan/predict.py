"""Predictions: what so many ranks would bring to a call, and what `auto` would choose for it.

An index that a draw hits with probability p is in the union of n draws with probability
1 - (1 - p)^n. For rows drawn independently that is all there is to know; a recorded run says
how large the union of its ranks was, and other numbers of ranks are taken to overlap as if the
same number of places were filled independently.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

import weft

_HEAD, _BINS = 1 << 20, 1 << 13  # probabilities of their own, and shared ones

Floats = npt.NDArray[np.float64]


class Values(NamedTuple):
    """The values of a row.

    Attributes:
        row: their bytes.
        partial: their bytes while only some ranks' are added.
    """

    row: int
    partial: int

    @classmethod
    def of(cls, width: int, dtype: torch.dtype, op: str) -> Values:
        """So many values, which are reduced by one of weft's own operations."""
        wider = weft.kernels.OPS[op].accumulator(dtype)
        return cls(width * dtype.itemsize, width * wider.itemsize)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a rank brings, and how it overlaps with others.

    Attributes:
        name: what it is called.
        rows: rows of a rank, its duplicates removed.
        height: rows of the dense tensor, None if unknown.
        values: of a row.
        union: rows in the union of so many ranks.
    """

    name: str
    rows: float
    height: int | None
    values: Values
    union: Callable[[int], float]

    def load(self, ranks: int, per_host: int = 1) -> weft.sparse.Load:
        """The load of a call of so many ranks, some of which share a host."""
        rows = round(self.rows)
        highest = self.height or round(self.union(ranks))
        return weft.sparse.Load(
            ranks=ranks,
            total=rows * ranks,
            most=rows,
            fewest=rows,
            union=min(rows * ranks, max(rows, round(self.union(ranks)))),
            height=self.height,
            index=4 if highest <= 2**31 else 8,
            places=highest,
            hosts=weft.sparse.Hosts(tuple(rank // per_host for rank in range(ranks))),
            **self.values._asdict(),
        )

    def times(self, factor: float) -> Sizes:
        """Ranks that bring so many times the rows, of as many as there are, independently."""
        places = self.height or 1 << 62
        rows = min(self.rows * factor, float(places))
        return replace(self, rows=rows, union=_independent(rows, float(places)))


def drawn(name: str, rows: int, height: int, values: Values, distribution: str) -> Sizes:
    """Rows drawn as `weft bench` draws them: uniform, zipf or identical."""
    if distribution == "identical":
        return Sizes(name, rows, height, values, lambda ranks: float(rows))
    if distribution == "zipf":
        chances, places = _zipf(height)

        def union(ranks: int) -> float:
            return float(-(places * np.expm1(rows * ranks * np.log1p(-chances))).sum())

        return Sizes(name, union(1), height, values, lru_cache(union))
    return Sizes(name, rows, height, values, _independent(float(rows), float(height)))


def recorded(path: Path) -> list[Sizes]:
    """The cases of a run that `weft bench --json` recorded.

    Raises:
        weft.WeftError: the file is none.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        ranks = int(found["head"]["ranks"])
        rows = {row["case"]: row for row in found["rows"]}
        cases = [_of_record(row, ranks) for row in rows.values()]
    except OSError as error:
        raise weft.WeftError(f"{path} cannot be read: {error.strerror}") from None
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise weft.WeftError(
            f"{path} is no record of weft bench --json: {type(error).__name__} {error}"
        ) from None
    if not cases:
        raise weft.WeftError(f"{path} is a record without a case")
    return cases


def _of_record(row: dict[str, Any], ranks: int) -> Sizes:
    setting = row["setting"]
    height, dtype = int(setting["height"]), getattr(torch, setting["dtype"])
    values = Values.of(int(setting["width"]), dtype, setting["op"])
    mean, total, union = float(row["distinct"]), int(row["total"]), int(row["union"])
    if ranks < 2:
        raise ValueError(f"of {ranks} ranks, which says nothing of how several overlap")
    if not (0 < mean <= union <= min(total, height) and total <= ranks * union and values.row > 0):
        raise ValueError(
            f"{row['case']}: {mean} rows a rank, {total} in all, {union} in the union, height "
            f"{height}, {values.row} bytes each, which do not go together"
        )
    seen = weft.sparse.Load(
        *(ranks, total, round(mean), round(mean), union, height),
        *(values.row, values.partial, 4),
    )
    return Sizes(row["case"], mean, height, values, seen.union_of)


def _independent(rows: float, places: float) -> Callable[[int], float]:
    return lambda ranks: float(-places * np.expm1(ranks * np.log1p(-min(rows / places, 1 - 1e-15))))


@lru_cache(maxsize=2)
def _zipf(height: int) -> tuple[Floats, Floats]:
    """Probabilities of Zipf(1.0) over 1, 2, ..., height, and how many have each.

    The rare ones are put together where they hardly differ: a table may be larger than memory.
    """
    edges = np.arange(1, min(height, _HEAD) + 2, dtype=np.float64)
    if height > _HEAD:
        rare = np.geomspace(edges[-1], height + 1.0, _BINS)
        edges = np.unique(np.concatenate([edges, np.round(rare)]))
    places = np.diff(edges)
    chances = np.where(places == 1, 1 / edges[:-1], np.log1p(places / (edges[:-1] - 0.5)) / places)
    chances /= (chances * places).sum()
    return np.minimum(chances, 1 - 1e-12), places


@dataclass(frozen=True, slots=True)
class Named:
    """A link with what it is called.

    Attributes:
        within: it is that of ranks on one host.
    """

    name: str
    link: weft.sparse.Link
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
    answer: weft.sparse.Explanation

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
            "algorithms": [asdict(line) for line in self.answer.lines],
        }


def predict(
    sizes: Sequence[Sizes], links: Sequence[Named], ranks: Sequence[int], per_host: int = 1
) -> list[Prediction]:
    """All combinations, the number of ranks changing quickest; neighbours share a host.

    Those that would all be on one host, whose link they do not use, are left out.
    """
    return [
        Prediction(
            *(one, link, count, shared), weft.sparse.predicted(one.load(count, shared), link.link)
        )
        for one in sizes
        for link in links
        for count in ranks
        if (shared := link.per_host(count, per_host)) < count or link.within
    ]


def groups_of(found: Sequence[Prediction]) -> list[list[Prediction]]:
    """Those of one case and link together."""
    groups: dict[tuple[str, str], list[Prediction]] = {}
    for one in found:
        groups.setdefault((one.sizes.name, one.link.name), []).append(one)
    return list(groups.values())
