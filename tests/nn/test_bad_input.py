"""Bad input: the same WeftError on every rank that takes part, and the next call works."""

from __future__ import annotations

import re
import threading
import warnings

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import weft
from weft import nn
from weft.nn import autograd
from weft.nn.grid import Box
from weft.testing import run, spmd

P = weft.Partition


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


def nested(layout=torch.strided):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


def quantized():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.quantize_per_tensor")
        return torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8)


def csr():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        return torch.ones(2, 2).to_sparse_csr()


def corner():
    """A layer on a grid of 2 x 2, along both dimensions."""
    return nn.AllGather(P((2, 2)), (0, 1))


def cut(**options):
    """The same, of a layer that cuts."""
    return nn.ReduceScatter(P((2, 2)), (0, 1), **options)


def column():
    return nn.AllGather(P((2, 2)), 0)


def differing(last, others):
    """A layer that the last rank makes otherwise."""
    return lambda: last() if P(4).rank == 3 else others()


def halo(*arguments, **options):
    return lambda: nn.HaloExchange(P(4), *arguments, **options)


SUM, SCATTER = (lambda: nn.AllSumReduce(P(4), 0)), (lambda: nn.ReduceScatter(P(4), 0))
OTHER_LENGTHS = differing(lambda: cut(lengths=[(4, 1)]), lambda: cut(lengths=[(3, 2)]))
OTHER_LAYER = differing(lambda: nn.AllSumReduce(P((2, 2)), (0, 1)), corner)
OTHER_GRID = differing(lambda: nn.AllSumReduce(P((4, 1)), (0, 1)), SUM)
OTHER_WIDTHS = differing(halo(lambda cell: cell[0]), halo(lambda cell: 1))
FAKE = FakeTensorMode().from_tensor(torch.ones(200, 200))
BOOLS, BYTES = ones(2, dtype=torch.bool), ones(4).to(torch.float8_e4m3fn)
NOTHING = nn.zero_volume_tensor()

# (what all are told, layer, what the last of four ranks passes, what the others pass)
WRONG = [
    (r"rank 3 has 3, and rank 1, at the same place of the grid \(1\), has 2", corner, ones(2, 3)),
    ("AllGather: in dimension 1 rank 3 has 3, and rank 1 has 2: shards", column, ones(2, 3)),
    ("rank 3 has a tensor of 1 dimensions, .*and rank 1 one of 2", column, ones(2)),
    ("dimension 1 is cut, and rank", corner, ones(2), ones(2)),
    ("differ in dtype: ranks 0, 1, 2 have .* rank 3 has torch.fl", corner, ones(2, 2).double()),
    (
        r"dense tensors, and this one is of layout torch.sparse_coo, which to_dense\(\) makes",
        corner,
        ones(2, 2).to_sparse(),
    ),
    (r"one is of layout torch.sparse_csr, which to_dense\(\)", corner, csr()),
    (r"one is of layout torch._mkldnn, which to_dense\(\)", corner, ones(2, 2).to_mkldnn()),
    (
        r"one is quantized, which int_repr\(\) or dequantize\(\) makes plain: pass",
        corner,
        quantized(),
    ),
    ("this one is on the meta device.*: pass one with data", corner, ones(2, 2).to("meta")),
    ("one is a FakeTensor, which cannot be read .*: pass a plain", corner, FAKE, ones(200, 200)),
    (r"rank 3: .* this one is nested, which to_padded_tensor\(\) makes", corner, nested()),
    (r"one is nested, which to_padded_tensor\(\) makes", corner, nested(torch.jagged)),
    ("is a UninitializedParameter, which cannot", corner, torch.nn.UninitializedParameter()),
    ("rank 3: AllGather takes a tensor, not a list", corner, [1.0]),
    (r"differ in arguments: .*rank 3 has dims=\(0, 1\), lengths=", OTHER_LENGTHS, ones(5, 4)),
    ("calls: ranks 0, 1, 2 have AllGather .*, rank 3 has AllSumRed", OTHER_LAYER, ones(2, 2)),
    ("differ in partition: .* 4 of ranks 0 to 3, rank 3 has 4x1 of", OTHER_GRID, ones(2, 2)),
    ("AllSumReduce adds up values, and torch.bool has no addition", SUM, BOOLS, BOOLS),
    ("torch.float8_e4m3fn has no addition", SCATTER, BYTES, BYTES),
    ("in dimension 0 rank 3 has 3, and rank 0 has 2", SUM, ones(3), ones(2)),
    (
        r"rank 3: Broadcast takes no tensor from this rank, which passes one of shape \(3,\)",
        *(lambda: nn.Broadcast(P(4), 0), ones(3), NOTHING),
    ),
    (
        "dimension 0 has 4 and is cut into 4 parts, which lengths .* are not",
        *(lambda: nn.ReduceScatter(P(4), 0, lengths=[(1, 1, 1, 2)]), ones(4), ones(4)),
    ),
    (
        r"ReduceScatter: lengths are given for 2 dimensions, and the tensor has 1, \(4,\): pass",
        *(lambda: nn.ReduceScatter(P(4), 0, lengths=[(1, 1, 1, 1), (5,)]), ones(4), ones(4)),
    ),
    ("grid is cut along dims .*, and the tensor has 0 dimensions", SCATTER, ones(), ones()),
    ("a halo of 2 is to be periodic, and the tensor has no", halo(2, "periodic"), ones(0), ones(0)),
    (r"rank 3 has width=\(\(\(0, 0\),\), .* by cell", OTHER_WIDTHS, ones(2), ones(2)),
    ("rank 3 has a tensor of 0 dimensions", halo(1), ones(), ones(3)),
    (r"dims is \(0, 1\).* 1 dimensions: pass", lambda: nn.AllToAll(P(4), (0, 1)), ones(2), ones(2)),
    (r"dims is \(0, -2\), and .* 2 dimen", lambda: nn.AllToAll(P(4), (0, -2)), ones(2, 2)),
    ("dimension 1 rank 3 has 3", lambda: nn.Repartition(P((2, 2)), P(4)), ones(2, 3)),
    (r"along dims \(0, 1\)", lambda: nn.Repartition(P(4), P((2, 2))), ones(2), ones(2)),
]


@pytest.mark.parametrize("on", ["threads", "verbs"])
@pytest.mark.parametrize("case", WRONG, ids=lambda case: case[0])
def test_everybody_who_takes_part_is_told(case, on):
    text, make, last, others = (*case, ones(2, 2))[:4]

    def program(group):
        layer, told = make(), ""
        try:
            layer(last if group.rank == 3 else others)
        except weft.WeftError as error:
            told = str(error)
        weft.nn.AllSumReduce(P(4), 0)(ones(2))
        return told

    told = run(4, program, on=on)
    (sentence,) = {each for each in told if each}
    assert re.search(text, sentence)
    assert told[3]
    if make is not column:  # whose slice has the last two ranks of the first column alone
        assert all(told)


@spmd(3, on=("threads", "processes", "gloo"))
def test_the_same_on_processes(group):
    layer = nn.AllGather(P(3), 0)
    with pytest.raises(weft.WeftError, match="in dimension 1 rank 1 has 5, and rank 0 has 4"):
        layer(ones(2, 5 if group.rank == 1 else 4))
    assert layer(ones(1, 2)).shape == (3, 2)


@spmd(3, on=("threads",))
def test_grids_and_shapes_that_are_none(group):
    gather = nn.AllGather(P(3), 0)
    assert P(3).boxes(5)[2] == Box((4,), (5,))
    for make, text in (
        (lambda: P((2, 2)), r"a grid of \(2, 2\) has 4 cells, the group 3 ranks: start more"),
        (lambda: P(2, ranks=[1, 1]), "rank 1 is in the grid twice"),
        (lambda: P(2, ranks=[1, 3]), "there is no rank 3 in a group of 3"),
        (lambda: P((2, 1), ranks=[1]), r"1 ranks for the 2 cells of a grid \(2, 1\)"),
        (lambda: P((0, 2)), "has a dimension without cells"),
        (lambda: P("ab"), "shape is 'ab': pass integers"),
        (lambda: nn.AllGather(P(3), 1), "dim 1 is out of range: the grid has 1 dimensions"),
        (lambda: nn.AllGather(P((3, 1)), (1, -1)), r"dims \(1, -1\) name a dimension twice"),
        (lambda: nn.Broadcast(P(2), P((1, 3))), r"grid of \(2,\) does not broadcast to .*\(1, 3\)"),
        (lambda: nn.SumReduce(P(1), P((1, 3))), "does not broadcast"),
        (lambda: nn.AllToAll(P(3), (1, 1)), "pass two different dimensions"),
        (lambda: nn.AllToAll(P(3), 0), r"dims is \(0,\): pass two"),
        (lambda: nn.AllGather([0], 0), "AllGather works on a grid, not on a list: pass a weft"),
        (lambda: nn.Repartition(P(3), 3), "Repartition works on a grid, not on a int"),
        (lambda: P(3).union(3), "union works on a grid"),
        (lambda: P.from_mesh("cpu"), "a str is no DeviceMesh"),
        (
            lambda: nn.ReduceScatter(P(3), 0, lengths=(1, 1, 1)),
            r"lengths is \(1, 1, 1\): pass for each",
        ),
        (lambda: nn.ReduceScatter(P(3), 0, lengths=3), "lengths is 3: pass for each dimension"),
        (lambda: nn.HaloExchange(P(3), -1), "of at least 0"),
        (lambda: nn.HaloExchange(P(3), [1, 1]), "of at least 0 for each"),
        (lambda: nn.HaloExchange(P(3), 1.5), "pass an integer"),
        (lambda: nn.HaloExchange(P(3), np.ones((1, 2), int)), "pass an integer, or for each dim"),
        (lambda: nn.HaloExchange(P((1, 3)), torch.tensor([2])), "pass an integer, or for each dim"),
        (lambda: nn.HaloExchange(P(3), [torch.tensor([2])]), "pass an integer, or for each dim"),
        (lambda: nn.HaloExchange(P(3), lambda cell: -cell[0]), "width is -1: .* of at least 0"),
        (lambda: nn.HaloExchange(P(3), lambda cell: None), "width is None: pass an integer"),
        (lambda: nn.HaloExchange(P(3), 1, "reflect"), "boundary 'reflect' is unknown: use zero or"),
        (lambda: P(3).reshape((2, 2)), r"a grid of \(2, 2\) cannot be made of 3 ranks"),
        (
            lambda: P(3).subset([3]),
            "no rank 3 in a partition of size 3: pass 0 to 2, or start more ranks",
        ),
        (lambda: P(3).subset([-1]), "no rank -1 in a partition of size 3: pass 0 to 2"),
        (lambda: P(3).subset([1, 1]), r"positions are \[1, 1\]: pass some, each of them once"),
        (lambda: P(3).subset([]), r"positions are \[\]: pass some"),
        (lambda: P((1, 3)).boxes(5), r"cuts dimensions that a tensor of shape \(5,\) does not"),
        (lambda: P(3).boxes("ab"), "boxes: shape is 'ab': pass integers"),
        (lambda: P(3).boxes((-3,)), r"boxes: shape is \(-3,\): lengths are at least 0"),
        (lambda: gather.plan("x"), "AllGather: shapes is 'x': pass a shape for each rank"),
        (lambda: gather.plan({0: -4, 1: 1, 2: 1}), r"shapes\[0\] is -4: lengths are at least 0"),
        (
            lambda: gather.plan({0: 1, 1: (9.5,), 2: 1}),
            r"Gather: shapes\[1\] is \(9.5,\): pass int",
        ),
    ):
        with pytest.raises(weft.WeftError, match=text):
            make()


@spmd(3, on=("threads", "verbs"))
def test_an_inactive_rank_brings_nothing(group):
    """It talks to nobody, so it alone is told."""
    layer = nn.AllGather(P(2), 0)
    if group.rank == 2:
        before = group.traffic.messages
        with pytest.raises(weft.WeftError, match=r"rank 2: AllGather does not concern this rank"):
            layer(ones(2))
        x = torch.empty(0, 3, requires_grad=True)
        y = layer(x)
        assert y is not x and y.shape == (0, 3) and y.requires_grad
        assert group.traffic.messages == before
    else:
        assert layer(ones(2)).shape == (4,)


@spmd(2, on=("threads", "verbs"))
def test_a_shape_that_changes_on_one_rank_is_right(group):
    layer = nn.AllGather(P(2), 0)
    assert layer(ones(2)).shape == (4,)
    assert layer(ones(3 if group.rank else 2)).shape == (5,)
    assert layer(ones(2)).shape == (4,)


def test_the_rank_whose_statement_cannot_be_read_is_named(monkeypatch):
    """Also above 16 ranks, where others pass it on."""
    pack = autograd.packed

    def cut_short(*given):
        whole = pack(*given)
        return whole[:-1] if threading.current_thread().name == "rank 13" else whole

    monkeypatch.setattr(autograd, "packed", cut_short)

    def program(group):
        with pytest.raises(weft.WireError, match="rank 13 sent a statement that cannot") as caught:
            nn.AllGather(P(18), 0)(ones(2))
        assert caught.value.culprit == 13

    run(18, program)
