"""Every algorithm, every world: the documented result, bit for bit, the same on every rank.

A new algorithm is under these tests as soon as it is registered. When one fails, its name, the
group and the number of ranks are in the test's name; the data come from the rank alone, so a
failing rank can be run by itself.
"""

from __future__ import annotations

import functools
import threading
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import weft
from cases import (
    alike,
    in_case,
    on_hosts,
    on_stand_in,
    refuses_the_largest_index,
    same,
    set_rate,
)
from weft.group.channels import LISTS, SUMS, VALUES
from weft.kernels.ops import DTYPES, OPS
from weft.sparse import ALGORITHMS, codec, last_call
from weft.testing import expected, run, spmd

NAMES = ["auto", "plain", *sorted(ALGORITHMS)]
SLOW = 15  # the rate of a link on which lists are packed, and chunks are short
PLAIN = ("doubling",)  # it sends indices as they are
SIZES = (1, 2, 3, 4, 7, 8)
THREADS = ("threads", "stand-in")
EVERYWHERE = (*THREADS, "processes")
LOCK = threading.Lock()

# Setting up a world takes longer than a call on so little data. So each of these tests makes all
# its calls in one world; `in_case` says which of them failed.
KINDS = (
    *("few", "duplicates", "many", "identical", "skew", "some empty", "all empty", "far apart"),
)


def rows_of(rank, kind, *, shape=(3,), dtype=torch.float32, index=torch.int64):
    """Rows that depend on the rank's number alone; integers, so that sums are exact, but "real"."""
    draw = torch.Generator().manual_seed(rank + 1)
    if kind == "real":
        indices = torch.randint(300, (500,), generator=draw)
        return weft.Rows(indices, torch.randn(500, 5, generator=draw), 300)
    height, count = {
        "few": (40, 12),
        "duplicates": (7, 60),
        "many": (400, 170),
        "identical": (300, 60),
        "skew": (10_000, 300 if rank == 1 else 3),
        "some empty": (50, 20 * (rank % 2)),
        "all empty": (50, 0),
        "wide": (3000, 4000),
        "long": (60_000, 20_000),
        "long and far": (3 * 2**31, 20_000),
        "far apart": (3 * 2**31 if index is torch.int64 else 2**31 - 1, 30),
    }[kind]
    if kind == "identical":
        draw = torch.Generator().manual_seed(0)
    indices = torch.randint(height, (count,), generator=draw)
    if kind == "skew":  # nearly all rows at the low end
        indices = indices**2 // height
    low, high = (0, 2) if dtype is torch.bool else (0 if dtype is torch.uint8 else -4, 5)
    values = torch.randint(low, high, (count, *shape), generator=draw).to(dtype)
    return weft.Rows(indices.to(index), values, height)


@functools.cache
def _world(size, kind, op, **options):
    parts = [rows_of(rank, kind, **options) for rank in range(size)]
    return parts, expected(parts, op)


@functools.cache
def _highest(size, index, count):
    last = torch.iinfo(index).max
    parts = [
        weft.Rows(last - torch.arange(count).to(index) * 3 - rank % 2, torch.ones(count, 4))
        for rank in range(size)
    ]
    return parts, expected(parts)


def world(size, kind, op="sum", **options):
    """Everybody's rows and what they come to: made once, since every algorithm gets the same."""
    with LOCK:  # ranks that are threads would each make it
        return _world(size, kind, op, **options)


def right(left, right):
    return right


def checked(group, name, kind, op="sum", **options):
    """A sum that is right, and has the same bits on every rank."""
    parts, want = world(group.size, kind, op, **options)
    total = weft.sparse_all_reduce(parts[group.rank], op, algorithm=name)
    same(total, want)
    alike(group, total.indices, total.values)
    return total


@pytest.mark.parametrize("name", NAMES)
@spmd(*SIZES, on=("threads",))
def test_equals_the_definition(group, name):
    equals_the_definition(group, name)


@pytest.mark.parametrize("name", NAMES)
@spmd(1, 3, 8, on=("stand-in",))
def test_equals_the_definition_on_an_accelerator(group, name):
    equals_the_definition(group, name)


@pytest.mark.parametrize("name", NAMES)
@spmd(4, on=("processes",))
def test_equals_the_definition_between_processes(group, name):
    equals_the_definition(group, name)


def equals_the_definition(group, name):
    for kind in KINDS:
        with in_case(kind):
            total = checked(group, name, kind)
            assert total.height == world(group.size, kind)[1].height


@spmd(2, 4, on=("gloo",))
def test_tensors_of_the_cpu_go_over_a_process_group(group):
    for kind in KINDS:
        with in_case(kind):
            parts, want = world(group.size, kind)
            rows = parts[group.rank]
            same(weft.sparse_all_reduce(rows), want)
            assert last_call().algorithm == "plain"
            for total in weft.sparse_all_reduce([rows, rows]):
                same(total, want)
            same(weft.sparse_all_reduce(rows, async_op=True).wait(), want)
            gathered = weft.sparse_all_gather(rows)
            assert torch.equal(gathered.values, torch.cat([each.values for each in parts]))
            one = weft.sparse_reduce(rows, group_dst=1)
            assert one is None or torch.equal(one.values, want.values)
            same(weft.sparse_broadcast(rows if group.rank == 1 else None, 1), parts[1])
            mine = weft.sparse_reduce_scatter(rows)
            low, high = last_call().ranges[group.rank : group.rank + 2]
            owned = (want.indices >= low) & (want.indices < high)
            assert torch.equal(mine.values, want.values[owned])


@pytest.mark.parametrize("name", NAMES)
@spmd(1, 3, on=THREADS)
def test_nobody_needs_to_say_how_high_a_tensor_is(group, name):
    for kind in KINDS:
        with in_case(kind):
            parts, want = world(group.size, kind)
            rows = parts[group.rank]
            same(weft.sparse_all_reduce((rows.indices, rows.values), algorithm=name), want)


@pytest.mark.parametrize("name", NAMES)
@spmd(1, 3, on=THREADS)
def test_the_largest_index_there_is(group, name):
    """No bound beyond it is of its dtype."""
    for index, count in product((torch.int32, torch.int64), (1, 2500)):
        with in_case(index, count):
            if index is torch.int64 and on_stand_in():
                refuses_the_largest_index(weft.sparse_all_reduce)
                continue
            with LOCK:
                parts, want = _highest(group.size, index, count)
            same(weft.sparse_all_reduce(parts[group.rank], algorithm=name), want)


@pytest.mark.parametrize("name", ["auto", *sorted(ALGORITHMS)])
def test_on_a_slow_link_indices_are_packed(monkeypatch, name):
    packed, pack = [], codec.kernels.encode

    def counted(indices, code, memory):
        packed.append(indices.numel())
        return pack(indices, code, memory)

    def program(group, kind):
        set_rate(group, SLOW)
        index = torch.int32 if kind == "long" else torch.int64
        with on_hosts(group, "abc"):
            checked(group, name, kind, shape=(5,), dtype=torch.float64, index=index)

    monkeypatch.setattr(codec.kernels, "encode", counted)
    for kind in (*KINDS, "long", "long and far"):
        with in_case(kind):
            packed.clear()
            run(3, program, kind)
            if kind in ("long and far", "long"):
                assert bool(packed) is (name not in PLAIN)


@pytest.mark.parametrize("name", NAMES)
@spmd(3, on=THREADS)
def test_rows_of_many_chunks(group, name):
    set_rate(group, SLOW)
    for dtype in (torch.float32, torch.bfloat16):
        with in_case(dtype), on_hosts(group, "abc"):
            checked(group, name, "wide", shape=(512,), dtype=dtype)


def order_of(patch, group):
    """What a rank does in calls among these ranks, in its order: it sends values, reads lists."""
    done = []
    post = group.post
    decode = group.decode

    def posted(sends=(), recvs=(), channel=0):
        if channel == VALUES and sends:
            done.append("values")
        return post(sends, recvs, channel)

    def decoded(peer, what, *arguments):
        if what == "an index list":
            done.append("lists")
        return decode(peer, what, *arguments)

    patch.setattr(group, "post", posted)
    patch.setattr(group, "decode", decoded)
    return done


@pytest.mark.parametrize("names", ["aaaa", "abcd"], ids=["plain", "packed"])
@spmd(4, on=("threads", "processes"))
def test_gather_of_a_long_list_beside_short_ones(group, names):
    """All send values at once, before they read the lists of others."""
    for size, own in product((2, 3, 4), (0, 1)):
        if group.rank >= size:
            continue
        some = group.subset(range(size))
        draw = torch.Generator().manual_seed(group.rank)
        indices = torch.randint(2**31 - 1, (100_000 if group.rank == own else 5,), generator=draw)
        indices[0] = 7  # which all ranks have
        rows = weft.Rows(indices, torch.ones(len(indices), 2))
        on_them = on_hosts(some, names)
        with in_case(size, own), pytest.MonkeyPatch.context() as patch, on_them:
            want = weft.sparse_all_reduce(rows, algorithm="split", group=some)
            done = order_of(patch, some)
            total = weft.sparse_all_reduce(rows, algorithm="gather", group=some)
            same(total, want)
            assert done[0] == "values"


EACH_ONCE = [*(("sum", dtype) for dtype in DTYPES), *product(OPS, (torch.float32, torch.int32))]


@pytest.mark.parametrize("name", NAMES)
@spmd(3, on=("threads",))
def test_every_op_of_every_dtype(group, name):
    ops_and_dtypes(group, name, product(OPS, DTYPES))


@pytest.mark.parametrize("name", NAMES)
@spmd(3, on=("stand-in",))  # no power of two: rows are combined as partial sums, too
def test_every_op_and_every_dtype(group, name):
    ops_and_dtypes(group, name, EACH_ONCE)


def ops_and_dtypes(group, name, cases):
    for op, dtype in cases:
        with in_case(op, dtype):
            if OPS[op].refuses(dtype):
                continue
            parts, want = world(group.size, "duplicates", op, dtype=dtype)
            total = weft.sparse_all_reduce(parts[group.rank], op, algorithm=name)
            assert torch.equal(total.indices, want.indices)
            assert total.values.dtype is dtype
            # an average of integers is not exact, but rounded once: one unit in the last place
            rtol = 2**-7 if op == "avg" else 0
            torch.testing.assert_close(total.values, want.values, rtol=rtol, atol=0)


@pytest.mark.parametrize("name", NAMES)
@spmd(3, on=THREADS)
def test_half_precision_rounds_what_a_rank_repeats_and_the_result(group, name):
    """And nothing between: 257 is 256 in bfloat16, and 256 + 1 + 1 of three ranks is 258."""
    indices, values = [([0, 0, 1], [256, 1, 256]), ([0, 1], [1, 1]), ([1], [1])][group.rank]
    rows = weft.Rows(torch.tensor(indices), torch.tensor(values).bfloat16(), 2)
    assert weft.sparse_all_reduce(rows, algorithm=name).values.tolist() == [256.0, 258.0]


@pytest.mark.parametrize("name", NAMES)
@spmd(4, on=THREADS)
def test_every_row_shape_and_index_dtype(group, name):
    for shape, index in product([(), (1,), (2, 3), (0,), (300,)], [torch.int32, torch.int64]):
        with in_case(shape, index):
            total = checked(group, name, "few", shape=shape, index=index)
            assert total.indices.dtype is index and total.values.shape[1:] == shape


@pytest.mark.parametrize("name", ["gather", "split", "holders", "auto"])
@spmd(3, 8, on=EVERYWHERE)
def test_real_numbers_add_in_rank_order(group, name):
    checked(group, name, "real")


@spmd(3, 7)
def test_doubling_gives_real_numbers_the_same_bits_everywhere(group):
    rows = rows_of(group.rank, "real")
    first = weft.sparse_all_reduce(rows, algorithm="doubling")
    again = weft.sparse_all_reduce(rows, algorithm="doubling")
    alike(group, first.indices, first.values)
    same(again, first)


@pytest.mark.parametrize("name", NAMES)
@spmd(4, on=THREADS)
def test_nan_and_infinity_pass_through(group, name):
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])[:, None]
    rows = weft.Rows(torch.arange(4) + 4 * group.rank, values, 16)
    total = weft.sparse_all_reduce(rows, algorithm=name)
    bits = total.values.view(torch.int32).view(4, 4)
    assert torch.equal(bits[:, 1:], values[1:].view(torch.int32).view(1, 3).expand(4, 3))
    assert total.values.view(4, 4)[:, 0].isnan().all()


@pytest.mark.parametrize("name", NAMES)
@spmd(4, on=THREADS)
def test_minus_zero_is_less_than_zero(group, name):
    negative = torch.arange(1600).view(100, 16) >> group.rank & 1
    rows = weft.Rows(torch.arange(100), torch.where(negative == 1, -0.0, 0.0), 100)
    for op, pattern in (("min", negative.new_tensor(0)), ("max", negative.new_tensor(15))):
        with in_case(op):
            total = weft.sparse_all_reduce(rows, op, algorithm=name)
            signs = torch.arange(1600).view(100, 16) & 15
            want = signs != pattern if op == "min" else signs == pattern
            assert torch.equal(total.values.signbit(), want)


@pytest.mark.parametrize("name", ["auto", "plain"])
@spmd(1, 3, 4, on=EVERYWHERE)
def test_a_function_gets_its_operands_in_rank_order(group, name):
    checked(group, name, "duplicates", right)


@pytest.mark.parametrize("name", NAMES)
@spmd(1, 3, 8, on=THREADS)
def test_the_input_is_left_alone_and_a_result_is_nobody_elses(group, name):
    parts, want = world(group.size, "many")
    rows = rows_of(group.rank, "many")
    first = weft.sparse_all_reduce(rows, algorithm=name)
    second = weft.sparse_all_reduce(rows, algorithm=name)
    second.values.fill_(99)
    second.indices.fill_(99)
    same(rows, parts[group.rank])
    same(first, want)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
@pytest.mark.parametrize("size", [2, 3, 8])
def test_an_abort_in_the_middle_ends_the_call_on_every_rank(monkeypatch, name, size):
    post = weft.Group.post

    def aborting(of, sends=(), recvs=(), channel=0):
        if of.rank_in_errors(of.rank) == 1 and channel in (LISTS, VALUES, SUMS):
            of.abort("tried here")
        return post(of, sends, recvs, channel)

    def program(group):
        with pytest.raises(weft.WireError, match="tried here") as caught:
            weft.sparse_all_reduce(rows_of(group.rank, "many"), algorithm=name)
        return caught.value.culprit

    monkeypatch.setattr(weft.Group, "post", aborting)
    assert run(size, program) == [1] * size


@st.composite
def worlds(draw):
    ranks = draw(st.sampled_from([2, 3, 4, 5]))
    height = draw(st.integers(1, 60))
    width = draw(st.integers(0, 3))
    value = st.integers(-8, 8)
    parts = []
    for _ in range(ranks):
        indices = draw(st.lists(st.integers(0, height - 1), max_size=25))
        numbers = draw(st.lists(value, min_size=len(indices), max_size=len(indices)))
        values = torch.tensor(numbers, dtype=torch.float32)[:, None].expand(-1, width)
        parts.append(weft.Rows(torch.tensor(indices, dtype=torch.int64), values, height))
    return parts


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15)  # each is a world of its own, and there is one such test an algorithm
@given(parts=worlds(), op=st.sampled_from(["sum", "min", "max", "prod"]))
def test_whatever_hypothesis_makes(name, parts, op):
    want = expected(parts, op)

    def body(group):
        return weft.sparse_all_reduce(parts[group.rank], op, algorithm=name)

    for total in run(len(parts), body):
        same(total, want)


@spmd(3, on=("threads",))
def test_gather_refuses_a_list_of_another_length_than_was_stated(group):
    post = group.post

    def shortened(sends=(), recvs=(), channel=0):
        if channel == LISTS and sends:
            with codec.pack(torch.arange(99, dtype=torch.int32), group.memory, gaps=False) as short:
                sends = [(peer, short.clone()) for peer, _ in sends]
        return post(sends, recvs, channel)

    if group.rank == 1:
        group.post = shortened
    rows = weft.Rows(torch.arange(100), torch.ones(100, 2), 100)
    with pytest.raises(weft.WireError, match="rank 1 sent 99 indices of 100 rows") as caught:
        for _ in range(2):  # rank 1 hears of it in its next call
            weft.sparse_all_reduce(rows, algorithm="gather")
    assert caught.value.culprit == 1
