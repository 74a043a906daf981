"""What happened: a `Run` for each way, with the figures of each of its steps, and what they say.

A figure of a step is the mean over the ranks. Over the steps a time is the mean of the middle half
of them by length, which the first, slower steps do not move, and in which the parts of a step add
up to the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..words import number

Numbers = npt.NDArray[Any]

WAYS = {"weft": "weft", "torch": "PyTorch sparse", "dense": "PyTorch dense"}
"""The ways to sum the gradients, in the order of their turns, and how they are called in print."""

FIGURES = ("clock", "loss", "gradient", "seconds", "sums", "sent")
"""Of a step.

* clock: seconds of training of this way, to the end of this step;
* loss: over the pairs; gradient: length of the mean gradient of both tables, as one vector;
* seconds: of the step; sums: of these, what was spent on starting the sums and on waiting for them
  and for ranks that are slower;
* sent: bytes of the average rank: counted for weft, computed for PyTorch.
"""

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
    """One way's training, as far as it came; `figures` is `[steps, len(FIGURES)]`."""

    way: str
    figures: Numbers = field(default_factory=lambda: np.empty((0, len(FIGURES))))

    @property
    def name(self) -> str:
        return WAYS[self.way]

    def add(self, figures: Numbers) -> None:
        """Take the next steps."""
        self.figures = np.concatenate([self.figures, figures])

    def values(self, name: str) -> Numbers:
        """A figure of every step."""
        return self.figures[:, FIGURES.index(name)]

    def told(self) -> dict[str, str]:
        """What a way has come to, and what a step of it takes, by title."""
        seconds, sums = self.typical("seconds"), self.typical("sums")
        times = {"a step": seconds, "computing": seconds - sums, "sums": sums}
        return {
            "steps": str(len(self.figures)),
            "loss": f"{self.values('loss')[-10:].mean():.4f}",
            **{title: f"{number(value, 1e3)} ms" for title, value in times.items()},
            "sent": f"{number(self.typical('sent'), 2**-20)} MiB",
        }

    def line(self) -> str:
        """The same as a line."""
        return f"{self.name}: {', '.join(f'{each} {value}' for each, value in self.told().items())}"

    def typical(self, name: str) -> float:
        """A figure of a step: its mean over the middle half of the steps by length."""
        order = np.argsort(self.values("seconds"))
        cut = len(order) // 4
        return float(self.values(name)[order[cut : len(order) - cut]].mean())


def agreement(weft: Run, other: Run) -> tuple[bool, str]:
    """Whether another way had weft's losses and gradients at every step, and that in words."""
    steps = min(len(weft.figures), len(other.figures))  # after Ctrl-C one has more
    one, two = (run.figures[:steps, 1:3] for run in (weft, other))
    apart = (np.abs(one - two) / np.abs(one)).max()
    agrees = bool(apart <= TOLERANCE)  # what is no number agrees with nothing
    verb = "agree" if agrees else "DO NOT AGREE"
    return agrees, (
        f"weft and {other.name} {verb} over {steps} steps: losses and gradients within "
        f"{apart:.1e} (allowed: {TOLERANCE:.0e})"
    )


def headline(runs: list[Run]) -> str:
    """How fast weft's whole step is beside the others'."""
    weft, *others = runs
    own = weft.typical("seconds")
    ratios = [f"{run.typical('seconds') / own:.2f}x as fast as {run.name}" for run in others]
    return f"A step of training with weft is {' and '.join(ratios)}"
