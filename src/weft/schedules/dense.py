"""Dense all-reduce: its schedule in posts, its arithmetic, what it costs; and that by verbs.

In posts small tensors go from each to all and every rank reduces them itself: one round. Larger
ones are cut into one part for each rank; part p of every rank goes to rank p, which reduces it and
sends the result to all. A rank receives 2 (P-1)/P of the tensor's bytes, whatever P is. They go in
chunks, so that one chunk is reduced while the next is on its way.

Where hosts have several ranks, as many each, a part is one of a host's: what the ranks of a host
have of it is reduced there, then, alike, what the hosts have of it, and the result goes to the
host's other ranks. So a host's link carries 2 (H-1)/H of the tensor's bytes, of H hosts.

Source: reduce-scatter followed by all-gather, Rabenseifner, "Optimization of Collective Reduction
Operations", ICCS 2004, with a direct exchange in place of the butterflies.

Contributions are combined in rank order, those of a host first, by one rank (or alike by all), so
every rank gets the same bits. Tensors that the wire does not carry are reduced by the process group
that does (`by_verbs`): in its own order, and every rank gets the same bits, too. Half precision,
and float8, is accumulated in float32 and rounded once. In min and max a NaN wins and -0.0 is less
than 0.0 (IEEE 754-2019), as in the sparse reductions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..base.errors import WeftError
from ..base.tensors import flattened
from ..group.channels import GATHERS, SCATTERS, SMALL
from ..group.group import Group
from ..group.pending import Pending
from ..kernels import pool
from ..kernels.ops import OPS, Op
from ..verbs.carrier import verbs_of
from ..verbs.interface import Verbs
from .hosts import row_and_column

SENT_WHOLE = 1 << 13  # bytes that every rank rather sends whole to all others
SCRATCH = 6 << 20  # bytes of others' contributions that a rank collects at once
# elements that are combined at once, in memory that stays in the cache; of more than these torch
# would give a part to threads of its own
BLOCK = 1 << 15
_ALIGN = 64  # bytes that parts and chunks are multiples of

_LANE = "lane of the last reduction in parts"  # of a group's state

# torch's arithmetic lacks these; seen as signed integers they add and multiply to the same bits
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_SAME_BITS = (torch.add, torch.mul, torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor)
_EXTREMA = {OPS["min"].function: torch.minimum, OPS["max"].function: torch.maximum}
_OF_BOOLS = {torch.add: torch.logical_or, torch.mul: torch.logical_and}
# integers of the size of floating-point numbers, of which the bits can be put in the same order
_ORDERED = {torch.float32: torch.int32, torch.float64: torch.int64}
_IN_PLACE = (*_SAME_BITS, *_EXTREMA)  # functions that serve here for every dtype, with `out`


def dense_all_reduce(group: Group, tensor: Tensor, op: str) -> Pending:
    """Start reducing `tensor` (contiguous) over all ranks, in place, in a call that is open.

    Every rank gets the same bits. `op` is one of `weft.kernels.OPS`; "avg" is of floating point and
    complex numbers; int16 and float16 work here even where the wire below refuses them. `wait()`
    returns `[tensor]`.

    Ranks begin reductions in the same order, and wait for them in the same order; up to two may
    be under way.

    Raises:
        WeftError: the op is unknown, or torch cannot apply it to this dtype; or nobody carries the
            tensors of this device.
    """
    if reason := refuses(op, tensor.dtype):
        raise WeftError(f"rank {group.rank_in_errors(group.rank)}: {reason}")
    if group.size == 1 or not tensor.numel():
        group.post()  # which raises if the group is broken
        return _Reduction(tensor)
    verbs = verbs_of(group, tensor.device)
    if verbs is not None:
        by_verbs(verbs, tensor, op)
        return _Reduction(tensor)
    if tensor.nbytes <= SENT_WHOLE:
        return _whole(group, tensor, op)
    grid = row_and_column(group)
    if grid is None:
        return _Parts(group, tensor, op).start()
    row, column = grid
    return _Parts(group.subset(row), tensor, op, group.subset(column)).start()


def by_verbs(verbs: Verbs, tensor: Tensor, op: str) -> None:
    """Reduce a tensor (contiguous) over all ranks by verbs, in place; the same bits on every rank.

    Whatever carries the tensors reduces them, in its order, what it can: half precision widened and
    rounded once, complex numbers as pairs of real ones, and extrema as integers, since not every
    backend has NaN win. Other dtypes and ops each rank reduces itself, in rank order.
    """
    is_pairs = tensor.is_complex() and OPS[op].function is torch.add
    real = torch.view_as_real(tensor) if is_pairs else tensor
    wide = real.float() if _is_narrow(real.dtype) else real
    ordered = _ORDERED.get(wide.dtype)
    if ordered is not None and OPS[op].function in _EXTREMA and verbs.reduces(op, ordered):
        _reduce_in_order(verbs, wide, op, ordered)
    elif verbs.reduces(op, wide.dtype):
        verbs.all_reduce(wide, op)
    else:
        parts = verbs.all_gather(flattened(tensor))
        reduce(parts.view(verbs.size, -1).unbind(), op, tensor)
        return
    if wide is not real:
        real.copy_(wide)


def _reduce_in_order(verbs: Verbs, tensor: Tensor, op: str, dtype: torch.dtype) -> None:
    """Reduce floating-point numbers to an extremum as integers in the same order.

    Of negative ones all bits but the sign are turned around, so -0.0 is less than 0.0. NaN gets the
    sign with which it is the first, or the last, of all.
    """
    limits = torch.iinfo(dtype)
    last = limits.min if op == "min" else limits.max
    numbers = tensor.view(dtype)
    turned = numbers ^ ((numbers >> (limits.bits - 1)) & limits.max)
    turned.masked_fill_(tensor.isnan(), last)
    verbs.all_reduce(turned, op)
    numbers.copy_(turned ^ ((turned >> (limits.bits - 1)) & limits.max))


class _Reduction(Pending):
    """A reduction that the first `wait` completes."""

    def __init__(self, tensor: Tensor, complete: Callable[[], None] | None = None) -> None:
        """`complete`: what completes it; None: it is complete."""
        self._tensor = tensor
        self._complete = complete

    def wait(self) -> list[Tensor]:
        if self._complete is not None:
            self._complete()
            self._complete = None
        return [self._tensor]


def _whole(group: Group, tensor: Tensor, op: str) -> Pending:
    """Send a whole tensor to all others; all then reduce the same."""
    own = flattened(tensor).view(torch.uint8)
    rank = group.rank
    recvs = [(peer, len(own)) for peer in sorted(group.peers)]
    others = group.post([(peer, own) for peer in group.peers], recvs, SMALL)

    def complete() -> None:
        parts = others.wait()
        reduce([*parts[:rank], own, *parts[rank:]], op, tensor)
        others.release()

    return _Reduction(tensor, complete)


class _Parts:
    """Each rank reduces its part and sends it to all, chunk by chunk."""

    def __init__(self, group: Group, tensor: Tensor, op: str, across: Group | None = None) -> None:
        """
        Args:
            group: the ranks among which parts are divided.
            tensor, op: of the reduction.
            across: the ranks of other hosts, over which a part is reduced, too; None: nobody.
        """
        self._tensor = tensor
        self._group = group
        self._across = across
        self._op = op
        self._flat = flattened(tensor)
        grain = max(1, _ALIGN // tensor.element_size())  # elements
        # elements of a rank's part; the last part may have fewer
        self._part = -(-len(self._flat) // group.size // grain) * grain
        chunk = SCRATCH // (group.size - 1) // tensor.element_size()
        self._step = max(grain, chunk // grain * grain)  # elements of a chunk
        self._lane = 0
        self._scatter: Pending | None = None  # of the next chunk

    def start(self) -> Pending:
        """Send the first chunk of each part to the rank that reduces it; waits do the rest."""
        # reductions of one lane match in the order in which they begin, which is the same on all
        # ranks: so two reductions may be under way at once
        self._lane = 1 - self._group.state.get(_LANE, 1)
        self._group.state[_LANE] = self._lane
        self._scatter = self._scatter_chunk(0)
        return _Reduction(self._tensor, self._complete)

    def _complete(self) -> None:
        """Reduce this rank's part, chunk by chunk, and send each to all; receive the others'."""
        group = self._group
        gathers = []
        for start in range(0, self._part, self._step):
            own = self._reduced(start)
            sends = [(peer, own) for peer in group.peers]
            recvs = [(peer, self._piece(peer, start)) for peer in group.peers]
            gathers.append(group.post(sends, recvs, GATHERS[self._lane]))
        for pending in gathers:
            pending.wait()

    def _piece(self, rank: int, start: int) -> Tensor:
        """The chunk that begins `start` elements into rank's part; it may be empty."""
        first = rank * self._part
        end = min(first + self._part, len(self._flat))
        return self._flat[min(first + start, end) : min(first + start + self._step, end)]

    def _scatter_chunk(self, start: int) -> Pending | None:
        """Send a chunk of each part to whom it belongs; collect one's own from all."""
        if start >= self._part:
            return None
        group = self._group
        nbytes = self._piece(group.rank, start).nbytes
        sends = [(peer, self._piece(peer, start)) for peer in group.peers]
        recvs = [(peer, nbytes) for peer in group.peers]
        return group.post(sends, recvs, SCATTERS[self._lane])

    def _reduced(self, start: int) -> Tensor:
        """One's own chunk, reduced; the next is on its way meanwhile."""
        pending = self._scatter
        assert pending is not None
        self._scatter = self._scatter_chunk(start + self._step)
        group = self._group
        own = self._piece(group.rank, start)
        told = dict(zip(group.peers, pending.wait(), strict=True)) | {group.rank: own}
        parts = [told[rank] for rank in range(group.size)]
        if self._across is None:
            reduce(parts, self._op, own)
        else:
            total = partial(parts, self._op, own.dtype)
            dense_all_reduce(self._across, total, _of_partials(self._op)).wait()
            complete(total, self._op, self._across.size * group.size, own)
        pending.release()
        return own


def refuses(op: str, dtype: torch.dtype) -> str | None:
    """Why tensors of this dtype cannot be reduced by this op, or None if they can."""
    if op not in OPS:
        return f"op {op!r} is unknown: use one of {', '.join(OPS)}"
    return _refuses(op, OPS[op], dtype)


@functools.cache
def _refuses(op: str, found: Op, dtype: torch.dtype) -> str | None:
    """The same for an op that there is."""
    if found.mean and not (dtype.is_floating_point or dtype.is_complex):
        return f"op {op} is for floating point, the tensor is {dtype}: sum, then divide"
    if found.function not in _IN_PLACE and (reason := found.refuses(dtype)):
        return reason
    try:
        one = torch.zeros(1, dtype=dtype, device="cpu")
        reduce([one, one], op, one)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        return f"op {op} does not apply to {dtype}: {error}"
    return None


def reduce(parts: Sequence[Tensor], op: str, out: Tensor) -> None:
    """Reduce the contributions of all ranks, which are on one device here.

    Large ones are divided among weft's own threads (`kernels.pool`). torch's would spin for work
    where ranks share cores, so they get blocks that are too small to be divided again.

    Args:
        parts: 1-D, of the size of `out` in bytes, in rank order; they may be read-only memory, and
            are not changed.
        op: one of `weft.kernels.OPS`.
        out: contiguous; may be one of the parts.
    """
    dtype = out.dtype
    into = flattened(out).view(_SIGNED.get(dtype, dtype))
    seen = [part.view(into.dtype) for part in parts]
    if len(seen) == 1:
        into.copy_(seen[0])
        return
    step = BLOCK if into.is_cpu else max(1, len(into))
    inference = torch.is_inference_mode_enabled()  # which a thread does not know of another

    def reduce_range(start: int, end: int) -> None:
        with torch.inference_mode(inference):
            for first in range(start, end, step):
                last = min(first + step, end)
                blocks = [part[first:last] for part in seen]
                _reduce_block(blocks, OPS[op], dtype, into[first:last])

    pool.run(reduce_range, len(into), into.nbytes * len(seen) if into.is_cpu else 0)


def partial(parts: Sequence[Tensor], op: str, dtype: torch.dtype) -> Tensor:
    """What some of the ranks contribute, reduced: neither rounded nor divided, as others follow.

    Args:
        parts: as for `reduce`.
        op: of the whole reduction.
        dtype: of the tensors that are reduced; the result's is wider, if they are narrow.
    """
    seen = [part.view(dtype) for part in parts]
    if _is_narrow(dtype):
        seen = [part.float() for part in seen]
    total = torch.empty_like(seen[0])
    reduce(seen, _of_partials(op), total)
    return total


def complete(total: Tensor, op: str, ranks: int, out: Tensor) -> None:
    """Write to `out` what partial results of so many ranks in all came to; `total` may change."""
    if OPS[op].mean:
        total.div_(ranks)
    out.copy_(total)


def _of_partials(op: str) -> str:
    """The op by which partial results combine."""
    return "sum" if OPS[op].mean else op


def _reduce_block(blocks: Sequence[Tensor], op: Op, dtype: torch.dtype, into: Tensor) -> None:
    """Reduce two blocks or more, of that dtype or what it is seen as; `into` may be one of them."""
    combine = _combine(op, dtype)
    is_narrow = _is_narrow(dtype)
    if is_narrow or op.function not in _IN_PLACE:
        seen = [block.float() for block in blocks] if is_narrow else blocks
        total = functools.reduce(combine, seen)
        into.copy_(total.div_(len(blocks)) if op.mean else total)
        return
    # the first two are written there before the others are read
    rest = [each.clone() if each.data_ptr() == into.data_ptr() else each for each in blocks[2:]]
    combine(blocks[0], blocks[1], out=into)
    for block in rest:
        combine(into, block, out=into)
    if op.mean:
        into.div_(len(blocks))


def _is_narrow(dtype: torch.dtype) -> bool:
    """Whether numbers of this dtype are accumulated in float32."""
    return dtype.is_floating_point and dtype.itemsize <= 2


def _combine(op: Op, dtype: torch.dtype) -> Callable[..., Tensor]:
    """How two contributions combine."""
    if dtype is torch.bool and op.function in _OF_BOOLS:
        return _OF_BOOLS[op.function]
    choose = _EXTREMA.get(op.function)
    if choose is not None and dtype in _SIGNED:
        return functools.partial(_unsigned_extremum, choose)
    if choose is not None and dtype.is_floating_point:
        return functools.partial(_extremum, choose)
    return choose or op.function


def _unsigned_extremum(
    choose: Callable[..., Tensor], left: Tensor, right: Tensor, *, out: Tensor
) -> Tensor:
    """Of unsigned numbers that are seen as signed: flipping the top bit turns the order around."""
    top = torch.iinfo(left.dtype).min
    return torch.bitwise_xor(choose(left ^ top, right ^ top), top, out=out)


def _extremum(
    choose: Callable[..., Tensor], left: Tensor, right: Tensor, *, out: Tensor | None = None
) -> Tensor:
    """torch's choice but for the sign of a zero, which torch chooses by where it lies.

    A minimum is negative where either is, but for a NaN; a maximum where both are. It takes less
    memory than the entries of `OPS`, which leave the sign of a NaN.
    """
    bits = torch.int32 if left.dtype is torch.float32 else torch.int64
    one, two, sign = left.view(bits), right.view(bits), torch.iinfo(bits).min
    is_least = choose is torch.minimum
    signs = (one | two).bitwise_and_(sign) if is_least else (one & two).bitwise_or_(~sign)
    found = choose(left, right, out=out)
    join = torch.bitwise_or if is_least else torch.bitwise_and
    return join(found.view(bits), signs, out=found.view(bits)).view(left.dtype)
