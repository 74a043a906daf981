"""Lists among ranks that read each other's memory: the same bits, in one exchange less."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import weft
from weft import kernels
from weft.errors import WeftError, WireError
from weft.kernels import lists
from weft.kernels.compile import compiler
from weft.kernels.ops import OPS
from weft.sparse import coalesced, joint, last_call, near_tables, outcome
from weft.sparse.joint import Joint
from weft.sparse.mixed import Stack, Stacked
from weft.testing import processes
from weft.wire import common, lent, process_group

RANKS, F32 = 3, torch.float32

needs_reading = pytest.mark.skipif(
    lent._read() is None or ((lent.yama() or 0) > 0 and not lent.may_trace()),
    reason="this machine does not let processes read each other's memory",
)

ALIKE = [((24,), torch.float32, 4000), ((24,), torch.float32, None), ((24,), torch.float32, 2**40)]
MIXED = [
    *ALIKE,
    ((2, 30), torch.float64, 5000),
    ((), torch.bfloat16, None),
    ((0,), torch.float32, 700),
    ((7,), torch.int8, 10**6),
]


def tables(rank, kinds, count):
    """Some tables, one of them empty on one rank and one on all."""
    draw = torch.Generator().manual_seed(rank)
    made = []
    for number, (shape, dtype, height) in enumerate(kinds):
        rows = count * (number != rank) * (number != 5)
        indices = torch.randint(min(height or 10**4, 10**4), (rows,), generator=draw)
        values = torch.randn(rows, *shape, generator=draw).mul(50).to(dtype)
        made.append(weft.Rows(indices, values, height))
    return made


def keep_left(left, right):
    return left - right


CALLS = [
    (ALIKE, 3000, {}),
    (MIXED, 2000, {}),
    (ALIKE, 3000, {"op": "avg"}),
    (MIXED, 2000, {"op": "max"}),
    (MIXED[:5], 3000, {"op": keep_left}),
    (MIXED[:4], 3000, {"wire_dtype": torch.bfloat16}),
    (ALIKE[:1], 5000, {}),
]


HOW = ["machine code", "torch", "both"]


def started(how="torch"):
    """The wire; machine code reads what peers lend on all ranks, on none, or on rank 1 not."""
    dist.init_process_group("gloo")
    wire = process_group.of_group(None)
    if how == "machine code" or (how == "both" and wire.rank != 1):
        added = [kernels.lists.sums_key(dtype, OPS["sum"]) for dtype in (F32, torch.float64)]
        for key in (kernels.lent.KEY, kernels.lists.KEY, *added):
            compiler.make(key)
            assert compiler.made(key)
    else:
        wire.lender = lambda peer: None
    return wire


def counted(module, name):
    """How often a function of a module was called."""
    calls, real = [], getattr(module, name)

    def function(*args, **options):
        calls.append(name)
        return real(*args, **options)

    setattr(module, name, function)
    return calls


def same(ours, theirs):
    return all(
        torch.equal(mine.indices, other.indices) and torch.equal(mine.values, other.values)
        for mine, other in zip(ours, theirs, strict=True)
    )


def both_ways(calls, how, least):
    """For each call whether reading gave what sending does, and what all else was as it should."""
    common.LEAST = least
    wire = started(how)
    if wire.rank == 1:  # late: its rows are ready before anybody hears where they are
        real, really = Joint.values, Joint.lay

        def lay(self, memory, op):
            memory.zero_()
            time.sleep(0.05)
            return really(self, memory, op)

        def values(self, memory, op):
            if self._values is None:
                memory.zero_()
                time.sleep(0.05)
            return real(self, memory, op)

        Joint.values, Joint.lay = values, lay
    reads, found = counted(near_tables, "split"), []
    for kinds, count, options in calls:
        for few in (False, True):  # rows that fit in the opening, on one rank
            rows = tables(wire.rank, kinds, 5 if few and wire.rank == 2 else count)
            said = weft.explain(rows, group=wire, **options)
            before = len(reads), wire.sequence
            made = weft.sparse_all_reduce(rows, group=wire, **options)
            once = len(reads) - before[0], wire.sequence - before[1]
            name = last_call(wire).algorithm
            sent = weft.sparse_all_reduce(rows, group=wire, algorithm="gather", **options)
            fallible = callable(options.get("op"))
            found.append(
                (same(made, sent), once == (1, 1 + fallible), said.chosen == name == "split")
            )
    dist.destroy_process_group()
    return found


@needs_reading
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("least", [0, 1 << 60])  # the result made in common, or not
def test_what_is_read_has_the_bits_of_what_is_sent(how, least):
    for found in processes(RANKS, both_ways, CALLS, how, least, timeout=120.0):
        assert found == [(True, True, True)] * (2 * len(CALLS))


def skewed(how, places):
    """Tables of which the first has most rows: what is right, and who sorted how often."""
    wire = started(how)
    draw = torch.Generator().manual_seed(wire.rank)
    rows = []
    for count in (6000, 900, 30, 0):
        indices = torch.randint(places, (count,), generator=draw)
        rows.append(weft.Rows(indices, torch.randn(count, 24, generator=draw)))
    sent = weft.sparse_all_reduce(rows, group=wire, algorithm="gather")
    other = last_call(wire)
    sorts, sums, splits = (
        counted(Joint, "sort"),
        counted(lists, "sums"),
        counted(near_tables, "split"),
    )
    right = same(weft.sparse_all_reduce(rows, group=wire), sent)
    record = last_call(wire)
    noted = (record.rows, record.total, record.bound_bytes)
    alike = noted == (other.rows, other.total, other.bound_bytes)
    dist.destroy_process_group()
    return right, alike, len(splits), (len(sorts), len(sums))


@needs_reading
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("places", [10**5, 1000], ids=["distinct", "repeated"])
def test_a_table_is_cut_in_the_middle(how, places):
    found = processes(RANKS, skewed, how, places, timeout=120.0)
    assert [each[:3] for each in found] == [(True, True, 1)] * RANKS
    if how == "machine code":  # nobody sorts its own rows, and all are added where they lie
        assert [each[3] for each in found] == [(0, 1)] * RANKS


def even(rank, rows, seed=0):
    """Six tables of about as many rows, of which the first is of another kind than the others.

    So what its owner leaves free is no whole number of the rows that the next owner has.
    """
    draw = torch.Generator().manual_seed(10 * seed + rank)
    many = [torch.randint(5000, (rows,), generator=draw) for _ in range(6)]
    widths = [23, 24, 24, 24, 24, 24]
    return [
        weft.Rows(own, torch.randn(rows, width, generator=draw))
        for own, width in zip(many, widths, strict=True)
    ]


def exchanged():
    """Exchanges that calls took to make their results in common; which were right, to the end."""
    common.LEAST = 0
    wire = started("machine code")
    said, held, exchanges = counted(common, "_exchanged"), [], []
    for number, rows in enumerate([900, 900, 900, 700, 20 if wire.rank == 0 else 900, 900]):
        mine = even(wire.rank, rows, number)
        before = len(said)
        ours = weft.sparse_all_reduce(mine, group=wire)
        exchanges.append(len(said) - before)
        ours[0].values.add_(0.0)  # a caller that writes
        held.append((ours if wire.rank else None, mine))  # others hold what rank 0 does not
        del ours
    wrong = even(wire.rank, 900)
    if wire.rank == 1:
        wrong[3].indices[0] = -1
    try:
        weft.sparse_all_reduce(wrong, group=wire)
    except WeftError as error:
        exchanges.append(str(error).split(":")[0])
    before, mine = len(said), even(wire.rank, 900, 9)
    held.append((weft.sparse_all_reduce(mine, group=wire), mine))
    exchanges.append(len(said) - before)
    right = []
    for ours, mine in held:
        wanted = weft.sparse_all_reduce(mine, group=wire, algorithm="gather")
        right.append(ours is None or same(ours, wanted))
    dist.destroy_process_group()
    return exchanges, right


def test_a_result_is_taken_apart_wherever_its_owners_left_room():
    """Whole rows of the table's kind, other bytes, and rows of no bytes."""
    kinds = [(5, (2,)), (4, (3,)), (6, (3,)), (1, (3,)), (2, (0,)), (3, (0,))]
    begins = {0: 0, 2: 40 + 48 + 24, 3: 112 + 72 + 4, 5: 232}  # bytes
    values = torch.arange(60.0)
    stacks = [Stack(F32, (width,), 0) for width in (2, 3, 0)]
    space = SimpleNamespace(stacks=stacks, tables_of=[[0], [1, 2, 3], [4, 5]])
    result = Stacked(torch.empty(0), values.view(torch.uint8), begins)
    found = outcome._pieces(result, space, [count for count, _ in kinds])
    at = [0, 10, 28, 47, 50, 50]
    for part, (count, shape), first in zip(found, kinds, at, strict=True):
        wanted = values[first : first + count * shape[0]].view(count, *shape)
        assert torch.equal(part, wanted)


@needs_reading
def test_where_no_table_is_cut_a_result_takes_one_exchange():
    for exchanges, right in processes(RANKS, exchanged, timeout=120.0):
        # the first has no blocks yet; in the fifth rank 0 has few rows, and offers too little
        assert exchanges == [2, 1, 1, 1, 2, 1, "rank 1", 1]
        assert right == [True] * 7


def moved(least):
    """Bytes that a rank read in a call, and what the call's record says that it sent."""
    common.LEAST = least
    wire = started()
    rows = tables(wire.rank, MIXED, 2000)
    weft.sparse_all_reduce(rows, group=wire)
    read, real = [], type(wire).read

    def noted(self, peer, address, into):
        read.append(into.nbytes)
        return real(self, peer, address, into)

    type(wire).read = noted
    weft.sparse_all_reduce(rows, group=wire)
    dist.destroy_process_group()
    return sum(read), last_call(wire).sent_bytes


@needs_reading
def test_what_is_read_counts_as_sent():
    read, sent = map(sum, zip(*processes(RANKS, moved, 1 << 60, timeout=120.0), strict=True))
    said = RANKS * (RANKS - 1) * 2000  # statements, and where sums are
    assert read > 10 * said and read < sent < read + said
    rows, counted = map(sum, zip(*processes(RANKS, moved, 0, timeout=120.0), strict=True))
    assert 10 * said < rows < read - 10 * said  # no sums
    assert sent - said < counted < sent + said


def one_cannot(how):
    """One rank cannot lend: whether results are right, and the openings of each call."""
    wire = started()
    near_tables._PAUSE = 6
    if wire.rank == 1:
        if how == "large":
            near_tables._MOST = 1000
        else:
            wire.lends = lambda peer: False
    reads, openings, right = counted(near_tables, "split"), [], []
    for _ in range(6):
        rows = tables(wire.rank, ALIKE, 3000)
        before = wire.sequence
        made = weft.sparse_all_reduce(rows, group=wire)
        openings.append(wire.sequence - before)
        right.append(same(made, weft.sparse_all_reduce(rows, group=wire, algorithm="gather")))
    dist.destroy_process_group()
    return right, openings, len(reads)


@needs_reading
@pytest.mark.parametrize("how", ["large", "hidden"])
def test_where_one_rank_cannot_lend_all_open_again_and_rest(how):
    for right, openings, reads in processes(RANKS, one_cannot, how, timeout=120.0):
        assert all(right) and reads == 0
        # two openings; then two calls of these, and some of others, that do not try it
        assert openings == [2, 1, 1, 2, 1, 1]


def gives_up(how, by):
    """Rank 0 lends nothing any more when the others are about to read: what they raise."""
    common.LEAST = 1 << 60  # sums are read
    wire = started(by)
    rows = tables(wire.rank, ALIKE, 3000)
    weft.sparse_all_reduce(rows, group=wire)
    real = near_tables.told

    def told(told_wire, said):
        if wire.rank == 0 and how == "wipes":
            wire._connections.mover._guard.wipe()
        heard = real(told_wire, said)
        if wire.rank == 0 and how == "raises":
            raise RuntimeError("enough")
        return heard

    near_tables.told = told
    culprit = None
    try:
        for _ in range(2):  # who had all it needs from rank 0 hears of it in the next call
            weft.sparse_all_reduce(rows, group=wire)
    except WireError as error:
        culprit = error.culprit
    except RuntimeError:
        culprit = "own"
    dist.destroy_process_group()
    return culprit


@needs_reading
@pytest.mark.parametrize("by", HOW)
@pytest.mark.parametrize(
    ("how", "culprits"),
    [("raises", ["own", 0, 0]), ("wipes", [0, 0, 0])],
)
def test_a_rank_that_lends_nothing_any_more_is_named_by_all(how, culprits, by):
    assert processes(RANKS, gives_up, how, by, timeout=120.0) == culprits


def errs(what):
    """One rank errs, or differs: what all say, and whether the next call works."""
    wire = started()
    rows = tables(wire.rank, ALIKE, 3000)
    wrong = list(rows)
    if wire.rank == 1 and what == "index":
        wrong[2] = weft.Rows(torch.tensor([5, -3]), torch.ones(2, 24), 2**40)
    elif wire.rank == 1:
        wrong[2] = weft.Rows(torch.arange(3000), torch.ones(3000, 7), 2**40)
    reads = counted(coalesced.near_tables, "split")
    said = ""
    try:
        weft.sparse_all_reduce(wrong, group=wire)
    except weft.WeftError as error:
        said = str(error)
    count = len(reads)
    made = weft.sparse_all_reduce(rows, group=wire)
    right = same(made, weft.sparse_all_reduce(rows, group=wire, algorithm="gather"))
    dist.destroy_process_group()
    return said, right, count


@needs_reading
@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("index", "rank 1: table 2: index -3 is negative: indices count from 0"),
        ("shape", "the ranks differ in table 2: rank 0 has rows of shape (24,), rank 1 has rows "
                  "of shape (7,); pass the same on every rank"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_before_anybody_reads(what, text):
    assert processes(RANKS, errs, what, timeout=120.0) == [(text, True, 0)] * RANKS


def laid_late():
    """Machine code comes while a rank lays its rows: whether the result is right."""
    wire = started("machine code")
    rows = tables(wire.rank, ALIKE, 3000)
    sent = weft.sparse_all_reduce(rows, group=wire, algorithm="gather")
    real, calls = joint.laid, []

    def laid(*args):
        calls.append(args)
        return None if len(calls) == 1 else real(*args)

    joint.laid = laid
    right = same(weft.sparse_all_reduce(rows, group=wire), sent)
    dist.destroy_process_group()
    return right, len(calls) > 1


@needs_reading
def test_machine_code_may_come_while_rows_are_laid():
    assert processes(RANKS, laid_late, timeout=120.0) == [(True, True)] * RANKS


def test_keys_are_read_before_their_memory_is_let_go():
    """Where sums are copied to the caller nobody may hold the memory that they came in."""
    memory = torch.arange(32, dtype=torch.uint8)
    expected = memory.view(torch.int32).clone()

    def own(area):
        memory.zero_()
        return torch.zeros(4)

    common = SimpleNamespace(finish=lambda: None, whole=lambda area: memory, own=own)
    found = near_tables._made(SimpleNamespace(index=torch.int32), common)
    assert torch.equal(found.keys, expected)
