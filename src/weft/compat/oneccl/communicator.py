"""Communicators: the group of ranks of an operation, made as in oneCCL.

Processes that are not yet a group make a communicator at a key-value store. One of them hosts the
store (`create_main_kvs`) and passes its address to the others by means of its own; they connect to
it (`create_kvs`). A program that has a group already, from torch.distributed or `weft.init`, needs
no store.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

import weft
from weft import Group, WeftError, WireError
from weft.base.arguments import LONGEST, wrong_timeout
from weft.bootstrap import TIMEOUT, connect_store, host_store, join

from ..arguments import group_of, integer, tell


class Communicator(AbstractContextManager["Communicator"]):
    """A group of ranks. At the end of a `with` block it is closed.

    Attributes:
        group: the group as a `weft.Group`, which `group=` of every call of weft takes.

    Example:
        >>> with weft.init():  # alone: a group of one
        ...     comm = create_communicator()
        ...     comm.rank(), comm.size()
        (0, 1)
    """

    __slots__ = ("_owned", "group")

    def __init__(self, group: Group, *, owned: bool = False) -> None:
        self.group, self._owned = group, owned

    def __repr__(self) -> str:
        return f"<Communicator rank {self.rank()} of {self.size()}>"

    def __exit__(self, *_: object) -> None:
        self.close()

    def rank(self) -> int:
        """The rank of this process in the group."""
        return self.group.rank

    def size(self) -> int:
        """The number of ranks."""
        return self.group.size

    def split(self, color: int) -> Communicator:
        """Make the communicator of the ranks that pass the same color, in rank order. Collective.

        Raises:
            WeftError: a rank's color is no integer of 64 bits; the same text on every rank.
            WireError: a peer or a link failed; names the culprit.

        Example:
            >>> from weft.testing import run
            >>> def program(group):
            ...     return create_communicator().split(group.rank % 2).size()
            >>> run(3, program)
            [2, 1, 2]
        """
        group, number = self.group, integer(color)
        if number is None or not -(2**63) <= number < 2**63:
            tell(WeftError(f"color is {color!r}: pass an integer of 64 bits"), group)
        told = weft.all_to_all([torch.tensor([number], device="cpu")] * group.size, group)
        colors = [int(each) for each in told]

        def job() -> Group:
            parts = [
                group.split([rank for rank, each in enumerate(colors) if each == one])
                for one in sorted(set(colors))
            ]
            return next(filter(None, parts))

        return Communicator(group.worker.call("split", job), owned=True)

    def close(self) -> None:
        """Close the group if it was made for this communicator; a default group stays open."""
        if self._owned:
            self.group.close()


def create_communicator(
    size: int | None = None,
    rank: int | None = None,
    kvs: Kvs | dist.Store | None = None,
    *,
    timeout: float = TIMEOUT,
) -> Communicator:
    """Make a communicator: of the default group, or of processes that share a key-value store.

    Args:
        size: the number of ranks. Without `size`, `rank` and `kvs`: the default group.
        rank: the rank of this process, from 0.
        kvs: where the processes meet: from `create_main_kvs` or `create_kvs`, or a torch store.
            Several communicators may be made at one store, one after the other.
        timeout: seconds that the processes wait for each other here, and then in any one wait.

    Raises:
        WeftError: some of the three are missing or wrong, or there is no default group; raised on
            this rank alone.
        WireError: not all ranks came within `timeout`.

    Example:
        >>> from weft.compat.oneccl.communicator import create_main_kvs
        >>> with create_communicator(1, 0, create_main_kvs("127.0.0.1")) as comm:
        ...     comm
        <Communicator rank 0 of 1>
    """
    if size is None and rank is None and kvs is None:
        return Communicator(group_of())
    if size is None or rank is None or kvs is None:
        raise WeftError("pass size, rank and kvs together, or none of them for the default group")
    count, number = integer(size), integer(rank)
    if count is None or number is None:
        raise WeftError(f"size is {size!r} and rank is {rank!r}: pass two integers")
    store = kvs.store if isinstance(kvs, Kvs) else kvs
    if not isinstance(store, dist.Store):
        raise WeftError(
            f"kvs is a {type(kvs).__name__}: make it by create_main_kvs or create_kvs, or pass a "
            "store of torch"
        )
    return Communicator(join(store, number, count, timeout), owned=True)


@dataclass(frozen=True, slots=True, eq=False)
class Kvs:
    """A key-value store that all ranks can reach.

    Attributes:
        store: the torch store.
        address: "host:port".

    Example:
        >>> kvs = create_main_kvs("127.0.0.1")
        >>> same = create_kvs(kvs.get_address())
        >>> same.set("color", b"blue")
        >>> kvs.get("color")
        b'blue'
    """

    store: dist.Store
    address: str

    def get_address(self) -> bytes:
        """The address for `create_kvs` of the other processes, as bytes."""
        return self.address.encode()

    def get(self, key: str) -> bytes:
        """Return the value of a key; wait until it is set.

        Raises:
            WireError: nobody set it within the store's timeout, or the store is gone.
        """
        with _answered(f"key {key!r} has no value"):
            return bytes(self.store.get(f"user/{key}"))

    def set(self, key: str, data: bytes) -> None:
        """Set a key to bytes or a str.

        Raises:
            WeftError: `data` is something else.
            WireError: the store is gone.
        """
        if not isinstance(data, bytes | bytearray | str):
            raise WeftError(f"key {key!r} is set to a {type(data).__name__}: pass bytes")
        given = data if isinstance(data, str) else bytes(data)
        with _answered(f"key {key!r} was not set"):
            self.store.set(f"user/{key}", given)  # type: ignore[arg-type]  # bytes are served too


@contextmanager
def _answered(what: str) -> Iterator[None]:
    """Turn an error of the store in this block into a WireError that begins with `what`."""
    try:
        yield
    except RuntimeError as error:  # torch's store errors are
        why = str(error).splitlines()[0]
        raise WireError(f"{what}: is the process that made the store alive? ({why})") from error


def create_main_kvs(host: str | None = None) -> Kvs:
    """Host a key-value store in this process, for as long as the program holds the result.

    Args:
        host: the address of this machine at which it listens; None: the address by which other
            hosts reach this machine.

    Raises:
        WeftError: the store cannot listen at that address.

    Example:
        >>> create_main_kvs("127.0.0.1").get_address().partition(b":")[0]
        b'127.0.0.1'
    """
    try:
        store, port = host_store(host or "")
    except (OSError, TypeError) as error:
        raise WeftError(
            f"no store can listen at {host!r}: pass an address of this machine ({error})"
        ) from error
    return Kvs(store, f"{store.host}:{port}")


def create_kvs(address: bytes | str, *, timeout: float = TIMEOUT) -> Kvs:
    """Connect to the key-value store that another process hosts.

    Args:
        address: what `get_address()` returned there.
        timeout: seconds within which the store must answer.

    Raises:
        WeftError: `address` is no address, or `timeout` no number of seconds.
        WireError: no store answered.
    """
    try:
        text = address if isinstance(address, str) else bytes(address).rstrip(b"\0").decode()
        name, _, port = text.rpartition(":")
        if not name or not 0 < int(port) < 65536:
            raise ValueError
    except (TypeError, ValueError):
        raise WeftError(f"{address!r} is no address of a store: pass host:port") from None
    if error := wrong_timeout(timeout):
        raise WeftError(error)
    with _answered(f"no store answers at {text} within {timeout:g} s"):
        return Kvs(connect_store(name.strip("[]"), int(port), min(timeout, LONGEST)), text)
