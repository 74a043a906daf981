"""`weft tune`: measure this group's network once, and leave the figures where `auto` finds them.

Under a launcher (RANK and WORLD_SIZE are set: torchrun, `tools/netlab`) this process is one of the
ranks; otherwise it starts `--ranks` processes itself. The first rank of each host writes the file.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from typer import Option

import weft
from weft.testing import launch

from . import options, show


def tune(
    ranks: Annotated[
        int | None, Option(min=2, metavar="N", help="Processes to start.", show_default="4")
    ] = None,
    out: Annotated[Path | None, Option(help="Write the profile to this file.")] = None,
    any_host: Annotated[
        bool, Option("--any-host", help="Valid on other hosts too; needs --out.")
    ] = False,
    timeout: options.Timeout = None,
) -> None:
    """Measure latency, bandwidth and merging speed of this group, and write a link profile.

    `auto` then reads the profile, and need not measure at the start of each run.
    """
    if any_host and out is None:
        words = "it needs --out: without it the profile is stored under the names of these hosts"
        options.refuse("--any-host", words)
    given = out, any_host, timeout
    with options.failing("tune", 1):
        if options.launched(ranks):
            profile, path = _rank(*given)
        else:
            profile, path = launch(ranks or 4, _rank, given)[0]
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
    rows = []
    for name, link in (("between hosts", profile.between), ("within a host", profile.within)):
        figures = (link.alpha * 1e6, 8e-9 / link.beta, link.work * 1e6) if link else (None,) * 3
        rows.append([name, *map(show.number, figures)])
    console = show.console()
    console.print(show.table(("link", "latency µs", "Gbit/s", "µs a message"), rows))
    console.print(f"a core merges {show.number(1e-9 / profile.merge)} GB/s")
    console.print(f"wrote {path}", soft_wrap=True)
