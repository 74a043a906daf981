"""hierarchical: the ranks of a host reduce to one of them; those leaders reduce among themselves.

Every rank gives its rows to the leader of its host, its lowest rank, which merges them. The
leaders tell each other what they have, as ranks do when a call opens, and run the algorithm that is
cheapest for that among themselves. Then the result goes down the chain of the host's ranks, in
chunks, so that no rank sends it more than once. Between hosts travels one sum for each host in
place of the rows of its ranks; everything else stays on the host. On one host the leader's merge is
the result; where every rank has a host of its own, the cheapest algorithm runs as if it had been
asked for.

Best where hosts have several ranks whose rows overlap, and the network between hosts is what
limits.

Two levels, as in the all-reduce of Goyal et al., "Accurate, Large Minibatch SGD" (2017), section 4.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import Tensor

from ... import kernels
from ...agree import DIRECT, agree
from ...rows import Rows
from ...wire.base import Hosts, Pending, hosts_of, typed
from ...wire.part import Part
from ..call import Call
from ..choice import workspace
from ..cost import Cost, Load
from ..header import Header
from ..local_rows import LocalRows
from ..registry import ALGORITHMS, Algorithm, algorithm
from ..stream import (
    VALUES,
    IndexLists,
    Inflow,
    Own,
    Source,
    chunks,
    list_messages,
    merge_blocks,
    send_rows,
    window,
)

_OPENING = 4608  # bytes of a statement of the leaders'
_COMBINED = 11_000  # of one that says what many of them have
_HANDED = 4  # bytes merged in the time in which one is handed on within a host


def cost(load: Load) -> Cost:
    hosts = _hosts(load)
    count, most = len(hosts.ranks), max(map(len, hosts.ranks))
    others, leaders = load.ranks - count, count / load.ranks
    flat_load = _between(load)
    flat = _flat(flat_load).cost(flat_load) if count > 1 else Cost(0, 0, 0.0)
    both = load.mean, load.union
    given, told = ((rows * load.index_of(rows), rows * load.row) for rows in both)
    up = list_messages(given[0]) + load.chunks(load.mean, load.row)
    down = list_messages(told[0]) + load.chunks(load.union, load.row)
    opening = _opening(count)
    leader = (flat.slowest or flat) + opening
    if most > 1:
        # the last of a host gets its first chunk when it has passed all the others of the chain
        chain, filling = max(0, most - 2), min(load.chunk, told[1])
        handed = (most - 1) * (sum(given) + told[0]) + told[1] + chain * filling
        pieces = load.pieces(load.mean, most, load.union_of(most))
        merged = load.merging(most * load.mean, pieces) + _HANDED * handed
        leader += Cost(4 + chain, (most - 1) * up + down, 0.0, merged)
    kept = min(most * load.mean * load.row, (most - 1) * window(load) * load.chunk)
    between = flat_load.most * load.partial * (count > 1) + kept
    members = others / load.ranks
    return replace(
        leader,
        messages=round(leaders * (flat.messages + opening.messages) + members * (up + down)),
        bytes=leaders * (flat.bytes + opening.bytes) + members * (sum(given) + sum(told)),
        memory=flat.memory + between * (most > 1),
        slowest=leader,
    )


def _opening(leaders: int) -> Cost:
    """What it costs that the leaders tell each other what they have (`weft.agree`)."""
    if leaders <= DIRECT:
        return Cost(leaders > 1, leaders - 1, (leaders - 1) * _OPENING, 0.0)
    rounds = leaders.bit_length() - 1
    rounds += 2 * (leaders != 1 << rounds)
    return Cost(rounds, rounds, rounds * _COMBINED, 0.0)


def applies(load: Load) -> str | None:
    if load.in_order and not _hosts(load).in_order:
        return "op is a function, and the ranks of a host are not neighbours"
    return None


def pays(load: Load) -> str | None:
    count = len(_hosts(load).ranks)
    if count == load.ranks:
        return "every rank has a host of its own"
    return "all ranks are on one host" if count == 1 else None


@algorithm(cost=cost, applies=applies, pays=pays)
def hierarchical(rows: LocalRows, call: Call) -> Rows:
    hosts = hosts_of(call.wire)
    leader, *members = hosts.ranks[hosts.of[call.wire.rank]]
    if call.wire.rank != leader:
        return _member(rows, call, leader, members)
    return _leader(rows, call, members, [ranks[0] for ranks in hosts.ranks])


def _member(rows: LocalRows, call: Call, leader: int, members: Sequence[int]) -> Rows:
    """Give the leader all rows; get the result from the rank before, and pass it on."""
    wire = call.wire
    at = members.index(wire.rank)
    before, after = [leader, *members][at], members[at + 1 : at + 2]
    given = IndexLists(call, {leader: rows.indices.to(call.wire_index)}, [])
    given.wait()
    under_way = send_rows(call, leader, rows.values)
    told = IndexLists(call, {}, [leader])
    indices = told.wait()[leader]
    result = call.result(indices.numel())
    result.indices.copy_(indices)
    parts = chunks(call, result.values)
    coming = [wire.post((), [(before, chunk)], VALUES) for chunk in parts]
    for chunk, pending in zip(parts, coming, strict=True):
        pending.wait()
        under_way += [wire.post([(each, chunk)], (), VALUES) for each in after]
    for pending in under_way:
        pending.wait()
    given.release()
    told.release()
    return result


def _leader(rows: LocalRows, call: Call, members: Sequence[int], leaders: Sequence[int]) -> Rows:
    """Merge the rows of this host, reduce its sums with the other leaders', hand out the result."""
    wire = call.wire
    lists = IndexLists(call, {}, members)
    came = lists.wait()
    runs = [rows.indices.to(call.wire_index), *(came[member] for member in members)]
    inflows = [Inflow(call, member, came[member].numel()) for member in members]
    sources: list[Source] = [Own(rows.values), *inflows]
    union = kernels.union(runs)
    count = union.indices.numel()

    if len(leaders) == 1:
        result = call.result(count)
        result.indices.copy_(union.indices)
        blocks = merge_blocks(call, runs, sources, union, result.values)
        _hand_out(result, call, members, blocks)
    else:
        inner = call.of_partials()
        inner.wire = Part(wire, leaders)
        with wire.lease(count * inner.load.row) as memory:
            sums = typed(memory, (count, *call.row_shape), inner.dtype)
            for _ in merge_blocks(inner, runs, sources, union, sums):
                pass
            result = _reduced(Rows(union.indices, sums, call.height), inner, call)
        _hand_out(result, call, members, [(0, len(result))])

    lists.release()
    for inflow in inflows:
        inflow.release()
    return result


def _reduced(sums: Rows, inner: Call, call: Call) -> Rows:
    """The result, from the sums of each host; `inner` is the leaders' own call."""
    _open(sums.indices, inner)
    result: list[Rows] = []

    def space(count: int, *_: object) -> tuple[Tensor, Tensor]:
        result.append(call.result(count))
        return result[0].indices, result[0].values

    if call.partial == call.dtype:  # then the sums are received where the result is wanted
        inner.out = space
    total = _flat(inner.load).run(LocalRows.of(sums), inner)
    if not result:
        space(len(total))[0].copy_(total.indices)
    call.finish(total.values, result[0].values)
    return result[0]


def _open(indices: Tensor, inner: Call) -> None:
    """The leaders state what they have, as ranks do when a call opens."""

    def combine(lower: Tensor, upper: Tensor) -> Tensor:
        return Header.unpack(lower).combine(Header.unpack(upper)).pack()

    body = Header.of(indices, inner.wire.rank).pack()
    agreement = agree(inner.wire, "hierarchical", {}, None, body, combine)
    header = Header.together([Header.unpack(body) for body in agreement.bodies])
    agreement.release()
    inner.header = header
    inner.load = inner.load.but(
        ranks=inner.wire.size,
        total=header.total,
        most=header.most,
        fewest=header.fewest,
        union=header.union(inner.height),
        hosts=None,
    )


def _hand_out(
    result: Rows, call: Call, members: Sequence[int], blocks: Iterable[tuple[int, int]]
) -> None:
    """Tell the members where rows are, and send values down the chain as they become final."""
    wire = call.wire
    indices = result.indices.to(call.wire_index)
    told = IndexLists(call, dict.fromkeys(members, indices), [])
    told.wait()
    under_way: list[Pending] = []
    for start, stop in blocks:
        for chunk in chunks(call, result.values[start:stop]):
            under_way += [wire.post([(member, chunk)], (), VALUES) for member in members[:1]]
    for pending in under_way:
        pending.wait()
    told.release()


def _hosts(load: Load) -> Hosts:
    return load.hosts or Hosts(tuple(range(load.ranks)))


def _between(load: Load) -> Load:
    """What the leaders will probably have, of a call's load."""
    expected = {n: round(load.union_of(n)) for n in set(map(len, _hosts(load).ranks))}
    rows = [expected[len(ranks)] for ranks in _hosts(load).ranks]
    return load.of_partials().but(
        ranks=len(rows),
        total=max(sum(rows), load.union),
        most=max(*rows, load.most),
        fewest=min(rows),
        hosts=None,
    )


def _flat(load: Load) -> Algorithm:
    """The algorithm that is cheapest among leaders; the same on each of them."""

    def order(algorithm: Algorithm) -> tuple[bool, int, str]:
        cost = algorithm.cost(load)
        effort = cost.bytes if load.link is None else 1e6 * cost.seconds(load.link)
        return cost.memory > workspace(load), round(effort), algorithm.name

    others = (each for each in ALGORITHMS.values() if each.name != "hierarchical")
    return min((each for each in others if each.applies(load) is None), key=order)
