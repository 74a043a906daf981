"""What tests of several wires use."""

from __future__ import annotations

import pytest

from weft.wire.tcp import shm


@pytest.fixture
def segment():
    """A segment of 1 MiB, of a rank whose peers map it; without memfd_create hosts share none."""
    made = shm.Segment.make(1 << 20)
    if made is None:
        pytest.skip("memfd_create is refused here")
    return made
