"""What algorithms say that they send, held against the schedules, on clocks that only count."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import weft
from cases import check_stages
from weft.sparse import Sizes, choose
from weft.sparse.algorithms import split
from weft.sparse.choose import Line
from weft.testing import expected

MODEL = {"alpha": 1e-3, "beta": 1e-6, "work": 2e-4}
SLOW = {"alpha": 50e-6, "beta": 8e-9, "work": 10e-6}
FAR = {"alpha": 25e-3, "beta": 80e-9, "work": 10e-6}  # a chunk takes 20 ms, a message 25
NEAR = {"alpha": 20e-6, "beta": 0.25e-9, "work": 10e-6}
ONES = torch.ones(6000, 64)


@pytest.fixture
def ran(simulated):
    """Runs a program on so many ranks, whose links have these figures."""

    def run(size, link, program, *args, within=None, **hosts):
        inner = simulated.Link(**(within or link))
        return simulated.run(size, simulated.Link(**link), program, *args, within=inner, **hosts)

    return run


@pytest.fixture
def simulate(simulated):
    """Runs one call of an algorithm so."""

    def run(name, rows, ranks, link, within=None, **hosts):
        inner = simulated.Link(**(within or link))
        return simulated.simulate(name, rows, ranks, simulated.Link(**link), within=inner, **hosts)

    return run


# The clocks ------------------------------------------------------------------------------------


def swap(group, peer, nbytes=1000):
    group.post([(peer, torch.zeros(nbytes, dtype=torch.uint8))], [(peer, nbytes)]).wait()
    return group.wire.clock


def test_a_message_takes_work_latency_and_bytes(ran):
    def program(group, nbytes):
        return swap(group, 1 - group.rank, nbytes)

    assert ran(2, MODEL, program, 1000) == pytest.approx([2e-4 + 1e-3 + 1e-3] * 2)
    assert ran(2, MODEL, program, 0) == pytest.approx([2e-4 + 1e-3] * 2)


def test_a_late_rank_keeps_the_other_waiting(ran):
    def program(group):
        if group.rank == 2:
            return group.post([(1, torch.zeros(3000, dtype=torch.uint8))]).wait()
        if group.rank == 1:
            group.post((), [(2, 3000)]).wait()  # for 4.2 ms
        return swap(group, 1 - group.rank)

    assert ran(3, MODEL, program)[:2] == pytest.approx([4.2e-3 + 2.2e-3] * 2)


def test_one_way_into_a_rank_carries_one_message_after_another(ran):
    def program(group):
        if group.rank == 0:
            group.post((), [(peer, 1000) for peer in (1, 2, 3)]).wait()
        else:
            group.post([(0, torch.zeros(1000, dtype=torch.uint8))]).wait()
        return group.wire.clock

    first, *others = ran(4, MODEL, program)
    assert first == pytest.approx(1e-4 + 1e-3 + 3e-3 + 3 * 1e-4)
    assert others == pytest.approx([2.1e-3, 3.1e-3, 4.1e-3])


def test_ranks_of_one_host_share_its_ways_out(ran):
    def program(group):
        far = swap(group, (group.rank + 2) % 4)
        return far, swap(group, group.rank ^ 1) - far

    within = {"alpha": 1e-5, "beta": 1e-9, "work": 2e-4}
    seen = ran(4, MODEL, program, hosts="aabb", within=within)
    assert sorted(far for far, _ in seen) == pytest.approx([2.2e-3, 2.2e-3, 3.2e-3, 3.2e-3])
    assert min(near for _, near in seen) == pytest.approx(2e-4 + 1e-5 + 1e-6)


def test_the_same_time_again(ran):
    def program(group):
        generator = torch.Generator().manual_seed(group.rank)
        rows = torch.randint(500, (60,), generator=generator), torch.ones(60, 8)
        weft.sparse_all_reduce(rows, algorithm="split")
        return group.wire.clock

    first = ran(20, MODEL, program)
    assert ran(20, MODEL, program) == first
    assert len(set(first)) > 1


def test_a_deadlock_across_a_group_and_a_part_of_it_is_told_at_once(ran):
    def program(group):
        part = group.split([0, 1])
        if part is None:
            group.post((), [(0, 8)]).wait()
        else:
            part.post((), [(1 - part.rank, 8)]).wait()

    with pytest.raises(weft.WireError, match="all ranks wait for each other"):
        ran(3, MODEL, program)


def test_what_a_rank_raises_is_raised(ran):
    def program(group):
        if group.rank == 1:
            raise KeyError("here")
        group.post((), [(1, 8)]).wait()

    with pytest.raises(KeyError, match="here"):
        ran(3, MODEL, program)


# What is sent ----------------------------------------------------------------------------------


def spread(rank, count=100, height=4000):
    generator = torch.Generator().manual_seed(rank)
    indices = torch.randperm(height, generator=generator)[:count].sort().values
    return weft.Rows(indices, ONES[:count], height)


def expected_bytes(done):
    """What the average rank sends: values without overlap of index lists, of 4 bytes an index."""
    sizes, others = done.sizes, done.sizes.ranks - 1
    listed = others * sizes.mean * 4  # every index set, on every rank
    if done.algorithm == "gather":
        return others * sizes.mean * sizes.row + listed
    if done.algorithm == "holders":  # no value beyond the bound
        return sizes.bound(done.union) * sizes.row / (sizes.row + 4) + listed
    return others / sizes.ranks * (sizes.mean + done.union) * (sizes.row + 4)


def check_hosts(done, count):
    """It is summed in so many hosts first."""
    assert done.sizes.begins_in_hosts and len(done.sizes.ranks_of_hosts) == count
    check_stages(done)
    # a rank of a flat split sends 4 messages or more to each other one
    assert done.messages < 0.65 * 4 * (done.sizes.ranks - 1)


def test_64_ranks_send_their_rows_to_each_other(simulate):
    done = simulate("gather", spread, 64, SLOW)
    assert done.bytes == pytest.approx(expected_bytes(done), rel=0.05)
    assert done.messages == 2 * 63  # a list and a chunk


def test_64_holders_send_no_value_beyond_the_bound(simulate):
    """A rank has rows for nearly every other, and less than a message of them for each."""
    done = simulate("holders", partial(spread, count=400), 64, SLOW)
    assert done.bytes == pytest.approx(expected_bytes(done), rel=0.05)
    assert done.messages == pytest.approx(3 * 63, rel=0.1)  # a list, rows, and sums


@pytest.mark.parametrize(("ranks", "messages"), [(64, 6), (72, (64 * 6 + 2 * 8) / 72)])
def test_doubling_takes_as_many_messages_as_the_number_has_bits(ranks, messages, simulate):
    done = simulate("doubling", spread, ranks, SLOW)
    assert done.messages == pytest.approx(messages, rel=0.1)
    assert done.bytes <= messages * done.union * (256 + 4) + 8 * messages


@pytest.mark.parametrize("name", ["holders", "split", "gather"])
def test_whatever_runs_between_hosts_of_eight(name, monkeypatch, simulate):
    def between(sizes):
        return Line(name, "tried"), choose.between_hosts(sizes)[1]

    monkeypatch.setattr(split, "between_hosts", between)
    hosts = [f"{rank // 8}" for rank in range(32)]
    rows = partial(spread, count=500, height=20_000)
    check_hosts(simulate("split", rows, 32, SLOW, hosts=hosts, within=NEAR), 4)


@pytest.mark.parametrize(("name", "count"), [("holders", 400), ("gather", 100)])
def test_others_do_not_ask_for_hosts(name, count, simulate):
    hosts = [f"{rank // 8}" for rank in range(32)]
    rows = partial(spread, count=count, height=2000)
    done = simulate(name, rows, 32, SLOW, hosts=hosts, within=NEAR)
    assert done.bytes == pytest.approx(expected_bytes(done), rel=0.05)


def test_chunks_of_distant_ranks_do_not_wait_for_each_other_in_the_ring(simulate):
    done = simulate("holders", partial(spread, count=6000, height=24_000), 4, FAR)
    assert done.bytes == pytest.approx(expected_bytes(done), rel=0.05)
    waits = (done.seconds - done.bytes * FAR["beta"]) / FAR["alpha"]
    assert waits < 5  # two for the lists, one for the rows, and hardly any in the ring


def test_between_distant_hosts_few_values_go_to_all_together_with_the_lists(simulate):
    done = simulate("gather", partial(spread, count=300, height=24_000), 4, FAR)
    assert done.bytes == pytest.approx(expected_bytes(done), rel=0.05)
    waits = (done.seconds - done.bytes * FAR["beta"]) / FAR["alpha"]
    assert waits < 1.5  # with one for the lists it were 2, and round the ring three


def test_an_all_gather_goes_directly_where_little_comes_altogether_or_within_a_host():
    sizes = Sizes(4, 24_000, 6000, 6000, 24_000, 256, 256)
    assert sizes.sends_directly(80 << 10)
    assert not sizes.sends_directly(90 << 10)
    assert sizes.but(ranks=2).sends_directly(90 << 10)
    assert sizes.but(hosts=weft.sparse.Hosts((0, 0, 0, 0))).sends_directly(1 << 30)


def test_between_distant_hosts_few_gathered_rows_go_to_all(ran):
    def program(group):
        weft.sparse_all_gather(spread(group.rank, count=300, height=24_000))
        return group.wire.clock, group.traffic.bytes

    seconds, nbytes = zip(*ran(4, FAR, program), strict=True)
    waits = (max(seconds) - max(nbytes) * FAR["beta"]) / FAR["alpha"]
    assert waits < 2.5  # one to open the call, and one for the rows; a ring waits in each hop


@pytest.mark.parametrize(
    ("name", "rounds"),
    [
        ("doubling", 2),
        ("gather", 3),  # round the ring: lists travel with the first values
        ("holders", 5),  # lists, rows, and sums round the ring
        ("split", 5),
    ],
)
def test_between_distant_hosts_a_call_waits_for_its_rounds_and_its_bytes(name, rounds, simulate):
    done = simulate(name, partial(spread, count=6000, height=24_000), 4, FAR)
    seconds = done.seconds - done.bytes * FAR["beta"]
    assert seconds / FAR["alpha"] < rounds + 1.5


def test_headers_combine_and_the_sums_are_right(ran):
    parts = [spread(rank, count=20, height=300) for rank in range(24)]
    right = expected(parts)

    def program(group):
        rows = weft.sparse_all_reduce(parts[group.rank])
        return torch.equal(rows.indices, right.indices) and torch.equal(rows.values, right.values)

    assert all(ran(24, SLOW, program))
