"""What `init` would find, without starting anything: for `weft doctor`, and for programs.

What else is in force, `weft.config` says.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..base.errors import WeftError
from ..rendezvous import launchers, places
from ..wire.tcp.shm import Segment


@dataclass(slots=True)
class Preview:
    """What one process would start with.

    Attributes:
        rank: as which it was launched; 0 if it is not known.
        meeting: where the ranks meet; empty if it is alone.
        shared: bytes of memory that a rank can share with others of its host; 0: none.
        error: what is wrong with the launch, or the place; None: nothing.
    """

    rank: int = 0
    meeting: str = ""
    shared: int = 0
    error: WeftError | None = None


def look_ahead(rendezvous: str | None = None) -> Preview:
    """What `weft.init(rendezvous=rendezvous)` would find here; raises nothing.

    Example:
        >>> look_ahead().meeting  # alone
        ''
    """
    found = Preview()
    if (segment := Segment.make()) is not None:
        found.shared = segment.nbytes
        segment.close()
    try:
        launch = launchers.detect(os.environ)
        found.rank = launch.rank
        place = places.place(launch, rendezvous, os.environ)
        found.meeting = "" if place is None else place.where
    except WeftError as error:
        found.error = error
    return found
