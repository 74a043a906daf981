"""A layer of a program's own: its fields are compared, and a plan that fails loses no group."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import pytest
import torch

import weft
from weft import nn
from weft.nn import Layer, Spec
from weft.nn.grid import whole
from weft.nn.plan import Side, between
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


@pytest.mark.parametrize("rows", [2, 200_000])  # in the handshake, or in messages
@spmd(1, 2, 3)
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
@spmd(3)
def test_a_plan_that_fails_alike_on_every_rank_loses_no_group(group, trouble, text):
    layer = Layer(Shift(weft.Partition(3), trouble=trouble))
    for _ in range(2):
        with pytest.raises(weft.WeftError) as caught:
            layer(torch.ones(2))
        assert str(caught.value).startswith("Shift makes no plan for tensors of these shapes, by")
        assert str(caught.value).endswith(text)
        works(group)


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
                    continue  # these have fields of their own in the handshake: grids, the name
                another = not value if isinstance(value, bool) else ("other", "one")
                other = replace(spec, **{each.name: another})
                if other.arguments == spec.arguments:
                    missed.append(f"{spec.name}.{each.name}")
        return missed

    assert run(2, program) == [[], []]
