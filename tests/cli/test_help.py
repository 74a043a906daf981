"""What `--help` prints, for every command and option."""

import pytest

from weft import cli

COMMANDS = ("demo", "bench", "doctor")


def printed(line, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        cli.main(line.split())
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_is_whole_at_80_columns(command, capsys, monkeypatch):
    text = printed(f"{command} --help", capsys, monkeypatch)
    assert max(map(len, text.splitlines())) <= 80
    assert all(name in text for name in ((command,) if command else COMMANDS))


def test_the_version_is_that_of_the_distribution(capsys, monkeypatch):
    assert printed("--version", capsys, monkeypatch).startswith("weft-collectives 0.")
