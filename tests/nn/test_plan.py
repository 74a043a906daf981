"""Plans: what moves, the adjoint, and hints that do the same as the moves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.nn import executor
from weft.nn.executor import assemble, execute
from weft.nn.grid import Box, balanced, boxes, whole
from weft.nn.plan import Piece, Side, between
from weft.schedules import chain
from weft.testing import run, spmd
from weft.verbs.carrier import verbs_of


def applied(plan, xs, dtype=torch.int64):
    """What the moves say, one by one."""
    ys = {rank: torch.zeros(shape, dtype=dtype) for rank, shape in plan.want.shapes.items()}
    for move in plan.moves:
        ys[move.destination][move.put.slices] += xs[move.source][move.take.slices]
    return ys


def inputs(plan, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        rank: torch.randint(-9, 9, shape, generator=generator)
        for rank, shape in sorted(plan.have.shapes.items())
    }


def product(xs, ys):
    return sum(int((xs[rank] * ys[rank]).sum()) for rank in xs)


RANKS = 4
INTERVALS = st.tuples(st.integers(-2, 4), st.integers(0, 4))


@st.composite
def sides(draw):
    """Pieces anywhere, overlapping or not, several of a rank, on some ranks."""
    shapes, pieces = {}, []
    for rank in draw(st.sets(st.integers(0, RANKS - 1), min_size=1)):
        found = draw(st.lists(st.tuples(INTERVALS, INTERVALS), min_size=1, max_size=2))
        shapes[rank] = (4, 4)
        for ranges in found:
            box = Box(tuple(a for a, _ in ranges), tuple(a + n for a, n in ranges))
            at = tuple(draw(st.integers(0, 4 - n)) for n in box.shape)
            pieces.append(Piece(rank, box, at))
    return Side(shapes, tuple(pieces))


@given(sides(), sides())
@settings(max_examples=40)
def test_the_adjoint(have, want):
    """<A x, y> == <x, A* y>, exactly."""
    plan = between(have, want)
    xs, ys = inputs(plan, 1), inputs(plan.T, 2)
    assert product(applied(plan, xs), ys) == product(xs, applied(plan.T, ys))
    swapped = [(m.destination, m.put, m.source, m.take) for m in plan.T.moves]
    moves = [(m.source, m.take, m.destination, m.put) for m in plan.moves]
    assert sorted(map(repr, swapped)) == sorted(map(repr, moves))
    assert plan == plan.T.T


def carried_out(plan, x, group):
    """By verbs, where tensors of the group go so; else by posts."""
    return execute(plan, x, group, range(group.size), verbs_of(group, x.device))


KINDS = ("threads", "verbs")


@given(sides(), sides(), st.booleans(), st.sampled_from(KINDS))
@settings(max_examples=30)
def test_any_plan_is_carried_out(have, want, floats, on):
    plan = between(have, want)
    dtype = torch.bfloat16 if floats else torch.int64
    xs = {rank: x.to(dtype) for rank, x in inputs(plan).items()}
    expected = applied(plan, xs, torch.float64 if floats else dtype)
    nothing = torch.empty(0, dtype=dtype)

    def program(group):
        x = xs.get(group.rank, nothing)
        wanted = expected.get(group.rank, nothing).to(dtype)
        y = carried_out(plan, x, group)
        if group.rank in plan.want.shapes:
            assert torch.equal(y, wanted)
            assert torch.equal(assemble(plan, xs, group.rank, dtype, x.device), wanted)

    run(RANKS, program, on=on)


PLANS = {
    "all_gather": lambda n: (dict(cut(n)), dict.fromkeys(range(n), whole((7, 6)))),
    "reduce_scatter": lambda n: (dict.fromkeys(range(n), whole((7, 6))), dict(cut(n))),
    "all_reduce": lambda n: (dict.fromkeys(range(n), whole((7, 6))),) * 2,
    "broadcast": lambda n: ({n - 2: whole((7, 6))}, dict.fromkeys(range(n), whole((7, 6)))),
    "sum_reduce": lambda n: (dict.fromkeys(range(n - 1), whole((7, 6))), {n - 1: whole((7, 6))}),
}


def cut(ranks):
    """Columns, backwards, the first rank having none."""
    lengths = (*balanced(6, ranks - 1), 0)
    return zip(range(ranks), boxes([(7,), lengths])[::-1], strict=True)


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(executor, "DIRECT", -1)
    monkeypatch.setattr(chain, "CHUNKS", (64, 64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.complex32])
@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("hint", PLANS)
@spmd(2, 4, on=KINDS)
def test_a_hint_does_what_the_moves_do(group, hint, dtype, small_chunks):
    have, want = PLANS[hint](group.size)
    plan = between(have, want)
    hints = {"broadcast": "sum_reduce", "sum_reduce": "broadcast", "all_reduce": "all_reduce"}
    if group.size > 2:
        assert plan.hint == (hint if hint in hints else None)
        assert plan.T.hint == hints.get(hint)
    nothing = torch.empty(0, dtype=dtype)
    xs = {rank: x.abs().to(dtype) for rank, x in inputs(plan).items()}
    x = xs.get(group.rank, nothing)
    y = carried_out(plan, x, group)
    if group.rank in want:
        total = applied(plan, {r: x.to(torch.complex128) for r, x in xs.items()}, torch.complex128)
        assert torch.equal(y.to(torch.complex128), total[group.rank])
        assert y.dtype == dtype


def test_no_hint():
    everything, half = whole((4,)), Box((0,), (2,))
    both = dict.fromkeys(range(2), everything)
    assert between({0: everything}, {0: everything}).hint is None
    assert between({0: half, 1: half}, both).hint is None  # the rest stays zero
    assert between({0: half, 1: everything}, both).hint is None  # half of it counts twice
    assert between(both, {0: half, 2: Box((2,), (4,))}).hint is None
    other = Side.of({0: half, 1: half}, {0: 1, 1: 1})
    assert between(Side.of({0: half}), other).hint is None


@pytest.mark.parametrize("on", KINDS)
def test_halves_are_summed_in_a_wider_type(on):
    """257 ones are 257, which bfloat16 rounds to 256 only once; one by one they stop at 256."""
    plan = between({r: whole((1,)) for r in range(3)}, {2: whole((1,))})
    values = [256.0, 1.0, 1.0]

    def program(group):
        x = torch.tensor([values[group.rank]], dtype=torch.bfloat16)
        return carried_out(plan, x, group)

    assert run(3, program, on=on)[2].item() == 258.0
    xs = {r: torch.tensor([v], dtype=torch.bfloat16) for r, v in enumerate(values)}
    assert assemble(plan, xs, 2, torch.bfloat16, xs[0].device).item() == 258.0
