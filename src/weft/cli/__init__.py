"""The command `weft`: `commands` collects one folder or file for each command.

Only commands need typer and rich, the extra `cli`. Importing this package needs neither.
"""

from __future__ import annotations

import sys

__all__ = ["EXTRA", "main"]

EXTRA = ("typer", "rich")
"""What the extra `cli` installs beside the library."""


def main() -> None:
    """Run the command line; without typer or rich say how to install them, with exit status 1."""
    try:
        from .commands import app
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package not in EXTRA:
            raise
        sys.exit(f"weft: the command line needs {package}: pip install {' '.join(EXTRA)}")
    app()
