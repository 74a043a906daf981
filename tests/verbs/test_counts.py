"""What a call by verbs asks a device for, counted on tensors of the `meta` device, whose numbers
nobody has: operations, collectives and reads are as many for 64 ranks as for 2.

An operation makes or changes a tensor; views cost a device nothing.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from weft.bootstrap.outcome import results
from weft.sparse import plain, tables
from weft.sparse.request import Request
from weft.testing import threads
from weft.testing.threads import on_groups
from weft.verbs import group as verbs_group
from weft.verbs import posted

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
        distinct, _ = plain.stated(verbs, request)
        count = distinct.indices.numel()
        opening = SimpleNamespace(read=lambda decode: [(count, 999)] * size, fields={})
        call = plain.call_of(verbs, request, distinct, opening)
        found = body(call)
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
    gathered = {counted(size, plain.concatenated, moves=True, answers=[[0, 999]]) for size in RANKS}
    ((operations, collectives, reads),) = gathered
    assert (collectives, reads) == (2, 1) and operations <= 15, operations
    source = functools.partial(plain.of_source, source=0)
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
