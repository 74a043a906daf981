"""The command `weft`: one folder or file for each command, collected here.

Commands use what any user can import, and of that nothing heavy before they run.
"""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import typer

import weft

from .bench import bench
from .demo import demo
from .doctor import doctor
from .plan import plan
from .tune import tune

__all__ = ["app", "main"]

app = typer.Typer(
    name="weft",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Sparse and partitioned collectives for PyTorch.",
)
app.command()(demo)
app.command()(bench)
app.command()(tune)
app.command()(plan)
app.command()(doctor)


def _version(wanted: bool) -> None:
    if wanted:
        torch, kernels = metadata.version("torch"), weft.kernels.describe()
        typer.echo(f"weft {weft.__version__}, torch {torch}, kernels: {kernels}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Say versions and exit."),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line."""
    app()
