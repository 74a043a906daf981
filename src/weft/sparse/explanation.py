"""What a call would run, and why: the table of all algorithms, as text and in a notebook.

`explanation` makes it of a call's load, `predicted` of any load. `together` and `after_stating` are
for lists of tables, which may take several calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from .. import notebook
from ..agree import DIRECT, opening_rounds
from ..wire.link import Link
from .choice import choose, fitted, is_eager
from .cost import MANY, Cost, Load, needed
from .factors import factored, factors_of
from .header import DIGESTED
from .registry import ALGORITHMS, ALONE, EAGER

# times the average, from which `explain` says that the busiest host takes longer: a sample of
# indices is wrong by 6 percent
_UNEQUAL = 1.1

_CHOSEN = "chosen"
_RULED_OUT = "ruled out"


@dataclass(frozen=True, slots=True)
class _Line:
    algorithm: str
    messages: int
    rounds: float
    bytes: float
    milliseconds: float
    of_bound: float
    verdict: str
    factors: str = ""

    @property
    def name(self) -> str:
        """The algorithm with its factors, if it has some."""
        return f"{self.algorithm} {self.factors}".strip()

    def __str__(self) -> str:
        return (
            f"{self.name:12}  {self.messages:8}  {self.rounds:6.1f}  {self.bytes:10.0f}"
            f"  {self.milliseconds:8.2f}  {self.of_bound:8.2f}  {self.verdict}"
        ).rstrip()


@dataclass(frozen=True, slots=True)
class Batch:
    """Tables of a list that are reduced together: of one row shape and dtype.

    Attributes:
        tables: their numbers in the list.
        dtype: of their values.
        row_shape: shape of a row.
    """

    tables: tuple[int, ...]
    dtype: torch.dtype
    row_shape: tuple[int, ...]

    def __str__(self) -> str:
        who = "table" if len(self.tables) == 1 else "tables"
        numbers = ", ".join(map(str, self.tables))
        return f"{who} {numbers}: {str(self.dtype).removeprefix('torch.')} rows of {self.row_shape}"


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a call would run, and why; prints as a table.

    Attributes:
        chosen: name of the algorithm that would run; several, of a list, joined by " and ".
        load: the sizes it was chosen by.
        lines: for each algorithm: algorithm, messages (sent), rounds (that the call waits for, each
            `link.alpha` seconds, those that open it among them), bytes (received), milliseconds
            (predicted, after the opening), of_bound (bytes, as a multiple of the bound), verdict
            ("chosen", how much longer it would take, or "ruled out" and why), factors (of `split`:
            "4x2", or "" if it is flat). The chosen one comes first, then those that could be
            chosen, quickest first, then those that are ruled out. Empty in a group of one, and of
            a list of which no rank has rows.
        groups: of a list, the tables that are reduced together; those without rows are in none.
        calls: of a list that takes several calls, what each would do; `lines` is empty then.
        device: where the rows are, and for an accelerator how they travel: "cuda (nccl)".
        stating: rounds in which ranks state the tables of a list, before its first call; they are
            among those that open that call. Without rows there is no call, and they are all.
    """

    chosen: str
    load: Load
    lines: tuple[_Line, ...]
    groups: tuple[Batch, ...] = ()
    calls: tuple[Explanation, ...] = ()
    device: str = "cpu"
    stating: int = 0

    @property
    def link(self) -> Link | None:
        """The network's figures; None where they were not needed."""
        return self.load.link

    @property
    def _head(self) -> list[str]:
        """The lines above the table."""
        load = self.load
        text = [
            f"{load.ranks} rank{'s' * (load.ranks > 1)}, {load.total} rows in all "
            f"(most {load.most}, fewest {load.fewest}), about {load.union} in the result, "
            f"{load.row} bytes each; bound {load.bound:.0f} bytes a rank"
        ]
        if self.link:
            text.append(f"link: {self.link}")
        if self.link and load.ranks > 1:
            text.append(self._least_time)
        if self.lines:
            text.append(self._waits)
        if self._is_of_average:
            text.append(
                "the times below are those of average rows: all wait for the busiest host, which "
                f"has {load.unevenness:.2g} times as much to receive or send"
            )
        if self.device != "cpu":
            text.append(f"rows on {self.device}")
        if self.calls:
            return [*text, f"{len(self.calls)} calls, one after the other:"]
        text += map(str, self.groups)
        if not self.lines:
            text.append(self._why_nothing_is_sent)
        return text

    @property
    def _why_nothing_is_sent(self) -> str:
        """Why there is no table of algorithms."""
        if self.load.ranks == 1:
            return "nothing is sent: the group has one rank"
        rounds = "the round" if self.stating == 1 else f"the {self.stating} rounds"
        return f"no rank has rows: nothing is sent after {rounds} in which ranks say so"

    @property
    def _least_time(self) -> str:
        """About the least time of any exact schedule, and which bytes take it."""
        load = self.load
        link = self.link
        assert link is not None
        hosts = load.ranks_of_hosts
        seconds = load.least_seconds(link)
        if len(hosts) == 1:
            why = "all ranks share a host, so the bound is that of a rank"
        elif max(hosts) == 1:
            why = (
                "no rank shares its host, so the bound is that of a rank; the busiest must receive "
                f"or send {load.host_bound:.0f} bytes"
            )
        elif seconds > load.host_bound * link.beta:
            why = (
                f"{max(hosts)} ranks share a host, but the bound is that of a rank: the "
                f"{load.bound:.0f} bytes that it receives, from its host and over the link, take "
                f"longer than the {load.host_bound:.0f} that cross the link of the busiest host"
            )
        else:
            why = (
                f"{max(hosts)} ranks share a host, so the bound is the host bound: "
                f"{load.host_bound:.0f} bytes cross the link of the busiest of {len(hosts)} hosts"
            )
        text = f"least time about {1e3 * seconds:.2f} ms"
        if max(hosts) > 1 and len(hosts) > 1 and load.rows_of_hosts is None:
            text += ", if ranks draw their rows independently"
        return f"{text}: {why}"

    @property
    def _is_of_average(self) -> bool:
        """Whether predictions are below the least time, since ranks have unequal rows."""
        link = self.link
        if not self.lines or link is None or self.load.unevenness < _UNEQUAL:
            return False
        return self.lines[0].milliseconds < 1e3 * self.load.least_seconds(link)

    @property
    def _waits(self) -> str:
        """The rounds that what is chosen waits for, which no link makes shorter."""
        link = self.link
        assert link is not None
        opening = opening_rounds(self.load.ranks) + self.stating
        rounds = self.lines[0].rounds
        which = "which opens the call" if rounds == opening == 1 else f"{opening} to open the call"
        return (
            f"beside the time of its bytes {self.lines[0].name} waits for {rounds:.3g} "
            f"round{'s' * (rounds != 1)} of {1e3 * link.alpha:.3g} ms, {which}"
        )

    def __str__(self) -> str:
        if self.calls:
            return "\n".join([*self._head, *map(str, self.calls)])
        if not self.lines:
            return "\n".join(self._head)
        titles = (
            f"{'algorithm':12}  {'messages':>8}  {'rounds':>6}  {'bytes':>10}  {'ms':>8}  of bound"
        )
        return "\n".join([*self._head, titles, *map(str, self.lines)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The same in a notebook."""
        head = notebook.paragraphs(self._head)
        if self.calls:
            return "\n".join([head, *(call._repr_html_() for call in self.calls)])
        if not self.lines:
            return head
        rows = [
            (
                line.name,
                line.messages,
                f"{line.rounds:.1f}",
                f"{line.bytes:.0f}",
                f"{line.milliseconds:.2f}",
                f"{line.of_bound:.2f}",
                line.verdict,
            )
            for line in self.lines
        ]
        titles = "algorithm", "messages", "rounds", "bytes", "ms", "of bound", ""
        bold = [place for place, line in enumerate(self.lines) if line.verdict == _CHOSEN]
        faint = [
            place for place, line in enumerate(self.lines) if line.verdict.startswith(_RULED_OUT)
        ]
        return f"{head}\n{notebook.table(titles, rows, left=(0, 6), bold=bold, faint=faint)}"


def predicted(load: Load, link: Link) -> Explanation:
    """What `auto` would choose for a load on a link that need not be here; communicates nothing.

    What is known of the load and no call would know is left out: the rows of hosts of more than 16
    ranks, and that ranks have the same rows if these are too many to be compared.
    """
    index = torch.int32 if load.index == 4 else torch.int64
    return explanation(factored(fitted(_as_called(load), link)), "auto", index)


def _as_called(load: Load) -> Load:
    """The load without what ranks that open a call do not learn from each other's headers."""
    if load.ranks > DIRECT:  # they get one header of all
        load = load.but(rows_of_hosts=None)
    if load.most * load.index > DIGESTED:
        load = load.but(identical=False)
    return load


def explanation(load: Load, algorithm: str, index: torch.dtype, carrier: str = "") -> Explanation:
    """The table of all algorithms for a load, with what would run.

    Args:
        load: the sizes of the call, `fitted` to the link.
        algorithm: that was asked for, or "auto".
        index: dtype of indices in the opening exchange.
        carrier: as for `choose`.
    """
    if load.ranks == 1:
        return Explanation(ALONE, load, ())
    lines = _lines(load)
    if algorithm == "auto" and is_eager(load, index):
        chosen = EAGER
        others = load.ranks - 1
        received = others * load.mean * (load.row + index.itemsize)
        lines.insert(0, _line(EAGER, Cost(1, others, received), load))
    else:
        chosen = choose(load, algorithm, carrier)
    best = next(line for line in lines if line.algorithm == chosen)
    serving = [line for line in lines if line is not best and not line.verdict]
    ruled_out = [line for line in lines if line is not best and line.verdict]
    table = [replace(best, verdict=_CHOSEN)]
    for line in serving:
        table.append(replace(line, verdict=_why_not(load, line, best, algorithm)))
    for line in ruled_out:
        table.append(replace(line, verdict=f"{_RULED_OUT}: {line.verdict}"))
    return Explanation(chosen, load, tuple(table))


def _why_not(load: Load, line: _Line, best: _Line, algorithm: str) -> str:
    """Why an algorithm that can serve was not chosen."""
    if algorithm != "auto":
        return f"{algorithm} was asked for"
    if best.algorithm == EAGER and line.milliseconds < best.milliseconds:
        return "not needed: the rows fit into the opening exchange, which every call has"
    why = f"predicted {line.milliseconds / max(best.milliseconds, 1e-9):.2f}x of the time"
    if round(1e3 * line.milliseconds) >= round(1e3 * best.milliseconds):
        return why
    if line.messages > best.messages and load.ranks >= MANY:
        return f"{why}, with more messages"
    return f"{why}, but not for sizes rounded to a 64th, which decide"


def together(calls: Sequence[Explanation]) -> Explanation:
    """Several calls as one, whose load is the sum of theirs."""
    chosen = " and ".join(dict.fromkeys(call.chosen for call in calls))
    loads = [call.load for call in calls]
    total = sum(load.total for load in loads)
    load = loads[0].but(
        total=total,
        most=sum(load.most for load in loads),
        fewest=sum(load.fewest for load in loads),
        union=sum(load.union for load in loads),
        row=sum(load.total * load.row for load in loads) // max(1, total),
        rows_of_hosts=_rows_of_hosts_together(loads),
    )
    groups = tuple(group for call in calls for group in call.groups)
    return Explanation(chosen, load, (), groups, tuple(calls))


def after_stating(first: Explanation, rounds: int) -> Explanation:
    """The first call of a list, before which the list's tables are stated in so many rounds."""
    lines = [replace(line, rounds=line.rounds + rounds) for line in first.lines]
    return replace(first, lines=tuple(lines), stating=rounds)


def _rows_of_hosts_together(loads: Sequence[Load]) -> tuple[tuple[float, float], ...] | None:
    """The rows of each host in several calls; None if nothing is known of them in some call."""
    known = [load.rows_of_hosts for load in loads if load.rows_of_hosts is not None]
    if len(known) < len(loads):
        return None
    of_hosts = []
    for host in zip(*known, strict=True):
        own = sum(rows for rows, _ in host)
        others = sum(rows for _, rows in host)
        of_hosts.append((own, others))
    return tuple(of_hosts)


def _lines(load: Load) -> list[_Line]:
    """All algorithms, quickest first; the verdict says why one cannot be chosen."""
    lines = []
    for algorithm in ALGORITHMS.values():
        cost = algorithm.cost(load)
        reason = algorithm.applies(load)
        memory = needed(load, cost)
        if reason is None and memory > load.allowed:
            reason = (
                f"needs {memory / 2**20:.0f} MiB of workspace, {load.allowed / 2**20:.0f} allowed"
            )
        lines.append(_line(algorithm.name, cost, load, reason or ""))
    # microseconds decide, and then the name: every machine rounds these alike
    return sorted(lines, key=lambda line: (round(1e3 * line.milliseconds), line.algorithm))


def _line(name: str, cost: Cost, load: Load, verdict: str = "") -> _Line:
    assert load.link is not None
    of_bound = cost.bytes / load.bound if load.bound > 0 else 1.0
    milliseconds = 1e3 * cost.seconds(load.link)
    factors = factors_of(name, load)
    rounds: float = opening_rounds(load.ranks)
    if name != EAGER:  # of which the opening is all
        rounds += cost.rounds
    return _Line(name, cost.messages, rounds, cost.bytes, milliseconds, of_bound, verdict, factors)
