"""Reduce-scatter, reduce, all-gather and broadcast of rows: what each rank gets, bit for bit."""

from __future__ import annotations

import functools
import threading
from itertools import product

import pytest
import torch

import weft
from cases import in_case, on_hosts, on_stand_in, refuses_the_largest_index, same
from weft.group.channels import LISTS
from weft.group.group import Group
from weft.sparse import last_call
from weft.testing import expected, run, spmd

SIZES = (1, 2, 3, 7)
THREADS = ("threads", "stand-in")
EVERYWHERE = (*THREADS, "processes")
LOCK = threading.Lock()


def part(rank, kind, *, dtype=torch.float32):
    """Rows that depend on the rank's number alone."""
    draw = torch.Generator().manual_seed(rank + 1)
    height, count, width = {
        "few": (40, 12, 3),
        "many": (2_000, 1_200, 40),
        "empty on some": (50, 20 * (rank % 2), 3),
        "empty": (50, 0, 3),
        "skew": (5_000, 1_500 if rank == 1 else 2, 40),
        "one": (1, 1, 40_000),  # which one rank sums
    }[kind]
    indices = torch.randint(height, (count,), generator=draw)
    return weft.Rows(indices, torch.randn(count, width, generator=draw).to(dtype), height)


@functools.cache
def _expected(size, kind, op, dtype):
    return expected([part(rank, kind, dtype=dtype) for rank in range(size)], op)


def total_of(size, kind, op="sum", dtype=torch.float32):
    """What all ranks' rows add up to; ranks that are threads compute it once."""
    with LOCK:
        return _expected(size, kind, op, dtype)


def owned(rows, ranges, rank):
    """What a rank owns of these rows."""
    low, high = ranges[rank : rank + 2]
    keep = torch.tensor([low <= index < high for index in rows.indices.tolist()], dtype=torch.bool)
    return weft.Rows(rows.indices[keep], rows.values[keep])


def one_behind_the_other(parts):
    indices = torch.cat([rows.indices for rows in parts])
    return weft.Rows(indices, torch.cat([rows.values for rows in parts]))


def last(left, right):
    return right


def even(height, size):
    return [height * rank // size for rank in range(size + 1)]


@spmd(*SIZES, on=EVERYWHERE)
def test_each_rank_gets_what_it_owns(group):
    for kind in ("few", "many", "empty on some", "empty", "skew"):
        with in_case(kind):
            mine, want = part(group.rank, kind), total_of(group.size, kind)
            given = even(mine.height, group.size)
            unequal = [0, *[mine.height // 3] * (group.size - 1), mine.height]  # some own nothing
            for ranges in (None, given, unequal):
                with in_case(ranges):
                    got = weft.sparse_reduce_scatter(mine, ranges=ranges)
                    record = last_call()
                    if ranges is not None:
                        assert record.ranges == tuple(ranges)
                    assert record.ranges[0] == 0
                    assert record.ranges[-1] == mine.height
                    assert record.union == len(got)
                    same(got, owned(want, record.ranges, group.rank))
                    assert got.height == mine.height


@spmd(1, 3, on=THREADS)
def test_the_largest_index_there_is(group):
    for index, count in product((torch.int32, torch.int64), (2, 2500)):
        with in_case(index, count):
            last = torch.iinfo(index).max
            if index is torch.int64 and on_stand_in():
                refuses_the_largest_index(weft.sparse_reduce_scatter)
                continue
            parts = [
                weft.Rows(last - torch.arange(count).to(index) - rank, torch.ones(count, 4))
                for rank in range(group.size)
            ]
            want, mine = expected(parts), parts[group.rank]
            whole = [0] * group.size + [2**64]  # all of it is the last rank's
            for ranges in (None, whole):
                got = weft.sparse_reduce_scatter(mine, ranges=ranges)
                same(got, owned(want, last_call().ranges, group.rank))
            assert len(got) == len(want) * (group.rank == group.size - 1)
            total = weft.sparse_reduce(mine, group_dst=group.size - 1)
            assert total is None or torch.equal(total.values, want.values)
            same(weft.sparse_all_gather(mine), one_behind_the_other(parts))


@spmd(4, on=("threads",))
def test_balanced_ranges_are_balanced(group):
    draw = torch.Generator().manual_seed(group.rank)
    indices = (torch.rand(20_000, generator=draw) ** 4 * 100_000).long()  # crowded at the low end
    rows = weft.Rows(indices, torch.ones(20_000, 2), 100_000)
    got = weft.sparse_reduce_scatter(rows)
    assert last_call().algorithm == "reduce_scatter"
    share = len(weft.sparse_all_reduce(rows)) / group.size
    assert 0.7 * share < len(got) < 1.3 * share
    even_part = len(weft.sparse_reduce_scatter(rows, ranges=even(100_000, group.size)))
    assert not 0.7 * share < even_part < 1.3 * share or group.rank in (1, 2)


@pytest.mark.parametrize("op", ["avg", "max", "last"])
@spmd(1, 3, on=THREADS)
def test_operations(group, op):
    chosen = last if op == "last" else op
    for kind in ("few", "many"):
        with in_case(kind):
            mine = part(group.rank, kind, dtype=torch.bfloat16)
            want = total_of(group.size, kind, chosen, torch.bfloat16)
            ranges = even(want.height, group.size)
            got = weft.sparse_reduce_scatter(mine, chosen, ranges=ranges)
            same(got, owned(want, ranges, group.rank))
            total = weft.sparse_reduce(mine, chosen)
            if group.rank == 0:
                assert torch.equal(total.values, want.values)


@spmd(*SIZES, on=EVERYWHERE)
def test_one_rank_gets_the_sum(group):
    dst = group.size // 2
    kinds = ("few", "many", "empty on some", "empty", "skew", "one")
    for kind, hosts in product(kinds, ("aaaaaaaa", "abcdefgh")):
        with in_case(kind), on_hosts(group, hosts[: group.size]):
            want = total_of(group.size, kind)
            total = weft.sparse_reduce(part(group.rank, kind), group_dst=dst)
            if group.rank != dst:
                assert total is None
                continue
            same(total, want)
            ran = last_call().algorithm
            if group.session.is_by_group:
                assert ran == "plain"
            elif group.size == 1:
                assert ran == "alone"
            elif kind in ("many", "skew", "one"):
                assert ran == "direct"
            else:
                assert ran == "eager"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex128])
@spmd(*SIZES, on=EVERYWHERE)
def test_rows_of_all_in_rank_order(group, dtype):
    for kind in ("few", "many", "empty on some", "empty"):
        with in_case(kind):
            parts = [part(rank, kind, dtype=dtype) for rank in range(group.size)]
            got, counts = weft.sparse_all_gather(parts[group.rank], return_counts=True)
            same(got, one_behind_the_other(parts))
            assert counts.tolist() == [len(rows) for rows in parts]
            record = last_call()
            goes_round = kind == "many" and dtype is not torch.bool
            several = "ring" if goes_round else "eager"
            by_wire = "alone" if group.size == 1 else several
            assert record.algorithm == ("plain" if group.session.is_by_group else by_wire)
            if record.algorithm == "ring" and kind == "many":
                spare = 512 * group.size  # statements
                assert record.sent_bytes == pytest.approx(record.bound_bytes, abs=spare)


@pytest.mark.parametrize("kind", ["few", "many", "empty"])
@spmd(*SIZES, on=EVERYWHERE)
def test_the_rows_of_one_on_all(group, kind):
    src = group.size - 1
    rows = part(src, kind)
    here = group.rank == src
    got = weft.sparse_broadcast(rows if here else None, src)
    assert isinstance(got, weft.Rows)
    same(got, rows)
    assert got.height == rows.height

    pair = weft.sparse_broadcast((rows.indices.int(), rows.values) if here else None, src)
    assert pair[0].dtype is torch.int32
    assert torch.equal(pair[1], rows.values)

    coo = rows.to_coo()
    for form in (coo, coo.coalesce()):
        result = weft.sparse_broadcast(form if here else None, src)
        assert result.is_coalesced() == form.is_coalesced()
        assert torch.equal(result._values(), form._values())
        assert result.shape == form.shape


@pytest.mark.parametrize(("shape", "sparse"), [((2**61, 1), 1), ((2**31, 2**30), 2)])
@spmd(2, on=EVERYWHERE)
def test_a_tensor_of_more_elements_than_memory_counts(group, shape, sparse):
    where, values = torch.ones(sparse, 2, dtype=torch.int64), torch.ones(2, *shape[sparse:])
    rows = torch.sparse_coo_tensor(where, values, shape, check_invariants=True)
    got = weft.sparse_broadcast(None if group.rank else rows)
    assert got.shape == shape
    assert torch.equal(got._indices(), where)


def test_duplicates_are_moved_though_another_thread_has_torch_check_tensors(monkeypatch):
    made = torch.sparse_coo_tensor

    def checked(*args, **options):  # as the flag does that torch sets for all threads
        return made(*args, **(options | {"check_invariants": True}))

    monkeypatch.setattr(torch, "sparse_coo_tensor", checked)
    coo = torch.sparse_coo_tensor([[3, 3, 1]], torch.ones(3, 2), (5, 2))

    def program(group):
        return weft.sparse_all_gather(coo), weft.sparse_broadcast(coo, 0)

    for gathered, sent in run(2, program):
        assert gathered._indices().tolist() == [[3, 3, 1] * 2]
        assert sent._indices().tolist() == [[3, 3, 1]]


@spmd(20, on=THREADS)
def test_above_sixteen_ranks(group):
    parts = [part(rank, "few") for rank in range(group.size)]
    mine, want = parts[group.rank], expected(parts)
    same(weft.sparse_all_gather(mine), one_behind_the_other(parts))
    ranges = even(40, group.size)
    same(weft.sparse_reduce_scatter(mine, ranges=ranges), owned(want, ranges, group.rank))
    same(weft.sparse_broadcast(mine if group.rank == 3 else None, 3), parts[3])
    total = weft.sparse_reduce(mine, group_dst=19)
    assert total is None or torch.equal(total.values, want.values)
    with pytest.raises(weft.WeftError, match=r"ranges: .*digest .* rank 7 has .*digest"):
        ranges[1] += group.rank == 7
        weft.sparse_reduce_scatter(mine, ranges=ranges)


@spmd(1, 4, on=EVERYWHERE)
def test_forms_and_devices_stay(group):
    draw = torch.Generator().manual_seed(group.rank)
    places = torch.stack([torch.randint(3, (9,), generator=draw) for _ in range(2)])
    coo = torch.sparse_coo_tensor(places, torch.ones(9, 2), (3, 3, 2), check_invariants=True)
    dense = weft.all_reduce(coo.to_dense())
    total = weft.sparse_reduce(coo)
    assert total is None or torch.equal(total.to_dense(), dense)
    gathered = weft.sparse_all_gather(coo)
    assert not gathered.is_coalesced()
    assert gathered._nnz() == 9 * group.size
    assert torch.equal(gathered.to_dense(), dense)
    scattered = weft.sparse_reduce_scatter(coo, ranges=even(9, group.size))
    assert scattered.is_coalesced()
    assert torch.equal(weft.all_reduce(scattered.to_dense()), dense)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("few", torch.float64), ("many", torch.float32), ("empty on some", torch.bfloat16)],
)
@spmd(1, 3, 5, on=THREADS)  # a sum for one rank goes directly there
def test_rounded_on_the_wire(group, kind, dtype):
    """Reductions as the all-reduce rounds; what is only moved once, on its own rank too."""
    for narrow in (torch.bfloat16, torch.float16):
        parts = [part(rank, kind, dtype=dtype) for rank in range(group.size)]
        mine = parts[group.rank]
        for op in ("sum", "max"):
            want = weft.sparse_all_reduce(mine, op, wire_dtype=narrow, algorithm="plain")
            ranges = even(want.height, group.size)
            got = weft.sparse_reduce_scatter(mine, op, ranges=ranges, wire_dtype=narrow)
            assert got.values.dtype is dtype
            same(got, owned(want, ranges, group.rank))
            total = weft.sparse_reduce(mine, op, group_dst=group.size - 1, wire_dtype=narrow)
            assert (total is None) == (group.rank < group.size - 1)
            assert total is None or torch.equal(total.values, want.values)

        def rounded(values, narrow=narrow):
            return values if dtype is torch.bfloat16 else values.to(narrow).to(dtype)

        gathered = weft.sparse_all_gather(mine, wire_dtype=narrow)
        assert gathered.values.dtype is dtype
        assert torch.equal(gathered.values, torch.cat([rounded(each.values) for each in parts]))
        src = group.size - 1
        one = weft.sparse_broadcast(mine if group.rank == src else None, src, wire_dtype=narrow)
        assert one.values.dtype is dtype
        assert torch.equal(one.values, rounded(parts[src].values))


@spmd(3, on=THREADS)
def test_rounded_values_are_half_the_bytes(group):
    rows = weft.Rows(torch.arange(4000), torch.randn(4000, 100), 4000)
    sent = {}
    for narrow in (None, torch.bfloat16):
        for name, call in calls(rows, wire_dtype=narrow).items():
            call()
            sent[name, narrow] = weft.all_reduce(torch.tensor(last_call().sent_bytes)).item()
    for name in calls(rows):
        assert sent[name, torch.bfloat16] == pytest.approx(sent[name, None] / 2, rel=0.03), name


def calls(rows, *, async_op=False, wire_dtype=None):
    """Each of the family with these rows: name, and the call."""
    keywords = {"async_op": async_op, "wire_dtype": wire_dtype}
    return {
        "scatter": lambda: weft.sparse_reduce_scatter(rows, **keywords),
        "reduce": lambda: weft.sparse_reduce(rows, **keywords),
        "gather": lambda: weft.sparse_all_gather(rows, **keywords),
        "broadcast": lambda: weft.sparse_broadcast(rows, **keywords),
    }


BAD = torch.tensor([3, -2])
WRONG = {
    "negative": (lambda rows: calls((BAD, torch.ones(2, 3))), "rank 0: index -2 is negative"),
    "dense": (lambda rows: calls(torch.ones(3)), "rank 0: rows is a tensor of layout"),
    "wire dtype": (
        lambda rows: calls(rows, wire_dtype=torch.int32),
        "rank 0: wire_dtype is torch.int32: pass torch.bfloat16, torch.float16, torch.float32 or",
    ),
    "wire dtype of integers": (
        lambda rows: calls((rows.indices, rows.indices), wire_dtype=torch.float16),
        "rank 0: wire_dtype is torch.float16, which is for floating point, and the values are",
    ),
}


@spmd(1, 3, on=EVERYWHERE)
def test_one_rank_errs_and_all_are_told(group):
    rows = part(group.rank, "few")
    for what, (make, text) in WRONG.items():
        wrong = make(rows) if group.rank == 0 else calls(rows)
        for name in wrong:
            with in_case(what, name):
                with pytest.raises(weft.WeftError, match=text):
                    wrong[name]()
                calls(rows)[name]()  # the next call works


def disagreeing(rows, odd):
    """What all must be told, and a call in which the odd rank differs, or all err."""
    pair = rows.indices, rows.values
    wide = rows.indices, torch.ones(len(rows), 4)

    def scatter(ranges):
        return lambda: weft.sparse_reduce_scatter(rows, ranges=ranges)

    return {
        "group_dst: ranks 0, 1 have 0, rank 2 has 1": (
            lambda: weft.sparse_reduce(rows, group_dst=int(odd))
        ),
        "group_src: ranks 0, 1 have 0, rank 2 has 1": (
            lambda: weft.sparse_broadcast(rows, int(odd))
        ),
        "rank 0: group_dst is 3: pass a rank of the group, 0 to 2": (
            lambda: weft.sparse_reduce(rows, group_dst=3)
        ),
        "rank 0: group_src is 'x'": lambda: weft.sparse_broadcast(rows, "x"),
        "ranges: ranks 0, 1 have balanced, rank 2 has 0, 9, 9, 40": (
            scatter([0, 9, 9, 40] if odd else None)
        ),
        "rank 2: ranges has 2 bounds: 3 ranks need 4": scatter([0, 40] if odd else None),
        "rank 2: ranges has 3 after 5": scatter([0, 5, 3, 40] if odd else None),
        "rank 2: ranges is a str": scatter("even" if odd else None),
        "rank 2: ranges is a list": scatter([0, 3.5, 6, 40] if odd else None),
        r"rank 0: index \d+ is in no range: .* from 0 up to, not including, 3": (
            scatter([0, 1, 2, 3])
        ),
        "value dtype: ranks 0, 1 have torch.float32, rank 2 has torch.float64": (
            lambda: weft.sparse_all_gather((pair[0], pair[1].double()) if odd else pair)
        ),
        "wire_dtype: ranks 0, 1 have None, rank 2 has torch.float16": (
            lambda: weft.sparse_broadcast(rows, wire_dtype=torch.float16 if odd else None)
        ),
        "row shape: ranks 0, 1 have .3,., rank 2 has .4,.": (
            lambda: weft.sparse_all_gather(wide if odd else pair)
        ),
        "different calls: ranks 0, 1 have sparse_reduce .*, rank 2 has sparse_all_gather": (
            lambda: weft.sparse_all_gather(rows) if odd else weft.sparse_reduce(rows)
        ),
    }


@spmd(3, on=EVERYWHERE)
def test_what_must_be_the_same(group):
    rows = part(group.rank, "few")
    for text, call in disagreeing(rows, group.rank == 2).items():
        with pytest.raises(weft.WeftError, match=text):
            call()
    assert len(weft.sparse_all_gather(rows)) == 36


@pytest.mark.parametrize(("count", "directly"), [(20_000, True), (400_000, False)])
def test_indices_go_directly_between_hosts_if_they_are_few(count, directly, monkeypatch):
    """By their own bytes: here the values have none."""
    goes_to = [set() for _ in range(4)]
    post = Group.post

    def noted(self, sends=(), recvs=(), channel=0):
        if channel == LISTS:
            goes_to[self.rank].update(peer for peer, _ in sends)
        return post(self, sends, recvs, channel)

    monkeypatch.setattr(Group, "post", noted)

    def program(group):
        mine = weft.Rows(torch.arange(count), torch.ones(count, 0), count)
        with on_hosts(group, "abcd"):
            return len(weft.sparse_all_gather(mine))

    assert run(4, program) == [4 * count] * 4
    everybody = [{0, 1, 2, 3} - {rank} for rank in range(4)]
    neighbours = [{(rank + 1) % 4} for rank in range(4)]
    assert goes_to == (everybody if directly else neighbours)


@pytest.mark.parametrize("call", ["sparse_reduce", "sparse_reduce_scatter", "sparse_all_gather"])
def test_the_algorithm_in_the_environment_is_none_of_theirs(call, monkeypatch):
    monkeypatch.setenv("WEFT_ALGORITHM", "split")

    def program(group):
        rows = part(group.rank, "few")
        getattr(weft, call)(rows)
        return last_call().algorithm

    assert run(2, program) == ["eager"] * 2
