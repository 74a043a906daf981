"""Where the ranks of a launch meet, and the store that they find there.

A place is given (`rendezvous=`, or MASTER_ADDR and MASTER_PORT in the environment) or follows from
the launcher: ranks of one host meet through a file in a private folder of this user's (`file`);
srun's tasks of several hosts at a door on the host of task 0, on the first free one of some ports
that follow from the job's name (`door`); mpirun's over MPI itself, if mpi4py is there. In all of
these rank 0 hosts the store on a port that the system chose. A new kind of place is a class with
`where` and `meet`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import socket
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ..errors import WeftError, WireError
from . import addresses, file, notice, store
from .door import Door, knock
from .launchers import Launch

if TYPE_CHECKING:
    from ..wire import mpi

__all__ = ["Meeting", "Place", "at", "before", "can_host", "complete", "place"]

_PORTS = 16  # that srun's tasks try
_LOWEST, _BEYOND = 10000, 32768  # between the reserved ports and those of Linux's outgoing calls
_SHORT = 2.0  # seconds in which one that is there answers


@dataclass(frozen=True, slots=True)
class Meeting:
    """A store that all ranks share.

    Attributes:
        store: that store.
        hosts: whether it ends with this process.
        close: to be called when all have come: nobody else is let in.
    """

    store: dist.Store
    hosts: bool = False
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class Tcp:
    """A store at a host and a port that are known to all."""

    host: str
    port: int
    agent: bool  # torchrun hosts it already
    where: str

    def meet(self, launch: Launch, deadline: float) -> Meeting:
        if launch.rank != 0 or self.agent:
            return Meeting(self._join(launch.rank, _left(deadline)))
        behind = None
        if not addresses.is_here(self.host):
            behind = addresses.led_here(self.host, self.port, _left(deadline))
        try:
            made = dist.TCPStore(
                self.host,
                self.port,
                is_master=True,
                wait_for_workers=False,
                multi_tenant=True,  # the program may hold a store there itself
                timeout=timedelta(seconds=_left(deadline)),
                master_listen_fd=behind,  # which the store closes
            )
        except RuntimeError as error:
            taken = os.strerror(errno.EADDRINUSE) in str(error) or "EADDRINUSE" in str(error)
            with contextlib.suppress(RuntimeError, WireError):
                if taken:  # by another rank 0, perhaps: then the roll call shall tell everybody
                    other = self._join(0, _SHORT)
                    other.wait([_SIGN], timedelta(seconds=_SHORT))
                    return Meeting(other)
            why = "another program listens there" if taken else str(error).splitlines()[0]
            raise WeftError(
                f"rank 0 cannot host the meeting at {self.where}: {why}; choose another port, and "
                "let MASTER_ADDR be the host of rank 0"
            ) from error
        made.set(_SIGN, "yes")
        return Meeting(made, hosts=True)

    def _join(self, rank: int, timeout: float) -> dist.Store:
        try:
            return store.connect(
                self.host, self.port, timeout, look=lambda: notice.heed(self.where)
            )
        except RuntimeError as error:
            raise WireError(
                f"rank {rank}: rank 0 was not there at {self.where} (waited {timeout:.0f} s): is "
                "it started on that host, and does every host reach that address and port? "
                f"({str(error).splitlines()[0]})",
                rank=rank,
                culprit=0,
            ) from error


_SIGN = "weft/meets here"  # tells weft's store from another program's


@dataclass(frozen=True, slots=True)
class File:
    """A file that rank 0 writes, in a folder that all ranks see."""

    path: Path

    @property
    def where(self) -> str:
        return f"file://{self.path}"

    def meet(self, launch: Launch, deadline: float) -> Meeting:
        try:
            if launch.rank == 0:
                return self._host(deadline)
            address, told = file.find(
                self.path, launch.rank, deadline, look=lambda: notice.heed(self.where)
            )
        except OSError as error:
            if isinstance(error, WireError):
                raise
            folder = self.path.parent
            why = error.strerror if folder.is_dir() else f"there is no folder {folder}"
            raise WeftError(
                f"rank {launch.rank}: {self.path} cannot be used for a rendezvous: {why or error}"
            ) from error
        return Meeting(_store_at(address, told, launch.rank, _left(deadline)))

    def _host(self, deadline: float) -> Meeting:
        invitation, hosted = _invite(secrets.token_bytes(32), deadline)
        other = file.claim(self.path, invitation)
        if other is None:

            def close() -> None:
                file.withdraw(self.path, invitation)
                hosted.close()

            return Meeting(hosted.store, hosts=True, close=close)
        hosted.close()
        answer = other.answer()
        if answer is None:
            raise WeftError(
                f"rank 0: {self.path} is that of another rank 0, {other}, which has just ended: "
                "start again"
            )
        return Meeting(_store_at(*answer, 0, _left(deadline)))  # the roll call tells everybody


@dataclass(frozen=True, slots=True)
class Ports:
    """One of a few ports of a known host, behind a door that knows the job's name."""

    host: str
    job: str

    @property
    def where(self) -> str:
        return f"{self.host}, ports {', '.join(map(str, self.ports()))}, as job {self.job}"

    def ports(self) -> list[int]:
        """The same on every rank, and others for other jobs."""
        digest = hashlib.sha256(self._name()).digest()
        spread = _BEYOND - _LOWEST
        numbers = (int.from_bytes(digest[i : i + 2], "big") for i in range(0, 2 * _PORTS, 2))
        return list(dict.fromkeys(_LOWEST + number % spread for number in numbers))

    def meet(self, launch: Launch, deadline: float) -> Meeting:
        nonce = hashlib.sha256(b"nonce " + self._name()).digest()
        if launch.rank == 0:
            made, port = store.host(addresses.first(), everywhere=True)
            for number in self.ports():
                with contextlib.suppress(OSError):  # taken: the next one
                    door = Door(nonce, {"port": port}, port=number)
                    return Meeting(made, hosts=True, close=door.close)
            raise WeftError(
                f"rank 0: none of {self.where} is free: pass rendezvous='tcp://host:port' or "
                "'file:///a/shared/folder/'"
            )
        for _ in store.pauses(deadline):
            notice.heed(self.where)
            answer = knock([self.host], self.ports(), nonce, min(_SHORT, _left(deadline)))
            if answer is not None:
                return Meeting(_store_at(*answer, launch.rank, _left(deadline)))
        raise WireError(
            f"rank {launch.rank}: rank 0 did not answer at {self.where}: "
            f"{self._why_not()} else pass rendezvous='file:///a/shared/folder/'",
            rank=launch.rank,
            culprit=0,
        )

    def _why_not(self) -> str:
        """What may keep the ranks apart."""
        try:
            socket.getaddrinfo(self.host, None)
        except OSError as error:
            return (
                f"{socket.gethostname()} does not know that name ({error.strerror}): pass a name "
                "that all hosts know in MASTER_ADDR,"
            )
        return "is it started, is it on that host, and may ranks connect to those ports?"

    def _name(self) -> bytes:
        return f"weft {os.getuid()} {self.job}".encode()


@dataclass(frozen=True, slots=True)
class Mpi:
    """Wherever rank 0 says over MPI."""

    where: str = "the address that rank 0 told over MPI"

    def meet(self, launch: Launch, deadline: float) -> Meeting:
        world = _mpi_world(launch, deadline)
        if launch.rank == 0:
            mine, hosted = _invite(secrets.token_bytes(32), deadline)
            world.broadcast(mine.to_json(), _left(deadline))
            return hosted
        told = world.broadcast("", _left(deadline))
        invitation = file.Invitation.from_json(told.encode())
        answer = invitation.answer()
        if answer is None:
            raise WireError(
                f"rank {launch.rank}: rank 0 ({invitation}) does not answer at "
                f"{', '.join(invitation.addresses)} port {invitation.port}: name the network "
                "interface in WEFT_INTERFACE (mpirun -x WEFT_INTERFACE)",
                rank=launch.rank,
                culprit=0,
            )
        return Meeting(_store_at(*answer, launch.rank, _left(deadline)))


Place = Tcp | File | Ports | Mpi


def can_host(where: Place) -> bool:
    """Whether this process can open the meeting, though it does not know that it is rank 0."""
    if isinstance(where, File):
        return True
    if not isinstance(where, Tcp) or where.agent:
        return False
    return addresses.is_here(where.host)


def place(
    launch: Launch, rendezvous: str | None, env: Mapping[str, str] | None = None
) -> Place | None:
    """Where the ranks of a launch meet; None if there is nobody to meet.

    Raises:
        WeftError: the URL is wrong, or nothing says where.

    Example:
        >>> ranks = Launch("environment", 1, 2, 1, 2)
        >>> place(ranks, "tcp://[fd00::7]:29500", {}).host
        'fd00::7'
        >>> place(ranks, "file:///nfs/run7", {}).where
        'file:///nfs/run7'
    """
    env = os.environ if env is None else env
    if rendezvous is not None:
        _check_url(rendezvous)
    if launch.size == 1 and launch.kind in ("mpirun", "srun"):
        return None
    if rendezvous is not None:
        if launch.kind == "alone":
            raise WeftError(
                f"rendezvous={rendezvous!r} needs RANK and WORLD_SIZE in the environment: set "
                "them, or start with torchrun, mpirun or srun"
            )
        if rendezvous.startswith("tcp://"):
            return _tcp(rendezvous)
        if rendezvous.startswith("file://"):
            return File(_path(rendezvous, launch))
    if launch.kind == "alone":
        return None
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
    if not missing:
        return _environment(launch, env)
    if rendezvous is None:
        if launch.job and launch.local_size == launch.size and launch.kind in ("mpirun", "srun"):
            return File(file.private() / launch.job.replace("/", "-"))
        host = env.get("MASTER_ADDR") or launch.head
        if launch.kind == "srun" and launch.job and host:
            return Ports(host, launch.job)
        if launch.kind == "mpirun":
            return Mpi()
    raise WeftError(
        f"rank {launch.rank}: the environment has rank and world size but no "
        f"{' and no '.join(missing)}: start with torchrun, or set it, or pass "
        "rendezvous='tcp://host:port' or 'file:///a/shared/folder/'"
    )


@contextlib.contextmanager
def at(where: Place, launch: Launch, deadline: float) -> Iterator[tuple[Meeting, int]]:
    """Be at the meeting; at the end of the block nobody else is let in.

    A process that has been there keeps the store, and finds it again: rank 0 may host it, and when
    it starts its next group the others may be asking already. If somebody did not come, or the
    store failed, all meet anew.

    Yields:
        The meeting, and how often this process has been at it, the same on all ranks: what they
        write in the store is to be told apart by that.

    Raises:
        WeftError: rank 0 cannot host it there.
        WireError: rank 0 was not there in time.
    """
    key = (where.where, os.getpid())
    if isinstance(where, Tcp):  # it may be the same store, also for who has lost it
        _times[key] = _times.get(key, 0) + 1
    meeting = _kept.get(key)
    if meeting is None:
        meeting = _met(where, launch, deadline)
        if not isinstance(where, Tcp):
            _times[key] = 1
    elif not isinstance(where, Tcp):
        _times[key] += 1
    _kept[key] = Meeting(meeting.store, meeting.hosts)
    try:
        yield meeting, _times[key]
    except WeftError:
        raise  # all have heard it there
    except BaseException:
        del _kept[key]
        raise
    finally:
        meeting.close()


def before(where: File, launch: Launch, deadline: float) -> dist.Store:
    """Come to a meeting before `at` does, which then finds this one; the others are let in.

    For who wants to know the host of rank 0 first; it is the store's.

    Raises:
        WeftError, WireError: as `at`.
    """
    key = (where.where, os.getpid())
    if key not in _kept:
        _kept[key] = _met(where, launch, deadline)
        _times[key] = 0
    return _kept[key].store


def _met(where: Place, launch: Launch, deadline: float) -> Meeting:
    """A meeting that this process was not at before.

    Where rank 0 cannot host it, it tells the other ranks of its host before it raises.
    """
    try:
        return where.meet(launch, deadline)
    except WeftError as error:
        if launch.rank == 0:
            notice.leave(where.where, str(error), launch.size)
        raise


_kept: dict[tuple[str, int], Meeting] = {}
_times: dict[tuple[str, int], int] = {}


def forget() -> None:
    """Let go of the stores, at the end of the process, and of what leads there."""
    complete()
    _kept.clear()


def complete() -> None:
    """All ranks have come: nobody else is let in to what `before` has opened."""
    for key, meeting in _kept.items():
        if key[1] == os.getpid():  # not in a forked child
            meeting.close()
            _kept[key] = Meeting(meeting.store, meeting.hosts)


def _check_url(rendezvous: str) -> None:
    if rendezvous != "env://" and not rendezvous.startswith(("tcp://", "file://")):
        raise WeftError(
            f"rendezvous {rendezvous!r} is none of env://, tcp://host:port and file:///path"
        )


def _tcp(url: str) -> Tcp:
    try:
        found = urllib.parse.urlsplit(url)
        host, port = found.hostname, found.port
    except ValueError:  # a port that is none
        host = port = None
    if not host or not port:
        raise WeftError(f"rendezvous {url!r} has no host and port: write tcp://host:port")
    return Tcp(host, port, False, url)


def _environment(launch: Launch, env: Mapping[str, str]) -> Tcp:
    host, port = env["MASTER_ADDR"].strip("[]"), env["MASTER_PORT"]
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise WeftError(
            f"rank {launch.rank}: the environment has MASTER_PORT={port!r}, which is no port: "
            "it is a number from 1 to 65535"
        )
    agent = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Tcp(host, int(port), agent, f"{f'[{host}]' if ':' in host else host}:{port}")


def _path(url: str, launch: Launch) -> Path:
    """The file; in a folder, one for each job that has a name, which all of its hosts know."""
    found = urllib.parse.urlsplit(url)
    path = urllib.parse.unquote(found.path)
    if found.netloc not in ("", "localhost") or not path.startswith("/") or path == "/":
        raise WeftError(
            f"rendezvous {url!r} is no absolute path: write file:///folder/file, with three slashes"
        )
    is_folder = path.endswith("/") or Path(path).is_dir()
    if not is_folder:
        return Path(path)
    # others call the job by what started it on that host, or have no name at all
    known = launch.job and (launch.kind == "srun" or "@" in launch.job)
    digest = hashlib.sha256(launch.job.encode()).hexdigest()[:12]
    return Path(path) / (f"{file.NAME}-{digest}" if known else file.NAME)


def _invite(nonce: bytes, deadline: float) -> tuple[file.Invitation, Meeting]:
    """Host a store on a free port, behind a door that knows the nonce."""
    found = addresses.reachable()
    made, port = store.host(found[0], everywhere=len(found) > 1)
    door = Door(nonce, {"port": port}, address="" if len(found) > 1 else found[0])
    invitation = file.Invitation(
        found, door.port, nonce.hex(), socket.gethostname(), os.getpid(), time.time()
    )
    return invitation, Meeting(made, hosts=True, close=door.close)


def _store_at(address: str, told: Mapping[str, Any], rank: int, timeout: float) -> dist.Store:
    return Tcp(address, told["port"], False, f"{address} port {told['port']}")._join(rank, timeout)


def _mpi_world(launch: Launch, deadline: float) -> mpi.World:
    """MPI, of all ranks of this launch."""
    from ..wire import mpi  # here: `import weft` shall be quick

    try:
        world = mpi.start(_left(deadline))
    except WeftError as error:
        raise WeftError(
            f"rank {launch.rank}: mpirun started ranks on several hosts and does not tell where "
            f"rank 0 is, and MPI cannot ({error}): or set MASTER_ADDR and MASTER_PORT "
            "(mpirun -x), or pass rendezvous='tcp://host:port' or 'file:///a/shared/folder/'"
        ) from error
    if (world.rank, world.size) != (launch.rank, launch.size):
        raise WeftError(
            f"rank {launch.rank} of {launch.size} in mpirun's environment is rank {world.rank} of "
            f"{world.size} to mpi4py, which was built for another MPI: install one for this "
            "mpirun, or pass rendezvous="
        )
    return world


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)
