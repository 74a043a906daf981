"""A rank that cannot take part, or cannot host the rendezvous: all hear of it, and at once.

The ranks are processes with their own environments, as somebody would start them by hand; what a
person sees of them is looked at, too.
"""

from __future__ import annotations

import os
import socket
import time

import pytest
import torch.distributed as dist

from weft.base.errors import WireError
from weft.base.pace import patient
from weft.bootstrap import init

RANK = """
import sys, weft
from weft.bootstrap import membership

membership.LINGER = 60.0  # until all have heard it, however busy it is
membership.GRACE = 1.0  # no torchrun begins another round
url, timeout = sys.argv[1:]
try:
    with weft.init(timeout=float(timeout), rendezvous=url or None) as group:
        weft.barrier()
        print("ready")
except weft.Error as error:
    print(f"{type(error).__name__}: {error}")
"""
LONG = 90.0  # seconds that a rank would wait that hears nothing; more than a test may take


class Ranks:
    """Processes that call `weft.init`, and what each says."""

    def __init__(self, programs, folder):
        self._programs = programs
        self._started = []
        self._folder = folder

    def start(self, env, url="", timeout=LONG, *, before=""):
        """Start one; `before` is a program that it runs first."""
        right = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        right |= {"TMPDIR": str(self._folder), "OMP_NUM_THREADS": "1"}
        self._started.append(self._programs(before + RANK, url, str(timeout), env={**right, **env}))

    def said(self):
        """Output and errors of each."""
        return [each.communicate() for each in self._started]


@pytest.fixture
def ranks(programs, tmp_path):
    folder = tmp_path / "private"
    folder.mkdir()
    return Ranks(programs, folder)


def at(port, **env):
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **env}


# One that does not know its rank, or the world size.


@pytest.mark.parametrize(
    ("wrong", "complaint", "where"),
    [
        ({"RANK": "0"}, "has RANK=0 but no WORLD_SIZE", ""),
        ({"RANK": "0"}, "has RANK=0 but no WORLD_SIZE", "file://{}/run7"),
        ({"WORLD_SIZE": "2"}, "has WORLD_SIZE=2 but no RANK", ""),
    ],
)
def test_the_others_hear_why_rank_0_cannot_come(wrong, complaint, where, ranks, tmp_path, port):
    """They have nobody to meet at, but for the one that cannot come."""
    url = where.format(tmp_path)
    ranks.start(at(port, RANK="1", WORLD_SIZE="2"), url)
    ranks.start(at(port, **wrong), url)
    said = [out for out, _ in ranks.said()]
    assert len(set(said)) == 1, said
    assert said[0].startswith("WeftError: a process without a rank (") and complaint in said[0]
    assert not (tmp_path / "run7").exists()


def test_a_port_that_is_taken_is_told(ranks):
    with socket.create_server(("127.0.0.1", 0)) as sock:  # which never says a word
        port = sock.getsockname()[1]
        ranks.start(at(port, RANK="0", WORLD_SIZE="2"))
        ranks.start(at(port, RANK="1", WORLD_SIZE="2"), timeout=1.0)
        zero, one = (out for out, _ in ranks.said())
    assert zero == (
        f"WeftError: rank 0 cannot host the rendezvous at 127.0.0.1:{port}: another program "
        "listens there; choose another port, and let MASTER_ADDR be the host of rank 0\n"
    )
    assert one.startswith("WireError: rank 1: rank 0 was not there") and "it is no store" in one


# What a person sees meanwhile: torch's own warnings and traces are none of that.


KNOCKS = """
import os, socket
knock, knocks = socket.create_connection, []
def knock_again(*args):
    knocks.append(args)
    if len(knocks) == 10:
        open(os.environ["KNOCKED"], "w").close()
    return knock(*args)
socket.create_connection = knock_again
"""


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_late_rank_0_is_waited_for_in_silence(host, ranks, port, tmp_path):
    knocked = tmp_path / "knocked"
    env = at(port, WORLD_SIZE="2") | {"MASTER_ADDR": host}
    ranks.start(env | {"RANK": "1", "KNOCKED": str(knocked)}, before=KNOCKS)
    until = time.monotonic() + patient(60.0)
    while not knocked.exists():  # it has been at the port some times
        assert time.monotonic() < until
        time.sleep(0.01)
    ranks.start(env | {"RANK": "0"})
    assert ranks.said() == [("ready\n", "")] * 2


@pytest.mark.parametrize(
    ("rank", "complaint"),
    [
        (
            "1",
            r"rank 1: rank 0 was not there at .* "
            r"\(127.0.0.1 port \d+: (Connection refused|timed out)\)",
        ),
        ("0", r"rank 1 did not come to .* in time \(1 of 2 came, from "),
    ],
)
def test_a_rank_that_gives_up_says_one_sentence(rank, complaint, ranks, port):
    ranks.start(at(port, RANK=rank, WORLD_SIZE="2"), timeout=1.0)
    ((out, err),) = ranks.said()
    with pytest.raises(AssertionError, match=f"^WireError: {complaint}"):
        raise AssertionError(out)
    assert err == ""


def test_ranks_that_met_and_cannot_connect_are_told_that(monkeypatch, port):
    """Where a firewall leaves them the port of the meeting alone."""

    def fails(*_, **__):
        raise RuntimeError("Gloo connectFullMesh failed\nand where")

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(dist, "init_process_group", fails)
    complaint = (
        r"^rank 0: gloo failed on rank 0 \(Gloo connectFullMesh failed and where\), though all .*"
        "firewall.*WEFT_INTERFACE names; all 1 ranks had come to tcp:"
    )
    with pytest.raises(WireError, match=complaint):
        init.init(rendezvous=f"tcp://127.0.0.1:{port}", timeout=3.0)
