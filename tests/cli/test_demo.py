"""`weft demo`: its text, one rank's training, and a whole run with Ctrl-C."""

import os
import re
import signal
import sysconfig
import tempfile
import time
import unittest
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.nn.functional as F

import weft
from weft import cli
from weft.base.pace import patient
from weft.cli.demo import text, train
from weft.cli.demo.figures import FIGURES, WAYS, Run, agreement
from weft.testing import launch

PART = Path(unittest.__file__).parent
"""A part of the standard library: to read all of it takes seconds."""


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(PART)})


def test_all_three_ways_on_a_small_text(tmp_path, small, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["demo", "--ranks", "2", "--steps", "100", "--out", str(tmp_path / "new" / "out")])
    out = capsys.readouterr().out
    assert ended.value.code == 0, out
    for way in WAYS.values():
        assert re.search(rf"^{way}: steps 100, loss \d.*left, load \d", out, re.MULTILINE), out
    assert out.count("agree over 100 steps") == 2 and "DO NOT" not in out
    assert re.search(r"step of training with weft is \S+x as fast as PyTorch sparse and", out)
    assert "before the demo began" in out and "near append: " in out
    assert [path.name for path in (tmp_path / "new" / "out").iterdir()] == ["report.html"]
    page = (tmp_path / "new" / "out" / "report.html").read_text()
    assert page.count("<svg") == 2 and "near append: " in page


CODE = f"""
import sysconfig
sysconfig.get_paths = lambda: {{"stdlib": {str(PART)!r}}}
from weft import cli
cli.main()
"""


@pytest.fixture
def short_folder():
    """A folder for temporary files: of a longer path multiprocessing makes no sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_ctrl_c_keeps_what_was_made_and_leaves_no_process(tmp_path, short_folder, programs):
    given = ["demo", "--ranks", "2", "--steps", "50000", "--out", str(tmp_path)]
    process = programs(CODE, *given, env={**os.environ, "TMPDIR": str(short_folder)})
    until = time.monotonic() + patient(100.0)
    while "dense: steps 100" not in process.text():
        assert time.monotonic() < until and psutil.pid_exists(process.pid), process.text()
        time.sleep(0.02)
    ranks = psutil.Process(process.pid).children(recursive=True)
    assert len(ranks) >= 3  # two, and the process that makes them
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in err and len(err.splitlines()) <= 2, err  # who was interrupted
    assert "interrupted" in (tmp_path / "report.html").read_text()
    assert not list(short_folder.glob("weft-demo-*"))
    assert not psutil.wait_procs(ranks, timeout=10)[1]


def test_ctrl_c_ends_the_bench_in_few_lines_and_leaves_no_process(
    programs,
):
    code = "from weft import cli; cli.main()"
    given = "bench --ranks 2 --case small --rows 20 --height 900 --iters 1000000"
    process = programs(code, *given.split())
    until = time.monotonic() + patient(100.0)
    while len(ranks := psutil.Process(process.pid).children(recursive=True)) < 3:
        assert time.monotonic() < until, process.text()
        time.sleep(0.02)
    time.sleep(1.0)  # any moment is as good as another
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in err and len(err.splitlines()) <= 2, err
    assert all(line.startswith("#") for line in out.splitlines())
    assert not psutil.wait_procs(ranks, timeout=10)[1]


# The text.


def test_words_are_by_frequency_without_rare_ones(tmp_path, monkeypatch):
    for name, content in (
        ("a.py", "b b b a a c c d " * 5 + "unique rarer rarer 12 x2 self._read_2(X2)"),
        ("deep/b.py", "B " * 5),
        ("site-packages/x.py", "installed " * 9),
        ("__pycache__/x.py", "cached " * 9),
        ("notes.txt", "words " * 9),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    found = text.read(least=3)
    assert found.words == ["b", "a", "c", "d"]
    assert found.counts.tolist() == [20, 10, 10, 5]
    assert found.tokens.tolist() == [0, 0, 0, 1, 1, 2, 2, 3] * 5 + [0] * 5
    assert {"x2", "self", "_read_2"} <= {*text.read(least=1).words}


def test_the_most_frequent_words_are_thinned_out(small):
    found = text.read()
    kept = np.bincount(found.thinned(), minlength=len(found.words)) / found.counts
    assert kept[:20].mean() < 0.2 < 0.8 < kept[len(kept) // 2 :].mean()
    noise = found.noise()
    assert noise[-1] == 1.0 and (np.diff(noise) > 0).all()
    assert noise[0] == pytest.approx(found.counts[0] ** 0.75 / (found.counts**0.75).sum())


# One rank's program.


def batch(step=0, rank=0):
    tokens = np.arange(1000, dtype=np.int32)  # a token is its own place
    return train.batch(tokens, np.array([0.25, 1.0]), rank, step)


def test_a_batch_depends_on_rank_and_step_alone():
    first = batch(3)
    assert all(map(torch.equal, first, batch(3)))
    for other in (batch(4), batch(3, rank=1)):
        assert not torch.equal(first[0], other[0])


def test_contexts_are_within_the_window():
    pairs = [batch(step) for step in range(10)]
    words, others = (torch.cat(each) for each in zip(*pairs, strict=True))
    assert words.dtype == others.dtype == torch.int64
    assert others.shape == (10 * train.BATCH, 1 + train.NEGATIVES)
    distance = others[:, 0] - words
    assert set(distance.tolist()) == set(range(-text.WINDOW, text.WINDOW + 1)) - {0}
    assert abs(int((distance > 0).sum()) - 10_240) < 500  # 7 sd of a fair coin
    assert others[:, 1:].float().mean() == pytest.approx(0.75, abs=0.01)
    least = np.arange(2 * text.WINDOW + 1, dtype=np.int32)
    words, others = train.batch(least, np.array([1.0]), 0, 0)
    assert set(words.tolist()) == {text.WINDOW}
    assert int(others.min()) >= 0 and int(others.max()) <= 2 * text.WINDOW


def test_the_loss_is_that_of_the_paper_and_its_gradients_are_sparse():
    model = train.SkipGram(50)
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


def test_the_ways_train_alike_in_turns(tmp_path, monkeypatch):
    """One rank, in this process: every step is sent, in order, and all ways learn the same."""
    tokens = np.random.default_rng(0).integers(0, 40, 500).astype(np.int32)
    np.savez(tmp_path / "text.npz", tokens=tokens, noise=np.arange(1, 41) / 40)
    runs = {way: Run(way) for way in WAYS}
    order = []

    def send(message):
        way, figures = message
        order.append(way)
        runs[way].add(figures)

    monkeypatch.setattr(train, "send", send)
    near = train.train(str(tmp_path / "text.npz"), 40, 20, [3, 5])
    assert order == [*WAYS] * 2
    assert {one.figures.shape for one in runs.values()} == {(20, len(FIGURES))}
    ours, *others = runs.values()
    for other in others:
        assert agreement(ours, other)[0], agreement(ours, other)
    losses = ours.values("loss")
    assert losses[0] == pytest.approx(6 * np.log(2), rel=1e-4)  # knows nothing yet
    assert losses[-1] < losses[0]
    assert (ours.values("sums") < ours.values("seconds")).all()
    assert ours.values("clock")[-1] == pytest.approx(ours.values("seconds").sum())
    assert [words[0] for words in near] == [3, 5] and len(near[0]) == 6  # itself is the nearest


def one_sum(way):
    """The mean of what two ranks have: row 1 of both, twice, and rows of their own."""
    with weft.init() as group:
        rows = torch.tensor([[1, 1, 2 + group.rank]])
        values = torch.ones(3, 2) * (1 + group.rank)
        gradients = [torch.sparse_coo_tensor(rows, values, (5, 2), check_invariants=True)]
        dense = [torch.zeros(5, 2) for _ in gradients if way == "dense"]
        means = train.mean_over_ranks(way, gradients, dense)
        return [each.to_dense().tolist() for each in means]


@pytest.mark.parametrize("way", WAYS)
def test_every_way_takes_the_mean_over_the_ranks(way):
    right = [[0.0, 0.0], [3.0, 3.0], [0.5, 0.5], [1.0, 1.0], [0.0, 0.0]]
    assert launch(2, one_sum, (way,)) == [[right]] * 2
