"""Ranks that have a wire each: threads, processes that are kept, and new ones, which may die."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from weft.base.pace import patient
from weft.bootstrap.local import Rank, end, folder_of, pump
from weft.bootstrap.outcome import Outcome, results
from weft.rendezvous import places
from weft.testing import run
from weft.testing.threads import on_threads as outcomes_on_threads
from weft.wire.interface import Failure
from weft.wire.tcp import wire as tcp
from weft.wire.tcp.listener import Endpoint, Listener
from weft.wire.tcp.meeting import architecture
from weft.wire.threads import thread_wires

LIMIT = 60.0  # seconds that ranks may take together, on an idle machine


@dataclasses.dataclass(frozen=True)
class Start:
    """What a rank's wire is made from.

    Attributes:
        rank, size: the rank, and how many there are.
        exchange: tells all ranks a few bytes, and returns every rank's.
    """

    rank: int
    size: int
    exchange: Callable[[bytes], list[bytes]]


def make(start, hosts=lambda rank: "host"):
    """The wire of a rank, whose hosts are named by a function of the ranks."""
    deadline = time.monotonic() + patient(LIMIT)
    with Listener("127.0.0.1", 64, hosts(start.rank)) as listener:
        own = json.dumps(dataclasses.astuple(listener.endpoint)).encode()
        endpoints = [Endpoint(*json.loads(each)) for each in start.exchange(own)]
        peers = {peer: each for peer, each in enumerate(endpoints) if peer != start.rank}
        sockets, control = listener.connect(start.rank, peers, deadline)
    for sock in control.values():
        sock.close()
    near = {peer for peer in peers if hosts(peer) == hosts(start.rank) and architecture()}

    def agree(own):
        return all(map(json.loads, start.exchange(json.dumps(own).encode())))

    try:
        return tcp.make(start.rank, sockets, near, agree, deadline)
    except BaseException:
        for sock in sockets.values():
            sock.close()
        raise


def far(start):
    """As between hosts: each rank has one of its own."""
    return make(start, "host {}".format)


def mixed(start):
    """Two ranks on each host."""
    return make(start, lambda rank: f"host {rank // 2}")


def make_wires(make, size):
    """All the wires of a new group, in this process."""
    meeting = threading.Barrier(size, timeout=LIMIT)
    messages = [b""] * size

    def made(rank):
        def exchange(data):
            messages[rank] = data
            meeting.wait()  # until all have written
            everyones = [*messages]
            meeting.wait()  # until all have read
            return everyones

        return make(Start(rank, size, exchange))

    with ThreadPoolExecutor(size) as ranks:
        return list(ranks.map(made, range(size)))


def on_threads(size, body, make=thread_wires):
    """What `body(wire)` returns on each of so many threads, whose wires are `make(size)`."""
    wires = make(size)

    def program(rank):
        return Outcome.of(rank, ended, wires[rank], body)

    return results(outcomes_on_threads(size, program, patient(LIMIT)), "threads")


def on_processes(size, body, make=make):
    """The same on processes that other tests run on, too; `make(start)` makes a rank's wire."""
    store = places.host(places.LOOPBACK)
    try:
        return run(size, beside_a_group, store.port, *packed(make, body), on="processes")
    finally:
        del store


def on_new_processes(size, body, make=make, dies=()):
    """The same on processes that may end; those of the ranks `dies` do, whose result is None."""
    store = places.host(places.LOOPBACK)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    given = size, store.port, *packed(make, body)
    folder = folder_of(__name__)
    ranks = []

    def has_failed():
        known = [each.outcome for each in ranks if each.outcome and each.number not in dies]
        return any(each.error or each.died for each in known)

    try:
        for number in range(size):
            program = pickle.dumps((on_a_wire, (number, *given)))
            ranks.append(Rank.start(number, environment, folder, program))
        pump(ranks, lambda *_: None, time.monotonic() + patient(2 * LIMIT), has_failed)
    finally:
        end(ranks, [(signal.SIGINT, 5.0), (signal.SIGKILL, 10.0)])
        del store
    outcomes = [each.outcome or Outcome(each.number, hangs="hangs") for each in ranks]
    for rank in dies:
        if outcomes[rank].died:
            outcomes[rank] = Outcome(rank)
    return results(outcomes, "processes")


def swap_often(wire):
    """The program of one of two ranks."""
    peer, message = 1 - wire.rank, torch.ones(1)
    for _ in range(300):
        wire.post([(peer, message)], [(peer, 4)]).wait(patient(20.0))


def status_of(child):
    """The status with which a forked child ends, which is soon; None: it hangs."""
    until = time.monotonic() + patient(20.0)
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def packed(*functions):
    """Functions at the top of modules, and where another process finds these."""
    inner = [each.func if isinstance(each, functools.partial) else each for each in functions]
    return [folder_of(each.__module__) for each in inner], pickle.dumps(functions)


def beside_a_group(group, port, folders, functions):
    return on_a_wire(group.rank, group.size, port, folders, functions)


def on_a_wire(rank, size, port, folders, functions):
    """Make the wire of a rank, and run the body on it."""
    sys.path += [each for each in folders if each and each not in sys.path]
    make, body = pickle.loads(functions)
    store = places.connect(places.LOOPBACK, port, patient(LIMIT))
    numbers = itertools.count()

    def exchange(data):
        number = next(numbers)
        store.set(f"{number} {rank}", data)
        return [store.get(f"{number} {each}") for each in range(size)]

    return ended(make(Start(rank, size, exchange)), body)


def ended(wire, body):
    """Run the body on a wire, and close that; a rank that raises aborts it before."""
    try:
        return body(wire)
    except BaseException as error:
        wire.abort(Failure("aborted", wire.rank, f"rank {wire.rank} raised {error!r}"))
        raise
    finally:
        wire.close()
