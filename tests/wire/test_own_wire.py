"""A wire that a program registers: groups run over it, and who gets what wrong is named by all."""

from __future__ import annotations

import dataclasses
import os
import threading

import pytest
import torch
import torch.distributed as dist

import weft
from weft.group.joining import connect
from weft.group.process_group import store_of
from weft.testing import processes
from weft.wire.registry import register_wire
from weft.wire.tcp import wire as tcp

BROKEN = 1
"""The rank whose factory does something wrong."""


class Mine:
    """A wire of a program's own, which passes everything on to another."""

    def __init__(self, inside):
        self.inside = inside
        self.rank = inside.rank
        self.size = inside.size
        self.device = inside.device
        self.features = dataclasses.replace(inside.features, meets=0)
        for name in ("post", "abort", "failure", "close"):
            setattr(self, name, getattr(inside, name))

    def lease(self, nbytes):
        return None


def make_mine(start):
    assert start.host and start.timeout > 0
    # the group sets whatever a factory may use
    assert None not in [getattr(start, field.name) for field in dataclasses.fields(start)]
    assert start.exchange(bytes([start.rank])) == [bytes([rank]) for rank in range(start.size)]
    return Mine(tcp.make(start))


def raising(start):
    if start.rank == BROKEN:
        raise OSError("there is no such network here")
    return make_mine(start)


def nothing(start):
    return None if start.rank == BROKEN else make_mine(start)


def raising_among_connections(start):
    def exchange(data):
        messages = start.exchange(data)
        if start.rank == BROKEN:
            raise KeyError("no such device")
        return messages

    return tcp.make(dataclasses.replace(start, exchange=exchange))


def summed(**options):
    with weft.init(**options) as group:
        rows = torch.tensor([group.rank, 9]), torch.ones(2, 3)
        indices, values = weft.sparse_all_reduce(rows)
        large = weft.all_reduce(torch.full((300_000,), float(group.rank + 1)))
        return indices.tolist(), values[-1].tolist(), large[0].item(), large.unique().numel()


def over_mine():
    register_wire("mine", make_mine)
    return summed(timeout=30, wire="mine")


def expected(size):
    return [*range(size), 9], [float(size)] * 3, size * (size + 1) / 2, 1


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_group_runs_over_a_registered_wire(size):
    assert processes(size, over_mine) == [expected(size)] * size


def after_a_broken(factory):
    register_wire("mine", factory)
    with pytest.raises(weft.Error) as caught:
        weft.init(timeout=30, wire="mine")
    return str(caught.value), summed(timeout=30)


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        (raising, "on rank 1 its factory raised OSError: there is no such network here"),
        (nothing, "on rank 1 its factory returned NoneType, which is no Wire"),
        (
            raising_among_connections,
            "on rank 1 its factory raised KeyError: 'no such device'",
        ),
    ],
)
def test_what_goes_wrong_in_a_factory_raises_on_all_and_the_next_init_works(factory, text):
    for said, result in processes(3, after_a_broken, factory):
        assert said == (
            f"wire 'mine' cannot be used: {text}; mend it there, or give all ranks another "
            "weft.init(wire=) or WEFT_WIRE; there are mine, mpi, tcp, torch"
        )
        assert result == expected(3)


LIVES = """
import dataclasses, json, os, signal, sys, torch, weft
from weft.base.pace import patient
from weft.wire import torch_gloo
from weft.wire.tcp import wire as tcp

faults = sys.argv[3:]
fault = ""

def fail():
    if fault.startswith("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.startswith("stopped"):
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "silent":
        there(f"told by 0 of {number}")
        there(f"told by 2 of {number}")

def make(start):
    def exchange(data):
        messages = start.exchange(data)
        if rank == 1 and fault.endswith("among connections"):
            fail()  # the others wait for its connection then
        return messages

    if rank == 1 and not fault.endswith("among connections"):
        fail()
    make_real = torch_gloo.make if fault.endswith("over gloo") else tcp.make
    return make_real(dataclasses.replace(start, exchange=exchange))

weft.register_wire("mine", make)
for number, fault in enumerate([*faults, "nothing"]):
    if life not in ("all", str(number)):
        continue
    if rank == 0:
        if number > 0:
            there(f"told by 2 of {number - 1}")
        (folder / f"begun {number}").touch()
    there(f"begun {number}")
    is_waited_out = rank != 1 and fault.startswith(("stopped", "silent"))
    timeout = patient(2.0) if is_waited_out else 300.0
    said = culprit = total = None
    try:
        with weft.init(rendezvous=f"file://{folder}/place-{number}", timeout=timeout, wire="mine"):
            total = weft.all_reduce(torch.ones(300_000))[-1].item()
    except weft.WireError as error:
        said, culprit = str(error), error.culprit
    (folder / f"told by {rank} of {number}").touch()
    print(json.dumps([said, culprit, total]), flush=True)
"""
WAYS_TO_END = {
    "killed": "died",
    "killed among connections": "died",
    "killed over gloo": "died",
    "stopped among connections": "does not answer (stopped, cut off, or stuck in foreign code)",
    "silent": "did not come to make the wire within ",
}


@pytest.mark.parametrize(
    ("safe", "ways"),
    [
        ("0", list(WAYS_TO_END)),
        # control links are carried by gloo, which is to see a death, and that nothing comes
        ("1", ["killed", "killed over gloo", "stopped among connections"]),
    ],
)
def test_who_ends_in_a_factory_is_named_by_the_others_who_then_init_again(lives, safe, ways):
    """Each time rank 1 is started again."""
    *failed, last = lives(LIVES, ways, len(ways) + 1, {"WEFT_SAFE": safe})
    for way, both in zip(ways, failed, strict=True):
        for rank, (said, culprit, _) in zip((0, 2), both, strict=True):
            assert culprit == BROKEN, (way, said)
            assert said.startswith(f"rank {rank}: rank 1 {WAYS_TO_END[way]}"), (way, said)
            assert said.endswith("; start the group again"), (way, said)
    assert last == [[None, None, 3.0]] * 2


def differing():
    register_wire("mine", make_mine)
    if os.environ["RANK"] == "1":
        register_wire("other", make_mine)
    with pytest.raises(weft.WeftError) as caught:
        weft.init(timeout=30, wire="mine" if os.environ["RANK"] == "2" else "tcp")
    return str(caught.value), summed(timeout=30)


def test_ranks_that_ask_for_different_wires_are_told_alike():
    """Of the names there are they are told those that every rank has."""
    for text, result in processes(3, differing):
        assert text == (
            "rank 0 was asked for wire 'tcp', and rank 2 for 'mine': give all ranks the same "
            "weft.init(wire=), WEFT_WIRE and WEFT_SAFE; there are mine, mpi, tcp, torch"
        )
        assert result == expected(3)


def known_to_one():
    if os.environ["RANK"] == "1":
        register_wire("mine", make_mine)
    with weft.init(timeout=300) as group, pytest.raises(weft.WeftError) as caught:
        connect(store_of(dist.group.WORLD), group.rank, 3, 300, name="x", wire="mine")
    return str(caught.value)


def test_a_wire_that_is_registered_on_one_rank_only_is_refused_by_all():
    (text,) = set(processes(3, known_to_one))
    assert text == (
        "rank 0: wire 'mine' is unknown: use one of mpi, tcp, torch, or register it first, on "
        "every rank"
    )


def in_place_of(replaced, factory):
    """The threads that carry something to or from the peer, over what is called torch."""
    if replaced:
        register_wire("torch", factory, replace=True)
    with weft.init(timeout=30, wire="torch") as group:
        weft.barrier()
        between = f" {group.rank}-{1 - group.rank}"
        found = [each.name for each in threading.enumerate() if each.name.endswith(between)]
        weft.barrier()  # they end when the peer leaves
    return found


def test_control_links_go_by_what_a_wire_is_and_not_by_its_name():
    """Over weft's own wire "torch" they are carried by gloo, and so by threads."""
    assert processes(2, in_place_of, True, make_mine) == [[], []]
    assert all(processes(2, in_place_of, False, None))


def unknown(rendezvous):
    register_wire("mine", make_mine)
    with pytest.raises(weft.WeftError) as caught:
        weft.init(rendezvous=rendezvous, timeout=30, wire="yours")
    return str(caught.value)


def test_an_unknown_name_lists_the_names_there_are(port):
    # rank 0 hosts the store: where another process does, its error may be one of an attempt before
    for text in processes(2, unknown, f"tcp://127.0.0.1:{port}"):
        assert "wire 'yours' is unknown: use one of mine, mpi, tcp, torch" in text
