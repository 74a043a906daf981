"""The bounds of docs/holders.md, against a search of all schedules of small cases.

A schedule of one index is a sequence of messages between parts, each of which carries one sum of
some summands. A part has the summands of its ranks, and every sum that it got; it may add sums that
have no summand in common. All parts must end with the sum of all summands.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math

import pytest
import torch

import weft
from cases import on_hosts
from weft.sparse import Sizes, last_call
from weft.sparse.bound import rows_of_average
from weft.testing import run


def closed(sums):
    """All sums that can be made of these; a sum is the set of its summands, as bits."""
    found = set(sums)
    news = found
    while news:
        news = {one | other for one in news for other in found if not one & other} - found
        found |= news
    return frozenset(found)


def start_of(held):
    """What each part can make at first, and the sum of all; `held`: summands of each part."""
    bits = itertools.count()
    state = tuple(closed({1 << next(bits) for _ in range(count)}) for count in held)
    return state, (1 << sum(held)) - 1


def messages_of(state):
    """Each message that tells a part something: from, to, and what all can make then."""
    for sender, receiver in itertools.permutations(range(len(state)), 2):
        for told in state[sender] - state[receiver]:
            after = list(state)
            after[receiver] = closed(state[receiver] | {told})
            yield sender, receiver, tuple(after)


def least_loads(held, charge):
    """The loads of all schedules of one index, but for those that another is nowhere above.

    Schedules are of any length. The search ends, since each message tells its receiver something,
    and there are finitely many sums to tell.

    Args:
        held: summands of each part.
        charge: what a message from one part to another adds to the load, a tuple of counts.
    """
    first, whole = start_of(held)
    parts = range(len(held))

    def arriving(receiver):
        """What a message to a part adds at least, whoever sends it."""
        charges = [charge(sender, receiver) for sender in parts if sender != receiver]
        return tuple(map(min, zip(*charges, strict=True)))

    def remaining(state):
        """What must still be added: each part that cannot make the whole needs a message."""
        needs = [arriving(part) for part in parts if whole not in state[part]]
        return added(*needs) if needs else nothing

    nothing = (0,) * len(charge(0, 1))
    number = itertools.count()  # so that the queue never compares states
    ends = []
    seen = {}  # the least loads with which each state was reached
    queue = [(0, next(number), first, nothing)]
    while queue:
        _, _, state, load = heapq.heappop(queue)
        if is_beaten(added(load, remaining(state)), ends):
            continue
        if all(whole in sums for sums in state):
            ends.append(load)
            continue
        for sender, receiver, then in messages_of(state):
            after = added(load, charge(sender, receiver))
            before = seen.setdefault(then, [])
            least = added(after, remaining(then))
            if is_beaten(after, before) or is_beaten(least, ends):
                continue
            before.append(after)
            heapq.heappush(queue, (sum(least), next(number), then, after))
    return best(ends)


def added(*loads):
    return tuple(map(sum, zip(*loads, strict=True)))


def is_beaten(load, others):
    """Whether another load is nowhere above this one."""
    return any(all(x <= y for x, y in zip(other, load, strict=True)) for other in others)


def best(loads):
    """The loads of which no other is as small everywhere."""
    found = []
    for load in sorted(loads, key=sum):
        if not is_beaten(load, found):
            found.append(load)
    return found


@functools.cache
def fewest(held):
    """The fewest messages of any schedule."""
    [(count,)] = least_loads(held, lambda sender, receiver: (1,))
    return count


@functools.cache
def loads(held):
    """What parts receive, and then what they send, in all schedules: see `least_loads`."""
    parts = len(held)

    def charge(sender, receiver):
        counts = [0] * (2 * parts)
        counts[receiver] += 1
        counts[parts + sender] += 1
        return tuple(counts)

    return least_loads(held, charge)


def loads_of_all(indices, loads_of_one):
    """The least loads of several indices, each of which may take another schedule."""
    sums = [(0,) * len(loads_of_one(indices[0])[0])]
    for held in indices:
        sums = best({added(one, other) for one in sums for other in loads_of_one(held)})
    return sums


def least_of_busiest(indices):
    """The least that the busiest part receives or sends; each index is what parts hold of it."""
    return min(map(max, loads_of_all(indices, loads)))


def held_by(parts, most):
    """All ways in which so many parts hold up to `most` summands of an index, and one at least."""
    return [held for held in itertools.product(range(most + 1), repeat=parts) if any(held)]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_an_index_takes_as_many_messages_as_the_proof_says(ranks):
    for held in held_by(ranks, 1):
        if held == tuple(sorted(held, reverse=True)):  # ranks are alike
            assert fewest(held) == sum(held) + ranks - 2


@pytest.mark.parametrize(("hosts", "most"), [(2, 3), (3, 2)])
def test_and_so_it_does_between_hosts_however_many_ranks_of_one_hold_it(hosts, most):
    for held in held_by(hosts, most):
        if held == tuple(sorted(held, reverse=True)):
            assert fewest(held) == sum(count > 0 for count in held) + hosts - 2


@pytest.fixture
def rows_of_busiest(script):
    return script("benchmarks/goals.py").rows_of_busiest


@pytest.mark.parametrize(("hosts", "most", "rows"), [(2, 1, 4), (2, 2, 3), (3, 1, 3)])
def test_no_schedule_spares_the_busiest_host_more_than_the_bound_says(
    rows_of_busiest, hosts, most, rows
):
    """Of rows that up to `most` ranks of each host hold."""
    met = 0
    cases = list(itertools.combinations_with_replacement(held_by(hosts, most), rows))
    for indices in cases:
        own = [sum(held[host] > 0 for held in indices) for host in range(hosts)]
        others = [
            sum(any(held[:host] + held[host + 1 :]) for held in indices) for host in range(hosts)
        ]
        bound = math.ceil(rows_of_busiest(own, others, rows) - 1e-9)
        least = least_of_busiest(indices)
        assert bound <= least
        met += bound == least
    assert met >= 0.9 * len(cases)  # and mostly a schedule is as good


def test_the_bound_of_ranks_is_that_of_hosts_with_a_rank_each(rows_of_busiest):
    sizes = Sizes(4, 400, 130, 80, None, 256, 256)
    assert sizes.bound(300) == rows_of_average(400, 300, 4) * 260 == (400 + 2 * 300) / 4 * 260
    assert rows_of_busiest([100] * 4, [280] * 4, 300) == 280  # what the others have, which is more
    assert rows_of_busiest([300], [0], 300) == 0


@pytest.mark.parametrize("step", [0, 2000, 4000])  # the same rows, half of them, and others
def test_explain_says_between_what_the_bound_lies(step):
    def program(group):
        rows = weft.Rows(torch.arange(4000) + step * group.rank, torch.ones(4000, 64), 16_000)
        with on_hosts(group, "abcd"):
            said = weft.explain(rows)
            weft.sparse_all_reduce(rows)
        return said, last_call()

    said, record = run(4, program)[0]
    least, most = said.bound
    places = 4000 + 3 * step
    assert said.sizes.union == (4000, places)
    assert (least, most) == ((16_000 + 2 * 4000) / 4 * 260, (16_000 + 2 * places) / 4 * 260)
    assert least <= record.bound_bytes <= most
    assert f"bound: {least:.0f}" in str(said)
