"""The demo's figures, from steps whose every value is known: computed, shown live, and reported."""

from __future__ import annotations

import io
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from rich.text import Text

from weft.cli.demo.figures import PARTS, TOLERANCE, WAYS, Run, Step, agreement, ms, speedups
from weft.cli.demo.live import Display
from weft.cli.demo.report import write_report
from weft.cli.demo.text import Corpus
from weft.cli.demo.train import Job

WEFT = {"algorithm": "split", "rows": 1000, "total": 4000, "union": 2500}
WEFT |= {"sent": 3 << 20, "bound": 2 << 20}


def step(number: int, *, scale: float = 1.0, **more) -> Step:
    """Parts of 1, 2, 3, 4, 5 and 6 ms times `scale`: 21 in all, 3 + 5 for sums."""
    times = {part: (at + 1) * 1e-3 * scale for at, part in enumerate(PARTS)}
    given = {"clock": (number + 1) * 0.021 * scale, "loss": 4 - number / 20, "gradient": 1.0}
    return Step(number, **{**given, **times, **more})


def run(way: str, steps: int = 40, *, wanted: int | None = None, ranks: int = 2, **more) -> Run:
    more = WEFT | more if way == "weft" else more
    made = Run(way, wanted or steps, ranks, ranks * 1000)
    for rank in range(ranks):
        made.add(rank, [step(number, **more) for number in range(steps)])
    made.memory = [(300 << 20, 200 << 20)] * ranks
    return made


def test_a_run_counts_the_steps_that_every_rank_reported() -> None:
    made = Run("weft", 5, 2, 2000)
    made.add(0, [step(0, loss=1.0, sent=400, algorithm="a"), step(1, loss=2.0), step(2)])
    assert made.done == 0
    made.add(1, [step(0, loss=3.0, sent=600, algorithm="a"), step(1, loss=4.0)])
    assert made.done == 2 and made.values("loss") == [2.0, 3.0] and made.values("sent") == [500, 0]
    assert made.algorithms["a"] == 1
    assert made.note == "2 of 5 steps: time limit"
    made.interrupted = True
    assert made.note == "2 of 5 steps: interrupted"
    assert run("torch").note == ""


def test_the_parts_of_a_typical_step_add_up_and_slow_ones_do_not_move_it() -> None:
    made = Run("torch", 9, 1, 1000)
    made.add(0, [step(n, scale=100.0 if n == 0 else 1.0 + n / 100) for n in range(9)])
    whole = made.typical("seconds")
    assert whole == pytest.approx(sum(made.typical(part) for part in PARTS))
    assert made.typical("synchronisation") == pytest.approx(
        made.typical("hand_over") + made.typical("wait")
    )
    assert 0.021 < whole < 0.023
    assert made.speed() == pytest.approx(1000 / whole)


def test_bytes_of_the_ways_are_counted_or_computed() -> None:
    weft = run("weft", 3, ranks=4, sent=777, total=40)
    sent = {way: run(way, 2, ranks=4).sent(weft, 100, 8) for way in ("torch", "dense")}
    assert weft.sent(weft, 100, 8) == [777.0] * 3
    assert sent == {
        "torch": [3 / 4 * 40 * (8 + 8 * 4)] * 2,
        "dense": [2 * 3 / 4 * 2 * 100 * 32] * 2,
    }
    # no figure is made up for steps that weft did not do
    assert len(run("torch", 5).sent(weft, 100, 8)) == 3


def test_cells_have_each_figure_and_say_what_is_computed() -> None:
    weft, dense = run("weft"), run("dense")
    assert weft.cells([3 << 20]) == [
        *("40", "21.0 ms", "8.0 ms (38%)", "3.00 MiB", "300 MiB (+100)", "95,238"),
    ]
    dense.memory = []
    assert dense.cells([6 << 20])[3:5] == ["6.00 MiB computed", "no figure"]
    assert dense.cells([])[3] == "no figure"
    assert [ms(value) for value in (0.09994, 0.09996, 0.7051)] == ["99.9 ms", "100 ms", "705 ms"]


@pytest.mark.parametrize("other", [4.0 * (1 + 2 * TOLERANCE), math.nan, math.inf, -2.0])
def test_losses_that_do_not_agree(other: float) -> None:
    agrees, words = agreement(run("weft", 2), run("dense", 1, loss=other))
    assert not agrees
    assert words.startswith("weft and PyTorch dense DO NOT AGREE over 1 steps: the loss of step 1")


def test_ways_agree_or_their_gradients_differ() -> None:
    weft = run("weft", 3, loss=3.0)
    agrees, words = agreement(weft, run("torch", 2, loss=3.0 * (1 + 5e-5)))
    assert agrees and words.startswith("weft and PyTorch sparse agree over 2 steps: losses and")
    agrees, words = agreement(weft, run("torch", 3, loss=3.0, gradient=4.0))
    assert not agrees and "the gradient of step 1" in words


def test_what_is_slower_is_not_called_equally_fast() -> None:
    weft, slow, near = run("weft"), run("torch", scale=12.5), run("dense", scale=0.954)
    assert speedups([weft, slow, near]) == (
        "12.5x as fast as PyTorch sparse and 0.95x as fast as PyTorch dense"
    )


# What is shown while it runs.


def console(terminal: bool, width: int = 100) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=terminal, width=width, height=40, highlight=False
    )


def written(out: Console) -> str:
    assert isinstance(out.file, io.StringIO)
    return Text.from_ansi(out.file.getvalue()).plain


def feed(shown: Display, made: Run, first: int, last: int) -> None:
    for rank in range(made.ranks):
        more = WEFT if made.way == "weft" else {}
        made.add(rank, [step(number, **more) for number in range(first, last)])
    shown.arrived(made)


def test_a_pipe_gets_a_line_for_a_tenth_of_the_steps_with_all_figures() -> None:
    out = console(False)
    weft, torch = runs = [Run("weft", 40, 2, 2000), Run("torch", 40, 2, 2000)]
    with Display(out, runs) as shown:
        for first in range(0, 40, 2):
            feed(shown, weft, first, first + 2)
            if first < 6:
                feed(shown, torch, first, first + 2)
        shown.end()
        shown.say("a word in the end")
    first, *lines, last = written(out).splitlines()
    assert first == "training 40 steps on 2 ranks, in turns: weft, PyTorch sparse"
    of_weft = [line for line in lines if line.startswith("weft ")]
    assert len(of_weft) == 10 and last == "a word in the end"
    assert "step     4  loss 3.9250      95,238 pairs/s  step  21.0 ms" in of_weft[0]
    assert "synchronisation   8.0 ms  rows 1,000 of union 2,500  split" in of_weft[0]
    of_torch = [line for line in lines if line.startswith("PyTorch sparse ")]
    assert [line.split()[3] for line in of_torch] == ["4", "6"]  # the last as far as it came
    alone = console(False)
    with Display(alone, [Run("weft", 40, 1, 1000)]):
        assert written(alone) == "training 40 steps on 1 rank: weft\n"


@pytest.mark.parametrize("width", [80, 160])
def test_a_terminal_gets_a_panel_with_every_way_and_the_moment(width: int) -> None:
    out = console(True, width)
    weft, torch = runs = [Run("weft", 40, 2, 2000), Run("torch", 40, 2, 2000)]
    with Display(out, runs) as shown:
        feed(shown, weft, 0, 40)
        feed(shown, torch, 0, 20)
        shown.end()
        shown.say("measuring")
    text = written(out)
    assert max(map(len, text.splitlines())) == width
    for word in ("✓ weft", "40/40", "■ PyTorch sparse", "20/40", "95,238 pairs/s", "8.0 ms  38%"):
        assert word in text, word
    for word in ("1,000 of a rank", "2,500 in the union", "3.00 MiB sent", "split", "measuring"):
        assert word in text, word


# The report.

NASTY = "<script>alert('&')</script>"


def report(runs: list[Run]) -> str:
    words = [f"word{n}" for n in range(30)]
    corpus = Corpus(NASTY, words, np.full(30, 9), np.zeros(270, np.int32), 3, 1, 4, 5)
    job = Job(tuple(WAYS), 40, 1000, 8, 0, None, 30, Path("x"))
    sent = [made.sent(runs[0], 30, 8) for made in runs]
    checks = [agreement(runs[0], other) for other in runs[1:]]
    near = {"word1": [(NASTY, 0.9), ("word2", -0.1)]}
    return write_report(corpus, 2, 270, job, runs, sent, checks, near)


@pytest.fixture(scope="module")
def page() -> str:
    return report([run("weft"), run("torch", scale=2.0), run("dense", 7, wanted=40, scale=0.954)])


def test_the_page_needs_no_other_file_and_escapes_what_others_wrote(page: str) -> None:
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#)""", page)
    assert not re.search(r"@import|url\((?!#)", page)
    assert {url for url in re.findall(r"https?://[^\s\"'<]+", page) if "w3.org" not in url} == set()
    assert NASTY not in page and page.count("&lt;script&gt;") >= 3
    used, themes = set(re.findall(r"var\(--([a-z-]+)\)", page)), page.split(":root[data-theme")[:2]
    assert used <= {"font", "mono", "c"} | set(re.findall(r"--([a-z-]+):", themes[0]))


def test_pictures_are_named_and_share_no_ids(page: str) -> None:
    assert page.count("<svg") == page.count('role="img"') == 4
    ids = [one for one in re.findall(r'\bid="([^"]+)"', page) if re.match(r"[pm][0-9a-f]{8,}", one)]
    assert ids and len(ids) == len(set(ids))
    assert "MiB sent by a rank, logarithmic" in page


def test_one_figure_for_one_thing_and_what_was_measured_is_there(page: str) -> None:
    text = re.sub(r"<[^>]+>", " ", page)
    assert "A step with weft takes 21.0 ms: 2.00x as fast as PyTorch sparse" in text
    assert "0.95x as fast as PyTorch dense" in text
    assert {*re.findall(r"(\d+\.\d ms), \d+% for sums", text)} == {"21.0 ms", "42.0 ms", "20.0 ms"}
    assert "7 of 40 steps: time limit" in text  # the dense way was stopped
    assert "300 MiB (+100)" in text and "pairs a second, all ranks" in text
    assert "agree over 40 steps" in text and "agree over 7 steps" in text
    assert "30 words that occur 2 times or more" in text and "1 files skipped" in text
    assert "split (40)" in text
    for version in ("Python 3", "torch 2", "numpy"):
        assert version in text


def test_pages_of_runs_that_were_interrupted_or_differ() -> None:
    alone = run("weft", 3, wanted=40, bound=0)
    alone.interrupted = True
    text = report([alone])
    assert "3 of 40 steps: interrupted" in text and "Do the ways compute the same?" not in text
    off = run("torch")
    off.steps = [replace(one, loss=one.loss * 1.5) for one in off.steps]
    assert 'class="check bad"' in report([run("weft"), off])
