"""A list of tables in one call: each table's result as if alone, in one table's messages."""

from __future__ import annotations

import functools
import io
import threading

import pytest
import torch

import weft
from cases import in_case, same
from weft.sparse import ALGORITHMS, last_call
from weft.testing import expected, spmd

THREADS = ("threads", "stand-in")
EVERYWHERE = (*THREADS, "processes")
LOCK = threading.Lock()
KINDS = [  # row shape, dtype, index dtype, height
    ((3,), torch.float32, torch.int64, 50),
    ((), torch.bfloat16, torch.int32, None),
    ((2, 2), torch.float64, torch.int64, 40),
    ((3,), torch.float32, torch.int32, 3 * 10**6),
    ((3,), torch.int8, torch.int64, None),
    ((0,), torch.float32, torch.int64, 60),
    ((5,), torch.float16, torch.int64, 2**40),
]
ALIKE = [((3,), torch.float32, index, height) for _, _, index, height in KINDS]


def table(rank, number, kind, count):
    """Rows of one table that depend on the rank's and the table's numbers alone."""
    shape, dtype, index, height = kind
    draw = torch.Generator().manual_seed(100 * rank + number)
    places = min(height or 80, 2**31 - 1 if index is torch.int32 else 2**62)
    indices = torch.randint(places, (count,), generator=draw)
    indices[::2] %= min(places, 3 * count + 1)  # some that ranks share
    values = torch.randint(-4, 5, (count, *shape), generator=draw)
    return weft.Rows(indices.to(index), values.to(dtype), height)


def serving(group, *names):
    """Those that serve tensors that go as those of the group do."""
    return ["auto", "plain"] if group.session.is_by_group else [*names]


def tables_of(rank, kinds, count, *, missing=()):
    return [
        table(rank, number, kind, 0 if (rank, number) in missing else count + number)
        for number, kind in enumerate(kinds)
    ]


@functools.cache
def _wants(size, kinds, count, op, missing):
    everyone = [tables_of(rank, kinds, count, missing=missing) for rank in range(size)]
    return [expected(parts, op) for parts in zip(*everyone, strict=True)]


def check(group, got, kinds, count, op="sum", missing=()):
    with LOCK:  # made once: ranks that are threads, and all algorithms, want the same
        wants = _wants(group.size, tuple(kinds), count, op, tuple(missing))
    for number, (result, want) in enumerate(zip(got, wants, strict=True)):
        with in_case(number):
            alike(result, want)
            assert result.height == want.height


def alike(result, want):
    """In bits and dtypes."""
    same(result, want)
    assert result.indices.dtype == want.indices.dtype
    assert result.values.dtype == want.values.dtype


def mine(group, kinds, count, missing=()):
    return tables_of(group.rank, kinds, count, missing=missing)


@pytest.mark.parametrize("name", ["auto", "plain", *sorted(ALGORITHMS)])
@spmd(1, 3, on=THREADS)
def test_each_table_as_if_alone(group, name):
    each_table_as_if_alone(group, name)


@pytest.mark.parametrize("name", ["auto", "split"])
@spmd(2, 7, on=("processes",))
def test_each_table_as_if_alone_between_processes(group, name):
    each_table_as_if_alone(group, name)


def each_table_as_if_alone(group, name):
    missing = [(0, 2), (1, 0), (2, 6), *((rank, 4) for rank in range(7))]
    for kinds in (ALIKE, KINDS, KINDS[1:2]):
        with in_case(kinds):
            got = weft.sparse_all_reduce(mine(group, kinds, 20, missing), algorithm=name)
            check(group, got, kinds, 20, missing=missing)
            record = last_call()
            assert record.union == sum(map(len, got))
            by_rule = "alone" if group.size == 1 else "eager"
            if group.session.is_by_group or name == "plain":
                assert record.algorithm == "plain"
            else:
                assert record.algorithm == (name if name != "auto" and group.size > 1 else by_rule)


@pytest.mark.parametrize("height", [2**29 + 1, 2**30 - 1, 2**31 - 1])
@spmd(2, on=THREADS)
def test_tables_whose_heights_together_need_more_than_32_bits(group, height):
    """Each by itself needs fewer."""
    kinds = [((3,), torch.float32, torch.int32, height)] * 4
    for name in serving(group, "auto", "gather", "split"):
        with in_case(name):
            got = weft.sparse_all_reduce(mine(group, kinds, 20), algorithm=name)
            check(group, got, kinds, 20)


@pytest.mark.parametrize("name", ["auto", "plain"])
@spmd(2, on=THREADS)
def test_the_last_of_all_keys_is_the_first_of_more_than_31_bits(group, name):
    """It is not taken for what fills the list of a rank with fewer rows."""
    top = 2**30 - 1
    last = (torch.tensor([top, 2, top - 1])[: 1 + 2 * group.rank], torch.ones(1 + 2 * group.rank))
    first = (torch.tensor([top, 3]), torch.ones(2))
    (one, _), (other, sums) = weft.sparse_all_reduce([first, last], algorithm=name)
    assert one.tolist() == [3, top]
    assert other.tolist() == [2, top - 1, top] and sums.tolist() == [1, 1, 2]


def check_against_single_calls(group, rows, algorithm="auto", **options):
    """For larger tables: the definition takes too long, and a call for each is tested elsewhere."""
    got = weft.sparse_all_reduce(rows, algorithm=algorithm, **options)
    record = last_call()
    single = "gather" if algorithm == "auto" and record.algorithm != "plain" else algorithm
    for result, each in zip(got, rows, strict=True):
        with in_case(algorithm, options):
            alike(result, weft.sparse_all_reduce(each, algorithm=single, **options))
    return record.algorithm


LARGE = [
    ((40,), torch.float32, torch.int64, 4000),
    ((), torch.bfloat16, torch.int32, None),
    ((2, 30), torch.float64, torch.int64, 4000),
    ((40,), torch.float32, torch.int32, 3 * 10**6),
    ((7,), torch.int8, torch.int64, 10**6),
]


@pytest.mark.parametrize("kinds", [[LARGE[0], LARGE[3], LARGE[0]], LARGE], ids=["alike", "mixed"])
@spmd(2, 7, on=EVERYWHERE)
def test_more_than_fits_in_the_opening(group, kinds):
    few = {(rank, number) for rank in range(2, 7) for number in (0, 2, 4)}
    for missing in ((), few):  # the latter: rows that fit on some ranks, headers on the others
        rows = mine(group, kinds, 600, missing)
        assert check_against_single_calls(group, rows) != "eager"


FLOATS = [kind for kind in LARGE if kind[1].is_floating_point]


@pytest.mark.parametrize("kinds", [[LARGE[0], LARGE[3]], FLOATS], ids=["alike", "mixed"])
@spmd(1, 3, on=THREADS)
def test_operations_and_rounding(group, kinds):
    """The bits of a call for each table; tables that are as narrow already are not rounded."""
    seen = set()

    def last(left, right):  # gets rounded values in the tables' own dtypes
        seen.add(left.dtype)
        return right

    # of the others each has one of the sizes with an operation; auto has all of both
    others = serving(group, "gather", "split", "doubling")
    sizes = ((9, torch.bfloat16), (1100, torch.float16), (30, None))
    for turn, (count, narrow) in enumerate(sizes):
        rows = mine(group, kinds, count, missing={(1, 1)})
        for each in rows:  # what must be rounded
            each.values.add_(torch.linspace(0, 1, each.values.numel()).view(each.values.shape))
        for number, op in enumerate(("sum", "avg", "max", last)):
            other = [others[2 * number % len(others)]] if number % len(sizes) == turn else []
            if op is last:  # which plain alone takes
                other = ["plain"]
            for name in ("auto", *other):
                seen.clear()
                ran = check_against_single_calls(group, rows, name, op=op, wire_dtype=narrow)
                if op is last:
                    assert seen <= {kind[1] for kind in kinds} and (seen or count < 1000), name
                by_wire = op is not last and not group.session.is_by_group
                if group.size > 1 and name == "auto" and by_wire:
                    assert (ran == "eager") == (count < 1000), op


@spmd(3, on=THREADS)
def test_ranks_agree_on_what_a_list_is_rounded_to(group):
    rows = mine(group, [((40,), *LARGE[0][1:]), ((80,), *LARGE[0][1:])], 3000)
    with pytest.raises(weft.WeftError, match=r"wire_dtype: ranks 0, 1 have .*16, rank 2 has"):
        narrow = torch.bfloat16 if group.rank < 2 else torch.float16
        weft.sparse_all_reduce(rows, wire_dtype=narrow)
    with pytest.raises(weft.WeftError, match=r"rank 0: table 1: wire_dtype is .*16, which"):
        whole = weft.Rows(torch.arange(2), torch.arange(2))
        weft.sparse_all_reduce([rows[0], whole], wire_dtype=torch.float16)


@spmd(1, 3, on=THREADS)
def test_a_list_of_which_no_rank_has_rows_is_recorded(group):
    none = (torch.empty(0, dtype=torch.int64), torch.empty(0))
    nothing = ("eager", "no rank has rows, and nothing is sent after ranks have said so")
    for empty, count in (([], 1), ([none], 1), ([none] * 9000, 2)):  # of two statements
        weft.sparse_all_reduce(empty)
        record = last_call()
        assert record.messages == count * (group.size - 1) and record.bound_bytes == 0
        assert (record.algorithm, record.why) == nothing


@spmd(1, 2, on=THREADS)
def test_a_list_is_not_explained(group):
    with pytest.raises(weft.WeftError, match="rank 0: explain takes one table: pass one of the li"):
        weft.explain([one_hot(group, 1)])
    weft.explain(one_hot(group, 1))


def spread(group, count, shape, dtype):
    indices = torch.arange(count) * 7 + group.rank % 2
    return weft.Rows(indices, torch.ones(count, *shape, dtype=dtype), 7 * count)


@pytest.mark.parametrize("kinds", [ALIKE, KINDS], ids=["alike", "mixed"])
@spmd(4, on=("threads",))
def test_a_list_takes_a_call_for_each_kind(group, kinds):
    """Behind one exchange that says what the tables are."""
    shapes = [kinds[number % len(kinds)][:2] for number in range(26)]
    calls = len(set(shapes))
    weft.sparse_all_reduce([spread(group, 20, *kind) for kind in shapes])
    assert last_call().algorithm == "eager"
    assert last_call().messages == (1 + calls) * (group.size - 1)

    many = [spread(group, 500, *kind) for kind in shapes]
    one = spread(group, 26 * 500, *shapes[0])
    for name in ("gather", "split"):
        weft.sparse_all_reduce(many, algorithm=name)
        of_list = last_call()
        assert of_list.why == "it was asked for"
        weft.sparse_all_reduce(one, algorithm=name)
        if calls == 1:
            assert of_list.messages == last_call().messages + group.size - 1
            assert of_list.bound_bytes == last_call().bound_bytes


@spmd(1, 3, on=THREADS)
def test_indices_that_do_not_fit_in_one_key_space(group):
    """All ranks are told, also those whose own would fit; alone such a table is no trouble."""
    far = torch.tensor([2**62 if group.rank == 0 else 7])
    huge, other = (far, torch.ones(1, 3)), (torch.tensor([2**62]), torch.ones(1, 3))
    with pytest.raises(weft.WeftError, match=rf"table \d: index {2**62} is too large"):
        weft.sparse_all_reduce([other, huge])
    far = far.clamp(max=2**60)
    for result in weft.sparse_all_reduce([(far, huge[1]), (far, torch.ones(1))]):
        assert result[0].tolist() == ([2**60] if group.size == 1 else [7, 2**60])


@spmd(2, on=("stand-in",))
def test_an_index_that_is_too_large_on_a_device_is_told_from_the_last_one(group):
    last = 2**63 // 2 - 2
    for wrong in ([last + 1, last], [last, last + 1], [last, 2**63 - 1]):
        rows = [(torch.tensor(wrong), torch.ones(2)), (torch.tensor([3]), torch.ones(1))]
        with pytest.raises(weft.WeftError, match=rf"rank 0: table 0: index {max(wrong)} is too la"):
            weft.sparse_all_reduce(rows)
    rows[0] = (torch.tensor([last, last]), torch.ones(2))
    (indices, _), (others, values) = weft.sparse_all_reduce(rows)
    assert (indices.tolist(), others.tolist(), values.tolist()) == ([last], [3], [2])


@pytest.mark.parametrize("kinds", [ALIKE, KINDS], ids=["alike", "mixed"])
@pytest.mark.parametrize("count", [50, 2000])
@spmd(2, on=EVERYWHERE)
def test_results_are_saved_alone_and_together(group, kinds, count):
    """Each has memory of its own: what is saved of one holds nothing of the others."""
    results = weft.sparse_all_reduce(mine(group, kinds, count))
    parts = [part for result in results for part in (result.indices, result.values)]
    places = [part.untyped_storage().data_ptr() for part in parts if part.numel()]
    assert len(set(places)) == len(places)
    for saved in (parts, *([part] for part in parts)):
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        for part, back in zip(saved, torch.load(file), strict=True):
            assert part.untyped_storage().nbytes() == part.nbytes
            assert torch.equal(back, part)


@spmd(2, 18, on=THREADS)
def test_a_rank_without_rows_learns_their_shape_and_knowing_it_saves_an_opening(group):
    messages = []
    for shape in ((2,), (), (2, 2)):
        empty = weft.Rows(torch.empty(0, dtype=torch.int64), torch.empty(0, *shape), 50)
        tables = [weft.Rows(torch.tensor([group.rank]), torch.ones(1, 2), 50)] * 2
        if group.rank == 1:
            tables[1] = empty
        got = weft.sparse_all_reduce(tables)
        assert got[1].indices.tolist() == [rank for rank in range(group.size) if rank != 1]
        assert got[1].row_shape == (2,)
        messages.append(last_call().messages)
    if group.size == 2:
        assert messages == [messages[0], messages[0] + 1, messages[0] + 1]


@spmd(20, on=THREADS)
def test_above_sixteen_ranks(group):
    missing = [(rank, rank % 7) for rank in range(20)]
    for name in serving(group, "auto", "split"):
        got = weft.sparse_all_reduce(mine(group, KINDS, 9, missing), algorithm=name)
        check(group, got, KINDS, 9, missing=missing)
    kinds = list(KINDS)
    if group.rank == 13:
        kinds[3] = ((4,), *kinds[3][1:])
    with pytest.raises(weft.WeftError, match=r"row shape of table 3: .* \(3,\), rank 13 has \(4"):
        weft.sparse_all_reduce(mine(group, kinds, 9))
    with pytest.raises(weft.WeftError, match="different calls"):
        both = mine(group, KINDS, 9)
        weft.sparse_all_reduce(both if group.rank % 2 else both[0])
    weft.sparse_all_reduce(mine(group, KINDS, 9))


@spmd(1, 2, on=THREADS)
def test_hundreds_of_tables_and_none(group):
    for op in ("sum", "avg", "bxor"):
        assert weft.sparse_all_reduce([], op) == []
    with pytest.raises(weft.WeftError, match=r"^rank 0: op 'xor' is unknown"):
        weft.sparse_all_reduce([], "xor")
    many = [(torch.tensor([group.rank, 7]), torch.full((2,), float(n))) for n in range(600)]
    got = weft.sparse_all_reduce(many)
    assert len(got) == 600
    for number, (indices, values) in enumerate(got):
        assert indices.tolist() == [*range(group.size), 7]
        assert values.tolist() == [number] * group.size + [number * group.size]
    assert last_call().messages == 2 * (group.size - 1) or group.session.is_by_group
    bad = (torch.tensor([-1]), torch.ones(1))
    with pytest.raises(weft.WeftError, match="rank 0: table 599: index -1 is negative"):
        weft.sparse_all_reduce([*many[:599], bad if group.rank == 0 else many[0]])


@spmd(1, 3, on=EVERYWHERE)
def test_forms(group):
    rows = mine(group, KINDS[:3], 20)
    plain = weft.sparse_all_reduce(rows)
    given = [rows[0].to_coo(), (rows[1].indices, rows[1].values), rows[2]]
    for name in serving(group, "auto", "split", "doubling"):
        coo, pair, last_ = weft.sparse_all_reduce(given, algorithm=name)
        assert coo.is_coalesced()
        assert coo.shape == (50, 3)
        for found, want in zip((weft.Rows.from_coo(coo), pair, last_), plain, strict=True):
            same(found, want)
    listed = list(rows)
    work = weft.sparse_all_reduce(listed, async_op=True)
    listed.clear()  # for the next step; the tables are those of the call
    for result, want in zip(work.wait(), plain, strict=True):
        same(result, want)


@spmd(1, 3, on=EVERYWHERE)
def test_results_are_the_callers(group):
    rows = mine(group, KINDS, 20)
    before = [weft.Rows(each.indices.clone(), each.values.clone()) for each in rows]
    got = weft.sparse_all_reduce(rows)
    for result in got:
        result.indices.fill_(3)
        result.values.fill_(3)
    weft.sparse_all_reduce(rows)
    assert all(result.values.eq(3).all() and result.indices.eq(3).all() for result in got)
    for each, want in zip(rows, before, strict=True):
        same(each, want)


def one_hot(group, number, *row_shape):
    """A row that all ranks have and one of this rank's."""
    return torch.tensor([group.rank, 70]), torch.full((2, *row_shape), float(number))


@spmd(1, 2, 3, on=EVERYWHERE)
def test_a_table_of_which_nobody_has_rows_stays_as_it_is(group):
    nothing = torch.empty(0, dtype=torch.int64), torch.empty(0, 4)
    for name in serving(group, "auto", "split", "doubling"):
        for others in ([], [one_hot(group, 1)], [one_hot(group, 1), one_hot(group, 2, 3)]):
            got = weft.sparse_all_reduce([*others, nothing, nothing], algorithm=name)
            shapes = [(group.size + 1, *values.shape[1:]) for _, values in others]
            assert [values.shape for _, values in got] == [*shapes, (0, 4), (0, 4)]


@spmd(1, 2, 18, on=THREADS)
def test_errors_name_the_table_of_the_list(group):
    """Also of one that takes several statements, as of 90 tables of many ranks."""
    many = [one_hot(group, number) for number in range(90)]
    if group.rank == 1:
        many[88] = one_hot(group, 88, 5)
    if group.size > 1:
        text = r"row shape of table 88: ranks? 0.* ha.* \(\), rank 1 has \(5,\); pass"
        with pytest.raises(weft.WeftError, match=text):
            weft.sparse_all_reduce(many)


BOTH = [((2,), torch.float32, torch.int64, 9), ((3,), torch.float32, torch.int64, 9)]

WRONG = {
    "index": (
        lambda rows: {"rows": [rows[0], (torch.tensor([4, -3]), torch.ones(2, 3))]},
        "rank 1: table 1: index -3 is negative",
    ),
    "row shape": (
        lambda rows: {"rows": [rows[0], weft.Rows(torch.tensor([1]), torch.ones(1, 4), 9)]},
        r"row shape of table 1: ranks? 0.* ha.* \(3,\), rank 1 has \(4,\); pass",
    ),
    "long row shape": (
        lambda rows: {"rows": [rows[0], weft.Rows(torch.tensor([1]), torch.ones([1] * 50), 9)]},
        r"row shape of table 1: ranks? 0.* ha.* \(3,\), rank 1 has \(1, 1.*1\); pass",
    ),
    "dtype": (
        lambda rows: {"rows": [weft.Rows(rows[0].indices, rows[0].values.double(), 9), rows[1]]},
        r"in value dtype of table 0: ranks? 0.* ha.* torch.float32, rank 1 has torch.float64;",
    ),
    "height": (
        lambda rows: {"rows": [rows[0], weft.Rows(rows[1].indices, rows[1].values, None)]},
        "in height of table 1: ranks? 0.* ha.* 9, rank 1 has no height",
    ),
    "op": (lambda rows: {"op": "max"}, "op: .* sum, rank 1 has max"),
    "unknown op": (lambda rows: {"op": "median"}, "rank 1: op 'median' is unknown"),
    "algorithm": (lambda rows: {"algorithm": "plain"}, "algorithm: .* auto, rank 1 has plain"),
    "fewer": (lambda rows: {"rows": rows[:1]}, "number of tables: .* 2, rank 1 has 1"),
    "none": (lambda rows: {"rows": []}, "number of tables: .* 2, rank 1 has 0"),
    "no list": (lambda rows: {"rows": rows[0]}, r"different calls: .*of a list .* rank 1 has"),
}


@spmd(2, 3, on=EVERYWHERE)
def test_one_rank_errs_and_all_are_told(group):
    """Of each error in turn, in one group: so all calls after an error work, too."""
    rows = mine(group, BOTH, 4)
    for what, (make, text) in WRONG.items():
        with in_case(what):
            arguments = {"rows": rows, **(make(rows) if group.rank == 1 else {})}
            with pytest.raises(weft.WeftError, match=text):
                weft.sparse_all_reduce(**arguments)
            check(group, weft.sparse_all_reduce(rows), BOTH, 4)


@pytest.mark.parametrize("index", [-1, 50, 2**40])
@spmd(2, on=THREADS)
def test_an_index_outside_of_its_own_table_is_found(group, index):
    good = weft.Rows(torch.tensor([3]), torch.ones(1), 50)
    bad = weft.Rows(torch.tensor([index if group.rank else 7]), torch.ones(1), 50)
    with pytest.raises(weft.WeftError, match=f"rank 1: table 1: index {index} is "):
        weft.sparse_all_reduce([good, bad, good])
    wide = weft.Rows(good.indices, torch.ones(1, 2), 50)  # each is alone in its call
    with pytest.raises(weft.WeftError, match=f"rank 1: table 1: index {index} is "):
        weft.sparse_all_reduce([wide, bad])
    assert weft.sparse_all_reduce([good, good])[1].values.tolist() == [2]
