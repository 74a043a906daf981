"""How the control links of a group are made: before any wire, which is then made over them.

At the store each rank says where it listens. If a rank is in trouble, every rank raises the same.
Then a socket joins every two ranks (`tcp.listener`).
"""

from __future__ import annotations

import contextlib
import functools
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch.distributed as dist

from ..base.errors import AbsentError, WeftError
from ..rendezvous.address import own_address
from ..rendezvous.machine import own_host
from ..rendezvous.store import Look, exchange
from ..wire.start import check_nothing
from ..wire.tcp.listener import CONTROL, STRANGERS, Endpoint, Listener, make_room
from .links import ControlLinks, SocketLinks

_BUFFER = 1 << 17  # bytes that a link takes at once, whatever its peer does
PATIENCE = 5.0  # seconds in which the others can answer, and read why there is no group


@dataclass(frozen=True, slots=True)
class _Statement:
    """What a rank says at the store.

    Attributes:
        host: the name of its host.
        trouble: why it cannot be joined, or "".
        endpoint: where it listens, as the values of an `Endpoint`; empty: nowhere.
    """

    host: str
    trouble: str
    endpoint: dict[str, object]


def join_links(
    store: dist.Store,
    rank: int,
    size: int,
    timeout: float,
    trouble: str,
    look: Look,
) -> tuple[ControlLinks, list[str]]:
    """Join this rank to all others by control links; collective.

    Args:
        store: that all ranks share.
        rank, size: this rank, and how many there are.
        timeout: seconds in which all must have come.
        trouble: why this rank cannot be joined, which all ranks then raise; "": it can.
        look: called until all have come and are connected; raises once one is known not to come.

    Returns:
        The links of this rank, and for each rank the name of its host.

    Raises:
        WeftError: a rank is in trouble, may not open as many files, or cannot listen. The same on
            every rank.
        RuntimeError: from the store.
        OSError: from the sockets.
    """
    deadline = time.monotonic() + timeout
    # a rank that is connected leaves only when all others are, too
    check = check_nothing if look is None else functools.partial(look, lambda: range(size))
    with contextlib.ExitStack() as stack:
        endpoint: dict[str, object] = {}
        try:
            trouble = trouble or make_room(size - 1) or ""
            listener = stack.enter_context(_listener(store, size))
            endpoint = asdict(listener.endpoint)
        except OSError as error:
            trouble = trouble or f"it cannot listen: {error}"
        own = asdict(_Statement(own_host(), trouble, endpoint))
        values = exchange(store, "statement", own, rank, size, timeout, "did not join", look)
        statements = [_Statement(**each) for each in values]
        _raise_trouble(statements, store, rank)  # also where this one cannot listen
        links = _over_sockets(listener, statements, rank, deadline, check)
    return links, [each.host for each in statements]


def _listener(store: dist.Store, size: int) -> Listener:
    return Listener(own_address(store), size + STRANGERS, own_host())


def _raise_trouble(statements: Sequence[_Statement], store: dist.Store, rank: int) -> None:
    """Raise the trouble of the first rank that has any, on every rank."""
    for peer, each in enumerate(statements):
        if each.trouble:
            # the store may end with this program: first all ranks have read the statements
            with contextlib.suppress(RuntimeError, AbsentError):  # of one that has died meanwhile
                exchange(store, "read", "", rank, len(statements), PATIENCE, "")
            raise WeftError(f"rank {peer}: {each.trouble}")


def _over_sockets(
    listener: Listener,
    statements: Sequence[_Statement],
    rank: int,
    deadline: float,
    check: Callable[[], None],
) -> ControlLinks:
    """Links over a socket to each peer; by the deadline, or an error says who did not come.

    `check` is called again and again; it raises what ends the wait.
    """
    peers = {}
    for peer, each in enumerate(statements):
        if peer != rank:
            peers[peer] = Endpoint(**each.endpoint)  # type: ignore[arg-type]  # JSON's values
    sockets = listener.connect(rank, peers, CONTROL, deadline, check)
    for sock in sockets.values():
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        sock.setblocking(False)
    return SocketLinks(sockets)
