"""Interrupts at every point where one may come: afterwards the group works, or says why not.

CPython looks for signals, and for exceptions that other threads raise here, after a call, where a
function begins, and where a loop goes round. A tracer raises at each of these points in turn, of
all that a call of the worker runs, Python's own library included.
"""

from __future__ import annotations

import dis
import gc
import os
import sys
import threading

import pytest

import weft
from weft.base.errors import WireError
from weft.base.pace import patient
from weft.testing import threads

LIMIT = 10.0  # seconds: who waits for a turn that is lost finds that within one

# after these CPython 3.11 to 3.14 look, or one of them does
_LOOKS = ("CALL", "RESUME", "JUMP_BACKWARD", "BEFORE_WITH")
LOOKS = {code for name, code in dis.opmap.items() if name.startswith(_LOOKS)}
EVERYWHERE = set(range(256))
GROUP = os.path.join(weft.__path__[0], "group", "")


class Interrupter:
    """Raises KeyboardInterrupt in this thread behind so many operations of some kinds."""

    def __init__(self, points, operations, files):
        self._left = points
        self._operations = operations
        self._files = files  # all others are passed over
        self._last = {}  # operation of each frame
        self.has_raised = False

    def trace(self, frame, event, arg):
        file = frame.f_code.co_filename
        if self._files not in file or file == __file__:
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        if event == "opcode":
            last = self._last.get(frame)
            self._last[frame] = frame.f_code.co_code[frame.f_lasti]
            if last in self._operations:
                self._left -= 1
                if self._left < 0 and not self.has_raised:
                    self.has_raised = True
                    raise KeyboardInterrupt
        return self.trace


class Case:
    """Something that is interrupted, on rank 0 of two.

    Attributes:
        group: of rank 0.
        ran: what jobs have run.
        error: what was raised.
        after: what is done next, in the same thread.
    """

    def __init__(self, group):
        self.group = group
        self.ran = []
        self.error = None
        self.after = lambda: None

    def note(self):
        self.ran.append("interrupted")


def call(case):
    return lambda: case.group.worker.call("interrupted", case.note)


def call_of_a_job_that_fails(case):
    return lambda: case.group.worker.call("interrupted", lambda: [][1])


def call_in_a_call(case):
    worker = case.group.worker
    sound = lambda: worker.call("inner", case.note)  # noqa: E731
    return lambda: worker.submit("outer", sound, several=True).wait()


def call_behind_a_job(case):
    gate = threading.Event()
    case.group.worker.submit("gate", gate.wait)
    timer = threading.Timer(0.005, gate.set)
    timer.start()
    case.after = timer.join
    return lambda: case.group.worker.call("interrupted", case.note)


def first_submit(case):
    return lambda: case.group.worker.submit("interrupted", case.note)


def second_submit(case):
    case.group.worker.submit("first", lambda: None).wait()
    return lambda: case.group.worker.submit("interrupted", case.note)


def wait(case):
    gate = threading.Event()
    work = case.group.worker.submit("interrupted", gate.wait)
    timer = threading.Timer(0.005, gate.set)
    timer.start()

    def after():
        timer.join()
        work.wait()

    case.after = after
    return work.wait


def future(case):
    work = case.group.worker.submit("interrupted", lambda: 3)
    case.after = lambda: work.get_future().wait()
    return work.get_future


USES = [
    call,
    call_of_a_job_that_fails,
    call_in_a_call,
    call_behind_a_job,
    first_submit,
    second_submit,
    wait,
    future,
]


def interrupt(use, interrupter):
    """Make a call that is interrupted; what it raises."""
    before = sys.gettrace()
    gc.disable()  # a collection would close here what other tests have left
    sys.settrace(interrupter.trace)
    try:
        use()
    except BaseException as error:  # of Python's own library, too, in which it came
        return error
    finally:
        sys.settrace(before)
        gc.enable()
    return None


def in_time(what):
    """What comes of it in another thread: "done", a verdict, or "" where it has not ended."""

    def run():
        try:
            what()
            outcome.append("done")
        except WireError as error:
            outcome.append(str(error))

    outcome = []
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(patient(LIMIT))
    return outcome[0] if outcome else ""


def check(make, interrupter, *, goes_on):
    """What was interrupted, None: there is no such point; fails where something hangs after it.

    Args:
        make: prepares what is interrupted.
        interrupter: where.
        goes_on: whether the thread that was interrupted makes the next call, or another one.
    """
    mine, peer = threads.group(2, timeout=60.0)
    case = Case(mine)
    worker = mine.worker

    def program():
        case.error = interrupt(make(case), interrupter)
        assert type(case.error) is not ValueError, case.error  # of a step that was made twice
        case.after()
        if goes_on:
            worker.call("next", lambda: None)

    ends = [
        in_time(program),
        in_time(lambda: worker.call("of another thread", lambda: None)),
        in_time(lambda: worker.submit("job", lambda: None).wait()),
        in_time(mine.close),
        in_time(peer.close),
    ]
    assert all(ends), ends
    return case if interrupter.has_raised else None


@pytest.mark.parametrize("make", USES, ids=lambda make: make.__name__)
def test_after_an_interrupt_anywhere_the_next_calls_end(make):
    points = 0
    while case := check(make, Interrupter(points, LOOKS, ""), goes_on=True):
        if make in (first_submit, second_submit):
            assert case.error is not None and case.ran == []
        points += 1
    assert points > 10


@pytest.mark.parametrize("make", [call, second_submit], ids=lambda make: make.__name__)
def test_after_an_interrupt_between_any_two_operations_the_next_calls_end(make):
    """Also where no interpreter looks: then a turn may stay in the line, which heals itself.

    The thread that was interrupted makes the next call behind every other point, else another one.
    """
    points = 0
    interrupter = Interrupter(points, EVERYWHERE, GROUP)
    while check(make, interrupter, goes_on=points % 2 == 0):
        points += 1
        interrupter = Interrupter(points, EVERYWHERE, GROUP)
    assert points > 100
