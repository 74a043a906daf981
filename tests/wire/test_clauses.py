"""What every wire does: threads, and TCP within a host, between hosts, and both at once."""

from __future__ import annotations

import functools

import pytest
import wire_clauses
from wire_clauses import ANY_WIRE, MEETINGS, MEETINGS_OF_PROCESSES, PROCESSES, clauses
from wire_ranks import (
    far,
    make,
    make_wires,
    mixed,
    on_new_processes,
    on_processes,
    on_threads,
    swap_often,
)

from weft.kernels import jit
from weft.wire.threads import thread_wires

TCP = {"one host": make, "hosts of one": far, "hosts of two": mixed}
DIES = (wire_clauses.dies, wire_clauses.forks, wire_clauses.meets_the_dead)
meeting = pytest.mark.skipif(jit.loops() is None, reason="there is no machine code here")


@clauses(ANY_WIRE)
def test_threads(size, body):
    on_threads(size, body)


@pytest.mark.parametrize("hosts", TCP)
@clauses(ANY_WIRE, most=4)
def test_tcp(size, body, hosts):
    if size > 2 or hosts != "hosts of two":
        on_processes(size, body, TCP[hosts])


@pytest.mark.parametrize("hosts", TCP)
@clauses(PROCESSES)
def test_tcp_of_new_processes(size, body, hosts):
    on_new_processes(size, body, TCP[hosts], dies=[1] if body.func in DIES else [])


@meeting
@clauses(MEETINGS, most=4)
def test_meetings_of_tcp(size, body):
    on_processes(size, body)


@meeting
@clauses(MEETINGS_OF_PROCESSES)
def test_meetings_of_new_processes(size, body):
    on_new_processes(size, body, dies=[1] if body.func in DIES else [])


@pytest.mark.parametrize("wires", ["threads", *TCP])
def test_a_closed_wire_leaves_no_descriptor_and_no_thread(wires, nothing_left):
    made = functools.partial(make_wires, TCP[wires]) if wires in TCP else thread_wires
    with nothing_left():
        on_threads(2, swap_often, made)
