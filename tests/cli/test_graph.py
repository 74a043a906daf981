"""`weft demo --graph`: the same training on any number of ranks, and the command around it."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

from weft.cli import app
from weft.cli.demo import record
from weft.cli.graph import run as command
from weft.cli.graph import train
from weft.cli.graph.run import Cut, _lay_out
from weft.cli.graph.settings import GraphSettings
from weft.cli.graph.sources import Graph
from weft.testing import run

STEPS = 6


def small(nodes=90):
    """Three groups, with some edges between them and a node that has none."""
    draw = random.Random(0)
    groups = [node % 3 for node in range(nodes)]
    links = [
        (one, two)
        for one in range(nodes - 1)
        for two in range(one)
        if draw.random() < (0.2 if groups[one] == groups[two] else 0.01)
    ]
    names = [f"{'abc'[group]}{draw.randrange(9)}" for group in groups]
    return Graph.of("a <small> graph", names, [f"class {group}" for group in groups], links)


def settings(out, ranks):
    return GraphSettings.checked(
        ranks=ranks, out=out, graph=[], steps=STEPS, dim=8, compare="all", seed=0, of_text=()
    )


def training(wire, job):
    trained = train.Training(job, wire)
    steps = [trained.step() for _ in range(job.steps)]
    bytes_to = dict(wire.traffic.to)
    return (
        steps,
        trained.judge(),
        trained.part.halo,
        [len(part) for part in trained.part.to],
        bytes_to,
    )


def reference(job):
    """The same with a dense matrix of neighbours, and none of the code above."""
    starts, near = job.load("starts"), np.array(job.load("neighbours"))
    size = len(starts) - 1
    mean = torch.zeros(size, size)
    for node in range(size):
        mine = near[starts[node] : starts[node + 1]]
        mean[node, mine] = 1 / max(1, len(mine))
    features, labels, trained = (
        torch.from_numpy(np.array(job.load(name))) for name in ("features", "labels", "trained")
    )
    model = train.Sage(features.shape[1], job.dim, job.classes, job.seed)
    update = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(job.steps):
        hidden = model.hidden(features, mean @ features)
        loss = F.cross_entropy(model.scores(hidden, mean @ hidden)[trained], labels[trained])
        update.zero_grad()
        loss.backward()
        update.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_losses_are_those_of_one_matrix_at_any_number_of_ranks(tmp_path, ranks):
    found = Cut.of(small(), ranks)
    job = _lay_out(found, settings(tmp_path, ranks), tmp_path)
    told = run(ranks, training, job)
    losses = np.mean([[step.loss for step in steps] for steps, *_ in told], axis=0)
    assert losses == pytest.approx(reference(job), rel=1e-5)
    assert losses[-1] < losses[0]
    gradients = {tuple(step.gradient for step in steps) for steps, *_ in told}
    assert len(gradients) == 1
    assert sum(judged[0] for _, judged, *_ in told) == (~job.load("trained")).sum() > 0
    assert sum(halo for _, _, halo, *_ in told) == sum(sum(to) for *_, to, _ in told)
    assert all(to[rank] == 0 for rank, (*_, to, _) in enumerate(told))
    assert (told[0][2] > 0) == (ranks > 1)


def test_what_is_held_out_does_not_depend_on_the_cut(tmp_path):
    held = []
    for ranks in (1, 3):
        found = Cut.of(small(), ranks)
        job = _lay_out(found, settings(tmp_path, ranks), tmp_path)
        held.append(set(found.order[~job.load("trained")].tolist()))
    assert held[0] == held[1]


def demo(*options):
    return CliRunner().invoke(app, ["demo", "--graph", *map(str, options)])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["web"], "--graph is 'web', it takes one of: imports, debian"),
        (["imports", "debian"], "--graph is 'imports debian', it takes one of: imports, debian"),
        (["--ranks", 0], "--ranks is 0, it must be at least 1"),
        (["--steps", 0], "--steps is 0, it must be at least 1"),
        (["--seed", -1], "--seed is -1, it must not be negative"),
        (["--compare", "dense"], "--compare is 'dense', with --graph it takes one of: all, none"),
        (["--batch", 7], "--batch is for training on text, and --graph was given"),
        (["--min-count", 2], "--min-count is for training on text, and --graph was given"),
        (["--text", "x"], "--text is for training on text, and --graph was given"),
        (["--ranks", 46], "--ranks is 46, and the graph has only 90 nodes"),
    ],
)
def test_refusals_are_one_line_and_status_2(tmp_path, monkeypatch, options, said):
    monkeypatch.setattr(command, "read", lambda name: small())
    found = demo(*options, "--out", tmp_path / "out")
    assert (found.exit_code, found.stderr) == (2, f"weft demo: {said}\n")


def test_the_whole_of_it_on_a_small_graph(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "read", lambda name: small())
    found = demo("--ranks", 2, "--steps", STEPS, "--dim", 8, "--out", tmp_path)
    assert found.exit_code == 0, found.output
    for line in (r"weft +step +6  loss \d.* nodes/s", "one process +step +6", "rank 1 +[1-9]"):
        assert re.search(rf"^{line}", found.stdout, re.MULTILINE), found.stdout
    assert "weft and one process agree over 6 steps" in found.stdout
    accuracy = re.findall(r"class found for (\S+) of held-out", found.stdout)
    assert len(accuracy) == 2 and accuracy[0] == accuracy[1]
    page = (tmp_path / "report.html").read_text()
    for text in ("a &lt;small&gt; graph", "The cut", "Bytes between each pair", "sync_grads"):
        assert text in page
    assert "<small> graph" not in page and "vectors" not in page
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def on_threads(then=None):
    """What stands for processes: ranks that are threads; then `then` is raised."""

    def launch(size, target, args, *, on_message, timeout=None):
        def program(wire):
            steps, (held_out, right), *_, bytes_to = training(wire, *args)
            return steps, train.Ended(held_out, right, record.Outcome(2, 1)), train.Sent(bytes_to)

        for rank, (steps, ended, sent) in enumerate(run(size, program)):
            on_message(rank, sent)
            on_message(rank, steps[:3] if then else steps)
            if not then:
                on_message(rank, ended)
        if then:
            raise then

    return launch


def test_ctrl_c_keeps_what_was_made(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "read", lambda name: small())
    monkeypatch.setattr(command.local, "launch", on_threads(KeyboardInterrupt()))
    found = demo("--ranks", 3, "--steps", STEPS, "--dim", 4, "--out", tmp_path)
    assert found.exit_code == 130, found.output
    assert "weft: 3 of 6 steps: interrupted" in found.stdout
    assert "held-out" not in found.stdout  # it did not come to that
    assert "interrupted" in (tmp_path / "report.html").read_text()


def test_losses_that_differ_are_status_1(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "read", lambda name: small())
    monkeypatch.setattr(command.local, "launch", on_threads())
    monkeypatch.setattr(record, "TOLERANCE", -1.0)
    found = demo("--ranks", 2, "--steps", STEPS, "--dim", 4, "--out", tmp_path)
    assert found.exit_code == 1, found.output
    assert "weft and one process DO NOT AGREE over 6 steps" in found.stdout


def test_the_page_of_one_rank_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "read", lambda name: small())
    monkeypatch.setattr(command.local, "launch", on_threads())
    found = demo("--ranks", 1, "--steps", STEPS, "--dim", 4, "--out", tmp_path)
    assert found.exit_code == 0, found.output
    page = Path(tmp_path / "report.html").read_text()
    assert "The cut" in page and "Bytes between each pair" not in page
