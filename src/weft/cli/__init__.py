"""The command `weft`: one folder or file for each command, collected here.

Commands use what any user can import, and of that nothing heavy before they run.
"""

from __future__ import annotations

from typing import Annotated

import typer

from . import show
from .bench.command import bench
from .demo.command import demo
from .doctor import doctor
from .plan.command import plan

__all__ = ["app", "main"]

app = typer.Typer(
    name="weft",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Sparse and partitioned collectives for PyTorch.",
)
for command in (demo, bench, plan, doctor):
    app.command()(command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(show.listed(show.versions()))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show versions and exit."),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line."""
    app()
