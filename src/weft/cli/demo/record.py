"""What happened: one `Step` for each step of each rank, a `Run` for each way, and what they say.

Figures are computed from what ran and nothing is extrapolated. A time of a step is the mean over
the ranks; over the steps the median, which the first, slower steps do not move. No torch here:
ranks send these values to the process that displays them.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields

from .settings import WAYS

__all__ = [
    "PARTS",
    "TOLERANCE",
    "Agreement",
    "Outcome",
    "Reduction",
    "Run",
    "Step",
    "Summary",
    "agreement",
    "speedups",
    "step_bytes",
]

PARTS = ("forward", "backward", "hand_over", "prepare", "wait", "update")
"""The parts of a step, in the order they begin."""

TOLERANCE = 1e-3
"""Largest relative difference of two ways, at any step, that counts as equal.

Each way adds the same numbers in another order, so their sums differ in the last bit of an fp32
(6e-8), and every later step starts from tables that differ by that much. The difference grows as
training goes on, to about 1e-5 after hundreds of steps. A way that lost or doubled rows of a rank
differs by more than 1e-2 at once: in the length of the gradient, since Adagrad takes nearly the
same steps if all gradients are longer by one factor, so the losses alone would hardly tell.
"""


@dataclass(frozen=True, slots=True)
class Reduction:
    """What weft says of one all-reduce of one table on one rank; see `weft.sparse.last_call`."""

    algorithm: str
    rows: int
    total: int
    union: int
    messages: int
    sent: int
    bound: int


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one rank; times in seconds.

    Attributes:
        number: from 0.
        clock: seconds from the start of the first step to the end of this one.
        loss: mean over this rank's pairs.
        gradient: length of the mean gradient of both tables, as one vector; the same on all ranks.
        forward, backward, hand_over, prepare, wait, update: the parts of the step, which add up
            to it; see `PARTS`. `hand_over` is what starting the reductions costs, `prepare` makes
            the next batch while they are under way, `wait` is for what is not done by then.
        in_flight: how long at least one reduction was under way.
        reductions: weft's own figures, one for each table; empty for the other ways.
    """

    number: int
    clock: float
    loss: float
    gradient: float
    forward: float
    backward: float
    hand_over: float
    prepare: float
    wait: float
    update: float
    in_flight: float
    reductions: tuple[Reduction, ...] = ()

    @property
    def seconds(self) -> float:
        """The whole step."""
        return float(sum(getattr(self, part) for part in PARTS))

    @property
    def synchronisation(self) -> float:
        """What the training itself spent on summing gradients: handing over and waiting."""
        return self.hand_over + self.wait


@dataclass(frozen=True, slots=True)
class Outcome:
    """A rank's peak resident memory when it trains one way, and when it has only started."""

    peak_bytes: int
    idle_bytes: int


@dataclass(slots=True)
class Run:
    """One way's training, as far as it came.

    Attributes:
        way: a key of `WAYS`.
        wanted: steps that it was to train.
        ranks: how many ranks.
        steps: the steps that every rank reported, each the mean over the ranks, with one reduction
            for both tables together.
        algorithms: how often each algorithm was chosen.
        outcomes: the memory of the ranks, measured in a run of its own.
        interrupted: it was ended from outside.
        title: what it is called in print, if not as `WAYS` says.
        items, unit: what a step works through, all ranks together, and what that is called; 0: as
            many tokens as there are pairs.
    """

    way: str
    wanted: int
    ranks: int
    steps: list[Step] = field(default_factory=list)
    algorithms: Counter[str] = field(default_factory=Counter)
    outcomes: list[Outcome] = field(default_factory=list)
    interrupted: bool = False
    title: str = ""
    items: int = 0
    unit: str = "tokens"
    _ahead: list[deque[Step]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ahead = [deque() for _ in range(self.ranks)]

    @property
    def name(self) -> str:
        return self.title or WAYS[self.way]

    @property
    def done(self) -> int:
        return len(self.steps)

    @property
    def note(self) -> str:
        """Why there are fewer steps than wanted; empty if there are not."""
        if self.done == self.wanted:
            return ""
        why = "interrupted" if self.interrupted else "time limit"
        return f"{self.done} of {self.wanted} steps: {why}"

    def add(self, rank: int, steps: Iterable[Step]) -> None:
        """Take one rank's next steps."""
        self._ahead[rank].extend(steps)
        while all(self._ahead):
            same = [ahead.popleft() for ahead in self._ahead]
            self.algorithms.update(one.algorithm for one in same[0].reductions)
            self.steps.append(_mean_step(same))

    def values(self, name: str) -> list[float]:
        """An attribute of every step."""
        return [getattr(step, name) for step in self.steps]

    def reductions(self) -> list[Reduction]:
        """Weft's figures of the steps, both tables together; empty for the other ways."""
        return [step.reductions[0] for step in self.steps if step.reductions]


def _mean_step(of_ranks: Sequence[Step]) -> Step:
    """The mean of one step over the ranks; its reduction is that of all its tables together."""
    names = [one.name for one in fields(Step) if one.name not in ("number", "reductions")]
    means = {name: statistics.fmean(getattr(step, name) for step in of_ranks) for name in names}
    reductions: tuple[Reduction, ...] = ()
    if all(step.reductions for step in of_ranks):
        counts = {
            one.name: round(
                statistics.fmean(
                    sum(getattr(table, one.name) for table in step.reductions) for step in of_ranks
                )
            )
            for one in fields(Reduction)
            if one.name != "algorithm"
        }
        chosen = dict.fromkeys(one.algorithm for one in of_ranks[0].reductions)
        reductions = (Reduction(algorithm=" + ".join(chosen), **counts),)
    return Step(number=of_ranks[0].number, reductions=reductions, **means)


@dataclass(frozen=True, slots=True)
class Summary:
    """One way's line in the table; seconds and bytes, medians over its steps.

    Attributes:
        name: the way, as printed.
        steps: steps that ran.
        note: why there are fewer than wanted, or empty.
        step, synchronisation, in_flight: seconds.
        parts: seconds of each of `PARTS`.
        hidden: share of the time in flight in which the training went on with something else.
        sent: bytes sent by a rank in a step; None if there is no figure.
        computed: `sent` was computed from the known algorithm, not counted.
        peak: highest resident memory of any rank, None if it was not measured.
        growth: how much of it came with the training.
        tokens: centre words a second, all ranks together; or what else the run counts.
        loss: mean of the last tenth of the steps.
    """

    name: str
    steps: int
    note: str
    step: float
    synchronisation: float
    in_flight: float
    parts: dict[str, float]
    hidden: float
    sent: float | None
    computed: bool
    peak: int | None
    growth: int | None
    tokens: float
    loss: float

    @classmethod
    def of(cls, run: Run, sent: Sequence[float], batch: int) -> Summary:
        """The summary of a run of at least one step; `sent` is what `step_bytes` says of it."""
        step = statistics.median(run.values("seconds"))
        losses = run.values("loss")
        in_flight = sum(run.values("in_flight"))
        waited = sum(run.values("wait"))
        return cls(
            name=run.name,
            steps=run.done,
            note=run.note,
            step=step,
            synchronisation=statistics.median(run.values("synchronisation")),
            in_flight=statistics.median(run.values("in_flight")),
            parts={part: statistics.median(run.values(part)) for part in PARTS},
            hidden=max(0.0, 1.0 - waited / in_flight) if in_flight else 0.0,
            sent=statistics.median(sent) if sent else None,
            computed=run.way != "weft" and not run.title,
            peak=max((one.peak_bytes for one in run.outcomes), default=None),
            growth=max((one.peak_bytes - one.idle_bytes for one in run.outcomes), default=None),
            tokens=(run.items or run.ranks * batch) / step,
            loss=statistics.fmean(losses[-max(1, len(losses) // 10) :]),
        )


def step_bytes(run: Run, weft: Run, *, vocabulary: int, dim: int) -> list[float]:
    """Bytes that the average rank sent in each step.

    Counted by weft's wire for weft. Computed for PyTorch's two, from what gloo is known to do: the
    sparse one is a ring all-gather of int64 indices and fp32 values, (P-1)/P of all ranks' rows
    from each; the dense one a ring all-reduce of both tables, 2 (P-1)/P of them from each. The
    ranks' distinct rows are those weft counted in the same step; without them there is no figure.
    """
    share = (run.ranks - 1) / run.ranks
    if run.way == "dense":
        return [2 * share * 2 * vocabulary * dim * 4] * run.done
    figures = weft.reductions()[: run.done]
    if run.way == "weft":
        return [float(one.sent) for one in figures]
    return [share * one.total * (8 + dim * 4) for one in figures]


@dataclass(frozen=True, slots=True)
class Agreement:
    """Whether another way computed what weft did.

    Attributes:
        name: the other way.
        steps: steps that both did.
        difference: the largest relative difference of a step's loss, or of its gradient's length.
        what: which of the two that is.
        at: in which step, from 0.
    """

    name: str
    steps: int
    difference: float
    what: str
    at: int

    @property
    def agrees(self) -> bool:
        return self.difference <= TOLERANCE

    def __str__(self) -> str:
        both = f"weft and {self.name}"
        if self.agrees:
            return (
                f"{both} agree over {self.steps} steps: losses and gradients within "
                f"{self.difference:.1e} (allowed {TOLERANCE:.0e})"
            )
        return (
            f"{both} DO NOT AGREE over {self.steps} steps: the {self.what} of step {self.at + 1} "
            f"differs by {self.difference:.1e} (allowed {TOLERANCE:.0e})"
        )


def agreement(weft: Run, other: Run) -> Agreement | None:
    """Compare two runs over the steps both did; None if there are none.

    What is no number in one way and a number in the other counts as infinitely different.
    """
    found = [
        (_relative(one, two), what, at)
        for what in ("loss", "gradient")
        for at, (one, two) in enumerate(zip(weft.values(what), other.values(what), strict=False))
    ]
    if not found:
        return None
    return Agreement(other.name, min(weft.done, other.done), *max(found, key=lambda one: one[0]))


def _relative(one: float, two: float) -> float:
    if one == two or (one != one and two != two):
        return 0.0
    difference = abs(one - two) / max(abs(one), abs(two))
    return difference if difference == difference else float("inf")


def speedups(summaries: Sequence[Summary]) -> list[str]:
    """The first way's step against each other's, in words: for the headline."""
    weft, *others = summaries
    lines = []
    for other in others:
        lines.append(f"{other.step / weft.step:.1f}x as fast as {other.name}")
    return lines
