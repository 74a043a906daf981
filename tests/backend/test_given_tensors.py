"""What scripts give to torch.distributed over weft: what becomes of it, and what cannot be sent."""

from __future__ import annotations

import functools
import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor.debug import CommDebugMode
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


def freed(count):
    tensor = torch.ones(count)
    tensor.untyped_storage().resize_(0)
    return tensor


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
    "freed": freed,
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
    said = []
    calls = EVERY | ALL_REDUCE_MAX
    cases = itertools.product(NOT_SENT.items(), calls.items(), ((False, [0]), (True, [0, 1])))
    for (what, make), (name, (sizes, call)), (later, where) in cases:
        for place, count in enumerate(sizes):
            tensors = [torch.ones(each) for each in sizes]
            if me in where:
                with warnings.catch_warnings(action="ignore"):  # torch's, of some kinds
                    tensors[place] = make(count)
                    if tensors[place].is_quantized:  # torch wants one dtype
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
    known = {name: case for name, case in EVERY.items() if "coalesced" not in name}
    for (name, (sizes, call)), later in itertools.product(known.items(), (False, True)):
        if me == 0:
            with FakeTensorMode():
                tensors = [torch.ones(count) for count in sizes]
                finished(call, tensors, group=None, async_op=later)
            assert {type(tensor) for tensor in tensors} == {FakeTensor}, name
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
    mine = functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
    out = torch.empty(4 * size)
    dist.all_gather_single(out, mine)
    assert out.eq(size).all()
    mine = functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
    dist.all_reduce(mine)
    assert (mine + 0).eq(size * size).all()


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


@pytest.mark.parametrize("body", [integer_means, complex_rows, parts_that_do_not_fit, no_root])
@pytest.mark.parametrize("size", [2, 3])
def test_errors_are_the_same_on_every_rank(ranks, size, body):
    assert len({tuple(said) for said in ranks(size, body)}) == 1


def test_what_cannot_be_sent_is_an_error_of_its_call(ranks):
    first, second = ranks(2, not_sent)
    assert first == second


@pytest.mark.parametrize("body", [means, modes, promised])
@pytest.mark.parametrize("size", [2, 3])
def test_what_becomes_of_tensors(ranks, size, body):
    ranks(size, body)


@pytest.mark.parametrize("body", [versions, saved_tensors])
def test_what_autograd_knows(ranks, body):
    ranks(2, body)


@pytest.mark.parametrize("body", [fakes, counted, unwrapped])
def test_what_the_dispatcher_sees(ranks, body):
    ranks(2, body)
