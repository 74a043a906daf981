"""What is shown while it runs, on a terminal and elsewhere."""

import io

import pytest
from rich.console import Console
from rich.text import Text

from weft.cli.demo.live import Lines, Panels, cells, display, figures_table
from weft.cli.demo.record import PARTS, Outcome, Reduction, Run, Step, Summary
from weft.cli.demo.settings import Settings

TABLES = (Reduction("split", 1000, 4000, 2500, 9, 3 << 20, 2 << 20),)


def settings(steps: int = 40) -> Settings:
    from pathlib import Path

    return Settings.checked(
        ranks=2, steps=steps, dim=8, batch=1000, compare="all", seed=0, min_count=2,
        text=(), out=Path("out"),
    )  # fmt: skip


def steps(first: int, last: int, tables=TABLES) -> list[Step]:
    times = dict.fromkeys(PARTS, 1e-3)
    return [
        Step(n, 6e-3 * (n + 1), 4.0 - n / 20, 1.0, in_flight=2e-3, reductions=tables, **times)
        for n in range(first, last)
    ]


def feed(run: Run, shown, first: int, last: int, tables=TABLES) -> None:
    for rank in range(run.ranks):
        run.add(rank, steps(first, last, tables))
        shown.arrived(run)


def console(terminal: bool, width: int = 100) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=terminal, width=width, height=40, highlight=False
    )


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_terminal_gets_panels_and_a_pipe_lines() -> None:
    assert isinstance(display(console(True), settings()), Panels)
    assert isinstance(display(console(False), settings()), Lines)


def test_one_rank_takes_no_turns() -> None:
    out = console(False)
    with Lines(out, settings()) as shown:
        shown.begin([Run("weft", 40, 1)])
    assert written(out).splitlines() == ["training 40 steps on 1 rank: weft"]


def test_lines_say_a_tenth_of_the_steps_at_a_time_with_all_figures() -> None:
    out = console(False)
    weft, torch = runs = [Run("weft", 40, 2), Run("torch", 40, 2)]
    with Lines(out, settings()) as shown:
        shown.begin(runs)
        for first in range(0, 40, 2):
            feed(weft, shown, first, first + 2)
            if first < 6:
                feed(torch, shown, first, first + 2, tables=())
        shown.end()
        shown.say("a word in the end")
    first, *lines, last = written(out).splitlines()
    assert first == "training 40 steps on 2 ranks, in turns: weft, PyTorch sparse"
    of_weft = [line for line in lines if line.startswith("weft ")]
    assert len(of_weft) == 10 and last == "a word in the end"
    assert "step     4  loss 3.9250    333,333 tokens/s  step   6.0 ms" in of_weft[0]
    assert "synchronisation   2.0 ms  rows 1,000 of union 2,500  split" in of_weft[0]
    of_torch = [line for line in lines if line.startswith("PyTorch sparse ")]
    assert [line.split()[3] for line in of_torch] == ["4", "6"]  # the last as far as it came
    assert "\x1b" not in written(out)


@pytest.mark.parametrize("width", [80, 100, 160])
def test_the_panel_shows_every_way_and_the_moment(width: int) -> None:
    out = console(True, width)
    shown = Panels(out, settings())
    weft, torch = runs = [Run("weft", 40, 2), Run("torch", 40, 2)]
    out.print(shown._panel())
    shown.begin(runs)
    out.print(shown._panel())
    assert "processes are starting" in written(out)
    feed(weft, shown, 0, 30)
    feed(torch, shown, 0, 20, tables=())
    with out.capture() as captured:
        out.print(shown._panel())
    lines = Text.from_ansi(captured.get()).plain.splitlines()
    assert max(map(len, lines)) == width
    text = "\n".join(lines)
    for word in ("weft", "PyTorch sparse", "30/40", "20/40", "333,333 tokens/s", "2.0 ms  33%"):
        assert word in text, word
    for word in ("1,000 of a rank", "2,500 in the union", "3.00 MiB sent", "split", "0:00"):
        assert word in text, word
    assert "processes are starting" not in text


def test_the_panel_lives_and_ends() -> None:
    out = console(True)
    weft, torch = runs = [Run("weft", 40, 2), Run("torch", 40, 2)]
    with Panels(out, settings()) as shown:
        shown.begin(runs)
        feed(weft, shown, 0, 40)
        feed(torch, shown, 0, 20, tables=())
        shown.end()
        shown.say("measuring")
    text = Text.from_ansi(written(out)).plain
    assert "✓ weft" in text and "40/40" in text and "■ PyTorch sparse" in text
    assert "measuring" in text


def test_the_table_has_each_way_and_says_what_is_computed() -> None:
    weft, dense = Run("weft", 40, 2), Run("dense", 40, 2)
    for run in (weft, dense):
        for rank in range(2):
            run.add(rank, steps(0, 40))
    weft.outcomes = [Outcome(300 << 20, 200 << 20)]
    one = Summary.of(weft, [3 << 20], batch=1000)
    two = Summary.of(dense, [6 << 20], batch=1000)
    assert cells(one) == ["40", "6.0 ms", "2.0 ms (33%)", "3.00 MiB", "300 MiB (+100)", "333,333"]
    assert cells(two)[3:5] == ["6.00 MiB computed", "no figure"]
    out = console(False, 120)
    out.print(figures_table([one, two]))
    assert "PyTorch dense" in written(out) and "6.00 MiB computed" in written(out)
