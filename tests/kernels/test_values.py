"""Reducing, combining, merging: machine code and reference agree bit for bit, and with Python."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cases import in_case
from weft import kernels
from weft.kernels import jit, pool, reference
from weft.kernels.ops import DTYPES, OPS, Op

assert jit.loops() is not None, jit.describe()
PAIRS = [(d, op) for d in DTYPES for op in OPS.values() if op.refuses(d) is None]
NAMES = [f"{str(d).removeprefix('torch.')}-{op.name}" for d, op in PAIRS]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SPECIAL = [
    0.0,
    -0.0,
    float("nan"),
    float("inf"),
    float("-inf"),
    1.0,
    -1.5,
    3e38,
    1e-40,
    6e-8,
    65504,
]
FEW = settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])


def random_values(shape, dtype, mode, generator):
    """Every bit pattern, or the awkward values, or plain ones."""
    if dtype is torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    if mode == "bits" or not dtype.is_floating_point:
        size = dtype.itemsize
        some = torch.randint(256, (*shape, size), dtype=torch.uint8, generator=generator)
        return some.view(dtype).view(shape)
    if mode == "special":
        choice = torch.randint(len(SPECIAL), shape, generator=generator)
        return torch.tensor(SPECIAL, dtype=torch.float64)[choice].to(dtype)
    return torch.randn(shape, generator=generator).to(dtype)


def laid_out(values, layout):
    """The same values, otherwise in memory."""
    if layout == "transposed" and values.dim() > 1:
        return values.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "strided":
        wide = values.new_zeros((*values.shape[:1], 3, *values.shape[1:]))
        wide[:, 1] = values
        return wide[:, 1]
    if layout == "same row":
        return values[:1].expand(values.shape)
    return values


def same(left, right):
    """Equal bit for bit, any NaN like any other."""
    assert left.dtype == right.dtype and left.shape == right.shape
    if left.dtype.is_floating_point:
        assert torch.equal(left.isnan(), right.isnan())
        left, right = (
            left.nan_to_num(7.0, torch.inf, -torch.inf),
            right.nan_to_num(7.0, torch.inf, -torch.inf),
        )
    bits = BITS[left.dtype.itemsize]
    assert torch.equal(left.contiguous().view(bits), right.contiguous().view(bits))


@st.composite
def inputs(draw):
    return {
        "rows": draw(st.sampled_from([1, 2, 3, 10, 60])),
        "ids": draw(st.sampled_from([1, 2, 8, 30, 1000])),
        "row_shape": draw(st.sampled_from([(), (1,), (3,), (2, 5), (64,), (0,), (4, 0)])),
        "layout": draw(st.sampled_from(["plain", "transposed", "strided", "same row"])),
        "mode": draw(st.sampled_from(["bits", "special", "plain"])),
        "sorted": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**32)),
    }


@pytest.fixture
def threads(monkeypatch):
    """Cut even small work for three threads."""
    monkeypatch.setattr(pool, "share", lambda nbytes: 3)


class Guarded:
    """Memory for a result, with a margin on both sides that nobody may touch."""

    MARGIN = 1024

    def __init__(self, shape, dtype):
        self.memory = torch.full((math.prod(shape) + 2 * self.MARGIN,), 1, dtype=dtype)
        self.out = self.memory[self.MARGIN : -self.MARGIN].view(shape)

    def check(self):
        assert (self.memory[: self.MARGIN] == 1).all() and (self.memory[-self.MARGIN :] == 1).all()


def check_reduce(dtype, op, case):
    generator = torch.Generator().manual_seed(case["seed"])
    ids = torch.randint(case["ids"], (case["rows"],), generator=generator)
    if case["sorted"]:
        ids = ids.sort().values
    values = random_values((case["rows"], *case["row_shape"]), dtype, case["mode"], generator)
    values = laid_out(values, case["layout"])
    distinct = reference.distinct(ids)
    u = len(distinct.indices)
    for out_dtype in {dtype, op.accumulator(dtype)}:
        everything = torch.empty((u, *values.shape[1:]), dtype=out_dtype)
        reference.reduce(values, distinct, op, everything)
        ours = Guarded(everything.shape, out_dtype)
        assert kernels.reduce(values, distinct, op, ours.out) is ours.out
        same(ours.out, everything)
        ours.check()
        chosen = torch.randint(u, (case["rows"] // 2,), generator=generator).int()
        ours = Guarded((len(chosen), *values.shape[1:]), out_dtype)
        if kernels.reduce_some(values, distinct, op, chosen, ours.out):
            same(ours.out, everything[chosen])
        ours.check()


@pytest.mark.parametrize(("dtype", "op"), PAIRS, ids=NAMES)
@FEW
@given(case=inputs())
def test_reduce_agrees_with_the_reference(dtype, op, case):
    check_reduce(dtype, op, case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@FEW
@given(case=inputs())
def test_reduce_agrees_on_several_threads(threads, dtype, case):
    check_reduce(dtype, OPS["sum"], case)


def check_combine(dtype, op, case, runs):
    generator = torch.Generator().manual_seed(case["seed"])
    indices = [
        torch.randint(case["ids"], (case["rows"],), generator=generator).unique()
        for _ in range(runs)
    ]
    union = reference.union(indices)
    cut = len(union.indices) // 3
    for out_dtype in {dtype, op.accumulator(dtype)}:
        shape = (len(union.indices), *case["row_shape"])
        ours, expected = Guarded(shape, out_dtype), torch.zeros(shape, dtype=out_dtype)
        for slots in union.slots:
            shape = (len(slots), *case["row_shape"])
            values = laid_out(random_values(shape, dtype, case["mode"], generator), case["layout"])
            places = torch.where(slots < 0, ~slots, slots)
            low = places < cut
            kernels.combine(ours.out[:cut], slots[low], values[low], op)
            kernels.combine(ours.out[cut:], slots[~low], values[~low], op, base=cut)
            reference.combine(expected, slots, values, op, 0)
        same(ours.out, expected)
        ours.check()


@pytest.mark.parametrize(("dtype", "op"), PAIRS, ids=NAMES)
@FEW
@given(case=inputs(), runs=st.integers(1, 4))
def test_combine_agrees_with_the_reference(dtype, op, case, runs):
    check_combine(dtype, op, case, runs)


@FEW
@given(case=inputs(), runs=st.integers(1, 4))
def test_combine_agrees_on_several_threads(threads, case, runs):
    check_combine(torch.float32, OPS["sum"], case, runs)


def test_the_compiled_loops_are_what_was_tested(monkeypatch):
    """Else all of the above would compare the reference with itself."""
    distinct = reference.distinct(torch.tensor([1, 0, 1]))
    values, out = torch.tensor([1.0, 2.0, 4.0]), torch.empty(2)
    slots = reference.union([torch.tensor([0, 3])]).slots[0]
    monkeypatch.setattr(reference, "reduce", None)
    monkeypatch.setattr(reference, "combine", None)
    kernels.reduce(values, distinct, OPS["sum"], out)
    assert out.tolist() == [2.0, 5.0]
    kernels.combine(out, slots, torch.tensor([8.0, 9.0]), OPS["sum"])
    assert out.tolist() == [8.0, 9.0]


# What the reference itself means, told without torch.


def nearest(exact, dtype):
    """The number of a half-precision dtype nearest to a Python float, ties to even."""
    guess = torch.tensor(exact, dtype=torch.float64).to(dtype)
    bits = guess.view(torch.int16)
    around = [(bits + step).to(torch.int16) for step in (-1, 0, 1)]
    key = lambda b: (abs(b.view(dtype).double().item() - exact), b.item() & 1)  # noqa: E731
    return min(around, key=key).view(dtype)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_adds_in_float32_and_rounds_once(dtype, compile):
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(40, (400,), generator=generator)
    values = torch.randn(400, generator=generator).to(dtype)
    distinct = reference.distinct(ids)
    out = torch.empty(len(distinct.indices), dtype=dtype)
    serve = kernels.reduce if compile else reference.reduce
    serve(values, distinct, OPS["sum"], out)
    for index, got in zip(distinct.indices.tolist(), out, strict=True):
        total = None
        for value in values[ids == index].tolist():
            total = torch.tensor(value if total is None else total.item() + value).float()
        assert got == nearest(total.item(), dtype)


def test_duplicates_are_added_in_input_order():
    big, distinct = 2.0**24, reference.distinct(torch.tensor([5, 5, 5, 5]))
    values = torch.tensor([[big, 1.0], [1.0, 1.0], [1.0, 1.0], [-big, big]])
    assert kernels.reduce(values, distinct, OPS["sum"]).tolist() == [[0.0, big + 4]]
    out = torch.empty(1, 2)
    reference.reduce(values, distinct, OPS["sum"], out)
    assert out.tolist() == [[0.0, big + 4]]


@pytest.mark.parametrize("name", ["min", "max"])
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.is_floating_point])
@pytest.mark.parametrize("width", [1, 7, 64])
def test_zeros_have_an_order_wherever_they_lie(name, dtype, width):
    for left, right in itertools.product([0.0, -0.0], repeat=2):
        values = torch.tensor([left, right], dtype=dtype)[:, None].repeat(1, width)
        negative = {"min": min, "max": max}[name](left, right, key=lambda z: str(z) != "-0.0")
        slots = torch.tensor([0], dtype=torch.int32)
        for serve in (lambda *given: kernels.combine(*given[:4]), reference.combine):
            out = values[:1].clone()
            serve(out, slots, values[1:], OPS[name], 0)
            assert out.signbit().tolist() == [[str(negative) == "-0.0"] * width]


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
def test_integers_wrap(dtype):
    greatest = torch.iinfo(dtype).max
    values = torch.tensor([greatest, greatest], dtype=dtype)
    found = kernels.reduce(values, reference.distinct(torch.tensor([0, 0])), OPS["sum"])
    assert found.item() == -2


def test_the_first_to_bring_a_row_is_copied_bit_for_bit():
    bits = torch.tensor([[-0x80000000, 0x7F800123, 1]], dtype=torch.int32)  # -0.0, a NaN, 1e-45
    out = torch.full((1, 3), 9.0)
    kernels.combine(
        out, torch.tensor([-1], dtype=torch.int32), bits.view(torch.float32), OPS["sum"]
    )
    assert torch.equal(out.view(torch.int32), bits)


# Callables.


def join(left, right):
    """Associative and not commutative: 2 by 2 matrices multiplied."""
    return torch.matmul(left, right)


@settings(max_examples=20)
@given(seed=st.integers(0, 1000), ids=st.integers(1, 6), rows=st.integers(1, 14))
def test_a_callable_is_applied_left_to_right(seed, ids, rows):
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(ids, (rows,), generator=generator)
    values = torch.randint(-2, 3, (rows, 2, 2), generator=generator)
    op = Op("callable join", join, builtin=False)
    found = kernels.distinct(indices)
    got = kernels.reduce(values, found, op)
    for index, row in zip(found.indices.tolist(), got, strict=True):
        expected = torch.eye(2, dtype=torch.int64)
        for value in values[indices == index]:
            expected = expected @ value
        assert torch.equal(row, expected)
    runs = [(found.indices, got), (torch.tensor([0, 3]), values.new_ones(2, 2, 2))]
    sums = dict(zip(*(part.tolist() for part in kernels.merge(runs, op)), strict=True))
    if 3 in found.indices:
        at = found.indices.tolist().index(3)
        assert sums[3] == (got[at] @ values.new_ones(2, 2)).tolist()


def test_a_function_is_given_what_two_runs_brought_alone():
    """What is in the place of a row that is the first is not initialised."""
    seen = []
    op = Op("callable see", lambda left, right: seen.append(left) or left + right, builtin=False)
    out = torch.full((3,), 9e9)
    kernels.combine(out, torch.tensor([-1, ~2]).int(), torch.ones(2), op)
    assert not seen
    kernels.combine(out, torch.tensor([0, ~1]).int(), torch.ones(2), op)
    assert [left.tolist() for left in seen] == [[1.0]] and out.tolist() == [2.0, 1.0, 1.0]


# Finishing, merging.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 49, 1000])
def test_finish_divides_and_rounds_once(dtype, divisor):
    values = random_values((500,), dtype, "bits", torch.Generator().manual_seed(divisor))
    out = torch.empty_like(values)
    kernels.finish(values, out, divisor)
    expected = torch.tensor([v / divisor for v in values.double().tolist()], dtype=torch.float64)
    same(out, expected.to(dtype))
    kernels.finish(values, values, divisor)
    same(values, out)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@given(
    divisor=st.integers(1, 4095),
    mantissa=st.integers(2**23, 2**24 - 1),
    power=st.integers(-30, -20),
)
@example(divisor=4095, mantissa=16764928, power=-22)
def test_finish_rounds_to_half_precision_once(dtype, divisor, mantissa, power):
    exact = mantissa * 2.0**power
    for near in (0, -1, 1):  # the quotient next to a tie is where rounding twice would show
        lower = torch.tensor(exact).to(dtype)
        upper = (lower.view(torch.int16) + 1).view(dtype).double().item()
        tie = (lower.double().item() + upper) / 2
        value = torch.tensor([tie * divisor]).float().view(torch.int32) + near
        value = value.view(torch.float32)
        if not torch.isfinite(value).all() or abs(value.item() / divisor) > 60000:
            continue
        out = torch.empty(1, dtype=dtype)
        kernels.finish(value, out, divisor)
        assert out.item() == nearest(value.item() / divisor, dtype).item()


@pytest.mark.parametrize(("dtype", "op"), PAIRS, ids=NAMES)
def test_merge_is_the_ops_in_order(dtype, op):
    for row_shape in ((), (3,), (0,)):
        with in_case(row_shape):
            generator = torch.Generator().manual_seed(3)
            runs = []
            for k in (5, 0, 7, 6):
                indices = torch.randperm(12, generator=generator)[:k].sort().values
                runs.append((indices, random_values((k, *row_shape), dtype, "special", generator)))
            indices, values = kernels.merge(runs, op)
            assert values.dtype == op.accumulator(dtype)
            for index, got in zip(indices.tolist(), values, strict=True):
                rows = [
                    v[(i == index).nonzero()[0, 0]].to(values.dtype) for i, v in runs if index in i
                ]
                total = rows[0]
                for row in rows[1:]:
                    total = op.function(total, row)
                same(got, total)


FIRST = Op("callable first", lambda left, right: left.clone(), builtin=False)
SEVERAL = [], [4], [1, 3, 9], [9, 1, 3], [5] * 37, [2, 2, 7, 7, 7, 8], [*range(0, 99, 7)] * 5


@pytest.mark.parametrize(
    ("dtype", "op"), [*PAIRS, *((d, FIRST) for d in DTYPES)], ids=[*NAMES, *map(str, DTYPES)]
)
def test_torch_operations_merge_what_machine_code_merges(monkeypatch, dtype, op):
    runs = [torch.tensor(ids, dtype=torch.int64) for ids in SEVERAL]
    draws = torch.Generator().manual_seed(1)

    def merged(values):
        parts = []
        for run, rows in zip(runs, values, strict=True):
            found = kernels.distinct(run)
            parts.append((found.indices, kernels.reduce(rows.to(dtype), found, op)))
        return kernels.merge(parts, op)

    for row_shape in ((), (2, 5), (0,)):
        with in_case(row_shape):
            values = [
                torch.randint(-4, 5, (len(i), *row_shape), generator=draws) / -3.0 for i in runs
            ]
            expected = merged(values)
            with monkeypatch.context() as patch:
                patch.setattr(jit, "loops", lambda: None)
                found = merged(values)
            assert torch.equal(found[0], expected[0])
            same(found[1], expected[1])
