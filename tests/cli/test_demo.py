"""`weft demo` from the command line: refusals, a whole run on a small text, and Ctrl-C."""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from weft.cli import app
from weft.cli.demo import settings
from weft.cli.demo.vectors import read_vectors

SMALL = ("--ranks", "2", "--steps", "12", "--dim", "8", "--batch", "128")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some thousand words, Zipf-like."""
    draw = random.Random(0)
    words = [f"word{int(draw.paretovariate(0.7)) % 3000}" for _ in range(20_000)]
    path = tmp_path_factory.mktemp("text") / "small.txt"
    path.write_text(" ".join(words))
    return path


def demo(*options: object) -> Result:
    return CliRunner().invoke(app, ["demo", *map(str, options)])


def started(*options: object, **more) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "weft", "demo", *map(str, options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **more,
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ranks", 0], "--ranks is 0, it must be at least 1"),
        (["--steps", -1], "--steps is -1, it must be at least 1"),
        (["--dim", 0], "--dim is 0, it must be at least 1"),
        (["--batch", 0], "--batch is 0, it must be at least 1"),
        (["--min-count", 0], "--min-count is 0, it must be at least 1"),
        (["--seed", -3], "--seed is -3, it must not be negative"),
        (["--compare", "nccl"], "--compare is 'nccl', it takes one of: all, torch, dense, none"),
        (["--text", "/no/such/text"], "no such file or folder: /no/such/text"),
        (["--text", __file__, "/no/such/text"], "no such file or folder: /no/such/text"),
        (["--text", "/dev/null"], "no words in /dev/null (1 files read, 0 skipped)"),
    ],
)
def test_refusals_are_one_line_and_status_2(tmp_path: Path, options, said: str) -> None:
    found = demo(*options, "--out", tmp_path / "out")
    assert found.exit_code == 2
    assert found.stderr == f"weft demo: {said}\n"


@pytest.mark.parametrize("out", ["/dev/null/out", "/proc/out"])
def test_a_folder_that_cannot_be_written_is_refused_before_training(text: Path, out: str) -> None:
    found = demo(*SMALL, "--text", text, "--out", out)
    assert found.exit_code == 2 and found.stdout == ""
    assert re.fullmatch(rf"weft demo: cannot write into {out}: .*--out\n", found.stderr)


def test_too_little_memory_is_refused_before_training(tmp_path: Path, text: Path) -> None:
    found = demo("--ranks", 4, "--dim", 10**7, "--text", text, "--out", tmp_path)
    assert found.exit_code == 2
    assert re.fullmatch(
        r"weft demo: too little memory: 4 ranks with .* need about .* GiB .* smaller\n",
        found.stderr,
    )


def test_memory_of_a_container_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 8000 kB\n",
        "/sys/fs/cgroup/memory.max": "5000000\n",
        "/sys/fs/cgroup/memory.current": "1000000\n",
    }
    monkeypatch.setattr(Path, "read_text", lambda path: files[str(path)])
    assert settings.available_memory() == 4_000_000
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert settings.available_memory() == 8000 << 10


def test_without_the_extra_it_says_what_to_install_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings.importlib.util, "find_spec", lambda name: None)
    found = demo("--out", tmp_path / "out")
    assert found.exit_code == 2 and found.stdout == ""
    assert found.stderr == (
        "weft demo: the report needs matplotlib and jinja2, not installed here: "
        "pip install 'weft[report]'\n"
    )


def test_the_command_line_starts_without_what_only_a_run_needs() -> None:
    code = (
        "import sys, weft.cli\n"
        "print([n for n in ('matplotlib', 'jinja2', 'numba', 'weft.cli.demo.run') "
        "if n in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_all_three_ways_on_a_small_text(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        # a port in use does not matter: the ranks meet at one of their own
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        found = demo(*SMALL, "--text", text, "--out", tmp_path / "new" / "out")
    assert found.exit_code == 0, found.output
    for way in ("weft", "PyTorch sparse", "PyTorch dense"):
        assert re.search(rf"^{way} +step +12  loss \d", found.stdout, re.MULTILINE), found.stdout
    assert found.stdout.count("agree over 12 steps") == 2, (
        found.stdout and "DO NOT" not in found.stdout
    )
    words, table = read_vectors(tmp_path / "new" / "out" / "vectors.txt")
    assert table.shape == (len(words), 8) and table.any(axis=1).all()
    report = (tmp_path / "new" / "out" / "report.html").read_text()
    assert "12 steps" in report and "computed" in report
    assert sorted(p.name for p in (tmp_path / "new" / "out").iterdir()) == [
        "report.html",
        "vectors.txt",
    ]


def test_one_rank_alone_and_the_same_seed_again(tmp_path: Path, text: Path) -> None:
    tables = []
    for name in ("one", "two"):
        found = demo(
            "--ranks", 1, "--steps", 5, "--dim", 4, "--batch", 64, "--compare", "none",
            "--text", text, "--out", tmp_path / name,
        )  # fmt: skip
        assert found.exit_code == 0, found.output
        tables.append((tmp_path / name / "vectors.txt").read_bytes())
    assert tables[0] == tables[1]


def test_ctrl_c_keeps_what_was_made_and_leaves_no_process(tmp_path: Path, text: Path) -> None:
    with started(
        "--ranks", 2, "--steps", 1000, "--dim", 8, "--batch", 128, "--text", text,
        "--out", tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            while "step   " not in process.stdout.readline():  # a tenth of it is done
                assert process.poll() is None, process.communicate()
            ranks = _below(process.pid)
            assert len(ranks) >= 3  # two, and the process that makes them
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "steps: interrupted" in out
    words, table = read_vectors(tmp_path / "vectors.txt")
    assert len(words) == len(table) and table.any(axis=1).all()
    assert "interrupted" in (tmp_path / "report.html").read_text()
    assert not list(tmp_path.glob("weft-demo-*")) and not list(tmp_path.glob("*.part"))
    _wait_gone(ranks)


def _below(pid: int) -> set[int]:
    """All processes below one; empty where there is no /proc."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue  # it ended meanwhile
        parents[int(entry.parent.name)] = int(fields[1])
    found: set[int] = set()
    new = {pid}
    while new:
        new = {child for child, parent in parents.items() if parent in new} - found
        found |= new
    return found


def _wait_gone(pids: set[int]) -> None:
    deadline = time.monotonic() + 10
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)
