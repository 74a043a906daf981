"""Gradients and tensors that travel rounded: where they are rounded, and how far off they are."""

from __future__ import annotations

import functools
import threading

import pytest
import torch
from torch import nn

import weft
from weft.sparse.rows import Rows
from weft.testing import spmd
from weft.testing.oracle import expected

EVERYWHERE = ("threads", "verbs", "processes", "gloo")

LOCK = threading.Lock()
WIRE_DTYPES = (torch.bfloat16, torch.float16)

SHAPES = {
    "absent": (50,),
    "empty": (0, 3),
    "expanded": (40, 5),
    "large": (70_001,),
    "scalar": (),
    "small": (7, 3),
    "turned": (301, 307),
    "wide": (90,),
}


@functools.cache
def _numbers(rank, name):
    seed = 100 * rank + sorted(SHAPES).index(name)
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(SHAPES[name], generator=generator)
    return values * 2.0 ** torch.randint(-22, 9, SHAPES[name], generator=generator)


def numbers(rank, name, dtype=torch.float32):
    """Of all magnitudes that float16 has, those below its smallest normal number too."""
    with LOCK:  # made once, though ranks are threads; a copy, since some write to what they get
        return _numbers(rank, name).to(dtype, copy=True)


def has(rank, name):
    return name != "absent" or rank % 3 == 1


def dense_model(rank):
    """Parameters of all kinds, with the gradients of this rank, whose memory differs by rank."""
    module = nn.ParameterDict()
    for name, shape in SHAPES.items():
        dtype = torch.float64 if name == "wide" else torch.float32
        module[name] = nn.Parameter(torch.zeros(shape, dtype=dtype))
        if not has(rank, name):
            continue
        gradient = numbers(rank, name, dtype)
        if name == "expanded":
            gradient = gradient[:1].expand(shape)
        elif name == "turned" and rank % 2:
            gradient = gradient.t().contiguous().t()
        module[name].grad = gradient
    return module


@functools.cache
def _right(name, size, wire_dtype, average):
    total = None
    for rank in range(size):
        mine = _numbers(rank, name)
        if name == "expanded":
            mine = mine[:1].expand(SHAPES[name])
        mine = mine.to(wire_dtype).float() if has(rank, name) else torch.zeros(SHAPES[name])
        total = mine if total is None else total + mine
    return (total / size if average else total).to(wire_dtype)


def right(name, size, wire_dtype, average):
    """Each rank's rounded, added in rank order in float32, and rounded."""
    with LOCK:
        return _right(name, size, wire_dtype, average)


@functools.cache
def _reduced(name, size, wire_dtype, op):
    combine = {"min": torch.minimum, "max": torch.maximum, "prod": torch.mul}
    terms = [_numbers(rank, name).to(wire_dtype).float() for rank in range(size)]
    want = functools.reduce(combine.get(op, torch.add), terms)
    return (want / size if op == "avg" else want).to(wire_dtype).float()


@spmd(1, 3, 8)
def test_dense_gradients_are_rounded_twice_and_added_wide(group):
    for wire_dtype in WIRE_DTYPES:
        for average in (True, False):
            module = dense_model(group.rank)
            weft.sync_grads(module, average, wire_dtype=wire_dtype)
            for name in SHAPES:
                found, want = module[name].grad, right(name, group.size, wire_dtype, average)
                if name == "absent" and group.size == 1:
                    assert found is None
                    continue
                assert found.dtype == module[name].dtype
                assert torch.equal(found.to(wire_dtype), want), (name, wire_dtype, average)
                assert torch.equal(found, want.to(found.dtype)), (name, wire_dtype, average)


@spmd(1, 2, 4)
def test_sparse_gradients_beside_dense_ones(group):
    """Rows as `sparse_all_reduce` rounds them, on some ranks none; what is half stays as it is."""

    def rows(rank, dtype):
        generator = torch.Generator().manual_seed(rank)
        count = 0 if rank == 1 else 5 + rank
        indices = torch.randint(0, 20, (count,), generator=generator)
        return Rows(indices, torch.randn(count, 3, generator=generator).to(dtype), 20)

    kinds = {"table": torch.float32, "doubles": torch.float64, "halves": torch.float16}
    for wire_dtype in WIRE_DTYPES:
        module = nn.ParameterDict({"dense": torch.zeros(300)})
        module["dense"].grad = torch.full((300,), 0.1 * (1 + group.rank))
        module["unused"] = torch.zeros(20, 3)
        for name, dtype in kinds.items():
            module[name] = torch.zeros(20, 3, dtype=dtype)
            mine = rows(group.rank, dtype)
            if group.rank != 2:
                module[name].grad = torch.sparse_coo_tensor(
                    mine.indices[None], mine.values, (20, 3), check_invariants=True
                )
        weft.sync_grads(module, wire_dtype=wire_dtype)
        for name, dtype in kinds.items():
            parts = [rows(rank, dtype) for rank in range(group.size) if rank != 2]
            # the mean is over all ranks, those without a gradient too
            parts += [Rows(rows(1, dtype).indices, rows(1, dtype).values, 20)] * (group.size > 2)
            want, found = expected(parts, "avg", wire_dtype), module[name].grad
            assert torch.equal(found._indices()[0], want.indices), name
            assert torch.equal(found._values(), want.values), name
        assert module["unused"].grad is None
        total = sum(torch.tensor(0.1 * (1 + r)).to(wire_dtype).float() for r in range(group.size))
        assert module["dense"].grad.eq((total / group.size).to(wire_dtype).float()).all()


@spmd(2, 3, on=EVERYWHERE)
def test_integers_and_complex_gradients_travel_as_they_are(group):
    module = nn.Module()
    dtypes = {"whole": torch.int64, "turned": torch.complex64, "rows": torch.int32}
    for name, dtype in dtypes.items():
        parameter = nn.Parameter(torch.zeros(4, 1, dtype=dtype), requires_grad=False)
        setattr(module, name, parameter)
    module.real = nn.Parameter(torch.zeros(1))
    module.whole.grad = torch.full((4, 1), 1_000_001)
    module.turned.grad = torch.full((4, 1), 1.001 + 0.001j, dtype=torch.complex64)
    module.rows.grad = torch.sparse_coo_tensor(
        [[1, 1]], torch.tensor([[70_001], [1]], dtype=torch.int32), (4, 1), check_invariants=True
    )
    module.real.grad = torch.tensor([1.001])
    weft.sync_grads(module, average=False, wire_dtype=torch.bfloat16)
    assert module.whole.grad.eq(1_000_001 * group.size).all()
    wanted = sum(torch.tensor(1.001 + 0.001j, dtype=torch.complex64) for _ in range(group.size))
    assert module.turned.grad.eq(wanted).all()
    assert module.rows.grad.to_dense().flatten().tolist() == [0, 70_002 * group.size, 0, 0]
    assert module.real.grad.item() == group.size


@spmd(3, on=EVERYWHERE)
def test_doubles_are_rounded_as_torch_rounds_them(group):
    """By way of float32, where the first is a tie, and goes to the even neighbour."""
    module = nn.ParameterDict({"weight": torch.zeros(3, dtype=torch.float64)})
    above = [1 + 2**-8 + 2**-40, 1 + 2**-8 - 2**-40, 1e300]
    module["weight"].grad = torch.tensor(above, dtype=torch.float64)
    weft.sync_grads(module, wire_dtype=torch.bfloat16)
    assert module["weight"].grad.tolist() == [1, 1, torch.inf]
    tensor = torch.tensor(above[:2], dtype=torch.float64, requires_grad=True)
    result = weft.all_reduce(tensor, "max", wire_dtype=torch.bfloat16)
    assert result.tolist() == [1, 1]
    result.sum().backward()
    assert tensor.grad.dtype is torch.float64


@spmd(2, on=EVERYWHERE)
def test_float16_means_of_what_would_overflow_in_a_sum(group):
    module = nn.Linear(3, 1, bias=False)
    module.weight.grad = torch.full((1, 3), 60000.0)
    weft.sync_grads(module, wire_dtype=torch.float16)
    assert module.weight.grad.eq(60000).all()
    weft.sync_grads(module, average=False, wire_dtype=torch.float16)
    assert module.weight.grad.isinf().all()


@spmd(4, on=("threads", "verbs"))
def test_half_the_bytes(group):
    part, sent = group.subset(range(4)), {}  # which reduces in posts, which are counted
    for wire_dtype in (None, *WIRE_DTYPES):
        module = nn.ParameterDict({str(n): torch.zeros(20_000 * (n + 1)) for n in range(4)})
        for parameter in module.values():
            parameter.grad = torch.ones_like(parameter)
        group.traffic.reset()
        weft.sync_grads(module, group=part, wire_dtype=wire_dtype)
        sent[wire_dtype] = group.traffic.bytes
    assert sent[torch.bfloat16] == sent[torch.float16]
    assert 0.49 < sent[torch.float16] / sent[None] < 0.51


@spmd(3, on=EVERYWHERE)
def test_who_disagrees_is_named_and_nothing_changes(group):
    module = nn.Linear(3, 2)
    module(torch.ones(1, 3)).sum().backward()
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    module.table = table
    before = module.weight.grad.clone()
    mine = torch.bfloat16 if group.rank == 1 else None
    with pytest.raises(weft.WeftError, match="differ in wire_dtype") as caught:
        weft.sync_grads(module, wire_dtype=mine)
    assert "torch.bfloat16" in str(caught.value) and "rank 1" in str(caught.value)
    with pytest.raises(weft.WeftError, match=r"differ in dtype.* sent as torch.bfloat16") as caught:
        weft.all_reduce(torch.ones(2), wire_dtype=mine)
    assert "rank 1" in str(caught.value)
    given = torch.ones(2, dtype=torch.bfloat16 if group.rank else torch.float32)
    with pytest.raises(weft.WeftError, match="differ in dtype"):  # the same bytes, though
        weft.all_reduce(given, wire_dtype=None if group.rank else torch.bfloat16)
    with pytest.raises(
        weft.WeftError, match=r"rank 0: wire_dtype is .* and the values are torch.i"
    ):
        weft.all_reduce(torch.ones(2).int(), wire_dtype=None if group.rank else torch.float16)
    assert torch.equal(module.weight.grad, before)
    weft.sync_grads(module, wire_dtype=torch.bfloat16)
    assert torch.equal(module.weight.grad, before)


@spmd(1, 2, 7)
def test_all_reduce_rounds_the_same_way(group):
    for name in ("small", "large", "empty", "scalar"):
        for wire_dtype in WIRE_DTYPES:
            for op in ("sum", "avg", "min", "max", "prod"):
                with LOCK:
                    want = _reduced(name, group.size, wire_dtype, op)
                mine = numbers(group.rank, name)
                found = weft.all_reduce(mine, op, wire_dtype=wire_dtype)
                assert found.dtype is torch.float32 and found.shape == want.shape
                assert torch.equal(found, want), (name, wire_dtype, op)
                assert torch.equal(mine, numbers(group.rank, name))


@spmd(2, 3, on=EVERYWHERE)
def test_gradients_of_all_reduce_travel_rounded_too(group):
    for op, share in (("sum", group.size), ("avg", 1.0)):
        tensor = torch.full((3,), 1.0, requires_grad=group.rank == 0)
        result = weft.all_reduce(tensor, op, wire_dtype=torch.bfloat16)
        assert result.requires_grad
        (result * 0.1).sum().backward()
        if group.rank == 0:
            once = torch.tensor(0.1).bfloat16().float()
            assert tensor.grad.eq((once * share).bfloat16().float()).all()
