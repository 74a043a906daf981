"""How the control links of a group are made: before any wire, which is then made over them.

At the store each rank says where it listens. If a rank is in trouble, every rank raises the same.
Then a socket joins every two ranks (`tcp.listener`).
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TypeVar

import torch.distributed as dist

from ..base._torch import NoDevice
from ..base.errors import AbsentError, WeftError, WireError, in_short, names
from ..base.pace import patient
from ..rendezvous.address import own_address
from ..rendezvous.machine import own_host
from ..rendezvous.store import AnsweringStore, Look, exchange, has, pauses
from ..wire.start import check_nothing
from ..wire.tcp.listener import CONTROL, STRANGERS, Endpoint, Listener, make_room
from .links import ControlLinks, SocketLinks

T = TypeVar("T")

_BUFFER = 1 << 17  # bytes that a link takes at once, whatever its peer does
PATIENCE = 5.0  # seconds in which the others can answer, and read why there is no group
HELD_UP = 1.0  # seconds after a deadline from which on a rank itself is late, and was stopped


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


class NotJoinedError(RuntimeError):
    """The ranks are not joined, and all of them know why.

    Attributes:
        culprit: the rank to blame, or None.
    """

    def __init__(self, text: str, culprit: int | None) -> None:
        super().__init__(text)
        self.culprit = culprit


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What came of it that gloo was to connect all ranks.

    Attributes:
        text: why they are not joined, as a clause; "": they are.
        culprit: the rank to blame, or None.
        absent: the ranks that have not answered, and may never read this.
    """

    text: str
    culprit: int | None = None
    absent: list[int] = field(default_factory=list)


_JOINED = _Outcome("")


class RollCall:
    """What ranks tell each other at the store while gloo connects them, for a group.

    Before there are links nobody sees that a rank dies, and gloo says what has failed, but not
    whose fault that is: it may fail on one rank because it has failed on another. So a rank for
    which it has failed calls the roll, which all others answer, and then says what is known. Ranks
    that are connected wait until all are. The first to say what came of it is right: all ranks are
    joined, or all raise the same.

    The keys, each of which is written once by a rank, for all: "connected 3", "failed 3" with what
    gloo said there, "here 3" and "read 3"; and by whoever is the first "roll call" and "outcome".
    """

    def __init__(
        self,
        store: AnsweringStore,
        rank: int,
        size: int,
        *,
        step: str,
        patience: float,
        busy_until: float = -math.inf,
    ) -> None:
        """Call it in a part of the store that no other roll call uses.

        Args:
            store: that all ranks share.
            rank, size: this rank, and how many there are.
            step: what the ranks are doing, for errors.
            patience: seconds in which the others answer.
            busy_until: when the others are through with the step at the latest, by
                `time.monotonic`, if they cannot answer before.
        """
        self._store = store
        self._rank = rank
        self._size = size
        self._step = step
        self._patience = patience
        self._busy_until = busy_until
        self._came_in_time = False  # to where all are to be

    def hold(self, step: Callable[[], T], deadline: float) -> T:
        """Take the step, wait until all ranks have taken it, and return what came of it here.

        Raises:
            NotJoinedError: some rank has not; the same on all.
            RuntimeError: from the store.
        """
        taken: list[T] = []
        try:
            taken.append(step())
            self.wait_for_all(deadline)
        except (NotJoinedError, WireError):  # another rank has said why, or weft itself
            raise
        except (OSError, RuntimeError) as error:
            late = time.monotonic() - deadline
            if late > patient(HELD_UP) and not self._came_in_time:
                what = (
                    f"rank {self._rank} came {late:.0f} s too late to {self._step}: was it stopped?"
                )
                failure = self._conclude(_Outcome(what, self._rank))
            else:
                failure = self.explain(error)
            if failure is not None:
                raise failure from error
        # here all ranks have taken it, as each has said after it did: this one, too
        return taken[0]

    def check(self) -> None:
        """Answer a roll call, if there was one, and raise NotJoinedError if a failure was told."""
        if self._store.check(["roll call"]):
            self._answer()
        if self._store.check(["outcome"]):
            failure = self._outcome()
            if failure is not None:
                raise failure

    def wait_for_all(self, deadline: float) -> None:
        """Wait until gloo has connected all ranks, as it has this one.

        Raises:
            TimeoutError: that is not so at the deadline, or this rank stood still until long after.
            NotJoinedError: a rank has said that it has failed.
        """
        self._store.set(f"connected {self._rank}", "")
        self._came_in_time = time.monotonic() <= deadline
        missing = list(range(self._size))
        # ended by the last rank that is connected; by what a rank says that is not; by the deadline
        for _ in pauses(deadline, 0.001, max(0.05, 0.0005 * self._size)):
            began = time.monotonic()  # to look, which takes many ranks a while
            self.check()
            while missing and self._has("connected", missing[-1]):
                missing.pop()
            if not missing:
                if began - deadline > max(HELD_UP, self._patience):
                    self._came_in_time = False
                    raise TimeoutError("the others, once connected, have waited in vain")
                failure = self._conclude(_JOINED)
                if failure is not None:
                    raise failure
                return
        raise TimeoutError("gloo has not connected all ranks")

    def explain(self, error: Exception) -> NotJoinedError | None:
        """What to raise where gloo has failed here, or others are not connected; None: they are."""
        text = in_short(str(error))
        is_own = isinstance(error, NoDevice) or (
            isinstance(error, OSError) and not isinstance(error, TimeoutError)
        )
        if is_own:
            what = f"rank {self._rank} did not {self._step} ({text})"
            return self._conclude(_Outcome(what, self._rank))
        if not self._has("connected", self._rank):  # else this rank only waited for the others
            self._store.set(f"failed {self._rank}", text)
        began = time.monotonic()
        missing = self._call_the_roll()
        if missing:
            # who has said how it went may be slow to answer
            silent = [rank for rank in missing if not self._has_said(rank)] or missing
            what = (
                f"{names(silent)} came, and then did not {self._step} (no answer for "
                f"{time.monotonic() - began:.1f} s): see that all ranks run, and reach the store"
            )
            return self._conclude(_Outcome(what, silent[0], absent=missing))
        return self._conclude(self._outcome_of_all())

    def _call_the_roll(self) -> list[int]:
        """Have all ranks say that they are there; who has not, once there has been time for that.

        None of them may have to, where one has said by then what came of it.
        """
        self._store.set("roll call", "")
        self._answer()
        missing = list(range(self._size))
        until = max(time.monotonic(), self._busy_until) + self._patience
        # ended by the last answer; by an outcome, which some may know already; by the time
        for _ in pauses(until, 0.001, 0.02):
            while missing and self._has("here", missing[-1]):
                missing.pop()
            if not missing or self._store.check(["outcome"]):
                return []
        return [rank for rank in missing if not self._has("here", rank)]

    def _outcome_of_all(self) -> _Outcome:
        """What came of it where all ranks have answered: gloo failed for one, or was late."""
        everyone = range(self._size)
        failed = [rank for rank in everyone if self._has("failed", rank)]
        late = [rank for rank in everyone if not self._has("connected", rank)]
        if failed:
            said = self._store.get(f"failed {failed[0]}").decode(errors="replace")
            what = f"gloo failed on {names(failed)} ({said})"
        elif late:
            what = f"gloo has not connected {names(late)} in time"
        else:
            return _JOINED
        return _Outcome(
            f"{what}, though all ranks answer at the store: see that no firewall closes the ports "
            "that the system chooses, and that they reach each other by the interface that "
            "WEFT_INTERFACE names"
        )

    def _has_said(self, rank: int) -> bool:
        """Whether a rank has said what came of the step there."""
        return self._has("connected", rank) or self._has("failed", rank)

    def _has(self, what: str, rank: int) -> bool:
        """Whether a rank has written a key."""
        return self._store.check([f"{what} {rank}"])

    def _answer(self) -> None:
        self._store.set(f"here {self._rank}", "")

    def _conclude(self, outcome: _Outcome) -> NotJoinedError | None:
        """Say what came of it, unless another rank has; what to raise, if that is a failure."""
        self._answer()  # who calls the roll meanwhile need not wait for this rank
        self._store.compare_set("outcome", "", json.dumps(asdict(outcome)))
        return self._outcome()

    def _outcome(self) -> NotJoinedError | None:
        """What came of it, as a failure to raise; None: all are joined."""
        outcome = _Outcome(**json.loads(self._store.get("outcome")))
        if outcome == _JOINED:
            return None
        self._wait_for_readers(outcome.absent)
        return NotJoinedError(outcome.text, outcome.culprit)

    def _wait_for_readers(self, absent: Sequence[int]) -> None:
        """Wait until all ranks know the outcome: the store may end with this program."""
        until = time.monotonic() + self._patience
        with contextlib.suppress(RuntimeError):  # another rank's program had it, and has ended
            self._answer()  # as in `_conclude`
            self._store.set(f"read {self._rank}", "")
            for rank in range(self._size):
                if rank not in absent:
                    has(self._store, f"read {rank}", until, self._size)
