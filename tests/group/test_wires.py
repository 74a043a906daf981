"""`weft.group.wires`: the verdict on what a wire says, or raises; an abort reaches all wires."""

from __future__ import annotations

import functools
import logging
import os
import signal
import threading

import pytest

from weft.failure.verdict import Verdict
from weft.group.wires import Wires, is_of_a_signal, verdict_on, verdict_on_exception
from weft.wire.interface import Failure

ALIKE = "(all ranks must run the same program and version, and post the same lengths to each other)"
GARBLED = Failure("garbled", 2, "rank 2 sent no frame")


@pytest.mark.parametrize(
    ("failure", "verdict"),
    [
        (GARBLED, Verdict(2, f"rank 2 sent no frame {ALIKE}")),
        (Failure("stuck", None, "all wait"), Verdict(None, "all wait")),
        (Failure("broken", 0, "no memory"), Verdict(1, "rank 1: no memory")),
    ],
)
def test_what_a_wire_is_sure_of_is_a_verdict(failure, verdict):
    assert verdict_on(failure, 1) == verdict


def test_what_a_wire_raises_is_a_verdict():
    text = "rank 1: its wire raised KeyError: 'no such device'"
    assert verdict_on_exception(KeyError("no such device"), 1) == Verdict(1, text)
    long = verdict_on_exception(ValueError("two\n  lines " + 1000 * "x"), 1)
    assert "ValueError: two lines xxx" in long.text and len(long.text) < 700


class Faulty:
    """A wire that says what it is told to."""

    def __init__(self, failure=None, *, raises=False):
        self.said = failure
        self.raises = raises
        self.aborts = []

    def failure(self):
        return self.said

    def abort(self, failure):
        if self.raises:
            raise RuntimeError("this wire cannot be aborted")
        self.aborts.append(failure)


class Mute(Faulty):
    """A wire that cannot even say whether it has failed."""

    def failure(self):
        raise KeyError("no such device")


def test_a_wire_that_raises_when_it_is_asked_is_to_blame():
    wires, mute = Wires(1, Faulty()), Mute()
    wires.add(mute)
    assert wires.find_fault() == verdict_on_exception(KeyError("no such device"), 1)


def test_an_abort_reaches_all_wires_though_a_handler_of_the_log_raises(monkeypatch):
    def handler(*args):
        raise OSError("no space left on device")

    monkeypatch.setattr(logging.getLogger("weft"), "error", handler)
    wires = Wires(1, Faulty(raises=True))
    last = Faulty()
    wires.add(last)
    with pytest.raises(OSError, match="no space"):
        wires.abort(Verdict(0, "rank 0 died"))
    assert len(last.aborts) == 1


def test_an_abort_reaches_all_wires_though_one_raises(caplog):
    kinds = [Faulty(), Faulty(raises=True), Faulty()]
    wires = Wires(1, kinds[0])
    for each in kinds[1:]:
        wires.add(each)
    with caplog.at_level(logging.ERROR, "weft"):
        wires.abort(Verdict(2, "rank 2 died"))
    aborted = [Failure("aborted", 2, "rank 2 died")]
    assert [each.aborts for each in kinds] == [aborted, [], aborted]
    assert "rank 1: a wire cannot be aborted: RuntimeError" in caplog.text


@pytest.mark.parametrize(
    ("failure", "verdict"),
    [
        (None, None),
        (Failure("lost", 2, "the connection ended"), None),  # the control links may know more
        (Failure("aborted", 2, "rank 2 died"), None),
        (GARBLED, Verdict(2, f"rank 2 sent no frame {ALIKE}")),
        (Failure("broken", 2, "no memory"), Verdict(1, "rank 1: no memory")),
    ],
)
def test_what_a_wire_has_seen_while_nobody_used_it_is_found(failure, verdict):
    wires, faulty = Wires(1, Faulty()), Faulty(failure)
    wires.add(faulty)
    assert wires.find_fault() == verdict


class Late(Exception):
    """What handlers of this test raise."""


def handle(number, frame):
    raise Late


def handle_more(what, number, frame):
    raise Late


class Handler:
    def __call__(self, number, frame):
        raise Late

    def method(self, number, frame):
        raise Late


def wait_long():
    threading.Event().wait(20.0)


@pytest.mark.parametrize(
    "handler", [handle, functools.partial(handle_more, "x"), Handler(), Handler().method]
)
def test_what_the_handler_of_a_signal_raises_is_told_from_what_a_wire_raises(handler):
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(Late) as caught:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            wait_long()
        assert is_of_a_signal(caught.value)
        with pytest.raises(Late) as caught:
            raise Late
        assert not is_of_a_signal(caught.value)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_what_is_no_exception_is_of_a_signal():
    assert is_of_a_signal(KeyboardInterrupt()) and is_of_a_signal(SystemExit(3))
    assert not is_of_a_signal(ValueError())


class Closing(Faulty):
    """A wire that notes its end."""

    def __init__(self, number, noted):
        super().__init__()
        self.number = number
        self.noted = noted

    def close(self):
        self.noted.append(self.number)
        if self.number == 2:
            raise KeyError("no such device")


def test_verbs_are_closed_also_where_one_raises():
    noted = []
    wires = Wires(0, Closing(0, noted))
    verbs = [Closing(number, noted) for number in (1, 2, 3)]
    for each in verbs:
        wires.add(each)
    with pytest.raises(KeyError, match="no such device"):
        wires.close_verbs()
    assert sorted(noted) == [1, 2, 3]
