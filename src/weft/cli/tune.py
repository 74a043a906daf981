"""`weft tune`: measure this group's network once, and leave the figures where `auto` finds them.

Under a launcher (RANK and WORLD_SIZE are set: torchrun, `tools/netlab`) this process is one of the
ranks; otherwise it starts `--ranks` processes itself. The first rank of each host writes the file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from weft.sparse.link import Figures, Profile

__all__ = ["tune"]


def tune(
    ranks: Annotated[
        int | None,
        typer.Option(
            help="Start this many processes here.", show_default="4, or what the launcher says"
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write the profile to this file, on each host, in place of where auto finds it."
        ),
    ] = None,
    any_host: Annotated[
        bool, typer.Option(help="Let the profile serve groups on other hosts too; needs --out.")
    ] = False,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds that any wait may last.", show_default="300")
    ] = None,
) -> None:
    """Measure latency, bandwidth and merging speed of this group, and write the link profile.

    From then on `auto` reads the figures instead of measuring them at the first call of each run.
    """
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if launched and ranks not in (None, int(os.environ["WORLD_SIZE"])):
        world = os.environ["WORLD_SIZE"]
        _refuse(f"--ranks {ranks} under a launcher that started {world}: leave --ranks out")
    if ranks is not None and ranks < 2:
        _refuse(f"--ranks {ranks}: a link has two ends, start at least 2")
    if any_host and out is None:
        _refuse("--any-host needs --out: what is kept for these hosts is found by their names")
    from weft.errors import Error

    try:
        if launched:
            profile, path = _rank(out, any_host, timeout)
            if os.environ["RANK"] != "0":
                return
        else:
            from weft.bootstrap.local import launch

            profile, path = launch(ranks or 4, _rank, (out, any_host, timeout))[0]
    except (Error, OSError) as error:
        said = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else error
        typer.echo(f"weft tune: {said}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    _show(profile, path)


def _rank(out: Path | None, any_host: bool, timeout: float | None) -> tuple[Profile, Path]:
    """What one rank does: measure with the others, and write if it is the first of its host."""
    from dataclasses import replace

    import weft
    from weft.sparse import link

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


def _show(profile: Profile, path: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("link")
    for title in ("latency µs", "Gbit/s", "µs a message"):
        table.add_column(title, justify="right")
    for name, link in (("between hosts", profile.between), ("within a host", profile.within)):
        table.add_row(name, *_cells(link))
    console = Console()
    console.print(table)
    console.print(f"a core merges {1e-9 / profile.merge:.2f} GB/s", highlight=False)
    console.print(f"wrote {path}", highlight=False, soft_wrap=True)


def _cells(link: Figures | None) -> tuple[str, ...]:
    if link is None:
        return "-", "-", "-"
    return f"{link.alpha * 1e6:.0f}", f"{8e-9 / link.beta:.2f}", f"{link.work * 1e6:.0f}"


def _refuse(words: str) -> NoReturn:
    """Exit status 2 on every rank, words from one."""
    if os.environ.get("RANK", "0") == "0":
        typer.echo(f"weft tune: {words}", err=True)
    raise typer.Exit(2)
