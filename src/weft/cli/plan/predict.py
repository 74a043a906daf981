"""Predictions: what so many ranks would bring to a call, what the rule would take, and its time.

An index that a draw hits with probability p is in the union of n draws with probability
1 - (1 - p)^n. For rows drawn independently that is all there is to know; a recorded run says
how large the union of its ranks was, and other numbers of ranks are taken to overlap as if the
same number of places were filled independently.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import weft

from ..bench.cases import Case
from ..bench.results import VERSION
from ..counted import Counted
from .forecast import Forecast, forecasts

_HEAD, _BINS = 1 << 20, 1 << 13  # probabilities of their own, and shared ones

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Drawing:
    """What a rank brings, and how it overlaps with others.

    Attributes:
        case: what it is called, its height, and the values of a row.
        rows: rows of a rank, its duplicates removed.
        union: rows in the union of so many ranks.
    """

    case: Case
    rows: float
    union: Callable[[int], float]

    def counted(self, ranks: int, per_host: int = 1) -> Counted:
        """A call of so many ranks, some of which share a host."""
        case, rows = self.case, round(self.rows)
        op = weft.kernels.OPS[case.op]
        partial = op.accumulator(case.torch_dtype) if op.rounds else case.sent_dtype
        union = min(rows * ranks, max(rows, round(self.union(ranks))))
        hosts = weft.sparse.Hosts(tuple(rank // per_host for rank in range(ranks)))
        counts = [len(neighbours) for neighbours in hosts.ranks]
        united = {count: (self.union(count), self.union(ranks - count)) for count in {*counts}}
        sizes = weft.sparse.Sizes(
            ranks,
            total=rows * ranks,
            most=rows,
            fewest=rows,
            height=case.height,
            row=case.sent_row_bytes,
            partial=case.width * partial.itemsize,
            index=4 if case.height <= 2**31 else 8,
            places=case.height,
            hosts=hosts,
        )
        return Counted(sizes, union, tuple(united[count] for count in counts))

    def with_rows(self, rows: float) -> Drawing:
        """Ranks that bring so many rows, drawn independently."""
        union = _independent(rows, self.case.height)
        return replace(self, rows=rows, union=union)


def drawn(case: Case) -> Drawing:
    """Rows drawn as `weft bench` draws them."""
    if case.distribution == "identical":
        return Drawing(case, case.rows, lambda ranks: case.rows)
    if case.distribution == "uniform":
        return Drawing(case, case.rows, _independent(case.rows, case.height))
    chances, places = _zipf(case.height)

    @lru_cache
    def union(ranks: int) -> float:
        return float(-(places * np.expm1(case.rows * ranks * np.log1p(-chances))).sum())

    return Drawing(case, union(1), union)


def _independent(rows: float, places: float) -> Callable[[int], float]:
    return lambda ranks: float(-places * np.expm1(ranks * np.log1p(-min(rows / places, 1 - 1e-15))))


def recorded(path: Path) -> list[Drawing]:
    """The cases of a run that `weft bench --json` recorded.

    Raises:
        weft.WeftError: the file is none.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["version"] != VERSION:
            raise ValueError(f"of version {found['version']}, this weft reads {VERSION}")
        cases = [_of_record(row) for row in {row["case"]: row for row in found["rows"]}.values()]
    except OSError as error:
        raise weft.WeftError(f"{path} cannot be read: {error.strerror}") from None
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        why = f"{type(error).__name__} {error}"
        raise weft.WeftError(f"{path} is no record of weft bench --json: {why}") from None
    if not cases:
        raise weft.WeftError(f"{path} is a record without a case")
    return cases


def _of_record(row: dict[str, Any]) -> Drawing:
    names = {field.name for field in fields(Case)} - {"name"}
    case = Case(row["case"], **{name: row[name] for name in names})
    ranks = int(row["ranks"])
    mean, total, union = float(row["distinct"]), int(row["total"]), int(row["union"])
    if ranks < 2:
        raise ValueError(f"of {ranks} ranks, which says nothing of how several overlap")
    most = min(total, case.height)
    if case.fault() or not (0 < mean <= union <= most and total <= ranks * union):
        raise ValueError(
            f"{case}: {mean} rows a rank, {total} in all, {union} in the union: these do not go "
            "together"
        )
    places = _places(mean, union, ranks)
    return Drawing(case, mean, lambda some: min(_independent(mean, places)(some), some * mean))


def _places(mean: float, union: int, ranks: int) -> float:
    """The number of places for which independent draws give a union of this size."""
    low, high = max(mean, 1.0), max(2.0 * ranks * mean, 1.0) * 1e4
    if union <= low:
        return low
    for _ in range(36):  # to less than a billionth
        middle = math.sqrt(low * high)
        if middle * (1 - (1 - min(1.0, mean / middle)) ** ranks) < union:
            low = middle
        else:
            high = middle
    return high


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


class Named(NamedTuple):
    """A link between hosts, and what it is called."""

    name: str
    link: weft.wire.Link


@dataclass(frozen=True, slots=True)
class Prediction:
    """What was asked, and the answer.

    Attributes:
        drawing, link, ranks, per_host: what was asked.
        counted: the call.
        chosen: the algorithm that the rule takes.
        forecasts: of each algorithm that can serve, by its name.
    """

    drawing: Drawing
    link: Named
    ranks: int
    per_host: int
    counted: Counted
    chosen: str
    forecasts: dict[str, Forecast]

    @property
    def least_ms(self) -> float:
        """Milliseconds that any exact schedule takes with these ranks on these hosts."""
        return 1e3 * self.counted.least_seconds(self.link.link.beta)

    def json(self) -> dict[str, Any]:
        """As plain values; milliseconds, bytes received and messages sent by a rank."""
        return {
            "case": self.drawing.case.name,
            "link": self.link.name,
            "ranks": self.ranks,
            "per_host": self.per_host,
            "rows": self.counted.sizes.most,
            "union": self.counted.union,
            "bound_bytes": self.counted.bound,
            "host_bound_bytes": self.counted.host_bound,
            "least_time_milliseconds": self.least_ms,
            "chosen": self.chosen,
            "algorithms": {name: each._asdict() for name, each in self.forecasts.items()},
        }


def predict(
    drawings: Sequence[Drawing], links: Sequence[Named], ranks: Sequence[int], per_host: int = 1
) -> Iterator[Prediction]:
    """All combinations, the number of ranks changing quickest; neighbours share a host.

    Those that would all be on one host, whose link they do not use, are left out.
    """
    for one, link, count in product(drawings, links, ranks):
        if per_host < count:
            counted = one.counted(count, per_host)
            chosen, of_all = forecasts(counted, link.link)
            yield Prediction(one, link, count, per_host, counted, chosen, of_all)
