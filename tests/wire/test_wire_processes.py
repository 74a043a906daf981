"""`weft.testing.ranks_as_processes`: how ranks end, and what is said of those that fail."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import pytest

import weft
from weft.testing import RankFailure, ranks_as_processes, wire_processes
from weft.wire.interface import WireFailed

sys.path.append(str(Path(__file__).parent))

import weft_streams

RUN = ranks_as_processes(weft_streams.make_wire)


def rank_and_size(wire):
    return wire.rank, wire.size


def process(wire):
    return os.getpid()


def test_ranks_are_new_processes_and_results_are_in_order(gone):
    assert RUN(3, rank_and_size) == [(0, 3), (1, 3), (2, 3)]
    processes = RUN(2, process) + RUN(2, process)
    assert len({os.getpid(), *processes}) == 5
    assert gone(processes)


def ends(wire):
    if wire.rank == 1:
        os._exit(7)
    return "here"


def test_a_rank_dies_as_it_was_to_or_it_is_an_error():
    assert RUN(2, ends, dies=(1,)) == ["here", None]
    with pytest.raises(RankFailure, match="rank 1 of 2 exited with status 7"):
        RUN(2, ends)


def raises(wire):
    if wire.rank == 1:
        raise KeyError("mine")
    wire.post((), [(1, 8)]).wait()


def test_what_a_rank_raises_comes_before_what_others_raise_because_of_it():
    with pytest.raises(KeyError, match="mine") as caught:
        RUN(2, raises)
    notes = "\n".join(caught.value.__notes__)
    assert "on rank 1 of 2" in notes
    assert "rank 0 of 2 raised WireFailed: the connection to rank 1 ended" in notes


def sleeps(wire):
    if wire.rank == 1:
        time.sleep(600)


def test_a_rank_that_hangs_is_told_of_by_where_it_is(gone):
    run = ranks_as_processes(weft_streams.make_wire, limit=5.0)
    with pytest.raises(RankFailure, match=r"(?s)rank 1 of 2 gave no answer.*in sleeps.*sleep\(600"):
        run(2, sleeps)


def leaves_a_thread(wire):
    threading.Thread(target=time.sleep, args=[600]).start()


def test_a_process_that_does_not_end_is_told_of(monkeypatch):
    monkeypatch.setattr(wire_processes, "patient", lambda seconds: seconds / 2.5)
    with pytest.raises(RankFailure, match="rank 0 of 1 has ended its program, but its process"):
        RUN(1, leaves_a_thread)


def raising_factory(start):
    if start.rank == 1:
        raise OSError("no device")
    return weft_streams.make_wire(start)


def test_a_factory_that_raises_on_one_rank_ends_the_run():
    with pytest.raises(OSError, match="no device"):
        ranks_as_processes(raising_factory)(3, rank_and_size)


def dying_factory(start):
    if start.rank == 1:
        os._exit(7)
    return weft_streams.make_wire(start)


def test_a_rank_that_dies_in_its_factory_ends_the_run():
    with pytest.raises(RankFailure, match="rank 1 of 3 exited with status 7") as caught:
        ranks_as_processes(dying_factory)(3, rank_and_size)
    assert "rank 0: rank 1 has ended, and the others exchange" in "\n".join(caught.value.__notes__)


def met_at_the_store(start):
    start.store.set(f"rank {start.rank}", str(start.rank))
    others = [start.store.get(f"rank {rank}").decode() for rank in range(start.size)]
    assert others == [str(rank) for rank in range(start.size)]
    assert start.exchange(start.host.encode()) == [start.host.encode()] * start.size
    return weft_streams.make_wire(start)


def test_a_factory_has_a_store():
    assert ranks_as_processes(met_at_the_store)(2, rank_and_size) == [(0, 2), (1, 2)]


def apart(start):
    hosts = start.exchange(start.host.encode())
    assert len(set(hosts)) == start.size
    assert hosts[start.rank].decode() == start.host
    return weft_streams.make_wire(start)


def test_ranks_may_be_told_that_each_has_a_machine_of_its_own():
    assert ranks_as_processes(apart, apart=True)(2, rank_and_size) == [(0, 2), (1, 2)]
    with pytest.raises(AssertionError):
        ranks_as_processes(apart)(2, rank_and_size)


def test_what_a_process_cannot_load_is_refused():
    with pytest.raises(weft.WeftError, match="make them functions at the top of a module"):
        RUN(2, lambda wire: None)


def fails(wire):
    if wire.rank == 0:
        wire.post((), [(1, 8)]).wait()


def test_what_a_wire_raises_travels_whole():
    with pytest.raises(WireFailed, match="the connection to rank 1 ended") as caught:
        RUN(2, fails)
    assert (caught.value.failure.kind, caught.value.failure.peer) == ("lost", 1)
