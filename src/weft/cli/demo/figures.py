"""What happened: a `Run` for each way, with the figures of each of its steps, and what they say.

Figures are computed from what ran and nothing is extrapolated. A time of a step is the mean over
the ranks; over the steps it is the mean of the middle half of them by length, which the first,
slower steps do not move, and in which the parts of a step add up to the step. No torch here: ranks
send these values to the process that shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..wording import mib, ms, number

Floats = npt.NDArray[np.float64]

WAYS = {"weft": "weft", "torch": "PyTorch sparse", "dense": "PyTorch dense"}
"""The ways to sum the gradients, in the order of their turns, and how they are called in print."""

PARTS = ("forward", "backward", "start sums", "next batch", "wait for sums", "update")
"""The parts of a step, in the order they begin.

"start sums" is a part of the backward pass, the next batch is made while the sums are under way,
and "wait for sums" is for what is not done by then.
"""

RECORDED = ("rows", "total", "union", "sent_bytes", "bound_bytes")
"""What weft notes of a call (`weft.sparse.Record`), here summed over both tables."""

FIGURES = ("clock", "loss", "gradient", *PARTS, *RECORDED)
"""Of a step, means over the ranks.

* clock: seconds from the start of the first step to the end of this one;
* loss: over the pairs; gradient: length of the mean gradient of both tables, as one vector;
* the parts of the step, in seconds;
* what weft noted; 0 for the other ways.
"""

COMPUTING = ("forward", "backward", "next batch", "update")
"""The parts of a step that are the same work in every way; the others are for the sums."""

COLUMNS = ("step", "computing", "for sums", "sums alone", "sent a step", "peak memory")

TOLERANCE = 1e-3
"""Largest relative difference of two ways, at any step, that counts as equal.

Each way adds the same numbers in another order, so their sums differ in the last bit of an fp32
(6e-8), and every later step starts from tables that differ by that much. The difference grows as
training goes on, to about 1e-5 after hundreds of steps. A way that lost or doubled rows of a rank
differs by more than 1e-2 at once: in the length of the gradient, since Adagrad takes nearly the
same steps if all gradients are longer by one factor, so the losses alone would hardly tell.
"""


@dataclass(slots=True)
class Run:
    """One way's training, as far as it came.

    Attributes:
        way: a key of `WAYS`.
        wanted: steps that it was to train.
        ranks: how many ranks.
        pairs: pairs of word and context that all ranks together take in a step.
        figures: `FIGURES` of each step, `[steps, len(FIGURES)]`.
        algorithms: what weft chose, in each step.
        alone: seconds of the sums of some steps, made while nothing else was done, of the slowest
            rank; none where the training was interrupted.
        sent: bytes that the average rank sent in each step; see `count_sent`.
        memory: highest resident bytes of a rank that trained this way only, and of one that had
            only started; from a run of its own.
        interrupted: it was ended from outside.
    """

    way: str
    wanted: int
    ranks: int
    pairs: int
    figures: Floats = field(default_factory=lambda: np.empty((0, len(FIGURES))))
    algorithms: list[str] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    sent: Floats = field(default_factory=lambda: np.empty(0))
    memory: list[tuple[int, int]] = field(default_factory=list)
    interrupted: bool = False

    @property
    def name(self) -> str:
        return WAYS[self.way]

    @property
    def done(self) -> int:
        return len(self.figures)

    @property
    def note(self) -> str:
        """Why there are fewer steps than wanted; empty if there are not."""
        if self.done == self.wanted:
            return ""
        why = "interrupted" if self.interrupted else "time limit"
        return f"{self.done} of {self.wanted} steps: {why}"

    def add(self, algorithms: Sequence[str], figures: Floats) -> None:
        """Take the next steps."""
        self.algorithms += algorithms
        self.figures = np.concatenate([self.figures, figures])

    def values(self, name: str) -> Floats:
        """A figure of every step; also "seconds", the whole step, "computing", and "for sums".

        The last is what the training itself spent on summing: on starting sums, and on waiting for
        them and for ranks that are slower.
        """
        several = {
            "seconds": PARTS,
            "computing": COMPUTING,
            "for sums": ("start sums", "wait for sums"),
        }
        places = [FIGURES.index(part) for part in several.get(name, (name,))]
        values: Floats = self.figures[:, places].sum(axis=1)
        return values

    def typical(self, name: str) -> float:
        """A figure of a step: its mean over the middle half of the steps by length."""
        order = np.argsort(self.values("seconds"), kind="stable")
        cut = len(order) // 4
        return float(self.values(name)[order[cut : len(order) - cut]].mean())

    @property
    def share(self) -> float:
        """The part of a step that is spent on sums."""
        return self.typical("for sums") / self.typical("seconds")

    @property
    def sums_alone(self) -> float | None:
        """Seconds of a step's sums while nothing else is done; None where that was not measured."""
        return float(np.median(self.alone)) if self.alone else None

    @property
    def speed(self) -> float:
        """Pairs a second, all ranks together."""
        return self.pairs / self.typical("seconds")

    def count_sent(self, weft: Run, vocabulary: int, dim: int) -> None:
        """Say how many bytes the average rank sent in each step.

        Counted by weft's group for weft. Computed for PyTorch's two, from what gloo is known to do:
        the sparse one is a ring all-gather of int64 indices and fp32 values, (P-1)/P of all
        ranks' rows from each; the dense one a ring all-reduce of both tables, 2 (P-1)/P of them
        from each. The ranks' distinct rows are those weft counted in the same step; without them
        there is no figure.
        """
        share = (self.ranks - 1) / self.ranks
        if self.way == "weft":
            self.sent = weft.values("sent_bytes")
        elif self.way == "torch":
            self.sent = share * weft.values("total")[: self.done] * (8 + dim * 4)
        else:
            self.sent = np.full(self.done, 2 * share * 2 * vocabulary * dim * 4)

    def cells(self) -> list[str]:
        """The figures as they are printed under `COLUMNS`, on the terminal and in the report."""
        sent = mib(float(np.median(self.sent)))
        if self.way != "weft":
            sent += " computed"
        peak = "no figure"
        if self.memory:
            high = max(high for high, _ in self.memory)
            growth = max(high - idle for high, idle in self.memory)
            peak = f"{mib(high)} (+{number(growth, 2**-20)})"
        alone = "no figure" if self.sums_alone is None else ms(self.sums_alone)
        summed = f"{ms(self.typical('for sums'))} ({self.share:.0%})"
        whole, computing = ms(self.typical("seconds")), ms(self.typical("computing"))
        return [whole, computing, summed, alone, sent, peak]


def agreement(weft: Run, other: Run) -> tuple[bool, str]:
    """Whether another way computed what weft did in the steps that both did, and that in words.

    What is no number in one way and a number in the other counts as infinitely different.
    """
    steps = min(weft.done, other.done)
    worst, what, at = -1.0, "", 0
    for name in ("loss", "gradient"):
        one, two = weft.values(name)[:steps], other.values(name)[:steps]
        with np.errstate(invalid="ignore"):  # of what is infinite
            apart = np.abs(one - two) / np.maximum(np.abs(one), np.abs(two))
        apart[(one == two) | (np.isnan(one) & np.isnan(two))] = 0.0
        apart = np.nan_to_num(apart, nan=np.inf)
        if apart.max() > worst:
            worst, what, at = float(apart.max()), name, int(apart.argmax())
    agrees = worst <= TOLERANCE
    words = f"losses and gradients within {worst:.1e}"
    if not agrees:
        words = f"the {what} of step {at + 1} differs by {worst:.1e}"
    verb = "agree" if agrees else "DO NOT AGREE"
    over = f"over {steps} steps"
    return agrees, f"weft and {other.name} {verb} {over}: {words} (allowed {TOLERANCE:.0e})"


def faster(runs: Sequence[Run], seconds: Callable[[Run], float | None]) -> str:
    """How fast the first way is beside each other, by a time of each, in words; may be empty.

    Example:
        >>> runs = [Run("weft", 1, 2, 9, alone=[1.0]), Run("torch", 1, 2, 9, alone=[3.0])]
        >>> faster(runs, lambda run: run.sums_alone)
        '3.00x as fast as PyTorch sparse'
    """
    own, *others = [(run.name, seconds(run)) for run in runs]
    return " and ".join(
        f"{number(took / own[1])}x as fast as {name}" for name, took in others if took and own[1]
    )


def step_of(run: Run) -> float:
    """Seconds of a way's step."""
    return run.typical("seconds")


def sums_of(run: Run) -> float | None:
    """Seconds of a way's sums alone."""
    return run.sums_alone
