"""The graphs of `weft demo --graph`: what is read from source files and from apt's list."""

from __future__ import annotations

import os

import numpy as np
import pytest

from weft.cli.demo.settings import Refused
from weft.cli.graph import sources
from weft.cli.graph.cut import cut
from weft.cli.graph.run import Cut
from weft.cli.graph.sources import FEATURES, Graph, features, imports, of_packages


def named(graph, names):
    return {tuple(names[node] for node in edge) for edge in graph.edges.tolist()}


def test_every_way_to_import_is_an_edge(tmp_path):
    files = {
        "a/__init__.py": "from . import one\nfrom .deep.two import name\n",
        "a/one.py": "import b.three as x, nowhere\nif 1:\n    from a import deep\n",
        "a/deep/__init__.py": "from ..one import (  # all\n    f,\n    g,\n)\nfrom .. import one\n",
        "a/deep/two.py": "'''import a.one'''\nx = 1  # import a.one\nfrom a.one import y; z = 2\n",
        "b/three.py": "from b import three\nimport b.three.inner\n",
        "not-a-name/x.py": "import a\n",
        "b/__pycache__/z.py": "import a\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    graph = imports({tmp_path: ""})
    assert graph.names == ["a", "deep", "two", "one", "three"]  # in order of the full names
    assert named(graph, ["a", "a.deep", "a.deep.two", "a.one", "b.three"]) == {
        ("a", "a.one"),
        ("a", "a.deep.two"),
        ("a.deep", "a.one"),
        ("a.deep.two", "a.one"),
        ("a.one", "b.three"),
    }
    assert graph.classes == ["other packages"]


def test_large_packages_are_classes(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_CLASS", 2)
    for name in ("a/one.py", "a/two.py", "b/three.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("import a.one\n")
    graph = imports({tmp_path: ""})
    assert graph.classes == ["a", "other packages"] and graph.labels.tolist() == [0, 0, 1]


STANZAS = """Package: zlib
Section: libs
Depends: libc6 (>= 2.14), missing

Package: editor
Version: 1
Section: contrib/editors
Depends: libc6:any (>= 2), zlib | other,
Pre-Depends: base
Description: an editor
 Depends: nothing

Package: libc6
Section: libs

Package: base
"""


def test_packages_depend_on_each_other():
    graph = of_packages(STANZAS)
    assert graph.names == ["base", "editor", "libc6", "zlib"]
    assert graph.classes == ["editors", "libs", "none"]
    assert [graph.classes[label] for label in graph.labels] == ["none", "editors", "libs", "libs"]
    assert named(graph, graph.names) == {
        ("libc6", "zlib"),
        ("editor", "libc6"),
        ("editor", "zlib"),
        ("base", "editor"),
    }


def test_without_apt_it_says_so(monkeypatch):
    monkeypatch.setattr(sources.shutil, "which", lambda name: None)
    with pytest.raises(Refused, match="--graph debian needs apt-cache, which only Debian"):
        sources.read("debian")


def test_an_apt_that_knows_nothing_says_so(monkeypatch, tmp_path):
    program = tmp_path / "apt-cache"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(Refused, match="it lists no packages; apt-get update"):
        sources.read("debian")


def two_cliques(size=30):
    links = [(i + s, j + s) for s in (0, size) for i in range(size) for j in range(i)]
    names = [f"n{i}" for i in range(2 * size)]
    return Graph.of("cliques", names, ["x"] * len(names), [*links, (0, size), (3, 3), (1, 0)])


def test_the_cut_is_balanced_and_goes_where_edges_are_few():
    graph = two_cliques()
    found = Cut.of(graph, 2)
    assert found.crossing().sum() == 1
    assert found.bounds == (0, 30, 60)
    assert found.part[found.order].tolist() == [0] * 30 + [1] * 30
    for parts in (1, 3, 7):
        sizes = np.bincount(cut(*graph.neighbours(), parts), minlength=parts)
        assert sizes.sum() == 60 and sizes.max() <= -(-60 // parts) + 1 and sizes.min() > 0


def test_features_are_those_of_names_and_degrees():
    graph = two_cliques()
    found = features(graph)
    assert found.shape == (60, FEATURES) and found.dtype == np.float32
    assert np.allclose(found[:, 0] * 8, np.log1p([30] + [29] * 29 + [30] + [29] * 29))
    assert np.allclose(np.linalg.norm(found[:, 1:], axis=1), 1)
    twins = Graph("twins", ["same", "same"], np.zeros(2, np.int64), ["x"], np.array([[0, 1]]))
    assert np.array_equal(*features(twins))
