"""The report: one file that needs no other, with what was measured and nothing else."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from weft.cli.demo.corpus import Corpus
from weft.cli.demo.plots import STAND_INS, _steps, _thin
from weft.cli.demo.record import PARTS, Outcome, Reduction, Run, Step, agreement
from weft.cli.demo.report import Result, write_report
from weft.cli.demo.settings import Settings
from weft.cli.demo.vectors import Neighbours

NASTY = "<script>alert('&')</script>"


def settings(compare: str = "all") -> Settings:
    return Settings.checked(
        ranks=2, steps=12, dim=8, batch=64, compare=compare, seed=0, min_count=2,
        text=(Path(NASTY),), out=Path("out"),
    )  # fmt: skip


def run(way: str, steps: int, scale: float) -> Run:
    made = Run(way, 12, 2)
    tables = (Reduction("split", 10, 20, 15, 6, 4000, 3500),) if way == "weft" else ()
    for rank in range(2):
        for number in range(steps):
            times = dict.fromkeys(PARTS, 0.002 * scale)
            clock = (number + 1) * 12e-3 * scale
            loss = 4.0 / (number + 1)
            made.add(
                rank, [Step(number, clock, loss, 1.0, in_flight=9e-3, reductions=tables, **times)]
            )
    made.outcomes = [Outcome(300 << 20, 200 << 20)] * 2
    return made


def result(runs: list[Run], interrupted: bool = False) -> Result:
    words = [f"word{n}" for n in range(30)]
    runs[-1].interrupted = interrupted
    return Result(
        settings=settings(),
        corpus=Corpus(
            NASTY, words, np.full(30, 9), np.zeros(270, np.int32), files=3, skipped=1,
            rare_words=4, rare_tokens=5,
        ),
        trained_tokens=270,
        runs=runs,
        neighbours=[Neighbours("word1", ((NASTY, 0.9), ("word2", -0.1)))],
        agreements=[one for other in runs[1:] if (one := agreement(runs[0], other))],
        command=["weft", "demo", "--text", NASTY],
        vectors=Path("out/vectors.txt"),
    )  # fmt: skip


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(path, result([run("weft", 12, 1.0), run("torch", 12, 2.0), run("dense", 7, 3.0)]))
    return path.read_text()


def test_it_needs_no_other_file(page: str) -> None:
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#)""", page)
    assert not re.search(r"@import|url\((?!#)", page)
    assert {url for url in re.findall(r"https?://[^\s\"'<]+", page) if "w3.org" not in url} == set()


def test_text_of_others_is_escaped(page: str) -> None:
    assert NASTY not in page and page.count("&lt;script&gt;") >= 4


def test_pictures_take_the_colours_of_the_page(page: str) -> None:
    assert page.count("<svg") == 5 and page.count('role="img"') == 5
    assert not [colour for colour in STAND_INS.values() if colour in page]
    used = set(re.findall(r"var\(--([a-z-]+)\)", page))
    light = page[page.index(":root, :root[data-theme") : page.index("@media (prefers")]
    themes = [light, page[page.index(':root[data-theme="dark"]') :]]
    for theme in themes:
        defined = set(re.findall(r"--([a-z-]+):", theme))
        assert used - defined <= {"font", "mono", "c"}


def test_no_two_elements_have_the_same_id(page: str) -> None:
    ids = re.findall(r'\bid="([^"]+)"', page)
    pictures = [found for found in ids if re.match(r"[pm][0-9a-f]{8,}", found)]
    assert pictures and len(pictures) == len(set(pictures))


def test_what_was_measured_is_there(page: str) -> None:
    text = re.sub(r"<[^>]+>", " ", page)
    assert "A step with weft takes 12 ms: 2.0x as fast as PyTorch sparse" in text
    assert "3.0x as fast as PyTorch dense" in text
    assert "7 of 12 steps: time limit" in text  # the dense way was stopped
    assert "300 MiB (+100)" in text and "12.0 ms" in text
    assert "agree over 12 steps" in text and "agree over 7 steps" in text
    assert "30 words that occur 2 times or more" in text and "1 files skipped" in text
    assert "split (12)" in text
    for version in ("Python 3", "torch 2", "numpy"):
        assert version in text


def test_a_long_run_is_drawn_with_few_points() -> None:
    line = np.arange(100_000.0)
    thin = _thin(line)
    assert len(thin) <= 500 and thin.mean() == pytest.approx(line.mean(), rel=1e-9)
    assert len(_steps(line)) == len(thin) and _steps(line)[0] == pytest.approx(thin[0] + 1)
    assert _thin([3.0, 1.0]).tolist() == [3.0, 1.0] and _thin([]).size == 0


def test_alone_and_interrupted(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(path, result([run("weft", 3, 1.0)], interrupted=True))
    text = path.read_text()
    assert "interrupted" in text and "3 of 12 steps: interrupted" in text
    assert "Do the ways compute the same?" not in text
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]


def test_losses_that_differ_are_shown_as_such(tmp_path: Path) -> None:
    off = run("torch", 12, 1.0)
    off.steps = [replace(step, loss=step.loss * 1.5) for step in off.steps]
    write_report(tmp_path / "r.html", result([run("weft", 12, 1.0), off]))
    assert 'class="check bad"' in (tmp_path / "r.html").read_text()
