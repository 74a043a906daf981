"""torch.compile takes the other door, with the same results."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import torch
import torch._dynamo.testing
from torch.fx.experimental.proxy_tensor import make_fx

import weft
from weft.base.devices import as_device
from weft.testing import spmd


def data(group, *shape):
    generator = torch.Generator().manual_seed(group.rank)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("staying", [False, True], ids=["host", "device"])
@spmd(2, on=("processes",), timeout=40.0)
def test_a_compiled_model_does_what_it_does_eagerly(group, staying):
    with as_device() if staying else nullcontext():
        does_what_it_does_eagerly(group)


def does_what_it_does_eagerly(group):
    partition = weft.Partition(2)
    layer = weft.nn.AllGather(partition, 0, shape=(4, 3))
    reduced = weft.nn.ReduceScatter(partition, 0)
    halo = weft.nn.HaloExchange(partition, 1)

    def model(x):
        layer(x * 2)  # whose result nobody uses: dropped on one rank, it would hang the other
        return halo(reduced(torch.tanh(layer(x)) * 2)).square()

    x = data(group, 2, 3).requires_grad_()
    eager = model(x)
    (expected,) = torch.autograd.grad(eager.sum(), x)
    code = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        before = group.worker.calls
        y = code(x)
        assert torch.equal(y, eager)
        (found,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(found, expected)
        assert group.worker.calls - before >= 4 + 3

    y = code(x)
    with pytest.raises(RuntimeError, match=r"double backward|create_graph=False"):
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        first.sum().backward()


@spmd(2, on=("processes",), timeout=40.0)
def test_a_length_that_changes_is_compiled_as_any(group):
    """The second time torch.compile sees another length, it compiles for all at once."""
    torch._dynamo.reset()  # else the lengths that other tests of this process had count, too
    partition = weft.Partition(2)
    layers = torch.nn.Sequential(
        weft.nn.ReduceScatter(partition, 0),
        weft.nn.HaloExchange(partition, 1),
        weft.nn.AllSumReduce(partition, ()),
    )
    seen = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    code = torch.compile(layers, fullgraph=True, backend=seen)
    for length in (5, 6, 7, 12):
        x = data(group, length, 2).requires_grad_()
        y = code(x)
        assert torch.equal(y, layers(x))
        (found,) = torch.autograd.grad(y.square().sum(), x)
        assert torch.equal(found, torch.autograd.grad(layers(x).square().sum(), x)[0])
    assert seen.frame_count == 2


@spmd(2, on=("processes",), timeout=40.0)
def test_losses_that_not_every_rank_has(group):
    reduced = weft.nn.SumReduce(weft.Partition(2), 0, shape=(3,))
    corrector = weft.nn.ZeroVolumeCorrector()

    def model(x):
        total = reduced(x.sin())
        return corrector(total.sum() if total.numel() else total)

    code = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = data(group, 3).requires_grad_()
    for _ in range(2):
        before = group.worker.calls
        loss = code(x)
        assert loss.shape == () and torch.equal(loss, model(x))
        (grad,) = torch.autograd.grad(loss, x)
        torch.testing.assert_close(grad, x.cos())
        assert group.worker.calls - before >= 3
    nothing = torch.compile(corrector, fullgraph=True, backend="aot_eager")(
        weft.nn.zero_volume_tensor()
    )
    nothing.backward()  # also where nothing led there that requires a gradient
    assert nothing.item() == 0


@spmd(2, on=("processes",), timeout=40.0)
def test_what_compiled_code_cannot_know(group):
    partition = weft.Partition(2)
    with pytest.raises(Exception, match=r"AllGather under torch.compile needs shape="):
        torch.compile(weft.nn.AllGather(partition, 0), fullgraph=True, backend="aot_eager")(
            data(group, 2)
        )
    layer = weft.nn.AllSumReduce(partition, 0)
    code = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with pytest.raises(weft.WeftError, match="rank 1 needs a gradient, and rank 0 does not record"):
        code(data(group, 2).requires_grad_(group.rank == 1))
    with pytest.raises(weft.WeftError, match="the ranks differ in mode"):
        (layer if group.rank else code)(data(group, 2))
    assert torch.equal(code(data(group, 2)), layer(data(group, 2)))


@spmd(2, on=("processes",), timeout=40.0)
def test_a_memory_format_stays(group):
    halo = weft.nn.HaloExchange(weft.Partition((1, 1, 2)), 1)

    def model(x):
        return halo(x * 2) * 2

    x = data(group, 2, 3, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
    y = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    assert y.is_contiguous(memory_format=torch.channels_last) and torch.equal(y, model(x))
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(dx, torch.autograd.grad(model(x), x, torch.ones_like(y))[0])


@spmd(2, on=("processes",), timeout=40.0)
def test_a_traced_layer_moves_what_comes_later(group):
    """make_fx records an operator, and not what came from other ranks while it traced."""
    layer = weft.nn.AllGather(weft.Partition(2), 0, shape=(4,))

    def gradient(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(layer(x * x).square().sum(), x)[0]

    x = data(group, 2)
    for function in (layer, gradient):
        for options in ({}, {"tracing_mode": "fake"}):
            traced = make_fx(function, **options)(x)
            assert torch.equal(traced(2 * x), function(2 * x))


def reduced(x):
    return weft.all_reduce(x)


TRACED = {
    "linearize": lambda layer, x: torch.func.linearize(layer, x),
    "linearize all_reduce": lambda _, x: torch.func.linearize(reduced, x),
    "jvp": lambda layer, x: make_fx(lambda z: torch.func.jvp(layer, (z,), (z,)))(x),
    "vmap": lambda layer, x: make_fx(torch.vmap(layer))(x[None]),
    "all_reduce": lambda _, x: make_fx(reduced)(x),
    "before dispatch": lambda _, x: make_fx(reduced, pre_dispatch=True)(x),
    "all_to_all": lambda _, x: make_fx(lambda z: weft.all_to_all([z, z]))(x),
    "table": lambda _, x: make_fx(weft.nn.ShardedEmbedding(4, 1))(x.long()),
}


@pytest.mark.parametrize("what", TRACED)
@spmd(2, on=("processes",), timeout=40.0)
def test_a_trace_that_would_keep_what_came_is_an_error_on_every_rank(group, what):
    layer = weft.nn.AllSumReduce(weft.Partition(2), 0)
    with warnings.catch_warnings():  # torch's own, of what it traces in forward mode
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
        with pytest.raises(weft.WeftError, match="is traced by make_fx or torch"):
            TRACED[what](layer, torch.ones(2))
    assert layer(torch.ones(1)).item() == 2
    assert weft.all_reduce(torch.ones(1)).item() == 2


@spmd(2, on=("processes",), timeout=40.0)
def test_where_one_rank_traces_all_are_told(group):
    with pytest.raises(weft.WeftError, match=r"^rank 1: all_reduce is traced by make_fx"):
        (make_fx(reduced) if group.rank else reduced)(torch.ones(2))
    assert weft.all_reduce(torch.ones(1)).item() == 2
