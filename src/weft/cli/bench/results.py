"""What was found, as plain values: the head, one row for each contender and case, and JSON of both.

Nothing here communicates or draws.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cases import Case
    from .oracle import Sizes

__all__ = ["OWN", "Head", "Row", "summary", "write"]

OWN = "weft:"
"""What the names of weft's own contenders begin with: weft, too, has an algorithm called dense."""


@dataclass(frozen=True, slots=True)
class Head:
    """With what, on what and how it was measured."""

    weft: str
    torch: str
    python: str
    kernels: str
    ranks: int
    hosts: int
    threads: int
    cores: int | None
    iters: int
    warmup: int
    checked: bool
    seed: int
    link: float | None

    def lines(self) -> list[str]:
        """The head in words, one fact or a few on each line."""
        link = "not given" if self.link is None else f"{self.link / 1e6:g} Mbit/s a rank"
        check = "results checked" if self.checked else "results not checked"
        lines = [
            f"weft {self.weft}, torch {self.torch}, python {self.python}, kernels: {self.kernels}",
            f"ranks {self.ranks}, hosts {self.hosts}, cores of this host {self.cores}, link {link}",
            f"{self.iters} iterations after {self.warmup} to warm up, {check}, seed {self.seed}",
            "ms: median of the slowest rank's time; spread: its quartiles; MB: sent by the average "
            "rank",
            "xbound: bytes sent / bytes of the bound; xlink: time / time of the bound's bytes on "
            "the link; peer/x: the peer's time / this time, above 1 this is faster",
        ]
        if self.ranks == 1:
            lines.append("one rank alone communicates nothing: --ranks 4 starts four")
        return lines


@dataclass(frozen=True, slots=True)
class Row:
    """What one contender did in one case.

    Attributes:
        case: name of the case; `setting` has all of it.
        distinct: mean over ranks of the distinct rows of a rank.
        total, union: K and U.
        name: who was asked: `weft:` and the algorithm given, or a peer.
        chosen: the algorithm of weft that ran, None for peers.
        status: "ok", "refused" (does not serve this case) or "wrong".
        why: of a status that is not ok.
        seconds: of each iteration, the slowest rank's.
        sent_bytes: by the average rank; None for peers, which do not count.
        most_bytes: by the rank that sent most.
        messages: by the average rank.
        bound_bytes: that the average rank must receive.
        bound_seconds: what those take on the link, None if no link is given.
        times: for each peer, the peer's median over this one's: above 1, this one is faster.
    """

    case: str
    distinct: float
    total: int
    union: int
    name: str
    chosen: str | None
    status: str
    why: str
    seconds: list[float]
    sent_bytes: float | None
    most_bytes: int | None
    messages: float | None
    bound_bytes: float
    bound_seconds: float | None
    setting: dict[str, Any]
    times: dict[str, float] = field(default_factory=dict)

    @property
    def own(self) -> bool:
        """weft's, not a peer's."""
        return self.name.startswith(OWN)

    @property
    def median(self) -> float | None:
        """Seconds."""
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def quartiles(self) -> tuple[float, float] | None:
        """Seconds; the first and the third."""
        if not self.seconds:
            return None
        if len(self.seconds) == 1:
            return self.seconds[0], self.seconds[0]
        first, _, third = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return first, third

    @property
    def bytes_ratio(self) -> float | None:
        """Bytes sent over the bound's."""
        return _over(self.sent_bytes, self.bound_bytes)

    @property
    def time_ratio(self) -> float | None:
        """Time over what the bound's bytes take on the link."""
        return _over(self.median, self.bound_seconds)

    def beside(self, rows: Sequence[Row]) -> Row:
        """This row with its ratios to the peers among the rows of its case."""
        mine = self.median
        if mine is None:
            return self
        others = {row.name: row.median for row in rows if not row.own and row.name != self.name}
        ratios = {name: _over(median, mine) for name, median in others.items()}
        known = {name: ratio for name, ratio in ratios.items() if ratio is not None}
        return replace(self, times=known)

    def json(self) -> dict[str, Any]:
        """All of it and what is computed from it, for `json.dumps`."""
        computed = {
            "own": self.own,
            "median": self.median,
            "quartiles": self.quartiles,
            "bytes_ratio": self.bytes_ratio,
            "time_ratio": self.time_ratio,
        }
        return asdict(self) | computed


def summary(
    case: Case,
    counted: Sizes,
    name: str,
    status: str,
    why: str,
    seconds: Sequence[float] = (),
    records: Sequence[Any] = (),
    *,
    link: float | None,
) -> Row:
    """The row of one contender; `records` are what weft noted on each rank, Nones for a peer."""
    noted = [record for record in records if record is not None]
    sent = [int(record.sent_bytes) for record in noted]
    return Row(
        case=case.name,
        distinct=counted.mean,
        total=counted.total,
        union=counted.union,
        name=name,
        chosen=str(noted[0].algorithm) if noted else None,
        status=status,
        why=why,
        seconds=list(seconds),
        sent_bytes=statistics.fmean(sent) if sent else None,
        most_bytes=max(sent) if sent else None,
        messages=statistics.fmean(record.messages for record in noted) if noted else None,
        bound_bytes=counted.bound_bytes,
        bound_seconds=counted.bound_bytes * 8 / link if link else None,
        setting=asdict(case),
    )


def write(path: Path, head: Head, rows: Sequence[Row]) -> None:
    """Write head and rows as JSON: `{"head": {...}, "rows": [...]}`; times in seconds."""
    found = {"head": asdict(head), "rows": [row.json() for row in rows]}
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _over(one: float | None, other: float | None) -> float | None:
    if one is None or not other:
        return None
    ratio = one / other
    return ratio if math.isfinite(ratio) else None
