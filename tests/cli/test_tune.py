"""`weft tune`: it measures on processes, writes what auto reads, and says what is wrong."""

import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from weft.cli import app
from weft.sparse.link import default_path, read
from weft.testing import launch


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_KERNELS", "reference")  # compiling is not what is tested here
    for name in ("RANK", "WORLD_SIZE", "WEFT_PROFILE", "WEFT_LINK"):
        monkeypatch.delenv(name, raising=False)


def invoke(line: str) -> Result:
    return CliRunner().invoke(app, line.split())


def test_it_launches_measures_and_writes(tmp_path: Path) -> None:
    file = tmp_path / "new" / "profile.json"
    result = invoke(f"tune --ranks 2 --out {file} --any-host")
    assert result.exit_code == 0, result.output
    assert f"wrote {file}" in result.stdout and "within a host" in result.stdout
    profile = read(file)
    assert profile.hosts == () and profile.ranks == 2 and profile.between is None
    planned = invoke(f"plan --profile {file} --ranks 4")
    assert planned.exit_code == 0 and "link within a host" in planned.stdout


def as_a_rank() -> tuple[int, str, str]:
    """The command in a process that a launcher has told its rank."""
    result = invoke("tune")
    return result.exit_code, result.stdout, result.stderr


def test_under_a_launcher_each_process_is_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero, one = launch(2, as_a_rank, timeout=150, env={"WEFT_CACHE_DIR": str(tmp_path)})
    assert zero[0] == 0 and "Gbit/s" in zero[1] and one == (0, "", "")
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    path = default_path([socket.gethostname()])
    assert path is not None and read(path).hosts == (socket.gethostname(),)
