"""Copies that leave the cache out are copies: whatever the strides, and nothing beside them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weft import kernels
from weft.kernels import cpu_copy, pool
from weft.kernels.compile import compiler

SOME = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    compiler.make(cpu_copy.KEY)
    assert compiler.made(cpu_copy.KEY)


@pytest.fixture
def small(monkeypatch):
    """Tensors of any size count as large, and rows of any width as wide."""
    monkeypatch.setattr(cpu_copy, "LEAST", 0)
    monkeypatch.setattr(cpu_copy, "_NARROW", 0)


@SOME
@given(
    shape=st.lists(st.sampled_from([1, 2, 3, 7, 40]), min_size=0, max_size=4),
    margin=st.integers(0, 3),
    dtype=st.sampled_from([torch.float32, torch.uint8, torch.complex128, torch.bfloat16]),
    how=st.sampled_from(["plain", "inside", "swapped", "expanded"]),
    threads=st.integers(1, 3),
)
def test_what_is_copied_is_the_same_and_all_else_is_untouched(
    small, monkeypatch, shape, margin, dtype, how, threads
):
    monkeypatch.setattr(pool, "share", lambda nbytes: threads)
    inner = tuple(slice(margin, margin + extent) for extent in shape)
    around = torch.zeros([extent + 2 * margin for extent in shape]).to(dtype)
    if how == "inside":
        values = torch.randint(1, 100, around.shape).to(dtype)[inner]
    elif how == "swapped":
        values = torch.randint(1, 100, shape[::-1]).to(dtype)
        values = values.permute(tuple(reversed(range(len(shape)))))
    elif how == "expanded":
        values = torch.randint(1, 100, shape[1:]).to(dtype).expand(shape)
    else:
        values = torch.randint(1, 100, shape).to(dtype)
    right = around.clone()
    right[inner] = values
    kernels.copy(around[inner], values)
    assert torch.equal(around, right)


@pytest.mark.parametrize(
    ("shape", "part", "streams"),
    [
        ((2, 3, 500), (slice(None), slice(1, 3), slice(4, 400)), True),  # two steps and rows
        ((2, 3, 4, 500), (slice(None), slice(1, 3), slice(1, 3), slice(4, 400)), False),
        ((4, 3, 500), (slice(None), slice(0, 3), slice(0, 500)), True),  # all in one
        ((300, 40), (slice(None), slice(0, 20)), False),  # narrow rows
    ],
)
def test_wide_rows_leave_the_cache_out(shape, part, streams):
    values, out = torch.randn(shape)[part], torch.zeros(shape)[part]
    assert cpu_copy.copy(out, values) is streams
    assert torch.equal(out, values) is streams


def test_other_types_and_shapes_are_left_to_torch(small):
    values = torch.randn(64, 64)
    out = torch.empty(64, 64, dtype=torch.float64)
    kernels.copy(out, values)
    assert torch.equal(out, values.double())
    kernels.copy(out, values[0])
    assert torch.equal(out, values[0].double().expand(64, 64))
    conjugated = torch.randn(64, 64, dtype=torch.complex64).conj()
    into = torch.empty(64, 64, dtype=torch.complex64)
    kernels.copy(into, conjugated)
    assert torch.equal(into, conjugated)


def test_what_is_too_small_is_left_to_torch(monkeypatch):
    asked = []
    monkeypatch.setattr(cpu_copy, "copy", lambda *_: asked.append(1))
    count = cpu_copy.LEAST // 4
    kernels.copy(torch.empty(count - 1), torch.ones(count - 1))
    assert not asked
    kernels.copy(torch.empty(count), torch.ones(count))
    kernels.copy(torch.empty(5), torch.ones(5), among=4 * count)
    assert len(asked) == 2
