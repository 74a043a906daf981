"""The example passes as a program of one rank and in a group, and fails where a result is wrong."""

from __future__ import annotations

import contextlib
import io
import runpy
from pathlib import Path

import pytest

from weft.compat.oneccl import event
from weft.testing import processes, run

PROGRAM = "examples/oneccl/sparse_allreduce.py"


@pytest.fixture
def example(script, monkeypatch):
    module = script(PROGRAM)
    monkeypatch.setattr(module, "VALUE_TYPES", ("bfloat16", "int64"))
    return module


def test_it_passes_alone(example, capsys):
    example.main()
    assert capsys.readouterr().out.endswith("on 1 ranks\nPASSED\n")


def test_it_passes_on_several_ranks(example):
    assert run(3, lambda group: example.test_all(event.create_communicator())) == [8] * 3


def test_it_sees_what_is_wrong(example):
    def program(group):
        data = example.prep_data(event.create_communicator(), "int64", "int64", "sum")
        data.send_vbuf[5, 3] += group.rank
        with pytest.raises(SystemExit, match=r"FAILED: request: row \d+ is"):
            example.run_request(data, "int64", "int64", "sum")

    run(2, program)


def as_it_stands(program):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(program, run_name="__main__")
    return printed.getvalue().splitlines()


def test_it_passes_on_ranks_of_a_launcher():
    """With every type."""
    program = Path(__file__).parents[2] / PROGRAM
    zero, one = processes(2, as_it_stands, str(program))
    assert zero == ["24 combinations of types and reductions on 2 ranks", "PASSED"]
    assert one == []
