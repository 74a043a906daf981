"""The wires between processes that weft brings keep the contract, made by their names."""

from __future__ import annotations

import pytest

from weft.testing import check_wire, ranks_as_processes
from weft.testing.wires import NUMBERS
from weft.wire import Features

RUNS = {
    "tcp": ranks_as_processes("tcp"),  # which shares memory
    "tcp-apart": ranks_as_processes("tcp", apart=True),  # which connects when messages are posted
    "torch": ranks_as_processes("torch"),
}


@pytest.mark.parametrize("wire", RUNS)
@pytest.mark.parametrize("clause", NUMBERS)
def test_a_wire_keeps_a_clause(clause, wire):
    (outcome,) = check_wire(RUNS[wire], Features(), clauses=[NUMBERS[clause]])
    skipped = {"among", "reduces", "huge"}
    if wire == "tcp":
        skipped.add("strangers")  # once all ranks of a host share memory it listens nowhere
    assert bool(outcome.skipped) == (clause in skipped)
