"""`benchmarks/compression.py`: whose files are whose, and the commands of its page."""

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

PAGE = Path(__file__).parents[2] / "benchmarks" / "notes" / "compression.md"


@pytest.fixture
def compression(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("benchmarks/compression.py")


def test_trainings_that_differ_have_files_of_their_own(compression: ModuleType) -> None:
    """Ranks that go on from files of others are in different steps, and wait for each other."""
    given = ["", "--ranks 8", "--steps 120", "--rise 15", "--rate 4", "--rate 5", "--seed 1"]
    files = set()
    for text in given:
        arguments = compression.options().parse_args(["train", *text.split()])
        for name in "TopK 1 %", "TopK 0.1 %":
            files.add(compression.training_of(name, arguments, arguments.seed))
    assert len(files) == 2 * len(given)


def test_the_table_is_of_the_trainings_with_its_settings(
    compression: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["table", "--ranks", "8", "--steps", "120", "--rise", "15", "--folder"]
    many = ["table", "--folder"]
    for command, loss in ((few, 6.25), (many, 5.5)):
        arguments = compression.options().parse_args([*command, str(tmp_path)])
        noted = f"[[20, 9.0], [{arguments.steps}, {loss}]]"
        for seed in range(3):
            name = compression.training_of("DistributedDataParallel", arguments, seed)
            (tmp_path / f"{name}.json").write_text(noted)
        times = '{"DistributedDataParallel": {"ms": [3.0], "KB": [40.0]}}'
        (tmp_path / compression.times_of("1gbit", arguments.ranks)).write_text(times)
    for command, loss in ((few, 6.25), (many, 5.5)):
        compression.table(compression.options().parse_args([*command, str(tmp_path)]))
        row = capsys.readouterr().out.splitlines()[-1]
        assert row.startswith(
            f"| DistributedDataParallel | {loss:.3f} ({loss:.3f} to {loss:.3f}) |"
        )
        assert "| 40 | 3 to 3 |" in row


def test_the_commands_of_the_page_are_of_this_script(compression: ModuleType) -> None:
    """With contenders that there are; and both trainings of the page, each with its table."""
    commands = []
    for line in PAGE.read_text().replace("\\\n", " ").splitlines():
        _, found, rest = line.partition("python benchmarks/compression.py ")
        if found:
            commands.append(compression.options().parse_args(shlex.split(rest, comments=True)))

    def trained(arguments: argparse.Namespace) -> str:
        return str(compression.training_of("", arguments, 0))

    trainings = {trained(each) for each in commands if each.task == "train"}
    tables = {trained(each) for each in commands if each.task == "table"}
    assert len(trainings) == 2 and trainings == tables
