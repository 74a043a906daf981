"""The kernels as they serve an accelerator: the results of the CPU, and a host that hardly waits.

Tensors of the `meta` device have no numbers. So what runs on them reads none, and makes no result
whose size depends on them: torch raises there. `Copies` raises for what else makes a host wait.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from cases import in_case
from weft import kernels
from weft.base.devices import as_device
from weft.kernels import jit, reference
from weft.kernels.ops import DTYPES, OPS, Op

assert jit.loops() is not None, jit.describe()
FIRST = Op("callable first", lambda left, right: left.clone(), builtin=False)
CASES = [(d, op) for d in DTYPES for op in (*OPS.values(), FIRST) if op.refuses(d) is None]
NAMES = [f"{str(d).removeprefix('torch.')}-{op.name}" for d, op in CASES]
# each dtype once, and each op in a dtype of each kind
EACH_ONCE = [(d, op) for d, op in CASES if op.name == "sum" or d in (torch.int32, torch.bfloat16)]
SOME = settings(max_examples=20)
TABLES = st.lists(st.lists(st.integers(0, 30), max_size=60), min_size=1, max_size=5)
INDEX_DTYPES = st.sampled_from([torch.int32, torch.int64])


def equal(ours, other):
    """Lists of tensors and None are equal, bit for bit."""
    for left, right in zip(ours, other, strict=True):
        assert (left is None) == (right is None)
        if left is not None:
            assert left.dtype == right.dtype and torch.equal(left, right)
            assert torch.equal(left.signbit(), right.signbit())


@pytest.mark.parametrize(("dtype", "op"), CASES, ids=NAMES)
def test_a_merge_is_that_of_the_cpu(dtype, op):
    several = [], [4], [1, 3, 9], [9, 1, 3], [5] * 37, [2, 2, 7, 7, 7, 8], [*range(0, 99, 7)] * 5
    runs = [torch.tensor(ids, dtype=torch.int64) for ids in several]
    draws = torch.Generator().manual_seed(1)

    def merged(values):
        parts = []
        for run, rows in zip(runs, values, strict=True):
            found = kernels.distinct(run)
            rows = rows.to(dtype)
            reduced = kernels.reduce(rows, found, op)
            if op.name in ("sum", "avg"):
                reduced = reduced + torch.zeros((), dtype=dtype)  # whose -0.0 may be 0.0
            parts.append((found.indices, reduced))
        return kernels.merge(parts, op)

    for row_shape in ((), (2, 5), (0,)):
        with in_case(row_shape):
            values = [
                torch.randint(-4, 5, (len(i), *row_shape), generator=draws) / -3.0 for i in runs
            ]
            expected = merged(values)
            with as_device():
                equal(merged(values), expected)


@SOME
@given(some=TABLES, dtype=INDEX_DTYPES)
def test_a_survey_is_what_the_host_finds(some, dtype):
    tables = [torch.tensor(ids, dtype=dtype) for ids in some]
    for indices, found in zip(tables, kernels.survey(tables, 8), strict=True):
        expected, ids = kernels.distinct(indices), sorted(set(indices.tolist()))
        equal(found.distinct[:3], expected[:3])
        assert found.distinct.most == max((indices.eq(each).sum() for each in ids), default=0)
        assert (found.lowest, found.highest) == ((ids[0], ids[-1]) if ids else (0, -1))
        parts = min(8, len(ids))
        assert found.points == [ids[j * len(ids) // parts] for j in range(parts)]


@SOME
@given(some=TABLES, dtype=INDEX_DTYPES)
def test_unions_are_those_of_the_cpu(some, dtype):
    runs = [torch.tensor(sorted(set(ids)), dtype=dtype) for ids in some]

    def parts(union):
        return [union.indices, *union.slots]

    expected, ids = parts(kernels.union(runs)), {each for ids in some for each in ids}
    ends = [0, 7, 2**31, 2**63]
    with as_device():
        equal(parts(kernels.union(runs)), expected)
        union = kernels.union(runs, ends, 30)
        equal(parts(union), expected)
        assert union.below == [sum(each < end for each in ids) for end in ends]


@pytest.mark.parametrize("wrong", [[5, 7, 7], [5, 3], [-1, 2], [5, 100]])
def test_runs_that_are_not_sorted_and_unique_are_refused(wrong):
    runs, text = [torch.arange(100), torch.tensor(wrong)], "run 1 of 2 is not sorted|out of bounds"
    with as_device(), pytest.raises(ValueError, match=text):
        kernels.union(runs, highest=99)


def test_functions_are_given_no_garbage():
    """What is in the place of a row that is the first is not initialised."""
    seen = []
    op = Op("callable see", lambda left, right: seen.append(left) or left + right, builtin=False)
    with as_device():
        kernels.combine(torch.full((3,), 9e9), torch.tensor([-1, ~2]).int(), torch.ones(2), op)
    assert [float(left.max()) for left in seen] == [1.0]


class Copies(TorchFunctionMode):
    """Fails where numbers would be copied from the host's memory, or a mask be counted to write."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        assert name not in ("tensor", "as_tensor", "from_numpy")
        assert all(each.is_meta for each in args if isinstance(each, torch.Tensor)), name
        if name == "__setitem__":
            assert isinstance(args[2], torch.Tensor)
            assert getattr(args[1], "dtype", None) is not torch.bool
        return func(*args, **kwargs or {})


@pytest.fixture
def reads(monkeypatch):
    """The answers to what is asked of a device without numbers."""
    answers = []

    def read(numbers):
        assert numbers.device.type == "meta" and numbers.dtype is torch.int64
        assert numbers.shape == (len(answers[0]),)
        return answers.pop(0)

    monkeypatch.setattr(reference, "read", read)
    monkeypatch.setattr(reference, "there", lambda some, like: like.new_empty(len(some)))
    with Copies():
        yield answers
    assert not answers


def empty(*shape, dtype=torch.int64):
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_indices_take_one_read(reads, dtype):
    table = empty(20, dtype=dtype)
    reads += [2 * [1, 8, 3, 0, 9, *range(4)], [1, 8, 3, 0, 9], [0, 1, 2]]
    surveys = kernels.survey([table, table], 4)
    assert [len(each.distinct.indices) for each in surveys] == [8, 8]
    assert len(kernels.distinct(table).starts) == 9 and kernels.ascends(table, 9)

    runs = [empty(count, dtype=dtype) for count in (4, 0, 5)]
    reads += [[0, 7, 2, 4]]
    assert kernels.union(runs, (3, 6)).below == [2, 4]


@pytest.mark.parametrize(("dtype", "op"), EACH_ONCE)
def test_values_take_none(reads, dtype, op):
    values, some = empty(20, 4, dtype=dtype), empty(3, dtype=torch.int32)
    found = kernels.Distinct(empty(8), empty(20), empty(9), 5)
    for distinct in (found, found._replace(order=None), found._replace(order=None, most=1)):
        assert kernels.reduce(values, distinct, op).shape == (8, 4)
    unique = kernels.Distinct(empty(20), empty(20), None, 1)
    assert kernels.reduce(values, unique, op).shape == (20, 4)
    out = empty(8, 4, dtype=op.accumulator(dtype))
    kernels.combine(out, some, values[:3], op)
    kernels.finish(out, out.to(dtype), 3 if op.mean else 1)
