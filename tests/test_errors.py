"""What users see of errors: tracebacks that end with their call, exits of their own functions."""

from __future__ import annotations

import os

import pytest
import torch

import weft
from weft.base.pace import patient
from weft.testing import spmd

WEFT = os.path.join(weft.__path__[0], "")  # and no folder of that name above it

PROGRAM = """
import signal, sys, threading, torch, weft
from weft.compat.distdl.partition import MPIPartition
from weft.group.session import Session
from weft.testing import threads

mine, other = threads.group(2, timeout=60.0)

def reduced(group, index, **how):
    return weft.sparse_all_reduce((torch.tensor([index]), torch.ones(1)), group=group, **how)

def gathered(group, width):
    x = torch.ones(2, width, requires_grad=True)
    return weft.nn.AllGather(weft.Partition((2,), group=group), 0)(x)

def fails():
    raise KeyError("lost")

def waits(thread):
    frame = sys._current_frames()[thread.ident]
    while frame and frame.f_code is not Session.wait_for.__code__:
        frame = frame.f_back
    return frame is not None

def interrupts():
    while not waits(threading.main_thread()):
        pass  # for this rank, which does not come
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

def theirs():
    try:
        {theirs}
    except weft.Error:
        pass

threading.Thread(target=theirs).start()
{mine}
"""
# what the other rank does, a thread; what the program itself does; how its traceback ends
NEGATIVE, LEFT = "WeftError: rank 1: index -1 is negative", "WireError: rank 0: rank 1 left while"
NO_CELL = "WeftError: there is no rank"
ENDS = {
    "call": ("reduced(other, -1)", "reduced(mine, 1)", NEGATIVE),
    "wait": ("reduced(other, -1)", "reduced(mine, 1, async_op=True).wait()", NEGATIVE),
    "routine": ("other.close()", "weft.all_to_all([torch.ones(2)] * 2, group=mine)", LEFT),
    "layer": ("gathered(other, 3)", "gathered(mine, 2)", "WeftError: AllGather: in dimension 1"),
    "backward": ("gathered(other, 2); other.close()", "gathered(mine, 2).sum().backward()", LEFT),
    "init": ("other.close()", "weft.init(timeout=0)", "WeftError: timeout is 0: pass a positive"),
    "late": ("pass", "weft.barrier(0.05, group=mine)", "StillRunning: "),
    "partition": ("pass", "weft.Partition(2, group=mine).subset([2])", f"{NO_CELL} 2"),
    "distdl": (
        "pass",
        "weft.init(); MPIPartition().create_partition_inclusive([1])",
        f"{NO_CELL} 1",
    ),
    "interrupt": ("interrupts()", "reduced(mine, 1)", "KeyboardInterrupt"),
    "function": (
        "weft.attempt(int, group=other)",
        "weft.attempt(fails, group=mine)",
        "WeftError: rank 0: KeyError: 'lost'",
    ),
}


@pytest.mark.parametrize("case", ENDS)
def test_a_traceback_ends_with_the_call_and_the_sentence(programs, case):
    theirs, mine, sentence = ENDS[case]
    program = PROGRAM.format(theirs=theirs, mine=mine)
    started = {}
    for whole in ("0" if case == "init" else "", "1"):
        started[whole] = programs(program, env={**os.environ, "WEFT_TRACEBACK": whole})
    for whole, each in started.items():
        said = each.communicate()[1]
        lines = said.splitlines()
        assert lines[-1].removeprefix("[rank0]: ").removeprefix("weft.").startswith(sentence), said
        raised, ours = said.count("Traceback"), said.count(WEFT)
        # a function's own is shown, too; what weft caught itself with its frames alone
        inside = {"late": 1, "routine": 1, "backward": 1} if whole == "1" else {}
        caught = inside.get(case, 0) + (case == "function")
        assert raised == 1 + caught, said
        # of a layer the frame that torch.nn.Module calls, of a function that which calls it
        assert ours > 2 if whole == "1" else ours == (case in ("layer", "function")), said
        assert whole == "1" or len(lines) < 20, said


def rows():
    return torch.tensor([1, 2]), torch.ones(2)


FUNCTIONS = [
    lambda f: weft.sparse_all_reduce(rows(), op=lambda a, b: f() or a),
    lambda f: weft.sparse_all_reduce(rows(), lambda a, b: f() or a, async_op=True).wait(),
    lambda f: weft.sparse_all_reduce([rows()], lambda a, b: f() or a),
    weft.attempt,
]


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
@spmd(2, 3)
def test_an_exit_in_a_function_is_its_ranks_own_and_the_others_error(group, kind):
    def exits():
        raise kind(3)

    last = group.size - 1
    expected, text = weft.WeftError, f"rank {last}: {kind.__name__}: 3"
    if group.rank == last:
        expected, text = kind, "3"
    for call in FUNCTIONS:
        with pytest.raises(expected) as caught:
            call(exits if group.rank == last else int)
        assert str(caught.value) == text
        assert weft.all_reduce(torch.ones(1)).item() == group.size


def test_who_fails_is_named_in_the_table_of_faults(script, monkeypatch):
    monkeypatch.setenv("FAULTS_DEADLINE", str(patient(10.0)))
    faults = script("benchmarks/faults.py")
    (found,) = faults.measure(faults.cells("kill,ddp_unused,tcp,2"), jobs=1)
    assert not (found.hangs or found.wrong or found.nobody or found.unclean), found
