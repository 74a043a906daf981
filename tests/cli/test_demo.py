"""`weft demo` from the command line: refusals, a whole run on a small text, and Ctrl-C."""

import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner, Result

from weft.base.pace import patient
from weft.cli import options
from weft.cli.commands import app
from weft.cli.demo import train
from weft.cli.demo.figures import FIGURES, Run, agreement
from weft.cli.demo.text import WINDOW

SMALL = "--ranks 2 --steps 12 --dim 8 --batch 128"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some thousand words, Zipf-like."""
    draw = random.Random(0)
    words = [f"word{int(draw.paretovariate(0.7)) % 3000}" for _ in range(20_000)]
    path = tmp_path_factory.mktemp("text") / "small.txt"
    path.write_text(" ".join(words))
    return path


def read_vectors(path: Path) -> tuple[list[str], np.ndarray]:
    (count, dim), *rows = (line.split() for line in path.read_text().splitlines())
    table = np.array([row[1:] for row in rows], np.float32)
    assert table.shape == (int(count), int(dim))
    return [row[0] for row in rows], table


def demo(given: str) -> Result:
    return CliRunner().invoke(app, ["demo", *given.split()])


def test_a_folder_that_cannot_be_made_is_refused_before_training(text: Path) -> None:
    found = demo(f"{SMALL} --text {text} --out /dev/null/out")
    assert found.exit_code == 2 and found.stdout == ""
    assert found.stderr.startswith("weft demo: [Errno ") and "/dev/null/out" in found.stderr


def test_without_the_extra_it_says_what_to_install_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "find_spec", lambda name: None)
    found = demo(f"--out {tmp_path}")
    assert found.exit_code == 2 and found.stdout == ""
    words = "it needs matplotlib and jinja2: pip install matplotlib jinja2"
    assert found.stderr == f"weft demo: the report cannot be drawn: {words}\n"


def test_the_command_line_starts_without_what_only_a_report_needs(
    programs: Callable[..., Any],
) -> None:
    code = "import sys, weft.cli.commands; print({'matplotlib', 'jinja2'} & {*sys.modules})"
    assert programs(code).communicate() == ("set()\n", "")


def test_all_three_ways_on_a_small_text(tmp_path: Path, text: Path) -> None:
    out = tmp_path / "new" / "out"
    found = demo(f"{SMALL} --text {text} --out {out} --save {tmp_path / 'vectors.txt'}")
    assert found.exit_code == 0, found.output
    for way in ("weft", "PyTorch sparse", "PyTorch dense"):
        assert re.search(rf"^{way} +step +12  loss \d", found.stdout, re.MULTILINE), found.stdout
    assert found.stdout.count("agree over 12 steps") == 2 and "DO NOT" not in found.stdout
    for what in ("summing the gradients alone", "a whole step, which also computes"):
        assert re.search(rf"{what}: weft is \S+x as fast as PyTorch sparse and", found.stdout)
    words, table = read_vectors(tmp_path / "vectors.txt")
    assert table.shape == (len(words), 8) and table.any(axis=1).all()
    report = (out / "report.html").read_text()
    assert "12 steps" in report and "computed" in report and "The sums alone" in report
    assert {path.name for path in out.iterdir()} == {"report.html"}  # little, and nothing unasked


def test_one_rank_alone_and_the_same_seed_again(tmp_path: Path, text: Path) -> None:
    tables = []
    for out in (tmp_path / "one", tmp_path / "two"):
        given = "--ranks 1 --steps 5 --dim 4 --batch 64 --compare none"
        found = demo(f"{given} --text {text} --out {out} --save {out}.txt")
        assert found.exit_code == 0, found.output
        tables.append(out.with_suffix(".txt").read_bytes())
    assert tables[0] == tables[1]


def test_ctrl_c_keeps_what_was_made_and_leaves_no_process(
    tmp_path: Path, text: Path, programs: Callable[..., Any]
) -> None:
    given = f"{SMALL} --steps 1500 --text {text} --out {tmp_path} --save {tmp_path}/vectors.txt"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    code = "import runpy; runpy.run_module('weft', run_name='__main__')"
    process = programs(code, "demo", *given.split(), "--compare", "torch", env=environment)
    until = time.monotonic() + patient(100.0)
    while "step   " not in process.text():  # a tenth of it is done
        assert time.monotonic() < until and psutil.pid_exists(process.pid), process.text()
        time.sleep(0.02)
    ranks = psutil.Process(process.pid).children(recursive=True)
    assert len(ranks) >= 3  # two, and the process that makes them
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "steps: interrupted" in out
    words, table = read_vectors(tmp_path / "vectors.txt")
    assert len(words) == len(table) and table.any(axis=1).all()
    assert "interrupted" in (tmp_path / "report.html").read_text()
    assert not list(tmp_path.glob("weft-demo-*"))
    assert not psutil.wait_procs(ranks, timeout=10)[1]


# One rank's program.


def batch(step: int = 0, rank: int = 0, seed: int = 0, size: int = 5000):
    tokens = np.arange(1000, dtype=np.int32)  # a token is its own place
    return train.batch(tokens, np.array([0.25, 1.0]), size, seed, rank, step)


def test_a_batch_depends_on_seed_rank_and_step_alone() -> None:
    first = batch(3)
    assert all(map(torch.equal, first, batch(3)))
    for other in (batch(4), batch(3, rank=1), batch(3, seed=1)):
        assert not torch.equal(first[0], other[0])


def test_contexts_are_within_the_window_near_ones_more_often() -> None:
    words, others = batch(size=50_000)
    assert words.dtype == others.dtype == torch.int64
    assert others.shape == (50_000, 1 + train.NEGATIVES)
    distance = others[:, 0] - words
    assert set(distance.tolist()) == set(range(-WINDOW, WINDOW + 1)) - {0}
    counts = torch.bincount(distance.abs(), minlength=WINDOW + 1)[1:]
    assert (counts[:-1] > counts[1:]).all()
    assert abs(int((distance > 0).sum()) - 25_000) < 800  # 7 sd of a fair coin
    assert others[:, 1:].float().mean() == pytest.approx(0.75, abs=0.01)
    least = np.arange(2 * WINDOW + 1, dtype=np.int32)
    words, others = train.batch(least, np.array([1.0]), 64, 0, 0, 0)
    assert set(words.tolist()) == {WINDOW}
    assert int(others.min()) >= 0 and int(others.max()) <= 2 * WINDOW


def test_the_loss_is_that_of_the_paper_and_its_gradients_are_sparse() -> None:
    model = train.SkipGram(50, 4, seed=0, kept=None)
    with torch.no_grad():
        model.context.weight.normal_()
    words = torch.tensor([3, 7, 3])
    others = torch.tensor([[1, 2, 2, 9, 4, 1], [0, 5, 6, 7, 8, 9], [3, 3, 3, 3, 3, 3]])
    loss = model(words, others)
    loss.backward()
    wanted = torch.zeros(())
    for word, (true, *noise) in zip(words.tolist(), others.tolist(), strict=True):
        vector = model.word.weight[word]
        wanted = wanted - F.logsigmoid(model.context.weight[true] @ vector)
        for one in noise:
            wanted = wanted - F.logsigmoid(-(model.context.weight[one] @ vector))
    assert loss.item() == pytest.approx((wanted / 3).item(), rel=1e-6)
    found = model.word.weight.grad
    assert found is not None and found.is_sparse
    (dense,) = torch.autograd.grad(wanted / 3, [model.word.weight])
    torch.testing.assert_close(found.to_dense(), dense)


def test_every_rank_starts_from_the_same_tables_and_one_keeps_its_own(tmp_path: Path) -> None:
    plain = train.SkipGram(20, 3, seed=4, kept=None)
    kept = train.SkipGram(20, 3, seed=4, kept=tmp_path / "table")
    assert torch.equal(plain.word.weight, kept.word.weight)
    assert not torch.equal(plain.word.weight, train.SkipGram(20, 3, seed=5, kept=None).word.weight)
    with torch.no_grad():
        kept.word.weight[7] = 42.0
    found = np.fromfile(tmp_path / "table", np.float32).reshape(20, 3)
    np.testing.assert_array_equal(found, kept.word.weight.detach().numpy())


def test_the_ways_train_alike_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, in this process: every step is sent, in order, and all ways learn the same."""
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(0, 40, 500).astype(np.int32))
    np.save(tmp_path / "noise.npy", np.arange(1, 41) / 40)
    job = train.Job(("weft", "torch", "dense"), 23, 16, 4, 1, None, 40, tmp_path)
    sent = {way: np.empty((0, len(FIGURES))) for way in job.ways}
    algorithms: list[str] = []

    def send(message: tuple[str, list[str], np.ndarray]) -> None:
        way, chosen, figures = message
        sent[way] = np.concatenate([sent[way], figures])
        algorithms.extend(chosen if way == "weft" else ())

    monkeypatch.setattr(train, "send", send)
    train.train(job)
    assert {way: figures.shape for way, figures in sent.items()} == dict.fromkeys(
        job.ways, (23, len(FIGURES))
    )
    runs = {way: Run(way, 23, 1, 16, figures=figures) for way, figures in sent.items()}
    for other in ("torch", "dense"):
        assert agreement(runs["weft"], runs[other])[0]
    weft = runs["weft"]
    losses = weft.values("loss")
    assert losses[0] == pytest.approx(6 * np.log(2), rel=1e-4)  # knows nothing yet
    assert losses[-1] < losses[0] and all(algorithms)
    assert (weft.values("rows") == weft.values("union")).all() and weft.values("rows").all()
    assert weft.values("clock")[-1] == pytest.approx(weft.values("seconds").sum())
    assert np.fromfile(tmp_path / "table", np.float32).reshape(40, 4).any()
