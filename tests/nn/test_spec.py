"""A layer of a program's own: its fields are compared, and a plan that fails loses no group."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

import pytest
import torch

import weft
from weft import nn
from weft.nn import Layer, Spec
from weft.nn.grid import Box, whole
from weft.nn.plan import Piece, Side, between
from weft.testing import run, spmd


@dataclass(frozen=True)
class Shift(Spec):
    """Moves each rank's tensor some ranks further, round about."""

    partition: weft.Partition
    steps: int = 1
    trouble: str = ""

    name = "Shift"

    def plan(self, shapes):
        if self.trouble == "raises":
            return shapes["nobody"]
        if self.trouble == "exits":
            raise SystemExit(3)
        if self.trouble == "forgets":
            return None
        ranks = self.partition.ranks
        size = len(ranks)
        source = {ranks[i]: ranks[(i - self.steps) % size] for i in range(size)}
        have = {rank: whole(shapes[rank]) for rank in ranks}
        want = {rank: have[source[rank]] for rank in ranks}
        return between(Side.of(have, {rank: rank for rank in ranks}), Side.of(want, source))


def works(group, rows=2):
    x = torch.full((rows,), float(group.rank))
    y = Layer(Shift(weft.Partition(group.size)))(x)
    assert y.tolist() == [(group.rank - 1) % group.size] * rows


@pytest.mark.parametrize("rows", [2, 200_000])  # with the opening, or in messages
@spmd(1, 2, 3, on=("threads", "processes", "verbs"))
def test_a_field_that_differs_is_an_error_on_every_rank(group, rows):
    works(group, rows)
    layer = Layer(Shift(weft.Partition(group.size), steps=1 + (group.rank == 1)))
    if group.size > 1:
        with pytest.raises(
            weft.WeftError, match=r"the ranks differ in arguments: .*rank 1 has steps=2"
        ):
            layer(torch.ones(rows))
    works(group, rows)


@pytest.mark.parametrize(
    ("trouble", "text"),
    [
        ("raises", "{0: (2,), 1: (2,), 2: (2,)}: KeyError: 'nobody'"),
        ("forgets", "plan() gave a NoneType and not a weft.nn.plan.Plan"),
    ],
)
@spmd(3, on=("threads", "processes", "verbs"))
def test_a_plan_that_fails_alike_on_every_rank_loses_no_group(group, trouble, text):
    layer = Layer(Shift(weft.Partition(3), trouble=trouble))
    for _ in range(2):
        with pytest.raises(weft.WeftError) as caught:
            layer(torch.ones(2))
        assert str(caught.value).startswith("Shift makes no plan for tensors of these shapes, by")
        assert str(caught.value).endswith(text)
        works(group)


@dataclass(frozen=True)
class Given(Spec):
    """Has a plan that it is given, of two ranks."""

    partition: weft.Partition
    have: Side = field(compare=False, repr=False)
    want: Side = field(compare=False, repr=False)

    name = "Given"

    def plan(self, shapes):
        return between(self.have, self.want)


def side(shape, box=None, at=(0,), ranks=(0, 1)):
    """Each rank has a tensor of that shape, with one box of the global tensor in it; or all."""
    return Side(
        dict.fromkeys(ranks, shape),
        tuple(Piece(rank, box or whole(shape), at) for rank in ranks),
    )


@pytest.mark.parametrize(
    ("have", "want", "text"),
    [
        (side((7,)), None, "have has a tensor of shape (7,) of rank 0, which passes (ROWS,)"),
        (side((2,)), None, "have has a tensor of shape (2,) of rank 0, which passes (ROWS,)"),
        (None, side((2,), ranks=(0, 9)), "want has a tensor of rank 9, and ranks [0, 1] take part"),
        (None, side((-3,), Box((0,), (1,))), "want has a tensor of shape (-3,) of rank 0"),
        (None, side((1.5,)), "of shape (1.5,) of rank 0: lengths are ints from 0"),
        (None, side((2,), Box((0,), (3,))), "does not lie in the tensor of shape (2,)"),
        (None, side((2,), Box((0,), (1,)), (2,)), "does not lie in the tensor of shape (2,)"),
        (None, side((2,), Box((0,), (1,)), (-1,)), "does not lie in the tensor of shape (2,)"),
        (None, side((2,), Box((2,), (1,))), "does not lie in the tensor of shape (2,)"),
        (None, side((2,), Box((0.5,), (1.5,))), "does not lie in the tensor of shape (2,)"),
        (None, side((2, 1), Box((0,), (2,))), "does not lie in the tensor of shape (2, 1)"),
        (None, side((2, 1), at=(0, 0)), "another piece of that tensor has 1 dimensions"),
        (
            None,
            Side({0: (2,)}, (Piece(1, whole((2,)), (0,)),)),
            "a piece of rank 1, and no shape of",
        ),
    ],
)
@pytest.mark.parametrize("rows", [4, 40_000])  # with the opening, or in messages
def test_a_plan_that_does_not_fit_the_tensors_loses_no_group(have, want, text, rows):
    fits = side((rows,))

    def program(group):
        layer = Layer(Given(weft.Partition(2), have or fits, want or fits))
        for _ in range(2):
            with pytest.raises(weft.WeftError) as caught:
                layer(torch.ones(rows))
            works(group)
        return str(caught.value)

    one, other = run(2, program)
    assert one == other
    assert one.startswith("Given makes no plan for tensors of these shapes, by rank, ")
    assert text.replace("ROWS", str(rows)) in one


@pytest.mark.parametrize(("on", "rows"), [("threads", 4), ("threads", 40_000), ("verbs", 4)])
def test_a_tensor_that_the_plan_does_not_read_has_a_gradient_of_zeros(on, rows):
    """Wherever its memory was."""

    def program(group):
        one = side((rows,), ranks=(0,))
        x = torch.ones(rows, requires_grad=True)
        y = Layer(Given(weft.Partition(2), one, one))(x)
        torch.full((rows,), 7.0)  # whose memory is free again
        y.sum().backward()
        return x.grad.unique().tolist()

    assert run(2, program, on=on) == [[1.0], [0.0]]


@pytest.mark.parametrize("give", [(0, 1), (0,)])  # as an all_reduce does, and a broadcast
@pytest.mark.parametrize(("on", "rows"), [("threads", 4), ("threads", 40_000), ("verbs", 4)])
def test_a_rank_that_takes_part_and_is_not_in_the_plan_gets_nothing(on, rows, give):
    have, want = (side((rows + len(give),), ranks=ranks) for ranks in (give, (0, 1)))

    def program(group):
        x = torch.full((rows + len(give),), 1.0 + group.rank)
        return Layer(Given(weft.Partition(3), have, want))(x)[:1].tolist()

    total = float(sum(1 + rank for rank in give))
    assert run(3, program, on=on) == [[total], [total], []]


def test_a_plan_that_exits_does_so_on_every_rank_and_loses_no_group():
    def program(group):
        with pytest.raises(SystemExit):
            Layer(Shift(weft.Partition(2), trouble="exits"))(torch.ones(2))
        works(group)

    run(2, program)


def test_every_argument_of_every_layer_is_compared():
    def program(group):
        grid, row = weft.Partition((2, 1)), weft.Partition(2)
        layers = [
            nn.AllGather(grid, 0),
            nn.ReduceScatter(grid, 0, lengths=[(1, 2)]),
            nn.Broadcast(weft.Partition(1), row),
            nn.SumReduce(row, weft.Partition(1)),
            nn.AllSumReduce(grid, (0, 1)),
            nn.Scatter(grid, 0),
            nn.Gather(grid, 0),
            nn.AllToAll(row, (0, 1), lengths=(1, 2)),
            nn.Repartition(grid, row, lengths=[(1, 2)]),
            nn.HaloExchange(grid, 1),
        ]
        missed = []
        for layer in layers:
            spec = layer.spec
            for each in fields(spec):
                value = getattr(spec, each.name)
                if isinstance(value, weft.Partition) or each.name == "movement":
                    continue  # these have fields of their own with the opening: grids, the name
                another = not value if isinstance(value, bool) else ("other", "one")
                other = replace(spec, **{each.name: another})
                if other.arguments == spec.arguments:
                    missed.append(f"{spec.name}.{each.name}")
        return missed

    assert run(2, program) == [[], []]
