"""Ranks whose peer sends garbage over a real group: all raise at once, and name that peer."""

from __future__ import annotations

import contextlib
import itertools
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import weft
from cases import on_hosts, set_rate
from weft.base.pace import patient
from weft.group.channels import OPENINGS
from weft.testing import run
from weft.wire.tcp import connection

CULPRIT = 1
TOP = (1 << 63) - 1
RATES = {"plain": 19, "packed": 15}  # of links on which index lists are so
STATEMENT, LIST = range(2)  # the messages of a call, in their order
HEADER = 304  # the last bytes of a statement: 48, and 128 numbers of 2


def put(at, *words):
    """Change a message: from byte `at` on it has these integers of 64 bits."""

    def change(raw):
        raw[at : at + 8 * len(words)] = torch.tensor(words).view(torch.uint8)

    return change


MESSAGES = {  # which is changed, with what index lists, how
    "no statement": (STATEMENT, "plain", put(0, 0)),
    "a header of too many rows": (STATEMENT, "plain", put(-HEADER, 1 << 60)),
    "a negative count": (LIST, "plain", put(0, -5)),
    "bytes beyond the message": (LIST, "plain", put(8, TOP)),
    "a negative index": (LIST, "plain", put(24, -1)),
    "repeated indices": (LIST, "plain", put(800, 7, 7)),
    "too large an index": (LIST, "plain", lambda raw: raw[-4:].fill_(0x7F)),
    "widths of gaps": (LIST, "packed", put(24, -1)),
    "gaps": (LIST, "packed", lambda raw: raw[600:].fill_(0)),
}
FRAMES = {  # kind or channel, and so on, as other numbers
    "a length": lambda kind, at, length, n: (kind, at, length + (kind == 0 and 1 << 40), n),
    "a kind": lambda kind, at, length, n: (9, at, length, n),
    # of memory that ranks of a host share, what they lend or copy there and what they have read
    "an offset": lambda kind, at, length, n: (kind, at, length, n + (kind in (2, 3) and 1 << 40)),
    "an acknowledgement": lambda kind, at, length, n: (kind, at, length, n + (kind == 4 and 99)),
}
SHARED = {
    "an offset": "a frame of kind [23] ",
    "an acknowledgement": "a frame of kind 4 for 0 bytes",
}


def changed(group, which, change):
    """The group, on which one message to each goes out changed, or what opens a call."""
    post, tell, statements, posts = group.post, group.tell, itertools.count(), itertools.count(1)

    def changing(sends=(), recvs=(), channel=0):
        if sends and channel != OPENINGS and next(posts) == which:
            for place, (peer, message) in enumerate(sends):
                change(message := message.detach().clone())
                sends = [*sends[:place], (peer, message), *sends[place + 1 :]]
        return post(sends, recvs, channel)

    def changing_a_statement(message, *given, **options):
        if which == STATEMENT and next(statements) == 0:
            change(torch.frombuffer(message, dtype=torch.uint8))
        return tell(message, *given, **options)

    group.post = changing
    group.tell = changing_a_statement


def framed(patch, module, name, change):
    """Frames that this process packs from now on say other numbers."""
    frame = getattr(module, name)

    class Frame:
        size, unpack_from = frame.size, frame.unpack_from

        def pack(self, *numbers):
            return frame.pack(*change(*numbers))

        def pack_into(self, raw, at, *numbers):
            frame.pack_into(raw, at, *change(*numbers))

    patch.setattr(module, name, Frame())


def attacked(group, way, what):
    """Whom this rank blames, how, and how many seconds that took."""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as after:
        if way == "tcp":  # as between hosts
            patch.setenv("WEFT_HOST", str(group.rank))
        group = after.enter_context(group.split(range(3)))
        which, lists, change = MESSAGES.get(what, (None, "plain", None))
        given = group.subset([0, 2, 1]) if what == "a negative count" else group
        after.enter_context(on_hosts(given, "abc"))
        rows = weft.Rows(torch.arange(60_000) * 3 + group.rank, torch.ones(60_000, 2), 200_000)

        def reduce():
            set_rate(given, RATES[lists])
            weft.sparse_all_reduce(rows, algorithm="gather", group=given)
            given.all_gather_bytes(b"short", bytes)  # in a frame, also within a host

        began = time.monotonic()
        with pytest.raises(weft.WireError) as caught:
            reduce()
            if group.rank == CULPRIT and change is not None:
                changed(given, which, change)
            elif group.rank == CULPRIT and what == "of a detector":
                group.session.detector.links.send(0, b'{"bye": ["nobody"]}\n')
            elif group.rank == CULPRIT:
                framed(patch, connection, "_FRAME", FRAMES[what])
            until = time.monotonic() + patient(30.0)
            while time.monotonic() < until:
                reduce()
    return caught.value.culprit, str(caught.value), time.monotonic() - began


def attacks():
    for way in ("threads", "shm", "tcp"):
        yield from ((way, what) for what in MESSAGES)
        if way != "threads":
            yield way, "of a detector"
            yield from ((way, what) for what in FRAMES if way == "shm" or what not in SHARED)


@pytest.mark.parametrize(("way", "what"), [*attacks()])
def test_who_sends_garbage_is_named_by_all(way, what):
    on = "processes" if way in ("shm", "tcp") else way
    for rank, (culprit, text, seconds) in enumerate(run(3, attacked, way, what, on=on)):
        said = f"rank {rank}: rank {CULPRIT} sent {SHARED.get(what, '')}"
        assert culprit == CULPRIT and re.match(said, text), text
        assert seconds < 80, "a deadline was waited for"


def test_spoilt_bytes_are_read_or_refused():
    """By all decoders, alone and in whole calls; the program also runs as long as one likes."""
    line = [sys.executable, str(Path(__file__).parents[1] / "tools" / "fuzz_decoders.py")]
    line += ["--executions", "2000"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
