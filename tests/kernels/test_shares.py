"""Sharing places out and bringing rows there: machine code and reference agree, and with Python."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weft import kernels
from weft.kernels import cpu, jit, reference
from weft.kernels.ops import DTYPES

CODE = jit.loops()
assert CODE is not None, jit.describe()
SOME = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def unions(draw):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    height = draw(st.sampled_from([1, 5, 40, 300]))
    counts = draw(st.lists(st.sampled_from([0, 1, 5, 60]), min_size=1, max_size=9))
    runs = [torch.randint(height, (count,), generator=generator).unique() for count in counts]
    weights = draw(st.lists(st.integers(1, 2**16), min_size=len(runs), max_size=len(runs)))
    return runs, kernels.union(runs), weights


@SOME
@given(case=unions())
def test_each_place_is_given_to_one_that_has_it(case):
    runs, union, weights = case
    total = len(union.indices)
    found = reference.shares(union.slots, total, weights)
    ours = cpu.shares(CODE, union.slots, total, weights)
    assert all(torch.equal(one, other) for one, other in zip(found[:3], ours[:3], strict=True))
    assert found.starts == ours.starts
    assert [one.dtype for one in ours[:3]] == [torch.int32] * 3

    sets = [set(run.tolist()) for run in runs]
    given_to = {}
    for run in range(len(runs)):
        places = ours.of(run).tolist()
        assert len(places) == ours.count(run)
        indices = union.indices[places].tolist()
        assert set(indices) <= sets[run]
        for index in indices:
            assert index not in given_to
            given_to[index] = run
        alone = [sum(index in one for one in sets) == 1 for index in indices]
        first = ours.alone(run)
        assert all(alone[:first]) and not any(alone[first:])
        assert indices[:first] == sorted(indices[:first])
        assert indices[first:] == sorted(indices[first:])
    assert sorted(given_to) == union.indices.tolist()


@SOME
@given(case=unions())
def test_picked_rows_meet_where_they_are_summed(case):
    runs, union, weights = case
    shares = reference.shares(union.slots, len(union.indices), weights)
    for to in range(len(runs)):
        met, places = set(), shares.of(to).tolist()
        for run, slots in enumerate(union.slots):
            found = reference.pick(slots, shares, run, to)
            ours = cpu.pick(CODE, slots, shares, run, to)
            assert torch.equal(found.rows, ours.rows) and torch.equal(found.slots, ours.slots)
            assert ours.rows.dtype == ours.slots.dtype == torch.int32
            there = [slot if slot >= 0 else ~slot for slot in ours.slots.tolist()]
            assert there == sorted(there)
            for row, slot, place in zip(ours.rows.tolist(), ours.slots, there, strict=True):
                assert runs[run][row] == union.indices[places[place]]
                assert (slot < 0) == (place not in met)
            met.update(there)
        assert met == set(range(len(places)))


@SOME
@given(case=unions())
def test_rows_are_dealt_to_those_who_were_given_their_places(case):
    runs, union, weights = case
    shares = reference.shares(union.slots, len(union.indices), weights)
    given_to = [set(shares.of(to).tolist()) for to in range(len(runs))]
    for run, slots in enumerate(union.slots):
        found, ours = reference.deal(slots, shares, run), cpu.deal(CODE, slots, shares)
        assert all(torch.equal(one, other) for one, other in zip(found, ours, strict=True))
        assert sorted(torch.cat(ours).tolist()) == list(range(len(slots)))
        for to, rows in enumerate(ours):
            assert rows.dtype == torch.int32 and rows.tolist() == sorted(rows.tolist())
            places = [slot if slot >= 0 else ~slot for slot in slots[rows.long()].tolist()]
            assert set(places) <= given_to[to]


@SOME
@given(case=unions(), data=st.data())
def test_who_holds_a_place(case, data):
    runs, union, _ = case
    total = len(union.indices)
    some = data.draw(st.lists(st.integers(0, max(0, total - 1)), max_size=30 if total else 0))
    places = torch.tensor(sorted(some), dtype=torch.int64)
    ours = kernels.held(union.slots, places)
    assert ours.dtype == torch.int64
    sets = [set(run.tolist()) for run in runs]
    for index, found in zip(union.indices[places].tolist(), ours.tolist(), strict=True):
        assert found == [int(index in one) for one in sets]


@pytest.mark.parametrize("shared", [reference.shares, partial(cpu.shares, CODE)])
@pytest.mark.parametrize("runs", [2, 3, 8])
def test_equal_weights_are_equal_shares(shared, runs):
    same = [torch.arange(10_000)] * runs
    slots = kernels.union(same).slots
    shares = shared(slots, 10_000, [1] * runs)
    assert max(abs(shares.count(run) - 10_000 / runs) for run in range(runs)) <= 3
    weights = [2 * run + 1 for run in range(runs)]
    shares = shared(slots, 10_000, weights)
    for run, weight in enumerate(weights):
        assert abs(shares.count(run) - 10_000 * weight / sum(weights)) <= 3


@pytest.mark.parametrize("weights", [[0, 1], [1, 2**16 + 1]])
def test_weights_out_of_range(weights):
    slots = kernels.union([torch.arange(3)] * 2).slots
    with pytest.raises(ValueError, match="weights are"):
        kernels.shares(slots, 3, weights)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 5), (64,), (0,)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_put(dtype, shape):
    generator = torch.Generator().manual_seed(1)
    places = torch.randperm(50, generator=generator)[:20].int()
    values = torch.randint(2, (20, *shape), generator=generator).to(dtype)
    for rows in (values, torch.stack([values, values], 1)[:, 0]):  # and rows that lie apart
        out = torch.ones(50, *shape).to(dtype)
        expected = out.clone()
        kernels.put(out, places, rows)
        expected[places.long()] = values
        assert torch.equal(out, expected)


def test_put_checks_places_and_shapes():
    for out, values in (
        (torch.zeros(3, 16), torch.ones(2, 16)),
        (torch.zeros(3), torch.ones(2)),
    ):
        for wrong in ([0, 3], [-1, 0]):
            with pytest.raises(IndexError):
                kernels.put(out, torch.tensor(wrong, dtype=torch.int32), values)
    for places, rows in (([0], values), ([0, 1], values.double()), ([0, 1], values[:, None])):
        with pytest.raises(ValueError, match="do not fit"):
            kernels.put(out, torch.tensor(places, dtype=torch.int32), rows)
