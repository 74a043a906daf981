"""examples/graph: what it reads, how it cuts, and the same losses on any number of ranks."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest

from weft.testing import run


@pytest.fixture
def load(script):
    return lambda name: script(f"examples/graph/{name}.py")


def small(graphs, nodes=90):
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
    return graphs.Graph.of("a graph", names, [f"class {group}" for group in groups], links)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_losses_are_those_of_one_process(load, monkeypatch, ranks):
    train, graph = load("train"), small(load("graphs"))
    monkeypatch.setattr(train, "STEPS", 6)
    data = train.Data.of(graph, ranks)
    found, *others = run(ranks, lambda group: train.compare(data, group), on="threads")
    assert found["last"] < found["first"] and found["apart"] < 1e-5
    assert found["right"] == found["right alone"] > 0
    sent = np.array(found["sent"])
    assert (sent.diagonal() == 0).all() and ((sent > 0).sum() == ranks * (ranks - 1))
    assert others == [{}] * (ranks - 1)
    held = {name for name, trained in zip(graph.names, data.trained, strict=True) if not trained}
    assert held


def test_it_sees_what_is_wrong(load, monkeypatch):
    train, graph = load("train"), small(load("graphs"))
    monkeypatch.setattr(train, "STEPS", 6)
    fetch = train.weft.RemoteRows.fetch
    monkeypatch.setattr(train.weft.RemoteRows, "fetch", lambda plan, own: 2 * fetch(plan, own))

    def program(group):
        if group.rank:
            train.compare(train.Data.of(graph, 2), group)
        else:
            with pytest.raises(SystemExit, match="FAILED: losses differ by"):
                train.compare(train.Data.of(graph, 2), group)

    run(2, program)


def test_it_passes_alone_and_draws(load, monkeypatch, tmp_path, capsys):
    train, graphs = load("train"), load("graphs")
    monkeypatch.setattr(train, "STEPS", 3)
    monkeypatch.setattr(train, "imports", lambda: small(graphs))
    monkeypatch.setattr(sys, "argv", ["train.py", "--picture", str(tmp_path / "cut.png")])
    train.main()
    assert capsys.readouterr().out.endswith("one process\nPASSED\n")
    train.picture(train.Data.of(small(graphs), 3), str(tmp_path / "three.png"))
    for name in ("cut.png", "three.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_the_cut_is_balanced_and_goes_where_edges_are_few(load):
    graphs, train = load("graphs"), load("train")
    links = [(i + s, j + s) for s in (0, 30) for i in range(30) for j in range(i)]
    names = [f"n{i}" for i in range(60)]
    graph = graphs.Graph.of("cliques", names, ["x"] * 60, [*links, (0, 30), (3, 3), (1, 0)])
    found = train.Data.of(graph, 2)
    assert found.crossing().sum() == 1 and found.bounds == [0, 30, 60]
    for parts in (1, 3, 7):
        sizes = np.bincount(graphs.cut(*graph.neighbours(), parts), minlength=parts)
        assert sizes.sum() == 60 and sizes.max() <= -(-60 // parts) + 1 and sizes.min() > 0
    features = graph.features()
    assert np.allclose(features[:, 0] * 8, np.log1p([30] + [29] * 29 + [30] + [29] * 29))
    assert np.allclose(np.linalg.norm(features[:, 1:], axis=1), 1)
