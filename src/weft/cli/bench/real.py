"""Indices of real work, from files that packages of the registry ship; nothing is downloaded here.

* `text`: words by the counts of wordsegment's list. It has no running text, whose words come in
  bursts, so bursts are drawn: a word is, with a fixed chance, one of the rank's last 1,000 again
  (a cache model: Kuhn and De Mori, "A cache-based natural language model for speech recognition",
  IEEE PAMI 12(6), 1990). The chance is such that 4,096 words have as many distinct ones, beside
  words drawn one by one, as 4,096 neighbours have in WikiText-2: 0.68 times as many.
* `ratings`: the films of MovieLens 100K in the order in which they were rated, from recbole. Ranks
  have neighbouring parts. With enough ranks, every film is rated: the table fills.
* `graph`: entities of MovieLens' knowledge graph, from recbole, each with its neighbours, of which
  a random 25 are taken where there are more (as in Hamilton et al., "Inductive representation
  learning on large graphs", NIPS 2017).
* `tables`: 26 tables of the heights that Criteo's categorical columns have in a public sample
  (`Xi_valid_tiny.npy` of github.com/sands-lab/omnireduce-experiments), one index of each for every
  click. The clicks themselves are in no package that we know of. Indices are drawn, Zipf(1.18)
  within each table: that gives as many distinct rows as 512 clicks of the sample have, 3,520, and a
  little more overlap of ranks: four have 1.5 times as many rows as their union, there 1.39 times.

The packages are not imported, only their files are read. So recbole serves without what it depends
on: installed by `pip install --no-deps`, or as a wheel on PYTHONPATH.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from importlib.resources.abc import Traversable
from typing import cast

import numpy as np
import numpy.typing as npt

import weft

Longs = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Random = np.random.Generator

AGAIN = 0.38
"""The chance that a word is one of those shortly before it."""

RECENT = 1000
"""Words that are shortly before another."""

NEIGHBOURS = 25
"""Of an entity, at most."""

EXPONENT = 1.18
"""Of the Zipf distribution within each of the tables."""

CRITEO = (
    *(27_552, 6_838, 8_404, 2_526, 6_126, 3, 4_750, 959, 23, 25_472, 11_291, 15_512, 10),
    *(1_305, 3_403, 48, 5, 420, 13, 27_443, 19_507, 27_207, 10_442, 5_741, 34, 31),
)
"""Heights of the tables."""


@dataclass(frozen=True, slots=True)
class Source:
    """A file of data that a package ships.

    Attributes:
        package: its name in the registry.
        install: the command that brings it.
        file: its path beside the package.
    """

    package: str
    install: str
    file: str

    def missing(self) -> str | None:
        """Why the file cannot be read, and the remedy; None if it can."""
        try:
            found = self._path()
        except metadata.PackageNotFoundError:
            return f"its data are in the package {self.package}: {self.install}"
        if not found.is_file():
            release = f"{self.package} {metadata.version(self.package)}"
            return f"its data are not in {release}, which has no {self.file}: {self.install}"
        return None

    def read(self) -> str:
        """The text of the file.

        Raises:
            weft.WeftError: it is not there.
        """
        if (why := self.missing()) is not None:
            raise weft.WeftError(why)
        path = self._path()
        if not isinstance(path, zipfile.Path):
            return path.read_text(encoding="utf-8")
        # the wheel is open already, also in the process that ranks are forked from: they would
        # share a place in it, so each opens it again
        with zipfile.ZipFile(str(path.root.filename)) as wheel:
            return wheel.read(self.file).decode("utf-8")

    def check(self, what: str, found: int, expected: int) -> None:
        """Refuse data that are not those for which the height of the case is right.

        Raises:
            weft.WeftError: the package has another number of these.
        """
        if found != expected:
            release = f"{self.package} {metadata.version(self.package)}"
            raise weft.WeftError(f"{release} has {found} {what}, not {expected}: {self.install}")

    def _path(self) -> Traversable:
        # a path, or within a wheel a zipfile.Path: both have what Traversable has
        return cast(Traversable, metadata.distribution(self.package).locate_file(self.file))


_RECBOLE = "pip install --no-deps recbole==1.2.1"
_EXAMPLE = "recbole/dataset_example/ml-100k/ml-100k"
_COUNTS = Source("wordsegment", "pip install wordsegment", "wordsegment/unigrams.txt")
_RATED = Source("recbole", _RECBOLE, f"{_EXAMPLE}.inter")
_TRIPLES = Source("recbole", _RECBOLE, f"{_EXAMPLE}.kg")
_WORDS, _FILMS, _ENTITIES = 333_213, 1_682, 34_628


@dataclass(frozen=True, slots=True)
class Trace:
    """How the indices of one kind of work are made.

    Attributes:
        heights: of its tables, most often of one.
        draw: given the number of indices, the rank, a stream that all ranks share, and the rank's
            own, the indices `[rows]`; those of a table begin where the table before it ends.
        source: what the data are read from; None: from nothing.
    """

    heights: tuple[int, ...]
    draw: Callable[[int, int, Random, Random], Longs]
    source: Source | None = None

    def missing(self) -> str | None:
        """Why the data are not there, and the remedy; None if they are."""
        return None if self.source is None else self.source.missing()


def _text(rows: int, rank: int, shared: Random, own: Random) -> Longs:
    tokens = draws(_words(), rows, own)
    place = np.arange(rows)
    distance = 1 + (own.random(rows) * np.minimum(place, RECENT)).astype(np.int64)
    is_again = own.random(rows) < AGAIN
    origin = np.where(is_again, np.maximum(place - distance, 0), place)
    # what is repeated may itself repeat another: go back to a word that does not
    while (origin[origin] != origin).any():
        origin = origin[origin]
    return tokens[origin]


def _ratings(rows: int, rank: int, shared: Random, own: Random) -> Longs:
    films = _films()
    start = int(shared.integers(len(films))) + rank * rows
    return films[(start + np.arange(rows)) % len(films)]


def _graph(rows: int, rank: int, shared: Random, own: Random) -> Longs:
    epochs = [_epoch(own)]
    while sum(map(len, epochs)) < rows:
        epochs.append(_epoch(own))
    return np.concatenate(epochs)[:rows]


def _epoch(own: Random) -> Longs:
    """All entities in random order, each followed by its neighbours in random order."""
    entities, neighbours = _links()
    order = own.permutation(_ENTITIES)[entities]
    key = own.random(len(entities))
    key[entities == neighbours] = -1.0  # itself comes first
    sequence = np.lexsort((key, order))
    sorted_order = order[sequence]
    number = np.arange(len(sequence)) - np.searchsorted(sorted_order, sorted_order)
    return neighbours[sequence[number <= NEIGHBOURS]]


def _tables(rows: int, rank: int, shared: Random, own: Random) -> Longs:
    clicks = -(-rows // len(CRITEO))
    starts = np.cumsum([0, *CRITEO[:-1]])
    columns = [
        start + draws(zipf(height, EXPONENT), clicks, own)
        for start, height in zip(starts, CRITEO, strict=True)
    ]
    return np.stack(columns, axis=1).ravel()[:rows]


TRACES: dict[str, Trace] = {
    "text": Trace((_WORDS,), _text, _COUNTS),
    "ratings": Trace((_FILMS,), _ratings, _RATED),
    "graph": Trace((_ENTITIES,), _graph, _TRIPLES),
    "tables": Trace(CRITEO, _tables),
}
"""The kinds of work by name."""


def draws(sums: Floats, count: int, stream: Random) -> Longs:
    """So many draws from the distribution function of 0, 1, ..."""
    # rounding may leave the last sum below a draw
    places = np.minimum(sums.searchsorted(stream.random(count), side="right"), len(sums) - 1)
    return places.astype(np.int64)


@lru_cache(maxsize=len(CRITEO))
def zipf(height: int, exponent: float) -> Floats:
    """Distribution function of Zipf over 1, 2, ..., height."""
    sums = np.cumsum(np.arange(1.0, height + 1) ** -exponent)
    sums /= sums[-1]
    return sums


@lru_cache(maxsize=1)
def _words() -> Floats:
    """Distribution function of the words, the most frequent first."""
    fields = _COUNTS.read().split()  # word, count, word, count, ...
    counts = np.array(fields[1::2], np.float64)
    _COUNTS.check("words", len(counts), _WORDS)
    sums = np.cumsum(-np.sort(-counts))
    sums /= sums[-1]
    return sums


@lru_cache(maxsize=1)
def _films() -> Longs:
    """The film of each rating, in the order of time."""
    lines = _RATED.read().splitlines()[1:]  # below user, item, rating, timestamp
    table = np.array([line.split("\t") for line in lines], np.float64)
    films = table[:, 1].astype(np.int64) - 1
    _RATED.check("films", int(films.max()) + 1, _FILMS)
    return films[np.argsort(table[:, 3], kind="stable")]


@lru_cache(maxsize=1)
def _links() -> tuple[Longs, Longs]:
    """Entities and their neighbours, of which each entity itself is one: two arrays `[links]`."""
    lines = _TRIPLES.read().splitlines()[1:]  # below head, relation, tail
    triples = [line.split("\t") for line in lines]
    names = np.array([head for head, _, _ in triples] + [tail for _, _, tail in triples])
    found, numbers = np.unique(names, return_inverse=True)
    _TRIPLES.check("entities", len(found), _ENTITIES)
    heads, tails = np.split(numbers.astype(np.int64), 2)
    itself = np.arange(len(found))
    return np.concatenate([heads, tails, itself]), np.concatenate([tails, heads, itself])
