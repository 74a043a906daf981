"""ring: partial sums travel round the ring, each rank adding its rows; then the sums are shared.

The index ranges are those of `split`, but nobody receives a range from everybody: the range of
rank r starts at rank r + 1 and is handed on to the right, every rank adding its own rows, until
it arrives at r complete. Index sets run ahead of the values, so that the size of the result, and
every row's place in it, are known before the first value moves; where the headers' digests say that
all ranks have the same rows, no index moves at all. The values follow in chunks that are merged,
and sent on, while the next are on their way. What the last rank of a range adds goes straight into
the result, and from there round the ring, once: so every rank gets the same bits, though each range
is added in an order of its own.

Each rank has one peer that it hears and one that it tells, whatever P is, and holds two runs of
partial sums, 1/P of the union each: the algorithm with least workspace where ranks are many. It
pays for that with P - 1 steps in a row, and where rows overlap little with more bytes than
`split`, since a sum grows on its way.

The ring reduce-scatter and all-gather of Patarasuk and Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations" (JPDC 2009), section 3, on sorted runs of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from torch import Tensor

from ... import kernels
from ...rows import Rows
from ...wire.base import Pending, peers, typed
from ..call import Call
from ..cost import Cost, Load
from ..local_rows import LocalRows
from ..owners import parts
from ..registry import algorithm
from ..stream import (
    IndexLists,
    Inflow,
    Source,
    list_messages,
    merge_blocks,
    send_rows,
    share,
    window,
)

_LEAD = 3  # chunks of a rank's own rows that are combined ahead of what the link has sent


def cost(load: Load) -> Cost:
    others, share = load.ranks - 1, 1 / load.ranks
    runs = [load.union_of(ranks) * share for ranks in range(1, load.ranks)]
    mine, sums = load.mean * share, load.union * share
    told = 0.0 if load.identical else sums * load.index_of(load.union)
    lists = [0.0 if load.identical else run * load.index_of(run * load.ranks) for run in runs]
    listed = 0 if load.identical else sum(map(list_messages, lists)) + others * list_messages(told)
    values = sum(load.parted(run, load.partial, 1) for run in runs)
    received = sum(runs) * load.partial + sum(lists) + others * (sums * load.row + told)
    return Cost(
        rounds=(1 if load.identical else others + 1) + load.hops(2 * others, sums),
        messages=listed + round(values + load.parted(sums, load.row, others)),
        bytes=received,
        merged=load.merging(
            sum(runs) + others * mine,
            sum(load.pieces(run, 1, run) + load.pieces(mine, 1, run) for run in runs),
        ),
        delayed=load.crowded(received),
        memory=2 * sums * load.partial + min(sums * load.partial, window(load) * load.chunk),
    )


def applies(load: Load) -> str | None:
    if load.in_order:
        return "op is a function, which needs its operands in the order of ranks"
    return None


@algorithm(cost=cost, applies=applies)
def ring(own: LocalRows, call: Call) -> Rows:
    wire, me, size = call.wire, call.wire.rank, call.wire.size
    left, right = (me - 1) % size, (me + 1) % size
    indices = own.indices.to(call.wire_index)
    part = parts(indices, call.header, size)
    passing = [(me - step) % size for step in range(1, size + 1)]  # the last range is its own

    # round the ring with the index sets
    run = indices[part[passing[0]]]
    came: list[Tensor] = []
    unions: list[kernels.Union] = []
    for owner in passing[1:]:
        if call.load.identical:
            came.append(indices[part[owner]])
        else:
            lists = IndexLists(call, {right: run}, [left])
            came.append(lists.wait()[left].clone())
            lists.release()
        unions.append(kernels.union([came[-1], indices[part[owner]]]))
        run = unions[-1].indices

    # now everybody's sums are known, and their places in the result
    summed = _everybodys(call, run, indices, part)
    passed = call.of_partials()
    first = part[passing[0]]
    most = max([first.stop - first.start, *(len(union.indices) for union in unions[:-1])])
    with (
        wire.lease(2 * most * passed.load.row) as memory,
        wire.lease(call.chunk_rows * call.load.row) as chunk,
    ):
        space = typed(memory, (2, most, *call.row_shape), call.partial)
        combined = typed(chunk, (call.chunk_rows, *call.row_shape), call.dtype)
        onward = _Onward(passed, own, first, combined, space[1])
        result, mine, sharing = share(call, summed)

        # and with the values
        for step, owner in enumerate(passing[1:]):
            inflow = Inflow(passed, left, came[step].numel())
            runs = [came[step], indices[part[owner]]]
            sources: list[Source] = [inflow, _Mine(own, part[owner], combined)]
            if owner == me:
                onward.send_first()
                for start, stop in merge_blocks(call, runs, sources, unions[step], mine):
                    sharing.send(mine[start:stop])
            else:
                onward.next_step()
                out = space[step % 2][: unions[step].indices.numel()]
                for start, stop in merge_blocks(passed, runs, sources, unions[step], out):
                    onward.send(out[start:stop])
            onward.send_first()
            inflow.release()
        sharing.finish()
        onward.finish()
    return result


class _Mine:
    """Some of this rank's own rows, as a source; duplicates are combined a chunk at a time."""

    def __init__(self, own: LocalRows, rows: slice, chunk: Tensor) -> None:
        self._own, self._first, self._chunk = own, rows.start, chunk

    def pieces(self, start: int, stop: int) -> Iterator[Tensor]:
        """Each is good until the next is asked for."""
        step = self._chunk.shape[0]
        for first in range(start, stop, step):
            last = min(stop, first + step)
            rows = slice(self._first + first, self._first + last)
            yield self._own.piece(rows, self._chunk[: last - first])


class _Onward:
    """What goes to the right: this rank's rows of the first range, then the sums of each step.

    The rows of the first range are combined when it is their turn, some chunks ahead of the link:
    all at once would keep the cores, and so the links, from what others send meanwhile. Sums that
    are ready earlier wait behind them, since rows arrive in the order in which they are sent.
    """

    def __init__(
        self, call: Call, own: LocalRows, rows: slice, combined: Tensor, space: Tensor
    ) -> None:
        """Begin with these own `rows`, put together in `space`."""
        self._call = call
        self._right = (call.wire.rank + 1) % call.wire.size
        self._steps: list[list[Pending]] = [[]]
        self._waiting: list[Tensor] = []
        self._first = self._chunks(own, rows, combined, space)
        for _ in islice(self._first, _LEAD):
            pass

    def _chunks(
        self, own: LocalRows, rows: slice, combined: Tensor, space: Tensor
    ) -> Iterator[bool]:
        """Send a chunk of the first range for each that is asked for."""
        sent = self._steps[0]
        for first in range(rows.start, rows.stop, self._call.chunk_rows):
            some = slice(first, min(rows.stop, first + self._call.chunk_rows))
            place = space[first - rows.start : some.stop - rows.start]
            if space.dtype == combined.dtype:
                place = own.piece(some, place)
            else:
                place.copy_(own.piece(some, combined[: len(place)]))
            sent += send_rows(self._call, self._right, place)
            yield True

    def send(self, sums: Tensor) -> None:
        """Send a block of sums, or while there are some left, a chunk of the first range.

        Those of the next rank are merged from these: nobody can be further behind than a block.
        """
        self._waiting.append(sums)
        if not next(self._first, False):
            self._send_waiting()

    def send_first(self) -> None:
        """Send what is left of the first range, and what waits for it."""
        for _ in self._first:
            pass
        self._send_waiting()

    def _send_waiting(self) -> None:
        for sums in self._waiting:
            self._steps[-1] += send_rows(self._call, self._right, sums)
        self._waiting.clear()

    def next_step(self) -> None:
        """Sums of a step follow; what went out two steps before has left its memory."""
        for sent in self._steps[:-1]:
            _finish(sent)
        self._steps.append([])

    def finish(self) -> None:
        """Wait until all is sent."""
        for sent in self._steps:
            _finish(sent)


def _everybodys(call: Call, run: Tensor, indices: Tensor, part: Sequence[slice]) -> list[Tensor]:
    """The indices that each rank sums; `run` is this rank's."""
    if call.load.identical:
        return [indices[rows] for rows in part]
    wire = call.wire
    lists = IndexLists(call, dict.fromkeys(peers(wire), run), peers(wire))
    summed = {rank: came.clone() for rank, came in lists.wait().items()} | {wire.rank: run}
    lists.release()
    return [summed[rank] for rank in range(wire.size)]


def _finish(sent: list[Pending]) -> None:
    for pending in sent:
        pending.wait()
