"""The options of `weft demo`, and how it ends: what is printed on errors, and the exit status.

0: done, and all ways agree. 1: the ways do not agree. 2: what was asked cannot be done, said in
one line. 130: Ctrl-C. Any other error is a defect of weft and shows its traceback.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from .settings import LIMIT, NEGATIVES, STEPS, Refused, Settings, check_report_extra, make_folder

__all__ = ["demo"]


def demo(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(help="More files or folders, as with --text."),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="File or folder to train on, may be repeated; if there is none, the source of the "
            "Python standard library.",
        ),
    ] = None,
    ranks: Annotated[int, typer.Option(help="Processes to start on this machine.")] = 4,
    steps: Annotated[
        int | None,
        typer.Option(
            help=f"Steps to train, each way; if not given, {STEPS}, or what the machine does in "
            f"{LIMIT / 60:.1f} minutes.",
        ),
    ] = None,
    dim: Annotated[int, typer.Option(help="Floats of a word's vector.")] = 64,
    batch: Annotated[
        int,
        typer.Option(
            help=f"Pairs of word and context a rank takes in a step; each looks up "
            f"{NEGATIVES + 2} rows."
        ),
    ] = 2048,
    min_count: Annotated[int, typer.Option(help="Leave rarer words out.")] = 2,
    compare: Annotated[
        str,
        typer.Option(help="What to train beside weft: all, torch (its sparse sum), dense, none."),
    ] = "all",
    seed: Annotated[int, typer.Option(help="Of the first weights and of the batches.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for report.html and vectors.txt.")] = Path(
        "weft-demo"
    ),
) -> None:
    """Train word vectors on real text, on several processes, and show what weft does there.

    Sparse gradients are summed by weft, by PyTorch's sparse all-reduce and by a dense one, all on
    the same batches from the same start. Ctrl-C ends it and keeps what was made.
    """
    try:
        settings = Settings.checked(
            ranks=ranks,
            steps=steps,
            dim=dim,
            batch=batch,
            compare=compare,
            seed=seed,
            min_count=min_count,
            text=(*(text or ()), *(paths or ())),
            out=out,
        )
        check_report_extra()
        make_folder(settings.out)
        from .run import run  # here, since it imports torch

        status = run(settings, ["weft", *sys.argv[1:]])
    except Refused as refusal:
        typer.echo(f"weft demo: {refusal}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("weft demo: interrupted before anything was made", err=True)
        raise typer.Exit(130) from None
    raise typer.Exit(status)
