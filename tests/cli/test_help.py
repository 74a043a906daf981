"""What `--help` prints: whole at 80 columns, for every command and option."""

import re

import pytest
import typer
from typer.testing import CliRunner

from weft.cli.commands import app

COMMANDS = typer.main.get_command(app).commands


def printed(command: str) -> str:
    environment = {"COLUMNS": "80", "TERMINAL_WIDTH": "80"}
    result = CliRunner().invoke(app, [*command.split(), "--help"], env=environment)
    assert result.exit_code == 0
    return result.stdout


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_is_whole_at_80_columns(command: str) -> None:
    text = printed(command)
    assert max(map(len, text.splitlines())) == 80
    assert "…" not in text
    assert not re.search(r"\[x<=\d{5}", text)  # limits that nobody reads
    words = " ".join(re.sub("[│╭╰╮╯─]", " ", text).split())
    if command:
        for option in COMMANDS[command].params:
            assert max(option.opts, key=len) in words
            assert option.help, option.name
    else:
        assert all(name in words for name in COMMANDS)


def test_many_options_are_grouped() -> None:
    found = re.findall(r"^╭─ (.+?) ─+╮$", printed("bench"), re.MULTILINE)
    assert len(found) == 5 and "The case" in found and "Output" in found
