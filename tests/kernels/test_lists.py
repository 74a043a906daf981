"""Lists of tables: machine code gives what NumPy and the other kernels give, bit for bit."""

from __future__ import annotations

import contextlib
from array import array
from itertools import pairwise

import numpy as np
import pytest
import torch

from weft import kernels
from weft.kernels import lists
from weft.kernels.compile import compiler
from weft.kernels.ops import OPS

DTYPES = [torch.float32, torch.float64, torch.int8]
HEIGHTS = [(1,), (40_000,), (10**6, 5), (300, 1, 40_000, 70), (5000,) * 26]


@contextlib.contextmanager
def in_numpy(monkeypatch):
    """Without machine code for these."""
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "loops", lambda key: None)
        yield


def drawn(heights, ranks, dtype=torch.int64):
    """Of each rank the indices of each table; a table is empty on some ranks."""
    draw = torch.Generator().manual_seed(ranks)
    return [
        [
            torch.randint(height, (700 * (table != rank) + 30 * table,), generator=draw).to(dtype)
            for table, height in enumerate(heights)
        ]
        for rank in range(ranks)
    ]


@pytest.fixture(autouse=True)
def machine_code():
    for key in (lists.KEY, *(lists.sums_key(dtype, OPS["sum"]) for dtype in DTYPES)):
        compiler.make(key)
        assert compiler.made(key)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("heights", HEIGHTS)
def test_indices_become_keys(heights, dtype, monkeypatch):
    for own in drawn(heights, 3, dtype):
        given = [part for part in own if len(part)]
        if not given:
            continue
        keys, lows, highs = lists.joined(given)
        with in_numpy(monkeypatch):
            expected = lists.joined(given)
        assert torch.equal(keys, expected[0])
        assert (lows == expected[1]).all() and (highs == expected[2]).all()
        assert lows.tolist() == [int(part.min()) for part in given]


def test_a_negative_index_is_told():
    _, lows, _ = lists.joined([torch.tensor([3]), torch.tensor([5, -4, 2], dtype=torch.int32)])
    assert lows.tolist() == [3, -4]


def placed(given, op, index):
    """What `laid` makes of tables: of each its indices and rows, in the order of the indices."""
    first, count = given[0][1], sum(len(which) for which, _ in given)
    indices = torch.full((count,), -1, dtype=index)
    nbytes = sum(rows.nbytes for _, rows in given)
    memory = torch.empty(nbytes, dtype=torch.uint8)
    counts, lows, highs = lists.laid(given, op, indices, memory)
    assert lows == [int(which.min()) for which, _ in given]
    assert highs == [int(which.max()) for which, _ in given]
    size = sum(counts) * first[:1].nbytes
    rows = memory[:size].view(first.dtype).view(sum(counts), *first.shape[1:])
    assert bool((indices[sum(counts) :] == -1).all())
    found = []
    for which, part in zip(indices.split_with_sizes([*counts, count - sum(counts)]),
                           rows.split_with_sizes(counts), strict=False):  # fmt: skip
        order = which.argsort()
        found.append((which[order], part[order]))
    return found


@pytest.mark.parametrize("op", ["sum", "max"])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (23,), (2, 32)])
def test_rows_are_laid_each_index_once(shape, dtype, wide, op):
    """In the order of the indices they are what a sort and a sum of duplicates give."""
    draw = torch.Generator().manual_seed(len(shape) + wide)
    compiler.make(lists.sums_key(dtype, OPS[op]))
    given = []
    for count, places in ((1, 1), (500, 10**6), (500, 20), (64, 64), (3000, 900)):
        which = torch.randint(places, (count,), generator=draw)
        which = which * 2**33 if wide and count == 64 else which
        which = which.int() if count == 500 else which
        values = torch.randn(count, *shape, generator=draw).mul(99).to(dtype)
        given.append((which, values))
    given.append((torch.arange(40)[::2], torch.ones(20, *shape).to(dtype)))
    found = placed(given, OPS[op], torch.int64 if wide else torch.int32)
    for (which, values), (indices, rows) in zip(given, found, strict=True):
        distinct = kernels.distinct(which)
        assert torch.equal(indices.long(), distinct.indices.long())
        assert torch.equal(rows, kernels.reduce(values, distinct, OPS[op]))


def test_indices_that_fall_together_are_told_apart():
    """Multiples of powers of two, of which a part of the bits is the same."""
    for power in range(0, 60, 3):
        which = torch.arange(7)[torch.arange(700) % 7] << power
        values = torch.arange(700.0)
        ((indices, rows),) = placed([(which, values)], OPS["sum"], torch.int64)
        assert indices.tolist() == [i << power for i in range(7)]
        assert rows.tolist() == [values[i::7].sum().item() for i in range(7)]


def test_values_that_are_put_off_or_apart_are_laid_as_they_are():
    apart = torch.arange(12.0).view(3, 4).t()[:2]
    put_off = torch.tensor([[1j, 2j], [3j, 4j]]).conj().imag
    assert put_off.is_neg() and not apart.is_contiguous()
    where = torch.tensor([4, 2, 0, 9])[::2]
    first, second = placed([(where, apart), (where, apart * 2)], OPS["sum"], torch.int32)
    assert first[0].tolist() == second[0].tolist() == [0, 4]
    assert first[1].tolist() == [[1, 5, 9], [0, 4, 8]]
    ((_, rows),) = placed([(where, put_off)], OPS["sum"], torch.int32)
    assert rows.tolist() == [[-3, -4], [-1, -2]]


def test_what_sorting_does_better_is_left_to_it(monkeypatch):
    rows = torch.arange(100), torch.ones(100)
    room = torch.empty(100, dtype=torch.int64), torch.empty(400, dtype=torch.uint8)
    assert lists.laid([rows], OPS["sum"], *room) == ([100], [0], [99])
    monkeypatch.setattr(lists, "_HASHED", 99)
    assert lists.laid([rows], OPS["sum"], *room) is None
    half = rows[0], rows[1].half()
    assert lists.laid([half], OPS["sum"], *room) is None


def test_indices_that_do_not_fit_are_laid_as_int64_only():
    rows = torch.tensor([2**31, 3, 2**31]), torch.ones(3)
    room = torch.empty(3, dtype=torch.int64), torch.empty(12, dtype=torch.uint8)
    few = torch.tensor([2**31 - 1]), torch.ones(1)
    assert lists.laid([few, rows], OPS["sum"], room[0].int(), room[1]) is None
    assert lists.laid([rows], OPS["sum"], *room) == ([2], [3], [2**31])
    assert room[0][:2].tolist() == [2**31, 3]
    assert lists.laid([few], OPS["sum"], room[0].int(), room[1]).counts == [1]


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (23,), (2, 32)])
def test_rows_of_all_ranks_are_added_in_the_order_of_keys(shape, dtype, index, whole, past=False):
    heights, ends = (300, 1, 40_000, 70), (0, 2, 4)
    starts = np.cumsum([0, *heights])
    low, high = (0, int(starts[-1])) if whole else (150, 20_000)
    draw = torch.Generator().manual_seed(7)
    memory, rows, runs = [], [], []
    for own in drawn(heights, 3, index):
        own = [part.unique()[torch.randperm(len(part.unique()), generator=draw)] for part in own]
        which = torch.cat(own)
        values = torch.randn(len(which), *shape, generator=draw).mul(99).to(dtype)
        memory.append((which, values))
        rows.append([len(part) for part in own])
        keys = which.long() + torch.from_numpy(np.repeat(starts[:-1], rows[-1]))
        order = keys.argsort()
        order = order[(keys[order] >= low) & (keys[order] < high)]
        runs.append((keys[order], values[order]))
    places = [lists.Place(w.data_ptr(), w.element_size(), v.data_ptr()) for w, v in memory]
    keys = lists.sorted_keys(places, rows, starts, low, high)
    assert keys.many == sum(len(run) for run, _ in runs)
    out, found = torch.empty(keys.many, *shape, dtype=dtype), 0
    indices = torch.empty(keys.many, dtype=torch.int64 if index is torch.int32 else torch.int32)
    for tables in pairwise(ends):  # as two stacks
        words = (keys.before(int(np.clip(starts[at], low, high))) for at in tables)
        bases = [place.values for place in places]
        found += lists.sums(
            keys, *words, bases, OPS["sum"], indices[found:], out[found:], past=past
        )
    union, sums = kernels.merge(runs, OPS["sum"])
    assert torch.equal(indices[:found].long(), union) and torch.equal(out[:found], sums)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(32,), (2, 32), (33,)])
def test_sums_that_go_past_the_cache_are_the_same(shape, dtype):
    test_rows_of_all_ranks_are_added_in_the_order_of_keys(
        shape, dtype, torch.int64, True, past=True
    )


def test_keys_that_do_not_fit_are_left_to_others():
    place = lists.Place(0, 8, 0)
    assert lists.sorted_keys([place], [[100]], np.array([0, 2**61]), 0, 2**61) is None


@pytest.mark.parametrize("ranks", [1, 5])
@pytest.mark.parametrize("present", [[3], [4, 0, 2], list(range(6))])
def test_rows_are_found_where_they_were_laid(ranks, present, monkeypatch):
    draw = np.random.default_rng(ranks)
    told = draw.integers(0, 50, (ranks, 6, 4))
    told[-1, present[0], 1] += 2**31  # one table's greatest index is enough
    sizes = [8 * table for table in present]
    which = array("q", (number for pair in zip(present, sizes, strict=True) for number in pair))
    found = lists.spans(told, which)
    with in_numpy(monkeypatch):
        assert lists.spans(told, which) == found
    assert found.counts == told[:, present, 0].tolist()
    assert found.itemsizes == [*[4] * (ranks - 1), 8]
    for counts, rows, nbytes in zip(found.counts, found.rows, found.bytes, strict=False):
        assert [*map(len, (rows, nbytes))] == [len(present) + 1] * 2
        assert [high - low for low, high in pairwise(rows)] == counts
        ends = [count * size for count, size in zip(counts, sizes, strict=True)]
        assert [high - low for low, high in pairwise(nbytes)] == ends
    for begins in (found.rows, found.bytes):
        assert begins[-1] == [sum(each) for each in zip(*begins[:-1], strict=True)]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("heights", HEIGHTS)
def test_sorted_keys_are_taken_apart(heights, dtype, monkeypatch):
    for own in drawn(heights, 3):
        spans = [int(part.max()) + 1 if len(part) else 0 for part in own]
        starts = np.cumsum([0, *spans])
        parts = [part.unique() for part in own]
        keys = torch.cat([part + int(at) for part, at in zip(parts, starts, strict=False)])
        for index in (torch.int32, torch.int64):
            indices, ends = lists.parted(keys.to(dtype), starts, index)
            with in_numpy(monkeypatch):
                expected, expected_ends = lists.parted(keys.to(dtype), starts, index)
            assert indices.dtype is index and torch.equal(indices, expected)
            assert ends == expected_ends
            pieces = indices.tensor_split(ends[:-1])
            assert all(map(torch.equal, pieces, (part.to(index) for part in parts)))
