"""The four calls of the backend that are weft's: results, what tensors become, and errors."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import weft
from cases import in_default_group
from weft.schedules import dense
from weft.testing import run

AVG = dist.ReduceOp.AVG
COUNTS = (0, 1, 5, 40_000)

# The sizes of the tensors that a call on two ranks is given, and the call.
CALLS = {
    "all_reduce": ([4], lambda t, **how: dist.all_reduce(t[0], **how)),
    "all_gather_single": ([8, 4], lambda t, **how: dist.all_gather_single(*t, **how)),
    "reduce_scatter_single": ([4, 8], lambda t, **how: dist.reduce_scatter_single(*t, **how)),
}


@pytest.fixture
def ranks(tmp_path):
    """`ranks(size, body)` runs `body(me, size)` in torch's default group, of backend cpu:weft."""
    return lambda size, body: run(size, in_group, body, tmp_path, on="processes")


def in_group(group, body, folder):
    with in_default_group(group, folder, "cpu:weft"):
        return body(group.rank, group.size)


def part(rank, count, dtype=torch.float32):
    """A rank's values: small integers, so that sums are exact in every dtype."""
    return ((torch.arange(count) + 3 * rank) % 5).to(dtype)


def finished(call, tensors, **how):
    work = call(tensors, **how)
    if work is not None:
        work.wait()


def results(me, size):
    """Of tensors that go along with the opening, and of large ones; of uint4 nothing is added."""
    for count, dtype in itertools.product(COUNTS, (torch.float32, torch.bfloat16, torch.int16)):
        parts = [part(rank, count, dtype) for rank in range(size)]
        for op, combine in (("SUM", Tensor.sum), ("MAX", Tensor.amax)):
            total = parts[me].clone()
            dist.all_reduce(total, getattr(dist.ReduceOp, op))
            wanted = combine(torch.stack(parts).double(), 0).to(dtype)
            assert torch.equal(total, wanted), (op, count, dtype)
        whole = torch.empty(size * count, dtype=dtype)
        dist.all_gather_single(whole, parts[me])
        assert torch.equal(whole, torch.cat(parts)), (count, dtype)
        scattered = torch.empty(count, dtype=dtype)
        dist.reduce_scatter_single(scattered, torch.cat(parts))
        assert torch.equal(scattered, (size * parts[me].double()).to(dtype)), (count, dtype)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_every_rank_gets_the_result(ranks, size):
    ranks(size, results)


def chunks(me, size):
    whole = part(me, size * 1000)
    out = torch.empty(1000)
    with pytest.MonkeyPatch.context() as patch:  # the process is kept for other tests
        patch.setattr(dense, "SCRATCH", 1 << 10)
        dist.reduce_scatter_single(out, whole)
    wanted = sum(part(rank, size * 1000) for rank in range(size)).chunk(size)[me]
    assert torch.equal(out, wanted)


def test_what_is_scattered_goes_in_chunks(ranks):
    ranks(3, chunks)


def means(me, size):
    """Of numbers whose sum may be too large for their dtype: rounded once, when it is divided."""
    for dtype, count in itertools.product((torch.float16, torch.float8_e4m3fn), (3, 40_000)):
        parts = [
            (torch.finfo(dtype).max * (0.6 + 0.1 * rank) - torch.arange(count) % 7).to(dtype)
            for rank in range(size)
        ]
        right = (sum(each.float() for each in parts) / size).to(dtype).float()
        summed, single = parts[me].clone(), torch.empty_like(parts[me])
        dist.all_reduce(summed, AVG)
        dist.reduce_scatter_single(single, parts[me].repeat(size), AVG)
        assert torch.equal(summed.float(), right), (dtype, count)
        assert torch.equal(single.float(), right), (dtype, count)


def test_means_of_narrow_numbers_are_rounded_once(ranks):
    ranks(2, means)


def in_one_memory(me, size):
    """What is sent lies where another rank's part is received: all of it is sent first."""
    for count in (4, 40_000):
        whole = torch.zeros(size * count)
        mine = whole[me * count :][:count]  # as FSDP has it
        mine.copy_(part(me, count))
        dist.all_gather_single(whole, mine)
        assert torch.equal(whole, torch.cat([part(rank, count) for rank in range(size)]))
        whole = torch.zeros(size * count)
        other = whole[(me + 1) % size * count :][:count]
        other.copy_(part(me, count))
        dist.all_gather_single(whole, other)
        assert torch.equal(whole, torch.cat([part(rank, count) for rank in range(size)]))
        whole = part(me, size * count)
        total = sum(part(rank, size * count) for rank in range(size))
        dist.reduce_scatter_single(whole[:count], whole)
        assert torch.equal(whole[:count], total.chunk(size)[me])


def test_tensors_may_lie_in_one_another(ranks):
    ranks(3, in_one_memory)


def strided(me, size):
    """Of which gloo takes the memory from the first element on."""
    columns = torch.ones(5, 2)
    dist.all_reduce(columns[:, 0])
    assert columns.tolist() == [[size, 1.0]] * 5
    whole, out = torch.ones(2 * size, 2)[:, 0], torch.zeros(2, 2)
    dist.reduce_scatter_single(out[:, 1], whole)
    assert out.tolist() == [[0.0, size]] * 2
    gathered = torch.zeros(2 * size, 2)
    dist.all_gather_single(gathered[:, 1], out[:, 1])
    assert gathered[:, 1].eq(size).all() and not gathered[:, 0].any()


def test_tensors_need_not_be_contiguous(ranks):
    ranks(2, strided)


def rows(me, size):
    """Sparse tensors: of inference mode, and complex ones."""
    given = torch.sparse_coo_tensor([[me]], torch.ones(1) * 1j, (5,), check_invariants=True)
    with pytest.raises(weft.WeftError, match="complex64 are not supported"):
        dist.all_reduce(given)  # in whose place torch hands over a view of real numbers
    with torch.inference_mode():
        made = torch.sparse_coo_tensor([[me]], torch.ones(1), (5,), check_invariants=True)
    dist.all_reduce(made)
    assert made.to_dense().sum() == size


def test_rows_of_any_kind_are_reduced(ranks):
    ranks(2, rows)


def versions(me, size):
    """Which autograd goes by: what is written in place keeps its own, as with gloo."""
    gloo = dist.new_group(backend="gloo")
    for (name, (sizes, call)), later in itertools.product(CALLS.items(), (False, True)):
        raised = []
        for group in (gloo, dist.group.WORLD):
            tensors = [torch.ones(count) for count in sizes]
            finished(call, tensors, group=group, async_op=later)
            raised.append([tensor._version > 0 for tensor in tensors])
        assert raised[0] == raised[1], (name, later)
    weight = torch.ones(4, requires_grad=True)
    hidden = torch.relu(weight)
    dist.all_reduce(hidden)
    hidden.sum().backward()  # which reads what the activation holds now
    assert weight.grad.eq(1).all()


def test_autograd_knows_what_it_knows_of_gloo(ranks):
    ranks(2, versions)


def memory_of_the_callers(me, size):
    """Storages may be resized afterwards, as FSDP does, and tensors get others meanwhile."""
    for (name, (sizes, call)), later in itertools.product(CALLS.items(), (False, True)):
        tensors = [torch.ones(count) for count in sizes]
        kept, others = [each.detach() for each in tensors], [torch.zeros(7) for _ in sizes]
        go = threading.Event()
        if later:
            dist.group.WORLD.weft_group.worker.submit("busy", lambda go=go: go.wait(30))
        work = call(tensors, async_op=later)
        if later:
            for each, other in zip(tensors, others, strict=True):
                each.data = other
            go.set()
            work.wait()
        assert not any(other.any() for other in others), name
        assert kept[0].eq(1 if name == "all_gather_single" else size).all(), name
        last = [weakref.ref(each) for each in (*tensors, *kept)]
        for each in kept:
            each.untyped_storage().resize_(0)
        del tensors, kept, each, work
        deadline = time.monotonic() + 10
        while any(each() is not None for each in last) and time.monotonic() < deadline:
            time.sleep(0.01)  # until the worker's thread has left the call
        assert [each() for each in last] == [None] * len(last), name


def without_collections(me, size):
    gc.collect()
    gc.disable()
    try:
        memory_of_the_callers(me, size)
    finally:  # other tests run in this process
        gc.enable()


def test_memory_stays_the_callers(ranks):
    ranks(2, without_collections)


def faked(me, size):
    """Under the caller's FakeTensorMode nothing is sent: here one rank alone calls."""
    if me == 0:
        for sizes, call in CALLS.values():
            with FakeTensorMode():
                finished(call, [torch.ones(count) for count in sizes])
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == size


def test_nothing_is_sent_under_a_fake_mode(ranks):
    ranks(2, faked)


WRONG = {
    "another size": (lambda t: [torch.ones(2 * len(each)) for each in t], "differ in sizes"),
    "another dtype": (lambda t: [each.double() for each in t], "differ in dtype"),
    "meta": (lambda t: [each.to("meta") for each in t], "rank 1: a tensor is on the meta device"),
    "expanded": (
        lambda t: [torch.ones(1).expand(len(each)) for each in t],
        "rank 1: elements of a tensor share memory",
    ),
}


def erring(me, size):
    """Each wrong on rank 1, at once and later: all say the same, and the next call works."""
    said = []
    for (name, (sizes, call)), (what, (spoil, text)) in itertools.product(
        CALLS.items(), WRONG.items()
    ):
        for later in (False, True):
            tensors = [torch.ones(count) for count in sizes]
            with pytest.raises(weft.WeftError, match=text) as caught:
                finished(call, spoil(tensors) if me == 1 else tensors, async_op=later)
            said.append(str(caught.value))
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total.item() == size, (name, what)
    group = dist.group.WORLD
    for name, right, wrong in (
        ("all_gather_single", (torch.ones(8), torch.ones(4)), (torch.ones(9), torch.ones(4))),
        ("reduce_scatter_single", (torch.ones(4), torch.ones(8)), (torch.ones(4), torch.ones(9))),
        ("allreduce", ([torch.ones(4)],), ([3],)),
        ("allreduce", ([torch.ones(4)],), ([torch.ones(4)] * 2,)),
    ):
        with pytest.raises(weft.WeftError, match=r"^rank 1: .* given: ") as caught:
            getattr(group, name)(*(wrong if me == 1 else right)).wait()
        said.append(str(caught.value))
    with pytest.raises(weft.WeftError, match="op") as caught:
        dist.all_reduce(torch.ones(1), dist.ReduceOp.MAX if me == 1 else dist.ReduceOp.SUM)
    said.append(str(caught.value))
    with pytest.raises(weft.WeftError, match=r"rank 0: .*avg") as caught:
        dist.all_reduce(torch.ones(1, dtype=torch.int32), AVG)
    said.append(str(caught.value))
    dist.barrier()
    return said


def test_errors_are_the_same_on_every_rank(ranks):
    first, second = ranks(2, erring)
    assert first == second
