"""What was found: one row for each contender and case, and how it is shown and written.

The output is columns for people and for programs alike: one row a line, split by white space, `-`
where there is nothing to say, and lines that begin with `#` around it; so `grep -v '^#'`, awk and a
spreadsheet read it. A terminal also shows colours, and what goes on at the moment.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any, Self

import numpy as np
from rich.console import Console
from rich.text import Text

import weft

from ..show import listed, number
from .cases import Case

OWN = "weft:"
"""What the names of weft's own contenders begin with: weft, too, has an algorithm called dense."""

Found = tuple[str, Any]
"""What rank 0 tells: ("head", a dictionary) once, ("row", a `Row`), and ("doing", words)."""

Status = tuple[str, str]
"""What became of a contender: "ok", "refused" (does not serve this case) or "wrong", and why."""

Row = dict[str, Any]
"""What one contender did in one case, as it is written to a file; None: not known.

* case: its name; setting: all of it; distinct: rows of the average rank; total, union: K and U;
* name: who was asked: `weft:` and the algorithm given, or a peer; chosen: the algorithm that ran;
* status: "ok", "refused" or "wrong"; why: of those that are not ok;
* seconds: of each iteration, the slowest rank's; median, quartiles: the first and the third;
* sent_bytes, messages: by the average rank; most_bytes: by the rank that sent most;
* bound_bytes: that the average rank must receive; bound_seconds: what they take on the link;
* bytes_ratio: bytes sent over the bound's; time_ratio: median over bound_seconds;
* times: for each peer, the peer's median over this one's: above 1, this one is faster.
"""

_WIDTHS = {"case": "<10", "by": "<14", "algorithm": "<9", "spread": ">15", "horovod/x": ">9"}
"""Of columns, where it is not 8, to the right."""


_LEGEND = (
    "ms: median of the slowest rank's time; spread: its quartiles; MB: sent by the average rank",
    "xbound: bytes sent / bytes of the bound; xlink: time / time of the bound's bytes on the link",
    "peer/x: the peer's time / this time, above 1 this is faster; link: bits a second of a rank",
    "horovod: Horovod's way, in torch (all-gather, coalesce); Horovod itself is not run",
)


def summary(
    case: Case,
    load: weft.sparse.Load,
    link: float | None,
    name: str,
    status: Status,
    seconds: Sequence[float],
    records: Sequence[Any],
) -> Row:
    """The row of one contender; `records` are what weft noted on each rank, none for a peer."""
    sent = [int(record.sent_bytes) for record in records]
    mean = fmean(sent) if sent else None
    first, median, third = (
        np.quantile(seconds, [0.25, 0.5, 0.75]).tolist() if seconds else [None] * 3
    )
    bound = load.bound * 8 / link if link else None
    return {
        "case": case.name,
        "distinct": load.mean,
        "total": load.total,
        "union": load.union,
        "name": name,
        "chosen": records[0].algorithm if records else None,
        "status": status[0],
        "why": status[1],
        "seconds": list(seconds),
        "median": median,
        "quartiles": [first, third] if seconds else None,
        "sent_bytes": mean,
        "most_bytes": max(sent, default=None),
        "messages": fmean(record.messages for record in records) if records else None,
        "bound_bytes": load.bound,
        "bound_seconds": bound,
        "bytes_ratio": _ratio(mean, load.bound),
        "time_ratio": _ratio(median, bound),
        "setting": asdict(case),
        "times": {},
    }


def compared(rows: Sequence[Row]) -> Sequence[Row]:
    """The rows of a case; in each is noted how much longer each peer took."""
    timed = [row for row in rows if row["median"]]
    for row in timed:
        for peer in timed:
            if peer is not row and not peer["name"].startswith(OWN):
                row["times"][peer["name"]] = peer["median"] / row["median"]
    return rows


def _ratio(value: float | None, least: float | None) -> float | None:
    return value / least if value and least else None


def _cells(row: Row) -> dict[str, str]:
    """What is shown of a row, by title."""
    quartiles = [number(seconds, 1e3) for seconds in row["quartiles"] or ()]
    return {
        "case": row["case"],
        "k": f"{row['distinct']:.0f}",
        "union": str(row["union"]),
        "by": row["name"],
        "algorithm": row["chosen"] or "-",
        "ms": number(row["median"], 1e3) if row["status"] == "ok" else row["status"].upper(),
        "spread": "..".join(quartiles) or "-",
        "MB": number(row["sent_bytes"], 1e-6),
        "xbound": number(row["bytes_ratio"]),
        "xlink": number(row["time_ratio"]),
        **{f"{peer}/x": number(ratio) for peer, ratio in row["times"].items()},
    }


class Shown:
    """Shows what comes and, at the end, writes it to a file of JSON, however it ends.

    The file has `{"head": {...}, "rows": [...]}`, times in seconds.
    """

    def __init__(
        self, console: Console, peers: Sequence[str], link: bool, file: Path | None = None
    ) -> None:
        self._console, self._file = console, file
        self._titles = ["case", "k", "union", "by", "algorithm", "ms", "spread", "MB", "xbound"]
        self._titles += ["xlink"] * link + [f"{peer}/x" for peer in peers]
        self._found: dict[str, Any] = {"rows": []}
        self._status = console.status("starting the ranks")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._status.stop()
        if self._file is not None and "head" in self._found:
            self._file.write_text(json.dumps(self._found, indent=1) + "\n", encoding="utf-8")

    def show(self, found: Found) -> None:
        """Take the next thing that rank 0 has told."""
        kind, what = found
        if kind == "doing":
            self._status.start()
            self._status.update(what)
        elif kind == "head":
            self._found["head"] = what
            alone = ["one rank alone communicates nothing: --ranks 4 starts four"]
            for line in (listed(what), *_LEGEND, *(alone if what["ranks"] == 1 else [])):
                self._line(f"# {line}", "dim")
            self._columns("#", {title: title for title in self._titles}, "bold")
        else:
            self._found["rows"].append(what)
            own = what["name"].startswith(OWN)
            style = "bold red" if what["status"] == "wrong" else "bold" if own else "dim"
            self._columns(" ", _cells(what), style)
            if what["why"]:
                self._line(f"# {what['case']} {what['name']} {what['status']}: {what['why']}")

    def _columns(self, mark: str, cells: dict[str, str], style: str) -> None:
        padded = [f"{cells.get(each, '-'):{_WIDTHS.get(each, '>8')}}" for each in self._titles]
        self._line(mark + " ".join(padded).rstrip(), style)

    def _line(self, text: str, style: str = "yellow") -> None:
        self._console.print(Text(text, style), soft_wrap=True)
