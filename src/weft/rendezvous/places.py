"""Where the ranks of a launch meet: the stores of torch, and how ranks find them.

A place is given (`rendezvous=`, or MASTER_ADDR and MASTER_PORT in the environment), or follows from
the launcher:

* `tcp://` and `env://`: a TCPStore, which rank 0 or torchrun hosts.
* `file://`: a FileStore in a folder that all ranks see. Ranks that mpirun or srun started on one
  host meet in such a file, too.
* srun's tasks on several hosts: a TCPStore on the first host, at a port computed from the job's
  name.
* mpirun's ranks on several hosts: a TCPStore, whose address rank 0 tells over MPI.

To add a kind of place, write a class with `where` and `open`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
import socket
import stat
import struct
import tempfile
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from ..base._torch import keep
from ..base.arguments import printable
from ..base.errors import WeftError, WireError
from ..base.within import within
from . import mpi
from .address import VARIABLES, free_address, interfaces, is_here, is_loopback, own_address
from .launchers import Launch
from .store import Late, pauses

LOOPBACK = "127.0.0.1"
_NAME = "weft-rendezvous"  # of the file, where a folder was given
_LENGTH = struct.Struct("=I")  # in torch's file, before each key and each value
_FILE_BEGINS = _LENGTH.pack(9) + b"refcount/"  # its first bytes
SETTLED = 30.0  # seconds after which a missing folder is an error
_LOWEST, _BEYOND = 10000, 32768  # ports above the reserved ones, and below Linux's outgoing ones
_SIGN = "weft/meets here"  # a key that marks weft's stores
_SHORT = 2.0  # seconds in which a store that is there answers
WRITTEN = 5.0  # seconds in which a rank that lives has written a record of a file to its end

_log = logging.getLogger("weft")


@dataclass(slots=True, eq=False)
class Rendezvous:
    """A store that all ranks share.

    Attributes:
        store: that store.
        where: the place, for messages.
        hosts: whether the store ends with this process, or soon after.
        lasts: whether the store may outlive processes, and have keys of earlier ones.
        round: the last membership round of this process there (`membership`).
    """

    store: dist.Store
    where: str
    hosts: bool = False
    lasts: bool = False
    round: int = 0


# Stores.


def host(address: str) -> dist.TCPStore:
    """Start a store that listens on one address of this machine, at a port that is free.

    It ends when the last reference to it goes.

    Args:
        address: where it listens.

    Raises:
        OSError: the address is not this machine's.
    """
    sock = listener_at(address, 0)
    # port 0: else torch takes a store of this process that has the same port at another address;
    # then nobody would accept what connects to this one, and its constructor would wait for ever
    return _hosted(address, 0, sock.detach())


def _hosted(address: str, port: int, listening: int | None, limit: float = 300.0) -> dist.TCPStore:
    """Host a store at a socket that listens; None: at one of torch's, on all addresses.

    A program may hold a store there itself, or tell `init` to meet there: hence `multi_tenant`.

    Raises:
        RuntimeError: the port is taken.
    """
    return dist.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        timeout=timedelta(seconds=limit),
        master_listen_fd=listening,
    )


def listener_at(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=1024)


def connect(name: str, port: int, timeout: float, late: Late = None) -> dist.TCPStore:
    """The store at a host and a port, once somebody listens there; `late` as for `pauses`.

    torch itself prints stack traces until somebody does, so it is only called then.

    Raises:
        RuntimeError: from the store; or nobody listens there, or one that is no store.
    """
    deadline = time.monotonic() + timeout
    refusal = ""
    for _ in pauses(deadline, late=late):
        try:
            with socket.create_connection((name, port), _left(deadline)) as sock:
                if sock.getsockname() != sock.getpeername():
                    break
                # where nobody listens at a port of those that the system gives to who connects
                refusal = "the connection came back to this process"
        except OSError as error:  # refused, unreachable, or a name that nobody knows yet
            refusal = error.strerror or str(error)
    else:
        raise RuntimeError(f"{name} port {port}: {refusal}")
    # torch waits for the first answer without a timeout
    limit = max(_left(deadline), 1.0)
    span = timedelta(seconds=limit)
    try:
        return within(limit, lambda: dist.TCPStore(name, port, is_master=False, timeout=span))
    except TimeoutError:
        text = f"what listens at {name} port {port} does not answer: it is no store"
        raise RuntimeError(text) from None


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)


# Places.


@dataclass(frozen=True, slots=True)
class Tcp:
    """A store at a host and a port that are known to all."""

    host: str
    port: int
    where: str
    agent: bool = False  # torchrun hosts it already
    space: str = ""  # of the keys, where others' programs may have chosen the same port

    def __post_init__(self) -> None:
        try:
            self.host.encode("idna")  # as whoever looks it up does
        except UnicodeError as error:
            raise WeftError(
                f"the rendezvous is to be at {self.where!a}, and {self.host!a} is no name of a "
                "host: pass that of rank 0's, whose parts have 1 to 63 characters, or its address"
            ) from error

    def open(self, launch: Launch, deadline: float) -> Rendezvous:
        stands_in = launch.rank < 0 and is_here(self.host)  # for rank 0, which it may be
        if not (launch.rank == 0 or stands_in) or self.agent:
            store = self.join(launch.rank, _left(deadline))
            return Rendezvous(store, self.where, lasts=self.agent)
        where, address = self.where, self.host
        if not is_here(self.host):  # a service's, as Kubernetes has them, or written wrongly
            there = ", ".join(f"{each.name} {each.addresses[0]}" for each in interfaces())
            where += f", which has to lead to rank 0 on {socket.gethostname()} (it has {there})"
            _log.warning("rank 0 waits at %s", where)
            address = free_address()
        here = self.host, self.port
        is_published = any(here == (each.host, each.port) for each in _published.values())
        listening: int | None = None  # torch's way: at all addresses
        with contextlib.suppress(OSError):  # taken, perhaps by a store of this program: torch knows
            only = "" if is_published or address != self.host else _only_address(address)
            if only:
                listening = listener_at(only, self.port).detach()
        try:
            if is_published:
                # torch does not find its own where this process had one at the same port before
                made = connect(self.host, self.port, _left(deadline))
            else:
                made = _hosted(address, self.port, listening, _left(deadline))
        except RuntimeError as error:
            taken = "address already in use" in str(error).lower()
            with contextlib.suppress(RuntimeError, WireError):
                if taken:  # by another rank 0, perhaps: then all shall hear of both
                    other = self.join(0, _SHORT)
                    other.wait([_SIGN], timedelta(seconds=_SHORT))
                    return Rendezvous(other, where)
            why = "another program listens there" if taken else str(error).splitlines()[0]
            raise WeftError(
                f"rank 0 cannot host the rendezvous at {where}: {why}; choose another port, "
                "and let MASTER_ADDR be the host of rank 0"
            ) from error
        store = dist.PrefixStore(self.space, made)
        store.set(_SIGN, "yes")
        return Rendezvous(store, where, hosts=True)

    def join(self, rank: int, timeout: float) -> dist.Store:
        late = rank, lambda: f"rank 0 is not there at {self.where} so far"
        try:
            return dist.PrefixStore(self.space, connect(self.host, self.port, timeout, late))
        except RuntimeError as error:
            raise WireError(
                f"rank {rank}: rank 0 was not there at {self.where} (waited {timeout:.0f} s): is "
                "it started on that host, and does every host reach that address and port? "
                f"({str(error).splitlines()[0]})",
                rank=rank,
                culprit=0,
            ) from error


@dataclass(frozen=True, slots=True)
class File:
    """A FileStore in a folder that all ranks see.

    The last process that uses the file removes it. A file that a crashed run has left is used
    again: rank 0 begins a new round in it, as in the store of torchrun.
    """

    path: Path

    @property
    def where(self) -> str:
        return f"file://{self.path}"

    @property
    def _refusal(self) -> str:
        return f"{self.path} is not a file of a rendezvous: pass another path, or remove it"

    def open(self, launch: Launch, deadline: float) -> Rendezvous:
        began = time.monotonic()
        # a folder that rank 0 has just made takes a while to be seen on other hosts
        for _ in pauses(min(deadline, began + SETTLED) if launch.rank > 0 else began):
            try:
                store = self._opened(deadline)
                if store is not None:
                    return Rendezvous(store, self.where, hosts=launch.rank <= 0, lasts=True)
                why = "it was taken away at once, again and again"
            except OSError as error:
                folder = self.path.parent
                why = f"there is no folder {folder} on this host: is it shared?"
                if folder.is_dir():
                    why = error.strerror or str(error)
                    break
        who = f"rank {launch.rank}: " if launch.rank >= 0 else ""
        raise WeftError(f"{who}{self.path} cannot be used for a rendezvous: {why}")

    def _opened(self, deadline: float) -> dist.FileStore | None:
        """Open the store; None if the last process of an earlier run has just removed the file.

        Raises:
            WeftError: another user owns the file or may write to it, or it is no FileStore, or not
                whole.
            OSError: it cannot be used.
        """
        with contextlib.suppress(FileExistsError):
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
            os.close(os.open(self.path, flags, 0o600))
        found = self.path.lstat()
        if not stat.S_ISREG(found.st_mode):
            raise WeftError(f"{self.path} is no regular file: remove it, or pass another path")
        belief = "it is not believed; remove it, or pass a path in a folder of your own"
        if found.st_uid != os.geteuid():
            raise WeftError(
                f"{self.path} belongs to user {found.st_uid} and this is user {os.geteuid()}: "
                f"{belief}"
            )
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise WeftError(
                f"{self.path} may be written by others (mode {stat.S_IMODE(found.st_mode):o}): "
                f"{belief}"
            )
        try:
            self._await_whole_records(deadline)
        except FileNotFoundError:
            return None
        try:
            store = dist.FileStore(str(self.path), 0)
        except (ValueError, IndexError):  # torch's, of a count of processes that is no number
            raise WeftError(self._refusal) from None
        store.set_timeout(timedelta(seconds=10))  # in which a file that is gone is waited for
        kept = self.path.exists() and self.path.stat().st_ino == found.st_ino
        return store if kept else None

    def _await_whole_records(self, deadline: float) -> None:
        """Look at the file until no record is half written: torch would read that for ever.

        Another rank may be writing one now. A process that was killed meanwhile left it so.

        Raises:
            WeftError: it is no FileStore, or a record stays cut.
            FileNotFoundError: the last process that used it has removed it.
        """
        for _ in pauses(min(deadline, time.monotonic() + WRITTEN)):
            with self.path.open("rb") as file:
                begin = file.read(len(_FILE_BEGINS))
                if not _FILE_BEGINS.startswith(begin):
                    raise WeftError(self._refusal)
                if _is_whole(begin + file.read()):
                    return
        raise WeftError(
            f"{self.path} ends inside a record, as a process leaves it that is killed while it "
            "writes: remove it, or pass another path"
        )


def _is_whole(found: bytes) -> bool:
    """Whether the records of a FileStore, each a key and a value after their lengths, are whole."""
    position = 0
    texts = 0
    while position + _LENGTH.size <= len(found):
        (length,) = _LENGTH.unpack_from(found, position)
        position += _LENGTH.size + length
        texts += 1
    return position == len(found) and texts % 2 == 0


@dataclass(frozen=True, slots=True)
class Mpi:
    """A store at the address that rank 0 tells over MPI."""

    where: str = "the address that rank 0 told over MPI"

    def open(self, launch: Launch, deadline: float) -> Rendezvous:
        try:
            world = mpi.world()
        except WeftError as error:
            raise WeftError(
                f"rank {launch.rank}: mpirun started ranks on several hosts and does not tell "
                f"where rank 0 is, and MPI cannot ({error}): or set MASTER_ADDR and MASTER_PORT "
                "(mpirun -x), or pass rendezvous='tcp://host:port' or 'file:///a/shared/folder/'"
            ) from error
        if (world.rank, world.size) != (launch.rank, launch.size):
            raise WeftError(
                f"rank {launch.rank} of {launch.size} in mpirun's environment is rank {world.rank} "
                f"of {world.size} to mpi4py, which was built for another MPI: install one for this "
                "mpirun, or pass rendezvous="
            )
        if launch.rank == 0:
            made = host(_address())
            mpi.broadcast(world, f"{made.host} {made.port}", _left(deadline))
            return Rendezvous(dist.PrefixStore("", made), self.where, hosts=True)
        name, number = mpi.broadcast(world, "", _left(deadline)).split()
        where = f"{name} port {number} (mpirun -x WEFT_INTERFACE=... names another interface)"
        return Rendezvous(
            Tcp(name, int(number), where).join(launch.rank, _left(deadline)), self.where
        )


Place = Tcp | File | Mpi


def place(launch: Launch, rendezvous: str | None, env: Mapping[str, str]) -> Place | None:
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
    if rendezvous is not None and not re.match(r"env://$|tcp://|file://", rendezvous):
        raise WeftError(
            f"rendezvous {rendezvous!r} is none of env://, tcp://host:port and file:///path"
        )
    if launch.size == 1 and launch.by_its_own_variables:
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
        is_one_host = launch.local_size == launch.size
        if launch.by_its_own_variables and launch.job and is_one_host:
            return File(private() / launch.job.replace("/", "-"))
        if launch.kind == "mpirun":
            return Mpi()
        head = env.get("MASTER_ADDR") or launch.head
        if launch.known and head:
            return _of_job(head, launch.job)
    raise WeftError(
        f"rank {launch.rank}: the environment has rank and world size but no "
        f"{' and no '.join(missing)}: start with torchrun, or set what is missing, or pass "
        "rendezvous='tcp://host:port' or 'file:///a/shared/folder/'"
    )


def come(where: Place, launch: Launch, deadline: float) -> Rendezvous:
    """Open the store of a place, or find the one that this process has opened before.

    A process keeps its stores: rank 0 may host one, and when it starts its next group, other ranks
    may already wait at that store.

    Args:
        where: the place.
        launch: how this process was launched.
        deadline: by `time.monotonic`.

    Raises:
        WeftError: it cannot be used, or rank 0 cannot host it there.
        WireError: rank 0 was not there in time.
    """
    if where.where not in _kept:
        _kept[where.where] = where.open(launch, deadline)
    return _kept[where.where]


def forget(where: Place | None = None) -> None:
    """Drop the store of a place, where a meeting has failed; None: all stores."""
    if where is not None:
        _kept.pop(where.where, None)
        return
    _kept.clear()
    _published.clear()


_kept: dict[str, Rendezvous] = {}


def _after_fork() -> None:
    """A child opens stores of its own."""
    keep(_kept.copy())
    _kept.clear()


os.register_at_fork(after_in_child=_after_fork)


def _tcp(url: str) -> Tcp:
    try:
        found = urllib.parse.urlsplit(url)
        name, port = found.hostname, found.port
    except ValueError:  # a port that is none
        name = port = None
    if not name or not port:
        raise WeftError(f"rendezvous {url!r} has no host and port: write tcp://host:port")
    return Tcp(name, port, url)


def _environment(launch: Launch, env: Mapping[str, str]) -> Tcp:
    name, port = env["MASTER_ADDR"].strip("[]"), env["MASTER_PORT"]
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise WeftError(
            f"rank {launch.rank}: the environment has MASTER_PORT={port!r}, which is no port: "
            "it is a number from 1 to 65535"
        )
    agent = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Tcp(name, int(port), f"{f'[{name}]' if ':' in name else name}:{port}", agent)


def _of_job(name: str, job: str) -> Tcp:
    """A store at a port that is computed from the job's name, which also prefixes the keys."""
    space = f"weft {os.getuid()} {printable(job)}"
    number = int.from_bytes(hashlib.sha256(space.encode()).digest()[:4], "big")
    port = _LOWEST + number % (_BEYOND - _LOWEST)
    return Tcp(name, port, f"{name}:{port}, as job {job}", space=space)


def _path(url: str, launch: Launch) -> Path:
    """The file that a URL names; in a folder, one for each job whose name all its hosts know."""
    found = urllib.parse.urlsplit(url)
    path = urllib.parse.unquote(found.path)
    if found.netloc not in ("", "localhost") or not path.startswith("/") or path == "/":
        raise WeftError(
            f"rendezvous {url!r} is no absolute path: write file:///folder/file, with three slashes"
        )
    if not path.endswith("/") and not Path(path).is_dir():
        return Path(path)
    digest = hashlib.sha256(os.fsencode(launch.job)).hexdigest()[:12]
    return Path(path) / (f"{_NAME}-{digest}" if launch.known else _NAME)


# Where this host is, for those on others.


def _only_address(name: str) -> str:
    """The single address that all ranks mean by this host's name; empty: it is not certain.

    A host may resolve its own name to the loopback. On Kubernetes `localhost` may be rank 0's own
    name for itself only; a user who has that names an interface.
    """
    there = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    first, *more = sorted({str(each[4][0]) for each in there})
    if name.lower() == "localhost":
        certain = not any(map(os.environ.get, VARIABLES))
    else:
        certain = not more and (first == name or not is_loopback(first))
    return first if certain else ""


def _address() -> str:
    """The address by which others reach this host.

    If a named interface does not exist, ranks still meet, so that all of them raise that error.
    """
    try:
        return own_address()
    except OSError:
        return free_address()


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


# For libraries whose programs ask for rank 0's address before anything else.


def publish(rank: int, path: str, timeout: float) -> tuple[str, int]:
    """Address and port of a store that rank 0 hosts; the others read them from a file.

    They wait until the store at that address has the random sign that the file names. So the file
    of an earlier run is not used.

    Args:
        rank: this one's; -1 for another than 0.
        path: of the file, which is a FileStore's, or of a folder that it is to be in.
        timeout: seconds to wait for rank 0.

    Raises:
        WeftError: the file cannot be used, or is somebody else's.
        WireError: rank 0 did not tell in time.
    """
    file = Path(os.path.abspath(path))
    place = File(file / _NAME if file.is_dir() else file)
    deadline = time.monotonic() + timeout
    launch = Launch("environment", rank, 0, 0, 0)
    told = come(place, launch, deadline).store
    if rank == 0:
        if place not in _published:
            store = host(_address())
            store.set(_SIGN, secrets.token_hex(8))
            told.set(_SIGN, json.dumps([store.host, store.port, store.get(_SIGN).decode()]))
            _published[place] = store
        store = _published[place]
        return store.host, store.port
    why = "is it started, and does it see the same folder?"
    for _ in pauses(deadline):
        if told.check([_SIGN]):
            address, port, sign = json.loads(told.get(_SIGN))
            with contextlib.suppress(RuntimeError):
                there = connect(address, port, _SHORT)
                if there.check([_SIGN]) and there.get(_SIGN) == sign.encode():
                    return address, port
            why = f"{address} port {port}, as it says there, does not answer: an earlier run's?"
    raise WireError(f"waited {timeout:.0f} s for rank 0 at {place.path}; {why}", culprit=0)


_published: dict[File, dist.TCPStore] = {}
