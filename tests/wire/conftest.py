"""What tests of several wires use."""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import sys

import pytest

from weft.base.memory import Pool
from weft.bootstrap.local import folder_of
from weft.failure.detector import EXCHANGED
from weft.rendezvous import places as rendezvous
from weft.testing import ranks_as_processes, run, wire_clauses
from weft.testing.clauses import stated
from weft.testing.wire_clauses import CLAUSES
from weft.wire.start import Start
from weft.wire.tcp import shm


def on_a_wire(group, folder, packed, is_apart, counts):
    """The body of a clause, on a wire of its own beside the group's."""
    if folder and folder not in sys.path:
        sys.path.append(folder)  # where the module of the factory is
    factory, body = pickle.loads(packed)

    def exchange(data):
        return group.all_gather_bytes(pickle.dumps(data).ljust(2 * EXCHANGED), pickle.loads)

    host = f"host {group.rank if is_apart else 0}"
    store, port = rendezvous.host(rendezvous.LOOPBACK) if group.rank == 0 else (None, 0)
    port = int(exchange(str(port).encode())[0])
    if store is None:
        store = rendezvous.connect(rendezvous.LOOPBACK, port, group.timeout)
    start = Start(
        *(group.rank, group.size, group.timeout, host, exchange, Pool()),
        store=store,
    )
    wire = factory(start)
    exchange(b"made")
    with pytest.MonkeyPatch.context() as patch:
        for name, count in counts.items():
            patch.setattr(wire_clauses, name, count)
        return stated(wire, body)


@pytest.fixture
def fewer(monkeypatch):
    """Clauses of thousands of messages have hundreds.

    That is for wires that add little to others, which are tried with thousands.
    """
    monkeypatch.setattr(wire_clauses, "POSTS", 300)
    monkeypatch.setattr(wire_clauses, "ROUNDS", 300)


@pytest.fixture
def ranks_of():
    """`ranks_of(wire, clause, apart=)` is a `Run` on processes, for this clause of the contract.

    They are new ones where the clause is about processes, and otherwise those that other tests run
    on, too: then a wire is made anew, and no process. There `counts` are other POSTS and ROUNDS.
    """

    def ranks_of(factory, clause, *, apart=False, **counts):
        if CLAUSES[clause - 1].processes or CLAUSES[clause - 1].is_compared:
            return ranks_as_processes(factory, apart=apart)

        def kept(size, body):
            packed = pickle.dumps((factory, body))
            folder = folder_of(factory.__module__)
            return run(size, on_a_wire, folder, packed, apart, counts, on="processes")

        kept.are_processes = True
        return kept

    return ranks_of


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
