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

from collections.abc import Sequence

from torch import Tensor

from .. import kernels
from ..rows import Rows
from ..wire.base import Pending, as_bytes
from ..wire.memory import typed
from .call import Call
from .cost import Cost, Load
from .owners import parts
from .registry import algorithm
from .stream import (
    VALUES,
    IndexLists,
    Inflow,
    Own,
    Source,
    list_messages,
    merge_blocks,
    send_rows,
    share,
    window,
)


def cost(load: Load) -> Cost:
    others, share = load.ranks - 1, 1 / load.ranks
    runs = [load.union_of(ranks) * share for ranks in range(1, load.ranks)]
    mine, sums = load.mean * share, load.union * share
    told = sums * load.index_of(load.union)
    lists = [run * load.index_of(run * load.ranks) for run in runs]
    listed = sum(map(list_messages, lists)) + others * list_messages(told)
    if load.identical:
        told, lists, listed = 0.0, [], 0
    return Cost(
        rounds=1 if load.identical else others + 1,  # of index sets
        messages=listed
        + round(
            sum(load.parted(run, load.partial, 1) for run in runs)
            + load.parted(sums, load.row, others)
        ),
        bytes=sum(runs) * load.partial + sum(lists) + others * (sums * load.row + told),
        merged=load.merging(
            sum(runs) + others * mine,
            sum(load.pieces(run, 1, run) + load.pieces(mine, 1, run) for run in runs),
        ),
        memory=2 * sums * load.partial + min(sums * load.partial, window(load) * load.chunk),
        hops=2 * others,
        behind=load.behind(sums),
        trailing=sum(map(load.trailing, runs)) + others * load.trailing(sums),
    )


def applies(load: Load) -> str | None:
    if load.in_order:
        return "op is a function, which needs its operands in the order of ranks"
    return None


@algorithm(cost=cost, applies=applies)
def ring(rows: Rows, call: Call) -> Rows:
    wire, me, size = call.wire, call.wire.rank, call.wire.size
    left, right = (me - 1) % size, (me + 1) % size
    indices = rows.indices.to(call.wire_index)
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
    result, mine, sharing = share(call, summed)

    # and with the values; what came two steps before is gone when its memory is needed again
    passed = call.of_partials()
    most = max((union.indices.numel() for union in unions[:-1]), default=0)
    with wire.lease(2 * most * passed.load.row) as memory:
        space = typed(memory, (2, most, *call.row_shape), call.partial)
        sent: list[list[Pending]] = [
            send_rows(passed, right, rows.values[part[passing[0]]].to(call.partial))
        ]
        for step, owner in enumerate(passing[1:]):
            inflow = Inflow(passed, left, came[step].numel())
            runs = [came[step], indices[part[owner]]]
            sources: list[Source] = [inflow, Own(rows.values[part[owner]])]
            if owner == me:
                for start, stop in merge_blocks(call, runs, sources, unions[step], mine):
                    sharing.send(mine[start:stop])
            else:
                _finish(sent[:-1])
                out = space[step % 2][: unions[step].indices.numel()]
                sent.append([])
                for start, stop in merge_blocks(passed, runs, sources, unions[step], out):
                    if passed.load.row:
                        chunk = as_bytes(out[start:stop])
                        sent[-1].append(wire.post([(right, chunk)], (), VALUES))
            inflow.release()
        sharing.finish()
        _finish(sent)
    return result


def _everybodys(call: Call, run: Tensor, indices: Tensor, part: Sequence[slice]) -> list[Tensor]:
    """The indices that each rank sums; `run` is this rank's."""
    if call.load.identical:
        return [indices[rows] for rows in part]
    wire = call.wire
    lists = IndexLists(call, dict.fromkeys(wire.peers, run), wire.peers)
    summed = {rank: came.clone() for rank, came in lists.wait().items()} | {wire.rank: run}
    lists.release()
    return [summed[rank] for rank in range(wire.size)]


def _finish(sent: list[list[Pending]]) -> None:
    for sends in sent:
        for pending in sends:
            pending.wait()
