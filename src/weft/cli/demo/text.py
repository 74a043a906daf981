"""Text into numbers, and numbers of near words back into words.

A token is a word or an identifier: a letter or underscore, then letters, digits and underscores,
in lower case.
"""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .figures import Numbers

WINDOW = 5
"""Words to either side of a word that count as its context."""

_SKIPPED = {"__pycache__", "site-packages", "dist-packages"}


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text as numbers.

    Attributes:
        words: the vocabulary, most frequent first.
        counts: how often each of them occurs: int64 `[len(words)]`.
        tokens: the text, as positions in `words`; int32.
    """

    words: list[str]
    counts: Numbers
    tokens: Numbers

    def thinned(self) -> Numbers:
        """The text without many of its most frequent words, as is usual for skip-gram.

        The rule of Mikolov et al., Distributed Representations of Words and Phrases (2013): a word
        of frequency f stays with probability sqrt(t/f).
        """
        chance = np.sqrt(1e-4 * len(self.tokens) / self.counts)[self.tokens]
        return self.tokens[np.random.default_rng(0).random(len(chance)) < chance]

    def noise(self) -> Numbers:
        """Distribution function of random words, drawn by their count to the power 3/4.

        The noise distribution of the same paper, section 2.2.
        """
        sums = np.cumsum(self.counts**0.75)
        return np.asarray(sums / sums[-1])


def read(least: int = 2) -> Corpus:
    """The source of Python's standard library; words that occur fewer times are left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found: list[str] = []
    for file in sorted(root.rglob("*.py")):
        if not _SKIPPED & {*file.parts}:
            text = file.read_text(encoding="utf-8", errors="replace")
            found += re.findall(r"\b[^\W\d]\w*", text.lower())
    counts = [(word, count) for word, count in Counter(found).most_common() if count >= least]
    number = {word: place for place, (word, _) in enumerate(counts)}
    tokens = np.array([number[word] for word in found if word in number], np.int32)
    return Corpus([*number], np.array([count for _, count in counts]), tokens)
