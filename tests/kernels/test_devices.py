"""The kernels as they serve an accelerator: the results of the CPU, and a host that hardly waits.

Tensors of the `meta` device have no numbers. So what runs on them asks for none; nor does it make
results of a size that depends on them, or mix tensors of the host in, for which torch raises.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from weft import kernels
from weft.devices import as_device, on_host
from weft.kernels import jit, reference
from weft.kernels.ops import DTYPES, OPS, Op

assert jit.loops() is not None, jit.describe()
FIRST = Op("callable first", lambda left, right: left.clone(), builtin=False)
CASES = [(d, op) for d in DTYPES for op in (*OPS.values(), FIRST) if op.refuses(d) is None]
NAMES = [f"{str(d).removeprefix('torch.')}-{op.name}" for d, op in CASES]
SOME = settings(max_examples=40)
INDICES = st.lists(st.integers(0, 30), max_size=60)
INDEX_DTYPES = st.sampled_from([torch.int32, torch.int64])
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same(left, right):
    """Equal bit for bit, any NaN like any other."""
    assert left.dtype == right.dtype and left.shape == right.shape
    if left.dtype.is_floating_point:
        left, right = (torch.where(each.isnan(), torch.nan, each) for each in (left, right))
    assert torch.equal(left.view(BITS[left.itemsize]), right.view(BITS[left.itemsize]))


def some_values(shape, dtype):
    generator = torch.Generator().manual_seed(sum(shape))
    raw = torch.randint(256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return raw.bool().view(shape) if dtype is torch.bool else raw.view(dtype).view(shape)


def test_the_switch():
    there = torch.ones(1)
    with as_device(), as_device():
        assert not on_host(there)
    assert on_host(there) and not on_host(torch.ones(1, device="meta"))


@pytest.mark.parametrize(("dtype", "op"), CASES, ids=NAMES)
@pytest.mark.parametrize("row_shape", [(), (3,), (2, 5), (0,)])
def test_a_merge_is_that_of_the_cpu(dtype, op, row_shape):
    several = [], [4], [1, 3, 9], [9, 1, 3], [5] * 37, [2, 2, 7, 7, 7, 8]
    runs = [torch.tensor(ids, dtype=torch.int64) for ids in several]
    runs += [torch.arange(100) * 7919 % 13]
    values = [some_values((len(run), *row_shape), dtype) for run in runs]

    def merged(distinct):
        parts = []
        for run, rows in zip(runs, values, strict=True):
            found = distinct(run)
            parts.append((found.indices, kernels.reduce(rows, found, op)))
            if len(run):
                last = torch.tensor([len(found.indices) - 1, 0], dtype=torch.int32)
                same(kernels.reduce(rows, found, op, rows=last), parts[-1][1][last])
        return kernels.merge(parts, op, dtype)

    expected = merged(kernels.distinct)
    with as_device():
        found = merged(kernels.distinct)
    assert torch.equal(found[0], expected[0])
    same(found[1], expected[1])


@SOME
@given(some=st.lists(INDICES, min_size=1, max_size=3), dtype=INDEX_DTYPES)
def test_a_survey_is_what_the_host_finds(some, dtype):
    tables = [torch.tensor(ids, dtype=dtype) for ids in some]
    for indices, found in zip(tables, kernels.survey(tables, 8, 5), strict=True):
        expected, ids = kernels.distinct(indices), sorted(set(indices.tolist()))
        for ours, other in zip(found.distinct[:3], expected[:3], strict=True):
            assert (ours is None) == (other is None) and (ours is None or torch.equal(ours, other))
        assert found.distinct.indices.dtype == dtype
        assert found.distinct.most == max((indices.tolist().count(each) for each in ids), default=0)
        assert (found.lowest, found.highest) == ((ids[0], ids[-1]) if ids else (0, -1))
        parts = min(8, len(ids))
        assert found.points == [ids[j * len(ids) // parts] for j in range(parts)]
        assert found.sample == kernels.sketch(expected.indices, 5).tolist()
        (other,) = kernels.survey([torch.tensor(ids[::-1])], 8, 5)
        assert other.digest == found.digest and len(found.digest) == 16 and any(found.digest)
        if ids:
            (less,) = kernels.survey([indices[indices != ids[-1]]], 8, 5)
            assert less.digest != found.digest


@SOME
@given(some=st.lists(INDICES, min_size=1, max_size=5), dtype=INDEX_DTYPES)
def test_a_union_is_that_of_the_cpu(some, dtype):
    runs = [torch.tensor(sorted(set(ids)), dtype=dtype) for ids in some]
    expected = kernels.union(runs, (7, 2**40))
    with as_device():
        found = kernels.union(runs, (7, 2**40))
    assert torch.equal(found.indices, expected.indices) and found.span == expected.span
    assert found.indices[slice(*found.span)].tolist() == [i for i in expected.indices if i >= 7]
    assert all(map(torch.equal, found.slots, expected.slots))


@SOME
@given(some=st.lists(INDICES, min_size=1, max_size=5), dtype=INDEX_DTYPES)
def test_shares_are_those_of_the_cpu(some, dtype):
    runs, weights = [torch.tensor(sorted(set(ids)), dtype=dtype) for ids in some], [5, 1, 3, 9, 2]
    weights = weights[: len(runs)]
    union, expected = kernels.unite_and_share(runs, weights)
    places = torch.arange(0, len(union.indices), 2)

    def used(slots, shares):
        found = [torch.tensor(shares.starts), *shares[:3], kernels.held(slots, places)]
        for run, its in enumerate(slots):
            found += kernels.deal(its, shares, run)
            for to in range(len(slots)):
                found += kernels.pick(its, shares, run, to)
        bits = kernels.bitmap(union.indices, 31)
        for united in (kernels.unite_bitmap(bits, runs[0], len(union.indices)), union):
            found += [united.indices, united.slots[0]]
        return [*found, kernels.unite_bitmap(bits, runs[0]).indices]

    with as_device():
        again, shares = kernels.unite_and_share(runs, weights)
        found = used(again.slots, shares)
    assert torch.equal(again.indices, union.indices)
    for ours, other in zip(found, used(union.slots, expected), strict=True):
        assert ours.dtype == other.dtype and torch.equal(ours, other)


def test_runs_that_are_not_sorted_and_unique_are_refused():
    with as_device():
        for wrong in ([5, 7, 7], [5, 3]):
            with pytest.raises(ValueError, match="run 1 of 2 is not sorted"):
                kernels.union([torch.arange(100), torch.tensor(wrong)])


def test_functions_are_given_no_garbage():
    """What is in the place of a row that is the first is not initialised."""
    seen = []
    op = Op("callable see", lambda left, right: seen.append(left) or left + right, builtin=False)
    with as_device():
        kernels.combine(torch.full((3,), 9e9), torch.tensor([-1, ~2]).int(), torch.ones(2), op)
    assert all(bool((left < 9e9).all()) for left in seen)


class Waits(TorchFunctionMode):
    """Counts reads; fails where a host would wait for an accelerator, or an accelerator for it."""

    FORBIDDEN = ("tolist", "item", "numpy", "cpu", "tensor", "as_tensor", "from_numpy", "bincount")
    FORBIDDEN += ("nonzero", "unique", "masked_select", "equal", "is_nonzero", "argwhere")
    FORBIDDEN += ("allclose", "__bool__", "__int__", "__index__", "__float__", "__array__")

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        assert not name.startswith(self.FORBIDDEN), name
        assert name != "repeat_interleave" or "output_size" in kwargs
        if name in ("__getitem__", "__setitem__"):
            assert not any(getattr(at, "dtype", None) is torch.bool for at in args[1:2]), name
            assert name == "__getitem__" or isinstance(args[2], torch.Tensor), name
        return func(*args, **kwargs)


@pytest.fixture
def reads(monkeypatch):
    """What is asked of a device without numbers, and the answers that it is to give."""
    answers = []

    def read(numbers):
        assert numbers.device.type == "meta" and numbers.dtype is torch.int64
        answer = answers.pop(0)
        assert numbers.shape == (len(answer),)
        return answer

    monkeypatch.setattr(reference, "read", read)
    with Waits():
        yield answers
    assert not answers


def empty(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def test_one_read_for_all_tables(reads):
    numbers = [1, 8, 3, 0, 9, 5, 5, *range(4), *range(6)]
    reads.append(numbers + numbers)
    surveys = kernels.survey([empty(20, dtype=torch.int64), empty(30, dtype=torch.int32)], 4, 6)
    assert [len(each.distinct.indices) for each in surveys] == [8, 8]
    reads += [[1, 8, 3, 0, 9, 5, 5], [0, 0, 1, 2]]
    kernels.distinct(empty(20, dtype=torch.int64))
    kernels.lie_within(empty(20, dtype=torch.int64), 0, 9)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_one_read_for_a_union(reads, index_dtype):
    reads.append([0, 7, 2, 4])
    union = kernels.union([empty(count, dtype=index_dtype) for count in (4, 0, 5)], (3, 6))
    assert len(union.indices) == 7 and union.span == (2, 4)


def test_one_read_to_share_a_union(reads):
    reads.append([0, 7, 0, 2, 4, 6, 7, 3, 1, 1, 4])
    runs = [empty(4, dtype=torch.int64), empty(5, dtype=torch.int64)]
    union, shares = kernels.unite_and_share(runs, [1, 2])
    assert [len(rows) for rows in kernels.deal(union.slots[0], shares, 0)] == [3, 1]
    assert len(kernels.pick(union.slots[1], shares, 1, to=1).rows) == 4 == len(shares.of(0))
    kernels.held(union.slots, empty(3, dtype=torch.int64))
    bits = kernels.bitmap(union.indices, 100)
    assert len(kernels.unite_bitmap(bits, runs[0], 7).indices) == 7


@pytest.mark.parametrize(("dtype", "op"), CASES, ids=NAMES)
def test_values_are_combined_without_a_read(reads, dtype, op):
    longs, values = empty(20, dtype=torch.int64), empty(20, 4, dtype=dtype)
    found = kernels.Distinct(empty(8, dtype=torch.int64), longs, empty(9, dtype=torch.int64), 5)
    assert kernels.reduce(values, found, op).shape == (8, 4)
    assert kernels.reduce(values, found._replace(order=None), op).shape == (8, 4)
    some, total = empty(3, dtype=torch.int32), op.accumulator(dtype)
    for distinct in (found, kernels.Distinct(longs, longs, None, 1)):
        kernels.reduce(values, distinct, op, rows=some)
    out = empty(8, 4, dtype=total)
    kernels.combine(out, some, values[:3], op)
    kernels.finish(out, out.to(dtype), 3 if op.mean else 1)
    kernels.put(out, some, out[:3])
    kernels.take(out, some)
