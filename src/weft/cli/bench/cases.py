"""The cases that are measured, every rank's rows, and the right answer.

The rows of a rank are drawn from case and rank alone, so every rank can make everybody's, and
the right answer needs no communication. Indices and values come from separate streams, so the
indices of all ranks can be looked at without making the values.

* `uniform`: distinct rows, evenly over the height, in no order.
* `zipf`: tokens as a text has them, with duplicates; the probability of row i is proportional to
  1 / (i + 1), as in a vocabulary sorted by frequency, so the common rows lie together at the front.
* `identical`: as uniform, but every rank has the same indices (its values are its own).

Values are whole numbers from -8 to 8, which float32 adds without rounding in every order: so each
bit of the right answer is known.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import weft

_EVERYBODY = 1 << 32  # in the place of a rank: a stream that all ranks share


@dataclass(frozen=True, slots=True)
class Case:
    """What one rank brings to a call, in float32.

    Attributes:
        name: what it is called, also the name of its random stream.
        rows: indices of a rank, duplicates counted.
        height: rows of the dense tensor.
        width: values of a row; 1 means plain numbers.
        distribution: uniform, zipf or identical.
    """

    name: str
    rows: int
    height: int
    width: int = 64
    distribution: str = "uniform"

    @property
    def nbytes(self) -> int:
        """Of the dense tensor."""
        return 4 * self.width * self.height


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("uniform", 50_000, 1_000_000),
        Case("zipf", 50_000, 1_000_000, distribution="zipf"),
        Case("small", 500, 1_000_000, distribution="zipf"),
        Case("identical", 50_000, 1_000_000, distribution="identical"),
        Case("scalar", 1_000_000, 10_000_000, width=1),
        Case("wide", 3_000, 100_000, width=1024),
        Case("full", 60_000, 100_000, width=16),
    )
}
"""The cases by name; sizes are those of one rank."""


def indices(case: Case, rank: int) -> Tensor:
    """Which rows that rank has: int64 `[rows]`, in no order, with duplicates if the case has them.

    Raises:
        WeftError: the height has too few rows.
    """
    who = _EVERYBODY if case.distribution == "identical" else rank
    stream = _stream(case, who, "indices")
    if case.distribution == "zipf":
        sums = np.cumsum(1 / np.arange(1.0, case.height + 1))
        drawn = (sums / sums[-1]).searchsorted(stream.random(case.rows), side="right")
        return torch.from_numpy(np.minimum(drawn, case.height - 1))  # which rounding may pass
    if case.rows > case.height:
        raise weft.WeftError(
            f"case {case.name}: {case.rows} distinct rows do not fit in a height of {case.height}: "
            "take fewer, or --case zipf, which has duplicates"
        )
    return torch.from_numpy(stream.choice(case.height, case.rows, replace=False))


def values(case: Case, rank: int) -> Tensor:
    """What that rank's rows hold: float32 `[rows, width]`, or `[rows]` where the width is 1."""
    stream = _stream(case, rank, "values")
    whole = np.arange(-8, 9, dtype=np.int8)
    return torch.from_numpy(stream.choice(whole, (case.rows, case.width))).float().squeeze(1)


def _stream(case: Case, rank: int, part: str) -> np.random.Generator:
    label = zlib.crc32(f"{case.name}/{part}".encode())
    return np.random.default_rng([0, label, rank])


def answer(case: Case, ranks: int) -> weft.Rows:
    """The sum over all ranks, without weft's kernels: each row once, in the order of indices."""
    everybody = torch.cat([indices(case, rank) for rank in range(ranks)])
    union, places = torch.unique(everybody, return_inverse=True)
    addends = torch.cat([values(case, rank) for rank in range(ranks)])
    total = torch.zeros(len(union), *addends.shape[1:])
    return weft.Rows(union, total.index_add_(0, places, addends), case.height)
