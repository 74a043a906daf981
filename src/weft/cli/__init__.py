"""The command `weft`: one folder or file for each command, collected here.

A command's module imports nothing heavy; it does so when it runs.
"""

from __future__ import annotations

from typing import Annotated

import typer

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
        import torch

        from .. import __version__, kernels

        typer.echo(
            f"weft {__version__}, torch {torch.version.__version__}, kernels: {kernels.describe()}"
        )
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
