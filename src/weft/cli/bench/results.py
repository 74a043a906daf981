"""What was found: one row for each contender and case, and how it is shown and written.

The output is columns for people and for programs alike: one row a line, split by white space, `-`
where there is nothing to say, and lines that begin with `#` around it; so `grep -v '^#'`, awk and a
spreadsheet read it. A terminal also shows colours, and what goes on at the moment.
"""

from __future__ import annotations

import csv
import json
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median
from typing import Any, Self

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from ..counted import Counted
from ..wording import listed, number
from .cases import Case

OWN = "weft:"
"""What the names of weft's own contenders begin with: weft, too, has an algorithm called dense."""

Found = tuple[str, Any]
"""What rank 0 tells: ("head", a dictionary) once, ("row", a `Row`), ("doing", a `Doing`)."""

Doing = tuple[str, str, float]
"""What goes on: in which case, what there, and the share of the whole that is done, 0 to 1."""

Status = tuple[str, str]
"""What became of a contender: "ok", "refused" (does not serve this case) or "wrong", and why."""


VERSION = 3
"""Of the format of files; it changes when a field changes its name or meaning, or goes."""

Row = dict[str, Any]
"""What one contender did in one case, as it is written to a file; None: not known.

* case and its setting: rows, height, width, distribution, ids, values, dtype, index_dtype, op,
  wire_dtype: in which weft's calls sent values, None: in their own;
* distinct: rows of the average rank; total, union: K and U;
* by: who was asked: `weft:` and the algorithm given, or a peer; algorithm: the one that ran;
* status: "ok", "refused" or "wrong"; why: of those that are not ok;
* median_seconds, first_quartile_seconds, third_quartile_seconds, least_seconds, most_seconds: over
  the iterations, of the slowest rank's times;
* core_seconds: that the threads of the average rank were busy in a call, on any core; the median
  over the iterations;
* sent_bytes, messages: by the average rank; most_bytes: by the rank that sent most;
* bound_bytes: that the average rank must receive, of values as weft sends them; bound_seconds: what
  they take on the link;
* bytes_ratio: bytes sent over the bound's; time_ratio: median over bound_seconds;
* host_bound_bytes: the host bound, which must cross the link of the busiest host;
  least_time_seconds: the least time of any exact schedule with these ranks on these hosts;
  least_time_ratio: median over that. Look at these where ranks share each of several hosts;
* torch_ratio and so on: the peer's median over this one's: above 1, this one is faster.

In a file each row also has what the head says: versions, ranks, hosts, and so on.
"""

_TIMES = ("least", "first_quartile", "median", "third_quartile", "most")

_WIDTHS = {"case": "<10", "by": "<14", "algorithm": "<9"}
_WIDTHS |= {"spread": ">15", "horovod/x": ">9"}
"""Of columns, where it is not 8, to the right."""


_LEGEND = {
    "ms": "median of the slowest rank's time",
    "spread": "its quartiles",
    "cpu": "ms that the average rank's threads were busy in a call",
    "MB": "sent by the average rank",
    "xbound": "bytes sent / bytes of the bound",
    "xlink": "time / time of the bound's bytes on the link",
    "hostMB": "must cross the link of the busiest host",
    "least-ms": "the least time of any exact schedule there",
    "xleast": "the ratio to look at where ranks share hosts: time / least time",
    "horovod/x": "Horovod's way, in torch (all-gather, coalesce); Horovod itself is not run",
}
"""What the columns have, by title."""

_LEFT_OUT = (
    "spread",
    "cpu",
    "k",
    "union",
    "hostMB",
    "MB",
    "xlink",
    "algorithm",
    "xbound",
)
"""Columns that a narrow terminal does without, the first first."""


def summary(
    case: Case,
    counted: Counted,
    beta: float | None,
    name: str,
    status: Status,
    seconds: Sequence[float],
    records: Sequence[Any],
    busy: Sequence[float] = (),
) -> Row:
    """The row of one contender.

    Args:
        case: what all contenders did.
        counted: of that.
        beta: seconds for a byte on the link that `--link` says.
        name: of the contender.
        status: what became of it.
        seconds: of the slowest rank in each iteration.
        records: what weft noted on each rank; none for a peer.
        busy: seconds of a core that the average rank's threads were busy in each iteration.
    """
    sent = [int(record.sent_bytes) for record in records]
    mean = fmean(sent) if sent else None
    times = np.quantile(seconds, [0, 0.25, 0.5, 0.75, 1]).tolist() if seconds else [None] * 5
    bound = least_time = None
    if beta is not None:
        bound = counted.bound * beta
        least_time = counted.least_seconds(beta)
    setting = asdict(case)
    row = {
        "case": setting.pop("name"),
        **setting,
        "distinct": counted.sizes.mean,
        "total": counted.sizes.total,
        "union": counted.union,
        "by": name,
        "algorithm": records[0].algorithm if records else None,
        "status": status[0],
        "why": status[1],
        **{f"{which}_seconds": time for which, time in zip(_TIMES, times, strict=True)},
        "core_seconds": median(busy) if busy else None,
        "sent_bytes": mean,
        "most_bytes": max(sent, default=None),
        "messages": fmean(record.messages for record in records) if records else None,
        "bound_bytes": counted.bound,
        "bound_seconds": bound,
        "bytes_ratio": _ratio(mean, counted.bound),
        "host_bound_bytes": counted.host_bound,
        "least_time_seconds": least_time,
    }
    row["time_ratio"] = _ratio(row["median_seconds"], bound)
    row["least_time_ratio"] = _ratio(row["median_seconds"], least_time)
    return row


def compared(rows: Sequence[Row]) -> Sequence[Row]:
    """The rows of a case; in each is noted how much longer each peer took."""
    for row in rows:
        for peer in rows:
            if not peer["by"].startswith(OWN):
                ratio = _ratio(peer["median_seconds"], row["median_seconds"])
                row[f"{peer['by']}_ratio"] = None if peer is row else ratio
    return rows


def _ratio(value: float | None, least: float | None) -> float | None:
    return value / least if value and least else None


def _one_word(said: str | None) -> str:
    """As it stands in a column: a list of tables may have taken several, "gather and split"."""
    return said.replace(" and ", "+") if said else "-"


def _cells(row: Row, peers: Sequence[str]) -> dict[str, str]:
    """What is shown of a row, by title."""
    quartiles = [row["first_quartile_seconds"], row["third_quartile_seconds"]]
    spread = "-" if None in quartiles else "..".join(number(each, 1e3) for each in quartiles)
    return {
        "case": row["case"],
        "k": f"{row['distinct']:.0f}",
        "union": str(row["union"]),
        "by": row["by"],
        "algorithm": _one_word(row["algorithm"]),
        "ms": number(row["median_seconds"], 1e3)
        if row["status"] == "ok"
        else row["status"].upper(),
        "spread": spread,
        "cpu": number(row["core_seconds"], 1e3),
        "MB": number(row["sent_bytes"], 1e-6),
        "xbound": number(row["bytes_ratio"]),
        "xlink": number(row["time_ratio"]),
        "hostMB": number(row["host_bound_bytes"], 1e-6),
        "least-ms": number(row["least_time_seconds"], 1e3),
        "xleast": number(row["least_time_ratio"]),
        **{f"{peer}/x": number(row.get(f"{peer}_ratio")) for peer in peers},
    }


def _width(title: str) -> int:
    """Of a column."""
    return int(_WIDTHS.get(title, ">8")[1:])


class Shown:
    """Shows what comes and, at the end, writes it to files, however it ends.

    What goes on, and how long it will yet take, is a bar on the terminal, or else a line on the
    standard error for each case.

    Args:
        console: for the table.
        peers: what is measured beside weft.
        link: whether the link's speed is known.
        file: for `{"version": 3, "rows": [...]}`, times in seconds.
        sheet: for the same rows as comma-separated values.
        notes: lines below the versions.
    """

    def __init__(
        self,
        console: Console,
        peers: Sequence[str],
        link: bool,
        file: Path | None = None,
        sheet: Path | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self._console, self._peers, self._notes = console, peers, notes
        self._file, self._sheet = file, sheet
        self._titles = ["case", "k", "union", "by", "algorithm"]
        self._titles += ["ms", "spread", "cpu", "MB", "xbound"]
        self._link = link
        self._head: dict[str, Any] = {}
        self._rows: list[Row] = []
        self._began = time.monotonic()
        self._case = ""
        self._aside = console if console.is_terminal else Console(stderr=True, highlight=False)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            console=self._aside,
            transient=True,
            disable=not self._aside.is_terminal,
        )
        self._task = self._bar.add_task("starting the ranks", total=1.0)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()
        rows = [self._head | row for row in self._rows]
        if self._file is not None and rows:
            text = json.dumps({"version": VERSION, "rows": rows}, indent=1)
            self._file.write_text(text + "\n", encoding="utf-8")
        if self._sheet is not None and rows:
            with self._sheet.open("w", encoding="utf-8", newline="") as out:
                sheet = csv.DictWriter(out, ["version", *rows[0]])
                sheet.writeheader()
                sheet.writerows({"version": VERSION, **row} for row in rows)

    def show(self, found: Found) -> None:
        """Take the next thing that rank 0 has told."""
        kind, what = found
        if kind == "doing":
            self._go_on(*what)
        elif kind == "head":
            self._head = what
            ranks_share_hosts = 1 < what["hosts"] < what["ranks"]
            if self._link:
                self._titles.append("xlink")
            if ranks_share_hosts:
                self._titles.append("hostMB")
            if ranks_share_hosts and self._link:
                self._titles += ["least-ms", "xleast"]
            self._titles += [f"{peer}/x" for peer in self._peers]
            alone = ["one rank alone communicates nothing: --ranks 4 starts four"]
            notes = [*self._notes, *(alone if what["ranks"] == 1 else [])]
            left_out = self._fit()
            for line in (listed(what), *self._legend(left_out), *notes):
                self._line(f"# {line}", "dim")
            self._columns("#", {title: title for title in self._titles}, "bold")
        else:
            self._rows.append(what)
            own = what["by"].startswith(OWN)
            style = "bold red" if what["status"] == "wrong" else "bold" if own else "dim"
            self._columns(" ", _cells(what, self._peers), style)
            if what["why"]:
                self._line(f"# {what['case']} {what['by']} {what['status']}: {what['why']}")

    def _fit(self) -> list[str]:
        """Leave out columns until the others fit on the terminal; those that are left out."""
        left_out: list[str] = []
        for title in _LEFT_OUT if self._console.is_terminal else ():
            widths = [_width(each) for each in self._titles]
            if 1 + sum(widths) + len(widths) - 1 <= self._console.width:
                break
            if title in self._titles:
                self._titles.remove(title)
                left_out.append(title)
        return left_out

    def _legend(self, left_out: Sequence[str]) -> list[str]:
        """What the columns have, in lines that fit, and which this terminal has no room for."""
        told = [f"{title}: {_LEGEND[title]}" for title in self._titles if title in _LEGEND]
        if self._peers:
            told.append("peer/x: the peer's time / this time, above 1 this is faster")
        if self._link:
            told.append("link: bits a second of a rank")
        lines = textwrap.wrap("; ".join(told), 100 if not left_out else self._console.width - 2)
        if left_out:
            lines += textwrap.wrap(
                f"no room here for {', '.join(left_out)}: widen the terminal, or write --csv",
                self._console.width - 2,
            )
        return lines

    def _go_on(self, case: str, words: str, done: float) -> None:
        """Show what goes on."""
        self._bar.update(self._task, description=f"{case}: {words}", completed=done)
        if self._bar.disable and case != self._case:
            spent = time.monotonic() - self._began
            left = f", about {spent / done * (1 - done):.0f} s left" if done else ""
            self._aside.print(f"weft bench: {case}, {done:.0%} done{left}", soft_wrap=True)
        self._case = case

    def _columns(self, mark: str, cells: dict[str, str], style: str) -> None:
        padded = [f"{cells.get(each, '-'):{_WIDTHS.get(each, '>8')}}" for each in self._titles]
        self._line(mark + " ".join(padded).rstrip(), style)

    def _line(self, text: str, style: str = "yellow") -> None:
        self._console.print(Text(text, style), soft_wrap=True)
