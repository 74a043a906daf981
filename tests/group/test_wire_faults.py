"""Groups over a wire that does something wrong: all ranks say what, and the next init works."""

from __future__ import annotations

import threading

import pytest
import torch

import weft
from weft.base.pace import patient
from weft.group import joining
from weft.testing import processes
from weft.wire.interface import Failure, WireFailed
from weft.wire.tcp import wire as tcp

BAD = 1
"""The rank whose wire does something wrong."""

LOST = "the link is too slow, or the ranks disagree on what to send"


class Mine:
    """A wire: TCP, until something is wrong with it.

    Attributes:
        fault: what is wrong; "": nothing.
    """

    def __init__(self, inside):
        self.inside = inside
        self.rank = inside.rank
        self.size = inside.size
        self.fault = ""
        for name in ("abort", "failure", "close"):
            setattr(self, name, getattr(inside, name))

    def post(self, sends=(), recvs=(), channel=0):
        if self.fault == "raises in post":
            raise ValueError("there is no queue left")
        if self.fault == "breaks":
            self.abort(Failure("broken", None, "there is no memory left"))
        if self.fault == "completes nothing":
            return Never(self, sends, recvs)
        if self.fault == "sends nothing":
            sends = ()
        pending = self.inside.post(sends, recvs, channel)
        if self.fault in ("raises in wait", "raises in release"):
            return Raising(pending, self.fault.removeprefix("raises in "))
        return pending

    def lease(self, nbytes):
        return None


class Never:
    """The messages of a post, none of which ever comes."""

    def __init__(self, wire, sends, recvs):
        self.wire = wire
        self.peers = sorted({peer for peer, _ in (*sends, *recvs)})

    def wait(self, timeout=None):
        while self.wire.failure() is None:
            threading.Event().wait(0.02)
        raise WireFailed(self.wire.failure())

    def waiting_for(self):
        return self.peers

    def release(self):
        pass


class Raising:
    """The messages of a post, one of whose methods raises."""

    def __init__(self, inside, what):
        for name in ("wait", "waiting_for", "release"):
            setattr(self, name, getattr(inside, name))
        setattr(self, what, self.fail)

    def fail(self, timeout=None):
        raise KeyError("no such message")


def make(*given):
    return Mine(tcp.make(*given))


def init_over(make_wire):
    """`weft.init` of a process whose wire this makes."""
    joining.make = make_wire
    try:
        return weft.init(timeout=60)
    finally:
        joining.make = tcp.make


def the_next_works():
    """A group that is made after another has failed."""
    with weft.init(timeout=60):
        return weft.all_reduce(torch.ones(1)).item()


def after_faults(*faults):
    """What a rank raises where each of these is wrong in turn, from the second call on.

    A fault is what is wrong, and on which ranks.
    """
    told = []
    for fault, ranks in faults:
        group = init_over(make)
        with pytest.raises(weft.WireError) as caught:
            weft.all_reduce(torch.ones(3))  # some may be in it still when others hear of the fault
            group.set_timeout(patient(1.0))
            if group.rank in ranks:
                group.wire.fault = fault
            for _ in range(3):
                weft.all_reduce(torch.ones(3))
        with pytest.raises(weft.WireError) as again:
            weft.barrier()
        assert str(again.value) == str(caught.value)
        weft.shutdown()
        cause = repr(caught.value.__cause__)
        told.append((str(caught.value), caught.value.culprit, cause))
        assert the_next_works() == 3.0
    return told


RAISES = "rank 1: its wire raised KeyError: 'no such message'"
FAULTS = [  # what is wrong, on which ranks, who is to blame, what all say, what that rank caught
    (
        "sends nothing",
        [BAD],
        BAD,
        f"not all came in time between rank 1 and ranks 0 and 2, though all answer: {LOST}",
        "None",
    ),
    (
        "completes nothing",
        [BAD],
        BAD,
        "not all came in time between rank 1 and ranks 0 and 2 in call 2 (all_reduce), though "
        f"all answer: {LOST}",
        "None",
    ),
    ("breaks", [BAD], BAD, "rank 1: there is no memory left", "None"),
    (
        "raises in post",
        [BAD],
        BAD,
        "rank 1: its wire raised ValueError: there is no queue left",
        "ValueError",
    ),
    ("raises in wait", [BAD], BAD, RAISES, "KeyError"),
    ("raises in release", [BAD], BAD, RAISES, "KeyError"),
]


def test_what_a_wire_does_wrong_is_told_alike_by_all():
    results = processes(3, after_faults, *(fault[:2] for fault in FAULTS))
    for rank, told in enumerate(results):
        for (said, blamed, cause), fault in zip(told, FAULTS, strict=True):
            *_, culprit, text, raised = fault
            assert said.startswith(f"rank {rank}: {text}"), said
            assert said.endswith("; start the group again"), said
            assert blamed == culprit
            assert cause.startswith(raised if rank == BAD else "None"), cause


def after_calls_of_some():
    """Two of three ranks make a call of their own, and then nothing comes to anybody."""
    group = init_over(make)
    weft.all_reduce(torch.ones(3))
    if group.rank < 2:
        weft.barrier(group=group.subset([0, 1]))
    weft.barrier()
    if group.rank < 2:
        weft.barrier(group=group.subset([0, 1]))
    group.set_timeout(patient(1.0))
    group.wire.fault = "completes nothing"
    with pytest.raises(weft.WireError) as caught:
        weft.all_reduce(torch.ones(3))
    weft.shutdown()
    return str(caught.value), caught.value.culprit, the_next_works()


def test_calls_of_some_ranks_are_no_other_calls():
    for rank, (said, culprit, total) in enumerate(processes(3, after_calls_of_some)):
        text = f"rank {rank}: not all came in time between ranks 0, 1 and 2 in call"
        assert said.startswith(text), said
        assert f"though all answer: {LOST}" in said, said
        assert culprit is None
        assert total == 3.0


LENGTHS = [  # bytes of a message, those of its receive, and whether that is by size
    (48, 8, True),
    (48, 40, False),
    (40, 48, False),
    (1_200_000, 800_000, False),  # more than is sent unasked
    (800_000, 1_200_000, False),
]
FITS = "rank 0 sent {} bytes for a receive of "
HOW_TOLD = (f"{FITS}exactly {{}}", f"{FITS}{{}}")
"""What begins the error, where the receive is a tensor, and where it is by size."""


def lengths_differ():
    """Rank 0 sends rank 1 messages of other lengths than it receives; each time all init again."""
    told = []
    for sent, awaited, is_sized in LENGTHS:
        group = weft.init(timeout=60)
        message = torch.ones(sent, dtype=torch.uint8)
        place = awaited if is_sized else torch.ones(awaited, dtype=torch.uint8)
        sends = [(1, message)] if group.rank == 0 else []
        recvs = [(0, place)] if group.rank == 1 else []
        with pytest.raises(weft.WireError) as caught:
            weft.barrier()  # all have a group; rank 2 may be told of its end already here
            group.post(sends, recvs).wait()
            weft.all_reduce(torch.ones(3))  # in which rank 2 waits for the others
        with pytest.raises(weft.WireError) as again:
            weft.barrier()
        assert str(again.value) == str(caught.value)
        weft.shutdown()
        told.append((str(caught.value), caught.value.culprit))
    return told, the_next_works()


def test_a_message_of_another_length_is_told_alike_by_all():
    results = processes(3, lengths_differ)
    for rank, (told, total) in enumerate(results):
        assert total == 3.0
        for (said, culprit), (sent, awaited, is_sized) in zip(told, LENGTHS, strict=True):
            text = HOW_TOLD[is_sized].format(sent, awaited)
            assert said.startswith(f"rank {rank}: {text}"), said
            assert "ranks must run the same program and version, and post the same lengths" in said
            assert said.endswith("; start the group again"), said
            assert culprit == 0
