"""holders: each row is summed at one of the ranks that hold it; the sums go round the ring.

All index sets go to all ranks first. So everybody knows who holds what, and from that alone who
sums what: one of the holders of a row, so that the row itself need not be sent there (`weights`
says how evenly they are chosen). The other holders send their rows to it; what it sums goes round
the ring to everybody, and what nobody else holds goes first, while the sums are made. Values
travel without indices, and the size of the result is known before the first of them.

An index that m ranks hold takes m-1 messages to come together and P-1 to be told: that is the
lower bound (docs/holders.md), and no value is sent beyond it. What it costs is that every rank
receives every index set.

Chosen equally often, ranks with about as many rows receive and send about as many: the ring brings
a rank every row of the result but those it sums itself, and each row it sums costs it what the
other holders send. With unequal ranks that is not so. A rank that sums no rows is sent all of
them, and its left neighbour sends all of them; one that sums a row of many holders receives many.
So the ranks get weights, found on a sample of the rows: those with too much to receive are chosen
less often, and those that send too much, or whose left neighbour does, more often. The weights
decide what is sent where: all ranks find them from the same index sets, in integers or in
floating-point operations that every machine rounds alike.

Best for wide rows, up to some tens of ranks.

Known to us from nowhere else; the parts are known. Owners among the sharers of an index: the
gather-scatter libraries, such as gslib, and PETSc's star forests (Zhang et al., TPDS 2022), whose
patterns are set up once and used often. Index sets ahead of values: Zhao and Canny, "Kylix"
(ICPP'14).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ... import kernels
from ...base.memory import typed
from ...group.channels import SUMS
from ...group.pending import Pending
from ...kernels import Shares
from ...wire.interface import Lease
from ..call import Call
from ..canonical import CanonicalRows
from ..header import Longs
from ..registry import algorithm
from ..relay import Relay, relay_rows
from ..rows import Rows
from ..stream import (
    Inflow,
    Ring,
    Source,
    ascending,
    in_rank_order,
    send_list_to_all,
    send_rows,
    wait_all,
)


@algorithm
def holders(own: CanonicalRows, call: Call) -> Rows:
    # to all: index lists
    indices = own.indices.to(call.wire_index)
    lists = send_list_to_all(call, indices)
    runs = in_rank_order(call, lists, indices)
    union, shares = _union_and_shares(call, runs)
    result = call.result_at(union.indices)
    if call.sizes.row:  # else rows are without bytes
        _move_values(call, own, union, shares, result.values)
    lists.release()
    return result


def _union_and_shares(call: Call, runs: Sequence[Tensor]) -> tuple[kernels.Union, Shares]:
    """The union of all index sets, and who sums what: the same on every rank."""
    if call.sizes.staying:  # where the host would have to wait for a sample
        equal = [_ONE] * call.group.size
        last = call.sizes.places - 1
        with ascending(call, dict(enumerate(runs))):
            union, shares = kernels.unite_and_share(runs, equal, call.of_device.marks, last)
        call.of_device.below = union.below
        return union, shares
    union = kernels.union(runs)
    total = union.indices.numel()
    return union, kernels.shares(union.slots, total, weights(union.slots, total))


def _move_values(
    call: Call, own: CanonicalRows, union: kernels.Union, shares: Shares, out: Tensor
) -> None:
    """Send rows to those who sum them, and all sums to all."""
    me = call.group.rank
    at_once = call.sizes.staying
    counts = [shares.count(rank) for rank in range(call.group.size)]
    step = max(1, counts[me]) if at_once else relay_rows(call.sizes, max(counts))
    sums = _Sums(call, own, union.slots, shares, step).start()
    dealt = kernels.deal(union.slots[me], shares, me)
    with _sent(call.incoming, own, dealt):
        if at_once:
            _gather_at_once(call, sums, shares, counts, out)
        else:
            _gather(call, sums, shares, counts, out)
    sums.release()


def _gather(call: Call, sums: _Sums, shares: Shares, counts: Sequence[int], out: Tensor) -> None:
    """Write all sums to `out`: those of this rank go round the ring as they are made."""
    me = call.group.rank
    places = [shares.of(rank) for rank in range(call.group.size)]
    relay = Relay(call, counts).start()
    for step in range(relay.steps):
        chunk = relay.own(step)
        if chunk is not None:
            sums.write(step, chunk)
            relay.send(step, chunk)
            first = step * relay.rows
            kernels.put(out, places[me][first : first + len(chunk)], chunk)
        for origin, first, some in relay.turn(step):
            kernels.put(out, places[origin][first : first + len(some)], some)
    relay.finish()


def _gather_at_once(
    call: Call, sums: _Sums, shares: Shares, counts: Sequence[int], out: Tensor
) -> None:
    """The same by messages to all others, which are sent together."""
    call.group.post().wait()  # rows travel in a round of their own, which all take part in
    with call.group.lease(out.nbytes) as memory:
        sums_of_all = typed(memory, tuple(out.shape), call.dtype)
        parts = torch.split(sums_of_all, list(counts))
        mine = parts[call.group.rank]
        ring = Ring(call, parts, SUMS, out.nbytes / len(parts)).start()
        sums.write(0, mine)
        ring.send(mine)
        ring.finish()
        kernels.put(out, shares.order, sums_of_all)


@contextmanager
def _sent(call: Call, own: CanonicalRows, dealt: Sequence[Tensor]) -> Iterator[None]:
    """Send each peer the rows that it was dealt, which it sums; at the end wait for that.

    They are copied together, since a message is one piece of memory.
    """
    step = call.chunk_rows
    peers = call.group.peers
    leases: list[Lease] = []
    under_way: list[Pending] = []
    for start in range(0, max(len(dealt[peer]) for peer in peers), step):
        for peer in peers:
            rows = dealt[peer][start : start + step]
            lease = call.group.lease(len(rows) * call.sizes.row)
            leases.append(lease)
            values = typed(lease.tensor, (len(rows), *call.row_shape), call.dtype)
            own.take(rows, values)
            under_way += send_rows(call, peer, values)
    yield
    wait_all(under_way)
    for lease in leases:
        lease.release()


class _Sums:
    """The rows that this rank sums, chunk by chunk, from the rows of all ranks in rank order."""

    def __init__(
        self, call: Call, own: CanonicalRows, slots: Sequence[Tensor], shares: Shares, step: int
    ) -> None:
        """
        Args:
            call: the call this is for.
            own: this rank's rows.
            slots: of each rank's rows in the union.
            shares: who sums what.
            step: rows of a chunk. Those come first that this rank alone holds.
        """
        self._call = call
        self._incoming = call.incoming
        self._own = own
        self._slots = slots
        self._shares = shares
        self._step = step
        self._direct = call.partial == call.dtype
        self._alone = shares.alone(call.group.rank)
        self._inflows: list[Inflow] = []
        self._runs: list[tuple[Tensor, Source, list[int]]] = []

    def start(self) -> Self:
        """Begin to receive the rows of the others."""
        group = self._call.group
        count = self._shares.count(group.rank)
        edges = torch.arange(0, count + self._step, self._step, dtype=torch.int32)  # of chunks
        for rank in range(group.size):
            rows, places = kernels.pick(self._slots[rank], self._shares, rank, group.rank)
            if rank == group.rank:
                self._rows = rows
                source = _rows_at(self._call, self._own, rows)
            else:
                inflow = Inflow(self._incoming, rank, len(rows)).start()
                self._inflows.append(inflow)
                source = inflow.pieces
            bounds = [0, len(rows)]
            if count > self._step:
                bounds = torch.searchsorted(places ^ (places >> 31), edges).tolist()
            self._runs.append((places, source, bounds))
        self._lease = group.lease(0 if self._direct else self._step * self._call.sizes.partial)
        return self

    def write(self, number: int, out: Tensor) -> None:
        """Write chunk `number`; they are to be asked for in their order."""
        call = self._call
        first = number * self._step
        is_alone = first + len(out) <= self._alone
        sums = out
        if not self._direct and not (is_alone and self._incoming.dtype == call.dtype):
            sums = typed(self._lease.tensor, tuple(out.shape), call.partial)
        if is_alone:  # nothing is added, so nothing has to be widened
            self._own.take(self._rows[first : first + len(out)], sums)
            call.finish(sums, out)
            return
        for places, source, bounds in self._runs:
            row, last = bounds[number : number + 2]
            for piece in source(row, last) if row < last else ():
                kernels.combine(sums, places[row : row + len(piece)], piece, call.op, first)
                row += len(piece)
        call.finish(sums, out)

    def release(self) -> None:
        """Give back the workspace."""
        self._lease.release()
        for inflow in self._inflows:
            inflow.release()


def _rows_at(call: Call, own: CanonicalRows, positions: Tensor) -> Source:
    """This rank's own rows at some positions, as a source.

    A function and no method of `_Sums`, which holds it: that would be a circle of references, and
    the memory of a call would be kept until the garbage collector runs.
    """

    def pieces(start: int, stop: int) -> Iterator[Tensor]:
        shape = stop - start, *call.row_shape
        piece = torch.empty(shape, dtype=call.incoming.dtype, device=call.device)
        own.take(positions[start:stop], piece)
        yield piece

    return pieces


_SAMPLE = (512, 1024)  # places looked at: for many ranks, for few
_ONE = 1 << 12  # the greatest weight, and what a place counts for
_ROUNDS = 12
_EVEN = 1.03  # the busiest rank, as a multiple of the average, that is good enough


def weights(slots: Sequence[Tensor], union: int) -> list[int]:
    """For each rank a weight from 1 to 2**12, by which rows are given to it to sum.

    The same on every rank.

    Args:
        slots: of each rank's rows in the union, as `kernels.union` gives them.
        union: U, the rows of the result.
    """
    ranks = len(slots)
    equal = [_ONE] * ranks
    held = _sample(slots, union)
    received, sent = _loads(held, np.array(equal))
    goal = int(received.sum()) / ranks
    best = first = max(int(received.max()), int(sent.max()))
    if first <= _EVEN * goal:
        return equal
    chosen = equal
    weight = np.array(equal, dtype=np.float64)
    for _ in range(_ROUNDS):
        too_much = _power(received / best)
        too_long = _power(sent / best)
        change = 1.0 + 0.4 * (too_long + np.roll(too_long, 1) - too_much)
        weight = weight * np.maximum(change, 0.25)
        weight = np.maximum(weight * (_ONE / weight.max()), 1.0)
        whole = np.rint(weight).astype(np.int64)
        received, sent = _loads(held, whole)
        busy = max(int(received.max()), int(sent.max()))
        if busy < best:
            best = busy
            chosen = whole.tolist()
    return chosen if best < 0.99 * first else equal


def _sample(slots: Sequence[Tensor], union: int) -> Longs:
    """Which ranks (columns, 0 or 1) hold some places of the union (rows)."""
    few, many = _SAMPLE
    count = min(union, max(few, min(many, (1 << 15) // len(slots))))
    edges = np.arange(count + 1, dtype=np.int64) * union // max(1, count)
    # not at equal distances, since rows may lie so
    apart = np.arange(count, dtype=np.int64) * 2654435769 % (1 << 32) * np.diff(edges) >> 32
    held: Longs = kernels.held(slots, torch.from_numpy(edges[:-1] + apart)).numpy()
    return held


def _loads(held: Longs, weight: Longs) -> tuple[Longs, Longs]:
    """Rows that each rank receives and sends if the sampled places were all, times `_ONE`."""
    weighed = held * weight
    share = weighed * _ONE // np.maximum(weighed.sum(axis=1, keepdims=True), 1)
    holders = held.sum(axis=1, keepdims=True)
    everything = len(held) * _ONE
    summed = share.sum(axis=0)
    received = everything + (share * (holders - 2)).sum(axis=0)
    sent = held.sum(axis=0) * _ONE - summed + everything - np.roll(summed, -1)
    return received, sent


def _power(part: NDArray[np.float64]) -> NDArray[np.float64]:
    """To the 16th, by multiplications alone: pow() is not the same everywhere."""
    for _ in range(4):
        part = part * part
    return part
