"""How what prints as a table looks in a notebook: HTML in the notebook's own colours.

Everything is in the colour of the text around it, so that it is seen on light and on dark pages
alike, and whatever it is given is escaped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from html import escape

_CELL = "padding: 2px 10px; border: 0; background: none"


def table(
    titles: Sequence[object],
    rows: Sequence[Sequence[object]],
    *,
    left: Collection[int] = (0,),
    bold: Collection[int] = (),
    faint: Collection[int] = (),
) -> str:
    """A table as HTML.

    Args:
        titles: of the columns; none: no line for them.
        rows: the cells, each shown as its text.
        left: numbers of the columns that stand to the left; the others, to the right.
        bold, faint: numbers of rows.

    Example:
        >>> table(["name", "<ms>"], [["split", 2.5]]).count("&lt;ms&gt;")
        1
    """
    lines = []
    if titles:
        lines.append(_line("th", titles, left, "border-bottom: 1px solid; opacity: 0.75"))
    for number, cells in enumerate(rows):
        style = "background: none"
        if number in bold:
            style += "; font-weight: bold"
        if number in faint:
            style += "; opacity: 0.6"
        lines.append(_line("td", cells, left, style))
    body = "\n".join(lines)
    return f'<table style="border-collapse: collapse; color: inherit">\n{body}\n</table>'


def _line(tag: str, cells: Sequence[object], left: Collection[int], style: str) -> str:
    shown = []
    for number, cell in enumerate(cells):
        side = "left" if number in left else "right"
        shown.append(f'<{tag} style="{_CELL}; text-align: {side}">{escape(str(cell))}</{tag}>')
    return f'<tr style="{style}">{"".join(shown)}</tr>'


def paragraphs(texts: Iterable[str]) -> str:
    """Lines of text as HTML, one below the other."""
    return "\n".join(f'<div style="margin: 2px 0">{escape(text)}</div>' for text in texts)


def preformatted(text: str) -> str:
    """Text whose columns stand under each other as HTML."""
    return f'<pre style="color: inherit; background: none">{escape(text)}</pre>'
