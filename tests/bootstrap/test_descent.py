"""A program that a rank starts is refused, and its rank's group does not notice."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import weft
from weft.base.pace import patient
from weft.bootstrap import descent
from weft.bootstrap.local import launch
from weft.rendezvous.launchers import Launch
from weft.rendezvous.places import File, Tcp

CHILD = """
import sys
import weft
for more in sys.argv[1:]:
    try:
        weft.init(timeout=60, **eval(more))
        print("made")
    except weft.WeftError as error:
        print(error)
"""


def run(calls, *before):
    line = [*before, sys.executable, "-c", CHILD, *calls]
    done = subprocess.run(line, capture_output=True, text=True, timeout=patient(120.0), check=True)
    return done.stdout.splitlines()


def starting(calls, *before):
    """What a child of rank 0 says, which calls `weft.init` with these arguments."""
    said = []
    with weft.init(timeout=120):
        if os.environ["RANK"] == "0":
            said = run(calls, *before)
        weft.barrier()
    with weft.init(timeout=120):  # the children have spoilt nothing
        weft.barrier()
    return said


@pytest.mark.parametrize(
    ("agent", "before", "calls"),  # started by the rank, or by a program in between
    [
        ("True", ["env"], ["dict(backend='smoke')"]),
        ("False", [], ["{}", "dict(rendezvous='env://')"]),
    ],
)
def test_a_program_that_a_rank_starts_is_refused_at_once(agent, before, calls, port):
    env = {"OMP_NUM_THREADS": "1", "TORCHELASTIC_USE_AGENT_STORE": agent}
    if agent == "False":
        env["MASTER_PORT"] = str(port)
    said, nothing = launch(2, starting, [calls, *before], env=env)
    assert len(said) == len(calls) and nothing == []
    for text in said:
        assert text.startswith("rank 0: process ")
        assert "has started this process" in text
        assert "unset RANK and WORLD_SIZE for a group of one, or start it with a launcher" in text


RANKS = {"RANK": "1", "WORLD_SIZE": "2"}
ONE = Launch("environment", 1, 2, 1, 2)
PLACE = Tcp("node1", 29500, "node1:29500")


@pytest.fixture
def marked(monkeypatch):
    """The environment of a program that rank 1 has started."""
    monkeypatch.setenv(descent.VARIABLE, "")
    descent.leave_mark(ONE, PLACE)
    mark = os.environ[descent.VARIABLE]
    return RANKS | {descent.VARIABLE: mark.replace(str(os.getpid()), str(os.getppid()), 1)}


def test_the_rank_itself_may_start_again(marked):
    assert "unset RANK and WORLD_SIZE" in descent.refusal(ONE, PLACE, marked)
    assert (
        descent.refusal(ONE, PLACE, RANKS | {descent.VARIABLE: os.environ[descent.VARIABLE]}) == ""
    )
    descent.take_mark_back()
    assert descent.VARIABLE not in os.environ


@pytest.mark.parametrize(
    ("launch", "place"),
    [
        (ONE, Tcp("node1", 29501, "node1:29501")),  # a launcher that a rank has started
        (ONE, File("/tmp/elsewhere")),
        (Launch("environment", 0, 2, 0, 2), PLACE),
        (Launch("environment", 1, 4, 1, 4), PLACE),
        (Launch("alone", 0, 1, 0, 1), None),
    ],
)
def test_a_program_that_is_no_copy_of_its_rank_is_not_refused(launch, place, marked):
    assert descent.refusal(launch, place, marked) == ""


def test_what_a_process_that_is_gone_has_left_is_not_believed(marked):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    mark = marked[descent.VARIABLE].partition(" ")[2]
    assert descent.refusal(ONE, PLACE, marked | {descent.VARIABLE: f"{gone.pid} {mark}"}) == ""
    assert descent.refusal(ONE, PLACE, marked | {descent.VARIABLE: "nonsense"}) == ""


INTERRUPTED = """
import os
import weft
from weft.bootstrap import descent
from weft.group import default

def interrupt(group):
    print(descent.VARIABLE in os.environ, end=" ")
    raise KeyboardInterrupt

default.set = interrupt
try:
    weft.init()
except KeyboardInterrupt:
    print(descent.VARIABLE in os.environ)
"""


def test_an_interrupted_init_takes_its_mark_back(programs, port):
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    done = programs(INTERRUPTED, env={**os.environ, **meeting, "RANK": "0", "WORLD_SIZE": "1"})
    assert done.communicate()[0] == "True False\n"
