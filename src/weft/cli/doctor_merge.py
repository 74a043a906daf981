"""`weft doctor --merge`: what the flight recorders of all ranks wrote, lined up call by call.

Calls are lined up by their number among those of the same ranks, whatever the clocks say. What
comes of it is a table of where each rank is, and a sentence about the first call that is not the
same on all its ranks, or that not all of them finished.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.base.arguments import in_words
from weft.base.errors import names

from . import options, show, wording

_TITLES = ("rank", "host", "calls", "the last", "its program is at", "why it wrote")

Ranks = tuple[int, ...]
Call = dict[str, Any]
File = Mapping[str, Any]
"""What one rank wrote."""


def merge(folder: Path) -> None:
    """Print what the ranks wrote to a folder."""
    found = [_recorded(path) for path in sorted(folder.glob("rank*.json"))]
    if not found:
        options.refuse("--merge", f"{folder} has no file of a rank: give a job's WEFT_RECORD_DIR")
    began = max(file["started"] for file in found)
    # what was written before this job began is of an earlier one
    files = {file["rank"]: file for file in found if file["written"] >= began}
    rows = [_row(rank, file) for rank, file in sorted(files.items())]
    show.console().print(show.table(_TITLES, rows, left=len(_TITLES)))
    show.console().print(first_difference(files), soft_wrap=True)


def _recorded(path: Path) -> File:
    """What one rank wrote; it ends with exit status 2 where that is no flight recorder's."""
    try:
        file: File = json.loads(path.read_text(encoding="utf-8"))
        sum((file["rank"], file["started"], file["written"]))  # raises unless they are numbers
        _row(file["rank"], file)
        first_difference({file["rank"]: file})
    except OSError as error:
        options.refuse("--merge", f"{path} cannot be read: {error.strerror}")
    except (
        AttributeError,
        IndexError,
        KeyError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        options.refuse("--merge", f"{path} is no record of a rank: {in_words(error)}")
    return file


def _row(rank: int, file: File) -> list[str]:
    return [str(rank), file["host"], str(len(file["calls"])), last(file), file["at"], file["why"]]


def last(file: File) -> str:
    """What a rank did last, and how long before it wrote."""
    if not file["calls"]:
        return "made no call"
    call = file["calls"][-1]
    seconds = file["written"] - (call["end"] or call["start"])
    if call["end"] is None:
        return f"in {_called(call)} for {seconds:.1f} s"
    return f"{'raised in' if call['error'] else 'finished'} {_called(call)} {seconds:.1f} s before"


def _called(call: Call) -> str:
    return f"call {call['number']} ({call['name']})"


def first_difference(files: Mapping[int, File]) -> str:
    """At which call the ranks part, and who is behind there, or made another one."""
    absent = {*range(max(file["size"] for file in files.values()))} - {*files}
    nothing = f"; {names(sorted(absent))} left no file" if absent else ""
    lined = _lined_up(files)
    for ranks, calls in lined:
        if said := _unlike(calls) or _unfinished(ranks, calls, files):
            return said + nothing
    return f"{names(sorted(files))} made the same {len(lined)} calls, and finished them{nothing}"


def _lined_up(files: Mapping[int, File]) -> list[tuple[Ranks, dict[int, Call]]]:
    """The calls in order, but for those that a rank has forgotten: whose each is, and who entered
    it, as what."""
    # by ranks and group, rank, and number
    groups: dict[tuple[Any, ...], dict[int, dict[int, Call]]] = {}
    for rank, file in sorted(files.items()):
        before: Call = {"name": ""}
        for call in file["calls"]:
            if call["agreed"]:
                group = groups.setdefault((tuple(call["ranks"]), call["group"]), {})
                group.setdefault(rank, {})[call["agreed"]] = before = dict(call)
            elif call["name"] == before["name"]:  # its second part
                before.update(end=call["end"], error=call["error"])
    lined = [
        (ranks, {rank: calls[number] for rank, calls in group.items() if number in calls})
        for (ranks, _), group in groups.items()
        for number in sorted({number for calls in group.values() for number in calls})
        if number >= max(map(min, group.values()))
    ]
    return sorted(lined, key=lambda each: min(call["start"] for call in each[1].values()))


def _unlike(calls: Mapping[int, Call]) -> str:
    """Who made what, where that is not the same; what a rank did not know is like all."""
    stated = {
        rank: {name: value for name, value in call["fields"].items() if value != "?"}
        for rank, call in calls.items()
    }
    known = dict.fromkeys(name for fields in stated.values() for name in fields)
    unlike = {n for n in known if len({f[n] for f in stated.values() if n in f}) > 1}
    made: dict[str, list[int]] = {}
    for rank, fields in stated.items():
        told = fields if "call" in unlike else {n: f for n, f in fields.items() if n in unlike}
        made.setdefault(wording.listed(told), []).append(rank)
    who = "; ".join(f"{names(ranks)}: {what}" for what, ranks in made.items() if what)
    number = next(iter(calls.values()))["number"]
    return f"call {number} is not the same on all ranks: {who}" if unlike else ""


def _unfinished(ranks: Ranks, calls: Mapping[int, Call], files: Mapping[int, File]) -> str:
    """Who did not enter a call, or else did not finish it; what a caller did wrong ends it, too."""
    first = next(iter(calls.values()))
    entered = f"{names([*calls])} entered {_called(first)}"
    if behind := [rank for rank in ranks if rank in files and rank not in calls]:
        where = "; ".join(f"rank {r} {last(files[r])}, at {files[r]['at']}" for r in behind)
        return f"{entered}, {names(behind)} did not: {where}"
    rest = [r for r, c in calls.items() if not c["end"] or c["error"][:9] not in ("", "WeftError")]
    return f"{entered}, and {names(rest)} did not finish it" if rest else ""
