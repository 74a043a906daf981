"""What `weft bench` prints and writes: columns that people and programs read, and a file."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from weft.cli.bench.cases import CASES
from weft.cli.bench.results import VERSION, Row, Shown, compared, summary
from weft.cli.counted import Counted
from weft.sparse import Hosts, Sizes

HEAD = {"weft": "0", "torch": "2", "python": "3", "kernels": "numba 1", "ranks": 4, "hosts": 1}
HEAD |= {"threads": 1, "cores": 2, "iters": 3, "warmup": 1, "checked": True, "seed": 0}
HEAD |= {"link": 1e9, "unprivileged": False}
CASE = CASES["uniform"]
SIZES = Sizes(4, 200_000, 50_000, 50_000, CASE.height, 256, 256)
COUNTED = Counted(SIZES, 185_000, ((50_000, 150_000),) * 4)
BETA = 8e-9
PEERS = ("torch", "horovod", "dense")


def rows() -> list[Row]:
    ran = {"algorithm": "split", "messages": 6}
    records = [SimpleNamespace(**ran, sent_bytes=sent) for sent in (50e6, 52e6)]
    ok = ("ok", "")
    busy = [0.01, 0.03, 0.08]
    found = [
        summary(CASE, COUNTED, BETA, "weft:auto", ok, [0.1, 0.2, 0.4], records, busy),
        summary(CASE, COUNTED, BETA, "torch", ok, [0.5, 0.6, 0.7], []),
        summary(CASE, COUNTED, BETA, "horovod", ("wrong", "one bit"), [], []),
        summary(CASE, COUNTED, BETA, "dense", ("refused", "too large"), [], []),
    ]
    return list(compared(found))


def shown(link: bool = True, file: Path | None = None, **console: bool | int | None) -> list[str]:
    out = io.StringIO()
    with Shown(Console(file=out, **console), PEERS, link, file) as there:  # type: ignore[arg-type]
        doing = "doing", ("uniform", "working", 0.25)
        for found in (("head", HEAD), doing, *(("row", row) for row in rows())):
            there.show(found)
    return out.getvalue().splitlines()


def test_figures_of_a_row() -> None:
    auto, torch, horovod, dense = rows()
    times = {name: auto[f"{name}_seconds"] for name in ("least", "median", "most")}
    assert times == {"least": 0.1, "median": 0.2, "most": 0.4}
    assert auto["first_quartile_seconds"] == pytest.approx(0.15)
    assert auto["third_quartile_seconds"] == pytest.approx(0.3)
    assert auto["core_seconds"] == 0.03 and torch["core_seconds"] is None
    assert auto["algorithm"] == "split" and torch["algorithm"] is None
    assert (auto["sent_bytes"], auto["most_bytes"], auto["messages"]) == (51e6, 52e6, 6)
    assert auto["bytes_ratio"] == pytest.approx(51e6 / COUNTED.bound)
    assert auto["bound_seconds"] == pytest.approx(COUNTED.bound * BETA)
    assert auto["time_ratio"] == pytest.approx(0.2 / (COUNTED.bound * BETA))
    assert auto["torch_ratio"] == pytest.approx(3.0)
    assert auto["horovod_ratio"] is None  # nobody is compared with what is wrong
    assert torch["torch_ratio"] is None and torch["bytes_ratio"] is None
    assert horovod["median_seconds"] is None and dense["least_seconds"] is None


def test_with_several_ranks_on_a_host_the_bound_is_that_of_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hosts = SIZES.but(hosts=Hosts((0, 0, 1, 1)))
    counted = Counted(hosts, 185_000, ((90_000, 95_000), (95_000, 90_000)))
    row = summary(CASE, counted, BETA, "weft:auto", ("ok", ""), [0.3], [])
    assert row["host_bound_bytes"] == 95_000 * 260
    assert row["least_time_seconds"] == pytest.approx(95_000 * 260 * 8e-9)
    assert row["least_time_ratio"] == pytest.approx(0.3 / (95_000 * 260 * 8e-9))
    assert row["bound_bytes"] == COUNTED.bound  # that of a rank is beside it
    for hosts, link, seen in (
        (1, True, set()),
        (2, True, {"hostMB", "least-ms", "xleast"}),
        (2, False, {"hostMB"}),  # the bytes are known without a link, their time is not
        (4, True, set()),
    ):
        monkeypatch.setitem(HEAD, "hosts", hosts)
        title = next(line for line in shown(link) if line.startswith("#case"))
        assert {"hostMB", "least-ms", "xleast"} & {*title.split()} == seen


def test_the_bound_of_hosts_is_shown_in_bytes_and_in_time() -> None:
    hosts = SIZES.but(hosts=Hosts((0, 0, 1, 1)))
    counted = Counted(hosts, 185_000, ((90_000, 95_000), (95_000, 90_000)))
    out = io.StringIO()
    with Shown(Console(file=out), (), True) as there:
        there.show(("head", HEAD | {"hosts": 2}))
        there.show(("row", summary(CASE, counted, BETA, "weft:auto", ("ok", ""), [0.3], [])))
    *_, title, line = out.getvalue().splitlines()
    cells = dict(zip(title[1:].split(), line.split(), strict=True))
    assert cells["hostMB"] == "24.7"  # 95,000 rows of 260 bytes
    assert cells["least-ms"] == "198"  # of 8 ns a byte
    assert cells["xleast"] == "1.52"


def test_no_bound_and_no_link_give_no_ratio() -> None:
    alone = Counted(Sizes(1, 5, 5, 5, 9, 256, 256), 5, ((5, 0),))
    row = summary(CASE, alone, None, "weft:auto", ("ok", ""), [0.1], [])
    assert row["bytes_ratio"] is None and row["time_ratio"] is None
    assert row["first_quartile_seconds"] == row["third_quartile_seconds"] == 0.1


def test_rows_of_the_average_rank_are_counted_whole() -> None:
    few = Counted(Sizes(4, 88, 23, 21, CASE.height, 256, 256), 60, ((22, 50),) * 4)
    out = io.StringIO()
    with Shown(Console(file=out), PEERS, False) as there:
        there.show(("row", summary(CASE, few, None, "weft:auto", ("ok", ""), [0.1], [])))
    assert out.getvalue().split()[1:3] == ["22", "60"]


def test_columns_are_split_by_white_space_under_their_titles() -> None:
    lines = shown()
    title = next(line for line in lines if line.startswith("#case"))
    data = [line for line in lines if not line.startswith("#")]
    assert [len(line.split()) for line in data] == [len(title[1:].split())] * 4
    assert dict(zip(title[1:].split(), data[0].split(), strict=True)) == {
        "case": "uniform",
        "k": "50000",
        "union": "185000",
        "by": "weft:auto",
        "algorithm": "split",
        "ms": "200",
        "spread": "150..300",
        "cpu": "30.0",
        "MB": "51.0",
        "xbound": "1.38",
        "xlink": "0.67",
        "torch/x": "3.00",
        "horovod/x": "-",
        "dense/x": "-",
    }
    assert ["WRONG" in data[2], "REFUSED" in data[3]] == [True, True]
    assert title.index(" by") == data[0].index(" weft:auto")
    assert title.index("ms") + 2 == data[0].index(" 200 ") + 4
    assert "xlink" not in "".join(line for line in shown(link=False) if line[:2] != "# ")


def test_algorithms_of_a_list_are_one_column() -> None:
    ran = {"algorithm": "gather and split", "messages": 6, "sent_bytes": 50e6}
    out = io.StringIO()
    with Shown(Console(file=out), PEERS, False) as there:
        row = summary(CASE, COUNTED, None, "weft:auto", ("ok", ""), [0.1], [SimpleNamespace(**ran)])
        there.show(("row", row))
    assert out.getvalue().split()[4] == "gather+split"


def test_reasons_and_versions_are_comments() -> None:
    comments = "\n".join(line for line in shown() if line.startswith("#"))
    for words in (
        "torch 2, python 3, kernels numba 1, ranks 4",
        "horovod wrong: one bit",
        "uniform dense refused: too large",
        "Horovod's way, in torch",
    ):
        assert words in comments


def test_a_terminal_has_the_same_lines_and_what_goes_on() -> None:
    there = shown(force_terminal=True, width=200, color_system=None)
    assert "uniform: working" in "".join(there) and "25%" in "".join(there)
    for line in shown():
        assert any(seen.endswith(line) for seen in there), line


def test_a_narrow_terminal_has_the_columns_that_fit_and_says_which_do_not() -> None:
    there = shown(force_terminal=True, width=80, color_system=None)
    (title,) = [line[line.index("#case") :] for line in there if "#case" in line]
    assert len(title) <= 80
    assert title[1:].split() == ["case", "by", "ms", "xbound", "torch/x", "horovod/x", "dense/x"]
    for line in there:
        if line.startswith("# ") and "peer/x" in line:
            assert len(line) <= 80 and "xlink" not in line
    text = " ".join(line.removeprefix("# ") for line in there)
    assert "no room here for spread, cpu, k" in text and "write --csv" in text


def test_the_legend_explains_the_columns_that_there_are() -> None:
    legend = " ".join(line for line in shown(link=False) if line.startswith("# "))
    assert "xbound: bytes sent" in legend and "peer/x: " in legend
    for title in ("xlink", "hostMB", "least-ms", "xleast", "link: bits"):
        assert title not in legend


def test_a_file_has_a_version_and_rows_of_plain_values(tmp_path: Path) -> None:
    shown(file=tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["version"] == VERSION == 3
    auto, _, horovod, _ = found["rows"]
    assert HEAD.items() <= auto.items()
    assert auto["height"] == 1_000_000 and auto["median_seconds"] == 0.2
    assert auto["torch_ratio"] == pytest.approx(3.0)
    assert horovod["status"] == "wrong" and horovod["median_seconds"] is None
    for row in found["rows"]:
        assert list(row) == list(auto)  # all have the same columns
        assert not [value for value in row.values() if isinstance(value, list | dict)]


def test_the_fields_of_a_file_are_those_of_its_version() -> None:
    """Whoever changes one also changes the version, and says so in the changelog."""
    head = " ".join(HEAD)
    setting = "case rows height width distribution ids values dtype index_dtype op wire_dtype"
    sizes = "distinct total union by algorithm status why"
    times = " ".join(
        f"{which}_seconds"
        for which in ("least", "first_quartile", "median", "third_quartile", "most")
    )
    sent = "core_seconds sent_bytes most_bytes messages bound_bytes bound_seconds bytes_ratio"
    sent += " host_bound_bytes least_time_seconds time_ratio least_time_ratio"
    ratios = "torch_ratio horovod_ratio dense_ratio"
    assert [*HEAD, *rows()[0]] == f"{head} {setting} {sizes} {times} {sent} {ratios}".split()


def test_a_rank_alone_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--ranks 4" not in "".join(shown())
    monkeypatch.setitem(HEAD, "ranks", 1)
    assert "--ranks 4" in "".join(shown())
