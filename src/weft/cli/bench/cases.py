"""The cases that are measured, every rank's rows, and the right answer.

The rows of a rank are drawn from (case, seed, rank) alone, so every rank can make everybody's, and
the right answer needs no communication. Indices and values come from separate streams, so the
indices of all ranks can be looked at without making the values.

Distributions:

* `uniform`: distinct rows, evenly over the height, in no order.
* `zipf`: tokens as a text has them, with duplicates; the probability of the row of frequency rank
  f (1, 2, ...) is proportional to 1/f over the whole height. With `ids="frequency"` its index is
  f - 1, as in a vocabulary sorted by frequency, so the common rows lie together at the front; with
  `ids="shuffled"` the frequencies are scattered over the indices, the same way on all ranks.
* `identical`: as uniform, but every rank has the same indices (its values are its own).
* `text`, `ratings`, `graph`, `tables`: of real work; see `real`. Each has the height of its data.

Values: `integers` are small whole numbers (-8 to 8; -1 and 1 for products), which add without
rounding in every order; `normal` are real ones, which do not.

A result is right when it equals the reduction over all ranks' rows, made here in float64 or int64
by numpy and torch, without weft's kernels, and, since everybody must hold the same bits, when the
digests of all ranks are equal. With whole-numbered values equality is exact. Where rounding enters
(`values="normal"`, and peers that add in half precision) an element may be off by
n * eps * sum(|x|), for its n addends x: the bound of recursive summation, whatever the order
(Higham, Accuracy and Stability of Numerical Algorithms, section 4.2).

Where weft sends values of fewer bits than it adds (half precision, and `wire_dtype`) it rounds what
each rank has, and the result. So it has an answer of its own: whole numbers are rounded in these
two places and added without rounding, which must give weft's bits. Other values, and means, may be
off by the bound of docs/wire-dtype.md.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import weft

from ..counted import Counted
from .real import TRACES, draws, zipf

Distribution = Literal["uniform", "zipf", "identical"]
Dtype = Literal[
    "float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "bool"
]  # fmt: skip
Ids = Literal["frequency", "shuffled"]
Numbers = Literal["integers", "normal"]
WireDtype = Literal["bfloat16", "float16", "float32"]
IndexDtype = Literal["int32", "int64"]
Op = Literal["sum", "avg", "min", "max", "prod", "band", "bor", "bxor"]
_EVERYBODY = 1 << 32  # in the place of a rank: a stream that all ranks share
_HALVES = torch.float16, torch.bfloat16


@dataclass(frozen=True, slots=True)
class Case:
    """What one rank brings to a call.

    Attributes:
        name: what it is called, also the name of its random stream.
        rows: indices of a rank, duplicates counted.
        height: rows of the dense tensor.
        width: values of a row; 1 means plain numbers, of row shape `()`.
        distribution: uniform, zipf or identical, or of real work: a name in `real.TRACES`.
        ids: for zipf, "frequency" or "shuffled".
        values: "integers" or "normal".
        dtype, index_dtype: names of torch dtypes.
        op: the reduction.
        wire_dtype: name of the dtype in which weft sends values; None: in their own. Peers have no
            such option.
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
    wire_dtype: str | None = None

    @property
    def row_shape(self) -> tuple[int, ...]:
        return () if self.width == 1 else (self.width,)

    @property
    def row_bytes(self) -> int:
        return self.width * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        return _dtype_named(self.dtype)

    @property
    def torch_wire_dtype(self) -> torch.dtype | None:
        """What weft's calls get as `wire_dtype`."""
        return None if self.wire_dtype is None else _dtype_named(self.wire_dtype)

    @property
    def sent_dtype(self) -> torch.dtype:
        """The dtype in which weft sends what a rank has, and the result."""
        own = self.torch_dtype
        wire = self.torch_wire_dtype
        if wire is None:
            return own
        if own in _HALVES and wire is torch.float32:  # the result alone is rounded, if any is
            return weft.kernels.OPS[self.op].accumulator(own)
        return wire if wire.itemsize < own.itemsize else own

    @property
    def sent_row_bytes(self) -> int:
        """Bytes of the values of a row, as weft sends it."""
        return self.width * self.sent_dtype.itemsize

    @property
    def rounded_to(self) -> torch.dtype | None:
        """The dtype to which weft rounds sums; None: to none but that in which it adds."""
        own = self.torch_dtype
        if self.sent_dtype.itemsize < own.itemsize:
            return self.sent_dtype
        return own if own in _HALVES and weft.kernels.OPS[self.op].rounds else None

    @property
    def rounds(self) -> bool:
        """Whether rounding enters, of weft or of a peer, so that ranks and orders may differ."""
        return self.values == "normal" or self.torch_dtype.itemsize == 2

    @property
    def heights(self) -> tuple[int, ...]:
        """Rows of each table: of one, if the case is not one of many tables."""
        trace = TRACES.get(self.distribution)
        return (self.height,) if trace is None else trace.heights

    def scaled(self, size: float) -> Case:
        """The same case with `size` times the rows and the height, which real data keep.

        Example:
            >>> CASES["uniform"].scaled(0.1).rows
            5000
        """
        rows = max(1, round(self.rows * size))
        if self.distribution in TRACES:
            return replace(self, rows=rows)
        return replace(self, rows=rows, height=max(1, round(self.height * size)))

    def fault(self) -> str | None:
        """Why this case cannot be made, or None if it can."""
        if min(self.rows, self.height, self.width) < 1:
            return f"rows {self.rows}, height {self.height}, width {self.width}: each is at least 1"
        if self.height != sum(self.heights):
            data = sum(self.heights)
            return f"the height of {self.distribution} is that of its data, {data}: leave it out"
        if self.distribution in ("uniform", "identical") and self.rows > self.height:
            return (
                f"{self.rows} distinct rows do not fit in a height of {self.height}: "
                "take fewer, or --distribution zipf, which has duplicates"
            )
        if self.index_dtype == "int32" and self.height > 2**31:
            return f"a height of {self.height} needs --index-dtype int64"
        if self.op not in _REDUCE:
            return f"there is no op {self.op}"
        if self.wire_dtype is not None and not self.torch_dtype.is_floating_point:
            return f"--wire-dtype is for floating point, not for {self.dtype}"
        floats = self.torch_dtype.is_floating_point and self.op in ("sum", "avg", "min", "max")
        if self.values == "normal" and not floats:
            return (
                "--values normal is for sum, avg, min and max of floating point, not for "
                f"{self.op} of {self.dtype}"
            )
        return None


def _dtype_named(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is no dtype of values")
    return dtype


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

REAL: dict[str, Case] = {
    name: Case(name, rows, sum(TRACES[name].heights), width, distribution=name)
    for name, rows, width in (
        ("text", 32_768, 64),
        ("ratings", 4_096, 64),
        ("graph", 16_384, 64),
        ("tables", 512 * len(TRACES["tables"].heights), 16),
    )
}
"""The cases of real work by name."""


def indices(case: Case, rank: int, seed: int) -> Tensor:
    """Which rows that rank has: `[rows]`, in no order, with duplicates if the case has them."""
    who = _EVERYBODY if case.distribution == "identical" else rank
    stream = _stream(case, seed, who, "indices")
    if case.distribution in TRACES:
        shared = _stream(case, seed, _EVERYBODY, "indices")
        drawn = TRACES[case.distribution].draw(case.rows, rank, shared, stream)
    elif case.distribution == "zipf":
        drawn = draws(zipf(case.height, 1.0), case.rows, stream)
        if case.ids == "shuffled":
            drawn = _stream(case, seed, _EVERYBODY, "ids").permutation(case.height)[drawn]
    else:
        drawn = stream.choice(case.height, case.rows, replace=False)
    return torch.from_numpy(drawn).to(getattr(torch, case.index_dtype))


def values(case: Case, rank: int, seed: int) -> Tensor:
    """What that rank's rows hold: `[rows, *row_shape]`."""
    stream = _stream(case, seed, rank, "values")
    shape = (case.rows, *case.row_shape)
    if case.values == "normal":
        return torch.from_numpy(stream.standard_normal(shape)).to(case.torch_dtype)
    several = [0, 1] if case.dtype == "bool" else [-1, 1] if case.op == "prod" else range(-8, 9)
    return torch.from_numpy(stream.choice(np.array(several, np.int8), shape)).to(case.torch_dtype)


def _stream(case: Case, seed: int, rank: int, part: str) -> np.random.Generator:
    label = zlib.crc32(f"{case.name}/{part}".encode())
    return np.random.default_rng([seed, label, rank])


_REDUCE: dict[str, np.ufunc] = {
    "sum": np.add,
    "avg": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "prod": np.multiply,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What every rank should hold after a call.

    Attributes:
        indices: the union, sorted, int64, `[union]`.
        exact: the reduced values in float64 or int64, `[union, *row_shape]`.
        slack: how far an element may be off where the case rounds, the same shape; else None.
    """

    case: Case
    indices: Tensor
    exact: Tensor
    slack: Tensor | None


def sizes(case: Case, ranks: int, seed: int, hosts: weft.sparse.Hosts | None = None) -> Counted:
    """Rows, distinct and united, counted from the indices of all ranks, with bytes as weft sends.

    Args:
        case: what a rank brings.
        ranks: how many.
        seed: of the data.
        hosts: which ranks share one; None: none does.
    """
    distinct = [np.unique(indices(case, rank, seed).numpy()) for rank in range(ranks)]
    counts = [len(run) for run in distinct]
    hosts = hosts or weft.sparse.Hosts(tuple(range(ranks)))
    rows_of_hosts = []
    for neighbours in hosts.ranks:
        own = [distinct[rank] for rank in neighbours]
        others = [distinct[rank] for rank in range(ranks) if rank not in neighbours]
        rows_of_hosts.append((_united(own), _united(others)))
    sizes = weft.sparse.Sizes(
        ranks,
        total=sum(counts),
        most=max(counts),
        fewest=min(counts),
        height=case.height,
        row=case.sent_row_bytes,
        partial=case.sent_row_bytes,
        places=case.height,
        hosts=hosts,
    )
    return Counted(sizes, _united(distinct), tuple(rows_of_hosts))


def _united(runs: Sequence[npt.NDArray[np.int64]]) -> int:
    """How many indices there are in any of the runs."""
    return len(np.unique(np.concatenate(runs))) if runs else 0


def answer(case: Case, ranks: int, seed: int) -> Answer:
    """The right answer, from the rows of all ranks."""
    return _of_ranks(case, range(ranks), seed)


def _of_ranks(case: Case, ranks: Sequence[int], seed: int) -> Answer:
    """The right answer of a call of these ranks."""
    floating = case.torch_dtype.is_floating_point
    wide = torch.float64 if floating else torch.int64
    everybody = torch.cat([indices(case, rank, seed) for rank in ranks]).long()
    order = everybody.argsort(stable=True)
    addends = torch.cat([values(case, rank, seed) for rank in ranks]).to(wide)[order].numpy()
    union, begins, counts = np.unique(everybody[order], return_index=True, return_counts=True)
    exact = torch.from_numpy(_REDUCE[case.op].reduceat(addends, begins))
    slack = None
    if case.rounds:
        eps = torch.finfo(case.torch_dtype).eps if floating and case.op in ("sum", "avg") else 0.0
        slack = torch.from_numpy(np.add.reduceat(np.abs(addends), begins))
        slack = slack * (torch.from_numpy(counts) * eps).view(-1, *(1 for _ in case.row_shape))
    if case.op == "avg":
        count = len(ranks)
        exact, slack = exact / count, None if slack is None else slack / count
    return Answer(case, torch.from_numpy(union), exact, slack)


def answer_of_weft(right: Answer, ranks: int, seed: int) -> Answer:
    """The right answer of weft, which rounds to `case.rounded_to`; `right` is without that.

    Whole numbers are added without rounding: so each bit of their sum is known. Else it is the
    bound of docs/wire-dtype.md.
    """
    case = right.case
    rounded = case.rounded_to
    is_whole = case.values == "integers" and case.op != "avg"
    if is_whole and (rounded is None or case.op != "sum"):  # small numbers are in every dtype
        return replace(right, slack=None)
    if rounded is None:
        return right

    if is_whole:
        total = _sum_of_ranks(right, ranks, seed, lambda own: _rounded(own, case.sent_dtype))
        return replace(right, exact=_rounded(total, rounded), slack=None)

    kind = torch.finfo(rounded)
    unit = kind.eps / 2
    tiny = kind.smallest_normal * unit  # half of the smallest number
    slack = unit * right.exact.abs() + tiny  # the result is rounded
    if case.sent_dtype == rounded and case.op in ("sum", "avg"):  # and what each rank sends
        magnitudes = _sum_of_ranks(right, ranks, seed, torch.abs)
        mean = magnitudes / ranks if case.op == "avg" else magnitudes
        slack += unit * (1 + unit) * mean + ranks * tiny
    return replace(right, slack=slack + (1 + unit) ** 2 * _of_additions(right))


def _rounded(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers as they come out of that dtype, in their own."""
    return numbers.to(dtype).to(numbers.dtype)


def _sum_of_ranks(
    right: Answer, ranks: int, seed: int, change: Callable[[Tensor], Tensor]
) -> Tensor:
    """The sums, in the places of the right ones, of what `change` makes of each rank's own."""
    total = torch.zeros_like(right.exact)
    for rank in range(ranks):
        own = _of_ranks(right.case, [rank], seed)
        total[torch.searchsorted(right.indices, own.indices)] += change(own.exact)
    return total


def _of_additions(right: Answer) -> Tensor:
    """How far an element may be off by weft's additions, of which none is in half precision."""
    case = right.case
    eps = torch.finfo(weft.kernels.OPS[case.op].accumulator(case.torch_dtype)).eps
    if case.values == "integers":  # sums are exact, and divided
        return eps * right.exact.abs()
    assert right.slack is not None  # of real numbers
    return right.slack * (eps / torch.finfo(case.torch_dtype).eps)


def digest(parts: Sequence[Tensor]) -> str:
    """A fingerprint of the bits of some tensors; indices count as int64, whatever their width."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        whole = part.detach().contiguous()
        if whole.dtype is torch.int32:
            whole = whole.long()
        state.update(str((tuple(whole.shape), whole.dtype)).encode())
        state.update(whole.view(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()


def differs(got: Tensor, answer: Answer) -> str | None:
    """In what the values of a result differ from the answer, or None if they do not."""
    case, exact, slack = answer.case, answer.exact, answer.slack
    if (got.dtype, got.shape) != (case.torch_dtype, exact.shape):
        wanted = f"{case.torch_dtype} of shape {tuple(exact.shape)}"
        return f"the values are {got.dtype} of shape {tuple(got.shape)}, not {wanted}"
    if slack is None:
        bad = got != exact.to(case.torch_dtype)
    else:
        bad = ~((got.to(exact.dtype) - exact).abs() <= slack)  # so that a NaN is bad
    wrong = int(bad.sum())
    if not wrong:
        return None
    at = tuple(int(axis) for axis in bad.nonzero()[0])
    place, here, there = list(at), got[at].item(), exact[at].item()
    return f"{wrong} of {got.numel()} values are wrong, the first at {place}: {here}, not {there}"
