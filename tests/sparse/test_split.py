"""split in stages, on groups of several hosts; flat it is under the tests of all algorithms."""

from __future__ import annotations

import dataclasses
import functools
import threading
from itertools import pairwise

import pytest
import torch

import weft
from cases import check_stages, header_of, in_case, on_hosts, same, set_rate
from weft.base.pace import patient
from weft.group.channels import SUMS, VALUES
from weft.schedules.hosts import Hosts
from weft.sparse import ALGORITHMS, Sizes, choose, last_call
from weft.sparse.algorithms import split
from weft.sparse.call import Call
from weft.sparse.choose import Line
from weft.sparse.header import Header
from weft.sparse.owners import balanced_bounds
from weft.testing import expected, run, spmd

HOSTS = {  # by name of each rank's host
    2: ("ab", "aa"),
    3: ("abb", "aba", "abc"),
    4: ("aabb", "abba", "abcd", "aaab"),
    7: ("aaaabbb", "aaaaabc", "abababa", "aabbccc"),
    8: ("aaaabbbb", "abcabcab", "aabbccdd", "abcdefgh", "aaaaaaaa"),
    13: ("aaaabbbbccccd", "abcdefghijklm", "aaaaaaabbbbbb"),
}
SLOW = 16  # the rate of a link on which lists are packed, and chunks are short
BETWEEN = sorted(set(ALGORITHMS) - {"doubling"})
LOCK = threading.Lock()


def rows_of(rank, dtype=torch.float32, height=200, count=150):
    draw = torch.Generator().manual_seed(rank)
    values = torch.randint(-4, 5, (count, 3), generator=draw).to(dtype)
    return weft.Rows(torch.randint(height, (count,), generator=draw), values, height)


@functools.cache
def world(size, op, dtype):
    parts = [rows_of(rank, dtype, count=0 if rank == 1 else 150) for rank in range(size)]
    return parts, expected(parts, op)


def wanted(size, op="sum", dtype=torch.float32):
    """All ranks' rows and what they come to; ranks that are threads make them once."""
    with LOCK:
        return world(size, op, dtype)


def reduced(group, names, parts, op="sum", **options):
    """By a split of hosts of these names, over a slow link."""
    set_rate(group, SLOW)
    with on_hosts(group, names):
        return weft.sparse_all_reduce(parts[group.rank], op, algorithm="split", **options)


def begins_in_hosts(group, names, rows, op="sum"):
    """Whether a split of hosts of these names sums within them first."""
    with on_hosts(group, names):
        return weft.explain(rows, op, algorithm="split").sizes.begins_in_hosts


def share_hosts(names):
    """Whether several hosts of these names have ranks, and one has several."""
    return 1 < len({*names}) < len(names)


@pytest.fixture
def between_blocks(monkeypatch):
    """Sets what runs between hosts, whatever the rule takes."""

    def take(name):
        def between(sizes):
            return Line(name, "tried"), choose.between_hosts(sizes)[1]

        monkeypatch.setattr(split, "between_hosts", between)

    return take


def real_parts():
    draw = torch.Generator().manual_seed(7)
    return [
        weft.Rows(torch.randint(300, (500,), generator=draw), torch.randn(500, 5, generator=draw))
        for _ in range(8)
    ]


@pytest.mark.parametrize(
    ("size", "names"), [(size, each) for size in HOSTS for each in HOSTS[size]]
)
def test_it_equals_the_definition(size, names):
    def program(group):
        for op, dtype in (("sum", torch.float32), ("avg", torch.bfloat16), ("min", torch.int8)):
            with in_case(op, dtype):
                parts, want = wanted(size, op, dtype)
                total = reduced(group, names, parts, op)
                assert torch.equal(total.indices, want.indices)
                torch.testing.assert_close(total.values, want.values)
                assert last_call().algorithm == "split"
        return begins_in_hosts(group, names, wanted(size)[0][group.rank])

    assert set(run(size, program)) == {share_hosts(names)}


@spmd(4, 7)
def test_it_equals_the_definition_on_every_wire(group):
    parts, want = wanted(group.size)
    for names in HOSTS[group.size]:
        with in_case(names):
            same(reduced(group, names, parts), want)


@pytest.mark.parametrize("between", BETWEEN)
def test_any_algorithm_may_run_between_hosts(between, between_blocks):
    between_blocks(between)
    cases = (torch.float32, 200, (150, 150)), (torch.float16, 30, (0, 1)), (torch.int8, 9, (0, 0))
    for dtype, height, counts in cases:
        parts = [rows_of(rank, dtype, height, counts[rank % 2]) for rank in range(6)]
        want = expected(parts)
        for names in ("aabbca", "aabbcc"):
            for total in run(6, reduced, names, parts):
                same(total, want)


@pytest.mark.parametrize("names", ["aabbccdd", "aaaabbbb"])
def test_real_numbers_have_the_same_bits_on_all_ranks_and_again(names):
    parts = real_parts()

    def program(group):
        return [reduced(group, names, parts).values for _ in range(2)]

    (first, _), *_ = found = run(8, program)
    assert all(torch.equal(each, first) for both in found for each in both)


@functools.cache
def many_chunks():
    parts = []
    for rank in range(8):
        draw = torch.Generator().manual_seed(rank)
        indices = torch.randperm(12_000, generator=draw)[:11_000]  # more than is awaited ahead
        values = torch.randint(-4, 5, (11_000, 64), generator=draw).float()
        parts.append(weft.Rows(indices, values, 12_000))
    return parts, expected(parts)


@pytest.mark.parametrize(
    ("between", "names"),
    [
        ("gather", "aaabbcca"),
        ("holders", "aabbccdd"),
        ("split", "aaabbcca"),
    ],
)
def test_sums_of_many_chunks_are_shared_once_they_are_complete(names, between, between_blocks):
    between_blocks(between)
    parts, want = many_chunks()

    for total in run(8, reduced, names, parts):
        same(total, want)


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize(
    ("given", "op"), [(torch.bfloat16, "sum"), (torch.bfloat16, "avg"), (torch.float32, "sum")]
)
def test_sums_of_some_ranks_travel_unrounded(given, op, between, between_blocks):
    """1 and 1/512 many times: rounded to bfloat16 between the stages, the small ones would go."""
    between_blocks(between)
    parts = []
    for rank, value in enumerate([1.0, 2**-9, 2**-9, 2**-9]):
        own = torch.arange(5000, 5100) + 100 * rank
        indices = torch.cat([torch.arange(5000), own])
        parts.append(weft.Rows(indices, torch.full((5100, 2), value, dtype=given), 6000))
    wire_dtype = None if given is torch.bfloat16 else torch.bfloat16
    ranks = 4 if op == "avg" else 1
    for total in run(4, reduced, "aabb", parts, op, wire_dtype=wire_dtype):
        assert total.values[:5000].eq((1 + 2**-7) / ranks).all()  # of 1 + 3/512, rounded once
        assert total.values[5000:5100].eq(1 / ranks).all()
        assert total.values[5100:].eq(2**-9 / ranks).all()


def test_the_largest_index_there_is_on_uneven_hosts(between_blocks):
    """The range of the rank without a place begins behind it, at no int64."""
    between_blocks("split")
    parts = [rows_of(rank) for rank in range(7)]
    last = 2**63 - 1
    parts = [weft.Rows(last - part.indices, part.values) for part in parts]
    want = expected(parts)

    for total in run(7, reduced, "aaaabbb", parts):
        same(total, want)


def test_lists_of_tables():
    parts = [[rows_of(rank), rows_of(rank + 9, count=rank)] for rank in range(4)]

    for found in run(4, reduced, "aabb", parts):
        for table, total in enumerate(found):
            same(total, expected([part[table] for part in parts]))


def test_some_ranks_of_some_hosts_are_a_group():
    some = [0, 3, 4, 6, 7]  # of hosts aabab
    parts = [rows_of(rank) for rank in some]
    want = expected(parts)

    def program(group):
        if group.rank not in some:
            return None
        part = group.subset(some)
        rows = parts[part.rank]
        with on_hosts(group, "abcabcab"):
            total = weft.sparse_all_reduce(rows, algorithm="split", group=part)
            sizes = weft.explain(rows, algorithm="split", group=part).sizes
        same(total, want)
        return sizes.begins_in_hosts and sizes.ranks_of_hosts

    found = run(8, program)
    assert [each for each in found if each is not None] == [((0, 1, 3), (2, 4))] * 5


@pytest.mark.parametrize(("wire_dtype", "unit"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
@pytest.mark.parametrize("names", ["aaaabbb", "aaaaabc", "abababa", "aabbccdd"])
def test_values_that_travel_narrow_are_rounded_twice_in_all_stages(names, wire_dtype, unit):
    draw = torch.Generator().manual_seed(3)
    given = torch.zeros(len(names), 400, 4)
    parts = []
    for own in given:
        indices = torch.randperm(400, generator=draw)[:300]
        own[indices] = torch.rand(300, 4, generator=draw) + 0.5  # so that float32 adds exactly
        parts.append(weft.Rows(indices, own[indices], 400))
    rounded = given.to(wire_dtype).float().sum(0).to(wire_dtype).float()
    exact = given.double().sum(0)
    bound = unit * exact + unit * (1 + unit) * exact  # of docs/wire-dtype.md

    def program(group):
        return reduced(group, names, parts, wire_dtype=wire_dtype)

    for found in run(len(names), program):
        assert torch.equal(found.values, rounded[found.indices])
        error = found.values.double() - exact[found.indices]
        assert (error.abs() <= bound[found.indices]).all()


def test_a_rank_that_dies_is_everybodys_error(monkeypatch):
    parts = [rows_of(rank) for rank in range(4)]

    make = Call.result
    second = threading.Event()

    def result(call, count):
        if call.group.global_ranks[call.group.rank] == 2 and second.is_set():
            call.group.abort("gone")  # when the others of its place and of its host await it
        return make(call, count)

    monkeypatch.setattr(Call, "result", result)

    def program(group):
        reduced(group, "aabb", parts)
        if group.rank == 2:
            second.set()
        with pytest.raises(weft.WireError, match="rank 2 gave up: gone"):
            reduced(group, "aabb", parts)
            weft.barrier()  # where a rank that needed nothing more of it is told

    run(4, program)


RANK = """
import json, os, signal, sys, time, torch, weft
from weft import kernels
from weft.sparse.call import Call
place, victim, stage = sys.argv[1:]
group = weft.init(rendezvous=f"file://{place}", timeout=120.0)
calls = 0
def dies_in(here):
    if calls == 2 and here == stage and group.rank == int(victim):
        print(json.dumps({"at": time.monotonic()}), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
combine = kernels.combine
def dying(*given):  # as a block's rows are summed: ranks of other blocks wait for the sums
    dies_in("the first")
    return combine(*given)
kernels.combine = dying
make = Call.result
def result(call, count):  # as a block is told its sums, before they come
    dies_in("the last")
    return make(call, count)
Call.result = result
rows = weft.Rows(torch.arange(50_000), torch.ones(50_000, 8), 50_000)
try:
    while calls < 5:
        calls += 1
        weft.sparse_all_reduce(rows, algorithm="split")
        if calls == 1:
            sizes = weft.explain(rows, algorithm="split").sizes
            print(json.dumps({"hosts": sizes.ranks_of_hosts}))
except weft.WireError as error:
    print(json.dumps({"text": str(error), "culprit": error.culprit, "at": time.monotonic()}))
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.parametrize(("victim", "stage"), [(0, "the first"), (3, "the last")])
def test_survivors_name_who_was_killed_in_a_stage(survivors, tmp_path, victim, stage):
    """Ranks 0 and 1 share a host, and 2 and 3; who waits for whom depends on the stage."""
    given = str(tmp_path / "place"), str(victim), stage
    ranks = [{"WEFT_HOST": name} for name in "aabb"]
    began, printed = survivors(RANK, given, ranks, victim)
    for rank, (first, said) in printed.items():
        assert first["hosts"] == [[0, 1], [2, 3]]
        assert said["culprit"] == victim, said
        assert said["text"].startswith(f"rank {rank}: rank {victim} died while"), said
        assert said["at"] - began < patient(5.0), said


@spmd(8, on=("threads",))
def test_only_sums_of_hosts_leave_them(group):
    """The same rows everywhere: what leaves a host is that of one rank, whatever ranks it has."""
    rows = weft.Rows(torch.arange(4000), torch.ones(4000, 8), 4000)
    names = "aaaabbbb"
    group.traffic.reset()
    reduced(group, names, [rows] * group.size)
    leaves = sum(
        group.traffic.to.get(peer, 0) for peer in range(8) if names[peer] != names[group.rank]
    )
    opening = 4 * 8192  # to all ranks of the other host
    assert leaves <= opening + 1.1 * 4000 * (8 * 4 + 4) / 4


# Simulated -------------------------------------------------------------------------------------


@pytest.fixture
def network(simulated):
    """The figures between hosts, and within one."""
    between = simulated.Link(alpha=50e-6, beta=8e-9, work=10e-6)
    return between, dataclasses.replace(between, beta=0.5e-9)


@pytest.fixture
def sent(simulated, network):
    """What is sent by a split on hosts of these names, each rank of which brings `rows(rank)`."""
    between, within = network

    def of(names, rows, **options):
        size = len(names)
        return simulated.simulate(
            "split", rows, size, between, hosts=names, within=within, **options
        )

    return of


def spread(rank, count=6000, height=60_000):
    draw = torch.Generator().manual_seed(rank)
    indices = torch.randperm(height, generator=draw)[:count].sort().values
    return weft.Rows(indices, torch.ones(count, 64), height)


def test_a_call_is_opened_once_and_each_stage_sends_what_it_must(sent):
    """2 hosts x 4: lists and values to 3 owners, to the other host, and sums to 3 ranks."""
    done = sent("aaaabbbb", lambda rank: spread(rank, 100, 1000))
    assert done.messages == 3 * 2 + 2 + 3 * 2  # a second opening would be seven more


class Watched:
    """What a wire has under way; notes the simulated time at which it was waited for."""

    def __init__(self, wire, pending, times):
        self.wire, self.pending, self.times = wire, pending, times

    def wait(self):
        found = self.pending.wait()
        self.times.append(self.wire.clock)
        return found

    def __getattr__(self, name):
        return getattr(self.pending, name)


@pytest.fixture
def watched(monkeypatch):
    """One call: when some messages left this rank, and when others came, and its result.

    Which these are is said by their channels, and whether their peer is on this rank's host,
    whichever ranks post them as a group: those of a stage do, too. The times of those that came are
    those at which they were waited for.
    """
    calls = {}  # by session: the rank's group, which messages are watched, and their times
    post = weft.Group.post

    def watching(of, sends=(), recvs=(), channel=0):
        pending = post(of, sends, recvs, channel)
        if of.session not in calls:
            return pending
        group, names, watch, times = calls[of.session]

        def is_watched(way, peer):
            channels, is_near = watch[way]
            near = names[of.rank_in_errors(peer)] == names[group.rank]
            return channel in channels and near == is_near

        for peer, tensor in sends:
            if is_watched("sent", peer) and tensor.numel():
                times["sent"].append(group.wire.clock)
        if any(is_watched("received", peer) for peer, _ in recvs):
            return Watched(group.wire, pending, times["received"])
        return pending

    def call(group, names, rows, **watch):
        times = {"sent": [], "received": []}
        calls[group.session] = group, names, watch, times
        total = weft.sparse_all_reduce(rows, algorithm="split")
        return times["sent"], times["received"], total

    monkeypatch.setattr(weft.Group, "post", watching)
    return call


def has_place(names):
    """For each rank whether it has a place in its host: as many ranks as the smallest have one."""
    blocks = Hosts.named(names).ranks
    places = min(map(len, blocks))
    return [any(rank in block[:places] for block in blocks) for rank in range(len(names))]


@pytest.mark.parametrize("names", ["aaaabbbb", "abbabba"])
def test_a_host_shares_its_first_sums_before_the_last_have_come(names, watched, simulated, network):
    rows = spread(0, 30_000, 200_000)  # the same everywhere, several chunks for each place

    def program(group):
        set_rate(group, SLOW)
        coming = [VALUES, SUMS]
        return watched(group, names, rows, sent=([SUMS], True), received=(coming, False))

    link, within = network
    found = simulated.run(len(names), link, program, hosts=names, within=within)
    for (sent, received, total), leads in zip(found, has_place(names), strict=True):
        same(total, dataclasses.replace(rows, values=len(names) * rows.values))
        assert bool(received) == leads
        if leads:
            assert sent and min(sent) < max(received)


@pytest.mark.parametrize(
    ("between", "names"),
    [
        ("holders", "aaaabbbb"),
        ("split", "aabbccdd"),
        ("gather", "abbbbbbb"),
        ("holders", "abbbbbc"),
    ],
)
def test_what_runs_between_hosts_sends_sums_of_hosts(between, names, between_blocks, sent):
    between_blocks(between)
    done = sent(names, lambda rank: spread(rank, 4000, 80_000))
    assert done.sizes.begins_in_hosts == share_hosts(names)
    check_stages(done)


@pytest.mark.parametrize(
    ("given", "wire_dtype", "names"),
    [(torch.bfloat16, None, "aaaabbbb"), (torch.float32, torch.bfloat16, "aabbccdd")],
)
def test_only_sums_between_hosts_travel_wider(given, wire_dtype, names, sent):
    def rows(rank):
        part = spread(rank, 4000, 80_000)
        return dataclasses.replace(part, values=part.values.to(given))

    done = sent(names, rows, wire_dtype=wire_dtype)
    assert done.sizes.partial_row == 2 * done.sizes.row
    assert done.sizes.begins_in_hosts == share_hosts(names)
    check_stages(done)


# The stages ------------------------------------------------------------------------------------


def sizes_of(hosts, **changes):
    ranks = len(hosts)
    sizes = Sizes(
        ranks, ranks * 50_000, 50_000, 50_000, 1_000_000, 256, 256,
        end=1_000_000, hosts=Hosts.named(hosts),
    )  # fmt: skip
    return sizes.but(**changes)


def test_two_hosts_gather_between_and_a_few_take_holders():
    for hosts, name in (("aaaabbbb", "gather"), ("aabbccdd", "holders")):
        line, _ = choose.between_hosts(sizes_of(hosts))
        assert line.algorithm == name


def test_ranges_of_a_place_are_those_of_its_header():
    parts = [rows_of(rank, height=5000, count=800).indices.unique() for rank in range(8)]
    stated = [header_of(part) for part in parts]
    header = Header.of_all(stated).with_points_of(stated)
    union = torch.cat(parts).unique()
    bounds = balanced_bounds(header, 8, 4)
    assert bounds[0] == 0 and bounds[-1] == header.highest + 1 and len(bounds) == 5
    sums = torch.searchsorted(union, torch.tensor(bounds)).diff()
    assert sums.max() <= 1.15 * sums.float().mean()
    for low, high in pairwise(bounds):
        inner = header.within(low, high)
        assert balanced_bounds(inner, 2)[-1] == high
        assert low < balanced_bounds(inner, 2)[1] < high
        rows = sum(((part >= low) & (part < high)).sum() for part in parts)
        assert 0.9 * rows <= inner.weights.sum() <= 1.1 * rows
