"""`weft.testing.WireContract`: the contract of a wire as a class of pytest's."""

from __future__ import annotations

import pytest

from weft.testing import WireContract, ranks_as_threads
from weft.testing.wires import NUMBERS
from weft.wire.in_process.threads import thread_wires
from weft.wire.interface import Features

RUN = ranks_as_threads(thread_wires)


def test_there_is_a_test_for_each_clause():
    (mark,) = WireContract.test_clause.pytestmark
    assert list(mark.args[1]) == list(NUMBERS.values())
    assert list(mark.kwargs["ids"]) == list(NUMBERS)


def test_a_clause_that_is_kept_passes():
    WireContract().test_clause(RUN, NUMBERS["order"])


def test_a_clause_that_is_broken_fails():
    def garbled(size):
        wires = thread_wires(size)
        wires[0].features = None
        return wires

    with pytest.raises(AssertionError, match=r"1  a wire knows its rank.*FAILED"):
        WireContract().test_clause(ranks_as_threads(garbled), NUMBERS["sizes"])


def test_a_clause_that_is_not_for_a_wire_is_skipped():
    class OfRounds(WireContract):
        features = Features(lockstep=True)

    with pytest.raises(pytest.skip.Exception, match="the wire is lockstep"):
        OfRounds().test_clause(RUN, NUMBERS["late"])
    with pytest.raises(pytest.skip.Exception, match="is tried if asked for"):
        WireContract().test_clause(RUN, NUMBERS["huge"])
