"""What a release says of itself agrees, and its workflows can be trusted."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

import weft
from weft.base.pace import patient
from weft.cli.demo.command import EXTRA

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml"))  # config.yml is no form
RECIPE = yaml.safe_load((ROOT / "recipe/recipe.yaml").read_text("utf-8"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
ADDRESSES = (
    "README.md",
    "SECURITY.md",
    "CODE_OF_CONDUCT.md",
    ".github/ISSUE_TEMPLATE/config.yml",
    "recipe/recipe.yaml",
    "CITATION.cff",
    "mkdocs.yml",
    "RELEASING.md",
    "pyproject.toml",
)


@pytest.mark.parametrize("file", ADDRESSES)
def test_all_files_name_the_same_repository_and_site(file):
    text = (ROOT / file).read_text("utf-8")
    places = r"https://(?:raw\.githubusercontent|github)\.com/([\w-]+/weft)\b"
    repositories = {f"https://github.com/{name}" for name in re.findall(places, text)}
    sites = set(re.findall(r"https://weft\.[\w.]+", text))
    assert repositories <= {PROJECT["urls"]["Repository"]}
    assert sites <= {PROJECT["urls"]["Documentation"]}


def packages_of(requirements):
    return {re.match(r"[\w-]+", each)[0] for each in requirements}


def test_the_citation_has_the_version():
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\nversion: {weft.__version__}\n" in citation


def jobs_of(workflow):
    """A workflow's jobs by name, each as text: what follows its line, up to the next job's."""
    text = (ROOT / ".github/workflows" / workflow).read_text("utf-8")
    _, *pieces = re.split(r"^  (\w+):$", text.partition("\njobs:\n")[2], flags=re.MULTILINE)
    jobs = dict(zip(pieces[::2], pieces[1::2], strict=True))
    assert jobs.keys() == yaml.safe_load(text)["jobs"].keys()
    return jobs


def test_the_classifiers_are_the_versions_and_systems_that_the_workflow_runs():
    jobs = jobs_of("ci.yml")
    trials = jobs.pop("trials")
    text = "".join(jobs.values())
    run = {*re.findall(r'python(?:-version)?: "(3\.\d+)"', text)}
    said = {each.rpartition(" ")[2] for each in PROJECT["classifiers"] if ":: 3." in each}
    assert run == said
    assert PROJECT["requires-python"] == f">={min(said, key=lambda v: int(v[2:]))}"
    assert {*re.findall(r"runs-on: (.+)", text)} == {"ubuntu-latest"}
    systems = [each for each in PROJECT["classifiers"] if each.startswith("Operating System")]
    assert systems == ["Operating System :: POSIX :: Linux"]
    assert "\n    continue-on-error: true\n" in trials


def test_the_recipe_needs_what_the_package_needs():
    assert RECIPE["context"]["version"] == weft.__version__
    assert f">={RECIPE['context']['python_min']}" == PROJECT["requires-python"]
    assert RECIPE["package"]["name"] == PROJECT["name"]
    python, *needed, system = RECIPE["requirements"]["run"]
    assert (python, system) == ("python >=${{ python_min }}", "__unix")
    ours = PROJECT["dependencies"]
    ours = [re.sub("^torch", "pytorch", each.partition(";")[0]) for each in ours]
    assert [each.replace(" ", "") for each in needed] == ours


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_forms_of_issues_ask_under_names_of_their_own(form):
    asked = yaml.safe_load(form.read_text("utf-8"))
    assert asked.keys() >= {"name", "description", "body"}
    names = [field["id"] for field in asked["body"]]
    assert len({*names}) == len(names)
    assert all(field["attributes"]["label"] for field in asked["body"])


def readme_of_the_package_index():
    """As the build writes it into the metadata."""
    metadata = ProjectMetadata(str(ROOT), PluginManager())
    assert metadata.core.readme_content_type == "text/markdown"
    return metadata.core.readme


def test_links_of_the_package_index_are_absolute():
    text = readme_of_the_package_index()
    links = set(re.findall(r"\]\(([^)]*)\)", text))
    assert not {each for each in links if not each.startswith("https://")}
    urls, tag = PROJECT["urls"], f"v{weft.__version__}"
    files = urls["Repository"].replace("github.com", "raw.githubusercontent.com")
    anchor = "why-plain-distributeddataparallel-may-crash-on-a-cpu"
    assert links >= {
        f"{urls['Documentation']}/en/latest/ddp.html#{anchor}",
        f"{urls['Documentation']}/en/latest/start.html",
        f"{urls['Repository']}/blob/{tag}/CONTRIBUTING.md",
        f"{files}/{tag}/docs/images/speed.svg",
    }


def test_the_package_index_shows_the_readme_but_for_its_links():
    def without_links(text):
        return re.sub(r"\]\([^)]*\)", "]", text)

    repository = (ROOT / "README.md").read_text("utf-8")
    assert without_links(readme_of_the_package_index()) == without_links(repository)


def test_only_the_demo_needs_rich_and_matplotlib():
    """What hides the two from the library is tests/cli/test_without_extra.py."""
    assert packages_of(PROJECT["dependencies"]).isdisjoint(EXTRA)
    assert packages_of(PROJECT["optional-dependencies"]["demo"]) == set(EXTRA)


@pytest.mark.parametrize("page", ["README.md", "RELEASING.md", "docs/start.md", "docs/demo.md"])
def test_pages_that_install_for_the_demo_name_its_extra(page):
    text = (ROOT / page).read_text("utf-8")
    assert re.search(r"pip install '(\.|weft-collectives)\[demo\]", text)


def test_nothing_installs_the_other_project_that_is_called_weft():
    """The import is `weft`; the distribution of that name on the package index is a stranger's."""
    files = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    project = re.compile(
        r"\bweft\[\w+\]"  # an extra of it
        r"|pip3? (install|download)[^`\n]*[ '\"]weft(?![\w./-])"
        r"|^(name =|dependencies = \[) *\"weft\"",
        re.MULTILINE,
    )
    found = {}
    for file in files:
        path = ROOT / file
        if path == Path(__file__) or path.suffix in (".png", ".gz") or not path.is_file():
            continue
        if lines := [match[0] for match in project.finditer(path.read_text("utf-8", "replace"))]:
            found[file] = lines
    assert found == {"docs/start.md": ["pip install weft"]}  # which says not to
    assert PROJECT["name"] == "weft-collectives"


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_pin_their_actions_and_start_without_rights(workflow):
    text = workflow.read_text("utf-8")
    actions = re.findall(r"uses: (\S+)(.*)", text)
    for action, comment in actions:
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), f"{action} has no version beside it"
    assert "\npermissions:\n  contents: read\n" in text


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_make_what_the_makefile_has(workflow):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    text = workflow.read_text("utf-8")
    for target in re.findall(r"\bmake ([a-z]+)", text):
        assert target in targets
    for script in re.findall(r"(?:bash|python) ((?:\.ci|tools)/\S+)", text):
        assert (ROOT / script).exists()


def released(folder, version="0.2.0", changelog="## [0.2.0] - 2027-01-31"):
    """A project whose files are of 0.2.0, but for what is given."""
    (folder / "src/weft").mkdir(parents=True)
    (folder / "src/weft/version.py").write_text(f'__version__ = "{version}"\n')
    (folder / "CITATION.cff").write_text("version: 0.2.0\n")
    (folder / "CHANGELOG.md").write_text(f"# Changelog\n\n{changelog}\n")
    return folder


def check(folder, tag):
    shutil.copy(ROOT / "tools/release-check", folder / "release-check")
    command = [sys.executable, "release-check", tag]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=patient(60.0)
    )


def test_a_release_that_agrees_passes(tmp_path):
    done = check(released(tmp_path), "v0.2.0")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "fault, says",
    [
        ({"version": "0.1.0"}, "src/weft/version.py has version 0.1.0"),
        ({"changelog": "## [0.1.0] - 2026-12-01"}, "CHANGELOG.md has no section [0.2.0]"),
        ({"changelog": "## [0.2.0] - Unreleased"}, "dates 0.2.0 as 'Unreleased'"),
    ],
)
def test_a_release_that_differs_is_refused(tmp_path, fault, says):
    done = check(released(tmp_path, **fault), "v0.2.0")
    assert done.returncode == 1
    assert says in done.stderr
