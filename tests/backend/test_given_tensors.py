"""What scripts give to torch.distributed over weft: what becomes of it, and what cannot be sent."""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import itertools
import threading
import time
import warnings
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import weft
from weft.base import _torch
from weft.testing import run

AVG = dist.ReduceOp.AVG


@pytest.fixture
def ranks(tmp_path):
    """`ranks(size, body)` runs `body(me, size)` in torch's default group, of backend cpu:weft."""
    return lambda size, body: run(
        size, in_group, body.__name__, str(tmp_path / "meeting"), on="processes"
    )


def in_group(group, body, meeting):
    dist.init_process_group(
        "cpu:weft", init_method=f"file://{meeting}", rank=group.rank, world_size=group.size
    )
    try:
        return globals()[body](group.rank, group.size)
    finally:
        dist.destroy_process_group()


def coalesced(call, tensors, group, async_op):
    with dist._coalescing_manager(group, async_ops=async_op) as works:
        call(tensors, group)
    return works if async_op else None


def passed(tensors, group, async_op):
    me = dist.get_rank()
    if async_op:
        return (dist.isend if me == 0 else dist.irecv)(tensors[0], 1 - me, group=group)
    (dist.send if me == 0 else dist.recv)(tensors[0], 1 - me, group=group)
    return None


def at_first(tensors):
    return tensors if dist.get_rank() == 0 else None


# Of two ranks: the sizes of the tensors that a call is given, and the call.
IN_PLACE = {
    "all_reduce": ([4], lambda t, **how: dist.all_reduce(t[0], **how)),
    "broadcast": ([4], lambda t, **how: dist.broadcast(t[0], 1, **how)),
    "reduce": ([4], lambda t, **how: dist.reduce(t[0], 0, **how)),
    "scatter": ([4] * 3, lambda t, **how: dist.scatter(t[0], at_first(t[1:]), 0, **how)),
    "all_to_all_single": ([4, 4], lambda t, **how: dist.all_to_all_single(t[0], t[1], **how)),
    "all_to_all_single, sizes": (
        [4, 4],
        lambda t, **how: dist.all_to_all_single(t[0], t[1], [2, 2], [2, 2], **how),
    ),
}
FILLED = {
    "all_gather": ([4] * 3, lambda t, **how: dist.all_gather(t[1:], t[0], **how)),
    "gather": ([4] * 3, lambda t, **how: dist.gather(t[0], at_first(t[1:]), 0, **how)),
    "reduce_scatter": ([4] * 3, lambda t, **how: dist.reduce_scatter(t[0], t[1:], **how)),
    "all_to_all": ([4] * 4, lambda t, **how: dist.all_to_all(t[:2], t[2:], **how)),
    "all_gather_single": ([8, 4], lambda t, **how: dist.all_gather_single(*t, **how)),
    "reduce_scatter_single": ([4, 8], lambda t, **how: dist.reduce_scatter_single(*t, **how)),
    "all_gather_single, coalesced": (
        [8, 4],
        functools.partial(coalesced, lambda t, group: dist.all_gather_single(*t, group=group)),
    ),
    "reduce_scatter_single, coalesced": (
        [4, 8],
        functools.partial(coalesced, lambda t, group: dist.reduce_scatter_single(*t, group=group)),
    ),
}
COALESCED = {
    "all_reduce, coalesced": (
        [4, 4],
        functools.partial(
            coalesced, lambda t, group: [dist.all_reduce(each, group=group) for each in t]
        ),
    ),
}
EVERY = IN_PLACE | FILLED | COALESCED
PASSED = {"send and recv": ([4], passed)}
BARRIER = {"barrier": ([], lambda t, **how: dist.barrier(**how))}


def finished(call, tensors, **how):
    work = call(tensors, **how)
    if work is not None:
        work.wait()


def versions(me, size):
    """Which autograd goes by: what is written in place keeps its own, as with gloo."""
    gloo = dist.new_group(backend="gloo")
    for later in (False, True):
        for name, (sizes, call) in (IN_PLACE | FILLED | PASSED).items():
            raised = []
            for group in (gloo, dist.group.WORLD):
                tensors = [torch.ones(count) for count in sizes]
                finished(call, tensors, group=group, async_op=later)
                raised.append([tensor._version > 0 for tensor in tensors])
            assert raised[0] == raised[1], (name, later)
            assert name in FILLED or not any(raised[1]), name


def saved_tensors(me, size):
    """A backward reads what an activation holds after a collective in place, as torch's own do."""
    for (name, (sizes, call)), later in itertools.product(IN_PLACE.items(), (False, True)):
        for columns in (1, 2):  # in one piece, or not
            weight = torch.ones(sizes[0], requires_grad=True)
            hidden = torch.relu(torch.stack([weight] * columns, dim=1))
            tensors = [hidden[:, 0], *(torch.ones(count) for count in sizes[1:])]
            finished(call, tensors, group=None, async_op=later)
            hidden.sum().backward()
            assert weight.grad.eq(columns).all(), (name, later, columns)
    sizes, call = FILLED["all_gather"]
    saved = torch.relu(torch.ones(sizes[1], requires_grad=True))
    call([torch.ones(sizes[0]), saved, torch.ones(sizes[2])])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


def memory_of_the_callers(me, size):
    """Storages may be resized afterwards, as FSDP does, and tensors get others meanwhile."""
    for (name, (sizes, call)), later in itertools.product(EVERY.items(), (False, True)):
        for times in (1,) if name.endswith("sizes") else (1, 1 << 16):
            tensors = [torch.ones(count * times) for count in sizes]
            kept, others = [each.detach() for each in tensors], [torch.zeros(7) for _ in sizes]
            entered = group_is_busy() if later else None
            work = call(tensors, group=None, async_op=later)
            if entered is not None:
                for each, other in zip(tensors, others, strict=True):
                    each.data = other
                entered.set()
                work.wait()
            assert not any(other.any() for other in others), name
            if name.startswith("all_reduce"):
                assert all(each.eq(size).all() for each in kept), name
            for each in kept:
                each.untyped_storage().resize_(0)


def given_back(me, size):
    """Once a call is over it holds nothing that it was given, and needs no collection for that."""
    gc.collect()
    gc.disable()
    try:
        for (name, (sizes, call)), later in itertools.product(EVERY.items(), (False, True)):
            tensors = [torch.ones(count) for count in sizes]
            last = [weakref.ref(each) for each in tensors]
            finished(call, tensors, group=None, async_op=later)
            del tensors
            deadline = time.monotonic() + 10
            while any(each() is not None for each in last) and time.monotonic() < deadline:
                time.sleep(0.01)  # until the worker's thread has left the call
            assert [each() for each in last] == [None] * len(last), name
    finally:  # other tests run in this process
        gc.enable()


def freed_meanwhile(me, size):
    """What is freed before a call has its turn is an error on every rank."""
    given = torch.ones(4, 2)[:, 0]
    go = group_is_busy()
    work = dist.broadcast(given, 1, async_op=True)
    if me == 0:
        given.untyped_storage().resize_(0)
    go.set()
    with pytest.raises(weft.WeftError, match=r"^rank 0: a tensor is without memory"):
        work.wait()
    dist.barrier()


def group_is_busy():
    """Have a job wait in the queue before the next call, until what is returned is set."""
    go = threading.Event()
    dist.group.WORLD.weft_group.worker.submit("busy", lambda: go.wait(30))
    return go


def lacks_memory(me, size):
    """Of a rank that cannot read what it gives, before it meets the others, all hear."""
    whole = torch.zeros(1).expand(size << 43) if me == 1 else torch.zeros(size)
    calls = {
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty(size), whole),
        "reduce": lambda: dist.reduce(whole, 0),
        "gather": lambda: dist.gather(whole, [torch.zeros(size)] * size if me == 0 else None, 0),
        "all_gather": lambda: dist.all_gather(
            [torch.ones(1).as_subclass(Refuses if me == 0 else Tensor) for _ in range(size)],
            torch.ones(1),
        ),
    }
    said = []
    for name, call in calls.items():
        with pytest.raises(weft.WeftError, match=r"^rank [01]: \w+Error: ") as caught:
            call()
        said.append(str(caught.value))
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == size, name
    return said


class Refuses(Tensor):
    """A tensor that lets nobody have another of its memory."""

    @classmethod
    def __torch_function__(cls, function, *given, **named):
        if function.__name__ == "detach":
            raise NotImplementedError("detach")
        return super().__torch_function__(function, *given, **named)


def means(me, size):
    """Of numbers whose sum may be too large for their dtype: rounded once, when it is divided."""
    for dtype in (torch.float16, torch.bfloat16, torch.float8_e4m3fn):
        for count in (3, 40_000):
            parts = [
                (torch.finfo(dtype).max * (0.6 + 0.1 * rank) - torch.arange(count) % 7).to(dtype)
                for rank in range(size)
            ]
            right = functools.reduce(Tensor.add, [part.float() for part in parts]) / size
            summed, reduced, alone = (parts[me].clone() for _ in range(3))
            whole = parts[me].repeat(size)
            scattered, single = torch.empty_like(summed), torch.empty_like(summed)
            dist.all_reduce(summed, AVG)
            dist.reduce(reduced, 0, AVG)
            dist.reduce_scatter(scattered, list(whole.chunk(size)), AVG)
            dist.reduce_scatter_single(single, whole, AVG)
            with dist._coalescing_manager():
                dist.all_reduce(alone, AVG)
            for name, mean in (("all_reduce", summed), ("reduce_scatter", scattered)):
                assert torch.equal(mean.float(), right.to(dtype).float()), (name, dtype, count)
            assert torch.equal(single.float(), right.to(dtype).float()), (dtype, count)
            assert torch.equal(alone.float(), right.to(dtype).float()), (dtype, count)
            assert me or torch.equal(reduced.float(), right.to(dtype).float()), (dtype, count)


def integer_means(me, size):
    """They need not be integers, so they are refused, as by weft's own calls."""
    said = []
    for dtype in (torch.int16, torch.int64, torch.uint8, torch.bool):
        part, whole = torch.ones(2, dtype=dtype), torch.ones(2 * size, dtype=dtype)
        rows = part[None].to_sparse(1)
        calls = [
            lambda part=part: dist.all_reduce(part, AVG),
            lambda part=part: dist.reduce(part, 0, AVG),
            lambda part=part: dist.reduce_scatter(part, [part] * size, AVG),
            lambda part=part, whole=whole: dist.reduce_scatter_single(part, whole, AVG),
            lambda rows=rows: dist.all_reduce(rows, AVG),
        ]
        for call in calls:
            with pytest.raises(weft.WeftError, match="avg") as caught:
                call()
            said.append(str(caught.value))
            dist.all_reduce(part)
    return said


def complex_rows(me, size):
    """torch hands over a view of them in real numbers, of which no result would come back."""
    said = []
    for all_have_it in (True, False):
        rows = torch.full((1, 1), 1 + 2j).to_sparse(1)
        real = torch.view_as_real(rows).clone()
        with pytest.raises(weft.WeftError, match=r"values of torch\.complex64 are not") as caught:
            dist.all_reduce(rows if all_have_it or me == 0 else real)
        said.append(str(caught.value))
        assert rows.coalesce().values().tolist() == [[1 + 2j]]
        dist.all_reduce(real)
        assert real.coalesce().values().tolist() == [[[size, 2 * size]]]
        total = torch.full((2,), 1 + 2j)  # a dense one is viewed where it lies
        dist.all_reduce(total)
        assert total.tolist() == [size * (1 + 2j)] * 2
    return said


def rows_of_no_reduction(me, size):
    """They are refused, also of dtypes whose duplicates torch cannot combine."""
    said = []
    dtypes = (torch.float8_e4m3fn, torch.uint16, torch.uint32)
    for dtype, all_have_it in itertools.product(dtypes, (True, False)):
        values = torch.ones(2).to(dtype if all_have_it or me == 0 else torch.float32)
        rows = torch.sparse_coo_tensor([[1, 1]], values, (3,), check_invariants=True)
        with pytest.raises(weft.WeftError, match=f"rank 0: values of {dtype} are not") as caught:
            dist.all_reduce(rows, dist.ReduceOp.MAX)
        said.append(str(caught.value))
        dist.barrier()
    return said


def rows_without_memory(me, size):
    """Also where duplicates are combined before the call, which may end the process."""
    said = []
    for part, left, op in itertools.product(
        ("indices", "values"), (0, 8), (dist.ReduceOp.SUM, dist.ReduceOp.MAX)
    ):
        rows = torch.sparse_coo_tensor(
            torch.zeros(1, 999).long(), torch.ones(999, 9), check_invariants=True
        )
        if me == 0:
            getattr(rows, f"_{part}")().untyped_storage().resize_(left)
        text = f"rank 0: the tensor of {part} is .* (smaller|was freed, or stands for zeros): pass"
        with pytest.raises(weft.WeftError, match=text) as caught:
            dist.all_reduce(rows, op)
        said.append(str(caught.value))
        dist.barrier()
    return said


class Wrapper(Tensor):
    """A tensor that is made of another, as those of FSDP2's extensions are."""

    @staticmethod
    def __new__(cls, inner):
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        raise NotImplementedError(function)


def fake(count):
    with FakeTensorMode():
        return torch.ones(count)


def freed(count, left=0):
    tensor = torch.ones(count)
    tensor.untyped_storage().resize_(left)
    return tensor


def nibbles(count):
    """Not contiguous, of a dtype that torch does not copy."""
    return torch.zeros(count, 2, dtype=torch.uint8).view(torch.uint4)[:, 0]


def by_channel(count):
    scales, zeros = torch.full((count,), 0.1), torch.zeros(count, dtype=torch.int64)
    return torch.quantize_per_channel(torch.ones(count), scales, zeros, 0, torch.quint8)


NOT_SENT = {
    "on the meta device": lambda count: torch.ones(count, device="meta"),
    "a FakeTensor": fake,
    "a Wrapper": lambda count: Wrapper(torch.ones(count)),
    "nested": lambda count: torch.nested.nested_tensor([torch.ones(count)] * 2),
    "nested, jagged": lambda count: torch.nested.nested_tensor(
        [torch.ones(count)] * 2, layout=torch.jagged
    ),
    "sparse_csr": lambda count: torch.ones(1, count).to_sparse_csr(),
    "mkldnn": lambda count: torch.ones(count).to_mkldnn(),
    "quantized": lambda count: torch.quantize_per_tensor(torch.ones(count), 0.1, 0, torch.quint8),
    "quantized by channel": by_channel,
    "which torch does not copy": nibbles,
    "freed": freed,
    "larger than its memory": functools.partial(freed, left=4),
    "stands for zeros": torch._efficientzerotensor,
}
ALL_REDUCE_MAX = {
    "all_reduce, max": (
        [4],
        lambda t, **how: dist.all_reduce(t[0], dist.ReduceOp.MAX, **how),
    )
}


def not_sent(me, size):
    """On one rank or on all, in every place of every call: all say the same, and go on."""
    calls = EVERY | ALL_REDUCE_MAX
    cases = itertools.product(NOT_SENT.items(), calls.items(), ((False, [0]), (True, [0, 1])))
    said = refusals(me, size, cases)
    kinds = {what: NOT_SENT[what] for what in ("on the meta device", "a FakeTensor", "freed")}
    calls = {name: EVERY[name] for name in ("all_reduce", "scatter", "all_gather_single")}
    with CommDebugMode():
        cases = itertools.product(kinds.items(), calls.items(), ((False, [0]), (True, [0, 1])))
        return said + refusals(me, size, cases)


def refusals(me, size, cases):
    """The errors of calls with tensors that cannot be sent."""
    said = []
    for (what, make), (name, (sizes, call)), (later, where) in cases:
        for place, count in enumerate(sizes):
            tensors = [torch.ones(each) for each in sizes]
            if me in where:
                with warnings.catch_warnings(action="ignore"):  # torch's, of some kinds
                    tensors[place] = make(count)
                    if tensors[place].dtype != torch.float32:  # torch wants one dtype
                        tensors = [make(each) for each in sizes]
            with pytest.raises(weft.WeftError) as caught:
                finished(call, tensors, group=None, async_op=later)
            said.append(f"{name} of {what}: {caught.value}")
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total.item() == size
    return said


def modes(me, size):
    """A mode of the caller's is not for what weft itself does, the first call included."""
    with FakeTensorMode(), torch.device("meta"):
        group = dist.new_group()
        if me == 0:
            dist.all_reduce(torch.ones(2), group=group)
    total = torch.ones(2)
    with torch.device("meta"):
        dist.all_reduce(total.t(), group=group)
        dist.all_reduce(torch.ones(2, 2, device="cpu")[:, 0], group=group)
    assert total.tolist() == [size] * 2


def fakes(me, size):
    """Under the caller's FakeTensorMode nothing is sent: here one rank alone calls.

    (The mode itself does not know coalesced calls, whatever the backend.)
    """
    cases = EVERY | PASSED | BARRIER
    known = {name: case for name, case in cases.items() if "coalesced" not in name}
    for (name, (sizes, call)), later in itertools.product(known.items(), (False, True)):
        if me == 0:
            with FakeTensorMode():
                tensors = [torch.ones(count) for count in sizes]
                finished(call, tensors, group=None, async_op=later)
            assert all(isinstance(tensor, FakeTensor) for tensor in tensors), name
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == size, name


def counted(me, size):
    """A mode of the caller's sees the calls that it sees over gloo, where torch can call back."""
    gloo = dist.new_group(backend="gloo")
    for (name, (sizes, call)), later in itertools.product(EVERY.items(), (False, True)):
        given = [torch.arange(1.0, count + 1) * (me + 1) for count in sizes]
        seen, found = [], []
        for group in (gloo, dist.group.WORLD):
            tensors = [tensor.clone() for tensor in given]
            with CommDebugMode() as mode:
                finished(call, tensors, group=group, async_op=later)
            seen.append(dict(mode.get_comm_counts()))
            found.append(tensors)
        assert seen[1] == (seen[0] if _torch.backend_base() is not None else {}), name
        if name != "reduce" or me == 0:  # else gloo leaves a part of a sum
            assert all(map(torch.equal, *found)), name


class Fails(TorchDispatchMode):
    """Fails in a call's way, before or after the call itself."""

    def __init__(self, after):
        super().__init__()
        self.after = after

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        is_call = function.namespace == "c10d"
        found = None if is_call and not self.after else function(*args, **(kwargs or {}))
        if is_call:
            raise ValueError("of this mode")
        return found


def failing_modes(me, size):
    """A mode fails on one rank: all hear of it before the call, and only that rank after it."""
    for (name, (sizes, call)), later in itertools.product((EVERY | BARRIER).items(), (False, True)):
        seen = _torch.backend_base() is not None and "coalesced" not in name
        for after in (False, True):
            tensors = [torch.ones(count) for count in sizes]
            fails = contextlib.nullcontext()
            if seen and (me == 0 or not after):
                fails = pytest.raises((ValueError, weft.WeftError), match="of this mode")
            with fails, Fails(after) if me == 0 and seen else contextlib.nullcontext():
                finished(call, tensors, group=None, async_op=later)
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total.item() == size, (name, after)


def gone_at_once(me, size):
    """A group that modes alone have seen gives back all that it holds when it is destroyed."""
    group = dist.new_group()
    with CommDebugMode():
        dist.all_reduce(torch.ones(1), group=group)
    inner = group.weft_group
    group.set_timeout(datetime.timedelta(seconds=77))
    assert inner.timeout == 77
    dist.destroy_process_group(group)
    assert inner.closed


class Unwrapped(Wrapper):
    """A tensor that is made of another, with which it does whatever it is asked to do."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        inner = tree_map(lambda each: each.inner if isinstance(each, cls) else each, args)
        return function(*inner, **(kwargs or {}))


def unwrapped(me, size):
    """On one rank or on all."""
    for (name, (sizes, call)), there in itertools.product(EVERY.items(), ([0], range(size))):
        given = [torch.arange(1.0, count + 1) * (me + 1) for count in sizes]
        plain = [tensor.clone() for tensor in given]
        finished(call, plain, group=None, async_op=False)
        tensors = [Unwrapped(tensor) for tensor in given] if me in there else given
        if _torch.backend_base() is None:
            with pytest.raises(weft.WeftError, match=r"rank 0: a tensor is an? Unwrapped"):
                finished(call, tensors, group=None, async_op=False)
            continue
        finished(call, tensors, group=None, async_op=False)
        assert all(map(torch.equal, given, plain)), name


def promised(me, size):
    """What torch's functional collectives promise may be given on, in place, too."""
    with CommDebugMode():
        mine = functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
        dist.all_reduce(mine)
    assert (mine + 0).eq(size * size).all()
    mine = functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
    if me < 2:
        finished(passed, [mine], group=None, async_op=False)
    mine = functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
    out = torch.empty(4 * size)
    dist.all_gather_single(out, mine)
    assert out.eq(size).all()
    mine = functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
    dist.all_reduce(mine)
    assert (mine + 0).eq(size * size).all()


def in_one_memory(me, size):
    """What is sent lies where another rank's part is received: all of it is sent first."""
    for count in (4, 100_000):  # with the opening, and by itself
        mine = [torch.full((count,), 1.0 + me * size + peer) for peer in range(size)]
        firsts = [1.0 + peer * size for peer in range(size)]
        outs = [mine[0].clone(), *(torch.zeros(count) for _ in range(size - 1))]
        dist.all_gather(outs, outs[0])
        assert [out.unique().item() for out in outs] == firsts
        whole = torch.zeros(size * count)
        whole[:count] = mine[0]
        dist.all_gather_single(whole, whole[:count])
        assert [part.unique().item() for part in whole.chunk(size)] == firsts
        whole = torch.zeros(size * count)
        whole[me * count :][:count] = mine[0]  # as FSDP has it: in its own place
        dist.all_gather_single(whole, whole[me * count :][:count])
        assert [part.unique().item() for part in whole.chunk(size)] == firsts
        outs = [mine[0].clone(), *(torch.zeros(count) for _ in range(size - 1))]
        dist.gather(outs[0], outs if me == size - 1 else None, size - 1)
        if me == size - 1:
            assert [out.unique().item() for out in outs] == firsts
        came = [1.0 + peer * size + me for peer in range(size)]
        outs = [each.clone() for each in mine]
        dist.all_to_all(outs[::-1], outs)
        assert [out.unique().item() for out in outs[::-1]] == came
        whole = torch.cat(mine)
        dist.all_to_all_single(whole, whole)
        assert [part.unique().item() for part in whole.chunk(size)] == came


def in_one_list(me, size):
    """Tensors of one list share memory, on one rank or on all: each sends what was there before."""
    for count in (4, 100_000):  # with the opening, and by itself
        for there in ([0], range(size)):
            first, second = torch.ones(count), torch.ones(count)
            given = [first, torch.ones(3), first if me in there else second]
            summed(given)
            assert all(each.eq(size).all() for each in given)
            assert second.eq(1 if me in there else size).all()
        whole = torch.ones(2 * count)
        summed([whole[: count + 2], whole[count - 2 :]])
        assert whole.eq(size).all()
        whole = torch.ones(2, count)
        summed([whole.t(), whole + 1 if me else whole])  # the last of them is what stays
        assert whole.eq(size if me else 2 * size - 1).all()

        mine = torch.full((count,), 1.0 + me)
        outs = [torch.zeros(size * count) for _ in range(2)]
        gathered([(outs[0], mine), (outs[1], outs[0][:count])])
        assert outs[0][::count].tolist() == [1.0 + peer for peer in range(size)]
        assert outs[1].eq(0).all()
        whole = torch.full((size * count,), 1.0 + me)
        outs = [whole[me * count :][:count], torch.zeros(count)]
        scattered([(out, whole) for out in outs])
        assert all(out.eq(size * (size + 1) / 2).all() for out in outs)
        mine = [torch.full((count,), 1.0 + me), torch.full((count,), 10.0 + me)]
        outs = [[torch.zeros(count) for _ in mine] for _ in range(size)]
        outs[(me + 1) % size][0] = mine[1]
        with warnings.catch_warnings(action="ignore"):  # torch's, of what it will deprecate
            dist.all_gather_coalesced(outs, mine)
        firsts = [[each[0].item() for each in out] for out in outs]
        assert firsts == [[1.0 + peer, 10.0 + peer] for peer in range(size)]


def together(call):
    """A call of several pairs or tensors as one."""
    return lambda given: coalesced(
        lambda given, group: [call(each, group) for each in given], given, None, False
    )


summed = together(lambda tensor, group: dist.all_reduce(tensor, group=group))
gathered = together(lambda pair, group: dist.all_gather_single(*pair, group=group))
scattered = together(lambda pair, group: dist.reduce_scatter_single(*pair, group=group))


def inference(me, size):
    """Tensors that were made in inference mode are written, in it and outside of it."""
    for (name, (sizes, call)), later in itertools.product(EVERY.items(), (False, True)):
        for inside in (False, True):
            with torch.inference_mode():
                tensors = [torch.ones(count, 2).t()[0] for count in sizes]
            with torch.inference_mode(inside):
                finished(call, tensors, group=None, async_op=later)
            assert name != "all_reduce" or tensors[0].eq(size).all()
    with torch.inference_mode():
        rows = torch.ones(1, 2).to_sparse(1)
        for later in (False, True):
            finished(lambda t, **how: dist.all_reduce(t, **how), rows, async_op=later)
            assert rows.coalesce().values().tolist() == [[size] * 2]
            rows = torch.ones(1, 2).to_sparse(1)
    for where in ([0], [0, 1]):
        with pytest.raises(weft.WeftError, match=r"rank 0: a sparse tensor was made in inference"):
            dist.all_reduce(rows if me in where else torch.ones(1, 2).to_sparse(1))
    dist.barrier()


def nowhere_to_write(me, size):
    """What expand() has made is read, and not written; sizes that do not fit are told as given."""
    said = []
    one, woven = torch.ones(1), torch.zeros(8).as_strided((3, 2), (2, 3))
    dist.all_reduce(woven)  # no element twice
    cases = [
        (r"elements .* share memory", lambda: dist.all_reduce(one.expand(4))),
        (r"elements .* share memory", lambda: dist.broadcast(one.expand(4), 0)),
        (r"elements .* share memory", lambda: dist.broadcast(woven[:, 0].unfold(0, 2, 1), 0)),
        (r"elements .* share memory", lambda: dist.all_gather_single(one.expand(2 * size), one)),
        (
            rf"the output has {2 * size + 1} elements, and the inputs of {size} ranks {2 * size}",
            lambda: dist.all_gather_single(torch.ones(2 * size + 1), torch.ones(2)),
        ),
        (
            rf"the input has {2 * size + 1} elements, and the outputs of {size} ranks {2 * size}",
            lambda: dist.reduce_scatter_single(torch.ones(2), torch.ones(2 * size + 1)),
        ),
    ]
    for text, call in cases:
        with pytest.raises(weft.WeftError, match=rf"rank 0: .*{text}") as caught:
            call()
        said.append(str(caught.value))
        dist.barrier()
    total = torch.zeros(4)
    dist.all_gather([total[peer::size][:1] for peer in range(size)], one.expand(1))
    return said


def parts_that_do_not_fit(me, size):
    said = []
    cases = [
        (torch.ones(2 * size + 1), torch.ones(2 * size + 1), [[], []]),
        (torch.ones(2 * size), torch.ones(2 * size), [[2] * size, [2] * (size - 1) + [1]]),
        (torch.ones(2 * size), torch.ones(2 * size), [[2] * size, [-2, 6] + [2] * (size - 2)]),
        (torch.ones(2 * size), torch.ones(2 * size), [[2] * size, [2] * size + [0]]),
        (torch.ones(2 * size), torch.ones(2 * size), [[2.0] * size, [2] * size]),
        (torch.ones(()), torch.ones(2 * size), [[], []]),
        (torch.ones(2 * size), torch.ones(()), [[], []]),
    ]
    for out, mine, sizes in cases:
        with pytest.raises(weft.WeftError, match=r"rank 0: the .*(in|out)put ") as caught:
            dist.all_to_all_single(out, mine, *sizes)
        said.append(str(caught.value))
        dist.barrier()
    return said


class Raises:
    """What raises whatever is asked of it."""

    def __getattr__(self, name):
        raise ValueError(name)

    def __iter__(self):
        raise ValueError("no iterator")

    def __repr__(self):
        raise ValueError("no text")


def odd_sizes(me, size):
    """Split sizes of one rank that are none; then some that are not a list of Python's integers."""
    said = []
    none = 3, torch.ones(size), [torch.ones(2).int()] * size, [None] * size, Raises()
    for odd, later, name in itertools.product(none, (False, True), ("output", "input")):
        sizes = {"output_split_sizes": [1] * size, "input_split_sizes": [1] * size}
        if me == 0:
            sizes[f"{name}_split_sizes"] = odd
        call = functools.partial(dist.all_to_all_single, torch.ones(size))
        text = f"rank 0: the split sizes of the {name} are .*: pass integers"
        with pytest.raises(weft.WeftError, match=text) as caught:
            finished(call, torch.ones(size), **sizes, async_op=later)
        said.append(str(caught.value))
        dist.barrier()
    for sizes in (torch.ones(size, dtype=torch.int64), np.ones(size, np.int32), (1,) * size):
        out = torch.zeros(size)
        dist.all_to_all_single(out, torch.full((size,), 1.0 + me), sizes, sizes)
        assert out.tolist() == [1.0 + peer for peer in range(size)]
    return said


def odd_arguments(me, size):
    """Something else in the place of each argument, on one rank, of the group's own calls."""
    said = []
    group, one = dist.group.WORLD, torch.ones(1)
    parts, whole = [one] * size, torch.ones(size)
    at_root = [parts] if me == 0 else []
    calls = [
        (group.allreduce, [one], "sum"),
        (group.broadcast, [one], 0),
        (group.reduce, [one], dist_options(dist.ReduceOptions, 0)),
        (group.allgather, [parts], [one]),
        (group.all_gather_single, [whole], [one]),
        (group.reduce_scatter, [one], [parts], "sum"),
        (group.reduce_scatter_single, [one], [whole], "sum"),
        (group.all_to_all_single, whole.clone(), whole, [], []),
        (group.alltoall, parts, parts),
        (group.gather, at_root, [one], 0),
        (group.scatter, [one], at_root, 0),
    ]
    kinds = 2**70, [None], [one] * 4, Raises()
    for (call, *arguments), odd in itertools.product(calls, kinds):
        for place in range(len(arguments)):
            given = [odd if each == place and me == 0 else a for each, a in enumerate(arguments)]
            with pytest.raises(weft.WeftError, match=r"rank 0|ranks differ") as caught:
                call(*given).wait()
            said.append(str(caught.value))
            dist.barrier()
    return said


def no_root(me, size):
    """A root that is no rank: torch asks nobody whether it is one of the default group."""
    said = []
    one, group = torch.ones(2), dist.group.WORLD
    for root in (size, -1):
        calls = [
            lambda root=root: group.broadcast(one, root),
            lambda root=root: group.reduce(one, dist_options(dist.ReduceOptions, root)),
            lambda root=root: group.gather([], [one], dist_options(dist.GatherOptions, root)),
            lambda root=root: group.scatter([one], [], dist_options(dist.ScatterOptions, root)),
        ]
        for call, there in itertools.product(calls, ([0], range(size))):
            if me in there:
                with pytest.raises(weft.WeftError) as caught:
                    call().wait()
            else:
                with pytest.raises(weft.WeftError) as caught:
                    calls[0](root=0).wait()
            said.append(str(caught.value))
            assert f"rank 0: the root is rank {root}, and there are ranks 0 to " in said[-1]
            dist.barrier()
    return said


def dist_options(kind, root):
    options = kind()
    options.rootRank = root
    return options


@pytest.mark.parametrize(
    "body",
    [
        integer_means,
        complex_rows,
        rows_of_no_reduction,
        rows_without_memory,
        parts_that_do_not_fit,
        nowhere_to_write,
        odd_sizes,
        odd_arguments,
        no_root,
    ],
)
@pytest.mark.parametrize("size", [2, 3])
def test_errors_are_the_same_on_every_rank(ranks, size, body):
    assert len({tuple(said) for said in ranks(size, body)}) == 1


def test_what_cannot_be_sent_is_an_error_of_its_call(ranks):
    first, second = ranks(2, not_sent)
    assert first == second


@pytest.mark.parametrize("body", [means, modes, promised, in_one_memory, in_one_list, lacks_memory])
@pytest.mark.parametrize("size", [2, 3])
def test_what_becomes_of_tensors(ranks, size, body):
    ranks(size, body)


@pytest.mark.parametrize("body", [memory_of_the_callers, given_back, freed_meanwhile])
def test_memory_stays_the_callers(ranks, body):
    ranks(2, body)


@pytest.mark.parametrize("body", [versions, saved_tensors, inference])
def test_what_autograd_knows(ranks, body):
    ranks(2, body)


@pytest.mark.parametrize("body", [fakes, counted, unwrapped, failing_modes, gone_at_once])
def test_what_the_dispatcher_sees(ranks, body):
    ranks(2, body)
