"""The right answer, made without any collective and without weft's kernels, and who gave it.

A result is right when it equals the sum (or other reduction) over all ranks' rows, made here in
float64 or int64 by numpy and torch, and, since everybody must hold the same bits, when the digests
of all ranks are equal. With whole-numbered values every order of adding is exact, so equality is
exact too. Where rounding enters (`values="normal"`, and peers that add in half precision) an
element may be off by n * eps * sum(|x|), for its n addends x: the bound of recursive summation,
whatever the order (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .cases import Case, indices, values

__all__ = ["Answer", "Sizes", "answer", "differs", "digest", "sizes"]

_INDEX_BYTES = 4  # of the bound, as everywhere in weft

_REDUCE = {
    "min": np.minimum,
    "max": np.maximum,
    "prod": np.multiply,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much there is to move.

    Attributes:
        ranks: P.
        total: K, the distinct rows of each rank, added up.
        union: U, the rows that any rank has.
        bound_bytes: what the average rank must receive at least, [K + (P-2)U]/P rows with an index
            of 4 bytes each (design, "The bound").
    """

    ranks: int
    total: int
    union: int
    bound_bytes: float

    @property
    def mean(self) -> float:
        """Distinct rows of the average rank."""
        return self.total / self.ranks


@dataclass(frozen=True, slots=True)
class Answer:
    """What every rank should hold after a call.

    Attributes:
        indices: the union, sorted, int64, `[union]`.
        exact: the reduced values in float64 or int64, `[union, *row_shape]`.
        slack: how far an element may be off where adding rounds, float64, the same shape.
    """

    case: Case
    indices: Tensor
    exact: Tensor
    slack: Tensor | None

    @property
    def values(self) -> Tensor:
        """The reduced values, rounded once to the dtype of the case."""
        return self.exact.to(self.case.torch_dtype)

    def dense(self) -> tuple[Tensor, Tensor | None]:
        """Values and slack as dense tensors of the case's height, zeros where nobody has a row."""
        shape = (self.case.height, *self.case.row_shape)
        exact = self.exact.new_zeros(shape).index_copy_(0, self.indices, self.exact)
        if self.slack is None:
            return exact, None
        return exact, self.slack.new_zeros(shape).index_copy_(0, self.indices, self.slack)


def sizes(case: Case, ranks: int, seed: int) -> Sizes:
    """Count rows, distinct and united, from the indices of all ranks."""
    distinct = [np.unique(indices(case, rank, seed).numpy()) for rank in range(ranks)]
    total = sum(len(run) for run in distinct)
    union = len(np.unique(np.concatenate(distinct)))
    received = max(0.0, (total + (ranks - 2) * union) / ranks)  # a rank alone receives nothing
    return Sizes(ranks, total, union, received * (case.row_bytes + _INDEX_BYTES))


def answer(case: Case, ranks: int, seed: int, *, rounds: bool) -> Answer:
    """The right answer, from the rows of all ranks; `rounds` says that the slack is wanted."""
    wide = torch.float64 if case.torch_dtype.is_floating_point else torch.int64
    everybody = torch.cat([indices(case, rank, seed) for rank in range(ranks)]).long()
    union, place = (torch.from_numpy(a) for a in np.unique(everybody.numpy(), return_inverse=True))
    addends = torch.cat([values(case, rank, seed) for rank in range(ranks)]).to(wide)
    if case.op not in ("sum", "avg"):
        order = torch.argsort(place, stable=True)
        begins = torch.searchsorted(place[order], torch.arange(len(union)))
        reduce = _REDUCE[case.op].reduceat
        exact = torch.from_numpy(reduce(addends[order].numpy(), begins.numpy(), axis=0))
        return Answer(case, union, exact, torch.zeros(exact.shape) if rounds else None)
    share = ranks if case.op == "avg" else 1
    exact = addends.new_zeros((len(union), *case.row_shape)).index_add_(0, place, addends)
    exact = exact / share if share > 1 else exact
    if not rounds:
        return Answer(case, union, exact, None)
    slack = torch.zeros(exact.shape, dtype=torch.float64)
    slack.index_add_(0, place, addends.abs().double())
    count = torch.bincount(place, minlength=len(union)).view(-1, *(1 for _ in case.row_shape))
    eps = torch.finfo(case.torch_dtype).eps if case.torch_dtype.is_floating_point else 0.0
    return Answer(case, union, exact, slack.mul_(count * (eps / share)))


def digest(parts: Sequence[Tensor]) -> str:
    """A fingerprint of the bits of some tensors; indices count as int64, whatever their width."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        whole = part.detach().contiguous()
        if whole.dtype is torch.int32:
            whole = whole.long()
        state.update(str((tuple(whole.shape), whole.dtype)).encode())
        if whole.numel():
            state.update(whole.view(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()


def differs(case: Case, got: Tensor, exact: Tensor, slack: Tensor | None) -> str | None:
    """In what a tensor of values differs from the answer, or None if it does not."""
    if got.dtype != case.torch_dtype:
        return f"the values are {got.dtype}, not {case.torch_dtype}"
    if got.shape != exact.shape:
        return f"the values have shape {tuple(got.shape)}, not {tuple(exact.shape)}"
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
