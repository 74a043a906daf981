"""Real graphs that are on this machine, and a way to cut a graph into parts with few edges between.

A node has a class, which a model learns to predict, and features: how often each group of three
letters is in its name, by a hash, and its number of neighbours. The features do not contain the
class. Edges have no direction.
"""

from __future__ import annotations

import os
import re
import sysconfig
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

FEATURES = 256  # floats of a node
CLASS = 40  # modules of a package that is a class of its own
PASSES = 4
SLACK = 1.03  # the largest part, as a multiple of the mean
IMPORT = re.compile(
    r"^[ \t]*(?:import[ \t]+([\w.]+[\w., \t]*)"
    r"|from[ \t]+(\.*[\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n#;(]+))",
    re.MULTILINE,
)
SKIPPED = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "node_modules"}


@dataclass(frozen=True)
class Graph:
    """A graph with a class for each node.

    Attributes:
        source: what it is, in words.
        names: of the nodes, n of them, without what tells their class.
        labels: the class of each node; int64 `[n]`.
        classes: their names.
        edges: each edge once, the lower node first, none from a node to itself; int64 `[e, 2]`.
    """

    source: str
    names: list[str]
    labels: npt.NDArray[np.int64]
    classes: list[str]
    edges: npt.NDArray[np.int64]

    @classmethod
    def of(
        cls,
        source: str,
        names: list[str],
        class_of: Sequence[str],
        links: Iterable[tuple[int, int]],
    ) -> Graph:
        """From links in any order and direction, some of them several times."""
        classes = sorted(set(class_of))
        number = {name: at for at, name in enumerate(classes)}
        pairs = np.array(sorted({(min(p), max(p)) for p in links if p[0] != p[1]}), np.int64)
        labels = np.array([number[name] for name in class_of], np.int64)
        return cls(source, names, labels, classes, pairs.reshape(-1, 2))

    def neighbours(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Where each node's neighbours begin, `[n + 1]`, and all of them, `[2e]`, sorted."""
        both = np.concatenate([self.edges, self.edges[:, ::-1]])
        both = both[np.lexsort((both[:, 1], both[:, 0]))]
        starts = np.searchsorted(both[:, 0], np.arange(len(self.names) + 1))
        return starts.astype(np.int64), np.ascontiguousarray(both[:, 1])

    def features(self) -> npt.NDArray[np.float32]:
        """float32 `[n, FEATURES]`."""
        found = np.zeros((len(self.names), FEATURES), np.float32)
        for node, name in enumerate(self.names):
            text = f"^{name.lower()}$".encode()
            for at in range(len(text) - 2):
                found[node, 1 + zlib.crc32(text[at : at + 3]) % (FEATURES - 1)] += 1
        found /= np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1)
        degree = np.bincount(self.edges.ravel(), minlength=len(self.names))
        found[:, 0] = np.log1p(degree) / 8
        return found


def imports(folders: Mapping[Path, str] | None = None) -> Graph:
    """The Python modules below some folders, and which of them import each other.

    Args:
        folders: each with the class of its modules, or "" where each package is one; by default
            the standard library and what is installed beside it.
    """
    if folders is None:
        paths = sysconfig.get_paths()
        folders = {Path(paths[name]): "" for name in ("purelib", "platlib")}
        folders[Path(paths["stdlib"])] = "the standard library"
    files: dict[str, Path] = {}
    kind: dict[str, str] = {}
    for folder, given in folders.items():
        for root, below, here in os.walk(folder):
            below[:] = sorted(set(below) - SKIPPED)
            for path in (Path(root, name) for name in sorted(here) if name.endswith(".py")):
                parts = path.relative_to(folder).with_suffix("").parts
                name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                if name and all(part.isidentifier() for part in parts) and name not in files:
                    files[name], kind[name] = path, given or parts[0]
    modules = sorted(files)
    number = {name: at for at, name in enumerate(modules)}
    links = [
        (at, number[found])
        for at, name in enumerate(modules)
        for found in _imported(name, files[name], number)
    ]
    sizes = Counter(kind.values())
    classes = [k if sizes[k := kind[name]] >= CLASS else "other packages" for name in modules]
    last = [name.rpartition(".")[2] for name in modules]
    return Graph.of("the import graph of the installed Python packages", last, classes, links)


def _imported(name: str, path: Path, known: Mapping[str, int]) -> Iterator[str]:
    """The modules that a file names in its imports, as far as they are known."""
    text = path.read_text(encoding="utf-8", errors="replace")
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for plain, base, names in IMPORT.findall(text):
        for each in plain.split(","):
            if words := each.split():
                yield from _nearest(words[0], known)
        if base:
            dots = len(base) - len(base.lstrip("."))
            above = package.split(".")[: len(package.split(".")) - dots + 1] if dots else []
            full = ".".join(filter(None, [*above, base[dots:]]))
            for each in names.strip("() \t").split(","):
                word = (each.split() or [""])[0]
                yield from _nearest(f"{full}.{word}" if word.isidentifier() else full, known)


def _nearest(name: str, known: Mapping[str, int]) -> Iterator[str]:
    """The module of that name, or the one that it is a part of."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    if name:
        yield name


def cut(
    starts: npt.NDArray[np.int64], neighbours: npt.NDArray[np.int64], parts: int
) -> npt.NDArray[np.int64]:
    """The part of each node; the same for the same graph.

    Linear deterministic greedy streaming (Stanton and Kliot, "Streaming Graph Partitioning for
    Large Distributed Graphs", KDD 2012): nodes come in the order of a breadth-first search, and
    each goes where most of its neighbours are, less so the fuller that part is. Some more passes,
    in which neighbours that come later count with where they were (Nishimura and Ugander,
    "Restreaming Graph Partitioning", KDD 2013).
    """
    count = len(starts) - 1
    bounds, near = starts.tolist(), neighbours.tolist()
    room = max(-(-count // parts), int(count / parts * SLACK))
    part = [-1] * count
    order = _breadth_first(bounds, near)
    for _ in range(PASSES if parts > 1 else 1):
        sizes = [0] * parts
        for node in order:
            here = [0] * parts
            for other in near[bounds[node] : bounds[node + 1]]:
                if part[other] >= 0:
                    here[part[other]] += 1
            best = max(
                (p for p in range(parts) if sizes[p] < room),
                key=lambda p: (here[p] * (1 - sizes[p] / room), -sizes[p], -p),
            )
            part[node] = best
            sizes[best] += 1
    return np.array(part, np.int64)


def _breadth_first(bounds: list[int], near: list[int]) -> list[int]:
    seen = [False] * (len(bounds) - 1)
    order: list[int] = []
    for first in range(len(seen)):
        queue = deque([] if seen[first] else [first])
        seen[first] = True
        while queue:
            node = queue.popleft()
            order.append(node)
            for other in near[bounds[node] : bounds[node + 1]]:
                if not seen[other]:
                    seen[other] = True
                    queue.append(other)
    return order
