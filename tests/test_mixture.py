"""Random programs, 60 of them: calls of all kinds one after the other, on every wire.

`benchmarks/soak.py` holds each call against one process's arithmetic; hypothesis draws here, and
shrinks a program that fails. What one call leaves behind must be no other's trouble, and no result
another's memory. `make soak` runs 10,000 by seed; it is run with some on fresh processes.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.base.pace import patient

WORLDS = "threads-2", "threads-4", "threads-7", "shm-4", "tcp-3"


@pytest.mark.parametrize("world", WORLDS)
def test_random_programs(script, world):
    soak, size = script("benchmarks/soak.py"), int(world[-1])
    steps = st.randoms(use_true_random=False).map(lambda source: soak.drawn_step(source, size))

    @settings(max_examples=12)
    @given(st.integers(0, 99), st.lists(steps, min_size=1, max_size=14))
    def works(seed, steps):
        soak.tried(world, (seed, steps))

    works()


@pytest.mark.parametrize("world", ["shm-2", "tcp-3"])
def test_nothing_is_left(script, monkeypatch, world):
    # after a quarter of them each group has been called, which starts its thread
    monkeypatch.setenv("WEFT_KEEP", "0")  # as the script does, and for this test alone
    for told in script("benchmarks/soak.py").world(world, 20, 20, limit=patient(200.0)):
        assert told.programs == 20 and told.calls > 5 * 20
        assert told.end.files <= told.start.files and told.end.threads <= told.start.threads
