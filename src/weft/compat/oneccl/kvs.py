"""The key-value store that processes meet at before they are a group.

One of them makes the main one and tells the others its address, by whatever means it has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from ...bootstrap import rendezvous
from ...errors import WeftError, WireError

__all__ = ["TIMEOUT", "Kvs", "create_kvs", "create_main_kvs"]

TIMEOUT = 300.0
"""Seconds, as of a group that weft.init starts."""


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
        try:
            return bytes(self.store.get(f"user/{key}"))
        except RuntimeError as error:  # torch's store errors are
            raise _unanswered(f"key {key!r} has no value", error) from error

    def set(self, key: str, data: bytes) -> None:
        """Set a key.

        Raises:
            WeftError: the data are no bytes.
            WireError: the store is gone.
        """
        if not isinstance(data, bytes | bytearray | str):
            raise WeftError(f"key {key!r} is set to a {type(data).__name__}: pass bytes")
        try:
            given = bytes(data) if isinstance(data, bytearray) else data
            self.store.set(f"user/{key}", given)  # type: ignore[arg-type]  # bytes are served too
        except RuntimeError as error:
            raise _unanswered(f"key {key!r} was not set", error) from error


def _unanswered(what: str, error: Exception) -> WireError:
    return WireError(
        f"{what}: is the process that made the store alive? ({str(error).splitlines()[0]})"
    )


def create_main_kvs(host: str | None = None) -> Kvs:
    """Host a key-value store in this process, for as long as it is held.

    Args:
        host: the address of this machine that it listens on; None: the one that leads outward.

    Raises:
        WeftError: that is no address of this machine.
    """
    try:
        store, port = rendezvous.host(host or "")
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
    try:
        return Kvs(rendezvous.connect(name.strip("[]"), int(port), timeout), text)
    except RuntimeError as error:  # torch's store errors are
        raise _unanswered(f"no store answers at {text} within {timeout:g} s", error) from error
