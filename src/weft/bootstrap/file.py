"""The shared-file rendezvous: rank 0 leaves a file that says where it listens.

A file is no more than a hint. It is believed when the door that it names proves that it knows the
file's nonce (`door`), so one that an earlier or a crashed run has left leads nobody astray. It is
written under another name first and then linked to its own, so nobody reads half of it and of two
processes that want to be rank 0 one finds the other; its mode is 0600, and it must belong to this
user. Rank 0 takes it away when all have come.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import secrets
import socket
import stat
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import WeftError, WireError
from ..wire.interface import is_loopback
from .door import knock
from .store import pauses

__all__ = ["NAME", "Invitation", "claim", "find", "private", "read", "withdraw"]

NAME = "weft-meeting"  # of the file, where a folder was given
_MODE = 0o600
_MOST = 65536  # bytes of a file that is read at all
_SETTLED = 30.0  # seconds after which a folder that is not there is taken for a mistake
_KNOCK = 2.0  # seconds in which a door must answer


@dataclass(frozen=True, slots=True)
class Invitation:
    """Where a rank 0 listens, and how to know it.

    Attributes:
        addresses: its hosts by number, the likeliest first.
        port: of its door.
        nonce: in hexadecimal.
        host: its name, for messages.
        pid: its process, for messages.
        written: when, in seconds since 1970, for messages.
    """

    addresses: tuple[str, ...]
    port: int
    nonce: str
    host: str
    pid: int
    written: float

    def answer(self, timeout: float = _KNOCK) -> tuple[str, dict[str, Any]] | None:
        """At which address its door answers, and what it tells; None if it does not."""
        return knock(self.addresses, [self.port], bytes.fromhex(self.nonce), timeout)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> Invitation:
        """
        Raises:
            ValueError: it is none.
        """
        try:
            found = json.loads(text)
            made = cls(**{**found, "addresses": tuple(found["addresses"])})
            for address in made.addresses:
                ipaddress.ip_address(address.partition("%")[0])
            bytes.fromhex(made.nonce)
            str(made)
            if not 0 < made.port < 65536:
                raise ValueError(f"port {made.port}")
        except (AttributeError, KeyError, OverflowError, TypeError) as error:
            raise ValueError("no invitation") from error
        return made

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.written))
        return f"process {self.pid} on {self.host}, written {when}"


def read(path: Path) -> Invitation | None:
    """What the file says, or None if there is none.

    Raises:
        WeftError: it is somebody else's, or could have been written by somebody else, or is no
            such file at all.
        OSError: it cannot be read.
    """
    with contextlib.suppress(OSError):
        # opening the folder has an NFS client ask its server what is in it now
        os.close(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except PermissionError:
        with contextlib.suppress(FileNotFoundError):
            _check_owner(path, os.lstat(path))
        raise
    except OSError as error:
        if path.is_symlink():
            raise WeftError(f"{path} is a link, and may lead anywhere: remove it") from error
        raise
    try:
        _check_owner(path, os.fstat(fd))
        content = os.read(fd, _MOST)
    finally:
        os.close(fd)
    try:
        return Invitation.from_json(content)
    except ValueError as error:
        raise WeftError(
            f"{path} is not a file of a rendezvous: pass another path, or remove it"
        ) from error


def claim(path: Path, invitation: Invitation) -> Invitation | None:
    """Leave the invitation at the path, unless a rank 0 that is alive has left one there.

    Returns:
        That other one, or None.

    Raises:
        WeftError: as `read`; or the invitation of one that is gone cannot be taken away.
        OSError: nothing can be written there.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(invitation.to_json())
            file.flush()
            os.fsync(file.fileno())
        while True:
            # a link that is there may be ours: NFS asks again where an answer was lost
            if _placed(draft, path) or (there := read(path)) == invitation:
                return None
            if there is not None:
                if there.answer() is not None:
                    return there
                withdraw(path, there)
                if read(path) == there:
                    raise WeftError(
                        f"{path} is that of {there}, which does not answer, and cannot be taken "
                        "away: remove it, or pass another path"
                    )
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft)


def withdraw(path: Path, invitation: Invitation) -> None:
    """Take the invitation away, if it is the one that is there."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        if read(path) != invitation:
            return
        os.rename(path, aside)  # at once, so that what is taken away is what is looked at
        if read(aside) != invitation:
            _placed(aside, path)  # somebody was quicker: it is a new one
    except (OSError, WeftError):
        return  # it is gone, or the folder is: nobody can be led astray then
    finally:
        with contextlib.suppress(OSError):
            os.unlink(aside)


def find(
    path: Path, rank: int, deadline: float, *, look: Callable[[], None] = lambda: None
) -> tuple[str, dict[str, Any]]:
    """Wait for an invitation whose door answers: at which address, and what it tells.

    Args:
        path: of the file.
        rank: this rank, for messages.
        deadline: as `time.monotonic` tells it.
        look: called before each look at the file; what it raises ends the waiting.

    Raises:
        WeftError: as `read`; or nobody can leave a file there, and that has not changed in 30 s.
        WireError: there was none in time.
    """
    began = time.monotonic()
    usable = began  # when that was last so
    why = ""

    def waited() -> str:
        who = f"rank {rank}" if rank >= 0 else "a process without a rank"
        return f"{who}: waited {time.monotonic() - began:.0f} s for rank 0 at file://{path}; {why}"

    for _ in pauses(deadline):
        look()
        reason = _unusable(path)
        if reason is None:
            usable = time.monotonic()
            found, why = _answer(path)
            if found is not None:
                return found
        else:
            why = reason
            if time.monotonic() - usable >= _SETTLED:
                raise WeftError(waited())
    raise WireError(waited(), rank=rank, culprit=0)


def private() -> Path:
    """A folder that only this user can write to, on this host.

    Raises:
        WeftError: something else is in its place.
    """
    folder = Path(tempfile.gettempdir()) / f"weft-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not folder.is_dir() or folder.is_symlink() or found.st_uid != os.getuid():
        raise WeftError(
            f"{folder} is not this user's folder: remove it, or pass rendezvous='file:///path'"
        )
    if found.st_mode & 0o022:
        folder.chmod(0o700)
    return folder


def _placed(source: Path, path: Path) -> bool:
    """Give a file a name that no other has: whether it has it now.

    Raises:
        OSError: nothing can be written there.
    """
    try:
        os.link(source, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without links; nothing better is left to it
        if os.path.lexists(path):
            return False
        os.rename(source, path)
    return True


def _unusable(path: Path) -> str | None:
    """Why rank 0, which is of this user, cannot leave a file there, as far as this host can see."""
    folder = path.parent
    if not folder.is_dir():
        return f"there is no folder {folder} on this host: is it shared, and mounted?"
    if os.path.exists(path) or os.access(folder, os.W_OK) or not os.access(folder, os.X_OK):
        return None  # what cannot even be looked into is an error when the file is read
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        return None  # here, but maybe not on rank 0's host
    return (
        f"user {os.geteuid()} may not write to the folder {folder}, and rank 0 is of that user, "
        "too: pass a path in a folder of your own"
    )


def _answer(path: Path) -> tuple[tuple[str, dict[str, Any]] | None, str]:
    """The answer of the door if there is one, and what is to be said if there is none."""
    invitation = read(path)
    if invitation is None:
        return None, "there is no such file: is rank 0 started, and does it see the same folder?"
    why = "is that an earlier run, or one behind a firewall?"
    if invitation.host != socket.gethostname() and all(map(is_loopback, invitation.addresses)):
        why = "only its own host reaches it there: name a network interface there in WEFT_INTERFACE"
    return invitation.answer(), (
        f"the file there is that of {invitation}, which does not answer at "
        f"{', '.join(invitation.addresses)} port {invitation.port}: {why}"
    )


def _check_owner(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise WeftError(f"{path} is no regular file: pass another path")
    if found.st_uid != os.geteuid():
        raise WeftError(
            f"{path} belongs to user {found.st_uid} and this is user {os.geteuid()}: it is not "
            "believed; remove it, or pass a path in a folder of your own"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise WeftError(
            f"{path} may be written by others (mode {stat.S_IMODE(found.st_mode):o}): it is not "
            "believed; remove it, or pass a path in a folder of your own"
        )
