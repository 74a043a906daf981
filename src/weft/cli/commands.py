"""The command line: all commands, each from its folder or file, and the options of `weft` itself.

Commands use what any user can import, and of that nothing heavy before they run.
"""

from __future__ import annotations

from typing import Annotated

import typer

from . import wording
from .bench.command import bench
from .demo.command import demo
from .doctor import doctor

app = typer.Typer(
    name="weft",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Sparse and partitioned collectives for PyTorch.",
)
for command in (demo, bench, doctor):
    app.command()(command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(wording.listed(wording.versions()))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show versions and exit."),
    ] = False,
) -> None:
    pass
