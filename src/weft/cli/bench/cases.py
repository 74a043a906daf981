"""The cases that are measured: every rank's rows, drawn from (case, seed, rank) alone.

Since data come from three numbers, every rank can make everybody's, and the right answer (see
`oracle`) needs no communication. Indices and values come from separate streams, so the indices of
all ranks can be looked at without making the values.

Distributions:

* `uniform`: distinct rows, evenly over the height, in no order.
* `zipf`: tokens as a text has them, with duplicates; the probability of the row of frequency rank
  f (1, 2, ...) is proportional to 1/f over the whole height. With `ids="frequency"` its index is
  f - 1, as in a vocabulary sorted by frequency, so the common rows lie together at the front; with
  `ids="shuffled"` the frequencies are scattered over the indices, the same way on all ranks.
* `identical`: as uniform, but every rank has the same indices (its values are its own).

Values: `integers` are small whole numbers (-8 to 8; -1 and 1 for products), which add without
rounding in every order; `normal` are real ones, which do not.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["CASES", "DISTRIBUTIONS", "DTYPES", "Case", "indices", "values"]

DISTRIBUTIONS = ("uniform", "zipf", "identical")
DTYPES = (
    *("float32", "float64", "float16", "bfloat16"),
    *("int8", "int16", "int32", "int64", "uint8", "bool"),
)
_EVERYBODY = 1 << 32  # in the place of a rank: a stream that all ranks share


@dataclass(frozen=True, slots=True)
class Case:
    """What one rank brings to a call.

    Attributes:
        name: what it is called, also the name of its random stream.
        rows: indices of a rank, duplicates counted.
        height: rows of the dense tensor.
        width: values of a row; 1 means plain numbers, of row shape `()`.
        distribution: one of `DISTRIBUTIONS`.
        ids: for zipf, "frequency" or "shuffled".
        values: "integers" or "normal".
        dtype, index_dtype: names of torch dtypes.
        op: the reduction.
    """

    name: str
    rows: int
    height: int
    width: int = 64
    distribution: str = "uniform"
    ids: str = "frequency"
    values: str = "integers"
    dtype: str = "float32"
    index_dtype: str = "int64"
    op: str = "sum"

    @property
    def row_shape(self) -> tuple[int, ...]:
        return () if self.width == 1 else (self.width,)

    @property
    def row_bytes(self) -> int:
        return self.width * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def scaled(self, size: float) -> Case:
        """The same case with `size` times the rows and the height.

        Example:
            >>> CASES["uniform"].scaled(0.1).rows
            5000
        """
        return replace(
            self, rows=max(1, round(self.rows * size)), height=max(1, round(self.height * size))
        )

    def fault(self) -> str | None:
        """Why this case cannot be made, or None if it can."""
        if min(self.rows, self.height, self.width) < 1:
            return f"rows {self.rows}, height {self.height}, width {self.width}: each is at least 1"
        if self.distribution != "zipf" and self.rows > self.height:
            return (
                f"{self.rows} distinct rows do not fit in a height of {self.height}: "
                "take fewer, or --distribution zipf, which has duplicates"
            )
        if self.index_dtype == "int32" and self.height > 2**31:
            return f"a height of {self.height} needs --index-dtype int64"
        if self.values == "normal" and not self.torch_dtype.is_floating_point:
            return f"--values normal is for floating point, the dtype is {self.dtype}"
        if self.values == "normal" and self.op not in ("sum", "avg", "min", "max"):
            return f"--values normal is for sum, avg, min and max, the op is {self.op}"
        return None


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


def indices(case: Case, rank: int, seed: int) -> Tensor:
    """Which rows that rank has: `[rows]`, in no order, with duplicates if the case has them."""
    who = _EVERYBODY if case.distribution == "identical" else rank
    stream = _stream(case, seed, who, "indices")
    if case.distribution == "zipf":
        places = _zipf(case.height).searchsorted(stream.random(case.rows), side="right")
        # rounding may leave the last sum below a draw
        drawn = np.minimum(places, case.height - 1).astype(np.int64)
        if case.ids == "shuffled":
            drawn = _stream(case, seed, _EVERYBODY, "ids").permutation(case.height)[drawn]
    else:
        drawn = stream.choice(case.height, case.rows, replace=False)
    return torch.from_numpy(drawn).to(getattr(torch, case.index_dtype))


def values(case: Case, rank: int, seed: int) -> Tensor:
    """What that rank's rows hold: `[rows, *row_shape]`."""
    stream = _stream(case, seed, rank, "values")
    shape = (case.rows, *case.row_shape)
    drawn: npt.NDArray[np.generic]
    if case.values == "normal":
        drawn = stream.standard_normal(shape, dtype=np.float32)
    elif case.dtype == "bool":
        drawn = stream.integers(0, 2, shape, dtype=np.int8)
    elif case.op == "prod":
        drawn = stream.integers(0, 2, shape, dtype=np.int8) * np.int8(2) - np.int8(1)
    else:
        drawn = stream.integers(-8, 9, shape, dtype=np.int8)
    return torch.from_numpy(drawn).to(case.torch_dtype)


def _stream(case: Case, seed: int, rank: int, part: str) -> np.random.Generator:
    label = zlib.crc32(f"{case.name}/{part}".encode())
    return np.random.default_rng([seed, label, rank])


@lru_cache(maxsize=2)
def _zipf(height: int) -> npt.NDArray[np.float64]:
    """Distribution function of Zipf(1.0) over 1, 2, ..., height."""
    sums = np.cumsum(1.0 / np.arange(1, height + 1, dtype=np.float64))
    sums /= sums[-1]
    return sums
