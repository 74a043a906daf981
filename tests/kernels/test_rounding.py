"""Values on their way to and from a narrower dtype: rounded once, added as wide as they end."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft import kernels
from weft.kernels import jit, reference
from weft.kernels.ops import OPS

assert jit.loops() is not None, jit.describe()
HALVES = [torch.float16, torch.bfloat16]
WIDE = [torch.float32, torch.float64]


@pytest.mark.parametrize("op", ["sum", "min", "prod"])
@pytest.mark.parametrize("dst", HALVES)
@settings(max_examples=10)
@given(seed=st.integers(0, 2**32), width=st.sampled_from([(), (1,), (5,)]), some=st.booleans())
def test_what_is_to_be_sent_is_reduced_and_rounded(op, dst, seed, width, some):
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(20, (50,), generator=draw)
    ids = ids if some else ids.unique().flip(0)
    found = reference.distinct(ids)
    for src in WIDE:
        values = torch.randn(len(ids), *width, generator=draw, dtype=torch.float64).to(src)
        got = torch.empty(len(found.indices), *width, dtype=dst)
        kernels.reduce(values, found, OPS[op], got)
        total = kernels.reduce(values, found, OPS[op])
        want = torch.empty_like(got)
        kernels.finish(total, want)
        assert torch.equal(got, want)
        if src is torch.float32:
            reference.reduce(values, found, OPS[op], want)
            assert torch.equal(got, want)
        some = torch.tensor([4, 2, 3], dtype=torch.int32)
        piece = got[:3].clone()
        served = kernels.reduce_some(values, found, OPS[op], some, piece)
        assert served == (op == "sum" and src is torch.float32)
        assert not served or torch.equal(piece, got[[4, 2, 3]])


@pytest.mark.parametrize("op", ["sum", "prod"])
@pytest.mark.parametrize("src", HALVES)
@settings(max_examples=10)
@given(seed=st.integers(0, 2**32), width=st.sampled_from([(), (1,), (5,)]))
def test_what_was_sent_is_added_as_wide_as_it_ends(op, src, seed, width):
    draw = torch.Generator().manual_seed(seed)
    runs = [torch.randint(30, (20,), generator=draw).unique() for _ in range(3)]
    union = reference.union(runs)
    values = [torch.randn(len(run), *width, generator=draw).to(src) for run in runs]
    for dst in WIDE:
        totals = []
        for serve in (kernels.combine, reference.combine):
            total = torch.zeros(len(union.indices), *width, dtype=dst)
            for slots, rows in zip(union.slots, values, strict=True):
                serve(total, slots, rows, OPS[op], 0)
            totals.append(total)
        assert torch.equal(*totals)
        exact = torch.zeros_like(totals[0], dtype=torch.float64)
        if op == "sum":
            for run, rows in zip(runs, values, strict=True):
                exact[torch.searchsorted(union.indices, run)] += rows.double()
            assert torch.equal(totals[0], exact.to(dst)) or dst is torch.float32
