"""`weft bench --case real`: indices from files of packages, for which stand-ins lie here."""

import json
import os
import zipfile
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

import weft
from weft.base.pace import patient
from weft.cli.bench import command
from weft.cli.bench.cases import CASES, REAL, Case, answer, indices, sizes, values
from weft.cli.bench.measure import Job, coo_of, fault, parts, tables_of
from weft.cli.bench.real import CRITEO, NEIGHBOURS, TRACES, Source
from weft.cli.commands import app

WORDS, FILMS, ENTITIES = 333_213, 1_682, 34_628
HUB = 7  # an entity that is a neighbour of every thirtieth


def name_of(entity: int) -> str:
    return f"m.{entity:05}"  # sorted by name they are sorted by number


def write(folder: Path, trace: str, lines: list[str]) -> None:
    """A package of one version that ships the file of a trace, as installed."""
    source = TRACES[trace].source
    assert source is not None
    info = folder / f"{source.package}-1.2.3.dist-info"
    info.mkdir(exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: {source.package}\nVersion: 1.2.3\n"
    (info / "METADATA").write_text(text, encoding="utf-8")
    path = folder / source.file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which both packages are installed. They cannot be imported."""
    folder = tmp_path_factory.mktemp("site")
    counts = [f"word{number}\t{WORDS * 100 // (number + 1)}" for number in range(WORDS)]
    write(folder, "text", counts)
    # films in turn, as time goes; in the file the other way round
    times = range(12 * FILMS)
    rated = [f"{time % 943}\t{time % FILMS + 1}\t3\t{880_000_000 + time}" for time in times]
    head = "user_id:token\titem_id:token\trating:float\ttimestamp:float"
    write(folder, "ratings", [head, *reversed(rated)])
    ring = [(one, (one + 1) % ENTITIES) for one in range(ENTITIES)]
    spokes = [(one, HUB) for one in range(0, ENTITIES, 30)]
    triples = [f"{name_of(a)}\tknows\t{name_of(b)}" for a, b in ring + spokes]
    write(folder, "graph", ["head\trelation\ttail", *triples])
    return folder


@pytest.fixture(autouse=True)
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(site))
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", REAL)
def test_the_same_again_and_different_elsewhere(name: str) -> None:
    case = REAL[name].scaled(0.1)
    drawn = indices(case, 1, 7)
    assert torch.equal(indices(case, 1, 7), drawn)
    assert not torch.equal(indices(case, 2, 7), drawn)
    assert not torch.equal(indices(case, 1, 8), drawn)
    assert drawn.shape == (case.rows,) and drawn.dtype is torch.int64
    assert drawn.min() >= 0 and drawn.max() < case.height == REAL[name].height
    assert indices(replace(case, index_dtype="int32"), 1, 7).dtype is torch.int32


def test_words_come_in_bursts() -> None:
    text = replace(REAL["text"], rows=4096)
    by_one = Case("x", 4096, WORDS, distribution="zipf")
    distinct = [sizes(case, 4, 0).sizes.mean for case in (text, by_one)]
    assert 0.6 < distinct[0] / distinct[1] < 0.76
    # a word that comes again is near; words drawn one by one are as likely at any distance
    drawn = indices(text, 0, 0).numpy()
    near, far = (np.mean(drawn[distance:] == drawn[:-distance]) for distance in (5, 3000))
    assert near > far


def test_ranks_have_neighbouring_ratings_until_the_table_is_full() -> None:
    case = replace(REAL["ratings"], rows=500)
    films = torch.cat([indices(case, rank, 3) for rank in range(4)])
    assert torch.equal(films, (films[0] + torch.arange(2000)) % FILMS)
    assert sizes(case, 2, 3).union < sizes(case, 4, 3).union == FILMS


def test_entities_are_followed_by_their_neighbours() -> None:
    drawn = indices(replace(REAL["graph"], rows=ENTITIES), 0, 0).tolist()
    entities = []
    place = 0
    while place < 3000:
        entity, count = drawn[place], 3 + (drawn[place] % 30 == 0)
        ring = {(entity - 1) % ENTITIES, (entity + 1) % ENTITIES}
        spoke = {HUB} if entity % 30 == 0 else set()
        assert {*drawn[place + 1 : place + count]} == ring | spoke
        entities.append(entity)
        place += count
    assert len({*entities}) == len(entities) > 900  # none begins twice in one pass over all


def test_of_many_neighbours_some_are_taken() -> None:
    drawn = indices(replace(REAL["graph"], rows=3 * ENTITIES), 0, 0).tolist()
    spokes = [entity % 30 == 0 or entity in (HUB - 1, HUB + 1) for entity in drawn]
    runs = [spokes[place + 1 :].index(False) for place, one in enumerate(drawn) if one == HUB]
    # where it is a neighbour itself, what follows is another of that entity, or the next entity
    assert sorted(runs)[-2] < 4 and NEIGHBOURS <= max(runs) < NEIGHBOURS + 2


def test_more_than_all_entities_begin_again() -> None:
    drawn = indices(replace(REAL["graph"], rows=5 * ENTITIES), 0, 0).tolist()
    assert (len(drawn), len({*drawn})) == (5 * ENTITIES, ENTITIES)


def test_tables_have_the_heights_of_criteo() -> None:
    case = REAL["tables"]
    assert len(CRITEO) == 26 and (min(CRITEO), max(CRITEO)) == (3, 27_552)
    own = indices(case, 0, 0), values(case, 0, 0)
    tables = tables_of(case, *own)
    assert tuple(rows.height for rows in tables) == CRITEO
    assert [len(rows) for rows in tables] == [512] * 26  # a click has one index of each
    for rows in tables:
        rows.dense()  # which refuses an index that is not of its table
    dense = torch.cat([rows.dense() for rows in tables])
    assert torch.equal(dense, weft.Rows(*own, case.height).dense())


@pytest.mark.parametrize("form", ["rows", "coo", "dense"])
def test_results_of_many_tables_are_compared_with_the_answer(form: str) -> None:
    case = REAL["tables"].scaled(0.1)
    right = answer(case, 1, 0)
    tables = tables_of(case, right.indices, right.exact.float())
    make = {"rows": lambda rows: rows, "coo": coo_of, "dense": weft.Rows.dense}[form]
    result: list[Any] = [make(rows) for rows in tables]
    assert fault(parts(result), right) is None
    tables[-1].values[0, 3] += 1
    result[-1] = make(tables[-1])
    assert "1 of" in str(fault(parts(result), right))
    assert fault(parts(result[1:] + result[:1]), right) is not None


# The command.


def invoke(options: str) -> Result:
    return CliRunner().invoke(app, ["bench", *options.split()])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The jobs that would have been launched."""
    jobs: list[Job] = []

    def launched(
        ranks: int, target: object, args: tuple[Job, object], **more: object
    ) -> list[bool]:
        jobs.append(args[0])
        return [True] * ranks

    monkeypatch.setattr(command, "launch", launched)
    return jobs


def test_cases_by_name(asked: list[Job]) -> None:
    for given in ("real", "all", "all,real", "graph,zipf"):
        assert invoke(f"--case {given}").exit_code == 0
    found = [[case.name for case in job.cases] for job in asked]
    assert found == [[*REAL], [*CASES], [*CASES, *REAL], ["graph", "zipf"]]
    assert [case.fault() for case in REAL.values()] == [None] * len(REAL)


def test_data_keep_their_height(asked: list[Job]) -> None:
    assert invoke("--case real --size 0.5 --width 8").exit_code == 0
    assert [case.height for case in asked[0].cases] == [case.height for case in REAL.values()]
    assert asked[0].cases[1] == replace(REAL["ratings"], rows=2048, width=8)
    refused = invoke("--case ratings --height 9")
    assert refused.exit_code == 2
    assert "the height of ratings is that of its data, 1682" in words_of(refused)


def words_of(refused: Result) -> str:
    """The text of a refusal, without its frame."""
    return " ".join(refused.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("text", "its data are in the package wordsegment: pip install wordsegment"),
        ("graph", "its data are in the package recbole: pip install --no-deps recbole==1.2.1"),
    ],
)
def test_without_the_package_it_says_what_to_install(
    case: str, words: str, monkeypatch: pytest.MonkeyPatch, asked: list[Job]
) -> None:
    def nothing(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", nothing)
    refused = invoke(f"--case zipf,{case}")
    assert (refused.exit_code, asked) == (2, [])
    assert words in words_of(refused)
    assert invoke("--case tables,all").exit_code == 0  # these need nothing


def test_another_release_is_refused_with_the_remedy() -> None:
    source = Source("wordsegment", "pip install this", "x/y.txt")
    with pytest.raises(weft.WeftError, match=r"wordsegment 1\.2\.3 has 4 words, not 5: pip inst"):
        source.check("words", 4, 5)
    with pytest.raises(weft.WeftError, match=r"wordsegment 1\.2\.3, which has no x/y\.txt: pip"):
        source.read()


@pytest.fixture
def beside_a_wheel(site: Path, tmp_path: Path) -> str:
    """The beginning of a program for which wordsegment is installed and recbole is a wheel."""
    wheel = tmp_path / "recbole-1.2.3-py3-none-any.whl"
    words = tmp_path / "words"
    words.mkdir()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in filter(Path.is_file, site.rglob("*")):
            name = file.relative_to(site)
            if "recbole" in name.parts[0]:
                archive.write(file, name)
            else:
                (words / name).parent.mkdir(exist_ok=True)
                os.link(file, words / name)
    return f"import sys; sys.path[1:1] = {[str(wheel), str(words)]}\n"


def test_a_wheel_is_not_read_where_other_ranks_read_it(
    beside_a_wheel: str, programs: Callable[..., Any]
) -> None:
    """Ranks are forks of a process in which importlib has it open: they share its file position."""
    program = """
from importlib import metadata
from weft.cli.bench.real import TRACES
trace = TRACES["ratings"]
assert trace.missing() is None
opened = metadata.distribution("recbole").locate_file(trace.source.file).root.fp
before = opened.tell()
assert trace.source.read().startswith("user_id:token\titem_id:token")
assert opened.tell() == before
"""
    assert programs(beside_a_wheel + program).communicate() == ("", "")


def test_it_measures_what_is_installed_and_what_lies_in_a_wheel(
    beside_a_wheel: str, programs: Callable[..., Any], tmp_path: Path
) -> None:
    found = tmp_path / "found.json"
    line = "bench --ranks 2 --case real --size 0.02 --iters 1 --warmup 0 --algorithm gather"
    command = "import runpy; runpy.run_module('weft', run_name='__main__')"
    done = programs(beside_a_wheel + command, *line.split(), "--json", str(found))
    said = done.communicate(timeout=patient(200.0))
    assert done.returncode == 0, said
    rows = json.loads(found.read_text(encoding="utf-8"))["rows"]
    status = [(row["case"], row["by"], row["status"]) for row in rows]
    by = ("weft:gather", "torch", "horovod", "dense")
    refused = [("text", "dense")]  # 81 MiB
    assert status == [
        (case, who, "refused" if (case, who) in refused else "ok") for case in REAL for who in by
    ]
    # a list counts as one call, of the rows of all its tables
    [tables] = [row for row in rows if (row["case"], row["by"]) == ("tables", "weft:gather")]
    assert tables["algorithm"] == "gather" and tables["bytes_ratio"] >= 1
    assert tables["union"] == sizes(replace(REAL["tables"], rows=tables["rows"]), 2, 0).union
