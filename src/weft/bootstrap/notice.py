"""A notice: why rank 0 cannot host the meeting, for the other ranks of its host.

They wait at a place where nobody will come. So rank 0 leaves an invitation (`file`) in the private
folder of this user, where they look, too, while they wait; behind its door is the error that all
raise then. Ranks of other hosts do not see it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import socket
import time
from pathlib import Path

from ..errors import WeftError
from . import file
from .door import Door
from .store import LOOPBACK

__all__ = ["heed", "leave"]

_log = logging.getLogger("weft")
_LINGER = 5.0  # seconds in which the others may come and hear
_PATIENCE = 0.5  # seconds in which a door of this host answers
_MOST = 8192  # characters of an error


def leave(where: str, error: str, ranks: int) -> None:
    """Tell the other ranks of this host, until all have heard it or some seconds have passed.

    Args:
        where: the place of the meeting, as every rank names it.
        error: what they raise.
        ranks: how many there are, on all hosts; 0 if that is not known.
    """
    if ranks == 1:
        return
    _log.warning("%s", error)  # now: this process may wait for the others
    nonce = secrets.token_bytes(32)
    with contextlib.suppress(OSError, WeftError):  # no such folder: then they hear it later
        path = _path(where, file.private())
        door = Door(nonce, {"error": error[:_MOST]}, address=LOOPBACK)
        try:
            mine = file.Invitation(
                (LOOPBACK,), door.port, nonce.hex(), socket.gethostname(), os.getpid(), time.time()
            )
            if file.claim(path, mine) is not None:
                return  # another process says so
            until = time.monotonic() + _LINGER
            while time.monotonic() < until and not 0 < ranks - 1 <= door.answers:
                time.sleep(0.01)
            file.withdraw(path, mine)
        finally:
            door.close()


def heed(where: str) -> None:
    """Raise what rank 0 says of this place, if it says so on this host.

    Raises:
        WeftError: rank 0 cannot host the meeting there.
    """
    try:
        invitation = file.read(_path(where, file.private()))
    except (OSError, WeftError):  # no such folder, or no such file: nothing that can be believed
        return
    answer = invitation.answer(_PATIENCE) if invitation is not None else None
    if answer is not None and "error" in answer[1]:
        raise WeftError(answer[1]["error"])


def _path(where: str, folder: Path) -> Path:
    return folder / f"refused-{hashlib.sha256(where.encode()).hexdigest()[:16]}"
