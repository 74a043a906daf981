"""Pages of the site whose text lies elsewhere in the repository, and the links of all pages.

A hook of mkdocs (`hooks` in mkdocs.yml); not a page, so it is left out of the site. Each README of
`examples/` becomes a page with its programs below it, and `examples/index.md` lists them all. All
pages link to files of the repository, as a clone or a forge shows them; in the site these links
lead to the pages that the files have become, or to the repository.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

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

_FROM_ELSEWHERE = re.compile(r'<(?:script|img|iframe)\b[^>]* src="((?:https?:)?//[^"]*)"')
_LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, and the pictures that they show."""
    from mkdocs.structure.files import File  # tests read the tables above without mkdocs

    for page, source in SOURCES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        text = with_links_of_the_site(text, page, source, config.repo_url)
        if source.startswith("examples/"):
            text += _programs(Path(source).parent)
        files.append(File.generated(config, page, content=text))
    for picture in sorted(ROOT.glob("examples/*/*.png")):
        path = picture.relative_to(ROOT).as_posix()
        files.append(File.generated(config, path, abs_src_path=str(picture)))
    files.append(File.generated(config, GALLERY, content=_gallery()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The text of a page of `docs/`, with links of the site."""
    path = page.file.src_uri
    if page.file.generated_by is not None:  # above, with such links
        return markdown
    return with_links_of_the_site(markdown, path, f"docs/{path}", config.repo_url)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Refuse a page whose scripts or pictures another host has: the site serves without a network.

    Raises:
        PluginError: it has one.
    """
    from mkdocs.exceptions import PluginError

    if found := _FROM_ELSEWHERE.search(output):
        raise PluginError(f"{page.file.src_uri} loads {found[1]}: bring it into docs/")
    return output


def with_links_of_the_site(text: str, page: str, source: str, repository: str) -> str:
    """A page's text, whose links to files lead to their pages, or to the repository.

    Args:
        text: what the file has.
        page: where it is in the site.
        source: where it is in the repository.
        repository: its address.
    """
    pages = {file: page for page, file in SOURCES.items()} | {"examples": GALLERY}
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

    return _LINK.sub(link, text)


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
