"""What `init` would find, without starting anything: for `weft doctor`, and for programs."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist

from ..base.errors import WeftError
from ..rendezvous import launchers, places
from ..rendezvous.address import interface_of, own_address
from ..wire.tcp.shm import Segment

_BY = {"alone": "no launcher", "environment": "a program that sets RANK and WORLD_SIZE"}


@dataclass(slots=True)
class Preview:
    """What one process would start with.

    Attributes:
        launcher: who launched it, and as which rank of how many.
        rank: that rank; 0 if it is not known.
        meeting: where the ranks meet; empty if it is alone.
        address: where the other ranks would reach this one.
        interface: the network interface with that address; empty if there is none.
        shared: bytes of memory that a rank can share with others of its host; 0: none.
        errors: what is wrong with the "launch" or the "interface".
    """

    launcher: str = ""
    rank: int = 0
    meeting: str = ""
    address: str = ""
    interface: str = ""
    shared: int = 0
    errors: dict[str, WeftError | OSError] = field(default_factory=dict)


def look_ahead(rendezvous: str | None = None) -> Preview:
    """What `weft.init(rendezvous=rendezvous)` would find here; raises nothing.

    Example:
        >>> look_ahead().launcher
        'no launcher, rank 0 of 1'
    """
    found = Preview()
    if (segment := Segment.make()) is not None:
        found.shared = segment.nbytes
        segment.close()
    try:
        found.address = own_address(dist.HashStore())
        found.interface = interface_of(found.address) or ""
    except OSError as error:
        found.errors["interface"] = error
    try:
        launch = launchers.detect()
        job = f", job {launch.job}" if launch.job else ""
        by = _BY.get(launch.kind, launch.kind)
        found.launcher = f"{by}, rank {launch.rank} of {launch.size}{job}"
        found.rank = launch.rank
        place = places.place(launch, rendezvous)
        found.meeting = "" if place is None else place.where
    except WeftError as error:
        found.errors["launch"] = error
    return found
