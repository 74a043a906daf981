"""The wires between processes that weft brings keep the contract, made by their names."""

from __future__ import annotations

import pytest

from weft.testing import check_wire, ranks_as_processes
from weft.testing.wires import NUMBERS
from weft.wire import Features


@pytest.mark.parametrize("wire", ["tcp", "torch"])
@pytest.mark.parametrize("clause", NUMBERS)
def test_a_wire_keeps_a_clause(clause, wire):
    run = ranks_as_processes(wire)
    (outcome,) = check_wire(run, Features(), clauses=[NUMBERS[clause]])
    assert bool(outcome.skipped) == (clause in {"among", "reduces", "huge"})
