"""`weft.schedules.dense`: the dense all-reduce in posts, on the threads wire, which is strict; and
by verbs."""

from __future__ import annotations

import functools
import operator
import random
import sys
import time

import pytest
import torch
import torch.distributed as dist

from cases import in_case, on_hosts
from weft import WeftError
from weft.base.tensors import as_bytes
from weft.kernels import pool
from weft.schedules import dense, hosts_of
from weft.testing import run, spmd

UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.fixture(params=["small", "one piece", "many chunks"])
def form(request, monkeypatch):
    """Each of the ways a tensor of a few thousand elements may go."""
    monkeypatch.setattr(dense, "SENT_WHOLE", 1 << 30 if request.param == "small" else 0)
    monkeypatch.setattr(dense, "SCRATCH", 1 << 10 if request.param == "many chunks" else 1 << 30)
    monkeypatch.setattr(dense, "BLOCK", 100)


def integers(rank: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    """Numbers over the whole range of the dtype, so that sums wrap and orders show."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator)
    return values.view(torch.uint8).view(dtype)[:count].clone()


def floats(ranks: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """What each rank has."""
    generators = [torch.Generator().manual_seed(rank) for rank in range(ranks)]
    return [torch.randn(1001, generator=each).to(dtype) for each in generators]


OPS = {
    "sum": operator.add,
    "prod": operator.mul,
    "min": min,
    "max": max,
    "band": operator.and_,
    "bor": operator.or_,
    "bxor": operator.xor,
}


def exact(op: str, parts: list[torch.Tensor]) -> list[int]:
    """With Python's integers, which never wrap."""
    limits = torch.iinfo(parts[0].dtype)
    return [
        (functools.reduce(OPS[op], numbers) - limits.min) % 2**limits.bits + limits.min
        for numbers in zip(*(part.tolist() for part in parts), strict=True)
    ]


def reduce_integers(group, dtype, op, count):
    mine = integers(group.rank, dtype, count)
    assert dense.dense_all_reduce(group, mine, op).wait()[0] is mine
    assert mine.tolist() == exact(op, [integers(r, dtype, count) for r in range(group.size)])


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", UNSIGNED + SIGNED, ids=str)
def test_integers_reduce_as_integers_do(form, dtype, op):
    run(3, reduce_integers, dtype, op, 301)


@pytest.mark.parametrize(
    ("size", "count"), [(2, 1), (2, 2049), (4, 1000), (5, 7), (5, 2049), (8, 1), (8, 1000)]
)
def test_any_count_among_any_number_of_ranks(form, size, count):
    run(size, reduce_integers, torch.int32, "sum", count)


def reduce_floats(group, dtype):
    parts = floats(group.size, dtype)
    mine = parts[group.rank].clone()
    dense.dense_all_reduce(group, mine, "sum").wait()
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    expected = parts[0].to(wide)
    for part in parts[1:]:
        expected = expected + part.to(wide)
    assert torch.equal(mine, expected.to(dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats_add_in_rank_order_and_round_once(form, dtype):
    run(5, reduce_floats, dtype)


def reduce_bools(group):
    mine = torch.tensor([False, group.rank == 1, True])
    for op, expected in {
        "sum": [False, True, True],
        "max": [False, True, True],
        "bor": [False, True, True],
        "prod": [False, False, True],
        "min": [False, False, True],
        "band": [False, False, True],
    }.items():
        value = mine.clone()
        dense.dense_all_reduce(group, value, op).wait()
        assert value.tolist() == expected, op


def test_bools_are_or_and_and(form):
    run(3, reduce_bools)


def reduce_nan(group, op):
    mine = torch.tensor([1.0, torch.nan if group.rank == 0 else 2.0, -torch.inf] * 50)
    dense.dense_all_reduce(group, mine, op).wait()
    assert mine.isnan().tolist() == [False, True, False] * 50
    assert (mine[2] == -torch.inf).item() or op == "prod"


@pytest.mark.parametrize("op", ["min", "max", "sum", "prod"])
def test_nan_wins(form, op):
    run(3, reduce_nan, op)


def reduce_zeros(group, op, dtype):
    ranks, signs = range(group.size), torch.arange(500)[:, None] >> torch.arange(group.size) & 1
    zeros = torch.where(signs == 1, -0.0, 0.0).to(dtype)
    mine = zeros[:, group.rank].contiguous()
    dense.dense_all_reduce(group, mine, op).wait()
    negative = [zeros[:, rank].signbit() for rank in ranks]
    expected = functools.reduce(torch.logical_or if op == "min" else torch.logical_and, negative)
    assert torch.equal(mine.signbit(), expected)


@pytest.mark.parametrize("op", ["min", "max"])
def test_minus_zero_is_less_than_zero_wherever_a_tensor_is_cut(form, op):
    for dtype in FLOATS:
        run(3, reduce_zeros, op, dtype)


def reduce_two(group):
    pauses = random.Random(group.rank)
    for number in range(2):
        mine = [integers(10 * group.rank + each, torch.int32, 2049) for each in range(2)]
        under_way = [dense.dense_all_reduce(group, each, "sum") for each in mine]
        for each in under_way:
            time.sleep(pauses.choice([0, 0, 1e-4]))
            each.wait()
        for each, found in enumerate(mine):
            parts = [integers(10 * r + each, torch.int32, 2049) for r in range(group.size)]
            assert found.tolist() == exact("sum", parts), number


@pytest.mark.parametrize("size", [2, 3])
def test_two_may_be_under_way(form, size):
    run(size, reduce_two)


def refuse(group, op, dtype, text):
    with pytest.raises(WeftError, match=text):
        dense.dense_all_reduce(group, torch.ones(3, dtype=dtype), op)


@pytest.mark.parametrize(
    ("op", "dtype", "text"),
    [
        ("mean", torch.float32, "rank 0: op 'mean' is unknown: use one of sum,"),
        ("band", torch.float32, "rank 0: op band does not apply to torch.float32"),
        ("max", torch.complex64, "rank 0: op max does not apply to torch.complex64"),
    ],
)
def test_what_cannot_be_reduced_is_refused_before_anything_is_sent(op, dtype, text):
    run(1, functools.partial(refuse, op=op, dtype=dtype, text=text))


def count_bytes(group):
    tensor = torch.ones(64 * 1024 * group.size)
    group.traffic.reset()
    dense.dense_all_reduce(group, tensor, "sum").wait()
    assert group.traffic.to == dict.fromkeys(group.peers, 2 * tensor.nbytes // group.size)
    chunk = dense.SCRATCH // (group.size - 1)
    chunks = -(-tensor.nbytes // group.size // chunk)
    assert group.traffic.messages == 2 * (group.size - 1) * chunks
    assert group.traffic.bytes == 2 * tensor.nbytes * (group.size - 1) // group.size


@pytest.mark.parametrize("size", [2, 3, 8])
def test_each_part_goes_to_its_rank_and_its_sum_to_all(size):
    run(size, count_bytes)


@pytest.fixture
def two_threads():
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(("op", "dtype"), [("sum", torch.float32), ("avg", torch.bfloat16)])
def test_two_threads_reduce_what_one_does(op, dtype, inference, two_threads):
    with torch.inference_mode(inference):
        parts = [torch.randn(1 << 20).to(dtype) for _ in range(3)]
        shared, alone = torch.empty(1 << 20, dtype=dtype), torch.empty(1 << 20, dtype=dtype)
        assert pool.share(3 * shared.nbytes) == 2
        dense.reduce(parts, op, shared)
        torch.set_num_threads(1)
        dense.reduce(parts, op, alone)
        assert torch.equal(shared, alone)


THREADS = """
import os, threading, numpy, torch
from weft.schedules import dense
def of_others():
    return len(os.listdir("/proc/self/task")) - threading.active_count()
torch.set_num_threads(2)
parts = [torch.from_numpy(numpy.ones(1 << 20, numpy.float32)) for _ in range(4)]
before = of_others()
dense.reduce(parts[:3], "sum", parts[3])
print(of_others() - before, parts[3][-1].item())
torch.add(parts[0], parts[1])
print(of_others() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks at threads in /proc")
def test_torch_s_threads_are_not_asked(programs):
    """They would spin for more, on cores that other ranks need."""
    out, errors = programs(THREADS).communicate()
    assert out.splitlines() == ["0 3.0", "1"], errors


# Hosts of several ranks.


def reduce_on_hosts(group, places, dtype, op):
    """Integers, whose sums are the same in any order, and floats; two are under way."""
    parts = floats(group.size, dtype)
    mine, other = parts[group.rank].clone(), torch.full((700,), group.rank, dtype=torch.int16)
    pairs = (mine, op), (other, "max")
    with on_hosts(group, places):
        reduce_integers(group, torch.int64, "sum", 2049)
        for pending in [dense.dense_all_reduce(group, each, op) for each, op in pairs]:
            pending.wait()
        by_host = hosts_of(group).ranks
    assert other.tolist() == [group.size - 1] * 700
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    if len({*map(len, by_host)}) > 1:  # then in rank order
        by_host = (range(group.size),)
    sums = [sum(parts[rank].to(wide) for rank in ranks) for ranks in by_host]
    total = sum(sums) / (group.size if op == "avg" else 1)
    assert torch.equal(mine, total.to(dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("chunk", [1 << 10, 1 << 30])
def test_a_host_adds_first_what_its_ranks_have(monkeypatch, dtype, op, chunk):
    monkeypatch.setattr(dense, "SENT_WHOLE", 0)
    monkeypatch.setattr(dense, "SCRATCH", chunk)
    for places in ("aabb", "abab", "aaabbbccc", "aab", "abcd", "aabbccdd"):
        with in_case(places):
            run(len(places), reduce_on_hosts, places, dtype, op)


def test_the_link_of_a_host_carries_a_part_of_each_rank():
    nbytes = 1 << 20

    def program(group):
        with on_hosts(group, "aaaabbbb"):
            dense.dense_all_reduce(group, torch.ones(nbytes // 4), "sum").wait()
            far = {peer for peer in group.peers if group.hosts[peer] != group.hosts[group.rank]}
        return sum(count for peer, count in group.traffic.to.items() if peer in far)

    sent = sum(run(8, program)[:4])
    assert sent == nbytes


# By verbs: of posts on threads, of a process group of gloo's between processes.


def given_by(rank, dtype):
    """Numbers of a rank, among them all that are special."""
    draw = torch.Generator().manual_seed(rank)
    if dtype in (*UNSIGNED, *SIGNED):
        return integers(rank, dtype, 301)
    if dtype is torch.bool:
        return torch.rand(301, generator=draw) < 0.5
    if dtype.is_complex:
        return torch.randn(301, generator=draw, dtype=dtype)
    found = torch.randn(301, generator=draw, dtype=torch.float64)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan, 1.0, -1.0])
    found[:64] = special[torch.randint(8, (64,), generator=draw)]
    return found.to(dtype)


@spmd(1, 2, 3, on=("verbs", "gloo"))
def test_by_verbs_all_ranks_get_the_same_which_is_that_of_the_wire_but_for_the_order(group):
    for dtype in (*UNSIGNED, *SIGNED, *FLOATS, torch.complex64, torch.bool):
        given = [given_by(rank, dtype) for rank in range(group.size)]
        for op in (*OPS, "avg"):
            if dense.refuses(op, dtype):
                continue
            wanted = torch.empty_like(given[0])
            dense.reduce(given, op, wanted)
            found = given[group.rank].clone()
            pending = group.worker.call(
                op, lambda f=found, o=op: dense.dense_all_reduce(group, f, o)
            )
            assert pending.wait()[0] is found
            is_rounded = (dtype.is_floating_point or dtype.is_complex) and op not in ("min", "max")
            if is_rounded and group.size > 2:
                torch.testing.assert_close(found, wanted, equal_nan=True)
            else:
                torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
                numbers = ~wanted.isnan()
                if dtype.is_floating_point:
                    assert found.signbit()[numbers].equal(wanted.signbit()[numbers]), (dtype, op)
            said = group.all_gather_bytes(as_bytes(found).numpy().tobytes(), bytes)
            assert len({*said}) == 1, (dtype, op)


@spmd(3, on=("gloo",))
def test_a_process_group_reduces_in_one_collective_what_it_can(group, monkeypatch):
    began = []
    for name in ("all_reduce", "all_gather_single", "all_gather_into_tensor"):
        if collective := getattr(dist, name, None):
            begin = functools.partial(noted, began, name, collective)
            monkeypatch.setattr(dist, name, begin)
    for dtype, op in ((torch.bfloat16, "avg"), (torch.complex64, "sum"), (torch.float64, "max")):
        mine = torch.ones(9, dtype=dtype)
        group.worker.call(op, lambda m=mine, o=op: dense.dense_all_reduce(group, m, o).wait())
    assert began == ["all_reduce"] * 3
    mine = torch.ones(9, dtype=torch.int16)
    group.worker.call("sum", lambda: dense.dense_all_reduce(group, mine, "sum").wait())
    assert len(began) == 4 and "all_gather" in began[-1]


def noted(began, name, collective, *args, **kwargs):
    began.append(name)
    return collective(*args, **kwargs)
