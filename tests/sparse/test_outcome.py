"""What each table of a list gets, where its caller wants it; errors call it by its number."""

from __future__ import annotations

import functools

import pytest
import torch

import weft
from weft.testing import spmd

LARGEST = 2**62 - 2  # index in a list of two tables


@pytest.mark.parametrize("name", ["auto", "gather", "split", "doubling", "holders", "ring"])
@spmd(1, 2, on=("threads",))
def test_the_largest_index_that_a_list_takes(wire, name):
    def rows(highest):
        return [(torch.tensor([highest, 5]), torch.ones(2))] * 2

    text = f"^table 1: index {LARGEST + 1} is too large for a list: pass it alone"
    with pytest.raises(weft.WeftError, match=text):
        weft.sparse_all_reduce(rows(LARGEST + 1), algorithm=name)
    for indices, values in weft.sparse_all_reduce(rows(LARGEST), algorithm=name):
        assert indices.tolist() == [5, LARGEST]
        assert values.tolist() == [wire.size] * 2


def room(count, *row_shape):
    return torch.empty(count, dtype=torch.int64), torch.empty(count, *row_shape)


def one_hot(wire, number, *row_shape):
    """A row that all ranks have and one of this rank's."""
    return torch.tensor([wire.rank, 70]), torch.full((2, *row_shape), float(number))


@spmd(1, 2, 3)
def test_a_table_of_which_nobody_has_rows_has_the_row_shape_of_out(wire):
    nothing = torch.empty(0, dtype=torch.int64), torch.empty(0)
    asked = []

    def allocate(*of):
        asked.append(of)
        return room(of[0], *of[1])

    for name in ("auto", "split", "doubling"):
        for others in ([], [one_hot(wire, 1)], [one_hot(wire, 1), one_hot(wire, 2, 3)]):
            rows, first = [*others, nothing, nothing], len(others)
            # others have no buffer, and get the same shape
            out = [None] * first + [room(9, 4) if wire.rank == wire.size - 1 else None, allocate]
            got = weft.sparse_all_reduce(rows, out=out, algorithm=name)
            assert [each.shape for each in got[first]] == [(0,), (0, 4)]
            assert [each.shape for each in got[first + 1]] == [(0,), (0,)]
            if out[first] is not None:
                memory = [each[first][1].untyped_storage().data_ptr() for each in (got, out)]
                assert memory[0] == memory[1]
            assert asked.pop() == (0, (), (torch.int64, torch.float32))
            for result, given in zip(got, others, strict=False):
                assert result[1].shape == (wire.size + 1, *given[1].shape[1:])
    assert not asked
    assert weft.sparse_all_reduce([nothing])[0][1].shape == (0,)


def fails(*of):
    raise MemoryError("not today")


@spmd(2, on=("threads",))
def test_an_allocator_raises_that_is_asked_for_no_rows(wire):
    nothing = torch.empty(0, dtype=torch.int64), torch.empty(0)
    rows = [one_hot(wire, 1), one_hot(wire, 2, 3), nothing]
    for name in ("auto", "doubling"):
        with pytest.raises(weft.WeftError, match="rank 1: MemoryError: not today"):
            out = [None, None, fails if wire.rank == 1 else None]
            weft.sparse_all_reduce(rows, algorithm=name, out=out)


def cut_from(place, memory, count, *_):
    return place[:count], memory[:count]


def numbers(results):
    return [(indices.tolist(), values.flatten().tolist()) for indices, values in results]


@pytest.mark.parametrize("allocated", [False, True], ids=["buffers", "allocator"])
@pytest.mark.parametrize("name", ["auto", "split", "doubling"])
@spmd(1, 2, 3, on=("threads",))
def test_a_result_in_the_memory_of_another_tables_rows(wire, name, allocated):
    """Also where a list takes several calls: for each row shape."""
    for shapes in ([(2,), (1,)], [(1,)] * 300):
        given = [one_hot(wire, number, *shape) for number, shape in enumerate(shapes)]
        plain = numbers(weft.sparse_all_reduce(given, algorithm=name))
        for reader, writer in ((0, -1), (-1, 0)):
            width = shapes[writer][0]
            place, memory = room(9, width)
            rows = list(given)
            indices, values = given[reader]
            rows[reader] = indices, memory.view(-1)[: values.numel()].view_as(values).copy_(values)
            out = [None] * len(rows)
            out[writer] = place, memory
            if allocated:
                out[writer] = functools.partial(cut_from, place, memory)
            got = weft.sparse_all_reduce(rows, algorithm=name, out=out)
            assert numbers(got) == plain
            assert got[writer][1].data_ptr() == memory.data_ptr()


@spmd(1, 2, on=("threads",))
def test_errors_name_the_table_of_the_list(wire):
    many = [one_hot(wire, number) for number in range(600)]
    two = [one_hot(wire, 1, 3), one_hot(wire, 2, 4)]
    for rows, table, name in ((many, 599, "auto"), (two, 1, "doubling"), (two, 1, "split")):
        out = [None] * len(rows)
        out[table] = room(1, *rows[table][1].shape[1:])
        text = f"rank 0: table {table}: out holds 1 rows, the result has {wire.size + 1}: pass"
        with pytest.raises(weft.WeftError, match=text):
            weft.sparse_all_reduce(rows, algorithm=name, out=out)
    if wire.rank == 1:
        many[598] = one_hot(wire, 598, 5)
    if wire.size > 1:
        text = r"table 598: rank 0 has rows of shape \(\), rank 1 .* \(5,\); pass"
        for call in (weft.sparse_all_reduce, weft.explain):
            with pytest.raises(weft.WeftError, match=text):
                call(many)
