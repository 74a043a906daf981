"""uint64 indices up to 2^64 - 1, as hashed keys have them: the same rows on every rank, ascending
as unsigned numbers, whoever has those from 2^63 on. What must come is computed by NumPy.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import weft
from weft.compat.oneccl import event, request
from weft.sparse import ALGORITHMS, last_call
from weft.testing import run, spmd
from weft.testing.cases import in_case

WIDTH = 2
UNUSED = [None] * 4
HALF, LAST = 2**63, 2**64 - 1

ENDS = [0, 7, HALF - 1, HALF, HALF + 7, LAST - 1, LAST]
NEAR = [*range(9), *range(HALF, HALF + 9)]
HASHED = [(0x9E3779B97F4A7C15 * number) % 2**64 for number in range(1, 12)]
CASES = {
    "ends": lambda rank, size: ENDS,
    "hashed": lambda rank, size: HASHED,
    "near the ends of the halves": lambda rank, size: NEAR,
    "nobody": lambda rank, size: [index for index in ENDS if index < HALF],
    "only from 2^63 on": lambda rank, size: [index for index in HASHED if index >= HALF],
    "one rank alone": lambda rank, size: ENDS if rank == size - 1 else ENDS[:3],
    "one rank has them, another is empty": lambda rank, size: [[], ENDS, ENDS[:2]][rank % 3],
    "each half on a rank": lambda rank, size: ENDS[3:] if rank % 2 else ENDS[:3],
    "nobody has a row": lambda rank, size: [],
}


def part(case, rank, size):
    """Unequal counts, repeated indices, in no order."""
    pool = np.array(CASES[case](rank, size), np.uint64)
    draw = np.random.default_rng(rank)
    count = len(pool) and 17 + rank
    return draw.choice(pool, count), draw.integers(-4, 5, (count, WIDTH)).astype(np.float32)


def everyone(case, size):
    return [part(case, rank, size) for rank in range(size)]


def reduced(parts, ufunc=np.add):
    """Distinct indices, ascending as unsigned numbers, and what they add up to."""
    indices, values = (np.concatenate(each) for each in zip(*parts, strict=True))
    found, where = np.unique(indices, return_inverse=True)
    first = np.zeros(len(found), int)
    first[where[::-1]] = np.arange(len(where))[::-1]
    sums, rest = values[first], np.setdiff1d(np.arange(len(where)), first)
    ufunc.at(sums, where[rest], values[rest])
    return found.tolist(), sums.ravel().tolist()


def concatenated(parts):
    indices, values = (np.concatenate(each) for each in zip(*parts, strict=True))
    return indices.tolist(), values.ravel().tolist()


def sent(rows):
    return rows[0], rows[0].size, rows[1], rows[1].size


def by_request(rows, op="sum", attributes=None):
    """Started, and what gives its result."""
    ind, val = np.zeros(64, np.uint64), np.zeros(64 * WIDTH, np.float32)
    made = request.sparse_allreduce(
        *(*sent(rows), ind, None, val, None, "uint64", "float", op, attributes)
    )

    def result():
        made.wait()
        return ind[: made.recv_ind_count].tolist(), val[: made.recv_val_count].tolist()

    return result


def by_event(rows, op="sum", *, how="completion_fn", mode="regular", group=None):
    kept = []

    def complete(indices, count, dtype, values, *rest):
        assert (dtype, count) == (torch.uint64, len(indices))
        kept.extend((indices, values))

    def allocate(count, dtype, values, *rest):
        kept.extend((torch.zeros(count, dtype=dtype), torch.zeros(values)))
        return kept

    attr = event.create_sparse_allreduce_attr(
        coalesce_mode=mode, **{how: complete if how == "completion_fn" else allocate}
    )
    made = event.sparse_allreduce(*(*sent(rows), *UNUSED, "uint64", "float", op, group), attr=attr)
    return lambda: (made.wait(), tuple(each.tolist() for each in kept))[1]


@spmd(1, 2, 3, 8)
def test_every_face(group):
    for case in CASES:
        with in_case(case):
            parts, rows = everyone(case, group.size), part(case, group.rank, group.size)
            want = reduced(parts)
            assert by_request(rows)() == by_event(rows)() == want
            assert by_event(rows, how="alloc_fn", mode="keep_precision")() == want
            assert by_event(rows, "max")() == reduced(parts, np.maximum)
            assert by_event(rows, how="alloc_fn", mode="disable")() == concatenated(parts)


@spmd(18, on=("threads",))
def test_more_ranks_than_speak_directly(group):
    for case in ("one rank alone", "one rank has them, another is empty", "nobody"):
        with in_case(case):
            parts, rows = everyone(case, group.size), part(case, group.rank, group.size)
            assert by_event(rows, how="alloc_fn")() == reduced(parts)
            assert by_event(rows, mode="disable")() == concatenated(parts)


@pytest.mark.parametrize("algorithm", ["auto", *ALGORITHMS])
def test_every_algorithm(monkeypatch, algorithm):
    monkeypatch.setenv("CCL_SPARSE_ALLREDUCE", algorithm)

    def program(group):
        for case in CASES:
            with in_case(case):
                rows = part(case, group.rank, group.size)
                assert by_event(rows, how="alloc_fn")() == reduced(everyone(case, group.size))
                assert last_call().algorithm == ("eager" if algorithm == "auto" else algorithm)

    run(3, program)


@pytest.mark.parametrize("algorithm", ["auto", "split"])
@spmd(3, on=("processes",))  # each has its own environment
def test_rows_that_do_not_fit_in_the_opening(group, algorithm):
    pool, shape = np.arange(9000, dtype=np.uint64) * np.uint64(2**64 // 9000), (20_000, WIDTH)
    draws = [np.random.default_rng(rank) for rank in range(group.size)]
    parts = [(d.choice(pool, 20_000), d.integers(-4, 5, shape).astype("f4")) for d in draws]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CCL_SPARSE_ALLREDUCE", algorithm)
        assert by_event(parts[group.rank], how="alloc_fn")() == reduced(parts)
        assert by_event(parts[group.rank], mode="disable")() == concatenated(parts)


@spmd(3, on=("threads",))
def test_custom_reductions_keep_order_in_both_halves(group):
    def later(a, b):  # associative, not commutative
        return b

    def add(in_buf, in_count, inout_buf, out_count, dtype, context):
        inout_buf += in_buf

    parts, rows = everyone("hashed", group.size), part("hashed", group.rank, group.size)
    indices, values = (np.concatenate(each).tolist() for each in zip(*parts, strict=True))
    last = dict(zip(indices, values, strict=True))
    want = [number for index in sorted(last) for number in last[index]]
    assert by_event(rows, later)() == (sorted(last), want)
    attributes = request.Attributes(reduction_fn=add)
    assert by_request(rows, "custom", attributes)() == reduced(parts)


@spmd(2, on=("threads",))
def test_a_prologue_and_an_epilogue_see_all_rows_at_once(group):
    seen = []

    def half(in_buf, in_count, in_dtype, context):
        seen.append(in_count)
        return in_buf.double() / 2

    def back(in_buf, in_count, in_dtype, out_buf, *rest):
        seen.append(in_count)
        out_buf.copy_(in_buf * 2)

    parts, rows = everyone("ends", group.size), part("ends", group.rank, group.size)
    want = reduced(parts)
    attributes = request.Attributes(prologue_fn=half, epilogue_fn=back)
    assert by_request(rows, attributes=attributes)() == want
    assert seen == [rows[1].size, len(want[1])]


def raises(*_):
    raise MemoryError("no room")


def breaks(a, b):
    if a.max() > 50 or b.max() > 50:
        raise ArithmeticError("too much")
    return a + b


HIGH = np.array([LAST, LAST], np.uint64), np.full((2, WIDTH), 99, np.float32)
WRONG = {
    # what rank 1 passes; the others have rows on both sides
    "rows of another width": (
        lambda: by_event((HIGH[0], np.ones((2, 5), np.float32))),
        r"differ in row shape: ranks 0, 2 have \(2,\), rank 1 has \(5,\)",
    ),
    "another reduction": (lambda: by_event(HIGH, "max"), "the ranks differ in op"),
    "another mode": (lambda: by_event(HIGH, mode="disable"), "the ranks are in different calls"),
}


@pytest.mark.parametrize("what", WRONG)
@spmd(3, on=("threads",))
def test_one_rank_errs_beside_indices_from_2_63_on(group, what):
    erring, text = WRONG[what]
    rows = part("ends", group.rank, group.size)
    with pytest.raises(weft.WeftError, match=text):
        (erring if group.rank == 1 else lambda: by_event(rows))()()
    assert by_event(rows)() == reduced(everyone("ends", group.size))


@spmd(3, on=("threads",))
def test_rows_of_two_widths_of_which_each_is_in_one_half(group):
    """Neither call alone could tell."""
    width = 5 if group.rank == 1 else WIDTH
    rows = np.array([LAST if group.rank == 1 else 3], np.uint64), np.ones((1, width), np.float32)
    with pytest.raises(weft.WeftError, match="rank 1: rows have 5 values each, those of other"):
        by_event(rows)()


@pytest.mark.parametrize("where", [3, LAST])
@spmd(3, on=("threads",))
def test_a_function_that_raises_in_either_half_is_told_to_all(group, where):
    rows = np.array([3, LAST], np.uint64), np.ones((2, WIDTH), np.float32)
    rows[1][rows[0] == where] = 99
    with pytest.raises(weft.WeftError, match="ArithmeticError: too much"):
        by_event(rows, breaks)()
    assert by_event(rows)()[0] == [3, LAST]


def unreached(*_):
    pytest.fail("nothing is handed out on any rank")


@spmd(3, on=("threads",))
def test_an_allocation_that_fails_is_told_to_all(group):
    rows = part("ends", group.rank, group.size)
    size = len(reduced(everyone("ends", group.size))[0])

    def few(count, dtype, values, *rest):
        assert (count, values) == (size, size * WIDTH)  # told at once how much there is in all
        return np.zeros(count - 1, np.uint64), np.zeros(values, np.float32)

    for function, text in ((few, "alloc_fn's idx_buf holds 6 elements"), (raises, "no room")):
        callback = {"alloc_fn": function} if group.rank == 1 else {"completion_fn": lambda *_: None}
        attr = event.create_sparse_allreduce_attr(**callback)
        made = event.sparse_allreduce(*sent(rows), *UNUSED, "uint64", "float", "sum", attr=attr)
        with pytest.raises(weft.WeftError, match=f"^rank 1: .*{text}"):
            made.wait()
    assert by_event(rows, how="alloc_fn")() == reduced(everyone("ends", group.size))


@spmd(2, 3)
def test_calls_that_are_queued_take_their_turns(group):
    """The second call of the first comes before all that was made after it."""
    cases = ["one rank alone", "nobody", "hashed", "one rank alone"]
    made = []
    for number, case in enumerate(cases):
        rows = part(case, group.rank, group.size)
        mode = "disable" if number == 3 else "regular"
        made.append(by_event(rows, how=["alloc_fn", "completion_fn"][number % 2], mode=mode))
    own = weft.sparse_all_reduce((torch.tensor([1]), torch.ones(1)), async_op=True)
    total = weft.all_reduce(torch.ones(3))
    parts = [everyone(case, group.size) for case in cases]
    assert made[3]() == concatenated(parts[3])
    for each, mine in zip(made[:3], parts[:3], strict=True):
        assert each() == reduced(mine)
    assert own.wait()[1].tolist() == [group.size]
    assert total.tolist() == [group.size] * 3
