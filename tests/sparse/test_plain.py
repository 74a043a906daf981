"""plain, where what it does depends on sizes: the bits are those of the wire's algorithms."""

from __future__ import annotations

import threading
from itertools import product

import pytest
import torch

import weft
from cases import in_case, same
from weft import kernels
from weft.bootstrap.outcome import results
from weft.sparse import last_call, plain
from weft.sparse.header import Header
from weft.testing import expected, run, threads
from weft.testing.threads import on_groups


def part(rank, *, count=40, height=100, shape=(5,), dtype=torch.float32, index=torch.int64, at=0):
    draw = torch.Generator().manual_seed(rank)
    indices = torch.randint(height, (count * (1 + rank % 3),), generator=draw) + at
    values = torch.randn(len(indices), *shape, generator=draw).to(dtype)
    return weft.Rows(indices.to(index), values, height + at)


def by_verbs(size, body, *args):
    """What a body returns on ranks whose rows go by verbs."""
    return results(on_groups(threads.group(size, 60.0, wire="group"), body, args), "threads")


def reduced(group, parts, op="sum", wire_dtype=None, algorithm="auto"):
    rows = parts[group.rank]
    options = {"wire_dtype": wire_dtype, "algorithm": algorithm}
    return weft.sparse_all_reduce(rows, op, group, **options)


@pytest.fixture(params=[True, False], ids=["kernels", "torch"])
def on_host(monkeypatch, request):
    """Who sorts and merges."""
    monkeypatch.setattr(kernels, "on_host", lambda tensor: request.param)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_columns_in_turns_have_the_same_bits(monkeypatch, on_host, size):
    cases = product(("sum", "avg", "min"), (torch.float32, torch.bfloat16), (None, torch.bfloat16))
    for op, dtype, wire_dtype in cases:
        parts = [part(rank, shape=(3, 4), dtype=dtype) for rank in range(size)]
        with in_case(op, dtype, wire_dtype):
            whole = by_verbs(size, reduced, parts, op, wire_dtype)
            for columns in (1, 5):
                with monkeypatch.context() as patch:
                    nbytes = bytes_of_columns(columns, parts, wire_dtype or dtype)
                    patch.setattr(plain, "WHOLE", nbytes)
                    cut = by_verbs(size, reduced, parts, op, wire_dtype)
                for found in (*cut, *whole):
                    assert torch.equal(found.indices, whole[0].indices)
                    assert torch.equal(found.values, whole[0].values)


def bytes_of_columns(columns, parts, dtype):
    """`WHOLE` by which so many columns are gathered at once."""
    capacity = max(len(rows.indices.unique()) for rows in parts)
    return columns * len(parts) * capacity * dtype.itemsize


def test_the_bits_are_those_of_gather(on_host):
    for dtype, shape in product((torch.float32, torch.float16, torch.float64), ((), (7,))):
        for op in ("sum", "avg", "min", "max", "prod"):
            with in_case(dtype, shape, op):
                parts = [part(rank, shape=shape, dtype=dtype) for rank in range(4)]
                wanted = run(4, reduced, parts, op, None, "gather")[0]
                for found in by_verbs(4, reduced, parts, op):
                    assert torch.equal(found.indices, wanted.indices)
                    assert found.values.equal(wanted.values)
                    assert found.values.signbit().equal(wanted.values.signbit())


@pytest.mark.parametrize("at", [2**31 - 150, 2**31 - 101, 2**31 - 100, 2**31, 2**62])
def test_indices_travel_in_four_bytes_where_they_fit(on_host, at):
    parts = [part(rank, at=at) for rank in range(3)]
    for found in by_verbs(3, reduced, parts):
        same(found, expected(parts))


def test_rows_without_bytes_are_united(on_host):
    parts = [part(rank, shape=(0, 3)) for rank in range(3)]
    for found in by_verbs(3, reduced, parts):
        same(found, expected(parts))


def test_a_function_gets_whole_rows(on_host):
    """Of a shape of two dimensions, also where the columns of other rows go in turns."""

    def product_of(left, right):
        assert left.shape[1:] == (2, 2)
        return left @ right

    parts = [part(rank, height=30, shape=(2, 2), dtype=torch.float64) for rank in range(3)]
    wanted = expected(parts, product_of)
    for found in by_verbs(3, reduced, parts, product_of):
        assert torch.equal(found.indices, wanted.indices)
        torch.testing.assert_close(found.values, wanted.values)


def test_what_a_rank_told_that_cannot_be_read_ends_the_group(monkeypatch):
    def program(group):
        with pytest.raises(weft.WireError, match="rank 1 sent a statement that cannot be read"):
            rows = part(group.rank)
            weft.sparse_all_reduce(rows, group=group)
        return True

    pack = Header.pack

    def wrong(header):
        is_of_1 = threading.current_thread().name == "rank 1"
        return pack(header._replace(total=-5) if is_of_1 else header)

    monkeypatch.setattr(Header, "pack", wrong)
    assert by_verbs(3, program) == [True] * 3


def test_the_record_says_why():
    def program(group):
        rows = part(group.rank)
        weft.sparse_all_reduce(rows, group=group)
        by_group = last_call(group).why
        return by_group, str(weft.explain(rows, group=group)).partition("\n")[0]

    assert by_verbs(2, program)[0] == (
        "weft's wire does not carry cpu (posts)",
        "plain: weft's wire does not carry cpu (posts)",
    )

    def asked(group):
        weft.sparse_all_reduce(part(group.rank), lambda left, right: left, group=group)
        function = last_call(group).why
        weft.sparse_all_reduce(part(group.rank), algorithm="plain", group=group)
        return function, last_call(group).why

    assert run(2, asked)[0] == ("the op is a function", "it was asked for")
