"""How the ranks of a group are connected: by control links, and by sockets for the wire.

At the store each rank says where it listens. If a rank is in trouble, every rank raises the same.
Then two sockets join every two ranks (`tcp.listener`).
"""

from __future__ import annotations

import contextlib
import functools
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch.distributed as dist

from ..base.errors import AbsentError, WeftError
from ..rendezvous.address import own_address
from ..rendezvous.machine import own_host
from ..rendezvous.store import Look, exchange
from ..wire.tcp.listener import (
    LANES,
    STRANGERS,
    Endpoint,
    Listener,
    Sockets,
    check_nothing,
    make_room,
)
from ..wire.tcp.meeting import architecture
from .links import ControlLinks, SocketLinks

_BUFFER = 1 << 17  # bytes that a link takes at once, whatever its peer does
PATIENCE = 5.0  # seconds in which the others can answer, and read why there is no group


@dataclass(frozen=True, slots=True)
class Statement:
    """What a rank says at the store.

    Attributes:
        host: the name of its host.
        kind: of the machine code that ranks of a host meet by; "": it has none.
        trouble: why it cannot be joined, or "".
        endpoint: where it listens, as the values of an `Endpoint`; empty: nowhere.
    """

    host: str
    kind: str
    trouble: str
    endpoint: dict[str, object]


def join_links(
    store: dist.Store,
    rank: int,
    size: int,
    timeout: float,
    trouble: str,
    look: Look,
) -> tuple[ControlLinks, Sockets, list[Statement]]:
    """Join this rank to all others by control links, and by sockets for messages; collective.

    Args:
        store: that all ranks share.
        rank, size: this rank, and how many there are.
        timeout: seconds in which all must have come.
        trouble: why this rank cannot be joined, which all ranks then raise; "": it can.
        look: called until all have come and are connected; raises once one is known not to come.

    Returns:
        The links of this rank, its sockets for messages, and what each rank has said.

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
            backlog = len(LANES) * size + STRANGERS
            listener = stack.enter_context(Listener(own_address(store), backlog, own_host()))
            endpoint = asdict(listener.endpoint)
        except OSError as error:
            trouble = trouble or f"it cannot listen: {error}"
        own = asdict(Statement(own_host(), architecture(), trouble, endpoint))
        values = exchange(store, "statement", own, rank, size, timeout, "did not join", look)
        statements = [Statement(**each) for each in values]
        _raise_trouble(statements, store, rank)  # also where this one cannot listen
        peers = {}
        for peer, each in enumerate(statements):
            if peer != rank:
                peers[peer] = Endpoint(**each.endpoint)  # type: ignore[arg-type]  # JSON's values
        messages, control = listener.connect(rank, peers, deadline, check)
    for sock in control.values():
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
    return SocketLinks(control), messages, statements


def _raise_trouble(statements: Sequence[Statement], store: dist.Store, rank: int) -> None:
    """Raise the trouble of the first rank that has any, on every rank."""
    for peer, each in enumerate(statements):
        if each.trouble:
            # the store may end with this program: first all ranks have read the statements
            with contextlib.suppress(RuntimeError, AbsentError):  # of one that has died meanwhile
                exchange(store, "read", "", rank, len(statements), PATIENCE, "")
            raise WeftError(f"rank {peer}: {each.trouble}")
