"""How a wire is made: what a factory is given, and how every rank runs one at once.

A factory runs on every rank at the same time, `factory(start) -> Wire`. `make_wire` runs it, and
has the ranks vote on what came of it, so that all of them have a wire, or all raise the same error.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist

from ..base.errors import WeftError
from ..base.memory import Pool
from .interface import Features, Meeting, Reducing, Rounds, Wire

_MOMENT = 0.1  # seconds, see `seconds_left`

EXCHANGED = 1 << 14
"""Bytes that a factory may exchange at once."""


def check_nothing() -> None:
    """What `Start.check` is where nobody watches the ranks."""


@dataclass(frozen=True, slots=True)
class Start:
    """What the factory of a wire is given, on each rank.

    Attributes:
        rank: this rank's number.
        size: how many ranks there are.
        device: whose tensors the wire is to carry: the CPU. Those of accelerators have other ways.
        timeout: seconds after which the group gives up a wait; also for what the factory waits for.
        host: the name of this rank's host; ranks with equal names share a machine and its network.
        exchange: `exchange(data)` sends up to 16 KiB to all ranks, and returns every rank's, in
            rank order. All ranks call it equally often. It raises WeftError on all of them if one
            has raised in its factory, and WireError if one died.
        check: `check()` raises if another rank died, or has raised in its factory. A factory that
            waits for other ranks in another way than by `exchange` calls it meanwhile, about ten
            times a second, and lets go of what it has opened.
        memory: where to lease memory for what is received by size.
        process_group: torch's, if the caller's group was made over one.
        store: a store that all ranks share, for libraries that need one, where there is one.
    """

    rank: int
    size: int
    device: torch.device
    timeout: float
    host: str
    exchange: Callable[[bytes], list[bytes]]
    memory: Pool
    check: Callable[[], None] = check_nothing
    process_group: dist.ProcessGroup | None = None
    store: dist.Store | None = None


def seconds_left(deadline: float) -> float:
    """Seconds until a deadline by which something has to be made; at least a tenth of one.

    However late the last rank has come, the others then say who is missing, not that no time was
    left to look.

    Args:
        deadline: by `time.monotonic`.

    Example:
        >>> seconds_left(time.monotonic() - 5.0)
        0.1
    """
    return max(deadline - time.monotonic(), _MOMENT)


Factory = Callable[[Start], Wire]
"""Makes this rank's end of a wire. Every rank runs it at the same time."""


def _nothing_early() -> list[bytes]:
    """What has come early where nobody can tell."""
    return []


def make_wire(
    name: str,
    factory: Factory,
    start: Start,
    early: Callable[[], list[bytes]] = _nothing_early,
) -> Wire:
    """Run a factory on every rank at once, and return this rank's wire once all have theirs.

    If one rank has none, the wires of the others are closed.

    Args:
        name: of the wire, for errors.
        factory: makes the wire.
        start: what it is given. What `start.exchange` raises leaves here as it is.
        early: returns what other ranks have sent for the next exchange, and raises if that will not
            come about. By this `Start.check` knows.

    Raises:
        WeftError: on every rank, naming the first rank that is to blame: its factory raised, or
            returned something else than a wire of this group, or one with other features than rank
            0's, or did not exchange as often as the others'.
    """
    ballot = _Ballot(name, start.exchange, early)
    is_weak = False  # whether another rank's end may have caused the fault
    product: object = None  # what the factory has returned, a wire or not
    cause: Exception | None = None
    try:
        product = factory(dataclasses.replace(start, exchange=ballot.exchange, check=ballot.check))
        fault = _fault(product, start)
    except _GivenUp as error:
        fault = str(error)
    except Exception as error:
        fault = f"its factory raised {type(error).__name__}: {error}"
        cause = error
        is_weak = isinstance(error, ConnectionError | TimeoutError)
    # The vote is this rank's message of the next round, whatever others do in that. Only what is no
    # Exception, as Ctrl-C is none, has left without one: then others see this rank leave.
    try:
        if isinstance(product, Wire) and not fault:
            ballot.vote_for(product.features)
            return product
        ballot.vote_against(fault, is_weak=is_weak)
    except BaseException as error:
        close = getattr(product, "close", None)
        if callable(close):
            close()
        if cause is not None:
            raise error from cause
        raise


class _GivenUp(Exception):
    """What `Start.check` raises: no wire will come of it, because of another rank."""


class _Ballot:
    """The messages of one making of a wire: what factories exchange, and then the votes.

    A rank whose factory has raised votes at once, while the factories of others still exchange. So
    a message begins with what it is. Every rank sees the same messages in the same round, hence all
    of them come to the same end, without another round.
    """

    _DATA = b"d"
    _MADE = b"m"
    _FAULT = b"f"
    _LOST = b"l"  # a fault that the end of another rank's factory may have caused
    _GIVEN_UP = b"g"  # a fault that another rank's vote has caused

    def __init__(
        self,
        name: str,
        exchange: Callable[[bytes], list[bytes]],
        early: Callable[[], list[bytes]],
    ) -> None:
        self._name = name
        self._exchange = exchange
        self._early = early
        self._error: Exception | None = None  # of the round in which it all ended
        self._has_given_up = False  # `check` has raised here

    def check(self) -> None:
        """What a factory calls while it waits."""
        try:
            kinds = [each[:1] for each in self._early()]
        except Exception as error:  # which the next round raises, too
            self._has_given_up = True
            raise _GivenUp(str(error)) from error
        if self._FAULT in kinds or self._LOST in kinds:
            self._has_given_up = True
            raise _GivenUp("another rank's factory has raised")

    def exchange(self, data: bytes) -> list[bytes]:
        """What a factory calls."""
        if len(data) > EXCHANGED:
            raise WeftError(f"{len(data)} bytes are too many to exchange at once: {EXCHANGED} are")
        return self._round(self._DATA + data)

    def vote_for(self, features: Features) -> None:
        """A wire with these features was made here; raise if one cannot be used anywhere."""
        everyones = [json.loads(each) for each in self._round(self._MADE + _spelled(features))]
        for rank, found in enumerate(everyones):
            for what, first in everyones[0].items():
                if found[what] != first:
                    raise WeftError(
                        f"wire {self._name!r} cannot be used: on rank {rank} its features have "
                        f"{what} {found[what]}, on rank 0 {first}; all ranks need the same"
                    )

    def vote_against(self, fault: str, *, is_weak: bool) -> NoReturn:
        """None was made here, maybe because of another rank; raise what all ranks raise."""
        kind = self._LOST if is_weak else self._FAULT
        if self._has_given_up:
            kind = self._GIVEN_UP
        self._round(kind + fault.encode(errors="replace")[:EXCHANGED])
        raise AssertionError("a round with a fault has raised")

    def _round(self, message: bytes) -> list[bytes]:
        """Exchange a message; what the ranks said, if all of them did the same."""
        if self._error is not None:  # a factory went on after its exchange had raised
            raise self._error
        try:
            messages = self._exchange(message)
            self._raise_fault(messages)
        except Exception as error:
            self._error = error
            raise
        return [each[1:] for each in messages]

    def _raise_fault(self, messages: list[bytes]) -> None:
        """Raise if a rank has no wire, or if not all do the same in this round."""
        kinds = [each[:1] for each in messages]
        for fault in (self._FAULT, self._LOST, self._GIVEN_UP):
            if fault not in kinds:
                continue
            rank = kinds.index(fault)
            text = messages[rank][1:].decode(errors="ignore")  # the end may be cut off
            raise WeftError(f"wire {self._name!r} cannot be used: on rank {rank} {text}")
        if self._MADE in kinds and self._DATA in kinds:
            early = kinds.index(self._MADE)
            late = kinds.index(self._DATA)
            raise WeftError(
                f"wire {self._name!r} cannot be used: the factory on rank {early} has returned, "
                f"while that on rank {late} still exchanges; all call `exchange` equally often"
            )


def _fault(wire: object, start: Start) -> str:
    """What is wrong with what a factory returned; empty: nothing."""
    if not isinstance(wire, Wire):
        return f"its factory returned {type(wire).__name__}, which is no Wire"
    if not isinstance(wire.features, Features):
        return f"the wire's features are {type(wire.features).__name__}, not Features"
    for what in ("rank", "size", "device"):
        found = getattr(wire, what)
        wanted = getattr(start, what)
        if found != wanted:
            return f"the wire has {what} {found}, and the group has {wanted}"
    if wire.features.lockstep and not isinstance(wire, Rounds):
        return "the wire says lockstep, and has no `among`"
    if wire.features.reduces and not isinstance(wire, Reducing):
        return "the wire says what it reduces, and has no `all_reduce`"
    if wire.features.meets and not isinstance(wire, Meeting):
        return "the wire says how long messages of a meeting are, and has no `meet`"
    failure = wire.failure()
    if failure is not None:
        return f"the wire has failed already: {failure.text}"
    return ""


def _spelled(features: Features) -> bytes:
    """The features as JSON, the same on ranks that have the same."""
    values = dataclasses.asdict(features)
    values["reduces"] = sorted(f"{op} of {dtype}" for op, dtype in features.reduces)
    return json.dumps(values).encode()
