"""What survivors say when a rank of a process-group group fails, on four hosts of a netlab.

All scenarios run in one netlab, since starting hosts takes longer than most of them;
`fault_ranks.py` is the program of each host. Every test then reads what its scenario left.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from weft.base.pace import patient

HERE = Path(__file__).parent
NETLAB = HERE.parents[1] / "tools" / "netlab"
SIZE = 4
LONG, SHORT = 20.0, 2.0  # timeouts: one that must not pass, and one that must
SOON = LONG / 2  # seconds, by which no such timeout has passed; benchmarks/faults.py has the times

SCENARIOS = [
    ("kill", 2, LONG),
    ("kill", 0, LONG),
    ("kill parent", 2, LONG),
    ("kill idle", 3, LONG),
    ("kill in dense", 2, LONG),
    ("kill in stream", 2, LONG),
    ("abort", 1, LONG),
    ("fail", 1, LONG),
    ("leave", 1, LONG),
    ("interrupt", 1, LONG),
    ("pause", 2, LONG),
    ("stop", 2, SHORT),
    ("stop", 0, SHORT),
    ("stop in stream", 2, SHORT),
    ("sleep", 3, SHORT),
    ("cut", 2, SHORT),
    ("kill in a verb", 1, LONG),
    ("stop in a verb", 2, SHORT),
    ("cut in a verb", 2, SHORT),
]

Line = dict[str, Any]

pytestmark = [
    pytest.mark.network,
    pytest.mark.skipif(
        not hasattr(os, "geteuid") or os.geteuid() != 0 or shutil.which("ip") is None,
        reason="network namespaces need root and iproute2",
    ),
]


@dataclass
class Record:
    """What the ranks of one scenario said."""

    lines: list[Line] = field(default_factory=list)

    def of(self, what):
        return {line["rank"]: line for line in self.lines if line.get("what") == what}

    @property
    def fault(self):
        """When it happened."""
        return next(iter(self.of("fault").values()))["at"]

    @property
    def errors(self):
        return self.of("error")

    @property
    def logged(self):
        return [line["log"] for line in self.lines if "log" in line]


@pytest.fixture(scope="module")
def output():
    """All that the hosts printed."""
    command = [
        sys.executable,
        str(NETLAB),
        "-n",
        str(SIZE),
        "--rate",
        "1gbit",
        "--timeout",
        f"{patient(300.0)}",
    ]
    hosts = [sys.executable, str(HERE / "fault_ranks.py"), json.dumps(SCENARIOS)]
    ran = subprocess.run(
        [*command, "--", *hosts], capture_output=True, text=True, timeout=patient(320.0)
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def records(output):
    all_of_them = [Record() for _ in SCENARIOS]
    for line in output.splitlines():
        text = line.partition("] ")[2]
        if text.startswith("{"):
            said = json.loads(text)
            all_of_them[said["scenario"]].lines.append(said)
    return {(what, victim): r for (what, victim, _), r in zip(SCENARIOS, all_of_them, strict=True)}


@pytest.fixture
def record(records, request):
    return records[request.param]


def scenario(*whats):
    """Run a test on the scenarios of these kinds."""
    keys = [(what, victim) for what, victim, _ in SCENARIOS if what in whats]
    ids = [f"{what} {victim}" for what, victim in keys]
    return pytest.mark.parametrize(
        ("record", "victim"), [(k, k[1]) for k in keys], ids=ids, indirect=["record"]
    )


def survivors(victim):
    return [rank for rank in range(SIZE) if rank != victim]


@scenario(
    "kill",
    "kill parent",
    "kill idle",
    "kill in dense",
    "kill in stream",
    "stop",
    "stop in stream",
    "cut",
    "sleep",
    "abort",
    "fail",
    "leave",
    "interrupt",
    "kill in a verb",
    "stop in a verb",
    "cut in a verb",
)
def test_every_survivor_names_the_culprit(record, victim):
    for rank in survivors(victim):
        error = record.errors[rank]
        assert error["kind"] == "WireError", error
        assert error["culprit"] == victim, error
        assert error["text"].startswith(f"rank {rank}: rank {victim} "), error
        assert error["text"].endswith("; start the group again"), error


@scenario(
    "kill",
    "kill parent",
    "kill idle",
    "kill in dense",
    "kill in stream",
    "kill in a verb",
    "abort",
    "fail",
    "leave",
)
def test_what_is_seen_at_once_ends_the_others_at_once(record, victim):
    late = {rank: record.errors[rank]["at"] - record.fault for rank in survivors(victim)}
    assert max(late.values()) < SOON, late


@scenario("stop", "stop in stream", "stop in a verb", "cut", "cut in a verb", "sleep")
def test_what_is_seen_at_the_deadline_ends_the_others_then(record, victim):
    late = {rank: record.errors[rank]["at"] - record.fault for rank in survivors(victim)}
    assert max(late.values()) < SOON, late
    assert min(late.values()) > SHORT - 0.5, late  # nobody is condemned before
    texts = [record.errors[rank]["text"] for rank in survivors(victim)]
    assert any(f", past the timeout of {SHORT:g} s; " in text for text in texts), texts


@scenario("kill", "kill parent", "kill idle", "kill in dense", "kill in stream", "kill in a verb")
def test_a_death_is_called_so(record, victim):
    for rank in survivors(victim):
        assert f"rank {victim} died" in record.errors[rank]["text"]


@scenario("stop", "stop in stream", "stop in a verb", "cut", "cut in a verb")
def test_silence_is_called_so(record, victim):
    for rank in survivors(victim):
        assert f"rank {victim} does not answer" in record.errors[rank]["text"]


@scenario("cut", "cut in a verb")
def test_a_rank_that_hears_nobody_blames_its_own_link(record, victim):
    error = record.errors[victim]
    assert error["culprit"] == victim
    assert "its own link is down" in error["text"]


@scenario("sleep")
def test_a_rank_that_did_not_enter_the_call_is_told_from_a_dead_one(record, victim):
    for rank in survivors(victim):
        text = record.errors[rank]["text"]
        # in a ring of four, who does not await the victim itself may be one or two calls ahead
        assert re.search(rf"rank {victim} has not entered call 2[123] \(sparse_all_reduce\)", text)
        assert re.search(r"outside weft for \d+\.\d s", text)
    assert record.errors[victim]["culprit"] == victim  # and it hears so itself, when it comes


@scenario("abort", "fail")
def test_a_reason_travels(record, victim):
    for rank in survivors(victim):
        text = record.errors[rank]["text"]
        assert f"rank {victim} gave up: " in text and "no memory left" in text


@scenario("interrupt")
def test_ctrl_c_ends_a_wait(record, victim):
    assert record.errors[victim]["kind"] == "KeyboardInterrupt"
    assert record.errors[victim]["at"] - record.fault < SOON
    for rank in survivors(victim):
        assert f"rank {victim} was interrupted" in record.errors[rank]["text"]


@scenario("kill", "stop", "cut", "kill in dense")
def test_errors_say_what_was_awaited_and_for_how_long(record, victim):
    told = [e["text"] for rank, e in record.errors.items() if rank != victim]
    awaited = [text for text in told if " awaited " in text or " was sending " in text]
    assert awaited, told  # those whose wait it ended; others were just about to post
    for text in awaited:  # around a ring a rank may be three calls behind, or ahead
        assert re.search(r" bytes .* s in sparse_all_reduce \(call (1[89]|2[0-4])\)", text), text


@scenario("kill", "stop", "cut", "sleep", "abort", "leave")
def test_later_uses_raise_the_same(record, victim):
    for rank in survivors(victim):
        assert record.of("again")[rank]["text"] == record.errors[rank]["text"]


@scenario("kill", "stop", "cut", "leave")
def test_each_survivor_logs_one_line(record, victim):
    for rank in survivors(victim):
        assert len([line for line in record.logged if line.startswith(f"rank {rank}: ")]) == 1


@scenario("kill in a verb", "stop in a verb", "cut in a verb")
def test_torchs_own_group_raises_from_then_on(record, victim):
    for rank in record.errors:
        assert record.of("torch")[rank]["at"] - record.fault < SOON


@scenario("pause")
def test_a_pause_harms_nobody(record, victim):
    assert record.errors == {} and record.logged == []
    assert sorted(record.of("end")) == list(range(SIZE))
    assert min(line["at"] for line in record.of("end").values()) - record.fault > 0.9


def test_nothing_breaks_on_the_way_out(output, records):
    assert "terminate called" not in output and "Traceback" not in output, output
    for (what, victim), record in records.items():
        assert not record.of("broken"), record.of("broken")
        for rank, line in record.of("status").items():
            ended = rank == victim and what.startswith(("kill", "stop"))
            assert line["status"] == (-9 if ended else 0), (what, rank, line)
