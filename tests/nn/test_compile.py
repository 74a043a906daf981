"""torch.compile breaks its graph at a layer, with the same results; a trace of one is an error."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch._dynamo
from torch.fx.experimental.proxy_tensor import make_fx

import weft
from weft.testing import spmd


def data(group, *shape):
    generator = torch.Generator().manual_seed(group.rank)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.fixture(autouse=True)
def quiet():
    """Without Dynamo's own warning at each break of a graph, of what is no leaf."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        yield


class Model(torch.nn.Module):
    """Weights in parts, margins, and a loss that the first rank alone has."""

    def __init__(self):
        super().__init__()
        grid = weft.Partition(2)
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(6, 3, generator=generator, dtype=torch.float64)
        self.weight = torch.nn.Parameter(weight[grid.box(weight.shape).slices].clone())
        self.gather = weft.nn.AllGather(grid, 0)
        self.scatter = weft.nn.ReduceScatter(grid, 0)
        self.halo = weft.nn.HaloExchange(grid, 1)
        self.reduce = weft.nn.SumReduce(grid, 0)
        self.corrector = weft.nn.ZeroVolumeCorrector()

    def forward(self, x):
        self.gather(x * 2)  # whose result nobody uses: dropped on one rank, it would hang the other
        x = torch.tanh(self.gather(x) @ self.gather(self.weight).t())
        x = self.halo(self.scatter(x * 2)).square()
        total = self.reduce(x.sum(0))
        return self.corrector(total.sum() if total.numel() else total)


def trained(model, call, group, steps=3):
    """The losses of some steps, of rows whose number changes, and the weights behind them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        loss = call(data(group, 2 + step, 3))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.weight.detach()


@spmd(2, on=("processes",), timeout=60.0)
def test_a_compiled_model_trains_as_it_does_eagerly(group):
    torch._dynamo.reset()  # else what other tests of this process compiled counts, too
    model = Model()
    losses, weight = trained(model, model, group)
    assert (losses[0] > 0) == (group.rank == 0)
    model = Model()
    before = group.worker.calls
    found, found_weight = trained(model, torch.compile(model, backend="aot_eager"), group)
    assert group.worker.calls - before >= 3 * (5 + 4)
    assert found == losses
    assert torch.equal(found_weight, weight)


@spmd(2, on=("processes",), timeout=60.0)
def test_one_rank_may_compile_alone_and_twice_differentiate(group):
    layer = weft.nn.AllGather(weft.Partition(2), 0)

    def model(x):
        return layer(x.sin()).pow(3)

    code = torch.compile(model, backend="eager") if group.rank else model
    x = data(group, 2, 3).requires_grad_()
    for call in (code, model):
        (first,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        if call is code:
            expected = first, second
    assert torch.equal(first, expected[0]) and torch.equal(second, expected[1])


@spmd(2, on=("processes",), timeout=40.0)
def test_a_graph_that_must_be_whole_is_an_error_of_torch(group):
    layer = weft.nn.AllGather(weft.Partition(2), 0)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(layer, fullgraph=True, backend="eager")(data(group, 2))
    with pytest.raises(Exception, match=r"(?s)AllGather|graph break|disable"):
        torch.export.export(layer, (data(group, 2),))
    assert torch.equal(layer(torch.ones(1)), torch.ones(2))


@spmd(2, on=("processes",), timeout=40.0)
def test_what_is_wrong_on_one_rank_is_told_on_all(group):
    layer = weft.nn.AllSumReduce(weft.Partition(2), 0)
    code = torch.compile(lambda x: layer(x * 2) * 2, backend="eager")
    text = r"rank 1 records gradients of .*, rank 0 is under torch.no_grad"
    with pytest.raises(weft.WeftError, match=text), torch.set_grad_enabled(group.rank == 1):
        code(data(group, 2).requires_grad_())
    with pytest.raises(weft.WeftError, match="in dimension 0 rank 1 has 3, and rank 0 has 2"):
        code(data(group, 2 + group.rank))
    assert torch.equal(code(data(group, 2)), 2 * layer(2 * data(group, 2)))


@spmd(2, on=("processes",), timeout=40.0)
def test_a_memory_format_stays(group):
    halo = weft.nn.HaloExchange(weft.Partition((1, 1, 2)), 1)

    def model(x):
        return halo(x * 2) * 2

    x = data(group, 2, 3, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
    y = torch.compile(model, backend="aot_eager")(x)
    assert y.is_contiguous(memory_format=torch.channels_last) and torch.equal(y, model(x))
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(dx, torch.autograd.grad(model(x), x, torch.ones_like(y))[0])


def reduced(x):
    return weft.all_reduce(x)


TRACED = {
    "layer": lambda layer, x: make_fx(layer)(x),
    "fake layer": lambda layer, x: make_fx(layer, tracing_mode="fake")(x),
    "linearize": lambda layer, x: torch.func.linearize(layer, x),
    "linearize all_reduce": lambda _, x: torch.func.linearize(reduced, x),
    "jvp": lambda layer, x: make_fx(lambda z: torch.func.jvp(layer, (z,), (z,)))(x),
    "vmap": lambda layer, x: make_fx(torch.vmap(layer))(x[None]),
    "all_reduce": lambda _, x: make_fx(reduced)(x),
    "before dispatch": lambda _, x: make_fx(reduced, pre_dispatch=True)(x),
    "all_to_all": lambda _, x: make_fx(lambda z: weft.all_to_all([z, z]))(x),
    "jit": lambda layer, x: torch.jit.trace(layer, (x,)),
    "jit of rows": lambda _, x: torch.jit.trace(
        lambda z: weft.sparse_all_reduce((torch.tensor([0, 1]), z))[1], (x,)
    ),
    "table": lambda _, x: make_fx(weft.nn.ShardedEmbedding(4, 1))(x.long()),
}


@pytest.mark.parametrize("what", TRACED)
@spmd(2, on=("processes",), timeout=40.0)
def test_a_trace_that_would_keep_what_came_is_an_error_on_every_rank(group, what):
    layer = weft.nn.AllSumReduce(weft.Partition(2), 0)
    with warnings.catch_warnings():  # torch's own, of what it traces in forward mode
        warnings.filterwarnings("ignore", "`torch.jit.*` is deprecated")
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        with pytest.raises(weft.WeftError, match="is traced by torch"):
            TRACED[what](layer, torch.ones(2))
    assert layer(torch.ones(1)).item() == 2
    assert weft.all_reduce(torch.ones(1)).item() == 2


@spmd(2, on=("processes",), timeout=40.0)
def test_where_one_rank_traces_all_are_told(group):
    with pytest.raises(weft.WeftError, match=r"^rank 1: all_reduce is traced by torch.jit"):
        (make_fx(reduced) if group.rank else reduced)(torch.ones(2))
    assert weft.all_reduce(torch.ones(1)).item() == 2
