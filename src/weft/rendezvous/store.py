"""How ranks exchange values at a store, before there is a wire."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from ..base import watch
from ..base.errors import AbsentError, WeftError, names
from ..base.pace import patient
from ..base.within import within
from .address import server_of

_SHORTEST = 0.001  # seconds of the first pause between two looks
_GROWTH = 1.5  # from one pause to the next
HELD_UP = 1.0  # seconds after a deadline from which on a rank itself is late, and was stopped

Late = tuple[int, Callable[[], str]] | None
"""For the line about a slow wait (`weft.init(watch=)`): the rank that waits, and a function that
says who is missing, or "" if nobody is any more. None: print no line."""

Failure = tuple[str, int | None]
"""Why ranks are not joined, as a clause, and the rank to blame, if there is one."""

Look = Callable[[Callable[[], Sequence[int]]], None] | None
"""Called by who waits for ranks, as long as it waits, with a function that finds those that have
not come: raises what ends the wait. None: nothing does."""


class SilentStoreError(RuntimeError):
    """A store has not answered in time: the process that hosts it is stopped, or cut off."""


class AnsweringStore:
    """A store each of whose requests is answered by a deadline, or raises.

    torch waits for the answer of a TCPStore for as long as the connection stands, and that of a
    host that is stopped does.
    """

    def __init__(self, store: dist.Store, deadline: float) -> None:
        """`deadline`: by `time.monotonic`."""
        self._store = store
        self._deadline = deadline
        self._host, self._port = server_of(store)
        self._is_silent = False

    def part(self, name: str) -> AnsweringStore:
        """The store of the keys that begin with a name."""
        return AnsweringStore(dist.PrefixStore(name, self._store), self._deadline)

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask(self._store.check, [*keys]))

    def get(self, key: str) -> bytes:
        return bytes(self._ask(self._store.get, key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return list(self._ask(self._store.multi_get, [*keys]))

    def set(self, key: str, value: str) -> None:
        self._ask(self._store.set, key, value)

    def compare_set(self, key: str, expected: str, value: str) -> None:
        self._ask(self._store.compare_set, key, expected, value)

    def add(self, key: str, number: int) -> int:
        return int(self._ask(self._store.add, key, number))

    def _ask(self, request: Callable[..., Any], *args: object) -> Any:
        """The answer to a request.

        Raises:
            SilentStoreError: none came in time.
            RuntimeError: from the store.
        """
        if self._host is None:  # a file, or this process's own memory
            return request(*args)
        if not self._is_silent:
            try:
                return within(self._deadline - time.monotonic(), lambda: request(*args))
            except TimeoutError:
                self._is_silent = True
        raise SilentStoreError(f"the store at {self._host} port {self._port} does not answer")


def exchange(
    store: dist.Store,
    what: str,
    own: object,
    rank: int,
    size: int,
    timeout: float,
    missing: str,
    look: Look = None,
) -> list[Any]:
    """Exchange a value between all ranks, as JSON; the values in rank order. Collective.

    Args:
        store: that all ranks share.
        what: the name of the keys, the same on every rank.
        own: this rank's value.
        rank, size: this rank, and how many there are.
        timeout: seconds in which all must have come.
        missing: what the error says of the others: "did not join".
        look: called as long as not all have come.

    Raises:
        AbsentError: some ranks wrote nothing in time.
        RuntimeError: from the store.
    """
    deadline = time.monotonic() + timeout
    space = AnsweringStore(store, deadline)
    space.set(f"{what}/{rank}", json.dumps(own))
    if space.add(f"{what}/count", 1) >= size:
        space.set(f"{what}/all", "")  # so that a look at whether all have come is one request
    keys = [f"{what}/{each}" for each in range(size)]

    def absent() -> list[int]:
        return [each for each, key in enumerate(keys) if not space.check([key])]

    def who_is_absent() -> str:
        ranks = absent()
        return f"{names(ranks)} {missing} so far" if ranks else ""

    look_again = None if look is None else functools.partial(look, absent)
    if not has(space, f"{what}/all", deadline, size, (rank, who_is_absent), look_again):
        ranks = absent()
        if ranks:  # else the last one came just now
            raise AbsentError(ranks, missing)
    return [json.loads(value) for value in space.multi_get(keys)]


def first_to_fail(
    store: dist.Store, rank: int, size: int, failure: Failure, lost: Sequence[int] = ()
) -> Failure:
    """What the first rank said that gave up, which all say; this rank may be the first.

    A rank that goes on after it was stopped finds nobody, and hears by this that it is to blame.
    Others may give up a moment later, and the store may end with this program: they are waited for.

    Args:
        store: that all ranks share.
        rank, size: this rank, and how many there are.
        failure: what this rank says if it is the first.
        lost: the ranks that will not read it, if this rank is the first.
    """
    answering = AnsweringStore(store, time.monotonic())
    with contextlib.suppress(RuntimeError):  # the store may be what failed
        answering.compare_set("failure", "", json.dumps([*failure, *lost]))
        text, culprit, *lost = json.loads(answering.get("failure"))
        failure = text, culprit
        answering.set(f"read/{rank}", "")
        until = time.monotonic() + patient(HELD_UP)
        for each in {*range(size)}.difference(lost):
            has(answering, f"read/{each}", until, size)
    return failure


def has(
    store: dist.Store | AnsweringStore,
    key: str,
    deadline: float,
    ranks: int,
    late: Late = None,
    look: Callable[[], object] | None = None,
) -> bool:
    """Wait for a key; whether it was there in time.

    `store.wait` is not used: no other thread of the process could use a TCPStore meanwhile, not
    even to write what a peer waits for, and it prints warnings at the deadline.

    Args:
        store: where the key will be.
        key: its name.
        deadline: by `time.monotonic`.
        ranks: how many may be waiting; with more of them each asks less often.
        late: as for `pauses`.
        look: called as long as it is not there; raises what ends the wait.

    Raises:
        RuntimeError: from the store.
    """
    if not isinstance(store, AnsweringStore):
        store = AnsweringStore(store, deadline)
    for _ in pauses(deadline, _SHORTEST, max(0.02, 0.0005 * ranks), late):
        if store.check([key]):
            return True
        if look is not None:
            look()
    return False


def pauses(
    deadline: float, first: float = 0.01, last: float = 1.0, late: Late = None
) -> Iterator[None]:
    """Yield once, then after longer and longer pauses, and a last time at the deadline.

    Pauses are random, so that a thousand processes do not ask a server at the same moment, by no
    generator that the program may have seeded. After the seconds of `weft.init(watch=)` a line
    about the wait is printed, if `late` is given.
    """
    began = time.monotonic()
    slow = math.inf
    if late:
        with contextlib.suppress(WeftError):  # which is raised once all ranks have been told
            slow = watch.chosen()
    while True:
        yield
        now = time.monotonic()
        if late and now - began >= slow:
            slow = math.inf
            if why := late[1]():
                watch.tell(late[0], now - began, (0, ""), why)
        left = deadline - now
        if left <= 0:
            return
        time.sleep(min(left, first * random.SystemRandom().uniform(0.5, 1.0)))
        first = min(last, first * _GROWTH)
