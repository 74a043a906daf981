"""What happened: one `Step` for each step of each rank, a `Run` for each way, and what they say.

Figures are computed from what ran and nothing is extrapolated. A time of a step is the mean over
the ranks; over the steps it is the mean of the middle half of them by length, which the first,
slower steps do not move, and in which the parts of a step add up to the step. No torch here: ranks
send these values to the process that shows them.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields

WAYS = {"weft": "weft", "torch": "PyTorch sparse", "dense": "PyTorch dense"}
"""The ways to sum the gradients, in the order of their turns, and how they are called in print."""

PARTS = {
    "forward": "forward",
    "backward": "backward",
    "hand_over": "start sums",
    "prepare": "next batch",
    "wait": "wait for sums",
    "update": "update",
}
"""The parts of a step, in the order they begin, and how they are called in print."""

COLUMNS = ("steps", "step", "synchronisation", "sent a step", "peak memory", "pairs/s")

TOLERANCE = 1e-3
"""Largest relative difference of two ways, at any step, that counts as equal.

Each way adds the same numbers in another order, so their sums differ in the last bit of an fp32
(6e-8), and every later step starts from tables that differ by that much. The difference grows as
training goes on, to about 1e-5 after hundreds of steps. A way that lost or doubled rows of a rank
differs by more than 1e-2 at once: in the length of the gradient, since Adagrad takes nearly the
same steps if all gradients are longer by one factor, so the losses alone would hardly tell.
"""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one rank, or the mean of one step over the ranks; times in seconds.

    Attributes:
        number: from 0.
        clock: seconds from the start of the first step to the end of this one.
        loss: mean over this rank's pairs.
        gradient: length of the mean gradient of both tables, as one vector; the same on all ranks.
        forward, backward, hand_over, prepare, wait, update: the parts of the step; see `PARTS`.
            `hand_over` is what starting the sums costs, `prepare` makes the next batch while they
            are under way, `wait` is for what is not done by then.
        algorithm: those that weft chose for the tables; empty for the other ways, as are
        rows, total, union, sent, bound: weft's figures, both tables together, as
            `weft.sparse.last_call` has them (the last two in bytes).
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
    algorithm: str = ""
    rows: float = 0.0
    total: float = 0.0
    union: float = 0.0
    sent: float = 0.0
    bound: float = 0.0

    @property
    def seconds(self) -> float:
        """The whole step."""
        return float(sum(getattr(self, part) for part in PARTS))

    @property
    def synchronisation(self) -> float:
        """What the training itself spent on summing gradients: starting sums and waiting."""
        return self.hand_over + self.wait


@dataclass(slots=True)
class Run:
    """One way's training, as far as it came.

    Attributes:
        way: a key of `WAYS`.
        wanted: steps that it was to train.
        ranks: how many ranks.
        pairs: pairs of word and context that all ranks together take in a step.
        steps: the steps that every rank reported, each the mean over the ranks.
        algorithms: how many steps were summed by which.
        memory: highest resident bytes of a rank that trained this way only, and of one that had
            only started; from a run of its own.
        interrupted: it was ended from outside.
    """

    way: str
    wanted: int
    ranks: int
    pairs: int
    steps: list[Step] = field(default_factory=list)
    algorithms: Counter[str] = field(default_factory=Counter)
    memory: list[tuple[int, int]] = field(default_factory=list)
    interrupted: bool = False
    _ahead: list[deque[Step]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ahead = [deque() for _ in range(self.ranks)]

    @property
    def name(self) -> str:
        return WAYS[self.way]

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
            mean = {
                one.name: statistics.fmean(getattr(step, one.name) for step in same)
                for one in fields(Step)
                if one.name not in ("number", "algorithm")
            }
            self.steps.append(Step(same[0].number, algorithm=same[0].algorithm, **mean))
            self.algorithms[same[0].algorithm] += 1

    def values(self, name: str) -> list[float]:
        """An attribute of every step."""
        return [getattr(step, name) for step in self.steps]

    def typical(self, name: str) -> float:
        """An attribute of a step: its mean over the middle half of the steps by length."""
        steps = sorted(self.steps, key=lambda step: step.seconds)
        cut = len(steps) // 4
        return statistics.fmean(getattr(step, name) for step in steps[cut : len(steps) - cut])

    def speed(self) -> float:
        """Pairs a second, all ranks together."""
        return self.pairs / self.typical("seconds")

    def sent(self, weft: Run, vocabulary: int, dim: int) -> list[float]:
        """Bytes that the average rank sent in each step.

        Counted by weft's wire for weft. Computed for PyTorch's two, from what gloo is known to do:
        the sparse one is a ring all-gather of int64 indices and fp32 values, (P-1)/P of all
        ranks' rows from each; the dense one a ring all-reduce of both tables, 2 (P-1)/P of them
        from each. The ranks' distinct rows are those weft counted in the same step; without them
        there is no figure.
        """
        share = (self.ranks - 1) / self.ranks
        if self.way == "dense":
            return [2 * share * 2 * vocabulary * dim * 4] * self.done
        counted = weft.steps[: self.done]
        if self.way == "weft":
            return [step.sent for step in counted]
        return [share * step.total * (8 + dim * 4) for step in counted]

    def cells(self, sent: Sequence[float]) -> list[str]:
        """The figures as they are printed under `COLUMNS`, on the terminal and in the report."""
        step, waited = self.typical("seconds"), self.typical("synchronisation")
        bytes_ = f"{statistics.median(sent) / 2**20:.2f} MiB" if sent else "no figure"
        peak = "no figure"
        if self.memory:
            high, growth = max(high for high, _ in self.memory), max(a - b for a, b in self.memory)
            peak = f"{high / 2**20:,.0f} MiB (+{growth / 2**20:,.0f})"
        return [
            str(self.done),
            ms(step),
            f"{ms(waited)} ({waited / step:.0%})",
            bytes_ + (" computed" if sent and self.way != "weft" else ""),
            peak,
            f"{self.speed():,.0f}",
        ]


def ms(seconds: float) -> str:
    """A time in milliseconds, the same wherever it is shown.

    Example:
        >>> ms(0.0123456), ms(0.7214)
        ('12.3 ms', '721 ms')
    """
    value = seconds * 1e3
    return f"{value:.0f} ms" if value >= 99.95 else f"{value:.1f} ms"


def agreement(weft: Run, other: Run) -> tuple[bool, str]:
    """Whether another way computed what weft did in the steps that both did, and that in words.

    What is no number in one way and a number in the other counts as infinitely different.
    """
    found = [
        (_relative(one, two), what, at)
        for what in ("loss", "gradient")
        for at, (one, two) in enumerate(zip(weft.values(what), other.values(what), strict=False))
    ]
    difference, what, at = max(found, key=lambda one: one[0])
    both = f"weft and {other.name}"
    over = f"over {len(found) // 2} steps"
    if difference <= TOLERANCE:
        return True, (
            f"{both} agree {over}: losses and gradients within {difference:.1e} "
            f"(allowed {TOLERANCE:.0e})"
        )
    return False, (
        f"{both} DO NOT AGREE {over}: the {what} of step {at + 1} differs by {difference:.1e} "
        f"(allowed {TOLERANCE:.0e})"
    )


def _relative(one: float, two: float) -> float:
    if one == two or (one != one and two != two):
        return 0.0
    difference = abs(one - two) / max(abs(one), abs(two))
    return difference if difference == difference else float("inf")


def speedups(runs: Sequence[Run]) -> str:
    """The first way's step against each other's, in words.

    Two decimals below ten: what is 0.95 times as fast must not read as equally fast.
    """
    weft, *others = runs
    ratios = [(run.name, run.typical("seconds") / weft.typical("seconds")) for run in others]
    return " and ".join(
        f"{ratio:.{2 if ratio < 9.995 else 1}f}x as fast as {name}" for name, ratio in ratios
    )
