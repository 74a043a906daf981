"""Random programs, 504 of them: calls of all kinds one after the other, on every wire.

`benchmarks/soak.py` draws them and holds each call against one process's arithmetic; `make soak`
runs 10,000. What one call leaves behind must be no other's trouble, and no result another's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from weft.testing.pace import patient

PROGRAMS = 63  # in each world
WORLDS = "threads-2", "threads-3", "threads-4", "threads-7", "shm-2", "shm-4", "tcp-3", "torch-2"


@pytest.mark.parametrize("world", WORLDS)
def test_random_programs(benchmark_file: Callable[[str], ModuleType], world: str) -> None:
    first = WORLDS.index(world) * PROGRAMS
    ranks = benchmark_file("soak").world(world, first, PROGRAMS, limit=patient(300.0))
    for told in ranks:
        assert told.programs == PROGRAMS and told.calls > 5 * PROGRAMS
        if not world.startswith("threads"):  # those are among pytest's own
            assert told.end.files <= told.start.files and told.end.threads <= told.start.threads
