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
import random
from dataclasses import replace

import pytest
import torch

import weft
from weft import Rows, kernels
from weft.sparse import Hosts, Link, Load
from weft.sparse.bound import rows_of_average, rows_of_busiest
from weft.sparse.explanation import predicted
from weft.sparse.header import Header, described, rows_of_hosts
from weft.sparse.link import set_link
from weft.testing import run
from weft.testing.simulation import simulate


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


@pytest.mark.parametrize(("hosts", "most", "rows"), [(2, 1, 4), (2, 2, 3), (3, 1, 3)])
def test_no_schedule_spares_the_busiest_host_more_than_the_bound_says(hosts, most, rows):
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


WITHIN = (0.1, 0.5, 1.0, 4.0)  # time of a row from a neighbour, where one from a host takes 1


@pytest.mark.parametrize(("hosts", "rows"), [("ab", 3), ("aab", 2)])
def test_no_schedule_is_quicker_than_the_least_time(hosts, rows):
    """Ranks of some hosts, each of which holds each row or does not.

    The time of a schedule is that of the rows into or out of the busiest host, or of the rank that
    receives most from its neighbours, whichever takes longer.
    """
    names = sorted({*hosts})
    number = [names.index(name) for name in hosts]
    near = len(names) * 2  # where the counts of ranks begin

    @functools.cache
    def crossing_and_near(held):
        def charge(sender, receiver):
            counts = [0] * (near + len(hosts))
            if hosts[sender] == hosts[receiver]:
                counts[near + receiver] += 1
            else:
                counts[number[receiver]] += 1
                counts[len(names) + number[sender]] += 1
            return tuple(counts)

        return least_loads(held, charge)

    met = 0
    cases = list(itertools.combinations_with_replacement(held_by(len(hosts), 1), rows))
    for indices in cases:
        found = loads_of_all(indices, crossing_and_near)
        for within in WITHIN:
            seconds = min(max(*load[:near], within * max(load[near:])) for load in found)
            link = Link(0, 1 / 8, 0, 0, within=within / 8)
            least = load_of(hosts, indices).least_seconds(link)
            assert least <= seconds * (1 + 1e-9)
            met += least == pytest.approx(seconds)
    assert met >= 0.5 * len(WITHIN) * len(cases)  # and often a schedule is as quick


def load_of(hosts, indices):
    """The load of ranks of hosts that hold some rows, of eight bytes with their index."""
    holders = list(zip(*indices, strict=True))  # for each rank which rows it holds
    counts = [sum(rank) for rank in holders]

    def union_of(names):
        members = [rank for name, rank in zip(hosts, holders, strict=True) if name in names]
        return sum(map(any, zip(*members, strict=True)))

    names = {*hosts}
    counted = tuple((union_of({host}), union_of(names - {host})) for host in sorted(names))
    return Load(
        len(hosts), sum(counts), max(counts), min(counts), len(indices), None, 4, 4, 4,
        hosts=Hosts.named(hosts), rows_of_hosts=counted,
    )  # fmt: skip


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


LINK = Link(1e-4, 8e-9, 1e-10, 1e-5, within=1e-10)
SLOW_WITHIN = Link(1e-4, 8e-9, 1e-10, 1e-5, within=16e-9)


@pytest.mark.parametrize(
    ("hosts", "link", "milliseconds", "why"),
    [
        (
            "aaaaaaaa",
            LINK,
            1750 * 260 * 8e-6,
            "all ranks share a host, so the bound is that of a rank",
        ),
        (
            "abcdefgh",
            LINK,
            1750 * 260 * 8e-6,
            "no rank shares its host, so the bound is that of a rank; the busiest must receive or "
            "send 455000 bytes",
        ),
        (
            "aaaabbbb",
            LINK,
            1000 * 260 * 8e-6,
            "4 ranks share a host, so the bound is the host bound: 260000 bytes cross the link of "
            "the busiest of 2 hosts",
        ),
        (
            "aaaabbbb",
            SLOW_WITHIN,
            8 * 1750 * 260 / (2 / 8e-6 + 8 / 16e-6),
            "4 ranks share a host, but the bound is that of a rank: the 455000 bytes that it "
            "receives, from its host and over the link, take longer than the 260000 that cross the "
            "link of the busiest host",
        ),
    ],
)
def test_explain_says_which_bytes_take_the_least_time(hosts, link, milliseconds, why):
    """Of eight ranks that have the same 1,000 rows of 260 bytes."""
    load = Load(8, 8000, 1000, 1000, 1000, None, 256, 256, 4, hosts=Hosts.named(hosts))
    if hosts == "aaaabbbb":
        why = f"if ranks draw their rows independently: {why}"
        separator = ", "
    else:
        separator = ": "
    lines = str(predicted(load, link)).splitlines()
    assert f"least time about {milliseconds:.2f} ms{separator}{why}" in lines


def rows_of_its_host(rank):
    """Of ranks 0 to 3 the first 4,000 rows, of the others the next."""
    return Rows(torch.arange(4000) + 4000 * (rank // 4), torch.ones(4000, 64), 8000)


NEAR = Link(50e-6, 80e-9, 0.125e-9, 1e-6, within=0.25e-9)


def test_explain_knows_that_the_ranks_of_a_host_have_the_same_rows():
    def program(group):
        set_link(group, NEAR)
        group.session.hosts = tuple("aaaabbbb")
        one = weft.explain(rows_of_its_host(group.rank))
        narrow = (torch.arange(4000), torch.ones(4000))
        several = weft.explain([rows_of_its_host(group.rank), narrow])
        return str(one), one.load.rows_of_hosts, several.load.rows_of_hosts

    text, one, several = run(8, program)[0]
    least = 4000 * 260 * NEAR.beta  # a host sends all that it has to the other
    assert f"least time about {1e3 * least:.2f} ms: 4 ranks share a host" in text
    assert one == ((4000, 4000),) * 2
    assert several == ((8000, 8000),) * 2


def test_a_split_of_hosts_is_predicted_where_their_ranks_have_the_same_rows():
    near = replace(NEAR, beta=NEAR.within)
    done = simulate("split", rows_of_its_host, 8, NEAR, hosts="aaaabbbb", within=near)
    assert done.predicted == pytest.approx(done.seconds, rel=0.05)


def header_of(rows, rank):
    return Header.of(torch.tensor(sorted(rows)), rank)


@pytest.mark.parametrize("hosts", ["aabbccdd", "aaaaabcc", "abcabcab"])
@pytest.mark.parametrize("alike", [0.0, 0.5, 1.0])
def test_rows_of_hosts_are_estimated_from_samples(hosts, alike):
    """Each rank has a part of its rows in common with its host."""
    draw = random.Random(hosts)
    common = {host: draw.sample(range(100_000), 4000) for host in sorted({*hosts})}
    shared = round(4000 * alike)
    sets = [{*common[host][:shared], *draw.sample(range(100_000), 4000 - shared)} for host in hosts]
    headers = [header_of(rows, rank) for rank, rows in enumerate(sets)]
    union = Header.together(headers).union(100_000)

    by_host = Hosts.named(hosts)
    found = rows_of_hosts(headers, by_host, union)
    assert len(found) == len(by_host.ranks)
    for ranks, (own, others) in zip(by_host.ranks, found, strict=True):
        true = union_of_sets(sets[rank] for rank in ranks)
        assert own == pytest.approx(true, rel=0.2)  # three standard deviations
        if alike == 1:
            assert own == true
        assert union - own <= others <= union
        true_others = union_of_sets(sets[rank] for rank in range(len(sets)) if rank not in ranks)
        assert others <= 1.2 * true_others
        assert own <= union


def union_of_sets(sets):
    return len(set().union(*sets))


def test_rows_of_hosts_are_exact_for_few_rows():
    """Also of a rank whose header has the rows themselves."""
    sets = [{1, 2, 3}, {3, 4}, {*range(200)}, {7}, set()]
    headers = [header_of(rows, rank) for rank, rows in enumerate(sets)]
    headers[1] = Header.of(torch.tensor([3, 4]), 1, values=torch.ones(2))
    found = rows_of_hosts(described(headers), Hosts.named("ababc"), 200)
    assert found == ((200, 3), (3, 200), (0, 200))


def test_a_header_that_carries_rows_is_described_once(monkeypatch):
    """By each rank, where one rank has too many rows to send them with its header."""
    sketched = []
    sketch = kernels.sketch

    def counted(indices, count):
        sketched.append(len(indices))
        return sketch(indices, count)

    def program(group):
        set_link(group, NEAR)
        group.session.hosts = tuple("aabb")
        count = 3000 if group.rank == 1 else 3
        weft.sparse_all_reduce(Rows(torch.arange(count), torch.ones(count, 64), 3000))

    monkeypatch.setattr(kernels, "sketch", counted)
    run(4, program)
    assert sorted(sketched) == 12 * [3] + [3000]  # rank 1 did not send its own


def test_explain_says_that_all_wait_for_the_busiest():
    def program(group):
        set_link(group, NEAR)
        group.session.hosts = tuple("abcd")
        some = Rows(torch.arange(4000) + 4000 * group.rank, torch.ones(4000, 64), 16_000)
        one = some if group.rank == 0 else Rows(some.indices[:0], some.values[:0], 16_000)
        return weft.explain(some), weft.explain(one)

    even, skewed = run(4, program)[0]
    waits = "all wait for the busiest host"
    assert waits not in str(even)
    # rank 0 has to send 4,000 rows, the average one 3,000: it has three quarters of them to receive
    assert f"{waits}, which has 1.3 times as much to receive or send" in str(skewed)
    assert waits in skewed._repr_html_()
    least = 1e3 * skewed.load.least_seconds(NEAR)
    assert skewed.lines[0].milliseconds < least == pytest.approx(4e6 * 260 * NEAR.beta)
