"""The manual is true: its Python runs, its commands exist, its tables are complete.

A fence that says `python` is executed, one that says `pycon` is a doctest; those of a page run in
order, in one namespace, in a group of one. A fence that cannot run here is preceded by the comment
`<!-- not run: why -->` and is only compiled.
"""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import re
import shlex
import textwrap
from pathlib import Path

import pytest
import torch.distributed as dist

import weft
from weft import cli
from weft.sparse import ALGORITHMS

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
ELSEWHERE = ("benchmarks", "examples", "recipe", "tools")
WITH_LINKS = {*PAGES, *(page for folder in ELSEWHERE for page in (ROOT / folder).rglob("*.md"))}
FENCE = re.compile(
    r"(?P<skip><!-- not run: \S.*? -->\n)?"
    r"^(?P<indent> *)```(?P<kind>\w*)[^\n]*\n(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


# of packages in the design's table: what else is named there, and files that go without a name
MORE_THAN_FILES = {
    "base": {"entry"},
    "testing": {"run", "check_algorithm"},
    "sparse": {"split"},
}
FILES_OF_A_KIND = {
    "compat": {"arguments"},
    "trainers": {"frameworks"},
    "cli": {"words"},
    "nn": {
        *("all_gather", "all_sum_reduce", "all_to_all", "broadcast", "halo", "repartition"),
        *("scatter", "zero_volume"),
    },
}


def name(page):
    return str(page.relative_to(ROOT))


def fences(page, *kinds):
    """(kind, code, line it begins on, whether it is to be run) of each fence of these kinds."""
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        if found["kind"] in kinds:
            line = text.count("\n", 0, found.start("code"))
            yield found["kind"], textwrap.dedent(found["code"]), line, found["skip"] is None


def load(path):
    """A file of Python that is no module of a package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


OUTSIDE = load(ROOT / "docs/outside.py")
WITH_PYTHON = [page for page in PAGES if any(fences(page, "python", "pycon"))]


@pytest.fixture
def undone(monkeypatch, tmp_path):
    """Whatever a page starts or registers is gone after it."""
    monkeypatch.chdir(tmp_path)
    yield
    weft.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name)
def test_what_a_page_shows_runs(page, undone):
    space = {"__name__": f"page {name(page)}"}
    for kind, code, line, runs in fences(page, "python", "pycon"):
        if kind == "python":
            # so many lines further down, tracebacks show the line of the page
            compiled = compile("\n" * line + code, str(page), "exec", dont_inherit=True)
            if runs:
                exec(compiled, space)
            continue
        example = doctest.DocTestParser().get_doctest(code, {}, name(page), str(page), line)
        example.globs = space
        said: list[str] = []
        doctest.DocTestRunner().run(example, out=said.append, clear_globs=False)
        assert not said, "".join(said)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_code_is_no_wider_than_a_page(page):
    """docs/style.css makes room for lines of 100 characters; what programs print is folded."""
    for _, code, line, _ in fences(page, "python", "pycon", "yaml"):
        for number, text in enumerate(code.splitlines(), start=line + 1):
            assert len(text) <= 100, f"{name(page)}:{number}"


@pytest.mark.parametrize("start", ["README.md", "docs/index.md", "docs/start.md", "docs/ddp.md"])
def test_what_a_person_meets_first_is_run(start):
    assert any(runs for *_, runs in fences(ROOT / start, "python", "pycon"))


def options_of(command):
    """The options that a command takes."""
    (commands,) = (action.choices for action in cli.parser()._actions if action.choices)
    return {flag for action in commands[command]._actions for flag in action.option_strings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_have_the_options_that_are_shown(page):
    for _, code, line, _ in fences(page, "console", "text"):
        for shown in code.splitlines():
            found = re.search(r"\bweft (demo|bench|\w+)\b(.*)", shown)
            if not (shown.startswith("$ ") and found):
                continue
            given = shlex.split(found[2], comments=True)
            flags = {word.split("=")[0] for word in given if word.startswith("--")}
            assert flags <= options_of(found[1]), f"{name(page)}:{line}: {shown}"


@pytest.mark.parametrize("page, command", [("docs/demo.md", "demo"), ("docs/bench.md", "bench")])
def test_options_in_the_prose_exist(page, command):
    known = options_of(command) - {"-h", "--help"}
    prose = FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    shown = set(re.findall(r"`(--[a-z-]+)", prose))
    assert shown == known


def rows_of_design(heading):
    """The cells of each row of the first table below a heading of the page on the design."""
    text = (ROOT / "docs/design.md").read_text(encoding="utf-8").split(f"\n## {heading}\n")[1]
    lines = [line for line in text.split("\n## ")[0].splitlines() if line.startswith("| `")]
    return [line.strip("| ").split(" | ") for line in lines]


def test_the_packages_of_the_design_name_every_file():
    source = ROOT / "src/weft"
    rows = {cells[0].strip("`/"): cells[1] for cells in rows_of_design("Packages")}
    assert rows.keys() == {each.parent.name for each in source.glob("*/__init__.py")}
    for package, text in rows.items():
        named = {each.strip("/") for each in re.findall(r"`([a-z_]+/?)`", text)}
        files = {each.stem for each in (source / package).iterdir()} - {"__init__", "__pycache__"}
        assert named - files - MORE_THAN_FILES.get(package, set()) == set(), package
        assert files - named - FILES_OF_A_KIND.get(package, set()) == set(), package


def test_the_path_of_a_call_leads_along_files():
    for where, *_ in rows_of_design("The path of one call"):
        for path in re.findall(r"`([^`]+)`", where):
            assert (ROOT / "src/weft" / path).exists(), path


@pytest.mark.parametrize("algorithm", [*sorted(ALGORITHMS), "plain"])
def test_every_algorithm_is_described(algorithm):
    text = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
    [row] = re.findall(rf"\n\| \[`{algorithm}`\]\(#{algorithm}\) \|(.+)\|\n", text)
    messages, received, best = row.split(" | ")
    assert messages and received and best
    section = text.split(f"\n## {algorithm}\n")[1].split("\n## ")[0]
    for part in ("Idea", "Steps", "Workspace", "Order of addition", "Serves", "Source"):
        assert f"**{part}" in section, part


def test_every_environment_variable_is_described():
    quoted = re.compile(r"[\"'`](WEFT_[A-Z_]+)")
    sources = (ROOT / "src").rglob("*.py")
    read = {found for file in sources for found in quoted.findall(file.read_text("utf-8"))}
    table = (ROOT / "docs/sharp-bits.md").read_text(encoding="utf-8")
    assert read == set(re.findall(r"^\| `(WEFT_[A-Z_]+)` \|", table, re.MULTILINE))


@pytest.mark.parametrize(
    "module, pages",
    [
        ("sar", ["coming-from-sar.md"]),
        ("oneccl.request", ["coming-from-oneccl.md", "api/oneccl.md"]),
        ("oneccl.callback", ["coming-from-oneccl.md", "api/oneccl.md"]),
        ("oneccl.event", ["coming-from-oneccl.md", "api/oneccl.md"]),
    ],
)
def test_public_names_of_a_face_are_described(module, pages):
    face = importlib.import_module(f"weft.compat.{module}")
    exported = getattr(face, "__all__", vars(face))
    names = {each for each in exported if each[0] != "_" and each != "comm"}
    text = "".join((ROOT / "docs" / page).read_text(encoding="utf-8") for page in pages)
    assert {each for each in names if not re.search(rf"\b{each}\b", text)} == set()


@pytest.mark.parametrize("page", sorted(WITH_LINKS), ids=name)
def test_links_lead_somewhere_in_the_clone(page):
    """docs/outside.py has them lead there in the site, too, which is built strictly."""
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", prose):
        assert "://" in target or (page.parent / target).exists(), target


def test_links_of_a_page_from_elsewhere_lead_to_the_site_or_the_repository(monkeypatch):
    readme = (
        "[code](a.py) [manual](../../docs/start.md#install) [other](../b/README.md) ![](p.png) "
        "[far](https://example.org/x.md) [here](#source)"
    )
    sources = {"examples/a.md": "examples/a/README.md", "examples/b.md": "examples/b/README.md"}
    monkeypatch.setattr(OUTSIDE, "SOURCES", sources)
    assert OUTSIDE.with_links_of_the_site(
        readme, "examples/a.md", "examples/a/README.md", "https://host/repo"
    ) == (
        "[code](https://host/repo/blob/main/examples/a/a.py) [manual](../start.md#install) "
        "[other](b.md) ![](a/p.png) [far](https://example.org/x.md) [here](#source)"
    )
    page = "[all](../examples) [one](../examples/b/README.md#run) [tool](../tools/x) [next](ddp.md)"
    assert OUTSIDE.with_links_of_the_site(
        page, "start.md", "docs/start.md", "https://host/repo"
    ) == (
        "[all](examples/index.md) [one](examples/b.md#run) "
        "[tool](https://host/repo/blob/main/tools/x) [next](ddp.md)"
    )


def test_the_readme_has_one_place_for_figures():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("<!-- figures -->") == text.count("<!-- /figures -->") == 1
    assert text.index("<!-- figures -->") < text.index("<!-- /figures -->")


def test_the_search_finds_fences(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# x\n\n```python\na = 1\n```\n\n<!-- not run: no b here -->\n```python\nimport b\n```\n"
        "\n- item\n\n  ```pycon\n  >>> 1\n  1\n  ```\n\n```text\nc\n```\n"
    )
    assert list(fences(page, "python", "pycon")) == [
        ("python", "a = 1\n", 3, True),
        ("python", "import b\n", 8, False),
        ("pycon", ">>> 1\n1\n", 14, True),
    ]
