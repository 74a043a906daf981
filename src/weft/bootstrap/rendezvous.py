"""Where the ranks of a launch meet: torch's own stores, and what leads there.

A place is given (`rendezvous=`, or MASTER_ADDR and MASTER_PORT in the environment) or follows from
the launcher. `tcp://` and `env://` are a TCPStore that rank 0 hosts, or torchrun has hosted;
`file://` is a FileStore in a folder that all ranks see, and so is the place of ranks that mpirun
or srun started on one host. srun's tasks on several hosts take a port that follows from the job's
name, on the first of them; mpirun's ranks are told over MPI where rank 0 is. A new kind of place is
a class with `where` and `open`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import queue
import random
import re
import secrets
import socket
import stat
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from ..errors import WeftError, WireError
from ..wire.interface import free_address, interfaces, is_own, own_address
from .launchers import Launch

LOOPBACK = "127.0.0.1"
_NAME = "weft-rendezvous"  # of the file, where a folder was given
_LARGEST = 65536  # bytes of a file that is read at all
_SETTLED = 30.0  # seconds after which a folder that is not there is taken for a mistake
_LOWEST, _BEYOND = 10000, 32768  # between the reserved ports and those of Linux's outgoing calls
_SIGN = "weft/meets here"  # tells a store of weft's from another program's
_SHORT = 2.0  # seconds in which a store that is there answers
_CALL = 3.0  # seconds in which a host that leads here answers, and after which the person is told
_TOLD = 5.0  # seconds in which the other ranks of a host may read why rank 0 cannot host
_LATE = 0.5  # seconds after a timeout in which torch itself may report it
_FIRST, _LAST, _GROWTH = 0.01, 1.0, 1.5  # seconds between two looks, and how they grow

_log = logging.getLogger("weft")


class MovedError(Exception):
    """Rank 0 is to be found elsewhere now: another one has written the file since."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """A store that all ranks share.

    Attributes:
        store: that store.
        where: the place, for messages.
        hosts: whether it ends with this process.
        close: nobody else is let in.
        look: raises `MovedError` where this store is not the one to wait at any more.
        unanswered: what to say if rank 0 does not read what this rank has said; empty where it
            cannot be that it was there before and has gone.
    """

    store: dist.Store
    where: str
    hosts: bool = False
    close: Callable[[], None] = lambda: None
    look: Callable[[], None] = lambda: None
    unanswered: Callable[[], str] = lambda: ""


# Stores.


def host(address: str = "") -> tuple[dist.TCPStore, int]:
    """A store that listens on one address of this machine, and its port.

    It ends when nobody holds it any more.

    Args:
        address: where it listens; empty: where other machines are likely to find this one.

    Raises:
        OSError: the address is not this machine's.
    """
    address = address or free_address()
    with _listener(address, 0) as sock:
        port = sock.getsockname()[1]
        store = dist.TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,  # `init` may be told to meet here
            master_listen_fd=os.dup(sock.fileno()),  # the store closes its copy
        )
    return store, port


def has(
    store: dist.Store,
    key: str,
    deadline: float,
    ranks: int,
    look: Callable[[], None] = lambda: None,
) -> bool:
    """Wait for a key, and say whether it is there in time.

    Without `store.wait`, which has torch print warnings when the time is over. Of many ranks each
    asks less often.

    Args:
        store: that has it, or will.
        key: its name.
        deadline: as `time.monotonic` tells it.
        ranks: how many may be waiting.
        look: called before each question; what it raises ends the waiting.

    Raises:
        RuntimeError: from the store.
    """
    for _ in pauses(deadline, 0.001, max(0.02, 0.0005 * ranks)):
        look()
        if store.check([key]):
            return True
    return False


def pauses(deadline: float, first: float = _FIRST, last: float = _LAST) -> Iterator[None]:
    """Once, and again after longer and longer pauses, until the deadline; then a last time.

    No two processes pause alike, so that a thousand of them do not storm a server.
    """
    while True:
        yield
        left = deadline - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(left, first * random.uniform(0.5, 1.0)))
        first = min(last, first * _GROWTH)


def _listener(address: str, port: int) -> socket.socket:
    """A socket that listens on an address, or on every one of IPv4 and IPv6 if that is empty."""
    if not address and socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True, reuse_port=False
        )
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=1024)


def connect(
    name: str, port: int, timeout: float, look: Callable[[], None] = lambda: None
) -> dist.TCPStore:
    """The store at a host and a port, once somebody listens there.

    torch itself prints stack traces until somebody does, so it is only called then.

    Raises:
        RuntimeError: from the store; or nobody listens there, or one that is no store.
    """
    deadline = time.monotonic() + timeout
    refusal = ""
    for _ in pauses(deadline):
        look()
        try:
            with socket.create_connection((name, port), max(_left(deadline), _FIRST)):
                break
        except OSError as error:  # refused, unreachable, or a name that nobody knows yet
            refusal = error.strerror or str(error)
    else:
        raise RuntimeError(f"{name} port {port}: {refusal}")
    made: queue.SimpleQueue[dist.TCPStore | RuntimeError] = queue.SimpleQueue()
    limit = max(_left(deadline), 1.0)

    def attach() -> None:
        try:
            span = timedelta(seconds=limit)
            made.put(dist.TCPStore(name, port, is_master=False, timeout=span))
        except RuntimeError as error:
            made.put(error)

    # a thread, since torch waits for the first answer without any timeout
    thread = threading.Thread(target=attach, name="weft-store", daemon=True)
    thread.start()
    for _ in pauses(time.monotonic() + limit + _LATE, last=0.2):
        look()
        if not made.empty():
            break
    else:
        raise RuntimeError(f"what listens at {name} port {port} does not answer: it is no store")
    found = made.get()
    if isinstance(found, RuntimeError):
        raise found
    return found


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

    def open(self, launch: Launch, deadline: float, guest: bool) -> Rendezvous:
        if launch.rank != 0 or self.agent:
            return Rendezvous(self.join(launch.rank, _left(deadline)), self.where)
        behind = None
        if not is_here(self.host):
            behind = _led_here(self.host, self.port, _left(deadline))
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
                if taken:  # by another rank 0, perhaps: then all shall hear of both
                    other = self.join(0, _SHORT)
                    other.wait([_SIGN], timedelta(seconds=_SHORT))
                    return Rendezvous(other, self.where)
            why = "another program listens there" if taken else str(error).splitlines()[0]
            raise WeftError(
                f"rank 0 cannot host the rendezvous at {self.where}: {why}; choose another port, "
                "and let MASTER_ADDR be the host of rank 0"
            ) from error
        store = dist.PrefixStore(self.space, made)
        store.set(_SIGN, "yes")
        return Rendezvous(store, self.where, hosts=True)

    def join(self, rank: int, timeout: float) -> dist.Store:
        try:
            found = connect(self.host, self.port, timeout, lambda: _heed(self.where))
            return dist.PrefixStore(self.space, found)
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
    """A FileStore beside a file that names it, in a folder that all ranks see.

    The FileStore is a new one for each rendezvous, since torch's reads whatever an earlier run has
    left; the file says which, is replaced as a whole by the next rank 0, and goes when all have
    come. A rank that waits at a store to which the file leads no more goes to the new one. So a
    file that a crashed run has left delays nobody, and of two processes that are rank 0 the first
    goes to the second, where all hear of both.
    """

    path: Path

    @property
    def where(self) -> str:
        return f"file://{self.path}"

    def open(self, launch: Launch, deadline: float, guest: bool) -> Rendezvous:
        try:
            if launch.rank == 0 and not guest:
                return self._host()
            return self._join(launch.rank, deadline)
        except OSError as error:
            if isinstance(error, WireError):
                raise
            folder = self.path.parent
            why = error.strerror if folder.is_dir() else f"there is no folder {folder}"
            raise WeftError(
                f"rank {launch.rank}: {self.path} cannot be used for a rendezvous: {why or error}"
            ) from error

    def _host(self) -> Rendezvous:
        _sweep(self.path.parent)
        mine = Note.mine()
        name = self.path.parent / mine.store
        os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))

        def look() -> None:
            there = read(self.path)
            if there is None:  # another rank 0 has taken it away with its own
                leave(self.path, mine)
            elif there != mine:
                raise MovedError

        try:
            leave(self.path, mine)
            store = _file_store(name)
        except BaseException:
            name.unlink()
            raise
        return Rendezvous(
            store, self.where, hosts=True, look=look, close=lambda: withdraw(self.path, mine)
        )

    def _join(self, rank: int, deadline: float) -> Rendezvous:
        began = time.monotonic()
        who = f"rank {rank}" if rank >= 0 else "a process without a rank"
        for _ in pauses(deadline):
            _heed(self.where)
            why = "there is no such file: is rank 0 started, and does it see the same folder?"
            note = read(self.path)
            if note is not None:
                why = _old(note)
                if (note.store, rank) not in _been:  # else it is that of the rendezvous before
                    with contextlib.suppress(FileNotFoundError):  # gone with an earlier run
                        return self._at(note, rank, who, began)
            elif not self.path.parent.is_dir():
                why = f"there is no folder {self.path.parent} on this host: is it shared?"
                if time.monotonic() - began >= _SETTLED:
                    raise WeftError(self._waited(who, began, why))
        raise WireError(self._waited(who, began, why), rank=rank, culprit=0)

    def _at(self, note: Note, rank: int, who: str, began: float) -> Rendezvous:
        name = self.path.parent / note.store
        _check_owner(name, name.lstat())

        def look() -> None:
            if read(self.path) not in (note, None) or not name.exists():
                raise MovedError

        def unanswered() -> str:
            return self._waited(who, began, _old(note))

        store = _file_store(name)
        _been.add((note.store, rank))
        return Rendezvous(store, self.where, look=look, unanswered=unanswered)

    def _waited(self, who: str, began: float, why: str) -> str:
        return f"{who}: waited {time.monotonic() - began:.0f} s for rank 0 at {self.where}; {why}"


@dataclass(frozen=True, slots=True)
class Mpi:
    """Wherever rank 0 says over MPI."""

    where: str = "the address that rank 0 told over MPI"

    def open(self, launch: Launch, deadline: float, guest: bool) -> Rendezvous:
        from ..wire import mpi  # here: `import weft` shall be quick

        try:
            world = mpi.start(_left(deadline))
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
            made, port = host(_address())
            world.broadcast(f"{made.host} {port}", _left(deadline))
            return Rendezvous(dist.PrefixStore("", made), self.where, hosts=True)
        name, number = world.broadcast("", _left(deadline)).split()
        where = f"{name} port {number} (mpirun -x WEFT_INTERFACE=... names another interface)"
        return Rendezvous(
            Tcp(name, int(number), where).join(launch.rank, _left(deadline)), self.where
        )


Place = Tcp | File | Mpi


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
    if rendezvous is not None and not re.match(r"env://$|tcp://|file://", rendezvous):
        raise WeftError(
            f"rendezvous {rendezvous!r} is none of env://, tcp://host:port and file:///path"
        )
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
            return File(private() / launch.job.replace("/", "-"))
        head = env.get("MASTER_ADDR") or launch.head
        if launch.kind == "srun" and launch.job and head:
            return _of_job(head, launch.job)
        if launch.kind == "mpirun":
            return Mpi()
    raise WeftError(
        f"rank {launch.rank}: the environment has rank and world size but no "
        f"{' and no '.join(missing)}: start with torchrun, or set it, or pass "
        "rendezvous='tcp://host:port' or 'file:///a/shared/folder/'"
    )


def can_host(where: Place) -> bool:
    """Whether this process can open the rendezvous, though it does not know that it is rank 0."""
    if isinstance(where, File):
        return True
    return isinstance(where, Tcp) and not where.agent and is_here(where.host)


def store_of(where: Place, launch: Launch, deadline: float, guest: bool) -> tuple[Rendezvous, int]:
    """Come to a place: the store there, and how often this process has met others in it.

    A process keeps a store that listens, and finds it again: rank 0 may host it, and when it starts
    its next group the others may be asking already. The number is the same on all ranks, and tells
    what they write in one store apart.

    Args:
        where: the place.
        launch: which rank this process is.
        deadline: as `time.monotonic` tells it.
        guest: whether a rank 0 finds another one there, and goes to its store.

    Raises:
        WeftError: rank 0 cannot host it there; it tells the other ranks of its host first.
        WireError: rank 0 was not there in time.
    """
    key = (where.where, os.getpid())
    meeting, times = _kept.get(key, (None, 0))
    if meeting is None:
        try:
            meeting = where.open(launch, deadline, guest)
        except WeftError as error:
            if launch.rank == 0:
                _notify(where.where, str(error), launch.size)
            raise
    if isinstance(where, File):  # a new one each time
        return meeting, 1
    _kept[key] = meeting, times + 1
    return meeting, times + 1


def forget(where: Place | None = None) -> None:
    """Let go of the stores of a place, where meeting has failed, or of all."""
    if where is None:
        _kept.clear()
        return
    key = (where.where, os.getpid())
    _, times = _kept.pop(key, (None, 0))
    if isinstance(where, Tcp):  # others may keep the store, and count on
        _kept[key] = None, times


_kept: dict[tuple[str, int], tuple[Rendezvous | None, int]] = {}
_been: set[tuple[str, int]] = set()  # the FileStores at which this process was, as which rank


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
    """At a port that follows from the job's name, among keys that do."""
    space = f"weft {os.getuid()} {job}"
    number = int.from_bytes(hashlib.sha256(space.encode()).digest()[:4], "big")
    port = _LOWEST + number % (_BEYOND - _LOWEST)
    return Tcp(name, port, f"{name}:{port}, as job {job}", space=space)


def _path(url: str, launch: Launch) -> Path:
    """The file; in a folder, one for each job that has a name, which all of its hosts know."""
    found = urllib.parse.urlsplit(url)
    path = urllib.parse.unquote(found.path)
    if found.netloc not in ("", "localhost") or not path.startswith("/") or path == "/":
        raise WeftError(
            f"rendezvous {url!r} is no absolute path: write file:///folder/file, with three slashes"
        )
    if not path.endswith("/") and not Path(path).is_dir():
        return Path(path)
    # others call the job by what started it on that host, or have no name at all
    known = launch.job and (launch.kind == "srun" or "@" in launch.job)
    digest = hashlib.sha256(launch.job.encode()).hexdigest()[:12]
    return Path(path) / (f"{_NAME}-{digest}" if known else _NAME)


# Where this host is, for those on others.


def is_here(name: str) -> bool:
    """Whether a host's name or number is this machine's."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:  # nobody knows it
        return False
    return any(is_own(str(each[0])) for *_, each in found)


def _address() -> str:
    """By which others find this host.

    An interface that is named and not there keeps nobody from meeting: all shall hear of it.
    """
    try:
        return own_address()
    except OSError:
        return free_address()


def _led_here(name: str, port: int, timeout: float) -> int | None:
    """A listener behind a host's name or number that is not this machine's, once that leads here.

    A service's does, as Kubernetes has them, or one that a router translates. One that was written
    wrongly does not, and torch itself would print stack traces all the while.

    Returns:
        Its file descriptor, which is the caller's; None if the port is taken.

    Raises:
        WireError: it did not lead to anybody in time.
    """
    try:
        sock = _listener("", port)
    except OSError:
        return None
    there = ", ".join(f"{each.name} {each.addresses[0]}" for each in interfaces())
    elsewhere = f"rank 0 is on {socket.gethostname()}, which is not {name} (it has {there})"
    began = time.monotonic()
    refusal, told = "", False
    with sock:
        for _ in pauses(began + timeout):
            try:
                with socket.create_connection((name, port), min(timeout, _CALL)):
                    return os.dup(sock.fileno())
            except OSError as error:
                refusal = error.strerror or str(error)
            if not told and time.monotonic() - began >= min(timeout, _CALL):
                told = True
                _log.warning("%s: waiting for that to lead here", elsewhere)
    raise WireError(
        f"{elsewhere}, and port {port} there did not lead here within {timeout:.0f} s "
        f"({refusal}): start rank 0 on that host, or have the ranks meet at this one",
        rank=0,
    )


# Files of this user's, which others may see and must not have written.


@dataclass(frozen=True, slots=True)
class Note:
    """What a rank 0 writes into the file that is given.

    Attributes:
        store: the name of the FileStore beside it; of a store that listens, its sign.
        host: the name of its host, for messages.
        pid: its process, for messages.
        written: when, in seconds since 1970, for messages.
        address: where its store listens; empty for a FileStore.
        port: where its store listens.
    """

    store: str
    host: str
    pid: int
    written: float
    address: str = ""
    port: int = 0

    @classmethod
    def mine(cls, address: str = "", port: int = 0) -> Note:
        """That of this process, with a store that has no name yet."""
        name, pid = socket.gethostname(), os.getpid()
        store = f".weft-{name}-{pid}-{secrets.token_hex(8)}"
        return cls(store, name, pid, time.time(), address, port)

    @classmethod
    def parse(cls, text: bytes) -> Note:
        """
        Raises:
            ValueError: it is none.
        """
        try:
            made = cls(**json.loads(text))
            if not re.fullmatch(r"\.weft-[^/\0]+", made.store) or not 0 <= made.port < 65536:
                raise ValueError("no name of a store, or no port")
            str(made)
        except (OverflowError, TypeError) as error:
            raise ValueError("no note") from error
        return made

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.written))
        return f"process {self.pid} on {self.host}, written {when}"


def _old(note: Note) -> str:
    return f"the file there is that of {note}, which does not answer: is that an earlier run?"


def read(path: Path) -> Note | None:
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
        _check_owner(path, path.lstat())
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with open(fd, "rb") as file:
        _check_owner(path, os.fstat(fd))
        content = file.read(_LARGEST)
    try:
        return Note.parse(content)
    except ValueError as error:
        raise WeftError(
            f"{path} is not a file of a rendezvous: pass another path, or remove it"
        ) from error


def leave(path: Path, note: Note) -> None:
    """Write the file, whole and for this user alone, in place of one that is there.

    Raises:
        WeftError: what is there is not this user's, or no such file.
        OSError: nothing can be written there.
    """
    read(path)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "w") as file:
            json.dump(asdict(note), file)
            file.flush()
            os.fsync(fd)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def withdraw(path: Path, note: Note) -> None:
    """Take the file away, if it is this one."""
    with contextlib.suppress(OSError, WeftError):  # it is gone, or the folder is
        if read(path) == note:
            path.unlink()


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


def _file_store(path: Path) -> dist.FileStore:
    """The FileStore of a path; the last process that lets go of it takes the file away."""
    store = dist.FileStore(str(path), 0)
    store.set_timeout(timedelta(seconds=10))  # in which a file that is gone is waited for
    return store


def _sweep(folder: Path) -> None:
    """Take away the FileStores of processes that were killed on this host."""
    for path in folder.glob(f".weft-{socket.gethostname()}-*-*"):
        try:
            os.kill(int(path.name.split("-")[-2]), 0)
        except ProcessLookupError:
            with contextlib.suppress(OSError):  # another user's, perhaps
                path.unlink()
        except (OSError, ValueError):
            pass


def _check_owner(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise WeftError(f"{path} is no regular file: remove it, or pass another path")
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


# A failure notice: why rank 0 cannot host the rendezvous, for the other ranks of its host, which
# wait at a place where nobody will come. It is a file in this user's private folder.


def _notify(where: str, error: str, ranks: int) -> None:
    """Tell the other ranks of this host, until all have heard it or some seconds have passed.

    Args:
        where: the place of the rendezvous, as every rank names it.
        error: what they raise.
        ranks: how many there are, on all hosts; 0 if that is not known.
    """
    if ranks == 1:
        return
    _log.warning("%s", error)  # now: this process waits for the others
    with contextlib.suppress(OSError, WeftError):  # then they hear it later
        path = _notice(where)
        length = path.write_text(json.dumps([time.time() + _TOLD, error]))
        for _ in pauses(time.monotonic() + _TOLD, last=0.05):
            if 0 < ranks - 1 <= path.stat().st_size - length:
                break
        path.unlink()


def _heed(where: str) -> None:
    """Raise what rank 0 says of this place, if it says so on this host.

    Raises:
        WeftError: rank 0 cannot host the rendezvous there.
    """
    error = ""
    with contextlib.suppress(OSError, ValueError):  # nothing is said there, or not all of it
        path = _notice(where)
        until, told = json.loads(path.read_text())
        if time.time() < until:  # else rank 0 was killed before it took this away
            error = told
            with path.open("a") as file:
                file.write("\n")  # for each rank that has heard it
    if error:
        raise WeftError(error)


def _notice(where: str) -> Path:
    return private() / f"refused-{hashlib.sha256(where.encode()).hexdigest()[:16]}"


# For libraries whose programs ask for rank 0's address before anything else.


def publish(rank: int, path: str, timeout: float) -> tuple[str, int]:
    """Address and port of a store that rank 0 hosts, as a file tells them to the others.

    Rank 0 leaves the file, and `withdraw_published` takes it away when all have come; the others
    wait until a store at the address has the file's sign, so a file of an earlier run is not
    believed.

    Args:
        rank: this one's; -1 for another than 0.
        path: of the file, or of a folder that it is to be in.
        timeout: seconds to wait for it.

    Raises:
        WeftError: the file cannot be used, or is somebody else's.
        WireError: it did not come in time.
    """
    file = Path(os.path.abspath(path))
    file = file / _NAME if file.is_dir() else file
    why = "there is no such file"
    try:
        if rank == 0 and file not in _published:
            store, port = host(_address())
            note = Note.mine(store.host, port)
            store.set(_SIGN, note.store)
            leave(file, note)
            _published[file] = note, store
        if rank == 0:
            note, _ = _published[file]
            return note.address, note.port
        for _ in pauses(time.monotonic() + timeout):
            found = read(file)
            if found is not None and found.port:
                with contextlib.suppress(RuntimeError):
                    there = connect(found.address, found.port, _SHORT)
                    if there.check([_SIGN]) and there.get(_SIGN) == found.store.encode():
                        return found.address, found.port
                why = _old(found)
    except OSError as error:
        raise WeftError(f"{file} cannot be used for a rendezvous: {error.strerror}") from error
    raise WireError(f"waited {timeout:.0f} s for rank 0 at {file}; {why}", culprit=0)


def withdraw_published() -> None:
    """All ranks have come, or this process ends: its files lead nobody here any more."""
    while _published:
        path, (note, _) = _published.popitem()
        if note.pid == os.getpid():  # not in a forked child
            withdraw(path, note)


_published: dict[Path, tuple[Note, dist.TCPStore]] = {}
