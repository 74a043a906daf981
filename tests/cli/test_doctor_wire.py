"""`weft doctor --wire`: the contract of a wire that an installed package offers."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from weft.cli.commands import app
from weft.testing.wires import NUMBERS

EXAMPLE = Path(__file__).parents[2] / "examples/wire_streams"

BROKEN = """
import weft_streams


class NoAlignment(weft_streams.StreamsWire):
    def lease(self, nbytes):
        raise MemoryError("no memory is registered")


def make_wire(start):
    weft_streams.StreamsWire = NoAlignment
    return weft_streams.make_wire(start)


def no_device(start):
    if start.size > 1:
        raise OSError("no device")
    return weft_streams.make_wire(start)
"""


OFFERED = {
    "streams": "weft_streams:make_wire",
    "broken": "broken_streams:make_wire",
    "absent": "broken_streams:no_device",
    "missing": "no_such_module:make_wire",
}


@pytest.fixture
def packages(tmp_path):
    """Folders of an installed package that offers four wires."""
    (tmp_path / "broken_streams.py").write_text(BROKEN)
    metadata = tmp_path / "wires_of_a_test-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: wires_of_a_test\nVersion: 1\n")
    lines = [f"{name} = {factory}\n" for name, factory in OFFERED.items()]
    (metadata / "entry_points.txt").write_text("[weft.wires]\n" + "".join(lines))
    return [str(tmp_path), str(EXAMPLE)]


@pytest.fixture
def doctor(packages, monkeypatch):
    """`doctor(name)` runs the command beside this package, in this process."""
    monkeypatch.delitem(sys.modules, "broken_streams", raising=False)
    for folder in packages:
        monkeypatch.syspath_prepend(folder)
    return lambda name, *options: CliRunner().invoke(app, ["doctor", "--wire", name, *options])


def rows(done):
    """Number and verdict of each line of the table."""
    lines = re.findall(r"(?m)^ *(\d+) (ok|-|wrong) ", done.stdout)
    return [(int(number), verdict) for number, verdict in lines]


def test_a_wire_that_keeps_the_contract(doctor):
    some = [NUMBERS[name] for name in ("sizes", "dies", "among", "huge")]
    done = doctor("streams", "--clauses", ",".join(map(str, some)))
    assert done.exit_code == 0, done.stdout + done.stderr
    assert rows(done) == list(zip(some, ["ok", "ok", "-", "-"], strict=True))
    assert "\n" + " " * 24 + "its features have no lockstep\n" in done.stdout
    assert done.stdout.endswith("wire 'streams' keeps the 2 clauses that were tried\n")


def test_a_wire_that_breaks_a_clause(doctor):
    number = NUMBERS["leases"]
    done = doctor("broken", "--clauses", f"1,{number}")
    assert done.exit_code == 1, done.stdout + done.stderr
    assert rows(done) == [(1, "ok"), (number, "wrong")]
    assert "\n" + " " * 24 + "MemoryError: no memory is registered" in done.stdout
    assert f"wire 'broken' breaks 1 of 2 clauses: {number}; the manual" in done.stdout


def test_a_wire_that_cannot_be_made(doctor):
    done = doctor("absent")
    assert done.exit_code == 1
    assert done.stderr.strip() == (
        "weft doctor: wire 'absent' cannot be used: on rank 0 its factory raised OSError: no device"
    )


def test_processes_without_mpirun_are_no_ranks_of_mpi(doctor):
    done = doctor("mpi")
    assert done.exit_code == 1
    assert "the 2 ranks have the numbers [0, 0] in MPI" in done.stderr
    assert "start them with the mpirun" in done.stderr


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            ["other"],
            "wire 'other' is unknown: use one of absent, broken, missing, mpi, streams, tcp",
        ),
        (["missing"], "no_such_module:make_wire raised ModuleNotFoundError"),
        (["streams", "--clauses", "one"], "'one': write numbers, divided by commas, as 1,25"),
    ],
)
def test_what_is_refused(doctor, options, why):
    done = doctor(*options)
    assert done.exit_code == 2
    words = " ".join(done.stderr.replace("│", " ").split())
    assert why in words, done.stderr
