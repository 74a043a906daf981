"""What was found: one row for each contender and case, and how it is shown and written.

The table has plain columns for pipes and files, rich ones for a terminal. Plain output is one row a
line, columns split by white space, `-` where there is nothing to say, and lines that begin with `#`
around it; so `grep -v '^#'`, awk and a spreadsheet read it.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from .cases import Case, Sizes

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
    unprivileged: bool = False

    def lines(self) -> list[str]:
        """The head in words, one fact or a few on each line."""
        link = "not given" if self.link is None else f"{self.link / 1e6:g} Mbit/s a rank"
        check = "results checked" if self.checked else "results not checked"
        ordinary = ", ranks as an ordinary user's" if self.unprivileged else ""
        lines = [
            f"weft {self.weft}, torch {self.torch}, python {self.python}, kernels: {self.kernels}",
            f"ranks {self.ranks}{ordinary}, hosts {self.hosts}, cores of this host {self.cores}, "
            f"link {link}",
            f"{self.iters} iterations after {self.warmup} to warm up, {check}, seed {self.seed}",
            "ms: median of the slowest rank's time; spread: its quartiles; MB: sent by the average "
            "rank",
            "xbound: bytes sent / bytes of the bound; xlink: time / time of the bound's bytes on "
            "the link; peer/x: the peer's time / this time, above 1 this is faster",
            "horovod: Horovod's way, in torch (all-gather, coalesce); Horovod itself is not run",
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
        median, quartiles: of these, the first and the third; None without any.
        sent_bytes: by the average rank; None for peers, which do not count.
        most_bytes: by the rank that sent most.
        messages: by the average rank.
        bound_bytes: that the average rank must receive.
        bound_seconds: what those take on the link, None if no link is given.
        bytes_ratio: bytes sent over the bound's.
        time_ratio: the median over what the bound's bytes take on the link.
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
    median: float | None
    quartiles: tuple[float, float] | None
    sent_bytes: float | None
    most_bytes: int | None
    messages: float | None
    bound_bytes: float
    bound_seconds: float | None
    bytes_ratio: float | None
    time_ratio: float | None
    setting: dict[str, Any]
    times: dict[str, float] = field(default_factory=dict)

    def beside(self, rows: Sequence[Row]) -> Row:
        """This row with its ratios to the peers among the rows of its case."""
        if not self.median:
            return self
        peers = [row for row in rows if not row.name.startswith(OWN) and row.name != self.name]
        return replace(
            self, times={row.name: row.median / self.median for row in peers if row.median}
        )


Found = Head | Row | str
"""What rank 0 tells: the head once, rows, and words on what goes on."""


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
    mean = statistics.fmean(sent) if sent else None
    bound = counted.bound_bytes * 8 / link if link else None
    median, quartiles = None, None
    if seconds:
        median = statistics.median(seconds)
        first, third = np.quantile(seconds, [0.25, 0.75]).tolist()
        quartiles = first, third
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
        median=median,
        quartiles=quartiles,
        sent_bytes=mean,
        most_bytes=max(sent, default=None),
        messages=statistics.fmean(record.messages for record in noted) if noted else None,
        bound_bytes=counted.bound_bytes,
        bound_seconds=bound,
        bytes_ratio=mean / counted.bound_bytes if mean and counted.bound_bytes else None,
        time_ratio=median / bound if median and bound else None,
        setting=asdict(case),
    )


Column = tuple[str, int, Callable[[Row], str]]
"""Title, width (negative: to the left), and the cell of a row."""


def _columns(peers: Sequence[str], link: bool) -> list[Column]:
    columns: list[Column] = [
        ("case", -10, lambda row: row.case),
        ("k", 8, lambda row: _number(row.distinct, 0)),
        ("union", 8, lambda row: str(row.union)),
        ("by", -14, lambda row: row.name),
        ("algorithm", -9, lambda row: row.chosen or "-"),
        ("ms", 9, lambda row: _ms(row.median) if row.status == "ok" else row.status.upper()),
        ("spread", 15, lambda row: "..".join(map(_ms, row.quartiles)) if row.quartiles else "-"),
        ("MB", 8, lambda row: _number(row.sent_bytes, 2, 1e-6)),
        ("xbound", 7, lambda row: _number(row.bytes_ratio, 2)),
    ]
    if link:
        columns.append(("xlink", 7, lambda row: _number(row.time_ratio, 2)))
    for peer in peers:
        columns.append((f"{peer}/x", max(8, len(peer) + 2), _versus(peer)))
    return columns


def _versus(peer: str) -> Callable[[Row], str]:
    return lambda row: _number(row.times.get(peer), 2)


def _ms(seconds: float | None) -> str:
    return _number(seconds, 2, 1e3)


def _number(value: float | None, digits: int, scale: float = 1.0) -> str:
    """At most `digits` decimals, fewer for large numbers: four figures are enough."""
    if value is None:
        return "-"
    value *= scale
    return f"{value:.{0 if value >= 1000 else min(digits, 1) if value >= 100 else digits}f}"


class Shown:
    """Shows what comes and, at the end, writes it to a file of JSON, however it ends.

    The file has `{"head": {...}, "rows": [...]}`, times in seconds.
    """

    def __init__(
        self, console: Console, peers: Sequence[str], link: bool, file: Path | None = None
    ) -> None:
        self._console, self._file = console, file
        self._columns = _columns(peers, link)
        self._head: Head | None = None
        self._rows: list[Row] = []
        self._doing: Spinner | None = Spinner("dots", "starting the ranks", style="dim")
        needed = sum(abs(width) + 1 for _, width, _ in self._columns)
        self._live: Live | None = None
        if console.is_terminal and console.width >= needed:
            self._live = Live(console=console, get_renderable=self._view, refresh_per_second=8)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._doing = None
        if self._live is not None:
            self._live.__exit__(None, None, None)
        if self._file is not None and self._head is not None:
            found = {"head": asdict(self._head), "rows": [asdict(row) for row in self._rows]}
            self._file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    def show(self, found: Found) -> None:
        """Take the next thing that rank 0 has told."""
        if isinstance(found, Row):
            self._rows.append(found)
            self._line(" ", [cell(found) for _, _, cell in self._columns])
            if found.why:
                self._plain(f"# {_why(found)}")
        elif isinstance(found, Head):
            self._head = found
            for line in found.lines():
                if self._live is not None:
                    self._console.print(Text(line, style="dim"))
                self._plain(f"# {line}")
            self._line("#", [title for title, _, _ in self._columns])
        elif self._doing is not None:
            self._doing.update(text=found)

    def _line(self, mark: str, cells: Sequence[str]) -> None:
        widths = [width for _, width, _ in self._columns]
        padded = [
            cell.rjust(width) if width > 0 else cell.ljust(-width)
            for cell, width in zip(cells, widths, strict=True)
        ]
        self._plain(mark + " ".join(padded).rstrip())

    def _plain(self, line: str) -> None:
        if self._live is None:
            print(line, file=self._console.file, flush=True)

    def _view(self) -> Group:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for title, width, _ in self._columns:
            table.add_column(title, justify="right" if width > 0 else "left", no_wrap=True)
        last = ""
        for row in self._rows:
            if last not in ("", row.case):
                table.add_row()
            cells = [cell(row) for _, _, cell in self._columns]
            if row.case == last:
                cells[:3] = ["", "", ""]
            last = row.case
            own = row.name.startswith(OWN) and row.status == "ok"
            table.add_row(
                *cells, style="bold red" if row.status == "wrong" else "bold" if own else "dim"
            )
        notes = [Text(_why(row), style="yellow") for row in self._rows if row.why]
        return Group(*([table] if self._rows else []), *notes, *filter(None, [self._doing]))


def _why(row: Row) -> str:
    return f"{row.case} {row.name} {row.status}: {row.why}"
