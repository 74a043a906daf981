"""What autograd may ask of a layer: modes, transforms, ranks that differ, memory."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch.autograd import forward_ad

import weft
from weft import nn
from weft.testing import spmd

THREADS = ("threads", "verbs")


def data(group, *shape, dtype=torch.float64, requires_grad=False):
    generator = torch.Generator().manual_seed(group.rank)
    return torch.randn(*shape, generator=generator, dtype=dtype, requires_grad=requires_grad)


@spmd(3, on=(*THREADS, "processes"))
def test_one_rank_needs_a_gradient_and_all_take_part(group):
    layer = nn.AllGather(weft.Partition(3), 0)
    x = data(group, 2, requires_grad=group.rank == 1)
    y = layer(x)
    assert y.requires_grad
    y.square().sum().backward()
    if group.rank == 1:
        assert torch.allclose(x.grad, 6 * x)
    else:
        assert x.grad is None


@pytest.mark.parametrize("which", [nn.AllSumReduce, nn.Repartition])
@spmd(2, on=(*THREADS, "processes"))
def test_backwards_in_another_order_are_an_error_on_every_rank(group, which):
    """Gradients of one size would be mixed up; those of derivatives, too."""
    grid = weft.Partition(2)
    layer = which(grid, 0) if which is nn.AllSumReduce else which(grid, grid)
    for order in (1, 2):
        losses = []
        for _ in range(2):
            x = data(group, 4, requires_grad=True)
            loss = layer(x).pow(3).sum()
            if order == 2:
                (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
                loss = gradient.square().sum()
            losses.append(loss)
        with pytest.raises(weft.WeftError, match=r"of call \d+.* of call \d+"):
            for loss in losses if group.rank else reversed(losses):
                loss.backward()


@spmd(3, on=THREADS)
def test_nobody_needs_a_gradient(group):
    layer = nn.AllSumReduce(weft.Partition(3), 0)
    assert not layer(data(group, 2)).requires_grad
    with torch.no_grad():
        y = layer(data(group, 2, requires_grad=True))
    assert not y.requires_grad and y.grad_fn is None
    with torch.inference_mode():
        assert not layer(data(group, 2)).requires_grad


def refuses_one_without_gradients(group, layer, needs, deaf):
    """Where rank `deaf` records none, the error names it, and the next call works."""
    x = data(group, 2, requires_grad=True)
    text = rf"rank {needs} records gradients of .*, rank {deaf} is under torch.no_grad"
    with (
        pytest.raises(weft.WeftError, match=text),
        torch.set_grad_enabled(group.rank != deaf),
    ):
        layer(x)
    assert layer(x).requires_grad


@spmd(3, on=THREADS)
def test_one_rank_without_gradients_is_named(group):
    layer = nn.AllSumReduce(weft.Partition(3), 0)
    refuses_one_without_gradients(group, layer, 0, 2)


@spmd(3, on=THREADS)
def test_a_rank_of_a_subset_is_named_by_its_number_among_all(group):
    if group.rank == 1:
        return
    layer = nn.AllSumReduce(weft.Partition(2, group=group.subset([2, 0])), 0)
    refuses_one_without_gradients(group, layer, 2, 0)


LAYERS = {
    "all_gather": lambda: nn.AllGather(weft.Partition(2), ()),
    "all_sum_reduce": lambda: nn.AllSumReduce(weft.Partition((2, 1)), 1),
    "reduce_scatter": lambda: nn.ReduceScatter(weft.Partition((2, 1)), 1),
    "repartition": lambda: nn.Repartition(weft.Partition(2), weft.Partition(2)),
    "halo": lambda: nn.HaloExchange(weft.Partition(2), 0),
    "broadcast": lambda: nn.Broadcast(weft.Partition((2, 1)), 1),
}


@pytest.mark.parametrize("name", LAYERS)
@spmd(3, on=THREADS)
def test_an_identity_is_a_copy(group, name):
    layer = LAYERS[name]()
    for x in (data(group, 4, 2), data(group, 600, 2), data(group, 2, 4).t()):
        if group.rank == 2:
            x = nn.zero_volume_tensor(dtype=x.dtype)
        y = layer(x)
        assert torch.equal(x, y) and y is not x
        storage = y.untyped_storage().data_ptr()
        assert not x.numel() or storage != x.untyped_storage().data_ptr()
        back = y.requires_grad_().sum()
        assert back.requires_grad


@spmd(2, on=THREADS)
def test_inputs_and_gradients_of_any_layout(group):
    layer = nn.AllGather(weft.Partition((1, 2)), 1)
    plain = data(group, 4, 3)
    wide = data(group, 4, 9)
    wide[:, 3:6] = plain
    for x in (plain, plain.t().contiguous().t(), wide[:, 3:6], plain[:1].expand(4, 3)):
        x = x.detach().requires_grad_()
        y = layer(x)
        assert torch.equal(y[:, 3 * group.rank : 3 * group.rank + 3], x)
        y.sum().backward()  # whose gradient is expanded
        assert torch.equal(x.grad, torch.full((4, 3), 2.0, dtype=torch.float64))
        (grad,) = torch.autograd.grad((layer(x).t() * torch.arange(4.0)).sum(), x)
        assert torch.equal(grad, 2 * torch.arange(4.0)[:, None].expand(4, 3).double())
    z = data(group, 2, 2, dtype=torch.complex128)
    assert torch.equal(layer(z.conj())[:, 2 * group.rank : 2 * group.rank + 2], z.conj())


@spmd(2, on=THREADS)
def test_gradcheck_of_torch(group):
    """Where ranks have the same data, they perturb alike."""
    partition = weft.Partition(2)
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for layer in (nn.AllSumReduce(partition, 0), nn.HaloExchange(partition, 1, "periodic")):
        x = x.detach().requires_grad_()
        assert torch.autograd.gradcheck(layer, x)
        assert torch.autograd.gradgradcheck(lambda x, layer=layer: layer(x).sin(), x)


def in_forward_mode(layer, x):
    with forward_ad.dual_level():
        return layer(forward_ad.make_dual(x, x))


def of_several_at_once(layer, x):
    """torch makes of several gradients one that stands for all."""
    x = x.detach().requires_grad_()
    y = layer(x)
    return torch.autograd.grad(y, x, torch.ones(2, *y.shape).to(x), is_grads_batched=True)


TRANSFORMS = {
    "grad": lambda layer, x: torch.func.grad(lambda x: layer(x).sum())(x),
    "vjp": lambda layer, x: torch.func.vjp(layer, x),
    "vmap": lambda layer, x: torch.func.vmap(layer)(torch.stack([x, x])),
    "vmap of grad": lambda layer, x: torch.func.vmap(TRANSFORMS["grad"], (None, 0))(layer, x[None]),
    "jacrev": lambda layer, x: torch.func.jacrev(layer)(x),
    "jvp": lambda layer, x: torch.func.jvp(layer, (x,), (x,)),
    "jacfwd": lambda layer, x: torch.func.jacfwd(layer)(x),
    "forward mode": in_forward_mode,
    "gradients in a batch": of_several_at_once,
}
REFUSED = (
    r"rank \d: AllGather.* (a transform such as torch.func.grad|has a tangent of forward-mode)"
)


@pytest.mark.parametrize("extent", [3, 3000])  # with the opening, or in messages
@pytest.mark.parametrize("what", TRANSFORMS)
@spmd(2, on=("processes",))  # a process has one level of forward mode for all threads
def test_what_a_layer_would_lose_is_an_error_on_every_rank(group, what, extent):
    layer = nn.AllGather(weft.Partition(2), 0)
    x = data(group, extent)
    with warnings.catch_warnings():  # torch uses what it calls deprecated
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
        with pytest.raises(weft.WeftError, match=REFUSED):
            TRANSFORMS[what](layer, x)
        for alone in (0, 1) if what != "gradients in a batch" else ():
            with pytest.raises(weft.WeftError, match=rf"rank {alone}: AllGather"):
                TRANSFORMS[what](layer, x) if group.rank == alone else layer(x)
    assert torch.equal(layer(x)[extent * group.rank :][:extent], x)


@spmd(3, on=THREADS)
def test_every_rank_has_a_loss(group):
    layer, corrector = nn.SumReduce(weft.Partition(2), 0), nn.ZeroVolumeCorrector()
    for value in (1.0, 2.0):
        x = torch.full((3,), value, requires_grad=group.rank < 2)
        y = layer(x if group.rank < 2 else nn.zero_volume_tensor())
        loss = corrector(y.square().sum() if y.numel() else y)
        assert loss.shape == ()
        loss.backward()
        if group.rank < 2:
            assert torch.equal(x.grad, torch.full((3,), 4 * value))


@spmd(2)
def test_layers_travel(group):
    partition = weft.Partition((1, 2))
    layers = torch.nn.Sequential(nn.HaloExchange(partition, 1), nn.AllGather(partition, -1))
    assert not layers.state_dict() and not list(layers.parameters())
    x = data(group, 2, 2)
    for other in (pickle.loads(pickle.dumps(layers)), copy.deepcopy(layers), layers.to("cpu")):
        assert torch.equal(other(x), layers(x))
    assert pickle.loads(pickle.dumps(partition)) == partition


@spmd(2, on=("processes",))
@pytest.mark.parametrize("extent", [2, 100_000])
def test_a_call_of_a_layer_is_one_range_however_large_its_tensor_is(group, extent):
    layer = weft.nn.AllGather(weft.Partition(2), 0)
    x = torch.ones(extent, requires_grad=True)
    before = group.worker.calls
    with torch.profiler.profile() as profile:
        layer(x).sum().backward()
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["weft::AllGather"] == counts["weft::AllGather backward"] == 1
    assert group.worker.calls == before + 2
