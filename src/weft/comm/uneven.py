"""`all_gather_v` and `reduce_scatter_v`: tensors in parts of known sizes, which need not be equal.

All ranks know the sizes, so that nobody tells them: the opening compares them. Small tensors go
along with it. Larger parts are received in the result's memory, or reduced chunk by chunk. Of
tensors that the wire does not carry, parts are gathered by one all-gather, padded unless they are
too unequal for it, and reduced behind one exchange, each by the rank that gets it.

Each is the other's adjoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..base.arguments import as_integer, shown
from ..base.errors import WeftError, check, entry, summed_up
from ..base.memory import fresh, memory_of, typed
from ..base.tensors import as_bytes, flattened, plain
from ..call.attempt import preparing
from ..call.mode import PLAIN, Mode
from ..call.opening import Opening
from ..group import default
from ..group.group import Group
from ..schedules import dense
from ..sparse.request import op_name
from ..verbs.interface import Verbs
from .all_reduce import wrong_op
from .differentiable import Linear, apply
from .staging import move, opened_with, unsendable_rows

_SPELLED = 500  # bytes of the sizes that all ranks compare; above, a digest
_PADDED = 2  # a padded all-gather has at most so many times the elements of all parts


@entry
def all_gather_v(tensor: Tensor, sizes: Sequence[int], group: object = None) -> Tensor:
    """Give every rank the rows of all ranks, of which each may have another number. Differentiable.

    Args:
        tensor: `[sizes[rank], *row_shape]`, of any dtype; the row shape, the dtype and the kind of
            device must be the same on every rank. It is not changed.
        sizes: for each rank of the group, in rank order, how many rows it has; 0 is allowed. The
            same on every rank: `weft.all_to_all` is for tensors whose sizes nobody knows.
        group: None (the default group), a Group, a ProcessGroup, or a 1-D DeviceMesh.

    Returns:
        A new tensor `[sum(sizes), *row_shape]`: the rows of all ranks, in rank order. If the tensor
        of some rank requires a gradient, the results of all ranks do, and all must run backward;
        the gradient of a row is the sum of its gradients on all ranks.

    Raises:
        WeftError: some rank's arguments are wrong or differ from the others'; the same text on
            every rank, naming the rank. The next call works.
        WireError: a peer or a link failed; names the culprit. The group is lost.

    Example:
        >>> import torch, weft
        >>> from weft.testing import run
        >>> def program(group):
        ...     mine = torch.full((group.rank + 1,), float(group.rank))
        ...     return weft.all_gather_v(mine, [1, 2]).tolist()
        >>> run(2, program)
        [[0.0, 1.0, 1.0], [0.0, 1.0, 1.0]]
    """
    group = default.resolve(group)
    with preparing(group, "all_gather_v"):
        counts = _counts(sizes, group.size)
        check(unsendable_rows("tensor", tensor))
        _check_rows(tensor, counts[group.rank], f"sizes[{group.rank}]")
        gathering = Gathering(group, "all_gather_v", sizes=counts)
    return apply(gathering, [tensor])[0]


@entry
def reduce_scatter_v(
    tensor: Tensor, sizes: Sequence[int], op: Any = "sum", group: object = None
) -> Tensor:
    """Reduce the rows of all ranks, of which each gets a part, of its own size. Differentiable.

    Args:
        tensor: `[sum(sizes), *row_shape]`, of the same shape and dtype, and on the same kind of
            device, on every rank. It is not changed.
        sizes: for each rank of the group, in rank order, how many rows it gets; 0 is allowed. The
            same on every rank.
        op: as of `weft.all_reduce`.
        group: None (the default group), a Group, a ProcessGroup, or a 1-D DeviceMesh.

    Returns:
        A new tensor `[sizes[rank], *row_shape]`: this rank's part, of which ranks are added in rank
        order; half precision in float32, rounded once. If the tensor of some rank requires a
        gradient, the results of all ranks do, and all must run backward; the gradient is that of
        all parts (for "avg" divided by the size of the group). Ops but "sum" and "avg" have none.

    Raises:
        WeftError: some rank's arguments are wrong or differ from the others'; the same text on
            every rank, naming the rank. The next call works.
        WireError: a peer or a link failed; names the culprit. The group is lost.

    Example:
        >>> import torch, weft
        >>> from weft.testing import run
        >>> def program(group):
        ...     return weft.reduce_scatter_v(torch.tensor([1.0, 2.0, 3.0]), [1, 2]).tolist()
        >>> run(2, program)
        [[2.0], [4.0, 6.0]]
    """
    group = default.resolve(group)
    with preparing(group, "reduce_scatter_v"):
        counts = _counts(sizes, group.size)
        name = op_name(op)
        check(unsendable_rows("tensor", tensor) or wrong_op(name, tensor, ("sum", "avg")))
        _check_rows(tensor, sum(counts), "the sum of sizes")
        reduction = Scattering(group, "reduce_scatter_v", sizes=counts, op=str(name))
    return apply(reduction, [tensor])[0]


def _counts(sizes: Sequence[int], ranks: int) -> list[int]:
    """A caller's sizes. Raises WeftError: they are none."""
    if isinstance(sizes, str | Mapping) or not hasattr(sizes, "__iter__"):
        raise WeftError(f"sizes is {shown(sizes)}: pass a list with the rows of each rank")
    counts = [as_integer(each) for each in sizes]
    if len(counts) != ranks:
        raise WeftError(f"sizes has {len(counts)} numbers for {ranks} ranks: pass one for each")
    if min(counts) < 0:
        wrong = counts.index(min(counts))
        raise WeftError(f"sizes[{wrong}] is no number of rows: pass whole numbers, 0 or more")
    return counts


def _check_rows(tensor: Tensor, rows: int, what: str) -> None:
    if len(tensor) != rows:
        raise WeftError(f"tensor has {len(tensor)} rows, and {what} is {rows}: make them one")


@dataclass
class Gathering(Linear):
    """The all-gather. Its adjoint is the reduce-scatter of sums.

    Attributes:
        sizes: how many rows each rank has.
    """

    sizes: Sequence[int] = ()

    def adjoint(self, name: str) -> Scattering:
        return Scattering(self.group, name, sizes=self.sizes)

    def run(self, tensors: Sequence[Tensor], mode: Mode) -> tuple[list[Tensor], Opening]:
        with preparing(self.group, self.name):
            own = plain(tensors[0])
            found = fresh((sum(self.sizes), *own.shape[1:]), own.dtype, own.device)
        return [found], self.fill(found, own, mode)

    def fill(self, place: Tensor, own: Tensor, mode: Mode = PLAIN) -> Opening:
        """Open the call, and fill a tensor with the parts of all ranks; collective.

        Args:
            place: contiguous: the parts follow one another in rank order.
            own: this rank's part, contiguous; in its place already, or apart from all places.
            mode: of the opening, in which the sizes of the parts are compared.
        """
        group = self.group
        fields = {**self.fields, **_compared(self.sizes, own)}
        parts = torch.split(place, list(self.sizes))
        longest = max(part.nbytes for part in parts)
        opening, verbs, goes_along = opened_with(group, self.name, fields, own, longest, mode)
        if not longest:
            return opening
        if verbs is not None:
            counts = [part.nbytes for part in parts]
            _gather_by_verbs(verbs, as_bytes(own), as_bytes(place), counts)
            return opening
        if goes_along:
            for rank, body in enumerate(opening.read(lambda body: body)):
                group.decode(rank, "a part", _fill, body, parts[rank])
            return opening
        move(group, dict.fromkeys(group.peers, own), {peer: parts[peer] for peer in group.peers})
        if own.data_ptr() != parts[group.rank].data_ptr():
            parts[group.rank].copy_(own)
        return opening


@dataclass
class Scattering(Linear):
    """The reduce-scatter. The adjoint of that of sums is the all-gather.

    Attributes:
        sizes: how many rows each rank gets.
        op: the reduction.
    """

    sizes: Sequence[int] = ()
    op: str = "sum"

    def adjoint(self, name: str) -> Gathering:
        return Gathering(self.group, name, sizes=self.sizes)

    def apply_adjoint(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        found = super().apply_adjoint(gradients)
        return [each / self.group.size for each in found] if self.op == "avg" else found

    def run(self, tensors: Sequence[Tensor], mode: Mode) -> tuple[list[Tensor], Opening]:
        group = self.group
        sizes = list(self.sizes)
        with preparing(group, self.name):
            whole = plain(tensors[0])
            found = fresh((sizes[group.rank], *whole.shape[1:]), whole.dtype, whole.device)
        fields = {"op": self.op, **self.fields, **_compared(sizes, whole)}
        opening, verbs, goes_along = opened_with(
            group, self.name, fields, whole, whole.nbytes, mode
        )
        parts = [flattened(part) for part in torch.split(whole, sizes)]
        place = flattened(found)
        if goes_along:
            first = sum(part.nbytes for part in parts[: group.rank])
            said = [each[first : first + place.nbytes] for each in opening.bodies(whole.nbytes)]
            if place.nbytes:
                terms = [torch.frombuffer(each, dtype=place.dtype) for each in said]
                dense.reduce(terms, self.op, place)
        elif verbs is None:
            _reduce_in_chunks(group, parts, self.op, place)
        elif whole.numel():
            counts = [*map(len, parts)]
            terms_there = verbs.exchange(flattened(whole), counts, [len(place)] * group.size)
            if place.nbytes:
                dense.reduce(torch.split(terms_there, len(place)), self.op, place)
        return [found], opening


def _compared(sizes: Sequence[int], tensor: Tensor) -> dict[str, object]:
    """What ranks compare of a call."""
    text = summed_up(str([*sizes]), _SPELLED, f"{sum(sizes)} rows")
    return {"dtype": tensor.dtype, "sizes": text, "row shape": tuple(tensor.shape[1:])}


def _fill(body: memoryview, part: Tensor) -> None:
    """Copy what a rank said to its part. Raises ValueError if it is not of as many bytes."""
    memory_of(part)[:] = body


def _gather_by_verbs(verbs: Verbs, own: Tensor, place: Tensor, counts: Sequence[int]) -> None:
    """Fill a place with the bytes of all ranks, of which each has so many."""
    longest = max(counts)
    if longest * verbs.size > _PADDED * sum(counts):
        mine = own.repeat(verbs.size)
        place.copy_(verbs.exchange(mine, [len(own)] * verbs.size, counts))
        return
    padded = own
    if len(own) < longest:
        padded = own.new_empty(longest)
        padded[: len(own)].copy_(own)
    found = torch.split(verbs.all_gather(padded), longest)
    torch.cat([part[:count] for part, count in zip(found, counts, strict=True)], out=place)


def _reduce_in_chunks(group: Group, parts: Sequence[Tensor], op: str, out: Tensor) -> None:
    """Reduce every rank's `parts[p]` on rank p, into its `out`."""
    step = max(1, dense.SCRATCH // group.size // out.itemsize)
    for start in range(0, max(map(len, parts)), step):
        chunks = [part[start : start + step] for part in parts]
        own = chunks[group.rank]
        with group.lease(group.size * own.nbytes) as memory:
            terms = list(typed(memory, (group.size, len(own)), out.dtype))
            move(
                group,
                {peer: chunks[peer] for peer in group.peers},
                {peer: terms[peer] for peer in group.peers},
            )
            terms[group.rank] = own
            if len(own):
                dense.reduce(terms, op, out[start : start + step])
