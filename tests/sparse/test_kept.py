"""Calls that are made again and again: a rank that asks for something else is named to all."""

from __future__ import annotations

import pytest
import torch

import weft
from weft.errors import WeftError
from weft.sparse.request import Request
from weft.testing import run, spmd

HEIGHT, STEPS = 40, 3


def table(rank, number, step, width=3, height=HEIGHT, dtype=torch.float32, index=torch.int64):
    """A rank's rows of one table in one step, as a sparse tensor; not as many in each."""
    draw = torch.Generator().manual_seed(1000 * step + 10 * rank + number)
    count = 0 if (rank + step + number) % 5 == 4 else 3 + (rank + step) % 4
    indices = torch.randint(HEIGHT, (1, count), generator=draw)
    values = torch.randint(1, 9, (count, width), generator=draw)
    values, shape = values.to(dtype), (height, width)
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)


def pair(tensor, index=torch.int64):
    return tensor._indices()[0].to(index), tensor._values()


def tables(rank, step, **changed):
    return [table(rank, number, step, **(changed if number == 1 else {})) for number in range(3)]


def check(wire, step, results, numbers=range(3)):
    for number, found in zip(numbers, results, strict=True):
        want = sum(table(rank, number, step).to_dense() for rank in range(wire.size))
        if isinstance(found, tuple):
            indices, values = found
            assert indices.tolist() == sorted(set(indices.tolist()))
            where = indices[None]
            found = torch.sparse_coo_tensor(where, values, want.shape, check_invariants=True)
        assert torch.equal(found.to_dense(), want)


FORMS = {
    "list of pairs": lambda given, **more: weft.sparse_all_reduce([*map(pair, given)], **more),
    "list of tensors": lambda given, **more: weft.sparse_all_reduce(given, **more),
    "pair": lambda given, **more: [weft.sparse_all_reduce(pair(given[1]), **more)],
    "tensor": lambda given, **more: [weft.sparse_all_reduce(given[1], **more)],
}
CHANGED = {
    "dtype": (lambda rank, step: tables(rank, step, dtype=torch.float64), {}, "float64"),
    "row width": (lambda rank, step: tables(rank, step, width=4), {}, r"\(4,\)"),
    "op": (tables, {"op": "max"}, "ranks differ in op: .* rank 1 has max"),
    "algorithm": (tables, {"algorithm": "split"}, "algorithm: .* rank 1 has split"),
    "wire_dtype": (tables, {"wire_dtype": torch.bfloat16}, "wire dtype: .* has torch.bfloat16"),
    "unknown op": (tables, {"op": "median"}, "rank 1: .*op 'median' is unknown"),
    "height": (lambda rank, step: tables(rank, step, height=41), {}, "rank 1 has .*41"),
    "number": (lambda rank, step: tables(rank, step)[:2], {}, "number of tables: .* rank 1 has 2"),
}


@pytest.mark.parametrize("what", CHANGED)
@pytest.mark.parametrize("form", FORMS)
@spmd(2, 3)
def test_who_changes_his_mind_is_named_to_all(wire, form, what):
    reduce, (make, arguments, text) = FORMS[form], CHANGED[what]
    alone = "list" not in form
    if (what == "height" and "pair" in form) or (what == "number" and alone):
        return  # there is no such thing to change
    numbers = [1] if alone else range(3)
    for step in range(STEPS):
        check(wire, step, reduce(tables(wire.rank, step)), numbers)
    step = 5  # in which ranks 0 and 1 have rows
    for _ in range(2):
        with pytest.raises(WeftError, match=text):
            if wire.rank == 1:
                reduce(make(wire.rank, step), **arguments)
            else:
                reduce(tables(wire.rank, step))
        for step in range(4, 8):
            check(wire, step, reduce(tables(wire.rank, step)), numbers)
        step = 5


@spmd(1, 2, 4, 7, 8)
def test_steps_of_other_counts_and_none(wire):
    for step in range(2 * STEPS):
        for form, reduce in FORMS.items():
            numbers = range(3) if "list" in form else [1]
            check(wire, step, reduce(tables(wire.rank, step)), numbers)


@pytest.mark.parametrize("name", ["WEFT_ALGORITHM", "WEFT_LINK"])
def test_the_environment_is_read_in_every_call(monkeypatch, name):
    def body(wire):
        for step in (5, 6):  # in which both have rows
            check(wire, step, FORMS["pair"](tables(wire.rank, step)), [1])

    run(2, body)
    monkeypatch.setenv(name, "no such thing")
    with pytest.raises(WeftError, match="no such thing"):
        run(2, body)


def test_what_is_wrong_is_looked_at_again():
    """Of one kind with what was right: where values cannot be taken as they are, or are too few."""
    rows = pair(table(0, 0, 0))
    assert Request.of(rows, "sum", "auto", None, None).error is None
    for indices, values, text in (
        (rows[0], rows[1][:-1], "the first dimension must be"),
        (rows[0][None], rows[1], "must be 1-D"),
        (rows[0].float(), rows[1], "must be int32 or int64"),
    ):
        assert text in Request.of((indices, values), "sum", "auto", None, None).error
    turned = rows[1].t().contiguous().t()
    found = Request.of((rows[0], turned.requires_grad_()), "sum", "auto", None, None)
    assert not found.rows.values.requires_grad and torch.equal(found.rows.values, rows[1])
    negative = torch.imag(torch.complex(rows[1], rows[1]).conj())
    found = Request.of((rows[0], negative), "sum", "auto", None, None)
    assert not found.rows.values.is_neg() and torch.equal(found.rows.values, -rows[1])
