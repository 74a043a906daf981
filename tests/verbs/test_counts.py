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
from weft.bootstrap.outcome import results
from weft.comm import uneven
from weft.schedules import dense
from weft.sparse import plain, run, tables
from weft.sparse.header import Header
from weft.sparse.request import Request
from weft.testing import threads
from weft.testing.threads import on_groups
from weft.verbs import group as verbs_group
from weft.verbs import posted

all_to_all = sys.modules["weft.comm.all_to_all"]  # of which the packages have the function
remote_rows = sys.modules["weft.comm.remote_rows"]

META = torch.device("meta")
RANKS = (2, 8, 64)
ROWS, DISTINCT, WIDTH, HEIGHT = 1000, 900, 64, 10**6


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
        plain.look(verbs, request)
        own = run._canonical(request, Pool())
        headers = [Header(len(own), 999, 0, 0)] * size
        group = SimpleNamespace(size=size, hosts=("here",) * size)
        call = run._call_of(group, request, verbs, {}, headers)
        found = call.delivered(body(verbs, own, call))
    assert found.values.device == META
    return operations.asked.total(), verbs.asked["collectives"], verbs.asked["reads"]


SUMS = {"sum": 45, "avg": 48, "prod": 45, "min": 150, "max": 150}  # an extremum combines by pairs


@pytest.mark.parametrize("op", SUMS)
def test_a_sum_takes_as_much_whatever_the_number_of_ranks(op):
    ranks = RANKS[:1] if op in ("min", "max") else RANKS
    found = {counted(size, plain.summed, op=op) for size in ranks}
    ((operations, collectives, reads),) = found
    assert (collectives, reads) == (1, 2) and operations <= SUMS[op], operations


def test_a_small_table_is_two_reductions():
    found = {counted(size, plain.summed, height=500) for size in RANKS}
    ((operations, collectives, reads),) = found
    assert (collectives, reads) == (2, 2) and operations <= 45, operations


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


@pytest.mark.parametrize("others", [0, 1])
def test_the_host_waits_for_a_list_twice_more_than_for_a_table(monkeypatch, others):
    """And twice more for tables of another kind."""
    seen, real = [], verbs_group.read

    def noted(*given):
        seen.append(given)
        return real(*given)

    def body(group):
        kinds = [(3,)] * 9 + [()] * others
        given = [(torch.arange(20) * 3 % 7, torch.ones(20, *shape)) for shape in kinds]
        return weft.sparse_all_reduce(given)

    monkeypatch.setattr(plain, "on_host", lambda tensor: False)
    for module in (verbs_group, posted, tables):
        monkeypatch.setattr(module, "read", noted)
    outcomes = on_groups(threads.group(3, 60.0, wire="group"), body)
    assert all(len(found) == 9 + others for found in results(outcomes, "threads"))
    assert len(seen) == 3 * (2 + 2 + 2 * others)


# Routines of dense tensors. What only gives memory another shape asks a device for nothing.
_OF_MEMORY = ("aten.new_empty.default", "aten.empty.memory_format", "aten.set_")


def routine(size, body):
    """How many operations and collectives a routine's part by verbs takes, among so many ranks."""
    verbs = MetaVerbs(size, True, [])
    with Counted() as operations:
        body(verbs)
    launched = [n for name, n in operations.asked.items() if not name.startswith(_OF_MEMORY)]
    return sum(launched), verbs.asked["collectives"]


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


def test_a_plan_of_remote_rows_is_one_read(monkeypatch):
    asked = []

    def answered(group, numbers):
        asked.append(numbers.numel())
        return [*range(0, 4 * (len(bounds)), 4), 4 * len(bounds), 0, 9]

    monkeypatch.setattr(remote_rows, "read", answered)
    monkeypatch.setattr(remote_rows, "there", lambda numbers, like: on_meta(len(numbers)))
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
