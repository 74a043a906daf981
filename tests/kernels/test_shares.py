"""Sharing places out and finding the rows that go there: as Python has it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weft import kernels
from weft.kernels import jit

assert jit.loops() is not None, jit.describe()
SOME = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def unions(draw):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    height = draw(st.sampled_from([1, 5, 40, 300]))
    counts = draw(st.lists(st.sampled_from([0, 1, 5, 60]), min_size=1, max_size=9))
    runs = [torch.randint(height, (count,), generator=generator).unique() for count in counts]
    return runs, kernels.union(runs)


@SOME
@given(case=unions())
def test_each_place_is_given_to_one_that_has_it(case):
    runs, union = case
    ours = kernels.shares(union.slots, len(union.indices))
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
    runs, union = case
    shares = kernels.shares(union.slots, len(union.indices))
    for to in range(len(runs)):
        met, places = set(), shares.of(to).tolist()
        for run, slots in enumerate(union.slots):
            ours = kernels.pick(slots, shares, run, to)
            assert ours.rows.dtype == ours.slots.dtype == torch.int32
            there = [slot if slot >= 0 else ~slot for slot in ours.slots.tolist()]
            assert there == sorted(there)
            for row, slot, place in zip(ours.rows.tolist(), ours.slots, there, strict=True):
                assert runs[run][row] == union.indices[places[place]]
                assert (slot < 0) == (place not in met)
            here = [(slot if slot >= 0 else ~slot) in places for slot in slots.tolist()]
            assert sorted(ours.rows.tolist()) == [row for row in range(len(here)) if here[row]]
            met.update(there)
        assert met == set(range(len(places)))


@pytest.mark.parametrize("runs", [2, 3, 8])
def test_equal_runs_get_equal_shares(runs):
    slots = kernels.union([torch.arange(10_000)] * runs).slots
    shares = kernels.shares(slots, 10_000)
    assert max(abs(shares.count(run) - 10_000 / runs) for run in range(runs)) <= 3
