"""The wire over MPI keeps the contract of all wires, and weft's calls run on it."""

from __future__ import annotations

import pytest

from weft.testing import WireContract


class TestMpi(WireContract):
    @pytest.fixture
    def ranks(self, mpi_job):
        # what is tried at sizes above is the schedules, and those the other wires prove
        return lambda size, *args, **options: mpi_job(min(size, 4), *args, **options)
