"""Sorting, uniting and sampling indices: machine code, reference and Python agree."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weft import kernels
from weft.kernels import indices, jit, reference

DTYPES = [torch.int32, torch.int64]
CODE = jit.loops()
assert CODE is not None, jit.describe()
SOME = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def heights(dtype):
    widest = 31 if dtype is torch.int32 else 62
    return st.one_of(st.integers(1, 300), st.integers(1, widest).map(lambda bits: 2**bits - 1))


def ids_of(generator, count, height, dtype):
    return torch.tensor([generator.randrange(height) for _ in range(count)], dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@SOME
@given(data=st.data(), count=st.integers(0, 300), seed=st.integers(0, 2**32))
def test_distinct(dtype, data, count, seed):
    ids = ids_of(random.Random(seed), count, data.draw(heights(dtype)), dtype)
    shape = data.draw(st.sampled_from(["any", "sorted", "unique", "shuffled", "negative"]))
    if shape == "sorted":
        ids = ids.sort().values
    elif shape in ("unique", "shuffled"):
        ids = ids.unique()
        ids = ids.flip(0) if shape == "shuffled" else ids
    elif shape == "negative":
        ids = -ids
    check_distinct(ids, reference.distinct(ids))
    with pytest.MonkeyPatch.context() as patch:
        ordered = ids.tolist() == sorted(ids.tolist())
        if not ordered and int(ids.max() - ids.min()) < 2**54:  # both fit a word, and it serves
            patch.setattr(reference, "distinct", None)
        check_distinct(ids, kernels.distinct(ids))


def check_distinct(ids, found):
    """The contract, in plain Python."""
    given = ids.tolist()
    places = sorted(range(len(given)), key=lambda i: given[i])
    values = sorted(set(given))
    assert found.indices.tolist() == values and found.indices.dtype == ids.dtype
    if given == sorted(given):
        assert found.order is None
    else:
        assert found.order.tolist() == places and found.order.dtype == torch.int64
    if len(values) == len(given):
        assert found.starts is None
    else:
        starts = [sum(other < value for other in given) for value in values]
        assert found.starts.tolist() == [*starts, len(given)]
    if given == values:
        assert found.indices is ids


@pytest.mark.parametrize("dtype", DTYPES)
@SOME
@given(data=st.data(), runs=st.integers(1, 9), seed=st.integers(0, 2**32))
def test_union(dtype, data, runs, seed):
    generator = random.Random(seed)
    height = data.draw(heights(dtype))
    counts = [generator.choice([0, 1, 5, 60]) for _ in range(runs)]
    several = [ids_of(generator, count, height, dtype).unique() for count in counts]
    check_union(several, reference.union(several))
    check_union(several, kernels.union(several))


@pytest.mark.parametrize("way", ["by a bitmap", "in pairs"])
@SOME
@given(runs=st.integers(2, 9), height=st.integers(1, 500), seed=st.integers(0, 2**32))
def test_all_ways_to_unite(monkeypatch, way, runs, height, seed):
    monkeypatch.setattr(indices, "is_dense", lambda words, total, runs: way == "by a bitmap")
    generator = random.Random(seed)
    several = [ids_of(generator, 40, height, torch.int64).unique() for _ in range(runs)]
    check_union(several, kernels.union(several))


def check_union(runs, union):
    together = sorted(set().union(*(run.tolist() for run in runs)))
    assert union.indices.tolist() == together and union.indices.dtype == runs[0].dtype
    met = set()
    for run, slots in zip(runs, union.slots, strict=True):
        places = [together.index(index) for index in run.tolist()]
        expected = [p if together[p] in met else ~p for p in places]
        assert slots.tolist() == expected and slots.dtype == torch.int32
        met.update(run.tolist())


def test_a_union_of_one_is_a_copy():
    run = torch.tensor([1, 5, 9])
    union = kernels.union([run])
    assert union.indices.tolist() == [1, 5, 9]
    assert union.indices.data_ptr() != run.data_ptr()  # the run may be leased memory


def test_an_unsorted_run_is_named():
    runs = [torch.arange(100), torch.tensor([5, 300, 7])]
    with pytest.raises(ValueError, match="run 1 of 2 is not sorted"):
        kernels.union(runs)


@pytest.mark.parametrize("wrong", [[5, 7, 7], [5, 3]])
def test_torch_operations_notice_each_unsorted_run(monkeypatch, wrong):
    monkeypatch.setattr(jit, "loops", lambda: None)
    with pytest.raises(ValueError, match="run 1 of 2 is not sorted"):
        kernels.union([torch.arange(100), torch.tensor(wrong)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("compile", [False, True])
def test_whether_indices_ascend(monkeypatch, compile, dtype):
    if not compile:
        monkeypatch.setattr(jit, "loops", lambda: None)
    fine = [], [0], [9], [2, 7], [*range(10)]
    wrong = [-1], [10], [2, 2], [7, 2], [-1, 2], [2, 10], [*range(9), 7, 9]
    assert all(kernels.ascends(torch.tensor(ids, dtype=dtype), 9) for ids in fine)
    assert not any(kernels.ascends(torch.tensor(ids, dtype=dtype), 9) for ids in wrong)


def test_indices_that_another_thread_changes_meanwhile_write_nowhere_else():
    memory, given = torch.full((2, 4096), -7), torch.arange(2048) * 5 % 2048
    memory[0, :2048] = given  # and sorting writes there, as that thread would
    target, spare = (each.data_ptr() for each in memory)
    counts = torch.empty(2048, dtype=torch.int32)
    CODE["sort.i64"](target, 2048, 0, 2047, 11, 11, 1, target, spare, counts.data_ptr())
    assert torch.equal(memory[0, :2048], torch.arange(2048) << 11 | given.argsort())
    assert torch.all(memory[:, 2048:] == -7)

    run, (slots, ranks) = torch.arange(100), torch.empty(2, 100, dtype=torch.int32)
    table, bits = torch.tensor([run.data_ptr(), 100, slots.data_ptr()]), torch.empty(2).long()
    known = table.data_ptr(), 1, 0, 2, bits.data_ptr()
    assert CODE["mark.i64"](*known) == 100
    run += 50
    union = torch.full((200,), -7)
    CODE["place.i64"](*known, ranks.data_ptr(), union.data_ptr(), 100)
    assert union.tolist() == [*range(100)] + [-7] * 100


def test_large_inputs_agree():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(10**6, (400_000,), generator=generator)
    skewed = (ids.double() / 10**6).pow(12).mul(10**6).long()
    for some in (ids, skewed):
        ours, expected = kernels.distinct(some), reference.distinct(some)
        assert all(map(torch.equal, ours[:3], expected[:3]))
    runs = list(map(torch.unique, ids.split(100_000)))
    for some in (runs, [run * 1000 for run in runs]):
        ours, expected = kernels.union(some), reference.union(some)
        assert torch.equal(ours.indices, expected.indices)
        assert all(map(torch.equal, ours.slots, expected.slots))


def test_indices_that_are_not_contiguous():
    ids = torch.tensor([[3, 0], [1, 0], [3, 0]])[:, 0]
    assert kernels.distinct(ids).indices.tolist() == [1, 3]
    assert kernels.union([ids[1:2], ids[::2][:1]]).indices.tolist() == [1, 3]
