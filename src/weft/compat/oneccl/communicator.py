"""Communicators: the group of ranks that an operation is for.

oneCCL's way to a communicator: ranks that share a key-value store make one of it. A program
that has a group already, of torch.distributed or of `weft.init`, needs none of that.

Processes that are no group yet meet at a key-value store. One of them makes the main one and tells
the others its address, by whatever means it has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

import weft
from weft import WeftError, Wire, WireError
from weft.bootstrap import connect_store, host_store, join
from weft.wire.base import is_duration

from ..arguments import integer, tell, wire_of

TIMEOUT = 300.0
"""Seconds, as of a group that weft.init starts."""


class Communicator(AbstractContextManager["Communicator"]):
    """A group of ranks; closes what it opened when it is closed, or at the end of a `with` block.

    Attributes:
        wire: the group as the rest of weft knows it: `group=` of every call takes it.
    """

    __slots__ = ("_owned", "wire")

    def __init__(self, wire: Wire, *, owned: bool = False) -> None:
        self.wire, self._owned = wire, owned

    def __repr__(self) -> str:
        return f"<Communicator rank {self.rank()} of {self.size()}>"

    def __exit__(self, *_: object) -> None:
        self.close()

    def rank(self) -> int:
        """This process's number in the group."""
        return self.wire.rank

    def size(self) -> int:
        """How many ranks there are."""
        return self.wire.size

    def split(self, color: int) -> Communicator:
        """The communicator of the ranks that pass the same color, in their order; collective.

        Raises:
            WeftError: a rank's color is no integer of 64 bits; on every rank.
        """
        wire, number = self.wire, integer(color)
        if number is None or not -(2**63) <= number < 2**63:
            tell(WeftError(f"color is {color!r}: pass an integer of 64 bits"), wire)
        told = weft.all_to_all([torch.tensor([number])] * wire.size, wire)
        colors = [int(each) for each in told]

        def job() -> Wire:
            parts = [
                wire.sub([rank for rank, each in enumerate(colors) if each == one])
                for one in sorted(set(colors))
            ]
            return next(filter(None, parts))

        return Communicator(wire.worker.call("split", job), owned=True)

    def close(self) -> None:
        """Leave a group that was made for this communicator; any other stays as it is."""
        if self._owned:
            self.wire.close()


def create_communicator(
    size: int | None = None,
    rank: int | None = None,
    kvs: Kvs | dist.Store | None = None,
    *,
    timeout: float = TIMEOUT,
) -> Communicator:
    """The default group, or a new one among processes that share a key-value store.

    Args:
        size: how many ranks there are; None, as all three: the default group.
        rank: which of them this is.
        kvs: where they meet: of `create_main_kvs` or `create_kvs`, or a torch store. Communicators
            that are made on one store one after the other do not mix.
        timeout: seconds that meeting, and then any one wait, may last.

    Raises:
        WeftError: some of the three are missing or cannot be, or there is no default group.
        WireError: not all ranks came.

    Example:
        >>> from weft.compat.oneccl.communicator import create_main_kvs
        >>> with create_communicator(1, 0, create_main_kvs("127.0.0.1")) as comm:
        ...     comm
        <Communicator rank 0 of 1>
    """
    if size is None and rank is None and kvs is None:
        return Communicator(wire_of())
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
    if not is_duration(timeout):
        raise WeftError(f"timeout is {timeout!r}: pass a number of seconds")
    return Communicator(join(store, number, count, timeout), owned=True)


@dataclass(frozen=True, slots=True, eq=False)
class Kvs:
    """A key-value store that all ranks reach.

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
        """What `create_kvs` needs to know, in at most 256 bytes."""
        return self.address.encode()

    def get(self, key: str) -> bytes:
        """What a key was set to; waits until it is.

        Raises:
            WireError: it was not within the store's timeout, or the store is gone.
        """
        with _answered(f"key {key!r} has no value"):
            return bytes(self.store.get(f"user/{key}"))

    def set(self, key: str, data: bytes) -> None:
        """Set a key.

        Raises:
            WeftError: the data are no bytes.
            WireError: the store is gone.
        """
        if not isinstance(data, bytes | bytearray | str):
            raise WeftError(f"key {key!r} is set to a {type(data).__name__}: pass bytes")
        given = data if isinstance(data, str) else bytes(data)
        with _answered(f"key {key!r} was not set"):
            self.store.set(f"user/{key}", given)  # type: ignore[arg-type]  # bytes are served too


@contextmanager
def _answered(what: str) -> Iterator[None]:
    """What a store does not answer in here is an error that says so."""
    try:
        yield
    except RuntimeError as error:  # torch's store errors are
        why = str(error).splitlines()[0]
        raise WireError(f"{what}: is the process that made the store alive? ({why})") from error


def create_main_kvs(host: str | None = None) -> Kvs:
    """Host a key-value store in this process, for as long as it is held.

    Args:
        host: the address of this machine that it listens on; None: the one that leads outward.

    Raises:
        WeftError: that is no address of this machine.
    """
    try:
        store, port = host_store(host or "")
    except (OSError, TypeError) as error:
        raise WeftError(
            f"no store can listen at {host!r}: pass an address of this machine ({error})"
        ) from error
    return Kvs(store, f"{store.host}:{port}")


def create_kvs(address: bytes | str, *, timeout: float = TIMEOUT) -> Kvs:
    """The store that another process hosts.

    Args:
        address: what `get_address()` said there.
        timeout: seconds in which it must answer.

    Raises:
        WeftError: that is no address.
        WireError: nobody answers.
    """
    try:
        text = address if isinstance(address, str) else bytes(address).rstrip(b"\0").decode()
        name, _, port = text.rpartition(":")
        if not name or not 0 < int(port) < 65536:
            raise ValueError
    except (TypeError, ValueError):
        raise WeftError(f"{address!r} is no address of a store: pass host:port") from None
    with _answered(f"no store answers at {text} within {timeout:g} s"):
        return Kvs(connect_store(name.strip("[]"), int(port), timeout), text)
