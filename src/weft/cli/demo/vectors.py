"""Word vectors: the word2vec text format, and which words are near a word.

The format is that of the word2vec program: a line with the number of words and of dimensions,
then a line for each word, the word and its numbers, separated by spaces. gensim reads it with
`KeyedVectors.load_word2vec_format`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

__all__ = ["Neighbours", "choose_words", "nearest", "read_vectors", "write_vectors"]

FAVOURITES = (
    "append", "year", "socket", "error", "lock", "float", "true", "thread", "directory", "month",
    "http", "encoding", "dict", "assertequal", "subprocess", "xml",
)  # fmt: skip
"""Words of programs whose neighbours are good to look at, where the text has them."""


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The nearest words of a word, nearest first, with the cosine of the angle to each."""

    word: str
    near: tuple[tuple[str, float], ...]


def write_vectors(path: Path, words: Sequence[str], table: npt.NDArray[np.float32]) -> None:
    """Write a table `[words, dim]` of fp32; the file appears whole or not at all.

    Numbers have six significant digits.
    """
    part = path.with_name(path.name + ".part")
    line = "%s " + " ".join(["%.6g"] * table.shape[1]) + "\n"
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(f"{len(words)} {table.shape[1]}\n")
            for word, row in zip(words, table.tolist(), strict=True):
                file.write(line % (word, *row))
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def read_vectors(path: Path) -> tuple[list[str], npt.NDArray[np.float32]]:
    """Words and table `[words, dim]` of such a file.

    Raises:
        ValueError: the file is not of that format.
    """
    with path.open(encoding="utf-8") as file:
        count, dim = map(int, file.readline().split())
        words: list[str] = []
        table = np.empty((count, dim), np.float32)
        for line in file:
            word, *numbers = line.split()
            if len(words) == count or len(numbers) != dim:
                raise ValueError(f"{path}: line {len(words) + 2} does not fit {count} x {dim}")
            table[len(words)] = [float(number) for number in numbers]
            words.append(word)
    if len(words) != count:
        raise ValueError(f"{path}: {len(words)} words, the first line says {count}")
    return words, table


def choose_words(words: Sequence[str], counts: npt.NDArray[np.int64], number: int) -> list[str]:
    """Words whose neighbours are worth a look: known ones if the text has most, else frequent ones.

    Frequent, but below the very top, where words are in every context.
    """
    frequent = set(words[: _frequent(counts)])
    known = [word for word in FAVOURITES if word in frequent]
    if len(known) >= number:
        return known[:number]
    spread = [word for word in words[: _frequent(counts)][60:2000] if len(word) > 3]
    spread = spread or list(words)
    places = np.unique(np.geomspace(1, len(spread), number).astype(int)) - 1
    return [spread[place] for place in places]


def nearest(
    words: Sequence[str],
    counts: npt.NDArray[np.int64],
    table: npt.NDArray[np.float32],
    asked: Sequence[str],
    number: int = 6,
) -> list[Neighbours]:
    """The nearest of the frequent words for each asked word.

    Words that occur a few times only have hardly been trained, so they are no neighbours: see
    `_frequent`. A row of zeros is near nothing.
    """
    place = {word: at for at, word in enumerate(words)}
    limit = _frequent(counts)
    rows = table[:limit].astype(np.float32)
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    found = []
    for word in asked:
        own = table[place[word]]
        cosines = rows @ (own / max(float(np.linalg.norm(own)), 1e-12))
        if place[word] < limit:
            cosines[place[word]] = -np.inf
        best = np.argsort(-cosines, kind="stable")[: min(number, limit - 1)]
        found.append(Neighbours(word, tuple((words[at], float(cosines[at])) for at in best)))
    return found


def _frequent(counts: npt.NDArray[np.int64]) -> int:
    """How many of the words, most frequent first, occur 50 times or more; at least 50 words."""
    return min(len(counts), max(50, int((counts >= 50).sum())))
