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
from typing import NamedTuple

from torch import Tensor

from ... import kernels
from ...group.pending import Pending
from ...rows import Rows
from ...wire.memory import typed
from ..call import Call
from ..cost import Cost, Load
from ..local_rows import LocalRows, slices_between
from ..owners import balanced_bounds, spans
from ..registry import algorithm
from ..stream import (
    IndexLists,
    Inflow,
    Share,
    Spans,
    left_of,
    list_messages,
    merge_blocks,
    receive_rows,
    right_of,
    send_rows,
    wait_all,
    window,
)


def cost(load: Load) -> Cost:
    others = load.ranks - 1
    share = 1 / load.ranks
    runs = [load.union_of(ranks) * share for ranks in range(1, load.ranks)]  # that come
    mine = load.mean * share  # rows that a rank has of a range
    sums = load.union * share  # of a range
    if load.identical:
        lists_of_runs = list_of_sums = 0.0
        lists = 0  # messages
    else:
        of_runs = [load.list_of(run, share) for run in runs]
        lists_of_runs = sum(of_runs)
        list_of_sums = load.list_of(sums, share)
        lists = sum(map(list_messages, of_runs)) + others * list_messages(list_of_sums)
    values = sum(load.parted(run, load.partial, 1) for run in runs)
    shared = others * sums * load.row
    received = sum(runs) * load.partial + lists_of_runs + shared + others * list_of_sums
    hops = load.hops(sums) + load.hops_of_shared(sums)
    return Cost(
        rounds=(1 if load.identical else others + 1) + hops,
        messages=lists + round(values + load.parted(sums, load.row, others)),
        bytes=received,
        merged=load.merging(
            sum(runs) + others * mine,
            sum(load.pieces(run, 1, run) + load.pieces(mine, 1, run) for run in runs),
        ),
        delayed=load.queue * others * list_of_sums + load.shared(sums) + load.crowded(received),
        memory=2 * sums * load.partial + min(sums * load.partial, window(load) * load.chunk),
    )


def applies(load: Load) -> str | None:
    if load.in_order:
        return "op is a function, which needs its operands in the order of ranks"
    return None


@algorithm(cost=cost, applies=applies)
def ring(own: LocalRows, call: Call) -> Rows:
    indices = own.indices.to(call.wire_index)
    bounds = balanced_bounds(call.header, call.group.size)
    parts = slices_between(indices, bounds, call.header.highest)
    lists = [indices[part] for part in parts]  # of this rank, by range

    # index lists go round the ring: of each range the list of the sums so far
    steps = _pass_lists(call, parts, lists, spans(bounds))

    # the last of these is of what this rank sums: told to all, they say where all sums belong
    share = Share(call)
    if call.load.identical:
        sums = share.start(lists)
    else:
        share.send_list(steps[-1].union.indices, spans(bounds))
        sums = share.start(share.receive_lists())
        share.release()

    # values follow the lists, and what is complete goes round the ring once more
    partials = _Partials(own, call.of_partials())
    longest = max((len(step.union.indices) for step in steps[:-1]), default=0)
    with call.group.lease(2 * longest * call.load.partial) as memory:
        space = typed(memory, (2, longest, *call.row_shape), call.partial)
        partials.begin(parts[left_of(call.group)])  # the range that begins here
        for number, step in enumerate(steps[:-1]):
            partials.pass_on(step, space[number % 2])
        for stop in partials.complete(steps[-1], call, sums):
            share.send(stop)
        result = share.finish()
        partials.finish()
    return result


class _Step(NamedTuple):
    """A range that comes from the left, to which this rank adds its rows.

    Attributes:
        received: the indices of the sums that come.
        part: the rows of this rank in the range.
        added: their indices.
        union: of both: what goes on to the right or, of this rank's own range, is complete.
    """

    received: Tensor
    part: slice
    added: Tensor
    union: kernels.Union


def _pass_lists(
    call: Call, parts: Sequence[slice], lists: Sequence[Tensor], ranges: Spans
) -> list[_Step]:
    """Receive the index list of each range from the left, and send it on with this rank's indices.

    Nothing is sent where all ranks have the same rows.

    Args:
        call: the call this is for.
        parts: the rows of this rank in each range.
        lists: their indices.
        ranges: the range of each rank.

    Returns:
        A step for each range that comes here, in their order: this rank's own is the last.
    """
    group = call.group
    left = left_of(group)
    right = right_of(group)
    indices = lists[left]  # of the range that begins here
    steps = []
    for distance in range(2, group.size + 1):
        owner = (group.rank - distance) % group.size
        if call.load.identical:
            received = lists[owner]
        else:
            exchange = IndexLists(call, {right: indices}, [left], {left: ranges[owner]}).start()
            received = exchange.wait()[left].clone()
            exchange.release()
        union = kernels.union([received, lists[owner]])
        steps.append(_Step(received, parts[owner], lists[owner], union))
        indices = union.indices
    return steps


class _Partials:
    """Partial sums of all ranges, which come from the left, and go on to the right."""

    def __init__(self, own: LocalRows, call: Call) -> None:
        """
        Args:
            own: this rank's rows.
            call: the call by which partial sums travel.
        """
        self._own = own
        self._call = call
        self._sent: list[list[Pending]] = []  # of each range that went on

    def begin(self, part: slice) -> None:
        """Send this rank's rows of the range that begins here."""
        sent = []
        for piece in self._own.pieces(self._call.chunk_rows, part.start, part.stop):
            sent += self._send(piece.to(self._call.dtype))
        self._sent.append(sent)

    def pass_on(self, step: _Step, memory: Tensor) -> None:
        """Receive the sums of a range, add this rank's rows, and send each chunk on as it is made.

        Args:
            step: of the range.
            memory: for the sums. The steps use two in turn.
        """
        inflow = self._receive(step)
        if len(self._sent) > 1:
            wait_all(self._sent[-2])  # what went out two steps before must have left its memory
        out = memory[: len(step.union.indices)]
        sent = []
        for start, stop in self._merged(step, inflow, self._call, out):
            sent += self._send(out[start:stop])
        self._sent.append(sent)
        inflow.release()

    def complete(self, step: _Step, call: Call, out: Tensor) -> Iterator[int]:
        """Receive the sums of this rank's own range, and add its rows; yields how many are made.

        Args:
            step: of the range.
            call: the call, whose sums are divided and rounded.
            out: where they belong.
        """
        inflow = self._receive(step)
        for _, stop in self._merged(step, inflow, call, out):
            yield stop
        inflow.release()

    def finish(self) -> None:
        """Wait until all is sent."""
        for sent in self._sent:
            wait_all(sent)

    def _send(self, values: Tensor) -> list[Pending]:
        return send_rows(self._call, right_of(self._call.group), values)

    def _receive(self, step: _Step) -> Inflow:
        return receive_rows(self._call, left_of(self._call.group), len(step.received))

    def _merged(
        self, step: _Step, inflow: Inflow, call: Call, out: Tensor
    ) -> Iterator[tuple[int, int]]:
        runs = [step.received, step.added]
        sources = [inflow.pieces, self._own.source(step.part)]
        return merge_blocks(call, runs, sources, step.union, out)
