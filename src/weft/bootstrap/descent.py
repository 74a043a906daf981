"""A program that a rank starts inherits the variables by which the rank knows who it is.

It would take itself for that rank, and wait for the others in its place, or spoil their meeting. So
a rank leaves a variable of its own, by which such a program is refused before it comes near the
place where the ranks meet. A launcher that a rank starts has another place, and is not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import psutil

from ..rendezvous.launchers import VARIABLES, Launch
from ..rendezvous.places import Place

VARIABLE = "WEFT_RANK_PROCESS"


def leave_mark(launch: Launch, place: Place) -> None:
    """Say which rank this process is to the programs that it starts, also after shutdown."""
    os.environ[VARIABLE] = f"{os.getpid()} {_identity(launch, place)}"


def take_mark_back() -> None:
    """Undo `leave_mark`."""
    if os.environ.get(VARIABLE, "").partition(" ")[0] == str(os.getpid()):
        del os.environ[VARIABLE]


def refusal(launch: Launch, place: Place | None, env: Mapping[str, str]) -> str:
    """Why this process is no rank, if a rank has started it, directly or not; else empty."""
    starter, _, identity = env.get(VARIABLE, "").partition(" ")
    if place is None or identity != _identity(launch, place) or not starter.isdecimal():
        return ""
    # a variable comes from an ancestor, which is still there; a shell between them may have ended
    if int(starter) == os.getpid() or not psutil.pid_exists(int(starter)):
        return ""
    names = " and ".join(name for name in VARIABLES if name in env)
    return (
        f"rank {launch.rank}: process {starter}, which is that rank of the {launch.size} that meet "
        f"at {place.where}, has started this process {os.getpid()}, which has its variables: unset "
        f"{names} for a group of one, or start it with a launcher of its own; if each rank that "
        f"has shut down starts one, unset {VARIABLE}"
    )


def _identity(launch: Launch, place: Place) -> str:
    return " ".join([str(launch.rank), str(launch.size), launch.job, place.where])
