"""hierarchical: the ranks of a host reduce to one of them; those leaders reduce among themselves.

Every rank gives its rows to the leader of its host, its lowest rank, which merges them. The
leaders tell each other what they have, as ranks do when a call opens, and run the algorithm that is
cheapest for that among themselves. Then the result goes down the chain of the host's ranks, in
chunks, so that no rank sends it more than once (where links are as quick as memory, the leader
sends it to each). Between hosts travels one sum for each host in place of the rows of its ranks;
everything else stays on the host. On one host the leader's merge is the result; where every rank
has a host of its own, all are leaders.

Best where hosts have several ranks whose rows overlap, and the network between hosts is what
limits.

Two levels, as in the all-reduce of Goyal et al., "Accurate, Large Minibatch SGD" (2017), section 4.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace

from torch import Tensor

from ...agree import DIRECT, agree
from ...rows import Rows
from ...schedules.hosts import Hosts, hosts_of
from ...wire.memory import typed
from ..call import Call
from ..choice import workspace
from ..cost import Cost, Load
from ..header import Header, combined
from ..local_rows import LocalRows
from ..owners import ToOwners
from ..registry import ALGORITHMS, Algorithm, algorithm
from ..stream import SUMS, IndexLists, Ring, list_messages, window

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
    hosts = hosts_of(call.group)
    ranks, host = hosts.ranks[hosts.of[call.group.rank]], copy(call)
    host.group = call.group.subset(ranks)
    leads = host.group.rank == 0

    # all rows of the host to its leader, who owns everything there
    end = call.header.highest + 1
    moving = ToOwners(host, rows, [0] + [end] * len(ranks))
    moving.send_rest()
    result = None
    if leads and len(hosts.ranks) == 1:
        result = call.result_at(moving.union.indices)
        for _ in moving.sums(call, moving.union, result.values):
            pass
    elif leads:
        result = _among_leaders(call, moving, [ranks[0] for ranks in hosts.ranks])
    moving.finish()
    return _hand_out(host, call, result)


def _among_leaders(call: Call, moving: ToOwners, leaders: list[int]) -> Rows:
    """Merge the rows of this host; the result of its sums and the other leaders'."""
    inner, union, result = call.of_partials(), moving.union, list[Rows]()
    inner.group = call.group.subset(leaders)

    def space(count: int, *_: object) -> tuple[Tensor, Tensor]:
        result.append(call.result(count))
        return result[0].indices, result[0].values

    if call.partial == call.dtype:  # then the sums are received where the result is wanted
        inner.out = space
    count = union.indices.numel()
    with call.group.lease(count * inner.load.row) as memory:
        sums = typed(memory, (count, *call.row_shape), inner.dtype)
        for _ in moving.sums(inner, union, sums):
            pass
        _open(union.indices, inner)
        own = LocalRows.of(Rows(union.indices, sums, call.height))
        total = _flat(inner.load).run(own, inner)
    if not result:
        space(len(total))[0].copy_(total.indices)
    call.finish(total.values, result[0].values)
    return result[0]


def _open(indices: Tensor, inner: Call) -> None:
    """The leaders state what they have, as ranks do when a call opens."""

    body = Header.of(indices, inner.group.rank).pack()
    agreement = agree(inner.group, "hierarchical", {}, None, body, combined)
    header = Header.together(agreement.read(Header.unpack))
    agreement.release()
    inner.header = header
    inner.load = inner.load.but(
        ranks=inner.group.size,
        total=header.total,
        most=header.most,
        fewest=header.fewest,
        union=header.union(inner.height),
        hosts=None,
    )


def _hand_out(host: Call, call: Call, result: Rows | None) -> Rows:
    """The leader's result on all ranks of the host, down the chain in which they stand."""
    sources, lists = [0], {}
    if result is not None:
        indices = result.indices.to(host.wire_index)
        sources, lists = [], dict.fromkeys(host.group.peers, indices)
    told = IndexLists(host, lists, sources)
    found = told.wait()
    if result is None:
        result = call.result_at(found[0])
    nothing = result.values[:0]
    ring = Ring(host, [result.values] + [nothing] * (host.group.size - 1), SUMS)
    if not sources:
        ring.send(result.values)
    ring.finish()
    told.release()
    return result


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
