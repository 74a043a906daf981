"""The command line of `weft demo`, and the demo from the text to the report.

The ranks are processes of their own and train all ways in turns. They send their steps here as
they go, so that Ctrl-C keeps what was made.
"""

from __future__ import annotations

import os
import tempfile
from argparse import ArgumentParser, Namespace
from importlib.util import find_spec
from pathlib import Path

import numpy as np

import weft
from weft.base.cores import cores_of_process
from weft.testing import launch

from ..words import about, size
from .figures import WAYS, Run, agreement, headline
from .text import read
from .train import BATCH, train

EXTRA = ("rich", "matplotlib")
"""What the extra `demo` brings."""

_ASKED = ("year", "append", "socket", "error")  # words whose neighbours are good to look at


def add_options(parser: ArgumentParser) -> None:
    """What `weft demo` takes."""
    add = parser.add_argument
    add("--ranks", type=size, default=4, metavar="N", help="processes to start (4)")
    add("--steps", type=size, default=300, metavar="N", help="of each way (300)")
    add("--out", type=Path, default=Path("weft-demo"), metavar="FOLDER", help="for the report")


def demo(given: Namespace) -> int:
    """Train word vectors on several processes, with weft and with PyTorch alone.

    Weft, PyTorch's sparse all-reduce and a dense all-reduce sum the gradients, in turns, on the
    same batches. A page says what a step takes. Ctrl-C ends the demo and keeps what was made.
    """
    if None in map(find_spec, EXTRA):
        raise weft.WeftError("it needs rich and matplotlib: pip install 'weft-collectives[demo]'")
    from .live import Display  # these take a second, and other commands do without
    from .report import page

    given.out.mkdir(parents=True, exist_ok=True)
    lines = [f"{about()} before the demo began"]
    if os.getloadavg()[0] > 0.5 * cores_of_process():
        lines.append("WARNING: other programs keep this machine busy: figures are less sure")
    print(*lines, "reading the text ...", sep="\n", flush=True)
    corpus = read()
    lines.append(
        f"the source of Python's library: {len(corpus.tokens):,} words, {len(corpus.words):,} "
        f"different ones; {given.ranks} ranks take {BATCH:,} pairs of words each in a step"
    )
    print(lines[-1], flush=True)
    runs = {way: Run(way) for way in WAYS}
    asked = [word for word in _ASKED if word in corpus.words]
    near: list[list[int]] = []
    with tempfile.TemporaryDirectory(prefix="weft-demo-") as folder:
        text = f"{folder}/text.npz"
        np.savez(text, tokens=corpus.thinned(), noise=corpus.noise())
        job = text, len(corpus.words), given.steps, [*map(corpus.words.index, asked)]
        try:
            with Display(runs, given.steps) as display:
                near = launch(given.ranks, train, job, on_message=display.hear)[0]
        except KeyboardInterrupt:
            if any(not len(run.figures) for run in runs.values()):
                raise
            lines.append("interrupted")
    first, *others = runs.values()
    checks = [agreement(first, other) for other in others]
    found = [run.line() for run in runs.values()] + [text for _, text in checks]
    for word, numbers in zip(asked, near, strict=False):  # none after Ctrl-C
        found.append(f"near {word}: {', '.join(corpus.words[each] for each in numbers[1:])}")
    report = given.out / "report.html"
    report.write_text(page([*runs.values()], found + lines), encoding="utf-8")
    print(headline([*runs.values()]), *found, f"report: {report}", sep="\n")
    return 130 if "interrupted" in lines else int(not all(agrees for agrees, _ in checks))
