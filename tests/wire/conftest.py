"""What tests of several wires use."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from pathlib import Path

import pytest

from weft.wire.tcp import shm

sys.path.append(str(Path(__file__).parent))  # for the modules here that are no tests
pytest.register_assert_rewrite("wire_clauses")


@pytest.fixture
def segment():
    """A segment of 1 MiB, of a rank whose peers map it; without memfd_create hosts share none."""
    made = shm.Segment.make(1 << 20)
    if made is None:
        pytest.skip("memfd_create is refused here")
    return made


@pytest.fixture
def no_file_left():
    """A block in which this process can open no file: it has as many as it may."""

    @contextlib.contextmanager
    def block():
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest_free = os.open(os.devnull, os.O_RDONLY)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    return block
