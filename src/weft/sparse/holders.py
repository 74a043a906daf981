"""holders: each row is summed at one of the ranks that hold it; the sums go round the ring.

All index sets go to all ranks first. So everybody knows who holds what, and from that alone who
sums what: one of the holders of a row, so that the row itself need not be sent there (`placement`
says how evenly they are chosen). The other holders send their rows to it; what it sums goes round
the ring to everybody, and what nobody else holds goes first, while the sums are made. Values
travel without indices, and the size of the result is known before the first of them.

An index that m ranks hold takes m-1 messages to come together and P-1 to be told: that is the
lower bound (docs/holders.md), and no value is sent beyond it. What it costs is that every rank
receives every index set.

Best for wide rows, up to some tens of ranks.

Known to us from nowhere else; the parts are known. Owners among the sharers of an index: the
gather-scatter libraries, such as gslib, and PETSc's star forests (Zhang et al., TPDS 2022), whose
patterns are set up once and used often. Index sets ahead of values: Zhao and Canny, "Kylix"
(ICPP'14).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from .. import kernels
from ..kernels import Picked
from ..kernels.meter import PUT
from ..rows import Rows
from ..wire.base import Pending
from ..wire.memory import Lease, typed
from .call import Call
from .cost import Cost, Load
from .placement import weights
from .registry import algorithm
from .relay import Relay, relay_memory, relay_rows
from .stream import SUMS, IndexLists, Inflow, Source, list_messages, send_rows, window


def cost(load: Load) -> Cost:
    others, index = load.ranks - 1, load.index_of(load.mean)
    sums = load.union / load.ranks
    chunk = relay_rows(load, sums)
    away = max(0.0, load.mean - sums)  # rows that are summed elsewhere, in equal parts
    return Cost(
        rounds=3,
        messages=round(load.parted(away / others, load.row, others))
        + others * (list_messages(load.mean * index) + math.ceil(sums / chunk) * bool(load.row)),
        bytes=others * load.mean * index + (away + others * sums) * load.row,
        merged=load.merging(load.mean, _pieces(load, away / others, sums, chunk))
        + away * load.row
        + _INDEX * load.total,
        memory=away * load.row
        + relay_memory(load, sums)
        + min(away * load.row, others * window(load) * load.chunk),
        hops=others,
        trailing=others * max(0, math.ceil(sums / chunk) - 1),
        meanwhile=PUT * load.union * load.row,
        behind=max(0.0, sums - chunk) * load.row,
    )


def _pieces(load: Load, away: float, sums: float, chunk: int) -> float:
    """Pieces of rows that are brought to their places: those summed here, and all sums."""
    steps = math.ceil(sums / chunk)
    combined = (load.ranks - 1) * steps * -math.expm1(-away / steps) if steps else 0.0
    return combined + load.ranks * steps


_INDEX = 224  # bytes that could be merged while an index is united, and its place given to a rank


@algorithm(cost=cost)
def holders(rows: Rows, call: Call) -> Rows:
    wire, me = call.wire, call.wire.rank
    order = range(wire.size)
    indices = rows.indices.to(call.wire_index)
    lists = IndexLists(call, dict.fromkeys(wire.peers, indices), wire.peers)
    found = lists.wait() | {me: indices}
    union = kernels.union([found[rank] for rank in order])
    result = call.result(union.indices.numel())
    result.indices.copy_(union.indices)
    if not call.load.row:  # rows without bytes
        lists.release()
        return result

    # who sums what: the same on every rank
    total = union.indices.numel()
    shares = kernels.shares(union.slots, total, weights(union.slots, total))
    relay = Relay(call, [shares.count(rank) for rank in order], SUMS)
    outflow = _Outflow(call, rows.values)
    for peer in wire.peers:
        outflow.send(peer, kernels.pick(union.slots[me], shares, me, peer).rows)
    picked = [kernels.pick(union.slots[rank], shares, rank, me) for rank in order]
    inflows = {peer: Inflow(call, peer, len(picked[peer].rows)) for peer in wire.peers}
    own = _Chosen(rows.values, picked[me].rows)
    sums = _Sums(
        call,
        picked,
        inflows,
        own,
        count=shares.count(me),
        alone=shares.alone(me),
        step=relay.rows,
    )

    places = [shares.of(rank) for rank in order]
    for step in range(relay.steps):
        chunk = relay.own(step)
        if chunk is not None:
            sums.write(step, chunk)
            first = step * relay.rows
            kernels.put(result.values, places[me][first : first + len(chunk)], chunk)
        for origin, first, some in relay.turn(step):
            kernels.put(result.values, places[origin][first : first + len(some)], some)

    relay.finish()
    outflow.finish()
    sums.release()
    lists.release()
    for inflow in inflows.values():
        inflow.release()
    return result


class _Outflow:
    """Rows of this rank on their way to those who sum them."""

    def __init__(self, call: Call, values: Tensor) -> None:
        self._call, self._values = call, values
        self._leases: list[Lease] = []
        self._sent: list[Pending] = []

    def send(self, peer: int, rows: Tensor) -> None:
        """Send some of them, copied together, since a message is one piece of memory."""
        lease = self._call.wire.lease(len(rows) * self._call.load.row)
        together = typed(lease.tensor, (len(rows), *self._call.row_shape), self._call.dtype)
        kernels.take(self._values, rows, out=together)
        self._leases.append(lease)
        self._sent += send_rows(self._call, peer, together)

    def finish(self) -> None:
        """Wait until all are sent, and give back the memory."""
        for pending in self._sent:
            pending.wait()
        for lease in self._leases:
            lease.release()


class _Chosen:
    """Some of this rank's own rows, as a source."""

    def __init__(self, values: Tensor, rows: Tensor) -> None:
        self._values, self._rows = values, rows

    def pieces(self, start: int, stop: int) -> Iterator[Tensor]:
        if stop > start:
            yield kernels.take(self._values, self._rows[start:stop])

    def copy(self, start: int, out: Tensor) -> None:
        """As many as there is room for, from `start` on."""
        kernels.take(self._values, self._rows[start : start + len(out)], out=out)


class _Sums:
    """The rows that this rank sums, chunk by chunk, from the rows of all ranks in rank order."""

    def __init__(
        self,
        call: Call,
        picked: Sequence[Picked],
        inflows: Mapping[int, Source],
        own: _Chosen,
        *,
        count: int,
        alone: int,
        step: int,
    ) -> None:
        """`picked` says which rows of each rank are summed here, to `count` sums, `step` in a
        chunk; the first `alone` of them are this rank's alone."""
        self._call, self._picked, self._own = call, picked, own
        self._sources = [inflows.get(rank, own) for rank in range(len(picked))]
        self._alone, self._step = alone, step
        edges = torch.arange(0, count + step, step, dtype=torch.int32)
        places = [slots ^ (slots >> 31) for _, slots in picked]
        self._bounds = [torch.searchsorted(some, edges).tolist() for some in places]
        self._direct = call.partial == call.dtype
        self._lease = call.wire.lease(0 if self._direct else step * call.load.partial)

    def write(self, number: int, out: Tensor) -> None:
        """Write chunk `number`; they are to be asked for in their order."""
        call, first = self._call, number * self._step
        if first + len(out) <= self._alone:  # nothing to add, so nothing to widen
            self._own.copy(first, out)
            call.finish(out, out)
            return
        sums = out if self._direct else typed(self._lease.tensor, tuple(out.shape), call.partial)
        for (_, slots), source, bounds in zip(
            self._picked, self._sources, self._bounds, strict=True
        ):
            row = bounds[number]
            for piece in source.pieces(row, bounds[number + 1]):
                kernels.combine(sums, slots[row : row + len(piece)], piece, call.op, first)
                row += len(piece)
        call.finish(sums, out)

    def release(self) -> None:
        """Give back the workspace."""
        self._lease.release()
