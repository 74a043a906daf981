"""Calls that ranks make again: what was heard before is only compared, and nothing else changes."""

from __future__ import annotations

import itertools
import pickle

import pytest
import torch

import weft
from weft import nn
from weft.kernels import cpu_talk, talk_table
from weft.kernels.compile import compiler
from weft.nn import habit
from weft.nn.habit import Habit
from weft.testing import spmd
from weft.wire.mover import Mover

P = weft.Partition


def integers(wire, number, *shape):
    """Whole numbers, other ones in each call, whose sums are exact."""
    generator = torch.Generator().manual_seed(100 * number + wire.rank)
    return torch.randint(-9, 9, shape, generator=generator).float()


LAYERS = {
    "all_gather": (lambda: nn.AllGather(P(3), 0), lambda rank: (rank + 1, 2)),
    "all_gather of a row": (lambda: nn.AllGather(P((1, 3)), 1), lambda rank: (2, 3 - rank)),
    "reduce_scatter": (lambda: nn.ReduceScatter(P(3), 0), lambda rank: (5,)),
    "all_sum_reduce": (lambda: nn.AllSumReduce(P(3), 0), lambda rank: (4, 1)),
    "broadcast": (lambda: nn.Broadcast(P(1, ranks=[1]), P(3)), lambda rank: (3,) * (rank == 1)),
    "sum_reduce": (lambda: nn.SumReduce(P(3), 0), lambda rank: (3, 3)),
    "repartition": (lambda: nn.Repartition(P((3, 1)), P((1, 3))), lambda rank: (rank + 1, 7)),
    "halo": (lambda: nn.HaloExchange(P(3), 2, "periodic"), lambda rank: (3 + rank, 2)),
    "halo of a large tensor": (lambda: nn.HaloExchange(P(3), 1), lambda rank: (3000, 2)),
    "halo in both dimensions, two ranks": (
        lambda: nn.HaloExchange(P((1, 2), ranks=[2, 0]), (1, 1), "reflect"),
        lambda rank: (0,) if rank == 1 else (40, 40),
    ),
}


def both_ways(layer, x, seed):
    """The result and the gradient for a random gradient of the result."""
    x = x.clone().requires_grad_()
    y = layer(x)
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randint(-9, 9, y.shape, generator=generator).float()
    if y.requires_grad:
        y.backward(grad)
    return y.detach(), x.grad


@pytest.mark.parametrize("name", LAYERS)
@spmd(3, on=("threads",))
def test_the_fifth_call_gives_what_a_first_one_does(wire, name):
    make, shape = LAYERS[name]
    layer = make()
    for number in range(5):
        x = integers(wire, number, *(shape(wire.rank) or (0,)))
        found = both_ways(layer, x, number + wire.rank)
        right = both_ways(make(), x, number + wire.rank)
        for one, other in zip(found, right, strict=True):
            assert (one is None and other is None) or torch.equal(one, other)
    if wire.rank in layer.movement.groups:
        kept = layer.movement.habits.values()
        assert [type(each) for each in kept] == [Habit, Habit]
        assert {each.eager for each in kept} == {"large" not in name and "both" not in name}


LARGE = {
    "all_gather": (lambda: nn.AllGather(P(3), 0), lambda rank: (rank + 200, 90)),
    "all_gather of columns": (lambda: nn.AllGather(P((1, 3)), 1), lambda rank: (200, 99 - rank)),
    "reduce_scatter": (lambda: nn.ReduceScatter(P(3), 0), lambda rank: (70_001,)),
    "reduce_scatter of columns": (lambda: nn.ReduceScatter(P((1, 3)), 1), lambda rank: (301, 200)),
    "all_sum_reduce": (lambda: nn.AllSumReduce(P(3), 0), lambda rank: (400, 101)),
    "all_sum_reduce in parts": (lambda: nn.AllSumReduce(P(3), 0), lambda rank: (1001, 301)),
    "broadcast": (
        lambda: nn.Broadcast(P(1, ranks=[1]), P(3)),
        lambda rank: (300, 200) * (rank == 1),
    ),
    "sum_reduce": (
        lambda: nn.SumReduce(P(3), P(1, ranks=[1])),
        lambda rank: (300, 200),
    ),
    "sum_reduce of little": (lambda: nn.SumReduce(P(3), 0), lambda rank: (9000,)),
    "repartition": (lambda: nn.Repartition(P((3, 1)), P((1, 3))), lambda rank: (rank + 500, 270)),
    "repartition to others": (
        lambda: nn.Repartition(P((2, 1), ranks=[2, 0]), P((1, 2), ranks=[0, 1])),
        lambda rank: (500, 270) * (rank != 1),
    ),
    "wide halo": (lambda: nn.HaloExchange(P(3), 200, "periodic"), lambda rank: (300, 100)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("name", LARGE)
@spmd(3)
def test_what_is_read_where_it_lies_has_the_bits_of_a_first_call(wire, name, dtype):
    make, shape = LARGE[name]
    check_bits(make(), wire.rank, shape(wire.rank), dtype)


SUMS = {  # of four values: of three, two of which commute, not every order shows
    "reduce_scatter": (lambda: nn.ReduceScatter(P(4), 0), (70_001,)),
    "all_sum_reduce": (lambda: nn.AllSumReduce(P(4), 0), (400, 101)),
    "all_sum_reduce in parts": (lambda: nn.AllSumReduce(P(4), 0), (1001, 301)),
    "sum_reduce": (lambda: nn.SumReduce(P(4), P(1, ranks=[2])), (300, 200)),
    "sum_reduce of little": (lambda: nn.SumReduce(P(4), P(1, ranks=[1])), (9000,)),
}


@pytest.mark.parametrize("name", SUMS)
@spmd(4)
def test_what_is_read_is_added_in_the_order_of_a_first_call(wire, name):
    make, shape = SUMS[name]
    check_bits(make(), wire.rank, shape, torch.float32)


def check_bits(layer, rank, shape, dtype):
    compiler.make(cpu_talk.KEY)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(shape or (0,), generator=generator).to(dtype)
    before, after = [], []
    for number in range(5):
        given = x.clone().requires_grad_()
        y = layer(given)
        if y.requires_grad:
            y.backward(y.detach())
        (before if number < 2 else after).append((y.detach(), given.grad))
        given.detach().zero_()  # nobody reads it any more
    for found in after:
        for one, other in zip(found, before[0], strict=True):
            assert (one is None and other is None) or torch.equal(one, other)
    kept = list(layer.movement.habits.values())
    assert [type(each) for each in kept] == [Habit, Habit]
    assert all(each.lends for each in kept)


CROSSINGS = {  # what each lends: all of it, boxes of it, its part of a sum
    "whole": lambda: nn.AllGather(P(3), 0),
    "boxes": lambda: nn.Repartition(P((3, 1)), P((1, 3))),
    "sum": lambda: nn.AllSumReduce(P(3), 0),
}


@pytest.mark.parametrize("how", ["torch", "steps", "steps, later"])
@pytest.mark.parametrize("elements", [70_000, 200_000])
@pytest.mark.parametrize("name", CROSSINGS)
@spmd(3, on=("processes",))
def test_what_cannot_be_read_is_sent(wire, name, elements, how):
    compiler.make(cpu_talk.KEY)
    layer = CROSSINGS[name]()
    x = (torch.arange(elements) + wire.rank).view(-1, 10)
    right = layer(x)
    real, lender, tried, asked = type(wire).read, type(wire).lender, [], []

    def may(self, peer):
        return (peer + self.rank) % 2 == 1

    def read(self, peer, address, into):
        tried.append(peer)
        return may(self, peer) and real(self, peer, address, into)

    def record(self, peer):
        if how == "torch":
            return None
        asked.append(peer)
        found = lender(self, peer).copy()
        late = how == "steps, later" and len(asked) <= len(self.peers)
        found[talk_table.GUARD + 1] += not (may(self, peer) or late)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(wire), "read", read)
        patch.setattr(type(wire), "lender", record)
        for _ in range(5):
            assert torch.equal(layer(x), right)
    if wire.rank != 1:  # which may read all; later only the parts of a sum are refused
        assert bool(tried) == (how != "steps, later" or name == "sum")
    assert bool(asked) == (how != "torch")
    for _ in range(3):
        assert torch.equal(layer(x), right)


@pytest.mark.parametrize("elements", [70_000, 200_000])
@pytest.mark.parametrize("name", CROSSINGS)
@spmd(3, on=("processes",))
def test_a_loan_that_machine_code_cannot_end(wire, name, elements):
    """As while other small messages are under way, the first time that it is asked to."""
    compiler.make(cpu_talk.KEY)
    layer, right, ended, real = CROSSINGS[name](), [], [], Mover.talk

    def talk(self, talk, lines, number, *rest, **named):
        if number:
            return real(self, talk, lines, number, *rest, **named)
        ended.append(number)
        talk.bound = False
        return None

    for call in range(6):
        x = (torch.arange(elements) + wire.rank + call).view(-1, 10)
        with pytest.MonkeyPatch.context() as patch:
            if call > 2:
                patch.setattr(Mover, "talk", talk)
            y = layer(x)
        x.zero_()  # nobody reads it any more
        right.append(y - call * (3 if name == "sum" else 1))
    assert ended and all(torch.equal(each, right[0]) for each in right)


@spmd(4, on=("processes",))
def test_habits_are_carried_out_by_machine_code(wire):
    compiler.make(cpu_talk.KEY)
    ran, real = [], cpu_talk.Talk.run

    def run(self, *arguments):
        came = real(self, *arguments)
        ran.append(came)
        return came

    layers = [nn.AllGather(P(4), 0), nn.HaloExchange(P((4, 1)), (1, 0)), nn.AllSumReduce(P(4), 0)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_talk.Talk, "run", run)
        for layer, size in itertools.product(layers, (16, 200, 20_000)):
            x = torch.randn(size, 8)
            results = [layer(x) for _ in range(4)]
            assert all(torch.equal(each, results[0]) for each in results)
    # two calls of each are habits; those that read what is lent say so, and a sum twice
    assert len(ran) >= 2 * len(layers) * 3 + 4


@spmd(3, on=("processes",))
def test_ranks_of_which_one_can_be_read_by_none_send(wire):
    layer = nn.AllGather(P(3), 0)
    x = torch.full((50_000,), wire.rank)
    with pytest.MonkeyPatch.context() as patch:
        if wire.rank == 1:
            patch.setattr(type(wire), "lends", lambda self, peer: False)
        for _ in range(4):
            assert torch.equal(layer(x), torch.arange(3).repeat_interleave(50_000))
    kept = list(layer.movement.habits.values())
    assert [type(each) for each in kept] == [Habit] and not kept[0].lends


@spmd(4, on=("threads", "processes"))
def test_a_small_halo_of_a_large_tensor_takes_one_message_to_each(wire):
    layer = nn.HaloExchange(P((4, 1)), (1, 0))
    x = torch.randn(200, 64, requires_grad=True)
    results, messages = [], []
    for _ in range(4):
        wire.traffic.reset()
        y = layer(x)
        results.append((y.detach(), *torch.autograd.grad(y, x, y.sin())))
        messages.append(wire.traffic.messages)
    assert messages[2:] == [6, 6] and messages[0] > 6
    for found in results[1:]:  # not one bit changes when a call becomes a habit
        assert all(map(torch.equal, found, results[0]))


@spmd(3, on=("threads",))
def test_sums_of_a_narrow_type_keep_their_bits(wire):
    layer = nn.HaloExchange(P(3), 1, "periodic")
    for size in (8, 9000):
        grads = []
        for _ in range(4):
            generator = torch.Generator().manual_seed(wire.rank)
            x = torch.zeros(size, dtype=torch.bfloat16, requires_grad=True)
            y = layer(x)
            y.backward(torch.randn(y.shape, generator=generator).bfloat16())
            grads.append(x.grad)
        assert all(torch.equal(each, grads[0]) for each in grads)


@spmd(3)
def test_one_rank_brings_something_else(wire):
    layer = nn.AllGather(P(3), 0)
    for rows in (2, 2, 2, 5, 2, 2, 5, 5, 5):
        x = integers(wire, rows, rows if wire.rank == 1 else 2, 2)
        gathered = layer(x)
        assert len(gathered) == rows + 4
        start = 0 if not wire.rank else 2 if wire.rank == 1 else 2 + rows
        assert torch.equal(gathered[start : start + len(x)], x)


@spmd(3, on=("threads",))
def test_one_rank_is_wrong_all_of_a_sudden(wire):
    layer = nn.HaloExchange(P((3, 1)), (1, 0))
    good = torch.full((2000, 2), float(wire.rank))
    last = wire.rank == 2

    def is_right():
        assert layer(good)[0, 0].item() == max(0, wire.rank - 1)

    for _ in range(3):
        is_right()
    wrong = {
        "in dimension 1 rank 2 has 3, and rank 0": torch.zeros(2000, 3),
        "rank 2: HaloExchange takes a tensor, not a list": [1.0],
        "rank 2 has torch.float64": good.double(),
        "wider than the shard of rank 2, which has 0": good[:0],
    }
    for text, given in wrong.items():
        with pytest.raises(weft.WeftError, match=text):
            layer(given if last else good)
        for _ in range(3):
            is_right()
    with pytest.raises(weft.WeftError, match=r"different calls.*AllGather"):
        (nn.AllGather(P(3), 0) if last else layer)(good)
    is_right()


@spmd(3, on=("threads",))
def test_gradients_are_asked_for_by_one_rank_more_or_less(wire):
    layer = nn.ReduceScatter(P(3), 0)
    for asks in (False, False, False, True, True, True, False):
        x = torch.ones(6, requires_grad=asks and wire.rank == 1)
        y = layer(x)
        assert y.requires_grad == asks
        if asks:
            y.sum().backward()
    x = torch.ones(6, requires_grad=True)
    for _ in range(3):
        layer(x).sum().backward()
    with (
        pytest.raises(weft.WeftError, match=r"rank 0 needs a gradient, and rank 1 does not record"),
        torch.set_grad_enabled(wire.rank != 1),
    ):
        layer(x)


@spmd(4, on=("threads",))  # rank 3 has nothing to do with rank 1
def test_a_rank_that_forgot_is_no_trouble(wire):
    layer = nn.HaloExchange(P(4), 1)
    for number in range(9):
        if number in (3, 7) and wire.rank == 1:
            layer.movement.habits.clear()
        y = layer(integers(wire, number, 4000))
        if wire.rank:
            peer = torch.Generator().manual_seed(100 * number + wire.rank - 1)
            before = torch.randint(-9, 9, (4000,), generator=peer)[-1]
            assert y[0] == before


@spmd(2, on=("threads",))
def test_only_so_many_are_kept_and_none_is_pickled(wire):
    layer = nn.AllGather(P(2), 0)
    for length in range(habit._MANY + 9):
        layer(torch.ones(length))
    assert len(layer.movement.habits) <= habit._MANY
    fresh = pickle.loads(pickle.dumps(nn.AllGather(P(2, group=None), 0)))
    assert fresh.movement.habits == {}


@spmd(3, on=("threads",))
def test_second_derivatives_of_habit(wire):
    layer = nn.AllGather(P(3), 0)
    for number in range(4):
        x = integers(wire, number, 2).requires_grad_()
        (grad,) = torch.autograd.grad((layer(x) ** 3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.sum(), x)
        assert torch.equal(second, 18 * x.detach())
