"""The demo's figures, from steps whose every value is known: computed, shown live, and reported."""

from __future__ import annotations

import io
import math
import re

import numpy as np
import pytest
from rich.console import Console

from weft.cli.demo.figures import FIGURES, TOLERANCE, WAYS, Run, agreement, headline
from weft.cli.demo.live import Display
from weft.cli.demo.report import page


def step(number, *, scale=1.0, **more):
    """A step of 21 ms times `scale`, 8 of them for sums."""
    figures = {"seconds": 0.021 * scale, "sums": 0.008 * scale, "sent": 3 << 20, "gradient": 1.0}
    figures |= {"clock": (number + 1) * 0.021 * scale, "loss": 4 - number / 20} | more
    return [figures[name] for name in FIGURES]


def run(way, steps=40, **more):
    made = Run(way)
    made.add(np.array([step(number, **more) for number in range(steps)]))
    return made


def test_the_parts_of_a_typical_step_add_up_and_slow_ones_do_not_move_it():
    made = Run("torch")
    for number in range(9):
        made.add(np.array([step(number, scale=100.0 if number == 0 else 1.0 + number / 100)]))
    assert 0.021 < made.typical("seconds") < 0.023
    assert made.typical("sums") / made.typical("seconds") == pytest.approx(8 / 21)
    assert made.line() == (
        "PyTorch sparse: steps 9, loss 3.8000, a step 22.1 ms, computing 13.7 ms, sums 8.40 ms, "
        "sent 3.00 MiB"
    )


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"loss": 4.0 * (1 + TOLERANCE / 2)}, "agree over 1 steps: losses and gradients within 5"),
        *(
            ({"loss": loss}, "DO NOT AGREE over 1 steps")
            for loss in (4.0 * (1 + 2 * TOLERANCE), math.nan, math.inf, -2.0)
        ),
        ({"gradient": 4.0}, "DO NOT AGREE over 1 steps"),
    ],
)
def test_ways_agree_or_do_not(more, words):
    agrees, said = agreement(run("weft", 1), run("dense", 1, **more))
    assert said.startswith(f"weft and PyTorch dense {words}") and agrees == ("DO NOT" not in words)


def test_ways_that_were_interrupted_are_compared_as_far_as_both_came():
    assert agreement(run("weft", 20), run("dense", 10))[1].startswith(
        "weft and PyTorch dense agree over 10 steps"
    )


def test_the_whole_step_is_the_headline_and_what_is_slower_is_not_called_fast():
    some = [run("weft"), run("torch", scale=12.5), run("dense", scale=0.954)]
    assert headline(some) == (
        "A step of training with weft is 12.50x as fast as PyTorch sparse and 0.95x as fast as "
        "PyTorch dense"
    )


def shown(terminal, width, capsys):
    runs = {way: Run(way) for way in WAYS}
    out = Console(file=io.StringIO(), force_terminal=terminal, width=width, height=40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rich.live.get_console", lambda: out)
        display = Display(runs, 200)
    for _ in range(10):
        display.hear(0, ("torch", run("torch", 10).figures))
        display.hear(0, ("weft", run("weft", 10).figures))
    out.print(display.get_renderable())
    assert isinstance(out.file, io.StringIO)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.file.getvalue()) + capsys.readouterr().out


def test_a_pipe_gets_a_line_for_each_hundred_steps(capsys):
    first, second = shown(False, 100, capsys).strip().splitlines()
    assert first.startswith("PyTorch sparse: steps 100, loss 3.7750, a step 21.0 ms")
    assert second.startswith("weft: steps 100, ")
    assert "; starting, load " in second  # of the way that is the last, nothing has come


@pytest.mark.parametrize("width", [80, 160])
def test_a_terminal_has_the_ways_side_by_side_and_what_is_left(width, capsys):
    text = shown(True, width, capsys)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    (titles,) = [line for line in lines if "PyTorch sparse" in line]
    assert titles.index("weft") < titles.index("PyTorch sparse") < titles.index("PyTorch dense")
    (losses,) = [line for line in lines if "loss" in line]
    assert losses.count("3.7750") == 2
    assert "load" in lines[-1] and "Ctrl-C" in lines[-1]


def test_what_is_left_are_the_steps_of_all_ways():
    runs = {way: run(way, 50, scale=scale) for way, scale in zip(WAYS, (10, 20, 30), strict=True)}
    assert Display(runs, 200).left().startswith("about 189 s left, load ")  # 150 steps of 1.26 s
    runs["dense"] = Run("dense")
    assert Display(runs, 200).left().startswith("starting, load ")


NASTY = "<script>alert('&')</script>"


@pytest.fixture(scope="module")
def report():
    runs = [run("weft"), run("torch", scale=2.0), run("dense", 10, scale=0.954)]
    return page(runs, ["first", NASTY])


def test_the_page_needs_no_other_file_and_escapes_what_others_wrote(report):
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#)""", report)
    assert not re.search(r"@import|url\((?!#)", report)
    assert {url for url in re.findall(r"https?://[^\s\"'<]+", report) if "w3.org" not in url} <= {
        "http://creativecommons.org/ns#",
        "http://purl.org/dc/elements/1.1/",
        "http://purl.org/dc/dcmitype/StillImage",
        "https://matplotlib.org/",
    }  # in the metadata of pictures: nothing is loaded
    assert NASTY not in report and report.count("&lt;script&gt;") == 1


def test_the_page_has_two_pictures_and_the_lines(report):
    assert report.count("<svg") == report.count("</svg>") == 2
    assert "$" not in re.sub(r"<svg.*?</svg>", "", report, flags=re.DOTALL)
    assert report.count("A step of training with weft is 2.00x as fast as PyTorch sparse") == 2
    assert report.count("<li>") == 2
