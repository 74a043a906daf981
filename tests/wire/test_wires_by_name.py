"""The wires between processes that weft brings keep the contract, made by their names."""

from __future__ import annotations

import pytest

from weft.testing import check_wire
from weft.testing.wires import NUMBERS
from weft.wire import Features

WIRES = {
    "tcp": {},  # which shares memory
    "tcp-apart": {"apart": True},  # which connects when messages are posted
    # a message takes a millisecond; both clauses together are still more than ten thousand
    "torch": {"POSTS": 700, "ROUNDS": 1000},
}


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("clause", NUMBERS)
def test_a_wire_keeps_a_clause(ranks_of, clause, wire):
    number = NUMBERS[clause]
    run = ranks_of(wire.removesuffix("-apart"), number, **WIRES[wire])
    (outcome,) = check_wire(run, Features(), clauses=[number])
    skipped = {"among", "reduces", "huge"} | {each for each in NUMBERS if each.startswith("meets")}
    if wire == "tcp":
        skipped.add("strangers")  # once all ranks of a host share memory it listens nowhere
    assert bool(outcome.skipped) == (clause in skipped)
