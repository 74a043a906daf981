"""The demo's figures, from steps whose every value is known: computed, shown live, and reported."""

from __future__ import annotations

import io
import math
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from weft.cli.demo.figures import (
    FIGURES,
    PARTS,
    TOLERANCE,
    WAYS,
    Run,
    agreement,
    faster,
    step_of,
    sums_of,
)
from weft.cli.demo.live import Display
from weft.cli.demo.report import write_report
from weft.cli.demo.text import Corpus
from weft.cli.demo.train import Job

WEFT = {"rows": 1000.0, "total": 4000.0, "union": 2500.0}
WEFT |= {"sent_bytes": 3 << 20, "bound_bytes": 2 << 20}


def step(number: int, *, scale: float = 1.0, **more: float) -> list[float]:
    """Parts of 1, 2, 3, 4, 5 and 6 ms times `scale`: 21 in all, 3 + 5 for sums."""
    figures = {part: (at + 1) * 1e-3 * scale for at, part in enumerate(PARTS)} | more
    figures = {"clock": (number + 1) * 0.021 * scale, "loss": 4 - number / 20} | figures
    return [figures.get(name, 1.0 if name == "gradient" else 0.0) for name in FIGURES]


def run(way: str, steps: int = 40, *, wanted: int | None = None, ranks: int = 2, **more) -> Run:
    made = Run(way, wanted or steps, ranks, ranks * 1000)
    feed(made, 0, steps, **more)
    made.memory = [(300 << 20, 200 << 20)] * ranks
    made.alone = [0.002 * more.get("scale", 1.0) ** 2] * 3
    return made


def feed(made: Run, first: int, last: int, **more: float) -> None:
    more = WEFT | more if made.way == "weft" else more
    algorithms = ["split" if made.way == "weft" else ""] * (last - first)
    made.add(algorithms, np.array([step(number, **more) for number in range(first, last)]))


def test_a_run_says_how_far_it_came() -> None:
    made = run("weft", 2, wanted=5)
    assert made.done == 2 and made.algorithms == ["split", "split"]
    assert made.values("loss").tolist() == [4.0, 3.95]
    assert made.note == "2 of 5 steps: time limit"
    made.interrupted = True
    assert made.note == "2 of 5 steps: interrupted"
    assert run("torch").note == ""


def test_the_parts_of_a_typical_step_add_up_and_slow_ones_do_not_move_it() -> None:
    made = Run("torch", 9, 1, 1000)
    for n in range(9):
        feed(made, n, n + 1, scale=100.0 if n == 0 else 1.0 + n / 100)
    whole = made.typical("seconds")
    assert whole == pytest.approx(sum(made.typical(part) for part in PARTS))
    summed = made.typical("start sums") + made.typical("wait for sums")
    assert made.typical("for sums") == pytest.approx(summed)
    assert made.typical("computing") == pytest.approx(whole - summed)
    assert made.share == pytest.approx(summed / whole)
    assert 0.021 < whole < 0.023
    assert made.speed == pytest.approx(1000 / whole)


def sent(made: Run, weft: Run) -> list[float]:
    made.count_sent(weft, 100, 8)
    return made.sent.tolist()


def test_bytes_of_the_ways_are_counted_or_computed() -> None:
    weft = run("weft", 3, ranks=4, sent_bytes=777, total=40)
    assert sent(weft, weft) == [777.0] * 3
    assert sent(run("torch", 2, ranks=4), weft) == [3 / 4 * 40 * (8 + 8 * 4)] * 2
    assert sent(run("dense", 2, ranks=4), weft) == [2 * 3 / 4 * 2 * 100 * 32] * 2
    # no figure is made up for steps that weft did not do
    assert len(sent(run("torch", 5), weft)) == 3


def test_cells_have_each_figure_and_say_what_is_computed() -> None:
    weft, dense = run("weft"), run("dense")
    weft.sent, dense.sent = np.array([3 << 20]), np.array([6 << 20])
    assert weft.cells() == [
        *("21.0 ms", "13.0 ms", "8.00 ms (38%)", "2.00 ms", "3.00 MiB", "300 MiB (+100)")
    ]
    dense.memory, dense.alone = [], []
    assert dense.cells()[3:] == ["no figure", "6.00 MiB computed", "no figure"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"loss": 4.0 * (1 + TOLERANCE / 2)}, "agree over 1 steps: losses and gradients within 5"),
        *(
            ({"loss": loss}, "DO NOT AGREE over 1 steps: the loss of step 1 differs by")
            for loss in (4.0 * (1 + 2 * TOLERANCE), math.nan, math.inf, -2.0)
        ),
        ({"gradient": 4.0}, "DO NOT AGREE over 1 steps: the gradient of step 1 differs by"),
    ],
)
def test_ways_agree_or_do_not(more: dict[str, float], words: str) -> None:
    agrees, said = agreement(run("weft", 2), run("dense", 1, **more))
    assert said.startswith(f"weft and PyTorch dense {words}") and agrees == ("DO NOT" not in words)


def test_what_is_slower_is_not_called_equally_fast() -> None:
    weft, slow, near = run("weft"), run("torch", scale=12.5), run("dense", scale=0.954)
    assert faster([weft, slow, near], step_of) == (
        "12.5x as fast as PyTorch sparse and 0.95x as fast as PyTorch dense"
    )
    slow.alone = []  # not measured
    assert faster([weft, slow, near], sums_of) == "0.91x as fast as PyTorch dense"
    assert faster([weft], step_of) == ""


# What is shown while it runs.


def console(terminal: bool, width: int = 100) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=terminal, width=width, height=40, highlight=False
    )


def written(out: Console) -> str:
    assert isinstance(out.file, io.StringIO)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.file.getvalue()).replace("\r", "\n")


def told(shown: Display, made: Run, first: int, last: int) -> None:
    feed(made, first, last)
    shown.arrived(made)


def test_a_pipe_gets_a_line_for_a_tenth_of_the_steps_with_all_figures() -> None:
    out = console(False)
    weft, torch = runs = [Run("weft", 40, 2, 2000), Run("torch", 40, 2, 2000)]
    with Display(out, runs) as shown:
        for first in range(0, 40, 2):
            told(shown, weft, first, first + 2)
            if first < 6:
                told(shown, torch, first, first + 2)
        shown.say("a word [in] the end")
    first, *lines, last = written(out).strip().splitlines()
    assert first == "training 40 steps, ranks 2, in turns: weft, PyTorch sparse"
    of_weft = [line for line in lines if line.startswith("weft ")]
    assert len(of_weft) == 10 and last == "a word [in] the end"
    assert "step     4  loss 3.9250      95,238 pairs/s  step  21.0 ms" in of_weft[0]
    assert "for sums  8.00 ms  rows 1,000 of union 2,500  split" in of_weft[0]
    of_torch = [line for line in lines if line.startswith("PyTorch sparse ")]
    assert [line.split()[3] for line in of_torch] == ["4"]
    alone = console(False)
    with Display(alone, [Run("weft", 40, 1, 1000)]):
        assert written(alone) == "training 40 steps, ranks 1: weft\n"


@pytest.mark.parametrize("width", [80, 160])
def test_a_terminal_gets_a_bar_for_every_way_and_the_moment(width: int) -> None:
    out = console(True, width)
    weft, torch = runs = [Run("weft", 40, 2, 2000), Run("torch", 40, 2, 2000)]
    with Display(out, runs) as shown:
        told(shown, torch, 0, 20)
        told(shown, weft, 0, 40)
        shown.refresh()
        shown.say("measuring")
    text = " ".join(written(out).split())
    assert max(map(len, written(out).splitlines())) <= width
    for words in ("40/40 loss 2.5250 21.0 ms, 38% for sums", "PyTorch sparse", "20/40"):
        assert words in text, words
    for words in ("95,238 pairs/s", "rows 1,000 of union 2,500", "3.00 MiB sent", "split"):
        assert words in text, words
    assert "measuring" in text and "Ctrl-C" in text


# The report.

NASTY = "<script>alert('&')</script>"


def report(runs: list[Run]) -> str:
    words = [f"word{n}" for n in range(30)]
    corpus = Corpus(NASTY, "very long", words, np.full(30, 9), np.zeros(270, np.int32))
    job = Job(tuple(WAYS), 40, 1000, 8, 0, None, 30, Path("x"))
    for made in runs:
        made.count_sent(runs[0], 30, 8)
    checks = [agreement(runs[0], other) for other in runs[1:]]
    return write_report(corpus, job, runs, checks, {"word1": [(NASTY, 0.9), ("word2", -0.1)]})


@pytest.fixture(scope="module")
def page() -> str:
    return report([run("weft"), run("torch", scale=2.0), run("dense", 7, wanted=40, scale=0.954)])


def test_the_page_needs_no_other_file_and_escapes_what_others_wrote(page: str) -> None:
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#)""", page)
    assert not re.search(r"@import|url\((?!#)", page)
    assert {url for url in re.findall(r"https?://[^\s\"'<]+", page) if "w3.org" not in url} == set()
    assert NASTY not in page and page.count("&lt;script&gt;") >= 3


def test_the_page_has_every_colour_for_light_and_for_dark_readers(page: str) -> None:
    used = set(re.findall(r"var\(--([a-z-]+)\)", page)) - {"font", "mono", "c", "w"}
    light, dark = re.split(r":root\[data-theme", page)[:2]
    for theme in (light, dark.partition("}")[0]):
        assert used <= set(re.findall(r"--([a-z-]+): #", theme))
    (svg,) = re.findall(r"<svg.*</svg>", page, re.DOTALL)
    drawn = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", svg.partition("</style>")[2]))
    both = set(re.findall(r"light-dark\((#[0-9a-f]{6}), #", svg))
    assert drawn and drawn <= both
    assert not re.search(r'style="(background|color): ?#', page)


def test_one_figure_for_one_thing_and_what_was_measured_is_there(page: str) -> None:
    text = " ".join(re.sub(r"<[^>]+>", " ", page.partition("<body>")[2]).split())
    assert text.startswith("weft demo weft sums the gradients 4.00x as fast as PyTorch sparse and")
    assert {*re.findall(r"(\d+\.\d ms), \d+% for sums", text)} == {"21.0 ms", "42.0 ms", "20.0 ms"}
    for words in (
        "one with weft takes 21.0 ms, of which 13.0 ms are computing",
        "The whole step is 2.00x as fast as PyTorch sparse and 0.95x as fast as PyTorch dense",
        "weft 2.00 ms PyTorch sparse 8.00 ms",  # the sums alone
        "62% of a step is computing",
        "+50% bytes sent, beside the least that any algorithm has to send",
        "2,500 rows in the sums of a step; each rank brought 1,000",
        "the least 2.00 MiB",
        "7 of 40 steps: time limit",  # the dense way was stopped
        "300 MiB (+100)",
        "agree over 40 steps",
        "agree over 7 steps",
        "very long",
        "split (40)",
        "python 3",
        "torch 2",
        "numpy",
    ):
        assert words in text, words


def test_pages_of_runs_that_were_interrupted_or_differ() -> None:
    alone = run("weft", 3, wanted=40, bound_bytes=0)
    alone.interrupted = True
    alone.alone = []
    text = report([alone])
    assert "3 of 40 steps: interrupted" in text and "Do the ways compute the same?" not in text
    assert "A step with weft takes 21.0 ms" in text and "The sums alone" not in text
    assert 'class="check bad"' in report([run("weft"), run("torch", loss=1.0)])
