"""The wires of this project keep the contract that they share."""

from __future__ import annotations

import functools

import pytest

from weft.testing import WireContract, run


class TestThreads(WireContract):
    @pytest.fixture
    def ranks(self):
        return functools.partial(run, on="threads")


class TestProcessGroup(WireContract):
    @pytest.fixture
    def ranks(self):
        return functools.partial(run, on="processes")
