"""What a call by verbs asks a device for, counted on tensors of the `meta` device, whose numbers
nobody has: operations, collectives and reads are as many for 64 ranks as for 2.

An operation makes or changes a tensor; views cost a device nothing.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from weft.base.memory import Pool
from weft.comm import uneven
from weft.nn import executor
from weft.nn.grid import Box, whole
from weft.nn.plan import between
from weft.schedules import dense
from weft.sparse import look, plain, run, tables, tall
from weft.sparse.header import Header
from weft.sparse.request import Request

all_to_all = sys.modules["weft.comm.all_to_all"]  # of which the packages have the function
remote_rows = sys.modules["weft.comm.remote_rows"]

META = torch.device("meta")
RANKS = (2, 8, 64)
ROWS, DISTINCT, WIDTH, HEIGHT = 1000, 900, 64, 10**6


@pytest.fixture(autouse=True)
def _there(monkeypatch):
    """No numbers travel to the meta device."""

    def there(numbers, like):
        return torch.tensor(numbers, dtype=like.dtype).to(like.device)

    for module in (look, plain, tall, remote_rows):
        monkeypatch.setattr(module, "there", there)


class Counted(TorchDispatchMode):
    """Counts operations that are no views.

    Attributes:
        asked: how often each was asked for.
    """

    def __init__(self):
        super().__init__()
        self.asked = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view:
            self.asked[str(function)] += 1
        return function(*args, **(kwargs or {}))


# what only gives memory another shape asks a device for nothing
_OF_MEMORY = ("aten.new_empty.default", "aten.empty.memory_format", "aten.set_")


def launched(operations):
    """How many of some counted operations a device has to run."""
    return sum(n for name, n in operations.asked.items() if not name.startswith(_OF_MEMORY))


class MetaVerbs:
    """Verbs among so many ranks, of which each has as many rows as this one; reads are answered."""

    rank = 0
    name = "meta (nobody)"

    def __init__(self, size, reduces, answers):
        self.size = size
        self.asked = Counter()
        self._reduces = reduces
        self._answers = iter(answers)

    def all_gather(self, mine):
        self.asked["collectives"] += 1
        return torch.empty(self.size * mine.numel(), dtype=mine.dtype, device=META)

    def exchange(self, mine, goes, comes):
        self.asked["collectives"] += 1
        assert sum(goes) == mine.numel()
        return torch.empty(sum(comes), dtype=mine.dtype, device=META)

    def reduces(self, op, dtype):
        return self._reduces

    def all_reduce(self, tensor, op):
        self.asked["collectives"] += 1

    def broadcast(self, tensor, root):
        self.asked["collectives"] += 1

    def read(self, numbers):
        assert numbers.device == META
        self.asked["reads"] += 1
        answer = next(self._answers)
        assert len(answer) == numbers.numel()
        return answer


def counted(size, body, *, op="sum", moves=False, height=HEIGHT, reduces=True, answers=None):
    """How many operations, collectives and reads a call takes."""
    indices = torch.empty(ROWS, dtype=torch.int64, device=META)
    given = weft.Rows(indices, torch.empty(ROWS, WIDTH, device=META), height)
    own = [DISTINCT, 3, 0, 499]  # distinct, how often the most frequent, the ends
    verbs = MetaVerbs(size, reduces, answers or [own, [1500]])
    few = weft.Rows(torch.tensor([0]), torch.ones(1, WIDTH), height)  # tensors with numbers
    request = Request.to_move(few, None) if moves else Request.of(few, op, "auto", None)
    request = replace(request, rows=given)
    with Counted() as operations:
        look.look_at(verbs, request)
        own = run._canonical(request, Pool())
        headers = [Header(len(own), 999, 0, 0)] * size
        group = SimpleNamespace(size=size, hosts=("here",) * size)
        call = run._call_of(group, request, verbs, {}, headers)
        found = call.delivered(body(verbs, own, call))
    assert found.values.device == META
    return operations.asked.total(), verbs.asked["collectives"], verbs.asked["reads"]


def summed(verbs, rows, call):
    return plain.summed(verbs, rows, call)[0]


SUMS = {"sum": 45, "avg": 48, "prod": 45, "min": 150, "max": 150}  # an extremum combines by pairs


@pytest.mark.parametrize("op", SUMS)
def test_a_sum_takes_as_much_whatever_the_number_of_ranks(op):
    ranks = RANKS[:1] if op in ("min", "max") else RANKS
    found = {counted(size, summed, op=op) for size in ranks}
    ((operations, collectives, reads),) = found
    assert (collectives, reads) == (1, 2) and operations <= SUMS[op], operations


def test_a_small_table_is_two_reductions():
    found = {counted(size, summed, height=500) for size in RANKS}
    ((operations, collectives, reads),) = found
    assert (collectives, reads) == (2, 2) and operations <= 45, operations


def test_a_part_of_a_sum_takes_no_read_more():
    """Each rank cuts its own from the sum of all."""

    def part(verbs, rows, call):
        sums, cuts = plain.summed(verbs, rows, call, [7, 400])
        assert cuts == [5, 300]
        return sums

    own = [DISTINCT, 3, 0, 499]
    cases = (HEIGHT, True, (1, 2)), (500, True, (2, 2)), (500, False, (1, 2))
    for height, reduces, asked in cases:
        answers = [own, [1500, 5, 300]]
        found = {
            counted(size, part, height=height, reduces=reduces, answers=answers) for size in RANKS
        }
        ((operations, *others),) = found
        assert tuple(others) == asked and operations <= 50, operations


def test_rows_that_only_move():
    def every(verbs, rows, call):
        return plain.concatenated(verbs, call)

    def source(verbs, rows, call):
        return plain.of_source(verbs, call, 0)

    gathered = {counted(size, every, moves=True, answers=[[0, 999]]) for size in RANKS}
    ((operations, collectives, reads),) = gathered
    assert (collectives, reads) == (2, 1) and operations <= 15, operations
    moved = {counted(size, source, moves=True, answers=[[0, 999]]) for size in RANKS}
    ((operations, collectives, reads),) = moved
    assert (collectives, reads) == (2, 1) and operations <= 15, operations


def counted_list(monkeypatch, size, shapes, height=HEIGHT):
    """How many operations, collectives, reads and openings a list of tables takes, by verbs.

    A table has the row `height - 1`.
    """
    kinds = len(set(shapes))
    alike = len(shapes) // kinds  # tables of each kind
    seen = [DISTINCT * alike, 3, *[0] * alike, *[height - 1] * alike]
    result = [1500 * alike, *range(1500, 1500 * alike, 1500)]
    verbs = MetaVerbs(size, True, [seen * kinds, *[result] * kinds])
    of_all = Request.asked("sum", "auto", None)
    requests = []
    for shape in shapes:
        few = weft.Rows(torch.tensor([0]), torch.ones(1, *shape), height)  # tensors with numbers
        indices = torch.empty(ROWS, dtype=torch.int64, device=META)
        rows = weft.Rows(indices, torch.empty(ROWS, *shape, device=META), height)
        requests.append(replace(of_all.given(few), rows=rows))

    def opened(group, name, fields, body):
        verbs.asked["openings"] += 1

        def read(decode, *given):
            return [decode(memoryview(body), *given)] * size

        return SimpleNamespace(fields={}, read=read)

    call = SimpleNamespace(measure=lambda: None, messages=0, sent_bytes=0, seconds=0.0)
    group = SimpleNamespace(size=size, hosts=("here",) * size, memory=Pool(), state={})
    group.worker = SimpleNamespace(now=call)
    monkeypatch.setattr(tables, "opened", opened)
    monkeypatch.setattr(run, "verbs_for", lambda group, request: verbs)
    with Counted() as operations:
        found = tables.reduced(group, of_all, requests)
    assert [len(each) for each in found] == [1500] * len(shapes)
    assert not any(verbs._answers)
    return launched(operations), *(verbs.asked[what] for what in ASKED)


ASKED = ("collectives", "reads", "openings")


@pytest.mark.parametrize(
    ("shapes", "height", "most", "asked"),
    [
        ([(WIDTH,)], HEIGHT, 70, (1, 2, 1)),
        ([(WIDTH,)], 500, 65, (2, 2, 1)),
        ([(WIDTH,), ()], HEIGHT, 140, (2, 3, 1)),  # two kinds
    ],
)
def test_a_list_asks_for_as_much_as_a_table(monkeypatch, shapes, height, most, asked):
    """Whatever the number of its tables and of ranks; a further kind takes a sum more."""
    monkeypatch.setattr(plain, "WHOLE", 1 << 40)  # else columns go in turns
    many = ((size, shapes * count) for size in RANKS for count in (2, 26))
    found = {counted_list(monkeypatch, size, tables, height) for size, tables in many}
    ((operations, *others),) = found
    assert tuple(others) == asked and operations <= most, operations


# Routines of dense tensors


def routine(size, body):
    """How many operations and collectives a routine's part by verbs takes, among so many ranks."""
    verbs = MetaVerbs(size, True, [])
    with Counted() as operations:
        body(verbs)
    return launched(operations), verbs.asked["collectives"]


def on_meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device=META)


ROUTINES = {
    "all_to_all": (1, lambda v: all_to_all._exchanged(v, [on_meta(3)] * v.size, [(3,)] * v.size)),
    "sum": (0, lambda v: dense.by_verbs(v, on_meta(9), "sum")),
    "sum of halves": (2, lambda v: dense.by_verbs(v, on_meta(9, dtype=torch.half), "sum")),
    "sum of complex": (0, lambda v: dense.by_verbs(v, on_meta(9, dtype=torch.cfloat), "sum")),
    "max": (9, lambda v: dense.by_verbs(v, on_meta(9), "max")),
    "all_gather_v": (
        2,
        lambda v: uneven._gather_by_verbs(v, on_meta(2), on_meta(2 * v.size + 1), gathered(v)),
    ),
}


def gathered(verbs):
    return [3] + [2] * (verbs.size - 1)


@pytest.mark.parametrize("name", ROUTINES)
def test_a_routine_is_one_collective_and_few_operations(name):
    most, body = ROUTINES[name]
    found = {routine(size, body) for size in RANKS}
    ((operations, collectives),) = found
    assert collectives == 1 and operations <= most, operations


# whose operations grow with what a rank has to do with others
def repartition(verbs):
    """What rank 0 of a row of ranks does: its rows become columns."""
    size = verbs.size
    rows = {rank: Box((rank, 0), (rank + 1, size)) for rank in range(size)}
    columns = {rank: Box((0, rank), (size, rank + 1)) for rank in range(size)}
    plan = between(rows, columns)
    executor._by_an_exchange(plan, on_meta(1, size), range(size), verbs)


def everywhere(verbs):
    """What rank 0 does: its tensor goes to all."""
    plan = between({0: whole((5,))}, {rank: whole((5,)) for rank in range(verbs.size)})
    executor._broadcast(plan, on_meta(5), range(verbs.size), verbs)


@pytest.mark.parametrize(("body", "most"), [(repartition, 2), (everywhere, 0)])
def test_a_layer_is_one_collective(body, most):
    """And a copy or two of what goes to each rank, and comes from it."""
    for size in RANKS:
        operations, collectives = routine(size, body)
        assert collectives == 1 and operations <= 2 + most * size, operations


def test_a_plan_of_remote_rows_is_one_read(monkeypatch):
    asked = []

    def answered(group, numbers):
        asked.append(numbers.numel())
        return [*range(0, 4 * (len(bounds)), 4), 4 * len(bounds), 0, 9]

    monkeypatch.setattr(remote_rows, "read", answered)
    found = set()
    for size in RANKS:
        bounds = [*range(0, 10 * size + 1, 10)]
        with Counted() as operations:
            rows, cuts = remote_rows._remote(SimpleNamespace(rank=0), on_meta(50).long(), bounds)
        assert len(rows) == 4 * len(bounds) and len(cuts) == len(bounds)
        found.add(operations.asked.total())
    assert len(asked) == len(RANKS)
    (operations,) = found
    assert operations <= 24, operations
