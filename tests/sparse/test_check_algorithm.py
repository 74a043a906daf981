"""`weft.testing.check_algorithm`: weft's algorithms pass, and it finds what breaks others."""

from __future__ import annotations

import pytest
import torch

import weft
from weft import kernels
from weft.sparse import ALGORITHMS
from weft.testing import check_algorithm


def direct(rows, call, fault=""):
    """Every rank sends its rows to every other, and all merge them in rank order."""
    group = call.group
    indices = rows.indices.to(call.wire_index)
    counts = [torch.tensor([len(indices)]) for _ in range(group.size)]
    sends = [(peer, counts[group.rank]) for peer in group.peers]
    group.post(sends, [(peer, counts[peer]) for peer in group.peers]).wait()
    everyone = [
        (indices.new_empty(int(count)), rows.values.new_empty(int(count), *call.row_shape))
        for count in counts
    ]
    everyone[group.rank] = indices, rows.values
    sends = [(peer, each) for peer in group.peers for each in (indices, rows.values)]
    group.post(sends, [(peer, each) for peer in group.peers for each in everyone[peer]]).wait()

    order = list(range(group.size))
    if fault == "forgets a rank":
        everyone.pop()
        order.pop()
    union = kernels.union([indices for indices, _ in everyone])
    result = call.result_at(union.indices)
    sums = torch.empty(result.values.shape, dtype=call.partial)
    for rank in order:
        kernels.combine(sums, union.slots[rank], everyone[rank][1], call.op)
    call.finish(sums, result.values)
    if fault == "is wrong on eight ranks" and group.size == 8:
        result.values[3].mul_(2)
    if fault == "has other bits on rank 1" and group.rank == 1:
        result.values.copy_(result.values.nextafter(torch.zeros(())))
    return result


@pytest.fixture
def registered(monkeypatch):
    """Enters an algorithm for one test."""
    return lambda schedule: monkeypatch.setitem(ALGORITHMS, schedule.__name__, schedule)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_of_weft_passes(name):
    check_algorithm(name)


def test_one_of_a_program_passes(registered):
    registered(direct)
    check_algorithm("direct")


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("forgets a rank", "rows that most ranks have, 2 ranks: other rows on rank 0"),
        ("has other bits on rank 1", "rows that most ranks have, 2 ranks: other bits on rank 1"),
        ("is wrong on eight ranks", r"most ranks have, 8 ranks: on rank 0 row 3 is \[.*\] for \["),
    ],
)
def test_it_finds_one_that(registered, fault, text):
    def broken(rows, call):
        return direct(rows, call, fault)

    registered(broken)
    with pytest.raises(AssertionError, match=text):
        check_algorithm("broken")


def test_an_unknown_one_is_refused():
    with pytest.raises(weft.WeftError, match=r"'splt' is unknown \(did you mean 'split'\?\)"):
        check_algorithm("splt")
