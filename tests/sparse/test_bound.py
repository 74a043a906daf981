"""The bounds of docs/holders.md, against a search of all schedules of small cases.

A schedule of one index is a sequence of messages between parts, each of which carries one sum of
some summands. A part has the summands of its ranks, and every sum that it got; it may add sums that
have no summand in common. All parts must end with the sum of all summands.
"""

from __future__ import annotations

import functools
import itertools
import math

import pytest

from weft.sparse import Hosts, Link, Load
from weft.sparse.bound import rows_of_average, rows_of_busiest


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


def lacking(state, whole):
    """How many parts cannot make the whole sum; each must still receive a message."""
    return sum(whole not in sums for sums in state)


def schedules(held, messages):
    """What parts receive and send, in each schedule of up to so many messages."""
    first, whole = start_of(held)
    parts = len(held)
    found = {(first, (0,) * (2 * parts))}
    ends = set()
    for left in range(messages, -1, -1):
        ends |= {load for state, load in found if not lacking(state, whole)}
        after = set()
        for state, load in found:
            for sender, receiver, then in messages_of(state):
                if lacking(then, whole) < left:  # else too few messages are left
                    total = list(load)
                    total[receiver] += 1
                    total[parts + sender] += 1
                    after.add((then, tuple(total)))
        found = after
    return ends


@functools.cache
def fewest(held):
    """The fewest messages of any schedule."""
    return next(count for count in itertools.count() if schedules(held, count))


@functools.cache
def loads(held):
    """What parts receive and send in schedules of the fewest messages, or one more.

    Those in which each part does as much as in another, or more, are left out.
    """
    return best(schedules(held, fewest(held) + 1))


def best(vectors):
    """The vectors of which no other is as small everywhere."""

    def beaten(one):
        return any(
            other != one and all(x <= y for x, y in zip(other, one, strict=True))
            for other in vectors
        )

    return [one for one in vectors if not beaten(one)]


def least_of_busiest(indices):
    """The least that the busiest part receives or sends; each index is what parts hold of it."""
    sums = [(0,) * (2 * len(indices[0]))]
    for held in indices:
        sums = best(
            {
                tuple(x + y for x, y in zip(one, other, strict=True))
                for one in sums
                for other in loads(held)
            }
        )
    return min(map(max, sums))


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


@pytest.mark.parametrize(("hosts", "rows"), [(2, 4), (3, 3)])
def test_no_schedule_spares_the_busiest_host_more_than_the_bound_says(hosts, rows):
    met = 0
    cases = list(itertools.combinations_with_replacement(held_by(hosts, 1), rows))
    for indices in cases:
        own = [sum(held[host] for held in indices) for host in range(hosts)]
        others = [
            sum(any(held[:host] + held[host + 1 :]) for held in indices) for host in range(hosts)
        ]
        bound = math.ceil(rows_of_busiest(own, others, rows) - 1e-9)
        least = least_of_busiest(indices)
        assert bound <= least
        met += bound == least
    assert met >= 0.9 * len(cases)  # and mostly a schedule is as good


def test_the_bound_of_ranks_is_that_of_hosts_with_a_rank_each():
    load = Load(4, 400, 130, 80, 300, None, 256, 256, 4, hosts=Hosts((0, 1, 2, 3)))
    assert load.bound == rows_of_average(400, 300, 4) * 260 == (400 + 2 * 300) / 4 * 260
    assert load.host_bound == pytest.approx(load.bound, rel=0.01)  # the others' union: an estimate
    link = Link(1e-4, 8e-9, 1e-10, 1e-5)
    assert load.least_seconds(link) == pytest.approx(load.bound * 8e-9, rel=0.01)
    assert load.but(hosts=None).host_bound == load.host_bound
    alone = load.but(hosts=Hosts((0, 0, 0, 0)))
    assert alone.host_bound == 0
    assert alone.least_seconds(link) == load.bound * 8e-9


def test_the_rank_with_most_rows_sends_them_all():
    load = Load(4, 400, 350, 10, 380, None, 256, 256, 4)
    assert load.bound < load.host_bound == 350 * 260


def test_several_ranks_on_hosts():
    """Rows that ranks draw independently, 1,000 of 10,000."""
    union = 10_000 * (1 - 0.9**8)
    load = Load(8, 8000, 1000, 1000, round(union), None, 256, 256, 4)
    pairs = load.but(hosts=Hosts((0, 0, 0, 0, 1, 1, 1, 1)))
    four = 10_000 * (1 - 0.9**4)
    assert pairs.host_bound == pytest.approx(four * 260, rel=0.001)  # what the other host has
    counted = pairs.but(rows_of_hosts=((3000, 3600), (3600, 3000)))
    assert counted.host_bound == 3600 * 260
    # of five ranks and two that are alone, these must receive what six others have
    uneven = load.but(ranks=7, total=7000, union=round(10_000 * (1 - 0.9**7)))
    uneven = uneven.but(hosts=Hosts((0, 0, 0, 0, 0, 1, 2)))
    six = 10_000 * (1 - 0.9**6)
    assert uneven.host_bound == pytest.approx(six * 260, rel=0.001)


def test_the_least_time_counts_what_ranks_of_a_host_receive_from_each_other():
    load = Load(8, 8000, 1000, 1000, 1000, None, 256, 256, 4, hosts=Hosts((0, 0, 0, 0, 1, 1, 1, 1)))
    crossing = 1000 * 260 * 8e-9
    slow = Link(1e-4, 8e-9, 1e-10, 1e-5)
    assert load.least_seconds(slow) == pytest.approx(crossing)  # not known how quick a host is
    quick_within = Link(1e-4, 8e-9, 1e-10, 1e-5, within=1e-10)
    assert load.least_seconds(quick_within) == pytest.approx(crossing)
    # each rank receives 1,750 rows; all 8 together over two links and within their hosts
    slow_within = Link(1e-4, 8e-9, 1e-10, 1e-5, within=16e-9)
    speed = 2 / 8e-9 + 8 / 16e-9
    assert load.least_seconds(slow_within) == pytest.approx(8 * 1750 * 260 / speed)
    assert load.least_seconds(slow_within) > crossing
