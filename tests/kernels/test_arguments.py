"""What reducing and combining are given: what they refuse, serve, and leave uncopied."""

from __future__ import annotations

import pytest
import torch

from weft import kernels
from weft.kernels import jit, reference
from weft.kernels.ops import OPS, Op


@pytest.mark.parametrize("ids", [[1, 0, 1], [0, 0, 1], [3, 1]])
@pytest.mark.parametrize("wrong", [-1, 2])
def test_rows_that_are_not_among_the_distinct_ones(ids, wrong):
    distinct, values = reference.distinct(torch.tensor(ids)), torch.ones(len(ids), 4)
    chosen = torch.tensor([0, wrong, 1], dtype=torch.int32)
    with pytest.raises(IndexError):
        kernels.reduce_some(values, distinct, OPS["sum"], chosen, torch.empty(3, 4))


def test_some_rows_are_reduced_only_where_that_takes_less_time(monkeypatch):
    chosen, out = torch.tensor([1], dtype=torch.int32), torch.full((1,), 7.0)
    values, found = torch.ones(3), kernels.distinct(torch.tensor([3, 1, 3]))
    for op in (OPS["prod"], Op("callable add", torch.add, builtin=False)):
        assert not kernels.reduce_some(values, found, op, chosen, out)
    sorted_ones = kernels.distinct(torch.tensor([1, 3, 9]))
    assert not kernels.reduce_some(values, sorted_ones, OPS["sum"], chosen, out)
    with monkeypatch.context() as patch:
        patch.setattr(jit, "loops", lambda: None)
        assert not kernels.reduce_some(values, found, OPS["sum"], chosen, out)
    assert out.tolist() == [7.0]
    assert kernels.reduce_some(values, found, OPS["sum"], chosen, out) and out.tolist() == [2.0]


def test_rows_that_need_nothing_are_not_copied():
    values = torch.arange(6.0).view(3, 2)
    found = kernels.distinct(torch.tensor([1, 4, 9]))
    assert kernels.reduce(values, found, OPS["sum"]) is values


def test_large_results_need_no_large_temporaries():
    """With an `out`, only small integers are allocated beside it."""
    ids = torch.arange(2000).repeat(2)
    values, found = torch.ones(4000, 256), kernels.distinct(ids)
    out = torch.empty(2000, 256)
    slots = kernels.union([found.indices]).slots[0]
    with torch.profiler.profile(profile_memory=True) as profile:
        kernels.reduce(values, found, OPS["sum"], out)
        kernels.combine(out, slots, values[:2000], OPS["sum"])
    peak = sum(max(event.self_cpu_memory_usage, 0) for event in profile.key_averages())
    assert peak < 64 << 10


def test_what_does_not_fit_is_refused():
    found = kernels.distinct(torch.tensor([3, 1, 3]))
    with pytest.raises(ValueError, match="3 indices and 2 rows"):
        kernels.reduce(torch.ones(2, 4), found, OPS["sum"])
    with pytest.raises(ValueError, match=r"out is \(2, 3\), the result \(2, 4\)"):
        kernels.reduce(torch.ones(3, 4), found, OPS["sum"], torch.empty(2, 3))
    slots = torch.tensor([-1, -3], dtype=torch.int32)
    with pytest.raises(ValueError, match="2 slots"):
        kernels.combine(torch.empty(3, 4), slots, torch.ones(1, 4), OPS["sum"])
    with pytest.raises(IndexError, match="1 of 2 rows belong outside of places 0 to 1"):
        kernels.combine(torch.empty(2, 4), slots, torch.ones(2, 4), OPS["sum"])
    with pytest.raises(IndexError, match="outside of places 1 to 3"):
        kernels.combine(torch.empty(3, 4), slots, torch.ones(2, 4), OPS["sum"], base=1)


def test_other_layouts_of_out_are_served():
    found = kernels.distinct(torch.tensor([3, 1, 3]))
    out = torch.empty(4, 2).t()
    kernels.reduce(torch.ones(3, 4), found, OPS["sum"], out)
    assert out.tolist() == [[1.0] * 4, [2.0] * 4]


def test_values_that_require_grad_and_negated_views_are_served():
    found = kernels.distinct(torch.tensor([3, 1, 3]))
    values = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)
    assert kernels.reduce(values, found, OPS["sum"]).tolist() == [2.0, 5.0]
    negated = torch.complex(torch.zeros(3), torch.tensor([1.0, 2.0, 4.0])).conj().imag
    assert negated.is_neg()
    assert kernels.reduce(negated, found, OPS["sum"]).tolist() == [-2.0, -5.0]
