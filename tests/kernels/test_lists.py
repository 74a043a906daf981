"""Keys of lists of tables: machine code gives what NumPy gives, and ranges have equal work."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

from weft import kernels
from weft.kernels import lists
from weft.kernels.compile import compiler

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


def made(tables):
    """The lists of all ranks, and where tables begin in the space of all."""
    heights = np.array(
        [[int(part.max()) + 1 if len(part) else 0 for part in own] for own in tables]
    )
    whole = []
    for own, spans in zip(tables, heights, strict=True):
        given = [part for part in own if len(part)]
        keys = lists.joined(given)[0] if given else torch.empty(0, dtype=torch.int64)
        keys = kernels.distinct(keys).indices
        ends = keys.numpy().searchsorted([0, *np.cumsum(spans)])
        whole.append(lists.List(keys, np.diff(ends), spans))
    return whole, np.cumsum([0, *heights.max(0)])


@pytest.fixture(autouse=True)
def machine_code():
    compiler.make(lists.KEY)
    assert compiler.made(lists.KEY)


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


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4, 16])
@pytest.mark.parametrize("heights", HEIGHTS)
def test_ranges_are_those_of_numpy(heights, ranks, weighed, monkeypatch):
    whole, starts = made(drawn(heights, ranks))
    sizes = np.arange(1, len(heights) + 1) * 64 if weighed else None
    found = lists.cut(whole, starts, sizes)
    with in_numpy(monkeypatch):
        assert found == lists.cut(whole, starts, sizes)
    for one, ends in zip(whole, found, strict=True):
        assert ends[0] == 0 and ends[-1] == len(one.keys) and ends == sorted(ends)


@pytest.mark.parametrize("heights", [(40_000,), (5000,) * 26])
def test_ranges_have_equal_work(heights):
    ranks = 4
    whole, starts = made(drawn(heights, ranks))
    found = lists.cut(whole, starts)
    work = []
    for owner in range(ranks):
        runs = [
            lists.moved(one, starts, *ends[owner : owner + 2], torch.int32)
            for one, ends in zip(whole, found, strict=True)
        ]
        work.append(sum(map(len, runs)) + (ranks - 1) * len(torch.cat(runs).unique()))
    assert max(work) < 1.15 * min(work)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("heights", HEIGHTS)
def test_keys_are_moved_into_the_space_of_all_and_back(heights, dtype, monkeypatch):
    tables = drawn(heights, 3)
    whole, starts = made(tables)
    for own, one in zip(tables, whole, strict=True):
        count = len(one.keys)
        for first, last in ((0, count), (count // 3, count // 2), (count, count)):
            keys = lists.moved(one, starts, first, last, dtype)
            with in_numpy(monkeypatch):
                expected = lists.moved(one, starts, first, last, dtype)
            assert keys.dtype is dtype and torch.equal(keys, expected)
        keys = lists.moved(one, starts, 0, count, dtype)
        for index in (torch.int32, torch.int64):
            indices, ends = lists.parted(keys, starts, index)
            with in_numpy(monkeypatch):
                expected, expected_ends = lists.parted(keys, starts, index)
            assert indices.dtype is index and torch.equal(indices, expected)
            assert ends == expected_ends
            parts = indices.tensor_split(ends[:-1])
            assert all(map(torch.equal, parts, (part.unique().to(index) for part in own)))


def test_a_space_too_large_for_machine_code_is_cut_all_the_same():
    keys = torch.arange(0, 2**45, 2**35)
    one = lists.List(keys, np.array([len(keys)]), np.array([2**45]))
    (ends, _) = lists.cut([one, one], np.array([0, 2**45]))
    assert abs(ends[1] - len(keys) // 2) <= len(keys) // 16
