"""Pages of the site whose text lies elsewhere in the repository: examples, changelog, contributing.

A hook of mkdocs (`hooks` in mkdocs.yml); not a page, so it is left out of the site. Each README of
`examples/` becomes a page with its programs below it, and `examples/index.md` lists them all.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted(path.parent.name for path in ROOT.glob("examples/*/README.md"))
GALLERY = "examples/index.md"

SOURCES = {
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "releasing.md": "RELEASING.md",
    **{f"examples/{name}.md": f"examples/{name}/README.md" for name in EXAMPLES},
}
"""The pages, each with the file that its text is in."""

_LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, and the pictures that they show."""
    from mkdocs.structure.files import File  # tests read the tables above without mkdocs

    for page, source in SOURCES.items():
        text = with_links_of_the_site(page, source, config.repo_url)
        if source.startswith("examples/"):
            text += _programs(Path(source).parent)
        files.append(File.generated(config, page, content=text))
    for picture in sorted(ROOT.glob("examples/*/*.png")):
        path = picture.relative_to(ROOT).as_posix()
        files.append(File.generated(config, path, abs_src_path=str(picture)))
    files.append(File.generated(config, GALLERY, content=_gallery()))
    return files


def with_links_of_the_site(page: str, source: str, repository: str) -> str:
    """A file's text, whose links to other files lead to their pages, or to the repository."""
    pages = {file: page for page, file in SOURCES.items()}
    folder = PurePosixPath(source).parent.as_posix()

    def link(match: re.Match[str]) -> str:
        target = normpath(f"{folder}/{match[1]}")
        anchor = match[2] or ""
        if target in pages:
            place = pages[target]
        elif target.startswith("docs/"):
            place = target.removeprefix("docs/")
        elif target.endswith(".png"):
            place = target
        else:
            return f"]({repository}/blob/main/{target}{anchor})"
        return f"]({relpath(place, PurePosixPath(page).parent)}{anchor})"

    return _LINK.sub(link, (ROOT / source).read_text(encoding="utf-8"))


def _programs(folder: Path) -> str:
    """The programs of an example, each folded up under its name."""
    sections = ["\n## Source\n"]
    for program in sorted((ROOT / folder).glob("*.py")):
        code = program.read_text(encoding="utf-8")
        fence = f"```python\n{code}```\n".replace("\n", "\n    ")
        sections.append(f'??? example "{program.name}"\n\n    {fence}')
    return "\n".join(sections)


def _gallery() -> str:
    """The list of all examples: title and first paragraph of each README."""
    lines = [
        "# Examples",
        "",
        "Whole programs, each of which checks its own result. `make examples` runs them all.",
        "",
    ]
    for name in EXAMPLES:
        readme = (ROOT / "examples" / name / "README.md").read_text(encoding="utf-8")
        title, paragraph = readme.split("\n\n")[:2]
        title = title.removeprefix("# ")
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
        lines.append(f"- **[{title}]({name}.md)**: {text}")
    return "\n".join(lines) + "\n"
