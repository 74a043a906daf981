"""`weft tune`: measure this group's network once, and leave the figures where `auto` finds them.

Under a launcher (RANK and WORLD_SIZE are set: torchrun, `tools/netlab`) this process is one of the
ranks; otherwise it starts `--ranks` processes itself. The first rank of each host writes the file.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import weft
from weft.testing import launch

from .options import launched, refuse


def tune(
    ranks: Annotated[
        int | None,
        typer.Option(
            min=2, help="Start this many processes here.", show_default="4, or what launched it"
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write the profile to this file, on each host, in place of where auto finds it."
        ),
    ] = None,
    any_host: Annotated[
        bool,
        typer.Option("--any-host", help="Let it serve groups on other hosts too; needs --out."),
    ] = False,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds that any wait may last.", show_default="300")
    ] = None,
) -> None:
    """Measure latency, bandwidth and merging speed of this group, and write the link profile.

    From then on `auto` reads the figures instead of measuring them at the first call of each run.
    """
    if any_host and out is None:
        refuse("--any-host", "it needs --out: what is kept for these hosts is found by their names")
    try:
        if launched(ranks):
            profile, path = _rank(out, any_host, timeout)
        else:
            profile, path = launch(ranks or 4, _rank, (out, any_host, timeout))[0]
    except (weft.Error, OSError) as error:
        said = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else error
        typer.echo(f"weft tune: {said}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if os.environ.get("RANK", "0") == "0":
        _show(profile, path)


def _rank(out: Path | None, any_host: bool, timeout: float | None) -> tuple[Any, Path]:
    """What one rank does: measure with the others, and write if it is the first of its host."""
    link = weft.sparse.link
    with weft.init(timeout=timeout) as wire:
        if wire.size == 1:
            raise weft.WeftError("one rank has no link: start several, such as --ranks 4")
        found = wire.worker.call("tune", lambda: link.tune(wire))
        hosts, first = wire.worker.call("tune", lambda: link.hosts_of(wire))
        path = out or link.default_path(hosts)
        if path is None:
            raise weft.WeftError("there is no home directory to keep a profile in: give --out")
        if any_host:
            found = replace(found, hosts=())
        if first:
            link.write(path, found)
        return found, path


def _show(profile: Any, path: Path) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("link", "latency µs", "Gbit/s", "µs a message"):
        table.add_column(title, justify="left" if title == "link" else "right")
    for name, link in (("between hosts", profile.between), ("within a host", profile.within)):
        if link is None:
            table.add_row(name, "-", "-", "-")
        else:
            cells = f"{link.alpha * 1e6:.0f}", f"{8e-9 / link.beta:.2f}", f"{link.work * 1e6:.0f}"
            table.add_row(name, *cells)
    console = Console(highlight=False)
    console.print(table)
    console.print(f"a core merges {1e-9 / profile.merge:.2f} GB/s")
    console.print(f"wrote {path}", soft_wrap=True)
