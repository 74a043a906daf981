"""What prints as a table is one in a notebook, too: escaped, and in the notebook's own colours."""

import dataclasses
import re
from html.parser import HTMLParser

import pytest
import torch

import weft
from weft.base import notebook
from weft.testing import run


class Parsed(HTMLParser):
    """The rows of all tables, and the tags that are open."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.open: list[str] = []
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: object) -> None:
        assert tag in {"table", "tr", "th", "td", "div", "pre"}  # nothing that was not asked for
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("th", "td"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("th", "td"):
            self.rows[-1][-1] += data


def explained(group):
    rows = torch.arange(4000), torch.ones(4000, 40)
    tables = [rows, (torch.arange(3000), torch.ones(3000, 8, dtype=torch.float64))]
    return weft.explain(rows), weft.explain(tables), weft.explain(rows, op=torch.maximum)


@pytest.fixture(scope="module")
def explanations():
    return run(3, explained)[0]


@pytest.fixture
def alone():
    with weft.init():
        yield weft.explain((torch.arange(3), torch.ones(3)))


def test_an_explanation_is_the_table_that_it_prints(explanations):
    for said in explanations:
        assert repr(said) == str(said)
        parsed = Parsed(said._repr_html_())
        for call in said.calls or [said]:
            for line in call.lines:
                least, most = line.bytes
                least_ratio, most_ratio = (f"{each:.2f}" for each in line.of_bound)
                assert [
                    line.algorithm,
                    str(line.rounds),
                    str(line.messages),
                    str(least) if least == most else f"{least} to {most}",
                    least_ratio if least_ratio == most_ratio else f"{least_ratio} to {most_ratio}",
                    line.verdict,
                ] in parsed.rows


def test_the_chosen_one_is_above_and_what_is_ruled_out_below(explanations):
    _, _, said = explanations  # a function has no neutral element, which mask needs
    verdicts = [line.verdict for line in said.lines]
    assert verdicts[0] == "chosen"
    kinds = [verdict.partition(" ")[0] for verdict in verdicts]
    assert kinds == sorted(kinds, key=["chosen", "", "ruled"].index)
    assert {"", "ruled"} <= set(kinds)
    for kind in ("", "ruled"):
        names = [line.algorithm for line, of in zip(said.lines, kinds, strict=True) if of == kind]
        assert names == sorted(names)


def test_a_group_of_one_is_told_that_nothing_is_sent(alone):
    assert str(alone).startswith("1 rank, 3 rows in all")
    assert "the group has one rank" in alone._repr_html_()
    assert Parsed(alone._repr_html_()).rows == []


def test_a_grid_shows_its_ranks():
    with weft.init():
        assert Parsed(weft.Partition((1, 1))._repr_html_()).rows == [["0"]]

    def grids(group):
        two = weft.Partition((2, 2), ranks=[3, 1, 0, 2])
        return [each._repr_html_() for each in (two, weft.Partition(4), weft.Partition((2, 1, 2)))]

    two, one, three = run(4, grids)[0]
    assert Parsed(two).rows == [["3", "1"], ["0", "2"]]
    assert Parsed(one).rows == [["0", "1", "2", "3"]]
    assert three.startswith("<pre") and "Partition(2x1x2" in three


def test_what_is_in_force_is_a_table():
    config = weft.config()
    rows = Parsed(config._repr_html_()).rows
    assert rows[1:] == [[each.name, each.value, each.source] for each in config.settings]


def test_everything_is_escaped_and_in_the_colours_of_the_page(explanations, monkeypatch, tmp_path):
    nasty = "<script>alert('&')</script>"
    monkeypatch.chdir(tmp_path)  # where the cache is made, whose name is no absolute path
    monkeypatch.setenv("WEFT_CACHE_DIR", nasty)
    said = dataclasses.replace(explanations[0], device=nasty)
    pages = [weft.config()._repr_html_(), said._repr_html_()]
    pages += [notebook.table([nasty], [[nasty]]), notebook.preformatted(nasty)]
    for page in pages:
        assert "<script" not in page and "&lt;script&gt;" in page
        Parsed(page)
        for colours in re.findall(r"(?:color|background): ([^;\"]+)", page):
            assert colours in ("inherit", "none")
