"""Text into tokens and a vocabulary: what the demo trains on.

A token is a word or an identifier: a letter or underscore, then letters, digits and underscores,
in lower case. Numbers, punctuation and white space are no tokens. Words that occur fewer than
`min_count` times are left out of the text; how many is part of what `Corpus` says, and is printed.
"""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .settings import WINDOW, Refused

__all__ = ["Corpus", "keep_probability", "negative_table", "read", "subsample"]

_WORD = re.compile(r"\b[^\W\d]\w*")
_SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "node_modules"}


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text as numbers.

    Attributes:
        source: what was read, in words.
        words: the vocabulary, most frequent first (ties in alphabetical order).
        counts: how often each of them occurs; int64, shape `[len(words)]`.
        tokens: the text, as positions in `words`; int32.
        files: files that were read.
        skipped: files in the given folders that were not: binary, or not to be read.
        rare_words: words left out because they are rarer than `min_count`.
        rare_tokens: how many tokens those were.
    """

    source: str
    words: list[str]
    counts: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int32]
    files: int
    skipped: int
    rare_words: int
    rare_tokens: int


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
        Refused: a path is missing or cannot be read, or there are too few words for `ranks` ranks.
    """
    skipped = 0
    documents: list[list[str]] = []
    for path, named in _files(text):
        words = _words_of(path, named)
        if words is None:
            skipped += 1
        else:
            documents.append(words)
    source = ", ".join(map(str, text)) or "the source of the Python standard library"
    counted: Counter[str] = Counter()
    for words in documents:
        counted.update(words)
    if not counted:
        raise Refused(f"no words in {source} ({len(documents)} files read, {skipped} skipped)")
    kept = sorted(
        ((word, count) for word, count in counted.items() if count >= min_count),
        key=lambda item: (-item[1], item[0]),
    )
    number = {word: position for position, (word, _) in enumerate(kept)}
    tokens = np.fromiter(
        (number[word] for words in documents for word in words if word in number), dtype=np.int32
    )
    least = ranks * (2 * WINDOW + 2)
    if len(kept) < 2 or len(tokens) < least:
        raise Refused(
            f"too little text in {source}: {len(tokens)} tokens of {len(kept)} words that occur "
            f"{min_count} times or more, {ranks} ranks need {least} tokens; give more text, or a "
            "smaller --min-count or --ranks"
        )
    return Corpus(
        source=source,
        words=[word for word, _ in kept],
        counts=np.array([count for _, count in kept], dtype=np.int64),
        tokens=tokens,
        files=len(documents),
        skipped=skipped,
        rare_words=len(counted) - len(kept),
        rare_tokens=sum(counted.values()) - len(tokens),
    )


def _files(text: Sequence[Path]) -> Iterator[tuple[Path, bool]]:
    """The files to read, each with whether a person named it (then it must be readable)."""
    if not text:
        library = Path(sysconfig.get_paths()["stdlib"])
        for path in _below(library):
            if path.suffix == ".py":
                yield path, False
    for given in text:
        if given.is_dir():
            for path in _below(given):
                yield path, False
        elif given.exists():
            yield given, True
        else:
            raise Refused(f"no such file or folder: {given}")


def _below(folder: Path) -> Iterator[Path]:
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise Refused(f"cannot read folder {folder}: {error.strerror}") from None
    for entry in entries:
        if entry.name.startswith(".") or entry.name in _SKIPPED_FOLDERS:
            continue
        if entry.is_dir():
            if not entry.is_symlink():  # a link may lead back up
                yield from _below(entry)
        elif entry.is_file():
            yield entry


def _words_of(path: Path, named: bool) -> list[str] | None:
    """The words of one file; None if it is to be skipped."""
    try:
        content = path.read_bytes()
    except OSError as error:
        if named:
            raise Refused(f"cannot read {path}: {error.strerror}") from None
        return None
    if b"\0" in content[:8192]:
        if named:
            raise Refused(f"{path} is not text: it holds zero bytes; convert it to UTF-8")
        return None
    return tokenize(content.decode("utf-8", "replace"))


def keep_probability(counts: npt.NDArray[np.int64], threshold: float) -> npt.NDArray[np.float64]:
    """How likely each word stays in the text when frequent words are thinned out.

    The rule of Mikolov et al., Distributed Representations of Words and Phrases (2013), in the
    form of their program: sqrt(t/f) + t/f for a word of frequency f, at most 1.
    """
    ratio = threshold * counts.sum() / counts
    chance: npt.NDArray[np.float64] = np.minimum(1.0, np.sqrt(ratio) + ratio)
    return chance


def subsample(corpus: Corpus, *, seed: int, at_least: int) -> npt.NDArray[np.int32]:
    """The text with its most frequent words thinned out, as is usual for skip-gram.

    Short texts, of which fewer than `at_least` tokens would stay, are left as they are.
    """
    chance = keep_probability(corpus.counts, 1e-4)[corpus.tokens]
    kept = corpus.tokens[np.random.default_rng(seed).random(len(chance)) < chance]
    return kept if len(kept) >= at_least else corpus.tokens


def negative_table(counts: npt.NDArray[np.int64], size: int = 1 << 20) -> npt.NDArray[np.int32]:
    """A table from which a uniform draw is a word, drawn by its count to the power 3/4.

    The noise distribution of the same paper (section 2.2), as a table since a draw from it is then
    one look-up.
    """
    steps = np.cumsum(counts.astype(np.float64) ** 0.75)
    places = (np.arange(size) + 0.5) / size * steps[-1]
    table: npt.NDArray[np.int32] = np.searchsorted(steps, places).astype(np.int32)
    return table
