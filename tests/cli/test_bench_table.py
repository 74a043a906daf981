"""What `weft bench` prints: columns that programs read, and the terminal's table."""

import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from weft.cli.bench.cases import CASES, Sizes
from weft.cli.bench.results import Head, Row, Shown, summary

HEAD = Head("0", "2", "3", "numba 1", 4, 1, 1, 2, iters=3, warmup=1, checked=True, seed=0, link=1e9)
CASE = CASES["uniform"]
COUNTED = Sizes(ranks=4, total=200_000, union=185_000, bound_bytes=10e6)


def rows() -> list[Row]:
    records = [SimpleNamespace(algorithm="gather", sent_bytes=s, messages=6) for s in (11e6, 13e6)]
    found = [
        summary(CASE, COUNTED, "weft:auto", "ok", "", [0.1, 0.2, 0.4], records, link=1e9),
        summary(CASE, COUNTED, "torch", "ok", "", [0.5, 0.6, 0.7], [None, None], link=1e9),
        summary(CASE, COUNTED, "horovod", "wrong", "one bit", link=1e9),
        summary(CASE, COUNTED, "dense", "refused", "too large", link=1e9),
    ]
    return [row.beside(found) for row in found]


def plain(link: bool = True) -> list[str]:
    out = io.StringIO()
    with Shown(Console(file=out), ("torch", "horovod", "dense"), link) as shown:
        for found in (HEAD, "working", *rows()):
            shown.show(found)
    return out.getvalue().splitlines()


def test_figures_of_a_row() -> None:
    auto, torch, horovod, dense = rows()
    assert auto.median == 0.2 and auto.quartiles == (pytest.approx(0.15), pytest.approx(0.3))
    assert auto.chosen == "gather" and torch.chosen is None
    assert (auto.sent_bytes, auto.most_bytes, auto.messages) == (12e6, 13e6, 6)
    assert auto.bytes_ratio == pytest.approx(1.2)
    assert auto.bound_seconds == pytest.approx(0.08)
    assert auto.time_ratio == pytest.approx(2.5)
    assert auto.times == {"torch": pytest.approx(3.0)}  # nobody is compared with a wrong result
    assert torch.times == {} and torch.bytes_ratio is None
    assert horovod.median is None and dense.quartiles is None


def test_no_bound_and_no_link_give_no_ratio() -> None:
    alone = summary(CASE, Sizes(1, 5, 5, 0.0), "weft:auto", "ok", "", [0.1], [], link=None)
    assert alone.bytes_ratio is None and alone.time_ratio is None
    assert alone.quartiles == (0.1, 0.1)


def test_plain_columns_are_split_by_white_space() -> None:
    lines = plain()
    head = next(line for line in lines if line.startswith("#case"))[1:].split()
    data = [line.split() for line in lines if not line.startswith("#")]
    assert [len(line) for line in data] == [len(head)] * 4
    auto = dict(zip(head, data[0], strict=True))
    assert auto == {
        "case": "uniform",
        "k": "50000",
        "union": "185000",
        "by": "weft:auto",
        "algorithm": "gather",
        "ms": "200.0",
        "spread": "150.0..300.0",
        "MB": "12.00",
        "xbound": "1.20",
        "xlink": "2.50",
        "torch/x": "3.00",
        "horovod/x": "-",
        "dense/x": "-",
    }
    assert [dict(zip(head, line, strict=True))["ms"] for line in data[2:]] == ["WRONG", "REFUSED"]


def test_titles_stand_over_their_columns() -> None:
    lines = plain()
    title = next(line for line in lines if line.startswith("#case"))
    auto = next(line for line in lines if "weft:auto" in line)
    for word, cell in (("by", "weft:auto"), ("algorithm", "gather")):
        assert title.index(f" {word}") == auto.index(f" {cell}")
    assert title.index("ms") + 2 == auto.index("200.0") + 5


def test_reasons_and_versions_are_comments() -> None:
    comments = [line for line in plain() if line.startswith("#")]
    assert any("torch 2" in line and "numba 1" in line for line in comments)
    assert any("uniform horovod wrong: one bit" in line for line in comments)
    assert any("Horovod's way, in torch" in line for line in comments)
    assert any("uniform dense refused: too large" in line for line in comments)


def test_without_a_link_there_is_no_column_for_it() -> None:
    title = next(line for line in plain(link=False) if line.startswith("#case"))
    assert "xlink" not in title


def test_the_terminals_table_has_the_same_figures() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=160, color_system=None)
    with Shown(console, ("torch", "horovod", "dense"), True) as shown:
        for found in (HEAD, *rows(), *(replace(row, case="next") for row in rows())):
            shown.show(found)
    text = out.getvalue()
    for cell in ("50000", "weft:auto", "gather", "200.0", "150.0..300.0", "1.20", "3.00", "WRONG"):
        assert cell in text
    assert "one bit" in text and "numba 1" in text
    assert "next" in text


@pytest.mark.parametrize(("terminal", "width", "plain"), [(1, 160, 0), (1, 80, 1), (0, 160, 1)])
def test_a_table_only_where_it_fits(terminal: int, width: int, plain: int) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=bool(terminal), width=width)
    with Shown(console, ("torch",), True) as shown:
        shown.show(HEAD)
    assert ("#case" in out.getvalue()) == bool(plain)


def test_json_has_everything(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    with Shown(Console(file=io.StringIO()), ("torch",), True, file) as shown:
        for each in (HEAD, *rows()):
            shown.show(each)
    found = json.loads(file.read_text())
    assert found["head"]["link"] == 1e9
    auto = found["rows"][0]
    assert auto["seconds"] == [0.1, 0.2, 0.4]
    assert auto["setting"]["height"] == 1_000_000
    assert auto["times"]["torch"] == pytest.approx(3.0)
    assert found["rows"][2]["status"] == "wrong" and found["rows"][2]["median"] is None


def test_a_rank_alone_is_told_so() -> None:
    assert any("--ranks 4" in line for line in replace(HEAD, ranks=1).lines())
    assert not any("--ranks 4" in line for line in HEAD.lines())
