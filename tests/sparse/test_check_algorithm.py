"""`weft.testing.check_algorithm`: weft's algorithms pass, and it finds what breaks others."""

from __future__ import annotations

import pytest
import torch

import weft
from weft.sparse import ALGORITHMS
from weft.testing import check_algorithm


def broken_in(fault):
    """gather, whose result is spoilt."""

    def broken(rows, call):
        result = ALGORITHMS["gather"](rows, call)
        if fault == "names another row":
            result.indices[-1] += 1
        if fault == "is wrong on eight ranks" and call.group.size == 8:
            result.values[3].mul_(2)
        if fault == "has other bits on rank 1" and call.group.rank == 1:
            result.values.copy_(result.values.nextafter(torch.zeros(())))
        return result

    return broken


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_of_weft_passes(name):
    check_algorithm(name)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("names another row", "rows that most ranks have, 2 ranks: other rows on rank 0"),
        ("has other bits on rank 1", "rows that most ranks have, 2 ranks: other bits on rank 1"),
        ("is wrong on eight ranks", r"most ranks have, 8 ranks: on rank 0 row 3 is \[.*\] for \["),
    ],
)
def test_it_finds_one_that(monkeypatch, fault, text):
    monkeypatch.setitem(ALGORITHMS, "broken", broken_in(fault))
    with pytest.raises(AssertionError, match=text):
        check_algorithm("broken")


def test_an_unknown_one_is_refused():
    with pytest.raises(weft.WeftError, match=r"'splt' is unknown \(did you mean 'split'\?\)"):
        check_algorithm("splt")
