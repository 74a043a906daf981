"""How the manual reads docstrings: `Example:` holds doctests, as griffe's `Examples:` does.

Loaded by mkdocstrings (`extensions` in mkdocs.yml); not a page, so it is left out of the site.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)


class DoctestExamples(griffe.Extension):
    """Without this, `Example:` would be a note whose `>>>` are nested quotations."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section, before it is parsed."""
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub("Examples:", obj.docstring.value)
