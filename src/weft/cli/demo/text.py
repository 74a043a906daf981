"""Text into tokens and a vocabulary, and word vectors back into text.

A token is a word or an identifier: a letter or underscore, then letters, digits and underscores,
in lower case. Numbers, punctuation and white space are no tokens. Words that occur fewer than
`min_count` times are left out of the text; how many is part of what `Corpus` says, and is printed.
"""

from __future__ import annotations

import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

import weft

WINDOW = 5
"""Words to either side of a word that count as its context."""

_WORD = re.compile(r"\b[^\W\d]\w*")
_SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "node_modules"}
FAVOURITES = (
    "append", "year", "socket", "error", "lock", "float", "true", "thread", "directory", "month",
    "http", "encoding", "dict", "assertequal", "subprocess", "xml",
)  # fmt: skip
"""Words of programs whose neighbours are good to look at, where the text has them."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text as numbers.

    Attributes:
        source: what was read, in words.
        about: how large it is and what was left out, in words.
        words: the vocabulary, most frequent first (ties in alphabetical order).
        counts: how often each of them occurs; int64, shape `[len(words)]`.
        tokens: the text, as positions in `words`; int32.
    """

    source: str
    about: str
    words: list[str]
    counts: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int32]

    @property
    def frequent(self) -> int:
        """How many of the words occur 50 times or more; at least 50 words."""
        return min(len(self.counts), max(50, int((self.counts >= 50).sum())))


def tokenize(text: str) -> list[str]:
    """The words of a text.

    Example:
        >>> tokenize("Don't call self.read_line(x2, 10)!")
        ['don', 't', 'call', 'self', 'read_line', 'x2']
    """
    return _WORD.findall(text.lower())


def read(text: Sequence[Path], *, min_count: int, ranks: int) -> Corpus:
    """Read files and folders (none given: the Python standard library's own source).

    Folders are read whole, in alphabetical order, but for hidden files, caches and installed
    packages; of the standard library's folder the `.py` files are read.

    Raises:
        weft.WeftError: a path is missing or cannot be read, or there are too few words for so
            many ranks.
    """
    documents = list(_documents(text))
    words = [word for document in documents if document for word in document]
    skipped, counted = documents.count(None), Counter(words)
    source = ", ".join(map(str, text)) or "the source of the Python standard library"
    read = f"{len(documents) - skipped:,} files"
    left_out = f"; {skipped:,} files skipped, not text" if skipped else ""
    if not counted:
        raise weft.WeftError(f"no words in {source}: {read}{left_out}")
    kept = sorted((-count, word) for word, count in counted.items() if count >= min_count)
    number = {word: place for place, (_, word) in enumerate(kept)}
    tokens = np.fromiter((number[word] for word in words if word in number), dtype=np.int32)
    least = ranks * (2 * WINDOW + 2)
    if len(kept) < 2 or len(tokens) < least:
        raise weft.WeftError(
            f"too little text in {source}: {len(tokens)} tokens of {len(kept)} words that occur "
            f"{min_count} times or more, {ranks} ranks need {least} tokens; give more text, or a "
            "smaller --min-count or --ranks"
        )
    rare = f"{len(counted) - len(kept):,} words rarer than {min_count}"
    about = f"{read}, {len(tokens):,} tokens, {len(kept):,} words; "
    about += f"{rare} ({len(words) - len(tokens):,} tokens) left out{left_out}"
    counts = np.array([-count for count, _ in kept], dtype=np.int64)
    return Corpus(source, about, list(number), counts, tokens)


def _documents(text: Sequence[Path]) -> Iterator[list[str] | None]:
    """The words of each file; None for one in a folder that is no text or cannot be read."""
    for given in text or [Path(sysconfig.get_paths()["stdlib"])]:
        if not given.exists():
            raise weft.WeftError(f"no such file or folder: {given}")
        if not given.is_dir():
            yield _words_of(given)
            continue
        for folder, below, names in os.walk(given):
            below[:] = sorted(name for name in {*below} - _SKIPPED_FOLDERS if name[0] != ".")
            for path in (Path(folder, name) for name in sorted(names) if name[0] != "."):
                if path.is_file() and (text or path.suffix == ".py"):
                    try:
                        yield _words_of(path)
                    except weft.WeftError:
                        yield None


def _words_of(path: Path) -> list[str]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise weft.WeftError(f"cannot read {path}: {error.strerror}") from None
    if b"\0" in content[:8192]:
        raise weft.WeftError(f"{path} is not text: it holds zero bytes; convert it to UTF-8")
    return tokenize(content.decode("utf-8", "replace"))


def subsample(corpus: Corpus, *, seed: int, at_least: int) -> npt.NDArray[np.int32]:
    """The text with its most frequent words thinned out, as is usual for skip-gram.

    The rule of Mikolov et al., Distributed Representations of Words and Phrases (2013), in the
    form of their program: a word of frequency f stays with probability sqrt(t/f) + t/f. Short
    texts, of which fewer than `at_least` tokens would stay, are left as they are.
    """
    ratio = 1e-4 * corpus.counts.sum() / corpus.counts
    chance = (np.sqrt(ratio) + ratio)[corpus.tokens]
    kept = corpus.tokens[np.random.default_rng(seed).random(len(chance)) < chance]
    return kept if len(kept) >= at_least else corpus.tokens


def noise(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Distribution function of random words, drawn by their count to the power 3/4.

    The noise distribution of the same paper, section 2.2.
    """
    sums = np.cumsum(counts.astype(np.float64) ** 0.75)
    sums /= sums[-1]
    return sums


def vector_lines(words: Sequence[str], table: npt.NDArray[np.float32]) -> Iterator[str]:
    """A table `[words, dim]` in the text format of word2vec, six significant digits a number.

    A line with the number of words and of dimensions, then a line for each word, the word and its
    numbers. gensim reads it with `KeyedVectors.load_word2vec_format`.
    """
    yield f"{len(words)} {table.shape[1]}\n"
    line = "%s " + " ".join(["%.6g"] * table.shape[1]) + "\n"
    for word, row in zip(words, table.tolist(), strict=True):
        yield line % (word, *row)


def choose_words(corpus: Corpus, number: int) -> list[str]:
    """Words whose neighbours are worth a look: known ones as far as the text has them, then others.

    Those are frequent, but below the very top, where words are in every context.
    """
    frequent = corpus.words[: corpus.frequent]
    known = [word for word in FAVOURITES if word in set(frequent)]
    others = [word for word in frequent[60:2000] if len(word) > 3] or frequent
    return [*known, *others[:: max(1, len(others) // number)]][:number]


def nearest(
    corpus: Corpus, table: npt.NDArray[np.float32], asked: Sequence[str], number: int = 6
) -> dict[str, list[tuple[str, float]]]:
    """The nearest of the frequent words for each asked word, with the cosine of the angle.

    Words that occur a few times only have hardly been trained, so they are no neighbours. A row
    of zeros is near nothing.
    """
    limit = corpus.frequent
    rows = table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-12)
    found = {}
    for word in asked:
        own = corpus.words.index(word)
        cosines = rows[:limit] @ rows[own]
        cosines[own:][:1] = -np.inf
        best = np.argsort(-cosines, kind="stable")[: min(number, limit - 1)]
        found[word] = [(corpus.words[at], float(cosines[at])) for at in best]
    return found
