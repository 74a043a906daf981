"""The groups of this project keep the contract that they share."""

from __future__ import annotations

import functools

import pytest

from weft.bootstrap.outcome import results
from weft.testing import GroupContract, run, simulated
from weft.testing.threads import on_groups
from weft.wire.link import Link

CASES = [case.values for case in GroupContract.test_contract.pytestmark[0].args[1]]
# of what is tried at several sizes: that is the schedules, which threads prove
LARGEST = {body.__name__: (size, body, options) for size, body, options in CASES}
at_the_largest = pytest.mark.parametrize(("size", "body", "options"), LARGEST.values(), ids=LARGEST)


class TestThreads(GroupContract):
    @pytest.fixture
    def ranks(self):
        return functools.partial(run, on="threads")


class TestProcessGroup(GroupContract):
    @pytest.fixture
    def ranks(self):
        return functools.partial(run, on="processes")

    @at_the_largest
    def test_contract(self, ranks, size, body, options):
        super().test_contract(ranks, size, body, options)


class TestTorch(GroupContract):
    @pytest.fixture
    def ranks(self):
        # more ranks than that prove nothing of a group whose pairs know nothing of each other
        return lambda size, *args, **options: run(min(size, 4), *args, on="torch", **options)

    @at_the_largest
    def test_contract(self, ranks, size, body, options):
        super().test_contract(ranks, size, body, options)


class TestSimulated(GroupContract):
    @pytest.fixture
    def ranks(self):
        def ranks(size, body, *args, timeout=20.0):
            # its links are alike for any two ranks, and what is beside them is that of threads
            groups = simulated.group(min(size, 4), Link(1e-4, 1e-9, 1e-5), timeout)
            return results(on_groups(groups, body, args), "simulated")

        return ranks

    @at_the_largest
    def test_contract(self, ranks, size, body, options):
        super().test_contract(ranks, size, body, options)
