"""The options of `weft demo`, and how it ends: what is printed on errors, and the exit status.

0: done, and all ways agree. 1: the ways do not agree. 2: what was asked cannot be done, said in
one line. 130: Ctrl-C. Any other error is a defect of weft and shows its traceback.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ..graph.settings import STEPS as GRAPH_STEPS
from ..graph.settings import GraphSettings
from .settings import LIMIT, NEGATIVES, STEPS, Refused, Settings, check_report_extra, make_folder

__all__ = ["demo"]

_OF_TEXT = ("--text", "--batch", "--min-count")


def demo(
    context: typer.Context,
    paths: Annotated[
        list[Path] | None,
        typer.Argument(help="More files or folders, as with --text; with --graph: which graph."),
    ] = None,
    graph: Annotated[
        bool,
        typer.Option(
            "--graph",
            help="Train a graph network instead, on the imports of the installed Python packages, "
            "or with `--graph debian` on the dependencies of Debian's packages.",
        ),
    ] = False,
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
            f"{LIMIT / 60:.1f} minutes; {GRAPH_STEPS} with --graph.",
        ),
    ] = None,
    dim: Annotated[
        int, typer.Option(help="Floats of a word's vector, or of a node's hidden state.")
    ] = 64,
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
        typer.Option(
            help="What to train beside weft: all, torch (its sparse sum), dense, none; with "
            "--graph: all (one process alone), none."
        ),
    ] = "all",
    seed: Annotated[int, typer.Option(help="Of the first weights and of the batches.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for report.html and vectors.txt.")] = Path(
        "weft-demo"
    ),
) -> None:
    """Train word vectors on real text, on several processes, and show what weft does there.

    Sparse gradients are summed by weft, by PyTorch's sparse all-reduce and by a dense one, all on
    the same batches from the same start. Ctrl-C ends it and keeps what was made.

    With --graph a GraphSAGE network is trained on all of a real graph that is cut between the
    processes, and on one process alone.
    """
    try:
        if graph:
            asked = GraphSettings.checked(
                graph=[str(path) for path in paths or ()],
                ranks=ranks,
                steps=steps,
                dim=dim,
                compare=compare,
                seed=seed,
                of_text=[name for name in _OF_TEXT if _is_given(context, name)],
                out=out,
            )
            check_report_extra()
            make_folder(out)
            from ..graph.run import run as run_graph  # here, since it imports torch

            raise typer.Exit(run_graph(asked, ["weft", *sys.argv[1:]]))
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


def _is_given(context: typer.Context, option: str) -> bool:
    """Whether a person has given an option that has a default."""
    source = context.get_parameter_source(option.strip("-").replace("-", "_"))
    return source is not None and source.name == "COMMANDLINE"
