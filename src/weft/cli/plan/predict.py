"""Predictions: what so many ranks would bring to a call, and what `auto` would choose for it.

An index that a draw hits with probability p is in the union of n draws with probability
1 - (1 - p)^n. For rows drawn independently that is all there is to know; a recorded run says
how large the union of its ranks was, and other numbers of ranks are taken to overlap as if the
same number of places were filled independently.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import weft

from ..bench.cases import Case
from ..bench.results import VERSION

_HEAD, _BINS = 1 << 20, 1 << 13  # probabilities of their own, and shared ones

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a rank brings, and how it overlaps with others.

    Attributes:
        case: what it is called, its height, and the values of a row.
        rows: rows of a rank, its duplicates removed.
        union: rows in the union of so many ranks.
        identical: all ranks bring the same rows.
    """

    case: Case
    rows: float
    union: Callable[[int], float]
    identical: bool = False

    def load(self, ranks: int, per_host: int = 1) -> weft.sparse.Load:
        """The load of a call of so many ranks, some of which share a host."""
        case, rows = self.case, round(self.rows)
        op = weft.kernels.OPS[case.op]
        partial = op.accumulator(case.torch_dtype) if op.rounds else case.sent_dtype
        union = min(rows * ranks, max(rows, round(self.union(ranks))))
        hosts = weft.sparse.Hosts(tuple(rank // per_host for rank in range(ranks)))
        counts = [len(neighbours) for neighbours in hosts.ranks]
        united = {count: (self.union(count), self.union(ranks - count)) for count in {*counts}}
        return weft.sparse.Load(
            *(ranks, rows * ranks, rows, rows, union, case.height),
            *(case.sent_row_bytes, case.width * partial.itemsize),
            index=4 if case.height <= 2**31 else 8,
            places=case.height,
            identical=self.identical,
            hosts=hosts,
            rows_of_hosts=tuple(united[count] for count in counts),
        )

    def with_rows(self, rows: float) -> Sizes:
        """Ranks that bring so many rows, drawn independently."""
        union = _independent(rows, self.case.height)
        return replace(self, rows=rows, union=union, identical=False)


def drawn(case: Case) -> Sizes:
    """Rows drawn as `weft bench` draws them."""
    if case.distribution == "identical":
        return Sizes(case, case.rows, lambda ranks: case.rows, identical=True)
    if case.distribution == "uniform":
        return Sizes(case, case.rows, _independent(case.rows, case.height))
    chances, places = _zipf(case.height)

    @lru_cache
    def union(ranks: int) -> float:
        return float(-(places * np.expm1(case.rows * ranks * np.log1p(-chances))).sum())

    return Sizes(case, union(1), union)


def _independent(rows: float, places: int) -> Callable[[int], float]:
    return lambda ranks: float(-places * np.expm1(ranks * np.log1p(-min(rows / places, 1 - 1e-15))))


def recorded(path: Path) -> list[Sizes]:
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


def _of_record(row: dict[str, Any]) -> Sizes:
    names = {field.name for field in fields(Case)} - {"name", "wire_dtype"}
    setting = {name: row[name] for name in names}
    wire_dtype = row.get("wire_dtype")  # files of earlier wefts have none
    case, ranks = Case(row["case"], **setting, wire_dtype=wire_dtype), int(row["ranks"])
    mean, total, union = float(row["distinct"]), int(row["total"]), int(row["union"])
    if ranks < 2:
        raise ValueError(f"of {ranks} ranks, which says nothing of how several overlap")
    most = min(total, case.height)
    if case.fault() or not (0 < mean <= union <= most and total <= ranks * union):
        raise ValueError(
            f"{case}: {mean} rows a rank, {total} in all, {union} in the union: these do not go "
            "together"
        )
    seen = weft.sparse.Load(
        *(ranks, total, round(mean), round(mean), union, case.height),
        *(case.sent_row_bytes, case.sent_row_bytes, 4),
    )
    return Sizes(case, mean, seen.union_of, identical=total == ranks * union)


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
    link: weft.sparse.Link


@dataclass(frozen=True, slots=True)
class Prediction:
    """What was asked, and the answer for all algorithms.

    Attributes:
        sizes, link, ranks, per_host: what was asked.
        load: of the call, with the rows of hosts, which a call of many ranks does not know.
        answer: by what a call knows.
    """

    sizes: Sizes
    link: Named
    ranks: int
    per_host: int
    load: weft.sparse.Load
    answer: weft.sparse.Explanation

    @property
    def times(self) -> dict[str, float]:
        """Milliseconds of each algorithm that serves."""
        return {
            line.algorithm: line.milliseconds
            for line in self.answer.lines
            if line.verdict == "chosen" or line.verdict.startswith("predicted")
        }

    @property
    def least_ms(self) -> float:
        """Milliseconds that any exact schedule takes with these ranks on these hosts."""
        return 1e3 * self.load.least_seconds(self.link.link)

    def json(self) -> dict[str, Any]:
        """As plain values; milliseconds, bytes received and messages sent by a rank."""
        load = self.load
        return {
            "case": self.sizes.case.name,
            "link": self.link.name,
            "ranks": self.ranks,
            "per_host": self.per_host,
            "rows": load.most,
            "union": load.union,
            "bound_bytes": load.bound,
            "host_bound_bytes": load.host_bound,
            "least_time_milliseconds": self.least_ms,
            "chosen": self.answer.chosen,
            "algorithms": [asdict(line) for line in self.answer.lines],
        }


def predict(
    sizes: Sequence[Sizes], links: Sequence[Named], ranks: Sequence[int], per_host: int = 1
) -> Iterator[Prediction]:
    """All combinations, the number of ranks changing quickest; neighbours share a host.

    Those that would all be on one host, whose link they do not use, are left out.
    """
    for one, link, count in product(sizes, links, ranks):
        if per_host < count:
            load = one.load(count, per_host)
            answer = weft.sparse.predicted(load, link.link)
            yield Prediction(one, link, count, per_host, load, answer)
