"""holders: each row is summed at one of the ranks that hold it; the sums go round the ring.

All index sets go to all ranks first. So everybody knows who holds what, and from that alone who
sums what: one of the holders of a row, so that the row itself need not be sent there. The other
holders send their rows to it; what it sums goes round the ring to everybody, and what nobody else
holds goes first, while the sums are made. Values travel without indices, and the size of the result
is known before the first of them.

An index that m ranks hold takes m-1 messages to come together and P-1 to be told: that is the
lower bound (docs/holders.md), and no value is sent beyond it. What it costs is that every rank
receives every index set.

The holders of a row are chosen equally often. So ranks with about as many rows receive and send
about as many: the ring brings a rank every row of the result but those it sums itself, and each row
it sums costs it what the other holders send. With very unequal ranks the busiest moves up to 1.4
times what the average must.

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

import torch
from torch import Tensor

from ... import kernels
from ...base.memory import typed
from ...group.channels import VALUES
from ...group.pending import Pending
from ...kernels import OPS, Shares
from ...wire.interface import Lease
from ..call import Call
from ..canonical import CanonicalRows
from ..registry import algorithm
from ..relay import Relay, relay_rows
from ..rows import Rows
from ..stream import (
    Inflow,
    PlacedRun,
    Source,
    combine_block,
    send_list_to_all,
    wait_all,
)


@algorithm
def holders(own: CanonicalRows, call: Call) -> Rows:
    # to all: index lists
    indices = own.indices.to(call.wire_index)
    lists = send_list_to_all(call, indices)
    union = kernels.union([*lists.wait().values()])
    shares = kernels.shares(union.slots, union.indices.numel())
    result = call.result_at(union.indices)
    if call.sizes.row:  # else rows are without bytes
        _move_values(call, own, union, shares, result.values)
    lists.release()
    return result


def _move_values(
    call: Call, own: CanonicalRows, union: kernels.Union, shares: Shares, out: Tensor
) -> None:
    """Send rows to those who sum them, and all sums to all."""
    counts = [shares.count(rank) for rank in range(call.group.size)]
    step = relay_rows(call.sizes, max(counts))
    sums = _Sums(call, own, union.slots, shares, step).start()
    with _sent(call.incoming, own, union.slots[call.group.rank], shares):
        _gather(call, sums, shares, counts, out)
    sums.release()


def _gather(call: Call, sums: _Sums, shares: Shares, counts: Sequence[int], out: Tensor) -> None:
    """Write all sums to `out`: those of this rank go round the ring as they are made."""
    me = call.group.rank
    copied = OPS["sum"]  # of slots that all say that theirs is the first
    slots = [~shares.of(rank) for rank in range(call.group.size)]
    relay = Relay(call, counts).start()
    for step in range(relay.steps):
        chunk = relay.own(step)
        if chunk is not None:
            sums.write(step, chunk)
            relay.send(step, chunk)
            first = step * relay.rows
            kernels.combine(out, slots[me][first : first + len(chunk)], chunk, copied)
        for origin, first, some in relay.turn(step):
            kernels.combine(out, slots[origin][first : first + len(some)], some, copied)
    relay.finish()


@contextmanager
def _sent(call: Call, own: CanonicalRows, slots: Tensor, shares: Shares) -> Iterator[None]:
    """Send each peer the rows of this rank that it sums; at the end wait for that.

    They are copied together, since a message is one piece of memory.
    """
    me, peers, step = call.group.rank, call.group.peers, call.chunk_rows
    rows_of = {peer: kernels.pick(slots, shares, me, peer).rows for peer in peers}
    leases: list[Lease] = []
    under_way: list[Pending] = []
    for start in range(0, max(map(len, rows_of.values())), step):
        for peer in peers:
            rows = rows_of[peer][start : start + step]
            if not len(rows):
                continue
            lease = call.group.lease(len(rows) * call.sizes.row)
            leases.append(lease)
            values = typed(lease.tensor, (len(rows), *call.row_shape), call.dtype)
            own.take(rows, values)
            under_way.append(call.group.post([(peer, values)], (), VALUES))
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
        self._direct = call.partial_dtype == call.dtype
        self._alone = shares.alone(call.group.rank)
        self._inflows: list[Inflow] = []
        self._runs: list[PlacedRun] = []

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
        self._lease = group.lease(0 if self._direct else self._step * self._call.sizes.partial_row)
        return self

    def write(self, number: int, out: Tensor) -> None:
        """Write chunk `number`; they are to be asked for in their order."""
        call = self._call
        first = number * self._step
        is_alone = first + len(out) <= self._alone
        sums = out
        if not self._direct and not (is_alone and self._incoming.dtype == call.dtype):
            sums = typed(self._lease.tensor, tuple(out.shape), call.partial_dtype)
        if is_alone:  # nothing is added, so nothing has to be widened
            self._own.take(self._rows[first : first + len(out)], sums)
            call.finish(sums, out)
            return
        combine_block(sums, self._runs, number, first, call.op)
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
        piece = torch.empty(shape, dtype=call.incoming.dtype)
        own.take(positions[start:stop], piece)
        yield piece

    return pieces
